// SPDX-License-Identifier: Apache-2.0
#include "common/writing.h"

#include <filesystem>
#include <limits>

namespace ds::tools {
namespace {

using Json = nlohmann::ordered_json;

struct Written {
  std::string text;
  std::vector<i32> tokens;
  bool ended = false;
};

void write_one(TrainingRun& run, std::span<const Prompt> prompts, const EncodedPrompts& encoded, Output& out) {
  Written written;
  const auto add = [&](std::string_view piece) {
    written.text += piece;
    if (!out.json()) out.to_terminal() ? out.write(piece) : out.data(piece);  // a terminal would interpret it
  };
  run.generate(encoded, {.token =
                             [&](size_t, i32 id, std::string_view piece) {
                               written.tokens.push_back(id);
                               add(piece);
                             },
                         .ended = [&](size_t, std::string_view rest) { add(rest); }});
  if (!out.json()) return out.write("\n");
  out.document({{"step", run.step()}, {"prompt", prompts[0].text}, {"text", written.text}, {"tokens", written.tokens}});
}

void write_all(TrainingRun& run, std::span<const Prompt> prompts, const EncodedPrompts& encoded, Output& out) {
  std::vector<Written> written(prompts.size());
  size_t next = 0;
  const auto show = [&] {
    for (; next < written.size() && written[next].ended; ++next) {
      const Prompt& prompt = prompts[next];
      Json line = prompt.fields.empty() ? Json{{"prompt", prompt.text}} : Json::object();
      line["text"] = written[next].text;
      line["tokens"] = written[next].tokens;
      out.document(line, true, prompt.fields);
      written[next] = {.text = {}, .tokens = {}, .ended = true};
    }
  };
  run.generate(encoded, {.token =
                             [&](size_t p, i32 id, std::string_view piece) {
                               written[p].tokens.push_back(id);
                               written[p].text += piece;
                             },
                         .ended =
                             [&](size_t p, std::string_view rest) {
                               written[p].text += rest;
                               written[p].ended = true;
                               show();
                             }});
}

}  // namespace

void Writing::add_options(CLI::App& app, std::initializer_list<CLI::Option*> excluded) {
  constexpr const char* kGroup = "Generating";
  CLI::Option* generate =
      app.add_option("--generate", prompt, "continue this text and stop")->type_name("PROMPT")->group(kGroup);
  CLI::Option* prompts = app.add_option("--prompts", file,
                                        "continue the prompts of a file, one per line or JSON Lines, and stop; - reads "
                                        "standard input")
                             ->type_name("FILE")
                             ->excludes(generate)
                             ->group(kGroup);
  for (CLI::Option* option : excluded) {
    generate->excludes(option);
    prompts->excludes(option);
  }
  constexpr i64 kMostTokens = std::numeric_limits<i32>::max();
  std::vector<CLI::Option*> sampled = {
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
  add_number(app, "--batch", sampling.at_once, 1, kMostTokens,
             "prompts of --prompts in progress at one time (default 64)")
      ->type_name("N")
      ->needs(prompts)
      ->group(kGroup);
  for (CLI::Option* option : sampled) option->group(kGroup);
  app.callback([this, sampled] {
    for (const CLI::Option* option : sampled) {
      if (option->count() > 0 && !*this) throw CLI::RequiresError(option->get_name(), "--generate or --prompts");
    }
  });
}

std::vector<Prompt> Writing::read(const RankInfo& ranks) const {
  if (prompt) return {{*prompt}};
  if (file.empty()) return {};
  if (file == "-" && ranks.world_size > 1)
    throw Error(Errc::Config,
                fmt::format("--prompts: only one of {} ranks can read standard input; name a file", ranks.world_size));
  std::error_code ignored;
  if (ranks.world_size > 1 && std::filesystem::exists(file, ignored) && !std::filesystem::is_directory(file, ignored) &&
      !std::filesystem::is_regular_file(file, ignored))
    throw Error(Errc::Config, fmt::format("--prompts {}: {} ranks read it, and it can be read only once; name a file",
                                          file, ranks.world_size));
  return read_prompts(file);
}

void write_text(TrainingRun& run, const Writing& writing, std::span<const Prompt> prompts,
                const EncodedPrompts& encoded, Output& out) {
  writing.prompt ? write_one(run, prompts, encoded, out) : write_all(run, prompts, encoded, out);
}

}  // namespace ds::tools
