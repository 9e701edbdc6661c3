// SPDX-License-Identifier: Apache-2.0
#include "pipeline/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "unit/every_schedule.h"

namespace ds::pipeline {
namespace schedule_test {

using testing::for_every_post_validated;
using testing::for_every_schedule;
using ::testing::HasSubstr;

bool computes(Op op) {
  return op == Op::Forward || op == Op::Backward || op == Op::BackwardInput || op == Op::BackwardWeight;
}

// F0 B0 b0 W0, with the chunk as a letter if there are several.
std::string compute_text(const std::vector<Instr>& schedule, bool chunks = false) {
  std::string text;
  for (const Instr& i : schedule) {
    if (!computes(i.op)) continue;
    const char letter = i.op == Op::Forward ? 'F' : i.op == Op::Backward ? 'B' : i.op == Op::BackwardInput ? 'b' : 'W';
    text += fmt::format("{}{}{}{}", text.empty() ? "" : " ", letter, i.micro,
                        chunks ? std::string(1, static_cast<char>('a' + i.chunk)) : "");
  }
  return text;
}

std::string full_text(const std::vector<Instr>& schedule) {
  std::string text;
  for (const Instr& i : schedule) text += fmt::format("{}{} ", op_name(i.op), i.micro);
  return text;
}

std::vector<Instr> schedule(ScheduleKind kind, int stages, int stage, i64 micro_batches, int chunks = 1) {
  return make_schedule({kind, stages, stage, micro_batches, chunks});
}

// The first block loads tokens, and the last one targets, unless they are there already.
bool loads(const ScheduleOptions& o, i64 block) {
  const i64 last = i64{o.stages} * o.chunks - 1;
  return block == 0 || (block == last && o.placement().stage_of(0) != o.placement().stage_of(last));
}

TEST(Schedule, OneStageIsLoadForwardBackwardInTurn) {
  for (const ScheduleKind kind : {ScheduleKind::Naive, ScheduleKind::OneFOneB}) {
    EXPECT_EQ(full_text(schedule(kind, 1, 0, 2)), "Load0 Forward0 Backward0 Load1 Forward1 Backward1 ");
  }
}

TEST(Schedule, ComputesInTheOrderOfThePapers) {
  using enum ScheduleKind;
  EXPECT_EQ(compute_text(schedule(Naive, 4, 1, 3)), "F0 B0 F1 B1 F2 B2");
  EXPECT_EQ(compute_text(schedule(GPipe, 4, 1, 3)), "F0 F1 F2 B0 B1 B2");
  EXPECT_EQ(compute_text(schedule(OneFOneB, 4, 0, 6)), "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5");
  EXPECT_EQ(compute_text(schedule(OneFOneB, 4, 2, 6)), "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5");
  EXPECT_EQ(compute_text(schedule(OneFOneB, 4, 3, 6)), "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5");
  EXPECT_EQ(compute_text(schedule(OneFOneB, 4, 0, 2)), "F0 F1 B0 B1");
  EXPECT_EQ(compute_text(schedule(ZeroBubbleH1, 4, 0, 6)), "F0 F1 F2 F3 b0 W0 F4 b1 W1 F5 b2 W2 b3 W3 b4 W4 b5 W5");
  EXPECT_EQ(compute_text(schedule(ZeroBubbleH1, 4, 2, 6)), "F0 F1 b0 F2 b1 F3 b2 W0 F4 b3 W1 F5 b4 W2 b5 W3 W4 W5");
  const auto h2 = [](int stage) {
    return compute_text(make_schedule({ZeroBubbleH2, 3, stage, 6, 1, 0, false, 1, true}));
  };
  EXPECT_EQ(h2(0), "F0 F1 F2 F3 F4 b0 W0 F5 b1 W1 b2 W2 b3 W3 b4 W4 b5 W5");
  EXPECT_EQ(h2(1), "F0 F1 F2 b0 F3 b1 F4 b2 W0 F5 b3 W1 b4 W2 b5 W3 W4 W5");
  EXPECT_EQ(h2(2), "F0 b0 F1 b1 F2 b2 F3 b3 F4 b4 W0 F5 b5 W1 W2 W3 W4 W5");
  EXPECT_EQ(compute_text(schedule(ZeroBubbleH1, 4, 3, 6)), "F0 b0 F1 b1 F2 b2 F3 b3 W0 F4 b4 W1 F5 b5 W2 W3 W4 W5");
  EXPECT_EQ(compute_text(schedule(Interleaved, 2, 0, 4, 2), true),
            "F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a");
  EXPECT_EQ(compute_text(schedule(Interleaved, 2, 1, 4, 2), true),
            "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a");
  // Written out by hand for the first period; weight gradients fill what is left.
  EXPECT_EQ(compute_text(make_schedule({ZeroBubbleV, 4, 3, 4, 2, 0, false, 0.5}), true).substr(0, 47),
            "F0a F0b F1a F1b b0b b0a W0b W0a F2a F2b b1b b1a");
  EXPECT_EQ(compute_text(make_schedule({ZeroBubbleV, 2, 0, 2, 2}), true),
            "F0a F1a F0b b0b F1b b1b W0b b0a W1b W0a b1a W1a");
  EXPECT_EQ(compute_text(schedule(BreadthFirst, 1, 0, 2, 3), true), "F0a F1a F0b F1b F0c F1c B0c B1c B0b B1b B0a B1a");
}

// DeepSpeed's TrainSchedule: tick by tick, forward and backward on alternate parities.
TEST(Schedule, OneFOneBIsDeepSpeedsTickGenerator) {
  for (int p = 1; p <= 8; ++p) {
    for (i64 m = 1; m <= 19; ++m) {
      for (int i = 0; i < p; ++i) {
        std::string ticks;
        for (i64 tick = 0; tick < 2 * (m + p - 1); ++tick) {
          const bool forward = tick % 2 == i % 2;
          const i64 micro = forward         ? tick / 2 - i / 2
                            : tick % 2 == 0 ? tick / 2 - p + (i + 1) / 2
                                            : (tick - 1) / 2 - p + 1 + i / 2;
          if (micro < 0 || micro >= m) continue;
          ticks += fmt::format("{}{}{}", ticks.empty() ? "" : " ", forward ? 'F' : 'B', micro);
        }
        ASSERT_EQ(compute_text(schedule(ScheduleKind::OneFOneB, p, i, m)), ticks) << p << " " << i << " " << m;
      }
    }
  }
}

TEST(Schedule, TransfersAndLoadsStandAroundTheirPasses) {
  EXPECT_EQ(full_text(schedule(ScheduleKind::OneFOneB, 3, 0, 1)),
            "Load0 Forward0 SendActivation0 RecvGrad0 Backward0 ");
  EXPECT_EQ(full_text(schedule(ScheduleKind::OneFOneB, 3, 1, 1)),
            "RecvActivation0 Forward0 SendActivation0 RecvGrad0 Backward0 SendGrad0 ");
  EXPECT_EQ(full_text(schedule(ScheduleKind::OneFOneB, 3, 2, 1)),
            "Load0 RecvActivation0 Forward0 Backward0 SendGrad0 ");
  EXPECT_EQ(full_text(schedule(ScheduleKind::ZeroBubbleH1, 2, 1, 1)),
            "Load0 RecvActivation0 Forward0 BackwardInput0 SendGrad0 BackwardWeight0 ");
  EXPECT_EQ(full_text(make_eval_schedule({2}, 0, 2, 1)),
            "Load0 Forward0 SendActivation0 Load1 Forward1 SendActivation1 ");
  EXPECT_EQ(full_text(make_eval_schedule({2}, 1, 1, 2)),
            "RecvActivation0 Forward0 SendActivation0 Load0 RecvActivation0 Forward0 ");
  EXPECT_EQ(compute_text(make_eval_schedule({2}, 0, 3, 2), true), "F0a F1a F0b F1b F2a F2b");  // a group of one
  EXPECT_EQ(full_text(make_eval_schedule({1}, 0, 2, 2)), "Load0 Forward0 Forward0 Load1 Forward1 Forward1 ");
  EXPECT_EQ(full_text(schedule(ScheduleKind::ZeroBubbleV, 2, 0, 1, 2)),
            "Load0 Forward0 SendActivation0 RecvActivation0 Forward0 BackwardInput0 SendGrad0 BackwardWeight0 "
            "RecvGrad0 BackwardInput0 BackwardWeight0 ");
  EXPECT_EQ(full_text(schedule(ScheduleKind::ZeroBubbleV, 2, 1, 1, 2)),
            "RecvActivation0 Forward0 Forward0 SendActivation0 RecvGrad0 BackwardInput0 BackwardInput0 SendGrad0 "
            "BackwardWeight0 BackwardWeight0 ");
  EXPECT_EQ(full_text(make_eval_schedule({2, true}, 1, 2, 2)),
            "RecvActivation0 Forward0 Forward0 SendActivation0 RecvActivation1 Forward1 Forward1 SendActivation1 ");
  EXPECT_EQ(compute_text(make_eval_schedule({2, true}, 0, 3, 2), true), "F0a F1a F0b F2a F1b F2b");
  EXPECT_EQ(full_text(schedule(ScheduleKind::BreadthFirst, 1, 0, 1, 2)),
            "Load0 Forward0 Forward0 Backward0 Backward0 ");
}

// Each chunk of each stage sees each micro-batch once per pass, gradients in ascending order, receives and sends where
// there is a neighbour.
TEST(Schedule, IsComplete) {
  for_every_schedule([](ScheduleOptions o) {
    const i64 last = i64{o.stages} * o.chunks - 1;
    const auto stays = [&](i64 block) { return o.placement().stays(block); };
    for (o.stage = 0; o.stage < o.stages; ++o.stage) {
      std::map<std::pair<i64, Op>, i64> next;  // (chunk, op) -> micro-batch
      for (const Instr& i : make_schedule(o)) {
        ASSERT_EQ(i.micro, (next[{i.chunk, i.op}]++)) << op_name(i.op);
        const auto done = [&](Op op) { return next[{i.chunk, op}] > i.micro; };
        const i64 block = o.placement().block_of(o.stage, i.chunk);
        if (i.op == Op::Forward) {
          ASSERT_EQ(done(Op::Load), loads(o, block));
          ASSERT_EQ(done(Op::RecvActivation), block > 0 && !stays(block - 1));
        }
        if (i.op == Op::Backward || i.op == Op::BackwardInput) {
          ASSERT_TRUE(done(Op::Forward));
          ASSERT_EQ(done(Op::RecvGrad), block < last && !stays(block));
        }
        ASSERT_TRUE(i.op != Op::BackwardWeight || done(Op::BackwardInput));
        ASSERT_TRUE(i.op != Op::SendActivation || done(Op::Forward));
        ASSERT_TRUE(i.op != Op::SendGrad || done(Op::Backward) || done(Op::BackwardInput));
      }
      const bool split = splits_backward(o.kind);
      for (i64 c = 0; c < o.chunks; ++c) {
        const i64 block = o.placement().block_of(o.stage, c), m = o.micro_batches;
        ASSERT_EQ((next[{c, Op::Load}]), loads(o, block) ? m : 0);
        ASSERT_EQ((next[{c, Op::Forward}]), m);
        ASSERT_EQ((next[{c, Op::Backward}]), split ? 0 : m);
        ASSERT_EQ((next[{c, Op::BackwardInput}]), split ? m : 0);
        ASSERT_EQ((next[{c, Op::BackwardWeight}]), split ? m : 0);
        ASSERT_EQ((next[{c, Op::SendActivation}]), block < last && !stays(block) ? m : 0);
        ASSERT_EQ((next[{c, Op::SendGrad}]), block > 0 && !stays(block - 1) ? m : 0);
      }
    }
  });
}

// A way from one stage to the next has messages in the order in which they are received, in a V of both kinds.
TEST(Schedule, MessagesOfAWayAreReceivedInTheOrderOfTheirSends) {
  for_every_schedule([](const ScheduleOptions& o) {
    const std::vector<std::vector<Instr>> schedules = make_schedules(o);
    const Placement placement = o.placement();
    std::map<std::tuple<int, int, Way>, std::vector<std::tuple<bool, i64, i64>>> sent,
        received;  // activation, micro, block
    for (int stage = 0; stage < o.stages; ++stage) {
      ScheduleOptions own = o;
      own.stage = stage;
      ASSERT_EQ(make_schedule(own), schedules[stage]);
      for (const Instr& i : schedules[stage]) {
        const bool activation = i.op == Op::SendActivation || i.op == Op::RecvActivation;
        const i64 block = placement.block_of(stage, i.chunk);
        const int peer = placement.peer_of(stage, i.op, i.chunk);
        const Way way = placement.way_of(i.op, i.chunk);
        if (i.op == Op::SendActivation || i.op == Op::SendGrad) {
          const i64 to = block + (activation ? 1 : -1);
          ASSERT_EQ(placement.stage_of(to), peer);
          sent[{stage, peer, way}].emplace_back(activation, i.micro, to);
        } else if (i.op == Op::RecvActivation || i.op == Op::RecvGrad) {
          received[{peer, stage, way}].emplace_back(activation, i.micro, block);
        }
      }
    }
    ASSERT_EQ(sent, received);
  });
}

// A gradient between two chunks of a stage has a slot from the pass that makes it to the last one that reads it.
TEST(Schedule, GradientsBetweenChunksOfAStageAreRings) {
  for (int p = 2; p <= 8; ++p) {
    for (const i64 m : {1, 2, 7, 24}) {
      const std::vector<Instr> instrs = make_schedule({ScheduleKind::ZeroBubbleV, p, p - 1, m, 2});
      const i64 slots = gradient_slots_before(instrs, 1);
      std::set<i64> taken;
      size_t most = 1;
      for (const Instr& i : instrs) {
        if (i.op == Op::BackwardInput && i.chunk == 1) {
          ASSERT_TRUE(taken.insert(i.micro % slots).second) << p << " " << m;
          most = std::max(most, taken.size());
        }
        if (i.chunk == 0 && (i.op == Op::BackwardInput || i.op == Op::BackwardWeight)) {
          ASSERT_TRUE(taken.contains(i.micro % slots));
          if (i.op == Op::BackwardWeight) taken.erase(i.micro % slots);
        }
      }
      ASSERT_EQ(slots, static_cast<i64>(most));
    }
  }
}

// Slot k % size of a stash is free when micro-batch k comes, and no smaller stash would do.
TEST(Schedule, StashesAreRings) {
  for_every_schedule([](ScheduleOptions o) {
    for (o.stage = 0; o.stage < o.stages; ++o.stage) {
      const std::vector<Instr> instrs = make_schedule(o);
      for (i64 c = 0; c < o.chunks; ++c) {
        const StashSizes sizes = stash_sizes(instrs, c);
        std::set<i64> activations, grads;
        size_t most_activations = 0, most_grads = 0;
        for (const Instr& i : instrs) {
          if (i.chunk != c) continue;
          if (i.op == Op::RecvActivation || i.op == Op::Load || i.op == Op::Forward) {
            activations.insert(i.micro);
            const auto slot = [&](i64 micro) { return micro % sizes.forward; };
            for (const i64 other : activations) ASSERT_TRUE(other == i.micro || slot(other) != slot(i.micro));
          }
          if (i.op == Op::BackwardInput) {
            grads.insert(i.micro);
            for (const i64 other : grads) {
              ASSERT_TRUE(other == i.micro || other % sizes.backward != i.micro % sizes.backward);
            }
          }
          most_activations = std::max(most_activations, activations.size());
          most_grads = std::max(most_grads, grads.size());
          if (i.op == Op::Backward || i.op == Op::BackwardWeight) {
            ASSERT_EQ(*activations.begin(), i.micro) << "first in, first out";
            activations.erase(i.micro);
            grads.erase(i.micro);
          }
        }
        ASSERT_EQ(sizes.forward, static_cast<i64>(most_activations));
        ASSERT_EQ(sizes.backward, std::max<i64>(1, static_cast<i64>(most_grads)));
      }
    }
  });
}

// No two micro-batches are in one slot at a time, and there are as many slots as the schedule has under way at once.
TEST(Schedule, ChunksShareTheSlotsOfTheirActivations) {
  for_every_schedule([](ScheduleOptions o) {
    for (o.stage = 0; o.stage < o.stages; ++o.stage) {
      const std::vector<Instr> instrs = make_schedule(o);
      const KeptSlots slots = kept_slots(instrs, o.chunks, o.micro_batches);
      std::set<i64> taken;
      i64 most = 0;
      for (const Instr& i : instrs) {
        const i64 slot = slots.of[i.chunk][i.micro];
        if (i.op == Op::Forward) {
          ASSERT_TRUE(taken.insert(slot).second);
          most = std::max(most, std::ssize(taken));
        } else if (i.op == Op::Backward || i.op == Op::BackwardWeight) {
          ASSERT_EQ(taken.erase(slot), 1u);
        }
      }
      ASSERT_TRUE(taken.empty());
      ASSERT_EQ(slots.count, most);
      if (o.chunks == 1) {
        ASSERT_EQ(slots.count, stash_sizes(instrs, 0).forward);
      }
    }
  });
}

// Blocks before the one in which the backward pass ends have no backward pass, and get no gradients. The output of one
// stays until it has been sent, or read in place.
TEST(Schedule, BlocksBeforeTheEndOfTheBackwardPassOnlyRunForward) {
  for_every_schedule([](ScheduleOptions o) {
    if (o.micro_batches % 5 != 1 && o.micro_batches % 8 != 0) return;
    for (o.backward_end = 0; o.backward_end < i64{o.stages} * o.chunks; ++o.backward_end) {
      const auto stays = [&](i64 block) { return o.placement().stays(block); };
      for (o.stage = 0; o.stage < o.stages; ++o.stage) {
        const std::vector<Instr> instrs = make_schedule(o);
        std::map<std::pair<i64, Op>, i64> times;
        for (const Instr& i : instrs) ++times[{i.chunk, i.op}];
        for (i64 c = 0; c < o.chunks; ++c) {
          const i64 block = o.placement().block_of(o.stage, c), m = o.micro_batches,
                    last = i64{o.stages} * o.chunks - 1;
          ASSERT_EQ((times[{c, Op::Forward}]), m);
          ASSERT_EQ((times[{c, Op::Backward}] + times[{c, Op::BackwardInput}]), block >= o.backward_end ? m : 0);
          ASSERT_EQ((times[{c, Op::BackwardWeight}]), (times[{c, Op::BackwardInput}]));
          ASSERT_EQ((times[{c, Op::SendGrad}]), block > o.backward_end && !stays(block - 1) ? m : 0);
          ASSERT_EQ((times[{c, Op::RecvGrad}]), block >= o.backward_end && block < last && !stays(block) ? m : 0);
        }
        const KeptSlots slots = kept_slots(instrs, o.chunks, o.micro_batches);
        std::map<i64, std::pair<i64, i64>> taken;  // slot -> chunk, micro-batch
        i64 most = 0;
        const auto gives_back = [&](i64 chunk, i64 micro) { return taken.erase(slots.of[chunk][micro]) == 1; };
        for (const Instr& i : instrs) {
          const bool backward = o.placement().block_of(o.stage, i.chunk) >= o.backward_end;
          if (i.op == Op::Forward) {
            ASSERT_TRUE(taken.try_emplace(slots.of[i.chunk][i.micro], i.chunk, i.micro).second);
            most = std::max(most, std::ssize(taken));
          }
          const bool ends = i.op == (backward ? Op::Backward : Op::SendActivation) || i.op == Op::BackwardWeight;
          if (ends) {
            ASSERT_TRUE(gives_back(i.chunk, i.micro));
          }
          // Read in place by the next chunk, of which it may be the input of its first layer's backward pass.
          const bool reads = i.chunk > 0 && stays(o.placement().block_of(o.stage, i.chunk - 1)) &&
                             o.placement().block_of(o.stage, i.chunk - 1) < o.backward_end &&
                             (backward ? i.op == Op::Backward || i.op == Op::BackwardWeight : i.op == Op::Forward);
          if (reads) {
            ASSERT_TRUE(gives_back(i.chunk - 1, i.micro));
          }
        }
        ASSERT_TRUE(taken.empty());
        ASSERT_EQ(slots.count, most);
        for (i64 c = 0; c < o.chunks; ++c) {
          if (o.placement().block_of(o.stage, c) < o.backward_end) {
            ASSERT_EQ(stash_sizes(instrs, c).forward, 1);
          }
        }
      }
    }
  });
}

TEST(Schedule, StashesAreThoseOfThePapers) {
  for_every_schedule([](ScheduleOptions o) {
    const i64 p = o.stages, m = o.micro_batches, v = o.chunks;
    for (o.stage = 0; o.stage < o.stages; ++o.stage) {
      const std::vector<Instr> instrs = make_schedule(o);
      const StashSizes sizes = stash_sizes(instrs, 0);
      switch (o.kind) {
        case ScheduleKind::Naive: ASSERT_EQ(sizes.forward, 1); break;
        case ScheduleKind::GPipe:
        case ScheduleKind::BreadthFirst: ASSERT_EQ(sizes.forward, m); break;
        case ScheduleKind::OneFOneB: ASSERT_EQ(sizes.forward, std::min<i64>(p - o.stage, m)); break;
        case ScheduleKind::ZeroBubbleH1:
          ASSERT_EQ(sizes.forward, std::min<i64>(p, m));
          ASSERT_EQ(sizes.backward, std::min<i64>(o.stage + 1, m));
          break;
        case ScheduleKind::ZeroBubbleH2:
          ASSERT_EQ(sizes.forward, std::min<i64>(2 * p - 1, m));
          ASSERT_EQ(sizes.backward, std::min<i64>(2 * o.stage + 1, m));
          break;
        case ScheduleKind::ZeroBubbleV: {
          const i64 most = most_kept_passes({.stages = p, .memory_limit = o.memory_limit});
          ASSERT_LE(kept_slots(instrs, v, m).count, most);
          if (o.memory_limit == 1 && m >= 2 * p) {
            ASSERT_EQ(kept_slots(instrs, v, m).count, most);
          }
          i64 waiting = 0;  // weight gradients
          for (const Instr& i : instrs) {
            waiting += i.op == Op::BackwardInput ? 1 : i.op == Op::BackwardWeight ? -1 : 0;
            ASSERT_LE(waiting, p);
          }
          break;
        }
        case ScheduleKind::Interleaved: {
          i64 live = 0, most = 0;
          for (const Instr& i : instrs) {
            if (i.op == Op::Forward) most = std::max(most, ++live);
            if (i.op == Op::Backward) --live;
          }
          ASSERT_EQ(kept_slots(instrs, v, m).count, most);
          ASSERT_EQ(most, std::min<i64>(2 * (p - o.stage - 1) + (v - 1) * p + 1, m * v));
          for (i64 c = 0; c < v; ++c) ASSERT_LE(stash_sizes(instrs, c).forward, std::min<i64>(2 * p, m));
        }
      }
      ASSERT_TRUE(splits_backward(o.kind) || sizes.backward == 1);
    }
  });
  const StashSizes eval = stash_sizes(make_eval_schedule({4}, 1, 9, 1), 0);
  EXPECT_EQ(eval.forward, 1);
  EXPECT_EQ(eval.backward, 1);
}

// The head's last backward pass and one more pass, or the step's end.
TEST(Schedule, TheHeadsUseOfATiedMatrixIsCompleteBeforeTheStepEnds) {
  const auto last_stage = [](ScheduleKind kind, int stages, i64 micro_batches, int chunks = 1) {
    ScheduleOptions o{.kind = kind, .stages = stages, .stage = stages - 1, .micro_batches = micro_batches};
    o.chunks = chunks;
    o.post_validate = true;
    return make_schedule(o);
  };
  const auto passes_after = [](const std::vector<Instr>& schedule) {
    return std::count_if(schedule.begin() + static_cast<std::ptrdiff_t>(use_complete_after(schedule)), schedule.end(),
                         [](const Instr& i) { return computes(i.op); });
  };
  for (int p = 2; p <= 8; ++p) {
    EXPECT_EQ(use_complete_after(last_stage(ScheduleKind::OneFOneB, p, 20)),
              last_stage(ScheduleKind::OneFOneB, p, 20).size());
    EXPECT_EQ(passes_after(last_stage(ScheduleKind::ZeroBubbleH1, p, 20)), p - 1);
    EXPECT_EQ(passes_after(last_stage(ScheduleKind::ZeroBubbleH2, p, 20)), 2 * (p - 1));
    // After the last group of micro-batches, the other chunk's passes follow.
    EXPECT_EQ(passes_after(last_stage(ScheduleKind::Interleaved, p, 2 * p, 2)), p - 1);
  }
  EXPECT_EQ(use_complete_after(make_eval_schedule({2}, 1, 3, 1)), make_eval_schedule({2}, 1, 3, 1).size());
}

// Every stage validates once, before its first gradient, with nothing in flight: what was sent before was received
// before.
TEST(Schedule, ValidatesBetweenMessagesAndBeforeGradients) {
  for_every_post_validated([](const ScheduleOptions& o) {
    const std::vector<std::vector<Instr>> schedules = make_schedules(o);
    ScheduleOptions without = o;
    without.post_validate = o.kind == ScheduleKind::ZeroBubbleH2;
    std::map<std::tuple<int, int, Way>, i64> in_flight;
    for (int stage = 0; stage < o.stages; ++stage) {
      std::vector<Instr> instrs = schedules[stage];
      const size_t before = before_gradients(instrs);
      ASSERT_EQ(std::ranges::count(instrs, Op::Validate, &Instr::op), 1);
      ASSERT_EQ(instrs[before].op, Op::Validate);
      for (size_t i = 0; i < before; ++i) {
        const Op op = instrs[i].op;
        ASSERT_TRUE(op == Op::Load || op == Op::Forward || op == Op::SendActivation || op == Op::RecvActivation);
        const int peer = o.placement().peer_of(stage, op, instrs[i].chunk);
        const Way way = o.placement().way_of(op, instrs[i].chunk);
        if (op == Op::SendActivation) ++in_flight[{stage, peer, way}];
        if (op == Op::RecvActivation) --in_flight[{peer, stage, way}];
      }
      if (without.post_validate) continue;
      instrs.erase(instrs.begin() + static_cast<std::ptrdiff_t>(before));
      ASSERT_EQ(instrs, make_schedules(without)[stage]) << "and nothing else changes";
    }
    for (const auto& [channel, messages] : in_flight) ASSERT_EQ(messages, 0);
  });
}

// As many forward passes as the last stage gives it time for.
TEST(Schedule, ValidatesWhenTheLastStageHasItsFirstGradient) {
  using enum ScheduleKind;
  const auto forward_passes = [](ScheduleOptions o) {
    o.post_validate = true;
    std::vector<i64> passes;
    for (const std::vector<Instr>& instrs : make_schedules(o))
      passes.push_back(std::count_if(instrs.begin(),
                                     instrs.begin() + static_cast<std::ptrdiff_t>(before_gradients(instrs)),
                                     [](const Instr& i) { return i.op == Op::Forward; }));
    return passes;
  };
  EXPECT_EQ(forward_passes({OneFOneB, 4, 0, 8}), (std::vector<i64>{4, 3, 2, 1}));
  EXPECT_EQ(forward_passes({ZeroBubbleH2, 4, 0, 8}), (std::vector<i64>{4, 3, 2, 1}));
  EXPECT_EQ(forward_passes({GPipe, 4, 0, 8}), (std::vector<i64>{8, 8, 8, 8}));
  EXPECT_EQ(forward_passes({Interleaved, 4, 0, 8, 2}), (std::vector<i64>{8, 7, 6, 5}));
  EXPECT_EQ(forward_passes({OneFOneB, 1, 0, 8}), (std::vector<i64>{1}));
}

TEST(Schedule, SaysWhyThereIsNone) {
  const auto why = [](ScheduleKind kind, int stages, i64 micro_batches, int chunks) {
    return why_not({kind, stages, 0, micro_batches, chunks});
  };
  using enum ScheduleKind;
  EXPECT_EQ(why(Interleaved, 4, 8, 2), "");
  EXPECT_EQ(why(ZeroBubbleH1, 4, 3, 1), "");
  EXPECT_EQ(why(BreadthFirst, 1, 3, 4), "");
  EXPECT_EQ(why_not({ZeroBubbleH2, 4, 0, 3, 1, 0, false, 1, true}), "");
  EXPECT_THAT(why(ZeroBubbleH2, 4, 8, 1), HasSubstr("pipeline.schedule zb-h2: pipeline.post_validate is false"));
  EXPECT_EQ(why(ZeroBubbleV, 4, 1, 2), "");
  EXPECT_THAT(why(ZeroBubbleV, 4, 8, 1), HasSubstr("pipeline.virtual_stages 1: pipeline.schedule zb-v takes 2"));
  EXPECT_THAT(why(ZeroBubbleV, 1, 8, 2), HasSubstr("pipeline.stages is 1, it takes 2 or more"));
  for (const int p : {2, 3, 4, 5, 6, 7, 8, 12, 64}) {
    const double least = static_cast<double>(2 * ((p + 4) / 3)) / (2 * p);
    EXPECT_EQ(why_not({ZeroBubbleV, p, 0, 8, 2, 0, false, least}), "") << p;
    EXPECT_THAT(why_not({ZeroBubbleV, p, 0, 8, 2, 0, false, least - 0.01}), HasSubstr("pipeline.memory_limit")) << p;
  }
  EXPECT_THAT(why(BreadthFirst, 4, 3, 2), HasSubstr("pipeline.stages is 4, it takes 1"));
  EXPECT_THAT(why(BreadthFirst, 1, 3, 1), HasSubstr("pipeline.virtual_stages is 1, it takes 2 or more"));
  EXPECT_THAT(why(Interleaved, 4, 6, 2), HasSubstr("gradient_accumulation_steps 6 is no multiple of the 4"));
  EXPECT_THAT(why(Interleaved, 4, 6, 2), HasSubstr("4 or 8 would do"));
  EXPECT_THAT(why(Interleaved, 4, 3, 2), HasSubstr("; 4 would do"));
  EXPECT_THAT(why(Interleaved, 4, 8, 1), HasSubstr("pipeline.virtual_stages"));
  EXPECT_THAT(why(Interleaved, 1, 8, 2), HasSubstr("pipeline.stages"));
  EXPECT_THAT(why(OneFOneB, 4, 8, 2), HasSubstr("pipeline.virtual_stages"));
  EXPECT_THAT(why(OneFOneB, 0, 8, 1), HasSubstr("pipeline.stages"));
  EXPECT_THAT(why(OneFOneB, 1, 0, 1), HasSubstr("gradient_accumulation_steps"));
  try {
    schedule(Interleaved, 4, 0, 6, 2);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::Config);
    EXPECT_EQ(e.what(), why(Interleaved, 4, 6, 2));
  }
}

}  // namespace schedule_test
}  // namespace ds::pipeline
