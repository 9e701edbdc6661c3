// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a run tells of one step.

#include <map>
#include <optional>
#include <string>

#include "ds/kernels/dtype.h"

namespace ds {

// Between a rank and the files of what it offloads, or a server; and between a GPU and its host.
struct OffloadTraffic {
  i64 read_bytes = 0, written_bytes = 0;
  std::optional<i64> to_host_bytes{}, to_device_bytes{};
  double wait_ms = 0;  // of the rank for them
  double busy_ms = 0;  // in which some of it was under way; 0: not known
  // The share that was hidden behind the rank's work; nothing: not known.
  std::optional<double> hidden() const noexcept {
    if (busy_ms <= 0) return std::nullopt;
    return wait_ms < busy_ms ? 1 - wait_ms / busy_ms : 0.0;
  }
};

// Of rank 0 in one step, by the host's clock, which waits for the device at each border.
struct PhaseTimes {
  double forward_ms = 0;   // with what is read and received for it
  double backward_ms = 0;  // with reductions that run beside it
  double reduce_ms = 0;    // what is left of the reductions
  double update_ms = 0;    // verdict, optimizers, publication
};

// One line of metrics.jsonl and of the progress display.
struct StepRecord {
  i64 step = 0;
  double loss = 0, grad_norm = 0, lr = 0, loss_scale = 1;
  bool skipped = false;
  i64 tokens = 0;   // of this step, all ranks
  i64 samples = 0;  // of the run, with this step
  double step_ms = 0;
  double tokens_per_s = 0;  // all ranks
  double mfu = 0;           // model FLOP/s of one rank over the rate of a large matrix product measured at the start
  std::map<std::string, i64> memory_bytes{};  // rank 0, by tag
  std::map<std::string, i64> comm_bytes{};    // sent by rank 0 in this step
  std::map<std::string, i64> comm_calls{};    // likewise
  std::map<std::string, double> comm_ms{};    // under way, where times are asked for and known
  std::optional<PhaseTimes> phases{};         // where they are asked for
  std::optional<i64> seq_length{};            // tokens of a sample, where it grows
  std::optional<i64> layer_tokens{};          // of them, those that layers see which drop some (random-LTD)
  // Euclidean norms over all parameters of what compression has lost and adds to the next step, in updates that
  // compress. By signs: "worker_error", a root mean square over ranks, "server_error" of the means, and "momentum"
  // beside them. By codes of gradients (LoCo): "gradient_error", and "gradient_error_across" of the second hop, root
  // mean squares over ranks.
  std::map<std::string, double> compression{};
  std::optional<double> outer_grad_norm{};  // where workers of diloco met: of the mean of what their steps did
  std::optional<OffloadTraffic> offload{};  // of rank 0, where it has files
};

// What its fields are called there, and in what ds-train --json prints.
namespace step_field {
inline constexpr const char *kStep = "step", *kLoss = "loss", *kGradNorm = "grad_norm", *kLr = "lr",
                            *kLossScale = "loss_scale", *kSkipped = "skipped", *kTokens = "tokens",
                            *kSeqLength = "seq_length", *kLayerTokens = "layer_tokens", *kTokensPerS = "tokens_per_s",
                            *kStepMs = "step_ms", *kMfu = "mfu", *kMemoryBytes = "memory_bytes",
                            *kCommBytes = "comm_bytes", *kOffload = "offload", *kPhaseMs = "phase_ms",
                            *kCompression = "compression", *kOuterGradNorm = "outer_grad_norm",
                            *kRecovered = "recovered";  // true: of a step whose line was lost; without times and memory
}  // namespace step_field

}  // namespace ds
