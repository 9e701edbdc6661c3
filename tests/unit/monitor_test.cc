// SPDX-License-Identifier: Apache-2.0
// Monitors: their files byte for byte, their messages, and the handling of errors.
#include "monitor/monitor.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <functional>
#include <limits>
#include <set>
#include <sstream>

#include "base/appended_file.h"
#include "base/json.h"
#include "monitor/comms_log.h"
#include "monitor/csv_files.h"
#include "monitor/event_file.h"
#include "monitor/flops_report.h"
#include "monitor/phase_log.h"
#include "monitor/prometheus_file.h"
#include "monitor/scalars.h"
#include "monitor/trace_file.h"
#include "temp_directory.h"

namespace ds::monitor {
namespace monitor_test {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::read_file;
using testing::TempDirectory;
using testing::write_file;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::string golden(const std::string& name) { return read_file(DS_TEST_DATA "/monitor/" + name); }

StepRecord step_record(i64 step, double loss = 2.5) {
  StepRecord r{.step = step, .loss = loss, .grad_norm = 0.5, .lr = 0.003, .tokens = 256, .samples = 8 * step};
  r.step_ms = 20, r.tokens_per_s = 12800, r.mfu = 0.25;
  r.memory_bytes = {{"grads", 50}, {"params", 100}};
  r.comm_bytes = {{"dp.all_gather", 1000}, {"dp.reduce_scatter", 2048}};
  return r;
}

// The files of a directory by name.
std::set<std::string> names_in(const std::string& directory) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) names.insert(entry.path().filename());
  return names;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// The values of RFC 3720, B.4, and of the catalogue of CRCs.
void check_in(const Config& config, const std::string& run_directory) {
  Places places;
  places.run_directory = run_directory;
  Monitors::check(config, places);
}

TEST(EventFile, Crc32c) {
  std::string ascending;
  for (char c = 0; c < 32; ++c) ascending += c;
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c(ascending), 0x46dd794eu);
  EXPECT_EQ(crc32c(std::string(ascending.rbegin(), ascending.rend())), 0x113fdb5cu);
}

TEST(EventFile, RecordsAreThoseOfTensorBoardsWriter) {
  const Scalar scalars[] = {{"Train/Samples/train_loss", 2.5, 8},
                            {"Train/Samples/lr", 0.003, 8},
                            {"train/loss", 0, 0},
                            {"train/grad_norm", kInfinity, 300},
                            {"memory/params", 123456789, (i64{1} << 40) + 5},
                            {"validation/loss", -1e-30, 127}};
  std::string bytes = version_record(1700000000.25);
  double time = 1700000001.5;
  for (const Scalar& s : scalars) bytes += scalar_record(time++, s);
  EXPECT_TRUE(bytes == golden("events.tfrecord"));
}

// The records of an event file; fails where a length or a sum is wrong, or bytes are left.
std::vector<std::string> records_of(std::string_view bytes) {
  const auto number = [&](size_t at, size_t size) {
    u64 n = 0;
    for (size_t i = 0; i < size; ++i) n |= static_cast<u64>(static_cast<u8>(bytes[at + i])) << 8 * i;
    return n;
  };
  const auto masked = [](std::string_view data) {
    const u32 crc = crc32c(data);
    return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
  };
  std::vector<std::string> records;
  while (bytes.size() >= 16) {
    const u64 size = number(0, 8);
    EXPECT_EQ(number(8, 4), masked(bytes.substr(0, 8)));
    if (bytes.size() < 16 + size) break;
    const std::string_view data = bytes.substr(12, size);
    EXPECT_EQ(number(12 + size, 4), masked(data));
    records.emplace_back(data);
    bytes.remove_prefix(16 + size);
  }
  EXPECT_TRUE(bytes.empty());
  return records;
}

