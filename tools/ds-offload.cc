// SPDX-License-Identifier: Apache-2.0
// ds-offload: keeps optimizer states for runs, and measures disks and updates for offloading.

#include <csignal>

#include "common/copying.h"
#include "common/offload_bench.h"
#include "common/tool.h"
#include "ds/offload.h"
#include "ds/units.h"

namespace {

using namespace ds;
using Json = nlohmann::ordered_json;
using tools::Output;

volatile std::sig_atomic_t stop_signal = 0;

extern "C" void on_signal(int signal) { stop_signal = signal; }

int serve(offload::ServeOptions& o, bool memory, const std::string& capacity) {
  if (memory == !o.path.empty()) throw Error(Errc::Config, "serve needs either --shm or --path DIR");
  if (!capacity.empty()) o.capacity = tools::parse_bytes("--capacity", capacity);
  for (const int s : {SIGTERM, SIGINT, SIGHUP}) {
    if (std::signal(s, on_signal) == SIG_IGN && s == SIGHUP) std::signal(s, SIG_IGN);  // nohup(1)
  }
  offload::serve(
      o, [&](const std::string& what) { tools::report_note(fmt::format("server '{}': {}", o.name, what)); },
      [] { return stop_signal != 0; });
  tools::report_note(
      fmt::format("server '{}' has ended; its states stay until ds-offload rm {} removes them", o.name, o.name));
  return 0;
}

int list(Output& out) {
  const std::vector<offload::ServerInfo> servers = offload::list_servers();
  Json rows = Json::array();
  if (!out.json() && !servers.empty())
    out.print("{:<20} {:>8} {:>6} {:>10} {:>12}  {}\n", "name", "process", "ranks", "step", "bytes", "where");
  for (const offload::ServerInfo& s : servers) {
    if (out.json()) {
      rows.push_back({{"name", s.name},
                      {"runs", s.runs},
                      {"pid", s.pid > 0 ? Json(s.pid) : Json()},
                      {"ranks", s.ranks},
                      {"step", s.step ? Json(*s.step) : Json()},
                      {"bytes", s.bytes},
                      {"path", s.path.empty() ? Json() : Json(s.path)}});
      if (!s.problem.empty()) rows.back()["problem"] = s.problem;
      continue;
    }
    out.print("{:<20} {:>8} {:>6} {:>10} {:>12}  {}\n", s.name, s.pid > 0 ? fmt::format("{}", s.pid) : "-",
              s.ranks > 0 ? fmt::format("{}", s.ranks) : "-", s.step ? fmt::format("{}", *s.step) : "-",
              s.step ? bytes_text(s.bytes) : "-",
              !s.problem.empty() ? s.problem
              : !s.path.empty()  ? s.path
              : s.step           ? "memory"
                                 : "-");
  }
  if (out.json()) out.document({{"servers", std::move(rows)}});
  return 0;
}

int remove(const std::vector<std::string>& names) {
  int status = 0;
  for (const std::string& name : names) {
    try {
      offload::remove_server(name);
    } catch (const Error& e) {  // continue with the others
      tools::report_error(e.what());
      if (status == 0) status = exit_code(e.code());
    }
  }
  return status;
}

int dump(const std::string& name, const std::string& dir, Output& out) {
  const std::string step = offload::dump_server(name, dir);
  if (out.json())
    out.document({{"server", name}, {"checkpoint", step}});
  else
    out.print("{}\n", step);
  return 0;
}

int verify(const std::string& name, Output& out) {
  const std::vector<std::string> problems = offload::verify_server(name);
  if (out.json()) out.document({{"server", name}, {"problems", problems}});
  for (const std::string& p : problems) tools::report_error(fmt::format("server '{}': {}", name, p));
  if (problems.empty() && !out.json()) out.print("the states of server '{}' are complete and undamaged\n", name);
  return problems.empty() ? 0 : exit_code(Errc::Corrupt);
}

}  // namespace

int main(int argc, char** argv) {
  tools::BenchArguments a;
  offload::ServeOptions server;
  std::string capacity, block_size = "1MiB", dir;
  std::vector<std::string> names;
  bool memory = false;
  return tools::run_main(
      argc, argv,
      {.name = "ds-offload",
       .purpose = "keep optimizer states of runs in a server, and time disks and updates for offloading",
       .usage = {"serve NAME (--shm | --path DIR) [options]", "ls [options]", "rm NAME...", "dump NAME DIR",
                 "verify NAME", "bench [options]"},
       .examples = {{"ds-offload serve states --shm --capacity 100GiB &",
                     "keep states for a run with offload_optimizer "
                     "{\"device\": \"server\", \"name\": \"states\"}"},
                    {"ds-offload dump states out", "write its state as a checkpoint"},
                    {"ds-offload bench --path /mnt/nvme", "time a disk, and updates in memory; prints an aio section"},
                    {"ds-offload bench --params 10000000 --optimizer AdamW,Lion", "time updates only"}}},
      [&](CLI::App& app) -> tools::Body {
        CLI::App* const serving = app.add_subcommand("serve", "keep the states of a run beyond its end");
        CLI::App* const listing = app.add_subcommand("ls", "list servers, and states that ended servers have left");
        CLI::App* const removing = app.add_subcommand("rm", "end servers, and remove their states");
        CLI::App* const dumping = app.add_subcommand("dump", "write the state of a server as a checkpoint");
        CLI::App* const verifying = app.add_subcommand("verify", "read and check the whole state of a server");
        CLI::App* const command = app.add_subcommand("bench", "time files of a disk, and updates in memory");
        serving->add_option("NAME", server.name, "name of the server")->required();
        serving->add_flag("--shm", memory, "keep the states in shared memory");
        serving->add_option("--path", server.path, "keep the states in a file in this directory")->type_name("DIR");
        serving->add_option("--capacity", capacity, "the most bytes that states may take (default: all space)")
            ->type_name("SIZE");
        serving->add_flag("--checksum", server.checksum, "store and compare a checksum of each tile of the states");
        tools::add_number(*serving, "--threads", server.threads, 1, 4096,
                          "threads of updates (default: the number of cores)")
            ->type_name("N");
        serving->add_option("--method", server.way.method, "with --path: io_uring or threads (default io_uring)")
            ->type_name("NAME");
        serving->add_option("--block-size", block_size, "with --path: size of a request (default 1MiB)")
            ->type_name("SIZE");
        tools::add_number(*serving, "--queue-depth", server.way.depth, 1, 4096,
                          "with --path: requests in flight, or threads (default 8)")
            ->type_name("N");
        removing->add_option("NAME", names, "names of servers")->required();
        dumping->add_option("NAME", server.name, "name of the server")->required();
        dumping->add_option("DIR", dir, "run directory in which to write the step")->required();
        verifying->add_option("NAME", server.name, "name of the server")->required();
        tools::add_bench_options(*command, a);
        return [&, serving, listing, removing, dumping, verifying, command](Output& out) {
          if (serving->parsed()) {
            server.way.block_bytes = tools::parse_bytes("--block-size", block_size);
            offload::validate(offload::FileOptions{
                .methods = {server.way.method}, .block_bytes = {server.way.block_bytes}, .depths = {server.way.depth}});
            return serve(server, memory, capacity);
          }
          if (listing->parsed()) return list(out);
          if (removing->parsed()) return remove(names);
          if (dumping->parsed()) return dump(server.name, dir, out);
          if (verifying->parsed()) return verify(server.name, out);
          if (!command->parsed())
            throw Error(Errc::Config,
                        "a command is missing: serve, ls, rm, dump, verify, bench; see ds-offload --help");
          return tools::bench(a, out);
        };
      });
}
