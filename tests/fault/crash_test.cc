// SPDX-License-Identifier: Apache-2.0
// A run of two ranks is broken at each of its changes to files in turn (crash_shim.c): processes die, the power fails,
// calls fail. Whatever the moment, its newest committed step exists, verifies, and is the state of an unbroken run at
// that step. The next run resumes from it and reaches the same end.
//
// An ordinary run tries some moments of each kind, DS_SLOW=1 all of them, or every DS_SLOW-th.

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <set>
#include <sstream>

#include "../temp_directory.h"
#include "base/file.h"
#include "base/json.h"
#include "checkpoint/manifest.h"
#include "slow_set.h"

namespace ds {
namespace crash_test {

namespace fs = std::filesystem;
using testing::read_file;
using testing::TempDirectory;
using testing::write_file;

constexpr i64 kBefore = 2, kEnd = 4;  // committed before the broken run; its last step
constexpr int kShared = 64;           // bytes at the start of the log

struct Call {
  int rank, number;
  std::string what;
  u64 inode;
  i64 size;
  std::string path, other;
};

struct Broken {
  int status = 0;  // exit status
  std::string errors;
  std::vector<Call> calls;
  std::map<u64, i64> sizes{};  // of its files before, by inode
  bool refused(std::string_view what) const {
    return std::any_of(calls.begin(), calls.end(),
                       [&](const Call& c) { return c.other == "refused" && c.what == what; });
  }
};

// The folder of all runs: their configuration, the step that they start from, the state that they must reach.
class Place {
 public:
  Place() {
    write_file(dir_ / "cfg.json", R"({
      "model": {"type": "gpt2", "vocab_size": 256, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2},
      "data": {"train": "text.txt", "seq_length": 16}, "eval": {"batches": 1},
      "train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "threads": 1,
      "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
      "zero_optimization": {"stage": 2}, "reduce_order": "micro", "bf16": {"enabled": true}, "steps": 5})");
    std::string text;
    for (int i = 0; i < 400; ++i) text += fmt::format("line {} of a text to train on\n", i * i);
    write_file(dir_ / "text.txt", text);
    run("ds-launch -n 2 ds-train cfg.json --out pristine --steps 2");
    run("ds-train cfg.json --out whole --set save.every=1");
    for (i64 step = 1; step <= kEnd + 1; ++step) states_[step] = merged("whole/" + step_name(step));
  }
  std::string operator/(const std::string& name) const { return dir_ / name; }

