// SPDX-License-Identifier: Apache-2.0
// The formulas of the field against the numbers that their papers print, and against logs of Megatron-LM; the
// properties that they promise; and the text that puts somebody's numbers in them.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "memreport/explain.h"
#include "model/models.h"
#include "plan/run_plan.h"

namespace ds::memreport {
namespace memreport_formulas_test {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using enum CheckpointGranularity;

constexpr double kGiB = 0x1p30, kTiB = 0x1p40;

double zero_gb(double params, int stage, i64 N) { return model_states(params, stage, N).total() / 1e9; }

// --- ZeRO

// Table 1 of the paper, as printed. It cuts off digits after the point from 100 on (4187.5 is 4187, 257.75 is 257), and
// rounds smaller numbers (41.25 is 41.3, 1.875 is 1.88): zero_paper_gb.
TEST(ZeroFormula, PrintsTable1OfThePaper) {
  struct Line {
    i64 N;
    const char* printed[3];
  };
  struct Model {
    double params;
    Line lines[6];
  };
  const Model table[] = {
      {7.5e9,
       {{1, {"120", "120", "120"}},
        {4, {"52.5", "41.3", "30"}},
        {16, {"35.6", "21.6", "7.5"}},
        {64, {"31.4", "16.6", "1.88"}},
        {256, {"30.4", "15.4", "0.47"}},
        {1024, {"30.1", "15.1", "0.12"}}}},
      {128e9,
       {{1, {"2048", "2048", "2048"}},
        {4, {"896", "704", "512"}},
        {16, {"608", "368", "128"}},
        {64, {"536", "284", "32"}},
        {256, {"518", "263", "8"}},
        {1024, {"513", "257", "2"}}}},
      {1e12,
       {{1, {"16000", "16000", "16000"}},
        {4, {"7000", "5500", "4000"}},
        {16, {"4750", "2875", "1000"}},
        {64, {"4187", "2218", "250"}},
        {256, {"4046", "2054", "62.5"}},
        {1024, {"4011", "2013", "15.6"}}}},
  };
  for (const Model& m : table) {
    for (const Line& line : m.lines) {
      EXPECT_EQ(zero_gb(m.params, 0, line.N), 16 * m.params / 1e9);
      for (int stage = 1; stage <= 3; ++stage)
        EXPECT_EQ(zero_paper_gb(model_states(m.params, stage, line.N).total()), line.printed[stage - 1])
            << m.params << " parameters, N = " << line.N << ", stage " << stage;
    }
  }
}

TEST(ZeroFormula, IsExactWhereThePaperCutsOff) {
  EXPECT_EQ(zero_gb(7.5e9, 1, 64), 31.40625);
  EXPECT_EQ(zero_gb(7.5e9, 2, 64), 16.640625);
  EXPECT_EQ(zero_gb(7.5e9, 3, 64), 1.875);
  EXPECT_EQ(zero_gb(128e9, 1, 1024), 513.5);
  EXPECT_EQ(zero_gb(128e9, 2, 1024), 257.75);
  EXPECT_EQ(zero_gb(1e12, 1, 64), 4187.5);
  EXPECT_EQ(zero_gb(1e12, 2, 64), 2218.75);
  EXPECT_EQ(zero_gb(1e12, 1, 1024), 4011.71875);
  EXPECT_EQ(zero_gb(1e12, 2, 1024), 2013.671875);
  EXPECT_EQ(zero_gb(1e12, 3, 1024), 15.625);
}

// Table 2 of the paper: the largest models whose states fit in 32 GB, 64 ranks of data parallelism.
TEST(ZeroFormula, FitsTheModelsOfTable2) {
  const double largest[] = {2.0e9, 7.6e9, 14.4e9, 128e9}, next[] = {2.1e9, 7.7e9, 14.5e9, 129e9};
  for (int stage = 0; stage <= 3; ++stage) {
    EXPECT_LE(zero_gb(largest[stage], stage, 64), 32) << stage;
    EXPECT_GT(zero_gb(next[stage], stage, 64), 32) << stage;
  }
}

TEST(ZeroFormula, CutsWhatTheStageSays) {
  const ModelStates s = model_states(100, 2, 4);
  EXPECT_EQ(s.params, 200);
  EXPECT_EQ(s.grads, 50);
  EXPECT_EQ(s.optimizer, 300);
  const ModelStates f = model_states(100, 1, 4, kFp32Adam);
  EXPECT_EQ(f.params, 400);
  EXPECT_EQ(f.grads, 400);
  EXPECT_EQ(f.optimizer, 200);
  EXPECT_EQ(model_states(100, 0, 4, kFp32Adam).total(), 1600);
}

TEST(ZeroFormula, NeverGrowsWithStageOrRanksAndNeedsAllStatesOnce) {
  for (const StateBytes& bytes : {kMixedAdam, kFp32Adam}) {
    const double once = bytes.params + bytes.grads + bytes.optimizer;
    for (const i64 N : {1, 2, 3, 7, 64, 1000}) {
      for (int stage = 0; stage <= 3; ++stage) {
        const double here = model_states(1e6, stage, N, bytes).total();
        EXPECT_LE(model_states(1e6, stage, N + 1, bytes).total(), here);
        if (stage > 0) {
          EXPECT_LE(here, model_states(1e6, stage - 1, N, bytes).total());
        }
        EXPECT_GE(here * static_cast<double>(N), once * 1e6 * (1 - 1e-12)) << "all ranks together have every state";
        if (N == 1) {
          EXPECT_EQ(here, once * 1e6);
        }
      }
      EXPECT_DOUBLE_EQ(model_states(1e6, 3, N, bytes).total() * static_cast<double>(N), once * 1e6);
    }
  }
}

TEST(ZeroFormula, SendsTwoOrThreeTimesTheParameters) {
  for (const int stage : {0, 1, 2}) EXPECT_EQ(zero_volume_elems(7.5e9, stage), 15e9);
  EXPECT_EQ(zero_volume_elems(7.5e9, 3), 22.5e9);
}

TEST(ZeroFormula, RefusesWhatIsNoStageAndNoRank) {
  EXPECT_THROW(model_states(1, 4, 1), Error);
  EXPECT_THROW(model_states(1, -1, 1), Error);
  EXPECT_THROW(model_states(1, 0, 0), Error);
  EXPECT_THROW(zero_volume_elems(1, 4), Error);
}

// The bytes per parameter of the engine, as the formulas have them, are the sum in the run plan, by which it allocates.
TEST(ZeroFormula, EngineStatesAreThoseOfTheRunPlan) {
  for (const int dp : {1, 2, 3}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const auto& [micro_batches, narrow] : {std::pair{1, false}, {3, false}, {1, true}, {3, true}}) {
        Config c;
        c.model.hidden = 48;
        c.model.layers = 3;
        c.model.heads = c.model.kv_heads = 3;
        c.model.head_dim = 16;
        c.model.intermediate = 192;
        c.model.vocab_size = 101;
        c.model.max_positions = 32;
        c.model.tie_embeddings = false;
        c.data.seq_length = 32;
        c.bf16.enabled = true;
        c.communication_data_type = WireType::BF16;
        c.bf16.bf16_master_weights_and_grads = narrow;
        if (narrow) c.grad_accum_dtype = DType::BF16;
        c.reduce_order = stage >= 2 ? ReduceOrder::Micro : ReduceOrder::Boundary;
        c.zero.stage = stage;
        c.zero.param_persistence_threshold = 0;
        c.batch = {.train = micro_batches * dp, .micro = 1, .accumulation = micro_batches};
        const MeshShape mesh{.dp = dp};
        const model::Model model = model::make_model(c.model, c.data.seq_length, model::shard_of(c, mesh, {}));
        const plan::RunPlan plan = plan::make_run_plan(c, model, mesh, {});
        i64 padded = 0, planned = 0;
        for (const zero::UnitPlace& unit : plan.dp().layout.units()) padded += unit.padded;
        for (const Tag tag : {Tag::Params, Tag::Grads, Tag::GradAccum, Tag::Master, Tag::Optimizer})
          planned += plan.memory.by_tag[static_cast<size_t>(tag)];
        const bool sums_locally = stage < 2 && micro_batches > 1;
        // Sums in fp32 on one rank are all.
        const double sent = dp == 1 && !narrow ? 0 : 2;
        const EngineBytes bytes = narrow ? EngineBytes{.master = 0, .sent = sent, .sum = 2} : EngineBytes{.sent = sent};
        EXPECT_NEAR(model_states(static_cast<double>(padded), stage, dp, engine_state_bytes(stage, sums_locally, bytes))
                        .total(),
                    static_cast<double>(planned), 1e-6)
            << "dp " << dp << " stage " << stage << " micro-batches " << micro_batches << " narrow " << narrow;
      }
    }
  }
}

