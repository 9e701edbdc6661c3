// SPDX-License-Identifier: Apache-2.0
// The way to other hosts: the arguments from mpirun, the commands that reach a host, and the data that goes there.
#include "launch/host_shim.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "ds/error.h"
#include "ds/launch.h"
#include "launch/environment.h"
#include "launch/process.h"

namespace ds::launch {
namespace host_shim_test {

using ::testing::ElementsAre;

OrtedCall call_of(const std::vector<std::string>& words) { return orted_call_of(words); }

TEST(OrtedCall, IsFoundAmongTheWordsForAnyShell) {
  const std::vector<std::vector<std::string>> forms = {
      {"ds-launch-host-12", "orted", "-mca", "ess", "\"env\""},   // bash, zsh, csh
      {"ds-launch-host-12", " orted", "-mca", "ess", "\"env\""},  // as bash's is written
      {"ds-launch-host-12", "( test ! -r ./.profile || . ./.profile;", " orted", "-mca", "ess", "\"env\"", ")"},  // sh
      {"ds-launch-host-12", "(", "test", "!", "-r", "./.profile", "||", ".", "./.profile;", "orted", "-mca", "ess",
       "\"env\"", ")"},                                                            // fish, taken for sh
      {"-q", "-p", "22", "ds-launch-host-12", "orted", "-mca", "ess", "\"env\""},  // with plm_rsh_args
      {"ds-launch-host-12", "OPAL_PREFIX=/usr ; export OPAL_PREFIX; orted", "-mca", "ess", "env"},
      {"ds-launch-host-12", "/usr/bin/orted", "-mca", "ess", "env"}};
  for (const std::vector<std::string>& words : forms) {
    const OrtedCall call = call_of(words);
    EXPECT_EQ(call.host, 12u);
    EXPECT_THAT(call.arguments, ElementsAre("-mca", "ess", "env"));
  }
}

TEST(OrtedCall, NeedsAHostAndOrted) {
  EXPECT_THROW(call_of({}), Error);
  EXPECT_THROW(call_of({"node-a", "orted"}), Error);
  EXPECT_THROW(call_of({"ds-launch-host-0"}), Error);
  EXPECT_THROW(call_of({"orted", "ds-launch-host-0"}), Error);
}

TEST(ThisMachine, HasItsNameItsAddressesAndAllThatLoopBack) {
  for (const std::string& host :
       {host_name(), std::string("127.0.0.1"), std::string("127.0.1.1"), std::string("10.1.2.3")})
    EXPECT_TRUE(is_this_machine(host, {"10.1.2.3"})) << host;
  EXPECT_FALSE(is_this_machine("10.1.2.4", {"10.1.2.3"}));
}

TEST(AgentCommand, SharesNoConnectionOfTheUsers) {
  EXPECT_THAT(agent_command("", "a", "c", 19.5),
              ElementsAre("ssh", "-x", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ControlMaster=no",
                          "-o", "ControlPath=none", "-o", "ClearAllForwardings=yes", "--", "a", "c"));
  EXPECT_THAT(agent_command("./agent", "a", "c", 20), ElementsAre("./agent", "a", "c"));
}

TEST(PortableEnvironment, LeavesOutWhatIsOfThisMachine) {
  EXPECT_THAT(portable_environment({"PATH=/bin", "HOME=/root", "TMP=/scratch", "KRB5CCNAME=FILE:/tmp/k", "PBS_JOBID=7",
                                    "SLURM_JOB_ID=8", "TMPLESS=1", "OMP_NUM_THREADS=2"}),
              ElementsAre("PATH=/bin", "TMPLESS=1", "OMP_NUM_THREADS=2"));
  EXPECT_THAT(portable_environment({"CUDA_VISIBLE_DEVICES=GPU-8932f937"}), ElementsAre());
  EXPECT_THAT(portable_environment({"CUDA_VISIBLE_DEVICES=0,MIG-8932f937"}), ElementsAre());
  EXPECT_THAT(portable_environment({"CUDA_VISIBLE_DEVICES=1,0"}), ElementsAre("CUDA_VISIBLE_DEVICES=1,0"));
}

TEST(Plan, RunsRanksWhereTheShellSaysThatWeAre) {
  const auto folder_for = [](const std::string& pwd) {
    LaunchOptions options;
    options.command = {"sh"};
    options.environment = {"PATH=" + std::string(std::getenv("PATH")), "PWD=" + pwd};
    return plan_launch(options).folder;
  };
  const std::string real = std::filesystem::current_path().string();
  EXPECT_EQ(folder_for("/proc/self/cwd"), "/proc/self/cwd");
  for (const char* wrong : {"", ".", "/", "/nowhere"}) EXPECT_EQ(folder_for(wrong), real);
}

}  // namespace host_shim_test
}  // namespace ds::launch
