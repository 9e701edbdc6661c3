// SPDX-License-Identifier: Apache-2.0
#include "zero/grad_plan.h"

#include <algorithm>

namespace ds::zero {

std::vector<Bucket> plan_buckets(const Layout& layout, const GradOptions& options) {
  std::vector<Bucket> buckets;
  for (const std::vector<i64>& pass : options.passes) {
    bool first = true;
    for (const i64 unit : pass) {
      const i64 n = layout.units()[unit].padded;
      const bool beside = std::ranges::find(options.beside, unit) != options.beside.end();
      const bool open = std::ranges::binary_search(options.open, unit);
      if (std::exchange(first, false) || open || buckets.back().open ||
          (!beside && buckets.back().elems + n > options.bucket_elems))
        buckets.emplace_back().open = open;
      buckets.back().units.push_back(unit);
      buckets.back().elems += n;
    }
  }
  return buckets;
}

}  // namespace ds::zero
