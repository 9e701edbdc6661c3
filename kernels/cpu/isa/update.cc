// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa/kernels.h"
#include "cpu/loops.h"
#include "update_rules.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

// Found by the rules, which know only V.
inline Vec sign(Vec x) noexcept {
  const Vec one = broadcast(1.0f);
  return select(less(zero(), x), one, select(less(x, zero()), zero() - one, zero()));
}

namespace {

template <class Rule, class T>
void run(const UpdateTensor& t, float grad_scale, const UpdateParams& p, Stream& stream) noexcept {
  float* const master = t.master.as<float>();
  float* const grad = t.grad.as<float>();
  float* const states[2] = {t.states[0].as<float>(), t.states[1].as<float>()};
  T* const param = (t.param ? t.param : t.master).as<T>();
  const bool rounds = static_cast<const void*>(param) != static_cast<const void*>(master);
  const Vec scale = broadcast(grad_scale), decay = broadcast(t.weight_decay);
  const auto k = update_rules::constants_of<Vec>(p, [](float x) { return broadcast(x); });
  for_all_vectors(stream, t.master.numel(), [=](i64 i, auto lanes) {
    Vec w = load(master + i, lanes), g = load(grad + i, lanes) * scale;
    Vec s[Rule::kStates + 1];  // one more, for there may be none
    for (int j = 0; j < Rule::kStates; ++j) s[j] = load(states[j] + i, lanes);
    Rule::apply(w, g, s, decay, k);
    for (int j = 0; j < Rule::kStates; ++j) store(states[j] + i, s[j], lanes);
    if constexpr (Rule::kDirection) {
      store(grad + i, g, lanes);
    } else {
      store(master + i, w, lanes);
      if (rounds) store(param + i, w, lanes);
    }
  });
}

}  // namespace

void update(std::span<const UpdateTensor> tensors, const GradVerdict* verdict, const UpdateParams& p,
            Stream& stream) noexcept {
  if (!verdict->finite) return;
  update_rules::with_rule(p.rule, [&]<class Rule>(Rule) {
    for (const UpdateTensor& t : tensors) {
      const float scale = p.rule != UpdateRule::Descend ? verdict->grad_scale : t.factor != nullptr ? *t.factor : 1.0f;
      with_work_type(t.param ? t.param.dtype : DType::F32, [&]<class T>(T) { run<Rule, T>(t, scale, p, stream); });
    }
  });
}

void scaled_sum(TensorView y, TensorView x, float a, float b, const float* factor, Stream& stream) noexcept {
  float* const to = y.as<float>();
  const float* const from = x.as<float>();
  const Vec of_y = broadcast(a), of_x = broadcast(factor != nullptr ? b * *factor : b);
  const bool adds = a != 0;
  for_all_vectors(stream, y.numel(), [=](i64 i, auto lanes) {
    Vec sum = of_x * load(from + i, lanes);
    if (adds) sum = of_y * load(to + i, lanes) + sum;
    store(to + i, sum, lanes);
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
