// SPDX-License-Identifier: Apache-2.0
// Prediction = count: bytes per rank by tag and bytes on the wire, against the run plan and against the ZeRO table
// written out.

#include <set>

#include "equivalence/layouts.h"
#include "mesh/from_config.h"
#include "plan/own_memory.h"

namespace ds::testing {
namespace memory_traffic_test {

i64 bytes(const plan::TagBytes& b, Tag t) { return b[static_cast<size_t>(t)]; }

// Elements of a unit as it lies on P ranks: its rows side by side, padded to P * 128.
i64 padded_elems(const std::vector<model::ParamRow>& unit, i64 P) {
  i64 n = 0;
  for (const model::ParamRow& row : unit) n += row.numel();
  return align_up(div_ceil(n, P), 128) * P;
}
i64 padded_elems(const model::Model& model, i64 P) {
  i64 n = padded_elems(model.shared, P);
  for (const auto& layer : model.layers) n += padded_elems(layer->rows(), P);
  return n;
}

void expect_planned(const Trace& t, i64 steps) {
  for (size_t tag = 0; tag < t.counted.size(); ++tag) {
    EXPECT_EQ(t.counted[tag], t.predicted[tag]) << tag_name(static_cast<Tag>(tag));
  }
  for (const auto& [name, planned] : t.planned) {
    if (planned.calls == 0 && !t.sent.contains(name)) continue;
    EXPECT_EQ(t.sent.at(name).bytes, steps * planned.bytes) << name;
    EXPECT_EQ(t.sent.at(name).calls, steps * planned.calls) << name;
  }
}

class Ranks : public ::testing::TestWithParam<int> {};

TEST_P(Ranks, CountedBytesEqualTheZeroTable) {
  const i64 P = GetParam();
  struct Types {
    DType work, wire;
  };
  struct Accumulation {
    i64 m;
    ReduceOrder order;
    bool fused = true;
  };
  for (const ModelConfig& config : {tiny_llama(), tiny_gpt2(), tiny_bert(), tiny_latent()}) {
    for (const auto& [work, wire] : {Types{DType::F32, DType::F32},
                                     {DType::BF16, DType::BF16},
                                     {DType::F16, DType::F16},
                                     {DType::BF16, DType::F32},
                                     {DType::F32, DType::F16},
                                     {DType::BF16, DType::F16}}) {
      for (i64 stage = 0; stage <= 3; ++stage) {
        for (const auto& [m, order, fused] : {Accumulation{1, ReduceOrder::Micro},
                                              {3, ReduceOrder::Micro},
                                              {3, ReduceOrder::Boundary},
                                              {3, ReduceOrder::Boundary, false}}) {
          if (stage >= 2 && order == ReduceOrder::Boundary) continue;  // they reduce every micro-batch
          Config c = tiny_config(config, static_cast<int>(P), m, stage);
          c.bf16.enabled = work == DType::BF16;
          c.fp16 = {.enabled = work == DType::F16, .loss_scale = 256};
          c.communication_data_type = wire_type_of(wire);
          c.reduce_order = order;
          c.gradient_accumulation_fusion = fused;
          const Trace t = train_threads(c, static_cast<int>(P), 2);
          const bool boundary = order == ReduceOrder::Boundary;
          // Products add to fp32 sums, which on one rank are all.
          const bool alone = boundary && fused && P == 1;
          SCOPED_TRACE(fmt::format("{} P {} stage {} work {} wire {} m {} {}{}", family_name(config.family), P, stage,
                                   dtype_name(work), dtype_name(wire), m, boundary ? "boundary" : "micro",
                                   fused ? "" : " apart"));
          expect_planned(t, 2);

          const model::Model model = model::make_model(c.model, c.data.seq_length);
          // Each use of a tied embedding has gradients of its own.
          const i64 padded = padded_elems(model, P), shared = padded_elems(model.shared, P), grads = padded + shared;
          const i64 W = dtype_bytes(work), G = dtype_bytes(wire), shard = padded / P;
          EXPECT_EQ(bytes(t.counted, Tag::Params), W * (stage == 3 ? shard : padded));
          EXPECT_EQ(bytes(t.counted, Tag::Grads), stage <= 1 && !alone ? G * grads : 0);
          EXPECT_EQ(bytes(t.counted, Tag::GradAccum), 4 * (stage == 0 || boundary ? grads : grads / P));
          EXPECT_EQ(bytes(t.counted, Tag::Master), work == DType::F32 ? 0 : 4 * (stage == 0 ? padded : shard));
          EXPECT_EQ(bytes(t.counted, Tag::Optimizer), 8 * (stage == 0 ? padded : shard));

          // Traffic of one step, elements sent by one rank times (P-1)/P. Nothing persists and
          // nothing is reused here, so stage 3 gathers a unit for every use: one in forward and one in backward, and
          // the tied embedding two more, with the head. That is m (3 padded + 3 shared) with the reduce-scatter.
          const auto sent = [&](i64 elems) { return elems / P * (P - 1); };
          EXPECT_EQ(t.sent.contains("dp.reduce_scatter"), !alone);
          if (!alone) {
            EXPECT_EQ(t.sent.at("dp.reduce_scatter").bytes, 2 * (boundary ? 1 : m) * sent(grads) * G);
          }
          const i64 gathered =
              stage == 0 ? sent(padded) * 4 : (stage == 3 ? m * sent(2 * padded + 2 * shared) : sent(padded)) * W;
          EXPECT_EQ(t.sent.at("dp.all_gather").bytes, 2 * gathered);
        }
      }
    }
  }
}

TEST_P(Ranks, DefaultKnobsFollowTheirOwnFormula) {
  const int P = GetParam();
  Config c = tiny_config(tiny_gpt2(), P, 2, 3);
  c.zero = ZeroConfig{.stage = 3, .overlap_comm = true};
  const Trace t = train_threads(c, P, 2);
  expect_planned(t, 2);
  // Every matrix of this model is below the persistence threshold: whole everywhere, published once per step.
  const model::Model model = model::make_model(c.model, c.data.seq_length);
  EXPECT_EQ(t.sent.at("dp.all_gather").bytes, 2 * (padded_elems(model, P) / P * (P - 1) * 4));
}

INSTANTIATE_TEST_SUITE_P(MemoryAndTraffic, Ranks, ::testing::Values(1, 2, 4, 8));

// Rows of at most 1280 elements persist. On two ranks, slices are halves rounded up to 128:
//   unit       persistent rows                                       slice   sharded rows              slice
//   embedding  -                                                         0   61*40 = 2440               1280
//   block      norms 40 + 40, q 32*40, k and v 16*40, o 40*32,               gate, up and down 52*40
//              norms of q and k 8 + 8: 3936                           2048   = 6240                     3200
//   head       norm 40                                                 128   61*40 = 2440               1280
TEST(Persistence, PartOfAUnitStaysWholeAndTheRestIsGathered) {
  Config c = tiny_config(tiny_llama(), 2, 3, 3);
  c.bf16.enabled = true;
  c.communication_data_type = WireType::BF16;
  c.zero.param_persistence_threshold = 1280;
  const Trace t = train_threads(c, 2, 2);
  expect_planned(t, 2);
  constexpr i64 kWhole = 2 * 2048 + 128, kSharded = 1280 + 2 * 3200 + 1280, kOwned = kWhole + kSharded;
  EXPECT_EQ(bytes(t.counted, Tag::Params), 2 * (2 * kWhole + kSharded));
  EXPECT_EQ(bytes(t.counted, Tag::GradAccum), 4 * kOwned);
  EXPECT_EQ(bytes(t.counted, Tag::Master), 4 * kOwned);
  EXPECT_EQ(bytes(t.counted, Tag::Optimizer), 8 * kOwned);
  // Two steps of three micro-batches: one of two slices is sent.
  EXPECT_EQ(t.sent.at("dp.reduce_scatter").bytes, 2 * 3 * 2 * kOwned);
  EXPECT_EQ(t.sent.at("dp.all_gather").bytes, 2 * 2 * (3 * 2 * kSharded + kWhole));
  EXPECT_EQ(t.sent.at("dp.all_gather").calls, 2 * (3 * 2 * 4 + 1));
}

// The units of the tiny GPT-2 on two ranks: the tied matrix 2560 (67*36), positions 1024 (24*36), three blocks of
// 16128, head 256 elements, 52224 in all. Backward fills buckets from the head, where the matrix has a gradient, too:
// 54784; the publication begins with the matrix.
TEST(Buckets, CallsAreThoseCountedByHand) {
  struct Case {
    i64 limit, reductions, publications;
  };
  for (const Case& k :
       {Case{1, 5, 6},       // a unit larger than the limit goes alone, but for what is written together
        Case{16'384, 5, 4},  // head + matrix, block, block, block, positions + matrix; both, .., block + head
        Case{20'000, 3, 3},  // head + matrix + block, block, block + positions + matrix; both + block, ..
        Case{52'223, 2, 2},  // head + matrix + blocks, positions + matrix; all but the head, head
        Case{54'784, 1, 1}}) {
    for (i64 stage = 0; stage <= 2; ++stage) {
      Config c = tiny_config(tiny_gpt2(), 2, 3, stage);
      c.zero.reduce_bucket_size = c.zero.allgather_bucket_size = k.limit;
      const Trace t = train_threads(c, 2, 2);
      SCOPED_TRACE(fmt::format("limit {} stage {}", k.limit, stage));
      expect_planned(t, 2);
      EXPECT_EQ(t.sent.at("dp.reduce_scatter").calls, 2 * k.reductions * (stage == 2 ? 3 : 1));
      EXPECT_EQ(t.sent.at("dp.all_gather").calls, 2 * (stage == 0 ? 1 : k.publications));
    }
  }
}

using Sent = std::map<std::string, i64>;  // bytes, by "axis.collective"

Sent sent_by(const Mesh& mesh) {
  Sent sent;
  for (const auto& [name, count] : mesh.counts()) {
    if (!name.ends_with(".stats")) sent[name] = count.bytes;
  }
  return sent;
}
i64 of(const Sent& sent, const std::string& name) {
  const auto found = sent.find(name);
  return found == sent.end() ? 0 : found->second;
}

// Each rank sends as much as its plan states, in the last step and in the mean; if the plan has a bound, no step sends
// more. `bounded`: whether the plan has bounds.
void expect_run_planned(Config c, int ranks, i64 steps, bool bounded, const std::string& what) {
  SCOPED_TRACE(fmt::format("{}, {} ranks, {} steps", what, ranks, steps));
  c.steps = steps;
  Hooks hooks;
  hooks.same_logits = false;
  hooks.length = [&](i64 step) { return plan::lengths_of_step(c, step + 1).sequence; };
  std::vector<std::vector<Sent>> sent(static_cast<size_t>(ranks));  // after each step
  hooks.after_step = [&](engine::Engine& engine, i64) {
    sent[static_cast<size_t>(engine.mesh().rank())].push_back(sent_by(engine.mesh()));
  };
  hooks.at_end = [&](engine::Engine& engine) {
    const plan::RunPlan& plan = engine.plan();
    const std::vector<Sent>& of_rank = sent[static_cast<size_t>(engine.mesh().rank())];
    EXPECT_EQ(plan.traffic.most.empty(), !bounded);
    std::set<std::string> names;
    for (const auto& [name, bytes] : of_rank.back()) names.insert(name);
    for (const auto& [name, count] : plan.traffic.last) names.insert(name);
    for (const std::string& name : names) {
      Sent before;
      i64 most = 0;
      for (const Sent& after : of_rank) {
        most = std::max(most, of(after, name) - of(before, name));
        before = after;
      }
      if (const auto bound = plan.traffic.most.find(name); bound != plan.traffic.most.end()) {
        EXPECT_LE(most, bound->second) << name;
        continue;
      }
      const Sent all_but_last = steps > 1 ? of_rank[static_cast<size_t>(steps) - 2] : Sent();
      const auto planned = plan.traffic.last.find(name);
      EXPECT_EQ(of(of_rank.back(), name) - of(all_but_last, name),
                planned == plan.traffic.last.end() ? 0 : planned->second.bytes)
          << name << " in the last step";
      const double mean = static_cast<double>(of(of_rank.back(), name)) / static_cast<double>(steps);
      if (!plan.traffic.mean.empty())
        EXPECT_EQ(std::llround(mean), of(plan.traffic.mean, name)) << name << " on average";
      else
        EXPECT_EQ(of(of_rank.back(), name), steps * (planned == plan.traffic.last.end() ? 0 : planned->second.bytes));
    }
  };
  traces_of_threads(c, ranks, steps, 1, hooks);
}

Config longer(const Layout& l) {
  Config c = config_of(of_four_heads(tiny_gpt2()), l, 2);
  c.data.seq_length = 24;
  return c;
}

TEST(StepsThatDiffer, InLengthSendWhatIsPlannedOfTheLastOneAndInTheMean) {
  for (const Layout& l : {Layout{.dp = 2, .stage = 3},
                          {.tp = 2},
                          {.tp = 2, .sequence = true},
                          {.pp = 2},
                          {.sp = 2},
                          {.sp = 2, .mode = SequenceParallelMode::Ring},
                          {.dp = 2, .tp = 2, .stage = 2}}) {
    Config grows = longer(l);
    grows.curriculum = {.enabled = true, .min_difficulty = 4, .max_difficulty = 24};
    grows.curriculum.total_curriculum_step = 5;
    grows.curriculum.difficulty_step = 4;
    for (const i64 steps : {1, 3, 7}) expect_run_planned(grows, l.ranks(), steps, false, "grows " + l.name());
    Config listed = longer(l);
    listed.curriculum = {.enabled = true, .schedule = CurriculumSchedule::FixedDiscrete};
    listed.curriculum.difficulty = {12, 24, 8, 12};
    listed.curriculum.max_step = {1, 2, 4};
    expect_run_planned(listed, l.ranks(), 6, false, "listed " + l.name());
    if (l.sp > 1 || l.sequence) continue;
    for (Config* c : {&grows, &listed}) {
      RandomLtdConfig& ltd = c->random_ltd;
      ltd.data_efficiency = ltd.data_routing = ltd.enabled = true;
      ltd.layers = {1};
      ltd.min_value = 3, ltd.max_value = 20, ltd.require_steps = 4, ltd.seq_per_step = 1;
      expect_run_planned(*c, l.ranks(), 6, false, "drops " + l.name());
    }
  }
}

TEST(StepsThatDiffer, InTheFragmentsThatMeetSendWhatIsPlanned) {
  for (const i64 fragments : {1, 2, 3}) {
    for (const i64 bits : {32, 8}) {
      for (const i64 overlap : {0, 1}) {
        const Layout l{.dp = 1, .stage = 1};
        Config c = longer(l);
        c.batch.train *= 2;
        c.optimizer.diloco = {.enabled = true, .workers = 2, .sync_every = 4, .fragments = fragments};
        c.optimizer.diloco.outer_gradient_bits = bits;
        c.optimizer.diloco.overlap_steps = overlap;
        for (const i64 steps : {2, 5, 7})
          expect_run_planned(c, 2, steps, false, fmt::format("{} fragments, {} bits, {}", fragments, bits, overlap));
      }
    }
  }
}

// Nothing meets before the run ends.
TEST(StepsThatDiffer, InMeetingsThatNeverComeAreNotStaged) {
  const Layout l{.dp = 1, .stage = 1};
  Config c = longer(l);
  c.batch.train *= 2;
  c.optimizer.diloco = {.enabled = true, .workers = 2, .sync_every = 4};
  c.steps = 3;
  const plan::Planned never(c, mesh_shape(c, 2), 0, DeviceKind::Cpu);
  c.steps = 4;
  const plan::Planned once(c, mesh_shape(c, 2), 0, DeviceKind::Cpu);
  EXPECT_EQ(never.plan.traffic.largest.axes[Axis::Outer].largest.combined_bytes, 0);
  EXPECT_GT(once.plan.traffic.largest.axes[Axis::Outer].largest.combined_bytes, 0);
  EXPECT_GT(never.plan.traffic.meetings.at("outer.all_reduce").bytes, 0);  // what one would take is known
}

// Steps that are skipped send less, and put off the work that comes after them.
TEST(StepsThatDiffer, InUpdatesOfWhichSomeAreSkippedSendNoMoreThanPlanned) {
  for (const OptimizerType type : {OptimizerType::OneBitAdam, OptimizerType::OneBitLamb, OptimizerType::ZeroOneAdam}) {
    for (const int scale : {8, 40}) {  // nothing overflows, or nearly all does
      for (const DType work : {DType::F16, DType::F32}) {
        const Layout l{.dp = 2, .stage = type == OptimizerType::ZeroOneAdam ? 0 : 1};
        Config c = longer(l);
        c.optimizer.type = type;
        c.optimizer.freeze_step = c.optimizer.var_freeze_step = 2;
        c.optimizer.var_update_scaler = 1;
        c.optimizer.local_step_scaler = c.optimizer.local_step_clipper = 2;
        c.gradient_clipping = 0;
        c.reduce_order = ReduceOrder::Boundary;
        c.fp16 = {.enabled = work == DType::F16, .initial_scale_power = scale};
        if (work == DType::F16) c.communication_data_type = WireType::F16;
        expect_run_planned(c, 2, 6, true, fmt::format("optimizer {} scale {}", static_cast<int>(type), scale));
      }
    }
  }
}

// Windows into sums that are kept in 16 bits serve all that fits into them: which there are depends on the order in
// which updates ask for them.
TEST(StepsThatDiffer, InUpdatesTakeTheWindowsOfTheirOrder) {
  for (const Layout& l : {Layout{.pp = 2, .stage = 1}, {.tp = 2}, {.dp = 2, .stage = 1}}) {
    for (const i64 steps : {2, 4}) {
      Config c = longer(l);
      c.optimizer.type = OptimizerType::OneBitLamb;
      c.optimizer.freeze_step = 1;
      c.gradient_clipping = 0;
      c.reduce_order = ReduceOrder::Boundary;
      c.bf16.enabled = true;
      c.communication_data_type = WireType::BF16;
      c.grad_accum_dtype = DType::BF16;
      c.steps = steps;
      for (const Trace& t : traces_of_threads(c, l.ranks(), steps)) {
        for (size_t tag = 0; tag < t.counted.size(); ++tag)
          EXPECT_EQ(t.counted[tag], t.predicted[tag]) << l.name() << " " << tag_name(static_cast<Tag>(tag));
      }
    }
  }
}

TEST(SparseGradients, SendNoMoreThanPlannedUnderAnyName) {
  for (const i64 vocab : {64, 300, 2000}) {  // nearly all rows are seen, or few
    for (i64 stage = 0; stage <= 3; ++stage) {
      for (const bool tied : {false, true}) {
        const Layout l{.dp = 2, .stage = stage};
        Config c = longer(l);
        c.model.vocab_size = vocab;
        c.model.tie_embeddings = tied;
        c.sparse_gradients = true;
        expect_run_planned(c, 2, 3, true, fmt::format("vocabulary {} stage {} tied {}", vocab, stage, tied));
      }
    }
  }
}

TEST(Bounds, NameWhatDependsOnMoreThanTheConfiguration) {
  constexpr Bound kExact = Bound::Exact, kMost = Bound::AtMost, kLeast = Bound::AtLeast;
  const auto expect = [](Config c, int ranks, std::string_view backend, bool whole_run, Bound scratch, Bound comm) {
    const plan::Planned planned(c, mesh_shape(c, ranks), 0, DeviceKind::Cpu);
    const plan::TagBounds bounds = plan::own_bounds(c, planned.plan, {backend, *cpu_ops(), 1}, whole_run);
    for (size_t t = 0; t < bounds.size(); ++t) {
      const auto tag = static_cast<Tag>(t);
      EXPECT_EQ(bounds[t], tag == Tag::Scratch ? scratch : tag == Tag::Comm ? comm : Bound::Exact) << tag_name(tag);
    }
  };
  const Config plain = longer({.dp = 2, .stage = 1});
  expect(plain, 2, "shm", true, kExact, kExact);
  expect(plain, 2, "mpi", false, kExact, kExact);
  Config c = plain;
  c.sparse_gradients = true;
  expect(c, 2, "shm", true, kMost, kExact);
  expect(c, 2, "mpi", true, kMost, kMost);
  c = plain;
  c.optimizer.type = OptimizerType::OneBitLamb;
  c.reduce_order = ReduceOrder::Boundary;
  c.optimizer.freeze_step = 100;  // of more steps than there are: norms are skipped, too
  expect(c, 2, "shm", true, kExact, kMost);
  c = plain;
  c.curriculum = {.enabled = true, .min_difficulty = 1, .max_difficulty = 24};
  c.curriculum.total_curriculum_step = 1000;
  c.curriculum.difficulty_step = 1;
  c.steps = 1000;
  expect(c, 2, "shm", true, kExact, kExact);
  expect(c, 2, "shm", false, kMost, kMost);
  c.data.seq_length = c.model.max_positions = c.curriculum.max_difficulty = 1000;
  expect(c, 2, "shm", true, kLeast, kExact);
  c = plain;
  c.batch.train *= 2;
  c.optimizer.diloco = {.enabled = true, .workers = 2};
  expect(c, 4, "shm", true, kExact, kExact);
  expect(c, 4, "shm", false, kExact, kMost);
}

}  // namespace memory_traffic_test
}  // namespace ds::testing
