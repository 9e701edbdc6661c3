// SPDX-License-Identifier: Apache-2.0
// sparse_gradients: of the gradients of embeddings what is zero does not travel, and no bit of a run changes.

#include "equivalence/layouts.h"

namespace ds::testing {
namespace sparse_gradients_test {

constexpr i64 kSteps = 4;

i64 sent(const Trace& t, const std::string& name) {
  const auto found = t.sent.find(name);
  return found == t.sent.end() ? 0 : found->second.bytes;
}

// A vocabulary of which a step sees little.
Config sparse_config(ModelConfig model, const Layout& l) {
  model = of_four_heads(std::move(model));
  model.vocab_size = 2000;
  Config c = config_of(model, l);
  c.sparse_gradients = true;
  return c;
}

// The same training as with dense gradients, with memory as planned and no more messages than planned.
void expect_same_as_dense(const Config& sparse, const Layout& l, const std::string& what) {
  Config dense = sparse;
  dense.sparse_gradients = false;
  const Trace t = train_threads(sparse, l.ranks(), kSteps), want = train_threads(dense, l.ranks(), kSteps);
  expect_same_training(t, want, what);
  for (size_t tag = 0; tag < t.counted.size(); ++tag)
    EXPECT_EQ(t.counted[tag], t.predicted[tag]) << what << ": " << tag_name(static_cast<Tag>(tag));
  i64 all = 0, planned = 0, all_dense = 0;
  for (const auto& [name, count] : t.planned) planned += kSteps * count.bytes;
  for (const auto& [name, count] : t.planned) all += sent(t, name);
  for (const auto& [name, count] : want.planned) all_dense += sent(want, name);
  EXPECT_LE(all, planned) << what;
  EXPECT_LT(all, all_dense) << what;
  EXPECT_LT(planned, kSteps * all_dense) << what;
  EXPECT_GT(sent(t, "dp.sparse_gather"), 0) << what;
  EXPECT_LT(sent(t, "dp.reduce_scatter"), sent(want, "dp.reduce_scatter")) << what;
}

TEST(SparseGradients, MoveNoBit) {
  for (const ModelConfig& model : {tiny_gpt2(), tiny_llama()}) {
    for (const Layout& l : {Layout{.dp = 2},
                            {.dp = 4, .stage = 1},
                            {.dp = 4, .stage = 2},
                            {.dp = 4, .stage = 3},
                            {.dp = 2, .pp = 2},
                            {.dp = 2, .pp = 2, .stage = 1},
                            {.dp = 2, .tp = 2, .sequence = true},
                            {.dp = 2, .tp = 2, .stage = 3},
                            {.dp = 2, .sp = 2, .stage = 2}}) {
      for (const DType work : {DType::F32, DType::BF16, DType::F16}) {
        if ((work == DType::F16 && l.stage != 2) || (work == DType::BF16 && l.stage % 3 != 0)) continue;
        Config c = sparse_config(model, l);
        c.bf16.enabled = work == DType::BF16;
        c.fp16 = {.enabled = work == DType::F16, .initial_scale_power = 26};
        c.communication_data_type = wire_type_of(work);
        expect_same_as_dense(c, l, fmt::format("{} {}", l.name(), dtype_name(work)));
      }
    }
  }
}

// Sums of this rank's micro-batches, sums in 16 bits, tiles, delayed and offloaded states, gradients of other types.
TEST(SparseGradients, GoWithWhatElseThereIs) {
  const Layout l{.dp = 2, .stage = 1};
  Config c = sparse_config(tiny_llama(), l);
  c.reduce_order = ReduceOrder::Boundary;
  expect_same_as_dense(c, l, "boundary");
  c.zero.stage = 0;
  c.bf16.enabled = true;
  c.communication_data_type = WireType::F32;
  expect_same_as_dense(c, l, "stage 0, fp32 on the wire");
  c.grad_accum_dtype = DType::BF16;
  c.communication_data_type = WireType::BF16;
  expect_same_as_dense(c, l, "sums in bf16");
  c = sparse_config(tiny_llama(), l);
  c.zero.stage = 3;
  c.zero.tile_size = 20000;
  expect_same_as_dense(c, l, "tiles");
  c.zero.tile_size = 0;
  c.zero.param_persistence_threshold = 100;
  c.zero.quantized_weights = true;
  expect_same_as_dense(c, l, "with coded weights");
}

// If most rows have gradients, all rows travel, as without sparse gradients.
TEST(SparseGradients, AreDenseWhereThatIsLess) {
  const Layout l{.dp = 2, .stage = 2};
  Config c = sparse_config(tiny_llama(), l);
  c.model.vocab_size = 61;
  const Trace t = train_threads(c, 2, kSteps);
  c.sparse_gradients = false;
  const Trace want = train_threads(c, 2, kSteps);
  expect_same_training(t, want, "small vocabulary");
  EXPECT_EQ(sent(t, "dp.reduce_scatter"), sent(want, "dp.reduce_scatter"));
  EXPECT_LT(sent(t, "dp.sparse_gather"), 1000);
}

// Embeddings are summed exactly where the rest travels as codes.
TEST(SparseGradients, AreExactBesideCodes) {
  const Layout l{.dp = 4, .stage = 1};
  Config c = sparse_config(tiny_llama(), l);
  c.communication_data_type = WireType::Int4;
  const Trace t = train_threads(c, 4, kSteps);
  c.sparse_gradients = false;
  const Trace coded = train_threads(c, 4, kSteps);
  c.communication_data_type = WireType::F32;
  const Trace exact = train_threads(c, 4, kSteps);
  EXPECT_GT(sent(t, "dp.sparse_gather"), 0);
  EXPECT_LT(sent(t, "dp.all_to_all"), sent(coded, "dp.all_to_all"));
  for (i64 s = 0; s < kSteps; ++s) EXPECT_NEAR(t.losses[s], exact.losses[s], 0.01 * exact.losses[s]);
}

}  // namespace sparse_gradients_test
}  // namespace ds::testing
