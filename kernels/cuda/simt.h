// SPDX-License-Identifier: Apache-2.0
#pragma once
// The vocabulary in which kernels are written: thread indices, operations of a block and a warp, the tensor core's
// product, asynchronous copies, launches. nvcc maps it to the hardware; g++ maps it to sim/, which runs every thread of
// a block as a fiber, so that the same kernels can be tested without a GPU.
//
// Rules for kernels that work in both: blocks are one-dimensional with a multiple of 32 threads; all threads of a warp
// (of a block) call every warp_* (sync_block), in the same order; no thread returns before the last of these calls;
// shared memory is dynamic, one struct per kernel, obtained by block_shared<T>().

#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <bit>
#include <cmath>

#include "ds/kernels/ops.h"

#ifndef __CUDACC__
#include "cuda/sim/fibers.h"
#endif

namespace ds::cuda {

inline constexpr int kWarp = 32;

// Grid and block of one launch. `shared_bytes`: sizeof of the struct that the kernel uses with block_shared.
struct Launch {
  dim3 grid;
  int block = 0;
  size_t shared_bytes = 0;
};

#ifdef __CUDACC__

#define DS_DEVICE __device__ __forceinline__
// Before a loop: unroll it completely, so that arrays indexed by its variable become registers; or not at all, to avoid
// code growth.
#define DS_UNROLL _Pragma("unroll")
#define DS_NO_UNROLL _Pragma("unroll 1")
// Unrolls `n` iterations, n a constant expression.
#define DS_UNROLL_BY(n) DS_PRAGMA(unroll n)
#define DS_PRAGMA(text) _Pragma(#text)

DS_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
DS_DEVICE int block_size() { return static_cast<int>(blockDim.x); }
DS_DEVICE dim3 block_index() { return dim3(blockIdx.x, blockIdx.y, blockIdx.z); }
DS_DEVICE dim3 grid_size() { return dim3(gridDim.x, gridDim.y, gridDim.z); }

DS_DEVICE void sync_block() { __syncthreads(); }
DS_DEVICE void sync_warp() { __syncwarp(); }

template <class T>
DS_DEVICE T& block_shared() {
  extern __shared__ __align__(1024) unsigned char block_shared_bytes[];
  return *reinterpret_cast<T*>(block_shared_bytes);
}

// x of lane (this lane ^ mask), or of lane `lane`. T: 4 or 8 bytes, arithmetic.
template <class T>
DS_DEVICE T warp_shuffle_xor(T x, int mask) {
  return __shfl_xor_sync(0xFFFFFFFFu, x, mask);
}
template <class T>
DS_DEVICE T warp_shuffle(T x, int lane) {
  return __shfl_sync(0xFFFFFFFFu, x, lane);
}
// x of lane (this lane - delta); the own x if there is no such lane.
template <class T>
DS_DEVICE T warp_shuffle_up(T x, int delta) {
  return __shfl_up_sync(0xFFFFFFFFu, x, static_cast<unsigned>(delta));
}
DS_DEVICE u32 warp_ballot(bool x) { return __ballot_sync(0xFFFFFFFFu, x); }

// d[16,8] += a[16,16] b[16,8] in fp32, with the fragments of PTX's mma.m16n8k16.row.col; T: bf16 or f16.
template <class T>
DS_DEVICE void mma_16x8x16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]);
template <>
DS_DEVICE void mma_16x8x16<bf16>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
DS_DEVICE void mma_16x8x16<f16>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

DS_DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Loads four 8x8 matrices of 16-bit elements from shared memory. Lane i provides the address of row i%8 of matrix i/8
// (16 bytes, aligned) and receives, for matrix j in r[j], elements (lane/4, 2*(lane%4)) and the next; transposed:
// elements (2*(lane%4), lane/4) and the one below.
DS_DEVICE void load_matrices(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
DS_DEVICE void load_matrices_transposed(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// Copies 16 bytes from global to shared memory, or zeros unless `wanted` (then `from` is not read). They have arrived
// after copies_wait<n> and a barrier, where n is the number of later committed groups that may still be in flight.
DS_DEVICE void copy_async_16(void* to_shared, const void* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)), "l"(from),
               "r"(wanted ? 16 : 0)
               : "memory");
}
DS_DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
DS_DEVICE void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Integer atomics on global memory only: their results do not depend on the order.
DS_DEVICE void atomic_add(i64* to, i64 x) {
  atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(x));
}
DS_DEVICE void atomic_max(i64* to, i64 x) { atomicMax(reinterpret_cast<long long*>(to), static_cast<long long>(x)); }
DS_DEVICE u32 atomic_add(u32* to, u32 x) { return atomicAdd(to, x); }

