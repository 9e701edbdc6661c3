// SPDX-License-Identifier: Apache-2.0
// evoformer_attention_fwd and evoformer_attention_bwd: ref against finite differences, every backend against ref over
// dtypes, lengths, sequences, heads, biases and masks, on slices of fused buffers; PyTorch's results; and the promises
// about threads, memory, masked rows and non-finite values.

#include "parity/finite_difference.h"
#include "parity/parity.h"
#include "parity/torch_fixture.h"
#include "slow_set.h"

namespace ds::testing {
namespace evoformer_test {

enum class Mask { None, Zeros, Large, Infinite };  // of bias1: none; 0; some -1e9; some -inf

struct Case {
  i64 B = 1, N = 1, T = 33, H = 2, D = 16;
  DType dtype = DType::F32;
  Mask mask = Mask::Large;
  bool pairs = true;      // bias2
  bool wide = false;      // biases in fp32
  bool all = false;       // all keys of the last sequence are masked
  float spread = 1;       // of q
  bool gradients = true;  // of the biases

  i64 M() const { return B * N; }
  DType bias_dtype() const { return wide ? DType::F32 : dtype; }
  EvoformerParams params() const { return {.scale = 1.0f / std::sqrt(static_cast<float>(D)), .num_seq = N}; }
  std::string name() const {
    std::string s(dtype_name(dtype));
    for (i64 x : {B, N, T, H, D}) s += " " + std::to_string(x);
    return s + " mask " + std::to_string(static_cast<int>(mask)) + (pairs ? " pairs" : "") + (wide ? " wide" : "") +
           (all ? " all" : "");
  }
};

// Heads [first, first + H) of a buffer [M, T, heads, D].
TensorView heads_of(const Tensor& x, i64 first, i64 H) {
  TensorView v = x;
  v.data = v.as<char>() + first * v.dim(3) * dtype_bytes(v.dtype);
  v.shape[2] = H;
  return v;
}
Tensor packed(const TensorView& x) {
  Tensor out(x.dtype, {x.dim(0), x.dim(1), x.dim(2), x.dim(3)});
  const size_t size = static_cast<size_t>(dtype_bytes(x.dtype));
  for (i64 i = 0; i < out.numel(); ++i) {
    const i64 d = i % x.dim(3), h = i / x.dim(3) % x.dim(2), t = i / (x.dim(3) * x.dim(2)) % x.dim(1);
    const i64 m = i / (x.dim(3) * x.dim(2) * x.dim(1));
    const i64 from = m * x.stride[0] + t * x.stride[1] + h * x.stride[2] + d;
    std::memcpy(out.view().as<char>() + i * dtype_bytes(x.dtype), x.as<char>() + from * dtype_bytes(x.dtype), size);
  }
  return out;
}
// The first `columns` of a wider last dim.
TensorView narrow(const Tensor& x, i64 columns) {
  TensorView v = x;
  v.shape[v.rank - 1] = columns;
  return v;
}

struct Inputs {
  explicit Inputs(const Case& c)
      : qkv(c.dtype, {c.M(), c.T, 3 * c.H, c.D}),
        dout(c.dtype, {c.M(), c.T, c.H + 1, c.D}),
        bias1(c.bias_dtype(), {c.M(), c.T + 3}),
        bias2(c.bias_dtype(), {c.B, c.H, c.T, c.T + 5}),
        H(c.H),
        T(c.T),
        masked(c.mask != Mask::None),
        pairs(c.pairs) {
    qkv.randomize(1);
    for (i64 i = 0; c.spread != 1 && i < qkv.numel(); ++i) {
      if (i / c.D % (3 * c.H) < c.H) qkv.set(i, qkv.at(i) * c.spread);
    }
    dout.randomize(2);
    bias2.randomize(3);
    // A third of the keys is masked, and all of the last sequence where that is asked for.
    const float large = c.mask == Mask::Infinite ? -INFINITY : c.mask == Mask::Large ? -1e9f : 0.0f;
    for (i64 i = 0; i < bias1.numel(); ++i) {
      const bool hidden = (c.all && i / (c.T + 3) == c.M() - 1) || i * 7 % 3 == 1;
      bias1.set(i, hidden ? large : 0.0f);
    }
  }
  TensorView q() const { return heads_of(qkv, 0, H); }
  TensorView k() const { return heads_of(qkv, H, H); }
  TensorView v() const { return heads_of(qkv, 2 * H, H); }
  TensorView grad() const { return heads_of(dout, 1, H); }
  TensorView keys() const { return masked ? narrow(bias1, T) : TensorView(); }
  TensorView both() const { return pairs ? narrow(bias2, T) : TensorView(); }

