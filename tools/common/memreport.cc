// SPDX-License-Identifier: Apache-2.0
#include "common/memreport.h"

#include <algorithm>
#include <limits>

#include "common/copying.h"

namespace ds::tools {

// Options become the overrides of --set.
std::vector<std::string> overrides_of(const MemreportOptions& a) {
  std::vector<std::string> set;
  const auto number = [&](const char* key, i64 value) {
    if (value > 0) set.push_back(fmt::format("{}={}", key, value));
  };
  number("tensor_parallel.tp_size", a.tp);
  number("pipeline.stages", a.pp);
  number("sequence_parallel_size", a.sp);
  number("data.seq_length", a.seq);
  if (a.stage >= 0) set.push_back(fmt::format("zero_optimization.stage={}", a.stage));
  // Two of the three sizes give the third; a size that is not given follows from the others.
  if (a.use != "infer" && (a.batch > 0 || a.micro > 0 || a.accumulation > 0)) {
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

void refuse_idle(const CLI::App& app, const std::string& what, std::span<const std::string_view> taken) {
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = option->get_name(), group = option->get_group();
    const bool idle = group == "In place of the configuration's" || group == "Times" || group == "What fits" ||
                      group == "With --use infer" || name == "--nodes" || name == "--explain";
    if (option->count() > 0 && idle && std::ranges::find(taken, name) == taken.end())
      throw Error(Errc::Config, fmt::format("{} has no effect with {}", name, what));
  }
}

void check_plot(const MemreportOptions& a, bool has_bars) {
  if (!a.memory.empty() && a.plot.empty() && a.use != "infer")
    throw Error(Errc::Config, "--memory needs --plot or --use infer");
  if (!a.plot.empty() && !has_bars)
    throw Error(Errc::Config, "--plot needs a configuration, a model, a checkpoint or a metrics.jsonl");
}

namespace {

SessionSizes session_sizes_of(const MemreportOptions& a, const Config& config) {
  constexpr i64 kBatch = 64;
  SessionSizes sizes{.at_once = a.batch > 0 ? a.batch : kBatch};
  if (a.chunk > 0) sizes.chunk = a.chunk;
  const i64 positions = config.model.max_positions;
  if (a.context > positions && !config.model.any_length())
    throw Error(Errc::Config, fmt::format("--context {} exceeds the {} positions of the model", a.context, positions));
  sizes.context = a.context > 0 ? a.context : std::min(positions, kMostDefaultContext);
  if (a.cached > 0 && a.cached < sizes.context)
    throw Error(Errc::Config, fmt::format("--cache {} is less than --context, {}", a.cached, sizes.context));
  sizes.cached = a.cached > 0 ? a.cached : default_cached(sizes);
  return sizes;
}

}  // namespace

Config used(const MemreportOptions& a, Config config) {
  const bool infers = a.use == "infer";
  if (!infers && (a.context > 0 || a.cached > 0 || a.chunk > 0 || !a.stream.empty()))
    throw Error(Errc::Config, "--context, --cache, --chunk and --stream are for --use infer");
  if (a.use.empty() || a.use == "train") return config;
  if (infers) {
    if (!a.fit.empty() || a.explain || !a.plot.empty() || !a.write.empty())
      throw Error(Errc::Config, "--use infer: there are no steps, to which --fit, --explain, --plot and --write apply");
    config.use = ConfigUse::Generate;
    if (a.stream.empty()) return config;
    config.zero.stage = 3;
    config.zero.offload_param = {.device = a.stream == "cpu" ? OffloadDevice::Cpu : OffloadDevice::Nvme,
                                 .nvme_path = a.stream == "cpu" ? "" : a.stream,
                                 .buffer_count = 0};
    return config;
  }
  const bool of_steps = !a.fit.empty() || a.explain || !a.machine.empty() || !a.gpu.empty() || a.peaks.flops > 0;
  if (of_steps)
    throw Error(Errc::Config, fmt::format("--use {}: there are no steps, to whose time and formulas --fit, --explain, "
                                          "--machine, --gpu and --peak apply",
                                          a.use));
  config.use = a.use == "eval" ? ConfigUse::Evaluate : ConfigUse::Generate;
  return config;
}

void take_loads(const MemreportOptions& a, memreport::Source& source) {
  if (a.expert_load.empty()) return;
  memreport::take_expert_loads(source, a.expert_load);
  const Config& c = source.config.config;
  if (a.fit.empty() && c.expert_parallel.size * c.tensor_parallel.tp_size == 1)
    throw Error(Errc::Config, "--expert-load has no effect: each rank has all experts");
}

DeviceKind device_of(const MemreportOptions& a, const Config& config) {
  if (a.device.empty()) return config.device == DeviceKind::Auto ? DeviceKind::Cuda : config.device;
  return a.device == "cpu" ? DeviceKind::Cpu : DeviceKind::Cuda;
}

memreport::World world_of(const MemreportOptions& a, int ranks) {
  memreport::World world{ranks, a.nodes};
  if (!a.gpu.empty()) world.compute_capability = memreport::Hardware::compute_capability(a.gpu);
  return world;
}

namespace {

std::optional<memreport::Hardware> rates_of(const MemreportOptions& a, int ranks_per_node) {
  if (!a.machine.empty()) {
    if (a.peaks.disk > 0)
      throw Error(Errc::Config, "--disk-rate belongs to --peak and --gpu: give --disk with --machine");
    return memreport::Hardware::read(a.machine, a.links);
  }
  memreport::Hardware::Peaks peaks = a.gpu.empty() ? memreport::Hardware::Peaks() : memreport::Hardware::gpu(a.gpu);
  const auto take = [](double& to, double given) { to = given > 0 ? given : to; };
  take(peaks.flops, a.peaks.flops);
  take(peaks.memory, a.peaks.memory);
  take(peaks.link, a.peaks.link);
  take(peaks.network, a.peaks.network);
  take(peaks.host, a.peaks.host);
  take(peaks.disk, a.peaks.disk);
  if (peaks.flops > 0) {
    if (peaks.memory == 0) report_warning("without --bandwidth ops that only move bytes take no time");
    return memreport::Hardware::of_peaks(peaks, ranks_per_node, a.links);
  }
  if (!a.links.empty() || !a.disk.empty() || peaks.memory > 0 || peaks.link > 0 || peaks.network > 0 ||
      peaks.host > 0 || peaks.disk > 0)
    throw Error(Errc::Config, "times need --machine, --gpu or --peak");
  return std::nullopt;
}

}  // namespace

std::optional<memreport::Hardware> hardware_of(const MemreportOptions& a, int ranks_per_node) {
  const std::optional<memreport::Hardware> rates = rates_of(a, ranks_per_node);
  return rates && !a.disk.empty() ? rates->with_disk(a.disk) : rates;
}

int report_inference(const MemreportOptions& a, const Config& config, const memreport::World& world, DeviceKind device,
                     const std::optional<memreport::Hardware>& hardware, Output& out) {
  const SessionSizes sizes = session_sizes_of(a, config);
  memreport::SessionPrediction p = memreport::predict_session(config, world, device, sizes);
  if (!a.stream.empty() && p.streamed_bytes == 0)
    throw Error(Errc::Config,
                "--stream: nothing is streamed, since no matrix has more elements than "
                "zero_optimization.stage3_param_persistence_threshold");
  const memreport::Hardware::Peaks& given = a.peaks;
  if (p.streamed_bytes == 0 && (!a.disk.empty() || given.disk > 0 || given.host > 0))
    throw Error(Errc::Config, "--disk, --disk-rate and --host-link have no effect with --use infer without --stream");
  if (!a.links.empty() || given.link > 0 || given.network > 0)
    throw Error(Errc::Config,
                "--links, --link and --network have no effect with --use infer: messages are not counted");
  if (hardware) memreport::predict_times(p, config, *hardware);
  if (!a.memory.empty()) {
    SessionSizes any = sizes;
    any.cached = a.cached;
    p.largest_batch = memreport::largest_batch(config, world, device, any, parse_bytes("--memory", a.memory));
  }
  if (out.json()) {
    out.document(nlohmann::ordered_json::parse(memreport::json(p)));
  } else {
    out.write(memreport::text(p));
  }
  return 0;
}

void add_memreport_options(CLI::App& app, MemreportOptions& a) {
  CLI::Option* source =
      app.add_option("SOURCE", a.source,
                     "configuration, model directory or config.json, run directory or step of a checkpoint; "
                     "with --running, a run directory")
          ->type_name("FILE");
  add_number(app, "--params", a.params, 1, 1e18, "number of parameters, for the ZeRO paper's accounting")
      ->type_name("N")
      ->excludes(source);
  add_number(app, "-n,--gpus", a.ranks, 1, 1 << 20, "number of ranks (default: the checkpoint's, else 1)")
      ->type_name("N");
  add_number(app, "--nodes", a.nodes, 1, 1 << 20, "number of nodes over which ranks are spread (default 1)")
      ->type_name("N");
  const auto key = [&](const char* name, i64& value, i64 most, const char* what) {
    add_number(app, name, value, 1, most, what)->type_name("N")->group("In place of the configuration's");
  };
  key("--tp", a.tp, 1 << 20, "degree of tensor parallelism");
  key("--pp", a.pp, 1 << 20, "number of pipeline stages");
  key("--sp", a.sp, 1 << 20, "degree of sequence parallelism");
  add_number(app, "--stage", a.stage, 0, 3, "ZeRO stage")->type_name("N")->group("In place of the configuration's");
  key("--micro-batch", a.micro, 1 << 30, "samples of a micro-batch");
  key("--accumulation", a.accumulation, 1 << 30, "micro-batches of a step");
  key("--batch", a.batch, i64{1} << 40, "samples of a step, over all ranks");
  key("--seq", a.seq, i64{1} << 40, "tokens of a sample");
  const auto word = [&](const char* name, std::string& value, const std::vector<std::string>& words, const char* what) {
    app.add_option(name, value, what)
        ->type_name("WORD")
        ->check(CLI::IsMember(words))
        ->group("In place of the configuration's");
  };
  word("--dtype", a.dtype, {"fp32", "bf16", "fp16"}, "precision");
  word("--checkpointing", a.checkpointing, {"none", "layer", "selective"}, "activations to recompute");
  word("--device", a.device, {"cpu", "cuda"}, "device of the run (default: the configuration's, else cuda)");
  word("--use", a.use, {"train", "eval", "generate", "infer"}, "use of the model (default train)");
  const auto size = [&](const char* name, i64& value, i64 most, const char* what) {
    add_number(app, name, value, 1, most, what)->type_name("N")->group("With --use infer");
  };
  size("--context", a.context, std::numeric_limits<i32>::max(), "most tokens of a text");
  size("--cache", a.cached, std::numeric_limits<i32>::max(), "tokens in the caches of all texts");
  size("--chunk", a.chunk, kMostAtOnce, "tokens of a pass");
  app.add_option("--stream", a.stream, "stream the weights, as ds-infer --stream does")
      ->type_name("DIR|cpu")
      ->group("With --use infer");
  app.add_option("--set", a.set, "any key: a.b=VALUE")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false)
      ->group("In place of the configuration's");
  app.add_flag("--running", a.running, "show your runs on this machine: predicted and counted")->group("Measured");
  add_number(app, "--watch", a.watch, 0.1, 1e6, "the same every S seconds, until the runs end")
      ->type_name("S")
      ->group("Measured");
  app.add_flag("--all-ranks", a.all, "show every rank by tag, not only those that need most")->group("Result");
  app.add_flag("--explain", a.explain, "add the formulas of the literature with these numbers")->group("Result");
  const auto file = [&](const char* name, std::string& value, const char* group, const char* what) {
    return app.add_option(name, value, what)->type_name("FILE")->group(group);
  };
  const auto rate = [&](const char* name, double& value, const char* what) {
    add_number(app, name, value, 1, 1e21, what)->type_name("X")->group("Times");
  };
  CLI::Option* machine = file("--machine", a.machine, "Times", "rates of ops, written by --measure");
  app.add_option("--gpu", a.gpu, "peaks of this GPU's data sheet")
      ->type_name("NAME")
      ->check(CLI::IsMember(memreport::Hardware::gpus()))
      ->group("Times")
      ->excludes(machine);
  rate("--peak", a.peaks.flops, "FLOP/s of a rank");
  rate("--bandwidth", a.peaks.memory, "B/s of a rank's memory");
  rate("--link", a.peaks.link, "B/s that a rank sends inside its node");
  rate("--network", a.peaks.network, "B/s that a rank sends to other nodes");
  rate("--disk-rate", a.peaks.disk, "B/s of a node's disk");
  rate("--host-link", a.peaks.host, "B/s between a GPU and its host, in each direction");
  file("--links", a.links, "Times", "links measured by ds-commbench --save, instead of --link and --network");
  file("--disk", a.disk, "Times", "disk and updates measured by ds-offload bench --json, for offloading");
  file("--expert-load", a.expert_load, "In place of the configuration's",
       "loads of experts as the steps of this metrics.jsonl counted them, instead of even ones");
  file("--measure", a.measure, "Times", "measure the CPU of this machine with -n ranks, and write its rates");
  add_number(app, "--threads", a.threads, 1, 4096, "threads of each rank for --measure (default 1)")
      ->type_name("N")
      ->needs("--measure")
      ->group("Times");
  app.add_option("--fit", a.fit, "find arrangements that fit into SIZE of memory on a rank, such as 80GiB")
      ->type_name("SIZE")
      ->group("What fits");
  app.add_option("--node-memory", a.node_memory, "host memory of a node (default: no limit)")
      ->type_name("SIZE")
      ->needs("--fit")
      ->group("What fits");
  add_number(app, "--most", a.most, 1, 100000, "show at most N of them (default 10)")
      ->type_name("N")
      ->needs("--fit")
      ->group("What fits");
  file("--write", a.write, "What fits",
       "write the first of them as a configuration; without --fit, the complete input");
  app.add_option("--plot", a.plot, "draw the memory of each rank, into an .svg or .html file; \"-\": into the report")
      ->type_name("FILE")
      ->group("Result");
  app.add_option("--memory", a.memory,
                 "memory of a rank, such as 80GiB: drawn by --plot; with --use infer, find the largest batch")
      ->type_name("SIZE")
      ->group("Result");
}

}  // namespace ds::tools
