// SPDX-License-Identifier: Apache-2.0
// Parts of matrices that travel as codes of their squares. A block has a square, or what a part has of it: sixteen
// threads read the 128 elements of a row together.

#include "cuda/context.h"
#include "cuda/vectors.h"

namespace ds::cuda {
namespace {

constexpr int kPartThreads = 256, kPartWarps = kPartThreads / kWarp, kPartGroup = 8;
constexpr int kPartAcross = static_cast<int>(kFp8Block) / kPartGroup;  // threads of a row
constexpr int kPartRows = kPartThreads / kPartAcross;                  // rows at a time

struct Fp8PartArgs {
  i64* maxima;
  bf16* x;
  u8* codes;
  Fp8Part part;
  i64 first_square;  // of the grid
};

// Calls use(at) for the groups of eight elements that this thread has of the square.
template <class F>
DS_DEVICE void for_groups(const Fp8Part& part, i64 square, F&& use) {
  const int t = thread_index();
  const Fp8Part::Range rows = part.rows_of(square);
  for (i64 row = rows.begin + t / kPartAcross; row < rows.end; row += kPartRows)
    use(part.at(row, square) + t % kPartAcross * kPartGroup);
}

DS_DEVICE Fp8Format part_format() { return fp8_format(DType::F8E4M3); }
DS_DEVICE float part_scale(const Fp8PartArgs& a, i64 square) {
  return fp8_scale(static_cast<u32>(a.maxima[square]), part_format(), Fp8Blocks::Squares);
}

struct MaxAbsFp8Shared {
  u32 of_warp[kPartWarps];
};

__global__ void __launch_bounds__(kPartThreads) max_abs_fp8_kernel(Fp8PartArgs a) {
  MaxAbsFp8Shared& shared = block_shared<MaxAbsFp8Shared>();
  const i64 square = a.first_square + block_index().x;
  u32 most = 0;
  for_groups(a.part, square, [&](i64 at) {
    float x[kPartGroup];
    load16(x, a.x + at);
    DS_UNROLL
    for (int e = 0; e < kPartGroup; ++e) {
      const u32 bits = std::bit_cast<u32>(x[e]) & 0x7FFFFFFFu;
      most = bits > most ? bits : most;
    }
  });
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const u32 other = warp_shuffle_xor(most, mask);
    most = other > most ? other : most;
  }
  if (thread_index() % kWarp == 0) shared.of_warp[thread_index() / kWarp] = most;
  sync_block();
  if (thread_index() != 0) return;
  for (int w = 1; w < kPartWarps; ++w) most = shared.of_warp[w] > most ? shared.of_warp[w] : most;
  a.maxima[square] = most;
}

__global__ void __launch_bounds__(kPartThreads) encode_fp8_kernel(Fp8PartArgs a) {
  const i64 square = a.first_square + block_index().x;
  const float scale = part_scale(a, square);
  for_groups(a.part, square, [&](i64 at) {
    float x[kPartGroup];
    load16(x, a.x + at);
    u32 word[2] = {};
    DS_UNROLL
    for (int e = 0; e < kPartGroup; ++e)
      word[e / 4] |= static_cast<u32>(fp8_code(x[e], scale, part_format())) << e % 4 * 8;
    uint2 both;
    both.x = word[0], both.y = word[1];
    *reinterpret_cast<uint2*>(a.codes + at) = both;
  });
}

__global__ void __launch_bounds__(kPartThreads) decode_fp8_kernel(Fp8PartArgs a) {
  const i64 square = a.first_square + block_index().x;
  const float scale = part_scale(a, square);
  for_groups(a.part, square, [&](i64 at) {
    const uint2 both = *reinterpret_cast<const uint2*>(a.codes + at);
    float x[kPartGroup];
    DS_UNROLL
    for (int e = 0; e < kPartGroup; ++e) {
      const u32 word = e < 4 ? both.x : both.y;
      x[e] = from_fp8(static_cast<u8>(word >> e % 4 * 8), part_format()) * scale;
    }
    store16(a.x + at, x);
  });
}

// A block for each square of rows [first, end) of squares.
template <class Kernel>
void launch_squares(Context& c, Kernel kernel, Fp8PartArgs a, i64 first, i64 end, size_t shared, const char* name) {
  a.first_square = first * a.part.across;
  launch(kernel, {dim3(static_cast<unsigned>((end - first) * a.part.across)), kPartThreads, shared}, c.stream(), a);
  c.check(cudaGetLastError(), name);
}

// The same for the rows of squares of which the part has something.
template <class Kernel>
void launch_part(Context& c, Kernel kernel, const Fp8PartArgs& a, const char* name) {
  const i64 elems = a.part.across * kFp8Block * kFp8Block;  // of a row of squares
  launch_squares(c, kernel, a, a.part.first / elems, ceil_div(a.part.first + a.part.count, elems), 0, name);
}

Fp8PartArgs part_args(TensorView maxima, TensorView x, TensorView codes, i64 first) noexcept {
  return {maxima.as<i64>(), x.as<bf16>(), codes.as<u8>(), {maxima.dim(1), first, x.numel()}, 0};
}

}  // namespace

void max_abs_fp8(TensorView maxima, TensorView x, i64 first, Stream& s) noexcept {
  launch_squares(context(s), max_abs_fp8_kernel, part_args(maxima, x, {}, first), 0, maxima.dim(0),
                 sizeof(MaxAbsFp8Shared), "max_abs_fp8");
}

void encode_fp8(TensorView codes, TensorView x, TensorView maxima, i64 first, Stream& s) noexcept {
  launch_part(context(s), encode_fp8_kernel, part_args(maxima, x, codes, first), "encode_fp8");
}

void decode_fp8(TensorView x, TensorView codes, TensorView maxima, i64 first, Stream& s) noexcept {
  launch_part(context(s), decode_fp8_kernel, part_args(maxima, x, codes, first), "decode_fp8");
}

}  // namespace ds::cuda
