// SPDX-License-Identifier: Apache-2.0
#include "cuda/row_matmul.h"

#include "cuda/activate.h"
#include "cuda/product_tiles.h"

namespace ds::cuda {
namespace {

using attention::Head;
using product::Matrix;
using product::Rows;

// A matrix of codes in rows, or a batch of them.
struct Coded {
  const u8* data;
  CodedForm form;
  i64 row_bytes, batch_bytes;

  static Coded of(const TensorView& b) noexcept {
    const i64 K = b.dim(b.rank - 1), row_bytes = b.codes ? b.codes.row_bytes(K) : 0;
    return {b.as<u8>(), b.codes, row_bytes, b.rank == 3 ? b.dim(1) * row_bytes : 0};
  }
  // Elements k and k + 1 of row n, for even k; rounded to no work dtype.
  DS_DEVICE float2 pair(i64 matrix, i64 n, int k) const {
    const int group = k / form.group, at = k - group * form.group;
    const u8* p = data + matrix * batch_bytes + n * row_bytes + group * form.group_bytes();
    const float scale = CodedForm::scale_at(form.scales, p);
    p += dtype_bytes(form.scales);
    float offset = 0;
    if (form.offsets) offset = CodedForm::scale_at(DType::F32, p), p += 4;
    const bool halves = form.kind == CodeKind::Int4;
    const u8 first = p[halves ? at / 2 : at], second = halves ? first : p[at + 1];
    const float x = form.value(first, 0), y = form.value(second, halves ? 4 : 0);
    if (!form.offsets) return make_float2(x * scale, y * scale);
    return make_float2(std::fma(x, scale, offset), std::fma(y, scale, offset));
  }
};

// The rest of a product, element by element. T: the work dtype, of bias and, unless they are wide, of c, preact and
// residual.
struct Finish {
  void* c;
  void* preact;
  const void* residual;
  const void* bias;
  i64 c_stride, preact_stride, residual_stride;
  Activation activation;
  bool wide;   // c is fp32
  bool plain;  // nothing but to round the sum
  bool whole_chunks;

  static Finish of(const MatmulCall& x) noexcept {
    const TensorView& residual = x.params.accumulate ? x.c : x.residual;
    return {.c = x.c.data,
            .preact = x.preact.data,
            .residual = residual.data,
            .bias = x.bias.data,
            .c_stride = x.c.stride[0],
            .preact_stride = x.preact.stride[0],
            .residual_stride = residual.stride[0],
            .activation = x.params.activation,
            .wide = x.c.dtype == DType::F32,
            .plain = !x.preact && !residual && !x.bias && x.params.activation == Activation::None,
            .whole_chunks = Matrix<const bf16>::of(x.c).whole_chunks};
  }
  template <class T>
  DS_DEVICE void operator()(i64 row, i64 column, float x) const {
    if (bias != nullptr) x += load(static_cast<const T*>(bias) + column);
    wide ? finish<float>(row, column, x) : finish<T>(row, column, x);
  }

 private:
  template <class C>
  DS_DEVICE void finish(i64 row, i64 column, float x) const {
    if (preact != nullptr) store(static_cast<C*>(preact) + row * preact_stride + column, x);
    x = activate(activation, x);
    if (residual != nullptr) x += load(static_cast<const C*>(residual) + row * residual_stride + column);
    store(static_cast<C*>(c) + row * c_stride + column, x);
  }
};

template <class T>
struct RowArgs {
  Matrix<const T> a, b;
  Coded coded;
  const i32* offsets;
  i64 groups, matrices, M, N, K, part_k, parts;
  float* sums;  // [parts, M, N] of parts apart; else null
  Finish finish;

