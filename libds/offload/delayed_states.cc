// SPDX-License-Identifier: Apache-2.0
#include "offload/delayed_states.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/thread.h"

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
                    .held = parts_.held})),
      ready_(parts_.device.make_event()) {}

DelayedStates::~DelayedStates() { parts_.device.destroy(ready_); }

void DelayedStates::update(zero::Tile tile, const UpdateSpec& spec, zero::VerdictHandle& verdict) {
  DS_ASSERT(!facts_of(spec.params.rule).makes_direction() && spec.factors == nullptr);
  finish();  // the gradients' memory is free then
  verdict_ = verdict.resolve();
  if (!verdict_.finite) return;
  passes_.push_back({tile, spec});
  begin_copies();
  for_each_part_of(tile, [&](const zero::Piece& part) {
    take(gradients_, parts_.gradients, part);
    if (parts_.layout.own_masters()) take(params_, parts_.params, part);
  });
  parts_.device.synchronize(Queue::Copies);
}

// Makes the next copies wait for the computation enqueued so far.
void DelayedStates::begin_copies() {
  parts_.device.record(ready_, Queue::Compute);
  parts_.device.wait(Queue::Copies, ready_);
}

// From where it stays with the host, or by the device.
void DelayedStates::take(const Held& here, const zero::PieceMemory& from, const zero::Piece& part) {
  if (const void* const there = from.on_host(part); there == nullptr) {
    const HostLink link(parts_.device, options_.copies);
    const zero::TierLease lease = from.lease(part, zero::LeaseTo::Read);
    from.in_place() ? link.start_download(here.on_host(part), lease.data(), here.bytes(part))
                    : link.download(here.on_host(part), lease.data(), here.bytes(part));
  } else if (options_.beside) {
    std::memcpy(here.on_host(part), there, static_cast<size_t>(here.bytes(part)));
  }
}

void DelayedStates::settle(zero::VerdictHandle&, i64 number) {
  if (passes_.empty()) return;
  number_ = number;
  before_ = options_.moved();
  if (number < options_.from || !options_.beside) return finish();
  running_ = start_thread("an update beside the next step", [this] {
    const BusyTime::Span busy(&options_.shared.busy);
    run();
  });
}

void DelayedStates::run() {
  const std::lock_guard turn(options_.shared.turn);
  try {
    Resolved verdict(verdict_);
    for (const Pass& pass : passes_) states_->update(pass.tile, pass.spec, verdict);
    states_->settle(verdict, number_);
  } catch (...) {
    failed_ = std::current_exception();
  }
}

void DelayedStates::finish() {
  if (number_ == 0) return;
  const bool beside = running_.joinable();
  const Clock::time_point start = Clock::now();
  beside ? running_.join() : run();
  number_ = 0;
  if (failed_) {
    passes_.clear();
    std::rethrow_exception(std::exchange(failed_, {}));
  }
  FileCounts update = options_.moved() - before_;
  if (beside) update.waited_s = seconds_since(start);
  moved_ = moved_ + update;
  begin_copies();
  for (const Pass& pass : passes_) {
    for_each_part_of(pass.tile, [&](const zero::Piece& part) { hand_over(part); });
  }
  parts_.device.synchronize(Queue::Copies);
  passes_.clear();
}

void DelayedStates::hand_over(const zero::Piece& part) {
  void* const there = parts_.params.on_host(part);
  if (there == nullptr) {
    const HostLink link(parts_.device, options_.copies);
    const zero::TierLease param = parts_.params.lease(part, zero::LeaseTo::Fill);
    parts_.params.in_place() ? link.start_upload(param.data(), params_.on_host(part), params_.bytes(part))
                             : link.upload(param.data(), params_.on_host(part), params_.bytes(part));
  } else if (options_.beside) {
    std::memcpy(there, params_.on_host(part), static_cast<size_t>(params_.bytes(part)));
  }
}

void DelayedStates::for_each_master(zero::Tile tile, Visit visit) { states_->for_each_master(tile, visit); }

// In fp32 the parameter is the master, and what the tier has of it is of updates alone.
zero::StateLease DelayedStates::lease(const zero::Piece& piece, zero::LeaseTo access) {
  DS_ASSERT(number_ == 0);
  zero::TierLease param = parts_.params.lease(piece, access);
  if (!parts_.layout.is_trained(piece.param)) {
    zero::PieceState state;
    state[State::Param] = param.data();
    return {this, piece, access, state, std::move(param)};
  }
  leased_.emplace(states_->lease(piece, access));
  zero::PieceState state = *leased_;
  state[State::Param] = param.data();
  return {this, piece, access, state, std::move(param)};
}

}  // namespace ds::offload
