// SPDX-License-Identifier: Apache-2.0
// Random numbers for a rank's rows, addressed as on one rank with the whole batch.

#include <algorithm>

#include "ds/building_blocks.h"

namespace ds::model {
namespace {

// Calls f(rows of y, rows of x, the place of their first element in a whole batch) for rows that lie together there.
template <class F>
void for_rows_of_batch(const PassContext& ctx, TensorView y, TensorView x, i64 first_row, F&& f) {
  const i64 C = x.dim(1), all = ctx.groups.sequence_length;
  if (ctx.groups.shard.sp == 1) return f(y, x, first_row * C);
  i64 row = 0;  // of this rank's rows
  for (i64 b = 0; b < ctx.B; ++b) {
    for (const TokenRange& range : ctx.groups.shard.tokens(all)) {
      const i64 begin = std::max(row, first_row), end = std::min(row + range.count, first_row + x.dim(0));
      if (begin < end) {
        f(y.rows(begin - first_row, end - begin), x.rows(begin - first_row, end - begin),
          (b * all + range.begin + begin - row) * C);
      }
      row += range.count;
    }
  }
}

}  // namespace

void dropout_rows(const PassContext& ctx, TensorView y, TensorView x, i64 first_row, float p, RngKey site) {
  for_rows_of_batch(ctx, y, x, first_row, [&](TensorView to, TensorView from, i64 element) {
    ctx.ops.dropout(to, from, p, site, element, ctx.stream);
  });
}
void noise_rows(const PassContext& ctx, TensorView y, TensorView x, i64 first_row, NoiseKind kind, float amount,
                RngKey site) {
  for_rows_of_batch(ctx, y, x, first_row, [&](TensorView to, TensorView from, i64 element) {
    ctx.ops.add_noise(to, from, kind, amount, site, element, ctx.stream);
  });
}

}  // namespace ds::model
