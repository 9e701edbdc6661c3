// SPDX-License-Identifier: Apache-2.0
// An array in a file whose uses are known in advance returns the data that was written, whatever their order and
// however few its buffers are. The parts that go to the file, and their traffic, are known before.
#include "offload/ordered_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <random>
#include <thread>

#include "plan/counting_device.h"
#include "temp_directory.h"

namespace ds::offload {
namespace ordered_file_test {

using ds::testing::TempDirectory;
using zero::LeaseTo;

constexpr i64 kPart = 3 * BlockFile::kPage;

// A forward pass and a backward pass.
OrderedUses there_and_back(i64 parts) {
  OrderedUses array{.bytes = parts * kPart, .part_bytes = kPart};
  for (i64 i = 0; i < parts; ++i) array.uses.push_back({i * kPart, true});
  for (i64 i = parts; i-- > 0;) array.uses.push_back({i * kPart, false});
  return array;
}

// Each part is written and read any number of times, in any order.
OrderedUses in_any_order(i64 parts, int uses, std::mt19937& random) {
  OrderedUses array{.bytes = parts * kPart, .part_bytes = kPart};
  std::vector<bool> written(static_cast<size_t>(parts), false);
  for (int i = 0; i < uses; ++i) {
    const i64 part = static_cast<i64>(random() % static_cast<u64>(parts));
    written[part].flip();
    array.uses.push_back({part * kPart, written[part]});
  }
  for (i64 part = 0; part < parts; ++part) {
    if (written[part]) array.uses.push_back({part * kPart, false});
  }
  return array;
}

void use(OrderedFile& file, const PartUse& u, auto&& with) {
  const zero::TierLease lease = file.lease(u.at, kPart, u.write ? LeaseTo::Fill : LeaseTo::Read);
  with(static_cast<char*>(lease.data()));
}

TEST(OrderedFile, WhatIsReadSoonStays) {
  const OrderedUses array = there_and_back(10);
  const std::vector<PlannedUse> planned = plan_uses(array.uses, 4);
  for (size_t i = 0; i < 20; ++i) {
    const size_t write = i < 10 ? i : 19 - i;
    EXPECT_EQ(planned[i].in_file, write < 6) << i;
    if (write >= 6) {
      EXPECT_EQ(planned[i].buffer, planned[write].buffer) << i;
    }
  }
  // A buffer that is free is taken by what comes four uses later: so much is under way beside what is used.
  for (size_t i = 14; i < 20; ++i) EXPECT_EQ(planned[i].before, i - 4) << i;
}

TEST(OrderedFile, GivesBackWhatWasWritten) {
  const TempDirectory dir;
  const auto device = make_cpu_device(*cpu_ops(), 1);
  std::mt19937 random(5);
  for (int round = 0; round < 60; ++round) {
    const i64 parts = 1 + static_cast<i64>(random() % 12);
    const OrderedUses array = round % 4 == 0 ? there_and_back(parts) : in_any_order(parts, 60, random);
    const OrderedFile::Options options{.dir = dir.path(),
                                       .io = {.block_bytes = 4096, .io_uring = round % 2 == 0},
                                       .buffers = 1 + static_cast<i64>(random() % 6),
                                       .checksums = round % 3 == 0};
    MemoryLedger ledger, predicted_ledger;
    OrderedFile file(*device, ledger, array, options);
    plan::Addresses addresses;
    plan::CountingDevice none(*cpu_ops(), nullptr, addresses);
    OrderedFile::Options without = options;
    without.dir = "";
    OrderedFile prediction(none, predicted_ledger, array, without);
    EXPECT_EQ(ledger.current(Tag::Offload), predicted_ledger.current(Tag::Offload));
    EXPECT_LE(ledger.current(Tag::Offload), options.buffers * kPart + BlockFile::kPage);

    std::vector<char> want(static_cast<size_t>(parts));
    for (int step = 0; step < 3; ++step) {
      for (const PartUse& u : array.uses) {
        char& value = want[static_cast<size_t>(u.at / kPart)];
        use(file, u, [&](char* data) {
          if (u.write) std::memset(data, value = static_cast<char>(random()), kPart);
          ASSERT_EQ(std::count(data, data + kPart, value), kPart) << "round " << round;
        });
        use(prediction, u, [](char*) {});
      }
      EXPECT_EQ(file.file()->counts().read_bytes, prediction.file()->counts().read_bytes);
      EXPECT_EQ(file.file()->counts().written_bytes, prediction.file()->counts().written_bytes);
      EXPECT_EQ(file.file()->counts().read_bytes, file.file()->counts().written_bytes);
    }
  }
}

// Data is read before anybody asks for it.
TEST(OrderedFile, ReadsAhead) {
  const TempDirectory dir;
  const auto device = make_cpu_device(*cpu_ops(), 1);
  MemoryLedger ledger;
  const OrderedUses array = there_and_back(8);
  OrderedFile file(*device, ledger, array, {.dir = dir.path(), .buffers = 2});
  for (i64 i = 0; i < 9; ++i) use(file, array.uses[i], [](char*) {});  // all writes, and a read of what has stayed
  const auto until = Clock::now() + std::chrono::seconds(30);
  while (file.file()->counts().read_bytes < kPart && Clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(file.file()->counts().read_bytes, kPart);
}

// The unlinked file in a directory, changed without its user's knowledge.
void in_file(const std::string& dir, auto&& change) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const std::string path = std::filesystem::read_symlink(entry.path(), error).string();
    if (!error && path.starts_with(dir)) change(std::stoi(entry.path().filename()));
  }
}

TEST(OrderedFile, AFailureStays) {
  const TempDirectory dir;
  const auto device = make_cpu_device(*cpu_ops(), 1);
  const OrderedUses array = there_and_back(4);
  for (const bool lost : {true, false}) {
    MemoryLedger ledger;
    OrderedFile file(*device, ledger, array, {.dir = dir.path(), .buffers = 1, .checksums = true});
    for (i64 i = 0; i < 5; ++i) {
      use(file, array.uses[i], [&](char* data) {
        if (i < 4) std::memset(data, 1 + static_cast<int>(i), kPart);
        if (i != 3) return;
        in_file(dir.path(), [&](int descriptor) {  // the first parts have gone: there is one buffer
          alignas(4096) static char page[4096] = {};
          ASSERT_EQ(lost ? ::ftruncate(descriptor, 0) : ::pwrite(descriptor, page, 4096, 2 * kPart), lost ? 0 : 4096);
        });
      });
    }
    for (int again = 0; again < 3; ++again) {
      try {
        use(file, array.uses[5], [](char*) {});
        FAIL();
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), lost ? Errc::Io : Errc::Corrupt);
        EXPECT_THAT(e.what(), ::testing::HasSubstr(dir.path()));
      }
    }
  }
}

}  // namespace ordered_file_test
}  // namespace ds::offload
