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
namespace matrix_test {

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
  c.heads = 12;
  c.kv_heads = 6;
  c.head_dim = 4;
  return c;
}

// Micro-batches per rank: fewer than stages, not a multiple of them, or twice as many.
enum class Batches : u8 { One, Odd, Twice };

struct Case {
  ModelConfig model = gpt2_model();
  Layout layout = {};
  DType type = DType::F32;
  ReduceOrder order = ReduceOrder::Micro;
  bool fused = true;  // gradient_accumulation_fusion
  LossNorm norm = LossNorm::Micro;
  Batches batches = Batches::Twice;
  i64 length = 12;
  i64 vocab = 72;
  float dropout = 0;

  i64 micro_batches() const {
    return batches == Batches::One ? 1 : batches == Batches::Odd ? layout.pp + 1 : 2 * layout.pp;
  }
};

// The first choice of a dimension has no name where it is the plain one.
struct Choice {
  std::string name;
  std::function<void(Case&)> set;
};
struct Dimension {
  std::string name;
  int num_whole;  // choices, from the first on, of which the full matrix has the product
  std::vector<Choice> choices;
};

// All of 2, 3, 4, 6 and 8 ranks.
std::vector<Choice> meshes() {
  std::vector<Choice> all;
  for (const int ranks : {2, 3, 4, 6, 8}) {
    for (int dp = 1; dp <= ranks; ++dp) {
      for (int pp = 1; dp * pp <= ranks; ++pp) {
        const int tp = ranks / (dp * pp);
        if (dp * pp * tp != ranks) continue;
        all.push_back({fmt::format("dp{}_pp{}_tp{}", dp, pp, tp), [=](Case& c) {
                         c.layout.dp = dp;
                         c.layout.pp = pp;
                         c.layout.tp = tp;
                       }});
      }
    }
  }
  return all;
}

const std::vector<Dimension>& dimensions() {
  constexpr auto nothing = [](Case&) {};
  // clang-format off
  static const std::vector<Dimension> all = {
      {"model", 2, {{"gpt2", [](Case& c) { c.model = gpt2_model(); }},
                    {"llama", [](Case& c) { c.model = llama_model(); }},
                    {"qwen3", [](Case& c) { c.model = qwen3_model(); }},
                    {"bert", [](Case& c) { c.model = bert_model(); }}}},
      {"mesh", 31, meshes()},
      {"sp", 1, {{"", nothing},
                 {"ulysses", [](Case& c) { c.layout.sp = 2; }},
                 {"ring", [](Case& c) { c.layout.sp = 2, c.layout.mode = SequenceParallelMode::Ring; }}}},
      {"zero", 4, {{"zero0", nothing},
                   {"zero1", [](Case& c) { c.layout.stage = 1; }},
                   {"zero2", [](Case& c) { c.layout.stage = 2; }},
                   {"zero3", [](Case& c) { c.layout.stage = 3; }}}},
      {"schedule", 5, {{"", nothing},  // 1f1b
                       {"naive", [](Case& c) { c.layout.schedule = Kind::Naive; }},
                       {"gpipe", [](Case& c) { c.layout.schedule = Kind::GPipe; }},
                       {"interleaved", [](Case& c) { c.layout.schedule = Kind::Interleaved, c.layout.chunks = 2; }},
                       {"breadth-first", [](Case& c) { c.layout.schedule = Kind::BreadthFirst, c.layout.chunks = 2; }},
                       {"zbh1", [](Case& c) { c.layout.schedule = Kind::ZeroBubbleH1; }},
                       {"zbv", [](Case& c) { c.layout.schedule = Kind::ZeroBubbleV, c.layout.chunks = 2; }}}},
      {"checkpointing", 3, {{"", nothing},
                            {"layer", [](Case& c) { c.layout.checkpoints = Granularity::Layer; }},
                            {"selective", [](Case& c) { c.layout.checkpoints = Granularity::Selective; }},
                            {"layer2", [](Case& c) { c.layout.checkpoints = Granularity::Layer, c.layout.interval = 2; }},
                            {"cut", [](Case& c) { c.layout.checkpoints = Granularity::Layer, c.layout.partition = true; }}}},
      {"rows", 1, {{"", nothing}, {"rows", [](Case& c) { c.layout.sequence = true; }}}},
      {"type", 1, {{"", nothing},
                   {"bf16", [](Case& c) { c.type = DType::BF16; }},
                   {"fp16", [](Case& c) { c.type = DType::F16; }}}},
      {"order",
       1,
       {{"", nothing},
        {"boundary", [](Case& c) { c.order = ReduceOrder::Boundary; }},
        {"apart", [](Case& c) { c.order = ReduceOrder::Boundary, c.fused = false; }}}},
      {"norm", 1, {{"", nothing}, {"token", [](Case& c) { c.norm = LossNorm::Token; }}}},
      {"batches", 1, {{"", nothing},
                      {"one", [](Case& c) { c.batches = Batches::One; }},
                      {"odd", [](Case& c) { c.batches = Batches::Odd; }}}},
      {"dropout", 1, {{"", nothing}, {"dropout", [](Case& c) { c.dropout = 0.1f; }}}},
      {"vocab", 1, {{"", nothing}, {"vocab67", [](Case& c) { c.vocab = 67; }}}},
      {"length", 1, {{"", nothing},
                     {"length20", [](Case& c) { c.length = 20; }},
                     {"length13", [](Case& c) { c.length = 13; }}}},
  };
  // clang-format on
  return all;
}

