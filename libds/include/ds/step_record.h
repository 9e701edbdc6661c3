// SPDX-License-Identifier: Apache-2.0
#pragma once
// The record of one training step.

#include <map>
#include <optional>
#include <string>

#include "ds/kernels/dtype.h"

namespace ds {

// Traffic between a rank and its offload files or server, and between a GPU and its host.
struct OffloadTraffic {
  i64 read_bytes = 0, written_bytes = 0;
  std::optional<i64> to_host_bytes{}, to_device_bytes{};
  double wait_ms = 0;  // time that the rank waited for it
  double busy_ms = 0;  // time in which some of it was in flight; 0: unknown
  // The share of busy_ms that overlapped with the rank's work; empty: unknown.
  std::optional<double> hidden() const noexcept {
    if (busy_ms <= 0) return std::nullopt;
    return wait_ms < busy_ms ? 1 - wait_ms / busy_ms : 0.0;
  }
};

// Times of rank 0 in one step, by the host's clock. The host waits for the device between phases.
struct PhaseTimes {
  double forward_ms = 0;   // including its data loading and receives
  double backward_ms = 0;  // including overlapped reductions
  double reduce_ms = 0;    // the remaining reductions
  double update_ms = 0;    // verdict, optimizers, publication
};

// One line of metrics.jsonl and of the progress display.
struct StepRecord {
  i64 step = 0;
  double loss = 0, grad_norm = 0, lr = 0, loss_scale = 1;
  bool skipped = false;
  i64 tokens = 0;   // of this step, over all ranks
  i64 samples = 0;  // of the run up to and including this step
  double step_ms = 0;
  double tokens_per_s = 0;  // over all ranks
  double mfu = 0;  // model FLOP/s of one rank divided by the rate of a large matrix product, measured at the start
  std::map<std::string, i64> memory_bytes{};  // rank 0, by tag
  std::map<std::string, i64> comm_bytes{};    // sent by rank 0 in this step
  std::map<std::string, i64> comm_calls{};    // likewise
  std::map<std::string, double> comm_ms{};    // in flight; where times are requested and available
  std::optional<PhaseTimes> phases{};         // where they are requested
  std::optional<i64> seq_length{};            // tokens per sample, where sequence lengths grow
  std::optional<i64> layer_tokens{};          // tokens per sample in the layers that drop some (random-LTD)
  // Euclidean norms over all parameters of the compression error that is added to the next step, for updates that
  // compress. Sign compression: "worker_error" (root mean square over ranks), "server_error" (error of the means) and,
  // for comparison, "momentum". Gradient codes (LoCo): "gradient_error", and "gradient_error_across" for the second hop
  // (root mean squares over ranks).
  std::map<std::string, double> compression{};
  std::optional<double> outer_grad_norm{};  // where DiLoCo workers met: of their mean outer gradient
  std::optional<OffloadTraffic> offload{};  // of rank 0, where it offloads to files or a server
};

// Names of the fields in metrics.jsonl and in the output of ds-train --json.
namespace step_field {
inline constexpr const char *kStep = "step", *kLoss = "loss", *kGradNorm = "grad_norm", *kLr = "lr",
                            *kLossScale = "loss_scale", *kSkipped = "skipped", *kTokens = "tokens",
                            *kSeqLength = "seq_length", *kLayerTokens = "layer_tokens", *kTokensPerS = "tokens_per_s",
                            *kStepMs = "step_ms", *kMfu = "mfu", *kMemoryBytes = "memory_bytes",
                            *kCommBytes = "comm_bytes", *kOffload = "offload", *kPhaseMs = "phase_ms",
                            *kCompression = "compression", *kOuterGradNorm = "outer_grad_norm",
                            *kRecovered = "recovered";  // true for a step whose line was lost; without times and memory
}  // namespace step_field

}  // namespace ds
