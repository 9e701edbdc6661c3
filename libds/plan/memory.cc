// SPDX-License-Identifier: Apache-2.0
#include "plan/memory.h"

#include <algorithm>

namespace ds::plan {

void count_memory(RunPlan& plan, CountedUpdate& update, bool saves_beside) {
  MemoryCount& memory = plan.memory;
  const ActivationPlan& activations = plan.activations;
  const auto tag = [&](Tag t) -> i64& { return memory.by_tag[static_cast<size_t>(t)]; };
  const RankLocalBytes local = update.rank_local_bytes();
  memory.by_tag = bytes_of(update.ledger());
  memory.files = bytes_of(update.files());
  memory.dp_shared = update.dp_allocations();
  memory.zeropp_shared = update.zeropp_allocations();
  memory.outer_shared = update.outer_allocations();
  if (activations.pass.partial.rank > 0)
    memory.tp_shared = {activations.pass.partial.bytes(), activations.pass.gathered.bytes()};

  i64 saved = 0, part = 0;
  for (const zero::ShardsPlan& s : plan.shards) {
    const i64 width = dtype_bytes(s.grads.work);
    if (!plan.steps_apart()) {
      saved += s.states.owned_bytes() + s.padded / s.layout.num_ranks() * width;
    } else if (s.rank == 0) {  // all that it has, and the others nothing
      for (const State state : kStates) saved += s.states.bytes(state);
      saved += s.padded * width;
    }
    const i64 held = s.layout.states().shard_optimizer ? s.padded / s.layout.num_ranks() : s.padded,
              elems = std::min(s.layout.shard_elems(), zero::StateStore::kLeaseElems);
    i64 bytes = std::min(held, zero::StateStore::kLeaseElems) * width;
    for (const State state : kStates) {
      if (state != State::Param && plan.trains() && s.states.bytes(state) > 0)
        bytes += align_up(elems * 4, 32) + state_blocks(elems) * 4;
    }
    part = std::max(part, bytes);
  }
  // The stage adds temporaries, what is computed again and gradients between layers, messages of the pipeline, the fp32
  // gradient of the output projection, and sums over the tensor-parallel group.
  tag(Tag::Activations) = activations.kept.count * activations.kept_bytes;
  tag(Tag::Logits) = activations.pass.bytes(Tag::Logits);
  tag(Tag::Workspace) += activations.temporary_bytes + activations.working_bytes +
                         activations.stream_slots * align_up(activations.message_bytes, ActivationPlan::kMessageAlign) +
                         activations.pass.bytes(Tag::Workspace);
  // Tokens and the like, and the numbers of the step.
  tag(Tag::Data) = align_up(activations.pass.bytes(Tag::Data), 8) + update::StepResults::bytes(plan.loss_counts());
  if (plan.validates_later())
    tag(Tag::Data) += update::StepResults::bytes(plan.loss_counts()) + update::StepResults::bytes({.ranks = 0});

  // A save in the background takes a copy of what this rank saves. Beside a GPU, loading a checkpoint, and a save that
  // the run waits for, go through a buffer of host memory.
  if (saves_beside && plan.trains()) memory.state_bytes = std::max(saved, local.instead) + local.beside;
  if (plan.device == DeviceKind::Cuda) memory.state_part_bytes = part + local.sum();
  tag(Tag::Host) += memory.state_bytes + memory.state_part_bytes;
}

}  // namespace ds::plan
