// SPDX-License-Identifier: Apache-2.0
#pragma once
// The configuration of a run: the keys of DeepSpeed's ds_config.json and those of libds, as plain structs in which
// every default is resolved. ds-config(5) documents each key; members have the names of their keys.

#include <limits>
#include <span>
#include <string>
#include <vector>

#include "ds/error.h"
#include "ds/model_config.h"

namespace ds {

// Upper bound of every integer key without a tighter one (steps, checkpoints). Runs multiply such values by the
// micro-batches of a step at most, which stays far from overflow.
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
// Whether ranks average by signs what they have not summed.
constexpr bool averages_by_signs(OptimizerType type) noexcept {
  return type == OptimizerType::OneBitAdam || type == OptimizerType::ZeroOneAdam || type == OptimizerType::OneBitLamb;
}
// What the states of optimizers are kept in that have a choice.
enum class StateDtype : u8 { F32, BF16 };
// What an orthogonalised update is multiplied by: sqrt(max(1, rows/columns)), or 0.2 sqrt(max(rows, columns)), which
// gives it the root mean square of AdamW's (Moonlight).
enum class MuonScale : u8 { Original, MatchRmsAdamW };
// How parameters are updated. Which members an optimizer has, and what they are where nothing is said:
// config/optimizer.
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
  double min_coeff = 0.01, max_coeff = 10;  // of LAMB's ratio of norms
  double muon_lr = 0, adam_lr = 0;          // of Muon's matrices and of what AdamW updates beside them
  MuonScale muon_scale = MuonScale::Original;
  i64 freeze_step = 100'000;  // of 1-bit Adam and 1-bit LAMB: the last update with an exact mean of gradients
  // Of 1-bit LAMB: of the mean of ratios that it goes on with behind its freeze, and the bounds of what multiplies
  // that: absolute, and of its change from step to step.
  double coeff_beta = 0.9, factor_min = 0.5, factor_max = 4, factor_threshold = 0.1;
  // Of 0/1 Adam: the last update with a second moment that changes; refreshes of it, and then steps, at whose number
  // the interval between two doubles; and the longest between means of parameters.
  i64 var_freeze_step = 100'000, var_update_scaler = 16, local_step_scaler = 32'678, local_step_clipper = 16;
  bool operator==(const UpdateConfig&) const = default;
};
// The parameters that these patterns (of shells, over whole names) match and no group before them does.
struct ParamGroupConfig : UpdateConfig {  // what the group does not say is as the optimizer's
  std::vector<std::string> params;
  bool frozen = false;  // never updated, and not a part of the gradient's norm
};
// DiLoCo (Douillard et al., 2023): workers train independently for some steps and then meet. The mean difference that
// their steps have made to the parameters is the gradient of an outer optimizer with Nesterov momentum, and all workers
// continue from its result. With Muon as the inner optimizer this is MuLoCo; with one worker it is Lookahead.
struct DilocoConfig {
  bool enabled = false;
  i64 workers = 1;      // each consists of world size / workers ranks
  i64 sync_every = 30;  // steps between two meetings of a fragment
  double outer_lr = 0.7, outer_momentum = 0.9;
  bool nesterov = true;
  i64 fragments = 1;             // groups of layers that meet in different steps (Streaming DiLoCo, 2025)
  i64 outer_gradient_bits = 32;  // of an element that workers send: 32 is fp32; 8 and 4 are codes
  i64 overlap_steps = 0;         // steps during which a fragment is in transit while workers train on
  double local_share = 0.5;      // with overlap_steps: share of the worker's own parameters in the merged ones
};

struct OptimizerConfig : UpdateConfig {
  std::vector<ParamGroupConfig> groups;
  DilocoConfig diloco = {};
};

