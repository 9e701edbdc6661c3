// SPDX-License-Identifier: Apache-2.0
#pragma once
// THE list of operations. Each backend fills one OpTable by designated initialisers: a missing or reordered op does not
// compile. `ref` is the oracle (double accumulation, naive loops); `cpu` is SIMD, chosen per instruction set at run
// time; `cuda` is in libds_cuda.so.
//
// Rules for all ops
//   dtypes      "work" dtype = fp32, bf16 or fp16, the same for all work tensors of a call; statistics, losses,
//               optimizer state and accumulators are fp32. Internal arithmetic is fp32 (ref: fp64).
//               Results are rounded once, to nearest even, when stored. `ref` also takes fp64 for every operand.
//   shapes      must satisfy the contracts: nothing is checked here, and kernels are noexcept.
//   layout      contiguous row-major unless a contract says "strided"; the last dim always has stride 1.
//   aliasing    outputs do not alias inputs unless a contract says "may alias".
//   determinism results depend only on shapes, values and instruction set, never on the number of threads.
//   memory      no op allocates, except worker scratch of the pool, which grows once: ScratchMeter.
// Letters: B batch, T tokens (queries), S keys, H query heads, G key/value heads, D head dim, C hidden, F ffn, V
// vocabulary, R rows, N elements. [x] dims; a view without data (`!view`) means "not wanted".

#include <bit>
#include <cmath>
#include <span>
#include <string_view>

#include "ds/kernels/fp8.h"
#include "ds/kernels/philox.h"
#include "ds/kernels/tensor.h"
#include "ds/kernels/thread_pool.h"

namespace ds {

// The queue in which an op runs: the CPU backends use `pool`, CUDA uses `native` (a cudaStream_t). Ops of one stream
// run in order.
struct Stream {
  ThreadPool* pool = nullptr;
  void* native = nullptr;
};

enum class Activation : u8 { None, GeluTanh, GeluErf, Silu };

struct RopeParams {
  bool inverse = false;  // the backward pass: rotation by the negative angle
  // Elements 2d and 2d + 1 of a head are pair d (RoFormer, DeepSeek-V2); else d and d + D/2 (most of Hugging Face's).
  bool interleaved = false;
};

struct MatmulParams {
  bool trans_a = false;     // a is stored [K,M] instead of [M,K]
  bool trans_b = false;     // b is stored [N,K] instead of [K,N]
  bool accumulate = false;  // c += instead of c =; then no bias, activation or residual
  Activation activation = Activation::None;
  // Each row of c has the bits that it has alone, with codes as with decoded numbers. CPU products of our own always
  // give it, and GPU products of codes.
  bool rowwise = false;
};

// The blocks of the two operands of an FP8 product: at most one has squares.
struct Fp8MatmulParams {
  Fp8Blocks a = Fp8Blocks::Rows, b = Fp8Blocks::Rows;
};

// The position of a call's score matrices among those of all heads, queries and keys of a sequence. Dropout counts
// elements by it, so that masks do not depend on how ranks share them; layouts, biases and documents are indexed by it.
// Size 0: the call has all. With a layout, col0, and in attention_bwd row0, must be multiples of its block.
struct AttentionGrid {
  i64 heads = 0, head0 = 0;  // of q
  i64 rows = 0, row0 = 0;    // queries
  i64 cols = 0, col0 = 0;    // keys

  // Replaces sizes of 0 by those of a call.
  constexpr AttentionGrid of(i64 H, i64 T, i64 S) const noexcept {
    return {heads != 0 ? heads : H, head0, rows != 0 ? rows : T, row0, cols != 0 ? cols : S, col0};
  }
  // The number of row i's first score; the scores of a row are consecutive.
  DS_HOST_DEVICE constexpr i64 row(i64 b, i64 h, i64 i) const noexcept {
    return ((b * heads + head0 + h) * rows + row0 + i) * cols + col0;
  }
};

// A block-sparse layout: which blocks of keys each block of queries attends to, as bits. A key is visible if its block
// is present and nothing else in AttentionParams hides it. Blocks count from the beginning of the sequence. The arrays
// are in the memory of the device that runs the op.
struct AttentionBlocks {
  i64 block = 0;    // tokens per block: 16, 32, 64 or 128; 0: no layout, every key is visible
  i64 count = 0;    // blocks of queries, and of keys; every block of a call must be below it
  i64 layouts = 0;  // 1: one for all heads; else one for each head of the model, head grid.head0 + h of q
  // [layouts, count, words()]: bit j % 64 of word j / 64 of row i: block i attends to keys j.
  const u64* keys = nullptr;
  const u64* queries = nullptr;  // transposed: row j, bit i; only for attention_bwd

  constexpr bool sparse() const noexcept { return block != 0; }
  DS_HOST_DEVICE constexpr i64 words() const noexcept { return (count + 63) / 64; }
  // The words of query block `query` for head `head` of the model.
  DS_HOST_DEVICE constexpr const u64* keys_of(i64 head, i64 query) const noexcept {
    return keys + ((layouts == 1 ? 0 : head) * count + query) * words();
  }
  DS_HOST_DEVICE constexpr const u64* queries_of(i64 head, i64 key) const noexcept {
    return queries + ((layouts == 1 ? 0 : head) * count + key) * words();
  }
};

// Several sequences in one call of attention_fwd: B is 1, and q, o and lse contain the rows of one sequence after the
// other. Keys and values of all of them are in the same pages, so k and v are the same arrays; their dim 1 is the most
// keys of any sequence. Query i of a sequence has the position of key keys[s] - n + i, where n is the number of its
// queries. The arrays are in the memory of the device that runs the op.
struct AttentionSequences {
  i64 count = 0;                // 0: the call consists of B sequences of T queries and S keys
  const i32* begins = nullptr;  // [count + 1], ascending: sequence s has rows [begins[s], begins[s + 1])
  const i32* keys = nullptr;    // [count], at least the number of queries
  const i32* tables = nullptr;  // [count]: sequence s has the pages of row tables[s] of AttentionParams::pages
  i64 stride = 0;               // pages per row

  constexpr explicit operator bool() const noexcept { return count != 0; }
  // The sequence of a row.
  DS_HOST_DEVICE constexpr i64 of_row(i64 row) const noexcept {
    i64 low = 0, high = count;
    while (high - low > 1) {
      const i64 middle = (low + high) / 2;
      (begins[middle] <= row ? low : high) = middle;
    }
    return low;
  }
  // The number of the key that belongs to a row of sequence s.
  DS_HOST_DEVICE constexpr i64 key_of(i64 s, i64 row) const noexcept { return keys[s] - begins[s + 1] + row; }
};

struct AttentionParams {
  float scale = 1.0f;    // multiplies QK^T
  bool causal = true;    // bottom-right aligned: key j visible to query i iff j <= i + S - T
  i64 window = 0;        // > 0: also j > i + S - T - window (sliding window); 0: none
  float dropout = 0.0f;  // on probabilities: element grid.row(b, h, i) + j of `rng`
  RngKey rng{};
  AttentionGrid grid{};
  AttentionBlocks blocks{};

