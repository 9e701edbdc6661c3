// SPDX-License-Identifier: Apache-2.0
#pragma once
// oneDNN's matrix product on our operands: the yardstick of our own. libds itself calls it only for AMX.

#include <omp.h>

#include <chrono>
#include <oneapi/dnnl/dnnl.hpp>
#include <thread>
#include <vector>

#include "ds/kernels/ops.h"

namespace ds::bench {

// c[M,N] = a b; trans_a: a is stored [K,M], trans_b: b is stored [N,K].
struct Product {
  const char* name;
  i64 M, N, K;
  bool trans_a, trans_b;
  bool fp32_out;  // else the work dtype, as a and b

  double flops() const { return 2.0 * static_cast<double>(M * N) * static_cast<double>(K); }
};

// Forward, input gradient and weight gradient of y[R,out] = x[R,in] w; out_in: w is stored [out,in].
inline void add_layer(std::vector<Product>& products, const char* name, i64 R, i64 in, i64 out, bool out_in) {
  products.push_back({name, R, out, in, false, out_in, false});
  products.push_back({name, R, in, out, false, !out_in, false});
  products.push_back(out_in ? Product{name, out, in, R, true, false, true}
                            : Product{name, in, out, R, true, false, true});
}

inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// oneDNN's OpenMP threads spin for some milliseconds after they are done, and would take our cores.
inline void let_openmp_sleep() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }

template <class F>
double seconds_of(F&& f) {
  let_openmp_sleep();
  const double start = seconds_now();
  f();
  return seconds_now() - start;
}

// Operands of one product: small integers in a and b.
struct Operands {
  Operands(const Product& p, DType work)
      : a(static_cast<size_t>(p.M * p.K * dtype_bytes(work))),
        b(static_cast<size_t>(p.N * p.K * dtype_bytes(work))),
        c(static_cast<size_t>(p.M * p.N * (p.fp32_out ? 4 : dtype_bytes(work)))) {
    fill(a, work);
    fill(b, work);
  }
  std::vector<u8> a, b, c;

 private:
  static void fill(std::vector<u8>& v, DType work) {
    for (size_t i = 0; i < v.size() / static_cast<size_t>(dtype_bytes(work)); ++i) {
      const float x = static_cast<float>(i % 7) - 3.0f;
      if (work == DType::F32) {
        reinterpret_cast<float*>(v.data())[i] = x;
      } else {
        reinterpret_cast<bf16*>(v.data())[i] = to_bf16(x);
      }
    }
  }
};

class OnednnProduct {
 public:
  OnednnProduct(const Product& p, DType work, Operands& o, int threads)
      : threads_(threads), engine_(dnnl::engine::kind::cpu, 0), stream_(engine_) {
    omp_set_num_threads(threads);
    const auto strides = [](i64 rows, i64 columns, bool trans) {
      return trans ? dnnl::memory::dims{1, rows} : dnnl::memory::dims{columns, 1};
    };
    const auto type = [](DType t) {
      return t == DType::BF16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
    };
    const dnnl::memory::desc a({p.M, p.K}, type(work), strides(p.M, p.K, p.trans_a));
    const dnnl::memory::desc b({p.K, p.N}, type(work), strides(p.K, p.N, p.trans_b));
    const dnnl::memory::desc c({p.M, p.N}, type(p.fp32_out ? DType::F32 : work), strides(p.M, p.N, false));
    primitive_ = dnnl::matmul(dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, c), engine_));
    arguments_ = {{DNNL_ARG_SRC, dnnl::memory(a, engine_, o.a.data())},
                  {DNNL_ARG_WEIGHTS, dnnl::memory(b, engine_, o.b.data())},
                  {DNNL_ARG_DST, dnnl::memory(c, engine_, o.c.data())}};
  }

  void operator()() {
    omp_set_num_threads(threads_);
    primitive_.execute(stream_, arguments_);
    stream_.wait();
  }

 private:
  int threads_;
  dnnl::engine engine_;
  dnnl::stream stream_;
  dnnl::matmul primitive_;
  std::unordered_map<int, dnnl::memory> arguments_;
};

}  // namespace ds::bench
