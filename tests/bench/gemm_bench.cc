// SPDX-License-Identifier: Apache-2.0
// GFLOP/s of our matrix product and of oneDNN's on the products of GPT-2 124M, in the same run: gemm_bench [isa
// [filter]]. The two take turns on the same operands, and each line shows the best of several turns.

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <oneapi/dnnl/dnnl.hpp>
#include <string>
#include <thread>
#include <vector>

#include "ds/kernels/ops.h"

namespace {

using namespace ds;

struct Shape {
  const char* name;
  i64 M, N, K;
  bool trans_a, trans_b;
  bool fp32_out;
};

// Forward, input gradient and weight gradient of y[T,out] = x[T,in] w.
void add_layer(std::vector<Shape>& shapes, const char* name, i64 T, i64 in, i64 out, bool out_in) {
  shapes.push_back({name, T, out, in, false, out_in, false});
  shapes.push_back({name, T, in, out, false, !out_in, false});
  shapes.push_back(out_in ? Shape{name, out, in, T, true, false, true} : Shape{name, in, out, T, true, false, true});
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

template <class F>
double gflops(double flops, F&& f) {
  // oneDNN's OpenMP threads spin for some milliseconds after they are done, and would take our cores.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const double t = seconds();
  f();
  return flops / (seconds() - t) * 1e-9;
}

dnnl::memory::data_type type_of(DType t) {
  return t == DType::BF16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

}  // namespace

int main(int argc, char** argv) {
  const OpTable* ops = cpu_ops(argc > 1 ? argv[1] : "auto");
  const char* filter = argc > 2 ? argv[2] : "";
  if (ops == nullptr) return std::fprintf(stderr, "gemm_bench: error: this CPU lacks %s\n", argv[1]), 2;

  std::vector<Shape> shapes{{"1024^3", 1024, 1024, 1024, false, false, false},
                            {"1024^3", 1024, 1024, 1024, false, true, false}};
  add_layer(shapes, "qkv", 2048, 768, 2304, false);
  add_layer(shapes, "proj", 2048, 768, 768, false);
  add_layer(shapes, "fc1", 2048, 768, 3072, false);
  add_layer(shapes, "fc2", 2048, 3072, 768, false);
  add_layer(shapes, "logits", 512, 768, 50257, true);
  shapes.push_back({"generate", 1, 3072, 768, false, false, false});
  shapes.push_back({"generate", 1, 50257, 768, false, true, false});

  std::printf("%-10s %-5s %6s %6s %6s %2s  %s: GFLOP/s ours, oneDNN, ratio at 1 thread; at 2\n", "layer", "type", "M",
              "N", "K", "", std::string(ops->name).c_str());
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream dnnl_stream(engine);
  for (DType work : {DType::F32, DType::BF16}) {
    for (const Shape& s : shapes) {
      if (std::strstr(s.name, filter) == nullptr) continue;
      const DType out = s.fp32_out ? DType::F32 : work;
      std::vector<u8> a(static_cast<size_t>(s.M * s.K * dtype_bytes(work)));
      std::vector<u8> b(static_cast<size_t>(s.N * s.K * dtype_bytes(work)));
      std::vector<u8> c(static_cast<size_t>(s.M * s.N * dtype_bytes(out)));
      const auto fill = [work](std::vector<u8>& v) {
        for (size_t i = 0; i < v.size() / static_cast<size_t>(dtype_bytes(work)); ++i) {
          const float x = static_cast<float>(i % 7) - 3.0f;
          if (work == DType::F32) {
            reinterpret_cast<float*>(v.data())[i] = x;
          } else {
            reinterpret_cast<bf16*>(v.data())[i] = to_bf16(x);
          }
        }
      };
      fill(a);
      fill(b);
      const double flops = 2.0 * static_cast<double>(s.M * s.N) * static_cast<double>(s.K);
      const int turns = s.M == 1 ? 50 : flops < 2e10 ? 5 : 2;
      std::printf("%-10s %-5s %6ld %6ld %6ld %c%c", s.name, std::string(dtype_name(work)).c_str(), s.M, s.N, s.K,
                  s.trans_a ? 'T' : 'N', s.trans_b ? 'T' : 'N');
      for (int threads : {1, 2}) {
        ThreadPool pool(threads);
        Stream stream{&pool};
        const auto cv = TensorView::of(c.data(), out, {s.M, s.N});
        const auto av = TensorView::of(a.data(), work, {s.trans_a ? s.K : s.M, s.trans_a ? s.M : s.K});
        const auto bv = TensorView::of(b.data(), work, {s.trans_b ? s.N : s.K, s.trans_b ? s.K : s.N});
        const auto ours = [&] {
          ops->matmul(cv, av, bv, {}, {}, {}, {.trans_a = s.trans_a, .trans_b = s.trans_b}, stream);
        };

        omp_set_num_threads(threads);
        const auto strides = [](i64 rows, i64 columns, bool trans) {
          return trans ? dnnl::memory::dims{1, rows} : dnnl::memory::dims{columns, 1};
        };
        const dnnl::memory::desc am({s.M, s.K}, type_of(work), strides(s.M, s.K, s.trans_a));
        const dnnl::memory::desc bm({s.K, s.N}, type_of(work), strides(s.K, s.N, s.trans_b));
        const dnnl::memory::desc cm({s.M, s.N}, type_of(out), strides(s.M, s.N, false));
        const dnnl::matmul primitive(dnnl::matmul::primitive_desc(dnnl::matmul::desc(am, bm, cm), engine));
        dnnl::memory ma(am, engine, a.data()), mb(bm, engine, b.data()), mc(cm, engine, c.data());
        const auto theirs = [&] {
          primitive.execute(dnnl_stream, {{DNNL_ARG_SRC, ma}, {DNNL_ARG_WEIGHTS, mb}, {DNNL_ARG_DST, mc}});
          dnnl_stream.wait();
        };
        ours();
        theirs();
        double ours_best = 0, theirs_best = 0;
        for (int turn = 0; turn < turns; ++turn) {
          ours_best = std::max(ours_best, gflops(flops, ours));
          theirs_best = std::max(theirs_best, gflops(flops, theirs));
        }
        std::printf("  %7.1f %7.1f %5.2f", ours_best, theirs_best, ours_best / theirs_best);
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
  return 0;
}
