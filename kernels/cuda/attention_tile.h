// SPDX-License-Identifier: Apache-2.0
#pragma once
// Parts shared by the attention kernels: their arguments, loading tiles into shared memory, products of tiles on the
// tensor core, the mask of dropout, and storing accumulators.
//
// Layout of fragments (PTX, mma.m16n8k16): of an accumulator [16, 8] lane l holds rows l/4 and l/4 + 8, columns 2*(l%4)
// and the next: elements 0, 1 of the upper row, 2, 3 of the lower. Two neighbouring accumulators, rounded and packed,
// are the left operand of the next product without rearrangement.

#include <limits>
#include <type_traits>

#include "cuda/attention.h"
#include "cuda/context.h"
#include "cuda/vectors.h"

namespace ds::cuda::attention {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// The vectors of one (batch, head), `token` elements apart.
template <class E>
struct Head {
  E* data;
  i64 token;
  bool whole_chunks;

  DS_DEVICE E* at(int row) const { return data + row * token; }
};
// A view [B, tokens, heads, D].
template <class E>
struct Heads {
  E* data;
  i64 batch, token, head;
  bool whole_chunks;

  static Heads of(const TensorView& x) noexcept {
    return {x.as<E>(), x.stride[0], x.stride[1], x.stride[2], has_whole_chunks(x)};
  }
  DS_DEVICE Head<E> operator()(int b, int h) const { return {data + b * batch + h * head, token, whole_chunks}; }
};

// Statistics [B, heads, tokens], with adjacent tokens.
template <class F>
struct Statistics {
  F* data;
  i64 batch, head;

  static Statistics of(const TensorView& x) noexcept { return {x.as<F>(), x.stride[0], x.stride[1]}; }
  DS_DEVICE F* operator()(i64 b, i64 h) const { return data + b * batch + h * head; }
};

struct Dropout {
  RngKey key;
  u32 least;     // least_kept(p)
  float factor;  // 1 / (1 - p)
  bool on;
  bool whole_blocks;  // every fourth key starts a block of four numbers, in every row
  AttentionGrid grid;

  static Dropout of(const AttentionParams& p, i64 H, i64 T, i64 S) noexcept {
    const AttentionGrid grid = p.grid.of(H, T, S);
    return {.key = p.rng,
            .least = least_kept(p.dropout),
            .factor = 1.0f / (1.0f - p.dropout),
            .on = p.dropout > 0,
            .whole_blocks = grid.cols % 4 == 0 && grid.col0 % 4 == 0,
            .grid = grid};
  }
  DS_DEVICE u64 element(int b, int h, int i, int j) const { return static_cast<u64>(grid.row(b, h, i) + j); }
};

// Further terms of scores besides their scale.
struct Terms {
  float cap_scale = 0;          // scale / softcap
  float cap2 = 0;               // softcap, times log2(e); 0: none
  const float* bias = nullptr;  // of the call's first head at distance 0
  i64 next_head = 0;
  int reach = 0;
  int distance0 = 0;  // the position of the first key minus that of the first query

  static Terms of(const AttentionParams& p) noexcept {
    const bool capped = p.softcap > 0, biased = p.bias != nullptr;
    const i64 row = 2 * p.reach + 1;
    return {.cap_scale = capped ? p.scale / p.softcap : 0.0f,
            .cap2 = capped ? p.softcap * kLog2E : 0.0f,
            .bias = biased ? p.bias + p.grid.head0 * row + p.reach : nullptr,
            .next_head = row,
            .reach = static_cast<int>(std::min(p.reach, i64{1} << 30)),
            .distance0 = static_cast<int>(p.grid.col0 - p.grid.row0)};
  }
  DS_DEVICE bool capped() const { return cap2 > 0; }
  DS_DEVICE bool any() const { return cap2 > 0 || bias != nullptr; }
  // The biases of a head, by distances from -reach to reach.
  DS_DEVICE const float* bias_of(int head) const { return bias == nullptr ? nullptr : bias + head * next_head; }
  DS_DEVICE int within_reach(int distance) const {
    return distance < -reach ? -reach : distance > reach ? reach : distance;
  }
};

template <class E>
struct Problem {
  Heads<const E> q, k, v;
  Mask mask;
  int B, H, G, R, D;    // R = H / G
  int Dv;               // head dim of values
  float scale, scale2;  // of the scores; the same times log2(e)
  Dropout dropout;
  // Only for the general kernels.
  Terms terms;
  Places places;
};

// The mask of a sample; the call's own if there are no further terms.
template <bool kGeneral, class E>
DS_DEVICE decltype(auto) mask_of(const Problem<E>& p, [[maybe_unused]] int b) {
  if constexpr (kGeneral) {
    return SampleMask(p.mask, p.places, b);
  } else {
    return static_cast<const Mask&>(p.mask);
  }
}

// The score of a product with soft cap, times log2(e), and its derivative by the scaled product.
struct Capped {
  float value, slope;
};
DS_DEVICE Capped capped(const Terms& t, float product) {
  const float x = product * t.cap_scale, e = fast_exp2(-2 * kLog2E * std::fabs(x)), r = fast_rcp(1 + e);
  const float tanh = (1 - e) * r;  // of |x|; its error is that of 1, which is what matters relative to the cap
  return {t.cap2 * (x < 0 ? -tanh : tanh), 4 * e * r * r};
}

// A call by rows (RowPlan).
struct RowCall {
  AttentionSequences sequences{};
  int pack = 1, parts = 1, tiles = 0;  // tiles: of each head, or group, of a sample; at most
  bool split = false;
  float* sums = nullptr;                               // [B, T, H, parts if split, else 1] rows of sums
  const float *k_scale = nullptr, *v_scale = nullptr;  // if keys and values are codes

