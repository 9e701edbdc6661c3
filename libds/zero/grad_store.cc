// SPDX-License-Identifier: Apache-2.0
#include "zero/grad_store.h"

#include <algorithm>

#include "zero/rounded_array.h"

namespace ds::zero {

std::vector<Bucket> plan_buckets(const Layout& layout, const GradOptions& options) {
  std::vector<Bucket> buckets;
  for (const std::vector<i64>& pass : options.passes) {
    bool first = true;
    for (const i64 unit : pass) {
      const i64 n = layout.units()[unit].padded;
      const bool beside = std::ranges::find(options.beside, unit) != options.beside.end();
      const bool open = std::ranges::binary_search(options.open, unit);
      if (std::exchange(first, false) || open || buckets.back().open ||
          (!beside && buckets.back().elems + n > options.bucket_elems))
        buckets.emplace_back().open = open;
      buckets.back().units.push_back(unit);
      buckets.back().elems += n;
    }
  }
  return buckets;
}

namespace {

i64 padded_elems(const Layout& layout) {
  i64 n = 0;
  for (const UnitPlace& u : layout.units()) n += u.padded;
  return n;
}

// The memory in which buckets take turns: of those that are open while others come, and behind it two slots of others.
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

}  // namespace

namespace {

// Whether a rank has accumulators of all elements, or of the slices that it owns.
bool accumulates_all(const Layout& layout, const GradOptions& options) {
  return !layout.states().shard_optimizer || options.accumulates_locally() || options.keeps_own;
}

}  // namespace

i64 grad_accum_elems(const Layout& layout, const GradOptions& options) {
  return accumulates_all(layout, options) ? padded_elems(layout) : layout.shard_elems();
}

namespace {

// Where each segment would begin, if all of it were there, in an array of the slices that a rank owns.
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

i64 fresh_grad_elems(const Layout& layout, std::span<const Bucket> buckets, const GradOptions& options) {
  return layout.states().shard_grads ? BucketSlots(buckets, options.overlap).elems() : padded_elems(layout);
}

namespace {

// Where each unit is staged: one at a time, and those that are written beside another behind it, as are tiles.
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

i64 staging_elems(const Layout& layout, const GradOptions& options) {
  i64 end = 0;
  staging_bases(layout, options, end);
  return end;
}

GradStore::GradStore(const Layout& layout, std::span<const std::span<const model::ParamRow>> rows, Communicator& comm,
                     Device& device, MemoryLedger& ledger, const GradOptions& options, const MakeArray& tier,
                     Communicator* near, Communicator* across)
    : layout_(layout),
      comm_(comm),
      reduce_tag_(options.axis + ".reduce_scatter"),
      gather_tag_(options.axis + ".all_gather"),
      coded_tag_(options.axis + ".all_to_all"),
      sparse_tag_(options.axis + ".sparse_gather"),
      device_(device),
      ledger_(ledger),
      ops_(device.ops()),
      stream_(device.stream()),
      options_(options) {
  buckets_ = plan_buckets(layout, options);
  summed_.assign(buckets_.size(), false);
  i64 staged = 0;
  staging_base_ = staging_bases(layout, options, staged);

  const bool take_turns = layout.states().shard_grads;
  BucketSlots slots(buckets_, options.overlap);
  tickets_.resize(take_turns ? slots.num() : buckets_.size());
  unit_bucket_.resize(layout.units().size());
  unit_base_.resize(layout.units().size());
  i64 end = 0;
  size_t most_segments = 0;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    slot_.push_back(take_turns ? slots.next(buckets_[b]) : b);
    i64 at = take_turns ? slots.base(slot_.back()) : end;
    bucket_base_.push_back(at);
    size_t num_segments = 0;
    for (const i64 unit : buckets_[b].units) {
      const UnitPlace& place = layout.units()[unit];
      unit_bucket_[unit] = narrow<i64>(b);
      unit_base_[unit] = at;
      at += place.padded;
      num_segments += static_cast<size_t>(place.num_segments);
    }
    end = at;
    most_segments = std::max(most_segments, num_segments);
  }
  segments_.reserve(most_segments);
  landing_.resize(tickets_.size());
  for (std::vector<TierLease>& leases : landing_) leases.reserve(most_segments);
  gathered_.reserve(layout.segments().size());

