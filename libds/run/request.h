// SPDX-License-Identifier: Apache-2.0
#pragma once
// The request for a run: its configuration, its place among the ranks, and its options.

#include "ds/train.h"
#include "monitor/monitor.h"

namespace ds::run {

struct Request {
  Config config;
  RankInfo ranks;
  RunOptions options;

  bool is_root() const noexcept { return ranks.rank == 0; }
  bool writes() const noexcept { return !options.out_dir.empty() && !options.read_only; }

  // The places from which the run reads, and to which it may not write.
  monitor::Places places() const;

  // Rank 0 and --check look for these; neither opens what it finds. Throw Errc::Config, Errc::Unavailable or Errc::Io,
  // naming the option.
  std::string find_step() const;     // the step directory to resume from; empty: none
  std::string find_weights() const;  // the initial weights; empty: random ones
};

}  // namespace ds::run
