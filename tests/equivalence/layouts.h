// SPDX-License-Identifier: Apache-2.0
#pragma once
// The cut of a run over ranks, as one value; the configuration that asks for it, and checks of its trace.

#include "config/parallel.h"
#include "equivalence/training.h"

namespace ds::testing {

using Kind = PipelineSchedule;
using Granularity = CheckpointGranularity;

struct Layout {
  int dp = 1, pp = 1, tp = 1, sp = 1;
  PipelineSchedule schedule = PipelineSchedule::OneFOneB;
  i64 chunks = 1;
  bool sequence = false;
  SequenceParallelMode mode = SequenceParallelMode::Ulysses;
  CheckpointGranularity checkpoints = CheckpointGranularity::None;
  i64 interval = 1;
  bool partition = false;
  i64 stage = 0;
  double memory_limit = 1;

  int ranks() const { return dp * pp * tp * sp; }
  std::string name() const {
    return fmt::format("dp{} pp{} tp{} sp{} {}x{}{}{}{} checkpoints {}/{}{} stage {}", dp, pp, tp, sp,
                       schedule_name(schedule), chunks, memory_limit < 1 ? fmt::format(" of {}", memory_limit) : "",
                       sequence ? " sequence" : "", mode == SequenceParallelMode::Ring ? " ring" : "",
                       static_cast<int>(checkpoints), interval, partition ? " cut" : "", stage);
  }
};

// The same samples per step, whatever the layout: 8 micro-batches of 2.
inline Config config_of(const ModelConfig& model, const Layout& l, i64 micro_batches = 8) {
  Config c = tiny_config(model, l.dp, micro_batches / l.dp, l.stage);
  c.data.seq_length = 16;
  c.reduce_order = ReduceOrder::Micro;
  c.pipeline = {.stages = l.pp,
                .schedule = l.schedule,
                .partition = "uniform",
                .virtual_stages = l.chunks,
                .memory_limit = l.memory_limit};
  c.tensor_parallel = {.tp_size = l.tp, .sequence_parallel = l.sequence};
  c.sequence_parallel.size = l.sp;
  c.sequence_parallel.mode = l.mode;
  c.activation_checkpointing.granularity = l.checkpoints;
  c.activation_checkpointing.interval = l.interval;
  c.activation_checkpointing.partition_activations = l.partition;
  return c;
}

using Traffic = std::map<std::string, CommCount>;

// Checks that a rank has sent in so many steps the bytes and calls of its plan.
inline void expect_planned_traffic(const Traffic& sent_all, const Traffic& plan, i64 steps, const std::string& what) {
  for (const auto& [name, planned] : plan) {
    const auto sent = sent_all.find(name);
    if (planned.calls == 0 && sent == sent_all.end()) continue;
    ASSERT_NE(sent, sent_all.end()) << what << ": " << name;
    EXPECT_EQ(sent->second.bytes, steps * planned.bytes) << what << ": " << name;
    EXPECT_EQ(sent->second.calls, steps * planned.calls) << what << ": " << name;
  }
}

// Checks that rank 0 has allocated the memory and sent the bytes of its plan.
inline void expect_planned(const Trace& t, i64 steps, const std::string& what) {
  for (size_t tag = 0; tag < t.counted.size(); ++tag)
    EXPECT_EQ(t.counted[tag], t.predicted[tag]) << what << ": " << tag_name(static_cast<Tag>(tag));
  expect_planned_traffic(t.sent, t.planned, steps, what);
}

// Relative to what they are compared with; the gradient's norm in the first step and, where small differences have
// grown, in all. late_loss: of the steps from kLate on, if it is not that of all.
struct Tolerance {
  static constexpr size_t kLate = 15;
  double loss = 1e-5, late_loss = 0, first_norm = 1e-5, norm = 1e-3;

  double loss_of(size_t step) const { return step >= kLate && late_loss > 0 ? late_loss : loss; }
};

inline void expect_close(const Trace& got, const Trace& want, const std::string& what,
                         const Tolerance& tolerance = {}) {
  ASSERT_EQ(got.losses.size(), want.losses.size());
  for (size_t s = 0; s < want.losses.size(); ++s) {
    EXPECT_NEAR(got.losses[s], want.losses[s], tolerance.loss_of(s) * want.losses[s]) << what << " step " << s;
    EXPECT_NEAR(got.norms[s], want.norms[s], tolerance.norm * want.norms[s]) << what << " step " << s;
  }
  EXPECT_NEAR(got.norms[0], want.norms[0], tolerance.first_norm * want.norms[0]) << what;
  EXPECT_EQ(got.skipped, want.skipped) << what;
}

}  // namespace ds::testing