// --- Activations

constexpr LayerShape k22B{2048, 1, 6144, 64}, k175B{2048, 1, 12288, 96}, k530B{2048, 1, 20480, 128},
    k1T{2048, 1, 25600, 160};

std::string gib(double bytes) { return fmt::format("{:.3f}", bytes / kGiB); }

TEST(Activations, AreThePapersFor22BTo1T) {
  EXPECT_EQ(fmt::format("{:.1f}", k22B.scores()), "106.7");
  EXPECT_EQ(k175B.scores(), 80);
  EXPECT_EQ(k530B.scores(), 64);
  EXPECT_EQ(k1T.scores(), 64);
  EXPECT_EQ(gib(layer_activations(k22B, 1, false, None)), "1.648");
  EXPECT_EQ(gib(layer_activations(k175B, 1, false, None)), "2.672");
  EXPECT_EQ(gib(layer_activations(k530B, 1, false, None)), "3.828");
  EXPECT_EQ(gib(layer_activations(k1T, 1, false, None)), "4.785");
  EXPECT_EQ(gib(layer_activations(k175B, 1, false, Selective)), "0.797");
  EXPECT_EQ(gib(layer_activations(k175B, 8, false, None)), "0.539");
  EXPECT_EQ(gib(layer_activations(k175B, 8, true, None)), "0.334");
  EXPECT_EQ(gib(layer_activations(k175B, 8, true, Selective)), "0.100");
  EXPECT_EQ(gib(layer_activations(k175B, 8, true, Layer)), "0.047");
  // Not in the list: 23sbh of 114 with tp, 13sbh with tp and selective.
  EXPECT_EQ(layer_activations(k175B, 8, false, None), 23 * k175B.sbh());
  EXPECT_EQ(layer_activations(k175B, 8, false, Selective), 13 * k175B.sbh());
}

