// SPDX-License-Identifier: Apache-2.0
// Products of groups of rows with a matrix each, and the gradients of the matrices: against the oracle, against the
// plain product, and the promise that the bits of a row depend on nothing but the row and its matrix.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "parity/finite_difference.h"
#include "parity/parity.h"

namespace ds::testing {
namespace grouped_matmul_test {

using Offsets = std::vector<i32>;

TensorView view_of(const Offsets& o) {
  return TensorView::of(const_cast<i32*>(o.data()), DType::I32, {static_cast<i64>(o.size())});
}
// Consecutive groups of these sizes, from row `first` on.
Offsets groups_of(const std::vector<i32>& sizes, i32 first = 0) {
  Offsets o = {first};
  for (const i32 n : sizes) o.push_back(o.back() + n);
  return o;
}

// A view [rows, columns] of a tensor with wider rows.
TensorView narrow(const Tensor& t, i64 columns) {
  TensorView v = t.view();
  v.shape[v.rank - 1] = columns;
  return v;
}

struct Case {
  std::string name;
  i64 E;
  Offsets offsets;  // empty: none
  i64 M;
};
std::vector<Case> cases() {
  return {{"even", 4, groups_of({5, 5, 5, 5}), 20},
          {"one row each", 3, groups_of({1, 1, 1}), 3},
          {"one row alone", 2, groups_of({0, 1}), 1},
          {"uneven", 3, groups_of({40, 1, 17}), 58},
          {"empty groups", 5, groups_of({0, 9, 0, 16, 0}), 25},
          {"one has all", 4, groups_of({0, 0, 130, 0}), 130},
          {"two groups for each matrix", 2, groups_of({3, 20, 0, 7}), 30},
          {"rows of no group", 2, groups_of({8, 33}, 70), 200},
          {"nothing", 3, groups_of({0, 0, 0}), 4},
          {"no rows", 3, groups_of({0, 0, 0}), 0},
          {"no offsets", 1, {}, 37},
          {"large groups", 2, groups_of({300, 270}), 570}};
}

double tolerance(DType out, i64 K) { return out == DType::F32 ? 16 + 2 * std::sqrt(static_cast<double>(K)) : 2.1; }

// f(work, out)
template <class F>
void for_all_types(F&& f) {
  for (const DType work : kWorkDTypes) {
    for (const DType out : {work, DType::F32}) {
      if (out == work || work != DType::F32) f(work, out);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(GroupedMatmul, AgreesWithTheOracle) {
  const i64 shapes[][3] = {{1, 1, 0}, {33, 70, 3}, {64, 48, 8}, {130, 801, 0}};  // N, K, gaps between rows
  for_all_types([&](DType work, DType out) {
    for (const Case& c : cases()) {
      for (const auto& [N, K, gap] : shapes) {
        if (c.M * N * K > 3'000'000) continue;
        for (const bool trans_b : {false, true}) {
          const Tensor a = Tensor(work, {c.M, K + gap}).randomize(1),
                       b = Tensor(work, {c.E, trans_b ? N : K, (trans_b ? K : N) + gap}).randomize(2);
          const auto run = [&](const OpTable& ops, Stream& s) {
            Tensor y = Tensor(out, {c.M, N + 2 * gap}).randomize(3);
            ops.grouped_matmul(narrow(y, N), narrow(a, K), narrow(b, trans_b ? K : N),
                               c.offsets.empty() ? TensorView{} : view_of(c.offsets), trans_b, s);
            return std::vector{y};
          };
          ThreadPool one(1);
          Stream alone{.pool = &one};
          const std::vector<Tensor> want = run(ref_ops(), alone);
          for (const OpTable* ops : backends()) {
            const std::string what = std::string(ops->name) + " " + c.name + " " + std::string(dtype_name(work)) +
                                     " to " + std::string(dtype_name(out)) + " " + std::to_string(N) + "x" +
                                     std::to_string(K) + (trans_b ? " transposed" : "");
            expect_close(run(*ops, alone)[0], want[0], tolerance(out, K), what);
            expect_same_for_any_threads([&](Stream& s) { return run(*ops, s); }, what);
            if (::testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  });
}

TEST(GroupedMatmul, GradientsAgreeWithTheOracle) {
  const i64 shapes[][3] = {{1, 1, 0}, {33, 70, 3}, {64, 48, 8}, {300, 530, 0}};
  for_all_types([&](DType work, DType out) {
    for (const Case& c : cases()) {
      for (const auto& [N, K, gap] : shapes) {
        if (c.M * N * K > 1'500'000) continue;
        for (const bool accumulate : {false, true}) {
          const Tensor a = Tensor(work, {c.M, N + gap}).randomize(4), b = Tensor(work, {c.M, K + 2 * gap}).randomize(5);
          const auto run = [&](const OpTable& ops, Stream& s) {
            Tensor y = Tensor(out, {c.E, N, K + gap}).randomize(6);
            ops.grouped_matmul_grad(narrow(y, K), narrow(a, N), narrow(b, K),
                                    c.offsets.empty() ? TensorView{} : view_of(c.offsets), accumulate, s);
            return std::vector{y};
          };
          ThreadPool one(1);
          Stream alone{.pool = &one};
          const std::vector<Tensor> want = run(ref_ops(), alone);
          for (const OpTable* ops : backends()) {
            const std::string what = std::string(ops->name) + " " + c.name + " " + std::string(dtype_name(work)) +
                                     " to " + std::string(dtype_name(out)) + " " + std::to_string(N) + "x" +
                                     std::to_string(K) + (accumulate ? " accumulated" : "");
            expect_close(run(*ops, alone)[0], want[0], tolerance(out, std::max<i64>(c.M, 1)), what);
            expect_same_for_any_threads([&](Stream& s) { return run(*ops, s); }, what);
            if (::testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  });
}

// Matrices without rows: not a bit of the sum changes, not even that of a negative zero.
TEST(GroupedMatmul, NothingIsAddedWithoutRows) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  const Offsets offsets = groups_of({0, 3, 0});
  for (const DType t : kWorkDTypes) {
    const Tensor a = Tensor(t, {3, 40}).randomize(1), b = Tensor(t, {3, 20}).randomize(2);
    for (const OpTable* ops : backends()) {
      Tensor c(DType::F32, {3, 40, 20});
      c.fill(-0.0f);
      const Tensor before = c;
      ops->grouped_matmul_grad(c, a, b, view_of(offsets), true, s);
      for (const i64 e : {0, 2}) {
        EXPECT_EQ(std::memcmp(c.view().rows(e, 1).data, before.view().rows(e, 1).data, 40 * 20 * 4), 0) << ops->name;
      }
    }
  }
}

TEST(GroupedMatmul, GradientsAreThoseOfFiniteDifferences) {
  constexpr i64 M = 9, N = 4, K = 5, E = 2;
  const Offsets offsets = groups_of({2, 0, 3, 4});  // groups 0 and 2 share a matrix
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  Doubles x({M, K}), w({E, N, K}), y({M, N}), dy({M, N}), dx({M, K}), dw({E, N, K});
  x.randomize(1), w.randomize(2), dy.randomize(3);
  const auto loss = [&] {
    ref_ops().grouped_matmul(y.view, x.view, w.view, view_of(offsets), true, s);
    return y.dot(dy);
  };
  ref_ops().grouped_matmul(dx.view, dy.view, w.view, view_of(offsets), false, s);
  ref_ops().grouped_matmul_grad(dw.view, dy.view, x.view, view_of(offsets), false, s);
  expect_gradient(x, dx, loss, "dx");
  expect_gradient(w, dw, loss, "dw");
}

std::vector<u8> bits_of_row(const Tensor& t, i64 row) {
  const TensorView v = t.view().rows(row, 1);
  return {v.as<u8>(), v.as<u8>() + v.bytes()};
}

// One row of a, at several places of groups of 1 to 1000 rows, before and after other groups.
TEST(GroupedMatmul, ARowHasTheSameBitsWhateverItsGroupHas) {
  constexpr i64 N = 75, K = 820, E = 3;
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  const bool device = test_device() != nullptr;
  std::vector<i32> sizes = {1,  2,  3,  4,  5,  6,  7,  8,  9,  13, 14, 15,  16,
                            17, 28, 31, 32, 33, 47, 48, 49, 63, 64, 65, 100, 129};
  if (!device) sizes.insert(sizes.end(), {251, 252, 253, 255, 256, 257, 504, 1000});
  for_all_types([&](DType work, DType out) {
    const Tensor row = Tensor(work, {1, K}).randomize(1), others = Tensor(work, {1064, K}).randomize(2);
    for (const bool trans_b : {false, true}) {
      const Tensor b = Tensor(work, {E, trans_b ? N : K, trans_b ? K : N}).randomize(3);
      for (const OpTable* ops : backends()) {
        std::vector<u8> want;
        for (const i32 size : sizes) {
          const Offsets offsets = groups_of({size % 7, size, 5});
          const i64 M = offsets.back(), width = row.view().bytes();
          for (const i32 at : {0, size / 2, size - 1}) {
            Tensor a(work, {M, K}), c(out, {M, N});
            std::memcpy(a.view().data, others.view().data, static_cast<size_t>(M * width));
            const i64 place = offsets[1] + at;
            std::memcpy(a.view().rows(place, 1).data, row.view().data, static_cast<size_t>(width));
            ops->grouped_matmul(c, a, b, view_of(offsets), trans_b, s);
            const std::vector<u8> got = bits_of_row(c, place);
            if (want.empty()) want = got;
            ASSERT_EQ(got, want) << ops->name << " " << dtype_name(work) << " to " << dtype_name(out)
                                 << (trans_b ? " transposed, " : ", ") << size << " rows, row " << at;
          }
        }
      }
    }
  });
}

// On CPUs the bits are those of the packed product, and on CUDA in fp32 nothing is promised.
TEST(GroupedMatmul, HasTheBitsOfThePackedProduct) {
  if (test_device() != nullptr) GTEST_SKIP() << "of CPUs alone";
  constexpr i64 N = 130, K = 900;
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  const Offsets offsets = groups_of({20, 300});
  for_all_types([&](DType work, DType out) {
    for (const OpTable* ops : backends()) {
      if (!ops->name.starts_with("cpu.avx")) continue;  // oneDNN's products of bf16 are others
      for (const bool trans_b : {false, true}) {
        const Tensor a = Tensor(work, {320, K}).randomize(1),
                     b = Tensor(work, {2, trans_b ? N : K, trans_b ? K : N}).randomize(2);
        Tensor c(out, {320, N}), want(out, {320, N});
        ops->grouped_matmul(c, a, b, view_of(offsets), trans_b, s);
        for (size_t g = 0; g < 2; ++g) {
          const i64 begin = offsets[g], rows = offsets[g + 1] - begin;
          TensorView matrix = b.view().rows(static_cast<i64>(g), 1).reshaped({b.view().dim(1), b.view().dim(2)});
          ops->matmul(want.view().rows(begin, rows), a.view().rows(begin, rows), matrix, {}, {}, {},
                      {.trans_b = trans_b}, s);
        }
        expect_same_bits(c, want, std::string(ops->name) + " " + std::string(dtype_name(work)));
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  });
}

}  // namespace grouped_matmul_test
}  // namespace ds::testing