  // Further terms of scores and masks. The positions of a query and a key in their sequence are grid.row0 + i,
  // grid.col0 + j.
  float softcap = 0.0f;  // > 0: a scaled score s becomes softcap * tanh(s / softcap) (Gemma 2)
  // Added next: bias[h, position of the key - position of the query + reach], clamped to the table; h as in layouts.
  // ALiBi (Press et al., 2022) and other biases by relative position have this form.
  const float* bias = nullptr;  // [heads of the model, 2 * reach + 1], on the device
  i64 reach = 0;
  // With a window: number of first keys of a sequence, or document, that stay visible (Xiao et al., 2024).
  i64 sinks = 0;
  // Keys of other documents are hidden: begin and end of the document at each position.
  const i32* documents = nullptr;  // [2, B, positions], on the device; ascending
  i64 positions = 0;

  // For attention_fwd of sequences from their first keys on: keys and values in pages (Kwon et al., "Efficient Memory
  // Management for Large Language Model Serving with PagedAttention", 2023). Key j is row key_row(j) of k and v, whose
  // dim 1 is still S. A page without keys that a query of the call sees may be any page of finite numbers.
  const i32* pages = nullptr;  // [ceil(S / page)], on the device; with `sequences`, a table of them for each
  i64 page = 0;  // keys per page: 16, 32, 64 or 128, and at least a block of the layout, or 64 without a layout
  // For attention_fwd without dropout or documents: pages is [rows, sequences.stride], and grid.row0 and the sizes of
  // the grid are those of each sequence.
  AttentionSequences sequences{};
  // For attention_fwd: a query's bits depend only on its own sequence, its position and the keys up to there: not on
  // the number of queries, on other sequences or on pages. CPUs always give that, but for the queries of a layout.
  bool rowwise = false;

  DS_HOST_DEVICE constexpr i64 key_row(i64 j) const noexcept {
    return pages == nullptr ? j : pages[j / page] * page + j % page;
  }
  // The parameters of a call for sequence s alone, where its arrays can be read.
  constexpr AttentionParams of_sequence(i64 s) const noexcept {
    AttentionParams p = *this;
    p.pages += sequences.tables[s] * sequences.stride;
    p.grid.row0 = sequences.key_of(s, sequences.begins[s]);
    p.sequences = {};
    return p;
  }
};

// For Evoformer attention: T residues attend to each other in each of N sequences of an alignment, or rows of a pair
// representation; all N share the pair bias.
struct EvoformerParams {
  float scale = 1.0f;  // multiplies QK^T
  i64 num_seq = 1;     // N; the first dim of q is B*N
};

inline constexpr i32 kIgnoredTarget = -100;  // a target that does not count in the loss
struct CrossEntropyParams {
  i32 ignore_index = kIgnoredTarget;
  float grad_scale = 1.0f;  // d(total)/d(token loss): loss scale / valid count, the same for every token
  i64 chunk_tokens = 0;     // rows of the logits workspace
  // Weight of the uniform distribution in the target: loss = lse - (1 - s) z[target] - s mean z, with lse = ln of the
  // sum of e^z (Szegedy et al., "Rethinking the Inception Architecture", 2015; torch.nn.CrossEntropyLoss).
  float label_smoothing = 0;
  float z_loss = 0;          // adds z_loss lse^2 (Chowdhery et al., "PaLM", 2022)
  i64 vocab = 0;             // for a vocabulary in parts: size of all of them together
  bool add_dweight = false;  // linear_cross_entropy adds to dweight instead of overwriting it
  // linear_cross_entropy has the bits of a rowwise matmul and of vocab_max, vocab_sums and vocab_grad. CPUs always give
  // them.
  bool rowwise = false;
};

// How a token is drawn from a row of logits: plain data, where the op runs. The filters apply in this order, each to
// the probabilities that the ones before it have left, normalised.
struct Draw {
  double temperature = 1;  // 0: the most likely token
  i64 top_k = 0;           // the most likely tokens; 0: all
  double top_p = 1;        // the most likely tokens that together have this probability (Holtzman et al., 2020)
  double min_p = 0;        // tokens of at least this share of the largest probability (Nguyen et al., 2024)
  u64 random = 0;          // uniform over all u64
  i64 first_change = 0, num_changes = 0;  // of this row, each of another id
};
// A change of a logit before it is filtered. A logit is divided by `repetition`, or multiplied if negative; then `less`
// is subtracted. Infinite `less` bans the id.
struct LogitChange {
  i32 id = 0;
  float repetition = 1;
  float less = 0;
  float kept = 0;  // the op's own
};

// How a router scores experts and chooses among them (Shazeer et al., "Outrageously Large Neural Networks", 2017;
// Fedus, Zoph, Shazeer, "Switch Transformers", 2022; DeepSeek-AI, "DeepSeek-V2", "DeepSeek-V3", 2024). The E scores of
// a token are the softmax of its logits, or sigmoids of them. Experts are chosen by their score plus, if there is one,
// a bias, which has no part in their weight; of equal ones the lowest number. NaN counts as the lowest, so k different
// experts are chosen whatever the logits are.
struct RouterParams {
  bool sigmoid = false;
  // Weights of the k chosen experts are divided by their sum; with sigmoids 1e-20 is added to it first.
  bool normalise = false;
  float scale = 1;  // then multiplies them
  // The E / groups neighbouring experts of a group are considered only if their group is one of the best: by the
  // largest biased score in it, or by the sum of its two largest. At most 64 groups.
  i64 groups = 1, chosen_groups = 1;
  bool group_by_two = false;
  bool noisy_second = false;  // noise decides on the second of two experts alone; see OpTable::route
};
// Which choices of an expert are dropped if more than `capacity` tokens chose it: those of the lowest priority, and of
// equal ones the last by token. by_rank: of equal ones those that are no token's first choice, then no second one, ...;
// then the last by token.
struct CapacityParams {
  i64 experts = 0, capacity = 0;
  bool by_rank = false;
};
// Random numbers of routers.
enum class NoiseKind : u8 {
  Uniform,  // y = u, in (0, 1)
  Jitter,   // y = x * (1 + amount * (2 u - 1))
  Gumbel,   // y = x - ln(-ln u): the largest of x with this noise is one drawn from the softmax of x
};
// The losses of a router beside that of the head. Both ignore tokens whose target is ignore_index. With n tokens, E
// experts, k per token, count_e tokens that chose e and p the scores (sigmoids divided by their sum over all E):
//   balance = E / (k n^2) * sum over e of count_e * (sum over tokens of p_e)           (k = 1: Switch's; 1 at balance)
//             first_choices: count_e counts first choices alone, and k is 1            (GShard's and DeepSpeed's of
//             two)
//   z       = mean over tokens of lse^2, lse = ln of the sum of e^logit                 (Zoph et al., "ST-MoE", 2022)
struct RouterLossParams {
  float balance = 0, z = 0;  // coefficients
  i32 ignore_index = kIgnoredTarget;
  bool first_choices = false;
};
// Numbers of router_stats for E experts, and where they begin; the counts come first.
struct RouterStats {
  i64 E;
  constexpr i64 probs() const noexcept { return E; }
  constexpr i64 squares() const noexcept { return 2 * E; }
  constexpr i64 firsts() const noexcept { return 2 * E + 1; }
  constexpr i64 report() const noexcept { return 3 * E + 1; }  // kReport numbers
  static constexpr i64 kReport = 3;                            // nats, their fraction, dropped choices
  static constexpr i64 kFraction = 4096;                       // of a nat
  constexpr i64 size() const noexcept { return 3 * E + 1 + kReport; }
};

// Rows of dtype `work` that start at the same addresses as the rows of z: the in-place result of vocab_grad.
inline TensorView gradient_rows(TensorView z, DType work) noexcept {
  z.stride[0] = z.stride[0] * dtype_bytes(z.dtype) / dtype_bytes(work);
  z.dtype = work;
  return z;
}

// How parameters are updated, element by element. kernels/update_rules.h defines the rules and cites their papers.
enum class UpdateRule : u8 {
  AdamW,
  AdamL2,
  Sgd,
  Momentum,
  Nesterov,
  Lion,
  Adagrad,
  LambDirection,
  MuonDirection,
  NesterovMuonDirection,
  FrozenAdam,
  ZeroOneDelta,
  ZeroOneSync,
  MomentumGradient,
  VarianceRatio,
  FrozenLambDirection,
  OuterDelta,
  OuterMomentum,
  OuterNesterov,
  Descend,
};

// The tensor `grad` before a pass, the result of a pass, and the states that a pass gets, in the order of ds::State.
enum class RuleInput : u8 {
  Gradient,  // which is unscaled and clipped
  Other,     // used as it is
};
enum class RuleResult : u8 {
  Parameter,
  Direction,  // in `grad`; the master stays as it is
};
enum class RuleStates : u8 {
  Optimizer,  // those of the parameter's optimizer
  Variances,  // the two second moments of 1-bit LAMB: the frozen one, and the one that still changes
  Outer,      // those of an optimizer around it (DiLoCo)
};

// The properties of a rule that its callers need; its arithmetic is in kernels/update_rules.h.
struct RuleFacts {
  UpdateRule rule;
  std::string_view optimizer;  // the name under which its operations and bytes are counted
  int num_states;              // at most 2
  RuleInput input = RuleInput::Gradient;
  RuleResult result = RuleResult::Parameter;
  RuleStates states = RuleStates::Optimizer;

