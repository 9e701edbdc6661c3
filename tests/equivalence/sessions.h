// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sessions over small models, and random work for them.

#include <map>
#include <random>
#include <set>
#include <vector>

#include "equivalence/layouts.h"
#include "infer/session.h"

namespace ds::testing {

inline Config generating(const ModelConfig& model, const Layout& l, DType work, i64 length = 0) {
  Config c = config_of(model, l, 4);
  c.bf16.enabled = work == DType::BF16;
  c.fp16.enabled = work == DType::F16;
  c.communication_data_type = wire_type_of(work);
  c.use = ConfigUse::Generate;
  if (length > 0) c.data.seq_length = length;
  return c;
}

inline ModelConfig workload_model() {
  ModelConfig model = of_four_heads(tiny_llama());
  model.max_positions = 400;
  return model;
}

// Random requests, orders, sizes and cancellations: the bytes of a request are always those that it has alone.
class Workloads {
 public:
  static constexpr i64 kContext = 260;

  Workloads(engine::Engine& engine, u32 seed) : engine_(engine), random_(seed), made_(14) {
    std::vector<i32> begin(150);
    for (i32& id : begin) id = static_cast<i32>(draw(0, 60));
    for (Made& m : made_) {
      const i64 shared = draw(0, 1) * draw(0, 150);
      m.request.tokens.assign(begin.begin(), begin.begin() + shared);
      for (i64 t = draw(2, 40); t > 0; --t) m.request.tokens.push_back(static_cast<i32>(draw(0, 60)));
      m.request.max_tokens = draw(0, 3) == 0 ? 0 : draw(1, 60);
      if (m.request.max_tokens == 0 || draw(0, 3) == 0)
        m.request.scored_from = draw(1, std::ssize(m.request.tokens) - 1);
      m.request.logprobs = draw(0, 1) == 0;
      m.request.sampling = {.temperature = static_cast<double>(draw(0, 2)),
                            .top_k = draw(0, 1) * draw(1, 20),
                            .top_p = draw(0, 1) == 0 ? 1 : 0.8,
                            .repetition_penalty = draw(0, 2) == 0 ? 1.3 : 1,
                            .seed = static_cast<u32>(draw(0, 3)),
                            .index = static_cast<u32>(draw(0, 2))};
      infer::Session session(engine.stage(), {.at_once = 1, .context = kContext});
      TokenCollector alone(kLast);
      session.add(m.request);
      while (!session.idle()) session.step(alone);
      m.text = alone.texts[0], m.logprobs = alone.logprobs[0], m.scores = alone.scores[0];
    }
  }

  i64 draw(i64 least, i64 most) { return least + static_cast<i64>(random_() % (most - least + 1)); }
  SessionSizes draw_sizes() {
    SessionSizes sizes{.at_once = draw(1, 8), .context = kContext, .chunk = draw(1, 90)};
    if (draw(0, 1) == 0) sizes.cached = draw(kContext, 700);
    return sizes;
  }

  infer::Session::Counts run(const SessionSizes& sizes, infer::Proposer* proposer) {
    infer::Session session(engine_.stage(), sizes, proposer);
    TokenCollector together(kLast);
    std::map<infer::Session::Id, size_t> which;
    std::set<infer::Session::Id> cancelled;
    for (int left = 25; left > 0 || !session.idle();) {
      for (; left > 0 && draw(0, 3) != 0; --left) {
        const auto m = static_cast<size_t>(draw(0, std::ssize(made_) - 1));
        which[session.add(made_[m].request)] = m;
      }
      if (!which.empty() && draw(0, 9) == 0) {
        const auto id = static_cast<infer::Session::Id>(draw(0, std::ssize(which) - 1));
        if (!together.has_ended.contains(id)) cancelled.insert(id), session.cancel(id);
      }
      session.step(together);
    }
    for (const auto& [id, m] : which) {
      if (cancelled.contains(id)) continue;
      EXPECT_EQ(together.texts[id], made_[m].text) << m;
      EXPECT_TRUE(same_bits(together.logprobs[id], made_[m].logprobs)) << m;
      EXPECT_EQ(together.scores[id], made_[m].scores) << m;
    }
    return session.counts();
  }

 private:
  static constexpr i32 kLast = 7;  // ends a text, too

  struct Made {
    infer::Request request;
    std::vector<i32> text;
    std::vector<float> logprobs;
    std::map<i64, float> scores;
  };
  engine::Engine& engine_;
  std::mt19937 random_;
  std::vector<Made> made_;
};

}  // namespace ds::testing
