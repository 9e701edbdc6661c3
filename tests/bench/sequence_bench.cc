// SPDX-License-Identifier: Apache-2.0
// Measures the memory and time of sequences, by length, that are cut over two ranks and whose layers are computed
// again:
//   sequence_bench [CONFIG [LONGEST [STEPS [KEY=VALUE]...]]]     default: configs/gpt2-long.json 32768 1
// Lengths from 4096 on, doubled; ring and ulysses; beside them one rank alone and one that keeps all activations. Bytes
// are those that the ledger of the larger rank counted, over a run of STEPS; memory that does not depend on the length
// (weights and optimizer) is apart. Per token they are constant if memory is linear. STEPS 0 takes all memory and no
// step.

#include "bench/arrangement.h"

using namespace ds;
using namespace ds::bench;

namespace {

struct Bytes {
  double states = 0, activations = 0, rest = 0;
  double by_length() const { return activations + rest; }
};

Bytes bytes_of(const Arrangement& a) {
  Bytes largest;
  for (int rank = 0; rank < a.num_ranks(); ++rank) {
    Bytes b;
    for (size_t t = 0; t < static_cast<size_t>(Tag::Count); ++t) {
      const Tag tag = static_cast<Tag>(t);
      const double bytes = static_cast<double>(a.ledger(rank).peak(tag));
      switch (tag) {
        case Tag::Params:
        case Tag::Grads:
        case Tag::GradAccum:
        case Tag::Master:
        case Tag::Optimizer:
        case Tag::Buckets:
        case Tag::Gathered: b.states += bytes; break;
        case Tag::Activations: b.activations += bytes; break;
        default: b.rest += bytes;
      }
    }
    if (b.by_length() > largest.by_length()) largest = b;
  }
  return largest;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string path = argc > 1 ? argv[1] : "configs/gpt2-long.json";
  const i64 longest = argc > 2 ? std::atol(argv[2]) : 32768;
  const int steps = argc > 3 ? std::atoi(argv[3]) : 1;
  struct Cut {
    const char* name;
    int ranks;
    const char *mode, *granularity;
    bool timed;
  };
  constexpr Cut kCuts[] = {{"ring, 2 ranks", 2, "ring", "layer", true},
                           {"ulysses, 2 ranks", 2, "ulysses", "layer", true},
                           {"one rank", 1, "ulysses", "layer", false},
                           {"one rank, all kept", 1, "ulysses", "none", false}};
  std::printf("%s, one thread per rank; MiB of the larger rank\n\n", path.c_str());
  std::printf("%-20s %8s %8s %12s %10s %14s %10s %12s\n", "", "tokens", "states", "activations", "the rest",
              "bytes/token", "s/step", "loss");
  for (const Cut& cut : kCuts) {
    for (i64 T = 4096; T <= longest; T *= 2) {
      std::vector<std::string> set(argv + std::min(argc, 4), argv + argc);
      for (const std::string& s :
           {fmt::format("data.seq_length={}", T), fmt::format("model.n_positions={}", longest),
            fmt::format("sequence_parallel_size={}", cut.ranks), fmt::format("sequence_parallel_mode={}", cut.mode),
            fmt::format("activation_checkpointing.granularity={}", cut.granularity)})
        set.push_back(s);
      Arrangement a(cut.name, path, set, cut.ranks, 1);
      const bool timed = cut.timed && steps > 0;
      for (int step = 0; timed && step < steps; ++step) a.step();
      const Bytes b = bytes_of(a);
      const double mib = 1024.0 * 1024.0;
      std::printf("%-20s %8ld %8.1f %12.2f %10.2f %14.1f %10s %12s\n", cut.name, T, b.states / mib, b.activations / mib,
                  b.rest / mib, b.by_length() / static_cast<double>(T),
                  timed ? fmt::format("{:.2f}", a.wall()).c_str() : "-",
                  timed ? fmt::format("{:.4f}", a.last().loss).c_str() : "-");
      std::fflush(stdout);
    }
  }
  return 0;
}