  // The sums of row `number` of [B, T, H].
  DS_DEVICE float* sums_of(i64 number, int part, int Dv) const {
    return sums + (number * (split ? parts : 1) + part) * RowPlan::row_floats(Dv);
  }
};

template <class E>
struct ForwardArgs {
  Problem<E> problem;
  Heads<E> o;
  Statistics<float> lse;
  bool general;
  Layout layout;
  RowCall rows{};
};
// stats [B, H, padded rows]: {lse * log2(e), rowsum(dO * O)}, {inf, 0} for the padding.
template <class E>
struct BackwardArgs {
  Problem<E> problem;
  Heads<const E> dout;
  Heads<E> dq, dk, dv;
  const float2* stats;
  i64 stats_rows;
  bool general;
  Layout queries, keys;  // by owner
};

template <class E>
Problem<E> problem_of(const TensorView& q, const TensorView& k, const TensorView& v,
                      const AttentionParams& p) noexcept {
  const int B = static_cast<int>(q.dim(0)), H = static_cast<int>(q.dim(2)), G = static_cast<int>(k.dim(2));
  const Mask mask = Mask::of(q.dim(1), k.dim(1), p);
  return {.q = Heads<const E>::of(q),
          .k = Heads<const E>::of(k),
          .v = Heads<const E>::of(v),
          .mask = mask,
          .B = B,
          .H = H,
          .G = G,
          .R = G > 0 ? H / G : 1,
          .D = static_cast<int>(q.dim(3)),
          .Dv = static_cast<int>(v.dim(3)),
          .scale = p.scale,
          .scale2 = p.scale * kLog2E,
          .dropout = Dropout::of(p, H, q.dim(1), k.dim(1)),
          .terms = Terms::of(p),
          .places = Places::of(B, mask, p)};
}

// fp32: attention_fp32.cu.
void forward_fp32(const ForwardArgs<float>& a, cudaStream_t stream) noexcept;
// By rows: attention_rows.cu, and for fp32 attention_fp32.cu.
void forward_rows_fp32(ForwardArgs<float> a, cudaStream_t stream) noexcept;
template <class E>
void forward_rows(ForwardArgs<E> a, cudaStream_t stream) noexcept;
template <class E>
void merge_rows(const ForwardArgs<E>& a, cudaStream_t stream) noexcept;
void backward_fp32(const BackwardArgs<float>& a, cudaStream_t stream) noexcept;

// A grid of `tiles` x `heads` blocks in x.
inline dim3 grid_of(i64 tiles, i64 heads) noexcept { return dim3(static_cast<unsigned>(tiles * heads)); }
inline i64 num_tiles(i64 n, i64 size) noexcept { return (n + size - 1) / size; }

// Loads eight elements of a row from column d on, one by one; zeros if the row is `limit` or more, and from column D
// on.
template <class E>
DS_DEVICE void copy_elements(E* to, const Head<const E>& x, int row, int limit, int d, int D) {
  u32 words[4];
  DS_UNROLL
  for (int w = 0; w < 4; ++w, d += 2) {
    const E* const from = x.data + row * x.token + d;
    const u32 low = row < limit && d < D ? from[0].bits : 0u;
    const u32 high = row < limit && d + 1 < D ? from[1].bits : 0u;
    words[w] = low | high << 16;
  }
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

// Loads rows [first, first + kRows) of a head as a tile, with zeros from row `limit` and from column D on. It has
// arrived after copies_wait and a barrier.
template <int kD, int kRows, int kThreads, class E>
DS_DEVICE void load_tile(E* tile, const Head<const E>& x, int first, int limit, int D) {
  constexpr int kChunks = kD / 8, kPasses = kRows * kChunks / kThreads;
  static_assert(kRows * kChunks % kThreads == 0);
  if (x.whole_chunks) {
    // If a pass consists of whole rows, a thread keeps its chunk and advances by a constant.
    constexpr bool kStraight = kThreads % kChunks == 0;
    const unsigned thread = static_cast<unsigned>(thread_index());
    const E* from = x.data + (first + static_cast<int>(thread / kChunks)) * x.token + thread % kChunks * 8;
    DS_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      const unsigned i = thread + static_cast<unsigned>(pass * kThreads);
      const int row =
          static_cast<int>(kStraight ? thread / kChunks : i / kChunks) + (kStraight ? pass * (kThreads / kChunks) : 0);
      const int chunk = static_cast<int>(kStraight ? thread % kChunks : i % kChunks);
      if constexpr (!kStraight) from = x.data + (first + row) * x.token + chunk * 8;
      copy_async_16(tile + swizzled<kD>(row, chunk), from, first + row < limit && chunk * 8 < D);
      if constexpr (kStraight) from += kThreads / kChunks * x.token;
    }
    return;
  }
  DS_NO_UNROLL
  for (int i = thread_index(); i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    copy_elements(tile + swizzled<kD>(row, chunk), x, first + row, limit, chunk * 8, D);
  }
}
// The same for tokens in groups of 16: [first(i), first(i) + 16) become rows 16*i, ... of the tile. They are adjacent
// from row row_of(first(i)) of the head on.
template <int kD, int kRows, int kThreads, class E, class First, class RowOf>
DS_DEVICE void gather_tile(E* tile, const Head<const E>& x, First&& first, RowOf&& row_of, int limit, int D) {
  constexpr int kChunks = kD / 8, kPasses = kRows * kChunks / kThreads;
  static_assert(kRows * kChunks % kThreads == 0);
  if (x.whole_chunks) {
    // If a pass consists of whole rows, a thread keeps its chunk, and its slot is known from the pass.
    constexpr bool kStraight = kThreads % kChunks == 0;
    constexpr int kPass = kThreads / kChunks, kDown = kPass < 16 ? kPass : 16;  // rows
    static_assert(!kStraight || 16 % kDown == 0);
    const unsigned thread = static_cast<unsigned>(thread_index());
    DS_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      const unsigned i = thread + static_cast<unsigned>(pass * kThreads);
      int slot = static_cast<int>(i / kChunks / 16), down = static_cast<int>(i / kChunks % 16);
      if constexpr (kStraight) {
        slot = pass * kPass / 16 + static_cast<int>(kPass > 16 ? thread / kChunks / 16 : 0u);
        down = pass * kPass % 16 + static_cast<int>(thread / kChunks % kDown);
      }
      const int chunk = static_cast<int>(kStraight ? thread % kChunks : i % kChunks), token = first(slot);
      copy_async_16(tile + swizzled<kD>(16 * slot + down, chunk), x.data + (row_of(token) + down) * x.token + chunk * 8,
                    token + down < limit && chunk * 8 < D);
    }
    return;
  }
  DS_NO_UNROLL
  for (int i = thread_index(); i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const int token = first(row / 16), down = row % 16, at = row_of(token);
    copy_elements(tile + swizzled<kD>(row, chunk), x, at + down, at + limit - token, chunk * 8, D);
  }
}

