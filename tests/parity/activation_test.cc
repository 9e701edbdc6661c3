// SPDX-License-Identifier: Apache-2.0
// Activations and SwiGLU: every backend against ref, accuracy over the whole range, ref's derivatives by finite
// differences.

#include "finite_difference.h"
#include "parity.h"

namespace ds::testing {
namespace activation_test {

constexpr Activation kActivations[] = {Activation::None, Activation::GeluTanh, Activation::GeluErf, Activation::Silu};
constexpr i64 kSizes[] = {1, 7, 15, 16, 17, 1000, 4097, 40000};

std::string describe(const OpTable* ops, DType t, Activation f, i64 n) {
  return std::string(ops->name) + " " + std::string(dtype_name(t)) + " activation " +
         std::to_string(static_cast<int>(f)) + ", " + std::to_string(n) + " elements";
}

// A factor for the limit of fp32 on a GPU, whose approximations are included: an exponential that may be off by 4
// halves of a unit in the last place, a reciprocal by 2 (kernels/cuda/simt.h; the simulator is off by all of it),
// beside the few units that the limits are made of.
double hardware_factor(const OpTable* ops, DType t) {
  return t == DType::F32 && ops->name == std::string_view("cuda") ? 3 : 1;
}

TEST(Activation, BackendsMatchRef) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : backends()) {
    for (DType t : kWorkDTypes) {
      const double more = hardware_factor(ops, t);
      for (Activation f : kActivations) {
        for (i64 n : kSizes) {
          Tensor x(t, {n}), dy(t, {n}), got(t, {n}), want(t, {n});
          x.randomize(1, 3.0f);
          dy.randomize(2);
          ref_ops().activation_fwd(want, x, f, s);
          ops->activation_fwd(got, x, f, s);
          expect_close(got, want, 4 * more, describe(ops, t, f, n) + " forward");
          ref_ops().activation_bwd(want, dy, x, f, s);
          ops->activation_bwd(got, dy, x, f, s);
          expect_close(got, want, 6 * more, describe(ops, t, f, n) + " backward");
          ops->activation_bwd(dy, dy, x, f, s);
          expect_same_bits(dy, got, describe(ops, t, f, n) + " in place");
        }
      }
    }
  }
}

// Relative error in units of 2^-24, over a grid from -12 to 12 and far outside.
TEST(Activation, RelativeAccuracyAndExtremes) {
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  constexpr i64 n = 48001;
  Tensor x(DType::F32, {n}), got(DType::F32, {n}), want(DType::F32, {n}), ones(DType::F32, {n});
  ones.fill(1.0f);
  for (i64 i = 0; i < n; ++i) x.set(i, static_cast<float>(i - 24000) / 2000.0f);
  for (const OpTable* ops : backends()) {
    for (Activation f : kActivations) {
      double forward = 0, backward = 0;
      ref_ops().activation_fwd(want, x, f, s);
      ops->activation_fwd(got, x, f, s);
      // The exponential's argument z is rounded, which costs some |z| units in the far tail; z is at most x^2 here but
      // for GELU's cubic.
      for (i64 i = 0; i < n; ++i) {
        const double w = want.at(i), z = f == Activation::GeluTanh
                                             ? std::abs(1.6 * x.at(i) + 0.07 * std::pow(x.at(i), 3))
                                         : f == Activation::GeluErf ? 0.5 * std::pow(x.at(i), 2)
                                                                    : 0;
        if (std::abs(w) > 1e-36) forward = std::max(forward, std::abs(got.at(i) / w - 1) * 0x1p24 / (8 + 3 * z));
      }
      EXPECT_LE(forward, hardware_factor(ops, DType::F32)) << describe(ops, DType::F32, f, n);
      ref_ops().activation_bwd(want, ones, x, f, s);
      ops->activation_bwd(got, ones, x, f, s);
      for (i64 i = 0; i < n; ++i)
        backward = std::max(backward, std::abs(double{got.at(i)} - double{want.at(i)}) * 0x1p24);
      EXPECT_LE(backward, 8.0 * hardware_factor(ops, DType::F32)) << describe(ops, DType::F32, f, n);
      RecordProperty(describe(ops, DType::F32, f, n), std::to_string(forward) + " " + std::to_string(backward));

      const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
      const float special[] = {0.0f, -0.0f, 1e-40f, -1e-40f, 100.0f, -100.0f, 1e10f, -1e10f, 3e38f, -3e38f, inf, nan};
      Tensor xs(DType::F32, {12}), ys(DType::F32, {12}), ds(DType::F32, {12}), one(DType::F32, {12});
      one.fill(1.0f);
      for (i64 i = 0; i < 12; ++i) xs.set(i, special[i]);
      ops->activation_fwd(ys, xs, f, s);
      ops->activation_bwd(ds, one, xs, f, s);
      for (i64 i = 0; i < 10; ++i) {
        const double v = xs.at(i), y_want = f == Activation::None || v > 1 ? v : std::abs(v) < 1 ? v / 2 : 0;
        EXPECT_NEAR(ys.at(i), y_want, 1e-6 * std::abs(y_want)) << describe(ops, DType::F32, f, i);
        const double d_want = f == Activation::None || v > 1 ? 1 : std::abs(v) < 1 ? 0.5 : 0;
        EXPECT_NEAR(ds.at(i), d_want, 1e-6) << describe(ops, DType::F32, f, i);
      }
      EXPECT_EQ(ys.at(10), inf) << describe(ops, DType::F32, f, 10);
      EXPECT_TRUE(std::isnan(ys.at(11))) << describe(ops, DType::F32, f, 11);
      EXPECT_TRUE(std::isnan(ds.at(11)) || f == Activation::None) << describe(ops, DType::F32, f, 11);
    }
  }
}

