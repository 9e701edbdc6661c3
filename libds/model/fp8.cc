// SPDX-License-Identifier: Apache-2.0
#include "model/fp8.h"

#include <algorithm>

#include "base/check.h"

namespace ds::model {
namespace {

constexpr i64 kPieceUnit = 256;  // codes and scales begin at multiples of it

// Rows of a product whose rows must have the bits that they have alone: a shape that does not depend on their number.
constexpr i64 kRowsTogether = 16;

i64 operand_bytes(i64 rows, i64 k, Fp8Blocks blocks) noexcept {
  const Fp8Layout layout{rows, k, blocks};
  return align_up(layout.code_bytes(), kPieceUnit) + align_up(layout.scale_bytes(), kPieceUnit);
}

struct Operand {
  TensorView codes, scales;
  Fp8Blocks blocks;
};

// Encodes operands into ctx.fp8, one after the other.
class Encoder {
 public:
  explicit Encoder(const PassContext& ctx) : ctx_(ctx) {}

  // x: [rows, k], or [k, rows] if transposed.
  Operand encode(TensorView x, Fp8Blocks blocks, DType format, bool transposed) {
    const Fp8Layout layout{x.dim(transposed ? 1 : 0), x.dim(transposed ? 0 : 1), blocks};
    const Operand o{
        .codes = TensorView::of(take(layout.code_bytes()), format, {layout.padded_rows(), layout.padded_k()}),
        .scales = TensorView::of(take(layout.scale_bytes()), DType::F32, {layout.scale_rows(), layout.scale_columns()}),
        .blocks = blocks};
    ctx_.ops.quantize_fp8(o.codes, o.scales, x, blocks, transposed, ctx_.stream);
    return o;
  }
  // The next operand overwrites everything after this one.
  i64 mark() const noexcept { return at_; }
  void reset(i64 mark) noexcept { at_ = mark; }

 private:
  void* take(i64 bytes) {
    void* const p = ctx_.fp8.as<char>() + at_;
    at_ += align_up(bytes, kPieceUnit);
    DS_ASSERT(at_ <= ctx_.fp8.bytes());
    return p;
  }

  const PassContext& ctx_;
  i64 at_ = 0;
};

void multiply_codes(const PassContext& ctx, TensorView c, const Operand& a, const Operand& b, TensorView bias = {},
                    TensorView residual = {}) {
  ctx.ops.matmul_fp8(c, a.codes, a.scales, b.codes, b.scales, bias, residual, {a.blocks, b.blocks}, ctx.stream);
}

}  // namespace

i64 Fp8Map::bytes(i64 R) const noexcept {
  using enum Fp8Blocks;
  return std::max({operand_bytes(out, in, Squares) + operand_bytes(R, in, Rows),
                   operand_bytes(in, out, Squares) + operand_bytes(R, out, Rows),
                   operand_bytes(out, R, Rows) + operand_bytes(in, R, Rows)});
}

void fp8_forward(const PassContext& ctx, TensorView y, TensorView x, Matrix weight, const LinearForward& o) {
  DS_ASSERT(weight.is_whole());
  Encoder encoder(ctx);
  const Operand w =
      encoder.encode(weight.whole, Fp8Blocks::Squares, DType::F8E4M3, o.orientation == Orientation::InOut);
  const bool activates = o.activation != Activation::None;
  const TensorView product = activates && o.preact ? o.preact : y;
  const i64 R = x.dim(0), step = ctx.rowwise() ? kRowsTogether : R, mark = encoder.mark();
  for (i64 row = 0; row < R; row += step) {
    const i64 n = std::min(step, R - row);
    encoder.reset(mark);
    const Operand rows = encoder.encode(x.rows(row, n), Fp8Blocks::Rows, DType::F8E4M3, false);
    const bool adds = o.residual && !activates;
    multiply_codes(ctx, product.rows(row, n), rows, w, o.bias, adds ? o.residual.rows(row, n) : TensorView{});
  }
  if (!activates) return;
  ctx.ops.activation_fwd(y, product, o.activation, ctx.stream);
  if (o.residual) ctx.ops.add(y, y, o.residual, ctx.stream);
}

void fp8_backward_input(const PassContext& ctx, DType gradients, TensorView dx, TensorView dy, Matrix weight,
                        Orientation orientation, TensorView dx_residual) {
  DS_ASSERT(weight.is_whole());
  Encoder encoder(ctx);
  const Operand w = encoder.encode(weight.whole, Fp8Blocks::Squares, DType::F8E4M3, orientation == Orientation::OutIn);
  multiply_codes(ctx, dx, encoder.encode(dy, Fp8Blocks::Rows, gradients, false), w, {}, dx_residual);
}

void fp8_backward_weight(const PassContext& ctx, DType gradients, Matrix dw, TensorView db, TensorView dy, TensorView x,
                         Orientation orientation) {
  if (dw.whole) {  // else it is not wanted: tiles are refused
    Encoder encoder(ctx);
    const Operand d = encoder.encode(dy, Fp8Blocks::Rows, gradients, true),
                  in = encoder.encode(x, Fp8Blocks::Rows, DType::F8E4M3, true);
    const TensorView sum = ctx.adds_gradients() ? dw.whole : TensorView{};
    const bool out_in = orientation == Orientation::OutIn;
    multiply_codes(ctx, dw.whole, out_in ? d : in, out_in ? in : d, {}, sum);
  }
  if (db) ctx.ops.column_sum(db, dy, ctx.adds_gradients(), ctx.stream);
}

}  // namespace ds::model
