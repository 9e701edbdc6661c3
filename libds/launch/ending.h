// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a job ends:
//
//   Running --a rank fails--> Ending --2 s--> Terminating --2 s--> Killing --2 s--> given up
//                             peers may       SIGTERM              SIGKILL
//                             say their part
//
// A rank that returns 75 (checkpoint committed) is no failure, but its peers get 30 s to follow. The second stop signal
// goes to Killing at once. A host that is lost takes its ranks with it, and the rest ends as after a failed rank. What
// is seen on the way is kept for the verdict (launch/verdict.h).

#include <string>

#include "comm/ended_ranks.h"
#include "launch/job.h"
#include "launch/mpirun.h"

namespace ds::launch {

enum class Phase { Running, Ending, Terminating, Killing, GivenUp };

class Ending {
 public:
  Ending(Job& job, Mpirun& mpirun);  // which outlive us

  Phase phase() const noexcept { return phase_; }
  i64 deadline_ns() const noexcept { return deadline_ns_; }  // of the phase; 0: none
  bool asked_to_stop() const noexcept { return stop_signal_ != 0; }
  bool gave_up() const noexcept { return given_up_.status != 0; }

  void expect_start();                                        // of all ranks, in time
  void started() noexcept { deadline_ns_ = 0; }               // all ranks
  void allow(i64 ns) { deadline_ns_ = monotonic_ns() + ns; }  // more time, and no longer
  void check_deadline();

  // What happens on the way. time_ns: by our clock.
  void rank_ended(Rank& rank, int status, i64 time_ns, bool stopped);
  void stop(int signal);          // we were told to
  void pass(int signal);          // to the ranks, which may take it as they like; none are there yet: as stop()
  void was_suspended(i64 ns);     // with the ranks: for so long nothing could be done in time
  void aborted();                 // mpirun ends the job
  void reap();                    // children may have ended
  void heed_chatter();            // mpirun has said something
  void stdout_failed(int error);  // errno
  // The job cannot go on, by no rank's fault.
  void give_up(int status, const std::string& why);
  // Something is to blame if mpirun ends the job or does not begin it; who was suspected first remains so.
  void suspect(const std::string& what);
  void hurry();  // if what is suspected is so, we shall hear of it soon

  LaunchReport report(int stdout_error) const;  // of a job that has ended

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
  bool failed_ = false;  // some rank; not counting those that saved their state
  bool aborted_ = false;
};

}  // namespace ds::launch
