// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "base/json.h"
#include "ds/memreport.h"
#include "ds/units.h"

namespace ds::memreport {
namespace {

std::string_view name_of(CheckpointGranularity g) {
  return g == CheckpointGranularity::None ? "none" : g == CheckpointGranularity::Layer ? "layer" : "selective";
}

std::string row(const Arrangement& a) {
  return fmt::format("{:>4} {:>4} {:>4} {:>5} {:>5} {:>6} {:>6}  {:<10} {:<4} {:>13} {:>12.5g} {:>6.1f}\n", a.mesh.tp,
                     a.mesh.pp, a.mesh.sp, a.mesh.dp, a.stage, a.micro, a.accumulation, name_of(a.recompute),
                     a.sequence_parallel ? "yes" : "no", bytes_text(a.device_bytes), a.time.tokens_per_s,
                     100 * a.time.mfu);
}

Json arrangement_json(const Arrangement& a) {
  return {{"tp", a.mesh.tp},
          {"pp", a.mesh.pp},
          {"sp", a.mesh.sp},
          {"dp", a.mesh.dp},
          {"stage", a.stage},
          {"micro_batch", a.micro},
          {"accumulation", a.accumulation},
          {"checkpointing", name_of(a.recompute)},
          {"sequence_parallel", a.sequence_parallel},
          {"device_bytes", a.device_bytes},
          {"host_bytes", a.host_bytes},
          {"tokens_per_s", a.time.tokens_per_s},
          {"mfu", a.time.mfu},
          {"step_s", a.time.step_s},
          {"bubble_fraction", a.time.bubble_fraction},
          {"keys", a.keys}};
}

}  // namespace

std::string text(const FitResult& r, const FitOptions& o) {
  const std::string head =
      fmt::format("{:>4} {:>4} {:>4} {:>5} {:>5} {:>6} {:>6}  {:<10} {:<4} {:>13} {:>12} {:>6}\n", "tp", "pp", "sp",
                  "dp", "stage", "micro", "accum", "recompute", "rows", "memory", "tokens/s", "MFU %");
  std::string out = fmt::format("{} of memory on each of {} ranks of {} node{}: {} arrangements tried, {} fit\n\n",
                                bytes_text(o.memory), o.world.ranks, o.world.nodes, o.world.nodes == 1 ? "" : "s",
                                r.num_tried, r.num_fitting);
  out += fmt::format("as it is: it {}\n{}{}", r.present_fits ? "fits" : "does not fit", head, row(r.present));
  if (r.fitting.empty()) return out + "\nnothing fits: more ranks or more memory are needed\n";
  if (r.nearest) {
    out += fmt::format("\nwith the fewest changes it fits so\n{}{}", head, row(*r.nearest));
    for (const std::string& key : r.nearest->keys) out += fmt::format("  --set {}\n", key);
  }
  out += fmt::format("\nwhat fits, by predicted tokens/s\n{}", head);
  for (const Arrangement& a : r.fitting) out += row(a);
  out += "\nfor the first of them\n";
  for (const std::string& key : r.fitting.front().keys) out += fmt::format("  --set {}\n", key);
  out += fmt::format(
      "arranged so, micro-batches of up to {} would fit at the same batch, and up to {} layers of this width, "
      "{} parameters\n",
      r.largest_micro, r.largest_layers, r.largest_params);
  return out;
}

std::string json(const FitResult& r) {
  Json fitting = Json::array();
  for (const Arrangement& a : r.fitting) fitting.push_back(arrangement_json(a));
  Json json = {{"present", arrangement_json(r.present)},
               {"present_fits", r.present_fits},
               {"num_tried", r.num_tried},
               {"num_fitting", r.num_fitting},
               {"fitting", fitting},
               {"largest_micro_batch", r.largest_micro},
               {"largest_layers", r.largest_layers},
               {"largest_params", r.largest_params}};
  if (r.nearest) json["nearest"] = arrangement_json(*r.nearest);
  return json.dump();
}

}  // namespace ds::memreport
