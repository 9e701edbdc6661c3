// SPDX-License-Identifier: Apache-2.0
// Numbers in 8 bits and products of them: formats by their definition, codes and scales with the bits of ref, products
// within the rounding of their sums.

#include <bit>
#include <limits>

#include "parity.h"

namespace ds::testing {
namespace fp8_test {

constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
constexpr DType kFormats[] = {DType::F8E4M3, DType::F8E5M2};
constexpr Fp8Blocks kBlocks[] = {Fp8Blocks::Rows, Fp8Blocks::Squares};

std::vector<const OpTable*> all_tables() {
  std::vector<const OpTable*> tables = backends();
  tables.push_back(&ref_ops());
  return tables;
}

// A GPU sums otherwise than a CPU, and than the simulator, which sums in fp32.
bool is_gpu() { return test_device() != nullptr && test_device()->name().find("imulat") == std::string_view::npos; }

// The number of a code by the definition of its format.
double defined(u8 code, DType t) {
  const int mantissa = t == DType::F8E4M3 ? 3 : 2, bias = t == DType::F8E4M3 ? 7 : 15, a = code & 0x7F,
            exponent = a >> mantissa, m = a - (exponent << mantissa), last = t == DType::F8E4M3 ? 15 : 31;
  const double sign = code < 128 ? 1 : -1;
  if (t == DType::F8E4M3 && a == 0x7F) return std::nan("");
  if (t == DType::F8E5M2 && exponent == last) return m == 0 ? sign * INFINITY : std::nan("");
  const double unit = std::ldexp(1.0, -mantissa);
  return sign * (exponent == 0 ? std::ldexp(m * unit, 1 - bias) : std::ldexp(1 + m * unit, exponent - bias));
}

// The code of x by the definition: the nearest finite number, of two equally near ones the one with an even code.
u8 nearest(float x, DType t) {
  if (std::isnan(x)) return 0x7F;
  // Far beyond the largest number distances would be rounded to equal ones.
  const double a = std::min(std::abs(double{x}), 1e6);
  u8 best = 0;
  for (u8 code = 1; code < 0x7F && std::isfinite(defined(code, t)); ++code) {
    const double far = std::abs(a - defined(best, t)), near = std::abs(a - defined(code, t));
    if (near < far || (near == far && code % 2 == 0)) best = code;
  }
  return static_cast<u8>(best | (std::signbit(x) ? 0x80 : 0));
}

TEST(Fp8, CodesAreTheDefinedNumbers) {
  EXPECT_EQ(defined(fp8_format(DType::F8E4M3).largest, DType::F8E4M3), 448);
  EXPECT_EQ(defined(fp8_format(DType::F8E5M2).largest, DType::F8E5M2), 57344);
  for (const DType t : kFormats) {
    const Fp8Format f = fp8_format(t);
    EXPECT_EQ(from_fp8(f.largest, f), f.largest_value);
    for (int code = 0; code < 256; ++code) {
      const double want = defined(static_cast<u8>(code), t);
      const float got = from_fp8(static_cast<u8>(code), f);
      if (std::isnan(want)) {
        EXPECT_TRUE(std::isnan(got)) << dtype_name(t) << " " << code;
        continue;
      }
      EXPECT_EQ(std::bit_cast<u32>(got), std::bit_cast<u32>(static_cast<float>(want))) << dtype_name(t) << " " << code;
      if (std::isfinite(want)) {
        EXPECT_EQ(to_fp8(got, f), code) << dtype_name(t);
      }
    }
  }
}

TEST(Fp8, ANumberGetsTheNearestCode) {
  for (const DType t : kFormats) {
    const Fp8Format f = fp8_format(t);
    const auto check = [&](float x) {
      const u8 got = to_fp8(x, f);
      if (std::isnan(x)) {
        ASSERT_EQ(got & 0x7F, 0x7F);
      } else {
        ASSERT_EQ(got, nearest(x, t)) << dtype_name(t) << " of " << x;
      }
    };
    for (u32 bits = 0; bits < 1 << 16; ++bits) check(to_float(bf16{static_cast<u16>(bits)}));
    // Between two numbers, and right beside the middle.
    for (u8 code = 0; code < f.largest; ++code) {
      const auto middle = static_cast<float>((defined(code, t) + defined(static_cast<u8>(code + 1), t)) / 2);
      for (const float x : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, kInf)}) {
        check(x);
        check(-x);
      }
    }
  }
}

