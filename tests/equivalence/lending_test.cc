// SPDX-License-Identifier: Apache-2.0
// Training over communicators that keep what is lent to them until it is waited for (lending_communicator.h): the bits
// of training over others, and no memory touched before its time. So no wait of the engine can be left out because
// communicators happen to be quick, or because what one rank needs of another happens to order them.

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "../compressed_exercise.h"
#include "../lending_communicator.h"
#include "../mesh_exercise.h"
#include "equivalence/layouts.h"

namespace ds::testing {
namespace lending_test {

constexpr auto kRing = SequenceParallelMode::Ring;
const CommOptions kOptions{.timeout_s = 60};

// Runs body(communicator) on threads that lend; returns the rules that they broke.
std::set<std::string> run_lending(int size, const std::function<void(Communicator&)>& body) {
  const auto rules = std::make_shared<LendingRules>();
  run_threads(size, kOptions, [&](Communicator& c) {
    std::vector<int> all(static_cast<size_t>(size));
    std::iota(all.begin(), all.end(), 0);
    LendingCommunicator lending(c.group(all, "lending", kOptions), rules);
    body(lending);
  });
  return rules->all_broken();
}

TEST(LendingCommunicator, IsACommunicator) {
  EXPECT_EQ(run_lending(3, [](Communicator& c) { test::exercise(c, 4001); }), std::set<std::string>{});
  EXPECT_EQ(run_lending(4, [](Communicator& c) { test::exercise_compressed(c, 301); }), std::set<std::string>{});
  const auto rules = std::make_shared<LendingRules>();
  auto worlds = make_lending_threads(8, kOptions, rules);
  std::vector<std::jthread> threads;
  for (auto& world : worlds) {
    threads.emplace_back([&] {
      Mesh mesh(std::move(world), {.dp = 2, .pp = 2, .tp = 2}, kOptions);
      test::exercise_pipeline(mesh, 101);
    });
  }
  threads.clear();
  EXPECT_EQ(rules->all_broken(), std::set<std::string>{});
}

TEST(LendingCommunicator, SeesWhatIsTouchedTooEarly) {
  const auto broken = [](const std::function<void(Communicator&, std::span<float>)>& body) {
    return run_lending(2, [&](Communicator& c) {
      std::vector<float> memory(64, 1.0f);
      body(c, memory);
      c.drain();
    });
  };
  const auto exchange = [](Communicator& c, std::span<float> memory, const std::function<void(Ticket&)>& between) {
    const int other = 1 - c.rank();
    Ticket sent = c.send(memory.data(), 16, other, "t.send"), here = c.recv(&memory[8], 16, other, "t.recv");
    between(sent);
    here.wait();
    EXPECT_EQ(memory[8], 1.0f);
  };
  using Broken = std::set<std::string>;
  const std::string sent = R"(send "t.send" of the world: its source was changed before its ticket was waited for)";
  EXPECT_EQ(broken([&](Communicator& c, std::span<float> memory) {
              exchange(c, memory, [&](Ticket& ticket) {
                EXPECT_TRUE(std::isnan(memory[8]));  // it has not come
                ticket.wait();
                memory[0] = 2;
              });
            }),
            Broken{});
  EXPECT_EQ(
      broken([&](Communicator& c, std::span<float> memory) { exchange(c, memory, [&](Ticket&) { memory[0] = 2; }); }),
      Broken{sent});
  EXPECT_EQ(broken([&](Communicator& c, std::span<float> memory) {  // its arrival proves nothing about the sent memory
              exchange(c, memory, [](Ticket&) {});
              memory[0] = 2;
            }),
            Broken{sent});
  EXPECT_EQ(
      broken([&](Communicator& c, std::span<float> memory) { exchange(c, memory, [&](Ticket&) { memory[9] = 0; }); }),
      Broken{R"(recv "t.recv" of the world: its target was written to before its ticket was waited for)"});
  // A later operation that is done shows that those before it are.
  EXPECT_EQ(broken([&](Communicator& c, std::span<float> memory) {
              Ticket first = c.all_reduce(memory.data(), 2, DType::F32, ReduceOp::Sum, "t.reduce");
              Ticket second = c.all_reduce(&memory[2], 2, DType::F32, ReduceOp::Sum, "t.reduce");
              EXPECT_TRUE(std::isnan(memory[0]) && std::isnan(memory[2]));
              second.wait();
              EXPECT_EQ(std::exchange(memory[0], 5.0f), 2.0f);
              first.wait();
              EXPECT_EQ(memory[0], 5.0f);
            }),
            Broken{});
}

struct Lent {
  Layout layout = {};
  bool llama = false;
  DType type = DType::F32;
  ReduceOrder order = ReduceOrder::Micro;
  LossNorm norm = LossNorm::Micro;
  i64 micro_batches = 4;
  i64 bucket = 500'000'000;
  bool offload = false;
  DType wire = type;

