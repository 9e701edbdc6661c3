// SPDX-License-Identifier: Apache-2.0
#include "ref/activation.h"

#include "ref/element.h"
#include "ref/ref.h"

namespace ds::ref {

void activation_fwd(TensorView y, TensorView x, Activation f, Stream&) noexcept {
  for (i64 i = 0; i < x.numel(); ++i) put(y, i, activate(f, get(x, i)));
}

void activation_bwd(TensorView dx, TensorView dy, TensorView x, Activation f, Stream&) noexcept {
  for (i64 i = 0; i < x.numel(); ++i) put(dx, i, get(dy, i) * activation_derivative(f, get(x, i)));
}

void swiglu_fwd(TensorView y, TensorView gate, TensorView up, Stream&) noexcept {
  for (i64 i = 0; i < y.numel(); ++i)
    put(y, place(y, i), activate(Activation::Silu, get(gate, place(gate, i))) * get(up, place(up, i)));
}

void swiglu_bwd(TensorView dgate, TensorView dup, TensorView dy, TensorView gate, TensorView up, Stream&) noexcept {
  for (i64 i = 0; i < dy.numel(); ++i) {
    const double d = get(dy, place(dy, i)), g = get(gate, place(gate, i)), u = get(up, place(up, i));
    put(dgate, place(dgate, i), d * u * activation_derivative(Activation::Silu, g));
    put(dup, place(dup, i), d * activate(Activation::Silu, g));
  }
}

}  // namespace ds::ref
