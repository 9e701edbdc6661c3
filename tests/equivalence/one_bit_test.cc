// SPDX-License-Identifier: Apache-2.0
// 1-bit Adam, and 0/1 Adam and 1-bit LAMB beside it: what it does is what a simulation of all ranks in fp64 does with
// the same gradients, through warm-up and freeze; ZeRO stage 1 is stage 0 to the bit; ranks of a pipeline and of tp
// agree; what overflows changes nothing; and what travels is counted against the formula.

#include <set>

#include "equivalence/checkpoints.h"
#include "update/update.h"

namespace ds::testing {
namespace one_bit_test {

constexpr i64 kFreeze = 60;  // until second moments have settled, with a beta2 of 0.95

Config one_bit(const ModelConfig& model, const Layout& l, i64 accumulation = 2) {
  Config c = tiny_config(model, l.dp, accumulation, l.stage);
  c.pipeline = {.stages = l.pp, .schedule = l.schedule, .partition = "uniform", .virtual_stages = l.chunks};
  c.tensor_parallel.tp_size = l.tp;
  c.optimizer.type = OptimizerType::OneBitAdam;
  c.optimizer.bias_correction = false;
  c.optimizer.freeze_step = kFreeze;
  c.optimizer.lr = 1e-3;
  c.optimizer.beta2 = 0.95;
  c.gradient_clipping = 0;
  c.reduce_order = ReduceOrder::Boundary;
  return c;
}

struct Chunk {  // of a parameter, averaged by one rank
  size_t begin, end, param;
};

// Every rank's part of the algorithm, of all parameters side by side, with no code of ours: in fp64, or in fp32 with
// each operation rounded, which meets the engine's bits.
template <class T>
struct Simulation {
  Simulation(const OptimizerConfig& config, std::vector<double> decay, std::vector<Chunk> all_chunks, size_t num_ranks)
      : o(config),
        decays(decay.begin(), decay.end()),
        chunks(std::move(all_chunks)),
        w(decays.size()),
        m(w.size()),
        v(w.size()),
        e_server(w.size()),
        e_worker(num_ranks, std::vector<T>(w.size())) {
    for (const Chunk& c : chunks) params = std::max(params, c.param + 1);
  }

  // Of a step whose gradients are summed: their mean.
  void warm_up(const std::vector<double>& g) {
    ++t;
    for (size_t i = 0; i < w.size(); ++i) {
      m[i] = static_cast<T>(o.beta1 * double{m[i]} + (1 - o.beta1) * g[i]);
      v[i] = static_cast<T>(o.beta2 * double{v[i]} + (1 - o.beta2) * g[i] * g[i]);
    }
    move();
  }
  // What e, with x added to it, sends; it keeps the rest. Each parameter, or each chunk of one, has a scale.
  std::vector<T> signs(std::vector<T>& e, const std::vector<T>& x, bool of_params) const {
    std::vector<double> squares(of_params ? params : chunks.size()), counts(squares.size());
    const auto number = [&](const Chunk& c) { return of_params ? c.param : static_cast<size_t>(&c - chunks.data()); };
    for (const Chunk& c : chunks) {
      for (size_t i = c.begin; i < c.end; ++i) {
        e[i] = x[i] + e[i];
        squares[number(c)] += double{e[i]} * double{e[i]};
      }
      counts[number(c)] += static_cast<double>(c.end - c.begin);
    }
    std::vector<T> sent(e.size());
    for (const Chunk& c : chunks) {
      const T a = static_cast<T>(std::sqrt(squares[number(c)] / counts[number(c)]));
      for (size_t i = c.begin; i < c.end; ++i) {
        sent[i] = e[i] < 0 ? -a : a;
        e[i] -= sent[i];
      }
    }
    return sent;
  }
  std::vector<T> mean_by_signs(const std::vector<std::vector<T>>& x) {
    std::vector<T> mean;
    for (size_t r = 0; r < e_worker.size(); ++r) {
      const std::vector<T> sent = signs(e_worker[r], x[r], true);
      if (r == 0) {
        mean = sent;
      } else {
        for (size_t i = 0; i < mean.size(); ++i) mean[i] += sent[i];
      }
    }
    for (T& x_of_all : mean) x_of_all /= static_cast<T>(e_worker.size());
    return signs(e_server, mean, false);
  }
  void compressed(const std::vector<std::vector<double>>& gradients) {
    std::vector<std::vector<T>> momenta;
    for (const std::vector<double>& g : gradients) momenta.push_back(with_gradient(g));
    m = momenta.size() == 1 ? momenta.front() : mean_by_signs(momenta);
    ++t;
    move();
  }
  std::vector<T> with_gradient(const std::vector<double>& g) const {
    const T b1 = static_cast<T>(o.beta1), rest = static_cast<T>(1 - o.beta1);
    std::vector<T> x(m.size());
    for (size_t i = 0; i < x.size(); ++i) x[i] = b1 * m[i] + rest * static_cast<T>(g[i]);
    return x;
  }
  void move() {
    const T lr = static_cast<T>(o.lr), eps = static_cast<T>(o.eps);
    const auto correction = [&](double beta, i64 steps) {  // rounded as the engine's are
      return o.bias_correction ? static_cast<T>(static_cast<float>(1 - std::pow(beta, static_cast<double>(steps))))
                               : T(1);
    };
    const T c1 = correction(o.beta1, t), c2 = correction(o.beta2, std::min(t, o.freeze_step));
    for (size_t i = 0; i < w.size(); ++i) {
      const T along = v[i] > 0 ? m[i] : 0;
      w[i] -= lr * (along / c1 / (std::sqrt(v[i] / c2) + eps) + decays[i] * w[i]);
    }
  }

