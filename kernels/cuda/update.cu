// SPDX-License-Identifier: Apache-2.0
// A pass of an optimizer over all tensors of a step. Every operation is rounded individually, as on the CPU: this file
// is compiled without contraction of products and sums, and with correctly rounded division and square root.

#include "cuda/update_plan.h"

#include "cuda/context.h"
#include "cuda/vectors.h"
#include "ds/kernels/state_codes.h"
#include "update_rules.h"

namespace ds::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 4;  // elements of a thread at a time: 16 bytes of each fp32 tensor

using Constants = update_rules::Constants<float>;

// CUDA 12.1 and later allow 32,764 bytes of parameters per launch.
static_assert(sizeof(UpdateBatch) + sizeof(Constants) + sizeof(void*) + sizeof(RngKey) <= 32764,
              "the parameters of one launch");

// Stores element i of an array of a work dtype, or four of them.
DS_DEVICE void store_as(void* array, DType dtype, i64 i, float x) {
  switch (dtype) {
    case DType::BF16: store(static_cast<bf16*>(array) + i, x); break;
    case DType::F16: store(static_cast<f16*>(array) + i, x); break;
    default: store(static_cast<float*>(array) + i, x);
  }
}
DS_DEVICE void store_four(void* array, DType dtype, i64 i, const float (&x)[kEach]) {
  switch (dtype) {
    case DType::BF16:
      *reinterpret_cast<uint2*>(static_cast<bf16*>(array) + i) =
          make_uint2(pack2<bf16>(x[0], x[1]), pack2<bf16>(x[2], x[3]));
      break;
    case DType::F16:
      *reinterpret_cast<uint2*>(static_cast<f16*>(array) + i) =
          make_uint2(pack2<f16>(x[0], x[1]), pack2<f16>(x[2], x[3]));
      break;
    default: store16(static_cast<float*>(array) + i, x);
  }
}
// The same for the first `count`.
DS_DEVICE void store_some_as(void* array, DType dtype, i64 i, const float (&x)[kEach], i64 count, bool wide) {
  if (wide && count >= kEach) return store_four(array, dtype, i, x);
  DS_UNROLL for (int e = 0; e < kEach; ++e) {
    if (e < count) store_as(array, dtype, i + e, x[e]);
  }
}
DS_DEVICE float load_as(const void* array, DType dtype, i64 i) {
  switch (dtype) {
    case DType::BF16: return load(static_cast<const bf16*>(array) + i);
    case DType::F16: return load(static_cast<const f16*>(array) + i);
    default: return static_cast<const float*>(array)[i];
  }
}

template <class Rule>
__global__ void update_kernel(const UpdateBatch batch, const GradVerdict* verdict, const Constants k, bool scaled) {
  if (verdict->finite == 0) return;
  const u32 chunk = block_index().x;
  const int which = batch.slot_of(chunk);
  const UpdateSlot& slot = batch.slots[which];
  const float scale = scaled ? verdict->grad_scale : slot.factor != nullptr ? *slot.factor : 1.0f;
  const i64 begin = i64{chunk - batch.first_chunk[which]} * kUpdateChunk;
  const i64 end = begin + kUpdateChunk < slot.n ? begin + kUpdateChunk : slot.n;
  const i64 even = slot.wide ? begin + (end - begin) / kEach * kEach : begin;  // where single elements begin
  constexpr int kStates = Rule::kStates;
  for (i64 i = begin + thread_index() * kEach; i < even; i += kThreads * kEach) {
    float w[kEach], g[kEach], s[kStates + 1][kEach];
    load16(g, slot.grad + i);
    load16(w, static_cast<const float*>(slot.master) + i);
    for (int j = 0; j < kStates; ++j) load16(s[j], static_cast<const float*>(slot.states[j]) + i);
    for (int e = 0; e < kEach; ++e) {
      float gradient = g[e] * scale, of[kStates + 1];
      for (int j = 0; j < kStates; ++j) of[j] = s[j][e];
      Rule::apply(w[e], gradient, of, slot.weight_decay, k);
      for (int j = 0; j < kStates; ++j) s[j][e] = of[j];
      g[e] = gradient;
    }
    for (int j = 0; j < kStates; ++j) store16(static_cast<float*>(slot.states[j]) + i, s[j]);
    if constexpr (Rule::kDirection) {
      store16(slot.grad + i, g);
    } else {
      store16(static_cast<float*>(slot.master) + i, w);
      if (slot.param != nullptr) store_four(slot.param, slot.param_dtype, i, w);
    }
  }
  for (i64 i = even + thread_index(); i < end; i += kThreads) {
    float w = static_cast<const float*>(slot.master)[i], gradient = slot.grad[i] * scale, of[kStates + 1];
    for (int j = 0; j < kStates; ++j) of[j] = static_cast<const float*>(slot.states[j])[i];
    Rule::apply(w, gradient, of, slot.weight_decay, k);
    for (int j = 0; j < kStates; ++j) static_cast<float*>(slot.states[j])[i] = of[j];
    if constexpr (Rule::kDirection) {
      slot.grad[i] = gradient;
    } else {
      static_cast<float*>(slot.master)[i] = w;
      if (slot.param != nullptr) store_as(slot.param, slot.param_dtype, i, w);
    }
  }
}

