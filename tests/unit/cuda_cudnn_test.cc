// SPDX-License-Identifier: Apache-2.0
// Attention by cuDNN without a GPU: the calls that it serves and their parts, its graphs computed here naively and
// compared with ref, and plans of the real library for a GPU that is only described. attention_test with
// DS_TEST_ATTENTION=cudnn tests the results of plans on a GPU.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <random>

#include "cuda/attention_cudnn.h"
#include "cuda/context.h"
#include "temp_directory.h"

namespace ds::cuda::cudnn {
namespace cuda_cudnn_test {

TEST(CudaCudnn, IsUsedByContextsThatAreToldTo) {
  Context own;
  EXPECT_EQ(own.cudnn_attention(), nullptr);
  Context context({.cudnn_attention = true});
  EXPECT_NE(context.cudnn_attention(), nullptr);
  context.use_own_attention();
  EXPECT_EQ(context.cudnn_attention(), nullptr);
  EXPECT_EQ(context.error(), nullptr);
}

// A library alone is taken or refused; after an old one a newer one is found.
TEST(CudaCudnn, TheFirstLibraryThatServesIsTaken) {
  if (const char* why = library_error(); why != nullptr && std::string_view(why) == "this build has no cuDNN")
    GTEST_SKIP() << why;
  const std::string old = DS_TEST_OLD_CUDNN, none = "/nowhere/libcudnn.so.9", real = "libcudnn.so.9";
  const LibraryChoice refused = choose_library(std::vector<std::string>{none, old});
  EXPECT_EQ(refused.file, "");
  EXPECT_EQ(refused.error, "/nowhere/libcudnn.so.9: cannot open shared object file: No such file or directory; " + old +
                               " is version 91000, and attention needs at least 91600");
  EXPECT_EQ(choose_library({}).error, "there is no libcudnn.so.9");
  if (library_error() != nullptr) GTEST_SKIP() << library_error();
  const LibraryChoice taken = choose_library(std::vector<std::string>{old, real});
  EXPECT_EQ(taken.error, "");
  EXPECT_EQ(std::filesystem::path(taken.file).filename().string().substr(0, real.size()), real);
}

// The parts that an old library has opened stay loaded, and the next library would use them. This is reported, and no
// other library is taken.
TEST(CudaCudnn, NoneIsTakenBesideThePartsOfAnOldOne) {
  if (const char* why = library_error(); why != nullptr && std::string_view(why) == "this build has no cuDNN")
    GTEST_SKIP() << why;
  const auto chooses_none = [] {
    const std::string old = DS_TEST_OLD_CUDNN_IN_PARTS;
    const LibraryChoice choice = choose_library(std::vector<std::string>{old, "libcudnn.so.9"});
    const bool says = choice.error == old +
                                          " is version 91000, and attention needs at least 91600; no other can be "
                                          "taken beside it: name the folder of a later one in LD_LIBRARY_PATH";
    if (!says) std::fprintf(stderr, "'%s' '%s'\n", choice.file.c_str(), choice.error.c_str());
    std::_Exit(says && choice.file.empty() ? 0 : 1);
  };
  EXPECT_EXIT(chooses_none(), ::testing::ExitedWithCode(0), "");  // in a process of its own: the parts stay
}

// A library whose name shows that it is too old is not loaded; it opens nothing, and the next is tried.
TEST(CudaCudnn, AnOldOneByItsNameIsPassedOver) {
  if (const char* why = library_error(); why != nullptr && std::string_view(why) == "this build has no cuDNN")
    GTEST_SKIP() << why;
  const testing::TempDirectory dir;
  const std::string link = dir.path() + "/libcudnn.so.9", none = "/nowhere/libcudnn.so.9";
  std::filesystem::copy_file(DS_TEST_OLD_CUDNN_IN_PARTS, dir.path() + "/libcudnn.so.9.14.2");
  std::filesystem::create_symlink("libcudnn.so.9.14.2", link);
  EXPECT_EQ(choose_library(std::vector<std::string>{link, none}).error,
            link + " is version 91402, and attention needs at least 91600; " + none +
                ": cannot open shared object file: No such file or directory");
}

// Without a GPU the real library makes no handle: the reason is stated, our kernels can compute attention, and the
// context is sound.
TEST(CudaCudnn, AReasonIsStatedWhereItCannotBeUsed) {
  Context context({.cudnn_attention = true, .cudnn = {"libcudnn.so.9"}, .note = {}, .warn = {}});
  CudnnAttention* const cudnn = context.cudnn_attention();
  ASSERT_NE(cudnn, nullptr);
  EXPECT_EQ(cudnn->name(), "");
  EXPECT_NE(cudnn->error(), "");
  EXPECT_EQ(cudnn->prepare({}), cudnn->error());
  EXPECT_FALSE(cudnn->run({}));
  EXPECT_EQ(context.error(), nullptr);
}

// Tensors of a call in memory that is never touched, or on `data`. Queries, keys and values share a buffer
// [B,tokens,H+2G,D].
struct Sizes {
  i64 B = 2, T = 128, S = 128, H = 4, G = 2, D = 64;
};
AttentionCall call_of(const Sizes& z, bool backward, DType dtype = DType::BF16, bool causal = true) {
  static i64 next = 1 << 20;
  const auto fresh = [] { return reinterpret_cast<void*>(next += i64{1} << 32); };
  const auto heads = [&](void* data, i64 tokens, i64 all, i64 first, i64 count) {
    TensorView v = TensorView::of(data, dtype, {z.B, tokens, all, z.D});
    v.data = v.as<char>() + first * z.D * dtype_bytes(dtype);
    v.shape[2] = count;
    return v;
  };
  const i64 all = z.H + 2 * z.G;
  const auto triple = [&](TensorView& q, TensorView& k, TensorView& v) {
    void* const data = fresh();
    q = heads(data, z.T, all, 0, z.H);
    k = heads(z.S == z.T ? data : fresh(), z.S, all, z.H, z.G);
    v = heads(k.as<char>() - z.H * z.D * dtype_bytes(dtype), z.S, all, z.H + z.G, z.G);
  };
  AttentionCall c = {.backward = backward,
                     .o = heads(fresh(), z.T, z.H, 0, z.H),
                     .lse = TensorView::of(fresh(), DType::F32, {z.B, z.H, z.T}),
                     .q = {},
                     .k = {},
                     .v = {},
                     .dq = {},
                     .dk = {},
                     .dv = {},
                     .dout = {},
                     .params = {.scale = 0.125f, .causal = causal}};
  triple(c.q, c.k, c.v);
  if (backward) {
    triple(c.dq, c.dk, c.dv);
    c.dout = heads(fresh(), z.T, z.H, 0, z.H);
  }
  return c;
}

std::string_view refused(const AttentionCall& call) {
  const char* const why = refusal(call);
  return why != nullptr ? why : "";
}

TEST(CudaCudnn, ServesWhatNvidiasTableHas) {
  for (bool backward : {false, true}) {
    for (i64 D : {8, 64, 80, 128}) EXPECT_EQ(refused(call_of({.D = D}, backward)), "");
    EXPECT_EQ(refused(call_of({}, backward, DType::F16)), "");
    EXPECT_EQ(refused(call_of({.T = 128, .S = 384}, backward)), "");
    EXPECT_EQ(refused(call_of({.T = 384, .S = 128}, backward, DType::BF16, false)), "");
    EXPECT_EQ(refused(call_of({.T = 77, .S = 77}, backward)), "");

    EXPECT_EQ(refused(call_of({}, backward, DType::F32)), "dtype");
    EXPECT_EQ(refused(call_of({.D = 36}, backward)), "a head dim that is no multiple of 8 up to 128");
    EXPECT_EQ(refused(call_of({.D = 136}, backward)), "a head dim that is no multiple of 8 up to 128");
    EXPECT_EQ(refused(call_of({.T = 1}, backward)), "lengths");
    EXPECT_EQ(refused(call_of({.B = 0}, backward)), "lengths");
    EXPECT_EQ(refused(call_of({.T = 384, .S = 128}, backward)), "rows without keys");
    AttentionCall c = call_of({}, backward);
    c.params.dropout = 0.1f;
    EXPECT_EQ(refused(c), "dropout");
    c = call_of({}, backward);
    c.params.window = 64;
    EXPECT_EQ(refused(c), "window");
    c = call_of({}, backward);
    c.params.blocks.block = 64;
    EXPECT_EQ(refused(c), "sparse layout");
    c = call_of({}, backward);
    c.k.data = c.k.as<char>() + 2;
    EXPECT_EQ(refused(c), "alignment");
    c = call_of({}, backward);
    c.o.stride[1] += 4;
    EXPECT_EQ(refused(c), "alignment");
    c = call_of({}, backward);
    c.lse.data = c.lse.as<float>() + 1;
    EXPECT_EQ(refused(c), "alignment");
    c = call_of({}, backward);
    c.lse.stride[1] += 4;
    EXPECT_EQ(refused(c), "strided statistics");
  }
  AttentionCall c = call_of({}, true);
  c.dv.stride[0] += 4;
  EXPECT_EQ(refused(c), "alignment");
  EXPECT_EQ(refused(call_of({.T = 32768, .S = 32768}, false)), "");
  EXPECT_EQ(refused(call_of({.T = 32768, .S = 32768}, true)), "memory");
}

TEST(CudaCudnn, KeysTellPlansApart) {
  const AttentionCall base = call_of({}, true);
  const AttentionShape key = shape_of(base);
  EXPECT_EQ(key, shape_of(call_of({}, true)));  // addresses do not matter
  EXPECT_EQ(AttentionShapeHash{}(key), AttentionShapeHash{}(shape_of(call_of({}, true))));
  AttentionCall c = base;
  c.params.scale = 2;
  EXPECT_EQ(key, shape_of(c));
  c.params.causal = false;
  EXPECT_NE(key, shape_of(c));
  for (const Sizes& z :
       {Sizes{.B = 3}, Sizes{.T = 64}, Sizes{.S = 256}, Sizes{.H = 8}, Sizes{.G = 1}, Sizes{.D = 32}}) {
    EXPECT_NE(key, shape_of(call_of(z, true)));
    EXPECT_NE(AttentionShapeHash{}(key), AttentionShapeHash{}(shape_of(call_of(z, true))));
  }
  EXPECT_NE(key, shape_of(call_of({}, false)));
  EXPECT_NE(key, shape_of(call_of({}, true, DType::F16)));
  for (TensorView AttentionCall::*view :
       {&AttentionCall::q, &AttentionCall::k, &AttentionCall::v, &AttentionCall::o, &AttentionCall::dq,
        &AttentionCall::dk, &AttentionCall::dv, &AttentionCall::dout}) {
    for (size_t d : {0u, 1u, 2u}) {
      c = base;
      (c.*view).stride[d] += 8;
      EXPECT_NE(key, shape_of(c));
      EXPECT_NE(AttentionShapeHash{}(key), AttentionShapeHash{}(shape_of(c)));
    }
  }
  // The stride of a single batch row means nothing.
  AttentionCall one = call_of({.B = 1}, true), other = one;
  other.q.stride[0] = 12345;
  EXPECT_EQ(shape_of(one), shape_of(other));
}

// Every head of every batch row exactly once, each part within the limit.
void expect_covers(const AttentionShape& whole, i64 batches, i64 groups) {
  const AttentionSlices x = slices_of(whole);
  EXPECT_EQ(x.shape.B, batches);
  EXPECT_EQ(x.shape.G, groups);
  EXPECT_EQ(x.shape.H * whole.G, groups * whole.H);
  EXPECT_EQ(x.shape.q, whole.q);
  std::map<std::pair<i64, i64>, int> seen;
  for (const AttentionSlice& s : x.slices) {
    for (i64 b = 0; b < batches; ++b) {
      for (i64 g = 0; g < groups; ++g) ++seen[{s.batch + b, s.group + g}];
    }
  }
  EXPECT_EQ(static_cast<i64>(seen.size()), whole.B * whole.G);
  for (const auto& [at, times] : seen) {
    EXPECT_EQ(times, 1);
    EXPECT_LT(at.first, whole.B);
    EXPECT_LT(at.second, whole.G);
  }
}

TEST(CudaCudnn, BackwardIsCutUntilItsScoresFit) {
  const auto shape = [](const Sizes& z, bool backward = true) { return shape_of(call_of(z, backward)); };
  expect_covers(shape({.B = 8, .T = 1024, .S = 1024, .H = 12, .G = 12}), 8, 12);  // 192 MiB
  expect_covers(shape({.B = 16, .T = 2048, .S = 2048, .H = 16, .G = 8}), 4, 8);   // 128 MiB a row
  expect_covers(shape({.B = 2, .T = 4096, .S = 4096, .H = 32, .G = 8}), 1, 4);    // 128 MiB a group
  expect_covers(shape({.B = 1, .T = 8192, .S = 8192, .H = 32, .G = 8}), 1, 1);    // 512 MiB a group
  expect_covers(shape({.B = 9, .T = 2048, .S = 2048, .H = 32, .G = 32}), 1, 32);
  expect_covers(shape({.B = 16, .T = 8192, .S = 8192, .H = 32, .G = 8}, false), 16, 8);
  // Statistics of parts would not be aligned.
  EXPECT_EQ(slices_of(shape({.B = 1, .T = 8191, .S = 8191, .H = 8, .G = 8})).shape.B, 1);
  EXPECT_EQ(slices_of(shape({.B = 1, .T = 8191, .S = 8191, .H = 9, .G = 9})).shape.B, 0);
  EXPECT_EQ(slices_of(shape({.T = 32768, .S = 32768})).shape.B, 0);
}

// A graph computed in fp64, every tensor dense in the order of its dims.
class Evaluator {
 public:
  explicit Evaluator(const Graph& graph) {
    for (const GraphTensor& t : graph.tensors) tensors_[t.uid] = t;
    nodes_ = graph.nodes;
  }