// Section 5: selective recomputation saves 70 % of the activations of GPT-3, and 65 % of those of MT-NLG.
TEST(Activations, SelectiveSavesWhatThePaperSays) {
  const auto saved = [](const LayerShape& l) {
    return 1 - layer_activations(l, 8, true, Selective) / layer_activations(l, 8, true, None);
  };
  EXPECT_EQ(fmt::format("{:.0f}", 100 * saved(k175B)), "70");
  EXPECT_EQ(fmt::format("{:.0f}", 100 * saved(k530B)), "65");
}

TEST(Activations, AreWholeWithoutTensorParallelism) {
  const LayerShape layer{100, 3, 64, 4};
  for (const CheckpointGranularity r : {None, Selective, Layer})
    EXPECT_EQ(layer_activations(layer, 1, true, r), layer_activations(layer, 1, false, r));
  EXPECT_DOUBLE_EQ(layer_activations(layer, 1, false, None), 34.0 * 100 * 3 * 64 + 5.0 * 4 * 100 * 100 * 3);
}

TEST(Activations, ShrinkWithEachMeansAndGrowWithEachSize) {
  for (const LayerShape& l : {k22B, k175B, LayerShape{96, 5, 40, 5}}) {
    for (const i64 t : {1, 2, 3, 8}) {
      for (const bool sp : {false, true}) {
        for (const CheckpointGranularity r : {None, Selective, Layer}) {
          EXPECT_LE(layer_activations(l, t + 1, sp, r), layer_activations(l, t, sp, r));
          EXPECT_LE(layer_activations(l, t, true, r), layer_activations(l, t, false, r));
          LayerShape twice = l;
          twice.micro_batch *= 2;
          EXPECT_EQ(layer_activations(twice, t, sp, r), 2 * layer_activations(l, t, sp, r));
        }
        EXPECT_LT(layer_activations(l, t, sp, Selective), layer_activations(l, t, sp, None));
        EXPECT_LT(layer_activations(l, t, sp, Layer), layer_activations(l, t, sp, Selective));
      }
      EXPECT_DOUBLE_EQ(layer_activations(l, t, true, None) * static_cast<double>(t),
                       layer_activations(l, 1, true, None));
    }
  }
}

TEST(Activations, OfTheFirstStageAreThoseOfAllLayers) {
  EXPECT_EQ(layers_in_flight({.layers = 96}), 96);
  EXPECT_EQ(layers_in_flight({.layers = 96, .stages = 8}), 96);
  EXPECT_EQ(layers_in_flight({.layers = 96, .stages = 8, .micro_batches = 64}), 96);
  EXPECT_EQ(layers_in_flight({.layers = 96, .stages = 8, .micro_batches = 2}), 24);
  EXPECT_EQ(layers_in_flight({.layers = 96, .stages = 8, .chunks = 3}), 124);    // 175B: 1 + 7/24
  EXPECT_EQ(layers_in_flight({.layers = 105, .stages = 35, .chunks = 3}), 139);  // 530B: 1 + 34/105
}