// Schedules of the learning rate. The first five are DeepSpeed's, under its names. The others warm up linearly from 0
// and then decay as their names say.
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
// config/scheduler lists the members that each schedule uses.
struct SchedulerConfig {
  SchedulerType type = SchedulerType::Constant;
  WarmupType warmup_type = WarmupType::Log;
  i64 warmup_num_steps = 1000;
  double warmup_min_lr = 0;
  double warmup_max_lr = 0;     // default: the optimizer's lr
  i64 total_num_steps = 0;      // default: Config::steps
  double warmup_min_ratio = 0;  // this ratio and the next are relative to the optimizer's lr
  double cos_min_ratio = 1e-4;
  // LRRangeTest: min_lr (1 + step_rate t / step_size).
  double lr_range_test_min_lr = 1e-3;
  i64 lr_range_test_step_size = 2000;
  double lr_range_test_step_rate = 1;
  bool lr_range_test_staircase = false;
  // OneCycle: the rate rises, falls, then decays; momentum moves in the opposite direction.
  double cycle_min_lr = 0, cycle_max_lr = 0;
  i64 cycle_first_step_size = 2000;
  i64 cycle_second_step_size = 0;    // default: cycle_first_step_size
  i64 cycle_first_stair_count = 0;   // 0: no stairs
  i64 cycle_second_stair_count = 0;  // default: cycle_first_stair_count
  double decay_lr_rate = 0;
  i64 decay_step_size = 0;  // 0: no decay
  bool cycle_momentum = true;
  double cycle_min_mom = 0.8, cycle_max_mom = 0.9;
  double decay_mom_rate = 0;
  // Linear, Cosine, CosineRestarts, Wsd, InverseSqrt.
  double min_lr_ratio = 0;  // final rate relative to the optimizer's lr
  i64 num_cycles = 1;       // CosineRestarts
  i64 decay_num_steps = 0;  // Wsd: length of the final decay; default: a tenth of total_num_steps
  DecayType decay_type = DecayType::Linear;
  i64 timescale = 0;  // InverseSqrt; default: warmup_num_steps
};

struct Fp16Config {
  bool enabled = false;
  double loss_scale = 0;  // 0: dynamic
  i64 initial_scale_power = 16;
  i64 loss_scale_window = 1000;
  i64 hysteresis = 2;
  bool consecutive_hysteresis = false;
  double min_loss_scale = 1;
  bool fp16_master_weights_and_grads = false;  // master weights and gradient sums are fp16 too
};

struct Bf16Config {
  bool enabled = false;
  bool bf16_master_weights_and_grads = false;  // master weights and gradient sums are bf16 too
  bool bf16_optimizer_states = false;          // optimizer states are bf16 too
  bool stochastic_rounding = false;            // when parameters without fp32 masters are updated
};

// Where a rank keeps data between uses: in device memory, in host memory, in a file on a disk, or with a server of
// states (ds-offload serve), which also runs the updates.
enum class OffloadDevice : u8 { None, Cpu, Nvme, Server };
struct OffloadOptimizerConfig {  // master weights and optimizer states
  OffloadDevice device = OffloadDevice::None;
  std::string nvme_path{};     // Nvme: a directory
  std::string name{};          // Server: its name
  i64 buffer_count = 4;        // Nvme: tiles in memory at a time
  bool pipeline_read = true;   // Nvme: read tiles ahead of their update
  bool pipeline_write = true;  // Nvme: write tiles while others are updated
  double ratio = 1;            // Nvme: share of the tiles that is kept in the file; the others stay in memory
  bool gradients = false;      // Nvme: keep fp32 gradient sums in a file too
  // Cpu, Nvme: updates run during the next step, from update number `delayed_update_start` on.
  bool delayed_update = false;
  i64 delayed_update_start = 40;
  bool pin_memory = false;  // with a GPU: page-lock what stays in host memory
};
struct OffloadParamConfig {  // this rank's slices of the parameters
  OffloadDevice device = OffloadDevice::None;
  std::string nvme_path{};  // Nvme: a directory
  i64 buffer_count = 5;     // Nvme: slices in memory in addition to the one that is being gathered
  bool pin_memory = false;  // with a GPU: page-lock what stays in host memory
};