// The number of a choice in each dimension.
using Picks = std::vector<int>;

std::string name_of(const Picks& picks) {
  std::string name;
  for (size_t d = 0; d < picks.size(); ++d) {
    const std::string& choice = dimensions()[d].choices[picks[d]].name;
    if (!choice.empty()) name += (name.empty() ? "" : "_") + choice;
  }
  return name;
}

Case case_of(const Picks& picks) {
  Case c;
  for (size_t d = 0; d < picks.size(); ++d) dimensions()[d].choices[picks[d]].set(c);
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
  c.communication_data_type = wire_type_of(a.type);
  c.reduce_order = a.order;
  c.gradient_accumulation_fusion = a.fused;
  c.loss.norm = a.norm;
  c.optimizer.lr = 1e-3;
  c.gradient_clipping = 0.5;
  c.data.seq_length = a.length;
  c.data.train = {"tokens.bin"};
  if (!model.causal()) c.data.mlm = {.mask_token = 0, .cls_token = 1, .sep_token = 2};
  c.steps = kSteps;
  return c;
}
Config config_of(const Case& a) { return config_of(a, a.layout, a.layout.dp * a.micro_batches()); }
Config config_of_one_rank(const Case& a) { return config_of(a, {}, a.layout.dp * a.micro_batches()); }

// The library's objection to a case, or an empty string. A setting that would have no effect is an objection, too.
std::string problem(const Case& a) {
  const Layout& l = a.layout;
  if (l.ranks() > 8) return "more than 8 ranks";
  if (l.pp == 1 && l.schedule != Kind::OneFOneB) return "a schedule without stages";
  const Config config = config_of(a);
  std::vector<Diagnostic> against;
  {  // first what is quick
    static const ConfigText text("{}", "case", against);
    Config c = config;
    Reader reader(config_keys(), &c, text, "", against);
    const i64 replicas = resolve_parallel(c, l.ranks(), reader);
    check_parallel(c, replicas / c.optimizer.diloco.workers, reader);
  }
  if (against.empty()) against = parse_config(resolved_json(config), "case", {}, l.ranks()).diagnostics;
  return against.empty() ? "" : to_string(against.front());
}

bool legal(const Picks& picks) { return problem(case_of(picks)).empty(); }

// Something to be covered: the choices of each dimension with which a case has it, as bits.
struct Part {
  std::string name;
  std::vector<u64> choices;

