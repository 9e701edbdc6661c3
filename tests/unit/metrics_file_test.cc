// SPDX-License-Identifier: Apache-2.0
// metrics.jsonl read back: whole, still being written, of several starts, and damaged.
#include "memreport/metrics_file.h"

#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <random>

#include "cpu_time.h"
#include "fuzz/rounds.h"
#include "run/run_record.h"
#include "temp_directory.h"

namespace ds::memreport {
namespace metrics_file_test {

using testing::TempDirectory;
using testing::write_file;

std::string run_line(i64 step, const char* start) {
  return fmt::format(
      R"({{"type":"run","step":{},"version":"0.1.0","world_size":4,"mesh":{{"pp":2,"dp":2,"sp":1,"tp":1}},)"
      R"("device":"cpu","device_name":"cpu.avx2","backend":"shm","host":"here","start":"{}","peak_flops":2.5e9,)"
      R"("stages":[{{"ranks":[0,1],"predicted_bytes":{{"params":100,"data":7}}}},)"
      R"({{"ranks":[2,3],"predicted_bytes":{{"params":90}}}}],"config":{{"steps":12}},"model":{{"model_type":"gpt2"}}}})"
      "\n",
      step, start);
}

// As a run writes it.
std::string step_line(i64 step, double ms, double loss = 2.5) {
  StepRecord r{.step = step, .loss = loss, .tokens = 256, .step_ms = ms, .tokens_per_s = 256e3 / ms, .mfu = 0.5};
  r.memory_bytes = {{"data", 7}, {"params", 100}, {"scratch", 11}};
  r.comm_bytes = {{"dp.reduce_scatter", 1000}};
  return run::step_line(r).dump() + "\n";
}

std::string memory_line(i64 step) {
  std::string ranks;
  for (int r = 0; r < 4; ++r) {
    ranks +=
        fmt::format(R"({}{{"rank":{},"counted_bytes":{{"scratch":{},"params":{}}},"predicted_bytes":{{"params":{}}},)"
                    R"("resident_bytes":{},"momentary_bytes":60,"base_bytes":500}})",
                    r == 0 ? "" : ",", r, 20 + r, 100 - r, 100 - r, 1000 + r);
  }
  return fmt::format(R"({{"type":"memory","step":{},"ranks":[{}]}})", step, ranks) + "\n";
}

const char* const kEvent = R"({"type":"event","event":"saved","step":2,"checkpoint":"run/step-00000002"})"
                           "\n";

class MetricsFileTest : public ::testing::Test {
 protected:
  MetricsFile read(const std::string& text, i64 window = 100) {
    write_file(dir_ / "metrics.jsonl", text);
    return read_metrics(dir_.path(), window);
  }
  TempDirectory dir_;
};

TEST_F(MetricsFileTest, AWholeRun) {
  const MetricsFile f = read(run_line(0, "then") + step_line(1, 40) + step_line(2, 10) + kEvent +
                             R"({"type":"eval","step":2,"val_loss":2.25})"
                             "\n" +
                             step_line(3, 10, 2.25) + memory_line(3));
  EXPECT_EQ(f.path, dir_ / "metrics.jsonl");
  EXPECT_EQ(f.runs, 1);
  EXPECT_EQ(f.version, "0.1.0");
  EXPECT_EQ(f.device, "cpu");
  EXPECT_EQ(f.device_name, "cpu.avx2");
  EXPECT_EQ(f.backend, "shm");
  EXPECT_EQ(f.host, "here");
  EXPECT_EQ(f.start, "then");
  EXPECT_EQ(f.world_size, 4);
  EXPECT_EQ(f.mesh, (MeshShape{.dp = 2, .pp = 2}));
  EXPECT_EQ(f.peak_flops, 2.5e9);
  EXPECT_EQ(f.config_json, R"({"steps":12})");
  EXPECT_EQ(f.model_json, R"({"model_type":"gpt2"})");
  EXPECT_EQ(f.first_step, 0);
  EXPECT_EQ(f.last_step, 3);
  EXPECT_TRUE(f.ended);
  EXPECT_EQ(f.speed.steps, 3);
  EXPECT_DOUBLE_EQ(f.speed.mean_step_ms, 20);
  EXPECT_DOUBLE_EQ(f.speed.median_step_ms, 10);
  EXPECT_DOUBLE_EQ(f.speed.tokens_per_s, 3 * 256 / 0.060);
  EXPECT_DOUBLE_EQ(f.speed.mfu, 0.5);
  EXPECT_EQ(f.speed.loss, 2.25);
  ASSERT_EQ(f.ranks.size(), 4U);
  const RankMemory& r = f.ranks[2];
  EXPECT_EQ(r.rank, 2);
  EXPECT_TRUE(r.counts_known);
  EXPECT_EQ(r.resident_bytes, 1002);
  EXPECT_EQ(r.momentary_bytes, 60);
  EXPECT_EQ(r.base_bytes, 500);
  ASSERT_EQ(r.tags.size(), 2U);
  EXPECT_EQ(r.tags[0].tag, "params");
  EXPECT_EQ(r.tags[0].predicted, 98);
  EXPECT_EQ(r.tags[0].counted, 98);
  EXPECT_EQ(r.tags[1].tag, "scratch");
  EXPECT_EQ(r.tags[1].predicted, 0);
  EXPECT_EQ(r.tags[1].counted, 22);
}

TEST_F(MetricsFileTest, ARunThatGoesOnHasPredictionsAndTheCountsOfRankZero) {
  const MetricsFile f = read(run_line(0, "now") + step_line(1, 40) + step_line(2, 10));
  EXPECT_FALSE(f.ended);
  ASSERT_EQ(f.ranks.size(), 4U);
  EXPECT_TRUE(f.ranks[0].counts_known);
  ASSERT_EQ(f.ranks[0].tags.size(), 3U);
  EXPECT_EQ(f.ranks[0].tags[1].tag, "data");
  EXPECT_EQ(f.ranks[0].tags[1].predicted, 7);
  EXPECT_EQ(f.ranks[0].tags[1].counted, 7);
  EXPECT_FALSE(f.ranks[3].counts_known);
  EXPECT_EQ(f.ranks[3].tags.at(0).predicted, 90);
  EXPECT_EQ(f.ranks[3].resident_bytes, 0);
}

TEST_F(MetricsFileTest, TheLastStartCounts) {
  const MetricsFile f = read(run_line(0, "first") + step_line(1, 4000) + memory_line(1) + run_line(1, "second") +
                             R"({"type":"event","event":"resumed","step":1,"from":"run/step-00000001"})"
                             "\n" +
                             step_line(2, 10));
  EXPECT_EQ(f.runs, 2);
  EXPECT_EQ(f.start, "second");
  EXPECT_EQ(f.first_step, 1);
  EXPECT_EQ(f.last_step, 2);
  EXPECT_FALSE(f.ended);  // the first one has
  EXPECT_EQ(f.speed.steps, 1);
  EXPECT_DOUBLE_EQ(f.speed.mean_step_ms, 10);
  EXPECT_EQ(f.ranks[1].resident_bytes, 0);
  // A run that has not taken a step yet.
  const MetricsFile begun = read(run_line(0, "first") + step_line(1, 4000) + memory_line(1) + run_line(1, "second"));
  EXPECT_EQ(begun.last_step, 1);
  EXPECT_EQ(begun.speed.steps, 0);
  EXPECT_EQ(begun.speed.median_step_ms, 0);
  EXPECT_FALSE(begun.ranks.at(0).counts_known);
}

// A run of very many ranks.
TEST_F(MetricsFileTest, ManyRanksTakeTimeByTheirNumber) {
  constexpr int kRanks = 50'000;
  std::string numbers, memory;
  for (int r = 0; r < kRanks; ++r) {
    numbers += fmt::format("{}{}", r > 0 ? "," : "", r);
    memory += fmt::format(R"({}{{"rank":{},"counted_bytes":{{"params":9}},"predicted_bytes":{{"params":9}},)"
                          R"("resident_bytes":1,"momentary_bytes":0,"base_bytes":0}})",
                          r > 0 ? "," : "", r);
  }
  std::string run = run_line(0, "now");
  const auto put = [&](std::string_view from, const std::string& to) { run.replace(run.find(from), from.size(), to); };
  put(R"("world_size":4,"mesh":{"pp":2,"dp":2)",
      fmt::format(R"("world_size":{},"mesh":{{"pp":1,"dp":{})", kRanks, kRanks));
  put("[0,1]", fmt::format("[{}]", numbers));
  put("[2,3]", "[]");
  MetricsFile f;
  const double seconds = testing::cpu_seconds_of([&] {
    f = read(run + step_line(1, 40) + fmt::format(R"({{"type":"memory","step":1,"ranks":[{}]}})", memory) + "\n");
  });
  EXPECT_EQ(f.ranks.size(), size_t{kRanks});
  EXPECT_LT(seconds, 20);
}

TEST_F(MetricsFileTest, RefusesMoreKindsOfMemoryThanThereAre) {
  std::string tags;
  for (int i = 0; i < 200; ++i) tags += fmt::format(R"("t{}":1,)", i);
  std::string run = run_line(0, "now");
  run.insert(run.find(R"("params":100)"), tags);
  EXPECT_ERROR(read(run), Errc::Corrupt, "has 202 kinds of memory");
}

TEST_F(MetricsFileTest, SpeedIsOfTheLastSteps) {
  std::string text = run_line(0, "now");
  for (i64 s = 1; s <= 50; ++s) text += step_line(s, s <= 46 ? 1000 : static_cast<double>(s));
  const MetricsFile f = read(text, 4);
  EXPECT_EQ(f.speed.steps, 4);
  EXPECT_DOUBLE_EQ(f.speed.median_step_ms, 48.5);
  EXPECT_DOUBLE_EQ(f.speed.mean_step_ms, 48.5);
  EXPECT_EQ(f.last_step, 50);
}

TEST_F(MetricsFileTest, FilesFromBeforeThereWereRunLines) {
  const MetricsFile f = read(step_line(1, 40) + step_line(2, 10));
  EXPECT_EQ(f.runs, 0);
  EXPECT_EQ(f.world_size, 0);
  EXPECT_EQ(f.config_json, "");
  EXPECT_EQ(f.speed.steps, 2);
  ASSERT_EQ(f.ranks.size(), 1U);
  EXPECT_EQ(f.ranks[0].tags.size(), 3U);
  EXPECT_EQ(read("").speed.steps, 0);
  EXPECT_TRUE(read("\n\n").ranks.empty());
}

TEST_F(MetricsFileTest, UnknownTypesAndKeysArePassedOver) {
  const MetricsFile f = read(R"({"type":"weather","step":"rain"})"
                             "\n" +
                             step_line(1, 10) + R"({"type":"event","event":"new","what":[1,2]})" + "\r\n");
  EXPECT_EQ(f.speed.steps, 1);
}

TEST_F(MetricsFileTest, ALossThatIsNotFiniteIsNaN) {
  const MetricsFile f = read(step_line(1, 10, std::numeric_limits<double>::infinity()));
  EXPECT_TRUE(std::isnan(f.speed.loss));
}

TEST_F(MetricsFileTest, MistakesAreToldWithTheirPlace) {
  const std::string good = run_line(0, "now") + step_line(1, 10), at = dir_ / "metrics.jsonl" + ":3: ";
  const auto wrong = [&](const std::string& line, const std::string& part) {
    EXPECT_ERROR(read(good + line + "\n" + step_line(2, 10)), Errc::Corrupt, part);
  };
  wrong(R"({"type":"step","st)", ":3:19: ");
  wrong("no line", ":3:");
  wrong("[1]", at + "not an object");
  wrong("{}", at + R"(there is no "type")");
  wrong(R"({"type":7})", at + R"("type" is not a text)");
  wrong(R"({"type":"step"})", at + R"(there is no "step")");
  wrong(R"({"type":"step","step":-1})", at + R"("step" is not a whole number)");
  wrong(R"({"type":"step","step":1e99})", at + R"("step" is not a whole number)");
  wrong(R"({"type":"step","step":18446744073709551615})", at + R"("step" is not a whole number)");
  wrong(R"({"type":"step","step":2,"step_ms":null})", at + R"("step_ms" is not a duration)");
  wrong(R"({"type":"step","step":2,"step_ms":-1})", at + R"("step_ms" is not a duration)");
  wrong(R"({"type":"memory","ranks":{}})", at + R"("ranks" is not a list)");
  wrong(R"({"type":"memory","ranks":[{"rank":0},{"rank":"b"}]})", at + R"(ranks[0]: there is no "counted_bytes")");
  std::string mesh = run_line(0, "now");
  mesh.replace(mesh.find(R"("pp":2)"), 6, R"("pp":7)");
  wrong(mesh.substr(0, mesh.size() - 1), at + "a mesh of 14 ranks in a world of 4");
  wrong(R"({"type":)" + std::string(100000, '[') + "}", "nested deeper");
  EXPECT_ERROR(read_metrics(dir_ / "none"), Errc::Io, "none");
  std::filesystem::remove(dir_ / "metrics.jsonl");
  EXPECT_ERROR(read_metrics(dir_.path()), Errc::Io, "metrics.jsonl");
}

// A reader of a run that is writing may see the last line cut anywhere.
TEST_F(MetricsFileTest, AFileThatEndsAnywhereIsReadUpToThere) {
  const std::string text = run_line(0, "now") + step_line(1, 40) + step_line(2, 10) + kEvent + step_line(3, 10) +
                           memory_line(3) + run_line(3, "later") + step_line(4, 10);
  i64 last = 0;
  for (size_t end = 0; end <= text.size(); ++end) {
    const bool near_an_end = text.substr(end < 2 ? 0 : end - 2, 5).find('\n') != text.npos;
    if (!near_an_end && end % 5 != 0) continue;
    const MetricsFile f = read(text.substr(0, end));
    ASSERT_GE(f.last_step, last) << end;
    last = f.last_step;
  }
  EXPECT_EQ(last, 4);
  // The end of the line alone is missing: it is whole.
  EXPECT_EQ(read(text.substr(0, text.size() - 1)).last_step, 4);
  EXPECT_EQ(read(text.substr(0, text.size() - 2)).last_step, 3);
}

TEST_F(MetricsFileTest, DamageIsReadOrRefused) {
  const std::string good = run_line(0, "now") + step_line(1, 40) + step_line(2, 10) + memory_line(2);
  const std::string tokens[] = {"{",    "}",  "[",     "]",           ",",  "\"", "\n",
                                "null", "-1", "1e300", "99999999999", "{}", "[]", std::string(1, '\0'),
                                "\xff"};
  std::mt19937 rng(17);
  int read_whole = 0, refused = 0;
  for (int i = 0; i < testing::rounds(1000); ++i) {
    std::string text = good;
    for (auto n = 1 + rng() % 3; n > 0; --n) {
      const size_t at = rng() % text.size(), length = rng() % 30;
      switch (rng() % 4) {
        case 0: text[at] = static_cast<char>(rng()); break;
        case 1: text.erase(at, length); break;
        case 2: text.insert(at, tokens[rng() % std::size(tokens)]); break;
        default: text.replace(at, length, tokens[rng() % std::size(tokens)]);
      }
      if (text.empty()) text = "\n";
    }
    try {
      const MetricsFile f = read(text);
      ASSERT_GE(f.speed.median_step_ms, 0);
      for (const RankMemory& r : f.ranks) {
        for (const TagMemory& m : r.tags) ASSERT_TRUE(m.predicted >= 0 && m.counted >= 0);
      }
      ++read_whole;
    } catch (const Error& e) {
      ASSERT_EQ(e.code(), Errc::Corrupt) << e.what();
      ASSERT_NE(std::string(e.what()).find("metrics.jsonl:"), std::string::npos) << e.what();
      ++refused;
    }
  }
  EXPECT_GT(read_whole, 0);
  EXPECT_GT(refused, 0);
}

}  // namespace metrics_file_test
}  // namespace ds::memreport
