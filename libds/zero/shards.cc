// SPDX-License-Identifier: Apache-2.0
#include "zero/shards.h"

#include <algorithm>

namespace ds::zero {

Shards::Shards(const ShardsPlan& plan, Rows rows, Rows grad_rows, bool trains, const GroupRanks& ranks, Device& device,
               MemoryLedger& ledger, const Tiers& tiers)
    : plan_(plan),
      comm_(ranks.all),
      params_(plan.layout, rows, ranks.all, device, ledger,
              {.axis = plan.axis,
               .work = plan.grads.work,
               .allgather_bucket = plan.allgather_bucket,
               .pool_elems = plan.gather_pool_elems,
               .coded = plan.coded,
               .reads_directly = plan.reads_directly},
              tiers.params, ranks.near) {
  DS_ASSERT(comm_.size() == plan.layout.num_ranks() && comm_.rank() == plan.rank);
  if (trains) grads_.emplace(plan.grad_layout, grad_rows, plan.grads, GradParts{ranks, device, ledger, tiers.grads});
  StateStore::Parts parts{.layout = plan.states,
                          .params = params_,
                          .gradients = gradients_,
                          .work = plan.grads.work,
                          .device = device,
                          .ledger = ledger,
                          .held = plan.layout.held_pieces(plan.rank),
                          .fixed = {},
                          .undoes = plan.undoes && trains};
  const auto fixed =
      std::ranges::stable_partition(parts.held, [&](const Piece& p) { return plan.layout.is_trained(p); });
  parts.fixed.assign(fixed.begin(), fixed.end());
  parts.held.erase(fixed.begin(), fixed.end());
  states_ = tiers.states ? tiers.states(std::move(parts)) : std::make_unique<DeviceStates>(std::move(parts));
}

}  // namespace ds::zero