// Sizes are in elements.
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
  i64 hpz_partition_size = 1;      // stage 3: data-parallel ranks that share a secondary shard; 1: no such shard
  bool quantized_weights = false;  // stage 3: gather parameters in 8 bits
  bool quantized_nontrainable_weights = false;  // stage 3: gather the parameters of frozen layers in 8 bits
  bool quantized_gradients = false;             // stage 3: the same as communication_data_type "int4"
  struct Loco {
    bool enabled = false;     // add quantisation errors of gradients to the next gradients
    double err_beta = 0.8;    // weight of the old error in the new one
    i64 reset_period = 1024;  // reductions until errors are set to zero
  };
  Loco loco = {};
  i64 tile_size = 0;                   // stage 3: matrices of larger layers are split into tiles of this size; 0: never
  i64 sub_group_size = 1'000'000'000;  // of a tile of offloaded states, which has at most 2^20 elements
  OffloadOptimizerConfig offload_optimizer = {};
  OffloadParamConfig offload_param = {};
  bool cpu_offload = false, cpu_offload_param = false;  // deprecated forms of device Cpu, resolved to it
};

// How files of offloaded data are read and written.
enum class AioMethod : u8 { Auto, IoUring, Threads };  // Auto: io_uring if the kernel has it
struct AioConfig {
  AioMethod method = AioMethod::Auto;
  i64 block_size = 1 << 20;      // bytes of a system request; a multiple of 4096
  i64 queue_depth = 8;           // requests in flight at a time
  i64 intra_op_parallelism = 1;  // threads that read and write without io_uring
  bool checksum = false;         // verify what is read against what was written
};

// The type in which gradients travel. Int8 and Int4 are codes with one scale for every 256 elements.
enum class WireType : u8 { F32, BF16, F16, Int8, Int4 };
constexpr WireType wire_type_of(DType t) noexcept {
  return t == DType::F16 ? WireType::F16 : t == DType::BF16 ? WireType::BF16 : WireType::F32;
}
// When gradients are summed over ranks: once per step, or with every micro-batch (ARCHITECTURE.md, "Order of sums").
enum class ReduceOrder : u8 { Boundary, Micro };
enum class GradientReduce : u8 { Mean, Sum };    // over the data-parallel ranks
enum class DeviceKind : u8 { Auto, Cpu, Cuda };  // Auto: CUDA if there is a GPU
enum class CommBackend : u8 { Auto, Self, Shm, Mpi, Composed, Nccl };

struct CommunicationConfig {
  CommBackend backend = CommBackend::Auto;
  double timeout_s = 300;
};

// GPUs only. Results do not depend on these keys, except for autotune.
struct CudaConfig {
  bool graphs = false;        // record the passes through layers as CUDA graphs, which run from the third step on
  bool autotune = false;      // time matrix product algorithms at first use and take the fastest: bits may differ
  std::string autotune_file;  // where choices are stored and looked up; empty: nowhere
};

// The mean that a step's loss is. Micro: of the means of its micro-batches; Token: over all of its targets.
enum class LossNorm : u8 { Micro, Token };
// The training loss. Evaluations report the plain cross-entropy.
struct LossConfig {
  LossNorm norm = LossNorm::Micro;
  double label_smoothing = 0;  // share of a target's probability that is spread evenly over the vocabulary
  double z_loss = 0;           // factor of the squared logarithm of the softmax denominator
};

// Formats of data files. Text, Jsonl, Parquet and Arrow hold text for the tokenizer; the others hold tokens: Bin as
// nanoGPT writes them, Llmc as llm.c, Megatron as Megatron-LM, Hdf5 as datasets of integers.
enum class DataFormat : u8 { Auto, Text, Bin, Llmc, Megatron, Hdf5, Jsonl, Parquet, Arrow };
// The type of token ids in files without a header, which are little-endian. Auto: uint16; files that do not look like
// uint16 are refused.
enum class TokenDtype : u8 { Auto, U8, U16, I32, U32, I64, U64 };
// How samples are formed. None: the token stream is cut every seq_length tokens. BestFit: a sample holds as many whole
// documents as fit.
enum class DataPacking : u8 { None, BestFit };
// How a message of a conversation becomes text, by its role: kChatContent stands for the content. A message of a role
// whose template is empty is an error.
inline constexpr std::string_view kChatContent = "{content}";
struct ChatTemplateConfig {
  std::string begin{};  // before the first message
  std::string system{}, user{}, assistant{}, tool{};
  bool operator==(const ChatTemplateConfig&) const = default;
};
// Masked language modelling, the objective of models that are not causal. An id of -1 is taken from the tokenizer.
struct MlmConfig {
  double probability = 0.15;  // that a position is predicted
  i64 mask_token = -1, cls_token = -1, sep_token = -1;
};

