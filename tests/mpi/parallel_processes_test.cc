// SPDX-License-Identifier: Apache-2.0
// Pipeline, tensor and sequence parallelism with ranks as processes, over shared memory and over MPI: a sample of what
// tests/equivalence shows with threads, to their bits; losses of evaluation and generated text too.

#include "mpi/processes.h"

namespace ds::testing {
namespace parallel_processes_test {

struct Layout {
  i64 pp, tp, sp, stage;
  PipelineSchedule schedule = PipelineSchedule::OneFOneB;
  bool rows = false, ring = false, cut_inputs = false;
};

Config config_of(const ModelConfig& model, const Layout& l, int ranks) {
  Config c = tiny_config(model, narrow<int>(ranks / (l.pp * l.tp * l.sp)), 4, l.stage);
  c.data.seq_length = 16;
  c.reduce_order = ReduceOrder::Micro;
  c.pipeline = {.stages = l.pp, .schedule = l.schedule, .partition = "uniform"};
  if (l.schedule == PipelineSchedule::Interleaved || l.schedule == PipelineSchedule::ZeroBubbleV)
    c.pipeline.virtual_stages = 2;
  c.tensor_parallel = {.tp_size = l.tp, .sequence_parallel = l.rows};
  c.sequence_parallel.size = l.sp;
  c.sequence_parallel.mode = l.ring ? SequenceParallelMode::Ring : SequenceParallelMode::Ulysses;
  if (l.cut_inputs) {
    c.activation_checkpointing.granularity = CheckpointGranularity::Layer;
    c.activation_checkpointing.partition_activations = true;
  }
  return c;
}

ModelConfig with_four_heads(ModelConfig m) {
  m.heads = 4;
  if (m.family == Family::Gpt2) m.kv_heads = 4;
  m.head_dim = 8;
  m.hidden = 32;
  m.layers = 4;
  return m;
}

// With a loss over the tokens of all layers, or of the global batch.
ModelConfig with_experts(BalanceOver over) {
  ModelConfig m = with_four_heads(tiny_llama());
  m.experts = {.count = 8,
               .per_token = 2,
               .intermediate = 24,
               .router = {.normalise = true},
               .balance_loss = 0.3f,
               .layers = {true, false, true, true}};
  m.experts.balance_over = over;
  return m;
}

class ParallelProcesses : public Processes {};

TEST_P(ParallelProcesses, TrainEvaluateAndWriteAsThreadsDo) {
  const auto& [backend, ranks] = GetParam();
  if (!is_rank()) {
    EXPECT_EQ(run_under_mpirun(ranks), 0);
    return;
  }
  Rank self(backend, ranks);
  const std::vector<Layout> layouts =
      ranks == 2
          ? std::vector<Layout>{{2, 1, 1, 1}, {1, 2, 1, 3}, {1, 1, 2, 2}, {2, 1, 1, 0, PipelineSchedule::ZeroBubbleV}}
      : ranks == 3 ? std::vector<Layout>{{3, 1, 1, 0, PipelineSchedule::ZeroBubbleH1},
                                         {3, 1, 1, 2, PipelineSchedule::ZeroBubbleV}}
                   : std::vector<Layout>{{2, 2, 1, 1},
                                         {2, 1, 2, 3},
                                         {2, 1, 1, 3, PipelineSchedule::ZeroBubbleH1},
                                         {2, 1, 1, 2, PipelineSchedule::Interleaved},
                                         {1, 2, 2, 2, PipelineSchedule::OneFOneB, true, true},
                                         {1, 4, 1, 0, PipelineSchedule::OneFOneB, false, false, true}};
  for (const ModelConfig& model : {with_four_heads(tiny_gpt2()), with_four_heads(tiny_llama()),
                                   with_experts(BalanceOver::Layers), with_experts(BalanceOver::GlobalBatch)}) {
    for (const Layout& l : layouts) {
      const Config config = config_of(model, l, ranks);
      const auto writes = [](std::vector<i32>& text) {
        Hooks hooks;
        hooks.at_end = [&text](engine::Engine& engine) {
          const std::vector<i32> own = text_of(engine, {3, 5, 7}, {.max_tokens = 8});
          if (engine.mesh().rank() == 0) text = own;
        };
        return hooks;
      };
      std::vector<i32> text, want_text;
      const Trace want = self.is_first() ? train_threads(config, ranks, 3, 1, writes(want_text)) : Trace{};
      self.wait_for_all();
      const Trace got = self.train(config, 3, writes(text));
      for (size_t tag = 0; tag < got.counted.size(); ++tag)
        EXPECT_EQ(got.counted[tag], got.predicted[tag]) << tag_name(static_cast<Tag>(tag));
      if (!self.is_first()) continue;
      Trace expected = want;
      expected.logits = got.logits;  // of another stage's rank
      expect_same_training(got, expected, fmt::format("pp{} tp{} sp{} stage {}", l.pp, l.tp, l.sp, l.stage));
      EXPECT_EQ(text, want_text);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Parallel, ParallelProcesses,
                         ::testing::Combine(::testing::Values("shm", "mpi"), ::testing::Values(2, 3, 4)),
                         [](const auto& test) {
                           return fmt::format("{}_P{}", std::get<0>(test.param), std::get<1>(test.param));
                         });

}  // namespace parallel_processes_test
}  // namespace ds::testing