  // The parts of a block: all, or one.
  DS_DEVICE Rows parts_of_block() const {
    return sums == nullptr ? Rows{0, parts} : Rows{block_index().z, block_index().z + i64{1}};
  }
  DS_DEVICE i64 end_of_part(i64 part) const { return (part + 1) * part_k < K ? (part + 1) * part_k : K; }
  DS_DEVICE void put(i64 row, i64 column, float sum) const {
    if (sums != nullptr) {
      sums[(i64{block_index().z} * M + row) * N + column] = sum;
    } else {
      finish.template operator()<T>(row, column, sum);
    }
  }
};

// A block's tile of c, and its matrix.
struct TilePlace {
  Rows rows;
  i64 column, matrix;
};
template <int kRows, int kColumns, class T>
DS_DEVICE TilePlace place_of_block(const RowArgs<T>& p) {
  i64 group = 0;
  const i64 tiles = product::tiles_of_rows<kRows>(p.M, p.groups), block = block_index().x;
  const Rows rows = product::rows_of_tile<kRows>(p.offsets, p.groups, p.M, block % tiles, group);
  return {rows, block / tiles * kColumns, group % p.matrices};
}
// The blocks of place_of_block, those of a column's rows side by side. Along x, which has room for any vocabulary.
template <int kRows, int kColumns, class T>
dim3 grid_of_tiles(const RowArgs<T>& p, i64 parts) noexcept {
  const i64 tiles = product::tiles_of_rows<kRows>(p.M, p.groups) * ceil_div(p.N, kColumns);
  return dim3(static_cast<unsigned>(tiles), 1, static_cast<unsigned>(parts));
}

// ---- tensor cores

enum class Right { Rows, Across, Codes };  // b is [N,K], [K,N], or of codes in rows

using namespace product::tensor;

template <int kRows, class T>
struct Shared {
  Stage<kRows, T> stages[2];
};

// A warp decodes a row of the tile at a time, a lane two elements of it.
template <class T>
DS_DEVICE void decode_tile(T* tile, const Coded& b, i64 matrix, i64 first, i64 rows, int at, int end) {
  static_assert(kStep == 2 * kWarp);
  const int lane = thread_index() % kWarp, k = at + 2 * lane;
  DS_UNROLL_BY(4)
  for (int n = thread_index() / kWarp; n < kColumns; n += kThreads / kWarp) {
    const float2 x = first + n < rows && k < end ? b.pair(matrix, first + n, k) : make_float2(0, 0);
    *reinterpret_cast<u32*>(tile + attention::swizzled<kStep>(n, lane / 4) + lane % 4 * 2) = pack2<T>(x.x, x.y);
  }
}

template <int kRows, Right kRight, class T>
DS_DEVICE void load_stage(Stage<kRows, T>& to, const RowArgs<T>& p, const TilePlace& tile, int at, int end) {
  attention::load_tile<kStep, kRows, kThreads>(to.a, Head<const T>{p.a.data + at, p.a.ld, p.a.whole_chunks},
                                               static_cast<int>(tile.rows.begin), static_cast<int>(tile.rows.end),
                                               end - at);
  const int column = static_cast<int>(tile.column), N = static_cast<int>(p.N);
  if constexpr (kRight == Right::Codes) {
    decode_tile(to.b, p.coded, tile.matrix, tile.column, p.N, at, end);
  } else if constexpr (kRight == Right::Rows) {
    attention::load_tile<kStep, kColumns, kThreads>(
        to.b, Head<const T>{p.b.at(tile.matrix, 0, at), p.b.ld, p.b.whole_chunks}, column, N, end - at);
  } else {
    attention::load_tile<kColumns, kStep, kThreads>(
        to.b, Head<const T>{p.b.at(tile.matrix, 0, column), p.b.ld, p.b.whole_chunks}, at, end, N - column);
  }
}

template <int kRows, Right kRight, class T>
__global__ void __launch_bounds__(kThreads) row_kernel(RowArgs<T> p) {
  using S = Shape<kRows>;
  const TilePlace tile = place_of_block<kRows, kColumns>(p);
  if (tile.rows.begin >= tile.rows.end) return;
  Shared<kRows, T>& shared = block_shared<Shared<kRows, T>>();
  const int warp = thread_index() / kWarp;
  float x[S::kM][S::kN][4], total[S::kM][S::kN][4];
  DS_UNROLL
  for (int m = 0; m < S::kM; ++m) attention::clear(x[m]), attention::clear(total[m]);

  const Rows parts = p.parts_of_block();
  const i64 begin = parts.begin * p.part_k, end = p.end_of_part(parts.end - 1);
  i64 part_end = p.end_of_part(parts.begin);
  const auto load_next = [&](int stage, i64 at) {
    load_stage<kRows, kRight>(shared.stages[stage], p, tile, static_cast<int>(at), static_cast<int>(end));
  };
  load_next(0, begin);
  copies_commit();
  int stage = 0;
  for (i64 at = begin; at < end; at += kStep, stage ^= 1) {
    if (at + kStep < end) load_next(stage ^ 1, at + kStep);
    copies_commit();
    copies_wait<1>();
    sync_block();
    multiply_stage<kRows, false, kRight != Right::Across>(x, shared.stages[stage], S::row(warp), S::column(warp));
    sync_block();
    if (at + kStep < part_end && at + kStep < end) continue;
    part_end += p.part_k;
    DS_UNROLL
    for (int m = 0; m < S::kM; ++m) {
      DS_UNROLL
      for (int n = 0; n < S::kN; ++n) {
        DS_UNROLL
        for (int e = 0; e < 4; ++e) total[m][n][e] += x[m][n][e];
      }
      attention::clear(x[m]);
    }
  }
  copies_wait<0>();
  const i64 row = tile.rows.begin + S::row(warp), column = tile.column + S::column(warp);
  if (p.sums == nullptr && p.finish.plain && !p.finish.wide) {
    const Head<T> c{static_cast<T*>(p.finish.c), p.finish.c_stride, p.finish.whole_chunks};
    return store_sums(shared.stages[0].a + warp * 16 * S::kWarpColumns, total, c, row, tile.rows.end, column, p.N);
  }
  for_sums(total, row, column, [&](i64 r, i64 c, float sum) {
    if (r < tile.rows.end && c < p.N) p.put(r, c, sum);
  });
}

// ---- plain multiply-adds

template <Right kRight>
__global__ void __launch_bounds__(product::plain::kThreads) row_fp32_kernel(RowArgs<float> p) {
  using namespace product::plain;
  const TilePlace tile = place_of_block<kTile, kTile>(p);
  if (tile.rows.begin >= tile.rows.end) return;
  auto& shared = block_shared<product::plain::Shared>();
  float sum[kEach][kEach] = {}, total[kEach][kEach] = {};
  const Rows parts = p.parts_of_block();
  for (i64 part = parts.begin; part < parts.end; ++part) {
    const i64 end = p.end_of_part(part);
    for (i64 at = part * p.part_k; at < end; at += product::plain::kStep) {
      fill<true>(shared.a, [&](int k, int i) {
        return tile.rows.begin + i < tile.rows.end && at + k < end ? *p.a.at(0, tile.rows.begin + i, at + k) : 0.0f;
      });
      fill<kRight != Right::Across>(shared.b, [&](int k, int i) {
        const i64 column = tile.column + i;
        if (column >= p.N || at + k >= end) return 0.0f;
        if constexpr (kRight == Right::Codes) {
          const float2 x = p.coded.pair(tile.matrix, column, static_cast<int>(at + k) & ~1);
          return k % 2 == 0 ? x.x : x.y;
        }
        return kRight == Right::Rows ? *p.b.at(tile.matrix, column, at + k) : *p.b.at(tile.matrix, at + k, column);
      });
      sync_block();
      multiply_step(sum, shared);
      sync_block();
    }
    DS_UNROLL
    for (int r = 0; r < kEach; ++r) {
      DS_UNROLL
      for (int c = 0; c < kEach; ++c) total[r][c] += sum[r][c], sum[r][c] = 0;
    }
  }
  for_sums(total, tile.rows.begin, tile.column, [&](i64 r, i64 c, float x) {
    if (r < tile.rows.end && c < p.N) p.put(r, c, x);
  });
}

// ---- integers

constexpr int kIntegerRows = 8;
// Columns of a block: a grid has at most 65535 blocks along y, which must do for the largest vocabularies.
constexpr int kIntegerWarps = 8;
constexpr int kMostCodeThreads = 256;  // of a block that codes a group
constexpr i64 kLongGroup = 512;        // elements from which on the lanes of a warp share a group

struct CodeShared {
  u32 largest[kMostCodeThreads / kWarp];
};

// The rows of a as codes, [M,K], and a scale for each of their groups, [M, groups]; a block has one group.
template <class T>
__global__ void __launch_bounds__(kMostCodeThreads)
    code_rows_kernel(Matrix<const T> a, i64 K, int group, std::int8_t* codes, float* scales) {
  auto& shared = block_shared<CodeShared>();
  const i64 row = block_index().x, first = i64{block_index().y} * group;
  u32 largest = 0;
  for (int k = thread_index(); k < group; k += block_size()) {
    const u32 bits = std::bit_cast<u32>(load(a.at(0, row, first + k))) & 0x7FFFFFFFu;
    largest = largest > bits ? largest : bits;
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const u32 other = warp_shuffle_xor(largest, mask);
    largest = largest > other ? largest : other;
  }
  if (thread_index() % kWarp == 0) shared.largest[thread_index() / kWarp] = largest;
  sync_block();
  for (int w = 0; w < block_size() / kWarp; ++w) largest = largest > shared.largest[w] ? largest : shared.largest[w];
  const float scale = block_scale(largest, {.bits = 8, .block = 0});
  if (thread_index() == 0) scales[row * grid_size().y + block_index().y] = scale;
  for (int k = thread_index(); k < group; k += block_size()) {
    const float x = load(a.at(0, row, first + k));
    codes[row * K + first + k] = scale == scale ? static_cast<std::int8_t>(std::rint(x / scale)) : std::int8_t{0};
  }
}

// Elements k to k + 3 of a group, whose codes begin at p, as signed bytes.
DS_DEVICE u32 four_codes(const CodedForm& form, const u8* p, int k) {
  if (form.kind == CodeKind::Int8) {
    p += k;
    return p[0] | u32{p[1]} << 8 | u32{p[2]} << 16 | u32{p[3]} << 24;
  }
  const u32 a = p[k / 2], b = p[k / 2 + 1], codes = (a & 15) | (a >> 4) << 8 | (b & 15) << 16 | (b >> 4) << 24;
  // Each byte minus 8: no borrow passes the sign that is added first.
  return ((codes | 0x80808080u) - 0x08080808u) ^ 0x80808080u;
}

// Exact sums over part of a group, for each row of a tile.
struct GroupSums {
  i32 products[kIntegerRows] = {}, codes[kIntegerRows] = {};

