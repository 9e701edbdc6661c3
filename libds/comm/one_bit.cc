// SPDX-License-Identifier: Apache-2.0
#include "comm/one_bit.h"

#include <algorithm>

namespace ds {
namespace {

constexpr CodeFormat kSigns{.bits = 1, .block = 0};

}  // namespace

OneBitAllReduce::OneBitAllReduce(Communicator& comm, Device& device, MemoryLedger& ledger, Tag tag, i64 n)
    : comm_(comm), device_(device), n_(n), slice_{kSigns, align_up(div_ceil(n, comm.size()), 8)} {
  worker_error_ = device_buffer(device, ledger, tag, n * 4);
  server_error_ = device_buffer(device, ledger, tag, chunk_size(comm.rank()) * 4);
  numbers_ = device_buffer(device, ledger, tag, 3 * 8);
  send_ = comm.allocate(ledger, tag, comm.size() * slice_.bytes());
  receive_ = comm.allocate(ledger, tag, comm.size() * slice_.bytes());
}

i64 OneBitAllReduce::chunk_size(i64 rank) const noexcept {
  return std::clamp<i64>(n_ - rank * chunk_elems(), 0, chunk_elems());
}

TensorView OneBitAllReduce::worker_error() const noexcept {
  return TensorView::of(worker_error_.data(), DType::F32, {n_});
}
TensorView OneBitAllReduce::server_error() const noexcept {
  return TensorView::of(server_error_.data(), DType::F32, {chunk_size(comm_.rank())});
}

void OneBitAllReduce::reset() {
  device_.zero(worker_error_.data(), worker_error_.bytes());
  device_.zero(server_error_.data(), server_error_.bytes());
}

void OneBitAllReduce::measure(TensorView y) {
  const TensorView largest = TensorView::of(numbers_.data(), DType::I64, {1});
  device_.zero(numbers_.data(), numbers_.bytes());
  device_.ops().max_abs(largest, y, device_.stream());
  device_.ops().sum_squares(TensorView::of(largest.as<i64>() + 1, DType::I64, {2}), y, largest, device_.stream());
}

// Slice number `slice` of what is sent = signs and scale of `part` of the n elements that were measured.
void OneBitAllReduce::compress(i64 slice, TensorView part, i64 n) {
  const TensorView largest = TensorView::of(numbers_.data(), DType::I64, {1});
  device_.ops().quantize_signs(slice_.codes(send_.data(), slice, 1), slice_.scales(send_.data(), slice, 1), part,
                               largest, TensorView::of(largest.as<i64>() + 1, DType::I64, {2}), n, device_.stream());
}

void OneBitAllReduce::run(TensorView x, std::string_view tag) {
  const OpTable& ops = device_.ops();
  Stream& stream = device_.stream();
  const i64 P = comm_.size(), rank = comm_.rank(), chunk = chunk_elems();
  DS_ASSERT(x.numel() == n_ && x.dtype == DType::F32 && x.contiguous());

  const TensorView y = worker_error();
  ops.add(y, x, y, stream);
  measure(y);
  for (i64 q = 0; q < P; ++q) compress(q, y.rows(std::min(n_, q * chunk), chunk_size(q)), n_);
  comm_.all_to_all(send_.data(), receive_.data(), slice_.bytes(), tag).wait();

  const TensorView z = server_error();
  ops.dequantize_fold(z, slice_.codes(receive_.data(), 0, P), slice_.scales(receive_.data(), 0, P), true,
                      static_cast<float>(P), kSigns, stream);
  measure(z);
  compress(rank, z, z.numel());
  const AllGatherSegment segment{send_.data(), slice_.bytes()};
  comm_.all_gather({&segment, 1}, tag).wait();

  const i64 whole = chunk > 0 ? n_ / chunk : 0, rest = n_ - whole * chunk;
  const auto decode = [&](TensorView rows, i64 first) {
    ops.dequantize(rows, slice_.codes(send_.data(), first, rows.dim(0)),
                   slice_.scales(send_.data(), first, rows.dim(0)), kSigns, stream);
  };
  decode(x.rows(0, whole * chunk).reshaped({whole, chunk}), 0);
  if (rest > 0) decode(x.rows(whole * chunk, rest).reshaped({1, rest}), whole);
}

}  // namespace ds
