// SPDX-License-Identifier: Apache-2.0
// ds-infer: continues and scores texts, many at a time, from lines of JSON to lines of JSON.

#include <algorithm>
#include <concepts>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/infer_bench.h"
#include "common/inference.h"
#include "common/prediction.h"
#include "common/ranks.h"
#include "common/reports.h"
#include "common/score_lines.h"
#include "common/stopping.h"
#include "common/text_job.h"
#include "common/text_lines.h"
#include "common/tool.h"

namespace {

using ds::i64;
using ds::tools::add_number;
using ds::tools::Output;

struct Options {
  ds::tools::Inference inference, scoring;
  ds::tools::TextJobOptions job, score_job;
  ds::tools::InferBench bench;
  bool check = false, cuts = false, score_cuts = false;
  // Defaults of lines, instead of those of the model.
  std::optional<i64> max_tokens, top_k;
  std::optional<double> temperature, top_p, min_p;
  ds::u32 seed = 0;

  ds::TextRequest defaults(const ds::TextCodec& codec) const {
    ds::TextRequest r = codec.defaults();
    if (max_tokens) r.max_tokens = *max_tokens;
    if (temperature) r.temperature = *temperature;
    if (top_k) r.top_k = std::max<i64>(*top_k, 0);
    if (top_p) r.top_p = *top_p;
    if (min_p) r.min_p = *min_p;
    r.seed = seed;
    return r;
  }
};

// A model may have more ids than its tokenizer: rows that pad its matrices. `warned`: it has been said.
void warn_of_no_text(const ds::TextCodec& codec, const std::vector<ds::i32>& tokens, bool& warned) {
  if (warned) return;
  const auto found = std::ranges::find_if(tokens, [&](ds::i32 id) { return codec.token_text(id).empty(); });
  if (found == tokens.end()) return;
  warned = true;
  ds::tools::report_warning(fmt::format(
      "the model has written the token {}, which has no text in its tokenizer: such tokens are left out of texts",
      *found));
}

// Answers the lines of the input. `format` makes the format of rank 0; `identity`: beside that of the model.
int run_job(const ds::tools::TextJobOptions& o, const ds::tools::OpenModel& model, const ds::RankInfo& ranks,
            const std::function<std::unique_ptr<ds::tools::LineFormat>(const ds::TextCodec&)>& format,
            const std::function<std::string(const ds::TextCodec&)>& identity, Output& out) {
  ds::tools::check_reports(model.config, model.options, out);
  std::optional<ds::TextCodec> codec;
  std::unique_ptr<ds::tools::LineFormat> lines;
  std::optional<ds::tools::TextJob> job;
  if (ranks.rank == 0) {
    codec.emplace(model.config);
    for (const std::string& warning : codec->warnings()) ds::tools::report_new_warning(warning);
    lines = format(*codec);
    job.emplace(o, *lines, fmt::format("{}; {}; context {}", model.identity, identity(*codec), model.sizes.context),
                out);
  }
  ds::TrainingRun run(model.config, ranks, model.options);
  bool warned = false;
  ds::tools::stop_after_a_step();
  const ds::InferCounts counts = run.infer(model.sizes, {.next = [&](bool waits) { return job->next(waits); },
                                                         .ended = [&] { return job->ended(); },
                                                         .done =
                                                             [&](ds::u64 number, ds::TextResult result) {
                                                               warn_of_no_text(*codec, result.tokens, warned);
                                                               job->done(number, std::move(result));
                                                             },
                                                         .stop_signal = ds::tools::stop_signal});
  if (!job) return 0;
  if (counts.stop_signal != 0) {
    ds::tools::report_error(fmt::format("stopped by a signal after {} lines{}", job->written(),
                                        o.out.empty() ? "" : "; go on with --resume"));
    return o.out.empty() ? 128 + counts.stop_signal : ds::exit_code(ds::Errc::Interrupted);
  }
  job->finish();
  if (ds::tools::verbose())
    ds::tools::report_note(fmt::format(
        "{} texts, {} new tokens in {:.3f} s; {} passes over {} tokens; {} reused, {} texts put off{}", counts.texts,
        counts.new_tokens, counts.seconds, counts.passes, counts.tokens, counts.reused, counts.put_off,
        model.options.draft ? fmt::format("; {} of {} proposed tokens accepted", counts.accepted, counts.proposed)
                            : ""));
  return job->errors() > 0 ? 1 : 0;
}

int run(const Options& o, Output& out) {
  const ds::RankInfo ranks = ds::tools::ranks_of_environment();
  const ds::tools::OpenModel model = o.inference.open(ranks);
  if (o.check) {
    ds::tools::print_session(model.config, ranks, out, model.sizes, model.options.draft);
    return 0;
  }
  const auto identity = [&](const ds::TextCodec& codec) {
    const ds::TextRequest d = o.defaults(codec);
    return fmt::format("texts {} {} {} {} {} {} {} {}", d.max_tokens, d.temperature, d.top_k, d.top_p, d.min_p,
                       d.repetition_penalty, d.seed, o.cuts);
  };
  return run_job(
      o.job, model, ranks,
      [&](const ds::TextCodec& codec) {
        return std::make_unique<ds::tools::TextLines>(codec, o.defaults(codec), model.sizes.context, o.cuts);
      },
      identity, out);
}

int score(const Options& o, Output& out) {
  const ds::RankInfo ranks = ds::tools::ranks_of_environment();
  const ds::tools::OpenModel model = o.scoring.open(ranks);
  return run_job(
      o.score_job, model, ranks,
      [&](const ds::TextCodec& codec) {
        return std::make_unique<ds::tools::ScoreLines>(codec, model.sizes.context, o.score_cuts);
      },
      [&](const ds::TextCodec&) { return fmt::format("scores {}", o.score_cuts); }, out);
}

// Options of the tool itself that stand before or after a subcommand would have no effect.
void check_options(const CLI::App& app, const CLI::App& command) {
  for (const CLI::Option* option : app.get_options()) {
    constexpr std::string_view kOfAll[] = {"json", "output", "quiet", "verbose", "help", "version", "completion"};
    const bool of_all =
        !option->get_lnames().empty() && std::ranges::find(kOfAll, option->get_lnames().front()) != std::end(kOfAll);
    if (option->count() > 0 && !of_all)
      throw ds::Error(ds::Errc::Config,
                      fmt::format("{} has no effect with {}", option->get_name(), command.get_name()));
  }
}

void add_sampling(CLI::App& app, Options& o) {
  constexpr i64 kMost = std::numeric_limits<ds::i32>::max();
  const auto number = [&]<class T>(const char* name, const char* type, std::optional<T>& value, T low, T high,
                                   const char* text) {
    const auto store = [&value, name, low, high](const std::string& given) {
      if constexpr (std::integral<T>) {
        value = ds::tools::parse_integer(name, given, low, high);
      } else {
        value = ds::tools::parse_number(name, given, low, high);
      }
    };
    app.add_option_function<std::string>(name, store, text)->type_name(type)->group("Sampling");
  };
  number("--max-tokens", "N", o.max_tokens, i64{0}, kMost,
         "most new tokens of a line without max_tokens (default 200)");
  number("--temperature", "T", o.temperature, 0.0, 1e6, "0 takes the most likely token");
  number("--top-k", "K", o.top_k, i64{-1}, kMost, "sample among the K most likely tokens; 0 or -1: among all");
  number("--top-p", "P", o.top_p, 0.0, 1.0, "sample among the most likely tokens of together this probability");
  number("--min-p", "P", o.min_p, 0.0, 1.0, "sample among tokens of at least this share of the largest probability");
  add_number(app, "--seed", o.seed, 0, std::numeric_limits<ds::u32>::max(), "seed of lines without one (default 0)")
      ->type_name("N")
      ->group("Sampling");
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  return ds::tools::run_main(
      argc, argv,
      {.name = "ds-infer",
       .purpose = "continue and score texts with a language model",
       .usage = {"[options] MODEL [FILE]", "score [options] MODEL [FILE]", "bench [options] MODEL"},
       .examples = {{"ds-infer model < in.jsonl > out.jsonl", "a line for each line"},
                    {"ds-infer runs/a in.jsonl -o out.jsonl --resume", "go on where a run was stopped"},
                    {"ds-infer score model < in.jsonl", "probabilities of given texts"},
                    {"ds-launch -n 2 ds-infer model in.jsonl --set tensor_parallel.tp_size=2", "on two ranks"}},
       .show_info = true},
      [&](CLI::App& app) -> ds::tools::Body {
        o.inference.add_options(app);
        o.inference.add_draft(app);
        o.job.add_options(app);
        add_sampling(app, o);
        app.add_flag("--cut", o.cuts, "leave out the beginning of a prompt that is too long");
        app.add_flag("--check", o.check, "print the memory that is needed, and stop");
        CLI::App* const scores = app.add_subcommand("score", "compute the probabilities of given texts");
        o.scoring.add_options(*scores);
        o.score_job.add_options(*scores);
        scores->add_flag("--cut", o.score_cuts, "leave out the beginning of a context that is too long");
        CLI::App* const bench = app.add_subcommand("bench", "measure the rates of prompts and of new tokens");
        o.bench.add_options(*bench);
        scores->excludes(bench);
        return [&o, &app, scores, bench](Output& out) {
          for (const CLI::App* command : {scores, bench})
            if (command->parsed()) check_options(app, *command);
          if (scores->parsed()) return score(o, out);
          return bench->parsed() ? o.bench.run(out) : run(o, out);
        };
      });
}