  std::string name() const {
    return fmt::format("{} {} {} order {} norm {} of {} bucket {}{}", llama ? "llama" : "gpt2", layout.name(),
                       dtype_name(type), static_cast<int>(order), static_cast<int>(norm), micro_batches, bucket,
                       offload ? " offload" : "");
  }
};

// Tied embeddings and layers for four stages of two chunks; and more ranks of tp than key and value heads.
Config config_of(const Lent& a) {
  ModelConfig model = of_four_heads(a.llama ? tiny_llama() : tiny_gpt2());
  model.layers = a.layout.chunks > 1 ? 6 : 3;
  model.kv_heads = a.llama ? 2 : 4;
  model.hidden = 16;
  model.head_dim = 4;
  model.intermediate = 16;
  Config c = config_of(model, a.layout, a.micro_batches * a.layout.dp);
  c.data.seq_length = 8;
  c.bf16.enabled = a.type == DType::BF16;
  c.communication_data_type = wire_type_of(a.wire);
  c.reduce_order = a.order;
  c.loss.norm = a.norm;
  c.zero.reduce_bucket_size = c.zero.allgather_bucket_size = a.bucket;
  c.activation_checkpointing.cpu_checkpointing = a.offload;
  return c;
}

// Three steps with an evaluation between them and, at the end, some text.
Trace train(const Config& config, int ranks, std::vector<std::unique_ptr<Communicator>> comms) {
  Hooks hooks;
  const i64 B = config.batch.micro, T = config.data.seq_length;
  hooks.after_step = [&](engine::Engine& engine, i64 step) {
    if (step != 0) return;
    engine.evaluate(3, [&](i64 batch, std::span<i32> ids, std::span<i32> targets, std::span<i32>) {
      for (i64 b = 0; b < B; ++b) {
        const size_t at = static_cast<size_t>(b * T), n = static_cast<size_t>(T);
        fill_sample(1000 + 10 * batch + b, config.model.vocab_size, ids.subspan(at, n), targets.subspan(at, n));
      }
      return true;
    });
  };
  std::vector<std::vector<i32>> texts(static_cast<size_t>(ranks));
  hooks.at_end = [&](engine::Engine& engine) {
    EXPECT_TRUE(engine.is_finite());
    texts[engine.mesh().rank()] = text_of(engine, {3, 5, 7}, {.max_tokens = 2});
  };
  Trace t = train_threads(config, ranks, 3, 1, hooks, std::move(comms));
  for (const std::vector<i32>& text : texts) EXPECT_EQ(text, texts[0]);
  for (const i32 id : texts[0]) t.logits.push_back(static_cast<float>(id));
  return t;
}

void expect_same_when_lent(const Lent& a) {
  const Config config = config_of(a);
  const int ranks = a.layout.ranks();
  const auto rules = std::make_shared<LendingRules>();
  const Trace want = train(config, ranks, make_thread_communicators(ranks, kOptions));
  const Trace got = train(config, ranks, make_lending_threads(ranks, kOptions, rules));
  expect_same_training(got, want, a.name());
  EXPECT_EQ(rules->all_broken(), std::set<std::string>{}) << a.name();
}

TEST(Lending, ChangesNoBit) {
  constexpr auto boundary = ReduceOrder::Boundary;
  for (const Lent& a : std::vector<Lent>{
           {.layout = {.dp = 3}, .order = boundary},
           {.layout = {.dp = 2, .stage = 1}, .type = DType::BF16, .order = boundary, .bucket = 900},
           {.layout = {.dp = 3, .stage = 1}, .llama = true, .norm = LossNorm::Token},
           {.layout = {.dp = 3, .stage = 2}, .type = DType::BF16, .bucket = 900},
           {.layout = {.dp = 2, .checkpoints = Granularity::Layer, .stage = 3}, .bucket = 900},
           {.layout = {.dp = 3, .stage = 3}, .llama = true, .type = DType::BF16, .wire = DType::F16},
           {.layout = {.pp = 4}, .micro_batches = 6},
           {.layout = {.pp = 3, .schedule = Kind::Naive, .stage = 3}},
           {.layout = {.pp = 3, .schedule = Kind::GPipe, .stage = 1}, .order = boundary},
           {.layout = {.pp = 2, .schedule = Kind::Interleaved, .chunks = 2, .stage = 2}, .llama = true},
           {.layout = {.pp = 3, .schedule = Kind::ZeroBubbleH1}, .micro_batches = 6},
           {.layout = {.pp = 3, .schedule = Kind::ZeroBubbleV, .chunks = 2}, .micro_batches = 6},
           {.layout = {.pp = 4, .schedule = Kind::ZeroBubbleV, .chunks = 2, .stage = 2, .memory_limit = 0.5},
           .llama = true,
           .micro_batches = 6},
           {.layout = {.dp = 2, .pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2, .stage = 3}, .type = DType::BF16},
           {.layout =
                {.dp = 2, .pp = 2, .schedule = Kind::ZeroBubbleH1, .checkpoints = Granularity::Selective, .stage = 2}},
           {.layout = {.dp = 2,
                      .pp = 2,
                      .schedule = Kind::Interleaved,
                      .chunks = 2,
                      .checkpoints = Granularity::Layer,
                      .interval = 2,
                      .stage = 3},
           .norm = LossNorm::Token},
           {.layout = {.pp = 2, .checkpoints = Granularity::Layer}, .llama = true, .offload = true},
           {.layout = {.tp = 2, .checkpoints = Granularity::Layer, .partition = true}, .offload = true},
           {.layout = {.tp = 4}, .llama = true},
           {.layout = {.tp = 2, .sequence = true, .checkpoints = Granularity::Layer, .partition = true}},
           {.layout = {.dp = 2, .tp = 2, .sequence = true, .stage = 1}, .llama = true, .type = DType::BF16},
           {.layout = {.dp = 2, .pp = 2, .tp = 2, .stage = 3}, .norm = LossNorm::Token},
           {.layout = {.dp = 2, .sp = 2, .stage = 3}},
           {.layout = {.pp = 2, .sp = 2, .mode = kRing, .stage = 1}, .llama = true},
           {.layout = {.sp = 4, .mode = kRing, .stage = 2}, .type = DType::BF16},
           {.layout = {.pp = 2, .tp = 2, .sp = 2, .schedule = Kind::GPipe, .stage = 2}}}) {
    expect_same_when_lent(a);
    if (HasFailure()) return;
  }
}

// DS_SLOW=1: every mesh with every stage, schedule, granularity and order of sums.
TEST(Lending, ChangesNoBitInAnyCombination) {
  if (std::getenv("DS_SLOW") == nullptr) GTEST_SKIP() << "slow";
  i64 tried = 0;
  for (const Layout& mesh : {Layout{.dp = 3},
                             {.pp = 2},
                             {.pp = 4},
                             {.tp = 2},
                             {.tp = 4, .sequence = true},
                             {.sp = 2},
                             {.sp = 4, .mode = kRing},
                             {.dp = 2, .pp = 2},
                             {.dp = 2, .tp = 2},
                             {.dp = 2, .sp = 2},
                             {.pp = 2, .tp = 2, .sequence = true},
                             {.pp = 2, .sp = 2, .mode = kRing},
                             {.dp = 2, .pp = 2, .tp = 2},
                             {.pp = 2, .tp = 2, .sp = 2}}) {
    for (const Kind schedule :
         {Kind::OneFOneB, Kind::Naive, Kind::GPipe, Kind::Interleaved, Kind::ZeroBubbleH1, Kind::ZeroBubbleV}) {
      if (mesh.pp == 1 && schedule != Kind::OneFOneB) continue;
      for (const Granularity granularity : {Granularity::None, Granularity::Layer, Granularity::Selective}) {
        for (const ReduceOrder order : {ReduceOrder::Micro, ReduceOrder::Boundary}) {
          for (i64 stage = 0; stage <= (order == ReduceOrder::Boundary ? 1 : 3); ++stage) {
            for (const bool llama : {false, true}) {
              Lent a{.layout = mesh, .llama = llama, .order = order};
              a.layout.schedule = schedule;
              a.layout.chunks = schedule == Kind::Interleaved || schedule == Kind::ZeroBubbleV ? 2 : 1;
              a.layout.checkpoints = granularity;
              a.layout.stage = stage;
              a.type = tried % 2 == 0 ? DType::F32 : DType::BF16;
              a.wire = a.type;
              a.norm = tried % 3 == 0 ? LossNorm::Token : LossNorm::Micro;
              a.bucket = tried % 5 == 0 ? 900 : 500'000'000;
              expect_same_when_lent(a);
              ++tried;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(tried, 900);
}

}  // namespace lending_test
}  // namespace ds::testing
