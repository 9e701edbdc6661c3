// SPDX-License-Identifier: Apache-2.0
// How the CUDA backend asks cuBLASLt for the products of our models: plans as data.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "cuda/matmul.h"

namespace ds::cuda {
namespace cuda_matmul_plan_test {

constexpr i64 R = 64, C = 96, F = 384;

// Views on memory that is never touched, 16-byte aligned and apart from each other.
TensorView matrix(i64 rows, i64 columns, DType dtype = DType::BF16) {
  static i64 next = 1 << 20;
  next += 1 << 24;
  return TensorView::of(reinterpret_cast<void*>(next), dtype, {rows, columns});
}
TensorView vector(i64 n) { return matrix(1, n).reshaped({n}); }

MatmulCall call(TensorView c, TensorView a, TensorView b, MatmulParams params = {}) {
  return {.c = c, .a = a, .b = b, .bias = {}, .preact = {}, .residual = {}, .params = params};
}

// The plan is one product that does everything.
LtProblem only_product(const MatmulCall& x) {
  const MatmulStep step = plan_matmul(x, /*fuse=*/true);
  EXPECT_TRUE(step.multiplies);
  EXPECT_FALSE(step.finishes);
  EXPECT_EQ(step.rows, x.c.dim(0));
  EXPECT_EQ(step.scratch_bytes, 0);
  return step.product;
}

void expect_shape(const LtProblem& p, i64 m, i64 n, i64 k, bool trans_a, bool trans_b) {
  EXPECT_EQ(p.m, m);
  EXPECT_EQ(p.n, n);
  EXPECT_EQ(p.k, k);
  EXPECT_EQ(p.trans_a, trans_a);
  EXPECT_EQ(p.trans_b, trans_b);
}

TEST(CudaMatmulPlan, Gpt2LinearWithBias) {
  MatmulCall x = call(matrix(R, 3 * C), matrix(R, C), matrix(C, 3 * C));
  x.bias = vector(3 * C);
  const LtProblem p = only_product(x);
  expect_shape(p, 3 * C, R, C, false, false);
  EXPECT_EQ(p.a, x.b.data);  // the operands change places
  EXPECT_EQ(p.b, x.a.data);
  EXPECT_EQ(p.d, x.c.data);
  EXPECT_EQ(p.bias, x.bias.data);
  EXPECT_EQ(p.lda, 3 * C);
  EXPECT_EQ(p.ldb, C);
  EXPECT_EQ(p.ldd, 3 * C);
  EXPECT_EQ(p.ab, DType::BF16);
  EXPECT_EQ(p.cd, DType::BF16);
  EXPECT_FALSE(p.add_c);
  EXPECT_FALSE(p.gelu);
}

TEST(CudaMatmulPlan, Gpt2ProjectionAddsBiasAndResidualAtOnce) {
  MatmulCall x = call(matrix(R, C), matrix(R, F), matrix(F, C));
  x.bias = vector(C);
  x.residual = matrix(R, 2 * C);  // rows that lie further apart than those of c
  x.residual.shape[1] = C;
  const LtProblem p = only_product(x);
  EXPECT_TRUE(p.add_c);
  EXPECT_EQ(p.c, x.residual.data);
  EXPECT_EQ(p.ldc, 2 * C);
  EXPECT_EQ(p.ldd, C);
  EXPECT_EQ(p.bias, x.bias.data);
}

TEST(CudaMatmulPlan, Gpt2GeluKeepsItsInputInTheSameCall) {
  MatmulCall x = call(matrix(R, F), matrix(R, C), matrix(C, F), {.activation = Activation::GeluTanh});
  x.bias = vector(F);
  x.preact = matrix(R, F);
  LtProblem p = only_product(x);
  EXPECT_TRUE(p.gelu);
  EXPECT_EQ(p.aux, x.preact.data);
  EXPECT_EQ(p.ld_aux, F);
  EXPECT_EQ(p.bias, x.bias.data);
  x.preact = {};
  p = only_product(x);
  EXPECT_TRUE(p.gelu);
  EXPECT_EQ(p.aux, nullptr);
}

TEST(CudaMatmulPlan, LinearBackward) {
  const TensorView dy = matrix(R, F), x = matrix(R, C);
  expect_shape(only_product(call(matrix(C, F), x, dy, {.trans_a = true})), F, C, R, false, true);  // dw, [in,out]
  expect_shape(only_product(call(matrix(F, C), dy, x, {.trans_a = true})), C, F, R, false, true);  // dw, [out,in]
  expect_shape(only_product(call(matrix(R, C), dy, matrix(C, F), {.trans_b = true})), C, R, F, true, false);  // dx
  expect_shape(only_product(call(matrix(R, C), dy, matrix(F, C))), C, R, F, false, false);
}

TEST(CudaMatmulPlan, LlamaAddsInPlace) {
  MatmulCall x = call(matrix(R, C), matrix(R, F), matrix(F, C));
  x.residual = x.c;
  const LtProblem p = only_product(x);
  EXPECT_TRUE(p.add_c);
  EXPECT_EQ(p.c, p.d);
  EXPECT_EQ(p.ldc, p.ldd);
}

TEST(CudaMatmulPlan, HeadOfFp32) {
  const i64 V = 5003;
  const TensorView h = matrix(R, C), weight = matrix(V, C), logits = matrix(R, V, DType::F32);
  LtProblem p = only_product(call(logits, h, weight, {.trans_b = true}));
  expect_shape(p, V, R, C, true, false);
  EXPECT_EQ(p.ab, DType::BF16);
  EXPECT_EQ(p.cd, DType::F32);

  TensorView dlogits = logits;  // 16-bit rows in the memory of the fp32 ones
  dlogits.dtype = DType::BF16;
  dlogits.stride[0] = 2 * V;
  p = only_product(call(matrix(V, C, DType::F32), dlogits, h, {.trans_a = true, .accumulate = true}));
  expect_shape(p, C, V, R, false, true);
  EXPECT_EQ(p.ldb, 2 * V);
  EXPECT_TRUE(p.add_c);
  EXPECT_EQ(p.c, p.d);
}

TEST(CudaMatmulPlan, WhatTheLibraryCannotDoIsDoneAfterwardsFromFp32Sums) {
  MatmulCall x = call(matrix(R, F), matrix(R, C), matrix(C, F), {.activation = Activation::Silu});
  x.bias = vector(F);
  const auto finished = [](const MatmulCall& y) {
    const MatmulStep step = plan_matmul(y, /*fuse=*/true);
    EXPECT_TRUE(step.multiplies && step.finishes);
    EXPECT_EQ(step.product.cd, DType::F32);
    EXPECT_EQ(step.product.bias, nullptr);
    EXPECT_FALSE(step.product.gelu || step.product.add_c);
    return step;
  };
  EXPECT_EQ(finished(x).scratch_bytes, R * F * 4);
  x.params.activation = Activation::GeluErf;
  EXPECT_EQ(finished(x).scratch_bytes, R * F * 4);
  x.params.activation = Activation::GeluTanh;
  x.residual = matrix(R, F);  // comes after the activation
  EXPECT_EQ(finished(x).scratch_bytes, R * F * 4);
  x.residual = {};
  x.preact = matrix(R, F + 4);  // an aux of the library needs rows of multiples of 8
  x.preact.shape[1] = F;
  finished(x);
  x.preact = {};
  x.bias.data = static_cast<char*>(x.bias.data) + 2;
  finished(x);

  // Fp32 results hold their own sums, in preact if there is one, unless c is still to be read.
  x = call(matrix(R, F, DType::F32), matrix(R, C), matrix(C, F), {.activation = Activation::GeluTanh});
  MatmulStep step = finished(x);
  EXPECT_EQ(step.scratch_bytes, 0);
  EXPECT_EQ(step.product.d, x.c.data);
  EXPECT_EQ(step.finish.sums, x.c.as<float>());
  x.residual = x.c;
  EXPECT_EQ(finished(x).scratch_bytes, R * F * 4);
  x.preact = matrix(R, F, DType::F32);
  EXPECT_EQ(finished(x).product.d, x.preact.data);
}

TEST(CudaMatmulPlan, LargeSumsGoByRows) {
  const i64 M = 100000, N = 11008;
  for (const bool trans_a : {false, true}) {
    const MatmulCall x = call(matrix(M, N), trans_a ? matrix(C, M) : matrix(M, C), matrix(C, N),
                              {.trans_a = trans_a, .activation = Activation::Silu});
    const MatmulStep step = plan_matmul(x, /*fuse=*/true);
    EXPECT_LE(step.scratch_bytes, i64{32} << 20);
    EXPECT_GT(step.scratch_bytes, i64{16} << 20);
    EXPECT_EQ(step.rows % 128, 0);
    EXPECT_EQ(step.product.n, step.rows);
    EXPECT_EQ(step.finish.call.c.dim(0), step.rows);
    const MatmulCall rest = rows_from(x, step.rows, x.c.dim(0) - step.rows);
    EXPECT_EQ(rest.c.dim(0), M - step.rows);
    EXPECT_EQ(rest.c.data, x.c.as<bf16>() + step.rows * N);
    EXPECT_EQ(rest.a.data, x.a.as<bf16>() + step.rows * (trans_a ? 1 : C));
    EXPECT_EQ(plan_matmul(rest, true).product.ldb, trans_a ? M : C);
  }
}

// A vocabulary of 50257: rows of logits lie 50264 apart, and each of its products is two.
TEST(CudaMatmulPlan, LargeRaggedDimensionsAreSplit) {
  constexpr i64 V = 50257, kBody = 50256, kStride = 50264;
  std::array<MatmulCall, 2> parts;
  const TensorView h = matrix(R, C), weight = matrix(V, C), dweight = matrix(V, C, DType::F32), dh = matrix(R, C),
                   bias = vector(V);
  TensorView z = matrix(R, V, DType::F32), dz = matrix(R, V);
  z.stride[0] = kStride, dz.stride[0] = 2 * kStride;
  const auto at = [](const TensorView& v, i64 elements) {
    return static_cast<char*>(v.data) + elements * dtype_bytes(v.dtype);
  };

  MatmulCall x = call(z, h, weight, {.trans_b = true});
  x.bias = bias;
  ASSERT_EQ(split_ragged(x, parts), 2);
  EXPECT_EQ(parts[0].c.dim(1), kBody);
  EXPECT_EQ(parts[0].b.dim(0), kBody);
  EXPECT_EQ(parts[0].c.stride[0], kStride);
  EXPECT_EQ(parts[1].c.dim(1), 1);
  EXPECT_EQ(parts[1].c.data, at(z, kBody));
  EXPECT_EQ(parts[1].b.data, at(weight, kBody * C));
  EXPECT_EQ(parts[1].bias.data, at(bias, kBody));
  EXPECT_EQ(parts[1].bias.dim(0), 1);
  EXPECT_EQ(parts[1].a.data, h.data);

  ASSERT_EQ(split_ragged(call(dh, dz, weight), parts), 2);  // the few terms first, and the others added
  EXPECT_EQ(parts[0].a.data, at(dz, kBody));
  EXPECT_EQ(parts[0].a.dim(1), 1);
  EXPECT_EQ(parts[0].b.data, at(weight, kBody * C));
  EXPECT_FALSE(parts[0].params.accumulate);
  EXPECT_EQ(parts[1].a.dim(1), kBody);
  EXPECT_EQ(parts[1].b.dim(0), kBody);
  EXPECT_TRUE(parts[1].params.accumulate);

  ASSERT_EQ(split_ragged(call(dweight, dz, h, {.trans_a = true, .accumulate = true}), parts), 2);
  EXPECT_EQ(parts[0].c.dim(0), kBody);
  EXPECT_EQ(parts[0].a.dim(1), kBody);
  EXPECT_EQ(parts[1].c.data, at(dweight, kBody * C));
  EXPECT_EQ(parts[1].a.data, at(dz, kBody));
  EXPECT_TRUE(parts[1].params.accumulate);

  // Whole: rows that are no multiple apart, few columns, fp32, rows whose result must be that of the rows alone,
  // products that would be rounded twice, and a dimension along which nothing is contiguous.
  EXPECT_EQ(split_ragged(call(matrix(R, V, DType::F32), h, weight, {.trans_b = true}), parts), 0);
  EXPECT_EQ(split_ragged(call(matrix(R, 1001, DType::F32), h, matrix(1001, C), {.trans_b = true}), parts), 0);
  EXPECT_EQ(split_ragged(call(z, matrix(R, C, DType::F32), matrix(V, C, DType::F32), {.trans_b = true}), parts), 0);
  EXPECT_EQ(split_ragged(call(z, h, weight, {.trans_b = true, .rowwise = true}), parts), 0);
  EXPECT_EQ(split_ragged(call(dh, dz, weight, {.accumulate = true}), parts), 0);
  EXPECT_EQ(split_ragged(call(matrix(C, F, DType::F32), matrix(V, C), matrix(V, F), {.trans_a = true}), parts), 0);
}

// An operand of a product of codes, and a call.
Fp8MatmulCall fp8_call(TensorView c, i64 K, Fp8Blocks a, Fp8Blocks b, DType a_format = DType::F8E4M3) {
  const Fp8Layout of_a{c.dim(0), K, a}, of_b{c.dim(1), K, b};
  const auto codes = [](const Fp8Layout& l, DType format) { return matrix(l.padded_rows(), l.padded_k(), format); };
  const auto scales = [](const Fp8Layout& l) { return matrix(l.scale_rows(), l.scale_columns(), DType::F32); };
  return {.c = c,
          .a = codes(of_a, a_format),
          .a_scales = scales(of_a),
          .b = codes(of_b, DType::F8E4M3),
          .b_scales = scales(of_b),
          .bias = {},
          .residual = {},
          .params = {a, b}};
}

TEST(CudaMatmulPlan, ProductsOfCodesAreOneCall) {
  Fp8MatmulCall x = fp8_call(matrix(R, 256), 384, Fp8Blocks::Rows, Fp8Blocks::Squares, DType::F8E5M2);
  x.bias = vector(256);
  x.residual = matrix(R, 256);
  const MatmulStep step = plan_matmul_fp8(x, /*fuse=*/true);
  const LtProblem& p = step.product;
  expect_shape(p, 256, R, 384, true, false);
  EXPECT_TRUE(p.coded());
  EXPECT_EQ(p.a, x.b.data);  // the operands change places, with their scales
  EXPECT_EQ(p.b, x.a.data);
  EXPECT_EQ(p.a_scales, x.b_scales.data);
  EXPECT_EQ(p.b_scales, x.a_scales.data);
  EXPECT_EQ(p.a_blocks, Fp8Blocks::Squares);
  EXPECT_EQ(p.b_blocks, Fp8Blocks::Rows);
  EXPECT_EQ(p.ab, DType::F8E4M3);
  EXPECT_EQ(p.b_codes, DType::F8E5M2);
  EXPECT_EQ(p.cd, DType::BF16);
  EXPECT_EQ(p.bias, x.bias.data);
  EXPECT_TRUE(p.add_c);
  EXPECT_EQ(p.c, x.residual.data);
  EXPECT_FALSE(step.finishes);
  EXPECT_EQ(step.scratch_bytes, 0);
}

TEST(CudaMatmulPlan, PaddedRowsOfCodesGoThroughFp32Sums) {
  Fp8MatmulCall x = fp8_call(matrix(13, 256), 100, Fp8Blocks::Rows, Fp8Blocks::Rows);
  x.residual = x.c;
  const MatmulStep step = plan_matmul_fp8(x, /*fuse=*/true);
  expect_shape(step.product, 256, 16, 112, true, false);
  EXPECT_EQ(step.product.cd, DType::F32);
  EXPECT_EQ(step.product.ldd, 256);
  EXPECT_EQ(step.scratch_bytes, 16 * 256 * 4);
  EXPECT_TRUE(step.finishes);
  EXPECT_EQ(step.finish.call.residual.data, x.c.data);
  EXPECT_EQ(step.rows, 13);
  // A library that fuses nothing.
  EXPECT_EQ(plan_matmul_fp8(fp8_call(matrix(R, 256), 128, Fp8Blocks::Rows, Fp8Blocks::Rows), false).scratch_bytes,
            R * 256 * 4);
}

TEST(CudaMatmulPlan, KindsOfCodesHaveNamesOfTheirOwn) {
  std::set<std::string> names;
  const auto add = [&](const Fp8MatmulCall& x) { names.insert(name_of(key_of(plan_matmul_fp8(x, true).product))); };
  const TensorView c = matrix(R, 256);
  for (const DType format : {DType::F8E4M3, DType::F8E5M2}) {
    for (const auto& [a, b] : {std::pair{Fp8Blocks::Rows, Fp8Blocks::Rows},
                               {Fp8Blocks::Rows, Fp8Blocks::Squares},
                               {Fp8Blocks::Squares, Fp8Blocks::Rows}})
      add(fp8_call(c, 256, a, b, format));
  }
  EXPECT_EQ(names.size(), 6u);
}

TEST(CudaMatmulPlan, Edges) {
  // An empty sum asks nothing of the library.
  const MatmulStep empty = plan_matmul(call(matrix(R, C), matrix(R, 0), matrix(0, C)), true);
  EXPECT_FALSE(empty.multiplies);
  EXPECT_TRUE(empty.finishes);
  EXPECT_EQ(empty.finish.sums, nullptr);
  // The stride of a single row means nothing.
  MatmulCall one = call(matrix(1, C), matrix(1, F), matrix(C, F), {.trans_b = true});
  one.a.stride[0] = 0;
  EXPECT_GE(only_product(one).ldb, F);
  // Without fusion the library sees bare fp32 products.
  MatmulCall x = call(matrix(R, C), matrix(R, F), matrix(F, C));
  x.residual = matrix(R, C);
  const MatmulStep plain = plan_matmul(x, /*fuse=*/false);
  EXPECT_TRUE(plain.finishes);
  EXPECT_FALSE(plain.product.add_c);
  EXPECT_EQ(plain.product.cd, DType::F32);
  const MatmulStep bare = plan_matmul(call(matrix(R, C, DType::F32), matrix(R, F), matrix(F, C)), /*fuse=*/false);
  EXPECT_FALSE(bare.finishes);
}

}  // namespace cuda_matmul_plan_test
}  // namespace ds::cuda
