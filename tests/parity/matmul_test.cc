// SPDX-License-Identifier: Apache-2.0
// The matrix product and the column sum against the oracle: orientations, dtypes, epilogues, strides, edges, threads;
// and the gradients of the linear map that is made of them, against finite differences.

#include <fmt/format.h>

#include <cstring>

#include "ds/building_blocks.h"
#include "parity/finite_difference.h"
#include "parity/parity.h"
#include "slow_set.h"

namespace ds::testing {
namespace matmul_test {

// A matrix whose rows lie apart; the memory between them must stay as it is, and is compared too.
struct Matrix {
  Tensor all;
  TensorView view;
  Matrix() = default;
  Matrix(DType dtype, i64 rows, i64 columns, i64 gap, u32 seed) : all(dtype, {rows, columns + gap}) {
    all.randomize(seed);
    bind(columns);
  }
  Matrix(const Matrix& o) : all(o.all) { bind(o.view.dim(1)); }
  Matrix& operator=(const Matrix& o) {
    all = o.all;
    bind(o.view.dim(1));
    return *this;
  }

 private:
  void bind(i64 columns) {
    view = all.view();
    view.shape[1] = columns;
  }
};

struct Case {
  i64 M, N, K;
  DType work = DType::F32, out = DType::F32;
  MatmulParams params{};
  bool bias = false, preact = false, residual = false, in_place = false;
  i64 gap = 0;

