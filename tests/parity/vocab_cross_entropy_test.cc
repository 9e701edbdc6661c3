// SPDX-License-Identifier: Apache-2.0
// Cross-entropy over a vocabulary in parts: each op against the oracle, and all of them together, with the products
// that a caller makes, against linear_cross_entropy of the whole vocabulary.

#include "parity/finite_difference.h"
#include "parity/parity.h"

namespace ds::testing {
namespace vocab_cross_entropy_test {

constexpr i32 kIgnore = -100;

// Every third target is ignored; one target is the first id and one the last.
Tensor targets_for(i64 T, i64 V) {
  Tensor targets(DType::I32, {T});
  for (i64 t = 0; t < T; ++t) targets.set(t, static_cast<float>(t % 3 == 1 ? kIgnore : (t * 7919 + 3) % V));
  if (T > 3) targets.set(2, 0), targets.set(3, static_cast<float>(V - 1));
  return targets;
}

// Logits whose rows lie apart; the memory between them is compared too.
struct Logits {
  Tensor all;
  TensorView view;
  Logits(i64 R, i64 V, i64 gap) : all(DType::F32, {R, V + gap}) {
    all.randomize(1, 2.0f);
    view = all;
    view.shape[1] = V;
  }
  Logits(const Logits& o) : all(o.all), view(o.view) { view.data = all.view().data; }
  Logits& operator=(const Logits&) = delete;
};

struct Numbers {
  explicit Numbers(i64 R)
      : max(DType::F32, {R}), sum(DType::F32, {R}), at_target(DType::F32, {R}), losses(DType::F32, {R}) {}
  Tensor max, sum, at_target, losses;
};

TEST(VocabCrossEntropy, EveryOpAgreesWithTheOracle) {
  struct Shape {
    i64 R, V, first, gap;
  };
  for (const auto [R, V, first, gap] : {Shape{1, 1, 0, 0},
                                        {5, 7, 3, 0},
                                        {9, 33, 0, 3},
                                        {21, 130, 200, 6},
                                        {6, 1030, 1030, 2},
                                        {4, 40000, 9, 0},
                                        {0, 5, 0, 0}}) {
    for (DType work : kWorkDTypes) {
      Tensor targets = targets_for(R, first + 2 * V);
      for (i64 r = 0; r < R; r += 4) targets.set(r, static_cast<float>(first + r % V));  // some are surely here
      const Logits z(R, V, gap);
      CrossEntropyParams params{.ignore_index = kIgnore, .grad_scale = 0.3f};
      if (gap > 0) params.label_smoothing = 0.1f, params.z_loss = 1e-2f, params.vocab = first + 2 * V;
      ThreadPool one(1);
      Stream alone{&one};
      // Numbers of other parts, so that this one's are not all there is.
      Numbers want(R), given(R);
      ref_ops().vocab_max(want.max, z.view, alone);
      for (i64 r = 0; r < R; ++r) given.max.set(r, want.max.at(r) + static_cast<float>(r % 2));
      ref_ops().vocab_sums(want.sum, want.at_target, z.view, given.max, targets, first, params, alone);
      for (i64 r = 0; r < R; ++r) {
        given.sum.set(r, want.sum.at(r) * 1.25f);
        const i64 own = targets.view().as<i32>()[r] - first;
        given.at_target.set(r, own >= 0 && own < V ? want.at_target.at(r) : -0.5f);
      }
      Tensor dz(work, {R, V});
      ref_ops().vocab_grad(want.losses, dz, z.view, given.sum, given.at_target, given.max, targets, first, params,
                           alone);
      for (const OpTable* ops : backends()) {
        const std::string what = std::string(ops->name) + " " + std::to_string(R) + "x" + std::to_string(V) + " " +
                                 std::string(dtype_name(work));
        expect_same_for_any_threads(
            [&](Stream& s) {
              Numbers got(R), alone_again(R);
              Logits in_place = z;
              Tensor beside(work, {R, V}), dense(work, {R, V});
              ops->vocab_max(got.max, in_place.view, s);
              ops->vocab_sums(got.sum, got.at_target, in_place.view, given.max, targets, first, params, s);
              ops->vocab_grad(got.losses, {}, in_place.view, given.sum, given.at_target, given.max, targets, first,
                              params, s);
              expect_same_bits(in_place.all, z.all, what + ": logits are read only");
              ops->vocab_grad({}, beside, in_place.view, given.sum, given.at_target, given.max, targets, first, params,
                              s);
              expect_same_bits(in_place.all, z.all, what + ": gradient elsewhere");
              const TensorView rows = gradient_rows(in_place.view, work);
              ops->vocab_grad(alone_again.losses, rows, in_place.view, given.sum, given.at_target, given.max, targets,
                              first, params, s);
              for (i64 r = 0; r < R; ++r) {
                std::memcpy(dense.view().rows(r, 1).data, rows.rows(r, 1).data,
                            static_cast<size_t>(V * dtype_bytes(work)));
                for (i64 c = V; c < V + gap; ++c) {
                  EXPECT_EQ(in_place.all.at(r * (V + gap) + c), z.all.at(r * (V + gap) + c)) << what;
                }
              }
              expect_same_bits(dense, beside, what + ": in place or not");
              expect_same_bits(got.losses, alone_again.losses, what + ": with or without dz");
              expect_same_bits(got.max, want.max, what + ": max");
              expect_close(got.sum, want.sum, 64, what + ": sum");
              expect_close(got.at_target, want.at_target, 2, what + ": at target");
              expect_close(got.losses, want.losses, 64, what + ": losses", 1);
              expect_close(dense, dz, work == DType::F32 ? 64 : 2.1, what + ": dz");
              return std::vector<Tensor>{got.max, got.sum, got.at_target, got.losses, dense};
            },
            what);
        if (HasFailure()) return;
      }
    }
  }
}

struct Case {
  i64 T, C;
  std::vector<i64> cuts;  // of the vocabulary: 0 .. V
  DType work;
  i64 chunk;
  bool bias = true;
  i64 pad = 0;         // between rows of logits
  bool terms = false;  // label smoothing and z-loss

