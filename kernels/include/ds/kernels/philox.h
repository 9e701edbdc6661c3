// SPDX-License-Identifier: Apache-2.0
#pragma once
// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC'11), the only source of
// randomness in the library. A value depends only on (seed, site, step, global element index), never on layout, thread
// count, launch geometry or recomputation.

#include <array>

#include "ds/kernels/dtype.h"

#ifdef __CUDACC__
#define DS_HOST_DEVICE __host__ __device__
#else
#define DS_HOST_DEVICE
#endif

namespace ds {

using PhiloxBlock = std::array<u32, 4>;

DS_HOST_DEVICE constexpr PhiloxBlock philox4x32(PhiloxBlock c, u32 key0, u32 key1) noexcept {
  for (int round = 0; round < 10; ++round) {
    const u64 p0 = u64{0xD2511F53u} * c[0];
    const u64 p1 = u64{0xCD9E8D57u} * c[2];
    c = {static_cast<u32>(p1 >> 32) ^ c[1] ^ key0, static_cast<u32>(p1), static_cast<u32>(p0 >> 32) ^ c[3] ^ key1,
         static_cast<u32>(p0)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// One stream of random numbers, addressed by element. `site` identifies the use (a parameter's id at init, a dropout
// site); `step` is optimizer step * accumulation + micro-batch, 0 for init.
struct RngKey {
  u32 seed = 0;
  u32 site = 0;
  u32 step = 0;

  // The four values of elements 4*block .. 4*block+3.
  DS_HOST_DEVICE constexpr PhiloxBlock block(u64 block) const noexcept {
    return philox4x32({static_cast<u32>(block), static_cast<u32>(block >> 32), step, 0}, seed, site);
  }
  DS_HOST_DEVICE constexpr u32 bits(u64 element) const noexcept { return block(element / 4)[element % 4]; }
  // In (0, 1): ((x >> 8) + 0.5) * 2^-24.
  DS_HOST_DEVICE static constexpr float uniform(u32 x) noexcept {
    return (static_cast<float>(x >> 8) + 0.5f) * 0x1p-24f;
  }
};

}  // namespace ds
