// SPDX-License-Identifier: Apache-2.0
#include "zero/fp8_gathers.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace ds::zero {

Fp8Gathers::Fp8Gathers(const Layout& layout, std::span<const std::span<const model::ParamRow>> rows, int rank)
    : layout_(layout), rank_(rank), begin_(layout.segments().size() + 1) {
  std::vector<std::vector<Matrix>> of_segments(layout.segments().size());
  for (size_t u = 0; u < rows.size(); ++u) {
    for (size_t r = 0; r < rows[u].size(); ++r) {
      const RowPlace& place = layout.rows()[static_cast<size_t>(layout.units()[u].first_param) + r];
      if (place.segment < 0 || !layout.segments()[place.segment].fp8) continue;
      const model::MatrixShape m = rows[u][r].matrices();
      DS_ASSERT(place.offset % kFp8Block == 0 && m.rows % kFp8Block == 0 && m.cols % kFp8Block == 0);
      of_segments[static_cast<size_t>(place.segment)].push_back(
          {place.offset, place.numel, m.count * m.rows / kFp8Block, m.cols / kFp8Block, 0});
    }
  }
  for (size_t s = 0; s < of_segments.size(); ++s) {
    begin_[s] = std::ssize(matrices_);
    matrices_.insert(matrices_.end(), of_segments[s].begin(), of_segments[s].end());
  }
  begin_.back() = std::ssize(matrices_);
  for (const bool of_trained : {true, false}) {
    for (size_t s = 0; s < of_segments.size(); ++s) {
      if (layout.segments()[s].trained != of_trained) continue;
      for (i64 m = begin_[s]; m < begin_[s + 1]; ++m)
        matrices_[m].first = std::exchange(squares_, squares_ + matrices_[m].down * matrices_[m].across);
    }
    if (of_trained) trained_squares_ = squares_;
  }
}

void Fp8Gathers::allocate(Communicator& comm, MemoryLedger& ledger) {
  maxima_ = comm.allocate(ledger, Tag::Gathered, squares_ * dtype_bytes(DType::I64));
}

std::span<const Fp8Gathers::Matrix> Fp8Gathers::matrices_of(const Segment& s) const noexcept {
  const size_t number = static_cast<size_t>(&s - layout_.segments().data());
  return std::span(matrices_).subspan(begin_[number], begin_[number + 1] - begin_[number]);
}

TensorView Fp8Gathers::maxima(const Matrix& m) const noexcept {
  return TensorView::of(static_cast<i64*>(maxima_.data()) + m.first, DType::I64, {m.down, m.across});
}

template <class F>
void Fp8Gathers::for_parts(const Segment& s, F&& use) const noexcept {
  const i64 first = s.slice * rank_;
  for (const Matrix& m : matrices_of(s)) {
    const i64 begin = std::max(m.offset, first), end = std::min(m.offset + m.numel, first + s.slice);
    if (begin < end) {
      use(m, begin - first, begin - m.offset, end - begin);
    } else {
      use(m, 0, 0, 0);
    }
  }
}

void Fp8Gathers::measure(Device& device, const Segment& s, TensorView slice) const noexcept {
  for_parts(s, [&](const Matrix& m, i64 at, i64 first, i64 count) {
    device.ops().max_abs_fp8(maxima(m), slice.rows(at, count), first, device.stream());
  });
}

Ticket Fp8Gathers::agree(Communicator& comm, bool trained_alone, std::string_view tag) const {
  const i64 n = trained_alone ? trained_squares_ : squares_;
  return n > 0 ? comm.all_reduce(maxima_.data(), n, DType::I64, ReduceOp::Max, tag) : Ticket();
}

void Fp8Gathers::encode(Device& device, const Segment& s, TensorView slice, void* codes) const noexcept {
  u8* const own = static_cast<u8*>(codes) + s.slice * rank_;
  for_parts(s, [&](const Matrix& m, i64 at, i64 first, i64 count) {
    if (count == 0) return;
    device.ops().encode_fp8(TensorView::of(own + at, DType::F8E4M3, {count}), slice.rows(at, count), maxima(m), first,
                            device.stream());
  });
}

void Fp8Gathers::decode(Device& device, const Segment& s, void* codes, TensorView full) const noexcept {
  for (const Matrix& m : matrices_of(s)) {
    device.ops().decode_fp8(full.rows(m.offset, m.numel),
                            TensorView::of(static_cast<u8*>(codes) + m.offset, DType::F8E4M3, {m.numel}), maxima(m), 0,
                            device.stream());
  }
}

}  // namespace ds::zero