TEST(EventFile, EachStartHasOneWithAVersionAndARecordForEachNumber) {
  const TempDirectory dir;
  for (int start = 0; start < 2; ++start) {
    const std::unique_ptr<Monitor> events = make_event_file(dir.path(), start == 1);
    events->step(step_record(1));
    events->validation(1, 3);
  }
  const std::set<std::string> names = names_in(dir.path());
  ASSERT_EQ(names.size(), 2u);
  std::vector<size_t> counts;
  for (const std::string& name : names) {
    EXPECT_THAT(name, ::testing::MatchesRegex(R"(events\.out\.tfevents\.[0-9]{10}\..+\.[0-9]+\.[0-9]+)"));
    const std::vector<std::string> records = records_of(read_file(dir / name));
    EXPECT_THAT(records.front(), HasSubstr("brain.Event:2"));
    EXPECT_THAT(records.back(), HasSubstr("validation/loss"));
    counts.push_back(records.size());
  }
  EXPECT_THAT(counts, ElementsAre(12u, 13u));  // the second has the loss scale
}

TEST(CsvFiles, AreThoseOfPythonsWriter) {
  const TempDirectory dir;
  const std::string file = dir / "Train_Samples_train_loss.csv";
  const double losses[] = {2.5, 0.001, 1e-5, 3, std::numeric_limits<double>::quiet_NaN(), kInfinity, 1e22};
  i64 step = 0;
  {
    const std::unique_ptr<Monitor> csv = make_csv_files(dir.path(), false);
    EXPECT_EQ(read_file(file), "step,train_loss\r\n");
    while (step < 3) ++step, csv->step(step_record(step, losses[step - 1]));
  }
  write_file(file, read_file(file) + "32,3");  // a process was killed there
  const std::unique_ptr<Monitor> csv = make_csv_files(dir.path(), false);
  while (step < 7) ++step, csv->step(step_record(step, losses[step - 1]));
  csv->validation(7, 1.5);
  EXPECT_EQ(read_file(file), golden("Train_Samples_train_loss.csv"));
  EXPECT_EQ(read_file(dir / "validation_loss.csv"), "step,loss\r\n7,1.5\r\n");
  EXPECT_THAT(read_file(dir / "comm_dp.all_gather.csv"), HasSubstr("step,dp.all_gather\r\n1,1000.0\r\n2,1000.0\r\n"));
  EXPECT_THAT(names_in(dir.path()),
              ElementsAre("Train_Samples_lr.csv", "Train_Samples_train_loss.csv", "comm_dp.all_gather.csv",
                          "comm_dp.reduce_scatter.csv", "memory_grads.csv", "memory_params.csv", "train_grad_norm.csv",
                          "train_loss.csv", "train_mfu.csv", "train_tokens_per_s.csv", "validation_loss.csv"));
}

// While it lives, no file grows beyond so many bytes, as on a full disk.
class SmallFiles {
 public:
  explicit SmallFiles(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit small{.rlim_cur = bytes, .rlim_max = before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &small);
    handler_ = std::signal(SIGXFSZ, SIG_IGN);
  }
  ~SmallFiles() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  SmallFiles(const SmallFiles&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int);
};

