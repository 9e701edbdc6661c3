// SPDX-License-Identifier: Apache-2.0
// add, bias_residual, cast, fold and the two integer reductions. All are exact or rounded once, so backends agree with
// ref bit for bit.

#include <limits>
#include <random>

#include "parity.h"

namespace ds::testing {
namespace elementwise_test {

constexpr i64 kSizes[] = {1, 7, 15, 16, 17, 63, 64, 65, 1000, 4097, 50000};

std::vector<const OpTable*> all_tables() {
  std::vector<const OpTable*> tables = backends();
  tables.push_back(&ref_ops());
  return tables;
}

std::string describe(const OpTable* ops, DType t, i64 n) {
  return std::string(ops->name) + " " + std::string(dtype_name(t)) + " " + std::to_string(n);
}

TEST(Elementwise, AddMatchesRef) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : backends()) {
    for (DType t : kWorkDTypes) {
      for (i64 n : kSizes) {
        Tensor a(t, {n}), b(t, {n}), got(t, {n}), want(t, {n});
        a.randomize(1);
        b.randomize(2, 100.0f);
        ref_ops().add(want, a, b, s);
        ops->add(got, a, b, s);
        expect_same_bits(got, want, describe(ops, t, n));
        Tensor onto_a = a;
        ops->add(onto_a, onto_a, b, s);
        expect_same_bits(onto_a, want, describe(ops, t, n) + " onto a");
        ops->add(b, a, b, s);
        expect_same_bits(b, want, describe(ops, t, n) + " onto b");
      }
    }
  }
}