  std::vector<double>& of(i64 uid) {
    std::vector<double>& x = values_[uid];
    const auto& dim = tensors_.at(uid).dim;
    x.resize(dim[0] * dim[1] * dim[2] * dim[3]);
    return x;
  }
  bool has(i64 uid) const { return tensors_.contains(uid); }
  const GraphTensor& tensor(i64 uid) const { return tensors_.at(uid); }

  void run() {
    for (const GraphNode& n : nodes_) step(n);
  }

 private:
  using At = std::array<i64, 4>;

  template <class F>
  static void each(const At& dim, F&& f) {
    for (i64 a = 0; a < dim[0]; ++a) {
      for (i64 b = 0; b < dim[1]; ++b) {
        for (i64 c = 0; c < dim[2]; ++c) {
          for (i64 d = 0; d < dim[3]; ++d) f(At{a, b, c, d});
        }
      }
    }
  }
  // The element of a tensor that meets `at` of a tensor of dims `dim`: stretched where it has one, shared where it has
  // fewer heads.
  double& element(i64 uid, const At& at, const At& dim) {
    const At& own = tensors_.at(uid).dim;
    i64 index = 0;
    for (size_t d = 0; d < 4; ++d) {
      EXPECT_EQ(dim[d] % own[d], 0);
      index = index * own[d] + at[d] / (dim[d] / own[d]);
    }
    return of(uid)[index];
  }

