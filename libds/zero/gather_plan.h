// SPDX-License-Identifier: Apache-2.0
#pragma once
// When stage 3 gathers and releases parameters: a pure function of the access trace and DeepSpeed's knobs, made once at
// set-up. DeepSpeed records its trace at run time and must discard it when it changes; here the trace is static.

#include <span>
#include <vector>

#include "base/check.h"

namespace ds::zero {

struct GatherKnobs {
  i64 prefetch_bucket = 50'000'000;        // stage3_prefetch_bucket_size: elements gathered ahead of use
  i64 max_live = 1'000'000'000;            // stage3_max_live_parameters: no prefetch, and no keeping, beyond this
  i64 max_reuse_distance = 1'000'000'000;  // stage3_max_reuse_distance: kept if used again within so many elements
  bool keep_next = false;                  // units of the next access are kept, whatever these limits
};

// One step of the trace: the units that are used together, each named once.
using Access = std::vector<i64>;

struct GatherStep {
  struct Launch {
    i64 unit;
    i64 offset;  // where in the pool, elements
  };
  std::vector<Launch> launch;  // start these gathers before computing: first those needed now, then those ahead
  std::vector<i64> release;    // drop these after computing
};

struct GatherPlan {
  std::vector<Access> accesses;
  std::vector<GatherStep> steps;  // one per access
  i64 pool_elems = 0;             // memory for all gathered units at any time
  i64 gathered_elems = 0;         // sum over all launches: the traffic, before (P-1)/P
  i64 peak_live_elems = 0;
  // For a stream: the accesses that the pass before has gathered when a pass begins. The first pass begins with them.
  std::vector<GatherStep::Launch> carried = {};
};

// unit_elems[u]: elements to gather for unit u (padded; 0 if no part of it is sharded). Nothing is kept after the last
// access. Takes O(n log n) time for a trace of n uses.
GatherPlan plan_gathers(std::vector<Access> accesses, std::span<const i64> unit_elems, const GatherKnobs& knobs);

// Weights that are streamed, as ZeRO-Inference does (Aminabadi et al., "DeepSpeed-Inference", 2022): while an access
// computes, the units of the `ahead` next ones that gather anything are gathered, and nothing else is kept. Passes
// follow each other: if `repeats`, the end of one gathers the beginning of the next (GatherPlan::carried), unless no
// such plan is found.
GatherPlan plan_stream(std::vector<Access> accesses, std::span<const i64> unit_elems, size_t ahead, bool repeats);

}  // namespace ds::zero
