// SPDX-License-Identifier: Apache-2.0
// 0/1 Adam: its updates are of the kinds that DeepSpeed counts, and do what a simulation of all ranks does, to the bit.

#include "equivalence/one_bit.h"
#include "optim/kind.h"
#include "slow_set.h"

namespace ds::testing {
namespace one_bit_test {

constexpr UpdateConfig kZeroOne{.type = OptimizerType::ZeroOneAdam,
                                .beta2 = 0.95,
                                .weight_decay = 0.1,
                                .bias_correction = false,
                                .var_freeze_step = 40,
                                .var_update_scaler = 4,
                                .local_step_scaler = 20,
                                .local_step_clipper = 4};

// Refreshes of DeepSpeed's counters, step by step.
TEST(ZeroOneAdam, RefreshesAndMeetsAsDeepSpeedCounts) {
  for (const i64 scaler : {1, 4, 16}) {
    UpdateConfig u = kZeroOne;
    u.var_freeze_step = 1000, u.var_update_scaler = scaler, u.local_step_scaler = 7 * scaler, u.local_step_clipper = 8;
    i64 var_interval = 1, var_counter = 0, local_interval = 1, local_counter = 0;
    for (i64 t = 1; t <= 2000; ++t) {
      const optim::ZeroOneStep step = optim::zero_one_step(u, t);
      if (t <= u.var_freeze_step) {
        EXPECT_EQ(step, t % var_interval == 0 ? optim::ZeroOneStep::Refresh : optim::ZeroOneStep::Signs) << t;
        if (t % var_interval == 0 && ++var_counter == scaler) var_counter = 0, var_interval *= 2;
      } else {
        EXPECT_EQ(step, t % local_interval == 0 ? optim::ZeroOneStep::Sync : optim::ZeroOneStep::Local) << t;
        if (++local_counter == u.local_step_scaler)
          local_counter = 0, local_interval = std::min(u.local_step_clipper, local_interval * 2);
      }
    }
  }
}

// The number of updates of each kind, and an example of it, agree with a count over all updates.
TEST(ZeroOneAdam, KindsOfUpdatesAreCounted) {
  for (const i64 scaler : {1, 3, 16}) {
    for (const i64 freeze : {1, 7, 100, 1000}) {
      UpdateConfig u = kZeroOne;
      u.var_freeze_step = freeze, u.var_update_scaler = scaler, u.local_step_scaler = 5, u.local_step_clipper = 6;
      for (const i64 updates : {i64{1}, i64{2}, i64{6}, i64{50}, i64{1003}, i64{2000}}) {
        std::map<optim::ZeroOneStep, i64> want, got;
        for (i64 t = 1; t <= updates; ++t) ++want[optim::zero_one_step(u, t)];
        for (const auto& [number, times] : optim::zero_one_kinds(u, updates)) {
          EXPECT_LE(number, updates);
          got[optim::zero_one_step(u, number)] = times;
        }
        EXPECT_EQ(got, want) << "scaler " << scaler << " freeze " << freeze << " updates " << updates;
      }
    }
  }
  UpdateConfig most = kZeroOne;
  most.var_freeze_step = most.var_update_scaler = most.local_step_scaler = most.local_step_clipper = i64{1} << 40;
  i64 all = 0;
  for (const auto& [number, times] : optim::zero_one_kinds(most, i64{1} << 53)) all += times;
  EXPECT_EQ(all, i64{1} << 53);
}

// To the bit, but for refreshes, which other tests hold: both moments are then taken over.
TEST(ZeroOneAdam, DoesWhatASimulationOfAllRanksDoes) {
  constexpr i64 kSteps = 200;
  test::EveryNth tried(2);
  for (const int P : {1, 2, 3, 4}) {
    if (!tried()) continue;
    Config c = tiny_config(tiny_llama(), P, 1, 0);
    static_cast<UpdateConfig&>(c.optimizer) = kZeroOne;
    const auto gradient = [](int rank, i64 step) {
      return [=](i64 param, i64 i) {
        const RngKey common{7, static_cast<u32>(param), static_cast<u32>(step)},
            own{8 + static_cast<u32>(rank), static_cast<u32>(param), static_cast<u32>(step)};
        const auto uniform = [&](const RngKey& k) {
          return static_cast<float>(k.bits(static_cast<u64>(i))) * 0x1p-31f - 1;
        };
        const float size = 0.01f * static_cast<float>(1 + param % 5);
        return i % 97 == 5 ? 0.0f : size * (uniform({7, static_cast<u32>(param), 0}) + uniform(common) + uniform(own));
      };
    };
    const auto start = [](i64 param, i64 i) {
      return 0.02f *
             (static_cast<float>(RngKey{5, static_cast<u32>(param), 0}.bits(static_cast<u64>(i))) * 0x1p-31f - 1);
    };
    std::vector<std::vector<float>> weights(static_cast<size_t>(P)), momenta(weights.size());
    std::vector<float> variances;
    std::optional<Simulation<float>> all;  // m: of what is common
    std::vector<Simulation<float>> of_rank;
    std::vector<float> common;
    float rates = 0;
    i64 apart = 0;
    run_threads(P, {.timeout_s = 60}, [&](Communicator& dp) {
      const auto device = make_cpu_device(*cpu_ops(), 1);
      UpdateAlone alone(c, dp, *device);
      alone.set_parameters(start);
      const auto me = static_cast<size_t>(dp.rank());
      const auto show = [&] {
        weights[me] = alone.state(State::Master);
        momenta[me] = alone.state(State::ExpAvg);
        if (me == 0) variances = alone.state(State::ExpAvgSq);
        dp.barrier("test");
      };
      show();
      std::vector<double> decays;
      std::vector<std::pair<i64, i64>> elements;  // parameter, place in it
      for (const zero::Piece& p : alone.plan().dp().layout.whole_pieces()) {
        for (i64 i = 0; i < p.count; ++i) {
          elements.emplace_back(p.param, i);
          decays.push_back(alone.plan().row_of(p.param).decay ? double{0.1f} : 0);
        }
      }
      if (me == 0) {
        all.emplace(c.optimizer, decays, chunks_of(alone.plan().dp().layout), static_cast<size_t>(P));
        all->w = weights[0];
      }
      for (i64 t = 1; t <= kSteps; ++t) {
        alone.step(t, gradient(dp.rank(), t));
        show();
        if (me == 0) {
          const optim::ZeroOneStep step = optim::zero_one_step(kZeroOne, t);
          std::vector<std::vector<float>> g(static_cast<size_t>(P));
          for (int r = 0; r < P; ++r) {
            const auto of_rank_r = gradient(r, t);
            for (const auto& [param, i] : elements) g[static_cast<size_t>(r)].push_back(of_rank_r(param, i));
          }
          const float b1 = static_cast<float>(kZeroOne.beta1), rest = static_cast<float>(1 - kZeroOne.beta1);
          const auto take = [&](std::vector<float>& m, const std::vector<float>& x) {
            for (size_t i = 0; i < m.size(); ++i) m[i] = b1 * m[i] + rest * x[i];
          };
          if (step == optim::ZeroOneStep::Refresh) {
            all->w = weights[0], all->m = momenta[0], all->v = variances;
          } else if (step == optim::ZeroOneStep::Signs) {
            take(all->m, P == 1 ? g.front() : all->mean_by_signs(g));
            all->move();
          } else {
            if (of_rank.empty()) {  // the first step that each takes for itself
              std::fill(all->e_server.begin(), all->e_server.end(), 0.0f);
              for (auto& e : all->e_worker) std::fill(e.begin(), e.end(), 0.0f);
              of_rank.assign(static_cast<size_t>(P), *all);
              common = all->w;
            }
            for (size_t r = 0; r < of_rank.size(); ++r) {
              take(of_rank[r].m, g[r]);
              of_rank[r].move();
            }
            rates += 1e-3f;
            if (step == optim::ZeroOneStep::Sync) {
              const float eps = static_cast<float>(kZeroOne.eps), sum = rates;
              std::vector<std::vector<float>> delta(of_rank.size(), common);
              const auto moves = [&](size_t i) { return all->v[i] > 0 ? 1.0f : 0.0f; };
              for (size_t r = 0; r < delta.size(); ++r) {
                for (size_t i = 0; i < common.size(); ++i)
                  delta[r][i] = moves(i) * (common[i] - of_rank[r].w[i]) * (std::sqrt(all->v[i]) + eps);
              }
              const std::vector<float> mean = P == 1 ? delta.front() : all->mean_by_signs(delta);
              for (size_t i = 0; i < common.size(); ++i) {
                if (moves(i) == 0) {
                  common[i] = of_rank.front().w[i];
                } else {
                  common[i] = common[i] - mean[i] / (std::sqrt(all->v[i]) + eps);
                }
              }
              for (Simulation<float>& s : of_rank) {
                s.w = common;
                for (size_t i = 0; i < common.size(); ++i) s.m[i] = moves(i) * mean[i] / sum;
              }
              rates = 0;
            }
          }
          for (size_t r = 0; r < weights.size(); ++r) {
            const Simulation<float>& want = of_rank.empty() ? *all : of_rank[r];
            EXPECT_TRUE(same_bits(weights[r], want.w)) << "P " << P << " step " << t << " rank " << r;
            EXPECT_TRUE(same_bits(momenta[r], want.m)) << "P " << P << " step " << t << " rank " << r;
          }
          if (step == optim::ZeroOneStep::Local && P > 1) apart += weights[0] != weights[1];
        }
        dp.barrier("test");
      }
    });
    EXPECT_EQ(apart, P > 1 ? 10 + 90 : 0);  // every other step, then three of four
  }
}

}  // namespace one_bit_test
}  // namespace ds::testing
