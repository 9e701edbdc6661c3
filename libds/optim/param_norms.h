// SPDX-License-Identifier: Apache-2.0
#pragma once
// LAMB's numbers of whole parameters of a group: norms and largest values of masters and of directions, over all ranks
// that have pieces. They are sums and maxima of integers (ExactSum), so no layout moves a bit; copies count once.
//
// Workspace, of K parameters:  largest [rows,K] int64 | sums [2,K,2] int64 | factors [K] fp32

#include "optim/optimizer.h"

namespace ds::optim {

class ParamNorms {
 public:
  static constexpr i64 kMasters = 0, kDirections = 1;  // the rows that have norms; others have largest values alone

  static constexpr i64 workspace_bytes(i64 num_params, i64 rows) noexcept {
    return num_params * (rows + 4) * 8 + align_up(num_params * 4, 8);
  }
  ParamNorms(i64 num_params, i64 rows, void* workspace) : num_params_(num_params) {
    const i64 K = num_params;
    auto* const integers = static_cast<i64*>(workspace);
    largest_ = TensorView::of(integers, DType::I64, {rows * K});
    sums_ = TensorView::of(integers + rows * K, DType::I64, {4 * K});
    factors_ = TensorView::of(integers + (rows + 4) * K, DType::F32, {K});
  }

  void begin(const UpdateContext& c) const {
    c.zero(TensorView::of(largest_.data, DType::I64, {largest_.numel() + sums_.numel()}));
  }
  // The largest magnitudes of directions, as they are now, into a row; and those of masters.
  void take_largest(const UpdateContext& c, i64 of_directions, bool masters = false) const {
    visit(c, of_directions, masters,
          [&](const TensorView& x, i64 row, i64 k) { c.ops.max_abs(largest_of(row, k), x, c.stream); });
  }
  void reduce_largest(const UpdateContext& c) const { c.reduce(largest_, ReduceOp::Max); }
  // Their squares, by largest values of all ranks.
  void take_squares(const UpdateContext& c, i64 of_directions, bool masters = false) const {
    visit(c, of_directions, masters, [&](const TensorView& x, i64 row, i64 k) {
      c.ops.sum_squares(TensorView::of(sums_.as<i64>() + 2 * (row * num_params_ + k), DType::I64, {2}), x,
                        largest_of(row, k), c.stream);
    });
  }
  void reduce_squares(const UpdateContext& c) const { c.reduce(sums_, ReduceOp::Sum); }

  // The ratios of the norms of row 0 to those of row 1, where the ops run; 1 where either is 0.
  TensorView ratios(const UpdateContext& c, double low, double high) const {
    c.ops.norm_ratios(factors_, largest_.rows(0, 2 * num_params_), sums_, static_cast<float>(low),
                      static_cast<float>(high), c.stream);
    return factors_;
  }
  TensorView factors() const noexcept { return factors_; }
  TensorView largest(i64 row) const noexcept { return largest_.rows(row * num_params_, num_params_); }

 private:
  TensorView largest_of(i64 row, i64 k) const noexcept { return largest_.rows(row * num_params_ + k, 1); }
  template <class Take>
  static void visit(const UpdateContext& c, i64 of_directions, bool masters, Take&& take) {
    c.states.for_each_counted([&](i64 k, TensorView master, TensorView direction) {
      if (masters) take(master, kMasters, k);
      take(direction, of_directions, k);
    });
  }

  i64 num_params_;
  TensorView largest_, sums_, factors_;
};

}  // namespace ds::optim
