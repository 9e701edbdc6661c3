// SPDX-License-Identifier: Apache-2.0
// LayerNorm and RMSNorm: every backend against ref, ref's gradients against finite differences, threads, aliasing.

#include "finite_difference.h"
#include "parity.h"

namespace ds::testing {
namespace norm_test {

constexpr float kEps = 1e-5f;

struct Case {
  i64 R, C;
};
const Case kCases[] = {{1, 1}, {3, 7}, {2, 15}, {5, 16}, {37, 17}, {1, 1000}, {150, 130}, {3, 4097}};

// Everything one forward and backward call of either norm reads and writes.
struct NormData {
  Tensor x, weight, bias, dy, residual;
  Tensor y, mean, rstd, dx, dweight, dbias;

  NormData(DType t, i64 R, i64 C, DType grad_dtype)
      : x(t, {R, C}),
        weight(t, {C}),
        bias(t, {C}),
        dy(t, {R, C}),
        residual(t, {R, C}),
        y(t, {R, C}),
        mean(DType::F32, {R}),
        rstd(DType::F32, {R}),
        dx(t, {R, C}),
        dweight(grad_dtype, {C}),
        dbias(grad_dtype, {C}) {
    x.randomize(1, 1.5f, 0.3f);
    weight.randomize(2, 0.2f, 1.0f);
    bias.randomize(3, 0.2f);
    dy.randomize(4);
    residual.randomize(5);
  }
  void layernorm(const OpTable& ops, Stream& s) {
    ops.layernorm_fwd(y, mean, rstd, x, weight, bias, kEps, s);
    ops.layernorm_bwd(dx, dweight, dbias, dy, residual, x, weight, mean, rstd, s);
  }
  void rmsnorm(const OpTable& ops, Stream& s) {
    ops.rmsnorm_fwd(y, rstd, x, weight, kEps, s);
    ops.rmsnorm_bwd(dx, dweight, dy, residual, x, weight, rstd, s);
  }
};

TEST(Norm, BackendsMatchRef) {
  ThreadPool pool(2);
  Stream stream{.pool = &pool};
  for (const OpTable* ops : backends()) {
    for (DType t : kWorkDTypes) {
      for (auto [R, C] : kCases) {
        for (bool layer : {true, false}) {
          for (DType grad_dtype : {DType::F32, t}) {
            const std::string what = std::string(ops->name) + (layer ? " layernorm " : " rmsnorm ") +
                                     std::string(dtype_name(t)) + " " + std::to_string(R) + "x" + std::to_string(C);
            NormData want(t, R, C, grad_dtype), got(t, R, C, grad_dtype);
            layer ? want.layernorm(ref_ops(), stream) : want.rmsnorm(ref_ops(), stream);
            layer ? got.layernorm(*ops, stream) : got.rmsnorm(*ops, stream);
            expect_close(got.y, want.y, 6, what + " y");
            expect_close(got.rstd, want.rstd, 6, what + " rstd");
            // A row of one element has dx = rstd (g - g): only the size of its terms bounds the error.
            if (C > 1) expect_close(got.dx, want.dx, 12, what + " dx");
            const double sum_ulps = 6 + 2 * std::sqrt(static_cast<double>(R));  // a sum of R terms in fp32
            expect_close(got.dweight, want.dweight, sum_ulps, what + " dweight");
            if (layer) {
              expect_close(got.mean, want.mean, 6, what + " mean");
              expect_close(got.dbias, want.dbias, sum_ulps, what + " dbias");
            }
          }
        }
      }
    }
  }
}

TEST(Norm, ThreadsDoNotChangeBits) {
  for (const OpTable* ops : backends()) {
    for (auto [R, C] : {Case{300, 100}, Case{1000, 64}, Case{9, 4097}}) {
      for (bool layer : {true, false}) {
        expect_same_for_any_threads(
            [&, rows = R, columns = C](Stream& s) {
              NormData d(DType::BF16, rows, columns, DType::F32);
              layer ? d.layernorm(*ops, s) : d.rmsnorm(*ops, s);
              std::vector<Tensor> results{d.y, d.rstd, d.dx, d.dweight};
              if (layer) results.insert(results.end(), {d.mean, d.dbias});
              return results;
            },
            std::string(ops->name));
      }
    }
  }
}

TEST(Norm, OutputsMayAliasAsPromised) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  std::vector<const OpTable*> all = backends();
  all.push_back(&ref_ops());
  for (const OpTable* ops : all) {
    NormData d(DType::F32, 40, 33, DType::F32);
    d.layernorm(*ops, s);
    NormData onto_residual(DType::F32, 40, 33, DType::F32), onto_dy(DType::F32, 40, 33, DType::F32);
    Tensor &r = onto_residual.residual, &dy = onto_dy.dy;
    ops->layernorm_bwd(r, d.dweight, d.dbias, d.dy, r, d.x, d.weight, d.mean, d.rstd, s);
    expect_same_bits(r, d.dx, std::string(ops->name) + " dx onto residual_grad");
    ops->layernorm_bwd(dy, d.dweight, d.dbias, dy, d.residual, d.x, d.weight, d.mean, d.rstd, s);
    expect_same_bits(dy, d.dx, std::string(ops->name) + " dx onto dy");

    d.rmsnorm(*ops, s);
    Tensor x = d.x;
    ops->rmsnorm_fwd(x, d.rstd, x, d.weight, kEps, s);
    expect_same_bits(x, d.y, std::string(ops->name) + " y onto x");
  }
}

TEST(Norm, WithoutResidualGradient) {
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  for (const OpTable* ops : backends()) {
    NormData want(DType::F32, 11, 29, DType::F32), got(DType::F32, 11, 29, DType::F32);
    ref_ops().layernorm_fwd(want.y, want.mean, want.rstd, want.x, want.weight, want.bias, kEps, s);
    ref_ops().layernorm_bwd(want.dx, want.dweight, want.dbias, want.dy, {}, want.x, want.weight, want.mean, want.rstd,
                            s);
    ops->layernorm_bwd(got.dx, got.dweight, got.dbias, want.dy, {}, want.x, want.weight, want.mean, want.rstd, s);
    expect_close(got.dx, want.dx, 12, std::string(ops->name));
  }
}

// A large mean: the two-pass variance keeps its digits where E[x^2] - mean^2 would lose them all.
TEST(Norm, LargeMeanKeepsTheVariance) {
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  for (const OpTable* ops : backends()) {
    NormData want(DType::F32, 4, 777, DType::F32), got(DType::F32, 4, 777, DType::F32);
    want.x.randomize(1, 1.0f, 4096.0f);
    got.x = want.x;
    want.layernorm(ref_ops(), s);
    got.layernorm(*ops, s);
    expect_close(got.rstd, want.rstd, 8, std::string(ops->name));
  }
}

TEST(Norm, RefGradientsMatchFiniteDifferences) {
  Stream s{};
  const OpTable& ops = ref_ops();
  for (auto [R, C] : {Case{1, 2}, Case{3, 5}, Case{4, 13}}) {
    Doubles x({R, C}), weight({C}), bias({C}), dy({R, C}), y({R, C}), mean({R}), rstd({R}), dx({R, C}), dweight({C}),
        dbias({C});
    x.randomize(1, 2);
    weight.randomize(2);
    bias.randomize(3);
    dy.randomize(4);
    const auto layer = [&] {
      ops.layernorm_fwd(y.view, mean.view, rstd.view, x.view, weight.view, bias.view, kEps, s);
      return y.dot(dy);
    };
    layer();
    ops.layernorm_bwd(dx.view, dweight.view, dbias.view, dy.view, {}, x.view, weight.view, mean.view, rstd.view, s);
    expect_gradient(x, dx, layer, "layernorm dx");
    expect_gradient(weight, dweight, layer, "layernorm dweight");
    expect_gradient(bias, dbias, layer, "layernorm dbias");

    const auto rms = [&] {
      ops.rmsnorm_fwd(y.view, rstd.view, x.view, weight.view, kEps, s);
      return y.dot(dy);
    };
    rms();
    ops.rmsnorm_bwd(dx.view, dweight.view, dy.view, {}, x.view, weight.view, rstd.view, s);
    expect_gradient(x, dx, rms, "rmsnorm dx");
    expect_gradient(weight, dweight, rms, "rmsnorm dweight");
  }
}

}  // namespace norm_test
}  // namespace ds::testing
