// SPDX-License-Identifier: Apache-2.0
// Attention by its formulas: one row of probabilities at a time, no tiles.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ref/element.h"
#include "ref/ref.h"

namespace ds::ref {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Offset of the vector of (batch, token, head).
i64 at(const TensorView& x, i64 b, i64 t, i64 h) noexcept {
  return b * x.stride[0] + t * x.stride[1] + h * x.stride[2];
}

// Offset of the statistics of (batch, head, token).
i64 at_row(const TensorView& lse, i64 b, i64 h, i64 t) noexcept { return b * lse.stride[0] + h * lse.stride[1] + t; }

double dot(const TensorView& x, i64 i, const TensorView& y, i64 j, i64 n) noexcept {
  double sum = 0;
  for (i64 d = 0; d < n; ++d) sum += get(x, i + d) * get(y, j + d);
  return sum;
}

// Element i of keys or values, which may be codes, decoded to the work dtype.
double cached(const TensorView& x, i64 i, DType work) noexcept {
  if (x.dtype != DType::I8) return get(x, i);
  const float value = static_cast<float>(x.as<std::int8_t>()[i]) * x.scale[i / x.dim(3)];
  if (work == DType::BF16) return static_cast<double>(to_float(to_bf16(value)));
  return static_cast<double>(work == DType::F16 ? to_float(to_f16(value)) : value);
}

// One attention call: which keys its rows see, and how products become scores.
struct Scores {
  const AttentionParams& p;
  i64 B, T, S;

  bool visible(i64 b, i64 h, i64 i, i64 j) const noexcept {
    const i64 position = i + S - T, query = p.grid.row0 + i, key = p.grid.col0 + j;
    i64 first = 0;  // of the document
    if (p.documents != nullptr) {
      first = p.documents[b * p.positions + query];
      if (key < first || key >= p.documents[(B + b) * p.positions + query]) return false;
    }
    if (p.causal && j > position) return false;
    if (p.window > 0 && j <= position - p.window && key - first >= p.sinks) return false;
    const AttentionBlocks& blocks = p.blocks;
    if (!blocks.sparse()) return true;
    const i64 met = key / blocks.block;
    return (blocks.keys_of(p.grid.head0 + h, query / blocks.block)[met / 64] >> (met % 64) & 1) != 0;
  }
  // A score, and its derivative by the scaled product.
  struct Score {
    double value, slope;
  };
  Score of(double product, i64 h, i64 i, i64 j) const noexcept {
    Score s{p.scale * product, 1};
    if (p.softcap > 0) {
      const double cap = p.softcap, t = std::tanh(s.value / cap);
      s = {cap * t, 1 - t * t};
    }
    if (p.bias != nullptr) {
      const i64 distance = p.grid.col0 + j - (p.grid.row0 + i);
      s.value += p.bias[(p.grid.head0 + h) * (2 * p.reach + 1) + std::clamp(distance, -p.reach, p.reach) + p.reach];
    }
    return s;
  }
};

// The factor of dropout for the probability of (b, h, i, j): 0 or 1/(1-p).
double keep(const AttentionParams& p, u64 element) noexcept {
  if (p.dropout <= 0) return 1;
  return RngKey::uniform(p.rng.bits(element)) >= p.dropout ? 1 / (1 - static_cast<double>(p.dropout)) : 0;
}

}  // namespace

void attention_fwd(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v, const AttentionParams& p,
                   Stream& stream) noexcept {
  for (i64 s = 0; s < p.sequences.count; ++s) {
    const i64 begin = p.sequences.begins[s], n = p.sequences.begins[s + 1] - begin;
    const auto rows = [&](TensorView x, int dim) {
      x.data = x.as<char>() + begin * x.stride[dim] * dtype_bytes(x.dtype);
      x.shape[dim] = n;
      return x;
    };
    k.shape[1] = v.shape[1] = p.sequences.keys[s];
    attention_fwd(rows(o, 1), rows(lse, 2), rows(q, 1), k, v, p.of_sequence(s), stream);
  }
  if (p.sequences) return;
  const i64 B = q.dim(0), T = q.dim(1), H = q.dim(2), D = q.dim(3), S = k.dim(1), G = k.dim(2), Dv = v.dim(3);
  const AttentionGrid grid = p.grid.of(H, T, S);
  const Scores scores{p, B, T, S};
  std::vector<double> weight(static_cast<size_t>(S)), out(static_cast<size_t>(Dv));
  for (i64 row = 0; row < B * H * T; ++row) {
    const i64 b = row / (H * T), h = row / T % H, i = row % T, g = h / (H / G);
    double top = -kInfinity, sum = 0;
    for (i64 j = 0; j < S; ++j) {
      const bool seen = scores.visible(b, h, i, j);
      double product = 0;
      for (i64 d = 0; d < D && seen; ++d)
        product += get(q, at(q, b, i, h) + d) * cached(k, at(k, b, p.key_row(j), g) + d, q.dtype);
      const double score = seen ? scores.of(product, h, i, j).value : -kInfinity;
      weight[j] = score;
      top = std::max(top, score);
    }
    if (top == -kInfinity) top = 0;
    out.assign(static_cast<size_t>(Dv), 0);
    for (i64 j = 0; j < S; ++j) {
      const double e = std::exp(weight[j] - top);
      if (e == 0) continue;
      sum += e;
      const double w = e * keep(p, static_cast<u64>(grid.row(b, h, i) + j));
      for (i64 d = 0; d < Dv; ++d) out[d] += w * cached(v, at(v, b, p.key_row(j), g) + d, q.dtype);
    }
    for (i64 d = 0; d < Dv; ++d) put(o, at(o, b, i, h) + d, sum == 0 ? 0 : out[d] / sum);
    put(lse, at_row(lse, b, h, i), sum == 0 ? kInfinity : top + std::log(sum));
  }
}

