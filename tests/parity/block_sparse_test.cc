// SPDX-License-Identifier: Apache-2.0
// Attention over block-sparse layouts: ref against a dense softmax with an explicit mask in fp64, every CPU against ref
// over blocks, layouts, dtypes, head dims, lengths, groups, masks, dropout and places in a sequence; all blocks against
// no layout, bit for bit; and that no layout is passed over.

#include <functional>

#include "parity/parity.h"

namespace ds::testing {
namespace block_sparse_test {

using HasBlock = std::function<bool(i64 layout, i64 query, i64 key)>;

// Bits of a layout and their transpose.
struct Layout {
  Layout(i64 block, i64 count, i64 layouts, const HasBlock& has) : block(block), count(count), layouts(layouts) {
    const i64 words = AttentionBlocks{.block = block, .count = count}.words();
    keys.resize(static_cast<size_t>(layouts * count * words));
    queries.resize(keys.size());
    for (i64 l = 0; l < layouts; ++l) {
      for (i64 i = 0; i < count; ++i) {
        for (i64 j = 0; j < count; ++j) {
          if (!has(l, i, j)) continue;
          keys[static_cast<size_t>((l * count + i) * words + j / 64)] |= u64{1} << (j % 64);
          queries[static_cast<size_t>((l * count + j) * words + i / 64)] |= u64{1} << (i % 64);
        }
      }
    }
  }
  AttentionBlocks blocks(i64 query0 = 0, i64 key0 = 0) const {
    return {.block = block,
            .count = count,
            .layouts = layouts,
            .keys = keys.data(),
            .queries = queries.data(),
            .query0 = query0,
            .key0 = key0};
  }
  i64 block, count, layouts;
  std::vector<u64> keys, queries;
};

// Of every block a coin; the diagonal always when `rows_have_keys`.
HasBlock random_blocks(u32 seed, float share, bool rows_have_keys = true) {
  return [=](i64 layout, i64 query, i64 key) {
    if (rows_have_keys && query == key) return true;
    const RngKey coin{.seed = seed, .site = 9, .step = 0};
    return RngKey::uniform(coin.bits(static_cast<u64>((layout << 40) + (query << 20) + key))) < share;
  };
}
bool all_blocks(i64, i64, i64) { return true; }

struct Case {
  i64 B = 1, T = 100, S = 100, H = 2, G = 2, D = 64;
  bool causal = true;
  i64 window = 0;
  float dropout = 0;
  DType dtype = DType::F32;
  AttentionGrid grid{};
  i64 query0 = 0, key0 = 0;