// A lane's addresses in a tile for load_matrices. Its 16 x 16 block starts at (row, 2*pair chunks), row a multiple
// of 16.
template <int kD, class E>
class Blocks {
 public:
  // The matrices in the order: upper left, lower left, upper right, lower right (kAcross: upper right second).
  template <bool kAcross>
  static DS_DEVICE Blocks of(const E* tile) {
    const int lane = thread_index() % kWarp;
    const int row = kAcross ? lane % 8 + lane / 16 * 8 : lane % 16;
    const int right = kAcross ? lane / 8 % 2 : lane / 16;
    return Blocks(tile + row * kD, right ^ swizzle_of<kD>(row));
  }
  DS_DEVICE const E* at(int row, int pair) const { return row_ + row * kD + (((2 * pair) ^ flip_) << 3); }

 private:
  DS_DEVICE Blocks(const E* row, int flip) : row_(row), flip_(flip) {}
  const E* row_;
  int flip_;
};

// The slots of 16 tokens in a step that a warp needs.
struct AllSlots {
  bool some = true;

  DS_DEVICE bool any() const { return some; }
  DS_DEVICE constexpr bool all() const { return true; }
  DS_DEVICE constexpr bool has(int) const { return true; }
};
template <int kCount>
struct SomeSlots {
  u32 bits;

