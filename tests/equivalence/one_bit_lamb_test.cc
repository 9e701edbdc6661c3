// SPDX-License-Identifier: Apache-2.0
// 1-bit LAMB: sent data is that of a simulation of all ranks to the bit, and all else that of one in fp64, through
// warm-up and freeze and to the bounds of its factor; ZeRO stage 1 is stage 0.

#include <set>

#include "equivalence/one_bit.h"
#include "slow_set.h"

namespace ds::testing {
namespace one_bit_test {

TEST(OneBitLamb, StageOneIsStageZero) {
  for (const bool half : {false, true}) {
    const auto train = [&](const Layout& l) {
      Config c = one_bit(tiny_gpt2(), l, half ? 2 : 1);
      c.optimizer.type = OptimizerType::OneBitLamb;
      c.optimizer.freeze_step = 3;
      c.optimizer.lr = 5e-3;
      if (half) {
        c.fp16 = {.enabled = true, .loss_scale = 0, .initial_scale_power = 20};
        c.communication_data_type = WireType::F16;
        ParamGroupConfig slow;
        static_cast<UpdateConfig&>(slow) = c.optimizer;
        slow.lr /= 2, slow.weight_decay = 0, slow.params = {"*mlp*"};
        c.optimizer.groups = {slow};
      }
      return train_threads(c, l.ranks(), 10);
    };
    const Trace zero = train({.dp = 3}), one = train({.dp = 3, .stage = 1});
    EXPECT_LT(zero.losses.back(), zero.losses.front());
    expect_same_training(one, zero, half ? "fp16" : "fp32");
  }
}

// Against a simulation of all ranks: sent data to the bit, all else in fp64.
TEST(OneBitLamb, DoesWhatASimulationOfAllRanksDoes) {
  constexpr i64 kSteps = 200;
  test::EveryNth tried(2, 1);
  for (const auto& [P, decay] : {std::pair{1, 0.1}, {2, 0.1}, {3, 0.0}, {4, 0.1}}) {
    if (!tried()) continue;
    Config c = tiny_config(tiny_llama(), P, 1, 0);
    UpdateConfig& u = c.optimizer;
    u = {.type = OptimizerType::OneBitLamb, .beta2 = 0.95, .weight_decay = decay, .bias_correction = P == 4};
    u.freeze_step = kFreeze;
    u.factor_threshold = 0.03;
    const auto gradient = [](int rank, i64 step) {
      return [=](i64 param, i64 i) {
        const RngKey own{8 + static_cast<u32>(rank), static_cast<u32>(param), static_cast<u32>(step)};
        const auto uniform = [&](const RngKey& k) {
          return static_cast<float>(k.bits(static_cast<u64>(i))) * 0x1p-31f - 1;
        };
        // After the freeze the gradients of some parameters grow, and those of others shrink.
        const float size = 0.01f * std::pow(param % 3 == 0   ? 1.02f
                                            : param % 3 == 1 ? 0.98f
                                                             : 1.0f,
                                            static_cast<float>(std::max<i64>(step - kFreeze, 0)));
        return i % 97 == 5 ? 0.0f : size * (uniform({7, static_cast<u32>(param), 0}) + uniform(own));
      };
    };
    const auto start = [](i64 param, i64 i) {
      return param % 7 == 6
                 ? 0.0f
                 : 0.05f *
                       (static_cast<float>(RngKey{5, static_cast<u32>(param), 0}.bits(static_cast<u64>(i))) * 0x1p-31f -
                        1);
    };
    std::vector<float> weights, momenta;
    std::vector<double> numbers;
    std::set<double> bounds;
    run_threads(P, {.timeout_s = 60}, [&, P = P](Communicator& dp) {
      const auto device = make_cpu_device(*cpu_ops(), 1);
      UpdateAlone alone(c, dp, *device);
      alone.set_parameters(start);
      struct Range {
        size_t begin, end;
        double decay, mean = 0, factor = 1;
      };
      std::vector<Range> params;
      std::vector<std::pair<i64, i64>> elements;
      for (const zero::Piece& p : alone.plan().dp().layout.whole_pieces()) {
        const size_t begin = elements.size();
        for (i64 i = 0; i < p.count; ++i) elements.emplace_back(p.param, i);
        params.push_back({begin, elements.size(), alone.plan().row_of(p.param).decay ? decay : 0});
      }
      Simulation<float> signs(c.optimizer, std::vector<double>(elements.size()), chunks_of(alone.plan().dp().layout),
                              static_cast<size_t>(P));
      std::vector<double> w, m(elements.size()), v(m.size()), fresh, along(m.size());
      for (const auto& [param, i] : elements) w.push_back(double{start(param, i)});
      const double b1 = u.beta1, b2 = u.beta2, eps = double{u.eps}, lr = 1e-3;
      for (i64 t = 1; t <= kSteps; ++t) {
        alone.step(t, gradient(dp.rank(), t), lr);
        if (dp.rank() == 0) {
          std::vector<std::vector<float>> of_ranks(static_cast<size_t>(P));
          std::vector<double> mean(m.size());
          for (int r = 0; r < P; ++r) {
            const auto of_rank = gradient(r, t);
            std::vector<double> g;
            for (const auto& [param, i] : elements) g.push_back(double{of_rank(param, i)});
            for (size_t i = 0; i < g.size(); ++i) mean[i] += g[i] / P;
            if (t > kFreeze) of_ranks[static_cast<size_t>(r)] = signs.with_gradient(g);
          }
          const auto before = m;
          if (t <= kFreeze) {
            for (size_t i = 0; i < m.size(); ++i) {
              m[i] = b1 * m[i] + (1 - b1) * mean[i];
              v[i] = b2 * v[i] + (1 - b2) * mean[i] * mean[i];
            }
            if (t == kFreeze) {
              fresh = v;
              signs.m = alone.state(State::ExpAvg);
              m.assign(signs.m.begin(), signs.m.end());
            }
          } else {
            signs.m = P == 1 ? of_ranks.front() : signs.mean_by_signs(of_ranks);
            EXPECT_TRUE(same_bits(signs.m, alone.state(State::ExpAvg))) << P << " step " << t;
            m.assign(signs.m.begin(), signs.m.end());
          }
          const double correction = u.bias_correction ? std::sqrt(1 - std::pow(b2, double(std::min(t, kFreeze)))) /
                                                            (1 - std::pow(b1, double(t)))
                                                      : 1;
          for (Range& p : params) {
            double of_w = 0, of_u = 0, of_along = 0, left = 0;
            for (size_t i = p.begin; i < p.end; ++i) {
              const double step = v[i] > 0 ? m[i] / (std::sqrt(v[i]) + eps) : 0;
              along[i] = step + p.decay * w[i];
              of_w += w[i] * w[i], of_u += along[i] * along[i], of_along += step * step;
              if (t <= kFreeze) continue;
              const double g = v[i] > 0 ? (m[i] - b1 * before[i]) / (1 - b1) : 0;
              fresh[i] = b2 * fresh[i] + (1 - b2) * g * g;
              if (v[i] > 0) left = std::max(left, (std::sqrt(v[i]) + eps) / (std::sqrt(fresh[i]) + eps));
            }
            double ratio = of_w > 0 && of_u > 0 ? std::clamp(std::sqrt(of_w / of_u), u.min_coeff, u.max_coeff) : 1;
            if (t <= kFreeze) {
              if (ratio != 1) p.mean = u.coeff_beta * p.mean + (1 - u.coeff_beta) * ratio;
            } else {
              if (p.decay > 0) {
                const double share = std::min(1.0, std::sqrt(of_along / of_u));
                left = left * share + 1 - share;
              }
              left = std::clamp(left, u.factor_min, u.factor_max);
              p.factor = std::clamp(left, p.factor * (1 - u.factor_threshold), p.factor * (1 + u.factor_threshold));
              ratio = p.mean * p.factor;
            }
            for (size_t i = p.begin; i < p.end; ++i) w[i] -= lr * correction * ratio * along[i];
          }
          weights = alone.state(State::Master);
          for (const Range& p : params) {
            double largest = 0, off = 0;
            for (size_t i = p.begin; i < p.end; ++i) {
              largest = std::max(largest, std::abs(w[i]));
              off = std::max(off, std::abs(double{weights[i]} - w[i]));
            }
            EXPECT_LE(off, 2e-5 * largest) << "P " << P << " step " << t;
          }
          const auto kept = alone.update().saved_states().back()->numbers();
          for (size_t k = 0; k < params.size() && t >= kFreeze; ++k) {
            EXPECT_NEAR(kept[k][0], params[k].mean, 1e-5 * params[k].mean);
            if (t > kFreeze) {
              EXPECT_NEAR(kept[k][1], params[k].factor, 1e-4) << "P " << P << " step " << t;
            }
            if (t == kSteps) bounds.insert(kept[k][1]);
          }
        }
        dp.barrier("test");
      }
    });
    EXPECT_TRUE(bounds.contains(0.5)) << P;  // variances have grown
    EXPECT_TRUE(bounds.contains(4)) << P;    // and shrunk
    EXPECT_GT(bounds.size(), 2u) << P;
  }
}

}  // namespace one_bit_test
}  // namespace ds::testing