  void step(const GraphNode& n) {
    const At dim = tensors_.at(n.y).dim, from = tensors_.at(n.x).dim;
    switch (n.op) {
      case GraphOp::Matmul: {
        const At other = tensors_.at(n.b).dim;
        EXPECT_EQ(from[3], other[2]);
        EXPECT_EQ(from[2], dim[2]);
        EXPECT_EQ(other[3], dim[3]);
        each(dim, [&](const At& at) {
          double sum = 0;
          for (i64 i = 0; i < from[3]; ++i) {
            sum += element(n.x, {at[0], at[1], at[2], i}, {dim[0], dim[1], from[2], from[3]}) *
                   element(n.b, {at[0], at[1], i, at[3]}, {dim[0], dim[1], other[2], other[3]});
          }
          element(n.y, at, dim) = sum;
        });
        return;
      }
      case GraphOp::Transpose: {
        EXPECT_EQ(dim, (At{from[0], from[1], from[3], from[2]}));
        // A view: the strides are exchanged with the dims, too.
        const At &a = tensors_.at(n.x).stride, &b = tensors_.at(n.y).stride;
        EXPECT_EQ(b, (At{a[0], a[1], a[3], a[2]}));
        each(dim, [&](const At& at) { element(n.y, at, dim) = element(n.x, {at[0], at[1], at[3], at[2]}, from); });
        return;
      }
      case GraphOp::Max:
      case GraphOp::Sum:
        each(dim, [&](const At& at) { element(n.y, at, dim) = n.op == GraphOp::Max ? -INFINITY : 0; });
        each(from, [&](const At& at) {
          double& y = element(n.y, at, from);
          const double x = element(n.x, at, from);
          y = n.op == GraphOp::Max ? std::max(y, x) : y + x;
        });
        return;
      default: each(dim, [&](const At& at) { element(n.y, at, dim) = pointwise(n, at, dim); });
    }
  }