TEST(Activations, OfEmbeddingAndOutputLayer) {
  const double sbh = k22B.sbh();
  const i64 V = 51200;
  // sbhL/t (p/L + δ 4/L (1 + V/h))
  EXPECT_DOUBLE_EQ(extra_activations(k22B, {.layers = 48}, V, 8, true), sbh / 8 * (1 + 4 * (1 + 51200.0 / 6144)));
  EXPECT_DOUBLE_EQ(extra_activations(k175B, {.layers = 96, .stages = 8}, V, 8, true), k175B.sbh());
  EXPECT_DOUBLE_EQ(extra_activations(k175B, {.layers = 96, .stages = 8, .micro_batches = 2}, V, 8, true),
                   k175B.sbh() / 4);
  EXPECT_DOUBLE_EQ(extra_activations(k22B, {.layers = 48}, V, 8, false), 5 * sbh + 4 * 2048.0 * V / 8);
}

// --- Parameters and Megatron's report

constexpr ModelShape kGpt2{.layers = 12, .hidden = 768, .heads = 12, .vocab = 50257, .positions = 1024, .biases = true};
constexpr ModelShape kLlama3{.layers = 32,
                             .hidden = 4096,
                             .heads = 32,
                             .kv_heads = 8,
                             .ffn = 14336,
                             .vocab = 128256,
                             .gated = true,
                             .rms_norm = true,
                             .tied = false};

TEST(Parameters, AreThoseOfPublishedModels) {
  EXPECT_EQ(num_params(kGpt2), 124439808);
  EXPECT_EQ(layer_params(kGpt2), 12 * 768 * 768 + 13 * 768);
  EXPECT_EQ(num_params(kLlama3), 8030261248);
  EXPECT_EQ(num_params({.layers = 32,
                        .hidden = 4096,
                        .heads = 32,
                        .ffn = 11008,
                        .vocab = 32000,
                        .gated = true,
                        .rms_norm = true,
                        .tied = false}),
            6738415616);  // Llama 2 7B
}

struct Log {
  ModelShape model;
  i64 tp, pp;
  const char *block, *embedding, *loaded, *other, *megabytes;
};

// Memory that Megatron-LM itself printed at the start of runs with 18 bytes per parameter (vocabularies padded).
TEST(Megatron, LogsSayTheSame) {
  const auto billions = [](double x) { return fmt::format("{:.2f}", x / 1e9); };
  for (const Log& log :
       {Log{{.layers = 36, .hidden = 1280, .heads = 20, .vocab = 50304}, 1, 1, "0.71", "0.06", "0.7724", "", ""},
        Log{{.layers = 48, .hidden = 1600, .heads = 25, .vocab = 50304},
            1,
            1,
            "1.47",
            "0.08",
            "1.5554",
            "",
            "26699.47"},
        Log{{.layers = 80, .hidden = 8192, .heads = 64, .vocab = 32256},
            4,
            8,
            "64.43",
            "0.26",
            "2.0794",
            "2.0133",
            "35695.42"}}) {
    SCOPED_TRACE(log.block);
    const double loaded = most_loaded_params(log.model, log.tp, log.pp);
    EXPECT_EQ(billions(static_cast<double>(block_params(log.model))), log.block);
    EXPECT_EQ(billions(static_cast<double>(num_params(log.model) - block_params(log.model))), log.embedding);
    EXPECT_EQ(fmt::format("{:.4f}", loaded / 1e9), log.loaded);
    if (*log.other) {
      EXPECT_EQ(fmt::format("{:.4f}", stage_params(log.model, log.tp, log.pp, 1) / 1e9), log.other);
    }
    if (*log.megabytes) {
      EXPECT_EQ(fmt::format("{:.2f}", megatron_bytes_per_param(false, 64) * loaded / 0x1p20), log.megabytes);
    }
  }
  // "Activation memory footprint per transformer layer (precise, without SP)" of the second and third: 53.1, 1024.0 MB.
  EXPECT_EQ(fmt::format("{:.1f}", layer_activations({1024, 1, 1600, 25}, 1, false, Selective) / 0x1p20), "53.1");
  EXPECT_EQ(layer_activations({8192, 1, 8192, 64}, 4, false, Selective) / 0x1p20, 1024);
}

TEST(Megatron, CountsEighteenBytesOrSixAndAShare) {
  EXPECT_EQ(megatron_bytes_per_param(false, 64), 18);
  EXPECT_EQ(megatron_bytes_per_param(true, 1), 18);
  EXPECT_EQ(megatron_bytes_per_param(true, 32), 6.375);
  EXPECT_EQ(megatron_bytes_per_param(true, 64), 6.1875);
}

