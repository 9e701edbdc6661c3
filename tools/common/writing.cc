// SPDX-License-Identifier: Apache-2.0
#include "common/writing.h"

#include <limits>
#include <string_view>
#include <vector>

#include "common/foreign.h"

namespace ds::tools {

void Writing::add_options(CLI::App& app, std::initializer_list<CLI::Option*> excluded) {
  constexpr const char* kGroup = "Generating";
  CLI::Option* generate =
      app.add_option("--generate", prompt, "continue this text and stop")->type_name("PROMPT")->group(kGroup);
  for (CLI::Option* option : excluded) generate->excludes(option);
  constexpr i64 kMostTokens = std::numeric_limits<i32>::max();
  const std::vector<CLI::Option*> sampled = {
      add_number(app, "--max-tokens", sampling.max_tokens, 1, kMostTokens, "the most tokens to write (default 200)")
          ->type_name("N"),
      add_number(app, "--temperature", sampling.temperature, 0, 1e6,
                 "sampling temperature; 0 takes the most likely token (default 0.8)")
          ->type_name("T"),
      add_number(app, "--top-k", sampling.top_k, 0, kMostTokens,
                 "sample among the K most likely tokens; 0: among all (default 0)")
          ->type_name("K"),
      add_number(app, "--seed", sampling.seed, 0, std::numeric_limits<u32>::max(), "seed of the sampling (default 0)")
          ->type_name("N")};
  for (CLI::Option* option : sampled) option->needs(generate)->group(kGroup);
  const std::string moved = "ds-infer MODEL FILE continues the prompts of a file of JSON Lines";
  add_foreign(app, {{"--prompts", {}, moved}, {"--batch", {}, moved}});
}

void write_text(TrainingRun& run, const Writing& writing, const EncodedPrompt& encoded, Output& out) {
  std::string text;
  std::vector<i32> tokens;
  const auto add = [&](std::string_view piece) {
    text += piece;
    if (!out.json()) out.to_terminal() ? out.write(piece) : out.data(piece);  // a terminal would interpret it
  };
  run.generate(encoded, {.token =
                             [&](i32 id, std::string_view piece) {
                               tokens.push_back(id);
                               add(piece);
                             },
                         .ended = add});
  if (!out.json()) return out.write("\n");
  out.document({{"step", run.step()}, {"prompt", *writing.prompt}, {"text", text}, {"tokens", tokens}});
}

}  // namespace ds::tools
