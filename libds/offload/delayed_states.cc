// SPDX-License-Identifier: Apache-2.0
#include "offload/delayed_states.h"

#include <algorithm>

#include "base/clock.h"

namespace ds::offload {
namespace {

class Resolved final : public zero::VerdictHandle {
 public:
  explicit Resolved(const GradVerdict& verdict) : verdict_(verdict) {}
  const GradVerdict* on_device() const noexcept override { return &verdict_; }
  const GradVerdict& resolve() override { return verdict_; }

 private:
  const GradVerdict& verdict_;
};

i64 elems_of(const std::vector<zero::Piece>& held) noexcept {
  i64 n = 0;
  for (const zero::Piece& p : held) n = std::max(n, p.shard_offset + p.count);
  return n;
}

// Calls visit(part) for the parts of a tile's pieces.
template <class Visit>
void for_each_part_of(zero::Tile tile, Visit&& visit) {
  for (const zero::TilePiece& p : tile) zero::for_each_part(p.piece, zero::StateStore::kLeaseElems, visit);
}

}  // namespace

DelayedStates::DelayedStates(Parts parts, const zero::MakeStates& make, const Options& options)
    : StateStore(std::move(parts)),
      options_(options),
      gradients_(options.host, parts_.ledger, options.tag, elems_of(parts_.held), DType::F32),
      params_(options.host, parts_.ledger, options.tag, elems_of(parts_.held), parts_.work),
      states_(make({.layout = parts_.layout,
                    .params = params_,
                    .gradients = gradients_,
                    .work = parts_.work,
                    .device = parts_.device,
                    .ledger = parts_.ledger,
                    .held = parts_.held})) {}

DelayedStates::~DelayedStates() {
  if (running_.valid()) running_.wait();
}

void DelayedStates::update(zero::Tile tile, const UpdateSpec& spec, zero::VerdictHandle& verdict) {
  DS_ASSERT(!makes_direction(spec.params.rule) && spec.factors == nullptr);
  finish();  // the gradients' memory is free then
  verdict_ = verdict.resolve();
  if (!verdict_.finite) return;
  passes_.push_back({tile, spec});
  for_each_part_of(tile, [&](const zero::Piece& part) {
    const zero::TierLease gradient = parts_.gradients.lease(part, zero::LeaseTo::Read);
    parts_.device.download(gradients_.on_host(part), gradient.data(), gradients_.bytes(part));
    if (parts_.work != DType::F32) return;
    const zero::TierLease master = parts_.params.lease(part, zero::LeaseTo::Read);
    parts_.device.download(params_.on_host(part), master.data(), params_.bytes(part));
  });
}

void DelayedStates::settle(zero::VerdictHandle&, i64 number) {
  if (passes_.empty()) return;
  number_ = number;
  before_ = options_.moved();
  if (number < options_.from || !options_.beside) return finish();
  running_ = std::async(std::launch::async, [this] { run(); });
}

void DelayedStates::run() {
  const Clock::time_point start = Clock::now();
  Resolved verdict(verdict_);
  for (const Pass& pass : passes_) states_->update(pass.tile, pass.spec, verdict);
  states_->settle(verdict, number_);
  took_s_ = seconds_since(start);
}

void DelayedStates::finish() {
  if (number_ == 0) return;
  const bool beside = running_.valid();
  const Clock::time_point start = Clock::now();
  beside ? running_.get() : run();
  FileCounts update = options_.moved() - before_;
  if (beside) update.waited_s = seconds_since(start), update.busy_s = took_s_;
  moved_ = moved_ + update;
  hand_over();
  passes_.clear();
  number_ = 0;
}

void DelayedStates::hand_over() {
  for (const Pass& pass : passes_) {
    for_each_part_of(pass.tile, [&](const zero::Piece& part) {
      const zero::TierLease param = parts_.params.lease(part, zero::LeaseTo::Fill);
      parts_.device.upload(param.data(), params_.on_host(part), params_.bytes(part));
    });
  }
}

void DelayedStates::for_each_master(zero::Tile tile, Visit visit) { states_->for_each_master(tile, visit); }

// In fp32 the parameter is the master, and what the tier has of it is of updates alone.
zero::StateLease DelayedStates::lease(const zero::Piece& piece, zero::LeaseTo access) {
  DS_ASSERT(number_ == 0);
  zero::TierLease param = parts_.params.lease(piece, access);
  leased_.emplace(states_->lease(piece, access));
  zero::PieceState state = *leased_;
  state[State::Param] = param.data();
  return {this, piece, access, state, std::move(param)};
}

}  // namespace ds::offload
