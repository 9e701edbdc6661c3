// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa/kernels.h"
#include "cpu/loops.h"
#include "cpu/state_codes.h"
#include "update_rules.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

// Found by the rules by argument type, since they know only V.
inline Vec sign(Vec x) noexcept {
  const Vec one = broadcast(1.0f);
  return select(less(zero(), x), one, select(less(x, zero()), zero() - one, zero()));
}

namespace {

// Applies a rule to elements of a tensor whose states are stored elsewhere.
template <class Rule, class T>
struct Step {
  Step(const UpdateTensor& t, Vec grad_scale, const update_rules::Constants<Vec>& constants) noexcept
      : master(t.master.as<float>()),
        grad(t.grad.as<float>()),
        param((t.param ? t.param : t.master).as<T>()),
        rounds(static_cast<const void*>(param) != static_cast<const void*>(master)),
        scale(grad_scale),
        decay(broadcast(t.weight_decay)),
        k(constants) {}

  template <class Lanes>
  Vec parameter(i64 i, Lanes lanes) const noexcept {
    return load(master + i, lanes);
  }
  template <class Lanes>
  Vec gradient(i64 i, Lanes lanes) const noexcept {
    return load(grad + i, lanes) * scale;
  }
  // Stores the results of the rule.
  template <class Lanes>
  void put(i64 i, Vec w, Vec g, Lanes lanes) const noexcept {
    if constexpr (Rule::kDirection) {
      store(grad + i, g, lanes);
    } else {
      store(master + i, w, lanes);
      if (rounds) store(param + i, w, lanes);
    }
  }

