// SPDX-License-Identifier: Apache-2.0
// States at a server train with the bits of states in memory. The server runs their updates, keeps them when the run
// ends, and serves the next run at the same layout and at others. It is the server that ds-offload runs, in a thread of
// its own.

#include <gmock/gmock.h>

#include <filesystem>
#include <list>
#include <random>

#include "equivalence/serving.h"
#include "equivalence/tiers.h"
#include "offload/served.h"
#include "slow_set.h"

namespace ds::testing {
namespace served_test {

constexpr i64 kSteps = kTierSteps;

class Served : public ::testing::TestWithParam<OptimizerCase> {};

// A fresh server for each run, in memory or on a disk.
TierRun at_servers(std::list<Serving>& servers, const std::string& path) {
  return {.name = path.empty() ? "a server" : "a server on a disk",
          .config = [&servers, path](const Config& c) { return served(c, servers.emplace_back(path)); }};
}

TEST_P(Served, ChangesNoBit) {
  const TempDirectory dir;
  std::list<Serving> servers;
  expect_the_bits_of_memory(GetParam(), {at_servers(servers, ""), at_servers(servers, dir.path())});
}

TEST_P(Served, ASkippedStepIsForgotten) {
  std::list<Serving> servers;
  expect_a_skipped_step_is_forgotten(GetParam(), {at_servers(servers, "")});
}

INSTANTIATE_TEST_SUITE_P(All, Served, ::testing::ValuesIn(kOptimizers),
                         [](const auto& test) { return std::string(test.param.name); });

// Goes on with what the server has: as it is, or, cut otherwise, by the step that the server writes of it.
Hooks going_on() {
  return {.start = [](engine::Engine& engine) {
    const offload::ServerLink::Found& found = engine.server()->found();
    ASSERT_NE(found.has, offload::ServerLink::Has::Nothing);
    if (found.has == offload::ServerLink::Has::Same)
      engine.resume_from(found.record);
    else
      load_step(engine, found.step_dir);
  }};
}

// The run ends, in the midst of a step too, and starts anew: at the same layout, at others, with the same server or
// another process in its place.
TEST(ServedRuns, OutliveTheirTrainers) {
  const TempDirectory dir;
  test::EveryNth tried(3);
  for (const char* which : {"AdamW", "Lamb", "AdamW8bit", "Muon"}) {
    for (const DType work : {DType::F32, DType::BF16}) {
      for (const bool disk : {false, true}) {
        if (!tried()) continue;
        const OptimizerCase& optimizer = optimizer_named(which);
        const std::string what = fmt::format("{} {}{}", which, dtype_name(work), disk ? " disk" : "");
        const Layout two = {.dp = 2, .stage = 2}, four = {.dp = 4, .stage = 3};
        const Config c = tier_config(two, optimizer, work);
        const Trace want = train_threads(c, 2, 2 * kSteps);
        Serving server(disk ? dir.path() : "", work == DType::BF16);
        const Trace first = train_threads(served(c, server), 2, kSteps);
        server.stop();
        server.start();
        const Trace second = train_threads(served(tier_config(four, optimizer, work), server), 4, 2, 1, going_on());
        const Trace third = train_threads(served(tier_config(four, optimizer, work), server), 4, 1, 1, going_on());
        const Trace fourth = train_threads(served(c, server), 2, 1, 1, going_on());
        std::vector<double> losses = first.losses;
        for (const Trace* t : {&second, &third, &fourth})
          losses.insert(losses.end(), t->losses.begin(), t->losses.end());
        EXPECT_EQ(losses, want.losses) << what;
        EXPECT_EQ(fourth.states, want.states) << what;
        EXPECT_THAT(offload::verify_server(server.name()), ::testing::IsEmpty()) << what;
        // The state that the server writes is the one that the run saved itself.
        const std::string step = offload::dump_server(server.name(), dir / ("dump" + random_hex64()));
        const Trace after = resume(c, two, 1, step);
        const Trace there = train_threads(served(c, server), 2, 1, 1, going_on());
        EXPECT_EQ(after.losses, there.losses) << what;
        EXPECT_EQ(after.states, there.states) << what;
      }
    }
  }
  EXPECT_TRUE(std::ranges::none_of(std::filesystem::directory_iterator(dir.path()), [](const auto& entry) {
    return entry.path().filename().string().starts_with("ds-offload.");
  }));
}

TEST(ServedRuns, CheckpointsAreThoseOfMemory) {
  std::list<Serving> servers;
  expect_the_checkpoints_of_memory({at_servers(servers, "")});
}

// Any bytes over a connection are refused, or the server closes it, and serves the next one.
TEST(ServedRuns, GarbageOverAConnectionIsRefused) {
  const Serving server;
  const Layout two = {.dp = 2, .stage = 2};
  const Config c = tier_config(two, optimizer_named("AdamW"), DType::BF16);
  const Trace want = train_threads(c, 2, kSteps);
  std::minstd_rand random(7);
  const offload::ServerPlace place(server.name());
  for (int round = 0; round < 300; ++round) {
    const offload::Connection connection = offload::Connection::to(place);
    const auto kind = static_cast<offload::Message>(random() % 16);
    if (kind == offload::Message::Stop) continue;
    std::string payload;
    if (kind == offload::Message::Hello && round % 2 == 0) {  // nearly right
      offload::Packer out;
      out.put(offload::kServedVersion);
      out.put(std::string("run"));
      out.put(i64{0});
      out.put(static_cast<i64>(random() % 3));
      out.put(std::string("layout"));
      out.put(random() % 2 == 0);
      offload::ServedSet set{.elems = static_cast<i64>(random()), .chunk_bytes = {4096, -4096, 1}};
      set.parts.resize(random() % 4);
      for (offload::ServedPart& p : set.parts) p.count = static_cast<i64>(random()) << (random() % 40);
      set.window = place.directory + "/mail.none";
      out.put(std::vector<offload::ServedSet>{set});
      payload = out.text();
    }
    const size_t more = random() % 200;
    for (size_t i = 0; i < more; ++i) payload.push_back(static_cast<char>(random()));
    if (random() % 4 == 0) payload.resize(payload.size() / 2);
    try {
      connection.send(kind, payload);
      if (kind != offload::Message::Hello) (void)connection.receive();  // that waits for other ranks
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::Comm) << e.what();
    }
  }
  expect_same_training(train_threads(served(c, server), 2, kSteps), want, "after garbage");
}

}  // namespace served_test
}  // namespace ds::testing
