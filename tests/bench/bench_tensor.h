// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors for the benchmarks of ops.

#include <sys/mman.h>

#include <cstdlib>
#include <initializer_list>
#include <new>
#include <vector>

#include "ds/kernels/ops.h"

namespace ds::bench {

// Memory in huge pages, like that of libds's devices.
template <class T>
struct HugePages {
  using value_type = T;
  static constexpr std::size_t kPage = std::size_t{2} << 20;
  T* allocate(std::size_t n) {
    const std::size_t bytes = (n * sizeof(T) + kPage - 1) / kPage * kPage;
    void* const p = std::aligned_alloc(kPage, bytes);
    if (p == nullptr) throw std::bad_alloc();
    madvise(p, bytes, MADV_HUGEPAGE);
    return static_cast<T*>(p);
  }
  void deallocate(T* p, std::size_t) noexcept { std::free(p); }
  bool operator==(const HugePages&) const = default;
};

// A tensor that owns its memory, filled with numbers of every sign between -1 and 1.
struct Tensor {
  std::vector<u8, HugePages<u8>> bytes;
  TensorView view;
  Tensor(DType dtype, std::initializer_list<i64> shape) : view(TensorView::of(nullptr, dtype, shape)) {
    bytes.resize(view.bytes());
    view.data = bytes.data();
    for (i64 i = 0; i < view.numel(); ++i) {
      const float x = static_cast<float>(i * 7919 % 2003 - 1001) / 1001.0f;
      dtype == DType::F32 ? void(view.as<float>()[i] = x) : void(view.as<bf16>()[i] = to_bf16(x));
    }
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
};

}  // namespace ds::bench
