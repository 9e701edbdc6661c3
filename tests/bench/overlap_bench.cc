// SPDX-License-Identifier: Apache-2.0
// Measures how much of its communication a ZeRO step hides behind computation: two ranks of one thread each, over a
// link of known latency and bandwidth (delayed_communicator.h) or none, with overlap_comm and without, in turns.
//   overlap_bench CONFIG [TURNS [LATENCY_US [MB_PER_S [KEY=VALUE]...]]]
// Hidden: (step without overlap - step with overlap) / time on the link. Of the possible: the same beside the shorter
// of computation and communication, which nothing can better.

#include "bench/arrangement.h"
#include "bench/delayed_communicator.h"

using namespace ds;
using namespace ds::bench;

int main(int argc, char** argv) {
  if (argc < 2)
    return std::fprintf(stderr, "usage: overlap_bench CFG.json [TURNS [LATENCY_US [MB_PER_S [KEY=VALUE]...]]]\n"), 2;
  const int turns = argc > 2 ? std::max(1, std::atoi(argv[2])) : 7;
  const double latency_us = argc > 3 ? std::atof(argv[3]) : 50, mb_per_s = argc > 4 ? std::atof(argv[4]) : 250;

  std::vector<std::unique_ptr<Arrangement>> all;
  std::vector<std::shared_ptr<Link>> links;  // of rank 0, of each arrangement
  const auto add = [&](int stage, bool overlap, bool slow) {
    std::vector<std::string> set;
    for (int i = 5; i < argc; ++i) set.emplace_back(argv[i]);
    set.push_back(fmt::format("zero_optimization.stage={}", stage));
    set.push_back(fmt::format("zero_optimization.overlap_comm={}", overlap));
    std::shared_ptr<Link> first;
    all.push_back(std::make_unique<Arrangement>(
        fmt::format("zero-{}", stage), argv[1], set, 2, 1, [&](std::unique_ptr<Communicator> comm) {
          if (!slow) return comm;
          const auto link = std::make_shared<Link>(1e-6 * latency_us, 1e6 * mb_per_s);
          if (comm->rank() == 0) first = link;
          return std::unique_ptr<Communicator>(std::make_unique<DelayedCommunicator>(std::move(comm), link, !overlap));
        }));
    links.push_back(first);
  };
  for (int stage : {2, 3}) {
    add(stage, true, false);
    add(stage, false, true);
    add(stage, true, true);
  }
  take_turns(all, turns);

  const Arrangement& one = *all.front();
  std::printf(
      "%s, 2 ranks of 1 thread, %ld micro-batches, %s on the wire; link: %.0f us, %.0f MB/s; medians of %d turns\n\n",
      argv[1], one.config().batch.accumulation, std::string(dtype_name(one.config().wire_dtype())).c_str(), latency_us,
      mb_per_s, turns);
  std::printf("%-8s %12s %12s %14s %14s %9s %16s\n", "", "no link ms", "on link ms", "no overlap ms", "overlap ms",
              "hidden", "of the possible");
  for (size_t i = 0; i < all.size(); i += 3) {
    const double alone = all[i]->wall(), without = all[i + 1]->wall(), with = all[i + 2]->wall();
    const double on_link = links[i + 2]->busy() / (turns + 1), hidden = without - with;
    std::printf("%-8s %12.1f %12.1f %14.1f %14.1f %8.0f%% %15.0f%%\n", all[i]->name().c_str(), 1e3 * alone,
                1e3 * on_link, 1e3 * without, 1e3 * with, 100 * hidden / on_link,
                100 * hidden / std::min(alone, on_link));
  }
  return 0;
}
