// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_api.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include "base/find_library.h"
#include "base/variables.h"
#include "ds/log.h"

namespace ds::nccl {

Api load() {
  const std::string named = variables::nccl_library();
  const std::vector<std::string> candidates =
      !named.empty() ? std::vector<std::string>{named}
                     : library_candidates("libnccl.so.2", library_folders(LibrarySurroundings::of_this_process()));
  Api api{};
  int version = 0;
  // Why a library is unsuitable; empty: it is suitable, and `api` refers to it.
  const auto refusal = [&](void* library) {
    std::string missing;
    const auto resolve = [&](auto& entry, const char* name) {
      entry = reinterpret_cast<std::remove_reference_t<decltype(entry)>>(dlsym(library, name));
      if (entry == nullptr && missing.empty()) missing = fmt::format("has no {}: libds needs NCCL 2.14 or later", name);
    };
    resolve(api.GetVersion, "ncclGetVersion");
    resolve(api.GetUniqueId, "ncclGetUniqueId");
    resolve(api.GetErrorString, "ncclGetErrorString");
    resolve(api.GetLastError, "ncclGetLastError");
    resolve(api.CommInitRankConfig, "ncclCommInitRankConfig");
    resolve(api.CommGetAsyncError, "ncclCommGetAsyncError");
    resolve(api.CommFinalize, "ncclCommFinalize");
    resolve(api.CommDestroy, "ncclCommDestroy");
    resolve(api.CommAbort, "ncclCommAbort");
    resolve(api.GroupStart, "ncclGroupStart");
    resolve(api.GroupEnd, "ncclGroupEnd");
    resolve(api.Send, "ncclSend");
    resolve(api.Recv, "ncclRecv");
    resolve(api.Broadcast, "ncclBroadcast");
    resolve(api.AllGather, "ncclAllGather");
    resolve(api.AllReduce, "ncclAllReduce");
    if (!missing.empty()) return missing;
    const bool told = api.GetVersion(&version) == Result::Success;
    return told && version >= kOldestVersion ? std::string()
                                             : fmt::format("is NCCL version {}; libds needs 2.14 or later", version);
  };
  const OpenedLibrary opened = open_library(candidates, refusal);  // never closed, since it has threads of its own
  DS_CHECK(opened.handle != nullptr, Errc::Unavailable, "NCCL cannot be loaded: {}{}", opened.error,
           !named.empty() ? " (DS_NCCL_LIBRARY)" : "; install it, or name the file in DS_NCCL_LIBRARY");
  log_message(LogLevel::Verbose, fmt::format("NCCL {} from {}", version, opened.file));
  return api;
}

}  // namespace ds::nccl
