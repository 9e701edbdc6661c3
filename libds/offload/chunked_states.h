// SPDX-License-Identifier: Apache-2.0
#pragma once
// The tier of states that are kept away from the device, in chunks (chunk_layout.h): an update goes through the chunks
// of its parameters one by one, while others come and go, and runs on the host. Where that has no device's memory,
// gradients come to it, and parameters go back: those of the next chunk come, and those of the last one go, while one
// is updated. One version: nothing is updated before the verdict is known.

#include <array>
#include <functional>
#include <map>
#include <optional>

#include "base/trace.h"
#include "offload/chunk_memory.h"
#include "offload/host_copies.h"
#include "zero/state_store.h"

namespace ds::offload {

using MakeChunks =
    std::function<std::unique_ptr<ChunkMemory>(const ChunkLayout& layout, Device& device, MemoryLedger& ledger)>;

// The host as a place to compute: the device itself, where that is it.
struct UpdateHost {
  HostPlace place;
  HostPlace staging;             // of what is copied from and to a device
  bool apart = false;            // from the device that trains
  HostCopies* copies = nullptr;  // then counts those of updates
  Trace* trace = nullptr;        // gets a span of each chunk that is updated
  Device& device() const noexcept { return place.device(); }
};

class ChunkedStates final : public zero::StateStore {
 public:
  // most: elements of a chunk.
  ChunkedStates(Parts parts, i64 most, const UpdateHost& host, const MakeChunks& make);
  ~ChunkedStates() override;
  void update(zero::Tile tile, const UpdateSpec& spec, zero::VerdictHandle& verdict) override;
  void for_each_master(zero::Tile tile, Visit visit) override;
  void settle(zero::VerdictHandle&, i64) override {}
  zero::StateLease lease(const zero::Piece& piece, zero::LeaseTo access) override;
  bool in_place() const noexcept override { return false; }

 private:
  void end_lease(const zero::Piece& piece, zero::LeaseTo access, const zero::PieceState& state) noexcept override;
  // A part of a tile's piece.
  struct Item {
    ChunkPart part;
    const zero::TilePiece* of = nullptr;
  };
  // What an update on a host that is apart works with, of a chunk: there are two, so that what is copied from and to
  // one of them is copied while the host works with the other.
  struct Desk {
    Buffer gradients, params;
    Device::Event came = nullptr, went = nullptr;  // behind the last copies from the device, and to it
    std::optional<i64> chunk;                      // whose gradients come, or have come
  };
  // An update of some parts of a chunk, where they are and on the host.
  void update_in_place(std::span<const Item> items, char* memory, const UpdateSpec& spec, zero::VerdictHandle& verdict);
  void update_on_host(Desk& desk, std::span<const Item> items, char* memory, const UpdateSpec& spec,
                      zero::VerdictHandle& verdict);
  // The same, while what the next chunk wants comes.
  void update_apart(std::span<const Item> items, std::span<const Item> next, i64 chunk, char* memory,
                    const UpdateSpec& spec, zero::VerdictHandle& verdict);
  // Their gradients, and parameters that are their own masters, begin to come.
  void bring(Desk& desk, std::span<const Item> items, bool with_params);
  void follow_compute();
  // A piece's gradient and parameter in memory of the host: where they stay, or on the desk.
  struct Place {
    void* data;
    bool stays;
  };
  struct Places {
    Place gradient, param;
  };
  std::span<const Places> places_of(const Desk& desk, std::span<const Item> items);  // until the next call
  zero::Tile tile_of(std::span<const Item> items);
  // Calls visit(items, those of the chunk that is next, chunk, its memory) for each chunk that has any of the tile;
  // whether it changes them.
  void for_each_chunk(zero::Tile tile, bool backward, bool change,
                      FunctionRef<void(std::span<const Item>, std::span<const Item>, i64, char*)> visit);
  zero::PieceState state(const ChunkPart& part, char* memory, void* param) const noexcept;
  // Between the chunks of a piece and its place on the device.
  enum class Way : u8 { ToPlace, ToChunks };
  void move(const zero::Piece& piece, const zero::PieceState& place, Way way);

  const ChunkLayout chunks_;
  const UpdateHost host_;
  std::unique_ptr<ChunkMemory> memory_;
  std::array<Desk, 2> desks_;      // on a host that is apart
  Device::Event ready_ = nullptr;  // behind what computes what comes
  std::vector<float> factors_;     // likewise, of a pass
  // Of a lease, for each state: its elements, and the scales of its blocks behind them.
  i64 lease_elems_ = 0, place_bytes_ = 0;
  Buffer place_;
  // By tile: the next update begins with the chunks that the last one ended with.
  std::map<const zero::TilePiece*, bool> backward_;
  std::vector<Item> items_;  // scratch
  std::vector<zero::TilePiece> tile_;
  std::vector<UpdateTensor> tensors_;
  std::vector<Places> places_;
  std::vector<zero::TierLease> leases_;
};

}  // namespace ds::offload
