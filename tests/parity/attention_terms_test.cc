// SPDX-License-Identifier: Apache-2.0
// Terms of attention beyond a causal mask and a window: layouts of blocks, soft caps, biases by relative position,
// sinks and documents. ref is compared with a dense softmax with an explicit mask and with finite differences in fp64,
// every CPU with ref, each term alone and all together; threads do not change a bit, and every layout is tried.
// sparse_attention_test tests layouts on every device.

#include <functional>

#include "parity/parity.h"
#include "slow_set.h"

namespace ds::testing {
namespace attention_terms_test {

using HasBlock = std::function<bool(i64 layout, i64 query, i64 key)>;

// Bits of a layout and their transpose.
struct Layout {
  Layout(i64 tokens, i64 n, i64 heads, const HasBlock& has) : block(tokens), count(n), layouts(heads) {
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
  AttentionBlocks blocks() const {
    return {.block = block, .count = count, .layouts = layouts, .keys = keys.data(), .queries = queries.data()};
  }
  i64 block, count, layouts;
  std::vector<u64> keys, queries;
};

// Each block is present at random; the diagonal always is if `rows_have_keys`.
HasBlock random_blocks(u32 seed, float share, bool rows_have_keys = true) {
  return [=](i64 layout, i64 query, i64 key) {
    if (rows_have_keys && query == key) return true;
    const RngKey coin{.seed = seed, .site = 9, .step = 0};
    return RngKey::uniform(coin.bits(static_cast<u64>((layout << 40) + (query << 20) + key))) < share;
  };
}

struct Case {
  i64 B = 1, T = 100, S = 100, H = 2, G = 2, D = 64;
  bool causal = true;
  i64 window = 0;
  float dropout = 0;
  DType dtype = DType::F32;
  AttentionGrid grid{};
  i64 query0 = 0, key0 = 0;
  float softcap = 0;
  i64 sinks = 0, reach = -1;  // -1: there is no bias
  bool documents = false;

  // The tables that the terms point to.
  std::vector<float> bias_table() const {
    const RngKey key{.seed = 11, .site = 4, .step = 0};
    std::vector<float> table(reach < 0 ? 0 : static_cast<size_t>(std::max(H, grid.heads) * (2 * reach + 1)));
    for (size_t i = 0; i < table.size(); ++i) table[i] = 2 * RngKey::uniform(key.bits(i)) - 1;
    return table;
  }
  i64 positions() const { return std::max(query0 + T, key0 + S); }
  // Documents of 1 to 60 tokens, other ones in each sample.
  std::vector<i32> document_table() const {
    if (!documents) return {};
    std::vector<i32> table(static_cast<size_t>(2 * B * positions()));
    for (i64 b = 0; b < B; ++b) {
      const RngKey key{.seed = 12, .site = 4, .step = static_cast<u32>(b)};
      for (i64 begin = 0, n = 0; begin < positions(); ++n) {
        const i64 end = std::min(positions(), begin + 1 + key.bits(static_cast<u64>(n)) % 60);
        for (i64 t = begin; t < end; ++t) {
          table[static_cast<size_t>(b * positions() + t)] = static_cast<i32>(begin);
          table[static_cast<size_t>((B + b) * positions() + t)] = static_cast<i32>(end);
        }
        begin = end;
      }
    }
    return table;
  }

