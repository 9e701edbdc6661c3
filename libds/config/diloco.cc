// SPDX-License-Identifier: Apache-2.0
#include "config/diloco.h"

#include <fmt/format.h>

#include "config/keys.h"
#include "config/optimizer.h"
#include "config/optimizer_table.h"
#include "config/parallel.h"

namespace ds {
namespace {

namespace diloco_key {
constexpr std::string_view kEnabled = "diloco.enabled", kWorkers = "diloco.workers", kEvery = "diloco.sync_every",
                           kRate = "diloco.outer_lr", kFragments = "diloco.fragments",
                           kBits = "diloco.outer_gradient_bits", kOverlap = "diloco.overlap_steps",
                           kLocal = "diloco.local_share";
}  // namespace diloco_key

bool any_group(const OptimizerConfig& o, auto&& is) {
  if (is(static_cast<const UpdateConfig&>(o))) return true;
  return std::ranges::any_of(o.groups, [&](const ParamGroupConfig& g) { return !g.frozen && is(g); });
}

}  // namespace

void resolve_diloco(Config& config, i64 ranks, i64 world, Reader& r) {
  using namespace diloco_key;
  DilocoConfig& d = config.optimizer.diloco;
  if (!trains(config.use)) {
    d = {};
    return;
  }
  if (!d.enabled) {
    // A key that is given is meant; a missing one may have been forgotten.
    for (const Key& key : config_keys()) {
      if (key.path.starts_with("diloco.") && r.given(key.path) && !r.given(kEnabled) && !r.broken(kEnabled))
        r.error(key.path, fmt::format("has no effect without {} true", kEnabled));
    }
    d = {};
    return;
  }
  if (r.broken(kWorkers)) d.workers = 1;
  if (ranks % d.workers == 0) return;
  if (ranks * config.ranks_per_replica() == world)
    r.error(kWorkers, fmt::format("{} does not divide the {} ranks that see other samples", d.workers, ranks));
  d.workers = 1;
}

void check_diloco(const Config& c, Reader& r) {
  using namespace diloco_key;
  const DilocoConfig& d = c.optimizer.diloco;
  if (!d.enabled) return;
  if (d.outer_gradient_bits != 32 && d.outer_gradient_bits != 8 && d.outer_gradient_bits != 4 && !r.broken(kBits))
    r.error(kBits, fmt::format("must be 32, 8 or 4, not {}", d.outer_gradient_bits));
  if (d.fragments > d.sync_every && !r.any_broken({kFragments, kEvery}))
    r.error(kFragments,
            fmt::format("{} fragments do not meet in steps of their own: {} is {}", d.fragments, kEvery, d.sync_every));
  if (const i64 units = num_layers(c.model); c.model.layers > 0 && d.fragments > units)
    r.error(kFragments,
            fmt::format("{} are more than the {} layers (embedding and head among them)", d.fragments, units));
  if (d.overlap_steps > d.sync_every / d.fragments && !r.any_broken({kFragments, kEvery, kOverlap}))
    r.error(kOverlap, fmt::format("{} is more than the {} steps between the meetings of two fragments", d.overlap_steps,
                                  d.sync_every / d.fragments));
  if (d.overlap_steps > 0 && d.workers == 1 && !r.any_broken({kWorkers, kOverlap}))
    r.error(kOverlap, "hides messages between workers, and there is one");
  if (d.overlap_steps == 0 && r.given(kLocal) && !r.any_broken({kLocal, kOverlap}))
    r.warning(kLocal, fmt::format("has no effect without {}", kOverlap));
  if (d.outer_lr == 0 && !r.broken(kRate)) r.error(kRate, "0 discards what the steps between meetings have learned");
  if (c.steps > 0 && c.steps < d.sync_every && !r.any_broken({"steps", kEvery}))
    r.warning(kEvery,
              fmt::format("{} is more than the {} steps of the run: nothing ever meets", d.sync_every, c.steps));
  if (any_optimizer(c.optimizer, &OptimizerRow::averages_by_signs))
    r.error(kEnabled, "is around an optimizer whose ranks sum gradients, and the 1-bit family averages by signs");
  if (c.zero.offload_optimizer.device != OffloadDevice::None)
    r.error(kEnabled, "is not supported with zero_optimization.offload_optimizer: outer states stay on the device",
            Errc::Unavailable);
  if (c.grad_accum_dtype != DType::F32)
    r.error(kEnabled, "has its gradients where those of fp32 are: data_types.grad_accum_dtype cannot be in 16 bits",
            Errc::Unavailable);
  if (d.workers == 1) return;
  if (c.fp16.enabled)
    r.error(kWorkers, "is not supported with fp16: each worker would have a loss scale of its own; bf16 needs none",
            Errc::Unavailable);
  if ((c.own_masters() && c.work_dtype() != DType::F32) || any_group(c.optimizer, [](const UpdateConfig& u) {
        return u.state_dtype != StateDtype::F32 || optimizer_row(u.type).codes_states;
      }))
    r.error(kWorkers, "keeps what each worker has of its own in fp32: masters and states cannot be in fewer bits",
            Errc::Unavailable);
}

}  // namespace ds
