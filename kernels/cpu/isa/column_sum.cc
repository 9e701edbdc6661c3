// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa/kernels.h"
#include "cpu/loops.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

void column_sum(TensorView out, TensorView x, bool accumulate, Stream& stream) noexcept {
  // A tile is a strip of columns. Blocks of kRows rows are summed one after the other, so the error grows with R /
  // kRows + kRows.
  constexpr i64 kVectors = 4, kStrip = kVectors * Vec::kLanes, kRows = 64;
  const i64 R = x.dim(0), ld = x.stride[0];
  const auto strip = [=]<class T>(const T* p, Vec(&total)[kVectors], auto... n) {
    constexpr i64 kUsed = sizeof...(n) == 0 ? kVectors : 1;
    std::fill_n(total, kVectors, zero());
    for (i64 begin = 0; begin < R; begin += kRows) {
      Vec sum[kUsed];
      std::fill_n(sum, kUsed, zero());
      for (i64 r = begin; r < std::min(R, begin + kRows); ++r) {
        for (i64 v = 0; v < kUsed; ++v) sum[v] = sum[v] + load(p + r * ld + v * Vec::kLanes, n...);
      }
      for (i64 v = 0; v < kUsed; ++v) total[v] = total[v] + sum[v];
    }
  };
  with_work_type(x.dtype, [&]<class T>(T) {
    with_work_type(out.dtype, [&]<class O>(O) {
      const auto put = [&](i64 j, Vec sum, auto... n) {
        O* const at = out.as<O>() + j;
        store(at, accumulate ? load(at, n...) + sum : sum, n...);
      };
      for_tiles(
          stream, out.numel(),
          [&](i64 begin, i64 end) {
            Vec total[kVectors];
            if (end - begin == kStrip) {
              strip(x.as<T>() + begin, total);
              for (i64 v = 0; v < kVectors; ++v) put(begin + v * Vec::kLanes, total[v]);
            } else {
              for_vectors(begin, end, [&](i64 j, auto n) {
                strip(x.as<T>() + j, total, n);
                put(j, total[0], n);
              });
            }
          },
          kStrip);
    });
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
