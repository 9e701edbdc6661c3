// SPDX-License-Identifier: Apache-2.0
// Predictions of ds-infer: memory of a rank, the work of decoding, and the passes that are long enough to hide the
// reading of streamed weights.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "base/check.h"
#include "base/json.h"
#include "ds/memreport.h"
#include "ds/units.h"
#include "infer/session_plan.h"
#include "memreport/hardware.h"
#include "mesh/from_config.h"
#include "mesh/mesh_json.h"
#include "run/gpu_kernels.h"
#include "run/plans.h"

namespace ds::memreport {
namespace {

// The rank that needs most: the first of a pipeline stage has the largest share of everything but of slices.
const run::WholePlan& fullest(run::Plans& plans) {
  const run::WholePlan* most = nullptr;
  for (int stage = 0; stage < plans.mesh().pp; ++stage) {
    const run::WholePlan& of_stage = plans.of_stage(stage);
    if (most == nullptr || of_stage.total_memory() > most->total_memory()) most = &of_stage;
  }
  return *most;
}

run::Plans plans_for(const Config& config, const World& world, DeviceKind device, const SessionSizes& sizes) {
  return {config,
          mesh_shape(config, world.ranks),
          device,
          world.ranks / world.nodes,
          run::kernels_of(config, world.compute_capability),
          sizes};
}

}  // namespace

SessionPrediction predict_session(const Config& config, const World& world, DeviceKind device,
                                  const SessionSizes& sizes) {
  DS_CHECK(config.use == ConfigUse::Generate, Errc::Config, "the configuration is not for inference");
  DS_CHECK(world.nodes >= 1 && world.ranks % world.nodes == 0, Errc::Config,
           "{} ranks do not spread evenly over {} nodes", world.ranks, world.nodes);
  if (device == DeviceKind::Auto) device = DeviceKind::Cpu;
  run::Plans plans = plans_for(config, world, device, sizes);
  const run::WholePlan& whole = fullest(plans);
  const plan::RunPlan& plan = whole.plan;
  SessionPrediction p{.world = world,
                      .mesh = plan.mesh,
                      .device = device == DeviceKind::Cpu ? "cpu" : "cuda",
                      .dtype = std::string(dtype_name(plan.work)),
                      .sizes = sizes};
  p.num_params = whole.model.num_params();
  p.rank = rank_at(plan.mesh, plan.coord);
  const plan::TagBytes bytes = whole.memory();
  for (size_t t = 0; t < bytes.size(); ++t) {
    if (bytes[t] > 0) p.memory.push_back({std::string(tag_name(static_cast<Tag>(t))), bytes[t], whole.bounds[t]});
    p.file_bytes += plan.memory.files[t];
  }
  p.device_bytes = whole.total_memory();
  p.process_bytes = whole.process.own;
  p.host_bytes = device == DeviceKind::Cpu ? 0 : bytes[static_cast<size_t>(Tag::Host)];
  const infer::SessionPlan session = infer::plan_session(whole.model, plan, sizes);
  p.cache_bytes = session.cache_bytes;
  for (const auto& [op, total] : infer::decoding_work(whole.model, plan, session).by_op())
    p.decoding.push_back({std::string(op), total.calls, total.flops, total.bytes});
  p.streamed_bytes = plan.streamed_bytes();
  // One of three products of training is the forward pass; each token of a context sees all of it at most.
  p.flops_per_token = whole.model.flops_per_token(sizes.context) / 3 / (plan.mesh.tp * plan.mesh.pp);
  return p;
}

OpWork SessionPrediction::decoding_total() const {
  OpWork sum;
  for (const OpWork& op : decoding) sum.calls += op.calls, sum.flops += op.flops, sum.bytes += op.bytes;
  return sum;
}

void predict_times(SessionPrediction& p, const Config& config, const Hardware& hardware) {
  const Machine& machine = hardware.state().machine;
  p.matmul_flops = machine.matmul_flops(config.work_dtype());
  if (!machine.memory.empty()) {
    const OpWork work = p.decoding_total();
    p.decoding_s = std::max(work.flops / p.matmul_flops, machine.memory.seconds(work.bytes));
  }
  if (p.streamed_bytes == 0) return;
  const bool from_file = p.file_bytes > 0;
  const double rate = from_file ? machine.disk_read / (p.world.ranks / p.world.nodes) : machine.host_link;
  DS_CHECK(rate > 0, Errc::Config, "the rate at which weights are read is unknown: give {}",
           from_file ? "--disk or --disk-rate" : "--host-link");
  p.read_s = static_cast<double>(p.streamed_bytes) / rate;
  p.tokens_to_hide = static_cast<i64>(std::ceil(p.read_s * p.matmul_flops / p.flops_per_token));
}

i64 largest_batch(const Config& config, const World& world, DeviceKind device, const SessionSizes& sizes, i64 memory) {
  const auto fits = [&](i64 batch) {
    SessionSizes s = sizes;
    s.at_once = batch;
    if (sizes.cached == 0) s.cached = default_cached(s);
    run::Plans plans = plans_for(config, world, device == DeviceKind::Auto ? DeviceKind::Cpu : device, s);
    const run::WholePlan& whole = fullest(plans);
    return whole.total_memory() + whole.process.own <= memory;
  };
  i64 good = 0, bad = 1;
  while (bad <= kMostAtOnce && fits(bad)) good = std::exchange(bad, 2 * bad);
  bad = std::min(bad, kMostAtOnce + 1);
  while (bad - good > 1) {
    const i64 middle = good + (bad - good) / 2;
    (fits(middle) ? good : bad) = middle;
  }
  return good;
}

std::string text(const SessionPrediction& p) {
  std::string out =
      fmt::format("{} parameters in {}; {} rank{} on {} node{}; {}\n", p.num_params, p.dtype, p.world.ranks,
                  p.world.ranks == 1 ? "" : "s", p.world.nodes, p.world.nodes == 1 ? "" : "s", p.device);
  out += fmt::format("batch {}, context {}, chunk {}, cache {} tokens\n\nmemory of rank {}{}\n", p.sizes.at_once,
                     p.sizes.context, p.sizes.chunk, p.sizes.cached, p.rank,
                     p.world.ranks > 1 ? ", which needs most" : "");
  const auto line = [&](std::string_view name, i64 bytes, std::string_view more) {
    out += fmt::format("  {:<20} {:>14}{}\n", name, bytes_text(bytes), more);
  };
  for (const TagBytes& t : p.memory) {
    if (p.device == "cpu" || t.tag != "host")
      line(t.tag, t.bytes, t.bound == Bound::Exact ? "" : fmt::format(" {}", bound_text(t.bound)));
    if (t.tag == "activations") line("  caches", p.cache_bytes, "");
  }
  line("total", p.device_bytes, "");
  if (p.process_bytes > 0) line("process", p.process_bytes, " beside it");
  if (p.host_bytes > 0) line("host", p.host_bytes, " beside the GPU");
  if (p.file_bytes > 0) line("file", p.file_bytes, " of each rank");
  if (p.largest_batch >= 0)
    out += p.largest_batch > 0 ? fmt::format("\nlargest batch that fits: {}\n", p.largest_batch)
                               : "\nnot even a batch of 1 fits\n";
  out += fmt::format("\n{} token{} of {} text{} at the end of their context, by op of rank {}\n", p.sizes.at_once,
                     p.sizes.at_once == 1 ? "" : "s", p.sizes.at_once, p.sizes.at_once == 1 ? "" : "s", p.rank);
  const auto work = [&](const OpWork& op) {
    out += fmt::format("  {:<20} {:>6} calls {:>14} {:>10.4g} FLOPs\n", op.op, op.calls,
                       bytes_text(static_cast<i64>(op.bytes)), op.flops);
  };
  for (const OpWork& op : p.decoding) work(op);
  OpWork total = p.decoding_total();
  total.op = "total";
  work(total);
  if (p.decoding_s > 0)
    out += fmt::format("at least {:.4g} s: {:.5g} tokens/s\n", p.decoding_s,
                       static_cast<double>(p.sizes.at_once) / p.decoding_s);
  if (p.streamed_bytes == 0) return out;
  out += fmt::format("\nweights are streamed: {} are read in a pass\n", bytes_text(p.streamed_bytes));
  if (p.tokens_to_hide > 0)
    out += fmt::format(
        "reading takes {:.4g} s; at {:.4g} FLOP/s and {:.4g} FLOPs a token, computing hides it from passes of {} "
        "tokens "
        "on\n",
        p.read_s, p.matmul_flops, p.flops_per_token, p.tokens_to_hide);
  return out;
}

std::string json(const SessionPrediction& p) {
  Json memory = Json::object(), bounds = Json::object();
  for (const TagBytes& t : p.memory) {
    memory[t.tag] = t.bytes;
    if (t.bound != Bound::Exact) bounds[t.tag] = bound_text(t.bound);
  }
  Json document({{"world_size", p.world.ranks},
                 {"nodes", p.world.nodes},
                 {"mesh", mesh_json(p.mesh)},
                 {"device", p.device},
                 {"dtype", p.dtype},
                 {"num_params", p.num_params},
                 {"batch", p.sizes.at_once},
                 {"context", p.sizes.context},
                 {"chunk", p.sizes.chunk},
                 {"cache", p.sizes.cached},
                 {"rank", p.rank},
                 {"memory_bytes", memory},
                 {"cache_bytes", p.cache_bytes},
                 {"device_bytes", p.device_bytes},
                 {"process_bytes", p.process_bytes},
                 {"host_bytes", p.host_bytes},
                 {"file_bytes", p.file_bytes},
                 {"streamed_bytes_per_pass", p.streamed_bytes},
                 {"flops_per_token", p.flops_per_token}});
  Json decoding = Json::object();
  for (const OpWork& op : p.decoding) decoding[op.op] = {{"calls", op.calls}, {"flops", op.flops}, {"bytes", op.bytes}};
  document["decoding"] = decoding;
  if (!bounds.empty()) document["memory_bounds"] = bounds;
  if (p.largest_batch >= 0) document["largest_batch"] = p.largest_batch;
  if (p.matmul_flops > 0) document["matmul_flops"] = p.matmul_flops;
  if (p.decoding_s > 0) document["decoding_s"] = p.decoding_s;
  if (p.tokens_to_hide > 0) {
    document["read_s"] = p.read_s;
    document["tokens_to_hide"] = p.tokens_to_hide;
  }
  return document.dump();
}

}  // namespace ds::memreport
