// SPDX-License-Identifier: Apache-2.0
// The choices of tokens in the order of experts, and sums of the rows that experts return. For the order, each expert
// has a warp for each slice of the choices, which finds and counts its own.

#include "cuda/context.h"
#include "cuda/ops.h"
#include "cuda/scratch_plan.h"
#include "cuda/vectors.h"
#include "router.h"

namespace ds::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr i64 kSlice = scratch::kChoiceSlice;

struct Choices {
  const i32* chosen;
  i64 count, first, E, slices;
};
// The expert and the choices of this warp.
struct Share {
  i64 expert, slice, begin, end;

  DS_DEVICE static Share of(const Choices& c) {
    const i64 w = i64{block_index().x} * kWarps + thread_index() / kWarp;
    const i64 slice = w / c.E, begin = slice * kSlice, end = begin + kSlice < c.count ? begin + kSlice : c.count;
    return {w - slice * c.E, slice, begin, slice < c.slices ? end : begin};
  }
};

// counts[expert][slice]
__global__ void count_choices_kernel(u32* counts, Choices c) {
  const Share mine = Share::of(c);
  const int lane = thread_index() % kWarp;
  u32 count = 0;
  for (i64 at = mine.begin; at < mine.end; at += kWarp) {
    const bool match = at + lane < mine.end && c.chosen[at + lane] - c.first == mine.expert;
    count += static_cast<u32>(std::popcount(warp_ballot(match)));
  }
  if (lane == 0 && mine.begin < mine.end) counts[mine.expert * c.slices + mine.slice] = count;
}

// One block: counts becomes the place of each share's first choice.
__global__ void scan_choices_kernel(u32* counts, i32* offsets, i64 E, i64 slices) {
  for (i64 e = thread_index(); e < E; e += kThreads) {
    u32 sum = 0;
    for (i64 s = 0; s < slices; ++s) sum += counts[e * slices + s];
    offsets[e + 1] = static_cast<i32>(sum);
  }
  sync_block();
  if (thread_index() == 0) {
    i32 sum = 0;
    offsets[0] = 0;
    for (i64 e = 0; e < E; ++e) sum += offsets[e + 1], offsets[e + 1] = sum;
  }
  sync_block();
  for (i64 e = thread_index(); e < E; e += kThreads) {
    u32 place = static_cast<u32>(offsets[e]);
    for (i64 s = 0; s < slices; ++s) {
      const u32 count = counts[e * slices + s];
      counts[e * slices + s] = place;
      place += count;
    }
  }
}

__global__ void place_choices_kernel(i32* places, i32* tokens, i32* choices, const i32* offsets, const u32* starts,
                                     Choices c, i64 k) {
  const Share mine = Share::of(c);
  const int lane = thread_index() % kWarp;
  u32 place = mine.begin < mine.end ? starts[mine.expert * c.slices + mine.slice] : 0;
  for (i64 at = mine.begin; at < mine.end; at += kWarp) {
    const i64 i = at + lane, expert = i < mine.end ? c.chosen[i] - c.first : -1;
    const u32 matches = warp_ballot(i < mine.end && expert == mine.expert);
    if (i < mine.end && expert == mine.expert) {
      const u32 here = place + static_cast<u32>(std::popcount(matches & ((1u << lane) - 1)));
      places[i] = static_cast<i32>(here);
      tokens[here] = static_cast<i32>(i / k);
      choices[here] = static_cast<i32>(i);
    }
    place += static_cast<u32>(std::popcount(matches));
    // The first expert's warps also fill in what nobody has.
    if (mine.expert == 0 && i < mine.end) {
      if (expert < 0 || expert >= c.E) places[i] = -1;
      if (i >= offsets[c.E]) tokens[i] = choices[i] = -1;
    }
  }
}

// ---- capacity

struct DropShared {
  i32 counts[kWarps];
};

