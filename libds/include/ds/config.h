// SPDX-License-Identifier: Apache-2.0
#pragma once
// The configuration of a run: DeepSpeed's ds_config.json plus our own keys, as plain structs in which every default is
// resolved. Names follow the JSON names; ds-config-keys(5) documents each key.

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ds/error.h"
#include "ds/model_config.h"

namespace ds {

// The bound of integers that state no other: steps, batches, checkpoints. A run multiplies them at most by the
// micro-batches of a step, so they do not overflow.
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
};  // Adam is AdamW, too, unless adam_w_mode is false
// Storage of optimizer states, for the optimizers that support a choice.
enum class StateDtype : u8 { F32, BF16 };
// Scale of an orthogonalised update: sqrt(max(1, rows/columns)) for Original, or 0.2 sqrt(max(rows, columns)), which
// matches the root mean square of AdamW's updates (Moonlight).
enum class MuonScale : u8 { Original, MatchRmsAdamW };
// How parameters are updated. Each optimizer uses some of these members, with defaults of its own:
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
  double muon_lr = 0, adam_lr = 0;  // rates for Muon's matrices, and for the parameters that AdamW updates beside them
  MuonScale muon_scale = MuonScale::Original;
  i64 freeze_step = 100'000;  // 1-bit Adam, 1-bit LAMB: the last update with an exact mean of gradients
  // 1-bit LAMB: decay of the mean of ratios that is used after the freeze; bounds of the factor applied to it, and the
  // bound of that factor's relative change per step.
  double coeff_beta = 0.9, factor_min = 0.5, factor_max = 4, factor_threshold = 0.1;
  // 0/1 Adam: the last update that changes the second moment; the number of its refreshes, and then of steps, after
  // which the interval between two doubles; and the longest interval between averages of parameters.
  i64 var_freeze_step = 100'000, var_update_scaler = 16, local_step_scaler = 32'678, local_step_clipper = 16;
  bool operator==(const UpdateConfig&) const = default;
};
// Applies to the parameters whose whole names match one of these shell patterns and that no earlier group matches.
struct ParamGroupConfig : UpdateConfig {  // members that the group does not set are the optimizer's
  std::vector<std::string> params;
  bool frozen = false;  // never updated, and not part of the gradient norm
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
  // How far a step moves the balancing bias of each expert (ExpertsConfig::balancing_bias); 0: biases stay.
  float router_bias_update_rate = 0.001f;
};

// DeepSpeed's schedules under its names, and common ones: a linear warm-up from 0, followed by the named shape.
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
  // OneCycle: the rate rises in the first steps, falls in the second ones, then decays; momentum does the opposite.
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
  double min_lr_ratio = 0;  // ratio of the final rate to lr
  i64 num_cycles = 1;       // CosineRestarts
  // Wsd: the number of final steps that decay; resolved to a tenth of total_num_steps when not given.
  i64 decay_num_steps = 0;
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
  bool bf16_master_weights_and_grads = false;  // masters and sums of gradients are bf16, too
  bool bf16_optimizer_states = false;          // optimizer states are bf16, too
  bool stochastic_rounding = false;            // for updated parameters that have no master
};

// Products of linear maps in FP8; parameters, their gradients and everything else as with bf16 alone.
enum class Fp8Gradients : u8 { E4M3, E5M2 };
struct Fp8Config {
  bool enabled = false;
  Fp8Gradients gradients = Fp8Gradients::E4M3;  // the format of the gradients of outputs
  bool gathers = false;                         // ZeRO stage 3 gathers matrices of these products as their codes
};

// The place of data between its uses: the device (None), host memory, a file on a disk, or a server of states
// (ds-offload serve), which also runs the updates.
enum class OffloadDevice : u8 { None, Cpu, Nvme, Server };
struct OffloadOptimizerConfig {  // master weights and optimizer states
  OffloadDevice device = OffloadDevice::None;
  std::string nvme_path{};     // Nvme: a directory
  std::string name{};          // Server: its name
  i64 buffer_count = 4;        // Nvme: number of tiles in memory at a time
  bool pipeline_read = true;   // Nvme: read tiles ahead
  bool pipeline_write = true;  // Nvme: write tiles while others are updated
  double ratio = 1;            // Nvme: share of the tiles that is in the file; the others stay in memory
  bool gradients = false;      // Nvme: fp32 sums of gradients are in a file, too
  // Cpu, Nvme: from update number delayed_update_start on, updates run during the next step.
  bool delayed_update = false;
  i64 delayed_update_start = 40;
  bool pin_memory = false;  // on GPUs: page-lock the host memory
};
struct OffloadParamConfig {  // this rank's slices of the parameters
  OffloadDevice device = OffloadDevice::None;
  std::string nvme_path{};  // Nvme: a directory
  i64 buffer_count = 5;     // Nvme: slices in memory, beside the gathered one; 0: streamed (Generate)
  bool pin_memory = false;  // on GPUs: page-lock the host memory
};

