// SPDX-License-Identifier: Apache-2.0
#pragma once
// A matrix product in tiles: how many there are, their scratch, and the loop over them.

#include <algorithm>
#include <type_traits>

#include "cpu/isa/packed_tile.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

struct Grid {
  i64 m, n;  // tiles along M and N
};
// The largest tile: its packed A, block of B and sums fit 6 MiB of scratch.
inline constexpr i64 kTileM = 72 * 14, kTileN = 1024;
// The grid with the least estimated time. Costs are in micro-kernel calls per unit of k; packing a panel of A or B
// costs the given fraction of one.
inline Grid choose_grid(i64 M, i64 N, i64 threads, bool packs_b) noexcept {
  constexpr double kPackA = 0.4;
  const double pack_b = packs_b ? 0.8 : 0;
  const i64 tries = threads > 1 ? 16 : 0;  // one thread needs no more tiles than necessary
  const i64 panels_m = ceil_div(M, kMR), panels_n = ceil_div(N, kNR);
  const i64 least_m = ceil_div(panels_m, kTileM / kMR), least_n = ceil_div(panels_n, kTileN / kNR);
  Grid best{least_m, least_n};
  double best_cost = 0;
  for (i64 m = least_m; m <= std::min(panels_m, least_m + tries); ++m) {
    for (i64 n = least_n; n <= std::min(panels_n, least_n + tries); ++n) {
      const double pm = static_cast<double>(ceil_div(panels_m, m)), pn = static_cast<double>(ceil_div(panels_n, n));
      const double cost = static_cast<double>(ceil_div(m * n, threads)) * (pm * pn + kPackA * pm + pack_b * pn);
      if (best_cost == 0 || cost < best_cost) best = {m, n}, best_cost = cost;
    }
  }
  return best;
}

// For few rows a product is one pass over B, in tiles of all rows.
inline constexpr i64 kFewRows = 8;  // as many as have sums in registers

// Calls f with the number of rows that are computed for M <= kMost of them, as a constant.
template <i64 kMost = kFewRows, class F>
auto with_few_rows(i64 M, F&& f) noexcept {
  if (M == 1) return f(std::integral_constant<int, 1>{});
  if (M == 2) return f(std::integral_constant<int, 2>{});
  if constexpr (kMost > 4) {
    if (M > 4) return f(std::integral_constant<int, 8>{});
  }
  return f(std::integral_constant<int, 4>{});
}

// How a product is cut into tiles, and a worker's need for the largest.
struct Cut {
  Grid grid;
  size_t scratch_bytes;
};
inline Cut tiles_of(DType work, i64 M, i64 N, i64 K, i64 threads, bool packs_b = true) noexcept {
  Cut cut{choose_grid(M, N, threads, packs_b), 0};
  const i64 panels_m = ceil_div(ceil_div(M, kMR), cut.grid.m), panels_n = ceil_div(ceil_div(N, kNR), cut.grid.n);
  with_work_type(work, [&]<class T>(T) {
    using Room = TileRoom<typename ProductOf<T>::type>;
    cut.scratch_bytes = Room(panels_m, panels_n, K > Room::kDepth, packs_b).bytes();
  });
  return cut;
}

template <class Product, class A, class B>
void multiply_tiles(const A& a, const B& b, i64 M, i64 K, i64 N, Grid grid, const Epilogue& e, FinishFn done,
                    ThreadPool& pool) noexcept {
  pool.parallel_for(grid.m * grid.n, [&](i64 tile, int worker) {
    multiply_tile<Product>(a, b, InnerBlocks<Product>{K}, part_of(M, kMR, tile % grid.m, grid.m),
                           part_of(N, kNR, tile / grid.m, grid.n), e, done, static_cast<float*>(pool.scratch(worker)));
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
