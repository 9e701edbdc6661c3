// SPDX-License-Identifier: Apache-2.0
#pragma once
// A small model with known state for the checkpoint tests: the value of every element encodes its parameter, state and
// index, so that any range can be checked wherever it was stored.

#include <cstring>

#include "checkpoint/manifest.h"
#include "comm/make_communicator.h"
#include "formats/tensor_io.h"
#include "temp_directory.h"

namespace ds::testing {

inline std::vector<ParamEntry> small_model() {
  return {{"wte.weight", {13, 6}, ""},
          {"h.0.ln.bias", {5}, ""},
          {"h.0.mlp.weight", {3, 2, 7}, ""},
          {"h.1.ln.bias", {1}, ""},
          {"lm_head.weight", {13, 6}, "wte.weight"},
          {"ln_f.weight", {29}, ""}};
}

// Exact in bf16: at most 8 significant bits.
inline float param_value(i64 param, i64 i) { return static_cast<float>((i * 7 + param * 31) % 255 - 127) / 16; }
// The value of the fp32 states: not exact in 16 bits, but rounds to param_value in bf16 and fp16.
inline float master_value(i64 param, i64 i) { return param_value(param, i) * (1 + 0x1p-13f); }
inline float exp_avg_value(i64 param, i64 i) { return 1000.0f + static_cast<float>(param * 100000 + i); }
inline float exp_avg_sq_value(i64 param, i64 i) { return 0.001f + static_cast<float>(param * 100000 + i); }

using Range = PieceRange;

// Rank `rank` of `size` owns every `size`-th piece; pieces have odd lengths and cross rows. `seed` varies the cuts.
inline std::vector<Range> owned_ranges(const std::vector<ParamEntry>& params, int rank, int size, i64 seed) {
  std::vector<Range> ranges;
  i64 piece = 0;
  for (size_t p = 0; p < params.size(); ++p) {
    if (!params[p].tied_to.empty()) continue;
    const i64 n = *checked_product(params[p].shape);
    for (i64 begin = 0; begin < n; ++piece) {
      const i64 count = std::min(n - begin, size == 1 && seed == 0 ? n : (piece * 5 + seed * 3) % 11 + 1);
      if (piece % size == rank) ranges.push_back({static_cast<i64>(p), begin, count});
      begin += count;
    }
  }
  return ranges;
}

// Parameters that tensor parallelism cuts, in Hugging Face's shapes: rows, columns, three parts of a fused matrix, a
// dim in the middle; and some that it leaves whole.
inline std::vector<ParamEntry> sliced_model() {
  return {{"wte.weight", {13, 6}, ""},
          {"h.0.ln.bias", {5}, ""},
          {"h.0.c_attn.weight", {5, 27}, ""},
          {"h.0.c_attn.bias", {27}, ""},
          {"h.0.moe", {3, 8, 7}, ""},
          {"h.0.down.weight", {7, 11}, ""},
          {"lm_head.weight", {13, 6}, "wte.weight"},
          {"scale", {}, ""},
          {"ln_f.weight", {29}, ""}};
}

struct Ranks {
  int tp, dp;
  int size() const noexcept { return tp * dp; }
};

// The slice of parameter `param` of sliced_model() on tensor-parallel rank `tp` of `of`; nothing for a replica that
// another rank saves.
inline std::optional<model::ParamSlice> slice_of_rank(i64 param, int tp, int of) {
  if (of == 1) return model::ParamSlice{};
  const auto cut = [&](i64 first, i64 size) { return std::pair(first + size * tp / of, first + size * (tp + 1) / of); };
  switch (param) {
    case 0: return model::ParamSlice{0, {cut(0, 13)}};
    case 2: return model::ParamSlice{1, {cut(0, 9), cut(9, 9), cut(18, 9)}};
    case 3: return model::ParamSlice{0, {cut(0, 9), cut(9, 9), cut(18, 9)}};
    case 4: return model::ParamSlice{1, {cut(0, 8)}};
    case 5: return model::ParamSlice{1, {cut(0, 11)}};
    default: break;
  }
  return tp == 0 ? std::optional(model::ParamSlice{}) : std::nullopt;
}

// The ranges of sliced_model() that a rank owns: slices, cut into pieces of odd lengths that begin within rows.
inline std::vector<Range> sliced_ranges(int rank, Ranks ranks, i64 seed) {
  const std::vector<ParamEntry> params = sliced_model();
  std::vector<Range> ranges;
  i64 piece = 0;
  for (size_t p = 0; p < params.size(); ++p) {
    const auto slice = slice_of_rank(static_cast<i64>(p), rank % ranks.tp, ranks.tp);
    if (!params[p].tied_to.empty() || !slice) continue;
    const i64 n = model::SliceMap(*slice, params[p].shape).numel();
    for (i64 begin = 0; begin < n; ++piece) {
      const i64 count = std::min(n - begin, seed == 0 ? div_ceil(n, ranks.dp) : (piece * 5 + seed * 3) % 11 + 1);
      if (piece % ranks.dp == rank / ranks.tp) ranges.push_back({static_cast<i64>(p), begin, count, *slice});
      begin += count;
    }
  }
  return ranges;
}

// The state of one rank; memory and the pieces that point into it.
class RankState {
 public:
  // `params`: of the ranges, where they have slices.
  RankState(DType dtype, const std::vector<Range>& ranges, bool optimizer = true,
            const std::vector<ParamEntry>& params = {})
      : dtype_(dtype), ranges_(ranges), params_(params), buffers_(ranges.size()) {
    for (size_t i = 0; i < ranges.size(); ++i) {
      const auto n = static_cast<size_t>(ranges[i].count);
      Buffers& b = buffers_[i];
      b.param.assign(n * 4, char{0x5A});
      for (auto* v : {&b.master, &b.exp_avg, &b.exp_avg_sq}) v->assign(n, -77.0f);
      PerState<void*> data;
      data[State::Param] = b.param.data();
      if (dtype != DType::F32) data[State::Master] = b.master.data();
      if (optimizer) {
        data[State::ExpAvg] = b.exp_avg.data();
        data[State::ExpAvgSq] = b.exp_avg_sq.data();
      }
      pieces_.push_back({ranges[i].param, ranges[i].begin, ranges[i].count, data, &ranges_[i].slice});
    }
  }
  std::vector<StatePiece>& pieces() noexcept { return pieces_; }

