// SPDX-License-Identifier: Apache-2.0
// Resident memory: pages that count, pages that are shared, and the momentary peak.
#include "probe/resident.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "probe/host.h"

namespace ds::probe {
namespace resident_test {

constexpr i64 kMiB = i64{1} << 20;
constexpr i64 kSize = 64 * kMiB;
constexpr i64 kSlack = 2 * kMiB;  // of what else the process does

// Pages of this process, touched.
class Pages {
 public:
  explicit Pages(int sharing) : data_(mmap(nullptr, kSize, PROT_READ | PROT_WRITE, sharing | MAP_ANONYMOUS, -1, 0)) {
    touch();
  }
  ~Pages() { munmap(data_, kSize); }
  void touch() { std::memset(data_, 1, kSize); }

 private:
  void* data_;
};

void expect_near(i64 bytes, i64 want) {
  EXPECT_GT(bytes, want - kSlack);
  EXPECT_LT(bytes, want + kSlack);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SKIP_UNDER_SANITIZERS() GTEST_SKIP() << "sanitizers have memory beside the program's"
#else
#define SKIP_UNDER_SANITIZERS()
#endif

TEST(Resident, OwnMemoryIsWhatIsTouchedAndNotMapped) {
  SKIP_UNDER_SANITIZERS();
  const ResidentMemory before = resident_memory();
  EXPECT_GT(before.own, 0);
  EXPECT_GT(before.all, before.own);  // this program's file is mapped
  EXPECT_GE(before.highest, before.all);
  const Pages pages(MAP_PRIVATE);
  void* const untouched = mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  expect_near(resident_memory().own - before.own, kSize);
  munmap(untouched, kSize);
}

TEST(Resident, SharedMemoryCountsOnceOverItsProcesses) {
  SKIP_UNDER_SANITIZERS();
  const i64 before = resident_memory().own;
  Pages pages(MAP_SHARED);
  expect_near(resident_memory().own - before, kSize);  // nobody else has it
  int ready[2], done[2];
  ASSERT_EQ(pipe(ready), 0);
  ASSERT_EQ(pipe(done), 0);
  const pid_t child = fork();
  if (child == 0) {
    pages.touch();
    char byte = 0;
    const bool told = write(ready[1], &byte, 1) == 1 && read(done[0], &byte, 1) == 1;
    _exit(told ? 0 : 1);
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  const i64 shared = resident_memory().own - before;
  ASSERT_EQ(write(done[1], &byte, 1), 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  expect_near(shared, kSize / 2);
  for (const int fd : {ready[0], ready[1], done[0], done[1]}) close(fd);
}

TEST(Resident, AMeterHasItsBaseAndItsPeaks) {
  SKIP_UNDER_SANITIZERS();
  ResidentMeter meter;
  EXPECT_GT(meter.base_bytes(), 0);
  const Pages kept(MAP_PRIVATE);
  {
    const Pages more(MAP_PRIVATE);
    expect_near(meter.read() - meter.base_bytes(), 2 * kSize);
  }
  expect_near(meter.read() - meter.base_bytes(), kSize);
  expect_near(meter.peaks().own - meter.base_bytes(), 2 * kSize);  // though it is gone
  {
    const Pages more(MAP_PRIVATE);
    const Pages most(MAP_PRIVATE);
  }
  expect_near(meter.peaks().own - meter.base_bytes(), 2 * kSize);
  expect_near(meter.peaks().momentary, kSize);  // which nobody has read
  meter.begin_peaks();
  expect_near(meter.peaks().own - meter.base_bytes(), kSize);
  EXPECT_EQ(meter.peaks().momentary, 0);  // that was before
}

TEST(Resident, AMeterReadsOnceASecondAtMost) {
  SKIP_UNDER_SANITIZERS();
  ResidentMeter meter;
  const Pages pages(MAP_PRIVATE);
  EXPECT_EQ(meter.sample(), meter.base_bytes());  // as it was read
  expect_near(meter.read() - meter.base_bytes(), kSize);
  expect_near(meter.sample() - meter.base_bytes(), kSize);
}

// The largest increase of resident memory in a child process while it works; -1 if it cannot be measured.
template <class Work>
i64 peak_in_child(Work work) {
  int result[2];
  if (pipe(result) != 0) return -1;
  const pid_t child = fork();
  if (child == 0) {
    const i64 before = resident_memory().highest;
    work();
    const i64 more = resident_memory().highest - before;
    _exit(write(result[1], &more, sizeof more) == sizeof more ? 0 : 1);
  }
  close(result[1]);
  i64 more = -1;
  if (read(result[0], &more, sizeof more) != sizeof more) more = -1;
  close(result[0]);
  waitpid(child, nullptr, 0);
  return more;
}

TEST(Resident, TheProductThatMeasuresACpuTakesWhatItSays) {
  SKIP_UNDER_SANITIZERS();
  const OpTable& ops = cpu_backend();
  for (const DType work : {DType::F32, DType::BF16}) {
    const i64 said = matmul_rate_bytes(ops, 2, work);
    EXPECT_GT(said, 3 * 512 * 512 * dtype_bytes(work));
    const i64 taken = peak_in_child([&] { matmul_rate(*make_cpu_device(ops, 2), work); });
    EXPECT_GT(taken, said - kSlack) << dtype_name(work);
    EXPECT_LT(taken, said + 2 * kSlack) << dtype_name(work);  // the pages of the kernels' code, too
  }
}

}  // namespace resident_test
}  // namespace ds::probe
