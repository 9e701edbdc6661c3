// SPDX-License-Identifier: Apache-2.0
// bf16 products by oneDNN, which uses the AMX tiles of CPUs that have them. C is cut into tiles whose bounds depend
// only on the shape, and each is computed by one single-threaded oneDNN call, so the bits do not depend on threads.
// `taken` below is the only place that decides which products oneDNN computes, but for matrices in panels or of codes;
// all other calls, and all other ops, are the AVX-512 ones.
//
// Every thread keeps its own primitives by shape, with memory objects that are pointed at each tile in turn. oneDNN
// allocates when a thread meets a new shape, and inside its own calls.

#include <omp.h>

#include <algorithm>
#include <array>
#include <map>
#include <oneapi/dnnl/dnnl.hpp>

#include "cpu/epilogue.h"
#include "cpu/scratch.h"

namespace ds::cpu {

namespace avx512 {
FinishFn finish_for(DType c, DType work) noexcept;
void linear_cross_entropy_by(MatmulFn product, TensorView losses, TensorView dh, TensorView dweight, TensorView dbias,
                             TensorView h, TensorView weight, TensorView bias, TensorView targets, TensorView logits,
                             const CrossEntropyParams&, Stream&) noexcept;
void linear_cross_entropy_scratch_by(MatmulFn product, TensorView losses, TensorView dh, TensorView dweight,
                                     TensorView dbias, TensorView h, TensorView weight, TensorView bias,
                                     TensorView targets, TensorView logits, const CrossEntropyParams&,
                                     Stream&) noexcept;
void matmul_scratch(TensorView c, TensorView a, TensorView b, TensorView bias, TensorView preact, TensorView residual,
                    const MatmulParams&, Stream&) noexcept;
void set_scratch_ops(OpTable& ops) noexcept;
const OpTable& table() noexcept;
}  // namespace avx512
namespace avx512_bf16 {
const OpTable& table() noexcept;
void set_scratch_ops(OpTable& ops) noexcept;
}  // namespace avx512_bf16

namespace onednn {
namespace {

using Type = dnnl::memory::data_type;

struct Shape {
  i64 m, n, k, lda, ldb, ldc;
  bool trans_a, trans_b, fp32_out;
  auto operator<=>(const Shape&) const = default;
};

// oneDNN uses OpenMP threads, and each of our threads must work alone. The setting is per calling thread and outlives
// the call.
struct Place {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  Place() { omp_set_num_threads(1); }
};
const Place& place() {
  thread_local const Place here;
  return here;
}

class Product {
 public:
  Product(const dnnl::engine& engine, const Shape& s) : Product(engine, make(engine, s)) {}

  // For a product of this shape that no thread has created yet.
  static size_t scratch_bytes(const dnnl::engine& engine, const Shape& s) {
    return make(engine, s).scratchpad_desc().get_size();
  }

  void operator()(const dnnl::stream& stream, void* c, const void* a, const void* b, void* scratch) const {
    const dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, point(a_, const_cast<void*>(a))},
                                    {DNNL_ARG_WEIGHTS, point(b_, const_cast<void*>(b))},
                                    {DNNL_ARG_DST, point(c_, c)},
                                    {DNNL_ARG_SCRATCHPAD, point(scratch_, scratch)}};
    dnnl::error::wrap_c_api(dnnl_primitive_execute(primitive_.get(), stream.get(), 4, args), "oneDNN: matmul");
  }

 private:
  Product(const dnnl::engine& engine, const dnnl::matmul::primitive_desc& d)
      : primitive_(d),
        a_(d.src_desc(), engine, nullptr),
        b_(d.weights_desc(), engine, nullptr),
        c_(d.dst_desc(), engine, nullptr),
        scratch_(d.scratchpad_desc(), engine, nullptr) {}

  static dnnl::matmul::primitive_desc make(const dnnl::engine& engine, const Shape& s) {
    const auto rows = [](i64 m, i64 n, Type type, i64 ld, bool trans) {
      return dnnl::memory::desc({m, n}, type, trans ? dnnl::memory::dims{1, ld} : dnnl::memory::dims{ld, 1});
    };
    dnnl::primitive_attr attr;
    attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    return {
        dnnl::matmul::desc(rows(s.m, s.k, Type::bf16, s.lda, s.trans_a), rows(s.k, s.n, Type::bf16, s.ldb, s.trans_b),
                           rows(s.m, s.n, s.fp32_out ? Type::f32 : Type::bf16, s.ldc, false)),
        attr, engine};
  }

