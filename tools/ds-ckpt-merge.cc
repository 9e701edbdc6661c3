// SPDX-License-Identifier: Apache-2.0
// ds-ckpt-merge: one file out of a sharded checkpoint.

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
  if (out.json()) {
    out.document({{"checkpoint", r.step_dir},
                  {"step", r.step},
                  {"output", r.output},
                  {"format", r.format},
                  {"dtype", ds::dtype_name(r.dtype)},
                  {"tensors", r.num_tensors},
                  {"parameters", r.num_parameters},
                  {"bytes", r.bytes},
                  {"tied", r.tied},
                  {"verified", r.verified},
                  {"seconds", r.seconds}});
    return;
  }
  out.print("checkpoint  {}\noutput      {}\nformat      {}\ndtype       {}\ntensors     {}\nparameters  {}\n",
            r.step_dir, r.output, r.format, ds::dtype_name(r.dtype), r.num_tensors, r.num_parameters);
  out.print("bytes       {}\nverified    {}\n", r.bytes, r.verified ? "yes" : "no");
}

}  // namespace

int main(int argc, char** argv) {
  std::string dir, output, dtype;
  ds::MergeOptions options;
  return ds::tools::run_main(
      argc, argv,
      {.name = "ds-ckpt-merge",
       .purpose = "merge a sharded checkpoint into one file",
       .usage = {"[options] DIR -o OUT"},
       .examples = {{"ds-ckpt-merge run -o model.safetensors", "the newest step of a run"},
                    {"ds-ckpt-merge run/step-00000100 -o model.h5 --dtype fp32 --verify",
                     "one step, master weights, checked"}}},
      [&](CLI::App& app) -> ds::tools::Body {
        app.add_option("DIR", dir, "run directory (its latest step) or one step")->required()->type_name("DIR");
        app.add_option("-o,--out", output, "file to write; .safetensors, .h5 or .hdf5 says the format")
            ->required()
            ->type_name("OUT");
        app.add_option("--format", options.format, "write this format whatever the suffix")
            ->type_name("{safetensors,hdf5}");  // checked by the library, which also knows what is not there yet
        app.add_option("--dtype", dtype, "type of the weights (default: as trained)")
            ->type_name("DTYPE")
            ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
        app.add_flag("--optimizer", options.optimizer, "also the optimizer state, as optimizer.<state>.<name>");
        app.add_flag("--verify", options.verify, "check every checksum before, compare the output after");
        return [&](ds::tools::Output& out) {
          options.dtype = parse_dtype(dtype);
          print(out, ds::merge_checkpoint(ds::find_checkpoint(dir), output, options));
          return 0;
        };
      });
}