  Tensor qkv, dout, bias1, bias2;
  i64 H, T;
  bool masked, pairs;
};

struct Forward {
  Tensor o, lse;
};
Forward forward(const OpTable& ops, const Case& c, const Inputs& in, int threads = 2) {
  ThreadPool pool(threads);
  Stream stream{.pool = &pool};
  Tensor wide(c.dtype, {c.M(), c.T, c.H + 2, c.D});
  const Tensor before = wide;
  Forward f{{}, Tensor(DType::F32, {c.M(), c.H, c.T})};
  ops.evoformer_attention_fwd(heads_of(wide, 1, c.H), f.lse, in.q(), in.k(), in.v(), in.keys(), in.both(), c.params(),
                              stream);
  f.o = packed(heads_of(wide, 1, c.H));
  for (i64 head : {i64{0}, c.H + 1}) {
    expect_same_bits(packed(heads_of(wide, head, 1)), packed(heads_of(before, head, 1)), "beside o");
  }
  return f;
}

struct Backward {
  Tensor dq, dk, dv, dbias1, dbias2;

  std::vector<Tensor> all() const { return {dq, dk, dv, dbias1, dbias2}; }
};
Backward backward(const OpTable& ops, const Case& c, const Inputs& in, const Forward& f, int threads = 2) {
  ThreadPool pool(threads);
  Stream stream{.pool = &pool};
  Tensor wide(c.dtype, {c.M(), c.T, 3 * c.H, c.D});
  Backward g{{}, {}, {}, Tensor(DType::F32, {c.M(), c.T}), Tensor(DType::F32, {c.B, c.H, c.T, c.T})};
  if (!c.gradients) g.dbias1.fill(0), g.dbias2.fill(0);
  const TensorView none;
  ops.evoformer_attention_bwd(heads_of(wide, 0, c.H), heads_of(wide, c.H, c.H), heads_of(wide, 2 * c.H, c.H),
                              c.gradients ? g.dbias1.view() : none, c.gradients ? g.dbias2.view() : none, in.grad(),
                              in.q(), in.k(), in.v(), f.o, f.lse, in.keys(), in.both(), c.params(), stream);
  g.dq = packed(heads_of(wide, 0, c.H));
  g.dk = packed(heads_of(wide, c.H, c.H));
  g.dv = packed(heads_of(wide, 2 * c.H, c.H));
  return g;
}

void expect_agrees_with_ref(const Case& c, const std::vector<const OpTable*>& tables = backends()) {
  const Inputs in(c);
  const Forward want = forward(ref_ops(), c, in);
  const Backward grads = backward(ref_ops(), c, in, want);
  // fp32: the error of a score of size `spread`, seen through the exponential, and sums over keys or rows. 16 bit: a
  // rounding that falls the other way, one unit in the last place or two epsilons.
  // A typical probability: the size of the terms that cancel in dq, dk and the gradients of biases.
  const double term = 1.0 / static_cast<double>(c.T), wide = 250.0 * static_cast<double>(c.spread);
  for (const OpTable* ops : tables) {
    const std::string what = std::string(ops->name) + ": " + c.name();
    const double rounded = rounds_probabilities(*ops, c.dtype) && test_device() == nullptr ? 8 : 2.2;
    const double slack = c.dtype == DType::F32 ? 250.0 * static_cast<double>(c.spread) : rounded;
    const Forward got = forward(*ops, c, in);
    expect_close(got.o, want.o, slack, what + " o");
    expect_close(got.lse, want.lse, 30, what + " lse", 1);
    const Backward g = backward(*ops, c, in, want);
    expect_close(g.dq, grads.dq, slack, what + " dq", term);
    expect_close(g.dk, grads.dk, slack, what + " dk", term);
    expect_close(g.dv, grads.dv, slack, what + " dv");
    expect_close(g.dbias1, grads.dbias1, wide, what + " dbias1", 1);
    expect_close(g.dbias2, grads.dbias2, wide, what + " dbias2", term);
  }
}

TEST(Evoformer, AgreesWithRefOverShapesAndBiases) {
  i64 n = 0;
  test::EveryNth tried(7);
  for (i64 T : {1, 7, 33, 64, 129}) {
    for (i64 N : {1, 3}) {
      for (i64 D : {8, 16, 32, 64}) {
        for (DType dtype : kWorkDTypes) {
          if (!tried()) continue;
          expect_agrees_with_ref({.B = 1 + n % 2,
                                  .N = N,
                                  .T = T,
                                  .H = 1 + n % 3,
                                  .D = D,
                                  .dtype = dtype,
                                  .mask = static_cast<Mask>(n % 4),
                                  .pairs = n % 5 != 0,
                                  .wide = n % 7 < 3});
          if (HasFatalFailure()) return;
          ++n;
        }
      }
    }
  }
}

// Each bias present or not, each mask, sequences of which nothing is seen.
TEST(Evoformer, AgreesWithRefOverMasks) {
  for (DType dtype : kWorkDTypes) {
    for (Mask mask : {Mask::None, Mask::Zeros, Mask::Large, Mask::Infinite}) {
      for (bool pairs : {true, false}) {
        for (bool wide : {true, false}) {
          expect_agrees_with_ref({.B = 2,
                                  .N = 3,
                                  .T = 37,
                                  .H = 2,
                                  .D = 16,
                                  .dtype = dtype,
                                  .mask = mask,
                                  .pairs = pairs,
                                  .wide = wide,
                                  .all = true});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Many sequences, of which the sums of dbias2 grow in rounds; several chunks of keys; heads that no vector fits.
TEST(Evoformer, AgreesWithRefOverManySequences) {
  for (DType dtype : kWorkDTypes) {
    expect_agrees_with_ref({.B = 1, .N = 21, .T = 200, .H = 1, .D = 20, .dtype = dtype});
    expect_agrees_with_ref({.B = 2, .N = 5, .T = 70, .H = 13, .D = 6, .dtype = dtype, .wide = true});
    if (HasFatalFailure()) return;
  }
  if (test_device() != nullptr) return;
  expect_agrees_with_ref({.B = 1, .N = 19, .T = 330, .H = 2, .D = 64});
  expect_agrees_with_ref({.B = 1, .N = 2, .T = 150, .H = 1, .D = 200});
}

TEST(Evoformer, SaturatedSoftmaxStaysFinite) {
  expect_agrees_with_ref({.N = 2, .T = 70, .D = 32, .spread = 30});
  expect_agrees_with_ref({.N = 2, .T = 70, .D = 32, .dtype = DType::BF16, .spread = 30});
}

// Beside -1e9 fp32 has no room for a score: a sequence that is masked as a whole has the softmax of the others.
TEST(Evoformer, AMaskOfAllKeysChangesNothingUnlessItIsInfinite) {
  for (const OpTable* ops : backends()) {
    const Case c{.N = 2, .T = 45, .H = 2, .D = 32, .mask = Mask::Large};
    Inputs in(c);
    in.bias1.fill(0);
    const Forward want = forward(*ops, c, in);
    in.bias1.fill(-1e9f);
    const Forward got = forward(*ops, c, in);
    expect_same_bits(got.o, want.o, "o");
    expect_same_bits(got.lse, want.lse, "lse");
    const Backward g = backward(*ops, c, in, got);
    in.bias1.fill(0);
    const Backward plain = backward(*ops, c, in, want);
    for (size_t i = 0; i < 5; ++i) expect_same_bits(g.all()[i], plain.all()[i], "gradient " + std::to_string(i));
  }
}

TEST(Evoformer, RowsWithoutKeysGiveZeroAndInfinity) {
  const Case c{.N = 3, .T = 70, .H = 2, .D = 32, .mask = Mask::Infinite, .all = true};
  for (const OpTable* ops : backends()) {
    Inputs in(c);
    // A row of a sequence that is seen otherwise, by bias2.
    for (i64 j = 0; j < c.T; ++j) in.bias2.set((c.T + 11) * (c.T + 5) + j, -INFINITY);
    const Forward f = forward(*ops, c, in);
    const Backward g = backward(*ops, c, in, f);
    const i64 width = c.H * c.D;
    for (i64 i = 0; i < c.N * c.T; ++i) {
      for (i64 h = 0; h < c.H; ++h) {
        const bool empty = i / c.T == c.N - 1 || (h == 1 && i % c.T == 11);
        ASSERT_EQ(f.lse.at((i / c.T * c.H + h) * c.T + i % c.T) == INFINITY, empty) << i;
        for (i64 d = h * c.D; d < (h + 1) * c.D; ++d) {
          ASSERT_EQ(f.o.at(i * width + d) == 0, empty) << i;
          ASSERT_TRUE(!empty || g.dq.at(i * width + d) == 0) << i;
        }
      }
    }
    for (const Tensor& x : g.all()) {
      for (i64 i = 0; i < x.numel(); ++i) ASSERT_TRUE(std::isfinite(x.at(i)));
    }
    for (i64 j = 0; j < c.T; ++j) {
      ASSERT_EQ(g.dbias1.at(2 * c.T + j), 0);
      ASSERT_EQ(g.dbias2.at((c.T + 11) * c.T + j), 0);
    }
  }
}

TEST(Evoformer, ResultsDoNotDependOnThreads) {
  const Case cases[] = {
      {.B = 1, .N = 19, .T = 200, .H = 2, .D = 34},                       // chunks of keys
      {.B = 1, .N = 9, .T = 600, .H = 1, .D = 64, .dtype = DType::BF16},  // and rounds
      {.B = 4, .N = 3, .T = 65, .H = 7, .D = 16, .dtype = DType::F16},    // one chunk
      {.B = 1, .N = 1, .T = 300, .H = 1, .D = 8},
  };
  for (const OpTable* ops : backends()) {
    for (const Case& c : cases) {
      if (test_device() != nullptr && c.T > 200) continue;
      const Inputs in(c);
      const Forward f = forward(*ops, c, in, 1);
      const Backward g = backward(*ops, c, in, f, 1);
      for (int threads : {2, 3, 5}) {
        const Forward f2 = forward(*ops, c, in, threads);
        expect_same_bits(f2.o, f.o, c.name());
        expect_same_bits(f2.lse, f.lse, c.name());
        const Backward g2 = backward(*ops, c, in, f, threads);
        for (size_t i = 0; i < 5; ++i) expect_same_bits(g2.all()[i], g.all()[i], c.name() + " " + std::to_string(i));
        if (test_device() != nullptr) break;
      }
    }
  }
}

// The other gradients have the same bits where those of the biases are not wanted, in any combination.
TEST(Evoformer, GradientsOfBiasesAreOptional) {
  Case c{.N = 5, .T = 130, .H = 2, .D = 16};
  const Inputs in(c);
  for (const OpTable* ops : backends()) {
    c.gradients = true;
    const Forward f = forward(*ops, c, in);
    const Backward want = backward(*ops, c, in, f);
    c.gradients = false;
    const Backward got = backward(*ops, c, in, f);
    expect_same_bits(got.dq, want.dq, "dq");
    expect_same_bits(got.dk, want.dk, "dk");
    expect_same_bits(got.dv, want.dv, "dv");
    ThreadPool pool(2);
    Stream stream{.pool = &pool};
    Tensor dq(c.dtype, {c.M(), c.T, c.H, c.D}), dk(dq), dv(dq), dbias1(want.dbias1), dbias2(want.dbias2);
    const TensorView none;
    dbias1.fill(7);
    ops->evoformer_attention_bwd(dq, dk, dv, dbias1, none, in.grad(), in.q(), in.k(), in.v(), f.o, f.lse, in.keys(),
                                 in.both(), c.params(), stream);
    expect_same_bits(dbias1, want.dbias1, "dbias1 alone");
    dbias2.fill(7);
    ops->evoformer_attention_bwd(dq, dk, dv, none, dbias2, in.grad(), in.q(), in.k(), in.v(), f.o, f.lse, in.keys(),
                                 in.both(), c.params(), stream);
    expect_same_bits(dbias2, want.dbias2, "dbias2 alone");
  }
}

TEST(Evoformer, NaNsReachTheSequencesThatHaveThemAndNoOthers) {
  const Case c{.N = 3, .T = 40, .H = 2, .D = 16, .mask = Mask::Zeros};
  for (const OpTable* ops : backends()) {
    Inputs in(c);
    for (i64 d = 0; d < c.D; ++d) in.qkv.set(((c.T + 21) * 3 * c.H + c.H) * c.D + d, NAN);  // of head 0
    const Forward f = forward(*ops, c, in);
    for (i64 i = 0; i < f.o.numel(); ++i) {
      const bool reached = i / (c.T * c.H * c.D) == 1 && i / c.D % c.H == 0;
      ASSERT_EQ(std::isnan(f.o.at(i)), reached) << ops->name << " " << i;
    }
  }
}

// Scratch of a call, by length: twice the tokens need at most twice as much, however many sequences there are.
TEST(Evoformer, ScratchIsLinearInTokens) {
  if (test_device() != nullptr) GTEST_SKIP() << "scratch of the CPU";
  const auto bytes = [](const OpTable& ops, i64 N, i64 T) {
    ThreadPool pool(1);
    Stream stream{.pool = &pool};
    const Case c{.N = N, .T = T, .H = 2, .D = 16};
    const Inputs in(c);
    Tensor o(c.dtype, {c.M(), c.T, c.H, c.D}), lse(DType::F32, {c.M(), c.H, c.T}), dq(o), dk(o), dv(o);
    Tensor dbias1(DType::F32, {c.M(), c.T}), dbias2(DType::F32, {c.B, c.H, c.T, c.T});
    ops.evoformer_attention_fwd(o, lse, in.q(), in.k(), in.v(), in.keys(), in.both(), c.params(), stream);
    ops.evoformer_attention_bwd(dq, dk, dv, dbias1, dbias2, in.grad(), in.q(), in.k(), in.v(), o, lse, in.keys(),
                                in.both(), c.params(), stream);
    ScratchMeter meter;
    Stream metered{.native = &meter};
    const OpTable* const scratch = scratch_ops(ops.name);
    scratch->evoformer_attention_fwd(o, lse, in.q(), in.k(), in.v(), in.keys(), in.both(), c.params(), metered);
    scratch->evoformer_attention_bwd(dq, dk, dv, dbias1, dbias2, in.grad(), in.q(), in.k(), in.v(), o, lse, in.keys(),
                                     in.both(), c.params(), metered);
    const i64 unit = static_cast<i64>(ThreadPool::kScratchUnit);
    EXPECT_EQ((meter.most + unit - 1) / unit * unit, pool.scratch_bytes()) << ops.name;
    return pool.scratch_bytes();
  };
  constexpr i64 kFixed = i64{6} << 20;
  for (const OpTable* ops : backends()) {
    for (i64 T : {256, 512, 1024}) EXPECT_LE(bytes(*ops, 2, T), kFixed + T * 2000) << ops->name << " " << T;
    EXPECT_LE(bytes(*ops, 64, 256), kFixed) << ops->name;
    EXPECT_LE(bytes(*ops, 200, 64), kFixed) << ops->name;
  }
}

TEST(Evoformer, ErrsAtMostTwiceAsPyTorch) {
  ThreadPool pool(2);
  Stream stream{.pool = &pool};
  std::vector<const OpTable*> tables = backends();
  if (test_device() == nullptr) tables.push_back(&ref_ops());
  for (const char* name : {"row", "triangle", "padded", "masked"}) {
    const TorchFixture f("evoformer", name);  // make_evoformer.py
    const auto shape = f.tensors->at("q").shape;
    const i64 B = shape[0], N = shape[1], T = shape[2], H = shape[3], D = shape[4], M = B * N;
    const EvoformerParams params{.scale = 1 / std::sqrt(static_cast<float>(D)), .num_seq = N};
    for (DType t : kWorkDTypes) {
      const Tensor q = f.input("q", t, {M, T, H, D}), k = f.input("k", t, {M, T, H, D}),
                   v = f.input("v", t, {M, T, H, D}), dout = f.input("dout", t, {M, T, H, D});
      // fp16 cannot represent -1e9 but -inf, which as a mask of all keys would give another result.
      const Tensor bias1 = f.input("bias1", DType::F32, {M, T});
      Tensor pairs;
      if (f.tensors->find("bias2") != nullptr) pairs = f.input("bias2", t, {B, H, T, T});
      for (const OpTable* ops : tables) {
        SCOPED_TRACE(ops->name);
        Tensor o(t, {M, T, H, D}), dq(o), dk(o), dv(o), lse(DType::F32, {M, H, T});
        Tensor dbias1(DType::F32, {M, T}), dbias2(DType::F32, {B, H, T, T});
        ops->evoformer_attention_fwd(o, lse, q, k, v, bias1, pairs, params, stream);
        ops->evoformer_attention_bwd(dq, dk, dv, dbias1, dbias2, dout, q, k, v, o, lse, bias1, pairs, params, stream);
        f.judge("o", t, o);
        f.judge("dq", t, dq);
        f.judge("dk", t, dk);
        f.judge("dv", t, dv);
        f.judge("dbias1", t, dbias1);
        if (pairs.view()) f.judge("dbias2", t, dbias2);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// In fp64 from end to end, every element of every gradient.
TEST(Evoformer, RefBackwardIsTheDerivativeOfRefForward) {
  ThreadPool pool(1);
  Stream stream{.pool = &pool};
  for (int which = 0; which < 4; ++which) {
    const i64 B = 1 + which % 2, N = 1 + which, T = 4, H = 2, D = 3, M = B * N;
    const EvoformerParams params{.scale = 0.7f, .num_seq = N};
    Doubles q({M, T, H, D}), k({M, T, H, D}), v({M, T, H, D}), w({M, T, H, D}), o({M, T, H, D}), lse({M, H, T});
    Doubles dq({M, T, H, D}), dk({M, T, H, D}), dv({M, T, H, D});
    Doubles bias1({M, T}), bias2({B, H, T, T}), dbias1({M, T}), dbias2({B, H, T, T});
    q.randomize(1), k.randomize(2), v.randomize(3), w.randomize(4), bias1.randomize(5), bias2.randomize(6);
    const TensorView none, keys = which < 3 ? bias1.view : none, pairs = which > 0 ? bias2.view : none;
    const auto loss = [&] {
      ref_ops().evoformer_attention_fwd(o.view, lse.view, q.view, k.view, v.view, keys, pairs, params, stream);
      return o.dot(w);
    };
    loss();
    ref_ops().evoformer_attention_bwd(dq.view, dk.view, dv.view, dbias1.view, dbias2.view, w.view, q.view, k.view,
                                      v.view, o.view, lse.view, keys, pairs, params, stream);
    expect_gradient(q, dq, loss, "dq");
    expect_gradient(k, dk, loss, "dk");
    expect_gradient(v, dv, loss, "dv");
    if (keys) expect_gradient(bias1, dbias1, loss, "dbias1");
    if (pairs) expect_gradient(bias2, dbias2, loss, "dbias2");
  }
}

}  // namespace evoformer_test
}  // namespace ds::testing