TEST(Megatron, ActivationsAreKorthikantisForAnMlpOfFourTimesHidden) {
  for (const i64 t : {1, 2, 8})
    EXPECT_DOUBLE_EQ(megatron_layer_activations(k175B, 4 * k175B.hidden, t),
                     layer_activations(k175B, t, true, Selective));
  EXPECT_EQ(megatron_layer_activations({10, 1, 64, 4}, 96, 1), 10 * 64 * 24);
}

TEST(Megatron, StagesTogetherHaveTheModelOnceAndItsTiedMatrixTwice) {
  for (const ModelShape& m : {kGpt2, kLlama3}) {
    for (const i64 pp : {1, 2, 4}) {
      for (const i64 tp : {1, 2}) {
        double all = 0;
        for (i64 stage = 0; stage < pp; ++stage) {
          all += stage_params(m, tp, pp, stage) * static_cast<double>(tp);
          EXPECT_LE(stage_params(m, tp, pp, stage), most_loaded_params(m, tp, pp));
        }
        const i64 copies = m.tied && pp > 1 ? m.vocab * m.hidden : 0;
        EXPECT_NEAR(all, static_cast<double>(num_params(m) + copies), 1e-3);
        EXPECT_EQ(most_loaded_params(m, tp, pp), stage_params(m, tp, pp, 0));
      }
    }
  }
  EXPECT_THROW(stage_params(kGpt2, 1, 2, 2), Error);
}

// --- ZeRO-Infinity, ZeRO-Offload, rules of thumb

// Figure 2a: TB and GB there are powers of 1024, hidden sizes multiples of 1024, 32 sequences per node and 4 per GPU,
// of 1024 tokens. The MSWM that it prints for the first model is not 16h², so that one is left out.
TEST(Infinity, PrintsTheTableOfThePaper) {
  struct Line {
    i64 layers, hidden, heads;
    const char *trillions, *states, *checkpoints, *model_working, *activation_working;
  };
  const auto two = [](double x) { return fmt::format("{:.2f}", std::floor(100 * x + 0.5) / 100); };
  for (const Line& l : {Line{80, 10240, 128, "0.10", "1.83", "0.05", nullptr, "1.63"},
                        Line{100, 20480, 160, "0.50", "9.16", "0.12", "6.25", "2.50"},
                        Line{128, 25600, 256, "1.01", "18.31", "0.20", "9.77", "3.56"},
                        Line{195, 65536, 512, "10.05", "182.81", "0.76", "64.00", "8.00"},
                        Line{315, 163840, 1024, "101.47", "1845.70", "3.08", "400.00", "18.00"}}) {
    SCOPED_TRACE(l.trillions);
    EXPECT_EQ(two(infinity_params(l.layers, l.hidden) / 1e12), l.trillions);
    EXPECT_EQ(two(infinity_model_states(l.layers, l.hidden) / kTiB), l.states);
    EXPECT_EQ(two(infinity_checkpoints({1024, 32, l.hidden, l.heads}, l.layers, 1) / kTiB), l.checkpoints);
    if (l.model_working) {
      EXPECT_EQ(two(infinity_model_working(l.hidden) / kGiB), l.model_working);
    }
    EXPECT_EQ(two(infinity_activation_working({1024, 4, l.hidden, l.heads}, 1) / kGiB), l.activation_working);
  }
}

TEST(Infinity, FewerCheckpointsNeedMoreWorkingMemory) {
  const LayerShape l{1024, 2, 512, 8};
  EXPECT_EQ(infinity_checkpoints(l, 24, 4) * 4, infinity_checkpoints(l, 24, 1));
  EXPECT_EQ(infinity_activation_working(l, 4), 4 * infinity_activation_working(l, 1));
  EXPECT_EQ(infinity_model_states(24, 512), 20 * infinity_params(24, 512));
}

TEST(Offload, KeepsOnlyParametersOnTheDevice) {
  const OffloadSizes one = offload_sizes(1e9, 1), four = offload_sizes(1e9, 4);
  EXPECT_EQ(one.device, 2e9);  // an eighth of the 16
  EXPECT_EQ(one.host, 14e9);
  EXPECT_EQ(one.moved, 4e9);
  EXPECT_EQ(four.device, 2e9);
  EXPECT_EQ(four.host, 3.5e9);
  EXPECT_EQ(one.device + one.host, model_states(1e9, 2, 1).total());
  EXPECT_EQ(four.device + four.host, model_states(1e9, 2, 4).total());
}

