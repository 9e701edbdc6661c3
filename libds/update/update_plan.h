// SPDX-License-Identifier: Apache-2.0
#pragma once
// What is known before a run of the end of a step: who owns which parameters and gradients, which of them are updated
// alike, what is summed beside the groups' own sums, which matrices are brought together. Pure; RunPlan has it.

#include <algorithm>
#include <map>
#include <span>
#include <vector>

#include "mesh/mesh.h"
#include "optim/optimizer.h"
#include "zero/matrix_exchange.h"
#include "zero/shards.h"

namespace ds::update {

// What a rank has of the parameters that are updated alike.
struct GroupPieces {
  optim::GroupSize size;
  struct Tiles {
    std::vector<zero::TilePiece> held;     // which it updates
    std::vector<zero::TilePiece> counted;  // in sums over whole parameters: each element is one rank's
  };
  std::vector<Tiles> of;  // by UpdatePlan::shards
};

// What is done with gradients when each group has summed its own, but for the tied matrix: which of this rank's pieces
// are summed over tp, which are divided otherwise, and which count in the norm.
struct CombinePlan {
  // Over `width` ranks of tp side by side; as much as is exchanged at once.
  struct Exchange {
    int width = 1;
    i64 elems = 0;
    std::vector<zero::Piece> pieces = {};
  };
  struct Scaled {
    zero::Piece piece;
    float factor;
  };
  std::vector<Exchange> exchanges;
  std::vector<Scaled> scaled;
  std::vector<zero::Piece> judged;  // of several parameters where their accumulators lie side by side
};

struct UpdatePlan {
  MeshShape mesh;
  MeshCoord coord;
  bool embeds = false, projects = false;  // has the model's first layer, and its last
  // Units: Model::shared, then layer by layer; of gradients once more shared, for its use by the head.
  std::vector<std::span<const model::ParamRow>> rows, grad_rows;
  std::vector<const model::ParamRow*> params;  // by number
  std::vector<bool> saved;                     // by number: zero::is_saved
  std::vector<zero::ShardsPlan> shards;        // by ParamRow::group: of dp, of the model's splits of it
  CombinePlan combine;
  std::vector<zero::Piece> outer_judged;                 // what counts in the norm, by its fragment
  CombinePlan combine_own;                               // of gradients that ranks of dp have not summed, whole
  optim::Groups groups;                                  // of parameters that are updated alike
  bool stochastic_masters = false;                       // optim::UpdateContext
  DilocoConfig diloco;                                   // an optimizer around theirs
  i64 optimizer_workspace = 0;                           // bytes
  std::vector<std::vector<zero::MatrixPlace>> matrices;  // by group, of those that need them
  zero::MatrixMemory matrix_memory;                      // of the largest
  i64 exchange_elems = 0;  // fp32, of sums of gradients over pipeline stages and the tensor-parallel group at once

  const zero::ShardsPlan& dp() const noexcept { return shards.front(); }
  int dp_rank() const noexcept { return dp().rank; }
  const model::ParamRow& row_of(i64 param) const noexcept { return *params[param]; }
  const zero::ShardsPlan& shards_of(i64 param) const noexcept { return shards[row_of(param).group]; }
  // Elements of rows whose gradients are also summed over tp, in the slices that each rank of dp owns, of which there
  // may be a million; by how many ranks share a sum.
  using SummedElems = std::map<int, i64>;
  std::vector<SummedElems> summed_of_ranks() const;
  // The rank of dp that holds most of what ranks of dp differ in: states that not every parameter has alike, sums over
  // tp. All of them share this rank's stage and part of tp.
  MeshCoord fullest() const;
  // What an exchange of such sums holds: where not all ranks of tp share one, each rank gets all that is exchanged.
  i64 exchange_of(int width, i64 elems) const noexcept {
    return std::min(elems, kExchangeElems) * (width == mesh.tp ? 1 : mesh.tp);
  }
  // The parameters of a group that the ranks of dp and tp have here, pieces or copies of them; and what this rank has.
  std::vector<i64> params_of(size_t group) const;
  GroupPieces pieces_of(size_t group) const;
  // Whether this rank saves a parameter and counts its gradient: no rank before it has the same.
  bool counts(const zero::Piece& piece) const noexcept { return saved[piece.param]; }
  // The same of what is trained: its gradient is in the norm.
  bool judges(const zero::Piece& piece) const noexcept { return counts(piece) && !groups.frozen(piece.param); }
  // Sums of gradients over stages and over tp go in parts of so many elements, so that what they take is bounded.
  static constexpr i64 kExchangeElems = i64{1} << 20;
  // Calls visit(begin, count) for each part of so many elements.
  static void for_each_exchange(i64 elems, auto&& visit) {
    for (i64 begin = 0; begin < elems; begin += kExchangeElems) visit(begin, std::min(kExchangeElems, elems - begin));
  }
  static constexpr i64 kSharedUnit = zero::kSharedUnit;
  static constexpr i64 unit_of(i64 layer) noexcept { return zero::unit_of(layer); }
  // A matrix that a layer's products have in tiles, if they do: by its place among the layer's rows; and its gradient.
  std::span<const zero::MatrixTile> tiles_of(i64 layer, size_t row) const noexcept {
    return shards[rows[unit_of(layer)][row].group].layout.tiles_of(param_of(layer, row));
  }
  std::span<const zero::MatrixTile> grad_tiles_of(i64 layer, size_t row) const noexcept {
    return shards[rows[unit_of(layer)][row].group].grad_layout.tiles_of(param_of(layer, row));
  }
  i64 param_of(i64 layer, size_t row) const noexcept {
    return dp().layout.units()[unit_of(layer)].first_param + static_cast<i64>(row);
  }
  // Which of DilocoConfig's fragments a parameter belongs to: units take turns.
  i64 fragment_of(const zero::Piece& piece) const noexcept;
  i64 head_use() const noexcept { return std::ssize(rows); }  // the unit of gradients of shared in the head
  bool tied() const noexcept { return !rows[0].empty(); }
  // Whether the ranks of dp leave their gradients apart in the update of that number: the optimizer averages what it
  // makes of them. Then these are whole on every rank.
  bool keeps_gradients_apart(i64 step) const noexcept {
    return std::ranges::any_of(groups.groups, [&](const optim::Group& g) { return g.phase(step).local_gradients; });
  }
  // Whether ranks of dp may have parameters of their own for some updates.
  bool steps_apart() const noexcept { return std::ranges::any_of(groups.groups, &optim::Group::takes_local_steps); }
  // Those of a run that differ in what they send, but for DiLoCo's meetings.
  std::vector<optim::UpdateKind> update_kinds(i64 updates) const;
  // Where the gradient of shared is summed, on the stages that have it.
  i64 shared_grads() const noexcept { return embeds ? kSharedUnit : head_use(); }
};

// Fills in, of a plan that has shards and groups, all of the update. Throws Errc::Config where an optimizer cannot have
// what it needs.
void plan_update(UpdatePlan& plan);

}  // namespace ds::update
