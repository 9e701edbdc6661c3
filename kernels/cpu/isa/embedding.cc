// SPDX-License-Identifier: Apache-2.0
// Embedding lookup and its gradient.

#include <algorithm>
#include <cstring>

#include "cpu/isa/codes.h"
#include "cpu/isa/kernels.h"
#include "cpu/loops.h"

namespace ds::cpu::DS_ISA_NAMESPACE {
namespace {

// out[C] = row `id` of a table in panels, or out += it.
template <class T>
void look_up_in_panels(T* out, const TensorView& table, i64 id, bool accumulate) noexcept {
  const i64 V = table.dim(0), C = table.dim(1), first = id - id % table.panels.rows;
  const i64 width = std::min<i64>(table.panels.rows, V - first), depth = table.panels.depth;
  const auto take = [=](i64 c, T x) { out[c] = accumulate ? from_float<T>(to_float(out[c]) + to_float(x)) : x; };
  const T* at = table.as<T>() + table.panels.place(V, C, id, 0);
  i64 c = 0;
  for (; c + depth <= C; c += depth, at += width * depth) {
    for (i64 i = 0; i < depth; ++i) take(c + i, at[i]);
  }
  if (c < C) take(c, table.as<T>()[table.panels.place(V, C, id, c)]);
}

template <class T>
void look_up_codes(T* out, const TensorView& table, i64 id, bool accumulate) noexcept {
  each_element(CodedMatrix(table), id, 0, table.dim(1), [&](i64 c, float x) {
    const T element = from_float<T>(x);
    out[c] = accumulate ? from_float<T>(to_float(out[c]) + to_float(element)) : element;
  });
}

}  // namespace

void embedding_fwd(TensorView y, TensorView table, TensorView ids, i64 first_id, bool accumulate,
                   Stream& stream) noexcept {
  const i64 C = y.dim(1), V = table.dim(0);
  const i32* ids_of = ids.as<i32>();
  with_work_type(y.dtype, [&]<class T>(T) {
    for_tiles(
        stream, y.dim(0),
        [=](i64 begin, i64 end) {
          for (i64 r = begin; r < end; ++r) {
            const i64 id = ids_of[r] - first_id;
            T* out = y.as<T>() + r * C;
            const T* row = table.as<T>() + id * C;
            if (id < 0 || id >= V) {
              if (!accumulate) std::memset(out, 0, static_cast<size_t>(C) * sizeof(T));
            } else if (table.codes) {
              look_up_codes(out, table, id, accumulate);
            } else if (table.panels) {
              look_up_in_panels(out, table, id, accumulate);
            } else if (accumulate) {
              for_vectors(0, C, [=](i64 c, auto n) { store(out + c, load(out + c, n) + load(row + c, n), n); });
            } else {
              std::memcpy(out, row, static_cast<size_t>(C) * sizeof(T));
            }
          }
        },
        std::max<i64>(1, kTileElements / C));
  });
}

namespace {

// Rows in a stable order by id: row[first[v]] .. row[first[v + 1] - 1] have id first_id + v; rows with other ids are
// left out. A counting sort in the caller's scratch.
struct RowsById {
  const i32* first;
  const i32* row;
};
size_t sorting_bytes(i64 R, i64 V) noexcept { return static_cast<size_t>(V + 2 + R) * sizeof(i32); }
RowsById sort_rows(const i32* ids, i64 first_id, i64 R, i64 V, ThreadPool& pool) noexcept {
  i32* first = static_cast<i32*>(pool.reserve_scratch(sorting_bytes(R, V)));
  i32* row = first + V + 2;
  // Counted two places higher: after the prefix sum first[v + 1] is the start of v, and placing v's rows moves it to
  // v's end.
  std::memset(first, 0, static_cast<size_t>(V + 2) * sizeof(i32));
  const auto here = [=](i64 id) { return id >= 0 && id < V; };
  for (i64 r = 0; r < R; ++r) {
    if (const i64 id = ids[r] - first_id; here(id)) ++first[id + 2];
  }
  for (i64 v = 2; v <= V; ++v) first[v + 1] += first[v];
  for (i64 r = 0; r < R; ++r) {
    if (const i64 id = ids[r] - first_id; here(id)) row[first[id + 1]++] = static_cast<i32>(r);
  }
  return {first, row};
}

template <class To, class T>
void bwd(TensorView dtable, TensorView dy, RowsById rows, bool accumulate, Stream& stream) noexcept {
  const i64 V = dtable.dim(0), C = dtable.dim(1);
  // A tile is a range of ids, and for a small table also a range of columns: in text, a few ids have most of the rows.
  const i64 tile_ids = std::clamp<i64>(4 * kTileElements / C, 1, V), id_tiles = (V + tile_ids - 1) / tile_ids;
  const i64 width = std::max<i64>(64, id_tiles >= 16 ? C : C * id_tiles / 16), column_tiles = (C + width - 1) / width;
  stream.pool->parallel_for(id_tiles * column_tiles, [=](i64 tile, int) {
    const i64 begin = tile / column_tiles * tile_ids, end = std::min(V, begin + tile_ids);
    const i64 left = tile % column_tiles * width, right = std::min(C, left + width);
    for (i64 v = begin; v < end; ++v) {
      To* out = dtable.as<To>() + v * C;
      const i32 *row = rows.row + rows.first[v], *last = rows.row + rows.first[v + 1];
      if (row == last) {
        if (!accumulate) std::memset(out + left, 0, static_cast<size_t>(right - left) * sizeof(To));
        continue;
      }
      for_vectors(left, right, [=](i64 c, auto n) {
        Vec sum = accumulate ? load(out + c, n) : zero();
        for (const i32* r = row; r != last; ++r) sum = sum + load(dy.as<T>() + *r * C + c, n);
        store(out + c, sum, n);
      });
    }
  });
}

}  // namespace

void embedding_bwd(TensorView dtable, TensorView dy, TensorView ids, i64 first_id, bool accumulate,
                   Stream& stream) noexcept {
  const RowsById rows = sort_rows(ids.as<i32>(), first_id, dy.dim(0), dtable.dim(0), *stream.pool);
  with_work_type(dy.dtype, [&]<class T>(T) {
    if (dtable.dtype == DType::F32) {
      bwd<float, T>(dtable, dy, rows, accumulate, stream);
    } else {
      bwd<T, T>(dtable, dy, rows, accumulate, stream);
    }
  });
}

void embedding_bwd_scratch(TensorView dtable, TensorView dy, TensorView, i64, bool, Stream& stream) noexcept {
  note_scratch(stream, sorting_bytes(dy.dim(0), dtable.dim(0)));
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
