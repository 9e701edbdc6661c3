// SPDX-License-Identifier: Apache-2.0
// Matrices in the order in which multiply_tile reads panels of B.

#include <algorithm>

#include "cpu/gemm.h"
#include "cpu/isa/kernels.h"

namespace ds::cpu::DS_ISA_NAMESPACE {
namespace {

// Elements between the rows of a panel in scratch: an odd number of lines, or of pairs of lines, so that rows lie in
// different sets of L1.
i64 pitch_of(i64 K) noexcept { return ((K + 63) / 64 | 1) * 64; }

size_t panel_bytes(const TensorView& m) noexcept {
  return static_cast<size_t>(std::min(kNR, m.dim(0)) * pitch_of(m.dim(1)) * dtype_bytes(m.dtype));
}

template <class T>
void pack_panel(T* panel, i64 rows, i64 K, T* copy) noexcept {
  const i64 pitch = pitch_of(K);
  for (i64 n = 0; n < rows; ++n) std::copy_n(panel + n * K, K, copy + n * pitch);
  constexpr i64 kDepth = ProductOf<T>::type::kDepth;
  for (i64 k = 0; k < K; k += kDepth) {
    const i64 depth = std::min(kDepth, K - k);
    for (i64 n = 0; n < rows; ++n) panel = std::copy_n(copy + n * pitch + k, depth, panel);
  }
}

}  // namespace

// A panel has the bytes of its rows.
void pack_matrix(TensorView m, Stream& stream) noexcept {
  const i64 N = m.dim(0), K = m.dim(1);
  ThreadPool& pool = *stream.pool;
  pool.reserve_scratch(panel_bytes(m));
  with_work_type(m.dtype, [&]<class T>(T) {
    pool.parallel_for((N + kNR - 1) / kNR, [&](i64 panel, int worker) {
      const i64 n = panel * kNR;
      pack_panel(m.as<T>() + n * K, std::min(kNR, N - n), K, static_cast<T*>(pool.scratch(worker)));
    });
  });
}

void pack_matrix_scratch(TensorView m, Stream& stream) noexcept { note_scratch(stream, panel_bytes(m)); }

}  // namespace ds::cpu::DS_ISA_NAMESPACE
