// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a rank keeps away from its device, by its configuration: the tiers of its shards, and what they take elsewhere.

#include <vector>

#include "ds/config.h"
#include "offload/chunked_states.h"
#include "offload/file_array.h"
#include "zero/shards.h"

namespace ds::offload {

// What of a configuration says that.
struct Settings {
  DeviceKind device = DeviceKind::Cpu;  // where the run computes
  OffloadOptimizerConfig states = {};   // device None where a run has none
  OffloadParamConfig params = {};
  i64 tile = 0;  // elements of a chunk of states
  AioConfig aio = {};
};
// Throws Errc::Unavailable: what the device cannot do.
Settings settings_of(const Config& config, DeviceKind device);

// Throws Errc::Unavailable where the directories of a node are not there, or have no room for the files of all its
// ranks; files: bytes of one of them, by what is in them.
void check_places(const Settings& settings, std::span<const i64> files, int ranks);

class Offload {
 public:
  // A prediction takes the same memory, and makes no file.
  enum class For : u8 { Run, Prediction };
  // Outlives the shards that its tiers are given to.
  // threads: of updates on a host that is not the device; 0: those of the environment.
  Offload(const Settings& settings, For what, int threads = 0);
  Offload(const Offload&) = delete;

  const zero::Tiers& tiers() const noexcept { return tiers_; }
  // Bytes of files, by what is in them.
  const MemoryLedger& files() const noexcept { return files_; }
  // Of all files, since the run began.
  FileCounts moved() const noexcept;
  FileCounts moved_states() const noexcept;  // of them, of masters and states of optimizers
  bool has_files() const noexcept { return !of_states_.empty() || !of_arrays_.empty(); }
  // How files are read and written; empty: there are none.
  std::string method() const;
  // What is slower than the configuration asks for, and why; empty: nothing.
  std::string caveat() const;

 private:
  IoOptions io() const noexcept;
  std::unique_ptr<ChunkMemory> make_chunks(const ChunkLayout& layout, Device& device, Device& host,
                                           MemoryLedger& ledger);
  zero::MakeArray make_array(std::string dir, i64 beside);
  void count_in_file(Tag tag, i64 bytes);
  void keep(const BlockFile* file, std::vector<const BlockFile*>& files);
  const BlockFile* any_file() const noexcept;

  const Settings settings_;
  const For for_;
  std::unique_ptr<Device> host_;  // of a run whose device is another
  zero::Tiers tiers_;
  MemoryLedger files_;
  std::vector<Buffer> in_files_;  // counts of files_, without memory
  std::vector<const BlockFile*> of_states_, of_arrays_;
};

}  // namespace ds::offload
