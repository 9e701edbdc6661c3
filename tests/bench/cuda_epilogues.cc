// SPDX-License-Identifier: Apache-2.0
// Fused products of cuBLASLt on this GPU that matmul does not ask for: gradients of GELU and biases, sums added to in
// fp32, FP8 with a scale for each block. For each, whether the heuristic names an algorithm, and its time beside the
// plain bf16 product of the same shape:
//   cuda_epilogues [--json FILE] [--seconds S]
// Shapes are those of a layer of GPT-2 124M and 1.5B and of Qwen2.5 1.5B. Nothing of libds is in it. Exit status: 0
// done; 1 a call failed; 2 usage; 4 there is no GPU.

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr size_t kWorkspaceBytes = size_t{64} << 20;
constexpr int kCandidates = 8, kRounds = 7;

void check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "cuda_epilogues: error: %s: %s\n", what, cudaGetErrorString(e));
  std::exit(1);
}
void check(cublasStatus_t s, const char* what) {
  if (s == CUBLAS_STATUS_SUCCESS) return;
  std::fprintf(stderr, "cuda_epilogues: error: %s: %s\n", what, cublasLtGetStatusString(s));
  std::exit(1);
}

// Device memory of repeated random bytes, so that bf16 and E4M3 read numbers.
class Memory {
 public:
  Memory(size_t bytes, cudaDataType_t type) : bytes_((bytes + 255) / 256 * 256) {
    check(cudaMalloc(&data_, bytes_), "memory");
    std::vector<unsigned char> tile(std::min(bytes_, size_t{4} << 20));
    std::minstd_rand random(1);
    std::normal_distribution<float> normal;
    if (type == CUDA_R_32F) {
      for (size_t i = 0; i + 4 <= tile.size(); i += 4) {
        const float x = 1.0f;  // scales, and sums
        std::memcpy(&tile[i], &x, 4);
      }
    } else if (type == CUDA_R_16BF) {
      for (size_t i = 0; i + 2 <= tile.size(); i += 2) {
        const float x = normal(random);
        std::memcpy(&tile[i], reinterpret_cast<const char*>(&x) + 2, 2);
      }
    } else {
      for (unsigned char& code : tile)
        code = static_cast<unsigned char>((random() >> 8) % 0x60 | (random() >> 8 & 0x80));
    }
    for (size_t at = 0; at < bytes_; at += tile.size())
      check(cudaMemcpy(static_cast<char*>(data_) + at, tile.data(), std::min(tile.size(), bytes_ - at),
                       cudaMemcpyHostToDevice),
            "filling memory");
  }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

// d[m,n] = op(a) op(b), columns contiguous, with the requested epilogue and scales.
struct Case {
  std::string name;
  int64_t m, n, k;
  bool trans_a, trans_b;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  cudaDataType_t in = CUDA_R_16BF, out = CUDA_R_16BF;
  float beta = 0;
  int scale_a = -1, scale_b = -1;  // cublasLtMatmulMatrixScale_t; -1: one for all
};

struct Result {
  int algorithms = 0;
  std::string status = "success";  // of the heuristic
  double first_us = 0, best_us = 0;
};

size_t bytes_of(cudaDataType_t t) { return t == CUDA_R_32F ? 4 : t == CUDA_R_16BF ? 2 : 1; }

class Probe {
 public:
  explicit Probe(double seconds) : seconds_(seconds), workspace_(kWorkspaceBytes, CUDA_R_8F_E4M3) {
    check(cublasLtCreate(&handle_), "cublasLtCreate");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream");
    check(cudaEventCreate(&begin_), "an event");
    check(cudaEventCreate(&end_), "an event");
  }
  ~Probe() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(stream_);
    cublasLtDestroy(handle_);
  }
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  Result run(const Case& c) {
    const Memory a(static_cast<size_t>(c.m * c.k) * bytes_of(c.in), c.in),
        b(static_cast<size_t>(c.k * c.n) * bytes_of(c.in), c.in),
        d(static_cast<size_t>(c.m * c.n) * bytes_of(c.out), c.out),
        aux(static_cast<size_t>(c.m * c.n) * 2, CUDA_R_16BF), bias(static_cast<size_t>(std::max(c.m, c.n)) * 4, c.out);
    // A scale for each 128 elements at most, and the padding of any layout of them.
    const Memory scales_a(static_cast<size_t>((c.m + 128) * (c.k / 128 + 4)) * 4, CUDA_R_32F),
        scales_b(static_cast<size_t>((c.n + 128) * (c.k / 128 + 4)) * 4, CUDA_R_32F);
    cublasLtMatmulDesc_t operation = nullptr;
    check(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "an operation");
    Result r;
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
      const cublasStatus_t s = cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value);
      if (s != CUBLAS_STATUS_SUCCESS) r.status = std::string("setting an attribute: ") + cublasLtGetStatusString(s);
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, c.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, c.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, c.epilogue);
    if (c.epilogue == CUBLASLT_EPILOGUE_DGELU || c.epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux.data());
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, c.m);
    }
    if (c.epilogue != CUBLASLT_EPILOGUE_DEFAULT && c.epilogue != CUBLASLT_EPILOGUE_DGELU)
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.data());
    if (c.scale_a >= 0) {
      set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, static_cast<int32_t>(c.scale_a));
      set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, static_cast<int32_t>(c.scale_b));
      set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, scales_a.data());
      set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, scales_b.data());
    }
    std::array<cublasLtMatrixLayout_t, 3> layouts{};
    const auto layout = [&](size_t i, cudaDataType_t type, int64_t rows, int64_t columns) {
      check(cublasLtMatrixLayoutCreate(&layouts[i], type, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns),
                                       rows),
            "a layout");
    };
    layout(0, c.in, c.trans_a ? c.k : c.m, c.trans_a ? c.m : c.k);
    layout(1, c.in, c.trans_b ? c.n : c.k, c.trans_b ? c.k : c.n);
    layout(2, c.out, c.m, c.n);
    cublasLtMatmulPreference_t preference = nullptr;
    check(cublasLtMatmulPreferenceCreate(&preference), "a preference");
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value), "a preference");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    std::array<cublasLtMatmulHeuristicResult_t, kCandidates> found{};
    if (r.status == "success") {
      const cublasStatus_t s =
          cublasLtMatmulAlgoGetHeuristic(handle_, operation, layouts[0], layouts[1], layouts[2], layouts[2], preference,
                                         kCandidates, found.data(), &r.algorithms);
      r.status = s == CUBLAS_STATUS_SUCCESS ? "success" : cublasLtGetStatusString(s);
      if (s != CUBLAS_STATUS_SUCCESS) r.algorithms = 0;
    }
    const float alpha = 1;
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < r.algorithms; ++i) {
      const double us = time(
          [&] {
            return cublasLtMatmul(handle_, operation, &alpha, a.data(), layouts[0], b.data(), layouts[1], &c.beta,
                                  d.data(), layouts[2], d.data(), layouts[2], &found[static_cast<size_t>(i)].algo,
                                  workspace_.data(), kWorkspaceBytes, stream_);
          },
          r.status);
      if (i == 0) r.first_us = us;
      if (us > 0) best = std::min(best, us);
    }
    if (best < std::numeric_limits<double>::infinity()) r.best_us = best;
    cublasLtMatmulPreferenceDestroy(preference);
    for (const cublasLtMatrixLayout_t l : layouts) cublasLtMatrixLayoutDestroy(l);
    cublasLtMatmulDescDestroy(operation);
    return r;
  }

 private:
  // The median time of one call; 0: it does not run, and `status` gives the reason.
  template <class Call>
  double time(Call&& call, std::string& status) {
    for (int i = 0; i < 2; ++i) {
      const cublasStatus_t s = call();
      const cudaError_t e = cudaStreamSynchronize(stream_);
      if (s == CUBLAS_STATUS_SUCCESS && e == cudaSuccess) continue;
      status =
          std::string("running: ") + (s != CUBLAS_STATUS_SUCCESS ? cublasLtGetStatusString(s) : cudaGetErrorString(e));
      check(e, "an algorithm");  // after a fault nothing runs
      return 0;
    }
    int calls = 1;
    std::array<double, kRounds> us{};
    for (double& x : us) {
      check(cudaEventRecord(begin_, stream_), "an event");
      for (int i = 0; i < calls; ++i) call();
      check(cudaEventRecord(end_, stream_), "an event");
      check(cudaEventSynchronize(end_), "waiting");
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin_, end_), "timing");
      x = 1e3 * static_cast<double>(ms) / calls;
      if (&x == us.data()) calls = std::clamp(static_cast<int>(1e6 * seconds_ / kRounds / kCandidates / x), 1, 200);
    }
    std::sort(us.begin(), us.end());
    return us[kRounds / 2];
  }

  double seconds_;
  Memory workspace_;
  cublasLtHandle_t handle_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