TEST(Rules, AreTheWeightsOfTheLayersAndTheirActivationsInFp32) {
  EXPECT_EQ(rule_model_bytes(12, 768), 4.0 * 12 * 768 * (13 + 12 * 768));
  EXPECT_EQ(rule_model_bytes(12, 768), 4.0 * static_cast<double>(kGpt2.layers * layer_params(kGpt2)));
  const LayerShape l{1024, 8, 768, 12};
  EXPECT_EQ(rule_activation_bytes(l, 12), 12.0 * 8 * 1024 * 768 * (67 + 9.0 * 12 * 1024 / 768));
}

// --- The text

size_t columns(std::string_view line) {
  return static_cast<size_t>(std::ranges::count_if(line, [](char c) { return (c & 0xC0) != 0x80; }));
}

Subject gpt3() {
  return {.model = {.layers = 96, .hidden = 12288, .heads = 96, .vocab = 51200},
          .seq = 2048,
          .micro_batches = 64,
          .dp = 64,
          .tp = 8,
          .pp = 8,
          .chunks = 3,
          .sequence_parallel = true,
          .stage = 1,
          .recompute = Selective};
}

TEST(Explain, PutsTheNumbersIntoZerosTable) {
  const std::string text = explain({.params = 7.5e9, .dp = 64, .stage = 2});
  EXPECT_THAT(text, HasSubstr("arXiv 1910.02054"));
  EXPECT_THAT(text, HasSubstr("Ψ = 7.5e9 parameters, N = dp = 64 ranks."));
  EXPECT_THAT(text, ContainsRegex("\n  0 .*16 · 7.5e9 +120.000 +120 +150.000\n"));
  EXPECT_THAT(text, ContainsRegex("\n  1 .*\\(4 \\+ 12/64\\) · 7.5e9 +31.406 +31.4 "));
  EXPECT_THAT(text, ContainsRegex("\n> 2 .*\\(2 \\+ 14/64\\) · 7.5e9 +16.641 +16.6 "));
  EXPECT_THAT(text, ContainsRegex("\n  3 .*16/64 · 7.5e9 +1.875 +1.88 "));
  EXPECT_THAT(text, HasSubstr("> Sent per step at stages 0, 1 and 2: 2Ψ = 15e9 elements, 30.000 GB in 16 bit."));
  EXPECT_THAT(text, HasSubstr("  Sent per step at stage 3: 3Ψ = 22.5e9 elements, 45.000 GB in 16 bit."));
  EXPECT_THAT(text, HasSubstr("host memory\n14Ψ/N = 14/64 · 7.5e9 = 1.641 GB"));
  EXPECT_THAT(text, HasSubstr("  = 7.5e9 parameters: 18 · 7.5e9 = 125.729 GiB, distributed optimizer 43.219 GiB."));
  // Nothing is made up about a model of which only the size is known.
  EXPECT_THAT(text, HasSubstr("not known without layers, hidden size, heads, vocabulary and sequence length"));
  EXPECT_THAT(text, Not(HasSubstr("M_model = 4·")));
}

// A rank has 1/E of the experts, and N/E ranks have the same: with states cut, 1/N whatever E is.
TEST(Formulas, ExpertsOverRanksAreHeldOnce) {
  const RankParams over_4(1000, 800, 4), whole(1000, 800, 1);
  EXPECT_EQ(over_4.held, 400);
  EXPECT_EQ(whole.held, 1000);
  EXPECT_EQ(model_states(over_4, 0, 8).total(), 16 * 400);
  EXPECT_EQ(model_states(over_4, 1, 8).total(), 4 * 400 + 12 * 125);
  EXPECT_EQ(model_states(over_4, 2, 8).total(), 2 * 400 + 14 * 125);
  EXPECT_EQ(model_states(over_4, 3, 8).total(), model_states(whole, 3, 8).total());
  EXPECT_EQ(megatron_bytes(over_4, true, 8), 6 * 400 + 12 * 125);
  EXPECT_EQ(megatron_bytes(over_4, false, 8), 18 * 400);
  EXPECT_EQ(offload_sizes(over_4, 8).device, 800);
  EXPECT_EQ(offload_sizes(over_4, 8).host, offload_sizes(1000, 8).host);
}

