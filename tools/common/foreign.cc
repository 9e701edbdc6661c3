// SPDX-License-Identifier: Apache-2.0
#include "common/foreign.h"

#include <algorithm>
#include <array>

namespace ds::tools {

namespace {

[[noreturn]] void refuse(const std::string& given, const std::string& instead) {
  throw CLI::ValidationError(given, "not available; " + instead);
}

}  // namespace

std::string both_spellings(const std::string& names) {
  std::string all = names;
  for (const std::string& name : CLI::detail::split(names, ',')) {
    std::string other = name;
    if (name.starts_with("--")) std::replace(other.begin() + 2, other.end(), '-', '_');
    if (other != name) all += "," + other;
  }
  return all;
}

void add_foreign(CLI::App& app, const std::vector<ForeignOption>& options) {
  for (const ForeignOption& option : options) {
    const std::string names = both_spellings(option.names);
    if (option.flag) {
      app.add_flag_callback(names,
                            [names, option] {
                              if (!option.instead.empty()) refuse(names.substr(0, names.find(',')), option.instead);
                            })
          ->group(kHidden);
      continue;
    }
    const auto check = [names, option](const std::string& value) {
      if (std::ranges::find(option.accepted, value) == option.accepted.end())
        refuse(names.substr(0, names.find(',')) + " " + value, option.instead);
    };
    app.add_option_function<std::string>(names, check)->group(kHidden)->type_name("VALUE");
  }
}

std::vector<ForeignOption> options_of_nccl_tests() {
  const std::string one_rank = "a rank has one thread and one GPU; start more ranks with --ranks N";
  const std::string not_here = "only its default is measured here";
  return {{"-g,--ngpus", {"1"}, one_rank},
          {"-t,--nthreads", {"1"}, one_rank},
          {"-m,--agg-iters", {"1"}, "every operation is one call; -n sets how many run in a row"},
          {"-N,--run-cycles", {"1"}, "run ds-commbench once for each cycle"},
          {"-p,--parallel-init", {"0", "1"}, "give 0 or 1"},
          {"-z", {"0"}, "--blocking waits for each iteration and begins it at a barrier, as 3 does"},
          {"-y,--stream-null", {"0"}, not_here},
          {"-T", {"0"}, "--timeout S is how long to wait for a rank"},
          {"-G,--cudagraph", {"0"}, not_here},
          {"-C,--report-cputime", {"0"}, not_here},
          {"-J,--output-file", {}, "--json --output FILE writes the document"},
          {"-S,--report-timestamps", {"0"}, not_here},
          {"-R,--local-register", {"0"}, "--memory shared or ordinary chooses where buffers are allocated"},
          {"-x,--cta-policy", {"-1"}, not_here},
          {"-D,--device-implementation", {"0"}, not_here},
          {"-V,--device-cta-count", {"16"}, not_here},
          {"-M", {"0"}, "ds-memreport(1) reports memory"},
          {"-u,--unalign", {"0"}, not_here},
          {"-K,--per-iter-skip", {"0"}, "-w sets how many iterations are not counted"}};
}

CLI::Validator named_average() {
  return {[](std::string& value) {
            constexpr std::array kNames = {"rank0", "mean", "min", "max"};
            if (value.size() == 1 && value[0] >= '0' && value[0] <= '3') value = kNames[value[0] - '0'];
            return std::string();
          },
          ""};
}

std::vector<ForeignOption> options_of_launchers() {
  const std::string hosts = "name the hosts with --host or --hostfile, and start ds-launch once, on one machine";
  const std::string rendezvous = "ds-launch brings the ranks together itself; leave it out";
  const std::string again = "run ds-launch again; ds-launch(1), EXAMPLES, shows a loop that resumes";
  const std::string logs = "--log-dir DIR keeps a log of each rank, --tag-output names the rank of every line";
  const std::string inherited = "ranks inherit the environment of ds-launch: set variables there";
  const std::string ssh = "set users, ports and keys in ssh_config(5); --agent names another program";
  const std::string binding = "--bind core gives each rank its own share of the cores";
  const std::string choice = "--host NAME:SLOTS,... names the hosts, CUDA_VISIBLE_DEVICES the GPUs";
  const std::string command = "give the whole command: ds-launch python3 -m MODULE";
  const std::string elastic = "the number of ranks is fixed while a job runs; start it again with another -n";
  return {{"--node-rank,--machine-rank", {"0"}, hosts},
          {"--master-addr,--main-process-ip", {"localhost", "127.0.0.1"}, rendezvous + " (ranks see MASTER_ADDR)"},
          {"--master-port,--main-process-port", {}, rendezvous + " (ranks see MASTER_PORT, a free port)"},
          {"--local-addr", {}, rendezvous},
          {"--standalone", {}, "", true},
          {"--use-env", {}, "", true},
          {"--role", {}, "ranks have no roles; leave it out"},
          {"--rdzv-backend", {"c10d", "static"}, rendezvous},
          {"--rdzv-endpoint", {"localhost:0", "127.0.0.1:0"}, rendezvous},
          {"--rdzv-id", {}, rendezvous},
          {"--rdzv-conf", {}, rendezvous},
          {"--max-restarts", {"0"}, again},
          {"--monitor-interval", {}, "ds-launch notices at once when a rank ends"},
          {"--start-method", {}, "ranks are processes of their own, as with spawn"},
          {"--redirects,-r", {"0"}, logs},
          {"--tee,-t", {"0"}, logs},
          {"--local-ranks-filter", {}, logs},
          {"--module,-m", {}, command, true},
          {"--no-python", {}, "", true},
          {"--no-local-rank", {}, "", true},
          {"-H,--hosts", {}, "--host LIST names hosts, --hostfile FILE a file of hosts"},
          {"--include,-i", {}, choice},
          {"--exclude,-e", {}, choice},
          {"--min-elastic-nodes", {}, elastic},
          {"--max-elastic-nodes", {}, elastic},
          {"--elastic-training", {}, elastic, true},
          {"--launcher", {"openmpi"}, "ds-launch uses Open MPI, and ssh or --agent PROG to reach hosts"},
          {"--launcher-args", {}, "--dry-run shows the mpirun command, which OMPI_MCA_... variables change"},
          {"--ssh-port", {}, ssh},
          {"--no-ssh", {}, hosts, true},
          {"--no-ssh-check", {}, "", true},
          {"--force-multi", {}, "give --host or --hostfile, with one host too", true},
          {"--save-pid", {}, "--output FILE writes the processes of the ranks", true},
          {"--bind-core-list", {}, binding},
          {"--autotuning", {}, "ds-memreport(1) --fit searches arrangements"},
          {"--venv-script", {}, inherited},
          {"--num-cpu-threads-per-process", {}, "OMP_NUM_THREADS sets the threads of a rank"},
          {"--log-level", {}, "--quiet and --verbose choose how many messages are printed"},
          {"--bind-to", {"none"}, binding},
          {"--report-bindings", {}, binding, true},
          {"--multi-gpu", {}, "", true},
          {"--mixed-precision", {"no"}, "bf16.enabled or fp16.enabled of the configuration sets the precision"},
          {"--map-by", {}, "hosts are filled in their order, one rank for each slot"},
          {"--oversubscribe", {}, "", true},
          {"--allow-run-as-root", {}, "", true},
          {"-x", {}, inherited},
          {"--mca", {}, "set the variable OMPI_MCA_NAME=VALUE"}};
}

void add_ranks_per_node(CLI::App& app, RanksPerNode& given) {
  add_number(app, both_spellings("--nproc-per-node,--num-gpus,--num-accelerators"), given.ranks, 1, 4096, "")
      ->group(kHidden)
      ->type_name("N");
  const std::string names = both_spellings("--nnodes,--num-nodes,--num-machines");
  const auto store = [&given](const std::string& text) {  // torchrun also takes the least and the most
    const std::size_t colon = text.find(':');
    given.nodes = static_cast<int>(parse_integer("--nnodes", text.substr(0, colon), 1, 4096));
    if (colon != std::string::npos && parse_integer("--nnodes", text.substr(colon + 1), 1, 4096) != given.nodes)
      throw CLI::ValidationError("--nnodes " + text, "the number of hosts is fixed while a job runs: give one number");
  };
  app.add_option_function<std::string>(names, store)->group(kHidden)->type_name("N");
}

void apply(const RanksPerNode& given, LaunchOptions& options) {
  const int nodes = std::max<int>(1, static_cast<int>(options.hosts.size()));
  if (given.nodes > 0 && given.nodes != nodes)
    throw Error(
        Errc::Config,
        fmt::format("--nnodes {}: {}; name as many with --host or --hostfile, and start ds-launch once", given.nodes,
                    options.hosts.empty() ? std::string("no hosts are given")
                                          : fmt::format("{} hosts are given", options.hosts.size())));
  if (given.ranks == 0) return;
  for (const LaunchHost& host : options.hosts)
    if (host.slots != given.ranks)
      throw Error(Errc::Config, fmt::format("--nproc-per-node {}: host {} has {} slot{}; the slots in --host or "
                                            "--hostfile set the number of ranks on a host",
                                            given.ranks, host.name, host.slots, host.slots == 1 ? "" : "s"));
  if (options.ranks > 0 && options.ranks != nodes * given.ranks)
    throw Error(Errc::Config, fmt::format("--ranks {} and --nproc-per-node {} contradict each other: give --ranks only",
                                          options.ranks, given.ranks));
  options.ranks = nodes * given.ranks;
}

}  // namespace ds::tools
