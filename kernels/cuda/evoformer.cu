// SPDX-License-Identifier: Apache-2.0
// Evoformer attention on plain multiply-adds in fp32, whatever the work dtype: the algorithms of attention_fp32.cu with
// the two biases. 256 threads are a square of 16 x 16; thread (y, x) has rows y, y + 16, ... of the tile that its block
// owns, and columns x, x + 16, ... of scores and results.
//
// The backward pass is three kernels, each of which recomputes the scores: over keys (dk, dv, and dbias1 of a head),
// over queries (dq), and over pairs, where a block owns a tile of dbias2 and processes n in order. No sum is shared, so
// there are no atomics, and the bits are the same every time.

#include "cuda/attention_tile.h"
#include "cuda/ops.h"
#include "cuda/scratch_plan.h"
#include "cuda/square_tile.h"

namespace ds::cuda {
namespace evoformer {
namespace {

using attention::grid_of;
using attention::Head;
using attention::Heads;
using attention::kInfinity;
using attention::kLn2;
using attention::kLog2E;
using attention::num_tiles;
using attention::Statistics;
using attention::with_head_dim;

using square::add_products;
using square::clear;
using square::kSide;
using square::kThreads;
using square::Plan;
using square::products;
using square::thread_x;
using square::thread_y;
using square::Tile;

constexpr int kWarps = kThreads / kWarp;

template <int kD>
struct alignas(128) ForwardShared {
  Tile<Plan<kD>::kRows, kD> q, k, v;
  Tile<Plan<kD>::kRows, Plan<kD>::kRows> weight;
};
template <int kD>
struct alignas(128) BackwardShared {
  Tile<Plan<kD>::kRows, kD> own[2], met[2];
  Tile<Plan<kD>::kRows, Plan<kD>::kRows> weight, ds;
};
template <int kD>
struct alignas(128) PairsShared {
  Tile<Plan<kD>::kRows, kD> q, k, v, dout;
};

// A bias in fp32 or in the work dtype, or none (0). Rows are the second-last dim.
template <class E>
struct Bias {
  const void* data;
  bool wide;  // fp32
  i64 batch, head, row;

  static Bias of_keys(const TensorView& x) noexcept {
    return {x.data, x.dtype == DType::F32, 0, 0, x ? x.stride[0] : 0};
  }
  static Bias of_pairs(const TensorView& x) noexcept {
    return {x.data, x.dtype == DType::F32, x ? x.stride[0] : 0, x ? x.stride[1] : 0, x ? x.stride[2] : 0};
  }
  DS_DEVICE float operator()(i64 b, i64 h, i64 i, i64 j) const {
    if (data == nullptr) return 0;
    const i64 at = b * batch + h * head + i * row + j;
    return wide ? static_cast<const float*>(data)[at] : to_float(static_cast<const E*>(data)[at]);
  }
};

template <class E>
struct Problem {
  Heads<const E> q, k, v;
  Bias<E> bias1, bias2;
  const float* bases;  // [M]: the value subtracted from bias1 of each sequence
  int M, N, B, T, H, D;
  float scale, scale2;  // of the scores; the same times log2(e)

  // The bias1 term of key j in sequence m, times log2(e); -inf after the last key.
  DS_DEVICE float mask2(int m, int j) const {
    return j >= T ? -kInfinity : bias1.data == nullptr ? 0.0f : (bias1(0, 0, m, j) - bases[m]) * kLog2E;
  }
  // The bias2 term, likewise.
  DS_DEVICE float pair2(int b, int h, int i, int j) const { return i < T && j < T ? bias2(b, h, i, j) * kLog2E : 0.0f; }
};
template <class E>
struct ForwardArgs {
  Problem<E> problem;
  Heads<E> o;
  Statistics<float> lse;
};
template <class E>
struct BackwardArgs {
  Problem<E> problem;
  Heads<const E> dout;
  Heads<E> dq, dk, dv;
  const float2* stats;  // [M,H,T]: {lse * log2(e), rowsum(dO * O)}
  float* columns;       // [M,H,T]: the sum of ds over queries for each key, or null
  float* dbias2;
  i64 batch, head, row;  // strides of dbias2