  RankState& fill() {
    each([this](Buffers& b, i64 param, i64 e, size_t i) {
      const float exact = dtype_ == DType::F32 ? master_value(param, e) : param_value(param, e);
      convert_elements(dtype_, b.param.data() + i * static_cast<size_t>(dtype_bytes(dtype_)), DType::F32, &exact, 1);
      b.master[i] = master_value(param, e);
      b.exp_avg[i] = exp_avg_value(param, e);
      b.exp_avg_sq[i] = exp_avg_sq_value(param, e);
    });
    return *this;
  }
  // Everything equals what fill() makes, bit for bit.
  void expect_filled() {
    RankState want(dtype_, ranges_, !pieces_.empty() && pieces_[0].data[State::ExpAvg] != nullptr, params_);
    want.fill();
    for (size_t i = 0; i < pieces_.size(); ++i) {
      for (const State s : kStates) {
        if (pieces_[i].data[s] == nullptr) continue;
        const i64 bytes = pieces_[i].count * (s == State::Param ? dtype_bytes(dtype_) : 4);
        EXPECT_EQ(std::memcmp(pieces_[i].data[s], want.pieces_[i].data[s], static_cast<size_t>(bytes)), 0)
            << state_name(s) << " of parameter " << pieces_[i].param << " from " << pieces_[i].begin;
      }
    }
  }

 private:
  struct Buffers {
    std::vector<char> param;
    std::vector<float> master, exp_avg, exp_avg_sq;
  };
  template <class F>
  void each(F&& body) {
    for (size_t r = 0; r < ranges_.size(); ++r) {
      const Range& range = ranges_[r];
      std::optional<model::SliceMap> map;
      if (!range.slice.whole()) map.emplace(range.slice, params_[range.param].shape);
      for (i64 i = 0; i < range.count; ++i) {
        const i64 local = range.begin + i;
        body(buffers_[r], range.param, map ? map->global_of(local) : local, static_cast<size_t>(i));
      }
    }
  }
  DType dtype_;
  std::vector<Range> ranges_;
  std::vector<ParamEntry> params_;
  std::vector<Buffers> buffers_;
  std::vector<StatePiece> pieces_;
};

inline CheckpointMeta sample_meta(i64 step, DType dtype) {
  CheckpointMeta m;
  m.step = step;
  m.work_dtype = dtype;
  m.layout_id = "dp2-zero2";
  m.zero_stage = 2;
  m.consumed_samples = 12345678901;
  m.seed = 4000000000u;
  m.loss_scaler = {65536.5, 17, -1, 2};
  m.skipped_steps = 3;
  m.optimizer_step = step < 3 ? step : step - 3;
  m.isa = "avx2";
  m.data_json = R"({"order":"1"})";
  m.config_json = R"({"z":1,"a":[0.1,1e-08,true,null,"\"é\""]})";
  m.model_config_json = R"({"model_type":"gpt2"})";
  return m;
}

// Saves small_model() at `size` ranks and returns the step directory.
inline std::string save_sample(const std::string& dir, i64 step, DType dtype, int size, i64 seed = 0, i64 keep = 0) {
  std::string path;
  run_threads(size, {}, [&](Communicator& comm) {
    RankState state(dtype, owned_ranges(small_model(), comm.rank(), comm.size(), seed));
    const std::string p = save_checkpoint(dir, sample_meta(step, dtype), small_model(), state.fill().pieces(), comm);
    if (comm.rank() == 0 && keep > 0) remove_old_steps(dir, step, keep);
    if (comm.rank() == 0) path = p;
  });
  return path;
}

// Loads at `size` ranks and checks every element.
inline void load_sample(const std::string& step_dir, DType dtype, int size, i64 seed = 0) {
  run_threads(size, {}, [&](Communicator& comm) {
    RankState state(dtype, owned_ranges(small_model(), comm.rank(), comm.size(), seed));
    load_checkpoint(step_dir, dtype, small_model(), state.pieces(), comm);
    state.expect_filled();
  });
}

// The same of sliced_model().
inline std::string save_sliced(const std::string& dir, i64 step, DType dtype, Ranks ranks, i64 seed) {
  std::string path;
  run_threads(ranks.size(), {}, [&](Communicator& comm) {
    RankState state(dtype, sliced_ranges(comm.rank(), ranks, seed), true, sliced_model());
    const std::string p = save_checkpoint(dir, sample_meta(step, dtype), sliced_model(), state.fill().pieces(), comm);
    if (comm.rank() == 0) path = p;
  });
  return path;
}
inline void load_sliced(const std::string& step_dir, DType dtype, Ranks ranks, i64 seed) {
  run_threads(ranks.size(), {}, [&](Communicator& comm) {
    RankState state(dtype, sliced_ranges(comm.rank(), ranks, seed), true, sliced_model());
    load_checkpoint(step_dir, dtype, sliced_model(), state.pieces(), comm);
    state.expect_filled();
  });
}

}  // namespace ds::testing
