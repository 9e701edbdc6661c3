// SPDX-License-Identifier: Apache-2.0
// The predicted time of a step beside real ones: some twenty short runs of small models on one and two ranks (threads
// of this process, over the communicators of training), with every strategy alone.
//   step_time_bench LINKS.json [STEPS [FILTER]]      LINKS: of ds-commbench --links for two ranks
// tests/bench/step-time makes the links and runs it. Each run measures the machine's rates first, so that both see the
// same machine. "cpu" is the processor time of a step over the number of ranks, the median: where others use the
// machine it is what the step would take without them, but for the time in which a rank waits (the bubble of a
// pipeline, which is taken from the prediction for this comparison, and waits for messages). "wall" is the median of
// real times, "least" the least of them.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <numeric>
#include <sstream>
#include <thread>

#include "comm/make_communicator.h"
#include "engine/engine.h"
#include "memreport/step_time.h"
#include "mesh/from_config.h"
#include "plan/planned.h"
#include "probe/host.h"
#include "run/connect.h"

using namespace ds;

namespace {

using Clock = std::chrono::steady_clock;
double since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }
double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

struct Case {
  std::string name = {};
  int ranks = 1;
  i64 hidden = 256, layers = 4, micro = 4, seq = 128, accumulation = 1;
  bool bf16 = false;
  i64 stage = 0;
  int pp = 1, tp = 1;
  CheckpointGranularity checkpoints = CheckpointGranularity::None;
  bool llama = false;
  i64 vocab = 256;
  ReduceOrder order = ReduceOrder::Boundary;
};

Config config_of(const Case& k) {
  Config c;
  ModelConfig& m = c.model;
  m.family = k.llama ? Family::Llama : Family::Gpt2;
  m.vocab_size = k.vocab;
  m.hidden = k.hidden;
  m.layers = k.layers;
  m.head_dim = 64;
  m.heads = m.kv_heads = k.hidden / 64;
  m.intermediate = k.llama ? k.hidden * 8 / 3 / 64 * 64 : 4 * k.hidden;
  m.max_positions = k.seq;
  if (k.llama) {
    m.activation = Activation::Silu;
    m.attention_bias = m.output_bias = m.mlp_bias = false;
    m.tie_embeddings = false;
  }
  const i64 dp = k.ranks / (k.pp * k.tp);
  c.batch = {.train = k.micro * k.accumulation * dp, .micro = k.micro, .accumulation = k.accumulation};
  c.data.seq_length = k.seq;
  c.bf16.enabled = k.bf16;
  c.communication_data_type = k.bf16 ? WireType::BF16 : WireType::F32;
  c.zero.stage = k.stage;
  c.zero.overlap_comm = true;
  c.reduce_order = k.stage >= 2 ? ReduceOrder::Micro : k.order;
  c.pipeline = {.stages = k.pp, .partition = "uniform"};
  c.tensor_parallel.tp_size = k.tp;
  c.activation_checkpointing.granularity = k.checkpoints;
  c.gradient_clipping = 1.0;
  return c;
}

std::vector<Case> cases() {
  using G = CheckpointGranularity;
  std::vector<Case> all;
  const auto add = [&](std::string name, Case k) {
    k.name = std::move(name);
    all.push_back(std::move(k));
  };
  for (const bool bf16 : {false, true}) {
    add("1M", {.hidden = 128, .layers = 4, .micro = 8, .bf16 = bf16});
    add("3M llama", {.hidden = 256, .layers = 4, .bf16 = bf16, .llama = true});
    add("3M recompute", {.hidden = 256, .layers = 4, .bf16 = bf16, .checkpoints = G::Layer});
    add("3M accumulation 4", {.micro = 1, .accumulation = 4, .bf16 = bf16, .stage = 1});
    add("3M T 512", {.micro = 1, .seq = 512, .bf16 = bf16});
    add("3M V 8192", {.micro = 2, .bf16 = bf16, .vocab = 8192});
  }
  add("11M", {.hidden = 384, .layers = 6, .micro = 2, .seq = 256, .bf16 = true});
  add("25M", {.hidden = 512, .layers = 8, .micro = 2, .bf16 = true});
  add("40M", {.hidden = 640, .layers = 8, .micro = 1, .seq = 256, .bf16 = true});
  for (const i64 stage : {0, 1, 2, 3})
    add(fmt::format("3M stage {}", stage), {.ranks = 2, .bf16 = true, .stage = stage});
  add("11M stage 2", {.ranks = 2, .hidden = 384, .layers = 6, .micro = 2, .seq = 256, .bf16 = true, .stage = 2});
  add("3M stage 2 acc. 4", {.ranks = 2, .micro = 1, .accumulation = 4, .stage = 2});
  add("3M stage 0 fp32", {.ranks = 2});
  add("3M pp 2", {.ranks = 2, .micro = 1, .accumulation = 8, .bf16 = true, .pp = 2});
  add("3M pp 2 fp32", {.ranks = 2, .micro = 2, .accumulation = 4, .pp = 2});
  add("3M tp 2", {.ranks = 2, .bf16 = true, .tp = 2});
  add("3M tp 2 fp32", {.ranks = 2, .tp = 2});
  add("3M tp 2 recompute", {.ranks = 2, .bf16 = true, .tp = 2, .checkpoints = G::Layer});
  return all;
}

