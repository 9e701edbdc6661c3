// SPDX-License-Identifier: Apache-2.0
// Codes and scales, and back: every backend has the bits of ref; ref keeps its bounds and shows what is not finite.

#include <limits>

#include "parity.h"

namespace ds::testing {
namespace quantize_test {

constexpr i64 kSizes[] = {1, 7, 8, 15, 31, 65, 1000, 4097};
constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<const OpTable*> all_tables() {
  std::vector<const OpTable*> tables = backends();
  tables.push_back(&ref_ops());
  return tables;
}

std::string describe(const OpTable* ops, DType t, CodeFormat format, i64 n) {
  return std::string(ops->name) + " " + std::string(dtype_name(t)) + ", " + std::to_string(format.bits) +
         " bits in blocks of " + std::to_string(format.block) + ", " + std::to_string(n) + " elements";
}

// The first n elements of each row.
TensorView columns(const Tensor& t, i64 n) {
  TensorView v = t;
  v.shape[1] = n;
  return v;
}

// R rows of n elements as codes and scales, with a gap after each row, which no op may touch.
struct Coded {
  Coded(i64 R, i64 n, CodeFormat f, i64 gap = 8)
      : format(f),
        code_bytes(f.code_bytes(n)),
        num_blocks(f.num_blocks(n)),
        codes_(DType::U8, {R, code_bytes + gap}),
        scales_(DType::F32, {R, num_blocks + gap / 4}) {}

  TensorView codes() const { return columns(codes_, code_bytes); }
  TensorView scales() const { return columns(scales_, num_blocks); }
  const Tensor& all_codes() const { return codes_; }
  const Tensor& all_scales() const { return scales_; }
  float scale(i64 r, i64 i) const {
    return scales_.view().as<float>()[r * scales().stride[0] + (format.block != 0 ? i / format.block : 0)];
  }

  CodeFormat format;
  i64 code_bytes, num_blocks;