  constexpr bool takes_gradient() const noexcept { return input == RuleInput::Gradient; }
  constexpr bool makes_direction() const noexcept { return result == RuleResult::Direction; }
};
inline constexpr RuleFacts kUpdateRules[] = {
    {UpdateRule::AdamW, "adamw", 2},
    {UpdateRule::AdamL2, "adamw", 2},
    {UpdateRule::Sgd, "sgd", 0},
    {UpdateRule::Momentum, "sgd", 1},
    {UpdateRule::Nesterov, "sgd", 1},
    {UpdateRule::Lion, "lion", 1},
    {UpdateRule::Adagrad, "adagrad", 1},
    {UpdateRule::LambDirection, "lamb", 2, RuleInput::Gradient, RuleResult::Direction},
    {UpdateRule::MuonDirection, "muon", 1, RuleInput::Gradient, RuleResult::Direction},
    {UpdateRule::NesterovMuonDirection, "muon", 1, RuleInput::Gradient, RuleResult::Direction},
    {UpdateRule::FrozenAdam, "adamw", 2},
    {UpdateRule::ZeroOneDelta, "adamw", 2, RuleInput::Other, RuleResult::Direction},
    {UpdateRule::ZeroOneSync, "adamw", 2, RuleInput::Other},
    {UpdateRule::MomentumGradient, "lamb", 2, RuleInput::Other, RuleResult::Direction},
    {UpdateRule::VarianceRatio, "lamb", 2, RuleInput::Other, RuleResult::Direction, RuleStates::Variances},
    {UpdateRule::FrozenLambDirection, "lamb", 2, RuleInput::Other, RuleResult::Direction},
    {UpdateRule::OuterDelta, "diloco", 2, RuleInput::Other, RuleResult::Direction, RuleStates::Outer},
    {UpdateRule::OuterMomentum, "diloco", 2, RuleInput::Other, RuleResult::Parameter, RuleStates::Outer},
    {UpdateRule::OuterNesterov, "diloco", 2, RuleInput::Other, RuleResult::Parameter, RuleStates::Outer},
    {UpdateRule::Descend, "descend", 0, RuleInput::Other},
};
constexpr const RuleFacts& facts_of(UpdateRule rule) noexcept { return kUpdateRules[static_cast<size_t>(rule)]; }
static_assert([] {
  for (const RuleFacts& facts : kUpdateRules) {
    if (&facts_of(facts.rule) != &facts) return false;
  }
  return true;
}());

// For parameters that are updated alike in one step. Members that a rule does not use are ignored.
struct UpdateParams {
  UpdateRule rule = UpdateRule::AdamW;
  double beta1 = 0.9, beta2 = 0.999;  // fp64: 1 - beta2 in fp32 would be wrong by 1e-5. A single momentum is beta1
  double rest1 = -1;                  // weight of the gradient in the momentum; negative: 1 - beta1
  float lr = 0, eps = 1e-8f;
  float bias1 = 1, bias2 = 1;  // 1 - beta^t, 1 when bias correction is off
  RngKey rng{};                // of stochastic rounding; its site is UpdateTensor::site
  bool stochastic = false;     // masters in bf16 are rounded stochastically, too
};

// One pass of an optimizer over many tensors, wherever they are stored: plain data.
struct UpdateSpec {
  UpdateParams params;
  const float* factors = nullptr;  // where the op runs, by parameter; for Descend; null: 1
  bool decay = true;               // apply the tensors' weight decay; false: 0
};

// One tensor of an optimizer step; all [N], contiguous.
struct UpdateTensor {
  TensorView param;   // work dtype, receives the rounded master; optional, may be master
  TensorView master;  // fp32; or the same as param, which is then decoded, updated and rounded
  // As many as the rule has: fp32; for AdamW and AdamL2 also both bf16, or I8 and U8 codes (state_codes.h), whose
  // blocks start with the tensor. States that are not fp32 are decoded, updated and encoded.
  TensorView states[2];
  TensorView grad;  // fp32; overwritten by a rule with makes_direction()
  float weight_decay = 0;
  const float* factor = nullptr;  // where the op runs; for Descend; null: 1
  // Stochastic rounding of element i uses number first + i of this site. Two bf16 states use one half of it each; a
  // master uses the upper half of the number of site + kMasterSite.
  u32 site = 0;
  i64 first = 0;  // a multiple of 4
};

// An exact, order-independent sum of squares: integers in units of 2^-50 * 2^(2*exponent). The value is hi*2^32 + lo;
// both parts can be added as plain 64-bit integers over any partition and any number of ranks (< 2^31 partials). Ops
// return 0 <= lo < 2^32.
struct ExactSum {
  i64 hi = 0;
  i64 lo = 0;

  // The smallest exponent with every finite |x| < 2^exponent, from the bits of the largest.
  DS_HOST_DEVICE static constexpr int exponent_of(u32 max_abs_bits) noexcept {
    return static_cast<int>(max_abs_bits >> 23) - 126;
  }
  // Rounded once, and independent of the split into hi and lo, while the sum is below 2^85 units.
  DS_HOST_DEVICE double value(int exponent) const noexcept {
    const double high = static_cast<double>(hi + (lo >> 32)), low = static_cast<double>(lo & 0xFFFFFFFF);
    return std::ldexp(high * 0x1p32 + low, 2 * exponent - 50);
  }
};

// Encoding of numbers as codes of `bits` bits. `block` consecutive elements of a row share an fp32 scale; each row
// starts a new block. 8 bits: one int8 per element. 4: two's complement, element 2k in the low half of byte k, 2k+1 in
// the high half. 1: the sign, element i in bit i % 8 of byte i/8, 1 for negative numbers. Unused bits of a row's last
// byte are zero.
struct CodeFormat {
  int bits = 8;
  i64 block = 2048;  // a multiple of 8; 0: the whole row
  // Scales are powers of two of at least 2^-24: then a code times its scale is exact in every work dtype (F16: below
  // 2^15), and decoded values have the same codes and scale again.
  bool exact = false;

