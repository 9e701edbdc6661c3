// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a job that has ended comes to: which exit status, whose fault, and in which words. A pure function of what was
// seen while it ran.

#include <span>
#include <string>

#include "ds/kernels/dtype.h"
#include "ds/launch.h"

namespace ds::launch {

inline constexpr int kCheckpointed = exit_code(Errc::Interrupted);  // of a rank that has saved its state and stopped

// A rank, as far as the verdict goes.
struct RankCourse {
  RankEnd end;
  i64 end_ns = 0;  // by our clock
  bool started = false, ended = false;
  bool vanished = false;  // its shim closed the connection without a word

  bool failed() const noexcept { return end.status != 0 && end.status != kCheckpointed; }
};

struct JobCourse {
  std::span<const RankCourse> ranks;
  bool reader_gone = false;  // of our stdout
  int stop_signal = 0;       // what we were told to stop by; 0: nothing
  int passed_signal = 0;     // what else we passed on to the ranks
  int given_up = 0;          // the status to return when the job could not go on by no rank's fault; 0: it could
  std::string given_up_why;
  std::string why;              // what else made us end it
  std::string suspect;          // what is to blame if mpirun ended the job or did not begin it
  int mpirun_end = 0;           // as of waitpid
  bool mpirun_killed = false;   // by us
  bool mpirun_aborted = false;  // it ended the job
  std::string mpirun_said;      // as the end of a message; "": nothing
};

LaunchReport judge(const JobCourse& course);

}  // namespace ds::launch
