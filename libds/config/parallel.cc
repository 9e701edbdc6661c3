// SPDX-License-Identifier: Apache-2.0
#include "config/parallel.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <cmath>
#include <vector>

#include "base/check.h"
#include "base/pattern.h"
#include "config/family.h"

namespace ds {
namespace {

constexpr std::string_view kStages = "pipeline.stages", kSchedule = "pipeline.schedule",
                           kVirtual = "pipeline.virtual_stages", kPartition = "pipeline.partition",
                           kLimit = "pipeline.memory_limit", kTp = "tensor_parallel.tp_size",
                           kAutoTp = "tensor_parallel.autotp_size", kRows = "tensor_parallel.sequence_parallel",
                           kSp = "sequence_parallel_size", kMode = "sequence_parallel_mode",
                           kGranularity = "activation_checkpointing.granularity",
                           kInterval = "activation_checkpointing.interval",
                           kCut = "activation_checkpointing.partition_activations",
                           kOffload = "activation_checkpointing.cpu_checkpointing",
                           kPath = "activation_checkpointing.nvme_path",
                           kBuffers = "activation_checkpointing.buffer_count",
                           kAccumulation = "gradient_accumulation_steps", kExperts = "expert_parallel.enabled",
                           kEp = "expert_parallel.autoep_size";

// "1, 2 or 4"
std::string any_of(const std::vector<i64>& values) {
  if (values.size() == 1) return fmt::format("{}", values[0]);
  return fmt::format("{} or {}", fmt::join(values.begin(), values.end() - 1, ", "), values.back());
}

// The multiples of `step` around x that are positive.
std::string multiples(i64 x, i64 step) {
  const i64 below = x / step * step;
  return below > 0 ? fmt::format("{} or {}", below, below + step) : fmt::format("{}", step);
}

// The degrees up to `most` that `fits`.
template <class F>
std::vector<i64> degrees(i64 most, F&& fits) {
  std::vector<i64> good;
  for (i64 n = 1; n <= std::min<i64>(most, 1024); ++n) {
    if (fits(n)) good.push_back(n);
  }
  return good;
}

constexpr std::string_view kType = "type:";  // of pipeline.partition

std::string partition_problem(const std::string& partition) {
  if (partition == "parameters" || partition == "uniform" || partition == "memory" || partition == "compute") return {};
  if (!partition.starts_with(kType) || partition == kType)
    return fmt::format("must be \"parameters\", \"uniform\", \"memory\", \"compute\" or \"type:REGEX\", not \"{}\"",
                       partition);
  return match_types(partition.substr(kType.size()), {}).problem;
}

// A plan looks at all layers for each stage, at all passes of all stages, and at stage 3 of ZeRO at each use of a
// layer: within these products that takes seconds.
void check_planned(const Config& c, bool passes, Reader& r) {
  constexpr i64 kMost = 2'000'000;
  const i64 layers = num_layers(c.model), p = c.pipeline.stages, v = c.pipeline.virtual_stages,
            m = c.batch.accumulation;
  if (p * layers > kMost)
    r.error(kStages,
            fmt::format("{} stages of {} layers are not planned: their product is at most {}", p, layers, kMost));
  if (!passes || r.broken(kAccumulation)) return;
  if (p * v * m > kMost && p * v > 1)
    r.error(kAccumulation, fmt::format("{} micro-batches in {} stages{} are not planned: their product is at most {}",
                                       m, p, v > 1 ? fmt::format(" of {} parts", v) : "", kMost));
  else if (c.zero.stage == 3 && m * layers > kMost)
    r.error(
        kAccumulation,
        fmt::format("{} micro-batches through {} layers, which ZeRO stage 3 gathers for each, are not planned: their "
                    "product is at most {}; a larger train_micro_batch_size_per_gpu needs fewer",
                    m, layers, kMost));
}

bool share(i64 things, i64 ranks) { return things % ranks == 0 || ranks % things == 0; }

// Why there is no schedule "zb-v" of these stages; empty: there is.
std::string v_problem(const PipelineConfig& c) {
  const i64 p = c.stages, least = least_kept_passes(p);
  const std::string_view name = schedule_name(c.schedule);
  if (p < 2) return fmt::format("{} {}: {} is {}, it takes 2 or more; \"1f1b\" takes 1", kSchedule, name, kStages, p);
  if (c.virtual_stages != 2)
    return fmt::format("{} {}: {} {} takes 2, one on the way down the stages and one on the way up", kVirtual,
                       c.virtual_stages, kSchedule, name);
  if (most_kept_passes(c) >= least) return {};
  const double share = std::ceil(1e4 * static_cast<double>(least) / static_cast<double>(2 * p)) / 1e4;
  return fmt::format("{} {}: {} {} of {} stages takes {} or more", kLimit, c.memory_limit, kSchedule, name, p, share);
}

// In how many parts sequences are cut.
i64 cuts_of(const Config& c) {
  const i64 s = c.sequence_parallel.size;
  return c.sequence_parallel.mode == SequenceParallelMode::Ring && s > 1 ? 2 * s : s;
}

}  // namespace

TypeMatch match_types(std::string_view regex, std::span<const std::string_view> types) {
  TypeMatch match;
  const std::string shown = fmt::format("\"{}{}\"", regex.substr(0, 60), regex.size() > 60 ? "..." : "");
  try {
    const Pattern pattern(regex, Pattern::Kind::Name);
    for (const std::string_view type : types) match.matches.push_back(pattern.find(type).has_value());
  } catch (const Error& e) {
    match.problem = e.code() == Errc::Config
                        ? fmt::format("{} is no regular expression: {}", shown, e.what())
                        : fmt::format("{} is not matched against the types of layers: {}", shown, e.what());
    return match;
  }
  if (!types.empty() && std::ranges::find(match.matches, true) == match.matches.end())
    match.problem = fmt::format("{} matches no layer; their types are {}", shown, fmt::join(types, ", "));
  return match;
}

// A share that was rounded down still means the passes that it was made of.
i64 most_kept_passes(const PipelineConfig& c) noexcept {
  return static_cast<i64>(std::floor(c.memory_limit * static_cast<double>(2 * c.stages) + 1e-3));
}

std::string schedule_problem(const PipelineConfig& c, i64 micro_batches) {
  const i64 p = c.stages, m = micro_batches;
  const std::string_view name = schedule_name(c.schedule);
  if (p < 1) return fmt::format("{} {}: there must be at least 1", kStages, p);
  if (m < 1) return fmt::format("{} {}: there must be at least 1", kAccumulation, m);
  if (c.virtual_stages < 1) return fmt::format("{} {}: there must be at least 1", kVirtual, c.virtual_stages);
  if (c.schedule == PipelineSchedule::ZeroBubbleV) return v_problem(c);
  if (c.schedule == PipelineSchedule::ZeroBubbleH2 && !c.post_validate)
    return fmt::format(
        "{} {}: pipeline.post_validate is false, and between two steps in which stages wait for each other it gains "
        "nothing over \"zb-h1\"; it takes true",
        kSchedule, name);
  const bool interleaved = c.schedule == PipelineSchedule::Interleaved;
  if (!interleaved && c.schedule != PipelineSchedule::BreadthFirst) {
    if (c.virtual_stages == 1) return {};
    return fmt::format("{} {}: {} {} takes 1; \"interleaved\" and \"breadth-first\" take more", kVirtual,
                       c.virtual_stages, kSchedule, name);
  }
  if (!interleaved && p > 1) {
    return fmt::format("{} {}: {} is {}, it takes 1; \"interleaved\" has chunks of several", kSchedule, name, kStages,
                       p);
  }
  if (interleaved && p < 2)
    return fmt::format("{} {}: {} is {}, it takes 2 or more; \"1f1b\" takes 1", kSchedule, name, kStages, p);
  if (c.virtual_stages < 2) {
    return fmt::format("{} {}: {} is {}, it takes 2 or more; \"1f1b\" takes 1", kSchedule, name, kVirtual,
                       c.virtual_stages);
  }
  if (!interleaved || m % p == 0) return {};
  return fmt::format("{} {}: {} {} is no multiple of the {} {}; {} would do", kSchedule, name, kAccumulation, m, p,
                     kStages, multiples(m, p));
}

std::string_view block_type(Family family) noexcept { return spec_of(family).block; }

std::array<std::string_view, 3> layer_types(Family family) noexcept {
  return {kEmbeddingType, block_type(family), kHeadType};
}

std::string stages_problem(const ModelConfig& m, i64 stages) {
  if (stages <= num_layers(m)) return {};
  return fmt::format(
      "{} parts are more than the {} layers (embedding and head among them); at most {} stages have a "
      "layer each",
      stages, num_layers(m), num_layers(m));
}

std::string length_problem(const Config& c, i64 length) {
  const i64 s = c.sequence_parallel.size, t = c.tensor_parallel.tp_size, cuts = cuts_of(c);
  if (length % cuts != 0)
    return fmt::format("{} tokens cannot be cut in {} parts ({} {}{}); {} would do", length, cuts, kSp, s,
                       cuts > s ? ", two chunks on each rank" : "", multiples(length, cuts));
  const i64 rows = c.batch.micro * (length / s);
  if (!c.tensor_parallel.sequence_parallel || rows % t == 0 || c.batch.micro <= 0) return {};
  return fmt::format(
      "the {} rows of a micro-batch (train_micro_batch_size_per_gpu {} x {} tokens) cannot be cut in {} parts; {} rows "
      "would do",
      rows, c.batch.micro, length / s, t, multiples(rows, t));
}

// The number of experts of a block that n ranks cannot share; 0: they can share all.
i64 unshared_experts(const ExpertsConfig& x, i64 n) {
  for (i64 l = 0; l < std::ssize(x.layers); ++l) {
    if (x.sparse(l) && x.count_of(l) % n != 0) return x.count_of(l);
  }
  return 0;
}

// The owner of a number of experts, as messages name it.
std::string_view owner_of(const ExpertsConfig& x) { return x.counts.empty() ? "the model's" : "a layer's"; }

std::string tp_problem(const ModelConfig& m, i64 tp) {
  // Matrices of experts are not cut.
  const bool dense = m.experts.count == 0 || std::ranges::find(m.experts.layers, false) != m.experts.layers.end();
  const i64 inner = dense ? m.intermediate : 0;
  const auto fits = [&](i64 n) {
    return m.heads % n == 0 && share(m.kv_heads, n) && inner % n == 0 && n <= m.vocab_size &&
           unshared_experts(m.experts, n) == 0 && m.experts.shared % n == 0 && !(m.whole_qk_norm && n > 1);
  };
  if (fits(tp)) return {};
  const std::string what = m.heads % tp != 0        ? fmt::format("the model's {} heads", m.heads)
                           : !share(m.kv_heads, tp) ? fmt::format("the model's {} key/value heads", m.kv_heads)
                           : inner % tp != 0        ? fmt::format("the model's intermediate size of {}", m.intermediate)
                           : unshared_experts(m.experts, tp) != 0
                               ? fmt::format("{} {} experts", owner_of(m.experts), unshared_experts(m.experts, tp))
                           : m.experts.shared % tp != 0
                               ? fmt::format("the shared expert's size of {}", m.experts.shared)
                           : m.whole_qk_norm ? std::string("the norm over all heads of queries and keys")
                                             : fmt::format("the vocabulary of {}", m.vocab_size);
  return fmt::format("{} cannot be shared by {} ranks; {} would do", what, tp, any_of(degrees(m.heads, fits)));
}

std::string ep_problem(const ModelConfig& model, i64 tp, i64 dp, i64 ep) {
  tp = std::max<i64>(tp, 1);
  const auto fits = [&](i64 n) { return unshared_experts(model.experts, tp * n) == 0 && dp % n == 0; };
  if (fits(ep)) return {};
  const i64 experts = unshared_experts(model.experts, tp * ep) / tp;
  const std::string what =
      dp % ep != 0 ? fmt::format("the {} data-parallel ranks are no multiple of it", dp)
      : tp > 1 ? fmt::format("the {} experts of each tensor-parallel rank cannot be shared by {} ranks", experts, ep)
               : fmt::format("{} {} experts cannot be shared by {} ranks", owner_of(model.experts), experts, ep);
  return fmt::format("{}; {} would do", what, any_of(degrees(dp, fits)));
}

i64 resolve_parallel(Config& c, i64 world, Reader& r) {
  // DeepSpeed has two names for it, and 0 for none.
  TensorParallelConfig& tp = c.tensor_parallel;
  tp.tp_size = std::max<i64>(tp.tp_size, 1);
  tp.autotp_size = std::max<i64>(tp.autotp_size, 1);
  if (tp.tp_size > 1 && r.given(kAutoTp) && tp.autotp_size > 1 && tp.autotp_size != tp.tp_size) {
    r.error(kAutoTp, fmt::format("{} contradicts {} {}, which is the same", tp.autotp_size, kTp, tp.tp_size));
    tp.tp_size = tp.autotp_size = 1;
  }
  tp.tp_size = tp.autotp_size = std::max(tp.tp_size, tp.autotp_size);
  ExpertParallelConfig& ep = c.expert_parallel;
  if (!ep.enabled) {
    for (const std::string_view key :
         {kEp, std::string_view("expert_parallel.room"), std::string_view("use_data_before_expert_parallelism")}) {
      if (r.given(key)) r.warning(key, fmt::format("has no effect: {} is false", kExperts));
    }
  }
  if (!ep.enabled) ep = {};
  if (c.pipeline.partition == "best") c.pipeline.partition = "parameters";
  // The default, given or not, stands for the chunks of the schedule.
  if (c.pipeline.schedule == PipelineSchedule::ZeroBubbleV && c.pipeline.virtual_stages == 1)
    c.pipeline.virtual_stages = 2;
  ActivationCheckpointingConfig& a = c.activation_checkpointing;
  using Granularity = CheckpointGranularity;
  const bool in_file = !a.nvme_path.empty();
  const bool layers =
      a.partition_activations || a.cpu_checkpointing || in_file || (r.given(kInterval) && a.interval > 0);
  if (!r.given(kGranularity) && layers) a.granularity = Granularity::Layer;
  if (a.interval == 0) {
    if (a.granularity == Granularity::Layer)
      r.error(kInterval, "0 keeps everything: the granularity for that is \"none\"");
    a.interval = 1;
  }
  if (layers && a.granularity != Granularity::Layer && !r.broken(kGranularity)) {
    const std::string_view key = a.partition_activations ? kCut
                                 : a.cpu_checkpointing   ? kOffload
                                 : in_file               ? kPath
                                                         : kInterval;
    r.error(key, fmt::format("is about inputs of layers, which {} \"layer\" keeps", kGranularity));
  }
  if (in_file && a.cpu_checkpointing)
    r.error(kPath, fmt::format("excludes {}: what is kept is in a file, or in host memory", kOffload));
  if (!in_file && r.given(kBuffers) && !r.broken(kBuffers))
    r.warning(kBuffers, fmt::format("has no effect: there is no {}", kPath));

  if (r.any_broken({kStages, kVirtual, kTp, kAutoTp, kSp})) return 1;
  const i64 p = c.pipeline.stages, t = c.tensor_parallel.tp_size, s = c.sequence_parallel.size;
  const i64 replica = p * t * s;
  if (world % replica == 0) {
    if (i64& size = c.expert_parallel.size; !trains(c.use) && world / replica % size != 0) {
      r.warning(kEp,
                fmt::format("{} has no effect: it does not divide the {} ranks with different samples that there are",
                            size, world / replica));
      size = 1;
    }
    return world / replica;
  }
  std::string product;
  for (const auto& [degree, key] : {std::pair{p, kStages}, {t, kTp}, {s, kSp}}) {
    if (degree > 1) product += fmt::format("{}{} {}", product.empty() ? "" : " x ", key, degree);
  }
  const std::string_view key = p > 1 ? kStages : t > 1 ? kTp : kSp;
  if (!trains(c.use)) {
    r.warning(key, fmt::format("{} has no effect: it does not divide the {} rank{} that there are, which do without",
                               product, world, world == 1 ? "" : "s"));
    c.pipeline = {};
    c.tensor_parallel = {};
    c.sequence_parallel.size = 1;
    c.sequence_parallel.mode = {};
    c.expert_parallel = {};
    return world;
  }
  r.error(key, fmt::format("{} does not divide the {} rank{} that there are; with {} ranks it works",
                           product.find(" x ") == product.npos ? fmt::format("{}", replica)
                                                               : fmt::format("{} = {}", product, replica),
                           world, world == 1 ? "" : "s", multiples(world, replica)));
  return 1;
}

namespace {

// Counts of tokens are added up in fp32, over the ranks and micro-batches of a step.
void check_global_counts(const Config& c, i64 dp, Reader& r) {
  constexpr i64 kExact = i64{1} << 24;
  const i64 s = c.sequence_parallel.size, samples = dp * c.batch.micro * c.batch.accumulation;
  if (!trains(c.use) || !c.model.experts.balances_over(BalanceOver::GlobalBatch)) return;
  if (c.cuda.graphs && dp * s > 1)
    r.error("cuda.graphs",
            "model.moe.loss_over \"global_batch\" adds up counts of tokens over ranks within a pass, which is not "
            "recorded; \"micro_batch\" would do",
            Errc::Unavailable);
  if (samples > kExact / std::max<i64>(c.data.seq_length, 1))
    r.error("model.moe.loss_over",
            fmt::format("\"global_batch\" counts the tokens of an expert exactly up to {}, and a step has {} x {} "
                        "tokens (samples x data.seq_length); \"micro_batch\" would do",
                        kExact, samples, c.data.seq_length),
            Errc::Unavailable);
}

}  // namespace

void check_parallel(const Config& c, i64 dp, Reader& r) {
  const bool has_steps = trains(c.use), passes = c.use != ConfigUse::Generate;
  const i64 t = c.tensor_parallel.tp_size, s = c.sequence_parallel.size, p = c.pipeline.stages;
  const bool ring = c.sequence_parallel.mode == SequenceParallelMode::Ring;
  if (passes && !r.any_broken({kStages, kSchedule, kVirtual, kLimit, kAccumulation}) && c.batch.accumulation > 0) {
    if (const std::string why = schedule_problem(c.pipeline, c.batch.accumulation); !why.empty()) {
      // The sentence begins with a key, which the diagnostic names.
      const size_t blank = why.find(' ');
      r.error(why.substr(0, blank), why.substr(blank + 1));
    }
  }
  if (const std::string why = partition_problem(c.pipeline.partition); !why.empty()) r.error(kPartition, why);
  if (p == 1 && has_steps && c.pipeline.schedule != PipelineSchedule::Interleaved &&
      c.pipeline.schedule != PipelineSchedule::ZeroBubbleV && c.pipeline.schedule != PipelineSchedule::BreadthFirst) {
    for (const std::string_view key : {kSchedule, kPartition}) {
      if (r.given(key)) r.warning(key, fmt::format("has no effect: {} is 1", kStages));
    }
  }
  if (r.given(kLimit) && !r.any_broken({kSchedule, kLimit}) && has_steps &&
      c.pipeline.schedule != PipelineSchedule::ZeroBubbleV)
    r.warning(kLimit, fmt::format("has no effect: {} is {}", kSchedule, schedule_name(c.pipeline.schedule)));
  if (c.tensor_parallel.sequence_parallel && t == 1 && has_steps)
    r.warning(kRows, fmt::format("has no effect: {} is 1", kTp));
  if (r.given(kMode) && s == 1 && has_steps) r.warning(kMode, fmt::format("has no effect: {} is 1", kSp));
  if (c.activation_checkpointing.partition_activations && has_steps && (t == 1 || c.tensor_parallel.sequence_parallel))
    r.warning(kCut, t == 1 ? fmt::format("has no effect: {} is 1", kTp)
                           : fmt::format("has no effect: {} cuts what is kept already", kRows));
  const bool breadth_first = p == 1 && c.pipeline.schedule == PipelineSchedule::BreadthFirst;
  if (breadth_first && c.activation_checkpointing.partition_activations && has_steps && t > 1 &&
      !c.tensor_parallel.sequence_parallel && c.activation_checkpointing.granularity == CheckpointGranularity::Layer)
    r.error(kCut,
            fmt::format("is not supported with {} \"breadth-first\": what is between chunks stays whole", kSchedule),
            Errc::Unavailable);
  if (c.cuda.graphs && t * s * c.expert_parallel.size > 1)
    r.error("cuda.graphs",
            "passes that talk to other ranks on the way are not recorded: tensor_parallel, "
            "sequence_parallel_size and expert_parallel exclude graphs",
            Errc::Unavailable);

  const ModelConfig& m = c.model;
  if (m.layers == 0) return;
  check_global_counts(c, dp, r);
  if (const i64 interval = c.activation_checkpointing.interval; passes && interval > m.layers && r.given(kInterval))
    r.warning(kInterval,
              fmt::format("{} is more than the model's {} layers, which are one group then", interval, m.layers));
  if (const i64 most = num_layers(m) / std::max<i64>(1, c.pipeline.virtual_stages),
      interval = c.activation_checkpointing.interval;
      has_steps && breadth_first && interval > std::max<i64>(1, most) && r.given(kInterval))
    r.warning(kInterval, fmt::format("{} layers are no group in {} chunks of {} or so: groups end where chunks do",
                                     interval, c.pipeline.virtual_stages, std::max<i64>(1, most)));
  // The layers of a program's model are not known before it is built (pipeline/partition).
  if (p > 1 && c.pipeline.partition.starts_with(kType) && !r.broken(kPartition) && !m.source) {
    const auto types = layer_types(m.family);
    const TypeMatch match = match_types(std::string_view(c.pipeline.partition).substr(kType.size()), types);
    if (!match.problem.empty()) r.error(kPartition, match.problem);
  }
  if (!r.any_broken({kStages, kVirtual})) {
    const i64 layers = num_layers(m), v = c.pipeline.virtual_stages;
    if (const std::string why = stages_problem(m, p); !why.empty()) {
      r.error(kStages, why);
    } else if (p * v > layers) {
      r.error(kVirtual,
              fmt::format("{} on each of {} stages are more than the {} layers (embedding and head among them); {}", v,
                          p, layers,
                          layers / p > 1 ? fmt::format("at most {} have a layer each", layers / p)
                                         : std::string("only schedules with 1 fit")));
    }
  }
  if (!r.any_broken({kStages, kVirtual})) check_planned(c, passes, r);
  if (!r.broken(kTp)) {
    if (const std::string why = tp_problem(m, t); !why.empty()) return r.error(kTp, why);
  }
  if (c.expert_parallel.enabled && c.expert_parallel.size == 1)
    r.warning(kExperts, fmt::format("has no effect: {} is 1", kEp));
  if (const i64 ep = c.expert_parallel.size; ep > 1 && !m.source && !r.any_broken({kTp, kEp})) {
    if (m.experts.count == 0 || std::ranges::find(m.experts.layers, true) == m.experts.layers.end()) {
      r.error(kEp, "the model has no block with experts");
    } else if (const std::string why = ep_problem(m, t, dp, ep); !why.empty()) {
      r.error(kEp, why);
    }
  }
  if (s == 1 || r.any_broken({kTp, kSp})) {
    // nothing is cut
  } else if (ring) {
    if (m.sliding_window > 0)
      r.error(kMode,
              "\"ring\" sends whole blocks of keys around, and the model's layers see a window of them: take "
              "\"ulysses\"",
              Errc::Unavailable);
  } else {
    const i64 heads = m.heads / t, kv_heads = std::max<i64>(m.kv_heads / t, 1);
    const auto fits_sp = [&](i64 n) { return heads % n == 0 && share(kv_heads, n); };
    if (!fits_sp(s))
      r.error(kSp,
              fmt::format("\"ulysses\" shares heads, and {} heads ({} of keys and values){} cannot be shared by {} "
                          "ranks; {} would do, or {} \"ring\"",
                          heads, kv_heads, t > 1 ? " of a tensor-parallel rank" : "", s,
                          any_of(degrees(heads, fits_sp)), kMode));
  }
  if (!passes || r.any_broken({kTp, kSp, "data.seq_length"})) return;
  if (const std::string why = length_problem(c, c.data.seq_length); !why.empty())
    r.error(c.data.seq_length % cuts_of(c) != 0 ? std::string_view("data.seq_length") : kRows, why);
}

}  // namespace ds
