// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "base/json.h"
#include "config/parallel.h"
#include "ds/memreport.h"
#include "ds/printable.h"
#include "ds/units.h"

namespace ds::memreport {
namespace {

std::string schedule_of(const Arrangement& a) {
  if (a.mesh.pp == 1 && a.schedule != PipelineSchedule::BreadthFirst) return "-";
  std::string name(schedule_name(a.schedule));
  if (a.schedule == PipelineSchedule::ZeroBubbleV) return name + fmt::format(" {:.3g}", a.memory_limit);
  if (a.virtual_stages > 1) name += fmt::format(" {}", a.virtual_stages);
  return name;
}

std::string_view offloaded_name(Offloaded what) noexcept {
  constexpr std::string_view names[] = {"-", "states nvme", "all nvme", "states cpu", "all cpu"};
  return names[static_cast<size_t>(what)];
}

// offloads, experts: with a column for what is offloaded, for the ranks that share experts.
std::string row(const Arrangement& a, bool offloads, bool experts) {
  return fmt::format("{:>4} {:>4} {:>4} {:>5} {}{:>5} {:>6} {:>6}  {:<16} {:<10} {:<4} {}{:>13} {:>12.5g} {:>6.1f}\n",
                     a.mesh.tp, a.mesh.pp, a.mesh.sp, a.mesh.dp, experts ? fmt::format("{:>4} ", a.ep) : "", a.stage,
                     a.micro, a.accumulation, schedule_of(a), granularity_name(a.recompute),
                     a.sequence_parallel ? "yes" : "no",
                     offloads ? fmt::format("{:<11} ", offloaded_name(a.offloaded)) : "", bytes_text(a.device_bytes),
                     a.time.tokens_per_s, 100 * a.time.mfu);
}

// As a shell reads it.
std::string quoted(const std::string& key) {
  if (key.find_first_of(" \t\"'$`\\*?&;|<>()#~!") == std::string::npos) return key;
  std::string out = "'";
  for (const char c : key) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

std::string lines(const std::vector<std::string>& keys) {
  std::string out;
  for (const std::string& key : keys) out += fmt::format("  --set {}\n", printable(quoted(key)));
  return out;
}

Json arrangement_json(const Arrangement& a) {
  Json json = {{"tp", a.mesh.tp},
               {"pp", a.mesh.pp},
               {"sp", a.mesh.sp},
               {"dp", a.mesh.dp},
               {"stage", a.stage},
               {"micro_batch", a.micro},
               {"accumulation", a.accumulation},
               {"schedule", schedule_name(a.schedule)},
               {"virtual_stages", a.virtual_stages},
               {"checkpointing", granularity_name(a.recompute)},
               {"sequence_parallel", a.sequence_parallel},
               {"device_bytes", a.device_bytes},
               {"host_bytes", a.host_bytes},
               {"tokens_per_s", a.time.tokens_per_s},
               {"mfu", a.time.mfu},
               {"step_s", a.time.step_s},
               {"bubble_fraction", a.time.bubble_fraction},
               {"keys", a.keys}};
  if (a.schedule == PipelineSchedule::ZeroBubbleV) json["memory_limit"] = a.memory_limit;
  if (a.ep > 1) json["ep"] = a.ep;
  if (a.offloaded != Offloaded::AsItIs) json["offloaded"] = offloaded_name(a.offloaded);
  return json;
}

Json largest_json(const LargestModel& m) { return {{"layers", m.layers}, {"params", m.params}, {"keys", m.keys}}; }

}  // namespace

std::string text(const FitResult& r, const FitOptions& o) {
  const auto over_ranks = [](const Arrangement& a) { return a.ep > 1; };
  const bool offloads = !o.disk.empty(), experts = std::ranges::any_of(r.fitting, over_ranks) ||
                                                   (r.present && over_ranks(*r.present)) ||
                                                   (r.nearest && over_ranks(*r.nearest));
  const std::string head =
      fmt::format("{:>4} {:>4} {:>4} {:>5} {}{:>5} {:>6} {:>6}  {:<16} {:<10} {:<4} {}{:>13} {:>12} {:>6}\n", "tp",
                  "pp", "sp", "dp", experts ? "  ep " : "", "stage", "micro", "accum", "schedule", "recompute", "rows",
                  offloads ? "offloaded   " : "", "memory", "tokens/s", "MFU %");
  std::string out = o.world.ranks == 1
                        ? fmt::format("{} of memory on one rank", bytes_text(o.memory))
                        : fmt::format("{} of memory on each of {} ranks of {} node{}", bytes_text(o.memory),
                                      o.world.ranks, o.world.nodes, o.world.nodes == 1 ? "" : "s");
  out += fmt::format(": {} arrangement{} tried, {} fit\n\n", r.num_tried, r.num_tried == 1 ? "" : "s", r.num_fitting);
  if (r.present) {
    out += fmt::format("as it is: it {}\n{}{}", r.present_fits ? "fits" : "does not fit", head,
                       row(*r.present, offloads, experts));
  } else {
    out += "as it is: it cannot be\n";
    for (const std::string& why : r.why_not) out += fmt::format("  {}\n", printable(why));
  }
  if (r.nearest)
    out += fmt::format("\nwith the fewest changes it fits so\n{}{}{}", head, row(*r.nearest, offloads, experts),
                       lines(r.nearest->keys));
  if (r.fitting.empty()) {
    out += r.num_tried == 0 ? "\nnothing fits: neither the batch nor the model can be cut over so many ranks\n"
                            : "\nnothing fits: more ranks or more memory are needed\n";
  } else {
    out += fmt::format("\nwhat fits, by predicted tokens/s\n{}", head);
    for (const Arrangement& a : r.fitting) out += row(a, offloads, experts);
    const Arrangement& first = r.fitting.front();
    out += fmt::format("\nfor the first of them\n{}", lines(first.keys));
    out += fmt::format(
        "arranged so, micro-batches of up to {} fit, {} samples in a step, or up to {} layers of this width, {:.4g} "
        "parameters\n",
        r.largest_micro, r.largest_micro * first.accumulation * first.mesh.data_size(), r.largest.layers,
        static_cast<double>(r.largest.params));
  }
  if (r.largest_of_all.layers > 0)
    out += fmt::format("\nthe largest model of this width: {} layers, {:.4g} parameters, arranged so\n{}",
                       r.largest_of_all.layers, static_cast<double>(r.largest_of_all.params),
                       lines(r.largest_of_all.keys));
  return out;
}

std::string json(const FitResult& r) {
  Json fitting = Json::array();
  for (const Arrangement& a : r.fitting) fitting.push_back(arrangement_json(a));
  Json json = {{"present", r.present ? arrangement_json(*r.present) : Json()},
               {"present_fits", r.present_fits},
               {"why_not", r.why_not},
               {"num_tried", r.num_tried},
               {"num_fitting", r.num_fitting},
               {"fitting", fitting},
               {"largest_micro_batch", r.largest_micro},
               {"largest_model", largest_json(r.largest)},
               {"largest_model_of_all", largest_json(r.largest_of_all)}};
  if (r.nearest) json["nearest"] = arrangement_json(*r.nearest);
  return json.dump();
}

}  // namespace ds::memreport
