// SPDX-License-Identifier: Apache-2.0
// Attention forward: flash attention (Dao: "FlashAttention-2", algorithm 1) on the tensor core. A block owns a tile of
// queries of one head, a warp 16 or 32 of its rows; keys and values arrive in steps, each during the computation of the
// previous one. Scores never leave registers: the accumulators of Q K^T, exponentiated in base 2 relative to the
// running maximum of their row, are the left operand of P V. Dropout removes probabilities from P V, but not from the
// row's sum.

#include <algorithm>

#include "cuda/attention_softmax.h"
#include "cuda/scratch_plan.h"

namespace ds::cuda {
namespace attention {
namespace {

template <class E, int kD, bool kGeneral>
__global__ void __launch_bounds__(ForwardPlan<kD>::kThreads) forward(ForwardArgs<E> a) {
  using Plan = ForwardPlan<kD>;
  constexpr int kM = Plan::kRowTiles, kThreads = Plan::kThreads;
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
  const WarpRows view{mask,
                      SameToken{},
                      b,
                      h,
                      warp_row,
                      warp_rows,
                      mask.keys_of_rows(warp_rows),
                      steps.own_blocks(warp_rows),
                      p.terms.distance0};
  E* const own = shared.q + warp * 16 * kM * kD;

  const auto load_step = [&](int n) {
    steps.template load<kD, kThreads>(shared.k[n % 2], k, n, mask.S, p.D);
    steps.template load<kD, kThreads>(shared.v[n % 2], v, n, mask.S, p.Dv);
    copies_commit();
  };
  Fragments<kD, kM, Plan::kHold, E> query(own);
  if (steps.has(0)) {
    load_tile<kD, Plan::kOwn, kThreads>(shared.q, p.q(b, h), block_row, mask.T, p.D);
    load_step(0);
    copies_wait<0>();
    sync_block();
    query.load();
  }

  Rows rows[kM];
  float x[kM][kD / 8][4];
  DS_UNROLL
  for (int m = 0; m < kM; ++m) clear(x[m]);
  DS_NO_UNROLL
  for (int n = 0; steps.has(n); ++n) {
    if (steps.has(n + 1)) load_step(n + 1);
    steps.make(n + 2);
    attend_step<kD, Plan::kHold, false>(x, rows, p, steps, n, shared.k[n % 2], shared.v[n % 2], query, view);
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

void attention_by_row(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v, const AttentionParams& p,
                      Context& c) noexcept {
  const RowPlan plan = RowPlan::of(q, k, p);
  const i64 bytes = scratch::attention_rows_bytes(plan, v.dim(3));
  auto* const sums = bytes > 0 ? static_cast<float*>(c.scratch(static_cast<size_t>(bytes))) : nullptr;
  if (sums == nullptr && bytes > 0) return;  // reported by scratch
  Layout layout = Layout::of(p, false);
  layout.aligned = true;
  const auto run = [&]<class E>(E) {
    ForwardArgs<E> args{problem_of<E>(q, k, v, p), Heads<E>::of(o), Statistics<float>::of(lse), true, layout, {}};
    args.rows = {.sequences = p.sequences,
                 .pack = static_cast<int>(plan.pack),
                 .parts = static_cast<int>(plan.parts),
                 .tiles = 0,
                 .split = plan.split,
                 .sums = sums,
                 .k_scale = k.scale,
                 .v_scale = v.scale};
    forward_rows(args, c.stream());
    if (plan.split) merge_rows(args, c.stream());
  };
  switch (q.dtype) {
    case DType::F32: run(float{}); break;
    case DType::BF16: run(bf16{}); break;
    case DType::F16: run(f16{}); break;
    default: return c.fail("not a work dtype", "attention_fwd");
  }
  c.check(cudaGetLastError(), "attention_fwd");
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
  if (is_by_row(p, k)) return attention_by_row(o, lse, q, k, v, p, c);
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
