// SPDX-License-Identifier: Apache-2.0
// Block-sparse attention beside dense attention in one run: sparse_bench [--threads N] [--lengths A,B] [--only LAYOUT]
// [--save DIR].
//
// Forward and backward of 8 heads of 64 in fp32 and bf16, causal. For each layout: its share of the blocks of causal
// attention, its time as a share of the dense time, and one by the other: 1.0 is a cost in proportion. Then the time to
// build the layout. --save writes each layout, for sparse_peers.py, which times PyTorch with it.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "bench_tensor.h"
#include "model/attention_pattern.h"

namespace {

using namespace ds;
using bench::Tensor;

constexpr i64 kHeads = 8, kDim = 64;

int threads = 2;

// One thread is timed in processor time, so that other programs on the machine disturb it less.
double now() {
  if (threads > 1) return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Seconds: the best of turns that together take long enough.
template <class F>
double seconds(F&& f) {
  double best = 1e30, spent = 0;
  for (int turn = 0; turn < 7 && (turn < 3 || spent < 2) && (turn < 1 || spent < 30); ++turn) {
    const double start = now();
    f();
    const double took = now() - start;
    best = std::min(best, took);
    spent += took;
  }
  return best;
}

struct Kind {
  const char* name;
  SparseAttentionConfig config;
};
std::vector<Kind> kinds() {
  SparseAttentionConfig fixed, local, bigbird, longformer;
  fixed.mode = SparseAttentionMode::Fixed;
  local.mode = SparseAttentionMode::Local;
  bigbird.mode = SparseAttentionMode::BigBird;
  longformer.mode = SparseAttentionMode::BSLongformer;
  for (SparseAttentionConfig* c : {&fixed, &local, &bigbird, &longformer}) {
    c->block = 64;
    c->unidirectional = true;
  }
  fixed.num_local_blocks = 8;
  fixed.different_layout_per_head = bigbird.different_layout_per_head = true;
  fixed.num_different_global_patterns = 4;
  bigbird.num_random_blocks = 1;
  local.num_sliding_window_blocks = 15;
  SparseAttentionConfig fine = fixed;
  fine.block = 16;
  fine.num_local_blocks = 4;
  return {{"fixed", fixed}, {"fixed/16", fine}, {"local", local}, {"bigbird", bigbird}, {"longformer", longformer}};
}

void save(const std::string& folder, const std::string& name, i64 T, const model::AttentionLayout& layout) {
  std::ofstream out(folder + "/" + name + "-" + std::to_string(T) + ".txt");
  out << layout.block() << " " << layout.count() << " " << layout.layouts() << "\n";
  for (i64 l = 0; l < layout.layouts(); ++l) {
    for (i64 i = 0; i < layout.count(); ++i) {
      for (i64 j = 0; j < layout.count(); ++j) out << (layout.has(l, i, j) ? '1' : '0');
      out << "\n";
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<i64> lengths = {4096, 16384, 32768};
  std::string folder, only;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i], value = argv[i + 1];
    if (key == "--threads") threads = std::stoi(value);
    if (key == "--save") folder = value;
    if (key == "--only") only = value;
    if (key != "--lengths") continue;
    lengths.clear();
    std::stringstream list(value);
    for (std::string n; std::getline(list, n, ',');) lengths.push_back(std::stoll(n));
  }
  const OpTable& ops = *cpu_ops();
  ThreadPool pool(threads);
  Stream stream{.pool = &pool};
  std::printf("%s, %d threads, %lld heads of %lld, causal, forward + backward\n", std::string(ops.name).c_str(),
              threads, static_cast<long long>(kHeads), static_cast<long long>(kDim));
  std::printf("%-7s %-5s %-11s %9s %9s %9s %9s %9s %12s\n", "tokens", "type", "layout", "fwd ms", "bwd ms", "of dense",
              "blocks", "ratio", "build ms (%)");
  for (const i64 T : lengths) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
      const Tensor q(dtype, {1, T, kHeads, kDim}), k(dtype, {1, T, kHeads, kDim}), v(dtype, {1, T, kHeads, kDim}),
          dout(dtype, {1, T, kHeads, kDim}), o(dtype, {1, T, kHeads, kDim}), dq(dtype, {1, T, kHeads, kDim}),
          dk(dtype, {1, T, kHeads, kDim}), dv(dtype, {1, T, kHeads, kDim}), lse(DType::F32, {1, kHeads, T});
      AttentionParams params{.scale = 1.0f / std::sqrt(static_cast<float>(kDim))};
      const auto forward = [&] { ops.attention_fwd(o.view, lse.view, q.view, k.view, v.view, params, stream); };
      const auto backward = [&] {
        ops.attention_bwd(dq.view, dk.view, dv.view, dout.view, q.view, k.view, v.view, o.view, lse.view, params,
                          stream);
      };
      const std::string type(dtype_name(dtype));
      const double dense_fwd = seconds(forward), dense_bwd = seconds(backward), dense = dense_fwd + dense_bwd;
      std::printf("%-7lld %-5s %-11s %9.1f %9.1f\n", static_cast<long long>(T), type.c_str(), "dense", 1e3 * dense_fwd,
                  1e3 * dense_bwd);
      for (const Kind& kind : kinds()) {
        if (!only.empty() && only != kind.name) continue;
        const auto build = [&] { return model::make_attention_layout(kind.config, kHeads, T, 1234); };
        const model::AttentionLayout layout = build();
        const double built = seconds(build);
        if (!folder.empty() && dtype == DType::F32) {
          std::string name = kind.name;
          std::ranges::replace(name, '/', '_');
          save(folder, name, T, layout);
        }
        params.blocks = {.block = layout.block(),
                         .count = layout.count(),
                         .layouts = layout.layouts(),
                         .keys = layout.keys().data(),
                         .queries = layout.queries().data()};
        const double n = static_cast<double>(layout.count());
        const double share =
            static_cast<double>(layout.present(true)) / (static_cast<double>(layout.layouts()) * n * (n + 1) / 2);
        const double fwd = seconds(forward), bwd = seconds(backward), both = fwd + bwd;
        std::printf("%-7lld %-5s %-11s %9.1f %9.1f %9.3f %9.3f %9.2f %8.2f (%.1f)\n", static_cast<long long>(T),
                    type.c_str(), kind.name, 1e3 * fwd, 1e3 * bwd, both / dense, share, both / dense / share,
                    1e3 * built, 100 * built / both);
        std::fflush(stdout);
      }
    }
  }
}
