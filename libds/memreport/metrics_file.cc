// SPDX-License-Identifier: Apache-2.0
#include "memreport/metrics_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <filesystem>
#include <limits>
#include <map>
#include <numeric>

#include "base/content_kind.h"
#include "base/file.h"
#include "base/json.h"
#include "checkpoint/run_names.h"
#include "device/memory.h"

namespace ds::memreport {
namespace {

constexpr i64 kMostBytes = i64{1} << 53;
constexpr i64 kMaxLine = i64{64} << 20;  // of ten thousands of ranks; without a bound a file could take all memory
constexpr size_t kMostTags = 100;        // of memory: more than there will be
constexpr i64 kMostRanks = i64{1} << 24;

// An object of the file that says where it is wrong.
class Fields {
 public:
  Fields(const Json& json, std::string where) : json_(json), where_(std::move(where)) {
    DS_CHECK(json.is_object(), Errc::Corrupt, "{}: not an object", where_);
  }

  bool has(const char* key) const { return json_.contains(key); }
  const Json& at(const char* key) const {
    DS_CHECK(has(key), Errc::Corrupt, "{}: there is no \"{}\"", where_, key);
    return json_.at(key);
  }
  Fields object(const char* key) const { return {at(key), fmt::format("{}: {}", where_, key)}; }
  std::vector<Fields> objects(const char* key) const {
    const Json& list = at(key);
    DS_CHECK(list.is_array(), Errc::Corrupt, "{}: \"{}\" is not a list", where_, key);
    std::vector<Fields> all;
    for (const Json& item : list) all.emplace_back(item, fmt::format("{}: {}[{}]", where_, key, all.size()));
    return all;
  }
  std::string text(const char* key) const {
    DS_CHECK(at(key).is_string(), Errc::Corrupt, "{}: \"{}\" is not a text", where_, key);
    return at(key).get<std::string>();
  }
  i64 count(const char* key, i64 most = std::numeric_limits<i64>::max()) const { return count(at(key), key, most); }
  // Written as null when it is not finite.
  double number(const char* key) const {
    if (at(key).is_null()) return std::numeric_limits<double>::quiet_NaN();
    DS_CHECK(at(key).is_number(), Errc::Corrupt, "{}: \"{}\" is not a number", where_, key);
    return at(key).get<double>();
  }
  double duration(const char* key) const {
    const double x = number(key);
    DS_CHECK(std::isfinite(x) && x >= 0, Errc::Corrupt, "{}: \"{}\" is not a duration", where_, key);
    return x;
  }
  std::vector<int> ranks(const char* key) const {
    DS_CHECK(at(key).is_array(), Errc::Corrupt, "{}: \"{}\" is not a list", where_, key);
    std::vector<int> all;
    for (const Json& item : at(key)) all.push_back(narrow<int>(count(item, key, kMostRanks)));
    return all;
  }
  // All its members, which are counts.
  std::vector<std::pair<std::string, i64>> counts() const {
    std::vector<std::pair<std::string, i64>> all;
    for (const auto& [name, value] : json_.items()) all.emplace_back(name, count(value, name, kMostBytes));
    return all;
  }
  // The bounds of the tags that have one; empty for files of earlier versions.
  std::vector<std::pair<std::string, Bound>> bounds_by_tag(const char* key) const {
    std::vector<std::pair<std::string, Bound>> all;
    if (!has(key)) return all;
    const Fields tags = object(key);
    DS_CHECK(tags.json_.size() <= kMostTags, Errc::Corrupt, "{}: \"{}\" has {} kinds of memory", where_, key,
             tags.json_.size());
    for (const auto& [tag, text] : tags.json_.items()) {
      const auto is = [&](Bound b) { return text.is_string() && text.get_ref<const std::string&>() == bound_text(b); };
      DS_CHECK(is(Bound::AtMost) || is(Bound::AtLeast), Errc::Corrupt, "{}: \"{}\" is no bound", where_, tag);
      all.emplace_back(tag, is(Bound::AtMost) ? Bound::AtMost : Bound::AtLeast);
    }
    return all;
  }
  std::vector<std::pair<std::string, i64>> bytes_by_tag(const char* key) const {
    const Fields tags = object(key);
    DS_CHECK(tags.json_.size() <= kMostTags, Errc::Corrupt, "{}: \"{}\" has {} kinds of memory", where_, key,
             tags.json_.size());
    std::vector<std::pair<std::string, i64>> all;
    for (const auto& [tag, bytes] : tags.json_.items())
      all.emplace_back(tag, tags.count(bytes, tag, kMostBytes));  // their sums are printed
    return all;
  }

