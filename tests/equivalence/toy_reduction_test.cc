// SPDX-License-Identifier: Apache-2.0
// A compressed reduction with error feedback that no configuration knows, written here alone: gradients are rounded to
// bf16, and each rank adds its rounding errors to its next gradients. Plans, engines, checkpoints and monitors take it
// like those of the library.

#include "equivalence/checkpoints.h"
#include "plan/counted_update.h"

namespace ds::testing {
namespace toy_reduction_test {

class ToyReduction final : public zero::Reduction, private zero::SavedState {
 public:
  explicit ToyReduction(const zero::ReductionParts& parts)
      : parts_(parts), ranks_(parts.with.ranks.all.size()), device_(parts.with.device) {
    i64 most = 0, all = 0;
    first_.resize(parts.layout.segments().size());
    for (const i64 s : parts.segments) {
      const i64 n = parts.layout.segments()[s].slice * ranks_;
      first_[s] = all;
      all += n;
      most = std::max(most, n);
    }
    errors_ = device_buffer(device_, parts.with.ledger, Tag::GradAccum, all * 4);
    rounded_ = parts.with.ranks.all.allocate(parts.with.ledger, Tag::Buckets, most * 2);
    lost_ = device_buffer(device_, parts.with.ledger, Tag::Buckets, most * 4);
  }

  // error += gradient; rounded = bf16(error); error -= rounded
  bool add(const zero::Segment& s, bool continues) override {
    finish();
    const i64 n = s.slice * ranks_;
    const TensorView fresh = parts_.fresh.segment(s), error = all_errors().rows(first_[parts_.number(s)], n),
                     rounded = TensorView::of(rounded_.data(), DType::BF16, {n}),
                     lost = TensorView::of(lost_.data(), DType::F32, {n});
    const OpTable& ops = device_.ops();
    ops.fold(error, {&fresh, 1}, true, device_.stream());
    ops.cast(rounded, error, device_.stream());
    ops.cast(lost, rounded, device_.stream());
    ops.scaled_sum(error, lost, 1, -1, nullptr, device_.stream());
    sum_ = parts_.sums.lease_owned(s, continues);
    const ReduceScatterSegment segment{rounded.data, sum_.values(), s.slice};
    ticket_ = parts_.with.ranks.all.reduce_scatter({&segment, 1}, DType::BF16, continues, "dp.toy");
    return true;
  }
  void finish() override {
    ticket_.wait();
    ticket_ = {};
    sum_ = {};
  }
  SavedState* saved_state() noexcept override { return this; }

 private:
  TensorView all_errors() const noexcept { return TensorView::of(errors_.data(), DType::F32, {errors_.bytes() / 4}); }
  bool has_arrays(i64) const noexcept override { return true; }
  void read(i64, const std::string& elements, std::vector<zero::SavedArray>& arrays) override {
    arrays.push_back({"toy_error." + elements, all_errors()});
  }
  void forget() override { device_.zero(errors_.data(), errors_.bytes()); }
  std::span<const Norm> norms(i64) override { return {&norm_, 1}; }
  void for_each_norm(FunctionRef<void(size_t, const TensorView&)> visit) override { visit(0, all_errors()); }