struct DataConfig {
  std::vector<std::string> train;       // relative to the working directory
  std::vector<std::string> validation;  // empty: the last part of the training data, a share of `split`
  double split = 0.05;
  // For each file of `train`, how often each of its samples occurs in an epoch; empty: the files form one stream.
  std::vector<float> weights;
  std::string tokenizer = "bytes";  // or a path; default: the tokenizer in the directory of model.path, if there is one
  DataFormat format = DataFormat::Auto;
  TokenDtype token_dtype = TokenDtype::Auto;
  i64 seq_length = 0;  // default: min(1024, the model's positions)
  i64 seed = 0;        // default: Config::seed
  // The token that ends a document. Tokens attend only to tokens of their document, whose positions begin at 0. -1: a
  // sample is one document.
  i64 document_token = -1;
  DataPacking packing = DataPacking::None;
  ChatTemplateConfig chat_template;  // all empty: ChatML
  MlmConfig mlm;
};

// Sequence length warm-up: steps train on the first `difficulty` tokens of every sample, a number that grows.
enum class CurriculumSchedule : u8 { FixedLinear, FixedRoot, FixedDiscrete };
struct CurriculumConfig {
  bool enabled = false;
  i64 min_difficulty = 1, max_difficulty = 0;  // tokens
  CurriculumSchedule schedule = CurriculumSchedule::FixedLinear;
  i64 total_curriculum_step = 0;  // FixedLinear, FixedRoot: steps until max_difficulty
  i64 difficulty_step = 8;        // FixedLinear, FixedRoot: lengths are multiples of it
  i64 root_degree = 1;            // FixedRoot
  std::vector<i64> difficulty{};  // FixedDiscrete: the lengths
  std::vector<i64> max_step{};    // FixedDiscrete: the last step of each length but the last
};
// Random layerwise token dropping (random-LTD), DeepSpeed's section data_efficiency.data_routing.random_ltd: some
// layers process a random subset of each sample's tokens, whose size grows.
struct RandomLtdConfig {
  bool data_efficiency = false, data_routing = false, enabled = false;  // the `enabled` of each of the three sections
  i64 total_layer_num = 0;                                              // of the model; 0: not given
  i64 random_ltd_layer_num = 0;                                         // length of `layers`; 0: not given
  std::vector<i64> layers{};         // indices of blocks, from 0; resolved in ascending order
  i64 min_value = 0, max_value = 0;  // tokens
  i64 require_steps = 0;             // steps until max_value; 0: no schedule, layers process all tokens
  i64 seq_per_step = 0;              // numbers of tokens are multiples of it

  bool on() const noexcept { return data_efficiency && data_routing && enabled; }
};
struct EvalConfig {
  i64 every = 0;     // steps between validation losses; 0: only after the last step
  i64 batches = 16;  // micro-batches per rank and evaluation; 0: the whole validation set
};

// The layers are partitioned into `stages`; each micro-batch passes through the stages in order.
enum class PipelineSchedule : u8 { Naive, GPipe, OneFOneB, Interleaved, ZeroBubbleH1, BreadthFirst };
struct PipelineConfig {
  i64 stages = 1;
  PipelineSchedule schedule = PipelineSchedule::OneFOneB;
  std::string partition = "parameters";  // balanced over stages; or "uniform", "memory", "type:REGEX"
  i64 virtual_stages = 1;                // chunks of layers per stage; Interleaved and BreadthFirst: at least 2
};

// Every matrix is split over tp_size ranks.
struct TensorParallelConfig {
  i64 tp_size = 1;
  i64 autotp_size = 1;             // DeepSpeed's other name of tp_size, resolved to it
  bool sequence_parallel = false;  // split the activations between matrices by rows
};

