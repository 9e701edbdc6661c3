// SPDX-License-Identifier: Apache-2.0
#pragma once
// Copies of an element on several ranks are the same, bit for bit: tied embeddings on two stages, norms, biases and
// key/value heads on ranks of tp, everything that ZeRO does not cut.

#include <array>
#include <cstring>
#include <map>
#include <mutex>

#include "equivalence/training.h"

namespace ds::testing {

// Compares the copies in one run with ranks in threads.
class Copies {
 public:
  // Collective: compares the copies that the ranks hold now. DiLoCo's workers have moments of their own; only those of
  // the first worker are compared.
  void check(engine::Engine& engine, const std::string& what) {
    engine::HostState held(engine, engine.held_pieces());
    held.download();
    const i64 work_bytes = dtype_bytes(engine.plan().work);
    engine.mesh().world().barrier("test");
    if (engine.mesh().coord().worker == 0) {
      const std::lock_guard lock(mutex_);
      for (const StatePiece& piece : held.pieces()) {
        const model::ParamRow& row = engine.row_of(piece.param);
        Param& param = params_[piece.param];
        param.known.resize(row.whole_numel());
        const model::SliceMap map(row.slice, row.whole_shape());
        map.for_each_run(piece.begin, piece.count, [&](i64 local, i64 global, i64 n) {
          const i64 first = local - piece.begin;
          const auto part = [&](State which, const void* from, i64 bytes) {
            std::vector<char>& whole = param.parts[which];
            whole.resize(param.known.size() * static_cast<size_t>(bytes));
            for (i64 i = 0; i < n; ++i) {
              char* const to = whole.data() + (global + i) * bytes;
              const char* const mine = static_cast<const char*>(from) + (first + i) * bytes;
              if (!param.known[global + i]) {
                std::memcpy(to, mine, static_cast<size_t>(bytes));
              } else if (std::memcmp(to, mine, static_cast<size_t>(bytes)) != 0) {
                ++param.different;
              }
            }
          };
          for (const State s : kStates) {
            if (piece.data[s] == nullptr) continue;
            if (!is_optimizer_state(s)) {
              part(s, piece.data[s], s == State::Param ? work_bytes : 4);
              continue;
            }
            std::vector<float> values(static_cast<size_t>(piece.count));
            decode_state(values.data(), piece.state(s), 0, piece.count);
            part(s, values.data(), 4);
          }
          for (i64 i = 0; i < n; ++i) {
            i64& copies = param.known[global + i];
            most_ = std::max(most_, ++copies);
          }
        });
        EXPECT_EQ(param.different, 0) << what << ": " << row.name << " on rank " << engine.mesh().rank();
      }
    }
    engine.mesh().world().barrier("test");
    if (engine.mesh().rank() == 0) params_.clear();
    engine.mesh().world().barrier("test");
  }
  // The largest number of copies of any element so far.
  i64 most() const noexcept { return most_; }

 private:
  struct Param {
    PerState<std::vector<char>> parts;
    std::vector<i64> known;  // copies seen
    i64 different = 0;
  };
  std::mutex mutex_;
  std::map<i64, Param> params_;
  i64 most_ = 0;
};

}  // namespace ds::testing
