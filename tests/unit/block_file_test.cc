// SPDX-License-Identifier: Apache-2.0
// Files of offloaded data: reads return the data that was written, however requests are cut and carried out. A refusal
// of the system is an error with the reason and the place.
#include "offload/block_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/statvfs.h>

#include <filesystem>
#include <random>

#include "temp_directory.h"

namespace ds::offload {
namespace block_file_test {

using ds::testing::TempDirectory;
constexpr i64 kPage = BlockFile::kPage;

struct Pages {
  explicit Pages(i64 n)
      : bytes(n * kPage), data(static_cast<char*>(std::aligned_alloc(kPage, static_cast<size_t>(bytes)))) {}
  ~Pages() { std::free(data); }
  std::span<char> all() const { return {data, static_cast<size_t>(bytes)}; }
  i64 bytes;
  char* data;
};

std::vector<IoOptions> ways() {
  return {{},
          {.block_bytes = kPage, .depth = 1},
          {.block_bytes = 3 * kPage, .depth = 64},
          {.block_bytes = 2 * kPage, .threads = 3, .io_uring = false},
          {.io_uring = false}};
}

// Random requests, some under way together, beside a copy of what the file must have.
TEST(BlockFile, HasWhatWasWritten) {
  const TempDirectory dir;
  constexpr i64 kFile = 64, kPart = 7;
  for (const IoOptions& way : ways()) {
    Pages want(kFile), work(4 * kPart);
    std::memset(want.data, 0, static_cast<size_t>(want.bytes));
    // Registered memory is only a part of what is used.
    BlockFile file(dir.path(), kFile * kPage, work.all().first(static_cast<size_t>(2 * kPart * kPage)), way);
    std::mt19937 random(7);
    for (int round = 0; round < 200; ++round) {
      struct Request {
        bool write;
        i64 at, n;
        BlockFile::Ticket ticket;
      };
      std::vector<Request> requests;
      for (i64 i = 0; i < 4; ++i) {  // each in a quarter of its own
        const i64 n = 1 + static_cast<i64>(random() % kPart),
                  at = i * kFile / 4 + static_cast<i64>(random() % (kFile / 4 - n));
        char* const memory = work.data + i * kPart * kPage;
        const bool write = random() % 2 == 0;
        if (write) {
          for (i64 b = 0; b < n * kPage; ++b) memory[b] = static_cast<char>(random());
          std::memcpy(want.data + at * kPage, memory, static_cast<size_t>(n * kPage));
        } else {
          std::memset(memory, 0x55, static_cast<size_t>(n * kPage));
        }
        requests.push_back(
            {write, at, n,
             write ? file.write(memory, at * kPage, n * kPage) : file.read(memory, at * kPage, n * kPage)});
      }
      for (size_t i = 0; i < requests.size(); ++i) {
        const Request& r = requests[i];
        file.wait(r.ticket);
        ASSERT_EQ(std::memcmp(work.data + static_cast<i64>(i) * kPart * kPage, want.data + r.at * kPage,
                              static_cast<size_t>(r.n * kPage)),
                  0)
            << file.method();
      }
    }
    EXPECT_GT(file.counts().read_bytes, 0);
    EXPECT_GT(file.counts().written_bytes, 0);
    EXPECT_THAT(file.method(), ::testing::HasSubstr(way.io_uring ? "" : "thread"));
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));  // it has no name
}

TEST(BlockFile, RequestsUnderWayEndWithIt) {
  const TempDirectory dir;
  for (const IoOptions& way : ways()) {
    Pages memory(256);
    BlockFile file(dir.path(), memory.bytes, memory.all(), way);
    for (i64 i = 0; i < 16; ++i) file.write(memory.data + i * 16 * kPage, i * 16 * kPage, 16 * kPage);
  }
}

// Past the end of the file there is nothing: as a disk that fails. Then nothing of the file is trusted.
TEST(BlockFile, WhatFailsIsSaid) {
  const TempDirectory dir;
  for (const IoOptions& way : ways()) {
    Pages memory(8);
    BlockFile file(dir.path(), 4 * kPage, memory.all(), way);
    const BlockFile::Ticket beyond = file.read(memory.data, 2 * kPage, 4 * kPage);
    try {
      file.wait(beyond);
      FAIL() << file.method();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::Io);
      EXPECT_EQ(std::string(e.what()), dir.path() + ": cannot read offloaded data: the file ends early");
    }
    EXPECT_THROW(file.throw_if_failed(), Error);
  }
}

TEST(BlockFile, ADiskWithoutRoomIsSaidBefore) {
  const TempDirectory dir;
  struct statvfs there;
  ASSERT_EQ(::statvfs(dir.path().c_str(), &there), 0);
  const i64 more = (static_cast<i64>(there.f_bavail) + 1024) * static_cast<i64>(there.f_frsize) / kPage * kPage * 2;
  Pages memory(1);
  try {
    BlockFile(dir.path(), more, memory.all(), {});
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::Unavailable);
    EXPECT_THAT(e.what(), ::testing::AllOf(::testing::HasSubstr(dir.path()), ::testing::HasSubstr("are free")));
  }
}

}  // namespace block_file_test
}  // namespace ds::offload
