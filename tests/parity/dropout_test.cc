// SPDX-License-Identifier: Apache-2.0
// dropout on every backend: the exact Philox index of every element, the share kept, and any cut of the index space;
// ref's gradient by finite differences.

#include "parity/finite_difference.h"
#include "parity/parity.h"

namespace ds::testing {
namespace dropout_test {

constexpr RngKey kKey{.seed = 11, .site = 5, .step = 3};

Tensor run(const OpTable& ops, const Tensor& x, float p, i64 offset, int threads = 2) {
  ThreadPool pool(threads);
  Stream stream{.pool = &pool};
  Tensor y(x.view().dtype, {x.numel()});
  ops.dropout(y, x, p, kKey, offset, stream);
  return y;
}

std::vector<const OpTable*> all_backends() {
  std::vector<const OpTable*> all = backends();
  all.push_back(&ref_ops());
  return all;
}

TEST(Dropout, KeepsTheElementsThatPhiloxNames) {
  for (const OpTable* ops : all_backends()) {
    for (DType dtype : kWorkDTypes) {
      for (i64 offset :
           {i64{0}, i64{1}, i64{6}, i64{0x3FFFFFFFF} - 70}) {  // the last crosses a carry of the block counter
        const i64 n = 1203;
        const Tensor x = Tensor(dtype, {n}).fill(1.0f);
        const Tensor y = run(*ops, x, 0.3f, offset);
        for (i64 i = 0; i < n; ++i) {
          const bool kept = RngKey::uniform(kKey.bits(static_cast<u64>(offset + i))) >= 0.3f;
          ASSERT_NEAR(y.at(i), kept ? 1.0 / 0.7 : 0.0, 2 * epsilon(dtype)) << ops->name << " " << i << "+" << offset;
        }
      }
    }
  }
}

TEST(Dropout, AgreesWithRefAtTheEdgesOfTheUnitInterval) {
  for (const OpTable* ops : backends()) {
    const Tensor x = Tensor(DType::F32, {50021}).randomize(1);
    for (float p : {0.0f, 1e-3f, 0.5f, 0.999f}) {
      expect_close(run(*ops, x, p, 17), run(ref_ops(), x, p, 17), 4,
                   std::string(ops->name) + " p=" + std::to_string(p));
    }
  }
}

TEST(Dropout, KeepsTheMean) {
  for (const OpTable* ops : backends()) {
    const i64 n = 200000;
    const Tensor y = run(*ops, Tensor(DType::F32, {n}).fill(1.0f), 0.1f, 0);
    double sum = 0;
    for (i64 i = 0; i < n; ++i) sum += y.at(i);
    EXPECT_NEAR(sum / static_cast<double>(n), 1.0, 5 * std::sqrt(0.1 / 0.9 / static_cast<double>(n)));
  }
}

TEST(Dropout, DoesNotDependOnThreadsPartitionOrPlace) {
  for (const OpTable* ops : backends()) {
    for (DType dtype : kWorkDTypes) {
      const i64 n = 70001, cut = 33333;
      Tensor x = Tensor(dtype, {n}).randomize(2);
      const Tensor y = run(*ops, x, 0.3f, 9, 1);
      for (int threads : {2, 3, 5}) expect_same_bits(run(*ops, x, 0.3f, 9, threads), y, "threads");
      ThreadPool pool(2);
      Stream stream{.pool = &pool};
      ops->dropout(x.view().rows(0, cut), x.view().rows(0, cut), 0.3f, kKey, 9, stream);
      ops->dropout(x.view().rows(cut, n - cut), x.view().rows(cut, n - cut), 0.3f, kKey, 9 + cut, stream);
      expect_same_bits(x, y, "two parts, in place");
    }
  }
}

// Ranks that hold part of the rows of a matrix each, whatever the width of a row.
TEST(Dropout, RowsAloneHaveTheMaskThatTheyHaveInTheWhole) {
  ThreadPool pool(2);
  Stream stream{.pool = &pool};
  for (const OpTable* ops : all_backends()) {
    for (DType dtype : kWorkDTypes) {
      for (i64 C : {1, 3, 37, 64, 1030}) {
        const i64 R = 23;
        const Tensor x = Tensor(dtype, {R, C}).fill(1.0f);
        Tensor whole(dtype, {R, C}), parts(dtype, {R, C});
        ops->dropout(whole, x, 0.3f, kKey, 0, stream);
        const i64 cuts[] = {0, 1, 6, 7, 18, R};
        for (size_t i = 0; i + 1 < std::size(cuts); ++i) {
          const i64 row = cuts[i], rows = cuts[i + 1] - row;
          ops->dropout(parts.view().rows(row, rows), x.view().rows(row, rows), 0.3f, kKey, row * C, stream);
        }
        expect_same_bits(parts, whole, std::string(ops->name) + " " + std::to_string(C));
      }
    }
  }
}

TEST(Dropout, DroppedInfinitiesAndNaNsAreZero) {
  for (const OpTable* ops : all_backends()) {
    for (float bad : {INFINITY, NAN}) {
      const Tensor y = run(*ops, Tensor(DType::F32, {100}).fill(bad), 0.5f, 0);
      for (i64 i = 0; i < 100; ++i) {
        const bool kept = RngKey::uniform(kKey.bits(static_cast<u64>(i))) >= 0.5f;
        EXPECT_EQ(y.at(i) == 0, !kept) << ops->name;
      }
    }
  }
}

TEST(Dropout, RefGradientMatchesFiniteDifferences) {
  Stream stream{};
  Doubles x({41}), y({41}), dx({41}), dy({41});
  x.randomize(1);
  dy.randomize(2);
  ref_ops().dropout(dx.view, dy.view, 0.3f, kKey, 7, stream);
  const auto loss = [&] {
    ref_ops().dropout(y.view, x.view, 0.3f, kKey, 7, stream);
    return y.dot(dy);
  };
  expect_gradient(x, dx, loss, "dropout");
}

}  // namespace dropout_test
}  // namespace ds::testing
