// SPDX-License-Identifier: Apache-2.0
// cuBLASLt's computations on the host: fp32 sums in the order of k. Stops if the library's documented conditions are
// not met. Sums of codes are taken block by block, as on Hopper. With DS_SIM_PLAIN_LT in the environment it only has
// algorithms for bare fp32 products.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "cuda/context.h"
#include "cuda/matmul.h"
#include "cuda/sim/fibers.h"

namespace ds::cuda {
namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "CUDA simulator: cublasLtMatmul: %s\n", what);
  std::abort();
}

float get(const void* p, DType t, i64 i) noexcept {
  switch (t) {
    case DType::BF16: return to_float(static_cast<const bf16*>(p)[i]);
    case DType::F16: return to_float(static_cast<const f16*>(p)[i]);
    case DType::F8E4M3:
    case DType::F8E5M2: return from_fp8(static_cast<const u8*>(p)[i], fp8_format(t));
    default: return static_cast<const float*>(p)[i];
  }
}
void put(void* p, DType t, i64 i, float x) noexcept {
  switch (t) {
    case DType::BF16: static_cast<bf16*>(p)[i] = to_bf16(x); break;
    case DType::F16: static_cast<f16*>(p)[i] = to_f16(x); break;
    default: static_cast<float*>(p)[i] = x;
  }
}

struct Span {
  size_t begin, end;
  bool meets(const Span& o) const noexcept { return begin < o.end && o.begin < end; }
};
Span span(const void* p, i64 ld, i64 columns, i64 rows, DType t) noexcept {
  const auto begin = reinterpret_cast<size_t>(p);
  return {begin, begin + static_cast<size_t>(((columns - 1) * ld + rows) * dtype_bytes(t))};
}
bool aligned(const void* p, i64 unit) noexcept { return reinterpret_cast<size_t>(p) % static_cast<size_t>(unit) == 0; }

// "FP8 kernels" and "128-element 1D and 128x128 2D block scaling" in cuBLAS's documentation.
void check_codes(const LtProblem& p) {
  const auto is_code = [](DType t) { return t == DType::F8E4M3 || t == DType::F8E5M2; };
  require(is_code(p.ab) && is_code(p.b_codes), "scales of matrices that are not FP8");
  require(p.ab != p.b_codes || p.ab == DType::F8E4M3, "E5M2 times E5M2");
  require(p.a_blocks == Fp8Blocks::Rows || p.b_blocks == Fp8Blocks::Rows, "128x128 blocks in both a and b");
  require(p.trans_a && !p.trans_b, "FP8 in another form than TN");
  require(p.m % 16 == 0 && p.n % 16 == 0 && p.k % 16 == 0 && p.lda % 16 == 0 && p.ldb % 16 == 0 &&
              p.ldd * dtype_bytes(p.cd) % 16 == 0 && (!p.add_c || p.ldc * dtype_bytes(p.cd) % 16 == 0),
          "FP8 dims that are not multiples of 16 bytes");
  require(aligned(p.a, 16) && aligned(p.b, 16) && aligned(p.d, 16) && aligned(p.c, 16) && aligned(p.a_scales, 16) &&
              aligned(p.b_scales, 16),
          "FP8 operands that are not 16-byte aligned");
  require(!p.gelu, "FP8 with an activation");
}

// Interleaved matrices (columns of one between those of the other) would be refused, too; none of ours are.
void check(const LtProblem& p) {
  require(p.m > 0 && p.n > 0 && p.k > 0, "an empty matrix");
  require(p.a != nullptr && p.b != nullptr && p.d != nullptr && (p.c != nullptr) == p.add_c, "a null matrix");
  if (p.coded()) {
    check_codes(p);
  } else {
    require(p.ab == DType::F32 || p.ab == DType::BF16 || p.ab == DType::F16, "dtype of a and b");
  }
  require(p.cd == (p.coded() ? DType::BF16 : p.ab) || p.cd == DType::F32, "dtype of c and d");
  const i64 a_rows = p.trans_a ? p.k : p.m, b_rows = p.trans_b ? p.n : p.k;
  require(p.lda >= a_rows && p.ldb >= b_rows && p.ldd >= p.m && (!p.add_c || p.ldc >= p.m), "ld less than the rows");
  require(aligned(p.a, dtype_bytes(p.ab)) && aligned(p.b, dtype_bytes(p.ab)) && aligned(p.d, dtype_bytes(p.cd)) &&
              aligned(p.c, dtype_bytes(p.cd)),
          "a pointer is not aligned to its element");
  require(p.aux == nullptr || p.gelu, "aux without an activation");
  require(p.bias == nullptr || p.cd == (p.coded() ? DType::BF16 : p.ab), "a bias of another dtype than a and b");
  require(aligned(p.bias, 16), "bias is not 16-byte aligned");
  require(p.aux == nullptr || (aligned(p.aux, 16) && p.ld_aux % 8 == 0 && p.ld_aux >= p.m), "aux is not aligned");
  const Span a = span(p.a, p.lda, p.trans_a ? p.m : p.k, a_rows, p.ab);
  const Span b = span(p.b, p.ldb, p.trans_b ? p.k : p.n, b_rows, p.ab);
  const Span d = span(p.d, p.ldd, p.n, p.m, p.cd);
  require(!d.meets(a) && !d.meets(b), "d overlaps a or b");
  if (p.add_c && p.c == p.d) {
    require(p.ldc == p.ldd, "c is d, with another ld");
  } else if (p.add_c) {
    require(!d.meets(span(p.c, p.ldc, p.n, p.m, p.cd)), "d overlaps c");
  }
  if (p.aux != nullptr) {
    const Span aux = span(p.aux, p.ld_aux, p.n, p.m, p.cd);
    require(!aux.meets(a) && !aux.meets(b) && !aux.meets(d), "aux overlaps another matrix");
  }
}

