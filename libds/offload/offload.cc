// SPDX-License-Identifier: Apache-2.0
#include "offload/offload.h"

#include <sys/stat.h>

#include <algorithm>

#include "config/optimizer_table.h"
#include "probe/host.h"

namespace ds::offload {
namespace {

bool is_one_file_system(const std::string& a, const std::string& b) noexcept {
  struct stat of_a = {};
  struct stat of_b = {};
  if (a == b) return true;
  return ::stat(a.c_str(), &of_a) == 0 && ::stat(b.c_str(), &of_b) == 0 && of_a.st_dev == of_b.st_dev;
}

constexpr i64 kLeastTile = 4 * kStateBlock, kMostTile = i64{1} << 20;  // elements

}  // namespace

Settings settings_of(const Config& config, DeviceKind device) {
  Settings s{.device = device, .params = config.zero.offload_param, .aio = config.aio};
  if (trains(config.use)) s.states = config.zero.offload_optimizer;
  const ActivationCheckpointingConfig& inputs = config.activation_checkpointing;
  if (trains(config.use) && inputs.granularity == CheckpointGranularity::Layer) {
    // The memory of a CPU is host memory.
    s.inputs = !inputs.nvme_path.empty()                               ? OffloadDevice::Nvme
               : inputs.cpu_checkpointing && device != DeviceKind::Cpu ? OffloadDevice::Cpu
                                                                       : OffloadDevice::None;
    s.inputs_path = inputs.nvme_path;
    s.input_buffers = inputs.buffer_count;
  }
  DS_CHECK(device == DeviceKind::Cpu || !s.states.delayed_update || s.states.ratio >= 1, Errc::Unavailable,
           "zero_optimization.offload_optimizer.delayed_update: on a GPU it needs ratio 1, since updates on the GPU "
           "cannot be delayed");
  s.undoes = config.pipeline.post_validate;
  s.several_passes = any_optimizer(config.optimizer, &OptimizerRow::sums_over_ranks);
  if (device == DeviceKind::Cpu && s.states.device != OffloadDevice::Nvme) s.states.gradients = false;
  DS_CHECK(!s.states.gradients || !any_optimizer(config.optimizer, &OptimizerRow::needs_matrices), Errc::Unavailable,
           "zero_optimization.offload_optimizer.gradients: Muon needs all gradients of a matrix at once, so they stay "
           "in device memory");
  s.tile = std::clamp(config.zero.sub_group_size / kStateBlock * kStateBlock, kLeastTile, kMostTile);
  return s;
}

void check_places(const Settings& s, std::span<const i64> files, int ranks) {
  struct Place {
    std::string_view key;
    const std::string& path;
    i64 bytes = 0;
  };
  Place states{"zero_optimization.offload_optimizer.nvme_path", s.states.nvme_path},
      params{"zero_optimization.offload_param.nvme_path", s.params.nvme_path, files[static_cast<size_t>(Tag::Params)]},
      inputs{"activation_checkpointing.nvme_path", s.inputs_path, files[static_cast<size_t>(Tag::Activations)]};
  if (s.states.device == OffloadDevice::Server) {
    ServerLink::check(s.states.name);
  } else {
    for (const i64 bytes : files) states.bytes += bytes;
    states.bytes -= params.bytes + inputs.bytes;
  }
  const Place all[] = {states, params, inputs};
  for (const Place& place : all) {
    if (place.bytes == 0) continue;
    i64 there = 0;  // of all that has the same file system
    for (const Place& other : all) there += is_one_file_system(other.path, place.path) ? other.bytes : 0;
    try {
      BlockFile::check(place.path, ranks * there);
    } catch (const Error& e) {
      throw Error(e.code(), fmt::format("{}: {}", place.key, e.what()));
    }
  }
}

// On the CPU, what is to be in its memory is there.
Offload::Offload(const Settings& settings, For what, int threads, const ServerLink::Rank& rank, Trace* trace)
    : settings_(settings), for_(what), trace_(trace) {
  if (settings.states.device == OffloadDevice::Server) {
    if (what == For::Run) link_ = std::make_unique<ServerLink>(settings.states.name, rank);
    make_served_tiers();
  }
  const bool nvme = settings.states.device == OffloadDevice::Nvme, apart = is_apart();
  const bool delayed = settings.states.delayed_update;
  const bool states = nvme || delayed || (apart && settings.states.device == OffloadDevice::Cpu);
  const bool any = states || settings.params.device != OffloadDevice::None || settings.inputs != OffloadDevice::None;
  offloads_to_host_ = apart && any;
  if (what == For::Run && (delayed || (apart && any)))
    host_ = make_cpu_device(probe::cpu_backend(), threads > 0 ? threads : probe::rank_threads(1));
  if (states) {
    tiers_.states = [this, delayed](zero::StateStore::Parts parts) {
      return delayed ? make_delayed(std::move(parts)) : make_chunked(std::move(parts));
    };
    // One that is added to or read, and one that goes.
    if (nvme && !apart && settings.states.gradients) tiers_.grads = make_array(settings.states.nvme_path, 2);
  }
  const auto in_memory = [](const HostPlace& host, MemoryLedger& ledger, Tag, i64 bytes, i64) {
    return std::make_unique<HostMemory>(host.take(ledger, Tag::Host, bytes));
  };
  if (settings.params.device == OffloadDevice::Nvme) {
    // Streamed slices pass through buffers only where they are written, or copied to a GPU.
    constexpr i64 kOfStream = 2;
    const i64 buffers = settings.params.buffer_count > 0 ? settings.params.buffer_count : kOfStream;
    MakeOnHost in_files = make_array(settings.params.nvme_path, buffers);
    tiers_.params = apart ? beside(std::move(in_files), Section::Param) : zero::MakeArray(std::move(in_files));
  } else if (apart && settings.params.device == OffloadDevice::Cpu) {
    tiers_.params = beside(in_memory, Section::Param);
  }
  if (apart && settings.states.gradients && !tiers_.grads) tiers_.grads = beside(in_memory, Section::Optimizer);
}

HostPlace Offload::place(Device& device, Section section) const noexcept {
  Device& host = this->host(device);
  const bool pinned = section == Section::Optimizer ? settings_.states.pin_memory : settings_.params.pin_memory;
  if (!pinned || !is_apart() || for_ == For::Prediction) return host;
  return {host, device,
          section == Section::Optimizer ? "zero_optimization.offload_optimizer.pin_memory"
                                        : "zero_optimization.offload_param.pin_memory"};
}

// A few tiles are page-locked whatever a configuration says: it is what a copy passes through.
HostPlace Offload::staging(Device& device) const noexcept {
  Device& host = this->host(device);
  if (!is_apart() || for_ == For::Prediction) return host;
  return {host, device, "zero_optimization.offload_optimizer"};
}

std::unique_ptr<zero::StateStore> Offload::make_chunked(zero::StateStore::Parts parts) {
  const HostPlace host = place(parts.device, Section::Optimizer);
  return std::make_unique<ChunkedStates>(std::move(parts), settings_.tile,
                                         UpdateHost{host, staging(parts.device), is_apart(), counted_copies(), trace_},
                                         [this, host](const ChunkLayout& layout, Device& device, MemoryLedger& ledger) {
                                           return make_chunks(layout, device, host, ledger);
                                         });
}

std::unique_ptr<zero::StateStore> Offload::make_delayed(zero::StateStore::Parts parts) {
  const auto file = std::make_shared<const BlockFile*>(nullptr);  // the tier's, where it has one
  DelayedStates::Options options{.host = place(parts.device, Section::Optimizer),
                                 .shared = delayed_shared_,
                                 .tag = host_tag(),
                                 .copies = counted_copies(),
                                 .from = settings_.states.delayed_update_start,
                                 .beside = for_ == For::Run,
                                 .moved = [file] { return *file == nullptr ? FileCounts{} : (*file)->counts(); }};
  const size_t before = of_states_.size();
  auto made = std::make_unique<DelayedStates>(
      std::move(parts), [this](zero::StateStore::Parts inner) { return make_chunked(std::move(inner)); }, options);
  if (of_states_.size() > before) *file = of_states_.back();
  delayed_.push_back(made.get());
  return made;
}

zero::MakeArray Offload::beside(MakeOnHost of_host, Section section) {
  return [this, section, of_host = std::move(of_host)](Device& device, MemoryLedger& ledger, Tag tag, i64 bytes,
                                                       i64 most) {
    return std::make_unique<HostArray>(device, counted_copies(),
                                       of_host(place(device, section), ledger, tag, bytes, most), ledger, bytes, most);
  };
}

void Offload::make_served_tiers() {
  const auto in_segment = [this](const HostPlace& host, MemoryLedger& ledger, Tag tag, i64 bytes) {
    gradients_ = link_ ? &link_->new_segment(bytes) : nullptr;
    return segment_buffer(*gradients_, host, ledger, tag, bytes);
  };
  if (!is_apart()) {
    tiers_.grads = [in_segment](Device& device, MemoryLedger& ledger, Tag tag, i64 bytes, i64) {
      return std::make_unique<zero::DeviceArray>(in_segment(device, ledger, tag, bytes));
    };
  } else if (settings_.states.gradients) {
    tiers_.grads =
        beside([in_segment](const HostPlace& host, MemoryLedger& ledger, Tag, i64 bytes,
                            i64) { return std::make_unique<HostMemory>(in_segment(host, ledger, Tag::Host, bytes)); },
               Section::Optimizer);
  }
  tiers_.states = [this](zero::StateStore::Parts parts) {
    const std::optional<const Segment*> gradients = std::exchange(gradients_, std::nullopt);
    const HostPlace host = place(parts.device, Section::Optimizer);
    auto made = std::make_unique<ServedStates>(std::move(parts),
                                               ServedStates::Options{.host = host,
                                                                     .most = settings_.tile,
                                                                     .apart = is_apart(),
                                                                     .tag = host_tag(),
                                                                     .link = link_.get(),
                                                                     .shares_gradients = gradients.has_value(),
                                                                     .gradients = gradients.value_or(nullptr),
                                                                     .counts = &by_server_,
                                                                     .busy = &busy_,
                                                                     .copies = counted_copies()});
    for (const State s : kStates)
      count_in_file(s == State::Master ? Tag::Master : Tag::Optimizer, made->state_bytes()[s]);
    served_.push_back(made.get());
    return made;
  };
}

IoOptions Offload::io() noexcept {
  return {.block_bytes = settings_.aio.block_size,
          .depth = static_cast<int>(settings_.aio.queue_depth),
          .threads = static_cast<int>(settings_.aio.intra_op_parallelism),
          .io_uring = settings_.aio.method != AioMethod::Threads,
          .busy = &busy_};
}

void Offload::count_in_file(Tag tag, i64 bytes) {
  if (bytes > 0) in_files_.emplace_back(files_, tag, this, bytes, [] {});
}

void Offload::keep(const BlockFile* file, std::vector<const BlockFile*>& files) {
  if (file == nullptr) return;
  files.push_back(file);
  DS_CHECK(settings_.aio.method != AioMethod::IoUring || file->refused_ring().empty(), Errc::Unavailable,
           "aio.method \"io_uring\": the system refuses it: {}; \"threads\" works everywhere", file->refused_ring());
}

std::unique_ptr<ChunkMemory> Offload::make_chunks(const ChunkLayout& layout, Device& device, const HostPlace& host,
                                                  MemoryLedger& ledger) {
  const OffloadOptimizerConfig& c = settings_.states;
  // As DeepSpeed's Twin-Flow divides its groups.
  const i64 resident = static_cast<i64>((1 - c.ratio) * static_cast<double>(std::ssize(layout.chunks())));
  if (c.device == OffloadDevice::Cpu)
    return std::make_unique<HostChunks>(layout, resident, device, host, ledger, host_tag(), settings_.undoes);
  FileChunks::Options options{.dir = for_ == For::Prediction ? "" : c.nvme_path,
                              .io = io(),
                              .tag = host_tag(),
                              .windows = c.buffer_count,
                              .resident = resident,
                              .read_ahead = c.pipeline_read,
                              .write_behind = c.pipeline_write,
                              .checksums = settings_.aio.checksum};
  PerState<i64> bytes = layout.state_bytes();
  for (const Chunk& chunk : layout.chunks().first(static_cast<size_t>(options.resident))) {
    for (const State s : kStates) bytes[s] -= chunk.state_bytes[s];
  }
  for (const State s : kStates) count_in_file(s == State::Master ? Tag::Master : Tag::Optimizer, bytes[s]);
  auto made = std::make_unique<FileChunks>(layout, host, ledger, options);
  keep(made->file(), of_states_);
  return made;
}

Offload::MakeOnHost Offload::make_array(std::string dir, i64 beside) {
  return
      [this, dir = std::move(dir), beside](const HostPlace& host, MemoryLedger& ledger, Tag tag, i64 bytes, i64 most) {
        FileArray::Options options{.dir = for_ == For::Prediction ? "" : dir,
                                   .io = io(),
                                   .tag = host_tag(),
                                   .beside = beside,
                                   .read_ahead = settings_.states.pipeline_read,
                                   .write_behind = settings_.states.pipeline_write};
        count_in_file(tag, align_up(bytes, BlockFile::kPage));
        auto made = std::make_unique<FileArray>(host, ledger, bytes, most, options);
        keep(made->file(), of_arrays_);
        return made;
      };
}

namespace {

// An array of the host whose leases are copied from and to a GPU as they are, one at a time.
class CountedArray final : public zero::TierArray {
 public:
  CountedArray(std::unique_ptr<zero::TierArray> there, HostCopies& copies)
      : there_(std::move(there)), copies_(copies) {}
  bool in_place() const noexcept override { return there_->in_place(); }

