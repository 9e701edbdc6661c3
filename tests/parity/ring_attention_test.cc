// SPDX-License-Identifier: Apache-2.0
// Attention in blocks of queries and keys, as the ranks of a ring compute it: attention_merge against the oracle; and
// forward and backward of all blocks together, causal or not, in zigzag order, with grouped heads, uneven chunks and
// dropout, against one call for the whole.

#include "parity/parity.h"

namespace ds::testing {
namespace ring_attention_test {

// Indices [begin, begin + count) of dim `d`.
TensorView part(TensorView x, int d, i64 begin, i64 count) {
  x.data = x.as<char>() + begin * x.stride[d] * dtype_bytes(x.dtype);
  x.shape[d] = count;
  return x;
}

// ---- the merge alone ----

struct MergeCase {
  i64 B, T, H, D;
  i64 gap = 0;       // heads of o and o_part that do not take part, after those that do
  i64 all_rows = 0;  // of o and lse, of which T from row 2 on take part; 0: T
  DType dtype = DType::F32;

  std::string name() const {
    std::string s(dtype_name(dtype));
    for (i64 x : {B, T, H, D, gap, all_rows}) s += " " + std::to_string(x);
    return s;
  }
};

struct MergeInputs {
  Tensor o, lse, o_part, lse_part;
  TensorView o_view, lse_view, part_view;

