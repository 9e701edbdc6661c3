// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "base/json.h"
#include "comm/message_tag.h"
#include "ds/memreport.h"
#include "ds/units.h"
#include "mesh/mesh_json.h"

namespace ds::memreport {
namespace {

// Ascending ranks as "0-3, 8-11".
std::string ranges_text(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    text += fmt::format("{}{}", text.empty() ? "" : ", ", ranks[i]);
    if (end > i + 1) text += fmt::format("-{}", ranks[end - 1]);
    i = end;
  }
  return text;
}

// The same, short enough for a table.
std::string short_ranges(const std::vector<int>& ranks) {
  constexpr size_t kWidth = 24;
  const std::string text = ranges_text(ranks);
  return text.size() <= kWidth ? text : fmt::format("{} ranks from {}", ranks.size(), ranks.front());
}

std::string axes_text(const MeshShape& mesh, i64 expert_ranks) {
  std::string text;
  const auto add = [&](const char* name, i64 degree) {
    if (degree > 1) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, degree);
  };
  add("dp", mesh.dp);
  add("pp", mesh.pp);
  add("tp", mesh.tp);
  add("sp", mesh.sp);
  add("workers", mesh.workers);
  add("ep", expert_ranks);
  return text.empty() ? "alone" : text;
}

std::string group_text(const RankGroup& g, const Prediction& p) {
  std::string text = fmt::format("memory of {} {}{}\n", g.ranks.size() == 1 ? "rank" : "ranks", short_ranges(g.ranks),
                                 p.groups.size() > 1 && &g == &p.worst_group() ? ", which need most" : "");
  for (const TagBytes& t : g.memory) {
    if (p.device != "cpu" && t.tag == "host") continue;
    text += fmt::format("  {:<20} {:>14}{}\n", t.tag, bytes_text(t.bytes),
                        t.bound == Bound::Exact ? "" : fmt::format(" {}", bound_text(t.bound)));
  }
  text += fmt::format("  {:<20} {:>14}\n", "total", bytes_text(g.device_bytes));
  if (g.process_bytes > 0)
    text += fmt::format("  {:<20} {:>14} beside it; {} more for a moment at most\n", "process",
                        bytes_text(g.process_bytes), bytes_text(g.momentary_bytes));
  if (g.host_bytes > 0) text += fmt::format("  {:<20} {:>14} beside the GPU\n", "host", bytes_text(g.host_bytes));
  for (const TagBytes& t : g.files)
    text += fmt::format("  {:<20} {:>14} {}\n", t.tag, bytes_text(t.bytes),
                        g.served && t.tag != "params" && t.tag != "activations" ? "of each rank with the server"
                                                                                : "in a file of each rank");
  if (!g.files.empty())
    text += fmt::format("  {} read and {} written in a step\n", bytes_text(g.file_read_bytes),
                        bytes_text(g.file_written_bytes));
  return text;
}

std::string traffic_text(const RankGroup& g, bool measured_loads) {
  std::string text = fmt::format("sent by each of ranks {} in {} step\n", short_ranges(g.ranks),
                                 g.mean_traffic.empty() ? "a" : "the last");
  const auto at_most = [&](const std::string& name) {
    const auto found = g.most_traffic.find(name);
    return found == g.most_traffic.end() ? "" : fmt::format(", at most {} in a step", bytes_text(found->second));
  };
  const auto load = [&](const Traffic& t) {
    if (message_tag(t.name).collective != Collective::AllToAllV) return "";
    return measured_loads ? ", with the measured loads of experts" : ", if all experts get as many tokens";
  };
  const auto uneven = [&](const std::string& name) { return g.uneven_traffic.contains(name) ? " at most" : ""; };
  for (const Traffic& t : g.traffic)
    text += fmt::format("  {:<20} {:>14}{} in {} call{}{}{}\n", t.name, bytes_text(t.bytes), uneven(t.name), t.calls,
                        t.calls == 1 ? "" : "s", at_most(t.name), load(t));
  for (const auto& [name, bytes] : g.most_traffic) {
    if (std::ranges::find(g.traffic, name, &Traffic::name) == g.traffic.end())
      text += fmt::format("  {:<20} {:>14}{}\n", name, bytes_text(0), at_most(name));
  }
  if (g.traffic.empty()) text += "  nothing\n";
  if (!g.mean_traffic.empty()) text += "on average over all steps\n";
  for (const auto& [name, bytes] : g.mean_traffic)
    text += fmt::format("  {:<20} {:>14}{}\n", name, bytes_text(bytes), uneven(name));
  return text;
}

