// SPDX-License-Identifier: Apache-2.0
#include "ref/element.h"
#include "ref/ref.h"

namespace ds::ref {

void embedding_fwd(TensorView y, TensorView table, TensorView ids, i64 first_id, bool accumulate, Stream&) noexcept {
  const i64 V = table.dim(0), R = y.dim(0), C = y.dim(1);
  for (i64 r = 0; r < R; ++r) {
    const i64 id = ids.as<i32>()[r] - first_id;
    const bool here = id >= 0 && id < V;
    if (!here && accumulate) continue;
    for (i64 c = 0; c < C; ++c) {
      put(y, r * C + c, (here ? element(table, id, c) : 0) + (accumulate ? get(y, r * C + c) : 0));
    }
  }
}

void embedding_bwd(TensorView dtable, TensorView dy, TensorView ids, i64 first_id, bool accumulate, Stream&) noexcept {
  const i64 V = dtable.dim(0), R = dy.dim(0), C = dy.dim(1);
  for (i64 v = 0; v < V; ++v) {
    for (i64 c = 0; c < C; ++c) {
      double sum = accumulate ? get(dtable, v * C + c) : 0;
      for (i64 r = 0; r < R; ++r) sum += ids.as<i32>()[r] - first_id == v ? get(dy, r * C + c) : 0;
      put(dtable, v * C + c, sum);
    }
  }
}

}  // namespace ds::ref
