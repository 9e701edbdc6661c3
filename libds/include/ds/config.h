// SPDX-License-Identifier: Apache-2.0
#pragma once
// The configuration of a run: DeepSpeed's ds_config.json and our own keys, as plain structs in which every default is
// resolved. ds-config(5) documents each key; names here follow the JSON names.

#include <limits>
#include <span>
#include <string>
#include <vector>

#include "ds/error.h"
#include "ds/model_config.h"

namespace ds {

// The bound of every integer that names no other: of steps, batches, checkpoints. What a run multiplies it by, at most
// the micro-batches of a step, leaves it far from the end of the type.
inline constexpr i64 kMostCount = 1'000'000'000'000;

// train == micro * accumulation * number of data-parallel ranks.
struct BatchConfig {
  i64 train = 0;         // train_batch_size: samples per optimizer step over all ranks
  i64 micro = 0;         // train_micro_batch_size_per_gpu
  i64 accumulation = 0;  // gradient_accumulation_steps
};

enum class OptimizerType : u8 {
  AdamW,
  Adam,
  Sgd,
  Lion,
  Lamb,
  Adagrad,
  Muon,
  AdamW8bit,
  OneBitAdam,
  ZeroOneAdam,
  OneBitLamb,
};  // Adam is AdamW too unless adam_w_mode is false
// The dtype of states, of optimizers that let it be chosen.
enum class StateDtype : u8 { F32, BF16 };
// The factor of an orthogonalised update: sqrt(max(1, rows/columns)), or 0.2 sqrt(max(rows, columns)), with which its
// root mean square is that of AdamW's updates (Moonlight).
enum class MuonScale : u8 { Original, MatchRmsAdamW };
// How parameters are updated. An optimizer uses some of the members, and has defaults of its own for them:
// config/optimizer_table.
struct UpdateConfig {
  OptimizerType type = OptimizerType::AdamW;
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;
  float eps = 1e-8f;
  double weight_decay = 0;
  bool bias_correction = true;
  bool adam_w_mode = true;
  StateDtype state_dtype = StateDtype::F32;
  double momentum = 0, dampening = 0;
  bool nesterov = false;
  double min_coeff = 0.01, max_coeff = 10;  // bounds of LAMB's ratio of norms
  double muon_lr = 0, adam_lr = 0;          // Muon: of its matrices, and of the parameters that AdamW updates
  MuonScale muon_scale = MuonScale::Original;
  i64 freeze_step = 100'000;  // 1-bit Adam, 1-bit LAMB: the last update with an exact mean of gradients
  // 1-bit LAMB: the decay of the mean of its ratios, which replaces the ratio after the freeze, and the bounds of the
  // factor of that mean: of the factor itself, and of its relative change in one update.
  double coeff_beta = 0.9, factor_min = 0.5, factor_max = 4, factor_threshold = 0.1;
  // 0/1 Adam: the last update that may change the second moment; after so many of its refreshes, and after so many
  // local steps, the interval between two doubles; and the longest interval between two means of parameters.
  i64 var_freeze_step = 100'000, var_update_scaler = 16, local_step_scaler = 32'678, local_step_clipper = 16;
  bool operator==(const UpdateConfig&) const = default;
};
// The parameters whose whole names match one of these shell patterns, and no pattern of an earlier group.
struct ParamGroupConfig : UpdateConfig {  // members that the group does not set are the optimizer's
  std::vector<std::string> params;
  bool frozen = false;  // never updated, and not a part of the gradient's norm
};
// DiLoCo (Douillard et al., 2023): an optimizer around the optimizer. Each worker trains for itself, and in every so
// many steps all take the mean of what these made of the parameters as a gradient of Nesterov's momentum, whose
// parameters all go on from. With Muon inside it is MuLoCo; of one worker it looks ahead.
struct DilocoConfig {
  bool enabled = false;
  i64 workers = 1;      // each of world size / workers ranks
  i64 sync_every = 30;  // steps
  double outer_lr = 0.7, outer_momentum = 0.9;
  bool nesterov = true;
  i64 fragments = 1;             // of layers in turn, which meet in steps of their own ("Streaming DiLoCo", 2025)
  i64 outer_gradient_bits = 32;  // of what workers send: fp32, or codes of 8 or 4 bits
  i64 overlap_steps = 0;         // for so many steps what a fragment sends travels beside training
  double local_share = 0.5;      // overlap_steps: of what a worker has then, beside what all have
  // Whether a fragment meets at the end of that step, from 1.
  bool meets(i64 fragment, i64 step) const noexcept {
    return enabled && step > 0 && step % sync_every == fragment * sync_every / fragments;
  }
  // Whether what has been sent at its last meeting takes effect at the end of that step.
  bool lands(i64 fragment, i64 step) const noexcept { return meets(fragment, step - overlap_steps); }
  // Whether that of any does.
  bool lands(i64 step) const noexcept {
    for (i64 f = 0; enabled && f < fragments; ++f) {
      if (lands(f, step)) return true;
    }
    return false;
  }
  // How many fragments have met behind that step, each time counted.
  i64 meetings_until(i64 step) const noexcept {
    i64 all = 0;
    for (i64 f = 0; enabled && f < fragments; ++f) {
      const i64 first = f * sync_every / fragments;
      all += first == 0 ? step / sync_every : step < first ? 0 : (step - first) / sync_every + 1;
    }
    return all;
  }
};

struct OptimizerConfig : UpdateConfig {
  std::vector<ParamGroupConfig> groups;
  DilocoConfig diloco = {};
};

// DeepSpeed's schedules under its names; and the field's: a linear warm-up from 0, and then what the name says.
enum class SchedulerType : u8 {
  Constant,
  WarmupLR,
  WarmupDecayLR,
  WarmupCosineLR,
  LRRangeTest,
  OneCycle,
  Linear,
  Cosine,
  CosineRestarts,
  Wsd,  // warm-up, stable, decay
  InverseSqrt,
};
enum class WarmupType : u8 { Log, Linear };
enum class DecayType : u8 { Linear, Cosine, OneMinusSqrt };
// Which members a schedule has: config/scheduler.
struct SchedulerConfig {
  SchedulerType type = SchedulerType::Constant;
  WarmupType warmup_type = WarmupType::Log;
  i64 warmup_num_steps = 1000;
  double warmup_min_lr = 0;
  double warmup_max_lr = 0;     // resolved to the optimizer's lr when not given
  i64 total_num_steps = 0;      // resolved to `steps` when not given
  double warmup_min_ratio = 0;  // ratios to the optimizer's lr
  double cos_min_ratio = 1e-4;
  // LRRangeTest: min_lr (1 + step_rate t / step_size).
  double lr_range_test_min_lr = 1e-3;
  i64 lr_range_test_step_size = 2000;
  double lr_range_test_step_rate = 1;
  bool lr_range_test_staircase = false;
  // OneCycle: up in the first steps, down in the second ones, then decay; momentum the other way round.
  double cycle_min_lr = 0, cycle_max_lr = 0;
  i64 cycle_first_step_size = 2000;
  i64 cycle_second_step_size = 0;    // resolved to the first when not given
  i64 cycle_first_stair_count = 0;   // 0: without stairs
  i64 cycle_second_stair_count = 0;  // resolved to the first when not given
  double decay_lr_rate = 0;
  i64 decay_step_size = 0;  // 0: no decay
  bool cycle_momentum = true;
  double cycle_min_mom = 0.8, cycle_max_mom = 0.9;
  double decay_mom_rate = 0;
  // The field's.
  double min_lr_ratio = 0;  // where it ends
  i64 num_cycles = 1;       // CosineRestarts
  i64 decay_num_steps = 0;  // Wsd: the last ones; resolved to a tenth of total_num_steps when not given
  DecayType decay_type = DecayType::Linear;
  i64 timescale = 0;  // InverseSqrt; resolved to warmup_num_steps when not given
};

struct Fp16Config {
  bool enabled = false;
  double loss_scale = 0;  // 0: dynamic
  i64 initial_scale_power = 16;
  i64 loss_scale_window = 1000;
  i64 hysteresis = 2;
  bool consecutive_hysteresis = false;
  double min_loss_scale = 1;
  bool fp16_master_weights_and_grads = false;  // masters and sums of gradients are fp16, too
};

struct Bf16Config {
  bool enabled = false;
  bool bf16_master_weights_and_grads = false;  // masters and sums of gradients are bf16, too
  bool bf16_optimizer_states = false;          // and states of optimizers
  bool stochastic_rounding = false;            // of updated parameters that have no master
};

// Sizes in elements.
// Where what a rank keeps stays between its uses: on the device; in host memory; in a file on a disk; with a server of
// states (ds-offload serve), which runs the updates, too.
enum class OffloadDevice : u8 { None, Cpu, Nvme, Server };
struct OffloadOptimizerConfig {  // masters and states of optimizers
  OffloadDevice device = OffloadDevice::None;
  std::string nvme_path{};     // a directory; with Nvme
  std::string name{};          // of the server; with Server
  i64 buffer_count = 4;        // Nvme: tiles that are in memory at a time
  bool pipeline_read = true;   // Nvme: tiles are read ahead
  bool pipeline_write = true;  // Nvme: tiles are written while others are updated
  double ratio = 1;            // Nvme: the share of the tiles that is in the file; the others stay in memory
  bool gradients = false;      // Nvme: fp32 sums of gradients are in a file, too
  // Cpu, Nvme: updates run beside the next step, from update number `start` on.
  bool delayed_update = false;
  i64 delayed_update_start = 40;
  bool pin_memory = false;  // beside a GPU: what stays with the host is page-locked
};
struct OffloadParamConfig {  // slices of parameters
  OffloadDevice device = OffloadDevice::None;
  std::string nvme_path{};  // a directory; with Nvme
  i64 buffer_count = 5;     // Nvme: slices in memory beside that which is gathered
  bool pin_memory = false;  // beside a GPU: what stays with the host is page-locked
};

struct ZeroConfig {
  i64 stage = 0;
  i64 reduce_bucket_size = 500'000'000;
  i64 allgather_bucket_size = 500'000'000;
  bool overlap_comm = false;  // default true at stage 3
  i64 prefetch_bucket_size = 50'000'000;
  i64 param_persistence_threshold = 100'000;
  i64 model_persistence_threshold = std::numeric_limits<i64>::max();
  i64 max_live_parameters = 1'000'000'000;
  i64 max_reuse_distance = 1'000'000'000;
  i64 hpz_partition_size = 1;      // stage 3: data-parallel ranks that share a second shard; 1: there is none
  bool quantized_weights = false;  // stage 3: parameters that are gathered travel in 8 bits
  bool quantized_nontrainable_weights = false;  // those of layers that are frozen, as far as they are gathered
  bool quantized_gradients = false;             // stage 3: as communication_data_type "int4"
  struct Loco {
    bool enabled = false;     // what codes of gradients lose is added to the next ones
    double err_beta = 0.8;    // share of old errors in new ones
    i64 reset_period = 1024;  // reductions
  };
  Loco loco = {};
  i64 tile_size = 0;                   // stage 3: matrices of larger layers are in tiles of so many; 0: whole
  i64 sub_group_size = 1'000'000'000;  // elements of a tile of offloaded states; no more than 2^20
  OffloadOptimizerConfig offload_optimizer = {};
  OffloadParamConfig offload_param = {};
  bool cpu_offload = false, cpu_offload_param = false;  // old forms of device Cpu, resolved to it
};

// How files are read and written that have what is offloaded.
enum class AioMethod : u8 { Auto, IoUring, Threads };  // Auto: io_uring where the kernel has it
struct AioConfig {
  AioMethod method = AioMethod::Auto;
  i64 block_size = 1 << 20;      // bytes of a request to the system; a multiple of 4096
  i64 queue_depth = 8;           // requests under way at a time
  i64 intra_op_parallelism = 1;  // threads that read and write, where io_uring does not
  bool checksum = false;         // what comes back is held to what went
};

// When gradients are summed over ranks: once per step, or with every micro-batch (ARCHITECTURE.md, "Order of sums").
enum class WireType : u8 { F32, BF16, F16, Int8, Int4 };  // Int8, Int4: codes, with a scale for each 256
constexpr WireType wire_type_of(DType t) noexcept {
  return t == DType::F16 ? WireType::F16 : t == DType::BF16 ? WireType::BF16 : WireType::F32;
}
enum class ReduceOrder : u8 { Boundary, Micro };
enum class LossNorm : u8 { Micro, Token };
enum class GradientReduce : u8 { Mean, Sum };    // over the data-parallel ranks
enum class DeviceKind : u8 { Auto, Cpu, Cuda };  // Auto: CUDA where a GPU is there
enum class CommBackend : u8 { Auto, Self, Shm, Mpi, Composed, Nccl };

struct CommunicationConfig {
  CommBackend backend = CommBackend::Auto;
  double timeout_s = 300;
};

// What only a GPU has. Without effect on numbers, but for autotune.
struct CudaConfig {
  bool graphs = false;    // the passes through layers as CUDA graphs, from the third step on
  bool autotune = false;  // matrix products by the fastest algorithm, timed at first use: bits may differ between runs
  std::string autotune_file;  // choices are kept here, and taken from here; empty: nowhere
};

// Text, Jsonl, Parquet and Arrow are for a tokenizer, the others hold tokens: nanoGPT's uint16 (Bin), llm.c's,
// Megatron-LM's, datasets of HDF5.
enum class DataFormat : u8 { Auto, Text, Bin, Llmc, Megatron, Hdf5, Jsonl, Parquet, Arrow };
// The type of token ids in files without a header, little-endian. Auto: uint16, and files that do not look like it are
// refused.
enum class TokenDtype : u8 { Auto, U8, U16, I32, U32, I64, U64 };
// How samples are cut: None, the stream of tokens every seq_length; BestFit, whole documents, as many as fit.
enum class DataPacking : u8 { None, BestFit };
// What a message of a conversation becomes, by who says it: text in which kChatContent stands for what is said. Empty:
// nobody of that role may speak.
inline constexpr std::string_view kChatContent = "{content}";
struct ChatTemplateConfig {
  std::string begin{};  // before the first message
  std::string system{}, user{}, assistant{}, tool{};
  bool operator==(const ChatTemplateConfig&) const = default;
};
// Masked language modelling: what trains a model that is not causal. Ids of -1 are the tokenizer's.
struct MlmConfig {
  double probability = 0.15;  // of a position to be predicted
  i64 mask_token = -1, cls_token = -1, sep_token = -1;
};

struct DataConfig {
  std::vector<std::string> train;       // relative to the working directory
  std::vector<std::string> validation;  // empty: the last `split` of the training data
  double split = 0.05;
  // How often each sample of a file of `train` comes in an epoch, one for each; empty: the files are one stream.
  std::vector<float> weights;
  std::string tokenizer = "bytes";  // or a path; resolved to model.path's when not given and it has one
  DataFormat format = DataFormat::Auto;
  TokenDtype token_dtype = TokenDtype::Auto;
  i64 seq_length = 0;  // resolved: min(1024, the model's positions) when not given
  i64 seed = 0;        // resolved to Config::seed when not given
  // The token that ends a document: tokens attend to those of their own, and positions begin anew. -1: a sample is one.
  i64 document_token = -1;
  DataPacking packing = DataPacking::None;
  ChatTemplateConfig chat_template;  // all empty: ChatML's form
  MlmConfig mlm;
};

// Sequences that grow: the first `difficulty` tokens of every sample, which the schedule makes longer.
enum class CurriculumSchedule : u8 { FixedLinear, FixedRoot, FixedDiscrete };
struct CurriculumConfig {
  bool enabled = false;
  i64 min_difficulty = 1, max_difficulty = 0;  // tokens
  CurriculumSchedule schedule = CurriculumSchedule::FixedLinear;
  i64 total_curriculum_step = 0;  // FixedLinear, FixedRoot: steps until the longest
  i64 difficulty_step = 8;        // FixedLinear, FixedRoot: lengths are multiples of it
  i64 root_degree = 1;            // FixedRoot
  std::vector<i64> difficulty{};  // FixedDiscrete: the lengths,
  std::vector<i64> max_step{};    // and the last step of each but the last
};
// Layers that see a random part of each sample's tokens, which grows (random-LTD): DeepSpeed's section
// data_efficiency.data_routing.random_ltd.
struct RandomLtdConfig {
  bool data_efficiency = false, data_routing = false, enabled = false;  // of the three sections
  i64 total_layer_num = 0;                                              // of the model; 0: not said
  i64 random_ltd_layer_num = 0;                                         // length of the list; 0: not said
  std::vector<i64> layers{};         // of the model's blocks, from 0; resolved: ascending
  i64 min_value = 0, max_value = 0;  // tokens
  i64 require_steps = 0;             // until max_value
  i64 seq_per_step = 0;              // numbers of tokens are multiples of it
  i64 kept = 0;                      // no key: tokens of each sample in a step; 0: all of them

