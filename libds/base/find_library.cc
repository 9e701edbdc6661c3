// SPDX-License-Identifier: Apache-2.0
#include "base/find_library.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <filesystem>

#include "base/variables.h"

namespace ds {
namespace {

namespace fs = std::filesystem;

// Folders in `folder` whose names start with `prefix`, latest version first.
std::vector<fs::path> subfolders(const fs::path& folder, std::string_view prefix) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    std::error_code ignored;
    if (at->path().filename().string().starts_with(prefix) && at->is_directory(ignored)) found.push_back(at->path());
  }
  std::ranges::sort(found, [](const fs::path& a, const fs::path& b) {
    const std::string x = a.string(), y = b.string();
    return x.size() != y.size() ? x.size() > y.size() : x > y;  // python3.12 before python3.9
  });
  return found;
}

std::string file_of(void* handle) {
  const link_map* map = nullptr;
  return dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr ? map->l_name : "";
}

}  // namespace

LibrarySurroundings LibrarySurroundings::of_this_process() {
  return {.root = "",
          .path = variables::path(),
          .cuda_home = variables::cuda_home(),
          .venv = variables::python_venv(),
          .conda = variables::conda_prefix(),
          .home = variables::home()};
}

std::vector<std::string> library_folders(const LibrarySurroundings& s) {
  std::vector<std::string> folders;
  const auto add = [&](const fs::path& folder) {
    std::error_code error;
    if (fs::is_directory(folder, error) && std::ranges::find(folders, folder.string()) == folders.end())
      folders.push_back(folder.string());
  };
  const auto add_toolkit = [&](const fs::path& toolkit) {
    for (const char* lib : {"lib64", "lib", "targets/x86_64-linux/lib"}) add(toolkit / lib);
  };
  const auto add_packages = [&](const fs::path& packages) {
    for (const fs::path& package : subfolders(packages / "nvidia", "")) add(package / "lib");
  };
  // prefix/lib/python3.N/site-packages, or Debian's dist-packages.
  const auto add_pythons = [&](const fs::path& prefix) {
    for (const fs::path& python : subfolders(prefix / "lib", "python3")) {
      for (const char* packages : {"site-packages", "dist-packages"}) add_packages(python / packages);
    }
  };

  if (!s.cuda_home.empty()) add_toolkit(s.root + s.cuda_home);
  add_toolkit(s.root + "/usr/local/cuda");
  for (const fs::path& toolkit : subfolders(s.root + "/usr/local", "cuda-")) add_toolkit(toolkit);
  if (!s.venv.empty()) add_pythons(s.root + s.venv);
  if (!s.conda.empty()) {
    add_pythons(s.root + s.conda);
    add_toolkit(s.root + s.conda);  // its own packages are laid out like a toolkit
  }
  for (size_t begin = 0; begin < s.path.size();) {
    const size_t end = std::min(s.path.find(':', begin), s.path.size());
    const fs::path bin = s.root + s.path.substr(begin, end - begin);
    std::error_code error;
    if (bin.is_absolute() && fs::exists(bin / "python3", error)) {
      add_pythons(bin.parent_path());
      // A link to the Python of another prefix.
      const fs::path python = fs::canonical(bin / "python3", error);
      if (!error) add_pythons(python.parent_path().parent_path());
    }
    begin = end + 1;
  }
  if (!s.home.empty()) add_pythons(s.root + s.home + "/.local");
  add_pythons(s.root + "/usr/local");
  add_pythons(s.root + "/usr");
  return folders;
}

std::vector<std::string> library_candidates(std::string_view soname, const std::vector<std::string>& folders) {
  std::vector<std::string> files = {std::string(soname)};
  for (const std::string& folder : folders) {
    const fs::path file = fs::path(folder) / soname;
    std::error_code error;
    if (fs::exists(file, error)) files.push_back(file.string());
  }
  return files;
}

OpenedLibrary open_library(const std::vector<std::string>& candidates,
                           const std::function<std::string(void*)>& refusal) {
  OpenedLibrary library;
  const auto refuse = [&](const std::string& why) { library.error += (library.error.empty() ? "" : "; ") + why; };
  for (const std::string& candidate : candidates) {
    void* handle = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      const char* why = dlerror();
      refuse(why != nullptr ? why : candidate);
      continue;
    }
    std::string file = file_of(handle);
    if (file.empty()) file = candidate;
    if (const std::string why = refusal ? refusal(handle) : ""; !why.empty()) {
      refuse(file + " " + why);
      dlclose(handle);
      continue;
    }
    library.handle = handle;
    library.file = file;
    library.error.clear();
    break;
  }
  return library;
}

std::string file_of_open_library(std::string_view name) {
  struct Search {
    std::string_view name;
    std::string file;
  } search{name, {}};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto& s = *static_cast<Search*>(data);
        const std::string file = info->dlpi_name;
        if (!fs::path(file).filename().string().starts_with(s.name)) return 0;
        s.file = file;
        return 1;
      },
      &search);
  return search.file;
}

}  // namespace ds
