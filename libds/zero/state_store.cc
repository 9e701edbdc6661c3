// SPDX-License-Identifier: Apache-2.0
#include "zero/state_store.h"

namespace ds::zero {
namespace {

// Whether a rule uses a state: it uses at most two of those that there are, in their order.
bool takes(UpdateRule rule, State s) noexcept {
  switch (facts_of(rule).states) {
    case RuleStates::Optimizer: return s != State::ExpAvgSqFresh && !is_outer_state(s);
    case RuleStates::Variances: return s == State::ExpAvgSq || s == State::ExpAvgSqFresh;
    case RuleStates::Outer: return is_outer_state(s);
  }
  return false;
}

}  // namespace

StateLease::~StateLease() {
  if (store_ != nullptr) store_->end_lease(piece_, access_, *this);
}

StateStore::StateStore(Parts parts) : parts_(std::move(parts)) {
  if (!parts_.undoes) return;
  i64 elems = 0;
  for (const Piece& piece : parts_.held) elems += piece.count;
  kept_params_ = device_buffer(parts_.device, parts_.ledger, Tag::Params, elems * dtype_bytes(parts_.work));
}

StateStore::~StateStore() = default;

void StateStore::keep() {
  move_params(Way::Keep);
  keep_states();
}

void StateStore::undo() {
  move_params(Way::Undo);
  undo_states();
}

void StateStore::move_params(Way way) {
  char* at = kept_params_.as<char>().data();
  for (const Piece& piece : parts_.held) {
    for_each_part(piece, parts_.params.trained_in_place() ? piece.count : kLeaseElems, [&](const Piece& part) {
      const i64 bytes = part.count * dtype_bytes(parts_.work);
      const TierLease lease = parts_.params.lease(part, way == Way::Keep ? LeaseTo::Read : LeaseTo::Fill);
      way == Way::Keep ? parts_.device.copy(at, lease.data(), bytes) : parts_.device.copy(lease.data(), at, bytes);
      at += bytes;
    });
  }
}

UpdateTensor StateStore::tensor(UpdateRule rule, const Piece& piece, const PieceState& st,
                                float* gradient) const noexcept {
  UpdateTensor t{.param = TensorView::of(st[State::Param], parts_.work, {piece.count}),
                 .master = st.master(parts_.work, piece.count),
                 .states = {},
                 .grad = TensorView::of(gradient, DType::F32, {piece.count})};
  size_t i = 0;
  for (const State s : kOptimizerStates) {
    if (st[s] != nullptr && takes(rule, s)) t.states[i++] = st.view(s, piece.count);
  }
  return t;
}

void run_pass(const OpTable& ops, Stream& stream, Tile tile, const UpdateSpec& spec, const GradVerdict* verdict,
              FunctionRef<UpdateTensor(const Piece&)> tensor, std::vector<UpdateTensor>& scratch) {
  scratch.clear();
  for (const TilePiece& p : tile) {
    UpdateTensor t = tensor(p.piece);
    if (facts_of(spec.params.rule).num_states == 0) t.states[0] = t.states[1] = {};
    t.factor = spec.factors == nullptr ? nullptr : spec.factors + p.index;
    t.weight_decay = spec.decay ? p.weight_decay : 0;
    t.site = p.site;
    t.first = p.piece.begin;
    scratch.push_back(t);
  }
  ops.update(scratch, verdict, spec.params, stream);
}

DeviceStates::DeviceStates(Parts parts) : StateStore(std::move(parts)) {
  for (const State s : kStates) {
    const i64 bytes = parts_.layout.bytes(s);
    if (bytes == 0) continue;
    arrays_[s] = device_buffer(parts_.device, parts_.ledger, s == State::Master ? Tag::Master : Tag::Optimizer, bytes);
  }
  tensors_.reserve(parts_.held.size());
  leases_.reserve(2 * parts_.held.size());
  if (!parts_.undoes) return;
  for (const State s : kStates) {
    if (arrays_[s])
      kept_[s] = device_buffer(parts_.device, parts_.ledger, s == State::Master ? Tag::Master : Tag::Optimizer,
                               arrays_[s].bytes());
  }
}

void DeviceStates::keep_states() {
  for (const State s : kStates) {
    if (arrays_[s]) parts_.device.copy(kept_[s].data(), arrays_[s].data(), arrays_[s].bytes());
  }
}

void DeviceStates::undo_states() {
  for (const State s : kStates) {
    if (arrays_[s]) parts_.device.copy(arrays_[s].data(), kept_[s].data(), arrays_[s].bytes());
  }
}

PieceState DeviceStates::state(const Piece& piece, void* param) const noexcept {
  PieceState st;
  st[State::Param] = param;
  for (const State s : kStates) {
    if (!arrays_[s] || !parts_.layout.has(s, piece.param)) continue;
    char* const array = arrays_[s].as<char>().data();
    st[s] = array + parts_.layout.offset(s, piece);
    st.kept[s].dtype = parts_.layout.dtype(s, piece.param);
    if (is_coded(st.kept[s].dtype))
      st.kept[s].scales = reinterpret_cast<float*>(array + parts_.layout.scales_offset(s, piece));
  }
  return st;
}

void DeviceStates::update(Tile tile, const UpdateSpec& spec, VerdictHandle& verdict) {
  const LeaseTo direction = facts_of(spec.params.rule).makes_direction() ? LeaseTo::Write : LeaseTo::Read;
  const auto run = [&](Tile pieces) {
    run_pass(
        parts_.device.ops(), parts_.device.stream(), pieces, spec, verdict.on_device(),
        [&](const Piece& piece) {
          void* const param = leases_.emplace_back(parts_.params.lease(piece, LeaseTo::Write)).data();
          return tensor(spec.params.rule, piece, state(piece, param),
                        leases_.emplace_back(parts_.gradients.lease(piece, direction)).values());
        },
        tensors_);
    leases_.clear();
  };
  if (all_at_once()) return run(tile);
  for (const TilePiece& p : tile) {
    for_each_part(p.piece, kLeaseElems, [&](const Piece& part) {
      TilePiece here = p;
      here.piece = part;
      run({&here, 1});
    });
  }
}

void DeviceStates::for_each_master(Tile tile, Visit visit) {
  for (const TilePiece& p : tile) {
    const TierLease param = parts_.params.lease(p.piece, LeaseTo::Read);
    visit(p, state(p.piece, param.data()).master(parts_.work, p.piece.count));
  }
}

StateLease DeviceStates::lease(const Piece& piece, LeaseTo access) {
  TierLease param = parts_.params.lease(piece, access);
  const PieceState st = state(piece, param.data());
  return {this, piece, access, st, std::move(param)};
}

}  // namespace ds::zero