TEST(Explain, KnowsExpertsOverRanks) {
  Subject s{.params = 10e9, .dp = 64, .stage = 1};
  s.experts = 8e9;
  s.ep = 16;
  const std::string text = explain(s);
  EXPECT_THAT(text, HasSubstr("Of these Ψe = 8e9 are experts', over E = ep = 16 ranks"));
  EXPECT_THAT(text, HasSubstr("Ψ' = Ψ - Ψe(1 - 1/16) = 2.5e9, and each expert is on 4 ranks."));
  EXPECT_THAT(text, ContainsRegex("\n  0 +\\(2 \\+ 2 \\+ K\\)Ψ' +16 · 2.5e9 +40.000 "));
  EXPECT_THAT(text, ContainsRegex("\n> 1 +4Ψ' \\+ KΨ/N +4 · 2.5e9 \\+ 12/64 · 10e9 +11.875 "));
  EXPECT_THAT(text, ContainsRegex("\n  2 .*2 · 2.5e9 \\+ 14/64 · 10e9 +7.188 "));
  EXPECT_THAT(text, ContainsRegex("\n  3 .*16/64 · 10e9 +2.500 "));
  EXPECT_THAT(text, HasSubstr("> Sent per step at stages 0, 1 and 2: 2Ψ' = 5e9 elements, 10.000 GB in 16 bit."));
  EXPECT_THAT(text, HasSubstr("on the device 2Ψ' = 2 · 2.5e9 = 5.000 GB"));
  EXPECT_THAT(text, HasSubstr("less 1 - 1/16 of its experts: 18 · 2.5e9 = "));
  s.dp = 16;
  EXPECT_THAT(explain(s), HasSubstr("each is on one rank"));
  s.model = {.layers = 4, .hidden = 1000, .heads = 10, .vocab = 1000};
  s.seq = 500;
  s.sparse_layers = 3;
  s.experts_per_token = 2;
  // 4 · 2 · 500 · 1000 · 15/16 · 3
  EXPECT_THAT(explain(s), HasSubstr("in each of 3 sparse blocks,\n  k = 2 = 11.25e6 elements per micro-batch"));
}

TEST(Explain, KnowsOfSumsThatProductsAddTo) {
  const auto explained = [](double sent) {
    return explain_zero({.params = 1e9, .micro_batches = 4, .stage = 1, .bytes = {.sent = sent}}, 1e9);
  };
  EXPECT_THAT(explained(2), Not(HasSubstr("products add")));
  EXPECT_THAT(explained(2), ContainsRegex("\n> 1 .* 20.000\n"));
  EXPECT_THAT(explained(0), HasSubstr("rank has no 16-bit gradients beside them.\n"));
  EXPECT_THAT(explained(0), ContainsRegex("\n> 1 .* 18.000\n"));
  EXPECT_THAT(explained(4), HasSubstr("rank exchanges them over sequence parallelism in fp32, not in 16 bits.\n"));
  EXPECT_THAT(explained(4), ContainsRegex("\n> 1 .* 22.000\n"));
}

TEST(Explain, CutsTheModelOverTpAndPp) {
  const std::string text = explain_zero({.params = 1e12, .dp = 64, .tp = 8, .pp = 2, .stage = 3}, 1e12);
  EXPECT_THAT(text, HasSubstr("Ψ = 1e12 / (tp 8 · pp 2) = 62.5e9 parameters of a rank"));
  EXPECT_THAT(text, ContainsRegex("\n> 3 .*16/64 · 62.5e9 +15.625 +15.6 "));
}

TEST(Explain, PutsTheNumbersIntoTheActivations) {
  const std::string text = explain_activations(gpt3());
  EXPECT_THAT(text, HasSubstr("34·s·b·h + 5·a·s²·b = 34·2048·1·12288 + 5·96·2048²·1 = 2.672 GiB per layer"));
  EXPECT_THAT(text, HasSubstr("5as/h = 5·96·2048/12288 = 80;"));
  EXPECT_THAT(text, ContainsRegex("\n  none +- .* 34 \\+ 80 +2.672 GiB "));
  EXPECT_THAT(text, ContainsRegex("\n  none +tp .* 10 \\+ 24/8 \\+ 80/8 +552.000 MiB "));
  EXPECT_THAT(text, ContainsRegex("\n  none +tp\\+sp .* 34/8 \\+ 80/8 +342.000 MiB "));
  EXPECT_THAT(text, ContainsRegex("\n  selective +tp .* 10 \\+ 24/8 +312.000 MiB "));
  EXPECT_THAT(text, ContainsRegex("\n  full .*2sbh +2 +48.000 MiB "));
  EXPECT_THAT(text, HasSubstr("L(1 + (p-1)/(pv)) = 96·(1 + 7/(8·3)) = 124 layers' worth."));
  // 102 MiB · 124, and 8 masks of 24 MiB over 8 ranks.
  EXPECT_THAT(text, ContainsRegex("\n> selective +tp\\+sp .* 34/8 +102.000 MiB +12.375 GiB\n"));
  EXPECT_THAT(text, Not(HasSubstr("differs")));
}

