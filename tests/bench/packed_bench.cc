// SPDX-License-Identifier: Apache-2.0
// Products of inference: all matrices of a quarter of a model, packed, for one row, batches and prompts: packed_bench
// [ISA [TURNS [SHAPE [DTYPE [FORM]]]]], where DTYPE may be codes, and FORM is a part of the names of forms. Beside
// them, in turns on the same memory and threads: a pass that only reads the matrices, and a prompt with matrices in
// rows. Medians over turns.

#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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
  CodedForm form{};
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

// The matrices one after the other, of numbers or of codes; in the order of panels if packed.
class Model {
 public:
  static constexpr i64 kMostRows = 512;

  Model(const OpTable& ops, const Shape& shape, DType work, const CodedForm& form, ThreadPool& pool)
      : ops_(ops), matrices_(matrices_of(shape)), work_(work), stream_{&pool} {
    i64 widest = 0;
    for (Matrix& m : matrices_) {
      if (form) m.form = whole_row(form, m.K);
      bytes_ += m.N * row_bytes(m), elems_ += m.N * m.K, widest = std::max({widest, m.N, m.K});
    }
    const DType kept = form ? DType::BF16 : work;  // codes are filled in below
    weights_ = std::make_unique<Tensor>(kept, std::initializer_list<i64>{bytes_ / dtype_bytes(kept) + 1});
    in_ = std::make_unique<Tensor>(work, std::initializer_list<i64>{kMostRows, widest});
    out_ = std::make_unique<Tensor>(work, std::initializer_list<i64>{kMostRows, widest});
    if (form) fill_and_pack();
  }
  i64 bytes() const { return bytes_; }
  double flops(i64 rows) const { return 2.0 * static_cast<double>(rows * elems_); }
  void read_all() { read(weights_->view.as<char>(), bytes_, *stream_.pool); }
  void multiply(i64 rows, bool packed) {
    each([&](TensorView b) {
      if (packed) b.panels = panels_of(ops_, work_, b.codes);
      ops_.matmul(TensorView::of(out_->view.data, work_, {rows, b.dim(0)}),
                  TensorView::of(in_->view.data, work_, {rows, b.dim(1)}), b, {}, {}, {}, {.trans_b = true}, stream_);
    });
  }

 private:
  static CodedForm whole_row(CodedForm form, i64 K) {
    if (form.group == 0) form.group = static_cast<i32>(K);
    return form;
  }
  i64 row_bytes(const Matrix& m) const { return m.form ? m.form.row_bytes(m.K) : m.K * dtype_bytes(work_); }
  void each(auto&& f) {
    char* at = weights_->view.as<char>();
    for (const Matrix& m : matrices_) {
      TensorView b = TensorView::of(at, work_, {m.N, m.K});
      b.codes = m.form;
      f(b);
      at += b.bytes();
    }
  }
  // Codes of all values; scales and offsets as weights have them.
  void fill_and_pack() {
    each([&](TensorView b) {
      const i64 K = b.dim(1), offset = dtype_bytes(b.codes.scales);
      const float scale = 0.01f, zero = -0.02f;
      const bf16 narrow = to_bf16(scale);
      for (i64 n = 0; n < b.dim(0); ++n) {
        for (i64 k = 0; k < K; k += b.codes.group) {
          u8* const group = b.as<u8>() + n * b.codes.row_bytes(K) + k / b.codes.group * b.codes.group_bytes();
          for (i64 i = 0; i < b.codes.group_bytes(); ++i) {
            group[i] = static_cast<u8>((n * 31 + k + i) * 167 >> 3);
            if ((group[i] & 0x7F) == 0x7F) --group[i];  // which would be NaN in E4M3
          }
          std::memcpy(group, offset == 4 ? static_cast<const void*>(&scale) : &narrow, static_cast<size_t>(offset));
          if (b.codes.offsets) std::memcpy(group + offset, &zero, sizeof zero);
        }
      }
      ops_.pack_matrix(b, stream_);
    });
  }

