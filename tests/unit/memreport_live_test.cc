// SPDX-License-Identifier: Apache-2.0
// The counters that a rank shows while it trains, and their readers: whole records, of processes that live, of this
// user and this version.
#include "memreport/live.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>

#include "base/process_stat.h"
#include "ds/log.h"
#include "run/live_counters.h"
#include "temp_directory.h"

namespace ds::memreport {
namespace memreport_live_test {

using run::LiveCounters;
using run::LiveIdentity;
using run::LiveRecord;
using run::LiveSegment;
using namespace std::chrono_literals;

const i64 kNobody = (i64{1} << 30) + getpid();  // above every pid_max; of this test alone

std::string path_of(i64 pid) { return "/dev/shm/" + run::live_name(pid); }
bool exists(i64 pid) { return access(path_of(pid).c_str(), F_OK) == 0; }

LiveIdentity identity() {
  LiveIdentity who{.rank = 3,
                   .world_size = 24,
                   .mesh = {.pp = 2, .dp = 3, .sp = 1, .tp = 4, .worker = 1},
                   .coord = {.pp = 0, .dp = 0, .sp = 0, .tp = 3, .worker = 0},
                   .total_steps = 1000,
                   .base_bytes = 77};
  who.predicted[0] = 5;
  run::copy_text(who.job, "job-17");
  run::copy_text(who.directory, "/runs/a b");
  run::copy_text(who.device, "cpu.avx2");
  return who;
}

// Every number in it is n.
LiveRecord record_of(i64 n) {
  const auto x = static_cast<double>(n);
  LiveRecord r{n, x, x, x, x, n, n, n, {}, {}};
  r.current.fill(n);
  r.peak.fill(n);
  return r;
}
bool is_whole(const LiveRecord& r) {
  const LiveRecord same = record_of(r.step);
  return std::memcmp(&same, &r, sizeof r) == 0;
}

const LiveRank* find(const std::vector<LiveRank>& ranks, i64 pid) {
  const auto found = std::ranges::find(ranks, pid, &LiveRank::pid);
  return found == ranks.end() ? nullptr : &*found;
}

// A process that runs `body` and then, again and again until it is killed, `then`; body() is done when the constructor
// returns.
class Child {
 public:
  explicit Child(
      const std::function<void()>& body, const std::function<void()>& then = [] { pause(); }) {
    int ready[2];
    EXPECT_EQ(pipe(ready), 0);
    pid_ = fork();
    if (pid_ == 0) {
      body();
      const bool told = write(ready[1], "", 1) == 1;
      while (told) then();
      _exit(1);
    }
    char byte = 0;
    EXPECT_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    close(ready[1]);
  }
  ~Child() {
    kill();
    reap();
  }
  pid_t pid() const { return pid_; }
  void kill() const { ::kill(pid_, SIGKILL); }
  void reap() {
    if (!std::exchange(reaped_, true)) waitpid(pid_, nullptr, 0);
  }

 private:
  pid_t pid_ = 0;
  bool reaped_ = false;
};

// Shows counters forever, like a rank that is killed.
void show() { new LiveCounters(identity(), record_of(1)); }

// A file with the name of somebody's counters, removed at the end. Its maker lives, or has ended.
class Planted {
 public:
  enum Maker { Lives, HasEnded };
  Planted(i64 pid, const void* content, size_t bytes, Maker maker = Lives) : pid_(pid) {
    testing::write_file(path_of(pid), {static_cast<const char*>(content), bytes});
    chmod(path_of(pid).c_str(), 0600);
    lock_ = open(path_of(pid).c_str(), O_RDONLY | O_CLOEXEC);
    EXPECT_TRUE(maker == HasEnded || flock(lock_, LOCK_EX | LOCK_NB) == 0);
  }
  ~Planted() {
    unlink(path_of(pid_).c_str());
    close(lock_);
  }

