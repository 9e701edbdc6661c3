// SPDX-License-Identifier: Apache-2.0
// Whole optimizers, over whole parameters, against definitions in fp64 that are written here from the papers: after one
// step and after a hundred over the same gradients.

#include "optim/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ds/kernels/state_codes.h"
#include "model/models.h"

namespace ds::optim {
namespace optimizer_test {

using Matrix = std::vector<double>;
struct Shape {
  i64 rows, cols;
  i64 numel() const { return rows * cols; }
};
constexpr Shape kShapes[] = {{24, 16}, {16, 40}, {1, 16}, {65, 64}};

double random(u32 stream, i64 i) {
  return static_cast<double>(RngKey{7, stream, 0}.bits(static_cast<u64>(i))) / 0x1p31 - 1;
}

// ---- definitions

double norm(const Matrix& x) {
  double sum = 0;
  for (const double v : x) sum += v * v;
  return std::sqrt(sum);
}

Matrix times(const Matrix& a, Shape sa, bool ta, const Matrix& b, Shape sb, bool tb) {
  const i64 M = ta ? sa.cols : sa.rows, K = ta ? sa.rows : sa.cols, N = tb ? sb.rows : sb.cols;
  Matrix c(static_cast<size_t>(M * N));
  for (i64 i = 0; i < M; ++i)
    for (i64 j = 0; j < N; ++j)
      for (i64 k = 0; k < K; ++k)
        c[i * N + j] += a[ta ? k * sa.cols + i : i * sa.cols + k] * b[tb ? j * sb.cols + k : k * sb.cols + j];
  return c;
}

// Newton and Schulz, as published: of the wide form.
Matrix orthogonal(Matrix u, Shape s) {
  const bool tall = s.rows > s.cols;
  const Shape wide = tall ? Shape{s.cols, s.rows} : s;
  const auto transposed = [](const Matrix& x, Shape from) {
    Matrix y(x.size());
    for (i64 i = 0; i < from.rows; ++i)
      for (i64 j = 0; j < from.cols; ++j) y[j * from.rows + i] = x[i * from.cols + j];
    return y;
  };
  Matrix x = tall ? transposed(u, s) : u;
  const double length = norm(x) + 1e-7;
  for (double& v : x) v /= length;
  for (int i = 0; i < 5; ++i) {
    const Shape square{wide.rows, wide.rows};
    const Matrix a = times(x, wide, false, x, wide, true);
    Matrix b = times(a, square, false, a, square, false);
    for (size_t k = 0; k < b.size(); ++k) b[k] = -4.7750 * a[k] + 2.0315 * b[k];
    const Matrix bx = times(b, square, false, x, wide, false);
    for (size_t k = 0; k < x.size(); ++k) x[k] = 3.4445 * x[k] + bx[k];
  }
  return tall ? transposed(x, wide) : x;
}

struct Param {
  Shape shape;
  Matrix w, s0, s1;
};

void define(const UpdateConfig& u, Param& p, Matrix g, double lr, i64 step) {
  const double b1 = u.beta1, b2 = u.beta2, eps = static_cast<double>(u.eps), t = static_cast<double>(step),
               decay = u.weight_decay;
  const double c1 = u.bias_correction ? 1 - std::pow(b1, t) : 1, c2 = u.bias_correction ? 1 - std::pow(b2, t) : 1;
  const size_t n = p.w.size();
  Matrix direction(n);
  switch (u.type) {
    case OptimizerType::AdamW:
    case OptimizerType::AdamW8bit:   // to the precision of the codes
    case OptimizerType::OneBitAdam:  // of one rank, up to its freeze
    case OptimizerType::ZeroOneAdam:
    case OptimizerType::Adam:
      for (size_t i = 0; i < n; ++i) {
        if (!u.adam_w_mode) g[i] += decay * p.w[i];
        p.s0[i] = b1 * p.s0[i] + (1 - b1) * g[i];
        p.s1[i] = b2 * p.s1[i] + (1 - b2) * g[i] * g[i];
        const double d = p.s0[i] / c1 / (std::sqrt(p.s1[i] / c2) + eps);
        p.w[i] -= lr * (d + (u.adam_w_mode ? decay * p.w[i] : 0));
      }
      break;
    case OptimizerType::Sgd:
      for (size_t i = 0; i < n; ++i) {
        g[i] += decay * p.w[i];
        p.s0[i] = step == 1 ? g[i] : u.momentum * p.s0[i] + (1 - u.dampening) * g[i];
        p.w[i] -= lr * (u.nesterov ? g[i] + u.momentum * p.s0[i] : p.s0[i]);
      }
      break;
    case OptimizerType::Lion:
      for (size_t i = 0; i < n; ++i) {
        const double c = b1 * p.s0[i] + (1 - b1) * g[i];
        p.w[i] = p.w[i] * (1 - lr * decay) - lr * (c > 0 ? 1 : c < 0 ? -1 : 0);
        p.s0[i] = b2 * p.s0[i] + (1 - b2) * g[i];
      }
      break;
    case OptimizerType::Adagrad:
      for (size_t i = 0; i < n; ++i) {
        g[i] += decay * p.w[i];
        p.s0[i] += g[i] * g[i];
        p.w[i] -= lr * g[i] / (std::sqrt(p.s0[i]) + eps);
      }
      break;
    case OptimizerType::Lamb:
    case OptimizerType::OneBitLamb: {  // of one rank, up to its freeze
      for (size_t i = 0; i < n; ++i) {
        p.s0[i] = b1 * p.s0[i] + (1 - b1) * g[i];
        p.s1[i] = b2 * p.s1[i] + (1 - b2) * g[i] * g[i];
        direction[i] = p.s0[i] / (std::sqrt(p.s1[i]) + eps) + decay * p.w[i];
      }
      const double of_w = norm(p.w), of_u = norm(direction);
      const double ratio = of_w > 0 && of_u > 0 ? std::clamp(of_w / of_u, u.min_coeff, u.max_coeff) : 1;
      for (size_t i = 0; i < n; ++i) p.w[i] -= lr * std::sqrt(c2) / c1 * ratio * direction[i];
      break;
    }
    case OptimizerType::Muon: {
      for (size_t i = 0; i < n; ++i) {
        p.s0[i] = u.momentum * p.s0[i] + (1 - u.momentum) * g[i];
        direction[i] = u.nesterov ? (1 - u.momentum) * g[i] + u.momentum * p.s0[i] : p.s0[i];
      }
      direction = orthogonal(direction, p.shape);
      const double rows = static_cast<double>(p.shape.rows), cols = static_cast<double>(p.shape.cols);
      const double scale = u.muon_scale == MuonScale::Original ? std::sqrt(std::max(1.0, rows / cols))
                                                               : 0.2 * std::sqrt(std::max(rows, cols));
      for (size_t i = 0; i < n; ++i) p.w[i] -= lr * (scale * direction[i] + decay * p.w[i]);
      break;
    }
  }
}

// ---- the optimizers

class Matrices final : public WholeMatrices {
 public:
  explicit Matrices(std::vector<TensorView> views) : views_(std::move(views)) {}
  void for_each(FunctionRef<void(TensorView)> body) override {
    for (const TensorView& v : views_) body(v);
  }

