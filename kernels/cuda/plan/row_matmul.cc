// SPDX-License-Identifier: Apache-2.0
#include "cuda/row_matmul.h"

#include <algorithm>

namespace ds::cuda {
namespace {

constexpr i64 up(i64 n, i64 unit) noexcept { return (n + unit - 1) / unit * unit; }

}  // namespace

RowMatmulPlan plan_row_matmul(const MatmulCall& x, bool grouped) noexcept {
  // Parts of at least 512 elements, in whole steps, that fill an H100 twice if a product has one tile of rows.
  constexpr i64 kBlocks = 264, kColumns = 128, kStep = 64, kLeast = 512, kFewRows = 64;
  const i64 M = x.c.dim(0), N = x.c.dim(1), K = x.a.dim(1);
  RowMatmulPlan plan{.part_k = std::max<i64>(up(K, kStep), kStep)};
  if (x.b.codes.integer) {
    plan.scratch_bytes = M * (K + K / x.b.codes.group * dtype_bytes(DType::F32));
    return plan;
  }
  if (grouped) return plan;
  const i64 columns = up(N, kColumns) / kColumns, wanted = std::max<i64>(kBlocks / columns, 1);
  plan.part_k = std::max(up((K + wanted - 1) / wanted, kStep), kLeast);
  plan.parts = std::max<i64>((K + plan.part_k - 1) / plan.part_k, 1);
  plan.apart = plan.parts > 1 && M <= kFewRows;
  if (plan.apart) plan.scratch_bytes = plan.parts * M * N * dtype_bytes(DType::F32);
  return plan;
}

}  // namespace ds::cuda
