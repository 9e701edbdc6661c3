// SPDX-License-Identifier: Apache-2.0
// Linear layer and softmax cross-entropy. A chunk of tokens at a time: logits in fp32, then each row of them becomes a
// row of their gradient in the work dtype, in place, which feeds both backward products.

#include <cmath>

#include "cpu/isa/kernels.h"
#include "cpu/loops.h"

namespace ds::cpu::DS_ISA_NAMESPACE {
namespace {

// Returns -log softmax(z)[target], and with `gradient` turns z into grad_scale * (softmax(z) - onehot(target)) of type
// T at the same place: an element is written after it has been read, as T is no wider than float.
template <class T>
float softmax_row(float* z, i64 V, i64 target, float grad_scale, bool gradient) noexcept {
  Vec top = broadcast(z[0]);
  for_vectors(0, V, [&](i64 j, auto n) {
    const Vec x = load(z + j, n);
    if constexpr (std::is_same_v<decltype(n), AllLanes>) {
      top = max(x, top);
    } else {
      top = select(first(n), max(x, top), top);
    }
  });
  const float m = reduce_max(top);
  // Partial sums of one vector per 64: the error of the sum stays near that of its terms for any vocabulary.
  Vec total = zero(), partial = zero();
  i64 count = 0;
  for_vectors(0, V, [&](i64 j, auto n) {
    Vec e = exp(load(z + j, n) - broadcast(m));
    if constexpr (!std::is_same_v<decltype(n), AllLanes>) e = select(first(n), e, zero());
    partial = partial + e;
    if (++count % 64 == 0) total = total + partial, partial = zero();
  });
  const float sum = reduce_add(total + partial);
  const float at_target = z[target];
  if (gradient) {
    T* const dz = reinterpret_cast<T*>(z);
    const Vec scale = broadcast(grad_scale / sum);
    const float p = std::exp(at_target - m) / sum;
    for_vectors(0, V, [&](i64 j, auto n) { store(dz + j, exp(load(z + j, n) - broadcast(m)) * scale, n); });
    dz[target] = from_float<T>(grad_scale * (p - 1.0f));
  }
  return (m - at_target) + std::log(sum);
}

}  // namespace

void linear_cross_entropy_by(MatmulFn product, TensorView losses, TensorView dh, TensorView dweight, TensorView dbias,
                             TensorView h, TensorView weight, TensorView bias, TensorView targets, TensorView logits,
                             const CrossEntropyParams& p, Stream& stream) noexcept {
  const i64 T = h.dim(0), V = weight.dim(0);
  const bool gradient = dh || dweight || dbias;
  i64 begin = 0;
  do {  // once at least: without tokens dweight and dbias are zero
    const i64 rows = std::min(p.chunk_tokens, T - begin);
    const TensorView z = TensorView::of(logits.data, DType::F32, {rows, V});
    TensorView dz = z;  // rows of the work dtype that begin where the rows of z begin
    dz.dtype = h.dtype;
    dz.stride[0] = V * dtype_bytes(DType::F32) / dtype_bytes(h.dtype);
    product(z, h.rows(begin, rows), weight, bias, {}, {}, {.trans_b = true}, stream);
    with_work_type(h.dtype, [&]<class E>(E) {
      stream.pool->parallel_for(rows, [&](i64 r, int) {
        float* const row = z.as<float>() + r * V;
        const i32 target = targets.as<i32>()[begin + r];
        if (target != p.ignore_index) {
          losses.as<float>()[begin + r] = softmax_row<E>(row, V, target, p.grad_scale, gradient);
        } else {
          losses.as<float>()[begin + r] = 0;
          if (gradient) std::fill_n(reinterpret_cast<E*>(row), V, E{});
        }
      });
    });
    if (dh) product(dh.rows(begin, rows), dz, weight, {}, {}, {}, {}, stream);
    if (dweight) {
      product(dweight, dz, h.rows(begin, rows), {}, {}, {}, {.trans_a = true, .accumulate = begin > 0}, stream);
    }
    if (dbias) column_sum_onto(dbias, dz, begin > 0, stream);
    begin += rows;
  } while (begin < T);
}

void linear_cross_entropy(TensorView losses, TensorView dh, TensorView dweight, TensorView dbias, TensorView h,
                          TensorView weight, TensorView bias, TensorView targets, TensorView logits,
                          const CrossEntropyParams& p, Stream& stream) noexcept {
  linear_cross_entropy_by(matmul, losses, dh, dweight, dbias, h, weight, bias, targets, logits, p, stream);
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
