// SPDX-License-Identifier: Apache-2.0
#include "zero/grad_store.h"

#include <algorithm>

namespace ds::zero {

std::vector<Bucket> plan_buckets(const Layout& layout, std::span<const i64> order, i64 limit) {
  std::vector<Bucket> buckets;
  for (const i64 unit : order) {
    const i64 n = layout.units()[static_cast<size_t>(unit)].padded;
    if (buckets.empty() || buckets.back().elems + n > limit) buckets.emplace_back();
    buckets.back().units.push_back(unit);
    buckets.back().elems += n;
  }
  return buckets;
}

namespace {

i64 padded_elems(const Layout& layout) {
  i64 n = 0;
  for (const UnitPlace& u : layout.units()) n += u.padded;
  return n;
}

i64 num_slots(const Layout& layout, std::span<const Bucket> buckets, const GradOptions& options) {
  const i64 n = narrow<i64>(buckets.size());
  return layout.states().shard_grads ? std::min<i64>(n, options.overlap ? 2 : 1) : n;
}

i64 slot_elems(std::span<const Bucket> buckets) {
  i64 largest = 0;
  for (const Bucket& b : buckets) largest = std::max(largest, b.elems);
  return largest;
}

}  // namespace

i64 grad_accum_elems(const Layout& layout, const GradOptions& options) {
  const bool full = !layout.states().shard_optimizer || options.accumulates_locally();
  return full ? padded_elems(layout) : layout.shard_elems();
}

i64 fresh_grad_elems(const Layout& layout, std::span<const Bucket> buckets, const GradOptions& options) {
  return layout.states().shard_grads ? num_slots(layout, buckets, options) * slot_elems(buckets) : padded_elems(layout);
}

i64 staging_elems(const Layout& layout, const GradOptions& options) {
  i64 largest = 0;
  for (const UnitPlace& u : layout.units()) largest = std::max(largest, u.padded);
  return options.staged() ? largest : 0;
}

GradStore::GradStore(const Layout& layout, std::span<const std::span<const model::ParamRow>> rows, Communicator& comm,
                     Device& device, MemoryLedger& ledger, const GradOptions& options)
    : layout_(layout), comm_(comm), device_(device), ops_(device.ops()), stream_(device.stream()), options_(options) {
  std::vector<i64> order;
  for (i64 u = narrow<i64>(layout.units().size()); u-- > 0;) order.push_back(u);
  buckets_ = plan_buckets(layout, order, options.bucket_elems);

  const size_t slots = static_cast<size_t>(num_slots(layout, buckets_, options));
  tickets_.resize(slots);
  unit_bucket_.resize(layout.units().size());
  unit_base_.resize(layout.units().size());
  i64 end = 0;
  size_t most_segments = 0;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    slot_.push_back(b % slots);
    i64 at = layout.states().shard_grads ? static_cast<i64>(b % slots) * slot_elems(buckets_) : end;
    bucket_base_.push_back(at);
    size_t num_segments = 0;
    for (const i64 unit : buckets_[b].units) {
      const UnitPlace& place = layout.units()[static_cast<size_t>(unit)];
      unit_bucket_[static_cast<size_t>(unit)] = narrow<i64>(b);
      unit_base_[static_cast<size_t>(unit)] = at;
      at += place.padded;
      num_segments += static_cast<size_t>(place.num_segments);
    }
    end = at;
    most_segments = std::max(most_segments, num_segments);
  }
  segments_.reserve(most_segments);
  gathered_.reserve(layout.segments().size());

  const Tag tag = layout.states().shard_grads ? Tag::Buckets : Tag::Grads;
  fresh_ = comm.allocate(ledger, tag, fresh_grad_elems(layout, buckets_, options) * dtype_bytes(options.wire));
  // Gathered from other ranks at stage 0, so that it lies in the communicator's memory.
  accum_ = comm.allocate(ledger, Tag::GradAccum, grad_accum_elems(layout, options) * 4);
  staging_ = device_buffer(device, ledger, Tag::Workspace, staging_elems(layout, options) * 4);
  i64 accum_at = 0;
  for (const Segment& s : layout.segments()) {
    accum_base_.push_back(full_accum() ? accum_at : s.shard_offset);
    accum_at += s.slice * layout.num_ranks();
  }