  bool in(const Picks& picks) const {
    for (size_t d = 0; d < picks.size(); ++d) {
      if ((choices[d] >> picks[d] & 1) == 0) return false;
    }
    return true;
  }
};

// Pairs of choices, where the axes of a mesh count as three, and all meshes.
std::vector<Part> to_be_covered() {
  const auto& all = dimensions();
  struct Trait {
    std::string name;
    std::string group;  // a part has one trait of a group
    size_t dimension;
    u64 choices;
  };
  std::vector<Trait> traits;
  for (size_t d = 0; d < all.size(); ++d) {
    for (size_t c = 0; c < all[d].choices.size(); ++c) {
      const u64 bit = u64{1} << c;
      const Choice& choice = all[d].choices[c];
      if (all[d].name != "mesh") {
        traits.push_back({fmt::format("{} {}", all[d].name, choice.name), all[d].name, d, bit});
        continue;
      }
      Case a;
      choice.set(a);
      for (const auto& [axis, size] : {std::pair{"dp", a.layout.dp}, {"pp", a.layout.pp}, {"tp", a.layout.tp}}) {
        const std::string name = fmt::format("{} {}", axis, size);
        const auto known = std::ranges::find(traits, name, &Trait::name);
        if (known == traits.end()) {
          traits.push_back({name, axis, d, bit});
        } else {
          known->choices |= bit;
        }
      }
      traits.push_back({choice.name, "mesh", d, bit});
    }
  }
  std::vector<Part> parts;
  for (auto a = traits.begin(); a != traits.end(); ++a) {
    Part one{a->name, std::vector<u64>(all.size(), ~u64{0})};
    one.choices[a->dimension] = a->choices;
    if (a->group == "mesh") {
      parts.push_back(std::move(one));
      continue;
    }
    for (auto b = traits.begin(); b != a; ++b) {
      if (b->group == a->group || b->group == "mesh") continue;
      Part both = one;
      both.name += " with " + b->name;
      both.choices[b->dimension] &= b->choices;
      if (both.choices[b->dimension] != 0) parts.push_back(std::move(both));
    }
  }
  return parts;
}

// A legal case that has the part, found by trying at random; nothing where none was.
std::optional<Picks> complete(const Part& part, std::mt19937& random, int tries) {
  const auto& all = dimensions();
  Picks whole(all.size());
  for (int i = 0; i < tries; ++i) {
    for (size_t d = 0; d < whole.size(); ++d) {
      do {
        whole[d] = static_cast<int>(random() % all[d].choices.size());
      } while ((part.choices[d] >> whole[d] & 1) == 0);
    }
    if (legal(whole)) return whole;
  }
  return {};
}

