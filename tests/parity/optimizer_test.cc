// SPDX-License-Identifier: Apache-2.0
// AdamW: the definition bit for bit, golden values, ref, aliasing.

#include "ds/kernels/state_codes.h"
#include "parity.h"
#include "slow_set.h"

namespace ds::testing {
namespace optimizer_test {

struct State {
  Tensor param, master, m, v, grad;
  State(DType t, i64 n)
      : param(t, {n}), master(DType::F32, {n}), m(DType::F32, {n}), v(DType::F32, {n}), grad(DType::F32, {n}) {
    master.randomize(1);
    m.randomize(2, 0.1f);
    v.randomize(3, 0.01f);
    for (i64 i = 0; i < n; ++i) v.set(i, std::abs(v.at(i)));
    grad.randomize(4, 64.0f);
  }
};

constexpr float kDecay = 0.1f;
const GradVerdict kVerdict{.grad_scale = 1.0f / 64};

UpdateParams params(bool adam_w_mode) {
  return {.rule = adam_w_mode ? UpdateRule::AdamW : UpdateRule::AdamL2,
          .beta1 = 0.9,
          .beta2 = 0.95,
          .lr = 3e-3f,
          .eps = 1e-8f,
          .bias1 = 0.271f,
          .bias2 = 0.142625f};
}

void step(const OpTable& ops, const UpdateTensor& tensor, const UpdateParams& p, Stream& s) {
  ops.update({&tensor, 1}, &kVerdict, p, s);
}

// The definition in ops.h, one rounding per operation.
void define(float& master, float& m, float& v, float grad, const UpdateParams& p) {
  float g = grad * kVerdict.grad_scale;
  if (p.rule == UpdateRule::AdamL2) g = g + kDecay * master;
  m = static_cast<float>(p.beta1) * m + static_cast<float>(1 - p.beta1) * g;
  v = static_cast<float>(p.beta2) * v + static_cast<float>(1 - p.beta2) * g * g;
  float u = m / p.bias1 / (std::sqrt(v / p.bias2) + p.eps);
  if (p.rule == UpdateRule::AdamW) u = u + kDecay * master;
  master = master - p.lr * u;
}

TEST(AdamW, IsItsDefinitionBitForBitOnEveryBackend) {
  for (const OpTable* ops : backends()) {
    for (DType t : kWorkDTypes) {
      for (bool mode : {true, false}) {
        for (i64 n : {1, 7, 15, 16, 17, 1000, 4097, 40000}) {
          const std::string what = std::string(ops->name) + " " + std::string(dtype_name(t)) + " " + std::to_string(n);
          State want(t, n);
          for (i64 i = 0; i < n; ++i) {
            define(want.master.view().as<float>()[i], want.m.view().as<float>()[i], want.v.view().as<float>()[i],
                   want.grad.at(i), params(mode));
            want.param.set(i, want.master.at(i));
          }
          expect_same_for_any_threads(
              [&](Stream& s) {
                State got(t, n);
                step(*ops, {got.param, got.master, {got.m, got.v}, got.grad, kDecay}, params(mode), s);
                expect_same_bits(got.param, want.param, what + " param");
                expect_same_bits(got.master, want.master, what + " master");
                expect_same_bits(got.m, want.m, what + " m");
                expect_same_bits(got.v, want.v, what + " v");
                return std::vector<Tensor>{got.param};
              },
              what);
          State alone(t, n);
          ThreadPool pool(1);
          Stream s{.pool = &pool};
          step(*ops, {{}, alone.master, {alone.m, alone.v}, alone.grad, kDecay}, params(mode), s);
          expect_same_bits(alone.master, want.master, what + " without param");
          if (t == DType::F32) {
            State in_place(t, n);
            step(*ops, {in_place.master, in_place.master, {in_place.m, in_place.v}, in_place.grad, kDecay},
                 params(mode), s);
            expect_same_bits(in_place.master, want.master, what + " param == master");
          }
        }
      }
    }
  }
}

TEST(AdamW, MatchesRef) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : backends()) {
    for (bool mode : {true, false}) {
      State got(DType::BF16, 5000), want(DType::BF16, 5000);
      step(*ops, {got.param, got.master, {got.m, got.v}, got.grad, kDecay}, params(mode), s);
      step(ref_ops(), {want.param, want.master, {want.m, want.v}, want.grad, kDecay}, params(mode), s);
      expect_close(got.master, want.master, 2, "master");
      expect_close(got.m, want.m, 4, "m");
      expect_close(got.v, want.v, 4, "v");
      expect_close(got.param, want.param, 2, "param");
    }
  }
}

