// SPDX-License-Identifier: Apache-2.0
#pragma once
// Every legal schedule of up to 8 stages, 32 micro-batches and 4 chunks.

#include <gtest/gtest.h>

#include "pipeline/schedule.h"

namespace ds::testing {

template <class F>
void for_every_schedule(F f) {
  using pipeline::ScheduleKind;
  for (const ScheduleKind kind : {ScheduleKind::Naive, ScheduleKind::GPipe, ScheduleKind::OneFOneB,
                                  ScheduleKind::Interleaved, ScheduleKind::ZeroBubbleH1, ScheduleKind::BreadthFirst,
                                  ScheduleKind::ZeroBubbleV, ScheduleKind::ZeroBubbleH2}) {
    for (int p = 1; p <= 8; ++p) {
      for (i64 m = 1; m <= 32; ++m) {
        for (int v = 1; v <= 4; ++v) {
          for (const double limit : {1.0, 0.9, 0.8, 0.7, 0.5}) {
            const bool post_validate = kind == ScheduleKind::ZeroBubbleH2;
            const pipeline::ScheduleOptions options{kind, p, 0, m, v, 0, false, limit, post_validate};
            if (!why_not(options).empty() || (limit < 1 && kind != ScheduleKind::ZeroBubbleV)) continue;
            SCOPED_TRACE(fmt::format("{} p={} m={} v={} limit={}", schedule_name(kind), p, m, v, limit));
            f(options);
            if (::testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// The same with post-validated steps, of fewer micro-batches.
template <class F>
void for_every_post_validated(F f) {
  for_every_schedule([&](pipeline::ScheduleOptions options) {
    options.post_validate = true;
    if (options.micro_batches <= 20 && options.memory_limit != 0.9) f(options);
  });
}

}  // namespace ds::testing
