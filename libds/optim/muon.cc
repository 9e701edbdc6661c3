// SPDX-License-Identifier: Apache-2.0
// Muon: the momentum of each hidden matrix, elementwise where its pieces are; then whole matrices, each on one rank:
// five iterations of Newton and Schulz make it nearly orthogonal, in fp32; and a step along what comes back.
//
//   X = U / |U|;  five times: A = X X^T;  X = a X + (b A + c A^2) X    (of the shorter side: X^T X for a tall matrix)
//
// Workspace, of the largest matrix:  largest [1], sum [2] int64 | 1/|U| [1] | X, Y [elements] | A, B [side, side]  fp32

#include <cmath>

#include "optim/kind.h"

namespace ds::optim {
namespace {

constexpr float kA = 3.4445f, kB = -4.7750f, kC = 2.0315f;  // Jordan's
constexpr int kIterations = 5;
constexpr i64 kNumbers = 1 + 2 + 1;  // 8 bytes each: largest, sum, factor

class Muon final : public Optimizer {
 public:
  Muon(const UpdateConfig& u, const LargestMatrix& largest, void* workspace) : u_(u) {
    numbers_ = static_cast<i64*>(workspace);
    x_ = reinterpret_cast<float*>(numbers_ + kNumbers);
    y_ = x_ + largest.elems;
    a_ = y_ + largest.elems;
    b_ = a_ + largest.side * largest.side;
  }

  void update(const UpdateContext& c) override {
    c.states.update(
        {.params = c.pass({.rule = u_.nesterov ? UpdateRule::NesterovMuonDirection : UpdateRule::MuonDirection,
                           .beta1 = u_.momentum})});
    c.matrices->for_each([&](TensorView whole) { orthogonalize(c, whole); });
    c.states.update({.params = c.pass({.rule = UpdateRule::Descend, .lr = static_cast<float>(c.lr)})});
  }

 private:
  void orthogonalize(const UpdateContext& c, TensorView u) {
    const i64 rows = u.dim(0), cols = u.dim(1), side = std::min(rows, cols), n = rows * cols;
    const bool tall = rows > cols;
    const auto flat = [](float* data, i64 count) { return TensorView::of(data, DType::F32, {count}); };
    const TensorView X = TensorView::of(x_, DType::F32, {rows, cols}), Y = TensorView::of(y_, DType::F32, {rows, cols});
    const TensorView A = TensorView::of(a_, DType::F32, {side, side}), B = TensorView::of(b_, DType::F32, {side, side});
    const TensorView U = TensorView::of(u.data, DType::F32, {n});

    // 1 / |U|, at most 1e7: the sum of squares over integers, like that of all gradients.
    const TensorView largest = TensorView::of(numbers_, DType::I64, {1}),
                     sum = TensorView::of(numbers_ + 1, DType::I64, {2});
    auto* const factor = reinterpret_cast<float*>(numbers_ + 3);
    c.zero(TensorView::of(numbers_, DType::I64, {kNumbers}));
    c.ops.max_abs(largest, U, c.stream);
    c.ops.sum_squares(sum, U, largest, c.stream);
    c.ops.norm_ratios(flat(factor, 1), largest, sum, 0, 1e7f, c.stream);

    c.ops.scaled_sum(flat(x_, n), U, 0, 1, factor, c.stream);
    const double shape = static_cast<double>(rows) / static_cast<double>(cols);
    const double scale = u_.muon_scale == MuonScale::Original
                             ? std::sqrt(std::max(1.0, shape))
                             : 0.2 * std::sqrt(static_cast<double>(std::max(rows, cols)));
    for (int i = 0; i < kIterations; ++i) {
      c.ops.matmul(A, X, X, {}, {}, {}, {.trans_a = tall, .trans_b = !tall}, c.stream);
      c.ops.matmul(B, A, A, {}, {}, {}, {}, c.stream);
      c.ops.scaled_sum(flat(b_, side * side), flat(a_, side * side), kC, kB, nullptr, c.stream);
      if (tall) {
        c.ops.matmul(Y, X, B, {}, {}, {}, {}, c.stream);
      } else {
        c.ops.matmul(Y, B, X, {}, {}, {}, {}, c.stream);
      }
      const float s = i + 1 < kIterations ? 1.0f : static_cast<float>(scale);
      c.ops.scaled_sum(flat(x_, n), flat(y_, n), s * kA, s, nullptr, c.stream);
    }
    c.ops.scaled_sum(U, flat(x_, n), 0, 1, nullptr, c.stream);
  }

  UpdateConfig u_;
  i64* numbers_ = nullptr;
  float *x_ = nullptr, *y_ = nullptr, *a_ = nullptr, *b_ = nullptr;
};

}  // namespace

const Kind kMuon = {
    .states = [](const UpdateConfig&) noexcept { return state_set({State::MomentumBuffer}); },
    .make = [](const UpdateConfig& u, const GroupSize& size, void* workspace) -> std::unique_ptr<Optimizer> {
      return std::make_unique<Muon>(u, size.largest, workspace);
    },
    .workspace_bytes = [](const GroupSize& size) noexcept -> i64 {
      const LargestMatrix& m = size.largest;
      return kNumbers * 8 + align_up((2 * m.elems + 2 * m.side * m.side) * 4, 8);
    }};

}  // namespace ds::optim