// An operand and its memory.
struct Operand {
  Operand(i64 rows, i64 k, Fp8Blocks blocks, DType format)
      : layout{rows, k, blocks},
        codes_(DType::U8, {layout.padded_rows(), layout.padded_k()}),
        scales_(DType::F32, {layout.scale_rows(), layout.scale_columns()}),
        format_(format) {}

  TensorView codes() const {
    TensorView v = codes_;
    v.dtype = format_;
    return v;
  }
  TensorView scales() const { return scales_; }
  u8 code(i64 row, i64 k) const { return codes_.view().as<u8>()[row * layout.padded_k() + k]; }
  float scale(i64 row, i64 k) const { return scales_.at(layout.scale_of(row, k)); }
  double value(i64 row, i64 k) const {
    return double{from_fp8(code(row, k), fp8_format(format_))} * double{scale(row, k)};
  }
  void encode(const OpTable& ops, TensorView x, bool transposed, Stream& s) const {
    ops.quantize_fp8(codes(), scales(), x, layout.blocks, transposed, s);
  }

  Fp8Layout layout;

 private:
  Tensor codes_, scales_;
  DType format_;
};

void expect_same(const Operand& got, const Operand& want, const std::string& what) {
  for (i64 i = 0; i < want.codes().numel(); ++i)
    ASSERT_EQ(got.codes().as<u8>()[i], want.codes().as<u8>()[i]) << what << ", code " << i;
  for (i64 i = 0; i < want.scales().numel(); ++i) {
    const float g = got.scales().as<float>()[i], w = want.scales().as<float>()[i];
    if (!std::isnan(g) || !std::isnan(w)) {
      ASSERT_EQ(std::bit_cast<u32>(g), std::bit_cast<u32>(w)) << what << ", scale " << i;
    }
  }
}

std::string describe(const OpTable& ops, DType work, DType format, const Fp8Layout& l, bool transposed) {
  return std::string(ops.name) + " " + std::string(dtype_name(work)) + " to " + std::string(dtype_name(format)) + " [" +
         std::to_string(l.rows) + ", " + std::to_string(l.k) + "]" +
         (l.blocks == Fp8Blocks::Rows ? " rows" : " squares") + (transposed ? " transposed" : "");
}

// Rows of very different magnitude, and zeros; `columns` of each row, with a gap after them.
Tensor values(DType work, i64 rows, i64 columns, u32 seed) {
  Tensor x(work, {rows, columns});
  x.randomize(seed);
  for (i64 r = 0; r < rows; ++r) {
    for (i64 c = 0; c < columns; ++c) {
      const i64 i = r * columns + c;
      if (r % 5 == 1) x.set(i, x.at(i) * 300);
      if (r % 7 == 2) x.set(i, x.at(i) * 0x1p-20f);
      if (c % 11 == 3 || r % 9 == 4) x.set(i, c % 2 == 0 ? 0.0f : -0.0f);
    }
  }
  return x;
}
TensorView columns(const Tensor& t, i64 n) {
  TensorView v = t;
  v.shape[1] = n;
  return v;
}