// Four elements of a state, the first `count` of which exist.
DS_DEVICE void decode(float (&x)[kEach], DType dtype, const void* state, const float* scale, i64 i, i64 count,
                      bool wide) {
  if (!is_coded(dtype)) {
    DS_UNROLL for (int e = 0; e < kEach; ++e) x[e] = e < count ? load_as(state, dtype, i + e) : 0.0f;
    return;
  }
  const u8* const p = static_cast<const u8*>(state) + i;
  u32 word = 0;
  if (wide && count >= kEach) {
    word = *reinterpret_cast<const u32*>(p);
  } else {
    DS_UNROLL for (int e = 0; e < kEach; ++e) word |= e < count ? u32{p[e]} << 8 * e : 0;
  }
  const float unit = scale[i / kStateBlock];
  DS_UNROLL for (int e = 0; e < kEach; ++e) x[e] = state_codes::decode(dtype, static_cast<u8>(word >> 8 * e), unit);
}
DS_DEVICE void encode(const float (&x)[kEach], DType dtype, void* state, state_codes::Scale scale, i64 i, i64 count,
                      bool wide) {
  u8* const p = static_cast<u8*>(state) + i;
  u32 word = 0;
  DS_UNROLL for (int e = 0; e < kEach; ++e) word |= u32{state_codes::encode(dtype, x[e], scale)} << 8 * e;
  if (wide && count >= kEach) {
    *reinterpret_cast<u32*>(p) = word;
  } else {
    DS_UNROLL for (int e = 0; e < kEach; ++e) {
      if (e < count) p[e] = static_cast<u8>(word >> 8 * e);
    }
  }
}

// The random bits for stochastic rounding of elements i .. i + 3 of a tensor: half a word each.
DS_DEVICE void random_halves(u32 (&x)[kEach], const RngKey& key, i64 i, bool high) {
  const PhiloxBlock words = key.block(static_cast<u64>(i) / 4);
  DS_UNROLL for (int e = 0; e < kEach; ++e) {
    const u32 word = words[static_cast<size_t>(e)];
    x[e] = high ? word >> 16 : word & 0xFFFFu;
  }
}
DS_DEVICE void round_some(bf16* p, const float (&x)[kEach], const u32 (&random)[kEach], i64 count) {
  DS_UNROLL for (int e = 0; e < kEach; ++e) {
    if (e < count) p[e] = round_stochastically(x[e], random[e]);
  }
}

