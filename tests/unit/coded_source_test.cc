// SPDX-License-Identifier: Apache-2.0
// Matrices that packages of PyPI have stored as codes (golden/make_coded.py): elements in any range and order, and
// codes that stand for the same bits; parts that are missing or do not agree.

#include "formats/coded_source.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "checkpoint/expert_names.h"
#include "checkpoint/match_weights.h"
#include "coded_model.h"
#include "ds/model_config.h"
#include "expect_error.h"
#include "model/models.h"
#include "temp_directory.h"
#include "test_data.h"

namespace ds {
namespace coded_source_test {

using ::testing::AllOf;
using testing::CodedModel;
using testing::expect_error;
using testing::expect_refused;
using ::testing::HasSubstr;
using testing::TempDirectory;
using testing::test_data;
using testing::write_file;

std::vector<float> elements(const TensorSource& source, const std::string& name) {
  std::vector<float> out(static_cast<size_t>(source.at(name).numel()), -1);
  EXPECT_EQ(source.at(name).dtype, DType::F32) << name;
  source.read(name, 0, std::ssize(out), out.data());
  return out;
}

// All codes of a matrix, read in pieces of rows; and their elements.
std::vector<float> elements_of_codes(const TensorSource& source, const std::string& name) {
  const TensorInfo& t = source.at(name);
  const CodedForm form = source.codes_of(name);
  const i64 cols = t.shape.back(), rows = t.numel() / cols, row_bytes = form.row_bytes(cols);
  std::vector<u8> codes(static_cast<size_t>(rows * row_bytes)), again(codes.size() + 1, 0xAA);
  source.read_codes(name, 0, rows, codes.data());
  for (i64 row = 0; row < rows; row += 3)
    source.read_codes(name, row, std::min<i64>(3, rows - row), again.data() + row * row_bytes);
  EXPECT_EQ(again.back(), 0xAA) << name;
  again.pop_back();
  EXPECT_EQ(codes, again) << name;
  std::vector<float> out;
  for (i64 n = 0; n < rows; ++n)
    for (i64 k = 0; k < cols; ++k) out.push_back(form.element(codes.data(), {}, rows, cols, n, k));
  return out;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

constexpr CodedForm kNone;
constexpr CodedForm form(CodeKind kind, DType scales, i32 group, bool offsets = false, bool integer = false) {
  return {.kind = kind, .scales = scales, .offsets = offsets, .integer = integer, .group = group};
}

struct Stored {
  const char* name;
  CodedForm form;
};
struct CodedFiles : ::testing::TestWithParam<Stored> {};

TEST_P(CodedFiles, HaveTheElementsAndCodesOfTheirOwnReader) {
  const std::string dir = test_data(std::string("coded/") + GetParam().name);
  const auto source = open_source(dir), expected = open_source(dir + "/expected.safetensors");
  ASSERT_EQ(source->list().size(), expected->list().size());
  std::mt19937 rng(5);
  for (const TensorInfo& want : expected->list()) {
    const TensorInfo& t = source->at(want.name);
    ASSERT_EQ(t.shape, want.shape) << t.name;
    if (t.name == "plain.weight") {
      EXPECT_EQ(t.dtype, DType::F16);
      EXPECT_EQ(source->codes_of(t.name), kNone);
      expect_error(Errc::Mismatch, HasSubstr("'plain.weight' is not stored as codes"),
                   [&] { source->read_codes(t.name, 0, 1, nullptr); });
      continue;
    }
    const std::vector<float> all = elements(*source, t.name), reference = elements(*expected, t.name);
    for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], reference[i]) << t.name << " " << i;
    for (int round = 0; round < 40; ++round) {
      const auto first = static_cast<i64>(rng() % all.size());
      const i64 count = 1 + static_cast<i64>(rng() % (all.size() - static_cast<size_t>(first)));
      std::vector<float> part(static_cast<size_t>(count));
      source->read(t.name, first, count, part.data());
      ASSERT_TRUE(same_bits(part, {all.begin() + first, all.begin() + first + count})) << t.name << " " << first;
    }
    if (GetParam().name == std::string("ct-mixed")) continue;
    EXPECT_EQ(source->codes_of(t.name), GetParam().form) << t.name;
    if (!GetParam().form) continue;
    EXPECT_TRUE(same_bits(elements_of_codes(*source, t.name), all)) << t.name;
  }
}

constexpr CodeKind kInt4 = CodeKind::Int4, kInt8 = CodeKind::Int8, kE4M3 = CodeKind::E4M3;
constexpr DType kF16 = DType::F16, kBf16 = DType::BF16, kF32 = DType::F32;
INSTANTIATE_TEST_SUITE_P(, CodedFiles,
                         ::testing::ValuesIn(std::vector<Stored>{
                             {"gptq-4-32", form(kInt4, kF16, 32)},
                             {"gptq-4-all", form(kInt4, kF16, 256)},
                             {"gptq-8-128", form(kInt8, kF16, 128)},
                             {"gptq-4-64-zeros", form(kInt4, kF16, 64, true)},
                             {"gptq-8-32-zeros", form(kInt8, kF16, 32, true)},
                             {"gptq-4-32-v2", form(kInt4, kF16, 32, true)},
                             {"gptq-4-128-order", kNone},
                             {"gptq-8-64-zeros-order", kNone},
                             {"gptq-4-96-ragged", kNone},
                             {"gptq-4-32-misnamed", form(kInt4, kF16, 32)},
                             {"awq-32", form(kInt4, kF16, 32, true)},
                             {"awq-128", form(kInt4, kF16, 128, true)},
                             {"awq-all", form(kInt4, kF16, 128, true)},
                             {"ct-4-32", form(kInt4, kBf16, 32)},
                             {"ct-4-32-zeros", form(kInt4, kBf16, 32, true)},
                             {"ct-4-32-zeros-fp32", form(kInt8, kF32, 32)},
                             {"ct-4-channel", kNone},  // of 77 columns
                             {"ct-8-80", form(kInt8, kF16, 80)},
                             {"ct-8-channel-zeros", form(kInt8, kBf16, 96, true)},
                             {"ct-int8-dynamic", form(kInt8, kBf16, 112, false, true)},
                             {"ct-int8-tensor", form(kInt8, kBf16, 160, false, true)},
                             {"ct-int8-zeros", form(kInt8, kBf16, 160, true)},
                             {"ct-int8-zeros-fp32", kNone},  // differences of 9 bits
                             {"ct-fp8-channel", form(kE4M3, kBf16, 160)},
                             {"ct-fp8-tensor", form(kE4M3, kBf16, 160)},
                             {"ct-fp8-block", form(kE4M3, kBf16, 80)},
                             {"ct-fp8-block-ragged", kNone},
                             {"ct-mixed", kNone},
                             {"ct-4-order", kNone}}),
                         [](const auto& stored) {
                           std::string name = stored.param.name;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

// A group is found by name, by expression and by class, in this order.
TEST(CodedGroups, BelongToTheModulesThatTheyName) {
  const auto source = open_source(test_data("coded/ct-mixed"));
  EXPECT_EQ(source->codes_of("m.down.weight"), form(kInt8, kBf16, 64, false, true));
  EXPECT_EQ(source->codes_of("m.q_proj.weight"), form(kE4M3, kBf16, 64));
  EXPECT_EQ(source->codes_of("m.up.weight"), form(kInt4, kBf16, 16));
  EXPECT_EQ(source->codes_of("x.m.q_proj.weight"), form(kInt4, kBf16, 16));  // an expression begins with the name
  for (const char* name : {"m.down.weight", "m.q_proj.weight", "m.up.weight", "x.m.q_proj.weight"})
    EXPECT_TRUE(same_bits(elements_of_codes(*source, name), elements(*source, name))) << name;
}

TEST(CodedSource, ReadsPartsInSeveralFilesAndMatricesInTurns) {
  for (const char* name : {"gptq-4-64-zeros", "awq-32", "ct-4-32-zeros"}) {
    const CodedModel model(name);
    const auto whole = open_source(model.write());
    const auto parts =
        open_source(model.write([](const std::string& part) { return part.find("scale") != part.npos; }));
    EXPECT_EQ(parts->files().size(), 3u);
    EXPECT_TRUE(same_bits(elements(*parts, "l.0.weight"), elements(*whole, "l.0.weight")));
    EXPECT_EQ(parts->codes_of("l.0.weight"), whole->codes_of("l.0.weight"));
    EXPECT_TRUE(same_bits(elements_of_codes(*parts, "l.0.weight"), elements(*whole, "l.0.weight")));
  }
  const auto source = open_source(test_data("coded/awq-32"));
  const std::vector<float> a = elements(*source, "l.0.weight"), b = elements(*source, "l.1.weight");
  for (size_t i = 0; i < a.size(); i += 100) {
    float x = 0, y = 0;
    source->read("l.0.weight", static_cast<i64>(i), 1, &x);
    source->read("l.1.weight", static_cast<i64>(i), 1, &y);
    ASSERT_EQ(x, a[i]);
    ASSERT_EQ(y, b[i]);
  }
}

// A matrix of more columns than are unpacked at a time is read in several parts.
TEST(CodedSource, ReadsLongRows) {
  CodedModel model("gptq-4-all");
  constexpr i64 kCols = 1 << 17, kRows = 72;
  model.become("l.0.qweight", DType::I32, {kCols / 8, kRows});
  model.become("l.0.qzeros", DType::I32, {1, kRows / 8});
  model.become("l.0.scales", DType::F16, {1, kRows});
  model.tensors.erase("l.0.g_idx");
  std::mt19937 rng(9);
  for (i64 i = 0; i < kCols / 8 * kRows; ++i) model.data<u32>("l.0.qweight")[i] = static_cast<u32>(rng());
  for (i64 i = 0; i < kRows / 8; ++i) model.data<u32>("l.0.qzeros")[i] = 0x77777777;
  for (i64 i = 0; i < kRows; ++i) model.data<f16>("l.0.scales")[i] = from_float<f16>(0.5f * static_cast<float>(i + 1));
  const auto source = open_source(model.write());
  ASSERT_EQ(source->at("l.0.weight").shape, (std::vector<i64>{kRows, kCols}));
  for (int round = 0; round < 200; ++round) {
    const i64 n = static_cast<i64>(rng() % kRows), k = static_cast<i64>(rng() % kCols);
    float x = 0;
    source->read("l.0.weight", n * kCols + k, 1, &x);
    const u32 word = model.data<u32>("l.0.qweight")[k / 8 * kRows + n];
    ASSERT_EQ(x, (static_cast<float>(word >> k % 8 * 4 & 15) - 8) * 0.5f * static_cast<float>(n + 1)) << n << " " << k;
  }
}

// The first format of GPTQ subtracts one from a word of zeros as from one number, so a zero of 0 borrows from the next.
TEST(CodedSource, UndoesTheSubtractionOfZeros) {
  CodedModel model("gptq-4-64-zeros");
  u32* const words = model.data<u32>("l.0.qzeros");
  const u32 zeros = 0x8F021005;
  words[0] = zeros - 0x11111111;
  std::memset(model.data<u8>("l.0.qweight"), 0, model.tensors.at("l.0.qweight").bytes.size());
  for (i64 i = 0; i < 4 * 32; ++i) model.data<f16>("l.0.scales")[i] = from_float<f16>(1.0f);
  const auto source = open_source(model.write());
  for (i64 n = 0; n < 8; ++n) {
    float x = 0;
    source->read("l.0.weight", n * 256, 1, &x);
    EXPECT_EQ(x, -static_cast<float>(zeros >> n * 4 & 15)) << n;
  }
  // A negative scale makes no -0 that the codes do not have.
  for (i64 i = 0; i < 4 * 32; ++i) model.data<f16>("l.0.scales")[i] = from_float<f16>(-1.0f);
  const auto negative = open_source(model.write());
  EXPECT_TRUE(same_bits(elements_of_codes(*negative, "l.0.weight"), elements(*negative, "l.0.weight")));
}

TEST(CodedSource, NamesPartsThatAreMissing) {
  for (const auto& [name, parts] :
       {std::pair<const char*, std::vector<const char*>>{"gptq-4-128-order", {"scales", "qzeros", "g_idx"}},
        {"awq-32", {"scales", "qzeros"}},
        {"ct-4-32-zeros", {"weight_scale", "weight_zero_point", "weight_shape"}},
        {"ct-int8-zeros", {"weight_zero_point"}}}) {
    for (const char* part : parts) {
      CodedModel model(name);
      model.tensors.erase(std::string("l.0.") + part);
      expect_refused(Errc::Mismatch, model,
                     AllOf(HasSubstr(fmt::format("'l.0.{}' is missing, a part of 'l.0.", part))));
    }
  }
  CodedModel model("gptq-4-32");
  model.tensors.erase("l.0.qweight");
  model.become("m.qweight", DType::I32, {32, 32});  // so that there are codes
  expect_refused(Errc::Mismatch, model, HasSubstr("'m.scales' is missing, a part of 'm.qweight'"));
  model = CodedModel("gptq-4-32");
  model.tensors["m.qzeros"] = model.tensors["l.0.qzeros"];
  expect_refused(Errc::Mismatch, model, HasSubstr("'m.qzeros' belongs to a 'm.qweight' that is missing"));
  model = CodedModel("gptq-4-32");
  model.tensors["l.0.weight"] = model.tensors["plain.weight"];
  expect_refused(Errc::Mismatch, model, HasSubstr("there are both 'l.0.weight' and 'l.0.qweight'"));
  model = CodedModel("ct-int8-dynamic");
  model.tensors.erase("l.0.weight");
  expect_refused(Errc::Mismatch, model, HasSubstr("'l.0.weight_scale' belongs to a matrix that is missing"));
  model = CodedModel("ct-4-32");
  model.section()["config_groups"]["group_0"]["targets"] = {"other"};
  expect_refused(Errc::Mismatch, model,
                 HasSubstr("'l.0' is a target of no group of quantization_config.config_groups"));
}

TEST(CodedSource, NamesPartsOfOtherTypesAndShapes) {
  struct Case {
    const char *model, *part;
    DType dtype;
    std::vector<i64> shape;
    const char* text;
  };
  for (const Case& c : std::vector<Case>{
           {"gptq-4-64-zeros", "qweight", DType::F32, {32, 32}, "it is a matrix of int32"},
           {"gptq-4-64-zeros", "qweight", DType::I32, {32}, "it is a matrix of int32"},
           {"gptq-4-64-zeros", "qweight", DType::I32, {0, 32}, "it is a matrix of int32"},
           {"gptq-4-64-zeros", "qweight", DType::I32, {32, 33}, "its rows are a multiple of 8"},
           {"gptq-4-64-zeros", "qweight", DType::I32, {64, 32}, "its shape is [8,32], by group_size 64 and bits 4"},
           {"gptq-4-64-zeros", "scales", DType::I32, {4, 32}, "its type is fp32 or bf16 or fp16 or fp64"},
           {"gptq-4-64-zeros", "scales", DType::F16, {32, 4}, "its shape is [4,32]"},
           {"gptq-4-64-zeros", "qzeros", DType::I32, {4, 32}, "its shape is [4,4]"},
           {"gptq-4-64-zeros", "qzeros", DType::F16, {4, 4}, "its type is int32"},
           {"gptq-4-64-zeros", "g_idx", DType::I64, {256}, "its type is int32"},
           {"gptq-4-64-zeros", "g_idx", DType::I32, {255}, "its shape is [256]"},
           {"awq-32", "qweight", DType::I32, {128, 5}, "its shape is [4,40]"},
           {"awq-32", "qzeros", DType::I32, {4, 5}, "its shape is [4,4]"},
           {"ct-4-32-zeros", "weight_packed", DType::I8, {24, 20}, "it is a matrix of int32"},
           {"ct-4-32-zeros", "weight_packed", DType::I32, {24, 20, 1}, "it is a matrix of int32"},
           {"ct-4-32-zeros", "weight_packed", DType::I32, {44, 19}, "do not fit codes of 4 bits"},
           {"ct-4-32-zeros", "weight_shape", DType::I64, {3}, "its shape is [2]"},
           {"ct-4-32-zeros", "weight_shape", DType::I64, {2}, "do not fit codes of 4 bits"},
           {"ct-4-32-zeros", "weight_scale", DType::F32, {44, 6}, "one for each 32 columns of a row"},
           {"ct-4-32-zeros", "weight_zero_point", DType::I32, {44, 5}, "its shape is [6,5]"},
           {"ct-4-32-zeros", "weight_zero_point", DType::I8, {6, 5}, "its type is int32"},
           {"ct-int8-zeros", "weight", DType::U8, {24, 160}, "it is a matrix of int8"},
           {"ct-int8-zeros", "weight_scale", DType::F32, {1}, "one for each row"},
           {"ct-int8-zeros", "weight_zero_point", DType::I8, {24}, "it has the shape of 'l.0.weight_scale'"},
           {"ct-int8-tensor", "weight_scale", DType::F32, {2}, "one for the matrix"},
           {"ct-fp8-block", "weight_scale", DType::F32, {1, 3}, "one for each block of 32 x 80"},
           {"ct-fp8-channel", "weight", DType::BF16, {24, 160}, "it is a matrix of fp8_e4m3"},
       }) {
    CodedModel model(c.model);
    model.become(std::string("l.0.") + c.part, c.dtype, c.shape);
    SCOPED_TRACE(fmt::format("{} {}", c.model, c.part));
    expect_refused(Errc::Mismatch, model, AllOf(HasSubstr("'l.0."), HasSubstr(c.text)));
  }
  // Sizes whose products do not fit into 64 bits.
  CodedModel model("ct-4-32");
  for (const i64 cols : {std::numeric_limits<i64>::max(), i64{1} << 61, i64{-160}, i64{0}}) {
    model.data<i64>("l.0.weight_shape")[1] = cols;
    expect_refused(Errc::Mismatch, model, HasSubstr("do not fit codes of 4 bits"));
  }
}

TEST(CodedSource, NamesValuesThatCannotBe) {
  const auto reads = [](const CodedModel& model) {
    const auto source = open_source(model.write());
    elements(*source, "l.0.weight");
  };
  CodedModel model("gptq-4-128-order");
  for (const i32 group : {2, -1, std::numeric_limits<i32>::min()}) {
    model.data<i32>("l.0.g_idx")[7] = group;
    expect_error(Errc::Corrupt, HasSubstr(fmt::format("'l.0.g_idx' has a column of group {}, and there are 2", group)),
                 [&] { reads(model); });
  }
  model = CodedModel("gptq-4-32");
  model.data<u32>("l.0.qzeros")[3] = 0x77777787;
  expect_error(Errc::Corrupt,
               AllOf(HasSubstr("'l.0.qzeros' has other zeros than 8, stored as 8 or 7"), HasSubstr("sym to false")),
               [&] { reads(model); });
  model.section()["sym"] = false;
  EXPECT_NO_THROW(reads(model));
  for (const char* name : {"gptq-4-32", "ct-4-32"}) {
    for (const u16 bits : {u16{0x7C00}, u16{0x7F80}, u16{0x7FC0}}) {
      model = CodedModel(name);
      model.data<u16>(name[0] == 'g' ? "l.0.scales" : "l.0.weight_scale")[5] = bits;
      if (bits == 0x7F80 && name[0] == 'g') continue;  // a NaN of fp16, as the next
      if (bits == 0x7C00 && name[0] == 'c') continue;  // a large number of bf16
      expect_error(Errc::Numeric, HasSubstr("a scale of 'l.0.weight'"), [&] { reads(model); });
    }
  }
  // Groups of columns of which none is given an order.
  // A zero for the whole matrix is a byte, also beside codes of 4 bits.
  model = CodedModel("ct-4-32-zeros-fp32");
  model.section()["config_groups"]["group_0"]["weights"].update({{"strategy", "tensor"}, {"group_size", nullptr}});
  model.become("l.0.weight_scale", DType::F32, {1});
  model.become("l.0.weight_zero_point", DType::I8, {1});
  *model.data<float>("l.0.weight_scale") = 0.5f;
  for (const int zero : {-8, 7}) {
    *model.data<std::int8_t>("l.0.weight_zero_point") = static_cast<std::int8_t>(zero);
    const auto source = open_source(model.write());
    EXPECT_EQ(source->codes_of("l.0.weight"), form(kInt8, kF32, 160));
    EXPECT_TRUE(same_bits(elements_of_codes(*source, "l.0.weight"), elements(*source, "l.0.weight")));
  }
  *model.data<std::int8_t>("l.0.weight_zero_point") = 8;
  expect_error(Errc::Corrupt, HasSubstr("'l.0.weight_zero_point' has a zero of 8 for codes of 4 bits"),
               [&] { reads(model); });
  model = CodedModel("ct-4-order");
  std::fill_n(model.data<i32>("l.0.weight_g_idx"), 96, -1);
  EXPECT_EQ(open_source(model.write())->codes_of("l.0.weight"), form(kInt4, kBf16, 32));
}

// Without a section for them, and with a broken config.json, tensors are shown as they are stored.
TEST(CodedSource, LeavesTensorsThatNothingDescribes) {
  CodedModel model("gptq-4-32");
  model.config.erase("quantization_config");
  EXPECT_EQ(open_source(model.write())->at("l.0.qweight").dtype, DType::I32);
  EXPECT_THAT(missing_section("l.0.qweight"), HasSubstr("a part of a matrix of codes"));
  EXPECT_EQ(missing_section("l.0.weight"), "");
  model = CodedModel("gptq-4-32");
  const std::string dir = model.write();
  for (const char* text : {"{", "[]", "3", ""}) {
    write_file(dir + "/config.json", text);
    EXPECT_NE(open_source(dir)->find("l.0.qweight"), nullptr) << text;
  }
}

// AutoGPTQ adds a bias of zeros to every layer; another one would be a part of another model.
TEST(CodedModels, MayHaveBiasesOfZeros) {
  CodedModel stored("model-gptq");
  const std::string bias = "model.layers.1.mlp.up_proj.bias";
  ASSERT_TRUE(stored.tensors.contains(bias));
  const std::string dir = stored.write();
  const model::Model model = model::make_model(load_model_config(dir + "/config.json"), 8);
  const auto source = open_source(dir);
  const WeightMatch match = match_weights(model, *source);
  EXPECT_THAT(match.extra, ::testing::IsEmpty());
  EXPECT_THAT(match.unfit, ::testing::IsEmpty());
  stored.data<f16>(bias)[3] = from_float<f16>(-0.5f);
  const auto other = open_source(stored.write());
  EXPECT_THAT(match_weights(model, *other).extra, ::testing::ElementsAre(HasSubstr(bias + " is not a parameter")));
}

// Matrices of experts, each stored by itself, as a batch.
TEST(CodedModels, JoinCodesOfExperts) {
  const TempDirectory dir;
  write_file(dir / "config.json", R"({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 11, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 16, "moe_intermediate_size": 16, "num_experts": 3, "num_experts_per_tok": 2,
    "max_position_embeddings": 8, "quantization_config": {"quant_method": "compressed-tensors",
    "format": "int-quantized", "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8,
    "strategy": "channel"}}}}})");
  std::vector<TensorInfo> list;
  for (int e = 0; e < 3; ++e) {
    for (const auto& [matrix, rows, cols] :
         {std::tuple<const char*, i64, i64>{"gate_proj", 16, 32}, {"up_proj", 16, 32}, {"down_proj", 32, 16}}) {
      const std::string name = fmt::format("model.layers.0.mlp.experts.{}.{}.weight", e, matrix);
      list.push_back({name, DType::I8, {rows, cols}});
      list.push_back({name + "_scale", DType::F32, {rows, 1}});
    }
  }
  const auto write = [&] {
    const auto sink = create_sink(dir / "model.safetensors", FileFormat::Safetensors, list);
    std::mt19937 rng(4);
    for (const size_t i : sink->order()) {
      std::vector<float> scales(static_cast<size_t>(list[i].numel()));
      for (float& x : scales) x = 0.001f * static_cast<float>(rng() % 1000 + 1);
      std::vector<f16> halves;
      for (const float x : scales) halves.push_back(from_float<f16>(x));
      std::vector<u8> codes(scales.size());
      for (u8& x : codes) x = static_cast<u8>(rng());
      const void* data = codes.data();
      if (list[i].dtype == DType::F32) data = scales.data();
      if (list[i].dtype == DType::F16) data = halves.data();
      sink->write(list[i].name, 0, list[i].numel(), data);
    }
    sink->finish();
  };
  const ModelConfig config = load_model_config(dir / "config.json");
  const model::Model model = model::make_model(config, 8);
  write();
  const auto source = join_experts(model, open_source(dir.path()));
  for (const auto& [name, cols] : {std::pair<std::string, i32>{"model.layers.0.mlp.experts.gate_up_proj", 32},
                                   {"model.layers.0.mlp.experts.down_proj", 16}}) {
    EXPECT_EQ(source->codes_of(name), form(kInt8, kF32, cols)) << name;
    EXPECT_TRUE(same_bits(elements_of_codes(*source, name), elements(*source, name))) << name;
  }
  // One expert of another form than the others: elements alone.
  for (TensorInfo& t : list)
    if (t.name == "model.layers.0.mlp.experts.1.up_proj.weight_scale") t.dtype = DType::F16;
  write();
  const auto other = join_experts(model, open_source(dir.path()));
  EXPECT_EQ(other->codes_of("model.layers.0.mlp.experts.gate_up_proj"), kNone);
  EXPECT_EQ(other->codes_of("model.layers.0.mlp.experts.down_proj"), form(kInt8, kF32, 16));
}

}  // namespace coded_source_test
}  // namespace ds