// R rows of a layer from C to F and back. In row-major words the first dimension of d is the last of ours.
std::vector<Case> cases_of(int64_t R, int64_t C, int64_t F) {
  constexpr int kVec = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F, kBlock = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
  constexpr auto kFp8 = CUDA_R_8F_E4M3;
  const Case down{"gradient before GELU, plain", F, R, C, true, false},
      weight{"weight [in,out], plain", F, C, R, false, true}, turned{"weight [out,in], plain", C, F, R, false, true},
      forward{"forward, plain", F, R, C, true, false};
  std::vector<Case> all;
  const auto add = [&](Case c, const char* name, auto change) {
    c.name = name;
    change(c);
    all.push_back(c);
  };
  all.push_back(down);
  add(down, "gradient before GELU, DGELU", [](Case& c) { c.epilogue = CUBLASLT_EPILOGUE_DGELU; });
  add(down, "gradient before GELU, DGELU_BGRAD", [](Case& c) { c.epilogue = CUBLASLT_EPILOGUE_DGELU_BGRAD; });
  all.push_back(weight);
  add(weight, "weight [in,out], BGRADA", [](Case& c) { c.epilogue = CUBLASLT_EPILOGUE_BGRADA; });
  add(weight, "weight [in,out], fp32", [](Case& c) { c.out = CUDA_R_32F; });
  add(weight, "weight [in,out], fp32 beta 1", [](Case& c) { c.out = CUDA_R_32F, c.beta = 1; });
  add(weight, "weight [in,out], fp32 beta 1 BGRADA",
      [](Case& c) { c.out = CUDA_R_32F, c.beta = 1, c.epilogue = CUBLASLT_EPILOGUE_BGRADA; });
  all.push_back(turned);
  add(turned, "weight [out,in], BGRADB", [](Case& c) { c.epilogue = CUBLASLT_EPILOGUE_BGRADB; });
  add(turned, "weight [out,in], fp32 beta 1 BGRADB",
      [](Case& c) { c.out = CUDA_R_32F, c.beta = 1, c.epilogue = CUBLASLT_EPILOGUE_BGRADB; });
  all.push_back(forward);
  add(forward, "forward, FP8 one scale", [](Case& c) { c.in = kFp8; });
  add(forward, "forward, FP8 VEC128 VEC128", [](Case& c) { c.in = kFp8, c.scale_a = kVec, c.scale_b = kVec; });
  add(forward, "forward, FP8 BLK128x128 VEC128", [](Case& c) { c.in = kFp8, c.scale_a = kBlock, c.scale_b = kVec; });
  add(forward, "forward, FP8 VEC128 BLK128x128", [](Case& c) { c.in = kFp8, c.scale_a = kVec, c.scale_b = kBlock; });
  return all;
}

