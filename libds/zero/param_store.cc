// SPDX-License-Identifier: Apache-2.0
#include "zero/param_store.h"

#include <algorithm>
#include <utility>

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
      rows_(rows.begin(), rows.end()),
      comm_(comm),
      gather_tag_(message_text(options.axis, Collective::AllGather)),
      reduce_tag_(message_text(options.axis, Collective::AllReduce)),
      device_(device),
      options_(options),
      stored_(layout, comm.rank(), options.work),
      fp8_(layout, rows, comm.rank()) {
  const i64 P = layout.num_ranks(), bytes = dtype_bytes(options.work);
  i64 whole_elems = 0, shard_elems = 0, most = 0, widest = 0;
  for (const Segment& s : layout.segments()) {
    if (s.storage == model::Storage::BF16 || s.storage == model::Storage::F16) wire_width_ = 2;
    if (StoredParams::has(s) || has_codes(s)) {
      segment_offset_.push_back(-1);
      continue;
    }
    i64& used = whole(s) ? whole_elems : shard_elems;
    segment_offset_.push_back(used);
    used += whole(s) ? s.slice * P : s.slice;
    if (!whole(s)) most = std::max(most, s.slice);
  }
  whole_ = comm.allocate(ledger, Tag::Params, whole_elems * bytes);
  const bool sharded = layout.states().shard_params;
  const auto make = [&](i64 size, i64 largest) -> std::unique_ptr<TierArray> {
    if (tier) return tier(device, ledger, Tag::Params, size, largest);
    return std::make_unique<DeviceArray>(device_buffer(device, ledger, Tag::Params, size));
  };
  if (options.reads_directly) {  // leases are of parts
    for (const auto& unit : rows) {
      for (const model::ParamRow& row : unit) widest = std::max(widest, row.matrices().cols);
    }
    most = std::min(most, std::max(kMostStreamed, kPackedRows * widest));
  }
  shards_ = make(shard_elems * bytes, most * bytes);
  const i64 page = options.reads_directly && options.pool_elems > 0 ? TierArray::kReadPage : 1;
  pool_ = comm.allocate(ledger, Tag::Gathered, options.pool_elems * bytes + page - 1);
  pool_data_ = reinterpret_cast<char*>(align_up(reinterpret_cast<i64>(pool_.data()), page));
  wire_scales_ = std::ranges::find(options.coded, true) != options.coded.end() || stored_.any();
  if (fp8_.any() || (sharded && wire_scales_))
    wire_ = comm.allocate(ledger, Tag::Gathered, wire_bytes(options.pool_elems));
  if (fp8_.any()) fp8_.allocate(comm, ledger);
  if (stored_.any() && !sharded) {
    stored_by_rank_ = comm.allocate(ledger, Tag::Params, stored_.bytes());
    stored_.allocate(device, ledger, std::make_unique<DeviceArray>(stored_by_rank_.data()));
  } else if (stored_.any()) {
    stored_.allocate(device, ledger, make(stored_.bytes(), stored_.largest_bytes()));
  }
  for (const Segment& s : layout.segments()) {
    if (near == nullptr || near->size() == 1) break;
    second_.emplace_back();
    if (!whole(s) && !StoredParams::has(s) && !has_codes(s))
      second_.back().emplace(*near, device, ledger, Tag::Params, s.slice * P, options.work);
  }
  arriving_at_.assign(layout.segments().size(), -1);
  reading_.resize(layout.segments().size());
  arriving_.resize(layout.segments().size());
  gathered_.reserve(4);  // a unit has no more segments in the work dtype
  published_.reserve(layout.segments().size());
  tickets_.reserve(layout.segments().size() + 1);
  for (const auto& unit : rows) {
    std::vector<TensorView>& views = views_.emplace_back();
    for (const model::ParamRow& row : unit) views.push_back(row.view(options.work, nullptr));
  }
  views_.resize(layout.units().size());
  for (const MatrixTile& t : layout.tiles()) views_[t.unit] = {TensorView::of(nullptr, options.work, {t.rows, t.cols})};
  for (const Segment& s : layout.segments()) {
    if (whole(s)) point_rows(s, whole_segment(s));
  }
  allocate_codes(ledger);
}

