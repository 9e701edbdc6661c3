// SPDX-License-Identifier: Apache-2.0
// Products with a matrix of codes. Elements are decoded to words of B, and sums grow in the order of multiply_tile, so
// bits are those of the product with the decoded matrix. For many rows panels are decoded to scratch, once for a tile;
// for few rows they stream from memory and are decoded in registers.

#include "cpu/isa/coded_tile.h"
#include "cpu/isa/codes.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/tiled_product.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

template <class T>
struct CodedSource {
  CodedMatrix matrix;
};

namespace {

// Decodes k in [k, k + depth) of a whole panel to words; false, and nothing useful there, if not in vectors.
template <class Product, class T, CodeKind kKind>
bool decode_panel(float* words, const CodedMatrix& m, i64 n, i64 k, i64 depth) noexcept {
  bool all = true;
  each_piece(m, n, k, depth, [&](const CodedPiece& piece) {
    PieceDecoder<Product, T, kKind> decoder;
    all = all && decoder.take(m.form, piece.scales, piece.offsets);
    if (!all) return;
    const u8* codes = piece.codes;
    for (i64 i = 0; i < piece.depth; i += 2 * Product::kDepth, codes += decoder.kBytes) {
      Vec b[2][2];
      decoder.decode(codes, b);
      for (const auto& word : b) {
        store(words, word[0]), store(words + kLanes, word[1]);
        words += kNR;
      }
    }
    all = decoder.valid();
  });
  return all;
}

template <class Product, class T>
void decode_words(float* words, const CodedMatrix& m, i64 n, i64 k, i64 depth) noexcept {
  const bool done = is_whole_panel<Product>(m, n) && with_kind(m.form.kind, [&]<CodeKind kKind>(Kind<kKind>) {
                      return decode_panel<Product, T, kKind>(words, m, n, k, depth);
                    });
  if (!done) decode_one_by_one<Product, T>(words, m, n, k, depth);
}

}  // namespace

template <class Product, class T>
class TilePanels<Product, CodedSource<T>> {
 public:
  using Word = float;
  static constexpr bool kPacks = true;
  TilePanels(const CodedSource<T>& b, float* room) noexcept : b_(b), room_(room) {}
  void take(i64 begin, i64 end, i64 k, i64 depth) noexcept {
    begin_ = begin;
    for (i64 j = begin; j < end; j += kNR) decode_words<Product, T>(at(j), b_.matrix, j, k, depth);
  }
  const Word* panel(i64 j) const noexcept { return at(j); }

 private:
  float* at(i64 j) const noexcept { return room_ + (j - begin_) / kNR * TileRoom<Product>::kPitchB; }

  const CodedSource<T>& b_;
  float* room_;
  i64 begin_ = 0;
};

namespace {

constexpr i64 kFewCodedRows = kLanes == 16 ? kFewRows : 4;  // as many as have sums in registers beside the decoder's
constexpr i64 kAhead = 4096;                                // bytes of prefetch; the hardware's is too short

template <int kRows>
using RowSums = Vec[kRows][2];

// Adds the products of two words.
template <class Product, int kRows>
[[gnu::always_inline]] inline void add_words(RowSums<kRows>& sum, const float* a, const Vec (&b)[2][2]) noexcept {
#pragma GCC unroll 2
  for (int w = 0; w < 2; ++w) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec x = broadcast(a[w * kRows + r]);
      sum[r][0] = Product::multiply_add(x, b[w][0], sum[r][0]);
      sum[r][1] = Product::multiply_add(x, b[w][1], sum[r][1]);
    }
  }
}

// Adds the products of a piece of one panel, or of two whose codes are `next` bytes apart. Two words are decoded while
// those before them are multiplied: of the other panel, or the next ones.
template <class Product, class Decoder, int kRows, int kPanels>
[[gnu::always_inline]] inline void add_piece(RowSums<kRows> (&sum)[kPanels], const float* a,
                                             Decoder (&decoder)[kPanels], const u8* codes, i64 next,
                                             i64 words) noexcept {
  constexpr int kLast = kPanels - 1;
  constexpr i64 kStep = 4 / kPanels, kOther = kPanels == 2 ? 0 : 2 * kRows;  // words; floats of A
  const i64 other = kPanels == 2 ? next : Decoder::kBytes;
  const auto decode = [](Decoder& by, const u8* from, Vec(&to)[2][2]) {
    for (i64 line = 0; line < Decoder::kBytes; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(from + kAhead + line), _MM_HINT_T0);
    by.decode(from, to);
  };
  Vec one[2][2], two[2][2];
  decode(decoder[0], codes, one);
  for (;;) {
    decode(decoder[kLast], codes + other, two);
    add_words<Product, kRows>(sum[0], a, one);
    words -= kStep;
    if (words == 0) break;
    codes += kStep / 2 * Decoder::kBytes;
    decode(decoder[0], codes, one);
    add_words<Product, kRows>(sum[kLast], a + kOther, two);
    a += kStep * kRows;
  }
  add_words<Product, kRows>(sum[kLast], a + kOther, two);
}