  const OpTable& ops_;
  std::vector<Matrix> matrices_;
  DType work_;
  i64 bytes_ = 0, elems_ = 0;
  std::unique_ptr<Tensor> weights_, in_, out_;
  Stream stream_;
};

double median(std::vector<double> v) {
  std::ranges::sort(v);
  return v[v.size() / 2];
}

void measure(const OpTable& ops, const Shape& shape, DType work, int threads, int turns) {
  ThreadPool pool(threads);
  Model model(ops, shape, work, {}, pool);
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

struct Form {
  const char* name;
  CodedForm form;  // group 0: the whole row
};
constexpr Form kForms[] = {
    {"int8, group 32", {.kind = CodeKind::Int8, .group = 32}},
    {"int8, group 128", {.kind = CodeKind::Int8, .group = 128}},
    {"int4, group 32", {.kind = CodeKind::Int4, .group = 32}},
    {"int4, group 128", {.kind = CodeKind::Int4, .group = 128}},
    {"int4 with offsets, group 32", {.kind = CodeKind::Int4, .offsets = true, .group = 32}},
    {"int4 with offsets, group 128", {.kind = CodeKind::Int4, .offsets = true, .group = 128}},
    {"E4M3, group 128", {.kind = CodeKind::E4M3, .group = 128}},
    {"int8, sums of integers", {.kind = CodeKind::Int8, .scales = DType::F32, .integer = true}},
    {"int8, group 32, integers", {.kind = CodeKind::Int8, .integer = true, .group = 32}},
    {"int8, group 128, integers", {.kind = CodeKind::Int8, .integer = true, .group = 128}},
    {"int4, group 32, integers", {.kind = CodeKind::Int4, .integer = true, .group = 32}},
    {"int4, group 128, integers", {.kind = CodeKind::Int4, .integer = true, .group = 128}},
    {"int4 with offsets, 32, integers", {.kind = CodeKind::Int4, .offsets = true, .integer = true, .group = 32}},
    {"int4 with offsets, 128, integers", {.kind = CodeKind::Int4, .offsets = true, .integer = true, .group = 128}},
};

// Products with codes, beside those with panels of bf16 numbers.
void measure_codes(const OpTable& ops, const Shape& shape, int threads, int turns, const std::string& only) {
  ThreadPool pool(threads);
  Model numbers(ops, shape, DType::BF16, {}, pool);
  std::printf("%s codes %s, %d threads, beside bf16 of %.0f MB\n", shape.name, std::string(ops.name).c_str(), threads,
              static_cast<double>(numbers.bytes()) * 1e-6);
  for (const Form& f : kForms) {
    if (std::string(f.name).find(only) == std::string::npos) continue;
    Model codes(ops, shape, DType::BF16, f.form, pool);
    std::vector<double> share, rate, one, eight, many;
    for (int turn = 0; turn <= turns; ++turn) {
      const auto time_of = [](Model& m, i64 rows) { return seconds_of([&] { m.multiply(rows, true); }); };
      const double reading = seconds_of([&] { codes.read_all(); }), coded = time_of(codes, 1),
                   of_one = time_of(numbers, 1) / coded, of_eight = time_of(numbers, 8) / time_of(codes, 8),
                   of_many = time_of(numbers, Model::kMostRows) / time_of(codes, Model::kMostRows);
      if (turn == 0) continue;  // scratch is new
      share.push_back(reading / coded), rate.push_back(static_cast<double>(codes.bytes()) * 1e-9 / coded);
      one.push_back(of_one), eight.push_back(of_eight), many.push_back(of_many);
    }
    std::printf(
        "  %-32s %4.0f MB; one row %5.1f GB/s, %.2f of reading, %.2f times as fast as bf16; 8 rows %.2f, 512 rows "
        "%.2f times\n",
        f.name, static_cast<double>(codes.bytes()) * 1e-6, median(rate), median(share), median(one), median(eight),
        median(many));
    std::fflush(stdout);
  }
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
    if (argc <= 4 || argv[4] == std::string("codes"))
      bench::measure_codes(*ops, shape, 2, turns, argc > 5 ? argv[5] : "");
  }
  return 0;
}