// The same if states, or masters, are not fp32. A warp processes a block of 256 elements at a time, a thread two groups
// of four.
template <class Rule>
__global__ void update_decoded_kernel(const UpdateBatch batch, const GradVerdict* verdict, const Constants k,
                                      bool scaled, RngKey rng, bool stochastic) {
  constexpr int kStates = Rule::kStates, kGroups = kStateBlock / (kWarp * kEach);
  static_assert(kUpdateChunk % kStateBlock == 0);
  if (verdict->finite == 0) return;
  const u32 chunk = block_index().x;
  const int which = batch.slot_of(chunk), lane = thread_index() % kWarp;
  const UpdateSlot& slot = batch.slots[which];
  const float scale = scaled ? verdict->grad_scale : slot.factor != nullptr ? *slot.factor : 1.0f;
  const i64 begin = i64{chunk - batch.first_chunk[which]} * kUpdateChunk;
  const i64 end = begin + kUpdateChunk < slot.n ? begin + kUpdateChunk : slot.n;
  rng.site = slot.site;
  for (i64 at = begin + thread_index() / kWarp * kStateBlock; at < end; at += kThreads / kWarp * kStateBlock) {
    float s[kStates + 1][kGroups][kEach];
    u32 largest[kStates + 1] = {};
    for (int h = 0; h < kGroups; ++h) {
      const i64 i = at + (h * kWarp + lane) * kEach, count = end - i;
      float w[kEach], g[kEach];
      load_some(g, slot.grad + i, count, slot.wide);
      DS_UNROLL for (int e = 0; e < kEach; ++e) w[e] =
          e < count ? load_as(slot.master, slot.master_dtype, i + e) : 0.0f;
      for (int j = 0; j < kStates; ++j)
        decode(s[j][h], slot.state_dtypes[j], slot.states[j], slot.scales[j], count > 0 ? i : at, count, slot.wide);
      for (int e = 0; e < kEach; ++e) {
        float gradient = g[e] * scale, of[kStates + 1];
        for (int j = 0; j < kStates; ++j) of[j] = s[j][h][e];
        Rule::apply(w[e], gradient, of, slot.weight_decay, k);
        for (int j = 0; j < kStates; ++j) {
          s[j][h][e] = e < count ? of[j] : 0.0f;
          const u32 bits = std::bit_cast<u32>(s[j][h][e]) & 0x7FFFFFFFu;
          largest[j] = bits > largest[j] ? bits : largest[j];
        }
        g[e] = gradient;
      }
      if constexpr (Rule::kDirection) {
        store_some(slot.grad + i, g, count, slot.wide);
      } else {
        if (stochastic && slot.master_dtype == DType::BF16) {
          u32 random[kEach];
          random_halves(random, {rng.seed, slot.site + kMasterSite, rng.step}, slot.first + i, true);
          round_some(static_cast<bf16*>(slot.master) + i, w, random, count);
        } else {
          store_some_as(slot.master, slot.master_dtype, i, w, count, slot.wide);
        }
        if (slot.param != nullptr) store_some_as(slot.param, slot.param_dtype, i, w, count, slot.wide);
      }
    }
    for (int j = 0; j < kStates; ++j) {
      for (int mask = kWarp / 2; mask > 0; mask /= 2) {
        const u32 other = warp_shuffle_xor(largest[j], mask);
        largest[j] = other > largest[j] ? other : largest[j];
      }
      const state_codes::Scale of_block = state_codes::scale_of(largest[j]);
      const bool coded = is_coded(slot.state_dtypes[j]);
      if (coded && lane == 0) slot.scales[j][at / kStateBlock] = of_block.value;
      for (int h = 0; h < kGroups; ++h) {
        const i64 i = at + (h * kWarp + lane) * kEach, count = end - i;
        if (count <= 0) continue;
        if (coded) {
          encode(s[j][h], slot.state_dtypes[j], slot.states[j], of_block, i, count, slot.wide);
          continue;
        }
        if (slot.state_dtypes[j] != DType::BF16) {
          store_some_as(slot.states[j], slot.state_dtypes[j], i, s[j][h], count, slot.wide);
          continue;
        }
        u32 random[kEach];
        random_halves(random, rng, slot.first + i, j == 0);
        round_some(static_cast<bf16*>(slot.states[j]) + i, s[j][h], random, count);
      }
    }
  }
}

__global__ void scaled_sum_kernel(float* y, const float* x, i64 n, float a, float b, const float* factor) {
  const float of_x = factor != nullptr ? b * *factor : b;
  for (i64 i = i64{block_index().x} * kThreads + thread_index(); i < n; i += i64{grid_size().x} * kThreads) {
    const float sum = of_x * x[i];
    y[i] = a != 0 ? a * y[i] + sum : sum;
  }
}

}  // namespace

void update(std::span<const UpdateTensor> tensors, const GradVerdict* verdict, const UpdateParams& p,
            Stream& stream) noexcept {
  Context& c = context(stream);
  const Constants k = update_rules::constants_of<float>(p, [](float x) { return x; });
  update_rules::with_rule(p.rule, [&]<class Rule>(Rule) {
    const bool scaled = facts_of(p.rule).takes_gradient();
    for (std::span rest = tensors; !rest.empty();) {
      const UpdateBatch batch = next_update_batch(rest);
      launch(update_kernel<Rule>, {dim3(batch.num_chunks()), kThreads, 0}, c.stream(), batch, verdict, k, scaled);
      c.check(cudaGetLastError(), "update");
    }
    for (std::span rest = tensors; !rest.empty();) {
      const UpdateBatch batch = next_update_batch(rest, true);
      launch(update_decoded_kernel<Rule>, {dim3(batch.num_chunks()), kThreads, 0}, c.stream(), batch, verdict, k,
             scaled, p.rng, p.stochastic);
      c.check(cudaGetLastError(), "update");
    }
  });
}

void scaled_sum(TensorView y, TensorView x, float a, float b, const float* factor, Stream& stream) noexcept {
  Context& c = context(stream);
  const i64 n = y.numel();
  if (n == 0) return;
  launch(scaled_sum_kernel, {dim3(static_cast<u32>(std::min<i64>((n + kThreads - 1) / kThreads, 4096))), kThreads, 0},
         c.stream(), y.as<float>(), x.as<float>(), n, a, b, factor);
  c.check(cudaGetLastError(), "scaled_sum");
}

}  // namespace ds::cuda
