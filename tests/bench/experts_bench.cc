// SPDX-License-Identifier: Apache-2.0
// A layer of experts, forward and backward with all gradients, beside dense products of the same FLOPs:
// experts_bench [THREADS [TURNS [SHAPE [DTYPE]]]]. Both take turns; a line shows median milliseconds of the layer's
// forward and backward pass, and the median over turns of the part of the rate of dense products: of the rows of all
// choices with one matrix of the size of an expert's. Loads are those of a router with random weights.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "bench/bench_tensor.h"
#include "model/experts.h"

using namespace ds;
using namespace ds::bench;

namespace {

struct Shape {
  const char* name;
  i64 tokens, hidden, intermediate, experts, chosen;
  i64 choices() const { return tokens * chosen; }
};
constexpr Shape kShapes[] = {{"olmoe", 1024, 2048, 1024, 64, 8}, {"small", 2048, 768, 256, 64, 8}};

double seconds(const auto& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<i64>(x.size()) / 2, x.end());
  return x[x.size() / 2];
}

void randomize(TensorView v, u32 stream, float std) {
  const RngKey key{1, stream, 0};
  for (i64 i = 0; i < v.numel(); ++i) {
    const float x = (static_cast<float>(key.bits(static_cast<u64>(i)) >> 8) * 0x1p-24f - 0.5f) * 3.46f * std;
    v.dtype == DType::F32 ? void(v.as<float>()[i] = x) : void(v.as<bf16>()[i] = to_bf16(x));
  }
}

ModelConfig config_of(const Shape& shape) {
  ModelConfig c;
  c.hidden = shape.hidden;
  c.experts.count = shape.experts;
  c.experts.per_token = shape.chosen;
  c.experts.intermediate = shape.intermediate;
  c.experts.router.normalise = true;
  return c;
}

// The layer with its memory, for one micro-batch.
class Layer {
 public:
  Layer(const OpTable& ops, Stream& stream, const Shape& shape, DType work)
      : experts_(rows_, "mlp", config_of(shape), 1, {}),
        x_(work, {shape.tokens, shape.hidden}),
        y_(work, {shape.tokens, shape.hidden}),
        dx_(work, {shape.tokens, shape.hidden}),
        targets_(static_cast<size_t>(shape.tokens)),
        counts_(static_cast<size_t>(experts_.num_counts())),
        ctx_{.ops = ops, .stream = stream, .B = 1, .T = shape.tokens} {
    for (const auto& row : rows_) {
      for (auto* const to : {&weights_, &grads_}) to->emplace_back(arrays_.emplace_back(bytes(row, work)), row, work);
      randomize(weights_.back().view, static_cast<u32>(arrays_.size()), row.std);
    }
    randomize(x_.view, 99, 1);
    for (const Row& r : weights_) weight_views_.push_back(r.view);
    for (const Row& r : grads_) grad_views_.push_back(r.view);
    const model::PlannedPass pass{.work = work, .mode = model::Mode::Train, .B = 1, .T = shape.tokens};
    model::ActivationPlanner count;
    model::LayerActs counted;
    count.begin_layer(model::Keep::All, false);
    experts_.plan(counted, count, pass);
    kept_.resize(static_cast<size_t>(count.kept_bytes()));
    working_.resize(static_cast<size_t>(count.working_bytes()));
    temporary_.resize(static_cast<size_t>(count.temporary_bytes()));
    model::ActivationPlanner planner(
        {.kept = kept_.data(), .working = working_.data(), .temporary = temporary_.data()});
    planner.begin_layer(model::Keep::All, false);
    experts_.plan(acts_, planner, pass);
    ctx_.targets = TensorView::of(targets_.data(), DType::I32, {shape.tokens});
    ctx_.counts = TensorView::of(counts_.data(), DType::F32, {experts_.num_counts()});
  }
  void forward() { experts_.forward(ctx_, {weight_views_}, y_.view, x_.view, {}, acts_); }
  void backward() {
    experts_.backward_input(ctx_, {weight_views_}, dx_.view, y_.view, x_.view, {}, acts_);
    experts_.backward_weight(ctx_, {grad_views_}, y_.view, x_.view, acts_);
  }

 private:
  using Memory = std::vector<u8, HugePages<u8>>;
  struct Row {
    TensorView view;
    Row(Memory& memory, const model::ParamRow& row, DType work) : view(row.view(work, memory.data())) {}
  };
  static size_t bytes(const model::ParamRow& row, DType work) {
    return static_cast<size_t>(row.numel() * dtype_bytes(work));
  }

  std::vector<model::ParamRow> rows_;
  model::Experts experts_;
  Tensor x_, y_, dx_;
  std::vector<i32> targets_;
  std::vector<float> counts_;
  std::vector<Memory> arrays_;
  std::vector<Row> weights_, grads_;
  std::vector<TensorView> weight_views_, grad_views_;
  Memory kept_, working_, temporary_;
  model::LayerActs acts_;
  model::PassContext ctx_;
};

void measure(const OpTable& ops, const Shape& shape, DType work, int threads, int turns) {
  ThreadPool pool(threads);
  Stream stream{.pool = &pool};
  Layer layer(ops, stream, shape, work);
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
  for (const Shape& shape : kShapes) {
    if (!only.empty() && only != shape.name) continue;
    for (const DType work : {DType::F32, DType::BF16}) {
      if (dtype.empty() || dtype == dtype_name(work)) measure(*cpu_ops(), shape, work, threads, turns);
    }
  }
  return 0;
}
