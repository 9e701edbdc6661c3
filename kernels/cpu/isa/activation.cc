// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa/kernels.h"
#include "cpu/loops.h"
#include "cpu/vector_math.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

void activation_fwd(TensorView y, TensorView x, Activation kind, Stream& stream) noexcept {
  with_work_type(x.dtype, [&]<class T>(T) {
    with_activation(kind, [&]<Activation f>() {
      for_all_vectors(stream, x.numel(), [yp = y.as<T>(), xp = x.as<T>()](i64 i, auto n) {
        store(yp + i, activate<f>(load(xp + i, n)), n);
      });
    });
  });
}

void activation_bwd(TensorView dx, TensorView dy, TensorView x, Activation kind, Stream& stream) noexcept {
  with_work_type(x.dtype, [&]<class T>(T) {
    with_activation(kind, [&]<Activation f>() {
      for_all_vectors(stream, x.numel(), [dxp = dx.as<T>(), dyp = dy.as<T>(), xp = x.as<T>()](i64 i, auto n) {
        store(dxp + i, load(dyp + i, n) * activation_derivative<f>(load(xp + i, n)), n);
      });
    });
  });
}

namespace {

// Calls f(r, c, lanes) for the vectors of strided rows [R,C], or of one row of all elements if the tensors have no
// gaps.
template <class F>
void for_row_vectors(Stream& stream, std::initializer_list<TensorView> tensors, F&& f) noexcept {
  const TensorView& first = *tensors.begin();
  if (std::ranges::all_of(tensors, [](const TensorView& v) { return v.contiguous(); }))
    return for_all_vectors(stream, first.numel(), [&](i64 c, auto n) { f(0, c, n); });
  const i64 C = first.dim(1);
  for_tiles(
      stream, first.dim(0),
      [&](i64 begin, i64 end) {
        for (i64 r = begin; r < end; ++r) for_vectors(0, C, [&](i64 c, auto n) { f(r, c, n); });
      },
      std::max<i64>(1, kTileElements / std::max<i64>(1, C)));
}

}  // namespace

void swiglu_fwd(TensorView y, TensorView gate, TensorView up, Stream& stream) noexcept {
  with_work_type(y.dtype, [&]<class T>(T) {
    for_row_vectors(stream, {y, gate, up}, [=](i64 r, i64 c, auto n) {
      const auto at = [=](const TensorView& v) { return v.as<T>() + r * v.stride[0] + c; };
      store(at(y), activate<Activation::Silu>(load(at(gate), n)) * load(at(up), n), n);
    });
  });
}

void swiglu_bwd(TensorView dgate, TensorView dup, TensorView dy, TensorView gate, TensorView up,
                Stream& stream) noexcept {
  with_work_type(dy.dtype, [&]<class T>(T) {
    for_row_vectors(stream, {dy, dgate, dup, gate, up}, [=](i64 r, i64 c, auto n) {
      const auto at = [=](const TensorView& v) { return v.as<T>() + r * v.stride[0] + c; };
      const Vec dq = load(at(dy), n), g = load(at(gate), n), u = load(at(up), n);
      const SigmoidPair s = sigmoid_pair(g);
      const Vec silu = g * s.plus;
      store(at(dup), dq * silu, n);
      store(at(dgate), dq * u * fma(silu, s.minus, s.plus), n);
    });
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