  AttentionParams params(const Layout* layout) const {
    return {.scale = 1.0f / std::sqrt(static_cast<float>(D)),
            .causal = causal,
            .window = window,
            .dropout = dropout,
            .rng = {.seed = 5, .site = 2, .step = 1},
            .grid = grid,
            .blocks = layout != nullptr ? layout->blocks(query0, key0) : AttentionBlocks{}};
  }
  i64 num_blocks(i64 block) const { return (std::max(query0 + T, key0 + S) + block - 1) / block; }
  std::string name(i64 block) const {
    std::string s(dtype_name(dtype));
    for (i64 x : {B, T, S, H, G, D, query0, key0}) s += " " + std::to_string(x);
    return s + (causal ? " causal" : "") + " window " + std::to_string(window) + " dropout " + std::to_string(dropout) +
           " block " + std::to_string(block);
  }
};

struct Results {
  Tensor o, lse, dq, dk, dv;
};
struct Inputs {
  explicit Inputs(const Case& c) : q(c.dtype, {c.B, c.T, c.H, c.D}), k(c.dtype, {c.B, c.S, c.G, c.D}), v(k), dout(q) {
    q.randomize(1);
    k.randomize(2);
    v.randomize(3);
    dout.randomize(4);
  }
  Tensor q, k, v, dout;
};
// Backward from `forward` where one is given, else from its own.
Results run(const OpTable& ops, const Case& c, const Inputs& in, const Layout* layout, const Results* forward = nullptr,
            int threads = 2) {
  ThreadPool pool(threads);
  Stream stream{.pool = &pool};
  Results r{in.q, Tensor(DType::F32, {c.B, c.H, c.T}), in.q, in.k, in.v};
  ops.attention_fwd(r.o, r.lse, in.q, in.k, in.v, c.params(layout), stream);
  const Results& from = forward != nullptr ? *forward : r;
  if (c.query0 % (layout != nullptr ? layout->block : 1) == 0) {
    ops.attention_bwd(r.dq, r.dk, r.dv, in.dout, in.q, in.k, in.v, from.o, from.lse, c.params(layout), stream);
  }
  return r;
}
void expect_same(const Results& a, const Results& b, const std::string& what) {
  expect_same_bits(a.o, b.o, what + " o");
  expect_same_bits(a.lse, b.lse, what + " lse");
  expect_same_bits(a.dq, b.dq, what + " dq");
  expect_same_bits(a.dk, b.dk, what + " dk");
  expect_same_bits(a.dv, b.dv, what + " dv");
}

void expect_agrees_with_ref(const Case& c, i64 block, const HasBlock& has, bool layout_per_head = false) {
  const Layout layout(block, c.num_blocks(block), layout_per_head ? std::max(c.H, c.grid.heads) : 1, has);
  const Inputs in(c);
  const Results want = run(ref_ops(), c, in, &layout);
  const double slack = c.dtype == DType::F32 ? 250 : test_device() != nullptr ? 8 : 2.2;
  // Rows see unlike numbers of keys: the size of the terms that cancel is that of rows with few.
  const double term = 1.0 / 8;
  for (const OpTable* ops : backends()) {
    const std::string what = std::string(ops->name) + ": " + c.name(block);
    const Results got = run(*ops, c, in, &layout, &want);
    expect_close(got.o, want.o, slack, what + " o");
    expect_close(got.lse, want.lse, 30, what + " lse", 1);
    if (c.query0 % block != 0) continue;
    expect_close(got.dq, want.dq, slack, what + " dq", term);
    expect_close(got.dk, want.dk, slack, what + " dk", term);
    expect_close(got.dv, want.dv, slack, what + " dv", term);
  }
}

TEST(BlockSparse, RefIsDenseAttentionUnderTheMask) {
  ThreadPool pool(1);
  Stream stream{.pool = &pool};
  u32 seed = 0;
  for (const Case& c : {Case{.B = 2, .T = 37, .S = 37, .H = 4, .G = 2, .D = 6},
                        Case{.T = 70, .S = 53, .H = 2, .G = 1, .D = 4, .causal = false},
                        Case{.T = 5, .S = 60, .H = 2, .G = 2, .D = 4, .window = 30, .query0 = 55}}) {
    const Layout layout(16, c.num_blocks(16), c.H, random_blocks(++seed, 0.4f, false));
    const Inputs in(c);
    const Results got = run(ref_ops(), c, in, &layout);
    const i64 R = c.H / c.G;
    const auto at = [&](const Tensor& x, i64 b, i64 t, i64 h, i64 d) {
      const auto& shape = x.view().shape;
      return static_cast<double>(x.at(((b * shape[1] + t) * shape[2] + h) * c.D + d));
    };
    std::vector<double> dk(static_cast<size_t>(in.k.numel())), dv(dk);
    const double scale = 1 / std::sqrt(static_cast<double>(c.D));
    for (i64 n = 0; n < c.B * c.H * c.T; ++n) {
      const i64 b = n / (c.H * c.T), h = n / c.T % c.H, i = n % c.T, g = h / R;
      std::vector<double> w(static_cast<size_t>(c.S)), grad(w), out(static_cast<size_t>(c.D)), dq(out);
      double sum = 0;
      for (i64 j = 0; j < c.S; ++j) {
        const i64 query = (c.query0 + i) / 16, key = j / 16, place = i + c.S - c.T;
        const bool seen = random_blocks(seed, 0.4f, false)(h, query, key) && (!c.causal || j <= place) &&
                          (c.window == 0 || j > place - c.window);
        double s = 0;
        for (i64 d = 0; d < c.D; ++d) s += at(in.q, b, i, h, d) * at(in.k, b, j, g, d) * scale;
        w[j] = seen ? std::exp(s) : 0;
        sum += w[j];
      }
      double delta = 0;
      for (i64 d = 0; d < c.D && sum > 0; ++d) {
        for (i64 j = 0; j < c.S; ++j) out[d] += w[j] / sum * at(in.v, b, j, g, d);
        delta += out[d] * at(in.dout, b, i, h, d);
      }
      for (i64 j = 0; j < c.S && sum > 0; ++j) {
        for (i64 d = 0; d < c.D; ++d) grad[j] += at(in.dout, b, i, h, d) * at(in.v, b, j, g, d);
        const double ds = w[j] / sum * (grad[j] - delta) * scale;
        for (i64 d = 0; d < c.D; ++d) {
          const auto kv = static_cast<size_t>(((b * c.S + j) * c.G + g) * c.D + d);
          dq[d] += ds * at(in.k, b, j, g, d);
          dk[kv] += ds * at(in.q, b, i, h, d);
          dv[kv] += w[j] / sum * at(in.dout, b, i, h, d);
        }
      }
      for (i64 d = 0; d < c.D; ++d) {
        ASSERT_NEAR(at(got.o, b, i, h, d), out[d], 1e-5) << c.name(16);
        if (c.query0 % 16 == 0) ASSERT_NEAR(at(got.dq, b, i, h, d), dq[d], 1e-5) << c.name(16);
      }
      const float lse = got.lse.at((b * c.H + h) * c.T + i);
      if (sum == 0) {
        ASSERT_EQ(lse, INFINITY);
      } else {
        ASSERT_NEAR(lse, std::log(sum), 1e-5) << c.name(16);
      }
    }
    for (i64 x = 0; x < in.k.numel() && c.query0 % 16 == 0; ++x) {
      ASSERT_NEAR(got.dk.at(x), dk[static_cast<size_t>(x)], 1e-5) << c.name(16);
      ASSERT_NEAR(got.dv.at(x), dv[static_cast<size_t>(x)], 1e-5) << c.name(16);
    }
  }
}

TEST(BlockSparse, AgreesWithRef) {
  u32 n = 0;
  for (i64 block : {16, 32, 64, 128}) {
    for (i64 D : {2, 16, 34, 64, 80, 128, 256}) {
      for (DType dtype : kWorkDTypes) {
        const i64 G = 1 + n % 2, R = 1 + n / 2 % 2;
        const i64 T = std::array{i64{100}, i64{129}, i64{257}, i64{64}, i64{330}}[n % 5];
        expect_agrees_with_ref({.B = 1 + n % 4 / 3,
                                .T = T,
                                .S = T,
                                .H = R * G,
                                .G = G,
                                .D = D,
                                .causal = n % 3 != 0,
                                .window = n % 7 == 0 ? 50 : 0,
                                .dropout = n % 4 == 0 ? 0.3f : 0.0f,
                                .dtype = dtype},
                               block, random_blocks(n, n % 2 == 0 ? 0.2f : 0.6f), n % 3 == 1);
        if (HasFatalFailure()) return;
        ++n;
      }
    }
  }
}

// Lengths that differ, rows without keys, and calls that are a part of a longer sequence.
TEST(BlockSparse, AgreesWithRefInPlacesOfASequence) {
  u32 n = 0;
  for (i64 block : {16, 64, 128}) {
    for (DType dtype : kWorkDTypes) {
      for (const auto& [T, query0] : {std::pair<i64, i64>{1, 300}, {7, 290}, {150, 128}, {128, 256}}) {
        for (i64 key0 : {i64{0}, i64{128}}) {
          const i64 S = query0 + T - key0;
          if (S <= 0) continue;
          expect_agrees_with_ref({.T = T,
                                  .S = S,
                                  .H = 4,
                                  .G = 2,
                                  .D = 32,
                                  .causal = n % 3 != 0,
                                  .dropout = n % 2 == 0 ? 0.3f : 0.0f,
                                  .dtype = dtype,
                                  .grid = {.heads = 8, .head0 = 4},
                                  .query0 = query0,
                                  .key0 = key0},
                                 block, random_blocks(n, 0.3f, /*rows_have_keys=*/n % 4 == 0), n % 2 == 0);
          if (HasFatalFailure()) return;
          ++n;
        }
      }
    }
  }
  // Decoding over many keys, which are split.
  expect_agrees_with_ref({.T = 2, .S = 2100, .H = 4, .G = 2, .D = 32, .query0 = 2098}, 16, random_blocks(5, 0.1f));
}

TEST(BlockSparse, AllBlocksAreTheBitsOfNoLayout) {
  u32 n = 0;
  for (i64 block : {16, 32, 64, 128}) {
    for (DType dtype : kWorkDTypes) {
      for (i64 T : {33, 128, 300, 700}) {
        const Case c{.T = T,
                     .S = T,
                     .H = 4,
                     .G = 2,
                     .D = n % 2 == 0 ? 64 : 40,
                     .causal = n % 3 != 0,
                     .window = n % 5 == 0 ? 90 : 0,
                     .dropout = n % 4 == 0 ? 0.3f : 0.0f,
                     .dtype = dtype};
        const Inputs in(c);
        for (i64 layouts : {i64{1}, c.H}) {
          const Layout layout(block, c.num_blocks(block), layouts, all_blocks);
          for (const OpTable* ops : backends()) {
            expect_same(run(*ops, c, in, &layout), run(*ops, c, in, nullptr), std::string(ops->name) + c.name(block));
            if (HasFatalFailure()) return;
          }
        }
        ++n;
      }
    }
  }
}

TEST(BlockSparse, ResultsDoNotDependOnThreads) {
  for (const Case& c : {Case{.B = 2, .T = 300, .S = 300, .H = 6, .G = 2, .D = 34},
                        Case{.T = 700, .S = 700, .H = 1, .G = 1, .D = 16, .dropout = 0.3f, .dtype = DType::BF16}}) {
    const Layout layout(16, c.num_blocks(16), c.H, random_blocks(3, 0.3f));
    const Inputs in(c);
    for (const OpTable* ops : backends()) {
      const Results want = run(*ops, c, in, &layout, nullptr, 1);
      for (int threads : {2, 3, 5}) expect_same(run(*ops, c, in, &layout, nullptr, threads), want, ops->name);
    }
  }
}

// A back end that passes a layout over gives what dense attention gives.
TEST(BlockSparse, NoLayoutIsPassedOver) {
  for (i64 D : {16, 32, 64, 80, 96, 128, 160, 192, 256}) {
    for (i64 block : {16, 32, 64, 128}) {
      for (DType dtype : kWorkDTypes) {
        const Case c{.T = 2 * block + 5, .S = 2 * block + 5, .H = 1, .G = 1, .D = D, .dtype = dtype};
        const Inputs in(c);
        // The first block is seen by itself alone.
        const Layout layout(block, 3, 1, [](i64, i64 query, i64 key) { return key > 0 || query == 0; });
        for (const OpTable* ops : backends()) {
          const Results some = run(*ops, c, in, &layout), all = run(*ops, c, in, nullptr);
          const i64 last = c.T * D - 1;
          EXPECT_NE(some.o.at(last), all.o.at(last)) << ops->name << " " << c.name(block);
          EXPECT_NE(some.lse.at(c.T - 1), all.lse.at(c.T - 1)) << ops->name << " " << c.name(block);
          EXPECT_NE(some.dq.at(last), all.dq.at(last)) << ops->name << " " << c.name(block);
          EXPECT_NE(some.dk.at(0), all.dk.at(0)) << ops->name << " " << c.name(block);
          EXPECT_NE(some.dv.at(0), all.dv.at(0)) << ops->name << " " << c.name(block);
        }
      }
    }
  }
}

}  // namespace block_sparse_test
}  // namespace ds::testing
