// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <limits>
#include <string>

#include "ds/step_record.h"

namespace ds {
namespace {

using Value = StepField::Value;
using Named = StepField::Named;

template <auto member>
Value plain(const StepRecord& r) {
  return r.*member;
}

template <auto member>
Value optional(const StepRecord& r) {
  return r.*member ? Value(*(r.*member)) : Value();
}

template <auto member>
Value named(const StepRecord& r) {
  Named all;
  for (const auto& [name, number] : r.*member) all.emplace_back(name, number);
  return all;
}

Value step_seconds(const StepRecord& r) { return r.step_ms / 1e3; }

Value compression(const StepRecord& r) { return r.compression.empty() ? Value() : named<&StepRecord::compression>(r); }

Value phases(const StepRecord& r) {
  if (!r.phases) return {};
  return Named{{"forward", r.phases->forward_ms},
               {"backward", r.phases->backward_ms},
               {"reduce", r.phases->reduce_ms},
               {"step", r.phases->update_ms}};
}

Value offload(const StepRecord& r) {
  if (!r.offload) return {};
  Named all{{"read_bytes", r.offload->read_bytes},
            {"written_bytes", r.offload->written_bytes},
            {"wait_ms", r.offload->wait_ms}};
  if (const std::optional<double> hidden = r.offload->hidden()) all.emplace_back("hidden", *hidden);
  if (r.offload->to_host_bytes) all.emplace_back("to_host_bytes", *r.offload->to_host_bytes);
  if (r.offload->to_device_bytes) all.emplace_back("to_device_bytes", *r.offload->to_device_bytes);
  return all;
}

// The loads of experts, as multiples of the mean of their layer, and how many got no token; of all choices, the share
// that was dropped; and the mean entropy of the routers' probabilities.
Value experts(const StepRecord& r) {
  if (r.experts.empty()) return {};
  double most = 0, least = std::numeric_limits<double>::infinity();
  i64 unused = 0, choices = 0, dropped = 0;
  double entropy = 0;
  for (const ExpertTokens& layer : r.experts) {
    i64 sum = 0;
    for (const i64 n : layer.tokens) sum += n;
    const double mean = static_cast<double>(std::max<i64>(sum, 1)) / static_cast<double>(layer.tokens.size());
    for (const i64 n : layer.tokens) {
      most = std::max(most, static_cast<double>(n) / mean);
      least = std::min(least, static_cast<double>(n) / mean);
      unused += n == 0 ? 1 : 0;
    }
    choices += sum;
    dropped += layer.dropped;
    entropy += layer.entropy;
  }
  return Named{{"largest_load", most},
               {"smallest_load", least},
               {"unused", unused},
               {"dropped", static_cast<double>(dropped) / static_cast<double>(std::max<i64>(choices, 1))},
               {"entropy", entropy / static_cast<double>(r.experts.size())},
               {"extra_rounds", r.expert_rounds}};
}

Value expert_tokens(const StepRecord& r) {
  if (r.experts.empty()) return {};
  Named all;
  for (const ExpertTokens& layer : r.experts) {
    for (size_t e = 0; e < layer.tokens.size(); ++e)
      all.emplace_back(std::string(layer.layer).append(".").append(std::to_string(e)), layer.tokens[e]);
  }
  return all;
}

using R = StepRecord;
constexpr std::array kFields = {
    StepField{.name = step_field::kStep,
              .value = plain<&R::step>,
              .progress = true,
              .served = true,
              .metric = "steps_total",
              .help = "Steps of the run, skipped ones included."},
    StepField{.value = plain<&R::samples>, .metric = "samples_total", .help = "Samples that the run has seen."},
    StepField{.name = step_field::kLoss,
              .value = plain<&R::loss>,
              .progress = true,
              .served = true,
              .curve = "train/loss",
              .metric = "loss",
              .help = "Training loss of the last step."},
    StepField{.name = step_field::kAuxLoss,
              .value = optional<&R::aux_loss>,
              .progress = true,
              .curve = "train/aux_loss",
              .metric = "aux_loss",
              .help = "Losses that layers added in the last step."},
    StepField{.name = step_field::kGradNorm,
              .value = plain<&R::grad_norm>,
              .progress = true,
              .served = true,
              .curve = "train/grad_norm",
              .metric = "grad_norm",
              .help = "Norm of the gradient before clipping."},
    StepField{.name = step_field::kLr,
              .value = plain<&R::lr>,
              .progress = true,
              .served = true,
              .metric = "learning_rate",
              .help = "Learning rate of the last step."},
    StepField{.name = step_field::kLossScale,
              .value = plain<&R::loss_scale>,
              .progress = true,
              .served = true,
              .metric = "loss_scale",
              .help = "Loss scale of the last step."},
    StepField{.name = step_field::kSkipped, .value = plain<&R::skipped>, .progress = true, .served = true},
    StepField{.name = step_field::kTokens, .value = plain<&R::tokens>, .served = true},
    StepField{.name = step_field::kTokensPerS,
              .value = plain<&R::tokens_per_s>,
              .progress = true,
              .curve = "train/tokens_per_s",
              .metric = "tokens_per_second",
              .help = "Tokens of all ranks per second in the last step."},
    StepField{.name = step_field::kStepMs, .value = plain<&R::step_ms>, .progress = true},
    StepField{.value = step_seconds, .metric = "step_seconds", .help = "Duration of the last step."},
    StepField{.name = step_field::kMfu,
              .value = plain<&R::mfu>,
              .progress = true,
              .curve = "train/mfu",
              .metric = "mfu_ratio",
              .help = "Model FLOP/s over the measured rate of a matrix product."},
    StepField{.name = step_field::kMemoryBytes,
              .value = named<&R::memory_bytes>,
              .curve = "memory/",
              .metric = "memory_bytes",
              .help = "Peak memory of rank 0 by tag.",
              .label = "tag"},
    StepField{.name = step_field::kCommBytes,
              .value = named<&R::comm_bytes>,
              .curve = "comm/",
              .metric = "comm_bytes",
              .help = "Bytes that rank 0 sent in the last step.",
              .label = "operation"},
    StepField{.name = step_field::kSeqLength, .value = optional<&R::seq_length>},
    StepField{.name = step_field::kLayerTokens, .value = optional<&R::layer_tokens>},
    StepField{.name = step_field::kPhaseMs, .value = phases},
    StepField{.name = step_field::kCompression,
              .value = compression,
              .curve = "compression/",
              .metric = "compression_norm",
              .help = "Norms of what compression has lost, after the last step.",
              .label = "of"},
    StepField{.name = step_field::kOuterGradNorm,
              .value = optional<&R::outer_grad_norm>,
              .curve = "train/outer_grad_norm",
              .metric = "outer_grad_norm",
              .help = "Norm of what the steps of workers have made of parameters."},
    StepField{.name = step_field::kOffload, .value = offload},
    StepField{.name = step_field::kExperts,
              .value = experts,
              .curve = "experts/",
              .metric = "experts",
              .help = "Loads of experts in the last step, of the mean of their layer, and experts without tokens.",
              .label = "of"},
    StepField{.name = step_field::kExpertTokens, .value = expert_tokens},
};

}  // namespace

std::span<const StepField> step_fields() noexcept { return kFields; }

}  // namespace ds
