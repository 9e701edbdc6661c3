// SPDX-License-Identifier: Apache-2.0
// attention_fwd and attention_bwd: ref against finite differences, every backend against ref over dtypes, head dims,
// lengths, groups, masks and dropout, on slices of fused buffers; PyTorch's results; and the promises about threads,
// memory and non-finite values.

#include "ds/kernels/gpu_meter.h"
#include "parity/parity.h"
#include "parity/torch_fixture.h"
#include "slow_set.h"

namespace ds::testing {
namespace attention_test {

struct Case {
  i64 B = 1, T = 33, S = 33, H = 2, G = 2, D = 64;
  bool causal = true;
  i64 window = 0;
  float dropout = 0;
  DType dtype = DType::F32;
  float spread = 1;  // of q
  AttentionGrid grid{};
  i64 value_dim = 0;  // 0: D

  i64 Dv() const { return value_dim > 0 ? value_dim : D; }
  AttentionParams params() const {
    return {.scale = 1.0f / std::sqrt(static_cast<float>(D)),
            .causal = causal,
            .window = window,
            .dropout = dropout,
            .rng = {.seed = 5, .site = 2, .step = 1},
            .grid = grid};
  }
  std::string name() const {
    std::string s(dtype_name(dtype));
    for (i64 x : {B, T, S, H, G, D, Dv()}) s += " " + std::to_string(x);
    return s + (causal ? " causal" : "") + " window " + std::to_string(window) + " dropout " + std::to_string(dropout);
  }
};

// Heads [first, first + count) of a buffer [B, tokens, heads, D], as a model passes them after one fused projection.
struct Slice {
  Tensor* buffer;
  i64 first, count;

  TensorView view() const {
    TensorView v = *buffer;
    v.data = v.as<char>() + first * v.dim(3) * dtype_bytes(v.dtype);
    v.shape[2] = count;
    return v;
  }
  Tensor packed() const {
    const TensorView& all = buffer->view();
    Tensor out(all.dtype, {all.dim(0), all.dim(1), count, all.dim(3)});
    const i64 row = all.dim(2) * all.dim(3), part = count * all.dim(3);
    for (i64 i = 0; i < out.numel(); ++i) out.set(i, buffer->at(i / part * row + first * all.dim(3) + i % part));
    return out;
  }
};

// The inputs of a case, and results of one backend. Queries share a buffer with keys and values when the lengths allow.
struct Inputs {
  explicit Inputs(const Case& c)
      : qkv(c.dtype, {c.B, c.T, c.H + (c.T == c.S ? 2 * c.G : 1), c.D}),
        kv(c.dtype, {c.B, c.S, 2 * c.G, c.D}),
        values(c.dtype, {c.B, c.S, c.G + 1, c.Dv()}),
        dout(c.dtype, {c.B, c.T, c.H + 1, c.Dv()}) {
    qkv.randomize(1, c.spread);
    kv.randomize(2);
    dout.randomize(3);
    values.randomize(4);
    const bool fused = c.T == c.S;
    q = {&qkv, 0, c.H};
    k = {fused ? &qkv : &kv, fused ? c.H : 0, c.G};
    v = {fused ? &qkv : &kv, fused ? c.H + c.G : c.G, c.G};
    if (c.Dv() != c.D) v = {&values, 1, c.G};
    grad = {&dout, 1, c.H};
  }
  Inputs(const Inputs&) = delete;
  Inputs& operator=(const Inputs&) = delete;

