// SPDX-License-Identifier: Apache-2.0
#include "ref/activation.h"
#include "ref/element.h"
#include "ref/product.h"
#include "ref/ref.h"

namespace ds::ref {

void matmul(TensorView c, TensorView a, TensorView b, TensorView bias, TensorView preact, TensorView residual,
            const MatmulParams& p, Stream&) noexcept {
  const i64 M = c.dim(0), N = c.dim(1), K = a.dim(p.trans_a ? 0 : 1);
  for (i64 m = 0; m < M; ++m) {
    for (i64 n = 0; n < N; ++n) {
      double x = 0;
      if (b.codes) {
        x = product_of_rows(a, m, b, n);
      } else {
        for (i64 k = 0; k < K; ++k) {
          x += get(a, p.trans_a ? k * a.stride[0] + m : m * a.stride[0] + k) *
               get(b, p.trans_b ? place(b, n, k) : place(b, k, n));
        }
      }
      if (bias) x = with_bias(x, b, get(bias, n));
      if (preact) put(preact, m * preact.stride[0] + n, x);
      x = activate(p.activation, x);
      if (residual) x += get(residual, m * residual.stride[0] + n);
      if (p.accumulate) x += get(c, m * c.stride[0] + n);
      put(c, m * c.stride[0] + n, x);
    }
  }
}

void column_sum(TensorView out, TensorView x, bool accumulate, Stream&) noexcept {
  for (i64 n = 0; n < out.numel(); ++n) {
    double sum = accumulate ? get(out, n) : 0;
    for (i64 r = 0; r < x.dim(0); ++r) sum += get(x, r * x.stride[0] + n);
    put(out, n, sum);
  }
}

}  // namespace ds::ref