  std::string name() const {
    std::string s = std::to_string(M) + "x" + std::to_string(N) + "x" + std::to_string(K) + " ";
    s += std::string(dtype_name(work)) + " to " + std::string(dtype_name(out));
    s += params.trans_a ? " T" : " N";
    s += params.trans_b ? "T" : "N";
    if (params.accumulate) s += " accumulate";
    s += " activation " + std::to_string(static_cast<int>(params.activation));
    return s + (bias ? " bias" : "") + (preact ? " preact" : "") +
           (residual ? in_place ? " in place" : " residual" : "");
  }
};

struct Result {
  Tensor c, preact;
};

Result run(const OpTable& ops, const Case& t, int threads) {
  ThreadPool pool(threads);
  Stream stream{&pool};
  const Matrix a(t.work, t.params.trans_a ? t.K : t.M, t.params.trans_a ? t.M : t.K, t.gap, 1);
  const Matrix b(t.work, t.params.trans_b ? t.N : t.K, t.params.trans_b ? t.K : t.N, 2 * t.gap, 2);
  Matrix c(t.out, t.M, t.N, 3 * t.gap, 3), preact(t.out, t.M, t.N, t.gap, 4), residual(t.out, t.M, t.N, 0, 5);
  Tensor bias(t.work, {t.N});
  bias.randomize(6);
  const TensorView none{};
  ops.matmul(c.view, a.view, b.view, t.bias ? bias.view() : none, t.preact ? preact.view : none,
             t.in_place   ? c.view
             : t.residual ? residual.view
                          : none,
             t.params, stream);
  return {c.all, preact.all};
}

// A sum of K products in fp32 may be off by about sqrt(K) roundings; then a 16-bit result may round to the other side.
double tolerance(const Case& t) { return t.out == DType::F32 ? 16 + 2 * std::sqrt(static_cast<double>(t.K)) : 2.1; }

void check(const Case& t) {
  const Result want = run(ref_ops(), t, 1);
  for (const OpTable* ops : backends()) {
    const std::string what = std::string(ops->name) + " " + t.name();
    const Result got = run(*ops, t, 2);
    expect_close(got.c, want.c, tolerance(t), what);
    expect_close(got.preact, want.preact, tolerance(t), what + ": preact");
    if (::testing::Test::HasFatalFailure()) return;
  }
}

// Every dtype, output dtype and orientation.
template <class F>
void for_all_kinds(F&& f) {
  for (DType work : kWorkDTypes) {
    for (DType out : {DType::F32, work}) {
      for (bool trans_a : {false, true}) {
        for (bool trans_b : {false, true}) {
          f(work, out, MatmulParams{.trans_a = trans_a, .trans_b = trans_b});
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
      if (work == DType::F32) break;
    }
  }
}

TEST(Matmul, AgreesWithTheOracleForAllShapes) {
  const i64 shapes[][3] = {{1, 1, 1},   {1, 70, 33},   {2, 129, 401}, {3, 5, 3},     {4, 64, 17},    {4, 131, 385},
                           {5, 3, 7},   {6, 16, 2},    {7, 33, 19},   {13, 31, 15},  {14, 32, 16},   {15, 257, 65},
                           {17, 1, 90}, {29, 50, 383}, {31, 65, 384}, {33, 40, 385}, {43, 100, 801}, {57, 63, 64}};
  test::EveryNth tried(7);
  for (const auto& s : shapes) {
    for_all_kinds([&](DType work, DType out, MatmulParams params) {
      for (const i64 gap : {0, 5}) {
        if (tried()) check({.M = s[0], .N = s[1], .K = s[2], .work = work, .out = out, .params = params, .gap = gap});
      }
    });
    if (HasFatalFailure()) return;
  }
}

// The CUDA backend makes two products of one with a large dimension that is no multiple of 8, where rows have a
// distance that is one.
TEST(Matmul, LargeRaggedDimensions) {
  for (DType work : kWorkDTypes) {
    for (DType out : {DType::F32, work}) {
      check(
          {.M = 6, .N = 1028, .K = 40, .work = work, .out = out, .params = {.trans_b = true}, .bias = true, .gap = 4});
      check({.M = 6,
             .N = 1028,
             .K = 33,
             .work = work,
             .out = out,
             .params = {.trans_b = true, .activation = Activation::GeluTanh},
             .preact = true,
             .gap = 4});
      check({.M = 1028, .N = 24, .K = 16, .work = work, .out = out, .params = {.trans_a = true}, .gap = 4});
      check({.M = 5, .N = 16, .K = 1028, .work = work, .out = out, .gap = 4});
      check({.M = 5, .N = 16, .K = 1028, .work = work, .out = out, .params = {.accumulate = true}, .gap = 4});
      check({.M = 5, .N = 16, .K = 1028, .work = work, .out = out, .residual = true, .gap = 4});
      if (work == DType::F32) break;
    }
  }
}

TEST(Matmul, EpiloguesAreAppliedOnceAndRoundedOnce) {
  for (i64 M : {3, 20}) {
    for (i64 K : {40, 900}) {
      for (DType work : kWorkDTypes) {
        for (DType out : {work, DType::F32}) {
          Case t{.M = M, .N = 70, .K = K, .work = work, .out = out, .params = {.trans_b = true}, .gap = 3};
          for (Activation f : {Activation::None, Activation::GeluTanh, Activation::GeluErf, Activation::Silu}) {
            t.params.activation = f;
            for (int parts = K == 40 ? 0 : 7; parts < 8; ++parts) {
              t.bias = (parts & 1) != 0;
              t.preact = (parts & 2) != 0;
              t.residual = (parts & 4) != 0;
              t.in_place = t.residual && t.preact;
              check(t);
              if (HasFatalFailure()) return;
            }
          }
          t.params.activation = Activation::None;
          t.bias = t.preact = t.residual = t.in_place = false;
          t.params.accumulate = true;
          check(t);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// A product is summed by itself and then added, so that sums over micro-batches do not depend on how it is cut.
TEST(Matmul, AddsProductsThatAreSummedBefore) {
  const i64 shapes[][3] = {{1, 70, 33},    {4, 131, 385},   {7, 33, 19},   {33, 40, 385},
                           {43, 100, 801}, {130, 70, 1024}, {6, 1028, 40}, {1028, 24, 16}};
  for (const OpTable* ops : backends()) {
    for (const auto& s : shapes) {
      for_all_kinds([&](DType work, DType out, MatmulParams params) {
        if (out != DType::F32) return;
        Case t{.M = s[0], .N = s[1], .K = s[2], .work = work, .out = out, .params = params};
        Tensor want = run(*ops, t, 2).c;
        const Matrix before(out, t.M, t.N, 0, 3);
        for (i64 i = 0; i < want.numel(); ++i) want.set(i, before.all.at(i) + want.at(i));
        t.params.accumulate = true;
        expect_same_bits(run(*ops, t, 2).c, want, std::string(ops->name) + " " + t.name());
      });
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Matmul, AnEmptySumIsZeroAndStillGetsItsEpilogue) {
  for (i64 M : {1, 4, 20}) {
    for_all_kinds([&](DType work, DType out, MatmulParams params) {
      check({.M = M, .N = 40, .K = 0, .work = work, .out = out, .params = params});
      check({.M = M, .N = 40, .K = 0, .work = work, .out = out, .params = params, .bias = true, .residual = true});
      params.accumulate = true;
      check({.M = M, .N = 40, .K = 0, .work = work, .out = out, .params = params});
    });
    if (HasFatalFailure()) return;
  }
}

TEST(Matmul, BitsDoNotDependOnThreads) {
  const i64 shapes[][3] = {{1, 300, 500}, {4, 500, 77}, {50, 290, 900}, {1030, 40, 33}, {20, 1100, 33}};
  test::EveryNth tried(7);
  for (const OpTable* ops : backends()) {
    for (const auto& s : shapes) {
      for_all_kinds([&](DType work, DType out, MatmulParams params) {
        if ((out == DType::F32 && work != out) || !tried()) return;
        params.activation = Activation::GeluTanh;
        const Case t{.M = s[0], .N = s[1], .K = s[2], .work = work, .out = out, .params = params, .bias = true};
        const Result one = run(*ops, t, 1);
        for (int threads : {2, 3, 5}) {
          const std::string what = std::string(ops->name) + " " + t.name() + " threads " + std::to_string(threads);
          expect_same_bits(run(*ops, t, threads).c, one.c, what);
        }
      });
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Matmul, RowwiseGivesEachRowTheBitsThatItHasAlone) {
  test::EveryNth tried(7);
  for (const OpTable* ops : backends()) {
    for (const auto& [M, N, K] : {std::array<i64, 3>{2, 150, 411},
                                  {5, 150, 411},
                                  {33, 150, 411},
                                  {17, 131, 1801},
                                  {63, 40, 1088},
                                  {70, 150, 1801},
                                  {130, 129, 577}}) {
      for_all_kinds([&, M = M, N = N, K = K](DType work, DType out, MatmulParams params) {
        if (params.trans_a || (M > 16 && test_device() != nullptr && !tried())) return;
        params.activation = Activation::GeluTanh;
        params.rowwise = true;
        ThreadPool pool(2);
        Stream stream{&pool};
        const Matrix a(work, M, K, 0, 1), b(work, params.trans_b ? N : K, params.trans_b ? K : N, 3, 2),
            residual(out, M, N, 0, 5);
        Matrix all(out, M, N, 0, 3), alone(out, M, N, 0, 4);
        ops->matmul(all.view, a.view, b.view, {}, {}, residual.view, params, stream);
        for (i64 r = 0; r < M; ++r)
          ops->matmul(alone.view.rows(r, 1), a.view.rows(r, 1), b.view, {}, {}, residual.view.rows(r, 1), params,
                      stream);
        const Case t{.M = M, .N = N, .K = K, .work = work, .out = out, .params = params, .residual = true};
        expect_same_bits(all.all, alone.all, std::string(ops->name) + " " + t.name());
      });
      if (HasFatalFailure()) return;
    }
  }
}

// Every number of rows up to beyond the largest tile, of which each is the last of one product and inside another.
TEST(Matmul, RowwiseProductsOfAnyNumberOfRowsAgree) {
  constexpr i64 kMany = 70, N = 41, K = 1101;
  for (const OpTable* ops : backends()) {
    for (const DType work : kWorkDTypes) {
      for (const bool trans_b : {true, false}) {
        ThreadPool pool(2);
        Stream stream{&pool};
        const MatmulParams params{.trans_b = trans_b, .activation = Activation::Silu, .rowwise = true};
        const Matrix a(work, kMany, K, 5, 1), b(work, trans_b ? N : K, trans_b ? K : N, 0, 2);
        const Tensor bias = Tensor(work, {N}).randomize(3);
        const auto product = [&](TensorView c, const TensorView& rows) {
          ops->matmul(c, rows, b.view, bias, {}, {}, params, stream);
        };
        Tensor all(work, {kMany, N}), some(work, {kMany, N});
        product(all, a.view);
        for (i64 M = 1; M <= kMany; ++M) {
          some.fill(0);
          product(some.view().rows(kMany - M, M), a.view.rows(kMany - M, M));
          const i64 bytes = M * N * dtype_bytes(work);
          const auto last = [&](const Tensor& t) { return t.view().as<char>() + t.view().bytes() - bytes; };
          ASSERT_EQ(std::memcmp(last(some), last(all), static_cast<size_t>(bytes)), 0)
              << ops->name << " " << dtype_name(work) << " " << M << " rows, " << (trans_b ? "[N,K]" : "[K,N]");
        }
      }
    }
  }
}

TEST(Matmul, RowsHaveTheSameBitsAmongFewAndMany) {
  constexpr i64 kMany = 40, N = 150, K = 1801;  // several blocks of k, the last one uneven
  for (const OpTable* ops : backends()) {
    if (!has_own_products(*ops)) continue;
    for_all_kinds([&](DType work, DType out, MatmulParams params) {
      if (params.trans_a) return;
      ThreadPool pool(2);
      Stream stream{&pool};
      const Matrix a(work, kMany, K, 0, 1), b(work, params.trans_b ? N : K, params.trans_b ? K : N, 3, 2),
          residual(out, kMany, N, 0, 5);
      Matrix all(out, kMany, N, 0, 3), some(out, kMany, N, 0, 4);
      ops->matmul(all.view, a.view, b.view, {}, {}, residual.view, params, stream);
      for (const i64 M : {1, 2, 3, 4, 5, 7, 8, 9, 14, 16}) {
        for (i64 r = 0; r < kMany; r += M) {
          const i64 rows = std::min(M, kMany - r);
          ops->matmul(some.view.rows(r, rows), a.view.rows(r, rows), b.view, {}, {}, residual.view.rows(r, rows),
                      params, stream);
        }
        const Case t{.M = M, .N = N, .K = K, .work = work, .out = out, .params = params, .residual = true};
        expect_same_bits(some.all, all.all, std::string(ops->name) + " " + t.name());
      }
    });
    if (HasFatalFailure()) return;
  }
}

TEST(PackedMatrix, IsPackedInPlaceAtAnyThreads) {
  for (const OpTable* ops : backends()) {
    if (!packs(*ops)) continue;
    for (DType work : kWorkDTypes) {
      for (const auto& [N, K] :
           {std::pair<i64, i64>{1, 1}, {1, 70}, {16, 3}, {31, 33}, {32, 64}, {150, 801}, {65, 1}}) {
        for (int threads : {1, 3}) {
          ThreadPool pool(threads);
          Stream stream{&pool};
          const Tensor m = Tensor(work, {N, K}).randomize(1);
          Tensor got = m;
          ops->pack_matrix(got, stream);
          const std::string what = fmt::format("{} {} {}x{}", ops->name, dtype_name(work), N, K);
          expect_same_bits(got, InPanels(*ops, m).elements(), what);
        }
      }
    }
  }
}

// And agrees with the oracle, which reads panels too.
TEST(PackedMatrix, ProductsHaveTheBitsOfThoseOfRows) {
  const i64 shapes[][3] = {{1, 1, 1},    {1, 70, 33},     {2, 129, 401}, {3, 16, 0},     {5, 31, 769},
                           {14, 32, 16}, {15, 257, 1801}, {40, 96, 768}, {33, 1030, 65}, {1020, 40, 35}};
  test::EveryNth tried(3);
  for (const OpTable* ops : backends()) {
    if (!packs(*ops)) continue;
    for (const auto& [M, N, K] : shapes) {
      for_all_kinds([&](DType work, DType out, MatmulParams params) {
        if (params.trans_a || !params.trans_b || !tried()) return;
        params.activation = Activation::Silu;
        const Matrix a(work, M, K, 3, 1), residual(out, M, N, 1, 5);
        const Tensor b = Tensor(work, {N, K}).randomize(2), bias = Tensor(work, {N}).randomize(6);
        const InPanels packed(*ops, b);
        const auto product = [&](const OpTable& by, TensorView of, int threads) {
          ThreadPool pool(threads);
          Stream stream{&pool};
          Matrix c(out, M, N, 2, 3);
          by.matmul(c.view, a.view, of, bias, {}, residual.view, params, stream);
          return c.all;
        };
        const std::string what =
            fmt::format("{} {} to {} {}x{}x{}", ops->name, dtype_name(work), dtype_name(out), M, N, K);
        const Tensor want = product(ref_ops(), b, 1);
        expect_same_bits(product(ref_ops(), packed, 1), want, what);
        for (int threads : {1, 2, 5}) {
          const Tensor got = product(*ops, packed, threads);
          expect_close(got, want, out == DType::F32 ? 16 + 2 * std::sqrt(static_cast<double>(K)) : 2.1, what);
          if (has_own_products(*ops)) expect_same_bits(got, product(*ops, b, threads), what);
        }
      });
      if (HasFatalFailure()) return;
    }
  }
}

TEST(PackedMatrix, RowsHaveTheSameBitsAmongAnyNumber) {
  constexpr i64 kMost = 1000, N = 75, K = 811;
  for (const OpTable* ops : backends()) {
    if (!packs(*ops)) continue;
    for (DType work : kWorkDTypes) {
      ThreadPool pool(2);
      Stream stream{&pool};
      const Tensor a = Tensor(work, {kMost, K}).randomize(1);
      const InPanels b(*ops, Tensor(work, {N, K}).randomize(2));
      Tensor all(work, {kMost, N}), some(work, {kMost, N});
      ops->matmul(all, a, b, {}, {}, {}, {.trans_b = true}, stream);
      test::EveryNth tried(13);
      for (i64 M = 1; M <= kMost; ++M) {
        if (M > 40 && !tried()) continue;
        some.fill(0);
        // The last rows: their place differs, too.
        ops->matmul(some.view().rows(0, M), a.view().rows(kMost - M, M), b, {}, {}, {}, {.trans_b = true}, stream);
        const TensorView last = all.view().rows(kMost - M, M);
        ASSERT_EQ(std::memcmp(some.view().data, last.data, static_cast<size_t>(last.bytes())), 0)
            << ops->name << " " << dtype_name(work) << " " << M;
      }
    }
  }
}

// As layers use them: the matrices of joined maps, and shares of a vocabulary.
TEST(PackedMatrix, WholePanelsAreAMatrixOfTheirOwn) {
  constexpr i64 K = 133;
  for (const OpTable* ops : backends()) {
    if (!packs(*ops)) continue;
    for (DType work : kWorkDTypes) {
      ThreadPool pool(2);
      Stream stream{&pool};
      const i64 first = 2 * panels_of(*ops, work).rows, N = first + 21;
      const Tensor a = Tensor(work, {5, K}).randomize(1);
      const InPanels packed(*ops, Tensor(work, {N, K}).randomize(2));
      const TensorView b = packed;
      Tensor whole(work, {5, N}), parts(work, {5, N});
      ops->matmul(whole, a, b, {}, {}, {}, {.trans_b = true}, stream);
      for (const auto& [begin, n] : {std::pair{i64{0}, first}, {first, N - first}}) {
        TensorView c = parts.view();
        c.data = c.as<char>() + begin * dtype_bytes(work);
        c.shape[1] = n;
        ops->matmul(c, a, b.rows(begin, n), {}, {}, {}, {.trans_b = true}, stream);
      }
      expect_same_bits(parts, whole, fmt::format("{} {}", ops->name, dtype_name(work)));
    }
  }
}

TEST(Matmul, NonFiniteValuesReachTheResult) {
  for (const OpTable* ops : backends()) {
    for (DType work : kWorkDTypes) {
      for (i64 M : {2, 40}) {
        ThreadPool pool(1);
        Stream stream{&pool};
        Tensor a(work, {M, 50}), b(work, {50, 40}), c(work, {M, 40});
        a.fill(1).set(7, NAN);
        b.fill(1).set(3 * 40 + 11, INFINITY);
        ops->matmul(c, a, b, {}, {}, {}, {}, stream);
        for (i64 n = 0; n < 40; ++n) {
          EXPECT_TRUE(std::isnan(c.at(n))) << ops->name << n;
          EXPECT_EQ(c.at(40 + n), n == 11 ? INFINITY : 50.0f) << ops->name << n;
        }
      }
    }
  }
}

TEST(ColumnSum, AgreesWithTheOracleAtAnyThreads) {
  for (const auto& s : {std::pair<i64, i64>{0, 5}, {1, 1}, {3, 64}, {63, 65}, {64, 200}, {130, 31}, {1000, 129}}) {
    for (DType in : kWorkDTypes) {
      for (DType out : {in, DType::F32}) {
        Matrix x(in, s.first, s.second, 3, 1);
        const Tensor before = Tensor(out, {s.second}).randomize(2);
        ThreadPool one(1);
        Stream stream{&one};
        for (const bool accumulate : {false, true}) {
          Tensor want = before;
          ref_ops().column_sum(want, x.view, accumulate, stream);
          for (const OpTable* ops : backends()) {
            for (int threads : {1, 2, 3, 5}) {
              ThreadPool pool(threads);
              Stream parallel{&pool};
              Tensor got = before, first = before;
              ops->column_sum(first, x.view, accumulate, stream);
              ops->column_sum(got, x.view, accumulate, parallel);
              expect_same_bits(got, first, std::string(ops->name));
              expect_close(got, want, out == DType::F32 ? 24 : 2.1, std::string(ops->name));
            }
          }
        }
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Linear, RefGradientsMatchFiniteDifferences) {
  Stream stream{};
  const model::PassContext ctx{.ops = ref_ops(), .stream = stream};
  constexpr i64 R = 4, kIn = 3, kOut = 5;
  for (const auto orientation : {model::Orientation::OutIn, model::Orientation::InOut}) {
    const bool out_in = orientation == model::Orientation::OutIn;
    Doubles x({R, kIn}), w({out_in ? kOut : kIn, out_in ? kIn : kOut}), b({kOut}), y({R, kOut}), dy({R, kOut}),
        dx({R, kIn}), dw({out_in ? kOut : kIn, out_in ? kIn : kOut}), db({kOut});
    x.randomize(1);
    w.randomize(2);
    b.randomize(3);
    dy.randomize(4);
    model::linear_backward_input(ctx, dx.view, dy.view, w.view, orientation);
    model::linear_backward_weight(ctx, dw.view, db.view, dy.view, x.view, orientation);
    const auto loss = [&] {
      model::linear_forward(ctx, y.view, x.view, w.view, {.orientation = orientation, .bias = b.view});
      return y.dot(dy);
    };
    expect_gradient(x, dx, loss, "dx");
    expect_gradient(w, dw, loss, "dw");
    expect_gradient(b, db, loss, "db, a column sum");

    Doubles others({R, kIn}), sum({R, kIn});
    others.randomize(5);
    sum.value = others.value;
    model::linear_backward_input(ctx, sum.view, dy.view, w.view, orientation, sum.view);
    for (size_t i = 0; i < dx.value.size(); ++i) EXPECT_NEAR(sum.value[i], dx.value[i] + others.value[i], 1e-15);
  }
}

}  // namespace matmul_test
}  // namespace ds::testing
