// SPDX-License-Identifier: Apache-2.0
#pragma once
// manifest.json: the one description of a saved step. It is complete: with it the rank files are read at plain offsets,
// and the HDF5 structure around the data is only hashed, never parsed.

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/run_names.h"

namespace ds {

// Data is hashed (XXH3-64) in blocks, so that a range is checked by reading little more than itself.
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
  std::string id;  // 16 hexadecimal digits, also in every rank file: shards of different saves do not mix
  CheckpointMeta meta;
  std::vector<ParamEntry> params;
  std::vector<FileRecord> files;  // by rank
  i64 view_bytes = 0;             // model.h5
  u64 view_checksum = 0;

  bool has(State) const noexcept;
  // Names of what ranks have of their own, of any rank.
  std::set<std::string> rank_local_names() const;
  DType stored_dtype(State s, i64 param) const noexcept {
    return s == State::Param ? params[param].dtype.value_or(meta.work_dtype) : DType::F32;
  }
};

// Where the first element of a piece stands in the flattened parameter: no other piece has it. The piece is valid.
i64 first_element(const Manifest&, const PieceRange&);

inline constexpr std::string_view kManifestName = "manifest.json";
inline constexpr std::string_view kViewName = "model.h5";
std::string rank_file_name(i64 rank);  // rank-00000.h5

std::string format_manifest(const Manifest&);
// Throws Errc::Corrupt (damaged, or contradicts itself; `path` is named), Errc::Unavailable (a newer version).
Manifest parse_manifest(std::string_view text, const std::string& path);
// Every rule that a manifest obeys: names, ties, slices and ranges inside parameters and files, each element covered
// exactly once. Time and memory are of the order of the manifest's text.
void validate_manifest(const Manifest&, const std::string& path, Errc code);

// The meta alone, on one line: as files of whole tensors keep it beside optimizer state.
std::string format_meta(const CheckpointMeta&);
CheckpointMeta parse_meta(std::string_view text, const std::string& path);

// The table of parameters alone.
std::string format_params(const std::vector<ParamEntry>& params);
std::vector<ParamEntry> parse_params(std::string_view text, const std::string& path);

// What the entries say of their optimizers, on one line; empty: nothing.
std::string format_optimizers(const std::vector<ParamEntry>& params);
// Sets it. Throws Errc::Corrupt, Errc::Unavailable (a state that is unknown here).
void parse_optimizers(std::string_view text, const std::string& path, std::vector<ParamEntry>& params);

// One rank's part, as it travels to rank 0.
std::string format_file_record(const FileRecord&);
FileRecord parse_file_record(std::string_view text);

}  // namespace ds
