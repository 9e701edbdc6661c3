// SPDX-License-Identifier: Apache-2.0
#include "base/process_stat.h"

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

namespace ds {
namespace process_stat_test {

TEST(ProcessStat, AnEndIsKnownBeforeItIsWaitedFor) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::prctl(PR_SET_NAME, ") Z 1 (x");  // a name like fields
    ::raise(SIGSTOP);
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, WUNTRACED), pid);
  const ProcessStat living = process_stat(pid);
  EXPECT_EQ(living.state, 'T');
  EXPECT_FALSE(living.exiting);
  EXPECT_FALSE(has_ended(living, living.start));
  EXPECT_TRUE(has_ended(living, living.start + 1));  // another one had its number then

  ::kill(pid, SIGKILL);
  siginfo_t info{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT), 0);
  const ProcessStat ended = process_stat(pid);
  EXPECT_TRUE(ended.exiting);
  EXPECT_EQ(ended.start, living.start);
  EXPECT_TRUE(has_ended(ended, living.start));

  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_EQ(process_stat(pid).state, 0);
  EXPECT_FALSE(process_stat(pid).exiting);
}

}  // namespace process_stat_test
}  // namespace ds
