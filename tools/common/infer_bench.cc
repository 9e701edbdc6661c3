// SPDX-License-Identifier: Apache-2.0
#include "common/infer_bench.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "common/progress.h"
#include "common/ranks.h"

namespace ds::tools {
namespace {

struct Test {
  bool generates;
  i64 tokens, parallel;
  std::string name() const {
    return fmt::format("{}{}{}", generates ? "tg" : "pp", tokens, parallel > 1 ? fmt::format(" x{}", parallel) : "");
  }
};

struct Rate {
  double mean = 0, deviation = 0;  // tokens per second, of all texts together
};

// Texts of equal length, whose tokens do not matter; no two begin alike.
InferHooks hooks_of(const Test& test, i64 vocab) {
  i64 given = 0;
  const auto next = [=](bool) mutable -> std::optional<TextRequest> {
    if (given == test.parallel) return std::nullopt;
    TextRequest r;
    r.max_tokens = test.generates ? test.tokens : 1;
    r.temperature = 0;
    r.ignore_end = true;
    for (i64 t = 0, n = test.generates ? 1 : test.tokens; t < n; ++t)
      r.tokens.push_back(static_cast<i32>((given * 7919 + t * 104729 + 17) % vocab));
    ++given;
    return r;
  };
  return {.next = next,
          .ended = [] { return true; },
          .done =
              [](u64, const TextResult& r) {
                if (!r.error.empty()) throw Error(Errc::Numeric, r.error);
              }};
}

}  // namespace

void InferBench::add_options(CLI::App& app) {
  inference.add_options(app, /*with_sizes=*/false);
  inference.add_draft(app);
  constexpr i64 kMost = std::numeric_limits<i32>::max();
  const auto list = [&](const char* name, std::vector<i64>& values, const char* text) {
    app.add_option_function<std::vector<std::string>>(
           name,
           [this, &values, name = main_name(name)](const std::vector<std::string>& given) {
             named.insert(&values);
             values.clear();
             for (const std::string& one : given)
               if (const i64 n = parse_integer(name, one, 0, kMost); n > 0) values.push_back(n);
           },
           text)
        ->delimiter(',')
        ->allow_extra_args(false)
        ->type_name("N,...");
  };
  list("-p,--prompt", prompts, "tokens of a prompt; 0: no test of prompts (default 512)");
  list("-n,--generate", generated, "new tokens of a text; 0: no test of them (default 128)");
  list("--parallel,--npl", parallel, "texts side by side (default 1)");
  add_number(app, "-r,--repetitions", repetitions, 1, 1000,
             "runs of each test, after one that does not count (default 5)")
      ->type_name("N");
}

int InferBench::run(Output& out) {
  const RankInfo ranks = ranks_of_environment();
  if (parallel.empty()) parallel = {1};
  std::vector<Test> tests;
  for (const i64 n : parallel) {
    for (const i64 p : prompts) tests.push_back({false, p, n});
    for (const i64 g : generated) tests.push_back({true, g, n});
  }
  if (tests.empty()) throw Error(Errc::Config, "neither --prompt nor --generate names a test");
  Inference wanted = inference;
  if (!named.contains(&prompts) || !named.contains(&generated)) {
    // As much of a default as the model has positions for.
    const i64 positions = inference.open(ranks).sizes.context;
    for (Test& test : tests) {
      if (!named.contains(test.generates ? &generated : &prompts)) test.tokens = std::min(test.tokens, positions - 1);
    }
  }
  wanted.batch = *std::ranges::max_element(parallel);
  wanted.context = 2;
  for (const Test& test : tests) wanted.context = std::max(wanted.context, test.tokens + 1);
  OpenModel model = wanted.open(ranks);
  // Each text has room for all of its blocks.
  model.sizes.cached = 0;
  model.options.session = model.sizes;
  TrainingRun run(model.config, ranks, model.options);
  ProgressLine progress;
  for (const Test& test : tests) {
    std::vector<double> rates;
    i64 proposed = 0, accepted = 0;
    SessionSizes sizes = model.sizes;
    sizes.at_once = test.parallel;
    for (i64 i = 0; i <= repetitions; ++i) {
      const InferCounts counts = run.infer(sizes, hooks_of(test, model.config.model.vocab_size));
      if (i > 0) proposed += counts.proposed, accepted += counts.accepted;
      if (i > 0) rates.push_back(static_cast<double>(test.tokens * test.parallel) / counts.seconds);
      if (progress.is_due()) progress.show(fmt::format("{}  {}/{}", test.name(), i, repetitions));
    }
    double mean = 0, squares = 0;
    for (const double x : rates) mean += x / static_cast<double>(rates.size());
    for (const double x : rates) squares += (x - mean) * (x - mean);
    const double deviation = rates.size() > 1 ? std::sqrt(squares / static_cast<double>(rates.size() - 1)) : 0;
    if (ranks.rank > 0) continue;
    const bool drafts = model.options.draft.has_value();
    const double share = proposed > 0 ? static_cast<double>(accepted) / static_cast<double>(proposed) : 0;
    if (out.json()) {
      nlohmann::ordered_json line = {{"test", test.name()},  {"tokens", test.tokens},  {"parallel", test.parallel},
                                     {"tokens_per_s", mean}, {"deviation", deviation}, {"rates", rates}};
      if (drafts) line.update({{"proposed", proposed}, {"accepted", accepted}, {"accepted_share", share}});
      out.document(line, true);
      continue;
    }
    // A prompt and its only token need no proposals.
    const auto print = [&](std::string_view name, std::string_view rate, std::string_view accepted_share) {
      out.print("| {:<16} | {:>18} |", name, rate);
      if (drafts) out.print(" {:>8} |", accepted_share);
      out.print("\n");
    };
    if (&test == &tests.front()) {
      print("test", "t/s", "accepted");
      out.print("| {:-<16} | {:->17}: |{}\n", "", "", drafts ? " -------: |" : "");
    }
    print(test.name(), fmt::format("{:.2f} ± {:.2f}", mean, deviation),
          proposed > 0 ? fmt::format("{:.1f} %", 100 * share) : "");
  }
  return 0;
}

}  // namespace ds::tools
