// SPDX-License-Identifier: Apache-2.0
#include "model/models.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <span>

#include "config/parallel.h"
#include "model/attention_pattern.h"
#include "model/slice.h"
#include "model/token_dropping.h"

namespace ds::model {
namespace {

// The layers of each family.
constexpr std::pair<Family, Model (*)(const ModelConfig&, const Shard&)> kMakers[] = {
    {Family::Gpt2, make_gpt2},        {Family::Llama, make_llama},      {Family::Qwen2, make_llama},
    {Family::Qwen3, make_llama},      {Family::Mixtral, make_llama},    {Family::Olmoe, make_llama},
    {Family::Qwen2Moe, make_llama},   {Family::Qwen3Moe, make_llama},   {Family::Glm4Moe, make_llama},
    {Family::DeepseekV2, make_llama}, {Family::DeepseekV3, make_llama}, {Family::Bert, make_bert}};

Model make_family(const ModelConfig& config, const Shard& shard) {
  for (const auto& [family, make] : kMakers) {
    if (family != config.family) continue;
    Model m = make(config, shard);
    for (ParamRow& row : m.shared) row.packs = true;
    return m;
  }
  throw Error(Errc::Internal, "no such family of models");
}

// The blocks multiply in FP8; embedding and head do not.
void use_fp8(Model& m, const Fp8Config& fp8) {
  std::vector<std::string> problems;
  const DType gradients = fp8.gradients == Fp8Gradients::E5M2 ? DType::F8E5M2 : DType::F8E4M3;
  for (const auto& layer : m.layers) {
    if (!layer->is_block()) continue;
    const size_t before = m.fp8.size();
    layer->multiply_in_fp8(gradients, m.fp8, problems);
    DS_CHECK(m.fp8.size() > before, Errc::Unavailable, "fp8.enabled: the block {} has no linear map of ds/linear.h",
             layer->name());
  }
  if (problems.empty()) return;
  constexpr size_t kShown = 8;  // a model of many blocks repeats them
  const size_t shown = std::min(problems.size(), kShown);
  const std::string more = problems.size() > shown ? fmt::format(", and {} more", problems.size() - shown) : "",
                    ranks =
                        m.shard.tp > 1 ? fmt::format(" on each of the {} ranks of tensor_parallel", m.shard.tp) : "";
  throw Error(Errc::Config, fmt::format("fp8.enabled: scales are for {0} x {0} elements of a matrix, so the inputs and "
                                        "outputs of a linear map must be multiples of {0}{1}; these [inputs, outputs] "
                                        "are not: {2}{3}",
                                        kFp8Block, ranks, fmt::join(std::span(problems).first(shown), ", "), more));
}

// The code of a program may be wrong, and what runs the model relies on all of this.
void check_program_model(const Model& m, const ModelConfig& config) {
  const std::string name = config.source->identity();
  const auto check = [&](bool is_good, std::string_view why) {
    DS_CHECK(is_good, Errc::Config, "the program's model \"{}\": {}", name, why);
  };
  check(std::ranges::none_of(m.layers, [](const auto& layer) { return layer == nullptr; }), "a layer is null");
  check(std::ssize(m.layers) == num_layers(config),
        fmt::format("it has {} layers, and {} blocks between an embedding and a head are {}", m.layers.size(),
                    config.layers, num_layers(config)));
  for (const auto& layer : m.layers) {
    const bool is_end = layer == m.layers.front() || layer == m.layers.back();
    check(layer->num_counts() == 0 || layer->num_counts() > RouterStats::kReport,
          fmt::format("layer {} counts {} numbers, of which the last {} are of its router", layer->name(),
                      layer->num_counts(), RouterStats::kReport));
    check(layer->is_block() != is_end, fmt::format("layer {} {}", layer->name(),
                                                   is_end ? "begins or ends the model, and is a block"
                                                          : "lies between embedding and head, and is no block"));
  }
  check(m.shared.size() <= 1, "more than one matrix is shared by embedding and head");
  std::set<std::string_view> names;
  for (const ParamRow* row : m.params()) {
    check(!row->name.empty() && names.insert(row->name).second,
          fmt::format("two parameters are called \"{}\", or one has no name", row->name));
    check(!row->shape.empty() && std::ranges::min(row->shape) > 0, fmt::format("{} has no elements", row->name));
    const std::string why = row->slice.whole() ? "" : slice_problem(row->slice, row->whole);
    check(why.empty(), fmt::format("the slice of {}: {}", row->name, why));
    check(row->slice.whole() || local_shape(row->slice, row->whole) == row->shape,
          fmt::format("the shape of {} is not that of its slice", row->name));
  }
  for (const Tie& tie : m.ties)
    check(names.contains(tie.name) && !names.contains(tie.alias),
          fmt::format("{} is no second name of a parameter {}", tie.alias, tie.name));
}

}  // namespace

Shard shard_of(const Config& config, const MeshShape& mesh, const MeshCoord& coord) {
  const ExpertParallelConfig& experts = config.expert_parallel;
  const int ep = narrow<int>(experts.size), copies = mesh.dp / ep;
  const bool counts = trains(config.use) && config.model.experts.balances_over(BalanceOver::GlobalBatch);
  return {
      .tp = mesh.tp,
      .tp_rank = coord.tp,
      .sequence = config.tensor_parallel.sequence_parallel && mesh.tp > 1,
      .sp = mesh.sp,
      .sp_rank = coord.sp,
      .mode = config.sequence_parallel.mode == SequenceParallelMode::Ring ? SequenceMode::Ring : SequenceMode::Ulysses,
      .ep = ep,
      .ep_rank = experts.data_first ? coord.dp / copies : coord.dp % ep,
      .expert_copies = copies,
      .copies_first = experts.data_first,
      .expert_room = experts.room,
      .expert_rounds = experts.further_rounds,
      .counting = counts ? mesh.dp * mesh.sp : 1,
      .counting_rank = counts ? coord.dp * mesh.sp + coord.sp : 0};
}

std::vector<DpSplit> expert_splits(const Shard& shard) {
  if (shard.ep == 1) return {};
  const int inner = shard.copies_first ? shard.expert_copies : shard.ep;
  const auto copies = shard.copies_first ? DpSplit::Along::Inner : DpSplit::Along::Outer,
             experts = shard.copies_first ? DpSplit::Along::Outer : DpSplit::Along::Inner;
  return {{"edp", inner, copies}, {std::string(axis_name(Axis::Ep)), inner, experts}};
}

Model make_model(const ModelConfig& config, i64 seq_length, const Shard& shard) {
  DS_CHECK(seq_length <= config.max_positions || config.any_length(), Errc::Config,
           "data.seq_length {} exceeds the model's {} positions", seq_length, config.max_positions);
  Model m = config.source ? config.source->make(config, shard) : make_family(config, shard);
  if (config.source) check_program_model(m, config);
  DS_ASSERT(std::ssize(m.layers) == num_layers(config));
  m.shard = shard;
  if (config.experts.count > 0) m.splits = expert_splits(shard);
  m.vocab = config.vocab_size;
  m.hidden = config.hidden;
  m.num_heads = config.heads;
  m.head_dim = config.head_dim;
  m.value_dim = config.value_dim();
  m.causal = config.causal();
  m.token_types = config.token_types;
  return m;
}

Model make_model(const Config& config, const Shard& shard) {
  return make_model(config, shard, {.sequence = config.data.seq_length});
}

Model make_model(const Config& config, const Shard& shard, const PassLengths& lengths) {
  Model m = make_model(config.model, lengths.sequence, shard);
  if (config.fp8.enabled) use_fp8(m, config.fp8);
  if (const RandomLtdConfig& ltd = config.random_ltd; ltd.on() && trains(config.use)) {
    i64 block = -1;  // its number among the blocks
    for (size_t l = 0; l < m.layers.size(); ++l) {
      if (!m.layers[l]->is_block() || std::ranges::find(ltd.layers, ++block) == ltd.layers.end()) continue;
      m.layers[l] = drop_tokens(std::move(m.layers[l]), {.number = static_cast<i64>(l),
                                                         .hidden = m.hidden,
                                                         .kept = lengths.kept > 0 ? lengths.kept : lengths.sequence,
                                                         .most = ltd.max_value,
                                                         .documents = config.data.separate_documents});
    }
  }
  if (config.sparse_attention.mode == SparseAttentionMode::None) return m;
  m.layout = attention_layout_of(config);
  std::set<i64> windows;
  for (const auto& layer : m.layers) {
    if (const CacheShape cache = layer->cache(); !cache.arrays.empty()) windows.insert(cache.window);
  }
  for (const i64 window : windows)
    AttentionPattern(m.layout, m.layout->block(), config.data.seq_length, true, window).check_rows();
  return m;
}

}  // namespace ds::model
