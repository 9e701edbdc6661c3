// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a run needs, before it starts: memory of each rank by tag, traffic, work. The numbers are those of the plan that
// the engine allocates and communicates by (report/run_plan).

#include <span>
#include <string>
#include <vector>

#include "ds/config.h"
#include "ds/mesh.h"

namespace ds::memreport {

struct Source {
  ConfigResult config;  // read for `ranks`
  int ranks = 1;
};

// The configuration that `path` is, or is of: a configuration ("-": standard input); a model (a directory with a
// config.json, or such a file), which is trained in bf16 with one sample per micro-batch where `overrides` say nothing
// else; one of our checkpoints (a run directory, or a step of one). `overrides` as of load_config. ranks 0: those of
// the checkpoint, else 1. Diagnostics are in the result. Throws Errc::Io for what cannot be read, Errc::Unavailable for
// checkpoints that do not say their model, and as find_checkpoint.
DS_API Source open_source(const std::string& path, std::span<const std::string> overrides, int ranks);

struct World {
  int ranks = 1;
  int nodes = 1;  // divides ranks: rank r is on node r / (ranks / nodes)
};

struct TagBytes {
  std::string tag;  // "params", "optimizer", ...: one list for all tools
  i64 bytes = 0;
  bool operator==(const TagBytes&) const = default;
};

struct Traffic {
  std::string name;          // "axis.collective": "dp.reduce_scatter"
  i64 calls = 0, bytes = 0;  // sent by a rank in a step
  bool operator==(const Traffic&) const = default;
};

// Ranks that hold and send the same; where tensor-parallel ranks sum gradients of small parameters, whose slices not
// all own, the numbers are those of the rank with most of them.
struct RankGroup {
  std::vector<int> ranks;  // ascending
  int stage = 0;           // of the pipeline
  i64 num_params = 0;      // that they compute with
  std::vector<TagBytes> memory;
  i64 device_bytes = 0;  // of the device: all tags, but beside a GPU "host"
  i64 host_bytes = 0;    // beside a GPU
  std::vector<Traffic> traffic;
};

// What a node's ranks take together, of host memory; on the CPU that is all of theirs.
struct NodeBytes {
  int node = 0;
  i64 host_bytes = 0;
};

struct Prediction {
  World world;
  MeshShape mesh;
  std::string device;             // "cpu", "cuda"
  i64 num_params = 0;             // of the whole model
  i64 tokens_per_step = 0;        // of all ranks
  double flops_per_token = 0;     // forward and backward, without what is computed again; full attention
  double bubble_fraction = 0;     // of the ranks' time in the pipeline, where a backward pass takes two forward ones
  std::vector<RankGroup> groups;  // stage by stage
  size_t worst = 0;               // group whose device_bytes are the most
  NodeBytes fullest;              // node

  const RankGroup& worst_group() const { return groups[worst]; }
};

// `config`: read for these ranks; with a model. `device`: where it is to run, which need not be here; Auto is the CPU.
// Throws Errc::Config for ranks that do not spread over the nodes evenly, and what a run would throw for a model that
// cannot be built. Reads no file.
DS_API Prediction predict(const Config& config, const World& world, DeviceKind device);

// For people: the rank that needs most by tag, the others in a line each (`all`: by tag too), traffic, work.
DS_API std::string text(const Prediction& prediction, bool all);
// As a JSON object.
DS_API std::string json(const Prediction& prediction);

// The memory of each rank as stacked bars. `limit`: bytes that each rank has; 0: not told. As text for a terminal of so
// many columns; the others need nothing else to be shown.
DS_API std::string plot_text(const Prediction& prediction, i64 limit, int columns, bool colour);
DS_API std::string plot_svg(const Prediction& prediction, i64 limit);
DS_API std::string plot_html(const Prediction& prediction, i64 limit);

// Model states of one rank in the ZeRO paper's accounting: 16-bit parameters and gradients, 12 bytes of optimizer.
struct PaperStates {
  double params = 0, grads = 0, optimizer = 0;  // bytes
  double sent_elems = 0;                        // in a step
};
DS_API PaperStates paper_states(double params, int stage, int ranks);

// The formulas of the field with these numbers in them, block by block with their sources; what they are compared with,
// not what a run takes. The second of a number of parameters alone.
DS_API std::string explain(const Config& config, const World& world);
DS_API std::string explain(double params, int stage, int ranks);

}  // namespace ds::memreport
