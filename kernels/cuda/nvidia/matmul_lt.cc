// SPDX-License-Identifier: Apache-2.0
// Matrix products by cuBLASLt. The library is asked once per kind of product for its algorithms; with autotuning the
// first run of a kind times them.

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "cuda/context.h"
#include "cuda/matmul.h"

namespace ds::cuda {
namespace {

constexpr int kCandidates = 16;

struct KeyHash {
  size_t operator()(const LtKey& key) const noexcept {
    u64 h = 0xCBF29CE484222325u;
    for (const i64 v : key.value) h = std::rotl((h ^ static_cast<u64>(v)) * 0x9E3779B97F4A7C15u, 29);
    return h;
  }
};

cudaDataType_t data_type(DType t) noexcept {
  switch (t) {
    case DType::BF16: return CUDA_R_16BF;
    case DType::F16: return CUDA_R_16F;
    case DType::F8E4M3: return CUDA_R_8F_E4M3;
    case DType::F8E5M2: return CUDA_R_8F_E5M2;
    default: return CUDA_R_32F;
  }
}

i32 scale_mode(Fp8Blocks blocks) noexcept {
  return blocks == Fp8Blocks::Rows ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
                                   : CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
}

cublasLtEpilogue_t epilogue(const LtProblem& p) noexcept {
  if (!p.gelu) return p.bias != nullptr ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  if (p.aux != nullptr) return p.bias != nullptr ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
  return p.bias != nullptr ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
}

// How a kind of product is computed. Lives as long as the engine.
struct Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr, d = nullptr;
  std::vector<cublasLtMatmulAlgo_t> candidates;  // until the first run; the first is the library's choice
  cublasLtMatmulAlgo_t algorithm{};
  bool supported = false, chosen = false;

  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    for (cublasLtMatrixLayout_t layout : {a, b, c, d}) {
      if (layout != nullptr) cublasLtMatrixLayoutDestroy(layout);
    }
    if (operation != nullptr) cublasLtMatmulDescDestroy(operation);
  }

  template <class T>
  cublasStatus_t set(cublasLtMatmulDescAttributes_t attribute, const T& value) noexcept {
    return cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value);
  }
};

}  // namespace

struct MatmulEngine::Impl {
  Context& context;
  cublasLtHandle_t handle = nullptr;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  cudaEvent_t begin = nullptr, end = nullptr;
  std::string machine;  // GPU and library, the prefix of the names of products
  std::unordered_map<LtKey, Plan, KeyHash> plans;

