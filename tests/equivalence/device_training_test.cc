// SPDX-License-Identifier: Apache-2.0
// Training on a CUDA device (DS_TEST_DEVICE: a GPU, or the simulator): every ZeRO stage, one rank and several that
// share the device, stages of a pipeline, activation checkpointing, graphs, skipped steps and checkpoints' state give
// the same bits; tensor and sequence parallelism and the CPU the same losses but for rounding.

#include <dlfcn.h>
#include <gmock/gmock.h>

#include <chrono>
#include <cstdlib>

#include "equivalence/layouts.h"
#include "equivalence/serving.h"
#include "mesh/from_config.h"
#include "model/attention_pattern.h"
#include "model/pass_memory.h"
#include "parity/device_ops.h"
#include "plan/planned.h"
#include "plan/scratch.h"
#include "setting.h"
#include "slow_set.h"
#include "temp_directory.h"

namespace ds::testing {
namespace device_training_test {

Config config_of(const ModelConfig& model, DType work, int ranks, i64 accumulation, i64 stage) {
  Config c = tiny_config(model, ranks, accumulation, stage);
  c.bf16.enabled = work == DType::BF16;
  c.fp16.enabled = work == DType::F16;
  c.fp16.initial_scale_power = 8;
  c.communication_data_type = wire_type_of(work);
  c.reduce_order = ReduceOrder::Micro;
  return c;
}

constexpr i64 kSteps = 4;

// On the simulator, which is slow, the ordinary run has fewer models, optimizers and stages; DS_SLOW=1: all.
const bool kAll = std::getenv("DS_SLOW") != nullptr || std::getenv("DS_CUDA_PLUGIN") == nullptr;

// Every rank has a device of its own, which are one GPU; they talk through host memory.
Trace train(const Config& config, int ranks, const Hooks& hooks = {}, i64 steps = kSteps) {
  auto worlds = make_thread_communicators(ranks, {.timeout_s = 120});
  std::vector<Trace> traces(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::exception_ptr error;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      const size_t at = static_cast<size_t>(r);
      try {
        const auto device = make_test_device(1);
        Mesh::OverDevice over_device;
        if (!device->is_host()) over_device = over_one_gpu;
        Mesh mesh(std::move(worlds[at]), mesh_shape(config, ranks), {.timeout_s = 120, .device = device.get()},
                  over_device, mesh_splits(config, {}));
        traces[at] = train_on(*device, mesh, config, steps, hooks);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  if (error) std::rethrow_exception(error);
  if (traces[0].logits.empty()) traces[0].logits = traces[static_cast<size_t>(ranks) - 1].logits;  // of the last stage
  return traces[0];
}

class DeviceTraining : public ::testing::TestWithParam<DType> {};

TEST_P(DeviceTraining, StagesAndRanksGiveTheSameBits) {
  for (const ModelConfig& model : {tiny_gpt2(), tiny_llama(), tiny_bert()}) {
    const Trace want = train(config_of(model, GetParam(), 1, 2, 0), 1);
    for (const i64 stage : {0, 1, 2, 3}) {
      if (!kAll && stage != 3 && stage != (model.family == Family::Gpt2 ? 1 : 2)) continue;
      const std::string what = fmt::format("{} stage {}", family_name(model.family), stage);
      if (kAll || stage != 3)
        expect_same_training(train(config_of(model, GetParam(), 1, 2, stage), 1), want, what + ", 1 rank");
      expect_same_training(train(config_of(model, GetParam(), 2, 1, stage), 2), want, what + ", 2 ranks");
    }
  }
}

// q, k and v, with their biases, and gate and up: one product each.
TEST_P(DeviceTraining, JoinedProductsGiveTheSameBitsAtEveryStage) {
  ModelConfig model = joinable_qwen2();
  const Trace want = train(config_of(model, GetParam(), 1, 2, 0), 1);
  for (const i64 stage : {1, 3}) {
    Config c = config_of(model, GetParam(), 2, 1, stage);
    c.zero.param_persistence_threshold = 3000;  // of one matrix of a group, but not of all
    const std::string what = fmt::format("stage {}", stage);
    expect_same_training(train(c, 2), want, what);
  }
  model.joined_products = false;
  const Trace apart = train(config_of(model, GetParam(), 1, 2, 0), 1);
  EXPECT_FALSE(same_bits(apart.weights, want.weights)) << "nothing is joined";
  const double unit = GetParam() == DType::F32 ? 1e-5 : 1e-2;
  expect_close(apart, want, "apart", {.loss = unit, .first_norm = unit, .norm = 10 * unit});
}

ModelConfig of_blocks(ModelConfig c) {
  c.hidden = 128;
  c.heads = c.kv_heads = 2;
  c.head_dim = 64;
  c.intermediate = 128;
  c.layers = 1;
  c.qk_norm = false;
  return c;
}

// Products in FP8: 26 rows, which are padded. Stages and ranks give the same bits, and the CPU the same losses but for
// rounding: its codes are the same.
TEST_P(DeviceTraining, ProductsInFp8) {
  if (GetParam() != DType::BF16) return;
  for (const ModelConfig& model : {of_blocks(tiny_gpt2()), of_blocks(tiny_llama())}) {
    for (const Fp8Gradients gradients : {Fp8Gradients::E4M3, Fp8Gradients::E5M2}) {
      if (!kAll && gradients == Fp8Gradients::E5M2 && model.family != Family::Gpt2) continue;
      const auto config = [&](int ranks, i64 stage) {
        Config c = config_of(model, DType::BF16, ranks, 2 / ranks, stage);
        c.fp8 = {.enabled = true, .gradients = gradients};
        return c;
      };
      const std::string what = fmt::format("{} {}", family_name(model.family), static_cast<int>(gradients));
      const Trace want = train(config(1, 0), 1);
      expect_same_training(train(config(2, 3), 2), want, what);
      Config gathers = config(2, 3);
      gathers.fp8.gathers = true;
      expect_same_training(train(gathers, 2), want, what + " gathers");
      const Trace cpu = train_threads(config(1, 0), 1, kSteps);
      EXPECT_NEAR(want.losses[0] / cpu.losses[0], 1, 2e-3) << what;
      expect_close(want, cpu, what, {.loss = 1e-2, .first_norm = 1e-2, .norm = 8e-2});
    }
  }
}

TEST_P(DeviceTraining, OptimizersGiveTheSameBits) {
  for (const OptimizerType type : {OptimizerType::Sgd, OptimizerType::Lion, OptimizerType::Adagrad, OptimizerType::Lamb,
                                   OptimizerType::Muon, OptimizerType::AdamW8bit}) {
    const auto config = [&](int ranks, i64 stage) {
      Config c = config_of(tiny_gpt2(), GetParam(), ranks, 2 / ranks, stage);
      c.optimizer.type = type;
      c.optimizer.momentum = 0.9;
      c.optimizer.muon_lr = c.optimizer.adam_lr = c.optimizer.lr;
      return c;
    };
    if (!kAll && (type == OptimizerType::Sgd || type == OptimizerType::Lion || type == OptimizerType::Adagrad))
      continue;
    const Trace want = train(config(1, 0), 1);
    for (const i64 stage : {0, 2, 3}) {
      if (!kAll && stage != 3) continue;
      expect_same_training(train(config(2, stage), 2), want, fmt::format("{} stage {}", static_cast<int>(type), stage));
    }
  }
}

// Checks that ops hold, after each step, the memory that the plan's calls are predicted to take.
void expect_predicted_scratch(const Config& c, int ranks, bool by_cudnn) {
  Hooks hooks;
  hooks.same_logits = false;
  hooks.after_step = [&](engine::Engine& engine, i64) {
    const Device& device = engine.device();
    const GpuMeter meter = plan::meter_run(engine.config(), engine.model(), engine.plan(), device.gpu_kernels());
    EXPECT_EQ(device.scratch_bytes(), meter.scratch_bytes()) << "rank " << engine.mesh().rank();
    EXPECT_GT(meter.most, 0);
    EXPECT_EQ(meter.cudnn.size(), by_cudnn ? 2u : 0u);
  };
  train(c, ranks, hooks, 2);
}

TEST_P(DeviceTraining, OpsHoldThePredictedMemory) {
  if (make_test_device(1)->is_host()) GTEST_SKIP() << "of GPUs";
  for (const ModelConfig& model : {tiny_gpt2(), tiny_llama(), tiny_bert()}) {
    for (const i64 stage : {0, 3}) {
      SCOPED_TRACE(fmt::format("{} stage {}", family_name(model.family), stage));
      Config c = config_of(model, GetParam(), 2, 1, stage);
      c.data.split = 0;  // nothing is evaluated
      expect_predicted_scratch(c, 2, asks_for_cudnn() && GetParam() != DType::F32);
      c.optimizer.type = OptimizerType::Muon;
      c.optimizer.muon_lr = c.optimizer.adam_lr = c.optimizer.lr;
      if (stage == 3) expect_predicted_scratch(c, 2, asks_for_cudnn() && GetParam() != DType::F32);
      if (!kAll && stage == 0) break;
    }
  }
}

TEST_P(DeviceTraining, SoDoProductsInFp8) {
  if (make_test_device(1)->is_host() || GetParam() != DType::BF16) GTEST_SKIP() << "of GPUs, in bf16";
  for (const i64 length : {13, 16}) {
    Config c = config_of(of_blocks(tiny_gpt2()), DType::BF16, 2, 1, 3);
    c.data.split = 0;
    c.data.seq_length = length;
    c.fp8.enabled = true;
    expect_predicted_scratch(c, 2, asks_for_cudnn());
  }
}

// The same with cuDNN's stand-in: its workspace is among it.
TEST_P(DeviceTraining, SoDoesAttentionByCudnn) {
  const char* const plugin = std::getenv("DS_CUDA_PLUGIN");
  if (plugin == nullptr || std::string_view(plugin).find("sim") == std::string_view::npos)
    GTEST_SKIP() << "of the simulator";
  const Setting version("DS_SIM_CUDNN", "9.19.0"), attention("DS_TEST_ATTENTION", "cudnn");
  ModelConfig gpt2 = tiny_gpt2();
  gpt2.hidden = 48, gpt2.head_dim = 16, gpt2.intermediate = 4 * 48;
  for (const ModelConfig& model : {gpt2, tiny_llama()}) {
    Config c = config_of(model, GetParam(), 2, 1, 1);
    c.data.split = 0;
    expect_predicted_scratch(c, 2, GetParam() != DType::F32);
  }
}

// 1-bit and 0/1 Adam: ranks of a device average by signs, in the memory that is predicted.
TEST_P(DeviceTraining, RanksAverageBySigns) {
  const auto train_by = [&](OptimizerType type, i64 stage) {
    Config c = config_of(tiny_gpt2(), GetParam(), 2, 1, stage);
    c.optimizer.type = type;
    c.optimizer.bias_correction = false;
    c.optimizer.lr = 1e-4, c.optimizer.beta2 = 0.9;
    c.optimizer.freeze_step = 3;
    c.optimizer.var_freeze_step = 4, c.optimizer.var_update_scaler = 1;
    c.optimizer.local_step_scaler = 2, c.optimizer.local_step_clipper = 2;
    c.steps = kAll ? 10 : 8;
    const Trace t = train(c, 2, {.same_logits = false}, c.steps);
    EXPECT_TRUE(std::isfinite(t.losses.back()));
    for (const Tag tag : {Tag::Params, Tag::Grads, Tag::GradAccum, Tag::Master, Tag::Optimizer})
      EXPECT_EQ(t.counted[static_cast<size_t>(tag)], t.predicted[static_cast<size_t>(tag)]) << tag_name(tag);
    EXPECT_GT(t.sent.at("dp.one_bit").bytes, 0);
    return t;
  };
  expect_same_training(train_by(OptimizerType::OneBitAdam, 1), train_by(OptimizerType::OneBitAdam, 0), "1-bit Adam");
  if (!kAll && GetParam() != DType::BF16) return;
  const Trace lamb = train_by(OptimizerType::OneBitLamb, 1);
  if (kAll) expect_same_training(lamb, train_by(OptimizerType::OneBitLamb, 0), "1-bit LAMB");
  train_by(OptimizerType::ZeroOneAdam, 0);
}

// ZeRO++ at stage 3: second shards move no bit; runs with codes train, in the memory that is predicted.
TEST_P(DeviceTraining, ZeroPlusPlus) {
  Config c = config_of(tiny_llama(), GetParam(), 4, 2, 3);
  const Trace want = train(c, 4);
  c.zero.hpz_partition_size = 2;
  const Trace near = train(c, 4);
  expect_same_training(near, want, "second shards");
  EXPECT_GT(near.sent.at("hpz.all_gather").bytes, 0);
  c.zero.quantized_weights = c.zero.quantized_gradients = c.zero.loco.enabled = true;
  const Trace coded = train(c, 4);
  EXPECT_GT(coded.sent.at("dp.all_to_all").bytes, 0);
  for (size_t i = 0; i < coded.losses.size(); ++i) EXPECT_NEAR(coded.losses[i], want.losses[i], 0.05 * want.losses[i]);
  for (const Trace* t : {&near, &coded}) {
    for (const Tag tag : {Tag::Params, Tag::Buckets, Tag::Gathered, Tag::GradAccum, Tag::Optimizer})
      EXPECT_EQ(t->counted[static_cast<size_t>(tag)], t->predicted[static_cast<size_t>(tag)]) << tag_name(tag);
  }
}

// Gradients in 8 bits train in the memory that is predicted; sparse ones of embeddings move no bit.
TEST_P(DeviceTraining, GradientsInCodesAndInBlocks) {
  for (const i64 stage : {0, 2}) {
    if (!kAll && stage == 2 && GetParam() != DType::BF16) continue;
    ModelConfig model = tiny_llama();
    model.vocab_size = 2000;
    Config c = config_of(model, GetParam(), 2, 2, stage);
    const Trace want = train(c, 2);
    c.sparse_gradients = true;
    const Trace sparse = train(c, 2);
    expect_same_training(sparse, want, "sparse gradients");
    EXPECT_LT(sparse.sent.at("dp.reduce_scatter").bytes, want.sent.at("dp.reduce_scatter").bytes);
    c.communication_data_type = WireType::Int8;
    const Trace coded = train(c, 2);
    EXPECT_GT(coded.sent.at("dp.all_to_all").bytes, 0);
    for (size_t i = 0; i < want.losses.size(); ++i)
      EXPECT_NEAR(coded.losses[i], want.losses[i], 0.01 * want.losses[i]) << i;
    for (const Trace* t : {&sparse, &coded}) {
      for (const Tag tag : {Tag::Params, Tag::Grads, Tag::GradAccum, Tag::Buckets, Tag::Workspace})
        EXPECT_EQ(t->counted[static_cast<size_t>(tag)], t->predicted[static_cast<size_t>(tag)]) << tag_name(tag);
    }
  }
}

// DiLoCo: workers of a device, whose outer gradients are fp32 and codes, in the memory that is predicted.
TEST_P(DeviceTraining, Workers) {
  for (const i64 bits : {32, 4}) {
    Config c = config_of(tiny_gpt2(), GetParam(), 2, 1, 2);
    if (GetParam() == DType::F16) c.fp16.enabled = false, c.bf16.enabled = true;  // which several workers need
    c.optimizer.diloco = {.enabled = true, .workers = 2, .sync_every = 3, .outer_gradient_bits = bits};
    c.batch.train *= 2;
    std::vector<std::vector<float>> masters(4);
    const auto keep = [&](engine::Engine& engine) {  // after a meeting
      std::vector<float>& all = masters[static_cast<size_t>(engine.mesh().rank())];
      for (const zero::Piece& piece : engine.held_pieces()) {
        const zero::StateLease lease = engine.lease(piece, zero::LeaseTo::Read);
        const TensorView values = lease.master(DType::F32, piece.count);
        all.resize(all.size() + static_cast<size_t>(piece.count));
        engine.device().download(all.data() + all.size() - piece.count, values.data, values.bytes());
      }
    };
    const Trace t = train(c, 4, {.same_logits = false, .at_end = keep}, 3);
    for (const size_t rank : {0, 1}) EXPECT_TRUE(same_bits(masters[rank + 2], masters[rank])) << bits << " bits";
    EXPECT_LT(t.losses.back(), t.losses.front());
    for (const Tag tag : {Tag::Params, Tag::GradAccum, Tag::Master, Tag::Optimizer, Tag::Workspace})
      EXPECT_EQ(t.counted[static_cast<size_t>(tag)], t.predicted[static_cast<size_t>(tag)]) << tag_name(tag);
  }
}

// Host memory for saving and loading.
i64 saves(const plan::RunPlan& plan) { return plan.memory.state_bytes + plan.memory.state_part_bytes; }

// Updates on the host have the bits of those on the device, wherever the states are, and take the memory and traffic
// that were predicted.
TEST_P(DeviceTraining, OffloadChangesNoBit) {
  const TempDirectory dir;
  // Without the memory that a checkpoint would take.
  const Hooks look = {.before_step = [](engine::Engine& engine, i64) { engine.offload().begin_step(); },
                      .after_step =
                          [](engine::Engine& engine, i64 step) {
                            EXPECT_EQ(engine.ledger().peak(Tag::Host) + saves(engine.plan()),
                                      engine.plan().memory.by_tag[static_cast<size_t>(Tag::Host)]);
                            // The first step of a run finds nothing to bring ahead.
                            if (engine.device().is_host() || step == 0) return;
                            const offload::HostCopies copies = engine.offload().copies_of_step();
                            EXPECT_EQ(copies.to_host, engine.plan().traffic.copies.to_host);
                            EXPECT_EQ(copies.to_device, engine.plan().traffic.copies.to_device);
                          }};
  test::EveryNth tried(2);
  const auto expect_same = [&](const Config& c, const Trace& want, OffloadDevice where, double ratio,
                               bool gradients = false, OffloadDevice params = OffloadDevice::None) {
    if (!tried()) return;
    Config o = c;
    o.zero.sub_group_size = 2 * kStateBlock;
    // Copies of what is page-locked run beside the rest; the simulator makes them as late as it may.
    const bool pin = ratio == 1;
    o.zero.offload_optimizer = {
        .device = where, .nvme_path = dir.path(), .ratio = ratio, .gradients = gradients, .pin_memory = pin};
    o.zero.offload_param = {.device = params, .nvme_path = dir.path(), .pin_memory = pin};
    const Trace got = train(o, 2, look);
    const std::string what = fmt::format("{} stage {} {} ratio {}{}{}", static_cast<int>(c.optimizer.type),
                                         c.zero.stage, static_cast<int>(where), ratio, gradients ? " gradients" : "",
                                         params == OffloadDevice::None  ? ""
                                         : params == OffloadDevice::Cpu ? " parameters"
                                                                        : " parameters in files");
    expect_same_training(got, want, what);
    for (const Tag tag : {Tag::Params, Tag::GradAccum, Tag::Master, Tag::Optimizer, Tag::Offload})
      EXPECT_EQ(got.counted[static_cast<size_t>(tag)], got.predicted[static_cast<size_t>(tag)])
          << what << " " << tag_name(tag);
    if (gradients) {
      EXPECT_EQ(got.counted[static_cast<size_t>(Tag::GradAccum)], 0) << what;
    }
  };
  for (const OptimizerType type :
       {OptimizerType::AdamW, OptimizerType::Sgd, OptimizerType::Lamb, OptimizerType::Muon, OptimizerType::AdamW8bit}) {
    if (!kAll && (type == OptimizerType::Sgd || type == OptimizerType::Lamb)) continue;
    if (!kAll && GetParam() != DType::BF16 && type != OptimizerType::AdamW) continue;
    const i64 stage = type == OptimizerType::AdamW || type == OptimizerType::Lamb ? 3 : 2;
    Config c = config_of(tiny_gpt2(), GetParam(), 2, 1, stage);
    c.optimizer.type = type;
    c.optimizer.momentum = 0.9;
    c.optimizer.muon_lr = c.optimizer.adam_lr = c.optimizer.lr;
    c.gradient_clipping = 0.5;
    const Trace want = train(c, 2);
    expect_same(c, want, OffloadDevice::Cpu, 0.4);
    expect_same(c, want, OffloadDevice::Nvme, 1);
    if (type != OptimizerType::Muon) expect_same(c, want, OffloadDevice::Cpu, 1, true);
    if (stage < 3) continue;
    expect_same(c, want, OffloadDevice::Cpu, 1, true, OffloadDevice::Cpu);
    if (type != OptimizerType::AdamW) continue;
    expect_same(c, want, OffloadDevice::Cpu, 1);
    expect_same(c, want, OffloadDevice::Nvme, 0.4, true);
    expect_same(c, want, OffloadDevice::None, 1, false, OffloadDevice::Cpu);
    expect_same(c, want, OffloadDevice::Nvme, 0.4, false, OffloadDevice::Cpu);
    expect_same(c, want, OffloadDevice::None, 1, false, OffloadDevice::Nvme);
    expect_same(c, want, OffloadDevice::Nvme, 0.4, true, OffloadDevice::Nvme);
    // Sums that are added to, of several buckets.
    c = config_of(tiny_gpt2(), GetParam(), 2, 3, 3);
    c.gradient_clipping = 0.5;
    c.zero.reduce_bucket_size = 2000;
    const Trace added = train(c, 2);
    expect_same(c, added, OffloadDevice::Cpu, 1, true);
    expect_same(c, added, OffloadDevice::Cpu, 1, true, OffloadDevice::Cpu);
    expect_same(c, added, OffloadDevice::Nvme, 0.4, true);
  }
}

// Waited for after each step, updates are those of the device; late, they are the same wherever the states are.
TEST_P(DeviceTraining, OffloadDelaysUpdates) {
  const TempDirectory dir;
  const Hooks finish = {.after_step = [](engine::Engine& engine, i64) { engine.finish_updates(); }};
  for (const i64 stage : {1, 3}) {
    Config c = config_of(tiny_gpt2(), GetParam(), 2, 1, stage);
    if (stage == 1) c.optimizer.type = OptimizerType::AdamW8bit;
    const Trace plain = train(c, 2);
    c.zero.sub_group_size = 2 * kStateBlock;
    c.zero.offload_optimizer = {.device = OffloadDevice::Cpu, .delayed_update = true, .delayed_update_start = 2};
    Config file = c, arrays = c;
    file.zero.offload_optimizer.device = OffloadDevice::Nvme;
    file.zero.offload_optimizer.nvme_path = dir.path();
    arrays.zero.offload_optimizer.gradients = true;
    if (stage == 3) arrays.zero.offload_param = {.device = OffloadDevice::Nvme, .nvme_path = dir.path()};
    const Trace late = train(c, 2);
    EXPECT_NE(late.losses.back(), plain.losses.back());
    for (const Config& o : {c, file, arrays}) {
      expect_same_training(train(o, 2, finish), plain, fmt::format("stage {}: finished", stage));
      const Trace got = train(o, 2);
      expect_same_training(got, late, fmt::format("stage {}: late", stage));
      for (const Tag tag : {Tag::Params, Tag::GradAccum, Tag::Master, Tag::Optimizer, Tag::Offload})
        EXPECT_EQ(got.counted[static_cast<size_t>(tag)], got.predicted[static_cast<size_t>(tag)]) << tag_name(tag);
    }
  }
}

// In one orientation of matrices and in the other.
TEST_P(DeviceTraining, TilesGiveTheSameBits) {
  const ModelConfig model = of_four_heads(GetParam() == DType::F32 ? tiny_gpt2() : tiny_llama());
  const auto in_tiles = [&](int ranks, i64 tile) {
    Config c = config_of(model, GetParam(), ranks, 2 / ranks, 3);
    c.zero.tile_size = tile;
    return train(c, ranks);
  };
  const Trace whole = in_tiles(1, 0), tiles = in_tiles(1, 1200);
  expect_same_training(in_tiles(2, 1200), tiles, "two ranks");
  for (const Tag tag : {Tag::Params, Tag::Gathered, Tag::Buckets, Tag::Workspace})
    EXPECT_EQ(tiles.counted[static_cast<size_t>(tag)], tiles.predicted[static_cast<size_t>(tag)]) << tag_name(tag);
  EXPECT_FALSE(same_bits(tiles.weights, whole.weights));
  if (GetParam() == DType::F32) expect_close(tiles, whole, "whole");
}

// A server updates as the device does, wherever gradients and parameters stay, and a run resumes from its states.
TEST_P(DeviceTraining, ServersChangeNoBit) {
  if (test_device() == nullptr) GTEST_SKIP() << "served_test has those of the CPU";
  const TempDirectory dir;
  const auto expect_same = [&](const Config& c, int ranks, const Trace& want, bool gradients = false,
                               OffloadDevice params = OffloadDevice::None) {
    const std::string what = fmt::format("{} stage {} ranks {}{}{}", static_cast<int>(c.optimizer.type), c.zero.stage,
                                         ranks, gradients ? " gradients" : "",
                                         params == OffloadDevice::None  ? ""
                                         : params == OffloadDevice::Cpu ? " parameters"
                                                                        : " parameters in files");
    Serving server;
    Config o = served(c, server);
    o.zero.offload_optimizer.gradients = gradients;
    o.zero.offload_param = {.device = params, .nvme_path = dir.path()};
    for (const bool second : {false, true}) {
      const i64 first = second ? kSteps / 2 : 0;
      Hooks hooks;
      if (second) {
        hooks.start = [](engine::Engine& engine) {
          ASSERT_EQ(engine.server()->found().has, offload::ServerLink::Has::Same);
          engine.resume_from(engine.server()->found().record);
        };
      }
      hooks.before_step = [](engine::Engine& engine, i64) { engine.offload().begin_step(); };
      hooks.after_step = [&](engine::Engine& engine, i64 step) {
        const plan::RunPlan& plan = engine.plan();
        EXPECT_EQ(engine.ledger().peak(Tag::Host) + saves(plan), plan.memory.by_tag[static_cast<size_t>(Tag::Host)])
            << what;
        if (want.skipped[step] || step == first) return;  // buffers hold other data than in the steps after
        const offload::FileCounts moved = engine.offload().of_step();
        EXPECT_EQ(moved.read_bytes, plan.traffic.state_files.read_bytes + plan.traffic.array_files.read_bytes) << what;
        EXPECT_EQ(moved.written_bytes, plan.traffic.state_files.written_bytes + plan.traffic.array_files.written_bytes)
            << what;
      };
      const Trace got = train(o, ranks, hooks, kSteps / 2);
      const auto half = [&](auto&& all) { return std::vector(all.begin() + first, all.begin() + first + kSteps / 2); };
      EXPECT_EQ(got.losses, half(want.losses)) << what;
      EXPECT_TRUE(same_bits(got.norms, half(want.norms))) << what;
      EXPECT_EQ(got.scales, half(want.scales)) << what;
      EXPECT_EQ(got.skipped, half(want.skipped)) << what;
      if (second) {
        EXPECT_EQ(got.eval_loss, want.eval_loss) << what;
        EXPECT_EQ(got.weights, want.weights) << what;
        EXPECT_EQ(got.states, want.states) << what;
      }
      for (const Tag tag : {Tag::Params, Tag::GradAccum, Tag::Master, Tag::Optimizer, Tag::Offload})
        EXPECT_EQ(got.counted[static_cast<size_t>(tag)], got.predicted[static_cast<size_t>(tag)])
            << what << " " << tag_name(tag);
      for (const Tag tag : {Tag::Master, Tag::Optimizer}) EXPECT_EQ(got.counted[static_cast<size_t>(tag)], 0) << what;
      if (gradients) {
        EXPECT_EQ(got.counted[static_cast<size_t>(Tag::GradAccum)], 0) << what;
      }
    }
  };
  for (const OptimizerType type :
       {OptimizerType::AdamW, OptimizerType::Sgd, OptimizerType::Lamb, OptimizerType::Muon, OptimizerType::AdamW8bit}) {
    if (GetParam() != DType::BF16 && type != OptimizerType::AdamW) continue;  // half a minute
    const bool all = type == OptimizerType::AdamW || type == OptimizerType::Lamb;
    Config c = config_of(tiny_gpt2(), GetParam(), 2, 1, all ? 3 : 2);
    c.optimizer.type = type;
    c.optimizer.momentum = 0.9;
    c.optimizer.muon_lr = c.optimizer.adam_lr = c.optimizer.lr;
    c.gradient_clipping = 0.5;
    if (type == OptimizerType::AdamW) {  // in fp16 the first steps are skipped
      c.fp16.initial_scale_power = 19;
      c.fp16.hysteresis = 1;
    }
    const Trace want = train(c, 2);
    EXPECT_EQ(want.skipped.front(), GetParam() == DType::F16 && type == OptimizerType::AdamW);
    EXPECT_FALSE(want.skipped.back());
    expect_same(c, 2, want);
    if (type != OptimizerType::Muon) expect_same(c, 2, want, true);
    if (all) expect_same(c, 2, want, true, OffloadDevice::Cpu);
    if (type != OptimizerType::AdamW) continue;
    expect_same(c, 2, want, false, OffloadDevice::Nvme);
    for (const auto& [ranks, stage] : {std::pair(1, 1), {4, 3}}) {
      Config o = config_of(tiny_gpt2(), GetParam(), ranks, 4 / ranks, stage);
      expect_same(o, ranks, train(o, ranks), ranks == 4);
    }
  }
}

// A count of page-locked memory, from the simulator; 0 on a GPU.
size_t simulated(const char* count) {
  void* const plugin = ::dlopen(std::getenv("DS_CUDA_PLUGIN"), RTLD_NOW | RTLD_NOLOAD);
  auto* const read = plugin == nullptr ? nullptr : reinterpret_cast<size_t (*)()>(::dlsym(plugin, count));
  if (plugin != nullptr) ::dlclose(plugin);
  return read == nullptr ? 0 : read();
}
bool is_simulated() {
  return test_device() != nullptr && std::getenv("DS_CUDA_PLUGIN") != nullptr &&
         test_device()->name() == std::string_view("simulated device");
}

// The same bits and the memory that is predicted, with copies straight from and to memory that is locked as long as it
// is there.
TEST_P(DeviceTraining, PinnedMemoryChangesNoBit) {
  if (!is_simulated()) GTEST_SKIP() << "the simulator counts what is locked";
  const TempDirectory dir;
  Serving server;
  Config plain = config_of(tiny_gpt2(), GetParam(), 2, 1, 3);
  plain.gradient_clipping = 0.5;
  plain.zero.sub_group_size = 2 * kStateBlock;
  Config memory = plain, file = plain, at_server = served(plain, server), late = plain;
  memory.zero.offload_optimizer = {.device = OffloadDevice::Cpu, .ratio = 0.4, .gradients = true};
  memory.zero.offload_param = {.device = OffloadDevice::Cpu};
  file.zero.offload_optimizer = {.device = OffloadDevice::Nvme, .nvme_path = dir.path()};
  file.zero.offload_param = {.device = OffloadDevice::Nvme, .nvme_path = dir.path()};
  at_server.zero.offload_optimizer.gradients = true;
  late.zero.offload_optimizer = {.device = OffloadDevice::Cpu, .delayed_update = true, .delayed_update_start = 2};
  const Trace want = train(plain, 2), want_late = train(late, 2);
  for (Config* c : {&memory, &file, &at_server, &late}) {
    c->zero.offload_optimizer.pin_memory = c->zero.offload_param.pin_memory = true;
    const std::string what = fmt::format("{}", c == &memory ? "memory"
                                               : c == &file ? "file"
                                               : c == &late ? "late"
                                                            : "server");
    const size_t before = simulated("ds_sim_copied_registered");
    const Hooks look = {.after_step = [&](engine::Engine& engine, i64) {
      EXPECT_GE(simulated("ds_sim_registered"), static_cast<size_t>(engine.ledger().peak(Tag::Host))) << what;
      EXPECT_EQ(engine.ledger().peak(Tag::Host) + saves(engine.plan()),
                engine.plan().memory.by_tag[static_cast<size_t>(Tag::Host)])
          << what;
    }};
    expect_same_training(train(*c, 2, look), c == &late ? want_late : want, what);
    EXPECT_GT(simulated("ds_sim_copied_registered"), before) << what;
    EXPECT_EQ(simulated("ds_sim_registered"), 0u) << what;
  }
}

TEST(DevicePinnedMemory, WhatTheSystemDoesNotLockIsSaid) {
  if (!is_simulated()) GTEST_SKIP() << "the simulator has a limit";
  const TempDirectory dir;
  ASSERT_EQ(::setenv("DS_SIM_LOCKED_BYTES", "20480", 1), 0);
  for (const bool params : {false, true}) {
    Config c = config_of(tiny_gpt2(), DType::BF16, 1, 1, 3);
    c.zero.offload_optimizer = {.device = OffloadDevice::Cpu, .pin_memory = !params};
    c.zero.offload_param = {.device = OffloadDevice::Cpu, .pin_memory = params};
    try {
      train(c, 1);
      ADD_FAILURE();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::Unavailable) << e.what();
      EXPECT_THAT(e.what(),
                  ::testing::HasSubstr(params ? "zero_optimization.offload_param.pin_memory: the system"
                                              : "zero_optimization.offload_optimizer.pin_memory: the system"));
    }
    EXPECT_EQ(simulated("ds_sim_registered"), 0u);
  }
  ::unsetenv("DS_SIM_LOCKED_BYTES");
}

// Copies of any part of a pinned range are direct. Copies across its end are made as without pinning.
TEST(DevicePinnedMemory, CopiesOfAnyPartArrive) {
  const auto device = make_test_device(1);
  constexpr i64 kBytes = i64{3} << 20, kPinned = kBytes / 2 / 4096 * 4096;
  MemoryLedger ledger;
  const Buffer there = device_buffer(*device, ledger, Tag::Workspace, kBytes);
  std::unique_ptr<char, decltype(&std::free)> memory(static_cast<char*>(std::aligned_alloc(4096, kBytes)), &std::free);
  char* const here = memory.get();
  for (int again = 0; again < 2; ++again) {
    ASSERT_EQ(device->pin(here, kPinned), "");
    if (!device->is_host()) {
      EXPECT_NE(device->pin(here + 4096, 4096), "") << "twice";
    }
    for (const auto& [begin, bytes] : {std::pair<i64, i64>{0, kBytes}, {0, kPinned}, {4097, 100}, {kPinned - 7, 14}}) {
      for (i64 i = 0; i < kBytes; ++i) here[i] = static_cast<char>(i * 7 + begin + again);
      device->zero(there.data(), kBytes);
      device->upload(there.as<char>().data() + begin, here + begin, bytes);
      std::memset(here + begin, 0, static_cast<size_t>(bytes));  // at once
      device->download(here + begin, there.as<char>().data() + begin, bytes);
      i64 wrong = 0;
      for (i64 i = 0; i < kBytes; ++i) wrong += here[i] != static_cast<char>(i * 7 + begin + again) ? 1 : 0;
      EXPECT_EQ(wrong, 0) << begin << " " << bytes;
    }
    device->unpin(here);
  }
}

TEST_P(DeviceTraining, GraphsChangeNoBit) {
  for (const i64 stage : {0, 3}) {
    Config config = config_of(tiny_llama(), GetParam(), 1, 2, stage);
    const Trace want = train(config, 1);
    config.cuda.graphs = test_device() != nullptr;
    expect_same_training(train(config, 1), want, fmt::format("stage {}", stage));
  }
}

// Afterwards the device runs what it is given, at once again.
TEST(DeviceGraphs, ARecordingThatThrowsIsOver) {
  const auto device = make_test_device(1);
  MemoryLedger ledger;
  Buffer buffer = device_buffer(*device, ledger, Tag::Workspace, 256);
  std::array<u8, 256> bytes{};
  bytes.fill(7);
  device->upload(buffer.data(), bytes.data(), 256);
  bool recorded = false;
  const auto body = [&] {
    recorded = true;
    device->zero(buffer.data(), 256);
    throw Error(Errc::Config, "in the middle");
  };
  for (int again = 0; again < 2; ++again) {
    if (device->is_host()) {
      EXPECT_EQ(device->record_graph(body), nullptr);
    } else {
      EXPECT_THROW(device->record_graph(body), Error);
    }
    EXPECT_EQ(recorded, !device->is_host());
    device->download(bytes.data(), buffer.data(), 256);
    EXPECT_EQ(bytes[255], 7) << "what was recorded has not run";
  }
  device->zero(buffer.data(), 256);
  device->download(bytes.data(), buffer.data(), 256);
  EXPECT_EQ(bytes[255], 0);
}

TEST_P(DeviceTraining, FollowsTheCpu) {
  for (const ModelConfig& model : {tiny_gpt2(), tiny_llama(), tiny_bert()}) {
    const Config config = config_of(model, GetParam(), 1, 2, 1);
    const Trace got = train(config, 1), want = train_threads(config, 1, kSteps);
    const double tolerance = GetParam() == DType::F32 ? 2e-6 : GetParam() == DType::F16 ? 1e-3 : 8e-3;
    for (size_t s = 0; s < want.losses.size(); ++s) {
      EXPECT_NEAR(got.losses[s] / want.losses[s], 1, tolerance) << "step " << s;
      EXPECT_NEAR(got.norms[s] / want.norms[s], 1, 10 * tolerance) << "step " << s;
    }
    EXPECT_EQ(got.predicted[static_cast<size_t>(Tag::Params)], want.predicted[static_cast<size_t>(Tag::Params)]);
    for (const Tag tag : {Tag::Params, Tag::GradAccum, Tag::Master, Tag::Optimizer, Tag::Activations, Tag::Data})
      EXPECT_EQ(got.counted[static_cast<size_t>(tag)], got.predicted[static_cast<size_t>(tag)]) << tag_name(tag);
  }
}

// Products add to the sums of micro-batches, of which the first and the later ones have graphs of their own.
TEST_P(DeviceTraining, SumsOfMicroBatchesFollowTheCpu) {
  for (const ModelConfig& model : {tiny_gpt2(), tiny_llama()}) {
    if (!kAll && model.family != Family::Gpt2) continue;
    for (const int ranks : {1, 2}) {
      const auto config = [&](i64 stage, bool graphs = false) {
        Config c = config_of(model, GetParam(), ranks, 6 / ranks, stage);
        c.reduce_order = ReduceOrder::Boundary;
        c.cuda.graphs = graphs && test_device() != nullptr;
        return c;
      };
      const std::string what = fmt::format("{} {} ranks", family_name(model.family), ranks);
      const Trace got = train(config(0), ranks), want = train_threads(config(0), ranks, kSteps);
      expect_same_training(train(config(1), ranks), got, what + " stage 1");
      expect_same_training(train(config(0, true), ranks), got, what + " graphs");
      const double tolerance = GetParam() == DType::F32 ? 2e-6 : GetParam() == DType::F16 ? 1e-3 : 8e-3;
      for (size_t s = 0; s < want.losses.size(); ++s) {
        EXPECT_NEAR(got.losses[s] / want.losses[s], 1, tolerance) << what << " step " << s;
        EXPECT_NEAR(got.norms[s] / want.norms[s], 1, 10 * tolerance) << what << " step " << s;
      }
      for (const Tag tag : {Tag::Grads, Tag::GradAccum, Tag::Workspace})
        EXPECT_EQ(got.counted[static_cast<size_t>(tag)], got.predicted[static_cast<size_t>(tag)]) << tag_name(tag);
    }
  }
}

// Sparse layouts, packed documents, dropped tokens and sequences that grow: ranks of stage 3 give the bits of one rank,
// and the losses are those of the CPU but for rounding.
TEST_P(DeviceTraining, WhatChoosesTokensFollowsTheCpu) {
  if (!kAll && GetParam() != DType::BF16) return;
  constexpr i64 kLength = 32;
  enum class Choice { Layout, Documents, DroppedTokens, Lengths };
  for (const Choice choice : {Choice::Layout, Choice::Documents, Choice::DroppedTokens, Choice::Lengths}) {
    ModelConfig model = of_four_heads(GetParam() == DType::F32 ? tiny_gpt2() : tiny_llama());
    model.max_positions = kLength;
    Hooks hooks;
    if (choice == Choice::Lengths) hooks.length = [](i64 step) { return step < 2 ? kLength / 2 : kLength; };
    const auto config = [&](int ranks, i64 stage) {
      Config c = config_of(model, GetParam(), ranks, 2 / ranks, stage);
      c.data.seq_length = kLength;
      if (choice == Choice::Layout) {
        c.sparse_attention.mode = SparseAttentionMode::Local;  // each of the two blocks sees itself
        c.sparse_attention.unidirectional = true;
        c.sparse_attention.num_sliding_window_blocks = 1;
      }
      if (choice == Choice::Documents) separate_documents(c, 7);
      if (choice == Choice::DroppedTokens) {
        c.random_ltd.data_efficiency = c.random_ltd.data_routing = c.random_ltd.enabled = true;
        c.random_ltd.layers = {1};
        c.random_ltd.min_value = 8, c.random_ltd.max_value = kLength;
        c.random_ltd.require_steps = 3, c.random_ltd.seq_per_step = 8;
      }
      return c;
    };
    const std::string what = fmt::format("choice {}", static_cast<int>(choice));
    const Trace got = train(config(1, 0), 1, hooks);
    expect_same_training(train(config(2, 3), 2, hooks), got, what);
    const Trace want = train_threads(config(1, 0), 1, kSteps, 1, hooks);
    const double tolerance = GetParam() == DType::F32 ? 4e-6 : GetParam() == DType::F16 ? 2e-3 : 1.6e-2;
    for (size_t s = 0; s < want.losses.size(); ++s)
      EXPECT_NEAR(got.losses[s] / want.losses[s], 1, tolerance) << what << " step " << s;
    for (const Tag tag : {Tag::Params, Tag::GradAccum, Tag::Master, Tag::Optimizer, Tag::Activations, Tag::Data})
      EXPECT_EQ(got.counted[static_cast<size_t>(tag)], got.predicted[static_cast<size_t>(tag)])
          << what << " " << tag_name(tag);
  }
}

// Kernels read the words of a layout, which lie among other things of Tag::Data, as whole ones.
TEST(DeviceLayouts, WordsOfALayoutThatAreNotAlignedAreAnError) {
  Config c = config_of(tiny_gpt2(), DType::BF16, 1, 1, 0);
  c.data.seq_length = c.model.max_positions = 32;
  c.sparse_attention.mode = SparseAttentionMode::Local;
  c.sparse_attention.unidirectional = true;
  model::Model model = model::make_model(c.model, c.data.seq_length);
  model.layout = model::attention_layout_of(c);
  const auto device = make_cpu_device(*cpu_ops(), 1);
  model::PassMemory memory(model, {.B = 1, .T = 32, .sequence_length = 32, .gradients = true});
  std::vector<u64> words(model.layout->keys().size() + 1);
  memory.layout_keys.data = memory.layout_queries.data = words.data();
  EXPECT_NO_THROW(model::upload_layout(memory, model, *device));
  memory.layout_queries.data = reinterpret_cast<char*>(words.data()) + 4;
  EXPECT_THROW(model::upload_layout(memory, model, *device), Error);
}

// Many runs: one model for each type, with heads for two ranks of tp and sp, and few tokens.
class DeviceParallel : public ::testing::TestWithParam<DType> {};

ModelConfig shared_model(DType work) {
  ModelConfig m = work == DType::BF16 ? tiny_llama() : tiny_gpt2();
  m.heads = 4;
  m.kv_heads = work == DType::BF16 ? 2 : 4;
  m.head_dim = 8;
  m.hidden = m.intermediate = 32;
  m.layers = 2;
  return m;
}

// The same samples per step, whatever the layout: 2 micro-batches of 2.
Config config_of(DType work, const Layout& l, bool offload = false) {
  const ModelConfig model = shared_model(work);
  Config c = config_of(model, l, 2), typed = config_of(model, work, 1, 1, 0);
  c.data.seq_length = 8;
  c.bf16 = typed.bf16;
  c.fp16 = typed.fp16;
  c.communication_data_type = wire_type_of(work);
  c.activation_checkpointing.cpu_checkpointing = offload;
  return c;
}

TEST_P(DeviceParallel, PipelinesGiveTheSameBits) {
  const Trace want = train(config_of(GetParam(), {}), 1);
  for (const Layout& l : {Layout{.pp = 2, .stage = 1},
                          {.pp = 2, .schedule = Kind::ZeroBubbleH1},
                          {.pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2}})
    expect_same_training(train(config_of(GetParam(), l), 2), want, l.name());
}

// Updates before their verdict, of which clipping undoes some: in device memory, and on the host.
TEST_P(DeviceParallel, PostValidatedStepsChangeNoBit) {
  for (const Layout& l : {Layout{.pp = 2, .schedule = Kind::ZeroBubbleH2, .stage = 1}, Layout{.dp = 2, .stage = 3}}) {
    for (const bool on_host : {false, true}) {
      Config c = config_of(GetParam(), l);
      c.gradient_clipping = 1.05;
      if (on_host) c.zero.offload_optimizer.device = OffloadDevice::Cpu;
      if (on_host && l.stage == 3) c.zero.offload_param.device = OffloadDevice::Cpu;
      Config waits = c;
      if (l.pp == 2) waits.pipeline.schedule = Kind::ZeroBubbleH1;
      c.pipeline.post_validate = true;
      const Trace want = train(waits, 2), got = train(c, 2);
      const std::string what = fmt::format("{}{}", l.name(), on_host ? " on the host" : "");
      expect_same_training(got, want, what);
      for (const Tag tag : {Tag::Params, Tag::Master, Tag::Optimizer, Tag::Offload})
        EXPECT_EQ(got.counted[static_cast<size_t>(tag)], got.predicted[static_cast<size_t>(tag)])
            << what << " " << tag_name(tag);
      const auto undone = [&](double norm) { return !(norm <= c.gradient_clipping); };
      EXPECT_TRUE(std::ranges::any_of(got.norms, undone)) << what;
    }
  }
}

TEST_P(DeviceParallel, RanksThatShareLayersTrainAsOneRank) {
  // In bf16 a sum over ranks is rounded elsewhere: on the simulator 1e-4 of a loss, 7e-5 of the first norm, 2e-3 of
  // later ones.
  const Tolerance tolerance =
      GetParam() == DType::F32 ? Tolerance{} : Tolerance{.loss = 1e-3, .first_norm = 1e-3, .norm = 1e-2};
  const Trace want = train(config_of(GetParam(), {}), 1);
  for (const Layout& l : {Layout{.tp = 2},
                          {.tp = 2, .sequence = true, .stage = 2},
                          {.sp = 2, .stage = 3},
                          {.sp = 2, .mode = SequenceParallelMode::Ring}}) {
    expect_close(train(config_of(GetParam(), l), 2), want, l.name(), tolerance);
  }
}

TEST_P(DeviceParallel, CheckpointingChangesNoBit) {
  const Trace want = train(config_of(GetParam(), {}), 1);
  const auto expect_same = [&](const Layout& l, bool offload) {
    expect_same_training(train(config_of(GetParam(), l, offload), l.ranks()), want, l.name());
  };
  expect_same({.checkpoints = Granularity::Layer}, false);
  expect_same({.checkpoints = Granularity::Layer, .interval = 2, .stage = 3}, true);
  expect_same({.checkpoints = Granularity::Selective}, false);
  expect_same({.pp = 2, .schedule = Kind::ZeroBubbleH1, .checkpoints = Granularity::Layer}, true);
  Layout l{.tp = 2};
  const Trace whole = train(config_of(GetParam(), l), 2);
  l.checkpoints = Granularity::Layer;
  l.partition = true;
  for (const bool offload : {false, true})
    expect_same_training(train(config_of(GetParam(), l, offload), 2), whole, l.name());
  l.partition = false;  // whole copies on the host
  expect_same_training(train(config_of(GetParam(), l, true), 2), whole, l.name());
}

TEST_P(DeviceParallel, InputsInAFileChangeNoBit) {
  const TempDirectory dir;
  // Beside what a checkpoint would take.
  const Hooks look = {.after_step = [](engine::Engine& engine, i64) {
    EXPECT_EQ(engine.ledger().peak(Tag::Host) + saves(engine.plan()),
              engine.plan().memory.by_tag[static_cast<size_t>(Tag::Host)]);
    EXPECT_GT(engine.offload().moved().read_bytes, 0);
  }};
  for (Layout l : {Layout{}, {.interval = 2, .stage = 3}, {.pp = 2, .schedule = Kind::ZeroBubbleH1}, {.tp = 2}}) {
    l.checkpoints = Granularity::Layer;
    l.partition = l.tp > 1;
    Config c = config_of(GetParam(), l);
    c.model.layers = 6;
    Config whole = c;
    whole.activation_checkpointing = {};
    c.activation_checkpointing.nvme_path = dir.path();
    c.activation_checkpointing.buffer_count = 1;
    const Trace got = train(c, l.ranks(), look);
    expect_same_training(got, train(whole, l.ranks()), l.name());
    for (const Tag tag : {Tag::Activations, Tag::Params, Tag::GradAccum, Tag::Offload})
      EXPECT_EQ(got.counted[static_cast<size_t>(tag)], got.predicted[static_cast<size_t>(tag)]) << tag_name(tag);
  }
}

TEST_P(DeviceParallel, GraphsOfStagesChangeNoBit) {
  for (const Layout& l : {Layout{.pp = 2},
                          {.pp = 2, .schedule = Kind::ZeroBubbleH1, .checkpoints = Granularity::Layer, .stage = 3},
                          {.pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2}}) {
    Config config = config_of(GetParam(), l);
    const Trace want = train(config, 2);
    config.cuda.graphs = test_device() != nullptr;
    expect_same_training(train(config, 2), want, l.name());
  }
  // A layer that is computed again from what came back from the host has another input than at first.
  Config config = config_of(GetParam(), {.checkpoints = Granularity::Layer, .interval = 2}, true);
  const Trace want = train(config, 1);
  config.cuda.graphs = test_device() != nullptr;
  expect_same_training(train(config, 1), want, "offload");
}

TEST(DeviceTrainingInFp16, OverflowSkipsTheStepOnTheDevice) {
  Config config = config_of(tiny_gpt2(), DType::F16, 1, 1, 1);
  config.fp16.initial_scale_power = 24;
  config.fp16.hysteresis = 1;
  const Trace got = train(config, 1), want = train_threads(config, 1, kSteps);
  EXPECT_TRUE(got.skipped[0]);
  EXPECT_EQ(got.skipped, want.skipped);
  EXPECT_EQ(got.scales, want.scales);
  EXPECT_EQ(got.lrs, want.lrs);
}

// The CUDA runtime keeps "not ready" as the thread's last error, where ops look for failures of their launches.
TEST(DeviceEvents, AskingForOneTooEarlyIsNoErrorOfTheNextOp) {
  const auto device = make_test_device(1);
  MemoryLedger ledger;
  constexpr i64 kElems = i64{4} << 20;
  const Buffer memory = device_buffer(*device, ledger, Tag::Workspace, kElems * 4);
  const Device::Event event = device->make_event();
  for (int i = 0; i < 50; ++i) device->zero(memory.data(), kElems * 4);
  device->record(event, Queue::Compute);
  EXPECT_EQ(device->reached(event), device->is_host());  // on a GPU: not yet
  const TensorView x = TensorView::of(memory.data(), DType::F32, {kElems});
  device->ops().add(x, x, x, device->stream());
  EXPECT_NO_THROW(device->synchronize());
  EXPECT_TRUE(device->reached(event));
  device->destroy(event);
}

TEST(DeviceEvents, TimedOnesMeasureWhatLiesBetweenThem) {
  const auto device = make_test_device(1);
  MemoryLedger ledger;
  constexpr i64 kBytes = i64{16} << 20;
  const Buffer memory = device_buffer(*device, ledger, Tag::Workspace, kBytes);
  std::array<Device::Event, 3> events{};
  for (Device::Event& e : events) e = device->make_timed_event();
  const auto start = std::chrono::steady_clock::now();
  device->record(events[0], Queue::Compute);
  device->zero(memory.data(), kBytes);
  device->record(events[1], Queue::Compute);
  for (int i = 0; i < 20; ++i) device->zero(memory.data(), kBytes);
  device->record(events[2], Queue::Compute);
  device->await(events[2]);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  const double one = device->seconds_between(events[0], events[1]), all = device->seconds_between(events[0], events[2]);
  EXPECT_GT(one, 0);
  EXPECT_GT(all, one);
  EXPECT_LT(all, elapsed.count() + 1e-3);
  for (const Device::Event e : events) device->destroy(e);
}

INSTANTIATE_TEST_SUITE_P(Types, DeviceTraining, ::testing::Values(DType::F32, DType::BF16, DType::F16),
                         [](const auto& test) { return std::string(dtype_name(test.param)); });
INSTANTIATE_TEST_SUITE_P(Types, DeviceParallel, ::testing::Values(DType::F32, DType::BF16),
                         [](const auto& test) { return std::string(dtype_name(test.param)); });

}  // namespace device_training_test
}  // namespace ds::testing
