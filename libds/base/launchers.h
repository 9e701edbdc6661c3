// SPDX-License-Identifier: Apache-2.0
#pragma once
// The launchers of parallel programs, and the variables that tell a process its place. Variables of an allocation
// (SLURM_NTASKS, PBS_NP, LSB_DJOB_NUMPROC) are not used, since they are also set for a single process inside it.

#include <array>
#include <string_view>

namespace ds {

struct Launcher {
  std::string_view name;        // of its command
  std::string_view size, rank;  // variables; no size: a rank above 0 shows that there are others
  // Set in a step that has a terminal. Only rank 0 is on the terminal, and it runs alone: the others have no input and
  // exit. Programs started from it inherit the variable, but not the terminal.
  std::string_view terminal = {};
  bool starts_mpi = false;  // Open MPI's processes find each other through it
};

inline constexpr std::array kLaunchers = {
    Launcher{.name = "mpirun", .size = "OMPI_COMM_WORLD_SIZE", .rank = "OMPI_COMM_WORLD_RANK", .starts_mpi = true},
    Launcher{.name = "srun", .size = "SLURM_STEP_NUM_TASKS", .rank = "SLURM_PROCID", .terminal = "SLURM_PTY_PORT"},
    Launcher{.name = "flux run", .size = "FLUX_JOB_SIZE", .rank = "FLUX_TASK_RANK"},
    Launcher{.name = "jsrun", .size = "JSM_NAMESPACE_SIZE", .rank = "JSM_NAMESPACE_RANK"},
    Launcher{.name = "MVAPICH's mpirun", .size = "MV2_COMM_WORLD_SIZE", .rank = "MV2_COMM_WORLD_RANK"},
    Launcher{.name = "MVAPICH's mpirun", .size = "MVP_COMM_WORLD_SIZE", .rank = "MVP_COMM_WORLD_RANK"},
    // Hydra of MPICH and Intel MPI, PALS, srun --mpi=pmi2
    Launcher{.name = "mpiexec", .size = "PMI_SIZE", .rank = "PMI_RANK", .starts_mpi = true},
    Launcher{.name = "PALS's mpiexec", .size = "PALS_SIZE", .rank = "PALS_RANKID"},
    Launcher{.name = "aprun", .size = "", .rank = "ALPS_APP_PE"},
    Launcher{.name = "a launcher with PMIx", .size = "", .rank = "PMIX_RANK", .starts_mpi = true}};

// Throws Errc::Config for several ranks if this process was not started by a launcher through which MPI finds the
// others, since MPI would treat it as a single process. Call this before MPI starts.
void require_mpi_launcher(int rank, int ranks);

}  // namespace ds
