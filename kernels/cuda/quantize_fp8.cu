// SPDX-License-Identifier: Apache-2.0
// Operands of FP8 products. A block has a tile of 128 x 128 elements, which it reads once: each thread keeps eight
// groups of eight elements in registers, from the search for the largest ones to the codes. Transposed codes are
// exchanged through shared memory, so that reads and writes are both long pieces.

#include "cuda/context.h"
#include "cuda/vectors.h"

namespace ds::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kSide = static_cast<int>(kFp8Block), kGroup = 8;
constexpr int kThreadsOfRow = kSide / kGroup, kRowsAtOnce = kThreads / kThreadsOfRow, kGroups = kSide / kRowsAtOnce;

struct QuantizeFp8Shared {
  u32 of_warp[kWarps][kSide];  // largest elements: of a warp, by column; or in [0], of rows
  u32 largest[kSide];          // by row of the tile of codes
  alignas(16) u8 codes[kSide][kSide + 16];
};

template <class T>
struct QuantizeFp8Args {
  u8* codes;
  float* scales;
  const T* x;
  i64 x_rows, x_columns, x_stride;
  Fp8Layout layout;
  bool e5m2, transposed, wide;
};

DS_DEVICE u32 larger(u32 a, u32 b) { return a > b ? a : b; }

// Leaves in shared.largest the largest |x| of the block of each row of codes.
DS_DEVICE void find_largest(QuantizeFp8Shared& shared, const float (&y)[kGroups][kGroup], Fp8Blocks blocks,
                            bool transposed) {
  const int t = thread_index(), warp = t / kWarp, lane = t % kWarp;
  const auto bits = [&](int n, int e) { return std::bit_cast<u32>(y[n][e]) & 0x7FFFFFFFu; };
  if (blocks == Fp8Blocks::Rows && !transposed) {
    DS_UNROLL
    for (int n = 0; n < kGroups; ++n) {
      u32 most = 0;
      DS_UNROLL
      for (int e = 0; e < kGroup; ++e) most = larger(most, bits(n, e));
      for (int mask = kThreadsOfRow / 2; mask > 0; mask /= 2) most = larger(most, warp_shuffle_xor(most, mask));
      if (t % kThreadsOfRow == 0) shared.largest[n * kRowsAtOnce + t / kThreadsOfRow] = most;
    }
  } else {
    u32 all = 0;
    DS_UNROLL
    for (int e = 0; e < kGroup; ++e) {
      u32 most = 0;
      DS_UNROLL
      for (int n = 0; n < kGroups; ++n) most = larger(most, bits(n, e));
      most = larger(most, warp_shuffle_xor(most, kThreadsOfRow));
      all = larger(all, most);
      if (lane < kThreadsOfRow) shared.of_warp[warp][lane * kGroup + e] = most;
    }
    if (blocks == Fp8Blocks::Squares) {
      for (int mask = kThreadsOfRow / 2; mask > 0; mask /= 2) all = larger(all, warp_shuffle_xor(all, mask));
      if (lane == 0) shared.of_warp[warp][0] = all;
    }
    sync_block();
    if (t < kSide) {
      u32 most = 0;
      for (int w = 0; w < kWarps; ++w) most = larger(most, shared.of_warp[w][blocks == Fp8Blocks::Squares ? 0 : t]);
      shared.largest[t] = most;
    }
  }
  sync_block();
}

