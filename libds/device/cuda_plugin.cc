// SPDX-License-Identifier: Apache-2.0
// Opens libds_cuda.so, which lies beside libds.so; DS_CUDA_PLUGIN names another file.

#include "device/cuda_plugin.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>

namespace ds {
namespace {

struct Loaded {
  const CudaPlugin* plugin = nullptr;
  std::string why;
  bool broken = false;
};

Loaded load() {
  std::string path;
  const char* named = std::getenv("DS_CUDA_PLUGIN");
  if (named != nullptr && *named == '\0') named = nullptr;
  if (named != nullptr) {
    path = std::filesystem::absolute(named);  // a bare name is a file here, not one to search for
  } else {
    Dl_info self{};
    dladdr(reinterpret_cast<const void*>(&make_cuda_device), &self);
    const std::filesystem::path beside = std::filesystem::path(self.dli_fname).parent_path();
    for (const char* folder : {".", "../lib"}) {  // the second: where a tool or test holds the library in itself
      path = (beside / folder / "libds_cuda.so").lexically_normal().string();
      if (std::filesystem::exists(path)) break;
    }
  }
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored))
    return {nullptr,
            named != nullptr ? fmt::format("there is no {} (DS_CUDA_PLUGIN)", path)
                             : fmt::format("there is no {}: this libds was built without CUDA", path),
            named != nullptr};
  // The plug-in brings half a gigabyte of libraries: a machine without a driver is spared them.
  if (named == nullptr && dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) == nullptr)
    return {nullptr, "there is no NVIDIA driver on this machine"};
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed: the CUDA runtime does not like that
  if (library == nullptr) return {nullptr, fmt::format("the CUDA plug-in does not load: {}", dlerror()), true};
  const auto entry = reinterpret_cast<CudaPluginEntry>(dlsym(library, kCudaPluginEntry));
  if (entry == nullptr) return {nullptr, fmt::format("{} is no CUDA plug-in of libds", path), true};
  const CudaPlugin* plugin = entry();
  if (std::string_view(plugin->build) != kCudaPluginBuild)
    return {nullptr, fmt::format("{} is of another build (\"{}\", not \"{}\")", path, plugin->build, kCudaPluginBuild),
            true};
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

std::unique_ptr<Device> make_cuda_device(int index, const CudaOptions& options) {
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
