// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa/kernels.h"
#include "cpu/loops.h"
#include "cpu/state_codes.h"
#include "update_rules.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

// Found by the rules, which know only V.
inline Vec sign(Vec x) noexcept {
  const Vec one = broadcast(1.0f);
  return select(less(zero(), x), one, select(less(x, zero()), zero() - one, zero()));
}

namespace {

// Elements [begin, end); those of the states are numbered from `first`.
template <class Rule, class T>
void pass(i64 begin, i64 end, float* const (&states)[2], i64 first, const UpdateTensor& t, Vec scale,
          const update_rules::Constants<Vec>& k) noexcept {
  float* const master = t.master.as<float>();
  float* const grad = t.grad.as<float>();
  T* const param = (t.param ? t.param : t.master).as<T>();
  const bool rounds = static_cast<const void*>(param) != static_cast<const void*>(master);
  const Vec decay = broadcast(t.weight_decay);
  for_vectors(begin, end, [=](i64 i, auto lanes) {
    Vec w = load(master + i, lanes), g = load(grad + i, lanes) * scale;
    Vec s[Rule::kStates + 1];  // one more, for there may be none
    for (int j = 0; j < Rule::kStates; ++j) s[j] = load(states[j] + i - first, lanes);
    Rule::apply(w, g, s, decay, k);
    for (int j = 0; j < Rule::kStates; ++j) store(states[j] + i - first, s[j], lanes);
    if constexpr (Rule::kDirection) {
      store(grad + i, g, lanes);
    } else {
      store(master + i, w, lanes);
      if (rounds) store(param + i, w, lanes);
    }
  });
}

template <class Rule, class T>
void run(const UpdateTensor& t, float grad_scale, const UpdateParams& p, Stream& stream) noexcept {
  const Vec scale = broadcast(grad_scale);
  const auto k = update_rules::constants_of<Vec>(p, [](float x) { return broadcast(x); });
  for_tiles(stream, t.master.numel(), [=, &t](i64 begin, i64 end) {
    if (Rule::kStates == 0 || t.states[0].dtype == DType::F32)
      return pass<Rule, T>(begin, end, {t.states[0].as<float>(), t.states[1].as<float>()}, 0, t, scale, k);
    // What is not fp32: block by block through the nearest cache.
    alignas(64) float values[2][kStateBlock] = {};
    alignas(64) u32 random[kStateBlock];
    for (i64 at = begin; at < end; at += kStateBlock) {
      const i64 n = std::min(kStateBlock, end - at);
      for (int j = 0; j < Rule::kStates; ++j) decode_block(values[j], t.states[j], at, n);
      if (t.states[0].dtype == DType::BF16)
        put_random_words(random, {p.rng.seed, t.site, p.rng.step}, static_cast<u64>(t.first + at), n);
      pass<Rule, T>(at, at + n, {values[0], values[1]}, at, t, scale, k);
      for (int j = 0; j < Rule::kStates; ++j) encode_block(t.states[j], values[j], at, n, random, j == 0);
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
