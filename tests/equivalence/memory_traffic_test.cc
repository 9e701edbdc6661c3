// SPDX-License-Identifier: Apache-2.0
// Prediction = count: bytes per rank by tag and bytes on the wire, against the run plan and against the ZeRO table
// written out.

#include "equivalence/training.h"

namespace ds::testing {
namespace memory_traffic_test {

i64 bytes(const report::TagBytes& b, Tag t) { return b[static_cast<size_t>(t)]; }

// Elements of a unit as it lies on P ranks: its rows side by side, padded to P * 128.
i64 padded_elems(const std::vector<model::ParamRow>& unit, i64 P) {
  i64 n = 0;
  for (const model::ParamRow& row : unit) n += row.numel();
  return align_up(div_ceil(n, P), 128) * P;
}
i64 padded_elems(const model::Model& model, i64 P) {
  i64 n = padded_elems(model.shared, P);
  for (const auto& layer : model.layers) n += padded_elems(layer->rows(), P);
  return n;
}

void expect_planned(const Trace& t, i64 steps) {
  for (size_t tag = 0; tag < t.counted.size(); ++tag) {
    EXPECT_EQ(t.counted[tag], t.predicted[tag]) << tag_name(static_cast<Tag>(tag));
  }
  for (const auto& [name, planned] : t.planned) {
    EXPECT_EQ(t.sent.at(name).bytes, steps * planned.bytes) << name;
    EXPECT_EQ(t.sent.at(name).calls, steps * planned.calls) << name;
  }
}

class Ranks : public ::testing::TestWithParam<int> {};

TEST_P(Ranks, CountedBytesEqualTheZeroTable) {
  const i64 P = GetParam();
  struct Types {
    DType work, wire;
  };
  struct Accumulation {
    i64 m;
    ReduceOrder order;
  };
  for (const ModelConfig& config : {tiny_llama(), tiny_gpt2(), tiny_bert()}) {
    for (const auto& [work, wire] : {Types{DType::F32, DType::F32},
                                     {DType::BF16, DType::BF16},
                                     {DType::F16, DType::F16},
                                     {DType::BF16, DType::F32},
                                     {DType::F32, DType::F16},
                                     {DType::BF16, DType::F16}}) {
      for (i64 stage = 0; stage <= 3; ++stage) {
        for (const auto& [m, order] :
             {Accumulation{1, ReduceOrder::Micro}, {3, ReduceOrder::Micro}, {3, ReduceOrder::Boundary}}) {
          if (stage >= 2 && order == ReduceOrder::Boundary) continue;  // they reduce every micro-batch
          Config c = tiny_config(config, static_cast<int>(P), m, stage);
          c.bf16.enabled = work == DType::BF16;
          c.fp16 = {.enabled = work == DType::F16, .loss_scale = 256};
          c.communication_data_type = wire_type_of(wire);
          c.reduce_order = order;
          const Trace t = train_threads(c, static_cast<int>(P), 2);
          const bool boundary = order == ReduceOrder::Boundary;
          SCOPED_TRACE(fmt::format("{} P {} stage {} work {} wire {} m {} {}", family_name(config.family), P, stage,
                                   dtype_name(work), dtype_name(wire), m, boundary ? "boundary" : "micro"));
          expect_planned(t, 2);

          const model::Model model = model::make_model(c.model, c.data.seq_length);
          // Each use of a tied embedding has gradients of its own.
          const i64 padded = padded_elems(model, P), shared = padded_elems(model.shared, P), grads = padded + shared;
          const i64 W = dtype_bytes(work), G = dtype_bytes(wire), shard = padded / P;
          EXPECT_EQ(bytes(t.counted, Tag::Params), W * (stage == 3 ? shard : padded));
          EXPECT_EQ(bytes(t.counted, Tag::Grads), stage <= 1 ? G * grads : 0);
          EXPECT_EQ(bytes(t.counted, Tag::GradAccum), 4 * (stage == 0 || boundary ? grads : grads / P));
          EXPECT_EQ(bytes(t.counted, Tag::Master), work == DType::F32 ? 0 : 4 * (stage == 0 ? padded : shard));
          EXPECT_EQ(bytes(t.counted, Tag::Optimizer), 8 * (stage == 0 ? padded : shard));

          // Traffic of one step, elements sent by one rank times (P-1)/P. Nothing persists and
          // nothing is reused here, so stage 3 gathers a unit for every use: one in forward and one in backward, and
          // the tied embedding two more, with the head. That is m (3 padded + 3 shared) with the reduce-scatter.
          const auto sent = [&](i64 elems) { return elems / P * (P - 1); };
          EXPECT_EQ(t.sent.at("dp.reduce_scatter").bytes, 2 * (boundary ? 1 : m) * sent(grads) * G);
          const i64 gathered =
              stage == 0 ? sent(padded) * 4 : (stage == 3 ? m * sent(2 * padded + 2 * shared) : sent(padded)) * W;
          EXPECT_EQ(t.sent.at("dp.all_gather").bytes, 2 * gathered);
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
  expect_planned(t, 2);
  // Every matrix of this model is below the persistence threshold: whole everywhere, published once per step.
  const model::Model model = model::make_model(c.model, c.data.seq_length);
  EXPECT_EQ(t.sent.at("dp.all_gather").bytes, 2 * (padded_elems(model, P) / P * (P - 1) * 4));
}

INSTANTIATE_TEST_SUITE_P(MemoryAndTraffic, Ranks, ::testing::Values(1, 2, 4, 8));

// Rows of at most 1280 elements persist. On two ranks, slices are halves rounded up to 128:
//   unit       persistent rows                                       slice   sharded rows              slice
//   embedding  -                                                         0   61*40 = 2440               1280
//   block      norms 40 + 40, q 32*40, k and v 16*40, o 40*32,               gate, up and down 52*40
//              norms of q and k 8 + 8: 3936                           2048   = 6240                     3200
//   head       norm 40                                                 128   61*40 = 2440               1280
TEST(Persistence, PartOfAUnitStaysWholeAndTheRestIsGathered) {
  Config c = tiny_config(tiny_llama(), 2, 3, 3);
  c.bf16.enabled = true;
  c.communication_data_type = WireType::BF16;
  c.zero.param_persistence_threshold = 1280;
  const Trace t = train_threads(c, 2, 2);
  expect_planned(t, 2);
  constexpr i64 kWhole = 2 * 2048 + 128, kSharded = 1280 + 2 * 3200 + 1280, kOwned = kWhole + kSharded;
  EXPECT_EQ(bytes(t.counted, Tag::Params), 2 * (2 * kWhole + kSharded));
  EXPECT_EQ(bytes(t.counted, Tag::GradAccum), 4 * kOwned);
  EXPECT_EQ(bytes(t.counted, Tag::Master), 4 * kOwned);
  EXPECT_EQ(bytes(t.counted, Tag::Optimizer), 8 * kOwned);
  // Two steps of three micro-batches: one of two slices is sent.
  EXPECT_EQ(t.sent.at("dp.reduce_scatter").bytes, 2 * 3 * 2 * kOwned);
  EXPECT_EQ(t.sent.at("dp.all_gather").bytes, 2 * 2 * (3 * 2 * kSharded + kWhole));
  EXPECT_EQ(t.sent.at("dp.all_gather").calls, 2 * (3 * 2 * 4 + 1));
}

// The units of the tiny GPT-2 on two ranks: the tied matrix 2560 (67*36), positions 1024 (24*36), three blocks of
// 16128, head 256 elements, 52224 in all. Backward fills buckets from the head, where the matrix has a gradient, too:
// 54784; the publication begins with the matrix.
TEST(Buckets, CallsAreThoseCountedByHand) {
  struct Case {
    i64 limit, reductions, publications;
  };
  for (const Case& k :
       {Case{1, 5, 6},       // a unit larger than the limit goes alone, but for what is written together
        Case{16'384, 5, 4},  // head + matrix, block, block, block, positions + matrix; both, .., block + head
        Case{20'000, 3, 3},  // head + matrix + block, block, block + positions + matrix; both + block, ..
        Case{52'223, 2, 2},  // head + matrix + blocks, positions + matrix; all but the head, head
        Case{54'784, 1, 1}}) {
    for (i64 stage = 0; stage <= 2; ++stage) {
      Config c = tiny_config(tiny_gpt2(), 2, 3, stage);
      c.zero.reduce_bucket_size = c.zero.allgather_bucket_size = k.limit;
      const Trace t = train_threads(c, 2, 2);
      SCOPED_TRACE(fmt::format("limit {} stage {}", k.limit, stage));
      expect_planned(t, 2);
      EXPECT_EQ(t.sent.at("dp.reduce_scatter").calls, 2 * k.reductions * (stage == 2 ? 3 : 1));
      EXPECT_EQ(t.sent.at("dp.all_gather").calls, 2 * (stage == 0 ? 1 : k.publications));
    }
  }
}

}  // namespace memory_traffic_test
}  // namespace ds::testing
