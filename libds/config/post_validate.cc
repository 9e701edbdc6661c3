// SPDX-License-Identifier: Apache-2.0
#include "config/post_validate.h"

#include <fmt/format.h>

#include "config/optimizer_table.h"
#include "config/reader.h"

namespace ds {

void check_post_validate(const Config& c, Reader& r) {
  constexpr std::string_view kKey = "pipeline.post_validate";
  if (!c.pipeline.post_validate || !trains(c.use) || r.broken(kKey)) return;
  const auto refuse = [&](bool asked, std::string_view why) {
    if (asked) r.error(kKey, std::string(why), Errc::Unavailable);
  };
  refuse(any_optimizer(c.optimizer, &OptimizerRow::averages_by_signs),
         "1-bit optimizers send signs and keep their errors, which cannot be undone; \"AdamW\" can");
  refuse(any_optimizer(c.optimizer, &OptimizerRow::sums_over_ranks) &&
             !any_optimizer(c.optimizer, &OptimizerRow::averages_by_signs),
         "updates of LAMB and Muon overwrite gradients, which a step that is undone needs again; \"AdamW\" does not");
  refuse(c.optimizer.diloco.enabled, "a meeting of diloco's workers cannot be undone");
  const OffloadOptimizerConfig& states = c.zero.offload_optimizer;
  refuse(states.device == OffloadDevice::Nvme || states.device == OffloadDevice::Server,
         fmt::format("zero_optimization.offload_optimizer.device \"{}\" keeps one version of the states; \"cpu\" and "
                     "\"none\" keep the one before, too",
                     states.device == OffloadDevice::Nvme ? "nvme" : "server"));
  refuse(states.delayed_update,
         "zero_optimization.offload_optimizer.delayed_update steps later than that already; choose one of the two");
  refuse(
      c.zero.offload_param.device == OffloadDevice::Nvme,
      "zero_optimization.offload_param.device \"nvme\" keeps one version of the parameters; \"cpu\" and \"none\" keep "
      "the one before, too");
  refuse(!c.activation_checkpointing.nvme_path.empty(),
         "activation_checkpointing.nvme_path is read and written in one order, and passes may run again; "
         "activation_checkpointing.cpu_checkpointing has no order");
}

}  // namespace ds
