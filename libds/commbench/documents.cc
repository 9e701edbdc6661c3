// SPDX-License-Identifier: Apache-2.0
// Output for programs: JSON by nccl-tests' schema, CSV, and links for predictions.

#include <fmt/format.h>

#include "base/json.h"
#include "ds/commbench.h"
#include "ds/version.h"

namespace ds::commbench {
namespace {

constexpr int kNcclTestsSchema = 3;

Json timing_json(const Row& r, const std::optional<Timing>& t) {
  if (!t) return nullptr;
  return {{"time", t->seconds * 1e6},
          {"alg_bw", r.size > 0 ? Json(t->alg_bw) : Json(nullptr)},
          {"bus_bw", r.size > 0 ? Json(t->bus_bw) : Json(nullptr)},
          {"nwrong", t->num_wrong ? Json(*t->num_wrong) : Json(nullptr)}};
}

Json statistics_json(const Statistics& s) {
  Json times = Json::array();
  for (const double t : s.times) times.push_back(t * 1e6);
  return {{"min_us", s.min * 1e6},     {"max_us", s.max * 1e6},
          {"avg_us", s.avg * 1e6},     {"p50_us", s.p50 * 1e6},
          {"p95_us", s.p95 * 1e6},     {"p99_us", s.p99 * 1e6},
          {"stdev_us", s.stdev * 1e6}, {"cv_pct", s.avg > 0 ? 100 * s.stdev / s.avg : 0},
          {"times_us", times}};
}

Json row_json(const Options& o, const Row& r) {
  Json row = {{"size", r.size},
              {"count", r.count},
              {"type", r.type},
              {"redop", r.redop},
              {"root", r.root},
              {"operation", r.op},
              {"backend", r.backend},
              {"out_of_place", timing_json(r, r.out_of_place)},
              {"in_place", timing_json(r, r.in_place)},
              {"actual_iterations", o.iterations}};
  if (r.out_of_place && r.out_of_place->stats) row["out_of_place_per_iter"] = statistics_json(*r.out_of_place->stats);
  if (r.in_place && r.in_place->stats) row["in_place_per_iter"] = statistics_json(*r.in_place->stats);
  if (r.overlap)
    row["overlap"] = {{"comm_us", r.overlap->comm_s * 1e6},
                      {"compute_us", r.overlap->compute_s * 1e6},
                      {"both_us", r.overlap->both_s * 1e6},
                      {"overlap_pct", r.overlap->percent}};
  return row;
}

Json models_json(const Result& result) {
  Json models = Json::array();
  for (const AlphaBeta& m : result.models)
    models.push_back({{"op", m.op},
                      {"backend", m.backend},
                      {"form", m.form},
                      {"ranks", m.ranks},
                      {"alpha_s", m.alpha_s},
                      {"beta_s_per_byte", m.beta_s_per_byte},
                      {"rms_relative_error", m.error},
                      {"min_bytes", m.min_bytes},
                      {"max_bytes", m.max_bytes}});
  return models;
}

Json links_array(const Result& result) {
  Json links = Json::array();
  for (const Link& l : result.links)
    links.push_back({{"class", l.link},
                     {"backend", l.backend},
                     {"latency_s", l.latency_s},
                     {"bandwidth_bytes_per_s", l.bandwidth},
                     {"pairs", l.pairs}});
  return links;
}

}  // namespace

std::string json_text(const Options& o, const Result& result, const std::vector<std::string>& args,
                      const std::vector<std::string>& environment) {
  Json config = {{"nthreads", 1},
                 {"ngpus", 1},
                 {"minimum_bytes", o.min_bytes},
                 {"maximum_bytes", o.max_bytes},
                 o.step_bytes > 0 ? Json::object_t::value_type{"step_bytes", o.step_bytes}
                                  : Json::object_t::value_type{"step_factor", o.factor}};
  config.update({{"warmup_iters", o.warmup},
                 {"iterations", o.iterations},
                 {"aggregated_iterations", 1},
                 {"validation", o.check ? 1 : 0},
                 {"graph", 0},
                 {"blocking_collectives", o.blocking},
                 {"per_iter_timing", o.blocking || o.stats},
                 {"memory", o.memory == Memory::Shared ? "shared" : "ordinary"},
                 {"backends", result.backends}});
  Json devices = Json::array(), rows = Json::array(), pairs = Json::array();
  for (size_t r = 0; r < result.ranks.size(); ++r) {
    const RankPlace& p = result.ranks[r];
    devices.push_back({{"rank", r},
                       {"group", 0},
                       {"pid", p.pid},
                       {"hostname", p.host},
                       {"device", 0},
                       {"device_info", p.device},
                       {"cpu", p.cpu},
                       {"cores", p.cores},
                       {"numa_node", p.numa_node >= 0 ? Json(p.numa_node) : Json(nullptr)}});
  }
  for (const Row& r : result.rows) rows.push_back(row_json(o, r));
  for (const Pair& p : result.pairs)
    pairs.push_back({{"backend", p.backend},
                     {"from", p.from},
                     {"to", p.to},
                     {"class", p.link},
                     {"latency_us", p.latency_s * 1e6},
                     {"bytes", p.bytes},
                     {"bandwidth", p.bandwidth / 1e9},
                     {"back_bandwidth", p.back_bandwidth / 1e9},
                     {"both_bandwidth", p.both_bandwidth / 1e9}});
  const Json document = {{"version", kNcclTestsSchema},
                         {"libds_version", version()},
                         {"start_time", result.start_time},
                         {"args", args},
                         {"env", environment},
                         {"nccl_version", result.nccl_version.empty() ? Json(nullptr) : Json(result.nccl_version)},
                         {"mpi_version", result.mpi_version.empty() ? Json(nullptr) : Json(result.mpi_version)},
                         {"config", config},
                         {"devices", devices},
                         {"left_out", result.left_out},
                         {"results", rows},
                         {"pairs", pairs},
                         {"links", links_array(result)},
                         {"models", models_json(result)},
                         {"out_of_bounds", {{"count", result.num_wrong}, {"okay", result.num_wrong == 0}}},
                         {"average_bus_bandwidth", {{"bandwidth", result.average_bus_bw}}},
                         {"end_time", result.end_time}};
  return document.dump(-1, ' ', false, Json::error_handler_t::replace);
}

namespace {

std::string pairs_csv(const Result& result) {
  std::string text = "backend,from,to,link,bytes,latency_us,bandwidth_GB_per_s,back_GB_per_s,both_GB_per_s\n";
  for (const Pair& p : result.pairs)
    text += fmt::format("{},{},{},{},{},{},{},{},{}\n", p.backend, p.from, p.to, p.link, p.bytes, p.latency_s * 1e6,
                        p.bandwidth * 1e-9, p.back_bandwidth * 1e-9, p.both_bandwidth * 1e-9);
  return text;
}

}  // namespace

std::string csv_text(const Result& result) {
  if (result.rows.empty()) return pairs_csv(result);
  std::string text =
      "backend,op,size_bytes,count,type,redop,root,form,time_us,algbw_GB_per_s,busbw_GB_per_s,wrong,min_us,avg_us,"
      "max_us,p99_us,overlap_pct\n";
  for (const Row& r : result.rows) {
    const auto line = [&](std::string_view form, const std::optional<Timing>& t) {
      if (!t) return;
      text += fmt::format("{},{},{},{},{},{},{},{},{},{},{},{}", r.backend, r.op, r.size, r.count, r.type, r.redop,
                          r.root, form, t->seconds * 1e6, t->alg_bw, t->bus_bw,
                          t->num_wrong ? fmt::format("{}", *t->num_wrong) : "");
      const auto& s = t->stats;
      text += s ? fmt::format(",{},{},{},{}", s->min * 1e6, s->avg * 1e6, s->max * 1e6, s->p99 * 1e6) : ",,,,";
      text += r.overlap ? fmt::format(",{}\n", r.overlap->percent) : ",\n";
    };
    line("out_of_place", r.out_of_place);
    line("in_place", r.in_place);
  }
  return text;
}

std::string links_json(const Result& result) {
  Json hosts = Json::object();
  for (const RankPlace& p : result.ranks) hosts[p.host] = hosts.value(p.host, 0) + 1;
  const Json document = {{"schema", "ds-links/1"},       {"created", result.end_time},
                         {"libds_version", version()},   {"backends", result.backends},
                         {"ranks", result.ranks.size()}, {"hosts", hosts},
                         {"links", links_array(result)}, {"operations", models_json(result)}};
  return document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace ds::commbench