// sum + the products of the four signed bytes of a and b.
DS_DEVICE i32 dot4(u32 a, u32 b, i32 sum) { return __dp4a(static_cast<int>(a), static_cast<int>(b), sum); }

DS_DEVICE float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DS_DEVICE float fast_log2(float x) { return __log2f(x); }
// Within one unit in the last place; subnormals count as zero.
DS_DEVICE float fast_rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DS_DEVICE float reciprocal_sqrt(float x) { return __frsqrt_rn(x); }
// x y, rounded by itself: never part of a fused multiply-add.
DS_DEVICE float rounded_product(float x, float y) { return __fmul_rn(x, y); }

// Two floats rounded to nearest even, the first in the low half.
template <class T>
DS_DEVICE u32 pack2(float low, float high);
template <>
DS_DEVICE u32 pack2<bf16>(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
template <>
DS_DEVICE u32 pack2<f16>(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
template <class T>
DS_DEVICE float2 unpack2(u32 x);
template <>
DS_DEVICE float2 unpack2<bf16>(u32 x) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000u));
}
template <>
DS_DEVICE float2 unpack2<f16>(u32 x) {
  float a, b;
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(a), "=f"(b) : "r"(x));
  return make_float2(a, b);
}

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), const Launch& l, cudaStream_t stream, Args... args) {
  if (l.grid.x == 0 || l.grid.y == 0 || l.grid.z == 0) return;
  if (l.shared_bytes > 48 * 1024) {
    cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                         static_cast<int>(l.shared_bytes));
  }
  kernel<<<l.grid, static_cast<unsigned>(l.block), l.shared_bytes, stream>>>(static_cast<Params>(args)...);
}

#else  // g++

#define DS_DEVICE inline
#define DS_UNROLL
#define DS_NO_UNROLL
#define DS_UNROLL_BY(n)
#define __launch_bounds__(...)

inline int thread_index() { return sim::thread_index(); }
inline int block_size() { return sim::block().size; }
inline dim3 block_index() { return sim::block().index; }
inline dim3 grid_size() { return sim::block().grid; }
inline void sync_block() { sim::sync_block(); }
inline void sync_warp() { sim::warp_exchange(0); }

template <class T>
T& block_shared() {
  sim::check_shared(sizeof(T));
  return *reinterpret_cast<T*>(sim::block().shared);
}

template <class T>
T warp_shuffle_xor(T x, int mask) {
  return sim::warp_exchange(x)[(thread_index() % kWarp) ^ mask];
}
template <class T>
T warp_shuffle(T x, int lane) {
  return sim::warp_exchange(x)[lane % kWarp];
}
template <class T>
T warp_shuffle_up(T x, int delta) {
  const int lane = thread_index() % kWarp;
  return sim::warp_exchange(x)[lane >= delta ? lane - delta : lane];
}
inline u32 warp_ballot(bool x) {
  const auto lanes = sim::warp_exchange(x);
  u32 bits = 0;
  for (size_t i = 0; i < kWarp; ++i) bits |= lanes[i] ? 1u << i : 0u;
  return bits;
}

template <class T>
float2 unpack2(u32 x) {
  return make_float2(to_float(T{static_cast<u16>(x)}), to_float(T{static_cast<u16>(x >> 16)}));
}
template <class T>
u32 pack2(float low, float high) {
  return from_float<T>(low).bits | static_cast<u32>(from_float<T>(high).bits) << 16;
}