 private:
  i64 count(const Json& value, std::string_view key, i64 most) const {
    const bool fits = value.is_number_unsigned() && value.get<u64>() <= static_cast<u64>(most);
    DS_CHECK(fits, Errc::Corrupt, "{}: \"{}\" is not a whole number from 0 to {}", where_, key, most);
    return value.get<i64>();
  }
  const Json& json_;
  std::string where_;
};

// The place of a tag in tables: known ones first, in their order.
size_t place_of(std::string_view tag) {
  size_t t = 0;
  while (t < static_cast<size_t>(Tag::Count) && tag_name(static_cast<Tag>(t)) != tag) ++t;
  return t;
}

using NamedBytes = std::vector<std::pair<std::string, i64>>;
using TagBounds = std::vector<std::pair<std::string, Bound>>;

std::vector<TagMemory> rows_of(const NamedBytes& predicted, const NamedBytes& counted, const TagBounds& bounds = {}) {
  std::vector<TagMemory> table;
  const auto row = [&](const std::string& tag) -> TagMemory& {
    const auto there = std::ranges::find(table, tag, &TagMemory::tag);
    return there != table.end() ? *there : table.emplace_back(TagMemory{.tag = tag});
  };
  for (const auto& [tag, bytes] : predicted) row(tag).predicted = bytes;
  for (const auto& [tag, bytes] : counted) row(tag).counted = bytes;
  for (const auto& [tag, bound] : bounds) row(tag).bound = bound;
  std::ranges::stable_sort(table, {}, [](const TagMemory& m) { return place_of(m.tag); });
  return table;
}

class Reader {
 public:
  Reader(std::string path, i64 window) : window_(static_cast<size_t>(std::max<i64>(window, 1))) {
    file_.path = std::move(path);
  }

  void read() {
    const File file = File::open_read(file_.path);
    if (const std::string kind = kind_of_content(file); kind != kBinaryData)  // a power failure may leave zeros
      DS_CHECK(kind.empty(), Errc::Corrupt, "{}: is {}, not a metrics.jsonl", file_.path, kind);
    for_each_line(file, kMaxLine, [&](std::string_view line, bool is_ended) {
      ++number_;
      if (is_ended) {
        if (line.find_first_not_of(" \t\r") != line.npos) take(parse(line));
        return;
      }
      // Without its end it is still being written, or a full disk has cut it; then it may be whole all the same.
      Json last;
      try {
        last = parse(line);
      } catch (const Error&) {
        return;
      }
      take(last);
    });
  }

  MetricsFile finish() {
    const auto known = [&](int rank) -> RankMemory& { return ranks_[rank]; };
    for (const Stage& stage : stages_) {
      for (const int r : stage.ranks) {
        if (!file_.ended) known(r).tags = rows_of(stage.predicted, r == 0 ? counted_ : NamedBytes{}, stage.bounds);
      }
    }
    if (!file_.ended && !counted_.empty()) {
      if (known(0).tags.empty()) known(0).tags = rows_of({}, counted_);
      known(0).counts_known = true;
    }
    for (auto& [rank, memory] : ranks_) {
      memory.rank = rank;
      file_.ranks.push_back(std::move(memory));
    }
    file_.speed = speed();
    return std::move(file_);
  }

 private:
  struct Step {
    double ms, mfu, loss;
    i64 tokens;
  };
  struct Stage {
    std::vector<int> ranks;
    NamedBytes predicted;
    TagBounds bounds;
  };

  std::string where() const { return fmt::format("{}:{}", file_.path, number_); }

  Json parse(std::string_view line) const {
    try {
      return parse_json(line, file_.path, {.error = Errc::Corrupt, .comments = false, .places = false}).root;
    } catch (const JsonError& e) {
      throw Error(Errc::Corrupt, fmt::format("{}:{}: {}", where(), e.place().column, e.message()));
    }
  }

  void take(const Json& json) {
    const Fields line(json, where());
    const std::string type = line.text("type");
    if (type == "run") take_run(line);
    if (type == "step") take_step(line);
    if (type == "memory") take_memory(line);
  }

  // Earlier lines belong to an earlier start, whose steps may have had another speed.
  void take_run(const Fields& line) {
    MetricsFile fresh;
    fresh.path = file_.path;
    fresh.runs = file_.runs + 1;
    file_ = std::move(fresh);
    stages_.clear();
    ranks_.clear();
    steps_.clear();
    counted_.clear();
    file_.version = line.text("version");
    file_.device = line.text("device");
    file_.device_name = line.text("device_name");
    file_.backend = line.text("backend");
    file_.host = line.text("host");
    file_.start = line.text("start");
    file_.world_size = narrow<int>(line.count("world_size", kMostRanks));
    const Fields mesh = line.object("mesh");
    i64 ranks = 1;
    const auto axis = [&](const char* name) {
      const i64 n = mesh.count(name, kMostRanks);
      ranks = std::min(ranks * n, kMostRanks + 1);
      return narrow<int>(n);
    };
    file_.mesh = {.dp = axis("dp"), .pp = axis("pp"), .tp = axis("tp"), .sp = axis("sp")};
    if (mesh.has("workers")) file_.mesh.workers = axis("workers");
    DS_CHECK(ranks > 0 && ranks == file_.world_size, Errc::Corrupt, "{}: a mesh of {} ranks in a world of {}", where(),
             ranks, file_.world_size);
    file_.peak_flops = line.number("peak_flops");
    const Json& config = line.at("config");
    DS_CHECK(config.is_object() && (!config.contains("steps") || config["steps"].is_number_integer()), Errc::Corrupt,
             "{}: \"config\" is no configuration", where());
    file_.config_json = line.at("config").dump(-1, ' ', false, Json::error_handler_t::replace);
    file_.model_json = line.at("model").dump(-1, ' ', false, Json::error_handler_t::replace);
    file_.first_step = file_.last_step = line.count("step");
    for (const Fields& stage : line.objects("stages"))
      stages_.push_back({stage.ranks("ranks"), stage.bytes_by_tag("predicted_bytes"), stage.bounds_by_tag("bounds")});
  }

