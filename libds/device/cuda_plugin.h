// SPDX-License-Identifier: Apache-2.0
#pragma once
// The only entry point of libds_cuda.so. Device, Stream and OpTable must be the same on both sides, so a plug-in works
// only with the build that it comes from, which `build` identifies.

#include "device/device.h"

namespace ds {

struct CudaPlugin {
  const char* build;  // version, and a hash of the headers and the compiler
  // Number of GPUs; 0 with the reason in `why` (a literal), and in `broken` whether the reason is a fault rather than a
  // missing GPU.
  int (*count)(const char** why, bool* broken) noexcept;
  // Null with the reason in `why`.
  Device* (*open)(int index, const CudaOptions& options, std::string& why) noexcept;
};

using CudaPluginEntry = const CudaPlugin* (*)() noexcept;
inline constexpr char kCudaPluginEntry[] = "ds_cuda_plugin";
inline constexpr char kCudaPluginBuild[] = DS_VERSION " " DS_PLUGIN_BUILD;

}  // namespace ds
