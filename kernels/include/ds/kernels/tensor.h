// SPDX-License-Identifier: Apache-2.0
#pragma once
// TensorView: a non-owning view of up to four dims. Strides are in elements. `TensorView::of` makes row-major views;
// `contiguous()` tells whether the elements are stored in that order without gaps.

#include <array>
#include <initializer_list>

#include "ds/kernels/codes.h"

namespace ds {

struct TensorView {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;
  DType dtype = DType::F32;
  // The form of a matrix; contracts of ops say which take it. Strides are those of rows.
  Panels panels{};
  // Likewise; of a matrix [N,K], or of a batch of them one after the other. `dtype` is that of the decoded elements.
  CodedForm codes{};
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
  i64 bytes() const noexcept { return codes ? code_bytes(numel()) : numel() * dtype_bytes(dtype); }
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
  // Elements [begin, begin + count) of dim 0; of whole panels.
  TensorView rows(i64 begin, i64 count) const noexcept {
    TensorView v = *this;
    v.data = static_cast<char*>(data) + begin * (codes ? code_bytes(stride[0]) : stride[0] * dtype_bytes(dtype));
    v.shape[0] = count;
    return v;
  }

 private:
  // The bytes of whole rows that have so many elements together.
  i64 code_bytes(i64 elems) const noexcept { return elems / dim(rank - 1) * codes.row_bytes(dim(rank - 1)); }
};

}  // namespace ds