TEST(Fp8, OperandsHaveTheBitsOfRef) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  const std::pair<i64, i64> sizes[] = {{1, 1}, {3, 128}, {16, 100}, {17, 130}, {128, 128}, {130, 300}, {260, 144}};
  for (const OpTable* ops : backends()) {
    for (const DType work : kWorkDTypes) {
      for (const DType format : kFormats) {
        for (const Fp8Blocks blocks : kBlocks) {
          for (const bool transposed : {false, true}) {
            for (const auto& [rows, k] : sizes) {
              for (const i64 gap : {i64{0}, i64{5}}) {
                const i64 x_rows = transposed ? k : rows, x_columns = transposed ? rows : k;
                const Tensor all = values(work, x_rows, x_columns + gap, 1);
                const TensorView x = columns(all, x_columns);
                const Operand got(rows, k, blocks, format), want(rows, k, blocks, format);
                want.encode(ref_ops(), x, transposed, s);
                got.encode(*ops, x, transposed, s);
                expect_same(got, want, describe(*ops, work, format, got.layout, transposed));
              }
            }
          }
        }
      }
    }
  }
}

// The largest number of a format in each block makes the scale 1, so that every code is that of its number.
TEST(Fp8, EveryNumberInBf16IsEncoded) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const DType format : kFormats) {
    const Fp8Format f = fp8_format(format);
    std::vector<float> numbers;
    for (u32 bits = 0; bits < 1 << 16; ++bits) {
      const float x = to_float(bf16{static_cast<u16>(bits)});
      if (std::abs(x) <= f.largest_value) numbers.push_back(x);
    }
    const i64 rows = (std::ssize(numbers) + 126) / 127;
    Tensor x(DType::BF16, {rows, 128});
    x.fill(0);
    for (i64 r = 0; r < rows; ++r) x.set(r * 128, f.largest_value);
    for (size_t i = 0; i < numbers.size(); ++i)
      x.set(static_cast<i64>(i) / 127 * 128 + 1 + static_cast<i64>(i) % 127, numbers[i]);
    for (const OpTable* ops : all_tables()) {
      const Operand o(rows, 128, Fp8Blocks::Rows, format);
      o.encode(*ops, x, false, s);
      for (i64 r = 0; r < rows; ++r) {
        ASSERT_EQ(o.scale(r, 0), 1.0f);
        for (i64 k = 0; k < 128; ++k) ASSERT_EQ(o.code(r, k), to_fp8(x.at(r * 128 + k), f)) << ops->name;
      }
    }
  }
}

// Half a unit in the last place, or half the least number.
TEST(Fp8, ErrorsAreThoseOfTheFormat) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : all_tables()) {
    for (const DType format : kFormats) {
      for (const Fp8Blocks blocks : kBlocks) {
        const Tensor x = values(DType::BF16, 140, 270, 3);
        const Operand o(140, 270, blocks, format);
        o.encode(*ops, x, false, s);
        const double relative = format == DType::F8E4M3 ? 0x1p-4 : 0x1p-3,
                     least = format == DType::F8E4M3 ? 0x1p-10 : 0x1p-17;
        for (i64 r = 0; r < 140; ++r) {
          for (i64 k = 0; k < 270; ++k) {
            const double v = x.at(r * 270 + k);
            ASSERT_LE(std::abs(v - o.value(r, k)), std::max(relative * std::abs(v), least * o.scale(r, k)) * (1 + 1e-6))
                << describe(*ops, DType::BF16, format, o.layout, false);
          }
        }
      }
    }
  }
}

// The encoding of a square with this largest number.
struct Square {
  Square(float most, DType format)
      : f(fp8_format(format)), scale(fp8_scale(std::bit_cast<u32>(most), f, Fp8Blocks::Squares)) {}
  u8 code(float x) const { return fp8_code(x, scale, f); }
  float value(float x) const { return from_fp8(code(x), f) * scale; }

  Fp8Format f;
  float scale;
};

