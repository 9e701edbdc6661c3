// SPDX-License-Identifier: Apache-2.0
#pragma once
// The result of a job that has ended: exit status, the rank to blame, and the message. A pure function of the recorded
// events.

#include <span>
#include <string>

#include "ds/kernels/dtype.h"
#include "ds/launch.h"

namespace ds::launch {

inline constexpr int kCheckpointed =
    exit_code(Errc::Interrupted);  // returned by a rank that has saved its state and stopped

// The facts about a rank that the verdict needs.
struct RankCourse {
  RankEnd end;
  i64 end_ns = 0;  // by the launcher's clock
  bool started = false, ended = false;
  bool vanished = false;  // its shim closed the connection without a message

  bool failed() const noexcept { return end.status != 0 && end.status != kCheckpointed; }
};

struct JobCourse {
  std::span<const RankCourse> ranks;
  bool reader_gone = false;  // the reader of stdout has closed it
  int stop_signal = 0;       // the signal that stopped the job; 0: none
  int passed_signal = 0;     // another signal passed to the ranks
  int given_up = 0;          // status to return if the job could not continue without a rank's fault; 0: it could
  std::string given_up_why;
  std::string why;              // another reason for ending the job
  std::string suspect;          // the cause if mpirun ended the job or did not start it
  int mpirun_end = 0;           // a wait status
  bool mpirun_killed = false;   // by the launcher
  bool mpirun_aborted = false;  // it reported that it ended the job
  std::string mpirun_said;      // for the end of a message; may be empty
};

LaunchReport judge(const JobCourse& course);

}  // namespace ds::launch
