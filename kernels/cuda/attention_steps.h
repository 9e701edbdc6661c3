// SPDX-License-Identifier: Apache-2.0
#pragma once
// The steps in which a thread block processes the other side, kStep tokens at a time, in slots of 16. Without a layout
// a step is a tile of adjacent tokens, and the steps are all tiles that the mask leaves. With a block-sparse layout a
// step is gathered from units (a block, or as much of it as fits a step): those that some block of the own tile meets,
// in ascending order, then zeros. The cost is therefore that of the present blocks; and if all are present, the steps,
// and the bits of results, are those without a layout. Steps that contain only keys between sinks and window are
// skipped. Steps of rows whose bits must not depend on other rows are those without a layout, of which those that no
// own block meets are skipped (Layout::aligned). These kernels also support all further terms of AttentionParams; calls
// with such terms but without a layout use a full one.
//
// The first warp finds units two steps ahead: it reads the bits of the own tile's blocks, 32 units at a time, or 32
// times as many where there are none. It stores them in a ring in shared memory, whose size does not depend on the
// layout.

#include <bit>

#include "cuda/attention_tile.h"

namespace ds::cuda::attention {

// The tokens `own` of a thread block, all of which exist, see the tokens `seen` of the other side, in each of `heads`
// heads of the call, from `head` on, one head after the other.
struct Meeting {
  Range own;
  Seen seen;
  int head = 0, heads = 1;
};

// The state of a search by layout; `search` belongs to the first warp.
struct Unit {
  int first;  // first token; kNone: no unit
  u16 own;    // bits of the own blocks that meet it
  u16 head;   // index in the group

  static constexpr int kNone = 1 << 30;  // beyond all tokens
};
struct Search {
  const u64* bits;       // of the first own block, in the layout of the first head
  i64 words, next_head;  // of the layout: stored here so that it takes no register of other threads
  int own_blocks, heads;
  Range units, hidden;          // units that may be met, and hidden ones among them
  int unit_shift, parts_shift;  // a unit has 2^unit_shift tokens, a block 2^parts_shift units
  bool aligned;
  int met0;
  // Progress: `found` units, including places that stay empty. In head `head` it has read all words of 32 units before
  // `next`, except those of the last 32 whose bits are set in `filled`, which are not empty.
  int found, head, next;
  u32 filled;
};
struct Nothing {};
struct Found {
  static constexpr int kRing = 64;  // three steps of at most four units, and 32 units more
  Unit units[kRing];
  Search search;
};

// Without a layout. kGroup: there may be several heads.
template <bool kSparse, int kStep, bool kGroup = false>
class Steps {
 public:
  using Shared = Nothing;

  DS_DEVICE Steps(Shared&, const Layout&, const Meeting& m)
      : met_(visits(m.seen.all, kStep)), count_(kGroup ? met_.count * m.heads : met_.count) {}
  // Called by all threads, first.
  DS_DEVICE void start() {}
  DS_DEVICE void pause() const {}
  // True if step n exists. This, its slots and its head are known for the first two steps, and for those that were made
  // before the last barrier.
  DS_DEVICE bool has(int n) const { return n < count_; }
  // Called by all threads, for one step after the other; no thread reads steps more than two back.
  DS_DEVICE void make(int) {}
  DS_DEVICE int head(int n) const { return kGroup ? n / met_.count : 0; }

  // The first token of a slot of step n.
  DS_DEVICE int first(int n, int slot) const { return token_of(n) + 16 * slot; }

  // For the slots [slot, slot + kCount) of step n: which ones does a warp need that sees the tokens `seen` and owns the
  // blocks `own`; does all of the warp meet all of them; `visible`: does the mask hide none of some tokens from the
  // warp?
  template <int kCount>
  DS_DEVICE AllSlots needed(int n, int slot, Range seen, u32 /*own*/) const {
    return {meets(seen, tokens<kCount>(n, slot))};
  }
  template <int kCount, class Visible>
  DS_DEVICE bool whole(AllSlots /*needed*/, int n, int slot, u32 /*own*/, Visible&& visible) const {
    return visible(tokens<kCount>(n, slot));
  }
  // True if an own block meets a slot of step n.
  DS_DEVICE constexpr bool met_by(int /*n*/, int /*slot*/, int /*own_block*/) const { return true; }

  // Loads step n of a head as a tile, with zeros for tokens from `limit` on.
  template <int kD, int kThreads, class E>
  DS_DEVICE void load(E* tile, const Head<const E>& x, int n, int limit, int D) const {
    load_tile<kD, kStep, kThreads>(tile, x, token_of(n), limit, D);
  }
  DS_DEVICE constexpr int row_of(int token) const { return token; }

