// SPDX-License-Identifier: Apache-2.0
#pragma once
// A tier of the tests: masters and states are kept away from the device, in memory of their own, and come to it piece
// by piece, in a place that is poisoned before and after. If the engine, an optimizer or a checkpoint reads states
// without asking the store, it reads NaNs. With one version, or with two: then a 16-bit run updates before it knows the
// verdict, and parameters follow their masters when it does.

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <map>
#include <set>

#include "zero/state_store.h"

namespace ds::testing {

class MovedStates final : public zero::StateStore {
 public:
  // most: elements that come to the device at once; a multiple of kStateBlock.
  // used: counts what came to the device.
  MovedStates(Parts parts, int versions, std::atomic<i64>& used, i64 most = 512)
      : StateStore(std::move(parts)), versions_(versions), used_(used), most_(most) {
    for (const State s : kStates) {
      const i64 bytes = parts_.layout.bytes(s);
      if (bytes == 0) continue;
      away_[s] = Buffer(parts_.ledger, s == State::Master ? Tag::Master : Tag::Optimizer, bytes);
      next_[s].assign(as_size(bytes), kPoison);
      written_[s].assign(as_size(bytes), false);
    }
    place_ = device_buffer(parts_.device, uncounted_, Tag::Workspace, kPlaces * place_bytes(kLeaseElems));
    guessed_ = device_buffer(parts_.device, uncounted_, Tag::Workspace, sizeof(GradVerdict));
    poison(kLeaseElems);
  }

  void update(zero::Tile tile, const UpdateSpec& spec, zero::VerdictHandle& verdict) override {
    if (versions_ == 1 && !verdict.resolve().finite) return;  // nothing that came back would be kept
    for_each_tile(tile, [&](const zero::TilePiece& p) {
      const PieceStateHere here(*this, p.piece, parts_.gradients.lease(p.piece, zero::LeaseTo::Write));
      const bool ahead = versions_ == 2 && here.state[State::Master] != nullptr;
      if (ahead) guess(verdict);
      zero::run_pass(
          parts_.device.ops(), parts_.device.stream(), {&p, 1}, spec,
          ahead ? guessed_.as<GradVerdict>().data() : verdict.on_device(),
          [&](const zero::Piece& piece) {
            UpdateTensor t = tensor(spec.params.rule, piece, here.state, here.gradient.values());
            if (ahead) t.param = {};
            return t;
          },
          scratch_);
      give_back(p.piece, here.state, versions_ == 2);
      if (ahead) unpublished_.push_back(p.piece);
    });
  }

  void for_each_master(zero::Tile tile, Visit visit) override {
    for_each_tile(tile, [&](const zero::TilePiece& p) {
      const PieceStateHere here(*this, p.piece);
      visit(p, here.state.master(parts_.work, p.piece.count));
    });
  }

  // The next version becomes the one that counts, or nobody ever sees it.
  void settle(zero::VerdictHandle& verdict, i64) override {
    const bool keep = verdict.resolve().finite;
    for (const zero::Piece& piece : unpublished_) {
      if (!keep) break;
      const PieceStateHere here(*this, piece);
      parts_.device.ops().cast(TensorView::of(here.state[State::Param], parts_.work, {piece.count}),
                               here.state.master(parts_.work, piece.count), parts_.device.stream());
    }
    unpublished_.clear();
    for (const State s : kStates) {
      for (size_t i = 0; i < written_[s].size(); ++i) {
        if (!written_[s][i]) continue;
        if (keep) away_[s].as<char>()[i] = next_[s][i];
        next_[s][i] = kPoison;
        written_[s][i] = false;
      }
    }
  }

  zero::StateLease lease(const zero::Piece& piece, zero::LeaseTo access) override {
    EXPECT_LE(piece.count, kLeaseElems);
    EXPECT_FALSE(leased_);
    leased_ = true;
    zero::TierLease param = parts_.params.lease(piece, access);
    return {this, piece, access, bring(piece, param), std::move(param)};
  }
  bool in_place() const noexcept override { return false; }

 private:
  static constexpr char kPoison = static_cast<char>(0xff);  // NaN in every floating-point type
  static constexpr i64 kPlaces = static_cast<i64>(kNumStates);
  static size_t as_size(i64 n) { return static_cast<size_t>(n); }
  static i64 place_bytes(i64 elems) { return elems * 4 + state_blocks(elems) * 4; }

  struct PieceStateHere {
    PieceStateHere(MovedStates& s, const zero::Piece& piece, zero::TierLease grad = {})
        : store(s),
          count(piece.count),
          param(s.parts_.params.lease(piece, zero::LeaseTo::Write)),
          gradient(std::move(grad)),
          state(s.bring(piece, param)) {}
    ~PieceStateHere() { store.poison(count); }
    MovedStates& store;
    i64 count;
    zero::TierLease param, gradient;
    zero::PieceState state;
  };

  void end_lease(const zero::Piece& piece, zero::LeaseTo access, const zero::PieceState& st) noexcept override {
    if (access != zero::LeaseTo::Read) give_back(piece, st, false);
    poison(piece.count);
    leased_ = false;
  }

  template <class Visit>
  void for_each_tile(zero::Tile tile, Visit&& visit) {
    for (const zero::TilePiece& p : tile) {
      zero::for_each_part(p.piece, most_, [&](const zero::Piece& part) {
        zero::TilePiece here = p;
        here.piece = part;
        visit(here);
      });
    }
  }

