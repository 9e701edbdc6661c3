// SPDX-License-Identifier: Apache-2.0
// ds-shard: writes any model or checkpoint as a run directory of a layout, and shows which rank owns what in one.

#include <algorithm>
#include <charconv>
#include <limits>

#include "common/copying.h"
#include "common/tool.h"
#include "ds/checkpoint.h"

namespace {

using Json = nlohmann::ordered_json;

// As "8 (dp 2, pp 2, tp 2)": axes of several ranks.
std::string ranks_text(ds::i64 ranks, const std::optional<ds::MeshShape>& mesh) {
  std::string axes;
  const auto add = [&](const char* name, int degree) {
    if (degree > 1) axes += fmt::format("{}{} {}", axes.empty() ? "" : ", ", name, degree);
  };
  if (mesh) {
    add("dp", mesh->dp);
    add("pp", mesh->pp);
    add("tp", mesh->tp);
    add("sp", mesh->sp);
    add("workers", mesh->workers);
  }
  return axes.empty() ? fmt::format("{}", ranks) : fmt::format("{} ({})", ranks, axes);
}

Json mesh_json(const ds::MeshShape& mesh) {
  Json j = {{"dp", mesh.dp}, {"pp", mesh.pp}, {"tp", mesh.tp}, {"sp", mesh.sp}};
  if (mesh.workers > 1) j["workers"] = mesh.workers;
  return j;
}

void print(ds::tools::Output& out, const ds::ShardResult& r) {
  if (out.json()) {
    out.document({{"source", r.source},
                  {"checkpoint", r.step_dir},
                  {"step", r.step},
                  {"world_size", r.mesh.world()},
                  {"mesh", mesh_json(r.mesh)},
                  {"stage", r.stage},
                  {"dtype", ds::dtype_name(r.dtype)},
                  {"tensors", r.num_tensors},
                  {"parameters", r.num_parameters},
                  {"bytes", r.bytes},
                  {"optimizer", r.optimizer},
                  {"seconds", r.seconds}});
    return;
  }
  out.print("source      {}\ncheckpoint  {}\nstep        {}\nranks       {}\nstage       {}\n", r.source, r.step_dir,
            r.step, ranks_text(r.mesh.world(), r.mesh), r.stage);
  out.print("dtype       {}\ntensors     {}\nparameters  {}\nbytes       {}\noptimizer   {}\n", ds::dtype_name(r.dtype),
            r.num_tensors, r.num_parameters, r.bytes, r.optimizer ? "yes" : "no");
}

Json owners_json(const ds::CheckpointSummary::Param& p) {
  Json owners = Json::array();
  for (const auto& o : p.owners) {
    owners.push_back({{"rank", o.rank}, {"begin", o.begin}, {"count", o.count}});
    if (!o.slice.empty()) owners.back()["slice"] = {{"dim", o.slice_dim}, {"ranges", o.slice_ranges}};
  }
  return owners;
}

// The states of AdamW, and others that the step contains.
std::vector<ds::State> shown_states(const ds::CheckpointSummary& s) {
  std::vector<ds::State> shown;
  for (const ds::State state : ds::kStates) {
    if (state <= ds::State::ExpAvgSq ||
        std::ranges::any_of(s.ranks, [&](const auto& r) { return r.state_bytes[state] > 0; }))
      shown.push_back(state);
  }
  return shown;
}

void show_json(ds::tools::Output& out, const ds::CheckpointSummary& s) {
  Json ranks = Json::array(), params = Json::array();
  for (size_t r = 0; r < s.ranks.size(); ++r) {
    Json row = {{"rank", r}, {"elements", s.ranks[r].elems}};
    for (const ds::State state : shown_states(s))
      row[fmt::format("{}_bytes", ds::state_name(state))] = s.ranks[r].state_bytes[state];
    row["file_bytes"] = s.ranks[r].file_bytes;
    ranks.push_back(std::move(row));
  }
  for (const auto& p : s.params) {
    Json row = {{"name", p.name}, {"dtype", ds::dtype_name(p.dtype)}, {"shape", p.shape}};
    if (!p.tied_to.empty()) row["tied_to"] = p.tied_to;
    row["owners"] = owners_json(p);
    params.push_back(std::move(row));
  }
  out.document({{"checkpoint", s.step_dir},
                {"step", s.step},
                {"optimizer_step", s.optimizer_step},
                {"consumed_samples", s.consumed_samples},
                {"world_size", s.world_size},
                {"mesh", s.mesh ? mesh_json(*s.mesh) : Json()},
                {"stage", s.stage},
                {"layout", s.layout},
                {"dtype", ds::dtype_name(s.dtype)},
                {"isa", s.isa},
                {"ranks", std::move(ranks)},
                {"parameters", std::move(params)}});
}

void show(ds::tools::Output& out, const ds::CheckpointSummary& s, bool parameters) {
  if (out.json()) return show_json(out, s);
  out.print("checkpoint  {}\nstep        {}\nranks       {}\nstage       {}\ndtype       {}\n\n", s.step_dir, s.step,
            ranks_text(s.world_size, s.mesh), s.stage, ds::dtype_name(s.dtype));
  out.print("{:>5} {:>14}", "rank", "elements");
  for (const ds::State state : shown_states(s)) out.print(" {:>16}", fmt::format("{} bytes", ds::state_name(state)));
  out.print(" {:>14}\n", "file bytes");
  for (size_t r = 0; r < s.ranks.size(); ++r) {
    out.print("{:>5} {:>14}", r, s.ranks[r].elems);
    for (const ds::State state : shown_states(s)) out.print(" {:>16}", s.ranks[r].state_bytes[state]);
    out.print(" {:>14}\n", s.ranks[r].file_bytes);
  }
  if (!parameters) return;
  out.print("\nparameter, dtype, shape: elements of each rank\n");
  for (const auto& p : s.params) {
    out.print("{}  {}  [{}]:", p.name, ds::dtype_name(p.dtype), fmt::join(p.shape, ","));
    if (!p.tied_to.empty()) out.print(" tied to {}", p.tied_to);
    for (const auto& o : p.owners) out.print(" {}:{}-{}{}", o.rank, o.begin, o.begin + o.count, o.slice);
    out.print("\n");
  }
}

// A number of experts, or a config.json.
void set_mixture(ds::Upcycling& to, const std::string& mixture, bool has_per_token) {
  const bool is_number = !mixture.empty() && mixture.find_first_not_of("0123456789") == mixture.npos;
  if (has_per_token && !is_number)
    throw ds::Error(ds::Errc::Config, "--experts-per-token needs --upcycle with a number of experts");
  if (!is_number) {
    to.config = mixture;
    return;
  }
  const auto [end, error] = std::from_chars(mixture.data(), mixture.data() + mixture.size(), to.experts);
  if (error != std::errc() || to.experts < 1 || to.experts > 4096)
    throw ds::Error(ds::Errc::Config, fmt::format("--upcycle {}: 1 to 4096 experts", mixture));
  if (!has_per_token) to.per_token = std::min(to.per_token, to.experts);
}

}  // namespace

