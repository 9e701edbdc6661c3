// SPDX-License-Identifier: Apache-2.0
// A run that keeps its matrices as codes computes what the decoded matrices compute, at any layout.

#include "equivalence/layouts.h"
#include "equivalence/tiny_experts.h"
#include "expect_error.h"
#include "infer/session_plan.h"
#include "model/coded_rows.h"

namespace ds::testing {
namespace coded_weights_test {

using Form = WeightsConfig::Form;

// Rows of all matrices are whole groups of 32, on two ranks of tp too, but for the heads' (12 elements). The embedding
// is a matrix of its own.
ModelConfig sized(ModelConfig m) {
  m.vocab_size = 96;
  m.hidden = 64;
  m.heads = m.kv_heads = 4;
  m.head_dim = 16;
  m.intermediate = 128;
  m.max_positions = 64;
  return m;
}
ModelConfig model() { return sized(tiny_llama()); }

Config config_for(const ModelConfig& model, const Layout& l, DType work, const WeightsConfig& weights) {
  Config c = config_of(model, l, 4);
  c.bf16.enabled = work == DType::BF16;
  c.fp16.enabled = work == DType::F16;
  c.communication_data_type = wire_type_of(work);
  c.use = ConfigUse::Generate;
  c.data.seq_length = 40;
  c.weights = weights;
  return c;
}

Texts texts_of_run(engine::Engine& engine) {
  Texts given;
  for (const i32 length : {5, 1, 17, 3}) {
    std::vector<i32>& prompt = given.emplace_back();
    for (i32 t = 0; t < length; ++t) prompt.push_back((7 * length + 5 * t) % 61);
  }
  return texts_of(engine, given, {.max_tokens = 20, .sampling = {.temperature = 0.8, .seed = 3}});
}

// The values of a run's own weights after they were coded: what a run in the work dtype is given to compute the same.
engine::Engine::ValueSource decoded(engine::Engine& engine, const std::map<std::string, CodedForm>& forms) {
  return [&engine, &forms](i64 param, i64 begin, i64 count, float* out) {
    const model::ParamRow& row = engine.row_of(param);
    const auto form = forms.find(row.name);
    if (form == forms.end()) return engine.init_values(param, begin, count, out);
    // Groups lie along the inputs, which are the rows of GPT-2's matrices.
    const i64 K = row.in_out ? row.whole_shape().front() : row.whole_shape().back(), N = row.whole_numel() / K;
    const auto at = [&](i64 n, i64 k) { return row.in_out ? k * N + n : n * K + k; };
    std::vector<float> all(static_cast<size_t>(row.whole_numel())), x(static_cast<size_t>(K));
    engine.init_values(param, 0, row.whole_numel(), all.data());
    std::vector<u8> codes(static_cast<size_t>(form->second.row_bytes(K)));
    for (i64 n = 0; n < N; ++n) {
      for (i64 k = 0; k < K; ++k) x[k] = all[at(n, k)];
      model::encode_row(form->second, x, codes.data());
      for (i64 k = 0; k < K; ++k) all[at(n, k)] = form->second.element(codes.data(), {}, 1, K, 0, k);
    }
    std::copy_n(all.data() + begin, count, out);
  };
}

// The forms of a model's matrices.
std::map<std::string, CodedForm> forms_of(const Config& config) {
  model::Model m = model::make_model(config);
  model::store_as_codes(m, config);
  std::map<std::string, CodedForm> forms;
  for (const model::ParamRow* row : m.params()) {
    if (row->codes) forms[row->name] = row->codes;
  }
  return forms;
}

// Every matrix of products in one form.
WeightsConfig stored_in(const CodedForm& form) {
  WeightsConfig all{.form = Form::Int8};
  for (const auto& [name, unused] : forms_of(config_for(model(), {}, DType::F32, all))) all.stored[name] = form;
  all.form = Form::Stored;
  return all;
}

TEST(CodedWeights, ComputeWhatTheDecodedMatricesCompute) {
  std::vector<WeightsConfig> all;
  for (const Form form : {Form::Int8, Form::Int4}) all.push_back({.form = form});
  all.push_back(stored_in({.kind = CodeKind::Int4, .scales = DType::F16, .offsets = true, .group = 16}));
  all.push_back(stored_in({.kind = CodeKind::Int8, .scales = DType::F32, .group = 64}));
  for (const WeightsConfig& weights : all) {
    for (const DType work : {DType::F32, DType::BF16, DType::F16}) {
      const std::map<std::string, CodedForm> forms = forms_of(config_for(model(), {}, work, weights));
      EXPECT_EQ(forms.size(), 2u * 7 + 2) << weights.name();
      for (const Layout& l : {Layout{}, {.dp = 2}, {.dp = 2, .stage = 2}, {.pp = 2}, {.tp = 2}}) {
        if (work != DType::BF16 && l.ranks() > 1) continue;
        if (l.tp > 1 && weights.form == Form::Stored) continue;  // as the next test has it
        Texts coded, whole;
        with_engines(config_for(model(), l, work, weights), l.ranks(), [&](engine::Engine& engine) {
          Texts texts = texts_of_run(engine);
          if (engine.mesh().rank() == 0) coded = std::move(texts);
        });
        with_engines(config_for(model(), l, work, {.form = Form::Work}), l.ranks(), [&](engine::Engine& engine) {
          engine.set_weights(decoded(engine, forms));
          Texts texts = texts_of_run(engine);
          if (engine.mesh().rank() == 0) whole = std::move(texts);
        });
        EXPECT_EQ(coded, whole) << weights.name() << " " << dtype_name(work) << " " << l.name();
        EXPECT_EQ(coded.size(), 4u);
      }
    }
  }
}

// Those of GPT-2 are published as [in, out], and kept as their transposes.
TEST(CodedWeights, AreTransposesOfMatricesOfGpt2) {
  const ModelConfig gpt2 = sized(tiny_gpt2());
  for (const Form form : {Form::Int8, Form::Int4, Form::W8A8}) {
    const WeightsConfig weights{.form = form};
    for (const DType work : {DType::F32, DType::BF16}) {
      const std::map<std::string, CodedForm> forms = forms_of(config_for(gpt2, {}, work, weights));
      EXPECT_EQ(std::ssize(forms), 4 * gpt2.layers + 1);
      for (const Layout& l : {Layout{}, {.dp = 2, .stage = 1}, {.pp = 2}, {.tp = 2}}) {
        if ((form == Form::W8A8 && l.tp > 1) || (work == DType::F32 && l.ranks() > 1)) continue;
        Texts texts[2];
        for (const bool codes : {true, false}) {
          with_engines(config_for(gpt2, l, work, codes ? weights : WeightsConfig{.form = Form::Work}), l.ranks(),
                       [&](engine::Engine& engine) {
                         if (!codes) engine.set_weights(decoded(engine, forms));
                         Texts mine = texts_of_run(engine);
                         if (engine.mesh().rank() == 0) texts[codes ? 1 : 0] = std::move(mine);
                       });
        }
        EXPECT_EQ(texts[1].size(), 4u);
        // Integers code the other operand, too, which changes texts.
        if (form == Form::W8A8) {
          EXPECT_NE(texts[1], texts[0]) << l.name();
        } else {
          EXPECT_EQ(texts[1], texts[0]) << weights.name() << " " << l.name();
        }
      }
    }
  }
}

// Batches of matrices, too, which ranks may divide.
TEST(CodedWeights, AreThoseOfExperts) {
  ModelConfig experts = experts_test::tiny_experts();
  experts.vocab_size = 96;
  experts.hidden = 64;
  experts.heads = experts.kv_heads = 4;
  experts.head_dim = 16;
  experts.experts.intermediate = 32;
  experts.max_positions = 64;
  for (const WeightsConfig& weights :
       {WeightsConfig{.form = Form::Int8}, WeightsConfig{.form = Form::Int4}, WeightsConfig{.form = Form::W8A8},
        WeightsConfig{.form = Form::Int4, .integers = true}}) {
    const bool integers = weights.sums_integers();
    const std::map<std::string, CodedForm> forms = forms_of(config_for(experts, {}, DType::BF16, weights));
    EXPECT_EQ(
        std::ranges::count_if(forms, [](const auto& one) { return one.first.find("experts") != std::string::npos; }),
        2 * experts.layers);
    Texts whole;  // of the decoded matrices; integers are compared with those of one rank
    with_engines(config_for(experts, {}, DType::BF16, integers ? weights : WeightsConfig{.form = Form::Work}), 1,
                 [&](engine::Engine& engine) {
                   if (!integers) engine.set_weights(decoded(engine, forms));
                   whole = texts_of_run(engine);
                 });
    for (const int divided : {1, 2}) {
      for (const Layout& l : {Layout{}, {.dp = 2}}) {
        if (divided > l.dp) continue;
        Config config = config_for(experts, l, DType::BF16, weights);
        config.expert_parallel = {.enabled = divided > 1, .size = divided, .room = 8};
        with_engines(config, l.ranks(), [&](engine::Engine& engine) {
          const Texts coded = texts_of_run(engine);
          if (engine.mesh().rank() > 0) return;
          EXPECT_EQ(coded, whole) << weights.name() << " " << l.name() << " " << divided;
        });
      }
    }
  }
}

// Codes of a file are taken as they are; where a rank's part would cut a group, its values are.
TEST(CodedWeights, ComeFromFiles) {
  for (const i32 group : {16, 64, 128}) {
    const CodedForm form{.kind = CodeKind::Int4, .scales = DType::F16, .offsets = true, .group = group};
    WeightsConfig weights = stored_in(form);
    std::erase_if(weights.stored,
                  [&](const auto& one) { return group == 128 && one.first.find("down_proj") == std::string::npos; });
    Texts texts[2];
    for (const Layout& l : {Layout{}, {.tp = 2}}) {
      for (const bool copies : {true, false}) {
        if (!copies) weights.form = Form::Work;
        with_engines(config_for(model(), l, DType::BF16, weights), l.ranks(), [&](engine::Engine& engine) {
          const auto values = decoded(engine, weights.stored);
          engine.set_weights(values, [&](i64 param, i64 first, i64 count, void* out) {
            const model::ParamRow& row = engine.row_of(param);
            const i64 K = row.whole_shape().back();
            std::vector<float> x(static_cast<size_t>(K));
            for (i64 n = first; n < first + count; ++n) {
              engine.init_values(param, n * K, K, x.data());
              model::encode_row(form, x, static_cast<u8*>(out) + (n - first) * form.row_bytes(K));
            }
          });
          const i64 in_codes = std::ranges::count_if(
              engine.plan().params, [](const model::ParamRow* row) { return static_cast<bool>(row->codes); });
          EXPECT_EQ(in_codes, !copies                     ? 0
                              : group == 128 && l.tp == 2 ? 0
                              : group == 128              ? 2
                              : group == 64 && l.tp == 2  ? 14
                                                          : 16);
          Texts mine = texts_of_run(engine);
          if (engine.mesh().rank() == 0) texts[copies ? 1 : 0] = std::move(mine);
        });
        weights.form = Form::Stored;
      }
      EXPECT_EQ(texts[0], texts[1]) << group << " " << l.name();
    }
  }
}

// Also of codes of files, with offsets; and beside products that decode the same codes, to rounding.
TEST(CodedWeights, IntegersAreTheSameInEveryBatchAndStage) {
  WeightsConfig stored = stored_in({.kind = CodeKind::Int4, .scales = DType::F16, .offsets = true, .group = 16});
  stored.integers = true;
  for (const WeightsConfig& weights :
       {WeightsConfig{.form = Form::W8A8}, WeightsConfig{.form = Form::Int8, .integers = true},
        WeightsConfig{.form = Form::Int4, .integers = true}, stored}) {
    for (const auto& [name, form] : forms_of(config_for(model(), {}, DType::BF16, weights)))
      EXPECT_EQ(form.integer, name != "model.embed_tokens.weight") << name;
    Texts first;
    for (const Layout& l : {Layout{}, {.dp = 2}, {.pp = 2}}) {
      with_engines(config_for(model(), l, DType::BF16, weights), l.ranks(), [&](engine::Engine& engine) {
        const Texts together = texts_of_run(engine);
        if (engine.mesh().rank() > 0) return;
        if (first.empty()) first = together;
        EXPECT_EQ(together, first) << weights.name() << " " << l.name();
      });
    }
    if (weights.form == Form::W8A8) continue;
    WeightsConfig decodes = weights;
    decodes.integers = false;
    with_engines(config_for(model(), {}, DType::BF16, decodes), 1, [&](engine::Engine& engine) {
      EXPECT_NE(texts_of_run(engine), first) << weights.name() << ": the activations were not coded";
    });
  }
}

// A program may decode the matrices of a model that is published for integers.
TEST(CodedWeights, ProductsOfStoredCodesCanBeChosen) {
  WeightsConfig weights = stored_in({.kind = CodeKind::Int8, .scales = DType::F32, .integer = true, .group = 64});
  std::erase_if(weights.stored, [](const auto& one) { return one.first.find("down_proj") != std::string::npos; });
  EXPECT_TRUE(weights.sums_integers());
  weights.integers = false;
  EXPECT_FALSE(weights.sums_integers());
  const Config config = config_for(model(), {}, DType::BF16, weights);
  for (const auto& [name, form] : forms_of(config)) EXPECT_FALSE(form.integer) << name;
  model::Model m = model::make_model(config);
  model::store_as_codes(m, config);
  EXPECT_EQ(model::forms_of_matrices(m, DType::BF16),
            (std::map<std::string, i64>{{"bf16", 2}, {"int8, whole rows", 14}}));
  const WeightsConfig four{.form = Form::Int4, .integers = true};
  m = model::make_model(config);
  model::store_as_codes(m, config_for(model(), {}, DType::BF16, four));
  EXPECT_EQ(model::forms_of_matrices(m, DType::BF16),
            (std::map<std::string, i64>{{"int4, groups of 32, sums of integers", 14},
                                        {"int8, groups of 32", 1},
                                        {"int8, groups of 32, sums of integers", 1}}));
}

// Less memory by the difference of the forms, all of it planned.
TEST(CodedWeights, TakeThePlannedMemory) {
  for (const Layout& l : {Layout{}, {.dp = 2, .stage = 1}, {.tp = 2}}) {
    for (const Form form : {Form::Work, Form::Int8, Form::Int4, Form::W8A8}) {
      if (form == Form::W8A8 && l.tp > 1) continue;
      with_engines(config_for(model(), l, DType::BF16, {.form = form}), l.ranks(), [&](engine::Engine& engine) {
        texts_of_run(engine);
        const auto tag = static_cast<size_t>(Tag::Params);
        EXPECT_EQ(engine.ledger().peak(Tag::Params), engine.plan().memory.by_tag[tag]) << l.name();
        i64 bytes = 0;
        for (const model::ParamRow* row : engine.plan().params)
          bytes += row->codes ? row->shape[0] * row->codes.row_bytes(row->shape[1]) : row->numel() * 2;
        EXPECT_NEAR(static_cast<double>(engine.ledger().peak(Tag::Params)), static_cast<double>(bytes),
                    static_cast<double>(64 * 64 * engine.plan().params.size() / 4));
      });
    }
  }
}

TEST(CodedWeights, AreRefusedWhereProductsReadNone) {
  ModelConfig odd = of_four_heads(tiny_llama()), gpt2 = of_four_heads(tiny_gpt2());  // 48 elements in a row
  odd.max_positions = gpt2.max_positions = 64;
  ModelConfig experts = gpt2;  // batches of [in, out]
  experts.hidden = 64, experts.head_dim = 16;
  experts.experts = {.count = 4, .per_token = 2, .intermediate = 64, .plain = true};
  experts.experts.layers.assign(static_cast<size_t>(experts.layers), true);
  const auto forms = [](const ModelConfig& m) {
    return [&m] { forms_of(config_for(m, {}, DType::F32, {.form = Form::Int8})); };
  };
  expect_error(Errc::Config, ::testing::HasSubstr("no multiple of 32"), forms(odd));
  gpt2.vocab_size = 100, gpt2.hidden = 64, gpt2.head_dim = 16, gpt2.intermediate = 80;
  expect_error(Errc::Config, ::testing::HasSubstr("mlp.c_proj.weight: its columns of 80 elements"), forms(gpt2));
  expect_error(Errc::Config, ::testing::HasSubstr("read no codes"), forms(experts));
  WeightsConfig fp8 = stored_in({.kind = CodeKind::E4M3, .group = 32});
  fp8.integers = true;
  expect_error(Errc::Config, ::testing::HasSubstr("its codes are FP8 numbers"),
               [&] { forms_of(config_for(model(), {}, DType::F32, fp8)); });
  expect_error(Errc::Unavailable, ::testing::HasSubstr("--weights int4 --activations int8"), [&] {
    with_engines(config_for(model(), {.tp = 2}, DType::F32, {.form = Form::Int4, .integers = true}), 2,
                 [](engine::Engine&) {});
  });
  for (const Layout& l : {Layout{.tp = 2}, {.dp = 2, .stage = 3}}) {
    expect_error(Errc::Unavailable, ::testing::HasSubstr("w8a8"), [&] {
      with_engines(config_for(model(), l, DType::F32, {.form = Form::W8A8}), 2, [](engine::Engine&) {});
    });
  }
}

}  // namespace coded_weights_test
}  // namespace ds::testing