  DS_DEVICE bool any() const { return bits != 0; }
  DS_DEVICE bool all() const { return bits == (1u << kCount) - 1; }
  DS_DEVICE bool has(int slot) const { return (bits >> slot & 1u) != 0; }
};

// x += a b^T: `left(m, k, fragment)` provides fragments [16, 16] of a, row tile m, columns 16*k; b is a tile [8*kN,
// kD]. kHeld: the fragments are registers, so k must be a constant; else a few iterations at a time leave more
// registers. Slots of b that are not needed are skipped.
template <int kD, bool kHeld, int kM, int kN, class E, class Left, class Slots = AllSlots>
DS_DEVICE void multiply_transposed(float (&x)[kM][kN][4], Left&& left, const E* b, const Slots& slots = {}) {
  const auto blocks = Blocks<kD, E>::template of<true>(b);
  [[maybe_unused]] constexpr int kUnroll = kHeld ? kD / 16 : 4;
  if (!slots.all()) {
    DS_UNROLL
    for (int n = 0; n < kN; n += 2) {
      if (!slots.has(n / 2)) continue;
      DS_UNROLL_BY(kUnroll)
      for (int k = 0; k < kD / 16; ++k) {
        u32 r[4];
        load_matrices(r, blocks.at(8 * n, k));
        const u32 b0[2] = {r[0], r[1]}, b1[2] = {r[2], r[3]};
        DS_UNROLL
        for (int m = 0; m < kM; ++m) {
          u32 a[4];
          left(m, k, a);
          mma_16x8x16<E>(x[m][n], a, b0);
          mma_16x8x16<E>(x[m][n + 1], a, b1);
        }
      }
    }
    return;
  }
  DS_UNROLL_BY(kUnroll)
  for (int k = 0; k < kD / 16; ++k) {
    u32 a[kM][4];
    DS_UNROLL
    for (int m = 0; m < kM; ++m) left(m, k, a[m]);
    DS_UNROLL
    for (int n = 0; n < kN; n += 2) {
      u32 r[4];
      load_matrices(r, blocks.at(8 * n, k));
      const u32 b0[2] = {r[0], r[1]}, b1[2] = {r[2], r[3]};
      DS_UNROLL
      for (int m = 0; m < kM; ++m) {
        mma_16x8x16<E>(x[m][n], a[m], b0);
        mma_16x8x16<E>(x[m][n + 1], a[m], b1);
      }
    }
  }
}

// x += a b: a [16, 16*kK] packed; b a tile [16*kK, kD], of which columns [8*first, 8*(first + kN)) are used. a is zero
// for slots that are not needed.
template <int kD, int kM, int kN, int kK, class E, class Slots = AllSlots>
DS_DEVICE void multiply(float (&x)[kM][kN][4], const u32 (&a)[kM][kK][4], const E* b, int first = 0,
                        const Slots& slots = {}) {
  const auto blocks = Blocks<kD, E>::template of<false>(b);
  DS_UNROLL
  for (int k = 0; k < kK; ++k) {
    if (!slots.has(k)) continue;
    DS_UNROLL
    for (int n = 0; n < kN; n += 2) {
      u32 r[4];
      load_matrices_transposed(r, blocks.at(16 * k, (first + n) / 2));
      const u32 b0[2] = {r[0], r[1]}, b1[2] = {r[2], r[3]};
      DS_UNROLL
      for (int m = 0; m < kM; ++m) {
        mma_16x8x16<E>(x[m][n], a[m][k], b0);
        mma_16x8x16<E>(x[m][n + 1], a[m][k], b1);
      }
    }
  }
}