// Matrices that lie directly after each other in the layout do so here, too.
void ParamStore::allocate_codes(MemoryLedger& ledger) {
  constexpr i64 kAlign = 64;
  struct Matrix {
    TensorView* view;
    i64 at;
  };
  std::vector<Matrix> matrices;
  i64 bytes = 0;
  for (const Segment& s : layout_.segments()) {
    if (!has_codes(s)) continue;
    DS_ASSERT(!layout_.states().shard_params && !layout_.is_tile(s.unit));
    const std::span<const model::ParamRow> rows = rows_[s.unit];
    const i64 first = layout_.units()[s.unit].first_param, number = &s - layout_.segments().data();
    std::vector<std::pair<RowPlace, size_t>> places;
    for (size_t r = 0; r < rows.size(); ++r) {
      const RowPlace& place = layout_.rows()[static_cast<size_t>(first) + r];
      if (place.segment == number) places.emplace_back(place, r);
    }
    std::ranges::sort(places, {}, [](const auto& p) { return p.first.offset; });
    for (const auto& [place, r] : places) {
      if (!rows[r].lies_after(rows)) bytes = align_up(bytes, kAlign);
      matrices.push_back({&views_[s.unit][r], bytes});
      bytes += views_[s.unit][r].bytes();
    }
  }
  codes_ = device_buffer(device_, ledger, Tag::Params, bytes);
  for (const Matrix& m : matrices) m.view->data = codes_.as<char>().data() + m.at;
}

void ParamStore::set_codes(i64 param, i64 first, i64 count, const void* rows) {
  const RowPlace& place = layout_.rows()[static_cast<size_t>(param)];
  const Segment& s = layout_.segments()[place.segment];
  TensorView& view = views_[s.unit][static_cast<size_t>(param - layout_.units()[s.unit].first_param)];
  DS_ASSERT(view.codes && (has_codes(s) || comm_.size() == 1));
  view.panels = {};
  const i64 row_bytes = view.codes.row_bytes(view.dim(view.rank - 1));
  if (!has_codes(s)) {
    const TierLease there = lease_bytes(place, first * row_bytes, count * row_bytes, LeaseTo::Write);
    return device_.upload(there.data(), rows, count * row_bytes);
  }
  device_.upload(static_cast<char*>(view.data) + first * row_bytes, rows, count * row_bytes);
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
  DS_ASSERT(!has_codes(s));
  if (StoredParams::has(s)) return stored_.lease(s, first, count, access);
  const i64 bytes = dtype_bytes(options_.work);
  if (whole(s)) return {nullptr, whole_segment(s) + first * bytes, 0, 0, access};
  const i64 at = segment_offset_[&s - layout_.segments().data()] + first - s.slice * comm_.rank();
  return shards_->lease(at * bytes, count * bytes, access);
}

TierLease ParamStore::lease_bytes(const RowPlace& place, i64 begin, i64 bytes, LeaseTo access) const {
  const Segment& s = layout_.segments()[place.segment];
  const i64 width = dtype_bytes(options_.work), at = place.offset * width + begin;
  if (whole(s)) return {nullptr, whole_segment(s) + at, 0, 0, access};
  return shards_->lease(slice_at(s) + at - s.slice * comm_.rank() * width, bytes, access);
}

// In a file by parts: a range of whole panels is packed by itself.
void ParamStore::pack_rows(TensorView matrix, const RowPlace& place) {
  const bool one_part = whole(layout_.segments()[place.segment]) || shards_->in_place();
  const i64 K = matrix.dim(matrix.rank - 1), N = matrix.dim(matrix.rank - 2), all = matrix.numel() / K,
            width = dtype_bytes(options_.work), row_bytes = matrix.codes ? matrix.codes.row_bytes(K) : K * width;
  const i64 most = one_part ? N : std::max(kMostStreamed * width / row_bytes / kPackedRows, i64{1}) * kPackedRows;
  TensorView part = TensorView::of(nullptr, matrix.dtype, {N, K});
  part.codes = matrix.codes;
  for (i64 first = 0; first < all; first += part.dim(0)) {
    part.shape[0] = std::min(most, N - first % N);
    const TierLease there = lease_bytes(place, first * row_bytes, part.dim(0) * row_bytes, LeaseTo::Write);
    part.data = there.data();
    device_.ops().pack_matrix(part, device_.stream());
  }
}

