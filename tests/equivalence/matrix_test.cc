// SPDX-License-Identifier: Apache-2.0
// The matrix of everything that a run can choose about how it is cut, kept and rounded: each legal choice together with
// each other one in some case (a covering set, found here), and with DS_SLOW=1 all meshes with all ZeRO stages,
// schedules and granularities of checkpointing. Each case trains what one rank trains.

#include <algorithm>
#include <cstdlib>
#include <random>

#include "config/reader.h"
#include "equivalence/copies.h"
#include "equivalence/layouts.h"

namespace ds::testing {
namespace {

constexpr i64 kSteps = 20;

// Heads for 2, 3, 4, 6 and 8 ranks, parts for 8 stages.
ModelConfig gpt2_model() {
  ModelConfig c = tiny_gpt2();
  c.hidden = c.intermediate = 48;
  c.layers = 6;
  c.heads = c.kv_heads = 24;
  c.head_dim = 2;
  return c;
}
ModelConfig bert_model() {
  ModelConfig c = gpt2_model();
  c.family = Family::Bert;
  c.token_types = 2;
  c.activation = Activation::GeluErf;
  return c;
}
// Parts for 8 stages of two chunks; fewer key/value heads than ranks of tp.
ModelConfig llama_model() {
  ModelConfig c = tiny_llama();
  c.family = Family::Llama;
  c.qk_norm = false;
  c.hidden = 16;
  c.intermediate = 24;
  c.layers = 14;
  c.heads = 24;
  c.head_dim = 2;
  return c;
}
// 6 key/value heads: each of 4 ranks of tp cannot have its own, nor can 3 share one.
ModelConfig qwen3_model() {
  ModelConfig c = llama_model();
  c.family = Family::Qwen3;
  c.qk_norm = c.tie_embeddings = true;
  c.hidden = 20;
  c.layers = 6;
  c.kv_heads = 6;
  return c;
}

// Micro-batches per rank: fewer than stages, not a multiple of them, or twice as many.
enum class Batches : u8 { One, Odd, Twice };

struct Case {
  ModelConfig model = gpt2_model();
  Layout layout = {};
  DType type = DType::F32;
  ReduceOrder order = ReduceOrder::Micro;
  LossNorm norm = LossNorm::Micro;
  Batches batches = Batches::Twice;
  i64 length = 24;
  i64 vocab = 72;
  float dropout = 0;