TEST(AdamW, GoldenTrace) {
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  std::vector<const OpTable*> tables = backends();
  tables.push_back(&ref_ops());
  for (const OpTable* ops : tables) {
    Tensor w(DType::F32, {1}), m(DType::F32, {1}), v(DType::F32, {1}), g(DType::F32, {1});
    w.fill(1);
    m.fill(0);
    v.fill(0);
    UpdateParams p{.lr = 0.1f, .eps = 1e-8f};
    const double want[] = {0.899000002, 0.8714672987058464};
    const float grads[] = {0.5f, -0.25f};
    for (int t = 1; t <= 2; ++t) {
      p.bias1 = static_cast<float>(1 - std::pow(p.beta1, t));
      p.bias2 = static_cast<float>(1 - std::pow(p.beta2, t));
      g.fill(grads[t - 1]);
      const UpdateTensor tensor{w, w, {m, v}, g, 0.01f};
      const GradVerdict verdict;
      ops->update({&tensor, 1}, &verdict, p, s);
      EXPECT_NEAR(w.at(0), want[t - 1], 1e-7) << ops->name << " step " << t;
    }
  }
}

TEST(AdamW, StepsAllTensorsAtOnceOrNoneAtAll) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : backends()) {
    std::vector<State> got, want;
    for (const i64 n : {i64{5}, i64{0}, i64{1000}, i64{17}}) {
      got.emplace_back(DType::BF16, n);
      want.emplace_back(DType::BF16, n);
    }
    std::vector<UpdateTensor> tensors;
    for (size_t i = 0; i < got.size(); ++i) {
      const float decay = i % 2 == 0 ? kDecay : 0.0f;
      tensors.push_back({got[i].param, got[i].master, {got[i].m, got[i].v}, got[i].grad, decay});
      step(*ops, {want[i].param, want[i].master, {want[i].m, want[i].v}, want[i].grad, decay}, params(true), s);
    }
    const std::vector<State> before = got;
    const GradVerdict skip{.finite = 0};
    ops->update(tensors, &skip, params(true), s);
    for (size_t i = 0; i < got.size(); ++i) expect_same_bits(got[i].master, before[i].master, "skipped");
    ops->update(tensors, &kVerdict, params(true), s);
    for (size_t i = 0; i < got.size(); ++i) {
      expect_same_bits(got[i].master, want[i].master, "master " + std::to_string(i));
      expect_same_bits(got[i].param, want[i].param, "param " + std::to_string(i));
    }
  }
}

// After 1 and 100 steps over the same gradients, the results of every back end are those of the fp64 definitions of
// ref, to a bound in units of the largest value; all have each other's bits. Signs may turn (Lion): at most 0.1 % of
// the elements.
TEST(Update, EveryRuleFollowsItsDefinition) {
  constexpr i64 n = 5003;
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const RuleFacts& facts : kUpdateRules) {
    const UpdateRule rule = facts.rule;
    const int states = facts.num_states;
    for (const int steps : {1, 100}) {
      std::optional<State> first;
      for (const OpTable* ops : backends()) {
        const std::string what = fmt::format("{} rule {} after {}", ops->name, static_cast<int>(rule), steps);
        State got(DType::BF16, n), want(DType::F32, n);
        float factor = 0.75f;
        UpdateParams p = params(true);
        p.rule = rule;
        for (State* state : {&got, &want}) {
          if (rule != UpdateRule::Adagrad && rule != UpdateRule::VarianceRatio) continue;
          for (i64 i = 0; i < n; ++i) state->m.set(i, std::abs(state->m.at(i)));  // a sum of squares
        }
        const auto tensor = [&](State& state) {
          return UpdateTensor{.param = state.param,
                              .master = state.master,
                              .states = {states > 0 ? TensorView(state.m) : TensorView{},
                                         states > 1 ? TensorView(state.v) : TensorView{}},
                              .grad = state.grad,
                              .weight_decay = kDecay,
                              .factor = &factor};
        };
        for (int t = 1; t <= steps; ++t) {
          for (State* state : {&got, &want}) state->grad.randomize(100 + static_cast<u32>(t), 64.0f);
          p.bias1 = static_cast<float>(1 - std::pow(p.beta1, t));
          p.bias2 = static_cast<float>(1 - std::pow(p.beta2, t));
          const UpdateTensor mine = tensor(got), oracle = tensor(want);
          ops->update({&mine, 1}, &kVerdict, p, s);
          ref_ops().update({&oracle, 1}, &kVerdict, p, s);
        }
        const auto compare = [&](Tensor& a, Tensor& b, double bound, const char* name) {
          double largest = 0;
          for (i64 i = 0; i < n; ++i) largest = std::max(largest, std::abs(static_cast<double>(b.at(i))));
          i64 turned = 0;
          for (i64 i = 0; i < n; ++i) {
            if (std::abs(static_cast<double>(a.at(i)) - static_cast<double>(b.at(i))) <= bound * largest) continue;
            if (rule == UpdateRule::Lion && name == std::string_view("master")) {
              ++turned;
            } else {
              FAIL() << what << " " << name << "[" << i << "] is " << a.at(i) << ", not " << b.at(i);
            }
          }
          EXPECT_LE(turned, n / 1000) << what;
        };
        const double bound = steps == 1 ? 4e-7 : 2e-5;
        compare(got.master, want.master, bound, "master");
        if (states > 0) compare(got.m, want.m, bound, "first state");
        if (states > 1) compare(got.v, want.v, bound, "second state");
        compare(got.grad, want.grad, bound, "gradient");
        if (!first) first = got;
        expect_same_bits(got.master, first->master, what + " master");
        expect_same_bits(got.param, first->param, what + " param");
        expect_same_bits(got.m, first->m, what + " first state");
        expect_same_bits(got.v, first->v, what + " second state");
        expect_same_bits(got.grad, first->grad, what + " gradient");
      }
    }
  }
}