void ParamStore::pack() {
  const OpTable& ops = device_.ops();
  const Panels panels = panels_of(ops, options_.work);
  if (std::exchange(packed_, true) || !panels) return;
  for (size_t u = 0; u < rows_.size(); ++u) {
    for (size_t r = 0; r < rows_[u].size() && !coded(static_cast<i64>(u)); ++r) {
      const i64 param = layout_.units()[u].first_param + static_cast<i64>(r);
      if (!layout_.packs(param, rows_[u][r]) || (views_[u][r].codes && views_[u][r].panels)) continue;
      const RowPlace& place = layout_.rows()[param];
      const Segment& s = layout_.segments()[place.segment];
      TensorView& view = views_[u][r];
      TensorView matrix = view;
      matrix.panels = {};
      if (has_codes(s)) {
        for_matrices(matrix, [&](const TensorView& one) { ops.pack_matrix(one, device_.stream()); });
      } else {
        pack_rows(matrix, place);
      }
      view.panels = panels_of(ops, options_.work, view.codes);
      DS_ASSERT(kPackedRows % view.panels.rows == 0);
    }
  }
}

void ParamStore::begin(const GatherPlan& plan) {
  DS_ASSERT(plan.pool_elems <= options_.pool_elems);
  DS_ASSERT(plan_ == nullptr || next_ == plan_->accesses.size());
  DS_ASSERT(!carries_ || plan_ == &plan);
  plan_ = &plan;
  next_ = 0;
  if (plan.carried.empty() || std::exchange(carries_, true)) return;
  for (const GatherStep::Launch& l : plan.carried) gather(l);
}

void ParamStore::abandon() {
  drop_gathered();
  next_ = plan_->accesses.size();
}

// Waits for all that is under way, and forgets it and what has arrived.
void ParamStore::drop_gathered() {
  for (Ticket& t : arriving_) t.wait();
  for (auto& reading : reading_) {
    if (reading) shards_->end_read(*std::exchange(reading, std::nullopt));
  }
  std::ranges::fill(arriving_at_, -1);
  for (const Segment& s : layout_.segments()) {
    if (!whole(s) && !has_codes(s)) point_rows(s, nullptr);
  }
  carries_ = false;
}

void ParamStore::gather(const GatherStep::Launch& l) {
  const i64 bytes = dtype_bytes(options_.work);
  i64 next = l.offset;
  size_t last = 0;  // of those that are gathered together
  gathered_.clear();
  for (const Segment& s : layout_.segments_of(l.unit)) {
    if (whole(s) || has_codes(s)) continue;
    const size_t number = static_cast<size_t>(&s - layout_.segments().data());
    const i64 offset = std::exchange(next, next + s.slice * layout_.num_ranks());
    char* const base = static_cast<char*>(pool(offset));
    point_rows(s, base);
    if (options_.reads_directly) {
      const i64 slice_bytes = s.slice * bytes;
      reading_[number] = shards_->begin_read(base + comm_.rank() * slice_bytes, slice_at(s), slice_bytes);
      arriving_at_[number] = offset;
      continue;
    }
    if (StoredParams::has(s)) {
      arriving_at_[number] = offset;
      if (!layout_.states().shard_params) continue;
      const TierLease own = stored_.lease_stored(s);
      const i64 slice_bytes = stored_.bytes_of(s);
      device_.copy(wire(offset) + comm_.rank() * slice_bytes, own.data(), slice_bytes);
      const AllGatherSegment all{wire(offset), slice_bytes};
      arriving_[number] = comm_.all_gather({&all, 1}, gather_tag_);
      continue;
    }
    if (SecondaryShard* const second = second_shard(s); second != nullptr && second->kept()) {
      arriving_[number] = second->gather(full(s, base), kNearTag);
      continue;
    }
    const TierLease own = lease(s, s.slice * comm_.rank(), s.slice, LeaseTo::Read);
    arriving_at_[number] = offset;
    if (coded(l.unit)) {
      arriving_[number] =
          start_coded_gather(comm_, device_, kWeightCodes, wire(offset), own_slice(s, own), gather_tag_);
      continue;
    }
    last = number;
    if (s.fp8) {
      fp8_.encode(device_, s, own_slice(s, own), wire(offset));
      gathered_.push_back({wire(offset), s.slice});
      continue;
    }
    const i64 slice_bytes = s.slice * bytes;
    device_.copy(base + comm_.rank() * slice_bytes, own.data(), slice_bytes);
    gathered_.push_back({base, slice_bytes});
  }
  if (!gathered_.empty()) arriving_[last] = comm_.all_gather(gathered_, gather_tag_);
}

