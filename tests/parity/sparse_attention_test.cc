// SPDX-License-Identifier: Apache-2.0
// attention_fwd and attention_bwd over block-sparse layouts, against dense attention in fp64 that hides what the layout
// does not have: random layouts over blocks, head dims, dtypes, lengths, groups, masks, dropout and places in a
// sequence; and a layout that has everything, which changes no bit.

#include <functional>

#include "parity/parity.h"
#include "slow_set.h"

namespace ds::testing {
namespace sparse_attention_test {

struct Case {
  i64 B = 1, T = 97, S = 97, H = 2, G = 1, D = 64;
  i64 block = 16;
  bool causal = false;
  i64 window = 0;
  float dropout = 0;
  DType dtype = DType::F32;
  bool per_head = false;           // else one layout for all heads
  i64 query0 = 0, key0 = 0;        // places in the sequence
  double density = 0.4;            // of the blocks that are there
  i64 model_heads = 0, head0 = 0;  // of which these are some

  i64 count() const { return (std::max(query0 + T, key0 + S) + block - 1) / block + 1; }
  i64 words() const { return (count() + 63) / 64; }
  i64 layouts() const { return per_head ? std::max(model_heads, H) : 1; }
  std::string name() const {
    std::string s(dtype_name(dtype));
    for (i64 x : {B, T, S, H, G, D}) s += " " + std::to_string(x);
    s += " block " + std::to_string(block) + (per_head ? " per head" : "") + (causal ? " causal" : "");
    return s + " window " + std::to_string(window) + " dropout " + std::to_string(dropout) + " at " +
           std::to_string(query0) + "," + std::to_string(key0);
  }
};

// Bits of a layout, both ways. Nobody may read what lies beyond the blocks of a call, so it is all ones.
class Layout {
 public:
  using Has = std::function<bool(i64 layout, i64 query, i64 key)>;

  Layout(const Case& c, const Has& has) : case_(c), keys_(size(c)), queries_(size(c)) {
    const i64 queries_end = (c.query0 + c.T + c.block - 1) / c.block, keys_end = (c.key0 + c.S + c.block - 1) / c.block;
    for (i64 l = 0; l < c.layouts(); ++l) {
      for (i64 i = 0; i < c.count(); ++i) {
        for (i64 j = 0; j < c.words() * 64; ++j) {
          if (j >= c.count() || i >= queries_end || j >= keys_end) {
            keys_[at(l, i, j)] |= u64{1} << j % 64;
          } else if (has(l, i, j)) {
            keys_[at(l, i, j)] |= u64{1} << j % 64;
          }
          if (j >= c.count() || j >= queries_end || i >= keys_end) {
            queries_[at(l, i, j)] |= u64{1} << j % 64;
          } else if (has(l, j, i)) {
            queries_[at(l, i, j)] |= u64{1} << j % 64;
          }
        }
      }
    }
  }
  bool has(i64 head, i64 i, i64 j) const {
    const i64 layout = case_.per_head ? case_.head0 + head : 0;
    const i64 query = (case_.query0 + i) / case_.block, key = (case_.key0 + j) / case_.block;
    return (keys_[at(layout, query, key)] >> key % 64 & 1) != 0;
  }
  AttentionBlocks blocks(bool backward) const {
    return {.block = case_.block,
            .count = case_.count(),
            .layouts = case_.layouts(),
            .keys = keys_.data(),
            .queries = backward ? queries_.data() : nullptr};
  }

 private:
  static size_t size(const Case& c) { return static_cast<size_t>(c.layouts() * c.count() * c.words()); }
  size_t at(i64 layout, i64 row, i64 bit) const {
    return static_cast<size_t>((layout * case_.count() + row) * case_.words() + bit / 64);
  }

