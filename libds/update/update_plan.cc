// SPDX-License-Identifier: Apache-2.0
#include "update/update_plan.h"

#include <algorithm>

namespace ds::update {
namespace {

// The most elements that are received at once when gradients are summed after the data-parallel sums.
i64 exchange_elems(const UpdatePlan& plan) {
  i64 elems = 0;
  if (plan.embeds && !plan.projects) {
    const i64 slices = plan.dp().grads.keeps_own ? plan.dp().layout.num_ranks() : 1;
    for (const zero::Segment& s : plan.dp().grad_layout.segments_of(plan.shared_grads()))
      elems = std::max(elems, std::min(s.slice * slices, UpdatePlan::kExchangeElems));
  }
  for (const auto* exchanges : {&plan.combine.exchanges, &plan.combine_own.exchanges}) {
    for (const CombinePlan::Exchange& e : *exchanges) elems = std::max(elems, plan.exchange_of(e.width, e.elems));
  }
  return elems;
}

optim::LargestMatrix largest_of(std::span<const std::vector<zero::MatrixPlace>> of_shards) {
  optim::LargestMatrix largest;
  for (const auto& places : of_shards) {
    for (const zero::MatrixPlace& m : places) {
      largest.elems = std::max(largest.elems, m.rows * m.cols);
      largest.side = std::max(largest.side, std::min(m.rows, m.cols));
    }
  }
  return largest;
}

// Adds a piece to the exchanges of its width; the last of them may have room.
void add_to_exchanges(std::vector<CombinePlan::Exchange>& exchanges, const zero::Piece& whole, int width) {
  for (i64 first = 0; first < whole.count;) {
    auto last = std::ranges::find_if(exchanges, [&](const CombinePlan::Exchange& e) {
      return e.width == width && e.elems < UpdatePlan::kExchangeElems;
    });
    if (last == exchanges.end()) last = exchanges.insert(last, {.width = width});
    zero::Piece part = whole.part(first, std::min(whole.count - first, UpdatePlan::kExchangeElems - last->elems));
    first += part.count;
    last->elems += part.count;
    last->pieces.push_back(part);
  }
}

}  // namespace

i64 UpdatePlan::fragment_of(const zero::Piece& piece) const noexcept {
  i64 unit = 0;
  for (i64 end = std::ssize(rows.front()); piece.param >= end; end += std::ssize(rows[unit])) ++unit;
  return unit % diloco.fragments;
}

std::vector<optim::UpdateKind> UpdatePlan::update_kinds(i64 updates) const {
  for (const optim::ParamGroup& g : groups.groups) {
    if (g.averages_by_signs()) return g.update_kinds(updates);  // all trained groups average in the same updates
  }
  return {{1, updates}};
}

std::vector<i64> UpdatePlan::params_of(size_t group) const {
  std::vector<i64> of_group;
  for (size_t p = 0; p < groups.of_params.size(); ++p) {
    const i64 param = narrow<i64>(p);
    if (groups.of_params[p] == group && shards_of(param).has_param(param)) of_group.push_back(param);
  }
  return of_group;
}

GroupPieces UpdatePlan::pieces_of(size_t group) const {
  constexpr u32 kRoundingSites = 0x40000000u;  // other sites than those of initial values and dropout
  GroupPieces result;
  std::vector<i64> index(params.size(), -1);
  for (const i64 p : params_of(group)) index[p] = result.size.num_params++;
  result.size.largest = largest_of(matrices[group]);
  const auto collect = [&](std::vector<zero::TilePiece>& to, const std::vector<zero::Piece>& pieces, bool all) {
    for (const zero::Piece& piece : pieces) {
      const model::ParamRow& row = row_of(piece.param);
      const i64 at = index[piece.param];
      if (at < 0 || (!all && !row.counted)) continue;  // if ranks of tp hold copies, the first one counts
      to.push_back({.piece = piece,
                    .index = at,
                    .weight_decay = row.decay ? static_cast<float>(groups.groups[group].update.weight_decay) : 0,
                    .site = kRoundingSites + narrow<u32>(piece.param)});
    }
  };
  for (const zero::ShardsPlan& s : shards) {
    GroupPieces::Tiles& tiles = result.of.emplace_back();
    collect(tiles.held, s.layout.held_pieces(s.rank), true);
    collect(tiles.counted, s.layout.owned_pieces(s.rank), false);
  }
  return result;
}

MeshCoord UpdatePlan::fullest() const {
  const std::vector<i64> states = dp().states.bytes_of_ranks(dp().layout);
  const std::vector<SummedElems> summed = mesh.tp > 1 ? summed_of_ranks() : std::vector<SummedElems>();
  MeshCoord most = coord;
  std::pair<i64, i64> largest = {-1, -1};  // elements held, elements sent
  for (int d = 0; d < mesh.dp && !(states.empty() && summed.empty()); ++d) {
    for (int s = 0; s < mesh.sp; ++s) {
      const MeshCoord at{.dp = d, .pp = coord.pp, .tp = coord.tp, .sp = s};
      const auto rank = static_cast<size_t>(zero::shard_rank(mesh, at));
      std::pair<i64, i64> own = {0, 0};
      if (!summed.empty()) {
        for (const auto& [width, elems] : summed[rank])
          own = {std::max(own.first, exchange_of(width, elems) * 4), own.second + elems};
      }
      if (!states.empty()) own.first += states[rank];
      if (own > largest) most = at;
      largest = std::max(largest, own);
    }
  }
  return most;
}

std::vector<UpdatePlan::SummedElems> UpdatePlan::summed_of_ranks() const {
  const zero::Layout& layout = dp().layout;
  std::vector<SummedElems> elems(static_cast<size_t>(layout.num_ranks()));
  if (mesh.tp == 1) return elems;
  for (const zero::RowPlace& row : layout.places()) {
    const int width = params[row.param]->also_summed;
    if (width == 1 || !is_trained(row.param)) continue;
    const i64 slice = layout.segments()[row.segment].slice, end = row.offset + row.numel;
    for (i64 at = row.offset; at < end;) {
      const i64 rank = at / slice, next = std::min((rank + 1) * slice, end);
      elems[rank][width] += next - at;
      at = next;
    }
  }
  return elems;
}

namespace {

// Rows that lie directly after earlier ones come after them here, too: neighbours in memory are neighbours.
void add_in_memory_order(std::vector<zero::Piece>& pieces, const zero::Piece& piece, const model::ParamRow& row,
                         const zero::Layout& layout) {
  const i64 unit = layout.segments()[piece.segment].unit;
  if (row.after < 0 || layout.is_tile(unit)) return pieces.push_back(piece);
  const i64 first = layout.units()[unit].first_param, after = first + row.after;
  // No further back than to the first piece of the unit.
  const auto end = std::find_if(pieces.rbegin(), pieces.rend(), [&](const zero::Piece& p) { return p.param < first; });
  const auto at = std::find_if(pieces.rbegin(), end, [&](const zero::Piece& p) { return p.param == after; });
  pieces.insert(at == end ? pieces.end() : at.base(), piece);
}

CombinePlan combine_plan(const UpdatePlan& plan, bool own) {
  CombinePlan combine;
  for (const zero::ShardsPlan& s : plan.shards) {
    const std::vector<i64> bases = zero::grad_accum_bases(s.grad_layout, s.grads, s.rank);
    const auto place = [&](const zero::Piece& p) { return bases[s.grad_segment(p.segment)] + p.segment_offset; };
    std::vector<zero::Piece> judged;
    for (const zero::Piece& piece : own ? s.layout.whole_pieces() : s.layout.owned_pieces(s.rank)) {
      const model::ParamRow& row = plan.row_of(piece.param);
      if (!row.trained) continue;
      if (row.also_summed > 1) add_to_exchanges(combine.exchanges, piece, row.also_summed);
      // Gradients that are left on their ranks become terms of a mean over the ranks that reduce them.
      const i64 terms = own ? s.layout.num_ranks() : 1, of_all = own ? plan.dp().layout.num_ranks() : 1;
      const i64 divisor = row.divisor == 0 ? plan.mesh.dp : row.divisor;
      if (const i64 up = plan.mesh.dp * terms, down = divisor * of_all; up != down)
        combine.scaled.push_back({piece, static_cast<float>(up) / static_cast<float>(down)});
      if (plan.judges(piece)) add_in_memory_order(judged, piece, row, s.layout);
    }
    // The kernels handle neighbours in one call.
    i64 end = -1;
    for (const zero::Piece& piece : judged) {
      if (place(piece) == end) {
        combine.judged.back().count += piece.count;
      } else {
        combine.judged.push_back(piece);
      }
      end = place(piece) + piece.count;
    }
  }
  return combine;
}

void plan_optimizers(UpdatePlan& plan) {
  for (size_t g = 0; g < plan.groups.groups.size(); ++g) {
    const optim::ParamGroup& group = plan.groups.groups[g];
    auto& matrices = plan.matrices.emplace_back();
    if (group.needs_matrices()) {
      for (const i64 param : plan.params_of(g)) {
        const model::ParamRow& row = plan.row_of(param);
        // Ranks of tp have all parts of a matrix; ranks of dp may have different matrices of a batch.
        DS_CHECK(
            !zero::cuts_matrices(row) || row.numel() * plan.mesh.tp >= row.whole_numel(), Errc::Config,
            "optimizer: Muon needs the matrices of {} whole, and ranks of dp have parts of them: the parameter must "
            "have a dim for what they divide",
            row.name);
        DS_CHECK(plan.shards_of(param).layout.tiles_of(param).empty(), Errc::Unavailable,
                 "zero_optimization.stage3_tile_size: Muon needs {} whole: its matrices cannot be in tiles", row.name);
      }
      for (const zero::ShardsPlan& s : plan.shards) {
        matrices.push_back(zero::plan_matrices(s.layout, plan.rows, plan.params_of(g)));
        const zero::MatrixMemory memory = zero::matrix_memory(matrices.back(), plan.mesh.tp);
        plan.matrix_memory.whole = std::max(plan.matrix_memory.whole, memory.whole);
        plan.matrix_memory.slices = std::max(plan.matrix_memory.slices, memory.slices);
      }
    }
    const optim::GroupSize size{std::ssize(plan.params_of(g)), largest_of(matrices)};
    plan.optimizer_workspace += optim::workspace_bytes(group, size);
  }
}

}  // namespace

void plan_update(UpdatePlan& plan) {
  plan.combine = combine_plan(plan, false);
  if (plan.dp().grads.keeps_own) plan.combine_own = combine_plan(plan, true);
  for (const zero::ShardsPlan& s : plan.shards) {
    for (const zero::Piece& piece : s.layout.owned_pieces(s.rank)) {
      if (plan.diloco.enabled && plan.judges(piece)) plan.outer_judged.push_back(piece);
    }
  }
  plan_optimizers(plan);
  plan.exchange_elems = exchange_elems(plan);
}

}  // namespace ds::update
