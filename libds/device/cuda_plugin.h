// SPDX-License-Identifier: Apache-2.0
#pragma once
// The one entry of libds_cuda.so. Device, Stream and OpTable must mean the same on both sides, so a plug-in serves the
// build that it comes from: `build` names it.

#include "device/device.h"

namespace ds {

struct CudaPlugin {
  const char* build;  // version, and a hash of the headers and the compiler
  // GPUs; 0 with the reason in `why` (a literal), and whether it is a fault or just that none is there.
  int (*count)(const char** why, bool* broken) noexcept;
  // Null with the reason in `why`.
  Device* (*open)(int index, const CudaOptions& options, std::string& why) noexcept;
};

using CudaPluginEntry = const CudaPlugin* (*)() noexcept;
inline constexpr char kCudaPluginEntry[] = "ds_cuda_plugin";
inline constexpr char kCudaPluginBuild[] = DS_VERSION " " DS_PLUGIN_BUILD;

}  // namespace ds
