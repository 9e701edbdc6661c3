// SPDX-License-Identifier: Apache-2.0
// ds-memreport: predicts what a run needs, reports what a run took, and finds what would fit.

#include <chrono>
#include <thread>

#include "common/copying.h"
#include "common/memreport.h"

namespace {

using namespace ds;
using tools::MemreportOptions;
using tools::Output;
using Json = nlohmann::ordered_json;

// Files of results besides the report; each appears complete or not at all.
struct Files {
  std::optional<Output> picture, config, machine;
  bool drawn = false;  // the plot is part of the report
  i64 limit = 0;       // drawn across the bars

  Files(const MemreportOptions& a, const CLI::App& app, const Output& out)
      : drawn(a.plot == "-"), limit(a.memory.empty() ? 0 : tools::parse_bytes("--memory", a.memory)) {
    const auto open = [&](std::optional<Output>& file, const std::string& name, const char* option) {
      if (name == "-") throw Error(Errc::Config, fmt::format("{} needs a file name, not \"-\"", option));
      if (!name.empty()) check_report(app, file.emplace(out.tool(), name, false, option));
    };
    if (drawn && out.json()) throw Error(Errc::Config, "--plot - excludes --json");
    if (!drawn) open(picture, a.plot, "--plot");
    if (picture && !a.plot.ends_with(".svg") && !a.plot.ends_with(".html"))
      throw Error(Errc::Config, fmt::format("--plot {}: give a name that ends in .svg or .html, or \"-\"", a.plot));
    open(config, a.write, "--write");
    open(machine, a.measure, "--measure");
  }