 private:
  i64 pid_;
  int lock_;
};

// The segment that this process would publish, under another pid.
std::unique_ptr<LiveSegment> segment(i64 pid) {
  auto s = std::make_unique<LiveSegment>();
  s->header.bytes = sizeof(LiveSegment);
  s->header.pid = pid;
  s->identity = identity();
  s->record.store(record_of(1));
  return s;
}

TEST(LiveCounters, AReaderGetsWhatWasWritten) {
  const i64 pid = getpid();
  {
    LiveCounters counters(identity(), record_of(1));
    LiveRecord r = record_of(2);
    r.peak = {};
    r.peak[1] = 8;
    r.updated_ns =
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
            .count();
    counters.publish(r);
    struct stat st {};
    ASSERT_EQ(stat(path_of(pid).c_str(), &st), 0);
    EXPECT_EQ(st.st_mode & 0777, 0600U);

    const std::vector<LiveRank> all = find_live();
    const LiveRank* const rank = find(all, pid);
    ASSERT_NE(rank, nullptr);
    EXPECT_EQ(rank->job, "job-17");
    EXPECT_EQ(rank->rank, 3);
    EXPECT_EQ(rank->world_size, 24);
    EXPECT_EQ(rank->mesh, (MeshShape{.dp = 3, .pp = 2, .tp = 4, .sp = 1}));
    EXPECT_EQ(rank->coord, (MeshCoord{.tp = 3}));
    EXPECT_EQ(rank->directory, "/runs/a b");
    EXPECT_EQ(rank->device, "cpu.avx2");
    EXPECT_EQ(rank->step, 2);
    EXPECT_EQ(rank->total_steps, 1000);
    EXPECT_EQ(rank->loss, 2);
    EXPECT_EQ(rank->step_ms, 2);
    EXPECT_EQ(rank->tokens_per_s, 2);
    EXPECT_EQ(rank->mfu, 2);
    EXPECT_EQ(rank->comm_bytes, 2);
    EXPECT_EQ(rank->resident_bytes, 2);
    EXPECT_EQ(rank->base_bytes, 77);
    EXPECT_GE(rank->age_s, 0);
    EXPECT_LT(rank->age_s, 60);
    ASSERT_EQ(rank->memory.size(), 2U);  // predicted; counted
    EXPECT_EQ(rank->memory[0].tag, tag_name(Tag{0}));
    EXPECT_EQ(rank->memory[0].predicted, 5);
    EXPECT_EQ(rank->memory[0].counted, 0);
    EXPECT_EQ(rank->memory[1].counted, 8);
  }
  EXPECT_FALSE(exists(pid));
  EXPECT_ERROR(read_live(pid), Errc::Config, "no ds-train that trains");
}

TEST(LiveCounters, TheyGoWithAnErrorToo) {
  try {
    const LiveCounters counters(identity(), record_of(1));
    EXPECT_TRUE(exists(getpid()));
    throw Error(Errc::Comm, "a rank has died");
  } catch (const Error&) {
  }
  EXPECT_FALSE(exists(getpid()));
}

TEST(LiveCounters, TextsThatAreTooLongAreCut) {
  LiveIdentity who = identity();
  run::copy_text(who.directory, std::string(10000, 'x'));
  const LiveCounters counters(who, record_of(1));
  EXPECT_EQ(read_live(getpid()).directory, std::string(who.directory.size() - 1, 'x'));
}

TEST(LiveCounters, WhoCannotShowThemGoesOn) {
  int warnings = 0;
  set_log_sink([&](LogLevel level, std::string_view) { warnings += level == LogLevel::Warning; });
  const LiveCounters first(identity(), record_of(1));
  LiveCounters second(identity(), record_of(2));
  for (int i = 3; i < 10; ++i) second.publish(record_of(i));
  set_log_sink(nullptr);
  EXPECT_EQ(warnings, 1);
  EXPECT_EQ(read_live(getpid()).step, 1);
}

// Values of several words, so that a mixture of two would show.
TEST(LiveCounters, ThreadsNeverReadHalfARecord) {
  run::Seqlock<LiveRecord> shared;
  shared.store(record_of(0));
  std::atomic<bool> stop = false;
  std::atomic<i64> torn = 0, seen = 0, backwards = 0;
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      for (i64 last = 0; !stop;) {
        const std::optional<LiveRecord> r = shared.load();
        if (!r) continue;
        torn += !is_whole(*r);
        backwards += r->step < last;
        seen += r->step != last;
        last = r->step;
      }
    });
  }
  const auto end = std::chrono::steady_clock::now() + 20s;
  i64 n = 0;
  for (; (n < 100000 || seen < 100) && std::chrono::steady_clock::now() < end; ++n) shared.store(record_of(n));
  stop = true;
  for (std::thread& t : readers) t.join();
  EXPECT_GE(seen, 100) << "in " << n << " writes";
  EXPECT_EQ(torn, 0);
  EXPECT_EQ(backwards, 0);
}

