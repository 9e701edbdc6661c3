// SPDX-License-Identifier: Apache-2.0
#include "launch/verdict.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>

#include "ds/error.h"
#include "launch/process.h"

namespace ds::launch {
namespace {

// Whether a rank failed before another one. SIGKILL comes from outside, so the rank that it ended did not fail because
// of a peer; but on a loaded machine its peers' reports may arrive before that of its own shim.
bool failed_before(const RankCourse& a, const RankCourse& b) {
  const auto was_killed = [](const RankCourse& rank) { return rank.end.signal == SIGKILL && !rank.vanished; };
  return was_killed(a) != was_killed(b) ? was_killed(a) : a.end_ns < b.end_ns;
}

// A summary of the ends of all ranks.
struct Summary {
  const RankCourse* culprit = nullptr;  // the first rank that failed without being told to end
  bool stopped = false;                 // some rank failed when it was told to end
  bool ended_by_passed = false;         // some rank was ended by the signal that we passed on
  bool checkpointed = false;            // some rank saved its state
  bool all_started = true, none_started = true;
};

Summary summary_of(const JobCourse& course) {
  // Without mpirun, hosts may end shims before we know.
  const bool mpirun_died = exit_signal(course.mpirun_end) != 0 && !course.mpirun_killed;
  Summary sum;
  for (const RankCourse& rank : course.ranks) {
    sum.all_started &= rank.started;
    sum.none_started &= !rank.started;
    sum.checkpointed |= rank.end.status == kCheckpointed;
    if (!rank.failed()) continue;
    const bool by_passed = course.passed_signal != 0 && rank.end.signal == course.passed_signal;
    const bool as_told = rank.end.stopped || (rank.vanished && (mpirun_died || !rank.started)) ||
                         (course.stop_signal != 0 && rank.end.status == 128 + course.stop_signal) || by_passed;
    sum.stopped |= as_told;
    sum.ended_by_passed |= by_passed;
    if (!as_told && (sum.culprit == nullptr || failed_before(rank, *sum.culprit))) sum.culprit = &rank;
  }
  return sum;
}

// Why mpirun ended a job that no rank has broken.
std::string mpirun_why(const JobCourse& course, const Summary& sum) {
  const int status = exit_status(course.mpirun_end), signal = exit_signal(course.mpirun_end);
  if (course.mpirun_aborted && signal == 0)
    return "mpirun ended the job; " +
           (course.suspect.empty() ? "a rank may have returned without MPI_Finalize" : course.suspect);
  const char* when = sum.none_started   ? " before any rank had started"
                     : !sum.all_started ? " before all ranks had started"
                                        : "";
  return fmt::format("mpirun {}{}{}{}", how_ended(status, signal), when, course.suspect.empty() ? "" : "; ",
                     course.suspect);
}

}  // namespace

LaunchReport judge(const JobCourse& course) {
  const Summary sum = summary_of(course);
  LaunchReport report{.status = 0, .why = course.why, .culprit = -1, .culprit_wrote_last = false, .ranks = {}};
  for (const RankCourse& rank : course.ranks) report.ranks.push_back(rank.end);
  if (course.reader_gone) {
    report.status = 128 + SIGPIPE;
  } else if (course.given_up != 0) {
    report.status = course.given_up;
    report.why = course.given_up_why;
  } else if (sum.culprit != nullptr) {
    const RankEnd& end = sum.culprit->end;
    report.status = end.status;
    report.culprit = end.rank;
    report.why = fmt::format("rank {} ({}, pid {}) {}", end.rank, end.host, end.pid, how_ended(end.status, end.signal));
  } else if (course.stop_signal != 0 && (sum.stopped || !sum.all_started)) {
    report.status = 128 + course.stop_signal;
  } else if (sum.ended_by_passed) {
    report.status = 128 + course.passed_signal;
  } else if (!course.why.empty()) {
    report.status = 1;
    if (!sum.all_started) report.why += course.mpirun_said;
  } else if (sum.stopped || !sum.all_started) {
    const int mpirun_status = exit_status(course.mpirun_end);
    report.status = !course.suspect.empty() ? exit_code(Errc::Comm) : mpirun_status != 0 ? mpirun_status : 1;
    report.why = mpirun_why(course, sum) + course.mpirun_said;
  } else if (sum.checkpointed) {
    report.status = kCheckpointed;
  }
  return report;
}

}  // namespace ds::launch