  Case case_;
  std::vector<u64> keys_, queries_;
};

// Every seventh block of queries meets nothing.
Layout random_layout(const Case& c) {
  return Layout(c, [&](i64 l, i64 i, i64 j) {
    if (i % 7 == 5) return false;
    const PhiloxBlock r = RngKey{9, 3, static_cast<u32>(l)}.block(static_cast<u64>(i * 100000 + j));
    return static_cast<double>(RngKey::uniform(r[0])) < c.density;
  });
}
Layout full_layout(const Case& c) {
  return Layout(c, [](i64, i64, i64) { return true; });
}

AttentionParams params_of(const Case& c, const Layout* layout, bool backward = true) {
  return {.scale = 1.0f / std::sqrt(static_cast<float>(c.D)),
          .causal = c.causal,
          .window = c.window,
          .dropout = c.dropout,
          .rng = {.seed = 5, .site = 2, .step = 1},
          .grid = {.heads = c.model_heads, .head0 = c.head0, .row0 = c.query0, .col0 = c.key0},
          .blocks = layout != nullptr ? layout->blocks(backward) : AttentionBlocks{}};
}

// A tensor [B, tokens, heads, D], of which the heads but one are used.
struct Heads {
  Heads(DType dtype, i64 B, i64 tokens, i64 heads, i64 D) : all(dtype, {B, tokens, heads + 1, D}) {}
  TensorView view() const {
    TensorView v = all;
    v.data = v.as<char>() + v.dim(3) * dtype_bytes(v.dtype);
    v.shape[2] -= 1;
    return v;
  }
  i64 at(i64 b, i64 token, i64 head) const {
    const TensorView& v = all.view();
    return ((b * v.dim(1) + token) * v.dim(2) + head + 1) * v.dim(3);
  }
  Tensor packed() const {
    const TensorView v = view();
    Tensor out(v.dtype, {v.dim(0), v.dim(1), v.dim(2), v.dim(3)});
    for (i64 row = 0; row < v.numel() / v.dim(3); ++row) {
      const i64 from = at(row / v.dim(2) / v.dim(1), row / v.dim(2) % v.dim(1), row % v.dim(2));
      for (i64 d = 0; d < v.dim(3); ++d) out.set(row * v.dim(3) + d, all.at(from + d));
    }
    return out;
  }

