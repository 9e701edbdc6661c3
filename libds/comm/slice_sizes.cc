// SPDX-License-Identifier: Apache-2.0
#include "comm/slice_sizes.h"

#include <string>

namespace ds {
namespace {

// splitmix64's finaliser.
u64 mixed(u64 x) noexcept {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

u64 hash_of(int from, int to, size_t bytes) noexcept {
  const u64 pair = static_cast<u64>(from) << 32 | static_cast<u64>(to);
  return bytes == 0 ? 0 : mixed(mixed(pair + 0x9E3779B97F4A7C15u) + bytes);
}

}  // namespace

u64 size_imbalance(const Operation& op, int rank) noexcept {
  u64 sum = 0;
  for (size_t q = 0; q < op.out.size(); ++q) {
    const int peer = static_cast<int>(q);
    sum += hash_of(rank, peer, op.out[q].size()) - hash_of(peer, rank, op.in[q].size());
  }
  return sum;
}

i64* put_sizes(const Operation& op, int rank, std::span<i64> sizes) noexcept {
  i64* const row = sizes.data() + 2 * static_cast<size_t>(rank) * op.out.size();
  for (size_t q = 0; q < op.out.size(); ++q) {
    row[q] = std::ssize(op.out[q]);
    row[op.out.size() + q] = std::ssize(op.in[q]);
  }
  return row;
}

std::optional<Error> size_mismatch(std::span<const i64> sizes, const Communicator& ranks, std::string_view tag,
                                   std::string_view of_group) {
  const int P = ranks.size();
  for (int from = 0; from < P; ++from) {
    for (int to = 0; to < P; ++to) {
      const i64 sent = sizes[(2 * from) * P + to], expected = sizes[(2 * to + 1) * P + from];
      if (sent == expected) continue;
      return Error(Errc::Comm,
                   fmt::format("sizes do not match{}: rank {} sends {} bytes to rank {}, which expects {}, in "
                               "all_to_allv \"{}\"",
                               of_group, ranks.world_rank(from), sent, ranks.world_rank(to), expected, tag),
                   ranks.world_rank(from));
    }
  }
  return {};
}

void compare_sizes(Communicator& world, const Operation& op, std::vector<i64>& sizes) {
  sizes.resize(2 * op.out.size() * op.out.size());
  put_sizes(op, world.rank(), sizes);
  const AllGatherSegment all{sizes.data(), 2 * world.size() * i64{sizeof(i64)}};
  world.all_gather({&all, 1}, op.tag).wait();
  if (const std::optional<Error> mismatch = size_mismatch(sizes, world, op.tag)) {
    world.abort(*mismatch);
    throw Error(*mismatch);
  }
}

}  // namespace ds