// Sizes are numbers of elements.
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
  // Stage 3: data-parallel ranks that share a second shard of the parameters; 1: no second shard.
  i64 hpz_partition_size = 1;
  bool quantized_weights = false;               // stage 3: parameters are gathered in 8 bits
  bool quantized_nontrainable_weights = false;  // the same for frozen layers only
  bool quantized_gradients = false;             // stage 3: same as communication_data_type "int4"
  struct Loco {
    bool enabled = false;     // adds the quantisation error of gradients to the next ones
    double err_beta = 0.8;    // weight of old errors in new ones
    i64 reset_period = 1024;  // reductions between resets of the errors
  };
  Loco loco = {};
  i64 tile_size = 0;  // stage 3: matrices of larger layers are cut into tiles of this many elements; 0: they are not
  i64 sub_group_size = 1'000'000'000;  // elements of a tile of offloaded states; at most 2^20 are used
  OffloadOptimizerConfig offload_optimizer = {};
  OffloadParamConfig offload_param = {};
  bool cpu_offload = false, cpu_offload_param = false;  // old forms of device Cpu, to which they are resolved
};

// How offload files are read and written.
enum class AioMethod : u8 { Auto, IoUring, Threads };  // Auto: io_uring where the kernel has it
struct AioConfig {
  AioMethod method = AioMethod::Auto;
  i64 block_size = 1 << 20;      // bytes of one request to the system; a multiple of 4096
  i64 queue_depth = 8;           // requests in flight
  i64 intra_op_parallelism = 1;  // threads that read and write, without io_uring
  bool checksum = false;         // checks that data read equals the data written
};

enum class WireType : u8 { F32, BF16, F16, Int8, Int4 };  // Int8, Int4: codes, with a scale for each 256
constexpr WireType wire_type_of(DType t) noexcept {
  return t == DType::F16 ? WireType::F16 : t == DType::BF16 ? WireType::BF16 : WireType::F32;
}
// When gradients are summed over ranks: once per step (Boundary), or with every micro-batch (ARCHITECTURE.md, "Order of
// sums").
enum class ReduceOrder : u8 { Boundary, Micro };
enum class GradientReduce : u8 { Mean, Sum };    // over the data-parallel ranks
enum class DeviceKind : u8 { Auto, Cpu, Cuda };  // Auto: CUDA if there is a GPU
enum class CommBackend : u8 { Auto, Self, Shm, Mpi, Composed, Nccl };

struct CommunicationConfig {
  CommBackend backend = CommBackend::Auto;
  double timeout_s = 300;
};

// Attention on GPUs. Auto: by cuDNN where every rank can use the same version of it, else by the kernels of libds.
// Cudnn: by cuDNN or not at all. Calls that cuDNN does not support are left to the kernels of libds.
enum class CudaAttention : u8 { Auto, Cudnn, Own };
// GPUs only. Results do not depend on graphs.
struct CudaConfig {
  bool graphs = false;        // record the passes through layers as CUDA graphs, which run from the third step on
  bool autotune = false;      // time matrix product algorithms at first use and take the fastest: bits may differ
  std::string autotune_file;  // choices of earlier runs; with autotune those of this run are added. Empty: none
  CudaAttention attention = CudaAttention::Auto;  // bits differ
  // A token's activations and losses have the bits that generation and scoring give it: products and attention are
  // those of libds, in an order of sums that does not depend on the other rows. CPUs always do so.
  bool invariant_forward = false;
};

