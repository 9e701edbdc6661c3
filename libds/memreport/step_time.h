// SPDX-License-Identifier: Apache-2.0
#pragma once
// The time of a training step: what each stage computes (plan/op_tally.h) at a machine's rates, what it sends by the
// alpha-beta models of links, put in order by the schedule's simulation. Sums and maxima of named terms; no factor that
// makes them fit.
//
//   pipeline    pipeline::simulate with each block's time: ops, and messages of tp and sp, which are waited for
//   exposed     of dp's gathers and reductions, what is not hidden behind the passes they go on beside
//   files       of what is offloaded to a disk, what is not hidden behind the optimizer (states) and the passes
//               (gradients and parameters)
//   optimizer   sums of what stands on several ranks, the norm, AdamW, copies for an update that may be undone, the
//               publication of parameters
//   cores       where the ranks of a node have more threads than it has cores: no less than all that they compute, over
//               the cores, and what they send; they fill the bubbles of each other
//
// Post-validated steps are simulated one after the other (pipeline::simulate_steps), and the time is that from one to
// the next. Steps that are undone are not expected.
//
// Two activities in n equal portions, one of which waits for the other's, take max(a + b/n, a/n + b): so much of
// communication is hidden, where something else than the cores that compute carries it (Machine::hides_communication);
// else it takes their time. It is the bound for portions of one size and even spacing.

#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "comm/message_tag.h"
#include "ds/commbench.h"
#include "ds/memreport.h"
#include "memreport/machine.h"
#include "plan/op_tally.h"

namespace ds::memreport {

// A document of schema "ds-links/1".
struct Links {
  std::vector<commbench::AlphaBeta> operations;
  std::vector<commbench::Link> links;
  int ranks = 1;  // that took part, on so many hosts
  int hosts = 1;
};
// Throws Errc::Config, naming `name`, if `json` is no such document.
Links read_links(std::string_view json, std::string_view name);

// A group of ranks that communicate.
struct AxisGroup {
  int ranks = 1;
  bool over_network = false;  // its ranks are on several nodes
};
// The place of an axis' groups: ranks of a node have consecutive numbers (mesh/mesh.h).
AxisGroup group_of(const MeshShape& mesh, Axis axis, int ranks_per_node);
AxisGroup group_of(const MeshShape& mesh, const DpSplit& split, int ranks_per_node);

// Calls of a collective of that group, which send so many bytes from each rank. By the model
// that was measured over such ranks, else by latency and bandwidth of the class of links, with the steps of a ring.
// Throws Errc::Config if the document has neither.
double message_seconds(const Links& links, Collective collective, const AxisGroup& group, const CommCount& count);

// The plan and the work of the ranks of a pipeline stage; both outlive the call. Stages that do the same may share
// them.
struct StageWork {
  const plan::RunPlan* plan;
  const plan::StepWork* work;
};

// `stages`: one for each stage of the pipeline, in order, and so their schedules. `links`: may be null where no axis
// has more than one rank. Throws Errc::Config for links or rates that are not known.
StepTime predict_step(const model::Model& model, std::span<const StageWork> stages,
                      std::span<const std::vector<pipeline::Instr>> schedules, const Machine& machine,
                      const Links* links);

// Lower bounds of the time of a step, without a simulation.
struct LeastTime {
  StepTime own;      // with these stages, if none were ever idle
  StepTime any_cut;  // with any cut of these layers: if each had an equal part of all work, and hid what can be hidden
};
LeastTime least_step(const model::Model& model, std::span<const StageWork> stages, const Machine& machine,
                     const Links* links);

}  // namespace ds::memreport