  DS_HOST_DEVICE constexpr i64 block_elems(i64 n) const noexcept { return block != 0 ? block : n > 0 ? n : 1; }
  constexpr i64 code_bytes(i64 n) const noexcept { return (n * bits + 7) / 8; }
  constexpr i64 num_blocks(i64 n) const noexcept {
    // If the row is the block, even a row without elements has a scale.
    return block != 0 ? (n + block - 1) / block : 1;
  }
  DS_HOST_DEVICE constexpr float largest_code() const noexcept { return bits == 8 ? 127.0f : 7.0f; }
};

// Handling of the quantisation error e, if it is kept: x + scale e is quantised, and then e = decay scale e + (1 -
// decay) (quantised value - decoded value).
struct ErrorFeedback {
  float scale = 1;
  float decay = 0;
};

// Defines the scale of a block by its largest |x|. If that is not finite the scale is NaN, which marks the whole block.
// Never subnormal, so no quotient overflows; 1 for zeros if not exact. (Floats above 3.4e38 may decode to infinity.)
DS_HOST_DEVICE inline float block_scale(u32 max_abs_bits, CodeFormat format) noexcept {
  if (max_abs_bits >= 0x7F800000u) return std::bit_cast<float>(0x7FC00000u);
  const float scale = std::bit_cast<float>(max_abs_bits) / format.largest_code();
  if (format.exact) {
    constexpr u32 kMantissa = 0x007FFFFFu;
    return scale > 0x1p-24f ? std::bit_cast<float>((std::bit_cast<u32>(scale) + kMantissa) & ~kMantissa) : 0x1p-24f;
  }
  if (max_abs_bits == 0) return 1.0f;
  return scale > 0x1p-126f ? scale : 0x1p-126f;
}

// The scale of signs: the root mean square of n values, from the bits of the largest |x| and the sum of squares in
// units of that exponent. NaN if not finite, 0 for n = 0.
DS_HOST_DEVICE inline float sign_scale(i64 max_abs, ExactSum sum, i64 n) noexcept {
  const u32 bits = static_cast<u32>(max_abs);
  if (bits >= 0x7F800000u) return std::bit_cast<float>(0x7FC00000u);
  if (n == 0) return 0.0f;
  return static_cast<float>(std::sqrt(sum.value(ExactSum::exponent_of(bits)) / static_cast<double>(n)));
}

// The verdict on all gradients of an optimizer step: computed and read where the ops run, without the host.
struct GradVerdict {
  i64 finite = 1;        // 0: the step is skipped
  double norm = 0;       // of the mean gradient, unscaled; the largest |g| if that is not finite
  float grad_scale = 1;  // multiplies gradients: unscale and clip in one
};
struct JudgeParams {
  double divisor = 1;  // of the accumulated sums: loss scale times the remaining divisors of the mean
  double clip = 0;     // maximum norm; 0: no clipping
};
// Defines the verdict. max_abs: bits of the largest |g|; sum: of squares, in units of that exponent.
DS_HOST_DEVICE inline GradVerdict judge_gradients(i64 max_abs, ExactSum sum, const JudgeParams& p) noexcept {
  const u32 bits = static_cast<u32>(max_abs);
  if (bits >= 0x7F800000u) return {.finite = 0, .norm = static_cast<double>(std::bit_cast<float>(bits))};
  const double norm = std::sqrt(sum.value(ExactSum::exponent_of(bits))) / p.divisor;
  const double ratio = p.clip > 0 ? (norm + 1e-6) / p.clip : 1.0, too_long = ratio > 1.0 ? ratio : 1.0;
  return {.norm = norm, .grad_scale = static_cast<float>(1 / (p.divisor * too_long))};
}

// The ratio of norm_ratios for parameter k of K; `unit`: |w| is taken as 1.
DS_HOST_DEVICE inline float norm_ratio(const i64* largest, const i64* sums, i64 k, i64 K, float low, float high,
                                       bool unit) noexcept {
  double squares[2] = {1, 1};
  for (i64 which = unit ? 1 : 0; which < 2; ++which) {
    const i64 at = unit ? k : which * K + k;
    const ExactSum sum{sums[2 * at], sums[2 * at + 1]};
    squares[which] = sum.value(ExactSum::exponent_of(static_cast<u32>(largest[at])));
  }
  if (!(squares[0] > 0 && squares[1] > 0)) return 1;
  const float ratio = static_cast<float>(std::sqrt(squares[0] / squares[1]));
  return ratio < low ? low : ratio > high ? high : ratio;
}

// clang-format off
struct OpTable {
  std::string_view name;  // "ref", "cpu.avx512", ...

  // Puts a contiguous matrix [N,K] of the work dtype, or of codes in rows, in place into the form that panels_of() returns
  // for it; its view then has these panels. Null if the backend multiplies matrices in rows only.
  void (*pack_matrix)(TensorView m, Stream&) noexcept = nullptr;
  Panels panels{}, panels_bf16{};  // of fp32 and fp16, and of bf16 matrices
  bool codes = false;              // ops take matrices of codes where their contracts say so; others read them as numbers

  // c[M,N] = activation(op(a) op(b) + bias) + residual.  a, b: strided rows, one work dtype; c: strided rows, fp32 or that
  // dtype. bias [N] work dtype; preact [M,N], with c's dtype and free strides, receives the value before the activation;
  // residual [M,N], c's dtype, may alias c. bias, preact, residual are optional. Sums over K in fp32 in a fixed order. With
  // trans_b, and without trans_a, b may be in panels: then no bit differs, in CPU backends with products of their own.
  // Likewise b may be of codes (codes.h), in panels if the backend has them: its elements are decoded to a's dtype. If its
  // form asks for integers, groups of a's rows are codes q = rint(x / s) of s = block_scale(largest |x|), and a sum is, over
  // the groups in their order, y = fma(float(sum of products of codes), s * scale, y), with offsets also y = fma(offset,
  // float(sum of q) * s, y), in fp32, from -0 on. All backends agree bit for bit on y + bias, and on preact in fp32.
  void (*matmul)(TensorView c, TensorView a, TensorView b, TensorView bias, TensorView preact, TensorView residual,
                 const MatmulParams&, Stream&) noexcept;
  // out[N] = (accumulate ? out : 0) + sum over rows of x[R,N] (strided rows), rounded once to out's dtype (fp32 or x's): the
  // gradient of a bias.
  void (*column_sum)(TensorView out, TensorView x, bool accumulate, Stream&) noexcept;