// Few cases with all parts that are legal: each begins with one that is still to be covered, and is changed choice by
// choice as long as it covers more.
const std::vector<Picks>& covering_set() {
  static const std::vector<Picks> cases = [] {
    std::vector<Picks> found;
    std::vector<Part> open = to_be_covered();
    std::mt19937 random(1);
    const auto gain = [&](const Picks& whole) {
      return std::count_if(open.begin(), open.end(), [&](const Part& part) { return part.in(whole); });
    };
    while (!open.empty()) {
      std::optional<Picks> best = complete(open.back(), random, 1000);
      if (!best) {
        open.pop_back();
        continue;
      }
      i64 most = gain(*best);
      for (i64 before = 0; before < most;) {
        before = most;
        for (size_t d = 0; d < best->size(); ++d) {
          for (int c = 0; c < std::ssize(dimensions()[d].choices); ++c) {
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
      std::erase_if(open, [&](const Part& part) { return part.in(*best); });
    }
    return found;
  }();
  return cases;
}

TEST(Covering, HasEveryPairOfChoicesThatIsLegal) {
  const std::vector<Picks>& cases = covering_set();
  const std::vector<Part> parts = to_be_covered();
  i64 refused = 0;
  std::mt19937 random(2);
  for (const Part& part : parts) {
    if (std::any_of(cases.begin(), cases.end(), [&](const Picks& whole) { return part.in(whole); })) continue;
    ++refused;
    const std::optional<Picks> whole = complete(part, random, 5000);
    EXPECT_FALSE(whole.has_value()) << part.name << ", as in " << name_of(*whole);
  }
  fmt::print("{} cases have {} pairs and meshes; {} pairs are refused\n", cases.size(), std::ssize(parts) - refused,
             refused);
}

class Matrix : public ::testing::TestWithParam<Picks> {};

const Trace& one_ranks_training(const Config& config) {
  static std::map<std::string, Trace> known;
  const auto [at, is_new] = known.try_emplace(resolved_json(config));
  if (is_new) at->second = train_threads(config, 1, kSteps);
  return at->second;
}

// In fp32 as promised (measured: 1e-7 of the loss, 6e-8 of the norm). In 16 bit a sum over ranks is rounded elsewhere,
// and 20 steps make that grow: three times what was measured, and of later norms nothing. Most of it comes in the last
// steps, after gradients of many times the clipped norm.
Tolerance tolerance_of(DType type) {
  constexpr double any = std::numeric_limits<double>::infinity();
  if (type == DType::F32) return {.loss = 1e-5, .first_norm = 1e-5, .norm = 1e-3};
  if (type == DType::F16) return {.loss = 1e-3, .late_loss = 6e-3, .first_norm = 5e-4, .norm = any};
  return {.loss = 1e-2, .first_norm = 7e-3, .norm = any};
}

TEST_P(Matrix, TrainsAsOneRank) {
  const Case a = case_of(GetParam());
  const Layout& l = a.layout;
  const std::string name = name_of(GetParam());
  Copies copies;
  Hooks hooks;
  hooks.after_step = [&](engine::Engine& engine, i64 step) {
    copies.check(engine, fmt::format("{} step {}", name, step));
    if (step == kSteps - 1) expect_planned_traffic(engine.mesh().counts(), engine.plan().traffic.last, kSteps, name);
  };
  const Trace got = train_threads(config_of(a), l.ranks(), kSteps, 1, hooks);
  if (l.checkpoints == Granularity::Layer) {  // wherever what is kept waits; what stays in buffers does not go
    Config in_file = config_of(a);
    in_file.activation_checkpointing.nvme_path = ::testing::TempDir();
    in_file.activation_checkpointing.buffer_count = 1;
    expect_same_training(train_threads(in_file, l.ranks(), kSteps, 1, hooks), got, name + " in a file");
  }
  const Trace& want = one_ranks_training(config_of_one_rank(a));
  EXPECT_LT(want.losses.back(), want.losses.front());
  EXPECT_GT(want.norms.front(), 0.5);  // it is clipped
  const bool same_sums = l.tp * l.sp == 1 && (l.dp == 1 || a.order == ReduceOrder::Micro);
  if (same_sums) return expect_same_training(got, want, name);
  expect_close(got, want, name, tolerance_of(a.type));
}

// A schedule decides only which rank computes when, also if each stage is several ranks.
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
      Case a{.model = model, .layout = mesh, .type = mesh.stage % 2 == 0 ? DType::BF16 : DType::F32};
      ASSERT_EQ(problem(a), "") << mesh.name();
      const Trace want = train_threads(config_of(a), mesh.ranks(), 2);
      for (const Kind schedule : {Kind::Naive, Kind::GPipe, Kind::Interleaved, Kind::ZeroBubbleH1, Kind::ZeroBubbleV}) {
        a.layout.schedule = schedule;
        a.layout.chunks = schedule == Kind::Interleaved || schedule == Kind::ZeroBubbleV ? 2 : 1;
        if (!problem(a).empty()) continue;
        expect_same_training(train_threads(config_of(a), mesh.ranks(), 2), want, a.layout.name());
        ++compared;
      }
    }
  }
  EXPECT_GE(compared, 10 * 2 * 3);  // and where the model has parts for chunks
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

}  // namespace matrix_test
}  // namespace ds::testing
