// SPDX-License-Identifier: Apache-2.0
#include "probe/host.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/variables.h"
#include "ds/log.h"
#include "ds/nearest.h"

namespace ds::probe {

const OpTable& cpu_backend() {
  const std::string given = variables::isa();
  const std::string_view isa = given.empty() ? "auto" : std::string_view(given);
  if (std::find(std::begin(kCpuIsas), std::end(kCpuIsas), isa) == std::end(kCpuIsas)) {
    const std::string_view meant = nearest(isa, kCpuIsas);
    throw Error(Errc::Config,
                fmt::format("DS_ISA: \"{}\" is not an instruction set{}; must be one of {}", isa,
                            meant.empty() ? "" : fmt::format("; did you mean {}?", meant), fmt::join(kCpuIsas, ", ")));
  }
  const OpTable* ops = cpu_ops(isa);
  DS_CHECK(ops != nullptr || isa == "auto", Errc::Unavailable, "DS_ISA: this CPU does not support {}", isa);
  DS_CHECK(ops != nullptr, Errc::Unavailable,
           "this CPU supports none of the instruction sets that libds needs (at least AVX2, FMA and F16C)");
  return *ops;
}

int num_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

int core_share(int allowed, int online, int local_world_size) noexcept {
  return std::max(1, allowed < online ? allowed : allowed / std::max(1, local_world_size));
}

int rank_threads(int local_world_size) {
  constexpr int kMost = 4096;
  if (const std::string text = variables::num_threads(); !text.empty()) {
    const std::string_view value(text);
    int threads = 0;
    const auto [end, error] = std::from_chars(value.begin(), value.end(), threads);
    const bool is_first = end == value.end() || *end == ',';  // OpenMP: one number per level of nesting
    if (error == std::errc() && is_first && threads >= 1 && threads <= kMost) return threads;
    static std::mutex mutex;
    static std::string told;
    const std::lock_guard lock(mutex);
    if (std::exchange(told, value) != value)
      log_message(LogLevel::Warning, fmt::format("OMP_NUM_THREADS: \"{}\" is not a number of threads; ignored", text));
  }
  return core_share(num_cores(), narrow<int>(::sysconf(_SC_NPROCESSORS_ONLN)), local_world_size);
}

namespace {

// Reads a number from a small file in /sys; empty for "max" or a missing file.
std::optional<i64> read_number(const std::string& path) {
  std::ifstream in(path);
  i64 value = 0;
  if (in >> value) return value;
  return std::nullopt;
}

i64 meminfo_available() {
  std::ifstream in("/proc/meminfo");
  std::string key, unit;
  i64 kib = 0;
  while (in >> key >> kib >> unit) {
    if (key == "MemAvailable:") return kib * 1024;
  }
  return std::numeric_limits<i64>::max();
}

// Rows of the product that measures a CPU, without a search, so that its memory can be predicted.
i64 cpu_rows(int threads) noexcept { return threads <= 4 ? 512 : threads <= 32 ? 1024 : 2048; }

// Matrix number i of consecutive n x n matrices.
TensorView matrix(void* memory, DType work, i64 n, i64 i) noexcept {
  return TensorView::of(static_cast<char*>(memory) + i * n * n * dtype_bytes(work), work, {n, n});
}

constexpr double kLongEnough = 10e-3;  // for all threads to have a core; seconds

// FLOP/s of an n^3 product, the best of several, and the seconds of one product.
std::pair<double, double> rate_of_product(Device& device, DType work, i64 n) {
  MemoryLedger ledger;
  const Buffer memory = device_buffer(device, ledger, Tag::Workspace, 3 * n * n * dtype_bytes(work));
  // Random signs and digits around 1 in any of the three types, since a GPU is faster on zeros.
  std::vector<u16> tile(1 << 16);
  for (size_t i = 0; i < tile.size(); ++i) tile[i] = static_cast<u16>(0x3F80u | (RngKey{}.bits(i) & 0x807Fu));
  for (i64 at = 0, step = narrow<i64>(tile.size() * 2); at < memory.bytes(); at += step)
    device.upload(static_cast<char*>(memory.data()) + at, tile.data(), std::min(step, memory.bytes() - at));
  const auto at = [&](i64 i) { return matrix(memory.data(), work, n, i); };
  double best_s = 1e30, all_s = 0;
  for (int run = 0; run < 4 || all_s < kLongEnough; ++run) {
    device.synchronize();
    const Clock::time_point start = Clock::now();
    device.ops().matmul(at(0), at(1), at(2), {}, {}, {}, {.trans_b = true}, device.stream());
    device.synchronize();
    const double s = seconds_since(start);
    all_s += s;
    if (run > 0) best_s = std::min(best_s, s);  // the first run allocates scratch
  }
  const double m = static_cast<double>(n);
  return {2 * m * m * m / best_s, best_s};
}

}  // namespace

AvailableMemory available_memory() {
  AvailableMemory best{meminfo_available(), "free memory"};
  const auto consider = [&](i64 bytes, const char* what) {
    if (bytes < best.bytes) best = {std::max<i64>(bytes, 0), what};
  };
  // cgroup v2: the line of our own group starts with "0::".
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (!line.starts_with("0::")) continue;
    for (std::string group = line.substr(3);; group.erase(group.rfind('/'))) {
      const std::string dir = "/sys/fs/cgroup" + group;
      const auto limit = read_number(dir + "/memory.max"), used = read_number(dir + "/memory.current");
      if (limit && used) consider(*limit - *used, "cgroup limit");
      if (group.find('/') == std::string::npos || group.empty()) break;
    }
  }
  rlimit address_space{};
  if (getrlimit(RLIMIT_AS, &address_space) == 0 && address_space.rlim_cur != RLIM_INFINITY) {
    consider(narrow<i64>(address_space.rlim_cur), "address space limit");
  }
  return best;
}

double matmul_rate(Device& device, DType work) {
  // Uses its own threads, so that the scratch of this product does not count as that of training.
  if (device.is_host()) {
    const int threads = device.stream().pool->num_threads();
    const auto own = make_cpu_device(device.ops(), threads);
    return rate_of_product(*own, work, cpu_rows(threads)).first;
  }
  for (i64 n = 128;; n *= 2) {
    const auto [rate, seconds] = rate_of_product(device, work, n);
    const bool fits = 3 * 4 * n * n * dtype_bytes(work) < device.memory().free / 2;  // room for a product twice as wide
    if (seconds > 1e-3 || n == 8192 || !fits) return rate;
  }
}

i64 matmul_rate_bytes(const OpTable& cpu, int threads, DType work) noexcept {
  // The code that oneDNN generates for a product, and its own pages that this touches (12 MiB with AMX).
  constexpr i64 kOneDnnBytes = i64{10} << 20;
  const bool by_onednn = work == DType::BF16 && (cpu.name == "cpu.amx" || cpu.name == "cpu.onednn");
  const i64 n = cpu_rows(threads);
  const i64 bytes = 3 * n * n * dtype_bytes(work) + (by_onednn ? kOneDnnBytes : 0);
  const OpTable* const ops = scratch_ops(cpu.name);
  if (ops == nullptr) return bytes;
  ScratchMeter meter{.threads = threads};
  Stream stream{.native = &meter};
  char here = 0;  // ops check whether views have data
  const auto at = [&](i64 i) {
    TensorView v = matrix(nullptr, work, n, i);
    v.data = &here;
    return v;
  };
  ops->matmul(at(0), at(1), at(2), {}, {}, {}, {.trans_b = true}, stream);
  return bytes + threads * meter.most;
}

}  // namespace ds::probe
