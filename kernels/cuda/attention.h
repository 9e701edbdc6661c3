// SPDX-License-Identifier: Apache-2.0
#pragma once
// The index arithmetic of attention, for host and device: which tokens see each other, which tiles meet, how work is
// divided, and the layout of shared memory.
//
// A block owns `own` rows of queries (forward, dq) or keys (dk and dv), 16 or 32 per warp, and processes the other side
// in steps of `step` rows, double-buffered. Tiles in shared memory are rows of kD 16-bit elements in chunks of 16
// bytes, where kD is the head dim rounded up. Chunks are permuted within their row so that eight rows of one chunk,
// which the tensor core loads at once, cover all 32 banks.

#include <algorithm>
#include <limits>

#include "ds/kernels/ops.h"

namespace ds::cuda::attention {

struct Range {
  int begin = 0, end = 0;

  DS_HOST_DEVICE constexpr bool empty() const { return begin >= end; }
  DS_HOST_DEVICE constexpr bool has(int x) const { return x >= begin && x < end; }
};
DS_HOST_DEVICE constexpr Range intersect(Range a, Range b) {
  return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}
DS_HOST_DEVICE constexpr bool meets(Range a, Range b) { return !intersect(a, b).empty(); }

// The part of the other side that one or more tokens see: `all` except `hidden`, the keys between sinks and window.
struct Seen {
  Range all, hidden;

  constexpr Seen() = default;
  DS_HOST_DEVICE constexpr Seen(Range some, Range none = {}) : all(some), hidden(none) {}
  DS_HOST_DEVICE constexpr bool has(int x) const { return all.has(x) && !hidden.has(x); }
};
DS_HOST_DEVICE constexpr bool meets(const Seen& a, Range b) {
  const Range both = intersect(a.all, b);
  return !both.empty() && (both.begin < a.hidden.begin || both.end > a.hidden.end);
}

// Key j is visible to query i iff (not causal or j <= i + S - T) and (no window or j > i + S - T - window).
// T, S < 2^30. Both functions of one row are monotonic, which those of ranges use.
struct Mask {
  int T = 0, S = 0;
  bool causal = false;
  int window = 0;  // in 1 .. S-1; 0: none

  static constexpr Mask of(i64 T, i64 S, const AttentionParams& p) {
    const bool limited = p.window > 0 && p.window < S;  // a longer window hides no existing key
    return {static_cast<int>(T), static_cast<int>(S), p.causal, limited ? static_cast<int>(p.window) : 0};
  }

  DS_HOST_DEVICE constexpr Range keys_of_row(int i) const {
    const int position = i + S - T;
    const int begin = window > 0 && position - window + 1 > 0 ? position - window + 1 : 0;
    const int end = causal && position + 1 < S ? position + 1 : S;
    return {begin, end > 0 ? end : 0};
  }
  DS_HOST_DEVICE constexpr Range rows_of_key(int j) const {
    if (j >= S) return {};
    const int i = j - (S - T);
    const int begin = causal && i > 0 ? i : 0;
    const int end = window > 0 && i + window < T ? i + window : T;
    return {begin, end > 0 ? end : 0};
  }
  // The tokens that any of a nonempty range sees, or is seen by; rows beyond T and keys beyond S do not count.
  DS_HOST_DEVICE constexpr Range keys_of_rows(Range rows) const {
    rows.end = rows.end < T ? rows.end : T;
    if (rows.empty()) return {};
    return {keys_of_row(rows.begin).begin, keys_of_row(rows.end - 1).end};
  }
  DS_HOST_DEVICE constexpr Range rows_of_keys(Range keys) const {
    keys.end = keys.end < S ? keys.end : S;
    if (keys.empty()) return {};
    return {rows_of_key(keys.begin).begin, rows_of_key(keys.end - 1).end};
  }
  DS_HOST_DEVICE constexpr bool has_sinks() const { return false; }
  // True if all of these rows (below T) see all of these keys, and the keys exist.
  DS_HOST_DEVICE constexpr bool all_visible(Range rows, Range keys) const {
    const int last = (rows.end < T ? rows.end : T) - 1;
    return keys_of_row(rows.begin).end >= keys.end && keys_of_row(last).begin <= keys.begin;
  }
};

// Positions of a call's tokens in their sequences, and the sinks and documents there.
struct Places {
  const i32* documents = nullptr;  // AttentionParams::documents
  i64 positions = 0, samples = 0;
  int query0 = 0, key0 = 0;
  int sinks = 0;  // 0 also without a window