// Every sequence is split over `size` ranks. Ulysses exchanges heads for attention; Ring passes keys and values around.
enum class SequenceParallelMode : u8 { Ulysses, Ring };
struct SequenceParallelConfig {
  i64 size = 1;  // sequence_parallel_size
  SequenceParallelMode mode = SequenceParallelMode::Ulysses;
};

// Block-sparse attention: which blocks of keys a block of queries attends to. Layout reads a file of the user; the
// other kinds are DeepSpeed's. None: attention is not sparse.
enum class SparseAttentionMode : u8 { None, Dense, Fixed, Variable, BigBird, BSLongformer, Local, Layout };
struct SparseAttentionConfig {  // counts and indices are of blocks
  SparseAttentionMode mode = SparseAttentionMode::None;
  i64 block = 16;                          // tokens: 16, 32, 64 or 128
  bool different_layout_per_head = false;  // false: all heads use the layout of the first
  bool unidirectional = false;             // default (key `attention`): whether the model is causal
  i64 num_local_blocks = 4;                // Fixed: per window
  i64 num_global_blocks = 1;  // Fixed: per window, a divisor of num_local_blocks; BigBird: the first blocks
  bool horizontal_global_attention = false;     // Fixed, Variable, if bidirectional: global blocks attend to all blocks
  i64 num_different_global_patterns = 1;        // Fixed: places of a window's global blocks, which heads alternate
  i64 num_random_blocks = 0;                    // Variable, BigBird (default there: 1): per row
  std::vector<i64> local_window_blocks = {4};   // Variable: sizes of successive windows; the last size repeats
  std::vector<i64> global_block_indices = {0};  // Variable, BSLongformer
  std::vector<i64> global_block_end_indices{};  // Variable, BSLongformer: empty, or the end of each index's block range
  i64 num_sliding_window_blocks = 3;            // BigBird, BSLongformer, Local: odd
  std::string layout{};                         // Layout: an HDF5 or JSON file of [heads or 1, blocks, blocks]
  bool operator==(const SparseAttentionConfig&) const = default;
};

enum class CheckpointGranularity : u8 { None, Layer, Selective };
struct ActivationCheckpointingConfig {
  CheckpointGranularity granularity = CheckpointGranularity::None;  // Selective: recompute attention only
  // With Layer, the input of every `interval` layers is stored and the rest is recomputed.
  i64 interval = 1;
  bool partition_activations = false;  // split stored inputs over the tensor-parallel ranks
  bool cpu_checkpointing = false;      // store inputs in host memory
  std::string nvme_path{};             // a directory: store inputs in a file there
  i64 buffer_count = 4;                // with nvme_path: inputs in memory at a time
};

enum class SaveFailure : u8 { Stop, Continue };
struct SaveConfig {
  i64 every = 0;                             // steps between checkpoints; 0: only after the last step
  i64 keep = 0;                              // newest checkpoints to keep; 0: all
  bool async = false;                        // copy the state to host memory and write it during training
  SaveFailure on_error = SaveFailure::Stop;  // after a failed save, except the one at the end of the run
};

// A monitor of DeepSpeed's that writes to the directory output_path/job_name.
struct MonitorConfig {
  bool enabled = false;
  std::string output_path{};  // empty: a directory with the monitor's name in the run directory
  std::string job_name = "DeepSpeedJobName";
};
struct PrometheusConfig {
  std::string file{};  // replaced at every printed step; empty: none
  std::string job_name = "DeepSpeedJobName";
};
struct CommsLoggerConfig {
  bool enabled = false;                 // default: whether the section is given
  bool verbose = false;                 // report at every printed step too
  bool prof_all = true;                 // all operations; false: those of prof_ops
  std::vector<std::string> prof_ops{};  // "dp.all_gather", or "all_gather" on all axes
};
struct FlopsProfilerConfig {
  bool enabled = false;
  i64 profile_step = 1;
  bool detailed = true;       // list single operations
  std::string output_file{};  // empty: the report is printed
};
// What a run reports about itself, besides metrics.jsonl.
struct MonitorsConfig {
  i64 steps_per_print = 10;
  bool wall_clock_breakdown = false;
  MonitorConfig tensorboard, csv_monitor;
  PrometheusConfig prometheus;
  CommsLoggerConfig comms_logger;
  FlopsProfilerConfig flops_profiler;
};

