// SPDX-License-Identifier: Apache-2.0
// The table of every key of ds_config.json that DeepSpeed 0.19 knows, and of our own. DeepSpeed keys that ask for
// something libds does not do yet are NotYet with the values that ask for nothing; a key moves to Effect together with
// the code that obeys it.
#include "config/keys.h"

#include <algorithm>
#include "config/optimizer.h"
#include "config/optimizer_table.h"
#include "config/parallel.h"
#include "config/scheduler.h"
#include "config/sparse_attention.h"

namespace ds {

// Ours, and those that DeepSpeed has besides.
template <>
inline constexpr auto kEnumNames<OptimizerType> = [] {
  constexpr std::string_view kOthers[] = {"CPUAdam", "MuAdam", "MuAdamW", "MuSGD"};
  std::array<EnumName, std::size(kOptimizers) + std::size(kOthers)> names;
  auto* const next = std::ranges::transform(kOptimizers, names.data(), [](const OptimizerRow& row) {
                       return EnumName{row.name, u8(row.defaults.type)};
                     }).out;
  std::ranges::transform(kOthers, next, [](std::string_view name) { return EnumName{name}; });
  return names;
}();
template <>
inline constexpr std::array kEnumNames<StateDtype> = {EnumName{"fp32", u8(StateDtype::F32)},
                                                      EnumName{"bf16", u8(StateDtype::BF16)}};
template <>
inline constexpr std::array kEnumNames<Fp8Gradients> = {EnumName{"e4m3", u8(Fp8Gradients::E4M3)},
                                                        EnumName{"e5m2", u8(Fp8Gradients::E5M2)}};
template <>
inline constexpr std::array kEnumNames<MuonScale> = {EnumName{"original", u8(MuonScale::Original)},
                                                     EnumName{"match_rms_adamw", u8(MuonScale::MatchRmsAdamW)}};
template <>
inline constexpr std::array kEnumNames<SchedulerType> = {EnumName{"WarmupLR", u8(SchedulerType::WarmupLR)},
                                                         EnumName{"WarmupCosineLR", u8(SchedulerType::WarmupCosineLR)},
                                                         EnumName{"WarmupDecayLR", u8(SchedulerType::WarmupDecayLR)},
                                                         EnumName{"LRRangeTest", u8(SchedulerType::LRRangeTest)},
                                                         EnumName{"OneCycle", u8(SchedulerType::OneCycle)},
                                                         EnumName{"Linear", u8(SchedulerType::Linear)},
                                                         EnumName{"Cosine", u8(SchedulerType::Cosine)},
                                                         EnumName{"CosineRestarts", u8(SchedulerType::CosineRestarts)},
                                                         EnumName{"WSD", u8(SchedulerType::Wsd)},
                                                         EnumName{"InverseSqrt", u8(SchedulerType::InverseSqrt)}};
template <>
inline constexpr std::array kEnumNames<DecayType> = {EnumName{"linear", u8(DecayType::Linear)},
                                                     EnumName{"cosine", u8(DecayType::Cosine)},
                                                     EnumName{"1-sqrt", u8(DecayType::OneMinusSqrt)}};
template <>
inline constexpr std::array kEnumNames<WarmupType> = {EnumName{"log", u8(WarmupType::Log)},
                                                      EnumName{"linear", u8(WarmupType::Linear)}};
template <>
inline constexpr std::array kEnumNames<DType> = {
    EnumName{"fp32", u8(DType::F32)}, EnumName{"bf16", u8(DType::BF16)}, EnumName{"fp16", u8(DType::F16)},
    EnumName{"bfp16", u8(DType::BF16)}};  // as DeepSpeed spelt bf16 at first
template <>
inline constexpr std::array kEnumNames<WireType> = {
    EnumName{"fp32", u8(WireType::F32)},  EnumName{"bf16", u8(WireType::BF16)}, EnumName{"fp16", u8(WireType::F16)},
    EnumName{"int8", u8(WireType::Int8)}, EnumName{"int4", u8(WireType::Int4)}, EnumName{"bfp16", u8(WireType::BF16)}};
template <>
inline constexpr std::array kEnumNames<ReduceOrder> = {EnumName{"boundary", u8(ReduceOrder::Boundary)},
                                                       EnumName{"micro", u8(ReduceOrder::Micro)}};
template <>
inline constexpr std::array kEnumNames<GradientReduce> = {EnumName{"mean", u8(GradientReduce::Mean)},
                                                          EnumName{"sum", u8(GradientReduce::Sum)}};
template <>
inline constexpr std::array kEnumNames<LossNorm> = {EnumName{"micro", u8(LossNorm::Micro)},
                                                    EnumName{"token", u8(LossNorm::Token)}};
template <>
inline constexpr std::array kEnumNames<DeviceKind> = {EnumName{"auto", u8(DeviceKind::Auto)},
                                                      EnumName{"cpu", u8(DeviceKind::Cpu)},
                                                      EnumName{"cuda", u8(DeviceKind::Cuda)}};
template <>
inline constexpr std::array kEnumNames<CudaAttention> = {EnumName{"auto", u8(CudaAttention::Auto)},
                                                         EnumName{"cudnn", u8(CudaAttention::Cudnn)},
                                                         EnumName{"own", u8(CudaAttention::Own)}};
template <>
inline constexpr std::array kEnumNames<CommBackend> = {
    EnumName{"auto", u8(CommBackend::Auto)},        EnumName{"self", u8(CommBackend::Self)},
    EnumName{"shm", u8(CommBackend::Shm)},          EnumName{"mpi", u8(CommBackend::Mpi)},
    EnumName{"shm+mpi", u8(CommBackend::Composed)}, EnumName{"nccl", u8(CommBackend::Nccl)}};
template <>
inline constexpr std::array kEnumNames<PipelineSchedule> = {
    EnumName{"naive", u8(PipelineSchedule::Naive)},
    EnumName{"gpipe", u8(PipelineSchedule::GPipe)},
    EnumName{"1f1b", u8(PipelineSchedule::OneFOneB)},
    EnumName{"interleaved", u8(PipelineSchedule::Interleaved)},
    EnumName{"breadth-first", u8(PipelineSchedule::BreadthFirst)},
    EnumName{"zb-h1", u8(PipelineSchedule::ZeroBubbleH1)},
    EnumName{"zb-h2", u8(PipelineSchedule::ZeroBubbleH2)},
    EnumName{"zb-v", u8(PipelineSchedule::ZeroBubbleV)}};
template <>
inline constexpr std::array kEnumNames<SequenceParallelMode> = {EnumName{"ulysses", u8(SequenceParallelMode::Ulysses)},
                                                                EnumName{"ring", u8(SequenceParallelMode::Ring)}};
template <>
inline constexpr std::array kEnumNames<SparseAttentionMode> = {
    EnumName{"none", u8(SparseAttentionMode::None)},
    EnumName{"dense", u8(SparseAttentionMode::Dense)},
    EnumName{"fixed", u8(SparseAttentionMode::Fixed)},
    EnumName{"variable", u8(SparseAttentionMode::Variable)},
    EnumName{"bigbird", u8(SparseAttentionMode::BigBird)},
    EnumName{"bslongformer", u8(SparseAttentionMode::BSLongformer)},
    EnumName{"local", u8(SparseAttentionMode::Local)},
    EnumName{"layout", u8(SparseAttentionMode::Layout)}};
template <>
inline constexpr std::array kEnumNames<CheckpointGranularity> = {
    EnumName{"none", u8(CheckpointGranularity::None)}, EnumName{"layer", u8(CheckpointGranularity::Layer)},
    EnumName{"selective", u8(CheckpointGranularity::Selective)}};
template <>
inline constexpr std::array kEnumNames<SaveFailure> = {EnumName{"stop", u8(SaveFailure::Stop)},
                                                       EnumName{"continue", u8(SaveFailure::Continue)}};
template <>
inline constexpr std::array kEnumNames<OffloadDevice> = {
    EnumName{"none", u8(OffloadDevice::None)}, EnumName{"cpu", u8(OffloadDevice::Cpu)},
    EnumName{"nvme", u8(OffloadDevice::Nvme)}, EnumName{"server", u8(OffloadDevice::Server)}};
template <>
inline constexpr std::array kEnumNames<AioMethod> = {EnumName{"auto", u8(AioMethod::Auto)},
                                                     EnumName{"io_uring", u8(AioMethod::IoUring)},
                                                     EnumName{"threads", u8(AioMethod::Threads)}};
template <>
inline constexpr std::array kEnumNames<DataPacking> = {EnumName{"none", u8(DataPacking::None)},
                                                       EnumName{"best_fit", u8(DataPacking::BestFit)}};
template <>
inline constexpr std::array kEnumNames<DocumentTokenAt> = {EnumName{"end", u8(DocumentTokenAt::End)},
                                                           EnumName{"begin", u8(DocumentTokenAt::Begin)}};
template <>
inline constexpr std::array kEnumNames<DocumentPositions> = {EnumName{"restart", u8(DocumentPositions::Restart)},
                                                             EnumName{"continue", u8(DocumentPositions::Continue)}};
template <>
inline constexpr std::array kEnumNames<CurriculumSchedule> = {
    EnumName{"fixed_linear", u8(CurriculumSchedule::FixedLinear)},
    EnumName{"fixed_root", u8(CurriculumSchedule::FixedRoot)},
    EnumName{"fixed_discrete", u8(CurriculumSchedule::FixedDiscrete)}, EnumName{"custom"}};
template <>
inline constexpr std::array kEnumNames<DataFormat> = {
    EnumName{"auto", u8(DataFormat::Auto)},         EnumName{"text", u8(DataFormat::Text)},
    EnumName{"bin", u8(DataFormat::Bin)},           EnumName{"llmc", u8(DataFormat::Llmc)},
    EnumName{"megatron", u8(DataFormat::Megatron)}, EnumName{"hdf5", u8(DataFormat::Hdf5)},
    EnumName{"jsonl", u8(DataFormat::Jsonl)},       EnumName{"parquet", u8(DataFormat::Parquet)},
    EnumName{"arrow", u8(DataFormat::Arrow)}};
template <>
inline constexpr std::array kEnumNames<TokenDtype> = {
    EnumName{"auto", u8(TokenDtype::Auto)},  EnumName{"uint8", u8(TokenDtype::U8)},
    EnumName{"uint16", u8(TokenDtype::U16)}, EnumName{"int32", u8(TokenDtype::I32)},
    EnumName{"uint32", u8(TokenDtype::U32)}, EnumName{"int64", u8(TokenDtype::I64)},
    EnumName{"uint64", u8(TokenDtype::U64)}};

namespace {

using C = Config;
using S = SparseAttentionConfig;
constexpr Range kPositive = {1, kMostCount};
constexpr Range kWeight = {0, 1000, true};
constexpr Range kBatch = {1, kMostBatch};
constexpr Range kDegree = {0, 1 << 20};  // of parallelism: 0 is none
constexpr Range kLimit = {0, 0x1p63};    // only compared or divided by: "never" and "no limit" are sys.maxsize there
constexpr Range kSomeLimit = {1, 0x1p63};
constexpr Range kAboveZero = {.open_low = true};
constexpr Range kFp32AboveZero = {.high = 3e38, .open_low = true, .fp32 = true};
constexpr Range kSeconds = {.high = 1e9, .open_low = true};  // as nanoseconds they still fit
constexpr Range kRate = {.high = 3e38, .fp32 = true};
constexpr Range kShare = {0, 1};
constexpr Range kOpenShare = {0, 1, /*open_low=*/true};
constexpr Range kStairs = {0, 1 << 20};  // times a number of steps it is an integer
constexpr Range kToken = {0, 1 << 24};
constexpr Range kFp32 = {.high = 1e38, .fp32 = true};  // what the numbers of a step can hold
constexpr Range kBelowOne = {0, 1, false, /*open_high=*/true};

constexpr bool kAuto = true;  // "auto" is taken; so is null

// The conditions under which keys have an effect, by the whole of a resolved configuration.
using Path = std::string_view;
Path last_name(Path path) { return path.substr(path.rfind('.') + 1); }

bool never(const C&, Path) { return false; }  // it has been resolved to another key

bool optimizer_takes_it(const C& c, Path path) { return optimizer_takes(c.optimizer.type, last_name(path)); }
bool optimizer_has_betas(const C& c, Path path) {
  const bool schedule_sets_them = c.scheduler.type == SchedulerType::OneCycle && c.scheduler.cycle_momentum;
  return !schedule_sets_them && optimizer_takes_it(c, path);
}
bool has_schedule(const C& c, Path) { return c.scheduler.type != SchedulerType::Constant; }
bool schedule_takes_it(const C& c, Path path) { return scheduler_takes(c.scheduler.type, last_name(path)); }
bool schedule_moves_momentum(const C& c, Path path) { return c.scheduler.cycle_momentum && schedule_takes_it(c, path); }

bool in_fp16(const C& c, Path) { return c.fp16.enabled; }
bool in_bf16(const C& c, Path) { return c.bf16.enabled; }
bool in_fp8(const C& c, Path) { return c.fp8.enabled; }
bool has_bf16_masters(const C& c, Path) { return c.bf16.enabled && c.bf16.bf16_master_weights_and_grads; }

bool splits_sequences(const C& c, Path) { return c.sequence_parallel.size > 1; }
bool balances_experts(const C& c, Path) { return c.model.experts.balancing_bias; }
bool has_expert_parallelism(const C& c, Path) { return c.expert_parallel.enabled; }
bool has_chunks(const C& c, Path) { return c.pipeline.stages * c.pipeline.virtual_stages > 1; }
bool is_v(const C& c, Path) { return c.pipeline.schedule == PipelineSchedule::ZeroBubbleV; }
bool has_loco(const C& c, Path) { return c.zero.loco.enabled; }
bool has_diloco(const C& c, Path) { return c.optimizer.diloco.enabled; }

bool offloads_states(const C& c, Path) { return c.zero.offload_optimizer.device != OffloadDevice::None; }
bool offloads_params(const C& c, Path) { return c.zero.offload_param.device != OffloadDevice::None; }
bool delays_updates(const C& c, Path) { return c.zero.offload_optimizer.delayed_update; }
bool recomputes_layers(const C& c, Path) {
  return c.activation_checkpointing.granularity == CheckpointGranularity::Layer;
}
bool stores_inputs_in_file(const C& c, Path) { return !c.activation_checkpointing.nvme_path.empty(); }
bool uses_files(const C& c, Path path) {
  return c.zero.offload_optimizer.device == OffloadDevice::Nvme || c.zero.offload_param.device == OffloadDevice::Nvme ||
         stores_inputs_in_file(c, path);
}

bool sparse_mode_takes_it(const C& c, Path path) {
  return sparse_attention_takes(c.sparse_attention.mode, last_name(path));
}
bool masks_tokens(const C& c, Path) { return !c.model.causal() && !c.data.samples; }
bool has_document_token(const C& c, Path) { return c.data.document_token >= 0; }
// The other keys of documents are written where they are not what follows from the rest.
bool token_begins_documents(const C& c, Path) { return c.data.document_token_at == DocumentTokenAt::Begin; }
bool adds_document_token(const C& c, Path) { return c.data.add_document_token; }
bool chooses_separation(const C& c, Path) {
  return c.data.separate_documents != (c.data.document_token >= 0 || c.data.packing != DataPacking::None);
}
bool positions_continue(const C& c, Path) { return c.data.document_positions == DocumentPositions::Continue; }
bool no_loss_across_documents(const C& c, Path) { return !c.data.loss_across_documents; }
bool has_no_validation_files(const C& c, Path) { return c.data.validation.empty() && !c.data.validation_samples; }

bool has_curriculum(const C& c, Path) { return c.curriculum.enabled; }
bool curriculum_is_a_list(const C& c, Path) {
  return c.curriculum.enabled && c.curriculum.schedule == CurriculumSchedule::FixedDiscrete;
}
bool curriculum_is_a_root(const C& c, Path) {
  return c.curriculum.enabled && c.curriculum.schedule == CurriculumSchedule::FixedRoot;
}
bool curriculum_grows(const C& c, Path) {
  return c.curriculum.enabled && c.curriculum.schedule != CurriculumSchedule::FixedDiscrete;
}
bool has_data_efficiency(const C& c, Path) { return c.random_ltd.data_efficiency; }
bool has_data_routing(const C& c, Path) { return c.random_ltd.data_efficiency && c.random_ltd.data_routing; }
bool drops_tokens(const C& c, Path) { return c.random_ltd.on(); }
bool gives_total_layers(const C& c, Path) { return c.random_ltd.on() && c.random_ltd.total_layer_num > 0; }
bool gives_dropping_layers(const C& c, Path) { return c.random_ltd.on() && c.random_ltd.random_ltd_layer_num > 0; }

template <auto monitor>
bool is_on(const C& c, Path) {
  return (c.monitors.*monitor).enabled;
}
bool writes_prometheus(const C& c, Path) { return !c.monitors.prometheus.file.empty(); }

constexpr Key effect(std::string_view path, Slot (*slot)(void*), Range range = {}, bool automatic = false) {
  return {.path = path, .slot = slot, .range = range, .takes_auto = automatic, .takes_null = automatic};
}
// A place where something is written; what DeepSpeed has for none is none.
constexpr Key place(std::string_view path, Slot (*slot)(void*)) {
  Key key = effect(path, slot, {}, kAuto);
  key.takes_empty = true;
  return key;
}
constexpr Key not_yet(std::string_view path, std::string_view values, std::string_view note = {}) {
  return {.path = path, .kind = KeyKind::NotYet, .values = values, .note = note};
}
// No number depends on it: what is not in `values` is a warning.
constexpr Key harmless(std::string_view path, std::string_view values, std::string_view note) {
  Key key = not_yet(path, values, note);
  key.harmless = true;
  return key;
}
constexpr Key not_yet_section(std::string_view path, std::string_view name, std::string_view values,
                              std::string_view members, std::string_view note = {}) {
  Key key{.path = path,
          .kind = KeyKind::NotYetSection,
          .takes_null = true,
          .name = name,
          .values = values,
          .members = members};
  key.note = note;
  return key;
}
constexpr Key harmless_section(std::string_view path, std::string_view name, std::string_view values,
                               std::string_view members, std::string_view note) {
  Key key = not_yet_section(path, name, values, members, note);
  key.harmless = true;
  return key;
}
constexpr Key ignored(std::string_view path, std::string_view note) {
  return {.path = path, .kind = KeyKind::Ignored, .note = note};
}
constexpr Key ignored_section(std::string_view path, std::string_view members, std::string_view note) {
  return {.path = path, .kind = KeyKind::IgnoredSection, .members = members, .note = note};
}
constexpr Key refused(std::string_view path, std::string_view note) {
  return {.path = path, .kind = KeyKind::Refused, .note = note};
}
constexpr Key alias(std::string_view path, std::string_view target) {
  return {.path = path, .kind = KeyKind::Alias, .name = target};
}
constexpr Key deprecated(std::string_view path, std::string_view target) {
  return {.path = path, .kind = KeyKind::Deprecated, .name = target};
}

Slot betas_of_optimizer(void* root) {
  OptimizerConfig& o = static_cast<Config*>(root)->optimizer;
  return BetasSlot{&o.beta1, &o.beta2};
}
Slot betas_of_update(void* root) {
  auto* const u = static_cast<UpdateConfig*>(root);
  return BetasSlot{&u->beta1, &u->beta2};
}
// A boolean under two names.
Slot direction_of_attention(void* root) {
  static constexpr std::array kNames = {EnumName{"bidirectional", u8(false)}, EnumName{"unidirectional", u8(true)}};
  static_assert(sizeof(bool) == 1);
  return EnumSlot{reinterpret_cast<u8*>(&static_cast<Config*>(root)->sparse_attention.unidirectional), kNames};
}
template <auto member>
Slot slot_of_group(void* root) {
  return &(static_cast<ParamGroupConfig*>(static_cast<UpdateConfig*>(root))->*member);
}

// clang-format off
using U = UpdateConfig;
constexpr Key kGroupKeys[] = {
    effect("params", slot_of_group<&ParamGroupConfig::params>),
    effect("frozen", slot_of_group<&ParamGroupConfig::frozen>),
    effect("type", slot_of<&U::type>),
    effect("lr", slot_of<&U::lr>, kRate),
    effect("betas", betas_of_update, kBelowOne),
    effect("eps", slot_of<&U::eps>, kAboveZero),
    effect("weight_decay", slot_of<&U::weight_decay>, kRate),
    effect("bias_correction", slot_of<&U::bias_correction>),
    effect("adam_w_mode", slot_of<&U::adam_w_mode>),
    effect("state_dtype", slot_of<&U::state_dtype>),
    effect("momentum", slot_of<&U::momentum>, kBelowOne),
    effect("dampening", slot_of<&U::dampening>, kShare),
    effect("nesterov", slot_of<&U::nesterov>),
    effect("min_coeff", slot_of<&U::min_coeff>, kFp32AboveZero),
    effect("max_coeff", slot_of<&U::max_coeff>, kFp32AboveZero),
    effect("muon_lr", slot_of<&U::muon_lr>, kFp32AboveZero),
    effect("adam_lr", slot_of<&U::adam_lr>, kFp32AboveZero),
    effect("adjust_lr_fn", slot_of<&U::muon_scale>),
    effect("freeze_step", slot_of<&U::freeze_step>, kPositive),
    effect("coeff_beta", slot_of<&U::coeff_beta>, kBelowOne),
    effect("factor_min", slot_of<&U::factor_min>, kFp32AboveZero),
    effect("factor_max", slot_of<&U::factor_max>, kFp32AboveZero),
    effect("factor_threshold", slot_of<&U::factor_threshold>, kBelowOne),
    effect("var_freeze_step", slot_of<&U::var_freeze_step>, kPositive),
    effect("var_update_scaler", slot_of<&U::var_update_scaler>, kPositive),
    effect("local_step_scaler", slot_of<&U::local_step_scaler>, kPositive),
    effect("local_step_clipper", slot_of<&U::local_step_clipper>, kPositive),
};
// clang-format on

// clang-format off
constexpr Key kKeys[] = {
    // Batch sizes.
    effect("train_batch_size", slot_of<&C::batch, &BatchConfig::train>, kBatch, kAuto),
    effect("train_micro_batch_size_per_gpu", slot_of<&C::batch, &BatchConfig::micro>, kBatch, kAuto),
    effect("gradient_accumulation_steps", slot_of<&C::batch, &BatchConfig::accumulation>, {1, kMostAccumulation}, kAuto),
    harmless("managed_gradient_accumulation", "[true]", "a step always has gradient_accumulation_steps micro-batches"),
    effect("sequence_parallel_size", slot_of<&C::sequence_parallel, &SequenceParallelConfig::size>, {1, kDegree.high}),
    effect("sequence_parallel_mode", slot_of<&C::sequence_parallel, &SequenceParallelConfig::mode>).when(splits_sequences),
    not_yet("data_parallel_size", "[null]", "it follows from the number of ranks and the other degrees of parallelism"),

    // Optimizer.
    {.path = "optimizer.type", .slot = slot_of<&C::optimizer, &OptimizerConfig::type>, .takes_null = true},
    effect("optimizer.params.lr", slot_of<&C::optimizer, &OptimizerConfig::lr>, kRate, kAuto).when(optimizer_takes_it),
    effect("optimizer.params.betas", betas_of_optimizer, kBelowOne, kAuto).when(optimizer_has_betas),
    effect("optimizer.params.eps", slot_of<&C::optimizer, &OptimizerConfig::eps>, kAboveZero, kAuto).when(optimizer_takes_it),
    effect("optimizer.params.weight_decay", slot_of<&C::optimizer, &OptimizerConfig::weight_decay>, kRate, kAuto).when(optimizer_takes_it),
    effect("optimizer.params.bias_correction", slot_of<&C::optimizer, &OptimizerConfig::bias_correction>).when(optimizer_takes_it),
    effect("optimizer.params.adam_w_mode", slot_of<&C::optimizer, &OptimizerConfig::adam_w_mode>).when(optimizer_takes_it),
    effect("optimizer.params.state_dtype", slot_of<&C::optimizer, &OptimizerConfig::state_dtype>).when(optimizer_takes_it),
    effect("optimizer.params.momentum", slot_of<&C::optimizer, &OptimizerConfig::momentum>, kBelowOne).when(optimizer_takes_it),
    effect("optimizer.params.dampening", slot_of<&C::optimizer, &OptimizerConfig::dampening>, kShare).when(optimizer_takes_it),
    effect("optimizer.params.nesterov", slot_of<&C::optimizer, &OptimizerConfig::nesterov>).when(optimizer_takes_it),
    effect("optimizer.params.min_coeff", slot_of<&C::optimizer, &OptimizerConfig::min_coeff>, kFp32AboveZero).when(optimizer_takes_it),
    effect("optimizer.params.max_coeff", slot_of<&C::optimizer, &OptimizerConfig::max_coeff>, kFp32AboveZero).when(optimizer_takes_it),
    effect("optimizer.params.muon_lr", slot_of<&C::optimizer, &OptimizerConfig::muon_lr>, kFp32AboveZero).when(optimizer_takes_it),
    effect("optimizer.params.adam_lr", slot_of<&C::optimizer, &OptimizerConfig::adam_lr>, kFp32AboveZero).when(optimizer_takes_it),
    effect("optimizer.params.adjust_lr_fn", slot_of<&C::optimizer, &OptimizerConfig::muon_scale>).when(optimizer_takes_it),
    effect("optimizer.params.freeze_step", slot_of<&C::optimizer, &OptimizerConfig::freeze_step>, kPositive).when(optimizer_takes_it),
    effect("optimizer.params.coeff_beta", slot_of<&C::optimizer, &OptimizerConfig::coeff_beta>, kBelowOne).when(optimizer_takes_it),
    effect("optimizer.params.factor_min", slot_of<&C::optimizer, &OptimizerConfig::factor_min>, kFp32AboveZero).when(optimizer_takes_it),
    effect("optimizer.params.factor_max", slot_of<&C::optimizer, &OptimizerConfig::factor_max>, kFp32AboveZero).when(optimizer_takes_it),
    effect("optimizer.params.factor_threshold", slot_of<&C::optimizer, &OptimizerConfig::factor_threshold>, kBelowOne).when(optimizer_takes_it),
    effect("optimizer.params.var_freeze_step", slot_of<&C::optimizer, &OptimizerConfig::var_freeze_step>, kPositive).when(optimizer_takes_it),
    effect("optimizer.params.var_update_scaler", slot_of<&C::optimizer, &OptimizerConfig::var_update_scaler>, kPositive).when(optimizer_takes_it),
    effect("optimizer.params.local_step_scaler", slot_of<&C::optimizer, &OptimizerConfig::local_step_scaler>, kPositive).when(optimizer_takes_it),
    effect("optimizer.params.local_step_clipper", slot_of<&C::optimizer, &OptimizerConfig::local_step_clipper>, kPositive).when(optimizer_takes_it),
    ignored("optimizer.params.cuda_aware", "compressed data uses the communicator of the run"),
    ignored("optimizer.params.comm_backend_name", "compressed data uses the communicator of the run"),
    ignored("optimizer.params.ns_method", "there is one implementation of the Newton-Schulz iteration"),
    {.path = "optimizer.param_groups", .kind = KeyKind::Subtable},
    effect("optimizer.router_bias_update_rate", slot_of<&C::optimizer, &OptimizerConfig::router_bias_update_rate>, kRate).when(balances_experts),
    ignored("optimizer.params.torch_adam", "there is one implementation of Adam"),
    ignored("optimizer.params.fused", "there is one implementation of Adam"),
    not_yet("optimizer.params.amsgrad", "[false]"),
    not_yet("optimizer.params.eps_inside_sqrt", "[false]"),
    refused("optimizer.params.max_grad_norm", "belongs to no optimizer; write gradient_clipping at the top"),
    ignored("optimizer.legacy_fusion", "there is one implementation of Adam"),
    effect("gradient_clipping", slot_of<&C::gradient_clipping>, {}, kAuto),

    // Learning rate.
    {.path = "scheduler.type", .slot = slot_of<&C::scheduler, &SchedulerConfig::type>, .takes_null = true, .applies = has_schedule},
    effect("scheduler.params.warmup_min_lr", slot_of<&C::scheduler, &SchedulerConfig::warmup_min_lr>, kRate, kAuto).when(schedule_takes_it),
    effect("scheduler.params.warmup_max_lr", slot_of<&C::scheduler, &SchedulerConfig::warmup_max_lr>, kRate, kAuto).when(schedule_takes_it),
    effect("scheduler.params.warmup_num_steps", slot_of<&C::scheduler, &SchedulerConfig::warmup_num_steps>, {}, kAuto).when(schedule_takes_it),
    effect("scheduler.params.warmup_type", slot_of<&C::scheduler, &SchedulerConfig::warmup_type>).when(schedule_takes_it),
    effect("scheduler.params.total_num_steps", slot_of<&C::scheduler, &SchedulerConfig::total_num_steps>, kPositive, kAuto).when(schedule_takes_it),
    effect("scheduler.params.warmup_min_ratio", slot_of<&C::scheduler, &SchedulerConfig::warmup_min_ratio>, kShare).when(schedule_takes_it),
    effect("scheduler.params.cos_min_ratio", slot_of<&C::scheduler, &SchedulerConfig::cos_min_ratio>, kShare).when(schedule_takes_it),
    effect("scheduler.params.lr_range_test_min_lr", slot_of<&C::scheduler, &SchedulerConfig::lr_range_test_min_lr>, kRate).when(schedule_takes_it),
    effect("scheduler.params.lr_range_test_step_size", slot_of<&C::scheduler, &SchedulerConfig::lr_range_test_step_size>, kPositive).when(schedule_takes_it),
    effect("scheduler.params.lr_range_test_step_rate", slot_of<&C::scheduler, &SchedulerConfig::lr_range_test_step_rate>, kRate).when(schedule_takes_it),
    effect("scheduler.params.lr_range_test_staircase", slot_of<&C::scheduler, &SchedulerConfig::lr_range_test_staircase>).when(schedule_takes_it),
    effect("scheduler.params.cycle_min_lr", slot_of<&C::scheduler, &SchedulerConfig::cycle_min_lr>, kRate, kAuto).when(schedule_takes_it),
    effect("scheduler.params.cycle_max_lr", slot_of<&C::scheduler, &SchedulerConfig::cycle_max_lr>, kRate, kAuto).when(schedule_takes_it),
    effect("scheduler.params.cycle_first_step_size", slot_of<&C::scheduler, &SchedulerConfig::cycle_first_step_size>, kPositive).when(schedule_takes_it),
    {.path = "scheduler.params.cycle_second_step_size", .slot = slot_of<&C::scheduler, &SchedulerConfig::cycle_second_step_size>, .takes_null = true, .applies = schedule_takes_it},
    effect("scheduler.params.cycle_first_stair_count", slot_of<&C::scheduler, &SchedulerConfig::cycle_first_stair_count>, kStairs).when(schedule_takes_it),
    {.path = "scheduler.params.cycle_second_stair_count", .slot = slot_of<&C::scheduler, &SchedulerConfig::cycle_second_stair_count>, .range = kStairs, .takes_null = true, .applies = schedule_takes_it},
    effect("scheduler.params.decay_lr_rate", slot_of<&C::scheduler, &SchedulerConfig::decay_lr_rate>, kRate).when(schedule_takes_it),
    effect("scheduler.params.decay_step_size", slot_of<&C::scheduler, &SchedulerConfig::decay_step_size>).when(schedule_takes_it),
    effect("scheduler.params.cycle_momentum", slot_of<&C::scheduler, &SchedulerConfig::cycle_momentum>).when(schedule_takes_it),
    effect("scheduler.params.cycle_min_mom", slot_of<&C::scheduler, &SchedulerConfig::cycle_min_mom>, kBelowOne).when(schedule_moves_momentum),
    effect("scheduler.params.cycle_max_mom", slot_of<&C::scheduler, &SchedulerConfig::cycle_max_mom>, kBelowOne).when(schedule_moves_momentum),
    effect("scheduler.params.decay_mom_rate", slot_of<&C::scheduler, &SchedulerConfig::decay_mom_rate>, kRate).when(schedule_moves_momentum),
    effect("scheduler.params.min_lr_ratio", slot_of<&C::scheduler, &SchedulerConfig::min_lr_ratio>, kShare).when(schedule_takes_it),
    effect("scheduler.params.num_cycles", slot_of<&C::scheduler, &SchedulerConfig::num_cycles>, kPositive).when(schedule_takes_it),
    effect("scheduler.params.decay_num_steps", slot_of<&C::scheduler, &SchedulerConfig::decay_num_steps>).when(schedule_takes_it),
    effect("scheduler.params.decay_type", slot_of<&C::scheduler, &SchedulerConfig::decay_type>).when(schedule_takes_it),
    effect("scheduler.params.timescale", slot_of<&C::scheduler, &SchedulerConfig::timescale>, kPositive).when(schedule_takes_it),
    not_yet("scheduler.params.last_batch_iteration", "[-1]", "a checkpoint restores it"),

    // Precision.
    effect("fp16.enabled", slot_of<&C::fp16, &Fp16Config::enabled>, {}, kAuto),
    effect("fp16.loss_scale", slot_of<&C::fp16, &Fp16Config::loss_scale>, kFp32),
    effect("fp16.initial_scale_power", slot_of<&C::fp16, &Fp16Config::initial_scale_power>, {0, 100}),
    effect("fp16.loss_scale_window", slot_of<&C::fp16, &Fp16Config::loss_scale_window>, kPositive),
    effect("fp16.hysteresis", slot_of<&C::fp16, &Fp16Config::hysteresis>, kPositive),
    effect("fp16.consecutive_hysteresis", slot_of<&C::fp16, &Fp16Config::consecutive_hysteresis>),
    effect("fp16.min_loss_scale", slot_of<&C::fp16, &Fp16Config::min_loss_scale>, kFp32),
    harmless("fp16.auto_cast", "[false]", "inputs are tokens, which are never cast"),
    effect("fp16.fp16_master_weights_and_grads", slot_of<&C::fp16, &Fp16Config::fp16_master_weights_and_grads>).when(in_fp16),
    effect("bf16.enabled", slot_of<&C::bf16, &Bf16Config::enabled>, {}, kAuto),
    harmless("bf16.check_grad_overflow", "[true]", "a step with gradients that are not finite is always skipped"),
    harmless("bf16.immediate_grad_update", "[false]", "gradients are always added in fp32, micro-batch by micro-batch"),
    refused("bf16.loss_scale", "bf16 has no loss scale; remove its keys"),
    refused("bf16.initial_scale_power", "bf16 has no loss scale; remove its keys"),
    refused("bf16.loss_scale_window", "bf16 has no loss scale; remove its keys"),
    refused("bf16.hysteresis", "bf16 has no loss scale; remove its keys"),
    refused("bf16.consecutive_hysteresis", "bf16 has no loss scale; remove its keys"),
    refused("bf16.min_loss_scale", "bf16 has no loss scale; remove its keys"),
    effect("bf16.bf16_master_weights_and_grads", slot_of<&C::bf16, &Bf16Config::bf16_master_weights_and_grads>).when(in_bf16),
    effect("bf16.bf16_optimizer_states", slot_of<&C::bf16, &Bf16Config::bf16_optimizer_states>).when(in_bf16),
    effect("bf16.stochastic_rounding", slot_of<&C::bf16, &Bf16Config::stochastic_rounding>).when(has_bf16_masters),
    alias("bfloat16", "bf16"),
    effect("fp8.enabled", slot_of<&C::fp8, &Fp8Config::enabled>),
    effect("fp8.gradients", slot_of<&C::fp8, &Fp8Config::gradients>).when(in_fp8),
    effect("fp8.gathers", slot_of<&C::fp8, &Fp8Config::gathers>).when(in_fp8),
    {.path = "data_types.grad_accum_dtype", .slot = slot_of<&C::grad_accum_dtype>, .takes_null = true},
    effect("data_types.logits_dtype", slot_of<&C::loss, &LossConfig::logits>),
    not_yet("data_types.param_dtype", "[null]", "fp16.enabled and bf16.enabled choose the type"),
    not_yet("data_types.buffer_dtype", "[null]"),
    not_yet_section("amp", "enabled", "[false]", "enabled opt_level loss_scale min_loss_scale max_loss_scale"),
    not_yet_section("torch_autocast", "enabled", "[false]", "enabled dtype lower_precision_safe_modules"),

    // Reduction of gradients.
    effect("communication_data_type", slot_of<&C::communication_data_type>, {}, kAuto),
    harmless("seq_parallel_communication_data_type", R"(["fp32"])", "communication_data_type applies to the gradients of all ranks"),
    harmless("prescale_gradients", "[false]", "gradients are summed in fp32, and the mean is taken once, after the sum"),
    harmless("gradient_predivide_factor", "[1]", "gradients are summed in fp32, and the mean is taken once, after the sum"),
    effect("gradient_allreduce_op", slot_of<&C::gradient_reduce>),
    effect("sparse_gradients", slot_of<&C::sparse_gradients>),

    // ZeRO.
    effect("zero_optimization.stage", slot_of<&C::zero, &ZeroConfig::stage>, {0, 3}),
    effect("zero_optimization.reduce_bucket_size", slot_of<&C::zero, &ZeroConfig::reduce_bucket_size>, kLimit, kAuto),
    effect("zero_optimization.allgather_bucket_size", slot_of<&C::zero, &ZeroConfig::allgather_bucket_size>, kLimit, kAuto),
    effect("zero_optimization.overlap_comm", slot_of<&C::zero, &ZeroConfig::overlap_comm>, {}, kAuto),
    effect("zero_optimization.stage3_prefetch_bucket_size", slot_of<&C::zero, &ZeroConfig::prefetch_bucket_size>, kLimit, kAuto),
    effect("zero_optimization.stage3_param_persistence_threshold", slot_of<&C::zero, &ZeroConfig::param_persistence_threshold>, kLimit, kAuto),
    effect("zero_optimization.stage3_model_persistence_threshold", slot_of<&C::zero, &ZeroConfig::model_persistence_threshold>, kLimit, kAuto),
    effect("zero_optimization.stage3_max_live_parameters", slot_of<&C::zero, &ZeroConfig::max_live_parameters>, kLimit, kAuto),
    effect("zero_optimization.stage3_max_reuse_distance", slot_of<&C::zero, &ZeroConfig::max_reuse_distance>, kLimit, kAuto),
    effect("zero_optimization.stage3_tile_size", slot_of<&C::zero, &ZeroConfig::tile_size>, kLimit),
    alias("zero_optimization.tile_size", "zero_optimization.stage3_tile_size"),
    alias("zero_optimization.prefetch_bucket_size", "zero_optimization.stage3_prefetch_bucket_size"),
    alias("zero_optimization.param_persistence_threshold", "zero_optimization.stage3_param_persistence_threshold"),
    alias("zero_optimization.model_persistence_threshold", "zero_optimization.stage3_model_persistence_threshold"),
    alias("zero_optimization.max_live_parameters", "zero_optimization.stage3_max_live_parameters"),
    alias("zero_optimization.max_reuse_distance", "zero_optimization.stage3_max_reuse_distance"),
    harmless("zero_optimization.contiguous_gradients", "[true]", "gradients are always contiguous in their buckets"),
    harmless("zero_optimization.reduce_scatter", "[true]", "gradients are always reduced to their owners alone"),
    harmless("zero_optimization.round_robin_gradients", "[false]", "the layout assigns gradients to ranks and balances them"),
    not_yet("zero_optimization.load_from_fp32_weights", "[true]"),
    not_yet("zero_optimization.stage3_gather_16bit_weights_on_model_save", R"([false, true, "auto"])", "a merge reads checkpoints of any stage"),
    alias("zero_optimization.gather_16bit_weights_on_model_save", "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    deprecated("zero_optimization.stage3_gather_fp16_weights_on_model_save", "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    not_yet("zero_optimization.elastic_checkpoint", "[false, true]", "every checkpoint loads into any layout"),
    not_yet("zero_optimization.ignore_unused_parameters", "[true, false]", "every parameter is used"),
    ignored("zero_optimization.use_multi_rank_bucket_allreduce", "gradients are always reduced to their owners alone"),
    ignored("zero_optimization.allgather_partitions", "DeepSpeed itself does not read it"),
    effect("zero_optimization.sub_group_size", slot_of<&C::zero, &ZeroConfig::sub_group_size>, kLimit, kAuto),
    ignored("zero_optimization.memory_efficient_linear", "linear layers never keep a copy"),
    ignored("zero_optimization.override_module_apply", "there is no Python module to override"),
    harmless("zero_optimization.stage3_module_granularity_threshold", "[0]", "a layer is always gathered as one"),
    alias("zero_optimization.module_granularity_threshold", "zero_optimization.stage3_module_granularity_threshold"),
    harmless("zero_optimization.stage3_use_all_reduce_for_fetch_params", "[false]", "parameters are gathered, with the same result"),
    alias("zero_optimization.use_all_reduce_for_fetch_params", "zero_optimization.stage3_use_all_reduce_for_fetch_params"),
    harmless("zero_optimization.stage3_allgather_sequential", "[false]", "the parameters of a layer are gathered together, with the same result"),
    alias("zero_optimization.allgather_sequential", "zero_optimization.stage3_allgather_sequential"),
    not_yet("zero_optimization.stage3_partition_stream_chunk_size", "[0]"),
    alias("zero_optimization.partition_stream_chunk_size", "zero_optimization.stage3_partition_stream_chunk_size"),
    effect("zero_optimization.zero_hpz_partition_size", slot_of<&C::zero, &ZeroConfig::hpz_partition_size>, {1, kDegree.high}),
    effect("zero_optimization.zero_quantized_weights", slot_of<&C::zero, &ZeroConfig::quantized_weights>),
    effect("zero_optimization.zero_quantized_nontrainable_weights", slot_of<&C::zero, &ZeroConfig::quantized_nontrainable_weights>),
    effect("zero_optimization.zero_quantized_gradients", slot_of<&C::zero, &ZeroConfig::quantized_gradients>),
    effect("zero_optimization.zeropp_loco_param.err_beta", slot_of<&C::zero, &ZeroConfig::loco, &ZeroConfig::Loco::err_beta>, kShare).when(has_loco),
    effect("zero_optimization.zeropp_loco_param.reset_T", slot_of<&C::zero, &ZeroConfig::loco, &ZeroConfig::Loco::reset_period>, {1, 1 << 24}).when(has_loco),
    harmless("zero_optimization.compute_grad_norm", "[true]", "a step always needs to know whether its gradients are finite"),
    harmless("zero_optimization.parameter_alignment", "[false]", "the layout decides where parameters are stored"),
    not_yet("zero_optimization.mics_shard_size", "[-1]"),
    not_yet("zero_optimization.mics_hierarchical_params_gather", "[false]"),
    harmless("zero_optimization.pipeline_loading_checkpoint", "[false]", "each rank reads its own part of a checkpoint"),
    harmless("zero_optimization.log_trace_cache_warnings", "[false]", "gathering is planned before the run"),
    harmless("zero_optimization.enable_sanity_checks", "[false]", "gathering is planned before the run"),
    harmless("zero_optimization.save_muon_momentum_buffer_in_memory", "[false]", "offload_optimizer decides where states are kept"),
    not_yet("zero_optimization.legacy_stage1", "[false]"),
    effect("zero_optimization.offload_optimizer.device", slot_of<&C::zero, &ZeroConfig::offload_optimizer, &OffloadOptimizerConfig::device>, {}, kAuto).when(offloads_states),
    effect("zero_optimization.offload_optimizer.nvme_path", slot_of<&C::zero, &ZeroConfig::offload_optimizer, &OffloadOptimizerConfig::nvme_path>, {}, kAuto).when(offloads_states),
    effect("zero_optimization.offload_optimizer.name", slot_of<&C::zero, &ZeroConfig::offload_optimizer, &OffloadOptimizerConfig::name>).when(offloads_states),
    effect("zero_optimization.offload_optimizer.buffer_count", slot_of<&C::zero, &ZeroConfig::offload_optimizer, &OffloadOptimizerConfig::buffer_count>, {1, 4096}, kAuto).when(offloads_states),
    effect("zero_optimization.offload_optimizer.pipeline_read", slot_of<&C::zero, &ZeroConfig::offload_optimizer, &OffloadOptimizerConfig::pipeline_read>, {}, kAuto).when(offloads_states),
    effect("zero_optimization.offload_optimizer.pipeline_write", slot_of<&C::zero, &ZeroConfig::offload_optimizer, &OffloadOptimizerConfig::pipeline_write>, {}, kAuto).when(offloads_states),
    effect("zero_optimization.offload_optimizer.ratio", slot_of<&C::zero, &ZeroConfig::offload_optimizer, &OffloadOptimizerConfig::ratio>, kShare, kAuto).when(offloads_states),
    effect("zero_optimization.offload_optimizer.gradients", slot_of<&C::zero, &ZeroConfig::offload_optimizer, &OffloadOptimizerConfig::gradients>).when(offloads_states),
    effect("zero_optimization.offload_optimizer.delayed_update", slot_of<&C::zero, &ZeroConfig::offload_optimizer, &OffloadOptimizerConfig::delayed_update>).when(offloads_states),
    effect("zero_optimization.offload_optimizer.delayed_update_start", slot_of<&C::zero, &ZeroConfig::offload_optimizer, &OffloadOptimizerConfig::delayed_update_start>, kPositive).when(delays_updates),
    effect("zero_optimization.offload_optimizer.pin_memory", slot_of<&C::zero, &ZeroConfig::offload_optimizer, &OffloadOptimizerConfig::pin_memory>, {}, kAuto).when(offloads_states),
    ignored("zero_optimization.offload_optimizer.pipeline", "pipeline_read and pipeline_write replace it"),
    ignored("zero_optimization.offload_optimizer.fast_init", "initial states are zeros and are not read"),
    not_yet("zero_optimization.offload_optimizer.super_offload", "[false]"),
    ignored("zero_optimization.offload_optimizer.cpuadam_cores_perc", "it is for super_offload alone"),
    effect("zero_optimization.offload_param.device", slot_of<&C::zero, &ZeroConfig::offload_param, &OffloadParamConfig::device>, {}, kAuto).when(offloads_params),
    effect("zero_optimization.offload_param.pin_memory", slot_of<&C::zero, &ZeroConfig::offload_param, &OffloadParamConfig::pin_memory>, {}, kAuto).when(offloads_params),
    effect("zero_optimization.offload_param.nvme_path", slot_of<&C::zero, &ZeroConfig::offload_param, &OffloadParamConfig::nvme_path>, {}, kAuto).when(offloads_params),
    effect("zero_optimization.offload_param.buffer_count", slot_of<&C::zero, &ZeroConfig::offload_param, &OffloadParamConfig::buffer_count>, {0, 4096}, kAuto).when(offloads_params),
    ignored("zero_optimization.offload_param.buffer_size", "buffers are as large as the largest slice"),
    ignored("zero_optimization.offload_param.max_in_cpu", "buffer_count limits what is in memory"),
    effect("zero_optimization.cpu_offload", slot_of<&C::zero, &ZeroConfig::cpu_offload>, {}, kAuto).when(never),
    effect("zero_optimization.cpu_offload_param", slot_of<&C::zero, &ZeroConfig::cpu_offload_param>, {}, kAuto).when(never),
    alias("zero_optimization.cpu_offload_params", "zero_optimization.cpu_offload_param"),
    ignored("zero_optimization.cpu_offload_use_pin_memory", "pin_memory of offload_optimizer and offload_param replaces it"),
    ignored_section("zero_optimization.leaf_module", "classes names name_suffixes", "a layer is always gathered as one"),
    not_yet_section("zero_optimization.zenflow", "", "[]",
                    "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio "
                    "full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch"),
    ignored("zero_allow_untested_optimizer", "every optimizer here is tested with ZeRO"),
    ignored("zero_force_ds_cpu_optimizer", "there are no other optimizers"),

    // Reports.
    effect("steps_per_print", slot_of<&C::monitors, &MonitorsConfig::steps_per_print>, kSomeLimit, kAuto),
    effect("wall_clock_breakdown", slot_of<&C::monitors, &MonitorsConfig::wall_clock_breakdown>, {}, kAuto),
    harmless("memory_breakdown", "[false]", "metrics.jsonl has the memory of every step by tag"),
    harmless("dump_state", "[false]", "ds-train --check prints the resolved configuration"),
    harmless("log_level", "[null]", "messages have no levels"),
    harmless("timers.throughput.enabled", "[true]", "metrics.jsonl has the throughput of every step"),
    harmless("timers.throughput.synchronized", "[true]", "a step ends when its numbers are known"),
    effect("flops_profiler.enabled", slot_of<&C::monitors, &MonitorsConfig::flops_profiler, &FlopsProfilerConfig::enabled>),
    effect("flops_profiler.profile_step", slot_of<&C::monitors, &MonitorsConfig::flops_profiler, &FlopsProfilerConfig::profile_step>, kPositive).when(is_on<&MonitorsConfig::flops_profiler>),
    effect("flops_profiler.detailed", slot_of<&C::monitors, &MonitorsConfig::flops_profiler, &FlopsProfilerConfig::detailed>).when(is_on<&MonitorsConfig::flops_profiler>),
    place("flops_profiler.output_file", slot_of<&C::monitors, &MonitorsConfig::flops_profiler, &FlopsProfilerConfig::output_file>).when(is_on<&MonitorsConfig::flops_profiler>),
    harmless("flops_profiler.module_depth", "[-1]", "the report is by operation and pass, not by layer"),
    harmless("flops_profiler.top_modules", "[1]", "the report is by operation and pass, not by layer"),
    harmless("flops_profiler.recompute_fwd_factor", "[0]", "recomputation is counted, not estimated"),
    effect("comms_logger.enabled", slot_of<&C::monitors, &MonitorsConfig::comms_logger, &CommsLoggerConfig::enabled>),
    effect("comms_logger.verbose", slot_of<&C::monitors, &MonitorsConfig::comms_logger, &CommsLoggerConfig::verbose>).when(is_on<&MonitorsConfig::comms_logger>),
    effect("comms_logger.prof_all", slot_of<&C::monitors, &MonitorsConfig::comms_logger, &CommsLoggerConfig::prof_all>).when(is_on<&MonitorsConfig::comms_logger>),
    effect("comms_logger.prof_ops", slot_of<&C::monitors, &MonitorsConfig::comms_logger, &CommsLoggerConfig::prof_ops>).when(is_on<&MonitorsConfig::comms_logger>),
    harmless("comms_logger.debug", "[false]", "operations are always named by axis: dp, tp, sp, pp"),
    effect("tensorboard.enabled", slot_of<&C::monitors, &MonitorsConfig::tensorboard, &MonitorConfig::enabled>),
    place("tensorboard.output_path", slot_of<&C::monitors, &MonitorsConfig::tensorboard, &MonitorConfig::output_path>).when(is_on<&MonitorsConfig::tensorboard>),
    effect("tensorboard.job_name", slot_of<&C::monitors, &MonitorsConfig::tensorboard, &MonitorConfig::job_name>).when(is_on<&MonitorsConfig::tensorboard>),
    effect("csv_monitor.enabled", slot_of<&C::monitors, &MonitorsConfig::csv_monitor, &MonitorConfig::enabled>),
    place("csv_monitor.output_path", slot_of<&C::monitors, &MonitorsConfig::csv_monitor, &MonitorConfig::output_path>).when(is_on<&MonitorsConfig::csv_monitor>),
    effect("csv_monitor.job_name", slot_of<&C::monitors, &MonitorsConfig::csv_monitor, &MonitorConfig::job_name>).when(is_on<&MonitorsConfig::csv_monitor>),
    effect("prometheus.file", slot_of<&C::monitors, &MonitorsConfig::prometheus, &PrometheusConfig::file>).when(writes_prometheus),
    effect("prometheus.job_name", slot_of<&C::monitors, &MonitorsConfig::prometheus, &PrometheusConfig::job_name>).when(writes_prometheus),
    harmless_section("wandb", "enabled", "[false]", "enabled group team project",
                     "its files need its Python library; metrics.jsonl has the same numbers"),
    harmless_section("comet", "enabled", "[false]",
                     "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
                     "its files need its Python library; metrics.jsonl has the same numbers"),

    // Other sections of DeepSpeed.
    effect("activation_checkpointing.granularity", slot_of<&C::activation_checkpointing, &ActivationCheckpointingConfig::granularity>),
    effect("activation_checkpointing.interval", slot_of<&C::activation_checkpointing, &ActivationCheckpointingConfig::interval>).when(recomputes_layers),
    {.path = "activation_checkpointing.partition_activations", .slot = slot_of<&C::activation_checkpointing, &ActivationCheckpointingConfig::partition_activations>, .takes_null = true, .applies = recomputes_layers},
    {.path = "activation_checkpointing.cpu_checkpointing", .slot = slot_of<&C::activation_checkpointing, &ActivationCheckpointingConfig::cpu_checkpointing>, .takes_null = true, .applies = recomputes_layers},
    effect("activation_checkpointing.nvme_path", slot_of<&C::activation_checkpointing, &ActivationCheckpointingConfig::nvme_path>, {}, kAuto).when(recomputes_layers),
    effect("activation_checkpointing.buffer_count", slot_of<&C::activation_checkpointing, &ActivationCheckpointingConfig::buffer_count>, {1, 4096}).when(stores_inputs_in_file),
    ignored("activation_checkpointing.contiguous_memory_optimization", "activation memory is always planned ahead, without holes"),
    ignored("activation_checkpointing.synchronize_checkpoint_boundary", "it is for measurements and does not affect results"),
    harmless("activation_checkpointing.profile", "[false]", "metrics.jsonl has the time of every step"),
    ignored("activation_checkpointing.number_checkpoints", "it sizes contiguous_memory_optimization only"),
    effect("sparse_attention.mode", slot_of<&C::sparse_attention, &S::mode>).when(sparse_mode_takes_it),
    effect("sparse_attention.block", slot_of<&C::sparse_attention, &S::block>, {16, 128}).when(sparse_mode_takes_it),
    effect("sparse_attention.different_layout_per_head", slot_of<&C::sparse_attention, &S::different_layout_per_head>).when(sparse_mode_takes_it),
    effect("sparse_attention.attention", direction_of_attention).when(sparse_mode_takes_it),
    effect("sparse_attention.num_local_blocks", slot_of<&C::sparse_attention, &S::num_local_blocks>, kPositive).when(sparse_mode_takes_it),
    effect("sparse_attention.num_global_blocks", slot_of<&C::sparse_attention, &S::num_global_blocks>, kPositive).when(sparse_mode_takes_it),
    effect("sparse_attention.horizontal_global_attention", slot_of<&C::sparse_attention, &S::horizontal_global_attention>).when(sparse_mode_takes_it),
    effect("sparse_attention.num_different_global_patterns", slot_of<&C::sparse_attention, &S::num_different_global_patterns>, kPositive).when(sparse_mode_takes_it),
    effect("sparse_attention.num_random_blocks", slot_of<&C::sparse_attention, &S::num_random_blocks>).when(sparse_mode_takes_it),
    effect("sparse_attention.local_window_blocks", slot_of<&C::sparse_attention, &S::local_window_blocks>, kPositive).when(sparse_mode_takes_it),
    effect("sparse_attention.global_block_indices", slot_of<&C::sparse_attention, &S::global_block_indices>).when(sparse_mode_takes_it),
    {.path = "sparse_attention.global_block_end_indices", .slot = slot_of<&C::sparse_attention, &S::global_block_end_indices>, .takes_null = true, .applies = sparse_mode_takes_it},
    effect("sparse_attention.num_sliding_window_blocks", slot_of<&C::sparse_attention, &S::num_sliding_window_blocks>, kPositive).when(sparse_mode_takes_it),
    effect("sparse_attention.layout", slot_of<&C::sparse_attention, &S::layout>).when(sparse_mode_takes_it),
    effect("aio.method", slot_of<&C::aio, &AioConfig::method>).when(uses_files),
    effect("aio.block_size", slot_of<&C::aio, &AioConfig::block_size>, {4096, 1 << 30}, kAuto).when(uses_files),
    effect("aio.queue_depth", slot_of<&C::aio, &AioConfig::queue_depth>, {1, 4096}, kAuto).when(uses_files),
    effect("aio.intra_op_parallelism", slot_of<&C::aio, &AioConfig::intra_op_parallelism>, {1, 256}, kAuto).when(uses_files),
    effect("aio.checksum", slot_of<&C::aio, &AioConfig::checksum>).when(uses_files),
    ignored("aio.thread_count", "DeepSpeed itself does not read it; use aio.intra_op_parallelism"),
    ignored("aio.verbose", "DeepSpeed itself does not read it"),
    ignored("aio.num_threads", "DeepSpeed itself does not read it; use aio.intra_op_parallelism"),
    ignored("aio.single_submit", "requests are submitted to the kernel as they come"),
    ignored("aio.overlap_events", "requests always overlap"),
    not_yet("aio.use_gds", "[false]"),
    effect("pipeline.stages", slot_of<&C::pipeline, &PipelineConfig::stages>, {1, kDegree.high}, kAuto),
    effect("pipeline.schedule", slot_of<&C::pipeline, &PipelineConfig::schedule>).when(has_chunks),
    effect("pipeline.partition", slot_of<&C::pipeline, &PipelineConfig::partition>).when(has_chunks),
    effect("pipeline.virtual_stages", slot_of<&C::pipeline, &PipelineConfig::virtual_stages>, {1, 1024}),
    effect("pipeline.memory_limit", slot_of<&C::pipeline, &PipelineConfig::memory_limit>, kOpenShare).when(is_v),
    effect("pipeline.post_validate", slot_of<&C::pipeline, &PipelineConfig::post_validate>),
    alias("pipeline.activation_checkpoint_interval", "activation_checkpointing.interval"),
    ignored("pipeline.seed_layers", "every parameter has initial values of its own"),
    ignored("pipeline.pipe_partitioned", "stages send activations whole"),
    ignored("pipeline.grad_partitioned", "stages send gradients whole"),
    ignored("pipeline.use_reentrant", "there is one implementation of recomputation"),
    ignored("checkpoint.tag_validation", "every checkpoint is committed by all ranks together"),
    ignored("checkpoint.load_universal", "every checkpoint loads into any layout"),
    ignored("checkpoint.checkpoint_serialization", "checkpoints are HDF5"),
    not_yet("checkpoint.use_node_local_storage", "[false]"),
    harmless("checkpoint.parallel_write.pipeline_stage", "[false]", "every rank writes its part of a checkpoint"),
    ignored_section("checkpoint.writer",
                    "type decoupled io_buffer_size io_buffer_double show_statistics data_parallel io_multiplier",
                    "every rank writes its part of a checkpoint; save.async writes beside training"),
    not_yet_section("nebula", "enabled", "[false]",
                    "enabled enable_nebula_load nebula_load_path load_path persistent_storage_path persistent_time_interval "
                    "num_of_version_in_retention"),
    not_yet_section("datastates_ckpt", "", "[]", "host_cache_size"),
    not_yet_section("elasticity", "enabled", "[false]",
                    "enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time prefer_larger_batch "
                    "ignore_non_elastic_batch_info version num_gpus_per_node model_parallel_size"),
    harmless_section("autotuning", "enabled", "[false]",
                    "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric metric_path "
                    "tuner_type tuner_early_stopping tuner_num_trials arg_mappings max_train_batch_size min_train_batch_size "
                    "max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes mp_size "
                    "model_info model_info_path",
                     "a run uses the given configuration; ds-memreport --fit searches for one"),
    effect("tensor_parallel.tp_size", slot_of<&C::tensor_parallel, &TensorParallelConfig::tp_size>, kDegree),
    effect("tensor_parallel.sequence_parallel", slot_of<&C::tensor_parallel, &TensorParallelConfig::sequence_parallel>),
    effect("tensor_parallel.autotp_size", slot_of<&C::tensor_parallel, &TensorParallelConfig::autotp_size>, kDegree),
    alias("tensor_parallel.tp.tp_size", "tensor_parallel.tp_size"),
    not_yet("tensor_parallel.tp.tp_grain_size", "[1]"),
    ignored("tensor_parallel.dtype", "fp16.enabled and bf16.enabled choose the type"),
    not_yet("tensor_parallel.tp_overlap_comm", "[false]"),
    ignored("tensor_parallel.preset_model", "the model defines how its matrices are divided"),
    ignored("tensor_parallel.injection_policy_tuple", "the model defines how its matrices are divided"),
    ignored("tensor_parallel.partition_config", "the model defines how its matrices are divided"),
    ignored("tensor_parallel.keep_module_on_host", "each rank only ever has its own part"),
    ignored("tensor_parallel.replace_with_kernel_inject", "there is one set of kernels"),
    effect("expert_parallel.enabled", slot_of<&C::expert_parallel, &ExpertParallelConfig::enabled>),
    effect("expert_parallel.autoep_size", slot_of<&C::expert_parallel, &ExpertParallelConfig::size>, {1, kDegree.high}).when(has_expert_parallelism),
    effect("expert_parallel.room", slot_of<&C::expert_parallel, &ExpertParallelConfig::room>, {1, 1024}).when(has_expert_parallelism),
    effect("expert_parallel.further_rounds", slot_of<&C::expert_parallel, &ExpertParallelConfig::further_rounds>).when(has_expert_parallelism),
    not_yet("expert_parallel.expert_tensor_parallel_size", "[1]"),
    ignored("expert_parallel.preset_model", "the model's family says where its experts are"),
    ignored("expert_parallel.use_grouped_mm", "products of experts are always grouped"),
    ignored("expert_parallel.disable_triton_grouped_mm", "products of experts are always grouped"),
    harmless("expert_parallel.combine_impl", "[\"auto\"]", "there is one implementation"),
    ignored("expert_parallel.validate_folding_routing", "the ranks of tensor_parallel always route alike"),
    not_yet("expert_parallel.score_func", "[\"auto\"]", "the model's configuration chooses the router"),
    not_yet("expert_parallel.score_apply", "[\"auto\"]", "the model's configuration chooses the router"),
    not_yet("expert_parallel.top_k", "[\"auto\"]", "the model's configuration chooses the router"),
    not_yet("expert_parallel.routed_scaling_factor", "[\"auto\"]", "the model's configuration chooses the router"),
    not_yet("expert_parallel.route_norm", "[null]", "the model's configuration chooses the router"),
    not_yet("expert_parallel.route_scale", "[1.0]", "the model's configuration chooses the router"),
    not_yet("expert_parallel.num_expert_groups", "[null]", "the model's configuration chooses the router"),
    not_yet("expert_parallel.num_limited_groups", "[null]", "the model's configuration chooses the router"),
    not_yet("expert_parallel.load_balance_coeff", "[null]", "optimizer.router_bias_update_rate is the rate at which biases of routers move"),
    effect("use_data_before_expert_parallelism", slot_of<&C::expert_parallel, &ExpertParallelConfig::data_first>).when(has_expert_parallelism),
    not_yet_section("compile", "deepcompile", "[false]",
                    "deepcompile free_activation free_activation_threshold offload_activation offload_opt_states "
                    "offload_parameters double_buffer symmetric_memory debug_log sync_before_reduce sync_after_reduce "
                    "sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes "
                    "enabled disable backend kwargs offload_activation_pin_memory autoep_non_moe"),
    harmless("graph_harvesting", "[false]", "cuda.graphs records the passes through layers"),
    harmless_section("hybrid_engine", "enabled", "[false]",
                     "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size "
                     "enable_cuda_graph",
                     "the training engine generates text"),
    not_yet_section("progressive_layer_drop", "enabled", "[false]", "enabled theta gamma"),
    harmless_section("eigenvalue", "enabled", "[false]",
                     "enabled verbose max_iter tol stability gas_boundary_resolution layer_name layer_num model_name",
                     "only compression_training asks for it"),
    effect("diloco.enabled", slot_of<&C::optimizer, &OptimizerConfig::diloco, &DilocoConfig::enabled>),
    effect("diloco.workers", slot_of<&C::optimizer, &OptimizerConfig::diloco, &DilocoConfig::workers>, {1, kDegree.high}).when(has_diloco),
    effect("diloco.sync_every", slot_of<&C::optimizer, &OptimizerConfig::diloco, &DilocoConfig::sync_every>, kPositive).when(has_diloco),
    effect("diloco.outer_lr", slot_of<&C::optimizer, &OptimizerConfig::diloco, &DilocoConfig::outer_lr>, {0, 10}).when(has_diloco),
    effect("diloco.outer_momentum", slot_of<&C::optimizer, &OptimizerConfig::diloco, &DilocoConfig::outer_momentum>, kBelowOne).when(has_diloco),
    effect("diloco.nesterov", slot_of<&C::optimizer, &OptimizerConfig::diloco, &DilocoConfig::nesterov>).when(has_diloco),
    effect("diloco.fragments", slot_of<&C::optimizer, &OptimizerConfig::diloco, &DilocoConfig::fragments>, kPositive).when(has_diloco),
    effect("diloco.overlap_steps", slot_of<&C::optimizer, &OptimizerConfig::diloco, &DilocoConfig::overlap_steps>, {0, kMostCount}).when(has_diloco),
    effect("diloco.local_share", slot_of<&C::optimizer, &OptimizerConfig::diloco, &DilocoConfig::local_share>, kShare).when(has_diloco),
    effect("diloco.outer_gradient_bits", slot_of<&C::optimizer, &OptimizerConfig::diloco, &DilocoConfig::outer_gradient_bits>, {4, 32}).when(has_diloco),
    effect("curriculum_learning.enabled", slot_of<&C::curriculum, &CurriculumConfig::enabled>),
    not_yet("curriculum_learning.curriculum_type", R"(["seqlen"])", "only the length of sequences can grow"),
    effect("curriculum_learning.min_difficulty", slot_of<&C::curriculum, &CurriculumConfig::min_difficulty>, {1, 1 << 24}).when(curriculum_grows),
    effect("curriculum_learning.max_difficulty", slot_of<&C::curriculum, &CurriculumConfig::max_difficulty>, {1, 1 << 24}).when(curriculum_grows),
    effect("curriculum_learning.schedule_type", slot_of<&C::curriculum, &CurriculumConfig::schedule>).when(has_curriculum),
    effect("curriculum_learning.schedule_config.total_curriculum_step", slot_of<&C::curriculum, &CurriculumConfig::total_curriculum_step>, kPositive).when(curriculum_grows),
    effect("curriculum_learning.schedule_config.difficulty_step", slot_of<&C::curriculum, &CurriculumConfig::difficulty_step>, {1, 1 << 24}).when(curriculum_grows),
    effect("curriculum_learning.schedule_config.root_degree", slot_of<&C::curriculum, &CurriculumConfig::root_degree>, {1, 100}).when(curriculum_is_a_root),
    effect("curriculum_learning.schedule_config.difficulty", slot_of<&C::curriculum, &CurriculumConfig::difficulty>, {1, 1 << 24}).when(curriculum_is_a_list),
    effect("curriculum_learning.schedule_config.max_step", slot_of<&C::curriculum, &CurriculumConfig::max_step>, kPositive).when(curriculum_is_a_list),
    effect("data_efficiency.enabled", slot_of<&C::random_ltd, &RandomLtdConfig::data_efficiency>),
    ignored("data_efficiency.seed", "seed determines which tokens a layer keeps"),
    not_yet_section("data_efficiency.data_sampling", "enabled", "[false]",
                    "enabled num_epochs num_workers pin_memory curriculum_learning dynamic_batching",
                    "use curriculum_learning for growing sequences"),
    effect("data_efficiency.data_routing.enabled", slot_of<&C::random_ltd, &RandomLtdConfig::data_routing>).when(has_data_efficiency),
    effect("data_efficiency.data_routing.random_ltd.enabled", slot_of<&C::random_ltd, &RandomLtdConfig::enabled>).when(has_data_routing),
    effect("data_efficiency.data_routing.random_ltd.total_layer_num", slot_of<&C::random_ltd, &RandomLtdConfig::total_layer_num>, kPositive).when(gives_total_layers),
    effect("data_efficiency.data_routing.random_ltd.random_ltd_layer_num", slot_of<&C::random_ltd, &RandomLtdConfig::random_ltd_layer_num>, kPositive).when(gives_dropping_layers),
    effect("data_efficiency.data_routing.random_ltd.random_ltd_layer_id", slot_of<&C::random_ltd, &RandomLtdConfig::layers>, {0, kMostCount}).when(drops_tokens),
    ignored("data_efficiency.data_routing.random_ltd.model_mask_name", "the model defines the masks of its layers"),
    ignored("data_efficiency.data_routing.random_ltd.model_type", "the model says itself whether it is causal"),
    ignored("data_efficiency.data_routing.random_ltd.hidden_state_order", "there is one order of a layer's rows"),
    ignored("data_efficiency.data_routing.random_ltd.micro_batch_size", "DeepSpeed sets it itself"),
    ignored("data_efficiency.data_routing.random_ltd.global_batch_size", "DeepSpeed sets it itself"),
    effect("data_efficiency.data_routing.random_ltd.random_ltd_schedule.min_value", slot_of<&C::random_ltd, &RandomLtdConfig::min_value>, {1, 1 << 24}).when(drops_tokens),
    effect("data_efficiency.data_routing.random_ltd.random_ltd_schedule.max_value", slot_of<&C::random_ltd, &RandomLtdConfig::max_value>, {1, 1 << 24}).when(drops_tokens),
    not_yet("data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_type", R"(["fixed_linear"])", "DeepSpeed has no other"),
    effect("data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config.require_steps", slot_of<&C::random_ltd, &RandomLtdConfig::require_steps>, kPositive).when(drops_tokens),
    effect("data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config.seq_per_step", slot_of<&C::random_ltd, &RandomLtdConfig::seq_per_step>, {1, 1 << 24}).when(drops_tokens),
    not_yet_section("data_efficiency.data_routing.random_ltd.layer_token_lr_schedule", "enabled", "[false]",
                    "enabled total_layer_tokens warmup_type warmup_layer_tokens", "DeepSpeed does not have it either"),
    not_yet_section("compression_training",
                    "layer_reduction.enabled weight_quantization.shared_parameters.enabled "
                    "activation_quantization.shared_parameters.enabled sparse_pruning.shared_parameters.enabled "
                    "row_pruning.shared_parameters.enabled head_pruning.shared_parameters.enabled "
                    "channel_pruning.shared_parameters.enabled",
                    "[false]",
                    "layer_reduction weight_quantization activation_quantization sparse_pruning row_pruning head_pruning "
                    "channel_pruning"),
    not_yet_section("weight_quantization", "", "[]", "quantized_initialization post_init_quant"),
    ignored("fp16.opt_level", "it is a key of amp; DeepSpeed itself does not read it here"),
    ignored("fp16.fp16_scale_tolerance", "DeepSpeed itself does not read it"),
    ignored("inference_batch_size", "DeepSpeed itself does not read it"),
    ignored("log", "DeepSpeed itself does not read it; use steps_per_print"),
    ignored("cuda_visible_devices", "DeepSpeed itself does not read it; use the environment variable"),
    ignored("min_lr", "DeepSpeed itself does not read it; the scheduler has such a parameter"),
    ignored("find_unused_parameters", "DeepSpeed itself does not read it"),
    ignored("quantize_training", "DeepSpeed itself no longer reads it; compression_training replaces it"),
    ignored("fp16_opt_level", "it is a key of amp; DeepSpeed itself does not read it here"),
    ignored("tensor_parallel.tp.mpu", "the mesh places the ranks"),
    ignored("tensor_parallel.tp.tp_group", "the mesh places the ranks"),
    ignored("tensor_parallel.vocab_parallel_lm_head", "the head is always divided with the other matrices"),
    ignored("tensor_parallel.vocab_parallel_ce_backend", "there is one implementation of the loss of a divided vocabulary"),
    ignored("tensor_parallel.kernel_inject", "there is one set of kernels"),
    alias("tensor_parallel.tensor_parallel.tp_size", "tensor_parallel.tp_size"),
    ignored("comms_config", "DeepSpeed itself does not read it; use comms_logger"),
    ignored("monitor_config", "DeepSpeed itself does not read it; use tensorboard and csv_monitor"),
    refused("offload_optimizer", "belongs in zero_optimization: write zero_optimization.offload_optimizer"),
    refused("offload_param", "belongs in zero_optimization: write zero_optimization.offload_param"),
    refused("zero_optimization.aio", "belongs at the top level: write aio beside zero_optimization"),
    ignored("dataloader_drop_last", "the stream of samples wraps around, so no batch is ragged"),
    ignored("disable_allgather", "DeepSpeed itself does not read it"),
    ignored("vocabulary_size", "DeepSpeed itself only warns about it; the model has its own"),

    // Ours: the run.
    {.path = "model", .kind = KeyKind::Subtable},
    effect("steps", slot_of<&C::steps>, kPositive),
    effect("seed", slot_of<&C::seed>, {0, 4294967295}),
    effect("threads", slot_of<&C::threads>, {0, 4096}),
    effect("device", slot_of<&C::device>),
    effect("cuda.graphs", slot_of<&C::cuda, &CudaConfig::graphs>),
    effect("cuda.autotune", slot_of<&C::cuda, &CudaConfig::autotune>),
    effect("cuda.autotune_file", slot_of<&C::cuda, &CudaConfig::autotune_file>),
    effect("cuda.attention", slot_of<&C::cuda, &CudaConfig::attention>),
    effect("cuda.invariant_forward", slot_of<&C::cuda, &CudaConfig::invariant_forward>),
    effect("deterministic", slot_of<&C::deterministic>),
    effect("reduce_order", slot_of<&C::reduce_order>),
    effect("joined_products", slot_of<&C::joined_products>),
    effect("gradient_accumulation_fusion", slot_of<&C::gradient_accumulation_fusion>),
    effect("loss_norm", slot_of<&C::loss, &LossConfig::norm>),
    effect("label_smoothing", slot_of<&C::loss, &LossConfig::label_smoothing>, kBelowOne),
    effect("z_loss", slot_of<&C::loss, &LossConfig::z_loss>, kRate),
    effect("communication.backend", slot_of<&C::communication, &CommunicationConfig::backend>),
    effect("communication.timeout_s", slot_of<&C::communication, &CommunicationConfig::timeout_s>, kSeconds),
    effect("data.train", slot_of<&C::data, &DataConfig::train>),
    effect("data.validation", slot_of<&C::data, &DataConfig::validation>),
    effect("data.split", slot_of<&C::data, &DataConfig::split>, kBelowOne).when(has_no_validation_files),
    effect("data.weights", slot_of<&C::data, &DataConfig::weights>, kWeight),
    effect("data.tokenizer", slot_of<&C::data, &DataConfig::tokenizer>, {}, kAuto),
    effect("data.format", slot_of<&C::data, &DataConfig::format>),
    effect("data.token_dtype", slot_of<&C::data, &DataConfig::token_dtype>),
    effect("data.seq_length", slot_of<&C::data, &DataConfig::seq_length>, {1, 1 << 24}),
    effect("data.document_token", slot_of<&C::data, &DataConfig::document_token>, kToken).when(has_document_token),
    effect("data.document_token_at", slot_of<&C::data, &DataConfig::document_token_at>).when(token_begins_documents),
    effect("data.add_document_token", slot_of<&C::data, &DataConfig::add_document_token>).when(adds_document_token),
    effect("data.separate_documents", slot_of<&C::data, &DataConfig::separate_documents>).when(chooses_separation),
    effect("data.document_positions", slot_of<&C::data, &DataConfig::document_positions>).when(positions_continue),
    effect("data.loss_across_documents", slot_of<&C::data, &DataConfig::loss_across_documents>).when(no_loss_across_documents),
    effect("data.packing", slot_of<&C::data, &DataConfig::packing>),
    effect("data.chat_template.begin", slot_of<&C::data, &DataConfig::chat_template, &ChatTemplateConfig::begin>),
    effect("data.chat_template.system", slot_of<&C::data, &DataConfig::chat_template, &ChatTemplateConfig::system>),
    effect("data.chat_template.user", slot_of<&C::data, &DataConfig::chat_template, &ChatTemplateConfig::user>),
    effect("data.chat_template.assistant", slot_of<&C::data, &DataConfig::chat_template, &ChatTemplateConfig::assistant>),
    effect("data.chat_template.tool", slot_of<&C::data, &DataConfig::chat_template, &ChatTemplateConfig::tool>),
    effect("data.mlm.probability", slot_of<&C::data, &DataConfig::mlm, &MlmConfig::probability>, kOpenShare).when(masks_tokens),
    effect("data.mlm.mask_token", slot_of<&C::data, &DataConfig::mlm, &MlmConfig::mask_token>, kToken).when(masks_tokens),
    effect("data.mlm.cls_token", slot_of<&C::data, &DataConfig::mlm, &MlmConfig::cls_token>, kToken).when(masks_tokens),
    effect("data.mlm.sep_token", slot_of<&C::data, &DataConfig::mlm, &MlmConfig::sep_token>, kToken).when(masks_tokens),
    effect("data.seed", slot_of<&C::data, &DataConfig::seed>, {0, 4294967295}),
    effect("eval.every", slot_of<&C::eval, &EvalConfig::every>, kLimit),
    effect("eval.batches", slot_of<&C::eval, &EvalConfig::batches>),
    effect("save.every", slot_of<&C::save, &SaveConfig::every>, kLimit),
    effect("save.keep", slot_of<&C::save, &SaveConfig::keep>, kLimit),
    effect("save.async", slot_of<&C::save, &SaveConfig::async>),
    effect("save.on_error", slot_of<&C::save, &SaveConfig::on_error>),
};
// clang-format on

}  // namespace

std::span<const Key> config_keys() { return kKeys; }
std::span<const Key> param_group_keys() { return kGroupKeys; }

std::string_view schedule_name(PipelineSchedule schedule) noexcept {
  return enum_name(kEnumNames<PipelineSchedule>, u8(schedule));
}

std::span<const EnumName> scheduler_names() noexcept { return kEnumNames<SchedulerType>; }
std::string_view scheduler_name(SchedulerType type) noexcept { return enum_name(scheduler_names(), u8(type)); }

std::string_view sparse_attention_name(SparseAttentionMode mode) noexcept {
  return enum_name(kEnumNames<SparseAttentionMode>, u8(mode));
}

std::string_view granularity_name(CheckpointGranularity granularity) noexcept {
  return enum_name(kEnumNames<CheckpointGranularity>, u8(granularity));
}

}  // namespace ds