// The mean that a step's loss is. Micro: of the means of its micro-batches; Token: over all of its targets.
enum class LossNorm : u8 { Micro, Token };
// The training loss. Evaluations report the plain cross-entropy.
struct LossConfig {
  LossNorm norm = LossNorm::Micro;
  double label_smoothing = 0;  // share of a target's probability that is spread evenly over the vocabulary
  double z_loss = 0;           // factor of the squared logarithm of the softmax denominator
  DType logits = DType::F32;   // in which logits are stored (data_types), in evaluations too: fp32, or the work type
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
// Where data.document_token stands in a document.
enum class DocumentTokenAt : u8 { End, Begin };
// Positions in a document that is kept apart: from 0, as with the position_ids of transformers, or those in the sample,
// as Megatron-LM's without --reset-position-ids.
enum class DocumentPositions : u8 { Restart, Continue };
// How a message of a conversation becomes text, by its role: kChatContent stands for the content. A message of a role
// whose template is empty is an error.
inline constexpr std::string_view kChatContent = "{content}";
struct ChatTemplateConfig {
  std::string begin{};  // before the first message
  std::string system{}, user{}, assistant{}, tool{};
  bool operator==(const ChatTemplateConfig&) const = default;
};
// Masked language modelling, which trains models that are not causal. Ids of -1 are taken from the tokenizer.
struct MlmConfig {
  double probability = 0.15;  // that a position is to be predicted
  i64 mask_token = -1, cls_token = -1, sep_token = -1;
};

class SampleSource;  // ds/sample_source.h

struct DataConfig {
  std::vector<std::string> train;       // relative to the working directory
  std::vector<std::string> validation;  // empty: the last part of the training data, a share of `split`
  double split = 0.05;
  // How often each sample of a file in `train` occurs per epoch, one number per file; empty: the files are one stream.
  std::vector<float> weights;
  std::string tokenizer = "bytes";  // or a path; if not given, the one in model.path, if any
  DataFormat format = DataFormat::Auto;
  TokenDtype token_dtype = TokenDtype::Auto;
  i64 seq_length = 0;  // resolved: min(1024, the model's positions) when not given
  i64 seed = 0;        // resolved to Config::seed when not given
  // Documents end where their files say so, and where this token marks it; -1: none does.
  i64 document_token = -1;
  DocumentTokenAt document_token_at = DocumentTokenAt::End;
  bool add_document_token = false;  // to documents that lack it
  // Tokens attend only to their own document. Resolved: if document_token or packing is given.
  bool separate_documents = false;
  DocumentPositions document_positions = DocumentPositions::Restart;
  // Whether a document_token that ends a document predicts the first token of the next one.
  bool loss_across_documents = true;
  DataPacking packing = DataPacking::None;
  ChatTemplateConfig chat_template;  // all empty: ChatML's format
  MlmConfig mlm;
  // Samples that the program brings instead of files; validation: null if it brings none. Both null: files.
  std::shared_ptr<const SampleSource> samples = {}, validation_samples = {};
};

// Curriculum of sequence lengths: a step trains on the first `difficulty` tokens of every sample, and the schedule
// increases difficulty.
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

// How the pipeline stages process micro-batches; see pipeline/schedule.h.
enum class PipelineSchedule : u8 {
  Naive,
  GPipe,
  OneFOneB,
  Interleaved,
  ZeroBubbleH1,
  BreadthFirst,
  ZeroBubbleV,
  ZeroBubbleH2,
};
struct PipelineConfig {
  i64 stages = 1;
  PipelineSchedule schedule = PipelineSchedule::OneFOneB;
  // Balances "parameters", "uniform" (layers), "memory", "compute", or layers whose type matches "type:REGEX".
  std::string partition = "parameters";
  i64 virtual_stages = 1;  // chunks of layers per stage: 2 with ZeroBubbleV, more than 1 if Interleaved or BreadthFirst
  // ZeroBubbleV: the most activations that a stage keeps, as a share of those of 1F1B's first stage.
  double memory_limit = 1;
  // A step updates before its verdict (norm, overflow) is known, and is undone if the verdict differs from the assumed
  // one, finite and unclipped. The verdict is made within the next step.
  bool post_validate = false;
};

// Tensor parallelism: each matrix is cut over tp_size ranks.
struct TensorParallelConfig {
  i64 tp_size = 1;
  i64 autotp_size = 1;             // DeepSpeed's other name for tp_size, to which it is resolved
  bool sequence_parallel = false;  // also cuts the rows between the matrices
};

// How attention works when sequence_parallel_size ranks each hold a part of every sequence.
enum class SequenceParallelMode : u8 { Ulysses, Ring };
struct SequenceParallelConfig {
  i64 size = 1;  // sequence_parallel_size
  SequenceParallelMode mode = SequenceParallelMode::Ulysses;
};

// How ranks of dp share the experts of a model that has any.
struct ExpertParallelConfig {
  bool enabled = false;
  i64 size = 1;  // autoep_size: the ranks that have all experts together; 1 unless enabled
  // use_data_before_expert_parallelism: ranks with the same experts are neighbours, rather than those with different
  // ones.
  bool data_first = false;
  // Rows for which a rank has memory in one round, of those that it would get if all experts got the same number.
  double room = 2;
  // If more rows come: the layer goes in further rounds; else the run ends.
  bool further_rounds = true;
};

// Which blocks of keys a block of queries attends to: DeepSpeed's kinds under its names, or the user's own file
// (Layout). None: no layout.
enum class SparseAttentionMode : u8 { None, Dense, Fixed, Variable, BigBird, BSLongformer, Local, Layout };
struct SparseAttentionConfig {  // counts and indices are of blocks
  SparseAttentionMode mode = SparseAttentionMode::None;
  i64 block = 16;                          // tokens: 16, 32, 64 or 128
  bool different_layout_per_head = false;  // else all heads use that of the first
  bool unidirectional = false;             // resolved to the model's when not given
  i64 num_local_blocks = 4;                // Fixed: blocks per window
  i64 num_global_blocks = 1;  // Fixed: per window, a divisor of num_local_blocks; BigBird: the first blocks
  bool horizontal_global_attention = false;  // Fixed, Variable, if bidirectional: global blocks attend to all, too
  // Fixed: number of positions of a window's global blocks, used by heads in turn.
  i64 num_different_global_patterns = 1;
  i64 num_random_blocks = 0;                    // per row; Variable, and BigBird, whose default is 1
  std::vector<i64> local_window_blocks = {4};   // Variable: sizes of successive windows; the last one repeats
  std::vector<i64> global_block_indices = {0};  // Variable, BSLongformer
  std::vector<i64> global_block_end_indices{};  // Variable, BSLongformer: empty, or where the range of blocks that
                                                // begins at each index ends
  i64 num_sliding_window_blocks = 3;            // BigBird, BSLongformer, Local: odd
  std::string layout{};                         // Layout: an HDF5 or JSON file with [heads or 1, blocks, blocks]
  bool operator==(const SparseAttentionConfig&) const = default;
};

enum class CheckpointGranularity : u8 { None, Layer, Selective };
struct ActivationCheckpointingConfig {
  CheckpointGranularity granularity = CheckpointGranularity::None;  // Selective: recomputes only the attention
  i64 interval = 1;                    // Layer: keeps the input of every `interval` layers and recomputes the rest
  bool partition_activations = false;  // cuts the kept inputs over the tensor-parallel ranks
  bool cpu_checkpointing = false;      // keeps them in host memory
  std::string nvme_path{};             // a directory: keeps them in a file there
  i64 buffer_count = 4;                // with nvme_path: number of inputs in memory
};

enum class SaveFailure : u8 { Stop, Continue };
struct SaveConfig {
  i64 every = 0;                             // steps between checkpoints; 0: only after the last step
  i64 keep = 0;                              // newest checkpoints to keep; 0: all
  bool async = false;                        // copies the state to host memory and writes it during training
  SaveFailure on_error = SaveFailure::Stop;  // whether the run stops when a save fails before the run's end
};

// One of DeepSpeed's monitors, which writes to output_path/job_name.
struct MonitorConfig {
  bool enabled = false;
  std::string output_path{};  // empty: a directory in the run directory, named after the monitor
  std::string job_name = "DeepSpeedJobName";
};
struct PrometheusConfig {
  std::string file{};  // rewritten at every printed step; empty: none
  std::string job_name = "DeepSpeedJobName";
};
struct CommsLoggerConfig {
  bool enabled = false;                 // resolved to true if the section exists without this key
  bool verbose = false;                 // also reports at every printed step
  bool prof_all = true;                 // logs all operations; else only those of prof_ops
  std::vector<std::string> prof_ops{};  // "dp.all_gather", or "all_gather" for all axes
};
struct FlopsProfilerConfig {
  bool enabled = false;
  i64 profile_step = 1;
  bool detailed = true;       // lists each operation
  std::string output_file{};  // empty: the report is printed
};
// Reports of a run besides metrics.jsonl.
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

// The form in which a run that does not train keeps the matrices of its products (ds/kernels/codes.h). Programs set it;
// there is no key.
struct WeightsConfig {
  // Stored: as the files of the model have them, where products read that form. Work: the work dtype. Int8, Int4:
  // codes with a bf16 scale for each `group` elements of a row. W8A8: products of 8-bit integers, one scale a row.
  enum class Form : u8 { Stored, Work, Int8, Int4, W8A8 };
  Form form = Form::Stored;
  i64 group = 32;                                // 32 or 128
  std::map<std::string, CodedForm> stored = {};  // of Form::Stored, by the name of the parameter (find_codes())
  // Whether products code the activations in 8 bits, too, and sum integers; without a value, those of W8A8 and of
  // matrices whose files say so.
  std::optional<bool> integers = {};

