// SPDX-License-Identifier: Apache-2.0
#pragma once
// quantization_config, the section of a published config.json about weights that are stored as codes. The tensors
// themselves are in formats/coded_source.h.

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/pattern.h"

namespace ds {

// Fp8: blocks of 128 x 128 as DeepSeek-V3 has them (formats/fp8_source.h).
enum class CodesMethod : u8 { None, Fp8, Gptq, Awq, CompressedTensors };

// A member of config_groups of compressed-tensors: a form of codes, and the modules that have it.
struct CodesGroup {
  enum class Scales : u8 { Tensor, Channel, Group, Block };

  std::string name;
  bool packed = false;  // weight_packed, several codes in each int32; else "weight" has a byte for each code
  bool floats = false;  // E4M3; else integers
  int bits = 8;
  bool symmetric = true;
  Scales scales = Scales::Channel;
  i64 group = 0;                // Scales::Group: columns
  std::array<i64, 2> block{};   // Scales::Block: rows, columns
  bool dynamic_inputs = false;  // products code each row of their input in 8 bits, too
  std::vector<std::string> names{};
  std::vector<Pattern> patterns{};
  bool all_linear = false;  // "Linear": every linear layer that no other group names
};

struct WeightCodes {
  CodesMethod method = CodesMethod::None;
  // GPTQ and AWQ
  int bits = 4;
  i64 group = 128;  // columns; -1: all
  bool symmetric = true;
  bool act_order = false;              // the group of a column is not that of its place
  bool zeros_minus_one = true;         // unless symmetric: as GPTQ's first format stores zeros
  std::vector<CodesGroup> groups{};    // compressed-tensors
  std::vector<std::string> unknown{};  // members that are ignored
};

// The method by which a config.json (an object) says that weights are stored, if it is one that is read.
CodesMethod codes_method(const Json& config);
// A method that is not read, in words, to be followed by "is not supported"; empty: none is named, or one that is read.
std::string other_method(const Json& config);
// Reads the section for that method. Appends to `refused` each member whose value is not supported, with the method and
// the values that are: to be followed by "is not supported".
WeightCodes read_weight_codes(const Json& config, std::vector<std::string>& refused);
// Whether the section turns nothing on: what is left of a merge.
bool quantizes_nothing(const Json& config);

// The group for the weight of the module `name`; null: none has it. As compressed-tensors does: by its name, else by an
// expression, else by its class. Throws Errc::Unavailable if an expression takes too long.
const CodesGroup* group_of(const WeightCodes& codes, std::string_view name);

}  // namespace ds
