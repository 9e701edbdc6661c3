// SPDX-License-Identifier: Apache-2.0
#pragma once
// Checkpoints as the tools use them: find, describe, merge and shard. ds-checkpoint(5) describes the format.

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ds/error.h"
#include "ds/kernels/dtype.h"
#include "ds/mesh.h"
#include "ds/model_config.h"
#include "ds/state.h"

namespace ds {

// Resolves a checkpoint to a step directory. `which` is "latest", the name of a step inside `dir`, or a path to a step
// or run directory. "latest" gives `dir` itself if that is a step directory, else the step that the file `dir`/latest
// names. If that file is missing or damaged, points outside `dir`, or names a step that is missing or has no manifest,
// the newest complete step is returned, with a warning. The step's data files are not checked here, and no other step
// ever replaces damaged data. Throws Errc::Io (no checkpoint found), Errc::Corrupt (`latest` is damaged, and no step is
// complete).
DS_API std::string find_checkpoint(const std::string& dir, std::string_view which = "latest");

// Called repeatedly with the bytes done and the bytes in total: (0, total) while files are laid out, (0, 0) while data
// is verified. An exception thrown by the callback ends the work.
using CopyProgress = std::function<void(i64 done, i64 total)>;

// The largest number of positions that a model's config.json may state.
inline constexpr i64 kMostPositions = i64{1} << 24;

struct MergeOptions {
  std::string format = {};          // "safetensors", "hdf5", "hf", "checkpoint", or empty: by the suffix of the output
  std::string tag = {};             // the step to read from a directory of several; empty: the latest
  std::optional<DType> dtype = {};  // F32, BF16 or F16: converts float weights, from the fp32 masters where they exist;
                                    // empty: as they are stored
  std::vector<std::string> only = {};  // glob patterns of parameter names; empty: all
  bool optimizer = false;              // also write optimizer.<state>.<name>, in fp32
  bool verify = false;  // check every checksum of the source first, and compare the output with the source afterwards
  i64 max_shard_bytes = 0;     // tensor bytes in one file of a directory; 0: 5e9 for "hf", one file for "safetensors"
  std::string config = {};     // "hf": config.json, or a directory that contains it; empty: the source's
  std::string tokenizer = {};  // "hf": directory with the tokenizer's files; empty: those that the source names
  i64 positions = 0;           // "hf": see ShardOptions
  CopyProgress progress = {};
};

struct MergeResult {
  std::string source, output, format;
  i64 step = 0;
  std::optional<DType> dtype;  // of the weights; empty if they have several
  i64 num_tensors = 0;
  i64 num_parameters = 0;  // elements of the model; tied parameters count once
  i64 bytes = 0;           // size of the files that hold tensors
  i64 num_files = 0;
  std::string tokenizer;  // the directory its files were copied from; empty: none
  bool verified = false;
  double seconds = 0;
  std::vector<std::string> tied;  // names left out because another tensor holds their elements
};

// Writes the state in `source` (one of our checkpoints, one of DeepSpeed's, a model directory or file) as whole tensors
// under their names. The output is one file; a directory of files ("hf", or "safetensors" with max_shard_bytes); a
// safetensors stream on standard output if `output` is "-"; or one of our checkpoints for a single rank ("checkpoint").
// Except for a stream, the output appears whole or not at all. The copy is streamed: besides the tables of names it
// needs less than 128 MiB, plus 8 MiB for each slice of a parameter, whatever the size of the model. Tied parameters
// are written once, under their owner's name; the metadata maps the other name to it. Throws Errc::Config (invalid
// output or options), Errc::Corrupt (names every bad file), Errc::Mismatch (the checkpoint does not contain the
// requested state), Errc::Unavailable, Errc::Io.
DS_API MergeResult merge_checkpoint(const std::string& source, const std::string& output, const MergeOptions&);

// The mixture of experts that a dense model becomes: that of its family with so many experts, or the one of a
// config.json.
struct Upcycling {
  i64 experts = 0;          // 0, and no config: the model stays as it is
  i64 per_token = 2;        // experts that a token chooses
  std::string config = {};  // config.json, or a directory that contains it
  bool wanted() const noexcept { return experts > 0 || !config.empty(); }
};

struct ShardOptions {
  std::string tag = {};  // see MergeOptions
  MeshShape mesh = {};   // dp x pp x tp x sp ranks; ZeRO shards over dp x sp
  int stage = 0;         // ZeRO stage
  // Needed with pp, tp or positions: config.json, or a directory that contains it; empty: the source's.
  std::string config = {};
  // The model of the program that saved the state, instead of one that config.json describes; resolved, as load_config
  // returns it (Config::model).
  std::optional<ModelConfig> model = {};
  std::string partition = "parameters";  // partition of layers over pp: "parameters", "uniform" or "type:REGEX"
  Upcycling upcycling = {};
  i64 positions = 0;  // rows of the learned position embedding, which is repeated up to that number; 0: unchanged
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

// Writes the state in `source`, which is read as merge_checkpoint reads it, as a run directory for the ranks of a mesh:
// the files that a run with that layout would have saved. Any state can be split over dp and sp; tp and pp need the
// state of a model of the zoo or of the program. `dir` must be missing or empty. The output is read back and verified
// before it is committed; after an error nothing is left. Memory use is that of merge_checkpoint, and so are the
// errors, with Errc::Config (degrees or positions that do not fit the model), Errc::Unavailable (unknown model) and
// Errc::Mismatch (parameters that are not those of the model).
DS_API ShardResult shard_checkpoint(const std::string& source, const std::string& dir, const ShardOptions&);

// The contents of a saved step: parameters, and the ranks that own them.
struct CheckpointSummary {
  struct Rank {
    i64 elems = 0;  // of parameters
    PerState<i64> state_bytes = {};
    i64 file_bytes = 0;
  };
  struct Owner {
    i64 rank, begin, count;  // owns elements [begin, begin + count) of the flattened parameter, or of this slice of it:
    std::string slice = {};  // "[:,0:32]"; empty: the whole
    int slice_dim = 0;
    std::vector<std::pair<i64, i64>> slice_ranges = {};  // index ranges along that dim
  };
  struct Param {
    std::string name;
    DType dtype;
    std::vector<i64> shape;
    std::string tied_to;        // the name whose elements these are; empty: its own
    std::vector<Owner> owners;  // by slice, in order of elements
  };
  std::string step_dir, layout, isa;
  i64 step = 0, consumed_samples = 0, optimizer_step = 0;
  i64 world_size = 0;
  std::optional<MeshShape> mesh;  // if the step states it
  int stage = 0;
  DType dtype = DType::F32;
  std::vector<Rank> ranks;
  std::vector<Param> params;
};
// Reads only the manifest and the sizes of the files. Throws like find_checkpoint, and Errc::Corrupt.
DS_API CheckpointSummary describe_checkpoint(const std::string& dir, const std::string& tag = {});

// Checks the place of a file or directory to be created. Throws Errc::Config unless its parent directory exists, it
// lies outside every saved step (ours, or a tag of DeepSpeed's), and it is none of the files that a run keeps for
// itself.
DS_API void check_place(const std::string& path);
// True if a file with this name is part of a model: weights, their index, a configuration, or a tokenizer's file.
DS_API bool is_model_file(const std::string& path);

}  // namespace ds
