// SPDX-License-Identifier: Apache-2.0
// The attention of an Evoformer with both biases, forward and backward with the gradients of both:
// evoformer_bench [N [T [H [D [THREADS [TURNS [ISA]]]]]]]. A line for each type: the least milliseconds of a pass over
// the turns, GFLOP/s of its products (4 D and 10 D for each pair of residues, recomputation of the scores included),
// and MiB: what the pool of threads holds as scratch, and by how much the resident memory of the process rises at most
// in a first forward and backward pass, arguments and results apart.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <string>
#include <vector>

#include "bench_tensor.h"

namespace {

using namespace ds;
using bench::Tensor;

// A field of /proc/self/status, in KiB.
double resident_kib(const char* what) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);) {
    if (line.rfind(what, 0) == 0) return std::atof(line.c_str() + std::strlen(what) + 1);
  }
  return 0;
}
// By how much f() raises the resident memory at most.
template <class F>
double peak_mib(F&& f) {
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak begins here
  const double before = resident_kib("VmRSS");
  f();
  return (resident_kib("VmHWM") - before) / 1024;
}

// One thread is timed in CPU time, so that other programs on the machine disturb it less.
double seconds(int threads) {
  timespec t{};
  clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}
template <class F>
double least_seconds(int threads, int turns, F&& f) {
  double best = 1e30;
  for (int turn = 0; turn < turns; ++turn) {
    const double start = seconds(threads);
    f();
    best = std::min(best, seconds(threads) - start);
  }
  return best;
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int i, i64 otherwise) { return argc > i ? std::atoll(argv[i]) : otherwise; };
  const i64 N = number(1, 256), T = number(2, 256), H = number(3, 4), D = number(4, 32);
  const int threads = static_cast<int>(number(5, 2)), turns = static_cast<int>(number(6, 7));
  const OpTable* ops = cpu_ops(argc > 7 ? argv[7] : "auto");
  if (ops == nullptr) return std::fprintf(stderr, "evoformer_bench: error: this CPU lacks %s\n", argv[7]), 2;
  std::printf("%s: N %lld, T %lld, H %lld, D %lld, %d threads, %d turns\n", std::string(ops->name).c_str(),
              static_cast<long long>(N), static_cast<long long>(T), static_cast<long long>(H),
              static_cast<long long>(D), threads, turns);
  std::printf("%-5s %10s %12s %10s %12s %12s %12s\n", "type", "fwd ms", "fwd GFLOP/s", "bwd ms", "bwd GFLOP/s",
              "scratch MiB", "peak MiB");
  for (DType dtype : {DType::F32, DType::BF16}) {
    const Tensor q(dtype, {N, T, H, D}), k(dtype, {N, T, H, D}), v(dtype, {N, T, H, D}), dout(dtype, {N, T, H, D});
    const Tensor o(dtype, {N, T, H, D}), dq(dtype, {N, T, H, D}), dk(dtype, {N, T, H, D}), dv(dtype, {N, T, H, D});
    const Tensor bias1(dtype, {N, T}), bias2(dtype, {1, H, T, T}), lse(DType::F32, {N, H, T});
    const Tensor dbias1(DType::F32, {N, T}), dbias2(DType::F32, {1, H, T, T});
    const EvoformerParams params{.scale = 1.0f / std::sqrt(static_cast<float>(D)), .num_seq = N};
    ThreadPool pool(threads);
    Stream stream{.pool = &pool};
    const auto forward = [&] {
      ops->evoformer_attention_fwd(o.view, lse.view, q.view, k.view, v.view, bias1.view, bias2.view, params, stream);
    };
    const auto backward = [&] {
      ops->evoformer_attention_bwd(dq.view, dk.view, dv.view, dbias1.view, dbias2.view, dout.view, q.view, k.view,
                                   v.view, o.view, lse.view, bias1.view, bias2.view, params, stream);
    };
    const double peak = peak_mib([&] { forward(), backward(); });
    const double fwd = least_seconds(threads, turns, forward), bwd = least_seconds(threads, turns, backward);
    const double products = 1e-9 * static_cast<double>(N * H * T * T * D);
    std::printf("%-5s %10.1f %12.1f %10.1f %12.1f %12.1f %12.1f\n", std::string(dtype_name(dtype)).c_str(), 1e3 * fwd,
                4 * products / fwd, 1e3 * bwd, 10 * products / bwd,
                static_cast<double>(pool.scratch_bytes()) / (1 << 20), peak);
  }
}
