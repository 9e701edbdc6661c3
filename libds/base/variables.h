// SPDX-License-Identifier: Apache-2.0
#pragma once
// The environment variables that libds reads; no other file reads any. An empty variable counts as not set and is "".

#include <string>

namespace ds::variables {

std::string isa();                  // DS_ISA: instruction set of the CPU kernels
std::string num_threads();          // OMP_NUM_THREADS
std::string temporary_directory();  // TMPDIR, else /tmp
std::string cuda_plugin();          // DS_CUDA_PLUGIN: a file
std::string nccl_library();         // DS_NCCL_LIBRARY: a file
bool gpus_are_chosen();  // CUDA_VISIBLE_DEVICES is set, possibly empty: a rank may see fewer GPUs than the node has

// Places of libraries (base/find_library.h).
std::string path();              // PATH
std::string cuda_home();         // CUDA_HOME
std::string python_venv();       // VIRTUAL_ENV
std::string conda_prefix();      // CONDA_PREFIX
std::string home();              // HOME
bool open_mpi_has_its_prefix();  // OPAL_PREFIX is set, possibly empty

// Set by launchers.
std::string job();                 // DS_JOB
int mpi_world_size(int fallback);  // OMPI_COMM_WORLD_SIZE
int mpi_local_rank(int fallback);  // OMPI_COMM_WORLD_LOCAL_RANK
int mpi_local_size(int fallback);  // OMPI_COMM_WORLD_LOCAL_SIZE
bool mpi_has_launcher();           // a launcher's variable, by which Open MPI's processes find each other, is set

}  // namespace ds::variables
