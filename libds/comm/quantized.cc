// SPDX-License-Identifier: Apache-2.0
#include "comm/quantized.h"

#include <utility>

namespace ds {
namespace {

void check_format(CodeFormat format) {
  DS_CHECK(format.bits == 8 || format.bits == 4, Errc::Config, "codes have 8 or 4 bits, not {}", format.bits);
  DS_CHECK(format.block > 0 && format.block % 8 == 0, Errc::Config,
           "a block of quantised elements must be a multiple of 8, not {}", format.block);
}

TensorView fp32_of(const Buffer& buffer) noexcept {
  return TensorView::of(buffer.data(), DType::F32, {buffer.bytes() / 4});
}

}  // namespace

Ticket start_coded_gather(Communicator& comm, Device& device, CodeFormat format, void* wire, TensorView shard,
                          std::string_view tag) {
  const i64 n = shard.numel(), rank = comm.rank();
  DS_ASSERT(shard.contiguous());
  const CodedSlice slice{format, n};
  if (n > 0)
    device.ops().quantize(slice.codes(wire, rank, 1), slice.scales(wire, rank, 1), shard.reshaped({1, n}), {}, format,
                          {}, device.stream());
  const AllGatherSegment segment{wire, slice.bytes()};
  return comm.all_gather({&segment, 1}, tag);
}

void decode_gathered(Communicator& comm, Device& device, CodeFormat format, void* wire, TensorView full) {
  const i64 P = comm.size(), n = div_exact(full.numel(), P);
  DS_ASSERT(full.contiguous());
  const CodedSlice slice{format, n};
  device.ops().dequantize(full.reshaped({P, n}), slice.codes(wire, 0, P), slice.scales(wire, 0, P), format,
                          device.stream());
}

QuantizedAllGather::QuantizedAllGather(Communicator& comm, Device& device, MemoryLedger& ledger, Tag tag, i64 max_elems,
                                       CodeFormat format)
    : comm_(comm), device_(device), format_(format), max_elems_(max_elems) {
  check_format(format);
  wire_ = comm.allocate(ledger, tag, comm.size() * CodedSlice{format, max_elems}.bytes());
}

QuantizedAllGather::~QuantizedAllGather() {
  try {
    ticket_.wait();
  } catch (const Error&) {
  }
}

void QuantizedAllGather::start(TensorView shard, std::string_view tag) {
  DS_ASSERT(shard.numel() <= max_elems_);
  ticket_ = start_coded_gather(comm_, device_, format_, wire_.data(), shard, tag);
}

void QuantizedAllGather::finish(TensorView full) {
  ticket_.wait();
  decode_gathered(comm_, device_, format_, wire_.data(), full);
}

QuantizedReduceScatter::QuantizedReduceScatter(Communicator* node, Communicator& across, Device& device,
                                               MemoryLedger& ledger, Tag tag, i64 max_elems, CodeFormat format)
    : node_(node), across_(across), device_(device), format_(format), max_elems_(max_elems) {
  check_format(format);
  const i64 L = local_size(), M = num_nodes(), slice = CodedSlice{format, max_elems}.bytes();
  if (L > 1) {
    node_send_ = node->allocate(ledger, tag, L * M * slice);
    node_receive_ = node->allocate(ledger, tag, L * M * slice);
  }
  if (M > 1) {
    across_send_ = across.allocate(ledger, tag, M * slice);
    across_receive_ = across.allocate(ledger, tag, M * slice);
  }
  if (L > 1 && M > 1) partial_ = device_buffer(device, ledger, tag, M * max_elems * 4);
}

QuantizedReduceScatter::~QuantizedReduceScatter() {
  try {
    ticket_.wait();
  } catch (const Error&) {
  }
}

void QuantizedReduceScatter::start(TensorView source, std::string_view tag, LocoErrors* errors, size_t of) {
  const OpTable& ops = device_.ops();
  Stream& stream = device_.stream();
  const i64 L = local_size(), M = num_nodes(), n = div_exact(source.numel(), L * M);
  DS_ASSERT(n <= max_elems_ && source.contiguous());
  DS_ASSERT(errors == nullptr || errors->gradients_[of].slice_elems == n);
  const ErrorFeedback feedback = errors != nullptr ? errors->next(of) : ErrorFeedback{};
  source_ = source;
  if (L * M == 1 || n == 0) return;

  const CodedSlice slice{format_, n};
  // Slices number first, first + L, ... of the source, one for each node; likewise of its errors.
  const auto for_each_node = [&](const TensorView& v, i64 first) {
    return v ? row_view(static_cast<char*>(v.data) + first * n * dtype_bytes(v.dtype), v.dtype, M, n, L * n)
             : TensorView{};
  };
  TensorView rows = source.reshaped({L * M, n});
  if (L > 1) {
    const TensorView lost = errors != nullptr ? errors->of_hop(errors->node_, L * M, of) : TensorView{};
    for (i64 l = 0; l < L; ++l) {
      ops.quantize(slice.codes(node_send_.data(), l * M, M), slice.scales(node_send_.data(), l * M, M),
                   for_each_node(source, l), for_each_node(lost, l), format_, feedback, stream);
    }
    Ticket near = node_->all_to_all(node_send_.data(), node_receive_.data(), M * slice.bytes(), tag);
    if (M == 1) {
      ticket_ = std::move(near);
      return;
    }
    near.wait();
    for (i64 m = 0; m < M; ++m) {
      ops.dequantize_fold(fp32_of(partial_).rows(m * n, n), slice.codes(node_receive_.data(), m, L, M),
                          slice.scales(node_receive_.data(), m, L, M), false, 1, format_, stream);
    }
    rows = row_view(partial_.data(), DType::F32, M, n, n);
  }
  const TensorView lost = errors != nullptr ? errors->of_hop(errors->across_, M, of).reshaped({M, n}) : TensorView{};
  ops.quantize(slice.codes(across_send_.data(), 0, M), slice.scales(across_send_.data(), 0, M), rows, lost, format_,
               feedback, stream);
  ticket_ = across_.all_to_all(across_send_.data(), across_receive_.data(), slice.bytes(), tag);
}

void QuantizedReduceScatter::finish(TensorView target, bool accumulate) {
  const OpTable& ops = device_.ops();
  const i64 L = local_size(), M = num_nodes(), n = target.numel();
  DS_ASSERT(source_.numel() == L * M * n);
  if (L * M == 1) return ops.fold(target, {&source_, 1}, accumulate, device_.stream());
  if (n == 0) return;
  ticket_.wait();
  const CodedSlice slice{format_, n};
  const i64 terms = M > 1 ? M : L;
  void* const received = M > 1 ? across_receive_.data() : node_receive_.data();
  ops.dequantize_fold(target, slice.codes(received, 0, terms), slice.scales(received, 0, terms), accumulate, 1, format_,
                      device_.stream());
}

LocoErrors::LocoErrors(const QuantizedReduceScatter& op, MemoryLedger& ledger, Tag tag, std::vector<i64> slice_elems,
                       LocoOptions options)
    : options_(options) {
  DS_CHECK(options.decay >= 0 && options.decay <= 1, Errc::Config, "err_beta must lie between 0 and 1, not {}",
           options.decay);
  DS_CHECK(options.reset_period > 0, Errc::Config, "reset_T must be positive, not {}", options.reset_period);
  i64 all = 0;
  for (const i64 n : slice_elems) {
    gradients_.push_back({.slice_elems = n, .first = all});
    all += n;
  }
  const i64 L = op.local_size(), M = op.num_nodes();
  if (L > 1) node_ = device_buffer(op.device_, ledger, tag, L * M * all * 4);
  if (M > 1) across_ = device_buffer(op.device_, ledger, tag, M * all * 4);
}

TensorView LocoErrors::of_node_hop() const noexcept { return fp32_of(node_); }
TensorView LocoErrors::of_across_hop() const noexcept { return fp32_of(across_); }

TensorView LocoErrors::of_hop(const Buffer& hop, i64 slices, size_t of) const noexcept {
  const Gradient& g = gradients_[of];
  return fp32_of(hop).rows(slices * g.first, slices * g.slice_elems);
}

void LocoErrors::rescale(float factor) noexcept {
  for (Gradient& g : gradients_) g.scale *= factor;
}

i64 LocoErrors::calls() const noexcept { return gradients_.empty() ? 0 : gradients_.front().calls; }

void LocoErrors::set_calls(i64 calls) noexcept {
  for (Gradient& g : gradients_) g.calls = calls, g.scale = 1;
}

ErrorFeedback LocoErrors::next(size_t of) noexcept {
  Gradient& g = gradients_[of];
  const bool reset = g.calls == options_.reset_period;
  if (reset) g.calls = 0;
  ++g.calls;
  const float scale = std::exchange(g.scale, 1.0f);
  return {.scale = reset ? 0.0f : scale, .decay = options_.decay};
}

}  // namespace ds
