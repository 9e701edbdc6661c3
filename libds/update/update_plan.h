// SPDX-License-Identifier: Apache-2.0
#pragma once
// The plan of the end of a step, made before a run: which rank owns which parameters and gradients, which parameters
// are updated alike, which sums are made after the groups' own, which matrices are gathered whole. Pure; RunPlan
// extends it.

#include <algorithm>
#include <map>
#include <span>
#include <vector>

#include "mesh/mesh.h"
#include "optim/optimizer.h"
#include "zero/matrix_exchange.h"
#include "zero/shards.h"

namespace ds::update {

// A rank's pieces of the parameters that are updated alike.
struct GroupPieces {
  optim::GroupSize size;
  struct Tiles {
    std::vector<zero::TilePiece> held;     // the pieces that this rank updates
    std::vector<zero::TilePiece> counted;  // the pieces that it adds to sums over whole parameters: each element once
  };
  std::vector<Tiles> of;  // by UpdatePlan::shards
};

// How gradients are completed after each group has summed its own, except for the tied matrix: which of this rank's
// pieces are summed over tp, which have another divisor, and which count in the norm.
struct CombinePlan {
  // A sum over `width` ranks of tp side by side, of pieces that are exchanged at once.
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
  std::vector<zero::Piece> judged;  // one piece for several parameters if their sums lie side by side
};

// A balancing bias that steps move, whole, and where the tokens of its experts are among those that are counted.
struct BalancedRouter {
  zero::Piece bias;
  i64 counts = 0;
};

struct UpdatePlan {
  MeshShape mesh;
  MeshCoord coord;
  bool embeds = false, projects = false;  // has the model's first layer, and its last
  int first_stage = 0, last_stage = 0;    // the pipeline stages that have them
  // If a matrix is tied between two stages, the last one sends its use of it before its step ends
  // (pipeline::use_complete_after).
  bool sends_use_ahead = false;
  // Units: Model::shared, then layer by layer; of gradients once more shared, for its use by the head.
  std::vector<std::span<const model::ParamRow>> rows, grad_rows;
  std::vector<const model::ParamRow*> params;  // by number
  std::vector<bool> saved;                     // by number: zero::is_saved
  // By ParamRow::group: dp, then the model's splits of it, and then, if there are any, balancing biases.
  std::vector<zero::ShardsPlan> shards;
  std::vector<BalancedRouter> balances;  // those that this rank has
  float router_bias_rate = 0;
  CombinePlan combine;
  std::vector<zero::Piece> outer_judged;  // pieces that count in the norm of DiLoCo's gradients
  CombinePlan combine_own;                // for gradients that are left on their ranks, whole
  optim::ParamGroups groups;              // groups of parameters that are updated alike
  bool stochastic_masters = false;        // optim::UpdateContext
  DilocoConfig diloco;                    // the outer optimizer
  i64 optimizer_workspace = 0;            // bytes
  // By group of parameters and by shards; empty if the group's optimizer needs none.
  std::vector<std::vector<std::vector<zero::MatrixPlace>>> matrices;
  zero::MatrixMemory matrix_memory;  // the maximum over groups
  i64 exchange_elems = 0;            // fp32 elements of gradients that are exchanged at once over pipeline stages or tp

  const zero::ShardsPlan& dp() const noexcept { return shards.front(); }
  int dp_rank() const noexcept { return dp().rank; }
  const model::ParamRow& row_of(i64 param) const noexcept { return *params[param]; }
  // The dtype of a parameter between updates, but for masters.
  DType work_of(i64 param) const noexcept { return row_of(param).dtype(dp().grads.work); }
  const zero::ShardsPlan& shards_of(i64 param) const noexcept { return shards[row_of(param).group]; }
  // For each rank of dp, elements of its slices whose gradients are also summed over tp, by the number of ranks of tp
  // that share a sum.
  using SummedElems = std::map<int, i64>;
  std::vector<SummedElems> summed_of_ranks() const;
  // Among the ranks of dp with this rank's stage and part of tp, the one that holds most of the states that not every
  // parameter has, and of sums over tp.
  MeshCoord fullest() const;
  // Elements that an exchange of such sums holds: if not all ranks of tp share a sum, each rank receives those of all.
  i64 exchange_of(int width, i64 elems) const noexcept {
    return std::min(elems, kExchangeElems) * (width == mesh.tp ? 1 : mesh.tp);
  }
  // The parameters of a group of which the ranks of dp and tp at this stage hold pieces or copies; and this rank's
  // pieces.
  std::vector<i64> params_of(size_t group) const;
  GroupPieces pieces_of(size_t group) const;
  // Whether this rank saves a parameter and counts its gradient: no lower rank holds the same.
  bool counts(const zero::Piece& piece) const noexcept { return saved[piece.param]; }
  // Whether its gradient is in the norm: it counts, and is trained.
  bool judges(const zero::Piece& piece) const noexcept { return counts(piece) && is_trained(piece.param); }
  bool is_trained(i64 param) const noexcept { return row_of(param).trained; }
  // Gradients are exchanged over stages and over tp in parts of so many elements, which bounds their memory.
  static constexpr i64 kExchangeElems = i64{1} << 20;
  // Calls visit(begin, count) for each part of so many elements.
  static void for_each_exchange(i64 elems, auto&& visit) {
    for (i64 begin = 0; begin < elems; begin += kExchangeElems) visit(begin, std::min(kExchangeElems, elems - begin));
  }
  static constexpr i64 kSharedUnit = zero::kSharedUnit;
  static constexpr i64 unit_of(i64 layer) noexcept { return zero::unit_of(layer); }
  // The tiles of a matrix, by its place among the layer's rows, and those of its gradient; empty if it has none.
  std::span<const zero::MatrixTile> tiles_of(i64 layer, size_t row) const noexcept {
    return shards[rows[unit_of(layer)][row].group].layout.tiles_of(param_of(layer, row));
  }
  std::span<const zero::MatrixTile> grad_tiles_of(i64 layer, size_t row) const noexcept {
    return shards[rows[unit_of(layer)][row].group].grad_layout.tiles_of(param_of(layer, row));
  }
  i64 param_of(i64 layer, size_t row) const noexcept {
    return dp().layout.units()[unit_of(layer)].first_param + static_cast<i64>(row);
  }
  // The fragment of DilocoConfig that a parameter belongs to: units take turns.
  i64 fragment_of(const zero::Piece& piece) const noexcept;
  i64 head_use() const noexcept { return std::ssize(rows); }  // the unit of gradients of shared in the head
  bool tied() const noexcept { return !rows[0].empty(); }
  // Whether the update of that number leaves gradients on their ranks, whole, and the optimizer averages something
  // else.
  bool keeps_gradients_apart(i64 step) const noexcept {
    return std::ranges::any_of(groups.groups,
                               [&](const optim::ParamGroup& g) { return g.phase(step).local_gradients; });
  }
  // Whether ranks of dp may have parameters of their own for some updates.
  bool steps_apart() const noexcept {
    return std::ranges::any_of(groups.groups, &optim::ParamGroup::takes_local_steps);
  }
  // The updates of a run by kind: those of a kind send the same, except for DiLoCo's meetings.
  std::vector<optim::UpdateKind> update_kinds(i64 updates) const;
  // The unit in which the gradient of the shared matrix is summed, on the stages that have it.
  i64 shared_grads() const noexcept { return embeds ? kSharedUnit : head_use(); }
};

// Fills in the rest of a plan whose shards and groups are set. Throws Errc::Config if an optimizer cannot work with the
// layout.
void plan_update(UpdatePlan& plan);

}  // namespace ds::update