  for (size_t u = 0; u < rows.size(); ++u) {
    const UnitPlace& unit = layout.units()[u];
    std::vector<TensorView>& views = views_.emplace_back();
    for (size_t r = 0; r < rows[u].size(); ++r) {
      const RowPlace& place = layout.rows()[static_cast<size_t>(unit.first_param) + r];
      const i64 at = layout.segments()[static_cast<size_t>(place.segment)].offset + place.offset;
      const DType dtype = options.staged() ? DType::F32 : options.wire;
      void* data = static_cast<char*>(options.staged() ? staging_.data() : fresh_.data()) +
                   (options.staged() ? at : unit_base_[u] + at) * dtype_bytes(dtype);
      const model::ParamRow& row = rows[u][r];
      views.push_back(row.shape.size() == 2 ? TensorView::of(data, dtype, {row.shape[0], row.shape[1]})
                                            : TensorView::of(data, dtype, {row.numel()}));
    }
  }
}

float* GradStore::element(const Segment& s, i64 first) const noexcept {
  const i64 base = accum_base_[static_cast<size_t>(&s - layout_.segments().data())];
  return accum_.as<float>().data() + base + first - (full_accum() ? 0 : s.slice * comm_.rank());
}

std::span<const TensorView> GradStore::acquire(i64 unit) {
  const size_t bucket = static_cast<size_t>(unit_bucket_[static_cast<size_t>(unit)]);
  if (unit == buckets_[bucket].units.front()) {
    tickets_[slot_[bucket]].wait();
    if (layout_.states().shard_grads) {
      // The slot held other units before: the padding between segments must be zero, as it is in fresh memory.
      for (const i64 u : buckets_[bucket].units) {
        for (const Segment& s : layout_.segments_of(u)) {
          const i64 at = unit_base_[static_cast<size_t>(u)] + s.offset + s.numel,
                    pad = s.slice * layout_.num_ranks() - s.numel;
          device_.zero(static_cast<char*>(fresh_.data()) + at * dtype_bytes(options_.wire),
                       pad * dtype_bytes(options_.wire));
        }
      }
    }
  }
  return views_[static_cast<size_t>(unit)];
}

void GradStore::commit(i64 unit) {
  const bool last_micro = micro_ + 1 == options_.micro_batches;
  if (options_.staged()) {
    for (const Segment& s : layout_.segments_of(unit)) {
      const i64 at = unit_base_[static_cast<size_t>(unit)] + s.offset;
      void* data = static_cast<char*>(fresh_.data()) + at * dtype_bytes(options_.wire);
      ops_.cast(TensorView::of(data, options_.wire, {s.numel}),
                TensorView::of(staging_.as<float>().data() + s.offset, DType::F32, {s.numel}), stream_);
    }
  }
  if (options_.accumulates_locally()) {
    const UnitPlace& place = layout_.units()[static_cast<size_t>(unit)];
    const TensorView fresh = TensorView::of(
        static_cast<char*>(fresh_.data()) + unit_base_[static_cast<size_t>(unit)] * dtype_bytes(options_.wire),
        options_.wire, {place.padded});
    // Segments of a unit lie side by side in both arrays.
    const TensorView sum = TensorView::of(element(layout_.segments_of(unit).front(), 0), DType::F32, {place.padded});
    ops_.fold(sum, {&fresh, 1}, micro_ > 0, stream_);
    if (last_micro) ops_.cast(fresh, sum, stream_);
  }
  const size_t bucket = static_cast<size_t>(unit_bucket_[static_cast<size_t>(unit)]);
  if (unit == buckets_[bucket].units.back() && (options_.reduce_each_micro || last_micro)) reduce(bucket);
  if (unit == buckets_.back().units.back()) micro_ = last_micro ? 0 : micro_ + 1;
}

void GradStore::reduce(size_t bucket) {
  segments_.clear();
  const i64 bytes = dtype_bytes(options_.wire);
  for (const i64 unit : buckets_[bucket].units) {
    for (const Segment& s : layout_.segments_of(unit)) {
      segments_.push_back(
          {static_cast<char*>(fresh_.data()) + (unit_base_[static_cast<size_t>(unit)] + s.offset) * bytes,
           element(s, s.slice * comm_.rank()), s.slice});
    }
  }
  const bool continues = options_.reduce_each_micro && micro_ > 0;
  tickets_[slot_[bucket]] = comm_.reduce_scatter(segments_, options_.wire, continues, "dp.reduce_scatter");
}

void GradStore::finish() {
  for (Ticket& t : tickets_) t.wait();
  if (layout_.states().shard_optimizer) return;
  gathered_.clear();
  for (const Segment& s : layout_.segments()) gathered_.push_back({element(s, 0), s.slice * 4});
  comm_.all_gather(gathered_, "dp.all_gather").wait();
}

}  // namespace ds::zero