  i64 V() const { return cuts.back(); }
  CrossEntropyParams params() const {
    CrossEntropyParams p{.ignore_index = kIgnore, .grad_scale = 0.1f, .vocab = V()};
    if (terms) p.label_smoothing = 0.1f, p.z_loss = 1e-2f;
    return p;
  }
  std::string name() const {
    return std::to_string(T) + "x" + std::to_string(C) + "x" + std::to_string(V()) + " in " +
           std::to_string(cuts.size() - 1) + " " + std::string(dtype_name(work));
  }
};
struct Result {
  Tensor losses, dh, dweight, dbias;
};
struct Inputs {
  Tensor h, weight, bias, targets;
  explicit Inputs(const Case& c)
      : h(c.work, {c.T, c.C}), weight(c.work, {c.V(), c.C}), bias(c.work, {c.V()}), targets(targets_for(c.T, c.V())) {
    h.randomize(1);
    weight.randomize(2, 0.5f);
    bias.randomize(3, 0.25f);
  }
};

// The steps of all ranks, one rank after the other, with host loops for the reductions. dh of several ranks is summed
// in fp32 and rounded once.
Result in_parts(const OpTable& ops, const Case& c, const Inputs& in, Stream& s) {
  Result r{Tensor(DType::F32, {c.T}), Tensor(c.work, {c.T, c.C}), Tensor(DType::F32, {c.V(), c.C}),
           Tensor(DType::F32, {c.V()})};
  const size_t ranks = c.cuts.size() - 1;
  for (i64 begin = 0; begin < c.T; begin += c.chunk) {
    const i64 rows = std::min(c.chunk, c.T - begin);
    const TensorView h = in.h.view().rows(begin, rows), targets = in.targets.view().rows(begin, rows);
    Numbers all(rows);
    all.max.fill(-INFINITY);
    all.sum.fill(0);
    all.at_target.fill(0);
    std::vector<Logits> z;
    for (size_t rank = 0; rank < ranks; ++rank) {
      const i64 first = c.cuts[rank], count = c.cuts[rank + 1] - first;
      z.emplace_back(rows, count, c.pad);
      ops.matmul(z[rank].view, h, in.weight.view().rows(first, count),
                 c.bias ? in.bias.view().rows(first, count) : TensorView{}, {}, {}, {.trans_b = true}, s);
      Numbers own(rows);
      ops.vocab_max(own.max, z[rank].view, s);
      for (i64 t = 0; t < rows; ++t) all.max.set(t, std::max(all.max.at(t), own.max.at(t)));
    }
    for (size_t rank = 0; rank < ranks; ++rank) {
      Numbers own(rows);
      ops.vocab_sums(own.sum, own.at_target, z[rank].view, all.max, targets, c.cuts[rank], c.params(), s);
      for (i64 t = 0; t < rows; ++t) {
        all.sum.set(t, all.sum.at(t) + own.sum.at(t));
        all.at_target.set(t, all.at_target.at(t) + own.at_target.at(t));
      }
    }
    Tensor dh_sum(DType::F32, {rows, c.C});
    for (size_t rank = 0; rank < ranks; ++rank) {
      const i64 first = c.cuts[rank], count = c.cuts[rank + 1] - first;
      const TensorView dz = gradient_rows(z[rank].view, c.work);
      ops.vocab_grad(r.losses.view().rows(begin, rows), dz, z[rank].view, all.sum, all.at_target, all.max, targets,
                     first, c.params(), s);
      const TensorView weight = in.weight.view().rows(first, count);
      if (ranks == 1) {
        ops.matmul(r.dh.view().rows(begin, rows), dz, weight, {}, {}, {}, {}, s);
      } else {
        ops.matmul(dh_sum, dz, weight, {}, {}, {}, {.accumulate = rank > 0}, s);
      }
      ops.matmul(r.dweight.view().rows(first, count), dz, h, {}, {}, {}, {.trans_a = true, .accumulate = begin > 0}, s);
      ops.column_sum(r.dbias.view().rows(first, count), dz, begin > 0, s);
    }
    if (ranks > 1) ops.cast(r.dh.view().rows(begin, rows), dh_sum, s);
  }
  return r;
}

Result whole(const OpTable& ops, const Case& c, const Inputs& in, Stream& s) {
  Result r{Tensor(DType::F32, {c.T}), Tensor(c.work, {c.T, c.C}), Tensor(DType::F32, {c.V(), c.C}),
           Tensor(DType::F32, {c.V()})};
  Tensor logits(DType::F32, {c.chunk, c.V()});
  CrossEntropyParams params = c.params();
  params.chunk_tokens = c.chunk;
  ops.linear_cross_entropy(r.losses, r.dh, r.dweight, r.dbias, in.h, in.weight, c.bias ? in.bias.view() : TensorView{},
                           in.targets, logits, params, s);
  return r;
}

TEST(VocabCrossEntropy, OnePartIsLinearCrossEntropy) {
  ThreadPool pool(3);
  Stream s{&pool};
  for (const OpTable* ops : backends()) {
    for (DType work : kWorkDTypes) {
      for (const bool bias : {false, true}) {
        for (const Case& c : {Case{21, 17, {0, 1030}, work, 8, bias}, Case{40, 65, {0, 333}, work, 33, bias},
                              Case{9, 8, {0, 5}, work, 9, bias}, Case{21, 17, {0, 1030}, work, 8, bias, 0, true}}) {
          const Inputs in(c);
          const Result want = whole(*ops, c, in, s), got = in_parts(*ops, c, in, s);
          const std::string what = std::string(ops->name) + " " + c.name();
          if (test_device() == nullptr) {
            expect_same_bits(got.losses, want.losses, what + ": losses");
            expect_same_bits(got.dh, want.dh, what + ": dh");
            expect_same_bits(got.dweight, want.dweight, what + ": dweight");
            expect_same_bits(got.dbias, want.dbias, what + ": dbias");
          } else {  // the fused kernel finds maximum and sum in one pass
            const double rounding = epsilon(work) / epsilon(DType::F32);
            expect_close(got.losses, want.losses, 64, what + ": losses");
            expect_close(got.dh, want.dh, work == DType::F32 ? 64 : 6, what + ": dh");
            expect_close(got.dweight, want.dweight, std::max(64.0, 4 * rounding), what + ": dweight");
            expect_close(got.dbias, want.dbias, std::max(64.0, 16 * rounding), what + ": dbias");
          }
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(VocabCrossEntropy, PartsMakeTheWhole) {
  for (const OpTable* ops : backends()) {
    for (DType work : kWorkDTypes) {
      for (const Case& c :
           {Case{21, 17, {0, 300, 1030}, work, 8}, Case{21, 17, {0, 300, 1030}, work, 8, true, 0, true},
            Case{40, 65, {0, 1, 130, 200, 333}, work, 33, true, 3}, Case{9, 8, {0, 3, 5}, work, 9, false, 8}}) {
        const Inputs in(c);
        const std::string what = std::string(ops->name) + " " + c.name();
        ThreadPool pool(2);
        Stream two{&pool};
        const Result want = whole(ref_ops(), c, in, two);
        expect_same_for_any_threads(
            [&](Stream& s) {
              const Result got = in_parts(*ops, c, in, s);
              const double rounding = epsilon(work) / epsilon(DType::F32);
              expect_close(got.losses, want.losses, 64, what + ": losses");
              expect_close(got.dh, want.dh, work == DType::F32 ? 64 : 6, what + ": dh");
              expect_close(got.dweight, want.dweight, std::max(64.0, 4 * rounding), what + ": dweight");
              expect_close(got.dbias, want.dbias, std::max(64.0, 16 * rounding), what + ": dbias");
              return std::vector<Tensor>{got.losses, got.dh, got.dweight, got.dbias};
            },
            what);
        if (HasFailure()) return;
      }
    }
  }
}

// Padding of a vocabulary: a logit of -inf has neither probability nor gradient, and a part may have nothing else.
TEST(VocabCrossEntropy, LogitsOfMinusInfinityCountForNothingAndNaNsForTheirRow) {
  ThreadPool pool(2);
  Stream s{&pool};
  std::vector<const OpTable*> tables = backends();
  tables.push_back(&ref_ops());
  constexpr i64 R = 3, V = 37;
  for (const OpTable* ops : tables) {
    Tensor z(DType::F32, {R, V}), max(DType::F32, {R}), sum(DType::F32, {R}), at_target(DType::F32, {R});
    z.fill(-INFINITY);
    z.set(1 * V + 36, 2.0f);
    z.set(2 * V + 20, NAN), z.set(2 * V + 21, 1.0f);
    Tensor targets(DType::I32, {R});
    targets.fill(1000);
    ops->vocab_max(max, z, s);
    EXPECT_EQ(max.at(0), -INFINITY) << ops->name;
    EXPECT_EQ(max.at(1), 2.0f) << ops->name;
    EXPECT_EQ(max.at(2), 1.0f) << ops->name;
    max.set(0, 5.0f), max.set(1, 3.0f);
    ops->vocab_sums(sum, at_target, z, max, targets, 0, {.ignore_index = kIgnore}, s);
    EXPECT_EQ(sum.at(0), 0.0f) << ops->name;
    EXPECT_NEAR(sum.at(1), std::exp(-1.0), 1e-6) << ops->name;
    EXPECT_TRUE(std::isnan(sum.at(2))) << ops->name;
    sum.set(0, 1.5f), sum.set(1, 1.5f);
    Tensor dz(DType::F32, {R, V});
    ops->vocab_grad({}, dz, z, sum, at_target, max, targets, 0, {}, s);
    for (i64 v = 0; v < V; ++v) {
      EXPECT_EQ(dz.at(v), 0.0f) << ops->name;
      EXPECT_EQ(dz.at(V + v) == 0, v != 36) << ops->name;
      EXPECT_TRUE(std::isnan(dz.at(2 * V + v))) << ops->name;
    }
  }
}

TEST(VocabCrossEntropy, RefGradientMatchesFiniteDifferences) {
  Stream s{};
  constexpr i64 R = 4, V = 9, kCut = 4;
  Doubles z({R, V}), dz({R, V}), max({R}), sum({R}), at_target({R}), losses({R});
  z.randomize(1, 2.0);
  const Tensor targets = targets_for(R, V);
  const auto part = [&](const Doubles& x, i64 first, i64 end) {
    TensorView v = x.view;
    v.data = v.as<double>() + first;
    v.shape[1] = end - first;
    return v;
  };
  const CrossEntropyParams params{
      .ignore_index = kIgnore, .grad_scale = 0.25f, .label_smoothing = 0.3f, .z_loss = 0.05f, .vocab = V};
  const auto forward = [&] {
    ref_ops().vocab_max(max.view, z.view, s);
    std::fill(sum.value.begin(), sum.value.end(), 0.0);
    std::fill(at_target.value.begin(), at_target.value.end(), 0.0);
    Doubles own_sum({R}), own_at({R});
    for (const auto& [first, end] : {std::pair<i64, i64>{0, kCut}, {kCut, V}}) {
      ref_ops().vocab_sums(own_sum.view, own_at.view, part(z, first, end), max.view, targets, first, params, s);
      for (size_t r = 0; r < R; ++r) sum.value[r] += own_sum.value[r], at_target.value[r] += own_at.value[r];
    }
  };
  forward();
  for (const auto& [first, end] : {std::pair<i64, i64>{0, kCut}, {kCut, V}}) {
    ref_ops().vocab_grad({}, part(dz, first, end), part(z, first, end), sum.view, at_target.view, max.view, targets,
                         first, params, s);
  }
  expect_gradient(
      z, dz,
      [&] {
        forward();
        ref_ops().vocab_grad(losses.view, {}, z.view, sum.view, at_target.view, max.view, targets, 0, params, s);
        double total = 0;
        for (double x : losses.value) total += 0.25 * x;
        return total;
      },
      "dz");
}

}  // namespace vocab_cross_entropy_test
}  // namespace ds::testing
