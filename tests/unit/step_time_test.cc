// SPDX-License-Identifier: Apache-2.0
// The predicted time of a step: against sums written out, and how it moves with rates and links. Whether it is true is
// for tests/bench/step-time.

#include "memreport/step_time.h"

#include <set>
#include <string_view>

#include "equivalence/layouts.h"
#include "model/models.h"
#include "pipeline/simulate.h"

namespace ds::testing {
namespace step_time_test {

using memreport::Links;
using memreport::Machine;
using memreport::Rate;
using memreport::StepTime;
using plan::Pass;

// A run on all stages of one pipeline, and its prediction.
struct Predicted {
  MeshShape mesh;
  std::vector<model::Model> models;
  std::vector<plan::RunPlan> plans;
  std::vector<plan::StepWork> works;

  explicit Predicted(const Config& c, DeviceKind device = DeviceKind::Cpu) {
    mesh = {.dp = narrow<int>(c.batch.train / (c.batch.micro * c.batch.accumulation)),
            .pp = narrow<int>(c.pipeline.stages),
            .tp = narrow<int>(c.tensor_parallel.tp_size),
            .sp = narrow<int>(c.sequence_parallel.size)};
    for (int p = 0; p < mesh.pp; ++p)
      models.push_back(model::make_model(c.model, c.data.seq_length, model::shard_of(c, mesh, {})));
    for (int p = 0; p < mesh.pp; ++p) plans.push_back(plan::make_run_plan(c, models[p], mesh, {.pp = p}, device));
    for (size_t p = 0; p < plans.size(); ++p) works.push_back(plan::tally_step(models[p], plans[p]));
  }
  StepTime operator()(const Machine& machine, const Links* links = nullptr) const {
    std::vector<memreport::StageWork> stages;
    std::vector<std::vector<pipeline::Instr>> schedules;
    for (size_t p = 0; p < plans.size(); ++p) {
      stages.push_back({&plans[p], &works[p]});
      schedules.push_back(plans[p].stage.schedule);
    }
    return memreport::predict_step(models[0], stages, schedules, machine, links);
  }
};

Machine cpu(double flops = 1e9, double bandwidth = 1e9, int cores = 4, int ranks = 4) {
  Machine m = memreport::machine_of_peaks(DType::F32, flops, bandwidth, ranks);
  m.own_stream = false;
  m.cores = cores;
  return m;
}

Links links_of(double alpha, double beta, int ranks = 2) {
  Links links{.operations = {}, .links = {}, .ranks = ranks};
  for (const char* op : {"reduce_scatter", "all_gather", "all_reduce", "all_to_all", "broadcast", "sendrecv"})
    links.operations.push_back({.op = op, .ranks = ranks, .alpha_s = alpha, .beta_s_per_byte = beta});
  return links;
}

TEST(Rate, IsLinearInTheLogarithmOfTheSizeBetweenPoints) {
  const Rate r({{10, 1}, {1000, 3}});
  EXPECT_DOUBLE_EQ(r.at(1), 1);
  EXPECT_DOUBLE_EQ(r.at(10), 1);
  EXPECT_DOUBLE_EQ(r.at(100), 2);
  EXPECT_DOUBLE_EQ(r.at(1e6), 3);
  EXPECT_DOUBLE_EQ(r.seconds(100), 50);
}

TEST(Machine, ACallTakesTheLongestOfItsParts) {
  Machine m = cpu(1e9, 1e8);
  m.op_overhead_s = 1e-3;
  m.bytes["adamw"][DType::F32] = Rate(1e7);
  m.flops["attention_fwd"][DType::F32] = Rate(std::vector<std::pair<double, double>>{{10, 1e8}, {1000, 2e8}});
  EXPECT_DOUBLE_EQ(m.seconds({"matmul", DType::F32, 1'000'000'000, 8}), 1);
  EXPECT_DOUBLE_EQ(m.seconds({"matmul", DType::F32, 8, 100'000'000}), 1);
  EXPECT_DOUBLE_EQ(m.seconds({"add", DType::F32, 0, 100'000'000}), 1);
  EXPECT_DOUBLE_EQ(m.seconds({"adamw", DType::F32, 0, 10'000'000}), 1);  // slower than memory
  EXPECT_DOUBLE_EQ(m.seconds({"add", DType::F32, 0, 8}), 1e-3);
  // By the FLOPs of one of its heads.
  EXPECT_DOUBLE_EQ(m.seconds({"attention_fwd", DType::F32, 100'000'000, 8, {100'000, 1, 1}}), 0.5);
  EXPECT_DOUBLE_EQ(m.seconds({"attention_bwd", DType::F32, 1'000'000'000, 8, {10, 1, 1}}), 1);  // as products
  EXPECT_THROW(m.seconds({"matmul", DType::BF16, 8, 8}), Error);
  EXPECT_FALSE(m.hides_communication());
  const Machine of_products = memreport::machine_of_peaks(DType::F32, 1e9, 0, 1);
  EXPECT_EQ(of_products.seconds({"add", DType::F32, 0, 100'000'000}), 0);
  EXPECT_DOUBLE_EQ(of_products.seconds({"matmul", DType::F32, 1'000'000'000, 100'000'000}), 1);
}

TEST(Machine, ComesBackFromItsJson) {
  const Machine m =
      memreport::measure_machine({.threads = 1, .dtypes = {DType::BF16}, .seconds_per_op = 1e-4, .rounds = 1});
  EXPECT_EQ(memreport::read_machine(memreport::machine_json(m), "machine.json"), m);
  EXPECT_THROW(memreport::read_machine("{}", "machine.json"), Error);
  EXPECT_THROW(memreport::read_machine("[1]", "machine.json"), Error);
  std::string broken = memreport::machine_json(m);
  broken.replace(broken.find("\"threads\": 1"), 12, "\"threads\": \"1\"");
  EXPECT_THROW(memreport::read_machine(broken, "machine.json"), Error);
  for (const char* threads : {"0", "1e308", "4294967297", "2.5"}) {  // the library would make some number of each
    std::string wrong = memreport::machine_json(m);
    wrong.replace(wrong.find("\"threads\": 1"), 12, std::string("\"threads\": ") + threads);
    EXPECT_THROW(memreport::read_machine(wrong, "machine.json"), Error) << threads;
  }
}

// Every op that an engine calls in a step has a measured rate, or moves bytes alone.
TEST(Machine, KnowsTheOpsOfEveryModel) {
  const Machine m = memreport::measure_machine({.dtypes = {DType::F32}, .seconds_per_op = 1e-4, .rounds = 1});
  EXPECT_GT(m.op_overhead_s, 0);
  EXPECT_EQ(m.flops.size(), 5);  // products, those of experts and their gradients, attention and its gradients
  for (const ModelConfig& config : {tiny_gpt2(), tiny_llama(), tiny_bert()}) {
    const Predicted p(tiny_config(config, 1, 2, 0));
    const plan::OpTally all = p.works[0].total();
    for (const auto& [call, n] : all.calls()) {
      EXPECT_GE(m.seconds(call), m.op_overhead_s);
      const bool moves = call.op == "sum" || call.op == "judge";
      EXPECT_TRUE(moves || m.flops.contains(call.op) || m.bytes.contains(call.op)) << call.op;
    }
  }
}

// Products of experts have rates by the size of one of them, since many small ones are slower than one large one.
TEST(Machine, KnowsProductsOfExperts) {
  const Machine m = memreport::measure_machine({.dtypes = {DType::F32}, .seconds_per_op = 1e-4, .rounds = 1});
  ModelConfig config = tiny_llama();
  config.experts = {.count = 4, .per_token = 2, .intermediate = 24};
  config.experts.layers.assign(static_cast<size_t>(config.layers), true);
  const Predicted p(tiny_config(config, 1, 2, 0));
  std::set<std::string_view> found;
  const plan::OpTally all = p.works[0].total();
  for (const auto& [call, n] : all.calls()) {
    if (!call.op.starts_with("grouped_matmul")) continue;
    found.insert(call.op);
    EXPECT_TRUE(call.shape[0] == 4 || call.shape[0] == 1);  // of routers all rows are one group
    const memreport::Rate& rate = m.flops.find(call.op)->second.at(DType::F32);
    EXPECT_EQ(rate.points().front().first, 2.0 * 32 * 32 * 32);
    EXPECT_GE(m.seconds(call),
              static_cast<double>(call.flops) / rate.at(static_cast<double>(call.flops / call.shape[0])));
  }
  EXPECT_EQ(found, (std::set<std::string_view>{"grouped_matmul", "grouped_matmul_grad"}));
}

// One rank: the sum over its ops, one after the other, and its communicator's folds.
TEST(StepTime, OfOneRankIsTheRooflineSum) {
  for (const auto granularity : {CheckpointGranularity::None, CheckpointGranularity::Layer}) {
    Config c = tiny_config(tiny_gpt2(), 1, 3, 1);
    c.activation_checkpointing.granularity = granularity;
    const Predicted p(c);
    Machine m = cpu(3e9, 7e9);
    m.op_overhead_s = 1e-6;
    double sum = 0, recompute = 0;
    plan::OpTally all = p.works[0].total();
    all.add(p.works[0].reductions);
    for (const auto& [call, n] : all.calls()) {
      const double flops = static_cast<double>(call.flops) / 3e9, bytes = static_cast<double>(call.bytes) / 7e9;
      sum += static_cast<double>(n) * std::max({flops, bytes, 1e-6});
    }
    recompute = m.seconds(p.works[0].total(Pass::Recompute));
    const StepTime t = p(m);
    EXPECT_NEAR(t.step_s, sum, 1e-12 * sum);
    EXPECT_NEAR(t.recompute_s, recompute, 1e-12 * sum);
    EXPECT_EQ(t.recompute_s > 0, granularity == CheckpointGranularity::Layer);
    EXPECT_EQ(t.bubble_fraction, 0);
    EXPECT_NEAR(t.pipeline_s, t.compute_s, 1e-12 * sum);
    EXPECT_NEAR(t.pipeline_s + t.communication_s + t.optimizer_s, t.step_s, 1e-12 * sum);
    memreport::OpTime ops;
    for (const auto& [name, op] : t.ops) {
      ops.calls += op.calls;
      ops.flops += op.flops;
      ops.seconds += op.seconds;
    }
    EXPECT_NEAR(ops.seconds, t.compute_s + t.optimizer_s, 1e-12 * sum);
    EXPECT_EQ(ops.calls, p.works[0].total().total().calls);
    EXPECT_EQ(ops.flops, p.works[0].total().total().flops);
    EXPECT_EQ(t.ops.at("adamw").calls, 1);
    EXPECT_NEAR(t.tokens_per_s * t.step_s, 2 * 3 * 13, 1e-9);
    EXPECT_NEAR(t.mfu, p.models[0].flops_per_token(13) * 2 * 3 * 13 / (t.step_s * 3e9), 1e-9);
  }
}

TEST(StepTime, FallsWithEveryRate) {
  for (const Layout& l : {Layout{.dp = 2, .stage = 2}, Layout{.dp = 2, .stage = 3}, Layout{.tp = 2},
                          Layout{.dp = 2, .pp = 2, .stage = 1}, Layout{.sp = 2}}) {
    const Predicted p(config_of(of_four_heads(tiny_gpt2()), l));
    SCOPED_TRACE(l.name());
    const Links slow = links_of(1e-3, 1e-8), quick = links_of(1e-4, 1e-8), wide = links_of(1e-3, 1e-9);
    const double base = p(cpu(), &slow).step_s;
    EXPECT_LT(p(cpu(2e9), &slow).step_s, base);
    EXPECT_LT(p(cpu(1e9, 2e9), &slow).step_s, base);
    EXPECT_LT(p(cpu(), &quick).step_s, base);
    EXPECT_LT(p(cpu(), &wide).step_s, base);
    EXPECT_THROW(p(cpu()), Error);  // of no links
  }
}

TEST(StepTime, CommunicationHidesOnlyWhereNothingElseRuns) {
  Config c = tiny_config(tiny_gpt2(), 2, 1, 2);
  c.zero.reduce_bucket_size = 1;
  const Predicted p(c);
  const Links links = links_of(0, 1e-8);
  const StepTime busy = p(cpu(1e9, 1e9, 2, 2), &links), idle = p(cpu(1e9, 1e9, 4, 2), &links);
  EXPECT_EQ(busy.hidden_s, 0);
  EXPECT_GT(idle.hidden_s, 0);
  EXPECT_NEAR(idle.hidden_s + idle.communication_s, busy.communication_s, 1e-12);
  EXPECT_NEAR(busy.step_s - idle.step_s, idle.hidden_s, 1e-12);
  // Never more than the passes beside it take.
  const Links endless = links_of(0, 1);
  EXPECT_LE(p(cpu(1e9, 1e9, 4, 2), &endless).hidden_s, idle.pipeline_s);
  // Codes do, too.
  Config coded = c;
  coded.communication_data_type = WireType::Int4;
  EXPECT_GT(Predicted(coded)(cpu(1e9, 1e9, 4, 2), &links).hidden_s, 0);
  // Sparse gradients are waited for, however long the passes are.
  Config sparse = tiny_config(tiny_llama(), 2, 1, 2);
  sparse.sparse_gradients = true;
  sparse.zero.reduce_bucket_size = 1;
  const Predicted s(sparse);
  const StepTime waiting = s(cpu(1e6, 1e6, 4, 2), &links);
  EXPECT_GT(waiting.messages_s.at("dp.sparse_gather"), 0);
  const double reductions =
      static_cast<double>(s.plans[0].traffic.last.at("dp.reduce_scatter").calls);  // all but one hide
  EXPECT_NEAR(waiting.hidden_s, waiting.messages_s.at("dp.reduce_scatter") * (1 - 1 / reductions), 1e-12);
  coded.zero.overlap_comm = false;
  EXPECT_EQ(Predicted(coded)(cpu(1e9, 1e9, 4, 2), &links).hidden_s, 0);
  c.zero.overlap_comm = false;
  EXPECT_EQ(Predicted(c)(cpu(1e9, 1e9, 4, 2), &links).hidden_s, 0);
}

// Beside a GPU: sums of gradients go to the host (in each micro-batch, if they are kept there), rounded parameters come
// back, the ranks of a node share its processors, and late updates hide behind the passes.
TEST(StepTime, OfAGpuKnowsItsHost) {
  Config c = config_of(tiny_gpt2(), {.stage = 2}, 4);
  c.bf16.enabled = true;
  c.communication_data_type = WireType::BF16;
  const i64 elems = model::make_model(c.model, c.data.seq_length).num_params();
  Machine gpu = memreport::machine_of_peaks(DType::BF16, 1e12, 1e12, 1);
  const StepTime on_device = Predicted(c, DeviceKind::Cuda)(gpu);
  EXPECT_EQ(on_device.copies_s, 0);

  c.zero.offload_optimizer.device = OffloadDevice::Cpu;
  const Predicted offloaded(c, DeviceKind::Cuda);
  EXPECT_TRUE(offloaded(gpu).lacks_offload);
  gpu.host_link = 1e8;
  EXPECT_TRUE(offloaded(gpu).lacks_offload);
  gpu.host_updates = 1e7;
  EXPECT_EQ(offloaded.plans[0].traffic.copies.to_host, 4 * elems);
  EXPECT_EQ(offloaded.plans[0].traffic.copies.to_device, 2 * elems);
  const StepTime t = offloaded(gpu);
  EXPECT_FALSE(t.lacks_offload);
  EXPECT_DOUBLE_EQ(t.copies_s, static_cast<double>(6 * elems) / 1e8);
  // Masters and moments are read and written, the gradient read, the parameter written.
  EXPECT_NEAR(t.optimizer_s - on_device.optimizer_s, static_cast<double>(30 * elems) / 1e7, 1e-3 * t.optimizer_s);
  EXPECT_NEAR(t.step_s, on_device.step_s + t.copies_s + t.optimizer_s - on_device.optimizer_s, 1e-9 * t.step_s);

  c.zero.offload_optimizer.gradients = true;
  const Predicted away(c, DeviceKind::Cuda);
  EXPECT_GE(away.plans[0].traffic.copies.to_host, 4 * 4 * elems);    // written by each of four micro-batches
  EXPECT_GE(away.plans[0].traffic.copies.to_device, 3 * 4 * elems);  // read by all but the first

  c.zero.offload_optimizer = {.device = OffloadDevice::Cpu, .delayed_update = true};
  const StepTime late = Predicted(c, DeviceKind::Cuda)(gpu);
  EXPECT_NEAR(late.optimizer_s, t.optimizer_s - late.pipeline_s, 1e-3 * t.optimizer_s);
  EXPECT_NEAR(late.step_s, t.step_s - on_device.pipeline_s, 0.02 * t.step_s);
  // An update that takes longer than the passes is not hidden twice.
  c.zero.offload_optimizer = {
      .device = OffloadDevice::Nvme, .nvme_path = "disk", .buffer_count = 1, .delayed_update = true};
  c.zero.sub_group_size = 1;
  gpu.disk_read = gpu.disk_write = 1e5;
  const Predicted in_files(c, DeviceKind::Cuda);
  const offload::FileCounts moved = in_files.plans[0].traffic.state_files;
  EXPECT_GT(moved.read_bytes, 0);
  EXPECT_GE(in_files(gpu).step_s, static_cast<double>(moved.read_bytes + moved.written_bytes) / 1e5);
}

// Ranks with more threads than their node has cores: all their work goes through the cores, and a pipeline stage uses
// the time in which another is idle.
TEST(StepTime, RanksShareTheCoresOfTheirNode) {
  Config c = tiny_config(tiny_gpt2(), 2, 1, 2);
  const Links links = links_of(1e-6, 1e-9, 4);
  const auto check = [&](const Predicted& p, int ranks) {
    const StepTime own = p(cpu(1e9, 1e9, ranks, ranks), &links);
    const StepTime shared = p(cpu(1e9, 1e9, 1, ranks), &links);
    EXPECT_EQ(own.cores_s, 0);
    double work = 0;
    for (const plan::StepWork& w : p.works) work += cpu().seconds(w.total());
    work *= static_cast<double>(ranks) / static_cast<double>(p.works.size());
    const double sent = own.in_layer_communication_s + own.communication_s + own.publish_s;
    EXPECT_NEAR(shared.step_s, work + sent, 1e-9 * work);
    EXPECT_NEAR(shared.cores_s, shared.step_s - own.step_s, 1e-12);
    EXPECT_NEAR(shared.tokens_per_s * shared.step_s, own.tokens_per_s * own.step_s, 1e-6);
    return shared.cores_s / own.step_s;
  };
  check(Predicted(c), 2);
  Layout l{.pp = 2};
  const double filled = check(Predicted(config_of(tiny_llama(), l)), 2);
  EXPECT_LT(filled, 0.9);  // by the bubbles
  EXPECT_GT(filled, 0);
}

// dp.reduce_scatter sends (P - 1)/P of the gradients, dp.all_gather of the parameters: t = alpha + beta bytes.
TEST(StepTime, MessagesFollowTheirModels) {
  const Config c = tiny_config(tiny_gpt2(), 2, 1, 1);
  const Predicted p(c);
  const Links links = links_of(0.5, 1e-6);
  const StepTime t = p(cpu(), &links);
  const auto& traffic = p.plans[0].traffic.last;
  for (const char* name : {"dp.reduce_scatter", "dp.all_gather"}) {
    const CommCount n = traffic.at(name);
    EXPECT_NEAR(t.messages_s.at(name), 0.5 * static_cast<double>(n.calls) + 1e-6 * static_cast<double>(n.bytes), 1e-9);
  }
  EXPECT_NEAR(t.publish_s, t.messages_s.at("dp.all_gather"), 1e-12);
}

TEST(StepTime, BubbleIsTheSimulations) {
  for (const auto& [kind, chunks] : {std::pair{Kind::OneFOneB, 1},
                                     {Kind::GPipe, 1},
                                     {Kind::ZeroBubbleH1, 1},
                                     {Kind::Interleaved, 2},
                                     {Kind::ZeroBubbleV, 2}}) {
    Layout l{.pp = 2};
    l.schedule = kind;
    l.chunks = chunks;
    const Config c = config_of(tiny_llama(), l);
    const Predicted p(c);
    const Machine m = cpu();
    const Links links = links_of(1e-5, 1e-9);
    const StepTime t = p(m, &links);
    std::vector<pipeline::Costs> blocks;
    for (size_t chunk = 0; chunk < p.plans[0].stage.chunks.size(); ++chunk) {
      for (int place = 0; place < 2; ++place) {
        const plan::StepWork& w = p.works[kind == Kind::ZeroBubbleV && chunk == 1 ? 1 - place : place];
        const auto cost = [&](Pass pass) { return m.seconds(w.chunks[chunk].of(pass).ops); };
        blocks.push_back({cost(Pass::Forward), cost(Pass::Recompute) + cost(Pass::BackwardInput),
                          cost(Pass::BackwardWeight) + m.seconds(w.chunks[chunk].gradients) / 8,
                          1e-5 + 1e-9 * static_cast<double>(p.plans[0].shape().stream_rows * c.model.hidden * 4)});
      }
    }
    pipeline::ScheduleOptions options = pipeline::schedule_of(c);
    const pipeline::Timeline timeline = pipeline::simulate(options, blocks);
    SCOPED_TRACE(schedule_name(kind));
    EXPECT_NEAR(t.bubble_fraction, timeline.bubble_fraction(), 1e-12);
    EXPECT_NEAR(t.pipeline_s, timeline.makespan, 1e-12);
    EXPECT_GT(t.bubble_fraction, 0);
    ASSERT_EQ(t.stage_idle_s.size(), 2u);
    for (size_t s = 0; s < 2; ++s) EXPECT_NEAR(t.stage_idle_s[s], timeline.idle(s), 1e-12);
  }
}

// From step to step, the time is that of the busiest stage with its own update, or more; and never more than that of
// steps that wait for each other, but for the copies of the version before.
TEST(StepTime, PostValidatedStepsAreSimulatedOneAfterTheOther) {
  for (const Kind kind : {Kind::OneFOneB, Kind::GPipe, Kind::ZeroBubbleH1, Kind::ZeroBubbleH2}) {
    Layout l{.pp = 2};
    l.schedule = kind == Kind::ZeroBubbleH2 ? Kind::ZeroBubbleH1 : kind;
    Config c = config_of(tiny_llama(), l);
    const Machine m = cpu();
    const Links links = links_of(1e-5, 1e-9);
    const StepTime waits = Predicted(c)(m, &links);
    c.pipeline.schedule = kind;
    c.pipeline.post_validate = true;
    const Predicted p(c);
    const StepTime t = p(m, &links);
    SCOPED_TRACE(schedule_name(kind));
    const auto kept = p.plans[0].kept_for_undo();
    EXPECT_GT(kept.states, 0);
    EXPECT_GT(t.optimizer_s, waits.optimizer_s);
    EXPECT_NEAR(t.pipeline_s + t.communication_s + t.optimizer_s + t.publish_s + t.files_s + t.copies_s, t.step_s,
                1e-12);
    EXPECT_LE(t.step_s, waits.step_s + (t.optimizer_s - waits.optimizer_s) + 1e-12);
    if (kind == Kind::ZeroBubbleH2) {
      EXPECT_LT(t.bubble_fraction, waits.bubble_fraction);
    }
    std::vector<memreport::StageWork> stages;
    for (size_t s = 0; s < p.plans.size(); ++s) stages.push_back({&p.plans[s], &p.works[s]});
    const memreport::LeastTime least = memreport::least_step(p.models[0], stages, m, &links);
    EXPECT_LE(least.own.step_s, t.step_s + 1e-12);
    EXPECT_LE(least.any_cut.step_s, t.step_s + 1e-12);
    ASSERT_EQ(t.stage_idle_s.size(), 2u);
    for (const double idle : t.stage_idle_s) EXPECT_GE(idle, -1e-12);
  }
}

// The first stage waits for the end of the last one's step, unless the tied matrix's gradient is sent ahead; sums in 16
// bits are not.
TEST(StepTime, TiedMatricesAreWaitedForUnlessSentAhead) {
  ModelConfig model = tiny_gpt2();
  model.layers = 8;  // half of them on each stage, so their passes take about the same time
  Config c = config_of(model, {.pp = 2});
  c.pipeline.schedule = Kind::ZeroBubbleH2;
  c.pipeline.post_validate = true;
  const Links links = links_of(1e-9, 1e-12);
  Predicted p(c);
  ASSERT_TRUE(p.plans[0].sends_use_ahead && p.plans[1].sends_use_ahead);
  EXPECT_EQ(p.plans[0].stage.use_complete_after, 0u);
  EXPECT_EQ(p.plans[1].stage.use_complete_after, pipeline::use_complete_after(p.plans[1].stage.schedule));
  const StepTime ahead = p(cpu(), &links);
  for (plan::RunPlan& plan : p.plans) plan.sends_use_ahead = false;
  const StepTime at_end = p(cpu(), &links);
  EXPECT_GT(at_end.step_s, 1.01 * ahead.step_s);
  EXPECT_GT(at_end.stage_idle_s[0], ahead.stage_idle_s[0]);
  c.bf16.enabled = true;
  c.grad_accum_dtype = DType::BF16;
  const Predicted narrow(c);
  EXPECT_FALSE(narrow.plans[1].sends_use_ahead);
  EXPECT_EQ(narrow.plans[1].stage.use_complete_after, 0u);
}

TEST(Links, AreReadBackAndChosenByPlace) {
  commbench::Result r;
  r.ranks.resize(2);
  r.ranks[0].host = r.ranks[1].host = "a";
  r.models.push_back({.op = "all_gather",
                      .backend = "shm",
                      .form = "in_place",
                      .ranks = 2,
                      .alpha_s = 1e-5,
                      .beta_s_per_byte = 1e-10});
  r.models.push_back({.op = "all_gather",
                      .backend = "shm",
                      .form = "in_place",
                      .ranks = 4,
                      .alpha_s = 4e-5,
                      .beta_s_per_byte = 2e-10});
  r.links = {{"shm", "host", 1e-6, 1e10, 1}, {"mpi", "network", 1e-4, 1e9, 1}};
  const Links links = memreport::read_links(commbench::links_json(r), "links.json");
  ASSERT_EQ(links.operations.size(), 2);
  EXPECT_EQ(links.hosts, 1);
  const auto seconds = [&](Collective op, int ranks, bool network) {
    return memreport::message_seconds(links, op, {ranks, network}, {10, 1'000'000});
  };
  EXPECT_DOUBLE_EQ(seconds(Collective::AllGather, 2, false), 10 * 1e-5 + 1e6 * 1e-10);
  EXPECT_DOUBLE_EQ(seconds(Collective::AllGather, 8, false),
                   10 * 4e-5 * 7 / 3 + 1e6 * 2e-10);                                     // the nearest, of more steps
  EXPECT_DOUBLE_EQ(seconds(Collective::AllGather, 8, true), 10 * 7 * 1e-4 + 1e6 / 1e9);  // by the link
  EXPECT_DOUBLE_EQ(seconds(Collective::ReduceScatter, 2, false), 10 * 1e-6 + 1e6 / 1e10);
  EXPECT_EQ(seconds(Collective::AllGather, 1, false), 0);
  EXPECT_THROW(memreport::read_links("{\"schema\": \"ds-machine/1\"}", "links.json"), Error);
  EXPECT_THROW(memreport::message_seconds({}, Collective::Send, {2, false}, {1, 1}), Error);

  const MeshShape mesh{.dp = 4, .pp = 2, .tp = 4};
  EXPECT_FALSE(memreport::group_of(mesh, Axis::Tp, 8).over_network);
  EXPECT_TRUE(memreport::group_of(mesh, Axis::Dp, 8).over_network);
  EXPECT_TRUE(memreport::group_of(mesh, Axis::Pp, 8).over_network);
  EXPECT_FALSE(memreport::group_of(mesh, Axis::Dp, 16).over_network);
  EXPECT_EQ(memreport::group_of(mesh, Axis::Dp, 8).ranks, 4);
  // Two neighbouring ranks of dp are one node's, those of different pairs are not.
  const auto of_pairs = [&](DpSplit::Along along) { return memreport::group_of(mesh, DpSplit{"x", 2, along}, 8); };
  EXPECT_EQ(of_pairs(DpSplit::Along::Inner).ranks, 2);
  EXPECT_FALSE(of_pairs(DpSplit::Along::Inner).over_network);
  EXPECT_EQ(of_pairs(DpSplit::Along::Outer).ranks, 2);
  EXPECT_TRUE(of_pairs(DpSplit::Along::Outer).over_network);
  EXPECT_FALSE(memreport::group_of(mesh, DpSplit{"x", 4, DpSplit::Along::Outer}, 8).over_network);  // one rank
  EXPECT_TRUE(memreport::group_of({.dp = 4, .sp = 3}, DpSplit{"x", 2, DpSplit::Along::Inner}, 4).over_network);
}

}  // namespace step_time_test
}  // namespace ds::testing
