// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "comm/nonzero_blocks.h"
#include "zero/reduction.h"

namespace ds::zero {
namespace {

class SparseReduction final : public Reduction {
 public:
  explicit SparseReduction(const ReductionParts& parts)
      : parts_(parts),
        tag_(message_text(parts.options.axis, Collective::SparseGather)),
        blocks_(parts.with.ranks.all, parts.with.device, parts.with.ledger, Tag::Buckets, largest_slice(), width()) {}

  bool add(const Segment& s, bool continues) override {
    const TensorView fresh = parts_.fresh.segment(s);
    if (!blocks_.saves(fresh, bounds_of(s).of_rank, tag_)) return false;
    const TierLease sum = parts_.sums.lease_owned(s, continues);
    blocks_.reduce_scatter(fresh, TensorView::of(sum.data(), DType::F32, {s.slice}), continues, tag_);
    return true;
  }
  void finish() override {}
  bool gather(const Segment& s) override {
    return blocks_.all_gather(parts_.sums.all_of(s), bounds_of(s).of_sum, tag_);
  }

 private:
  const SparseUnit& bounds_of(const Segment& s) const noexcept {
    return *std::ranges::find(parts_.options.sparse, s.unit, &SparseUnit::unit);
  }
  i64 largest_slice() const noexcept {
    i64 most = 0;
    for (const i64 s : parts_.segments) most = std::max(most, parts_.layout.segments()[s].slice);
    return most;
  }
  // Bytes of an element: of gradients, and at stage 0 also of sums.
  i64 width() const noexcept {
    const i64 of_sums = parts_.layout.states().shard_optimizer ? 0 : dtype_bytes(parts_.options.sums);
    return std::max(of_sums, dtype_bytes(parts_.options.wire));
  }

  const ReductionParts parts_;
  const std::string tag_;
  NonzeroBlocks blocks_;
};

}  // namespace

ReductionKind sparse_reduction(const std::vector<SparseUnit>& units) {
  ReductionKind kind{.make = [](const ReductionParts& parts) { return std::make_unique<SparseReduction>(parts); }};
  for (const SparseUnit& u : units) kind.units.push_back(u.unit);
  return kind;
}

}  // namespace ds::zero
