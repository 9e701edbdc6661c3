// SPDX-License-Identifier: Apache-2.0
#include "commbench/operation.h"

#include <algorithm>
#include <array>

#include "base/check.h"
#include "comm/make_communicator.h"
#include "commbench/sizes.h"
#include "device/device.h"

namespace ds::commbench {
namespace {

constexpr std::string_view kTag = "bench";
constexpr int kWindow = 64;  // messages in a row, as in osu_bw
constexpr i64 kTail = 64;    // for the answer of an exchange

i64 align(i64 bytes) noexcept { return align_up(bytes, 64); }

// Regions

Region sent(const Task& t, std::byte* data, i64 count, int rank, i64 first) {
  return {.data = data, .count = count, .type = t.dtype, .reduced = false, .rank = rank, .first = first};
}
Region reduced(std::byte* data, i64 count, DType type, i64 first) {
  return {.data = data, .count = count, .type = type, .reduced = true, .rank = -1, .first = first};
}
// P slices at `data`, slice q what rank q sends from `first` of rank q on.
template <class First>
std::vector<Region> slices(const Task& t, std::byte* data, First&& first) {
  std::vector<Region> regions;
  for (int q = 0; q < t.ranks(); ++q) regions.push_back(sent(t, data + t.bytes(q * t.count), t.count, q, first(q)));
  return regions;
}
std::vector<Region> nothing(const Task&) { return {}; }
std::vector<Region> own_source(const Task& t) { return {sent(t, t.source, t.count, t.rank(), 0)}; }
std::vector<Region> own_source_slices(const Task& t) { return {sent(t, t.source, t.ranks() * t.count, t.rank(), 0)}; }
// The buffer of a call in place.
std::vector<Region> own_data(const Task& t) {
  return {sent(t, t.in_place ? t.target : t.source, t.count, t.rank(), 0)};
}

// all_reduce

void all_reduce(const Task& t, Tickets& tickets) {
  if (!t.in_place) t.device.copy(t.target, t.source, t.bytes(t.count));
  tickets.push_back(t.comm.all_reduce(t.target, t.count, t.dtype, t.redop, kTag));
}
std::vector<Region> whole_reduced(const Task& t) { return {reduced(t.target, t.count, t.dtype, 0)}; }

// reduce_scatter: sums are fp32, whatever travels

std::byte* scattered(const Task& t) { return t.in_place ? t.source + t.bytes(t.rank() * t.count) : t.target; }
void reduce_scatter(const Task& t, Tickets& tickets) {
  const ReduceScatterSegment s{t.source, reinterpret_cast<float*>(scattered(t)), t.count};
  tickets.push_back(t.comm.reduce_scatter({&s, 1}, t.dtype, false, kTag));
}
std::vector<Region> slice_reduced(const Task& t) {
  return {reduced(scattered(t), t.count, DType::F32, t.rank() * t.count)};
}

// all_gather

std::byte* own_slice(const Task& t) { return t.target + t.bytes(t.rank() * t.count); }
void all_gather(const Task& t, Tickets& tickets) {
  if (!t.in_place) t.device.copy(own_slice(t), t.source, t.bytes(t.count));
  const AllGatherSegment s{t.target, t.bytes(t.count)};
  tickets.push_back(t.comm.all_gather({&s, 1}, kTag));
}
std::vector<Region> gather_input(const Task& t) {
  return {sent(t, t.in_place ? own_slice(t) : t.source, t.count, t.rank(), t.rank() * t.count)};
}
std::vector<Region> gathered(const Task& t) {
  return slices(t, t.target, [&](int q) { return q * t.count; });
}

// broadcast

void broadcast(const Task& t, Tickets& tickets) {
  if (!t.in_place && t.rank() == t.root) t.device.copy(t.target, t.source, t.bytes(t.count));
  tickets.push_back(t.comm.broadcast(t.target, t.bytes(t.count), t.root, kTag));
}
std::vector<Region> root_data(const Task& t) { return t.rank() == t.root ? own_data(t) : std::vector<Region>(); }
std::vector<Region> of_root(const Task& t) { return {sent(t, t.target, t.count, t.root, 0)}; }

// reduce: the data of other ranks than the root stays as it is

std::byte* reduce_data(const Task& t) { return t.in_place || t.rank() == t.root ? t.target : t.source; }
void reduce(const Task& t, Tickets& tickets) {
  if (!t.in_place && t.rank() == t.root) t.device.copy(t.target, t.source, t.bytes(t.count));
  tickets.push_back(t.comm.reduce(reduce_data(t), t.count, t.dtype, t.redop, t.root, kTag));
}
std::vector<Region> root_reduced(const Task& t) {
  if (t.rank() == t.root) return whole_reduced(t);
  return {sent(t, reduce_data(t), t.count, t.rank(), 0)};
}

// gather, scatter

void gather(const Task& t, Tickets& tickets) {
  tickets.push_back(t.comm.gather(t.source, t.target, t.bytes(t.count), t.root, kTag));
}
std::vector<Region> root_gathered(const Task& t) {
  return t.rank() == t.root ? slices(t, t.target, [](int) { return i64{0}; }) : std::vector<Region>();
}
void scatter(const Task& t, Tickets& tickets) {
  tickets.push_back(t.comm.scatter(t.source, t.target, t.bytes(t.count), t.root, kTag));
}
std::vector<Region> root_slices(const Task& t) {
  return t.rank() == t.root ? own_source_slices(t) : std::vector<Region>();
}
std::vector<Region> slice_of_root(const Task& t) { return {sent(t, t.target, t.count, t.root, t.rank() * t.count)}; }

// all_to_all

void all_to_all(const Task& t, Tickets& tickets) {
  tickets.push_back(t.comm.all_to_all(t.source, t.target, t.bytes(t.count), kTag));
}
std::vector<Region> exchanged(const Task& t) {
  return slices(t, t.target, [&](int) { return t.rank() * t.count; });
}

// all_to_allv

void all_to_allv(const Task& t, Tickets& tickets) {
  tickets.push_back(t.comm.all_to_allv(t.source, t.slices_out, t.target, t.slices_in, kTag));
}
std::vector<Region> uneven_source(const Task& t) {
  std::vector<Region> regions;
  for (int q = 0; q < t.ranks(); ++q) {
    const Share share = uneven_share(t.ranks(), t.rank(), q, t.count);
    regions.push_back(sent(t, t.source + t.slices_out[q].offset, share.count, t.rank(), share.first));
  }
  return regions;
}
std::vector<Region> unevenly_exchanged(const Task& t) {
  std::vector<Region> regions;
  for (int q = 0; q < t.ranks(); ++q) {
    const Share share = uneven_share(t.ranks(), q, t.rank(), t.count);
    if (share.count > 0) regions.push_back(sent(t, t.target + t.slices_in[q].offset, share.count, q, share.first));
  }
  return regions;
}

// Messages

int next(const Task& t) { return (t.rank() + 1) % t.ranks(); }
int previous(const Task& t) { return (t.rank() + t.ranks() - 1) % t.ranks(); }
int partner(const Task& t) { return t.rank() ^ 1; }
bool has_partner(const Task& t) { return partner(t) < t.ranks(); }
bool is_first(const Task& t) { return t.rank() % 2 == 0; }
std::byte* answer(const Task& t) { return t.target + align(t.bytes(t.count)); }

void send_and_receive(const Task& t, int to, int from, Tickets& tickets) {
  tickets.push_back(t.comm.send(t.source, t.bytes(t.count), to, kTag));
  tickets.push_back(t.comm.recv(t.target, t.bytes(t.count), from, kTag));
}
void ring(const Task& t, Tickets& tickets) { send_and_receive(t, next(t), previous(t), tickets); }
std::vector<Region> of_previous(const Task& t) { return {sent(t, t.target, t.count, previous(t), 0)}; }

void pairs(const Task& t, Tickets& tickets) {
  if (has_partner(t)) send_and_receive(t, partner(t), partner(t), tickets);
}
std::vector<Region> of_partner(const Task& t) {
  return has_partner(t) ? std::vector{sent(t, t.target, t.count, partner(t), 0)} : std::vector<Region>();
}

// osu_latency: there and back.
void ping_pong(const Task& t, Tickets& tickets) {
  if (!has_partner(t)) return;
  if (is_first(t)) {
    t.comm.send(t.source, t.bytes(t.count), partner(t), kTag).wait();
    return tickets.push_back(t.comm.recv(t.target, t.bytes(t.count), partner(t), kTag));
  }
  t.comm.recv(t.target, t.bytes(t.count), partner(t), kTag).wait();
  tickets.push_back(t.comm.send(t.source, t.bytes(t.count), partner(t), kTag));
}

// osu_bw: a window of messages one way, then an answer.
void stream(const Task& t, Tickets& tickets) {
  if (!has_partner(t)) return;
  const size_t begin = tickets.size();
  for (int i = 0; i < kWindow; ++i)
    tickets.push_back(is_first(t) ? t.comm.send(t.source, t.bytes(t.count), partner(t), kTag)
                                  : t.comm.recv(t.target, t.bytes(t.count), partner(t), kTag));
  if (is_first(t)) return tickets.push_back(t.comm.recv(answer(t), 4, partner(t), kTag));
  for (size_t i = begin; i < tickets.size(); ++i) tickets[i].wait();
  tickets.push_back(t.comm.send(answer(t), 4, partner(t), kTag));
}
std::vector<Region> of_first(const Task& t) { return is_first(t) ? std::vector<Region>() : of_partner(t); }

void barrier(const Task& t, Tickets&) { t.comm.barrier(kTag); }

// zero_step: the communication of a step of ZeRO. Gradients (source) are reduced and scattered bucket by bucket, all
// slices of all buckets are updated (here: nothing is), and parameters (target) gathered.

std::byte* shard(const Task& t, i64 at) {  // of the bucket that begins at `at` of each slice
  const i64 elems = std::min(t.bucket_elems, t.count - at);
  return t.in_place ? t.source + t.bytes(t.ranks() * at + t.rank() * elems)
                    : t.target + align(t.bytes(t.ranks() * t.count)) + 4 * at;
}
template <class F>
void for_each_bucket(const Task& t, F&& f) {  // f(begin, elements) of each slice
  for (i64 at = 0; at < t.count; at += t.bucket_elems) f(at, std::min(t.bucket_elems, t.count - at));
}
void zero_step(const Task& t, Tickets& tickets) {
  for_each_bucket(t, [&](i64 at, i64 elems) {
    const ReduceScatterSegment s{t.source + t.bytes(t.ranks() * at), reinterpret_cast<float*>(shard(t, at)), elems};
    tickets.push_back(t.comm.reduce_scatter({&s, 1}, t.dtype, false, kTag));
  });
  for_each_bucket(t, [&](i64 at, i64 elems) {
    const AllGatherSegment s{t.target + t.bytes(t.ranks() * at), t.bytes(elems)};
    tickets.push_back(t.comm.all_gather({&s, 1}, kTag));
  });
}
// Parameters follow the gradients in the pattern.
Region parameters(const Task& t, i64 at, i64 elems, int q) {
  const i64 begin = t.ranks() * at + q * elems;
  return sent(t, t.target + t.bytes(begin), elems, q, t.ranks() * t.count + begin);
}
std::vector<Region> step_inputs(const Task& t) {
  std::vector<Region> regions = own_source_slices(t);
  for_each_bucket(t, [&](i64 at, i64 elems) { regions.push_back(parameters(t, at, elems, t.rank())); });
  return regions;
}
std::vector<Region> step_outputs(const Task& t) {
  std::vector<Region> regions;
  for_each_bucket(t, [&](i64 at, i64 elems) {
    regions.push_back(reduced(shard(t, at), elems, DType::F32, t.ranks() * at + t.rank() * elems));
    for (int q = 0; q < t.ranks(); ++q) regions.push_back(parameters(t, at, elems, q));
  });
  return regions;
}

// The factor from algbw to busbw, as in nccl-tests.
double once(int) { return 1; }
double less_own(int P) { return static_cast<double>(P - 1) / P; }
double twice_less_own(int P) { return 2 * less_own(P); }

bool moves(DType, ReduceOp) { return true; }
bool sums_gradients(DType t, ReduceOp op) {
  return op == ReduceOp::Sum && (t == DType::F32 || t == DType::BF16 || t == DType::F16);
}
bool reduces_all(DType t, ReduceOp) {
  return t == DType::F32 || t == DType::F64 || t == DType::BF16 || t == DType::F16 || t == DType::I32 ||
         t == DType::I64;
}

bool both_forms(bool, DType) { return true; }
bool out_of_place(bool in_place, DType) { return !in_place; }
bool in_place_only(bool in_place, DType) { return in_place; }
bool in_place_if_fp32(bool in_place, DType t) { return !in_place || t == DType::F32; }

// clang-format off
constexpr std::array kOperations = {
    Operation{"all_reduce", false, true, false, true, 1, 1, true, false, false,
              twice_less_own, reduces_all, both_forms, all_reduce, own_data, whole_reduced},
    Operation{"reduce_scatter", true, true, false, true, 1, 1, false, false, false,
              less_own, sums_gradients, in_place_if_fp32, reduce_scatter, own_source_slices, slice_reduced},
    Operation{"all_gather", true, false, false, true, 1, 1, true, false, false,
              less_own, moves, both_forms, all_gather, gather_input, gathered},
    Operation{"broadcast", false, false, true, true, 1, 1, true, false, false,
              once, moves, both_forms, broadcast, root_data, of_root},
    Operation{"reduce", false, true, true, true, 1, 1, true, false, false,
              once, reduces_all, both_forms, reduce, own_data, root_reduced},
    Operation{"all_to_all", true, false, false, true, 1, 1, false, false, false,
              less_own, moves, out_of_place, all_to_all, own_source_slices, exchanged},
    Operation{"all_to_allv", true, false, false, true, 1, 1, false, false, false,
              less_own, moves, out_of_place, all_to_allv, uneven_source, unevenly_exchanged},
    Operation{"gather", true, false, true, true, 1, 1, false, false, false,
              less_own, moves, out_of_place, gather, own_source, root_gathered},
    Operation{"scatter", true, false, true, true, 1, 1, false, false, false,
              less_own, moves, out_of_place, scatter, root_slices, slice_of_root},
    Operation{"sendrecv", false, false, false, true, 2, 1, false, false, false,
              once, moves, out_of_place, ring, own_source, of_previous},
    Operation{"sendrecv_pairs", false, false, false, true, 2, 1, false, false, false,
              once, moves, out_of_place, pairs, own_source, of_partner},
    Operation{"latency", false, false, false, true, 2, 2, false, true, false,
              once, moves, out_of_place, ping_pong, own_source, of_partner},
    Operation{"bandwidth", false, false, false, true, 2, kWindow, false, true, false,
              once, moves, out_of_place, stream, own_source, of_first},
    Operation{"barrier", false, false, false, false, 1, 1, false, true, false,
              once, moves, out_of_place, barrier, nothing, nothing},
    Operation{"zero_step", true, true, false, true, 1, 1, false, false, false,
              twice_less_own, sums_gradients, in_place_if_fp32, zero_step, step_inputs, step_outputs},
    Operation{"overlap", true, false, false, true, 1, 1, false, false, true,
              less_own, moves, in_place_only, all_gather, gather_input, gathered},
};
// clang-format on

}  // namespace

std::span<const Operation> operation_table() { return kOperations; }

i64 Operation::count(i64 bytes, DType dtype, int ranks) const noexcept {
  return has_slices ? slice_count(bytes, dtype_bytes(dtype), ranks) : whole_count(bytes, dtype_bytes(dtype));
}

i64 Operation::size(i64 count, DType dtype, int ranks) const noexcept {
  return count * dtype_bytes(dtype) * (has_slices ? ranks : 1);
}

void set_uneven_slices(Task& t) {
  i64 arrived = 0;
  for (int q = 0; q < t.ranks(); ++q) {
    const Share out = uneven_share(t.ranks(), t.rank(), q, t.count), in = uneven_share(t.ranks(), q, t.rank(), t.count);
    t.slices_out.push_back({t.bytes(out.first), t.bytes(out.count)});
    t.slices_in.push_back({t.bytes(arrived), t.bytes(in.count)});
    arrived += in.count;
  }
}

i64 source_bytes(i64 size) noexcept { return align(size); }

// Sums are in fp32 where 16 bits came in, which doubles a slice; an uneven exchange brings at most one more.
i64 target_bytes(i64 size, int ranks) noexcept { return align(size) + align(2 * div_ceil(size, ranks)) + kTail; }

namespace {
bool in_pairs(const Operation& o) noexcept { return o.issue == pairs || o.issue == ping_pong || o.issue == stream; }
}  // namespace

bool takes_part(const Operation& o, int rank, int ranks) noexcept { return !in_pairs(o) || (rank ^ 1) < ranks; }

std::vector<MessageLink> message_links(const Operation& o, int ranks) {
  if (o.issue == ring) return ring_links(ranks, 1);
  std::vector<MessageLink> links;
  for (int first = 0; in_pairs(o) && first + 1 < ranks; first += 2) {
    links.push_back({first, first + 1});
    links.push_back({first + 1, first});
  }
  return links;
}

}  // namespace ds::commbench
