// SPDX-License-Identifier: Apache-2.0
// Converts a matmul to calls of cuBLASLt. Our matrices are row-major; read as column-major they are their transposes,
// so c = op(a) op(b) is computed as c^T = op(b)^T op(a)^T: the operands are exchanged and keep their flags.

#include <algorithm>
#include <bit>

#include "cuda/matmul.h"

namespace ds::cuda {
namespace {

// Size of fp32 sums between a product and its finish: small enough for the L2 cache.
constexpr i64 kSumsBytes = i64{32} << 20;
constexpr i64 kRowUnit = 128;
constexpr i64 kUnit = 8, kLarge = 1024;  // of dims that are split

constexpr i64 align_up(i64 n, i64 unit) noexcept { return (n + unit - 1) / unit * unit; }

bool aligned16(const TensorView& v) noexcept { return reinterpret_cast<size_t>(v.data) % 16 == 0; }

// The distance of rows. With a single row it has no meaning, and may be a value that suits the library.
i64 leading(const TensorView& v) noexcept { return v.dim(0) > 1 ? v.stride[0] : align_up(v.dim(1), 8); }

// True if one call of the library computes everything.
bool fits_one_product(const MatmulCall& x) noexcept {
  const DType work = x.a.dtype;
  if (x.bias && (x.c.dtype != work || !aligned16(x.bias))) return false;
  if (x.params.activation == Activation::None) return !x.preact;
  // The library's GELU is the tanh form with 16-bit accuracy, and is applied last.
  if (x.params.activation != Activation::GeluTanh || x.c.dtype != work || work == DType::F32) return false;
  if (x.residual || x.params.accumulate) return false;
  return !x.preact || (aligned16(x.preact) && leading(x.preact) % 8 == 0);
}

bool nothing_but_sums(const MatmulCall& x) noexcept {
  return !x.bias && !x.preact && !x.residual && !x.params.accumulate && x.params.activation == Activation::None;
}

// Columns [begin, begin + n) of a matrix, or elements of a vector.
TensorView columns(TensorView v, i64 begin, i64 n) noexcept {
  if (!v) return v;
  v.data = static_cast<char*>(v.data) + begin * dtype_bytes(v.dtype);
  v.shape[v.rank - 1] = n;
  return v;
}

}  // namespace

u32 alignment_of(const void* p) noexcept {
  return static_cast<u32>(1) << std::countr_zero(reinterpret_cast<size_t>(p) | 16u);
}

LtKey key_of(const LtProblem& p) noexcept {
  const auto align = [](const void* pointer) { return std::countr_zero(alignment_of(pointer)); };
  const i64 flags[] = {p.trans_a, p.trans_b,         p.add_c,         p.add_c && p.c == p.d,
                       p.gelu,    p.bias != nullptr, p.aux != nullptr};
  const bool squares_a = p.a_blocks == Fp8Blocks::Squares, squares_b = p.b_blocks == Fp8Blocks::Squares,
             e5m2_b = p.b_codes == DType::F8E5M2;
  i64 word = p.coded() ? 1 + 2 * i64{squares_a} + 4 * i64{squares_b} + 8 * i64{e5m2_b} : 0;
  for (const i64 flag : flags) word = word * 2 + flag;
  word = word * 256 + static_cast<i64>(p.ab);
  word = word * 256 + static_cast<i64>(p.cd);
  for (const void* pointer : {p.a, p.b, p.add_c ? p.c : p.d, static_cast<const void*>(p.d)}) {
    word = word * 8 + align(pointer);
  }
  return {{p.m, p.n, p.k, p.lda, p.ldb, p.add_c ? p.ldc : p.ldd, p.ldd, p.ld_aux, word}};
}

std::string name_of(const LtKey& key) {
  std::string name;
  for (const i64 v : key.value) name += (name.empty() ? "" : ",") + std::to_string(v);
  return name;
}

MatmulCall rows_from(const MatmulCall& x, i64 begin, i64 rows) noexcept {
  MatmulCall y = x;
  y.c = x.c.rows(begin, rows);
  if (x.params.trans_a) {
    y.a.data = static_cast<char*>(x.a.data) + begin * dtype_bytes(x.a.dtype);
    y.a.shape[1] = rows;
  } else {
    y.a = x.a.rows(begin, rows);
  }
  if (x.preact) y.preact = x.preact.rows(begin, rows);
  if (x.residual) y.residual = x.residual.rows(begin, rows);
  return y;
}

int split_ragged(const MatmulCall& x, std::array<MatmulCall, 2>& parts) noexcept {
  const bool trans_a = x.params.trans_a, trans_b = x.params.trans_b;
  const i64 M = x.c.dim(0), N = x.c.dim(1), K = x.a.dim(trans_a ? 0 : 1);
  const auto ragged = [](i64 n) { return n % kUnit != 0 && n > kLarge; };
  const auto even = [](const TensorView& v) { return !v || leading(v) % kUnit == 0; };
  if (x.a.dtype == DType::F32 || x.params.rowwise) return 0;
  if (ragged(N) && even(x.c) && even(x.preact) && even(x.residual) && (trans_b || even(x.b))) {
    const auto part = [&](i64 begin, i64 n) {
      MatmulCall y = x;
      for (TensorView* v : {&y.c, &y.preact, &y.residual, &y.bias}) *v = columns(*v, begin, n);
      y.b = trans_b ? x.b.rows(begin, n) : columns(x.b, begin, n);
      return y;
    };
    const i64 body = N / kUnit * kUnit;
    parts = {part(0, body), part(body, N - body)};
    return 2;
  }
  if (ragged(M) && trans_a && even(x.a)) {
    const i64 body = M / kUnit * kUnit;
    parts = {rows_from(x, 0, body), rows_from(x, body, M - body)};
    return 2;
  }
  // The sum over k in two parts, the few terms first: they are rounded once more if c is 16-bit; nothing else is.
  const bool bare = !x.bias && !x.preact && !x.residual && x.params.activation == Activation::None &&
                    (!x.params.accumulate || x.c.dtype == DType::F32);
  if (ragged(K) && bare && (trans_a || even(x.a)) && (!trans_b || even(x.b)) && (!trans_a || trans_b)) {
    const auto part = [&](i64 begin, i64 n) {
      MatmulCall y = x;
      y.a = trans_a ? x.a.rows(begin, n) : columns(x.a, begin, n);
      y.b = trans_b ? columns(x.b, begin, n) : x.b.rows(begin, n);
      return y;
    };
    const i64 body = K / kUnit * kUnit;
    parts = {part(body, K - body), part(0, body)};
    parts[1].params.accumulate = true;
    return 2;
  }
  return 0;
}

MatmulStep plan_matmul(const MatmulCall& x, bool fuse) noexcept {
  const i64 M = x.c.dim(0), N = x.c.dim(1), K = x.a.dim(x.params.trans_a ? 0 : 1);
  MatmulStep step;
  step.rows = M;
  if (K == 0) {
    step.finishes = true;
    step.finish.call = x;
    return step;
  }
  step.multiplies = true;
  LtProblem& p = step.product;
  p = {.m = N,
       .n = M,
       .k = K,
       .trans_a = x.params.trans_b,
       .trans_b = x.params.trans_a,
       .ab = x.a.dtype,
       .a = x.b.data,
       .b = x.a.data,
       .lda = leading(x.b),
       .ldb = leading(x.a)};

  if (fuse && fits_one_product(x)) {
    const TensorView& added = x.params.accumulate ? x.c : x.residual;
    p.cd = x.c.dtype;
    p.d = x.c.data;
    p.ldd = leading(x.c);
    p.bias = x.bias.data;
    if (added) p.add_c = true, p.c = added.data, p.ldc = leading(added);
    if (x.params.activation != Activation::None) p.gelu = true;
    if (x.preact) p.aux = x.preact.data, p.ld_aux = leading(x.preact);
    return step;
  }

  // fp32 sums, in preact or c if these are fp32 and nothing else reads them, then one pass over them.
  p.cd = DType::F32;
  step.finishes = true;
  const bool c_is_read = x.params.accumulate || (x.residual && x.residual.data == x.c.data);
  if (x.c.dtype == DType::F32 && (x.preact || !c_is_read)) {
    const TensorView& sums = x.preact ? x.preact : x.c;
    p.d = sums.data;
    p.ldd = leading(sums);
    step.finishes = !nothing_but_sums(x);
    step.finish = {x, sums.as<float>(), p.ldd};
    return step;
  }
  p.ldd = align_up(N, 8);
  const i64 row_bytes = p.ldd * dtype_bytes(DType::F32);
  const i64 fit = std::max<i64>(kSumsBytes / row_bytes, 1);
  if (fit < M) step.rows = fit > kRowUnit ? fit / kRowUnit * kRowUnit : fit;
  step.scratch_bytes = step.rows * row_bytes;
  p.n = step.rows;
  step.finish = {rows_from(x, 0, step.rows), nullptr, p.ldd};
  return step;
}

MatmulStep plan_matmul_fp8(const Fp8MatmulCall& x, bool fuse) noexcept {
  const i64 M = x.c.dim(0), N = x.c.dim(1), padded_m = x.a.dim(0), padded_n = x.b.dim(0), K = x.a.dim(1);
  MatmulStep step;
  step.rows = M;
  step.multiplies = true;
  LtProblem& p = step.product;
  p = {.m = padded_n,
       .n = padded_m,
       .k = K,
       .trans_a = true,
       .ab = x.b.dtype,
       .a = x.b.data,
       .b = x.a.data,
       .lda = K,
       .ldb = K,
       .a_scales = x.b_scales.as<float>(),
       .b_scales = x.a_scales.as<float>(),
       .a_blocks = x.params.b,
       .b_blocks = x.params.a,
       .b_codes = x.a.dtype};
  const auto even = [](const TensorView& v) {
    return !v || (aligned16(v) && leading(v) * dtype_bytes(v.dtype) % 16 == 0);
  };
  const bool whole = M == padded_m && N == padded_n && even(x.c) && even(x.residual);
  if (fuse && whole && (!x.bias || (x.c.dtype == DType::BF16 && aligned16(x.bias)))) {
    p.cd = x.c.dtype;
    p.d = x.c.data;
    p.ldd = leading(x.c);
    p.bias = x.bias.data;
    if (x.residual) p.add_c = true, p.c = x.residual.data, p.ldc = leading(x.residual);
    return step;
  }
  // The layout of scales depends on the number of rows, so all rows are one product.
  p.cd = DType::F32;
  p.ldd = padded_n;
  step.finishes = true;
  step.scratch_bytes = padded_m * padded_n * dtype_bytes(DType::F32);
  step.finish = {{x.c, {}, {}, x.bias, {}, x.residual, {}}, nullptr, p.ldd};
  return step;
}

}  // namespace ds::cuda