TEST(LiveCounters, AnotherProcessNeverReadsHalfARecord) {
  LiveCounters* counters = nullptr;
  i64 n = 0;
  const Child writer([&] { counters = new LiveCounters(identity(), record_of(0)); },
                     [&] { counters->publish(record_of(++n)); });
  const std::optional<run::LiveView> view = run::LiveView::open(writer.pid());
  ASSERT_TRUE(view);
  const auto end = std::chrono::steady_clock::now() + 20s;
  i64 last = 0;
  for (int seen = 0; seen < 200 && std::chrono::steady_clock::now() < end;) {
    const std::optional<LiveRecord> r = view->read();
    ASSERT_TRUE(r);
    ASSERT_TRUE(is_whole(*r)) << r->step;
    ASSERT_GE(r->step, last);
    seen += r->step != last;
    last = r->step;
  }
  EXPECT_GT(last, 0);
  EXPECT_EQ(read_live(writer.pid()).total_steps, 1000);
}

TEST(LiveCounters, AWriterThatWasStoppedInTheMiddleIsATimeout) {
  const Child alive([] {});
  const auto s = segment(alive.pid());
  // The sequence is the first word of the record.
  auto* const sequence = reinterpret_cast<std::atomic<u64>*>(&s->record);
  ASSERT_EQ(sequence->load(), 2U);
  sequence->store(3);
  const Planted planted(alive.pid(), s.get(), sizeof *s);
  EXPECT_ERROR(read_live(alive.pid()), Errc::Timeout, "was stopped while it wrote");
}

TEST(LiveCounters, WhatAKilledProcessLeftGoesWithTheNextReader) {
  Child child(show);
  EXPECT_EQ(read_live(child.pid()).step, 1);
  child.kill();
  for (int i = 0; i < 1000 && process_stat(child.pid()).state != 'Z'; ++i) std::this_thread::sleep_for(5ms);
  EXPECT_ERROR(read_live(child.pid()), Errc::Config, "no ds-train");  // it has not been waited for yet
  EXPECT_FALSE(exists(child.pid()));

  Child other(show);
  EXPECT_NE(find(find_live(), other.pid()), nullptr);
  other.kill();
  other.reap();
  EXPECT_EQ(find(find_live(), other.pid()), nullptr);
  EXPECT_FALSE(exists(other.pid()));
}

TEST(LiveCounters, WhatAKilledProcessLeftGoesWithTheNextWriter) {
  Child child(show);
  child.kill();
  child.reap();
  const LiveCounters next(identity(), record_of(1));
  EXPECT_FALSE(exists(child.pid()));
  EXPECT_TRUE(exists(getpid()));
}

TEST(LiveCounters, ANumberThatCameAgainIsAnotherProcess) {
  const Child alive([] {});
  const auto s = segment(alive.pid());
  {
    const Planted planted(alive.pid(), s.get(), sizeof *s);
    EXPECT_EQ(read_live(alive.pid()).step, 1);
  }
  const Planted planted(alive.pid(), s.get(), sizeof *s, Planted::HasEnded);
  EXPECT_ERROR(read_live(alive.pid()), Errc::Config, "no ds-train");
  EXPECT_FALSE(exists(alive.pid()));
}

TEST(LiveCounters, ProcessesOfOtherNamespacesAreLeftAlone) {
  const auto s = segment(kNobody);  // no such process here
  const Planted planted(kNobody, s.get(), sizeof *s);
  remove_abandoned();
  EXPECT_TRUE(exists(kNobody));
}