// Accumulators, rounded, as the left operand.
template <class E, int kN>
DS_DEVICE void pack(u32 (&a)[kN / 2][4], const float (&x)[kN][4]) {
  DS_UNROLL
  for (int n = 0; n < kN; ++n) {
    a[n / 2][n % 2 * 2] = pack2<E>(x[n][0], x[n][1]);
    a[n / 2][n % 2 * 2 + 1] = pack2<E>(x[n][2], x[n][3]);
  }
}

template <int kN>
DS_DEVICE void clear(float (&x)[kN][4]) {
  DS_UNROLL
  for (int n = 0; n < kN; ++n) {
    DS_UNROLL
    for (int e = 0; e < 4; ++e) x[n][e] = 0;
  }
}

// Turns a warp's products into scores times log2(e) if there are further terms: distance(n, e) is the distance of
// element e of accumulator n; slope(n, e, x) receives the derivative under a soft cap.
template <int kN, class E, class Distance, class Slope>
DS_DEVICE void make_scores(float (&s)[kN][4], const Problem<E>& p, const float* bias, Distance&& distance,
                           Slope&& slope) {
  if (p.terms.capped()) {
    DS_UNROLL
    for (int n = 0; n < kN; ++n) {
      DS_UNROLL
      for (int e = 0; e < 4; ++e) {
        const Capped c = capped(p.terms, s[n][e]);
        s[n][e] = c.value;
        slope(n, e, c.slope);
      }
    }
  } else {
    DS_UNROLL
    for (int n = 0; n < kN; ++n) {
      DS_UNROLL
      for (int e = 0; e < 4; ++e) s[n][e] *= p.scale2;
    }
  }
  if (bias == nullptr) return;
  DS_UNROLL
  for (int n = 0; n < kN; ++n) {
    DS_UNROLL
    for (int e = 0; e < 4; ++e) s[n][e] += kLog2E * bias[p.terms.within_reach(distance(n, e))];
  }
}

// Which elements are kept; bit i of four: element 4*block + i.
DS_DEVICE u32 kept4(const Dropout& d, u64 block) {
  const PhiloxBlock r = d.key.block(block);
  return (r[0] >> 8 >= d.least ? 1u : 0u) | (r[1] >> 8 >= d.least ? 2u : 0u) | (r[2] >> 8 >= d.least ? 4u : 0u) |
         (r[3] >> 8 >= d.least ? 8u : 0u);
}
DS_DEVICE u32 kept(const Dropout& d, u64 element) { return kept4(d, element / 4) >> (element % 4) & 1u; }

// Bit 4*n + e of the result: element e of this lane's accumulator n is kept. `first` is the number of the warp's first
// row and key; the key is a multiple of four. If blocks of four numbers start there, lanes that need parts of the same
// block share it. All lanes of a warp must call this.
template <int kN>
DS_DEVICE u32 kept_by_row(const Dropout& d, u64 first) {  // accumulators [16 rows, 8*kN keys]
  const u64 cols = static_cast<u64>(d.grid.cols);
  const int lane = thread_index() % kWarp, r = lane / 4, c = lane % 4;
  u32 bits = 0;
  if (d.whole_blocks) {
    // Two lanes have the same four keys: one draws for the upper row, the other for the lower.
    const u64 block = (first + static_cast<u64>(r + 8 * (c % 2)) * cols) / 4 + static_cast<u64>(c / 2);
    DS_NO_UNROLL
    for (int n = 0; n < kN; ++n) bits |= kept4(d, block + static_cast<u64>(2 * n)) << (4 * n);
    const u32 other = warp_shuffle_xor(bits, 1);
    const u32 upper = (c % 2 == 0 ? bits : other) >> (2 * (c % 2));
    const u32 lower = (c % 2 == 0 ? other : bits) >> (2 * (c % 2));
    return (upper & 0x33333333u) | (lower & 0x33333333u) << 2;
  }
  DS_NO_UNROLL
  for (int i = 0; i < 4 * kN; ++i) {
    const u64 at = first + static_cast<u64>(r + i % 4 / 2 * 8) * cols + static_cast<u64>(i / 4 * 8 + 2 * c + i % 2);
    bits |= kept(d, at) << i;
  }
  return bits;
}
template <int kN>
DS_DEVICE u32 kept_by_key(const Dropout& d, u64 first) {  // accumulators [16 keys, 8*kN rows]
  const u64 cols = static_cast<u64>(d.grid.cols);
  const int lane = thread_index() % kWarp, r = lane / 4, c = lane % 4;
  u32 bits = 0;
  if (d.whole_blocks) {
    // Four lanes have the same four keys of four elements: each draws for one element.
    const int e = r % 4;
    const u64 block = (first + static_cast<u64>(2 * c + e % 2) * cols) / 4 + static_cast<u64>(r / 4 + e / 2 * 2);
    DS_NO_UNROLL
    for (int n = 0; n < kN; ++n) bits |= kept4(d, block + static_cast<u64>(n) * 2 * cols) << (4 * n);
    u32 mine = 0;
    DS_UNROLL
    for (int i = 0; i < 4; ++i) mine |= (warp_shuffle(bits, lane / 16 * 16 + 4 * i + c) >> e & 0x11111111u) << i;
    return mine;
  }
  DS_NO_UNROLL
  for (int i = 0; i < 4 * kN; ++i) {
    const u64 at = first + static_cast<u64>(i / 4 * 8 + 2 * c + i % 2) * cols + static_cast<u64>(r + i % 4 / 2 * 8);
    bits |= kept(d, at) << i;
  }
  return bits;
}

