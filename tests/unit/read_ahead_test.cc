// SPDX-License-Identifier: Apache-2.0
#include "data/read_ahead.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "data/objective.h"
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

TEST(ReadAhead, BringsThePagesOfTheStepThatComes) {
  const TempDirectory dir;
  constexpr i64 kSamples = 512;
  const std::vector<u16> tokens(static_cast<size_t>(kSamples * kSampleTokens + 1), 3);
  const std::string file = dir / "a.bin";
  write_file(file, std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2));
  Pages pages(file);
  pages.drop();
  const BatchShape shape{.micro = 2, .num_ranks = 1, .seq_length = kSampleTokens};
  const BatchLoader loader(TokenStream(std::span(&file, 1), DataFormat::Bin), shape, 5, 65536, next_token());
  ReadAhead ahead(loader, shape, 4, 0);
  ahead.wait();
  const i64 before = pages.there();
  if (before > kSamples) GTEST_SKIP() << "the file system keeps all in memory";
  ahead.expect(16);
  ahead.wait();
  EXPECT_GE(pages.there() - before, 7 * 2);  // of eight samples, of which one may be there
}

// A file that is cut off meanwhile is the step's to tell.
TEST(ReadAhead, LeavesMistakesToTheStep) {
  const TempDirectory dir;
  const std::string file = dir / "a.bin";
  write_file(file, std::string(2 * (64 * 16 + 1), '\0'));
  const BatchShape shape{.micro = 2, .num_ranks = 1, .seq_length = 16};
  const BatchLoader loader(TokenStream(std::span(&file, 1), DataFormat::Bin), shape, 5, 65536, next_token());
  ReadAhead ahead(loader, shape, 4, 0);
  ASSERT_EQ(truncate(file.c_str(), 10), 0);
  ahead.expect(0);
  ahead.expect(8);
  ahead.wait();
  std::vector<i32> inputs(32), targets(32);
  EXPECT_THROW(loader.load(0, 0, 0, inputs, targets), Error);
}

}  // namespace read_ahead_test
}  // namespace ds
