// SPDX-License-Identifier: Apache-2.0
// Products of experts' groups of rows beside one dense product of all rows with one matrix, which has the same FLOPs:
// grouped_bench [ISA [TURNS [SHAPE [DTYPE]]]], one thread, processor time. Both take turns; a line shows the median
// rate of the grouped product in GFLOP/s, and the median over turns of its part of the dense rate: forward, gradient of
// the input, gradient of the matrices. The rows of a Zipf load are those of experts 1/1, 1/2, 1/3, ...

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "bench/bench_tensor.h"

using namespace ds;
using namespace ds::bench;

namespace {

double processor_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}
double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<i64>(x.size()) / 2, x.end());
  return x[x.size() / 2];
}

struct Shape {
  const char* name;
  i64 experts, in, out;
};

std::vector<i32> offsets_of(i64 experts, i64 rows, bool zipf) {
  std::vector<i32> offsets = {0};
  double harmonic = 0, sum = 0;
  for (i64 e = 1; e <= experts; ++e) harmonic += 1 / static_cast<double>(e);
  for (i64 e = 1; e <= experts; ++e) {
    sum += zipf ? 1 / static_cast<double>(e) / harmonic : 1 / static_cast<double>(experts);
    offsets.push_back(static_cast<i32>(std::lround(sum * static_cast<double>(rows * experts))));
  }
  return offsets;
}

// Matrices that all rows of a shape share, made once.
struct Matrices {
  Shape shape;
  DType work;
  Tensor w, dw;
  Matrices(const Shape& s, DType t)
      : shape(s), work(t), w(t, {s.experts, s.out, s.in}), dw(t, {s.experts, s.out, s.in}) {}
};

void measure(const OpTable& ops, const Matrices& m, i64 rows, bool zipf, int turns) {
  const auto& [name, E, K, N] = m.shape;
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  const i64 M = E * rows;
  const Tensor x(m.work, {M, K}), y(m.work, {M, N}), dx(m.work, {M, K});
  std::vector<i32> list = offsets_of(E, rows, zipf);
  const TensorView offsets = TensorView::of(list.data(), DType::I32, {E + 1});
  const TensorView one = m.w.view.rows(0, 1).reshaped({N, K}), done = m.dw.view.rows(0, 1).reshaped({N, K});
  const std::function<void()> calls[] = {[&] { ops.grouped_matmul(y.view, x.view, m.w.view, offsets, true, s); },
                                         [&] { ops.matmul(y.view, x.view, one, {}, {}, {}, {.trans_b = true}, s); },
                                         [&] { ops.grouped_matmul(dx.view, y.view, m.w.view, offsets, false, s); },
                                         [&] { ops.matmul(dx.view, y.view, one, {}, {}, {}, {}, s); },
                                         [&] { ops.grouped_matmul_grad(m.dw.view, y.view, x.view, offsets, false, s); },
                                         [&] { ops.matmul(done, y.view, x.view, {}, {}, {}, {.trans_a = true}, s); }};
  std::vector<double> seconds[6], ratios[3];
  for (int turn = 0; turn <= turns; ++turn) {
    for (int i = 0; i < 6; ++i) {
      const double start = processor_seconds();
      calls[i]();
      if (turn > 0) seconds[i].push_back(processor_seconds() - start);  // the first turn warms up
    }
    for (size_t i = 0; i < 3 && turn > 0; ++i) ratios[i].push_back(seconds[2 * i + 1].back() / seconds[2 * i].back());
  }
  const double flops = 2.0 * static_cast<double>(M) * static_cast<double>(N) * static_cast<double>(K);
  std::printf("%-6s %-5s %4ld %-4s", name, std::string(dtype_name(m.work)).c_str(), static_cast<long>(rows),
              zipf ? "zipf" : "even");
  for (size_t i = 0; i < 3; ++i) std::printf("  %7.1f %5.3f", flops / median(seconds[2 * i]) * 1e-9, median(ratios[i]));
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const OpTable* ops = cpu_ops(argc > 1 ? argv[1] : "auto");
  if (ops == nullptr) return std::fprintf(stderr, "grouped_bench: error: this CPU lacks %s\n", argv[1]), 2;
  const int turns = argc > 2 ? std::atoi(argv[2]) : 5;
  const std::string only = argc > 3 ? argv[3] : "", dtype = argc > 4 ? argv[4] : "";
  std::printf("%s: GFLOP/s and part of the dense rate: forward, dx, dw\n", std::string(ops->name).c_str());
  for (const Shape& shape : {Shape{"olmoe", 64, 2048, 1024}, {"small", 8, 512, 256}}) {
    if (!only.empty() && only != shape.name) continue;
    for (const DType work : {DType::F32, DType::BF16}) {
      if (!dtype.empty() && dtype != dtype_name(work)) continue;
      const Matrices matrices(shape, work);
      for (const i64 rows : {32, 128, 512}) {
        for (const bool zipf : {false, true}) measure(*ops, matrices, rows, zipf, turns);
      }
    }
  }
  return 0;
}
