// SPDX-License-Identifier: Apache-2.0
#pragma once
// What gradients still need when each group has summed its own: the two uses of tied embeddings are added, equal copies
// on ranks of tp whose gradients are parts are summed, and rows with a divisor of their own are brought to that of all
// others. Each is a fold in rank order of fp32 slices that all its ranks cut alike, so copies stay equal bit for bit.

#include <vector>

#include "device/device.h"
#include "mesh/mesh.h"
#include "report/run_plan.h"

namespace ds::engine {

class Combine {
 public:
  // All outlive it.
  Combine(const report::RunPlan& plan, zero::AllShards& shards, Mesh& mesh, MemoryLedger& ledger, Device& device);
  // When the groups' sums are final. Collective.
  void run();

 private:
  // As CombinePlan::Exchange.
  struct Sum {
    int width = 1;
    std::vector<TensorView> pieces;
    i64 elems = 0;
  };
  struct Scaled {
    TensorView gradient;
    float factor;
  };

  void add_uses_of_shared();
  void exchange(const Sum& sum);

  const report::RunPlan& plan_;
  zero::Shards& dp_;
  Mesh& mesh_;
  Device& device_;
  const OpTable& ops_;
  Stream& stream_;
  Buffer exchange_;
  std::vector<Sum> sums_;
  std::vector<Scaled> scaled_;
  std::vector<TensorView> sources_;  // scratch
};

}  // namespace ds::engine
