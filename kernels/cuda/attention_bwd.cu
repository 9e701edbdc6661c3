// SPDX-License-Identifier: Apache-2.0
// Attention backward (Dao: "FlashAttention-2", algorithm 2) in three kernels without sums across blocks, therefore
// without atomics and with the same result in every run: the statistics of the rows; dk and dv, where a block owns keys
// of one key/value head and processes all rows of the group's heads in order; dq, where a block owns rows of one head.
// With P = 2^(score - lse), Z the mask of dropout over 1 - p and delta = rowsum(dO * O):
//   dv = (P Z)^T dO,  dS = P * (dO V^T * Z - delta),  dk = scale dS^T Q,  dq = scale dS K.
// The dk and dv kernel computes scores transposed, so that both products have their left operands in registers.

#include <algorithm>

#include "cuda/attention_steps.h"
#include "cuda/scratch_plan.h"

namespace ds::cuda {
namespace attention {
namespace {

// Eight lanes per row; rows of all heads of a token are adjacent.
constexpr int kStatisticsThreads = 256, kLanesPerRow = 8;

template <class E>
__global__ void __launch_bounds__(kStatisticsThreads)
    statistics(float2* stats, Heads<const E> dout, Heads<const E> o, Statistics<const float> lse, i64 B, i64 T, i64 H,
               int D) {
  const i64 rows = padded_rows(T);
  const i64 index =
      static_cast<i64>(block_index().x) * (kStatisticsThreads / kLanesPerRow) + thread_index() / kLanesPerRow;
  const i64 h = index % H, i = index / H % rows, b = index / H / rows;
  const int lane = thread_index() % kLanesPerRow;
  float sum = 0;
  if (b < B && i < T) {
    const E* const x = dout.data + b * dout.batch + i * dout.token + h * dout.head;
    const E* const y = o.data + b * o.batch + i * o.token + h * o.head;
    if (dout.whole_chunks && o.whole_chunks) {
      for (int d = lane * kPack<E>; d < D; d += kLanesPerRow * kPack<E>) {
        float xs[kPack<E>], ys[kPack<E>];
        load16(xs, x + d);
        load16(ys, y + d);
        DS_UNROLL
        for (int e = 0; e < kPack<E>; ++e) sum += xs[e] * ys[e];
      }
    } else {
      for (int d = lane; d < D; d += kLanesPerRow) sum += load(x + d) * load(y + d);
    }
  }
  for (int mask = kLanesPerRow / 2; mask > 0; mask /= 2) sum += warp_shuffle_xor(sum, mask);
  if (lane != 0 || b >= B) return;
  stats[(b * H + h) * rows + i] = i < T ? make_float2(lse(b, h)[i] * kLog2E, sum) : make_float2(kInfinity, 0.0f);
}

template <bool kGeneral, int kD>
using BackwardSteps = Steps<kGeneral, BackwardPlan<kD>::kStep, true>;

template <class E, int kD, bool kGeneral>
struct BackwardShared : BackwardSteps<kGeneral, kD>::Shared {
  using Plan = BackwardPlan<kD>;
  alignas(128) E own[2][Plan::kOwn * kD];  // keys and values; queries and output gradients
  E met[2][2][Plan::kStep * kD];
  float2 stats[2][Plan::kStep];
};

// A warp's fragments of its own two tiles, kept in registers or read when needed.
template <class E, int kD>
class OwnFragments {
 public:
  static constexpr bool kHold = BackwardPlan<kD>::kHold;
  static constexpr int kCount = kHold ? kD / 16 : 1;

  DS_DEVICE OwnFragments(const E* first, const E* second)
      : blocks_{Blocks<kD, E>::template of<false>(first), Blocks<kD, E>::template of<false>(second)} {}
  // Call after the tiles have arrived.
  DS_DEVICE void take() {
    if constexpr (kHold) {
      DS_UNROLL
      for (int t = 0; t < 2; ++t) {
        DS_UNROLL
        for (int i = 0; i < kCount; ++i) load_matrices(held_[t][i], blocks_[t].at(0, i));
      }
    }
  }
  template <int kTile>
  DS_DEVICE void get(int i, u32 (&fragment)[4]) const {
    if constexpr (kHold) {
      DS_UNROLL
      for (int j = 0; j < 4; ++j) fragment[j] = held_[kTile][i][j];
    } else {
      load_matrices(fragment, blocks_[kTile].at(0, i));
    }
  }