  bool on() const noexcept { return data_efficiency && data_routing && enabled; }
};
struct EvalConfig {
  i64 every = 0;     // steps between validation losses; 0: only after the last step
  i64 batches = 16;  // micro-batches per rank and evaluation; 0: the whole validation set
};

// The layers are cut over `stages`, of which each runs micro-batches that the one before has run.
enum class PipelineSchedule : u8 { Naive, GPipe, OneFOneB, Interleaved, ZeroBubbleH1, BreadthFirst };
struct PipelineConfig {
  i64 stages = 1;
  PipelineSchedule schedule = PipelineSchedule::OneFOneB;
  std::string partition = "parameters";  // or "uniform", "memory", "type:REGEX": what the stages have equal shares of
  i64 virtual_stages = 1;                // chunks of layers on each stage; more than 1 with Interleaved, BreadthFirst
};

// Each matrix is cut over tp_size ranks.
struct TensorParallelConfig {
  i64 tp_size = 1;
  i64 autotp_size = 1;             // DeepSpeed's other name of tp_size, resolved to it
  bool sequence_parallel = false;  // and the rows between the matrices
};

// How the ranks of sequence_parallel_size, each with a part of every sequence, attend to all of it.
enum class SequenceParallelMode : u8 { Ulysses, Ring };

// Which blocks of keys a block of queries attends to: DeepSpeed's kinds, under its names, and a file of the user's own.
// None: there is no layout.
enum class SparseAttentionMode : u8 { None, Dense, Fixed, Variable, BigBird, BSLongformer, Local, Layout };
struct SparseAttentionConfig {  // counts and indices are of blocks
  SparseAttentionMode mode = SparseAttentionMode::None;
  i64 block = 16;                          // tokens: 16, 32, 64 or 128
  bool different_layout_per_head = false;  // else all heads have that of the first
  bool unidirectional = false;             // resolved: as the model, when `attention` is not given
  i64 num_local_blocks = 4;                // Fixed: of a window
  i64 num_global_blocks = 1;               // Fixed: of a window, a divisor of num_local_blocks; BigBird: the first ones
  bool horizontal_global_attention = false;     // Fixed, Variable, bidirectional: global blocks see all, too
  i64 num_different_global_patterns = 1;        // Fixed: heads take turns in where a window's global blocks are
  i64 num_random_blocks = 0;                    // Variable; BigBird, where 1 is the default: of each row
  std::vector<i64> local_window_blocks = {4};   // Variable: sizes of windows in turn, the last one repeats
  std::vector<i64> global_block_indices = {0};  // Variable, BSLongformer
  std::vector<i64> global_block_end_indices{};  // the same: empty, or where the block range of each index ends
  i64 num_sliding_window_blocks = 3;            // BigBird, BSLongformer, Local: odd
  std::string layout{};                         // Layout: a file, HDF5 or JSON, of [heads or 1, blocks, blocks]
  bool operator==(const SparseAttentionConfig&) const = default;
};

enum class CheckpointGranularity : u8 { None, Layer, Selective };
struct ActivationCheckpointingConfig {
  CheckpointGranularity granularity = CheckpointGranularity::None;  // Selective: the attention alone
  i64 interval = 1;                    // Layer: the input of every so many layers is kept, the rest computed again
  bool partition_activations = false;  // what is kept is cut over the tensor-parallel ranks
  bool cpu_checkpointing = false;      // what is kept is kept in host memory
  std::string nvme_path{};             // a directory: what is kept is kept in a file there
  i64 buffer_count = 4;                // of what is in the file, inputs that are in memory at a time
};

enum class SaveFailure : u8 { Stop, Continue };
struct SaveConfig {
  i64 every = 0;                             // steps between checkpoints; 0: only after the last step
  i64 keep = 0;                              // newest checkpoints to keep; 0: all
  bool async = false;                        // copy the state to host memory, and write it while training goes on
  SaveFailure on_error = SaveFailure::Stop;  // what the run does when a save fails before its end
};

// A directory where a monitor of DeepSpeed's writes: output_path/job_name.
struct MonitorConfig {
  bool enabled = false;
  std::string output_path{};  // empty: the directory of the monitor's name in the run directory
  std::string job_name = "DeepSpeedJobName";
};
struct PrometheusConfig {
  std::string file{};  // replaced at every printed step; empty: none
  std::string job_name = "DeepSpeedJobName";
};
struct CommsLoggerConfig {
  bool enabled = false;                 // resolved: true where the section is there and does not say
  bool verbose = false;                 // at every printed step, too
  bool prof_all = true;                 // all operations, else those of prof_ops
  std::vector<std::string> prof_ops{};  // "dp.all_gather", or "all_gather" of all axes
};
struct FlopsProfilerConfig {
  bool enabled = false;
  i64 profile_step = 1;
  bool detailed = true;       // with the operations one by one
  std::string output_file{};  // empty: the report is printed
};

// What the configuration is for, which decides what it cannot do without: Train needs model, data.train, steps and
// batch sizes, Evaluate no steps, Generate the model alone. Generate has no batch, so that batch sizes, which have to
// fit the number of ranks, are not looked at: it resolves one sample per rank. Inspect takes what is there.
enum class ConfigUse : u8 { Train, Evaluate, Generate, Inspect };
// Else a run has weights, and no gradients, masters or states of optimizers.
constexpr bool trains(ConfigUse use) noexcept { return use == ConfigUse::Train || use == ConfigUse::Inspect; }

struct Config {
  ConfigUse use = ConfigUse::Train;

