// SPDX-License-Identifier: Apache-2.0
#include "zero/shards.h"

namespace ds::zero {

Shards::Shards(const ShardsPlan& plan, Rows rows, Rows grad_rows, bool trains, Communicator& comm, Device& device,
               MemoryLedger& ledger, const Tiers& tiers, Communicator* near, Communicator* across)
    : plan_(plan),
      comm_(comm),
      params_(plan.layout, rows, comm, device, ledger,
              {.axis = plan.axis,
               .work = plan.grads.work,
               .allgather_bucket = plan.allgather_bucket,
               .pool_elems = plan.gather_pool_elems,
               .coded = plan.coded},
              tiers.params, near) {
  DS_ASSERT(comm.size() == plan.layout.num_ranks() && comm.rank() == plan.rank);
  if (trains) grads_.emplace(plan.grad_layout, grad_rows, comm, device, ledger, plan.grads, tiers.grads, near, across);
  StateStore::Parts parts{.layout = plan.states,
                          .params = params_,
                          .gradients = gradients_,
                          .work = plan.grads.work,
                          .device = device,
                          .ledger = ledger,
                          .held = plan.layout.held_pieces(plan.rank)};
  states_ = tiers.states ? tiers.states(std::move(parts)) : std::make_unique<DeviceStates>(std::move(parts));
}

}  // namespace ds::zero
