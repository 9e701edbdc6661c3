// SPDX-License-Identifier: Apache-2.0
// Our declarations of NCCL against nccl.h, if that is installed, and the error without the library.

#include "comm/nccl_api.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <type_traits>

#if __has_include(<nccl.h>) && __has_include(<cuda_runtime.h>)
#include <nccl.h>

namespace ds::nccl {
namespace nccl_api_test {

// One calling convention: both pointers, or enumerations and structures of one size, or one type.
template <class A, class B>
constexpr bool passes_alike() {
  if constexpr (std::is_pointer_v<A> || std::is_pointer_v<B>) {
    return std::is_pointer_v<A> && std::is_pointer_v<B>;
  } else if constexpr (std::is_enum_v<A> || std::is_enum_v<B>) {
    return std::is_enum_v<A> && std::is_enum_v<B> && sizeof(A) == sizeof(B);
  } else if constexpr (std::is_class_v<A> || std::is_class_v<B>) {
    return std::is_class_v<A> && std::is_class_v<B> && sizeof(A) == sizeof(B) && alignof(A) == alignof(B) &&
           std::is_trivially_copyable_v<A> && std::is_trivially_copyable_v<B>;
  } else {
    return std::is_same_v<A, B>;
  }
}

template <class R, class... A, class S, class... B>
constexpr bool alike(R (*)(A...), S (*)(B...)) {
  if constexpr (sizeof...(A) != sizeof...(B)) {
    return false;
  } else {
    return passes_alike<R, S>() && (passes_alike<A, B>() && ...);
  }
}
#define DS_SAME_ENTRY(name) static_assert(alike(decltype(Api::name){}, static_cast<decltype(&nccl##name)>(nullptr)))
DS_SAME_ENTRY(GetVersion);
DS_SAME_ENTRY(GetUniqueId);
DS_SAME_ENTRY(GetErrorString);
DS_SAME_ENTRY(GetLastError);
DS_SAME_ENTRY(CommInitRankConfig);
DS_SAME_ENTRY(CommGetAsyncError);
DS_SAME_ENTRY(CommFinalize);
DS_SAME_ENTRY(CommDestroy);
DS_SAME_ENTRY(CommAbort);
DS_SAME_ENTRY(GroupStart);
DS_SAME_ENTRY(GroupEnd);
DS_SAME_ENTRY(Send);
DS_SAME_ENTRY(Recv);
DS_SAME_ENTRY(Broadcast);
DS_SAME_ENTRY(AllGather);
DS_SAME_ENTRY(AllReduce);

#define DS_SAME_VALUE(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs))
DS_SAME_VALUE(Result::Success, ncclSuccess);
DS_SAME_VALUE(Result::UnhandledCudaError, ncclUnhandledCudaError);
DS_SAME_VALUE(Result::SystemError, ncclSystemError);
DS_SAME_VALUE(Result::InternalError, ncclInternalError);
DS_SAME_VALUE(Result::InvalidArgument, ncclInvalidArgument);
DS_SAME_VALUE(Result::InvalidUsage, ncclInvalidUsage);
DS_SAME_VALUE(Result::RemoteError, ncclRemoteError);
DS_SAME_VALUE(Result::InProgress, ncclInProgress);
DS_SAME_VALUE(DataType::Uint8, ncclUint8);
DS_SAME_VALUE(DataType::Int64, ncclInt64);
DS_SAME_VALUE(RedOp::Sum, ncclSum);
DS_SAME_VALUE(RedOp::Max, ncclMax);
DS_SAME_VALUE(RedOp::Min, ncclMin);

static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId) && sizeof(UniqueId) == NCCL_UNIQUE_ID_BYTES);
static_assert(offsetof(Config, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(Config, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(Config, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(Config, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(sizeof(Config) <= sizeof(ncclConfig_t));
static_assert(kOldestVersion == NCCL_VERSION(2, 14, 0));

TEST(NcclApi, TheConfigurationIsMarkedAsTheirs) {
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  EXPECT_EQ(Config{}.magic, theirs.magic);
}

}  // namespace nccl_api_test
}  // namespace ds::nccl
#endif

namespace ds::nccl {
namespace nccl_api_test {

TEST(NcclApi, AMissingLibraryIsUnavailable) {
  setenv("DS_NCCL_LIBRARY", "/nowhere/libnccl.so", 1);
  try {
    load();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::Unavailable);
    EXPECT_THAT(e.what(), ::testing::HasSubstr("/nowhere/libnccl.so"));
  }
}

TEST(NcclApi, AnotherLibraryIsRefusedByName) {
  setenv("DS_NCCL_LIBRARY", "libm.so.6", 1);
  try {
    load();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::Unavailable);
    EXPECT_THAT(e.what(), ::testing::HasSubstr("libm.so.6 has no ncclGetVersion"));
  }
}

}  // namespace nccl_api_test
}  // namespace ds::nccl
