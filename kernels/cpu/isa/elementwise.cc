// SPDX-License-Identifier: Apache-2.0
// add, bias_residual, cast and fold: bound by memory.

#include <cstring>
#include <type_traits>

#include "cpu/isa/kernels.h"
#include "cpu/loops.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

void add(TensorView y, TensorView a, TensorView b, Stream& stream) noexcept {
  with_work_type(y.dtype, [&]<class T>(T) {
    for_all_vectors(stream, y.numel(), [yp = y.as<T>(), ap = a.as<T>(), bp = b.as<T>()](i64 i, auto n) {
      store(yp + i, load(ap + i, n) + load(bp + i, n), n);
    });
  });
}

void bias_residual(TensorView y, TensorView x, TensorView bias, TensorView residual, Stream& stream) noexcept {
  const i64 C = y.dim(1);
  with_work_type(y.dtype, [&]<class T>(T) {
    const auto row = [=](i64 r, auto has_bias, auto has_residual) {
      T* const to = y.as<T>() + r * y.stride[0];
      const float* const from = x.as<float>() + r * C;
      for_vectors(0, C, [=](i64 c, auto n) {
        Vec sum = load(from + c, n);
        if constexpr (has_bias.value) sum = sum + load(bias.as<T>() + c, n);
        if constexpr (has_residual.value) sum = sum + load(residual.as<T>() + r * residual.stride[0] + c, n);
        store(to + c, sum, n);
      });
    };
    const auto rows = [=](auto has_bias, auto has_residual, i64 begin, i64 end) {
      for (i64 r = begin; r < end; ++r) row(r, has_bias, has_residual);
    };
    constexpr std::true_type kYes;
    constexpr std::false_type kNo;
    for_tiles(
        stream, y.dim(0),
        [=](i64 begin, i64 end) {
          if (bias) {
            residual ? rows(kYes, kYes, begin, end) : rows(kYes, kNo, begin, end);
          } else {
            residual ? rows(kNo, kYes, begin, end) : rows(kNo, kNo, begin, end);
          }
        },
        std::max<i64>(1, kTileElements / std::max<i64>(1, C)));
  });
}

void cast(TensorView y, TensorView x, Stream& stream) noexcept {
  if (y.dtype == x.dtype) {
    if (y.data == x.data) return;
    const i64 width = dtype_bytes(x.dtype);
    for_tiles(stream, x.numel(), [&](i64 begin, i64 end) {
      std::memcpy(y.as<char>() + begin * width, x.as<char>() + begin * width,
                  static_cast<size_t>((end - begin) * width));
    });
    return;
  }
  with_work_type(y.dtype, [&]<class To>(To) {
    with_work_type(x.dtype, [&]<class From>(From) {
      for_all_vectors(stream, y.numel(),
                      [yp = y.as<To>(), xp = x.as<From>()](i64 i, auto n) { store(yp + i, load(xp + i, n), n); });
    });
  });
}

void fold(TensorView dst, std::span<const TensorView> sources, bool accumulate, Stream& stream) noexcept {
  with_work_type(sources[0].dtype, [&]<class T>(T) {
    float* const out = dst.as<float>();
    const size_t count = sources.size();
    // Four vectors at a time: the additions of one element depend on each other; those of its neighbours fill the gaps.
    constexpr i64 kUnroll = 4, kStep = kUnroll * Vec::kLanes;
    for_tiles(stream, dst.numel(), [=](i64 begin, i64 end) {
      i64 i = begin;
      for (; i + kStep <= end; i += kStep) {
        Vec sum[kUnroll];
        for (i64 k = 0; k < kUnroll; ++k) {
          const i64 at = i + k * Vec::kLanes;
          sum[k] = accumulate ? load(out + at) : load(sources[0].as<T>() + at);
        }
        for (size_t s = accumulate ? 0 : 1; s < count; ++s) {
          const T* source = sources[s].as<T>() + i;
          for (i64 k = 0; k < kUnroll; ++k) sum[k] = sum[k] + load(source + k * Vec::kLanes);
        }
        for (i64 k = 0; k < kUnroll; ++k) store(out + i + k * Vec::kLanes, sum[k]);
      }
      for_vectors(i, end, [&](i64 at, auto n) {
        Vec sum = accumulate ? load(out + at, n) : load(sources[0].as<T>() + at, n);
        for (size_t s = accumulate ? 0 : 1; s < count; ++s) sum = sum + load(sources[s].as<T>() + at, n);
        store(out + at, sum, n);
      });
    });
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