// sums[kPanels][kRows][kNR] = or += the product of k in [k, k + depth) with panels from row n on, side by side: the
// sums of one row alone would wait for each other. False, and no sums, if the panels must be decoded otherwise.
template <class Product, class T, CodeKind kKind, int kRows, int kPanels>
bool multiply_coded(float* sums, const float* a, const CodedMatrix& m, i64 n, i64 k, i64 depth, bool first) noexcept {
  using Decoder = PieceDecoder<Product, T, kKind>;
  const i64 next = kNR * m.form.row_bytes(m.K);
  RowSums<kRows> sum[kPanels];
#pragma GCC unroll 2
  for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sum[p][r][0] = sum[p][r][1] = zero();
  }
  bool all = true;
  each_piece(m, n, k, depth, [&](const CodedPiece& piece) {
    Decoder decoder[kPanels];
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p)
      all = all && decoder[p].take(m.form, piece.scales + p * next, piece.offsets + p * next);
    if (!all) return;
    const i64 words = piece.depth / Product::kDepth;
    add_piece<Product, Decoder, kRows, kPanels>(sum, a, decoder, piece.codes, next, words);
    a += words * kRows;
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) all = all && decoder[p].valid();
  });
  if (!all) return false;
#pragma GCC unroll 2
  for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r, sums += kNR) {
      store(sums, first ? sum[p][r][0] : load(sums) + sum[p][r][0]);
      store(sums + kLanes, first ? sum[p][r][1] : load(sums + kLanes) + sum[p][r][1]);
    }
  }
  return true;
}

// A worker's scratch for few rows: all words of A, the sums of panels side by side, and one panel's words in a block of
// k, for panels that are decoded one by one.
template <class Product>
struct FewRowsRoom {
  static constexpr i64 kMostPanels = 2;
  i64 a, sums, panel;  // floats
  FewRowsRoom(i64 rows, i64 K) noexcept
      : a(round_up(ceil_div(K, Product::kDepth) * rows, kLanes) + kLanes),
        sums(kMostPanels * rows * kNR),
        panel(TileRoom<Product>::kPitchB) {}
  size_t bytes() const noexcept { return static_cast<size_t>(a + sums + panel) * sizeof(float); }
};

// A tile of at most kRows rows.
template <class Product, class T, CodeKind kKind, int kRows>
class FewRows {
 public:
  FewRows(const Source<T>& a, const CodedMatrix& b, Range m, const Epilogue& e, FinishFn done, float* scratch) noexcept
      : b_(b), m_(m), e_(e), done_(done), a_(scratch) {
    const FewRowsRoom<Product> room(kRows, b.K);
    sums_ = a_ + room.a, panel_ = sums_ + room.sums;
    pack<Product>(a_, kRows, a, m.begin, m.size(), 0, b.K);
  }
  void multiply(Range columns) noexcept {
    constexpr int kPanels = kRows <= 2 ? FewRowsRoom<Product>::kMostPanels : 1;
    constexpr i64 kStep = kPanels * kNR;
    i64 n = columns.begin;
    for (; n + kStep <= columns.end && is_whole_panel<Product>(b_, n + kStep - kNR); n += kStep)
      multiply_at<kPanels>(n);
    for (; n < columns.end; n += kNR) multiply_at<1>(n);
  }

 private:
  template <int kPanels>
  void multiply_at(i64 n) noexcept {
    InnerBlocks<Product>{b_.K}.each([&](i64 k, i64 depth, bool first, bool) {
      const float* const a = a_ + k / Product::kDepth * kRows;
      if (is_whole_panel<Product>(b_, n) &&
          multiply_coded<Product, T, kKind, kRows, kPanels>(sums_, a, b_, n, k, depth, first))
        return;
      for (int p = 0; p < kPanels; ++p) {
        decode_one_by_one<Product, T>(panel_, b_, n + p * kNR, k, depth);
        micro_kernels<Product>[kRows - 1](depth / Product::kDepth, a, panel_, sums_ + p * kRows * kNR, first);
      }
    });
    for (int p = 0; p < kPanels; ++p) {
      const i64 at = n + p * kNR;
      done_(e_, sums_ + p * kRows * kNR, kNR, m_.begin, at, m_.size(), std::min(kNR, b_.N - at));
    }
  }