TEST(AppendedFile, HasTextsWholeOrNotAtAll) {
  const TempDirectory dir;
  {
    AppendedFile file(dir / "small");
    file.append("line\n");
    const SmallFiles limit(8);
    EXPECT_ERROR(file.append("text\n"), Errc::Io, "small: File too large");
  }
  EXPECT_EQ(read_file(dir / "small"), "line\n");
  EXPECT_ERROR(AppendedFile(dir / "none/file"), Errc::Io, "cannot open");
  for (const auto& [torn, whole] : {std::pair<std::string, std::string>{"", ""},
                                    {"a", ""},
                                    {"a\nb", "a\n"},
                                    {"a\n", "a\n"},
                                    {"a\n" + std::string(10'000, 'b'), "a\n"},
                                    {std::string(4096, 'b') + "\n", std::string(4096, 'b') + "\n"},
                                    {std::string(9000, 'b'), ""}}) {
    write_file(dir / "file", torn);
    AppendedFile(dir / "file").cut_torn_line();
    EXPECT_EQ(read_file(dir / "file"), whole);
  }
}

TEST(AppendedFile, IsAFileThatNothingElseShares) {
  const TempDirectory dir;
  write_file(dir / "data", "data");
  fs::create_symlink("data", dir / "link");
  fs::create_symlink("none", dir / "dangling");
  fs::create_hard_link(dir / "data", dir / "second");
  fs::create_directory(dir / "directory");
  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0600), 0);
  EXPECT_ERROR(AppendedFile(dir / "link"), Errc::Io, "link: it is a symbolic link");
  EXPECT_ERROR(AppendedFile(dir / "dangling"), Errc::Io, "dangling: it is a symbolic link");
  EXPECT_ERROR(AppendedFile(dir / "second"), Errc::Io, "second: it has another name as well (hard link)");
  EXPECT_ERROR(AppendedFile(dir / "directory"), Errc::Io, "directory: it is not a regular file");
  EXPECT_ERROR(AppendedFile(dir / "pipe"), Errc::Io, "pipe: it is not a regular file");
  EXPECT_ERROR(AppendedFile("/dev/full"), Errc::Io, "/dev/full: it is not a regular file");
  EXPECT_EQ(read_file(dir / "data"), "data");
  EXPECT_FALSE(fs::exists(dir / "none"));
  EXPECT_FALSE(AppendedFile::create(dir / "link"));
  EXPECT_FALSE(AppendedFile::create(dir / "data"));
  EXPECT_TRUE(AppendedFile::create(dir / "new"));
}

// A strict reader of Prometheus's text format, for input that a textfile collector takes: HELP and TYPE before the
// samples of a metric, which are contiguous; no time stamps; no sample twice.
std::map<std::string, std::string> parse_prometheus(const std::string& text) {
  using ::testing::MatchesRegex;
  const auto help = MatchesRegex("# HELP [a-z_]+ .+");
  const auto type = MatchesRegex("# TYPE [a-z_]+ (gauge|counter)");
  const std::string label = R"re([a-z_]+="([^"\\]|\\["\\n])*")re";
  const auto sample = MatchesRegex(fmt::format(R"re([a-z_]+\{{{0}(,{0})*\}} [^ ]+)re", label));
  const auto number = MatchesRegex(R"([+-]?Inf|NaN|-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?)");
  const auto word = [](const std::string& line, size_t n) {
    std::istringstream words(line);
    std::string w;
    for (size_t i = 0; i <= n; ++i) words >> w;
    return w;
  };
  std::map<std::string, std::string> samples;
  std::set<std::string> metrics;
  std::string helped, typed;
  EXPECT_EQ(text.back(), '\n');
  for (const std::string& line : lines_of(text)) {
    if (::testing::Value(line, help)) {
      helped = word(line, 2);
      EXPECT_TRUE(metrics.insert(helped).second) << line;
    } else if (::testing::Value(line, type)) {
      typed = word(line, 2);
      EXPECT_EQ(typed, helped) << line;
      EXPECT_EQ(word(line, 3) == "counter", typed.ends_with("_total")) << line;
    } else if (::testing::Value(line, sample)) {
      EXPECT_EQ(line.substr(0, line.find('{')), typed) << line;
      const size_t blank = line.rfind(' ');
      const std::string value = line.substr(blank + 1);
      EXPECT_THAT(value, number) << line;
      EXPECT_TRUE(samples.emplace(line.substr(0, blank), value).second) << line;
    } else {
      ADD_FAILURE() << "no line of the text format: " << line;
    }
  }
  return samples;
}

