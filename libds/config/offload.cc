// SPDX-License-Identifier: Apache-2.0
#include "config/offload.h"

#include <fmt/format.h>

#include <utility>

#include "config/optimizer_table.h"

namespace ds {
namespace {

constexpr std::string_view kOptimizer = "zero_optimization.offload_optimizer.device",
                           kParam = "zero_optimization.offload_param.device",
                           kPath = "zero_optimization.offload_optimizer.nvme_path",
                           kParamPath = "zero_optimization.offload_param.nvme_path",
                           kGradients = "zero_optimization.offload_optimizer.gradients", kBlock = "aio.block_size",
                           kRatio = "zero_optimization.offload_optimizer.ratio",
                           kName = "zero_optimization.offload_optimizer.name",
                           kBuffers = "zero_optimization.offload_param.buffer_count",
                           kDelayed = "zero_optimization.offload_optimizer.delayed_update",
                           kDelayedStart = "zero_optimization.offload_optimizer.delayed_update_start";

void resolve_old_form(std::string_view key, bool& old, std::string_view device_key, OffloadDevice& device, Reader& r) {
  if (!r.given(key) || r.broken(key)) return;
  if (old || !r.given(device_key))
    r.warning(key, fmt::format("is deprecated; write {} \"{}\"", device_key, old ? "cpu" : "none"));
  else
    r.warning(key, fmt::format("is deprecated; {} says it", device_key));
  if (old && r.given(device_key) && device != OffloadDevice::Cpu && !r.broken(device_key))
    r.error(key, fmt::format("true contradicts {}, which is another one", device_key));
  if (old) device = OffloadDevice::Cpu;
  old = false;
}

}  // namespace

bool streams_params(const Config& c) noexcept {
  const OffloadParamConfig& params = c.zero.offload_param;
  return c.use == ConfigUse::Generate && c.zero.stage == 3 && params.buffer_count == 0 &&
         params.device != OffloadDevice::None;
}

void resolve_offload(Config& c, Reader& r) {
  ZeroConfig& z = c.zero;
  OffloadOptimizerConfig& o = z.offload_optimizer;
  resolve_old_form("zero_optimization.cpu_offload", z.cpu_offload, kOptimizer, o.device, r);
  resolve_old_form("zero_optimization.cpu_offload_param", z.cpu_offload_param, kParam, z.offload_param.device, r);
  OffloadParamConfig& params = z.offload_param;
  const bool nvme = o.device == OffloadDevice::Nvme, nvme_params = params.device == OffloadDevice::Nvme;
  const bool server = o.device == OffloadDevice::Server;
  const bool knows_stage = !r.broken("zero_optimization.stage");
  const auto need_path = [&](std::string_view key, const std::string& path, std::string_view device) {
    if (path.empty() && !r.broken(key))
      r.error(key, fmt::format("is missing: a directory for what is offloaded, with {} \"nvme\"", device));
  };
  if (nvme) need_path(kPath, o.nvme_path, kOptimizer);
  if (nvme_params) need_path(kParamPath, params.nvme_path, kParam);
  if ((nvme || server) && z.stage == 0 && knows_stage)
    r.error(kOptimizer, fmt::format("\"{}\" needs ZeRO stage 1, 2 or 3: stage 0 has all states on every rank",
                                    nvme ? "nvme" : "server"));
  if (server && o.name.empty() && !r.broken(kName))
    r.error(kName, fmt::format("is missing: which server, with {} \"server\" (ds-offload serve NAME)", kOptimizer));
  if (server && o.ratio < 1 && !r.broken(kRatio))
    r.error(kRatio, fmt::format("is for {} \"nvme\" and \"cpu\": a server has all states", kOptimizer));
  if (params.device == OffloadDevice::Server)
    r.error(kParam, "\"server\" is for states of optimizers; parameters stay in memory, or go to \"nvme\"");
  if (params.device != OffloadDevice::None && z.stage != 3 && knows_stage) {
    const std::string why =
        fmt::format("ZeRO stage {} keeps whole parameters; slices, which go, are of stage 3", z.stage);
    if (nvme_params)
      r.error(kParam, why);
    else
      r.warning(kParam, "has no effect: " + why);
  }
  if (params.buffer_count == 0 && params.device != OffloadDevice::None && !r.broken(kBuffers)) {
    if (c.use != ConfigUse::Generate)
      r.error(kBuffers, "0 streams the weights of a run that only generates: ds-infer --stream");
    for (const auto& [key, given] :
         {std::pair{"zero_optimization.zero_quantized_weights", z.quantized_weights},
          {"zero_optimization.zero_quantized_nontrainable_weights", z.quantized_nontrainable_weights},
          {"zero_optimization.zero_hpz_partition_size", z.hpz_partition_size > 1},
          {"fp8.gathers", c.fp8.enabled && c.fp8.gathers}})
      if (given) r.error(key, "streamed weights travel in the dtype of the computation");
  }
  if ((nvme || nvme_params || server) && c.save.async && !r.broken("save.async"))
    r.error("save.async", fmt::format("copies the state to memory, out of which {} \"{}\" takes it",
                                      nvme || server ? kOptimizer : kParam, server ? "server" : "nvme"));
  if (nvme && o.gradients) {
    if (any_optimizer(c.optimizer, &OptimizerRow::needs_matrices))
      r.error(kGradients, "Muon looks at all gradients of its matrices at once: they stay in memory",
              Errc::Unavailable);
  }
  if (nvme && o.gradients && c.reduce_order == ReduceOrder::Boundary && c.batch.accumulation > 1)
    r.error(kGradients,
            "a rank sums its own micro-batches of whole gradients in memory first: set reduce_order to \"micro\"");
  if (o.delayed_update && !r.broken(kDelayed)) {
    if (server) {
      r.error(kDelayed,
              fmt::format("is not supported with {} \"server\" yet; \"cpu\" and \"nvme\" have it", kOptimizer),
              Errc::Unavailable);
    } else if (o.device == OffloadDevice::None && !r.broken(kOptimizer)) {
      r.error(kDelayed, fmt::format("needs {} \"cpu\" or \"nvme\": the update runs on the host", kOptimizer));
    }
    if (any_optimizer(c.optimizer, &OptimizerRow::sums_over_ranks))
      r.error(kDelayed, "updates of LAMB and Muon need sums over ranks, which belong to the step", Errc::Unavailable);
  }
  if (c.aio.block_size % 4096 != 0 && !r.broken(kBlock))
    r.error(kBlock, fmt::format("{} is no multiple of 4096, in which disks are read and written", c.aio.block_size));
  const auto no_effect = [&](std::string_view key, std::string_view why) {
    if (!r.given(key) || r.broken(key)) return false;
    r.warning(key, fmt::format("has no effect: {}", why));
    return true;
  };
  if (!nvme) {
    const std::string why = fmt::format("{} is not \"nvme\"", kOptimizer);
    if (o.device == OffloadDevice::None) no_effect(kPath, why);
    if (o.gradients && o.device == OffloadDevice::None)
      no_effect(kGradients, fmt::format("{} is \"none\"", kOptimizer));
  }
  if (o.device == OffloadDevice::None) no_effect(kRatio, fmt::format("{} is \"none\"", kOptimizer));
  if (!o.delayed_update) no_effect(kDelayedStart, fmt::format("{} is false", kDelayed));
  if (!server) no_effect(kName, fmt::format("{} is not \"server\"", kOptimizer));
  if (!nvme_params) no_effect(kParamPath, fmt::format("{} is not \"nvme\"", kParam));
  if (nvme || nvme_params || !c.activation_checkpointing.nvme_path.empty()) return;
  for (const std::string_view key : {std::string_view("aio.method"), kBlock, std::string_view("aio.queue_depth"),
                                     std::string_view("aio.intra_op_parallelism"), std::string_view("aio.checksum")}) {
    if (no_effect(key, "nothing is offloaded to NVMe")) break;
  }
}

}  // namespace ds
