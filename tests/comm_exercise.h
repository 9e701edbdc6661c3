// SPDX-License-Identifier: Apache-2.0
#pragma once
// A program of collective calls with odd sizes, all types, shared and private memory, whose every result is compared
// bitwise with a serial oracle. Whatever passes it gives the same bits as everything else that does.

#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "device/device.h"
#include "ds/communicator.h"

namespace ds::test {

inline void require(bool ok, std::string_view what) {
  if (!ok) throw std::runtime_error("wrong result: " + std::string(what));
}

// Magnitudes differ so much that the order of a sum shows in its bits.
inline float value(int rank, i64 i, int salt) {
  const u64 x = (static_cast<u64>(rank) * 1000003 + static_cast<u64>(i)) * 0x9E3779B97F4A7C15u + static_cast<u64>(salt);
  const u64 y = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9u;
  const float mantissa = static_cast<float>(static_cast<i64>(y >> 40) - (1 << 23)) * 0x1p-23f;
  return mantissa * static_cast<float>(1 << ((y >> 8) % 12));
}

template <class T>
float as_sent(float x) {
  return to_float(from_float<T>(x));
}

inline float as_sent(float x, DType wire) {
  return wire == DType::BF16 ? as_sent<bf16>(x) : wire == DType::F16 ? as_sent<f16>(x) : x;
}

inline void store(void* p, i64 i, float x, DType wire) {
  if (wire == DType::F32) static_cast<float*>(p)[i] = x;
  if (wire == DType::BF16) static_cast<bf16*>(p)[i] = to_bf16(x);
  if (wire == DType::F16) static_cast<f16*>(p)[i] = to_f16(x);
}

inline bool same_bits(float a, float b) { return std::bit_cast<u32>(a) == std::bit_cast<u32>(b); }

// Whether all n bytes at p are `byte`.
inline bool all_are(const std::byte* p, size_t n, std::byte byte) {
  return n == 0 || (p[0] == byte && std::memcmp(p, p + 1, n - 1) == 0);
}

// One reduce-scatter. Sources lie in `shared` one after the other, or in private memory if it is empty.
inline void exercise_reduce_scatter(Communicator& c, std::span<std::byte> shared, const std::vector<i64>& slices,
                                    DType wire, bool accumulate, bool in_place, int salt) {
  const int P = c.size();
  const i64 total = std::accumulate(slices.begin(), slices.end(), i64{0});
  std::vector<std::byte> own(shared.empty() ? static_cast<size_t>(P * total * dtype_bytes(wire)) : 0);
  std::byte* source = shared.empty() ? own.data() : shared.data();
  std::vector<float> targets(static_cast<size_t>(total));
  std::vector<ReduceScatterSegment> segments;
  i64 at = 0;
  for (i64 n : slices) {
    std::byte* s = source + P * at * dtype_bytes(wire);
    for (i64 i = 0; i < P * n; ++i) store(s, i, value(c.rank(), P * at + i, salt), wire);
    float* target = in_place ? reinterpret_cast<float*>(s) + c.rank() * n : targets.data() + at;
    for (i64 i = 0; accumulate && i < n; ++i) target[i] = value(77, at + i, salt);
    segments.push_back({s, target, n});
    at += n;
  }
  c.reduce_scatter(segments, wire, accumulate, "t.reduce_scatter").wait();
  const std::string what = "reduce_scatter " + std::string(dtype_name(wire));
  at = 0;
  for (size_t k = 0; k < slices.size(); ++k) {
    for (i64 i = 0; i < slices[k]; ++i) {
      const i64 index = P * at + c.rank() * slices[k] + i;
      float expected = accumulate ? value(77, at + i, salt) : as_sent(value(0, index, salt), wire);
      for (int q = accumulate ? 0 : 1; q < P; ++q) expected += as_sent(value(q, index, salt), wire);
      require(same_bits(segments[k].target[i], expected), what);
    }
    at += slices[k];
  }
}

inline void exercise_all_gather(Communicator& c, std::span<std::byte> shared, const std::vector<i64>& slices,
                                int salt) {
  const int P = c.size();
  std::vector<i64> sizes = slices;
  for (i64& n : sizes) n = n == 0 ? 0 : 4 * n - 1;
  const i64 total = std::accumulate(sizes.begin(), sizes.end(), i64{0});
  std::vector<std::byte> own(shared.empty() ? static_cast<size_t>(P * total) : 0);
  std::byte* buffer = shared.empty() ? own.data() : shared.data();
  const auto byte = [&](int rank, i64 i) { return static_cast<std::byte>(rank * 31 + i * 7 + salt); };
  std::vector<AllGatherSegment> segments;
  for (i64 n : sizes) {
    for (i64 i = 0; i < n; ++i) buffer[c.rank() * n + i] = byte(c.rank(), i);
    segments.push_back({buffer, n});
    buffer += P * n;
  }
  c.all_gather(segments, "t.all_gather").wait();
  for (const auto& s : segments) {
    const auto* received = static_cast<const std::byte*>(s.buffer);
    for (int q = 0; q < P; ++q)
      for (i64 i = 0; i < s.slice_bytes; ++i) require(*received++ == byte(q, i), "all_gather");
  }
}

// root < 0: an all-reduce, else a reduce, which leaves the data of other ranks as it is. Sums in a 16-bit type are
// folded in fp32 and rounded once.
template <class T>
void exercise_reduction(Communicator& c, i64 n, ReduceOp op, int root, int salt) {
  constexpr bool is_16_bit = sizeof(T) == 2;
  const auto input = [&](int rank, i64 i) {
    if constexpr (is_16_bit)
      return to_float(from_float<T>(value(rank, i, salt)));
    else
      return static_cast<T>(value(rank, i, salt) * 1000);
  };
  const auto stored = [](auto x) {
    if constexpr (is_16_bit)
      return from_float<T>(x);
    else
      return x;
  };
  std::vector<T> data(static_cast<size_t>(n));
  for (i64 i = 0; i < n; ++i) data[i] = stored(input(c.rank(), i));
  if (root < 0) {
    c.all_reduce(data.data(), n, dtype_of<T>, op, "t.all_reduce").wait();
  } else {
    c.reduce(data.data(), n, dtype_of<T>, op, root, "t.reduce").wait();
  }
  const bool reduced = root < 0 || c.rank() == root;
  const std::string what = fmt::format("{} of {} {}", root < 0 ? "all_reduce" : "reduce", n, dtype_name(dtype_of<T>));
  for (i64 i = 0; i < n; ++i) {
    auto expected = input(reduced ? 0 : c.rank(), i);
    for (int q = 1; reduced && q < c.size(); ++q) {
      const auto x = input(q, i);
      expected = op == ReduceOp::Sum   ? expected + x
                 : op == ReduceOp::Max ? std::max(expected, x)
                                       : std::min(expected, x);
    }
    const T bits = stored(expected);
    require(std::memcmp(&bits, &data[i], sizeof(T)) == 0, what);
  }
}

inline void exercise_broadcast(Communicator& c, i64 bytes, int root, int salt) {
  std::vector<u8> data(static_cast<size_t>(bytes));
  if (c.rank() == root) std::iota(data.begin(), data.end(), static_cast<u8>(root + salt));
  c.broadcast(data.data(), bytes, root, "t.broadcast").wait();
  for (i64 i = 0; i < bytes; ++i) require(data[i] == static_cast<u8>(root + salt + i), "broadcast");
}

// Slices come from all ranks to the root, and go back from there.
inline void exercise_gather_and_scatter(Communicator& c, i64 slice, int root, int salt) {
  const auto byte = [&](int rank, i64 i) { return static_cast<u8>(rank * 37 + i * 11 + salt); };
  const bool at_root = c.rank() == root;
  std::vector<u8> own(static_cast<size_t>(slice)), all(static_cast<size_t>(at_root ? c.size() * slice : 0)),
      back(own.size());
  for (i64 i = 0; i < slice; ++i) own[i] = byte(c.rank(), i);
  c.gather(own.data(), at_root ? all.data() : nullptr, slice, root, "t.gather").wait();
  for (i64 i = 0; i < std::ssize(all); ++i) require(all[i] == byte(static_cast<int>(i / slice), i % slice), "gather");
  c.scatter(at_root ? all.data() : nullptr, back.data(), slice, root, "t.scatter").wait();
  require(back == own, "scatter");
}

inline void exercise_all_to_all(Communicator& c, i64 slice, int salt) {
  std::vector<u16> source(static_cast<size_t>(c.size() * slice)), target(source.size());
  for (i64 i = 0; i < std::ssize(source); ++i)
    source[i] = static_cast<u16>(salt + c.rank() * 257 + i / slice * 1009 + i % slice);
  c.all_to_all(source.data(), target.data(), slice * 2, "t.all_to_all").wait();
  for (i64 i = 0; i < std::ssize(target); ++i) {
    const auto expected = static_cast<u16>(salt + i / slice * 257 + c.rank() * 1009 + i % slice);
    require(target[i] == expected, "all_to_all");
  }
}

// Bytes that `from` sends to `to`: none for a third of all pairs, else up to `most`.
inline i64 uneven_bytes(int from, int to, i64 most, int salt) {
  u64 x = (static_cast<u64>(from) * 8191 + static_cast<u64>(to) * 131 + static_cast<u64>(salt)) * 0x9E3779B97F4A7C15u;
  x ^= x >> 31;
  return x % 3 == 0 ? 0 : static_cast<i64>((x >> 3) % static_cast<u64>(most + 1));
}

// Slices lie in `shared`, or in private memory if it is empty: those of the source in falling order of ranks, those of
// the target in rising order, with gaps that do not change.
inline void exercise_all_to_allv(Communicator& c, std::span<std::byte> shared, i64 most, int salt) {
  constexpr i64 kGap = 3;
  const int P = c.size();
  const auto byte = [&](int from, int to, i64 i) {
    return static_cast<std::byte>(from * 37 + to * 101 + i * 7 + (i >> 8) + salt);
  };
  const i64 room = P * (most + kGap);
  std::vector<std::byte> own(shared.empty() ? static_cast<size_t>(2 * room) : 0);
  std::byte *const source = shared.empty() ? own.data() : shared.data(), *const target = source + room;
  std::vector<AllToAllSlice> out(static_cast<size_t>(P)), in(out.size());
  std::fill_n(target, room, std::byte{0xA5});
  std::vector<std::byte> expected(target, target + room);
  for (i64 q = P - 1, at = 0; q >= 0; at += out[q--].bytes + kGap) {
    out[q] = {at, uneven_bytes(c.rank(), static_cast<int>(q), most, salt)};
    for (i64 i = 0; i < out[q].bytes; ++i) source[at + i] = byte(c.rank(), static_cast<int>(q), i);
  }
  i64 at = 0;
  for (int q = 0; q < P; at += in[q++].bytes + kGap) {
    in[q] = {at, uneven_bytes(q, c.rank(), most, salt)};
    for (i64 i = 0; i < in[q].bytes; ++i) expected[at + i] = byte(q, c.rank(), i);
  }
  Ticket ticket = c.all_to_allv(source, out, target, in, "t.all_to_allv");
  out.assign(out.size(), {-1, -1});  // the lists are the caller's
  in.assign(in.size(), {-1, -1});
  ticket.wait();
  require(std::equal(expected.begin(), expected.end(), target), "all_to_allv");
}

// Everybody sends to the next rank before anybody receives.
inline void exercise_ring(Communicator& c, i64 elems, int salt) {
  const int P = c.size(), next = (c.rank() + 1) % P, previous = (c.rank() + P - 1) % P;
  std::vector<i64> out(static_cast<size_t>(elems)), in(out.size());
  std::iota(out.begin(), out.end(), salt + c.rank() * i64{1000});
  Ticket sent = c.send(out.data(), elems * 8, next, "t.send");
  c.recv(in.data(), elems * 8, previous, "t.recv").wait();
  sent.wait();
  for (i64 i = 0; i < elems; ++i) require(in[i] == salt + previous * i64{1000} + i, "send and recv");
}

// Calls on private memory, of one staged round and of several, each queued together with a call on shared memory after
// it: a rank that is done with the first announces at once where the second has its sources.
inline void exercise_succession(Communicator& c, std::span<std::byte> shared) {
  constexpr i64 kSegments = 64;
  const size_t P = static_cast<size_t>(c.size()), rank = static_cast<size_t>(c.rank());
  const i64 shared_slice = static_cast<i64>(shared.size() / P);
  for (const i64 slice : {i64{8} << 10, i64{24} << 10}) {
    const size_t n = static_cast<size_t>(slice);
    std::vector<std::byte> own(P * n * kSegments);
    for (int turn = 0; turn < 4; ++turn) {
      const auto byte = [&](size_t from, size_t segment) {
        return static_cast<std::byte>(turn * 7 + 3 * segment + 101 * from);
      };
      std::vector<AllGatherSegment> segments;
      for (size_t k = 0; k < kSegments; ++k) {
        std::fill_n(&own[(k * P + rank) * n], n, byte(rank, k));
        segments.push_back({&own[k * P * n], slice});
      }
      const AllGatherSegment in_place{shared.data(), shared_slice};
      Ticket first = c.all_gather(segments, "t.staged"), second = c.all_gather({&in_place, 1}, "t.in_place");
      first.wait();
      second.wait();
      for (size_t k = 0; k < kSegments; ++k)
        for (size_t q = 0; q < P; ++q)
          require(all_are(&own[(k * P + q) * n], n, byte(q, k)), "all_gather in succession");
    }
  }
}

// `big`: elements of the largest slice, at least 3000. `salt`: programs of other salts have other data.
inline void exercise(Communicator& c, i64 big = 70001, int salt = 0) {
  MemoryLedger ledger;
  const int P = c.size();
  Buffer buffer = c.allocate(ledger, Tag::Buckets, P * std::max<i64>(big + 2000, 5000) * 4);  // of the largest below
  require(ledger.current(Tag::Buckets) == buffer.bytes(), "ledger of allocate");
  for (std::byte b : buffer.as<std::byte>()) require(b == std::byte{0}, "zeros of allocate");
  const std::span<std::byte> shared = buffer.as<std::byte>();
  for (const auto& slices : std::vector<std::vector<i64>>{{1}, {7, 0, 33}, {0}, {5000}, {big, 3, 1024}}) {
    for (DType wire : {DType::F32, DType::BF16, DType::F16}) {
      for (auto memory : {shared, std::span<std::byte>()}) {
        exercise_reduce_scatter(c, memory, slices, wire, false, false, ++salt);
        exercise_reduce_scatter(c, memory, slices, wire, true, false, ++salt);
        if (wire == DType::F32) exercise_reduce_scatter(c, memory, slices, wire, false, true, ++salt);
      }
    }
    exercise_all_gather(c, shared, slices, ++salt);
    exercise_all_gather(c, {}, slices, ++salt);
  }
  // Some ranks in place, others staged.
  exercise_reduce_scatter(c, c.rank() % 2 == 0 ? shared : std::span<std::byte>(), {big}, DType::BF16, false, false, 5);
  exercise_all_gather(c, c.rank() % 2 == 1 ? shared : std::span<std::byte>(), {big, 11}, 6);
  exercise_succession(c, shared);
  for (ReduceOp op : {ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min}) {
    for (i64 n : {i64{0}, i64{1}, i64{5}, i64{16385}, big}) {
      for (int root : {-1, P - 1}) {
        exercise_reduction<float>(c, n, op, root, ++salt);
        exercise_reduction<double>(c, n, op, root, ++salt);
        exercise_reduction<i64>(c, n, op, root, ++salt);
        if (n == 1 || n == 16385) continue;
        exercise_reduction<i32>(c, n, op, root, ++salt);
        exercise_reduction<bf16>(c, n, op, root, ++salt);
        exercise_reduction<f16>(c, n, op, root, ++salt);
      }
    }
  }
  for (int root : {-1, 0}) exercise_reduction<bf16>(c, 70001, ReduceOp::Sum, root, ++salt);
  exercise_reduction<float>(c, (i64{9} << 20) / 4 + 3, ReduceOp::Sum, 0, ++salt);  // several rounds
  for (int root = 0; root < P; ++root) {
    for (i64 bytes : {i64{0}, i64{1}, i64{13}, big * 4 + 1}) exercise_broadcast(c, bytes, root, ++salt);
    for (i64 slice : {i64{0}, i64{1}, i64{333}, big}) exercise_gather_and_scatter(c, slice, root, ++salt);
  }
  for (i64 slice : {i64{1}, i64{333}, big}) exercise_all_to_all(c, slice, ++salt);
  for (auto memory : {shared, std::span<std::byte>()}) {
    for (i64 most : {i64{0}, i64{1}, i64{100}, i64{5000}, 2 * big}) exercise_all_to_allv(c, memory, most, ++salt);
  }
  exercise_all_to_allv(c, c.rank() % 2 == 0 ? shared : std::span<std::byte>(), 2 * big, ++salt);
  if (P > 1) {
    for (i64 elems : {i64{0}, i64{1}, i64{1000}, big}) exercise_ring(c, elems, ++salt);
  }
  c.barrier("t.barrier");
  require(P == 1 || c.staging_bytes() > 0, "staging_bytes");
}

}  // namespace ds::test