  // Ba, Kiros, Hinton: "Layer Normalization". y, x [R,C]; weight, bias [C]; mean, rstd [R] fp32.
  void (*layernorm_fwd)(TensorView y, TensorView mean, TensorView rstd, TensorView x, TensorView weight, TensorView bias,
                        float eps, Stream&) noexcept;
  // dx = residual_grad + layernorm'(dy); residual_grad [R,C] optional; dx may alias it, or dy. Overwrites dweight and dbias
  // [C], of any work dtype (both the same).
  void (*layernorm_bwd)(TensorView dx, TensorView dweight, TensorView dbias, TensorView dy, TensorView residual_grad,
                        TensorView x, TensorView weight, TensorView mean, TensorView rstd, Stream&) noexcept;

  // Zhang, Sennrich: "Root Mean Square Layer Normalization". Like layernorm without mean and bias. y may alias x.
  // x rstd stays fp32 until it is multiplied by the weight; Hugging Face also rounds it to x's dtype first.
  void (*rmsnorm_fwd)(TensorView y, TensorView rstd, TensorView x, TensorView weight, float eps, Stream&) noexcept;
  void (*rmsnorm_bwd)(TensorView dx, TensorView dweight, TensorView dy, TensorView residual_grad, TensorView x,
                      TensorView weight, TensorView rstd, Stream&) noexcept;

  // Elementwise over [N] (any shape, contiguous). activation_bwd: dx = dy * activation'(x); dx may alias dy.
  void (*activation_fwd)(TensorView y, TensorView x, Activation, Stream&) noexcept;
  void (*activation_bwd)(TensorView dx, TensorView dy, TensorView x, Activation, Stream&) noexcept;
  // Shazeer: "GLU Variants Improve Transformer". y = silu(gate) * up. dgate may alias dy or gate, dup may alias up. All [R,F]
  // with strided rows, or contiguous of any shape.
  void (*swiglu_fwd)(TensorView y, TensorView gate, TensorView up, Stream&) noexcept;
  void (*swiglu_bwd)(TensorView dgate, TensorView dup, TensorView dy, TensorView gate, TensorView up, Stream&) noexcept;

  // Rotary embedding (Su et al., "RoFormer", 2021). y, x [B,T,H,D] strided, y may alias x; cos, sin [P,D/2] fp32;
  // positions [T] int32 index their rows.
  void (*rope)(TensorView y, TensorView x, TensorView cos, TensorView sin, TensorView positions, const RopeParams&,
               Stream&) noexcept;

  // y[R,C] = table[ids[r] - first_id] (+ y if accumulate). The table [V,C] contains rows first_id .. first_id + V - 1 of the
  // vocabulary; ids [R] int32. An id outside gives a row of zeros, or does not change y if accumulate, so the results of
  // all ranks add up to the whole lookup. The table may be in panels, or of codes.
  void (*embedding_fwd)(TensorView y, TensorView table, TensorView ids, i64 first_id, bool accumulate, Stream&) noexcept;
  // dtable[V,C] = (accumulate ? dtable : 0) + sum of dy rows by id, in row order within an id, rounded once. dtable: fp32 or
  // dy's dtype. Rows with an id outside the table are ignored; R may be 0. Deterministic: stable by id, no atomics.
  void (*embedding_bwd)(TensorView dtable, TensorView dy, TensorView ids, i64 first_id, bool accumulate, Stream&) noexcept;

  // Mixture of experts: E experts, k of them for each of R tokens. logits, scores [R,E], weights [R,k] fp32; chosen [R,k]
  // int32, in descending order of biased score; -1 is a choice that was dropped.
  //   route        scores (RouterParams), chosen, and weights: the scores of the chosen, in their order, normalised and
  //                scaled. bias [E] fp32, optional. noisy [R,E] fp32, optional: experts are chosen by these numbers instead,
  //                in one group and without bias; noisy_second: the first by its score, another one by these.
  //   weigh_choices weights of choices of which some were dropped: as in route, among those that are left; a sum below
  //                2^-23 counts as 2^-23. 0 for the others.
  //   route_grad   dlogits [R,E] fp32: the gradient of logits, with the choice held. dweights [R,k] fp32, those of dropped
  //                choices unused; those of the losses
  //                of RouterLossParams, multiplied by *factor [1] fp32: score_grad [E] fp32 is added to the gradient of p
  //                of each token that counts, stats (below) gives n for z. score_grad, stats, targets [R] int32 and factor
  //                are optional: no stats, no losses; no targets, all tokens count. dlogits may not alias.
  //   router_stats stats [RouterStats::size] fp32, overwritten: count_e; over tokens that count, the sum of p_e, then that of
  //                lse^2, in fp64 in an order fixed by R and E, rounded once; the count_e of first choices; the sum of the
  //                entropies of p, each rounded to 1/4096 nat: the whole nats, then the 4096ths; the choices that were dropped,
  //                which have no expert in kept [R,k] int32 (optional: none were). Counts and entropies are exact below 2^24.
  //                The terms of ranks and parts of sequences add up.
  //   router_loss  loss [1] fp32 = balance * balance loss + z * z loss of stats; score_grad [E] fp32 = the gradient of the
  //                former with respect to p_e of one token. n = 0: zeros. counts [E] fp32, optional: those of more tokens
  //                that the former compares, of first choices with first_choices: E / n * sum over e of the share of e
  //                in counts * (sum over tokens of p_e), for the n tokens and p of stats.
  void (*route)(TensorView chosen, TensorView weights, TensorView scores, TensorView logits, TensorView bias,
                TensorView noisy, const RouterParams&, Stream&) noexcept;
  void (*weigh_choices)(TensorView weights, TensorView chosen, TensorView scores, const RouterParams&, Stream&) noexcept;
  void (*route_grad)(TensorView dlogits, TensorView dweights, TensorView chosen, TensorView scores, TensorView logits,
                     TensorView score_grad, TensorView stats, TensorView targets, TensorView factor, const RouterParams&,
                     const RouterLossParams&, Stream&) noexcept;
  void (*router_stats)(TensorView stats, TensorView chosen, TensorView kept, TensorView scores, TensorView logits,
                       TensorView targets, const RouterParams&, const RouterLossParams&, Stream&) noexcept;
  void (*router_loss)(TensorView loss, TensorView score_grad, TensorView stats, TensorView counts, i64 k,
                      const RouterLossParams&, Stream&) noexcept;
  // bias_e += rate * sign(mean - count_e) (Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for
  // Mixture-of-Experts", 2024), where mean is that of counts [E]; nothing if the verdict is not finite. bias, counts fp32;
  // counts are integers below 2^24, so the sign is exact, and each new bias is rounded once.
  void (*balance_experts)(TensorView bias, TensorView counts, float rate, const GradVerdict* verdict, Stream&) noexcept;
  // kept [N,k] int32 = chosen [N,k], or -1 for choices that exceed the capacity of their expert. priority [N,k] fp32,
  // optional: all are equal; NaN is the lowest. Every expert keeps min(capacity, the number of its choices).
  void (*drop_choices)(TensorView kept, TensorView chosen, TensorView priority, const CapacityParams&, Stream&) noexcept;
  // y[i] of x[i] and u = uniform(rng, offset + i); y and x one work dtype. x is unused, and may be none, with Uniform. May
  // alias.
  void (*add_noise)(TensorView y, TensorView x, NoiseKind, float amount, RngKey rng, i64 offset, Stream&) noexcept;
  // Sorts the R k choices by expert; those of one expert stay in the order of tokens. chosen: first to first + E-1; another
  // number has no place. offsets [E+1] int32: expert first + e has places offsets[e] .. offsets[e+1] - 1. places [R,k]
  // int32: of each choice, or -1. tokens, choices [R k] int32: the token r and the choice r k + j at each place, -1 after
  // the last one.
  void (*sort_choices)(TensorView offsets, TensorView places, TensorView tokens, TensorView choices, TensorView chosen,
                       i64 first, Stream&) noexcept;
  // y[R,C] = residual + sum over j of weights[r,j] * x[places[r,j]], in the order of j, rounded once; x [M,C], y, residual
  // one work dtype, strided rows; weights and residual optional (1, 0). places [R,k] int32: below 0 adds nothing; optional:
  // place r k + j, of k = M / R. y may alias residual, and, without places and with k = 1, x.
  void (*combine_rows)(TensorView y, TensorView x, TensorView places, TensorView weights, TensorView residual,
                       Stream&) noexcept;
  // Its gradients: dx[places[r,j]] = weights[r,j] * dy[r], every other row of dx [M,C] stays; dweights [R,k] fp32 = the inner
  // product of dy[r] and x[places[r,j]], 0 without a place. places as in combine_rows. dx may alias x, and, without
  // places and with k = 1, dy.
  void (*combine_rows_grad)(TensorView dx, TensorView dweights, TensorView dy, TensorView x, TensorView places,
                            TensorView weights, Stream&) noexcept;
  // Products of groups of rows with a matrix each. offsets [G+1] int32, ascending, where the ops run: group g has rows
  // offsets[g] .. offsets[g+1] - 1 of M; G is a multiple of E, and group g uses matrix g % E. A group may be empty. Nothing
  // depends on the host knowing the offsets. They are optional: without, all M rows are one group, and E is 1. Batches of
  // matrices may be strided in both dims.
  //   grouped_matmul       c[i] = a[i] op(b[g % E]) for each row i of group g; c [M,N], a [M,K] strided rows; b [E,K,N], or
  //                        trans_b [E,N,K]; one work dtype, c also fp32. Rows of no group stay. The bits of a row of c depend
  //                        on that row of a and its matrix alone: neither on M nor on the rows beside it. With trans_b each
  //                        matrix of b may be of codes, as in matmul: one after the other, strides unused.
  //   grouped_matmul_grad  c[e] = (accumulate ? c[e] : 0) + sum over groups g with g % E = e of a_g^T b_g, where a_g [rows,N]
  //                        and b_g [rows,K] are the rows of group g; c [E,N,K] fp32 or work dtype, a [M,N], b [M,K]
  //                        strided rows. Sums in fp32 in an order fixed by the offsets, rounded once. No rows: 0, or
  //                        c stays.
  void (*grouped_matmul)(TensorView c, TensorView a, TensorView b, TensorView offsets, bool trans_b, Stream&) noexcept;
  void (*grouped_matmul_grad)(TensorView c, TensorView a, TensorView b, TensorView offsets, bool accumulate,
                              Stream&) noexcept;
  // The biases of such products, with the same groups.
  //   grouped_bias      y[i] += bias[g % E] for each row i of group g, rounded once; y [M,N] strided rows, bias [E,N]; one work
  //                     dtype. Rows of no group stay.
  //   grouped_bias_grad dbias[e] = (accumulate ? dbias[e] : 0) + sum over rows of its groups, in their order, of weights[i] *
  //                     dy[i], in fp32, rounded once; dbias [E,N] fp32 or work dtype, dy [M,N] strided rows, weights [M,1] fp32,
  //                     optional.
  void (*grouped_bias)(TensorView y, TensorView bias, TensorView offsets, Stream&) noexcept;
  void (*grouped_bias_grad)(TensorView dbias, TensorView dy, TensorView weights, TensorView offsets, bool accumulate,
                            Stream&) noexcept;

