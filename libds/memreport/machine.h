// SPDX-License-Identifier: Apache-2.0
#pragma once
// Machine: how long an op takes on one rank while all cores of its node compute, measured with the ops that training
// calls, or given by peaks; as a value that is kept in JSON ("ds-machine/1"). The time of a call is the largest of what
// its products, its bytes and its start take (the roofline: Williams, Waterman, Patterson 2009), with the rates of that
// op at that size.

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "device/device.h"
#include "plan/op_tally.h"

namespace ds::memreport {

// A rate by the size of a call: between measured sizes linear in the logarithm of the size, beyond them constant.
class Rate {
 public:
  Rate() = default;
  explicit Rate(double per_s) : points_{{1.0, per_s}} {}
  // (size, per second), sizes ascending, both above zero.
  explicit Rate(std::vector<std::pair<double, double>> points) : points_(std::move(points)) {}

  double at(double size) const noexcept;
  double seconds(double size) const noexcept { return size > 0 ? size / at(size) : 0; }
  bool empty() const noexcept { return points_.empty(); }
  const std::vector<std::pair<double, double>>& points() const noexcept { return points_; }
  bool operator==(const Rate&) const = default;

 private:
  std::vector<std::pair<double, double>> points_;
};

using OpRates = std::map<std::string, std::map<DType, Rate>, std::less<>>;

struct Machine {
  std::string device;  // "cpu.avx512_bf16"
  int ranks_per_node = 1;
  int threads = 1;  // of each rank
  int cores = 1;    // of the node
  // Computing and communicating have streams of their own, beside each other: a GPU.
  bool own_stream = false;
  double op_overhead_s = 0;  // the least time of a call
  // FLOP/s: matmul by the FLOPs of a call, attention_fwd and attention_bwd by those of one head, grouped_matmul and
  // grouped_matmul_grad by those with one matrix.
  OpRates flops;
  // B/s by the bytes of a call: of what fits in caches, and of memory. Empty: bytes take no time.
  Rate memory;
  // B/s in caches of ops that compute more than they move; others go by `memory`.
  OpRates bytes;

  // B/s of a node's disk, past the page cache; 0: not known.
  double disk_read = 0, disk_write = 0;
  // B/s each way between a GPU and its host, and of all updates of optimizers on a node's processors; 0: not known.
  double host_link = 0, host_updates = 0;
  bool knows_host() const noexcept { return host_link > 0 && host_updates > 0; }

  // Threads of all ranks of a node per core; 0 if ranks do not compute on cores.
  double threads_per_core() const noexcept {
    return own_stream ? 0 : static_cast<double>(ranks_per_node) * threads / cores;
  }
  // Whether communication goes on beside computing without taking its cores.
  bool hides_communication() const noexcept { return threads_per_core() < 1; }
  // FLOP/s of a large product; Errc::Config if nothing is known for this type.
  double matmul_flops(DType dtype) const;
  double seconds(const plan::OpCall& call) const;
  double seconds(const plan::OpTally& tally) const;
  bool operator==(const Machine&) const = default;
};

// Constant rates: what a data sheet says, or what part of it a user expects; memory_bandwidth 0: bytes take no time.
// Ops start in no time.
Machine machine_of_peaks(DType dtype, double matmul_flops, double memory_bandwidth, int ranks_per_node);

std::string machine_json(const Machine& machine);
// Throws Errc::Config, naming `name`, for what is no such document.
Machine read_machine(std::string_view json, std::string_view name);

struct MeasureOptions {
  int ranks = 1;    // of this node, which work at once
  int threads = 1;  // of each
  int cores = 0;    // 0: those that this process may run on
  std::vector<DType> dtypes = {DType::F32, DType::BF16, DType::F16};
  double seconds_per_op = 0.006;
  int rounds = 6;  // over all ops, of which the median counts for each
};
using MakeDevice = std::function<std::unique_ptr<Device>(int rank)>;
// A few seconds. Of an op's calls in a round the first quartile counts, so that ranks with more threads than there are
// cores are measured while they have them; of rounds the median: what else goes on here, a run will meet too. Takes
// about 200 MiB for each rank for the time of the call. `make`: null for the CPU.
Machine measure_machine(const MeasureOptions& options, const MakeDevice& make = {});

}  // namespace ds::memreport
