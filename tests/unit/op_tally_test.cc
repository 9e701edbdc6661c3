// SPDX-License-Identifier: Apache-2.0
// The predicted operations and bytes of a step: against formulas, against themselves when the step is cut in parts, and
// against the ops that an engine really calls.

#include "plan/op_tally.h"

#include <numeric>

#include "cpu_time.h"
#include "equivalence/layouts.h"
#include "mesh/from_config.h"
#include "model/models.h"

namespace ds::testing {
namespace op_tally_test {

using plan::OpTally;
using plan::OpTotal;
using plan::Pass;
using plan::StepWork;

StepWork tally(const Config& c, const MeshCoord& coord = {}) {
  const MeshShape mesh{.dp = narrow<int>(c.batch.train / (c.batch.micro * c.batch.accumulation)),
                       .pp = narrow<int>(c.pipeline.stages),
                       .tp = narrow<int>(c.tensor_parallel.tp_size),
                       .sp = narrow<int>(c.sequence_parallel.size)};
  const model::Model model = model::make_model(c.model, c.data.seq_length, model::shard_of(c, mesh, coord));
  return plan::tally_step(model, plan::make_run_plan(c, model, mesh, coord));
}

OpTotal of(const OpTally& tally, std::string_view op) {
  const auto totals = tally.by_op();
  const auto found = totals.find(op);
  return found == totals.end() ? OpTotal{} : found->second;
}
double flops(const OpTally& tally) { return tally.total().flops; }
double attention_flops(const OpTally& tally) {
  return of(tally, "attention_fwd").flops + of(tally, "attention_bwd").flops;
}
double real(i64 n) { return static_cast<double>(n); }

i64 tokens_of(const Config& c) { return c.batch.micro * c.batch.accumulation * c.data.seq_length; }

// Products are 6 N per token; Model::flops_per_token takes 12 H D T for the attention of a layer, all pairs forward and
// twice that backward. The ops make no products for pairs that do not see each other, and backward one more: 14 H D for
// each pair, of which causal attention has (T + 1) / 2 per token.
TEST(OpTally, FlopsAreTheModelsUpToTheAttentionsConvention) {
  for (const ModelConfig& config : {tiny_gpt2(), tiny_llama(), tiny_bert()}) {
    const Config c = tiny_config(config, 1, 3, 0);
    const model::Model model = model::make_model(c.model, c.data.seq_length);
    const OpTally step = tally(c).total();
    const i64 T = c.data.seq_length, tokens = tokens_of(c), heads = config.layers * config.heads * config.head_dim;
    SCOPED_TRACE(family_name(config.family));
    const double matmul = of(step, "matmul").flops;
    EXPECT_EQ(matmul, 6 * real(model.num_matmul_params() * tokens));
    const double full = real(12 * heads * T * tokens);
    EXPECT_EQ(matmul, model.flops_per_token(T) * real(tokens) - full);
    const i64 pairs = tokens / T * (model.causal ? T * (T + 1) / 2 : T * T);
    EXPECT_EQ(attention_flops(step), real(14 * heads * pairs));
    EXPECT_EQ(flops(step), matmul + attention_flops(step));
  }
}

// A rank computes for the rows that its experts get: as many as without expert parallelism if all get as many, and else
// those of the busiest rank, whatever there is memory for.
TEST(OpTally, ExpertsComputeForTheRowsThatAreExpected) {
  ModelConfig m = tiny_llama();
  m.experts = {.count = 8, .per_token = 2, .intermediate = 24, .layers = std::vector<bool>(m.layers, true)};
  const auto grouped = [&](int ep, i64 tp, ReduceOrder order, double room = 2) {
    Config c = tiny_config(m, 4, 3, 0);
    c.reduce_order = order;
    c.expert_parallel = {.enabled = ep > 1, .size = ep, .room = room};
    c.tensor_parallel.tp_size = tp;
    const OpTally step = tally(c).total();
    return of(step, "grouped_matmul").flops + of(step, "grouped_matmul_grad").flops;
  };
  const i64 tokens = tokens_of(tiny_config(m, 4, 3, 0));
  const double router = 4 * real(m.layers * tokens * 8 * m.hidden),  // its gradient is an ordinary product
      experts = 6 * real(m.layers * tokens * 2 * 3 * 24 * m.hidden);
  for (const ReduceOrder order : {ReduceOrder::Micro, ReduceOrder::Boundary}) {
    EXPECT_EQ(grouped(1, 1, order), router + experts);
    EXPECT_EQ(grouped(2, 1, order), router + experts);
    EXPECT_EQ(grouped(4, 1, order, 4), router + experts);
  }
  EXPECT_EQ(grouped(1, 2, ReduceOrder::Boundary), router + experts / 2);
  m.experts.loads.assign(static_cast<size_t>(m.layers), {6, 2, 2, 2, 1, 1, 1, 1});
  EXPECT_EQ(grouped(1, 1, ReduceOrder::Micro), router + experts);
  EXPECT_EQ(grouped(2, 1, ReduceOrder::Boundary), router + 1.5 * experts);   // 12 of 16 instead of 8
  EXPECT_EQ(grouped(4, 1, ReduceOrder::Boundary, 4), router + 2 * experts);  // 8 instead of 4
  EXPECT_EQ(grouped(2, 1, ReduceOrder::Micro), router + 1.5 * experts);
}

TEST(OpTally, VisiblePairsAreThoseCountedOneByOne) {
  for (const i64 T : {1, 5, 8}) {
    for (const i64 S : {1, 5, 8, 13}) {
      for (const bool causal : {false, true}) {
        for (const i64 window : {0, 1, 3, 6, 20}) {
          i64 pairs = 0;
          for (i64 i = 0; i < T; ++i) {
            for (i64 j = 0; j < S; ++j)
              pairs += (!causal || j <= i + S - T) && (window == 0 || j > i + S - T - window) ? 1 : 0;
          }
          EXPECT_EQ(plan::visible_pairs(T, S, causal, window), pairs) << T << " " << S << " " << causal << window;
        }
      }
    }
  }
}

// Sequences together count as their calls alone, and read their keys, not all of the cache.
TEST(OpTally, AttentionOfSequencesIsThatOfEach) {
  const i64 D = 16, H = 4, G = 2, rows = 500;
  const std::vector<i32> begins = {0, 1, 8, 10}, keys = {90, 7, 33}, tables = {0, 0, 0}, pages(2);
  char there = 0;  // never read
  const auto heads = [&](i64 T, i64 n) { return TensorView::of(&there, DType::BF16, {1, T, n, D}); };
  const auto call = [&](i64 T, i64 S, const AttentionParams& p, bool coded) {
    OpTally counted;
    Stream stream{.native = &counted};
    TensorView k = heads(rows, G);
    if (coded) k.dtype = DType::I8;
    k.shape[1] = S;
    plan::counting_ops().attention_fwd(heads(T, H), TensorView::of(&there, DType::F32, {1, H, T}), heads(T, H), k, k, p,
                                       stream);
    return counted.total();
  };
  for (const i64 window : {0, 20}) {
    AttentionParams p{.window = window};
    double flops = 0, bytes = 0;
    for (size_t s = 0; s < keys.size(); ++s) {
      const OpTotal one = call(begins[s + 1] - begins[s], keys[s], p, false);
      flops += one.flops;
      bytes += one.bytes;
    }
    p.pages = pages.data(), p.page = 64;
    p.sequences = {.count = 3, .begins = begins.data(), .keys = keys.data(), .tables = tables.data(), .stride = 2};
    const OpTotal all = call(begins.back(), 90, p, false), codes = call(begins.back(), 90, p, true);
    EXPECT_EQ(all.flops, flops);
    EXPECT_EQ(codes.flops, flops);
    EXPECT_EQ(all.bytes, bytes);
    EXPECT_EQ(all.bytes - codes.bytes, real(2 * (90 + 7 + 33) * G * (D - 4)));
  }
}

TEST(OpTally, VisiblePairsOfALayoutAreThoseCountedOneByOne) {
  const RngKey coin{.seed = 3, .site = 1, .step = 0};
  constexpr i64 kBlock = 16, kCount = 70, kHeads = 3, kWords = 2;
  std::vector<u64> bits(static_cast<size_t>(kHeads * kCount * kWords));
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = u64{coin.bits(2 * i)} << 32 | coin.bits(2 * i + 1);
  const auto has = [&](i64 head, i64 query, i64 key) {
    return (bits[static_cast<size_t>((head * kCount + query) * kWords + key / 64)] >> (key % 64) & 1) != 0;
  };
  for (const auto& [T, S, query0, key0] : {std::array<i64, 4>{1100, 1100, 0, 0},
                                           {1, 900, 899, 0},
                                           {50, 333, 283, 0},
                                           {160, 160, 320, 160},
                                           {200, 90, 64, 32}}) {
    for (const bool causal : {false, true}) {
      for (const i64 window : {0, 1, 40, 300}) {
        for (const i64 layouts : {i64{1}, kHeads}) {
          AttentionParams p{.causal = causal, .window = window, .grid = {.head0 = 1, .row0 = query0, .col0 = key0}};
          p.blocks = {.block = kBlock, .count = kCount, .layouts = layouts, .keys = bits.data()};
          i64 pairs = 0;
          for (i64 h = 0; h < 2; ++h) {
            for (i64 i = 0; i < T; ++i) {
              for (i64 j = 0; j < S; ++j) {
                const bool near = (!causal || j <= i + S - T) && (window == 0 || j > i + S - T - window);
                pairs += near && has(layouts == 1 ? 0 : 1 + h, (query0 + i) / kBlock, (key0 + j) / kBlock) ? 1 : 0;
              }
            }
          }
          EXPECT_EQ(plan::visible_pairs(2, T, S, p), pairs) << T << " " << S << " " << causal << " " << window;
        }
      }
    }
  }
}

// The folds of a reduce-scatter have a source for each rank: counted at once, they add up to the counts of the op
// itself.
TEST(OpTally, FoldsOfManyRanksAreCountedAtOnce) {
  float there = 0;
  const TensorView source = TensorView::of(&there, DType::BF16, {12}), sum = TensorView::of(&there, DType::F32, {12});
  for (const size_t ranks : {1, 2, 7}) {
    for (const bool accumulate : {false, true}) {
      OpTally one, all;
      Stream stream{.native = &one};
      plan::counting_ops().fold(sum, std::vector(ranks, source), accumulate, stream);
      all.add(plan::fold_of(sum, source, static_cast<i64>(ranks), accumulate));
      EXPECT_EQ(one, all);
    }
  }
  // With a million ranks a loop over them for each segment and micro-batch takes minutes.
  const Config c = tiny_config(tiny_llama(), 1 << 20, 1000, 3);
  StepWork work;
  const double seconds = cpu_seconds_of([&] { work = tally(c); });
  EXPECT_EQ(work.micro_batches, 1000);
  EXPECT_GT(work.reductions.total().bytes, 0);
  EXPECT_LT(seconds, 20);
}

TEST(RunPlan, SumsOfAllRanksAreThoseOfEach) {
  ModelConfig config = tiny_llama();
  config.heads = 4;
  config.kv_heads = 1;
  config.hidden = 4 * config.head_dim;
  config.intermediate = 64;
  config.vocab_size = 60;
  for (const int dp : {1, 3, 64}) {
    Layout l;
    l.tp = 2;
    l.sequence = true;
    const Config c = config_of(config, l);
    const MeshShape mesh{.dp = dp, .tp = 2};
    const model::Model model = model::make_model(c.model, c.data.seq_length, model::shard_of(c, mesh, {}));
    const plan::RunPlan plan = plan::make_run_plan(c, model, mesh, {});
    const std::vector<plan::RunPlan::SummedElems> summed = plan.summed_of_ranks();
    ASSERT_EQ(std::ssize(summed), dp);
    i64 total = 0;
    for (int rank = 0; rank < dp; ++rank) {
      const plan::RunPlan own = plan::make_run_plan(c, model, mesh, {.dp = rank});
      plan::RunPlan::SummedElems of_rank;
      for (const update::CombinePlan::Exchange& e : own.combine.exchanges) of_rank[e.width] += e.elems;
      EXPECT_EQ(summed[rank], of_rank) << rank;
      for (const auto& [width, elems] : of_rank) total += elems;
    }
    EXPECT_GT(total, 0);
  }
}

// A block is computed again but for its last product, which nothing in its backward pass reads.
TEST(OpTally, RecomputationIsAForwardPassOfTheBlocks) {
  for (const ModelConfig& config : {tiny_gpt2(), tiny_llama()}) {
    Config c = tiny_config(config, 1, 2, 1);
    const StepWork plain = tally(c);
    c.activation_checkpointing.granularity = CheckpointGranularity::Layer;
    const StepWork layer = tally(c);
    c.activation_checkpointing.granularity = CheckpointGranularity::Selective;
    const StepWork selective = tally(c);
    SCOPED_TRACE(family_name(config.family));
    EXPECT_EQ(flops(plain.total(Pass::Recompute)), 0);
    for (const Pass pass : {Pass::Forward, Pass::BackwardInput, Pass::BackwardWeight}) {
      EXPECT_EQ(layer.total(pass), plain.total(pass));
      EXPECT_EQ(selective.total(pass), plain.total(pass));
    }
    // The forward pass of a training step is that of the blocks: the head's products are in its backward call.
    const i64 tokens = tokens_of(c), last = 2 * config.layers * config.hidden * config.intermediate * tokens;
    EXPECT_EQ(flops(layer.total(Pass::Recompute)), flops(plain.total(Pass::Forward)) - real(last));
    EXPECT_EQ(of(layer.total(Pass::Recompute), "attention_fwd"), of(plain.total(Pass::Forward), "attention_fwd"));
    // The branch of the attention: its products with queries, keys and values, and itself.
    const i64 qkv = 2 * config.layers * config.hidden * (config.heads + 2 * config.kv_heads) * config.head_dim * tokens;
    EXPECT_EQ(flops(selective.total(Pass::Recompute)),
              real(qkv) + of(plain.total(Pass::Forward), "attention_fwd").flops);
  }
}

TEST(OpTally, GroupsOfLayersComputeAgainAllButTheirLastProducts) {
  Config c = tiny_config(tiny_gpt2(), 1, 1, 0);  // three blocks: groups of two and of one
  c.activation_checkpointing.granularity = CheckpointGranularity::Layer;
  const double apart = flops(tally(c).total(Pass::Recompute));
  c.activation_checkpointing.interval = 2;
  const double last_product = real(2 * c.model.hidden * c.model.intermediate * tokens_of(c));
  EXPECT_EQ(flops(tally(c).total(Pass::Recompute)), apart + last_product);  // the second layer reads the first's output
}

TEST(OpTally, TensorParallelismHalvesTheProductsOfBlocks) {
  for (ModelConfig config : {tiny_gpt2(), tiny_llama()}) {
    config.heads = config.kv_heads = 4;
    config.hidden = 4 * config.head_dim;
    config.intermediate = 64;
    config.vocab_size = 60;
    for (const bool sequence : {false, true}) {
      Layout l;
      const StepWork one = tally(config_of(config, l));
      l.tp = 2;
      l.sequence = sequence;
      const StepWork half = tally(config_of(config, l), {.tp = 1});
      SCOPED_TRACE(family_name(config.family));
      for (const Pass pass : {Pass::Forward, Pass::BackwardInput, Pass::BackwardWeight}) {
        EXPECT_EQ(2 * flops(half.total(pass)), flops(one.total(pass)));
        EXPECT_GT(flops(one.total(pass)), 0);
      }
      // A sum over ranks forward and one backward for each of two products of a block, and the messages of the ends of
      // the model.
      const auto& forward = half.chunks[0].of(Pass::Forward).messages;
      EXPECT_EQ(forward.at("tp.reduce_scatter").calls, 2 * config.layers + 1);
      EXPECT_TRUE(one.chunks[0].of(Pass::Forward).messages.empty());
    }
  }
}

TEST(OpTally, StagesOfAPipelineAddUpToTheWhole) {
  for (const ModelConfig& config : {tiny_gpt2(), tiny_llama()}) {
    for (const auto& [kind, chunks] :
         {std::pair{Kind::OneFOneB, 1}, {Kind::ZeroBubbleH1, 1}, {Kind::Interleaved, 2}, {Kind::ZeroBubbleV, 2}}) {
      Layout l;
      const StepWork whole = tally(config_of(config, l));
      l.pp = 2;
      l.schedule = kind;
      l.chunks = chunks;
      const Config c = config_of(config, l);
      OpTally sum;
      double by_passes = 0;
      for (int stage = 0; stage < 2; ++stage) {
        const StepWork work = tally(c, {.pp = stage});
        sum.add(work.total());
        for (const Pass pass : {Pass::Forward, Pass::BackwardInput, Pass::BackwardWeight})
          by_passes += flops(work.total(pass));
      }
      SCOPED_TRACE(fmt::format("{} {}", family_name(config.family), schedule_name(kind)));
      EXPECT_EQ(by_passes, flops(whole.total()));
      for (const auto& [op, total] : whole.total().by_op()) {
        if (op == "judge" || op == "max_abs" || op == "sum_squares" || op == "adamw") continue;  // below
        // The first stage adds up the two gradients of the tied matrix.
        EXPECT_EQ(of(sum, op).calls, total.calls) << op;
        EXPECT_EQ(of(sum, op).bytes, total.bytes) << op;
      }
      // The tied matrix has a master and moments on both stages that use it, and counts in the norm once.
      const model::Model model = model::make_model(c.model, c.data.seq_length);
      const double twice =
          model.tied() && kind != Kind::ZeroBubbleV ? 28.0 * real(config.vocab_size * config.hidden) : 0;
      EXPECT_EQ(of(sum, "adamw").bytes, of(whole.total(), "adamw").bytes + twice);
      EXPECT_EQ(of(sum, "max_abs").bytes, of(whole.total(), "max_abs").bytes);
    }
  }
}

// fp32: master, m and v are read and written, the gradient is read; 16 bit: the parameter is written, too.
TEST(OpTally, AdamWReadsAndWritesItsStates) {
  for (const bool bf16 : {false, true}) {
    Config c = tiny_config(tiny_llama(), 1, 2, 1);
    c.bf16.enabled = bf16;
    c.communication_data_type = bf16 ? WireType::BF16 : WireType::F32;
    const i64 params = model::make_model(c.model, c.data.seq_length).num_params();
    const OpTally step = tally(c).total();
    EXPECT_EQ(of(step, "adamw"), (OpTotal{1, 0, real((bf16 ? 30 : 28) * params)}));
    EXPECT_EQ(of(step, "max_abs").bytes, 4 * real(params));
    EXPECT_EQ(of(step, "sum_squares").bytes, 4 * real(params));
  }
  Config c = tiny_config(tiny_llama(), 2, 2, 2);  // two ranks share it
  const i64 params = model::make_model(c.model, c.data.seq_length).num_params();
  EXPECT_EQ(of(tally(c).total(), "adamw").bytes + of(tally(c, {.dp = 1}).total(), "adamw").bytes, 28 * real(params));
}

// Calls of ops that are counted before they are carried out.
const OpTable& real_ops() { return *cpu_ops(); }
OpTally* g_communicator = nullptr;  // whose stream carries no tally

template <auto Member>
struct Counted;
template <class... A, void (*OpTable::*Member)(A...) noexcept>
struct Counted<Member> {
  static void call(A... args) noexcept {
    (real_ops().*Member)(args...);
    Stream& stream = std::get<sizeof...(A) - 1>(std::tuple<A&...>(args...));
    if (stream.native != nullptr) return (plan::counting_ops().*Member)(args...);
    stream.native = g_communicator;
    (plan::counting_ops().*Member)(args...);
    stream.native = nullptr;
  }
};

#define COUNTED(op) .op = Counted<&OpTable::op>::call
const OpTable kCounted = {.name = "counted",
                          COUNTED(matmul),
                          COUNTED(column_sum),
                          COUNTED(layernorm_fwd),
                          COUNTED(layernorm_bwd),
                          COUNTED(rmsnorm_fwd),
                          COUNTED(rmsnorm_bwd),
                          COUNTED(activation_fwd),
                          COUNTED(activation_bwd),
                          COUNTED(swiglu_fwd),
                          COUNTED(swiglu_bwd),
                          COUNTED(rope),
                          COUNTED(embedding_fwd),
                          COUNTED(embedding_bwd),
                          COUNTED(route),
                          COUNTED(weigh_choices),
                          COUNTED(route_grad),
                          COUNTED(router_stats),
                          COUNTED(router_loss),
                          COUNTED(balance_experts),
                          COUNTED(drop_choices),
                          COUNTED(add_noise),
                          COUNTED(sort_choices),
                          COUNTED(combine_rows),
                          COUNTED(combine_rows_grad),
                          COUNTED(grouped_matmul),
                          COUNTED(grouped_matmul_grad),
                          COUNTED(grouped_bias),
                          COUNTED(grouped_bias_grad),
                          COUNTED(attention_fwd),
                          COUNTED(attention_bwd),
                          COUNTED(attention_merge),
                          COUNTED(evoformer_attention_fwd),
                          COUNTED(evoformer_attention_bwd),
                          COUNTED(linear_cross_entropy),
                          COUNTED(vocab_max),
                          COUNTED(vocab_sums),
                          COUNTED(vocab_grad),
                          COUNTED(sample),
                          COUNTED(dropout),
                          COUNTED(add),
                          COUNTED(bias_residual),
                          COUNTED(cast),
                          COUNTED(copy_heads),
                          COUNTED(append_keys),
                          COUNTED(fold),
                          COUNTED(quantize),
                          COUNTED(quantize_signs),
                          COUNTED(dequantize),
                          COUNTED(dequantize_fold),
                          COUNTED(quantize_fp8),
                          COUNTED(matmul_fp8),
                          COUNTED(max_abs_fp8),
                          COUNTED(encode_fp8),
                          COUNTED(decode_fp8),
                          COUNTED(max_abs),
                          COUNTED(nonzero_rows),
                          COUNTED(sum_squares),
                          COUNTED(sum),
                          COUNTED(judge),
                          COUNTED(scaled_sum),
                          COUNTED(norm_ratios),
                          COUNTED(update)};
#undef COUNTED

void expect_same(const OpTally& got, const OpTally& want) {
  for (const auto& [call, n] : want.calls()) {
    const auto found = got.calls().find(call);
    EXPECT_EQ(found == got.calls().end() ? 0 : found->second, n)
        << "engine: " << call.op << " " << dtype_name(call.dtype) << " " << call.flops << " FLOPs " << call.bytes
        << " bytes";
  }
  for (const auto& [call, n] : got.calls()) {
    EXPECT_TRUE(want.calls().contains(call)) << "tally alone: " << n << " " << call.op << " " << dtype_name(call.dtype)
                                             << " " << call.flops << " FLOPs " << call.bytes << " bytes";
  }
}

// Every rank of a run: its engine calls in a step, call by call, the ops in its plan's tally.
void expect_engine_agrees(const Config& c, int ranks) {
  const CommOptions options{.timeout_s = 60, .progress_thread = false};
  std::mutex one_at_a_time;
  run_threads(ranks, options, [&](Communicator& world) {
    std::vector<int> all(static_cast<size_t>(ranks));
    std::iota(all.begin(), all.end(), 0);
    const auto device = make_cpu_device(kCounted, 1);
    Mesh mesh(world.group(all, "test", options), mesh_shape(c, ranks), options, {}, mesh_splits(c, {}));
    MemoryLedger ledger;
    engine::Engine engine(c, mesh, ledger, *device);
    engine.init_weights();
    std::vector<i32> ids(static_cast<size_t>(c.batch.micro * c.batch.accumulation * c.data.seq_length), 3);
    OpTally counted;
    device->stream().native = &counted;
    engine.train_step({ids, ids});
    device->stream().native = nullptr;
    const StepWork work = plan::tally_step(engine.model(), engine.plan());
    const std::lock_guard lock(one_at_a_time);
    SCOPED_TRACE(fmt::format("rank {}", world.rank()));
    expect_same(work.total(), counted);
  });
}

TEST(OpTally, IsWhatAnEngineCalls) {
  for (ModelConfig config : {tiny_gpt2(), tiny_llama(), tiny_bert()}) {
    if (config.family == Family::Gpt2) config.embd_dropout = config.attn_dropout = config.resid_dropout = 0.1f;
    for (const DType work : {DType::F32, DType::BF16}) {
      for (const DType wire : {DType::F32, DType::BF16}) {
        for (const ReduceOrder order : {ReduceOrder::Micro, ReduceOrder::Boundary}) {
          for (const auto granularity :
               {CheckpointGranularity::None, CheckpointGranularity::Layer, CheckpointGranularity::Selective}) {
            Config c = tiny_config(config, 1, 3, order == ReduceOrder::Micro ? 2 : 0);
            c.bf16.enabled = work == DType::BF16;
            c.communication_data_type = wire_type_of(wire);
            c.reduce_order = order;
            c.activation_checkpointing.granularity = granularity;
            c.activation_checkpointing.interval = 2;
            SCOPED_TRACE(fmt::format("{} {} {} {}", family_name(config.family), dtype_name(work), dtype_name(wire),
                                     static_cast<int>(granularity)));
            expect_engine_agrees(c, 1);
          }
        }
      }
    }
  }
}

// Sums of a rank's own micro-batches: products add to them, or gradients are rounded before. On one data-parallel rank
// and on two, and with ranks along other axes.
TEST(OpTally, IsWhatAnEngineCallsToSumMicroBatches) {
  for (const ModelConfig& config : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama())}) {
    for (const Layout& l : {Layout{.stage = 1}, Layout{.dp = 2}, Layout{.sp = 2, .stage = 1}, Layout{.pp = 2},
                            Layout{.tp = 2, .stage = 1}}) {
      for (const bool fused : {true, false}) {
        Config c = config_of(config, l);
        c.bf16.enabled = true;
        c.communication_data_type = WireType::BF16;
        c.reduce_order = ReduceOrder::Boundary;
        c.gradient_accumulation_fusion = fused;
        SCOPED_TRACE(fmt::format("{} {} {}", family_name(config.family), l.name(), fused));
        expect_engine_agrees(c, l.ranks());
      }
    }
  }
}

