// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa/kernels.h"
#include "cpu/loops.h"

namespace ds::cpu::DS_ISA_NAMESPACE {
namespace {

template <class T, bool adam_w>
void step(const AdamWTensor& t, float grad_scale, const AdamWParams& p, Stream& stream) noexcept {
  float* const master = t.master.as<float>();
  float* const m = t.m.as<float>();
  float* const v = t.v.as<float>();
  const float* const grad = t.grad.as<float>();
  T* const param = (t.param ? t.param : t.master).as<T>();
  const Vec scale = broadcast(grad_scale), decay = broadcast(t.weight_decay), lr = broadcast(p.lr);
  const Vec beta1 = broadcast(static_cast<float>(p.beta1)), rest1 = broadcast(static_cast<float>(1 - p.beta1));
  const Vec beta2 = broadcast(static_cast<float>(p.beta2)), rest2 = broadcast(static_cast<float>(1 - p.beta2));
  const Vec bias1 = broadcast(p.bias1), bias2 = broadcast(p.bias2), eps = broadcast(p.eps);
  for_all_vectors(stream, t.master.numel(), [=](i64 i, auto lanes) {
    const Vec w = load(master + i, lanes);
    Vec g = load(grad + i, lanes) * scale;
    if constexpr (!adam_w) g = g + decay * w;
    const Vec m_next = beta1 * load(m + i, lanes) + rest1 * g;
    const Vec v_next = beta2 * load(v + i, lanes) + rest2 * g * g;
    Vec update = m_next / bias1 / (sqrt(v_next / bias2) + eps);
    if constexpr (adam_w) update = update + decay * w;
    const Vec next = w - lr * update;
    store(m + i, m_next, lanes);
    store(v + i, v_next, lanes);
    store(master + i, next, lanes);
    if (static_cast<const void*>(param) != static_cast<const void*>(master)) store(param + i, next, lanes);
  });
}

}  // namespace

void adamw(std::span<const AdamWTensor> tensors, const GradVerdict* verdict, const AdamWParams& p,
           Stream& stream) noexcept {
  if (!verdict->finite) return;
  for (const AdamWTensor& t : tensors) {
    with_work_type(t.param ? t.param.dtype : DType::F32, [&]<class T>(T) {
      const auto run = p.adam_w_mode ? step<T, true> : step<T, false>;
      run(t, verdict->grad_scale, p, stream);
    });
  }
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
