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

// The groups of x's row as codes, too (OpTable::matmul): exact sums of integers, and then fp32.
inline float product_of_codes(const TensorView& x, i64 m, const TensorView& w, i64 n) noexcept {
  const CodedForm& form = w.codes;
  const i64 K = w.dim(1), group = form.group;
  const u8* const bytes = w.as<u8>();
  float y = -0.0f;
  for (i64 first = 0; first < K; first += group) {
    const auto at = [&](i64 k) { return static_cast<float>(get(x, m * x.stride[0] + first + k)); };
    u32 largest = 0;
    for (i64 k = 0; k < group; ++k) largest = std::max(largest, std::bit_cast<u32>(at(k)) & 0x7FFFFFFFu);
    const float scale = block_scale(largest, {.bits = 8, .block = 0});
    i64 products = 0, codes = 0;
    for (i64 k = 0; k < group && scale == scale; ++k) {
      const CodedForm::Place place = form.place(w.panels, w.dim(0), K, n, first + k);
      const auto q = static_cast<i64>(std::rint(at(k) / scale));
      products += q * static_cast<i64>(form.value(bytes[place.code], place.shift)), codes += q;
    }
    const CodedForm::Place place = form.place(w.panels, w.dim(0), K, n, first);
    y = std::fma(static_cast<float>(products), scale * CodedForm::scale_at(form.scales, bytes + place.scale), y);
    if (form.offsets)
      y = std::fma(CodedForm::scale_at(DType::F32, bytes + place.offset), static_cast<float>(codes) * scale, y);
  }
  return y;
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
