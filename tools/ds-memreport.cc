// SPDX-License-Identifier: Apache-2.0
// ds-memreport: what a run needs.

#include <optional>

#include "common/copying.h"
#include "common/tool.h"
#include "ds/memreport.h"

namespace {

using namespace ds;
using tools::add_number;
using tools::Output;
using Json = nlohmann::ordered_json;

struct Arguments {
  std::string source, plot, memory, dtype, checkpointing, device;
  std::vector<std::string> set;
  double params = 0;
  int ranks = 0, nodes = 1;                                                     // ranks 0: the source's
  i64 tp = 0, pp = 0, sp = 0, micro = 0, accumulation = 0, batch = 0, seq = 0;  // 0: as the configuration says
  int stage = -1;
  bool explain = false, all = false;
};

// What options say is said as --set would say it.
std::vector<std::string> overrides_of(const Arguments& a) {
  std::vector<std::string> set;
  const auto number = [&](const char* key, i64 value) {
    if (value > 0) set.push_back(fmt::format("{}={}", key, value));
  };
  number("tensor_parallel.tp_size", a.tp);
  number("pipeline.stages", a.pp);
  number("sequence_parallel_size", a.sp);
  number("data.seq_length", a.seq);
  if (a.stage >= 0) set.push_back(fmt::format("zero_optimization.stage={}", a.stage));
  // Two of the three sizes give the third: what is not given follows.
  if (a.batch > 0 || a.micro > 0 || a.accumulation > 0) {
    const auto size = [&](const char* key, i64 value, bool follows) {
      if (value > 0 || follows)
        set.push_back(value > 0 ? fmt::format("{}={}", key, value) : fmt::format("{}=auto", key));
    };
    size("train_batch_size", a.batch, true);
    size("train_micro_batch_size_per_gpu", a.micro, a.batch > 0 && a.accumulation > 0);
    size("gradient_accumulation_steps", a.accumulation, a.batch > 0);
  }
  if (!a.dtype.empty()) {
    set.push_back(fmt::format("bf16.enabled={}", a.dtype == "bf16"));
    set.push_back(fmt::format("fp16.enabled={}", a.dtype == "fp16"));
  }
  if (!a.checkpointing.empty()) set.push_back(fmt::format("activation_checkpointing.granularity={}", a.checkpointing));
  set.insert(set.end(), a.set.begin(), a.set.end());
  return set;
}

int of_params(const Arguments& a, Output& out) {
  const int stage = std::max(a.stage, 0), ranks = std::max(a.ranks, 1);
  const memreport::PaperStates s = memreport::paper_states(a.params, stage, ranks);
  if (out.json()) {
    out.document({{"params", a.params},
                  {"world_size", ranks},
                  {"stage", stage},
                  {"accounting", "ZeRO paper"},
                  {"model_states_bytes", s.params + s.grads + s.optimizer},
                  {"params_bytes", s.params},
                  {"grads_bytes", s.grads},
                  {"optimizer_bytes", s.optimizer},
                  {"sent_elements_per_step", s.sent_elems}});
    return 0;
  }
  out.write(memreport::explain(a.params, stage, ranks));
  return 0;
}

DeviceKind device_of(const Arguments& a, const Config& config) {
  if (a.device.empty()) return config.device == DeviceKind::Auto ? DeviceKind::Cuda : config.device;
  return a.device == "cpu" ? DeviceKind::Cpu : DeviceKind::Cuda;
}

void plot(const memreport::Prediction& p, i64 limit, Output& file) {
  const auto ends = [&](std::string_view end) { return file.file().ends_with(end); };
  file.write(ends(".svg") ? memreport::plot_svg(p, limit) : memreport::plot_html(p, limit));
  file.commit();
}

int run(const Arguments& a, const CLI::App& app, Output& out) {
  const i64 limit = a.memory.empty() ? 0 : tools::parse_bytes("--memory", a.memory);
  const bool to_report = a.plot == "-";
  if (!a.plot.empty() && !to_report && !a.plot.ends_with(".svg") && !a.plot.ends_with(".html"))
    throw Error(Errc::Config, fmt::format("--plot {}: ends in neither .svg nor .html, and is not \"-\"", a.plot));
  if (to_report && out.json()) throw Error(Errc::Config, "--plot - excludes --json");
  std::optional<Output> picture;
  if (!a.plot.empty() && !to_report) check_report(app, picture.emplace(out.tool(), a.plot, false, "--plot"));
  if (a.params > 0) {
    if (!a.plot.empty()) throw Error(Errc::Config, "--plot draws ranks of a model: --params alone has none");
    return of_params(a, out);
  }
  if (a.source.empty()) throw Error(Errc::Config, "give a configuration, a model, a checkpoint, or --params");
  const memreport::Source source = memreport::open_source(a.source, overrides_of(a), a.ranks);
  for (const Diagnostic& d : source.config.diagnostics)
    (d.severity == Severity::Error ? tools::report_error : tools::report_warning)(to_string(d));
  if (!source.config.ok()) return exit_code(source.config.code());
  const Config& config = source.config.config;
  const memreport::World world{source.ranks, a.nodes};
  const memreport::Prediction p = memreport::predict(config, world, device_of(a, config));
  if (picture) plot(p, limit, *picture);
  if (out.json()) {
    Json fields = Json::parse(memreport::json(p));
    if (a.explain) fields["explained"] = memreport::explain(config, world);
    out.document(fields);
    return 0;
  }
  out.write(memreport::text(p, a.all));
  if (to_report) out.print("\n{}", memreport::plot_text(p, limit, out.columns(), out.colour()));
  if (a.explain) out.print("\n{}", memreport::explain(config, world));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments a;
  return tools::run_main(
      argc, argv,
      {.name = "ds-memreport",
       .purpose = "tell what a training run needs before it starts",
       .usage = {"[options] CONFIG|MODEL|CHECKPOINT", "--params N [options]"},
       .examples = {{"ds-memreport cfg.json -n 64 --nodes 8", "a configuration on 64 GPUs of 8 nodes"},
                    {"ds-memreport llama-7b/ -n 16 --stage 3 --seq 4096", "a Hugging Face model"},
                    {"ds-memreport --params 7.5e9 -n 64 --stage 2", "the ZeRO paper's accounting"}}},
      [&](CLI::App& app) -> tools::Body {
        CLI::Option* source =
            app.add_option("SOURCE", a.source,
                           "configuration, model directory or config.json, run directory or step of a checkpoint")
                ->type_name("FILE");
        add_number(app, "--params", a.params, 1, 1e18, "parameters alone: the ZeRO paper's accounting")
            ->type_name("N")
            ->excludes(source);
        add_number(app, "-n,--gpus", a.ranks, 1, 1 << 20, "ranks (default: the checkpoint's, else 1)")->type_name("N");
        add_number(app, "--nodes", a.nodes, 1, 1 << 20, "nodes that the ranks spread over (default 1)")->type_name("N");
        const auto key = [&](const char* name, i64& value, i64 most, const char* what) {
          add_number(app, name, value, 1, most, what)->type_name("N")->group("In place of the configuration's");
        };
        key("--tp", a.tp, 1 << 20, "tensor parallelism");
        key("--pp", a.pp, 1 << 20, "stages of the pipeline");
        key("--sp", a.sp, 1 << 20, "sequence parallelism");
        add_number(app, "--stage", a.stage, 0, 3, "ZeRO stage")
            ->type_name("N")
            ->group("In place of the configuration's");
        key("--micro-batch", a.micro, 1 << 30, "samples of a micro-batch");
        key("--accumulation", a.accumulation, 1 << 30, "micro-batches of a step");
        key("--batch", a.batch, i64{1} << 40, "samples of a step, over all ranks");
        key("--seq", a.seq, i64{1} << 40, "tokens of a sample");
        const auto word = [&](const char* name, std::string& value, const std::vector<std::string>& words,
                              const char* what) {
          app.add_option(name, value, what)
              ->type_name("WORD")
              ->check(CLI::IsMember(words))
              ->group("In place of the configuration's");
        };
        word("--dtype", a.dtype, {"fp32", "bf16", "fp16"}, "precision");
        word("--checkpointing", a.checkpointing, {"none", "layer", "selective"}, "activations that are computed again");
        word("--device", a.device, {"cpu", "cuda"}, "where it runs (default cuda, unless the configuration says)");
        app.add_option("--set", a.set, "any key: a.b=VALUE")
            ->type_name("KEY=VALUE")
            ->allow_extra_args(false)
            ->group("In place of the configuration's");
        app.add_flag("--all-ranks", a.all, "every rank by tag, not the one that needs most")->group("Result");
        app.add_flag("--explain", a.explain, "the formulas of the field with these numbers in them")->group("Result");
        app.add_option("--plot", a.plot, "bars of each rank's memory: a file .svg or .html; \"-\": in the report")
            ->type_name("FILE")
            ->group("Result");
        app.add_option("--memory", a.memory, "of a rank, drawn as a limit: 80GiB")->type_name("SIZE")->group("Result");
        return [&](Output& out) { return run(a, app, out); };
      });
}
