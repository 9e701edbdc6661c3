// SPDX-License-Identifier: Apache-2.0
#pragma once
// A mixture of experts: a router sends each token to k of E MLPs, and their outputs, weighted, are added (Shazeer et
// al., "Outrageously Large Neural Networks", 2017; Jiang et al., "Mixtral of Experts", 2024). Choices beyond an
// expert's capacity are dropped if it has one (gating.h); else none is. Experts may stand beside a shared one that sees
// every token (Dai et al., "DeepSeekMoE", 2024).
//
// Rows of tokens are sorted by expert, and all experts of a rank are one grouped product. The ranks of tp have E/tp
// experts each and see the same tokens, so their outputs are terms of a sum that tensor parallelism makes anyway; each
// of these parts may be divided over the ranks of ep (expert_exchange.h).

#include <memory>
#include <optional>
#include <span>

#include "model/expert_exchange.h"
#include "model/expert_mlp.h"
#include "model/feed_forward.h"
#include "model/gating.h"
#include "model/shared_expert.h"

namespace ds::model {

class Experts final : public FeedForward {
 public:
  // Appends rows name.gate, its balancing bias, name.experts.*, and those of the shared expert. c.experts.count: of
  // this layer. layer: see dropout_site.
  Experts(std::vector<ParamRow>& rows, const std::string& name, const ModelConfig& c, i64 layer, const Shard& shard);

  std::vector<Linear*> linears() override;
  std::vector<size_t> matrices() const override;
  i64 num_counts() const noexcept override { return E() + RouterStats::kReport; }
  i64 gradient_parts() const noexcept override { return shard_.ep; }
  i64 num_step_counts() const noexcept override { return over_batch() ? E() : 0; }
  i64 num_shared_stats() const noexcept override { return pools() ? RouterStats{E()}.size() + E() : 0; }
  bool adds_loss() const noexcept override { return config_.balance_loss != 0 || config_.z_loss != 0; }

  void plan(LayerActs& acts, ActivationPlanner& planner, const PlannedPass& pass) const override;
  void forward(const PassContext& ctx, RowViews params, TensorView y, TensorView x, TensorView residual,
               const LayerActs& acts) const override;
  void recompute(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& acts) const override;
  void backward_input(const PassContext& ctx, RowViews params, TensorView dx, TensorView dy, TensorView x,
                      TensorView residual, const LayerActs& acts) const override;
  void backward_weight(const PassContext& ctx, RowViews grads, TensorView dy, TensorView x,
                       const LayerActs& acts) const override;

 private:
  i64 k() const noexcept { return config_.per_token; }
  i64 E() const noexcept { return config_.count; }
  i64 first_expert() const noexcept { return shard_.tp_rank * (E() / shard_.tp); }
  bool travels() const noexcept { return shard_.ep > 1; }
  // The MLP beside the experts is the other part of a residual layer.
  bool has_parts() const noexcept { return shared_ && shared_->residual(); }
  // With these coefficients.
  RouterLossParams losses(float balance, float z) const noexcept {
    return {.balance = balance, .z = z, .first_choices = config_.first_choice_loss};
  }
  bool by_sequence() const noexcept { return config_.balances_over(BalanceOver::Sequence); }
  bool pools() const noexcept { return config_.balances_over(BalanceOver::Layers); }
  bool over_batch() const noexcept { return config_.balances_over(BalanceOver::GlobalBatch); }
  ParamRow balancing_bias(const std::string& router) const;
  ParamRow cut_experts(ParamRow row) const;

  // The offsets, by group, of the rows that this rank's experts compute: its own sorted ones, or those that have
  // arrived in the round at hand.
  TensorView offsets(const LayerActs& own) const;
  // Rows [M,...]; in a prediction the part that is expected, at least one.
  TensorView expected(const PassContext& ctx, TensorView rows) const;
  void route(const PassContext& ctx, RowViews params, TensorView all, const LayerActs& acts) const;
  // The statistics of a router over sequences [first, first + count); those of the micro-batch come first in kStats.
  void count_rows(const PassContext& ctx, const LayerActs& own, TensorView stats, i64 first, i64 count) const;
  Ticket count(const PassContext& ctx, const LayerActs& own) const;
  Ticket count_batch(const PassContext& ctx, const LayerActs& own) const;
  void add_losses(const PassContext& ctx, const LayerActs& own) const;
  void add_pooled_loss(const PassContext& ctx, const LayerActs& own) const;
  void sort(const PassContext& ctx, TensorView rows, TensorView all, const LayerActs& own) const;
  TensorView arrive(const PassContext& ctx, TensorView to, TensorView sorted) const;
  void backward_experts(const PassContext& ctx, RowViews params, TensorView dx, TensorView dy, TensorView weights,
                        TensorView dweights, const LayerActs& own) const;
  void start_gradients(const PassContext& ctx, std::span<Ticket, 2> tickets, const LayerActs& own) const;
  void backward_round(const PassContext& ctx, RowViews params, const LayerActs& own) const;
  void backward_router(const PassContext& ctx, RowViews params, const LayerActs& acts) const;
  void backward_rounds(const PassContext& ctx, RowViews params, const LayerActs& own) const;
  // Whether rows are sorted again in a pass that keeps no sorted ones. Ranks of tp may have different numbers of
  // rounds, and gather rows together.
  bool sorts_again(const PassContext& ctx) const noexcept;
  void expert_grads(const PassContext& ctx, RowViews grads, TensorView dy, TensorView x, const LayerActs& own) const;
  void expert_grads_by_rank(const PassContext& ctx, const ExpertMlp::Rows& wanted, const LayerActs& own) const;

  ExpertsConfig config_;
  Shard shard_;
  i64 C_, F_;
  bool last_;       // of the blocks with experts
  double busiest_;  // ExpertExchange
  size_t router_ = 0;
  std::optional<size_t> bias_;
  Gating gating_;
  ExpertMlp mlp_;
  ExpertExchange exchange_;
  std::optional<SharedExpert> shared_;
};

}  // namespace ds::model