 private:
  std::vector<TensorView> views_;
};

struct Case {
  const char* name;
  UpdateConfig update;
  double tolerance;  // of the largest value, after a hundred steps
};
const Case kCases[] = {
    {"AdamW", {.lr = 1e-2, .weight_decay = 0.1}, 2e-5},
    {"Bf16States", {.lr = 1e-2, .weight_decay = 0.1, .state_dtype = StateDtype::BF16}, 6e-3},
    {"AdamW8bit", {.type = OptimizerType::AdamW8bit, .lr = 1e-2, .weight_decay = 0.1}, 1.3e-2},
    {"AdamL2", {.type = OptimizerType::Adam, .lr = 1e-2, .weight_decay = 0.1, .adam_w_mode = false}, 2e-5},
    {"Sgd", {.type = OptimizerType::Sgd, .lr = 1e-2, .weight_decay = 0.1}, 2e-6},
    {"Momentum",
     {.type = OptimizerType::Sgd, .lr = 1e-2, .weight_decay = 0.1, .momentum = 0.9, .dampening = 0.1},
     2e-6},
    {"Nesterov",
     {.type = OptimizerType::Sgd, .lr = 1e-2, .weight_decay = 0.1, .momentum = 0.9, .nesterov = true},
     2e-6},
    {"Lion", {.type = OptimizerType::Lion, .lr = 1e-3, .beta2 = 0.99, .weight_decay = 0.1}, 2e-6},
    {"Adagrad", {.type = OptimizerType::Adagrad, .lr = 1e-2, .eps = 1e-10f, .weight_decay = 0.1}, 2e-6},
    {"Lamb", {.type = OptimizerType::Lamb, .lr = 1e-2, .weight_decay = 0.1}, 2e-5},
    {"OneBitLamb",
     {.type = OptimizerType::OneBitLamb, .lr = 1e-2, .weight_decay = 0.1, .bias_correction = false},
     2e-5},
    {"Muon", {.type = OptimizerType::Muon, .lr = 1e-2, .weight_decay = 0.1, .momentum = 0.95, .nesterov = true}, 1e-4},
    {"MuonAsAdamW",
     {.type = OptimizerType::Muon, .lr = 1e-2, .momentum = 0.9, .muon_scale = MuonScale::MatchRmsAdamW},
     1e-4},
};

// Whole parameters, in the memory of this test.
class Here final : public GroupStates {
 public:
  Here(std::span<const UpdateTensor> params, const GradVerdict& verdict, Stream& stream)
      : params_(params), verdict_(verdict), stream_(stream) {}
  void update(const UpdateSpec& spec) override {
    std::vector<UpdateTensor> tensors(params_.begin(), params_.end());
    for (size_t k = 0; k < tensors.size(); ++k) {
      if (facts_of(spec.params.rule).num_states == 0) tensors[k].states[0] = tensors[k].states[1] = {};
      if (spec.factors != nullptr) tensors[k].factor = spec.factors + k;
      if (!spec.decay) tensors[k].weight_decay = 0;
    }
    cpu_ops()->update(tensors, &verdict_, spec.params, stream_);
  }
  void for_each_counted(FunctionRef<void(i64, TensorView, TensorView)> visit) override {
    for (size_t k = 0; k < params_.size(); ++k) visit(static_cast<i64>(k), params_[k].master, params_[k].grad);
  }