TEST(Elementwise, BiasAndResidualAreAddedInOrderAndRoundedOnce) {
  struct Shape {
    i64 R, C;
  };
  for (const OpTable* ops : backends()) {
    for (DType t : kWorkDTypes) {
      for (const auto [R, C] : {Shape{1, 1}, {3, 7}, {5, 64}, {33, 130}, {2, 4099}, {700, 24}, {0, 5}}) {
        for (int parts = 0; parts < 4; ++parts) {
          const std::string what = describe(ops, t, C) + " parts " + std::to_string(parts);
          Tensor x(DType::F32, {R, C}), bias(t, {C}), residual(t, {R, C}), want(t, {R, C}), of_ref(t, {R, C});
          x.randomize(1, 3.0f);
          bias.randomize(2);
          residual.randomize(3, 100.0f);
          const TensorView b = (parts & 1) != 0 ? bias.view() : TensorView{};
          const TensorView r = (parts & 2) != 0 ? residual.view() : TensorView{};
          for (i64 i = 0; i < R * C; ++i) {
            float sum = x.at(i);
            if (b) sum += bias.at(i % C);
            if (r) sum += residual.at(i);
            want.set(i, sum);
          }
          expect_same_for_any_threads(
              [&](Stream& s) {
                Tensor got(t, {R, C}), in_place = residual;
                ops->bias_residual(got, x, b, r, s);
                expect_same_bits(got, want, what);
                ref_ops().bias_residual(of_ref, x, b, r, s);
                expect_close(got, of_ref, 2.1, what + " ref");
                ops->bias_residual(in_place, x, b, r ? in_place.view() : r, s);
                expect_same_bits(in_place, want, what + " onto the residual");
                for (const i64 gap : {1, 8}) {  // strided rows
                  Tensor wide(t, {R, C + gap});
                  for (i64 i = 0; i < R * C; ++i) wide.set(i / C * (C + gap) + i % C, residual.at(i));
                  TensorView rows = wide;
                  rows.shape[1] = C;
                  for (const OpTable* of : {ops, &ref_ops()}) {
                    Tensor again = wide;
                    TensorView y = again;
                    y.shape[1] = C;
                    of->bias_residual(y, x, b, r ? rows : r, s);
                    Tensor taken(t, {R, C});
                    for (i64 i = 0; i < R * C; ++i) taken.set(i, again.at(i / C * (C + gap) + i % C));
                    of == ops ? expect_same_bits(taken, want, what + " strided")
                              : expect_close(taken, want, 2.1, what + " strided ref");
                  }
                }
                if (t == DType::F32) {
                  Tensor onto_x = x;
                  ops->bias_residual(onto_x, onto_x, b, r, s);
                  expect_same_bits(onto_x, want, what + " onto x");
                }
                return std::vector<Tensor>{got};
              },
              what);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(Elementwise, CastMatchesRef) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : backends()) {
    for (DType from : kWorkDTypes) {
      for (DType to : kWorkDTypes) {
        for (i64 n : kSizes) {
          Tensor x(from, {n}), got(to, {n}), want(to, {n});
          x.randomize(1, 1000.0f);  // some overflow fp16's range of rounding, none its exponent
          if (n > 16) x.set(3, 1e30f), x.set(5, -std::numeric_limits<float>::infinity()), x.set(6, 1e-7f);
          ref_ops().cast(want, x, s);
          ops->cast(got, x, s);
          expect_same_bits(got, want, describe(ops, to, n) + " from " + std::string(dtype_name(from)));
        }
      }
    }
  }
}

TEST(Elementwise, FoldKeepsTheOrderOfItsSources) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : all_tables()) {
    for (DType t : kWorkDTypes) {
      for (i64 n : kSizes) {
        for (size_t count : {size_t{1}, size_t{2}, size_t{5}}) {
          for (bool accumulate : {false, true}) {
            std::vector<Tensor> sources;
            for (size_t k = 0; k < count; ++k) {
              sources.emplace_back(t, std::initializer_list<i64>{n})
                  .randomize(static_cast<u32>(k), k == 1 ? 1e4f : 1.0f);
            }
            const std::vector<TensorView> views(sources.begin(), sources.end());
            Tensor got(DType::F32, {n});
            got.randomize(77);
            Tensor want = got;
            for (i64 i = 0; i < n; ++i) {
              float sum = accumulate ? want.at(i) : sources[0].at(i);
              for (size_t k = accumulate ? 0 : 1; k < count; ++k) sum += sources[k].at(i);
              want.set(i, sum);
            }
            ops->fold(got, views, accumulate, s);
            expect_same_bits(got, want, describe(ops, t, n) + " sources " + std::to_string(count));
            if (t == DType::F32 && !accumulate) {  // onto each of the sources
              for (size_t k = 0; k < count; ++k) {
                const Tensor saved = sources[k];
                ops->fold(sources[k], views, false, s);
                expect_same_bits(sources[k], want, describe(ops, t, n) + " onto source " + std::to_string(k));
                std::memcpy(sources[k].view().data, saved.view().data, static_cast<size_t>(saved.view().bytes()));
              }
            }
          }
        }
      }
    }
  }
}

TEST(Elementwise, MaxAbsBitsOrdersNanAboveInfAboveFinite) {
  for (const OpTable* ops : all_tables()) {
    for (DType t : kWorkDTypes) {
      for (i64 n : kSizes) {
        expect_same_for_any_threads(
            [&](Stream& s) {
              Tensor x(t, {n});
              x.randomize(4, 2.0f);
              float largest = 0;
              for (i64 i = 0; i < n; ++i) largest = std::max(largest, std::abs(x.at(i)));
              EXPECT_EQ(max_abs_bits(*ops, x, s), std::bit_cast<u32>(largest)) << describe(ops, t, n);
              x.set(n / 2, -std::numeric_limits<float>::infinity());
              EXPECT_EQ(max_abs_bits(*ops, x, s), 0x7F800000u) << describe(ops, t, n);
              x.set(n - 1, -std::numeric_limits<float>::quiet_NaN());
              EXPECT_GT(max_abs_bits(*ops, x, s), 0x7F800000u) << describe(ops, t, n);
              x.fill(-0.0f);
              EXPECT_EQ(max_abs_bits(*ops, x, s), 0u) << describe(ops, t, n);
              return std::vector<Tensor>{};
            },
            describe(ops, t, n));
      }
    }
  }
}

// Zeros of either sign are nothing; the least number, the last element and NaN are something.
TEST(Elementwise, NonzeroRowsAreFound) {
  for (const OpTable* ops : all_tables()) {
    for (DType t : kWorkDTypes) {
      for (const i64 R : {i64{1}, i64{7}, i64{1000}}) {
        for (const i64 C : {i64{1}, i64{5}, i64{64}, i64{333}}) {
          expect_same_for_any_threads(
              [&](Stream& s) {
                Tensor x(t, {R, C}), flags(DType::U8, {R});
                x.fill(0.0f);
                for (i64 i = 0; i < R * C; i += 3) x.set(i, -0.0f);
                x.set(C - 1, t == DType::BF16 ? 0x1p-133f : t == DType::F16 ? 0x1p-24f : 0x1p-149f);
                for (i64 r = 3; r < R; r += 3)
                  x.set(r * C + r % C, r % 2 == 0 ? -1.0f : std::numeric_limits<float>::quiet_NaN());
                ops->nonzero_rows(flags, x, s);
                for (i64 r = 0; r < R; ++r)
                  EXPECT_EQ(flags.view().as<u8>()[r], r % 3 == 0 ? 1 : 0) << describe(ops, t, C) << " row " << r;
                return std::vector<Tensor>{};
              },
              describe(ops, t, C));
        }
      }
    }
  }
}

double fp64_sum_squares(const Tensor& x) {
  long double sum = 0;
  for (i64 i = 0; i < x.numel(); ++i) sum += static_cast<long double>(x.at(i)) * static_cast<long double>(x.at(i));
  return static_cast<double>(sum);
}

TEST(Elementwise, SumSquaresEqualsTheExactSum) {
  ThreadPool pool(3);
  Stream s{.pool = &pool};
  for (const OpTable* ops : all_tables()) {
    for (DType t : kWorkDTypes) {
      for (i64 n : kSizes) {
        Tensor x(t, {n});
        x.randomize(8, 0.01f);
        const u32 bits = max_abs_bits(*ops, x, s);
        const int exponent = ExactSum::exponent_of(bits);
        const ExactSum sum = sum_squares(*ops, x, bits, s), want = sum_squares(ref_ops(), x, bits, s);
        EXPECT_EQ(sum.hi, want.hi) << describe(ops, t, n);
        EXPECT_EQ(sum.lo, want.lo) << describe(ops, t, n);
        const double exact = fp64_sum_squares(x);
        EXPECT_NEAR(sum.value(exponent), exact, 1e-12 * exact) << describe(ops, t, n);
      }
    }
  }
}

TEST(Elementwise, SumSquaresDependsOnNoOrderAndNoPartition) {
  constexpr i64 n = 70001;
  Tensor x(DType::F32, {n});
  x.randomize(6);
  for (i64 i = 0; i < n; i += 3) x.set(i, x.at(i) * std::ldexp(1.0f, static_cast<int>(i % 60) - 55));
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  std::mt19937 random(1);
  for (const OpTable* ops : all_tables()) {
    const u32 bits = max_abs_bits(*ops, x, s);
    const int exponent = ExactSum::exponent_of(bits);
    const double want = sum_squares(*ops, x, bits, s).value(exponent);
    Tensor shuffled = x;
    for (int round = 0; round < 3; ++round) {
      std::shuffle(shuffled.view().as<float>(), shuffled.view().as<float>() + n, random);
      ExactSum total;
      for (i64 at = 0; at < n;) {
        const i64 count = std::min<i64>(n - at, 1 + static_cast<i64>(random() % 9000));
        const ExactSum part = sum_squares(*ops, shuffled.view().rows(at, count), bits, s);
        EXPECT_GE(part.lo, 0);
        EXPECT_LT(part.lo, i64{1} << 32);
        total.hi += part.hi;
        total.lo += part.lo;
        at += count;
      }
      EXPECT_EQ(total.value(exponent), want) << ops->name;  // the same double, not a near one
    }
  }
}

TEST(Elementwise, SumSquaresOfExtremes) {
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  for (const OpTable* ops : all_tables()) {
    for (float value : {0.0f, 1e-45f, -1e-45f, 1e-40f, 1.1754944e-38f, 1.0f, -0.99999994f, 2.0f, 3.4028235e38f}) {
      Tensor x(DType::F32, {40});
      x.fill(value);
      const u32 bits = max_abs_bits(*ops, x, s);
      const int exponent = ExactSum::exponent_of(bits);
      EXPECT_LT(std::abs(static_cast<double>(value)), std::ldexp(1.0, exponent)) << value;
      const double want = 40.0 * static_cast<double>(value) * static_cast<double>(value);
      // A subnormal maximum has fewer digits than the unit resolves: the exponent stops at -126.
      const double slack = std::abs(value) < 1e-38f ? 40 * std::ldexp(0.5, 2 * exponent - 50) : 1e-14 * want;
      EXPECT_NEAR(sum_squares(*ops, x, bits, s).value(exponent), want, slack) << ops->name << " " << value;
    }
    // A full tile of the largest value for its exponent: the lanes must not overflow.
    Tensor x(DType::F32, {1 << 18});
    x.fill(std::nextafter(1024.0f, 0.0f));
    EXPECT_NEAR(sum_squares(*ops, x, max_abs_bits(*ops, x, s), s).value(10) / fp64_sum_squares(x), 1, 1e-12)
        << ops->name;
  }
}

}  // namespace elementwise_test
}  // namespace ds::testing