TEST(Activation, SwigluMatchesRef) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : backends()) {
    for (DType t : kWorkDTypes) {
      for (i64 n : kSizes) {
        const std::string what = describe(ops, t, Activation::Silu, n);
        Tensor gate(t, {n}), up(t, {n}), dy(t, {n}), got(t, {n}), want(t, {n}), dup(t, {n}), dup_want(t, {n});
        gate.randomize(1, 3.0f);
        up.randomize(2);
        dy.randomize(3);
        ref_ops().swiglu_fwd(want, gate, up, s);
        ops->swiglu_fwd(got, gate, up, s);
        expect_close(got, want, 6 * hardware_factor(ops, t), what + " forward");
        ref_ops().swiglu_bwd(want, dup_want, dy, gate, up, s);
        ops->swiglu_bwd(got, dup, dy, gate, up, s);
        expect_close(got, want, 8 * hardware_factor(ops, t), what + " dgate");
        expect_close(dup, dup_want, 8 * hardware_factor(ops, t), what + " dup");
        Tensor g = gate, u = up;
        ops->swiglu_bwd(g, u, dy, g, u, s);
        expect_same_bits(g, got, what + " dgate onto gate");
        expect_same_bits(u, dup, what + " dup onto up");
        u = up;
        ops->swiglu_bwd(dy, u, dy, gate, u, s);
        expect_same_bits(dy, got, what + " dgate onto dy");
      }
    }
  }
}

TEST(Activation, RefGradientsMatchFiniteDifferences) {
  Stream s{};
  const OpTable& ops = ref_ops();
  Doubles x({57}), dy({57}), y({57}), dx({57}), up({57}), dup({57});
  x.randomize(1, 5);
  dy.randomize(2);
  up.randomize(3);
  for (Activation f : kActivations) {
    const auto loss = [&] {
      ops.activation_fwd(y.view, x.view, f, s);
      return y.dot(dy);
    };
    ops.activation_bwd(dx.view, dy.view, x.view, f, s);
    expect_gradient(x, dx, loss, "activation " + std::to_string(static_cast<int>(f)));
  }
  const auto loss = [&] {
    ops.swiglu_fwd(y.view, x.view, up.view, s);
    return y.dot(dy);
  };
  ops.swiglu_bwd(dx.view, dup.view, dy.view, x.view, up.view, s);
  expect_gradient(x, dx, loss, "swiglu dgate");
  expect_gradient(up, dup, loss, "swiglu dup");
}