  BatchConfig batch;
  OptimizerConfig optimizer;
  SchedulerConfig scheduler;
  Fp16Config fp16;
  Bf16Config bf16;
  ZeroConfig zero;
  AioConfig aio;
  PipelineConfig pipeline;
  TensorParallelConfig tensor_parallel;
  i64 sequence_parallel_size = 1;
  SequenceParallelMode sequence_parallel_mode = SequenceParallelMode::Ulysses;
  ActivationCheckpointingConfig activation_checkpointing;
  SparseAttentionConfig sparse_attention;
  double gradient_clipping = 1.0;                    // 0: off
  DType grad_accum_dtype = DType::F32;               // of sums of gradients (data_types): fp32, or the work type
  WireType communication_data_type = WireType::F32;  // of gradients on the wire; follows the work type when not given
  bool sparse_gradients = false;                     // of gradients of embeddings what is zero does not travel
  ReduceOrder reduce_order = ReduceOrder::Boundary;  // Micro at stages 2 and 3 and when deterministic
  LossNorm loss_norm = LossNorm::Micro;
  GradientReduce gradient_reduce = GradientReduce::Mean;  // Sum: with LossNorm::Micro
  // Of training; evaluations have the plain loss.
  double label_smoothing = 0;  // the share of a target that all ids have alike
  double z_loss = 0;           // times the square of the logarithm of a softmax's denominator
  bool deterministic = false;
  i64 steps = 0;    // optimizer steps of the run
  i64 seed = 1234;  // 0 .. 2^32 - 1
  i64 steps_per_print = 10;
  i64 threads = 0;  // per rank; 0: the cores of the machine divided by its ranks
  DeviceKind device = DeviceKind::Auto;
  CudaConfig cuda;
  CommunicationConfig communication;
  std::string model_path;  // model.path; empty: inline
  bool new_head = false;   // model.new_head: what initial weights lack of the last layer begins at random
  ModelConfig model;       // read from model.path or inline; layers == 0 when neither is given
  DataConfig data;
  CurriculumConfig curriculum;
  RandomLtdConfig random_ltd;
  EvalConfig eval;
  SaveConfig save;
  MonitorConfig tensorboard, csv_monitor;
  PrometheusConfig prometheus;
  CommsLoggerConfig comms_logger;
  FlopsProfilerConfig flops_profiler;
  bool wall_clock_breakdown = false;

