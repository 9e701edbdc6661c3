// SPDX-License-Identifier: Apache-2.0
#pragma once
// The one entry of libds_cuda.so. Device, Stream and OpTable must mean the same on both sides, so a plug-in serves the
// build that it comes from: `build` names it.

#include "device/device.h"

namespace ds {

struct CudaPlugin {
  const char* build;  // version and compiler of the plug-in
  // GPUs; 0 with the reason in `why` (a literal).
  int (*count)(const char** why) noexcept;
  // Null with the reason in `why`.
  Device* (*open)(int index, const CudaOptions& options, std::string& why) noexcept;
};

using CudaPluginEntry = const CudaPlugin* (*)() noexcept;
inline constexpr char kCudaPluginEntry[] = "ds_cuda_plugin";
inline constexpr char kCudaPluginBuild[] = DS_VERSION " " __VERSION__;

}  // namespace ds
