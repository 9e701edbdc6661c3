// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reads ranges of state out of a saved step, wherever they stand, and never hands out a byte whose checksum it has not
// checked.

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
// The name of a piece's dataset in its rank file: state/parameter@begin.
std::string dataset_name(const Manifest&, State, i64 param, i64 begin);

// XXH3-64 of all bytes of the file that belong to none of the pieces' datasets.
u64 structure_checksum(const File& file, const Manifest&, std::span<const PieceRecord> pieces);
// Reads every byte of a rank file; throws Errc::Corrupt unless it is as its record says.
void verify_file(const File& file, const Manifest&, const FileRecord&, const Tick& tick = {});

// One of our saved steps.
class CheckpointReader : public StateSource {
 public:
  // Reads and validates the manifest, and checks that every file is there with its size.
  explicit CheckpointReader(std::string step_dir);

  const Manifest& manifest() const noexcept { return manifest_; }
  const std::string& path() const noexcept override { return dir_; }
  const CheckpointMeta& meta() const noexcept override { return manifest_.meta; }
  const std::vector<ParamEntry>& params() const noexcept override { return manifest_.params; }
  bool has(State s) const noexcept override { return has_[static_cast<size_t>(s)]; }
  std::string file_path(i64 rank) const { return dir_ + "/" + rank_file_name(rank); }

  // Throws Errc::Corrupt unless file `rank` belongs to this checkpoint: its structure has the manifest's checksum.
  void check_structure(i64 rank);

  std::unique_ptr<StateSource> reopen() const override {
    return std::unique_ptr<StateSource>(new CheckpointReader(dir_, manifest_));
  }
  void check() override;
  std::vector<std::string> verify(const Tick& tick) override;

 private:
  CheckpointReader(std::string step_dir, Manifest manifest);
  void check_is_there() const;
  struct Piece {
    i64 begin, end, file;
    const PieceRecord* record;
  };
  const File& open(i64 rank);
  void read_stored(State state, i64 param, i64 first, i64 count, char* out) override;
  void read_dataset(const Piece&, State, i64 begin, i64 end, char* out);

  std::string dir_;
  Manifest manifest_;
  std::array<bool, 4> has_{};
  std::vector<std::vector<Piece>> pieces_;  // by parameter, in order
  std::vector<std::unique_ptr<File>> files_;
  i64 num_open_ = 0, max_open_ = open_files_share();
  PageBuffer pages_;
  struct BlockKey {
    const PieceRecord* piece = nullptr;
    State state = State::Param;
    i64 block = 0;
    bool operator==(const BlockKey&) const = default;
  };
  BlockKey block_key_;       // of what stands in block_
  std::vector<char> block_;  // a block of which only a part is wanted
};

}  // namespace ds