TEST(PrometheusFile, IsOfTheTextFormat) {
  StepRecord r = step_record(10);
  r.grad_norm = kInfinity;
  r.loss = std::numeric_limits<double>::quiet_NaN();
  auto samples = parse_prometheus(prometheus_text(r, 1.25, "a \"job\"\\\n", 1700000000.5));
  const std::string job = R"(job="a \"job\"\\\n")";
  const auto value = [&](const char* name, const std::string& label = {}) {
    return samples.at(fmt::format("{}{{{}{}}}", name, job, label));
  };
  EXPECT_EQ(value("ds_train_steps_total"), "10");
  EXPECT_EQ(value("ds_train_samples_total"), "80");
  EXPECT_EQ(value("ds_train_loss"), "NaN");
  EXPECT_EQ(value("ds_train_grad_norm"), "+Inf");
  EXPECT_EQ(value("ds_train_validation_loss"), "1.25");
  EXPECT_EQ(value("ds_train_step_seconds"), "0.02");
  EXPECT_EQ(value("ds_train_memory_bytes", ",tag=\"params\""), "100");
  EXPECT_EQ(value("ds_train_comm_bytes", ",operation=\"dp.all_gather\""), "1000");
  EXPECT_EQ(value("ds_train_updated_timestamp_seconds"), "1700000000.5");
  EXPECT_EQ(samples.size(), 15u);
  r.comm_bytes.clear();
  samples = parse_prometheus(prometheus_text(r, std::nullopt, "j", 0));
  EXPECT_EQ(samples.size(), 12u);
  r.compression = {{"worker_error", 0.5}, {"momentum", 2}};
  r.outer_grad_norm = 0.25;
  samples = parse_prometheus(prometheus_text(r, std::nullopt, "j", 0));
  EXPECT_EQ(samples.size(), 15u);
  EXPECT_EQ(samples.at("ds_train_compression_norm{job=\"j\",of=\"worker_error\"}"), "0.5");
  EXPECT_EQ(samples.at("ds_train_outer_grad_norm{job=\"j\"}"), "0.25");
  const std::vector<Scalar> scalars = scalars_of(r, false);
  for (const auto& [tag, norm] : {std::pair{"compression/momentum", 2.0}, {"train/outer_grad_norm", 0.25}}) {
    const auto found = std::ranges::find(scalars, tag, &Scalar::tag);
    ASSERT_NE(found, scalars.end()) << tag;
    EXPECT_EQ(found->value, norm);
    EXPECT_EQ(found->at, 10);
  }
}

// A field is reported under one name everywhere, and no other field uses it.
TEST(StepFields, HaveNamesOfTheirOwn) {
  std::set<std::string> names, metrics, curves;
  for (const StepField& f : step_fields()) {
    EXPECT_TRUE(f.name == nullptr || names.insert(f.name).second) << f.name;
    EXPECT_TRUE(f.metric == nullptr || metrics.insert(f.metric).second) << f.metric;
    EXPECT_TRUE(f.curve == nullptr || curves.insert(f.curve).second) << f.curve;
    EXPECT_EQ(f.metric == nullptr, f.help == nullptr);
    EXPECT_TRUE(f.name != nullptr || f.metric != nullptr);
    if (f.curve == nullptr) continue;
    EXPECT_TRUE(std::ranges::any_of(kTagFamilies, [&](const char* family) {
      return std::string_view(f.curve).starts_with(family);
    })) << f.curve;
  }
  // A step without anything that is optional.
  for (const StepField& f : step_fields()) {
    const std::string_view name = f.name == nullptr ? "" : f.name;
    const bool optional =
        name == step_field::kAuxLoss || name == step_field::kSeqLength || name == step_field::kLayerTokens ||
        name == step_field::kPhaseMs || name == step_field::kCompression || name == step_field::kOuterGradNorm ||
        name == step_field::kOffload || name == step_field::kExperts || name == step_field::kExpertTokens;
    EXPECT_EQ(std::holds_alternative<std::monostate>(f.value({})), optional) << name;
  }
}

