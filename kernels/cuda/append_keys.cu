// SPDX-License-Identifier: Apache-2.0
// New keys and values to their places in pages, as they are or as codes: a warp for each row and head. Every operation
// is rounded individually, as in quantize.

#include <bit>
#include <cstdint>

#include "cuda/context.h"
#include "cuda/vectors.h"

namespace ds::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarp;

template <class T>
struct AppendArgs {
  void* cache;
  float* scale;
  const T* x;
  i64 rows, G, D, row_step, head_step;
  AttentionParams params;
  bool coded;
};

template <class T>
__global__ void __launch_bounds__(kThreads) append_kernel(AppendArgs<T> a) {
  const i64 n = i64{block_index().x} * kWarps + thread_index() / kWarp;
  const int lane = thread_index() % kWarp;
  if (n >= a.rows * a.G) return;  // a whole warp
  const i64 row = n / a.G, g = n - row * a.G;
  const AttentionSequences& sequences = a.params.sequences;
  const i64 s = sequences.of_row(row), key = sequences.key_of(s, row), page = a.params.page;
  const i64 place = a.params.pages[sequences.tables[s] * sequences.stride + key / page] * page + key % page;
  const i64 to = place * a.G + g;
  const T* const x = a.x + row * a.row_step + g * a.head_step;
  if (!a.coded) {
    for (i64 d = lane; d < a.D; d += kWarp) static_cast<T*>(a.cache)[to * a.D + d] = x[d];
    return;
  }
  u32 largest = 0;
  for (i64 d = lane; d < a.D; d += kWarp) {
    const u32 bits = std::bit_cast<u32>(load(x + d)) & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const u32 other = warp_shuffle_xor(largest, mask);
    largest = other > largest ? other : largest;
  }
  const float scale = block_scale(largest, {.bits = 8, .block = 0});
  if (lane == 0) a.scale[to] = scale;
  for (i64 d = lane; d < a.D; d += kWarp) {
    const float code = std::isnan(scale) ? 0.0f : std::rint(load(x + d) / scale);
    static_cast<std::int8_t*>(a.cache)[to * a.D + d] = static_cast<std::int8_t>(code);
  }
}

}  // namespace

void append_keys(TensorView cache, TensorView x, const AttentionParams& p, Stream& stream) noexcept {
  Context& c = context(stream);
  const i64 rows = x.dim(1), G = x.dim(2), n = rows * G;
  const auto run = [&]<class T>(T) {
    const AppendArgs<T> args{cache.data, cache.scale, x.as<T>(),   rows, G,
                             x.dim(3),   x.stride[1], x.stride[2], p,    cache.dtype == DType::I8};
    launch(append_kernel<T>, {dim3(static_cast<unsigned>(ceil_div(n, kWarps))), kThreads, 0}, c.stream(), args);
  };
  switch (x.dtype) {
    case DType::F32: run(float{}); break;
    case DType::BF16: run(bf16{}); break;
    case DType::F16: run(f16{}); break;
    default: return c.fail("not a work dtype", "append_keys");
  }
  c.check(cudaGetLastError(), "append_keys");
}

}  // namespace ds::cuda
