// SPDX-License-Identifier: Apache-2.0
// AdamW: the definition bit for bit, golden values, ref, aliasing.

#include "parity.h"

namespace ds::testing {
namespace {

struct State {
  Tensor param, master, m, v, grad;
  State(DType t, i64 n)
      : param(t, {n}), master(DType::F32, {n}), m(DType::F32, {n}), v(DType::F32, {n}), grad(DType::F32, {n}) {
    master.randomize(1);
    m.randomize(2, 0.1f);
    v.randomize(3, 0.01f);
    for (i64 i = 0; i < n; ++i) v.set(i, std::abs(v.at(i)));
    grad.randomize(4, 64.0f);
  }
};

AdamWParams params(bool adam_w_mode) {
  return {.beta1 = 0.9,
          .beta2 = 0.95,
          .lr = 3e-3f,
          .eps = 1e-8f,
          .weight_decay = 0.1f,
          .bias1 = 0.271f,
          .bias2 = 0.142625f,
          .grad_scale = 1.0f / 64,
          .adam_w_mode = adam_w_mode};
}

// The definition in ops.h, one rounding per operation.
void define(float& master, float& m, float& v, float grad, const AdamWParams& p) {
  float g = grad * p.grad_scale;
  if (!p.adam_w_mode) g = g + p.weight_decay * master;
  m = static_cast<float>(p.beta1) * m + static_cast<float>(1 - p.beta1) * g;
  v = static_cast<float>(p.beta2) * v + static_cast<float>(1 - p.beta2) * g * g;
  float u = m / p.bias1 / (std::sqrt(v / p.bias2) + p.eps);
  if (p.adam_w_mode) u = u + p.weight_decay * master;
  master = master - p.lr * u;
}

TEST(AdamW, IsItsDefinitionBitForBitOnEveryBackend) {
  for (const OpTable* ops : backends()) {
    for (DType t : kWorkDTypes) {
      for (bool mode : {true, false}) {
        for (i64 n : {1, 7, 15, 16, 17, 1000, 4097, 40000}) {
          const std::string what = std::string(ops->name) + " " + std::string(dtype_name(t)) + " " + std::to_string(n);
          State want(t, n);
          for (i64 i = 0; i < n; ++i) {
            define(want.master.view().as<float>()[i], want.m.view().as<float>()[i], want.v.view().as<float>()[i],
                   want.grad.at(i), params(mode));
            want.param.set(i, want.master.at(i));
          }
          expect_same_for_any_threads(
              [&](Stream& s) {
                State got(t, n);
                ops->adamw(got.param, got.master, got.m, got.v, got.grad, params(mode), s);
                expect_same_bits(got.param, want.param, what + " param");
                expect_same_bits(got.master, want.master, what + " master");
                expect_same_bits(got.m, want.m, what + " m");
                expect_same_bits(got.v, want.v, what + " v");
                return std::vector<Tensor>{got.param};
              },
              what);
          State alone(t, n);
          ThreadPool pool(1);
          Stream s{.pool = &pool};
          ops->adamw({}, alone.master, alone.m, alone.v, alone.grad, params(mode), s);
          expect_same_bits(alone.master, want.master, what + " without param");
          if (t == DType::F32) {
            State in_place(t, n);
            ops->adamw(in_place.master, in_place.master, in_place.m, in_place.v, in_place.grad, params(mode), s);
            expect_same_bits(in_place.master, want.master, what + " param == master");
          }
        }
      }
    }
  }
}

TEST(AdamW, MatchesRef) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : backends()) {
    for (bool mode : {true, false}) {
      State got(DType::BF16, 5000), want(DType::BF16, 5000);
      ops->adamw(got.param, got.master, got.m, got.v, got.grad, params(mode), s);
      ref_ops().adamw(want.param, want.master, want.m, want.v, want.grad, params(mode), s);
      expect_close(got.master, want.master, 2, "master");
      expect_close(got.m, want.m, 4, "m");
      expect_close(got.v, want.v, 4, "v");
      expect_close(got.param, want.param, 2, "param");
    }
  }
}

TEST(AdamW, GoldenTrace) {
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  std::vector<const OpTable*> tables = backends();
  tables.push_back(&ref_ops());
  for (const OpTable* ops : tables) {
    Tensor w(DType::F32, {1}), m(DType::F32, {1}), v(DType::F32, {1}), g(DType::F32, {1});
    w.fill(1);
    m.fill(0);
    v.fill(0);
    AdamWParams p{.lr = 0.1f, .eps = 1e-8f, .weight_decay = 0.01f};
    const double want[] = {0.899000002, 0.8714672987058464};
    const float grads[] = {0.5f, -0.25f};
    for (int t = 1; t <= 2; ++t) {
      p.bias1 = static_cast<float>(1 - std::pow(p.beta1, t));
      p.bias2 = static_cast<float>(1 - std::pow(p.beta2, t));
      g.fill(grads[t - 1]);
      ops->adamw(w, w, m, v, g, p, s);
      EXPECT_NEAR(w.at(0), want[t - 1], 1e-7) << ops->name << " step " << t;
    }
  }
}

}  // namespace
}  // namespace ds::testing
