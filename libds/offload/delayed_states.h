// SPDX-License-Identifier: Apache-2.0
#pragma once
// States whose updates are delayed by one step (Ren et al., "ZeRO-Offload", 2021, section 5.2): while step k computes
// its gradients with the parameters θ_k, the update of step k - 1 runs beside it on the host,
//
//   g_k = gradients(θ_k),  θ_{k+1} = update(θ_k, g_{k-1}),
//
// so that neither the update nor the transfers of its states take a step's time. What an update works with is its own:
// a copy of the gradients, and parameters that take the place of the old ones when the next step's gradients are
// there. Updates of the first steps, of which the parameters change most, are not delayed.

#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "offload/block_file.h"
#include "offload/host_copies.h"
#include "offload/host_place.h"
#include "zero/state_store.h"

namespace ds::offload {

class DelayedStates final : public zero::StateStore {
 public:
  // Of all shards of a rank.
  struct Shared {
    std::mutex turn;  // one of them computes on the host at a time
    BusyTime& busy;
  };
  struct Options {
    HostPlace host;  // of what updates work with
    Shared& shared;
    Tag tag = Tag::Offload;
    HostCopies* copies = nullptr;  // counts what goes between a GPU and the host
    i64 from = 1;                  // the first update that is delayed
    bool beside = true;            // else, in a prediction, it runs in its turn
    std::function<FileCounts()> moved = {};
  };
  // `make`: the tier itself; its updates are element by element, in one pass. Their tiles are there until finish().
  DelayedStates(Parts parts, const zero::MakeStates& make, const Options& options);
  ~DelayedStates() override;
  void update(zero::Tile tile, const UpdateSpec& spec, zero::VerdictHandle& verdict) override;
  void for_each_master(zero::Tile tile, Visit visit) override;
  void settle(zero::VerdictHandle& verdict, i64 number) override;
  bool is_delayed() const noexcept override { return true; }
  void finish() override;
  zero::StateLease lease(const zero::Piece& piece, zero::LeaseTo access) override;
  bool in_place() const noexcept override { return false; }
  // What the updates that have ended moved, and how long others waited for them.
  const FileCounts& moved() const noexcept { return moved_; }

 private:
  // Memory on the host, as large as what the rank holds.
  class Held final : public zero::PieceMemory {
   public:
    Held(const HostPlace& host, MemoryLedger& ledger, Tag tag, i64 elems, DType dtype)
        : width_(dtype_bytes(dtype)), memory_(host.take(ledger, tag, elems * width_)) {}
    zero::TierLease lease(const zero::Piece& piece, zero::LeaseTo access) const override {
      return {nullptr, on_host(piece), 0, 0, access};
    }
    bool in_place() const noexcept override { return true; }
    void* on_host(const zero::Piece& piece) const noexcept override {
      return memory_.as<char>().data() + piece.shard_offset * width_;
    }
    i64 bytes(const zero::Piece& piece) const noexcept { return piece.count * width_; }

   private:
    i64 width_;
    Buffer memory_;
  };
  struct Pass {
    zero::Tile tile;
    UpdateSpec spec;
  };
  void run();
  void begin_copies();
  void take(const Held& here, const zero::PieceMemory& from, const zero::Piece& part);
  void hand_over(const zero::Piece& part);
  void end_lease(const zero::Piece&, zero::LeaseTo, const zero::PieceState&) noexcept override { leased_.reset(); }

  const Options options_;
  Held gradients_, params_;
  std::unique_ptr<zero::StateStore> states_;
  const Device::Event ready_;
  std::vector<Pass> passes_;  // of the update that is put off, or runs
  GradVerdict verdict_;       // over its gradients
  i64 number_ = 0;
  FileCounts before_, moved_;  // before the last update; of all that have ended
  std::optional<zero::StateLease> leased_;
  std::exception_ptr failed_;  // of the update that runs
  std::jthread running_;       // after what it works with
};

}  // namespace ds::offload