DS_DEVICE i32 block_total(i32 x, DropShared& shared) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) x += warp_shuffle_xor(x, mask);
  sync_block();  // all have read the last total
  if (thread_index() % kWarp == 0) shared.counts[thread_index() / kWarp] = x;
  sync_block();
  i32 total = 0;
  for (int w = 0; w < kWarps; ++w) total += shared.counts[w];
  return total;
}

// A block per expert finds the least priority that is kept, bit by bit: the largest that as many choices reach as there
// is room for.
__global__ void drop_choices_kernel(i32* kept, const i32* chosen, router::Priorities rank, i64 n, i64 capacity) {
  DropShared& shared = block_shared<DropShared>();
  const i32 expert = static_cast<i32>(block_index().x);
  const auto reach = [&](u64 least) {
    i32 count = 0;
    for (i64 i = thread_index(); i < n; i += kThreads) count += chosen[i] == expert && rank(i) >= least ? 1 : 0;
    return i64{block_total(count, shared)};
  };
  u64 least = 0;
  if (capacity <= 0) {
    least = ~u64{0};
  } else if (reach(0) > capacity) {
    for (int bit = 63; bit >= 0; --bit) {
      const u64 higher = least | u64{1} << bit;
      if (reach(higher) >= capacity) least = higher;
    }
  }
  for (i64 i = thread_index(); i < n; i += kThreads) {
    if (chosen[i] == expert) kept[i] = rank(i) >= least ? expert : -1;
  }
}

// ---- sums

template <class T>
struct Rows {
  T* data;
  i64 stride;

  static Rows of(const TensorView& v) noexcept { return {v.as<T>(), v.stride[0]}; }
  DS_DEVICE T* operator[](i64 r) const { return data + r * stride; }
};

// A thread per pack of a row of y.
template <class T>
__global__ void combine_kernel(Rows<T> y, Rows<const T> x, Rows<const T> residual, const i32* places,
                               const float* weights, i64 R, i64 C, i64 k, i64 packs, bool wide) {
  constexpr int P = kPack<T>;
  const i64 item = i64{block_index().x} * kThreads + thread_index(), r = item / packs, c = (item - r * packs) * P;
  if (r >= R) return;
  float sum[P] = {};
  if (residual.data != nullptr) load_some(sum, residual[r] + c, C - c, wide);
  for (i64 i = r * k; i < (r + 1) * k; ++i) {
    const i64 place = places != nullptr ? places[i] : i;
    if (place < 0) continue;
    const float weight = weights != nullptr ? weights[i] : 1.0f;
    float term[P];
    load_some(term, x[place] + c, C - c, wide);
    DS_UNROLL
    for (int j = 0; j < P; ++j) sum[j] += weight * term[j];
  }
  store_some(y[r] + c, sum, C - c, wide);
}

// A warp per choice. dx may be x.
template <class T>
__global__ void combine_grad_kernel(Rows<T> dx, float* dweights, Rows<const T> dy, Rows<const T> x, const i32* places,
                                    const float* weights, i64 count, i64 C, i64 k, bool wide) {
  constexpr int P = kPack<T>;
  const int lane = thread_index() % kWarp;
  const i64 i = i64{block_index().x} * kWarps + thread_index() / kWarp;
  const i64 place = i >= count ? -1 : places != nullptr ? places[i] : i;
  float dot = 0;
  if (place >= 0) {
    const float weight = weights != nullptr ? weights[i] : 1.0f;
    for (i64 c = lane * P; c < C; c += kWarp * P) {
      float g[P];
      load_some(g, dy[i / k] + c, C - c, wide);
      if (dweights != nullptr) {
        float from[P];
        load_some(from, x[place] + c, C - c, wide);
        DS_UNROLL
        for (int j = 0; j < P; ++j) dot += g[j] * from[j];
      }
      DS_UNROLL
      for (int j = 0; j < P; ++j) g[j] *= weight;
      store_some(dx[place] + c, g, C - c, wide);
    }
  }
  dot = warp_sum(dot);
  if (lane == 0 && i < count && dweights != nullptr) dweights[i] = dot;
}