template <class T>
__global__ void __launch_bounds__(kThreads) quantize_fp8_kernel(QuantizeFp8Args<T> a) {
  QuantizeFp8Shared& shared = block_shared<QuantizeFp8Shared>();
  const Fp8Format f = fp8_format(a.e5m2 ? DType::F8E5M2 : DType::F8E4M3);
  const i64 across = a.layout.k_blocks(), tile_row = block_index().x / across,
            tile_column = block_index().x - tile_row * across;
  const i64 row0 = tile_row * kSide, k0 = tile_column * kSide, padded_k = a.layout.padded_k();
  const int t = thread_index(), column = t % kThreadsOfRow * kGroup, first = t / kThreadsOfRow;
  const i64 x_row0 = a.transposed ? k0 : row0, x_column = (a.transposed ? row0 : k0) + column;

  float y[kGroups][kGroup];
  DS_UNROLL
  for (int n = 0; n < kGroups; ++n) {
    const i64 x_row = x_row0 + n * kRowsAtOnce + first;
    load_some(y[n], a.x + x_row * a.x_stride + x_column, x_row < a.x_rows ? a.x_columns - x_column : 0, a.wide);
  }
  find_largest(shared, y, a.layout.blocks, a.transposed);

  float* const scales = a.scales + a.layout.scale_of(row0, k0);
  if (a.layout.blocks == Fp8Blocks::Rows) {
    if (t < kSide && row0 + t < a.layout.padded_rows()) scales[t] = fp8_scale(shared.largest[t], f);
  } else if (t == 0) {
    scales[0] = fp8_scale(shared.largest[0], f);
    if (tile_column + 1 == across)
      for (i64 i = across; i < a.layout.scale_columns(); ++i) scales[i - tile_column] = 1.0f;
  }

  DS_UNROLL
  for (int n = 0; n < kGroups; ++n) {
    const int tile_x_row = n * kRowsAtOnce + first;
    u8 code[kGroup];
    DS_UNROLL
    for (int e = 0; e < kGroup; ++e) {
      const float scale = fp8_scale(shared.largest[a.transposed ? column + e : tile_x_row], f);
      code[e] = fp8_code(y[n][e], scale, f);
    }
    if (a.transposed) {
      DS_UNROLL
      for (int e = 0; e < kGroup; ++e) shared.codes[column + e][tile_x_row] = code[e];
    } else if (row0 + tile_x_row < a.layout.padded_rows() && k0 + column < padded_k) {
      u32 word[2] = {};
      DS_UNROLL
      for (int e = 0; e < kGroup; ++e) word[e / 4] |= static_cast<u32>(code[e]) << e % 4 * 8;
      u32* const to = reinterpret_cast<u32*>(a.codes + (row0 + tile_x_row) * padded_k + k0 + column);
      to[0] = word[0];
      to[1] = word[1];
    }
  }
  if (!a.transposed) return;
  sync_block();
  for (int i = t; i < kSide * (kSide / 16); i += kThreads) {
    const int row = i / (kSide / 16), k = i % (kSide / 16) * 16;
    if (row0 + row >= a.layout.padded_rows() || k0 + k >= padded_k) continue;
    *reinterpret_cast<uint4*>(a.codes + (row0 + row) * padded_k + k0 + k) =
        *reinterpret_cast<const uint4*>(&shared.codes[row][k]);
  }
}

}  // namespace

void quantize_fp8(TensorView codes, TensorView scales, TensorView x, Fp8Blocks blocks, bool transposed,
                  Stream& s) noexcept {
  Context& c = context(s);
  const Fp8Layout layout{x.dim(transposed ? 1 : 0), x.dim(transposed ? 0 : 1), blocks};
  with_work_type(x.dtype, [&]<class T>(T) {
    const QuantizeFp8Args<T> args{.codes = codes.as<u8>(),
                                  .scales = scales.as<float>(),
                                  .x = x.as<const T>(),
                                  .x_rows = x.dim(0),
                                  .x_columns = x.dim(1),
                                  .x_stride = x.stride[0],
                                  .layout = layout,
                                  .e5m2 = codes.dtype == DType::F8E5M2,
                                  .transposed = transposed,
                                  .wide = aligned_rows(x.as<const T>(), x.stride[0], x.dim(0))};
    launch(quantize_fp8_kernel<T>,
           {dim3(static_cast<unsigned>(layout.row_blocks() * layout.k_blocks())), kThreads, sizeof(QuantizeFp8Shared)},
           c.stream(), args);
  });
  c.check(cudaGetLastError(), "quantize_fp8");
}

}  // namespace ds::cuda
