// SPDX-License-Identifier: Apache-2.0
#pragma once
// Products whose rows have the bits that they have alone, with matrices of numbers or of codes, one or one for each
// group of rows. K is cut into parts by N and K alone. Each part is a chain of sums in the order of k; parts are added
// in ascending order, by one block or, if there are few rows, by blocks of their own.

#include "cuda/matmul.h"

namespace ds::cuda {

// Whether matmul() is such a product.
constexpr bool is_row_matmul(const MatmulCall& x) noexcept {
  return (x.params.rowwise || x.b.codes) && !x.params.trans_a && x.a.dim(1) > 0;
}

struct RowMatmulPlan {
  i64 part_k = 0, parts = 1;
  bool apart = false;  // parts have blocks of their own, which leave sums in scratch
  // Sums [parts, M, N] fp32; or, for sums of integers, a's rows as codes, [M,K], and then their scales, [M, groups].
  i64 scratch_bytes = 0;
};
// grouped: the contract of OpTable::grouped_matmul.
RowMatmulPlan plan_row_matmul(const MatmulCall& call, bool grouped) noexcept;

// `call` without trans_a, K > 0. With offsets or b of rank 3: as OpTable::grouped_matmul.
void row_matmul(const MatmulCall& call, const TensorView& offsets, Stream& stream) noexcept;

// c = activation(the sum of `parts` times M x N sums, in ascending order + bias) + residual: the rest of a matmul.
void finish_sums(const MatmulCall& call, const float* sums, i64 sums_stride, i64 parts, Stream& stream) noexcept;

// y[R,C] = the rows `ids` of a matrix of codes, as OpTable::embedding_fwd.
void look_up_codes(TensorView y, TensorView table, TensorView ids, i64 first_id, bool accumulate,
                   Stream& stream) noexcept;

}  // namespace ds::cuda