  i64 micro_batches() const {
    return batches == Batches::One ? 1 : batches == Batches::Odd ? layout.pp + 1 : 2 * layout.pp;
  }
};

// The first choice of a dimension has no name where it is the plain one.
struct Choice {
  std::string name;
  void (*set)(Case&);
};
struct Dimension {
  std::string name;
  int num_whole;  // choices, from the first on, of which the full matrix has the product
  std::vector<Choice> choices;
};

template <int Layout::*axis>
std::vector<Choice> sizes() {
  return {{"1", [](Case& c) { c.layout.*axis = 1; }}, {"2", [](Case& c) { c.layout.*axis = 2; }},
          {"3", [](Case& c) { c.layout.*axis = 3; }}, {"4", [](Case& c) { c.layout.*axis = 4; }},
          {"6", [](Case& c) { c.layout.*axis = 6; }}, {"8", [](Case& c) { c.layout.*axis = 8; }}};
}

const std::vector<Dimension>& dimensions() {
  constexpr auto nothing = [](Case&) {};
  static const std::vector<Dimension> all = {
      {"",
       2,
       {{"gpt2", [](Case& c) { c.model = gpt2_model(); }},
        {"llama", [](Case& c) { c.model = llama_model(); }},
        {"qwen3", [](Case& c) { c.model = qwen3_model(); }},
        {"bert", [](Case& c) { c.model = bert_model(); }}}},
      {"dp", 6, sizes<&Layout::dp>()},
      {"pp", 6, sizes<&Layout::pp>()},
      {"tp", 6, sizes<&Layout::tp>()},
      {"",
       1,
       {{"", nothing},
        {"ulysses", [](Case& c) { c.layout.sp = 2; }},
        {"ring", [](Case& c) { c.layout.sp = 2, c.layout.mode = SequenceParallelMode::Ring; }}}},
      {"zero",
       4,
       {{"0", nothing},
        {"1", [](Case& c) { c.layout.stage = 1; }},
        {"2", [](Case& c) { c.layout.stage = 2; }},
        {"3", [](Case& c) { c.layout.stage = 3; }}}},
      {"",
       5,
       {{"", nothing},  // 1f1b
        {"naive", [](Case& c) { c.layout.schedule = Kind::Naive; }},
        {"gpipe", [](Case& c) { c.layout.schedule = Kind::GPipe; }},
        {"interleaved", [](Case& c) { c.layout.schedule = Kind::Interleaved, c.layout.chunks = 2; }},
        {"zbh1", [](Case& c) { c.layout.schedule = Kind::ZeroBubbleH1; }}}},
      {"keep",
       3,
       {{"", nothing},
        {"layer", [](Case& c) { c.layout.checkpoints = Granularity::Layer; }},
        {"selective", [](Case& c) { c.layout.checkpoints = Granularity::Selective; }},
        {"layer2", [](Case& c) { c.layout.checkpoints = Granularity::Layer, c.layout.interval = 2; }},
        {"cut", [](Case& c) { c.layout.checkpoints = Granularity::Layer, c.layout.partition = true; }}}},
      {"", 1, {{"", nothing}, {"rows", [](Case& c) { c.layout.sequence = true; }}}},
      {"",
       1,
       {{"", nothing},
        {"bf16", [](Case& c) { c.type = DType::BF16; }},
        {"fp16", [](Case& c) { c.type = DType::F16; }}}},
      {"", 1, {{"", nothing}, {"boundary", [](Case& c) { c.order = ReduceOrder::Boundary; }}}},
      {"", 1, {{"", nothing}, {"token", [](Case& c) { c.norm = LossNorm::Token; }}}},
      {"batches",
       1,
       {{"", nothing},
        {"one", [](Case& c) { c.batches = Batches::One; }},
        {"odd", [](Case& c) { c.batches = Batches::Odd; }}}},
      {"", 1, {{"", nothing}, {"dropout", [](Case& c) { c.dropout = 0.1f; }}}},
      {"vocab", 1, {{"", nothing}, {"67", [](Case& c) { c.vocab = 67; }}}},
      {"length", 1, {{"", nothing}, {"20", [](Case& c) { c.length = 20; }}, {"13", [](Case& c) { c.length = 13; }}}},
  };
  return all;
}

// The number of a choice in each dimension, or of some of them.
using Picks = std::vector<int>;
constexpr int kOpen = -1;

std::string name_of(const Picks& picks) {
  std::string name;
  for (size_t d = 0; d < picks.size(); ++d) {
    if (picks[d] == kOpen) continue;
    const Dimension& dimension = dimensions()[d];
    const std::string& choice = dimension.choices[static_cast<size_t>(picks[d])].name;
    if (!choice.empty()) name += fmt::format("{}{}{}", name.empty() ? "" : "_", dimension.name, choice);
  }
  return name;
}

Case case_of(const Picks& picks) {
  Case c;
  for (size_t d = 0; d < picks.size(); ++d) dimensions()[d].choices[static_cast<size_t>(picks[d])].set(c);
  return c;
}

Config config_of(const Case& a, const Layout& layout, i64 micro_batches) {
  ModelConfig model = a.model;
  model.vocab_size = a.vocab;
  model.attn_dropout = a.dropout;
  if (!model.rotary()) model.embd_dropout = model.resid_dropout = a.dropout;
  Config c = config_of(model, layout, micro_batches);
  c.bf16.enabled = a.type == DType::BF16;
  c.fp16.enabled = a.type == DType::F16;
  c.fp16.initial_scale_power = 8;
  c.communication_data_type = a.type;
  c.reduce_order = a.order;
  c.loss_norm = a.norm;
  c.data.seq_length = a.length;
  c.data.train = {"tokens.bin"};
  if (!model.causal()) c.data.mlm = {.mask_token = 0, .cls_token = 1, .sep_token = 2};
  c.steps = kSteps;
  return c;
}
Config config_of(const Case& a) { return config_of(a, a.layout, a.layout.dp * a.micro_batches()); }
Config config_of_one_rank(const Case& a) { return config_of(a, {}, a.layout.dp * a.micro_batches()); }

// What the library itself has against a case; empty: nothing. What would have no effect makes no case of its own.
std::string problem(const Case& a) {
  const Layout& l = a.layout;
  const int product = l.dp * l.pp * l.tp;
  if (product > 8 || product == 5 || product == 7 || product == 1 || l.ranks() > 8) return "not in the matrix";
  const Config config = config_of(a);
  std::vector<Diagnostic> against;
  {  // first what is quick
    static const ConfigText text("{}", "case", against);
    Config c = config;
    Reader reader(config_keys(), &c, text, "", against);
    resolve_parallel(c, l.ranks(), reader);
    check_parallel(c, true, ConfigUse::Train, reader);
  }
  if (!against.empty()) return to_string(against.front());
  const ConfigResult read = parse_config(resolved_json(config), "case", {}, l.ranks());
  if (!read.diagnostics.empty()) return to_string(read.diagnostics.front());
  if (read.config.pipeline.schedule != config.pipeline.schedule) return "pipeline.schedule has no effect";
  return "";
}

bool legal(const Picks& picks) {
  static std::map<Picks, bool> known;
  const auto [at, is_new] = known.try_emplace(picks);
  if (is_new) at->second = problem(case_of(picks)).empty();
  return at->second;
}

bool covers(const Picks& whole, const Picks& part) {
  for (size_t d = 0; d < part.size(); ++d) {
    if (part[d] != kOpen && part[d] != whole[d]) return false;
  }
  return true;
}

// All pairs of choices, and all meshes.
std::vector<Picks> to_be_covered() {
  const auto& all = dimensions();
  const auto count = [&](size_t d) { return static_cast<int>(all[d].choices.size()); };
  const auto axis = [&](const char* name) {
    return static_cast<size_t>(std::find_if(all.begin(), all.end(), [&](const auto& d) { return d.name == name; }) -
                               all.begin());
  };
  std::vector<Picks> parts;
  Picks part(all.size(), kOpen);
  for (size_t d = 0; d < all.size(); ++d) {
    for (size_t e = d + 1; e < all.size(); ++e) {
      for (part[d] = 0; part[d] < count(d); ++part[d]) {
        for (part[e] = 0; part[e] < count(e); ++part[e]) parts.push_back(part);
      }
      part[d] = part[e] = kOpen;
    }
  }
  const size_t dp = axis("dp"), pp = axis("pp"), tp = axis("tp");
  for (part[dp] = 0; part[dp] < count(dp); ++part[dp]) {
    for (part[pp] = 0; part[pp] < count(pp); ++part[pp]) {
      for (part[tp] = 0; part[tp] < count(tp); ++part[tp]) parts.push_back(part);
    }
  }
  return parts;
}

// A legal case with these choices, found by trying at random; nothing where none was.
std::optional<Picks> complete(const Picks& part, std::mt19937& random, int tries) {
  const auto& all = dimensions();
  for (int i = 0; i < tries; ++i) {
    Picks whole = part;
    for (size_t d = 0; d < whole.size(); ++d) {
      if (whole[d] == kOpen) whole[d] = static_cast<int>(random() % all[d].choices.size());
    }
    if (problem(case_of(whole)).empty()) return whole;
  }
  return {};
}

// Few cases with all of that which is legal: each begins with one part that is still to be covered, and is improved
// choice by choice as long as it covers more.
const std::vector<Picks>& covering_set() {
  static const std::vector<Picks> cases = [] {
    std::vector<Picks> found, open = to_be_covered();
    std::mt19937 random(1);
    const auto gain = [&](const Picks& whole) {
      return std::count_if(open.begin(), open.end(), [&](const Picks& part) { return covers(whole, part); });
    };
    while (!open.empty()) {
      const Picks part = open.back();
      std::optional<Picks> best = complete(part, random, 20'000);
      if (!best) {
        open.pop_back();
        continue;
      }
      i64 most = gain(*best);
      for (i64 before = 0; before < most;) {
        before = most;
        for (size_t d = 0; d < part.size(); ++d) {
          for (int c = 0; part[d] == kOpen && c < std::ssize(dimensions()[d].choices); ++c) {
            Picks other = *best;
            other[d] = c;
            if (const i64 covered = gain(other); covered > most && legal(other)) {
              best = other;
              most = covered;
            }
          }
        }
      }
      found.push_back(*best);
      std::erase_if(open, [&](const Picks& p) { return covers(*best, p); });
    }
    return found;
  }();
  return cases;
}

TEST(Covering, HasEveryPairOfChoicesThatIsLegal) {
  const std::vector<Picks>& cases = covering_set();
  i64 covered = 0, refused = 0, meshes = 0;
  std::mt19937 random(2);
  for (const Picks& part : to_be_covered()) {
    if (std::any_of(cases.begin(), cases.end(), [&](const Picks& whole) { return covers(whole, part); })) {
      ++covered;
      meshes += std::count(part.begin(), part.end(), kOpen) == std::ssize(part) - 3;
      continue;
    }
    ++refused;
    const std::optional<Picks> whole = complete(part, random, 50'000);
    EXPECT_FALSE(whole.has_value()) << name_of(part) << " as in " << name_of(*whole);
  }
  EXPECT_EQ(meshes, 31);  // of 2, 3, 4, 6 and 8 ranks
  fmt::print("{} cases have {} pairs and meshes; {} are refused\n", cases.size(), covered, refused);
}

class Matrix : public ::testing::TestWithParam<Picks> {};

const Trace& one_ranks_training(const Config& config) {
  static std::map<std::string, Trace> known;
  const auto [at, is_new] = known.try_emplace(resolved_json(config));
  if (is_new) at->second = train_threads(config, 1, kSteps);
  return at->second;
}

TEST_P(Matrix, TrainsAsOneRank) {
  const Case a = case_of(GetParam());
  const Layout& l = a.layout;
  const ConfigResult read = parse_config(resolved_json(config_of(a)), "case", {}, l.ranks());
  ASSERT_TRUE(read.ok()) << read.message();
  const std::string name = name_of(GetParam());
  Copies copies;
  Hooks hooks;
  hooks.after_step = [&](engine::Engine& engine, i64 step) {
    copies.check(engine, fmt::format("{} step {}", name, step));
    if (step == kSteps - 1) expect_planned_traffic(engine.mesh().counts(), engine.plan().traffic, kSteps, name);
  };
  const Trace got = train_threads(read.config, l.ranks(), kSteps, 1, hooks);
  const Trace& want = one_ranks_training(config_of_one_rank(a));
  EXPECT_LT(want.losses.back(), want.losses.front());
  const bool same_sums = l.tp * l.sp == 1 && (l.dp == 1 || a.order == ReduceOrder::Micro);
  if (same_sums) return expect_same_training(got, want, name);
  expect_close(got, want, name);
}

// Who computes when is all that a schedule decides, also where each stage is several ranks.
TEST(Schedules, AllGiveTheSameBits) {
  constexpr auto ring = SequenceParallelMode::Ring;
  i64 compared = 0;
  for (const Layout& mesh : {Layout{.pp = 2, .tp = 2},
                             {.pp = 2, .tp = 2, .sequence = true, .stage = 1},
                             {.pp = 2, .tp = 4, .stage = 2},
                             {.pp = 4, .tp = 2, .sequence = true},
                             {.dp = 2, .pp = 2, .tp = 2, .stage = 3},
                             {.pp = 2, .sp = 2, .stage = 3},
                             {.pp = 3, .sp = 2, .mode = ring, .stage = 1},
                             {.pp = 4, .sp = 2, .mode = ring},
                             {.dp = 2, .pp = 2, .sp = 2, .stage = 2},
                             {.pp = 2, .tp = 2, .sp = 2, .mode = ring, .stage = 3}}) {
    for (const ModelConfig& model : {gpt2_model(), llama_model()}) {
      for (const DType type : {DType::F32, DType::BF16}) {
        Case a{.model = model, .layout = mesh, .type = type};
        ASSERT_EQ(problem(a), "") << mesh.name();
        const Trace want = train_threads(config_of(a), mesh.ranks(), 3);
        for (const Kind schedule : {Kind::Naive, Kind::GPipe, Kind::Interleaved, Kind::ZeroBubbleH1}) {
          a.layout.schedule = schedule;
          a.layout.chunks = schedule == Kind::Interleaved ? 2 : 1;
          if (!problem(a).empty()) continue;
          expect_same_training(train_threads(config_of(a), mesh.ranks(), 3), want, a.layout.name());
          ++compared;
        }
      }
    }
  }
  EXPECT_GE(compared, 10 * 2 * 2 * 3);  // more where the model has parts for chunks
}

// DS_SLOW=1: all meshes x stages x schedules x granularities of the two models that the others are variations of, in
// fp32.
std::vector<Picks> all_cases() {
  std::vector<Picks> cases;
  if (std::getenv("DS_SLOW") == nullptr) return cases;
  std::vector<Picks> parts = {Picks(dimensions().size(), 0)};
  for (size_t d = 0; d < dimensions().size(); ++d) {
    const Dimension& dimension = dimensions()[d];
    const std::vector<Picks> before = std::exchange(parts, {});
    for (Picks part : before) {
      for (part[d] = 0; part[d] < dimension.num_whole; ++part[d]) parts.push_back(part);
    }
  }
  std::copy_if(parts.begin(), parts.end(), std::back_inserter(cases), legal);
  return cases;
}

std::string parameter_name(const ::testing::TestParamInfo<Picks>& test) { return name_of(test.param); }
INSTANTIATE_TEST_SUITE_P(Covering, Matrix, ::testing::ValuesIn(covering_set()), parameter_name);
INSTANTIATE_TEST_SUITE_P(All, Matrix, ::testing::ValuesIn(all_cases()), parameter_name);

}  // namespace
}  // namespace ds::testing
