// SPDX-License-Identifier: Apache-2.0
#pragma once
// Helpers of the op tests: random tensors of any dtype, comparison with the oracle, directional finite differences.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "ds/kernels/ops.h"
#include "parity/device_ops.h"

namespace ds::testing {

// Owns the elements of a contiguous tensor.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, std::initializer_list<i64> shape) : shape_(shape) {
    view_ = TensorView::of(nullptr, dtype, shape);
    storage_.assign(static_cast<size_t>(view_.bytes()) + 64, u8{0xA5});  // poison, never zero by luck
    view_.data = storage_.data();
  }
  Tensor(const Tensor& o) : storage_(o.storage_), shape_(o.shape_), view_(o.view_) { view_.data = storage_.data(); }
  Tensor& operator=(const Tensor& o) {
    storage_ = o.storage_;
    shape_ = o.shape_;
    view_ = o.view_;
    view_.data = storage_.data();
    return *this;
  }

  operator TensorView() const noexcept { return view_; }  // NOLINT: a Tensor is used where a view is asked for
  const TensorView& view() const noexcept { return view_; }
  i64 numel() const noexcept { return view_.numel(); }

  float at(i64 i) const {
    switch (view_.dtype) {
      case DType::F32: return view_.as<float>()[i];
      case DType::BF16: return to_float(view_.as<bf16>()[i]);
      case DType::F16: return to_float(view_.as<f16>()[i]);
      case DType::I32: return static_cast<float>(view_.as<i32>()[i]);
      default: ADD_FAILURE() << "at(): dtype"; return 0;
    }
  }
  void set(i64 i, float x) {
    switch (view_.dtype) {
      case DType::F32: view_.as<float>()[i] = x; break;
      case DType::BF16: view_.as<bf16>()[i] = to_bf16(x); break;
      case DType::F16: view_.as<f16>()[i] = to_f16(x); break;
      case DType::I32: view_.as<i32>()[i] = static_cast<i32>(x); break;
      default: ADD_FAILURE() << "set(): dtype";
    }
  }
  // Normal-like values (sum of uniforms), std about `scale`, around `mean`; rounded to the dtype.
  Tensor& randomize(u32 seed, float scale = 1.0f, float mean = 0.0f) {
    const RngKey key{seed, 7, 0};
    for (i64 i = 0; i < numel(); ++i) {
      const PhiloxBlock r = key.block(static_cast<u64>(i));
      const float sum = RngKey::uniform(r[0]) + RngKey::uniform(r[1]) + RngKey::uniform(r[2]) + RngKey::uniform(r[3]);
      set(i, mean + scale * 1.7320508f * (sum - 2.0f));
    }
    return *this;
  }
  Tensor& fill(float x) {
    for (i64 i = 0; i < numel(); ++i) set(i, x);
    return *this;
  }

 private:
  std::vector<u8> storage_;
  std::vector<i64> shape_;
  TensorView view_;
};

// Unit roundoff of a stored result.
inline double epsilon(DType t) { return t == DType::F32 ? 0x1p-24 : t == DType::F16 ? 0x1p-11 : 0x1p-8; }

// |got - want| <= epsilon * (ulps * max(|want|, scale of the tensor) + more) for every element; NaN and inf must agree.
// The scale is the root mean square, or `least` where sums cancel to less. more: for each element, if there are any.
inline void expect_close(const Tensor& got, const Tensor& want, double ulps, const std::string& what, double least = 0,
                         const std::vector<double>& more = {}) {
  ASSERT_EQ(got.numel(), want.numel()) << what;
  double rms = 0;
  for (i64 i = 0; i < want.numel(); ++i) {
    if (std::isfinite(want.at(i))) rms += double(want.at(i)) * want.at(i);
  }
  rms = std::sqrt(rms / static_cast<double>(std::max<i64>(want.numel(), 1)));
  rms = std::max(rms, least);
  const double eps = std::max(epsilon(got.view().dtype), epsilon(want.view().dtype));
  for (i64 i = 0; i < want.numel(); ++i) {
    const double g = got.at(i), w = want.at(i);
    if (!std::isfinite(w)) {
      ASSERT_TRUE((std::isnan(w) && std::isnan(g)) || g == w) << what << " element " << i << ": " << g << " vs " << w;
      continue;
    }
    ASSERT_LE(std::abs(g - w),
              eps * (ulps * std::max(std::abs(w), rms) + (more.empty() ? 0 : more[static_cast<size_t>(i)])))
        << what << " element " << i << ": " << g << " vs " << w;
  }
}

