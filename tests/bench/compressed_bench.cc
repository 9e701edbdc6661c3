// SPDX-License-Identifier: Apache-2.0
// Collectives that send codes beside the ones that send elements: all-gather of bf16 weights (8 bits), reduce-scatter
// of bf16 gradients (4 bits; all ranks in one node, and each in a node of its own), all-reduce of an fp32 momentum (1
// bit); over shm and mpi. All in one run, taking turns, the fastest of each; times are those of the slowest rank. On
// one machine elements travel at the speed of memory: there the ratio of times is the cost of compressing, and the
// ratio of bytes is what a network would save.
//   mpirun --bind-to core --mca pml ob1 -n 2 compressed_bench [largest number of elements]

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <random>

#include "comm/make_communicator.h"
#include "comm/one_bit.h"
#include "comm/quantized.h"

namespace {

using namespace ds;

struct Way {
  std::string name;
  std::function<void()> plain, compressed;
};

double seconds(const std::function<void()>& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void measure(Communicator& c, Device& device, i64 largest) {
  const i64 P = c.size(), rank = c.rank();
  const int self[] = {static_cast<int>(rank)};
  const auto alone = c.group(self, "alone", {});
  MemoryLedger ledger;
  const Buffer weights = c.allocate(ledger, Tag::Gathered, largest * 2),
               momentum = c.allocate(ledger, Tag::Buckets, largest * 4);
  const Buffer shard(ledger, Tag::Params, largest / P * 2), target(ledger, Tag::GradAccum, largest / P * 4);
  for (size_t i = 0; i < static_cast<size_t>(largest / P); ++i)
    shard.as<bf16>()[i] = to_bf16(static_cast<float>(i % 1000) * 1e-3f - 0.5f);
  if (rank == 0)
    fmt::print("{:>4} {:>9} {:<33} {:>10} {:>14} {:>14}\n", c.backend(), "elements", "", "plain us", "compressed us",
               "plain / compr.");
  for (i64 n = 1 << 16; n <= largest; n *= 8) {
    const i64 slice = n / P;
    QuantizedAllGather gather(c, device, ledger, Tag::Comm, slice);
    QuantizedReduceScatter one_node(&c, *alone, device, ledger, Tag::Comm, slice),
        many_nodes(nullptr, c, device, ledger, Tag::Comm, slice);
    OneBitAllReduce one_bit(c, device, ledger, Tag::Comm, n);
    const TensorView full = TensorView::of(weights.data(), DType::BF16, {slice * P}),
                     own = TensorView::of(shard.data(), DType::BF16, {slice}),
                     sum = TensorView::of(target.data(), DType::F32, {slice}),
                     m = TensorView::of(momentum.data(), DType::F32, {n});
    const auto plain_gather = [&] {
      device.copy(full.as<char>() + rank * slice * 2, own.data, slice * 2);
      const AllGatherSegment segment{full.data, slice * 2};
      c.all_gather({&segment, 1}, "bench").wait();
    };
    const auto plain_reduce = [&] {
      const ReduceScatterSegment segment{full.data, sum.as<float>(), slice};
      c.reduce_scatter({&segment, 1}, DType::BF16, false, "bench").wait();
    };
    const Way ways[] = {
        {"all-gather, 8 bits", plain_gather,
         [&] {
           gather.start(own, "bench");
           gather.finish(full);
         }},
        {"reduce-scatter, 4 bits, one node", plain_reduce, [&] { one_node.run(full, sum, false, "bench"); }},
        {"reduce-scatter, 4 bits, nodes", plain_reduce, [&] { many_nodes.run(full, sum, false, "bench"); }},
        {"all-reduce, 1 bit", [&] { c.all_reduce(m.data, n, DType::F32, ReduceOp::Sum, "bench").wait(); },
         [&] { one_bit.run(m, "bench"); }}};
    for (const Way& way : ways) {
      double best[2] = {1e9, 1e9};
      for (i64 turn = 0; turn < std::clamp<i64>((i64{1} << 26) / n, 5, 100); ++turn) {
        for (size_t w = 0; w < 2; ++w) {
          std::fill_n(m.as<float>(), n, 0.5f);
          c.barrier("bench");
          best[w] = std::min(best[w], seconds(w == 0 ? way.plain : way.compressed));
        }
      }
      for (double& b : best) c.all_reduce(&b, 1, DType::F64, ReduceOp::Max, "bench").wait();
      if (rank == 0)
        fmt::print("{:>4} {:>9} {:<33} {:>10.1f} {:>14.1f} {:>14.2f}\n", c.backend(), n, way.name, best[0] * 1e6,
                   best[1] * 1e6, best[0] / best[1]);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const i64 largest = argc > 1 ? std::atoll(argv[1]) : i64{1} << 24;
  auto mpi = make_mpi_communicator({});
  auto job = static_cast<u64>(std::random_device()()) << 32 | std::random_device()();
  mpi->broadcast(&job, sizeof job, 0, "bench").wait();
  auto shm = make_shm_communicator(fmt::format("bench-{:016x}", job), mpi->rank(), mpi->size(), {});
  const auto device = make_cpu_device(*cpu_ops(), 1);
  measure(*shm, *device, largest);
  measure(*mpi, *device, largest);
}
