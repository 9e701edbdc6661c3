// SPDX-License-Identifier: Apache-2.0
#pragma once
// The tier of master weights and states that a server (libds/serve) owns and updates. Gradients and updated parameters
// are exchanged through shared memory. On a GPU they are copied to and from that memory, and leases are copies in
// device memory. A step belongs to the server when all ranks have handed over what it needs: from then on it will be
// completed, whatever dies. In fp32, and of parameters that are not trained, the server has masters too, because they
// outlive the parameters.

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
    HostPlace host;              // the shared memory
    i64 most = 0;                // the most elements of a chunk
    bool apart = false;          // the shared memory is not device memory
    Tag tag = Tag::Offload;      // of it
    ServerLink* link = nullptr;  // null: a prediction
    bool shares_gradients = false;
    const Segment* gradients = nullptr;  // their segment, if they are in memory shared with the server
    FileCounts* counts = nullptr;        // counts gradients (written) and parameters (read)
    BusyTime* busy = nullptr;            // the time of these transfers
    HostCopies* copies = nullptr;        // those of them between a GPU and the host
  };
  ServedStates(Parts parts, const Options& options);
  void update(zero::Tile tile, const UpdateSpec& spec, zero::VerdictHandle& verdict) override;
  void for_each_master(zero::Tile tile, Visit visit) override;
  void settle(zero::VerdictHandle& verdict, i64 number) override;
  zero::StateLease lease(const zero::Piece& piece, zero::LeaseTo access) override;
  bool in_place() const noexcept override { return false; }
  // Bytes in the server, by state.
  const PerState<i64>& state_bytes() const noexcept { return chunks_.state_bytes(); }
  // Sets all parameters from their masters. They still have to be gathered by other ranks.
  void restore_params();

 private:
  void end_lease(const zero::Piece& piece, zero::LeaseTo access, const zero::PieceState& state) noexcept override;
  char* window() const noexcept { return static_cast<char*>(window_.data()); }
  // Addresses of a lease, for the device.
  char* places() const noexcept { return options_.apart ? static_cast<char*>(place_.data()) : window(); }
  // Addresses in the window of the layout's shard arrays, of trained pieces.
  char* work_of(const zero::Piece& piece) const noexcept {
    return window() + work_at_ + piece.shard_offset * dtype_bytes(parts_.work);
  }
  float* gradient_of(const zero::Piece& piece) const noexcept {
    return reinterpret_cast<float*>(window() + gradients_at_) + piece.shard_offset;
  }
  // Whether the parameter is its own master in leases, whose master the server has nevertheless.
  bool owns_master(i64 param) const noexcept { return parts_.work == DType::F32 || !parts_.layout.is_trained(param); }
  zero::PieceState leased_state(i64 param) const noexcept;
  StateSet stored(i64 param, bool but_master) const noexcept;
  // Calls visit(place, bytes) for each of these states in the lease of a piece, and for the scales of its blocks.
  void for_each_place(const zero::Piece& piece, const StateSet& states, FunctionRef<void(i64, i64)> visit) const;
  void read(const zero::Piece& piece, const StateSet& states);  // to the places
  i64 tile_of(zero::Tile tile);
  void await(FunctionRef<void()> ask);
  void bring_params();
  void count_update(zero::Tile tile, const UpdateSpec& spec);
  ServedSet describe() const;

  const std::vector<zero::Piece> all_;  // of this rank, trained or not
  const ChunkLayout chunks_;
  const Options options_;
  PerState<i64> places_;
  i64 lease_elems_ = 0, work_at_ = 0, gradients_at_ = 0;
  const Segment* segment_ = nullptr;
  Buffer window_;
  Buffer place_;  // of leases, if the window is not device memory
  i64 set_ = 0;
  std::map<const zero::TilePiece*, i64> tiles_;
  std::vector<zero::Tile> changed_;    // in this step
  std::vector<UpdateTensor> tensors_;  // of a prediction
};

}  // namespace ds::offload
