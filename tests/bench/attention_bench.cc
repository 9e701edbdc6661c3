// SPDX-License-Identifier: Apache-2.0
// GFLOP/s of attention, forward and backward, beside the FMA peak of one core measured in the same run:
// attention_bench [isa]. Counted are the products of visible pairs, 4 D forward and 10 D backward (recomputation
// included). Best of several turns; one thread is timed in CPU time, so that other programs on the machine disturb it
// less.

#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <string>
#include <vector>

#include "bench_tensor.h"

namespace {

using namespace ds;
using bench::Tensor;

double cpu_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}
double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class F>
double gflops(double flops, int threads, F&& f) {
  const auto now = threads == 1 ? cpu_seconds : wall_seconds;
  f();
  double best = 1e30;
  for (int turn = 0; turn < 7; ++turn) {
    const double start = now();
    f();
    best = std::min(best, now() - start);
  }
  return 1e-9 * flops / best;
}

// Twelve independent chains of fused multiply-adds: enough to fill two pipes of latency five.
constexpr int kChains = 12;
constexpr i64 kSteps = 2'000'000;
volatile float sink;
__attribute__((target("avx512f"))) void fma_avx512() {
  __m512 sum[kChains], x = _mm512_set1_ps(0.5f);
  for (int c = 0; c < kChains; ++c) sum[c] = _mm512_set1_ps(static_cast<float>(c));
  for (i64 i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) sum[c] = _mm512_fmadd_ps(sum[c], x, x);
  }
  for (int c = 1; c < kChains; ++c) sum[0] = _mm512_add_ps(sum[0], sum[c]);
  sink = _mm512_cvtss_f32(sum[0]);
}
__attribute__((target("avx2,fma"))) void fma_avx2() {
  __m256 sum[kChains], x = _mm256_set1_ps(0.5f);
  for (int c = 0; c < kChains; ++c) sum[c] = _mm256_set1_ps(static_cast<float>(c));
  for (i64 i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) sum[c] = _mm256_fmadd_ps(sum[c], x, x);
  }
  for (int c = 1; c < kChains; ++c) sum[0] = _mm256_add_ps(sum[0], sum[c]);
  sink = _mm256_cvtss_f32(sum[0]);
}

struct Shape {
  const char* name;
  i64 B, T, S, H, G, D;
};

}  // namespace

int main(int argc, char** argv) {
  const OpTable* ops = cpu_ops(argc > 1 ? argv[1] : "auto");
  if (ops == nullptr) return std::fprintf(stderr, "attention_bench: error: this CPU lacks %s\n", argv[1]), 2;
  const bool narrow = ops->name == "cpu.avx2";
  const double peak =
      gflops(2.0 * kChains * static_cast<double>(kSteps) * (narrow ? 8 : 16), 1, narrow ? fma_avx2 : fma_avx512);
  std::printf("%s: FMA peak of one core %.1f GFLOP/s\n", std::string(ops->name).c_str(), peak);
  std::printf("%-8s %-5s %7s %13s %6s %13s %6s\n", "shape", "type", "threads", "fwd GFLOP/s", "%peak", "bwd GFLOP/s",
              "%peak");
  for (const Shape& s : {Shape{"gpt2", 4, 512, 512, 12, 12, 64}, Shape{"llama", 1, 1024, 1024, 16, 4, 128},
                         Shape{"decode", 1, 1, 4096, 16, 4, 128}}) {
    for (DType dtype : {DType::F32, DType::BF16}) {
      const i64 heads = s.H + 2 * s.G, tokens = std::max(s.T, s.S);
      const Tensor qkv(dtype, {s.B, tokens, heads, s.D}), dqkv(dtype, {s.B, tokens, heads, s.D});
      const Tensor o(dtype, {s.B, s.T, s.H, s.D}), dout(dtype, {s.B, s.T, s.H, s.D}), lse(DType::F32, {s.B, s.H, s.T});
      const auto slice = [&](const Tensor& x, i64 length, i64 head, i64 count) {
        TensorView v = x.view;
        v.data = v.as<char>() + head * s.D * dtype_bytes(dtype);
        v.shape[1] = length;
        v.shape[2] = count;
        return v;
      };
      const TensorView q = slice(qkv, s.T, 0, s.H), k = slice(qkv, s.S, s.H, s.G), v = slice(qkv, s.S, s.H + s.G, s.G);
      const TensorView dq = slice(dqkv, s.T, 0, s.H), dk = slice(dqkv, s.S, s.H, s.G),
                       dv = slice(dqkv, s.S, s.H + s.G, s.G);
      const AttentionParams params{.scale = 1.0f / std::sqrt(static_cast<float>(s.D))};
      const double pairs = static_cast<double>(s.B * s.H) *
                           (static_cast<double>(s.T * s.S) - 0.5 * static_cast<double>(s.T * (s.T - 1)));
      for (int threads : {1, 2}) {
        ThreadPool pool(threads);
        Stream stream{.pool = &pool};
        const double width = static_cast<double>(s.D);
        const double forward =
            gflops(4 * pairs * width, threads, [&] { ops->attention_fwd(o.view, lse.view, q, k, v, params, stream); });
        const double backward = gflops(10 * pairs * width, threads, [&] {
          ops->attention_bwd(dq, dk, dv, dout.view, q, k, v, o.view, lse.view, params, stream);
        });
        const double percent = 100 / (peak * threads);
        std::printf("%-8s %-5s %7d %13.1f %6.1f %13.1f %6.1f\n", s.name, std::string(dtype_name(dtype)).c_str(),
                    threads, forward, forward * percent, backward, backward * percent);
      }
    }
  }
}