inline void expect_same_bits(const Tensor& a, const Tensor& b, const std::string& what) {
  ASSERT_EQ(a.view().bytes(), b.view().bytes()) << what;
  ASSERT_EQ(std::memcmp(a.view().data, b.view().data, static_cast<size_t>(a.view().bytes())), 0) << what;
}

// True if attention multiplies in 16 bits, on tensor cores or pairs of bf16 numbers: probabilities and their gradients
// are rounded too, as in every flash attention.
inline bool rounds_probabilities(const OpTable& ops, DType t) {
  if (t == DType::F32) return false;
  return test_device() != nullptr || (t == DType::BF16 && ops.name == "cpu.avx512_bf16");
}

// Runs `op` with several numbers of threads: its results, a list of tensors, must have the same bits.
template <class Op>
void expect_same_for_any_threads(Op op, const std::string& what) {
  std::vector<Tensor> want;
  const std::vector<int> numbers = test_device() != nullptr ? std::vector{1, 1} : std::vector{1, 2, 3, 5};
  for (int threads : numbers) {
    ThreadPool pool(threads);
    Stream stream{.pool = &pool};
    const std::vector<Tensor> got = op(stream);
    if (want.empty()) want = got;
    for (size_t i = 0; i < got.size(); ++i) {
      expect_same_bits(got[i], want[i],
                       what + ", result " + std::to_string(i) + ", " + std::to_string(threads) + " threads");
    }
  }
}

// The backends that this machine can run, beside ref: every ISA level from avx2 up; or the device of test_device()
// alone.
inline std::vector<const OpTable*> backends() {
  if (const OpTable* t = device_ops()) return {t};
  std::vector<const OpTable*> tables;
  for (const char* isa : {"avx2", "avx512", "avx512_bf16", "onednn", "amx"}) {
    if (const OpTable* t = cpu_ops(isa)) tables.push_back(t);
  }
  return tables;
}

// The reductions of one tensor alone, as numbers.
inline u32 max_abs_bits(const OpTable& ops, TensorView x, Stream& s) {
  i64 bits = 0;
  ops.max_abs(TensorView::of(&bits, DType::I64, {1}), x, s);
  return static_cast<u32>(bits);
}
inline ExactSum sum_squares(const OpTable& ops, TensorView x, u32 max_abs, Stream& s) {
  i64 sum[2] = {0, 0}, bits = max_abs;
  ops.sum_squares(TensorView::of(sum, DType::I64, {2}), x, TensorView::of(&bits, DType::I64, {1}), s);
  return {sum[0], sum[1]};
}

// The same matrix in the panels of a backend that packs matrices, by the definition of Panels::place.
class InPanels {
 public:
  InPanels(const OpTable& ops, const Tensor& m) : all_(m), view_(all_.view()) {
    view_.panels = panels_of(ops, view_.dtype);
    const i64 N = view_.dim(0), K = view_.dim(1);
    for (i64 i = 0; i < m.numel(); ++i) all_.set(view_.panels.place(N, K, i / K, i % K), m.at(i));
  }
  const Tensor& elements() const noexcept { return all_; }
  operator TensorView() const noexcept { return view_; }  // NOLINT: as Tensor

 private:
  Tensor all_;
  TensorView view_;
};
inline bool packs(const OpTable& ops) noexcept { return ops.pack_matrix != nullptr; }
// Products of our own add in an order that the number of rows does not change; oneDNN's do not promise it.
inline bool has_own_products(const OpTable& ops) noexcept {
  return ops.name == "cpu.avx2" || ops.name == "cpu.avx512" || ops.name == "cpu.avx512_bf16";
}

inline constexpr DType kWorkDTypes[] = {DType::F32, DType::BF16, DType::F16};

}  // namespace ds::testing
