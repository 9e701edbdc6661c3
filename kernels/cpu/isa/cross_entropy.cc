// SPDX-License-Identifier: Apache-2.0
// Linear layer and softmax cross-entropy, a chunk of tokens at a time: logits in fp32 or the work dtype, then each row
// becomes, in place, a row of its gradient in the work dtype, which both backward products read. A vocabulary in parts
// takes the same steps, one op for each.

#include <cmath>

#include "cpu/isa/kernels.h"
#include "cpu/isa/softmax.h"
#include "cpu/loops.h"

namespace ds::cpu::DS_ISA_NAMESPACE {
namespace {

// The sum of z - top, computed like row_sum.
template <class Z>
float row_total(const Z* z, i64 V, float top) noexcept {
  Vec total = zero(), partial = zero();
  i64 count = 0;
  for_vectors(0, V, [&](i64 j, auto n) {
    Vec x = load(z + j, n) - broadcast(top);
    if constexpr (!std::is_same_v<decltype(n), AllLanes>) x = select(first(n), x, zero());
    partial = partial + x;
    if (++count % 64 == 0) total = total + partial, partial = zero();
  });
  return reduce_add(total + partial);
}

// A row part's contribution to at_target; own: the position of the target, or any outside.
template <class Z>
float row_hit(const Z* z, i64 V, float top, i64 own, float smoothing, i64 vocab) noexcept {
  const float hit = own >= 0 && own < V ? to_float(z[own]) - top : 0;
  if (smoothing == 0) return hit;
  return (1 - smoothing) * hit + smoothing / static_cast<float>(vocab) * row_total(z, V, top);
}

float row_loss(float sum, float at_target, float top, float z_loss) noexcept {
  const float log_sum = std::log(sum), loss = log_sum - at_target;
  return z_loss == 0 ? loss : loss + z_loss * (top + log_sum) * (top + log_sum);
}

// dz = grad_scale * ((1 + 2 z_loss lse) e^(z - top)/sum - (1 - smoothing) onehot(own) - smoothing/vocab). dz may start
// at the same address as z: each element is written after it has been read, and T is no wider than Z.
template <class T, class Z>
void row_gradient(T* dz, const Z* z, i64 V, float top, float sum, i64 own, i64 vocab,
                  const CrossEntropyParams& p) noexcept {
  const float of_softmax = p.z_loss == 0 ? 1.0f : 1 + 2 * p.z_loss * (top + std::log(sum));
  const float each = p.label_smoothing / static_cast<float>(vocab);
  const bool here = own >= 0 && own < V;
  const float at_own = here ? std::exp(to_float(z[own]) - top) : 0;
  const Vec scale = broadcast(p.grad_scale * of_softmax / sum), less = broadcast(p.grad_scale * each);
  for_vectors(0, V, [&](i64 j, auto n) { store(dz + j, exp(load(z + j, n) - broadcast(top)) * scale - less, n); });
  if (here) dz[own] = from_float<T>(p.grad_scale * (of_softmax * at_own / sum - (1 - p.label_smoothing) - each));
}

// Calls f(E{}, Z{}) with the types of the gradients and of the logits: fp32, or the same.
template <class F>
void with_types(DType gradient, DType logits, F&& f) noexcept {
  with_work_type(gradient, [&]<class E>(E) { logits == DType::F32 ? f(E{}, float{}) : f(E{}, E{}); });
}

// The op, chunk by chunk: products, then losses and gradients of the rows (softmax(z, begin)), then column sums.
template <class Softmax>
void in_chunks(MatmulFn product, decltype(OpTable::column_sum) sum_columns, TensorView dh, TensorView dweight,
               TensorView dbias, TensorView h, TensorView weight, TensorView bias, TensorView logits,
               const CrossEntropyParams& p, Stream& stream, Softmax&& softmax) noexcept {
  const i64 T = h.dim(0), V = weight.dim(0);
  i64 begin = 0;
  do {  // at least once: without tokens dweight and dbias are zero
    const i64 rows = std::min(p.chunk_tokens, T - begin);
    const TensorView z = TensorView::of(logits.data, logits.dtype, {rows, V});
    const TensorView dz = gradient_rows(z, h.dtype);
    product(z, h.rows(begin, rows), weight, bias, {}, {}, {.trans_b = true, .rowwise = p.rowwise}, stream);
    softmax(z, begin);
    if (dh) product(dh.rows(begin, rows), dz, weight, {}, {}, {}, {}, stream);
    if (dweight) {
      product(dweight, dz, h.rows(begin, rows), {}, {}, {}, {.trans_a = true, .accumulate = p.add_dweight || begin > 0},
              stream);
    }
    if (dbias) sum_columns(dbias, dz, begin > 0, stream);
    begin += rows;
  } while (begin < T);
}

}  // namespace

void linear_cross_entropy_by(MatmulFn product, TensorView losses, TensorView dh, TensorView dweight, TensorView dbias,
                             TensorView h, TensorView weight, TensorView bias, TensorView targets, TensorView logits,
                             const CrossEntropyParams& p, Stream& stream) noexcept {
  const i64 V = weight.dim(0);
  const bool gradient = dh || dweight || dbias;
  const auto softmax = [&](TensorView z, i64 begin) {
    with_types(h.dtype, z.dtype, [&]<class E, class Z>(E, Z) {
      stream.pool->parallel_for(z.dim(0), [&](i64 r, int) {
        Z* const row = z.as<Z>() + r * V;
        const i32 target = targets.as<i32>()[begin + r];
        float& loss = losses.as<float>()[begin + r];
        if (target == p.ignore_index) {
          loss = 0;
          if (gradient) std::fill_n(reinterpret_cast<E*>(row), V, E{});
          return;
        }
        const float top = row_max(row, V), sum = row_sum(row, V, top);
        loss = row_loss(sum, row_hit(row, V, top, target, p.label_smoothing, V), top, p.z_loss);
        if (gradient) row_gradient(reinterpret_cast<E*>(row), row, V, top, sum, target, V, p);
      });
    });
  };
  in_chunks(product, column_sum, dh, dweight, dbias, h, weight, bias, logits, p, stream, softmax);
}

void linear_cross_entropy_scratch_by(MatmulFn product, TensorView, TensorView dh, TensorView dweight, TensorView,
                                     TensorView h, TensorView weight, TensorView bias, TensorView, TensorView logits,
                                     const CrossEntropyParams& p, Stream& stream) noexcept {
  // Chunks are alike, except the first, which does not accumulate, and the last, which may be shorter.
  const i64 T = h.dim(0), chunk = p.chunk_tokens, rows = T > 3 * chunk ? 2 * chunk + T % chunk : T;
  in_chunks(product, nullptr, dh ? dh.rows(0, rows) : dh, dweight, {}, h.rows(0, rows), weight, bias, logits, p, stream,
            [](TensorView, i64) {});
}

void linear_cross_entropy(TensorView losses, TensorView dh, TensorView dweight, TensorView dbias, TensorView h,
                          TensorView weight, TensorView bias, TensorView targets, TensorView logits,
                          const CrossEntropyParams& p, Stream& stream) noexcept {
  linear_cross_entropy_by(matmul, losses, dh, dweight, dbias, h, weight, bias, targets, logits, p, stream);
}

void linear_cross_entropy_scratch(TensorView losses, TensorView dh, TensorView dweight, TensorView dbias, TensorView h,
                                  TensorView weight, TensorView bias, TensorView targets, TensorView logits,
                                  const CrossEntropyParams& p, Stream& stream) noexcept {
  linear_cross_entropy_scratch_by(matmul_scratch, losses, dh, dweight, dbias, h, weight, bias, targets, logits, p,
                                  stream);
}

void vocab_max(TensorView max, TensorView z, Stream& stream) noexcept {
  with_work_type(z.dtype, [&]<class Z>(Z) {
    stream.pool->parallel_for(z.dim(0),
                              [&](i64 r, int) { max.as<float>()[r] = row_max(z.as<Z>() + r * z.stride[0], z.dim(1)); });
  });
}

void vocab_sums(TensorView sum, TensorView at_target, TensorView z, TensorView max, TensorView targets, i64 first_id,
                const CrossEntropyParams& p, Stream& stream) noexcept {
  with_work_type(z.dtype, [&]<class Z>(Z) {
    stream.pool->parallel_for(z.dim(0), [&](i64 r, int) {
      const Z* const row = z.as<Z>() + r * z.stride[0];
      const i32 target = targets.as<i32>()[r];
      const i64 own = target - first_id, V = z.dim(1);
      const float top = max.as<float>()[r];
      const bool ignored = target == p.ignore_index;
      sum.as<float>()[r] = ignored ? 0 : row_sum(row, V, top);
      at_target.as<float>()[r] = ignored ? 0 : row_hit(row, V, top, own, p.label_smoothing, p.vocab);
    });
  });
}

void vocab_grad(TensorView losses, TensorView dz, TensorView z, TensorView sum, TensorView at_target, TensorView max,
                TensorView targets, i64 first_id, const CrossEntropyParams& p, Stream& stream) noexcept {
  with_types(dz ? dz.dtype : z.dtype, z.dtype, [&]<class E, class Z>(E, Z) {
    stream.pool->parallel_for(z.dim(0), [&](i64 r, int) {
      const i32 target = targets.as<i32>()[r];
      const bool ignored = target == p.ignore_index;
      const float total = sum.as<float>()[r], top = max.as<float>()[r];
      if (losses) losses.as<float>()[r] = ignored ? 0 : row_loss(total, at_target.as<float>()[r], top, p.z_loss);
      if (!dz) return;
      E* const to = dz.as<E>() + r * dz.stride[0];
      if (ignored) {
        std::fill_n(to, z.dim(1), E{});
      } else {
        row_gradient(to, z.as<Z>() + r * z.stride[0], z.dim(1), top, total, target - first_id,
                     p.label_smoothing == 0 ? 1 : p.vocab, p);
      }
    });
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