  // The own block of a token; those of some tokens, as bits.
  DS_DEVICE constexpr int own_block(int) const { return 0; }
  DS_DEVICE constexpr u32 own_blocks(Range) const { return 0; }

 private:
  template <int kCount>
  DS_DEVICE Range tokens(int n, int slot) const {
    return {first(n, slot), first(n, slot) + 16 * kCount};
  }
  DS_DEVICE int token_of(int n) const { return met_.tile(kGroup ? n % met_.count : n) * kStep; }

  Visits met_;
  int count_;
};

// With a layout.
template <int kStep, bool kGroup>
class Steps<true, kStep, kGroup> {
 public:
  using Shared = Found;

  DS_DEVICE Steps(Shared& shared, const Layout& layout, const Meeting& m)
      : shared_(shared), layout_(layout), meeting_(m), own_at_(layout.own0 - layout.block_begin(m.own.begin)) {}

  DS_DEVICE void start() {
    if (thread_index() < kWarp) {
      if (thread_index() == 0) {
        const Range units = layout_.units(meeting_.seen.all, kStep);
        shared_.search = {.bits = layout_.bits_of(meeting_.head, meeting_.own.begin),
                          .words = layout_.words,
                          .next_head = layout_.next_head,
                          .own_blocks = meeting_.own.empty() ? 0 : own_block(meeting_.own.end - 1) + 1,
                          .heads = meeting_.heads,
                          .units = units,
                          .hidden = layout_.units_within(meeting_.seen.hidden, kStep),
                          .unit_shift = layout_.unit_shift(kStep),
                          .parts_shift = layout_.shift - layout_.unit_shift(kStep),
                          .aligned = layout_.aligned,
                          .met0 = layout_.met0,
                          .found = 0,
                          .head = 0,
                          .next = units.begin / kWarp,
                          .filled = 0};
      }
      sync_warp();
      make_units(0);
      sync_warp();
      make_units(1);
    }
    sync_block();
  }
  // Keeps the compiler from prefetching into registers that are not available.
  DS_DEVICE void pause() const { sync_warp(); }
  DS_DEVICE bool has(int n) const { return unit(n, 0).first != Unit::kNone; }
  DS_DEVICE void make(int n) {
    if (thread_index() < kWarp) make_units(n);
  }
  DS_DEVICE int head(int n) const { return unit(n, 0).head; }
  DS_DEVICE int first(int n, int slot) const { return unit(n, slot).first; }

