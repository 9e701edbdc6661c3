// SPDX-License-Identifier: Apache-2.0
#pragma once
// Matrix products of the CUDA backend: the operation of one cuBLASLt call, the conversion of an op to such calls and
// elementwise steps (a pure function, so that it can be tested as data), and the engine that makes the calls.

#include <array>
#include <memory>
#include <string>

#include "ds/kernels/ops.h"

namespace ds::cuda {

class Context;

// One call of cuBLASLt, in its terms: matrices are column-major, ld >= rows.
//   x[m,n] = op(a) op(b) + bias (one per row) + (add_c ? c : 0);  aux = x;  d = gelu ? gelu_tanh(x) : x
// Sums are fp32; d and aux are rounded once. c may be d (with the same ld); otherwise it must not overlap any output.
struct LtProblem {
  i64 m = 0, n = 0, k = 0;
  bool trans_a = false, trans_b = false;  // a is stored [k,m], b [n,k]
  bool add_c = false, gelu = false;
  DType ab = DType::F32, cd = DType::F32;  // of a and b; of c, d, bias and aux
  const void* a = nullptr;
  const void* b = nullptr;
  const void* c = nullptr;
  void* d = nullptr;
  const void* bias = nullptr;  // [m], 16-byte aligned; or none
  void* aux = nullptr;         // [m,n] with gelu, 16-byte aligned, ld_aux % 8 == 0; or none
  i64 lda = 0, ldb = 0, ldc = 0, ldd = 0, ld_aux = 0;

  // For codes, E4M3 or E5M2: scales, in the layout of Fp8Layout. `ab` is then the type of a alone; trans_a, not
  // trans_b.
  const float* a_scales = nullptr;
  const float* b_scales = nullptr;
  Fp8Blocks a_blocks = Fp8Blocks::Rows, b_blocks = Fp8Blocks::Rows;
  DType b_codes = DType::F8E4M3;
  bool coded() const noexcept { return a_scales != nullptr; }
};

// Everything in a problem that an algorithm depends on.
struct LtKey {
  std::array<i64, 9> value{};
  bool operator==(const LtKey&) const = default;
};
LtKey key_of(const LtProblem& p) noexcept;
// The largest power of two up to 16 that divides the address; no algorithm needs more.
u32 alignment_of(const void* p) noexcept;
// "m,n,k,...": the numbers of the key.
std::string name_of(const LtKey& key);

// The operands of OpTable::matmul.
struct MatmulCall {
  TensorView c, a, b, bias, preact, residual;
  MatmulParams params;
};

// The operands of OpTable::matmul_fp8.
struct Fp8MatmulCall {
  TensorView c, a, a_scales, b, b_scales, bias, residual;
  Fp8MatmulParams params;
};

// The rest of a matmul after its product: c = activation(sums + bias) + residual, with preact the value before, each
// rounded once. `sums` may be c or preact if that is fp32, with its stride.
struct MatmulFinish {
  MatmulCall call;              // its first `rows` rows
  const float* sums = nullptr;  // null: zeros
  i64 sums_stride = 0;
  i64 parts = 1;  // the sums of so many parts, one after the other, which are added in that order
};

// The first rows of a matmul: a product, a finish, or a product followed by a finish.
struct MatmulStep {
  i64 rows = 0;
  bool multiplies = false, finishes = false;
  i64 scratch_bytes = 0;  // > 0: product.d and finish.sums must point to this much memory
  LtProblem product;
  MatmulFinish finish;
};

// The call for rows [begin, begin + rows) of c.
MatmulCall rows_from(const MatmulCall& call, i64 begin, i64 rows) noexcept;
// The library's fast algorithms need dims that are contiguous in memory to be a multiple of 8 elements, not only the
// distance of rows: a vocabulary of 50257 took four times as long as one of 50304 (tests/bench/results/h200). A product
// with such a large dim is split into two, one of which has a multiple of 8. For 16-bit operands only. Returns the
// number of `parts`, to be computed in that order; 0: it stays whole.
int split_ragged(const MatmulCall& call, std::array<MatmulCall, 2>& parts) noexcept;
// M, N > 0. With `fuse`, as much as possible is computed by the product; without, the product is a bare fp32 one.
MatmulStep plan_matmul(const MatmulCall& call, bool fuse) noexcept;
// The same for all rows of a product of codes, of which padded dims are multiplied as well.
MatmulStep plan_matmul_fp8(const Fp8MatmulCall& call, bool fuse) noexcept;

// The workspace of cuBLASLt's products on a GPU of this compute capability.
constexpr size_t cublas_workspace_bytes(int compute_capability) noexcept {
  return size_t{compute_capability >= 9 ? 64u : 32u} << 20;
}

// fp32 operands are multiplied as fp32, not TF32. The bits of a product depend on the algorithm; each algorithm gives
// the same bits every time.
class MatmulEngine {
 public:
  // Uses an algorithm known from an earlier run if the library still has it. With ContextOptions::autotune, the
  // algorithms for any other kind of product are timed on its first run, which waits for the stream, and the fastest is
  // kept; two runs of a program may then differ in bits. Otherwise always uses the library's first choice.
  explicit MatmulEngine(Context& context);
  ~MatmulEngine();
  MatmulEngine(const MatmulEngine&) = delete;
  MatmulEngine& operator=(const MatmulEngine&) = delete;

  // The workspace, which is allocated at first, and that of a GPU with this compute capability.
  size_t workspace_bytes() const noexcept;
  static size_t workspace_bytes(int compute_capability) noexcept;

  // True if the library has an algorithm for products of this kind.
  bool supports(const LtProblem& p) noexcept;
  // Errors are reported to the context.
  void run(const LtProblem& p) noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ds::cuda
