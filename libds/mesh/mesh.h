// SPDX-License-Identifier: Apache-2.0
#pragma once
// The mesh: named axes whose sizes multiply to the world size, and the communicators of this rank over them.
//
//   dp  data      ranks with the same parameters and different samples
//   sp  sequence  ranks with the same parameters and different tokens of the same samples
//   tp  tensor    ranks with different parts of the same layers
//   pp  pipeline  ranks with different layers
//   workers       of DiLoCo: ranks with different samples, which exchange parameters only in some steps
//
//   rank = (((worker * pp_size + pp) * dp_size + dp) * sp_size + sp) * tp_size + tp
//
// tp communicates most, several times per layer; it is innermost, so that its ranks share a node. pp sends one
// activation per micro-batch and is the outermost axis of a worker. Megatron and DeepSpeed ([pipe, data, model]) use
// the same order.
//
// The world communicates host memory (counters, files, the division of work), an axis the memory of its device. On the
// CPU, where both are the same, dp is the world itself if it covers it. Axes of size one share a communicator.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/message_tag.h"
#include "comm/staging_size.h"
#include "ds/communicator.h"
#include "ds/mesh.h"

namespace ds {

MeshCoord coord_of(const MeshShape& shape, int rank);
int rank_at(const MeshShape& shape, const MeshCoord& coord);

// Ranks of the group that contains `coord`, ordered by their ranks in the group.
std::vector<int> dp_ranks(const MeshShape&, const MeshCoord&);  // all (dp, sp), sp innermost
std::vector<int> tp_ranks(const MeshShape&, const MeshCoord&);
std::vector<int> sp_ranks(const MeshShape&, const MeshCoord&);
std::vector<int> pp_ranks(const MeshShape&, const MeshCoord&);
std::vector<int> outer_ranks(const MeshShape&, const MeshCoord&);                  // the same place in each worker
std::vector<int> split_ranks(const MeshShape&, const DpSplit&, const MeshCoord&);  // all (those of dp, sp)
int split_size(const MeshShape&, const DpSplit&);
int split_rank(const MeshShape&, const DpSplit&, const MeshCoord&);  // this rank's number among split_ranks()

// The need of a mesh's communicators in /dev/shm (shm_needed_bytes) if all ranks share one node, including the channels
// of their messages. Each span lists the sizes that a rank allocates from that axis: dp, tp, each split of dp, and the
// axis of workers.
i64 mesh_shm_bytes(const MeshShape&, std::span<const i64> dp_allocations, std::span<const i64> tp_allocations,
                   std::span<const DpSplit> splits = {}, std::span<const std::vector<i64>> split_allocations = {},
                   std::span<const i64> outer_allocations = {});

// The largest calls of a rank over the world, over each axis and over other splits of dp; for pp, over each of its two
// communicators.
struct MeshCalls {
  LargestCalls world, down, up;
  struct Group {
    int ranks = 1;
    LargestCalls largest = {};
    void add(int size, const LargestCalls& calls) {
      ranks = size;
      largest.add(calls);
    }
  };
  ByAxis<Group> axes = {};
  std::map<std::string, Group> splits = {};
  // A split of dp, which is an axis if its name is that of one.
  Group& split(const std::string& name);
};
// Predicts Mesh::staging_bytes over host memory from the largest calls. Empty: unknown (see staging_size).
std::optional<i64> mesh_staging_size(const MeshShape&, std::string_view backend, const MeshCalls&);

class Mesh {
 public:
  // Creates the device-memory communicator of an axis over the ranks of `host`, which outlives it.
  using OverDevice = std::function<std::unique_ptr<Communicator>(Communicator& host, const CommOptions&)>;

  // Collective over the world. `options` apply to dp; the other axes use its timeout, ops and device. Without
  // `over_device`, all axes are over host memory. Each split of dp becomes another group.
  Mesh(std::unique_ptr<Communicator>&& world, const MeshShape& shape, const CommOptions& options = {},
       const OverDevice& over_device = {}, std::vector<DpSplit> splits = {});
  // A mesh with one axis, dp, over host memory.
  explicit Mesh(std::unique_ptr<Communicator>&& world) : Mesh(std::move(world), {.dp = world->size()}) {}

  const MeshShape& shape() const noexcept { return shape_; }
  const MeshCoord& coord() const noexcept { return coord_; }
  int rank() const noexcept { return world_->rank(); }
  int world_size() const noexcept { return world_->size(); }
  // The rank's place along all axes with different samples; it decides the samples of this rank.
  int data_rank() const noexcept { return coord_.worker * shape_.dp + coord_.dp; }
  int data_size() const noexcept { return shape_.data_size(); }

  Communicator& world() const noexcept { return *world_; }
  // All dp and sp: ranks with the same parameters, over which ZeRO shards them.
  Communicator& dp() const noexcept { return *dp_; }
  // Ranks at the same place in each worker: rank = worker. Operations run inside the call.
  Communicator& outer() const noexcept { return *outer_; }
  // Groups over which gradients may be reduced: 0 is dp(), followed by the splits in order.
  Communicator& group(size_t i) const noexcept { return i == 0 ? *dp_ : *groups_[i - 1]; }
  const std::vector<DpSplit>& splits() const noexcept { return splits_; }
  // The group of the split with this name; null if there is none.
  Communicator* split(std::string_view name) const noexcept;
  // All operations except sends run inside the call, since their results are needed at once.
  Communicator& tp() const noexcept { return *tp_; }
  Communicator& sp() const noexcept { return *sp_; }
  // By axis: the communicators above, and splits of dp whose name is that of an axis. Null: the mesh has no such axis.
  const ByAxis<Communicator*>& by_axis() const noexcept { return by_axis_; }
  // Two communicators over the pipeline stages, rank = stage, one for each way of messages: to the next stage, and to
  // the previous one. Their operations run in the background, so that receives can be posted ahead. Each way has its
  // own order, and a waiting message does not block the other way.
  Communicator& down() const noexcept { return *down_; }
  Communicator& up() const noexcept { return *up_; }
  // For small collectives of the stages outside the pipeline's messages. Uses the communicator of the way up, which has
  // no message in flight then; a third communicator would cost memory.
  Communicator& pp() const noexcept { return *up_; }

  // Communicator::use_links() of all axes.
  void use_links();

  // Aborts all ranks (Communicator::abort).
  void abort(const Error& why) noexcept { world_->abort(why); }

  // Returns when no operation of this rank is running in any communicator (Communicator::drain).
  void drain() noexcept;

  // Sums over all communicators; one that serves several axes counts once.
  std::map<std::string, CommCount> counts() const;
  void reset_counts();
  i64 staging_bytes() const noexcept;

 private:
  // A host-memory communicator, or a device's and the host-memory communicator below it.
  struct Comm {
    std::unique_ptr<Communicator> host, device;
    Communicator& top() const noexcept { return device ? *device : *host; }
  };
  Communicator* make_axis(const std::vector<int>& ranks, std::string_view name, const CommOptions& options,
                          const OverDevice& over_device);

  MeshShape shape_;
  std::vector<DpSplit> splits_;
  std::unique_ptr<Communicator> world_;
  MeshCoord coord_;
  std::vector<Comm> axes_;
  Communicator* alone_ = nullptr;  // serves all axes of size one
  Communicator *dp_ = nullptr, *outer_ = nullptr, *tp_ = nullptr, *sp_ = nullptr, *down_ = nullptr, *up_ = nullptr;
  std::vector<Communicator*> groups_;  // of the splits
  ByAxis<Communicator*> by_axis_;
};

}  // namespace ds