TEST(PrometheusFile, IsReplacedAtPrintedStepsAndAtTheEnd) {
  const TempDirectory dir;
  const std::string file = dir / "run.prom";
  const std::unique_ptr<Monitor> monitor = make_prometheus_file({.file = file}, 2);
  EXPECT_FALSE(fs::exists(file));
  const auto steps = [&] {
    return parse_prometheus(read_file(file)).at("ds_train_steps_total{job=\"DeepSpeedJobName\"}");
  };
  monitor->step(step_record(1));
  EXPECT_FALSE(fs::exists(file));
  monitor->step(step_record(2));
  EXPECT_EQ(steps(), "2");
  monitor->step(step_record(3));
  EXPECT_EQ(steps(), "2");
  monitor->end();
  EXPECT_EQ(steps(), "3");
  monitor->validation(3, 1.5);
  monitor->end();
  EXPECT_THAT(read_file(file), HasSubstr("ds_train_validation_loss{job=\"DeepSpeedJobName\"} 1.5\n"));
  EXPECT_THAT(names_in(dir.path()), ElementsAre("run.prom"));
}

TEST(PhaseLog, TellsTheMeanSinceTheLastLine) {
  std::vector<std::string> told;
  const std::unique_ptr<Monitor> log = make_phase_log(2, [&](std::string_view text) { told.emplace_back(text); });
  for (i64 step = 1; step <= 5; ++step) {
    StepRecord r = step_record(step);
    const auto x = static_cast<double>(step);
    r.phases = {.forward_ms = x, .backward_ms = 2 * x, .reduce_ms = 0.5, .update_ms = 1};
    log->step(r);
  }
  log->end();
  EXPECT_THAT(
      told, ElementsAre("step 2: time (ms) | forward: 1.50 | backward: 3.00 | reduce: 0.50 | step: 1.00 | all: 20.00",
                        "step 4: time (ms) | forward: 3.50 | backward: 7.00 | reduce: 0.50 | step: 1.00 | all: 20.00"));
}

TEST(CommsLog, SumsOperationsOverTheRun) {
  const auto tell_all = [](const CommsLoggerConfig& config) {
    std::vector<std::string> told;
    const std::unique_ptr<Monitor> log =
        make_comms_log(config, 2, [&](std::string_view text) { told.emplace_back(text); });
    for (i64 step = 1; step <= 3; ++step) {
      StepRecord r = step_record(step);
      r.comm_calls = {{"dp.all_gather", 2}, {"dp.reduce_scatter", 4}};
      r.comm_ms = {{"dp.all_gather", 1.5}};
      log->step(r);
    }
    log->end();
    return told;
  };
  const std::string head = "                     calls           sent    ms in all    ms a call\n";
  const std::string gathers = "  dp.all_gather                     6      2.930 KiB         4.50       0.7500";
  const std::string reductions = "  dp.reduce_scatter                12      6.000 KiB            -            -";
  EXPECT_THAT(tell_all({.enabled = true}),
              ElementsAre("communication of rank 0 in steps 1 to 3\n  operation" + head + gathers + "\n" + reductions));
  EXPECT_THAT(tell_all({.enabled = true, .prof_all = false, .prof_ops = {"all_gather"}}),
              ElementsAre("communication of rank 0 in steps 1 to 3\n  operation" + head + gathers));
  const std::vector<std::string> verbose =
      tell_all({.enabled = true, .verbose = true, .prof_all = false, .prof_ops = {"dp.reduce_scatter"}});
  ASSERT_EQ(verbose.size(), 2u);
  EXPECT_THAT(verbose[0], HasSubstr("in steps 1 to 2\n"));
  EXPECT_THAT(verbose[0], HasSubstr("  dp.reduce_scatter                 8      4.000 KiB"));
  EXPECT_THAT(verbose[1], HasSubstr(reductions));
}

plan::StepWork some_work() {
  plan::StepWork work;
  work.micro_batches = 2;
  work.chunks.resize(1);
  const auto pass = [&](plan::Pass p) -> plan::OpTally& { return work.chunks[0].passes[static_cast<size_t>(p)].ops; };
  pass(plan::Pass::Forward).add({.op = "matmul", .flops = 1'000'000, .bytes = 1024}, 3);
  pass(plan::Pass::BackwardInput).add({.op = "matmul", .flops = 2'000'000, .bytes = 2048}, 3);
  pass(plan::Pass::BackwardWeight).add({.op = "gelu", .bytes = 512});
  work.optimizer.add({.op = "update", .bytes = 4096});
  return work;
}