  // Prediction or Measured.
  template <class T>
  void plot(const T& what, Output& out) {
    if (drawn) out.data("\n" + memreport::plot_text(what, limit, out.columns(), out.colour()));
    if (!picture) return;
    const bool svg = picture->file().ends_with(".svg");
    put(picture, svg ? memreport::plot_svg(what, limit) : memreport::plot_html(what, limit));
  }
  void write_config(const Config& c, const std::string& name) {
    if (!config) return;
    put(config, resolved_json(c) + "\n");
    if (c.data.train.empty())
      tools::report_warning(fmt::format("{}: ds-train also needs data.train and steps in it", name));
  }
  static void put(std::optional<Output>& file, const std::string& text) {
    file->data(text);
    file->commit();
  }
};

int of_params(const MemreportOptions& a, Output& out) {
  // In the paper's formulas, parameters are those of a rank, and ranks those that share them.
  const int stage = std::max(a.stage, 0), ranks = std::max(a.ranks, 1);
  const i64 parts = std::max<i64>(a.tp, 1) * std::max<i64>(a.pp, 1);
  if (ranks % parts != 0)
    throw Error(Errc::Config, fmt::format("--tp {} x --pp {} do not divide {} ranks", std::max<i64>(a.tp, 1),
                                          std::max<i64>(a.pp, 1), ranks));
  const double own = a.params / static_cast<double>(parts);
  const int dp = static_cast<int>(ranks / parts);
  const memreport::PaperStates s = memreport::paper_states(own, stage, dp);
  if (!out.json()) {
    if (parts > 1)
      out.print("{:g} parameters in {} parts: {:g} for every {} ranks, which share them\n\n", a.params, parts, own, dp);
    out.write(memreport::explain(own, stage, dp));
    return 0;
  }
  out.document({{"params", a.params},
                {"world_size", ranks},
                {"dp", dp},
                {"stage", stage},
                {"accounting", "ZeRO paper"},
                {"model_states_bytes", s.params + s.grads + s.optimizer},
                {"params_bytes", s.params},
                {"grads_bytes", s.grads},
                {"optimizer_bytes", s.optimizer},
                {"sent_elements_per_step", s.sent_elems}});
  return 0;
}

int of_machine(const MemreportOptions& a, Files& files, Output& out) {
  const int ranks = std::max(a.ranks, 1), threads = static_cast<int>(a.threads);
  const int most = 8 * static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  if (ranks > most)
    throw Error(Errc::Config, fmt::format("--measure: {} ranks would share {} processors; at most {} are measured",
                                          ranks, most / 8, most));
  const std::string machine = memreport::Hardware::measure(ranks, threads).json();
  Files::put(files.machine, machine);
  if (out.json()) {
    out.document({{"machine", Json::parse(machine)}});
  } else {
    out.print("{}: rates of {} rank{} of {} thread{} running at once on this machine\n", a.measure, ranks,
              ranks > 1 ? "s" : "", threads, threads > 1 ? "s" : "");
  }
  return 0;
}

int of_record(const MemreportOptions& a, Files& files, Output& out) {
  const memreport::Measured m = memreport::read_measured(a.source);
  if (out.json()) {
    out.document(Json::parse(memreport::json(m)));
  } else {
    out.write(memreport::text(m, a.all));
  }
  files.plot(m, out);
  return 0;
}

int of_running(const MemreportOptions& a, Output& out) {
  const bool terminal = tools::stdout_columns() > 0 && !out.to_file() && !out.json();
  for (bool first = true;; first = false) {
    const std::vector<memreport::Measured> runs = memreport::find_running(a.source);
    if (runs.empty() && !first) return 0;
    if (runs.empty())
      throw Error(Errc::Config,
                  "you have no run in progress " + (a.source.empty() ? "on this machine" : "in " + a.source));
    if (out.json()) {
      Json all = Json::array();
      for (const auto& m : runs) all.push_back(Json::parse(memreport::json(m)));
      out.document({{"running", all}}, a.watch > 0);
    } else {
      std::string text;
      for (const auto& m : runs) text += memreport::text(m, a.all) + "\n";
      out.data((terminal && a.watch > 0 ? "\033[H\033[J" : "") + printable(text, Breaks::All));
    }
    if (a.watch == 0) return 0;
    std::this_thread::sleep_for(std::chrono::duration<double>(a.watch));
  }
}

// --plot, --explain and --write are about the first arrangement that fits.
int of_fit(const MemreportOptions& a, const memreport::Source& source, const memreport::World& world, DeviceKind device,
           const std::optional<memreport::Hardware>& hardware, Files& files, Output& out) {
  const auto bytes = [](const char* option, const std::string& text) {
    return text.empty() ? 0 : tools::parse_bytes(option, text);
  };
  tools::ProgressLine line;
  const memreport::FitOptions options{.world = world,
                                      .device = device,
                                      .memory = bytes("--fit", a.fit),
                                      .host_memory = bytes("--node-memory", a.node_memory),
                                      .most = static_cast<size_t>(a.most),
                                      .disk = hardware ? hardware->disk() : "",
                                      .on_progress = line.hook()};
  if (!hardware) throw Error(Errc::Config, "--fit compares times: give --machine, --gpu or --peak");
  const memreport::FitResult fit = memreport::fit(source, options, *hardware);
  const bool shows = files.config || files.picture || files.drawn || a.explain;
  if (shows && fit.fitting.empty())
    throw Error(Errc::Config, fmt::format("{}: nothing fits", files.config ? "--write"
                                                              : a.explain  ? "--explain"
                                                                           : "--plot"));
  std::optional<Config> first;
  if (shows) first = memreport::arranged(source, fit.fitting.front());
  if (first) files.write_config(*first, a.write);
  if (out.json()) {
    Json fields = Json::object();
    if (const Config& present = source.config.config; source.config.ok()) {
      fields = Json::parse(memreport::json(memreport::predict(present, world, device)));
      fields["time"] = Json::parse(memreport::json(memreport::predict_time(present, world, device, *hardware)));
    }
    fields["fit"] = Json::parse(memreport::json(fit));
    if (a.explain) fields["explained"] = memreport::explain(*first, world);
    out.document(fields);
  } else {
    out.write(memreport::text(fit, options));
  }
  if (first && !a.plot.empty()) files.plot(memreport::predict(*first, world, device), out);
  if (a.explain && !out.json()) out.write("\n" + memreport::explain(*first, world));
  return 0;
}

int of_source(const MemreportOptions& a, Files& files, Output& out) {
  memreport::Source source = memreport::open_source(a.source, overrides_of(a), a.ranks);
  const bool sound = source.config.ok(), searches = !a.fit.empty() && (sound || memreport::can_be_rearranged(source));
  for (const Diagnostic& d : source.config.diagnostics) {
    if (d.severity == Severity::Warning) tools::report_warning(to_string(d));
    if (d.severity == Severity::Error && !searches) tools::report_error(to_string(d));
  }
  if (!sound && !searches) return exit_code(source.config.code());
  tools::take_loads(a, source);
  const memreport::World world = world_of(a, source.ranks);
  const DeviceKind device = device_of(a, source.config.config);
  const std::optional<memreport::Hardware> hardware = hardware_of(a, source.ranks / a.nodes);
  const Config config = tools::used(a, source.config.config);
  tools::check_reports(config, {}, out, files.picture, files.config);
  if (searches) return of_fit(a, source, world, device, hardware, files, out);
  if (a.use == "infer") return tools::report_inference(a, config, world, device, hardware, out);

  const memreport::Prediction p = memreport::predict(config, world, device);
  const auto time = hardware ? std::optional(memreport::predict_time(config, world, device, *hardware)) : std::nullopt;
  files.write_config(config, a.write);
  if (out.json()) {
    Json fields = Json::parse(memreport::json(p));
    if (time) fields["time"] = Json::parse(memreport::json(*time));
    if (a.explain) fields["explained"] = memreport::explain(config, world);
    out.document(fields);
  } else {
    out.write(memreport::text(p, a.all));
    if (time) out.write("\n" + memreport::text(*time));
  }
  files.plot(p, out);
  if (a.explain && !out.json()) out.write("\n" + memreport::explain(config, world));
  return 0;
}

int run(const MemreportOptions& a, const CLI::App& app, Output& out) {
  Files files(a, app, out);
  const bool running = a.running || a.watch > 0, record = a.source.ends_with(".jsonl");
  const int given = (a.params > 0) + (!a.source.empty() && !running) + running + files.machine.has_value();
  constexpr std::string_view kOneOf =
      "one of a configuration, a model, a checkpoint, a metrics.jsonl, --params, --running and --measure";
  if (given != 1) throw Error(Errc::Config, fmt::format("{} {}", given == 0 ? "give" : "give no more than", kOneOf));
  tools::check_plot(a, a.params == 0 && !running && !files.machine);
  if (files.config && (record || !app.count("SOURCE")))
    throw Error(Errc::Config, "--write needs a configuration, a model or a checkpoint");
  constexpr std::string_view kOfParams[] = {"--stage", "--tp", "--pp"}, kOfMachine[] = {"--measure", "--threads"};
  if (a.params > 0) tools::refuse_idle(app, "--params", kOfParams);
  if (files.machine) tools::refuse_idle(app, "--measure", kOfMachine);
  if (running || record) tools::refuse_idle(app, "what was measured", {});
  if (a.params > 0) return of_params(a, out);
  if (files.machine) return of_machine(a, files, out);
  if (running) return of_running(a, out);
  return record ? of_record(a, files, out) : of_source(a, files, out);
}

}  // namespace

int main(int argc, char** argv) {
  MemreportOptions a;
  return tools::run_main(
      argc, argv,
      {.name = "ds-memreport",
       .purpose = "predict the memory, messages and time of a training run, and report what a run took",
       .usage = {"[options] CONFIG|MODEL|CHECKPOINT", "[options] METRICS.jsonl", "--running [--watch S] [RUN]",
                 "--params N [options]", "--measure FILE [-n N]"},
       .examples = {{"ds-memreport cfg.json -n 64 --nodes 8", "predict a configuration on 64 GPUs of 8 nodes"},
                    {"ds-memreport cfg.json -n 64 --nodes 8 --gpu h100 --fit 80GiB", "find what fits, fastest first"},
                    {"ds-memreport llama-7b/ -n 16 --stage 3 --seq 4096", "predict a Hugging Face model"},
                    {"ds-memreport run/metrics.jsonl", "compare the prediction with what the run took"},
                    {"ds-memreport --params 7.5e9 -n 64 --stage 2", "print the ZeRO paper's numbers"}}},
      [&](CLI::App& app) -> tools::Body {
        tools::add_memreport_options(app, a);
        return [&](Output& out) { return run(a, app, out); };
      });
}