  OptimizerConfig o;
  std::vector<T> decays;
  std::vector<Chunk> chunks;
  std::vector<T> w, m, v, e_server;
  std::vector<std::vector<T>> e_worker;
  size_t params = 0;
  i64 t = 0;
};

// Of a rank's engine at stage 0, which has all: each piece side by side.
std::vector<double> gradients_of(engine::Engine& engine, double divisor) {
  std::vector<double> all;
  for (const zero::Piece& piece : engine.plan().dp().layout.whole_pieces()) {
    const zero::TierLease lease = engine.gradient(piece);
    for (i64 i = 0; i < piece.count; ++i) all.push_back(double{lease.values()[i]} / divisor);
  }
  return all;
}
template <class T>
std::vector<T> state_of(engine::Engine& engine, State s) {
  std::vector<T> all;
  for (const zero::Piece& piece : engine.plan().dp().layout.whole_pieces()) {
    const zero::StateLease lease = engine.lease(piece, zero::LeaseTo::Read);
    const float* const from = s == State::Master ? lease.master(DType::F32, piece.count).as<float>() : lease.values(s);
    all.insert(all.end(), from, from + piece.count);
  }
  return all;
}
std::vector<double> decays_of(engine::Engine& engine) {
  std::vector<double> decays;
  for (const zero::Piece& p : engine.plan().dp().layout.whole_pieces())
    decays.insert(decays.end(), static_cast<size_t>(p.count),
                  engine.row_of(p.param).decay ? engine.config().optimizer.weight_decay : 0);
  return decays;
}

std::vector<Chunk> chunks_of(const zero::Layout& layout) {
  std::map<i64, size_t> first;
  size_t at = 0;
  for (const zero::Piece& p : layout.whole_pieces()) {
    first[p.param] = at;
    at += static_cast<size_t>(p.count);
  }
  std::vector<Chunk> chunks;
  for (int r = 0; r < layout.num_ranks(); ++r) {
    for (const zero::Piece& p : layout.owned_pieces(r)) {
      const size_t begin = first[p.param] + static_cast<size_t>(p.begin);
      chunks.push_back({begin, begin + static_cast<size_t>(p.count), static_cast<size_t>(p.param)});
    }
  }
  return chunks;
}

// In fp64 up to where a sign is another one, for what is averaged is as small as its rounding; from the freeze on in
// fp32, to the bit.
TEST(OneBitAdam, DoesWhatASimulationOfAllRanksDoes) {
  constexpr i64 kSteps = 200, kExact = 30;
  for (const int P : {1, 2, 3, 4}) {
    Config c = one_bit(P % 2 == 0 ? tiny_gpt2() : tiny_llama(), {.dp = P}, P == 2 ? 3 : 1);
    c.optimizer.bias_correction = P == 3;
    std::vector<std::vector<double>> gradients(static_cast<size_t>(P));
    std::optional<Simulation<double>> exact;
    std::optional<Simulation<float>> rounded;
    double away = 0;
    i64 others = 0;
    Hooks hooks;
    hooks.before_step = [&](engine::Engine& engine, i64 step) {
      if (engine.mesh().rank() != 0) return;
      const std::vector<Chunk> chunks = chunks_of(engine.plan().dp().layout);
      if (step == 0) {
        exact.emplace(c.optimizer, decays_of(engine), chunks, static_cast<size_t>(P));
        exact->w = state_of<double>(engine, State::Master);
      }
      if (step == kFreeze) {
        rounded.emplace(c.optimizer, decays_of(engine), chunks, static_cast<size_t>(P));
        rounded->w = state_of<float>(engine, State::Master);
        rounded->m = state_of<float>(engine, State::ExpAvg);
        rounded->v = state_of<float>(engine, State::ExpAvgSq);
        rounded->t = step;
      }
    };
    hooks.after_step = [&](engine::Engine& engine, i64 step) {
      const bool summed = step < kFreeze;
      gradients[static_cast<size_t>(engine.mesh().rank())] = gradients_of(engine, summed ? P : 1);
      engine.mesh().world().barrier("test");
      if (engine.mesh().rank() == 0) {
        if (summed) {
          exact->warm_up(gradients.front());
        } else {
          if (step < kFreeze + kExact) exact->compressed(gradients);
          rounded->compressed(gradients);
          EXPECT_TRUE(same_bits(rounded->w, state_of<float>(engine, State::Master))) << P << " step " << step;
          EXPECT_TRUE(same_bits(rounded->m, state_of<float>(engine, State::ExpAvg))) << P << " step " << step;
        }
        if (step == kFreeze - 1 || step == kFreeze + kExact - 1) {
          const std::vector<double> now = state_of<double>(engine, State::Master);
          for (size_t i = 0; i < now.size(); ++i) {
            const double off = std::abs(now[i] - exact->w[i]);
            if (off > 1e-5) ++others;
            away = std::max(away, off > 1e-5 ? 0 : off);
          }
          EXPECT_LT(others, std::ssize(now) / 500) << P << " step " << step;
        }
      }
      engine.mesh().world().barrier("test");
    };
    const Trace t = train_threads(c, P, kSteps, 1, hooks);
    EXPECT_LT(t.losses.back(), 0.7 * t.losses.front()) << P;
    EXPECT_GT(away, 0);
  }
}

// Stage 1 owns slices of masters and variances; the rest is the same.
TEST(OneBitAdam, StageOneIsStageZero) {
  for (const ModelConfig& model : {tiny_gpt2(), tiny_llama()}) {
    for (const int work : {0, 1, 2}) {
      for (const i64 accumulation : {1, 3}) {
        for (const ReduceOrder order : {ReduceOrder::Boundary, ReduceOrder::Micro}) {
          const auto train = [&](const Layout& l) {
            Config c = one_bit(model, l, accumulation);
            c.optimizer.freeze_step = 3;
            c.bf16.enabled = work == 1;
            if (work == 2) c.fp16 = {.enabled = true, .loss_scale = 0, .initial_scale_power = 20};
            c.communication_data_type = c.work_dtype();
            c.reduce_order = order;
            if (accumulation == 3) {  // groups have messages of their own
              ParamGroupConfig slow, frozen;
              static_cast<UpdateConfig&>(slow) = static_cast<UpdateConfig&>(frozen) = c.optimizer;
              slow.lr /= 2, slow.params = {"*mlp*"};
              frozen.frozen = true, frozen.params = {model.family == Family::Gpt2 ? "*ln_*" : "*norm*"};
              c.optimizer.groups = {slow, frozen};
            }
            return train_threads(c, l.ranks(), 8);
          };
          const Trace zero = train({.dp = 3}), one = train({.dp = 3, .stage = 1});
          EXPECT_TRUE(std::isfinite(zero.losses.back()));
          expect_same_training(one, zero, fmt::format("work {} accumulation {}", work, accumulation));
        }
      }
    }
  }
}

TEST(OneBitLamb, StageOneIsStageZero) {
  for (const bool half : {false, true}) {
    const auto train = [&](const Layout& l) {
      Config c = one_bit(tiny_gpt2(), l, half ? 2 : 1);
      c.optimizer.type = OptimizerType::OneBitLamb;
      c.optimizer.freeze_step = 3;
      c.optimizer.lr = 5e-3;
      if (half) {
        c.fp16 = {.enabled = true, .loss_scale = 0, .initial_scale_power = 20};
        c.communication_data_type = DType::F16;
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

TEST(OneBitAdam, StagesOfAPipelineMoveNoBit) {
  const auto models = {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama())};
  for (const auto& [model, type] : {std::pair{*models.begin(), OptimizerType::OneBitAdam},
                                    {models.begin()[1], OptimizerType::OneBitAdam},
                                    {*models.begin(), OptimizerType::OneBitLamb}}) {
    const auto train = [&](const Layout& l) {
      Config c = one_bit(model, l);
      c.optimizer.type = type;
      c.optimizer.freeze_step = 2;
      return train_threads(c, l.ranks(), 6);
    };
    const Trace flat = train({.dp = 2});
    for (const Layout& l : {Layout{.dp = 2, .pp = 2}, {.dp = 2, .pp = 2, .stage = 1}})
      expect_same_training(train(l), flat, l.name());
    // Copies on ranks of tp get the same signs, though each rank averages its own.
    Config c = one_bit(model, {.dp = 2, .tp = 2});
    c.optimizer.type = type;
    c.optimizer.freeze_step = 2;
    Hooks hooks;
    hooks.at_end = [&](engine::Engine& engine) {
      for (const zero::Piece& piece : engine.plan().dp().layout.whole_pieces()) {
        if (!engine.row_of(piece.param).slice.whole()) continue;
        const zero::StateLease lease = engine.lease(piece, zero::LeaseTo::Read);
        const auto* const values = static_cast<const float*>(lease[State::Param]);
        std::vector<float> least(values, values + piece.count), most = least;
        engine.mesh().tp().all_reduce(least.data(), piece.count, DType::F32, ReduceOp::Min, "test").wait();
        engine.mesh().tp().all_reduce(most.data(), piece.count, DType::F32, ReduceOp::Max, "test").wait();
        EXPECT_TRUE(same_bits(least, most)) << engine.row_of(piece.param).name;
      }
    };
    const Trace cut = train_threads(c, 4, 6, 1, hooks);
    for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(cut.losses[i], flat.losses[i], 1e-4);
    EXPECT_TRUE(std::isfinite(cut.losses.back()));  // signs of each rank's part have a scale of their own
  }
}

// A step that overflows leaves momentum, errors and weights as they were.
TEST(OneBitAdam, AnOverflowChangesNothing) {
  for (const auto& [type, stage, freeze] : {std::tuple{OptimizerType::OneBitAdam, 0, 2},
                                            {OptimizerType::OneBitAdam, 1, 2},
                                            {OptimizerType::OneBitLamb, 0, 2},
                                            {OptimizerType::OneBitLamb, 1, 20}}) {  // in its warm-up
    Config c = one_bit(tiny_gpt2(), {.dp = 2, .stage = stage});
    c.optimizer.type = type;
    c.fp16 = {.enabled = true, .loss_scale = 0, .initial_scale_power = 8};
    c.communication_data_type = DType::F16;
    c.optimizer.freeze_step = freeze;
    std::vector<std::vector<float>> before(2);
    const auto all_of = [](engine::Engine& engine) {
      std::vector<float> values;
      for (const auto& [name, view] : engine.rank_local())
        values.insert(values.end(), view.as<float>(), view.as<float>() + view.numel());
      for (const std::span<double> numbers : engine.param_numbers())
        values.insert(values.end(), numbers.begin(), numbers.end());
      for (const zero::Piece& piece : engine.held_pieces()) {
        const zero::StateLease lease = engine.lease(piece, zero::LeaseTo::Read);
        for (const State s : {State::Master, State::ExpAvg, State::ExpAvgSq, State::ExpAvgSqFresh})
          if (lease[s] != nullptr) values.insert(values.end(), lease.values(s), lease.values(s) + piece.count);
      }
      return values;
    };
    Hooks hooks;
    i64 skipped = 0;
    hooks.before_step = [&](engine::Engine& engine, i64 step) {
      if (step == 5) engine.scaler().restore({0x1p40, 5, -1, 1});
      before[static_cast<size_t>(engine.mesh().rank())] = all_of(engine);
    };
    hooks.after_step = [&](engine::Engine& engine, i64 step) {
      if (step != 5) return;
      EXPECT_TRUE(same_bits(all_of(engine), before[static_cast<size_t>(engine.mesh().rank())]));
      engine.scaler().restore({0x1p8, 6, -1, 1});
      if (engine.mesh().rank() == 0) ++skipped;
    };
    const Trace t = train_threads(c, 2, 8, 1, hooks);
    EXPECT_EQ(skipped, 1);
    EXPECT_TRUE(t.skipped[5] && !t.skipped[6]);
    EXPECT_TRUE(std::isfinite(t.losses.back()));
  }
}

// Two bits for each element, one there and one back, and a scale for each parameter; nothing else of gradients.
TEST(OneBitAdam, SendsSigns) {
  for (const int P : {2, 4}) {
    for (const i64 stage : {0, 1}) {
      Config c = one_bit(tiny_gpt2(), {.dp = P, .stage = stage});
      c.steps = 30;
      c.optimizer.freeze_step = 10;
      const Trace t = train_threads(c, P, c.steps);
      const model::Model model = model::make_model(c.model, c.data.seq_length);
      const i64 sent = t.sent.at("dp.one_bit").bytes, calls = t.sent.at("dp.one_bit").calls;
      EXPECT_EQ(sent, 20 * t.planned.at("dp.one_bit").bytes);
      EXPECT_EQ(calls, 20 * 2);
      const double payload = 20.0 * 2 * (P - 1) / P * static_cast<double>(model.num_params()) / 8;
      const double scales = 20.0 * 2 * (P - 1) * 4 * static_cast<double>(model.params().size());
      EXPECT_GT(static_cast<double>(sent), payload + scales);
      EXPECT_LT(static_cast<double>(sent), 1.1 * payload + scales + 20.0 * 2 * (P - 1) * 64);
      // Of the warm-up alone.
      EXPECT_EQ(t.sent.at("dp.reduce_scatter").calls % 10, 0);
      Config exact = c;
      exact.optimizer.type = OptimizerType::AdamW;
      const Trace whole = train_threads(exact, P, 10);
      EXPECT_EQ(t.sent.at("dp.reduce_scatter").bytes, whole.sent.at("dp.reduce_scatter").bytes);
      EXPECT_EQ(t.planned.at("dp.reduce_scatter").bytes, 0);
    }
  }
}

// What is lost is in checkpoints' arrays of ranks, and resetting it is what another layout does.
TEST(OneBitAdam, WhatIsRankLocalGoesOnWhereItWas) {
  for (const i64 stage : {0, 1}) {
    Config c = one_bit(tiny_gpt2(), {.dp = 2, .stage = stage});
    c.optimizer.freeze_step = 10;
    const TempDirectory dir;
    std::vector<std::vector<std::vector<float>>> own(2);
    Hooks saving;
    saving.at_end = {};
    saving.after_step = [&](engine::Engine& engine, i64 step) {
      if (step != 14) return;
      auto& mine = own[static_cast<size_t>(engine.mesh().rank())];
      for (const auto& [name, view] : engine.rank_local())
        mine.emplace_back(view.as<float>(), view.as<float>() + view.numel());
      save_step(engine, dir.path());
    };
    const Trace whole = train_threads(c, 2, 20, 1, saving);
    const auto go_on = [&](bool with_errors) {
      Hooks hooks;
      hooks.start = [&](engine::Engine& engine) {
        load_step(engine, dir.path() + "/step-00000015");
        const auto arrays = engine.rank_local();
        EXPECT_EQ(arrays.size(), 2u);
        for (size_t i = 0; i < arrays.size() && with_errors; ++i) {
          const std::vector<float>& from = own[static_cast<size_t>(engine.mesh().rank())][i];
          engine.device().upload(arrays[i].second.data, from.data(), arrays[i].second.bytes());
        }
      };
      return train_threads(c, 2, 5, 1, hooks);
    };
    const Trace same = go_on(true), reset = go_on(false);
    EXPECT_TRUE(same_bits(same.weights, whole.weights));
    EXPECT_TRUE(same_bits(same.states[State::ExpAvg], whole.states[State::ExpAvg]));
    EXPECT_FALSE(same_bits(reset.weights, whole.weights));
  }
}

// The end of a step over gradients that a test makes up: a rank's shards and updates, without layers.
class UpdateAlone {
 public:
  UpdateAlone(const Config& config, Communicator& dp, Device& device)
      : planned_(config, {.dp = dp.size()}, dp.rank(), DeviceKind::Cpu),
        device_(device),
        self_(make_self_communicator({})),
        results_(device, ledger_, 1, dp.size()) {
    const report::RunPlan& plan = planned_.plan;
    shards_.push_back(std::make_unique<zero::Shards>(plan.shards.front(), plan.rows, plan.grad_rows, true, dp, device,
                                                     ledger_, zero::Tiers{}));
    update_.emplace(plan, shards_, update::Axes{dp, *self_, *self_, *self_}, device, ledger_,
                    [&](int) { return std::vector<model::ParamSlice>(plan.params.size()); });
  }
  const report::RunPlan& plan() const { return planned_.plan; }
  update::Update& update() { return *update_; }
  // value(param, element): of parameters, and of this rank's gradients.
  void set_parameters(const std::function<float(i64, i64)>& value) {
    for (const zero::Piece& piece : plan().dp().layout.held_pieces(plan().dp().rank)) {
      const zero::StateLease lease = shards_.front()->states().lease(piece, zero::LeaseTo::Write);
      for (i64 i = 0; i < piece.count; ++i)
        lease.master(DType::F32, piece.count).as<float>()[i] = value(piece.param, piece.begin + i);
    }
    update_->states_were_set();
  }
  void step(i64 number, const std::function<float(i64, i64)>& value, double lr = 1e-3) {
    update_->begin(number, 1);
    results_.begin();
    zero::GradStore& grads = shards_.front()->grads();
    for (const std::vector<i64>& pass : plan().dp().grads.passes) {
      for (const i64 unit : pass) {
        const i64 first = plan().dp().layout.units()[unit].first_param;
        std::span<const TensorView> rows = grads.acquire(unit);
        for (size_t r = 0; r < rows.size(); ++r) {
          for (i64 i = 0; i < rows[r].numel(); ++i) rows[r].as<float>()[i] = value(first + static_cast<i64>(r), i);
        }
        grads.commit(unit, 0);
      }
    }
    update_->finish_gradients();
    const int P = shards_.front()->comm().size();
    update_->judge(results_.scalars(),
                   {.divisor = update_->keeps_gradients_apart(number) ? 1.0 : double(P), .clip = 0});
    update_->update_params({.lr = lr, .number = number}, results_);
    zero::publish(shards_);
  }
  std::vector<float> state(State s) {
    std::vector<float> all;
    for (const zero::Piece& piece : plan().dp().layout.whole_pieces()) {
      const zero::StateLease lease = shards_.front()->states().lease(piece, zero::LeaseTo::Read);
      const float* const from =
          s == State::Master ? lease.master(DType::F32, piece.count).as<float>() : lease.values(s);
      all.insert(all.end(), from, from + piece.count);
    }
    return all;
  }

 private:
  const report::Planned planned_;
  MemoryLedger ledger_;
  Device& device_;
  std::unique_ptr<Communicator> self_;
  zero::AllShards shards_;
  update::StepResults results_;
  std::optional<update::Update> update_;
};

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

// To the bit, but for refreshes, which other tests hold: both moments are then taken over.
TEST(ZeroOneAdam, DoesWhatASimulationOfAllRanksDoes) {
  constexpr i64 kSteps = 200;
  for (const int P : {1, 2, 3, 4}) {
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

// Of all ranks: what travels to the bit, all else in fp64.
TEST(OneBitLamb, DoesWhatASimulationOfAllRanksDoes) {
  constexpr i64 kSteps = 200;
  for (const auto& [P, decay] : {std::pair{1, 0.1}, {2, 0.1}, {3, 0.0}, {4, 0.1}}) {
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
        // Of some parameters they grow behind the freeze, of some they shrink.
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
          const auto kept = alone.update().param_numbers();
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
