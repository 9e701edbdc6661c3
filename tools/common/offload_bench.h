// SPDX-License-Identifier: Apache-2.0
#pragma once
// ds-offload bench: its options, and its tables.

#include <string>
#include <vector>

#include "common/tool.h"
#include "ds/offload.h"

namespace ds::tools {

struct BenchArguments {
  offload::FileOptions files;
  offload::UpdateOptions updates;
  std::string size = "1GiB";
  std::vector<std::string> block_sizes{"256KiB", "1MiB", "4MiB"};
};

void add_bench_options(CLI::App& command, BenchArguments& a);
int bench(BenchArguments& a, Output& out);

}  // namespace ds::tools
