// SPDX-License-Identifier: Apache-2.0
// The op table that counts: by each op's contract (kernels/ops.h), what it must compute, read and write.

#include <algorithm>
#include <bit>

#include "plan/op_tally.h"

namespace ds::plan {

OpCall fold_of(TensorView dst, TensorView source, i64 sources, bool accumulate) {
  return {"fold", source.dtype, 0, dst.bytes() * (accumulate ? 2 : 1) + source.bytes() * sources};
}

namespace {

i64 bytes_of(std::initializer_list<TensorView> views) noexcept {
  i64 n = 0;
  for (const TensorView& v : views) n += v ? v.bytes() : 0;
  return n;
}
i64 bytes_if(bool wanted, const TensorView& v) noexcept { return wanted ? v.bytes() : 0; }

// Memory for the entries of a tally is all that is taken here; without it there is no plan to be had.
void count(Stream& stream, const OpCall& call) noexcept {
  if (stream.native != nullptr) static_cast<OpTally*>(stream.native)->add(call);
}

void count_product(Stream& stream, DType dtype, i64 M, i64 N, i64 K, i64 bytes) noexcept {
  count(stream, {"matmul", dtype, 2 * M * N * K, bytes, {M, N, K}});
}

void matmul(TensorView c, TensorView a, TensorView b, TensorView bias, TensorView preact, TensorView residual,
            const MatmulParams& p, Stream& stream) noexcept {
  count_product(stream, a.dtype, c.dim(0), c.dim(1), a.dim(p.trans_a ? 0 : 1),
                bytes_of({c, a, b, bias, preact, residual}) + bytes_if(p.accumulate, c));
}

void column_sum(TensorView out, TensorView x, bool accumulate, Stream& stream) noexcept {
  count(stream, {"column_sum", x.dtype, 0, bytes_of({out, x}) + bytes_if(accumulate, out)});
}

void layernorm_fwd(TensorView y, TensorView mean, TensorView rstd, TensorView x, TensorView weight, TensorView bias,
                   float, Stream& stream) noexcept {
  count(stream, {"layernorm_fwd", x.dtype, 0, bytes_of({y, mean, rstd, x, weight, bias})});
}
void layernorm_bwd(TensorView dx, TensorView dweight, TensorView dbias, TensorView dy, TensorView residual_grad,
                   TensorView x, TensorView weight, TensorView mean, TensorView rstd, Stream& stream) noexcept {
  count(stream,
        {"layernorm_bwd", x.dtype, 0, bytes_of({dx, dweight, dbias, dy, residual_grad, x, weight, mean, rstd})});
}
void rmsnorm_fwd(TensorView y, TensorView rstd, TensorView x, TensorView weight, float, Stream& stream) noexcept {
  count(stream, {"rmsnorm_fwd", x.dtype, 0, bytes_of({y, rstd, x, weight})});
}
void rmsnorm_bwd(TensorView dx, TensorView dweight, TensorView dy, TensorView residual_grad, TensorView x,
                 TensorView weight, TensorView rstd, Stream& stream) noexcept {
  count(stream, {"rmsnorm_bwd", x.dtype, 0, bytes_of({dx, dweight, dy, residual_grad, x, weight, rstd})});
}

void activation_fwd(TensorView y, TensorView x, Activation, Stream& stream) noexcept {
  count(stream, {"activation_fwd", x.dtype, 0, bytes_of({y, x})});
}
void activation_bwd(TensorView dx, TensorView dy, TensorView x, Activation, Stream& stream) noexcept {
  count(stream, {"activation_bwd", x.dtype, 0, bytes_of({dx, dy, x})});
}
void swiglu_fwd(TensorView y, TensorView gate, TensorView up, Stream& stream) noexcept {
  count(stream, {"swiglu_fwd", gate.dtype, 0, bytes_of({y, gate, up})});
}
void swiglu_bwd(TensorView dgate, TensorView dup, TensorView dy, TensorView gate, TensorView up,
                Stream& stream) noexcept {
  count(stream, {"swiglu_bwd", gate.dtype, 0, bytes_of({dgate, dup, dy, gate, up})});
}

void rope(TensorView y, TensorView x, TensorView, TensorView, TensorView positions, const RopeParams&,
          Stream& stream) noexcept {
  const i64 angles = positions.numel() * x.dim(3) * 4;  // a row of cos and of sin for each position
  count(stream, {"rope", x.dtype, 0, bytes_of({y, x, positions}) + angles});
}

void embedding_fwd(TensorView y, TensorView table, TensorView ids, i64, bool accumulate, Stream& stream) noexcept {
  const i64 looked_up = y.numel() * dtype_bytes(table.dtype);
  count(stream, {"embedding_fwd", table.dtype, 0, looked_up + bytes_of({y, ids}) + bytes_if(accumulate, y)});
}
void embedding_bwd(TensorView dtable, TensorView dy, TensorView ids, i64, bool accumulate, Stream& stream) noexcept {
  // To add, it reads and writes the rows that were looked up; without, it writes all.
  const i64 rows = std::min(ids.numel(), dtable.dim(0)), added = 2 * rows * dtable.dim(1) * dtype_bytes(dtable.dtype);
  count(stream, {"embedding_bwd", dy.dtype, 0, bytes_of({dy, ids}) + (accumulate ? added : dtable.bytes())});
}

void route(TensorView chosen, TensorView weights, TensorView scores, TensorView logits, TensorView bias,
           TensorView noisy, const RouterParams&, Stream& stream) noexcept {
  count(stream, {"route", logits.dtype, 0, bytes_of({chosen, weights, scores, logits, bias, noisy})});
}
// A score for each choice.
void weigh_choices(TensorView weights, TensorView chosen, TensorView, const RouterParams&, Stream& stream) noexcept {
  count(stream, {"weigh_choices", weights.dtype, 0, bytes_of({weights, weights, chosen})});
}
void route_grad(TensorView dlogits, TensorView dweights, TensorView chosen, TensorView scores, TensorView logits,
                TensorView score_grad, TensorView stats, TensorView targets, TensorView factor, const RouterParams&,
                const RouterLossParams& p, Stream& stream) noexcept {
  const bool losses = static_cast<bool>(stats);
  i64 bytes = bytes_of({dlogits, dweights, chosen, scores});
  if (losses) bytes += bytes_of({score_grad, stats, targets, factor}) + bytes_if(p.z != 0, logits);
  count(stream, {"route_grad", scores.dtype, 0, bytes});
}
void router_stats(TensorView stats, TensorView chosen, TensorView kept, TensorView scores, TensorView logits,
                  TensorView targets, const RouterParams&, const RouterLossParams&, Stream& stream) noexcept {
  count(stream, {"router_stats", scores.dtype, 0, bytes_of({stats, chosen, kept, scores, logits, targets})});
}
void router_loss(TensorView loss, TensorView score_grad, TensorView stats, TensorView counts, i64,
                 const RouterLossParams&, Stream& stream) noexcept {
  count(stream, {"router_loss", stats.dtype, 0, bytes_of({loss, score_grad, stats, counts})});
}
void balance_experts(TensorView bias, TensorView counts, float, const GradVerdict*, Stream& stream) noexcept {
  count(stream, {"balance_experts", bias.dtype, 0, bytes_of({bias, bias, counts})});
}
void drop_choices(TensorView kept, TensorView chosen, TensorView priority, const CapacityParams&,
                  Stream& stream) noexcept {
  count(stream, {"drop_choices", chosen.dtype, 0, bytes_of({kept, chosen, priority})});
}
void add_noise(TensorView y, TensorView x, NoiseKind kind, float, RngKey, i64, Stream& stream) noexcept {
  count(stream, {"add_noise", y.dtype, 0, y.bytes() + bytes_if(kind != NoiseKind::Uniform, x)});
}
void sort_choices(TensorView offsets, TensorView places, TensorView tokens, TensorView choices, TensorView chosen, i64,
                  Stream& stream) noexcept {
  count(stream, {"sort_choices", chosen.dtype, 0, bytes_of({offsets, places, tokens, choices, chosen})});
}
// As if every choice had a place, and every row a group: only the device knows better.
void combine_rows(TensorView y, TensorView x, TensorView places, TensorView weights, TensorView residual,
                  Stream& stream) noexcept {
  const i64 read = places ? places.numel() * x.dim(1) * dtype_bytes(x.dtype) : x.bytes();
  count(stream, {"combine_rows", x.dtype, 0, read + bytes_of({y, places, weights, residual})});
}
void combine_rows_grad(TensorView dx, TensorView dweights, TensorView dy, TensorView x, TensorView places,
                       TensorView weights, Stream& stream) noexcept {
  const i64 rows = places ? places.numel() : x.dim(0);
  const i64 moved = rows * dy.dim(1) * (dtype_bytes(dx.dtype) + (dweights ? dtype_bytes(x.dtype) : 0));
  count(stream, {"combine_rows_grad", x.dtype, 0, moved + bytes_of({dweights, dy, places, weights})});
}
void grouped_matmul(TensorView c, TensorView a, TensorView b, TensorView offsets, bool, Stream& stream) noexcept {
  count(stream, {"grouped_matmul",
                 a.dtype,
                 2 * c.dim(0) * c.dim(1) * a.dim(1),
                 bytes_of({c, a, b, offsets}),
                 {b.dim(0), c.dim(1), a.dim(1)}});
}
void grouped_matmul_grad(TensorView c, TensorView a, TensorView b, TensorView offsets, bool accumulate,
                         Stream& stream) noexcept {
  count(stream, {"grouped_matmul_grad",
                 a.dtype,
                 2 * a.dim(0) * a.dim(1) * b.dim(1),
                 bytes_of({c, a, b, offsets}) + bytes_if(accumulate, c),
                 {c.dim(0), a.dim(1), b.dim(1)}});
}

void grouped_bias(TensorView y, TensorView bias, TensorView offsets, Stream& stream) noexcept {
  count(stream, {"grouped_bias", y.dtype, 0, bytes_of({y, y, bias, offsets})});
}
void grouped_bias_grad(TensorView dbias, TensorView dy, TensorView weights, TensorView offsets, bool accumulate,
                       Stream& stream) noexcept {
  count(stream,
        {"grouped_bias_grad", dy.dtype, 0, bytes_of({dbias, dy, weights, offsets}) + bytes_if(accumulate, dbias)});
}

// The FLOPs of so many products over the head dim of queries and keys, and over that of values.
i64 attention_flops(const TensorView& q, const TensorView& k, const TensorView& v, const AttentionParams& p,
                    i64 key_products, i64 value_products) noexcept {
  const i64 per_pair = 2 * (key_products * q.dim(3) + value_products * v.dim(3));
  return per_pair * q.dim(0) * visible_pairs(q.dim(2), q.dim(1), k.dim(1), p);
}
std::array<i64, 3> attention_shape(const TensorView& q, const TensorView& k) noexcept {
  return {q.dim(0) * q.dim(2), q.dim(1), k.dim(1)};
}
// With sequences: each reads its own keys, with their scales if they are codes. Their arrays are the host's here.
void attention_fwd(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v, const AttentionParams& p,
                   Stream& stream) noexcept {
  if (p.sequences) {
    i64 flops = 0, keys = 0;
    for (i64 s = 0; s < p.sequences.count; ++s) {
      q.shape[1] = p.sequences.begins[s + 1] - p.sequences.begins[s];
      k.shape[1] = p.sequences.keys[s];
      flops += attention_flops(q, k, v, p.of_sequence(s), 1, 1);
      keys += k.dim(1);
    }
    q.shape[1] = p.sequences.begins[p.sequences.count];
    const i64 scale = k.dtype == DType::I8 ? 2 * i64{sizeof(float)} : 0;
    const i64 row = k.dim(2) * ((k.dim(3) + v.dim(3)) * dtype_bytes(k.dtype) + scale);
    return count(stream,
                 {"attention_fwd", q.dtype, flops, bytes_of({o, lse, q}) + keys * row, {q.dim(2), q.dim(1), keys}});
  }
  count(stream, {"attention_fwd", q.dtype, attention_flops(q, k, v, p, 1, 1), bytes_of({o, lse, q, k, v}),
                 attention_shape(q, k)});
}
void attention_bwd(TensorView dq, TensorView dk, TensorView dv, TensorView dout, TensorView q, TensorView k,
                   TensorView v, TensorView o, TensorView lse, const AttentionParams& p, Stream& stream) noexcept {
  count(stream, {"attention_bwd", q.dtype, attention_flops(q, k, v, p, 3, 2),
                 bytes_of({dq, dk, dv, dout, q, k, v, o, lse}), attention_shape(q, k)});
}
void attention_merge(TensorView o, TensorView lse, TensorView o_part, TensorView lse_part, bool first,
                     Stream& stream) noexcept {
  count(stream, {"attention_merge", o_part.dtype, 0,
                 bytes_of({o, lse, o_part, lse_part}) + bytes_if(!first, o) + bytes_if(!first, lse)});
}

i64 evoformer_flops(const TensorView& q, i64 per_pair) noexcept { return per_pair * q.numel() * q.dim(1); }
std::array<i64, 3> evoformer_shape(const TensorView& q) noexcept { return {q.dim(0) * q.dim(2), q.dim(1), q.dim(1)}; }
void evoformer_attention_fwd(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v, TensorView bias1,
                             TensorView bias2, const EvoformerParams&, Stream& stream) noexcept {
  count(stream, {"evoformer_attention_fwd", q.dtype, evoformer_flops(q, 4), bytes_of({o, lse, q, k, v, bias1, bias2}),
                 evoformer_shape(q)});
}
void evoformer_attention_bwd(TensorView dq, TensorView dk, TensorView dv, TensorView dbias1, TensorView dbias2,
                             TensorView dout, TensorView q, TensorView k, TensorView v, TensorView o, TensorView lse,
                             TensorView bias1, TensorView bias2, const EvoformerParams&, Stream& stream) noexcept {
  count(stream, {"evoformer_attention_bwd", q.dtype, evoformer_flops(q, 10),
                 bytes_of({dq, dk, dv, dbias1, dbias2, dout, q, k, v, o, lse, bias1, bias2}), evoformer_shape(q)});
}

void linear_cross_entropy(TensorView losses, TensorView dh, TensorView dweight, TensorView dbias, TensorView h,
                          TensorView weight, TensorView bias, TensorView targets, TensorView z,
                          const CrossEntropyParams& p, Stream& stream) noexcept {
  const i64 R = h.dim(0), C = h.dim(1), V = weight.dim(0), work = dtype_bytes(h.dtype);
  const bool gradient = dh || dweight || dbias;
  for (i64 begin = 0; begin < R; begin += p.chunk_tokens) {
    const i64 rows = std::min(p.chunk_tokens, R - begin);
    const i64 input = rows * C * work, logits = rows * V * dtype_bytes(z.dtype), dlogits = rows * V * work;
    count_product(stream, h.dtype, rows, V, C, logits + input + bytes_of({weight, bias}));
    count(stream, {"linear_cross_entropy", h.dtype, 0, logits + (gradient ? dlogits : 0) + rows * 8});
    if (dh) count_product(stream, h.dtype, rows, C, V, rows * C * dtype_bytes(dh.dtype) + dlogits + weight.bytes());
    if (dweight)
      count_product(stream, h.dtype, V, C, rows,
                    dweight.bytes() + dlogits + input + bytes_if(p.add_dweight || begin > 0, dweight));
    if (dbias) count(stream, {"column_sum", h.dtype, 0, dbias.bytes() + dlogits + bytes_if(begin > 0, dbias)});
  }
  static_cast<void>(losses), static_cast<void>(targets);  // the eight bytes of a row
}

void vocab_max(TensorView max, TensorView z, Stream& stream) noexcept {
  count(stream, {"vocab_max", z.dtype, 0, bytes_of({max, z})});
}
void vocab_sums(TensorView sum, TensorView at_target, TensorView z, TensorView max, TensorView targets, i64,
                const CrossEntropyParams&, Stream& stream) noexcept {
  count(stream, {"vocab_sums", z.dtype, 0, bytes_of({sum, at_target, z, max, targets})});
}
void vocab_grad(TensorView losses, TensorView dz, TensorView z, TensorView sum, TensorView at_target, TensorView max,
                TensorView targets, i64, const CrossEntropyParams&, Stream& stream) noexcept {
  count(stream, {"vocab_grad", dz ? dz.dtype : z.dtype, 0,
                 bytes_of({losses, dz, sum, at_target, max, targets}) + (dz ? z.bytes() : 0)});
}

void sample(TensorView tokens, TensorView most_likely, TensorView logits, const Draw*, LogitChange*,
            Stream& stream) noexcept {
  count(stream, {"sample", logits.dtype, 0, bytes_of({tokens, most_likely, logits})});
}

void dropout(TensorView y, TensorView x, float, RngKey, i64, Stream& stream) noexcept {
  count(stream, {"dropout", x.dtype, 0, bytes_of({y, x})});
}
void add(TensorView y, TensorView a, TensorView b, Stream& stream) noexcept {
  count(stream, {"add", a.dtype, 0, bytes_of({y, a, b})});
}
void bias_residual(TensorView y, TensorView x, TensorView bias, TensorView residual, Stream& stream) noexcept {
  count(stream, {"bias_residual", y.dtype, 0, bytes_of({y, x, bias, residual})});
}
void cast(TensorView y, TensorView x, Stream& stream) noexcept {
  count(stream, {"cast", x.dtype, 0, bytes_of({y, x})});
}
void append_keys(TensorView cache, TensorView x, const AttentionParams&, Stream& stream) noexcept {
  const i64 scales = cache.dtype == DType::I8 ? x.numel() / x.dim(3) * i64{sizeof(float)} : 0;
  count(stream, {"append_keys", x.dtype, 0, x.bytes() + x.numel() * dtype_bytes(cache.dtype) + scales});
}
void copy_heads(TensorView y, TensorView x, Stream& stream) noexcept {
  count(stream, {"copy_heads", x.dtype, 0, bytes_of({y, x})});
}
void fold(TensorView dst, std::span<const TensorView> sources, bool accumulate, Stream& stream) noexcept {
  OpCall call = fold_of(dst, sources.front(), 1, accumulate);
  for (const TensorView& s : sources.subspan(1)) call.bytes += s.bytes();
  count(stream, call);
}

void quantize(TensorView codes, TensorView scales, TensorView x, TensorView error, CodeFormat, ErrorFeedback,
              Stream& stream) noexcept {
  count(stream, {"quantize", x.dtype, 0, bytes_of({codes, scales, x, error, error})});
}
void quantize_signs(TensorView codes, TensorView scale, TensorView y, TensorView max_abs, TensorView sum, i64,
                    Stream& stream) noexcept {
  count(stream, {"quantize_signs", y.dtype, 0, bytes_of({codes, scale, y, y, max_abs, sum})});
}
void dequantize(TensorView y, TensorView codes, TensorView scales, CodeFormat, Stream& stream) noexcept {
  count(stream, {"dequantize", y.dtype, 0, bytes_of({y, codes, scales})});
}
void dequantize_fold(TensorView dst, TensorView codes, TensorView scales, bool accumulate, float, CodeFormat,
                     Stream& stream) noexcept {
  count(stream, {"dequantize_fold", dst.dtype, 0, bytes_of({dst, codes, scales}) + bytes_if(accumulate, dst)});
}

void quantize_fp8(TensorView codes, TensorView scales, TensorView x, Fp8Blocks, bool, Stream& stream) noexcept {
  count(stream, {"quantize_fp8", x.dtype, 0, bytes_of({codes, scales, x})});
}
// Under E4M3, whatever the formats: their rates are equal.
void matmul_fp8(TensorView c, TensorView a, TensorView a_scales, TensorView b, TensorView b_scales, TensorView bias,
                TensorView residual, const Fp8MatmulParams&, Stream& stream) noexcept {
  count_product(stream, DType::F8E4M3, c.dim(0), c.dim(1), a.dim(1),
                bytes_of({c, a, a_scales, b, b_scales, bias, residual}));
}

void max_abs_fp8(TensorView maxima, TensorView x, i64, Stream& stream) noexcept {
  count(stream, {"max_abs_fp8", x.dtype, 0, bytes_of({maxima, x})});
}
void encode_fp8(TensorView codes, TensorView x, TensorView, i64, Stream& stream) noexcept {
  count(stream, {"encode_fp8", x.dtype, 0, bytes_of({codes, x})});
}
void decode_fp8(TensorView x, TensorView codes, TensorView, i64, Stream& stream) noexcept {
  count(stream, {"decode_fp8", x.dtype, 0, bytes_of({x, codes})});
}

void max_abs(TensorView, TensorView x, Stream& stream) noexcept { count(stream, {"max_abs", x.dtype, 0, x.bytes()}); }
void nonzero_rows(TensorView flags, TensorView x, Stream& stream) noexcept {
  count(stream, {"nonzero_rows", x.dtype, 0, bytes_of({flags, x})});
}
void sum_squares(TensorView, TensorView x, TensorView, Stream& stream) noexcept {
  count(stream, {"sum_squares", x.dtype, 0, x.bytes()});
}
void sum(TensorView, TensorView x, double, Stream& stream) noexcept { count(stream, {"sum", x.dtype, 0, x.bytes()}); }
void judge(GradVerdict*, TensorView, TensorView, const JudgeParams&, Stream& stream) noexcept {
  count(stream, {"judge", DType::F32, 0, 0});
}

void scaled_sum(TensorView y, TensorView x, float a, float, const float*, Stream& stream) noexcept {
  count(stream, {"scaled_sum", DType::F32, 0, x.bytes() + (a != 0 ? 2 : 1) * y.bytes()});
}
void norm_ratios(TensorView factors, TensorView, TensorView, float, float, Stream& stream) noexcept {
  count(stream, {"norm_ratios", DType::F32, 0, factors.bytes()});
}
void update(std::span<const UpdateTensor> tensors, const GradVerdict*, const UpdateParams& p, Stream& stream) noexcept {
  i64 bytes = 0;
  for (const UpdateTensor& t : tensors) {
    bytes += t.grad.bytes() + 2 * t.master.bytes();
    for (const TensorView& state : t.states) {
      if (state) bytes += 2 * (state.bytes() + (is_coded(state.dtype) ? 4 * state_blocks(state.numel()) : 0));
    }
    if (t.param && t.param.data != t.master.data) bytes += t.param.bytes();
  }
  count(stream, {facts_of(p.rule).optimizer, DType::F32, 0, bytes});
}

constexpr OpTable kCountingOps = {.name = "counting",
                                  .matmul = matmul,
                                  .column_sum = column_sum,
                                  .layernorm_fwd = layernorm_fwd,
                                  .layernorm_bwd = layernorm_bwd,
                                  .rmsnorm_fwd = rmsnorm_fwd,
                                  .rmsnorm_bwd = rmsnorm_bwd,
                                  .activation_fwd = activation_fwd,
                                  .activation_bwd = activation_bwd,
                                  .swiglu_fwd = swiglu_fwd,
                                  .swiglu_bwd = swiglu_bwd,
                                  .rope = rope,
                                  .embedding_fwd = embedding_fwd,
                                  .embedding_bwd = embedding_bwd,
                                  .route = route,
                                  .weigh_choices = weigh_choices,
                                  .route_grad = route_grad,
                                  .router_stats = router_stats,
                                  .router_loss = router_loss,
                                  .balance_experts = balance_experts,
                                  .drop_choices = drop_choices,
                                  .add_noise = add_noise,
                                  .sort_choices = sort_choices,
                                  .combine_rows = combine_rows,
                                  .combine_rows_grad = combine_rows_grad,
                                  .grouped_matmul = grouped_matmul,
                                  .grouped_matmul_grad = grouped_matmul_grad,
                                  .grouped_bias = grouped_bias,
                                  .grouped_bias_grad = grouped_bias_grad,
                                  .attention_fwd = attention_fwd,
                                  .attention_bwd = attention_bwd,
                                  .attention_merge = attention_merge,
                                  .evoformer_attention_fwd = evoformer_attention_fwd,
                                  .evoformer_attention_bwd = evoformer_attention_bwd,
                                  .linear_cross_entropy = linear_cross_entropy,
                                  .vocab_max = vocab_max,
                                  .vocab_sums = vocab_sums,
                                  .vocab_grad = vocab_grad,
                                  .sample = sample,
                                  .dropout = dropout,
                                  .add = add,
                                  .bias_residual = bias_residual,
                                  .cast = cast,
                                  .copy_heads = copy_heads,
                                  .append_keys = append_keys,
                                  .fold = fold,
                                  .quantize = quantize,
                                  .quantize_signs = quantize_signs,
                                  .dequantize = dequantize,
                                  .dequantize_fold = dequantize_fold,
                                  .quantize_fp8 = quantize_fp8,
                                  .matmul_fp8 = matmul_fp8,
                                  .max_abs_fp8 = max_abs_fp8,
                                  .encode_fp8 = encode_fp8,
                                  .decode_fp8 = decode_fp8,
                                  .max_abs = max_abs,
                                  .nonzero_rows = nonzero_rows,
                                  .sum_squares = sum_squares,
                                  .sum = sum,
                                  .judge = judge,
                                  .scaled_sum = scaled_sum,
                                  .norm_ratios = norm_ratios,
                                  .update = update};

}  // namespace

const OpTable& counting_ops() noexcept { return kCountingOps; }

i64 visible_pairs(i64 queries, i64 keys, bool causal, i64 window) noexcept {
  // Query i has the place x = i + keys - queries + 1 behind the last key that it may see; it sees the keys from
  // max(0, x - window) to before max(0, x), or to before `keys`.
  const auto triangle = [](i64 n) { return n > 0 ? n * (n + 1) / 2 : 0; };
  const i64 before = keys - queries;
  const i64 ends = causal ? triangle(keys) - triangle(before) : queries * keys;
  return window > 0 ? ends - (triangle(keys - window) - triangle(before - window)) : ends;
}

namespace {

// The number of keys [begin, end) of the sequence that are in blocks of this row of a layout.
i64 keys_there(const u64* bits, i64 block, i64 begin, i64 end) noexcept {
  if (begin >= end) return 0;
  const auto has = [&](i64 b) { return static_cast<i64>(bits[b / 64] >> (b % 64) & 1); };
  const i64 first = begin / block, last = (end - 1) / block;
  if (first == last) return has(first) * (end - begin);
  i64 whole = 0;
  for (i64 b = first + 1; b < last;) {
    const i64 n = std::min(64 - b % 64, last - b);
    const u64 some = bits[b / 64] >> (b % 64);
    whole += std::popcount(n == 64 ? some : some & ((u64{1} << n) - 1));
    b += n;
  }
  return has(first) * ((first + 1) * block - begin) + whole * block + has(last) * (end - last * block);
}

i64 pairs_of_layout(const AttentionParams& p, i64 head, i64 T, i64 S) noexcept {
  const AttentionBlocks& blocks = p.blocks;
  const i64 block = blocks.block, key0 = p.grid.col0, window = p.window;
  const auto begin_of = [&](i64 i) { return key0 + (window > 0 ? std::max<i64>(0, i + S - T - window + 1) : 0); };
  const auto end_of = [&](i64 i) { return key0 + (p.causal ? std::clamp<i64>(i + S - T + 1, 0, S) : S); };
  i64 pairs = 0;
  for (i64 i = 0; i < T;) {
    const i64 query = (p.grid.row0 + i) / block, next = std::min(T, (query + 1) * block - p.grid.row0);
    const u64* const bits = blocks.keys_of(head, query);
    // Keys that all rows of the block see are counted once.
    const i64 begin = begin_of(next - 1), end = end_of(i);
    if (begin < end) {
      pairs += (next - i) * keys_there(bits, block, begin, end);
      for (; i < next; ++i)
        pairs += keys_there(bits, block, begin_of(i), begin) + keys_there(bits, block, end, end_of(i));
    } else {
      for (; i < next; ++i) pairs += keys_there(bits, block, begin_of(i), end_of(i));
    }
  }
  return pairs;
}

}  // namespace

i64 visible_pairs(i64 heads, i64 queries, i64 keys, const AttentionParams& p) noexcept {
  if (!p.blocks.sparse()) return heads * visible_pairs(queries, keys, p.causal, p.window);
  if (p.blocks.layouts == 1) return heads * pairs_of_layout(p, 0, queries, keys);
  i64 pairs = 0;
  for (i64 h = 0; h < heads; ++h) pairs += pairs_of_layout(p, p.grid.head0 + h, queries, keys);
  return pairs;
}

}  // namespace ds::plan
