// SPDX-License-Identifier: Apache-2.0
#pragma once
// Masters and optimizer states of the pieces that a rank holds, in a tier: the memory where they are kept and where
// their updates run. An update goes to the states: a pass over a tile is plain data, which a tier runs where it has
// what the tile needs. No caller keeps an address from one call to the next.
//
//   tile      pieces that are updated together, in the order of the parameters, cut alike on all ranks; keyed by
//             parameter and range, so that it means the same at another rank count
//   lease     the state of a piece in device memory while somebody loads, saves, sets or looks at it
//   version   passes write the next version of what they change; settle() keeps it, or the one before. A tier has one
//             version, and nothing of it changes before the verdict is known to be finite (ops look at it themselves
//             where they run); or two, and keeps either when it is known
//
// DeviceStates is the tier of device memory: one array for each state, one version, a call of the op for a pass. A
// parameter that is its own master (in fp32, or in 16 bits where the configuration says so) has no State::Master: no
// tier moves that.

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "device/device.h"
#include "zero/param_store.h"
#include "zero/state_layout.h"

namespace ds::zero {

// The verdict over a step's gradients, made on the device. Tiers of the device hand it on; a tier elsewhere resolves
// it, which takes the place of the time that the host waits at the end of a step.
class VerdictHandle {
 public:
  virtual ~VerdictHandle() = default;
  virtual const GradVerdict* on_device() const noexcept = 0;
  // On the host; waits for the device, once in a step.
  virtual const GradVerdict& resolve() = 0;
};

struct TilePiece {
  Piece piece;
  i64 index = 0;           // of its parameter among those that are updated together
  float weight_decay = 0;  // of its parameter
  u32 site = 0;            // of the random numbers by which its states are rounded
};
using Tile = std::span<const TilePiece>;

// What there is of a piece's state, in device memory: Param in the work dtype, all else in fp32 or as `kept` says;
// null: what its parameter does not have.
struct PieceState : PerState<void*> {
  PerState<KeptAs> kept;
  TensorView view(State s, i64 count) const noexcept {
    TensorView v = TensorView::of((*this)[s], kept[s].dtype, {count});
    v.scale = kept[s].scales;
    return v;
  }
  float* values(State s) const noexcept { return static_cast<float*>((*this)[s]); }
  // In fp32; or the parameter, in the work dtype, where it is its own.
  TensorView master(DType work, i64 count) const noexcept {
    void* const master = (*this)[State::Master];
    return master != nullptr ? TensorView::of(master, DType::F32, {count})
                             : TensorView::of((*this)[State::Param], work, {count});
  }
};

class StateStore;

// Until it ends nothing else may be asked of its store. Move-only.
class StateLease : public PieceState {
 public:
  // `param`: of the state's parameters.
  StateLease(StateStore* store, const Piece& piece, LeaseTo access, const PieceState& state, TierLease param)
      : PieceState(state), store_(store), piece_(piece), access_(access), param_(std::move(param)) {}
  StateLease(StateLease&& other) noexcept
      : PieceState(other),
        store_(std::exchange(other.store_, nullptr)),
        piece_(other.piece_),
        access_(other.access_),
        param_(std::move(other.param_)) {}
  StateLease& operator=(StateLease&&) = delete;
  ~StateLease();

 private:
  StateStore* store_;
  Piece piece_;
  LeaseTo access_;
  TierLease param_;
};

class StateStore {
 public:
  // What a tier works with, for its life.
  struct Parts {
    const StateLayout& layout;
    const PieceMemory& params;     // in the work dtype
    const PieceMemory& gradients;  // fp32 sums
    DType work = DType::F32;
    Device& device;
    MemoryLedger& ledger;
    std::vector<Piece> held;  // of this rank: the most that a tile has
  };

  explicit StateStore(Parts parts) : parts_(std::move(parts)) {}
  virtual ~StateStore() = default;

