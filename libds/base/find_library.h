// SPDX-License-Identifier: Apache-2.0
#pragma once
// Finds NVIDIA's shared libraries, which are opened at run time: by the dynamic loader (LD_LIBRARY_PATH, a program's
// own path, ldconfig's list), in the folders of a CUDA toolkit, and in packages installed by pip (nvidia/*/lib in a
// site-packages).

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace ds {

// The inputs of the search.
struct LibrarySurroundings {
  std::string root;                                // prefix of absolute paths, for tests
  std::string path, cuda_home, venv, conda, home;  // PATH, CUDA_HOME, VIRTUAL_ENV, CONDA_PREFIX, HOME
  static LibrarySurroundings of_this_process();
};

// Existing folders in the order of the search, which comes after the loader's own; each once.
std::vector<std::string> library_folders(const LibrarySurroundings& surroundings);

// Files to try for `soname`, in order: its plain name, which is the loader's choice, then matches in the folders.
std::vector<std::string> library_candidates(std::string_view soname, const std::vector<std::string>& folders);

struct OpenedLibrary {
  void* handle = nullptr;
  std::string file;   // where it is; empty: none was found
  std::string error;  // if none was found, the reason for each file that was tried
};
// Opens the first candidate that loads and that `refusal` accepts; `refusal` returns why an open library is unsuitable,
// or an empty text.
OpenedLibrary open_library(const std::vector<std::string>& candidates,
                           const std::function<std::string(void* handle)>& refusal = {});

// The file of an open library whose name begins with `name`; empty if there is none.
std::string file_of_open_library(std::string_view name);

}  // namespace ds