// States that are not fp32, of a tensor, as they lie in memory.
struct Kept {
  Tensor first, second, first_scales, second_scales;
  Kept(bool coded, i64 n)
      : first(coded ? DType::I8 : DType::BF16, {n}),
        second(coded ? DType::U8 : DType::BF16, {n}),
        first_scales(DType::F32, {state_blocks(n)}),
        second_scales(DType::F32, {state_blocks(n)}) {}
  TensorView view(int j) const {
    TensorView v = j == 0 ? first : second;
    if (is_coded(v.dtype)) v.scale = (j == 0 ? first_scales : second_scales).view().as<float>();
    return v;
  }
  std::vector<Tensor> all() const { return {first, second, first_scales, second_scales}; }
};

constexpr u32 kSite = 0x40000003u;
constexpr i64 kFirst = 1024;

// The rule on decoded states, whose results are encoded: every back end and number of threads has the bits of just
// that, from the definitions of state_codes.h and the rule on fp32 states.
TEST(Update, OfStatesThatAreNotFp32IsTheRuleBetweenDecodingAndEncoding) {
  UpdateParams p = params(true);
  p.rng = {.seed = 5, .site = 77, .step = 9};
  for (const bool coded : {true, false}) {
    for (const RuleFacts& facts : kUpdateRules) {
      const UpdateRule rule = facts.rule;
      const int states = facts.num_states;
      if (states == 0 || facts.states == RuleStates::Outer) continue;  // whose states are fp32
      p.rule = rule;
      for (const i64 n : {1, 3, 255, 256, 257, 1003, 40000}) {
        State start(DType::BF16, n);
        if (rule == UpdateRule::Adagrad || rule == UpdateRule::VarianceRatio) {
          for (i64 i = 0; i < n; ++i) start.m.set(i, std::abs(start.m.at(i)));
        }
        Kept kept(coded, n);
        for (int j = 0; j < 2; ++j) encode_state(kept.view(j), (j == 0 ? start.m : start.v).view().as<float>(), 0, n);

        // By the definition.
        State want = start;
        Kept want_kept = kept;
        for (int j = 0; j < states; ++j)
          decode_state((j == 0 ? want.m : want.v).view().as<float>(), kept.view(j), 0, n);
        ThreadPool pool(1);
        Stream one{.pool = &pool};
        step(*backends().front(),
             {want.param, want.master, {want.m, states > 1 ? TensorView(want.v) : TensorView{}}, want.grad, kDecay}, p,
             one);
        for (int j = 0; j < states; ++j) {
          const float* const values = (j == 0 ? want.m : want.v).view().as<float>();
          if (coded) {
            encode_state(want_kept.view(j), values, 0, n);
            continue;
          }
          for (i64 i = 0; i < n; ++i) {
            const u32 word = RngKey{5, kSite, 9}.bits(static_cast<u64>(kFirst + i));
            want_kept.view(j).as<bf16>()[i] = round_stochastically(values[i], j == 0 ? word >> 16 : word & 0xFFFF);
          }
        }

        for (const OpTable* ops : backends()) {
          const std::string what =
              fmt::format("{} {} rule {} n {}", ops->name, coded ? "coded" : "bf16", static_cast<int>(rule), n);
          expect_same_for_any_threads(
              [&](Stream& s) {
                State got = start;
                Kept got_kept = kept;
                step(*ops,
                     {.param = got.param,
                      .master = got.master,
                      .states = {got_kept.view(0), states > 1 ? got_kept.view(1) : TensorView{}},
                      .grad = got.grad,
                      .weight_decay = kDecay,
                      .site = kSite,
                      .first = kFirst},
                     p, s);
                expect_same_bits(got.param, want.param, what + " param");
                expect_same_bits(got.master, want.master, what + " master");
                expect_same_bits(got.grad, want.grad, what + " gradient");
                const auto all = got_kept.all(), all_wanted = want_kept.all();
                for (size_t i = 0; i < all.size(); ++i)
                  expect_same_bits(all[i], all_wanted[i], fmt::format("{} part {}", what, i));
                return all;
              },
              what);
        }
      }
    }
  }
}