  DS_DEVICE void add(int r, u32 a, u32 b) {
    products[r] = dot4(a, b, products[r]);
    codes[r] = dot4(a, 0x01010101u, codes[r]);
  }
};

// A warp has a column of c and up to eight rows. Its lanes share a long group, or each have a short one.
template <class T>
__global__ void __launch_bounds__(kWarp* kIntegerWarps)
    integer_kernel(RowArgs<T> p, const std::int8_t* codes, const float* scales) {
  const TilePlace tile = place_of_block<kIntegerRows, kIntegerWarps>(p);
  const i64 column = tile.column + thread_index() / kWarp;
  if (tile.rows.begin >= tile.rows.end || column >= p.N) return;
  const CodedForm& form = p.coded.form;
  const int lane = thread_index() % kWarp, rows = static_cast<int>(tile.rows.end - tile.rows.begin);
  const i64 groups = p.K / form.group;
  const u8* const row = p.coded.data + tile.matrix * p.coded.batch_bytes + column * p.coded.row_bytes;
  const bool shares = form.group >= kLongGroup;
  float y[kIntegerRows];
  for (float& each : y) each = -0.0f;
  for (i64 first = 0; first < groups; first += shares ? 1 : kWarp) {
    const i64 mine = shares ? first : first + lane;
    GroupSums sums;
    float scale = 0, offset = 0;
    if (mine < groups) {
      const u8* at = row + mine * form.group_bytes();
      scale = CodedForm::scale_at(form.scales, at);
      at += dtype_bytes(form.scales);
      if (form.offsets) offset = CodedForm::scale_at(DType::F32, at), at += 4;
      for (int k = shares ? 4 * lane : 0; k < form.group; k += shares ? 4 * kWarp : 4) {
        const u32 b = four_codes(form, at, k);
        DS_UNROLL
        for (int r = 0; r < kIntegerRows; ++r) {
          if (r < rows)
            sums.add(r, *reinterpret_cast<const u32*>(codes + (tile.rows.begin + r) * p.K + mine * form.group + k), b);
        }
      }
    }
    DS_UNROLL
    for (int r = 0; r < kIntegerRows; ++r) {
      if (r >= rows) continue;
      if (shares) {
        for (int mask = kWarp / 2; mask > 0; mask /= 2) {
          sums.products[r] += warp_shuffle_xor(sums.products[r], mask);
          sums.codes[r] += warp_shuffle_xor(sums.codes[r], mask);
        }
      }
      const float of_a = mine < groups ? scales[(tile.rows.begin + r) * groups + mine] : 0.0f;
      const float product = static_cast<float>(sums.products[r]), both = of_a * scale,
                  added = static_cast<float>(sums.codes[r]) * of_a;
      for (int g = 0; g < (shares ? 1 : kWarp) && first + g < groups; ++g) {
        y[r] = std::fma(warp_shuffle(product, g), warp_shuffle(both, g), y[r]);
        if (form.offsets) y[r] = std::fma(warp_shuffle(offset, g), warp_shuffle(added, g), y[r]);
      }
    }
  }
  DS_UNROLL
  for (int r = 0; r < kIntegerRows; ++r) {
    if (lane == r && r < rows) p.put(tile.rows.begin + r, column, y[r]);
  }
}

// ---- launches

dim3 grid_of(i64 x, i64 y, i64 z) noexcept {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z));
}