  template <int kCount>
  DS_DEVICE SomeSlots<kCount> needed(int n, int slot, const Seen& seen, u32 own) const {
    u32 bits = 0;
    DS_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const Unit u = unit(n, slot + i);
      bits |= (u.own & own) != 0 && meets(seen, {u.first, u.first + 16}) ? 1u << i : 0u;
    }
    return {bits};
  }
  template <int kCount, class Visible>
  DS_DEVICE bool whole(SomeSlots<kCount> needed, int n, int slot, u32 own, Visible&& visible) const {
    bool all = needed.all();
    DS_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const Unit u = unit(n, slot + i);
      all = all && (u.own & own) == own && visible({u.first, u.first + 16});
    }
    return all;
  }
  DS_DEVICE bool met_by(int n, int slot, int own_block) const { return (unit(n, slot).own >> own_block & 1) != 0; }

  template <int kD, int kThreads, class E>
  DS_DEVICE void load(E* tile, const Head<const E>& x, int n, int limit, int D) const {
    gather_tile<kD, kStep, kThreads>(
        tile, x, [&](int slot) { return first(n, slot); }, [&](int token) { return row_of(token); }, limit, D);
  }
  // The row of a met token in its head; the tokens of its slot follow.
  DS_DEVICE int row_of(int token) const { return token < Unit::kNone ? layout_.row_of(token) : token; }

  DS_DEVICE int own_block(int token) const { return (own_at_ + token) >> layout_.shift; }
  DS_DEVICE u32 own_blocks(Range tokens) const {
    if (tokens.end > meeting_.own.end) tokens.end = meeting_.own.end;
    return tokens.empty() ? 0 : (2u << own_block(tokens.end - 1)) - (1u << own_block(tokens.begin));
  }

 private:
  // The unit of a slot of step n, from the slot on.
  DS_DEVICE Unit unit(int n, int slot) const {
    const int shift = layout_.unit_shift(kStep) - 4, at = n * (kStep / 16) + slot;  // in slots
    Unit u = shared_.units[(at >> shift) & (Found::kRing - 1)];
    u.first += (at & ((1 << shift) - 1)) * 16;
    return u;
  }

  // Called by the first warp: finds all units of step n.
  DS_DEVICE void make_units(int n) {
    Search s = shared_.search;
    const int lane = thread_index() % kWarp;
    const int per_step = kStep >> s.unit_shift, wanted = (n + 1) * per_step;
    while (s.found < wanted) {
      if (s.filled != 0) {
        const int word = s.next - kWarp + std::countr_zero(s.filled), at = kWarp * word + lane;
        s.filled &= s.filled - 1;
        // A lane reads the bits of one own block, and collects the own blocks that meet one unit.
        const u32 mine = lane < s.own_blocks ? word_of(s, lane, word) : 0;
        u32 own = 0;
        DS_UNROLL_BY(2)
        for (int i = 0; i < s.own_blocks; ++i) {
          own |= (warp_shuffle(mine, i) >> (lane >> s.parts_shift) & 1u) << i;
        }
        if (!s.units.has(at) || s.hidden.has(at)) own = 0;
        u32 there = warp_ballot(own != 0);
        if (s.aligned) {  // a step with one of its units has all of them
          const int first = lane / per_step * per_step;
          there = warp_ballot((there >> first & ((1u << per_step) - 1)) != 0);
        }
        if ((there >> lane & 1u) != 0) {
          const int place = s.found + std::popcount(there & ((1u << lane) - 1));
          shared_.units[place & (Found::kRing - 1)] = {(at << s.unit_shift) - s.met0, static_cast<u16>(own),
                                                       static_cast<u16>(s.head)};
        }
        s.found += std::popcount(there);
      } else if (s.head < s.heads && kWarp * s.next < s.units.end) {
        u32 any = 0;
        const int first = kWarp * (s.next + lane);
        if (first < s.units.end && (first < s.hidden.begin || first + kWarp > s.hidden.end)) {
          DS_UNROLL_BY(2)
          for (int i = 0; i < s.own_blocks; ++i) any |= word_of(s, i, s.next + lane);
        }
        s.filled = warp_ballot(any != 0);
        s.next += kWarp;
      } else {  // the rest of a head's last step; after the last head, a missing step
        const int end = s.head < s.heads ? (s.found + per_step - 1) / per_step * per_step : wanted;
        for (int i = s.found + lane; i < end; i += kWarp) shared_.units[i & (Found::kRing - 1)] = {Unit::kNone, 0, 0};
        s.found = end;
        s.head += s.head < s.heads;
        s.next = s.units.begin / kWarp;
      }
    }
    sync_warp();  // all have read
    if (lane == 0) {
      shared_.search.found = s.found;
      shared_.search.head = s.head;
      shared_.search.next = s.next;
      shared_.search.filled = s.filled;
    }
  }

  // Which of the units 32*word, ... own block i meets, one bit for each block.
  static DS_DEVICE u32 word_of(const Search& s, int i, int word) {
    const int blocks = kWarp >> s.parts_shift, at = word * blocks;
    const u64 bits = s.bits != nullptr ? s.bits[s.head * s.next_head + i * s.words + at / 64] : ~u64{0};
    return static_cast<u32>(bits >> (at % 64)) & (~0u >> (kWarp - blocks));
  }

  Shared& shared_;
  const Layout& layout_;
  const Meeting meeting_;
  int own_at_;
};

// In a warp's accumulators, 16 own tokens from `own` on by those from a slot of step n on, sets elements whose tokens
// do not see each other to `none`. see(token): the tokens that an own token sees; gaps: that may include hidden ones.
// Own tokens may be rows of a tile instead: token_of(row) is then their token.
struct SameToken {
  DS_DEVICE int operator()(int row) const { return row; }
};
template <int kN, class SomeSteps, class See, class TokenOf = SameToken>
DS_DEVICE void hide(float (&x)[kN][4], const SomeSteps& steps, int n, int slot, int own, See&& see, bool gaps,
                    float none, const TokenOf& token_of = {}) {
  const int lane = thread_index() % kWarp;
  const auto token = [&](int i) { return steps.first(n, slot + i / 4) + i / 2 % 2 * 8 + lane % 4 * 2 + i % 2; };
  DS_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int mine = token_of(own + lane / 4 + 8 * half), block = steps.own_block(mine);
    const Range seen = Seen(see(mine)).all;
    DS_UNROLL
    for (int i = 0; i < 2 * kN; ++i) {
      float& y = x[i / 2][half * 2 + i % 2];
      y = steps.met_by(n, slot + i / 4, block) && seen.has(token(i)) ? y : none;
    }
  }
  if (gaps) {  // a second pass, which takes fewer registers than both at once
    DS_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Range hidden = Seen(see(token_of(own + lane / 4 + 8 * half))).hidden;
      DS_UNROLL
      for (int i = 0; i < 2 * kN; ++i) {
        float& y = x[i / 2][half * 2 + i % 2];
        y = hidden.has(token(i)) ? none : y;
      }
    }
  }
  steps.pause();
}

}  // namespace ds::cuda::attention