  // Ranks of one copy of the model that see the same samples; workers are of whole ones.
  i64 ranks_per_replica() const noexcept { return pipeline.stages * tensor_parallel.tp_size * sequence_parallel_size; }
  // Whether parameters are their own masters: those of fp32, and those that have no more than their 16 bits.
  bool own_masters() const noexcept {
    return work_dtype() == DType::F32 || (fp16.enabled && fp16.fp16_master_weights_and_grads) ||
           (bf16.enabled && bf16.bf16_master_weights_and_grads);
  }
  // Of fresh gradients, in which they travel if not as codes of gradient_code_bits() bits; 0: they do.
  DType wire_dtype() const noexcept {
    switch (communication_data_type) {
      case WireType::F32: return DType::F32;
      case WireType::BF16: return DType::BF16;
      case WireType::F16: return DType::F16;
      case WireType::Int8:
      case WireType::Int4: return work_dtype();
    }
    return work_dtype();
  }
  int gradient_code_bits() const noexcept {
    if (zero.quantized_gradients || communication_data_type == WireType::Int4) return 4;
    return communication_data_type == WireType::Int8 ? 8 : 0;
  }
  DType work_dtype() const noexcept { return fp16.enabled ? DType::F16 : bf16.enabled ? DType::BF16 : DType::F32; }
};

enum class Severity : u8 { Warning, Error };
struct Diagnostic {
  Severity severity = Severity::Error;
  Errc code = Errc::Config;
  std::string source = {};   // the file, or the --set argument
  i64 line = 0, column = 0;  // from 1; 0: none
  std::string key = {};      // "zero_optimization.stage"; empty when the text is not JSON
  std::string message = {};
};
// "cfg.json:12:5: zero_optimization.stage: must be 0 to 3, not 4"
DS_API std::string to_string(const Diagnostic&);

struct ConfigResult {
  Config config;                        // whole only if ok(); else what could be read, the rest as by default
  std::vector<Diagnostic> diagnostics;  // in the order found; warnings too
  DS_API bool ok() const noexcept;
  // Errc::Config before Errc::Unavailable. Requires: !ok().
  DS_API Errc code() const noexcept;
  // All errors, one a line.
  DS_API std::string message() const;
};

// Reads a configuration and reports every mistake in it at once; opens model.path too, but no data file.
//   path        a file, or "-" for standard input
//   overrides   "a.b=v" in order, as of --set: v is JSON, or else a string; "a.b[0]=v" reaches into arrays
//   world_size  data-parallel ranks
DS_API ConfigResult load_config(const std::string& path, std::span<const std::string> overrides, int world_size,
                                ConfigUse use = ConfigUse::Train);
// The same for a text that is already in memory; `name` stands in the diagnostics.
DS_API ConfigResult parse_config(std::string_view text, const std::string& name, std::span<const std::string> overrides,
                                 int world_size, ConfigUse use = ConfigUse::Train);

// Every key that has an effect with its resolved value, as JSON that load_config reads back to the same Config.
DS_API std::string resolved_json(const Config&);

}  // namespace ds
