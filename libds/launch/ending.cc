// SPDX-License-Identifier: Apache-2.0
#include "launch/ending.h"

#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <utility>

#include "base/limits.h"
#include "ds/log.h"
#include "launch/environment.h"

namespace ds::launch {
namespace {

constexpr i64 kStartTimeout = 120 * kSecond;  // for all shims to come
constexpr i64 kEndGrace = 2 * kSecond;        // between the steps of the picture
constexpr i64 kCheckpointGrace = 30 * kSecond;

}  // namespace

Ending::Ending(Job& job, Mpirun& mpirun)
    : job_(job),
      mpirun_(mpirun),
      ended_ranks_(value_or(parse_environment(job.plan.environment), "DS_JOB", ""), job.plan.ranks) {}

void Ending::expect_start() { deadline_ns_ = job_.start_ns + kStartTimeout; }

void Ending::rank_ended(Rank& rank, int status, i64 time_ns, bool stopped) {
  job_.finish(rank, status, time_ns, stopped);
  // On several hosts a waiting rank waits until its time limit.
  if (job_.hosts.empty() && !job_.all_ended()) ended_ranks_.add(rank.end.rank, status == 0);
  if (status == 0 || failed_ || gave_up() || phase_ > Phase::Ending) return;
  failed_ = status != kCheckpointed;
  enter(Phase::Ending, failed_ ? kEndGrace : kCheckpointGrace);
}

void Ending::stop(int signal) {
  const bool again = std::exchange(stop_signal_, signal) != 0;
  if (again || !job_.all_started()) return enter(Phase::Killing, kEndGrace);
  if (signal == SIGINT)
    log_message(LogLevel::Warning, "interrupted: waiting for the ranks to end; interrupt again to end them by force");
  job_.signal(signal, false);
  job_.signal(SIGCONT, false);  // a rank that is stopped could not end
}

void Ending::pass(int signal) {
  if (!job_.all_started()) return stop(signal);
  passed_signal_ = signal;
  job_.signal(signal, false);
}

void Ending::was_suspended(i64 ns) {
  if (deadline_ns_ != 0) deadline_ns_ += ns;
}

void Ending::aborted() {
  aborted_ = true;
  if (phase_ == Phase::Running) enter(Phase::Ending, kEndGrace);
}

void Ending::reap() {
  int status = 0;
  for (pid_t pid; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;) {
    if (pid != mpirun_.pid()) continue;
    mpirun_.ended(status);
    if (job_.all_ended()) continue;
    for (Rank& rank : job_.ranks)
      if (rank.channel == nullptr) rank.ended = true;  // will never come
    if (phase_ != Phase::Killing) enter(Phase::Killing, kEndGrace);
  }
}

// A shim has ended before it came to us. Those that come after mpirun's SIGCONT learn of it by its SIGTERM only.
void Ending::heed_chatter() {
  if (phase_ != Phase::Running || job_.any_started() || !mpirun_.gave_up()) return;
  why_ = "mpirun gave up before any rank had started";
  enter(Phase::Killing, kEndGrace);
}

// A reader of our stdout that went away, or a full disk, ends the job as it would end a single program.
void Ending::stdout_failed(int error) {
  if (phase_ >= Phase::Terminating) return;
  if (error != EPIPE) why_ = fmt::format("cannot write to stdout: {}", system_reason(error));
  enter(Phase::Terminating, kEndGrace);
}

void Ending::give_up(int status, const std::string& why) {
  const auto failed = [](const Rank& r) { return r.ended && !r.vanished && !r.end.stopped && r.failed(); };
  if (gave_up() || std::any_of(job_.ranks.begin(), job_.ranks.end(), failed)) return;
  given_up_ = {.status = status, .why = why};
  if (phase_ <= Phase::Ending) enter(job_.any_started() ? Phase::Ending : Phase::Killing, kEndGrace);
}

void Ending::suspect(const std::string& what) {
  if (suspect_.empty()) suspect_ = what;
}

void Ending::hurry() { deadline_ns_ = std::min(deadline_ns_, monotonic_ns() + kEndGrace); }

void Ending::enter(Phase phase, i64 grace_ns) {
  phase_ = phase;
  allow(grace_ns);
  if (phase == Phase::Terminating) {
    job_.signal(SIGTERM, true);
    job_.signal(SIGCONT, true);
  }
  if (phase == Phase::Killing) {
    job_.signal(SIGKILL, true);
    if (!job_.all_started()) mpirun_.kill();
  }
}

void Ending::check_deadline() {
  if (deadline_ns_ == 0 || monotonic_ns() < deadline_ns_) return;
  switch (phase_) {
    case Phase::Running:
      why_ = suspect_;
      if (why_.empty()) why_ = late();
      enter(Phase::Killing, kEndGrace);
      break;
    case Phase::Ending: enter(Phase::Terminating, kEndGrace); break;
    case Phase::Terminating: enter(Phase::Killing, kEndGrace); break;
    default: phase_ = Phase::GivenUp;
  }
}

std::string Ending::late() const {
  std::string why = "mpirun did not start all ranks within 120 s";
  for (const char* joint = "; nothing came from "; const Host& host : job_.hosts) {
    if (host.channel != nullptr) continue;
    why += joint + host.text();
    joint = ", ";
  }
  return why;
}

LaunchReport Ending::report(int stdout_error) const {
  const std::vector<RankCourse> ranks(job_.ranks.begin(), job_.ranks.end());
  return judge({.ranks = ranks,
                .reader_gone = stdout_error == EPIPE,
                .stop_signal = stop_signal_,
                .passed_signal = passed_signal_,
                .given_up = given_up_.status,
                .given_up_why = given_up_.why,
                .why = why_,
                .suspect = suspect_,
                .mpirun_end = mpirun_.wait_status(),
                .mpirun_killed = mpirun_.was_killed(),
                .mpirun_aborted = aborted_,
                .mpirun_said = mpirun_.quoted()});
}

}  // namespace ds::launch