TEST(OpTally, HasTheProductsAndCodesOfFp8) {
  ModelConfig llama = tiny_llama(), gpt2 = tiny_gpt2();
  llama.hidden = 128, llama.head_dim = 64, llama.intermediate = 256, llama.qk_norm = false;
  gpt2.hidden = 128, gpt2.heads = gpt2.kv_heads = 2, gpt2.head_dim = 64, gpt2.intermediate = 256;
  for (const ModelConfig& model : {llama, gpt2}) {
    for (const bool joined : {false, true}) {
      Config c = tiny_config(model, 1, 2, joined ? 1 : 2);  // sums are added to by products, or folded
      c.model.joined_products = joined;
      c.bf16.enabled = c.fp8.enabled = true;
      c.fp8.gradients = joined ? Fp8Gradients::E5M2 : Fp8Gradients::E4M3;
      c.communication_data_type = WireType::BF16;
      c.activation_checkpointing.granularity = joined ? CheckpointGranularity::Layer : CheckpointGranularity::None;
      SCOPED_TRACE(fmt::format("{} joined {}", family_name(model.family), joined));
      expect_engine_agrees(c, 1);
    }
  }
}

// Codes of matrices that travel, and maxima of their blocks; a unit is gathered for each use, or once. And those of
// parameters that travel as other codes.
TEST(OpTally, HasTheCodesOfGathers) {
  ModelConfig model = tiny_gpt2();
  model.hidden = 128, model.heads = model.kv_heads = 2, model.head_dim = 64, model.intermediate = 256;
  for (const Layout& l : {Layout{.dp = 2, .stage = 3}, {.dp = 3, .stage = 3}, {.dp = 2, .pp = 2, .stage = 3}}) {
    for (const bool fp8 : {true, false}) {
      for (const i64 reuse : {0, 1'000'000'000}) {
        for (const i64 near : {1, 2}) {
          if (l.dp % near != 0) continue;
          Config c = config_of(model, l, 2 * l.dp);
          c.bf16.enabled = true;
          c.fp8.enabled = c.fp8.gathers = fp8;
          c.zero.quantized_weights = !fp8;
          c.zero.max_reuse_distance = reuse;
          c.zero.hpz_partition_size = near;
          c.communication_data_type = WireType::BF16;
          SCOPED_TRACE(fmt::format("{} fp8 {} reuse {} near {}", l.name(), fp8, reuse, near));
          expect_engine_agrees(c, l.ranks());
        }
      }
    }
  }
}

TEST(OpTally, IsWhatEveryRankOfAMeshCalls) {
  using Mode = SequenceParallelMode;
  for (const ModelConfig& config : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama())}) {
    for (const Layout& l :
         {Layout{.dp = 2, .stage = 3}, Layout{.pp = 2}, Layout{.tp = 2, .stage = 1}, Layout{.tp = 2, .sequence = true},
          Layout{.tp = 4, .stage = 2}, Layout{.sp = 2, .mode = Mode::Ulysses},
          Layout{.sp = 2, .mode = Mode::Ring, .stage = 3}, Layout{.dp = 2, .pp = 2, .schedule = Kind::ZeroBubbleH1},
          Layout{.pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2},
          Layout{.pp = 2, .tp = 2, .checkpoints = Granularity::Layer, .stage = 1}}) {
      SCOPED_TRACE(fmt::format("{} {}", family_name(config.family), l.name()));
      expect_engine_agrees(config_of(config, l), l.ranks());
    }
  }
  for (const Layout& l : {Layout{.dp = 2, .stage = 3}, Layout{.pp = 2, .schedule = Kind::ZeroBubbleH2}}) {
    Config c = config_of(tiny_gpt2(), l);
    c.pipeline.post_validate = true;
    c.gradient_clipping = 0;  // nothing is undone
    SCOPED_TRACE("post-validated " + l.name());
    expect_engine_agrees(c, l.ranks());
  }
}

// The communicator of one rank folds every gradient once, unless products have summed it.
TEST(OpTally, ReductionsAreWhatTheCommunicatorFolds) {
  for (const auto& [stage, fused] : {std::pair<i64, bool>{0, true}, {0, false}, {2, true}, {3, true}}) {
    Config c = tiny_config(tiny_gpt2(), 1, 2, stage);
    c.gradient_accumulation_fusion = fused;
    OpTally folded;
    g_communicator = &folded;
    const CommOptions options{.progress_thread = false, .ops = &kCounted};
    const auto device = make_cpu_device(real_ops(), 1);
    Mesh mesh(make_self_communicator(options), {}, options);
    MemoryLedger ledger;
    engine::Engine engine(c, mesh, ledger, *device);
    engine.init_weights();
    std::vector<i32> ids(static_cast<size_t>(c.batch.micro * c.batch.accumulation * c.data.seq_length), 3);
    engine.train_step({ids, ids});
    g_communicator = nullptr;
    EXPECT_EQ(folded.total().bytes, plan::tally_step(engine.model(), engine.plan()).reductions.total().bytes);
    EXPECT_EQ(folded.total().bytes > 0, stage > 0 || !fused);
  }
}

}  // namespace op_tally_test
}  // namespace ds::testing
