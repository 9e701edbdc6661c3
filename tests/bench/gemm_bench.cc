// SPDX-License-Identifier: Apache-2.0
// GFLOP/s of our matrix product and of oneDNN's on the products of GPT-2 124M, in the same run: gemm_bench [isa
// [filter]]. The two take turns on the same operands, and each line shows the best of several turns.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "bench/onednn_product.h"

using namespace ds;
using namespace ds::bench;

int main(int argc, char** argv) {
  const OpTable* ops = cpu_ops(argc > 1 ? argv[1] : "auto");
  const char* filter = argc > 2 ? argv[2] : "";
  if (ops == nullptr) return std::fprintf(stderr, "gemm_bench: error: this CPU lacks %s\n", argv[1]), 2;

  std::vector<Product> products{{"1024^3", 1024, 1024, 1024, false, false, false},
                                {"1024^3", 1024, 1024, 1024, false, true, false}};
  add_layer(products, "qkv", 2048, 768, 2304, false);
  add_layer(products, "proj", 2048, 768, 768, false);
  add_layer(products, "fc1", 2048, 768, 3072, false);
  add_layer(products, "fc2", 2048, 3072, 768, false);
  add_layer(products, "logits", 512, 768, 50257, true);
  products.push_back({"generate", 1, 3072, 768, false, false, false});
  products.push_back({"generate", 1, 50257, 768, false, true, false});

  std::printf("%-10s %-5s %6s %6s %6s %2s  %s: GFLOP/s ours, oneDNN, ratio at 1 thread; at 2\n", "layer", "type", "M",
              "N", "K", "", std::string(ops->name).c_str());
  for (DType work : {DType::F32, DType::BF16}) {
    for (const Product& s : products) {
      if (std::strstr(s.name, filter) == nullptr) continue;
      const DType out = s.fp32_out ? DType::F32 : work;
      Operands operands(s, work);
      const int turns = s.M == 1 ? 50 : s.flops() < 2e10 ? 5 : 2;
      std::printf("%-10s %-5s %6ld %6ld %6ld %c%c", s.name, std::string(dtype_name(work)).c_str(), s.M, s.N, s.K,
                  s.trans_a ? 'T' : 'N', s.trans_b ? 'T' : 'N');
      for (int threads : {1, 2}) {
        ThreadPool pool(threads);
        Stream stream{&pool};
        const auto cv = TensorView::of(operands.c.data(), out, {s.M, s.N});
        const auto av = TensorView::of(operands.a.data(), work, {s.trans_a ? s.K : s.M, s.trans_a ? s.M : s.K});
        auto bv = TensorView::of(operands.b.data(), work, {s.trans_b ? s.N : s.K, s.trans_b ? s.K : s.N});
        if (s.M == 1 && s.trans_b) bv.panels = panels_of(*ops, work);  // as generation has it
        const auto ours = [&] {
          ops->matmul(cv, av, bv, {}, {}, {}, {.trans_a = s.trans_a, .trans_b = s.trans_b}, stream);
        };

        OnednnProduct theirs(s, work, operands, threads);
        ours();
        theirs();
        double ours_best = 0, theirs_best = 0;
        for (int turn = 0; turn < turns; ++turn) {
          ours_best = std::max(ours_best, s.flops() * 1e-9 / seconds_of(ours));
          theirs_best = std::max(theirs_best, s.flops() * 1e-9 / seconds_of(theirs));
        }
        std::printf("  %7.1f %7.1f %5.2f", ours_best, theirs_best, ours_best / theirs_best);
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
  return 0;
}