std::string stages_text(const Prediction& p) {
  std::string text = fmt::format("{:>5}  {:<24} {:>14} {:>14}\n", "stage", "ranks", "parameters", "memory");
  for (const RankGroup& g : p.groups) {
    text += fmt::format("{:>5}  {:<24} {:>14} {:>14}{}\n", g.stage, short_ranges(g.ranks), g.num_params,
                        bytes_text(g.device_bytes), &g == &p.worst_group() ? "  most" : "");
  }
  return text;
}

}  // namespace

std::string text(const Prediction& p, bool all) {
  const double tokens = static_cast<double>(p.tokens_per_step);
  const std::string active =
      p.num_active_params < p.num_params ? fmt::format(", of which a token uses {}", p.num_active_params) : "";
  std::string out = fmt::format("{} parameters{}; {} rank{} ({}) on {} node{}; {}\n", p.num_params, active,
                                p.world.ranks, p.world.ranks == 1 ? "" : "s", axes_text(p.mesh, p.expert_ranks),
                                p.world.nodes, p.world.nodes == 1 ? "" : "s", p.device);
  out += fmt::format("{} tokens per step; {:.4g} FLOPs per token, {:.4g} per step\n", p.tokens_per_step,
                     p.flops_per_token, p.flops_per_token * tokens);
  if (p.bubble_fraction > 0)
    out += fmt::format(
        "pipeline bubble: {:.1f} % of the ranks' time, if a backward pass takes as long as two forward passes\n",
        100 * p.bubble_fraction);
  if (p.groups.size() > 1) out += "\n" + stages_text(p);
  for (const RankGroup& g : p.groups) {
    if (all || &g == &p.worst_group()) out += "\n" + group_text(g, p) + "\n" + traffic_text(g, p.measured_loads);
  }
  out += "\nWhat is in the total is taken before the first step and kept.\n";
  if (p.fullest.host_bytes > 0)
    out += fmt::format("Host memory of node {}, the fullest: {}.\n", p.fullest.node, bytes_text(p.fullest.host_bytes));
  return out;
}

std::string json(const Prediction& p) {
  Json groups = Json::array();
  for (const RankGroup& g : p.groups) {
    Json memory = Json::object(), traffic = Json::object(), bounds = Json::object();
    for (const TagBytes& t : g.memory) {
      memory[t.tag] = t.bytes;
      if (t.bound != Bound::Exact) bounds[t.tag] = bound_text(t.bound);
    }
    for (const Traffic& t : g.traffic) traffic[t.name] = {{"calls", t.calls}, {"bytes", t.bytes}};
    groups.push_back({{"ranks", g.ranks},
                      {"stage", g.stage},
                      {"num_params", g.num_params},
                      {"memory_bytes", memory},
                      {"device_bytes", g.device_bytes},
                      {"host_bytes", g.host_bytes},
                      {"process_bytes", g.process_bytes},
                      {"momentary_bytes", g.momentary_bytes},
                      {"comm_per_step", traffic}});
    if (!bounds.empty()) groups.back()["memory_bounds"] = bounds;
    for (const std::string& name : g.uneven_traffic) groups.back()["comm_bounds"][name] = bound_text(Bound::AtMost);
    if (!g.mean_traffic.empty()) groups.back()["mean_comm_bytes_per_step"] = g.mean_traffic;
    if (!g.most_traffic.empty()) groups.back()["most_comm_bytes_per_step"] = g.most_traffic;
    if (g.files.empty()) continue;
    Json files = Json::object();
    for (const TagBytes& t : g.files) files[t.tag] = t.bytes;
    groups.back()["file_bytes"] = files;
    groups.back()["file_read_bytes"] = g.file_read_bytes;
    groups.back()["file_written_bytes"] = g.file_written_bytes;
  }
  Json fields({{"world_size", p.world.ranks},
               {"nodes", p.world.nodes},
               {"mesh", mesh_json(p.mesh)},
               {"device", p.device},
               {"num_params", p.num_params},
               {"num_active_params", p.num_active_params},
               {"tokens_per_step", p.tokens_per_step},
               {"flops_per_token", p.flops_per_token},
               {"flops_per_step", p.flops_per_token * static_cast<double>(p.tokens_per_step)},
               {"bubble_fraction", p.bubble_fraction},
               {"groups", groups},
               {"worst_group", p.worst},
               {"fullest_node", {{"node", p.fullest.node}, {"host_bytes", p.fullest.host_bytes}}}});
  if (p.expert_ranks > 1) fields["mesh"]["ep"] = p.expert_ranks;
  if (p.measured_loads) fields["expert_loads"] = "measured";
  return fields.dump();
}

