// SPDX-License-Identifier: Apache-2.0
#include "mesh/mesh.h"
#include "comm/make_communicator.h"

#include <initializer_list>
#include <utility>

namespace ds {

MeshCoord coord_of(const MeshShape& s, int rank) {
  DS_ASSERT(rank >= 0 && rank < s.world());
  return {.dp = rank / (s.tp * s.sp) % s.dp,
          .pp = rank / (s.tp * s.sp * s.dp) % s.pp,
          .tp = rank % s.tp,
          .sp = rank / s.tp % s.sp,
          .worker = rank / (s.tp * s.sp * s.dp * s.pp)};
}

int rank_at(const MeshShape& s, const MeshCoord& c) {
  DS_ASSERT(c.dp >= 0 && c.dp < s.dp && c.pp >= 0 && c.pp < s.pp);
  DS_ASSERT(c.tp >= 0 && c.tp < s.tp && c.sp >= 0 && c.sp < s.sp);
  DS_ASSERT(c.worker >= 0 && c.worker < s.workers);
  return (((c.worker * s.pp + c.pp) * s.dp + c.dp) * s.sp + c.sp) * s.tp + c.tp;
}

namespace {

// The ranks that differ from `c` only in these axes, the last of which is innermost.
std::vector<int> ranks_along(const MeshShape& s, MeshCoord c,
                             std::initializer_list<std::pair<int MeshCoord::*, int>> axes) {
  std::vector<int> ranks;
  const auto visit = [&](auto&& self, const auto* axis) -> void {
    if (axis == axes.end()) {
      ranks.push_back(rank_at(s, c));
      return;
    }
    for (int i = 0; i < axis->second; ++i) {
      c.*(axis->first) = i;
      self(self, axis + 1);
    }
  };
  visit(visit, axes.begin());
  return ranks;
}

}  // namespace

std::vector<int> dp_ranks(const MeshShape& s, const MeshCoord& c) {
  return ranks_along(s, c, {{&MeshCoord::dp, s.dp}, {&MeshCoord::sp, s.sp}});
}
std::vector<int> tp_ranks(const MeshShape& s, const MeshCoord& c) {
  return ranks_along(s, c, {{&MeshCoord::tp, s.tp}});
}
std::vector<int> sp_ranks(const MeshShape& s, const MeshCoord& c) {
  return ranks_along(s, c, {{&MeshCoord::sp, s.sp}});
}
std::vector<int> pp_ranks(const MeshShape& s, const MeshCoord& c) {
  return ranks_along(s, c, {{&MeshCoord::pp, s.pp}});
}
std::vector<int> outer_ranks(const MeshShape& s, const MeshCoord& c) {
  return ranks_along(s, c, {{&MeshCoord::worker, s.workers}});
}

std::vector<int> split_ranks(const MeshShape& s, const DpSplit& split, const MeshCoord& c) {
  DS_ASSERT(split.inner >= 1 && s.dp % split.inner == 0);
  const bool inner = split.along == DpSplit::Along::Inner;
  const auto fixed = [&](int dp) { return inner ? dp / split.inner : dp % split.inner; };
  std::vector<int> ranks;
  for (int dp = 0; dp < s.dp; ++dp) {
    if (fixed(dp) != fixed(c.dp)) continue;
    for (int sp = 0; sp < s.sp; ++sp)
      ranks.push_back(rank_at(s, {.dp = dp, .pp = c.pp, .tp = c.tp, .sp = sp, .worker = c.worker}));
  }
  return ranks;
}

int split_size(const MeshShape& s, const DpSplit& split) {
  return (split.along == DpSplit::Along::Inner ? split.inner : s.dp / split.inner) * s.sp;
}

int split_rank(const MeshShape& s, const DpSplit& split, const MeshCoord& c) {
  return (split.along == DpSplit::Along::Inner ? c.dp % split.inner : c.dp / split.inner) * s.sp + c.sp;
}

i64 mesh_shm_bytes(const MeshShape& s, std::span<const i64> dp_allocations, std::span<const i64> tp_allocations,
                   std::span<const DpSplit> splits, std::span<const std::vector<i64>> split_allocations,
                   std::span<const i64> outer_allocations) {
  const int world = s.world(), dp = s.dp * s.sp;
  const auto groups = [&](int size, std::span<const i64> allocations) {
    return size == 1 ? 0 : world / size * shm_needed_bytes(size, allocations);
  };
  // Activations and gradients travel between neighbouring stages, gradients of tied embeddings between the stages of
  // both ends, and keys and values around the parts of a sequence.
  const i64 channels = ((s.pp > 1 ? world / s.pp * (2 * s.pp + 2) : 0) + (s.sp > 1 ? world : 0)) * shm_channel_bytes();
  i64 others = groups(s.tp, tp_allocations) + groups(s.sp, {}) + 2 * groups(s.pp, {}) + channels +
               groups(s.workers, outer_allocations);
  for (size_t i = 0; i < splits.size(); ++i) others += groups(split_size(s, splits[i]), split_allocations[i]);
  if (dp == world) return shm_needed_bytes(world, dp_allocations) + others;
  return shm_needed_bytes(world, {}) + groups(dp, dp_allocations) + others;
}

namespace {

// Calls visit(axis) for each axis that a split of dp may be.
void for_each_split_axis(auto&& visit) {
  for (size_t a = 0; a < std::size(kAxes); ++a) {
    const auto axis = static_cast<Axis>(a);
    const bool of_shape =
        axis == Axis::Dp || axis == Axis::Sp || axis == Axis::Tp || axis == Axis::Pp || axis == Axis::Outer;
    if (!of_shape) visit(axis);
  }
}

}  // namespace

MeshCalls::Group& MeshCalls::split(const std::string& name) {
  Group* group = nullptr;
  for_each_split_axis([&](Axis axis) {
    if (axis_name(axis) == name) group = &axes[axis];
  });
  return group == nullptr ? splits[name] : *group;
}

std::optional<i64> mesh_staging_size(const MeshShape& s, std::string_view backend, const MeshCalls& calls) {
  std::optional<i64> sum = 0;
  const auto add = [&](int size, const LargestCalls& own) {
    const std::optional<i64> bytes = staging_size(backend, size, own);
    sum = sum && bytes ? std::optional(*sum + *bytes) : std::nullopt;
  };
  const int dp = s.dp * s.sp;
  LargestCalls world = calls.world;
  if (dp == s.world()) {
    world.add(calls.axes[Axis::Dp].largest);
  } else {
    add(dp, calls.axes[Axis::Dp].largest);
  }
  add(s.world(), world);
  add(s.tp, calls.axes[Axis::Tp].largest);
  add(s.sp, calls.axes[Axis::Sp].largest);
  add(s.workers, calls.axes[Axis::Outer].largest);
  for_each_split_axis([&](Axis axis) { add(calls.axes[axis].ranks, calls.axes[axis].largest); });
  for (const auto& [name, split] : calls.splits) add(split.ranks, split.largest);
  add(s.pp, calls.down);
  add(s.pp, calls.up);
  return sum;
}

Mesh::Mesh(std::unique_ptr<Communicator>&& world, const MeshShape& shape, const CommOptions& options,
           const OverDevice& over_device, std::vector<DpSplit> splits)
    : shape_(shape), splits_(std::move(splits)), world_(std::move(world)), coord_(coord_of(shape, world_->rank())) {
  try {
    DS_ASSERT(shape.world() == world_->size());
    CommOptions at_once = options, ahead = options;
    at_once.progress_thread = false;
    ahead.progress_thread = true;
    const std::vector<int> dp = dp_ranks(shape_, coord_), pp = pp_ranks(shape_, coord_);
    const bool one_axis = std::ssize(dp) == shape_.world() && !over_device;
    dp_ = one_axis ? world_.get() : make_axis(dp, "dp", options, over_device);
    outer_ = make_axis(outer_ranks(shape_, coord_), "outer", ahead, over_device);
    tp_ = make_axis(tp_ranks(shape_, coord_), "tp", at_once, over_device);
    const auto with_links = [](CommOptions o, size_t ranks, int step) {
      o.links = ring_links(static_cast<int>(ranks), step);
      return o;
    };
    const std::vector<int> sp = sp_ranks(shape_, coord_);
    sp_ = make_axis(sp, "sp", with_links(at_once, sp.size(), 1), over_device);
    down_ = make_axis(pp, "down", with_links(ahead, pp.size(), 1), over_device);
    up_ = make_axis(pp, "up", with_links(ahead, pp.size(), -1), over_device);
    for (const DpSplit& split : splits_)
      groups_.push_back(make_axis(split_ranks(shape_, split, coord_), split.name, options, over_device));
    by_axis_[Axis::Dp] = dp_;
    by_axis_[Axis::Sp] = sp_;
    by_axis_[Axis::Tp] = tp_;
    by_axis_[Axis::Pp] = up_;
    by_axis_[Axis::Outer] = outer_;
    for_each_split_axis([&](Axis axis) { by_axis_[axis] = split(axis_name(axis)); });
  } catch (const Error& e) {  // ranks that have not reached this point must fail with the same error
    world_->abort(e);
    throw;
  }
}

Communicator* Mesh::split(std::string_view name) const noexcept {
  for (size_t i = 0; i < splits_.size(); ++i) {
    if (splits_[i].name == name) return groups_[i];
  }
  return nullptr;
}

Communicator* Mesh::make_axis(const std::vector<int>& ranks, std::string_view name, const CommOptions& options,
                              const OverDevice& over_device) {
  const bool lone = ranks.size() == 1;
  if (lone && alone_ != nullptr) return alone_;
  CommOptions own = options;
  if (lone) own.progress_thread = false;  // nothing to overlap with
  Comm& axis = axes_.emplace_back(Comm{.host = world_->group(ranks, lone ? "alone" : name, own), .device = nullptr});
  if (over_device) axis.device = over_device(*axis.host, own);
  if (lone) alone_ = &axis.top();
  return &axis.top();
}

std::map<std::string, CommCount> Mesh::counts() const {
  std::map<std::string, CommCount> counts = world_->counts();
  for (const Comm& axis : axes_) {
    for (const auto& [tag, count] : axis.top().counts()) {
      counts[tag].calls += count.calls;
      counts[tag].bytes += count.bytes;
      counts[tag].seconds += count.seconds;
    }
  }
  return counts;
}

void Mesh::reset_counts() {
  world_->reset_counts();
  for (const Comm& axis : axes_) axis.top().reset_counts();
}

void Mesh::use_links() {
  for (const Comm& axis : axes_) axis.top().use_links();
}

void Mesh::drain() noexcept {
  world_->drain();
  for (const Comm& axis : axes_) axis.host->drain();
}

i64 Mesh::staging_bytes() const noexcept {
  i64 bytes = world_->staging_bytes();
  for (const Comm& axis : axes_) bytes += axis.host->staging_bytes() + (axis.device ? axis.device->staging_bytes() : 0);
  return bytes;
}

}  // namespace ds
