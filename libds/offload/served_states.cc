// SPDX-License-Identifier: Apache-2.0
#include "offload/served_states.h"

#include <algorithm>
#include <cstring>

namespace ds::offload {
namespace {

constexpr i64 kLine = 64;

std::vector<zero::Piece> all_pieces(const zero::StateStore::Parts& parts) {
  std::vector<zero::Piece> all = parts.held;
  all.insert(all.end(), parts.fixed.begin(), parts.fixed.end());
  std::ranges::stable_sort(all, {}, &zero::Piece::param);
  return all;
}

}  // namespace

ServedStates::ServedStates(Parts parts, const Options& options)
    : StateStore(std::move(parts)),
      all_(all_pieces(parts_)),
      chunks_(all_, parts_.layout, options.most, ChunkLayout::Masters::Always),
      options_(options) {
  i64 elems = 0;
  for (const zero::Piece& piece : all_) lease_elems_ = std::max(lease_elems_, std::min(piece.count, kLeaseElems));
  for (const zero::Piece& piece : parts_.held) elems = std::max(elems, piece.shard_offset + piece.count);
  elems = align_up(elems, kLine);
  lease_elems_ = align_up(lease_elems_, kStateBlock);
  i64 bytes = 0;
  for (const State s : kStates) {
    places_[s] = -1;
    if (chunks_.state_bytes()[s] == 0) continue;
    places_[s] = bytes;
    bytes += align_up(lease_elems_ * 4 + state_blocks(lease_elems_) * 4, kLine);
  }
  work_at_ = bytes;
  bytes += elems * dtype_bytes(parts_.work);
  gradients_at_ = bytes;
  if (!options.shares_gradients) bytes += elems * 4;
  if (options.link != nullptr) segment_ = &options.link->new_segment(bytes);
  window_ = segment_buffer(segment_, options.host, parts_.ledger, options.tag, bytes);
  if (options.apart) place_ = device_buffer(parts_.device, parts_.ledger, Tag::Offload, work_at_);
  if (options.link != nullptr) set_ = options.link->add(describe());
}

ServedSet ServedStates::describe() const {
  ServedSet set{.work = parts_.work, .elems = lease_elems_, .places = places_};
  set.window = segment_->path();
  set.window_bytes = segment_->bytes();
  if (options_.gradients != nullptr) {
    set.gradients = options_.gradients->path();
    set.gradient_bytes = options_.gradients->bytes();
  }
  for (const Chunk& c : chunks_.chunks()) set.chunk_bytes.push_back(c.bytes);
  for (const ChunkPart& part : chunks_.parts()) {
    ServedPart& p = set.parts.emplace_back();
    p.param = part.piece.param, p.begin = part.piece.begin, p.count = part.piece.count, p.chunk = part.chunk;
    const bool trained = parts_.layout.is_trained(p.param);
    p.work = trained ? work_of(part.piece) - window() : -1;
    if (!trained) {
      p.gradient = -1;
    } else if (options_.gradients != nullptr) {
      const void* const there = options_.apart ? parts_.gradients.on_host(part.piece)
                                               : parts_.gradients.lease(part.piece, zero::LeaseTo::Read).data();
      DS_ASSERT(options_.gradients->contains(there));
      p.gradient = static_cast<const char*>(there) - options_.gradients->data();
    } else {
      p.gradient = reinterpret_cast<char*>(gradient_of(part.piece)) - window();
    }
    p.offsets = part.offsets;
    p.scales = part.scales;
    const StateSet has = stored(part.piece.param, false);
    for (const State s : kStates)
      p.dtypes[s] = !has[s] ? -1 : static_cast<i64>(s == State::Master ? DType::F32 : parts_.layout.dtype(s, p.param));
  }
  return set;
}

StateSet ServedStates::stored(i64 param, bool but_master) const noexcept {
  StateSet set;
  for (const State s : kOptimizerStates) set[s] = parts_.layout.bytes(s) > 0 && parts_.layout.has(s, param);
  set[State::Master] = !but_master;
  return set;
}

zero::PieceState ServedStates::leased_state(i64 param) const noexcept {
  zero::PieceState st;
  const StateSet has = stored(param, owns_master(param));
  for (const State s : kStates) {
    if (!has[s]) continue;
    char* const at = places() + places_[s];
    st[s] = at;
    if (s == State::Master) continue;
    st.kept[s].dtype = parts_.layout.dtype(s, param);
    if (is_coded(st.kept[s].dtype)) st.kept[s].scales = reinterpret_cast<float*>(at + lease_elems_ * 4);
  }
  return st;
}

void ServedStates::for_each_place(const zero::Piece& piece, const StateSet& states,
                                  FunctionRef<void(i64, i64)> visit) const {
  for (const State s : kStates) {
    if (!states[s]) continue;
    const DType dtype = s == State::Master ? DType::F32 : parts_.layout.dtype(s, piece.param);
    visit(places_[s], piece.count * dtype_bytes(dtype));
    if (is_coded(dtype)) visit(places_[s] + lease_elems_ * 4, state_blocks(piece.count) * 4);
  }
}

void ServedStates::read(const zero::Piece& piece, const StateSet& states) {
  options_.link->read(set_, piece.param, piece.begin, piece.count, states);
  if (!options_.apart) return;
  for_each_place(piece, states, [&](i64 at, i64 bytes) { parts_.device.upload(places() + at, window() + at, bytes); });
}

i64 ServedStates::tile_of(zero::Tile tile) {
  const auto [it, is_new] = tiles_.try_emplace(tile.data(), 0);
  if (!is_new) return it->second;
  std::vector<ServedPiece> pieces;
  for (const zero::TilePiece& p : tile)
    pieces.push_back({p.piece.param, p.piece.begin, p.piece.count, p.index, p.weight_decay, p.site});
  return it->second = options_.link->define_tile(set_, pieces);
}

void ServedStates::update(zero::Tile tile, const UpdateSpec& spec, zero::VerdictHandle& verdict) {
  if (!verdict.resolve().finite) return;
  const bool directs = facts_of(spec.params.rule).makes_direction();
  const auto for_each_gradient = [&](zero::LeaseTo access, auto&& visit) {
    if (options_.shares_gradients) return;
    for (const zero::TilePiece& p : tile) {
      zero::for_each_part(p.piece, kLeaseElems, [&](const zero::Piece& part) {
        visit(gradient_of(part), parts_.gradients.lease(part, access).data(), part.count * 4);
      });
    }
  };
  i64 elems = 0, params = 0;
  for (const zero::TilePiece& p : tile) {
    elems += p.piece.count;
    params = std::max(params, p.index + 1);
  }
  options_.counts->written_bytes += elems * 4;
  if (options_.copies != nullptr && !options_.shares_gradients)
    *options_.copies = *options_.copies + HostCopies{directs ? elems * 4 : 0, elems * 4};
  if (!directs) changed_.push_back(tile);
  if (options_.link == nullptr) return count_update(tile, spec);
  if (options_.shares_gradients) parts_.device.synchronize(Queue::Copies);  // they are there for the server
  for_each_gradient(zero::LeaseTo::Read,
                    [&](float* there, void* here, i64 bytes) { parts_.device.download(there, here, bytes); });
  ServedRun run{
      .set = set_, .tile = tile_of(tile), .params = spec.params, .verdict = verdict.resolve(), .decay = spec.decay};
  if (spec.factors != nullptr) {
    run.factors.resize(static_cast<size_t>(params));
    parts_.device.download(run.factors.data(), spec.factors, params * 4);
  }
  await([&] { options_.link->run(std::move(run)); });
  if (!directs) return;
  for_each_gradient(zero::LeaseTo::Fill,
                    [&](float* there, void* here, i64 bytes) { parts_.device.upload(here, there, bytes); });
}

// Counts the server's computation as a part of the step.
void ServedStates::count_update(zero::Tile tile, const UpdateSpec& spec) {
  zero::run_pass(
      options_.host.device().ops(), options_.host.device().stream(), tile, spec, nullptr,
      [&](const zero::Piece& piece) {
        zero::PieceState st = leased_state(piece.param);
        st[State::Param] = work_of(piece);
        st[State::Master] = places() + places_[State::Master];
        return tensor(spec.params.rule, piece, st, gradient_of(piece));
      },
      tensors_);
}

void ServedStates::settle(zero::VerdictHandle& verdict, i64) {
  if (options_.link == nullptr) return bring_params();
  await([&] { options_.link->settle(verdict.resolve(), [this] { bring_params(); }); });
}

// Sends a request to the server, waits for it, and counts the time.
void ServedStates::await(FunctionRef<void()> ask) {
  const Clock::time_point begin = Clock::now();
  const BusyTime::Span busy(options_.busy);
  ask();
  options_.counts->waited_s += seconds_since(begin);
}

void ServedStates::bring_params() {
  for (const zero::Tile tile : changed_) {
    for (const zero::TilePiece& p : tile) {
      zero::for_each_part(p.piece, kLeaseElems, [&](const zero::Piece& part) {
        const i64 bytes = part.count * dtype_bytes(parts_.work);
        options_.counts->read_bytes += bytes;
        void* const there = parts_.params.on_host(part);
        if (there == nullptr) {
          HostLink(parts_.device, options_.copies)
              .upload(parts_.params.lease(part, zero::LeaseTo::Fill).data(), work_of(part), bytes);
        } else if (options_.link != nullptr) {
          std::memcpy(there, work_of(part), static_cast<size_t>(bytes));
        }
      });
    }
  }
  changed_.clear();
}

void ServedStates::for_each_master(zero::Tile tile, Visit visit) {
  for (const zero::TilePiece& p : tile) {
    zero::for_each_part(p.piece, kLeaseElems, [&](const zero::Piece& part) {
      if (options_.link != nullptr) read(part, state_set({State::Master}));
      zero::TilePiece here = p;
      here.piece = part;
      visit(here, TensorView::of(places() + places_[State::Master], DType::F32, {part.count}));
    });
  }
}

void ServedStates::restore_params() {
  for (const zero::Piece& piece : all_) {
    zero::for_each_part(piece, kLeaseElems, [&](const zero::Piece& part) {
      read(part, state_set({State::Master}));
      const TensorView master = TensorView::of(places() + places_[State::Master], DType::F32, {part.count});
      const zero::TierLease param = parts_.params.lease(part, zero::LeaseTo::Fill);
      if (parts_.work == DType::F32) {
        parts_.device.copy(param.data(), master.data, part.count * 4);
      } else {
        parts_.device.ops().cast(TensorView::of(param.data(), parts_.work, {part.count}), master,
                                 parts_.device.stream());
      }
    });
  }
}

zero::StateLease ServedStates::lease(const zero::Piece& piece, zero::LeaseTo access) {
  DS_ASSERT(piece.count <= kLeaseElems);
  zero::TierLease param = parts_.params.lease(piece, access);
  zero::PieceState st = leased_state(piece.param);
  st[State::Param] = param.data();
  if (access != zero::LeaseTo::Fill) read(piece, stored(piece.param, owns_master(piece.param)));
  return {this, piece, access, st, std::move(param)};
}

void ServedStates::end_lease(const zero::Piece& piece, zero::LeaseTo access, const zero::PieceState& st) noexcept {
  if (access == zero::LeaseTo::Read) return;
  try {
    const bool own_master = owns_master(piece.param);
    if (own_master) {
      const i64 at = places_[State::Master];
      const TensorView master = TensorView::of(places() + at, DType::F32, {piece.count});
      parts_.device.ops().cast(master, TensorView::of(st[State::Param], parts_.work, {piece.count}),
                               parts_.device.stream());
      if (options_.apart) parts_.device.download(window() + at, master.data, master.bytes());
    }
    if (options_.apart) {
      for_each_place(piece, stored(piece.param, own_master),
                     [&](i64 at, i64 bytes) { parts_.device.download(window() + at, places() + at, bytes); });
    }
    options_.link->write(set_, piece.param, piece.begin, piece.count, stored(piece.param, false));
  } catch (...) {  // the next call reports it
    options_.link->fail(std::current_exception());
  }
}

}  // namespace ds::offload
