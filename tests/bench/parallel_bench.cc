// SPDX-License-Identifier: Apache-2.0
// Measures the cost of cutting a model over two ranks of one thread each, instead of one rank with two threads: the
// same configuration, samples and number of micro-batches, in turns.
//   parallel_bench CONFIG [TURNS [KEY=VALUE]...]
// Prints tokens/s and processor time as ratios to one rank with two threads, turn by turn, and their medians. The ratio
// of processor times shows work that is done twice or in addition (including the spinning of ranks that wait). It is
// meaningful on a busy machine, where wall times depend on the scheduler.

#include "bench/arrangement.h"
#include "pipeline/simulate.h"

using namespace ds;
using namespace ds::bench;

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: parallel_bench CFG.json [TURNS [KEY=VALUE]...]\n"), 2;
  const int turns = argc > 2 ? std::max(1, std::atoi(argv[2])) : 5;
  std::vector<std::string> base = {"zero_optimization={\"stage\": 0, \"overlap_comm\": true}", "reduce_order=boundary"};
  for (int i = 3; i < argc; ++i) base.emplace_back(argv[i]);
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), base.begin(), base.end());
    return more;
  };
  const std::string tp = "tensor_parallel.tp_size=2", sp = "sequence_parallel_size=2";
  std::vector<std::unique_ptr<Arrangement>> all;
  const auto add = [&](const char* name, std::vector<std::string> set, int ranks, int threads) {
    all.push_back(std::make_unique<Arrangement>(name, argv[1], with(std::move(set)), ranks, threads));
  };
  add("one rank, two threads", {}, 1, 2);
  add("one rank, one thread", {}, 1, 1);
  add("pp=2, 1f1b", {"pipeline.stages=2", "pipeline.partition=memory"}, 2, 1);
  add("pp=2, zb-h1", {"pipeline.stages=2", "pipeline.schedule=zb-h1", "pipeline.partition=memory"}, 2, 1);
  add("tp=2", {tp}, 2, 1);
  add("tp=2, sequence parallel", {tp, "tensor_parallel.sequence_parallel=true"}, 2, 1);
  add("dp=2", {}, 2, 1);
  add("sp=2, ulysses", {sp}, 2, 1);
  add("sp=2, ring", {sp, "sequence_parallel_mode=ring"}, 2, 1);
  take_turns(all, turns);

  const Arrangement& one = *all.front();
  const Config& c = one.config();
  std::printf("%s: %ld tokens per step, %s, %ld micro-batches; %s; %d turns\n\n", argv[1],
              c.batch.train * c.data.seq_length, std::string(dtype_name(one.engine(0).plan().work)).c_str(),
              c.batch.accumulation, std::string(cpu_ops()->name).c_str(), turns);
  std::printf("%-26s %9s %9s %9s %9s %9s %9s %9s\n", "", "tokens/s", "ratio", "cpu s", "ratio", "MB sent", "loss off",
              "bubble");
  for (const auto& a : all) {
    const pipeline::ScheduleOptions schedule{.kind = a->config().pipeline.schedule,
                                             .stages = a->engine(0).plan().mesh.pp,
                                             .micro_batches = a->engine(0).plan().micro_batches};
    std::printf("%-26s %9.0f %9.2f %9.3f %9.2f %9.2f %9.0e %9.2f\n", a->name().c_str(),
                static_cast<double>(c.batch.train * c.data.seq_length) / a->wall(), 1 / a->wall_over(one), a->cpu(),
                a->cpu_over(one), static_cast<double>(a->wire_bytes()) * 1e-6,
                std::abs(a->last().loss - one.last().loss) / one.last().loss, pipeline::bubble_formula(schedule));
  }
  return 0;
}