float gelu_tanh(float x) noexcept { return 0.5f * x * (1.0f + std::tanh(0.79788456f * (x + 0.044715f * x * x * x))); }

constexpr i64 kStrip = 16;  // rows of d at a time

// Adds K terms of each row of a strip; a [K][kStrip].
void add_terms(const float* a, const float* b, i64 K, float (&sum)[kStrip]) noexcept {
  for (i64 k = 0; k < K; ++k) {
    for (i64 i = 0; i < kStrip; ++i) sum[i] += a[k * kStrip + i] * b[k];
  }
}

// The same block by block: the sums of a block, times the scales of both matrices.
void add_blocks(const LtProblem& p, i64 row, i64 rows, i64 column, const float* a, const float* b,
                float (&sum)[kStrip]) noexcept {
  const Fp8Layout la{p.m, p.k, p.a_blocks}, lb{p.n, p.k, p.b_blocks};
  for (i64 k = 0; k < p.k; k += kFp8Block) {
    float part[kStrip] = {};
    add_terms(a + k * kStrip, b + k, std::min(kFp8Block, p.k - k), part);
    for (i64 i = 0; i < rows; ++i)
      sum[i] += part[i] * (p.a_scales[la.scale_of(row + i, k)] * p.b_scales[lb.scale_of(column, k)]);
  }
}

void multiply(const LtProblem& p) {
  // op(b) column by column, op(a) in strips of rows.
  std::vector<float> b(static_cast<size_t>(p.n * p.k)), a(static_cast<size_t>(kStrip * p.k));
  const DType b_type = p.coded() ? p.b_codes : p.ab;
  for (i64 j = 0; j < p.n; ++j) {
    for (i64 k = 0; k < p.k; ++k) {
      b[j * p.k + k] = get(p.b, b_type, p.trans_b ? j + k * p.ldb : k + j * p.ldb);
    }
  }
  for (i64 strip = 0; strip < p.m; strip += kStrip) {
    const i64 rows = std::min(kStrip, p.m - strip);
    for (i64 k = 0; k < p.k; ++k) {
      for (i64 i = 0; i < kStrip; ++i) {
        const i64 row = strip + i;
        a[k * kStrip + i] = i < rows ? get(p.a, p.ab, p.trans_a ? k + row * p.lda : row + k * p.lda) : 0.0f;
      }
    }
    for (i64 j = 0; j < p.n; ++j) {
      float sum[kStrip] = {};
      if (p.coded()) {
        add_blocks(p, strip, rows, j, a.data(), &b[j * p.k], sum);
      } else {
        add_terms(a.data(), &b[j * p.k], p.k, sum);
      }
      for (i64 i = 0; i < rows; ++i) {
        const i64 row = strip + i;
        float x = sum[i];
        if (p.add_c) x += get(p.c, p.cd, row + j * p.ldc);
        if (p.bias != nullptr) x += get(p.bias, p.cd, row);
        if (p.aux != nullptr) put(p.aux, p.cd, row + j * p.ld_aux, x);
        put(p.d, p.cd, row + j * p.ldd, p.gelu ? gelu_tanh(x) : x);
      }
    }
  }
}

}  // namespace

struct MatmulEngine::Impl {
  const ContextOptions& options;
  bool plain = std::getenv("DS_SIM_PLAIN_LT") != nullptr;
  std::set<std::string> products;  // that have run
  static inline const std::string kMachine = "simulator\t0\t";

  // There is one algorithm, so timing chooses it; a known one is this, or another library's.
  void choose(const LtProblem& p) {
    constexpr const char* kAlgorithm = "in order";
    if (products.empty() && options.machine) options.machine(kMachine);
    const std::string product = kMachine + name_of(key_of(p));
    if (!products.insert(product).second) return;
    const std::string known = options.known ? options.known(product) : "";
    if (!known.empty() && known != kAlgorithm && options.warn)
      options.warn("cuda.autotune_file: the simulator does not take the algorithm of " + product);
    if (known.empty() && options.autotune && options.chosen) options.chosen(product, kAlgorithm);
  }
};

MatmulEngine::MatmulEngine(Context& context) : impl_(std::make_unique<Impl>(context.options())) {}
MatmulEngine::~MatmulEngine() = default;
size_t MatmulEngine::workspace_bytes() const noexcept { return 0; }
size_t MatmulEngine::workspace_bytes(int) noexcept { return 0; }

bool MatmulEngine::supports(const LtProblem& p) noexcept {
  return !impl_->plain || (p.cd == DType::F32 && !p.add_c && !p.gelu && p.bias == nullptr && p.aux == nullptr);
}

void MatmulEngine::run(const LtProblem& p) noexcept {
  check(p);
  require(supports(p), "no algorithm");
  impl_->choose(p);
  sim::enqueue([p] { multiply(p); });
}

}  // namespace ds::cuda
