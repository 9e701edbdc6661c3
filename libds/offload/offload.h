// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a rank keeps away from its device, by its configuration: the tiers of its shards, and what they take elsewhere.

#include <vector>

#include "ds/config.h"
#include "offload/chunked_states.h"
#include "offload/delayed_states.h"
#include "offload/file_array.h"
#include "offload/host_array.h"
#include "offload/ordered_file.h"
#include "offload/served_states.h"
#include "zero/shards.h"

namespace ds::offload {

// What of a configuration says that.
struct Settings {
  DeviceKind device = DeviceKind::Cpu;  // where the run computes
  OffloadOptimizerConfig states = {};   // device None where a run has none
  OffloadParamConfig params = {};
  // Where inputs of layers are kept until these are computed again; Nvme: the directory, and parts in memory.
  OffloadDevice inputs = OffloadDevice::None;
  std::string inputs_path{};
  i64 input_buffers = 0;
  i64 tile = 0;  // elements of a chunk of states
  AioConfig aio = {};
  bool several_passes = false;  // of some optimizer, so that a server has two versions of states
};
// Throws Errc::Unavailable: what the device cannot do.
Settings settings_of(const Config& config, DeviceKind device);

// Throws Errc::Unavailable where the directories of a node are not there, or have no room for the files of all its
// ranks, or there is no such server; files: bytes of one of them, by what is in them.
void check_places(const Settings& settings, std::span<const i64> files, int ranks);

class Offload {
 public:
  // A prediction takes the same memory, and makes no file.
  enum class For : u8 { Run, Prediction };
  // Outlives the shards that its tiers are given to.
  // threads: of updates on a host that is not the device; 0: those of the environment. rank: of a run with a server.
  Offload(const Settings& settings, For what, int threads = 0, const ServerLink::Rank& rank = {},
          Trace* trace = nullptr);
  // For a prediction; host: stands for a host that is not the device, and outlives this.
  Offload(const Settings& settings, Device& host) : Offload(settings, For::Prediction) { predicted_host_ = &host; }
  Offload(const Offload&) = delete;

  const zero::Tiers& tiers() const noexcept { return tiers_; }
  // Where inputs of layers that are computed again are kept, for a device whose memory they are not to take; null:
  // there are none.
  std::unique_ptr<zero::TierArray> make_inputs(const OrderedUses& inputs, Device& device, MemoryLedger& ledger);
  // Bytes of files, by what is in them.
  const MemoryLedger& files() const noexcept { return files_; }
  // Of all files, since the run began.
  FileCounts moved() const noexcept;
  FileCounts moved_states() const noexcept;  // of them, of masters and states of optimizers
  // What a step moves: begin_step(), the step, of_step(). What a delayed update moved that was waited for between two
  // steps belongs to the second; times are those of the step.
  void begin_step() noexcept;
  FileCounts of_step() noexcept;
  // Between a GPU and its host since the run began, and in this step.
  HostCopies copies() const noexcept { return copies_; }
  HostCopies copies_of_step() const noexcept { return copies_ - copies_begin_; }
  // Whether the host is another than the device.
  bool is_apart() const noexcept { return settings_.device != DeviceKind::Cpu; }
  bool moves() const noexcept { return link_ || !of_states_.empty() || !of_arrays_.empty() || offloads_to_host_; }
  // How files are read and written, or who has what is not here; empty: nothing is away.
  std::string method() const;
  // What is slower than the configuration asks for, and why; empty: nothing.
  std::string caveat() const;
  // Of a run whose states a server has, else null. attach(): when all shards are made; collective.
  ServerLink* server() const noexcept { return link_.get(); }
  void attach() {
    if (link_) link_->attach(settings_.several_passes);
  }
  // This rank's parameters, from the masters that the server has.
  void restore_params() {
    for (ServedStates* states : served_) states->restore_params();
  }

 private:
  IoOptions io() noexcept;
  void make_served_tiers();
  std::unique_ptr<zero::StateStore> make_chunked(zero::StateStore::Parts parts);
  std::unique_ptr<zero::StateStore> make_delayed(zero::StateStore::Parts parts);
  // Of what stays with the host beside a device; page-locked where its section asks for it.
  enum class Section : u8 { Optimizer, Param };
  HostPlace place(Device& device, Section section) const noexcept;
  HostPlace staging(Device& device) const noexcept;
  Device& host(Device& device) const noexcept {
    return host_ ? *host_ : is_apart() && predicted_host_ != nullptr ? *predicted_host_ : device;
  }
  // Of what is in memory of the host for being offloaded.
  Tag host_tag() const noexcept { return is_apart() ? Tag::Host : Tag::Offload; }
  // Arrays beside a GPU, which stay in such ones of the host.
  using MakeOnHost = std::function<std::unique_ptr<zero::TierArray>(const HostPlace& host, MemoryLedger& ledger,
                                                                    Tag tag, i64 bytes, i64 most)>;
  zero::MakeArray beside(MakeOnHost of_host, Section section);
  std::unique_ptr<ChunkMemory> make_chunks(const ChunkLayout& layout, Device& device, const HostPlace& host,
                                           MemoryLedger& ledger);
  MakeOnHost make_array(std::string dir, i64 beside);
  HostCopies* counted_copies() noexcept { return is_apart() ? &copies_ : nullptr; }
  void count_in_file(Tag tag, i64 bytes);
  void keep(const BlockFile* file, std::vector<const BlockFile*>& files);
  const BlockFile* any_file() const noexcept;

  const Settings settings_;
  const For for_;
  Trace* const trace_;
  std::unique_ptr<Device> host_;  // of a run whose device is another, or busy while updates run
  Device* predicted_host_ = nullptr;
  zero::Tiers tiers_;
  BusyTime busy_;
  DelayedStates::Shared delayed_shared_{.turn = {}, .busy = busy_};
  MemoryLedger files_;
  std::vector<Buffer> in_files_;  // counts of files_, without memory
  std::vector<const BlockFile*> of_states_, of_arrays_;
  std::vector<const DelayedStates*> delayed_;  // of the shards, where updates are delayed
  std::unique_ptr<ServerLink> link_;
  std::vector<ServedStates*> served_;  // of the shards
  // Of the shards that are being made: the memory of their gradients, which the server has, too; null in a prediction.
  std::optional<const Segment*> gradients_;
  FileCounts by_server_;
  HostCopies copies_, copies_begin_;
  bool offloads_to_host_ = false;  // beside a GPU
  FileCounts begin_;               // of the step
  FileCounts recorded_;            // by updates, of the steps so far
};

}  // namespace ds::offload
