// SPDX-License-Identifier: Apache-2.0
// ds-ckpt-merge: whole tensors out of a sharded checkpoint: a file, a Hugging Face directory, a stream.

#include "common/copying.h"
#include "common/tool.h"
#include "ds/checkpoint.h"

namespace {

std::optional<ds::DType> parse_dtype(const std::string& name) {
  for (const ds::DType t : {ds::DType::F32, ds::DType::BF16, ds::DType::F16}) {
    if (ds::dtype_name(t) == name) return t;
  }
  return std::nullopt;
}

void print(ds::tools::Output& out, const ds::MergeResult& r) {
  const std::string dtype(r.dtype ? ds::dtype_name(*r.dtype) : "mixed");
  if (out.json()) {
    out.document({{"checkpoint", r.source},
                  {"step", r.step},
                  {"output", r.output},
                  {"format", r.format},
                  {"dtype", dtype},
                  {"tensors", r.num_tensors},
                  {"parameters", r.num_parameters},
                  {"bytes", r.bytes},
                  {"files", r.num_files},
                  {"tied", r.tied},
                  {"tokenizer", r.tokenizer},
                  {"verified", r.verified},
                  {"seconds", r.seconds}});
    return;
  }
  if (r.output == "-" && !out.to_file()) return;  // the model was written to standard output
  out.print("checkpoint  {}\noutput      {}\nformat      {}\ndtype       {}\ntensors     {}\nparameters  {}\n",
            r.source, r.output, r.format, dtype, r.num_tensors, r.num_parameters);
  out.print("bytes       {}\nfiles       {}\nverified    {}\n", r.bytes, r.num_files, r.verified ? "yes" : "no");
}

}  // namespace

int main(int argc, char** argv) {
  std::string dir, output, dtype, shard_size;
  ds::MergeOptions options;
  return ds::tools::run_main(
      argc, argv,
      {.name = "ds-ckpt-merge",
       .purpose = "merge a sharded checkpoint into whole tensors",
       .usage = {"[options] DIR -o OUT"},
       .examples = {{"ds-ckpt-merge run -o model.safetensors", "write the newest step of a run"},
                    {"ds-ckpt-merge run -o model --format hf --dtype bf16",
                     "write a directory that transformers loads"},
                    {"ds-ckpt-merge run --tag step-00000100 -o model.h5 --dtype fp32 --verify",
                     "write the master weights of one step, with checks"},
                    {"ds-ckpt-merge run -o - | sha256sum", "write a stream"}}},
      [&](CLI::App& app) -> ds::tools::Body {
        app.add_option("DIR", dir, "run directory (its latest step), one step, or any model that ds-shard reads")
            ->required()
            ->type_name("DIR");
        app.add_option(
               "-o,--out", output,
               "file to write (.safetensors, .h5 or .hdf5 chooses the format), directory, or - for standard output")
            ->required()
            ->type_name("OUT");
        app.add_option("--format", options.format,
                       "safetensors, hdf5, hf (a Hugging Face directory) or checkpoint (a run directory for one rank)")
            ->type_name("{safetensors,hdf5,hf,checkpoint}");
        app.add_option("--tag", options.tag, "the step to read (default: the newest)")->type_name("STEP");
        app.add_option("--dtype", dtype, "type of the weights (default: as trained)")
            ->type_name("DTYPE")
            ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
        app.add_option("--only", options.only, "write only parameters whose names match; may be given again")
            ->type_name("GLOB")
            ->allow_extra_args(false);
        app.add_flag("--optimizer", options.optimizer, "also write the optimizer states, as optimizer.<state>.<name>");
        app.add_option("--max-shard-size", shard_size,
                       "write a directory of files of at most SIZE, such as 5GB or 500MiB (default for hf: 5GB)")
            ->type_name("SIZE");
        app.add_option("--config", options.config, "hf: config.json to write (default: the checkpoint's own)")
            ->type_name("FILE");
        app.add_option("--tokenizer", options.tokenizer, "hf: directory from which the tokenizer's files are copied")
            ->type_name("DIR");
        ds::tools::add_number(app, "--positions", options.positions, 1, ds::kMostPositions,
                              "hf: repeat a learned position embedding to N rows")
            ->type_name("N");
        app.add_flag("--verify", options.verify, "check every checksum before, and compare the output after");
        return [&](ds::tools::Output& out) {
          options.dtype = parse_dtype(dtype);
          if (!shard_size.empty()) options.max_shard_bytes = ds::tools::parse_bytes("--max-shard-size", shard_size);
          if (output == "-") ds::tools::claim_stdout(out);
          ds::tools::check_outputs_differ(out, output);
          ds::tools::CopyLine progress;
          options.progress = progress.hook();
          print(out, ds::merge_checkpoint(dir, output, options));
          return 0;
        };
      });
}
