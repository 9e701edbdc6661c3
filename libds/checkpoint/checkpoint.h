// SPDX-License-Identifier: Apache-2.0
#pragma once
// Save and load training state at any layout. The engine describes what each rank owns, as ranges of flattened
// parameters or slices of them; nothing here knows ZeRO or tensor parallelism. A saved step is a directory
// (ds-checkpoint(5)):
//
//   DIR/latest                    the name of the newest committed step; moves last
//   DIR/step-00000100/
//     manifest.json               everything but the bulk: parameters, who holds which range, checksums
//     rank-00000.h5 ...           /<state>/<parameter>@<first element>, one-dimensional datasets
//     model.h5                    virtual datasets: every parameter whole under its name and shape
//
// Commit: written to DIR/.tmp-step-00000100-<id>, synced, read back, renamed. A crash at any point leaves the step
// before.

#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "ds/checkpoint.h"
#include "ds/kernels/state_codes.h"
#include "ds/state.h"
#include "model/slice.h"

namespace ds {

struct ParamEntry {
  std::string name;  // Hugging Face's
  std::vector<i64> shape;
  std::string tied_to;              // empty, or the entry whose elements these are
  std::optional<DType> dtype = {};  // as it is stored, where that is not the checkpoint's work_dtype
  // Which states of optimizers it has, where parameters differ in that (Muon beside AdamW, frozen ones); else it has
  // those of the checkpoint.
  std::optional<StateSet> optimizer_states = {};
  std::string optimizer = {};  // whose they are, where that is not CheckpointMeta::optimizer
  bool may_have(State s) const noexcept {
    return !is_optimizer_state(s) || !optimizer_states || (*optimizer_states)[s];
  }
  bool operator==(const ParamEntry&) const = default;
};

// Elements [begin, begin + count) of a flattened parameter, or of a flattened slice of it, owned by this rank. Tied
// entries have no pieces.
struct StatePiece {
  // Elements of what has no place in memory as a whole, that are there at once: no more than these.
  static constexpr i64 kMostOpen = i64{1} << 20;
  i64 param;  // index into the parameter table
  i64 begin, count;
  // Param in the work dtype, all else in fp32. Null: state that the run does not have (save; Master when the work dtype
  // is fp32), or does not want (load).
  PerState<void*> data;
  const model::ParamSlice* slice = nullptr;  // null: the whole parameter. Outlives the save or load
  // Of states that are not fp32 here; codes have their blocks from `begin` on. Files have all of them in fp32.
  PerState<KeptAs> kept = {};
  // Where the state is nowhere in memory as a whole: brings elements [first, first + n) of it, until the next call or
  // the end of all; the piece that is returned has them. `fill`: what was there is of no use, and what is put there is
  // kept. `data` is null then, and `opens` says which states there are.
  std::function<StatePiece(i64 first, i64 n, bool fill)> open = {};
  StateSet opens = {};
  bool has(State s) const noexcept { return data[s] != nullptr || opens[s]; }
  float* values(State s) const noexcept { return static_cast<float*>(data[s]); }
  // Of a state of an optimizer, which is there.
  TensorView state(State s) const noexcept {
    TensorView v = TensorView::of(data[s], kept[s].dtype, {count});
    v.scale = kept[s].scales;
    return v;
  }
};

// Numbers of one rank, which mean something to the same rank of the same layout alone (what 1-bit Adam's signs have
// lost): saved beside its pieces, and left out wherever steps become others.
struct RankLocal {
  std::string name;
  const float* values = nullptr;  // they stay until the save has ended
  i64 count = 0;
};

// The optimizer of steps that name none; and what those name that train nothing.
inline constexpr std::string_view kUsualOptimizer = "AdamW", kNoOptimizer = "none";

// What a run keeps of a parameter, beside its weights.
struct ParamOptimizer {
  std::string name;
  StateSet states;
  bool trains = false;  // else no state is wanted, whatever there is
  i64 numbers = 0;      // of it as a whole (CheckpointMeta::numbers, kOptimizerNumbers)
};

struct LossScalerState {
  double scale = 1;
  i64 iteration = 0, last_overflow = -1, hysteresis = 1;
  bool operator==(const LossScalerState&) const = default;
};

// Keys of numbers that steps hold of parameters as wholes, not negative. Of optimizers: 1-bit LAMB's mean of ratios and
// last factor.
inline constexpr std::string_view kOptimizerNumbers = "optimizer_numbers";
inline constexpr std::string_view kParamNumbers[] = {kOptimizerNumbers};

struct Manifest;

struct CheckpointMeta {
  i64 step = 0;
  DType work_dtype = DType::F32;  // F32, BF16 or F16
  std::string layout_id;          // equal ids: loading is bit-exact without moving a range
  i64 world_size = 1;             // filled in by save_checkpoint
  std::optional<MeshShape> mesh;  // of these ranks; unknown in steps that do not say it
  int zero_stage = 0;
  i64 consumed_samples = 0;
  std::optional<u32> seed;  // unknown where another program made the step
  LossScalerState loss_scaler;
  i64 skipped_steps = 0;
  i64 optimizer_step = 0;
  std::string optimizer = std::string(kUsualOptimizer);  // whose states are stored: its name in configurations
  // Of a run whose states a server had: one word for all that is trained without a break, "@", and the number of the
  // step that it began from, if any.
  std::string history = {};
  std::string isa;                  // instruction set that the bits were made with
  std::string data_json;            // identity of the training data; empty or a JSON document
  std::string attention_json = {};  // what attention hides beside the model's own masks; empty or a JSON document
  // By key, one of kParamNumbers, and by name of the parameter.
  std::map<std::string, std::map<std::string, std::vector<double>>> numbers = {};
  i64 num_numbers(std::string_view key, const std::string& param) const {
    const auto of_key = numbers.find(std::string(key));
    if (of_key == numbers.end()) return 0;
    const auto found = of_key->second.find(param);
    return found == of_key->second.end() ? 0 : std::ssize(found->second);
  }
  std::string config_json;        // the resolved configuration; empty or a JSON document
  std::string model_config_json;  // Hugging Face's config.json; empty or a JSON document
  // What a file of whole tensors said of itself, where the step was made of one: it goes into files made of the step.
  std::optional<std::map<std::string, std::string>> metadata;
  bool operator==(const CheckpointMeta&) const = default;
};

// Collective over all ranks; every rank passes the same meta and params. The pieces of all ranks cover every untied
// parameter exactly once: those of one slice that slice, and the slices of a parameter, all of one dim, that dim. A
// replica of a slice is saved by one of those who have it. A failure on any rank fails all of them with the same error,
// which names the rank; what was there before stays as it was. Returns the step directory. Throws Errc::Io,
// Errc::Internal (pieces that do not cover), Errc::Comm, Errc::Timeout.
std::string save_checkpoint(const std::string& dir, CheckpointMeta meta, const std::vector<ParamEntry>& params,
                            std::span<const StatePiece> pieces, Communicator& comm);

// Numbers of the steps of `dir`, highest first. A directory that cannot be read is a warning.
std::vector<i64> list_steps(const std::string& dir);
// Of the steps of `dir` before `newest`, the keep - 1 >= 0 with the highest numbers stay. Higher ones, and those that
// are `passed_over`, are not of this run, which came back to an older step because they are damaged: they neither count
// nor go. A step that cannot be removed is a warning. One rank's work.
void remove_old_steps(const std::string& dir, i64 newest, i64 keep, std::span<const i64> passed_over = {});

// The newest complete step of `dir` that is older than `step_dir`: for whom that one is damaged. Empty: there is none.
// A warning names each incomplete one between them.
std::string step_before(const std::string& dir, const std::string& step_dir);

// Throws what load_checkpoint would throw for a model with these parameters before it reads the bulk.
CheckpointMeta check_checkpoint(const std::string& step_dir, const std::vector<ParamEntry>& params,
                                std::span<const ParamOptimizer> optimizers = {});

// Collective. Fills every non-null pointer of `pieces`, for any ranges and slices and any world size; each rank reads
// what it needs from wherever it stands, and checks the checksums of what it reads. param_data is in work_dtype; where
// that is not the checkpoint's, it is rounded from the fp32 master weights. All that can be known without the bulk
// (names, shapes, ranges, files and their structure) is checked on all ranks before anything is filled; after a later
// error the pieces' contents are undefined. Throws Errc::Corrupt (a file is missing or damaged: named), Errc::Mismatch
// (another model, or state that the checkpoint does not have), Errc::Io; the same error on all ranks.
// `optimizers`: by entry of params, or empty; after the first update a parameter that is trained must have the states
// of the same optimizer there, no less and no more. `accept` is called on every rank when all that has been checked,
// and throws, on all of them, if the checkpoint is another one than the caller wants.
CheckpointMeta load_checkpoint(const std::string& step_dir, DType work_dtype, const std::vector<ParamEntry>& params,
                               std::span<const StatePiece> pieces, Communicator& comm,
                               std::span<const ParamOptimizer> optimizers = {},
                               const std::function<void(const Manifest&)>& accept = {});

}  // namespace ds