 private:
  Tensor codes_, scales_;
};

// NaN as NaN, whatever its bits.
void expect_same(const Tensor& got, const Tensor& want, const std::string& what) {
  ASSERT_EQ(got.view().bytes(), want.view().bytes()) << what;
  for (i64 i = 0; i < want.numel(); ++i) {
    if (got.view().dtype == DType::U8) {
      ASSERT_EQ(got.view().as<u8>()[i], want.view().as<u8>()[i]) << what << ", byte " << i;
    } else if (!std::isnan(want.at(i)) || !std::isnan(got.at(i))) {
      ASSERT_EQ(std::bit_cast<u32>(got.at(i)), std::bit_cast<u32>(want.at(i))) << what << ", element " << i;
    }
  }
}

// Values of very different magnitude, zeros, ties of rounding.
Tensor values(DType t, i64 R, i64 n, u32 seed) {
  Tensor x(t, {R, n});
  x.randomize(seed);
  for (i64 i = 0; i < R * n; i += 7) x.set(i, x.at(i) * 100);
  for (i64 i = 3; i < R * n; i += 11) x.set(i, 0);
  for (i64 i = 5; i < R * n; i += 13) x.set(i, -0.0f);
  return x;
}

constexpr CodeFormat kFormats[] = {{8, 8},   {8, 64}, {8, 2048},      {8, 0},        {4, 8},
                                   {4, 256}, {4, 0},  {8, 128, true}, {4, 128, true}};

TEST(Quantize, CodesAreTheDocumentedOnes) {
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  for (const OpTable* ops : all_tables()) {
    Tensor x(DType::F32, {1, 5});
    const float given[] = {-1, -0.5f, 0.3f, 1, -0.0f};
    for (i64 i = 0; i < 5; ++i) x.set(i, given[i]);
    const Coded eight(1, 5, {8, 8}), four(1, 5, {4, 8});
    ops->quantize(eight.codes(), eight.scales(), x, {}, eight.format, {}, s);
    EXPECT_EQ(eight.scale(0, 0), 1.0f / 127);
    const int want[] = {-127, -64, 38, 127, 0};
    for (i64 i = 0; i < 5; ++i) EXPECT_EQ(static_cast<std::int8_t>(eight.codes().as<u8>()[i]), want[i]) << ops->name;
    for (i64 i = 0; i < 5; ++i) x.set(i, 7 * given[i]);
    ops->quantize(four.codes(), four.scales(), x, {}, four.format, {}, s);  // -7, -4 (of -3.5), 2, 7, 0
    EXPECT_EQ(four.scale(0, 0), 1.0f);
    const u8 packed[] = {0xC9, 0x72, 0x00};
    for (i64 b = 0; b < 3; ++b) EXPECT_EQ(four.codes().as<u8>()[b], packed[b]) << ops->name << " byte " << b;
    Tensor y(DType::F32, {1, 5});
    ops->dequantize(y, four.codes(), four.scales(), four.format, s);
    EXPECT_EQ(y.at(1), -4);
  }
}

TEST(Quantize, MatchesRef) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : backends()) {
    for (DType t : kWorkDTypes) {
      for (CodeFormat format : kFormats) {
        for (i64 n : kSizes) {
          const std::string what = describe(ops, t, format, n);
          for (i64 R : {i64{1}, i64{3}}) {
            for (const i64 gap : {i64{0}, i64{5}}) {  // strided rows, and rows that lie at odd addresses
              const Tensor x = values(t, R, n + gap, 1);
              const Coded got(R, n, format, 4 * gap), want(R, n, format, 4 * gap);
              ref_ops().quantize(want.codes(), want.scales(), columns(x, n), {}, format, {}, s);
              ops->quantize(got.codes(), got.scales(), columns(x, n), {}, format, {}, s);
              expect_same(got.all_codes(), want.all_codes(), what);
              expect_same(got.all_scales(), want.all_scales(), what);

              Tensor error = values(DType::F32, R, n + gap, 2), wanted_error = error;
              const ErrorFeedback feedback{.scale = 0.5f, .decay = 0.8f};
              ref_ops().quantize(want.codes(), want.scales(), columns(x, n), columns(wanted_error, n), format, feedback,
                                 s);
              ops->quantize(got.codes(), got.scales(), columns(x, n), columns(error, n), format, feedback, s);
              expect_same(got.all_codes(), want.all_codes(), what + " with error feedback");
              expect_same(got.all_scales(), want.all_scales(), what + " with error feedback");
              expect_same(error, wanted_error, what + ", the error");
            }
          }
        }
      }
    }
  }
}

TEST(Quantize, ErrorsAreAtMostHalfAScale) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : all_tables()) {
    for (DType t : kWorkDTypes) {
      for (CodeFormat format : kFormats) {
        for (float magnitude : {1.0f, 1e-4f, 1e4f}) {
          constexpr i64 n = 3001;
          Tensor x(t, {2, n}), y(DType::F32, {2, n});
          x.randomize(3, magnitude);
          const Coded coded(2, n, format);
          ops->quantize(coded.codes(), coded.scales(), x, {}, format, {}, s);
          ops->dequantize(y, coded.codes(), coded.scales(), format, s);
          for (i64 i = 0; i < 2 * n; ++i) {
            const double scale = coded.scale(i / n, i % n), error = std::abs(double{x.at(i)} - y.at(i));
            // Quotient and product are rounded to fp32.
            ASSERT_LE(error, scale / 2 + 0x1p-22 * std::abs(x.at(i))) << describe(ops, t, format, n) << " at " << i;
          }
        }
      }
    }
  }
}

