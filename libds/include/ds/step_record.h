// SPDX-License-Identifier: Apache-2.0
#pragma once
// The record of one training step.

#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "ds/error.h"
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

// The tokens of a step that each expert of a layer was chosen for, on all ranks. Only tokens with a target count.
struct ExpertTokens {
  std::string layer;
  std::vector<i64> tokens;  // by expert
  i64 dropped = 0;          // choices that exceeded the capacity of their expert
  // Mean over tokens of the entropy of the router's probabilities, in nats; each is rounded to 1/4096 first, so that
  // the sum is the same in every layout.
  double entropy = 0;
};

struct StepRecord {
  i64 step = 0;     // from 1
  double loss = 0;  // mean over micro-batches and ranks of a worker; loss_norm "token": over valid tokens
  std::optional<double> aux_loss{};  // mean over micro-batches of the losses that layers add to it; none: no layer does
  double grad_norm = 0;              // global, unscaled, before clipping; infinite or NaN if skipped
  double lr = 0;                     // of this step's update
  double loss_scale = 1;             // used by this step
  bool skipped = false;              // gradients were not finite, and nothing was changed
  i64 tokens = 0;                    // of this step, all ranks
  i64 samples = 0;                   // of the run, including this step
  double step_ms = 0;
  double tokens_per_s = 0;  // all ranks
  double mfu = 0;           // model FLOP/s of one rank over the rate of a large matrix product measured at the start
  std::map<std::string, i64> memory_bytes{};  // peak of rank 0, by tag
  std::map<std::string, i64> comm_bytes{};    // sent by rank 0 in this step, by "axis.collective"
  std::map<std::string, i64> comm_calls{};    // likewise; with comms_logger
  std::map<std::string, double> comm_ms{};    // in flight, with comms_logger, where times are known
  std::optional<PhaseTimes> phases{};         // with wall_clock_breakdown or flops_profiler
  std::optional<i64> seq_length{};            // tokens of a sample, with curriculum_learning
  std::optional<i64> layer_tokens{};          // of these, the tokens that layers of random_ltd process
  // Euclidean norms over all parameters of the errors that compression adds to the next step, in updates that compress.
  // 1-bit optimizers: "worker_error", a root mean square over ranks, "server_error" of the means, and "momentum" beside
  // them. LoCo: "gradient_error", and "gradient_error_across" of the second hop, root mean squares over ranks.
  std::map<std::string, double> compression{};
  std::optional<double> outer_grad_norm{};  // where workers of diloco met: of the mean of what their steps did
  std::optional<OffloadTraffic> offload{};  // of rank 0, if it offloads
  std::vector<ExpertTokens> experts{};      // of a model with experts, by layer
  // Rounds beyond one in which rank 0's layers of experts went, since more rows came than there is memory for.
  i64 expert_rounds = 0;
};

// Names of fields in metrics.jsonl and in the output of ds-train --json.
namespace step_field {
inline constexpr const char *kStep = "step", *kLoss = "loss", *kAuxLoss = "aux_loss", *kGradNorm = "grad_norm",
                            *kLr = "lr", *kLossScale = "loss_scale", *kSkipped = "skipped", *kTokens = "tokens",
                            *kSeqLength = "seq_length", *kLayerTokens = "layer_tokens", *kTokensPerS = "tokens_per_s",
                            *kStepMs = "step_ms", *kMfu = "mfu", *kMemoryBytes = "memory_bytes",
                            *kCommBytes = "comm_bytes", *kOffload = "offload", *kPhaseMs = "phase_ms",
                            *kCompression = "compression", *kOuterGradNorm = "outer_grad_norm", *kExperts = "experts",
                            *kExpertTokens = "expert_tokens",
                            *kRecovered = "recovered";  // true for a step whose line was lost; without times and memory
}  // namespace step_field

// A row of the table of fields: metrics.jsonl, ds-train --json, the curves of TensorBoard and CSV files, and Prometheus
// all print a step by looping over it.
struct StepField {
  using Number = std::variant<i64, double>;
  using Named = std::vector<std::pair<std::string, Number>>;  // memory by tag, messages by operation, ...
  // monostate: this step has no such field.
  using Value = std::variant<std::monostate, bool, i64, double, Named>;

  const char* name = nullptr;  // step_field; null: not in metrics.jsonl
  Value (*value)(const StepRecord&) = nullptr;
  bool progress = false;        // ds-train --json prints it
  bool served = false;          // a server of states keeps it, for a step whose line was lost
  const char* curve = nullptr;  // tag of a curve over steps; of Named, the prefix of its tags; null: none
  // Prometheus: the metric without "ds_train_", its help text, and the label of Named; null: none.
  const char *metric = nullptr, *help = nullptr, *label = nullptr;
};
// In the order in which metrics.jsonl has them.
DS_API std::span<const StepField> step_fields() noexcept;

}  // namespace ds
