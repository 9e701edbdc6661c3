// SPDX-License-Identifier: Apache-2.0
// AdamW over all tensors of a step. Every operation rounds for itself, as on the CPU: this file is compiled without
// contraction of products and sums, and division and square root are the correctly rounded ones.

#include "cuda/adamw_plan.h"

#include "cuda/context.h"
#include "cuda/vectors.h"

namespace ds::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 4;  // elements of a thread at a time: 16 bytes of each fp32 tensor

// AdamWParams as the kernel uses them, each rounded once.
struct AdamWConstants {
  float beta1, rest1, beta2, rest2, bias1, bias2, eps, lr;
  bool adam_w_mode;
};

static_assert(sizeof(AdamWBatch) + sizeof(AdamWConstants) + sizeof(void*) <= 4096, "the parameters of one launch");

DS_DEVICE void step(float& w, float& m, float& v, float grad, float scale, float decay, const AdamWConstants& k) {
  float g = grad * scale;
  if (!k.adam_w_mode) g = g + decay * w;
  m = k.beta1 * m + k.rest1 * g;
  v = k.beta2 * v + k.rest2 * g * g;
  float update = m / k.bias1 / (std::sqrt(v / k.bias2) + k.eps);
  if (k.adam_w_mode) update = update + decay * w;
  w = w - k.lr * update;
}

DS_DEVICE void store_param(const AdamWSlot& slot, i64 i, float x) {
  switch (slot.param_dtype) {
    case DType::BF16: store(static_cast<bf16*>(slot.param) + i, x); break;
    case DType::F16: store(static_cast<f16*>(slot.param) + i, x); break;
    default: store(static_cast<float*>(slot.param) + i, x);
  }
}
DS_DEVICE void store_params(const AdamWSlot& slot, i64 i, const float (&x)[kEach]) {
  switch (slot.param_dtype) {
    case DType::BF16:
      *reinterpret_cast<uint2*>(static_cast<bf16*>(slot.param) + i) =
          make_uint2(pack2<bf16>(x[0], x[1]), pack2<bf16>(x[2], x[3]));
      break;
    case DType::F16:
      *reinterpret_cast<uint2*>(static_cast<f16*>(slot.param) + i) =
          make_uint2(pack2<f16>(x[0], x[1]), pack2<f16>(x[2], x[3]));
      break;
    default: store16(static_cast<float*>(slot.param) + i, x);
  }
}

__global__ void adamw_kernel(const AdamWBatch batch, const GradVerdict* verdict, const AdamWConstants k) {
  if (verdict->finite == 0) return;
  const float scale = verdict->grad_scale;
  const u32 chunk = block_index().x;
  const int which = batch.slot_of(chunk);
  const AdamWSlot& slot = batch.slots[which];
  const i64 begin = i64{chunk - batch.first_chunk[which]} * kAdamWChunk;
  const i64 end = begin + kAdamWChunk < slot.n ? begin + kAdamWChunk : slot.n;
  const i64 even = slot.wide ? begin + (end - begin) / kEach * kEach : begin;  // where single elements begin
  for (i64 i = begin + thread_index() * kEach; i < even; i += kThreads * kEach) {
    float w[kEach], m[kEach], v[kEach], g[kEach];
    load16(g, slot.grad + i);
    load16(w, slot.master + i);
    load16(m, slot.m + i);
    load16(v, slot.v + i);
    for (int j = 0; j < kEach; ++j) step(w[j], m[j], v[j], g[j], scale, slot.weight_decay, k);
    store16(slot.m + i, m);
    store16(slot.v + i, v);
    store16(slot.master + i, w);
    if (slot.param != nullptr) store_params(slot, i, w);
  }
  for (i64 i = even + thread_index(); i < end; i += kThreads) {
    float w = slot.master[i], m = slot.m[i], v = slot.v[i];
    step(w, m, v, slot.grad[i], scale, slot.weight_decay, k);
    slot.m[i] = m;
    slot.v[i] = v;
    slot.master[i] = w;
    if (slot.param != nullptr) store_param(slot, i, w);
  }
}

}  // namespace

void adamw(std::span<const AdamWTensor> tensors, const GradVerdict* verdict, const AdamWParams& p,
           Stream& stream) noexcept {
  Context& c = context(stream);
  const AdamWConstants k{static_cast<float>(p.beta1),
                         static_cast<float>(1 - p.beta1),
                         static_cast<float>(p.beta2),
                         static_cast<float>(1 - p.beta2),
                         p.bias1,
                         p.bias2,
                         p.eps,
                         p.lr,
                         p.adam_w_mode};
  while (!tensors.empty()) {
    const AdamWBatch batch = next_adamw_batch(tensors);
    launch(adamw_kernel, {dim3(batch.num_chunks()), kThreads, 0}, c.stream(), batch, verdict, k);
    c.check(cudaGetLastError(), "adamw");
  }
}

}  // namespace ds::cuda
