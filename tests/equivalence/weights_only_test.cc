// SPDX-License-Identifier: Apache-2.0
// Evaluation and generation allocate only weights: they have the bits of a trainer and none of its other memory.

#include <mutex>

#include "equivalence/layouts.h"

namespace ds::testing {
namespace weights_only_test {

struct Seen {
  double loss = 0;
  std::vector<i32> text;
  plan::TagBytes counted{}, predicted{};
};

Seen look(Config c, int ranks, ConfigUse use) {
  c.use = use;
  Seen seen;
  std::mutex mutex;
  with_engines(c, ranks, [&](engine::Engine& engine) {
    EXPECT_TRUE(engine.is_finite());
    plan::TagBytes counted{};
    double loss = 0;
    if (use != ConfigUse::Generate) {
      const i64 B = c.batch.micro, T = c.data.seq_length;
      loss = *engine.evaluate(3, [&](i64 batch, std::span<i32> ids, std::span<i32> targets, std::span<i32>) {
        for (i64 b = 0; b < B; ++b) {
          const size_t at = static_cast<size_t>(b * T), n = static_cast<size_t>(T);
          fill_sample((batch * engine.mesh().data_size() + engine.mesh().data_rank()) * B + b, c.model.vocab_size,
                      ids.subspan(at, n), targets.subspan(at, n));
        }
        return true;
      });
    }
    for (size_t t = 0; t < counted.size(); ++t) counted[t] = engine.ledger().peak(static_cast<Tag>(t));
    const std::vector<i32> text = text_of(engine, {3, 5, 7}, {.max_tokens = 4});
    const std::lock_guard lock(mutex);
    for (size_t t = 0; t < counted.size(); ++t)
      EXPECT_EQ(counted[t], engine.plan().memory.by_tag[t])
          << "rank " << engine.mesh().rank() << ": " << tag_name(static_cast<Tag>(t));
    if (engine.mesh().rank() == 0) seen = {loss, text, counted, engine.plan().memory.by_tag};
  });
  return seen;
}

TEST(WeightsOnly, HaveATrainersBitsAndNoneOfItsMemory) {
  for (const ModelConfig& model : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama())}) {
    for (const DType work : {DType::F32, DType::BF16, DType::F16}) {
      for (const Layout& l : {Layout{},
                              {.dp = 2, .stage = 0},
                              {.dp = 2, .stage = 3},
                              {.pp = 2},
                              {.pp = 2, .schedule = Kind::Interleaved, .chunks = 2},
                              {.schedule = Kind::BreadthFirst, .chunks = 3},
                              {.schedule = Kind::BreadthFirst, .chunks = 2, .stage = 3},
                              {.pp = 2, .schedule = Kind::ZeroBubbleH1, .stage = 3},
                              {.pp = 3, .schedule = Kind::ZeroBubbleV, .chunks = 2},
                              {.tp = 2, .sequence = true},
                              {.sp = 2},
                              {.checkpoints = Granularity::Layer}}) {
        ModelConfig deep = model;
        deep.layers = 4;
        Config c = config_of(deep, l, 4);
        c.bf16.enabled = work == DType::BF16;
        c.fp16.enabled = work == DType::F16;
        c.communication_data_type = wire_type_of(work);
        const std::string what = fmt::format("{} {} {}", family_name(model.family), l.name(), dtype_name(work));
        const Seen trainer = look(c, l.ranks(), ConfigUse::Train), eval = look(c, l.ranks(), ConfigUse::Evaluate),
                   writer = look(c, l.ranks(), ConfigUse::Generate);
        EXPECT_EQ(std::bit_cast<u64>(eval.loss), std::bit_cast<u64>(trainer.loss)) << what;
        EXPECT_EQ(eval.text, trainer.text) << what;
        EXPECT_EQ(writer.text, trainer.text) << what;
        i64 all[3] = {};
        for (size_t t = 0; t < eval.counted.size(); ++t) {
          all[0] += trainer.counted[t];
          all[1] += eval.counted[t];
          all[2] += writer.counted[t];
        }
        for (const Tag tag : {Tag::Master, Tag::Optimizer, Tag::Grads, Tag::Buckets, Tag::GradAccum, Tag::Host}) {
          EXPECT_EQ(eval.counted[static_cast<size_t>(tag)], 0) << what << " " << tag_name(tag);
          EXPECT_EQ(writer.counted[static_cast<size_t>(tag)], 0) << what << " " << tag_name(tag);
        }
        EXPECT_EQ(eval.counted[static_cast<size_t>(Tag::Params)], trainer.counted[static_cast<size_t>(Tag::Params)]);
        EXPECT_LT(all[1], all[0]) << what;
        EXPECT_LT(all[2], all[1]) << what;
      }
    }
  }
}

}  // namespace weights_only_test
}  // namespace ds::testing