// A square is encoded with a power of two, values of its codes are exact in bf16, and they have the same scale and the
// same codes: for each number in bf16 as the largest one, with numbers of all magnitudes beside it.
TEST(Fp8, SquaresOfValuesHaveTheCodesOfTheirSquares) {
  for (const DType format : kFormats) {
    const Fp8Format f = fp8_format(format);
    for (u32 largest = 0; largest < 0x7F80; ++largest) {
      const float most = to_float(bf16{static_cast<u16>(largest)});
      const Square square(most, format), again(std::abs(square.value(most)), format);
      int exponent = 0;
      ASSERT_EQ(std::frexp(square.scale, &exponent), 0.5f) << most;
      ASSERT_EQ(square.scale, again.scale) << dtype_name(format) << " " << most;
      const u32 step = largest < 64 ? 1 : 257;
      for (u32 bits = largest % step; bits <= largest; bits += step) {
        for (const float x : {to_float(bf16{static_cast<u16>(bits)}), -to_float(bf16{static_cast<u16>(bits)})}) {
          const float value = square.value(x);
          ASSERT_TRUE(std::isfinite(value)) << x << " of " << most;
          ASSERT_EQ(std::bit_cast<u32>(to_float(to_bf16(value))), std::bit_cast<u32>(value)) << x << " of " << most;
          ASSERT_LE(std::abs(value), std::abs(square.value(most)));
          ASSERT_EQ(again.code(value), square.code(x)) << dtype_name(format) << " " << x << " of " << most;
        }
      }
      // Within limits the range of the format is used: half the scale would not do.
      const float top = most / square.scale;
      if (most > 0x1p-90f && most < 0x1p100f) {
        ASSERT_GT(top, f.largest_value / 2) << most;
        ASSERT_LE(top, f.largest_value * 1.125f) << most;
      }
    }
    EXPECT_TRUE(std::isnan(Square(kInf, format).scale));
    EXPECT_TRUE(std::isnan(Square(kNan, format).scale));
  }
}

// At the edges of E4M3: a number that rounds to 448 is no reason for another scale, one that rounds beyond it is; and
// numbers at the ends of bf16 have scales whose codes stay within them.
TEST(Fp8, ScalesOfSquaresAtTheEdges) {
  const auto scale = [](float most) { return Square(most, DType::F8E4M3).scale; };
  EXPECT_EQ(scale(448), 1);
  EXPECT_EQ(scale(464), 1);  // in the middle between 448 and 480: to 448, which is even
  EXPECT_EQ(scale(466), 2);
  EXPECT_EQ(scale(225), 0.5f);  // rounds to 224
  EXPECT_EQ(scale(240), 1);     // 480 has no code
  EXPECT_EQ(scale(256), 1);
  EXPECT_EQ(Square(464, DType::F8E4M3).value(464), 448);
  EXPECT_EQ(scale(0), 0x1p-117f);
  EXPECT_EQ(Square(0x1p-126f, DType::F8E4M3).value(0x1p-126f), 0x1p-126f);
  EXPECT_EQ(Square(0x1p-126f, DType::F8E4M3).value(0x1p-127f), 0);  // half the least value: to even
  const float most = to_float(bf16{0x7F7F});
  EXPECT_EQ(scale(most), 0x1p119f);
  EXPECT_EQ(Square(most, DType::F8E4M3).value(most), 0x1.Cp127f);
}

// A matrix and what its parts say of it.
struct Parts {
  Parts(i64 rows, i64 k) : maxima(DType::I64, {rows / 128, k / 128}), codes(DType::U8, {rows * k}) {}
  Tensor maxima, codes;
};

