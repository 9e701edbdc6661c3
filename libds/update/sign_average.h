// SPDX-License-Identifier: Apache-2.0
#pragma once
// Averages by signs for a group of parameters, with a scale for each parameter: of momentum, of gradients, or of the
// changes that a rank's own steps have made to parameters. Parameters are averaged over the ranks that reduce them, dp
// or a split of it. Each of these ranks holds momentum whole (zero::StateLayout::is_whole); it owns, saves and averages
// its slices, which are those of ZeRO. A single rank averages nothing.

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/one_bit.h"
#include "update/combine.h"

namespace ds::update {

class ShardsAverage final {
 public:
  // The parameters of group number `group` in shards number `shards`. Allocates memory for messages and errors, and, if
  // ranks may take steps of their own, for the parameters that all ranks have in common (Tag::Optimizer). All outlive
  // it. Collective over the ranks of the shards.
  ShardsAverage(const UpdatePlan& plan, size_t group, size_t shards, zero::AllShards& all, Combine& combine,
                Device& device, MemoryLedger& ledger);

  void set_verdict(zero::VerdictHandle& verdict) noexcept { verdict_ = &verdict; }
  // As in optim::SignAverage.
  void take_gradient(double keep, double share);
  void exchange_gradient(double keep, double share);
  void take_mean_gradient(double keep, double share);
  void average_momentum();
  void average_directions();
  void remember_parameters();
  void recall_parameters();
  bool remembers() const noexcept { return remembers_; }
  float& rates() noexcept { return rates_; }
  void copy_state(State from, State to);
  void forget_errors();

  // Ranks of dp for each rank of the shards: so many have other parameters under the same numbers.
  i64 copies() const noexcept { return copies_; }
  const std::vector<zero::Piece>& pieces() const noexcept { return pieces_; }  // whole parameters
  TensorView momentum(const zero::Piece& piece) const noexcept {
    return all().rows(plan().states.offset(State::ExpAvg, piece) / 4, piece.count);
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
  const zero::ShardsPlan& plan() const noexcept { return shards_.plan(); }
  TensorView all() const noexcept { return shards_.states().whole(State::ExpAvg); }
  // Calls visit(part, its gradient) for all pieces.
  void for_each_gradient(FunctionRef<void(const zero::Piece&, TensorView)> visit);

  const UpdatePlan& plan_;
  size_t group_, number_;  // of the group of parameters, and of the shards
  zero::Shards& shards_;
  Combine& combine_;
  const std::string tag_;
  const i64 copies_;
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

// The averages of a group of parameters in all shards, one after the other.
class SignAverage final : public optim::SignAverage {
 public:
  // Shards in which the group has no parameters are left out.
  SignAverage(const UpdatePlan& plan, size_t group, zero::AllShards& shards, Combine& combine, Device& device,
              MemoryLedger& ledger);

  void set_verdict(zero::VerdictHandle& verdict) noexcept {
    for (const auto& a : all_) a->set_verdict(verdict);
  }
  void take_gradient(double keep, double share) override {
    for (const auto& a : all_) a->take_gradient(keep, share);
  }
  void exchange_gradient(double keep, double share) override {
    for (const auto& a : all_) a->exchange_gradient(keep, share);
  }
  void take_mean_gradient(double keep, double share) override {
    for (const auto& a : all_) a->take_mean_gradient(keep, share);
  }
  void average_momentum() override {
    for (const auto& a : all_) a->average_momentum();
  }
  void average_directions() override {
    for (const auto& a : all_) a->average_directions();
  }
  void remember_parameters() override {
    for (const auto& a : all_) a->remember_parameters();
  }
  void recall_parameters() override {
    for (const auto& a : all_) a->recall_parameters();
  }
  bool remembers() const noexcept override { return all_.front()->remembers(); }
  void add_rate(float rate) override {
    for (const auto& a : all_) a->rates() += rate;
  }
  float rates() const noexcept override { return all_.front()->rates(); }
  void copy_state(State from, State to) override {
    for (const auto& a : all_) a->copy_state(from, to);
  }
  void forget_errors() override {
    for (const auto& a : all_) a->forget_errors();
  }
  std::span<const std::unique_ptr<ShardsAverage>> all() const noexcept { return all_; }

 private:
  std::vector<std::unique_ptr<ShardsAverage>> all_;
};

// The saved state of the averages of all groups. Every rank has it if any group of the model averages by signs, also a
// pipeline stage without parameters of such a group.
class SignState final : public zero::SavedState {
 public:
  // ranks: of dp. `plan` outlives it.
  SignState(const UpdatePlan& plan, int ranks);
  // The averages of a group that has parameters here, in the order of groups; they outlive this.
  void add(const SignAverage& averages) {
    for (const auto& average : averages.all()) averages_.push_back(average.get());
  }

  bool has_arrays(i64 update) const noexcept override;
  void read(i64 update, const std::string& elements, std::vector<zero::SavedArray>& arrays) override;
  void was_set(i64 update) override;
  void forget() override;
  std::span<const Norm> norms(i64 update) override;
  void for_each_norm(FunctionRef<void(size_t, const TensorView&)> visit) override;

 private:
  const UpdatePlan& plan_;
  const std::array<Norm, 3> norms_;
  std::vector<ShardsAverage*> averages_;
};

}  // namespace ds::update