// A parameter of 16 bits that is its own master is decoded, goes through the rule as an fp32 master does, and is
// rounded: to the nearest, or stochastically in bf16; whatever its states are kept in.
TEST(Update, OfAParameterThatIsItsOwnMasterIsTheRuleBetweenDecodingAndRounding) {
  enum class States { F32, BF16, Coded };
  const struct {
    DType dtype;
    bool stochastic;
  } kinds[] = {{DType::BF16, false}, {DType::BF16, true}, {DType::F16, false}};
  UpdateParams p = params(true);
  p.rng = {.seed = 5, .site = 77, .step = 9};
  test::EveryNth long_ones(7);
  for (const auto& kind : kinds) {
    for (const States kept_as : {States::F32, States::BF16, States::Coded}) {
      for (const RuleFacts& facts : kUpdateRules) {
        const UpdateRule rule = facts.rule;
        const int states = facts.num_states;
        p.rule = rule;
        for (const i64 n : {1, 3, 255, 256, 257, 1003, 40000}) {
          if (n == 40000 && !long_ones()) continue;
          State start(kind.dtype, n);
          for (i64 i = 0; i < n; ++i) {
            start.param.set(i, start.master.at(i));
            start.master.set(i, start.param.at(i));
            if (rule == UpdateRule::Adagrad) start.m.set(i, std::abs(start.m.at(i)));
          }
          Kept kept(kept_as == States::Coded, n);
          for (int j = 0; j < 2; ++j) encode_state(kept.view(j), (j == 0 ? start.m : start.v).view().as<float>(), 0, n);
          const auto tensor = [&](State& state, Kept& narrow, bool own) {
            UpdateTensor t{.param = own ? TensorView(state.param) : TensorView{},
                           .master = own ? state.param : state.master,
                           .states = {},
                           .grad = state.grad,
                           .weight_decay = kDecay,
                           .site = kSite,
                           .first = kFirst};
            for (int j = 0; j < states; ++j)
              t.states[j] = kept_as != States::F32 ? narrow.view(j) : TensorView(j == 0 ? state.m : state.v);
            return t;
          };

          // By the definition.
          State want = start;
          Kept want_kept = kept;
          p.stochastic = false;
          ThreadPool pool(1);
          Stream one{.pool = &pool};
          step(*backends().front(), tensor(want, want_kept, false), p, one);
          for (i64 i = 0; i < n && !facts.makes_direction(); ++i) {
            want.param.set(i, want.master.at(i));
            if (!kind.stochastic) continue;
            const u32 word = RngKey{5, kSite + kMasterSite, 9}.bits(static_cast<u64>(kFirst + i));
            want.param.view().as<bf16>()[i] = round_stochastically(want.master.at(i), word >> 16);
          }

          p.stochastic = kind.stochastic;
          for (const OpTable* ops : backends()) {
            const std::string what = fmt::format("{} {} {} states {} rule {} n {}", ops->name, dtype_name(kind.dtype),
                                                 kind.stochastic, static_cast<int>(kept_as), static_cast<int>(rule), n);
            expect_same_for_any_threads(
                [&](Stream& s) {
                  State got = start;
                  Kept got_kept = kept;
                  step(*ops, tensor(got, got_kept, true), p, s);
                  expect_same_bits(got.param, want.param, what + " param");
                  expect_same_bits(got.grad, want.grad, what + " gradient");
                  std::vector<Tensor> all = got_kept.all(), all_wanted = want_kept.all();
                  for (const auto& [mine, oracle] : {std::pair(got.m, want.m), {got.v, want.v}}) {
                    all.push_back(mine);
                    all_wanted.push_back(oracle);
                  }
                  for (size_t i = 0; i < all.size(); ++i)
                    expect_same_bits(all[i], all_wanted[i], fmt::format("{} part {}", what, i));
                  return all;
                },
                what);
          }
        }
      }
    }
  }
}