template <int kRows, Right kRight, class T>
void multiply(const RowArgs<T>& p, cudaStream_t stream) noexcept {
  const i64 parts = p.sums != nullptr ? p.parts : 1;
  if constexpr (sizeof(T) == 4) {
    namespace plain = product::plain;
    launch(row_fp32_kernel<kRight>,
           {grid_of_tiles<plain::kTile, plain::kTile>(p, parts), plain::kThreads, sizeof(plain::Shared)}, stream, p);
  } else {
    launch(row_kernel<kRows, kRight, T>, {grid_of_tiles<kRows, kColumns>(p, parts), kThreads, sizeof(Shared<kRows, T>)},
           stream, p);
  }
}

template <Right kRight, class T>
void multiply(const RowArgs<T>& p, cudaStream_t stream) noexcept {
  // Rows per group decide how many rows a tile should have.
  if (sizeof(T) == 2 && ceil_div(p.M, p.groups) > 16) return multiply<64, kRight>(p, stream);
  multiply<16, kRight>(p, stream);
}

template <class T>
void multiply_integers(const RowArgs<T>& p, void* scratch, cudaStream_t stream) noexcept {
  auto* const codes = static_cast<std::int8_t*>(scratch);
  auto* const scales = reinterpret_cast<float*>(codes + p.M * p.K);
  const i64 group = p.coded.form.group;
  launch(code_rows_kernel<T>,
         {grid_of(p.M, p.K / group, 1), group < kLongGroup ? kWarp : kMostCodeThreads, sizeof(CodeShared)}, stream, p.a,
         p.K, static_cast<int>(group), codes, scales);
  launch(integer_kernel<T>, {grid_of_tiles<kIntegerRows, kIntegerWarps>(p, 1), kWarp * kIntegerWarps, 0}, stream, p,
         static_cast<const std::int8_t*>(codes), static_cast<const float*>(scales));
}

