// SPDX-License-Identifier: Apache-2.0
// A layer of experts, forward and backward with all gradients, beside dense products of the same FLOPs:
// experts_bench [THREADS [TURNS [SHAPE [DTYPE]]]]. Both take turns; a line shows median milliseconds of the layer's
// forward and backward pass, and the median over turns of the part of the rate of dense products: of the rows of all
// choices with one matrix of the size of an expert's. Loads are those of a router with random weights.

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "bench/expert_layer.h"

using namespace ds;
using namespace ds::bench;

namespace {

void measure(const OpTable& ops, const ExpertShape& shape, DType work, int threads, int turns) {
  ThreadPool pool(threads);
  Stream stream{.pool = &pool};
  ExpertLayer layer(ops, stream, shape, work);
  const i64 N = shape.choices(), C = shape.hidden, F = shape.intermediate;
  const Tensor x(work, {N, C}), out(work, {N, C}), hidden(work, {N, F}), gate_up(work, {N, 2 * F}),
      up(work, {2 * F, C}), down(work, {C, F}), up_grad(work, {2 * F, C}), down_grad(work, {C, F});
  const auto dense_forward = [&] {
    ops.matmul(gate_up.view, x.view, up.view, {}, {}, {}, {.trans_b = true}, stream);
    ops.matmul(out.view, hidden.view, down.view, {}, {}, {}, {.trans_b = true}, stream);
  };
  const auto dense_backward = [&] {
    ops.matmul(hidden.view, x.view, down.view, {}, {}, {}, {}, stream);
    ops.matmul(out.view, gate_up.view, up.view, {}, {}, {}, {}, stream);
    ops.matmul(up_grad.view, gate_up.view, x.view, {}, {}, {}, {.trans_a = true}, stream);
    ops.matmul(down_grad.view, x.view, hidden.view, {}, {}, {}, {.trans_a = true}, stream);
  };
  std::vector<double> forward, backward, part;
  for (int turn = 0; turn <= turns; ++turn) {
    const double f = seconds([&] { layer.forward(); }), b = seconds([&] { layer.backward(); });
    const double dense = seconds(dense_forward) + seconds(dense_backward);
    if (turn == 0) continue;  // warms up
    forward.push_back(f * 1e3), backward.push_back(b * 1e3), part.push_back(dense / (f + b));
  }
  std::printf("%-6s %-5s %8.1f %8.1f %6.3f\n", shape.name, std::string(dtype_name(work)).c_str(), median(forward),
              median(backward), median(part));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2, turns = argc > 2 ? std::atoi(argv[2]) : 5;
  const std::string only = argc > 3 ? argv[3] : "", dtype = argc > 4 ? argv[4] : "";
  for (const ExpertShape& shape : kExpertShapes) {
    if (!only.empty() && only != shape.name) continue;
    for (const DType work : {DType::F32, DType::BF16}) {
      if (dtype.empty() || dtype == dtype_name(work)) measure(*cpu_ops(), shape, work, threads, turns);
    }
  }
  return 0;
}