  const zero::ReductionParts parts_;
  const i64 ranks_;
  Device& device_;
  std::vector<i64> first_;  // by segment: in errors_
  Buffer errors_, rounded_, lost_;
  zero::TierLease sum_;
  Ticket ticket_;
  const Norm norm_{.name = "toy_error", .divisor = std::sqrt(static_cast<double>(ranks_))};
};

// The plan of a rank with the toy for all units: its memory and messages are counted like those of any reduction.
void with_toy(plan::RunPlan& plan) {
  const auto memory = [&] {
    plan::TagBytes bytes{};
    const plan::CountedUpdate update(plan, no_ops());
    for (size_t t = 0; t < bytes.size(); ++t) bytes[t] = update.ledger().current(static_cast<Tag>(t));
    return bytes;
  };
  const plan::TagBytes before = memory();
  plan.shards.front().grads.reductions = {
      {.make = [](const zero::ReductionParts& parts) { return std::make_unique<ToyReduction>(parts); }}};
  const plan::TagBytes after = memory();
  for (size_t t = 0; t < after.size(); ++t) plan.memory.by_tag[t] += after[t] - before[t];
  plan::CountedUpdate update(plan, no_ops());
  update.run([](std::optional<size_t>, i64) {}, 1);
  MeshCalls calls;
  for (const auto& [name, count] : update.traffic(calls)) {
    if (name == "dp.toy" || name == "dp.reduce_scatter") plan.traffic.last[name] = count;
  }
}

Config toy_config(i64 stage) {
  Config c = config_of(tiny_gpt2(), {.dp = 2, .stage = stage}, 4);
  if (stage < 2) c.reduce_order = ReduceOrder::Boundary;
  return c;
}

TEST(ToyReduction, TrainsWithTheMemoryAndTheMessagesOfItsPlan) {
  for (const i64 stage : {0, 1, 2, 3}) {
    const Config c = toy_config(stage);
    const Trace exact = train_threads(c, 2, 6), toy = train_threads(c, 2, 6, 1, {.change_plan = with_toy});
    EXPECT_FALSE(same_bits(toy.weights, exact.weights)) << stage;
    EXPECT_NEAR(toy.losses.back(), exact.losses.back(), 1e-3) << stage;
    expect_planned_traffic(toy.sent, {{"dp.toy", toy.planned.at("dp.toy")}}, 6, fmt::format("stage {}", stage));
    EXPECT_EQ(2 * toy.sent.at("dp.toy").bytes, exact.sent.at("dp.reduce_scatter").bytes) << stage;
  }
}

// A run that resumes with the errors of its ranks has the same bits; without them it does not.
TEST(ToyReduction, ItsErrorsAreSavedAndShown) {
  const Config c = toy_config(2);
  const TempDirectory dir;
  std::vector<std::vector<float>> saved(2);
  Hooks saving{.change_plan = with_toy};
  saving.after_step = [&](engine::Engine& engine, i64 step) {
    if (step != 2) return;
    const std::vector<zero::SavedArray> arrays = engine.rank_local();
    ASSERT_EQ(arrays.size(), 1u);
    EXPECT_TRUE(engine.has_rank_local() && arrays[0].name.starts_with("toy_error."));
    const std::span<const float> values(arrays[0].values.as<float>(), static_cast<size_t>(arrays[0].values.numel()));
    EXPECT_TRUE(std::ranges::any_of(values, [](float x) { return x != 0; }));
    saved[static_cast<size_t>(engine.mesh().rank())].assign(values.begin(), values.end());
    save_step(engine, dir.path());
  };
  const Trace whole = train_threads(c, 2, 6, 1, saving);
  const auto resumed = [&](bool with_errors) {
    Hooks hooks{.change_plan = with_toy};
    hooks.start = [&](engine::Engine& engine) {
      load_step(engine, dir.path() + "/step-00000003");
      if (!with_errors) return;
      const std::vector<float>& values = saved[static_cast<size_t>(engine.mesh().rank())];
      const zero::SavedArray array = engine.rank_local().front();
      engine.device().upload(array.values.data, values.data(), array.values.bytes());
      engine.rank_local_was_set();
    };
    return train_threads(c, 2, 3, 1, hooks);
  };
  EXPECT_TRUE(same_bits(resumed(true).weights, whole.weights));
  EXPECT_FALSE(same_bits(resumed(false).weights, whole.weights));
  EXPECT_EQ(whole.compression[0].name, "toy_error");
  EXPECT_TRUE(whole.compression[0].norm > 0 && whole.compression[1].name.empty());
}

}  // namespace toy_reduction_test
}  // namespace ds::testing
