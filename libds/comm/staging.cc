// SPDX-License-Identifier: Apache-2.0
#include "comm/staging.h"

#include <algorithm>

#include "comm/slice_sizes.h"

namespace ds {
namespace {

// An empty operation is also a call, since peers compare calls.
template <class F>
void for_each_round(i64 length, i64 round, F&& f) {
  i64 begin = 0;
  do f(begin, std::min(round, length - begin));
  while ((begin += round) < length);
}

}  // namespace

// Errors here are reported to everything that waits.
Staging::~Staging() {
  const auto end = [](auto&& wait) {
    try {
      wait();
    } catch (const Error&) {
    }
  };
  for (Letter& letter : letters_) end([&] { letter.sent.wait(); });
  end([&] { settle(); });
  for (const auto& arrival : arrivals_) end([&] { arrival->received.wait(); });  // nothing writes to it any more
}

i64 Staging::bytes() const noexcept {
  size_t bytes = memory_.size() + sizes_.size() * sizeof(i64);
  for (const Letter& letter : letters_) bytes += letter.data.size();
  for (const auto& arrival : arrivals_) bytes += arrival->data.size();
  return static_cast<i64>(bytes);
}

void Staging::Arrival::wait() {
  if (landed) return;
  if (before != nullptr) before->wait();
  received.wait();
  if (bytes > 0) device.upload(target, data.data(), bytes);
  before = nullptr;
  landed = true;
}

void Staging::settle() {
  if (last_arrival_ != nullptr) last_arrival_->wait();
  last_arrival_ = nullptr;
}

Ticket Staging::run(const Operation& op) {
  if (op.kind != OpKind::Send && op.kind != OpKind::Recv) settle();
  switch (op.kind) {
    case OpKind::ReduceScatter: reduce_scatter(op); break;
    case OpKind::AllGather: all_gather(op); break;
    case OpKind::AllReduce: all_reduce(op); break;
    case OpKind::Reduce: reduce(op); break;
    case OpKind::Broadcast: broadcast(op); break;
    case OpKind::AllToAll: all_to_all(op); break;
    case OpKind::AllToAllV: all_to_allv(op); break;
    case OpKind::Gather: gather(op); break;
    case OpKind::Scatter: scatter(op); break;
    case OpKind::Send: return send(op);
    case OpKind::Recv: return recv(op);
    case OpKind::Barrier: world_.barrier(op.tag); break;
    case OpKind::Allocate:
    case OpKind::Attach: DS_ASSERT(false);
  }
  return {};
}

// An empty range may have any address.
void Staging::download(void* to, const void* from, i64 bytes) {
  if (bytes > 0) device_.download(to, from, bytes);
}
void Staging::upload(void* to, const void* from, i64 bytes) {
  if (bytes > 0) device_.upload(to, from, bytes);
}

std::byte* Staging::room(i64 bytes) {
  if (bytes > narrow<i64>(memory_.size())) memory_.resize(bytes);
  return memory_.data();
}

// Host memory of a round: for each part, P slices in the wire dtype; after all of them, the fp32 targets.
void Staging::reduce_scatter(const Operation& op) {
  const i64 P = world_.size(), wire = dtype_bytes(op.dtype), length = op.slice_bytes();
  const i64 round = std::min(std::max<i64>(kChunk / P / 64 * 64, 64), length);
  std::byte* const host = room(P * round + round / wire * 4);
  std::byte* const sums = host + P * round;
  for_each_round(length, round, [&](i64 begin, i64 count) {
    scattered_.clear();
    for_each_part(op.segments, begin, count, [&](const OpSegment& s, i64 offset, i64 bytes, i64 position) {
      std::byte* const part = host + P * position;
      float* const target = reinterpret_cast<float*>(sums + position / wire * 4);
      for (i64 q = 0; q < P; ++q) download(part + q * bytes, s.source + q * s.slice_bytes + offset, bytes);
      if (op.accumulate) download(target, s.target + offset / wire * 4, bytes / wire * 4);
      scattered_.push_back({part, target, bytes / wire});
    });
    world_.reduce_scatter(scattered_, op.dtype, op.accumulate, op.tag).wait();
    for_each_part(op.segments, begin, count, [&](const OpSegment& s, i64 offset, i64 bytes, i64 position) {
      upload(s.target + offset / wire * 4, sums + position / wire * 4, bytes / wire * 4);
    });
  });
}

void Staging::all_gather(const Operation& op) {
  const i64 P = world_.size(), own = world_.rank(), length = op.slice_bytes();
  const i64 round = std::min(std::max<i64>(kChunk / P, 1), length);
  std::byte* const host = room(P * round);
  for_each_round(length, round, [&](i64 begin, i64 count) {
    gathered_.clear();
    for_each_part(op.segments, begin, count, [&](const OpSegment& s, i64 offset, i64 bytes, i64 position) {
      std::byte* const part = host + P * position;
      download(part + own * bytes, s.source + offset, bytes);
      gathered_.push_back({part, bytes});
    });
    world_.all_gather(gathered_, op.tag).wait();
    for_each_part(op.segments, begin, count, [&](const OpSegment& s, i64 offset, i64 bytes, i64 position) {
      for (i64 q = 0; q < P; ++q) {
        if (q == own) continue;
        upload(s.target + q * s.slice_bytes + offset, host + P * position + q * bytes, bytes);
      }
    });
  });
}

void Staging::all_reduce(const Operation& op) {
  const i64 size = dtype_bytes(op.dtype), length = op.slice_bytes(), round = std::min(kChunk, length);
  std::byte *const host = room(round), *const data = op.segments[0].target;
  for_each_round(length, round, [&](i64 begin, i64 count) {
    download(host, data + begin, count);
    world_.all_reduce(host, count / size, op.dtype, op.reduce, op.tag).wait();
    upload(data + begin, host, count);
  });
}

void Staging::reduce(const Operation& op) {
  const i64 size = dtype_bytes(op.dtype), length = op.slice_bytes(), round = std::min(kChunk, length);
  std::byte *const host = room(round), *const data = op.segments[0].target;
  for_each_round(length, round, [&](i64 begin, i64 count) {
    download(host, data + begin, count);
    world_.reduce(host, count / size, op.dtype, op.reduce, op.peer, op.tag).wait();
    if (op.peer == world_.rank()) upload(data + begin, host, count);
  });
}

void Staging::broadcast(const Operation& op) {
  const i64 length = op.slice_bytes(), round = std::min(kChunk, length);
  std::byte *const host = room(round), *const data = op.segments[0].target;
  for_each_round(length, round, [&](i64 begin, i64 count) {
    if (op.peer == world_.rank()) download(host, data + begin, count);
    world_.broadcast(host, count, op.peer, op.tag).wait();
    if (op.peer != world_.rank()) upload(data + begin, host, count);
  });
}

void Staging::all_to_all(const Operation& op) {
  const i64 P = world_.size(), length = op.slice_bytes(), round = std::min(std::max<i64>(kChunk / P / 2, 1), length);
  const OpSegment& s = op.segments[0];
  std::byte *const out = room(2 * P * round), *const in = out + P * round;
  for_each_round(length, round, [&](i64 begin, i64 count) {
    for (i64 q = 0; q < P; ++q) download(out + q * count, s.source + q * length + begin, count);
    world_.all_to_all(out, in, count, op.tag).wait();
    for (i64 q = 0; q < P; ++q) upload(s.target + q * length + begin, in + q * count, count);
  });
}

void Staging::all_to_allv(const Operation& op) {
  compare_sizes(world_, op, sizes_);
  const i64 P = world_.size(), longest = *std::ranges::max_element(sizes_);
  const i64 round = std::min(std::max<i64>(kChunk / P / 2, 1), longest);
  std::byte *const out = room(2 * P * round), *const in = out + P * round;
  for (i64 begin = 0; begin < longest; begin += round) {
    const auto part = [&](auto slice) { return slice.subspan(std::min(slice.size(), static_cast<size_t>(begin))); };
    slices_out_.clear();
    slices_in_.clear();
    for (i64 q = 0; q < P; ++q) {
      const std::span<const std::byte> to = part(op.out[q]);
      const std::span<std::byte> from = part(op.in[q]);
      slices_out_.push_back({q * round, std::min(round, std::ssize(to))});
      slices_in_.push_back({q * round, std::min(round, std::ssize(from))});
      download(out + q * round, to.data(), slices_out_[q].bytes);
    }
    world_.all_to_allv(out, slices_out_, in, slices_in_, op.tag).wait();
    for (i64 q = 0; q < P; ++q) upload(part(op.in[q]).data(), in + q * round, slices_in_[q].bytes);
  }
}

void Staging::gather(const Operation& op) {
  const i64 P = world_.size(), length = op.slice_bytes(), round = std::min(std::max<i64>(kChunk / P, 1), length);
  const OpSegment& s = op.segments[0];
  const bool at_root = op.peer == world_.rank();
  std::byte *const out = room((at_root ? P + 1 : 1) * round), *const in = out + round;
  for_each_round(length, round, [&](i64 begin, i64 count) {
    download(out, s.source + begin, count);
    world_.gather(out, at_root ? in : nullptr, count, op.peer, op.tag).wait();
    for (i64 q = 0; at_root && q < P; ++q) upload(s.target + q * length + begin, in + q * count, count);
  });
}

void Staging::scatter(const Operation& op) {
  const i64 P = world_.size(), length = op.slice_bytes(), round = std::min(std::max<i64>(kChunk / P, 1), length);
  const OpSegment& s = op.segments[0];
  const bool at_root = op.peer == world_.rank();
  std::byte *const in = room((at_root ? P + 1 : 1) * round), *const out = in + round;
  for_each_round(length, round, [&](i64 begin, i64 count) {
    for (i64 q = 0; at_root && q < P; ++q) download(out + q * count, s.source + q * length + begin, count);
    world_.scatter(at_root ? out : nullptr, in, count, op.peer, op.tag).wait();
    upload(s.target + begin, in, count);
  });
}

// Not in the common buffer: this one is read until the peer arrives, and other calls may come before.
Ticket Staging::send(const Operation& op) {
  const auto bytes = static_cast<size_t>(op.slice_bytes());
  auto free = std::find_if(letters_.begin(), letters_.end(), [](const Letter& l) { return l.sent.done(); });
  Letter& letter = free != letters_.end() ? *free : letters_.emplace_back();
  if (letter.data.size() < bytes) letter.data.resize(bytes);
  download(letter.data.data(), op.segments[0].source, op.slice_bytes());
  letter.sent = world_.send(letter.data.data(), op.slice_bytes(), op.peer, op.tag);
  return letter.sent;
}

Ticket Staging::recv(const Operation& op) {
  auto free =
      std::find_if(arrivals_.begin(), arrivals_.end(), [](const auto& a) { return a.use_count() == 1 && a->landed; });
  if (free == arrivals_.end()) free = arrivals_.insert(free, std::make_shared<Arrival>(device_));
  Arrival& arrival = **free;
  arrival.bytes = op.slice_bytes();
  if (std::ssize(arrival.data) < arrival.bytes) arrival.data.resize(arrival.bytes);
  arrival.target = op.segments[0].target;
  arrival.received = world_.recv(arrival.data.data(), arrival.bytes, op.peer, op.tag);
  arrival.before = last_arrival_;
  arrival.landed = false;
  last_arrival_ = *free;
  return Ticket(*free);
}

}  // namespace ds
