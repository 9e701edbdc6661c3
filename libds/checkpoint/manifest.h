// SPDX-License-Identifier: Apache-2.0
#pragma once
// manifest.json, the complete description of a saved step: with it the rank files are read at plain offsets, and the
// HDF5 structure around the data is only hashed, never parsed.

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/run_names.h"

namespace ds {

// Data is hashed (XXH3-64) in blocks, so checking a range reads little more than the range.
inline constexpr i64 kChecksumBlock = i64{4} << 20;

struct DatasetRecord {
  i64 offset;                  // in the file
  std::vector<u64> checksums;  // one per block
};

// Elements [begin, begin + count) of a flattened slice of a parameter.
struct PieceRange {
  i64 param, begin, count;
  model::ParamSlice slice = {};
};

struct PieceRecord : PieceRange {
  PerState<std::optional<DatasetRecord>> states;
};

// A RankLocal of a rank file: fp32, part of the bytes outside the datasets.
struct RankLocalRecord {
  std::string name;
  i64 offset = 0, count = 0;
};

struct FileRecord {
  i64 bytes = 0;
  u64 structure = 0;  // XXH3-64 of all bytes outside the datasets
  std::vector<PieceRecord> pieces;
  std::vector<RankLocalRecord> rank_local = {};
};

struct Manifest {
  std::string id;  // 16 hexadecimal digits, also in every rank file, so shards of different saves are not mixed
  CheckpointMeta meta;
  std::vector<ParamEntry> params;
  std::vector<FileRecord> files;  // by rank
  i64 view_bytes = 0;             // model.h5
  u64 view_checksum = 0;

  bool has(State) const noexcept;
  // The names of rank-local arrays of all ranks.
  std::set<std::string> rank_local_names() const;
  DType stored_dtype(State s, i64 param) const noexcept {
    return s == State::Param ? params[param].dtype.value_or(meta.work_dtype) : DType::F32;
  }
};

// The position of the first element of a valid piece in the flattened parameter; no other piece has the same.
i64 first_element(const Manifest&, const PieceRange&);

inline constexpr std::string_view kManifestName = "manifest.json";
inline constexpr std::string_view kViewName = "model.h5";
std::string rank_file_name(i64 rank);  // rank-00000.h5

std::string format_manifest(const Manifest&);
// Throws Errc::Corrupt naming `path` (damaged or inconsistent), Errc::Unavailable (a newer version).
Manifest parse_manifest(std::string_view text, const std::string& path);
// Checks every rule of a manifest: names, ties, slices and ranges inside parameters and files, each element covered
// exactly once. Time and memory are proportional to the manifest's text.
void validate_manifest(const Manifest&, const std::string& path, Errc code);

// The meta only, on one line, as files of whole tensors with optimizer states contain it.
std::string format_meta(const CheckpointMeta&);
CheckpointMeta parse_meta(std::string_view text, const std::string& path);

// The table of parameters only.
std::string format_params(const std::vector<ParamEntry>& params);
std::vector<ParamEntry> parse_params(std::string_view text, const std::string& path);

// The optimizers of the entries, on one line; empty: none is named.
std::string format_optimizers(const std::vector<ParamEntry>& params);
// Sets the optimizers of the entries. Throws Errc::Corrupt, Errc::Unavailable (an unknown state).
void parse_optimizers(std::string_view text, const std::string& path, std::vector<ParamEntry>& params);

// One rank's part, in the form sent to rank 0.
std::string format_file_record(const FileRecord&);
FileRecord parse_file_record(std::string_view text);

}  // namespace ds