TEST(Quantize, ExactFormatsDecodeToTheSameNumbersInEveryDtypeAndAgainToTheSameCodes) {
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  for (const OpTable* ops : all_tables()) {
    for (CodeFormat format : {CodeFormat{8, 128, true}, CodeFormat{4, 128, true}}) {
      for (float magnitude : {1.0f, 0.02f, 1e-7f, 3e-9f, 200.0f}) {
        constexpr i64 n = 5000;
        Tensor x(DType::F32, {1, n});
        x.randomize(3, magnitude);
        const Coded coded(1, n, format), again(1, n, format);
        ops->quantize(coded.codes(), coded.scales(), x, {}, format, {}, s);
        Tensor exact(DType::F32, {1, n});
        ops->dequantize(exact, coded.codes(), coded.scales(), format, s);
        for (i64 i = 0; i < n; ++i) {
          int exponent = 0;
          EXPECT_EQ(std::frexp(coded.scale(0, i), &exponent), 0.5f) << "a power of two";
          EXPECT_GE(exponent, -23);
        }
        for (DType t : kWorkDTypes) {
          Tensor y(t, {1, n});
          ops->dequantize(y, coded.codes(), coded.scales(), format, s);
          for (i64 i = 0; i < n; ++i) ASSERT_EQ(y.at(i), exact.at(i)) << describe(ops, t, format, n) << " at " << i;
          ops->quantize(again.codes(), again.scales(), y, {}, format, {}, s);
          expect_same(again.all_codes(), coded.all_codes(), describe(ops, t, format, n));
          expect_same(again.all_scales(), coded.all_scales(), describe(ops, t, format, n));
        }
      }
    }
  }
}

TEST(Quantize, ExtremeBlocksKeepTheBound) {
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  for (const OpTable* ops : all_tables()) {
    for (CodeFormat format : {CodeFormat{8, 8}, CodeFormat{4, 8}}) {
      for (float largest : {0.0f, 1e-45f, 1e-40f, 1.2e-38f, 1.4e-36f, 1.6e-36f, 1.0f, 3.4e38f}) {
        Tensor x(DType::F32, {1, 8}), y(DType::F32, {1, 8});
        for (i64 i = 0; i < 8; ++i) x.set(i, largest * (static_cast<float>(i - 3) / 4));
        const Coded coded(1, 8, format);
        ops->quantize(coded.codes(), coded.scales(), x, {}, format, {}, s);
        ops->dequantize(y, coded.codes(), coded.scales(), format, s);
        const double scale = coded.scale(0, 0);
        EXPECT_EQ(scale, largest == 0 ? 1.0 : std::max(0x1p-126, scale)) << ops->name << " " << largest;
        for (i64 i = 0; i < 8; ++i) {
          EXPECT_LE(std::abs(double{x.at(i)} - y.at(i)), scale / 2 + 0x1p-22 * std::abs(x.at(i)))
              << ops->name << " " << largest << " at " << i;
        }
        if (largest == 0) {
          EXPECT_EQ(y.at(0), 0.0f);
        }
      }
    }
  }
}

TEST(Quantize, WhatIsNotFiniteShowsInItsBlockAndInNoOther) {
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  for (const OpTable* ops : all_tables()) {
    for (DType t : kWorkDTypes) {
      for (CodeFormat format : {CodeFormat{8, 16}, CodeFormat{4, 16}}) {
        for (float bad : {kInf, -kInf, kNan, -kNan}) {
          constexpr i64 n = 43;
          Tensor x = values(t, 1, n, 4), error(DType::F32, {1, n}), y(t, {1, n}), sum(DType::F32, {n});
          error.fill(0.25f);
          x.set(21, bad);
          const Coded coded(1, n, format);
          ops->quantize(coded.codes(), coded.scales(), x, error, format, {}, s);
          ops->dequantize(y, coded.codes(), coded.scales(), format, s);
          ops->dequantize_fold(sum, coded.codes(), coded.scales(), false, 1, format, s);
          for (i64 i = 0; i < n; ++i) {
            const bool hit = i / 16 == 21 / 16;
            EXPECT_EQ(std::isnan(y.at(i)), hit) << describe(ops, t, format, n) << " at " << i;
            EXPECT_EQ(std::isnan(sum.at(i)), hit) << describe(ops, t, format, n) << " at " << i;
            EXPECT_TRUE(std::isfinite(error.at(i))) << describe(ops, t, format, n) << " at " << i;
            if (hit) {
              EXPECT_EQ(error.at(i), 0.0f);
            }
          }
        }
      }
    }
  }
}

