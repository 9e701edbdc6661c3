// SPDX-License-Identifier: Apache-2.0
// The calls of attention that cuDNN computes, their parts and their temporary memory: functions of shapes, for the
// engine and for predictions.

#include <algorithm>
#include <bit>

#include "cuda/attention.h"
#include "cuda/attention_cudnn.h"

namespace ds::cuda::cudnn {
namespace {

// Strides of dims of size 1 have no meaning; plans must not differ in them.
AttentionShape::Strides strides_of(const TensorView& x) noexcept {
  AttentionShape::Strides s = {x.stride[0], x.stride[1], x.stride[2]};
  if (x.dim(2) == 1) s.head = x.dim(3);
  if (x.dim(1) == 1) s.token = s.head * x.dim(2);
  if (x.dim(0) == 1) s.batch = s.token * x.dim(1);
  return s;
}

constexpr i64 round_up(i64 n, i64 unit) noexcept { return (n + unit - 1) / unit * unit; }

// At most: cuDNN 9.19 rounds lengths up to 64 or 128, depending on the engine.
i64 score_bytes(const AttentionShape& s) noexcept { return s.B * s.H * round_up(s.T, 128) * round_up(s.S, 128) * 2; }

// Statistics of slices must be aligned, too.
bool aligned(i64 rows) noexcept { return rows % 4 == 0; }

// The largest part of a call that stays below the limit, cut by batch rows or, within one, by groups; B = 0: none does.
AttentionShape largest_slice(AttentionShape s) noexcept {
  const i64 B = s.B, G = s.G, R = s.H / s.G;
  if (!s.backward || score_bytes(s) <= kMostScoreBytes) return s;
  for (s.B = B - 1; s.B > 0; --s.B) {
    if (B % s.B == 0 && aligned(s.B * s.H * s.T) && score_bytes(s) <= kMostScoreBytes) return s;
  }
  s.B = 1;
  if (B > 1 && !aligned(s.H * s.T)) return {};
  for (s.G = G - 1; s.G > 0; --s.G) {
    s.H = s.G * R;
    if (G % s.G == 0 && aligned(s.H * s.T) && score_bytes(s) <= kMostScoreBytes) return s;
  }
  return {};
}

}  // namespace

size_t AttentionShapeHash::operator()(const AttentionShape& s) const noexcept {
  u64 h = 0xCBF29CE484222325u;
  const auto mix = [&](i64 v) { h = std::rotl((h ^ static_cast<u64>(v)) * 0x9E3779B97F4A7C15u, 29); };
  for (const i64 v : {i64{s.backward}, i64{s.causal}, static_cast<i64>(s.dtype), s.B, s.T, s.S, s.H, s.G, s.D}) mix(v);
  for (const auto& x : {s.q, s.k, s.v, s.o, s.dq, s.dk, s.dv, s.dout}) {
    for (const i64 v : {x.batch, x.token, x.head}) mix(v);
  }
  return h;
}

AttentionShape shape_of(const AttentionCall& call) noexcept {
  AttentionShape s = {.backward = call.backward,
                      .causal = call.params.causal,
                      .dtype = call.q.dtype,
                      .B = call.q.dim(0),
                      .T = call.q.dim(1),
                      .S = call.k.dim(1),
                      .H = call.q.dim(2),
                      .G = call.k.dim(2),
                      .D = call.q.dim(3),
                      .q = strides_of(call.q),
                      .k = strides_of(call.k),
                      .v = strides_of(call.v),
                      .o = strides_of(call.o),
                      .dq = {},
                      .dk = {},
                      .dv = {},
                      .dout = {}};
  if (call.backward) {
    s.dq = strides_of(call.dq);
    s.dk = strides_of(call.dk);
    s.dv = strides_of(call.dv);
    s.dout = strides_of(call.dout);
  }
  return s;
}

const char* refusal(const AttentionCall& call) noexcept {
  const AttentionShape s = shape_of(call);
  if (s.dtype != DType::BF16 && s.dtype != DType::F16) return "dtype";
  if (s.D % 8 != 0 || s.D < 8 || s.D > 128) return "a head dim that is no multiple of 8 up to 128";
  if (call.v.dim(3) != s.D) return "values of another head dim";
  if (call.params.dropout > 0) return "dropout";
  if (call.params.window > 0) return "window";
  if (call.params.blocks.sparse()) return "sparse layout";
  if (call.params.pages != nullptr) return "pages";
  if (!call.backward && attention::is_by_row(call.params, call.k)) return "rows that must not depend on each other";
  if (call.params.softcap > 0) return "soft cap";
  if (call.params.bias != nullptr) return "bias by relative position";
  if (call.params.documents != nullptr) return "documents";
  if (s.B == 0 || s.H == 0 || s.S == 0 || s.T <= 1) return "lengths";
  if (s.causal && s.T > s.S) return "rows without keys";
  const auto whole = [](const TensorView& x) { return attention::has_whole_chunks(x); };
  if (!whole(call.q) || !whole(call.k) || !whole(call.v) || !whole(call.o)) return "alignment";
  if (call.backward && (!whole(call.dq) || !whole(call.dk) || !whole(call.dv) || !whole(call.dout))) return "alignment";
  if (reinterpret_cast<std::uintptr_t>(call.lse.data) % 16 != 0) return "alignment";
  if (!call.lse.contiguous()) return "strided statistics";
  if (largest_slice(s).B == 0) return "memory";
  return nullptr;
}

AttentionSlices slices_of(const AttentionShape& shape) {
  AttentionSlices x = {.shape = largest_slice(shape), .slices = {}};
  if (x.shape.B == 0) return x;
  for (i64 batch = 0; batch < shape.B; batch += x.shape.B) {
    for (i64 group = 0; group < shape.G; group += x.shape.G) x.slices.push_back({batch, group});
  }
  return x;
}

i64 workspace_bytes(const AttentionShape& s, int compute_capability) noexcept {
  const bool hopper = compute_capability >= 9;
  if (!s.backward) return hopper ? 256 : 0;
  // The scores, and gradients of keys and values for all heads where heads share them.
  const i64 scores = s.B * s.H * round_up(s.T, 64) * round_up(s.S, hopper ? 128 : 64) * dtype_bytes(s.dtype),
            all_heads = s.H != s.G ? 2 * s.B * s.H * s.S * s.D * dtype_bytes(s.dtype) : 0;
  return scores + all_heads + (hopper ? 256 : 128);
}

i64 row_sums_bytes(const AttentionShape& s) noexcept {
  return s.backward ? round_up(s.B * s.H * s.T * dtype_bytes(DType::F32), 256) : 0;
}

i64 scratch_bytes(const AttentionShape& call, int compute_capability) noexcept {
  const AttentionShape s = largest_slice(call);
  return row_sums_bytes(s) + workspace_bytes(s, compute_capability);
}

}  // namespace ds::cuda::cudnn
