// SPDX-License-Identifier: Apache-2.0
#include "zero/grad_sums.h"

#include "base/check.h"
#include "zero/rounded_array.h"

namespace ds::zero {
namespace {

// Whether a rank has sums of all elements, or of the slices that it owns.
bool accumulates_all(const Layout& layout, const GradOptions& options) {
  return !layout.states().shard_optimizer || options.accumulates_locally() || options.keeps_own;
}

// The offset at which each segment would begin, if all of it were there, in an array of the slices that a rank owns.
std::vector<i64> owned_bases(const Layout& layout, int rank) {
  std::vector<i64> bases;
  for (const Segment& s : layout.segments()) bases.push_back(s.shard_offset - s.slice * rank);
  return bases;
}

}  // namespace

std::vector<i64> grad_accum_bases(const Layout& layout, const GradOptions& options, int rank) {
  if (!accumulates_all(layout, options)) return owned_bases(layout, rank);
  std::vector<i64> bases;
  i64 at = 0;
  for (const Segment& s : layout.segments()) {
    bases.push_back(at);
    at += s.slice * layout.num_ranks();
  }
  return bases;
}

i64 grad_accum_elems(const Layout& layout, const GradOptions& options) {
  if (!accumulates_all(layout, options)) return layout.shard_elems();
  i64 n = 0;
  for (const UnitPlace& u : layout.units()) n += u.padded;
  return n;
}

GradSums::GradSums(const Layout& layout, GradRows rows, const GradOptions& options, Communicator& comm, Device& device,
                   MemoryLedger& ledger, const MakeArray& tier)
    : layout_(layout),
      device_(device),
      rank_(comm.rank()),
      stored_(options.sums),
      base_(grad_accum_bases(layout, options, rank_)),
      owned_base_(base_) {
  const i64 width = dtype_bytes(stored_);
  const bool all = accumulates_all(layout, options), in_tier = tier && layout.states().shard_optimizer;
  if (all || !in_tier) {
    // In the communicator's memory, because it is gathered from other ranks at stage 0.
    Buffer memory = comm.allocate(ledger, Tag::GradAccum, grad_accum_elems(layout, options) * width);
    if (all) all_ = std::move(memory);
    std::unique_ptr<TierArray> array = as_fp32(
        all ? std::make_unique<DeviceArray>(all_.data()) : std::make_unique<DeviceArray>(std::move(memory)), ledger);
    (in_tier ? of_all_ : owned_) = std::move(array);
  }
  if (options.fused) {
    DS_ASSERT(all && stored_ == DType::F32);
    views_ = row_views(layout, rows, DType::F32,
                       [&](size_t u, i64 at) -> void* { return all_of(static_cast<i64>(u)).as<float>() + at; });
  }
  if (!in_tier) return;
  owned_base_ = owned_bases(layout, rank_);
  owned_ = as_fp32(tier(device, ledger, Tag::GradAccum, layout.shard_elems() * width, layout.largest_slice() * width),
                   ledger);
}

std::unique_ptr<TierArray> GradSums::as_fp32(std::unique_ptr<TierArray> kept, MemoryLedger& ledger) const {
  if (stored_ == DType::F32) return kept;
  return std::make_unique<RoundedArray>(device_, ledger, std::move(kept), stored_);
}

// Segments of a unit lie side by side.
TensorView GradSums::all_of(i64 unit) const noexcept {
  const UnitPlace& place = layout_.units()[unit];
  return all().rows(base_[place.first_segment], place.padded);
}

void GradSums::round(i64 unit, TensorView fresh) const {
  if (layout_.units()[unit].num_segments > 0) device_.ops().cast(fresh, all_of(unit), device_.stream());
}

void GradSums::keep(i64 unit) const {
  if (!of_all_) return;
  for (const Segment& s : layout_.segments_of(unit)) {
    const TierLease lease = lease_owned(s, false);
    device_.copy(lease.data(), all_of(s).data, s.slice * 4);
  }
}

void GradSums::accumulate(i64 unit, TensorView fresh, bool continues, bool round_back) {
  const UnitPlace& place = layout_.units()[unit];
  if (place.num_segments == 0) return;
  // Segments of a unit lie side by side in both arrays.
  TierArray& array = of_all_ ? *of_all_ : *owned_;
  const TierLease lease =
      array.lease(base_[place.first_segment] * 4, place.padded * 4, continues ? LeaseTo::Write : LeaseTo::Fill);
  const TensorView sum = TensorView::of(lease.data(), DType::F32, {place.padded});
  device_.ops().fold(sum, {&fresh, 1}, continues, device_.stream());
  if (round_back) device_.ops().cast(fresh, sum, device_.stream());
}

}  // namespace ds::zero
