// SPDX-License-Identifier: Apache-2.0
// Sharding with a model: pieces as the ranks of a mesh with tensor parallelism and pipeline stages save them.

#include <algorithm>
#include <unordered_map>

#include "base/json.h"
#include "checkpoint/hf_directory.h"
#include "checkpoint/match_weights.h"
#include "checkpoint/shard.h"
#include "checkpoint/tensor_state.h"
#include "config/model_config.h"
#include "config/parallel.h"
#include "model/models.h"
#include "pipeline/partition.h"
#include "zero/ownership.h"

namespace ds {

ModelConfig model_to_cut(const StateSource& state, const std::string& named) {
  const Json config = Json::parse(model_config_of(state, named));
  std::string why;
  if (const std::optional<ModelConfig> model = known_model(config, why)) return *model;
  if (why.empty()) {
    why = config.contains("architectures")
              ? fmt::format("the architecture {} is not supported", config["architectures"].dump())
              : "it does not name an architecture";
  }
  throw Error(
      Errc::Unavailable,
      fmt::format(
          "{}: --tp and --pp need a config.json of a supported model, but {}; --dp and --sp work with any model",
          state.path(), why));
}

Sharding shard_model(StateSource& state, const ModelConfig& config, const MeshShape& mesh, std::string_view partition,
                     const zero::LayoutOptions& options) {
  const auto fits = [](std::string_view option, const std::string& problem) {
    DS_CHECK(problem.empty(), Errc::Config, "{}: {}", option, problem);
  };
  fits("--tp", tp_problem(config, mesh.tp));
  fits("--pp", stages_problem(config, mesh.pp));

  // Which parameter of the state is which of the model.
  const std::unique_ptr<TensorSource> tensors = make_state_tensors(state, {});
  const model::Model whole = model::make_model(config, 1);
  const WeightMatch match = match_weights(whole, *tensors);
  DS_CHECK(match.unfit.empty(), Errc::Mismatch, "{} does not fit its config.json:\n  {}", state.path(),
           match.misfits(false));
  DS_CHECK(match.extra.empty(), Errc::Mismatch, "{} contains weights that its config.json does not have:\n  {}",
           state.path(), first_lines(match.extra, "\n  "));
  std::unordered_map<std::string_view, i64> numbers;
  for (size_t i = 0; i < state.params().size(); ++i) numbers.emplace(state.params()[i].name, narrow<i64>(i));
  const auto number_of = [&](const TensorInfo* t) { return numbers.at(t->name); };
  std::vector<std::vector<i64>> params_of;  // by parameter of the model; a tied one may stand under both of its names
  for (const TensorInfo* t : match.tensors) params_of.push_back({number_of(t)});
  for (const WeightMatch::Both& both : match.both_of_tie) {
    const auto own = std::ranges::find(match.tensors, both.own);
    DS_CHECK(both.alias->shape == both.own->shape, Errc::Mismatch, "{}: {} and {} are tied, but have different shapes",
             state.path(), both.alias->name, both.own->name);
    params_of[own - match.tensors.begin()].push_back(number_of(both.alias));
  }

  const std::vector<i64> cuts = pipeline::partition(partition, pipeline::layer_costs(whole), mesh.pp, "--partition");
  std::vector<model::Model> shards;
  for (int r = 0; r < mesh.tp; ++r) shards.push_back(model::make_model(config, 1, {.tp = mesh.tp, .tp_rank = r}));
  zero::LayoutOptions over_mesh = options;
  over_mesh.num_ranks = zero::num_shards(mesh);
  Sharding sharding{zero::Layout::make({}, over_mesh).id(), options.stage, mesh, {}};
  std::vector<bool> is_cut(state.params().size(), false);
  int rank = 0;
  for (const std::vector<zero::Piece>& pieces : zero::saved_pieces(shards, mesh, cuts, options)) {
    const std::vector<const model::ParamRow*> rows = shards[coord_of(mesh, rank++).tp].params();
    auto& mine = sharding.ranks.emplace_back();
    for (const zero::Piece& p : pieces) {
      for (const i64 param : params_of[p.param]) {
        mine.push_back({param, p.begin, p.count, rows[p.param]->slice});
        is_cut[param] = true;
      }
    }
  }
  // Tensors that are not parameters of the model (masks, the head of another task) go to the first rank.
  for (size_t i = 0; i < is_cut.size(); ++i) {
    const ParamEntry& p = state.params()[i];
    const i64 numel = p.tied_to.empty() && !is_cut[i] ? *checked_product(p.shape) : 0;
    if (numel > 0) sharding.ranks.front().push_back({narrow<i64>(i), 0, numel, {}});
  }
  return sharding;
}

}  // namespace ds
