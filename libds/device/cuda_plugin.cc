// SPDX-License-Identifier: Apache-2.0
// Opens libds_cuda.so beside libds.so, or the file named by DS_CUDA_PLUGIN. Its libraries are searched in more places
// than the dynamic loader knows.

#include "device/cuda_plugin.h"

#include <dlfcn.h>

#include <filesystem>

#include "base/find_library.h"
#include "base/variables.h"
#include "device/product_choices.h"
#include "ds/log.h"

namespace ds {
namespace {

constexpr int kMostMissing = 8;  // libraries of a plug-in
// The library of matrix products that it is linked with; empty: this build has no CUDA.
constexpr const char* kProducts = DS_PRODUCTS_LIBRARY;

const std::vector<std::string>& folders() {
  static const std::vector<std::string> f = library_folders(LibrarySurroundings::of_this_process());
  return f;
}

// The loader names one library that it cannot find or load, or fails because the library it took (whose file it does
// not name) lacks a symbol. Opening another file of that library first makes everything linked with its name use that
// file.
void* open_with_libraries(const std::string& path, std::string& why) {
  void* plugin = nullptr;
  const auto opens = [&] {
    // Never closed: the CUDA runtime does not support it.
    plugin = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (plugin == nullptr) why = dlerror();
    return plugin != nullptr;
  };
  for (int missing = 0; !opens() && missing < kMostMissing; ++missing) {
    const std::string file = why.substr(0, why.find(": "));
    const bool is_incomplete = why.find(": undefined symbol: cublasLt") != std::string::npos;
    const std::string name = is_incomplete ? kProducts : std::filesystem::path(file).filename().string();
    if (name.empty() || (!is_incomplete && file == path)) return nullptr;
    std::vector<std::string> candidates = library_candidates(name, folders());
    const OpenedLibrary taken = is_incomplete ? open_library({name}) : OpenedLibrary();
    candidates.erase(candidates.begin());  // the loader has tried it
    std::erase(candidates, taken.file);
    if (taken.handle != nullptr) dlclose(taken.handle);
    const std::string first = is_incomplete ? fmt::format("{}, with {}", why, taken.file) : why;
    const OpenedLibrary found = open_library(candidates, [&](void*) {
      return is_incomplete && !opens() ? fmt::format("cannot be used either: {}", why) : "";
    });
    if (plugin != nullptr) return plugin;
    if (found.handle != nullptr) continue;
    why = first;
    why += found.error.empty() ? "; it is in none of these folders either: " : "; " + found.error;
    if (found.error.empty())
      why += folders().empty() ? "(none is there)" : fmt::format("{}", fmt::join(folders(), ", "));
    why += "; install it, or name its folder in LD_LIBRARY_PATH";
    return nullptr;
  }
  return plugin;
}

struct Loaded {
  const CudaPlugin* plugin = nullptr;
  std::string why;
  bool broken = false;
};

Loaded load() {
  std::string path;
  const std::string named = variables::cuda_plugin();
  if (!named.empty()) {
    path = std::filesystem::absolute(named);  // a bare name is a file here, not one to search for
  } else {
    Dl_info self{};
    dladdr(reinterpret_cast<const void*>(&make_cuda_device), &self);
    const std::filesystem::path beside = std::filesystem::path(self.dli_fname).parent_path();
    for (const char* folder : {".", "../lib"}) {  // "../lib" is for tools and tests that contain libds
      path = (beside / folder / "libds_cuda.so").lexically_normal().string();
      if (std::filesystem::exists(path)) break;
    }
  }
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored))
    return {nullptr,
            !named.empty() ? fmt::format("there is no {} (DS_CUDA_PLUGIN)", path)
                           : fmt::format("there is no {}: this libds was built without CUDA", path),
            !named.empty()};
  // The plug-in loads half a gigabyte of libraries; a machine without a driver need not load them.
  if (named.empty() && dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) == nullptr)
    return {nullptr, "there is no NVIDIA driver on this machine"};
  std::string why;
  void* library = open_with_libraries(path, why);
  if (library == nullptr) return {nullptr, fmt::format("the CUDA plug-in does not load: {}", why), true};
  if (const std::string file = file_of_open_library("libcublasLt.so"); !file.empty())
    log_message(LogLevel::Verbose, fmt::format("matrix products by {}", file));
  const auto entry = reinterpret_cast<CudaPluginEntry>(dlsym(library, kCudaPluginEntry));
  if (entry == nullptr) return {nullptr, fmt::format("{} is not a CUDA plug-in of libds", path), true};
  const CudaPlugin* plugin = entry();
  if (std::string_view(plugin->build) != kCudaPluginBuild)
    return {nullptr,
            fmt::format("{} is from another build (\"{}\", not \"{}\")", path, plugin->build, kCudaPluginBuild), true};
  return {plugin, ""};
}

const Loaded& loaded() {
  static const Loaded l = load();
  return l;
}

}  // namespace

int num_cuda_devices(std::string& why) {
  const Loaded& l = loaded();
  if (l.plugin == nullptr) {
    why = l.why;
    return 0;
  }
  const char* reason = "";
  bool broken = false;
  const int n = l.plugin->count(&reason, &broken);
  if (n == 0) why = reason;
  return n;
}

bool cuda_is_broken() {
  const Loaded& l = loaded();
  if (l.plugin == nullptr) return l.broken;
  const char* reason = "";
  bool broken = false;
  return l.plugin->count(&reason, &broken) == 0 && broken;
}

std::unique_ptr<Device> make_cuda_device(int index, const CudaOptions& given) {
  CudaOptions options = given;
  if (given.choices) {
    options.machine = [choices = given.choices](const std::string& machine) { choices->check_machine(machine); };
    options.known = [choices = given.choices](const std::string& product) { return choices->find(product); };
    options.chosen = [choices = given.choices](const std::string& product, const std::string& algorithm) {
      choices->add(product, algorithm);
    };
  }
  options.cudnn = library_candidates("libcudnn.so.9", folders());
  options.note = [](const std::string& text) { log_message(LogLevel::Verbose, text); };
  options.warn = [](const std::string& text) { log_message(LogLevel::Warning, text); };
  std::string why;
  const int count = num_cuda_devices(why);
  DS_CHECK(count > 0, Errc::Unavailable, "device \"cuda\": {}", why);
  DS_CHECK(index >= 0 && index < count, Errc::Unavailable,
           "device \"cuda\": there is no GPU {} among the {} of this node", index, count);
  Device* device = loaded().plugin->open(index, options, why);
  DS_CHECK(device != nullptr, Errc::Unavailable, "device \"cuda\": GPU {}: {}", index, why);
  return std::unique_ptr<Device>(device);
}

}  // namespace ds
