// SPDX-License-Identifier: Apache-2.0
// Parts that a program brings: its model and samples instead of keys of the configuration, the checks of both, and how
// checkpoints know them again.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "base/json.h"
#include "config/model_config.h"
#include "data/data.h"
#include "ds/config.h"
#include "ds/log.h"
#include "examples/own_model.h"
#include "expect_error.h"
#include "model/models.h"
#include "run/run_data.h"

namespace ds {
namespace program_parts_test {

using ::testing::AllOf;
using testing::expect_error;
using ::testing::HasSubstr;

// A model of the program, or what `spoil` makes of it.
struct Spoilt final : model::Source {
  explicit Spoilt(std::function<void(model::Model&)> change, std::string given = "own")
      : spoil(std::move(change)), name(std::move(given)) {}
  std::string identity() const override { return name; }
  model::Model make(const ModelConfig& c, const model::Shard& shard) const override {
    model::Model m = own::MlpModel(name).make(c, shard);
    spoil(m);
    return m;
  }
  std::function<void(model::Model&)> spoil;
  std::string name;
};

ModelConfig own_model(
    std::function<void(model::Model&)> spoil = [](model::Model&) {}, std::string name = "own") {
  return {.vocab_size = 61,
          .hidden = 32,
          .layers = 2,
          .intermediate = 64,
          .max_positions = 64,
          .source = std::make_shared<Spoilt>(std::move(spoil), std::move(name))};
}

ConfigResult read(std::string_view text, const ProgramParts& parts, ConfigUse use = ConfigUse::Train) {
  return parse_config(text, "cfg", {}, 1, use, parts);
}
std::shared_ptr<const SampleSource> sequences(i64 n = 10, i64 vocab = 61) {
  return std::make_shared<own::Sequences>(n, vocab);
}

constexpr const char* kRun = R"({"steps": 3, "train_batch_size": 2})";

TEST(ProgramParts, StandForTheKeysThatDescribeThem) {
  EXPECT_FALSE(read(kRun, {}).ok());
  EXPECT_THAT(read(kRun, {.model = own_model()}).message(), HasSubstr("data.train: is missing"));
  EXPECT_THAT(read(kRun, {.samples = sequences()}).message(), HasSubstr("model: is missing"));
  const ConfigResult r = read(kRun, {.model = own_model(), .samples = sequences()});
  ASSERT_TRUE(r.ok()) << r.message();
  const Config& c = r.config;
  EXPECT_EQ(c.model.heads, 1);
  EXPECT_EQ(c.model.kv_heads, 1);
  EXPECT_EQ(c.model.head_dim, 32);
  EXPECT_EQ(c.data.seq_length, 64);
  EXPECT_EQ(c.data.split, 0);
  // The keys alone read back.
  const std::string text = resolved_json(c);
  EXPECT_FALSE(Json::parse(text).contains("model"));
  const ConfigResult again = read(text, {.model = own_model(), .samples = sequences()});
  ASSERT_TRUE(again.ok()) << again.message();
  EXPECT_EQ(resolved_json(again.config), text);
  const ConfigResult validated =
      read(kRun, {.model = own_model(), .samples = sequences(), .validation_samples = sequences()});
  EXPECT_TRUE(read(resolved_json(validated.config),
                   {.model = own_model(), .samples = sequences(), .validation_samples = sequences()})
                  .ok());
}

TEST(ProgramParts, ExcludeTheKeysThatDescribeThem) {
  const ProgramParts parts{.model = own_model(), .samples = sequences()};
  for (const char* key :
       {R"("model": {"type": "gpt2"})", R"("data": {"train": ["a.txt"]})", R"("data": {"validation": ["a.txt"]})",
        R"("data": {"split": 0.1})", R"("data": {"format": "text"})", R"("data": {"packing": "best_fit"})"}) {
    const ConfigResult r = read(fmt::format(R"({{"steps": 3, "train_batch_size": 2, {}}})", key), parts);
    EXPECT_FALSE(r.ok()) << key;
    EXPECT_THAT(r.message(), HasSubstr("leave out this")) << key;
  }
  EXPECT_THAT(read(R"({"steps": 3, "train_batch_size": 2, "eval": {"every": 1}})", parts).message(),
              HasSubstr("eval.every"));
}

// Samples that state their documents.
struct Halves final : SampleSource {
  i64 count() const override { return 4; }
  void sample(i64, RngKey, std::span<i32> inputs, std::span<i32> targets) const override {
    std::ranges::fill(inputs, 1);
    std::ranges::fill(targets, 1);
  }
  bool documents(i64, std::span<i32> begins) const override {
    const size_t half = begins.size() / 2;
    for (size_t t = 0; t < begins.size(); ++t) begins[t] = static_cast<i32>(t < half ? 0 : half);
    return true;
  }
  std::string identity() const override { return "halves"; }
};

TEST(ProgramParts, ThatDoNotStateTheDocumentsToSeparateAreWarnedOf) {
  const auto warnings = [](std::shared_ptr<const SampleSource> samples, const char* data) {
    const std::string text = fmt::format(R"({{"steps": 3, "train_batch_size": 2, "data": {{{}}}}})", data);
    const ConfigResult r = read(text, {.model = own_model(), .samples = std::move(samples)});
    EXPECT_TRUE(r.ok()) << r.message();
    std::string said;
    set_log_sink([&](LogLevel level, std::string_view line) {
      if (level == LogLevel::Warning) said += line;
    });
    run::open_data({.config = r.config, .ranks = {}, .options = {}}, 1);
    set_log_sink(nullptr);
    return said;
  };
  EXPECT_THAT(warnings(sequences(), R"("separate_documents": true)"),
              AllOf(HasSubstr("data.separate_documents: has no effect"), HasSubstr("5 id + 3 modulo 61")));
  EXPECT_EQ(warnings(sequences(), R"("document_token": 3)"), "");
  EXPECT_EQ(warnings(sequences(), ""), "");
  EXPECT_EQ(warnings(std::make_shared<Halves>(), R"("separate_documents": true)"), "");
}

TEST(ProgramParts, OfImpossibleModelsAreRefused) {
  const auto refused = [](const ModelConfig& m) { return read(kRun, {.model = m, .samples = sequences()}).message(); };
  EXPECT_THAT(refused(own_model({}, "gpt2")), HasSubstr("is the type of another model"));
  EXPECT_THAT(refused(own_model({}, "a/b")), HasSubstr("must be 1 to 64 of"));
  EXPECT_THAT(refused(own_model({}, "")), HasSubstr("must be 1 to 64 of"));
  ModelConfig m = own_model();
  m.layers = 0;
  EXPECT_THAT(refused(m), HasSubstr("layers of the program's model \"own\" must be 1 to"));
  m = own_model();
  m.heads = 3, m.kv_heads = 2;
  EXPECT_THAT(refused(m), HasSubstr("does not divide"));
  m.source = nullptr;
  expect_error(Errc::Config, HasSubstr("has no source"), [&] { refused(m); });
  expect_error(Errc::Config, HasSubstr("needs ProgramParts::samples"),
               [] { read(kRun, {.model = own_model(), .validation_samples = sequences()}); });
}

TEST(ProgramParts, AreHeldToTheContractOfModels) {
  const auto refused = [](std::string_view why, std::function<void(model::Model&)> spoil) {
    const ConfigResult r = read(kRun, {.model = own_model(std::move(spoil)), .samples = sequences()});
    expect_error(Errc::Config, AllOf(HasSubstr("the program's model \"own\""), HasSubstr(std::string(why))),
                 [&] { model::make_model(r.config); });
  };
  refused("it has 3 layers, and 2 blocks between an embedding and a head are 4",
          [](model::Model& m) { m.layers.erase(m.layers.begin() + 1); });
  refused("a layer is null", [](model::Model& m) { m.layers[1].reset(); });
  refused("and is no block", [](model::Model& m) { std::swap(m.layers[1], m.layers[3]); });
  refused("two parameters are called \"embedding.weight\"",
          [](model::Model& m) { m.shared = {m.layers[0]->rows()[0]}; });
  refused("has no elements", [](model::Model& m) { m.shared = {{.name = "x", .shape = {0}}}; });
  refused("the slice of x", [](model::Model& m) {
    m.shared = {{.name = "x", .shape = {2}, .whole = {2}, .slice = {.dim = 0, .ranges = {{1, 5}}}}};
  });
  refused("the shape of x", [](model::Model& m) {
    m.shared = {{.name = "x", .shape = {2}, .whole = {2}, .slice = {.dim = 0, .ranges = {{1, 2}}}}};
  });
  refused("is no second name", [](model::Model& m) { m.ties = {{"a", "b"}}; });
  EXPECT_EQ(std::ssize(model::make_model(read(kRun, {.model = own_model(), .samples = sequences()}).config).layers), 4);
}

TEST(ProgramParts, AreKnownAgainInCheckpoints) {
  const auto config = [](const ModelConfig& m) {
    return read(kRun, {.model = m, .samples = sequences()}).config.model;
  };
  const ModelConfig own = config(own_model()), other = config(own_model([](model::Model&) {}, "other"));
  const Json saved = Json::parse(model_config_json(own));
  std::string why;
  EXPECT_FALSE(known_model(saved, why));
  EXPECT_EQ(why, "");
  EXPECT_EQ(program_model(saved), "own");
  check_same_model(saved, own, "step");
  expect_error(Errc::Mismatch,
               HasSubstr("step: a checkpoint of another model: the model there is \"own\", and the model "
                         "here is \"other\""),
               [&] { check_same_model(saved, other, "step"); });
  ModelConfig wider = own;
  wider.intermediate = 128;
  expect_error(Errc::Mismatch, HasSubstr("64 there and 128 here"), [&] { check_same_model(saved, wider, "step"); });
  ModelConfig zoo = own;
  zoo.source = nullptr;
  expect_error(Errc::Mismatch, HasSubstr("here is none that a program brings"),
               [&] { check_same_model(saved, zoo, "step"); });
  expect_error(Errc::Mismatch, HasSubstr("there is none that a program brings"),
               [&] { check_same_model(Json::parse(model_config_json(zoo)), own, "step"); });
}

std::vector<i32> inputs_of(const BatchLoader& loader, i64 consumed, i64 rank, i64 micro, i64 T) {
  std::vector<i32> inputs(static_cast<size_t>(micro * T)), targets(inputs.size());
  loader.load(consumed, 0, rank, inputs, targets);
  return inputs;
}

TEST(ProgramSamples, AreShuffledAndSharedLikeThoseOfFiles) {
  constexpr i64 T = 4, kSamples = 12;
  const BatchLoader one(sequences(kSamples), {4, 1, T}, 7, 61);
  EXPECT_EQ(one.num_samples(), kSamples);
  std::set<i32> firsts;
  bool shuffled = false;
  for (i64 at = 0; at < kSamples; at += 4) {
    const std::vector<i32> all = inputs_of(one, at, 0, 4, T);
    for (i64 s = 0; s < 4; ++s) {
      firsts.insert(all[s * T]);
      shuffled |= all[s * T] != at + s;
    }
    for (const i64 ranks : {2, 4}) {
      const BatchLoader shared(sequences(kSamples), {4 / ranks, ranks, T}, 7, 61);
      for (i64 r = 0; r < ranks; ++r) {
        const std::vector<i32> part = inputs_of(shared, at, r, 4 / ranks, T);
        EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + r * std::ssize(part)));
      }
    }
  }
  EXPECT_EQ(std::ssize(firsts), kSamples);  // each once
  EXPECT_TRUE(shuffled);
  EXPECT_NE(inputs_of(one, 0, 0, 4, T), inputs_of(one, kSamples, 0, 4, T));  // the next epoch
}

