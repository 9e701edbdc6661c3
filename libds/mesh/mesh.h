// SPDX-License-Identifier: Apache-2.0
#pragma once
// The mesh: named axes whose sizes multiply to the world size, and the communicators of this rank over them.
//
//   dp  data      ranks with the same parameters and other samples
//   sp  sequence  ranks with the same parameters and other tokens of the same samples
//   tp  tensor    ranks with other parts of the same layers
//   pp  pipeline  ranks with other layers
//   workers       of DiLoCo: ranks with other samples, whose parameters meet in some steps alone
//
//   rank = (((worker * pp_size + pp) * dp_size + dp) * sp_size + sp) * tp_size + tp
//
// tp is innermost: it talks most, several times per layer, and so stays inside a node; pp, which sends one activation
// per micro-batch, is outermost of a worker. It is the order of Megatron and of DeepSpeed ([pipe, data, model]).
//
// The world talks about host memory (counters, files, who does what); an axis about the memory of its device. On the
// CPU, where these are one, dp is the world itself when it covers it. Axes of size one share a communicator.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/staging_size.h"
#include "ds/mesh.h"

namespace ds {

struct MeshCoord {
  int dp = 0, pp = 0, tp = 0, sp = 0, worker = 0;
  bool operator==(const MeshCoord&) const = default;
};

MeshCoord coord_of(const MeshShape& shape, int rank);
int rank_at(const MeshShape& shape, const MeshCoord& coord);

// Ranks of the group that holds `coord`, in the order of their ranks in it.
std::vector<int> dp_ranks(const MeshShape&, const MeshCoord&);  // all (dp, sp), sp innermost
std::vector<int> tp_ranks(const MeshShape&, const MeshCoord&);
std::vector<int> sp_ranks(const MeshShape&, const MeshCoord&);
std::vector<int> pp_ranks(const MeshShape&, const MeshCoord&);
std::vector<int> outer_ranks(const MeshShape&, const MeshCoord&);                  // the same place in each worker
std::vector<int> split_ranks(const MeshShape&, const DpSplit&, const MeshCoord&);  // all (those of dp, sp)
int split_size(const MeshShape&, const DpSplit&);
int split_rank(const MeshShape&, const DpSplit&, const MeshCoord&);  // a rank's number among split_ranks()

// What the communicators of a mesh take of /dev/shm (shm_needed_bytes) when all its ranks share one node and memory,
// and each allocates these sizes from dp and from tp; with the channels of their messages; and, by split of dp, from
// those; and from the other workers' axis.
i64 mesh_shm_bytes(const MeshShape&, std::span<const i64> dp_allocations, std::span<const i64> tp_allocations,
                   std::span<const DpSplit> splits = {}, std::span<const std::vector<i64>> split_allocations = {},
                   std::span<const i64> outer_allocations = {});

// The largest calls of a rank over the world and over each axis; over the stages, of each of their communicators.
struct MeshCalls {
  LargestCalls world, dp, tp, sp, activations, gradients, outer;
  std::vector<std::pair<int, LargestCalls>> splits = {};  // of dp, with their ranks
};
// What the communicators of a rank come to hold by these (Mesh::staging_bytes), over host memory. Nothing: not known
// (staging_size).
std::optional<i64> mesh_staging_size(const MeshShape&, std::string_view backend, const MeshCalls&);

class Mesh {
 public:
  // Makes the communicator over device memory of an axis whose ranks `host` joins, which outlives it.
  using OverDevice = std::function<std::unique_ptr<Communicator>(Communicator& host, const CommOptions&)>;

  // Collective over the world. `options`: of dp; the other axes take its timeout, ops and device. Without `over_device`
  // the axes are over host memory. `splits` of dp make further groups.
  Mesh(std::unique_ptr<Communicator>&& world, const MeshShape& shape, const CommOptions& options = {},
       const OverDevice& over_device = {}, std::vector<DpSplit> splits = {});
  // Of one axis, dp, over host memory.
  explicit Mesh(std::unique_ptr<Communicator>&& world) : Mesh(std::move(world), {.dp = world->size()}) {}

  const MeshShape& shape() const noexcept { return shape_; }
  const MeshCoord& coord() const noexcept { return coord_; }
  int rank() const noexcept { return world_->rank(); }
  int world_size() const noexcept { return world_->size(); }
  // Decide which samples this rank trains on.
  int data_rank() const noexcept { return coord_.worker * shape_.dp + coord_.dp; }
  int data_size() const noexcept { return shape_.data_size(); }

  Communicator& world() const noexcept { return *world_; }
  // The ranks that hold the same parameters, over which ZeRO shards them: all dp and sp.
  Communicator& dp() const noexcept { return *dp_; }
  // The ranks at the same place in each worker: rank = worker. Operations run inside the call.
  Communicator& outer() const noexcept { return *outer_; }
  // The groups over which gradients may be reduced: 0 is dp(), then the splits in order.
  Communicator& group(size_t i) const noexcept { return i == 0 ? *dp_ : *groups_[i - 1]; }
  const std::vector<DpSplit>& splits() const noexcept { return splits_; }
  // That of a split by its name; null: there is no such.
  Communicator* split(std::string_view name) const noexcept;
  // Operations but send run inside the call: their results are needed at once.
  Communicator& tp() const noexcept { return *tp_; }
  Communicator& sp() const noexcept { return *sp_; }
  // Two communicators over the stages of the pipeline, whose operations run beside the caller, so that receives can be
  // posted ahead. One per kind of message: each has its own order, and a message that waits holds up none of the other
  // kind. Rank = stage.
  Communicator& activations() const noexcept { return *activations_; }
  Communicator& gradients() const noexcept { return *gradients_; }
  // For small collectives of the stages, outside the pipeline's messages. The gradients' communicator: when it is used
  // no message is under way, and a third one would cost memory.
  Communicator& pp() const noexcept { return *gradients_; }

  // Tells all ranks (Communicator::abort).
  void abort(const Error& why) noexcept { world_->abort(why); }

  // Returns when no operation of this rank is under way in any of them (Communicator::drain).
  void drain() noexcept;

  // Of all communicators together; one that serves several axes counts once.
  std::map<std::string, CommCount> counts() const;
  void reset_counts();
  i64 staging_bytes() const noexcept;

 private:
  // Over host memory, or over a device's and what that is built on.
  struct Axis {
    std::unique_ptr<Communicator> host, device;
    Communicator& top() const noexcept { return device ? *device : *host; }
  };
  Communicator* make_axis(const std::vector<int>& ranks, std::string_view name, const CommOptions& options,
                          const OverDevice& over_device);

  MeshShape shape_;
  std::vector<DpSplit> splits_;
  std::unique_ptr<Communicator> world_;
  MeshCoord coord_;
  std::vector<Axis> axes_;
  Communicator* alone_ = nullptr;  // serves all axes of size one
  Communicator *dp_ = nullptr, *outer_ = nullptr, *tp_ = nullptr, *sp_ = nullptr, *activations_ = nullptr,
               *gradients_ = nullptr;
  std::vector<Communicator*> groups_;  // of splits
};

}  // namespace ds
