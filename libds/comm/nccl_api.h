// SPDX-License-Identifier: Apache-2.0
#pragma once
// Our own declarations of the part of NCCL that libds uses, and the library, which is opened at run time, so that no
// NVIDIA header or library is needed to build or start libds. tests/unit/nccl_api_test.cc compares them with nccl.h.

#include <array>
#include <cstddef>

#include "base/check.h"

namespace ds::nccl {

struct CommImpl;
using Comm = CommImpl*;
using CudaStream = void*;  // cudaStream_t

enum class Result : int {
  Success = 0,
  UnhandledCudaError = 1,
  SystemError = 2,
  InternalError = 3,
  InvalidArgument = 4,
  InvalidUsage = 5,
  RemoteError = 6,
  InProgress = 7,
};
enum class DataType : int { Uint8 = 1, Int64 = 4 };
enum class RedOp : int { Sum = 0, Max = 2, Min = 3 };

struct UniqueId {
  std::array<char, 128> internal;
};

// ncclConfig_t of NCCL 2.14; later versions read `size` bytes and use their defaults for the rest.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};
constexpr int kOldestVersion = 21400;

// One member per entry point, with the same name.
struct Api {
  Result (*GetVersion)(int* version);
  Result (*GetUniqueId)(UniqueId* id);
  const char* (*GetErrorString)(Result);
  const char* (*GetLastError)(Comm);
  Result (*CommInitRankConfig)(Comm*, int ranks, UniqueId, int rank, Config*);
  Result (*CommGetAsyncError)(Comm, Result*);
  Result (*CommFinalize)(Comm);
  Result (*CommDestroy)(Comm);
  Result (*CommAbort)(Comm);
  Result (*GroupStart)();
  Result (*GroupEnd)();
  Result (*Send)(const void* source, size_t count, DataType, int peer, Comm, CudaStream);
  Result (*Recv)(void* target, size_t count, DataType, int peer, Comm, CudaStream);
  Result (*Broadcast)(const void* source, void* target, size_t count, DataType, int root, Comm, CudaStream);
  Result (*AllGather)(const void* source, void* target, size_t count, DataType, Comm, CudaStream);
  Result (*AllReduce)(const void* source, void* target, size_t count, DataType, RedOp, Comm, CudaStream);
};

// Opens libnccl.so.2, or the file that DS_NCCL_LIBRARY names. Throws Errc::Unavailable, which states what is missing.
Api load();

}  // namespace ds::nccl