// A thousand updates, each a 64th of the precision of bf16 at 1. Rounded to the nearest nothing moves; rounded
// stochastically the mean moves as it should.
TEST(Update, StochasticRoundingKeepsTheMean) {
  constexpr i64 n = 4096;
  constexpr int kSteps = 1000;
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  std::vector<const OpTable*> tables = backends();
  tables.push_back(&ref_ops());
  for (const OpTable* ops : tables) {
    for (const bool stochastic : {false, true}) {
      Tensor param(DType::BF16, {n}), grad(DType::F32, {n});
      for (i64 i = 0; i < n; ++i) {
        param.set(i, 1);
        grad.set(i, -1);
      }
      const GradVerdict verdict{.grad_scale = 1};
      UpdateParams p{.rule = UpdateRule::Sgd, .lr = 0x1p-13f, .rng = {.seed = 3, .site = 0, .step = 0}};
      p.stochastic = stochastic;
      for (int t = 1; t <= kSteps; ++t) {
        p.rng.step = static_cast<u32>(t);
        const UpdateTensor tensor{.param = param, .master = param, .states = {}, .grad = grad, .site = kSite};
        ops->update({&tensor, 1}, &verdict, p, s);
      }
      double mean = 0;
      for (i64 i = 0; i < n; ++i) mean += static_cast<double>(param.at(i)) / n;
      const double wanted = stochastic ? 1 + kSteps * 0x1p-13 : 1;
      EXPECT_NEAR(mean, wanted, stochastic ? 2e-3 : 0) << ops->name;
    }
  }
}

// Codes of ref are searched for in a list, in fp64: they differ by one at most, and where a number is in the middle of
// two. After a hundred steps the weights are those of ref, up to the precision of the codes.
TEST(Update, OfCodedStatesFollowsRef) {
  constexpr i64 n = 5003;
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : backends()) {
    State got(DType::BF16, n), want(DType::F32, n);
    Kept got_kept(true, n), want_kept(true, n);
    UpdateParams p = params(true);
    for (int j = 0; j < 2; ++j) {
      encode_state(got_kept.view(j), (j == 0 ? got.m : got.v).view().as<float>(), 0, n);
      encode_state(want_kept.view(j), (j == 0 ? got.m : got.v).view().as<float>(), 0, n);
    }
    for (int t = 1; t <= 100; ++t) {
      for (State* state : {&got, &want}) state->grad.randomize(100 + static_cast<u32>(t), 64.0f);
      p.bias1 = static_cast<float>(1 - std::pow(p.beta1, t));
      p.bias2 = static_cast<float>(1 - std::pow(p.beta2, t));
      step(*ops, {got.param, got.master, {got_kept.view(0), got_kept.view(1)}, got.grad, kDecay}, p, s);
      step(ref_ops(), {want.param, want.master, {want_kept.view(0), want_kept.view(1)}, want.grad, kDecay}, p, s);
      if (t > 1) continue;
      expect_close(got.master, want.master, 2, std::string(ops->name) + " master after 1");
      for (int j = 0; j < 2; ++j) {
        i64 others = 0;
        for (i64 i = 0; i < n; ++i) {
          const auto code = [&](const Kept& kept) {
            return j == 0 ? int{kept.first.view().as<std::int8_t>()[i]} : int{kept.second.view().as<u8>()[i]};
          };
          ASSERT_LE(std::abs(code(got_kept) - code(want_kept)), 1) << ops->name << " state " << j << " element " << i;
          others += code(got_kept) != code(want_kept);
        }
        EXPECT_LE(others, n / 1000) << ops->name << " state " << j;
      }
      expect_close(got_kept.first_scales, want_kept.first_scales, 4, "first scales");
      expect_close(got_kept.second_scales, want_kept.second_scales, 4, "second scales");
    }
    double off = 0;
    for (i64 i = 0; i < n; ++i)
      off = std::max(off, std::abs(static_cast<double>(got.master.at(i)) - static_cast<double>(want.master.at(i))));
    EXPECT_LE(off, 2e-3) << ops->name;  // of a hundred steps of 3e-3
  }
}

