// SPDX-License-Identifier: Apache-2.0
#include "data/read_ahead.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <numeric>
#include <thread>

#include "data/objective.h"
#include "data/packing.h"
#include "temp_directory.h"

namespace ds {
namespace read_ahead_test {

using testing::TempDirectory;
using testing::write_file;

constexpr i64 kPage = 4096, kSampleTokens = 4096;  // two pages of uint16

// Pages of a file that are in memory.
class Pages {
 public:
  explicit Pages(const std::string& file) : fd_(open(file.c_str(), O_RDONLY | O_CLOEXEC)) {
    bytes_ = lseek(fd_, 0, SEEK_END);
    data_ = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ, MAP_SHARED, fd_, 0);
  }
  ~Pages() {
    munmap(data_, static_cast<size_t>(bytes_));
    close(fd_);
  }
  void drop() {
    fsync(fd_);
    posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED);
  }
  i64 there() const {
    std::vector<unsigned char> is(static_cast<size_t>((bytes_ + kPage - 1) / kPage));
    EXPECT_EQ(mincore(data_, static_cast<size_t>(bytes_), is.data()), 0);
    return std::ranges::count_if(is, [](unsigned char c) { return (c & 1) != 0; });
  }

 private:
  int fd_;
  i64 bytes_ = 0;
  void* data_ = nullptr;
};

// Pages of `files` that come when ask() has asked for `expected` of them at least. -1: the file system keeps all in
// memory.
template <class Ask>
i64 pages_that_come(std::span<const std::string> files, i64 expected, Ask&& ask) {
  std::vector<std::unique_ptr<Pages>> pages;
  for (const std::string& file : files) pages.emplace_back(std::make_unique<Pages>(file))->drop();
  const auto there = [&] {
    return std::accumulate(pages.begin(), pages.end(), i64{0}, [](i64 sum, const auto& p) { return sum + p->there(); });
  };
  const i64 before = there();
  if (before > expected) return -1;
  ask();
  for (int i = 0; i < 1000 && there() - before < expected; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return there() - before;
}

std::string write_tokens(const TempDirectory& dir, const std::string& name, std::span<const u16> tokens) {
  write_file(dir / name, std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2));
  return dir / name;
}

TEST(ReadAhead, BringsThePagesOfTheStepThatComes) {
  const TempDirectory dir;
  constexpr i64 kSamples = 512;
  const std::vector<u16> tokens(static_cast<size_t>(kSamples * kSampleTokens + 1), 3);
  const std::vector<std::string> files{write_tokens(dir, "a.bin", tokens), write_tokens(dir, "b.bin", tokens)};
  const BatchShape shape{.micro = 2, .num_ranks = 1, .seq_length = kSampleTokens};
  for (const std::vector<float>& weights : {std::vector<float>{}, std::vector<float>{1, 0.5f}}) {
    const BatchLoader loader(TokenStream(files, {.format = DataFormat::Bin}), shape, 5, 65536, next_token(), weights);
    // The pages of eight samples, one of which may be in memory already.
    const i64 come = pages_that_come(files, 7 * 2, [&] {
      ReadAhead ahead(loader, 4, 0);
      ahead.expect(16);
      ahead.wait();
    });
    if (come < 0) GTEST_SKIP() << "the file system keeps all in memory";
    EXPECT_GE(come, 7 * 2);
    EXPECT_LT(come, 2 * kSamples) << "and not all the others";
  }
}

TEST(ReadAhead, BringsThePagesOfPackedDocuments) {
  const TempDirectory dir;
  std::vector<u16> tokens(256 * kSampleTokens, 3);
  for (size_t i = kSampleTokens / 2 - 1; i < tokens.size(); i += kSampleTokens / 2) tokens[i] = 0;  // two to a sample
  const std::vector<std::string> files{write_tokens(dir, "a.bin", tokens)};
  // The stream that Packing scans is a temporary: a stream keeps the pages it has read in memory as long as it maps
  // them.
  const StreamOptions options{.format = DataFormat::Bin, .documents = {.packed = true, .token = 0}};
  const Packing packing(TokenStream(files, options), kSampleTokens);
  const TokenStream stream(files, options);
  const i64 come = pages_that_come(files, 7 * 2, [&] {
    for (i64 sample = 10; sample < 18; ++sample) packing.will_need(stream, sample);
  });
  if (come < 0) GTEST_SKIP() << "the file system keeps all in memory";
  EXPECT_GE(come, 7 * 2);
}

// If a file is cut off meanwhile, the step reports it.
TEST(ReadAhead, LeavesMistakesToTheStep) {
  const TempDirectory dir;
  const std::string file = dir / "a.bin";
  write_file(file, std::string(2 * (64 * 16 + 1), '\0'));
  const BatchShape shape{.micro = 2, .num_ranks = 1, .seq_length = 16};
  const BatchLoader loader(TokenStream(std::span(&file, 1), {.format = DataFormat::Bin}), shape, 5, 65536,
                           next_token());
  ReadAhead ahead(loader, 4, 0);
  ASSERT_EQ(truncate(file.c_str(), 10), 0);
  ahead.expect(0);
  ahead.expect(8);
  ahead.wait();
  std::vector<i32> inputs(32), targets(32);
  EXPECT_THROW(loader.load(0, 0, 0, inputs, targets), Error);
}

}  // namespace read_ahead_test
}  // namespace ds
