// SPDX-License-Identifier: Apache-2.0
#include "comm/one_bit.h"

#include <algorithm>

namespace ds {
namespace {

constexpr CodeFormat kSigns{.bits = 1, .block = 0};

// Cuts n elements into P slices.
std::vector<OneBitAllReduce::Part> even_parts(i64 n, i64 P) {
  const i64 slice = align_up(div_ceil(n, P), 8);
  std::vector<OneBitAllReduce::Part> parts;
  for (i64 q = 0; q * slice < n; ++q)
    parts.push_back({.slice = q, .at = q * slice, .count = std::min(slice, n - q * slice)});
  return parts;
}

}  // namespace

OneBitAllReduce::OneBitAllReduce(Communicator& comm, Device& device, MemoryLedger& ledger, Tag tag, i64 n)
    : OneBitAllReduce(comm, device, ledger, tag, even_parts(n, comm.size())) {}

OneBitAllReduce::OneBitAllReduce(Communicator& comm, Device& device, MemoryLedger& ledger, Tag tag,
                                 std::vector<Part> parts)
    : comm_(comm), device_(device) {
  DS_ASSERT(std::ranges::is_sorted(parts, {}, &Part::slice));
  std::vector<i64> ends(static_cast<size_t>(comm.size()), 0);
  for (const Part& part : parts) {
    i64& end = ends[part.slice];
    places_.push_back({part, end});
    worker_elems_ += part.count;
    end = align_up(end + part.count, 8);
    num_scales_ = std::max(num_scales_, part.scale + 1);
    slice_elems_ = std::max(slice_elems_, end);
  }
  elems_of_scale_.resize(static_cast<size_t>(num_scales_));
  for (const Part& part : parts) elems_of_scale_[part.scale] += part.count;
  const auto own = std::ranges::equal_range(parts, i64{comm.rank()}, {}, &Part::slice);
  own_begin_ = static_cast<size_t>(own.begin() - parts.begin());
  own_end_ = static_cast<size_t>(own.end() - parts.begin());
  for (size_t i = own_begin_; i < own_end_; ++i) server_elems_ += parts[i].count;
  worker_error_ = device_buffer(device, ledger, tag, worker_elems_ * 4);
  server_error_ = device_buffer(device, ledger, tag, server_elems_ * 4);
  numbers_ = device_buffer(device, ledger, tag, num_scales_ * 3 * 8);
  send_ = comm.allocate(ledger, tag, comm.size() * slice_bytes());
  receive_ = comm.allocate(ledger, tag, comm.size() * slice_bytes());
}

TensorView OneBitAllReduce::worker_error() const noexcept {
  return TensorView::of(worker_error_.data(), DType::F32, {worker_elems_});
}
TensorView OneBitAllReduce::server_error() const noexcept {
  return TensorView::of(server_error_.data(), DType::F32, {server_elems_});
}

void OneBitAllReduce::reset() {
  device_.zero(worker_error_.data(), worker_error_.bytes());
  device_.zero(server_error_.data(), server_error_.bytes());
}

// The codes of a part in each of `rows` slices in `memory`.
TensorView OneBitAllReduce::codes(void* memory, const Place& p, i64 rows) const {
  return row_view(static_cast<u8*>(memory) + p.first / 8, DType::U8, rows, kSigns.code_bytes(p.part.count),
                  slice_bytes());
}
TensorView OneBitAllReduce::scales(void* memory, const Place& p, i64 rows) const {
  return row_view(static_cast<u8*>(memory) + scales_at() + 4 * p.part.scale, DType::F32, rows, 1, slice_bytes() / 4);
}

// Measures `y`, which contains the parts one after the other, and writes signs and scales to the slices to be sent; the
// error remains in y. Scales are shared by all parts with the same number, or one per part.
void OneBitAllReduce::compress(std::span<const Place> places, TensorView y, bool of_numbers) {
  const OpTable& ops = device_.ops();
  Stream& stream = device_.stream();
  i64* const numbers = numbers_.as<i64>().data();
  const auto largest = [&](const Place& p) { return TensorView::of(numbers + p.part.scale, DType::I64, {1}); };
  const auto sum = [&](const Place& p) {
    return TensorView::of(numbers + num_scales_ + 2 * p.part.scale, DType::I64, {2});
  };
  const auto for_each = [&](auto&& visit) {
    i64 at = 0;
    for (const Place& p : places) {
      visit(p, y.rows(at, p.part.count));
      at += p.part.count;
    }
  };
  device_.zero(numbers, numbers_.bytes());
  for_each([&](const Place& p, const TensorView& v) { ops.max_abs(largest(p), v, stream); });
  for_each([&](const Place& p, const TensorView& v) { ops.sum_squares(sum(p), v, largest(p), stream); });
  for_each([&](const Place& p, const TensorView& v) {
    void* const to = send_.as<char>().data() + p.part.slice * slice_bytes();
    ops.quantize_signs(codes(to, p, 1), scales(to, p, 1), v, largest(p), sum(p),
                       of_numbers ? elems_of_scale_[p.part.scale] : p.part.count, stream);
  });
}

void OneBitAllReduce::run(TensorView x, std::string_view tag, std::span<const i64> places) {
  const OpTable& ops = device_.ops();
  Stream& stream = device_.stream();
  const i64 P = comm_.size();
  DS_ASSERT(x.dtype == DType::F32 && x.contiguous());

  const TensorView y = worker_error(), z = server_error();
  const auto part_of_x = [&](size_t i) {
    return x.rows(places.empty() ? places_[i].part.at : places[i], places_[i].part.count);
  };
  i64 at = 0;
  for (size_t i = 0; i < places_.size(); ++i) {
    const TensorView error = y.rows(at, places_[i].part.count);
    ops.add(error, part_of_x(i), error, stream);
    at += places_[i].part.count;
  }
  compress(places_, y, true);
  comm_.all_to_all(send_.data(), receive_.data(), slice_bytes(), tag).wait();

  const std::span<const Place> own = std::span(places_).subspan(own_begin_, own_end_ - own_begin_);
  at = 0;
  for (const Place& p : own) {
    ops.dequantize_fold(z.rows(at, p.part.count), codes(receive_.data(), p, P), scales(receive_.data(), p, P), true,
                        static_cast<float>(P), kSigns, stream);
    at += p.part.count;
  }
  compress(own, z, false);
  const AllGatherSegment segment{send_.data(), slice_bytes()};
  comm_.all_gather({&segment, 1}, tag).wait();

  for (size_t i = 0; i < places_.size(); ++i) {
    const Place& p = places_[i];
    void* const from = send_.as<char>().data() + p.part.slice * slice_bytes();
    ops.dequantize(part_of_x(i).reshaped({1, p.part.count}), codes(from, p, 1), scales(from, p, 1), kSigns, stream);
  }
}

}  // namespace ds