// With betas of 0 states become the gradient and its square: numbers beside the middles of all codes, very small ones,
// and blocks that are zeros or not finite have the codes of encode_state. With a rate of 0 subnormal parameters stay.
TEST(Update, EncodesWhateverStatesMayBe) {
  constexpr float inf = std::numeric_limits<float>::infinity();
  std::vector<float> g;
  const auto add = [&g](float x) {
    if (g.size() % 256 == 0) g.push_back(1);  // the largest of its block
    g.push_back(g.size() % 3 == 0 ? -x : x);
  };
  for (const DType t : {DType::I8, DType::U8}) {
    for (int k = 0; k < (t == DType::I8 ? 127 : 255); ++k) {
      const float low = state_codes::decode(t, static_cast<u8>(k), 1);
      const float high = state_codes::decode(t, static_cast<u8>(k + 1), 1);
      float x = t == DType::I8 ? (low + high) / 2 : std::sqrt((low + high) / 2);
      for (int i = 0; i < 3; ++i) x = std::nextafter(x, 0.0f);
      for (int i = 0; i < 7; ++i, x = std::nextafter(x, inf)) add(x);
    }
  }
  for (int e = 0; e < 149; ++e) add(std::ldexp(1.5f, -e));
  for (const float x : {0.0f, 0x1p-60f, 0x1p-110f, inf, std::numeric_limits<float>::quiet_NaN(), 0.5f}) {
    g.resize((g.size() + 255) / 256 * 256);
    for (int i = 0; i < 250; ++i) g.push_back(std::isfinite(x) ? x : 1);
    g.push_back(x);
  }
  const i64 n = std::ssize(g);

  State start(DType::BF16, n);
  Kept kept(true, n), want(true, n);
  std::vector<float> squares;
  for (i64 i = 0; i < n; ++i) {
    const float x = g[static_cast<size_t>(i)];
    start.grad.view().as<float>()[i] = x * 64;  // kVerdict scales by 1/64
    start.master.view().as<float>()[i] = std::ldexp(static_cast<float>(i % 300 - 150), -140);
    squares.push_back(x * x);
  }
  encode_state(want.view(0), g.data(), 0, n);
  encode_state(want.view(1), squares.data(), 0, n);
  UpdateParams p = params(true);
  p.beta1 = p.beta2 = 0;
  p.lr = 0;
  for (const OpTable* ops : backends()) {
    const std::string what = std::string(ops->name);
    expect_same_for_any_threads(
        [&](Stream& s) {
          State got = start;
          Kept got_kept = kept;
          step(*ops, {got.param, got.master, {got_kept.view(0), got_kept.view(1)}, got.grad, kDecay}, p, s);
          const auto all = got_kept.all(), all_wanted = want.all();
          for (size_t i = 0; i < all.size(); ++i) expect_same_bits(all[i], all_wanted[i], what);
          for (i64 i = 0; i < n && std::isfinite(squares[static_cast<size_t>(i)]); ++i) {
            const float w = start.master.view().as<float>()[i];
            EXPECT_EQ(got.master.view().as<float>()[i], w) << what << i;
            EXPECT_EQ(to_float(got.param.view().as<bf16>()[i]), to_float(to_bf16(w))) << what << i;
          }
          return all;
        },
        what);
  }
}

TEST(Update, LeavesStatesThatAreNotFp32AloneInASkippedStep) {
  constexpr i64 n = 1000;
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  const GradVerdict skip{.finite = 0};
  for (const OpTable* ops : backends()) {
    for (const bool coded : {true, false}) {
      State state(DType::BF16, n);
      Kept kept(coded, n);
      for (int j = 0; j < 2; ++j) encode_state(kept.view(j), (j == 0 ? state.m : state.v).view().as<float>(), 0, n);
      const Kept before = kept;
      const UpdateTensor tensor{state.param, state.master, {kept.view(0), kept.view(1)}, state.grad, kDecay};
      ops->update({&tensor, 1}, &skip, params(true), s);
      const auto all = kept.all(), all_before = before.all();
      for (size_t i = 0; i < all.size(); ++i) expect_same_bits(all[i], all_before[i], std::string(ops->name));
    }
  }
}

