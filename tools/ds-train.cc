// SPDX-License-Identifier: Apache-2.0
// ds-train: trains a model as a DeepSpeed configuration describes, evaluates it, and samples from it.

#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <exception>
#include <optional>

#include "common/pictures.h"
#include "common/prediction.h"
#include "common/progress.h"
#include "common/ranks.h"
#include "common/stopping.h"
#include "common/tool.h"
#include "common/writing.h"
#include "ds/config.h"
#include "ds/tokenize.h"
#include "ds/train.h"
#include "ds/units.h"

namespace {

using ds::tools::add_number;
using ds::tools::Output;

struct Options {
  std::string config, out, resume, weights, trace;
  ds::tools::Pictures pictures;
  std::vector<std::string> set;
  ds::i64 steps = 0;  // 0: the configuration's
  ds::tools::Writing writing;
  bool check = false, eval = false;
  std::optional<std::string> tokenize;
};

int train(ds::TrainingRun& run, const ds::Config& config, Output& out) {
  ds::tools::stop_after_a_step();
  ds::TrainResult result;
  {
    ds::tools::ProgressLine progress;
    ds::tools::StepText text;
    ds::TrainHooks hooks;
    hooks.stop_signal = ds::tools::stop_signal;
    hooks.on_step = [&](const ds::StepRecord& r, ds::i64 total) {
      const std::string line = text(r, total);
      progress.show(line);
      if (ds::tools::verbose() && r.step % config.monitors.steps_per_print == 0) ds::tools::report_note(line);
      if (out.json()) out.document(ds::tools::step_document(r), true);
    };
    hooks.on_eval = [&](ds::i64 step, double loss) {
      if (out.json()) out.document({{"type", "eval"}, {"step", step}, {"val_loss", loss}}, true);
    };
    hooks.on_report = ds::tools::report_note;
    result = run.train(hooks);
  }
  if (result.stop_signal != 0) {
    const bool kept = !result.checkpoint.empty();
    ds::tools::report_error(fmt::format("stopped by a signal after step {}; {}", result.step,
                                        kept ? result.checkpoint + " is committed: run again with --resume latest"
                                             : std::string("without --out nothing was kept")));
    return kept ? ds::exit_code(ds::Errc::Interrupted) : 128 + result.stop_signal;
  }
  const double tokens_per_s = result.seconds > 0 ? static_cast<double>(result.tokens) / result.seconds : 0;
  if (out.json()) {
    out.document({{"type", "result"},
                  {"step", result.step},
                  {"loss", result.loss},
                  {"val_loss", result.val_loss},
                  {"skipped_steps", result.skipped_steps},
                  {"tokens", result.tokens},
                  {"seconds", result.seconds},
                  {"tokens_per_s", tokens_per_s},
                  {"checkpoint", result.checkpoint},
                  {"memory", ds::tools::memory_json(result.memory)},
                  {"files", ds::tools::memory_json(result.files)}},
                 true);
    return 0;
  }
  if (result.first_step > result.step) {  // a warning has said why
    if (!std::isnan(result.val_loss)) out.print("step {}  val_loss {:.4f}\n", result.step, result.val_loss);
    return 0;
  }
  out.print("step {}  loss {:.4f}", result.step, result.loss);
  if (!std::isnan(result.val_loss)) out.print("  val_loss {:.4f}", result.val_loss);
  out.print("  {:.0f} tok/s  {}", tokens_per_s, ds::tools::duration(result.seconds));
  if (result.skipped_steps > 0) out.print("  {} steps skipped", result.skipped_steps);
  if (!result.checkpoint.empty()) out.print("\ncheckpoint {}", result.checkpoint);
  out.print("\n\nmemory of rank 0       predicted           peak\n");
  for (const auto& m : result.memory)
    out.print("  {:<14} {:>15} {:>14}{}{}\n", m.tag, ds::bytes_text(m.predicted), ds::bytes_text(m.counted),
              m.bound == ds::Bound::Exact ? "" : " ", ds::bound_text(m.bound));
  for (const auto& m : result.files)
    out.print("  {:<14} {:>15} {:>14} {}\n", m.tag, ds::bytes_text(m.predicted), ds::bytes_text(m.counted),
              ds::tools::place_of_offloaded(config, m.tag));
  const ds::OffloadTraffic& moved = result.offload;
  const ds::i64 steps = result.step - result.first_step + 1;
  if (moved.to_host_bytes)
    out.print("\noffload: {} to the host and {} to the GPU a step\n", ds::bytes_text(*moved.to_host_bytes / steps),
              ds::bytes_text(moved.to_device_bytes.value_or(0) / steps));
  if (result.files.empty()) return 0;
  const bool served = config.zero.offload_optimizer.device == ds::OffloadDevice::Server;
  if (moved.read_bytes == 0 && moved.written_bytes == 0) {
    out.print("\noffload: {} ({})\n",
              served ? "no step was taken" : "all of it fits in its buffers, and nothing went to files",
              result.offload_method);
    return 0;
  }
  const std::optional<double> hidden = moved.hidden();
  out.print("\noffload: {} read and {} written a step, {:.1f} ms waited for{} ({})\n",
            ds::bytes_text(moved.read_bytes / steps), ds::bytes_text(moved.written_bytes / steps),
            moved.wait_ms / static_cast<double>(steps), hidden ? fmt::format(", {:.0f} % hidden", 100 * *hidden) : "",
            result.offload_method);
  return 0;
}

int run(Options& o, const CLI::App& app, Output& out) {
  o.pictures.open(app, out.tool());
  const ds::RankInfo ranks = ds::tools::ranks_of_environment();
  const bool training = !o.eval && !o.writing && !o.check;
  if ((o.eval || o.writing) && !o.out.empty() && o.resume != "latest")
    throw ds::Error(ds::Errc::Config, fmt::format("--out excludes {} without --resume latest: nothing is written",
                                                  o.eval ? "--eval" : "--generate"));
  std::vector<std::string> set = o.set;
  if (o.steps > 0) set.push_back(fmt::format("steps={}", o.steps));
  const ds::ConfigUse use = o.writing ? ds::ConfigUse::Generate
                            : o.eval  ? ds::ConfigUse::Evaluate
                                      : ds::ConfigUse::Train;
  const ds::ConfigResult loaded = ds::load_config(o.config, set, ranks.world_size, use);
  // Most often every rank reads the same text, and rank 0 reports its mistakes for all. A rank with a mistake of its
  // own waits until it is clear that rank 0 has none.
  const bool speaks = ranks.rank == 0 || (!loaded.ok() && !ds::has_failed_within(ranks, 0, 3));
  for (const ds::Diagnostic& d : loaded.diagnostics) {
    if (!speaks) break;
    const bool error = d.severity == ds::Severity::Error;
    (error ? ds::tools::report_error : ds::tools::report_warning)(ds::to_string(d));
  }
  if (!loaded.ok()) return ds::exit_code(loaded.code());
  ds::Config config = loaded.config;
  if (o.writing) config.data.train.clear();
  // Before waiting for other ranks.
  ds::EncodedPrompt encoded;
  try {
    if (o.writing) encoded = ds::encode_prompt(config, *o.writing.prompt, o.writing.sampling);
  } catch (const ds::Error& e) {
    if (ranks.rank == 0 || !ds::has_failed_within(ranks, 0, 3)) throw;
    return ds::exit_code(e.code());
  }
  ds::RunOptions options{o.out, o.resume, o.weights, o.trace, o.config == "-" ? "" : o.config};
  options.read_only = o.eval || o.writing;
  if (o.writing) options.session = ds::session_sizes(encoded);
  // Compared with every file that the configuration names, even if this run does not read it.
  if (ranks.rank == 0) o.pictures.check(out, loaded.config, options);
  if (o.check) {
    std::optional<ds::TokenizedText> tokenized;
    if (o.tokenize) tokenized = ds::tokenize_text(loaded.config, *o.tokenize);
    ds::RunDocuments documents;
    std::exception_ptr failed;  // thrown after the prediction, which does not need the files
    try {
      documents = ds::TrainingRun::check(config, ranks, options);
    } catch (const ds::Error&) {
      failed = std::current_exception();
    }
    ds::tools::print_prediction(config, ranks, out, options.session, tokenized ? &*tokenized : nullptr, documents);
    // Those of the run's own texts have been said.
    if (tokenized && ranks.rank == 0) {
      for (const std::string& warning : tokenized->warnings) ds::tools::report_new_warning(warning);
    }
    if (tokenized && tokenized->bad_ends) throw *tokenized->bad_ends;
    if (failed) std::rethrow_exception(failed);
    o.pictures.write(config, ranks.world_size);
    return 0;
  }
  if (training && o.out.empty() && ranks.rank == 0)
    ds::tools::report_warning("no --out: this run keeps neither checkpoints nor metrics");

  ds::TrainingRun run(config, ranks, options);
  if (training) return train(run, config, out);
  if (o.eval) {
    const double loss = run.evaluate();
    if (out.json()) {
      out.document({{"step", run.step()}, {"val_loss", loss}});
    } else {
      out.print("step {}  val_loss {:.6f}\n", run.step(), loss);
    }
    return 0;
  }
  ds::tools::write_text(run, o.writing, encoded, out);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  return ds::tools::run_main(
      argc, argv,
      {.name = "ds-train",
       .purpose = "train, evaluate and sample a transformer model",
       .usage = {"[options] CFG.json"},
       .examples = {{"ds-launch -n 2 ds-train cfg.json --out runs/a", "train on two ranks"},
                    {"ds-train cfg.json --check",
                     "validate, and print the complete configuration and the memory it needs"},
                    {"ds-launch -n 4 ds-train cfg.json --out runs/a --resume latest",
                     "resume, here on another number of ranks"},
                    {"ds-train cfg.json --resume runs/a --generate 'In the beginning'", "sample from a checkpoint"}},
       .show_info = true},
      [&](CLI::App& app) -> ds::tools::Body {
        app.add_option("CFG", o.config, "configuration file; - reads standard input")->required()->type_name("FILE");
        app.add_option("--out", o.out, "run directory: metrics.jsonl and checkpoints")->type_name("DIR");
        app.add_option("--resume", o.resume, "resume from a checkpoint: latest (of --out), or a step or run directory")
            ->type_name("DIR");
        app.add_option("--weights", o.weights,
                       "initial weights: a safetensors, HDF5 or PyTorch file, a model directory, a checkpoint")
            ->type_name("FILE")
            ->check([](const std::string& path) {
              return ::access(path.c_str(), F_OK) == 0 ? "" : fmt::format("{}: {}", path, std::strerror(errno));
            })
            ->excludes("--resume");
        CLI::Option* steps = add_number(app, "--steps", o.steps, 1, ds::kMostCount,
                                        "optimizer steps of the run (overrides the key steps)")
                                 ->type_name("N");
        app.add_option("--set", o.set, "override a key: a.b=value; may be given again")
            ->type_name("KEY=VALUE")
            ->allow_extra_args(false);
        CLI::Option* check =
            app.add_flag("--check", o.check, "validate, print the complete configuration and the prediction, and stop");
        app.add_option("--tokenize", o.tokenize,
                       "with --check: show the tokens of this text, and the files that name special tokens")
            ->type_name("TEXT")
            ->needs(check);
        CLI::Option* trace = app.add_option("--trace", o.trace, "write a timeline of the first 5 steps, for Perfetto");
        trace->type_name("FILE")->excludes(check);
        o.pictures.add_options(app, check);
        CLI::Option* eval =
            app.add_flag("--eval", o.eval, "print the validation loss and stop")->excludes(steps)->excludes(trace);
        o.writing.add_options(app, {eval, steps, trace});
        return [&](Output& out) { return run(o, app, out); };
      });
}
