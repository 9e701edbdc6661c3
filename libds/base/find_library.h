// SPDX-License-Identifier: Apache-2.0
#pragma once
// Shared libraries of NVIDIA's that are opened at run time, wherever they are: where the dynamic loader finds them
// (LD_LIBRARY_PATH, a program's own path, ldconfig's list), in the folders of a CUDA toolkit, or in the packages that
// pip installs (nvidia/*/lib in a site-packages), as on machines where Python is what brought them.

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace ds {

// What the search depends on.
struct LibrarySurroundings {
  std::string root;                                // in front of absolute paths, for tests
  std::string path, cuda_home, venv, conda, home;  // PATH, CUDA_HOME, VIRTUAL_ENV, CONDA_PREFIX, HOME
  static LibrarySurroundings of_this_process();
};

// Folders, in the order in which they are searched behind the loader's own; only those that are there, each once.
std::vector<std::string> library_folders(const LibrarySurroundings& surroundings);

// Files to try for `soname`, in order: its plain name, which is the loader's choice, then what those folders hold.
std::vector<std::string> library_candidates(std::string_view soname, const std::vector<std::string>& folders);

struct OpenedLibrary {
  void* handle = nullptr;
  std::string file;   // where it is; empty: there is none
  std::string error;  // why there is none: one reason for each file that was tried
};
// The first candidate that loads and that serves: `refusal` says why an opened one does not, or nothing.
OpenedLibrary open_library(const std::vector<std::string>& candidates,
                           const std::function<std::string(void* handle)>& refusal = {});

// The file of an open library whose name begins so; empty: none is.
std::string file_of_open_library(std::string_view name);

}  // namespace ds