  // Enqueues a pass over a tile: masters, states and parameters change as its rule says, and the gradients where the
  // rule leaves directions in their place. If the verdict is not finite, nothing. Factors are by TilePiece::index.
  virtual void update(Tile tile, const UpdateSpec& spec, VerdictHandle& verdict) = 0;
  // Calls visit(piece, its master [count], in fp32 or the work dtype) in order; what it enqueues reads the master as
  // the passes so far have left it.
  using Visit = FunctionRef<void(const TilePiece&, TensorView)>;
  virtual void for_each_master(Tile tile, Visit visit) = 0;
  // After the last pass of a step. number: of its update, from 1.
  virtual void settle(VerdictHandle& verdict, i64 number) = 0;
  // Whether a step's update may be done later than settle() says, as on all ranks. After finish() masters, states and
  // this rank's parameters are those of all steps so far; other ranks still have to get them.
  virtual bool is_delayed() const noexcept { return false; }
  virtual void finish() {}

  // The state of a piece of at most kLeaseElems elements; between steps. A lease that is not in place is a copy.
  static constexpr i64 kLeaseElems = i64{1} << 20;
  virtual StateLease lease(const Piece& piece, LeaseTo access) = 0;
  // Whether leases, of any length, are the very memory in which states and parameters stay.
  virtual bool in_place() const noexcept = 0;
  // All of a state that every rank has whole (StateLayout::is_whole), of the device; empty: this tier has no such.
  virtual TensorView whole(State) const noexcept { return {}; }

 protected:
  friend class StateLease;
  virtual void end_lease(const Piece& piece, LeaseTo access, const PieceState& state) noexcept = 0;

  // Whether an update can have all gradients and parameters of a tile at once, or one part after the other.
  bool all_at_once() const noexcept { return parts_.gradients.in_place() && parts_.params.in_place(); }
  // What a pass by that rule sees of a piece whose state and gradient are there.
  UpdateTensor tensor(UpdateRule rule, const Piece& piece, const PieceState& state, float* gradient) const noexcept;

  Parts parts_;
};

// Makes the tier of a run.
using MakeStates = std::function<std::unique_ptr<StateStore>(StateStore::Parts)>;

class DeviceStates final : public StateStore {
 public:
  explicit DeviceStates(Parts parts);
  void update(Tile tile, const UpdateSpec& spec, VerdictHandle& verdict) override;
  void for_each_master(Tile tile, Visit visit) override;
  void settle(VerdictHandle&, i64) override {}
  StateLease lease(const Piece& piece, LeaseTo access) override;
  bool in_place() const noexcept override { return parts_.params.in_place(); }
  TensorView whole(State s) const noexcept override {
    return TensorView::of(arrays_[s].data(), DType::F32, {arrays_[s].bytes() / 4});
  }

 private:
  void end_lease(const Piece&, LeaseTo, const PieceState&) noexcept override {}
  PieceState state(const Piece& piece, void* param) const noexcept;

  PerState<Buffer> arrays_;
  std::vector<UpdateTensor> tensors_;  // scratch
  std::vector<TierLease> leases_;      // of a pass
};

// Calls visit(part) for the parts of a piece of at most `most` elements; a multiple of kStateBlock.
template <class Visit>
void for_each_part(const Piece& piece, i64 most, Visit&& visit) {
  for (i64 first = 0; first < piece.count; first += most) {
    visit(piece.part(first, std::min(most, piece.count - first)));
  }
}

// A pass over pieces whose memory tensor(piece) names: what is left out of it, where its rule has no use for it, and
// what of the tile comes in. For tiers and for predictions. `scratch` has room for the tile.
void run_pass(const OpTable& ops, Stream& stream, Tile tile, const UpdateSpec& spec, const GradVerdict* verdict,
              FunctionRef<UpdateTensor(const Piece&)> tensor, std::vector<UpdateTensor>& scratch);

}  // namespace ds::zero