  DS_DEVICE float2 stats_of(int m, int h, int i) const {
    const Problem<E>& p = problem;
    return i < p.T ? stats[(static_cast<i64>(m) * p.H + h) * p.T + i] : make_float2(kInfinity, 0.0f);
  }
};

template <int kRows, int kColumns, class E>
DS_DEVICE void load_rows(Tile<kRows, kColumns>& tile, const Head<const E>& x, int first, int limit, int D) {
  constexpr int kEach = kPack<E>, kParts = kColumns / kEach;
  DS_NO_UNROLL
  for (int i = thread_index(); i < kRows * kParts; i += kThreads) {
    const int row = i / kParts, d = i % kParts * kEach;
    float part[kEach];
    DS_UNROLL
    for (int e = 0; e < kEach; ++e) part[e] = 0;
    if (first + row < limit) {
      const E* const from = x.data + (first + row) * x.token + d;
      if (x.whole_chunks) {
        if (d < D) load16(part, from);
      } else {
        DS_UNROLL
        for (int e = 0; e < kEach; ++e) part[e] = d + e < D ? to_float(from[e]) : 0.0f;
      }
    }
    DS_UNROLL
    for (int e = 0; e < kEach; e += 4) {
      const float four[4] = {part[e], part[e + 1], part[e + 2], part[e + 3]};
      store16(&tile[row][d + e], four);
    }
  }
}

// Sum or maximum over the threads of a row, which are lanes of one warp, in a fixed order.
DS_DEVICE float row_sum(float x) {
  DS_UNROLL
  for (int lanes = kSide / 2; lanes > 0; lanes /= 2) x += warp_shuffle_xor(x, lanes);
  return x;
}
DS_DEVICE float row_max(float x) {
  DS_UNROLL
  for (int lanes = kSide / 2; lanes > 0; lanes /= 2) x = fmaxf(x, warp_shuffle_xor(x, lanes));
  return x;
}

template <int kR, int kC, class E>
DS_DEVICE void store_results(const float (&x)[kR][kC], const Head<E>& to, int first, int limit, int D, float scale) {
  DS_UNROLL
  for (int r = 0; r < kR; ++r) {
    const int row = first + thread_y() + kSide * r;
    DS_UNROLL
    for (int c = 0; c < kC; ++c) {
      const int d = thread_x() + kSide * c;
      if (row < limit && d < D) to.data[row * to.token + d] = from_float<E>(x[r][c] * scale);
    }
  }
}

// The largest bias1 of each sequence, 0 if that is -inf. One warp per sequence.
template <class E>
__global__ void __launch_bounds__(kThreads) find_bases(float* bases, Bias<E> bias1, int M, int T) {
  const int m = static_cast<int>(block_index().x) * kWarps + thread_index() / kWarp, lane = thread_index() % kWarp;
  float most = -kInfinity;
  for (int j = lane; m < M && j < T; j += kWarp) most = fmaxf(most, bias1(0, 0, m, j));
  most = warp_max(most);
  if (m < M && lane == 0) bases[m] = most == -kInfinity ? 0.0f : most;
}

template <class E, int kD>
__global__ void __launch_bounds__(kThreads) forward(ForwardArgs<E> a) {
  constexpr int kRows = Plan<kD>::kRows, kR = Plan<kD>::kR;
  auto& shared = block_shared<ForwardShared<kD>>();
  const Problem<E>& p = a.problem;
  const int heads = p.M * p.H, head = static_cast<int>(block_index().x) % heads;
  const int m = head / p.H, h = head % p.H, b = m / p.N, first = static_cast<int>(block_index().x) / heads * kRows;
  load_rows<kRows, kD>(shared.q, p.q(m, h), first, p.T, p.D);

  float x[kR][Plan<kD>::kC], top[kR], sum[kR];
  clear(x);
  DS_UNROLL
  for (int r = 0; r < kR; ++r) top[r] = -kInfinity, sum[r] = 0;
  for (int key = 0; key < p.T; key += kRows) {
    sync_block();
    load_rows<kRows, kD>(shared.k, p.k(m, h), key, p.T, p.D);
    load_rows<kRows, kD>(shared.v, p.v(m, h), key, p.T, p.D);
    sync_block();
    float s[kR][kR], mask[kR];
    products<kR, kRows, kD>(s, shared.q, shared.k);
    DS_UNROLL
    for (int c = 0; c < kR; ++c) mask[c] = p.mask2(m, key + thread_x() + kSide * c);
    DS_UNROLL
    for (int r = 0; r < kR; ++r) {
      float high = top[r];
      DS_UNROLL
      for (int c = 0; c < kR; ++c) {
        const float pair = p.pair2(b, h, first + thread_y() + kSide * r, key + thread_x() + kSide * c);
        s[r][c] = s[r][c] * p.scale2 + mask[c] + pair;
        high = fmaxf(high, s[r][c]);
      }
      high = row_max(high);
      const float base = high == -kInfinity ? 0.0f : high, keep = fast_exp2(top[r] - base);
      top[r] = high;
      sum[r] *= keep;
      DS_UNROLL
      for (int c = 0; c < Plan<kD>::kC; ++c) x[r][c] *= keep;
      DS_UNROLL
      for (int c = 0; c < kR; ++c) {
        const float w = fast_exp2(s[r][c] - base);
        sum[r] += w;
        shared.weight[thread_y() + kSide * r][thread_x() + kSide * c] = w;
      }
    }
    sync_warp();
    add_products<kR, Plan<kD>::kC, kRows, kD>(x, shared.weight, shared.v);
  }
  DS_UNROLL
  for (int r = 0; r < kR; ++r) {
    const float all = row_sum(sum[r]), share = 1.0f / all;
    DS_UNROLL
    for (int c = 0; c < Plan<kD>::kC; ++c) x[r][c] = all == 0 ? 0.0f : x[r][c] * share;
    const int row = first + thread_y() + kSide * r;
    if (thread_x() == 0 && row < p.T) a.lse(m, h)[row] = all == 0 ? kInfinity : (top[r] + fast_log2(all)) * kLn2;
  }
  store_results(x, a.o(m, h), first, p.T, p.D, 1.0f);
}

// One warp per row.
template <class E>
__global__ void __launch_bounds__(kThreads) find_stats(float2* stats, Heads<const E> dout, Heads<const E> o,
                                                       Statistics<const float> lse, i64 rows, int T, int H, int D) {
  const i64 row = static_cast<i64>(block_index().x) * kWarps + thread_index() / kWarp;
  const int lane = thread_index() % kWarp;
  const int m = static_cast<int>(row / T / H), h = static_cast<int>(row / T % H), i = static_cast<int>(row % T);
  float sum = 0;
  for (int d = lane; row < rows && d < D; d += kWarp) {
    const Head<const E> x = dout(m, h), y = o(m, h);
    sum += to_float(x.data[i * x.token + d]) * to_float(y.data[i * y.token + d]);
  }
  sum = warp_sum(sum);
  if (row < rows && lane == 0) stats[row] = make_float2(lse(m, h)[i] * kLog2E, sum);
}

template <class E, int kD>
__global__ void __launch_bounds__(kThreads) backward_keys(BackwardArgs<E> a) {
  constexpr int kRows = Plan<kD>::kRows, kR = Plan<kD>::kR, kC = Plan<kD>::kC;
  auto& shared = block_shared<BackwardShared<kD>>();
  const Problem<E>& p = a.problem;
  const int heads = p.M * p.H, head = static_cast<int>(block_index().x) % heads;
  const int m = head / p.H, h = head % p.H, b = m / p.N, first = static_cast<int>(block_index().x) / heads * kRows;
  load_rows<kRows, kD>(shared.own[0], p.k(m, h), first, p.T, p.D);
  load_rows<kRows, kD>(shared.own[1], p.v(m, h), first, p.T, p.D);

  float dk[kR][kC], dv[kR][kC], columns[kR], mask[kR];
  clear(dk);
  clear(dv);
  DS_UNROLL
  for (int r = 0; r < kR; ++r) {
    columns[r] = 0;
    mask[r] = p.mask2(m, first + thread_y() + kSide * r);
  }
  for (int row = 0; row < p.T; row += kRows) {
    sync_block();
    load_rows<kRows, kD>(shared.met[0], p.q(m, h), row, p.T, p.D);
    load_rows<kRows, kD>(shared.met[1], a.dout(m, h), row, p.T, p.D);
    sync_block();
    float s[kR][kR], grad[kR][kR];
    products<kR, kRows, kD>(s, shared.own[0], shared.met[0]);
    products<kR, kRows, kD>(grad, shared.own[1], shared.met[1]);
    DS_UNROLL
    for (int c = 0; c < kR; ++c) {
      const int i = row + thread_x() + kSide * c;
      const float2 stats = a.stats_of(m, h, i);
      DS_UNROLL
      for (int r = 0; r < kR; ++r) {
        const float pair = p.pair2(b, h, i, first + thread_y() + kSide * r);
        const float w = fast_exp2(s[r][c] * p.scale2 + mask[r] + pair - stats.x), ds = w * (grad[r][c] - stats.y);
        const int y = thread_y() + kSide * r, x = thread_x() + kSide * c;
        shared.weight[y][x] = w;
        shared.ds[y][x] = ds;
        columns[r] += ds;
      }
    }
    sync_warp();
    add_products<kR, kC, kRows, kD>(dv, shared.weight, shared.met[1]);
    add_products<kR, kC, kRows, kD>(dk, shared.ds, shared.met[0]);
  }
  store_results(dk, a.dk(m, h), first, p.T, p.D, p.scale);
  store_results(dv, a.dv(m, h), first, p.T, p.D, 1.0f);
  DS_UNROLL
  for (int r = 0; r < kR; ++r) {
    const float all = row_sum(columns[r]);
    const int key = first + thread_y() + kSide * r;
    if (a.columns != nullptr && thread_x() == 0 && key < p.T) a.columns[static_cast<i64>(head) * p.T + key] = all;
  }
}

template <class E, int kD>
__global__ void __launch_bounds__(kThreads) backward_queries(BackwardArgs<E> a) {
  constexpr int kRows = Plan<kD>::kRows, kR = Plan<kD>::kR, kC = Plan<kD>::kC;
  auto& shared = block_shared<BackwardShared<kD>>();
  const Problem<E>& p = a.problem;
  const int heads = p.M * p.H, head = static_cast<int>(block_index().x) % heads;
  const int m = head / p.H, h = head % p.H, b = m / p.N, first = static_cast<int>(block_index().x) / heads * kRows;
  load_rows<kRows, kD>(shared.own[0], p.q(m, h), first, p.T, p.D);
  load_rows<kRows, kD>(shared.own[1], a.dout(m, h), first, p.T, p.D);

  float dq[kR][kC];
  clear(dq);
  for (int key = 0; key < p.T; key += kRows) {
    sync_block();
    load_rows<kRows, kD>(shared.met[0], p.k(m, h), key, p.T, p.D);
    load_rows<kRows, kD>(shared.met[1], p.v(m, h), key, p.T, p.D);
    sync_block();
    float s[kR][kR], grad[kR][kR], mask[kR];
    products<kR, kRows, kD>(s, shared.own[0], shared.met[0]);
    products<kR, kRows, kD>(grad, shared.own[1], shared.met[1]);
    DS_UNROLL
    for (int c = 0; c < kR; ++c) mask[c] = p.mask2(m, key + thread_x() + kSide * c);
    DS_UNROLL
    for (int r = 0; r < kR; ++r) {
      const int y = thread_y() + kSide * r;
      const float2 stats = a.stats_of(m, h, first + y);
      DS_UNROLL
      for (int c = 0; c < kR; ++c) {
        const int x = thread_x() + kSide * c;
        const float w = fast_exp2(s[r][c] * p.scale2 + mask[c] + p.pair2(b, h, first + y, key + x) - stats.x);
        shared.ds[y][x] = w * (grad[r][c] - stats.y);
      }
    }
    sync_warp();
    add_products<kR, kC, kRows, kD>(dq, shared.ds, shared.met[0]);
  }
  store_results(dq, a.dq(m, h), first, p.T, p.D, p.scale);
}

// Each block has a tile of dbias2 of (b, h) in registers.
template <class E, int kD>
__global__ void __launch_bounds__(kThreads) backward_pairs(BackwardArgs<E> a) {
  constexpr int kRows = Plan<kD>::kRows, kR = Plan<kD>::kR;
  auto& shared = block_shared<PairsShared<kD>>();
  const Problem<E>& p = a.problem;
  const int heads = p.B * p.H, tiles = (p.T + kRows - 1) / kRows, tile = static_cast<int>(block_index().x) / heads;
  const int head = static_cast<int>(block_index().x) % heads, b = head / p.H, h = head % p.H;
  const int row = tile / tiles * kRows, key = tile % tiles * kRows;

  float sum[kR][kR], pair[kR][kR];
  clear(sum);
  DS_UNROLL
  for (int r = 0; r < kR; ++r) {
    DS_UNROLL
    for (int c = 0; c < kR; ++c) {
      pair[r][c] = p.pair2(b, h, row + thread_y() + kSide * r, key + thread_x() + kSide * c);
    }
  }
  for (int n = 0; n < p.N; ++n) {
    const int m = b * p.N + n;
    sync_block();
    load_rows<kRows, kD>(shared.q, p.q(m, h), row, p.T, p.D);
    load_rows<kRows, kD>(shared.dout, a.dout(m, h), row, p.T, p.D);
    load_rows<kRows, kD>(shared.k, p.k(m, h), key, p.T, p.D);
    load_rows<kRows, kD>(shared.v, p.v(m, h), key, p.T, p.D);
    sync_block();
    float s[kR][kR], grad[kR][kR], mask[kR];
    products<kR, kRows, kD>(s, shared.q, shared.k);
    products<kR, kRows, kD>(grad, shared.dout, shared.v);
    DS_UNROLL
    for (int c = 0; c < kR; ++c) mask[c] = p.mask2(m, key + thread_x() + kSide * c);
    DS_UNROLL
    for (int r = 0; r < kR; ++r) {
      const float2 stats = a.stats_of(m, h, row + thread_y() + kSide * r);
      DS_UNROLL
      for (int c = 0; c < kR; ++c) {
        const float w = fast_exp2(s[r][c] * p.scale2 + mask[c] + pair[r][c] - stats.x);
        sum[r][c] += w * (grad[r][c] - stats.y);
      }
    }
  }
  DS_UNROLL
  for (int r = 0; r < kR; ++r) {
    const int i = row + thread_y() + kSide * r;
    DS_UNROLL
    for (int c = 0; c < kR; ++c) {
      const int j = key + thread_x() + kSide * c;
      if (i < p.T && j < p.T) a.dbias2[b * a.batch + h * a.head + i * a.row + j] = sum[r][c];
    }
  }
}

// dbias1 [M,T], over the heads in order. One thread per element.
__global__ void __launch_bounds__(kThreads)
    sum_heads(float* dbias1, i64 row, const float* columns, i64 M, int H, int T) {
  const i64 at = static_cast<i64>(block_index().x) * kThreads + thread_index(), m = at / T, j = at % T;
  if (m >= M) return;
  float sum = columns[m * H * T + j];
  for (int h = 1; h < H; ++h) sum += columns[(m * H + h) * T + j];
  dbias1[m * row + j] = sum;
}

// Also computes the `bases` of bias1.
template <class E>
Problem<E> problem_of(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& bias1,
                      const TensorView& bias2, float* bases, const EvoformerParams& p, cudaStream_t stream) noexcept {
  const int M = static_cast<int>(q.dim(0)), N = static_cast<int>(p.num_seq), T = static_cast<int>(q.dim(1));
  const Problem<E> problem = {.q = Heads<const E>::of(q),
                              .k = Heads<const E>::of(k),
                              .v = Heads<const E>::of(v),
                              .bias1 = Bias<E>::of_keys(bias1),
                              .bias2 = Bias<E>::of_pairs(bias2),
                              .bases = bases,
                              .M = M,
                              .N = N,
                              .B = M / N,
                              .T = T,
                              .H = static_cast<int>(q.dim(2)),
                              .D = static_cast<int>(q.dim(3)),
                              .scale = p.scale,
                              .scale2 = p.scale * kLog2E};
  if (bias1) launch(find_bases<E>, {grid_of(num_tiles(M, kWarps), 1), kThreads, 0}, stream, bases, problem.bias1, M, T);
  return problem;
}

template <class E>
void run_forward(const ForwardArgs<E>& a, cudaStream_t stream) noexcept {
  with_head_dim<32, 64, 128, 256>(a.problem.D, [&](auto dim) {
    constexpr int kD = decltype(dim)::value;
    const dim3 grid = grid_of(num_tiles(a.problem.T, Plan<kD>::kRows), i64{a.problem.M} * a.problem.H);
    launch(forward<E, kD>, {grid, kThreads, sizeof(ForwardShared<kD>)}, stream, a);
  });
}

template <class E>
void run_backward(const BackwardArgs<E>& a, cudaStream_t stream) noexcept {
  with_head_dim<32, 64, 128, 256>(a.problem.D, [&](auto dim) {
    constexpr int kD = decltype(dim)::value;
    const Problem<E>& p = a.problem;
    const i64 tiles = num_tiles(p.T, Plan<kD>::kRows);
    const dim3 grid = grid_of(tiles, i64{p.M} * p.H), pairs = grid_of(tiles * tiles, i64{p.B} * p.H);
    launch(backward_keys<E, kD>, {grid, kThreads, sizeof(BackwardShared<kD>)}, stream, a);
    launch(backward_queries<E, kD>, {grid, kThreads, sizeof(BackwardShared<kD>)}, stream, a);
    if (a.dbias2 == nullptr) return;
    launch(backward_pairs<E, kD>, {pairs, kThreads, sizeof(PairsShared<kD>)}, stream, a);
  });
}

}  // namespace
}  // namespace evoformer

void evoformer_attention_fwd(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v, TensorView bias1,
                             TensorView bias2, const EvoformerParams& p, Stream& stream) noexcept {
  using namespace evoformer;
  Context& c = context(stream);
  if (q.dim(3) > 256) return c.fail("head dim above 256", "evoformer_attention_fwd");
  if (q.numel() == 0) return;
  auto* const bases = static_cast<float*>(c.scratch(static_cast<size_t>(scratch::evoformer_bases_bytes(q.dim(0)))));
  if (bases == nullptr) return;  // reported by scratch
  with_work_type(q.dtype, [&]<class E>(E) {
    run_forward<E>({.problem = problem_of<E>(q, k, v, bias1, bias2, bases, p, c.stream()),
                    .o = Heads<E>::of(o),
                    .lse = Statistics<float>::of(lse)},
                   c.stream());
  });
  c.check(cudaGetLastError(), "evoformer_attention_fwd");
}

void evoformer_attention_bwd(TensorView dq, TensorView dk, TensorView dv, TensorView dbias1, TensorView dbias2,
                             TensorView dout, TensorView q, TensorView k, TensorView v, TensorView o, TensorView lse,
                             TensorView bias1, TensorView bias2, const EvoformerParams& p, Stream& stream) noexcept {
  using namespace evoformer;
  Context& c = context(stream);
  if (q.dim(3) > 256) return c.fail("head dim above 256", "evoformer_attention_bwd");
  if (q.numel() == 0) return;
  const i64 M = q.dim(0), T = q.dim(1), H = q.dim(2), rows = M * H * T;
  const i64 stats_bytes = scratch::evoformer_stats_bytes(rows);
  const i64 columns_bytes = dbias1 ? scratch::evoformer_columns_bytes(rows) : 0;
  auto* const memory = static_cast<char*>(
      c.scratch(static_cast<size_t>(stats_bytes + columns_bytes + scratch::evoformer_bases_bytes(M))));
  if (memory == nullptr) return;  // reported by scratch
  auto* const stats = reinterpret_cast<float2*>(memory);
  auto* const columns = dbias1 ? reinterpret_cast<float*>(memory + stats_bytes) : nullptr;
  auto* const bases = reinterpret_cast<float*>(memory + stats_bytes + columns_bytes);
  with_work_type(q.dtype, [&]<class E>(E) {
    launch(find_stats<E>, {grid_of(num_tiles(rows, kWarps), 1), kThreads, 0}, c.stream(), stats,
           Heads<const E>::of(dout), Heads<const E>::of(o), Statistics<const float>::of(lse), rows, T, H, q.dim(3));
    run_backward<E>({.problem = problem_of<E>(q, k, v, bias1, bias2, bases, p, c.stream()),
                     .dout = Heads<const E>::of(dout),
                     .dq = Heads<E>::of(dq),
                     .dk = Heads<E>::of(dk),
                     .dv = Heads<E>::of(dv),
                     .stats = stats,
                     .columns = columns,
                     .dbias2 = dbias2.as<float>(),
                     .batch = dbias2.stride[0],
                     .head = dbias2.stride[1],
                     .row = dbias2.stride[2]},
                    c.stream());
  });
  if (dbias1) {
    launch(sum_heads, {grid_of(num_tiles(M * T, kThreads), 1), kThreads, 0}, c.stream(), dbias1.as<float>(),
           dbias1.stride[0], columns, M, H, T);
  }
  c.check(cudaGetLastError(), "evoformer_attention_bwd");
}

}  // namespace ds::cuda
