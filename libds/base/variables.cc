// SPDX-License-Identifier: Apache-2.0
#include "base/variables.h"

#include <algorithm>
#include <cstdlib>

#include "base/launchers.h"

namespace ds::variables {
namespace {

bool is_set(const char* name) { return std::getenv(name) != nullptr; }

std::string text_of(const char* name, const char* fallback = "") {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : fallback;
}

int number_of(const char* name, int fallback) {
  const char* value = std::getenv(name);
  return value != nullptr ? std::atoi(value) : fallback;
}

}  // namespace

std::string isa() { return text_of("DS_ISA"); }
std::string num_threads() { return text_of("OMP_NUM_THREADS"); }
std::string temporary_directory() { return text_of("TMPDIR", "/tmp"); }
std::string cuda_plugin() { return text_of("DS_CUDA_PLUGIN"); }
std::string nccl_library() { return text_of("DS_NCCL_LIBRARY"); }
bool gpus_are_chosen() { return is_set("CUDA_VISIBLE_DEVICES"); }

std::string path() { return text_of("PATH"); }
std::string cuda_home() { return text_of("CUDA_HOME"); }
std::string python_venv() { return text_of("VIRTUAL_ENV"); }
std::string conda_prefix() { return text_of("CONDA_PREFIX"); }
std::string home() { return text_of("HOME"); }
bool open_mpi_has_its_prefix() { return is_set("OPAL_PREFIX"); }

std::string job() { return text_of("DS_JOB"); }
int mpi_world_size(int fallback) { return number_of("OMPI_COMM_WORLD_SIZE", fallback); }
int mpi_local_rank(int fallback) { return number_of("OMPI_COMM_WORLD_LOCAL_RANK", fallback); }
int mpi_local_size(int fallback) { return number_of("OMPI_COMM_WORLD_LOCAL_SIZE", fallback); }
bool mpi_has_launcher() {
  return std::ranges::any_of(kLaunchers, [](const Launcher& launcher) {
    return launcher.starts_mpi && is_set(launcher.rank.data());  // a literal, so it is NUL-terminated
  });
}

}  // namespace ds::variables
