// SPDX-License-Identifier: Apache-2.0
#pragma once
// Checkpoints as tools see them: find one, merge one. The format is described in ds-checkpoint(5).

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ds/error.h"
#include "ds/kernels/dtype.h"
#include "ds/mesh.h"
#include "ds/state.h"

namespace ds {

// The step directory that is meant. `which` = "latest": `dir` itself if it is a step directory, else the step that
// `dir`/latest names. Where that file is missing or damaged, leads out of `dir`, or names a step that is not there or
// has no manifest: the newest complete step, with a warning. Whether the step's own files are as they were saved is for
// who reads them to find out: no other step is taken in place of damaged data. Otherwise `which` is a step name below
// `dir`, or a path to a step or run directory. Throws Errc::Io (there is none), Errc::Corrupt (`latest` is damaged, and
// there is no complete step).
DS_API std::string find_checkpoint(const std::string& dir, std::string_view which = "latest");

// Bytes done of bytes in all, now and then; 0 of all while files are laid out, 0 of 0 while something is verified. What
// it throws ends the work.
using CopyProgress = std::function<void(i64 done, i64 total)>;

// The longest sequence that a model's config.json may say.
inline constexpr i64 kMostPositions = i64{1} << 24;

struct MergeOptions {
  std::string format = {};          // "safetensors", "hdf5", "hf", "checkpoint", or empty: by the suffix of the output
  std::string tag = {};             // which step of a directory of several; empty: the latest
  std::optional<DType> dtype = {};  // F32, BF16 or F16, of float weights; empty: as they are stored. From the fp32
                                    // masters where there are any
  std::vector<std::string> only = {};  // glob patterns of parameter names; empty: all
  bool optimizer = false;              // also optimizer.<state>.<name>, in fp32
  bool verify = false;         // check every checksum of the source first, compare the output with it afterwards
  i64 max_shard_bytes = 0;     // of tensors in one file of a directory; 0: "hf" 5e9, "safetensors" one file
  std::string config = {};     // "hf": config.json, or a directory that has it; empty: the source's
  std::string tokenizer = {};  // "hf": directory with the tokenizer's files; empty: those that the source knows of
  i64 positions = 0;           // "hf": as of ShardOptions
  CopyProgress progress = {};
};

struct MergeResult {
  std::string source, output, format;
  i64 step = 0;
  std::optional<DType> dtype;  // of the weights; nothing where they have several
  i64 num_tensors = 0;
  i64 num_parameters = 0;  // elements of the model, tied ones once
  i64 bytes = 0;           // of the files of tensors
  i64 num_files = 0;
  std::string tokenizer;  // where its files were copied from; empty: there are none
  bool verified = false;
  double seconds = 0;
  std::vector<std::string> tied;  // names left out because they are another tensor's
};

// Writes the state that `source` holds (one of our checkpoints, DeepSpeed's, a model directory or file) as whole
// tensors under their names: one file, or a directory of files ("hf", or "safetensors" with max_shard_bytes), or, where
// `output` is "-", a safetensors stream on standard output; or as one of our checkpoints for one rank ("checkpoint").
// The output appears whole or not at all, but for a stream. A streaming copy: needs less than 128 MiB, and 8 MiB for
// each slice of a parameter, beside the tables of names, whatever the model's size. Tied parameters are written once,
// under their owner's name; the metadata maps the other name to it. Throws Errc::Config (output or options make no
// sense), Errc::Corrupt (every bad file is named), Errc::Mismatch (no such state in this checkpoint),
// Errc::Unavailable, Errc::Io.
DS_API MergeResult merge_checkpoint(const std::string& source, const std::string& output, const MergeOptions&);

struct ShardOptions {
  std::string tag = {};                  // as above
  MeshShape mesh = {};                   // dp x pp x tp x sp ranks; ZeRO shards over dp x sp
  int stage = 0;                         // ZeRO stage
  std::string config = {};               // for pp, tp, positions: config.json, or a directory that has it; empty: the
                                         // source's
  std::string partition = "parameters";  // for pp: "parameters", "uniform" or "type:REGEX"
  i64 positions = 0;  // rows of the learned position embedding, which is repeated to them; 0: as many as there are
  CopyProgress progress = {};
};

struct ShardResult {
  std::string source, step_dir;
  i64 step = 0;
  MeshShape mesh;
  int stage = 0;
  DType dtype = DType::F32;  // of most weights
  i64 num_tensors = 0, num_parameters = 0;
  i64 bytes = 0;  // of all rank files
  bool optimizer = false;
  double seconds = 0;
};

// Writes the state that `source` holds, as merge_checkpoint reads it, as a run directory of the ranks of a mesh: what a
// run at that layout would have saved. Any state goes over dp and sp; for tp and pp it must be that of a model of the
// zoo. `dir` does not exist or is empty. Read back and verified before it is committed; after an error nothing is left.
// Memory as of merge_checkpoint. Throws as that; Errc::Config (degrees or positions that do not fit the model),
// Errc::Unavailable (not a model that is known), Errc::Mismatch (not the parameters of the model).
DS_API ShardResult shard_checkpoint(const std::string& source, const std::string& dir, const ShardOptions&);

// Who owns what in a saved step of ours.
struct CheckpointSummary {
  struct Rank {
    i64 elems = 0;  // of parameters
    PerState<i64> state_bytes = {};
    i64 file_bytes = 0;
  };
  struct Owner {
    i64 rank, begin, count;  // elements [begin, begin + count) of the flattened parameter, or of this slice of it:
    std::string slice = {};  // "[:,0:32]"; empty: the whole
    int slice_dim = 0;
    std::vector<std::pair<i64, i64>> slice_ranges = {};  // of the indices of that dim
  };
  struct Param {
    std::string name;
    DType dtype;
    std::vector<i64> shape;
    std::string tied_to;        // empty, or whose elements these are
    std::vector<Owner> owners;  // by slice, in order of elements
  };
  std::string step_dir, layout, isa;
  i64 step = 0, consumed_samples = 0, optimizer_step = 0;
  i64 world_size = 0;
  std::optional<MeshShape> mesh;  // where the step says it
  int stage = 0;
  DType dtype = DType::F32;
  std::vector<Rank> ranks;
  std::vector<Param> params;
};
// Reads the manifest alone, and the sizes of the files. Throws as find_checkpoint, and Errc::Corrupt.
DS_API CheckpointSummary describe_checkpoint(const std::string& dir, const std::string& tag = {});

// Throws Errc::Config unless `path`, a file or directory to be, has a directory to stand in, lies in no saved step
// (ours, or a tag of DeepSpeed's) and is none of the files that a run keeps for itself.
DS_API void check_place(const std::string& path);
// Whether a file of that name is a part of a model: weights, their index, a configuration, a tokenizer's file.
DS_API bool is_model_file(const std::string& path);

}  // namespace ds
