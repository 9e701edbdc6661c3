// SPDX-License-Identifier: Apache-2.0
#include "zero/param_store.h"

#include "comm/message_tag.h"
#include "comm/quantized.h"

namespace ds::zero {
namespace {

constexpr std::string_view kNearTag = message_text(Axis::Near, Collective::AllGather);

// In blocks of 256 elements: neighbouring rows of different sizes share at most one block.
constexpr CodeFormat kWeightCodes{.bits = 8, .block = kCodeBlock};

}  // namespace

ParamLease::~ParamLease() {
  if (store_ != nullptr) store_->end_access();
}

std::span<const TensorView> ParamLease::rows(i64 unit) const noexcept { return store_->views_[unit]; }

ParamStore::ParamStore(const Layout& layout, std::span<const std::span<const model::ParamRow>> rows, Communicator& comm,
                       Device& device, MemoryLedger& ledger, const Options& options, const MakeArray& tier,
                       Communicator* near)
    : layout_(layout),
      comm_(comm),
      gather_tag_(message_text(options.axis, Collective::AllGather)),
      device_(device),
      options_(options) {
  const i64 P = layout.num_ranks(), bytes = dtype_bytes(options.work);
  i64 whole_elems = 0, shard_elems = 0, most = 0;
  for (const Segment& s : layout.segments()) {
    i64& used = whole(s) ? whole_elems : shard_elems;
    segment_offset_.push_back(used);
    used += whole(s) ? s.slice * P : s.slice;
    if (!whole(s)) most = std::max(most, s.slice);
  }
  whole_ = comm.allocate(ledger, Tag::Params, whole_elems * bytes);
  shards_ = tier ? tier(device, ledger, Tag::Params, shard_elems * bytes, most * bytes)
                 : std::make_unique<DeviceArray>(device_buffer(device, ledger, Tag::Params, shard_elems * bytes));
  pool_ = comm.allocate(ledger, Tag::Gathered, options.pool_elems * bytes);
  if (std::ranges::find(options.coded, true) != options.coded.end())
    wire_ = comm.allocate(ledger, Tag::Gathered, options.pool_elems + options.pool_elems / kScaleShare);
  for (const Segment& s : layout.segments()) {
    if (near == nullptr || near->size() == 1) break;
    second_.emplace_back();
    if (!whole(s)) second_.back().emplace(*near, device, ledger, Tag::Params, s.slice * P, options.work);
  }
  arriving_at_.assign(layout.segments().size(), -1);
  arriving_.resize(layout.segments().size());
  gathered_.reserve(4);  // a unit has no more segments
  published_.reserve(layout.segments().size());
  tickets_.reserve(layout.segments().size());
  for (const auto& unit : rows) {
    std::vector<TensorView>& views = views_.emplace_back();
    for (const model::ParamRow& row : unit) views.push_back(row.view(options.work, nullptr));
  }
  views_.resize(layout.units().size());
  for (const MatrixTile& t : layout.tiles()) views_[t.unit] = {TensorView::of(nullptr, options.work, {t.rows, t.cols})};
  for (const Segment& s : layout.segments()) {
    if (whole(s)) point_rows(s, whole_segment(s));
  }
}

void ParamStore::point_rows(const Segment& s, void* base) {
  const UnitPlace& unit = layout_.units()[s.unit];
  std::vector<TensorView>& views = views_[s.unit];
  if (layout_.is_tile(s.unit)) {
    views.front().data = base;
    return;
  }
  const i64 segment = &s - layout_.segments().data();
  for (size_t r = 0; r < views.size(); ++r) {
    const RowPlace& row = layout_.rows()[static_cast<size_t>(unit.first_param) + r];
    if (row.segment != segment) continue;
    views[r].data = base == nullptr ? nullptr : static_cast<char*>(base) + row.offset * dtype_bytes(options_.work);
  }
}

TierLease ParamStore::lease(const Segment& s, i64 first, i64 count, LeaseTo access) const {
  const i64 bytes = dtype_bytes(options_.work);
  if (whole(s)) return {nullptr, whole_segment(s) + first * bytes, 0, 0, access};
  const i64 at = segment_offset_[&s - layout_.segments().data()] + first - s.slice * comm_.rank();
  return shards_->lease(at * bytes, count * bytes, access);
}

void ParamStore::begin(const GatherPlan& plan) {
  DS_ASSERT(plan.pool_elems <= options_.pool_elems);
  DS_ASSERT(plan_ == nullptr || next_ == plan_->accesses.size());
  plan_ = &plan;
  next_ = 0;
}

void ParamStore::gather(const GatherStep::Launch& l) {
  const i64 bytes = dtype_bytes(options_.work);
  i64 next = l.offset;
  size_t last = 0;  // of those that are gathered together
  gathered_.clear();
  for (const Segment& s : layout_.segments_of(l.unit)) {
    if (whole(s)) continue;
    const size_t number = static_cast<size_t>(&s - layout_.segments().data());
    const i64 offset = std::exchange(next, next + s.slice * layout_.num_ranks());
    char* const base = static_cast<char*>(pool_.data()) + offset * bytes;
    point_rows(s, base);
    if (SecondaryShard* const second = second_shard(s); second != nullptr && second->kept()) {
      arriving_[number] = second->gather(full(s, base), kNearTag);
      continue;
    }
    const TierLease own = lease(s, s.slice * comm_.rank(), s.slice, LeaseTo::Read);
    arriving_at_[number] = offset;
    if (coded(l.unit)) {
      arriving_[number] = start_coded_gather(comm_, device_, kWeightCodes, wire(offset),
                                             TensorView::of(own.data(), options_.work, {s.slice}), gather_tag_);
      continue;
    }
    const i64 slice_bytes = s.slice * bytes;
    device_.copy(base + comm_.rank() * slice_bytes, own.data(), slice_bytes);
    gathered_.push_back({base, slice_bytes});
    last = number;
  }
  if (!gathered_.empty()) arriving_[last] = comm_.all_gather(gathered_, gather_tag_);
}

void ParamStore::arrive(i64 unit) {
  const i64 first = layout_.units()[unit].first_segment, end = first + layout_.units()[unit].num_segments;
  for (i64 s = first; s < end; ++s) arriving_[s].wait();
  for (i64 number = first; number < end; ++number) {
    const Segment& s = layout_.segments()[number];
    const i64 offset = std::exchange(arriving_at_[number], -1);
    if (offset < 0) continue;
    const TensorView all = full(s, static_cast<char*>(pool_.data()) + offset * dtype_bytes(options_.work));
    if (coded(unit)) decode_gathered(comm_, device_, kWeightCodes, wire(offset), all);
    if (SecondaryShard* const second = second_shard(s); second != nullptr) second->keep(all);
  }
}

ParamLease ParamStore::acquire() {
  DS_ASSERT(plan_ != nullptr && (plan_->accesses.empty() || next_ < plan_->accesses.size()));
  if (plan_->accesses.empty()) return ParamLease(this);
  for (const GatherStep::Launch& l : plan_->steps[next_].launch) gather(l);
  expect_launches();
  for (const i64 unit : plan_->accesses[next_]) arrive(unit);
  return ParamLease(this);
}

void* ParamStore::on_host(const Piece& piece) const noexcept {
  const Segment& s = layout_.segments()[piece.segment];
  if (whole(s)) return nullptr;
  return shards_->on_host((segment_offset_[piece.segment] + piece.segment_offset - s.slice * comm_.rank()) *
                          dtype_bytes(options_.work));
}

// Tells the tier of slices which units are gathered next.
void ParamStore::expect_launches() {
  if (in_place()) return;
  const size_t end = std::min(next_ + 1 + kStepsAhead, plan_->steps.size());
  for (size_t step = next_ + 1; step < end; ++step) {
    for (const GatherStep::Launch& l : plan_->steps[step].launch) {
      for (const Segment& s : layout_.segments_of(l.unit)) {
        const i64 bytes = dtype_bytes(options_.work);
        if (!whole(s)) shards_->expect(segment_offset_[&s - layout_.segments().data()] * bytes, s.slice * bytes);
      }
    }
  }
}

void ParamStore::end_access() noexcept {
  if (plan_->accesses.empty()) return;
  // A released unit is forgotten at once: whoever uses it without a lease fails on a null view, not on stale numbers.
  for (const i64 unit : plan_->steps[next_].release) {
    for (const Segment& s : layout_.segments_of(unit)) {
      if (!whole(s)) point_rows(s, nullptr);
    }
  }
  ++next_;
}

void ParamStore::publish(Changed changed) {
  for (auto& second : second_) {  // parameters have changed
    if (second) second->invalidate();
  }
  if (!layout_.states().shard_optimizer) return;
  tickets_.clear();
  i64 elems = 0;  // published together
  const auto flush = [&] {
    if (!published_.empty()) tickets_.push_back(comm_.all_gather(published_, gather_tag_));
    published_.clear();
    elems = 0;
  };
  for (const Segment& s : layout_.segments()) {
    if (!whole(s) || (changed == Changed::Trained && !s.trained)) continue;
    const i64 n = s.slice * layout_.num_ranks();
    if (elems + n > options_.allgather_bucket) flush();
    published_.push_back({whole_segment(s), s.slice * dtype_bytes(options_.work)});
    elems += n;
  }
  flush();
  for (Ticket& t : tickets_) t.wait();
}

}  // namespace ds::zero
