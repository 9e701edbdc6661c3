// SPDX-License-Identifier: Apache-2.0
#pragma once
// The numbers of a step that the host reads. They lie side by side on the device and are copied to the host in one
// download, the only time in a step that the host waits.

#include <vector>

#include "device/device.h"
#include "zero/state_store.h"

namespace ds::update {

// Each is 8-byte aligned.
struct StepScalars {
  i64 max_abs = 0;
  ExactSum sum;
  GradVerdict verdict;
};

class StepResults final : public zero::VerdictHandle {
 public:
  // Losses [ranks, micro_batches] fp64: each rank fills its row, then they are gathered.
  StepResults(Device& device, MemoryLedger& ledger, i64 micro_batches, i64 ranks)
      : device_(device),
        host_(static_cast<size_t>(bytes(micro_batches, ranks))),
        memory_(device_buffer(device, ledger, Tag::Data, std::ssize(host_))) {}

  static constexpr i64 bytes(i64 micro_batches, i64 ranks) noexcept {
    return static_cast<i64>(sizeof(StepScalars)) + micro_batches * ranks * static_cast<i64>(sizeof(double));
  }

  // Before a step: all numbers are zero.
  void begin() {
    device_.zero(memory_.data(), memory_.bytes());
    resolved_ = false;
  }
  // On the device.
  StepScalars& scalars() const noexcept { return *static_cast<StepScalars*>(memory_.data()); }
  double* losses() const noexcept { return reinterpret_cast<double*>(&scalars() + 1); }
  const GradVerdict* on_device() const noexcept override { return &scalars().verdict; }

  // On the host. All numbers are final by the first call.
  const GradVerdict& resolve() override {
    if (!resolved_) device_.download(host_.data(), memory_.data(), memory_.bytes());
    resolved_ = true;
    return reinterpret_cast<const StepScalars*>(host_.data())->verdict;
  }
  std::span<const double> resolved_losses() const noexcept {
    return {reinterpret_cast<const double*>(host_.data() + sizeof(StepScalars)),
            (host_.size() - sizeof(StepScalars)) / sizeof(double)};
  }

 private:
  Device& device_;
  std::vector<std::byte> host_;
  Buffer memory_;
  bool resolved_ = false;
};

}  // namespace ds::update