template <class T>
void mma_16x8x16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  struct Fragments {
    float2 a[4], b[2];
  };
  const auto lanes = sim::warp_exchange(Fragments{
      {unpack2<T>(a[0]), unpack2<T>(a[1]), unpack2<T>(a[2]), unpack2<T>(a[3])}, {unpack2<T>(b[0]), unpack2<T>(b[1])}});
  // This lane's sums: rows `row` and row + 8 of a, columns `col` and col + 1 of b. A lane holds the terms k of each of
  // its rows and columns in pairs: 2 * (lane % 4) and the next, then the same 8 later.
  const size_t lane = static_cast<size_t>(thread_index() % kWarp), row = lane / 4, col = 2 * (lane % 4);
  // Products of one instruction are summed first: close enough to the hardware.
  float sum00 = 0, sum01 = 0, sum10 = 0, sum11 = 0;
  const auto add = [](float& sum, float2 x, float2 y) {
    sum += x.x * y.x;
    sum += x.y * y.y;
  };
  for (size_t half = 0; half < 2; ++half) {
    for (size_t pair = 0; pair < 4; ++pair) {
      const Fragments& fa = lanes[row * 4 + pair];
      const float2 low = fa.a[2 * half], high = fa.a[2 * half + 1];
      const float2 left = lanes[col * 4 + pair].b[half], right = lanes[(col + 1) * 4 + pair].b[half];
      add(sum00, low, left);
      add(sum01, low, right);
      add(sum10, high, left);
      add(sum11, high, right);
    }
  }
  d[0] += sum00;
  d[1] += sum01;
  d[2] += sum10;
  d[3] += sum11;
}

inline void load_matrices(u32 (&r)[4], const void* row) {
  const auto rows = sim::warp_exchange(row);
  const size_t lane = static_cast<size_t>(thread_index() % kWarp);
  for (size_t j = 0; j < 4; ++j) r[j] = static_cast<const u32*>(rows[8 * j + lane / 4])[lane % 4];
  sync_warp();  // the rows may be overwritten from here on
}
inline void load_matrices_transposed(u32 (&r)[4], const void* row) {
  const auto rows = sim::warp_exchange(row);
  const size_t lane = static_cast<size_t>(thread_index() % kWarp);
  for (size_t j = 0; j < 4; ++j) {
    const auto element = [&](size_t i) {
      return u32{static_cast<const u16*>(rows[8 * j + 2 * (lane % 4) + i])[lane / 4]};
    };
    r[j] = element(0) | element(1) << 16;
  }
  sync_warp();
}

inline void copy_async_16(void* to_shared, const void* from, bool wanted) {
  sim::copy_async(to_shared, wanted ? from : nullptr, 16);
}
inline void copies_commit() { sim::copies_commit(); }
template <int kPending>
void copies_wait() {
  sim::copies_wait(kPending);
}

inline void atomic_add(i64* to, i64 x) { *to += x; }
inline void atomic_max(i64* to, i64 x) { *to = *to > x ? *to : x; }
inline u32 atomic_add(u32* to, u32 x) {
  const u32 before = *to;
  *to += x;
  return before;
}

inline i32 dot4(u32 a, u32 b, i32 sum) {
  for (int i = 0; i < 32; i += 8) sum += static_cast<std::int8_t>(a >> i) * static_cast<std::int8_t>(b >> i);
  return sum;
}

// Errs as far as the documentation allows the hardware to, up or down depending on x (exact if the result is a power of
// two, as there), so tests that pass here pass there. exp2 and log2: 2 units in the last place, for log2 between 1/2
// and 2 of the absolute value 1; reciprocals: 1.
inline float as_far_off_as(float y, float x, float error) {
  return (std::bit_cast<u32>(x) * 2654435761u) >> 31 != 0 ? y + error : y - error;
}
inline float fast_exp2(float x) {
  const float y = std::exp2(x);
  return x == std::floor(x) || !std::isfinite(y) ? y : as_far_off_as(y, x, y * 0x1p-22f);
}
inline float fast_log2(float x) {
  const float y = std::log2(x);
  if (!std::isfinite(y) || y == std::floor(y)) return y;
  return as_far_off_as(y, x, (x > 0.5f && x < 2.0f ? 1.0f : std::fabs(y)) * 0x1p-22f);
}
inline float fast_rcp(float x) {
  const float y = 1.0f / x;
  const u32 mantissa = std::bit_cast<u32>(x) << 9;
  return mantissa == 0 || !std::isfinite(y) ? y : as_far_off_as(y, x, y * 0x1p-23f);
}
inline float reciprocal_sqrt(float x) { return 1.0f / std::sqrt(x); }
inline float rounded_product(float x, float y) { return x * y; }

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), const Launch& l, cudaStream_t, Args... args) {
  sim::enqueue([=] { sim::run_grid(l.grid, l.block, l.shared_bytes, [&] { kernel(static_cast<Params>(args)...); }); });
}

#endif

}  // namespace ds::cuda
