// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include <filesystem>

#include "base/check.h"
#include "base/json.h"
#include "ds/memreport.h"
#include "ds/printable.h"
#include "ds/units.h"
#include "memreport/live.h"
#include "memreport/metrics_file.h"
#include "mesh/mesh_json.h"

namespace ds::memreport {
namespace {

MeasuredRank rank_of(const RankMemory& r) {
  MeasuredRank rank;
  rank.rank = r.rank;
  rank.tags = r.tags;
  rank.counted = r.counts_known;
  rank.resident_bytes = r.resident_bytes;
  rank.momentary_bytes = r.momentary_bytes;
  rank.base_bytes = r.base_bytes;
  return rank;
}

MeasuredRank rank_of(const LiveRank& r) {
  MeasuredRank rank;
  rank.rank = r.rank;
  rank.tags = r.memory;
  rank.counted = true;
  rank.resident_bytes = r.resident_bytes;
  rank.base_bytes = r.base_bytes;
  return rank;
}

i64 sum(const MeasuredRank& r, i64 TagMemory::*what) {
  i64 bytes = 0;
  for (const TagMemory& t : r.tags) bytes += t.*what;
  return bytes;
}

// Memory of communicators between nodes, and of a GPU's software, is not predicted.
bool is_predicted(const TagMemory& t) { return t.predicted > 0; }

std::string difference(i64 predicted, i64 counted, Bound bound = Bound::Exact) {
  if (predicted == counted) return "exact";
  if (predicted == 0) return "not predicted";
  if (bound == Bound::AtMost ? counted < predicted : bound == Bound::AtLeast && counted > predicted)
    return std::string(bound_text(bound));
  return fmt::format("{:+.2f} %", 100 * (static_cast<double>(counted) / static_cast<double>(predicted) - 1));
}

std::string rank_text(const MeasuredRank& r) {
  std::string out = fmt::format("{:<20} {:>14} {:>14} {:>14}\n", fmt::format("memory of rank {}", r.rank), "predicted",
                                r.counted ? "counted" : "", r.counted ? "difference" : "");
  const auto row = [&](const std::string& name, i64 predicted, i64 counted, Bound bound) {
    out += fmt::format("  {:<18} {:>14}", printable(name), bytes_text(predicted));
    if (r.counted) out += fmt::format(" {:>14} {:>14}", bytes_text(counted), difference(predicted, counted, bound));
    out += '\n';
  };
  i64 predicted = 0, met = 0;
  Bound bound = Bound::Exact;  // of sums: that of the tags that are not exact, where these agree
  bool agree = true;
  for (const TagMemory& t : r.tags) {
    row(t.tag, t.predicted, t.counted, t.bound);
    if (!is_predicted(t)) continue;
    predicted += t.predicted;
    met += t.counted;
    if (t.bound == Bound::Exact) continue;
    agree = agree && (bound == Bound::Exact || bound == t.bound);
    bound = t.bound;
  }
  if (!agree) bound = Bound::Exact;
  row("what is predicted", predicted, met, bound);
  const i64 counted = sum(r, &TagMemory::counted);
  row("total", sum(r, &TagMemory::predicted), counted, bound);
  if (r.resident_bytes > 0) {
    const i64 expected = r.base_bytes + counted;
    out += fmt::format("  {:<18} {:>14} {:>14} {:>14}\n", "resident", r.counted ? bytes_text(expected) : "",
                       bytes_text(r.resident_bytes), r.counted ? difference(expected, r.resident_bytes) : "");
    out += fmt::format("  of which {} are the process before it took anything", bytes_text(r.base_bytes));
    if (r.momentary_bytes > 0) out += fmt::format("; beside it {} for a moment", bytes_text(r.momentary_bytes));
    out += '\n';
  }
  return out;
}

const MeasuredRank* largest(const Measured& m) {
  const auto most = std::ranges::max_element(m.ranks, {}, [](const MeasuredRank& r) {  // of those with counts, if any
    return std::pair(r.counted, sum(r, r.counted ? &TagMemory::counted : &TagMemory::predicted));
  });
  return most == m.ranks.end() ? nullptr : &*most;
}

}  // namespace

Measured read_measured(const std::string& path) {
  const MetricsFile file = read_metrics(path);
  DS_CHECK(file.world_size > 0 || !file.ranks.empty(), Errc::Corrupt,
           "{}: there is no line of a run or of a step in it that is whole", file.path);
  Measured m;
  m.name = file.path;
  m.world_size = file.world_size;
  m.mesh = file.mesh;
  m.device = file.device;
  m.step = file.last_step;
  if (!file.config_json.empty()) m.total_steps = Json::parse(file.config_json).value("steps", i64{0});
  m.step_ms = file.speed.median_step_ms;
  m.tokens_per_s = file.speed.tokens_per_s;
  m.mfu = file.speed.mfu;
  for (const RankMemory& r : file.ranks) m.ranks.push_back(rank_of(r));
  return m;
}

std::vector<Measured> find_running(const std::string& directory) {
  std::vector<Measured> all;
  std::vector<LiveRank> ranks = find_live();
  std::error_code error;
  DS_CHECK(directory.empty() || std::filesystem::is_directory(directory, error), Errc::Config,
           "{} is not the directory of a run", directory);
  std::erase_if(ranks, [&](const LiveRank& r) {
    return !directory.empty() && !std::filesystem::equivalent(directory, r.directory, error);
  });
  for (size_t i = 0; i < ranks.size(); ++i) {
    const LiveRank& r = ranks[i];
    if (i == 0 || r.job.empty() || r.job != ranks[i - 1].job) {
      Measured& m = all.emplace_back();
      m.name =
          r.directory.empty() ? fmt::format("process {}", r.pid) : fmt::format("{} (process {})", r.directory, r.pid);
      m.world_size = r.world_size;
      m.mesh = r.mesh;
      m.device = r.device;
      m.step = r.step;
      m.total_steps = r.total_steps;
      m.step_ms = r.step_ms;
      m.tokens_per_s = r.tokens_per_s;
      m.mfu = r.mfu;
      m.age_s = r.age_s;
    }
    all.back().ranks.push_back(rank_of(r));
  }
  return all;
}

std::string text(const Measured& m, bool all) {
  std::string out = fmt::format("{}: {} rank{}{}; step {}{}\n", printable(m.name), m.world_size,
                                m.world_size == 1 ? "" : "s", m.device.empty() ? "" : " on " + printable(m.device),
                                m.step, m.total_steps > 0 ? fmt::format(" of {}", m.total_steps) : "");
  if (m.step_ms > 0)
    out += fmt::format("{:.6g} ms per step, {:.6g} tokens/s{}\n", m.step_ms, m.tokens_per_s,
                       std::isfinite(m.mfu) ? fmt::format(", MFU {:.1f} %", 100 * m.mfu) : "");
  if (m.ranks.empty()) return out + "no rank has told of its memory\n";
  const MeasuredRank* most = largest(m);
  for (const MeasuredRank& r : m.ranks) {
    if (all || &r == most) out += "\n" + rank_text(r);
  }
  if (!m.device.starts_with("cpu")) out += "Resident is host memory: it has nothing of the GPU's.\n";
  return out;
}

std::string json(const Measured& m) {
  Json ranks = Json::array();
  for (const MeasuredRank& r : m.ranks) {
    Json predicted = Json::object(), counted = Json::object(), bounds = Json::object();
    for (const TagMemory& t : r.tags) {
      predicted[t.tag] = t.predicted;
      counted[t.tag] = t.counted;
      if (t.bound != Bound::Exact) bounds[t.tag] = bound_text(t.bound);
    }
    ranks.push_back({{"rank", r.rank}, {"predicted_bytes", predicted}});
    if (r.counted) ranks.back()["counted_bytes"] = counted;
    if (!bounds.empty()) ranks.back()["bounds"] = bounds;
    if (r.resident_bytes > 0) {
      ranks.back()["resident_bytes"] = r.resident_bytes;
      ranks.back()["momentary_bytes"] = r.momentary_bytes;
      ranks.back()["base_bytes"] = r.base_bytes;
    }
  }
  return Json({{"name", m.name},
               {"world_size", m.world_size},
               {"mesh", mesh_json(m.mesh)},
               {"device", m.device},
               {"step", m.step},
               {"total_steps", m.total_steps},
               {"step_ms", m.step_ms},
               {"tokens_per_s", m.tokens_per_s},
               {"mfu", m.mfu},
               {"ranks", ranks}})
      .dump(-1, ' ', false, Json::error_handler_t::replace);  // a file may have any name
}

}  // namespace ds::memreport
