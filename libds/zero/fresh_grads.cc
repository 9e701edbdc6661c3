// SPDX-License-Identifier: Apache-2.0
#include "zero/fresh_grads.h"

#include <algorithm>

namespace ds::zero {
namespace {

// The memory in which buckets take turns: one slot for those that are open while others come, then two for the others.
class BucketSlots {
 public:
  BucketSlots(std::span<const Bucket> buckets, bool overlap) {
    i64 num = 0;
    for (const Bucket& b : buckets) {
      i64& most = b.open ? open_elems_ : elems_;
      most = std::max(most, b.elems);
      (b.open ? num_open_ : num) += 1;
    }
    num_ = std::min<i64>(num, overlap ? 2 : 1);
  }
  i64 elems() const noexcept { return open_elems_ + num_ * elems_; }
  size_t num() const noexcept { return static_cast<size_t>(num_ + std::min<i64>(num_open_, 1)); }
  // The slot of the next bucket.
  size_t next(const Bucket& b) noexcept {
    return b.open ? static_cast<size_t>(num_) : static_cast<size_t>(taken_++ % num_);
  }
  i64 base(size_t slot) const noexcept {
    return slot == static_cast<size_t>(num_) ? 0 : open_elems_ + static_cast<i64>(slot) * elems_;
  }

 private:
  i64 elems_ = 0, open_elems_ = 0, num_ = 0, num_open_ = 0, taken_ = 0;
};

// The offset at which each unit is staged: one unit at a time, followed by one that is written beside it, as tiles are.
std::vector<i64> staging_bases(const Layout& layout, const GradOptions& options, i64& end) {
  std::vector<i64> bases(layout.units().size(), 0);
  i64 largest = 0, largest_beside = 0;
  const auto is_beside = [&](i64 u) {
    return layout.is_tile(u) || std::ranges::find(options.beside, u) != options.beside.end();
  };
  for (size_t u = 0; u < bases.size(); ++u) {
    i64& most = is_beside(narrow<i64>(u)) ? largest_beside : largest;
    most = std::max(most, layout.units()[u].padded);
  }
  for (size_t u = 0; u < bases.size(); ++u) bases[u] = is_beside(narrow<i64>(u)) ? largest : 0;
  end = options.staged() ? largest + largest_beside : 0;
  return bases;
}

}  // namespace

i64 fresh_grad_elems(const Layout& layout, std::span<const Bucket> buckets, const GradOptions& options) {
  if (layout.states().shard_grads) return BucketSlots(buckets, options.overlap).elems();
  if (options.sums_are_final(layout.num_ranks())) return 0;
  i64 n = 0;
  for (const UnitPlace& u : layout.units()) n += u.padded;
  return n;
}

i64 staging_elems(const Layout& layout, const GradOptions& options) {
  i64 end = 0;
  staging_bases(layout, options, end);
  return end;
}

FreshGrads::FreshGrads(const Layout& layout, GradRows rows, const GradOptions& options, Communicator& comm,
                       Device& device, MemoryLedger& ledger)
    : layout_(layout),
      device_(device),
      wire_(options.wire),
      staged_(options.staged()),
      overlap_(options.overlap),
      buckets_(plan_buckets(layout, options)) {
  place_buckets();
  const Tag tag = layout.states().shard_grads ? Tag::Buckets : Tag::Grads;
  fresh_ = comm.allocate(ledger, tag, fresh_grad_elems(layout, buckets_, options) * dtype_bytes(wire_));
  staging_ = device_buffer(device, ledger, Tag::Workspace, staging_elems(layout, options) * 4);
  place_rows(rows, options);
}

void FreshGrads::place_buckets() {
  const bool take_turns = layout_.states().shard_grads;
  BucketSlots slots(buckets_, overlap_);
  num_slots_ = take_turns ? slots.num() : buckets_.size();
  unit_bucket_.resize(layout_.units().size());
  unit_base_.resize(layout_.units().size());
  i64 end = 0;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    slot_.push_back(take_turns ? slots.next(buckets_[b]) : b);
    i64 at = take_turns ? slots.base(slot_.back()) : end;
    for (const i64 unit : buckets_[b].units) {
      unit_bucket_[unit] = b;
      unit_base_[unit] = at;
      at += layout_.units()[unit].padded;
    }
    end = at;
  }
}

void FreshGrads::place_rows(GradRows rows, const GradOptions& options) {
  i64 staged = 0;
  staging_base_ = staging_bases(layout_, options, staged);
  for (size_t u = 0; u < layout_.units().size(); ++u)
    gaps_.push_back(u < rows.size() ? layout_.gaps_of(static_cast<i64>(u)) : std::vector<Layout::Range>());
  if (options.fused) return;
  const DType dtype = options.fresh();
  views_ = row_views(layout_, rows, dtype, [&](size_t u, i64 at) -> void* {
    char* const memory = static_cast<char*>(staged_ ? staging_.data() : fresh_.data());
    return memory + ((staged_ ? staging_base_ : unit_base_)[u] + at) * dtype_bytes(dtype);
  });
}

TensorView FreshGrads::at(i64 unit, i64 offset, i64 count) const noexcept {
  return TensorView::of(fresh_.as<char>().data() + (unit_base_[unit] + offset) * dtype_bytes(wire_), wire_, {count});
}

TensorView FreshGrads::unit(i64 unit) const noexcept { return at(unit, 0, layout_.units()[unit].padded); }

TensorView FreshGrads::segment(const Segment& s) const noexcept {
  return at(s.unit, s.offset, s.slice * layout_.num_ranks());
}

void FreshGrads::zero(i64 unit, i64 offset, i64 count) {
  const TensorView range = at(unit, offset, count);
  device_.zero(range.data, range.bytes());
}

void FreshGrads::zero_gaps(i64 unit) {
  for (const auto& [first, count] : gaps_[unit]) zero(unit, first, count);
}

void FreshGrads::zero_padding(size_t bucket) {
  if (!layout_.states().shard_grads) return;  // nobody else has written there
  for (const i64 u : buckets_[bucket].units) {
    zero_gaps(u);
    for (const Segment& s : layout_.segments_of(u))
      zero(u, s.offset + s.numel, s.slice * layout_.num_ranks() - s.numel);
  }
}

void FreshGrads::round(i64 unit) {
  if (!staged_) return;
  for (const Segment& s : layout_.segments_of(unit)) {
    float* const from = staging_.as<float>().data() + staging_base_[unit] + s.offset;
    device_.ops().cast(at(unit, s.offset, s.numel), TensorView::of(from, DType::F32, {s.numel}), device_.stream());
  }
  zero_gaps(unit);  // the gradients of other units were staged there
}

}  // namespace ds::zero