struct Measured {
  double cpu_s = 0, wall_s = 0, least_s = 0;
};

double processor_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

Measured measure(const Config& c, int ranks, int steps) {
  std::vector<double> wall, cpu;
  run_threads(ranks, {.timeout_s = 120, .progress_thread = true}, [&](Communicator& world) {
    std::vector<int> all(static_cast<size_t>(ranks));
    std::iota(all.begin(), all.end(), 0);
    const CommOptions options{.timeout_s = 120, .progress_thread = c.zero.overlap_comm};
    const auto device = make_cpu_device(probe::cpu_backend(), 1);
    Mesh mesh(world.group(all, "step", options), mesh_shape(c, ranks), options);
    MemoryLedger ledger;
    engine::Engine engine(c, mesh, ledger, *device);
    engine.init_weights();
    std::vector<i32> ids(static_cast<size_t>(c.batch.micro * c.batch.accumulation * c.data.seq_length));
    for (size_t i = 0; i < ids.size(); ++i)
      ids[i] = static_cast<i32>(RngKey{1, 2, 3}.bits(i) % static_cast<u64>(c.model.vocab_size));
    for (int s = -2; s < steps; ++s) {
      world.barrier("bench");
      const auto start = Clock::now();
      const double cpu_start = processor_seconds();
      engine.train_step({ids, ids});
      world.barrier("bench");
      if (world.rank() != 0 || s < 0) continue;
      wall.push_back(since(start));
      cpu.push_back((processor_seconds() - cpu_start) / ranks);
    }
  });
  return {median(cpu), median(wall), *std::ranges::min_element(wall)};
}

memreport::StepTime predict(const Config& c, int ranks, const memreport::Machine& machine,
                            const memreport::Links& links) {
  const MeshShape mesh = mesh_shape(c, ranks);
  std::vector<model::Model> models;
  std::vector<plan::RunPlan> plans;
  std::vector<plan::StepWork> works;
  models.reserve(mesh.pp);
  plans.reserve(mesh.pp);
  works.reserve(mesh.pp);
  std::vector<memreport::StageWork> stages;
  std::vector<std::vector<pipeline::Instr>> schedules;
  for (int p = 0; p < mesh.pp; ++p) {
    const MeshCoord coord{.pp = p};
    models.push_back(model::make_model(c.model, c.data.seq_length, model::shard_of(c, mesh, coord)));
    plans.push_back(plan::make_run_plan(c, models.back(), mesh, coord));
    works.push_back(plan::tally_step(models.back(), plans.back()));
    stages.push_back({&plans.back(), &works.back()});
    schedules.push_back(plans.back().stage.schedule);
  }
  return memreport::predict_step(models[0], stages, schedules, machine, &links);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: step_time_bench LINKS.json [STEPS [FILTER]]\n"), 2;
  std::ifstream in(argv[1]);
  std::stringstream text;
  text << in.rdbuf();
  const memreport::Links links = memreport::read_links(text.str(), argv[1]);
  const int steps = argc > 2 ? std::atoi(argv[2]) : 10;
  const std::string filter = argc > 3 ? argv[3] : "";
  std::printf("%s, %d cores, one thread for each rank; milliseconds\n", std::string(probe::cpu_backend().name).c_str(),
              probe::num_cores());
  std::printf("%-20s %-5s %5s | %9s %7s %7s %7s %7s %7s %7s | %8s %8s %8s | %8s %8s\n", "run", "type", "ranks",
              "predicted", "compute", "tp", "idle", "comm", "optim.", "publish", "cpu", "least", "wall", "of cpu",
              "of least");
  std::vector<double> of_cpu, of_least;
  for (const Case& k : cases()) {
    if (k.name.find(filter) == std::string::npos) continue;
    const Config c = config_of(k);
    const memreport::Machine machine = memreport::measure_machine({.ranks = k.ranks, .dtypes = {c.work_dtype()}});
    const memreport::StepTime p = predict(c, k.ranks, machine, links);
    const Measured m = measure(c, k.ranks, steps);
    const double idle = p.pipeline_s * p.bubble_fraction;
    of_cpu.push_back((p.step_s - idle) / m.cpu_s - 1);
    of_least.push_back(p.step_s / m.least_s - 1);
    std::printf(
        "%-20s %-5s %5d | %9.2f %7.2f %7.2f %7.2f %7.2f %7.2f %7.2f | %8.2f %8.2f %8.2f | %+6.1f %% %+6.1f %%\n",
        k.name.c_str(), std::string(dtype_name(c.work_dtype())).c_str(), k.ranks, p.step_s * 1e3, p.compute_s * 1e3,
        p.in_layer_communication_s * 1e3, idle * 1e3, p.communication_s * 1e3, p.optimizer_s * 1e3, p.publish_s * 1e3,
        m.cpu_s * 1e3, m.least_s * 1e3, m.wall_s * 1e3, of_cpu.back() * 100, of_least.back() * 100);
    std::fflush(stdout);
  }
  if (of_cpu.empty()) return 0;
  for (auto* errors : {&of_cpu, &of_least}) {
    for (double& e : *errors) e = std::abs(e);
    std::printf("%zu runs, of %s: relative error %.1f %% in the median, %.1f %% at most\n", errors->size(),
                errors == &of_cpu ? "processor time" : "least time", median(*errors) * 100,
                *std::ranges::max_element(*errors) * 100);
  }
  return 0;
}
