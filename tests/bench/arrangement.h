// SPDX-License-Identifier: Apache-2.0
#pragma once
// One configuration trained in several arrangements of ranks, which are threads of one process, so that all can take
// turns step by step: other load of the machine affects them all alike.

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/make_communicator.h"
#include "ds/config.h"
#include "engine/engine.h"
#include "mesh/from_config.h"
#include "plan/planned.h"
#include "run/connect.h"

namespace ds::bench {

inline double wall_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Processor time of this process, all threads.
inline double cpu_now() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto s = [](const timeval& t) { return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec); };
  return s(usage.ru_utime) + s(usage.ru_stime);
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// body(rank) on a thread for each rank; the first error is thrown here.
inline void on_ranks(int ranks, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::exception_ptr error;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  if (error) std::rethrow_exception(error);
}

// Reads a configuration with changes ("a.b=v") for so many ranks, or prints its errors and ends the program.
inline Config read_config(const std::string& path, const std::vector<std::string>& set, int ranks) {
  const ConfigResult read = load_config(path, set, ranks);
  if (!read.ok()) {
    std::fprintf(stderr, "%s\n", read.message().c_str());
    std::exit(2);
  }
  return read.config;
}

class Arrangement {
 public:
  using Transport = std::function<std::unique_ptr<Communicator>(std::unique_ptr<Communicator>)>;
  // transport: the transport through which the ranks talk instead, if any.
  Arrangement(std::string name, const std::string& path, const std::vector<std::string>& set, int ranks, int threads,
              const Transport& transport = {})
      : name_(std::move(name)), config_(read_config(path, set, ranks)), parts_(static_cast<size_t>(ranks)) {
    auto comms = make_thread_communicators(ranks, {.timeout_s = 3600, .progress_thread = config_.zero.overlap_comm});
    for (auto& comm : comms) comm = transport ? transport(std::move(comm)) : std::move(comm);
    on_ranks(ranks, [&](int rank) {
      Part& part = parts_[rank];
      part.device = make_cpu_device(*cpu_ops(), threads);
      part.mesh = std::make_unique<Mesh>(std::move(comms[rank]), mesh_shape(config_, ranks),
                                         CommOptions{.timeout_s = 3600, .progress_thread = config_.zero.overlap_comm});
      part.engine = std::make_unique<engine::Engine>(config_, *part.mesh, part.ledger, *part.device);
      part.engine->init_weights();
      const plan::RunPlan& plan = part.engine->plan();
      // The same samples in the same order, however they are shared out.
      const i64 m = plan.micro_batches, sample = plan.sequence_length, P = part.mesh->data_size();
      for (i64 j = 0; j < m; ++j) {
        for (i64 b = 0; b < plan.B; ++b) {
          const RngKey key{7, static_cast<u32>((j * P + part.mesh->data_rank()) * plan.B + b), 0};
          for (i64 t = 0; t <= sample; ++t) {
            const i32 id = static_cast<i32>(key.bits(static_cast<u64>(t)) % config_.model.vocab_size);
            if (t < sample) part.ids.push_back(id);
            if (t > 0) part.targets.push_back(id);
          }
        }
      }
    });
  }
  // The ranks leave together.
  ~Arrangement() {
    on_ranks(num_ranks(), [&](int rank) {
      Part& part = parts_[rank];
      part.engine.reset();
      part.mesh.reset();
    });
  }
  Arrangement(const Arrangement&) = delete;
  Arrangement& operator=(const Arrangement&) = delete;

  // One step of all ranks; its wall time and processor time are noted unless it is to warm up.
  void step(bool note = true) {
    const double cpu = cpu_now(), start = wall_now();
    on_ranks(num_ranks(), [&](int rank) {
      Part& part = parts_[rank];
      try {
        part.mesh->reset_counts();
        const StepRecord report = part.engine->train_step({part.ids, part.targets});
        if (rank == 0) last_ = report;
      } catch (const Error& e) {
        part.mesh->abort(e);
        throw;
      }
    });
    if (!note) return;
    wall_.push_back(wall_now() - start);
    cpu_.push_back(cpu_now() - cpu);
  }

  const std::string& name() const noexcept { return name_; }
  const Config& config() const noexcept { return config_; }
  int num_ranks() const noexcept { return static_cast<int>(parts_.size()); }
  const StepRecord& last() const noexcept { return last_; }
  const engine::Engine& engine(int rank) const noexcept { return *parts_[rank].engine; }
  const MemoryLedger& ledger(int rank) const noexcept { return parts_[rank].ledger; }
  double wall() const { return median(wall_); }
  double cpu() const { return median(cpu_); }
  // The median of its turns over those of another, turn by turn.
  double wall_over(const Arrangement& other) const { return ratio(wall_, other.wall_); }
  double cpu_over(const Arrangement& other) const { return ratio(cpu_, other.cpu_); }
  // Bytes that all ranks sent in the last step.
  i64 wire_bytes() const {
    i64 bytes = 0;
    for (const Part& part : parts_) {
      for (const auto& [tag, count] : part.mesh->counts()) bytes += count.bytes;
    }
    return bytes;
  }

 private:
  struct Part {
    MemoryLedger ledger;
    std::unique_ptr<Device> device;
    std::unique_ptr<Mesh> mesh;
    std::unique_ptr<engine::Engine> engine;
    std::vector<i32> ids, targets;
  };
  static double ratio(const std::vector<double>& a, const std::vector<double>& b) {
    std::vector<double> ratios;
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) ratios.push_back(a[i] / b[i]);
    return median(ratios);
  }

  std::string name_;
  Config config_;
  std::vector<Part> parts_;
  StepRecord last_;
  std::vector<double> wall_, cpu_;
};

// Turns: in each, every arrangement takes a step.
inline void take_turns(const std::vector<std::unique_ptr<Arrangement>>& all, int turns) {
  for (const auto& a : all) a->step(false);
  for (int turn = 0; turn < turns; ++turn) {
    for (const auto& a : all) a->step();
  }
}

}  // namespace ds::bench