TEST(FlopsReport, IsWrittenAtItsStep) {
  const TempDirectory dir;
  Config config;
  config.monitors.flops_profiler = {.enabled = true, .profile_step = 2, .output_file = dir / "flops"};
  std::vector<std::string> told;
  const monitor::Run run{.world_size = 4, .num_params = 1234, .work = some_work, .tell = [&](std::string_view text) {
                           told.emplace_back(text);
                         }};
  StepRecord r = step_record(2);
  r.phases = {.forward_ms = 4, .backward_ms = 8, .reduce_ms = 1, .update_ms = 2};
  std::unique_ptr<Monitor> report = make_flops_report(config, run);
  report->step(step_record(1));
  EXPECT_TRUE(names_in(dir.path()).empty());
  report->step(r);
  const std::string text = read_file(dir / "flops");
  const std::vector<std::string> lines = lines_of(text);
  EXPECT_EQ(lines[0], "work of rank 0 of 4 in step 2: 1234 parameters in the model, 256 tokens of all ranks");
  const auto numbers = [&](size_t line) {
    std::string one = lines[line];
    one.erase(std::ranges::unique(one, [](char a, char b) { return a == ' ' && b == ' '; }).begin(), one.end());
    return one;
  };
  EXPECT_EQ(numbers(2), " forward 6 6.000 MFLOP 6.000 KiB 4.00");
  EXPECT_EQ(numbers(3), " backward 8 12.000 MFLOP 13.000 KiB 8.00");
  EXPECT_EQ(numbers(4), " update 1 - 4.000 KiB 2.00");
  EXPECT_EQ(numbers(5), " all 15 18.000 MFLOP 23.000 KiB 20.00");
  EXPECT_EQ(lines[6], "  900.000 MFLOP/s in products; model FLOP/s utilization 25.0 %");
  EXPECT_THAT(text, HasSubstr("\n  backward:\n    gelu "));
  EXPECT_TRUE(told.empty());
  config.monitors.flops_profiler.output_file.clear();
  config.monitors.flops_profiler.detailed = false;
  report = make_flops_report(config, run);
  report->step(r);
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0] + "\n", text.substr(0, text.find("\n  forward:\n") + 1));
}

TEST(TraceFile, HasAProcessForEachRankAndAThreadForEachTrack) {
  Trace trace;
  const Clock::time_point begin = Clock::now(), end = begin + std::chrono::microseconds(250);
  trace.add("step", "early", begin, end);
  trace.start();
  trace.add("step", "forward", begin, end, 1);
  trace.add("messages", "dp.all_gather", begin + std::chrono::microseconds(50), end);
  trace.stop();
  { const TraceSpan late(&trace, "step", "late"); }
  { const TraceSpan none(nullptr, "step", "none"); }
  const std::vector<Trace::Span> spans = trace.spans();
  ASSERT_EQ(spans.size(), 2u);
  const std::string texts[] = {spans_text(spans), spans_text(std::span(spans).subspan(1))};
  const Json file = Json::parse(trace_text(texts));
  EXPECT_EQ(file["traceEvents"].dump(),
            R"([{"ph":"M","name":"process_name","pid":1,"tid":3,"args":{"name":"rank 0"}},)"
            R"({"ph":"M","name":"thread_name","pid":1,"tid":3,"args":{"name":"step"}},)"
            R"({"ph":"X","name":"forward","pid":1,"tid":3,"ts":0.00025,"dur":250.0,"args":{"number":1}},)"
            R"({"ph":"M","name":"thread_name","pid":1,"tid":4,"args":{"name":"messages"}},)"
            R"({"ph":"X","name":"dp.all_gather","pid":1,"tid":4,"ts":50.00025,"dur":200.0},)"
            R"({"ph":"M","name":"process_name","pid":2,"tid":5,"args":{"name":"rank 1"}},)"
            R"({"ph":"M","name":"thread_name","pid":2,"tid":5,"args":{"name":"messages"}},)"
            R"({"ph":"X","name":"dp.all_gather","pid":2,"tid":5,"ts":50.00025,"dur":200.0}])");
}