  // Calls visit(state, offset in its array, bytes) for the states of a piece; scales follow their codes.
  template <class Visit>
  void for_each_range(const zero::Piece& piece, Visit&& visit) const {
    const zero::StateLayout& layout = parts_.layout;
    for (const State s : kStates) {
      if (layout.bytes(s) == 0 || !layout.has(s, piece.param)) continue;
      const DType dtype = layout.dtype(s, piece.param);
      visit(s, layout.offset(s, piece), piece.count * dtype_bytes(dtype));
      if (is_coded(dtype)) visit(s, layout.scales_offset(s, piece), state_blocks(piece.count) * 4);
    }
  }

  // The last version of these bytes.
  std::vector<char> newest(State s, i64 at, i64 bytes) const {
    std::vector<char> out(away_[s].as<char>().data() + at, away_[s].as<char>().data() + at + bytes);
    for (size_t i = 0; i < out.size(); ++i) {
      if (written_[s][as_size(at) + i]) out[i] = next_[s][as_size(at) + i];
    }
    return out;
  }

  zero::PieceState bring(const zero::Piece& piece, const zero::TierLease& param) {
    ++used_;
    zero::PieceState st;
    st[State::Param] = param.data();
    for (const State s : kStates) {
      if (parts_.layout.bytes(s) == 0 || !parts_.layout.has(s, piece.param)) continue;
      char* const here = place_.as<char>().data() + static_cast<i64>(s) * place_bytes(kLeaseElems);
      st[s] = here;
      st.kept[s].dtype = parts_.layout.dtype(s, piece.param);
      if (is_coded(st.kept[s].dtype)) st.kept[s].scales = reinterpret_cast<float*>(here + kLeaseElems * 4);
    }
    std::set<State> seen;
    for_each_range(piece, [&](State s, i64 at, i64 bytes) {
      void* const to = seen.insert(s).second ? st[s] : st.kept[s].scales;
      parts_.device.upload(to, newest(s, at, bytes).data(), bytes);
    });
    return st;
  }

  void give_back(const zero::Piece& piece, const zero::PieceState& st, bool next) {
    std::set<State> seen;
    for_each_range(piece, [&](State s, i64 at, i64 bytes) {
      const void* const from = seen.insert(s).second ? st[s] : st.kept[s].scales;
      char* const to = next ? &next_[s][as_size(at)] : away_[s].as<char>().data() + at;
      parts_.device.download(to, from, bytes);
      if (next) std::fill_n(written_[s].begin() + at, bytes, true);
    });
  }

  // Assumes that the step is finite.
  void guess(zero::VerdictHandle& verdict) {
    GradVerdict v = verdict.resolve();
    v.finite = true;
    parts_.device.upload(guessed_.data(), &v, sizeof v);
  }

  void poison(i64 count) noexcept {
    const std::vector<char> poison(as_size(count * 4), kPoison);
    for (i64 i = 0; i < kPlaces; ++i) {
      char* const place = place_.as<char>().data() + i * place_bytes(kLeaseElems);
      parts_.device.upload(place, poison.data(), count * 4);
      parts_.device.upload(place + kLeaseElems * 4, poison.data(), state_blocks(count) * 4);
    }
  }

  const int versions_;
  std::atomic<i64>& used_;
  const i64 most_;
  MemoryLedger uncounted_;
  PerState<Buffer> away_;
  PerState<std::vector<char>> next_;
  PerState<std::vector<bool>> written_;  // of the next version, by byte
  Buffer place_, guessed_;
  std::vector<zero::Piece> unpublished_;
  std::vector<UpdateTensor> scratch_;
  bool leased_ = false;
};

// An array that is kept away from the device. Each lease is a copy, in memory that is given back when it ends, so
// address sanitizers see later reads. Reads of memory that was to be filled return NaNs.
class MovedArray final : public zero::TierArray {
 public:
  // used: counts leases.
  MovedArray(Device& device, MemoryLedger& ledger, Tag tag, i64 bytes, std::atomic<i64>& used)
      : device_(device), used_(used), away_(ledger, tag, bytes) {}
  bool in_place() const noexcept override { return false; }

 private:
  void* open(i64 begin, i64 bytes, zero::LeaseTo access) override {
    ++used_;
    Buffer here = device_buffer(device_, uncounted_, Tag::Workspace, std::max<i64>(bytes, 1));
    if (access == zero::LeaseTo::Fill) {
      poison(here.data(), bytes);
    } else {
      device_.upload(here.data(), away_.as<char>().data() + begin, bytes);
    }
    void* const at = here.data();
    copies_.emplace(at, std::move(here));
    return at;
  }
  void close(void* data, i64 begin, i64 bytes, zero::LeaseTo access) noexcept override {
    if (access != zero::LeaseTo::Read) device_.download(away_.as<char>().data() + begin, data, bytes);
    device_.synchronize();
    copies_.erase(data);
  }
  void poison(void* to, i64 bytes) {
    const std::vector<char> poison(static_cast<size_t>(bytes), static_cast<char>(0xff));
    device_.upload(to, poison.data(), bytes);
  }

  Device& device_;
  std::atomic<i64>& used_;
  MemoryLedger uncounted_;
  Buffer away_;
  std::map<void*, Buffer> copies_;
};

}  // namespace ds::testing
