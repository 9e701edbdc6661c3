// SPDX-License-Identifier: Apache-2.0
// Arrays in files behave like arrays in memory, whatever is leased side by side and wherever leases begin. Chunks of
// states contain each element of each piece once.
#include "offload/file_array.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <random>
#include <set>

#include "offload/chunk_layout.h"
#include "offload/chunk_memory.h"
#include "plan/counting_device.h"
#include "temp_directory.h"

namespace ds::offload {
namespace file_array_test {

using ds::testing::TempDirectory;
using zero::LeaseTo;

// Cuts of [0, size), as threads of an engine lease them at the same time.
TEST(FileArray, IsAnArray) {
  const TempDirectory dir;
  const auto device = make_cpu_device(*cpu_ops(), 1);
  for (const bool ring : {true, false}) {
    for (const i64 size : {i64{1}, i64{5000}, i64{300'001}}) {
      for (const auto& [beside, pages] : {std::pair<i64, i64>{0, 1}, {2, 3}, {2, 1024}}) {
        const i64 most = size / 3 + 1;
        MemoryLedger ledger;
        FileArray array(
            *device, ledger, size, most,
            {.dir = dir.path(), .io = {.block_bytes = 8192, .io_uring = ring}, .beside = beside, .pages = pages});
        std::vector<char> want(static_cast<size_t>(size), 0);
        std::mt19937 random(3);
        for (int round = 0; round < 300; ++round) {
          // Some parts of it that have nothing in common, in no order.
          std::set<i64> cuts = {0, size};
          for (int i = 0; i < 4; ++i) cuts.insert(static_cast<i64>(random() % static_cast<u64>(size)));
          std::vector<std::pair<i64, i64>> parts;
          for (auto it = cuts.begin(); std::next(it) != cuts.end(); ++it) {
            if (*std::next(it) - *it <= most && random() % 4 != 0) parts.emplace_back(*it, *std::next(it) - *it);
          }
          std::shuffle(parts.begin(), parts.end(), random);
          for (const auto& [begin, n] : parts) {
            if (random() % 3 == 0) array.expect(begin, n);
          }
          struct Open {
            i64 begin, n;
            LeaseTo access;
            zero::TierLease lease;
          };
          std::vector<Open> open;
          for (const auto& [begin, n] : parts) {
            const LeaseTo access = static_cast<LeaseTo>(random() % 3);
            open.push_back({begin, n, access, array.lease(begin, n, access)});
          }
          std::shuffle(open.begin(), open.end(), random);
          for (Open& o : open) {
            char* const data = static_cast<char*>(o.lease.data());
            if (o.access != LeaseTo::Fill) {
              ASSERT_EQ(std::memcmp(data, want.data() + o.begin, static_cast<size_t>(o.n)), 0) << "round " << round;
            }
            if (o.access == LeaseTo::Read) continue;
            for (i64 i = 0; i < o.n; ++i) {
              if (o.access == LeaseTo::Write && random() % 2 == 0) continue;
              want[static_cast<size_t>(o.begin + i)] = data[i] = static_cast<char>(random());
            }
          }
          while (!open.empty()) open.pop_back();
        }
        const zero::TierLease nothing = array.lease(0, 0, LeaseTo::Write);
      }
    }
  }
}

// Memory side by side, in the order in which it is asked for.
class Arena final : public plan::CountingDevice {
 public:
  explicit Arena(i64 bytes) : CountingDevice(*cpu_ops(), nullptr, none_), memory_(static_cast<size_t>(bytes) + 4096) {
    at_ = align_up(reinterpret_cast<i64>(memory_.data()), 4096);
  }
  void* allocate(i64 bytes) noexcept override {
    return reinterpret_cast<void*>(std::exchange(at_, at_ + align_up(bytes, 256)));
  }

 private:
  plan::Addresses none_;
  std::vector<char> memory_;
  i64 at_;
};

// Buffers that lie as far from each other as what they hold are not taken for each other.
TEST(FileArray, KnowsItsBuffersApart) {
  const TempDirectory dir;
  constexpr i64 kBytes = 7 * 4096, kApart = 9 * 4096;  // of a lease; of two buffers for it
  Arena device(1 << 20);
  MemoryLedger ledger;
  FileArray array(device, ledger, 4 * kApart, kBytes, {.dir = dir.path(), .beside = 2});
  const auto fill = [&](zero::TierLease& lease, char with) { std::memset(lease.data(), with, kBytes); };
  for (int round = 0; round < 3; ++round) {
    std::vector<zero::TierLease> open;
    for (i64 i = 0; i < 3; ++i) open.push_back(array.lease(i * kApart, kBytes, LeaseTo::Fill));
    if (round == 0) {
      EXPECT_EQ(static_cast<char*>(open[1].data()) - static_cast<char*>(open[0].data()), kApart);
    }
    for (size_t i = 0; i < 3; ++i) fill(open[i], static_cast<char>(10 * round + static_cast<int>(i)));
    open.pop_back();  // the last first
    open.erase(open.begin() + 1);
    const zero::TierLease other = array.lease(3 * kApart, kBytes, LeaseTo::Read);  // takes what is free
    EXPECT_NE(other.data(), open[0].data());
    fill(open[0], static_cast<char>(10 * round));
    open.clear();
    for (i64 i = 0; i < 3; ++i) {
      const zero::TierLease got = array.lease(i * kApart, kBytes, LeaseTo::Read);
      EXPECT_EQ(*static_cast<char*>(got.data()), 10 * round + i);
    }
  }
}

// Truncates the open files below a directory, so that reads find nothing.
void lose(const std::string& dir) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const std::string path = std::filesystem::read_symlink(entry.path(), error).string();
    if (error || !path.starts_with(dir)) continue;
    ASSERT_EQ(::ftruncate(std::stoi(entry.path().filename()), 0), 0);
  }
}

// A run that continued after a failure would train on arbitrary data in memory.
TEST(FileArray, AFailureStays) {
  const TempDirectory dir;
  const auto device = make_cpu_device(*cpu_ops(), 1);
  MemoryLedger ledger;
  FileArray array(*device, ledger, 1 << 20, 4096, {.dir = dir.path(), .beside = 0, .pages = 1, .write_behind = false});
  for (i64 i = 0; i < 8; ++i) array.lease(i * 4096, 4096, LeaseTo::Fill);
  lose(dir.path());
  for (int again = 0; again < 3; ++again) {
    for (i64 i = 0; i < 2; ++i) EXPECT_THROW(array.lease(i * 4096, 4096, LeaseTo::Read), Error);
  }
}

TEST(FileChunks, AFailureStays) {
  const TempDirectory dir;
  const auto device = make_cpu_device(*cpu_ops(), 1);
  std::vector<model::ParamRow> rows(1);
  rows[0].shape = {4 * kStateBlock};
  const std::vector<std::span<const model::ParamRow>> units = {rows};
  const zero::Layout layout = zero::Layout::make(units, {.num_ranks = 1, .stage = 2});
  const zero::StateLayout states(layout, 0, {state_set({State::Master})}, std::vector<PerState<DType>>(1));
  const ChunkLayout chunks(layout.held_pieces(0), states, kStateBlock);
  ASSERT_EQ(chunks.chunks().size(), 4u);
  MemoryLedger ledger;
  FileChunks memory(chunks, *device, ledger, {.dir = dir.path(), .io = {}, .windows = 1, .checksums = true});
  for (i64 c = 0; c < 4; ++c) {
    std::memset(memory.take(c, true), static_cast<int>(c) + 1, 4096);
    memory.give_back(c, true);
  }
  lose(dir.path());
  for (i64 c = 0; c < 2; ++c) {
    for (int again = 0; again < 3; ++again) EXPECT_THROW(memory.take(c, true), Error);
  }
}

TEST(ChunkLayout, HasEachElementOnce) {
  // Parameters of kinds that change places, in rows of a few units; of odd sizes.
  std::vector<model::ParamRow> rows;
  std::mt19937 random(5);
  for (int i = 0; i < 40; ++i) {
    model::ParamRow row;
    row.shape = {1 + static_cast<i64>(random() % 3000)};
    rows.push_back(row);
  }
  std::vector<std::span<const model::ParamRow>> units;
  for (size_t u = 0; u < 4; ++u) units.push_back(std::span(rows).subspan(10 * u, 10));
  for (const int ranks : {1, 3}) {
    const zero::Layout layout = zero::Layout::make(units, {.num_ranks = ranks, .stage = 2, .block = kStateBlock});
    std::vector<StateSet> has;
    std::vector<PerState<DType>> dtypes;
    for (size_t p = 0; p < rows.size(); ++p) {
      const u64 kind = random() % 3;
      has.push_back(kind == 0   ? state_set({State::Master})
                    : kind == 1 ? state_set({State::Master, State::MomentumBuffer})
                                : state_set({State::Master, State::ExpAvg, State::ExpAvgSq}));
      dtypes.emplace_back();
      dtypes.back()[State::ExpAvg] = DType::I8, dtypes.back()[State::ExpAvgSq] = DType::U8;
    }
    for (int rank = 0; rank < ranks; ++rank) {
      const zero::StateLayout states(layout, rank, has, dtypes);
      const std::vector<zero::Piece> held = layout.held_pieces(rank);
      for (const i64 most : {kStateBlock, 4 * kStateBlock, i64{1} << 20}) {
        const ChunkLayout chunks(held, states, most);
        std::vector<char> taken(static_cast<size_t>(chunks.bytes()), 0);
        i64 at = 0;
        for (const Chunk& c : chunks.chunks()) {
          EXPECT_EQ(c.at, at);
          EXPECT_EQ(c.bytes % ChunkLayout::kPage, 0);
          EXPECT_LE(c.elems, most);
          at += c.bytes;
        }
        EXPECT_EQ(at, chunks.bytes());
        for (const zero::Piece& piece : held) {
          i64 next = piece.begin;
          chunks.for_each_part(piece, [&](const ChunkPart& part) {
            EXPECT_EQ(part.piece.begin, next);
            EXPECT_EQ((part.piece.begin - piece.begin) % kStateBlock, 0);
            next += part.piece.count;
            for (const State s : kStates) {
              if (!has[piece.param][s]) continue;
              const DType t = dtypes[piece.param][s];
              const auto take = [&](i64 from, i64 n) {
                for (i64 i = 0; i < n; ++i) EXPECT_EQ(taken[chunks.chunks()[part.chunk].at + from + i]++, 0);
                EXPECT_LE(from + n, chunks.chunks()[part.chunk].bytes);
              };
              take(part.offsets[s], part.piece.count * dtype_bytes(t));
              if (is_coded(t)) take(part.scales[s], state_blocks(part.piece.count) * 4);
            }
          });
          EXPECT_EQ(next, piece.begin + piece.count);
          // A part of a piece is where the piece stores it.
          if (piece.count < 2 * kStateBlock) continue;
          const zero::Piece tail = piece.part(kStateBlock, piece.count - kStateBlock);
          i64 seen = 0;
          chunks.for_each_part(tail, [&](const ChunkPart& part) { seen += part.piece.count; });
          EXPECT_EQ(seen, tail.count);
        }
      }
    }
  }
}

}  // namespace file_array_test
}  // namespace ds::offload
