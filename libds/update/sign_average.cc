// SPDX-License-Identifier: Apache-2.0
#include "update/sign_average.h"

#include <algorithm>
#include <cmath>

#include "comm/message_tag.h"

namespace ds::update {
namespace {

constexpr i64 kExchanged = i64{1} << 20;  // elements that are exchanged at once

std::vector<OneBitAllReduce::Part> parts_of(const UpdatePlan& plan, size_t group, size_t number) {
  const zero::ShardsPlan& shards = plan.shards[number];
  std::vector<i64> params = plan.params_of(group);
  std::erase_if(params, [&](i64 p) { return plan.row_of(p).group != number; });
  std::vector<OneBitAllReduce::Part> parts;
  for (int r = 0; r < shards.layout.num_ranks(); ++r) {
    for (const zero::Piece& piece : shards.layout.owned_pieces(r)) {
      const auto at = std::ranges::lower_bound(params, piece.param);
      if (at == params.end() || *at != piece.param) continue;
      parts.push_back({.slice = r,
                       .scale = at - params.begin(),
                       .at = shards.states.offset(State::ExpAvg, piece) / 4,
                       .count = piece.count});
    }
  }
  return parts;
}

// The places of the parts in a rank's sums of all gradients.
std::vector<i64> places_in_gradients(const UpdatePlan& plan, size_t group, const zero::ShardsPlan& shards) {
  const std::vector<i64> bases = zero::grad_accum_bases(shards.grad_layout, shards.grads, shards.rank);
  std::vector<i64> places;
  for (int r = 0; r < shards.layout.num_ranks(); ++r) {
    for (const zero::Piece& piece : shards.layout.owned_pieces(r)) {
      if (plan.groups.of_params[piece.param] == group)
        places.push_back(bases[shards.grad_segment(piece.segment)] + piece.segment_offset);
    }
  }
  return places;
}

std::vector<zero::Piece> pieces_of(const UpdatePlan& plan, size_t group, const zero::ShardsPlan& shards) {
  std::vector<zero::Piece> pieces = shards.layout.whole_pieces();
  std::erase_if(pieces, [&](const zero::Piece& p) { return plan.groups.of_params[p.param] != group; });
  return pieces;
}

i64 elems_of(std::span<const zero::Piece> pieces) noexcept {
  i64 n = 0;
  for (const zero::Piece& p : pieces) n += p.count;
  return n;
}

}  // namespace

ShardsAverage::ShardsAverage(const UpdatePlan& plan, size_t group, size_t shards, zero::AllShards& all,
                             Combine& combine, Device& device, MemoryLedger& ledger)
    : plan_(plan),
      group_(group),
      number_(shards),
      shards_(*all[shards]),
      combine_(combine),
      tag_(message_text(shards_.plan().axis, Collective::OneBit)),
      copies_(plan.dp().layout.num_ranks() / shards_.plan().layout.num_ranks()),
      device_(device),
      pieces_(pieces_of(plan, group, shards_.plan())),
      in_gradients_(places_in_gradients(plan, group, shards_.plan())) {
  if (shards_.comm().size() > 1)
    one_bit_.emplace(shards_.comm(), device, ledger, Tag::Optimizer, parts_of(plan, group, shards));
  if (plan.groups.groups[group].numbers_per_param() > 0)
    exchanged_ = device_buffer(device, ledger, Tag::Workspace, std::min(elems_of(pieces_), kExchanged) * 4);
  if (!plan.groups.groups[group].takes_local_steps()) return;
  common_ = device_buffer(device, ledger, Tag::Optimizer, elems_of(pieces_) * 4);
  saved_rates_ = device_buffer(device, ledger, Tag::Optimizer, 4);
}

void ShardsAverage::for_each_gradient(FunctionRef<void(const zero::Piece&, TensorView)> visit) {
  for (const zero::Piece& whole : pieces_) {
    zero::for_each_part(whole, combine_.most_leased(whole), [&](const zero::Piece& part) {
      const zero::TierLease gradient = combine_.gradient(part, zero::LeaseTo::Write);
      visit(part, TensorView::of(gradient.data(), DType::F32, {part.count}));
    });
  }
}

void ShardsAverage::take_gradient(double keep, double share) {
  const GradVerdict* const verdict = verdict_->on_device();
  for_each_gradient([&](const zero::Piece& part, TensorView gradient) {
    device_.ops().scaled_sum(momentum(part), gradient, static_cast<float>(keep), static_cast<float>(share),
                             verdict == nullptr ? nullptr : &verdict->grad_scale, device_.stream());
  });
}

void ShardsAverage::exchange_gradient(double keep, double share) {
  const GradVerdict* const verdict = verdict_->on_device();
  const float* const scale = verdict == nullptr ? nullptr : &verdict->grad_scale;
  for_each_gradient([&](const zero::Piece& part, TensorView gradient) {
    const TensorView all_momentum = momentum(part);
    for (i64 begin = 0; begin < part.count; begin += kExchanged) {
      const i64 n = std::min(kExchanged, part.count - begin);
      const TensorView m = all_momentum.rows(begin, n), g = gradient.rows(begin, n);
      device_.copy(exchanged_.data(), m.data, n * 4);
      device_.ops().scaled_sum(m, g, static_cast<float>(keep), static_cast<float>(share), scale, device_.stream());
      device_.copy(g.data, exchanged_.data(), n * 4);
    }
  });
}

void ShardsAverage::take_mean_gradient(double keep, double share) {
  const GradVerdict* const verdict = verdict_->on_device();
  for_each_gradient([&](const zero::Piece&, TensorView gradient) {
    device_.ops().scaled_sum(gradient, gradient, 0, 1, verdict == nullptr ? nullptr : &verdict->grad_scale,
                             device_.stream());
  });
  average_directions();
  for_each_gradient([&](const zero::Piece& part, TensorView gradient) {
    device_.ops().scaled_sum(momentum(part), gradient, static_cast<float>(keep), static_cast<float>(share), nullptr,
                             device_.stream());
  });
}

void ShardsAverage::average_momentum() {
  if (one_bit_) one_bit_->run(all(), tag_);
}

void ShardsAverage::average_directions() {
  if (one_bit_) one_bit_->run(shards_.grads().sums().all(), tag_, in_gradients_);
}

void ShardsAverage::remember_parameters() {
  i64 at = 0;
  for (const zero::Piece& piece : pieces_) {
    const zero::StateLease lease = shards_.states().lease(piece, zero::LeaseTo::Read);
    device_.copy(common_.as<float>().data() + at, lease.master(plan().grads.work, piece.count).data, piece.count * 4);
    at += piece.count;
  }
  remembers_ = true;
  rates_ = 0;
}

void ShardsAverage::recall_parameters() {
  i64 at = 0;
  for (const zero::Piece& piece : pieces_) {
    device_.copy(momentum(piece).data, common_.as<float>().data() + at, piece.count * 4);
    at += piece.count;
  }
}

void ShardsAverage::copy_state(State from, State to) {
  for (const zero::Piece& piece : plan().layout.held_pieces(plan().rank)) {
    if (plan_.groups.of_params[piece.param] != group_) continue;
    const zero::StateLease lease = shards_.states().lease(piece, zero::LeaseTo::Write);
    device_.copy(lease[to], lease[from], piece.count * 4);
  }
}

void ShardsAverage::forget_errors() {
  if (one_bit_) one_bit_->reset();
}

void ShardsAverage::forget() {
  forget_errors();
  remembers_ = false;
  rates_ = 0;
}

void ShardsAverage::read(i64 update, const std::string& elements, std::vector<zero::SavedArray>& arrays) {
  const optim::Phase phase = plan_.groups.groups[group_].phase(update);
  if (phase.errors_of.empty()) return;
  const std::string of_split = number_ == 0 ? "" : "/" + plan().axis;
  const auto add = [&](const std::string& name, const TensorView& values) {
    arrays.push_back({fmt::format("{}@{}{}.{}", name, group_, of_split, elements), values});
  };
  if (one_bit_) {
    add(fmt::format("{}_worker_error", phase.errors_of), one_bit_->worker_error());
    add(fmt::format("{}_server_error", phase.errors_of), one_bit_->server_error());
  }
  if (!phase.local_params) return;
  device_.upload(saved_rates_.data(), &rates_, 4);
  add("rates", TensorView::of(saved_rates_.data(), DType::F32, {1}));
  add("common_parameters", TensorView::of(common_.data(), DType::F32, {common_.bytes() / 4}));
  for (const zero::Piece& piece : pieces_) {
    const std::string& name = plan_.row_of(piece.param).name;
    const zero::StateLease lease = shards_.states().lease(piece, zero::LeaseTo::Write);
    add("parameter/" + name, lease.master(plan().grads.work, piece.count));
    add("momentum/" + name, momentum(piece));
  }
}

void ShardsAverage::was_set(i64 update) {
  if (!plan_.groups.groups[group_].phase(update).local_params) return;
  device_.download(&rates_, saved_rates_.data(), 4);
  remembers_ = true;
  for (const zero::Piece& piece : pieces_) {
    const zero::StateLease lease = shards_.states().lease(piece, zero::LeaseTo::Write);
    if (lease[State::Master] == nullptr) continue;
    device_.ops().cast(TensorView::of(lease[State::Param], plan().grads.work, {piece.count}),
                       TensorView::of(lease[State::Master], DType::F32, {piece.count}), device_.stream());
  }
}

SignAverage::SignAverage(const UpdatePlan& plan, size_t group, zero::AllShards& shards, Combine& combine,
                         Device& device, MemoryLedger& ledger) {
  for (size_t s = 0; s < shards.size(); ++s) {
    if (!pieces_of(plan, group, shards[s]->plan()).empty())
      all_.push_back(std::make_unique<ShardsAverage>(plan, group, s, shards, combine, device, ledger));
  }
}

SignState::SignState(const UpdatePlan& plan, int ranks)
    : plan_(plan),
      norms_{{{"momentum", std::sqrt(static_cast<double>(ranks))},
              {"worker_error", std::sqrt(static_cast<double>(ranks))},
              {"server_error"}}} {}

bool SignState::has_arrays(i64 update) const noexcept {
  return std::ranges::any_of(plan_.groups.groups,
                             [&](const optim::ParamGroup& g) { return !g.phase(update).errors_of.empty(); });
}

void SignState::read(i64 update, const std::string& elements, std::vector<zero::SavedArray>& arrays) {
  for (ShardsAverage* const average : averages_) average->read(update, elements, arrays);
}

void SignState::was_set(i64 update) {
  for (ShardsAverage* const average : averages_) average->was_set(update);
}

void SignState::forget() {
  for (ShardsAverage* const average : averages_) average->forget();
}

std::span<const SignState::Norm> SignState::norms(i64 update) {
  return plan_.keeps_gradients_apart(update) ? std::span<const Norm>(norms_) : std::span<const Norm>();
}

void SignState::for_each_norm(FunctionRef<void(size_t, const TensorView&)> visit) {
  for (const ShardsAverage* const average : averages_) {
    // So often that each element counts as often as one that all ranks of dp hold.
    for (i64 n = 0; n < average->copies(); ++n) {
      for (const zero::Piece& piece : average->pieces()) visit(0, average->momentum(piece));
    }
    if (const TensorView error = average->worker_error()) visit(1, error);
    if (const TensorView error = average->server_error()) visit(2, error);
  }
}

}  // namespace ds::update