std::string text(const StepTime& t) {
  std::string out;
  const auto line = [&](std::string_view name, double seconds, const char* what) {
    out += fmt::format("  {:<20} {:>12.3f} ms{}\n", name, 1e3 * seconds, what);
  };
  out += "time of a step\n";
  line("pipeline", t.pipeline_s, "  all passes, of all stages");
  line("  computing", t.compute_s, "  of the busiest stage");
  if (t.recompute_s > 0) line("  computed again", t.recompute_s, "  part of it");
  if (t.in_layer_communication_s > 0) line("  inside layers", t.in_layer_communication_s, "  sent by tp, sp and ep");
  line("communication", t.communication_s, t.hidden_s > 0 ? "  exposed" : "");
  if (t.hidden_s > 0) line("  hidden", t.hidden_s, "  behind the passes");
  line("optimizer", t.optimizer_s, "");
  line("publication", t.publish_s, "  of parameters");
  if (t.copies_s > 0) line("copies", t.copies_s, "  of what is offloaded, between the GPU and its host");
  if (t.files_s > 0) line("files", t.files_s, "  of what is offloaded, exposed");
  if (t.cores_s > 0) line("waiting for cores", t.cores_s, "  the node has fewer than its ranks have threads");
  line("step", t.step_s, "");
  if (t.bubble_fraction > 0) out += fmt::format("  {:<20} {:>12.1f} %\n", "bubble", 100 * t.bubble_fraction);
  for (size_t s = 0; s < t.stage_idle_s.size(); ++s) line(fmt::format("  idle, stage {}", s), t.stage_idle_s[s], "");
  out += fmt::format("  {:<20} {:>12.6g}\n  {:<20} {:>12.1f} %\n", "tokens/s", t.tokens_per_s, "MFU", 100 * t.mfu);
  if (t.lacks_offload)
    out += "  without what is copied between the GPU and the host for what is offloaded, and updates there\n";
  return out;
}

std::string json(const StepTime& t) {
  Json ops = Json::object();
  for (const auto& [name, op] : t.ops)
    ops[name] = {{"calls", op.calls}, {"flops", op.flops}, {"bytes", op.bytes}, {"seconds", op.seconds}};
  Json document({{"step_s", t.step_s},
                 {"pipeline_s", t.pipeline_s},
                 {"compute_s", t.compute_s},
                 {"recompute_s", t.recompute_s},
                 {"in_layer_communication_s", t.in_layer_communication_s},
                 {"communication_s", t.communication_s},
                 {"hidden_s", t.hidden_s},
                 {"optimizer_s", t.optimizer_s},
                 {"publish_s", t.publish_s},
                 {"cores_s", t.cores_s},
                 {"bubble_fraction", t.bubble_fraction},
                 {"tokens_per_s", t.tokens_per_s},
                 {"mfu", t.mfu},
                 {"messages_s", t.messages_s},
                 {"ops", ops}});
  if (!t.stage_idle_s.empty()) document["stage_idle_s"] = t.stage_idle_s;
  if (t.files_s > 0) document["files_s"] = t.files_s;
  if (t.copies_s > 0) document["copies_s"] = t.copies_s;
  if (t.lacks_offload) document["lacks_offload"] = true;
  return document.dump();
}

}  // namespace ds::memreport
