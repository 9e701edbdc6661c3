// SPDX-License-Identifier: Apache-2.0
// Picks the CPU backend at run time.

#include <algorithm>
#include <array>
#include <cstdlib>

#include "cpu/scratch.h"

namespace ds {
namespace cpu {
namespace avx2 {
const OpTable& table() noexcept;
void set_scratch_ops(OpTable& ops) noexcept;
}  // namespace avx2
namespace avx512 {
const OpTable& table() noexcept;
void set_scratch_ops(OpTable& ops) noexcept;
}  // namespace avx512
namespace avx512_bf16 {
const OpTable& table() noexcept;
void set_scratch_ops(OpTable& ops) noexcept;
}  // namespace avx512_bf16
namespace onednn {
OpTable table(std::string_view name) noexcept;
void set_scratch_ops(OpTable& ops) noexcept;
}  // namespace onednn

namespace {

bool has_avx2() noexcept {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() noexcept {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
// Every CPU with the first has the second.
bool has_avx512_bf16() noexcept {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}
bool has_amx() noexcept {
  return has_avx512_bf16() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16");
}

}  // namespace
}  // namespace cpu

const OpTable* cpu_ops(std::string_view isa) noexcept {
  if (isa == "auto") {
    const char* chosen = std::getenv("DS_ISA");
    if (chosen != nullptr && *chosen != '\0' && std::string_view(chosen) != "auto") return cpu_ops(chosen);
    // VDPBF16PS has twice the rate of fp32 products on AMD's cores, and half of it on Intel's.
    const bool fast_pairs = __builtin_cpu_is("amd");
    for (const char* candidate : {"amx", fast_pairs ? "avx512_bf16" : "avx512", "avx512", "avx2"}) {
      if (const OpTable* t = cpu_ops(candidate)) return t;
    }
    return nullptr;
  }
  if (isa == "avx2" && cpu::has_avx2()) return &cpu::avx2::table();
  if (isa == "avx512" && cpu::has_avx512()) return &cpu::avx512::table();
  if (isa == "avx512_bf16" && cpu::has_avx512_bf16()) return &cpu::avx512_bf16::table();
  if (isa == "amx" && cpu::has_amx()) {
    static const OpTable ops = cpu::onednn::table("cpu.amx");
    return &ops;
  }
  if (isa == "onednn" && cpu::has_avx512()) {  // the engine of "amx" on CPUs without AMX: for tests
    static const OpTable ops = cpu::onednn::table("cpu.onednn");
    return &ops;
  }
  return nullptr;
}

namespace cpu {

void note_scratch(Stream& stream, std::size_t bytes) noexcept {
  constexpr i64 kUnit = ThreadPool::kScratchUnit;
  i64& most = static_cast<ScratchMeter*>(stream.native)->most;
  most = std::max(most, (static_cast<i64>(bytes) + kUnit - 1) / kUnit * kUnit);
}

int metered_threads(const Stream& stream) noexcept { return static_cast<ScratchMeter*>(stream.native)->threads; }

namespace {

struct ScratchOps {
  std::string_view isa;
  OpTable ops;
  ScratchOps(std::string_view name, void (*set)(OpTable&) noexcept) noexcept : isa(name), ops(no_ops()) {
    ops.name = "scratch";
    set(ops);
  }
};

}  // namespace
}  // namespace cpu

const OpTable* scratch_ops(std::string_view backend) noexcept {
  if (backend == ref_ops().name) return &no_ops();
  static const std::array<cpu::ScratchOps, 5> all = {{{"avx2", cpu::avx2::set_scratch_ops},
                                                      {"avx512", cpu::avx512::set_scratch_ops},
                                                      {"avx512_bf16", cpu::avx512_bf16::set_scratch_ops},
                                                      {"amx", cpu::onednn::set_scratch_ops},
                                                      {"onednn", cpu::onednn::set_scratch_ops}}};
  for (const cpu::ScratchOps& s : all) {
    const OpTable* const there = cpu_ops(s.isa);
    if (there != nullptr && there->name == backend) return &s.ops;
  }
  return nullptr;
}

}  // namespace ds
