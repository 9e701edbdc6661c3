// SPDX-License-Identifier: Apache-2.0
#pragma once
// The tier of offloaded states in chunks (chunk_layout.h). An update runs on the host and goes through the chunks of
// its parameters one by one, while others are read and written. If device memory is separate, gradients are copied to
// the host and parameters back: those of the next chunk arrive, and those of the previous one leave, while one is
// updated. There is one version: nothing is updated before the verdict is known.

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

// The host as a place to compute; the training device itself if that is the CPU.
struct UpdateHost {
  HostPlace place;
  HostPlace staging;             // memory for copies from and to a device
  bool apart = false;            // separate from the training device
  HostCopies* copies = nullptr;  // then counts the copies of updates
  Trace* trace = nullptr;        // gets a span for each updated chunk
  Device& device() const noexcept { return place.device(); }
};

class ChunkedStates final : public zero::StateStore {
 public:
  // most: the most elements of a chunk.
  ChunkedStates(Parts parts, i64 most, const UpdateHost& host, const MakeChunks& make);
  ~ChunkedStates() override;
  void update(zero::Tile tile, const UpdateSpec& spec, zero::VerdictHandle& verdict) override;
  void for_each_master(zero::Tile tile, Visit visit) override;
  void settle(zero::VerdictHandle&, i64) override {}
  zero::StateLease lease(const zero::Piece& piece, zero::LeaseTo access) override;
  bool in_place() const noexcept override { return false; }

 private:
  void end_lease(const zero::Piece& piece, zero::LeaseTo access, const zero::PieceState& state) noexcept override;
  void keep_states() override { memory_->keep(); }
  void undo_states() override { memory_->undo(); }
  // A part of a tile's piece.
  struct Item {
    ChunkPart part;
    const zero::TilePiece* of = nullptr;
  };
  // Gradients and parameters of one chunk for an update on a separate host. There are two desks, so the copies of one
  // run while the host works with the other.
  struct Desk {
    Buffer gradients, params;
    Device::Event came = nullptr, went = nullptr;  // after the last copies from the device, and to it
    std::optional<i64> chunk;                      // the chunk whose gradients are being copied or present
  };
  // An update of some parts of a chunk, in place or on the host.
  void update_in_place(std::span<const Item> items, char* memory, const UpdateSpec& spec, zero::VerdictHandle& verdict);
  void update_on_host(Desk& desk, std::span<const Item> items, char* memory, const UpdateSpec& spec,
                      zero::VerdictHandle& verdict);
  // The same, while the data of the next chunk is being copied.
  void update_apart(std::span<const Item> items, std::span<const Item> next, i64 chunk, char* memory,
                    const UpdateSpec& spec, zero::VerdictHandle& verdict);
  // Begins to copy their gradients, and parameters that are their own masters.
  void bring(Desk& desk, std::span<const Item> items, bool with_params);
  void follow_compute();
  // The gradient and parameter of a piece in host memory: in place, or on the desk.
  struct Place {
    void* data;
    bool stays;
  };
  struct Places {
    Place gradient, param;
  };
  std::span<const Places> places_of(const Desk& desk, std::span<const Item> items);  // valid until the next call
  zero::Tile tile_of(std::span<const Item> items);
  // Calls visit(items, items of the next chunk, chunk, its memory) for each chunk with parts of the tile; `change`: it
  // changes them.
  void for_each_chunk(zero::Tile tile, bool backward, bool change,
                      FunctionRef<void(std::span<const Item>, std::span<const Item>, i64, char*)> visit);
  zero::PieceState state(const ChunkPart& part, char* memory, void* param) const noexcept;
  // Copies between the chunks of a piece and its place on the device.
  enum class Way : u8 { ToPlace, ToChunks };
  void move(const zero::Piece& piece, const zero::PieceState& place, Way way);

  const ChunkLayout chunks_;
  const UpdateHost host_;
  std::unique_ptr<ChunkMemory> memory_;
  std::array<Desk, 2> desks_;      // on a separate host
  Device::Event ready_ = nullptr;  // after the computation of the data to copy
  std::vector<float> factors_;     // of a pass
  // The layout of a lease, for each state: its elements, followed by the scales of its blocks.
  i64 lease_elems_ = 0, place_bytes_ = 0;
  Buffer place_;
  // By tile: the direction of the next update, which begins with the chunks with which the last one ended.
  std::map<const zero::TilePiece*, bool> backward_;
  std::vector<Item> items_;  // scratch
  std::vector<zero::TilePiece> tile_;
  std::vector<UpdateTensor> tensors_;
  std::vector<Places> places_;
  std::vector<zero::TierLease> leases_;
};

}  // namespace ds::offload
