// SPDX-License-Identifier: Apache-2.0
// LayerNorm and RMSNorm, forward and backward.

#include <cmath>

#include "ref/element.h"
#include "ref/ref.h"

namespace ds::ref {
namespace {

// dx = residual + rstd (g - mean(g) - xhat mean(g xhat)) with g = dy weight; RMSNorm has no mean(g). xhat = (x - mean)
// rstd.
void norm_bwd(TensorView dx, TensorView dweight, TensorView dbias, TensorView dy, TensorView residual_grad,
              TensorView x, TensorView weight, TensorView mean, TensorView rstd) noexcept {
  const i64 R = x.dim(0), C = x.dim(1);
  const auto xhat = [&](i64 r, i64 c) { return (get(x, r * C + c) - (mean ? get(mean, r) : 0)) * get(rstd, r); };
  // The sums over rows first: dx may alias dy.
  for (i64 c = 0; c < C; ++c) {
    double dw = 0, db = 0;
    for (i64 r = 0; r < R; ++r) {
      dw += get(dy, r * C + c) * xhat(r, c);
      db += get(dy, r * C + c);
    }
    put(dweight, c, dw);
    if (dbias) put(dbias, c, db);
  }
  for (i64 r = 0; r < R; ++r) {
    double sum_g = 0, sum_gx = 0;
    for (i64 c = 0; c < C; ++c) {
      const double g = get(dy, r * C + c) * get(weight, c);
      sum_g += g;
      sum_gx += g * xhat(r, c);
    }
    if (!mean) sum_g = 0;
    for (i64 c = 0; c < C; ++c) {
      const double g = get(dy, r * C + c) * get(weight, c);
      const double d = get(rstd, r) * (g - (sum_g + xhat(r, c) * sum_gx) / static_cast<double>(C));
      put(dx, r * C + c, d + (residual_grad ? get(residual_grad, r * C + c) : 0));
    }
  }
}

}  // namespace

void layernorm_fwd(TensorView y, TensorView mean, TensorView rstd, TensorView x, TensorView weight, TensorView bias,
                   float eps, Stream&) noexcept {
  const i64 R = x.dim(0), C = x.dim(1);
  for (i64 r = 0; r < R; ++r) {
    double m = 0, var = 0;
    for (i64 c = 0; c < C; ++c) m += get(x, r * C + c);
    m /= static_cast<double>(C);
    for (i64 c = 0; c < C; ++c) var += (get(x, r * C + c) - m) * (get(x, r * C + c) - m);
    const double inv = 1 / std::sqrt(var / static_cast<double>(C) + static_cast<double>(eps));
    put(mean, r, m);
    put(rstd, r, inv);
    for (i64 c = 0; c < C; ++c) put(y, r * C + c, (get(x, r * C + c) - m) * inv * get(weight, c) + get(bias, c));
  }
}

void rmsnorm_fwd(TensorView y, TensorView rstd, TensorView x, TensorView weight, float eps, Stream&) noexcept {
  const i64 R = x.dim(0), C = x.dim(1);
  for (i64 r = 0; r < R; ++r) {
    double sum = 0;
    for (i64 c = 0; c < C; ++c) sum += get(x, r * C + c) * get(x, r * C + c);
    const double inv = 1 / std::sqrt(sum / static_cast<double>(C) + static_cast<double>(eps));
    put(rstd, r, inv);
    for (i64 c = 0; c < C; ++c) put(y, r * C + c, get(x, r * C + c) * inv * get(weight, c));
  }
}

void layernorm_bwd(TensorView dx, TensorView dweight, TensorView dbias, TensorView dy, TensorView residual_grad,
                   TensorView x, TensorView weight, TensorView mean, TensorView rstd, Stream&) noexcept {
  norm_bwd(dx, dweight, dbias, dy, residual_grad, x, weight, mean, rstd);
}

void rmsnorm_bwd(TensorView dx, TensorView dweight, TensorView dy, TensorView residual_grad, TensorView x,
                 TensorView weight, TensorView rstd, Stream&) noexcept {
  norm_bwd(dx, dweight, {}, dy, residual_grad, x, weight, {}, rstd);
}

}  // namespace ds::ref