// Tensors of all kinds in one call, in any order: each as if it were alone.
TEST(Update, TakesTensorsOfAllKindsAtOnce) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : backends()) {
    std::vector<State> got, want;
    std::vector<Kept> got_kept, want_kept;
    constexpr i64 kSizes[] = {5, 300, 0, 1000, 17, 513, 256};
    for (const i64 n : kSizes) {
      for (auto* states : {&got, &want}) states->emplace_back(DType::BF16, n);
      Kept& kept = got_kept.emplace_back(got.size() % 3 != 0, n);
      for (int j = 0; j < 2; ++j)
        encode_state(kept.view(j), (j == 0 ? got.back().m : got.back().v).view().as<float>(), 0, n);
      want_kept.push_back(kept);
    }
    const auto tensor = [](State& state, const Kept& kept, size_t i) {
      const bool fp32 = i % 2 == 0;
      return UpdateTensor{state.param,
                          state.master,
                          {fp32 ? TensorView(state.m) : kept.view(0), fp32 ? TensorView(state.v) : kept.view(1)},
                          state.grad,
                          kDecay};
    };
    std::vector<UpdateTensor> tensors;
    for (size_t i = 0; i < got.size(); ++i) {
      tensors.push_back(tensor(got[i], got_kept[i], i));
      step(*ops, tensor(want[i], want_kept[i], i), params(true), s);
    }
    ops->update(tensors, &kVerdict, params(true), s);
    for (size_t i = 0; i < got.size(); ++i) {
      expect_same_bits(got[i].master, want[i].master, fmt::format("{} tensor {}", ops->name, i));
      expect_same_bits(got[i].v, want[i].v, fmt::format("{} state of tensor {}", ops->name, i));
      expect_same_bits(got_kept[i].second, want_kept[i].second, fmt::format("{} codes of tensor {}", ops->name, i));
    }
  }
}

TEST(NormRatios, AreClampedAndOneForNothing) {
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  std::vector<const OpTable*> tables = backends();
  tables.push_back(&ref_ops());
  for (const OpTable* ops : tables) {
    constexpr i64 K = 4;
    // |w| = 5, 0, 5, 5; |u| = 2, 1, 0, 0.001
    const float w[K][2] = {{3, 4}, {0, 0}, {-3, 4}, {3, 4}}, u[K][2] = {{0, -2}, {1, 0}, {0, 0}, {0.001f, 0}};
    i64 largest[2 * K] = {}, sums[4 * K] = {};
    for (i64 k = 0; k < K; ++k) {
      for (i64 which = 0; which < 2; ++which) {
        Tensor x(DType::F32, {2});
        for (i64 i = 0; i < 2; ++i) x.set(i, (which == 0 ? w : u)[k][i]);
        const i64 at = which * K + k;
        largest[at] = max_abs_bits(*ops, x, s);
        const ExactSum sum = sum_squares(*ops, x, static_cast<u32>(largest[at]), s);
        sums[2 * at] = sum.hi;
        sums[2 * at + 1] = sum.lo;
      }
    }
    Tensor factors(DType::F32, {K});
    ops->norm_ratios(factors, TensorView::of(largest, DType::I64, {2 * K}), TensorView::of(sums, DType::I64, {4 * K}),
                     0.01f, 10, s);
    EXPECT_FLOAT_EQ(static_cast<float>(factors.at(0)), 2.5f) << ops->name;
    EXPECT_EQ(factors.at(1), 1) << ops->name;
    EXPECT_EQ(factors.at(2), 1) << ops->name;
    EXPECT_EQ(factors.at(3), 10) << ops->name;
  }
}

TEST(NormRatios, OfOneNormAreItsInverse) {
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  std::vector<const OpTable*> tables = backends();
  tables.push_back(&ref_ops());
  for (const OpTable* ops : tables) {
    constexpr i64 K = 2;
    const float u[K][2] = {{3, -4}, {0, 1e-9f}};
    i64 largest[K] = {}, sums[2 * K] = {};
    for (i64 k = 0; k < K; ++k) {
      Tensor x(DType::F32, {2});
      for (i64 i = 0; i < 2; ++i) x.set(i, u[k][i]);
      largest[k] = max_abs_bits(*ops, x, s);
      const ExactSum sum = sum_squares(*ops, x, static_cast<u32>(largest[k]), s);
      sums[2 * k] = sum.hi;
      sums[2 * k + 1] = sum.lo;
    }
    Tensor factors(DType::F32, {K});
    ops->norm_ratios(factors, TensorView::of(largest, DType::I64, {K}), TensorView::of(sums, DType::I64, {2 * K}), 0,
                     1e7f, s);
    EXPECT_FLOAT_EQ(static_cast<float>(factors.at(0)), 0.2f) << ops->name;
    EXPECT_EQ(factors.at(1), 1e7) << ops->name;
  }
}

