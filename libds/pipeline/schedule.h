// SPDX-License-Identifier: Apache-2.0
#pragma once
// A schedule is data: the instructions of one step of one stage, executed by engine/train_step.cc and by nothing else.
// Data parallelism alone is the schedule of one stage.

#include <vector>

#include "base/check.h"

namespace ds::pipeline {

enum class Op : u8 { Load, Forward, Backward };

struct Instr {
  Op op;
  i64 micro;
  friend bool operator==(const Instr&, const Instr&) = default;
};

// One stage, m micro-batches: Load, Forward, Backward of each in turn.
inline std::vector<Instr> single_stage_schedule(i64 micro_batches) {
  std::vector<Instr> schedule;
  for (i64 m = 0; m < micro_batches; ++m) {
    for (const Op op : {Op::Load, Op::Forward, Op::Backward}) schedule.push_back({op, m});
  }
  return schedule;
}

}  // namespace ds::pipeline
