// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reads ranges of state from any file of a saved step, and returns no byte whose checksum it has not verified.

#include <memory>
#include <span>

#include "base/file.h"
#include "checkpoint/state_source.h"

namespace ds {

u64 checksum(const void* data, i64 bytes) noexcept;
u64 file_checksum(const File& file);

// Size of block `block` of a dataset.
constexpr i64 block_bytes(i64 dataset_bytes, i64 block) noexcept {
  const i64 rest = dataset_bytes - block * kChecksumBlock;
  return rest < kChecksumBlock ? rest : kChecksumBlock;
}
// The name of a piece's dataset in its rank file: state/parameter@<its first element>.
std::string dataset_name(const Manifest&, State, const PieceRange&);

// XXH3-64 of all bytes of the file outside the pieces' datasets.
u64 structure_checksum(const File& file, const Manifest&, std::span<const PieceRecord> pieces);
// Reads every byte of a rank file; throws Errc::Corrupt if it differs from its record.
void verify_file(const File& file, const Manifest&, const FileRecord&, const Tick& tick = {});

// A saved step.
class CheckpointReader : public StateSource {
 public:
  // Reads and validates the manifest, and checks that every file exists and has its size.
  explicit CheckpointReader(std::string step_dir);

  const Manifest& manifest() const noexcept { return manifest_; }
  const std::string& path() const noexcept override { return dir_; }
  const CheckpointMeta& meta() const noexcept override { return manifest_.meta; }
  const std::vector<ParamEntry>& params() const noexcept override { return manifest_.params; }
  bool has(State s) const noexcept override { return has_[s]; }
  std::string file_path(i64 rank) const { return dir_ + "/" + rank_file_name(rank); }

  // Throws Errc::Corrupt unless file `rank` belongs to this checkpoint: its structure has the manifest's checksum.
  void check_structure(i64 rank);

  // Whether a rank has a RankLocal of this name and count; and its numbers, which belong to the file's structure, which
  // must have been checked.
  bool has_rank_local(i64 rank, std::string_view name, i64 count) const noexcept;
  void read_rank_local(i64 rank, std::string_view name, std::span<float> out);

  std::unique_ptr<StateSource> reopen() const override {
    return std::unique_ptr<StateSource>(new CheckpointReader(dir_, manifest_));
  }
  void check() override;
  std::vector<std::string> verify(const Tick& tick) override;

 private:
  CheckpointReader(std::string step_dir, Manifest manifest);
  void check_is_there() const;
  struct StoredPiece {
    i64 begin, end, file;
    const PieceRecord* record;
  };
  // The pieces of one slice of a parameter, in order.
  struct Slice {
    const model::ParamSlice* slice;
    model::SliceMap map;
    std::vector<StoredPiece> pieces;
  };
  const File& open(i64 rank);
  void read_stored(State state, i64 param, i64 first, i64 count, char* out) override;
  void read_stored_slice(State state, i64 param, const model::ParamSlice& slice, i64 first, i64 count,
                         char* out) override;
  // Reads the elements [first, first + count) of `wanted` that are in `pieces`, which are numbered by `stored`.
  struct Wanted {
    const model::SliceMap& map;
    i64 first, count;
    char* out;
  };
  void read_pieces(std::span<const StoredPiece> pieces, const model::SliceMap& stored, State, const Wanted& wanted);
  void read_block_part(const StoredPiece&, const model::SliceMap& stored, State, i64 block, i64 begin, i64 end,
                       const Wanted& wanted);
  struct Block;
  Block& cached_block(const StoredPiece&, State, i64 block);

  std::string dir_;
  Manifest manifest_;
  StateSet has_;
  std::vector<std::vector<Slice>> slices_;  // by parameter
  std::vector<std::unique_ptr<File>> files_;
  i64 num_open_ = 0, max_open_ = open_files_share();
  PageBuffer pages_;
  // Blocks of which only a part was requested. Reading a parameter from beginning to end uses one block of each of its
  // slices at a time: so many are kept, and each is read once.
  struct Block {
    const PieceRecord* piece = nullptr;
    State state = State::Param;
    i64 block = 0;
    i64 last_use = 0;  // 0: its end has been read, so it is replaced first
    std::vector<char> data = {};
  };
  std::vector<Block> blocks_;
  size_t max_blocks_ = 1;
  i64 num_uses_ = 0;
};

}  // namespace ds
