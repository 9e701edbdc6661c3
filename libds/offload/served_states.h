// SPDX-License-Identifier: Apache-2.0
#pragma once
// The tier of masters and states that another process owns, a server (libds/serve), which runs the updates: gradients
// go to it, by memory that both have, and parameters come back. On a GPU gradients and parameters are copied to and
// from that memory, and leases are copies in memory of the device. A step is the server's when all ranks have handed
// over what it needs: from then on it is done, whoever dies. In fp32 the server has masters, too, which outlive
// parameters.

#include <map>
#include <optional>

#include "offload/block_file.h"
#include "offload/chunk_layout.h"
#include "offload/host_copies.h"
#include "offload/server_link.h"
#include "zero/state_store.h"

namespace ds::offload {

class ServedStates final : public zero::StateStore {
 public:
  struct Options {
    HostPlace host;              // of the memory that both have
    i64 most = 0;                // elements of a chunk
    bool apart = false;          // that is not the device's
    Tag tag = Tag::Offload;      // of it
    ServerLink* link = nullptr;  // null: a prediction
    bool shares_gradients = false;
    const Segment* gradients = nullptr;  // where they are, if they are in memory that the server has
    FileCounts* counts = nullptr;        // of gradients that go (written) and parameters that come (read)
    BusyTime* busy = nullptr;            // in which they do
    HostCopies* copies = nullptr;        // of them, those between a GPU and the host
  };
  ServedStates(Parts parts, const Options& options);
  void update(zero::Tile tile, const UpdateSpec& spec, zero::VerdictHandle& verdict) override;
  void for_each_master(zero::Tile tile, Visit visit) override;
  void settle(zero::VerdictHandle& verdict, i64 number) override;
  zero::StateLease lease(const zero::Piece& piece, zero::LeaseTo access) override;
  bool in_place() const noexcept override { return false; }
  // Bytes that the server has of it, by state.
  const PerState<i64>& state_bytes() const noexcept { return chunks_.state_bytes(); }
  // All parameters, from their masters. Then other ranks still have to get them.
  void restore_params();

 private:
  void end_lease(const zero::Piece& piece, zero::LeaseTo access, const zero::PieceState& state) noexcept override;
  char* window() const noexcept { return static_cast<char*>(window_.data()); }
  // Of leases, as the device sees them.
  char* places() const noexcept { return options_.apart ? static_cast<char*>(place_.data()) : window(); }
  // In the window, where it has the shard arrays of the layout.
  char* work_of(const zero::Piece& piece) const noexcept {
    return window() + work_at_ + piece.shard_offset * dtype_bytes(parts_.work);
  }
  float* gradient_of(const zero::Piece& piece) const noexcept {
    return reinterpret_cast<float*>(window() + gradients_at_) + piece.shard_offset;
  }
  zero::PieceState leased_state(i64 param) const noexcept;
  StateSet stored(i64 param, bool but_master) const noexcept;
  // Calls visit(place, bytes) for what a lease of a piece has of these states, and of their blocks' scales.
  void for_each_place(const zero::Piece& piece, const StateSet& states, FunctionRef<void(i64, i64)> visit) const;
  void read(const zero::Piece& piece, const StateSet& states);  // to the places
  i64 tile_of(zero::Tile tile);
  void await(FunctionRef<void()> ask);
  void bring_params();
  void count_update(zero::Tile tile, const UpdateSpec& spec);
  ServedSet describe() const;

  const ChunkLayout chunks_;
  const Options options_;
  bool own_masters_;  // which runs in memory do not have: fp32
  PerState<i64> places_;
  i64 lease_elems_ = 0, work_at_ = 0, gradients_at_ = 0;
  const Segment* segment_ = nullptr;
  Buffer window_;
  Buffer place_;  // of leases, beside a window that is apart
  i64 set_ = 0;
  std::map<const zero::TilePiece*, i64> tiles_;
  std::vector<zero::Tile> changed_;    // in this step
  std::vector<UpdateTensor> tensors_;  // of a prediction
};

}  // namespace ds::offload
