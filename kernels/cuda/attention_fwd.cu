// SPDX-License-Identifier: Apache-2.0
// Attention forward: flash attention (Dao: "FlashAttention-2", algorithm 1) on the tensor core. A block owns a tile of
// queries of one head, a warp 16 or 32 of its rows; keys and values arrive in steps, each during the computation of the
// previous one. Scores never leave registers: the accumulators of Q K^T, exponentiated in base 2 relative to the
// running maximum of their row, are the left operand of P V. Dropout removes probabilities from P V, but not from the
// row's sum.

#include <algorithm>

#include "cuda/attention_steps.h"

namespace ds::cuda {
namespace attention {
namespace {

template <bool kGeneral, int kD>
using ForwardSteps = Steps<kGeneral, ForwardPlan<kD>::kStep>;

template <class E, int kD, bool kGeneral>
struct ForwardShared : ForwardSteps<kGeneral, kD>::Shared {
  using Plan = ForwardPlan<kD>;
  alignas(128) E q[Plan::kOwn * kD];
  E k[2][Plan::kStep * kD], v[2][Plan::kStep * kD];
};

// The running maximum and sum of a lane's two rows; the sum is this lane's part only.
struct Rows {
  float top[2] = {-kInfinity, -kInfinity}, sum[2] = {0, 0};
};

// Turns scores (times log2(e)) into weights 2^(score - top) with the row's new maximum; x contains the earlier sums.
template <int kN, int kColumns>
DS_DEVICE void softmax_step(Rows& rows, float (&s)[kN][4], float (&x)[kColumns][4]) {
  DS_UNROLL
  for (int half = 0; half < 2; ++half) {
    float top = rows.top[half];
    DS_UNROLL
    for (int n = 0; n < kN; ++n) top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    top = fmaxf(top, warp_shuffle_xor(top, 1));
    top = fmaxf(top, warp_shuffle_xor(top, 2));
    const float base = top == -kInfinity ? 0.0f : top;  // only -inf so far: all weights are 2^-inf = 0
    const float keep = fast_exp2(rows.top[half] - base);
    float sum = rows.sum[half] * keep;
    DS_UNROLL
    for (int n = 0; n < kN; ++n) {
      DS_UNROLL
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        s[n][e] = fast_exp2(s[n][e] - base);
        sum += s[n][e];
      }
    }
    DS_UNROLL
    for (int n = 0; n < kColumns; ++n) {
      x[n][2 * half] *= keep;
      x[n][2 * half + 1] *= keep;
    }
    rows.top[half] = top;
    rows.sum[half] = sum;
  }
}

template <class E, int kD, bool kGeneral>
__global__ void __launch_bounds__(ForwardPlan<kD>::kThreads) forward(ForwardArgs<E> a) {
  using Plan = ForwardPlan<kD>;
  constexpr int kM = Plan::kRowTiles, kN = Plan::kStep / 8, kThreads = Plan::kThreads;
  auto& shared = block_shared<ForwardShared<E, kD, kGeneral>>();
  const Problem<E>& p = a.problem;
  const Work work = work_of(block_index().x, (p.mask.T + Plan::kOwn - 1) / Plan::kOwn, p.B * p.H, p.mask.causal);
  const int b = work.head / p.H, h = work.head % p.H, g = h / p.R;
  decltype(auto) mask = mask_of<kGeneral>(p, b);
  const int block_row = work.tile * Plan::kOwn;
  const Head<const E> k = p.k(b, g), v = p.v(b, g);
  const Range block_rows = intersect({block_row, block_row + Plan::kOwn}, {0, mask.T});
  ForwardSteps<kGeneral, kD> steps(shared, a.layout,
                                   {.own = block_rows, .seen = mask.keys_of_rows(block_rows), .head = h});
  steps.start();

  // The shuffle tells the compiler that the value is the same for the whole warp.
  const int lane = thread_index() % kWarp;
  const int warp = kGeneral ? warp_shuffle(thread_index() / kWarp, 0) : thread_index() / kWarp;
  const int warp_row = block_row + warp * 16 * kM;
  float* const lse = a.lse(b, h);
  const Range warp_rows = {warp_row, warp_row + 16 * kM};
  const auto warp_keys = mask.keys_of_rows(warp_rows);
  const u32 warp_blocks = steps.own_blocks(warp_rows);
  E* const own = shared.q + warp * 16 * kM * kD;
  const auto own_blocks = Blocks<kD, E>::template of<false>(own);

  const auto load_step = [&](int n) {
    steps.template load<kD, kThreads>(shared.k[n % 2], k, n, mask.S, p.D);
    steps.template load<kD, kThreads>(shared.v[n % 2], v, n, mask.S, p.Dv);
    copies_commit();
  };
  constexpr int kHeld = Plan::kHold ? kD / 16 : 1;
  u32 held[kM][kHeld][4];
  if (steps.has(0)) {
    load_tile<kD, Plan::kOwn, kThreads>(shared.q, p.q(b, h), block_row, mask.T, p.D);
    load_step(0);
    copies_wait<0>();
    sync_block();
    if constexpr (Plan::kHold) {
      DS_UNROLL
      for (int m = 0; m < kM; ++m) {
        DS_UNROLL
        for (int i = 0; i < kHeld; ++i) load_matrices(held[m][i], own_blocks.at(16 * m, i));
      }
    }
  }
  const auto query = [&](int m, int i, u32(&fragment)[4]) {
    if constexpr (Plan::kHold) {
      DS_UNROLL
      for (int j = 0; j < 4; ++j) fragment[j] = held[m][i][j];
    } else {
      load_matrices(fragment, own_blocks.at(16 * m, i));
    }
  };

  Rows rows[kM];
  float x[kM][kD / 8][4];
  DS_UNROLL
  for (int m = 0; m < kM; ++m) clear(x[m]);
  DS_NO_UNROLL
  for (int n = 0; steps.has(n); ++n) {
    if (steps.has(n + 1)) load_step(n + 1);
    steps.make(n + 2);
    const auto needed = steps.template needed<kN / 2>(n, 0, warp_keys, warp_blocks);
    if (needed.any()) {
      float s[kM][kN][4];
      DS_UNROLL
      for (int m = 0; m < kM; ++m) clear(s[m]);
      multiply_transposed<kD, Plan::kHold>(s, query, shared.k[n % 2], needed);
      if (kGeneral && p.terms.any()) {
        DS_UNROLL
        for (int m = 0; m < kM; ++m) {
          const int row = warp_row + 16 * m + lane / 4, base = p.terms.distance0 + lane % 4 * 2 - row;
          make_scores(
              s[m], p, p.terms.bias_of(h),
              [&](int i, int e) { return base + steps.first(n, i / 2) + i % 2 * 8 + e % 2 - e / 2 * 8; },
              [](int, int, float) {});
        }
      } else {
        DS_UNROLL
        for (int m = 0; m < kM; ++m) {
          DS_UNROLL
          for (int i = 0; i < kN; ++i) {
            DS_UNROLL
            for (int e = 0; e < 4; ++e) s[m][i][e] *= p.scale2;
          }
        }
      }
      const auto see = [&](int row) { return mask.keys_of_row(row); };
      const auto visible = [&](Range keys) { return mask.all_visible(warp_rows, keys); };
      if (!steps.template whole<kN / 2>(needed, n, 0, warp_blocks, visible)) {
        DS_UNROLL
        for (int m = 0; m < kM; ++m) {
          hide(s[m], steps, n, 0, warp_row + 16 * m, see, mask.has_sinks(), -kInfinity);
        }
      }
      u32 weights[kM][kN / 2][4];
      DS_UNROLL
      for (int m = 0; m < kM; ++m) {
        softmax_step(rows[m], s[m], x[m]);
        if (p.dropout.on) {
          const u32 bits = kept_by_slot<true, kN / 2>(p.dropout, needed, [&](int slot) {
            return p.dropout.element(b, h, warp_row + 16 * m, steps.first(n, slot));
          });
          DS_UNROLL
          for (int i = 0; i < 4 * kN; ++i) s[m][i / 4][i % 4] = (bits >> i & 1u) != 0 ? s[m][i / 4][i % 4] : 0.0f;
        }
        pack<E>(weights[m], s[m]);
      }
      multiply<kD>(x, weights, shared.v[n % 2], 0, needed);
    }
    copies_wait<0>();
    sync_block();
  }

  const float factor = p.dropout.on ? p.dropout.factor : 1.0f;
  DS_UNROLL
  for (int m = 0; m < kM; ++m) {
    DS_UNROLL
    for (int half = 0; half < 2; ++half) {
      float sum = rows[m].sum[half];
      sum += warp_shuffle_xor(sum, 1);
      sum += warp_shuffle_xor(sum, 2);
      const float share = factor * fast_rcp(sum);
      DS_UNROLL
      for (int n = 0; n < kD / 8; ++n) {
        DS_UNROLL
        for (int e = 2 * half; e < 2 * half + 2; ++e) x[m][n][e] = sum == 0 ? 0.0f : x[m][n][e] * share;
      }
      const int row = warp_row + 16 * m + 8 * half + lane / 4;
      if (lane % 4 == 0 && row < mask.T) {
        lse[row] = sum == 0 ? kInfinity : (rows[m].top[half] + fast_log2(sum)) * kLn2;
      }
    }
    store_rows<kD>(own + 16 * m * kD, x[m], a.o(b, h), warp_row + 16 * m, mask.T, 0, p.Dv);
  }
}

template <class E>
void forward_16(const ForwardArgs<E>& a, cudaStream_t stream) noexcept {
  with_head_dim<32, 64, 96, 128, 192, 256>(widest_head(a.problem), [&](auto dim) {
    constexpr int kD = decltype(dim)::value;
    using Plan = ForwardPlan<kD>;
    const Problem<E>& p = a.problem;
    const dim3 grid = grid_of(num_tiles(p.mask.T, Plan::kOwn), i64{p.B} * p.H);
    with_general(a.general, [&](auto general) {
      constexpr bool kGeneral = decltype(general)::value;
      launch(forward<E, kD, kGeneral>, {grid, Plan::kThreads, sizeof(ForwardShared<E, kD, kGeneral>)}, stream, a);
    });
  });
}

}  // namespace
}  // namespace attention

void own_attention_fwd(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v, const AttentionParams& p,
                       Stream& stream) noexcept {
  using namespace attention;
  Context& c = context(stream);
  if (std::max(q.dim(3), v.dim(3)) > 256) return c.fail("head dim above 256", "attention_fwd");
  if (!has_known_block(p)) return c.fail("block size other than 16, 32, 64 or 128 tokens", "attention_fwd");
  if (!has_known_page(p))
    return c.fail("page size other than 16, 32, 64 or 128 keys, or smaller than a block", "attention_fwd");
  const auto args = [&]<class E>(E) {
    return ForwardArgs<E>{problem_of<E>(q, k, v, p), Heads<E>::of(o), Statistics<float>::of(lse), is_general(p),
                          Layout::of(p, false)};
  };
  switch (q.dtype) {
    case DType::F32: forward_fp32(args(float{}), c.stream()); break;
    case DType::BF16: forward_16(args(bf16{}), c.stream()); break;
    case DType::F16: forward_16(args(f16{}), c.stream()); break;
    default: return c.fail("not a work dtype", "attention_fwd");
  }
  c.check(cudaGetLastError(), "attention_fwd");
}

}  // namespace ds::cuda
