// SPDX-License-Identifier: Apache-2.0
#include "model/slice.h"

namespace ds::model {
namespace {

i64 product(std::span<const i64> dims) noexcept {
  // Even if the other dims are huge: [2^40, 2^40, 0] is a valid shape.
  if (std::ranges::find(dims, 0) != dims.end()) return 0;
  i64 n = 1;
  for (const i64 d : dims) n *= d;
  return n;
}

}  // namespace

std::string slice_problem(const ParamSlice& slice, std::span<const i64> shape) {
  if (slice.whole()) return {};
  if (slice.dim < 0 || std::cmp_greater_equal(slice.dim, shape.size()))
    return fmt::format("dim {} of {}", slice.dim, shape.size());
  const i64 size = shape[slice.dim];
  i64 end = 0;
  for (const auto& [from, to] : slice.ranges) {
    if (from < end || to <= from || to > size)
      return fmt::format("range {}:{} of dim {} of {} indices, after {}", from, to, slice.dim, size, end);
    end = to;
  }
  return {};
}

std::vector<i64> local_shape(const ParamSlice& slice, std::span<const i64> shape) {
  std::vector<i64> local(shape.begin(), shape.end());
  if (slice.whole()) return local;
  i64& size = local.at(static_cast<size_t>(slice.dim));
  size = 0;
  for (const auto& [from, to] : slice.ranges) size += to - from;
  return local;
}

std::string slice_text(const ParamSlice& slice, std::span<const i64> shape) {
  if (slice.whole()) return {};
  std::string text = "[";
  for (int dim = 0; std::cmp_less(dim, shape.size()); ++dim) {
    if (dim > 0) text += ",";
    if (dim != slice.dim) {
      text += ":";
      continue;
    }
    for (size_t r = 0; r < slice.ranges.size(); ++r)
      text += fmt::format("{}{}:{}", r == 0 ? "" : "+", slice.ranges[r].first, slice.ranges[r].second);
  }
  return text + "]";
}

SliceMap::SliceMap(const ParamSlice& slice, std::span<const i64> shape) {
  const std::string problem = slice_problem(slice, shape);
  DS_CHECK(problem.empty(), Errc::Internal, "not a slice of a parameter [{}]: {}", fmt::join(shape, ", "), problem);
  const std::vector<i64> local = local_shape(slice, shape);
  numel_ = product(local);
  if (numel_ == 0 || slice.whole()) {
    width_ = stride_ = std::max<i64>(numel_, 1);
    spans_ = {{0, 0, width_}};
    return;
  }
  const auto dim = static_cast<size_t>(slice.dim);
  const i64 inner = product(shape.subspan(dim + 1));
  stride_ = shape[dim] * inner;
  width_ = 0;
  for (const auto& [from, to] : slice.ranges) {
    const i64 count = (to - from) * inner;
    if (!spans_.empty() && spans_.back().global + spans_.back().count == from * inner) {
      spans_.back().count += count;
    } else {
      spans_.push_back({width_, from * inner, count});
    }
    width_ += count;
  }
  if (width_ == stride_) {  // all of the dim: one run
    width_ = stride_ = numel_;
    spans_ = {{0, 0, numel_}};
  }
}

size_t SliceMap::span_of(i64 in_row) const noexcept {
  const auto after = std::ranges::upper_bound(spans_, in_row, {}, &Span::local);
  return static_cast<size_t>(after - spans_.begin()) - 1;
}

i64 SliceMap::num_before(i64 global) const noexcept {
  if (numel_ == 0) return 0;
  const i64 row = global / stride_, in_row = global % stride_;
  const auto after = std::ranges::upper_bound(spans_, in_row, {}, &Span::global);
  if (after == spans_.begin()) return row * width_;
  const Span& span = *std::prev(after);
  return row * width_ + span.local + std::min(in_row - span.global, span.count);
}

i64 SliceMap::global_of(i64 local) const noexcept {
  const i64 in_row = local % width_;
  const Span& span = spans_[span_of(in_row)];
  return local / width_ * stride_ + span.global + (in_row - span.local);
}

}  // namespace ds::model