TEST(Fp8, PartsOfAMatrixHaveTheCodesOfTheWhole) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  constexpr i64 kRows = 256, K = 384, kAll = kRows * K;
  // Cut anywhere at multiples of 128: within a row, within squares, at a row of squares; a part may have nothing.
  const std::vector<i64> cuts = {0, 128, 128, 384, 384 * 128 - 256, 384 * 128, 384 * 200 + 256, kAll};
  for (const OpTable* ops : all_tables()) {
    for (const float bad : {1.0f, kInf, kNan}) {
      Tensor x = values(DType::BF16, kRows, K, 6);
      if (bad != 1) x.set(384 * 140 + 300, bad);
      const Operand whole(kRows, K, Fp8Blocks::Squares, DType::F8E4M3),
          again(kRows, K, Fp8Blocks::Squares, DType::F8E4M3);
      whole.encode(*ops, x, false, s);
      const TensorView flat = x.view().reshaped({kAll});
      Parts all(kRows, K);
      std::vector<i64> largest(6);
      for (size_t c = 0; c + 1 < cuts.size(); ++c) {
        Parts part(kRows, K);
        std::fill_n(part.maxima.view().as<i64>(), 6, 77);  // is overwritten
        ops->max_abs_fp8(part.maxima, flat.rows(cuts[c], cuts[c + 1] - cuts[c]), cuts[c], s);
        for (size_t i = 0; i < 6; ++i) largest[i] = std::max(largest[i], part.maxima.view().as<i64>()[i]);
      }
      std::copy_n(largest.begin(), 6, all.maxima.view().as<i64>());
      const auto codes_at = [&](i64 first, i64 n) {
        return TensorView::of(all.codes.view().as<u8>() + first, DType::F8E4M3, {n});
      };
      for (size_t c = 0; c + 1 < cuts.size(); ++c) {
        const i64 first = cuts[c], n = cuts[c + 1] - first;
        if (n > 0) ops->encode_fp8(codes_at(first, n), flat.rows(first, n), all.maxima, first, s);
      }
      Tensor decoded(DType::BF16, {kRows, K});
      const TensorView to = decoded.view().reshaped({kAll});
      for (const auto& [first, n] :
           {std::pair<i64, i64>{0, 384 * 150 + 128}, {384 * 150 + 128, kAll - 384 * 150 - 128}})
        ops->decode_fp8(to.rows(first, n), codes_at(first, n), all.maxima, first, s);
      again.encode(*ops, decoded, false, s);
      expect_same(again, whole, std::string(ops->name) + " of values");
      for (i64 r = 0; r < kRows; ++r) {
        for (i64 k = 0; k < K; ++k) {
          ASSERT_EQ(all.codes.view().as<u8>()[r * K + k], whole.code(r, k)) << ops->name << " " << r << ", " << k;
          const double value = whole.value(r, k), got = decoded.at(r * K + k);
          ASSERT_TRUE(std::isnan(value) ? std::isnan(got) : got == value) << ops->name << " " << r << ", " << k;
        }
      }
    }
  }
}

TEST(Fp8, TheTransposedMatrixHasTransposedCodes) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : all_tables()) {
    const Tensor x = values(DType::BF16, 256, 384, 4);
    const Operand as_it_is(256, 384, Fp8Blocks::Squares, DType::F8E4M3),
        transposed(384, 256, Fp8Blocks::Squares, DType::F8E4M3);
    as_it_is.encode(*ops, x, false, s);
    transposed.encode(*ops, x, true, s);
    for (i64 r = 0; r < 256; ++r) {
      for (i64 k = 0; k < 384; ++k) {
        ASSERT_EQ(as_it_is.code(r, k), transposed.code(k, r)) << ops->name;
        ASSERT_EQ(as_it_is.scale(r, k), transposed.scale(k, r)) << ops->name;
      }
    }
  }
}

TEST(Fp8, PartsCutAtWholeBlocksHaveTheCodesOfTheWhole) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : all_tables()) {
    const Tensor x = values(DType::BF16, 256, 512, 5);
    for (const Fp8Blocks blocks : kBlocks) {
      const Operand whole(256, 512, blocks, DType::F8E4M3), part(256, 256, blocks, DType::F8E4M3);
      whole.encode(*ops, x, false, s);
      TensorView right = columns(x, 256);
      right.data = right.as<bf16>() + 256;
      part.encode(*ops, right, false, s);
      for (i64 r = 0; r < 256; ++r) {
        for (i64 k = 0; k < 256; ++k) {
          ASSERT_EQ(part.code(r, k), whole.code(r, 256 + k)) << ops->name;
          ASSERT_EQ(part.scale(r, k), whole.scale(r, 256 + k)) << ops->name;
        }
      }
    }
  }
}

