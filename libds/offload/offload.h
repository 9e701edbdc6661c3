// SPDX-License-Identifier: Apache-2.0
#pragma once
// The offloading of a rank by its configuration: the tiers of its shards, and the memory and files that they use.

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

// The parts of a configuration that determine it.
struct Settings {
  DeviceKind device = DeviceKind::Cpu;  // where the run computes
  OffloadOptimizerConfig states = {};   // device None if the run has no states
  OffloadParamConfig params = {};
  // The place of inputs of layers until the layers are recomputed; Nvme: the directory, and parts in memory.
  OffloadDevice inputs = OffloadDevice::None;
  std::string inputs_path{};
  i64 input_buffers = 0;
  i64 tile = 0;  // the most elements of a chunk of states
  AioConfig aio = {};
  bool several_passes = false;  // some optimizer has several; a server then keeps two versions of states
  bool undoes = false;          // updates may be undone (zero::StateStore::keep)
};
// Throws Errc::Unavailable if the device cannot do it.
Settings settings_of(const Config& config, DeviceKind device);

// Throws Errc::Unavailable if directories do not exist or have no room for the files of all ranks of a node, or if
// there is no such server; files: the bytes of one rank's files, by contents.
void check_places(const Settings& settings, std::span<const i64> files, int ranks);

class Offload {
 public:
  // A prediction allocates the same memory, and makes no file.
  enum class For : u8 { Run, Prediction };
  // Outlives the shards that use its tiers. threads: of updates on a host that is not the device; 0: as the environment
  // says. rank: for a run with a server.
  Offload(const Settings& settings, For what, int threads = 0, const ServerLink::Rank& rank = {},
          Trace* trace = nullptr);
  // For a prediction; host: represents a host that is not the device, and outlives this.
  Offload(const Settings& settings, Device& host) : Offload(settings, For::Prediction) { predicted_host_ = &host; }
  Offload(const Offload&) = delete;

  const zero::Tiers& tiers() const noexcept { return tiers_; }
  // The store for inputs of recomputed layers outside device memory; null: there are none.
  std::unique_ptr<zero::TierArray> make_inputs(const OrderedUses& inputs, Device& device, MemoryLedger& ledger);
  // Bytes of files, by contents.
  const MemoryLedger& files() const noexcept { return files_; }
  // Transfers of all files since the run began.
  FileCounts moved() const noexcept;
  FileCounts moved_states() const noexcept;  // those of master weights and optimizer states
  // The transfers of a step: call begin_step(), take the step, call of_step(). Bytes of a delayed update that was
  // waited for between two steps count in the second; times are those of the step.
  void begin_step() noexcept;
  FileCounts of_step() noexcept;
  // Copies between a GPU and its host since the run began, and in this step.
  HostCopies copies() const noexcept { return copies_; }
  HostCopies copies_of_step() const noexcept { return copies_ - copies_begin_; }
  // Whether the host is separate from the device.
  bool is_apart() const noexcept { return settings_.device != DeviceKind::Cpu; }
  bool moves() const noexcept { return link_ || !of_states_.empty() || !of_arrays_.empty() || offloads_to_host_; }
  // How files are read and written, or which server keeps the states; empty: nothing is offloaded.
  std::string method() const;
  // Settings that are slower than the configuration asks for, and why; empty: none.
  std::string caveat() const;
  // The server's link if a server keeps the states, else null. attach(): to be called when all shards are made;
  // collective.
  ServerLink* server() const noexcept { return link_.get(); }
  void attach() {
    if (link_) link_->attach(settings_.several_passes);
  }
  // Sets this rank's parameters from the server's master weights.
  void restore_params() {
    for (ServedStates* states : served_) states->restore_params();
  }

 private:
  IoOptions io() noexcept;
  void make_served_tiers();
  std::unique_ptr<zero::StateStore> make_chunked(zero::StateStore::Parts parts);
  std::unique_ptr<zero::StateStore> make_delayed(zero::StateStore::Parts parts);
  // For data that stays on the host; page-locked if its section asks for that.
  enum class Section : u8 { Optimizer, Param };
  HostPlace place(Device& device, Section section) const noexcept;
  HostPlace staging(Device& device) const noexcept;
  Device& host(Device& device) const noexcept {
    return host_ ? *host_ : is_apart() && predicted_host_ != nullptr ? *predicted_host_ : device;
  }
  // For data that is in host memory because it is offloaded.
  Tag host_tag() const noexcept { return is_apart() ? Tag::Host : Tag::Offload; }
  // Arrays for a GPU, which stay in the given arrays of the host.
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
  std::unique_ptr<Device> host_;  // if the run's device is not the host, or is busy while updates run
  Device* predicted_host_ = nullptr;
  zero::Tiers tiers_;
  BusyTime busy_;
  DelayedStates::Shared delayed_shared_{.turn = {}, .busy = busy_};
  MemoryLedger files_;
  std::vector<Buffer> in_files_;  // counts the bytes of files_, without memory
  std::vector<const BlockFile*> of_states_, of_arrays_;
  std::vector<const DelayedStates*> delayed_;  // tiers of the shards with delayed updates
  std::unique_ptr<ServerLink> link_;
  std::vector<ServedStates*> served_;  // of the shards
  // For the shards being made: the memory of their gradients, shared with the server; null in a prediction.
  std::optional<const Segment*> gradients_;
  FileCounts by_server_;
  HostCopies copies_, copies_begin_;
  bool offloads_to_host_ = false;  // of a GPU
  FileCounts begin_;               // of the step
  FileCounts recorded_;            // of updates in the steps so far
};

}  // namespace ds::offload