TEST(Monitors, AreThoseThatTheConfigurationAsksFor) {
  Config config;
  EXPECT_FALSE(Monitors::wants_phases(config, 1));
  config.monitors.flops_profiler.enabled = true;
  EXPECT_TRUE(Monitors::wants_phases(config, 1));
  EXPECT_FALSE(Monitors::wants_phases(config, 2));
  config.monitors.wall_clock_breakdown = true;
  EXPECT_TRUE(Monitors::wants_phases(config, 2));

  const TempDirectory dir;
  config = {};
  check_in(config, "");
  Monitors(config, {}).step(step_record(1));
  config.monitors.tensorboard.enabled = config.monitors.csv_monitor.enabled = true;
  config.monitors.csv_monitor.output_path = dir / "elsewhere/deep";
  config.monitors.csv_monitor.job_name = "mine";
  check_in(config, dir / "run");
  EXPECT_TRUE(names_in(dir.path()).empty());
  Monitors monitors(config, {.directory = dir / "run"});
  monitors.step(step_record(1));
  EXPECT_EQ(names_in(dir / "run/tensorboard/DeepSpeedJobName").size(), 1u);
  EXPECT_EQ(names_in(dir / "elsewhere/deep/mine").size(), 10u);
}

TEST(Monitors, WhatCannotBeWrittenIsKnownBefore) {
  const TempDirectory dir;
  write_file(dir / "file", "");
  Config config;
  config.monitors.tensorboard.enabled = true;
  EXPECT_ERROR(check_in(config, ""), Errc::Config, "tensorboard.output_path: is missing");
  config.monitors.tensorboard.output_path = dir / "file";
  EXPECT_ERROR(check_in(config, ""), Errc::Config, "tensorboard.output_path: cannot write in");
  EXPECT_ERROR(Monitors(config, {}), Errc::Config, "tensorboard.output_path: cannot create");
  config = {};
  config.monitors.prometheus.file = dir / "none/run.prom";
  EXPECT_ERROR(check_in(config, ""), Errc::Config, "prometheus.file: cannot write in");
  EXPECT_ERROR(Monitors(config, {}), Errc::Io, "none");
  config.monitors.prometheus.file = dir.path();
  EXPECT_ERROR(check_in(config, ""), Errc::Config, "is a directory");
  for (const char* device : {"/dev/full", "/dev/null"}) {
    config.monitors.prometheus.file = device;
    EXPECT_ERROR(check_in(config, ""), Errc::Config, "is not a regular file");
  }
  write_file(dir / "book.txt", "text");
  std::filesystem::create_symlink("book.txt", std::string(dir / "link"));
  config.data.train = {dir / "book.txt"};
  config.monitors.prometheus.file = dir / "link";
  EXPECT_ERROR(check_in(config, ""), Errc::Config, "is an input of this run");
  // A link leads only to what a run may have written.
  config.data.train.clear();
  EXPECT_ERROR(check_in(config, ""), Errc::Config, "holds something else");
  write_file(dir / "book.txt", prometheus_text(step_record(1), {}, "job", 1));
  EXPECT_NO_THROW(check_in(config, ""));
  config.monitors.flops_profiler = {.enabled = true, .output_file = dir / "link"};
  config.monitors.prometheus.file.clear();
  EXPECT_ERROR(check_in(config, ""), Errc::Config, "flops_profiler.output_file: ");
  const plan::StepWork work = some_work();
  write_file(dir / "book.txt", flops_text(step_record(1), work, 1, 1, false));
  EXPECT_NO_THROW(check_in(config, ""));
  config = {};
  for (const char* name : {"tokens.h5", "tokens.idx"}) {
    for (const char* file : {name, "tokens.bin"}) write_file(dir / file, "data");
    config.data.train = {dir / (std::string_view(name).ends_with("h5") ? "tokens.h5:/ids" : "tokens")};
    config.monitors.prometheus.file = dir / name;
    EXPECT_ERROR(check_in(config, ""), Errc::Config, "is an input of this run");
  }
  config = {};
  config.monitors.flops_profiler = {.enabled = true, .output_file = dir / "none/flops"};
  EXPECT_ERROR(check_in(config, ""), Errc::Config, "flops_profiler.output_file: cannot write in");
}

