// SPDX-License-Identifier: Apache-2.0
// LayerNorm and RMSNorm. A row is small enough to stay in the cache, so each direction reads and writes memory once:
// first sums, then results. The gradients of weight and bias are summed per tile of rows and folded in tile order.

#include <cmath>

#include "cpu/isa/kernels.h"
#include "cpu/loops.h"

namespace ds::cpu::DS_ISA_NAMESPACE {
namespace {

// Two running sums over a row; four vectors of each hide the latency of the additions.
struct RowSums {
  static constexpr i64 kUnroll = 4;
  Vec a[kUnroll], b[kUnroll];
  RowSums() noexcept {
    for (i64 k = 0; k < kUnroll; ++k) a[k] = b[k] = zero();
  }
  // f(c, lanes, a, b) adds its terms to a and b.
  template <class F>
  void over(i64 C, F&& f) noexcept {
    constexpr i64 kStep = kUnroll * Vec::kLanes;
    i64 c = 0;
    for (; c + kStep <= C; c += kStep) {
      for (i64 k = 0; k < kUnroll; ++k) f(c + k * Vec::kLanes, AllLanes{}, a[k], b[k]);
    }
    for_vectors(c, C, [&](i64 at, auto n) { f(at, n, a[0], b[0]); });
  }
  float sum_a() const noexcept { return reduce_add((a[0] + a[1]) + (a[2] + a[3])); }
  float sum_b() const noexcept { return reduce_add((b[0] + b[1]) + (b[2] + b[3])); }
};

// Lanes past the end of a row load as zero; they are masked where zero would still contribute.
inline Vec keep(Vec x, AllLanes) noexcept { return x; }
inline Vec keep(Vec x, i64 n) noexcept { return select(first(n), x, zero()); }

template <bool centred>
void norm_fwd(TensorView y, TensorView mean, TensorView rstd, TensorView x, TensorView weight, TensorView bias,
              float eps, Stream& stream) noexcept {
  const i64 C = x.dim(1);
  const float inv_C = 1.0f / static_cast<float>(C);
  with_work_type(x.dtype, [&]<class T>(T) {
    const T *w = weight.as<T>(), *b = bias.as<T>();
    for_tiles(
        stream, x.dim(0),
        [=](i64 begin, i64 end) {
          for (i64 r = begin; r < end; ++r) {
            const T* in = x.as<T>() + r * C;
            T* out = y.as<T>() + r * C;
            float m = 0;
            if constexpr (centred) {
              RowSums total;
              total.over(C, [=](i64 c, auto n, Vec& sum, Vec&) { sum = sum + load(in + c, n); });
              mean.as<float>()[r] = m = total.sum_a() * inv_C;
            }
            const Vec shift = broadcast(m);
            RowSums squares;
            squares.over(C, [=](i64 c, auto n, Vec& sum, Vec&) {
              const Vec d = keep(load(in + c, n) - shift, n);
              sum = fma(d, d, sum);
            });
            const float inv = 1.0f / std::sqrt(squares.sum_a() * inv_C + eps);
            rstd.as<float>()[r] = inv;
            const Vec scale = broadcast(inv);
            for_vectors(0, C, [=](i64 c, auto n) {
              const Vec xhat = (load(in + c, n) - shift) * scale;
              store(out + c, centred ? fma(xhat, load(w + c, n), load(b + c, n)) : xhat * load(w + c, n), n);
            });
          }
        },
        std::max<i64>(1, kTileElements / C));
  });
}

// Tiles of rows in the backward pass. Each stores its sums of dy xhat, followed by those of dy: [tile][2][C] (RMSNorm:
// [tile][1][C]).
struct BackwardTiles {
  i64 rows, count;
  size_t scratch_bytes;
  BackwardTiles(i64 R, i64 C, i64 parts) noexcept {
    constexpr i64 kMaxTiles = 64;
    rows = std::max({i64{1}, kTileElements / C, (R + kMaxTiles - 1) / kMaxTiles});
    count = (R + rows - 1) / rows;
    scratch_bytes = static_cast<size_t>(count * parts * C) * sizeof(float);
  }
};
template <bool centred>
constexpr i64 kNormParts = centred ? 2 : 1;

template <bool centred>
void norm_bwd(TensorView dx, TensorView dweight, TensorView dbias, TensorView dy, TensorView residual_grad,
              TensorView x, TensorView weight, TensorView mean, TensorView rstd, Stream& stream) noexcept {
  const i64 R = x.dim(0), C = x.dim(1);
  constexpr i64 kParts = kNormParts<centred>;
  const BackwardTiles cut(R, C, kParts);
  const i64 tile_rows = cut.rows, tiles = cut.count;
  const float inv_C = 1.0f / static_cast<float>(C);
  float* const partial = static_cast<float*>(stream.pool->reserve_scratch(cut.scratch_bytes));

  with_work_type(x.dtype, [&]<class T>(T) {
    const T *w = weight.as<T>(), *residual = residual_grad.as<T>();
    for_tiles(
        stream, R,
        [=](i64 begin, i64 end) {
          float* const dw = partial + begin / tile_rows * kParts * C;
          float* const db = dw + C;
          std::fill(dw, dw + kParts * C, 0.0f);
          for (i64 r = begin; r < end; ++r) {
            const T *in = x.as<T>() + r * C, *grad = dy.as<T>() + r * C;
            const Vec shift = broadcast(centred ? mean.as<float>()[r] : 0.0f), scale = broadcast(rstd.as<float>()[r]);
            RowSums sums;  // of g = dy weight, and of g xhat; a missing lane has dy = 0
            sums.over(C, [=](i64 c, auto n, Vec& sum_g, Vec& sum_gx) {
              const Vec d = load(grad + c, n), xhat = (load(in + c, n) - shift) * scale, g = d * load(w + c, n);
              if constexpr (centred) sum_g = sum_g + g;
              sum_gx = fma(g, xhat, sum_gx);
              store(dw + c, fma(d, xhat, load(dw + c, n)), n);
              if constexpr (centred) store(db + c, load(db + c, n) + d, n);
            });
            const Vec mean_g = broadcast(centred ? sums.sum_a() * inv_C : 0.0f);
            const Vec mean_gx = broadcast(sums.sum_b() * inv_C);
            T* const out = dx.as<T>() + r * C;
            for_vectors(0, C, [=](i64 c, auto n) {
              const Vec xhat = (load(in + c, n) - shift) * scale, g = load(grad + c, n) * load(w + c, n);
              const Vec d = scale * (g - fma(xhat, mean_gx, mean_g));
              store(out + c, residual != nullptr ? d + load(residual + r * C + c, n) : d, n);
            });
          }
        },
        tile_rows);
  });

  const auto fold_tiles = [&](TensorView out, i64 part) {
    with_work_type(out.dtype, [&]<class T>(T) {
      for_tiles(
          stream, C,
          [=](i64 begin, i64 end) {
            for_vectors(begin, end, [=](i64 c, auto n) {
              Vec sum = zero();
              for (i64 t = 0; t < tiles; ++t) sum = sum + load(partial + (t * kParts + part) * C + c, n);
              store(out.as<T>() + c, sum, n);
            });
          },
          256);
    });
  };
  fold_tiles(dweight, 0);
  if constexpr (centred) fold_tiles(dbias, 1);
}

}  // namespace

void layernorm_fwd(TensorView y, TensorView mean, TensorView rstd, TensorView x, TensorView weight, TensorView bias,
                   float eps, Stream& stream) noexcept {
  norm_fwd<true>(y, mean, rstd, x, weight, bias, eps, stream);
}

void layernorm_bwd(TensorView dx, TensorView dweight, TensorView dbias, TensorView dy, TensorView residual_grad,
                   TensorView x, TensorView weight, TensorView mean, TensorView rstd, Stream& stream) noexcept {
  norm_bwd<true>(dx, dweight, dbias, dy, residual_grad, x, weight, mean, rstd, stream);
}

void rmsnorm_fwd(TensorView y, TensorView rstd, TensorView x, TensorView weight, float eps, Stream& stream) noexcept {
  norm_fwd<false>(y, {}, rstd, x, weight, {}, eps, stream);
}

void rmsnorm_bwd(TensorView dx, TensorView dweight, TensorView dy, TensorView residual_grad, TensorView x,
                 TensorView weight, TensorView rstd, Stream& stream) noexcept {
  norm_bwd<false>(dx, dweight, {}, dy, residual_grad, x, weight, {}, rstd, stream);
}

void layernorm_bwd_scratch(TensorView, TensorView, TensorView, TensorView, TensorView, TensorView x, TensorView,
                           TensorView, TensorView, Stream& stream) noexcept {
  note_scratch(stream, BackwardTiles(x.dim(0), x.dim(1), kNormParts<true>).scratch_bytes);
}

void rmsnorm_bwd_scratch(TensorView, TensorView, TensorView, TensorView, TensorView x, TensorView, TensorView,
                         Stream& stream) noexcept {
  note_scratch(stream, BackwardTiles(x.dim(0), x.dim(1), kNormParts<false>).scratch_bytes);
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