  double pointwise(const GraphNode& n, const At& at, const At& dim) {
    const double x = element(n.x, at, dim), b = n.b != 0 ? element(n.b, at, dim) : 0;
    switch (n.op) {
      case GraphOp::Index: return static_cast<double>(at[n.axis]);
      case GraphOp::Mul: return x * b;
      case GraphOp::Add: return x + b;
      case GraphOp::Sub: return x - b;
      case GraphOp::Div: return x / b;
      case GraphOp::Exp: return std::exp(x);
      case GraphOp::Log: return std::log(x);
      case GraphOp::GreaterEqual: return x >= b;
      case GraphOp::Select: return element(n.t, at, dim) != 0 ? x : b;
      default: ADD_FAILURE(); return 0;
    }
  }

  std::map<i64, GraphTensor> tensors_;
  std::map<i64, std::vector<double>> values_;
  std::vector<GraphNode> nodes_;
};

// The graph's tensor and the op's view, element by element at the address that the graph's strides give.
template <class F>
void each_element(Evaluator& e, i64 uid, const TensorView& v, F&& f) {
  const GraphTensor& t = e.tensor(uid);
  std::vector<double>& values = e.of(uid);
  size_t i = 0;
  for (i64 a = 0; a < t.dim[0]; ++a) {
    for (i64 b = 0; b < t.dim[1]; ++b) {
      for (i64 c = 0; c < t.dim[2]; ++c) {
        for (i64 d = 0; d < t.dim[3]; ++d) {
          f(values[i++], v.as<double>()[a * t.stride[0] + b * t.stride[1] + c * t.stride[2] + d * t.stride[3]]);
        }
      }
    }
  }
}

TEST(CudaCudnn, GraphsComputeWhatRefDoes) {
  for (const Sizes& z : {Sizes{2, 5, 5, 4, 4, 8}, Sizes{2, 3, 7, 4, 2, 8}, Sizes{1, 9, 9, 6, 2, 16},
                         Sizes{3, 2, 6, 3, 1, 8}, Sizes{1, 7, 4, 2, 2, 8}}) {
    for (bool causal : {true, false}) {
      if (causal && z.T > z.S) continue;
      SCOPED_TRACE(::testing::Message() << z.B << " " << z.T << " " << z.S << " " << z.H << " " << z.G << " " << z.D
                                        << (causal ? " causal" : ""));
      // Views as in call_of, in fp64, on memory: one buffer for queries, keys and values, one for their gradients.
      const i64 tokens = std::max(z.T, z.S), all = z.H + 2 * z.G;
      std::mt19937 random(7);
      std::normal_distribution<double> normal;
      std::vector<std::vector<double>> memory;
      const auto buffer = [&](i64 n) {
        auto& m = memory.emplace_back(static_cast<size_t>(n));
        for (double& x : m) x = normal(random);
        return static_cast<void*>(m.data());
      };
      const auto heads = [&](void* data, i64 length, i64 first, i64 count) {
        TensorView v = TensorView::of(data, DType::F64, {z.B, tokens, all, z.D});
        v.data = v.as<double>() + first * z.D;
        v.shape[1] = length;
        v.shape[2] = count;
        return v;
      };
      void *const qkv = buffer(z.B * tokens * all * z.D), *const grads = buffer(z.B * tokens * all * z.D),
                  *const wide = buffer(z.B * tokens * all * z.D);
      AttentionCall c = {
          .backward = true,
          .o = TensorView::of(buffer(z.B * z.T * z.H * z.D), DType::F64, {z.B, z.T, z.H, z.D}),
          .lse = TensorView::of(buffer(z.B * z.H * z.T), DType::F64, {z.B, z.H, z.T}),
          .q = heads(qkv, z.T, 0, z.H),
          .k = heads(qkv, z.S, z.H, z.G),
          .v = heads(qkv, z.S, z.H + z.G, z.G),
          .dq = heads(grads, z.T, 0, z.H),
          .dk = heads(grads, z.S, z.H, z.G),
          .dv = heads(grads, z.S, z.H + z.G, z.G),
          .dout = heads(wide, z.T, 1, z.H),
          .params = {.scale = 0.3f, .causal = causal},
      };
      ThreadPool pool(1);
      Stream stream{.pool = &pool};
      ref_ops().attention_fwd(c.o, c.lse, c.q, c.k, c.v, c.params, stream);
      ref_ops().attention_bwd(c.dq, c.dk, c.dv, c.dout, c.q, c.k, c.v, c.o, c.lse, c.params, stream);
      for (bool backward : {false, true}) {
        c.backward = backward;
        Evaluator e(attention_graph(shape_of(c)));
        const std::pair<i64, double> numbers[] = {{kScale, static_cast<double>(c.params.scale)},
                                                  {kMinusInfinity, -INFINITY},
                                                  {kOne, 1},
                                                  {kNumQueries, static_cast<double>(z.T)},
                                                  {kNumKeys, static_cast<double>(z.S)}};
        for (const auto& [uid, x] : numbers) {
          if (e.has(uid)) e.of(uid)[0] = x;
        }
        const auto load = [&](i64 uid, const TensorView& v) {
          each_element(e, uid, v, [](double& x, double at) { x = at; });
        };
        const auto expect = [&](i64 uid, const TensorView& v, const char* what) {
          each_element(e, uid, v, [&](double x, double at) { EXPECT_NEAR(x, at, 1e-9) << what; });
        };
        load(kQ, c.q);
        load(kK, c.k);
        load(kV, c.v);
        if (backward) {
          load(kO, c.o);
          load(kLse, c.lse);
          load(kDout, c.dout);
        }
        e.run();
        if (backward) {
          expect(kDq, c.dq, "dq");
          expect(kDk, c.dk, "dk");
          expect(kDv, c.dv, "dv");
        } else {
          expect(kO, c.o, "o");
          expect(kLse, c.lse, "lse");
        }
      }
    }
  }
}

TEST(CudaCudnn, TensorsAreDeclaredAsTheCallBindsThem) {
  for (bool backward : {false, true}) {
    for (const Sizes& z : {Sizes{}, Sizes{.T = 64, .S = 192}}) {
      const Graph graph = attention_graph(shape_of(call_of(z, backward)));
      std::vector<i64> bound;
      for (const GraphTensor& t : graph.tensors) {
        EXPECT_EQ(t.is_inner, t.uid >= kInner);
        EXPECT_EQ(t.is_number, t.uid >= kScale && t.uid < kInner);
        if (!t.is_inner) bound.push_back(t.uid);
      }
      std::vector<i64> want = {kQ, kK, kV, kO, kLse, kScale, kMinusInfinity};
      if (backward) want.insert(want.end(), {kDq, kDk, kDv, kDout, kRowSums, kOne});
      if (z.T != z.S) want.insert(want.end(), {kNumQueries, kNumKeys});
      std::ranges::sort(bound);
      std::ranges::sort(want);
      EXPECT_EQ(bound, want);
    }
  }
  const Graph graph = attention_graph(shape_of(call_of({}, false, DType::F16, false)));
  const auto tensor = [&](i64 uid) {
    return *std::ranges::find_if(graph.tensors, [&](const GraphTensor& t) { return t.uid == uid; });
  };
  using Dims = std::array<i64, 4>;
  EXPECT_EQ(tensor(kQ).dim, (Dims{2, 4, 128, 64}));
  EXPECT_EQ(tensor(kQ).stride, (Dims{128 * 8 * 64, 64, 8 * 64, 1}));
  EXPECT_EQ(tensor(kK).dim, (Dims{2, 2, 64, 128}));  // transposed
  EXPECT_EQ(tensor(kK).stride, (Dims{128 * 8 * 64, 64, 1, 8 * 64}));
  EXPECT_EQ(tensor(kLse).dim, (Dims{2, 4, 128, 1}));
  EXPECT_EQ(tensor(kLse).stride, (Dims{4 * 128, 128, 1, 1}));
  EXPECT_EQ(tensor(kLse).type, Type::F32);
  EXPECT_EQ(tensor(kQ).type, Type::F16);
}

// An H100 (SXM) in the words in which cuDNN describes devices.
constexpr std::string_view kH100 =
    R"({"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536,)"
    R"("multiProcessorCount":132,"warpSize":32,"maxSharedMemoryPerBlock":49152,"maxSharedMemoryPerBlockOptin":232448,)"
    R"("reservedSharedMemoryPerBlock":1024,"maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,)"
    R"("maxThreadsPerSM":2048,"pciDeviceId":0,"isTccDriver":0,"supportCoopLaunch":1,"smClockRateKHz":1980000,)"
    R"("memClockRateKHz":2619000,"l2CacheSize":52428800,"deviceName":"NVIDIA H100 80GB HBM3","cudaDeviceId":0,)"
    R"("deviceVer":900,"driverVer":13000,"totalGlobalMem":85014413312})";

