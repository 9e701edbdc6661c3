// SPDX-License-Identifier: Apache-2.0
// Strided copies, in the widest words that divide every run, distance and address. Neighbouring threads move
// neighbouring words of a run, then of the next one.

#include <limits>

#include "cuda/context.h"
#include "cuda/vectors.h"
#include "runs.h"

namespace ds::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWords = 4;  // per thread, all in flight at a time

// Counts and distances are in words; Index is u32 if all of them fit, since its divisions are much shorter.
template <class Word, class Index>
struct CopyArgs {
  Word* to;
  const Word* from;
  Index words;         // of a run
  Index total;         // of all runs
  Index size1, size2;  // of the two inner dims of runs
  i64 to_step[3], from_step[3];
};

template <class Word, class Index>
__global__ void __launch_bounds__(kThreads) copy_kernel(CopyArgs<Word, Index> a) {
  const Index first = static_cast<Index>(block_index().x) * (kThreads * kWords) + static_cast<Index>(thread_index());
  Word word[kWords];
  i64 at[kWords];
  DS_UNROLL for (int w = 0; w < kWords; ++w) {
    const Index item = first + static_cast<Index>(w * kThreads);
    if (item >= a.total) break;
    const Index run = item / a.words, rest = item - run * a.words;
    const Index row = run / a.size2, k = run - row * a.size2, i = row / a.size1, j = row - i * a.size1;
    const i64 is = static_cast<i64>(i), js = static_cast<i64>(j), ks = static_cast<i64>(k);
    at[w] = is * a.to_step[0] + js * a.to_step[1] + ks * a.to_step[2] + static_cast<i64>(rest);
    word[w] = a.from[is * a.from_step[0] + js * a.from_step[1] + ks * a.from_step[2] + static_cast<i64>(rest)];
  }
  DS_UNROLL for (int w = 0; w < kWords; ++w) {
    if (first + static_cast<Index>(w * kThreads) >= a.total) break;
    a.to[at[w]] = word[w];
  }
}

template <class Word, class Index>
void copy_words(TensorView y, TensorView x, const Runs& r, Context& c) noexcept {
  constexpr i64 kWidth = sizeof(Word);
  const i64 words = r.bytes / kWidth, total = words * r.size[0] * r.size[1] * r.size[2];
  CopyArgs<Word, Index> args{.to = y.as<Word>(),
                             .from = x.as<Word>(),
                             .words = static_cast<Index>(words),
                             .total = static_cast<Index>(total),
                             .size1 = static_cast<Index>(r.size[1]),
                             .size2 = static_cast<Index>(r.size[2]),
                             .to_step = {},
                             .from_step = {}};
  for (int d = 0; d < 3; ++d) args.to_step[d] = r.to[d] / kWidth, args.from_step[d] = r.from[d] / kWidth;
  const dim3 grid(static_cast<unsigned>(ceil_div(total, kThreads * kWords)));
  launch(copy_kernel<Word, Index>, {grid, kThreads, 0}, c.stream(), args);
}

}  // namespace

void copy_heads(TensorView y, TensorView x, Stream& s) noexcept {
  const Runs r = runs_of(y, x);
  if (r.bytes == 0) return;
  Context& c = context(s);
  size_t bits = reinterpret_cast<size_t>(y.data) | reinterpret_cast<size_t>(x.data) | static_cast<size_t>(r.bytes);
  for (int d = 0; d < 3; ++d) bits |= static_cast<size_t>(r.from[d]) | static_cast<size_t>(r.to[d]);
  const auto run = [&]<class Word>(Word) {
    // The last block counts beyond the end.
    const i64 total = r.bytes / static_cast<i64>(sizeof(Word)) * r.size[0] * r.size[1] * r.size[2];
    if (total < i64{std::numeric_limits<u32>::max()} - kThreads * kWords) {
      copy_words<Word, u32>(y, x, r, c);
    } else {
      copy_words<Word, u64>(y, x, r, c);
    }
  };
  bits % 16 == 0  ? run(uint4{})
  : bits % 8 == 0 ? run(uint2{})
  : bits % 4 == 0 ? run(u32{})
  : bits % 2 == 0 ? run(u16{})
                  : run(u8{});
  c.check(cudaGetLastError(), "copy_heads");
}

}  // namespace ds::cuda