  Tensor all;
};

struct Inputs {
  explicit Inputs(const Case& c)
      : q(c.dtype, c.B, c.T, c.H, c.D),
        k(c.dtype, c.B, c.S, c.G, c.D),
        v(c.dtype, c.B, c.S, c.G, c.D),
        dout(c.dtype, c.B, c.T, c.H, c.D) {
    u32 seed = 1;
    for (Heads* x : {&q, &k, &v, &dout}) x->all.randomize(seed++);
  }
  Heads q, k, v, dout;
};

struct Results {
  Tensor o, lse, dq, dk, dv;
};

// Visible keys of a row of the call.
using Visible = std::function<bool(i64 h, i64 i, i64 j)>;

Results reference(const Case& c, const Inputs& in, const Visible& visible, bool backward = true) {
  const AttentionParams p = params_of(c, nullptr);
  const AttentionGrid grid = p.grid.of(c.H, c.T, c.S);
  const i64 D = c.D, R = c.H / c.G;
  const auto values = [](const Heads& x) {
    std::vector<double> data(static_cast<size_t>(x.all.numel()));
    for (size_t i = 0; i < data.size(); ++i) data[i] = x.all.at(static_cast<i64>(i));
    return data;
  };
  const std::vector<double> q = values(in.q), k = values(in.k), v = values(in.v), dout = values(in.dout);
  std::vector<double> dk(static_cast<size_t>(c.B * c.S * c.G * D)), dv(dk), weight(static_cast<size_t>(c.S));
  const auto dot = [&](const std::vector<double>& x, i64 i, const std::vector<double>& y, i64 j) {
    double sum = 0;
    for (i64 d = 0; d < D; ++d) sum += x[i + d] * y[j + d];
    return sum;
  };
  Results r = {Tensor(c.dtype, {c.B, c.T, c.H, D}), Tensor(DType::F32, {c.B, c.H, c.T}),
               Tensor(c.dtype, {c.B, c.T, c.H, D}), Tensor(c.dtype, {c.B, c.S, c.G, D}),
               Tensor(c.dtype, {c.B, c.S, c.G, D})};
  std::vector<double> out(static_cast<size_t>(D)), dq(out);
  std::vector<i64> seen;
  for (i64 row = 0; row < c.B * c.H * c.T; ++row) {
    const i64 b = row / (c.H * c.T), h = row / c.T % c.H, i = row % c.T, g = h / R, to = ((b * c.T + i) * c.H + h) * D;
    seen.clear();
    double top = -INFINITY, sum = 0;
    for (i64 j = 0; j < c.S; ++j) {
      if (!visible(h, i, j)) continue;
      seen.push_back(j);
      weight[j] = p.scale * dot(q, in.q.at(b, i, h), k, in.k.at(b, j, g));
      top = std::max(top, weight[j]);
    }
    const auto kept = [&](i64 j) {
      if (p.dropout <= 0) return 1.0;
      const u64 element = static_cast<u64>(grid.row(b, h, i) + j);
      return RngKey::uniform(p.rng.bits(element)) >= p.dropout ? 1 / (1 - static_cast<double>(p.dropout)) : 0.0;
    };
    out.assign(out.size(), 0);
    for (i64 j : seen) {
      const double e = std::exp(weight[j] - top);
      sum += e;
      for (i64 d = 0; d < D; ++d) out[d] += e * kept(j) * v[in.v.at(b, j, g) + d];
    }
    for (i64 d = 0; d < D; ++d) r.o.set(to + d, seen.empty() ? 0 : static_cast<float>(out[d] / sum));
    r.lse.set(row, seen.empty() ? INFINITY : static_cast<float>(top + std::log(sum)));
    if (!backward) continue;
    double delta = 0;  // of the output as it is stored
    for (i64 d = 0; d < D; ++d) delta += dout[in.dout.at(b, i, h) + d] * r.o.at(to + d);
    dq.assign(dq.size(), 0);
    for (i64 j : seen) {
      const double prob = std::exp(weight[j] - r.lse.at(row)), mask = kept(j);
      const double ds = p.scale * prob * (mask * dot(dout, in.dout.at(b, i, h), v, in.v.at(b, j, g)) - delta);
      for (i64 d = 0; d < D; ++d) {
        dq[d] += ds * k[in.k.at(b, j, g) + d];
        dk[((b * c.S + j) * c.G + g) * D + d] += ds * q[in.q.at(b, i, h) + d];
        dv[((b * c.S + j) * c.G + g) * D + d] += prob * mask * dout[in.dout.at(b, i, h) + d];
      }
    }
    for (i64 d = 0; d < D; ++d) r.dq.set(to + d, static_cast<float>(dq[d]));
  }
  for (size_t i = 0; i < dk.size(); ++i) {
    r.dk.set(static_cast<i64>(i), static_cast<float>(dk[i]));
    r.dv.set(static_cast<i64>(i), static_cast<float>(dv[i]));
  }
  return r;
}

bool in_mask(const Case& c, i64 i, i64 j) {
  const i64 position = i + c.S - c.T;
  return (!c.causal || j <= position) && (c.window <= 0 || j > position - c.window);
}
Results reference(const Case& c, const Inputs& in, const Layout& layout, bool backward = true) {
  return reference(
      c, in, [&](i64 h, i64 i, i64 j) { return in_mask(c, i, j) && layout.has(h, i, j); }, backward);
}

// The backward pass takes o and lse of `forward`.
Results run(const OpTable& ops, const Case& c, const Inputs& in, const Layout* layout, const Results* forward,
            bool backward = true) {
  ThreadPool pool(2);
  Stream stream{.pool = &pool};
  Heads o(c.dtype, c.B, c.T, c.H, c.D), dq(o), dk(c.dtype, c.B, c.S, c.G, c.D), dv(dk);
  Results r;
  r.lse = Tensor(DType::F32, {c.B, c.H, c.T});
  ops.attention_fwd(o.view(), r.lse, in.q.view(), in.k.view(), in.v.view(), params_of(c, layout, false), stream);
  r.o = o.packed();
  if (!backward) return r;
  const Results& f = forward != nullptr ? *forward : r;
  ops.attention_bwd(dq.view(), dk.view(), dv.view(), in.dout.view(), in.q.view(), in.k.view(), in.v.view(), f.o, f.lse,
                    params_of(c, layout), stream);
  r.dq = dq.packed();
  r.dk = dk.packed();
  r.dv = dv.packed();
  return r;
}

// The bounds of attention_test. A typical probability is the size of the terms that cancel in dq and dk.
void expect_close_results(const OpTable& ops, const Results& got, const Results& want, const Case& c, double seen,
                          bool backward, const std::string& what) {
  const double slack = c.dtype == DType::F32 ? 250.0 : rounds_probabilities(ops, c.dtype) ? 8 : 2.2;
  expect_close(got.o, want.o, slack, what + " o");
  expect_close(got.lse, want.lse, 30, what + " lse", 1);
  if (!backward) return;
  expect_close(got.dq, want.dq, slack, what + " dq", 1 / seen);
  expect_close(got.dk, want.dk, slack, what + " dk", 1 / seen);
  expect_close(got.dv, want.dv, slack, what + " dv");
}

// The part of the elements that differ by more than a tenth of the typical size.
double differing(const Tensor& a, const Tensor& b) {
  double square = 0, count = 0;
  for (i64 i = 0; i < a.numel(); ++i) square += double(a.at(i)) * a.at(i);
  const double typical = std::sqrt(square / static_cast<double>(a.numel()));
  for (i64 i = 0; i < a.numel(); ++i) count += std::abs(a.at(i) - b.at(i)) > 0.1 * typical;
  return count / static_cast<double>(a.numel());
}

class SparseAttention : public ::testing::Test {
 protected:
  // With `hiding`, dense attention must give another result, so that code which ignores the layout fails.
  static void expect_agrees(const Case& c, const Layout& layout, bool hiding, bool backward = true) {
    const Inputs in(c);
    const Results want = reference(c, in, layout, backward);
    double seen = 0, rows = 0;
    for (i64 h = 0; h < c.H; ++h) {
      for (i64 i = 0; i < c.T; ++i) {
        i64 n = 0;
        for (i64 j = 0; j < c.S; ++j) n += in_mask(c, i, j) && layout.has(h, i, j);
        seen += static_cast<double>(n);
        rows += n > 0;
      }
    }
    if (hiding) {
      const Results dense = reference(
          c, in, [&](i64, i64 i, i64 j) { return in_mask(c, i, j); }, backward);
      ASSERT_GT(differing(want.o, dense.o), 0.2) << c.name();
      if (backward) {
        ASSERT_GT(differing(want.dq, dense.dq), 0.2) << c.name();
        ASSERT_GT(differing(want.dk, dense.dk), 0.2) << c.name();
        ASSERT_GT(differing(want.dv, dense.dv), 0.2) << c.name();
      }
    }
    for (const OpTable* ops : backends()) {
      const std::string what = std::string(ops->name) + ": " + c.name();
      const Results got = run(*ops, c, in, &layout, &want, backward);
      expect_close_results(*ops, got, want, c, seen / std::max(rows, 1.0), backward, what);
      if (HasFatalFailure()) return;
      for (i64 row = 0; row < c.B * c.H * c.T; ++row) {  // what sees nothing is nothing, to the bit
        if (want.lse.at(row) != INFINITY) continue;
        const i64 at = ((row / (c.H * c.T) * c.T + row % c.T) * c.H + row / c.T % c.H) * c.D;
        for (i64 d = 0; d < c.D; ++d) {
          ASSERT_EQ(got.o.at(at + d), 0) << what;
          ASSERT_TRUE(!backward || got.dq.at(at + d) == 0) << what;
        }
      }
    }
  }
};

TEST_F(SparseAttention, AgreesWithDenseAttentionThatHidesTheRest) {
  constexpr i64 kLengths[][2] = {{97, 97}, {150, 150}, {70, 131}, {131, 70}, {128, 128}, {33, 190}};
  i64 n = 0;
  test::EveryNth tried(5);
  for (i64 D : {32, 64, 80, 96, 128, 160, 256}) {
    for (i64 block : {16, 32, 64, 128}) {
      for (DType dtype : kWorkDTypes) {
        if (!tried()) continue;
        const i64 more = block >= 64 ? block : 0;  // so that there are several blocks
        const i64 T = kLengths[n % 6][0] + more, S = kLengths[n % 6][1] + more;
        const i64 G = 1 + n % 2, R = D <= 96 ? 1 + n / 2 % 3 : 1;
        const bool causal = n % 3 == 0, windowed = n % 3 == 1;
        const Case c = {.B = n % 5 == 4 ? 2 : 1,
                        .T = T,
                        .S = S,
                        .H = R * G,
                        .G = G,
                        .D = D,
                        .block = block,
                        .causal = causal,
                        .window = windowed ? 2 * block + 5 : 0,
                        .dropout = n % 4 == 1 ? 0.3f : 0.0f,
                        .dtype = dtype,
                        .per_head = n % 4 < 2,
                        .query0 = n % 7 == 3 ? 3 * block : 0,
                        .key0 = n % 7 == 5 ? 2 * block : 0,
                        .density = windowed ? 0.6 : 0.4};
        expect_agrees(c, random_layout(c), true);
        if (HasFatalFailure()) return;
        ++n;
      }
    }
  }
}

// Heads whose vectors are not whole chunks, and random numbers that do not begin whole blocks.
TEST_F(SparseAttention, AgreesWithOddHeadDimsAndParts) {
  i64 n = 0;
  for (i64 D : {2, 34, 50, 130}) {
    for (DType dtype : kWorkDTypes) {
      const Case c = {.T = 85,
                      .S = 101 + n % 4,
                      .H = 4,
                      .G = 2,
                      .D = D,
                      .block = 16 << n % 2,
                      .causal = n % 2 == 0,
                      .dropout = 0.3f,
                      .dtype = dtype,
                      .per_head = true,
                      .model_heads = 9,
                      .head0 = 3};
      expect_agrees(c, random_layout(c), false);
      if (HasFatalFailure()) return;
      ++n;
    }
  }
}

// Rows of a fragment in two blocks of queries.
TEST_F(SparseAttention, QueriesBeginAnywhere) {
  i64 n = 0;
  for (DType dtype : kWorkDTypes) {
    for (i64 block : {16, 32, 64, 128}) {
      for (i64 T : {1, 3, 40}) {
        const i64 S = 300 + n;
        const Case c = {.T = T,
                        .S = S,
                        .H = 4,
                        .G = 2,
                        .D = n % 2 == 0 ? 64 : 128,
                        .block = block,
                        .causal = n % 4 != 0,
                        .dtype = dtype,
                        .per_head = n % 3 == 0,
                        .query0 = S - T,
                        .density = 0.5};
        expect_agrees(c, random_layout(c), false, false);
        if (HasFatalFailure()) return;
        ++n;
      }
    }
  }
}

// Few blocks far apart, in more words than are looked at together.
TEST_F(SparseAttention, LongSequencesWithFewBlocks) {
  for (DType dtype : {DType::F32, DType::BF16}) {
    const Case c = {.T = 100, .S = 40000, .H = 2, .G = 1, .D = 32, .block = 16, .dtype = dtype, .per_head = true};
    const Layout layout(
        c, [](i64 l, i64 i, i64 j) { return (j * 7 + i * 3 + l) % 613 == 0 || j == 2499 || (j > 1000 && j < 1070); });
    expect_agrees(c, layout, false, false);
    if (HasFatalFailure()) return;
    const Case back = {.T = 17000, .S = 70, .H = 2, .G = 1, .D = 32, .block = 16, .dtype = dtype, .per_head = true};
    const Layout few(back, [](i64 l, i64 i, i64 j) { return (i * 7 + j * 3 + l) % 211 == 0 || i == 1062; });
    expect_agrees(back, few, false);
    if (HasFatalFailure()) return;
  }
}

TEST_F(SparseAttention, ALayoutOfAllBlocksChangesNoBit) {
  constexpr i64 kLengths[][2] = {{97, 97}, {130, 150}, {150, 70}, {1, 200}};
  i64 n = 0;
  for (i64 D : {32, 64, 80, 128, 160, 256}) {
    for (i64 block : {16, 32, 64, 128}) {
      for (DType dtype : kWorkDTypes) {
        const auto [T, S] = kLengths[n % 4];
        const Case c = {.T = T,
                        .S = S,
                        .H = 2 * (1 + n % 2),
                        .G = 2,
                        .D = D,
                        .block = block,
                        .causal = n % 3 != 2,
                        .window = n % 3 == 1 ? 70 : 0,
                        .dropout = n % 5 == 0 ? 0.3f : 0.0f,
                        .dtype = dtype,
                        .query0 = n % 2 * 3 * block,
                        .key0 = n / 2 % 2 * 5 * block};
        const Inputs in(c);
        const Layout layout = full_layout(c);
        for (const OpTable* ops : backends()) {
          const Results want = run(*ops, c, in, nullptr, nullptr), got = run(*ops, c, in, &layout, nullptr);
          expect_same_bits(got.o, want.o, c.name() + " o");
          expect_same_bits(got.lse, want.lse, c.name() + " lse");
          expect_same_bits(got.dq, want.dq, c.name() + " dq");
          expect_same_bits(got.dk, want.dk, c.name() + " dk");
          expect_same_bits(got.dv, want.dv, c.name() + " dv");
        }
        if (HasFatalFailure()) return;
        ++n;
      }
    }
  }
}

TEST_F(SparseAttention, ALayoutOfNothingGivesNothing) {
  for (DType dtype : kWorkDTypes) {
    const Case c = {.T = 70, .S = 90, .H = 2, .G = 1, .D = 64, .dtype = dtype};
    const Layout layout(c, [](i64, i64, i64) { return false; });
    const Inputs in(c);
    for (const OpTable* ops : backends()) {
      const Results got = run(*ops, c, in, &layout, nullptr);
      for (i64 i = 0; i < got.lse.numel(); ++i) ASSERT_EQ(got.lse.at(i), INFINITY);
      for (const Tensor* x : {&got.o, &got.dq, &got.dk, &got.dv}) {
        for (i64 i = 0; i < x->numel(); ++i) ASSERT_EQ(x->at(i), 0);
      }
    }
  }
}

// Keys in pages: the bits of keys side by side, wherever pages are, and whatever is where nobody looks.
TEST_F(SparseAttention, PagesChangeNoBit) {
  i64 n = 0;
  test::EveryNth tried(7);
  for (i64 D : {32, 64, 80, 128, 160, 256}) {
    for (i64 block : {0, 16, 32, 64, 128}) {  // 0: no layout
      for (DType dtype : kWorkDTypes) {
        if (!tried()) continue;
        const i64 S = 290 + 7 * n, page = block == 0 ? 64 : block;
        const Case c = {.T = 1 + n % 2 * 2,
                        .S = S,
                        .H = 4,
                        .G = 2,
                        .D = D,
                        .block = page,
                        .causal = n % 5 != 4,
                        .window = n % 3 == 0 ? 130 : 0,
                        .dtype = dtype,
                        .per_head = n % 2 == 0,
                        .query0 = S - (1 + n % 2 * 2),
                        .density = 0.5};
        const Layout layout = random_layout(c);
        const Inputs in(c);
        const i64 pages = (S + page - 1) / page;
        const auto seen = [&](i64 p) {
          for (i64 j = p * page; j < std::min(S, (p + 1) * page); ++j) {
            for (i64 i = 0; i < c.T; ++i) {
              for (i64 h = 0; h < c.H; ++h) {
                if (in_mask(c, i, j) && (block == 0 || layout.has(h, i, j))) return true;
              }
            }
          }
          return false;
        };
        // Pages that are seen are stored in reverse order, then the last one, which is not full; the others share the
        // place of one of them.
        std::vector<i32> places(static_cast<size_t>(pages), 0);
        i32 used = 0;
        for (i64 p = pages - 2; p >= 0; --p) {
          if (seen(p)) places[p] = used++;
        }
        if (seen(pages - 1)) places[pages - 1] = used++;
        Heads k(dtype, 1, pages * page, c.G, D), v(k);  // S rows of which a device is given, whatever is in them
        for (Heads* x : {&k, &v}) x->all.randomize(77);
        for (i64 j = 0; j < S; ++j) {
          if (!seen(j / page)) continue;
          for (i64 g = 0; g < c.G; ++g) {
            const i64 to = k.at(0, places[j / page] * page + j % page, g), from = in.k.at(0, j, g);
            for (i64 d = 0; d < D; ++d) {
              k.all.set(to + d, in.k.all.at(from + d));
              v.all.set(to + d, in.v.all.at(from + d));
            }
          }
        }
        for (const OpTable* ops : backends()) {
          const Results want = run(*ops, c, in, block == 0 ? nullptr : &layout, nullptr, false);
          ThreadPool pool(2);
          Stream stream{.pool = &pool};
          AttentionParams p = params_of(c, block == 0 ? nullptr : &layout, false);
          p.pages = places.data();
          p.page = page;
          Heads o(dtype, 1, c.T, c.H, D);
          Tensor lse(DType::F32, {1, c.H, c.T});
          TensorView keys = k.view(), values = v.view();
          keys.shape[1] = values.shape[1] = S;
          ops->attention_fwd(o.view(), lse, in.q.view(), keys, values, p, stream);
          expect_same_bits(o.packed(), want.o, std::string(ops->name) + ": " + c.name() + " o");
          expect_same_bits(lse, want.lse, std::string(ops->name) + ": " + c.name() + " lse");
        }
        if (HasFailure()) return;
        ++n;
      }
    }
  }
}

// Keys and values of codes: the bits of the decoded ones.
TEST_F(SparseAttention, CodesOfKeysAreTheirDecodedValues) {
  i64 n = 0;
  for (i64 D : {32, 40, 64, 128, 256}) {
    for (i64 block : {0, 32}) {  // 0: no layout
      for (DType dtype : kWorkDTypes) {
        const i64 S = 30 + 211 * (n % 4);
        const Case c = {.T = n % 2 == 0 ? 1 : 9,
                        .S = S,
                        .H = 4,
                        .G = 2,
                        .D = D,
                        .block = std::max<i64>(block, 16),
                        .window = n % 3 == 0 ? 130 : 0,
                        .dtype = dtype,
                        .query0 = S - (n % 2 == 0 ? 1 : 9),
                        .density = 0.5};
        const Layout layout = random_layout(c);
        Inputs in(c);
        std::vector<std::int8_t> codes[2];
        std::vector<float> scales[2];
        for (const bool values : {false, true}) {
          Heads& x = values ? in.v : in.k;
          for (i64 j = 0; j < S; ++j) {
            for (i64 g = 0; g < c.G; ++g) {
              scales[values].push_back(0.01f + 1e-4f * static_cast<float>((j * 7 + g) % 50));
              for (i64 d = 0; d < D; ++d) {
                codes[values].push_back(static_cast<std::int8_t>((j * 31 + g * 17 + d * 57 + values) % 256 - 128));
                x.all.set(x.at(0, j, g) + d, static_cast<float>(codes[values].back()) * scales[values].back());
              }
            }
          }
        }
        for (const OpTable* ops : backends()) {
          if (ops->name.starts_with("cuda")) continue;  // attention_rows_test: by other kernels
          const Results want = run(*ops, c, in, block == 0 ? nullptr : &layout, nullptr, false);
          ThreadPool pool(2);
          Stream stream{.pool = &pool};
          const AttentionParams p = params_of(c, block == 0 ? nullptr : &layout, false);
          Heads o(dtype, 1, c.T, c.H, D);
          Tensor lse(DType::F32, {1, c.H, c.T});
          TensorView coded[2];
          for (const bool values : {false, true}) {
            coded[values] = TensorView::of(codes[values].data(), DType::I8, {1, S, c.G, D});
            coded[values].scale = scales[values].data();
          }
          ops->attention_fwd(o.view(), lse, in.q.view(), coded[0], coded[1], p, stream);
          expect_same_bits(o.packed(), want.o, std::string(ops->name) + ": " + c.name() + " o");
          expect_same_bits(lse, want.lse, std::string(ops->name) + ": " + c.name() + " lse");
        }
        if (HasFailure()) return;
        ++n;
      }
    }
  }
}

// Parts of the queries and keys, with the statistics of the whole: gradients add up.
TEST_F(SparseAttention, GradientsOfPartsAddUp) {
  for (DType dtype : kWorkDTypes) {
    const Case c = {.T = 130, .S = 150, .H = 4, .G = 2, .D = 64, .block = 16, .dtype = dtype, .per_head = true};
    const Layout layout = random_layout(c);
    const Inputs in(c);
    const Results want = reference(c, in, layout);
    for (const OpTable* ops : backends()) {
      ThreadPool pool(2);
      Stream stream{.pool = &pool};
      const auto tokens = [](TensorView x, i64 begin, i64 count) {
        x.data = x.as<char>() + begin * x.stride[1] * dtype_bytes(x.dtype);
        x.shape[1] = count;
        return x;
      };
      std::vector<Tensor> sums;
      for (const Tensor* x : {&want.dq, &want.dk, &want.dv}) {
        const TensorView& v = x->view();
        sums.push_back(Tensor(DType::F32, {v.dim(0), v.dim(1), v.dim(2), v.dim(3)}).fill(0));
      }
      for (const auto& [row, rows] : {std::pair<i64, i64>{0, 48}, {48, 82}}) {
        for (const auto& [key, keys] : {std::pair<i64, i64>{0, 80}, {80, 70}}) {
          AttentionParams p = params_of(c, &layout);
          p.grid.row0 = row;
          p.grid.col0 = key;
          Heads dq(dtype, c.B, rows, c.H, c.D), dk(dtype, c.B, keys, c.G, c.D), dv(dk);
          Tensor lse(DType::F32, {c.B, c.H, rows});
          for (i64 i = 0; i < lse.numel(); ++i) lse.set(i, want.lse.at(i / rows * c.T + row + i % rows));
          ops->attention_bwd(dq.view(), dk.view(), dv.view(), tokens(in.dout.view(), row, rows),
                             tokens(in.q.view(), row, rows), tokens(in.k.view(), key, keys),
                             tokens(in.v.view(), key, keys), tokens(want.o, row, rows), lse, p, stream);
          const auto add = [&](Tensor& sum, const Tensor& part, i64 first) {
            const i64 width = part.numel() / part.view().dim(1);  // one batch
            for (i64 i = 0; i < part.numel(); ++i) sum.set(first * width + i, sum.at(first * width + i) + part.at(i));
          };
          add(sums[0], dq.packed(), row);
          add(sums[1], dk.packed(), key);
          add(sums[2], dv.packed(), key);
        }
      }
      const double slack = dtype == DType::F32 ? 250.0 : 16, term = 1.0 / 60;
      expect_close(sums[0], want.dq, slack, "dq", term);
      expect_close(sums[1], want.dk, slack, "dk", term);
      expect_close(sums[2], want.dv, slack, "dv");
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace sparse_attention_test
}  // namespace ds::testing