  const CodedMatrix& b_;
  Range m_;
  const Epilogue& e_;
  FinishFn done_;
  float *a_, *sums_ = nullptr, *panel_ = nullptr;
};

template <class T>
void multiply_tile_of(const Source<T>& a, const CodedMatrix& b, Range m, Range n, const Epilogue& e, FinishFn done,
                      float* scratch) noexcept {
  using Product = typename ProductOf<T>::type;
  if (m.size() > kFewCodedRows)
    return multiply_tile<Product>(a, CodedSource<T>{b}, InnerBlocks<Product>{b.K}, m, n, e, done, scratch);
  with_few_rows<kFewCodedRows>(m.size(), [&]<int kRows>(std::integral_constant<int, kRows>) {
    with_kind(b.form.kind, [&]<CodeKind kKind>(Kind<kKind>) {
      FewRows<Product, T, kKind, kRows>(a, b, m, e, done, scratch).multiply(n);
    });
  });
}

// The tiles of a product. Those for few rows or sums of integers are long pieces of B, as many as keep the threads
// busy.
struct CodedTiles {
  i64 M, N;
  i64 unit = kNR;  // of columns
  Grid grid{};

  CodedTiles(const CodedForm& form, i64 rows, i64 columns, i64 threads) noexcept : M(rows), N(columns) {
    constexpr i64 kIntegerRows = 96, kWidest = 32 * kNR;
    if (M > kFewCodedRows && !form.integer) {
      grid = choose_grid(M, N, threads, true);
      return;
    }
    unit = 2 * kNR;  // panels that are multiplied side by side
    grid.m = ceil_div(M, kIntegerRows);
    grid.n = std::max(ceil_div(N, kWidest), std::min(ceil_div(4 * threads, grid.m), ceil_div(N, unit)));
  }
  i64 count() const noexcept { return grid.m * grid.n; }
  Range rows_of(i64 tile) const noexcept { return part_of(M, kMR, tile % grid.m, grid.m); }
  Range columns_of(i64 tile) const noexcept { return part_of(N, unit, tile / grid.m, grid.n); }
  size_t scratch_bytes(DType work, const CodedForm& form, i64 K) const noexcept {
    const auto most = [](i64 n, i64 panel, i64 tiles) {
      return std::min(n, ceil_div(ceil_div(n, panel), tiles) * panel);
    };
    return coded_tile_bytes(work, form, most(M, kMR, grid.m), most(N, unit, grid.n), K);
  }
};

}  // namespace

void multiply_coded_tile(const TensorView& a, const CodedMatrix& b, Range m, Range n, const Epilogue& e, FinishFn done,
                         void* scratch) noexcept {
  with_work_type(a.dtype, [&]<class T>(T) {
    const Source<T> rows{a.as<T>(), a.stride[0], true};
    if (b.form.integer) return multiply_integer_tile(rows, b, m, n, e, done, scratch);
    multiply_tile_of(rows, b, m, n, e, done, static_cast<float*>(scratch));
  });
}

size_t coded_tile_bytes(DType work, const CodedForm& form, i64 rows, i64 columns, i64 K) noexcept {
  if (form.integer) return integer_tile_bytes(form, rows, K);
  size_t bytes = 0;
  with_work_type(work, [&]<class T>(T) {
    using Product = typename ProductOf<T>::type;
    const i64 few = with_few_rows<kFewCodedRows>(std::min(rows, kFewCodedRows), [](auto n) -> i64 { return n; });
    bytes = FewRowsRoom<Product>(few, K).bytes();
    if (rows <= kFewCodedRows) return;
    const bool held = InnerBlocks<Product>{K}.several();
    bytes = std::max(bytes, TileRoom<Product>(ceil_div(rows, kMR), ceil_div(columns, kNR), held).bytes());
  });
  return bytes;
}

void multiply_by_codes(const Epilogue& e, TensorView a, TensorView b, ThreadPool& pool) noexcept {
  const i64 M = e.c.dim(0), N = e.c.dim(1);
  const FinishFn done = finish_for(e.c.dtype, a.dtype);
  const CodedTiles tiles(b.codes, M, N, pool.num_threads());
  pool.reserve_scratch(tiles.scratch_bytes(a.dtype, b.codes, b.dim(1)));
  pool.parallel_for(tiles.count(), [&](i64 tile, int worker) {
    multiply_coded_tile(a, CodedMatrix(b), tiles.rows_of(tile), tiles.columns_of(tile), e, done, pool.scratch(worker));
  });
}

size_t multiply_by_codes_scratch(DType work, i64 M, const TensorView& b, int threads) noexcept {
  return CodedTiles(b.codes, M, b.dim(0), threads).scratch_bytes(work, b.codes, b.dim(1));
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