TEST(Fp8, ABlockThatIsNotFiniteMakesProductsThatAreNot) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : all_tables()) {
    for (const float bad : {kInf, -kInf, kNan}) {
      Tensor x(DType::BF16, {16, 256}), w(DType::BF16, {128, 256}), y(DType::BF16, {16, 128});
      x.randomize(1);
      w.randomize(2);
      x.set(3 * 256 + 200, bad);
      const Operand a(16, 256, Fp8Blocks::Rows, DType::F8E4M3), b(128, 256, Fp8Blocks::Squares, DType::F8E4M3);
      a.encode(*ops, x, false, s);
      b.encode(*ops, w, false, s);
      EXPECT_TRUE(std::isnan(a.scale(3, 128))) << ops->name;
      EXPECT_TRUE(std::isfinite(a.scale(3, 0)) && std::isfinite(a.scale(4, 128))) << ops->name;
      for (i64 k = 128; k < 256; ++k) EXPECT_EQ(a.code(3, k), 0);
      ops->matmul_fp8(y, a.codes(), a.scales(), b.codes(), b.scales(), {}, {}, {Fp8Blocks::Rows, Fp8Blocks::Squares},
                      s);
      for (i64 r = 0; r < 16; ++r) {
        for (i64 n = 0; n < 128; ++n) ASSERT_EQ(std::isnan(y.at(r * 128 + n)), r == 3) << ops->name;
      }
    }
  }
}

// A product and its operands.
struct Product {
  i64 M, N, K;
  Fp8Blocks a_blocks, b_blocks;
  DType a_format = DType::F8E4M3, b_format = DType::F8E4M3, out = DType::BF16;
  bool bias = false, residual = false;
  i64 gap = 0;  // between rows of the result
};

Tensor multiply(const OpTable& ops, const Product& p, bool in_place, Stream& s) {
  const Tensor x = values(DType::BF16, p.M, p.K, 7), w = values(DType::BF16, p.N, p.K, 8);
  Tensor bias(DType::BF16, {p.N}), c(p.out, {p.M, p.N + p.gap}), residual(p.out, {p.M, p.N + p.gap});
  bias.randomize(9);
  residual.randomize(10);
  c.fill(1);
  if (in_place) c = residual;
  const Operand a(p.M, p.K, p.a_blocks, p.a_format), b(p.N, p.K, p.b_blocks, p.b_format);
  a.encode(ref_ops(), x, false, s);
  b.encode(ref_ops(), w, false, s);
  const TensorView none{}, to = columns(c, p.N);
  ops.matmul_fp8(to, a.codes(), a.scales(), b.codes(), b.scales(), p.bias ? bias.view() : none,
                 p.residual ? (in_place ? to : columns(residual, p.N)) : none, {p.a_blocks, p.b_blocks}, s);
  return c;
}

// The sums of the magnitudes of terms, by element of the result.
std::vector<double> magnitudes(const Product& p, Stream& s) {
  const Tensor x = values(DType::BF16, p.M, p.K, 7), w = values(DType::BF16, p.N, p.K, 8);
  const Operand a(p.M, p.K, p.a_blocks, p.a_format), b(p.N, p.K, p.b_blocks, p.b_format);
  a.encode(ref_ops(), x, false, s);
  b.encode(ref_ops(), w, false, s);
  std::vector<double> sums;
  for (i64 m = 0; m < p.M; ++m) {
    for (i64 n = 0; n < p.N + p.gap; ++n) {
      double sum = 2;  // bias and residual
      for (i64 k = 0; k < p.K && n < p.N; ++k) sum += std::abs(a.value(m, k) * b.value(n, k));
      sums.push_back(sum);
    }
  }
  return sums;
}

