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

void swiglu_fwd(TensorView y, TensorView gate, TensorView up, Stream& stream) noexcept {
  with_work_type(y.dtype, [&]<class T>(T) {
    for_all_vectors(stream, y.numel(), [yp = y.as<T>(), gp = gate.as<T>(), up_ = up.as<T>()](i64 i, auto n) {
      store(yp + i, activate<Activation::Silu>(load(gp + i, n)) * load(up_ + i, n), n);
    });
  });
}

void swiglu_bwd(TensorView dgate, TensorView dup, TensorView dy, TensorView gate, TensorView up,
                Stream& stream) noexcept {
  with_work_type(dy.dtype, [&]<class T>(T) {
    for_all_vectors(stream, dy.numel(), [=, d = dy.as<T>()](i64 i, auto n) {
      const Vec dq = load(d + i, n), g = load(gate.as<T>() + i, n), u = load(up.as<T>() + i, n);
      const SigmoidPair s = sigmoid_pair(g);
      const Vec silu = g * s.plus;
      store(dup.as<T>() + i, dq * silu, n);
      store(dgate.as<T>() + i, dq * u * fma(silu, s.minus, s.plus), n);
    });
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