// The same for a step in slots of 16 tokens; `first(slot)` is the number of the warp's first row and the slot's first
// key (or of the slot's first row and the warp's first key).
template <bool kByRow, int kSlots, class Slots, class First>
DS_DEVICE u32 kept_by_slot(const Dropout& d, const Slots& slots, First&& first) {
  if constexpr (std::is_same_v<Slots, AllSlots>) {
    return kByRow ? kept_by_row<2 * kSlots>(d, first(0)) : kept_by_key<2 * kSlots>(d, first(0));
  }
  u32 bits = 0;
  DS_NO_UNROLL
  for (int i = 0; i < kSlots; ++i) {
    if (slots.has(i)) bits |= (kByRow ? kept_by_row<2>(d, first(i)) : kept_by_key<2>(d, first(i))) << (8 * i);
  }
  return bits;
}

// Writes a warp's accumulators [16, 8*kN] as rows [row, row + 16) below `limit` of `to`, a Head or PackedRows, columns
// from `column` below D.
// `tile`: 16 rows of a tile that no other thread uses; stores 16 bytes at a time.
template <int kD, int kN, class E, class To>
DS_DEVICE void store_rows(E* tile, const float (&x)[kN][4], const To& to, int row, int limit, int column, int D) {
  const int lane = thread_index() % kWarp;
  sync_warp();
  DS_UNROLL
  for (int n = 0; n < kN; ++n) {
    DS_UNROLL
    for (int half = 0; half < 2; ++half) {
      E* const at = tile + swizzled<kD>(lane / 4 + 8 * half, n) + lane % 4 * 2;
      *reinterpret_cast<u32*>(at) = pack2<E>(x[n][2 * half], x[n][2 * half + 1]);
    }
  }
  sync_warp();
  DS_NO_UNROLL
  for (int i = lane; i < 16 * kN; i += kWarp) {
    const int r = i / kN, chunk = i % kN, d = column + 8 * chunk;
    if (row + r >= limit || d >= D) continue;
    const uint4 raw = *reinterpret_cast<const uint4*>(tile + swizzled<kD>(r, chunk));
    E* const at = to.at(row + r) + d;
    if (to.whole_chunks) {
      *reinterpret_cast<uint4*>(at) = raw;
      continue;
    }
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
    DS_UNROLL
    for (int j = 0; j < 8; ++j) {
      if (d + j < D) at[j].bits = static_cast<u16>(words[j / 2] >> (j % 2 * 16));
    }
  }
  sync_warp();
}

// The head dim for which a kernel is chosen: its tiles have room for keys and for values.
template <class E>
i64 widest_head(const Problem<E>& p) noexcept {
  return std::max(p.D, p.Dv);
}

// Calls f(std::integral_constant<int, kD>) for the smallest kD of the list that is at least D.
template <int kFirst, int... kRest, class F>
void with_head_dim(i64 D, F&& f) noexcept {
  if constexpr (sizeof...(kRest) == 0) {
    f(std::integral_constant<int, kFirst>());
  } else {
    if (D <= kFirst) return f(std::integral_constant<int, kFirst>());
    with_head_dim<kRest...>(D, f);
  }
}

template <class F>
void with_general(bool general, F&& f) noexcept {
  if (general) return f(std::true_type());
  f(std::false_type());
}

}  // namespace ds::cuda::attention
