// SPDX-License-Identifier: Apache-2.0
#include "comm/nonzero_blocks.h"

#include <algorithm>

namespace ds {
namespace {

constexpr i32 kNoBlock = -1;  // padding up to the number of another rank

i64 range_of(i64 ranks, i64 max_elems, i64 room) noexcept {
  return std::clamp<i64>(room / ranks, 1, std::max<i64>(1, ranks * (max_elems / NonzeroBlocks::kBlock)));
}
i64 sent_bytes(i64 blocks, i64 block_bytes) noexcept { return blocks * (4 + block_bytes); }

}  // namespace

i64 NonzeroBlocks::most_at_once(int ranks, i64 max_elems, i64 slice_bytes, i64 block_bytes, i64 most,
                                i64 room) noexcept {
  const i64 saving = (slice_bytes - 1) / sent_bytes(1, block_bytes);
  return std::min({range_of(ranks, max_elems, room), saving, most});
}

NonzeroBlocks::NonzeroBlocks(Communicator& comm, Device& device, MemoryLedger& ledger, Tag tag, i64 max_elems,
                             i64 width, i64 room)
    : comm_(comm), device_(device) {
  const i64 P = comm.size(), blocks = P * div_exact(max_elems, kBlock);
  if (P == 1) return;
  range_ = range_of(P, max_elems, room);
  const i64 ranges = (blocks + range_ - 1) / range_;
  flags_ = device_buffer(device, ledger, tag, blocks);
  counts_ = comm.allocate(ledger, tag, P * ranges * 4);
  numbers_ = comm.allocate(ledger, tag, P * range_ * 4);
  values_ = comm.allocate(ledger, tag, P * range_ * kBlock * width);
  is_set_.resize(static_cast<size_t>(blocks));
  mine_.reserve(static_cast<size_t>(blocks));
  sent_.resize(static_cast<size_t>(range_));
  together_.resize(static_cast<size_t>(P));
  of_all_.resize(static_cast<size_t>(P * ranges));
}

// Calls f(blocks of the rank with most, blocks of this rank) for each exchange. Exchanges cover consecutive ranges, as
// long as they have room. A given block is in the same exchange on all ranks, so its sum is in rank order.
template <class F>
void NonzeroBlocks::for_each_exchange(F f) {
  const auto of = [&](i64 rank, i64 range) { return i64{of_all_[rank * num_ranges_ + range]}; };
  for (i64 begin = 0, end = 0; begin < num_ranges_; begin = end) {
    std::ranges::fill(together_, 0);
    i64 most = 0;
    for (; end < num_ranges_; ++end) {
      i64 with = 0;
      for (i64 r = 0; r < comm_.size(); ++r) with = std::max(with, together_[r] + of(r, end));
      if (with > range_) break;
      for (i64 r = 0; r < comm_.size(); ++r) together_[r] += of(r, end);
      most = with;
    }
    if (most > 0) f(most, together_[comm_.rank()]);
  }
}

// Finds this rank's nonzero blocks [n, kBlock], numbered from `first`, and the number of them on each rank in each
// range. Returns whether sending them takes fewer bytes than slices of slice_bytes.
bool NonzeroBlocks::find(TensorView blocks, i64 first, i64 most, i64 slice_bytes, std::string_view tag) {
  const i64 n = blocks.dim(0), P = comm_.size();
  num_ranges_ = (n + range_ - 1) / range_;
  // Overwritten below, unless the device only counts.
  std::fill_n(is_set_.begin(), n, u8{0});
  std::fill_n(is_set_.begin(), std::min(n, most), u8{1});
  device_.ops().nonzero_rows(TensorView::of(flags_.data(), DType::U8, {n}), blocks, device_.stream());
  device_.download(is_set_.data(), flags_.data(), n);
  mine_.clear();
  i32* const found = of_all_.data() + comm_.rank() * num_ranges_;
  std::fill_n(found, num_ranges_, 0);
  for (i64 b = 0; b < n; ++b) {
    if (is_set_[b] == 0) continue;
    mine_.push_back(narrow<i32>(first + b));
    ++found[b / range_];
  }
  // Likewise, for a device that only counts: assume as many on the other ranks, and different ones, which needs the
  // most exchanges.
  for (i64 r = 1, b = std::min(n, most); r < P; ++r) {
    i32* const other = of_all_.data() + (comm_.rank() + r) % P * num_ranges_;
    std::fill_n(other, num_ranges_, 0);
    for (i64 left = std::min(n, most); left > 0;) {
      const i64 at = b % n, count = std::min(left, std::min(n, (at / range_ + 1) * range_) - at);
      other[at / range_] += narrow<i32>(count);
      left -= count, b += count;
    }
  }
  const AllGatherSegment all{counts_.data(), num_ranges_ * 4};
  device_.upload(counts_.as<char>().data() + comm_.rank() * all.slice_bytes, found, all.slice_bytes);
  comm_.all_gather({&all, 1}, tag).wait();
  device_.download(of_all_.data(), counts_.data(), P * all.slice_bytes);

  i64 sent = 0;  // blocks, to each other rank
  for_each_exchange([&](i64 of_one, i64) { sent += of_one; });
  return sent_bytes(sent, kBlock * dtype_bytes(blocks.dtype)) < slice_bytes;
}

// Calls consume(values [k, kBlock], numbers [k]) for each exchange, in rank order; some numbers are kNoBlock. `table`:
// what the numbers index.
template <class Consume>
void NonzeroBlocks::exchange(TensorView table, std::string_view tag, Consume consume) {
  const i64 P = comm_.size(), rank = comm_.rank(), width = kBlock * dtype_bytes(table.dtype);
  auto next = mine_.begin();
  for_each_exchange([&](i64 k, i64 own) {
    std::fill(std::copy_n(next, own, sent_.begin()), sent_.begin() + k, kNoBlock);
    next += own;
    const TensorView numbers = TensorView::of(numbers_.data(), DType::I32, {P * k}),
                     values = TensorView::of(values_.data(), table.dtype, {P * k, kBlock});
    device_.upload(numbers.rows(rank * k, k).data, sent_.data(), k * 4);
    device_.ops().embedding_fwd(values.rows(rank * k, k), table, numbers.rows(rank * k, k), 0, false, device_.stream());
    const AllGatherSegment parts[] = {{numbers.data, k * 4}, {values.data, k * width}};
    comm_.all_gather(parts, tag).wait();
    consume(values, numbers);
  });
}

bool NonzeroBlocks::saves(TensorView source, i64 most, std::string_view tag) {
  DS_ASSERT(source.contiguous());
  if (comm_.size() == 1) return false;
  return find(source.reshaped({div_exact(source.numel(), kBlock), kBlock}), 0, most, source.bytes() / comm_.size(),
              tag);
}

void NonzeroBlocks::reduce_scatter(TensorView source, TensorView target, bool accumulate, std::string_view tag) {
  const i64 blocks = div_exact(target.numel(), kBlock), P = comm_.size();
  DS_ASSERT(source.numel() == P * target.numel() && target.dtype == DType::F32);
  const TensorView sums = target.reshaped({blocks, kBlock});
  if (!accumulate) device_.zero(target.data, target.bytes());
  exchange(source.reshaped({P * blocks, kBlock}), tag, [&](const TensorView& values, const TensorView& numbers) {
    device_.ops().embedding_bwd(sums, values, numbers, comm_.rank() * blocks, true, device_.stream());
  });
}

bool NonzeroBlocks::all_gather(TensorView full, i64 most, std::string_view tag) {
  if (comm_.size() == 1) return false;
  const i64 P = comm_.size(), rank = comm_.rank(), n = div_exact(full.numel(), P), blocks = div_exact(n, kBlock);
  DS_ASSERT(full.contiguous());
  const TensorView table = full.reshaped({P * blocks, kBlock});
  if (!find(table.rows(rank * blocks, blocks), rank * blocks, most, n * dtype_bytes(full.dtype), tag)) return false;
  const TensorView before = table.rows(0, rank * blocks),
                   behind = table.rows((rank + 1) * blocks, (P - 1 - rank) * blocks);
  for (const TensorView& others : {before, behind}) {
    if (others.numel() > 0) device_.zero(others.data, others.bytes());
  }
  exchange(table, tag, [&](const TensorView& values, const TensorView& numbers) {
    if (rank > 0) device_.ops().embedding_bwd(before, values, numbers, 0, true, device_.stream());
    if (rank + 1 < P) device_.ops().embedding_bwd(behind, values, numbers, (rank + 1) * blocks, true, device_.stream());
  });
  return true;
}

}  // namespace ds