  static constexpr Places of(i64 B, const Mask& mask, const AttentionParams& p) {
    return {.documents = p.documents,
            .positions = p.positions,
            .samples = B,
            .query0 = static_cast<int>(p.grid.row0),
            .key0 = static_cast<int>(p.grid.col0),
            .sinks = mask.window == 0 ? 0 : static_cast<int>(std::min(p.sinks, i64{1} << 30))};
  }
  // The positions of the document at a position; the whole sequence without documents.
  DS_HOST_DEVICE constexpr Range document(int b, int place) const {
    if (documents == nullptr) return {0, std::numeric_limits<int>::max()};
    const i32* const at = documents + b * positions + place;
    return {at[0], at[samples * positions]};
  }
};

// The mask of a sample, including its sinks and documents.
struct SampleMask : Mask {
  const Places& places;
  int b;

  DS_HOST_DEVICE constexpr SampleMask(const Mask& mask, const Places& p, int sample)
      : Mask(mask), places(p), b(sample) {}

  DS_HOST_DEVICE constexpr Seen keys_of_row(int i) const { return keys_of_rows({i, i + 1}); }
  DS_HOST_DEVICE constexpr Range rows_of_key(int j) const { return rows_of_keys({j, j + 1}); }
  DS_HOST_DEVICE constexpr bool has_sinks() const { return places.sinks > 0; }
  // Tokens that see, or are seen by, a token of the other side, including gaps.
  DS_HOST_DEVICE constexpr Seen keys_of_rows(Range rows) const {
    rows.end = rows.end < T ? rows.end : T;
    if (rows.empty()) return {};
    const Range first = keys_of_document(rows.begin), last = keys_of_document(rows.end - 1);
    const Range seen = intersect(Mask::keys_of_rows(rows), {first.begin, last.end});
    if (places.sinks == 0) return seen;
    // Relative to the first row's document. Later documents begin within the rows, so keys hidden from all rows are
    // before them.
    const bool one = first.begin == last.begin;
    return {{first.begin > 0 ? first.begin : 0, seen.end},
            {first.begin + places.sinks, one || seen.begin < first.end ? seen.begin : first.end}};
  }
  DS_HOST_DEVICE constexpr Range rows_of_keys(Range keys) const {
    keys.end = keys.end < S ? keys.end : S;
    if (keys.empty()) return {};
    const int first = places.key0 + keys.begin, last = places.key0 + keys.end - 1;
    const Range document = places.document(b, last);
    Range seen = Mask::rows_of_keys(keys);
    // If one of the keys is a sink of the last one's document, all rows of that document from it on see it.
    if (places.sinks > 0 && first - document.begin < places.sinks) seen.end = T;
    return intersect(seen, {places.document(b, first).begin - places.query0, document.end - places.query0});
  }
  // False also where rows see keys only because they are sinks.
  DS_HOST_DEVICE constexpr bool all_visible(Range rows, Range keys) const {
    if (!Mask::all_visible(rows, keys)) return false;
    const int last = (rows.end < T ? rows.end : T) - 1;
    return keys_of_document(rows.begin).end >= keys.end && keys_of_document(last).begin <= keys.begin;
  }

 private:
  DS_HOST_DEVICE constexpr Range keys_of_document(int row) const {
    const Range document = places.document(b, places.query0 + row);
    return {document.begin - places.key0, document.end - places.key0};
  }
};

// The tiles that a tile meets, in order: those that the mask leaves. With a layout see attention_steps.h.
struct Visits {
  int first = 0, count = 0;

  DS_HOST_DEVICE constexpr int tile(int n) const { return first + n; }
};
DS_HOST_DEVICE constexpr Visits visits(Range seen, int step) {
  if (seen.empty()) return {};
  const int first = seen.begin / step;
  return {first, (seen.end + step - 1) / step - first};
}

// A block-sparse layout (AttentionBlocks) from the viewpoint of the owner of tokens on one side, which meets those of
// the other. Met tokens come in units: a block, or as much of it as fits a step. Units count from the beginning of the
// sequence; without a layout, from the call's first token, with all blocks (of 128 tokens) present.
struct Layout {
  const u64* bits = nullptr;   // of own blocks, in the layout of the call's first head; null: no layout
  i64 words = 0;               // per own block
  i64 next_head = 0;           // words between the layouts of consecutive heads
  int shift = 0;               // a block has 2^shift tokens
  int own0 = 0, met0 = 0;      // positions of the call's first tokens
  const i32* pages = nullptr;  // AttentionParams::pages, of the met side
  int page_shift = 0;          // a page has 2^page_shift tokens
  bool aligned = false;        // a token's place in its step depends on nothing else; else steps have no gaps