  AttentionParams params(const Layout* layout) const {
    AttentionGrid at = grid;
    at.row0 = query0, at.col0 = key0;
    return {.scale = 1.0f / std::sqrt(static_cast<float>(D)),
            .causal = causal,
            .window = window,
            .dropout = dropout,
            .rng = {.seed = 5, .site = 2, .step = 1},
            .grid = at,
            .blocks = layout != nullptr ? layout->blocks() : AttentionBlocks{}};
  }
  i64 num_blocks(i64 block) const { return (std::max(query0 + T, key0 + S) + block - 1) / block; }
  std::string name(i64 block) const {
    std::string s(dtype_name(dtype));
    for (i64 x : {B, T, S, H, G, D, query0, key0}) s += " " + std::to_string(x);
    return s + (causal ? " causal" : "") + " window " + std::to_string(window) + " dropout " + std::to_string(dropout) +
           " block " + std::to_string(block) + " softcap " + std::to_string(softcap) + " sinks " +
           std::to_string(sinks) + " reach " + std::to_string(reach) + (documents ? " documents" : "");
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
  const std::vector<float> bias = c.bias_table();
  const std::vector<i32> documents = c.document_table();
  AttentionParams p = c.params(layout);
  p.softcap = c.softcap;
  p.sinks = c.sinks;
  if (!bias.empty()) p.bias = bias.data(), p.reach = c.reach;
  if (!documents.empty()) p.documents = documents.data(), p.positions = c.positions();
  ops.attention_fwd(r.o, r.lse, in.q, in.k, in.v, p, stream);
  const Results& from = forward != nullptr ? *forward : r;
  if (c.query0 % (layout != nullptr ? layout->block : 1) == 0) {
    ops.attention_bwd(r.dq, r.dk, r.dv, in.dout, in.q, in.k, in.v, from.o, from.lse, p, stream);
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

// block 0: no layout.
void expect_agrees_with_ref(const Case& c, i64 block, const HasBlock& has, bool layout_per_head = false) {
  const Layout some(std::max<i64>(block, 16), c.num_blocks(std::max<i64>(block, 16)),
                    layout_per_head ? std::max(c.H, c.grid.heads) : 1, has);
  const Layout* const layout = block > 0 ? &some : nullptr;
  const Inputs in(c);
  const Results want = run(ref_ops(), c, in, layout);
  // Rows see unlike numbers of keys: the size of the terms that cancel is that of rows with few.
  const double term = 1.0 / 8;
  for (const OpTable* ops : backends()) {
    const std::string what = std::string(ops->name) + ": " + c.name(block);
    const bool rounds = rounds_probabilities(*ops, c.dtype);
    const double slack = c.dtype == DType::F32 ? 250 : rounds ? 8 : 2.2;
    // The first keys are seen by all rows, and their dv is a sum of as many probabilities, which may be rounded.
    const double rounded_sums = rounds ? 1.5 : 1;
    const Results got = run(*ops, c, in, layout, &want);
    expect_close(got.o, want.o, slack, what + " o");
    expect_close(got.lse, want.lse, 30, what + " lse", 1);
    if (block > 0 && c.query0 % block != 0) continue;
    expect_close(got.dq, want.dq, slack, what + " dq", term);
    expect_close(got.dk, want.dk, slack, what + " dk", term);
    expect_close(got.dv, want.dv, rounded_sums * slack, what + " dv", term);
  }
}

TEST(AttentionTerms, RefIsDenseAttentionUnderTheMask) {
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
        if (c.query0 % 16 != 0) continue;
        ASSERT_NEAR(at(got.dq, b, i, h, d), dq[d], 1e-5) << c.name(16);
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

// Lengths that differ, rows without keys, and calls that are a part of a longer sequence.
TEST(AttentionTerms, AgreesWithRefInPlacesOfASequence) {
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

// Soft caps, biases by relative position, sinks and documents: alone, together, and with layouts.
TEST(AttentionTerms, FurtherTermsAgreeWithRef) {
  u32 n = 0;
  test::EveryNth tried(4);
  const bool simulated = test_device() != nullptr;  // perhaps, and then slow
  const i64 H = simulated ? 2 : 4, longer = simulated ? 260 : 333;
  for (i64 block : {0, 16, 64}) {
    for (DType dtype : kWorkDTypes) {
      for (u32 terms = 1; terms < 16; ++terms) {
        if (!tried()) continue;
        const bool softcap = (terms & 1) != 0, bias = (terms & 2) != 0, sinks = (terms & 4) != 0;
        expect_agrees_with_ref({.B = 2,
                                .T = n % 2 == 0 ? 150 : longer,
                                .S = n % 2 == 0 ? 150 : longer,
                                .H = H,
                                .G = n % 3 == 0 ? H / 2 : H,
                                .D = n % 5 == 0 ? 40 : 32,
                                .causal = sinks || n % 4 != 1,
                                .window = sinks        ? 45
                                          : n % 5 == 0 ? 70
                                                       : 0,
                                .dropout = n % 7 == 0 ? 0.3f : 0.0f,
                                .dtype = dtype,
                                .softcap = softcap ? 1.5f : 0.0f,
                                .sinks = sinks ? 3 : 0,
                                .reach = bias ? (n % 2 == 0 ? 20 : 500) : -1,
                                .documents = (terms & 8) != 0},
                               block, random_blocks(n, 0.5f), n % 2 == 0);
        if (HasFatalFailure()) return;
        ++n;
      }
    }
  }
  // All together, in wider heads.
  for (i64 D : {64, 72, 128, 160, 256}) {
    for (DType dtype : kWorkDTypes) {
      if (!tried()) continue;
      expect_agrees_with_ref({.T = 150,
                              .S = 150,
                              .H = 2,
                              .G = 1,
                              .D = D,
                              .window = 20,
                              .dropout = n % 2 == 0 ? 0.3f : 0.0f,
                              .dtype = dtype,
                              .softcap = 1.5f,
                              .sinks = 3,
                              .reach = 20,
                              .documents = n % 3 != 0},
                             n % 4 == 0 ? 32 : 0, random_blocks(n, 0.5f));
      if (HasFatalFailure()) return;
      ++n;
    }
  }
  // Sinks far from the windows, with whole tiles in between.
  for (DType dtype : kWorkDTypes) {
    for (i64 block : {0, 16, 128}) {
      if (!tried()) continue;
      expect_agrees_with_ref({.T = 420,
                              .S = 420,
                              .H = 2,
                              .G = 1,
                              .D = 32,
                              .window = 40,
                              .dtype = dtype,
                              .sinks = 5,
                              .documents = n % 2 == 0},
                             block, random_blocks(n, 0.5f));
      if (HasFatalFailure()) return;
      ++n;
    }
  }
  // Documents shorter than their sinks, where rows see later keys too.
  for (i64 block : {0, 16}) {
    expect_agrees_with_ref(
        {.T = 70, .S = 70, .H = 2, .G = 1, .D = 32, .causal = false, .window = 8, .sinks = 40, .documents = true},
        block, random_blocks(9, 0.5f));
  }
  // A part of a sequence: a chunk of a ring, and decoding.
  for (const auto& [T, query0, key0] : {std::array<i64, 3>{64, 192, 64}, {3, 250, 0}}) {
    for (i64 sinks : {0, 5}) {
      expect_agrees_with_ref({.T = T,
                              .S = query0 + T - key0,
                              .H = 4,
                              .G = 2,
                              .D = 32,
                              .window = 80,
                              .query0 = query0,
                              .key0 = key0,
                              .sinks = sinks,
                              .reach = 100,
                              .documents = sinks == 0},
                             sinks == 0 ? 16 : 0, random_blocks(7, 0.5f));
    }
  }
}

// In fp64 from end to end.
TEST(AttentionTerms, RefBackwardOfFurtherTermsIsTheDerivative) {
  const Case c{.B = 2,
               .T = 9,
               .S = 9,
               .H = 2,
               .G = 1,
               .D = 4,
               .window = 3,
               .softcap = 0.8f,
               .sinks = 2,
               .reach = 4,
               .documents = true};
  ThreadPool pool(1);
  Stream stream{.pool = &pool};
  const std::vector<float> bias = c.bias_table();
  const std::vector<i32> documents = c.document_table();
  AttentionParams p = c.params(nullptr);
  p.softcap = c.softcap, p.sinks = c.sinks, p.bias = bias.data(), p.reach = c.reach;
  p.documents = documents.data(), p.positions = c.positions();
  std::vector<double> data[9];
  const auto tensor = [&](size_t i, i64 heads) {
    data[i].resize(static_cast<size_t>(c.B * c.T * heads * c.D));
    const Tensor noise = Tensor(DType::F32, {static_cast<i64>(data[i].size())}).randomize(static_cast<u32>(i + 1));
    for (size_t x = 0; x < data[i].size(); ++x) data[i][x] = static_cast<double>(noise.at(static_cast<i64>(x)));
    return TensorView::of(data[i].data(), DType::F64, {c.B, c.T, heads, c.D});
  };
  const TensorView q = tensor(0, c.H), k = tensor(1, c.G), v = tensor(2, c.G), dq = tensor(3, c.H), dk = tensor(4, c.G),
                   dv = tensor(5, c.G), o = tensor(6, c.H), w = tensor(7, c.H);
  data[8].resize(static_cast<size_t>(c.B * c.H * c.T));
  const TensorView lse = TensorView::of(data[8].data(), DType::F64, {c.B, c.H, c.T});
  const auto loss = [&] {
    ref_ops().attention_fwd(o, lse, q, k, v, p, stream);
    double sum = 0;
    for (size_t i = 0; i < data[6].size(); ++i) sum += data[6][i] * data[7][i];
    return sum;
  };
  loss();
  ref_ops().attention_bwd(dq, dk, dv, w, q, k, v, o, lse, p, stream);
  for (size_t x = 0; x < 3; ++x) {
    for (size_t i = 0; i < data[x].size(); ++i) {
      const double at = data[x][i], step = 1e-6;
      data[x][i] = at + step;
      const double up = loss();
      data[x][i] = at - step;
      const double down = loss();
      data[x][i] = at;
      ASSERT_NEAR((up - down) / (2 * step), data[3 + x][i], 1e-8) << "input " << x << " element " << i;
    }
  }
}

TEST(AttentionTerms, ResultsDoNotDependOnThreads) {
  for (const Case& c : {Case{.B = 2, .T = 300, .S = 300, .H = 6, .G = 2, .D = 34},
                        Case{.T = 700, .S = 700, .H = 1, .G = 1, .D = 16, .dropout = 0.3f, .dtype = DType::BF16}}) {
    const Layout layout(16, c.num_blocks(16), c.H, random_blocks(3, 0.3f));
    const Inputs in(c);
    for (const OpTable* ops : backends()) {
      const Results want = run(*ops, c, in, &layout, nullptr, 1);
      for (int threads : {2, 3, 5})
        expect_same(run(*ops, c, in, &layout, nullptr, threads), want, std::string(ops->name));
    }
  }
}

// A back end that passes a layout over gives what dense attention gives.
TEST(AttentionTerms, NoLayoutIsPassedOver) {
  for (i64 D : {16, 32, 64, 80, 96, 128, 160, 192, 256}) {
    for (i64 block : {16, 32, 64, 128}) {
      for (DType dtype : kWorkDTypes) {
        const Case c{.T = 2 * block + 5, .S = 2 * block + 5, .H = 1, .G = 1, .D = D, .dtype = dtype};
        const Inputs in(c);
        // The first block is seen by itself alone.
        const Layout layout(block, 3, 1, [](i64, i64 query, i64 key) { return key > 0 || query == 0; });
        for (const OpTable* ops : backends()) {
          const Results some = run(*ops, c, in, &layout), all = run(*ops, c, in, nullptr);
          const auto differ = [](const Tensor& x, const Tensor& y, i64 first, i64 n) {
            bool any = false;
            for (i64 i = first; i < first + n; ++i) any |= x.at(i) != y.at(i);
            return any;
          };
          const std::string what = std::string(ops->name) + " " + c.name(block);
          const i64 last = (c.T - 1) * D;
          EXPECT_TRUE(differ(some.o, all.o, last, D)) << what;
          EXPECT_TRUE(differ(some.lse, all.lse, c.T - 1, 1)) << what;
          EXPECT_TRUE(differ(some.dq, all.dq, last, D)) << what;
          EXPECT_TRUE(differ(some.dk, all.dk, 0, D)) << what;
          EXPECT_TRUE(differ(some.dv, all.dv, 0, D)) << what;
        }
      }
    }
  }
}

}  // namespace attention_terms_test
}  // namespace ds::testing
