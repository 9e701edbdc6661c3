// SPDX-License-Identifier: Apache-2.0
// ds-offload: measures where state can stay outside of the memory that trains, and serves it to runs.

#include <csignal>
#include <optional>

#include "common/copying.h"
#include "common/progress.h"
#include "common/tool.h"
#include "ds/offload.h"
#include "ds/units.h"

namespace {

using namespace ds;
using Json = nlohmann::ordered_json;
using tools::Output;

struct Arguments {
  offload::FileOptions files;
  offload::UpdateOptions updates;
  std::string size = "1GiB";
  std::vector<std::string> block_sizes{"256KiB", "1MiB", "4MiB"};
};

// The section of a configuration that asks for it.
Json aio_section(const offload::FileWay& way) {
  Json aio = {{"method", way.method}, {"block_size", way.block_bytes}};
  aio[way.method == "threads" ? "intra_op_parallelism" : "queue_depth"] = way.depth;
  return aio;
}

std::vector<offload::FileRow> bench_files(const Arguments& a, Output& out, tools::ProgressLine& progress) {
  bool first = true;
  return offload::measure_files(a.files, [&](const offload::FileRow& r) {
    progress.show(fmt::format("{} {} x {}", r.way.method, bytes_text(r.way.block_bytes), r.way.depth));
    if (out.json()) return;
    if (std::exchange(first, false))
      out.print("file of {} in {}{}\n{:<10} {:>12} {:>6} {:>12} {:>12}\n", bytes_text(a.files.bytes), a.files.dir,
                r.direct ? "" : ", through the page cache", "method", "block", "depth", "read GB/s", "write GB/s");
    out.print("{:<10} {:>12} {:>6} {:>12.2f} {:>12.2f}\n", r.way.method, bytes_text(r.way.block_bytes), r.way.depth,
              r.read_gbps, r.write_gbps);
  });
}

offload::UpdateResult bench_updates(const Arguments& a, tools::ProgressLine& progress) {
  return offload::measure_updates(a.updates, [&](const offload::UpdateRow& r) {
    progress.show(fmt::format("{}: {:.3g} parameters/s", r.optimizer, r.params_per_s));
  });
}

int bench(Arguments& a, Output& out) {
  a.files.bytes = tools::parse_bytes("--size", a.size);
  a.files.block_bytes.clear();
  for (const std::string& text : a.block_sizes) a.files.block_bytes.push_back(tools::parse_bytes("--block-size", text));
  if (a.files.dir.empty() && a.updates.params == 0)
    throw Error(Errc::Config, "there is nothing to time: --params 0 without --path");
  validate(a.files);
  validate(a.updates);
  tools::ProgressLine progress;
  Json document = Json::object();
  std::vector<offload::FileRow> files;
  if (!a.files.dir.empty()) files = bench_files(a, out, progress);
  std::optional<offload::UpdateResult> updates;
  if (a.updates.params > 0) updates = bench_updates(a, progress);
  if (!files.empty()) {
    const offload::FileRow& best = offload::best_of(files);
    if (out.json()) {
      Json rows = Json::array();
      for (const offload::FileRow& r : files)
        rows.push_back({{"method", r.way.method},
                        {"block_bytes", r.way.block_bytes},
                        {"depth", r.way.depth},
                        {"direct", r.direct},
                        {"read_gb_per_s", r.read_gbps},
                        {"write_gb_per_s", r.write_gbps}});
      document["path"] = a.files.dir;
      document["file_bytes"] = a.files.bytes;
      document["files"] = std::move(rows);
      document["aio"] = aio_section(best.way);
    } else {
      out.print("\nfor a tile that is read and written, {:.2f} GB/s:\n", best.both_gbps());
      out.data("  \"aio\": " + aio_section(best.way).dump() + "\n");
    }
  }
  if (updates && out.json()) {
    Json rows = Json::array();
    for (const offload::UpdateRow& r : updates->rows)
      rows.push_back({{"optimizer", r.optimizer},
                      {"params_per_s", r.params_per_s},
                      {"bytes_per_param", r.bytes_per_param},
                      {"gb_per_s", r.gbps}});
    document["kernels"] = updates->kernels;
    document["threads"] = updates->threads;
    document["params"] = a.updates.params;
    document["memory_gb_per_s"] = updates->memory_gbps;
    document["updates"] = std::move(rows);
  } else if (updates) {
    out.print("{}updates of {} parameters, {}, {} thread{}; memory {:.2f} GB/s\n", files.empty() ? "" : "\n",
              a.updates.params, updates->kernels, updates->threads, updates->threads == 1 ? "" : "s",
              updates->memory_gbps);
    out.print("{:<10} {:>14} {:>8} {:>10} {:>9}\n", "optimizer", "parameters/s", "bytes", "GB/s", "of memory");
    for (const offload::UpdateRow& r : updates->rows)
      out.print("{:<10} {:>14.4g} {:>8.2f} {:>10.2f} {:>8.0f} %\n", r.optimizer, r.params_per_s, r.bytes_per_param,
                r.gbps, 100 * r.gbps / updates->memory_gbps);
  }
  if (out.json()) out.document(document);
  return 0;
}

volatile std::sig_atomic_t stop_signal = 0;

extern "C" void on_signal(int signal) { stop_signal = signal; }

int serve(offload::ServeOptions& o, bool memory, const std::string& capacity) {
  if (memory == !o.path.empty()) throw Error(Errc::Config, "serve wants either --shm or --path DIR");
  if (!capacity.empty()) o.capacity = tools::parse_bytes("--capacity", capacity);
  for (const int s : {SIGTERM, SIGINT, SIGHUP}) {
    if (std::signal(s, on_signal) == SIG_IGN && s == SIGHUP) std::signal(s, SIG_IGN);  // nohup(1)
  }
  offload::serve(
      o, [&](const std::string& what) { tools::report_note(fmt::format("server '{}': {}", o.name, what)); },
      [] { return stop_signal != 0; });
  tools::report_note(fmt::format("server '{}' has ended; what it has stays, until ds-offload rm {}", o.name, o.name));
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
                      {"pid", s.runs ? Json(s.pid) : Json()},
                      {"ranks", s.ranks},
                      {"step", s.step ? Json(*s.step) : Json()},
                      {"bytes", s.bytes},
                      {"path", s.path.empty() ? Json() : Json(s.path)}});
      if (!s.problem.empty()) rows.back()["problem"] = s.problem;
      continue;
    }
    out.print("{:<20} {:>8} {:>6} {:>10} {:>12}  {}\n", s.name, s.runs ? fmt::format("{}", s.pid) : "-",
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
  for (const std::string& name : names) offload::remove_server(name);
  return 0;
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
  if (problems.empty() && !out.json()) out.print("the states of server '{}' are whole\n", name);
  return problems.empty() ? 0 : exit_code(Errc::Corrupt);
}

}  // namespace

