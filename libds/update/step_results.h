// SPDX-License-Identifier: Apache-2.0
#pragma once
// The numbers of a step that the host reads. They lie side by side on the device and are copied to the host in one
// download, the only time in a step that the host waits.

#include <span>
#include <vector>

#include "device/device.h"
#include "ds/integers.h"
#include "zero/state_store.h"

namespace ds::update {

// Each is 8-byte aligned.
struct StepScalars {
  i64 max_abs = 0;
  ExactSum sum;
  GradVerdict verdict;
};

// Numbers of losses in a step.
struct LossCounts {
  i64 ranks = 1, micro_batches = 1;
  i64 layers = 0;   // that add a loss of their own
  i64 experts = 0;  // of all layers, whose tokens are counted
  constexpr i64 heads() const noexcept { return ranks * micro_batches; }
  constexpr i64 aux() const noexcept { return ranks * micro_batches * layers; }
};

class StepResults final : public zero::VerdictHandle {
 public:
  // Losses fp64, of the head [ranks, micro_batches] and of layers [ranks, micro_batches, layers]: each rank fills its
  // row, then they are gathered. Counts fp32 [experts], which are added up over ranks.
  StepResults(Device& device, MemoryLedger& ledger, const LossCounts& counts)
      : device_(device),
        counts_(counts),
        host_(static_cast<size_t>(bytes(counts))),
        memory_(device_buffer(device, ledger, Tag::Data, std::ssize(host_))) {}

  static constexpr i64 bytes(const LossCounts& counts) noexcept {
    return static_cast<i64>(sizeof(StepScalars)) + (counts.heads() + counts.aux()) * static_cast<i64>(sizeof(double)) +
           align_up(counts.experts * static_cast<i64>(sizeof(float)), 8);
  }

  // Before a step: all numbers are zero.
  void begin() {
    device_.zero(memory_.data(), memory_.bytes());
    resolved_ = false;
  }
  // On the device.
  StepScalars& scalars() const noexcept { return *static_cast<StepScalars*>(memory_.data()); }
  double* losses() const noexcept { return reinterpret_cast<double*>(&scalars() + 1); }
  double* aux_losses() const noexcept { return losses() + counts_.heads(); }
  // Before passes run again whose tokens were counted.
  void forget_expert_tokens() {
    if (counts_.experts > 0) device_.zero(expert_tokens(), counts_.experts * static_cast<i64>(sizeof(float)));
  }
  float* expert_tokens() const noexcept { return reinterpret_cast<float*>(aux_losses() + counts_.aux()); }
  const GradVerdict* on_device() const noexcept override { return &scalars().verdict; }

  // On the host. All numbers are final by the first call.
  const GradVerdict& resolve() override {
    if (!resolved_) device_.download(host_.data(), memory_.data(), memory_.bytes());
    resolved_ = true;
    return reinterpret_cast<const StepScalars*>(host_.data())->verdict;
  }
  std::span<const double> resolved_losses() const noexcept {
    return {resolved(), static_cast<size_t>(counts_.heads())};
  }
  std::span<const double> resolved_aux_losses() const noexcept {
    return {resolved() + counts_.heads(), static_cast<size_t>(counts_.aux())};
  }
  std::span<const float> resolved_expert_tokens() const noexcept {
    return {reinterpret_cast<const float*>(resolved() + counts_.heads() + counts_.aux()),
            static_cast<size_t>(counts_.experts)};
  }

 private:
  const double* resolved() const noexcept {
    return reinterpret_cast<const double*>(host_.data() + sizeof(StepScalars));
  }

  Device& device_;
  LossCounts counts_;
  std::vector<std::byte> host_;
  Buffer memory_;
  bool resolved_ = false;
};

}  // namespace ds::update