  Tensor qkv, kv, values, dout;
  Slice q{}, k{}, v{}, grad{};
};

struct Forward {
  Tensor o, lse;
};
Forward forward(const OpTable& ops, const Case& c, const Inputs& in, int threads = 2) {
  ThreadPool pool(threads);
  Stream stream{.pool = &pool};
  Tensor wide(c.dtype, {c.B, c.T, c.H + 2, c.Dv()});
  const Tensor before = wide;
  const Slice o{&wide, 1, c.H};
  Forward f{{}, Tensor(DType::F32, {c.B, c.H, c.T})};
  ops.attention_fwd(o.view(), f.lse, in.q.view(), in.k.view(), in.v.view(), c.params(), stream);
  f.o = o.packed();
  for (i64 head : {i64{0}, c.H + 1}) {
    expect_same_bits(Slice{&wide, head, 1}.packed(), Slice{const_cast<Tensor*>(&before), head, 1}.packed(), "beside o");
  }
  return f;
}

struct Backward {
  Tensor dq, dk, dv;
};
Backward backward(const OpTable& ops, const Case& c, const Inputs& in, const Forward& f, int threads = 2) {
  ThreadPool pool(threads);
  Stream stream{.pool = &pool};
  Tensor wide_q(c.dtype, {c.B, c.T, c.H + 1, c.D}), wide_kv(c.dtype, {c.B, c.S, 2 * c.G, c.D}),
      wide_v(c.dtype, {c.B, c.S, c.G + 1, c.Dv()});
  const Slice dq{&wide_q, 0, c.H}, dk{&wide_kv, 0, c.G};
  const Slice dv = c.Dv() == c.D ? Slice{&wide_kv, c.G, c.G} : Slice{&wide_v, 0, c.G};
  ops.attention_bwd(dq.view(), dk.view(), dv.view(), in.grad.view(), in.q.view(), in.k.view(), in.v.view(), f.o, f.lse,
                    c.params(), stream);
  return {dq.packed(), dk.packed(), dv.packed()};
}

// True if cuDNN computes the gradients of a case in this run of the tests.
bool is_by_cudnn(const Case& c, const Inputs& in) {
  if (!asks_for_cudnn() || test_device() == nullptr) return false;
  GpuMeter meter;
  meter.kernels.cudnn = true;
  Stream stream{.native = &meter};
  const Tensor lse(DType::F32, {c.B, c.H, c.T});
  gpu_scratch_ops().attention_bwd(in.q.view(), in.k.view(), in.v.view(), in.grad.view(), in.q.view(), in.k.view(),
                                  in.v.view(), in.grad.view(), lse, c.params(), stream);
  return !meter.cudnn.empty();
}

// cuDNN rounds the gradients of keys and values once for each query head before it adds those of a group: each rounding
// errs by at most epsilon times the gradient. Returns the sums of |dk| and |dv| over the heads of a group.
struct HeadSums {
  std::vector<double> dk, dv;
};
HeadSums sums_over_heads(const Case& c, const Inputs& in) {
  Case apart = c;
  apart.G = c.H;
  Inputs each(apart);
  const auto repeat = [&](const Slice& to, const Slice& from) {
    const TensorView x = from.view(), y = to.view();
    const i64 row = c.D * dtype_bytes(x.dtype);
    for (i64 b = 0; b < c.B; ++b) {
      for (i64 t = 0; t < x.dim(1); ++t) {
        for (i64 h = 0; h < to.count; ++h) {
          const auto at = [&](const TensorView& v, i64 head) {
            return v.as<char>() + (b * v.stride[0] + t * v.stride[1] + head * v.stride[2]) * dtype_bytes(v.dtype);
          };
          std::memcpy(at(y, h), at(x, h / (to.count / from.count)), static_cast<size_t>(row));
        }
      }
    }
  };
  repeat(each.q, in.q), repeat(each.grad, in.grad), repeat(each.k, in.k), repeat(each.v, in.v);
  const Backward g = backward(ref_ops(), apart, each, forward(ref_ops(), apart, each));
  const auto sums = [&](const Tensor& d) {
    std::vector<double> sum(static_cast<size_t>(c.B * c.S * c.G * c.D));
    for (i64 i = 0; i < d.numel(); ++i) {
      const i64 head = i / c.D % c.H, token = i / c.D / c.H, group = head / (c.H / c.G);
      sum[static_cast<size_t>((token * c.G + group) * c.D + i % c.D)] += std::abs(d.at(i));
    }
    return sum;
  };
  return {sums(g.dk), sums(g.dv)};
}

void expect_agrees_with_ref(const Case& c, const std::vector<const OpTable*>& tables = backends()) {
  const Inputs in(c);
  const Forward want = forward(ref_ops(), c, in);
  const Backward grads = backward(ref_ops(), c, in, want);
  // fp32: the error of a score of size `spread`, seen through the exponential, and sums over keys or rows. 16 bit: a
  // rounding that falls the other way, one unit in the last place or two epsilons.
  // Rounded probabilities and gradients of them: two more roundings.
  // A typical probability: the size of the terms that cancel in dq and dk.
  const double term = 1.0 / static_cast<double>(c.window > 0 ? std::min(c.S, c.window) : c.S);
  for (const OpTable* ops : tables) {
    const std::string what = std::string(ops->name) + ": " + c.name();
    const double rounded = rounds_probabilities(*ops, c.dtype) ? 8 : 2.2;
    const double slack = c.dtype == DType::F32 ? 250.0 * static_cast<double>(c.spread) : rounded;
    const Forward got = forward(*ops, c, in);
    expect_close(got.o, want.o, slack, what + " o");
    expect_close(got.lse, want.lse, 30, what + " lse", 1);  // over one key it is a score, which may be anywhere near 0
    const Backward g = backward(*ops, c, in, want);
    const HeadSums more = c.H != c.G && is_by_cudnn(c, in) ? sums_over_heads(c, in) : HeadSums{};
    expect_close(g.dq, grads.dq, slack, what + " dq", term);
    expect_close(g.dk, grads.dk, slack, what + " dk", term, more.dk);
    expect_close(g.dv, grads.dv, slack, what + " dv", 0, more.dv);
  }
}

TEST(Attention, ErrsAtMostTwiceAsPyTorch) {
  ThreadPool pool(2);
  Stream stream{.pool = &pool};
  std::vector<const OpTable*> tables = backends();
  if (test_device() == nullptr) tables.push_back(&ref_ops());
  for (const char* name : {"causal", "grouped", "long"}) {
    const TorchFixture f("attention", name);  // make_attention.py
    const auto queries = f.tensors->at("q").shape, keys = f.tensors->at("k").shape;
    const i64 B = queries[0], T = queries[1], H = queries[2], D = queries[3], S = keys[1], G = keys[2];
    const AttentionParams params{.scale = 1 / std::sqrt(static_cast<float>(D)), .causal = T == S};
    for (DType t : kWorkDTypes) {
      const Tensor q = f.input("q", t, {B, T, H, D}), k = f.input("k", t, {B, S, G, D}),
                   v = f.input("v", t, {B, S, G, D}), dout = f.input("dout", t, {B, T, H, D});
      for (const OpTable* ops : tables) {
        SCOPED_TRACE(ops->name);
        Tensor o(t, {B, T, H, D}), dq(o), dk(t, {B, S, G, D}), dv(dk), lse(DType::F32, {B, H, T});
        ops->attention_fwd(o, lse, q, k, v, params, stream);
        ops->attention_bwd(dq, dk, dv, dout, q, k, v, o, lse, params, stream);
        f.judge("o", t, o);
        f.judge("dq", t, dq);
        f.judge("dk", t, dk);
        f.judge("dv", t, dv);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Attention, AgreesWithRefOverShapes) {
  struct Lengths {
    i64 T, S;
  };
  constexpr Lengths kLengths[] = {{1, 1}, {1, 129}, {7, 7}, {7, 33}, {33, 7}, {33, 33}, {64, 64}, {64, 129}, {129, 64}};
  constexpr i64 kRatios[] = {1, 2, 3, 8};
  i64 n = 0;
  test::EveryNth tried(5);
  for (i64 D : {2, 6, 16, 34, 64, 80, 128, 256}) {
    for (const auto [T, S] : kLengths) {
      for (DType dtype : kWorkDTypes) {
        if (!tried()) continue;
        const i64 ratio = T * D > 4000 ? kRatios[n % 2] : kRatios[n % 4], G = 1 + n % 2;
        expect_agrees_with_ref({.B = 1 + n % 3 / 2,
                                .T = T,
                                .S = S,
                                .H = ratio * G,
                                .G = G,
                                .D = D,
                                .causal = n % 5 != 0,
                                .dropout = n % 3 == 0 ? 0.3f : 0.0f,
                                .dtype = dtype});
        if (::testing::Test::HasFatalFailure()) return;
        ++n;
      }
    }
  }
}

// Every tail that a head can leave in a vector.
TEST(Attention, AgreesWithRefOverAllHeadDims) {
  constexpr i64 kLengths[][2] = {{1, 1}, {1, 37}, {9, 9}, {17, 5}, {5, 17}, {33, 33}, {18, 35}};
  constexpr i64 kRatios[] = {1, 2, 3};
  constexpr i64 kWindows[] = {0, 4, 0, 20, 1};
  i64 n = 0;
  for (i64 D = 2; D <= 256; D += 2) {
    for (DType dtype : kWorkDTypes) {
      const auto [T, S] = kLengths[n % 7];
      const i64 G = 1 + n / 7 % 2;
      expect_agrees_with_ref({.T = T,
                              .S = S,
                              .H = kRatios[n / 3 % 3] * G,
                              .G = G,
                              .D = D,
                              .causal = n % 4 != 0,
                              .window = kWindows[n % 5],
                              .dropout = n % 11 == 0 ? 0.3f : 0.0f,
                              .dtype = dtype},
                             {cpu_ops()});
      if (::testing::Test::HasFatalFailure()) return;
      ++n;
    }
  }
}

// Values with another head dim than keys, smaller or larger, with every kind of tail; 192 and 128 are DeepSeek's.
TEST(Attention, AgreesWithRefWhereValuesHaveAnotherHeadDim) {
  constexpr i64 kDims[][2] = {{192, 128}, {24, 16}, {16, 24},   {2, 6},   {34, 8},
                              {96, 64},   {48, 80}, {128, 130}, {256, 32}};
  constexpr i64 kLengths[][2] = {{33, 33}, {1, 37}, {70, 129}, {129, 70}, {5, 5}};
  i64 n = 0;
  for (const auto& [D, Dv] : kDims) {
    for (DType dtype : kWorkDTypes) {
      const auto [T, S] = kLengths[n % 5];
      const i64 G = 1 + n / 3 % 2;
      expect_agrees_with_ref({.B = 1 + n % 2,
                              .T = T,
                              .S = S,
                              .H = (1 + n % 3) * G,
                              .G = G,
                              .D = D,
                              .causal = n % 4 != 0,
                              .window = n % 5 == 2 ? 20 : 0,
                              .dropout = n % 3 == 1 ? 0.3f : 0.0f,
                              .dtype = dtype,
                              .value_dim = Dv});
      if (::testing::Test::HasFatalFailure()) return;
      ++n;
    }
  }
  expect_agrees_with_ref({.T = 1, .S = 2100, .H = 2, .G = 1, .D = 24, .value_dim = 16});  // keys are split
}

TEST(Attention, AgreesWithRefOverMasks) {
  for (bool causal : {true, false}) {
    for (i64 window : {0, 1, 5, 40, 100, 1000}) {
      for (i64 T : {1, 33, 129}) {
        for (i64 S : {33, 129, 200}) {
          const float dropout = T == 33 ? 0.3f : 0.0f;
          expect_agrees_with_ref(
              {.T = T, .S = S, .H = 3, .G = 1, .D = 16, .causal = causal, .window = window, .dropout = dropout});
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(Attention, AgreesWithRefWhenKeysAreSplitForDecoding) {
  for (DType dtype : kWorkDTypes) {
    for (i64 T : {1, 3}) {
      expect_agrees_with_ref({.T = T, .S = 1500, .H = 4, .G = 2, .D = 32, .dtype = dtype});
      expect_agrees_with_ref(
          {.T = T, .S = 2100, .H = 1, .G = 1, .D = 16, .window = 300, .dropout = 0.3f, .dtype = dtype});
    }
  }
}

// The rows of a text in calls of a few rows, over the keys so far, are those of one call over all of it: prompts may be
// cut anywhere, and a token that is generated sees what it sees in training.
TEST(Attention, ARowDependsOnItsKeysAlone) {
  if (test_device() != nullptr) GTEST_SKIP() << "promised on CPUs alone";
  for (const DType dtype : kWorkDTypes) {
    for (const i64 window : {0, 300}) {
      const Case c{.T = 1300, .S = 1300, .H = 4, .G = 2, .D = 32, .window = window, .dtype = dtype};
      const Inputs in(c);
      for (const OpTable* ops : backends()) {
        if (ops->name == "ref") continue;
        const Forward all = forward(*ops, c, in);
        ThreadPool pool(2);
        Stream stream{.pool = &pool};
        for (const auto& [first, n] : {std::pair{0, 1},
                                       {0, 513},
                                       {511, 1},
                                       {512, 1},
                                       {513, 7},
                                       {600, 300},
                                       {1023, 2},
                                       {1024, 70},
                                       {1299, 1},
                                       {900, 400}}) {
          const auto tokens = [](TensorView v, i64 begin, i64 count) {
            v.data = v.as<char>() + begin * v.stride[1] * dtype_bytes(v.dtype);
            v.shape[1] = count;
            return v;
          };
          Tensor o(dtype, {1, n, c.H, c.D}), lse(DType::F32, {1, c.H, n});
          ops->attention_fwd(o, lse, tokens(in.q.view(), first, n), tokens(in.k.view(), 0, first + n),
                             tokens(in.v.view(), 0, first + n), c.params(), stream);
          const i64 row = c.H * c.D;
          for (i64 i = 0; i < n * row; ++i)
            ASSERT_EQ(o.at(i), all.o.at(first * row + i)) << ops->name << " " << c.name() << " " << first << " " << n;
        }
      }
    }
  }
}

TEST(Attention, SaturatedSoftmaxStaysFinite) {
  expect_agrees_with_ref({.T = 70, .S = 71, .D = 32, .spread = 30});
  expect_agrees_with_ref({.T = 70, .S = 71, .D = 32, .dtype = DType::BF16, .spread = 30});
}

TEST(Attention, RowsWithoutKeysGiveZeroAndInfinity) {
  const Case c{.B = 2, .T = 70, .S = 9, .H = 4, .G = 2, .D = 34};
  const Inputs in(c);
  for (const OpTable* ops : backends()) {
    const Forward f = forward(*ops, c, in);
    const Backward g = backward(*ops, c, in, f);
    for (i64 i = 0; i < c.T; ++i) {
      const bool empty = i + c.S - c.T < 0;
      EXPECT_EQ(f.lse.at(i) == INFINITY, empty) << i;
      for (i64 d = 0; d < c.H * c.D; ++d) {
        ASSERT_EQ(f.o.at(i * c.H * c.D + d) == 0, empty) << i;
        ASSERT_TRUE(!empty || g.dq.at(i * c.H * c.D + d) == 0) << i;
      }
    }
  }
}

TEST(Attention, ResultsDoNotDependOnThreads) {
  const Case cases[] = {
      {.B = 2, .T = 129, .S = 129, .H = 6, .G = 2, .D = 34},                                         // chunks
      {.B = 1, .T = 300, .S = 400, .H = 1, .G = 1, .D = 16, .dropout = 0.3f, .dtype = DType::BF16},  // more chunks
      {.B = 4, .T = 65, .S = 65, .H = 16, .G = 16, .D = 16, .dtype = DType::F16},                    // one chunk
      {.B = 1, .T = 2, .S = 1300, .H = 4, .G = 2, .D = 64},                                          // split keys
      {.B = 1, .T = 129, .S = 129, .H = 2, .G = 2, .D = 48, .value_dim = 32},
  };
  for (const OpTable* ops : backends()) {
    for (const Case& c : cases) {
      const Inputs in(c);
      const Forward f = forward(*ops, c, in, 1);
      const Backward g = backward(*ops, c, in, f, 1);
      for (int threads : {2, 3, 5}) {
        const Forward f2 = forward(*ops, c, in, threads);
        expect_same_bits(f2.o, f.o, c.name());
        expect_same_bits(f2.lse, f.lse, c.name());
        const Backward g2 = backward(*ops, c, in, f, threads);
        expect_same_bits(g2.dq, g.dq, c.name());
        expect_same_bits(g2.dk, g.dk, c.name());
        expect_same_bits(g2.dv, g.dv, c.name());
      }
    }
  }
}

TEST(Attention, NaNsReachTheRowsThatSeeThemAndNoOthers) {
  const Case c{.T = 40, .S = 40, .H = 2, .G = 1, .D = 16};
  for (const OpTable* ops : backends()) {
    Inputs in(c);
    const i64 bad = 21, width = c.H + 2 * c.G;
    for (i64 d = 0; d < c.D; ++d) in.qkv.set((bad * width + c.H) * c.D + d, NAN);  // key 21
    const Forward f = forward(*ops, c, in);
    for (i64 i = 0; i < c.T * c.H * c.D; ++i) {
      ASSERT_EQ(std::isnan(f.o.at(i)), i / (c.H * c.D) >= bad) << ops->name << " " << i;
    }
  }
}

TEST(Attention, StoresNoMatrixOfScores) {
  const Case c{.T = 2048, .S = 2048, .H = 1, .G = 1, .D = 16};
  const Inputs in(c);
  for (const OpTable* ops : backends()) {
    ThreadPool pool(2);
    Stream stream{.pool = &pool};
    Tensor o(c.dtype, {c.B, c.T, c.H, c.D}), lse(DType::F32, {c.B, c.H, c.T}), dq(o), dk(o), dv(o);
    ops->attention_fwd(o, lse, in.q.view(), in.k.view(), in.v.view(), c.params(), stream);
    ops->attention_bwd(dq, dk, dv, in.grad.view(), in.q.view(), in.k.view(), in.v.view(), o, lse, c.params(), stream);
    EXPECT_LT(pool.scratch_bytes(), c.T * c.S * 4 / 4) << ops->name;
  }
}

// Indices [begin, begin + count) of dim `d`.
TensorView part(TensorView x, int d, i64 begin, i64 count) {
  x.data = x.as<char>() + begin * x.stride[d] * dtype_bytes(x.dtype);
  x.shape[d] = count;
  return x;
}

// Dropout counts by the whole: heads and queries in calls of their own get the masks that they have together.
TEST(Attention, DropoutDoesNotDependOnHowHeadsAndQueriesAreShared) {
  for (DType dtype : kWorkDTypes) {
    for (i64 S : {33, 36}) {  // rows of the matrix that begin blocks of four numbers, and rows that do not
      const Case c{.B = 2, .T = 33, .S = S, .H = 6, .G = 3, .D = 32, .causal = false, .dropout = 0.4f, .dtype = dtype};
      Inputs in(c);
      for (const OpTable* ops : backends()) {
        const Forward whole = forward(*ops, c, in);
        const Backward whole_grads = backward(*ops, c, in, whole);
        ThreadPool pool(2);
        Stream stream{.pool = &pool};
        Tensor o(dtype, {c.B, c.T, c.H, c.D}), dq(o), dk(dtype, {c.B, c.S, c.G, c.D}), dv(dk);
        const i64 R = c.H / c.G;
        for (const auto& [group, groups] : {std::pair<i64, i64>{0, 1}, {1, 2}}) {
          const auto q_heads = [&, group = group, groups = groups](TensorView x) {
            return part(x, 2, group * R, groups * R);
          };
          const auto kv_heads = [&, group = group, groups = groups](TensorView x) { return part(x, 2, group, groups); };
          AttentionParams p = c.params();
          p.grid.heads = c.H, p.grid.head0 = group * R;
          Tensor lse(DType::F32, {c.B, groups * R, c.T});
          ops->attention_fwd(q_heads(o), lse, q_heads(in.q.view()), kv_heads(in.k.view()), kv_heads(in.v.view()), p,
                             stream);
          ops->attention_bwd(q_heads(dq), kv_heads(dk), kv_heads(dv), q_heads(in.grad.view()), q_heads(in.q.view()),
                             kv_heads(in.k.view()), kv_heads(in.v.view()), q_heads(o), lse, p, stream);
        }
        const std::string what = std::string(ops->name) + ": " + c.name();
        const double slack = dtype == DType::F32 ? 100 : 4;
        expect_close(o, whole.o, slack, what + " o of heads");
        expect_close(dq, whole_grads.dq, slack, what + " dq of heads");
        expect_close(dk, whole_grads.dk, slack, what + " dk of heads");
        expect_close(dv, whole_grads.dv, slack, what + " dv of heads");

        for (const auto& [row, rows] : {std::pair<i64, i64>{0, 7}, {7, 26}}) {
          const auto queries = [row = row, rows = rows](TensorView x) { return part(x, 1, row, rows); };
          AttentionParams p = c.params();
          p.grid.rows = c.T, p.grid.row0 = row;
          Tensor lse(DType::F32, {c.B, c.H, rows}), unused_dk(dk), unused_dv(dv);
          ops->attention_fwd(queries(o), lse, queries(in.q.view()), in.k.view(), in.v.view(), p, stream);
          ops->attention_bwd(queries(dq), unused_dk, unused_dv, queries(in.grad.view()), queries(in.q.view()),
                             in.k.view(), in.v.view(), queries(o), lse, p, stream);
        }
        expect_close(o, whole.o, slack, what + " o of queries");
        expect_close(dq, whole_grads.dq, slack, what + " dq of queries");
        if (HasFatalFailure()) return;
      }
    }
  }
}

// A call that is a block of something larger, against the oracle on the same block.
TEST(Attention, AgreesWithRefOnTheMaskOfABlock) {
  i64 n = 0;
  for (DType dtype : kWorkDTypes) {
    for (i64 D : {16, 64, 128}) {
      for (const AttentionGrid& grid :
           {AttentionGrid{.heads = 10, .head0 = 3, .rows = 90, .row0 = 40, .cols = 101, .col0 = 5},
            AttentionGrid{.rows = 100, .cols = 96, .col0 = 28}, AttentionGrid{.heads = 4, .cols = 96, .col0 = 27}}) {
        expect_agrees_with_ref({.B = 2,
                                .T = 33 + n % 3,
                                .S = 33 + n % 4,
                                .H = 4,
                                .G = 2,
                                .D = D,
                                .causal = n % 2 == 0,
                                .dropout = 0.3f,
                                .dtype = dtype,
                                .grid = grid});
        if (HasFatalFailure()) return;
        ++n;
      }
    }
  }
}

// In fp64 from end to end, every element of every gradient.
TEST(Attention, RefBackwardIsTheDerivativeOfRefForward) {
  ThreadPool pool(1);
  Stream stream{.pool = &pool};
  for (const Case& c :
       {Case{.B = 2, .T = 3, .S = 5, .H = 4, .G = 2, .D = 2}, Case{.T = 5, .S = 3, .H = 2, .G = 1, .D = 4},
        Case{.T = 6, .S = 6, .H = 3, .G = 1, .D = 2, .window = 3, .dropout = 0.3f},
        Case{.T = 4, .S = 4, .H = 1, .G = 1, .D = 6, .causal = false},
        Case{.T = 3, .S = 5, .H = 2, .G = 1, .D = 2, .value_dim = 4},
        Case{.T = 5, .S = 5, .H = 2, .G = 2, .D = 4, .dropout = 0.3f, .value_dim = 2}}) {
    const auto tensor = [](std::vector<double>& data, i64 b, i64 t, i64 h, i64 d) {
      data.resize(b * t * h * d);
      return TensorView::of(data.data(), DType::F64, {b, t, h, d});
    };
    std::vector<double> data[9];
    const TensorView q = tensor(data[0], c.B, c.T, c.H, c.D), k = tensor(data[1], c.B, c.S, c.G, c.D),
                     v = tensor(data[2], c.B, c.S, c.G, c.Dv()), dq = tensor(data[3], c.B, c.T, c.H, c.D),
                     dk = tensor(data[4], c.B, c.S, c.G, c.D), dv = tensor(data[5], c.B, c.S, c.G, c.Dv()),
                     o = tensor(data[6], c.B, c.T, c.H, c.Dv()), w = tensor(data[7], c.B, c.T, c.H, c.Dv()),
                     lse = tensor(data[8], c.B, c.H, c.T, 1).reshaped({c.B, c.H, c.T});
    u32 seed = 1;
    for (std::vector<double>* x : {&data[0], &data[1], &data[2], &data[7]}) {
      const Tensor noise = Tensor(DType::F32, {static_cast<i64>(x->size())}).randomize(seed++);
      for (size_t i = 0; i < x->size(); ++i) (*x)[i] = static_cast<double>(noise.at(static_cast<i64>(i)));
    }
    const auto loss = [&] {
      ref_ops().attention_fwd(o, lse, q, k, v, c.params(), stream);
      double sum = 0;
      for (size_t i = 0; i < data[6].size(); ++i) sum += data[6][i] * data[7][i];
      return sum;
    };
    loss();
    ref_ops().attention_bwd(dq, dk, dv, w, q, k, v, o, lse, c.params(), stream);
    for (size_t x = 0; x < 3; ++x) {
      for (size_t i = 0; i < data[x].size(); ++i) {
        const double at = data[x][i], step = 1e-6;
        data[x][i] = at + step;
        const double up = loss();
        data[x][i] = at - step;
        const double down = loss();
        data[x][i] = at;
        ASSERT_NEAR((up - down) / (2 * step), data[3 + x][i], 1e-8) << c.name() << " input " << x << " element " << i;
      }
    }
  }
}

}  // namespace attention_test
}  // namespace ds::testing