TEST(LiveCounters, WhatIsNotOfThisVersionIsRefusedAndStays) {
  const Child alive([] {});
  const i64 pid = alive.pid();
  const auto refused = [&](const LiveSegment& s, size_t bytes, const char* part) {
    const Planted planted(pid, &s, bytes);
    EXPECT_ERROR(read_live(pid), Errc::Mismatch, part);
    EXPECT_EQ(find(find_live(), pid), nullptr);
    EXPECT_TRUE(exists(pid)) << part;
  };
  auto s = segment(pid);
  s->header.magic ^= 1;
  refused(*s, sizeof *s, "is not what a ds-train");
  s = segment(pid);
  s->header.version += 1;
  refused(*s, sizeof *s, "of another version of ds-train: 4, this one reads 3");
  refused(*s, sizeof *s - 64, "of another version of ds-train");  // whatever its size
  s = segment(pid);
  refused(*s, sizeof *s - 8, "bytes, not");
  s->header.bytes += 8;
  refused(*s, sizeof *s, "is not what a ds-train");
  s = segment(pid);
  s->header.pid = getpid();
  refused(*s, sizeof *s, "is not what a ds-train");
}

TEST(LiveCounters, OfAnotherVersionThatWasKilledIsRemoved) {
  const auto s = segment(kNobody);
  s->header.version += 1;
  const Planted planted(kNobody, s.get(), sizeof *s - 64, Planted::HasEnded);
  remove_abandoned();
  EXPECT_FALSE(exists(kNobody));
}

TEST(LiveCounters, NamesOfOthersAreNotTouched) {
  const std::string number = std::to_string(kNobody), stem = "/dev/shm/ds-train.";
  const std::string names[] = {stem + number + "x", stem + "-" + number, stem + "00" + number, stem + number + ".1"};
  const auto s = segment(kNobody);
  for (const std::string& name : names) {
    testing::write_file(name, {reinterpret_cast<const char*>(s.get()), sizeof *s});
    chmod(name.c_str(), 0600);
  }
  remove_abandoned();
  for (const std::string& name : names) {
    EXPECT_EQ(access(name.c_str(), F_OK), 0) << name;
    unlink(name.c_str());
  }
}

TEST(LiveCounters, WhatOthersMayHavePutThereIsNotRead) {
  const auto s = segment(kNobody);
  {
    const Planted planted(kNobody, s.get(), sizeof *s, Planted::HasEnded);
    ASSERT_EQ(chmod(path_of(kNobody).c_str(), 0644), 0);
    EXPECT_ERROR(read_live(kNobody), Errc::Io, "open to others");
    remove_abandoned();
    EXPECT_TRUE(exists(kNobody));
  }
  ASSERT_EQ(mkfifo(path_of(kNobody).c_str(), 0600), 0);  // opening it would wait
  EXPECT_ERROR(read_live(kNobody), Errc::Io, "refused");
  remove_abandoned();
  EXPECT_EQ(find(find_live(), kNobody), nullptr);
  unlink(path_of(kNobody).c_str());

  if (geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  const Planted planted(kNobody, s.get(), sizeof *s, Planted::HasEnded);
  ASSERT_EQ(chown(path_of(kNobody).c_str(), 65534, 65534), 0);
  EXPECT_ERROR(read_live(kNobody), Errc::Io, "another user");
  remove_abandoned();
  EXPECT_TRUE(exists(kNobody));
}

TEST(LiveCounters, JobsComeOneAfterTheOther) {
  std::vector<std::unique_ptr<Child>> children;
  const std::pair<const char*, int> order[] = {{"b", 1}, {"a", 0}, {"b", 0}, {"a", 10}, {"a", 2}};
  for (const auto& [job, rank] : order) {
    children.push_back(std::make_unique<Child>([job = job, rank = rank] {
      LiveIdentity who = identity();
      run::copy_text(who.job, job);
      who.rank = rank;
      new LiveCounters(who, record_of(1));
    }));
  }
  std::vector<std::pair<std::string, int>> found;
  for (const LiveRank& r : find_live()) {
    if (std::ranges::any_of(children, [&](const auto& c) { return c->pid() == r.pid; }))
      found.emplace_back(r.job, r.rank);
  }
  const std::vector<std::pair<std::string, int>> want = {{"a", 0}, {"a", 2}, {"a", 10}, {"b", 0}, {"b", 1}};
  EXPECT_EQ(found, want);
  for (const auto& c : children) {
    c->kill();
    c->reap();
  }
  remove_abandoned();
  for (const auto& c : children) EXPECT_FALSE(exists(c->pid()));
}

}  // namespace memreport_live_test
}  // namespace ds::memreport
