// SPDX-License-Identifier: Apache-2.0
// Ops of a forward pass give a row the bits that it has alone, whatever the number of rows. Those of products,
// attention and draws have tests of their own.

#include <fmt/format.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "parity.h"

namespace ds::testing {
namespace row_bits_test {

constexpr i64 kRows = 70;

// Rows [first, first + count) of each tensor.
using Views = std::vector<TensorView>;
Views rows_of(const std::vector<Tensor*>& tensors, i64 first, i64 count) {
  Views views;
  for (Tensor* t : tensors) views.push_back(t->view().rows(first, count));
  return views;
}

// Calls op(rows of `out`, rows of `in`) with all rows, and with every row and some runs of rows by themselves.
template <class Op>
void expect_rows_alone(const std::string& what, const std::vector<Tensor*>& out, const std::vector<Tensor*>& in,
                       const Op& op) {
  const std::vector<Tensor> before = [&] {
    std::vector<Tensor> copies;
    for (const Tensor* t : out) copies.push_back(*t);
    return copies;
  }();
  op(rows_of(out, 0, kRows), rows_of(in, 0, kRows));
  std::vector<Tensor> want;
  for (const Tensor* t : out) want.push_back(*t);
  for (const i64 step : {1, 9, 33}) {
    for (size_t i = 0; i < out.size(); ++i) *out[i] = before[i];
    for (i64 r = 0; r < kRows; r += step) {
      const i64 n = std::min(step, kRows - r);
      op(rows_of(out, r, n), rows_of(in, r, n));
    }
    for (size_t i = 0; i < out.size(); ++i)
      expect_same_bits(*out[i], want[i], fmt::format("{}: result {}, {} rows at a time", what, i, step));
  }
}

// Calls f(ops, stream, work dtype, columns, name).
template <class F>
void for_all(std::initializer_list<i64> columns, F&& f) {
  for (const OpTable* ops : backends()) {
    for (const DType work : kWorkDTypes) {
      for (const i64 C : columns) {
        ThreadPool pool(2);
        Stream stream{&pool};
        f(*ops, stream, work, C, fmt::format("{} {} {} columns", ops->name, dtype_name(work), C));
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

// Rows in registers, and too long for them.
TEST(RowBits, OfNorms) {
  for_all({1, 37, 64, 896, 18000}, [](const OpTable& ops, Stream& s, DType work, i64 C, const std::string& what) {
    Tensor x(work, {kRows, C}), y(work, {kRows, C}), mean(DType::F32, {kRows}), rstd(DType::F32, {kRows});
    Tensor weight(work, {C}), bias(work, {C});
    x.randomize(1), weight.randomize(2), bias.randomize(3), y.fill(0), mean.fill(0), rstd.fill(0);
    expect_rows_alone(what + " layernorm", {&y, &mean, &rstd}, {&x}, [&](const Views& out, const Views& in) {
      ops.layernorm_fwd(out[0], out[1], out[2], in[0], weight, bias, 1e-5f, s);
    });
    expect_rows_alone(what + " rmsnorm", {&y, &rstd}, {&x}, [&](const Views& out, const Views& in) {
      ops.rmsnorm_fwd(out[0], out[1], in[0], weight, 1e-5f, s);
    });
  });
}

TEST(RowBits, OfElements) {
  for_all({1, 37, 64, 1030}, [](const OpTable& ops, Stream& s, DType work, i64 C, const std::string& what) {
    Tensor x(work, {kRows, C}), up(work, {kRows, C}), sums(DType::F32, {kRows, C}), y(work, {kRows, C}),
        bias(work, {C});
    x.randomize(1), up.randomize(2), sums.randomize(3), bias.randomize(4), y.fill(0);
    for (const Activation kind : {Activation::GeluTanh, Activation::GeluErf, Activation::Silu}) {
      expect_rows_alone(what + " activation", {&y}, {&x},
                        [&](const Views& out, const Views& in) { ops.activation_fwd(out[0], in[0], kind, s); });
    }
    expect_rows_alone(what + " swiglu", {&y}, {&x, &up},
                      [&](const Views& out, const Views& in) { ops.swiglu_fwd(out[0], in[0], in[1], s); });
    expect_rows_alone(what + " add", {&y}, {&x, &up},
                      [&](const Views& out, const Views& in) { ops.add(out[0], in[0], in[1], s); });
    expect_rows_alone(what + " bias_residual", {&y}, {&sums, &x},
                      [&](const Views& out, const Views& in) { ops.bias_residual(out[0], in[0], bias, in[1], s); });
  });
}

TEST(RowBits, OfRotations) {
  for_all({6, 64, 80}, [](const OpTable& ops, Stream& s, DType work, i64 D, const std::string& what) {
    constexpr i64 H = 5;
    Tensor x(work, {kRows, H * D}), y(work, {kRows, H * D}), cos(DType::F32, {kRows, D / 2}),
        sin = cos, positions(DType::I32, {kRows});
    x.randomize(1), cos.randomize(2), sin.randomize(3), y.fill(0);
    for (i64 t = 0; t < kRows; ++t) positions.set(t, static_cast<float>(t * 31 % kRows));
    const auto heads = [&](const TensorView& v) { return TensorView::of(v.data, work, {1, v.dim(0), H, D}); };
    for (const bool interleaved : {false, true}) {
      expect_rows_alone(what + " rope", {&y}, {&x, &positions}, [&](const Views& out, const Views& in) {
        ops.rope(heads(out[0]), heads(in[0]), cos, sin, in[1], {.interleaved = interleaved}, s);
      });
    }
  });
}

TEST(RowBits, OfLookUps) {
  for_all({37, 64, 1030}, [](const OpTable& ops, Stream& s, DType work, i64 C, const std::string& what) {
    constexpr i64 V = 50;
    Tensor table(work, {V, C}), ids(DType::I32, {kRows}), y(work, {kRows, C});
    table.randomize(1), y.randomize(2);
    for (i64 r = 0; r < kRows; ++r) ids.set(r, static_cast<float>(r * 7 % (V + 4)));
    for (const bool accumulate : {false, true}) {
      expect_rows_alone(what, {&y}, {&ids}, [&](const Views& out, const Views& in) {
        ops.embedding_fwd(out[0], table, in[0], 2, accumulate, s);
      });
    }
  });
}

TEST(RowBits, OfCodes) {
  for_all({40, 64, 1032}, [](const OpTable& ops, Stream& s, DType work, i64 C, const std::string& what) {
    Tensor x(work, {kRows, C});
    x.randomize(1);
    for (const CodeFormat format : {CodeFormat{.bits = 8, .block = 0}, CodeFormat{.bits = 8, .block = 32}}) {
      const i64 bytes = format.code_bytes(C), blocks = format.num_blocks(C);
      ASSERT_EQ(bytes % 4, 0);
      Tensor codes(DType::I32, {kRows, bytes / 4}), scales(DType::F32, {kRows, blocks});
      codes.fill(0), scales.fill(0);
      expect_rows_alone(what + " quantize", {&codes, &scales}, {&x}, [&](const Views& out, const Views& in) {
        ops.quantize(TensorView::of(out[0].data, DType::U8, {out[0].dim(0), bytes}), out[1], in[0], {}, format, {}, s);
      });
    }
  });
}

// The logits of routers are fp32 whatever the model's dtype, which matters to combine_rows alone.
TEST(RowBits, OfRouters) {
  for_all({8, 33, 160}, [](const OpTable& ops, Stream& s, DType work, i64 E, const std::string& what) {
    constexpr i64 k = 4, C = 41;
    Tensor logits(DType::F32, {kRows, E}), bias(DType::F32, {E}), scores = logits, weights(DType::F32, {kRows, k}),
                                                                  chosen(DType::I32, {kRows, k});
    logits.randomize(1, 2), bias.randomize(2, 0.1f), scores.fill(0), weights.fill(0), chosen.fill(0);
    for (const bool sigmoid : {false, true}) {
      expect_rows_alone(
          what + " route", {&chosen, &weights, &scores}, {&logits}, [&](const Views& out, const Views& in) {
            ops.route(out[0], out[1], out[2], in[0], bias, {}, {.sigmoid = sigmoid, .normalise = true}, s);
          });
    }
    Tensor x(work, {kRows * k, C}), residual(work, {kRows, C}), places(DType::I32, {kRows, k}), y(work, {kRows, C});
    x.randomize(3), residual.randomize(4), y.fill(0);
    for (i64 i = 0; i < kRows * k; ++i) places.set(i, static_cast<float>(i * 37 % (kRows * k)));
    expect_rows_alone(what + " combine_rows", {&y}, {&places, &weights, &residual},
                      [&](const Views& out, const Views& in) { ops.combine_rows(out[0], x, in[0], in[1], in[2], s); });
  });
}

// Logits of linear_cross_entropy are those of a product row by row: so losses, too, depend on their rows alone.
TEST(RowBits, OfLosses) {
  for_all({64, 417}, [](const OpTable& ops, Stream& s, DType work, i64 C, const std::string& what) {
    for (const i64 V : {203, 208}) {
      Tensor h(work, {kRows, C}), weight(work, {V, C}), targets(DType::I32, {kRows}), losses(DType::F32, {kRows});
      h.randomize(1), weight.randomize(2, 0.1f), losses.fill(0);
      for (i64 r = 0; r < kRows; ++r) targets.set(r, static_cast<float>(r * 31 % V));
      const TensorView none{};
      for (const i64 chunk : {8, 70}) {
        Tensor logits(DType::F32, {chunk, V});
        expect_rows_alone(fmt::format("{} losses of {}", what, V), {&losses}, {&h, &targets},
                          [&](const Views& out, const Views& in) {
                            ops.linear_cross_entropy(out[0], none, none, none, in[0], weight, none, in[1], logits,
                                                     {.chunk_tokens = chunk, .rowwise = true}, s);
                          });
        // GPUs leave the logits of the last chunk.
        if (chunk < kRows || V % 8 != 0 || &ops != device_ops()) continue;
        ops.linear_cross_entropy(losses, none, none, none, h, weight, none, targets, logits,
                                 {.chunk_tokens = chunk, .rowwise = true}, s);
        Tensor product(DType::F32, {kRows, V});
        ops.matmul(product, h, weight, {}, {}, {}, {.trans_b = true, .rowwise = true}, s);
        expect_same_bits(logits, product, what + " logits");
      }
    }
  });
}

}  // namespace row_bits_test
}  // namespace ds::testing
