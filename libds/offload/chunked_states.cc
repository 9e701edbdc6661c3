// SPDX-License-Identifier: Apache-2.0
#include "offload/chunked_states.h"

#include <algorithm>
#include <utility>

namespace ds::offload {

ChunkedStates::ChunkedStates(Parts parts, i64 most, const UpdateHost& host, const MakeChunks& make)
    : StateStore(std::move(parts)),
      chunks_(parts_.held, parts_.layout, most),
      host_(host),
      memory_(make(chunks_, parts_.device, parts_.ledger)) {
  i64 states = 0, largest = 0, elems = 0;
  for (const zero::Piece& piece : parts_.held)
    lease_elems_ = std::max(lease_elems_, std::min(piece.count, kLeaseElems));
  lease_elems_ = align_up(lease_elems_, kStateBlock);
  place_bytes_ = lease_elems_ * 4 + state_blocks(lease_elems_) * 4;
  for (const State s : kStates) states += chunks_.state_bytes()[s] > 0 ? 1 : 0;
  for (const Chunk& c : chunks_.chunks()) {
    largest = std::max(largest, c.num_parts);
    elems = std::max(elems, c.elems);
  }
  place_ = device_buffer(parts_.device, parts_.ledger, Tag::Offload, states * place_bytes_);
  if (host.apart) {
    for (Desk& desk : desks_) {
      desk.gradients = host.staging.take(parts_.ledger, Tag::Host, elems * 4);
      desk.params = host.staging.take(parts_.ledger, Tag::Host, elems * dtype_bytes(parts_.work));
      desk.came = parts_.device.make_event();
      desk.went = parts_.device.make_event();
    }
    ready_ = parts_.device.make_event();
    factors_.reserve(parts_.layout.of_params().size());
  }
  items_.reserve(chunks_.parts().size());
  tile_.reserve(static_cast<size_t>(largest));
  tensors_.reserve(static_cast<size_t>(largest));
  places_.reserve(host.apart ? static_cast<size_t>(largest) : 0);
  leases_.reserve(static_cast<size_t>(2 * largest));
}

ChunkedStates::~ChunkedStates() {
  if (!host_.apart) return;
  try {
    parts_.device.synchronize(Queue::Copies);
  } catch (...) {  // an error of the device, which its next call reports
  }
  for (const Desk& desk : desks_) {
    parts_.device.destroy(desk.came);
    parts_.device.destroy(desk.went);
  }
  parts_.device.destroy(ready_);
}

zero::PieceState ChunkedStates::state(const ChunkPart& part, char* memory, void* param) const noexcept {
  zero::PieceState st;
  st[State::Param] = param;
  for (const State s : kStates) {
    if (s == State::Param || parts_.layout.bytes(s) == 0 || !parts_.layout.has(s, part.piece.param)) continue;
    st[s] = memory + part.offsets[s];
    st.kept[s].dtype = parts_.layout.dtype(s, part.piece.param);
    if (is_coded(st.kept[s].dtype)) st.kept[s].scales = reinterpret_cast<float*>(memory + part.scales[s]);
  }
  return st;
}

void ChunkedStates::for_each_chunk(zero::Tile tile, bool backward, bool change,
                                   FunctionRef<void(std::span<const Item>, std::span<const Item>, i64, char*)> visit) {
  items_.clear();
  for (const zero::TilePiece& p : tile)
    chunks_.for_each_part(p.piece, [&](const ChunkPart& part) { items_.push_back({part, &p}); });
  // The parameters of a kind follow each other in the chunks as they do in the tile.
  std::ranges::stable_sort(items_, {}, [](const Item& i) { return i.part.chunk; });
  const std::span<const Item> items = items_;
  const auto chunk_at = [&](size_t i) { return items[i].part.chunk; };
  // The next chunk of the tile, in the order of this pass, of items [begin, end).
  size_t begin = backward ? items.size() : 0, end = begin;
  const auto advance = [&](size_t& b, size_t& e) {
    if (backward) {
      if (b == 0) return false;
      for (e = b; b > 0 && chunk_at(b - 1) == chunk_at(e - 1);) --b;
    } else {
      if (e == items.size()) return false;
      for (b = e; e < items.size() && chunk_at(e) == chunk_at(b);) ++e;
    }
    return true;
  };
  while (advance(begin, end)) {
    const i64 chunk = chunk_at(begin);
    char* const memory = memory_->take(chunk, change);
    size_t b = begin, e = end;
    for (i64 ahead = 0; ahead < memory_->most_expected() && advance(b, e); ++ahead) memory_->expect(chunk_at(b));
    b = begin, e = end;
    const std::span next = advance(b, e) ? items.subspan(b, e - b) : std::span<const Item>();
    visit(items.subspan(begin, end - begin), next, chunk, memory);
    memory_->give_back(chunk, change);
  }
}

zero::Tile ChunkedStates::tile_of(std::span<const Item> items) {
  tile_.clear();
  for (const Item& i : items) {
    tile_.push_back(*i.of);
    tile_.back().piece = i.part.piece;
  }
  return tile_;
}

void ChunkedStates::update_in_place(std::span<const Item> items, char* memory, const UpdateSpec& spec,
                                    zero::VerdictHandle& verdict) {
  const bool directs = facts_of(spec.params.rule).makes_direction();
  // A rounded parameter is written as a whole; one that is its own master is read.
  const zero::LeaseTo param_access = directs                       ? zero::LeaseTo::Read
                                     : parts_.layout.own_masters() ? zero::LeaseTo::Write
                                                                   : zero::LeaseTo::Fill;
  Device& device = host_.apart ? parts_.device : host_.device();
  size_t next = 0;
  zero::run_pass(
      device.ops(), device.stream(), tile_of(items), spec, verdict.on_device(),
      [&](const zero::Piece& piece) {
        const ChunkPart& part = items[next++].part;
        void* const param = leases_.emplace_back(parts_.params.lease(piece, param_access)).data();
        zero::TierLease& gradient =
            leases_.emplace_back(parts_.gradients.lease(piece, directs ? zero::LeaseTo::Write : zero::LeaseTo::Read));
        return tensor(spec.params.rule, piece, state(part, memory, param), gradient.values());
      },
      tensors_);
  leases_.clear();
}

std::span<const ChunkedStates::Places> ChunkedStates::places_of(const Desk& desk, std::span<const Item> items) {
  const auto place = [](void* there, char* here) { return there != nullptr ? Place{there, true} : Place{here, false}; };
  places_.clear();
  i64 at = 0;
  for (const Item& i : items) {
    const zero::Piece& p = i.part.piece;
    places_.push_back({place(parts_.gradients.on_host(p), desk.gradients.as<char>().data() + at * 4),
                       place(parts_.params.on_host(p), desk.params.as<char>().data() + at * dtype_bytes(parts_.work))});
    at += p.count;
  }
  return places_;
}

// Makes the next copies wait for the computation enqueued so far.
void ChunkedStates::follow_compute() {
  parts_.device.record(ready_, Queue::Compute);
  parts_.device.wait(Queue::Copies, ready_);
}

// Beside what is computed where what is copied stays in the device's memory; else it is there when the call returns.
// A delayed update runs while another thread uses the device: all that it works with stays with the host, and the
// device is not asked.
void ChunkedStates::bring(Desk& desk, std::span<const Item> items, bool with_params) {
  const HostLink link(parts_.device, host_.copies);
  Device& device = parts_.device;
  desk.chunk = items.front().part.chunk;
  bool begun = false;
  const auto copy = [&](const zero::PieceMemory& from, const zero::Piece& p, const Place& to, i64 bytes) {
    if (to.stays) return;
    if (!std::exchange(begun, true)) follow_compute();
    const zero::TierLease lease = from.lease(p, zero::LeaseTo::Read);
    from.in_place() ? link.start_download(to.data, lease.data(), bytes) : link.download(to.data, lease.data(), bytes);
  };
  const std::span<const Places> places = places_of(desk, items);
  for (size_t i = 0; i < items.size(); ++i) {
    const zero::Piece& p = items[i].part.piece;
    copy(parts_.gradients, p, places[i].gradient, p.count * 4);
    if (with_params) copy(parts_.params, p, places[i].param, p.count * dtype_bytes(parts_.work));
  }
  if (begun) device.record(desk.came, Queue::Copies);
}

void ChunkedStates::update_on_host(Desk& desk, std::span<const Item> items, char* memory, const UpdateSpec& spec,
                                   zero::VerdictHandle& verdict) {
  const HostLink link(parts_.device, host_.copies);
  Device& device = parts_.device;
  const bool directs = facts_of(spec.params.rule).makes_direction();
  const i64 width = dtype_bytes(parts_.work);
  const std::span<const Places> places = places_of(desk, items);
  const auto stays = [](const Places& x) { return x.gradient.stays && x.param.stays; };
  if (!std::ranges::all_of(places, stays)) {
    device.await(desk.came);
    device.await(desk.went);  // what it had before
  }
  UpdateSpec here = spec;
  if (spec.factors != nullptr) {
    i64 n = 0;
    for (const Item& i : items) n = std::max(n, i.of->index + 1);
    factors_.resize(static_cast<size_t>(n));
    link.download(factors_.data(), spec.factors, n * 4);
    here.factors = factors_.data();
  }
  size_t next = 0;
  zero::run_pass(
      host_.device().ops(), host_.device().stream(), tile_of(items), here, &verdict.resolve(),
      [&](const zero::Piece& piece) {
        const Places& at = places[next];
        return tensor(spec.params.rule, piece, state(items[next++].part, memory, at.param.data),
                      static_cast<float*>(at.gradient.data));
      },
      tensors_);
  bool begun = false;
  const auto copy = [&](const zero::PieceMemory& to, const zero::Piece& p, const Place& from, i64 bytes) {
    if (from.stays) return;
    const zero::TierLease lease = to.lease(p, zero::LeaseTo::Fill);
    if (!to.in_place()) return link.upload(lease.data(), from.data, bytes);
    if (!std::exchange(begun, true)) follow_compute();
    link.start_upload(lease.data(), from.data, bytes);
  };
  for (size_t i = 0; i < items.size(); ++i) {
    const zero::Piece& p = items[i].part.piece;
    directs ? copy(parts_.gradients, p, places[i].gradient, p.count * 4)
            : copy(parts_.params, p, places[i].param, p.count * width);
  }
  if (begun) {
    device.record(desk.went, Queue::Copies);
    device.wait(Queue::Compute, desk.went);
  }
}

void ChunkedStates::update_apart(std::span<const Item> items, std::span<const Item> next, i64 chunk, char* memory,
                                 const UpdateSpec& spec, zero::VerdictHandle& verdict) {
  const bool own_master = parts_.layout.own_masters();
  const size_t at = desks_[1].chunk == chunk ? 1 : 0;
  Desk &desk = desks_[at], &other = desks_[1 - at];
  if (desk.chunk != chunk) bring(desk, items, own_master);
  if (!next.empty() && !memory_->on_device(next.front().part.chunk)) bring(other, next, own_master);
  update_on_host(desk, items, memory, spec, verdict);
}

void ChunkedStates::update(zero::Tile tile, const UpdateSpec& spec, zero::VerdictHandle& verdict) {
  if (!verdict.resolve().finite) return;
  bool& backward = backward_[tile.data()];
  for (Desk& desk : desks_) desk.chunk.reset();
  const auto visit = [&](std::span<const Item> items, std::span<const Item> next, i64 chunk, char* memory) {
    const TraceSpan span(host_.trace, "tiles", "update of a tile", chunk);
    if (host_.apart && !memory_->on_device(chunk)) return update_apart(items, next, chunk, memory, spec, verdict);
    if (all_at_once()) return update_in_place(items, memory, spec, verdict);
    for (size_t i = 0; i < items.size(); ++i) {
      if (i + 1 < items.size()) parts_.gradients.expect(items[i + 1].part.piece);
      update_in_place(items.subspan(i, 1), memory, spec, verdict);
    }
  };
  for_each_chunk(tile, backward, true, visit);
  backward = !backward;
}

void ChunkedStates::for_each_master(zero::Tile tile, Visit visit) {
  for_each_chunk(tile, false, false, [&](std::span<const Item> items, std::span<const Item>, i64 chunk, char* memory) {
    for (const Item& i : items) {
      zero::TilePiece p = *i.of;
      p.piece = i.part.piece;
      const zero::TierLease param = parts_.params.lease(p.piece, zero::LeaseTo::Read);
      TensorView master = state(i.part, memory, param.data()).master(parts_.work, p.piece.count);
      if (host_.apart && !memory_->on_device(chunk) && master.data != param.data()) {
        parts_.device.upload(place_.data(), master.data, master.bytes());
        master.data = place_.data();
      }
      visit(p, master);
    }
  });
}

void ChunkedStates::move(const zero::Piece& piece, const zero::PieceState& place, Way way) {
  chunks_.for_each_part(piece, [&](const ChunkPart& part) {
    const i64 first = part.piece.begin - piece.begin, n = part.piece.count;
    char* const memory = memory_->take(part.chunk, way == Way::ToChunks);
    const bool on_device = memory_->on_device(part.chunk);
    const auto copy = [&](void* chunk, void* there, i64 bytes) {
      Device& device = parts_.device;
      if (way == Way::ToPlace) {
        on_device ? device.copy(there, chunk, bytes) : device.upload(there, chunk, bytes);
      } else {
        on_device ? device.copy(chunk, there, bytes) : device.download(chunk, there, bytes);
      }
    };
    for (const State s : kStates) {
      if (s == State::Param || place[s] == nullptr) continue;
      const i64 width = dtype_bytes(place.kept[s].dtype);
      copy(memory + part.offsets[s], static_cast<char*>(place[s]) + first * width, n * width);
      if (place.kept[s].scales != nullptr)
        copy(memory + part.scales[s], place.kept[s].scales + first / kStateBlock, state_blocks(n) * 4);
    }
    memory_->give_back(part.chunk, way == Way::ToChunks);
  });
}

zero::StateLease ChunkedStates::lease(const zero::Piece& piece, zero::LeaseTo access) {
  DS_ASSERT(piece.count <= kLeaseElems);
  zero::TierLease param = parts_.params.lease(piece, access);
  ChunkPart whole{.piece = piece};
  i64 at = 0;
  for (const State s : kStates) {
    if (chunks_.state_bytes()[s] == 0) continue;
    whole.offsets[s] = at;
    whole.scales[s] = at + lease_elems_ * 4;
    at += place_bytes_;
  }
  const zero::PieceState st = state(whole, place_.as<char>().data(), param.data());
  if (access != zero::LeaseTo::Fill) move(piece, st, Way::ToPlace);
  return {this, piece, access, st, std::move(param)};
}

void ChunkedStates::end_lease(const zero::Piece& piece, zero::LeaseTo access, const zero::PieceState& st) noexcept {
  if (access == zero::LeaseTo::Read) return;
  try {
    move(piece, st, Way::ToChunks);
  } catch (const Error&) {  // an error of a file, which its next call reports
  }
}

}  // namespace ds::offload
