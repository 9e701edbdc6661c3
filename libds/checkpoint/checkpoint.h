// SPDX-License-Identifier: Apache-2.0
#pragma once
// Save and load training state at any layout. The engine describes what each rank owns, as ranges of flattened
// parameters or slices of them; nothing here knows ZeRO or tensor parallelism. A saved step is a directory
// (ds-checkpoint(5)):
//
//   DIR/latest                    the name of the newest committed step; moves last
//   DIR/step-00000100/
//     manifest.json               everything but the bulk: parameters, ranges of each rank, checksums
//     rank-00000.h5 ...           /<state>/<parameter>@<first element>, one-dimensional datasets
//     model.h5                    virtual datasets: every parameter whole under its name and shape
//
// Commit: written to DIR/.tmp-step-00000100-<id>, synced, read back, renamed. A crash at any point leaves the previous
// step intact.

#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ds/checkpoint.h"
#include "ds/communicator.h"
#include "ds/kernels/state_codes.h"
#include "ds/state.h"
#include "model/slice.h"

namespace ds {

struct ParamEntry {
  std::string name;  // Hugging Face's
  std::vector<i64> shape;
  std::string tied_to;              // empty, or the name of the entry that owns the elements
  std::optional<DType> dtype = {};  // stored dtype, if it is not the checkpoint's work_dtype
  // The optimizer states that it has, if parameters differ in that (Muon with AdamW, frozen parameters); else those of
  // the checkpoint.
  std::optional<StateSet> optimizer_states = {};
  std::string optimizer = {};  // the optimizer of these states, if it is not CheckpointMeta::optimizer
  bool frozen = false;         // it has no master either, whether others have one or not
  bool may_have(State s) const noexcept {
    if (s == State::Param) return true;
    return !frozen && (!is_optimizer_state(s) || !optimizer_states || (*optimizer_states)[s]);
  }
  bool operator==(const ParamEntry&) const = default;
};

// Elements [begin, begin + count) of a flattened parameter, or of a flattened slice of it, owned by this rank. Tied
// entries have no pieces.
struct StatePiece {
  // The most elements that open() brings at once.
  static constexpr i64 kMostOpen = i64{1} << 20;
  i64 param;  // index into the parameter table
  i64 begin, count;
  // Param in the work dtype, all other states in fp32. Null: the run does not have this state (save; Master if the work
  // dtype is fp32), or does not want it (load).
  PerState<void*> data;
  const model::ParamSlice* slice = nullptr;  // null: the whole parameter. Outlives the save or load
  // For states that are not fp32 in memory; blocks of codes are counted from `begin`. Files contain all of them in
  // fp32.
  PerState<KeptAs> kept = {};
  // For state that is not in memory as a whole: brings elements [first, first + n) into memory, valid until the next
  // call, and returns a piece with them. `fill`: the old contents are not needed, and new contents are kept. `data` is
  // null in this case, and `opens` names the states.
  std::function<StatePiece(i64 first, i64 n, bool fill)> open = {};
  StateSet opens = {};
  bool has(State s) const noexcept { return data[s] != nullptr || opens[s]; }
  float* values(State s) const noexcept { return static_cast<float*>(data[s]); }
  // View of an optimizer state, which must be present.
  TensorView state(State s) const noexcept {
    TensorView v = TensorView::of(data[s], kept[s].dtype, {count});
    v.scale = kept[s].scales;
    return v;
  }
};

// Numbers of one rank that are valid only for the same rank of the same layout (for example the error feedback of 1-bit
// Adam). They are saved in the rank's file, and dropped when a step is converted.
struct RankLocal {
  std::string name;
  const float* values = nullptr;  // valid until the save has ended
  i64 count = 0;
};

// The optimizer of steps that name none; and the name in steps that train nothing.
inline constexpr std::string_view kUsualOptimizer = "AdamW", kNoOptimizer = "none";

// The optimizer state of a parameter in a run.
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

// Keys under which a step holds numbers of whole parameters, which are not negative. kOptimizerNumbers: 1-bit LAMB's
// mean of ratios and last factor.
inline constexpr std::string_view kOptimizerNumbers = "optimizer_numbers";
inline constexpr std::string_view kParamNumbers[] = {kOptimizerNumbers};

struct Manifest;

struct CheckpointMeta {
  i64 step = 0;
  DType work_dtype = DType::F32;  // F32, BF16 or F16
  std::string layout_id;          // equal ids: loading moves no range to another rank
  i64 world_size = 1;             // filled in by save_checkpoint
  std::optional<MeshShape> mesh;  // of these ranks; missing in steps of older versions
  int zero_stage = 0;
  i64 consumed_samples = 0;
  std::optional<u32> seed;  // unknown if another program made the step
  LossScalerState loss_scaler;
  i64 skipped_steps = 0;
  i64 optimizer_step = 0;
  std::string optimizer =
      std::string(kUsualOptimizer);  // name of the optimizer whose states are stored, as in configurations
  // For a run whose states a server keeps: one word that identifies uninterrupted training, "@", and the number of the
  // step from which it started, if any.
  std::string history = {};
  std::string isa;                  // instruction set, or GPU and library of attention, that computed the step
  std::string data_json;            // identity of the training data; empty or a JSON document
  std::string attention_json = {};  // attention masks in addition to the model's own; empty or a JSON document
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
  // Metadata of the file of whole tensors from which the step was made; it is copied to files made of the step.
  std::optional<std::map<std::string, std::string>> metadata;
  bool operator==(const CheckpointMeta&) const = default;
};

// Collective over all ranks; every rank passes the same meta and params. The pieces of all ranks cover every untied
// parameter exactly once: the pieces of a slice cover the slice, and the slices of a parameter, all of one dim, cover
// that dim. One rank saves each replicated slice. A failure on any rank fails all of them with the same error, which
// names the rank, and leaves existing files unchanged. Returns the step directory. Throws Errc::Io, Errc::Internal
// (pieces that do not cover), Errc::Comm, Errc::Timeout.
std::string save_checkpoint(const std::string& dir, CheckpointMeta meta, const std::vector<ParamEntry>& params,
                            std::span<const StatePiece> pieces, Communicator& comm);

// The numbers of the steps in `dir`, highest first. A directory that cannot be read gives a warning.
std::vector<i64> list_steps(const std::string& dir);
// Removes old steps of `dir`: of those before `newest`, the keep - 1 >= 0 highest are kept. Higher steps, and those in
// `passed_over`, were damaged when the run resumed from an older one: they neither count nor are removed. A step that
// cannot be removed gives a warning. To be called on one rank.
void remove_old_steps(const std::string& dir, i64 newest, i64 keep, std::span<const i64> passed_over = {});

// The newest complete step of `dir` that is older than the damaged `step_dir`; empty if there is none. A warning names
// each incomplete step between them.
std::string step_before(const std::string& dir, const std::string& step_dir);

// Throws what load_checkpoint would throw for a model with these parameters before reading the bulk.
CheckpointMeta check_checkpoint(const std::string& step_dir, const std::vector<ParamEntry>& params,
                                std::span<const ParamOptimizer> optimizers = {},
                                const std::function<void(const Manifest&)>& accept = {});

// Collective. Fills every non-null pointer of `pieces`, for any ranges, slices and world size; each rank reads what it
// needs from any file, and verifies the checksums of the data read. param_data is in work_dtype; if that is not the
// checkpoint's, it is rounded from the fp32 master weights. Everything but the bulk (names, shapes, ranges, files and
// their structure) is checked on all ranks before anything is filled; after a later error the contents of the pieces
// are undefined. Throws Errc::Corrupt (a file is missing or damaged: named), Errc::Mismatch (another model, or state
// that the checkpoint does not have), Errc::Io; the same error on all ranks. `optimizers`: by entry of params, or
// empty; after the first update the checkpoint must contain, for a trained parameter, exactly the states of the same
// optimizer. `accept` is called on every rank before these checks, when the manifest has been read; it must throw on
// all ranks if the caller does not want this checkpoint.
CheckpointMeta load_checkpoint(const std::string& step_dir, DType work_dtype, const std::vector<ParamEntry>& params,
                               std::span<const StatePiece> pieces, Communicator& comm,
                               std::span<const ParamOptimizer> optimizers = {},
                               const std::function<void(const Manifest&)>& accept = {});

}  // namespace ds
