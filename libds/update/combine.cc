// SPDX-License-Identifier: Apache-2.0
#include "update/combine.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "comm/message_tag.h"

namespace ds::update {
namespace {

// Messages between the stages that share a matrix.
constexpr std::string_view kSentUse = message_text(Axis::Pp, Collective::Send),
                           kReceivedUse = message_text(Axis::Pp, Collective::Recv);

}  // namespace

Combine::Combine(const UpdatePlan& plan, zero::AllShards& shards, const Axes& axes, MemoryLedger& ledger,
                 Device& device)
    : plan_(plan),
      shards_(shards),
      axes_(axes),
      device_(device),
      ops_(device.ops()),
      stream_(device.stream()),
      exchange_(device_buffer(device, ledger, Tag::Workspace, plan.exchange_elems * 4)) {
  if (plan.tied() && plan.embeds != plan.projects) {
    size_t parts = 0;
    for_each_shared(plan.dp().grads.keeps_own, [&](const SharedPart&) { ++parts; });
    sent_.reserve(parts);
  }
}

void Combine::send_use() {
  DS_ASSERT(plan_.sends_use_ahead && sent_.empty());
  shards_.front()->grads().finish(plan_.head_use());
  send_use(false);
}

void Combine::finish() {
  for (Ticket& t : sent_) t.wait();
  sent_.clear();
}

void Combine::run(bool own) {
  const CombinePlan& combine = own ? plan_.combine_own : plan_.combine;
  add_uses_of_shared(own);
  // The other stage does the same to the sum that it gets.
  const auto before_write = [&](const zero::Piece& piece) {
    if (piece.param < std::ssize(plan_.rows[UpdatePlan::kSharedUnit])) finish();
  };
  for (const CombinePlan::Exchange& e : combine.exchanges) {
    std::ranges::for_each(e.pieces, before_write);
    exchange(e);
  }
  for (const CombinePlan::Scaled& s : combine.scaled) {
    before_write(s.piece);
    zero::for_each_part(s.piece, most_leased(s.piece), [&](const zero::Piece& part) {
      const zero::TierLease lease = gradient(part, zero::LeaseTo::Write);
      const TensorView view = TensorView::of(lease.data(), DType::F32, {part.count});
      ops_.scaled_sum(view, view, s.factor, 0, nullptr, stream_);
    });
  }
}

// A part of the tied matrix's gradient that one message holds: of a segment by its place in its unit, of the slice that
// this rank owns or of all elements.
struct Combine::SharedPart {
  size_t segment;
  i64 first, count;

  TensorView view(const zero::TierLease& lease) const { return view(lease.data()); }
  TensorView view(void* data) const { return TensorView::of(data, DType::F32, {count}); }
};

void Combine::for_each_shared(bool own, FunctionRef<void(const SharedPart&)> visit) const {
  const zero::Layout& layout = plan_.dp().grad_layout;
  const std::span<const zero::Segment> segments = layout.segments_of(plan_.shared_grads());
  for (size_t i = 0; i < segments.size(); ++i) {
    const i64 slice = segments[i].slice, begin = own ? 0 : slice * plan_.dp_rank();
    UpdatePlan::for_each_exchange(own ? slice * layout.num_ranks() : slice, [&](i64 first, i64 count) {
      visit({i, begin + first, count});
    });
  }
}

zero::TierLease Combine::use(i64 unit, const SharedPart& part, zero::LeaseTo access) const {
  const zero::Layout& layout = plan_.dp().grad_layout;
  const zero::Segment& s = layout.segments_of(unit)[part.segment];
  return shards_.front()->grads().sums().lease(&s - layout.segments().data(), part.first, part.count, access);
}

// Adds the two gradients of tied embeddings, of the look-up and of the projection, which lie on one stage or on two.
// The first of two stages adds them and sends the sum back, so the last one's use can travel before either has ended
// its step.
void Combine::add_uses_of_shared(bool own) {
  if (!plan_.tied() || (!plan_.embeds && !plan_.projects)) return;
  if (!plan_.embeds) {
    if (sent_.empty()) send_use(own);
    take_sum(own);
  } else if (!plan_.projects) {
    add_use_of_last_stage(own);
  } else {
    for_each_shared(own, [&](const SharedPart& part) {
      const zero::TierLease sum = use(plan_.shared_grads(), part, zero::LeaseTo::Write),
                            other = use(plan_.head_use(), part, zero::LeaseTo::Read);
      const TensorView source = part.view(other);
      ops_.fold(part.view(sum), {&source, 1}, true, stream_);
    });
  }
}

void Combine::add_use_of_last_stage(bool own) {
  for_each_shared(own, [&](const SharedPart& part) {
    const TensorView other = part.view(exchange_.data());
    axes_.pp.recv(other.data, other.bytes(), plan_.last_stage, kReceivedUse).wait();
    const zero::TierLease lease = use(plan_.shared_grads(), part, zero::LeaseTo::Write);
    const TensorView sum = part.view(lease);
    ops_.fold(sum, {&other, 1}, true, stream_);
    Ticket sent = axes_.pp.send(sum.data, sum.bytes(), plan_.last_stage, kSentUse);
    if (in_place()) {
      sent_.push_back(std::move(sent));
    } else {
      sent.wait();
    }
  });
}

// If sums are elsewhere, take_sum() sends a part at a time.
void Combine::send_use(bool own) {
  if (!in_place()) return;
  for_each_shared(own, [&](const SharedPart& part) {
    const TensorView mine = part.view(use(plan_.shared_grads(), part, zero::LeaseTo::Read));
    sent_.push_back(axes_.pp.send(mine.data, mine.bytes(), plan_.first_stage, kSentUse));
  });
}

void Combine::take_sum(bool own) {
  auto sent = sent_.begin();
  for_each_shared(own, [&](const SharedPart& part) {
    if (sent != sent_.end()) {
      (sent++)->wait();
    } else {
      const zero::TierLease lease = use(plan_.shared_grads(), part, zero::LeaseTo::Read);
      const TensorView mine = part.view(lease);
      axes_.pp.send(mine.data, mine.bytes(), plan_.first_stage, kSentUse).wait();
    }
    const zero::TierLease lease = use(plan_.shared_grads(), part, zero::LeaseTo::Fill);
    const TensorView sum = part.view(lease);
    axes_.pp.recv(sum.data, sum.bytes(), plan_.first_stage, kReceivedUse).wait();
  });
  sent_.clear();
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
