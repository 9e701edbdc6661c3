// SPDX-License-Identifier: Apache-2.0
// copy_heads on every backend: every bit in its place and nothing beside it, for all ways in which dims can lie.

#include "parity/parity.h"

namespace ds::testing {
namespace copy_heads_test {

// A view [B,T,H,D] of a buffer in which the outer dims lie in `order`, outermost first, with `gap` elements between
// runs of D and `skip` elements before the first.
struct Layout {
  int order[3];
  i64 gap = 0, skip = 0;
};
struct Heads {
  Tensor all;
  TensorView view;

  Heads(DType dtype, const i64 (&shape)[4], const Layout& l, u32 seed) {
    i64 step = shape[3] + l.gap;
    view.dtype = dtype;
    view.rank = 4;
    for (size_t d = 0; d < 4; ++d) view.shape[d] = shape[d];
    view.stride[3] = 1;
    for (size_t i = 3; i-- > 0;) {
      view.stride[l.order[i]] = step;
      step *= shape[l.order[i]];
    }
    all = Tensor(dtype, {step + l.skip});
    const RngKey key{seed, 1, 0};
    for (i64 i = 0; i < all.view().bytes(); ++i) {
      all.view().as<u8>()[i] = static_cast<u8>(key.bits(static_cast<u64>(i)) >> 7);
    }
    view.data = all.view().as<char>() + l.skip * dtype_bytes(dtype);
  }
  Heads(const Heads&) = delete;
  Heads& operator=(const Heads&) = delete;
};

void check(DType dtype, const i64 (&shape)[4], const Layout& from, const Layout& to) {
  std::string what(dtype_name(dtype));
  for (i64 n : shape) what += " " + std::to_string(n);
  for (const Layout& l : {from, to}) {
    what += " (";
    for (int d : l.order) what += std::to_string(d);
    what += " " + std::to_string(l.gap) + " " + std::to_string(l.skip) + ")";
  }
  ThreadPool one(1), many(3);
  Stream alone{.pool = &one}, stream{.pool = &many};
  const Heads x(dtype, shape, from, 1);
  const Heads want(dtype, shape, to, 2);
  ref_ops().copy_heads(want.view, x.view, alone);
  for (const OpTable* ops : backends()) {
    const Heads y(dtype, shape, to, 2);
    ops->copy_heads(y.view, x.view, stream);
    expect_same_bits(y.all, want.all, std::string(ops->name) + " " + what);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

constexpr Layout kOrders[] = {{{0, 1, 2}}, {{0, 2, 1}}, {{1, 0, 2}}, {{1, 2, 0}}, {{2, 0, 1}}, {{2, 1, 0}}};

TEST(CopyHeads, EveryOrderOfDims) {
  constexpr i64 kShapes[][4] = {{2, 5, 3, 8}, {3, 4, 2, 7}, {1, 33, 5, 64}, {2, 1, 6, 16}, {4, 9, 1, 2}, {1, 1, 1, 40}};
  for (DType dtype : {DType::F32, DType::BF16, DType::F16, DType::I32, DType::F64, DType::U8}) {
    for (const auto& shape : kShapes) {
      for (const Layout& from : kOrders) {
        for (const Layout& to : kOrders) {
          check(dtype, shape, from, to);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(CopyHeads, GapsAndAddressesOfAnyAlignment) {
  constexpr i64 kShapes[][4] = {{2, 5, 3, 8}, {1, 7, 4, 64}, {3, 1, 2, 13}};
  for (DType dtype : {DType::F32, DType::BF16, DType::U8}) {
    for (const auto& shape : kShapes) {
      for (i64 gap : {1, 2, 4, 8, 16}) {
        for (i64 skip : {0, 1, 2, 4, 8}) {
          check(dtype, shape, {{0, 1, 2}, gap, 0}, {{2, 1, 0}, 0, skip});
          check(dtype, shape, {{0, 1, 2}, 0, skip}, {{0, 1, 2}, gap, skip});
          check(dtype, shape, {{1, 0, 2}, gap, skip}, {{0, 1, 2}, gap, 0});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(CopyHeads, LongRunsAreSharedAndNothingIsNothing) {
  check(DType::F32, {1, 3, 1, 50021}, kOrders[0], kOrders[0]);
  check(DType::BF16, {2, 5, 40, 1000}, kOrders[0], kOrders[2]);
  check(DType::BF16, {2, 5, 40, 1000}, {{0, 1, 2}, 0, 3}, kOrders[0]);
  check(DType::F32, {2, 700, 3, 24}, kOrders[0], kOrders[4]);
  for (int d = 0; d < 4; ++d) {
    i64 shape[4] = {2, 3, 4, 5};
    shape[d] = 0;
    check(DType::F32, shape, kOrders[0], kOrders[5]);
  }
}

// Ulysses: tokens of a rank with all heads become heads of a rank with all tokens, by way of one packed buffer per
// peer.
TEST(CopyHeads, PackingForAnAllToAllAndUnpackingAreInverse) {
  constexpr i64 kRanks = 3, B = 2, T = 4, H = 6, D = 10, kHeads = H / kRanks;
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : backends()) {
    for (DType dtype : kWorkDTypes) {
      const Tensor whole = Tensor(dtype, {B, kRanks * T, H, D}).randomize(1);
      for (i64 to = 0; to < kRanks; ++to) {
        Tensor gathered(dtype, {B, kRanks * T, kHeads, D});
        for (i64 from = 0; from < kRanks; ++from) {
          const auto part = [&](const Tensor& x, i64 token, i64 head, i64 heads) {
            TensorView v = x;
            v.data = v.as<char>() + (token * v.stride[1] + head * v.stride[2]) * dtype_bytes(dtype);
            v.shape[1] = T;
            v.shape[2] = heads;
            return v;
          };
          Tensor wire(dtype, {T, B, kHeads, D});  // tokens first, as a ring of sequence parts wants them
          TensorView wire_view = TensorView::of(wire.view().data, dtype, {B, T, kHeads, D});
          wire_view.stride[0] = kHeads * D;
          wire_view.stride[1] = B * kHeads * D;
          ops->copy_heads(wire_view, part(whole, from * T, to * kHeads, kHeads), s);
          ops->copy_heads(part(gathered, from * T, 0, kHeads), wire_view, s);
        }
        for (i64 i = 0; i < gathered.numel(); ++i) {
          const i64 row = i / (kHeads * D), column = i % (kHeads * D);
          ASSERT_EQ(gathered.at(i), whole.at(row * H * D + to * kHeads * D + column)) << ops->name << " " << i;
        }
      }
    }
  }
}

}  // namespace copy_heads_test
}  // namespace ds::testing
