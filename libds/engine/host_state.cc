// SPDX-License-Identifier: Apache-2.0
#include "engine/host_state.h"

#include <algorithm>
#include <utility>

namespace ds::engine {

HostState::HostState(Engine& engine, std::vector<zero::Piece> pieces, Memory memory)
    : engine_(engine), where_(std::move(pieces)) {
  const bool in_place = engine.device().is_host() && engine.states_in_place() && memory != Memory::Copy;
  const bool in_parts = engine.device().is_host() && !engine.states_in_place() && memory == Memory::InParts;
  for (const zero::Piece& piece : where_) {
    const model::ParamSlice& slice = engine.row_of(piece.param).slice;
    pieces_.push_back({.param = piece.param,
                       .begin = piece.begin,
                       .count = piece.count,
                       .data = {},
                       .slice = slice.whole() ? nullptr : &slice,
                       .kept = {},
                       .open = {}});
    if (in_parts) open_in_parts(pieces_.back(), piece);
    if (!in_place) continue;
    const zero::StateLease lease = engine.lease(piece, zero::LeaseTo::Read);
    pieces_.back().data = lease;
    pieces_.back().kept = lease.kept;
  }
  if (in_place || in_parts) return;
  const i64 bytes = place(nullptr);
  DS_ASSERT(!engine.states_in_place() || bytes <= engine.plan().state_bytes);  // a plan knows no other tier
  memory_ = Buffer(engine.ledger(), Tag::Host, std::max(bytes, engine.plan().state_bytes));
  place(static_cast<char*>(memory_.data()));
}

void HostState::open_in_parts(StatePiece& p, const zero::Piece& piece) {
  const zero::StateLayout& states = engine_.plan().shards_of(p.param).states;
  p.opens[State::Param] = true;
  for (const State s : kStates) {
    if (s == State::Param || states.bytes(s) == 0 || !states.has(s, p.param)) continue;
    p.opens[s] = true;
    p.kept[s].dtype = states.dtype(s, p.param);
  }
  p.open = [this, piece, slice = p.slice](i64 first, i64 n, bool fill) {
    static_assert(StatePiece::kMostOpen <= zero::StateStore::kLeaseElems && StatePiece::kMostOpen % kStateBlock == 0);
    const zero::Piece part = piece.part(first, n);
    part_.reset();
    part_.emplace(engine_.lease(part, fill ? zero::LeaseTo::Fill : zero::LeaseTo::Read));
    return StatePiece{.param = piece.param,
                      .begin = part.begin,
                      .count = n,
                      .data = *part_,
                      .slice = slice,
                      .kept = part_->kept,
                      .open = {}};
  };
}

i64 HostState::place(char* memory) {
  i64 end = 0;
  const auto take = [&](i64 bytes) -> char* {
    const i64 at = std::exchange(end, end + bytes);
    return memory == nullptr ? nullptr : memory + at;  // only counted
  };
  for (StatePiece& p : pieces_) {
    const zero::StateLayout& states = engine_.plan().shards_of(p.param).states;
    for (const State s : kStates) {
      if (s == State::Param || states.bytes(s) == 0 || !states.has(s, p.param)) continue;
      const DType dtype = p.kept[s].dtype = states.dtype(s, p.param);
      const i64 bytes = p.count * dtype_bytes(dtype);
      p.data[s] = take(dtype == DType::F32 ? bytes : align_up(bytes, 32));  // floats follow
      if (is_coded(dtype)) p.kept[s].scales = reinterpret_cast<float*>(take(state_blocks(p.count) * 4));
    }
  }
  for (StatePiece& p : pieces_)
    p.data[State::Param] = take(p.count * dtype_bytes(engine_.plan().work));  // of two bytes
  return end;
}

void HostState::for_each_part(zero::LeaseTo access, FunctionRef<void(void*, void*, i64)> move) {
  const i64 work_bytes = dtype_bytes(engine_.plan().work);
  for (size_t i = 0; i < where_.size(); ++i) {
    const StatePiece& host = pieces_[i];
    zero::for_each_part(where_[i], zero::StateStore::kLeaseElems, [&](const zero::Piece& part) {
      const zero::StateLease device = engine_.lease(part, access);
      const i64 first = part.begin - where_[i].begin;
      for (const State s : kStates) {
        if (host.data[s] == nullptr) continue;
        const i64 width = s == State::Param ? work_bytes : dtype_bytes(host.kept[s].dtype);
        move(static_cast<char*>(host.data[s]) + first * width, device[s], part.count * width);
        if (host.kept[s].scales == nullptr) continue;
        move(host.kept[s].scales + first / kStateBlock, device.kept[s].scales, state_blocks(part.count) * 4);
      }
    });
  }
}

void HostState::download() {
  if (!memory_) return;
  for_each_part(zero::LeaseTo::Read,
                [&](void* host, void* device, i64 bytes) { engine_.device().download(host, device, bytes); });
}

void HostState::upload() {
  part_.reset();
  if (!memory_) return;
  for_each_part(zero::LeaseTo::Write,
                [&](void* host, void* device, i64 bytes) { engine_.device().upload(device, host, bytes); });
}

}  // namespace ds::engine
