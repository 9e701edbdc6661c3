// SPDX-License-Identifier: Apache-2.0
// Sections quantization_config: forms that are refused, by key and value, where a model is configured and where its
// weights are opened.

#include "config/weight_codes.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/json.h"
#include "coded_model.h"
#include "config/model_config.h"
#include "temp_directory.h"
#include "test_data.h"

namespace ds {
namespace weight_codes_test {

using ::testing::AllOf;
using testing::CodedModel;
using testing::expect_refused;
using ::testing::HasSubstr;
using testing::read_file;
using testing::TempDirectory;
using testing::test_data;
using testing::write_file;

TEST(WeightCodes, RefusesFormsByKeyAndValue) {
  struct Case {
    const char *model, *key, *value, *text;
  };
  const std::vector<Case> cases = {
      {"gptq-4-32", "bits", "3", "\"bits\" 3 of weights in \"gptq\" (there is 4, 8)"},
      {"gptq-4-32", "bits", "2", "\"bits\" 2"},
      {"gptq-4-32", "bits", "\"4\"", "\"bits\" \"4\""},
      {"gptq-4-32", "group_size", "0", "\"group_size\" 0 of weights in \"gptq\" (it is -1 for all columns"},
      {"gptq-4-32", "group_size", "-2", "\"group_size\" -2"},
      {"gptq-4-32", "group_size", "1e30", "\"group_size\" 1e+30"},
      {"gptq-4-32", "group_size", "9223372036854775807", "\"group_size\" 9223372036854775807"},
      {"gptq-4-32", "checkpoint_format", "\"marlin\"", "\"checkpoint_format\" \"marlin\""},
      {"gptq-4-32", "dynamic", R"({"+:.*down.*": {"bits": 8}})", "\"dynamic\" {"},
      {"gptq-4-32", "sym", "null", "\"sym\" null"},
      {"gptq-4-32-v2", "format", "\"gptq\"",
       "\"format\" \"gptq\" of weights in \"gptq\" (but \"checkpoint_format\" is"},
      {"gptq-4-32", "rotation", "\"hadamard\"", "\"rotation\" \"hadamard\""},
      {"awq-32", "version", "\"gemv\"", "\"version\" \"gemv\" of weights in \"awq\" (there is \"gemm\""},
      {"awq-32", "bits", "8", "\"bits\" 8"},
      {"awq-32", "q_group_size", "64", "\"group_size\" 32 of weights in \"awq\" (but \"q_group_size\" is 64)"},
      {"awq-32", "zero_point", "false", "\"zero_point\" false"},
      {"awq-32", "backend", "\"llm-awq\"", "\"backend\" \"llm-awq\""},
      {"ct-4-32", "format", "\"nvfp4-pack-quantized\"", "\"format\" \"nvfp4-pack-quantized\""},
      {"ct-4-32", "format", "\"marlin-24\"", "\"format\" \"marlin-24\""},
      {"ct-4-32", "kv_cache_scheme", R"({"num_bits": 8})", "\"kv_cache_scheme\" {"},
      {"ct-4-32", "sparsity_config", R"({"format": "sparse-bitmask"})", "\"sparsity_config\" {"},
      {"ct-4-32", "transform_config", R"({"config_groups": {}})", "\"transform_config\" {"},
      {"ct-4-32", "config_groups", "[]", "\"config_groups\" []"},
      {"ct-4-32", "config_groups", R"({"W4A16": ["Linear"]})", "\"config_groups.W4A16\" [\"Linear\"]"},
  };
  for (const Case& c : cases) {
    CodedModel model(c.model);
    model.section()[c.key] = Json::parse(c.value);
    SCOPED_TRACE(fmt::format("{} {} {}", c.model, c.key, c.value));
    expect_refused(Errc::Unavailable, model, AllOf(HasSubstr("config.json: quantization_config: "), HasSubstr(c.text)));
  }
  const auto group = [](const char* name, const char* part, const char* key, const char* value, const char* text) {
    CodedModel model(name);
    Json& scheme = model.section()["config_groups"]["group_0"];
    (*part == '\0' ? scheme : scheme[part])[key] = Json::parse(value);
    SCOPED_TRACE(fmt::format("{} {} {} {}", name, part, key, value));
    expect_refused(Errc::Unavailable, model, HasSubstr(text));
  };
  group("ct-4-32", "weights", "num_bits", "3", "\"config_groups.group_0.weights.num_bits\" 3");
  group("ct-4-32", "weights", "group_size", "0", "\"config_groups.group_0.weights.group_size\" 0");
  group("ct-4-32", "weights", "strategy", "\"tensor_group\"", "weights.strategy\" \"tensor_group\"");
  group("ct-4-32", "weights", "strategy", "\"channel\"", "weights.group_size\" 32 of weights in");
  group("ct-4-32", "weights", "block_structure", "[128, 128]", "(but \"strategy\" is \"group\")");
  group("ct-4-32", "", "format", "\"int-quantized\"", "(but \"format\" is \"pack-quantized\")");
  group("ct-4-32", "weights", "type", "\"float\"", "\"type\" \"float\" has 8 bits");
  group("ct-4-32", "weights", "actorder", "true", "weights.actorder\" true");
  group("ct-4-32", "", "output_activations", "{}", "output_activations\" {}");
  group("ct-4-32", "", "targets", "\"Linear\"",
        "targets\" \"Linear\" of weights in \"compressed-tensors\" (it is a list");
  group("ct-4-32", "", "targets", "[\"re:(\"]", "targets\" \"re:(\"");
  group("ct-fp8-block", "weights", "block_structure", "[0, 80]", "block_structure\" [0,80]");
  group("ct-int8-dynamic", "input_activations", "dynamic", "false", "input_activations.dynamic\" false");
  group("ct-int8-dynamic", "input_activations", "strategy", "\"tensor\"", "input_activations.strategy\" \"tensor\"");
  group("ct-int8-dynamic", "input_activations", "num_bits", "4", "input_activations.num_bits\" 4");
}

// The reader of the configuration refuses the same, all at once, and writes none of it out.
TEST(WeightCodes, AreReadByTheirConfiguration) {
  const std::string llama =
      R"("model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4)";
  const auto diagnose = [&](const std::string& section, const std::string& model) {
    const TempDirectory dir;
    write_file(dir / "config.json", fmt::format(R"({{{}, "quantization_config": {}}})", model, section));
    std::vector<Diagnostic> diagnostics;
    read_model_file(dir.path(), diagnostics);
    std::string all;
    for (const Diagnostic& d : diagnostics) all += to_string(d) + "\n";
    return all;
  };
  for (const char* name : {"gptq-4-32-v2", "awq-32", "ct-int8-dynamic", "ct-mixed", "ct-fp8-block"}) {
    const Json config = Json::parse(read_file(test_data(std::string("coded/") + name + "/config.json")));
    EXPECT_EQ(diagnose(config["quantization_config"].dump(), llama), "") << name;
    Json published = config;
    forget_published_form(published);
    EXPECT_FALSE(published.contains("quantization_config"));
  }
  EXPECT_EQ(diagnose(R"({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*attn.*": {}, "lm_head": {}}})", llama),
            "");
  const std::string many = diagnose(R"({"quant_method": "gptq", "bits": 3, "group_size": 0, "new_idea": 1})", llama);
  EXPECT_THAT(many, AllOf(HasSubstr("\"bits\" 3"), HasSubstr("\"group_size\" 0"), HasSubstr("not supported yet"),
                          HasSubstr("unknown members, which are ignored: new_idea")));
  EXPECT_THAT(diagnose(R"({"quant_method": "gptq", "bits": 4})", R"("model_type": "gpt2")"),
              HasSubstr("of a model of type \"gpt2\""));
  EXPECT_THAT(diagnose(R"({"quant_method": "hqq", "bits": 4})", llama),
              HasSubstr("quantization_config: \"quant_method\" \"hqq\" (there is \"fp8\", \"gptq\", \"awq\""));
}

}  // namespace weight_codes_test
}  // namespace ds
