// SPDX-License-Identifier: Apache-2.0
// A program that brings its model and its samples (own_model.h), and has libds train them:
//
//   own_model CFG.json OUT [check] [resume] [name=NAME] [samples=N] [KEY=VALUE...]
//
// alone, or on several ranks with `ds-launch -n N own_model ...`. CFG.json has neither "model" nor "data.train".

#include "own_model.h"

#include <ds/train.h>

#include <cstdio>
#include <cstdlib>

namespace {

int number(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoi(text);
}

void print(const char* what, const ds::TagMemory& m) {
  std::printf("%s %s predicted %lld counted %lld\n", what, m.tag.c_str(), static_cast<long long>(m.predicted),
              static_cast<long long>(m.counted));
}

void run(std::span<char*> args) {
  const int world = number("WORLD_SIZE", 1);  // as ds-launch says
  ds::RankInfo ranks{.rank = number("RANK", 0), .world_size = world, .local_rank = number("LOCAL_RANK", 0)};
  ranks.local_world_size = number("LOCAL_WORLD_SIZE", world);
  if (const char* job = std::getenv("DS_JOB")) ranks.job = job;
  ds::RunOptions options{.out_dir = args[2]};
  std::string name = "own-mlp";
  ds::i64 samples = 512;
  bool check = false;
  std::vector<std::string> set;
  for (const std::string arg : args.subspan(3)) {
    if (arg == "check") {
      check = true;
    } else if (arg == "resume") {
      options.resume = "latest";
    } else if (arg.starts_with("name=")) {
      name = arg.substr(5);
    } else if (arg.starts_with("samples=")) {
      samples = std::stoll(arg.substr(8));
    } else {
      set.push_back(arg);
    }
  }
  const ds::ModelConfig model{.vocab_size = 61,
                              .hidden = 32,
                              .layers = 2,
                              .heads = 4,  // tensor parallelism takes no more ranks than heads
                              .intermediate = 64,
                              .max_positions = 64,
                              .source = std::make_shared<own::MlpModel>(name)};
  const auto sequences = std::make_shared<own::Sequences>(samples, model.vocab_size);
  const ds::ConfigResult read =
      ds::load_config(args[1], set, world, ds::ConfigUse::Train, {.model = model, .samples = sequences});
  if (!read.ok()) throw ds::Error(read.code(), read.message());
  if (check) {
    for (const ds::TagMemory& m : ds::predict_run(read.config, ranks).memory) print("memory", m);
    ds::TrainingRun::check(read.config, ranks, options);
    return;
  }
  ds::TrainingRun training(read.config, ranks, options);
  const auto on_step = [](const ds::StepRecord& r, ds::i64) {
    std::printf("step %lld loss %.9g\n", static_cast<long long>(r.step), r.loss);
  };
  for (const ds::TagMemory& m : training.train({.on_step = on_step}).memory)
    if (ranks.rank == 0) print("memory", m);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc < 3) throw ds::Error(ds::Errc::Config, "usage: own_model CFG.json OUT [OPTION...] [KEY=VALUE...]");
    run({argv, static_cast<size_t>(argc)});
    return 0;
  } catch (const ds::Error& e) {
    std::fprintf(stderr, "own_model: %s\n", e.what());
    return ds::exit_code(e.code());
  }
}