  static constexpr Layout of(const AttentionParams& p, bool keys_own) {
    const AttentionBlocks& b = p.blocks;
    const i32* const pages = keys_own ? nullptr : p.pages;
    const int page_shift = pages == nullptr ? 0 : log2(static_cast<int>(p.page));
    if (!b.sparse()) return {.shift = 7, .pages = pages, .page_shift = page_shift};
    const i64 next_head = b.layouts == 1 ? 0 : b.count * b.words();
    const u64* const bits = keys_own ? b.queries : b.keys;
    return {.bits = bits == nullptr ? bits : bits + p.grid.head0 * next_head,
            .words = b.words(),
            .next_head = next_head,
            .shift = log2(static_cast<int>(b.block)),
            .own0 = static_cast<int>(keys_own ? p.grid.col0 : p.grid.row0),
            .met0 = static_cast<int>(keys_own ? p.grid.row0 : p.grid.col0),
            .pages = pages,
            .page_shift = page_shift};
  }
  DS_HOST_DEVICE constexpr int row_of(int token) const {
    return pages == nullptr ? token : (pages[token >> page_shift] << page_shift) + token % (1 << page_shift);
  }

  // For the block of an own token: its beginning, from the beginning of the sequence; and its bits.
  DS_HOST_DEVICE constexpr int block_begin(int own) const { return (own0 + own) >> shift << shift; }
  DS_HOST_DEVICE constexpr const u64* bits_of(int head, int own) const {
    return bits + head * next_head + ((own0 + own) >> shift) * words;
  }
  // A unit has 2^unit_shift tokens.
  DS_HOST_DEVICE constexpr int unit_shift(int step) const { return shift < log2(step) ? shift : log2(step); }
  // The units of the steps without a layout that contain some of the tokens `seen`, up to the last of them.
  DS_HOST_DEVICE constexpr Range units(Range seen, int step) const {
    if (seen.empty()) return {};
    const int unit = 1 << unit_shift(step);
    return {(met0 + seen.begin / step * step) / unit, (met0 + seen.end + unit - 1) / unit};
  }
  // Those of the steps without a layout that contain only tokens of a range.
  DS_HOST_DEVICE constexpr Range units_within(Range tokens, int step) const {
    const int first = tokens.begin > 0 ? (tokens.begin + step - 1) / step : 0, end = tokens.end / step;
    if (first >= end) return {};
    const int unit = 1 << unit_shift(step);
    return {(met0 + first * step) / unit, (met0 + end * step) / unit};
  }

