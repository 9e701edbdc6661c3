// SPDX-License-Identifier: Apache-2.0
#include "memreport/live.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <tuple>

#include "run/live_counters.h"
#include "run/run_record.h"

namespace ds::memreport {
namespace {

// Up to its zero, which a file of somebody's making may lack.
template <size_t N>
std::string text_of(const std::array<char, N>& text) {
  return {text.begin(), std::ranges::find(text, '\0')};
}

}  // namespace

LiveRank read_live(i64 pid) {
  const std::optional<run::LiveView> view = run::LiveView::open(pid);
  DS_CHECK(view, Errc::Config, "process {} is no ds-train that trains on this machine: there is no /dev/shm/{}", pid,
           run::live_name(pid));
  const run::LiveIdentity& who = view->identity();
  const std::optional<run::LiveRecord> r = view->read();
  DS_CHECK(r, Errc::Timeout, "process {} was stopped while it wrote its counters", pid);
  plan::TagBounds bounds = who.bounds;
  for (Bound& b : bounds) b = std::min(b, Bound::AtLeast);  // whatever is written there
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return {
      .pid = pid,
      .job = text_of(who.job),
      .rank = who.rank,
      .world_size = who.world_size,
      .mesh = {.dp = who.mesh.dp, .pp = who.mesh.pp, .tp = who.mesh.tp, .sp = who.mesh.sp, .workers = who.mesh.worker},
      .coord =
          {.dp = who.coord.dp, .pp = who.coord.pp, .tp = who.coord.tp, .sp = who.coord.sp, .worker = who.coord.worker},
      .directory = text_of(who.directory),
      .device = text_of(who.device),
      .step = r->step,
      .total_steps = who.total_steps,
      .loss = r->loss,
      .step_ms = r->step_ms,
      .tokens_per_s = r->tokens_per_s,
      .mfu = r->mfu,
      .comm_bytes = r->comm_bytes,
      .resident_bytes = r->resident_bytes,
      .base_bytes = who.base_bytes,
      .age_s = std::chrono::duration<double>(now - std::chrono::nanoseconds(r->updated_ns)).count(),
      .memory = run::memory_table(who.predicted, r->peak, bounds)};
}

std::vector<LiveRank> find_live() {
  std::vector<LiveRank> ranks;
  remove_abandoned();
  for (const i64 pid : run::live_pids()) {
    try {
      ranks.push_back(read_live(pid));
    } catch (const Error&) {  // it ends just now, or is of another version
    }
  }
  std::ranges::sort(ranks, {}, [](const LiveRank& r) { return std::tuple(r.job, r.rank, r.pid); });
  return ranks;
}

}  // namespace ds::memreport