// x + scale*e = the decoded values + the new error, if nothing decays: a loss of this step is in the error of the next.
TEST(Quantize, TheErrorIsWhatTheCodesLeaveOut) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : all_tables()) {
    for (DType t : kWorkDTypes) {
      for (CodeFormat format : kFormats) {
        constexpr i64 n = 517;
        const Tensor x = values(t, 1, n, 5), before = values(DType::F32, 1, n, 6);
        for (const ErrorFeedback feedback : {ErrorFeedback{}, {.scale = 0}, {.scale = 2, .decay = 0.8f}}) {
          Tensor error = before, y(DType::F32, {1, n});
          const Coded coded(1, n, format);
          ops->quantize(coded.codes(), coded.scales(), x, error, format, feedback, s);
          ops->dequantize(y, coded.codes(), coded.scales(), format, s);
          for (i64 i = 0; i < n; ++i) {
            const float kept = feedback.scale * before.at(i), compensated = x.at(i) + kept;
            const float old = feedback.decay * kept, fresh = (1 - feedback.decay) * (compensated - y.at(i));
            ASSERT_EQ(error.at(i), old + fresh) << describe(ops, t, format, n) << " at " << i;
          }
        }
      }
    }
  }
}

TEST(Quantize, SignsMatchRef) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : all_tables()) {
    for (i64 n : kSizes) {
      Tensor got = values(DType::F32, 1, n, 8);
      got = [&] {
        Tensor flat(DType::F32, {n});
        for (i64 i = 0; i < n; ++i) flat.set(i, got.at(i));
        return flat;
      }();
      const Tensor y = got;
      i64 largest = max_abs_bits(ref_ops(), y, s);
      const ExactSum squares = sum_squares(ref_ops(), y, static_cast<u32>(largest), s);
      i64 sum[2] = {squares.hi, squares.lo};
      Tensor codes(DType::U8, {(n + 7) / 8}), scale(DType::F32, {1});
      ops->quantize_signs(codes, scale, got, TensorView::of(&largest, DType::I64, {1}),
                          TensorView::of(sum, DType::I64, {2}), n, s);
      double exact = 0;
      for (i64 i = 0; i < n; ++i) exact += double{y.at(i)} * y.at(i);
      EXPECT_NEAR(scale.at(0), std::sqrt(exact / static_cast<double>(n)), 1e-7 * scale.at(0));
      Tensor decoded(DType::F32, {1, n});
      ops->dequantize(decoded, codes.view().reshaped({1, (n + 7) / 8}), scale.view().reshaped({1, 1}), {1, 0}, s);
      for (i64 i = 0; i < n; ++i) {
        const bool negative = y.at(i) < 0;  // neither zero is
        ASSERT_EQ((codes.view().as<u8>()[i / 8] >> i % 8 & 1) != 0, negative) << ops->name << " " << n << " at " << i;
        ASSERT_EQ(decoded.at(i), negative ? -scale.at(0) : scale.at(0)) << ops->name << " " << n << " at " << i;
        ASSERT_EQ(got.at(i), y.at(i) - decoded.at(i)) << ops->name << " " << n << " at " << i;
      }
      for (i64 i = n; i % 8 != 0; ++i) EXPECT_EQ(codes.view().as<u8>()[i / 8] >> i % 8 & 1, 0) << ops->name;
    }
  }
}

TEST(Quantize, SignsOfWhatIsNotFiniteAreNanAndLeaveNoError) {
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  for (const OpTable* ops : all_tables()) {
    for (float bad : {kInf, kNan}) {
      constexpr i64 n = 43;
      Tensor y(DType::F32, {n}), codes(DType::U8, {6}), scale(DType::F32, {1}), decoded(DType::F32, {1, n});
      y.randomize(9).set(40, bad);
      i64 largest = max_abs_bits(*ops, y, s), sum[2] = {};
      ops->quantize_signs(codes, scale, y, TensorView::of(&largest, DType::I64, {1}),
                          TensorView::of(sum, DType::I64, {2}), n, s);
      ops->dequantize(decoded, codes.view().reshaped({1, 6}), scale.view().reshaped({1, 1}), {1, 0}, s);
      for (i64 i = 0; i < n; ++i) {
        EXPECT_TRUE(std::isnan(decoded.at(i))) << ops->name;
        EXPECT_EQ(y.at(i), 0.0f) << ops->name;
      }
    }
    Tensor none(DType::F32, {0}), codes(DType::U8, {0}), scale(DType::F32, {1});
    i64 largest = 0, sum[2] = {};
    ops->quantize_signs(codes, scale, none, TensorView::of(&largest, DType::I64, {1}),
                        TensorView::of(sum, DType::I64, {2}), 0, s);
    EXPECT_EQ(scale.at(0), 0.0f) << ops->name << ": of no elements";
  }
}

