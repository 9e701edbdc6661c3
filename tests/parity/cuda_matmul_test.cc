// SPDX-License-Identifier: Apache-2.0
// Cases of the CUDA backend that the general tests of products, column sums and cross-entropy do not reach, on the
// simulator: rows of more than one tile, rows that a block keeps in shared memory, unaligned memory, sums in parts, a
// library that fuses nothing, threads in any order.

#include <bit>
#include <cmath>
#include <memory>

#include "cuda/context.h"
#include "cuda/matmul.h"
#include "cuda/ops.h"
#include "parity/parity.h"
#include "setting.h"

namespace ds::testing {
namespace cuda_matmul_test {

struct Ops {
  decltype(OpTable::matmul) matmul;
  decltype(OpTable::column_sum) column_sum;
  decltype(OpTable::linear_cross_entropy) linear_cross_entropy;
};
const Ops kRef{ref_ops().matmul, ref_ops().column_sum, ref_ops().linear_cross_entropy};
const Ops kCuda{cuda::matmul, cuda::column_sum, cuda::linear_cross_entropy};

class CudaMatmul : public ::testing::Test {
 protected:
  ~CudaMatmul() override { EXPECT_EQ(context_.error(), nullptr) << context_.error() << " in " << context_.where(); }

  cuda::Context context_;
  Stream stream_{.pool = nullptr, .native = &context_};
};

// [rows, columns] with rows `stride` apart, from element `shift` of t on.
TensorView part(const Tensor& t, i64 shift, i64 rows, i64 columns, i64 stride) {
  TensorView v = t.view();
  v.data = static_cast<char*>(v.data) + shift * dtype_bytes(v.dtype);
  v.rank = 2;
  v.shape = {rows, columns};
  v.stride = {stride, 1};
  return v;
}

TEST_F(CudaMatmul, AnyAlignmentOfAnyOperand) {
  constexpr i64 M = 9, N = 40, K = 21, kRoom = 16;
  struct Results {
    Tensor c, preact;
  };
  const auto run = [&](const Ops& ops, DType work, DType out, i64 shift, i64 stride, Activation f, u32 parts) {
    Tensor a(work, {M * (K + 3) + kRoom}), b(work, {K * 64 + kRoom}), bias(work, {N + kRoom});
    Tensor residual(out, {M * stride + kRoom}), c(residual), preact(residual);
    u32 seed = 1;
    for (Tensor* t : {&a, &b, &bias, &residual, &c, &preact}) t->randomize(seed++);
    const TensorView none{}, to = part(c, shift, M, N, stride);
    const bool plain = f == Activation::None && (parts & 5) == 0;
    ops.matmul(to, part(a, shift, M, K, K + 3), part(b, shift, K, N, 64),
               (parts & 1) != 0 ? part(bias, shift, 1, N, N).reshaped({N}) : none,
               (parts & 2) != 0 ? part(preact, shift, M, N, stride) : none,
               (parts & 4) == 0   ? none
               : (parts & 8) != 0 ? to
                                  : part(residual, shift, M, N, stride),
               {.accumulate = plain && (parts & 8) != 0, .activation = f}, stream_);
    return Results{c, preact};
  };
  for (const bool plain : {false, true}) {
    // A library that can do less gives the same.
    std::unique_ptr<Setting> setting;
    if (plain) setting = std::make_unique<Setting>("DS_SIM_PLAIN_LT", "1");
    cuda::Context context;
    stream_.native = &context;
    for (DType work : kWorkDTypes) {
      for (DType out : {work, DType::F32}) {
        for (i64 shift : {0, 1, 8}) {
          for (i64 stride : {40, 43, 48}) {
            for (Activation f : {Activation::None, Activation::GeluTanh, Activation::GeluErf, Activation::Silu}) {
              for (u32 parts = 0; parts < 16; ++parts) {
                const Results want = run(kRef, work, out, shift, stride, f, parts);
                const Results got = run(kCuda, work, out, shift, stride, f, parts);
                const std::string what = std::string(dtype_name(work)) + " to " + std::string(dtype_name(out)) +
                                         " shift " + std::to_string(shift) + " stride " + std::to_string(stride) +
                                         " activation " + std::to_string(static_cast<int>(f)) + " parts " +
                                         std::to_string(parts);
                expect_close(got.c, want.c, out == DType::F32 ? 30 : 2.1, what);
                expect_close(got.preact, want.preact, out == DType::F32 ? 30 : 2.1, what + ": preact");
                if (HasFatalFailure()) return;
              }
            }
          }
        }
      }
    }
  }
}

TEST_F(CudaMatmul, SumsThatDoNotFitTheScratchMemoryGoByRows) {
  constexpr i64 M = 8500, N = 1000, K = 2;
  for (const bool trans_a : {false, true}) {
    Tensor a(DType::BF16, {trans_a ? K : M, trans_a ? M : K}), b(DType::BF16, {K, N}), residual(DType::BF16, {M, N});
    a.randomize(1);
    b.randomize(2);
    residual.randomize(3);
    Tensor want(DType::BF16, {M, N}), got(want), want_preact(want), got_preact(want);
    const MatmulParams params{.trans_a = trans_a, .activation = Activation::Silu};
    kRef.matmul(want, a, b, {}, want_preact, residual, params, stream_);
    kCuda.matmul(got, a, b, {}, got_preact, residual, params, stream_);
    EXPECT_LT(context_.scratch_bytes(), size_t{1} << 25);
    expect_close(got, want, 2.1, "c");
    expect_close(got_preact, want_preact, 2.1, "preact");
  }
}

TEST_F(CudaMatmul, ColumnSumsDoNotDependOnAlignmentOrOrder) {
  for (DType work : kWorkDTypes) {
    for (const auto& [R, N] : {std::pair<i64, i64>{3000, 70}, {300, 1000}, {20000, 3}}) {
      Tensor x(work, {R, N + 5}), aligned(work, {R, N + 16 - N % 8}), want(DType::F32, {N}), first(DType::F32, {N});
      x.randomize(1);
      for (i64 r = 0; r < R; ++r) {
        for (i64 n = 0; n < N; ++n) aligned.set(r * aligned.view().stride[0] + n, x.at(r * (N + 5) + n));
      }
      kRef.column_sum(want, part(x, 0, R, N, N + 5), false, stream_);
      kCuda.column_sum(first, part(x, 0, R, N, N + 5), false, stream_);
      expect_close(first, want, 64, "column sums");
      for (int seed = 1; seed < 4; ++seed) {
        const Setting order("DS_SIM_SEED", std::to_string(seed));
        Tensor got(DType::F32, {N});
        kCuda.column_sum(got, part(aligned, 0, R, N, aligned.view().stride[0]), false, stream_);
        expect_same_bits(got, first, "column sums");
      }
      if (HasFatalFailure()) return;
    }
  }
}

class CudaCrossEntropy : public CudaMatmul {
 protected:
  struct Results {
    Tensor losses, dh, dweight, dbias;
  };
  Results run(const Ops& ops, const Tensor& h, const Tensor& weight, const Tensor& targets, i64 chunk, i64 shift) {
    const i64 T = h.view().dim(0), C = h.view().dim(1), V = weight.view().dim(0);
    Tensor logits(DType::F32, {chunk * V + shift});
    Results r{Tensor(DType::F32, {T}), Tensor(h.view().dtype, {T, C}), Tensor(DType::F32, {V, C}),
              Tensor(DType::F32, {V})};
    ops.linear_cross_entropy(r.losses, r.dh, r.dweight, r.dbias, h, weight, {}, targets,
                             part(logits, shift, chunk, V, V), {.grad_scale = 0.5f, .chunk_tokens = chunk}, stream_);
    return r;
  }
};

TEST_F(CudaCrossEntropy, RowsOfSeveralTilesAlignedAndNot) {
  constexpr i64 T = 19, C = 9;
  for (i64 V : {16384, 16389, 33001}) {
    for (DType work : kWorkDTypes) {
      Tensor h(work, {T, C}), weight(work, {V, C}), targets(DType::I32, {T});
      h.randomize(1);
      weight.randomize(2);
      for (i64 t = 0; t < T; ++t) targets.set(t, static_cast<float>(t * 7919 % V));
      targets.set(1, static_cast<float>(V - 1));
      targets.set(3, -100);
      const Results want = run(kRef, h, weight, targets, T, 0);
      // 4 rows: as they lie, unaligned for odd V. T rows: those of odd V are spread.
      for (const auto& [chunk, shift] : {std::pair<i64, i64>{4, 0}, {4, 1}, {T, 0}}) {
        const std::string what = std::to_string(V) + " " + std::string(dtype_name(work)) + " chunk " +
                                 std::to_string(chunk) + " shift " + std::to_string(shift);
        const Results got = run(kCuda, h, weight, targets, chunk, shift);
        const double rounding = epsilon(work) / epsilon(DType::F32), terms = 4 * std::sqrt(static_cast<double>(V));
        expect_close(got.losses, want.losses, 64, what + ": losses");
        expect_close(got.dh, want.dh, work == DType::F32 ? 64 + terms : 8, what + ": dh");
        expect_close(got.dweight, want.dweight, std::max(64.0, 4 * rounding), what + ": dweight");
        expect_close(got.dbias, want.dbias, std::max(64.0, 4 * rounding), what + ": dbias");
        const Setting order("DS_SIM_SEED", "1");
        const Results again = run(kCuda, h, weight, targets, chunk, shift);
        expect_same_bits(again.losses, got.losses, what);
        expect_same_bits(again.dh, got.dh, what);
        expect_same_bits(again.dweight, got.dweight, what);
        expect_same_bits(again.dbias, got.dbias, what);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(CudaCrossEntropy, LogitsThatAreNotFinite) {
  constexpr float kInf = INFINITY, kNan = NAN;
  const float firsts[][3] = {{1, kInf, 2},     {1, -kInf, 2},        {-kInf, -kInf, -kInf}, {kNan, 1, 2},
                             {-kInf, kNan, 1}, {-kInf, kNan, -kInf}, {kInf, kInf, 1},       {-kInf, 1, -kInf},
                             {kInf, -kInf, 3}, {1e30f, -1e30f, 3},   {3e38f, -3e38f, 0}};
  for (const auto& first : firsts) {
    for (const auto& [V, others] : {std::pair<i64, float>{3, 0}, {8, -kInf}, {703, 0.5f}, {20003, -kInf}}) {
      for (i64 target : {0, 1, 2}) {
        Tensor h(DType::F32, {1, 1}), weight(DType::F32, {V, 1}), targets(DType::I32, {1});  // logits = weight
        h.fill(1);
        weight.fill(others);
        for (i64 i = 0; i < 3; ++i) weight.set(i, first[i]);
        targets.set(0, static_cast<float>(target));
        const Results want = run(kRef, h, weight, targets, 1, 0), got = run(kCuda, h, weight, targets, 1, 0);
        const std::string what = std::to_string(first[0]) + " " + std::to_string(first[1]) + " " +
                                 std::to_string(first[2]) + " of " + std::to_string(V);
        expect_close(got.losses, want.losses, 64, what);
        expect_close(got.dweight, want.dweight, 64, what);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// The softmax of rows of logits that a block keeps in shared memory, against that of rows in device memory, which are
// read again. Both on the same workspace; a context asks for the limit of a block when it is made.
class CudaKeptRows : public ::testing::Test {
 protected:
  static constexpr size_t kA100 = 163 << 10, kH100 = 227 << 10;  // of a block; the simulated device is an A100 here

  // For a device whose blocks have that much shared memory.
  static std::unique_ptr<cuda::Context> context_of(size_t shared_bytes) {
    const Setting limit("DS_SIM_SHARED_BYTES", std::to_string(shared_bytes));
    return std::make_unique<cuda::Context>();
  }
  struct Case {
    i64 T, V;
    DType work = DType::F32;
    float label_smoothing = 0, z_loss = 0;
    bool gradient = true;
    i64 ignore_from = 1, ignore_every = 3;
    bool narrow = false;  // logits in the work dtype

    std::string name() const {
      return std::to_string(T) + "x" + std::to_string(V) + " " + std::string(dtype_name(work)) +
             (label_smoothing > 0 ? " smoothed" : "") + (z_loss > 0 ? " with z-loss" : "") +
             (gradient ? "" : " losses alone") + (narrow ? " in 16 bits" : "") + " ignored from " +
             std::to_string(ignore_from);
    }
  };
  struct Results {
    Tensor losses, dh, dweight, workspace;
  };

  // The logits of a row are a column of `weight`, exactly; rows take its columns in turn.
  static Results run(const Case& c, const Tensor& weight, cuda::Context& context) {
    const i64 C = weight.view().dim(1);
    Tensor h(c.work, {c.T, C}), targets(DType::I32, {c.T});
    h.fill(0);
    for (i64 t = 0; t < c.T; ++t) {
      h.set(t * C + t % C, 1);
      const bool ignored = t >= c.ignore_from && (t - c.ignore_from) % c.ignore_every < 2;  // some one after the other
      targets.set(t, ignored ? -100.0f : static_cast<float>((t * 7919 + c.V - 1) % c.V));
    }
    Results r{Tensor(DType::F32, {c.T}), Tensor(c.work, {c.T, C}), Tensor(DType::F32, {c.V, C}),
              Tensor(c.narrow ? c.work : DType::F32, {c.T, c.V})};
    r.workspace.fill(0.125f);
    Stream stream{.pool = nullptr, .native = &context};
    const TensorView none{};
    kCuda.linear_cross_entropy(r.losses, c.gradient ? r.dh.view() : none, c.gradient ? r.dweight.view() : none, {}, h,
                               weight, {}, targets, r.workspace,
                               {.ignore_index = -100,
                                .grad_scale = 0.37f,
                                .chunk_tokens = c.T,
                                .label_smoothing = c.label_smoothing,
                                .z_loss = c.z_loss},
                               stream);
    EXPECT_EQ(context.error(), nullptr) << context.error();
    return r;
  }
  static void compare(const Case& c) {
    const auto plain = context_of(0), keeping = context_of(kH100);
    const Setting limit("DS_SIM_SHARED_BYTES", std::to_string(kH100));
    Tensor weight(c.work, {c.V, 3});  // a block's next row is one of the other two kinds
    weight.randomize(static_cast<u32>(c.V), 3);
    const Results want = run(c, weight, *plain);
    for (const char* seed : {"0", "1"}) {
      const Setting order("DS_SIM_SEED", seed);
      const Results got = run(c, weight, *keeping);
      expect_same_bits(got.losses, want.losses, c.name() + ": losses");
      expect_same_bits(got.workspace, want.workspace, c.name() + ": gradients of logits, and all beside them");
      expect_same_bits(got.dh, want.dh, c.name() + ": dh");
      expect_same_bits(got.dweight, want.dweight, c.name() + ": dweight");
      if (HasFatalFailure()) return;
    }
  }
};

// Up to 58080 logits fit an H100's block: 3.5 tiles. Four multiprocessors take several rows each.
TEST_F(CudaKeptRows, HaveTheBitsOfRowsInDeviceMemory) {
  i64 n = 0;
  for (const i64 V : {8, 33, 64, 1000, 1030, 4095, 4096, 4104, 16383, 16384, 16385, 29000, 33001, 50257, 58080}) {
    for (const DType work : kWorkDTypes) {
      for (const bool gradient : {true, false}) {
        for (const auto& [smoothing, z_loss] : {std::pair{0.0f, 0.0f}, {0.1f, 0.0f}, {0.0f, 0.01f}, {0.2f, 0.02f}}) {
          ++n;
          if (V > 2000 && n % 11 != 0) continue;  // in turns
          compare({.T = 20 + n % 4,
                   .V = V,
                   .work = work,
                   .label_smoothing = smoothing,
                   .z_loss = z_loss,
                   .gradient = gradient,
                   .ignore_from = n % 5,
                   .ignore_every = 3 + n % 3,
                   .narrow = work != DType::F32 && n % 2 == 0});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
  for (const i64 V : {4, 8, 4100, 50260}) compare({.T = 1, .V = V, .ignore_from = 1});
  compare({.T = 20, .V = 50264, .work = DType::BF16, .ignore_from = 0, .ignore_every = 2});  // all
  for (const i64 V : {4098, 50257, 58081, 116160})
    compare({.T = 18, .V = V, .work = V % 2 == 0 ? DType::F16 : DType::BF16, .z_loss = 0.01f, .narrow = true});
}

// Rows that do not fit, or cannot be copied, are read from device memory whatever the limit.
TEST_F(CudaKeptRows, OthersAreAsBefore) {
  for (const i64 V : {58081, 58088, 70001}) compare({.T = 18, .V = V, .work = DType::BF16, .z_loss = 0.01f});
  compare({.T = 18, .V = 116161, .work = DType::BF16, .z_loss = 0.01f, .narrow = true});
  for (const i64 T : {1, 5}) compare({.T = T, .V = 50257});
}

TEST_F(CudaKeptRows, LogitsThatAreNotFiniteAreAlike) {
  constexpr float kInf = INFINITY, kNan = NAN;
  const float firsts[][3] = {{1, kInf, 2},       {1, -kInf, 2},     {-kInf, -kInf, -kInf}, {kNan, 1, 2},
                             {-kInf, kNan, 1},   {kInf, kInf, 1},   {-kInf, 1, -kInf},     {kInf, -kInf, 3},
                             {1e30f, -1e30f, 3}, {3e38f, -3e38f, 0}};
  const auto plain = context_of(0), keeping = context_of(kA100);
  for (const auto& first : firsts) {
    for (const auto& [V, others] : {std::pair<i64, float>{8, -kInf}, {704, 0.5f}, {20008, -kInf}}) {
      const Case c{.T = 9, .V = V, .label_smoothing = V == 704 ? 0.1f : 0};
      Tensor weight(DType::F32, {V, 1});
      weight.fill(others);
      for (i64 i = 0; i < 3; ++i) weight.set(i, first[i]), weight.set(V - 1 - i, first[2 - i]);
      const Results want = run(c, weight, *plain), got = run(c, weight, *keeping);
      const auto same = [&](const Tensor& a, const Tensor& b) {  // except for the kind of NaN
        for (i64 i = 0; i < a.numel(); ++i) {
          if (std::isnan(a.at(i)) && std::isnan(b.at(i))) continue;
          ASSERT_EQ(std::bit_cast<u32>(a.at(i)), std::bit_cast<u32>(b.at(i))) << first[0] << " of " << V << ": " << i;
        }
      };
      same(got.losses, want.losses);
      same(got.workspace, want.workspace);
      if (HasFatalFailure()) return;
    }
  }
}

// The simulator refuses a launch that asks for more shared memory than the device has. A context that was made for a
// larger device asks for it only if it keeps rows.
TEST_F(CudaKeptRows, AreKeptByDevicesOnWhichTheyFitOnly) {
  const auto h100 = context_of(kH100), a100 = context_of(kA100);
  for (const DType work : kWorkDTypes) {
    Tensor weight(work, {50257, 1});
    weight.randomize(1);
    Case c{.T = 18, .V = 50257, .work = work};
    run(c, weight, *a100);
    EXPECT_DEATH(run(c, weight, *h100), "more shared memory than the device has");
    c.gradient = false;  // logits are read once
    run(c, weight, *h100);
    c.label_smoothing = 0.1f;  // twice
    EXPECT_DEATH(run(c, weight, *h100), "more shared memory than the device has");
  }
}

TEST(CudaContext, SaysHowMuchMemoryIsMissing) {
  cuda::Context context;
  EXPECT_NE(context.scratch(1000), nullptr);
  EXPECT_EQ(context.error(), nullptr);
  constexpr size_t kTooMuch = size_t{5} << 30;  // the simulated device has 4 GiB
  EXPECT_EQ(context.scratch(kTooMuch), nullptr);
  EXPECT_NE(context.error(), nullptr);
  EXPECT_EQ(context.missing_bytes(), kTooMuch);
  EXPECT_EQ(context.scratch_bytes(), 0u);
}

}  // namespace cuda_matmul_test
}  // namespace ds::testing