  // The exit status of a command; its messages are in errors().
  int run(const std::string& command) {
    const std::string line = fmt::format("cd '{}' && PATH='{}':$PATH CUDA_VISIBLE_DEVICES= {} >out 2>errors",
                                         dir_.path(), DS_BIN_DIR, command);
    const int status = std::system(line.c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  std::string errors() const { return read_file(dir_ / "errors"); }

  // The elements of the merged state, without the header, which describes the run's configuration too.
  std::string elements() const {
    const std::string file = read_file(dir_ / "state.safetensors");
    u64 header = 0;
    std::memcpy(&header, file.data(), std::min(sizeof header, file.size()));
    return file.substr(std::min(sizeof header + header, file.size()));
  }
  // Every state of a step, checked and whole, as bytes.
  std::string merged(const std::string& step) {
    EXPECT_EQ(run("ds-ckpt-merge " + step + " -o state.safetensors --optimizer --verify"), 0) << errors();
    return elements();
  }
  const std::string& state(i64 step) const { return states_.at(step); }

  // From the pristine step to kEnd, with this shim.
  Broken break_run(const std::string& shim, const std::string& options) {
    fs::remove_all(dir_ / "run");
    for (const auto& e : fs::directory_iterator(dir_.path())) {
      if (e.path().filename().string().starts_with("log")) fs::remove(e.path());
    }
    fs::copy(dir_ / "pristine", dir_ / "run", fs::copy_options::recursive);
    write_file(dir_ / "log", std::string(kShared, '\0'));
    Broken b;
    for (const auto& e : fs::recursive_directory_iterator(dir_ / "run")) {
      struct stat st;
      if (::lstat(e.path().c_str(), &st) == 0 && S_ISREG(st.st_mode)) b.sizes[st.st_ino] = st.st_size;
    }
    b.status =
        run(fmt::format("ds-launch -n 2 env LD_PRELOAD={} DS_CRASH_DIR={}/run DS_CRASH_LOG={}/log {} ds-train "
                        "cfg.json --out run --resume latest --steps {} --set save.every=1 --set save.keep=1 {}",
                        DS_CRASH_SHIM, fs::canonical(dir_.path()).string(), dir_.path(), shim, kEnd, options));
    b.errors = errors();
    std::istringstream log(read_file(dir_ / "log").substr(kShared));
    for (std::string line; std::getline(log, line);) {
      Call c{};
      std::istringstream words(line);
      words >> c.rank >> c.number >> c.what >> c.inode >> c.size >> std::ws;
      std::getline(words, c.path, '\t');
      std::getline(words, c.other);
      b.calls.push_back(std::move(c));
    }
    return b;
  }

 private:
  TempDirectory dir_;
  std::map<i64, std::string> states_;
};

Place& place() {
  static Place p;
  return p;
}

std::set<std::string> temporaries(const std::string& dir) {
  std::set<std::string> names;
  for (const auto& e : fs::directory_iterator(dir)) {
    if (e.path().filename().string().starts_with(".")) names.insert(e.path().filename().string());
  }
  return names;
}

// The newest step that is saved according to the run's own record.
i64 recorded_step(const std::string& run) {
  i64 step = kBefore;
  std::istringstream lines(read_file(run + "/metrics.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    const Json j = Json::parse(line, nullptr, false);
    if (j.is_object() && j.value("event", "") == "saved") step = std::max(step, j.at("step").get<i64>());
  }
  return step;
}

// The newest step verifies, is `least` or later, and holds the unbroken run's state; the run resumes from it.
void expect_whole(i64 least) {
  Place& p = place();
  ASSERT_EQ(p.run("ds-ckpt-merge run -o state.safetensors --optimizer --verify --json"), 0) << p.errors();
  const i64 step = Json::parse(read_file(p / "out")).at("step");
  ASSERT_GE(step, least);
  ASSERT_LE(step, kEnd);
  ASSERT_TRUE(p.elements() == p.state(step)) << "of step " << step;

  ASSERT_EQ(p.run(fmt::format("ds-train cfg.json --out run --resume latest --steps {} --set save.keep=1", kEnd + 1)), 0)
      << p.errors();
  ASSERT_NE(read_file(p / "run/metrics.jsonl").find(fmt::format(R"("from":"run/{}")", step_name(step))),
            std::string::npos);
  ASSERT_TRUE(p.merged("run") == p.state(kEnd + 1));
  ASSERT_EQ(temporaries(p / "run"), std::set<std::string>{});
}

// ---- what a power failure takes

// Files end where they ended when they were last synced; with `names`, names that no sync of their directory has
// followed are as they were before.
void lose_what_was_not_synced(const std::string& run, const Broken& b, bool names) {
  std::map<u64, i64> kept = b.sizes;
  std::set<u64> dirty;
  for (const Call& c : b.calls) {
    if (c.other == "refused") continue;
    if (c.what == "write") dirty.insert(c.inode);
    if (c.what == "create" && !kept.contains(c.inode)) kept[c.inode] = 0;
    if (c.what == "sync") {
      kept[c.inode] = c.size;
      dirty.erase(c.inode);
    }
  }
  for (const auto& e : fs::recursive_directory_iterator(run)) {
    struct stat st;
    if (::lstat(e.path().c_str(), &st) != 0 || !S_ISREG(st.st_mode) || !dirty.contains(st.st_ino)) continue;
    ASSERT_EQ(::truncate(e.path().c_str(), kept[st.st_ino]), 0) << e.path();
  }
  if (!names) return;

  std::set<std::string> synced;                            // directories, by a later call
  std::vector<std::pair<std::string, std::string>> moved;  // by later calls that stay: from, to
  for (auto c = b.calls.rbegin(); c != b.calls.rend(); ++c) {
    if (c->other == "refused") continue;
    const auto now = [&](std::string path) {
      for (auto m = moved.rbegin(); m != moved.rend(); ++m) {
        if (path == m->first || path.starts_with(m->first + "/")) path = m->second + path.substr(m->first.size());
      }
      return path;
    };
    const bool renames = c->what == "rename" || c->what == "exchange";
    if (c->what == "sync") synced.insert(c->path);
    if (synced.contains(parent_directory(renames ? c->other : c->path))) {
      if (renames) moved.emplace_back(c->path, c->other);
    } else if (c->what == "create") {
      fs::remove_all(now(c->path));
    } else if (c->what == "exchange") {
      ASSERT_EQ(::renameat2(AT_FDCWD, now(c->path).c_str(), AT_FDCWD, now(c->other).c_str(), RENAME_EXCHANGE), 0)
          << "the step that was there before went before the new one was sure to be: " << std::strerror(errno);
    } else if (c->what == "rename") {
      std::error_code gone;  // what was renamed may have been removed since
      fs::rename(now(c->other), now(c->path), gone);
      const std::string replaced = fmt::format("{}.{}.{}", run.substr(0, run.rfind('/')) + "/log", c->rank, c->number);
      if (fs::exists(replaced)) fs::copy_file(replaced, now(c->other));
    }
  }
}

// ---- the cases

constexpr int kAll = -1;
struct Case {
  const char* name;
  const char* shim;  // how it breaks what
  int rank;          // that is broken, or kAll
  const char* options;
  const char* words = nullptr;  // of the system, where calls fail
  bool power = false;
};

constexpr const char* kNoSpace = "No space left on device";
constexpr const char* kBroken = "Input/output error";
const Case kCases[] = {
    {"KillOneRank", "DS_CRASH_MODE=kill", 0, ""},
    {"KillOneRankAsync", "DS_CRASH_MODE=kill", 0, "--set save.async=true"},
    {"KillTheOtherRankAsync", "DS_CRASH_MODE=kill", 1, "--set save.async=true"},
    {"Power", "DS_CRASH_MODE=power", kAll, "", nullptr, true},
    {"PowerAsync", "DS_CRASH_MODE=power", kAll, "--set save.async=true", nullptr, true},
    {"NoSpaceOnce", "DS_CRASH_MODE=once DS_CRASH_ERRNO=28", 1, "", kNoSpace},
    {"ErrorOnceAsync", "DS_CRASH_MODE=once DS_CRASH_ERRNO=5", 0, "--set save.async=true", kBroken},
    {"ErrorOnceEverywhere", "DS_CRASH_MODE=once DS_CRASH_ERRNO=5", kAll, "", kBroken},
    {"ErrorOnceContinue", "DS_CRASH_MODE=once DS_CRASH_ERRNO=5", 1, "--set save.on_error=continue", kBroken},
    {"FullDisk", "DS_CRASH_MODE=full DS_CRASH_ERRNO=28", 0, "", kNoSpace},
    {"FullDiskContinue", "DS_CRASH_MODE=full DS_CRASH_ERRNO=28", kAll,
     "--set save.async=true --set save.on_error=continue", kNoSpace},
    {"QuotaOfOneRankContinue", "DS_CRASH_MODE=full DS_CRASH_ERRNO=122", 1,
     "--set save.async=true --set save.on_error=continue", "Disk quota exceeded"},
    {"DeadDiskAsync", "DS_CRASH_MODE=sticky DS_CRASH_ERRNO=5", 0, "--set save.async=true", kBroken},
    {"ShortWrites", "DS_CRASH_MODE=short", kAll, ""},
};

// The newest step whose name, and that of latest after it, a power failure cannot take.
i64 durable_step(const std::string& run, const std::vector<Call>& calls) {
  i64 named = kBefore, latest = kBefore, durable = kBefore;
  for (const Call& c : calls) {
    if (c.other == "refused") continue;
    if (c.what == "rename" && c.other.starts_with(run + "/step-"))
      named = *parse_step_name(c.other.substr(run.size() + 1));
    if (c.what == "rename" && c.other == run + "/latest") latest = named;
    if (c.what == "sync" && c.path == run) durable = latest;
  }
  return durable;
}

// Each rank reports the file and the reason, not one alone.
void expect_said_by_all(const Broken& b, const char* words) {
  bool save_alone = true;
  for (const Call& c : b.calls) save_alone &= c.other != "refused" || c.path.find("/.tmp-step-") != c.path.npos;
  if (!save_alone) {  // the metrics or the lock, which are rank 0's
    EXPECT_NE(b.errors.find(words), std::string::npos) << b.errors;
    return;
  }
  for (const char* rank : {"ds-train: error: ", "ds-train[1]: error: "}) {
    const size_t at = b.errors.find(rank);
    ASSERT_NE(at, std::string::npos) << b.errors;
    const std::string line = b.errors.substr(at, b.errors.find('\n', at) - at);
    EXPECT_NE(line.find(words), std::string::npos) << line;
    EXPECT_NE(line.find("run/"), std::string::npos) << line;
  }
}

// True: the fault came to pass. `names`: a power failure takes names too.
bool try_call(const Case& c, i64 call, bool names) {
  Place& p = place();
  const Broken b = p.break_run(
      fmt::format("{} DS_CRASH_RANK={} DS_CRASH_AT={}", c.shim, c.rank == kAll ? "" : std::to_string(c.rank), call),
      c.options);
  const std::string run = fs::canonical(p / "run").string();
  i64 least = recorded_step(run);
  if (c.words != nullptr) {  // a save that fails takes nothing from under `latest`
    const std::string latest = read_file(run + "/latest");
    EXPECT_TRUE(fs::exists(run + "/" + latest.substr(0, latest.find('\n')))) << latest << b.errors;
  }
  if (b.status == 0) {  // a run that ends well has saved its end, and leaves nothing else
    EXPECT_TRUE(p.merged("run") == p.state(kEnd)) << b.errors;
    least = kEnd;
  } else if (c.words == nullptr) {
    EXPECT_EQ(b.status, 137) << b.errors;  // 128 + SIGKILL
    if (c.power) {
      least = durable_step(run, b.calls);
      lose_what_was_not_synced(run, b, names);
    }
  } else {
    EXPECT_EQ(b.status, 1) << b.errors;
    expect_said_by_all(b, c.words);
  }
  if ((b.status == 0 || c.words != nullptr) && !b.refused("remove")) {
    EXPECT_EQ(temporaries(run), std::set<std::string>{}) << b.errors;
  }
  expect_whole(least);
  return b.status != 0 || std::any_of(b.calls.begin(), b.calls.end(),
                                      [](const Call& x) { return x.other == "refused" || x.what == "short"; });
}

class Crash : public ::testing::TestWithParam<size_t> {};

TEST_P(Crash, TheNewestCommittedStepIsThereAndTheRunGoesOn) {
  const Case& c = kCases[GetParam()];
  const Broken untouched = place().break_run("DS_CRASH_AT=0", c.options);
  ASSERT_EQ(untouched.status, 0) << untouched.errors;
  i64 last = c.power ? narrow<i64>(untouched.calls.size()) : 0;
  for (const Call& call : untouched.calls) {
    if (!c.power && (c.rank == kAll || c.rank == call.rank)) last = std::max<i64>(last, call.number);
  }
  ASSERT_GT(last, 40);
  const char* slow = std::getenv("DS_SLOW");
  const i64 stride = slow != nullptr ? std::max(std::atoi(slow), 1) : last / 2;
  // The first three calls of rank 0 take the lock. Where not every call is tried, each case begins elsewhere.
  int runs = 0, broken = 0;
  for (i64 call = (c.rank == 1 ? 1 : 4) + narrow<i64>(GetParam()) * 7 % stride; call <= last; call += stride) {
    SCOPED_TRACE(fmt::format("{}: call {} of {}", c.name, call, last));
    ++runs;
    broken += try_call(c, call, runs % 2 == 0) ? 1 : 0;
    ASSERT_FALSE(HasFailure() && slow == nullptr);
  }
  EXPECT_GT(broken, 0);
  std::printf("%s: %d runs, %d of them broken, of %d calls\n", c.name, runs, broken, static_cast<int>(last));
}

INSTANTIATE_TEST_SUITE_P(Cases, Crash, ::testing::Range<size_t>(0, std::size(kCases)),
                         [](const auto& p) { return std::string(kCases[p.param].name); });

}  // namespace crash_test
}  // namespace ds
