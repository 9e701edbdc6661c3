// SPDX-License-Identifier: Apache-2.0
#include "update/combine.h"

namespace ds::update {

Combine::Combine(const UpdatePlan& plan, zero::AllShards& shards, const Axes& axes, MemoryLedger& ledger,
                 Device& device)
    : plan_(plan),
      dp_(*shards.front()),
      axes_(axes),
      device_(device),
      ops_(device.ops()),
      stream_(device.stream()),
      exchange_(device_buffer(device, ledger, Tag::Workspace, plan.exchange_elems * 4)) {
  const auto gradient = [&](const zero::Piece& piece) {
    return TensorView::of(shards[plan.row_of(piece.param).group]->gradient(piece), DType::F32, {piece.count});
  };
  for (const CombinePlan::Exchange& e : plan.combine.exchanges) {
    Sum& sum = sums_.emplace_back(Sum{.width = e.width, .pieces = {}, .elems = e.elems});
    for (const zero::Piece& piece : e.pieces) sum.pieces.push_back(gradient(piece));
  }
  for (const CombinePlan::Scaled& s : plan.combine.scaled) scaled_.push_back({gradient(s.piece), s.factor});
}

void Combine::run() {
  add_uses_of_shared();
  for (const Sum& sum : sums_) exchange(sum);
  for (const Scaled& s : scaled_) ops_.scaled_sum(s.gradient, s.gradient, s.factor, 0, nullptr, stream_);
}

// The gradient of tied embeddings: that of the look-up and that of the projection, from two stages or from one.
void Combine::add_uses_of_shared() {
  if (!plan_.tied()) return;
  const bool embeds = plan_.embeds, projects = plan_.projects;
  if (!embeds && !projects) return;
  const zero::Layout& layout = plan_.dp().grad_layout;
  const auto slices = [&](i64 unit, auto&& visit) {
    for (const zero::Segment& s : layout.segments_of(unit)) {
      float* const mine = dp_.grads().element(&s - layout.segments().data(), s.slice * plan_.dp_rank());
      visit(TensorView::of(mine, DType::F32, {s.slice}));
    }
  };
  if (embeds && projects) {
    sources_.clear();
    slices(plan_.head_use(), [&](TensorView slice) { sources_.push_back(slice); });
    size_t i = 0;
    slices(plan_.shared_grads(), [&](TensorView slice) { ops_.fold(slice, {&sources_[i++], 1}, true, stream_); });
    return;
  }
  const int peer = embeds ? plan_.mesh.pp - 1 : 0;
  slices(plan_.shared_grads(), [&](TensorView slice) {
    plan_.for_each_exchange(slice.numel(), [&](i64 begin, i64 n) {
      const TensorView mine = TensorView::of(slice.as<float>() + begin, DType::F32, {n});
      const TensorView other = TensorView::of(exchange_.data(), DType::F32, {n});
      Ticket sent = axes_.pp.send(mine.data, mine.bytes(), peer, "pp.send");
      axes_.pp.recv(other.data, other.bytes(), peer, "pp.recv").wait();
      sent.wait();
      ops_.fold(mine, {&other, 1}, true, stream_);
    });
  });
}

void Combine::exchange(const Sum& sum) {
  Communicator& tp = axes_.tp;
  const i64 first = tp.rank() / sum.width * sum.width;
  const auto part = [&](i64 rank) { return exchange_.as<float>().data() + rank * sum.elems; };
  const bool all = sum.width == tp.size();
  float* at = part(all ? 0 : tp.rank());
  for (const TensorView& piece : sum.pieces) {
    device_.copy(at, piece.data, piece.bytes());
    at += piece.numel();
  }
  if (all) {
    tp.all_reduce(part(0), sum.elems, DType::F32, ReduceOp::Sum, "tp.all_reduce").wait();
  } else {
    const AllGatherSegment parts{part(0), sum.elems * 4};
    tp.all_gather({&parts, 1}, "tp.all_gather").wait();
    sources_.clear();
    for (i64 r = first; r < first + sum.width; ++r)
      sources_.push_back(TensorView::of(part(r), DType::F32, {sum.elems}));
    ops_.fold(sources_.front(), sources_, false, stream_);
  }
  at = part(all ? 0 : first);
  for (const TensorView& piece : sum.pieces) {
    device_.copy(piece.data, at, piece.bytes());
    at += piece.numel();
  }
}

}  // namespace ds::update
