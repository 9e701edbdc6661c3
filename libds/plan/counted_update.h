// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a step does beside its layers, run without memory, kernels and other ranks: a rank's shards and the end of a
// step (update/update) over a device and communicators that only count. What they take, send and compute is what an
// engine's do.

#include <memory>
#include <optional>

#include "plan/counting_device.h"
#include "plan/run_plan.h"
#include "update/update.h"

namespace ds::plan {

// What a rank saves for a layout like its own: beside states; and, of a worker of DiLoCo behind the first, instead of
// them.
struct RankLocalBytes {
  i64 beside = 0, instead = 0;
  i64 sum() const noexcept { return beside + instead; }
};

class CountedUpdate {
 public:
  // native: Stream::native of what `ops` are called with, host_native of those of a host beside a GPU. reduced: gets
  // what the groups' communicators reduce. `plan` outlives it.
  CountedUpdate(const RunPlan& plan, const OpTable& ops, void* native = nullptr,
                std::function<void(const Operation&, int size)> reduced = {}, void* host_native = nullptr);

  // What parameters, gradients, states, updates and inputs of layers that are kept away from the device take.
  const MemoryLedger& ledger() const noexcept { return ledger_; }
  // And what is in files instead.
  const MemoryLedger& files() const noexcept { return offload_.files(); }
  const std::vector<i64>& dp_allocations() const noexcept { return groups_.front()->allocations(); }
  std::vector<std::vector<i64>> zeropp_allocations() const;
  const std::vector<i64>& outer_allocations() const noexcept { return outer_.allocations(); }

  // What follows is of the gradients of a chunk (its place in RunPlan::chunks; nothing: of the update), and happens so
  // many times in a step.
  using Enter = FunctionRef<void(std::optional<size_t> chunk, i64 times)>;
  // All of a step of who trains, once for each micro-batch that does something else; `number`: of its update.
  // `meets`: with the meetings of DiLoCo behind it.
  void run(Enter enter, i64 number, bool meets = true);
  // Its gathers of parameters by plan; its uses of inputs of layers that are kept away from the device. evaluated:
  // since the last update, so that all second shards are there already.
  void gather(bool evaluated = false);
  void use_inputs();

  // What has been counted so far was of a step before: files are as a step finds them now.
  void begin_again();
  // Of a step that has been run, to and from files: of states, and of arrays.
  std::pair<offload::FileCounts, offload::FileCounts> file_traffic() const noexcept;
  // The same, between a GPU and its host.
  offload::HostCopies copies() const noexcept { return offload_.copies() - copies_before_ + repeated_copies_; }

  // The messages of DiLoCo's workers when a fragment meets. norm_of_meeting(): the norm after a meeting, which is
  // statistics.
  std::map<std::string, CommCount> meeting(i64 fragment);
  void norm_of_meeting();

  RankLocalBytes rank_local_bytes();

  // By "axis.collective", of a step that has been run; statistics are left out. The largest calls are noted in `calls`.
  std::map<std::string, CommCount> traffic(MeshCalls& calls) const;

 private:
  CountingCommunicator* split(const zero::ShardsPlan& s, const std::string& name) const;
  // Adds what was sent since the last time, so many times.
  void take_messages(i64 times);

  const RunPlan& plan_;
  Addresses addresses_;
  MemoryLedger ledger_;
  CountingDevice device_, host_;
  std::vector<std::unique_ptr<CountingCommunicator>> groups_;  // by RunPlan::shards
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
