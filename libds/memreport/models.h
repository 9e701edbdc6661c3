// SPDX-License-Identifier: Apache-2.0
#pragma once
// The parts of a model that ranks compute, each made once: a plan of many ranks, and a search over plans, use the same
// few again and again.

#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <tuple>

#include "ds/memreport.h"
#include "memreport/step_time.h"
#include "model/models.h"
#include "optim/optimizer.h"
#include "pipeline/partition.h"
#include "plan/own_memory.h"

namespace ds::memreport {

// All configurations that it is asked about have one model, sequence length and set of frozen parameters. Several
// threads may call it.
class Models {
 public:
  const model::Model& of(const Config& config, const MeshShape& mesh, const MeshCoord& coord) {
    const model::Shard s = model::shard_of(config, mesh, coord);
    const std::lock_guard lock(mutex_);
    auto& model = models_[{s.tp, s.tp_rank, s.sequence, s.sp, s.sp_rank, s.mode, s.ep, s.ep_rank}];
    if (model) return *model;
    model = std::make_unique<model::Model>(model::make_model(config, s));
    optim::freeze_groups(*model, config);
    return *model;
  }
  // `cuts`: of these configuration and mesh.
  plan::RunPlan plan(const Config& config, const MeshShape& mesh, const MeshCoord& coord, DeviceKind device,
                     const std::vector<i64>& cuts) {
    return plan::make_run_plan(config, of(config, mesh, coord), mesh, coord, device, cuts);
  }
  std::vector<i64> cuts(const Config& config, const MeshShape& mesh) {
    return pipeline::cuts_of(config, of(config, mesh, {}));
  }
  // Memory that kernels and communicators of this machine, or kernels of its GPUs, would take for themselves.
  plan::TagBytes own_memory(const Config& config, const World& world, const plan::RunPlan& plan);

 private:
  std::mutex mutex_;
  std::map<std::tuple<int, int, bool, int, int, model::SequenceMode, int, int>, std::unique_ptr<model::Model>> models_;
};

// of(config), which is about a step, however many micro-batches that has. A pipeline that is full repeats itself, so
// what very many of them take and hold follows from two shorter steps, which begin and end as the whole one does:
// extended(a, b, n) is what b is, with n times what b has more than a. Else plans and simulations would grow with them.
template <class Of, class Extended>
auto of_any_length(const Config& config, Of&& of, Extended&& extended) {
  // In whole pages, too, so that numbers of bytes are exact.
  const i64 period = std::lcm<i64>(1024, config.pipeline.stages), all = config.batch.accumulation;
  const i64 full = 8 * config.pipeline.stages * config.pipeline.virtual_stages;
  Config shorter = config;
  i64& accumulation = shorter.batch.accumulation;
  accumulation = align_up(full, period) + all % period;
  if (all <= accumulation + 2 * period) return of(config);
  const auto a = of(shorter);
  accumulation += period;
  return extended(a, of(shorter), static_cast<double>((all - accumulation) / period));
}

Prediction predict(const Config& config, const World& world, DeviceKind device, Models& models);
StepTime predict_time(const Config& config, const World& world, DeviceKind device, const Hardware& hardware,
                      Models& models);
// Lower bounds of predict_time(), which take much less time.
LeastTime least_time(const Config& config, const World& world, DeviceKind device, const Hardware& hardware,
                     Models& models);

}  // namespace ds::memreport