  explicit Impl(Context& c) noexcept : context(c) {
    check(cublasLtCreate(&handle), "cublasLtCreate");
    int device = 0, major = 0;
    context.check(cudaGetDevice(&device), "cudaGetDevice");
    context.check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    cudaDeviceProp properties{};
    context.check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    machine = std::string(properties.name) + '\t' + std::to_string(cublasLtGetVersion()) + '\t';
    if (c.options().machine) c.options().machine(machine);
    const size_t wanted_bytes = cublas_workspace_bytes(major);
    workspace = context.allocate(wanted_bytes, "the workspace of matrix products");
    if (workspace != nullptr) workspace_bytes = wanted_bytes;
    context.check(cudaEventCreateWithFlags(&begin, cudaEventDefault), "cudaEventCreate");
    context.check(cudaEventCreateWithFlags(&end, cudaEventDefault), "cudaEventCreate");
  }
  ~Impl() {
    plans.clear();
    if (begin != nullptr) cudaEventDestroy(begin);
    if (end != nullptr) cudaEventDestroy(end);
    if (workspace != nullptr) cudaFree(workspace);
    if (handle != nullptr) cublasLtDestroy(handle);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  bool check(cublasStatus_t s, const char* where) noexcept {
    if (s != CUBLAS_STATUS_SUCCESS) context.fail(cublasLtGetStatusString(s), where);
    return s == CUBLAS_STATUS_SUCCESS;
  }

  // The pointers of the epilogue, and of scales, are part of the operation.
  cublasStatus_t bind(Plan& plan, const LtProblem& p) noexcept {
    cublasStatus_t s = CUBLAS_STATUS_SUCCESS;
    if (p.bias != nullptr) s = plan.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
    if (p.aux != nullptr && s == CUBLAS_STATUS_SUCCESS) s = plan.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.aux);
    if (p.coded() && s == CUBLAS_STATUS_SUCCESS) s = plan.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.a_scales);
    if (p.coded() && s == CUBLAS_STATUS_SUCCESS) s = plan.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.b_scales);
    return s;
  }

  cublasStatus_t describe(Plan& plan, const LtProblem& p) noexcept {
    cublasStatus_t first = CUBLAS_STATUS_SUCCESS;
    const auto ok = [&](cublasStatus_t s) {
      if (first == CUBLAS_STATUS_SUCCESS) first = s;
      return first == CUBLAS_STATUS_SUCCESS;
    };
    const auto layout = [&](cublasLtMatrixLayout_t& out, DType t, i64 rows, i64 columns, i64 ld) {
      ok(cublasLtMatrixLayoutCreate(&out, data_type(t), static_cast<u64>(rows), static_cast<u64>(columns), ld));
    };
    if (!ok(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F))) return first;
    const auto op = [](bool transposed) { return transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
    ok(plan.set(CUBLASLT_MATMUL_DESC_TRANSA, op(p.trans_a)));
    ok(plan.set(CUBLASLT_MATMUL_DESC_TRANSB, op(p.trans_b)));
    ok(plan.set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue(p)));
    if (p.bias != nullptr) ok(plan.set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(p.cd)));
    if (p.aux != nullptr) ok(plan.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.ld_aux));
    if (p.coded()) {
      ok(plan.set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, scale_mode(p.a_blocks)));
      ok(plan.set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, scale_mode(p.b_blocks)));
    }
    ok(bind(plan, p));
    layout(plan.a, p.ab, p.trans_a ? p.k : p.m, p.trans_a ? p.m : p.k, p.lda);
    layout(plan.b, p.coded() ? p.b_codes : p.ab, p.trans_b ? p.n : p.k, p.trans_b ? p.k : p.n, p.ldb);
    layout(plan.c, p.cd, p.m, p.n, p.add_c ? p.ldc : p.ldd);
    layout(plan.d, p.cd, p.m, p.n, p.ldd);
    return first;
  }

  void find_candidates(Plan& plan, const LtProblem& p) noexcept {
    cublasLtMatmulPreference_t preference = nullptr;
    if (!check(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate")) return;
    bool ok = true;
    const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      ok = ok && check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
                       "cublasLtMatmulPreferenceSetAttribute");
    };
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
    // No partial sums combined in the output: they would be rounded to its type, and their order may vary.
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        static_cast<u32>(CUBLASLT_REDUCTION_SCHEME_NONE) | static_cast<u32>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(p.a));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(p.b));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(p.add_c ? p.c : p.d));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(p.d));
    std::array<cublasLtMatmulHeuristicResult_t, kCandidates> found{};
    int count = 0;
    // A refusal is not an error: the caller has another way, or run() reports that there is none.
    if (ok && cublasLtMatmulAlgoGetHeuristic(handle, plan.operation, plan.a, plan.b, plan.c, plan.d, preference,
                                             kCandidates, found.data(), &count) != CUBLAS_STATUS_SUCCESS) {
      count = 0;
    }
    for (int i = 0; i < count; ++i) {
      const auto& f = found[i];
      if (f.state == CUBLAS_STATUS_SUCCESS && f.workspaceSize <= workspace_bytes) plan.candidates.push_back(f.algo);
    }
    cublasLtMatmulPreferenceDestroy(preference);
    plan.supported = !plan.candidates.empty();
  }

  Plan& plan_for(const LtProblem& p) noexcept {
    const auto [at, is_new] = plans.try_emplace(key_of(p));
    Plan& plan = at->second;
    if (is_new && handle != nullptr && describe(plan, p) == CUBLAS_STATUS_SUCCESS) find_candidates(plan, p);
    return plan;
  }

  cublasStatus_t multiply(const Plan& plan, const LtProblem& p, void* d,
                          const cublasLtMatmulAlgo_t& algorithm) noexcept {
    const float alpha = 1, beta = p.add_c ? 1.0f : 0.0f;
    return cublasLtMatmul(handle, plan.operation, &alpha, p.a, plan.a, p.b, plan.b, &beta, p.add_c ? p.c : d, plan.c, d,
                          plan.d, &algorithm, workspace, workspace_bytes, context.stream());
  }

  // The milliseconds of one run; negative: the algorithm does not run.
  float time(const Plan& plan, const LtProblem& p, void* d, const cublasLtMatmulAlgo_t& algorithm) noexcept {
    float ms = -1;
    if (cudaEventRecord(begin, context.stream()) != cudaSuccess ||
        multiply(plan, p, d, algorithm) != CUBLAS_STATUS_SUCCESS ||
        cudaEventRecord(end, context.stream()) != cudaSuccess || cudaEventSynchronize(end) != cudaSuccess ||
        cudaEventElapsedTime(&ms, begin, end) != cudaSuccess) {
      return -1;
    }
    return ms;
  }

  // Timing waits for the stream, which is not allowed while recording a graph and would invalidate the recording.
  bool may_wait() const noexcept {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    return cudaStreamIsCapturing(context.stream(), &status) == cudaSuccess && status == cudaStreamCaptureStatusNone;
  }

  // An algorithm can be stored as its bytes, together with the version of the library.
  static std::string text_of(const cublasLtMatmulAlgo_t& algorithm) {
    constexpr char kDigits[] = "0123456789abcdef";
    std::array<unsigned char, sizeof algorithm> bytes{};
    std::memcpy(bytes.data(), &algorithm, sizeof algorithm);
    std::string text;
    for (const unsigned char b : bytes) text += {kDigits[b >> 4], kDigits[b & 15]};
    return text;
  }
  static bool from_text(const std::string& text, cublasLtMatmulAlgo_t& algorithm) {
    std::array<unsigned char, sizeof algorithm> bytes{};
    if (text.size() != 2 * bytes.size()) return false;
    for (size_t i = 0; i < bytes.size(); ++i) {
      if (std::from_chars(&text[2 * i], &text[2 * i] + 2, bytes[i], 16).ptr != &text[2 * i] + 2) return false;
    }
    std::memcpy(&algorithm, bytes.data(), sizeof algorithm);
    return true;
  }

  // Uses the choice of an earlier run if the library accepts it for this product.
  bool take_known(Plan& plan, const std::string& product) {
    const ContextOptions& options = context.options();
    const std::string known = options.known ? options.known(product) : "";
    cublasLtMatmulHeuristicResult_t result{};
    cublasLtMatmulAlgo_t algorithm{};
    if (known.empty()) return false;
    const bool served = from_text(known, algorithm) &&
                        cublasLtMatmulAlgoCheck(handle, plan.operation, plan.a, plan.b, plan.c, plan.d, &algorithm,
                                                &result) == CUBLAS_STATUS_SUCCESS &&
                        result.workspaceSize <= workspace_bytes;
    if (served) plan.algorithm = algorithm;
    if (!served && options.warn) options.warn("cuda.autotune_file: cuBLASLt does not take the algorithm of " + product);
    return served;
  }

  void choose(Plan& plan, const LtProblem& p) {
    plan.algorithm = plan.candidates.front();
    const ContextOptions& options = context.options();
    const std::string product = options.known ? machine + name_of(key_of(p)) : "";
    if (take_known(plan, product)) {
      plan.candidates = {};
      plan.chosen = true;
      return;
    }
    if (options.autotune && plan.candidates.size() > 1 && may_wait()) {
      // Timed runs write d repeatedly. If d is added to, its contents must survive, so they write to other memory; if
      // there is none, the library's choice is kept.
      void* elsewhere = nullptr;
      const bool in_place = p.add_c && p.c == p.d;
      const i64 d_bytes = ((p.n - 1) * p.ldd + p.m) * dtype_bytes(p.cd);
      if (!in_place || cudaMalloc(&elsewhere, static_cast<size_t>(d_bytes)) == cudaSuccess) {
        choose_fastest(plan, p, in_place ? elsewhere : p.d);
      } else {
        static_cast<void>(cudaGetLastError());
      }
      if (elsewhere != nullptr) cudaFree(elsewhere);
      if (options.chosen) options.chosen(product, text_of(plan.algorithm));
    }
    plan.candidates = {};
    plan.chosen = true;
  }

  void choose_fastest(Plan& plan, const LtProblem& p, void* d) noexcept {
    constexpr int kRuns = 5;
    constexpr float kLongMs = 5, kHopeless = 1.3f;
    float best = -1;
    for (const cublasLtMatmulAlgo_t& algorithm : plan.candidates) {
      if (time(plan, p, d, algorithm) < 0) continue;  // the first run also loads the kernel
      float least = time(plan, p, d, algorithm);
      const bool again = least >= 0 && least < kLongMs && (best < 0 || least < kHopeless * best);
      for (int run = 1; again && run < kRuns; ++run) least = std::min(least, time(plan, p, d, algorithm));
      if (least >= 0 && (best < 0 || least < best)) best = least, plan.algorithm = algorithm;
    }
    static_cast<void>(cudaGetLastError());  // clears errors of algorithms that did not run
  }
};

MatmulEngine::MatmulEngine(Context& context) : impl_(std::make_unique<Impl>(context)) {}
MatmulEngine::~MatmulEngine() = default;

size_t MatmulEngine::workspace_bytes() const noexcept { return impl_->workspace_bytes; }
size_t MatmulEngine::workspace_bytes(int compute_capability) noexcept {
  return cublas_workspace_bytes(compute_capability);
}

bool MatmulEngine::supports(const LtProblem& p) noexcept { return impl_->plan_for(p).supported; }

void MatmulEngine::run(const LtProblem& p) noexcept {
  Impl& x = *impl_;
  Plan& plan = x.plan_for(p);
  if (!plan.supported) {
    x.context.fail("cuBLASLt has no algorithm for this matrix product", "matmul");
    return;
  }
  if (!x.check(x.bind(plan, p), "matmul")) return;
  if (!plan.chosen) x.choose(plan, p);
  x.check(x.multiply(plan, p, p.d, plan.algorithm), "matmul");
}

}  // namespace ds::cuda
