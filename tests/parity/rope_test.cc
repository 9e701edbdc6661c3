// SPDX-License-Identifier: Apache-2.0
// rope on every backend: against ref, its own inverse, in place, on strided views, and against hand-computed values;
// ref's gradient by finite differences.

#include "parity/finite_difference.h"
#include "parity/parity.h"

namespace ds::testing {
namespace rope_test {

struct Case {
  i64 B = 2, T = 5, H = 3, D = 64;
  bool interleaved = false;
};

// Angles as a model makes them, and positions that are neither sorted nor dense.
struct Angles {
  explicit Angles(const Case& c) : cos(DType::F32, {kPositions, c.D / 2}), sin(cos), positions(DType::I32, {c.T}) {
    for (i64 p = 0; p < kPositions; ++p) {
      for (i64 d = 0; d < c.D / 2; ++d) {
        const double angle =
            static_cast<double>(p) * std::pow(10000.0, -2.0 * static_cast<double>(d) / static_cast<double>(c.D));
        cos.set(p * c.D / 2 + d, static_cast<float>(std::cos(angle)));
        sin.set(p * c.D / 2 + d, static_cast<float>(std::sin(angle)));
      }
    }
    for (i64 t = 0; t < c.T; ++t) positions.set(t, static_cast<float>(t * 7 % kPositions));
  }
  static constexpr i64 kPositions = 40;
  Tensor cos, sin, positions;
};

Tensor rotate(const OpTable& ops, const Case& c, const Tensor& x, const Angles& a, bool inverse, int threads = 2) {
  ThreadPool pool(threads);
  Stream stream{.pool = &pool};
  Tensor y(x.view().dtype, {c.B, c.T, c.H, c.D});
  ops.rope(y, x, a.cos, a.sin, a.positions, {.inverse = inverse, .interleaved = c.interleaved}, stream);
  return y;
}

std::vector<std::pair<const OpTable*, bool>> all_kinds() {
  std::vector<std::pair<const OpTable*, bool>> all;
  for (const OpTable* ops : backends()) all.insert(all.end(), {{ops, false}, {ops, true}});
  return all;
}

TEST(Rope, AgreesWithRef) {
  for (const OpTable* ops : backends()) {
    for (DType dtype : kWorkDTypes) {
      for (i64 D : {2, 6, 16, 34, 64, 80, 128, 256}) {
        Case c{.D = D};
        const Angles angles(c);
        const Tensor x = Tensor(dtype, {c.B, c.T, c.H, c.D}).randomize(1);
        for (const auto& [inverse, interleaved] :
             {std::pair{false, false}, {true, false}, {false, true}, {true, true}}) {
          c.interleaved = interleaved;
          const std::string what =
              std::string(ops->name) + " D=" + std::to_string(D) + " " + std::to_string(interleaved);
          expect_close(rotate(*ops, c, x, angles, inverse), rotate(ref_ops(), c, x, angles, inverse), 3, what);
        }
      }
    }
  }
}

TEST(Rope, RotatesThePairsOfTheTwoHalves) {
  const Case c{.B = 1, .T = 2, .H = 1, .D = 4};
  const Angles angles(c);
  Tensor x(DType::F32, {1, 2, 1, 4});
  for (i64 i = 0; i < 8; ++i) x.set(i, static_cast<float>(i));
  const Tensor y = rotate(ref_ops(), c, x, angles, false);
  for (i64 i = 0; i < 4; ++i) EXPECT_EQ(y.at(i), x.at(i));  // position 0
  const double c0 = std::cos(7.0), s0 = std::sin(7.0), c1 = std::cos(0.07), s1 = std::sin(0.07);
  EXPECT_NEAR(y.at(4), 4 * c0 - 6 * s0, 1e-5);
  EXPECT_NEAR(y.at(5), 5 * c1 - 7 * s1, 1e-5);
  EXPECT_NEAR(y.at(6), 6 * c0 + 4 * s0, 1e-5);
  EXPECT_NEAR(y.at(7), 7 * c1 + 5 * s1, 1e-5);
}

TEST(Rope, InterleavedPairsAreNeighbours) {
  const Case c{.B = 1, .T = 2, .H = 1, .D = 4, .interleaved = true};
  const Angles angles(c);
  Tensor x(DType::F32, {1, 2, 1, 4});
  for (i64 i = 0; i < 8; ++i) x.set(i, static_cast<float>(i));
  const Tensor y = rotate(ref_ops(), c, x, angles, false);
  const double c0 = std::cos(7.0), s0 = std::sin(7.0), c1 = std::cos(0.07), s1 = std::sin(0.07);
  EXPECT_NEAR(y.at(4), 4 * c0 - 5 * s0, 1e-5);
  EXPECT_NEAR(y.at(5), 5 * c0 + 4 * s0, 1e-5);
  EXPECT_NEAR(y.at(6), 6 * c1 - 7 * s1, 1e-5);
  EXPECT_NEAR(y.at(7), 7 * c1 + 6 * s1, 1e-5);
}

TEST(Rope, InverseIsTheTransposedMap) {
  for (const auto& [ops, interleaved] : all_kinds()) {
    const Case c{.D = 34, .interleaved = interleaved};
    const Angles angles(c);
    const Tensor x = Tensor(DType::F32, {c.B, c.T, c.H, c.D}).randomize(3);
    expect_close(rotate(*ops, c, rotate(*ops, c, x, angles, false), angles, true), x, 8, "inverse after forward");
  }
}

TEST(Rope, WorksInPlaceOnSlicesOfAFusedBufferAndForAnyThreads) {
  for (const auto& [ops, interleaved] : all_kinds()) {
    const Case c{.T = 9, .H = 4, .D = 48, .interleaved = interleaved};
    const Angles angles(c);
    for (DType dtype : kWorkDTypes) {
      // [B, T, 3*H, D], of which heads H .. 2H-1 are rotated and the others stay.
      Tensor fused = Tensor(dtype, {c.B, c.T, 3 * c.H, c.D}).randomize(4);
      const Tensor before = fused;
      TensorView slice = fused;
      slice.data = fused.view().as<char>() + c.H * c.D * dtype_bytes(dtype);
      slice.shape[2] = c.H;
      Tensor x(dtype, {c.B, c.T, c.H, c.D});
      const auto at = [&](i64 i) { return i / (c.H * c.D) * 3 * c.H * c.D + c.H * c.D + i % (c.H * c.D); };
      for (i64 i = 0; i < x.numel(); ++i) x.set(i, before.at(at(i)));
      const Tensor want = rotate(*ops, c, x, angles, false, 1);
      for (int threads : {2, 3, 5}) expect_same_bits(rotate(*ops, c, x, angles, false, threads), want, "threads");

      ThreadPool pool(3);
      Stream stream{.pool = &pool};
      ops->rope(slice, slice, angles.cos, angles.sin, angles.positions, {.interleaved = interleaved}, stream);
      for (i64 i = 0; i < x.numel(); ++i) ASSERT_EQ(fused.at(at(i)), want.at(i)) << i;
      for (i64 i = 0; i < fused.numel(); ++i) {
        const i64 head = i / c.D % (3 * c.H);
        const bool rotated = head >= c.H && head < 2 * c.H;
        ASSERT_TRUE(rotated || fused.at(i) == before.at(i)) << i;
      }
    }
  }
}

// YaRN and LongRoPE scale cos and sin: then the backward pass is the transposed map, no longer the inverse one.
TEST(Rope, RefGradientMatchesFiniteDifferences) {
  Stream stream{};
  constexpr i64 B = 2, T = 3, H = 2, D = 6, kPositions = 5;
  for (const auto& [amplitude, interleaved] : {std::pair{1.0, false}, {1.3, false}, {1.3, true}}) {
    Doubles x({B, T, H, D}), y({B, T, H, D}), dx({B, T, H, D}), dy({B, T, H, D}), cos({kPositions, D / 2}),
        sin({kPositions, D / 2});
    for (size_t i = 0; i < cos.value.size(); ++i) {
      cos.value[i] = amplitude * std::cos(0.7 * static_cast<double>(i));
      sin.value[i] = amplitude * std::sin(0.7 * static_cast<double>(i));
    }
    Tensor positions(DType::I32, {T});
    for (i64 t = 0; t < T; ++t) positions.set(t, static_cast<float>((3 * t + 1) % kPositions));
    x.randomize(1);
    dy.randomize(2);
    ref_ops().rope(dx.view, dy.view, cos.view, sin.view, positions, {.inverse = true, .interleaved = interleaved},
                   stream);
    const auto loss = [&] {
      ref_ops().rope(y.view, x.view, cos.view, sin.view, positions, {.interleaved = interleaved}, stream);
      return y.dot(dy);
    };
    expect_gradient(x, dx, loss, "rope of amplitude " + std::to_string(amplitude));
  }
}

}  // namespace rope_test
}  // namespace ds::testing