 private:
  void* open(i64 begin, i64 bytes, zero::LeaseTo access) override {
    (access == zero::LeaseTo::Fill ? copies_.to_host : copies_.to_device) += bytes;
    lease_ = there_->lease(begin, bytes, access);
    return lease_.data();
  }
  void close(void*, i64, i64, zero::LeaseTo) noexcept override { lease_ = {}; }

  std::unique_ptr<zero::TierArray> there_;
  zero::TierLease lease_;
  HostCopies& copies_;
};

}  // namespace

std::unique_ptr<zero::TierArray> Offload::make_inputs(const OrderedUses& inputs, Device& device, MemoryLedger& ledger) {
  if (inputs.bytes == 0) return nullptr;
  if (settings_.inputs == OffloadDevice::Cpu)
    return std::make_unique<CountedArray>(
        std::make_unique<HostMemory>(device_buffer(host(device), ledger, host_tag(), inputs.bytes)), copies_);
  count_in_file(Tag::Activations, inputs.bytes);
  auto made =
      std::make_unique<OrderedFile>(host(device), ledger, inputs,
                                    OrderedFile::Options{.dir = for_ == For::Prediction ? "" : settings_.inputs_path,
                                                         .io = io(),
                                                         .tag = host_tag(),
                                                         .buffers = settings_.input_buffers,
                                                         .checksums = settings_.aio.checksum});
  keep(made->file(), of_arrays_);
  if (!is_apart()) return made;
  return std::make_unique<CountedArray>(std::move(made), copies_);
}

namespace {

FileCounts sum_of(const std::vector<const BlockFile*>& files) {
  FileCounts sum;
  for (const BlockFile* file : files) sum = sum + file->counts();
  return sum;
}

}  // namespace

// Transfers of delayed updates are known when these have ended.
FileCounts Offload::moved_states() const noexcept {
  FileCounts sum = delayed_.empty() ? sum_of(of_states_) + by_server_ : FileCounts{};
  for (const DelayedStates* states : delayed_) sum = sum + states->moved();
  return sum;
}
FileCounts Offload::moved() const noexcept {
  FileCounts all = moved_states() + sum_of(of_arrays_);
  all.busy_s = busy_.seconds();
  return all;
}

void Offload::begin_step() noexcept {
  begin_ = moved();
  copies_begin_ = copies_;
  if (delayed_.empty()) return;
  const FileCounts between = moved_states() - recorded_;
  begin_.read_bytes -= between.read_bytes;
  begin_.written_bytes -= between.written_bytes;
}

FileCounts Offload::of_step() noexcept {
  recorded_ = moved_states();
  return moved() - begin_;
}

const BlockFile* Offload::any_file() const noexcept {
  return !of_states_.empty() ? of_states_.front() : !of_arrays_.empty() ? of_arrays_.front() : nullptr;
}

std::string Offload::method() const {
  if (link_) return fmt::format("server '{}'", link_->name());
  const BlockFile* const file = any_file();
  return file == nullptr ? std::string() : file->method();
}

std::string Offload::caveat() const {
  const BlockFile* const file = any_file();
  if (file == nullptr || (file->refused_ring().empty() && file->is_direct())) return "";
  return fmt::format("offloading uses {}{}{}", file->method(),
                     file->refused_ring().empty() ? "" : fmt::format("; io_uring: {}", file->refused_ring()),
                     file->is_direct() ? "" : "; the file system has no direct transfers");
}

}  // namespace ds::offload
