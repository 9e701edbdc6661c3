// SPDX-License-Identifier: Apache-2.0
#pragma once
// Common parts of the tests of the 1-bit family: a simulation of all ranks without code of the library, and the end of
// a step over gradients that a test makes up.

#include "comm/make_communicator.h"
#include "equivalence/checkpoints.h"
#include "update/update.h"

namespace ds::testing::one_bit_test {

inline constexpr i64 kFreeze = 60;  // until second moments have settled, with a beta2 of 0.95

inline Config one_bit(const ModelConfig& model, const Layout& l, i64 accumulation = 2) {
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

  // One step of the warm-up; g is the mean of the ranks' gradients.
  void warm_up(const std::vector<double>& g) {
    ++t;
    for (size_t i = 0; i < w.size(); ++i) {
      m[i] = static_cast<T>(o.beta1 * double{m[i]} + (1 - o.beta1) * g[i]);
      v[i] = static_cast<T>(o.beta2 * double{v[i]} + (1 - o.beta2) * g[i] * g[i]);
    }
    move();
  }
  // Adds x to the error e and returns the signs that are sent; the rest stays in e. Each parameter, or each chunk of
  // one, has a scale.
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

// The gradients of a reduction group in a rank's engine at stage 0, which has all of them: the pieces one after
// another.
inline std::vector<double> gradients_of(engine::Engine& engine, double divisor, size_t group = 0) {
  std::vector<double> all;
  for (const zero::Piece& piece : engine.plan().shards[group].layout.whole_pieces()) {
    const zero::TierLease lease = engine.gradient(piece);
    for (i64 i = 0; i < piece.count; ++i) all.push_back(double{lease.values()[i]} / divisor);
  }
  return all;
}
template <class T>
std::vector<T> state_of(engine::Engine& engine, State s, size_t group = 0) {
  std::vector<T> all;
  for (const zero::Piece& piece : engine.plan().shards[group].layout.whole_pieces()) {
    const zero::StateLease lease = engine.lease(piece, zero::LeaseTo::Read);
    const float* const from = s == State::Master ? lease.master(DType::F32, piece.count).as<float>() : lease.values(s);
    all.insert(all.end(), from, from + piece.count);
  }
  return all;
}
inline std::vector<double> decays_of(engine::Engine& engine, size_t group = 0) {
  std::vector<double> decays;
  for (const zero::Piece& p : engine.plan().shards[group].layout.whole_pieces())
    decays.insert(decays.end(), static_cast<size_t>(p.count),
                  engine.row_of(p.param).decay ? engine.config().optimizer.weight_decay : 0);
  return decays;
}

inline std::vector<Chunk> chunks_of(const zero::Layout& layout) {
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

// The end of a step over gradients that a test makes up: a rank's shards and updates, without layers.
class UpdateAlone {
 public:
  UpdateAlone(const Config& config, Communicator& dp, Device& device)
      : planned_(config, {.dp = dp.size()}, dp.rank(), DeviceKind::Cpu),
        device_(device),
        self_(make_self_communicator({})),
        results_(device, ledger_, {.ranks = dp.size()}) {
    const plan::RunPlan& plan = planned_.plan;
    shards_.push_back(std::make_unique<zero::Shards>(plan.shards.front(), plan.rows, plan.grad_rows, true,
                                                     zero::GroupRanks{dp}, device, ledger_, zero::Tiers{}));
    update_.emplace(plan, shards_, update::Axes{dp, *self_, *self_, *self_}, device, ledger_,
                    [&](int) { return std::vector<model::ParamSlice>(plan.params.size()); });
  }
  const plan::RunPlan& plan() const { return planned_.plan; }
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
    update_->judge(results_.scalars(), {.divisor = double(P), .clip = 0});
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
  const plan::Planned planned_;
  MemoryLedger ledger_;
  Device& device_;
  std::unique_ptr<Communicator> self_;
  zero::AllShards shards_;
  update::StepResults results_;
  std::optional<update::Update> update_;
};

}  // namespace ds::testing::one_bit_test