TEST(ScaledSum, IsItsDefinitionBitForBitOnEveryBackend) {
  for (const OpTable* ops : backends()) {
    for (const i64 n : {1, 15, 17, 4097, 40000}) {
      for (const bool adds : {false, true}) {
        for (const bool scaled : {false, true}) {
          const float a = adds ? -1.25f : 0.0f, b = 0.7f, factor = 0.3f, of_x = scaled ? b * factor : b;
          Tensor x(DType::F32, {n}), want(DType::F32, {n});
          x.randomize(1);
          want.randomize(2);
          for (i64 i = 0; i < n; ++i) {
            float& y = want.view().as<float>()[i];
            const float sum = of_x * x.view().as<float>()[i];
            y = adds ? a * y + sum : sum;
          }
          expect_same_for_any_threads(
              [&](Stream& s) {
                Tensor y(DType::F32, {n});
                y.randomize(2);
                if (!adds) y.fill(std::numeric_limits<double>::quiet_NaN());  // which is not read
                ops->scaled_sum(y, x, a, b, scaled ? &factor : nullptr, s);
                expect_same_bits(y, want, fmt::format("{} {}", ops->name, n));
                return std::vector<Tensor>{y};
              },
              fmt::format("{} {}", ops->name, n));
        }
      }
    }
  }
}

TEST(Judge, UnscalesClipsAndSkips) {
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  std::vector<const OpTable*> tables = backends();
  tables.push_back(&ref_ops());
  for (const OpTable* ops : tables) {
    Tensor g(DType::F32, {2});
    const auto judge = [&](float a, float b, const JudgeParams& p) {
      g.set(0, a);
      g.set(1, b);
      i64 bits = max_abs_bits(*ops, g, s);
      ExactSum squares = sum_squares(*ops, g, static_cast<u32>(bits), s);
      i64 parts[2] = {squares.hi, squares.lo};
      GradVerdict v{.finite = 7, .norm = 7, .grad_scale = 7};
      ops->judge(&v, TensorView::of(&bits, DType::I64, {1}), TensorView::of(parts, DType::I64, {2}), p, s);
      return v;
    };
    const GradVerdict plain = judge(3, -4, {.divisor = 10});
    EXPECT_EQ(plain.finite, 1) << ops->name;
    EXPECT_DOUBLE_EQ(plain.norm, 0.5) << ops->name;
    EXPECT_EQ(plain.grad_scale, 0.1f) << ops->name;
    EXPECT_EQ(judge(3, -4, {.divisor = 10, .clip = 0.25}).grad_scale,
              static_cast<float>(1 / (10 * ((0.5 + 1e-6) / 0.25))));
    EXPECT_EQ(judge(3, -4, {.divisor = 10, .clip = 2}).grad_scale, 0.1f) << ops->name;
    EXPECT_EQ(judge(0, 0, {.clip = 1}).norm, 0) << ops->name;
    EXPECT_EQ(judge(0, 0, {.clip = 1}).grad_scale, 1) << ops->name;
    EXPECT_EQ(judge(1, INFINITY, {}).finite, 0) << ops->name;
    EXPECT_EQ(judge(1, INFINITY, {}).norm, INFINITY) << ops->name;
    EXPECT_EQ(judge(NAN, 1, {}).finite, 0) << ops->name;
    EXPECT_TRUE(std::isnan(judge(NAN, 1, {}).norm)) << ops->name;
  }
}

TEST(Sum, IsTakenInFp64) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  std::vector<const OpTable*> tables = backends();
  tables.push_back(&ref_ops());
  for (const OpTable* ops : tables) {
    for (const i64 n : {1, 31, 1000, 70001}) {
      Tensor x(DType::F32, {n});
      x.randomize(3);
      x.set(0, 3e7f);
      double want = 0, got = 0;
      for (i64 i = 0; i < n; ++i) want += static_cast<double>(x.at(i));
      ops->sum(TensorView::of(&got, DType::F64, {1}), x, 0.5, s);
      EXPECT_NEAR(got, 0.5 * want, 1e-6) << ops->name << " " << n;
    }
  }
}

}  // namespace optimizer_test
}  // namespace ds::testing
