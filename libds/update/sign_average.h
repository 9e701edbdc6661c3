// SPDX-License-Identifier: Apache-2.0
#pragma once
// Averages by signs over the ranks of dp, for a group of parameters, with a scale for each parameter: of momentum, of
// gradients, or of the changes that a rank's own steps have made to parameters. Every rank holds momentum whole
// (zero::StateLayout::is_whole); each rank owns, saves and averages its slices, which are those of ZeRO. A single rank
// averages nothing.

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "comm/one_bit.h"
#include "update/combine.h"

namespace ds::update {

class SignAverage final : public optim::SignAverage {
 public:
  // group: number of the group. Allocates memory for messages and errors, and, if ranks may take steps of their own,
  // for the parameters that all ranks have in common (Tag::Optimizer). All outlive it. Collective over dp.
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

  const std::vector<zero::Piece>& pieces() const noexcept { return pieces_; }  // whole parameters
  TensorView momentum(const zero::Piece& piece) const noexcept {
    return all().rows(plan_.dp().states.offset(State::ExpAvg, piece) / 4, piece.count);
  }
  // Errors of signs on this rank; no elements if there is one rank.
  TensorView worker_error() const noexcept { return one_bit_ ? one_bit_->worker_error() : TensorView{}; }
  TensorView server_error() const noexcept { return one_bit_ ? one_bit_->server_error() : TensorView{}; }

  // The group's part of SignState: errors of signs, and, between two means of parameters, the common parameters and
  // this rank's own parameters and momentum.
  void read(i64 update, const std::string& elements, std::vector<zero::SavedArray>& arrays);
  void was_set(i64 update);
  void forget();

 private:
  TensorView all() const noexcept { return shards_.front()->states().whole(State::ExpAvg); }
  // Calls visit(part, its gradient) for all pieces.
  void for_each_gradient(FunctionRef<void(const zero::Piece&, TensorView)> visit);

  const UpdatePlan& plan_;
  size_t group_;
  zero::AllShards& shards_;
  Combine& combine_;
  Device& device_;
  std::vector<zero::Piece> pieces_;
  std::vector<i64> in_gradients_;  // by part of one_bit_: its place in the sums of gradients, elements
  std::optional<OneBitAllReduce> one_bit_;
  Buffer common_;       // the parameters that all ranks have in common, fp32, piece after piece
  Buffer saved_rates_;  // a copy of rates_ for checkpoints
  Buffer exchanged_;    // scratch of exchange_gradient()
  zero::VerdictHandle* verdict_ = nullptr;
  bool remembers_ = false;
  float rates_ = 0;
};

// The saved state of the averages of all groups. Every rank has it if any group of the model averages by signs, also a
// pipeline stage without parameters of such a group.
class SignState final : public zero::SavedState {
 public:
  // ranks: of dp. `plan` outlives it.
  SignState(const UpdatePlan& plan, int ranks);
  // The average of a group that has parameters here, in the order of groups; it outlives this.
  void add(SignAverage& average) { averages_.push_back(&average); }

  bool has_arrays(i64 update) const noexcept override;
  void read(i64 update, const std::string& elements, std::vector<zero::SavedArray>& arrays) override;
  void was_set(i64 update) override;
  void forget() override;
  std::span<const Norm> norms(i64 update) override;
  void for_each_norm(FunctionRef<void(size_t, const TensorView&)> visit) override;

 private:
  const UpdatePlan& plan_;
  const std::array<Norm, 3> norms_;
  std::vector<SignAverage*> averages_;
};

}  // namespace ds::update
