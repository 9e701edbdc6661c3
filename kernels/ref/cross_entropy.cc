// SPDX-License-Identifier: Apache-2.0
// Linear layer and softmax cross-entropy, a token at a time. The gradient of the logits is not rounded between the
// products, and the workspace is not used.

#include <algorithm>
#include <cmath>
#include <memory>

#include "ref/element.h"
#include "ref/product.h"
#include "ref/ref.h"

namespace ds::ref {

void linear_cross_entropy(TensorView losses, TensorView dh, TensorView dweight, TensorView dbias, TensorView h,
                          TensorView weight, TensorView bias, TensorView targets, TensorView,
                          const CrossEntropyParams& p, Stream&) noexcept {
  const i64 T = h.dim(0), C = h.dim(1), V = weight.dim(0);
  const double smoothing = static_cast<double>(p.label_smoothing), each = smoothing / static_cast<double>(V);
  const auto z = std::make_unique<double[]>(static_cast<size_t>(V));
  const auto dw = std::make_unique<double[]>(static_cast<size_t>(dweight ? V * C : 0));
  const auto db = std::make_unique<double[]>(static_cast<size_t>(dbias ? V : 0));
  for (i64 t = 0; t < T; ++t) {
    const i64 target = targets.as<i32>()[t];
    const bool ignored = target == p.ignore_index;
    double top = -INFINITY, sum = 0;
    for (i64 v = 0; v < V; ++v) {
      z[v] = product_of_rows(h, t, weight, v);
      if (bias) z[v] = with_bias(z[v], weight, get(bias, v));
      top = std::max(top, z[v]);
    }
    double all = 0;
    for (i64 v = 0; v < V; ++v) sum += std::exp(z[v] - top), all += z[v];
    const double lse = top + std::log(sum), z_loss = static_cast<double>(p.z_loss);
    const double spread = smoothing > 0 ? each * all : 0;  // otherwise a logit of -inf would have an effect
    put(losses, t, ignored ? 0 : lse - (1 - smoothing) * z[target] - spread + z_loss * lse * lse);
    for (i64 v = 0; v < V; ++v) {
      const double hit = (v == target ? 1 - smoothing : 0) + each;
      z[v] =
          ignored ? 0 : static_cast<double>(p.grad_scale) * ((1 + 2 * z_loss * lse) * std::exp(z[v] - top) / sum - hit);
      if (dbias) db[v] += z[v];
    }
    for (i64 c = 0; c < C; ++c) {
      double x = 0;
      for (i64 v = 0; v < V; ++v) {
        x += z[v] * get(weight, v * C + c);
        if (dweight) dw[v * C + c] += z[v] * get(h, t * C + c);
      }
      if (dh) put(dh, t * C + c, x);
    }
  }
  if (dweight) {
    for (i64 i = 0; i < V * C; ++i) put(dweight, i, (p.add_dweight ? get(dweight, i) : 0) + dw[i]);
  }
  if (dbias) {
    for (i64 v = 0; v < V; ++v) put(dbias, v, db[v]);
  }
}

void vocab_max(TensorView max, TensorView z, Stream&) noexcept {
  for (i64 r = 0; r < z.dim(0); ++r) {
    double top = -INFINITY;
    for (i64 v = 0; v < z.dim(1); ++v) top = std::max(top, get(z, r * z.stride[0] + v));
    put(max, r, top);
  }
}

void vocab_sums(TensorView sum, TensorView at_target, TensorView z, TensorView max, TensorView targets, i64 first_id,
                const CrossEntropyParams& p, Stream&) noexcept {
  const double smoothing = static_cast<double>(p.label_smoothing);
  for (i64 r = 0; r < z.dim(0); ++r) {
    const i64 target = targets.as<i32>()[r], own = target - first_id;
    const bool ignored = target == p.ignore_index;
    double total = 0, all = 0;
    for (i64 v = 0; v < z.dim(1); ++v) {
      const double x = get(z, r * z.stride[0] + v) - get(max, r);
      total += std::exp(x), all += x;
    }
    const bool here = own >= 0 && own < z.dim(1);
    double hit = here ? (1 - smoothing) * (get(z, r * z.stride[0] + own) - get(max, r)) : 0;
    if (smoothing > 0) hit += smoothing / static_cast<double>(p.vocab) * all;
    put(sum, r, ignored ? 0 : total);
    put(at_target, r, ignored ? 0 : hit);
  }
}

void vocab_grad(TensorView losses, TensorView dz, TensorView z, TensorView sum, TensorView at_target, TensorView max,
                TensorView targets, i64 first_id, const CrossEntropyParams& p, Stream&) noexcept {
  for (i64 r = 0; r < z.dim(0); ++r) {
    const i64 target = targets.as<i32>()[r];
    const bool ignored = target == p.ignore_index;
    const double log_sum = std::log(get(sum, r)), lse = get(max, r) + log_sum, z_loss = static_cast<double>(p.z_loss);
    const double smoothing = static_cast<double>(p.label_smoothing);
    if (losses) put(losses, r, ignored ? 0 : log_sum - get(at_target, r) + z_loss * lse * lse);
    for (i64 v = 0; dz && v < z.dim(1); ++v) {
      const double prob = std::exp(get(z, r * z.stride[0] + v) - get(max, r)) / get(sum, r);
      const double hit =
          (first_id + v == target ? 1 - smoothing : 0) + (smoothing > 0 ? smoothing / static_cast<double>(p.vocab) : 0);
      put(dz, r * dz.stride[0] + v,
          ignored ? 0 : static_cast<double>(p.grad_scale) * ((1 + 2 * z_loss * lse) * prob - hit));
    }
  }
}

}  // namespace ds::ref
