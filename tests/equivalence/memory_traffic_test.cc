// SPDX-License-Identifier: Apache-2.0
// Prediction = count: bytes per rank by tag and bytes on the wire, against the run plan and against the ZeRO table
// written out.

#include "equivalence/training.h"

namespace ds::testing {
namespace {

i64 bytes(const report::TagBytes& b, Tag t) { return b[static_cast<size_t>(t)]; }

class Ranks : public ::testing::TestWithParam<int> {};

TEST_P(Ranks, CountedBytesEqualTheZeroTable) {
  const i64 P = GetParam();
  for (const auto& [bf16, wire] : {std::pair{false, DType::F32},
                                   {true, DType::BF16},
                                   {true, DType::F32},
                                   {false, DType::F16},
                                   {true, DType::F16}}) {
    for (i64 stage = 0; stage <= 3; ++stage) {
      for (const i64 m : {1, 3}) {
        Config c = tiny_config(tiny_llama(), static_cast<int>(P), m, stage);
        c.bf16.enabled = bf16;
        c.communication_data_type = wire;
        const Trace t = train_threads(c, static_cast<int>(P), 2);
        SCOPED_TRACE(fmt::format("P {} stage {} bf16 {} wire {} m {}", P, stage, bf16, dtype_name(wire), m));
        for (size_t tag = 0; tag < t.counted.size(); ++tag) {
          if (static_cast<Tag>(tag) == Tag::Comm) continue;  // staging of the communicator: not part of the plan
          EXPECT_EQ(t.counted[tag], t.predicted[tag]) << tag_name(static_cast<Tag>(tag));
        }
        // Padding: every unit (layer) is padded to P * 128 elements.
        const model::Model model = model::make_model(c.model, c.data.seq_length);
        i64 padded = 0;
        for (const auto& layer : model.layers) {
          i64 n = 0;
          for (const auto& row : layer->rows()) n += row.numel();
          padded += align_up(div_ceil(n, P), 128) * P;
        }
        const i64 W = bf16 ? 2 : 4, G = dtype_bytes(wire), shard = padded / P;
        EXPECT_EQ(bytes(t.counted, Tag::Params), W * (stage == 3 ? shard : padded));
        EXPECT_EQ(bytes(t.counted, Tag::Grads), stage <= 1 ? G * padded : 0);
        const bool local_sums = stage <= 1 && m > 1;
        EXPECT_EQ(bytes(t.counted, Tag::GradAccum), 4 * (stage == 0 || local_sums ? padded : shard));
        EXPECT_EQ(bytes(t.counted, Tag::Master), bf16 ? 4 * (stage == 0 ? padded : shard) : 0);
        EXPECT_EQ(bytes(t.counted, Tag::Optimizer), 8 * (stage == 0 ? padded : shard));

        // Traffic of one step, elements sent by one rank times (P-1)/P.
        const i64 each_micro = stage >= 2 ? m : 1, cut = padded / P * (P - 1);
        EXPECT_EQ(t.sent.at("dp.reduce_scatter").bytes, 2 * each_micro * cut * G);
        const i64 gathered = stage == 0 ? 4 * cut : stage == 3 ? 2 * m * cut * W : cut * W;
        EXPECT_EQ(t.sent.at("dp.all_gather").bytes, 2 * gathered);
        for (const auto& [name, planned] : t.planned) {
          EXPECT_EQ(t.sent.at(name).bytes, 2 * planned.bytes) << name;
          EXPECT_EQ(t.sent.at(name).calls, 2 * planned.calls) << name;
        }
      }
    }
  }
}

TEST_P(Ranks, DefaultKnobsFollowTheirOwnFormula) {
  const int P = GetParam();
  Config c = tiny_config(tiny_gpt2(), P, 2, 3);
  c.zero = ZeroConfig{.stage = 3, .overlap_comm = true};
  const Trace t = train_threads(c, P, 2);
  for (const auto& [name, planned] : t.planned) EXPECT_EQ(t.sent.at(name).bytes, 2 * planned.bytes) << name;
  // Every matrix of this model is below the persistence threshold: whole everywhere, published once per step.
  const model::Model model = model::make_model(c.model, c.data.seq_length);
  i64 padded = 0;
  for (const auto& layer : model.layers) {
    i64 n = 0;
    for (const auto& row : layer->rows()) n += row.numel();
    padded += align_up(div_ceil(n, P), 128) * P;
  }
  EXPECT_EQ(t.sent.at("dp.all_gather").bytes, 2 * (padded / P * (P - 1) * 4));
}

INSTANTIATE_TEST_SUITE_P(MemoryAndTraffic, Ranks, ::testing::Values(1, 2, 4, 8));

}  // namespace
}  // namespace ds::testing
