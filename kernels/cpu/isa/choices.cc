// SPDX-License-Identifier: Apache-2.0
// The choices of tokens in the order of experts, and sums of the rows that experts return.

#include <algorithm>
#include <functional>

#include "cpu/isa/kernels.h"
#include "cpu/loops.h"
#include "router.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

namespace {

size_t drop_bytes(i64 n, i64 E) noexcept { return static_cast<size_t>(n + 2 * E + 2) * sizeof(u64); }

}  // namespace

// A counting sort on the caller's thread. Until the end offsets[e] is the next place of expert e.
void sort_choices(TensorView offsets, TensorView places, TensorView tokens, TensorView choices, TensorView chosen,
                  i64 first, Stream&) noexcept {
  const i64 n = chosen.numel(), k = chosen.dim(1), E = offsets.numel() - 1;
  i32* const next = offsets.as<i32>();
  const i32* const experts = chosen.as<i32>();
  std::fill_n(next, E + 1, 0);
  const auto here = [=](i64 e) { return e >= 0 && e < E; };
  for (i64 i = 0; i < n; ++i) {
    if (const i64 e = experts[i] - first; here(e)) ++next[e + 1];
  }
  for (i64 e = 0; e < E; ++e) next[e + 1] += next[e];
  std::fill(tokens.as<i32>() + next[E], tokens.as<i32>() + n, -1);
  std::fill(choices.as<i32>() + next[E], choices.as<i32>() + n, -1);
  for (i64 i = 0; i < n; ++i) {
    const i64 e = experts[i] - first;
    const i32 place = here(e) ? next[e]++ : -1;
    places.as<i32>()[i] = place;
    if (place < 0) continue;
    tokens.as<i32>()[place] = static_cast<i32>(i / k);
    choices.as<i32>()[place] = static_cast<i32>(i);
  }
  std::copy_backward(next, next + E, next + E + 1);
  next[0] = 0;
}

// Choices are sorted by expert on the caller's thread; then each expert finds the least priority that it keeps.
void drop_choices(TensorView kept, TensorView chosen, TensorView priority, const CapacityParams& p,
                  Stream& stream) noexcept {
  const i64 n = chosen.numel(), k = chosen.dim(1), E = p.experts;
  const i32* const experts = chosen.as<i32>();
  const router::Priorities rank{priority.as<float>(), chosen.dim(0), k, p.by_rank};
  u64* const ranks = static_cast<u64*>(stream.pool->reserve_scratch(drop_bytes(n, E)));
  u64* const least = ranks + n;
  i64* const ends = reinterpret_cast<i64*>(least + E);  // until all are sorted, ends[e + 1] is the next place of e
  std::fill_n(ends, E + 2, i64{0});
  const auto here = [=](i64 e) { return e >= 0 && e < E; };
  for (i64 i = 0; i < n; ++i) {
    if (here(experts[i])) ++ends[experts[i] + 2];
  }
  for (i64 e = 0; e < E; ++e) ends[e + 2] += ends[e + 1];
  for (i64 i = 0; i < n; ++i) {
    if (here(experts[i])) ranks[ends[experts[i] + 1]++] = rank(i);
  }
  stream.pool->parallel_for(E, [=](i64 e, int) {
    u64 *const begin = ranks + ends[e], *const end = ranks + ends[e + 1];
    least[e] = p.capacity <= 0 ? ~u64{0} : 0;
    if (p.capacity <= 0 || end - begin <= p.capacity) return;
    u64* const last = begin + p.capacity - 1;
    std::nth_element(begin, last, end, std::greater<>());
    least[e] = *last;
  });
  for_tiles(stream, n, [=, to = kept.as<i32>()](i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i) {
      const i32 e = experts[i];
      to[i] = here(e) && rank(i) >= least[e] ? e : -1;
    }
  });
}

void drop_choices_scratch(TensorView, TensorView chosen, TensorView, const CapacityParams& p, Stream& stream) noexcept {
  note_scratch(stream, drop_bytes(chosen.numel(), p.experts));
}

namespace {

// The number of choices of a row, and the place of each.
struct Places {
  const i32* places;
  i64 k;

  Places(const TensorView& view, const TensorView& x, i64 R) noexcept
      : places(view.as<i32>()),
        k(view    ? view.dim(1)
          : R > 0 ? x.dim(0) / R
                  : 0) {}
  i64 operator()(i64 i) const noexcept { return places == nullptr ? i : places[i]; }
};

}  // namespace

void combine_rows(TensorView y, TensorView x, TensorView places, TensorView weights, TensorView residual,
                  Stream& stream) noexcept {
  const i64 R = y.dim(0), C = y.dim(1);
  const Places place(places, x, R);
  const float* const weight = weights.as<float>();
  with_work_type(y.dtype, [&]<class T>(T) {
    const auto rows = [=](i64 begin, i64 end) {
      for (i64 r = begin; r < end; ++r) {
        T* const out = y.as<T>() + r * y.stride[0];
        const T* const onto = residual ? residual.as<T>() + r * residual.stride[0] : nullptr;
        for_vectors(0, C, [=](i64 c, auto n) {
          Vec sum = onto != nullptr ? load(onto + c, n) : zero();
          for (i64 i = r * place.k; i < (r + 1) * place.k; ++i) {
            if (place(i) < 0) continue;
            const Vec term = load(x.as<T>() + place(i) * x.stride[0] + c, n);
            sum = weight != nullptr ? fma(broadcast(weight[i]), term, sum) : sum + term;
          }
          store(out + c, sum, n);
        });
      }
    };
    for_tiles(stream, R, rows, std::max<i64>(1, kTileElements / std::max<i64>(1, C * place.k)));
  });
}

void combine_rows_grad(TensorView dx, TensorView dweights, TensorView dy, TensorView x, TensorView places,
                       TensorView weights, Stream& stream) noexcept {
  const i64 R = dy.dim(0), C = dy.dim(1);
  const Places place(places, dx, R);
  const float* const weight = weights.as<float>();
  with_work_type(dy.dtype, [&]<class T>(T) {
    const auto rows = [=](i64 begin, i64 end) {
      for (i64 i = begin * place.k; i < end * place.k; ++i) {
        const i64 at = place(i);
        Vec dot = zero();
        if (at >= 0) {
          const T* const from = dy.as<T>() + i / place.k * dy.stride[0];
          const T* const row = dweights ? x.as<T>() + at * x.stride[0] : nullptr;
          T* const to = dx.as<T>() + at * dx.stride[0];
          const Vec by = broadcast(weight != nullptr ? weight[i] : 1.0f);
          for_vectors(0, C, [=, &dot](i64 c, auto n) {
            const Vec g = load(from + c, n);
            if (row != nullptr) dot = fma(g, load(row + c, n), dot);
            store(to + c, by * g, n);
          });
        }
        if (dweights) dweights.as<float>()[i] = reduce_add(dot);
      }
    };
    for_tiles(stream, R, rows, std::max<i64>(1, kTileElements / std::max<i64>(1, C * place.k)));
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