// Its samples are numbers of the key.
struct Keyed final : SampleSource {
  i64 count() const override { return 3; }
  void sample(i64 k, RngKey key, std::span<i32> inputs, std::span<i32> targets) const override {
    std::ranges::fill(inputs, static_cast<i32>(key.bits(static_cast<u64>(k)) % 61));
    std::ranges::fill(targets, kIgnoredTarget);
  }
  std::string identity() const override { return "keyed"; }
};

TEST(ProgramSamples, GetAKeyOfTheEpoch) {
  const BatchLoader loader(std::make_shared<Keyed>(), {3, 1, 1}, 7, 61);
  const auto sorted = [&](i64 consumed) {
    std::vector<i32> values = inputs_of(loader, consumed, 0, 3, 1);
    std::ranges::sort(values);
    return values;
  };
  EXPECT_EQ(sorted(0), sorted(0));
  EXPECT_NE(sorted(0), sorted(3));
  std::vector<i32> once(3), twice(3), targets(3);
  EXPECT_EQ(loader.load_sequential(0, 0, once, targets), 3);
  loader.load_sequential(0, 0, twice, targets);
  EXPECT_EQ(once, twice);
}

TEST(ProgramSamples, OutsideTheVocabularyAreRefused) {
  const BatchLoader loader(sequences(10, 61), {2, 1, 8}, 7, 40);
  expect_error(Errc::Mismatch,
               AllOf(HasSubstr("5 id + 3 modulo 61"), HasSubstr("outside the model's vocabulary of 40")),
               [&] { inputs_of(loader, 0, 0, 2, 8); });
  expect_error(Errc::Config, HasSubstr("are 0"), [] { BatchLoader(sequences(0), {2, 1, 8}, 7, 61); });
}

