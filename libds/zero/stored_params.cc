// SPDX-License-Identifier: Apache-2.0
#include "zero/stored_params.h"

#include <algorithm>
#include <utility>

namespace ds::zero {

using model::Storage;

i64 StoredSlice::bytes() const noexcept { return is_codes(form) ? codes().bytes() : elems * 2; }

CodedSlice StoredSlice::codes() const noexcept {
  return {{.bits = form == Storage::Int8 ? 8 : 4, .block = StoredParams::kBlock, .exact = true}, elems};
}

TensorView StoredSlice::rounded(void* slice, i64 first, i64 count) const noexcept {
  return TensorView::of(static_cast<char*>(slice) + first * 2, form == Storage::BF16 ? DType::BF16 : DType::F16,
                        {count});
}

std::pair<TensorView, TensorView> StoredSlice::part(void* slice, i64 first, i64 count) const noexcept {
  const CodedSlice all = codes();
  u8* const codes = all.codes(slice, 0, 1).as<u8>() + all.format.code_bytes(first);
  float* const scales = all.scales(slice, 0, 1).as<float>() + first / StoredParams::kBlock;
  return {TensorView::of(codes, DType::U8, {1, all.format.code_bytes(count)}),
          TensorView::of(scales, DType::F32, {1, all.format.num_blocks(count)})};
}

void StoredSlice::encode(Device& device, void* slice, i64 first, TensorView x) const noexcept {
  const i64 n = x.numel();
  if (!is_codes(form)) return device.ops().cast(rounded(slice, first, n), x, device.stream());
  const auto [code, scale] = part(slice, first, n);
  device.ops().quantize(code, scale, x.reshaped({1, n}), {}, codes().format, {}, device.stream());
}

void StoredSlice::decode(Device& device, void* slice, i64 first, TensorView x) const noexcept {
  const i64 n = x.numel();
  if (!is_codes(form)) return device.ops().cast(x, rounded(slice, first, n), device.stream());
  const auto [code, scale] = part(slice, first, n);
  device.ops().dequantize(x.reshaped({1, n}), code, scale, codes().format, device.stream());
}

StoredParams::StoredParams(const Layout& layout, int rank, DType work) : layout_(layout), rank_(rank), work_(work) {
  for (const Segment& s : layout.segments()) {
    offsets_.push_back(bytes_);
    if (!has(s)) continue;
    DS_ASSERT(layout.options().block % kBlock == 0);
    bytes_ += bytes_of(s);
    largest_ = std::max(largest_, bytes_of(s));
    window_elems_ = std::max(window_elems_, std::min(slice_of(s).elems, kMostLeased));
  }
}

void StoredParams::allocate(Device& device, MemoryLedger& ledger, std::unique_ptr<TierArray> kept) {
  device_ = &device;
  kept_ = std::move(kept);
  window_ = device_buffer(device, ledger, Tag::Workspace, window_elems_ * dtype_bytes(work_));
}

void StoredParams::decode(const Segment& s, void* slices, TensorView to) const noexcept {
  const StoredSlice slice = slice_of(s);
  char* values = static_cast<char*>(to.data);
  char* from = static_cast<char*>(slices);
  for (i64 left = to.numel(); left > 0; left -= slice.elems) {
    slice.decode(*device_, from, 0, TensorView::of(values, work_, {slice.elems}));
    values += slice.elems * dtype_bytes(work_);
    from += slice.bytes();
  }
}

TierLease StoredParams::lease(const Segment& s, i64 first, i64 count, LeaseTo access) {
  DS_ASSERT(leased_ == nullptr && count <= window_elems_ && (first % kBlock == 0 || !is_codes(s.storage)));
  const StoredSlice slice = slice_of(s);
  DS_ASSERT(first % slice.elems + count <= slice.elems && (whole() || first / slice.elems == rank_));
  leased_ = &s;
  first_ = first;
  return TierArray::lease(0, count * dtype_bytes(work_), access);
}

void StoredParams::visit_leased(LeaseTo access, FunctionRef<void(void*, i64)> visit) {
  const StoredSlice slice = slice_of(*leased_);
  const i64 number = whole() ? first_ / slice.elems : 0;  // of the slice, of those in memory
  const TierLease lease = kept_->lease(offset_of(*leased_) + number * slice.bytes(), slice.bytes(), access);
  visit(lease.data(), first_ % slice.elems);
}

void* StoredParams::open(i64, i64 bytes, LeaseTo access) {
  const TensorView values = TensorView::of(window_.data(), work_, {bytes / dtype_bytes(work_)});
  if (access != LeaseTo::Fill && bytes > 0) {
    visit_leased(LeaseTo::Read,
                 [&](void* slice, i64 first) { slice_of(*leased_).decode(*device_, slice, first, values); });
  }
  return window_.data();
}

void StoredParams::close(void* data, i64, i64 bytes, LeaseTo access) noexcept {
  const TensorView values = TensorView::of(data, work_, {bytes / dtype_bytes(work_)});
  try {
    if (access != LeaseTo::Read && bytes > 0) {
      visit_leased(LeaseTo::Write,
                   [&](void* slice, i64 first) { slice_of(*leased_).encode(*device_, slice, first, values); });
    }
  } catch (const Error&) {  // of a file, which throws again at its next use
  }
  leased_ = nullptr;
}

}  // namespace ds::zero
