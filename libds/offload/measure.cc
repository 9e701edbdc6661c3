// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/clock.h"
#include "config/optimizer_table.h"
#include "ds/kernels/state_codes.h"
#include "ds/nearest.h"
#include "ds/offload.h"
#include "ds/units.h"
#include "offload/block_file.h"
#include "optim/optimizer.h"
#include "probe/host.h"

namespace ds::offload {
namespace {

template <class F>
double seconds_of(F&& f) {
  const Clock::time_point start = Clock::now();
  f();
  return seconds_since(start);
}

template <class F>
double median_seconds(int loops, F&& f) {
  std::vector<double> times;
  for (int i = 0; i < loops; ++i) times.push_back(seconds_of(f));
  std::ranges::nth_element(times, times.begin() + loops / 2);
  return times[static_cast<size_t>(loops / 2)];
}

// Goes through the file, tile by tile, with as many under way as there are windows.
void go_through(BlockFile& file, std::span<char> memory, i64 file_bytes, i64 tile, bool write) {
  const i64 windows = std::ssize(memory) / tile;
  std::vector<BlockFile::Ticket> under_way;
  i64 n = 0;
  for (i64 at = 0; at < file_bytes; at += tile, ++n) {
    if (n >= windows) file.wait(under_way[static_cast<size_t>(n - windows)]);
    char* const window = memory.data() + n % windows * tile;
    const i64 bytes = std::min(tile, file_bytes - at);
    under_way.push_back(write ? file.write(window, at, bytes) : file.read(window, at, bytes));
  }
  for (i64 i = std::max<i64>(0, n - windows); i < n; ++i) file.wait(under_way[static_cast<size_t>(i)]);
}

}  // namespace

void validate(const FileOptions& o) {
  constexpr i64 kPage = BlockFile::kPage;
  DS_CHECK(o.tile_bytes >= kPage && o.bytes >= o.tile_bytes, Errc::Config,
           "--size {}: the file must be at least as large as a tile, {}", bytes_text(o.bytes),
           bytes_text(o.tile_bytes));
  for (const i64 block : o.block_bytes)
    DS_CHECK(block > 0 && block % kPage == 0 && block <= (i64{1} << 30), Errc::Config,
             "blocks of {} bytes: they must be multiples of {} and at most 1 GiB", block, kPage);
  for (const int depth : o.depths) {
    const bool threads = std::ranges::find(o.methods, "threads") != o.methods.end();
    DS_CHECK(depth > 0 && depth <= (threads ? 256 : 4096), Errc::Config,
             "a depth of {}: it may be at most 4096, or 256 threads", depth);
  }
  for (const std::string& method : o.methods)
    DS_CHECK(method == "io_uring" || method == "threads", Errc::Config, "'{}' is neither io_uring nor threads", method);
}

std::vector<FileRow> measure_files(const FileOptions& o, const std::function<void(const FileRow&)>& on_row) {
  validate(o);
  constexpr i64 kPage = BlockFile::kPage, kWindows = 4;
  const i64 tile = o.tile_bytes / kPage * kPage, bytes = o.bytes / kPage * kPage;
  std::vector<char> space(static_cast<size_t>(kWindows * tile + kPage));
  char* const base = reinterpret_cast<char*>(align_up(reinterpret_cast<i64>(space.data()), kPage));
  const std::span<char> memory(base, static_cast<size_t>(kWindows * tile));
  u64 random = 1;  // what disks cannot make smaller
  for (size_t i = 0; i + sizeof random <= memory.size(); i += sizeof random) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    std::memcpy(&memory[i], &random, sizeof random);
  }
  std::vector<FileRow> rows;
  for (const std::string& method : o.methods) {
    for (const i64 block : o.block_bytes) {
      for (const int depth : o.depths) {
        const bool ring = method == "io_uring";
        BlockFile file(o.dir, bytes, memory,
                       {.block_bytes = block, .depth = depth, .threads = depth, .io_uring = ring});
        if (ring && !file.method().starts_with("io_uring")) continue;
        FileRow row{.way = {method, block, depth}, .direct = file.method().ends_with("direct")};
        go_through(file, memory, bytes, tile, true);  // all of it is there
        const double n = static_cast<double>(bytes) / 1e9;
        row.write_gbps = n / median_seconds(o.loops, [&] { go_through(file, memory, bytes, tile, true); });
        row.read_gbps = n / median_seconds(o.loops, [&] { go_through(file, memory, bytes, tile, false); });
        rows.push_back(row);
        if (on_row) on_row(row);
      }
    }
  }
  DS_CHECK(!rows.empty(), Errc::Unavailable, "this kernel refuses io_uring; --method threads works everywhere");
  return rows;
}

const FileRow& best_of(const std::vector<FileRow>& rows) {
  return *std::ranges::max_element(rows, {}, [](const FileRow& r) { return r.both_gbps(); });
}