 private:
  Blocks<kD, E> blocks_[2];
  u32 held_[2][kCount][4];
};

template <class E, int kD, bool kGeneral>
__global__ void __launch_bounds__(BackwardPlan<kD>::kThreads) backward_keys(BackwardArgs<E> a) {
  using Plan = BackwardPlan<kD>;
  constexpr int kN = Plan::kPart / 8, kThreads = Plan::kThreads, kC = Plan::kColumns / 8;
  auto& shared = block_shared<BackwardShared<E, kD, kGeneral>>();
  const Problem<E>& p = a.problem;
  const Work work = work_of(block_index().x, (p.mask.S + Plan::kOwn - 1) / Plan::kOwn, p.B * p.G, false);
  const int b = work.head / p.G, g = work.head % p.G;
  const int column = static_cast<int>(block_index().y) * Plan::kColumns;
  decltype(auto) mask = mask_of<kGeneral>(p, b);
  const int block_key = work.tile * Plan::kOwn;
  const Range block_keys = intersect({block_key, block_key + Plan::kOwn}, {0, mask.S});
  BackwardSteps<kGeneral, kD> steps(
      shared, a.keys, {.own = block_keys, .seen = mask.rows_of_keys(block_keys), .head = g * p.R, .heads = p.R});
  steps.start();

  // The shuffle tells the compiler that the value is the same for the whole warp.
  const int lane = thread_index() % kWarp, warp = warp_shuffle(thread_index() / kWarp, 0);
  const int warp_key = block_key + warp * 16;
  const Range warp_keys = {warp_key, warp_key + 16};
  const Range warp_rows = mask.rows_of_keys(warp_keys);
  const u32 warp_blocks = steps.own_blocks(warp_keys);
  E* const own[2] = {shared.own[0] + warp * 16 * kD, shared.own[1] + warp * 16 * kD};
  OwnFragments<E, kD> fragments(own[0], own[1]);

  const auto load_step = [&](int n) {
    const int h = g * p.R + steps.head(n);
    steps.template load<kD, kThreads>(shared.met[n % 2][0], p.q(b, h), n, mask.T, p.D);
    steps.template load<kD, kThreads>(shared.met[n % 2][1], a.dout(b, h), n, mask.T, p.Dv);
    if (thread_index() < Plan::kStep / 2) {
      const int row = steps.first(n, thread_index() / 8) + 2 * thread_index() % 16;
      const i64 at = (static_cast<i64>(b) * p.H + h) * a.stats_rows + row;
      copy_async_16(shared.stats[n % 2] + 2 * thread_index(), a.stats + at, !kGeneral || row < a.stats_rows);
    }
    copies_commit();
  };
  if (steps.has(0)) {
    load_tile<kD, Plan::kOwn, kThreads>(shared.own[0], p.k(b, g), block_key, mask.S, p.D);
    load_tile<kD, Plan::kOwn, kThreads>(shared.own[1], p.v(b, g), block_key, mask.S, p.Dv);
    load_step(0);
    copies_wait<0>();
    sync_block();
    fragments.take();
  }

  float dk[1][kC][4], dv[1][kC][4];
  clear(dk[0]);
  clear(dv[0]);
  DS_NO_UNROLL
  for (int n = 0; steps.has(n); ++n) {
    if (steps.has(n + 1)) load_step(n + 1);
    steps.make(n + 2);
    DS_NO_UNROLL
    for (int part = 0; part < Plan::kStep; part += Plan::kPart) {
      const auto needed = steps.template needed<kN / 2>(n, part / 16, warp_rows, warp_blocks);
      if (!needed.any()) continue;
      const E* const q = shared.met[n % 2][0] + part * kD;
      const E* const dout = shared.met[n % 2][1] + part * kD;
      const float2* const stats = shared.stats[n % 2] + part + lane % 4 * 2;
      float prob[1][kN][4];
      clear(prob[0]);
      multiply_transposed<kD, Plan::kHold>(
          prob, [&](int, int i, u32(&f)[4]) { fragments.template get<0>(i, f); }, q, needed);
      [[maybe_unused]] float slope[kGeneral ? kN : 1][4];
      if (kGeneral && p.terms.any()) {
        const int base = p.terms.distance0 + warp_key + lane / 4 - lane % 4 * 2;
        make_scores(
            prob[0], p, p.terms.bias_of(g * p.R + steps.head(n)),
            [&](int i, int e) { return base - steps.first(n, part / 16 + i / 2) - i % 2 * 8 - e % 2 + e / 2 * 8; },
            [&](int i, int e, float x) { slope[i][e] = x; });
        DS_UNROLL
        for (int i = 0; i < kN; ++i) {
          DS_UNROLL
          for (int e = 0; e < 4; ++e) prob[0][i][e] = fast_exp2(prob[0][i][e] - stats[8 * i + e % 2].x);
        }
      } else {
        DS_UNROLL
        for (int i = 0; i < kN; ++i) {
          DS_UNROLL
          for (int e = 0; e < 4; ++e) prob[0][i][e] = fast_exp2(prob[0][i][e] * p.scale2 - stats[8 * i + e % 2].x);
        }
      }
      const auto see = [&](int key) { return mask.rows_of_key(key); };
      const auto visible = [&](Range rows) { return mask.all_visible(rows, warp_keys); };
      if (!steps.template whole<kN / 2>(needed, n, part / 16, warp_blocks, visible)) {
        hide(prob[0], steps, n, part / 16, warp_key, see, false, 0.0f);
      }
      u32 bits = 0;
      u32 left[1][kN / 2][4];
      if (p.dropout.on) {
        bits = kept_by_slot<false, kN / 2>(p.dropout, needed, [&](int slot) {
          return p.dropout.element(b, g * p.R + steps.head(n), steps.first(n, part / 16 + slot), warp_key);
        });
        const auto weight = [&](int i, int e) {
          return (bits >> (4 * i + e) & 1u) != 0 ? prob[0][i][e] * p.dropout.factor : 0.0f;
        };
        DS_UNROLL
        for (int i = 0; i < kN; ++i) {
          left[0][i / 2][i % 2 * 2] = pack2<E>(weight(i, 0), weight(i, 1));
          left[0][i / 2][i % 2 * 2 + 1] = pack2<E>(weight(i, 2), weight(i, 3));
        }
      } else {
        pack<E>(left[0], prob[0]);
      }
      multiply<kD>(dv, left, dout, column / 8, needed);
      if (kGeneral && p.terms.capped()) {  // from here on prob is used only for ds
        DS_UNROLL
        for (int i = 0; i < 4 * kN; ++i) prob[0][i / 4][i % 4] *= slope[kGeneral ? i / 4 : 0][i % 4];
      }

      float ds[1][kN][4];
      clear(ds[0]);
      multiply_transposed<kD, Plan::kHold>(
          ds, [&](int, int i, u32(&f)[4]) { fragments.template get<1>(i, f); }, dout, needed);
      if (p.dropout.on) {
        DS_UNROLL
        for (int i = 0; i < 4 * kN; ++i) {
          float& x = ds[0][i / 4][i % 4];
          x = (bits >> i & 1u) != 0 ? x * p.dropout.factor : 0.0f;
        }
      }
      DS_UNROLL
      for (int i = 0; i < kN; ++i) {
        DS_UNROLL
        for (int e = 0; e < 4; ++e) ds[0][i][e] = prob[0][i][e] * (ds[0][i][e] - stats[8 * i + e % 2].y);
      }
      pack<E>(left[0], ds[0]);
      multiply<kD>(dk, left, q, column / 8, needed);
    }
    copies_wait<0>();
    sync_block();
  }
  DS_UNROLL
  for (int i = 0; i < kC; ++i) {
    DS_UNROLL
    for (int e = 0; e < 4; ++e) dk[0][i][e] *= p.scale;
  }
  store_rows<kD>(own[0], dk[0], a.dk(b, g), warp_key, mask.S, column, p.D);
  store_rows<kD>(own[1], dv[0], a.dv(b, g), warp_key, mask.S, column, p.Dv);
}

template <class E, int kD, bool kGeneral>
__global__ void __launch_bounds__(BackwardPlan<kD>::kThreads) backward_queries(BackwardArgs<E> a) {
  using Plan = BackwardPlan<kD>;
  constexpr int kN = Plan::kStep / 8, kThreads = Plan::kThreads;
  auto& shared = block_shared<BackwardShared<E, kD, kGeneral>>();
  const Problem<E>& p = a.problem;
  const Work work = work_of(block_index().x, (p.mask.T + Plan::kOwn - 1) / Plan::kOwn, p.B * p.H, p.mask.causal);
  const int b = work.head / p.H, h = work.head % p.H, g = h / p.R;
  decltype(auto) mask = mask_of<kGeneral>(p, b);
  const int block_row = work.tile * Plan::kOwn;
  const Head<const E> k = p.k(b, g), v = p.v(b, g);
  const Range block_rows = intersect({block_row, block_row + Plan::kOwn}, {0, mask.T});
  Steps<kGeneral, Plan::kStep> steps(shared, a.queries,
                                     {.own = block_rows, .seen = mask.keys_of_rows(block_rows), .head = h});
  steps.start();

  const int lane = thread_index() % kWarp, warp = thread_index() / kWarp;
  const int warp_row = block_row + warp * 16;
  const Range warp_rows = {warp_row, warp_row + 16};
  const auto warp_keys = mask.keys_of_rows(warp_rows);
  const u32 warp_blocks = steps.own_blocks(warp_rows);
  E* const own[2] = {shared.own[0] + warp * 16 * kD, shared.own[1] + warp * 16 * kD};
  OwnFragments<E, kD> fragments(own[0], own[1]);
  const float2* const stats = a.stats + work.head * a.stats_rows + warp_row + lane / 4;
  const float2 row_stats[2] = {stats[0], stats[8]};

  const auto load_step = [&](int n) {
    steps.template load<kD, kThreads>(shared.met[n % 2][0], k, n, mask.S, p.D);
    steps.template load<kD, kThreads>(shared.met[n % 2][1], v, n, mask.S, p.Dv);
    copies_commit();
  };
  if (steps.has(0)) {
    load_tile<kD, Plan::kOwn, kThreads>(shared.own[0], p.q(b, h), block_row, mask.T, p.D);
    load_tile<kD, Plan::kOwn, kThreads>(shared.own[1], a.dout(b, h), block_row, mask.T, p.Dv);
    load_step(0);
    copies_wait<0>();
    sync_block();
    fragments.take();
  }

  float dq[1][kD / 8][4];
  clear(dq[0]);
  DS_NO_UNROLL
  for (int n = 0; steps.has(n); ++n) {
    if (steps.has(n + 1)) load_step(n + 1);
    steps.make(n + 2);
    const auto needed = steps.template needed<kN / 2>(n, 0, warp_keys, warp_blocks);
    if (needed.any()) {
      float prob[1][kN][4], ds[1][kN][4];
      clear(prob[0]);
      multiply_transposed<kD, Plan::kHold>(
          prob, [&](int, int i, u32(&f)[4]) { fragments.template get<0>(i, f); }, shared.met[n % 2][0], needed);
      clear(ds[0]);
      multiply_transposed<kD, Plan::kHold>(
          ds, [&](int, int i, u32(&f)[4]) { fragments.template get<1>(i, f); }, shared.met[n % 2][1], needed);
      if (p.dropout.on) {
        const u32 bits = kept_by_slot<true, kN / 2>(
            p.dropout, needed, [&](int slot) { return p.dropout.element(b, h, warp_row, steps.first(n, slot)); });
        DS_UNROLL
        for (int i = 0; i < 4 * kN; ++i) {
          float& x = ds[0][i / 4][i % 4];
          x = (bits >> i & 1u) != 0 ? x * p.dropout.factor : 0.0f;
        }
      }
      if (kGeneral && p.terms.any()) {
        DS_UNROLL
        for (int i = 0; i < 4 * kN; ++i) ds[0][i / 4][i % 4] -= row_stats[i % 4 / 2].y;
        const int base = p.terms.distance0 + lane % 4 * 2 - (warp_row + lane / 4);
        make_scores(
            prob[0], p, p.terms.bias_of(h),
            [&](int i, int e) { return base + steps.first(n, i / 2) + i % 2 * 8 + e % 2 - e / 2 * 8; },
            [&](int i, int e, float x) { ds[0][i][e] *= x; });
        DS_UNROLL
        for (int i = 0; i < kN; ++i) {
          DS_UNROLL
          for (int e = 0; e < 4; ++e) ds[0][i][e] *= fast_exp2(prob[0][i][e] - row_stats[e / 2].x);
        }
      } else {
        DS_UNROLL
        for (int i = 0; i < kN; ++i) {
          DS_UNROLL
          for (int e = 0; e < 4; ++e) {
            const float w = fast_exp2(prob[0][i][e] * p.scale2 - row_stats[e / 2].x);
            ds[0][i][e] = w * (ds[0][i][e] - row_stats[e / 2].y);
          }
        }
      }
      const auto see = [&](int row) { return mask.keys_of_row(row); };
      const auto visible = [&](Range keys) { return mask.all_visible(warp_rows, keys); };
      if (!steps.template whole<kN / 2>(needed, n, 0, warp_blocks, visible)) {
        hide(ds[0], steps, n, 0, warp_row, see, mask.has_sinks(), 0.0f);
      }
      u32 left[1][kN / 2][4];
      pack<E>(left[0], ds[0]);
      multiply<kD>(dq, left, shared.met[n % 2][0], 0, needed);
    }
    copies_wait<0>();
    sync_block();
  }
  DS_UNROLL
  for (int i = 0; i < kD / 8; ++i) {
    DS_UNROLL
    for (int e = 0; e < 4; ++e) dq[0][i][e] *= p.scale;
  }
  store_rows<kD>(own[0], dq[0], a.dq(b, h), warp_row, mask.T, 0, p.D);
}

void backward(const BackwardArgs<float>& a, cudaStream_t stream) noexcept { backward_fp32(a, stream); }

template <class E>
void backward(const BackwardArgs<E>& a, cudaStream_t stream) noexcept {
  with_head_dim<32, 64, 96, 128, 192, 256>(widest_head(a.problem), [&](auto dim) {
    constexpr int kD = decltype(dim)::value;
    using Plan = BackwardPlan<kD>;
    const Problem<E>& p = a.problem;
    dim3 keys = grid_of(num_tiles(p.mask.S, Plan::kOwn), i64{p.B} * p.G);
    keys.y = kD / Plan::kColumns;
    const dim3 queries = grid_of(num_tiles(p.mask.T, Plan::kOwn), i64{p.B} * p.H);
    with_general(a.general, [&](auto general) {
      constexpr bool kGeneral = decltype(general)::value;
      constexpr size_t kBytes = sizeof(BackwardShared<E, kD, kGeneral>);
      launch(backward_keys<E, kD, kGeneral>, {keys, Plan::kThreads, kBytes}, stream, a);
      launch(backward_queries<E, kD, kGeneral>, {queries, Plan::kThreads, kBytes}, stream, a);
    });
  });
}

}  // namespace
}  // namespace attention

void own_attention_bwd(TensorView dq, TensorView dk, TensorView dv, TensorView dout, TensorView q, TensorView k,
                       TensorView v, TensorView o, TensorView lse, const AttentionParams& p, Stream& stream) noexcept {
  using namespace attention;
  Context& c = context(stream);
  if (std::max(q.dim(3), v.dim(3)) > 256) return c.fail("head dim above 256", "attention_bwd");
  if (!has_known_block(p)) return c.fail("block size other than 16, 32, 64 or 128 tokens", "attention_bwd");
  const i64 B = q.dim(0), T = q.dim(1), H = q.dim(2), rows = padded_rows(T);
  auto* const stats = static_cast<float2*>(c.scratch(static_cast<size_t>(scratch::attention_bwd_bytes(B, T, H))));
  if (stats == nullptr && B * H * rows > 0) return;  // reported by scratch
  const auto run = [&]<class E>(E) {
    constexpr int kRows = kStatisticsThreads / kLanesPerRow;
    launch(statistics<E>, {grid_of(num_tiles(B * H * rows, kRows), 1), kStatisticsThreads, 0}, c.stream(), stats,
           Heads<const E>::of(dout), Heads<const E>::of(o), Statistics<const float>::of(lse), B, T, H, v.dim(3));
    const BackwardArgs<E> args = {.problem = problem_of<E>(q, k, v, p),
                                  .dout = Heads<const E>::of(dout),
                                  .dq = Heads<E>::of(dq),
                                  .dk = Heads<E>::of(dk),
                                  .dv = Heads<E>::of(dv),
                                  .stats = stats,
                                  .stats_rows = rows,
                                  .general = is_general(p),
                                  .queries = Layout::of(p, false),
                                  .keys = Layout::of(p, true)};
    backward(args, c.stream());
  };
  switch (q.dtype) {
    case DType::F32: run(float{}); break;
    case DType::BF16: run(bf16{}); break;
    case DType::F16: run(f16{}); break;
    default: return c.fail("not a work dtype", "attention_bwd");
  }
  c.check(cudaGetLastError(), "attention_bwd");
}

}  // namespace ds::cuda
