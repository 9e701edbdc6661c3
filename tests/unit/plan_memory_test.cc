// SPDX-License-Identifier: Apache-2.0
// The memory that a plan gives each rank of a mesh, against formulas written out by hand (tests/equivalence checks that
// the engine takes the memory of its plan, to the byte). With s tokens per sequence, b sequences per micro-batch, h
// hidden, a heads and t tensor-parallel ranks, one GPT block in 16 bit without masks of dropout and without scores
// (attention by tiles) keeps sbh (8 + 24/t) + 4abs/t bytes; Korthikanti et al. 2022, table 2, whose 34 count 2 for the
// masks.

#include <gtest/gtest.h>

#include <set>

#include "base/check.h"
#include "model/models.h"
#include "plan/run_plan.h"

namespace ds {
namespace plan_memory_test {

constexpr i64 kLayers = 12, kHeads = 12, kVocab = 50257, kPositions = 1024, kHidden = 768;
constexpr i64 b = 2, s = 1024, h = kHidden, a = kHeads;

Config gpt2_124m(const MeshShape& mesh, i64 micro_batches = 8) {
  Config c;
  c.model.family = Family::Gpt2;
  c.model.vocab_size = kVocab;
  c.model.hidden = h;
  c.model.layers = kLayers;
  c.model.heads = c.model.kv_heads = a;
  c.model.head_dim = h / a;
  c.model.intermediate = 4 * h;
  c.model.max_positions = kPositions;
  c.data.seq_length = s;
  c.bf16.enabled = true;
  c.communication_data_type = WireType::BF16;
  c.reduce_order = ReduceOrder::Micro;
  c.batch = {.train = b * micro_batches * mesh.dp, .micro = b, .accumulation = micro_batches};
  c.pipeline = {.stages = mesh.pp, .partition = "type:Block"};
  c.tensor_parallel.tp_size = mesh.tp;
  c.sequence_parallel.size = mesh.sp;
  return c;
}

i64 memory(const Config& c, const MeshShape& mesh, int stage, Tag tag) {
  const MeshCoord coord{.pp = stage};
  const model::Model model = model::make_model(c.model, c.data.seq_length, model::shard_of(c, mesh, coord));
  return plan::make_run_plan(c, model, mesh, coord).memory.by_tag[static_cast<size_t>(tag)];
}

TEST(PlanMemory, ModelStatesFollowTheFormulasExactly) {
  for (const int t : {1, 2, 4}) {
    for (const int p : {1, 2, 4, 6}) {
      for (const int dp : {1, 2}) {
        for (const i64 zero : {0, 1, 2, 3}) {
          const MeshShape mesh{.dp = dp, .pp = p, .tp = t};
          Config c = gpt2_124m(mesh);
          c.zero.stage = zero;
          c.zero.param_persistence_threshold = 0;
          for (int stage = 0; stage < p; ++stage) {
            const bool first = stage == 0, last = stage == p - 1;
            const auto padded = [&](i64 n) { return align_up(n, 128 * dp); };  // of a layer, and of the tied matrix
            const i64 block = padded(12 * h * h / t + 7 * h / t + 6 * h), embedding = padded((kVocab + t - 1) / t * h);
            const i64 own = kLayers / p * block + (first ? padded(kPositions * h) : 0) + (last ? padded(2 * h) : 0);
            const i64 params = own + (first || last ? embedding : 0);
            const i64 grads = own + (first ? embedding : 0) + (last ? embedding : 0);  // of each use its own
            SCOPED_TRACE(fmt::format("tp {} pp {} dp {} ZeRO {} stage {}", t, p, dp, zero, stage));
            EXPECT_EQ(memory(c, mesh, stage, Tag::Params), 2 * params / (zero >= 3 ? dp : 1));
            EXPECT_EQ(memory(c, mesh, stage, Tag::Master), 4 * params / (zero >= 1 ? dp : 1));
            EXPECT_EQ(memory(c, mesh, stage, Tag::Optimizer), 8 * params / (zero >= 1 ? dp : 1));
            EXPECT_EQ(memory(c, mesh, stage, Tag::GradAccum), 4 * grads / (zero >= 1 ? dp : 1));
          }
        }
      }
    }
  }
}

// `block`: bytes of one block; `stream`: of the residual stream, which the embedding and the head keep too.
void expect_activations(const Config& c, const MeshShape& mesh, double block, double stream,
                        const std::vector<i64>& in_flight) {
  for (int stage = 0; stage < mesh.pp; ++stage) {
    const double layers = static_cast<double>(kLayers / mesh.pp) * block + (stage == 0 ? stream : 0) +
                          (stage == mesh.pp - 1 ? stream : 0);
    const double want = static_cast<double>(in_flight[stage]) * layers;
    EXPECT_NEAR(static_cast<double>(memory(c, mesh, stage, Tag::Activations)) / want, 1, 0.05) << "stage " << stage;
  }
}

constexpr double sbh = static_cast<double>(s * b * h), abs4 = 4.0 * a * b * s;

TEST(PlanMemory, ActivationsFollowTheFormulaOfTheBlock) {
  for (const int t : {1, 2, 4}) {
    const MeshShape mesh{.tp = t};
    Config c = gpt2_124m(mesh);
    expect_activations(c, mesh, sbh * (8 + 24.0 / t) + abs4 / t, 2 * sbh, {1});
    c.tensor_parallel.sequence_parallel = true;
    expect_activations(c, mesh, (32 * sbh + abs4) / t, 2 * sbh / t, {1});
  }
  for (const int n : {2, 4}) {  // of sequences of the same length, each rank has a part
    const MeshShape mesh{.sp = n};
    expect_activations(gpt2_124m(mesh), mesh, (32 * sbh + abs4) / n, 2 * sbh / n, {1});
  }
}

TEST(PlanMemory, CheckpointsKeepWhatTheySay) {
  for (const int t : {1, 2}) {
    const MeshShape mesh{.tp = t};
    Config c = gpt2_124m(mesh);
    // The branch of the attention is computed again: norm, projections and its output.
    c.activation_checkpointing.granularity = CheckpointGranularity::Selective;
    expect_activations(c, mesh, sbh * (6 + 16.0 / t), 2 * sbh, {1});
    c.activation_checkpointing.granularity = CheckpointGranularity::Layer;
    expect_activations(c, mesh, 2 * sbh, 2 * sbh, {1});
    // One input for every so many blocks: that of the first is the embedding's output.
    c.activation_checkpointing.interval = 3;
    expect_activations(c, mesh, 2 * sbh / 3, 2 * sbh, {1});
  }
}

TEST(PlanMemory, StagesKeepAsManyMicroBatchesAsTheScheduleHasUnderWay) {
  const MeshShape mesh{.pp = 4};
  Config c = gpt2_124m(mesh, 8);
  const double block = 32 * sbh + abs4;
  using Kind = PipelineSchedule;
  for (const auto& [kind, in_flight] : {std::pair{Kind::Naive, std::vector<i64>{1, 1, 1, 1}},
                                        {Kind::GPipe, {8, 8, 8, 8}},
                                        {Kind::OneFOneB, {4, 3, 2, 1}},
                                        {Kind::ZeroBubbleH1, {4, 4, 4, 4}}}) {
    SCOPED_TRACE(static_cast<int>(kind));
    c.pipeline.schedule = kind;
    expect_activations(c, mesh, block, 2 * sbh, in_flight);
  }
  // Interleaved: p v + p - 1 chunks, which is p + (p-1)/v stages' worth, on the first one; here of one block each, and
  // all with room for the embedding's output.
  c.pipeline = {.stages = 4, .schedule = Kind::Interleaved, .partition = "type:Block", .virtual_stages = 3};
  const double want = (4 * 3 + 4 - 1) * (block + 2 * sbh);
  EXPECT_NEAR(static_cast<double>(memory(c, mesh, 0, Tag::Activations)) / want, 1, 0.05);
  // A V: that share of 1F1B's 2 p chunks, on each stage.
  for (const auto& [limit, kept] : {std::pair{1.0, 8}, {0.75, 6}, {0.5, 4}}) {
    c.pipeline = {.stages = 4,
                  .schedule = Kind::ZeroBubbleV,
                  .partition = "type:Block",
                  .virtual_stages = 2,
                  .memory_limit = limit};
    for (const int stage : {0, 1, 3})
      EXPECT_NEAR(static_cast<double>(memory(c, mesh, stage, Tag::Activations)) / (kept * (2 * block + 2 * sbh)), 1,
                  0.1)
          << limit << " stage " << stage;
  }
}

// Logits in 16 bits have half the memory, and passes over them half the bytes; the same rows are computed at a time.
TEST(PlanLogits, In16BitsTakeHalfTheBytes) {
  for (const int tp : {1, 2}) {
    const MeshShape mesh{.tp = tp};
    Config c = gpt2_124m(mesh);
    c.bf16.enabled = true;
    const auto plan_of = [&](DType logits) {
      c.loss.logits = logits;
      const model::Model model = model::make_model(c.model, s, model::shard_of(c, mesh, {}));
      return plan::make_run_plan(c, model, mesh, {}, DeviceKind::Cpu);
    };
    const plan::RunPlan wide = plan_of(DType::F32), narrow = plan_of(DType::BF16);
    EXPECT_EQ(wide.activations.pass.sizes.logits_rows, narrow.activations.pass.sizes.logits_rows);
    EXPECT_EQ(wide.activations.pass.bytes(Tag::Logits), 2 * narrow.activations.pass.bytes(Tag::Logits));
    EXPECT_EQ(wide.activations.pass.bytes(Tag::Workspace), narrow.activations.pass.bytes(Tag::Workspace));
  }
}

// Ranks that share a vocabulary meet after every chunk of it.
TEST(PlanLogits, ChunksAreThoseOfAllSharesOfAVocabulary) {
  for (const i64 vocab : {50257, 52347, 32000, 151646, 131071}) {
    for (const int t : {2, 3, 4, 6}) {
      for (const i64 micro : {1, 8, 32}) {
        for (const DeviceKind device : {DeviceKind::Cpu, DeviceKind::Cuda}) {
          const MeshShape mesh{.tp = t};
          Config c = gpt2_124m(mesh);
          c.model.vocab_size = vocab;
          c.batch.micro = micro;
          std::set<i64> chunks;
          for (int r = 0; r < t; ++r) {
            const MeshCoord coord{.tp = r};
            const model::Model model = model::make_model(c.model, s, model::shard_of(c, mesh, coord));
            chunks.insert(plan::make_run_plan(c, model, mesh, coord, device).activations.pass.sizes.logits_rows);
          }
          EXPECT_EQ(chunks.size(), 1u) << "vocabulary " << vocab << " tp " << t << " micro-batch " << micro;
        }
      }
    }
  }
}

// Any schedule, under any name: the configuration warns that it "has no effect".
TEST(PlanMemory, OneStageKeepsOneMicroBatch) {
  for (const PipelineSchedule kind :
       {PipelineSchedule::Naive, PipelineSchedule::GPipe, PipelineSchedule::ZeroBubbleH1}) {
    Config c = gpt2_124m({});
    const i64 want = memory(c, {}, 0, Tag::Activations);
    c.pipeline.schedule = kind;
    c.pipeline.partition = "type:None";
    EXPECT_EQ(memory(c, {}, 0, Tag::Activations), want);
  }
}

// As Stage lays it out: the views of Tag::Data in one piece, one after the other.
TEST(PassMemory, WordsOfALayoutAreAligned) {
  Config c = gpt2_124m({});
  c.model.vocab_size = 100;
  c.data.seq_length = 48;  // an odd number of views of 4-byte elements comes before nothing that is wider
  c.sparse_attention.mode = SparseAttentionMode::Local;
  const model::Model model = model::make_model(c, {});
  const plan::RunPlan plan = plan::make_run_plan(c, model, {}, {});
  std::vector<u64> words(static_cast<size_t>(plan.activations.pass.bytes(Tag::Data)) / sizeof(u64) + 2);
  const auto context_at = [&](i64 first) {
    model::PassMemory memory = plan.activations.pass;
    char* at = reinterpret_cast<char*>(words.data()) + first;
    memory.for_each([&](Tag tag, TensorView& v) {
      if (tag != Tag::Data || v.rank == 0) return;
      v.data = at;
      at += v.bytes();
    });
    Stream stream;
    return model::make_context(memory, {.B = b, .T = 48}, model, no_ops(), stream, {});
  };
  EXPECT_EQ(static_cast<const void*>(context_at(0).blocks.keys), words.data());
  EXPECT_NE(context_at(0).blocks.queries, nullptr);
  EXPECT_THROW(context_at(4), Error);
}

}  // namespace plan_memory_test
}  // namespace ds