 private:
  std::span<const UpdateTensor> params_;
  const GradVerdict& verdict_;
  Stream& stream_;
};

class Defined : public ::testing::TestWithParam<Case> {};

TEST_P(Defined, FollowItsDefinitionForAHundredSteps) {
  const auto& [name, update, tolerance] = GetParam();
  ParamGroup group{.update = update};
  const bool matrices_alone = group.needs_matrices();
  std::vector<Param> params;
  std::vector<std::vector<float>> w, g, s0, s1;
  for (const Shape& shape : kShapes) {
    if (matrices_alone && shape.rows == 1) continue;
    const auto n = static_cast<size_t>(shape.numel());
    Param& p = params.emplace_back(Param{shape, Matrix(n), Matrix(n), Matrix(n)});
    w.emplace_back(n), g.emplace_back(n), s0.emplace_back(n), s1.emplace_back(n);
    for (size_t i = 0; i < n; ++i) {
      w.back()[i] = static_cast<float>(random(static_cast<u32>(params.size()), static_cast<i64>(i)));
      p.w[i] = static_cast<double>(w.back()[i]);
    }
  }
  const StateSet states = group.states();
  std::vector<UpdateTensor> tensors;
  GroupSize size;
  std::vector<std::vector<u8>> kept;  // of states that are not fp32
  std::vector<std::vector<float>> scales;
  size.num_params = std::ssize(params);
  std::vector<TensorView> gradients;
  for (size_t k = 0; k < params.size(); ++k) {
    const i64 n = params[k].shape.numel();
    const auto view = [&](std::vector<float>& of) { return TensorView::of(of.data(), DType::F32, {n}); };
    UpdateTensor& tensor = tensors.emplace_back(UpdateTensor{.param = view(w[k]),
                                                             .master = view(w[k]),
                                                             .states = {},
                                                             .grad = view(g[k]),
                                                             .weight_decay = static_cast<float>(update.weight_decay),
                                                             .site = static_cast<u32>(k)});
    size_t number = 0;
    for (const State s : kOptimizerStates) {
      if (!states[s] || s == State::ExpAvgSqFresh) continue;  // of no pass before a freeze
      TensorView& state = tensor.states[number];
      state = view(number++ == 0 ? s0[k] : s1[k]);
      if (const DType t = group.state_dtype(s, n); t != DType::F32) {
        state = TensorView::of(kept.emplace_back(static_cast<size_t>(n * dtype_bytes(t))).data(), t, {n});
        if (is_coded(t)) state.scale = scales.emplace_back(static_cast<size_t>(state_blocks(n))).data();
      }
    }
    gradients.push_back(TensorView::of(g[k].data(), DType::F32, {params[k].shape.rows, params[k].shape.cols}));
    size.largest.elems = std::max(size.largest.elems, n);
    size.largest.side = std::max(size.largest.side, std::min(params[k].shape.rows, params[k].shape.cols));
  }
  std::vector<i64> workspace(static_cast<size_t>(div_ceil(workspace_bytes(group, size), 8)) + 1);
  const auto optimizer = make_optimizer(group, size, workspace.data());
  Matrices matrices(gradients);
  ThreadPool pool(2);
  Stream stream{.pool = &pool};
  const GradVerdict verdict{.grad_scale = 0.25f};
  Here here(tensors, verdict, stream);
  for (i64 step = 1; step <= 100; ++step) {
    const double lr = update.lr * (step % 10 == 0 ? 0.5 : 1);
    for (size_t k = 0; k < params.size(); ++k) {
      Matrix gradient(g[k].size());
      for (size_t i = 0; i < gradient.size(); ++i) {
        const double x = random(static_cast<u32>(1000 + step * 10 + static_cast<i64>(k)), static_cast<i64>(i));
        g[k][i] = static_cast<float>(4 * x);
        gradient[i] = static_cast<double>(g[k][i] * 0.25f);
      }
      define(update, params[k], gradient, lr, step);
    }
    const auto copy = [](void* to, const void* from, i64 bytes) { std::memcpy(to, from, static_cast<size_t>(bytes)); };
    optimizer->update({.ops = *cpu_ops(),
                       .stream = stream,
                       .lr = lr,
                       .step = step,
                       .seed = 1,
                       .reduce = [](TensorView, ReduceOp) {},
                       .zero = [](TensorView v) { std::memset(v.data, 0, static_cast<size_t>(v.bytes())); },
                       .download = copy,
                       .upload = copy,
                       .states = here,
                       .matrices = &matrices});
    if (step != 1 && step != 100) continue;
    const double bound = step == 1 ? std::min(tolerance / 4, 3e-5) : tolerance;  // states have rounded nothing yet
    i64 elems = 0, turned = 0;
    double worst = 0;
    for (size_t k = 0; k < params.size(); ++k) {
      double largest = 0;
      for (const double x : params[k].w) largest = std::max(largest, std::abs(x));
      for (size_t i = 0; i < w[k].size(); ++i, ++elems) {
        const double off = std::abs(static_cast<double>(w[k][i]) - params[k].w[i]) / largest;
        turned += off > bound;
        worst = std::max(worst, off);
      }
    }
    // A sign of Lion's may turn: at most 0.1 % of the elements.
    EXPECT_LE(turned, update.type == OptimizerType::Lion ? elems / 1000 : 0)
        << name << " step " << step << ": off by " << worst << " of the largest";
  }
}

INSTANTIATE_TEST_SUITE_P(All, Defined, ::testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

// Singular values of what Muon adds: between 0.68 and 1.16 of the scale, so their squares add up to that many.
TEST(Muon, MakesUpdatesNearlyOrthogonal) {
  const Shape s{32, 20};
  Matrix u(static_cast<size_t>(s.numel()));
  for (size_t i = 0; i < u.size(); ++i) u[i] = random(3, static_cast<i64>(i));
  const Matrix o = orthogonal(u, s);
  const Matrix gram = times(o, s, true, o, s, false);
  double trace = 0;
  for (i64 i = 0; i < s.cols; ++i) trace += gram[i * s.cols + i];
  EXPECT_GT(trace, 0.68 * 0.68 * 20);
  EXPECT_LT(trace, 1.16 * 1.16 * 20);
}

}  // namespace optimizer_test
}  // namespace ds::optim