template <class T>
bool wide_rows(std::initializer_list<TensorView> views) noexcept {
  bool wide = true;
  for (const TensorView& v : views) wide = wide && aligned_rows(v.as<const T>(), v.stride[0], v.dim(0));
  return wide;
}
i64 choices_of_row(const TensorView& places, const TensorView& x, i64 R) noexcept {
  return places ? places.dim(1) : x.dim(0) / R;
}

}  // namespace

void sort_choices(TensorView offsets, TensorView places, TensorView tokens, TensorView choices, TensorView chosen,
                  i64 first, Stream& s) noexcept {
  Context& c = context(s);
  const i64 E = offsets.numel() - 1, n = chosen.numel();
  const Choices all{chosen.as<i32>(), n, first, E, scratch::choice_slices(n)};
  auto* const counts = static_cast<u32*>(c.scratch(static_cast<size_t>(scratch::choice_bytes(n, E))));
  if (counts == nullptr) return;
  const Launch shares{dim3(static_cast<unsigned>(ceil_div(all.slices * E, kWarps))), kThreads, 0};
  launch(count_choices_kernel, shares, c.stream(), counts, all);
  c.check(cudaGetLastError(), "sort_choices, counts");
  launch(scan_choices_kernel, {dim3(1), kThreads, 0}, c.stream(), counts, offsets.as<i32>(), E, all.slices);
  c.check(cudaGetLastError(), "sort_choices, offsets");
  launch(place_choices_kernel, shares, c.stream(), places.as<i32>(), tokens.as<i32>(), choices.as<i32>(),
         offsets.as<i32>(), counts, all, chosen.dim(1));
  c.check(cudaGetLastError(), "sort_choices");
}

void drop_choices(TensorView kept, TensorView chosen, TensorView priority, const CapacityParams& p,
                  Stream& s) noexcept {
  Context& c = context(s);
  const router::Priorities rank{priority.as<float>(), chosen.dim(0), chosen.dim(1), p.by_rank};
  launch(drop_choices_kernel, {dim3(static_cast<unsigned>(p.experts)), kThreads, sizeof(DropShared)}, c.stream(),
         kept.as<i32>(), chosen.as<i32>(), rank, chosen.numel(), p.capacity);
  c.check(cudaGetLastError(), "drop_choices");
}

void combine_rows(TensorView y, TensorView x, TensorView places, TensorView weights, TensorView residual,
                  Stream& s) noexcept {
  Context& c = context(s);
  const i64 R = y.dim(0), C = y.dim(1);
  if (R == 0 || C == 0) return;
  with_work_type(y.dtype, [&]<class T>(T) {
    const i64 packs = ceil_div(C, kPack<T>);
    launch(combine_kernel<T>, {dim3(static_cast<unsigned>(ceil_div(R * packs, kThreads))), kThreads, 0}, c.stream(),
           Rows<T>::of(y), Rows<const T>::of(x), Rows<const T>::of(residual), places.as<i32>(), weights.as<float>(), R,
           C, choices_of_row(places, x, R), packs, wide_rows<T>({y, x, residual}));
  });
  c.check(cudaGetLastError(), "combine_rows");
}

void combine_rows_grad(TensorView dx, TensorView dweights, TensorView dy, TensorView x, TensorView places,
                       TensorView weights, Stream& s) noexcept {
  Context& c = context(s);
  const i64 R = dy.dim(0), C = dy.dim(1);
  if (R == 0) return;
  const i64 k = choices_of_row(places, dx, R);
  with_work_type(dy.dtype, [&]<class T>(T) {
    launch(combine_grad_kernel<T>, {dim3(static_cast<unsigned>(ceil_div(R * k, kWarps))), kThreads, 0}, c.stream(),
           Rows<T>::of(dx), dweights.as<float>(), Rows<const T>::of(dy), Rows<const T>::of(x), places.as<i32>(),
           weights.as<float>(), R * k, C, k, wide_rows<T>({dx, dy, x}));
  });
  c.check(cudaGetLastError(), "combine_rows_grad");
}

}  // namespace ds::cuda