// The slices of the other ranks follow when those of this one are there.
void ParamStore::wait_for_reads(i64 unit) {
  gathered_.clear();
  for (const Segment& s : layout_.segments_of(unit)) {
    const size_t number = static_cast<size_t>(&s - layout_.segments().data());
    if (!reading_[number]) continue;
    shards_->end_read(*std::exchange(reading_[number], std::nullopt));
    gathered_.push_back({pool(std::exchange(arriving_at_[number], -1)), s.slice * dtype_bytes(options_.work)});
  }
  if (!gathered_.empty() && comm_.size() > 1) comm_.all_gather(gathered_, gather_tag_).wait();
}

void ParamStore::arrive(i64 unit) {
  if (options_.reads_directly) return wait_for_reads(unit);
  const i64 first = layout_.units()[unit].first_segment, end = first + layout_.units()[unit].num_segments;
  for (i64 s = first; s < end; ++s) arriving_[s].wait();
  for (i64 number = first; number < end; ++number) {
    const Segment& s = layout_.segments()[number];
    const i64 offset = std::exchange(arriving_at_[number], -1);
    if (offset < 0) continue;
    const TensorView all = full(s, pool(offset));
    if (StoredParams::has(s)) {
      if (layout_.states().shard_params) {
        stored_.decode(s, wire(offset), all);
      } else {
        stored_.decode(s, stored_.lease_stored(s).data(), all);
      }
      continue;
    }
    if (coded(unit)) decode_gathered(comm_, device_, kWeightCodes, wire(offset), all);
    if (s.fp8) fp8_.decode(device_, s, wire(offset), all);
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

// Ranks that have a part of a row add it to zeros, as integers, so that no bit changes.
void ParamStore::look_up(i64 param, std::span<const i64> rows, TensorView to) {
  const RowPlace& place = layout_.rows()[static_cast<size_t>(param)];
  const Segment& s = layout_.segments()[place.segment];
  TensorView table = views_[s.unit][static_cast<size_t>(param - layout_.units()[s.unit].first_param)];
  const i64 width = dtype_bytes(options_.work), N = table.dim(0), C = table.dim(1),
            row_bytes = table.codes ? table.codes.row_bytes(C) : C * width;
  const i64 together = table.panels ? table.panels.rows : 1;
  DS_ASSERT(to.dim(0) == std::ssize(rows) && to.dim(1) == C && C % 2 == 0);
  struct Wanted {
    i64 row, to;
  };
  std::vector<Wanted> wanted;
  for (const i64 row : rows) wanted.push_back({row, std::ssize(wanted)});
  std::erase_if(wanted, [](const Wanted& w) { return w.row < 0; });
  std::ranges::stable_sort(wanted, {}, &Wanted::row);
  // This rank's part of the panel of a row, in bytes of the segment.
  struct Part {
    i64 first, rows, begin, end;
  };
  const auto part_of = [&](i64 row) {
    const i64 first = row - row % together, n = std::min(together, N - first),
              at = place.offset * width + first * row_bytes, own = s.slice * comm_.rank() * width;
    return Part{first, n, std::max(at, own), std::min(at + n * row_bytes, own + s.slice * width)};
  };
  device_.zero(to.data, to.bytes());
  for (size_t i = 0; i < wanted.size();) {
    const Part part = part_of(wanted[i].row);
    size_t next = i;
    while (next < wanted.size() && wanted[next].row < part.first + part.rows) ++next;
    if (part.begin >= part.end) {
      i = next;
      continue;
    }
    const i64 of_row = place.offset * width;
    const TierLease there = lease_bytes(place, part.begin - of_row, part.end - part.begin, LeaseTo::Read);
    if (next < wanted.size()) {
      if (const Part after = part_of(wanted[next].row); after.begin < after.end)
        shards_->expect(slice_at(s) + after.begin - s.slice * comm_.rank() * width, after.end - after.begin);
    }
    for (; i < next; ++i) {
      if (table.panels || table.codes) {
        const i32 id = narrow<i32>(wanted[i].row - part.first);
        table.data = there.data(), table.shape[0] = part.rows;
        device_.ops().embedding_fwd(to.rows(wanted[i].to, 1), table,
                                    TensorView::of(const_cast<i32*>(&id), DType::I32, {1}), 0, false, device_.stream());
        continue;
      }
      const i64 row = of_row + wanted[i].row * row_bytes, begin = std::max(row, part.begin),
                end = std::min(row + row_bytes, part.end);
      device_.copy(to.as<char>() + wanted[i].to * row_bytes + begin - row,
                   static_cast<const char*>(there.data()) + begin - part.begin, end - begin);
    }
  }
  if (comm_.size() > 1)
    comm_.all_reduce(to.data, to.bytes() / dtype_bytes(DType::I32), DType::I32, ReduceOp::Sum, reduce_tag_).wait();
}

void* ParamStore::on_host(const Piece& piece) const noexcept {
  const Segment& s = layout_.segments()[piece.segment];
  if (whole(s) || StoredParams::has(s) || has_codes(s)) return nullptr;
  return shards_->on_host((segment_offset_[piece.segment] + piece.segment_offset - s.slice * comm_.rank()) *
                          dtype_bytes(options_.work));
}

// Tells the tier of slices which units are gathered next.
void ParamStore::expect_launches() {
  if (in_place() || options_.reads_directly) return;
  const size_t end = std::min(next_ + 1 + kStepsAhead, plan_->steps.size());
  for (size_t step = next_ + 1; step < end; ++step) {
    for (const GatherStep::Launch& l : plan_->steps[step].launch) {
      for (const Segment& s : layout_.segments_of(l.unit)) {
        const i64 bytes = dtype_bytes(options_.work);
        if (StoredParams::has(s)) {
          stored_.expect(s);
          continue;
        }
        if (!whole(s) && !has_codes(s))
          shards_->expect(segment_offset_[&s - layout_.segments().data()] * bytes, s.slice * bytes);
      }
    }
  }
}

void ParamStore::end_access() noexcept {
  if (plan_->accesses.empty()) return;
  // A released unit is forgotten at once: whoever uses it without a lease fails on a null view, not on stale numbers.
  for (const i64 unit : plan_->steps[next_].release) {
    for (const Segment& s : layout_.segments_of(unit)) {
      if (!whole(s) && !has_codes(s)) point_rows(s, nullptr);
    }
  }
  ++next_;
}

void ParamStore::publish(Changed changed) {
  packed_ = false;
  if (carries_) drop_gathered();
  for (auto& second : second_) {  // parameters have changed
    if (second) second->invalidate();
  }
  if (!layout_.states().shard_optimizer) return;
  tickets_.clear();
  if (fp8_.any()) tickets_.push_back(publish_maxima(changed));
  i64 elems = 0;  // published together
  const auto flush = [&] {
    if (!published_.empty()) tickets_.push_back(comm_.all_gather(published_, gather_tag_));
    published_.clear();
    elems = 0;
  };
  for (const Segment& s : layout_.segments()) {
    const bool stored = StoredParams::has(s) && !layout_.states().shard_params;
    if ((!whole(s) && !stored) || (changed == Changed::Trained && !s.trained)) continue;
    const i64 n = s.slice * layout_.num_ranks();
    if (elems + n > options_.allgather_bucket) flush();
    if (stored) {
      published_.push_back({stored_by_rank_.as<char>().data() + stored_.offset_of(s), stored_.slice_of(s).bytes()});
    } else {
      published_.push_back({whole_segment(s), s.slice * dtype_bytes(options_.work)});
    }
    elems += n;
  }
  flush();
  for (Ticket& t : tickets_) t.wait();
}

Ticket ParamStore::publish_maxima(Changed changed) {
  const bool trained_alone = changed == Changed::Trained;
  for (const Segment& s : layout_.segments()) {
    if (!s.fp8 || (trained_alone && !s.trained)) continue;
    const TierLease own = lease(s, s.slice * comm_.rank(), s.slice, LeaseTo::Read);
    fp8_.measure(device_, s, own_slice(s, own));
  }
  return fp8_.agree(comm_, trained_alone, reduce_tag_);
}

}  // namespace ds::zero