// Names in the directory of a monitor are ours to give, and nothing that has one of them already is written to.
TEST(Monitors, WhatLiesInThePlaceOfTheirFilesIsKnownBefore) {
  Config config;
  config.monitors.csv_monitor = {.enabled = true, .output_path = {}, .job_name = "job"};
  const auto message = [&](const char* name, const std::function<void(const std::string&)>& make) -> std::string {
    const TempDirectory dir;
    write_file(dir / "data", "data");
    fs::create_directories(dir / "job");
    make(dir / fmt::format("job/{}", name));
    config.monitors.csv_monitor.output_path = dir.path();
    std::string what;
    try {
      check_in(config, "");
    } catch (const Error& e) {
      what = e.code() == Errc::Config ? e.what() : "of another code";
    }
    EXPECT_EQ(read_file(dir / "data"), "data");
    return what;
  };
  const auto link = [](const std::string& path) { fs::create_symlink("../data", path); };
  const auto hard = [](const std::string& path) {
    fs::create_hard_link(fs::path(path).parent_path().parent_path() / "data", path);
  };
  const auto text = [](const std::string& path) { write_file(path, "a,b\n1,2\n"); };
  const auto pipe = [](const std::string& path) { ::mkfifo(path.c_str(), 0600); };
  EXPECT_THAT(message("train_loss.csv", link), HasSubstr("csv_monitor.output_path: "));
  EXPECT_THAT(message("train_loss.csv", link), HasSubstr("is a symbolic link"));
  EXPECT_THAT(message("memory_params.csv", hard), HasSubstr("(hard link)"));
  EXPECT_THAT(message("comm_dp.all_gather.csv", text), HasSubstr("is not a file of csv_monitor"));
  EXPECT_THAT(message("train_loss.csv", [](const std::string& path) { write_file(path, "step,other\r\n"); }),
              HasSubstr("begins with \"step,loss\""));
  EXPECT_THAT(message("validation_loss.csv", pipe), HasSubstr("is not a regular file"));
  EXPECT_EQ(message("book.csv", link), "");
  EXPECT_EQ(message("train_loss.csv", [](const std::string& path) { write_file(path, "step,loss\r\n1,2\r\n"); }), "");
  EXPECT_EQ(message("train_loss.csv", [](const std::string& path) { write_file(path, "st"); }), "");  // torn
}

// A monitor that fails takes nothing from the others.
TEST(Monitors, AllAreCalledAndTheFirstErrorIsThrown) {
  const TempDirectory dir;
  fs::create_directories(dir / "csv/job");
  write_file(dir / "csv/job/train_loss.csv", "step,loss\r\n" + std::string(4000, '0') + "\n");
  Config config;
  config.monitors.csv_monitor = {.enabled = true, .output_path = dir / "csv", .job_name = "job"};
  config.monitors.prometheus.file = dir / "run.prom";
  config.monitors.steps_per_print = 1;
  Monitors monitors(config, {});
  const SmallFiles limit(4010);
  EXPECT_ERROR(monitors.step(step_record(1)), Errc::Io, "train_loss.csv: File too large");
  EXPECT_TRUE(fs::exists(dir / "run.prom"));
}

}  // namespace monitor_test
}  // namespace ds::monitor
