// SPDX-License-Identifier: Apache-2.0
// Matrices in the order in which multiply_tile reads panels of B.

#include <algorithm>
#include <cstring>

#include "cpu/gemm.h"
#include "cpu/isa/codes.h"
#include "cpu/isa/kernels.h"

namespace ds::cpu::DS_ISA_NAMESPACE {
namespace {

// Elements between the rows of a panel in scratch: an odd number of lines, or of pairs of lines, so that rows lie in
// different sets of L1.
i64 pitch_of(i64 K) noexcept { return ((K + 63) / 64 | 1) * 64; }

size_t panel_bytes(const TensorView& m) noexcept {
  if (m.codes) return static_cast<size_t>(std::min(kNR, m.dim(0)) * m.codes.row_bytes(m.dim(1)));
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

// `rows` rows of codes, each of K elements, to their panel.
void pack_codes(u8* panel, i64 rows, i64 K, const CodedForm& form, i64 depth, u8* copy) noexcept {
  const i64 row_bytes = form.row_bytes(K), scale = dtype_bytes(form.scales), offset = form.offsets ? 4 : 0;
  std::memcpy(copy, panel, static_cast<size_t>(rows * row_bytes));
  const auto take = [&](i64 at, i64 bytes) {
    for (i64 n = 0; n < rows; ++n) panel = std::copy_n(copy + n * row_bytes + at, bytes, panel);
  };
  for (i64 at = 0; at < row_bytes; at += form.group_bytes()) {
    take(at, scale);
    take(at + scale, offset);
    for (i64 codes = at + scale + offset; codes < at + form.group_bytes(); codes += depth) {
      take(codes, depth);
      if (form.kind != CodeKind::Int4 || depth == 1) continue;
      for (u8* steps = panel - rows * depth; steps != panel; steps += depth) pair_steps(steps, depth);
    }
  }
}

}  // namespace

// A panel has the bytes of its rows.
void pack_matrix(TensorView m, Stream& stream) noexcept {
  const i64 N = m.dim(0), K = m.dim(1);
  ThreadPool& pool = *stream.pool;
  if (m.codes) {
    pool.reserve_scratch(panel_bytes(m));
    const i64 depth = panels_of(table(), m.dtype, m.codes).depth, row_bytes = m.codes.row_bytes(K);
    return pool.parallel_for((N + kNR - 1) / kNR, [&](i64 panel, int worker) {
      const i64 n = panel * kNR;
      pack_codes(m.as<u8>() + n * row_bytes, std::min(kNR, N - n), K, m.codes, depth,
                 static_cast<u8*>(pool.scratch(worker)));
    });
  }
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
