// SPDX-License-Identifier: Apache-2.0
#pragma once
// States whose updates are delayed by one step (Ren et al., "ZeRO-Offload", 2021, section 5.2): while step k computes
// its gradients with the parameters θ_k, the update of step k - 1 runs beside it on the host,
//
//   g_k = gradients(θ_k),  θ_{k+1} = update(θ_k, g_{k-1}),
//
// so neither the update nor the transfers of its states add to the time of a step. An update works on its own data: a
// copy of the gradients, and parameters that replace the old ones when the gradients of the next step are ready.
// Updates of the first steps, in which parameters change most, are not delayed.

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
  // Shared by all shards of a rank.
  struct Shared {
    std::mutex turn;  // held while one of them computes on the host
    BusyTime& busy;
  };
  struct Options {
    HostPlace host;  // memory for the data of updates
    Shared& shared;
    Tag tag = Tag::Offload;
    HostCopies* copies = nullptr;  // counts copies between a GPU and the host
    i64 from = 1;                  // the first delayed update
    bool beside = true;            // false, in a prediction: it runs in order
    std::function<FileCounts()> moved = {};
  };
  // `make` makes the tier itself, whose updates are element by element in one pass. Their tiles stay valid until
  // finish().
  DelayedStates(Parts parts, const zero::MakeStates& make, const Options& options);
  ~DelayedStates() override;
  void update(zero::Tile tile, const UpdateSpec& spec, zero::VerdictHandle& verdict) override;
  void for_each_master(zero::Tile tile, Visit visit) override;
  void settle(zero::VerdictHandle& verdict, i64 number) override;
  bool is_delayed() const noexcept override { return true; }
  void finish() override;
  zero::StateLease lease(const zero::Piece& piece, zero::LeaseTo access) override;
  bool in_place() const noexcept override { return false; }
  // The transfers of completed updates, and the time spent waiting for them.
  const FileCounts& moved() const noexcept { return moved_; }

 private:
  // Host memory of the size of the rank's elements.
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
  std::vector<Pass> passes_;  // of the update that is delayed or running
  GradVerdict verdict_;       // over its gradients
  i64 number_ = 0;
  FileCounts before_, moved_;  // before the last update; of all completed ones
  std::optional<zero::StateLease> leased_;
  std::exception_ptr failed_;  // of the running update
  std::jthread running_;       // destroyed before the data that it uses
};

}  // namespace ds::offload