  // Dao et al.: "FlashAttention". q [B,T,H,D], k [B,S,G,D], v [B,S,G,Dv], o [B,T,H,Dv], all strided; H % G == 0, head h
  // reads group h/(H/G). Values may have another head dim than keys, as in multi-head latent attention (DeepSeek-AI,
  // "DeepSeek-V2", 2024). lse [B,H,T] fp32, strided = log-sum-exp of the scaled, masked scores. A row with no visible key gives o = 0, lse = +inf.
  // Also, k and v may both be int8 codes, contiguous, with scale [B,S,G] fp32 for each row and group: an element is code *
  // scale, rounded to the work dtype, and no bit differs from that of the decoded tensors.
  void (*attention_fwd)(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v, const AttentionParams&,
                        Stream&) noexcept;
  // dq like q, dk like k, dv like v, dout like o, each with strides of its own; the first three are overwritten. Uses o, lse of the forward pass. No T x S matrix is stored.
  // Also works by blocks: given o and lse over all keys (attention_merge), a call with some queries and some keys computes
  // their contributions to each other's gradients. The dq over all blocks of keys, and the dk and dv over all blocks of
  // queries, add up to the whole gradients; each part is rounded to the work dtype, so the caller adds them in fp32 (fold).
  void (*attention_bwd)(TensorView dq, TensorView dk, TensorView dv, TensorView dout, TensorView q, TensorView k,
                        TensorView v, TensorView o, TensorView lse, const AttentionParams&, Stream&) noexcept;

  // Merges attention over blocks of keys for the same queries: o [B,T,H,D] fp32 and lse [B,H,T] fp32 become the attention to
  // all blocks merged so far; o_part (work dtype) and lse_part are attention_fwd's results for one block. All are strided, so
  // a block may cover only some queries. first: o = o_part, lse = lse_part, without reading o and lse; rows with lse = +inf
  // are handled alike. A row without keys in the block (lse_part = +inf) does not change. Bits depend on the order of blocks.
  void (*attention_merge)(TensorView o, TensorView lse, TensorView o_part, TensorView lse_part, bool first,
                          Stream&) noexcept;

  // Attention with the two biases of an Evoformer block: row-wise over an MSA with pair bias, and around the starting or
  // ending node of a triangle (Jumper et al.: "Highly accurate protein structure prediction with AlphaFold", 2021,
  // supplementary algorithms 7, 13 and 14; DeepSpeed4Science's EvoformerAttention). Nothing of size N x T x T is stored.
  //   S = scale QK^T + bias1 + bias2, P = softmax over keys, O = P V, for each sequence n of each b and each head
  //   q, k, v, o, and dq, dk, dv, dout   [B*N,T,H,D] strided, b*N + n in the first dim
  //   lse     [B*N,H,T] fp32, strided: log-sum-exp of S minus the largest bias1 of (b,n), so that a mask of -1e9 over all
  //           keys, next to which fp32 cannot resolve scores, does not change their softmax
  //   bias1   [B*N,T] strided rows, by key (published as [B,N,1,1,T]); optional. A mask: 0, and -1e9 or -inf
  //   bias2   [B,H,T,T] strided, by query and key (published as [B,1,H,T,T]); optional
  //           Each bias is of the work dtype or fp32. A row in which all of S is -inf gives o = 0, lse = +inf.
  //   dbias1, dbias2   fp32, with the shapes of the biases, overwritten, optional: sums over heads and queries, and over n,
  //           in fp32 in an order fixed by the shapes. Each may be requested without its bias, which then counts as 0.
  void (*evoformer_attention_fwd)(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v, TensorView bias1,
                                  TensorView bias2, const EvoformerParams&, Stream&) noexcept;
  // Uses o, lse of the forward pass.
  void (*evoformer_attention_bwd)(TensorView dq, TensorView dk, TensorView dv, TensorView dbias1, TensorView dbias2,
                                  TensorView dout, TensorView q, TensorView k, TensorView v, TensorView o, TensorView lse,
                                  TensorView bias1, TensorView bias2, const EvoformerParams&, Stream&) noexcept;

