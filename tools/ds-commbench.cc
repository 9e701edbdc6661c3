// SPDX-License-Identifier: Apache-2.0
// ds-commbench: times and checks the communication between ranks.

#include <unistd.h>

#include <cstdlib>
#include <optional>

#include "common/foreign.h"
#include "common/progress.h"
#include "common/ranks.h"
#include "common/start.h"
#include "common/tool.h"
#include "ds/commbench.h"

namespace {

using namespace ds;
using commbench::Average;
using commbench::Memory;
using tools::add_number;
using tools::Output;

struct Arguments {
  commbench::Options bench;
  std::string backend = "auto", compare, save, average = "mean", memory = "shared";
  std::vector<std::string> ops;
  double min_busbw = 0;
  std::string hostfile, hosts, agent;
  int ranks = 0, check = 1;
  bool csv = false;
};

// Environment variables that affect measurements, for the record.
std::vector<std::string> relevant_environment() {
  std::vector<std::string> variables;
  for (char** v = environ; *v != nullptr; ++v) {
    const std::string_view text(*v);
    for (const std::string_view prefix : {"DS_", "NCCL_", "OMPI_MCA_", "OMP_", "UCX_", "CUDA_VISIBLE_DEVICES="})
      if (text.starts_with(prefix)) variables.emplace_back(text);
  }
  return variables;
}

// As ranks of ds-launch, after a look at the options for what can be known without them.
[[noreturn]] void start(const Arguments& a, const std::vector<std::string>& command) {
  std::vector<std::string> options;
  for (const auto& [name, value] :
       {std::pair("--hostfile", &a.hostfile), std::pair("--host", &a.hosts), std::pair("--agent", &a.agent)})
    if (!value->empty()) options.insert(options.end(), {name, *value});
  if (options.empty())  // else it is ds-launch that knows how many are where
    validate(a.bench, {.rank = 0, .world_size = a.ranks, .local_rank = 0, .local_world_size = a.ranks, .job = "job"});
  tools::start_ranks(a.ranks, options, command);
}

int run(Arguments& a, const CLI::App& app, const std::vector<std::string>& command, Output& out) {
  const RankInfo ranks = tools::ranks_of_environment();
  const bool launched = std::getenv("WORLD_SIZE") != nullptr;
  commbench::Options& o = a.bench;
  o.ops = a.ops;
  o.backends = {a.backend};
  if (!a.compare.empty()) o.backends.push_back(a.compare);
  o.average = a.average == "rank0" ? Average::Rank0
              : a.average == "min" ? Average::Min
              : a.average == "max" ? Average::Max
                                   : Average::Mean;
  o.memory = a.memory == "shared" ? Memory::Shared : Memory::Ordinary;
  o.check = a.check != 0;
  o.links = !a.save.empty();
  // One end of the sizes alone moves the other, if that is a default, out of its way.
  if (app.count("--max-bytes") > 0 && app.count("--min-bytes") == 0) o.min_bytes = std::min(o.min_bytes, o.max_bytes);
  if (app.count("--min-bytes") > 0 && app.count("--max-bytes") == 0) o.max_bytes = std::max(o.min_bytes, o.max_bytes);
  if (a.csv && out.json()) throw Error(Errc::Config, "--csv excludes --json");
  if (a.csv && o.matrix && !o.ops.empty()) throw Error(Errc::Config, "--csv has one table: of --op, or of --matrix");
  if (a.save == "-") throw Error(Errc::Config, "--save writes a file; \"-\" is none");
  if (a.min_busbw > 0 && o.ops.empty()) throw Error(Errc::Config, "--min-busbw needs --op");
  if (launched && a.ranks > 0 && a.ranks != ranks.world_size)
    throw Error(Errc::Config, fmt::format("--ranks {} under a launcher that started {}", a.ranks, ranks.world_size));
  std::optional<Output> links;
  if (!a.save.empty()) check_report(app, links.emplace(out.tool(), a.save, false, "--save"));
  try {
    if (!launched && a.ranks > 0) start(a, command);
    validate(o, ranks);
  } catch (const Error& e) {  // every rank reads the same options, so rank 0 speaks for all
    if (ranks.rank == 0 || e.code() != Errc::Config) throw;
    return exit_code(e.code());
  }

  const bool text = !out.json() && !a.csv;
  tools::ProgressLine progress;
  commbench::Hooks hooks;
  if (text) {
    hooks.on_start = [&](const commbench::Result& r) { out.write(text_header(o, r)); };
    hooks.on_row = [&](const commbench::Result& r, const commbench::Row& row) { out.write(text_row(o, r, row)); };
  }
  hooks.on_progress = [&](std::string_view what) { progress.show(what); };
  const commbench::Result result = commbench::run(o, ranks, hooks);

  if (text) out.write(text_footer(o, result));
  if (a.csv) out.write(csv_text(result));
  if (out.json()) {
    auto document = nlohmann::ordered_json::parse(json_text(o, result, command, relevant_environment()));
    if (a.min_busbw > 0) document["average_bus_bandwidth"]["okay"] = result.average_bus_bw >= a.min_busbw;
    out.document(document);
  }
  const auto complain = [&](const std::string& message) {
    if (ranks.rank == 0) tools::report_error(message);
  };
  if (const auto& w = result.first_wrong) {
    complain(fmt::format("{} wrong element{}; the first: {} of {} bytes, {}, rank {}, element {}: {} instead of {}",
                         result.num_wrong, result.num_wrong == 1 ? "" : "s", w->op, w->size, w->form, w->rank, w->index,
                         w->got, w->expected));
    return exit_code(Errc::Corrupt);
  }
  if (links) {
    links->data(links_json(result));
    links->commit();
  }
  if (a.min_busbw > 0 && result.average_bus_bw == 0) {
    complain("--min-busbw: nothing that was measured has a bus bandwidth");
    return exit_code(Errc::Config);
  }
  if (a.min_busbw > 0 && result.average_bus_bw < a.min_busbw) {
    complain(
        fmt::format("average bus bandwidth {:g} GB/s is below --min-busbw {:g}", result.average_bus_bw, a.min_busbw));
    return 1;
  }
  return 0;
}

CLI::Option* add_size(CLI::App& app, const std::string& names, i64& target, const std::string& description) {
  const std::string name = tools::main_name(names);
  return app
      .add_option_function<std::string>(
          names,
          [name, &target](const std::string& text) {
            try {
              target = commbench::parse_size(text);
            } catch (const Error& e) {
              throw CLI::ValidationError(name, e.what());
            }
          },
          description)
      ->type_name("SIZE");
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> command(argv, argv + argc);
  Arguments a;
  commbench::Options& o = a.bench;
  const tools::ToolInfo tool = {
      .name = "ds-commbench",
      .purpose = "time and check the communication between ranks",
      .usage = {"--op NAME[,NAME...] [options]", "--matrix [options]"},
      .examples = {{"ds-commbench --ranks 4 --op all_reduce -b 8 -e 128M", "four ranks on this machine"},
                   {"ds-launch -n 4 ds-commbench --op all -b 1M -e 1M --backend mpi", "every operation, over MPI"},
                   {"ds-commbench --ranks 2 --op all_gather --compare mpi", "the default backend beside MPI"},
                   {"ds-commbench --ranks 8 --matrix --save links.json", "every pair of ranks, for ds-memreport"}}};
  return tools::run_main(argc, argv, tool, [&](CLI::App& app) -> tools::Body {
    app.add_option("--op", a.ops, "operations, separated by commas; all: each that these ranks can run")
        ->type_name("NAME")
        ->delimiter(',')
        ->allow_extra_args(false);
    app.add_flag("--matrix", o.matrix, "measure every pair of ranks while the others are idle");
    add_size(app, "-b,--min-bytes,--minbytes", o.min_bytes, "smallest size (default 32M); K, M, G are powers of 1024");
    add_size(app, "-e,--max-bytes,--maxbytes", o.max_bytes, "largest size (default 32M)");
    CLI::Option* factor = add_number(app, "-f,--factor,--stepfactor", o.factor, 1, 1 << 20,
                                     "multiply each size by N to get the next (default 2)")
                              ->type_name("N");
    add_size(app, "-i,--step,--stepbytes", o.step_bytes, "add SIZE to each size instead")->excludes(factor);
    app.add_option("-d,--dtype,--datatype", o.dtype, "type of the elements (default float)")
        ->type_name("TYPE")
        ->check(CLI::IsMember(commbench::types()));
    app.add_option("-o,--redop", o.redop, "reduction (default sum)")
        ->type_name("OP")
        ->check(CLI::IsMember({"sum", "max", "min"}));
    add_number(app, "-r,--root", o.root, 0, 1 << 20, "root of operations that have one (default 0)")->type_name("RANK");
    app.add_option("--backend", a.backend, "communication backend (default auto)")
        ->type_name("NAME")
        ->check(CLI::IsMember(commbench::backends()));
    app.add_option("--compare", a.compare, "measure another backend too, in turns")
        ->type_name("NAME")
        ->check(CLI::IsMember(commbench::backends()));
    app.add_flag("--in-place", o.only_in_place, "measure in place only (default: both forms)");
    app.add_option("--memory", a.memory,
                   "where buffers are allocated: where other ranks reach them, or in the process (default shared)")
        ->type_name("KIND")
        ->check(CLI::IsMember({"shared", "ordinary"}));
    add_size(app, "--bucket", o.bucket_bytes, "bucket of zero_step (default 64M)");
    add_number(app, "-n,--iters", o.iterations, 1, 1000000, "iterations (default 20)")
        ->type_name("N")
        ->group("Measuring");
    add_number(app, "-w,--warmup,--warmup_iters", o.warmup, 0, 1000000,
               "iterations before those that are timed (default 1)")
        ->type_name("N")
        ->group("Measuring");
    add_number(app, "-c,--check", a.check, 0, 1, "compare the data that arrives bit for bit; 0: do not (default 1)")
        ->type_name("N")
        ->group("Measuring");
    app.add_flag("--blocking", o.blocking, "wait for each iteration, and begin it at a barrier")->group("Measuring");
    app.add_flag("-I,--stats", o.stats, "add min, avg, max and p99 of single iterations")->group("Measuring");
    app.add_option("-a,--average", a.average, "the time of the ranks to print (default mean)")
        ->type_name("HOW")
        ->check(CLI::IsMember({"rank0", "mean", "min", "max"}))
        ->transform(tools::named_average())
        ->group("Measuring");
    add_number(app, "--timeout", o.timeout_s, 0.1, 1e6, "seconds to wait for a rank (default 300)")
        ->type_name("S")
        ->group("Measuring");
    add_number(app, "--fault", o.fault_rank, 0, 1 << 20, "for tests: change a bit of the data that RANK received")
        ->type_name("RANK")
        ->group("Measuring");
    app.add_flag("--csv", a.csv, "print the result as CSV")->group("Result");
    app.add_option("--save", a.save, "measure links, and write them for ds-memreport")
        ->type_name("FILE")
        ->group("Result");
    add_number(app, "--min-busbw", a.min_busbw, 1e-9, 1e9, "exit with status 1 if the average busbw is below X GB/s")
        ->type_name("X")
        ->group("Result");
    add_number(app, "--ranks", a.ranks, 1, 4096, "start N ranks through ds-launch")->type_name("N")->group("Starting");
    const auto hosts = [&](const char* name, std::string& value, const char* type, const char* what) {
      return app.add_option(name, value, what)->type_name(type)->group("Starting")->needs("--ranks");
    };
    hosts("--hostfile", a.hostfile, "FILE", "of ds-launch: hosts and their slots")
        ->excludes(hosts("--host", a.hosts, "LIST", "of ds-launch: NAME:SLOTS,..."));
    hosts("--agent", a.agent, "PROG", "of ds-launch: how a host is reached");
    tools::add_foreign(app, tools::options_of_nccl_tests());
    return [&](Output& out) { return run(a, app, command, out); };
  });
}
