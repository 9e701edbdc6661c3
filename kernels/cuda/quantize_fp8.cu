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
constexpr int kAcross = kSide / kGroup;  // groups of a row of the tile, one for each of so many threads
static_assert(kThreads == kAcross * kAcross);

struct QuantizeFp8Shared {
  u32 of_warp[kWarps][kSide];  // largest elements: of a warp, by column; or in [0], of all
  float scale[kSide];          // by row of the tile of codes
  // Eight codes together, by row of the tile of codes. Group g of a row is at g ^ (row / 8), so that the threads of a
  // warp, which have every eighth row, meet all banks.
  uint2 codes[kSide][kAcross];
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

DS_DEVICE uint2 pack_codes(const u8 (&code)[kGroup]) {
  u32 word[2] = {};
  DS_UNROLL
  for (int i = 0; i < kGroup; ++i) word[i / 4] |= static_cast<u32>(code[i]) << i % 4 * 8;
  uint2 both;
  both.x = word[0], both.y = word[1];
  return both;
}

// A thread has rows [first, first + 8) of the tile of x, and columns [column, column + 8).
struct Fp8Place {
  int first, column;
};
DS_DEVICE Fp8Place fp8_place() { return {thread_index() / kAcross * kGroup, thread_index() % kAcross * kGroup}; }

// Leaves in shared.scale the scale of each row of codes.
DS_DEVICE void find_scales(QuantizeFp8Shared& shared, const float (&y)[kGroup][kGroup], Fp8Blocks blocks,
                           bool transposed, Fp8Format f) {
  const int t = thread_index(), warp = t / kWarp, lane = t % kWarp;
  const Fp8Place place = fp8_place();
  const auto bits = [&](int n, int e) { return std::bit_cast<u32>(y[n][e]) & 0x7FFFFFFFu; };
  if (blocks == Fp8Blocks::Rows && !transposed) {
    DS_UNROLL
    for (int n = 0; n < kGroup; ++n) {
      u32 most = 0;
      DS_UNROLL
      for (int e = 0; e < kGroup; ++e) most = larger(most, bits(n, e));
      for (int mask = kAcross / 2; mask > 0; mask /= 2) most = larger(most, warp_shuffle_xor(most, mask));
      if (t % kAcross == 0) shared.scale[place.first + n] = fp8_scale(most, f, blocks);
    }
  } else {
    u32 all = 0;
    DS_UNROLL
    for (int e = 0; e < kGroup; ++e) {
      u32 most = 0;
      DS_UNROLL
      for (int n = 0; n < kGroup; ++n) most = larger(most, bits(n, e));
      most = larger(most, warp_shuffle_xor(most, kAcross));
      all = larger(all, most);
      if (lane < kAcross) shared.of_warp[warp][place.column + e] = most;
    }
    if (blocks == Fp8Blocks::Squares) {
      for (int mask = kAcross / 2; mask > 0; mask /= 2) all = larger(all, warp_shuffle_xor(all, mask));
      if (lane == 0) shared.of_warp[warp][0] = all;
    }
    sync_block();
    if (t < kSide) {
      u32 most = 0;
      for (int w = 0; w < kWarps; ++w) most = larger(most, shared.of_warp[w][blocks == Fp8Blocks::Squares ? 0 : t]);
      shared.scale[t] = fp8_scale(most, f, blocks);
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
  const i64 row0 = tile_row * kSide, k0 = tile_column * kSide, padded_rows = a.layout.padded_rows(),
            padded_k = a.layout.padded_k();
  const int t = thread_index();
  const Fp8Place place = fp8_place();
  const i64 x_row0 = (a.transposed ? k0 : row0) + place.first, x_column = (a.transposed ? row0 : k0) + place.column;

  float y[kGroup][kGroup];
  DS_UNROLL
  for (int n = 0; n < kGroup; ++n) {
    const i64 x_row = x_row0 + n;
    load_some(y[n], a.x + x_row * a.x_stride + x_column, x_row < a.x_rows ? a.x_columns - x_column : 0, a.wide);
  }
  find_scales(shared, y, a.layout.blocks, a.transposed, f);

  float* const scales = a.scales + a.layout.scale_of(row0, k0);
  if (a.layout.blocks == Fp8Blocks::Rows) {
    if (t < kSide && row0 + t < padded_rows) scales[t] = shared.scale[t];
  } else if (t == 0) {
    scales[0] = shared.scale[0];
    if (tile_column + 1 == across)
      for (i64 i = across; i < a.layout.scale_columns(); ++i) scales[i - tile_column] = 1.0f;
  }

  const auto put = [&](int row, int k, const uint2& codes) {
    if (row0 + row < padded_rows && k0 + k < padded_k)
      *reinterpret_cast<uint2*>(a.codes + (row0 + row) * padded_k + k0 + k) = codes;
  };
  u8 code[kGroup];
  if (!a.transposed) {
    DS_UNROLL
    for (int n = 0; n < kGroup; ++n) {
      const float scale = shared.scale[place.first + n];
      DS_UNROLL
      for (int e = 0; e < kGroup; ++e) code[e] = fp8_code(y[n][e], scale, f);
      put(place.first + n, place.column, pack_codes(code));
    }
    return;
  }
  DS_UNROLL
  for (int e = 0; e < kGroup; ++e) {
    const float scale = shared.scale[place.column + e];
    DS_UNROLL
    for (int n = 0; n < kGroup; ++n) code[n] = fp8_code(y[n][e], scale, f);
    shared.codes[place.column + e][(place.first ^ place.column) / kGroup] = pack_codes(code);
  }
  sync_block();
  for (int i = t; i < kSide * kAcross; i += kThreads) {
    const int row = i / kAcross, group = i % kAcross;
    put(row, group * kGroup, shared.codes[row][group ^ row / kGroup]);
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
