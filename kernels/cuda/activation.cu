// SPDX-License-Identifier: Apache-2.0
// Activations and SwiGLU.

#include "cuda/activate.h"
#include "cuda/elementwise.h"

namespace ds::cuda {
namespace {

template <Activation kind>
struct Forward {
  DS_DEVICE void operator()(float (&y)[1], const float (&x)[1]) const { y[0] = activate<kind>(x[0]); }
};
template <Activation kind>
struct Backward {
  DS_DEVICE void operator()(float (&dx)[1], const float (&in)[2]) const { dx[0] = in[0] * derivative<kind>(in[1]); }
};

struct SwigluForward {
  DS_DEVICE void operator()(float (&y)[1], const float (&in)[2]) const {
    y[0] = activate<Activation::Silu>(in[0]) * in[1];
  }
};
struct SwigluBackward {
  DS_DEVICE void operator()(float (&out)[2], const float (&in)[3]) const {
    const float dy = in[0], gate = in[1], up = in[2];
    const SigmoidPair s = sigmoid_pair(gate);
    const float silu = gate * s.plus;
    out[0] = dy * up * std::fma(silu, s.minus, s.plus);
    out[1] = dy * silu;
  }
};

// Calls f.operator()<kind>() for the activation named at run time, if it is one.
template <class F>
void with_activation(Activation kind, F&& f) noexcept {
  switch (kind) {
    case Activation::None: break;
    case Activation::GeluTanh: f.template operator()<Activation::GeluTanh>(); break;
    case Activation::GeluErf: f.template operator()<Activation::GeluErf>(); break;
    case Activation::Silu: f.template operator()<Activation::Silu>(); break;
  }
}

// SwiGLU of contiguous tensors or of strided rows.
template <class T, int kOut, int kIn, class F>
void swiglu(const char* name, Stream& s, const TensorView (&out)[kOut], const TensorView (&in)[kIn], F f) noexcept {
  const auto contiguous = [](const TensorView& v) { return v.contiguous(); };
  if (std::ranges::all_of(out, contiguous) && std::ranges::all_of(in, contiguous))
    return elementwise<T, T>(name, s, out, in, f);
  elementwise_rows<T, T>(name, s, out, in, f);
}

}  // namespace

void activation_fwd(TensorView y, TensorView x, Activation kind, Stream& s) noexcept {
  if (kind == Activation::None) return copy("activation_fwd", y, x, s);
  with_work_type(x.dtype, [&]<class T>(T) {
    with_activation(kind,
                    [&]<Activation f>() { elementwise<T, T>("activation_fwd", s, {y}, {x}, Each<Forward<f>>{}); });
  });
}

void activation_bwd(TensorView dx, TensorView dy, TensorView x, Activation kind, Stream& s) noexcept {
  if (kind == Activation::None) return copy("activation_bwd", dx, dy, s);
  with_work_type(x.dtype, [&]<class T>(T) {
    with_activation(kind, [&]<Activation f>() {
      elementwise<T, T>("activation_bwd", s, {dx}, {dy, x}, Each<Backward<f>>{});
    });
  });
}

void swiglu_fwd(TensorView y, TensorView gate, TensorView up, Stream& s) noexcept {
  with_work_type(y.dtype, [&]<class T>(T) { swiglu<T>("swiglu_fwd", s, {y}, {gate, up}, Each<SwigluForward>{}); });
}

void swiglu_bwd(TensorView dgate, TensorView dup, TensorView dy, TensorView gate, TensorView up, Stream& s) noexcept {
  with_work_type(dy.dtype, [&]<class T>(T) {
    swiglu<T>("swiglu_bwd", s, {dgate, dup}, {dy, gate, up}, Each<SwigluBackward>{});
  });
}

}  // namespace ds::cuda
