// SPDX-License-Identifier: Apache-2.0
// Processor time of linear maps of one input, apart and as one product: joined_bench [ISA [TURNS]], one thread.
// Forward, input gradient and gradient of the matrices take turns; each line shows the best of several, apart / joined,
// and which results have the same bits.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <string>

#include "bench/bench_tensor.h"

using namespace ds;
using namespace ds::bench;

namespace {

double processor_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

TensorView columns(TensorView v, i64 first, i64 n) {
  v.data = static_cast<char*>(v.data) + first * dtype_bytes(v.dtype);
  v.shape[1] = n;
  return v;
}

struct Maps {
  const char* name;
  i64 in;
  std::vector<i64> outs;
};

void measure(const OpTable& ops, DType work, i64 R, const Maps& maps, int turns) {
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  i64 N = 0;
  for (const i64 out : maps.outs) N += out;
  const Tensor x(work, {R, maps.in}), w(work, {N, maps.in}), dy(work, {R, N}), y(work, {R, N});
  const Tensor dx(work, {R, maps.in}), dx_joined(work, {R, maps.in}), dw(work, {N, maps.in}),
      dw_joined(work, {N, maps.in});
  std::vector<std::unique_ptr<Tensor>> ys, dys;  // by map
  const auto each = [&](auto&& visit) {
    i64 first = 0;
    for (size_t i = 0; i < maps.outs.size(); ++i) {
      visit(i, first, maps.outs[i]);
      first += maps.outs[i];
    }
  };
  each([&](size_t, i64 first, i64 out) {
    ys.push_back(std::make_unique<Tensor>(work, std::initializer_list<i64>{R, out}));
    dys.push_back(std::make_unique<Tensor>(work, std::initializer_list<i64>{R, out}));
    const TensorView part = columns(dy.view, first, out), to = dys.back()->view;
    for (i64 r = 0; r < R; ++r)
      std::memcpy(to.rows(r, 1).data, part.rows(r, 1).data, static_cast<size_t>(out * dtype_bytes(work)));
  });
  const std::function<void()> calls[] = {
      [&] {
        each([&](size_t i, i64 first, i64 out) {
          ops.matmul(ys[i]->view, x.view, w.view.rows(first, out), {}, {}, {}, {.trans_b = true}, s);
        });
      },
      [&] { ops.matmul(y.view, x.view, w.view, {}, {}, {}, {.trans_b = true}, s); },
      [&] {
        each([&](size_t i, i64 first, i64 out) {
          ops.matmul(dx.view, dys[i]->view, w.view.rows(first, out), {}, {}, i > 0 ? dx.view : TensorView{}, {}, s);
        });
      },
      [&] { ops.matmul(dx_joined.view, dy.view, w.view, {}, {}, {}, {}, s); },
      [&] {
        each([&](size_t i, i64 first, i64 out) {
          ops.matmul(dw.view.rows(first, out), dys[i]->view, x.view, {}, {}, {}, {.trans_a = true}, s);
        });
      },
      [&] { ops.matmul(dw_joined.view, dy.view, x.view, {}, {}, {}, {.trans_a = true}, s); }};
  for (const auto& call : calls) call();
  bool same_y = true;
  each([&](size_t i, i64 first, i64 out) {
    const TensorView part = columns(y.view, first, out);
    for (i64 r = 0; r < R; ++r)
      same_y &= std::memcmp(ys[i]->view.rows(r, 1).data, part.rows(r, 1).data,
                            static_cast<size_t>(out * dtype_bytes(work))) == 0;
  });
  double best[6];
  std::fill_n(best, 6, 1e9);
  const int repeats = std::max(1, static_cast<int>(1.5e9 / static_cast<double>(R * maps.in * N)));
  for (int turn = 0; turn < turns; ++turn) {
    for (int i = 0; i < 6; ++i) {
      const double start = processor_seconds();
      for (int k = 0; k < repeats; ++k) calls[i]();
      best[i] = std::min(best[i], (processor_seconds() - start) / repeats);
    }
  }
  std::printf("%-9s %-5s %5ld", maps.name, std::string(dtype_name(work)).c_str(), static_cast<long>(R));
  for (int i = 0; i < 6; i += 2) std::printf("  %8.3f %5.3f", best[i] * 1e3, best[i] / best[i + 1]);
  std::printf("  %5.3f  %d %d %d\n", (best[0] + best[2] + best[4]) / (best[1] + best[3] + best[5]), same_y,
              dx.bytes == dx_joined.bytes, dw.bytes == dw_joined.bytes);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const OpTable* ops = cpu_ops(argc > 1 ? argv[1] : "auto");
  if (ops == nullptr) return std::fprintf(stderr, "joined_bench: error: this CPU lacks %s\n", argv[1]), 2;
  std::printf("%s: ms apart and apart/joined of y, dx, dw; of all; same bits\n", std::string(ops->name).c_str());
  for (const DType work : {DType::F32, DType::BF16}) {
    for (const i64 R : {256, 1024, 2048}) {
      for (const Maps& maps : {Maps{"tiny qkv", 256, {256, 64, 64}},
                               {"tiny gu", 256, {704, 704}},
                               {"0.5B qkv", 896, {896, 128, 128}},
                               {"0.5B gu", 896, {4864, 4864}},
                               {"1.5B qkv", 1536, {1536, 256, 256}},
                               {"1.5B gu", 1536, {8960, 8960}},
                               {"bert qkv", 768, {768, 768, 768}}})
        measure(*ops, work, R, maps, argc > 2 ? std::atoi(argv[2]) : 4);
    }
  }
  return 0;
}
