// SPDX-License-Identifier: Apache-2.0
#pragma once
// What ranks of dp average by signs of a group of parameters, each parameter with a scale of its own: momentum,
// gradients, or what their own steps have made of parameters. It is whole on every rank (zero::StateLayout::is_whole),
// and each rank owns, saves and averages its slices: as ZeRO cuts them. One rank averages nothing.

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/one_bit.h"
#include "update/combine.h"

namespace ds::update {

class SignAverage final : public optim::SignAverage {
 public:
  // Of the parameters of a group. Takes the memory of what is sent and of errors (Tag::Optimizer), and, where ranks may
  // step for themselves, of the parameters that they have in common. All outlive it. Collective over dp.
  SignAverage(const UpdatePlan& plan, size_t group, zero::AllShards& shards, Combine& combine, Communicator& dp,
              Device& device, MemoryLedger& ledger);

  void set_verdict(zero::VerdictHandle& verdict) noexcept { verdict_ = &verdict; }
  void take_gradient(double keep, double share) override;
  void exchange_gradient(double keep, double share) override;
  void take_mean_gradient(double keep, double share) override;
  void average_momentum() override;
  void average_directions() override;
  void remember_parameters() override;
  void recall_parameters() override;
  bool remembers() const noexcept override { return remembers_; }
  float& rates() noexcept override { return rates_; }
  void copy_state(State from, State to) override;
  void forget_errors() override;

  // Masters and states were set from outside.
  void forget();
  const std::vector<zero::Piece>& pieces() const noexcept { return pieces_; }  // of the parameters, cut nowhere
  TensorView momentum(const zero::Piece& piece) const noexcept {
    return all().rows(plan_.dp().states.offset(State::ExpAvg, piece) / 4, piece.count);
  }
  // What signs have lost on this rank; without elements where there is one rank.
  TensorView worker_error() const noexcept { return one_bit_ ? one_bit_->worker_error() : TensorView{}; }
  TensorView server_error() const noexcept { return one_bit_ ? one_bit_->server_error() : TensorView{}; }

  // What this rank has of its own, fp32, of the device, by names for checkpoints: what signs have lost, and, between
  // two means of parameters, these and all that becomes of them. And after they were set.
  // `lost_of`: what signs have lost is of that.
  using RankLocal = std::vector<std::pair<std::string, TensorView>>;
  RankLocal rank_local(std::string_view lost_of, bool steps_apart);
  void rank_local_was_set(bool steps_apart);

 private:
  TensorView all() const noexcept { return shards_.front()->states().whole(State::ExpAvg); }
  // visit(part, its gradient), of all pieces.
  void for_each_gradient(FunctionRef<void(const zero::Piece&, TensorView)> visit);

  const UpdatePlan& plan_;
  size_t group_;
  zero::AllShards& shards_;
  Combine& combine_;
  Device& device_;
  std::vector<zero::Piece> pieces_;
  std::vector<i64> in_gradients_;  // where the parts of one_bit_ lie in the sums of gradients, elements
  std::optional<OneBitAllReduce> one_bit_;
  Buffer common_;       // parameters that ranks have in common, fp32, piece after piece
  Buffer saved_rates_;  // rates_, where checkpoints are made of
  Buffer exchanged_;    // what exchange_gradient() has of both at once
  zero::VerdictHandle* verdict_ = nullptr;
  bool remembers_ = false;
  float rates_ = 0;
};

}  // namespace ds::update
