// SPDX-License-Identifier: Apache-2.0
#pragma once
// Every legal schedule of up to 8 stages, 32 micro-batches and 4 chunks.

#include <gtest/gtest.h>

#include "pipeline/schedule.h"

namespace ds::testing {

template <class F>
void for_every_schedule(F f) {
  using pipeline::ScheduleKind;
  for (const ScheduleKind kind :
       {ScheduleKind::Naive, ScheduleKind::GPipe, ScheduleKind::OneFOneB, ScheduleKind::Interleaved,
        ScheduleKind::ZeroBubbleH1, ScheduleKind::BreadthFirst, ScheduleKind::ZeroBubbleV}) {
    for (int p = 1; p <= 8; ++p) {
      for (i64 m = 1; m <= 32; ++m) {
        for (int v = 1; v <= 4; ++v) {
          for (const double limit : {1.0, 0.9, 0.8, 0.7, 0.5}) {
            const pipeline::ScheduleOptions options{kind, p, 0, m, v, 0, limit};
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

}  // namespace ds::testing