int main(int argc, char** argv) {
  Arguments a;
  offload::ServeOptions server;
  std::string capacity, block_size = "1MiB", dir;
  std::vector<std::string> names;
  bool memory = false;
  return tools::run_main(
      argc, argv,
      {.name = "ds-offload",
       .purpose = "own optimizer states for runs, and measure where they can be offloaded to",
       .usage = {"serve NAME (--shm | --path DIR) [options]", "ls [options]", "rm NAME...", "dump NAME DIR",
                 "verify NAME", "bench [options]"},
       .examples = {{"ds-offload serve states --shm --capacity 100GiB &",
                     "a server; a run has offload_optimizer "
                     "{\"device\": \"server\", \"name\": \"states\"}"},
                    {"ds-offload dump states out", "its state as a checkpoint"},
                    {"ds-offload bench --path /mnt/nvme", "a disk, and updates in memory; prints an aio section"},
                    {"ds-offload bench --params 10000000 --optimizer AdamW,Lion", "updates alone"}}},
      [&](CLI::App& app) -> tools::Body {
        CLI::App* const serving = app.add_subcommand("serve", "own the states of a run, which outlive it");
        CLI::App* const listing = app.add_subcommand("ls", "list servers and what they have left");
        CLI::App* const removing = app.add_subcommand("rm", "end servers, and remove what they have");
        CLI::App* const dumping = app.add_subcommand("dump", "write a server's state as a checkpoint");
        CLI::App* const verifying = app.add_subcommand("verify", "read all of a server's state");
        CLI::App* const command = app.add_subcommand("bench", "time files of a disk, and updates in memory");
        serving->add_option("NAME", server.name, "of the server")->required();
        serving->add_flag("--shm", memory, "keep the states in shared memory");
        serving->add_option("--path", server.path, "keep the states in a file in this directory")->type_name("DIR");
        serving->add_option("--capacity", capacity, "bytes that states may take (default: what is there)")
            ->type_name("SIZE");
        tools::add_number(*serving, "--threads", server.threads, 1, 4096, "of updates (default: the cores)")
            ->type_name("N");
        serving->add_option("--method", server.way.method, "of a disk: io_uring or threads (default io_uring)")
            ->type_name("NAME");
        serving->add_option("--block-size", block_size, "of a disk: size of a request (default 1MiB)")
            ->type_name("SIZE");
        tools::add_number(*serving, "--queue-depth", server.way.depth, 1, 4096,
                          "of a disk: requests under way, or threads (default 8)")
            ->type_name("N");
        removing->add_option("NAME", names, "of servers")->required();
        dumping->add_option("NAME", server.name, "of the server")->required();
        dumping->add_option("DIR", dir, "run directory that gets a step")->required();
        verifying->add_option("NAME", server.name, "of the server")->required();
        command->add_option("--path", a.files.dir, "directory of the disk to time (default: none)")->type_name("DIR");
        command->add_option("--size", a.size, "of the file (default 1GiB)")->type_name("SIZE");
        command->add_option("--block-size", a.block_sizes, "sizes of a request (default 256KiB,1MiB,4MiB)")
            ->delimiter(',')
            ->type_name("SIZE,...");
        const auto set_depths = [&](const std::vector<std::string>& texts) {
          a.files.depths.clear();
          for (const std::string& text : texts)
            a.files.depths.push_back(static_cast<int>(tools::parse_integer("--queue-depth", text, 1, 4096)));
        };
        command
            ->add_option_function<std::vector<std::string>>("--queue-depth", set_depths,
                                                            "requests under way, or threads (default 1,4,8,32)")
            ->delimiter(',')
            ->type_name("N,...");
        command->add_option("--method", a.files.methods, "io_uring, threads (default: both)")
            ->delimiter(',')
            ->type_name("NAME,...");
        tools::add_number(*command, "--params", a.updates.params, 0, i64{1} << 40,
                          "parameters of an update (default 100000000; 0: none)")
            ->type_name("N");
        command
            ->add_option("--optimizer", a.updates.optimizers,
                         "optimizers to time (default AdamW,AdamW8bit,SGD,Lion,Lamb,Adagrad)")
            ->delimiter(',')
            ->type_name("NAME,...");
        tools::add_number(*command, "--threads", a.updates.threads, 1, 4096, "of updates (default: the cores)")
            ->type_name("N");
        tools::add_number(*command, "--loops", a.files.loops, 1, 1000,
                          "times of each, of which the median counts (default 3)")
            ->type_name("N");
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
          a.updates.loops = a.files.loops;
          return bench(a, out);
        };
      });
}