  explicit MergeInputs(const MergeCase& c)
      : o(DType::F32, {c.B, std::max(c.T, c.all_rows), c.H + c.gap, c.D}),
        lse(DType::F32, {c.B, c.H, std::max(c.T, c.all_rows)}),
        o_part(c.dtype, {c.B, c.T, c.H + c.gap, c.D}),
        lse_part(DType::F32, {c.B, c.H, c.T}) {
    o.randomize(1);
    lse.randomize(2, 3.0f, 1.0f);
    o_part.randomize(3);
    lse_part.randomize(4, 3.0f, 1.0f);
    for (i64 i = 0; i < lse.numel(); i += 5) lse.set(i, INFINITY);
    for (i64 i = 0; i < lse_part.numel(); i += 3) lse_part.set(i, INFINITY);
    for (i64 i = 0; i < o.numel(); i += 97) o.set(i, -0.0f);
    const i64 row = c.all_rows > 0 ? 2 : 0;
    o_view = part(part(o, 1, row, c.T), 2, 0, c.H);
    lse_view = part(lse, 2, row, c.T);
    part_view = part(o_part, 2, 0, c.H);
  }
  MergeInputs(const MergeInputs&) = delete;
  MergeInputs& operator=(const MergeInputs&) = delete;
};

TEST(AttentionMerge, AgreesWithRef) {
  for (const OpTable* ops : backends()) {
    for (DType dtype : kWorkDTypes) {
      for (MergeCase c : {MergeCase{1, 1, 1, 1},
                          {2, 7, 3, 16},
                          {1, 33, 2, 34, 1},
                          {2, 5, 4, 64, 2, 9},
                          {1, 40, 3, 80, 0, 50},
                          {2, 3, 2, 256, 0, 8},
                          {1, 300, 5, 6, 3, 310},
                          {1, 0, 2, 8, 0, 4}}) {
        c.dtype = dtype;
        for (bool first : {false, true}) {
          const std::string what = std::string(ops->name) + " " + c.name() + (first ? " first" : "");
          MergeInputs want(c);
          Stream none{};
          ref_ops().attention_merge(want.o_view, want.lse_view, want.part_view, want.lse_part, first, none);
          expect_same_for_any_threads(
              [&](Stream& s) {
                MergeInputs got(c);
                ops->attention_merge(got.o_view, got.lse_view, got.part_view, got.lse_part, first, s);
                // Merged rows are sums of two, the others the bits of one, and the memory beside them stays.
                expect_close(got.o, want.o, 8, what + " o");
                expect_close(got.lse, want.lse, 8, what + " lse");
                return std::vector<Tensor>{got.o, got.lse};
              },
              what);
          // Elements that take no part, or have nothing to merge, keep their bits.
          MergeInputs got(c);
          ThreadPool pool(2);
          Stream two{.pool = &pool};
          ops->attention_merge(got.o_view, got.lse_view, got.part_view, got.lse_part, first, two);
          const MergeInputs before(c);
          const i64 rows = got.lse.view().dim(2), begin = c.all_rows > 0 ? 2 : 0, heads = c.H + c.gap;
          for (i64 i = 0; i < got.o.numel(); ++i) {
            const i64 token = i / (heads * c.D), h = i / c.D % heads, t = token % rows - begin, b = token / rows;
            const bool there = h < c.H && t >= 0 && t < c.T;
            if (there && (first || got.lse_part.at((b * c.H + h) * c.T + t) != INFINITY)) continue;
            ASSERT_EQ(got.o.at(i), before.o.at(i)) << what << " element " << i;
          }
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(AttentionMerge, RowsWithoutKeysChangeNothingAndAreReplacedUnread) {
  std::vector<const OpTable*> tables = backends();
  tables.push_back(&ref_ops());
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : tables) {
    for (DType dtype : kWorkDTypes) {
      for (i64 D : {64, 7}) {
        Tensor o(DType::F32, {1, 4, 1, D}), lse(DType::F32, {1, 1, 4}), o_part(dtype, {1, 4, 1, D}), lse_part(lse);
        o.randomize(1);
        o_part.randomize(2);
        // Nothing on either side; nothing in the block; nothing so far, with memory that nobody wrote; a NaN.
        for (i64 d = 0; d < D; ++d) o.set(d, 0), o_part.set(d, 0), o_part.set(D + d, 0), o.set(2 * D + d, NAN);
        lse.set(0, INFINITY), lse.set(1, -3.5f), lse.set(2, INFINITY), lse.set(3, 1.0f);
        lse_part.set(0, INFINITY), lse_part.set(1, INFINITY), lse_part.set(2, 300.25f), lse_part.set(3, NAN);
        const Tensor o_before = o;
        ops->attention_merge(o, lse, o_part, lse_part, false, s);
        EXPECT_EQ(lse.at(0), INFINITY) << ops->name;
        EXPECT_EQ(lse.at(1), -3.5f) << ops->name;
        EXPECT_EQ(lse.at(2), 300.25f) << ops->name;
        EXPECT_TRUE(std::isnan(lse.at(3))) << ops->name;
        for (i64 d = 0; d < D; ++d) {
          EXPECT_EQ(o.at(d), 0.0f) << ops->name;
          EXPECT_EQ(o.at(D + d), o_before.at(D + d)) << ops->name;
          EXPECT_EQ(o.at(2 * D + d), o_part.at(2 * D + d)) << ops->name;
          EXPECT_TRUE(std::isnan(o.at(3 * D + d))) << ops->name;
        }
      }
    }
  }
}

// ---- all blocks ----

struct Range {
  i64 begin, end;
  i64 size() const { return end - begin; }
};
struct Block {
  Range queries, keys;  // global tokens
  bool causal;
};

// The calls that a range of queries and a range of keys need. Causal masks are aligned to the last query and the last
// key, so the queries after the last key are a call of their own.
std::vector<Block> blocks_of(Range q, Range k, bool causal) {
  if (!causal) return {{q, k, false}};
  k.end = std::min(k.end, q.end);
  if (k.begin >= k.end) return {};
  std::vector<Block> blocks;
  if (q.begin < k.end) blocks.push_back({{q.begin, k.end}, k, true});
  if (k.end < q.end) blocks.push_back({{std::max(q.begin, k.end), q.end}, k, false});
  return blocks;
}

struct RingCase {
  i64 B, H, G, D;
  std::vector<i64> cuts;      // of the queries: 2 * ranks chunks, of which rank r has numbers r and 2 * ranks - 1 - r
  std::vector<i64> key_cuts;  // as many; empty: the same
  bool causal = true;
  float dropout = 0;
  DType dtype = DType::F32;

  i64 T() const { return cuts.back(); }
  size_t ranks() const { return (cuts.size() - 1) / 2; }
  std::string name() const {
    std::string s(dtype_name(dtype));
    for (i64 x : {B, T(), H, G, D}) s += " " + std::to_string(x);
    return s + " in " + std::to_string(cuts.size() - 1) + (causal ? " causal" : "") + " dropout " +
           std::to_string(dropout);
  }
  AttentionParams params() const {
    return {.scale = 1.0f / std::sqrt(static_cast<float>(D)),
            .causal = causal,
            .dropout = dropout,
            .rng = {.seed = 5, .site = 2, .step = 1}};
  }
};

struct Gradients {
  Tensor dq, dk, dv;
};
struct Attended {
  Tensor o, lse;
  Gradients grads;
};
struct RingInputs {
  Tensor q, k, v, dout;
  explicit RingInputs(const RingCase& c)
      : q(c.dtype, {c.B, c.T(), c.H, c.D}), k(c.dtype, {c.B, c.T(), c.G, c.D}), v(k), dout(q) {
    q.randomize(1);
    k.randomize(2);
    v.randomize(3);
    dout.randomize(4);
  }
};

Attended in_one(const OpTable& ops, const RingCase& c, const RingInputs& in, Stream& s) {
  Attended a{Tensor(c.dtype, {c.B, c.T(), c.H, c.D}), Tensor(DType::F32, {c.B, c.H, c.T()}), {in.q, in.k, in.v}};
  ops.attention_fwd(a.o, a.lse, in.q, in.k, in.v, c.params(), s);
  ops.attention_bwd(a.grads.dq, a.grads.dk, a.grads.dv, in.dout, in.q, in.k, in.v, a.o, a.lse, c.params(), s);
  return a;
}

// The steps of all ranks, one rank after the other. A rank holds its two chunks of tokens side by side; lse of a chunk
// is a part of its rows.
Attended in_blocks(const OpTable& ops, const RingCase& c, const RingInputs& in, Stream& s) {
  const size_t ranks = c.ranks(), chunks = 2 * ranks;
  const std::vector<i64>& key_cuts = c.key_cuts.empty() ? c.cuts : c.key_cuts;
  Attended all{Tensor(DType::F32, {c.B, c.T(), c.H, c.D}),
               Tensor(DType::F32, {c.B, c.H, c.T()}),
               {Tensor(DType::F32, {c.B, c.T(), c.H, c.D}), Tensor(DType::F32, {c.B, c.T(), c.G, c.D}),
                Tensor(DType::F32, {c.B, c.T(), c.G, c.D})}};
  all.grads.dq.fill(0);
  all.grads.dk.fill(0);
  all.grads.dv.fill(0);
  const auto tokens = [](TensorView x, Range r) { return part(x, 1, r.begin, r.size()); };
  const auto add = [&](Tensor& sum, const Tensor& x, i64 begin) {  // by hand, as the sums of a test may
    const i64 row = x.view().stride[1], count = x.view().dim(1), whole = sum.view().dim(1);
    for (i64 i = 0; i < x.numel(); ++i) {
      const i64 at = (i / (row * count) * whole + begin) * row + i % (row * count);
      sum.set(at, sum.at(at) + x.at(i));
    }
  };
  for (size_t rank = 0; rank < ranks; ++rank) {
    const size_t own[2] = {rank, chunks - 1 - rank};
    const Range ranges[2] = {{c.cuts[own[0]], c.cuts[own[0] + 1]}, {c.cuts[own[1]], c.cuts[own[1] + 1]}};
    const i64 rows = ranges[0].size() + ranges[1].size();
    Tensor o(DType::F32, {c.B, rows, c.H, c.D}), lse(DType::F32, {c.B, c.H, rows}),
        o_work(c.dtype, {c.B, rows, c.H, c.D});
    o.fill(NAN);
    lse.fill(INFINITY);  // nothing so far: o is not read
    // The blocks of keys come from this rank, then from the one before it, and so on: calls in this order, twice.
    const auto for_blocks = [&](auto&& f) {
      for (size_t step = 0; step < ranks; ++step) {
        const size_t from = (rank + ranks - step) % ranks;
        for (const size_t key_chunk : {from, chunks - 1 - from}) {
          for (int half = 0; half < 2; ++half) {
            for (const Block& b : blocks_of(ranges[half], {key_cuts[key_chunk], key_cuts[key_chunk + 1]}, c.causal)) {
              const i64 local = b.queries.begin - ranges[half].begin + (half == 0 ? 0 : ranges[0].size());
              AttentionParams p = c.params();
              p.causal = b.causal;
              p.grid = {.rows = c.T(), .row0 = b.queries.begin, .cols = c.T(), .col0 = b.keys.begin};
              f(b, Range{local, local + b.queries.size()}, p);
            }
          }
        }
      }
    };
    for_blocks([&](const Block& b, Range at, const AttentionParams& p) {
      Tensor o_part(c.dtype, {c.B, at.size(), c.H, c.D}), lse_part(DType::F32, {c.B, c.H, at.size()});
      ops.attention_fwd(o_part, lse_part, tokens(in.q, b.queries), tokens(in.k, b.keys), tokens(in.v, b.keys), p, s);
      ops.attention_merge(tokens(o, at), part(lse, 2, at.begin, at.size()), o_part, lse_part, false, s);
    });
    ops.cast(o_work, o, s);
    for_blocks([&](const Block& b, Range at, const AttentionParams& p) {
      Tensor dq(c.dtype, {c.B, at.size(), c.H, c.D}), dk(c.dtype, {c.B, b.keys.size(), c.G, c.D}), dv(dk);
      ops.attention_bwd(dq, dk, dv, tokens(in.dout, b.queries), tokens(in.q, b.queries), tokens(in.k, b.keys),
                        tokens(in.v, b.keys), tokens(o_work, at), part(lse, 2, at.begin, at.size()), p, s);
      add(all.grads.dq, dq, b.queries.begin);
      add(all.grads.dk, dk, b.keys.begin);
      add(all.grads.dv, dv, b.keys.begin);
    });
    // Home: a rank's chunks to their places.
    i64 local = 0;
    for (const Range& r : ranges) {
      ops.copy_heads(tokens(all.o, r), tokens(o, {local, local + r.size()}), s);
      for (i64 row = 0; row < c.B * c.H; ++row) {
        for (i64 i = 0; i < r.size(); ++i) all.lse.set(row * c.T() + r.begin + i, lse.at(row * rows + local + i));
      }
      local += r.size();
    }
  }
  return all;
}

TEST(RingAttention, BlocksMakeTheWhole) {
  const std::vector<RingCase> cases = {
      {.B = 1, .H = 2, .G = 2, .D = 16, .cuts = {0, 16, 32}, .key_cuts = {}},
      {.B = 2, .H = 6, .G = 2, .D = 34, .cuts = {0, 9, 20, 50, 66}, .key_cuts = {}},
      {.B = 2, .H = 4, .G = 1, .D = 64, .cuts = {0, 16, 32, 48, 64, 80, 96}, .key_cuts = {}},
      {.B = 1, .H = 4, .G = 2, .D = 64, .cuts = {0, 9, 20, 50, 66}, .key_cuts = {0, 15, 40, 41, 66}},
      {.B = 2, .H = 3, .G = 3, .D = 128, .cuts = {0, 1, 2, 40, 70}, .key_cuts = {0, 33, 34, 35, 70}},
      {.B = 2, .H = 4, .G = 2, .D = 32, .cuts = {0, 9, 20, 50, 66}, .key_cuts = {}, .causal = false},
      {.B = 2, .H = 4, .G = 2, .D = 32, .cuts = {0, 9, 20, 50, 66}, .key_cuts = {}, .dropout = 0.3f},
      {.B = 1, .H = 4, .G = 2, .D = 64, .cuts = {0, 8, 20, 52, 68}, .key_cuts = {}, .dropout = 0.3f},
  };
  for (const OpTable* ops : backends()) {
    for (DType dtype : kWorkDTypes) {
      for (RingCase c : cases) {
        c.dtype = dtype;
        const RingInputs in(c);
        ThreadPool pool(2);
        Stream two{.pool = &pool};
        const Attended want = in_one(ref_ops(), c, in, two);
        const std::string what = std::string(ops->name) + ": " + c.name();
        const Attended got = in_blocks(*ops, c, in, two);
        // Every block is rounded to the work dtype once more than the whole; gradients of blocks may be larger than
        // their sum.
        const double slack = dtype == DType::F32 ? 250 : rounds_probabilities(*ops, dtype) ? 16 : 10;
        const double term = 1.0 / static_cast<double>(c.T());
        expect_close(got.o, want.o, slack, what + " o");
        expect_close(got.lse, want.lse, 60, what + " lse", 1);
        expect_close(got.grads.dq, want.grads.dq, slack, what + " dq", term);
        expect_close(got.grads.dk, want.grads.dk, slack, what + " dk", term);
        expect_close(got.grads.dv, want.grads.dv, slack, what + " dv", term);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(RingAttention, BitsDoNotDependOnThreads) {
  for (const OpTable* ops : backends()) {
    const RingCase c{.B = 2, .H = 4, .G = 2, .D = 32, .cuts = {0, 9, 20, 50, 66}, .key_cuts = {}, .dtype = DType::BF16};
    const RingInputs in(c);
    expect_same_for_any_threads(
        [&](Stream& s) {
          const Attended got = in_blocks(*ops, c, in, s);
          return std::vector<Tensor>{got.o, got.lse, got.grads.dq, got.grads.dk, got.grads.dv};
        },
        std::string(ops->name) + ": " + c.name());
  }
}

// In fp64 there is nothing but the algorithm: blocks give the whole to the last digits.
TEST(RingAttention, BlocksOfRefMakeTheWhole) {
  constexpr i64 B = 1, T = 11, H = 2, G = 1, D = 4;
  Stream s{};
  std::vector<std::vector<double>> storage;
  const auto tensor = [&](i64 b, i64 t, i64 h, i64 d, u32 seed) {
    std::vector<double>& data = storage.emplace_back(static_cast<size_t>(b * t * h * d));
    const RngKey key{seed, 1, 0};
    for (size_t i = 0; i < data.size(); ++i) data[i] = 2.0 * RngKey::uniform(key.bits(i)) - 1;
    return TensorView::of(data.data(), DType::F64, {b, t, h, d});
  };
  storage.reserve(64);
  const TensorView q = tensor(B, T, H, D, 1), k = tensor(B, T, G, D, 2), v = tensor(B, T, G, D, 3),
                   dout = tensor(B, T, H, D, 4);
  const AttentionParams params{.scale = 0.5f, .dropout = 0.3f, .rng = {.seed = 3}};
  const auto statistics = [&](i64 rows) {
    TensorView lse = tensor(1, B, H, rows, 9);
    lse.rank = 3;
    for (size_t d = 0; d < 3; ++d) lse.shape[d] = lse.shape[d + 1], lse.stride[d] = lse.stride[d + 1];
    return lse;
  };
  const TensorView o = tensor(B, T, H, D, 5), lse = statistics(T), merged = tensor(B, T, H, D, 6),
                   merged_lse = statistics(T);
  const TensorView dq = tensor(B, T, H, D, 7), dk = tensor(B, T, G, D, 7), dv = tensor(B, T, G, D, 7);
  ref_ops().attention_fwd(o, lse, q, k, v, params, s);
  ref_ops().attention_bwd(dq, dk, dv, dout, q, k, v, o, lse, params, s);
  const Range halves[] = {{0, 4}, {4, T}};
  std::vector<double> sums[3];
  for (size_t x = 0; x < 3; ++x) sums[x].assign(static_cast<size_t>((x == 0 ? q : k).numel()), 0.0);
  for (const bool backward : {false, true}) {
    for (const Range& rows : halves) {
      bool first = true;
      for (const Range& keys : {halves[1], halves[0]}) {
        for (const Block& b : blocks_of(rows, keys, true)) {
          AttentionParams p = params;
          p.causal = b.causal;
          p.grid = {.rows = T, .row0 = b.queries.begin, .cols = T, .col0 = b.keys.begin};
          const auto of = [](TensorView x, Range r) { return part(x, 1, r.begin, r.size()); };
          const i64 n = b.queries.size();
          if (!backward) {
            const TensorView o_part = tensor(B, n, H, D, 8), lse_part = statistics(n);
            ref_ops().attention_fwd(o_part, lse_part, of(q, b.queries), of(k, b.keys), of(v, b.keys), p, s);
            ref_ops().attention_merge(of(merged, b.queries), part(merged_lse, 2, b.queries.begin, n), o_part, lse_part,
                                      first, s);
          } else {
            const TensorView parts[3] = {tensor(B, n, H, D, 8), tensor(B, b.keys.size(), G, D, 8),
                                         tensor(B, b.keys.size(), G, D, 8)};
            ref_ops().attention_bwd(parts[0], parts[1], parts[2], of(dout, b.queries), of(q, b.queries), of(k, b.keys),
                                    of(v, b.keys), of(merged, b.queries), part(merged_lse, 2, b.queries.begin, n), p,
                                    s);
            for (size_t x = 0; x < 3; ++x) {
              const i64 begin = (x == 0 ? b.queries : b.keys).begin * (x == 0 ? H : G) * D;
              for (i64 i = 0; i < parts[x].numel(); ++i) sums[x][begin + i] += parts[x].as<double>()[i];
            }
          }
          first = false;
        }
      }
    }
  }
  for (i64 i = 0; i < o.numel(); ++i) ASSERT_NEAR(merged.as<double>()[i], o.as<double>()[i], 1e-13) << i;
  for (i64 i = 0; i < lse.numel(); ++i) ASSERT_NEAR(merged_lse.as<double>()[i], lse.as<double>()[i], 1e-13) << i;
  const TensorView* const wholes[3] = {&dq, &dk, &dv};
  for (size_t x = 0; x < 3; ++x) {
    for (i64 i = 0; i < wholes[x]->numel(); ++i) {
      ASSERT_NEAR(sums[x][i], wholes[x]->as<double>()[i], 1e-13) << x << " " << i;
    }
  }
}

}  // namespace ring_attention_test
}  // namespace ds::testing
