// SPDX-License-Identifier: Apache-2.0
#pragma once
// Options of other tools, for command lines written for them. An option with the same meaning is accepted; for the
// others the error names the option to use instead. --help does not list them: the manual's COMPATIBILITY does.
//
// Another spelling of one of our options has no row here: it follows the first long name, as in
// add_option("-b,--min-bytes,--minbytes"), and help shows only the first.

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "common/tool.h"
#include "ds/launch.h"

namespace ds::tools {

struct ForeignOption {
  std::string names;                  // as in add_option; "-" in long names also stands for "_"
  std::vector<std::string> accepted;  // values that ask for the fixed behaviour
  std::string instead;                // advice for other values
  bool flag = false;                  // takes no value; refused unless `instead` is empty
};

void add_foreign(CLI::App& app, const std::vector<ForeignOption>& options);
// "--a-b,--c" with ",--a_b" appended.
std::string both_spellings(const std::string& names);

std::vector<ForeignOption> options_of_nccl_tests();
CLI::Validator named_average();  // of its -a, 0 to 3: our names of them
// The options of torchrun, deepspeed, mpirun and accelerate launch.
std::vector<ForeignOption> options_of_launchers();

// The number of ranks as other launchers give it: --nproc-per-node and --nnodes.
struct RanksPerNode {
  int ranks = 0, nodes = 0;  // 0: not given
};
void add_ranks_per_node(CLI::App& app, RanksPerNode& given);
// Throws Errc::Config if these contradict the hosts or the number of ranks.
void apply(const RanksPerNode& given, LaunchOptions& options);

}  // namespace ds::tools