  static dnnl_memory_t point(const dnnl::memory& m, void* data) {
    dnnl::error::wrap_c_api(dnnl_memory_set_data_handle(m.get(), data), "oneDNN: memory");
    return m.get();
  }

  dnnl::matmul primitive_;
  dnnl::memory a_, b_, c_, scratch_;
};

// Products of groups and of matrices in panels or of codes are ours, since the bits of oneDNN's depend on the number of
// rows: those of bf16 pairs, which every CPU with AMX has.
bool has_pairs() noexcept { return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"); }
const OpTable& ours() noexcept { return has_pairs() ? avx512_bf16::table() : avx512::table(); }
const OpTable& our_scratch() noexcept {
  static const OpTable ops = [] {
    OpTable t = no_ops();
    has_pairs() ? avx512_bf16::set_scratch_ops(t) : avx512::set_scratch_ops(t);
    return t;
  }();
  return ops;
}
void take(OpTable& ops, const OpTable& from) noexcept {
  ops.pack_matrix = from.pack_matrix;
  ops.panels = from.panels;
  ops.panels_bf16 = from.panels_bf16;
  ops.grouped_matmul = from.grouped_matmul;
  ops.grouped_matmul_grad = from.grouped_matmul_grad;
}

// oneDNN 2.6 has no fp16 product, and its fp32 product is no faster than ours; below this size calls cost more.
bool taken(DType work, i64 M, i64 N, i64 K, const MatmulParams& p) noexcept {
  return work == DType::BF16 && std::min({M, N, K}) >= 16 && !p.rowwise;
}

struct Tile {
  i64 m = 512, n = 1024;
};
// Large enough to pay for oneDNN's copies, numerous enough for about sixteen threads.
Tile tile_for(i64 M, i64 N) noexcept {
  Tile t;
  const auto count = [&] { return ((M + t.m - 1) / t.m) * ((N + t.n - 1) / t.n); };
  while (count() < 16 && t.n > 256) {
    t.n /= 2;
    if (count() < 16) t.m /= 2;
  }
  return t;
}

// A product in tiles. oneDNN computes a tile's final result, or its fp32 sums in scratch if more has to be done with
// them.
struct Cut {
  Shape whole;
  bool plain;
  Tile tile;

  Cut(const TensorView& c, const TensorView& a, const TensorView& b, bool is_plain, const MatmulParams& p) noexcept
      : whole{c.dim(0),    c.dim(1),    a.dim(p.trans_a ? 0 : 1),
              a.stride[0], b.stride[0], is_plain ? c.stride[0] : 0,
              p.trans_a,   p.trans_b,   !is_plain || c.dtype == DType::F32},
        plain(is_plain),
        tile(tile_for(whole.m, whole.n)) {}

  i64 tiles_n() const noexcept { return (whole.n + tile.n - 1) / tile.n; }
  i64 tiles() const noexcept { return (whole.m + tile.m - 1) / tile.m * tiles_n(); }
  Shape shape_of(i64 rows, i64 columns) const noexcept {
    Shape s = whole;
    s.m = rows, s.n = columns;
    if (!plain) s.ldc = columns;
    return s;
  }
  size_t sums_bytes(i64 rows, i64 columns) const noexcept {
    return plain ? 0 : (static_cast<size_t>(rows * columns) * sizeof(float) + 63) / 64 * 64;
  }
};

bool is_plain(const TensorView& bias, const TensorView& preact, const TensorView& residual, const MatmulParams& p) {
  return !bias && !preact && !residual && !p.accumulate && p.activation == Activation::None;
}

// A worker's need for any tile: the sums, followed by oneDNN's scratchpad.
size_t scratch_bytes(const Cut& cut) {
  thread_local std::map<Shape, size_t> known;  // without sums ldc is never 0, so the shape tells whether there are any
  if (const auto found = known.find(cut.whole); found != known.end()) return found->second;
  const auto sizes = [](i64 n, i64 tile) { return std::array{std::min(n, tile), n % tile}; };  // the last one: the edge
  size_t most = 0;
  for (const i64 rows : sizes(cut.whole.m, cut.tile.m)) {
    for (const i64 columns : sizes(cut.whole.n, cut.tile.n)) {
      if (rows == 0 || columns == 0) continue;
      const size_t pad = Product::scratch_bytes(place().engine, cut.shape_of(rows, columns));
      most = std::max(most, cut.sums_bytes(rows, columns) + pad);
    }
  }
  known.emplace(cut.whole, most);
  return most;
}

void matmul(TensorView c, TensorView a, TensorView b, TensorView bias, TensorView preact, TensorView residual,
            const MatmulParams& p, Stream& stream) noexcept {
  const i64 M = c.dim(0), N = c.dim(1), K = a.dim(p.trans_a ? 0 : 1);
  if (b.panels || b.codes) return ours().matmul(c, a, b, bias, preact, residual, p, stream);
  if (!taken(a.dtype, M, N, K, p)) return avx512::table().matmul(c, a, b, bias, preact, residual, p, stream);

  const Cut cut(c, a, b, is_plain(bias, preact, residual, p), p);
  const Epilogue e{c, bias, preact, residual, p.activation, p.accumulate};
  const FinishFn finish = avx512::finish_for(c.dtype, a.dtype);
  const Tile tile = cut.tile;
  const i64 tiles_n = cut.tiles_n();
  stream.pool->reserve_scratch(scratch_bytes(cut));
  stream.pool->parallel_for(cut.tiles(), [&](i64 t, int worker) {
    const Place& here = place();
    thread_local std::map<Shape, Product> products;
    const i64 row = t / tiles_n * tile.m, rows = std::min(tile.m, M - row);
    const i64 column = t % tiles_n * tile.n, columns = std::min(tile.n, N - column);
    const Shape shape = cut.shape_of(rows, columns);
    auto found = products.find(shape);
    if (found == products.end()) found = products.try_emplace(shape, here.engine, shape).first;

    char* const scratch = static_cast<char*>(stream.pool->scratch(worker));
    void* const out =
        cut.plain ? c.as<char>() + (row * c.stride[0] + column) * dtype_bytes(c.dtype) : static_cast<void*>(scratch);
    found->second(here.stream, out, a.as<bf16>() + row * (p.trans_a ? 1 : a.stride[0]),
                  b.as<bf16>() + column * (p.trans_b ? b.stride[0] : 1), scratch + cut.sums_bytes(rows, columns));
    if (!cut.plain) finish(e, static_cast<const float*>(out), columns, row, column, rows, columns);
  });
}

void matmul_scratch(TensorView c, TensorView a, TensorView b, TensorView bias, TensorView preact, TensorView residual,
                    const MatmulParams& p, Stream& stream) noexcept {
  if (b.panels || b.codes) return our_scratch().matmul(c, a, b, bias, preact, residual, p, stream);
  if (!taken(a.dtype, c.dim(0), c.dim(1), a.dim(p.trans_a ? 0 : 1), p))
    return avx512::matmul_scratch(c, a, b, bias, preact, residual, p, stream);
  note_scratch(stream, scratch_bytes(Cut(c, a, b, is_plain(bias, preact, residual, p), p)));
}

void linear_cross_entropy(TensorView losses, TensorView dh, TensorView dweight, TensorView dbias, TensorView h,
                          TensorView weight, TensorView bias, TensorView targets, TensorView logits,
                          const CrossEntropyParams& p, Stream& stream) noexcept {
  avx512::linear_cross_entropy_by(matmul, losses, dh, dweight, dbias, h, weight, bias, targets, logits, p, stream);
}

void linear_cross_entropy_scratch(TensorView losses, TensorView dh, TensorView dweight, TensorView dbias, TensorView h,
                                  TensorView weight, TensorView bias, TensorView targets, TensorView logits,
                                  const CrossEntropyParams& p, Stream& stream) noexcept {
  avx512::linear_cross_entropy_scratch_by(matmul_scratch, losses, dh, dweight, dbias, h, weight, bias, targets, logits,
                                          p, stream);
}

}  // namespace

// The AVX-512 table with these products, under the given name.
OpTable table(std::string_view name) noexcept {
  OpTable ops = avx512::table();
  ops.name = name;
  ops.matmul = matmul;
  ops.linear_cross_entropy = linear_cross_entropy;
  take(ops, ours());
  return ops;
}

void set_scratch_ops(OpTable& ops) noexcept {
  avx512::set_scratch_ops(ops);
  ops.matmul = matmul_scratch;
  ops.linear_cross_entropy = linear_cross_entropy_scratch;
  take(ops, our_scratch());
}

}  // namespace onednn
}  // namespace ds::cpu
