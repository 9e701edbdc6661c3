// SPDX-License-Identifier: Apache-2.0
// DiLoCo: workers train like runs that never meet and whose parameters are set, in the steps of meetings, by an outer
// optimizer that is written here, in fp32 to the bit and in fp64. ZeRO stages inside a worker are the same to the bit,
// every worker has the same parameters after a meeting, and traffic is counted against the formula.

#include <barrier>

#include "equivalence/layouts.h"

namespace ds::testing {
namespace diloco_test {

Config config_of(const Layout& l, int workers, i64 sync_every, OptimizerType inner = OptimizerType::AdamW) {
  Config c = testing::config_of(tiny_gpt2(), l, 2);
  c.optimizer.type = inner;
  c.optimizer.lr = c.optimizer.muon_lr = c.optimizer.adam_lr = 2e-3;
  c.optimizer.momentum = 0.9;
  c.optimizer.diloco = {.enabled = true, .workers = workers, .sync_every = sync_every};
  c.batch.train *= workers;
  return c;
}

// The traces of all ranks; checks that each has the memory of its plan.
std::vector<Trace> train(const Config& config, int ranks, i64 steps, const Hooks& hooks = {}) {
  std::vector<Trace> traces = traces_of_threads(config, ranks, steps, 1, hooks);
  for (const Trace& t : traces) {
    for (size_t tag = 0; tag < t.counted.size(); ++tag)
      EXPECT_EQ(t.counted[tag], t.predicted[tag]) << tag_name(static_cast<Tag>(tag));
  }
  return traces;
}

// The masters that a rank holds, piece after piece; and sets them.
std::vector<float> masters_of(engine::Engine& engine) {
  std::vector<float> all;
  for (const zero::Piece& piece : engine.held_pieces()) {
    const zero::StateLease lease = engine.lease(piece, zero::LeaseTo::Read);
    const float* const at = lease.master(DType::F32, piece.count).as<float>();
    all.insert(all.end(), at, at + piece.count);
  }
  return all;
}
void set_masters(engine::Engine& engine, const std::vector<float>& all) {
  const float* at = all.data();
  for (const zero::Piece& piece : engine.held_pieces()) {
    const zero::StateLease lease = engine.lease(piece, zero::LeaseTo::Write);
    std::copy(at, at + piece.count, lease.master(DType::F32, piece.count).as<float>());
    at += piece.count;
  }
}

// Nesterov's momentum as in torch.optim.SGD, in T; its gradient is the mean of the differences that the workers' steps
// have made.
template <class T>
struct Outer {
  Outer(const DilocoConfig& config, const std::vector<float>& begin)
      : d(config), w(begin.begin(), begin.end()), m(begin.size()) {}
  // send() adds up the elements that meet; land() applies those of the sums that take effect now.
  void send(const std::vector<std::vector<float>>& workers, const std::vector<bool>& meets) {
    sums.resize(w.size());
    for (size_t i = 0; i < w.size(); ++i) {
      if (!meets[i]) continue;
      sums[i] = w[i] - static_cast<T>(workers[0][i]);
      for (size_t k = 1; k < workers.size(); ++k) sums[i] += w[i] - static_cast<T>(workers[k][i]);
    }
  }
  void land(size_t workers, const std::vector<bool>& lands) {
    const T share = static_cast<T>(1.0 / static_cast<double>(workers)), lr = static_cast<T>(d.outer_lr),
            beta = static_cast<T>(d.outer_momentum);
    for (size_t i = 0; i < w.size(); ++i) {
      if (!lands[i]) continue;
      const T mean = share * sums[i];
      m[i] = beta * m[i] + mean;
      w[i] -= lr * (d.nesterov ? mean + beta * m[i] : m[i]);
    }
  }
  DilocoConfig d;
  std::vector<T> w, m, sums;
};

// Trains with an outer optimizer that is ours, by runs that never meet.
template <class T>
std::vector<Trace> simulate(Config config, int ranks, i64 steps) {
  const DilocoConfig d = config.optimizer.diloco;
  config.optimizer.diloco.sync_every = 1'000'000;
  config.optimizer.diloco.fragments = 1;
  std::vector<std::vector<float>> masters(static_cast<size_t>(ranks));
  std::optional<Outer<T>> outer;
  std::barrier all(ranks);
  return train(config, ranks, steps,
               {.before_step =
                    [&](engine::Engine& engine, i64 step) {
                      const int rank = engine.mesh().rank();
                      if (step == 0 && rank == 0) outer.emplace(d, masters_of(engine));
                    },
                .after_step =
                    [&](engine::Engine& engine, i64 step) {
                      const auto rank = static_cast<size_t>(engine.mesh().rank());
                      masters[rank] = masters_of(engine);
                      // Finds the fragment of each element.
                      std::vector<bool> meets, lands;
                      bool any = false;
                      for (const zero::Piece& piece : engine.held_pieces()) {
                        i64 unit = 0;  // shared, then layer by layer
                        for (i64 rows = piece.param - std::ssize(engine.model().shared); rows >= 0; ++unit)
                          rows -= std::ssize(engine.model().layers[unit]->rows());
                        const i64 f = unit % d.fragments;
                        const auto meets_at = [&](i64 at) {
                          return at > 0 && at % d.sync_every == f * d.sync_every / d.fragments;
                        };
                        const bool now = meets_at(step + 1 - d.overlap_steps);
                        meets.insert(meets.end(), static_cast<size_t>(piece.count), meets_at(step + 1));
                        lands.insert(lands.end(), static_cast<size_t>(piece.count), now);
                        any |= now;
                      }
                      all.arrive_and_wait();
                      if (rank == 0) {
                        if (d.overlap_steps > 0) outer->land(masters.size(), lands);
                        outer->send(masters, meets);
                        if (d.overlap_steps == 0) outer->land(masters.size(), lands);
                      }
                      all.arrive_and_wait();
                      if (!any) return;
                      std::vector<float> own = masters[rank];
                      const T stays = static_cast<T>(static_cast<float>(d.overlap_steps > 0 ? d.local_share : 0)),
                              comes = static_cast<T>(static_cast<float>(1 - static_cast<double>(stays)));
                      for (size_t i = 0; i < own.size(); ++i) {
                        if (!lands[i]) continue;
                        const T kept = stays * static_cast<T>(own[i]), new_one = comes * outer->w[i];
                        own[i] = static_cast<float>(kept + new_one);
                      }
                      set_masters(engine, own);
                    }});
}

TEST(Diloco, WorkersDoWhatASimulationDoes) {
  constexpr i64 kSteps = 43;
  for (const OptimizerType inner : {OptimizerType::AdamW, OptimizerType::Muon}) {
    for (const int workers : {1, 2, 3}) {
      for (const i64 fragments : {1, 3}) {
        Config c = config_of({}, workers, 7, inner);
        c.optimizer.diloco.fragments = fragments;
        c.optimizer.diloco.nesterov = fragments == 1;
        const std::string what = fmt::format("{} workers, {} fragments", workers, fragments);
        const std::vector<Trace> got = train(c, workers, kSteps), want = simulate<float>(c, workers, kSteps);
        for (size_t r = 0; r < got.size(); ++r) {
          EXPECT_TRUE(same_bits(got[r].losses, want[r].losses)) << what << ", worker " << r;
          EXPECT_TRUE(same_bits(got[r].norms, want[r].norms)) << what << ", worker " << r;
        }
        EXPECT_TRUE(same_bits(got[0].weights, want[0].weights)) << what;
        EXPECT_LT(got[0].losses.back(), got[0].losses.front());
        if (workers == 1) continue;
        EXPECT_NE(got[0].losses, got[1].losses);
      }
    }
  }
  // With overlap the result of a meeting takes effect later; it is mixed with the parameters that a worker has by then.
  for (const auto& [fragments, overlap, share] : {std::tuple{1, 3, 0.5}, {3, 2, 0.25}, {2, 3, 0.0}}) {
    Config c = config_of({}, 3, 7);
    c.optimizer.diloco.fragments = fragments;
    c.optimizer.diloco.overlap_steps = overlap;
    c.optimizer.diloco.local_share = share;
    const std::vector<Trace> got = train(c, 3, kSteps), want = simulate<float>(c, 3, kSteps);
    for (size_t r = 0; r < got.size(); ++r)
      EXPECT_TRUE(same_bits(got[r].losses, want[r].losses)) << fragments << " fragments, worker " << r;
    EXPECT_TRUE(same_bits(got[0].weights, want[0].weights)) << fragments << " fragments";
    c.optimizer.diloco.overlap_steps = 0;
    EXPECT_NE(train(c, 3, kSteps)[0].losses, got[0].losses);
  }
  // In fp64 it is the same up to what rounding makes of a run.
  const Config c = config_of({}, 2, 5);
  const std::vector<Trace> got = train(c, 2, 200), want = simulate<double>(c, 2, 200);
  for (size_t s = 0; s < got[0].losses.size(); ++s)
    EXPECT_NEAR(got[0].losses[s], want[0].losses[s], 2e-3 * want[0].losses[s]) << "step " << s;
}

TEST(Diloco, StagesInsideAWorkerChangeNoBit) {
  constexpr i64 kSteps = 12;
  for (const DType work : {DType::F32, DType::BF16}) {
    const auto train_at = [&](const Layout& l, i64 bits) {
      Config c = config_of(l, 2, 4);
      c.bf16.enabled = work == DType::BF16;
      c.optimizer.diloco.fragments = 2;
      c.optimizer.diloco.outer_gradient_bits = bits;
      return train(c, 2 * l.ranks(), kSteps);
    };
    const std::vector<Trace> want = train_at({.dp = 2}, 32);
    for (const i64 stage : {1, 2, 3}) {
      const std::vector<Trace> got = train_at({.dp = 2, .stage = stage}, 32);
      for (size_t r = 0; r < got.size(); ++r)
        expect_same_training(got[r], want[r], fmt::format("stage {} rank {}", stage, r));
    }
    const std::vector<Trace> pp = train_at({.dp = 2, .pp = 2, .stage = 1}, 32);
    EXPECT_TRUE(same_bits(pp[0].losses, want[0].losses));
    if (work == DType::F32) {
      for (const Layout& l :
           {Layout{.dp = 2, .sp = 2, .mode = SequenceParallelMode::Ring, .stage = 3}, {.dp = 1, .tp = 3}})
        expect_close(train_at(l, 32)[0], want[0], l.name(), {.loss = 1e-3, .norm = 0.05});
    }
    for (const i64 bits : {8, 4}) {
      const std::vector<Trace> coded = train_at({.dp = 2, .stage = 2}, bits);
      EXPECT_NE(coded[0].losses, want[0].losses);
      for (size_t s = 0; s < coded[0].losses.size(); ++s)
        EXPECT_NEAR(coded[0].losses[s], want[0].losses[s], 0.05 * want[0].losses[s]) << bits << " bits, step " << s;
    }
  }
}

// Behind a meeting, whatever travelled, and in the bytes of the formula.
TEST(Diloco, WorkersHaveTheSameParametersBehindAMeeting) {
  constexpr i64 kEvery = 3, kSteps = 6;
  for (const i64 bits : {32, 8, 4}) {
    for (const int workers : {2, 4}) {
      Config c = config_of({.stage = 1}, workers, kEvery);
      c.optimizer.diloco.outer_gradient_bits = bits;
      std::vector<std::vector<float>> masters(static_cast<size_t>(workers));
      std::barrier all(workers);
      i64 elems = 0;
      const std::vector<Trace> t = train(
          c, workers, kSteps, {.after_step = [&](engine::Engine& engine, i64 step) {
            const auto rank = static_cast<size_t>(engine.mesh().rank());
            masters[rank] = masters_of(engine);
            all.arrive_and_wait();
            EXPECT_EQ(same_bits(masters[rank], masters[0]), rank == 0 || (step + 1) % kEvery == 0) << "step " << step;
            if (rank == 0) elems = std::ssize(masters[0]);
            EXPECT_EQ(engine.plan().traffic.meetings.size(), 1u);
            all.arrive_and_wait();
          }});
      const CommCount& sent = t[0].sent.at(bits == 32 ? "outer.all_reduce" : "outer.all_gather");
      const double all_of_it = static_cast<double>(elems) * (workers - 1),
                   want = bits == 32 ? all_of_it * 2 * 4 / workers
                                     : all_of_it * (static_cast<double>(bits) / 8 + 4.0 / 256);
      EXPECT_NEAR(static_cast<double>(sent.bytes) / (kSteps / kEvery), want, 0.03 * want) << bits << " bits";
      EXPECT_EQ(t[0].sent.contains("dp.all_reduce"), false);
    }
  }
}

// Meetings send as much as the plan states.
TEST(Diloco, MeetingsArePlanned) {
  for (const i64 bits : {32, 4}) {
    Config c = config_of({.dp = 2, .stage = 3}, 2, 4);
    c.optimizer.diloco.outer_gradient_bits = bits;
    c.optimizer.diloco.fragments = 3;
    std::map<std::string, CommCount> planned;
    const std::vector<Trace> t = train(c, 4, 8, {.at_end = [&](engine::Engine& engine) {
                                         if (engine.mesh().rank() == 0) planned = engine.plan().traffic.meetings;
                                       }});
    ASSERT_EQ(planned.size(), 1u);
    for (const auto& [name, count] : planned) {
      EXPECT_EQ(t[0].sent.at(name).bytes, 2 * count.bytes);
      EXPECT_EQ(t[0].sent.at(name).calls, 2 * count.calls);
    }
  }
}

}  // namespace diloco_test
}  // namespace ds::testing
