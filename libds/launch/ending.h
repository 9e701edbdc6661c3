// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a job ends:
//
//   Running --a rank fails--> Ending --2 s--> Terminating --2 s--> Killing --2 s--> given up
//                             peers may       SIGTERM              SIGKILL
//                             say their part
//
// A rank that returns 75 (checkpoint committed) has not failed, but its peers get 30 s to follow. A second stop signal
// leads to Killing at once. The ranks of a lost host are lost, and the others end as after a failed rank. Events are
// recorded for the verdict (launch/verdict.h).

#include <string>

#include "comm/ended_ranks.h"
#include "launch/job.h"
#include "launch/mpirun.h"

namespace ds::launch {

enum class Phase { Running, Ending, Terminating, Killing, GivenUp };

class Ending {
 public:
  Ending(Job& job, Mpirun& mpirun);  // which outlive it

  Phase phase() const noexcept { return phase_; }
  i64 deadline_ns() const noexcept { return deadline_ns_; }  // the end of the phase; 0: none
  bool asked_to_stop() const noexcept { return stop_signal_ != 0; }
  bool gave_up() const noexcept { return given_up_.status != 0; }

  void expect_start();                                        // all ranks must start in time
  void started() noexcept { deadline_ns_ = 0; }               // all ranks have started
  void allow(i64 ns) { deadline_ns_ = monotonic_ns() + ns; }  // so much time from now
  void check_deadline();

  // Events. time_ns: by the launcher's clock.
  void rank_ended(Rank& rank, int status, i64 time_ns, bool stopped);
  void stop(int signal);          // the launcher got this signal
  void pass(int signal);          // for the ranks, which handle it; like stop() until all have started
  void was_suspended(i64 ns);     // together with the ranks: extends deadlines
  void aborted();                 // mpirun is ending the job
  void reap();                    // a child process may have ended
  void heed_chatter();            // mpirun has printed something
  void stdout_failed(int error);  // errno
  // The job cannot continue, and no rank is to blame.
  void give_up(int status, const std::string& why);
  // Names a cause in case mpirun ends the job or does not start it; the first one named counts.
  void suspect(const std::string& what);
  void hurry();  // shortens the deadline: a suspected failure will show soon

  LaunchReport report(int stdout_error) const;  // after the job has ended

 private:
  void enter(Phase phase, i64 grace_ns);
  std::string late() const;

  Job& job_;
  Mpirun& mpirun_;
  EndedRanks ended_ranks_;
  Phase phase_ = Phase::Running;
  i64 deadline_ns_ = 0;
  std::string why_, suspect_;
  struct {
    int status = 0;
    std::string why;
  } given_up_;
  int stop_signal_ = 0, passed_signal_ = 0;
  bool failed_ = false;  // some rank failed; returning 75 is no failure
  bool aborted_ = false;
};

}  // namespace ds::launch
