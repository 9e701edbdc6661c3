// SPDX-License-Identifier: Apache-2.0
#include "zero/ownership.h"

#include <algorithm>
#include <iterator>

namespace ds::zero {

Units units_of(const model::Model& model) {
  Units units;
  units.emplace_back(model.shared);
  for (const auto& layer : model.layers) units.emplace_back(layer->rows());
  return units;
}

LayoutOptions balance_options(LayoutOptions options, const model::Model& model) {
  options.group = model.splits.size() + 1;
  options.stage = 0;
  options.tile_elems = 0;
  return options;
}

bool has_balances(const model::Model& model) noexcept {
  return std::ranges::any_of(model.params(), [](const model::ParamRow* row) { return row->balances >= 0; });
}

std::vector<bool> units_here(const model::Model& model, std::span<const LayerRange> layers) {
  const i64 num_layers = std::ssize(model.layers);
  std::vector<bool> here(static_cast<size_t>(unit_of(num_layers)), false);
  for (const LayerRange& range : layers) {
    for (i64 l = range.begin; l < range.end; ++l) here[unit_of(l)] = true;
    if (range.begin == 0 || range.end == num_layers) here[kSharedUnit] = true;
  }
  return here;
}

bool is_saved(const model::Model& model, const model::ParamRow& row, i64 param, bool has_first_layer) noexcept {
  return row.counted && (param >= std::ssize(model.shared) || has_first_layer);
}

std::vector<std::vector<Piece>> saved_pieces(std::span<const model::Model> shards, const MeshShape& mesh,
                                             std::span<const i64> cuts, LayoutOptions options) {
  DS_ASSERT(std::ssize(shards) == mesh.tp && std::ssize(cuts) == mesh.pp + 1);
  std::vector<std::vector<Piece>> ranks(static_cast<size_t>(mesh.world()));
  options.num_ranks = num_shards(mesh);
  MeshCoord at;
  for (at.tp = 0; at.tp < mesh.tp; ++at.tp) {
    const model::Model& model = shards[at.tp];
    const Units units = units_of(model);
    const std::vector<const model::ParamRow*> rows = model.params();
    for (at.pp = 0; at.pp < mesh.pp; ++at.pp) {
      const auto stage = static_cast<size_t>(at.pp);
      const LayerRange layers{cuts[stage], cuts[stage + 1]};
      options.here = units_here(model, {&layers, 1});
      std::vector<Layout> layouts = {Layout::make(units, options)};
      if (has_balances(model)) layouts.push_back(Layout::make(units, balance_options(options, model)));
      for (at.dp = 0; at.dp < mesh.dp; ++at.dp) {
        for (at.sp = 0; at.sp < mesh.sp; ++at.sp) {
          std::vector<Piece> pieces;
          for (const Layout& layout : layouts)
            std::ranges::copy(layout.owned_pieces(shard_rank(mesh, at)), std::back_inserter(pieces));
          std::ranges::stable_sort(pieces, {}, &Piece::param);
          std::erase_if(pieces,
                        [&](const Piece& p) { return !is_saved(model, *rows[p.param], p.param, layers.begin == 0); });
          ranks[rank_at(mesh, at)] = std::move(pieces);
        }
      }
    }
  }
  return ranks;
}

}  // namespace ds::zero