// An A100 (SXM), the same way.
constexpr std::string_view kA100 =
    R"({"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536,)"
    R"("multiProcessorCount":108,"warpSize":32,"maxSharedMemoryPerBlock":49152,"maxSharedMemoryPerBlockOptin":166912,)"
    R"("reservedSharedMemoryPerBlock":1024,"maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,)"
    R"("maxThreadsPerSM":2048,"pciDeviceId":0,"isTccDriver":0,"supportCoopLaunch":1,"smClockRateKHz":1410000,)"
    R"("memClockRateKHz":1593000,"l2CacheSize":41943040,"deviceName":"NVIDIA A100-SXM4-80GB","cudaDeviceId":0,)"
    R"("deviceVer":800,"driverVer":13000,"totalGlobalMem":85094825984})";

TEST(CudaCudnn, TheLibraryHasEnginesForAllThatIsServed) {
  if (library_error() != nullptr) GTEST_SKIP() << library_error();
  if (dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL) == nullptr) GTEST_SKIP() << dlerror();
  for (const Sizes& z :
       {Sizes{.T = 1024, .S = 1024, .H = 12, .G = 12}, Sizes{.H = 8, .G = 2, .D = 128}, Sizes{.T = 128, .S = 384},
        Sizes{.T = 77, .S = 77, .D = 8}, Sizes{.T = 77, .S = 205, .D = 80}, Sizes{.T = 130, .S = 320},
        Sizes{.T = 65, .S = 65}, Sizes{.B = 1, .T = 2, .S = 2, .H = 1, .G = 1},
        Sizes{.T = 2, .S = 1000, .H = 6, .G = 1}, Sizes{.B = 1, .T = 8192, .S = 8192, .H = 32, .G = 8, .D = 128}}) {
    for (int kind = 0; kind < 16; ++kind) {
      const bool causal = kind % 2 != 0, backward = kind / 2 % 2 != 0, hopper = kind / 4 % 2 != 0, bf16 = kind / 8 != 0;
      SCOPED_TRACE(::testing::Message() << z.B << " " << z.T << " " << z.S << " " << z.H << " " << z.G << " " << z.D
                                        << (causal ? " causal" : "") << (backward ? " backward" : "")
                                        << (hopper ? " H100" : " A100") << (bf16 ? " bf16" : " fp16"));
      const AttentionCall call = call_of(z, backward, bf16 ? DType::BF16 : DType::F16, causal);
      ASSERT_EQ(refused(call), "");
      const AttentionShape s = slices_of(shape_of(call)).shape;
      const Candidates found = find_candidates(s, hopper ? kH100 : kA100);
      EXPECT_EQ(found.error, "");
      const auto best = std::ranges::find_if(found.list, [](const Candidate& c) { return c.deterministic; });
      ASSERT_NE(best, found.list.end());
      // Forward needs next to nothing; backward needs the scores, and if heads are grouped gradients of keys and values
      // for all of them. An algorithm without room for the scores would not be deterministic, and no note states that.
      if (backward) {
        for (const Candidate& c : found.list) EXPECT_GE(c.workspace_bytes, workspace_bytes(s, 8)) << c.engine;
      }
      EXPECT_EQ(best->workspace_bytes, workspace_bytes(s, hopper ? 9 : 8));
    }
  }
}

}  // namespace cuda_cudnn_test
}  // namespace ds::cuda::cudnn
