// SPDX-License-Identifier: Apache-2.0
#pragma once
// A layer of experts with its memory, for benchmarks of it alone.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "bench/bench_tensor.h"
#include "model/experts.h"

namespace ds::bench {

struct ExpertShape {
  const char* name;
  i64 tokens, hidden, intermediate, experts, chosen;
  i64 choices() const { return tokens * chosen; }
};
inline constexpr ExpertShape kExpertShapes[] = {{"olmoe", 1024, 2048, 1024, 64, 8}, {"small", 2048, 768, 256, 64, 8}};

inline double seconds(const auto& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
inline double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<i64>(x.size()) / 2, x.end());
  return x[x.size() / 2];
}

inline void put(TensorView v, i64 i, float x) {
  v.dtype == DType::F32 ? void(v.as<float>()[i] = x) : void(v.as<bf16>()[i] = to_bf16(x));
}
inline void randomize(TensorView v, u32 stream, float std) {
  const RngKey key{1, stream, 0};
  for (i64 i = 0; i < v.numel(); ++i)
    put(v, i, (static_cast<float>(key.bits(static_cast<u64>(i)) >> 8) * 0x1p-24f - 0.5f) * 3.46f * std);
}

// Device memory is host memory.
class SameMemory final : public model::HostLink {
 public:
  void download(void* to, const void* from, i64 bytes) override { std::memcpy(to, from, static_cast<size_t>(bytes)); }
  void upload(void* to, const void* from, i64 bytes) override { std::memcpy(to, from, static_cast<size_t>(bytes)); }
  void add_rounds(i64 more) override { rounds += more; }
  i64 rounds = 0;
};

inline ModelConfig config_of(const ExpertShape& shape) {
  ModelConfig c;
  c.hidden = shape.hidden;
  c.experts.count = shape.experts;
  c.experts.per_token = shape.chosen;
  c.experts.intermediate = shape.intermediate;
  c.experts.router.normalise = true;
  return c;
}

// For one micro-batch, whose inputs are x. With ep, `comm` joins its ranks.
class ExpertLayer {
 public:
  ExpertLayer(const OpTable& ops, Stream& stream, const ExpertShape& shape, DType work, const model::Shard& shard = {},
              Communicator* comm = nullptr)
      : experts_(rows_, "mlp", config_of(shape), 1, shard),
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
    ctx_.groups.shard = shard;
    ctx_.groups.comms[Axis::Ep] = comm;
    ctx_.host = &host_;
  }
  void forward() { experts_.forward(ctx_, {weight_views_}, y_.view, x_.view, {}, acts_); }
  void backward() {
    experts_.backward_input(ctx_, {weight_views_}, dx_.view, y_.view, x_.view, {}, acts_);
    experts_.backward_weight(ctx_, {grad_views_}, y_.view, x_.view, acts_);
  }
  TensorView x() { return x_.view; }
  TensorView router() { return weight_views_.front(); }
  std::span<const float> tokens_of_experts() const { return counts_; }  // and numbers of the router
  i64 rounds() const { return host_.rounds; }

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
  SameMemory host_;
  model::PassContext ctx_;
};

}  // namespace ds::bench
