// SPDX-License-Identifier: Apache-2.0
#include "common/offload_bench.h"

#include <filesystem>
#include <optional>

#include "common/copying.h"
#include "common/progress.h"
#include "ds/units.h"

namespace ds::tools {
namespace {

using Json = nlohmann::ordered_json;

// The section of a configuration for `way`.
Json aio_section(const offload::FileWay& way) {
  Json aio = {{"method", way.method}, {"block_size", way.block_bytes}};
  aio[way.method == "threads" ? "intra_op_parallelism" : "queue_depth"] = way.depth;
  return aio;
}

std::vector<offload::FileRow> bench_files(const BenchArguments& a, Output& out, ProgressLine& progress) {
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

offload::UpdateResult bench_updates(const BenchArguments& a, ProgressLine& progress) {
  return offload::measure_updates(a.updates, [&](const offload::UpdateRow& r) {
    progress.show(fmt::format("{}: {:.3g} parameters/s", r.optimizer, r.params_per_s));
  });
}

}  // namespace

int bench(BenchArguments& a, Output& out) {
  a.updates.loops = a.files.loops;
  a.files.bytes = parse_bytes("--size", a.size);
  a.files.block_bytes.clear();
  for (const std::string& text : a.block_sizes) a.files.block_bytes.push_back(parse_bytes("--block-size", text));
  if (a.files.dir.empty() && a.updates.params == 0)
    throw Error(Errc::Config, "there is nothing to time: --params 0 without --path");
  validate(a.files);
  validate(a.updates);
  ProgressLine progress;
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
      document["path"] = std::filesystem::absolute(a.files.dir).lexically_normal();
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

void add_bench_options(CLI::App& command, BenchArguments& a) {
  command.add_option("--path", a.files.dir, "directory of the disk to time (default: none)")->type_name("DIR");
  command.add_option("--size", a.size, "size of the file (default 1GiB)")->type_name("SIZE");
  command.add_option("--block-size", a.block_sizes, "sizes of a request (default 256KiB,1MiB,4MiB)")
      ->delimiter(',')
      ->type_name("SIZE,...");
  const auto set_depths = [&](const std::vector<std::string>& texts) {
    a.files.depths.clear();
    for (const std::string& text : texts)
      a.files.depths.push_back(static_cast<int>(parse_integer("--queue-depth", text, 1, 4096)));
  };
  command
      .add_option_function<std::vector<std::string>>("--queue-depth", set_depths,
                                                     "requests in flight, or threads (default 1,4,8,32)")
      ->delimiter(',')
      ->type_name("N,...");
  command.add_option("--method", a.files.methods, "io_uring, threads (default: both)")
      ->delimiter(',')
      ->type_name("NAME,...");
  add_number(command, "--params", a.updates.params, 0, i64{1} << 40,
             "parameters of an update (default 100000000; 0: none)")
      ->type_name("N");
  command
      .add_option("--optimizer", a.updates.optimizers,
                  "optimizers to time (default AdamW,AdamW8bit,SGD,Lion,Lamb,Adagrad)")
      ->delimiter(',')
      ->type_name("NAME,...");
  add_number(command, "--threads", a.updates.threads, 1, 4096, "threads of updates (default: the number of cores)")
      ->type_name("N");
  add_number(command, "--loops", a.files.loops, 1, 1000, "measurements of each, of which the median counts (default 3)")
      ->type_name("N");
}

}  // namespace ds::tools