namespace {

// One parameter, all of it here.
class OneParameter final : public optim::GroupStates {
 public:
  OneParameter(Device& device, const optim::ParamGroup& group, i64 n) : device_(device) {
    const auto take = [&](DType dtype) {
      const i64 bytes = n * dtype_bytes(dtype);
      Buffer& b =
          memory_.emplace_back(ledger_, Tag::Workspace, bytes + (is_coded(dtype) ? state_blocks(n) * 4 : 0) + 64);
      TensorView v = TensorView::of(b.data(), dtype, {n});
      if (is_coded(dtype)) v.scale = reinterpret_cast<float*>(b.as<char>().data() + align_up(bytes, 64));
      bytes_ += static_cast<double>(dtype_bytes(dtype)) + (is_coded(dtype) ? 4.0 / kStateBlock : 0);
      return v;
    };
    tensor_.master = take(DType::F32);
    size_t i = 0;
    for (const State s : kOptimizerStates) {
      if (group.states()[s]) tensor_.states[i++] = take(group.state_dtype(s, n));
    }
    bytes_ *= 2;  // read and written
    tensor_.grad = take(DType::F32);
    tensor_.param = take(DType::BF16);
    tensor_.weight_decay = 0.1f;
    float* const grad = static_cast<float*>(tensor_.grad.data);
    for (i64 k = 0; k < n; ++k) grad[k] = static_cast<float>(k % 1000 - 500) * 1e-5f;
  }
  void update(const UpdateSpec& spec) override {
    UpdateTensor t = tensor_;
    if (facts_of(spec.params.rule).num_states == 0) t.states[0] = t.states[1] = {};
    t.factor = spec.factors;
    if (!spec.decay) t.weight_decay = 0;
    device_.ops().update({&t, 1}, &verdict_, spec.params, device_.stream());
  }
  void for_each_counted(FunctionRef<void(i64, TensorView, TensorView)> visit) override {
    visit(0, tensor_.master, tensor_.grad);
  }
  // Bytes read and written for each element in an update: masters, states, the gradient, the rounded parameter.
  double bytes() const noexcept { return bytes_; }

 private:
  Device& device_;
  MemoryLedger ledger_;
  std::vector<Buffer> memory_;
  UpdateTensor tensor_;
  GradVerdict verdict_;
  double bytes_ = 0;
};

// a += b: what memory carries of three streams, none of which is read to be overwritten.
double memory_gbps(Device& device, i64 n, int loops) {
  MemoryLedger ledger;
  const Buffer memory(ledger, Tag::Workspace, 2 * n * 4);
  const TensorView a = TensorView::of(memory.data(), DType::F32, {n}),
                   b = TensorView::of(memory.as<float>().data() + n, DType::F32, {n});
  const double s = median_seconds(loops, [&] { device.ops().fold(a, {&b, 1}, true, device.stream()); });
  return 12.0 * static_cast<double>(n) / s / 1e9;
}

UpdateConfig config_of(const std::string& name) {
  std::vector<std::string_view> names;
  for (const OptimizerRow& row : kOptimizers) {
    if (row.needs_matrices || row.averages_by_signs) continue;
    names.push_back(row.name);
    if (row.name != name) continue;
    UpdateConfig c;
    c.type = row.defaults.type;
    if (optimizer_takes(c.type, "momentum")) c.momentum = 0.9;
    return c;
  }
  throw Error(Errc::Config,
              fmt::format("optimizer '{}' cannot be measured; choose one of {}", name, fmt::join(names, ", ")));
}

}  // namespace

void validate(const UpdateOptions& o) {
  for (const std::string& name : o.optimizers) config_of(name);
}

UpdateResult measure_updates(const UpdateOptions& o, const std::function<void(const UpdateRow&)>& on_row) {
  std::vector<optim::ParamGroup> groups;
  for (const std::string& name : o.optimizers) groups.push_back({.update = config_of(name)});
  const OpTable& ops = probe::cpu_backend();
  UpdateResult result{.kernels = std::string(ops.name), .threads = o.threads > 0 ? o.threads : probe::num_cores()};
  const auto device = make_cpu_device(ops, result.threads);
  result.memory_gbps = memory_gbps(*device, o.params, o.loops);
  for (size_t i = 0; i < groups.size(); ++i) {
    OneParameter parameter(*device, groups[i], o.params);
    const optim::GroupSize size{.num_params = 1, .largest = {}};
    MemoryLedger ledger;
    const Buffer workspace(ledger, Tag::Workspace, std::max<i64>(optim::workspace_bytes(groups[i], size), 8));
    const auto optimizer = optim::make_optimizer(groups[i], size, workspace.data());
    i64 step = 0;
    const auto copy_bytes = [](void* to, const void* from, i64 n) { std::memcpy(to, from, static_cast<size_t>(n)); };
    const auto update = [&] {
      optimizer->update({.ops = ops,
                         .stream = device->stream(),
                         .lr = 1e-4,
                         .step = ++step,
                         .seed = 1,
                         .reduce = [](TensorView, ReduceOp) {},
                         .zero = [](TensorView x) { std::memset(x.data, 0, static_cast<size_t>(x.bytes())); },
                         .download = copy_bytes,
                         .upload = copy_bytes,
                         .states = parameter,
                         .matrices = nullptr});
    };
    update();
    const double s = median_seconds(o.loops, update), n = static_cast<double>(o.params);
    UpdateRow row{.optimizer = o.optimizers[i], .params_per_s = n / s, .bytes_per_param = parameter.bytes()};
    row.gbps = row.params_per_s * row.bytes_per_param / 1e9;
    result.rows.push_back(row);
    if (on_row) on_row(row);
  }
  return result;
}

}  // namespace ds::offload