template <class T>
__global__ void look_up_kernel(T* y, Coded table, const i32* ids, i64 first_id, i64 V, i64 R, i64 C, bool accumulate) {
  const i64 i = i64{block_index().x} * block_size() + thread_index(), pairs = C / 2;
  if (i >= R * pairs) return;
  const i64 row = i / pairs, id = i64{ids[row]} - first_id;
  const int k = static_cast<int>(i - row * pairs) * 2;
  const bool has = id >= 0 && id < V;
  if (!has && accumulate) return;
  const float2 x = has ? table.pair(0, id, k) : make_float2(0, 0);
  const float each[2] = {x.x, x.y};
  for (int e = 0; e < 2; ++e) {
    T* const to = y + row * C + k + e;
    const float decoded = to_float(from_float<T>(each[e]));
    store(to, accumulate ? load(to) + decoded : decoded);
  }
}

}  // namespace

void row_matmul(const MatmulCall& x, const TensorView& offsets, Stream& s) noexcept {
  Context& ctx = context(s);
  const bool batch = x.b.rank == 3;
  const i64 M = x.c.dim(0), N = x.c.dim(1);
  if (M == 0 || N == 0) return;
  const RowMatmulPlan plan = plan_row_matmul(x, batch);
  void* scratch = nullptr;
  if (plan.scratch_bytes > 0) {
    scratch = ctx.scratch(static_cast<size_t>(plan.scratch_bytes));
    if (scratch == nullptr) return;
  }
  with_work_type(x.a.dtype, [&]<class T>(T) {
    const RowArgs<T> p{.a = Matrix<const T>::of(x.a),
                       .b = Matrix<const T>::of(x.b),
                       .coded = Coded::of(x.b),
                       .offsets = offsets.as<i32>(),
                       .groups = offsets ? offsets.numel() - 1 : 1,
                       .matrices = batch ? x.b.dim(0) : 1,
                       .M = M,
                       .N = N,
                       .K = x.a.dim(1),
                       .part_k = plan.part_k,
                       .parts = plan.parts,
                       .sums = plan.apart ? static_cast<float*>(scratch) : nullptr,
                       .finish = Finish::of(x)};
    if (x.b.codes.integer) {
      multiply_integers(p, scratch, ctx.stream());
    } else if (x.b.codes) {
      multiply<Right::Codes>(p, ctx.stream());
    } else if (x.params.trans_b) {
      multiply<Right::Rows>(p, ctx.stream());
    } else {
      multiply<Right::Across>(p, ctx.stream());
    }
  });
  if (plan.apart) finish_sums(x, static_cast<const float*>(scratch), N, plan.parts, s);
  ctx.check(cudaGetLastError(), batch ? "grouped_matmul" : "matmul");
}

void look_up_codes(TensorView y, TensorView table, TensorView ids, i64 first_id, bool accumulate,
                   Stream& stream) noexcept {
  Context& ctx = context(stream);
  const i64 R = y.dim(0), C = y.dim(1);
  constexpr int kThreadsEach = 256;
  with_work_type(y.dtype, [&]<class T>(T) {
    launch(look_up_kernel<T>, {grid_of(ceil_div(R * C / 2, kThreadsEach), 1, 1), kThreadsEach, 0}, ctx.stream(),
           y.as<T>(), Coded::of(table), ids.as<i32>(), first_id, table.dim(0), R, C, accumulate);
  });
  ctx.check(cudaGetLastError(), "embedding_fwd");
}

}  // namespace ds::cuda