  float *master, *grad;
  T* param;
  bool rounds;
  Vec scale, decay;
  update_rules::Constants<Vec> k;
};

// Elements [begin, end); their states are numbered from `first`.
template <class Rule, class T>
void pass(i64 begin, i64 end, float* const (&states)[2], i64 first, const Step<Rule, T>& step) noexcept {
  for_vectors(begin, end, [=](i64 i, auto lanes) {
    Vec w = step.parameter(i, lanes), g = step.gradient(i, lanes);
    Vec s[Rule::kStates + 1];  // one more, since there may be none
    for (int j = 0; j < Rule::kStates; ++j) s[j] = load(states[j] + i - first, lanes);
    Rule::apply(w, g, s, step.decay, step.k);
    for (int j = 0; j < Rule::kStates; ++j) store(states[j] + i - first, s[j], lanes);
    step.put(i, w, g, lanes);
  });
}

// Calls f<code>(state) for each state of a rule whose states are codes: the first is signed.
template <class Rule, class F>
void with_codes(F&& f) noexcept {
  if constexpr (Rule::kStates > 0) f.template operator()<DType::I8>(0);
  if constexpr (Rule::kStates > 1) f.template operator()<DType::U8>(1);
}

// A whole block of codes, which begins at `at`. Decoding, the parts of the rule, and encoding each have a loop if
// possible: while a processor divides, it executes later instructions, but looks ahead only a few vectors, which one
// chain of all operations per element would fill.
template <class Rule, class T>
void pass_of_codes(i64 at, const UpdateTensor& t, Step<Rule, T> step) noexcept {
  alignas(64) float values[2][kStateBlock], above[kStateBlock], below[kStateBlock];
  constexpr bool kInParts = requires(Vec v, update_rules::Quotient<Vec> q, update_rules::Constants<Vec> k) {
    Rule::change_parameter(v, q, v, k);
  };
  Ints largest[2] = {ints(0), ints(0)};
  for (i64 i = 0; i < kStateBlock; i += 2 * Vec::kLanes) {
    Vec s[2][Rule::kStates + 1];
    with_codes<Rule>([&]<DType kCode>(int j) {
      const VecPair two =
          decode_two<kCode>(t.states[j].as<u8>() + at + i, broadcast(t.states[j].scale[at / kStateBlock]));
      s[0][j] = two.first;
      s[1][j] = two.second;
    });
    for (i64 h = 0; h < 2; ++h) {
      const i64 v = i + h * Vec::kLanes;
      Vec w = step.parameter(at + v, AllLanes{}), g = step.gradient(at + v, AllLanes{});
      if constexpr (kInParts) {
        const auto q = Rule::change_states(w, g, s[h], step.decay, step.k);
        store(above + v, q.above);
        store(below + v, q.below);
      } else {
        Rule::apply(w, g, s[h], step.decay, step.k);
        step.put(at + v, w, g, AllLanes{});
      }
      for (int j = 0; j < Rule::kStates; ++j) {
        store(values[j] + v, s[h][j]);
        largest[j] = larger(largest[j], bits_of(abs(s[h][j])));
      }
    }
  }
  if constexpr (kInParts) {
    for (i64 i = 0; i < kStateBlock; i += Vec::kLanes) {
      Vec w = step.parameter(at + i, AllLanes{});
      Rule::change_parameter(w, {load(above + i), load(below + i)}, step.decay, step.k);
      step.put(at + i, w, zero(), AllLanes{});
    }
  }
  state_codes::Scale scales[2];
  for (int j = 0; j < Rule::kStates; ++j) {
    scales[j] = state_codes::scale_of(largest_of(largest[j]));
    t.states[j].scale[at / kStateBlock] = scales[j].value;
  }
  for (i64 i = 0; i < kStateBlock; i += 4 * Vec::kLanes) {
    with_codes<Rule>([&]<DType kCode>(int j) {
      encode_four<kCode>(t.states[j].as<u8>() + at + i, values[j] + i, broadcast(scales[j].inverse));
    });
  }
  for (int j = 0; j < Rule::kStates; ++j) {
    if (scales[j].inverse == 0) std::memset(t.states[j].as<u8>() + at, 0, static_cast<size_t>(kStateBlock));
  }
}

// Copies the last block of a tensor, of n elements, to a whole block padded with zeros.
template <class Rule, class T>
void pass_of_last_codes(i64 at, i64 n, const UpdateTensor& t, const Step<Rule, T>& step) noexcept {
  alignas(64) float master[kStateBlock] = {}, grad[kStateBlock] = {};
  alignas(64) T param[kStateBlock] = {};
  alignas(64) u8 codes[2][kStateBlock] = {};
  const auto count = static_cast<size_t>(n);
  std::memcpy(master, step.master + at, count * sizeof(float));
  std::memcpy(grad, step.grad + at, count * sizeof(float));
  UpdateTensor block;
  for (int j = 0; j < Rule::kStates; ++j) {
    std::memcpy(codes[j], t.states[j].as<u8>() + at, count);
    block.states[j] = TensorView::of(codes[j], t.states[j].dtype, {kStateBlock});
    block.states[j].scale = t.states[j].scale + at / kStateBlock;
  }
  Step<Rule, T> of_block = step;
  of_block.master = master;
  of_block.grad = grad;
  of_block.param = param;
  pass_of_codes(0, block, of_block);
  for (int j = 0; j < Rule::kStates; ++j) std::memcpy(t.states[j].as<u8>() + at, codes[j], count);
  if (Rule::kDirection) {
    std::memcpy(step.grad + at, grad, count * sizeof(float));
  } else {
    std::memcpy(step.master + at, master, count * sizeof(float));
    if (step.rounds) std::memcpy(step.param + at, param, count * sizeof(T));
  }
}

// Elements [begin, end), at most a block if the states are bf16, which pass through the nearest cache.
template <class Rule, class T>
void pass_of_floats(i64 begin, i64 end, const UpdateTensor& t, const Step<Rule, T>& step, const RngKey& rng) noexcept {
  const bool rounded = Rule::kStates > 0 && t.states[0].dtype == DType::BF16;
  alignas(64) float values[2][kStateBlock];
  float* states[2] = {t.states[0].as<float>(), t.states[1].as<float>()};
  for (int j = 0; rounded && j < Rule::kStates; ++j) {
    if (end - begin < kStateBlock) std::memset(values[j], 0, sizeof values[j]);
    decode_bf16(values[j], t.states[j].as<bf16>() + begin, end - begin);
    states[j] = values[j];
  }
  pass(begin, end, states, rounded ? begin : 0, step);
  if (!rounded) return;
  alignas(64) u32 random[kStateBlock];
  put_random_words(random, {rng.seed, t.site, rng.step}, static_cast<u64>(t.first + begin), end - begin);
  for (int j = 0; j < Rule::kStates; ++j)
    encode_bf16(t.states[j].as<bf16>() + begin, values[j], end - begin, random, j == 0);
}

// Elements [at, at + n), at most a block if states are not fp32.
template <class Rule, class T>
void pass_of_block(i64 at, i64 n, const UpdateTensor& t, const Step<Rule, T>& step, const RngKey& rng) noexcept {
  if (Rule::kStates == 0 || !is_coded(t.states[0].dtype)) {
    pass_of_floats(at, at + n, t, step, rng);
  } else if (n == kStateBlock) {
    pass_of_codes(at, t, step);
  } else {
    pass_of_last_codes(at, n, t, step);
  }
}

template <class Rule, class T>
void run(const UpdateTensor& t, float grad_scale, const UpdateParams& p, Stream& stream) noexcept {
  const Step<Rule, T> step(t, broadcast(grad_scale),
                           update_rules::constants_of<Vec>(p, [](float x) { return broadcast(x); }));
  for_tiles(stream, t.master.numel(), [&](i64 begin, i64 end) {
    const i64 at_once = Rule::kStates == 0 || t.states[0].dtype == DType::F32 ? end - begin : kStateBlock;
    for (i64 at = begin; at < end; at += at_once) pass_of_block(at, std::min(at_once, end - at), t, step, p.rng);
  });
}

// Elements [at, at + n) of a tensor, from the start of a block on, with `master` as their master.
UpdateTensor block_of(const UpdateTensor& t, i64 at, i64 n, float* master) noexcept {
  UpdateTensor block = t;
  const auto from = [&](TensorView& v) {
    if (!v) return;
    float* const scale = v.scale;
    v = TensorView::of(v.as<char>() + at * dtype_bytes(v.dtype), v.dtype, {n});
    v.scale = scale == nullptr ? nullptr : scale + at / kStateBlock;
  };
  from(block.grad);
  for (TensorView& state : block.states) from(state);
  block.param = {};
  block.master = TensorView::of(master, DType::F32, {n});
  block.first += at;
  return block;
}

// Parameters that are their own 16-bit masters are decoded block by block into the nearest cache, updated like an fp32
// master, and rounded.
template <class Rule, class T>
void run_own_masters(const UpdateTensor& t, float grad_scale, const UpdateParams& p, Stream& stream) noexcept {
  const auto constants = update_rules::constants_of<Vec>(p, [](float x) { return broadcast(x); });
  T* const param = t.master.as<T>();
  for_tiles(stream, t.master.numel(), [&](i64 begin, i64 end) {
    alignas(64) float master[kStateBlock] = {};
    alignas(64) u32 random[kStateBlock];
    for (i64 at = begin; at < end; at += kStateBlock) {
      const i64 n = std::min(kStateBlock, end - at);
      for_vectors(0, n, [&](i64 i, auto lanes) { store(master + i, load(param + at + i, lanes), lanes); });
      const UpdateTensor block = block_of(t, at, n, master);
      pass_of_block(0, n, block, Step<Rule, float>(block, broadcast(grad_scale), constants), p.rng);
      if constexpr (Rule::kDirection) continue;
      if constexpr (std::is_same_v<T, bf16>) {
        if (p.stochastic) {
          put_random_words(random, {p.rng.seed, t.site + kMasterSite, p.rng.step}, static_cast<u64>(t.first + at), n);
          encode_bf16(param + at, master, n, random, true);
          continue;
        }
      }
      for_vectors(0, n, [&](i64 i, auto lanes) { store(param + at + i, load(master + i, lanes), lanes); });
    }
  });
}

}  // namespace