constexpr Product kProducts[] = {
    {16, 128, 128, Fp8Blocks::Rows, Fp8Blocks::Squares},
    {1, 128, 256, Fp8Blocks::Rows, Fp8Blocks::Squares, DType::F8E4M3, DType::F8E4M3, DType::BF16, true},
    {37, 256, 384, Fp8Blocks::Rows, Fp8Blocks::Squares, DType::F8E5M2, DType::F8E4M3, DType::BF16, true, true},
    {64, 128, 1024, Fp8Blocks::Rows, Fp8Blocks::Squares, DType::F8E4M3, DType::F8E4M3, DType::BF16, true, true},
    {128, 256, 48, Fp8Blocks::Rows, Fp8Blocks::Rows, DType::F8E5M2, DType::F8E4M3, DType::F32},
    {256, 128, 300, Fp8Blocks::Rows, Fp8Blocks::Rows, DType::F8E4M3, DType::F8E5M2, DType::BF16},
    {128, 128, 29, Fp8Blocks::Rows, Fp8Blocks::Rows, DType::F8E4M3, DType::F8E4M3, DType::F32, false, true},
    {48, 32, 256, Fp8Blocks::Squares, Fp8Blocks::Rows, DType::F8E4M3, DType::F8E4M3, DType::BF16, false, true, 8},
    {19, 23, 200, Fp8Blocks::Rows, Fp8Blocks::Rows, DType::F8E4M3, DType::F8E4M3, DType::F32, true, true, 3},
};

// In fp32, K terms and their two roundings lose at most K + 4 half units of the sum of magnitudes. Hopper adds 32 terms
// at a time to the sum of a block, each cut off at about 2^-13 of the largest; no GPU has run this bound.
TEST(Fp8, ProductsAreThoseOfRefToTheRoundingOfTheirSums) {
  ThreadPool pool(3);
  Stream s{.pool = &pool};
  for (const OpTable* ops : backends()) {
    for (const Product& p : kProducts) {
      const std::vector<double> sums = magnitudes(p, s);
      for (const bool in_place : {false, true}) {
        const Tensor want = multiply(ref_ops(), p, in_place, s), got = multiply(*ops, p, in_place, s);
        const double lost = is_gpu() ? 0x1p-10 : static_cast<double>(p.K + 4) * 0x1p-24;
        for (i64 i = 0; i < want.numel(); ++i) {
          const double g = got.at(i), w = want.at(i);  // each is rounded once to half a unit in the last place
          const double stored = p.out == DType::BF16 ? 0x1p-8 * (std::abs(g) + std::abs(w)) : 0;
          ASSERT_LE(std::abs(g - w), lost * sums[static_cast<size_t>(i)] + stored)
              << ops->name << " " << p.M << "x" << p.N << "x" << p.K << " element " << i;
        }
      }
    }
  }
}

TEST(Fp8, ThreadsChangeNoBit) {
  for (const OpTable* ops : backends()) {
    for (const Product& p : kProducts) {
      expect_same_for_any_threads([&](Stream& s) { return std::vector<Tensor>{multiply(*ops, p, false, s)}; },
                                  std::string(ops->name));
    }
  }
}

TEST(Fp8, ARowHasTheSameBitsAmongFewAndMany) {
  if (is_gpu()) GTEST_SKIP() << "cuBLASLt chooses by the number of rows";
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  constexpr i64 kRows = 400, N = 256, K = 640;
  const Tensor x = values(DType::BF16, kRows, K, 1), w = values(DType::BF16, N, K, 2);
  for (const OpTable* ops : backends()) {
    const Operand b(N, K, Fp8Blocks::Squares, DType::F8E4M3);
    b.encode(*ops, w, false, s);
    const auto product = [&](i64 first, i64 rows) {
      const Operand a(rows, K, Fp8Blocks::Rows, DType::F8E4M3);
      a.encode(*ops, x.view().rows(first, rows), false, s);
      Tensor y(DType::BF16, {rows, N});
      ops->matmul_fp8(y, a.codes(), a.scales(), b.codes(), b.scales(), {}, {}, {Fp8Blocks::Rows, Fp8Blocks::Squares},
                      s);
      return y;
    };
    const Tensor all = product(0, kRows);
    for (const auto& [first, rows] : {std::pair<i64, i64>{0, 1}, {7, 1}, {100, 3}, {390, 10}, {16, 100}}) {
      const Tensor some = product(first, rows);
      for (i64 i = 0; i < some.numel(); ++i) ASSERT_EQ(some.at(i), all.at(first * N + i)) << ops->name;
    }
  }
}

}  // namespace fp8_test
}  // namespace ds::testing