  bool sums_integers() const noexcept {
    const auto says_so = [](const auto& one) { return one.second.integer; };
    return integers.value_or(form == Form::W8A8 || std::any_of(stored.begin(), stored.end(), says_so));
  }
  bool asks_for_codes() const noexcept { return form != Form::Stored && form != Form::Work; }
  bool any() const noexcept { return asks_for_codes() || (form == Form::Stored && !stored.empty()); }
  std::string_view name() const noexcept {
    constexpr std::string_view kNames[] = {"stored", "work", "int8", "int4", "w8a8"};
    return kNames[static_cast<size_t>(form)];
  }
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
  Fp8Config fp8;
  ZeroConfig zero;
  AioConfig aio;
  PipelineConfig pipeline;
  TensorParallelConfig tensor_parallel;
  SequenceParallelConfig sequence_parallel;
  ExpertParallelConfig expert_parallel;
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
  WeightsConfig weights;
  ModelConfig model;                         // read from published.path or inline; layers == 0 if neither is given
  bool joined_products = true;               // becomes model.joined_products
  bool gradient_accumulation_fusion = true;  // products add to sums of gradients, where these allow it
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
  // The dtype of fresh gradients. On the wire they have this dtype, or codes of gradient_code_bits() bits if that is
  // not 0.
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
  i64 line = 0, column = 0;  // from 1; 0: unknown
  std::string key = {};      // "zero_optimization.stage"; empty if the text is not JSON
  std::string message = {};
};
// "cfg.json:12:5: zero_optimization.stage: must be 0 to 3, not 4"
DS_API std::string to_string(const Diagnostic&);

struct ConfigResult {
  Config config;                        // complete only if ok(); otherwise what could be read, and defaults
  std::vector<Diagnostic> diagnostics;  // errors and warnings in the order found
  DS_API bool ok() const noexcept;
  // The code of the first error that is not Errc::Unavailable, or else Errc::Unavailable. Requires !ok().
  DS_API Errc code() const noexcept;
  // All errors, one per line.
  DS_API std::string message() const;
};

// Parts of a run that its program brings. The configuration then lacks the keys that describe them.
struct ProgramParts {
  // Instead of `model`; states a source, layers, hidden, vocab_size and max_positions. Other sizes of 0 are resolved:
  // heads to 1, kv_heads to heads, head_dim to hidden / heads, intermediate to hidden.
  std::optional<ModelConfig> model = {};
  // Instead of data.train, and of data.validation and data.split; see DataConfig.
  std::shared_ptr<const SampleSource> samples = {}, validation_samples = {};
};

// Reads a configuration and reports all its mistakes at once. Also reads model.path, but no data file.
//   path        a file, or "-" for standard input
//   overrides   "a.b=v", applied in order, as with --set: v is JSON, or else a string; "a.b[0]=v" reaches into arrays
//   world_size  number of ranks
DS_API ConfigResult load_config(const std::string& path, std::span<const std::string> overrides, int world_size,
                                ConfigUse use = ConfigUse::Train, const ProgramParts& parts = {});
// The same for a text in memory; diagnostics call it `name`.
DS_API ConfigResult parse_config(std::string_view text, const std::string& name, std::span<const std::string> overrides,
                                 int world_size, ConfigUse use = ConfigUse::Train, const ProgramParts& parts = {});

// Returns every key that has an effect with its resolved value, as JSON that load_config reads back to the same Config,
// given the same parts of the program.
DS_API std::string resolved_json(const Config&);

}  // namespace ds