  // Linear layer and softmax cross-entropy, chunked over tokens so that the full logits never exist.
  //   h [T,C], weight [V,C], bias [V] (optional) work dtype; targets [T] int32; losses [T] fp32 (0 where ignored); logits:
  //   workspace [chunk_tokens, V], fp32 or work dtype, to which logits are rounded. dh [T,C] work dtype, dweight [V,C] and
  //   dbias [V] fp32 (overwritten, but for add_dweight) are optional: without them only losses are computed, and weight may
  //   be in panels. Every chunk reads the whole weight (and adds to all of dweight), so chunks of less than about 256 tokens
  //   cost more than they save.
  void (*linear_cross_entropy)(TensorView losses, TensorView dh, TensorView dweight, TensorView dbias, TensorView h,
                               TensorView weight, TensorView bias, TensorView targets, TensorView logits,
                               const CrossEntropyParams&, Stream&) noexcept;

  // Softmax cross-entropy over a vocabulary that is cut into parts, one per rank. The caller computes the logits, reduces the
  // three numbers of each row over the parts, and computes the products with dz. z [R,V] fp32 or work dtype, strided rows: the logits of
  // ids first_id .. first_id + V - 1 for R tokens; targets [R] int32; max, sum, at_target, losses [R] fp32. With a single
  // part, losses and dz are those of linear_cross_entropy, on the CPU bit for bit.
  //   vocab_max   max = the largest logit of a row, -inf for none; ignores NaN, which reaches the sum instead.
  //   vocab_sums  given the maximum over all parts: sum = sum of e^(z - max); at_target = z[target] - max if this part
  //               contains the target, else 0; with label_smoothing s, (1 - s) times that + s/vocab * sum of (z - max). Both
  //               are 0 if the target is ignore_index.
  //   vocab_grad  given both, summed over all parts: losses = ln(sum) - at_target + z_loss lse^2, dz = grad_scale *
  //               ((1 + 2 z_loss lse) e^(z - max)/sum - (1 - s) onehot(target) - s/vocab), both 0 where ignored. dz [R,V]
  //               work dtype, strided rows: gradient_rows(z), which overwrites z, or other memory. Losses or dz optional.
  void (*vocab_max)(TensorView max, TensorView z, Stream&) noexcept;
  void (*vocab_sums)(TensorView sum, TensorView at_target, TensorView z, TensorView max, TensorView targets, i64 first_id,
                     const CrossEntropyParams&, Stream&) noexcept;
  void (*vocab_grad)(TensorView losses, TensorView dz, TensorView z, TensorView sum, TensorView at_target, TensorView max,
                     TensorView targets, i64 first_id, const CrossEntropyParams&, Stream&) noexcept;

  // Draws a token from each row of logits [n,V] fp32, strided rows, V < 2^23. `draws` has n entries, which refer to entries of
  // `changes`. most_likely [n] int32: the first of the largest logits before changes; tokens [n] int32: the token that is
  // drawn; both -1 if a logit of the row is not finite. Among equal logits lower ids come first. Probabilities are
  // integers (sampling.h) with exact sums, so all backends agree bit for bit, and a row's token depends only on the row; one
  // below 2^-40 of the largest counts as 0. If all ids are banned, the token is 0. The op changes logits in place, and
  // restores them.
  void (*sample)(TensorView tokens, TensorView most_likely, TensorView logits, const Draw* draws, LogitChange* changes,
                 Stream&) noexcept;

  // y = keep ? x/(1-p) : 0, keep iff uniform(rng, offset + i) >= p. The backward pass is the same call on dy. May alias.
  void (*dropout)(TensorView y, TensorView x, float p, RngKey rng, i64 offset, Stream&) noexcept;
  // y = a + b, one dtype; y may alias a or b.
  void (*add)(TensorView y, TensorView a, TensorView b, Stream&) noexcept;
  // y[R,C] = (x + bias) + residual, rounded once: the end of a linear map whose sums x [R,C] fp32 come from several ranks.
  // bias [C] and residual [R,C], both optional, have y's dtype. y may alias residual, and x if that is fp32 as well. y and
  // residual may have strided rows.
  void (*bias_residual)(TensorView y, TensorView x, TensorView bias, TensorView residual, Stream&) noexcept;
  // y = x converted. May alias if the dtypes are equal (then it is a copy).
  void (*cast)(TensorView y, TensorView x, Stream&) noexcept;
  // y[B,T,H,D] = x[B,T,H,D], both strided, any one dtype: packs, unpacks and permutes. Moves runs of D elements, or longer
  // ones if both tensors have them: put contiguous dims last, and dims that either tensor permutes before them.
  void (*copy_heads)(TensorView y, TensorView x, Stream&) noexcept;
  // x [1,T,G,D], strided: new keys, or values, of p.sequences; row r of sequence s becomes key key_of(s, r) in the pages of
  // `cache` [1,rows,G,D], contiguous. The cache has x's dtype, or int8 codes with scale [1,rows,G]: those of quantize with a
  // row and head as its block. Other members of p are ignored.
  void (*append_keys)(TensorView cache, TensorView x, const AttentionParams& p, Stream&) noexcept;
  // dst[N] fp32 = ((init + s0) + s1) + ... in order; init = dst if accumulate, else the fold starts with s0. sources: one or
  // more, all of one work dtype; dst may be any of them (same elements) if they are fp32.
  void (*fold)(TensorView dst, std::span<const TensorView> sources, bool accumulate, Stream&) noexcept;

  // Numbers as codes and scales, row by row: x, y [R,N], codes uint8 [R, code_bytes(N)], scales fp32 [R, num_blocks(N)], all
  // with strided rows, so that the codes and scales of a row may be adjacent. Every operation is rounded to fp32, none is
  // fused, and all backends agree bit for bit (except for the kind of NaN).
  //   quantize         8 or 4 bits, N > 0: scale = block_scale(largest |x| of the block), code = rint(x / scale), so that
  //                    |x - code*scale| <= scale/2. A block with a non-finite element has scale NaN and codes 0.
  //                    error [R,N] fp32, optional, strided rows: see ErrorFeedback; x above is then x + scale*error. The
  //                    error of a block that was not finite is 0. x work dtype.
  //   quantize_signs   y [N] fp32 -> codes [code_bytes(N)], scale [1] = sign_scale(max_abs [1], sum [2], n), for n elements
  //                    of which these N may be a part. y then contains the error, y -+ scale, or 0 if the scale is NaN.
  //   dequantize       y = code*scale, rounded to y's dtype. 1 bit: -scale or +scale. y work dtype.
  //   dequantize_fold  dst[N] fp32 = (accumulate ? dst : 0) + fold/divisor, fold = the sum of the rows' code*scale in fp32,
  //                    in ascending order of rows, starting with row 0.
  void (*quantize)(TensorView codes, TensorView scales, TensorView x, TensorView error, CodeFormat, ErrorFeedback,
                   Stream&) noexcept;
  void (*quantize_signs)(TensorView codes, TensorView scale, TensorView y, TensorView max_abs, TensorView sum, i64 n,
                         Stream&) noexcept;
  void (*dequantize)(TensorView y, TensorView codes, TensorView scales, CodeFormat, Stream&) noexcept;
  void (*dequantize_fold)(TensorView dst, TensorView codes, TensorView scales, bool accumulate, float divisor, CodeFormat,
                          Stream&) noexcept;

