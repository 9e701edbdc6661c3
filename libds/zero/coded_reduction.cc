// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cmath>

#include "zero/reduction.h"

namespace ds::zero {
namespace {

// The errors that codes have made so far, which are added to the next gradients (LoCo): of this rank alone, for each of
// the two hops.
class CodeErrors final : public SavedState {
 public:
  CodeErrors(const QuantizedReduceScatter& reduce, const ReductionParts& parts, const LocoOptions& loco,
             std::vector<i64> slices)
      : device_(parts.with.device),
        ranks_(parts.with.ranks.all.size()),
        errors_(reduce, parts.with.ledger, Tag::GradAccum, std::move(slices), loco),
        numbers_(device_buffer(device_, parts.with.ledger, Tag::GradAccum, 2 * 4)) {}

  LocoErrors& errors() noexcept { return errors_; }
  void begin(const GradStep& step) noexcept {
    step_reduces_ = step.reduces;
    const float before = std::exchange(scale_, step.loss_scale);
    if (scale_ != before) errors_.rescale(scale_ / before);
  }

  bool has_arrays(i64) const noexcept override { return ranks_ > 1; }
  void read(i64, const std::string& elements, std::vector<SavedArray>& arrays) override {
    const float numbers[] = {static_cast<float>(errors_.calls()), static_cast<float>(scale_of_errors())};
    device_.upload(numbers_.data(), numbers, sizeof numbers);
    const TensorView near = errors_.of_node_hop(), across = errors_.of_across_hop();
    const auto add = [&](std::string_view name, const TensorView& values) {
      if (values.numel() > 0) arrays.push_back({fmt::format("gradient_error.{}.{}", name, elements), values});
    };
    add("near", near);
    add("across", across);
    if (near.numel() + across.numel() > 0) add("calls_and_scale", TensorView::of(numbers_.data(), DType::F32, {2}));
  }
  void was_set(i64) override {
    float numbers[2] = {};
    device_.download(numbers, numbers_.data(), sizeof numbers);
    errors_.set_calls(static_cast<i64>(numbers[0]));
    scale_ = numbers[1];
  }
  void forget() override {
    for (const TensorView& e : {errors_.of_node_hop(), errors_.of_across_hop()}) {
      if (e.numel() > 0) device_.zero(e.data, e.bytes());
    }
    errors_.set_calls(0);
  }
  std::span<const Norm> norms(i64) override {
    if (ranks_ == 1 || !step_reduces_) return {};
    const double divisor = std::sqrt(static_cast<double>(ranks_)) * scale_of_errors();
    norms_ = {{{"gradient_error", divisor}, {"gradient_error_across", divisor}}};
    return norms_;
  }
  void for_each_norm(FunctionRef<void(size_t, const TensorView&)> visit) override {
    if (const TensorView error = errors_.of_node_hop(); error.numel() > 0) visit(0, error);
    if (const TensorView error = errors_.of_across_hop(); error.numel() > 0) visit(1, error);
  }

 private:
  // The errors are multiplied by that.
  double scale_of_errors() const noexcept { return static_cast<double>(scale_ / errors_.pending_scale()); }

  Device& device_;
  const int ranks_;
  LocoErrors errors_;
  Buffer numbers_;   // [2] fp32, for checkpoints: calls, and scale_of_errors()
  float scale_ = 1;  // loss scale of gradients, which errors_ takes over with the next ones
  bool step_reduces_ = true;
  std::array<Norm, 2> norms_;
};

class CodedReduction final : public Reduction {
 public:
  CodedReduction(const ReductionParts& parts, int bits, const std::optional<LocoOptions>& loco)
      : parts_(parts),
        tag_(message_text(parts.options.axis, Collective::AllToAll)),
        reduce_(parts.with.ranks.near, across(parts.with.ranks), parts.with.device, parts.with.ledger, Tag::Buckets,
                parts.layout.largest_slice(), CodeFormat{.bits = bits, .block = kCodeBlock}) {
    if (!loco) return;
    std::vector<i64> slices;
    error_of_.resize(parts.layout.segments().size());
    for (const i64 segment : parts.segments) {
      error_of_[segment] = slices.size();
      slices.push_back(parts.layout.segments()[segment].slice);
    }
    errors_.emplace(reduce_, parts, *loco, std::move(slices));
  }

  void begin(const GradStep& step) override {
    if (errors_) errors_->begin(step);
  }
  void committed(const Segment& s, bool continues) override {
    finish();
    reduce_.start(parts_.fresh.segment(s), tag_, errors_ ? &errors_->errors() : nullptr,
                  errors_ ? error_of_[parts_.number(s)] : 0);
    under_way_ = &s;
    continues_ = continues;
    if (parts_.with.ranks.all.size() == 1) finish();  // it reads the gradient
  }
  bool add(const Segment&, bool) override { return true; }
  void release(size_t bucket) override {
    // Its sum would otherwise be leased, when it is finished, out of what is expected for the next one.
    if (under_way_ != nullptr && parts_.fresh.bucket_of(under_way_->unit) == bucket) finish();
  }
  void finish() override {
    const Segment* const s = std::exchange(under_way_, nullptr);
    if (s == nullptr) return;
    const TierLease sum = parts_.sums.lease_owned(*s, continues_);
    reduce_.finish(TensorView::of(sum.data(), DType::F32, {s->slice}), continues_);
  }
  SavedState* saved_state() noexcept override { return errors_ ? &*errors_ : nullptr; }

 private:
  // The ranks of the last hop.
  static Communicator& across(const GroupRanks& ranks) noexcept {
    return ranks.across != nullptr ? *ranks.across : ranks.all;
  }

  const ReductionParts parts_;
  const std::string tag_;
  QuantizedReduceScatter reduce_;
  const Segment* under_way_ = nullptr;
  bool continues_ = false;
  std::optional<CodeErrors> errors_;
  std::vector<size_t> error_of_;  // by segment: its number among those that have errors
};

}  // namespace

ReductionKind coded_reduction(int bits, std::optional<LocoOptions> loco) {
  return {.make = [=](const ReductionParts& parts) { return std::make_unique<CodedReduction>(parts, bits, loco); }};
}

}  // namespace ds::zero
