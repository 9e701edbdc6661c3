// SPDX-License-Identifier: Apache-2.0
// Evoformer attention by its formulas: one row of probabilities at a time.

#include <cmath>
#include <limits>
#include <vector>

#include "ref/element.h"
#include "ref/ref.h"

namespace ds::ref {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Offset of the vector of (sequence, token, head), and of the statistics of (sequence, head, token).
i64 at(const TensorView& x, i64 m, i64 t, i64 h) noexcept {
  return m * x.stride[0] + t * x.stride[1] + h * x.stride[2];
}
i64 at_row(const TensorView& lse, i64 m, i64 h, i64 t) noexcept { return m * lse.stride[0] + h * lse.stride[1] + t; }

double dot(const TensorView& x, i64 i, const TensorView& y, i64 j, i64 n) noexcept {
  double sum = 0;
  for (i64 d = 0; d < n; ++d) sum += get(x, i + d) * get(y, j + d);
  return sum;
}

struct Scores {
  TensorView q, k, bias1, bias2;
  EvoformerParams p;
  i64 T = q.dim(1), H = q.dim(2), D = q.dim(3);

  // The value subtracted from bias1 of a sequence: its largest; 0 if that is -inf.
  double base(i64 m) const noexcept {
    double most = bias1 ? -kInfinity : 0;
    for (i64 j = 0; bias1 && j < T; ++j) most = std::max(most, get(bias1, m * bias1.stride[0] + j));
    return most == -kInfinity ? 0 : most;
  }
  double operator()(i64 m, i64 h, i64 i, i64 j, double base) const noexcept {
    double s = p.scale * dot(q, at(q, m, i, h), k, at(k, m, j, h), D);
    if (bias1) s += get(bias1, m * bias1.stride[0] + j) - base;
    if (bias2) s += get(bias2, at(bias2, m / p.num_seq, h, i) + j);
    return s;
  }
};

}  // namespace

void evoformer_attention_fwd(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v, TensorView bias1,
                             TensorView bias2, const EvoformerParams& p, Stream&) noexcept {
  const Scores scores{q, k, bias1, bias2, p};
  const i64 M = q.dim(0), T = scores.T, H = scores.H, D = scores.D;
  std::vector<double> weight(static_cast<size_t>(T)), out(static_cast<size_t>(D));
  for (i64 m = 0; m < M; ++m) {
    const double base = scores.base(m);
    for (i64 row = 0; row < H * T; ++row) {
      const i64 h = row / T, i = row % T;
      double top = -kInfinity, sum = 0;
      for (i64 j = 0; j < T; ++j) top = std::max(top, weight[j] = scores(m, h, i, j, base));
      if (top == -kInfinity) top = 0;
      out.assign(static_cast<size_t>(D), 0);
      for (i64 j = 0; j < T; ++j) {
        const double e = std::exp(weight[j] - top);
        if (e == 0) continue;
        sum += e;
        for (i64 d = 0; d < D; ++d) out[d] += e * get(v, at(v, m, j, h) + d);
      }
      for (i64 d = 0; d < D; ++d) put(o, at(o, m, i, h) + d, sum == 0 ? 0 : out[d] / sum);
      put(lse, at_row(lse, m, h, i), sum == 0 ? kInfinity : top + std::log(sum));
    }
  }
}

void evoformer_attention_bwd(TensorView dq, TensorView dk, TensorView dv, TensorView dbias1, TensorView dbias2,
                             TensorView dout, TensorView q, TensorView k, TensorView v, TensorView o, TensorView lse,
                             TensorView bias1, TensorView bias2, const EvoformerParams& p, Stream&) noexcept {
  const Scores scores{q, k, bias1, bias2, p};
  const i64 N = p.num_seq, B = q.dim(0) / N, T = scores.T, H = scores.H, D = scores.D;
  std::vector<double> gq(static_cast<size_t>(D)), gk(static_cast<size_t>(T * D)), gv(static_cast<size_t>(T * D));
  std::vector<double> pairs(static_cast<size_t>(T * T)), keys(static_cast<size_t>(N * T));
  for (i64 b = 0; b < B; ++b) {
    keys.assign(keys.size(), 0);
    for (i64 h = 0; h < H; ++h) {
      pairs.assign(pairs.size(), 0);
      for (i64 n = 0; n < N; ++n) {
        const i64 m = b * N + n;
        const double base = scores.base(m);
        gk.assign(gk.size(), 0);
        gv.assign(gv.size(), 0);
        for (i64 i = 0; i < T; ++i) {
          const i64 qi = at(q, m, i, h), doi = at(dout, m, i, h);
          const double delta = dot(dout, doi, o, at(o, m, i, h), D), log_sum = get(lse, at_row(lse, m, h, i));
          gq.assign(gq.size(), 0);
          for (i64 j = 0; j < T; ++j) {
            const double prob = std::exp(scores(m, h, i, j, base) - log_sum);
            if (prob == 0) continue;
            const i64 kj = at(k, m, j, h);
            const double ds = prob * (dot(dout, doi, v, at(v, m, j, h), D) - delta);
            for (i64 d = 0; d < D; ++d) {
              gq[d] += p.scale * ds * get(k, kj + d);
              gk[j * D + d] += p.scale * ds * get(q, qi + d);
              gv[j * D + d] += prob * get(dout, doi + d);
            }
            pairs[i * T + j] += ds;
            keys[n * T + j] += ds;
          }
          for (i64 d = 0; d < D; ++d) put(dq, at(dq, m, i, h) + d, gq[d]);
        }
        for (i64 j = 0; j < T; ++j) {
          for (i64 d = 0; d < D; ++d) {
            put(dk, at(dk, m, j, h) + d, gk[j * D + d]);
            put(dv, at(dv, m, j, h) + d, gv[j * D + d]);
          }
        }
      }
      for (i64 i = 0; dbias2 && i < T * T; ++i) put(dbias2, at(dbias2, b, h, i / T) + i % T, pairs[i]);
    }
    for (i64 i = 0; dbias1 && i < N * T; ++i) put(dbias1, (b * N + i / T) * dbias1.stride[0] + i % T, keys[i]);
  }
}

}  // namespace ds::ref