void attention_bwd(TensorView dq, TensorView dk, TensorView dv, TensorView dout, TensorView q, TensorView k,
                   TensorView v, TensorView o, TensorView lse, const AttentionParams& p, Stream&) noexcept {
  const i64 B = q.dim(0), T = q.dim(1), H = q.dim(2), D = q.dim(3), S = k.dim(1), G = k.dim(2), R = H / G;
  const i64 Dv = v.dim(3);
  const AttentionGrid grid = p.grid.of(H, T, S);
  const Scores scores{p, B, T, S};
  std::vector<double> gq(static_cast<size_t>(D)), gk(static_cast<size_t>(S * D)), gv(static_cast<size_t>(S * Dv));
  for (i64 group = 0; group < B * G; ++group) {
    const i64 b = group / G, g = group % G;
    gk.assign(gk.size(), 0);
    gv.assign(gv.size(), 0);
    for (i64 h = g * R; h < (g + 1) * R; ++h) {
      for (i64 i = 0; i < T; ++i) {
        const i64 qi = at(q, b, i, h), doi = at(dout, b, i, h);
        const double delta = dot(dout, doi, o, at(o, b, i, h), Dv);
        gq.assign(gq.size(), 0);
        for (i64 j = 0; j < S; ++j) {
          if (!scores.visible(b, h, i, j)) continue;
          const i64 kj = at(k, b, j, g), vj = at(v, b, j, g);
          const Scores::Score score = scores.of(dot(q, qi, k, kj, D), h, i, j);
          const double prob = std::exp(score.value - get(lse, at_row(lse, b, h, i)));
          const double mask = keep(p, static_cast<u64>(grid.row(b, h, i) + j));
          const double ds = p.scale * score.slope * prob * (mask * dot(dout, doi, v, vj, Dv) - delta);
          for (i64 d = 0; d < D; ++d) {
            gq[d] += ds * get(k, kj + d);
            gk[j * D + d] += ds * get(q, qi + d);
          }
          for (i64 d = 0; d < Dv; ++d) gv[j * Dv + d] += prob * mask * get(dout, doi + d);
        }
        for (i64 d = 0; d < D; ++d) put(dq, at(dq, b, i, h) + d, gq[d]);
      }
    }
    for (i64 j = 0; j < S; ++j) {
      for (i64 d = 0; d < D; ++d) put(dk, at(dk, b, j, g) + d, gk[j * D + d]);
      for (i64 d = 0; d < Dv; ++d) put(dv, at(dv, b, j, g) + d, gv[j * Dv + d]);
    }
  }
}

void attention_merge(TensorView o, TensorView lse, TensorView o_part, TensorView lse_part, bool first,
                     Stream&) noexcept {
  const i64 B = o.dim(0), T = o.dim(1), H = o.dim(2), D = o.dim(3);
  for (i64 row = 0; row < B * T * H; ++row) {
    const i64 b = row / (T * H), t = row / H % T, h = row % H;
    const i64 to = at(o, b, t, h), from = at(o_part, b, t, h), to_lse = at_row(lse, b, h, t);
    const double part = get(lse_part, at_row(lse_part, b, h, t)), before = first ? kInfinity : get(lse, to_lse);
    if (part == kInfinity && !first) continue;
    const bool replace = before == kInfinity;
    const double top = std::max(before, part);
    const double mine = replace ? 0 : std::exp(before - top), other = replace ? 1 : std::exp(part - top);
    for (i64 d = 0; d < D; ++d) {
      const double sum = replace ? get(o_part, from + d) : mine * get(o, to + d) + other * get(o_part, from + d);
      put(o, to + d, sum / (mine + other));
    }
    put(lse, to_lse, replace ? part : top + std::log(mine + other));
  }
}

}  // namespace ds::ref
