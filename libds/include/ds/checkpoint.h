// SPDX-License-Identifier: Apache-2.0
#pragma once
// Checkpoints as tools see them: find one, merge one. The format is described in ds-checkpoint(5).

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ds/error.h"
#include "ds/kernels/dtype.h"

namespace ds {

// The step directory that is meant. `which` = "latest": `dir` itself if it is a step directory, else the step that
// `dir`/latest names (where that file is missing, the newest complete step, with a warning). Otherwise `which` is a
// step name below `dir`, or a path to a step or run directory. Throws Errc::Io (there is none), Errc::Corrupt (`latest`
// is damaged, names a step that is not there, or leads out of `dir`; the message says which step to name instead).
DS_API std::string find_checkpoint(const std::string& dir, std::string_view which = "latest");

struct MergeOptions {
  std::string format = {};  // "safetensors", "hdf5", or empty: by the suffix of the output
  std::optional<DType> dtype =
      {};                  // F32, BF16 or F16; empty: as trained. From the fp32 master weights where there are any
  bool optimizer = false;  // also optimizer.{master,exp_avg,exp_avg_sq}.<name>, in fp32
  bool verify = false;     // check every checksum of the checkpoint first, compare the output with it afterwards
};

struct MergeResult {
  std::string step_dir, output, format;
  i64 step = 0;
  DType dtype = DType::F32;
  i64 num_tensors = 0;
  i64 num_parameters = 0;  // elements of the model, tied ones once
  i64 bytes = 0;           // of the output file
  bool verified = false;
  double seconds = 0;
  std::vector<std::string> tied;  // names left out because they are another tensor's
};

// Writes the checkpoint of a step directory as one file, which appears whole or not at all. A streaming copy: needs
// less than 128 MiB beside the manifest, whatever the model's size. Tied parameters are written once, under their
// owner's name; the metadata maps the other name to it. Throws Errc::Config (output or options make no sense),
// Errc::Corrupt (every bad file is named), Errc::Mismatch (no such state in this checkpoint), Errc::Io.
DS_API MergeResult merge_checkpoint(const std::string& step_dir, const std::string& output, const MergeOptions&);

}  // namespace ds