// The model that a run starts from.
struct PublishedModelConfig {
  std::string path;       // model.path; empty: the configuration describes the model inline
  bool new_head = false;  // model.new_head: parameters of the last layer that the weights lack are initialised randomly
};

// The purpose of a configuration, which determines the keys that it must give. Train: model, data.train, steps and
// batch sizes. Evaluate: the same without steps. Generate: model; batch sizes, which would have to fit the number of
// ranks, are ignored and resolved to one sample per rank. Inspect: none.
enum class ConfigUse : u8 { Train, Evaluate, Generate, Inspect };
// Whether the run has gradients, master weights and optimizer states, and not weights only.
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
  SequenceParallelConfig sequence_parallel;
  ActivationCheckpointingConfig activation_checkpointing;
  SparseAttentionConfig sparse_attention;
  double gradient_clipping = 1.0;                         // 0: off
  DType grad_accum_dtype = DType::F32;                    // of gradient sums (data_types): fp32, or the work type
  WireType communication_data_type = WireType::F32;       // default: the work type
  bool sparse_gradients = false;                          // send only the nonzero blocks of embedding gradients
  ReduceOrder reduce_order = ReduceOrder::Boundary;       // Micro at stages 2 and 3 and when deterministic
  GradientReduce gradient_reduce = GradientReduce::Mean;  // gradient_allreduce_op; Sum requires LossNorm::Micro
  LossConfig loss;
  bool deterministic = false;
  i64 steps = 0;    // optimizer steps of the run
  i64 seed = 1234;  // 0 .. 2^32 - 1
  i64 threads = 0;  // per rank; 0: the cores of the machine divided by its ranks
  DeviceKind device = DeviceKind::Auto;
  CudaConfig cuda;
  CommunicationConfig communication;
  PublishedModelConfig published;
  ModelConfig model;  // read from published.path or inline; layers == 0 if neither is given
  DataConfig data;
  CurriculumConfig curriculum;
  RandomLtdConfig random_ltd;
  EvalConfig eval;
  SaveConfig save;
  MonitorsConfig monitors;

  // Ranks that hold one copy of the model and process the same samples.
  i64 ranks_per_replica() const noexcept { return pipeline.stages * tensor_parallel.tp_size * sequence_parallel.size; }
  // Whether parameters are their own master weights: fp32 parameters, and 16-bit ones without an fp32 copy.
  bool own_masters() const noexcept {
    return work_dtype() == DType::F32 || (fp16.enabled && fp16.fp16_master_weights_and_grads) ||
           (bf16.enabled && bf16.bf16_master_weights_and_grads);
  }
  // The type to which fresh gradients are rounded, in which they travel unless gradient_code_bits() is positive.
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
  // Bits of the codes in which gradients travel; 0: they travel as wire_dtype().
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
  Config config;                        // complete only if ok(); else keys with errors have their defaults
  std::vector<Diagnostic> diagnostics;  // errors and warnings, in the order found
  DS_API bool ok() const noexcept;
  // Errc::Config before Errc::Unavailable. Requires: !ok().
  DS_API Errc code() const noexcept;
  // All errors, one per line.
  DS_API std::string message() const;
};

// Reads a configuration and reports all of its mistakes together. Opens model.path, but no data file.
//   path        a file, or "-" for standard input
//   overrides   "a.b=v", applied in order as --set does: v is JSON, or else a string; "a.b[0]=v" sets an array element
//   world_size  number of ranks
DS_API ConfigResult load_config(const std::string& path, std::span<const std::string> overrides, int world_size,
                                ConfigUse use = ConfigUse::Train);
// The same for a text in memory, which diagnostics call `name`.
DS_API ConfigResult parse_config(std::string_view text, const std::string& name, std::span<const std::string> overrides,
                                 int world_size, ConfigUse use = ConfigUse::Train);

// Every key that has an effect, with its resolved value, as JSON that load_config reads back to the same Config.
DS_API std::string resolved_json(const Config&);

}  // namespace ds
