// SPDX-License-Identifier: Apache-2.0
#pragma once
// A step without its layers, run to be counted: a rank's shards and the end of a step (update/update) over a device and
// communicators that only count (plan/counting_device). They allocate, send and compute what an engine's do.

#include <memory>
#include <optional>

#include "plan/counting_device.h"
#include "plan/run_plan.h"
#include "update/update.h"

namespace ds::plan {

// Bytes that a rank saves for resuming at the same layout: beside its states, and instead of them, as DiLoCo's workers
// after the first do.
struct RankLocalBytes {
  i64 beside = 0, instead = 0;
  i64 sum() const noexcept { return beside + instead; }
};

class CountedUpdate {
 public:
  // native: Stream::native in calls of `ops`; host_native: the same in those of a host beside a GPU. reduced: called
  // for each reduction of the groups' communicators. `plan` outlives this object.
  CountedUpdate(const RunPlan& plan, const OpTable& ops, void* native = nullptr,
                std::function<void(const Operation&, int size)> reduced = {}, void* host_native = nullptr);

  // Memory of parameters, gradients, states, updates, and inputs of layers kept away from the device.
  const MemoryLedger& ledger() const noexcept { return ledger_; }
  // The part of them that is in files.
  const MemoryLedger& files() const noexcept { return offload_.files(); }
  const std::vector<i64>& dp_allocations() const noexcept { return groups_.front()->allocations(); }
  std::vector<std::vector<i64>> zeropp_allocations() const;
  const std::vector<i64>& outer_allocations() const noexcept { return outer_.allocations(); }

  // Called before what belongs to the gradients of a chunk (its place in StageCalls::chunks) or, without one, to the
  // update, and happens `times` times in a step.
  using Enter = FunctionRef<void(std::optional<size_t> chunk, i64 times)>;
  // A training step: each kind of micro-batch once, then the update of that number. `meets`: with the meetings of
  // DiLoCo after it.
  void run(Enter enter, i64 number, bool meets = true);
  // The step's gathers of parameters, by plan. evaluated: an evaluation came after the last update, so that all second
  // shards are there already. use_inputs(): its uses of inputs of layers kept away from the device.
  void gather(bool evaluated = false) {
    gather([](std::optional<size_t>, i64) {}, evaluated);
  }
  void gather(Enter enter, bool evaluated);
  void use_inputs();

  // The publication of parameters that were set, which belongs to no step: only its largest calls count.
  void publish();

  // Starts the count of another step, which finds files as the steps before left them.
  void begin_again();
  // Bytes that the step read from and wrote to files: of states, and of arrays.
  std::pair<offload::FileCounts, offload::FileCounts> file_traffic() const noexcept;
  // Bytes that the step copied between a GPU and its host.
  offload::HostCopies copies() const noexcept { return offload_.copies() - copies_before_ + repeated_copies_; }

  // The messages of DiLoCo's workers when a fragment meets. norm_of_meeting(): the norm after a meeting, which is
  // statistics.
  std::map<std::string, CommCount> meeting(i64 fragment);
  void norm_of_meeting();

  RankLocalBytes rank_local_bytes();
  // Numbers that a save collects from all ranks at once, for each kind of saved state that has some.
  std::vector<i64> saved_numbers() const;

  // Messages of the step by "axis.collective", without statistics. Notes the largest calls in `calls`.
  std::map<std::string, CommCount> traffic(MeshCalls& calls) const;

 private:
  CountingCommunicator* split(const zero::ShardsPlan& s, const std::string& name) const;
  // Adds what was sent since the last time, so many times.
  void take_messages(i64 times);

  const RunPlan& plan_;
  Addresses addresses_;
  MemoryLedger ledger_;
  CountingDevice device_, host_;
  std::vector<std::unique_ptr<CountingCommunicator>> groups_;  // those of RunPlan::shards
  CountingCommunicator tp_, pp_, outer_;
  std::map<std::string, std::unique_ptr<CountingCommunicator>> zeropp_;  // by zeropp_splits
  offload::Offload offload_;
  zero::AllShards shards_;
  std::unique_ptr<zero::TierArray> inputs_;
  std::optional<update::Update> update_;  // of who trains
  std::map<std::string, CommCount> traffic_;
  offload::FileCounts states_before_, all_before_;
  offload::HostCopies copies_before_;
  // By micro-batches that were run once for all.
  offload::FileCounts repeated_;
  offload::HostCopies repeated_copies_;
};

}  // namespace ds::plan
