// SPDX-License-Identifier: Apache-2.0
// Products of inference: all matrices of a quarter of a model, packed, for one row, batches and prompts: packed_bench
// [ISA [TURNS [SHAPE [DTYPE]]]]. Beside them, in turns on the same memory and threads: a pass that only reads the
// matrices, and a prompt with matrices in rows. Medians over turns.

#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "bench_tensor.h"

namespace ds::bench {
namespace {

struct Shape {
  const char* name;
  i64 layers, hidden, kv, intermediate, vocab;
};
// A quarter of the layers and of the vocabulary of Qwen2.5-0.5B and Qwen2.5-1.5B.
constexpr Shape kShapes[] = {{"0.5B", 6, 896, 128, 4864, 37984}, {"1.5B", 7, 1536, 256, 8960, 37984}};

struct Matrix {
  i64 N, K;
};
std::vector<Matrix> matrices_of(const Shape& s) {
  std::vector<Matrix> all;
  for (i64 l = 0; l < s.layers; ++l) {
    for (const Matrix& m : {Matrix{s.hidden + 2 * s.kv, s.hidden},
                            {s.hidden, s.hidden},
                            {2 * s.intermediate, s.hidden},
                            {s.hidden, s.intermediate}})
      all.push_back(m);
  }
  all.push_back({s.vocab, s.hidden});
  return all;
}

double seconds_of(auto&& f) {
  const auto begin = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Adds up all bytes, so that each is read once.
[[gnu::target("avx2")]] void read(const char* from, i64 bytes, ThreadPool& pool) {
  const i64 parts = 16 * pool.num_threads(), part = bytes / parts / 128 * 128;
  pool.parallel_for(
      parts, [&](i64 p, int) __attribute__((target("avx2"))) {
        __m256i sum[4] = {};
        for (i64 at = p * part; at < (p + 1) * part; at += 128) {
          for (int i = 0; i < 4; ++i)
            sum[i] = _mm256_add_epi32(sum[i], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at + 32 * i)));
        }
        for (const __m256i& s : sum) {
          volatile int kept = _mm256_extract_epi32(s, 0);
          (void)kept;
        }
      });
}

class Model {
 public:
  Model(const OpTable& ops, const Shape& shape, DType work, ThreadPool& pool)
      : ops_(ops), matrices_(matrices_of(shape)), stream_{&pool} {
    i64 elems = 0, widest = 0;
    for (const Matrix& m : matrices_) elems += m.N * m.K, widest = std::max({widest, m.N, m.K});
    weights_ = std::make_unique<Tensor>(work, std::initializer_list<i64>{elems});
    in_ = std::make_unique<Tensor>(work, std::initializer_list<i64>{kMostRows, widest});
    out_ = std::make_unique<Tensor>(work, std::initializer_list<i64>{kMostRows, widest});
  }
  i64 bytes() const { return weights_->view.bytes(); }
  double flops(i64 rows) const { return 2.0 * static_cast<double>(rows * weights_->view.numel()); }
  void read_all() { read(weights_->view.as<char>(), bytes(), *stream_.pool); }
  void multiply(i64 rows, bool packed) {
    const DType work = weights_->view.dtype;
    char* at = weights_->view.as<char>();
    for (const Matrix& m : matrices_) {
      TensorView b = TensorView::of(at, work, {m.N, m.K});
      if (packed) b.panels = panels_of(ops_, work);
      ops_.matmul(TensorView::of(out_->view.data, work, {rows, m.N}), TensorView::of(in_->view.data, work, {rows, m.K}),
                  b, {}, {}, {}, {.trans_b = true}, stream_);
      at += b.bytes();
    }
  }
  static constexpr i64 kMostRows = 512;

 private:
  const OpTable& ops_;
  std::vector<Matrix> matrices_;
  std::unique_ptr<Tensor> weights_, in_, out_;
  Stream stream_;
};

double median(std::vector<double> v) {
  std::ranges::sort(v);
  return v[v.size() / 2];
}

void measure(const OpTable& ops, const Shape& shape, DType work, int threads, int turns) {
  ThreadPool pool(threads);
  Model model(ops, shape, work, pool);
  enum { kRead, kOne, kEight, kMany, kPrompt, kRows, kOneOfRows, kCases };
  std::vector<double> times[kCases], share, prompts, batch8, batch32;
  for (int turn = 0; turn <= turns; ++turn) {
    const double t[kCases] = {seconds_of([&] { model.read_all(); }),
                              seconds_of([&] { model.multiply(1, true); }),
                              seconds_of([&] { model.multiply(8, true); }),
                              seconds_of([&] { model.multiply(32, true); }),
                              seconds_of([&] { model.multiply(Model::kMostRows, true); }),
                              seconds_of([&] { model.multiply(Model::kMostRows, false); }),
                              seconds_of([&] { model.multiply(1, false); })};
    if (turn == 0) continue;  // scratch is new
    for (int c = 0; c < kCases; ++c) times[c].push_back(t[c]);
    share.push_back(t[kRead] / t[kOne]);
    batch8.push_back(8 * t[kOne] / t[kEight]);
    batch32.push_back(32 * t[kOne] / t[kMany]);
    prompts.push_back(t[kRows] / t[kPrompt]);
  }
  const double one = median(times[kOne]);
  std::printf("%s %s %s, %d threads, %.0f MB\n", shape.name, std::string(dtype_name(work)).c_str(),
              std::string(ops.name).c_str(), threads, static_cast<double>(model.bytes()) * 1e-6);
  std::printf("  reading %.1f GB/s; one row %.1f GB/s, %.2f of reading; in rows %.2f times as long\n",
              static_cast<double>(model.bytes()) * 1e-9 / median(times[kRead]),
              static_cast<double>(model.bytes()) * 1e-9 / one, median(share), median(times[kOneOfRows]) / one);
  std::printf("  rows per second beside one row: 8 rows %.2f times, 32 rows %.2f times\n", median(batch8),
              median(batch32));
  std::printf("  512 rows: %.0f GFLOP/s packed, %.0f in rows, %.2f times\n",
              model.flops(Model::kMostRows) * 1e-9 / median(times[kPrompt]),
              model.flops(Model::kMostRows) * 1e-9 / median(times[kRows]), median(prompts));
  std::fflush(stdout);
}

}  // namespace
}  // namespace ds::bench

int main(int argc, char** argv) {
  using namespace ds;
  const OpTable* const ops = cpu_ops(argc > 1 ? argv[1] : "auto");
  if (ops == nullptr || ops->pack_matrix == nullptr)
    return std::fprintf(stderr, "packed_bench: error: this CPU lacks %s\n", argc > 1 ? argv[1] : "AVX2"), 2;
  const int turns = argc > 2 ? std::atoi(argv[2]) : 7;
  for (const bench::Shape& shape : bench::kShapes) {
    if (argc > 3 && std::string(argv[3]) != shape.name) continue;
    for (const DType work : {DType::BF16, DType::F32}) {
      if (argc <= 4 || dtype_name(work) == argv[4]) bench::measure(*ops, shape, work, 2, turns);
    }
  }
  return 0;
}
