// SPDX-License-Identifier: Apache-2.0
// Environments that show that another launcher started several copies of a process.
#include <gtest/gtest.h>

#include "ds/launchers.h"

namespace ds {
namespace launchers_test {

struct Case {
  std::vector<std::string> environment;
  std::string name = {}, variable = {};  // "": a process alone
  int processes = 0;
  bool on_terminal = false;
};

void PrintTo(const Case& c, std::ostream* out) {
  for (const std::string& variable : c.environment) *out << variable << ' ';
}

class Launchers : public ::testing::TestWithParam<Case> {};

TEST_P(Launchers, OneOfSeveralCopiesIsToldFromAProcessAlone) {
  const auto& [environment, name, variable, processes, on_terminal] = GetParam();
  const std::optional<OtherLauncher> found = other_launcher(environment, on_terminal);
  ASSERT_EQ(found.has_value(), !name.empty());
  if (!found) return;
  EXPECT_EQ(found->name, name);
  EXPECT_EQ(found->variable, variable);
  EXPECT_EQ(found->processes, processes);
}

INSTANTIATE_TEST_SUITE_P(
    Several, Launchers,
    ::testing::Values(
        Case{{"OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK=0"}, "mpirun", "OMPI_COMM_WORLD_SIZE=2", 2},
        Case{{"SLURM_STEP_NUM_TASKS=4", "SLURM_PROCID=0"}, "srun", "SLURM_STEP_NUM_TASKS=4", 4},
        Case{{"SLURM_PROCID=3"}, "srun", "SLURM_PROCID=3", 0},
        Case{{"SLURM_STEP_NUM_TASKS=4", "SLURM_PROCID=1", "SLURM_PTY_PORT=40000"}, "srun", "SLURM_STEP_NUM_TASKS=4", 4},
        Case{{"SLURM_STEP_NUM_TASKS=4", "SLURM_PROCID=0", "SLURM_PTY_PORT=40000"}, "srun", "SLURM_STEP_NUM_TASKS=4", 4},
        Case{{"SLURM_STEP_NUM_TASKS=4", "SLURM_PROCID=0"}, "srun", "SLURM_STEP_NUM_TASKS=4", 4, true},
        Case{{"FLUX_JOB_SIZE=2", "FLUX_TASK_RANK=0"}, "flux run", "FLUX_JOB_SIZE=2", 2},
        Case{{"JSM_NAMESPACE_SIZE=6"}, "jsrun", "JSM_NAMESPACE_SIZE=6", 6},
        Case{{"MV2_COMM_WORLD_SIZE=2"}, "MVAPICH's mpirun", "MV2_COMM_WORLD_SIZE=2", 2},
        Case{{"MVP_COMM_WORLD_SIZE=2"}, "MVAPICH's mpirun", "MVP_COMM_WORLD_SIZE=2", 2},
        Case{{"PMI_RANK=0", "PMI_SIZE=2"}, "mpiexec", "PMI_SIZE=2", 2},
        Case{{"PALS_SIZE=2"}, "PALS's mpiexec", "PALS_SIZE=2", 2},
        Case{{"PALS_RANKID=1"}, "PALS's mpiexec", "PALS_RANKID=1", 0},
        Case{{"ALPS_APP_PE=1"}, "aprun", "ALPS_APP_PE=1", 0},
        Case{{"PMIX_RANK=1"}, "a launcher with PMIx", "PMIX_RANK=1", 0}));

INSTANTIATE_TEST_SUITE_P(
    Alone, Launchers,
    ::testing::Values(Case{{}, ""}, Case{{"OMPI_COMM_WORLD_SIZE=1", "OMPI_COMM_WORLD_RANK=0", "PMIX_RANK=0"}, ""},
                      // in a batch script, in a shell of salloc, in a step of one task, in a step that has a terminal
                      Case{{"SLURM_JOB_ID=7", "SLURM_NTASKS=8", "SLURM_NPROCS=8", "SLURM_PROCID=0"}, ""},
                      Case{{"SLURM_NTASKS=8", "SLURM_NNODES=2"}, ""},
                      Case{{"SLURM_NTASKS=1", "SLURM_STEP_NUM_TASKS=1", "SLURM_PROCID=0"}, ""},
                      Case{{"SLURM_STEP_NUM_TASKS=4", "SLURM_PROCID=0", "SLURM_PTY_PORT=40000"}, "", "", 0, true},
                      Case{{"PBS_NP=8", "PBS_TASKNUM=2", "LSB_DJOB_NUMPROC=8"}, ""}, Case{{"FLUX_URI=local:///x"}, ""},
                      Case{{"ALPS_APP_PE=0"}, ""}, Case{{"SLURM_STEP_NUM_TASKS="}, ""},
                      Case{{"SLURM_STEP_NUM_TASKS=many"}, ""},
                      Case{{"XSLURM_STEP_NUM_TASKS=2", "SLURM_STEP_NUM_TASKS_X=2"}, ""}));

}  // namespace launchers_test
}  // namespace ds