// Golden values of both GELUs and SiLU, from their definitions at 40 digits.
TEST(Activation, GoldenValues) {
  Stream s{};
  Doubles x({2}), y({2});
  x.value = {1.0, -2.5};
  ref_ops().activation_fwd(y.view, x.view, Activation::GeluErf, s);
  EXPECT_NEAR(y.value[0], 0.841344746068542949, 1e-15);
  EXPECT_NEAR(y.value[1], -0.0155241633144403379, 1e-15);
  ref_ops().activation_fwd(y.view, x.view, Activation::GeluTanh, s);
  EXPECT_NEAR(y.value[0], 0.841191990608276705, 1e-15);
  EXPECT_NEAR(y.value[1], -0.0150842660899985821, 1e-15);
  ref_ops().activation_fwd(y.view, x.view, Activation::Silu, s);
  EXPECT_NEAR(y.value[0], 0.731058578630004879, 1e-15);
  EXPECT_NEAR(y.value[1], -0.189645450053108878, 1e-15);
}

// The columns of one matrix: results have the bits of contiguous tensors, and what lies between rows stays.
TEST(Activation, SwigluOfStridedRowsHasTheBitsOfContiguousOnes) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : backends()) {
    for (DType t : kWorkDTypes) {
      for (const auto& [R, F, gap] :
           {std::array<i64, 3>{1, 5, 0}, {3, 7, 1}, {5, 16, 8}, {40, 1000, 0}, {3, 20000, 3}}) {
        const std::string what = describe(ops, t, Activation::Silu, R * F);
        const i64 stride = 2 * F + gap;
        Tensor gate(t, {R, F}), up(t, {R, F}), dy(t, {R, F}), y(t, {R, F}), dgate(t, {R, F}), dup(t, {R, F});
        Tensor both(t, {R, stride}), dboth(t, {R, stride}), wide(t, {R, stride}), strided_y(t, {R, F});
        gate.randomize(1, 3.0f);
        up.randomize(2);
        dy.randomize(3);
        for (Tensor* tensor : {&both, &dboth, &wide}) tensor->fill(7);
        const auto columns = [&](const Tensor& of, i64 first) {
          TensorView v = of;
          v.data = static_cast<char*>(v.data) + first * dtype_bytes(t);
          v.shape[1] = F;
          return v;
        };
        const auto put = [&](Tensor& to, i64 first, const Tensor& from) {
          for (i64 i = 0; i < R * F; ++i) to.set(i / F * stride + first + i % F, from.at(i));
        };
        const auto taken = [&](const Tensor& from, i64 first) {
          Tensor to(t, {R, F});
          for (i64 i = 0; i < R * F; ++i) to.set(i, from.at(i / F * stride + first + i % F));
          return to;
        };
        put(both, 0, gate);
        put(both, F, up);
        put(dboth, 0, dy);  // as layers have it: dgate overwrites dy
        for (const OpTable* of : {ops, &ref_ops()}) {
          of->swiglu_fwd(y, gate, up, s);
          of->swiglu_fwd(strided_y, columns(both, 0), columns(both, F), s);
          expect_same_bits(strided_y, y, what + " forward");
          of->swiglu_fwd(columns(wide, F), gate, columns(both, F), s);
          expect_same_bits(taken(wide, F), y, what + " forward, all but the gate strided");
          Tensor grads = dboth;
          of->swiglu_bwd(dgate, dup, dy, gate, up, s);
          of->swiglu_bwd(columns(grads, 0), columns(grads, F), columns(grads, 0), columns(both, 0), columns(both, F),
                         s);
          expect_same_bits(taken(grads, 0), dgate, what + " dgate");
          expect_same_bits(taken(grads, F), dup, what + " dup");
          for (i64 i = 0; i < R * stride; ++i) {
            if (i % stride >= 2 * F) {
              EXPECT_EQ(grads.at(i), 7) << what;
            }
            if (i % stride < F || i % stride >= 2 * F) {
              EXPECT_EQ(wide.at(i), 7) << what;
            }
          }
        }
        if (HasFailure()) return;
      }
    }
  }
}

}  // namespace activation_test
}  // namespace ds::testing
