// SPDX-License-Identifier: Apache-2.0
#pragma once
// The start of a run: random or given weights, a step, or the states that a server keeps.

#include <string>

#include "run/request.h"
#include "run/run_data.h"
#include "run/trained.h"

namespace ds::run {

struct Start {
  std::string step_dir{};         // the step to resume from; empty: none
  std::string weights{};          // initial weights; empty: random ones
  std::string from{};             // what the run continues: step_dir, or a server; empty: nothing
  bool evaluated_before = false;  // whether the run that is continued has evaluated that step; on rank 0

  bool is_from_server() const noexcept { return !from.empty() && from != step_dir; }

  // Sets the engine's state. Where step_dir is damaged and the run resumes from its own latest step, an older step is
  // taken. Collective.
  void load(const Request& request, const RunData& data, Trained& trained);

  // Throws what load() would throw for the step before it reads the bulk. Needs no ranks.
  void check_step(const Request& request, const RunData& data, const engine::ParamTable& table);

 private:
  bool load_from_server(const Request& request, const RunData& data, Trained& trained);
};

}  // namespace ds::run
