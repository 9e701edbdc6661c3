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
  std::string fit, node_memory, write;
  std::string machine, gpu, links, measure;
  memreport::Hardware::Peaks peaks;
  i64 threads = 1, most = 10;
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

// How fast things are; nothing: not told.
std::optional<memreport::Hardware> hardware_of(const Arguments& a, int ranks_per_node) {
  if (!a.machine.empty()) return memreport::Hardware::read(a.machine, a.links);
  memreport::Hardware::Peaks peaks = a.gpu.empty() ? memreport::Hardware::Peaks() : memreport::Hardware::gpu(a.gpu);
  const auto take = [](double& to, double given) { to = given > 0 ? given : to; };
  take(peaks.flops, a.peaks.flops);
  take(peaks.memory, a.peaks.memory);
  take(peaks.link, a.peaks.link);
  take(peaks.network, a.peaks.network);
  if (peaks.flops > 0 && peaks.memory > 0) return memreport::Hardware::of_peaks(peaks, ranks_per_node, a.links);
  if (!a.links.empty() || peaks.flops > 0 || peaks.memory > 0 || peaks.link > 0 || peaks.network > 0)
    throw Error(Errc::Config, "times need --machine, --gpu, or --peak and --bandwidth");
  return std::nullopt;
}

int measure(const Arguments& a, const CLI::App& app, Output& out) {
  Output file(out.tool(), a.measure, false, "--measure");
  check_report(app, file);
  const std::string machine = memreport::Hardware::measure(std::max(a.ranks, 1), static_cast<int>(a.threads)).json();
  file.write(machine);
  file.commit();
  if (out.json()) {
    out.document({{"machine", Json::parse(machine)}});
  } else {
    out.print("{}: what {} rank{} of {} thread{} do at once on this machine\n", a.measure, std::max(a.ranks, 1),
              a.ranks > 1 ? "s" : "", a.threads, a.threads == 1 ? "" : "s");
  }
  return 0;
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
  std::optional<Output> picture, written;
  if (!a.plot.empty() && !to_report) check_report(app, picture.emplace(out.tool(), a.plot, false, "--plot"));
  if (a.write == "-") throw Error(Errc::Config, "--write writes a file; \"-\" is none");
  if (!a.write.empty()) check_report(app, written.emplace(out.tool(), a.write, false, "--write"));
  if (!a.measure.empty()) {
    if (a.params > 0 || !a.source.empty()) throw Error(Errc::Config, "--measure looks at this machine, at no run");
    return measure(a, app, out);
  }
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
  const DeviceKind device = device_of(a, config);
  const memreport::Prediction p = memreport::predict(config, world, device);
  const std::optional<memreport::Hardware> hardware = hardware_of(a, source.ranks / a.nodes);
  std::optional<memreport::StepTime> time;
  if (hardware) time = memreport::predict_time(config, world, device, *hardware);
  std::optional<memreport::FitResult> fit;
  const memreport::FitOptions options{
      .world = world,
      .device = device,
      .memory = a.fit.empty() ? 0 : tools::parse_bytes("--fit", a.fit),
      .host_memory = a.node_memory.empty() ? 0 : tools::parse_bytes("--node-memory", a.node_memory),
      .most = static_cast<size_t>(a.most)};
  if (!a.fit.empty()) {
    if (!hardware)
      throw Error(Errc::Config, "--fit ranks by time, which needs --machine, --gpu, or --peak and --bandwidth");
    fit = memreport::fit(source, options, *hardware);
  }
  if (picture) plot(p, limit, *picture);
  if (written) {
    if (fit && fit->fitting.empty()) throw Error(Errc::Config, "--write: nothing fits");
    written->write(fit ? memreport::written_config(source, fit->fitting.front()) : resolved_json(config));
    written->commit();
  }
  if (out.json()) {
    Json fields = Json::parse(memreport::json(p));
    if (time) fields["time"] = Json::parse(memreport::json(*time));
    if (fit) fields["fit"] = Json::parse(memreport::json(*fit));
    if (a.explain) fields["explained"] = memreport::explain(config, world);
    out.document(fields);
    return 0;
  }
  if (fit) {
    out.write(memreport::text(*fit, options));
  } else {
    out.write(memreport::text(p, a.all));
    if (time) out.print("\n{}", memreport::text(*time));
  }
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
        const auto file = [&](const char* name, std::string& value, const char* group, const char* what) {
          return app.add_option(name, value, what)->type_name("FILE")->group(group);
        };
        const auto rate = [&](const char* name, double& value, const char* what) {
          add_number(app, name, value, 1, 1e21, what)->type_name("X")->group("Times");
        };
        CLI::Option* machine = file("--machine", a.machine, "Times", "rates of ops, as --measure writes them");
        app.add_option("--gpu", a.gpu, "peaks of this GPU's data sheet")
            ->type_name("NAME")
            ->check(CLI::IsMember(memreport::Hardware::gpus()))
            ->group("Times")
            ->excludes(machine);
        rate("--peak", a.peaks.flops, "FLOP/s of a rank");
        rate("--bandwidth", a.peaks.memory, "B/s of a rank's memory");
        rate("--link", a.peaks.link, "B/s that a rank sends inside its node");
        rate("--network", a.peaks.network, "B/s that a rank sends to other nodes");
        file("--links", a.links, "Times", "of ds-commbench --save: in place of --link and --network");
        file("--measure", a.measure, "Times", "measure this machine's CPU at -n ranks, and write its rates");
        add_number(app, "--threads", a.threads, 1, 4096, "of each rank, for --measure (default 1)")
            ->type_name("N")
            ->group("Times");
        app.add_option("--fit", a.fit, "find what fits into so much memory of a rank: 80GiB")
            ->type_name("SIZE")
            ->group("What fits");
        app.add_option("--node-memory", a.node_memory, "host memory of a node (default: enough)")
            ->type_name("SIZE")
            ->group("What fits");
        add_number(app, "--most", a.most, 1, 100000, "so many of them at most (default 10)")
            ->type_name("N")
            ->group("What fits");
        file("--write", a.write, "What fits", "the first of them as a configuration; without --fit what was read");
        app.add_option("--plot", a.plot, "bars of each rank's memory: a file .svg or .html; \"-\": in the report")
            ->type_name("FILE")
            ->group("Result");
        app.add_option("--memory", a.memory, "of a rank, drawn as a limit: 80GiB")->type_name("SIZE")->group("Result");
        return [&](Output& out) { return run(a, app, out); };
      });
}
