// SPDX-License-Identifier: Apache-2.0
#include "engine/host_state.h"

#include <algorithm>
#include <utility>

namespace ds::engine {

HostState::HostState(Engine& engine, std::vector<zero::Piece> pieces, Memory memory)
    : engine_(engine), where_(std::move(pieces)) {
  const bool in_place = engine.device().is_host() && engine.states_in_place() && memory != Memory::Copy;
  in_parts_ = memory == Memory::InParts && !in_place;
  for (const zero::Piece& piece : where_) {
    const model::ParamSlice& slice = engine.row_of(piece.param).slice;
    pieces_.push_back({.param = piece.param,
                       .begin = piece.begin,
                       .count = piece.count,
                       .data = {},
                       .slice = slice.whole() ? nullptr : &slice,
                       .kept = {},
                       .open = {}});
    if (in_parts_) open_in_parts(pieces_.back(), piece);
    if (!in_place) continue;
    const zero::StateLease lease = engine.lease(piece, zero::LeaseTo::Read);
    pieces_.back().data = lease;
    pieces_.back().kept = lease.kept;
  }
  if (in_place || (in_parts_ && engine.device().is_host())) return;
  if (in_parts_) {  // any part has room where the largest one has
    const i64 bytes = engine.plan().memory.state_part_bytes;
    memory_ = Buffer(engine.ledger(), Tag::Host, bytes);
    return;
  }
  const i64 bytes = place(pieces_, nullptr);
  DS_ASSERT(memory != Memory::Copy || !engine.states_in_place() || bytes <= engine.plan().memory.state_bytes);
  pieces_bytes_ = bytes;
  i64 rank_local = 0;
  for (const auto& [name, values] : engine.rank_local()) rank_local += values.bytes();
  memory_ = Buffer(engine.ledger(), Tag::Host, std::max(bytes + rank_local, engine.plan().memory.state_bytes));
  place(pieces_, memory_.as<char>().data());
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
    close_part();
    part_.emplace(engine_.lease(part, fill ? zero::LeaseTo::Fill : zero::LeaseTo::Read));
    fills_ = fill;
    StatePiece opened{.param = piece.param,
                      .begin = part.begin,
                      .count = n,
                      .data = *part_,
                      .slice = slice,
                      .kept = part_->kept,
                      .open = {}};
    if (engine_.device().is_host()) return opened;
    const i64 bytes = place({&opened, 1}, memory_.as<char>().data());
    DS_ASSERT(bytes <= memory_.bytes());
    if (!fill) move_part(opened, 0, n, *part_, [&](void* h, void* d, i64 size) { download(h, d, size); });
    copy_ = opened;
    return opened;
  };
}

void HostState::close_part() {
  if (part_ && fills_ && !engine_.device().is_host())
    move_part(copy_, 0, copy_.count, *part_, [&](void* h, void* d, i64 size) { upload(h, d, size); });
  part_.reset();
}

i64 HostState::place(std::span<StatePiece> pieces, char* memory) const {
  i64 end = 0;
  const auto take = [&](i64 bytes) -> char* {
    const i64 at = std::exchange(end, end + bytes);
    return memory == nullptr ? nullptr : memory + at;  // only counted
  };
  for (StatePiece& p : pieces) {
    const zero::StateLayout& states = engine_.plan().shards_of(p.param).states;
    for (const State s : kStates) {
      if (s == State::Param || states.bytes(s) == 0 || !states.has(s, p.param)) continue;
      const DType dtype = p.kept[s].dtype = states.dtype(s, p.param);
      const i64 bytes = p.count * dtype_bytes(dtype);
      p.data[s] = take(dtype == DType::F32 ? bytes : align_up(bytes, 32));  // floats follow
      if (is_coded(dtype)) p.kept[s].scales = reinterpret_cast<float*>(take(state_blocks(p.count) * 4));
    }
  }
  for (const i64 width : {4, 2}) {  // those of two bytes come last
    for (StatePiece& p : pieces) {
      if (dtype_bytes(engine_.plan().work_of(p.param)) == width) p.data[State::Param] = take(p.count * width);
    }
  }
  return end;
}

void HostState::move_part(const StatePiece& host, i64 first, i64 count, const zero::StateLease& device,
                          Move move) const {
  const i64 work_bytes = dtype_bytes(engine_.plan().work_of(host.param));
  for (const State s : kStates) {
    if (host.data[s] == nullptr) continue;
    const i64 width = s == State::Param ? work_bytes : dtype_bytes(host.kept[s].dtype);
    move(static_cast<char*>(host.data[s]) + first * width, device[s], count * width);
    if (host.kept[s].scales == nullptr) continue;
    move(host.kept[s].scales + first / kStateBlock, device.kept[s].scales, state_blocks(count) * 4);
  }
}

void HostState::move_all(zero::LeaseTo access, Move move) {
  for (size_t i = 0; i < where_.size(); ++i) {
    zero::for_each_part(where_[i], zero::StateStore::kLeaseElems, [&](const zero::Piece& part) {
      move_part(pieces_[i], part.begin - where_[i].begin, part.count, engine_.lease(part, access), move);
    });
  }
}

// Behind the pieces, where memory is the host's copy.
void HostState::download_rank_local() {
  rank_local_.clear();
  i64 end = memory_ ? memory_.bytes() : 0;
  for (const auto& [name, values] : engine_.rank_local()) {
    const float* at = values.as<float>();
    if (memory_) {
      end -= values.bytes();
      DS_ASSERT(end >= pieces_bytes_);
      at = reinterpret_cast<float*>(memory_.as<char>().data() + end);
      download(memory_.as<char>().data() + end, values.data, values.bytes());
    }
    rank_local_.push_back({name, at, values.numel()});
  }
}

void HostState::download() {
  download_rank_local();
  if (in_parts_ || !memory_) return;
  move_all(zero::LeaseTo::Read, [&](void* host, void* device, i64 bytes) { download(host, device, bytes); });
}

void HostState::upload() {
  close_part();
  if (in_parts_ || !memory_) return;
  move_all(zero::LeaseTo::Write, [&](void* host, void* device, i64 bytes) { upload(host, device, bytes); });
}

}  // namespace ds::engine
