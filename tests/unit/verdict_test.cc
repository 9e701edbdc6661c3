// SPDX-License-Identifier: Apache-2.0
// The exit status of a job that has ended, and the rank that is to blame.
#include "launch/verdict.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <csignal>
#include <string>
#include <vector>

namespace ds::launch {
namespace verdict_test {

using ::testing::IsEmpty;

// Two ranks that have run to their end.
struct Course {
  std::vector<RankCourse> ranks = std::vector<RankCourse>(2);
  JobCourse job;

  Course() {
    for (int r = 0; r < 2; ++r) {
      RankCourse& rank = ranks[static_cast<std::size_t>(r)];
      rank.end.rank = r;
      rank.end.host = "here";
      rank.end.pid = 100 + r;
      rank.end_ns = 10 + r;
      rank.started = rank.ended = true;
    }
  }
  Course& ends(std::size_t rank, int status, int signal = 0) {
    ranks[rank].end.status = status;
    ranks[rank].end.signal = signal;
    return *this;
  }
  LaunchReport judged() {
    job.ranks = ranks;
    return judge(job);
  }
};

TEST(Verdict, AllWell) {
  const LaunchReport report = Course().judged();
  EXPECT_EQ(report.status, 0);
  EXPECT_THAT(report.why, IsEmpty());
  EXPECT_EQ(report.culprit, -1);
  EXPECT_EQ(report.ranks.size(), 2u);
  EXPECT_EQ(report.ranks[1].pid, 101);
}

TEST(Verdict, StateThatWasSavedIsNoFailureButTold) {
  EXPECT_EQ(Course().ends(0, 75).judged().status, 75);
  EXPECT_EQ(Course().ends(0, 75).ends(1, 75).judged().status, 75);
  const LaunchReport report = Course().ends(0, 75).ends(1, 4).judged();
  EXPECT_EQ(report.status, 4);
  EXPECT_EQ(report.culprit, 1);
}

TEST(Verdict, TheRankThatFailedFirstInTime) {
  Course course;
  course.ends(0, 3).ends(1, 139, SIGSEGV);
  course.ranks[1].end_ns = 5;
  const LaunchReport report = course.judged();
  EXPECT_EQ(report.status, 139);
  EXPECT_EQ(report.culprit, 1);
  EXPECT_EQ(report.why, "rank 1 (here, pid 101) was killed by signal 11 (SIGSEGV)");
}

// Its peers noticed before its own shim did.
TEST(Verdict, AKilledRankFailedBeforePeersThatExitedBecauseOfIt) {
  Course course;
  course.ends(0, 1).ends(1, 137, SIGKILL);
  EXPECT_EQ(course.judged().culprit, 1);
  EXPECT_EQ(course.judged().status, 137);
  course.ranks[1].vanished = true;  // how it ended is a guess
  EXPECT_EQ(course.judged().culprit, 0);
}

TEST(Verdict, ARankThatTheSignalEndedWhichWasPassedOnIsNoCulprit) {
  Course course;
  course.ends(0, 128 + SIGUSR1, SIGUSR1).ends(1, 143, SIGTERM);
  course.ranks[1].end.stopped = true;
  course.job.passed_signal = SIGUSR1;
  LaunchReport report = course.judged();
  EXPECT_EQ(report.status, 128 + SIGUSR1);
  EXPECT_THAT(report.why, IsEmpty());
  course.ends(0, 128 + SIGUSR2, SIGUSR2);
  EXPECT_EQ(course.judged().culprit, 0);  // another signal
  course.ends(0, 1);
  EXPECT_EQ(course.judged().status, 1);  // it took the signal, and failed
}

TEST(Verdict, WhoWasToldToEndIsNoCulprit) {
  Course course;
  course.ends(0, 137, SIGKILL).ends(1, 1);
  course.ranks[0].end.stopped = true;
  const LaunchReport report = course.judged();
  EXPECT_EQ(report.status, 1);
  EXPECT_EQ(report.culprit, 1);
  EXPECT_EQ(report.why, "rank 1 (here, pid 101) exited with status 1");
}

TEST(Verdict, AsWeWereTold) {
  Course course;
  course.ends(0, 143, SIGTERM).ends(1, 143);
  course.job.stop_signal = SIGTERM;
  const LaunchReport report = course.judged();
  EXPECT_EQ(report.status, 143);
  EXPECT_THAT(report.why, IsEmpty());
  EXPECT_EQ(report.culprit, -1);
  // Ranks that saved their state, or did not care, decide themselves; one that fails otherwise is a culprit still.
  Course saved;
  saved.ends(0, 75).ends(1, 75);
  saved.job.stop_signal = SIGTERM;
  EXPECT_EQ(saved.judged().status, 75);
  Course careless;
  careless.job.stop_signal = SIGTERM;
  EXPECT_EQ(careless.judged().status, 0);
  Course failed;
  failed.ends(0, 143, SIGTERM).ends(1, 2);
  failed.job.stop_signal = SIGTERM;
  EXPECT_EQ(failed.judged().status, 2);
}

TEST(Verdict, StoppedBeforeRanksHadStarted) {
  Course course;
  course.ranks[1].started = false;
  course.job.stop_signal = SIGINT;
  EXPECT_EQ(course.judged().status, 130);
}

TEST(Verdict, AReaderThatIsGoneComesFirstThenWhatMadeUsGiveUp) {
  Course course;
  course.ends(0, 1);
  course.job.given_up = 4;
  course.job.given_up_why = "host a cannot be used";
  const LaunchReport given_up = course.judged();
  EXPECT_EQ(given_up.status, 4);
  EXPECT_EQ(given_up.why, "host a cannot be used");
  EXPECT_EQ(given_up.culprit, -1);
  course.job.reader_gone = true;
  EXPECT_EQ(course.judged().status, 141);
}

TEST(Verdict, AReasonOfOurOwn) {
  Course course;
  course.job.why = "cannot write to stdout: no space";
  course.job.mpirun_said = "; it said: x";
  EXPECT_EQ(course.judged().status, 1);
  EXPECT_EQ(course.judged().why, "cannot write to stdout: no space");
  course.ranks[0].started = course.ranks[1].started = false;  // then mpirun may know more
  EXPECT_EQ(course.judged().status, 1);
  EXPECT_EQ(course.judged().why, "cannot write to stdout: no space; it said: x");
}

TEST(Verdict, MpirunBeforeAnyOrAllRanksHadStarted) {
  Course course;
  course.ranks[1].started = false;
  course.job.mpirun_end = W_EXITCODE(213, 0);
  course.job.mpirun_said = "; it said: x";
  EXPECT_EQ(course.judged().status, 213);
  EXPECT_EQ(course.judged().why, "mpirun exited with status 213 before all ranks had started; it said: x");
  course.ranks[0].started = false;
  EXPECT_EQ(course.judged().why, "mpirun exited with status 213 before any rank had started; it said: x");
  course.job.mpirun_end = 0;
  EXPECT_EQ(course.judged().status, 1);
  course.job.suspect = "host a is lost";
  EXPECT_EQ(course.judged().status, 1);
  EXPECT_EQ(course.judged().why, "mpirun exited with status 0 before any rank had started; host a is lost; it said: x");
}

TEST(Verdict, MpirunEndedTheJob) {
  Course course;
  course.ends(1, 137, SIGKILL);
  course.ranks[1].end.stopped = true;
  course.job.mpirun_aborted = true;
  course.job.mpirun_end = W_EXITCODE(7, 0);
  EXPECT_EQ(course.judged().status, 7);
  EXPECT_EQ(course.judged().why, "mpirun ended the job; a rank may have returned without MPI_Finalize");
  course.job.suspect = "host a is lost";
  EXPECT_EQ(course.judged().status, 1);
  EXPECT_EQ(course.judged().why, "mpirun ended the job; host a is lost");
}

// A shim that is gone has taken its rank with it: that is the rank's failure, unless mpirun took the shim along.
TEST(Verdict, AShimThatVanished) {
  Course course;
  course.ends(0, 137, SIGKILL);
  course.ranks[0].vanished = true;
  EXPECT_EQ(course.judged().culprit, 0);
  course.job.mpirun_end = W_EXITCODE(0, SIGKILL);
  const LaunchReport report = course.judged();
  EXPECT_EQ(report.culprit, -1);
  EXPECT_EQ(report.status, 137);
  EXPECT_EQ(report.why, "mpirun was killed by signal 9 (SIGKILL)");
  course.job.mpirun_killed = true;  // by us, after the rank had failed
  EXPECT_EQ(course.judged().culprit, 0);
}

}  // namespace verdict_test
}  // namespace ds::launch
