// SPDX-License-Identifier: Apache-2.0
// Tokens/s of whole training steps of a GPT-2 on one rank, beside the time that oneDNN needs for the step's matrix
// products alone, in the same run:
//   train_bench configs/gpt2-124m.json [THREADS [STEPS]]
// The share is oneDNN's time for the products over our time for everything: 100 % would be a step that does nothing but
// multiply, at oneDNN's rate. Steps, of one micro-batch, and products take turns; times are medians.

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "bench/onednn_product.h"
#include "comm/make_communicator.h"
#include "ds/config.h"
#include "engine/engine.h"

using namespace ds;
using namespace ds::bench;

namespace {

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Counted {
  Product product;
  i64 count;
};

// The products of one step: those of a layer as often as there are layers, those of the head once per chunk of logits.
std::vector<Counted> products_of_step(const ModelConfig& m, const plan::RunPlan& plan) {
  const i64 R = plan.B * plan.T, chunks = R / plan.activations.pass.sizes.logits_rows;
  std::vector<Product> layer, head;
  add_layer(layer, "qkv", R, m.hidden, 3 * m.hidden, false);
  add_layer(layer, "proj", R, m.hidden, m.hidden, false);
  add_layer(layer, "fc1", R, m.hidden, m.intermediate, false);
  add_layer(layer, "fc2", R, m.intermediate, m.hidden, false);
  add_layer(head, "logits", plan.activations.pass.sizes.logits_rows, m.hidden, m.vocab_size, true);
  std::vector<Counted> counted;
  for (const Product& p : layer) counted.push_back({p, m.layers});
  for (const Product& p : head) counted.push_back({p, chunks});
  return counted;
}

void measure(const Config& config, DType work, int threads, int turns) {
  MemoryLedger ledger;
  Mesh mesh(make_self_communicator({}));
  const OpTable& ops = *cpu_ops();
  const auto device = make_cpu_device(ops, threads);
  engine::Engine engine(config, mesh, ledger, *device);
  engine.init_weights();
  const plan::RunPlan& plan = engine.plan();
  const i64 tokens = plan.B * plan.T;
  std::vector<i32> ids(static_cast<size_t>(tokens)), targets(ids.size());
  const RngKey key{1, 2, 3};
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<i32>(key.bits(i) % config.model.vocab_size);
  std::copy(ids.begin() + 1, ids.end(), targets.begin());
  targets.back() = ids.front();
  const auto step = [&] { engine.train_step({ids, targets}); };
  step();
  step();

  const std::vector<Counted> products = products_of_step(config.model, plan);
  std::vector<double> steps, shares, product_times;
  double product_flops = 0;
  for (const Counted& c : products) product_flops += c.product.flops() * static_cast<double>(c.count);
  for (int turn = 0; turn < turns; ++turn) {
    steps.push_back(seconds_of(step));
    double theirs = 0;
    for (const Counted& c : products) {
      Operands operands(c.product, work);
      OnednnProduct product(c.product, work, operands, threads);
      product();
      theirs += static_cast<double>(c.count) * std::min(seconds_of(product), seconds_of(product));
    }
    product_times.push_back(theirs);
    shares.push_back(theirs / steps.back());
  }
  const double s = median(steps), flops = engine.model().flops_per_token(plan.T) * static_cast<double>(tokens);
  std::printf("%-5s %9.0f %9.1f %9.1f %10.1f %12.1f %12.1f %9.1f %%\n", std::string(dtype_name(work)).c_str(),
              static_cast<double>(tokens) / s, s * 1e3, *std::min_element(steps.begin(), steps.end()) * 1e3,
              flops / s * 1e-9, product_flops / median(product_times) * 1e-9, median(product_times) * 1e3,
              median(shares) * 100);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: train_bench CFG.json [THREADS [STEPS]]\n"), 2;
  const int threads = argc > 2 ? std::atoi(argv[2]) : 2, turns = argc > 3 ? std::atoi(argv[3]) : 5;
  for (const DType work : {DType::F32, DType::BF16}) {
    const std::string precision = fmt::format("bf16={{\"enabled\": {}}}", work == DType::BF16);
    ConfigResult read = load_config(argv[1], std::span(&precision, 1), 1);
    if (!read.ok()) return std::fprintf(stderr, "%s\n", read.message().c_str()), 2;
    if (read.config.model.family != Family::Gpt2) return std::fprintf(stderr, "train_bench: not a GPT-2\n"), 2;
    read.config.batch = {.train = read.config.batch.micro, .micro = read.config.batch.micro, .accumulation = 1};
    if (work == DType::F32) {
      const i64 tokens = read.config.batch.micro * read.config.data.seq_length;
      std::printf("%s: %ld tokens per step, %d threads, %s\n", argv[1], tokens, threads,
                  std::string(cpu_ops()->name).c_str());
      std::printf("%-5s %9s %9s %9s %10s %12s %12s %11s\n", "type", "tokens/s", "step ms", "min ms", "GFLOP/s",
                  "oneDNN GF/s", "products ms", "share");
    }
    measure(read.config, work, threads, turns);
  }
  return 0;
}
