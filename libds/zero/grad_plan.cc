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
      if (std::exchange(first, false) || open || buckets.back().open || buckets.back().units.back() == options.ahead ||
          (!beside && buckets.back().elems + n > options.bucket_elems))
        buckets.emplace_back().open = open;
      buckets.back().units.push_back(unit);
      buckets.back().elems += n;
    }
  }
  return buckets;
}

std::vector<std::vector<TensorView>> row_views(const Layout& layout, GradRows rows, DType dtype,
                                               FunctionRef<void*(size_t, i64)> memory_at) {
  std::vector<std::vector<TensorView>> views;
  for (size_t u = 0; u < rows.size(); ++u) {
    const UnitPlace& unit = layout.units()[u];
    std::vector<TensorView>& of_unit = views.emplace_back();
    for (size_t r = 0; r < rows[u].size(); ++r) {
      const RowPlace& place = layout.rows()[static_cast<size_t>(unit.first_param) + r];
      if (place.segment < 0 || layout.is_tile(layout.segments()[place.segment].unit)) {
        of_unit.emplace_back();
        continue;
      }
      const i64 at = layout.segments()[place.segment].offset + place.offset;
      of_unit.push_back(rows[u][r].view(dtype, memory_at(u, at)));
    }
  }
  for (const MatrixTile& tile : layout.tiles())
    views.push_back({TensorView::of(memory_at(static_cast<size_t>(tile.unit), 0), dtype, {tile.rows, tile.cols})});
  return views;
}

}  // namespace ds::zero
