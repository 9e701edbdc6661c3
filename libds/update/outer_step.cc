// SPDX-License-Identifier: Apache-2.0
#include "update/outer_step.h"

#include <algorithm>

#include "comm/message_tag.h"
#include "comm/quantized.h"

namespace ds::update {
namespace {

constexpr i64 kCodedElems = i64{1} << 20;  // sent as codes at once

// Elements of pieces one after the other, each at the beginning of a block of codes.
i64 padded_elems(std::span<const zero::Piece> pieces) {
  i64 n = 0;
  for (const zero::Piece& p : pieces) n += align_up(p.count, zero::kCodeBlock);
  return n;
}

}  // namespace

OuterStep::Always::Always(Device& device, MemoryLedger& ledger)
    : memory_(device_buffer(device, ledger, Tag::Workspace, sizeof(GradVerdict))) {
  device.upload(memory_.data(), &verdict_, sizeof verdict_);
}

OuterStep::OuterStep(const UpdatePlan& plan, zero::AllShards& shards, Combine& combine, Communicator& outer,
                     Device& device, MemoryLedger& ledger)
    : plan_(plan), shards_(shards), combine_(combine), outer_(outer), device_(device), always_(device, ledger) {
  for (i64 f = 0; f < plan.diloco.fragments; ++f) {
    Fragment& fragment = fragments_.emplace_back();
    for (const zero::ShardsPlan& s : plan.shards) {
      std::vector<zero::TilePiece>& held = fragment.held.emplace_back();
      std::vector<std::pair<i64, zero::Piece>> placed;
      const std::vector<i64> bases = zero::grad_accum_bases(s.grad_layout, s.grads, s.rank);
      for (const zero::Piece& piece : s.layout.held_pieces(s.rank)) {
        if (!plan.is_trained(piece.param) || plan.fragment_of(piece) != f) continue;
        held.push_back({.piece = piece});
        placed.emplace_back(bases[s.grad_segment(piece.segment)] + piece.segment_offset, piece);
      }
      std::ranges::sort(placed, {}, &std::pair<i64, zero::Piece>::first);
      i64 end = -1;
      for (const auto& [at, piece] : placed) {
        if (at == end) {
          fragment.sums.back().count += piece.count;
        } else {
          fragment.sums.push_back(piece);
        }
        end = at + piece.count;
      }
    }
  }
  if (outer.size() == 1) return;
  const int bits = narrow<int>(plan.diloco.outer_gradient_bits);
  format_ = {.bits = bits, .block = zero::kCodeBlock};
  if (plan.diloco.overlap_steps > 0) {
    i64 most = 0;
    for (const Fragment& f : fragments_) most = std::max(most, padded_elems(f.sums));
    // Room for the largest fragment.
    travels_ = outer.allocate(ledger, Tag::Workspace, most * 4);
    number_ = device_buffer(device, ledger, Tag::Workspace, 4);
    if (bits < 32) wire_ = outer.allocate(ledger, Tag::Workspace, outer.size() * CodedSlice{format_, most}.bytes());
    return;
  }
  if (bits == 32) return;
  i64 most = 0;
  for (const Fragment& f : fragments_) {
    for (const zero::Piece& p : f.sums) most = std::max(most, std::min(p.count, kCodedElems));
  }
  if (most == 0) return;
  wire_ = outer.allocate(ledger, Tag::Workspace, outer.size() * CodedSlice{format_, most}.bytes());
  decoded_ = device_buffer(device, ledger, Tag::Workspace, outer.size() * most * 4);
}

void OuterStep::for_each_lease(zero::LeaseTo access,
                               FunctionRef<void(const zero::Piece&, const zero::StateLease&)> visit) {
  for (const Fragment& f : fragments_) {
    for (size_t g = 0; g < f.held.size(); ++g) {
      for (const zero::TilePiece& p : f.held[g]) visit(p.piece, shards_[g]->states().lease(p.piece, access));
    }
  }
}

void OuterStep::begin() {
  for_each_lease(zero::LeaseTo::Write, [&](const zero::Piece& piece, const zero::StateLease& state) {
    device_.ops().cast(state.view(State::OuterParam, piece.count), state.master(plan_.dp().grads.work, piece.count),
                       device_.stream());
    device_.zero(state[State::OuterMomentum], piece.count * 4);
  });
}

void OuterStep::pass(const Fragment& f, const UpdateParams& params) {
  for (size_t g = 0; g < f.held.size(); ++g) {
    if (!f.held[g].empty()) shards_[g]->states().update(f.held[g], {.params = params, .decay = false}, always_);
  }
}

void OuterStep::for_each_part(const Fragment& f, FunctionRef<void(const zero::Piece&, i64)> visit) {
  i64 at = 0;
  for (const zero::Piece& whole : f.sums) {
    const i64 most = combine_.most_leased(whole);
    zero::for_each_part(whole, wire_ ? std::min(most, kCodedElems) : most,
                        [&](const zero::Piece& part) { visit(part, at + part.segment_offset - whole.segment_offset); });
    at += align_up(whole.count, zero::kCodeBlock);
  }
}

void OuterStep::send(i64 fragment) {
  if (under_way_ != kNone) land(under_way_);  // left by a run that used other intervals
  const Fragment& f = fragments_[fragment];
  pass(f, {.rule = UpdateRule::OuterDelta});
  if (!travels_) return;
  under_way_ = fragment;
  arrived_ = false;
  const i64 n = padded_elems(f.sums);
  const TensorView all = TensorView::of(travels_.data(), DType::F32, {n});
  if (n == 0) return;
  device_.zero(all.data, all.bytes());  // the gaps between pieces
  for_each_part(f, [&](const zero::Piece& part, i64 at) {
    device_.copy(all.rows(at, part.count).data, combine_.gradient(part, zero::LeaseTo::Read).data(), part.count * 4);
  });
  ticket_ = wire_ ? start_coded_gather(outer_, device_, format_, wire_.data(), all,
                                       message_text(Axis::Outer, Collective::AllGather))
                  : outer_.all_reduce(all.data, n, DType::F32, ReduceOp::Sum,
                                      message_text(Axis::Outer, Collective::AllReduce));
}

void OuterStep::arrive() {
  if (under_way_ == kNone || std::exchange(arrived_, true)) return;
  ticket_.wait();
  ticket_ = {};
  const i64 n = padded_elems(fragments_[under_way_].sums), P = outer_.size();
  if (!wire_ || n == 0) return;
  const CodedSlice slice{format_, n};
  device_.ops().dequantize_fold(TensorView::of(travels_.data(), DType::F32, {n}), slice.codes(wire_.data(), 0, P),
                                slice.scales(wire_.data(), 0, P), false, 1, format_, device_.stream());
}

bool OuterStep::land(i64 fragment) {
  const Fragment& f = fragments_[fragment];
  const DilocoConfig& d = plan_.diloco;
  if (travels_) {
    if (under_way_ != fragment) return false;  // the run has resumed with another layout, without it
    arrive();
    under_way_ = kNone;
    for_each_part(f, [&](const zero::Piece& part, i64 at) {
      device_.copy(combine_.gradient(part, zero::LeaseTo::Fill).data(), travels_.as<float>().data() + at,
                   part.count * 4);
    });
  } else if (outer_.size() > 1) {
    for_each_part(f, [&](const zero::Piece& part, i64) {
      const zero::TierLease lease = combine_.gradient(part, zero::LeaseTo::Write);
      sum(TensorView::of(lease.data(), DType::F32, {part.count}));
    });
  }
  pass(f, {.rule = d.nesterov ? UpdateRule::OuterNesterov : UpdateRule::OuterMomentum,
           .beta1 = d.outer_momentum,
           .beta2 = travels_ ? d.local_share : 0,
           .rest1 = 1.0 / outer_.size(),
           .lr = static_cast<float>(d.outer_lr)});
  return true;
}

void OuterStep::sum(TensorView x) {
  const i64 n = x.numel(), P = outer_.size();
  if (!wire_)
    return outer_.all_reduce(x.data, n, DType::F32, ReduceOp::Sum, message_text(Axis::Outer, Collective::AllReduce))
        .wait();
  start_coded_gather(outer_, device_, format_, wire_.data(), x, message_text(Axis::Outer, Collective::AllGather))
      .wait();
  decode_gathered(outer_, device_, format_, wire_.data(), TensorView::of(decoded_.data(), DType::F32, {P * n}));
  sources_.clear();
  for (i64 r = 0; r < P; ++r) sources_.push_back(TensorView::of(decoded_.as<float>().data() + r * n, DType::F32, {n}));
  device_.ops().fold(x, sources_, false, device_.stream());
}

// All states but the outer ones, and the parameters that have no masters.
void OuterStep::own_states(std::vector<zero::SavedArray>& arrays) {
  for_each_lease(zero::LeaseTo::Write, [&](const zero::Piece& piece, const zero::StateLease& state) {
    for (const State s : kStates) {
      if (state[s] == nullptr || is_outer_state(s) || (s == State::Param && state[State::Master] != nullptr)) continue;
      arrays.push_back({fmt::format("{}/{}[{}]", state_name(s), plan_.row_of(piece.param).name, piece.begin),
                        state.view(s, piece.count)});
    }
  });
}

void OuterStep::read(i64, const std::string& elements, std::vector<zero::SavedArray>& arrays) {
  if (plan_.coord.worker > 0) own_states(arrays);
  if (!travels_) return;
  arrive();
  const float number = static_cast<float>(under_way_ + 1);
  device_.upload(number_.data(), &number, sizeof number);
  arrays.push_back({fmt::format("outer_sums.of_{}.{}", num_fragments(), elements),
                    TensorView::of(travels_.data(), DType::F32, {travels_.bytes() / 4})});
  arrays.push_back({fmt::format("outer_sums.fragment.{}", elements), TensorView::of(number_.data(), DType::F32, {1})});
}

void OuterStep::was_set(i64) {
  if (plan_.coord.worker > 0) {
    for_each_lease(zero::LeaseTo::Write, [&](const zero::Piece& piece, const zero::StateLease& state) {
      if (state[State::Master] == nullptr) return;
      device_.ops().cast(TensorView::of(state[State::Param], plan_.dp().grads.work, {piece.count}),
                         state.view(State::Master, piece.count), device_.stream());
    });
  }
  if (!travels_) return;
  float number = 0;
  device_.download(&number, number_.data(), sizeof number);
  under_way_ = static_cast<i64>(number) - 1;
  arrived_ = true;
}

}  // namespace ds::update
