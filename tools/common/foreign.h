// SPDX-License-Identifier: Apache-2.0
#pragma once
// Options of other tools of the field, for command lines and habits that come from them. What means the same here is
// taken; for the rest the error names our option. --help does not list them: the manual's COMPATIBILITY does.
//
// A further spelling of an option of ours is no row here: it stands behind the first long name, as in
// add_option("-b,--min-bytes,--minbytes"), and only the first is shown.

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "common/tool.h"
#include "ds/launch.h"

namespace ds::tools {

struct ForeignOption {
  std::string names;                  // as of add_option; "-" in long ones stands for "_" as well
  std::vector<std::string> accepted;  // values that ask for what happens here anyway
  std::string instead;                // for others: what to do
  bool flag = false;                  // takes no value; refused unless `instead` is empty
};

void add_foreign(CLI::App& app, const std::vector<ForeignOption>& options);
// "--a-b,--c" with "--a_b" behind.
std::string both_spellings(const std::string& names);

std::vector<ForeignOption> options_of_nccl_tests();
CLI::Validator named_average();  // of its -a, 0 to 3: our names of them
// The options of torchrun, deepspeed, mpirun and accelerate launch.
std::vector<ForeignOption> options_of_launchers();

// How they say how many ranks there are: --nproc-per-node and --nnodes, by their names.
struct RanksPerNode {
  int ranks = 0, nodes = 0;  // 0: not given
};
void add_ranks_per_node(CLI::App& app, RanksPerNode& given);
// Throws Errc::Config where the hosts or the number of ranks say something else.
void apply(const RanksPerNode& given, LaunchOptions& options);

}  // namespace ds::tools
