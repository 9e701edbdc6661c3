// SPDX-License-Identifier: Apache-2.0
#pragma once
// TensorView: a non-owning view of up to four dims. Strides are in elements. `TensorView::of` makes row-major views;
// `contiguous()` tells whether the elements are stored in that order without gaps.

#include <array>
#include <initializer_list>

#include "ds/kernels/dtype.h"

namespace ds {

// The form of a matrix [N,K] that some backends multiply fastest, in the memory of the matrix (OpTable::pack_matrix):
// panels of `rows` of its rows one after the other, the last of fewer if N is no multiple. In a panel k ascends, and
// for each k all rows of the panel follow each other; with depth 2, for each two k, as pairs, and a last k without a
// partner by itself. A range of whole panels is a matrix of its own in this form.
struct Panels {
  u8 rows = 0;  // 0: the matrix is in rows
  u8 depth = 1;

  explicit constexpr operator bool() const noexcept { return rows != 0; }
  // The place of element (n, k) of such a matrix.
  constexpr i64 place(i64 N, i64 K, i64 n, i64 k) const noexcept {
    const i64 first = n - n % rows, width = N - first < rows ? N - first : rows, inner = k % depth, outer = k - inner;
    return first * K + outer * width + (n - first) * (K - outer < depth ? 1 : depth) + inner;
  }
};

struct TensorView {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;
  DType dtype = DType::F32;
  Panels
      panels{};  // of a matrix that ops must take in this form: their contracts say which do; strides are those of rows
  int rank = 0;
  std::array<i64, kMaxRank> shape{};
  std::array<i64, kMaxRank> stride{};
  float* scale = nullptr;  // for codes (state_codes.h); null otherwise

  static TensorView of(void* data, DType dtype, std::initializer_list<i64> shape) noexcept {
    TensorView v;
    v.data = data;
    v.dtype = dtype;
    for (i64 s : shape) v.shape[v.rank++] = s;
    i64 step = 1;
    for (int d = v.rank - 1; d >= 0; --d) {
      v.stride[d] = step;
      step *= v.shape[d];
    }
    return v;
  }

  explicit operator bool() const noexcept { return data != nullptr; }

  i64 dim(int d) const noexcept { return shape[d]; }
  i64 numel() const noexcept {
    i64 n = 1;
    for (int d = 0; d < rank; ++d) n *= dim(d);
    return n;
  }
  i64 bytes() const noexcept { return numel() * dtype_bytes(dtype); }
  bool contiguous() const noexcept {
    i64 step = 1;
    for (int d = rank - 1; d >= 0; --d) {
      if (dim(d) != 1 && stride[d] != step) return false;
      step *= dim(d);
    }
    return true;
  }

  template <class T>
  T* as() const noexcept {
    return static_cast<T*>(data);
  }

  // The same elements with another shape; requires a contiguous view and the same number of elements.
  TensorView reshaped(std::initializer_list<i64> new_shape) const noexcept {
    TensorView v = of(data, dtype, new_shape);
    v.scale = scale;
    return v;
  }
  // Elements [begin, begin + count) of dim 0.
  TensorView rows(i64 begin, i64 count) const noexcept {
    TensorView v = *this;
    v.data = static_cast<char*>(data) + begin * stride[0] * dtype_bytes(dtype);
    v.shape[0] = count;
    return v;
  }
};

}  // namespace ds