int usage() {
  std::fprintf(stderr, "usage: cuda_epilogues [--json FILE] [--seconds S]\n");
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  std::FILE* json = nullptr;
  double seconds = 0.2;  // of a case
  for (int i = 1; i < argc; i += 2) {
    const std::string arg = argv[i];
    if (i + 1 == argc) return usage();
    if (arg == "--json") {
      json = std::fopen(argv[i + 1], "a");
      if (json == nullptr) return std::perror(argv[i + 1]), 2;
    } else if (arg == "--seconds") {
      seconds = std::atof(argv[i + 1]);
    } else {
      return usage();
    }
  }
  int count = 0;
  if (const cudaError_t e = cudaGetDeviceCount(&count); e != cudaSuccess || count == 0) {
    std::fprintf(stderr, "cuda_epilogues: error: there is no GPU: %s\n", cudaGetErrorString(e));
    return 4;
  }
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "the GPU");
  std::printf("%s, cuBLASLt %zu\n%-40s %-18s %10s %10s %10s %9s\n", properties.name, cublasLtGetVersion(), "case",
              "m x n x k", "algorithms", "first us", "best us", "of plain");
  Probe probe(seconds);
  for (const auto& [R, C, F] : {std::array<int64_t, 3>{16384, 768, 3072}, {8192, 1600, 6400}, {8192, 1536, 8960}}) {
    double plain = 0;
    for (const Case& c : cases_of(R, C, F)) {
      const Result r = probe.run(c);
      if (c.name.ends_with("plain")) plain = r.first_us;
      const std::string shape = std::to_string(c.m) + "x" + std::to_string(c.n) + "x" + std::to_string(c.k);
      const double of_plain = plain > 0 ? r.first_us / plain : 0;
      std::printf("%-40s %-18s %10d %10.1f %10.1f %8.2fx%s%s\n", c.name.c_str(), shape.c_str(), r.algorithms,
                  r.first_us, r.best_us, of_plain, r.status == "success" ? "" : "  ",
                  r.status == "success" ? "" : r.status.c_str());
      std::fflush(stdout);
      if (json == nullptr) continue;
      std::fprintf(json,
                   "{\"section\": \"epilogue\", \"case\": \"%s\", \"shape\": \"%s\", \"algorithms\": %d, "
                   "\"us\": %.2f, \"best_us\": %.2f, \"of_plain\": %.4f, \"status\": \"%s\"}\n",
                   c.name.c_str(), shape.c_str(), r.algorithms, r.first_us, r.best_us, of_plain, r.status.c_str());
      std::fflush(json);
    }
  }
  if (std::fflush(stdout) != 0 || (json != nullptr && std::ferror(json) != 0)) {
    std::fprintf(stderr, "cuda_epilogues: error: the results cannot be written\n");
    return 1;
  }
  return 0;
}
