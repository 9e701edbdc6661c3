// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_api.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>

#include "base/find_library.h"
#include "ds/log.h"

namespace ds::nccl {

Api load() {
  const char* named = std::getenv("DS_NCCL_LIBRARY");
  if (named != nullptr && *named == '\0') named = nullptr;
  const std::vector<std::string> candidates =
      named != nullptr ? std::vector<std::string>{named}
                       : library_candidates("libnccl.so.2", library_folders(LibrarySurroundings::of_this_process()));
  const OpenedLibrary opened = open_library(candidates);  // never closed: it has threads of its own
  void* const library = opened.handle;
  DS_CHECK(library != nullptr, Errc::Unavailable, "NCCL does not load: {}{}", opened.error,
           named != nullptr ? " (DS_NCCL_LIBRARY)" : "; install it, or name the file in DS_NCCL_LIBRARY");
  const char* const file = named != nullptr ? named : opened.file.c_str();
  Api api{};
  const auto resolve = [&](auto& entry, const char* name) {
    entry = reinterpret_cast<std::remove_reference_t<decltype(entry)>>(dlsym(library, name));
    DS_CHECK(entry != nullptr, Errc::Unavailable, "{} has no {}: libds needs NCCL 2.14 or later", file, name);
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
  int version = 0;
  const Result r = api.GetVersion(&version);
  DS_CHECK(r == Result::Success && version >= kOldestVersion, Errc::Unavailable,
           "{} is NCCL version {}; libds needs 2.14 or later", file, version);
  log_message(LogLevel::Verbose, fmt::format("NCCL {} from {}", version, opened.file));
  return api;
}

}  // namespace ds::nccl
