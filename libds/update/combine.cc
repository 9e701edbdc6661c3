// SPDX-License-Identifier: Apache-2.0
#include "update/combine.h"

#include "comm/message_tag.h"

namespace ds::update {

Combine::Combine(const UpdatePlan& plan, zero::AllShards& shards, const Axes& axes, MemoryLedger& ledger,
                 Device& device)
    : plan_(plan),
      shards_(shards),
      axes_(axes),
      device_(device),
      ops_(device.ops()),
      stream_(device.stream()),
      exchange_(device_buffer(device, ledger, Tag::Workspace, plan.exchange_elems * 4)) {}

void Combine::run(bool own) {
  const CombinePlan& combine = own ? plan_.combine_own : plan_.combine;
  add_uses_of_shared(own);
  for (const CombinePlan::Exchange& e : combine.exchanges) exchange(e);
  for (const CombinePlan::Scaled& s : combine.scaled) {
    zero::for_each_part(s.piece, most_leased(s.piece), [&](const zero::Piece& part) {
      const zero::TierLease lease = gradient(part, zero::LeaseTo::Write);
      const TensorView view = TensorView::of(lease.data(), DType::F32, {part.count});
      ops_.scaled_sum(view, view, s.factor, 0, nullptr, stream_);
    });
  }
}

// Adds the two gradients of tied embeddings, of the look-up and of the projection, which lie on one stage or on two.
void Combine::add_uses_of_shared(bool own) {
  if (!plan_.tied()) return;
  const bool embeds = plan_.embeds, projects = plan_.projects;
  if (!embeds && !projects) return;
  zero::Shards& dp = *shards_.front();
  const zero::Layout& layout = plan_.dp().grad_layout;
  const std::span<const zero::Segment> segments = layout.segments_of(plan_.shared_grads());
  // A part of the slice of a segment that this rank owns, or of the whole segment.
  const i64 slices = own ? layout.num_ranks() : 1;
  const auto slice = [&](const zero::Segment& s, i64 begin, i64 count, zero::LeaseTo access) {
    return dp.grads().sums().lease(&s - layout.segments().data(), (own ? 0 : s.slice * plan_.dp_rank()) + begin, count,
                                   access);
  };
  const auto view = [](const zero::TierLease& lease, i64 n) { return TensorView::of(lease.data(), DType::F32, {n}); };
  if (embeds && projects) {
    const std::span<const zero::Segment> of_head = layout.segments_of(plan_.head_use());
    for (size_t i = 0; i < segments.size(); ++i) {
      const i64 all = segments[i].slice * slices,
                most = dp.grads().sums().in_place() ? all : UpdatePlan::kExchangeElems;
      for (i64 begin = 0; begin < all; begin += most) {
        const i64 n = std::min(most, all - begin);
        const zero::TierLease mine = slice(segments[i], begin, n, zero::LeaseTo::Write),
                              other = slice(of_head[i], begin, n, zero::LeaseTo::Read);
        const TensorView source = view(other, n);
        ops_.fold(view(mine, n), {&source, 1}, true, stream_);
      }
    }
    return;
  }
  const int peer = embeds ? plan_.last_stage : plan_.first_stage;
  for (const zero::Segment& s : segments) {
    UpdatePlan::for_each_exchange(s.slice * slices, [&](i64 begin, i64 n) {
      const zero::TierLease lease = slice(s, begin, n, zero::LeaseTo::Write);
      const TensorView mine = view(lease, n), other = TensorView::of(exchange_.data(), DType::F32, {n});
      Ticket sent = axes_.pp.send(mine.data, mine.bytes(), peer, message_text(Axis::Pp, Collective::Send));
      axes_.pp.recv(other.data, other.bytes(), peer, message_text(Axis::Pp, Collective::Recv)).wait();
      sent.wait();
      ops_.fold(mine, {&other, 1}, true, stream_);
    });
  }
}

void Combine::exchange(const CombinePlan::Exchange& e) {
  Communicator& tp = axes_.tp;
  const i64 first = tp.rank() / e.width * e.width;
  const auto part = [&](i64 rank) { return exchange_.as<float>().data() + rank * e.elems; };
  const bool all = e.width == tp.size();
  float* at = part(all ? 0 : tp.rank());
  for (const zero::Piece& piece : e.pieces) {
    device_.copy(at, gradient(piece, zero::LeaseTo::Read).data(), piece.count * 4);
    at += piece.count;
  }
  if (all) {
    tp.all_reduce(part(0), e.elems, DType::F32, ReduceOp::Sum, message_text(Axis::Tp, Collective::AllReduce)).wait();
  } else {
    const AllGatherSegment parts{part(0), e.elems * 4};
    tp.all_gather({&parts, 1}, message_text(Axis::Tp, Collective::AllGather)).wait();
    sources_.clear();
    for (i64 r = first; r < first + e.width; ++r) sources_.push_back(TensorView::of(part(r), DType::F32, {e.elems}));
    ops_.fold(sources_.front(), sources_, false, stream_);
  }
  at = part(all ? 0 : first);
  for (const zero::Piece& piece : e.pieces) {
    device_.copy(gradient(piece, zero::LeaseTo::Fill).data(), at, piece.count * 4);
    at += piece.count;
  }
}

}  // namespace ds::update