  const i64 width = dtype_bytes(options.sums);
  const Tag tag = layout.states().shard_grads ? Tag::Buckets : Tag::Grads;
  fresh_ = comm.allocate(ledger, tag, fresh_grad_elems(layout, buckets_, options) * dtype_bytes(options.wire));
  sums_base_ = owned_base_ = grad_accum_bases(layout, options, comm.rank());
  const bool elsewhere = tier && layout.states().shard_optimizer;
  if (accumulates_all(layout, options) || !elsewhere) {
    // Gathered from other ranks at stage 0, so that it lies in the communicator's memory.
    Buffer memory = comm.allocate(ledger, Tag::GradAccum, grad_accum_elems(layout, options) * width);
    if (accumulates_all(layout, options)) sums_ = std::move(memory);
    std::unique_ptr<TierArray> array =
        as_fp32(sums_ ? std::make_unique<DeviceArray>(sums_.data()) : std::make_unique<DeviceArray>(std::move(memory)));
    (elsewhere ? sums_array_ : owned_) = std::move(array);
  }
  if (elsewhere) {
    owned_base_ = owned_bases(layout, comm.rank());
    owned_ =
        as_fp32(tier(device, ledger, Tag::GradAccum, layout.shard_elems() * width, layout.largest_slice() * width));
  }
  staging_ = device_buffer(device, ledger, Tag::Workspace, staging_elems(layout, options) * 4);
  if (!options.sparse.empty()) {
    i64 most = 0;
    for (const SparseUnit& u : options.sparse) {
      for (const Segment& s : layout.segments_of(u.unit)) most = std::max(most, s.persistent ? 0 : s.slice);
    }
    // At stage 0 sums travel, too.
    const i64 of_sums = layout.states().shard_optimizer ? 0 : width;
    nonzero_.emplace(comm, device, ledger, Tag::Buckets, most, std::max(of_sums, dtype_bytes(options.wire)));
  }
  if (options.code_bits > 0) {
    coded_.emplace(near, across != nullptr ? *across : comm, device, ledger, Tag::Buckets, layout.largest_slice(),
                   CodeFormat{.bits = options.code_bits, .block = kCodeBlock});
    std::vector<i64> slices;
    for (const Segment& s : layout.segments()) {
      errors_of_.push_back(slices.size());
      if (coded(s)) slices.push_back(s.slice);
    }
    if (options.loco) {
      errors_.emplace(*coded_, ledger, Tag::GradAccum, std::move(slices), *options.loco);
      error_numbers_ = device_buffer(device, ledger, Tag::GradAccum, 2 * 4);
    }
  }
  const auto view_at = [&](size_t u, i64 at, std::initializer_list<i64> shape) {
    const DType dtype = options.staged() ? DType::F32 : options.wire;
    char* const memory = static_cast<char*>(options.staged() ? staging_.data() : fresh_.data());
    const i64 begin = (options.staged() ? staging_base_ : unit_base_)[u] + at;
    return TensorView::of(memory + begin * dtype_bytes(dtype), dtype, shape);
  };
  for (size_t u = 0; u < rows.size(); ++u) {
    const UnitPlace& unit = layout.units()[u];
    gaps_.push_back(layout.gaps_of(static_cast<i64>(u)));
    std::vector<TensorView>& views = views_.emplace_back();
    for (size_t r = 0; r < rows[u].size(); ++r) {
      const RowPlace& place = layout.rows()[static_cast<size_t>(unit.first_param) + r];
      if (place.segment < 0 || layout.is_tile(layout.segments()[place.segment].unit)) {
        views.emplace_back();
        continue;
      }
      const model::ParamRow& row = rows[u][r];
      const i64 at = layout.segments()[place.segment].offset + place.offset;
      views.push_back(row.shape.size() == 2 ? view_at(u, at, {row.shape[0], row.shape[1]})
                                            : view_at(u, at, {row.numel()}));
    }
  }
  for (const MatrixTile& tile : layout.tiles()) {
    gaps_.emplace_back();
    views_.push_back({view_at(static_cast<size_t>(tile.unit), 0, {tile.rows, tile.cols})});
  }
}

std::unique_ptr<TierArray> GradStore::as_fp32(std::unique_ptr<TierArray> kept) const {
  if (options_.sums == DType::F32) return kept;
  return std::make_unique<RoundedArray>(device_, ledger_, std::move(kept), options_.sums);
}

void GradStore::wait(size_t slot) {
  tickets_[slot].wait();
  landing_[slot].clear();
}

void GradStore::zero_gaps(i64 unit) {
  const size_t u = static_cast<size_t>(unit);
  const i64 bytes = dtype_bytes(options_.wire);
  for (const auto& [first, count] : gaps_[u])
    device_.zero(static_cast<char*>(fresh_.data()) + (unit_base_[u] + first) * bytes, count * bytes);
}

std::span<const TensorView> GradStore::acquire(i64 unit) {
  const size_t bucket = static_cast<size_t>(unit_bucket_[unit]);
  if (unit == buckets_[bucket].units.front()) {
    wait(slot_[bucket]);
    // Else the sum under way would take what is expected below for the next one.
    if (coding_ != nullptr && unit_bucket_[coding_->unit] == unit_bucket_[unit]) finish_coded();
    if (summed_[bucket] && !owned_->in_place()) {  // what is there already is added to
      for (const i64 u : buckets_[bucket].units) {
        for (const Segment& s : layout_.segments_of(u))
          expect(&s - layout_.segments().data(), s.slice * comm_.rank(), s.slice);
      }
    }
    if (layout_.states().shard_grads) {
      // The slot held other units before: the padding between rows and segments must be zero, as in fresh memory.
      for (const i64 u : buckets_[bucket].units) {
        zero_gaps(u);
        for (const Segment& s : layout_.segments_of(u)) {
          const i64 at = unit_base_[u] + s.offset + s.numel, pad = s.slice * layout_.num_ranks() - s.numel;
          device_.zero(static_cast<char*>(fresh_.data()) + at * dtype_bytes(options_.wire),
                       pad * dtype_bytes(options_.wire));
        }
      }
    }
  }
  return views_[unit];
}

void GradStore::commit(i64 unit, i64 micro) {
  const size_t u = static_cast<size_t>(unit), bucket = static_cast<size_t>(unit_bucket_[u]);
  const bool last_micro = micro + 1 == options_.micro_batches;
  if (options_.staged()) {
    for (const Segment& s : layout_.segments_of(unit)) {
      const i64 at = unit_base_[u] + s.offset;
      void* data = static_cast<char*>(fresh_.data()) + at * dtype_bytes(options_.wire);
      ops_.cast(TensorView::of(data, options_.wire, {s.numel}),
                TensorView::of(staging_.as<float>().data() + staging_base_[u] + s.offset, DType::F32, {s.numel}),
                stream_);
    }
    zero_gaps(unit);  // others' gradients were staged there
  }
  if (!reduces_) return accumulate(unit, micro > 0, false);
  if (options_.accumulates_locally()) accumulate(unit, micro > 0, last_micro);
  if (!options_.reduce_each_micro && !last_micro) return;
  const bool continues = options_.reduce_each_micro && micro > 0;
  for (const Segment& s : layout_.segments_of(unit)) {
    if (coded(s)) start_coded(s, continues);
  }
  if (unit == buckets_[bucket].units.back()) reduce(bucket, continues);
}

// Adds the fresh gradient of a unit to this rank's own sum; `back`: which takes its place then, rounded.
void GradStore::accumulate(i64 unit, bool continues, bool back) {
  const UnitPlace& place = layout_.units()[unit];
  if (place.num_segments == 0) return;
  const TensorView fresh = TensorView::of(
      static_cast<char*>(fresh_.data()) + unit_base_[unit] * dtype_bytes(options_.wire), options_.wire, {place.padded});
  // Segments of a unit lie side by side in both arrays.
  const TierLease lease =
      sums().lease(sums_base_[place.first_segment] * 4, place.padded * 4, continues ? LeaseTo::Write : LeaseTo::Fill);
  const TensorView all = TensorView::of(lease.data(), DType::F32, {place.padded});
  ops_.fold(all, {&fresh, 1}, continues, stream_);
  if (back) ops_.cast(fresh, all, stream_);
}

const SparseUnit* GradStore::sparse(const Segment& s) const noexcept {
  const auto found = std::ranges::lower_bound(options_.sparse, s.unit, {}, &SparseUnit::unit);
  return !s.persistent && found != options_.sparse.end() && found->unit == s.unit ? &*found : nullptr;
}

TensorView GradStore::fresh(const Segment& s) const noexcept {
  return TensorView::of(fresh_.as<char>().data() + (unit_base_[s.unit] + s.offset) * dtype_bytes(options_.wire),
                        options_.wire, {s.slice * layout_.num_ranks()});
}

void GradStore::reduce(size_t bucket, bool continues) {
  segments_.clear();
  std::vector<TierLease>& landing = landing_[slot_[bucket]];
  for (const i64 unit : buckets_[bucket].units) {
    for (const Segment& s : layout_.segments_of(unit)) {
      if (coded(s) || (sparse(s) != nullptr && reduce_sparse(s, continues))) continue;
      landing.push_back(owned_slice(s, continues));
      segments_.push_back({fresh(s).data, landing.back().values(), s.slice});
    }
  }
  summed_[bucket] = options_.reduce_each_micro;
  if (segments_.empty()) return;
  tickets_[slot_[bucket]] = comm_.reduce_scatter(segments_, options_.wire, continues, reduce_tag_);
}

void GradStore::start_coded(const Segment& s, bool continues) {
  finish_coded();
  coded_->start(fresh(s), coded_tag_, errors_ ? &*errors_ : nullptr,
                errors_of_[static_cast<size_t>(&s - layout_.segments().data())]);
  coding_ = &s;
  coding_continues_ = continues;
  if (comm_.size() == 1) finish_coded();  // which reads the gradient
}

void GradStore::finish_coded() {
  const Segment* const s = std::exchange(coding_, nullptr);
  if (s == nullptr) return;
  const TierLease sum = owned_slice(*s, coding_continues_);
  coded_->finish(TensorView::of(sum.data(), DType::F32, {s->slice}), coding_continues_);
}

bool GradStore::reduce_sparse(const Segment& s, bool continues) {
  if (!nonzero_->saves(fresh(s), sparse(s)->of_rank, sparse_tag_)) return false;
  const TierLease sum = owned_slice(s, continues);
  nonzero_->reduce_scatter(fresh(s), TensorView::of(sum.data(), DType::F32, {s.slice}), continues, sparse_tag_);
  return true;
}

void GradStore::set_loss_scale(float scale) noexcept {
  const float before = std::exchange(error_scale_, scale);
  if (errors_ && scale != before) errors_->rescale(scale / before);
}

std::vector<std::pair<std::string, TensorView>> GradStore::rank_local() {
  std::vector<std::pair<std::string, TensorView>> own;
  if (!errors_) return own;
  const float numbers[] = {static_cast<float>(errors_->calls()), static_cast<float>(error_scale())};
  device_.upload(error_numbers_.data(), numbers, sizeof numbers);
  const auto add = [&](const char* name, TensorView values) {
    if (values.numel() > 0) own.emplace_back(name, values);
  };
  add("gradient_error.near", errors_->of_node_hop());
  add("gradient_error.across", errors_->of_across_hop());
  if (!own.empty()) add("gradient_error.calls_and_scale", TensorView::of(error_numbers_.data(), DType::F32, {2}));
  return own;
}

void GradStore::rank_local_was_set() {
  if (!errors_) return;
  float numbers[2] = {};
  device_.download(numbers, error_numbers_.data(), sizeof numbers);
  errors_->set_calls(static_cast<i64>(numbers[0]));
  error_scale_ = numbers[1];
}

void GradStore::forget_errors() {
  if (!errors_) return;
  for (const TensorView& e : {errors_->of_node_hop(), errors_->of_across_hop()}) {
    if (e.numel() > 0) device_.zero(e.data, e.bytes());
  }
  errors_->set_calls(0);
}

void GradStore::finish() {
  finish_coded();
  for (size_t slot = 0; slot < tickets_.size(); ++slot) wait(slot);
  summed_.assign(buckets_.size(), false);
}

void GradStore::gather(std::span<const i64> wanted) {
  if (layout_.states().shard_optimizer) return;
  gathered_.clear();
  const i64 width = dtype_bytes(options_.sums);
  for (const i64 unit : wanted) {
    for (const Segment& s : layout_.segments_of(unit)) {
      char* const begin = sums_.as<char>().data() + sums_base_[&s - layout_.segments().data()] * width;
      const SparseUnit* const mostly_zero = sparse(s);
      if (mostly_zero != nullptr &&
          nonzero_->all_gather(TensorView::of(begin, options_.sums, {s.slice * layout_.num_ranks()}),
                               mostly_zero->of_sum, sparse_tag_))
        continue;
      gathered_.push_back({begin, s.slice * width});
    }
  }
  if (!gathered_.empty()) comm_.all_gather(gathered_, gather_tag_).wait();
}

}  // namespace ds::zero