int main(int argc, char** argv) {
  std::string source, dir, shown;
  ds::ShardOptions options;
  std::string mixture;
  bool parameters = false;
  return ds::tools::run_main(
      argc, argv,
      {.name = "ds-shard",
       .purpose = "shard a model or checkpoint for a layout of ranks, and show which rank owns what",
       .usage = {"[options] SRC -o DIR --dp N --tp T --pp P", "show [options] DIR"},
       .examples = {{"ds-shard model-dir -o run --dp 8 --stage 3",
                     "shard a Hugging Face model for 8 ranks at ZeRO stage 3"},
                    {"ds-shard model-dir -o run --dp 2 --tp 2 --pp 2", "shard it for 8 ranks, 2 along each axis"},
                    {"ds-shard Qwen3-0.6B -o experts --upcycle 8", "make it a mixture of 8 experts"},
                    {"ds-shard run -o run64 --dp 64 --stage 3", "convert a checkpoint to another layout"},
                    {"ds-shard show run", "show what each rank holds"}}},
      [&](CLI::App& app) -> ds::tools::Body {
        CLI::App* show_command = app.add_subcommand("show", "print what each rank of a checkpoint holds");
        show_command->add_option("DIR", shown, "run directory (its newest step) or one step")
            ->required()
            ->type_name("DIR");
        show_command->add_flag("--parameters", parameters,
                               "also print every parameter with the ranks that own its elements");
        show_command->add_option("--tag", options.tag, "the step to show (default: the newest)")->type_name("STEP");
        app.add_option("SRC", source,
                       "safetensors, HDF5 or PyTorch file, model directory, run directory, DeepSpeed checkpoint")
            ->type_name("FILE");
        app.add_option("-o,--out", dir, "run directory to write; new or empty")->type_name("DIR");
        std::vector<const CLI::Option*> of_sharding;
        const auto add_degree = [&](const char* name, int& degree, const char* what, const char* letter) {
          of_sharding.push_back(ds::tools::add_number(app, name, degree, 1, 99999, what)->type_name(letter));
        };
        add_degree("--dp", options.mesh.dp, "data-parallel ranks (default 1)", "N");
        add_degree("--tp", options.mesh.tp, "tensor-parallel ranks (default 1)", "T");
        add_degree("--pp", options.mesh.pp, "pipeline stages (default 1)", "P");
        add_degree("--sp", options.mesh.sp, "sequence-parallel ranks (default 1)", "S");
        of_sharding.push_back(
            ds::tools::add_number(app, "--stage", options.stage, 0, 3, "ZeRO stage (default 0)")->type_name("Z"));
        of_sharding.push_back(app.add_option("--partition", options.partition,
                                             "with --pp, how layers go to stages: parameters (default), uniform or "
                                             "type:REGEX")
                                  ->type_name("HOW"));
        of_sharding.push_back(app.add_option("--config", options.config,
                                             "with --tp, --pp, --positions or --upcycle, the model's config.json, or a "
                                             "directory that contains it (default: the source's)")
                                  ->type_name("FILE"));
        of_sharding.push_back(ds::tools::add_number(app, "--positions", options.positions, 1, ds::kMostPositions,
                                                    "repeat a learned position embedding to N rows")
                                  ->type_name("N"));
        of_sharding.push_back(app.add_option("--upcycle", mixture,
                                             "make a dense model a mixture of so many experts, which begin as copies "
                                             "of its MLPs; or the mixture of this config.json")
                                  ->type_name("EXPERTS"));
        CLI::Option* const per_token =
            ds::tools::add_number(app, "--experts-per-token", options.upcycling.per_token, 1, 4096,
                                  "with --upcycle N, the experts that a token chooses (default 2)")
                ->type_name("K");
        of_sharding.push_back(per_token);
        app.add_option("--tag", options.tag, "the step of SRC to read (default: the newest)")->type_name("STEP");
        return [&, show_command, of_sharding, per_token](ds::tools::Output& out) {
          if (show_command->parsed()) {
            const auto given = [](const CLI::Option* o) { return o->count() > 0; };
            if (!source.empty() || !dir.empty() || std::ranges::any_of(of_sharding, given))
              throw ds::Error(ds::Errc::Config, "show accepts a directory, --tag and --parameters, and nothing else");
            show(out, ds::describe_checkpoint(shown, options.tag), parameters);
            return 0;
          }
          if (source.empty() || dir.empty())
            throw ds::Error(ds::Errc::Config,
                            fmt::format("{} is missing; see ds-shard --help", source.empty() ? "SRC" : "--out DIR"));
          ds::tools::check_outputs_differ(out, dir);
          set_mixture(options.upcycling, mixture, per_token->count() > 0);
          ds::tools::CopyLine progress;
          options.progress = progress.hook();
          print(out, ds::shard_checkpoint(source, dir, options));
          return 0;
        };
      });
}