void update(std::span<const UpdateTensor> tensors, const GradVerdict* verdict, const UpdateParams& p,
            Stream& stream) noexcept {
  if (!verdict->finite) return;
  update_rules::with_rule(p.rule, [&]<class Rule>(Rule) {
    for (const UpdateTensor& t : tensors) {
      const float scale = facts_of(p.rule).takes_gradient() ? verdict->grad_scale
                          : t.factor != nullptr             ? *t.factor
                                                            : 1.0f;
      with_work_type(t.param ? t.param.dtype : t.master.dtype, [&]<class T>(T) {
        if constexpr (std::is_same_v<T, float>) return run<Rule, T>(t, scale, p, stream);
        t.master.dtype == DType::F32 ? run<Rule, T>(t, scale, p, stream)
                                     : run_own_masters<Rule, T>(t, scale, p, stream);
      });
    }
  });
}

void scaled_sum(TensorView y, TensorView x, float a, float b, const float* factor, Stream& stream) noexcept {
  float* const to = y.as<float>();
  const float* const from = x.as<float>();
  const Vec of_y = broadcast(a), of_x = broadcast(factor != nullptr ? b * *factor : b);
  const bool adds = a != 0;
  for_all_vectors(stream, y.numel(), [=](i64 i, auto lanes) {
    Vec sum = of_x * load(from + i, lanes);
    if (adds) sum = of_y * load(to + i, lanes) + sum;
    store(to + i, sum, lanes);
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
