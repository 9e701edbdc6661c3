// SPDX-License-Identifier: Apache-2.0
// LAMB: moments and the direction of each parameter, the norms of both over the whole parameter, and a step along the
// direction. Norms are sums of integers (ExactSum), so no layout moves a bit; ranks that have copies count once. The
// correction of the moments' bias stands outside of the ratio, as in DeepSpeed.
//
// Workspace, of K parameters:  largest [2,K] int64 | sums [2,K,2] int64 | factors [K] fp32

#include <cmath>

#include "optim/kind.h"

namespace ds::optim {
namespace {

class Lamb final : public Optimizer {
 public:
  Lamb(const UpdateConfig& u, i64 num_params, void* workspace) : u_(u), num_params_(num_params) {
    const i64 K = num_params;
    auto* const integers = static_cast<i64*>(workspace);
    largest_ = TensorView::of(integers, DType::I64, {2 * K});
    sums_ = TensorView::of(integers + 2 * K, DType::I64, {4 * K});
    factors_ = TensorView::of(integers + 6 * K, DType::F32, {K});
  }

  void update(const UpdateContext& c) override {
    const UpdateConfig u = c.at_this_step(u_);
    c.states.update(
        {.params = c.pass({.rule = UpdateRule::LambDirection, .beta1 = u.beta1, .beta2 = u.beta2, .eps = u.eps})});

    c.zero(TensorView::of(largest_.data, DType::I64, {largest_.numel() + sums_.numel()}));
    for_each_counted(c, [&](const TensorView& x, const TensorView& largest, const TensorView&) {
      c.ops.max_abs(largest, x, c.stream);
    });
    c.reduce(largest_, ReduceOp::Max);
    for_each_counted(c, [&](const TensorView& x, const TensorView& largest, const TensorView& sum) {
      c.ops.sum_squares(sum, x, largest, c.stream);
    });
    c.reduce(sums_, ReduceOp::Sum);
    c.ops.norm_ratios(factors_, largest_, sums_, static_cast<float>(u_.min_coeff), static_cast<float>(u_.max_coeff),
                      c.stream);

    const double t = static_cast<double>(c.step);
    const double correction =
        u.bias_correction ? std::sqrt(1 - std::pow(u.beta2, t)) / (1 - std::pow(u.beta1, t)) : 1.0;
    c.states.update({.params = c.pass({.rule = UpdateRule::Descend, .lr = static_cast<float>(c.lr * correction)}),
                     .factors = factors_.as<float>(),
                     .decay = false});  // it is in the direction
  }

 private:
  // Calls visit(values, largest [1], sum [2]) for each parameter and its direction.
  template <class Visit>
  void for_each_counted(const UpdateContext& c, Visit&& visit) const {
    c.states.for_each_counted([&](i64 index, TensorView master, TensorView direction) {
      for (const i64 which : {0, 1}) {
        const i64 at = which * num_params_ + index;
        visit(which == 0 ? master : direction, TensorView::of(largest_.as<i64>() + at, DType::I64, {1}),
              TensorView::of(sums_.as<i64>() + 2 * at, DType::I64, {2}));
      }
    });
  }

  UpdateConfig u_;
  i64 num_params_;
  TensorView largest_, sums_, factors_;
};

}  // namespace

const Kind kLamb = {
    .states =
        [](const UpdateConfig&) noexcept {
          return state_set({State::ExpAvg, State::ExpAvgSq});
        },
    .make = [](const UpdateConfig& u, const GroupSize& size, void* workspace) -> std::unique_ptr<Optimizer> {
      return std::make_unique<Lamb>(u, size.num_params, workspace);
    },
    .workspace_bytes = [](const GroupSize& size) noexcept -> i64 {
      return size.num_params * (6 * 8) + align_up(size.num_params * 4, 8);
    }};

}  // namespace ds::optim
