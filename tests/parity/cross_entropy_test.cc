// SPDX-License-Identifier: Apache-2.0
// Linear + softmax cross-entropy against the oracle, and both against finite differences.

#include "parity/finite_difference.h"
#include "parity/parity.h"

namespace ds::testing {
namespace cross_entropy_test {

constexpr i32 kIgnore = -100;

struct Case {
  i64 T, C, V;
  DType work = DType::F32;
  i64 chunk = 0;
  bool dh = true, dweight = true;
  float grad_scale = 1.0f;
  bool bias = false;  // and its gradient
  float label_smoothing = 0, z_loss = 0;
  DType logits = DType::F32;
  bool add_dweight = false;  // to random numbers
  bool in_panels = false;    // the weight; then only losses are computed

  std::string name() const {
    return std::to_string(T) + "x" + std::to_string(C) + "x" + std::to_string(V) + " " + std::string(dtype_name(work)) +
           " chunk " + std::to_string(chunk) + (bias ? " with bias" : "") + (label_smoothing > 0 ? " smoothed" : "") +
           " logits " + std::string(dtype_name(logits));
  }
};

// Every third target is ignored.
Tensor targets_for(i64 T, i64 V) {
  Tensor targets(DType::I32, {T});
  for (i64 t = 0; t < T; ++t) targets.set(t, static_cast<float>(t % 3 == 1 ? kIgnore : (t * 7919 + 3) % V));
  return targets;
}

struct Result {
  Tensor losses, dh, dweight, dbias;
};
constexpr u32 kDweightSeed = 4;

Result run(const OpTable& ops, const Case& t, int threads) {
  ThreadPool pool(threads);
  Stream stream{&pool};
  Tensor h(t.work, {t.T, t.C}), weight(t.work, {t.V, t.C}), bias(t.work, {t.V}), logits(t.logits, {t.chunk, t.V});
  h.randomize(1);
  weight.randomize(2, 0.5f);
  bias.randomize(3, 0.25f);
  Result r{Tensor(DType::F32, {t.T}), Tensor(t.work, {t.T, t.C}), Tensor(DType::F32, {t.V, t.C}),
           Tensor(DType::F32, {t.V})};
  const TensorView none{};
  const CrossEntropyParams params{.ignore_index = kIgnore,
                                  .grad_scale = t.grad_scale,
                                  .chunk_tokens = t.chunk,
                                  .label_smoothing = t.label_smoothing,
                                  .z_loss = t.z_loss,
                                  .add_dweight = t.add_dweight};
  if (t.add_dweight) r.dweight.randomize(kDweightSeed);
  if (t.in_panels) {
    ops.linear_cross_entropy(r.losses, none, none, none, h, InPanels(ops, weight), t.bias ? bias.view() : none,
                             targets_for(t.T, t.V), logits, params, stream);
    return r;
  }
  ops.linear_cross_entropy(r.losses, t.dh ? r.dh.view() : none, t.dweight ? r.dweight.view() : none,
                           t.bias ? r.dbias.view() : none, h, weight, t.bias ? bias.view() : none,
                           targets_for(t.T, t.V), logits, params, stream);
  return r;
}

TEST(CrossEntropy, AgreesWithTheOracle) {
  const i64 shapes[][3] = {{1, 1, 1}, {1, 8, 5}, {3, 7, 33}, {9, 33, 130}, {21, 17, 1030}};
  for (const auto& s : shapes) {
    for (DType work : kWorkDTypes) {
      for (const bool bias : {false, true}) {
        Case t{.T = s[0], .C = s[1], .V = s[2], .work = work, .grad_scale = 1.0f / static_cast<float>(s[0])};
        t.bias = bias;
        if (s[2] % 3 == 0) t.label_smoothing = 0.1f;
        if (s[2] % 2 == 1) t.z_loss = 0.01f;
        const Result want = run(ref_ops(), t, 1);
        for (const OpTable* ops : backends()) {
          for (i64 chunk : {i64{1}, i64{4}, t.T, t.T + 3}) {
            t.chunk = chunk;
            // The gradient of a logit is rounded to the work dtype, so dweight and dbias are no better than that. A
            // logit that is rounded is wrong by up to half a unit of itself, and so are the loss and its gradient.
            const double rounding = epsilon(work) / epsilon(DType::F32);
            for (const DType logits : {DType::F32, work}) {
              t.logits = logits;
              const std::string what = std::string(ops->name) + " " + t.name();
              const Result got = run(*ops, t, 2);
              const bool rounded = logits != DType::F32;
              expect_close(got.losses, want.losses, rounded ? std::max(64.0, 4 * rounding) : 64, what + ": losses");
              expect_close(got.dh, want.dh, work == DType::F32 ? 64 : rounded ? 12 : 6, what + ": dh");
              expect_close(got.dweight, want.dweight, std::max(64.0, (rounded ? 12 : 4) * rounding),
                           what + ": dweight");
              // Its terms are of both signs and alike in size: their sum is smaller than they are.
              expect_close(got.dbias, want.dbias, std::max(64.0, (rounded ? 32 : 16) * rounding), what + ": dbias");
              if (work == DType::F32) break;
            }
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(CrossEntropy, BitsDoNotDependOnThreadsOrOnWhatElseIsWanted) {
  for (const OpTable* ops : backends()) {
    for (DType work : kWorkDTypes) {
      Case t{.T = 40, .C = 65, .V = 333, .work = work, .chunk = 33, .grad_scale = 0.1f, .bias = true};
      if (work != DType::F16) t.label_smoothing = 0.2f, t.z_loss = 1e-3f;
      const Result one = run(*ops, t, 1);
      for (int threads : {2, 3, 5}) {
        const Result got = run(*ops, t, threads);
        expect_same_bits(got.losses, one.losses, t.name());
        expect_same_bits(got.dh, one.dh, t.name());
        expect_same_bits(got.dweight, one.dweight, t.name());
        expect_same_bits(got.dbias, one.dbias, t.name());
      }
      t.dweight = false;
      expect_same_bits(run(*ops, t, 2).dh, one.dh, t.name() + " without dweight");
      t.dh = false;
      expect_same_bits(run(*ops, t, 2).losses, one.losses, t.name() + " losses alone");
      if (has_own_products(*ops)) {
        t.in_panels = true;
        expect_same_bits(run(*ops, t, 2).losses, one.losses, t.name() + " in panels");
        t.in_panels = false;
      }
      t.dweight = true;
      expect_same_bits(run(*ops, t, 2).dweight, one.dweight, t.name() + " without dh");
    }
  }
}

TEST(CrossEntropy, AddsToTheGradientOfTheWeight) {
  for (const OpTable* ops : backends()) {
    for (const DType work : kWorkDTypes) {
      Case t{.T = 21, .C = 40, .V = 133, .work = work, .chunk = 24, .grad_scale = 0.1f, .bias = true};
      const Result before = run(*ops, t, 2);
      Tensor want(DType::F32, {t.V, t.C});
      want.randomize(kDweightSeed);
      for (i64 i = 0; i < want.numel(); ++i) want.set(i, want.at(i) + before.dweight.at(i));
      t.add_dweight = true;
      const Result one = run(*ops, t, 2);
      const std::string what = std::string(ops->name) + " " + t.name();
      expect_same_bits(one.dweight, want, what);
      expect_same_bits(one.dh, before.dh, what + ": dh");
      expect_same_bits(one.dbias, before.dbias, what + ": dbias");
      expect_same_bits(one.losses, before.losses, what + ": losses");
      t.chunk = 8;
      const double rounding = epsilon(work) / epsilon(DType::F32);
      expect_close(run(*ops, t, 2).dweight, run(ref_ops(), t, 1).dweight, std::max(64.0, 4 * rounding),
                   what + " in chunks");
      if (HasFatalFailure()) return;
    }
  }
}

// Logits that are stored in 16 bits are those of a product in 16 bits: as if they were computed first, and then in
// fp32.
TEST(CrossEntropy, LogitsIn16BitsAreRoundedOnce) {
  for (const OpTable* ops : backends()) {
    for (const DType work : {DType::BF16, DType::F16}) {
      for (const auto& [T, V] : {std::pair<i64, i64>{3, 7}, {20, 333}, {9, 1030}, {24, 2048}}) {
        for (const float smoothing : {0.0f, 0.1f}) {
          ThreadPool pool(2);
          Stream stream{&pool};
          const i64 C = 24;
          Tensor h(work, {T, C}), weight(work, {V, C}), bias(work, {V}), targets = targets_for(T, V);
          h.randomize(5);
          weight.randomize(6, 2.0f);
          bias.randomize(7);
          Tensor narrow(work, {T, V}), wide(DType::F32, {T, V}), dz(work, {T, V}), workspace(work, {T, V});
          Tensor max(DType::F32, {T}), sum(DType::F32, {T}), hit(DType::F32, {T}), want(DType::F32, {T}),
              got(DType::F32, {T}), dh(work, {T, C});
          const CrossEntropyParams params{.ignore_index = kIgnore,
                                          .grad_scale = 0.3f,
                                          .chunk_tokens = T,
                                          .label_smoothing = smoothing,
                                          .z_loss = smoothing / 10,
                                          .vocab = V};
          ops->matmul(narrow, h, weight, bias, {}, {}, {.trans_b = true}, stream);
          ops->cast(wide, narrow, stream);
          ops->vocab_max(max, wide, stream);
          ops->vocab_sums(sum, hit, wide, max, targets, 0, params, stream);
          ops->vocab_grad(want, dz, wide, sum, hit, max, targets, 0, params, stream);
          ops->linear_cross_entropy(got, dh, {}, {}, h, weight, bias, targets, workspace, params, stream);
          const std::string what = std::string(ops->name) + " " + std::string(dtype_name(work)) + " " +
                                   std::to_string(T) + "x" + std::to_string(V);
          if (ops->name != "cuda") {
            expect_same_bits(got, want, what + ": losses");
          } else {
            expect_close(got, want, 64, what + ": losses", 1);
          }
          // The workspace has the gradients, unless the op keeps its rows apart to have them aligned.
          if (V % 8 == 0 || ops->name != "cuda") expect_close(workspace, dz, 2.1, what + ": dz");
        }
      }
    }
  }
}

TEST(CrossEntropy, WithoutTokensTheGradientsOfWeightAndBiasAreZero) {
  for (const OpTable* ops : backends()) {
    const Result r = run(*ops, {.T = 0, .C = 5, .V = 7, .chunk = 4, .bias = true}, 2);
    for (i64 i = 0; i < 35; ++i) EXPECT_EQ(r.dweight.at(i), 0.0f) << ops->name;
    for (i64 i = 0; i < 7; ++i) EXPECT_EQ(r.dbias.at(i), 0.0f) << ops->name;
  }
}

TEST(CrossEntropy, LargeLogitsNeitherOverflowNorLoseTheLoss) {
  for (const OpTable* ops : backends()) {
    ThreadPool pool(1);
    Stream stream{&pool};
    Tensor h(DType::F32, {2, 1}), weight(DType::F32, {3, 1}), targets(DType::I32, {2}), logits(DType::F32, {2, 3});
    Tensor losses(DType::F32, {2});
    h.fill(1000);
    weight.set(0, 1), weight.set(1, -1), weight.set(2, 0.999f);
    targets.set(0, 0), targets.set(1, 1);
    ops->linear_cross_entropy(losses, {}, {}, {}, h, weight, {}, targets, logits, {.chunk_tokens = 2}, stream);
    EXPECT_NEAR(losses.at(0), 0.31326, 1e-4) << ops->name;  // log(1 + 1/e)
    EXPECT_NEAR(losses.at(1), 2000.3133, 1e-3) << ops->name;
  }
}

// As in torch.nn.functional.cross_entropy(label_smoothing=0.2), with PaLM's term added.
TEST(CrossEntropy, LabelSmoothingAndZLossAreTheirDefinitions) {
  std::vector<const OpTable*> tables = backends();
  tables.push_back(&ref_ops());
  for (const OpTable* ops : tables) {
    ThreadPool pool(1);
    Stream stream{&pool};
    Tensor h(DType::F32, {1, 4}), weight(DType::F32, {4, 4}), targets(DType::I32, {1}), logits(DType::F32, {1, 4}),
        losses(DType::F32, {1}), dh(DType::F32, {1, 4});
    weight.fill(0);
    for (i64 i = 0; i < 4; ++i) weight.set(i * 5, 1), h.set(i, std::array{1.0f, -2.0f, 3.0f, 0.5f}[i]);
    targets.fill(0);
    const auto loss = [&](float smoothing, float z_loss) {
      ops->linear_cross_entropy(losses, dh, {}, {}, h, weight, {}, targets, logits,
                                {.chunk_tokens = 1, .label_smoothing = smoothing, .z_loss = z_loss}, stream);
      return losses.at(0);
    };
    EXPECT_NEAR(loss(0.2f, 0), 2.277253f, 1e-5) << ops->name;
    EXPECT_NEAR(loss(0.2f, 0.01f), 2.379798f, 1e-5) << ops->name;
    const float want[] = {-0.7323658f, -0.0441433f, 0.8192055f, 0.0213487f};
    for (i64 i = 0; i < 4; ++i) EXPECT_NEAR(dh.at(i), want[i], 1e-5) << ops->name;
  }
}

TEST(CrossEntropy, GradientsOfTheOracleMatchFiniteDifferences) {
  constexpr i64 T = 5, C = 7, V = 11;
  ThreadPool pool(1);
  Stream stream{&pool};
  Doubles h({T, C}), weight({V, C}), bias({V}), losses({T}), dh({T, C}), dweight({V, C}), dbias({V});
  h.randomize(1);
  weight.randomize(2);
  bias.randomize(3);
  const Tensor targets = targets_for(T, V);
  CrossEntropyParams params{.ignore_index = kIgnore, .grad_scale = 0.25f};
  const auto loss = [&] {
    ref_ops().linear_cross_entropy(losses.view, {}, {}, {}, h.view, weight.view, bias.view, targets, {}, params,
                                   stream);
    double sum = 0;
    for (double x : losses.value) sum += 0.25 * x;
    return sum;
  };
  for (const bool terms : {false, true}) {
    if (terms) params.label_smoothing = 0.3f, params.z_loss = 0.05f;
    ref_ops().linear_cross_entropy(losses.view, dh.view, dweight.view, dbias.view, h.view, weight.view, bias.view,
                                   targets, {}, params, stream);
    expect_gradient(h, dh, loss, "dh");
    expect_gradient(weight, dweight, loss, "dweight");
    expect_gradient(bias, dbias, loss, "dbias");
  }
}

TEST(CrossEntropy, GradientsOfTheBackendsMatchTheirOwnDirectionalDerivative) {
  constexpr i64 T = 12, C = 20, V = 50;
  constexpr float kStep = 1e-3f;
  for (const OpTable* ops : backends()) {
    ThreadPool pool(1);
    Stream stream{&pool};
    Tensor h(DType::F32, {T, C}), weight(DType::F32, {V, C}), logits(DType::F32, {5, V}), losses(DType::F32, {T});
    Tensor dh(DType::F32, {T, C}), dweight(DType::F32, {V, C}), toward_h(h), toward_weight(weight);
    Tensor bias(DType::F32, {V}), dbias(DType::F32, {V}), toward_bias(bias);
    h.randomize(1);
    weight.randomize(2);
    toward_h.randomize(3);
    toward_weight.randomize(4);
    bias.randomize(5);
    toward_bias.randomize(6);
    const Tensor targets = targets_for(T, V);
    const CrossEntropyParams params{.ignore_index = kIgnore, .chunk_tokens = 5};
    ops->linear_cross_entropy(losses, dh, dweight, dbias, h, weight, bias, targets, logits, params, stream);
    const auto loss_at = [&](float step) {
      Tensor hs = h, ws = weight, bs = bias;
      for (i64 i = 0; i < T * C; ++i) hs.set(i, h.at(i) + step * toward_h.at(i));
      for (i64 i = 0; i < V * C; ++i) ws.set(i, weight.at(i) + step * toward_weight.at(i));
      for (i64 i = 0; i < V; ++i) bs.set(i, bias.at(i) + step * toward_bias.at(i));
      ops->linear_cross_entropy(losses, {}, {}, {}, hs, ws, bs, targets, logits, params, stream);
      double sum = 0;
      for (i64 t = 0; t < T; ++t) sum += losses.at(t);
      return sum;
    };
    double got = 0;
    for (i64 i = 0; i < T * C; ++i) got += double(dh.at(i)) * toward_h.at(i);
    for (i64 i = 0; i < V * C; ++i) got += double(dweight.at(i)) * toward_weight.at(i);
    for (i64 i = 0; i < V; ++i) got += double(dbias.at(i)) * toward_bias.at(i);
    const double want = (loss_at(kStep) - loss_at(-kStep)) / (2 * static_cast<double>(kStep));
    EXPECT_NEAR(got, want, 1e-2 * std::abs(want)) << ops->name;
    EXPECT_GT(std::abs(want), 1.0);
  }
}

// More elements of logits (5e9) than 32 bits count: results at their end must equal those of small parts. So many only
// on a GPU with 40 GB; elsewhere as many as show that the test is right.
TEST(CrossEntropy, LogitsBeyond32Bits) {
  const auto device = make_test_device(1);
  const bool large = !device->is_host() && device->memory().free > i64{40'000'000'000};
  const i64 R = large ? 32768 : 128, V = large ? 151936 : 500, C = 64, part = large ? 1024 : 32;
  MemoryLedger ledger;
  std::vector<Buffer> buffers;
  const auto view = [&](DType t, std::initializer_list<i64> shape) {
    TensorView v = TensorView::of(nullptr, t, shape);
    buffers.push_back(device_buffer(*device, ledger, Tag::Workspace, v.bytes()));
    v.data = buffers.back().data();
    return v;
  };
  const TensorView h = view(DType::BF16, {R, C}), weight = view(DType::BF16, {V, C}), targets = view(DType::I32, {R}),
                   logits = view(DType::F32, {R, V});
  std::vector<bf16> values(static_cast<size_t>(V * C));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = to_bf16(static_cast<float>(static_cast<i64>(i * 2654435761u % 2048) - 1024) / 2048);
  device->upload(weight.data, values.data(), weight.bytes());
  device->upload(h.data, values.data(), h.bytes());
  std::vector<i32> ids(static_cast<size_t>(R));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<i32>(V - 1 - static_cast<i64>(i));
  device->upload(targets.data, ids.data(), targets.bytes());

  struct Results {
    std::vector<float> losses;
    std::vector<bf16> dh;
    std::vector<float> dweight;
  };
  const auto run = [&](i64 chunk) {
    const TensorView losses = view(DType::F32, {R}), dh = view(DType::BF16, {R, C}), dweight = view(DType::F32, {V, C});
    device->ops().linear_cross_entropy(losses, dh, dweight, {}, h, weight, {}, targets, logits,
                                       {.grad_scale = 1.0f / static_cast<float>(R), .chunk_tokens = chunk},
                                       device->stream());
    Results r{std::vector<float>(static_cast<size_t>(R)), std::vector<bf16>(static_cast<size_t>(R * C)),
              std::vector<float>(static_cast<size_t>(V * C))};
    device->download(r.losses.data(), losses.data, losses.bytes());
    device->download(r.dh.data(), dh.data, dh.bytes());
    device->download(r.dweight.data(), dweight.data, dweight.bytes());
    return r;
  };
  const Results whole = run(R), parts = run(part);
  double dh_scale = 0, dweight_scale = 0;
  for (const bf16 x : parts.dh) dh_scale = std::max(dh_scale, std::abs(static_cast<double>(to_float(x))));
  for (const float x : parts.dweight) dweight_scale = std::max(dweight_scale, std::abs(static_cast<double>(x)));
  for (size_t i = 0; i < whole.losses.size(); ++i) ASSERT_NEAR(whole.losses[i], parts.losses[i], 1e-4) << i;
  for (size_t i = 0; i < whole.dh.size(); ++i)
    ASSERT_NEAR(to_float(whole.dh[i]), to_float(parts.dh[i]), 0x1p-7 * dh_scale) << i;
  for (size_t i = 0; i < whole.dweight.size(); ++i)
    ASSERT_NEAR(whole.dweight[i], parts.dweight[i], 1e-3 * dweight_scale) << i;
}

}  // namespace cross_entropy_test
}  // namespace ds::testing