TEST(ProgramSamples, AreKnownAgainWhenARunResumes) {
  const auto identity = [](i64 n, i64 vocab = 61, u32 seed = 7) {
    return BatchLoader(sequences(n, vocab), {2, 1, 8}, seed, 61).identity();
  };
  const DataIdentity saved = parse_data_identity(data_identity_json(identity(10)));
  check_same_data(saved, identity(10));
  expect_error(Errc::Mismatch,
               HasSubstr("the run was started with the samples '5 id + 3 modulo 61' of the program, and this one has "
                         "the samples '5 id + 3 modulo 59' of the program"),
               [&] { check_same_data(saved, identity(10, 59)); });
  expect_error(Errc::Mismatch, HasSubstr("are 11, but the run was started with 10"),
               [&] { check_same_data(saved, identity(11)); });
  expect_error(Errc::Mismatch, HasSubstr("data.seed"), [&] { check_same_data(saved, identity(10, 61, 8)); });
  DataIdentity file;
  file.files = {{"a.txt", 10, 1}};
  expect_error(Errc::Mismatch, HasSubstr("and this one has 1 data file"), [&] { check_same_data(saved, file); });
  expect_error(Errc::Mismatch, HasSubstr("was started with 1 data file"), [&] { check_same_data(file, saved); });
}

}  // namespace program_parts_test
}  // namespace ds
