// SPDX-License-Identifier: Apache-2.0
// "ds-links/1" read back, and the time of messages by it.

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/json.h"
#include "memreport/step_time.h"

namespace ds::memreport {
namespace {

// Messages that a collective's slowest rank waits for one after the other, as rings and chains send them.
double steps_of(Collective collective, int ranks) {
  switch (collective) {
    case Collective::AllReduce: return 2.0 * (ranks - 1);
    case Collective::ReduceScatter:
    case Collective::AllGather:
    case Collective::AllToAll:
    case Collective::AllToAllV: return ranks - 1;
    default: return 1;
  }
}

}  // namespace

Links read_links(std::string_view json, std::string_view name) {
  const Json root = parse_json(json, name, {.places = false}).root;
  constexpr i64 kMostBytes = std::numeric_limits<i64>::max();
  const auto count = [](const Json& object, const char* key) {
    return static_cast<int>(json_integer(object, key, 0, i64{1} << 24));
  };
  const auto bytes = [](const Json& object, const char* key) {
    return object.contains(key) ? json_integer(object, key, 0, kMostBytes) : 0;
  };
  try {
    DS_CHECK(root.is_object() && root.value("schema", "") == "ds-links/1", Errc::Config,
             "no document of the schema ds-links/1");
    Links links;
    links.ranks = count(root, "ranks");
    links.hosts = narrow<int>(std::max<size_t>(1, root.at("hosts").size()));
    for (const Json& l : root.at("links"))
      links.links.push_back({.backend = l.at("backend").get<std::string>(),
                             .link = l.at("class").get<std::string>(),
                             .latency_s = l.at("latency_s").get<double>(),
                             .bandwidth = l.at("bandwidth_bytes_per_s").get<double>(),
                             .pairs = l.contains("pairs") ? count(l, "pairs") : 0});
    for (const Json& o : root.at("operations"))
      links.operations.push_back({.op = o.at("op").get<std::string>(),
                                  .backend = o.at("backend").get<std::string>(),
                                  .form = o.value("form", ""),
                                  .ranks = count(o, "ranks"),
                                  .alpha_s = o.at("alpha_s").get<double>(),
                                  .beta_s_per_byte = o.at("beta_s_per_byte").get<double>(),
                                  .error = o.value("rms_relative_error", 0.0),
                                  .min_bytes = bytes(o, "min_bytes"),
                                  .max_bytes = bytes(o, "max_bytes")});
    return links;
  } catch (const Json::exception& e) {
    throw Error(Errc::Config, fmt::format("{}: {}", name, json_reason(e)));
  } catch (const Error& e) {
    throw Error(e.code(), fmt::format("{}: {}", name, e.what()));
  }
}

AxisGroup group_of(const MeshShape& mesh, Axis axis, int ranks_per_node) {
  // rank = (((worker * pp_size + pp) * dp_size + dp) * sp_size + sp) * tp_size + tp.
  const int stage = mesh.dp * mesh.sp * mesh.tp;
  const int stride = axis == Axis::Outer ? mesh.pp * stage : axis == Axis::Pp ? stage : axis == Axis::Tp ? 1 : mesh.tp;
  const int ranks = axis == Axis::Outer ? mesh.workers
                    : axis == Axis::Tp  ? mesh.tp
                    : axis == Axis::Sp  ? mesh.sp
                    : axis == Axis::Pp  ? mesh.pp
                                        : mesh.dp * mesh.sp;
  return {.ranks = ranks, .over_network = ranks > 1 && stride * ranks > ranks_per_node};
}

AxisGroup group_of(const MeshShape& mesh, const DpSplit& split, int ranks_per_node) {
  const bool inner = split.along == DpSplit::Along::Inner;
  const int ranks = (inner ? split.inner : mesh.dp / split.inner) * mesh.sp, span = inner ? ranks : mesh.dp * mesh.sp;
  return {.ranks = ranks, .over_network = ranks > 1 && span * mesh.tp > ranks_per_node};
}

double message_seconds(const Links& links, Collective collective, const AxisGroup& group, const CommCount& count) {
  if (group.ranks == 1 || count.calls == 0 || collective == Collective::Recv) return 0;  // the sender's time is both's
  if (collective == Collective::OneBit || collective == Collective::SparseGather) collective = Collective::AllGather;
  const double calls = static_cast<double>(count.calls), bytes = static_cast<double>(count.bytes);
  const std::string_view measured = collective == Collective::Send ? "sendrecv" : collective_name(collective);
  const commbench::AlphaBeta* best = nullptr;
  for (const commbench::AlphaBeta& o : links.operations) {
    if (o.op != measured || o.ranks < 2 || (links.hosts > 1) != group.over_network) continue;
    if (best == nullptr || std::abs(o.ranks - group.ranks) < std::abs(best->ranks - group.ranks)) best = &o;
  }
  if (best != nullptr) {
    const double alpha = best->alpha_s * steps_of(collective, group.ranks) / steps_of(collective, best->ranks);
    return calls * alpha + bytes * best->beta_s_per_byte;
  }
  const auto link = std::ranges::find_if(
      links.links, [&](const commbench::Link& l) { return (l.link == "network") == group.over_network; });
  DS_CHECK(link != links.links.end(), Errc::Config, "links: nothing is known of {} over {} ranks {}",
           collective_name(collective), group.ranks, group.over_network ? "of several nodes" : "of one node");
  return calls * steps_of(collective, group.ranks) * link->latency_s + bytes / link->bandwidth;
}

}  // namespace ds::memreport