  // Products of numbers in 8 bits, with scales by block; formats, scales and memory: ds/kernels/fp8.h.
  //   quantize_fp8  the operand [R,K] of a product from x, [R,K] or, if transposed, [K,R]; strided rows, work dtype. codes and
  //                 scales have the shapes of Fp8Layout{R, K, blocks}; the dtype of codes, E4M3 or E5M2, chooses the format.
  //                 All backends agree bit for bit (except for the kind of NaN).
  //   matmul_fp8    c[M,N] = a b^T + bias + residual for operands a [M,K] and b [N,K], not both E5M2. c: strided rows, bf16 or
  //                 fp32; bias [N] bf16, residual [M,N] with c's dtype, which may alias c: both optional. The value of a code
  //                 times its scale is exact in `ref`. CPUs round it to fp32 and sum in fp32, a row of c with the same bits
  //                 among few rows and among many. Hopper's tensor cores sum codes of a block with about 14 bits, and
  //                 blocks in fp32: on other GPUs there is no such product.
  void (*quantize_fp8)(TensorView codes, TensorView scales, TensorView x, Fp8Blocks blocks, bool transposed,
                       Stream&) noexcept;
  void (*matmul_fp8)(TensorView c, TensorView a, TensorView a_scales, TensorView b, TensorView b_scales, TensorView bias,
                     TensorView residual, const Fp8MatmulParams&, Stream&) noexcept;

  // A matrix [R,K] bf16, both multiples of 128, that travels in parts as E4M3 codes of its squares. x [n], codes [n]:
  // elements [first, first + n) of the matrix, row by row, both multiples of 128 (Fp8Part). maxima [R/128, K/128] int64:
  // fp32 bit patterns of the largest |x| by square, from which scales follow (fp8_scale). All backends agree bit for bit
  // (except for the kind of NaN).
  //   max_abs_fp8  maxima = the largest |x| of each square among the elements of x; 0 where x has none
  //   encode_fp8   codes = those of x; maxima are of the whole matrix
  //   decode_fp8   x = the values of codes, exact; quantize_fp8 makes the same codes of them
  void (*max_abs_fp8)(TensorView maxima, TensorView x, i64 first, Stream&) noexcept;
  void (*encode_fp8)(TensorView codes, TensorView x, TensorView maxima, i64 first, Stream&) noexcept;
  void (*decode_fp8)(TensorView x, TensorView codes, TensorView maxima, i64 first, Stream&) noexcept;

  // Reductions to numbers that stay where the ops run: they accumulate into `result`, which the caller sets to zero.
  // result [1] int64 = max(result, the largest |x| as its fp32 bit pattern): NaN > inf > finite. x work dtype.
  void (*max_abs)(TensorView result, TensorView x, Stream&) noexcept;
  // flags [R] uint8 = 1 if a row of x [R,C] has a nonzero element (NaN counts), else 0. x work dtype.
  void (*nonzero_rows)(TensorView flags, TensorView x, Stream&) noexcept;
  // result [2] int64 (ExactSum) += the exact sum of squares of x in units of exponent_of(max_abs [1] int64); adds nothing if
  // that is not finite. Terms below 2^-50 of 2^(2*exponent) are rounded individually, so the sum does not depend on order
  // or partition.
  void (*sum_squares)(TensorView result, TensorView x, TensorView max_abs, Stream&) noexcept;
  // result [1] fp64 = factor * the sum of x [N] fp32 in fp64, in a fixed order.
  void (*sum)(TensorView result, TensorView x, double factor, Stream&) noexcept;
  // *verdict = judge_gradients(max_abs [1], sum [2]).
  void (*judge)(GradVerdict* verdict, TensorView max_abs, TensorView sum, const JudgeParams&, Stream&) noexcept;

  // y [N] = a*y + b*f*x, all fp32; f: *factor where the op runs, null: 1. a = 0: y is not read.
  void (*scaled_sum)(TensorView y, TensorView x, float a, float b, const float* factor, Stream&) noexcept;
  // LAMB's trust ratios of K parameters: factors [K] fp32 = clamp(|w| / |u|, low, high), 1 if either norm is 0. Norms are
  // given by largest [2,K] int64, as from max_abs, and sums [2,K,2] int64 (ExactSum): first all w, then all u. With [K] and
  // [K,2] they are those of u, and |w| is 1.
  void (*norm_ratios)(TensorView factors, TensorView largest, TensorView sums, float low, float high, Stream&) noexcept;

  // An optimizer's pass over all tensors of a step; does nothing if the verdict is not finite. Gradients are multiplied by
  // verdict.grad_scale (Descend: directions by their factor). Every operation is rounded, none is fused, so all backends
  // agree bit for bit; betas and 1 - beta are rounded to fp32 once. For example, AdamW:
  //   m = beta1*m + (1-beta1)*g;  v = beta2*v + ((1-beta2)*g)*g
  //   master = master - lr*((m/bias1) / (sqrt(v/bias2) + eps) + decay*master)
  void (*update)(std::span<const UpdateTensor> tensors, const GradVerdict* verdict, const UpdateParams&, Stream&) noexcept;
};
// clang-format on

const OpTable& ref_ops() noexcept;

// The form in which the products of a backend read matrices of this dtype fastest; none if it packs none.
inline Panels panels_of(const OpTable& ops, DType work, const CodedForm& codes = {}) noexcept {
  if (codes && ops.panels && codes.integer) return {ops.panels.rows, 4};
  return work == DType::BF16 ? ops.panels_bf16 : ops.panels;
}

// The CPU backend for one instruction set: "avx2", "avx512", "avx512_bf16", "amx", or "auto" (the best that this CPU
// supports, or the one named by DS_ISA); "onednn" is the engine of "amx" on any AVX-512 CPU. Null if the CPU does not
// support it or the name is unknown.
const OpTable* cpu_ops(std::string_view isa = "auto") noexcept;
inline constexpr std::string_view kCpuIsas[] = {"auto", "avx2", "avx512", "avx512_bf16", "amx", "onednn"};

// Ops that do nothing.
const OpTable& no_ops() noexcept;

// The worker scratch that ops reserve, determined without memory: scratch_ops() have the signatures of ops, compute
// nothing, and raise the ScratchMeter to which Stream::native points. They use only shapes, strides, dtypes and whether
// views have data. After the backend's ops have run with such arguments, a ThreadPool with that many threads holds
// threads * most bytes.
struct ScratchMeter {
  int threads = 1;  // set by the caller: tiles of matrix products depend on it
  i64 most = 0;     // bytes of one thread
};
// For the backend with this OpTable::name ("ref", "cpu.avx512"). Null for CUDA, and for backends that this CPU does not
// support.
const OpTable* scratch_ops(std::string_view backend) noexcept;

}  // namespace ds