// Random codes of any width, and their scales.
Coded any_codes(i64 R, i64 n, CodeFormat format, i64 gap, u32 seed) {
  Coded coded(R, n, format, gap);
  const RngKey key{seed, 3, 0};
  for (i64 i = 0; i < coded.all_codes().numel(); ++i)
    coded.all_codes().view().as<u8>()[i] = static_cast<u8>(key.block(static_cast<u64>(i))[0] >> 9);
  for (i64 i = 0; i < coded.all_scales().numel(); ++i)
    coded.all_scales().view().as<float>()[i] = 0.01f + RngKey::uniform(key.block(static_cast<u64>(i))[1]);
  return coded;
}

constexpr CodeFormat kAllFormats[] = {{8, 64}, {8, 2048}, {8, 0}, {4, 8}, {4, 256}, {1, 0}, {1, 64}};

TEST(Quantize, DequantizeMatchesRef) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : backends()) {
    for (DType t : kWorkDTypes) {
      for (CodeFormat format : kAllFormats) {
        for (i64 n : kSizes) {
          for (const i64 gap : {i64{0}, i64{5}}) {
            const Coded coded = any_codes(3, n, format, 4 * gap, 10);
            Tensor got(t, {3, n + gap}), want = got;
            ref_ops().dequantize(columns(want, n), coded.codes(), coded.scales(), format, s);
            ops->dequantize(columns(got, n), coded.codes(), coded.scales(), format, s);
            expect_same_bits(got, want, describe(ops, t, format, n));
          }
        }
      }
    }
  }
}

TEST(Quantize, FoldAddsRowsInTheirOrder) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : all_tables()) {
    for (CodeFormat format : kAllFormats) {
      for (i64 n : kSizes) {
        for (i64 R : {i64{1}, i64{2}, i64{5}}) {
          const Coded coded = any_codes(R, n, format, 12, 11);
          Tensor rows(DType::F32, {R, n});
          ref_ops().dequantize(rows, coded.codes(), coded.scales(), format, s);
          for (const bool accumulate : {false, true}) {
            for (const float divisor : {1.0f, 3.0f}) {
              Tensor got(DType::F32, {n});
              got.randomize(12, 10.0f);
              Tensor want = got;
              for (i64 i = 0; i < n; ++i) {
                float sum = rows.at(i);
                for (i64 r = 1; r < R; ++r) sum += rows.at(r * n + i);
                want.set(i, accumulate ? want.at(i) + sum / divisor : sum / divisor);
              }
              ops->dequantize_fold(got, coded.codes(), coded.scales(), accumulate, divisor, format, s);
              expect_same_bits(got, want, describe(ops, DType::F32, format, n) + ", rows " + std::to_string(R));
            }
          }
        }
      }
    }
  }
}

TEST(Quantize, ResultsDoNotDependOnThreads) {
  constexpr i64 n = 40001;
  for (const OpTable* ops : backends()) {
    for (CodeFormat format : {CodeFormat{8, 64}, CodeFormat{4, 2048}, CodeFormat{8, 0}}) {
      expect_same_for_any_threads(
          [&](Stream& s) {
            const Tensor x = values(DType::BF16, 2, n, 13);
            Tensor error = values(DType::F32, 2, n, 14), y(DType::BF16, {2, n}), sum(DType::F32, {n});
            const Coded coded(2, n, format);
            ops->quantize(coded.codes(), coded.scales(), x, error, format, {.decay = 0.8f}, s);
            ops->dequantize(y, coded.codes(), coded.scales(), format, s);
            ops->dequantize_fold(sum, coded.codes(), coded.scales(), false, 2, format, s);
            return std::vector<Tensor>{coded.all_codes(), coded.all_scales(), error, y, sum};
          },
          describe(ops, DType::BF16, format, n));
    }
  }
}

}  // namespace quantize_test
}  // namespace ds::testing