  void take_step(const Fields& line) {
    file_.last_step = line.count(step_field::kStep);
    if (line.has(step_field::kRecovered)) return;  // nobody knows how long it took
    steps_.push_back({line.duration(step_field::kStepMs), line.number(step_field::kMfu), line.number(step_field::kLoss),
                      line.count(step_field::kTokens)});
    if (steps_.size() > window_) steps_.pop_front();
    counted_ = line.bytes_by_tag(step_field::kMemoryBytes);
    if (line.has(step_field::kExpertTokens)) take_tokens(line.object(step_field::kExpertTokens));
  }

  // "LAYER.EXPERT": tokens.
  void take_tokens(const Fields& tokens) {
    for (const auto& [name, count] : tokens.counts()) {
      const size_t dot = std::min(name.rfind('.'), name.size());
      const std::string layer = name.substr(0, dot);
      auto at = std::ranges::find(file_.expert_loads, layer, &ExpertLoad::layer);
      if (at == file_.expert_loads.end()) at = file_.expert_loads.insert(at, {.layer = layer, .tokens = {}});
      const auto expert = static_cast<size_t>(number_of(name.substr(std::min(dot + 1, name.size()))));
      if (expert >= at->tokens.size()) at->tokens.resize(expert + 1);
      at->tokens[expert] += count;
    }
  }
  i64 number_of(std::string_view text) const {
    const bool sound =
        !text.empty() && text.size() < 7 && std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
    DS_CHECK(sound, Errc::Corrupt, "{}: {}: \"{}\" is no number of an expert", where(), step_field::kExpertTokens,
             text);
    return std::stoll(std::string(text));
  }

  void take_memory(const Fields& line) {
    ranks_.clear();
    for (const Fields& rank : line.objects("ranks")) {
      const i64 number = rank.count("rank", kMostRanks);
      DS_CHECK(file_.world_size == 0 || number < file_.world_size, Errc::Corrupt, "{}: rank {} in a world of {}",
               where(), number, file_.world_size);
      const auto [there, added] = ranks_.try_emplace(narrow<int>(number));
      DS_CHECK(added, Errc::Corrupt, "{}: rank {} twice", where(), number);
      RankMemory& memory = there->second;
      memory.tags = rows_of(rank.bytes_by_tag("predicted_bytes"), rank.bytes_by_tag("counted_bytes"),
                            rank.bounds_by_tag("bounds"));
      memory.counts_known = true;
      memory.resident_bytes = rank.count("resident_bytes");
      memory.momentary_bytes = rank.count("momentary_bytes");
      memory.base_bytes = rank.count("base_bytes");
    }
    file_.ended = true;
  }

  StepSpeed speed() const {
    if (steps_.empty()) return {};
    std::vector<double> ms;
    double total_ms = 0, tokens = 0, weighted_mfu = 0;
    for (const Step& s : steps_) {
      ms.push_back(s.ms);
      total_ms += s.ms;
      tokens += static_cast<double>(s.tokens);
      weighted_mfu += s.mfu * s.ms;
    }
    std::ranges::sort(ms);
    const size_t n = ms.size();
    StepSpeed speed{.steps = std::ssize(ms), .loss = steps_.back().loss};
    speed.mean_step_ms = total_ms / static_cast<double>(n);
    speed.median_step_ms = std::midpoint(ms[(n - 1) / 2], ms[n / 2]);
    speed.tokens_per_s = total_ms > 0 ? tokens / total_ms * 1e3 : 0;
    speed.mfu = total_ms > 0 ? weighted_mfu / total_ms : 0;
    return speed;
  }

  const size_t window_;
  MetricsFile file_;
  i64 number_ = 0;  // of the line, from 1
  std::vector<Stage> stages_;
  std::map<int, RankMemory> ranks_;
  std::deque<Step> steps_;
  NamedBytes counted_;  // of rank 0 in the last step
};

}  // namespace

MetricsFile read_metrics(const std::string& path, i64 window) {
  std::error_code ignored;
  Reader reader(std::filesystem::is_directory(path, ignored) ? path + "/" + kMetricsName : path, window);
  reader.read();
  return reader.finish();
}

}  // namespace ds::memreport
