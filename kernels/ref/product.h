// SPDX-License-Identifier: Apache-2.0
#pragma once
// Products of a row with a row of a matrix that may be of codes.

#include <algorithm>
#include <bit>
#include <cmath>

#include "ds/kernels/ops.h"
#include "ref/element.h"

namespace ds::ref {

// One matrix of a batch [E,N,K] of coded ones.
inline TensorView coded_matrix(const TensorView& batch, i64 e) noexcept {
  const i64 N = batch.dim(1), K = batch.dim(2);
  TensorView m = TensorView::of(batch.as<u8>() + e * N * batch.codes.row_bytes(K), batch.dtype, {N, K});
  m.codes = batch.codes, m.panels = batch.panels;
  return m;
}

// The row of x as codes, too (OpTable::matmul): exact sums of integers, and then fp32.
inline float product_of_codes(const TensorView& x, i64 m, const TensorView& w, i64 n) noexcept {
  const i64 K = w.dim(1);
  const auto at = [&](i64 k) { return static_cast<float>(get(x, m * x.stride[0] + k)); };
  u32 largest = 0;
  for (i64 k = 0; k < K; ++k) largest = std::max(largest, std::bit_cast<u32>(at(k)) & 0x7FFFFFFFu);
  const float scale = block_scale(largest, {.bits = 8, .block = 0});
  i64 sum = 0;
  for (i64 k = 0; k < K && scale == scale; ++k) {
    const auto q = static_cast<i64>(std::rint(at(k) / scale));
    sum += q * static_cast<i64>(w.codes.value(w.as<u8>()[w.codes.place(w.panels, w.dim(0), K, n, k).code], 0));
  }
  const i64 of_row = w.codes.place(w.panels, w.dim(0), K, n, 0).scale;
  return static_cast<float>(sum) * (scale * CodedForm::scale_at(w.codes.scales, w.as<u8>() + of_row));
}

// The sum over k of x[m, k] w[n, k].
inline double product_of_rows(const TensorView& x, i64 m, const TensorView& w, i64 n) noexcept {
  if (w.codes.integer) return static_cast<double>(product_of_codes(x, m, w, n));
  double sum = 0;
  for (i64 k = 0; k < w.dim(1); ++k) sum += get(x, m * x.stride[0] + k) * element(w, n, k);
  return sum;
}

// Backends agree on sums of integers up to the activation, so their bias is added in fp32.
inline double with_bias(double x, const TensorView& w, double bias) noexcept {
  return w.codes.integer ? static_cast<double>(static_cast<float>(x) + static_cast<float>(bias)) : x + bias;
}

}  // namespace ds::ref