 private:
  DS_HOST_DEVICE static constexpr int log2(int x) {
    int n = 0;
    while (x >> (n + 1) != 0) ++n;
    return n;
  }
};

// The tile and head that a block works on. Tiles with most work start first (if causal, the last rows and the first
// keys), and heads are neighbours, since those of a group share keys and values.
struct Work {
  int tile = 0, head = 0;  // head: index among `heads`, including batches
};
DS_HOST_DEVICE constexpr Work work_of(unsigned block, int tiles, int heads, bool last_first) {
  const int tile = static_cast<int>(block / static_cast<unsigned>(heads));
  return {last_first ? tiles - 1 - tile : tile, static_cast<int>(block % static_cast<unsigned>(heads))};
}

// Shapes of the blocks for 16-bit elements; kD is a multiple of 32, at most 256.
template <int kD>
struct ForwardPlan {
  // Tiles of 16 rows per warp: they share the data read from shared memory.
  static constexpr int kRowTiles = kD <= 64 ? 2 : 1;
  static constexpr int kWarps = kD <= 64 || kD > 128 ? 4 : 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kOwn = 16 * kRowTiles * kWarps;
  static constexpr int kStep = kD <= 128 ? 64 : 32;
  static constexpr bool kHold = kD <= 128;  // the own tile's fragments stay in registers
};
template <int kD>
struct BackwardPlan {
  static constexpr int kWarps = kD <= 128 ? 8 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kOwn = 16 * kWarps;
  static constexpr int kStep = kD <= 128 ? 64 : 32;
  // Rows of a step processed together: as many as the registers left by dk and dv allow.
  static constexpr int kPart = kD <= 64 ? 64 : 32;
  static constexpr bool kHold = kD <= 64;
  // Columns of dk and dv per block: the accumulators of both must fit in registers. Wider heads take two blocks, each
  // of which computes all scores.
  static constexpr int kColumns = kD <= 128 ? kD : kD / 2;
};
// Rows per head of the backward pass's statistics: no tile extends beyond.
constexpr i64 padded_rows(i64 T) { return (T + 127) / 128 * 128; }

// Offset in elements of chunk `chunk` of row `row` in a tile.
template <int kD>
DS_HOST_DEVICE constexpr int swizzle_of(int row) {
  static_assert(kD % 32 == 0);
  return kD / 8 % 8 == 0 ? row % 8 : row / 2 % 4;
}
template <int kD>
DS_HOST_DEVICE constexpr int swizzled(int row, int chunk) {
  return row * kD + ((chunk ^ swizzle_of<kD>(row)) << 3);
}

// True without a layout, or if its block size is supported.
inline bool has_known_block(const AttentionParams& p) noexcept {
  const i64 block = p.blocks.block;
  return block == 0 || block == 16 || block == 32 || block == 64 || block == 128;
}
// The same for keys in pages.
inline bool has_known_page(const AttentionParams& p) noexcept {
  const bool known = p.page == 16 || p.page == 32 || p.page == 64 || p.page == 128;
  return p.pages == nullptr || (known && p.page >= (p.blocks.sparse() ? p.blocks.block : 64));
}

// True if a call needs more than the plain kernels support: a layout, pages, or further terms of scores and masks.
inline bool is_general(const AttentionParams& p) noexcept {
  return p.blocks.sparse() || p.softcap > 0 || p.bias != nullptr || p.documents != nullptr ||
         (p.sinks > 0 && p.window > 0) || p.pages != nullptr;
}

// True for calls by the kernels in which a row's bits depend on its own sequence alone (attention_rows.h).
inline bool is_by_row(const AttentionParams& p, const TensorView& k) noexcept {
  return p.rowwise || p.sequences || k.dtype == DType::I8;
}
// Keys of a part that has sums of its own.
inline constexpr int kPartKeys = 1024;
// How such a call is computed: a function of its shapes.
struct RowPlan {
  i64 pack = 1;        // heads of a group whose rows are in one tile
  i64 parts = 1;       // of keys
  bool split = false;  // a block computes one part of its keys; else all
  i64 sums = 0;        // rows of sums in memory

  // Blocks that keep a GPU busy, and the most rows of sums that are stored to have more.
  static constexpr i64 kEnoughBlocks = 256, kMostSums = 1 << 16;
  static RowPlan of(const TensorView& q, const TensorView& k, const AttentionParams& p) noexcept {
    const i64 H = q.dim(2), G = k.dim(2), rows = q.dim(0) * q.dim(1) * H;
    const bool by_head = p.bias != nullptr || p.dropout > 0 || (p.blocks.sparse() && p.blocks.layouts != 1);
    RowPlan plan = {.pack = by_head || G == 0 ? 1 : H / G, .parts = std::max<i64>(1, (k.dim(1) - 1) / kPartKeys + 1)};
    const i64 blocks = q.dim(0) * std::max<i64>(1, p.sequences.count) * H / plan.pack;
    plan.split = plan.parts > 1 && blocks < kEnoughBlocks && rows * plan.parts <= kMostSums;
    plan.sums = plan.parts == 1 ? 0 : plan.split ? rows * plan.parts : rows;
    return plan;
  }
  // Floats of a row of sums: results, maximum and sum.
  DS_HOST_DEVICE static constexpr i64 row_floats(i64 Dv) noexcept { return (Dv + 1) / 2 * 2 + 2; }
};

// True if the vectors of x can be accessed 16 bytes at a time (codes: 8 bytes).
inline bool has_whole_chunks(const TensorView& x) noexcept {
  const i64 chunk = x.dtype == DType::I8 ? 8 : 16 / dtype_bytes(x.dtype);
  if (reinterpret_cast<std::uintptr_t>(x.data) % 16 != 0 || x.dim(3) % chunk != 0) return false;
  for (int d = 0; d < 3; ++d) {
    if (x.dim(d) > 1 && x.stride[d] % chunk != 0) return false;
  }
  return true;
}

}  // namespace ds::cuda::attention