TEST(Explain, MarksOneCaseAndSaysWhatTheFormulasDoNotKnow) {
  const Subject base{.model = kLlama3, .seq = 8192};
  EXPECT_THAT(explain_activations(base),
              HasSubstr("8 key/value heads for 32 heads, a gated MLP, an MLP of 14336 instead "
                        "of 4h = 16384"));
  for (const CheckpointGranularity r : {None, Selective, Layer}) {
    for (const i64 tp : {1, 4}) {
      for (const bool sp : {false, true}) {
        Subject s = base;
        s.recompute = r;
        s.tp = tp;
        s.sequence_parallel = sp;
        const std::string text = explain_activations(s);
        EXPECT_EQ(std::ranges::count(text, '>'), 1) << text;
      }
    }
  }
}

TEST(Explain, SaysWhatTheFirstStageHolds) {
  Subject s = gpt3();
  s.chunks = 1;
  EXPECT_THAT(explain_activations(s), HasSubstr("1F1B: p = 8 micro-batches of L/p layers = L = 96 layers' worth."));
  s.micro_batches = 2;
  EXPECT_THAT(explain_activations(s), HasSubstr("L·2/8 = 24 layers' worth."));
  s.pp = 1;
  EXPECT_THAT(explain_activations(s), HasSubstr("All L = 96 layers"));
  EXPECT_THAT(explain_activations(s), HasSubstr("4sbh(1 + V/h) of the output layer, V = 51200"));
}

TEST(Explain, PutsTheNumbersIntoMegatronsAndTheOthers) {
  const std::string text = explain(gpt3());
  EXPECT_THAT(text, HasSubstr("6 + 12/N = 6 + 12/64 = 6.1875."));
  EXPECT_THAT(text, HasSubstr("(173.951e9/8 + 51200·12288) / 8"));
  EXPECT_THAT(text,
              HasSubstr("= 2.79663e9 parameters: 18 · 2.79663e9 = 46.882 GiB, distributed optimizer 16.116 GiB."));
  EXPECT_THAT(text, HasSubstr("  = 2048·1·12288·(18 + 4·49152/12288)/8 = 102.000 MiB."));
  EXPECT_THAT(text, HasSubstr("12Lh² = 12·96·12288² = 173.946e9; model states 240Lh² = 3240.000 GiB."));
  EXPECT_THAT(text, HasSubstr("4h·4h = 16·12288² = 2.250 GiB."));
  EXPECT_THAT(text, HasSubstr("2bshL/ci = 2·1·2048·12288·96/1 = 4.500 GiB of a rank."));
  EXPECT_THAT(text, HasSubstr("1·2048·1·(16·12288 + 2·96·2048)\n  = 1.125 GiB."));
  EXPECT_THAT(text, HasSubstr("M_model = 4·96·12288·(13 + 12·12288) = 648.057 GiB"));
  EXPECT_THAT(text, HasSubstr("M_activation = 96·1·2048·12288·(67 + 9·96·2048/12288) = 474.750 GiB"));
}

TEST(Explain, CountsTheParametersOfAShape) {
  const std::string text = explain({.model = kGpt2, .seq = 1024});
  EXPECT_THAT(text, HasSubstr("Ψ = 124.44e6 parameters, N = dp = 1 ranks."));
  EXPECT_THAT(text, ContainsRegex("\n> 0 .*16 · 124.44e6 +1.991 "));
  EXPECT_THROW(explain({}), Error);
  EXPECT_THROW(explain({.model = {.layers = 2, .hidden = 64}}), Error);
}

TEST(Explain, FitsAHundredColumns) {
  Subject huge = gpt3();
  huge.model = {.layers = 1000,
                .hidden = 163840,
                .heads = 1024,
                .kv_heads = 128,
                .ffn = 524288,
                .vocab = 1048576,
                .gated = true,
                .tied = false};
  huge.seq = 1048576;
  huge.micro_batch = 8;
  huge.dp = 4096;
  huge.tp = 64;
  huge.pp = 1;
  Subject piped = huge;
  piped.pp = 128;
  Subject tiny{.params = 1234, .dp = 3};
  for (const Subject& s :
       {gpt3(), huge, piped, tiny, Subject{.model = kLlama3, .seq = 8192}, Subject{.params = 7.5e9}}) {
    std::istringstream lines(explain(s));
    for (std::string line; std::getline(lines, line);) EXPECT_LE(columns(line), 100u) << line;
  }
}

}  // namespace memreport_formulas_test
}  // namespace ds::memreport
