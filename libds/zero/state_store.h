// SPDX-License-Identifier: Apache-2.0
#pragma once
// Masters and optimizer states of the pieces that a rank holds, in a tier: the memory in which they are stored, and
// where their updates run. An update is sent to the states: a pass over a tile is plain data, and the tier runs it
// where the states are. No caller keeps an address from one call to the next.
//
//   tile      pieces that are updated together, in the order of the parameters, cut alike on all ranks; keyed by
//             parameter and range, so that it means the same at another number of ranks
//   lease     the state of a piece in device memory while a caller loads, saves, sets or inspects it
//   version   passes write the next version of the states that they change; settle() keeps it, or the previous one. A
//             tier has either one version, which does not change before the verdict is known to be finite (on the
//             device the ops read the verdict themselves), or two, and keeps one of them when the verdict is known
//   undo      a step may be updated before its verdict (pipeline.post_validate): the tier then keeps a copy of all that
//             the update changes, until the next one
//
// DeviceStates is the tier of device memory: one array for each state, one version, one call of the op for a pass. A
// parameter that is its own master (in fp32, or in 16 bits if so configured), or is not trained, has no State::Master;
// tiers do not move it.

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "device/device.h"
#include "zero/param_store.h"
#include "zero/state_layout.h"

namespace ds::zero {

// The verdict over a step's gradients, made on the device. Device tiers pass it to ops; a tier elsewhere resolves it,
// and the host then does not wait again at the end of the step.
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
  u32 site = 0;            // RngKey::site of the stochastic rounding of its states
};
using Tile = std::span<const TilePiece>;

// The state of a piece in device memory: Param in the work dtype, other states in the dtype in `kept`; null: the
// parameter does not have the state.
struct PieceState : PerState<void*> {
  PerState<KeptAs> kept;
  TensorView view(State s, i64 count) const noexcept {
    TensorView v = TensorView::of((*this)[s], kept[s].dtype, {count});
    v.scale = kept[s].scales;
    return v;
  }
  float* values(State s) const noexcept { return static_cast<float*>((*this)[s]); }
  // The master in fp32; the parameter in the work dtype, if it is its own master.
  TensorView master(DType work, i64 count) const noexcept {
    void* const master = (*this)[State::Master];
    return master != nullptr ? TensorView::of(master, DType::F32, {count})
                             : TensorView::of((*this)[State::Param], work, {count});
  }
};

class StateStore;

// Until it ends, no other function of its store may be called. Move-only.
class StateLease : public PieceState {
 public:
  // param: the lease of the piece's parameters.
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
  // All references outlive the tier.
  struct Parts {
    const StateLayout& layout;
    const PieceMemory& params;     // in the work dtype
    const PieceMemory& gradients;  // fp32 sums
    DType work = DType::F32;
    Device& device;
    MemoryLedger& ledger;
    std::vector<Piece> held;        // all trained pieces of this rank, the largest possible tile
    std::vector<Piece> fixed = {};  // its other pieces: their leases have parameters alone
    bool undoes = false;            // the tier has keep() and undo()
  };

  explicit StateStore(Parts parts);
  virtual ~StateStore();

  // Enqueues a pass over a tile. Its rule changes masters, states and parameters, and overwrites gradients if it makes
  // directions. Nothing changes if the verdict is not finite. Factors are indexed by TilePiece::index.
  virtual void update(Tile tile, const UpdateSpec& spec, VerdictHandle& verdict) = 0;
  // Calls visit(piece, its master [count], in fp32 or the work dtype) in order; work enqueued by visit sees the masters
  // after all passes so far.
  using Visit = FunctionRef<void(const TilePiece&, TensorView)>;
  virtual void for_each_master(Tile tile, Visit visit) = 0;
  // After the last pass of a step. number: of its update, from 1.
  virtual void settle(VerdictHandle& verdict, i64 number) = 0;
  // Whether the update of a step may run after settle() has returned; all ranks answer alike. After finish() masters,
  // states and this rank's parameters are those of all steps so far; other ranks still have to get them.
  virtual bool is_delayed() const noexcept { return false; }
  virtual void finish() {}

  // With Parts::undoes: keep() copies masters, states and this rank's trained parameters; undo() brings the copies
  // back, after the passes of an update whose verdict was not what it was updated by.
  void keep();
  void undo();

  // The state of a piece of at most kLeaseElems elements; between steps. A lease that is not in place is a copy.
  static constexpr i64 kLeaseElems = i64{1} << 20;
  virtual StateLease lease(const Piece& piece, LeaseTo access) = 0;
  // Whether leases, of any length, are the memory in which states and parameters are stored.
  virtual bool in_place() const noexcept = 0;
  // All of a state that every rank holds whole (StateLayout::is_whole), in device memory; empty: this tier has none.
  virtual TensorView whole(State) const noexcept { return {}; }

 protected:
  friend class StateLease;
  virtual void end_lease(const Piece& piece, LeaseTo access, const PieceState& state) noexcept = 0;
  // For masters and states; a tier without them is not made with Parts::undoes.
  virtual void keep_states() { DS_ASSERT(!parts_.undoes); }
  virtual void undo_states() { DS_ASSERT(!parts_.undoes); }

  // Whether all gradients and parameters of a tile can be leased at once, not part by part.
  bool all_at_once() const noexcept { return parts_.gradients.in_place() && parts_.params.trained_in_place(); }
  // The tensors of a piece that a pass by this rule works on.
  UpdateTensor tensor(UpdateRule rule, const Piece& piece, const PieceState& state, float* gradient) const noexcept;

  Parts parts_;

 private:
  enum class Way : u8 { Keep, Undo };
  void move_params(Way way);
  Buffer kept_params_;  // of parts_.held, one after the other
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
  void keep_states() override;
  void undo_states() override;
  PieceState state(const Piece& piece, void* param) const noexcept;

  PerState<Buffer> arrays_;
  PerState<Buffer> kept_;              // the version before, if steps are undone
  std::vector<UpdateTensor> tensors_;  // scratch
  std::vector<TierLease> leases_;      // of a pass
};

// Calls visit(part) for parts of a piece of at most `most` elements, a multiple of kStateBlock.
template <class Visit>
void for_each_part(const Piece& piece, i64 most, Visit&& visit) {
  for (i64 first = 0; first < piece.count; first += most) {
    visit(piece.part(first, std::min(most, piece.count - first)));
  }
}

// Runs a pass over a tile, for tiers and predictions. tensor(piece) returns the memory of a piece; states that the rule
// does not use are left out, and the piece's factor, weight decay and rounding site are added. scratch: with capacity
// for the tile.
void run_pass(const OpTable& ops, Stream& stream, Tile tile, const UpdateSpec& spec, const GradVerdict* verdict,
              FunctionRef<UpdateTensor(const Piece&)> tensor, std::vector<UpdateTensor>& scratch);

}  // namespace ds::zero
