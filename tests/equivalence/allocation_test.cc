// SPDX-License-Identifier: Apache-2.0
// After the second step, a training step calls no allocator on any thread, over threads and over shared memory: malloc
// and its relatives are interposed and counted.

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <future>
#include <thread>

#include "equivalence/training.h"

namespace {

std::atomic<long> allocations{0};
std::atomic<bool> counting{false};

void note() noexcept {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

// glibc's own entry points stay reachable under these names.
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

void* malloc(size_t n) {
  note();
  return __libc_malloc(n);
}
void* calloc(size_t n, size_t size) {
  note();
  return __libc_calloc(n, size);
}
void* realloc(void* p, size_t n) {
  note();
  return __libc_realloc(p, n);
}
void* aligned_alloc(size_t alignment, size_t n) {
  note();
  return __libc_memalign(alignment, n);
}
int posix_memalign(void** p, size_t alignment, size_t n) {
  note();
  *p = __libc_memalign(alignment, n);
  return *p == nullptr ? ENOMEM : 0;
}
}

namespace ds::testing {
namespace allocation_test {

class Strategy : public ::testing::TestWithParam<std::tuple<i64, bool>> {};

// The shared memory of `ranks` ranks, all in this process.
std::vector<std::unique_ptr<Communicator>> make_shm_communicators(int ranks, const CommOptions& options) {
  static int number = 0;
  const std::string job = fmt::format("allocation-{}-{}", ::getpid(), number++);
  std::vector<std::future<std::unique_ptr<Communicator>>> waiting;
  for (int rank = 0; rank < ranks; ++rank) {
    waiting.push_back(
        std::async(std::launch::async, [&, rank] { return make_shm_communicator(job, rank, ranks, options); }));
  }
  std::vector<std::unique_ptr<Communicator>> comms;
  for (auto& comm : waiting) comms.push_back(comm.get());
  return comms;
}

// oneDNN, whose bf16 products the machine's best kernels are where it has AMX, allocates inside its calls.
const OpTable& own_kernels() {
  const OpTable* const best = cpu_ops();
  return best->name == "cpu.amx" ? *cpu_ops("avx512_bf16") : *best;
}

// Steps 3 to 5 of a run with ranks as threads, over threads and over shared memory. Rank 1 begins each of them late.
void expect_no_allocation(const Config& c, int ranks, const std::string& what,
                          std::chrono::milliseconds late = std::chrono::milliseconds(0)) {
  Hooks hooks;
  hooks.before_step = [&](engine::Engine& engine, i64 step) {
    // All ranks are past the second step, and none has begun the next one, while the count starts.
    engine.mesh().world().barrier("test");
    if (step == 3 && engine.mesh().rank() == 0) {
      allocations = 0;
      counting = true;
    }
    if (step == 6 && engine.mesh().rank() == 0) counting = false;
    engine.mesh().world().barrier("test");
    if (step >= 3 && step < 6 && engine.mesh().rank() == 1) std::this_thread::sleep_for(late);
  };
  for (const bool shm : {false, true}) {
    allocations = -1;
    const CommOptions options{.timeout_s = 60, .progress_thread = c.zero.overlap_comm};
    train_threads(c, ranks, 7, 2, hooks,
                  shm ? make_shm_communicators(ranks, options) : make_thread_communicators(ranks, options),
                  own_kernels());
    EXPECT_EQ(allocations.load(), 0) << what << ", " << ranks << (shm ? " ranks over shared memory" : " ranks");
  }
}

TEST_P(Strategy, AStepAllocatesNothingAfterTheSecond) {
  const auto& [stage, bf16] = GetParam();
  for (const int ranks : {1, 2}) {
    for (const ModelConfig& model : {tiny_gpt2(), tiny_llama(), tiny_bert()}) {
      Config c = tiny_config(model, ranks, 2, stage);
      c.bf16.enabled = bf16;
      c.communication_data_type = wire_type_of(c.work_dtype());
      c.zero.reduce_bucket_size = 9000;
      expect_no_allocation(c, ranks, std::string(family_name(model.family)));
    }
  }
}

// Ranks that wait look for dead peers meanwhile.
TEST(Waiting, ForALateRankAllocatesNothing) {
  expect_no_allocation(tiny_config(tiny_gpt2(), 2, 2, 1), 2, "a late rank", std::chrono::milliseconds(600));
}

// Optimizers that look at whole parameters, and groups of several kinds.
TEST_P(Strategy, NorDoesOneOfAnyOptimizer) {
  const auto& [stage, bf16] = GetParam();
  for (const auto& [type, tp] : {std::pair{OptimizerType::Lamb, 1},
                                 {OptimizerType::Muon, 1},
                                 {OptimizerType::Muon, 2},
                                 {OptimizerType::AdamW8bit, 1}}) {
    Config c = tiny_config(of_four_heads(tiny_llama()), 2, 2, stage);
    c.model.intermediate = 100;  // matrices large enough for 8-bit states
    c.data.seq_length = 12;
    c.bf16.enabled = bf16;
    c.communication_data_type = wire_type_of(c.work_dtype());
    c.tensor_parallel.tp_size = tp;
    c.optimizer.type = type;
    c.optimizer.momentum = 0.9;
    c.optimizer.muon_lr = c.optimizer.adam_lr = c.optimizer.lr;
    ParamGroupConfig slow;
    static_cast<UpdateConfig&>(slow) = c.optimizer;
    slow.type = OptimizerType::Sgd;
    slow.state_dtype = StateDtype::BF16;
    slow.params = {"*norm*"};
    c.optimizer.groups = {slow};
    expect_no_allocation(c, 2 * tp, fmt::format("optimizer {} tp{}", static_cast<int>(type), tp));
  }
}

// Compressed collectives, with errors that ranks keep.
TEST_P(Strategy, NorDoesOneThatIsCompressed) {
  const auto& [stage, bf16] = GetParam();
  for (const OptimizerType type :
       {OptimizerType::AdamW, OptimizerType::OneBitAdam, OptimizerType::ZeroOneAdam, OptimizerType::OneBitLamb}) {
    if (stage > (type == OptimizerType::AdamW ? 3 : type == OptimizerType::ZeroOneAdam ? 0 : 1)) continue;
    Config c = tiny_config(tiny_gpt2(), 2, 2, stage);
    c.bf16.enabled = bf16;
    c.communication_data_type = wire_type_of(c.work_dtype());
    c.optimizer.type = type;
    c.optimizer.bias_correction = false;
    c.optimizer.lr = 1e-4, c.optimizer.beta2 = 0.9;
    c.optimizer.freeze_step = c.optimizer.var_freeze_step = c.optimizer.local_step_scaler = 1;
    c.optimizer.local_step_clipper = 1;  // all have the same parameters after each step
    if (type == OptimizerType::AdamW) {
      if (stage < 3) continue;
      c.zero.quantized_weights = c.zero.quantized_gradients = c.zero.loco.enabled = true;
    } else {
      c.gradient_clipping = 0;
    }
    expect_no_allocation(c, 2, fmt::format("compressed optimizer {}", static_cast<int>(type)));
  }
}

TEST_P(Strategy, NorDoesOneOfAPipelineOrOfCutMatricesAndSequences) {
  const auto& [stage, bf16] = GetParam();
  const auto config = [&, stage = stage, bf16 = bf16](int ranks, i64 pp, i64 tp, i64 sp) {
    Config c = tiny_config(tiny_llama(), narrow<int>(ranks / (pp * tp * sp)), 4, stage);
    c.bf16.enabled = bf16;
    c.communication_data_type = wire_type_of(c.work_dtype());
    c.data.seq_length = 12;
    c.pipeline.stages = pp;
    c.tensor_parallel.tp_size = tp;
    c.sequence_parallel.size = sp;
    return c;
  };
  Config c = config(4, 2, 2, 1);
  expect_no_allocation(c, 4, "pp2 tp2");
  c.tensor_parallel.sequence_parallel = true;
  c.pipeline.schedule = PipelineSchedule::ZeroBubbleH1;
  expect_no_allocation(c, 4, "pp2 tp2 zb-h1, cut rows");
  c = config(4, 1, 4, 1);  // key/value heads on several ranks
  c.activation_checkpointing.granularity = CheckpointGranularity::Layer;
  c.activation_checkpointing.partition_activations = true;
  expect_no_allocation(c, 4, "tp4, checkpoints");
  c = config(2, 2, 1, 1);
  c.model.tie_embeddings = true;
  c.pipeline.schedule = PipelineSchedule::Interleaved;
  c.pipeline.virtual_stages = 2;
  expect_no_allocation(c, 2, "pp2 interleaved");
  c.pipeline.schedule = PipelineSchedule::ZeroBubbleV;
  expect_no_allocation(c, 2, "pp2 zb-v");
  c.pipeline.virtual_stages = 1;
  c.pipeline.schedule = PipelineSchedule::ZeroBubbleH2;
  c.pipeline.post_validate = true;
  expect_no_allocation(c, 2, "pp2 zb-h2, post-validated");
  c.pipeline.post_validate = false;
  c.pipeline.virtual_stages = 2;
  c.pipeline.stages = 1;
  c.pipeline.schedule = PipelineSchedule::BreadthFirst;
  expect_no_allocation(c, 1, "breadth-first");
  c = config(2, 1, 1, 2);
  expect_no_allocation(c, 2, "sp2");
  c.sequence_parallel.mode = SequenceParallelMode::Ring;
  expect_no_allocation(c, 2, "sp2 ring");
}

TEST(Interposition, CountsWhatItShould) {
  allocations = 0;
  counting = true;
  std::vector<int>* v = new std::vector<int>(1000);
  counting = false;
  EXPECT_GE(allocations.load(), 2);
  delete v;
}

INSTANTIATE_TEST_SUITE_P(Allocation, Strategy, ::testing::Combine(::testing::Values(0, 1, 2, 3), ::testing::Bool()));

}  // namespace allocation_test
}  // namespace ds::testing
