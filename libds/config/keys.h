// SPDX-License-Identifier: Apache-2.0
#pragma once
// A key of a configuration file as one row of a table, and the tables. The reader, resolved_json, the suggestions for
// mistyped names and the test of ds-config-keys(5) all read these rows; nothing else knows a key's name.

#include <array>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/json.h"
#include "ds/config.h"

namespace ds {

// Names of an enum's values in JSON; the first name of a value is the one written.
struct EnumName {
  static constexpr u8 kLater = 255;  // a name of DeepSpeed or Hugging Face that is not supported yet
  std::string_view name;
  u8 value = kLater;
};
struct EnumSlot {
  u8* value;
  std::span<const EnumName> names;
};

struct BetasSlot {  // a JSON array of two
  double *first, *second;
};

struct CountsSlot {  // an integer, which is stored as an array of one, or an array of integers
  std::vector<i64>* at;
};

// The member that a value is stored in, which determines its type. A vector of strings also takes a single string.
using Slot = std::variant<bool*, i64*, double*, float*, std::string*, EnumSlot, BetasSlot, std::vector<std::string>*,
                          std::vector<float>*, std::vector<i64>*, CountsSlot>;

inline constexpr i64 kMostBatch = i64{1} << 31;    // samples of a step
inline constexpr i64 kMostAccumulation = 100'000;  // every micro-batch of a step is planned

struct Range {
  double low = 0;
  double high = std::numeric_limits<double>::infinity();  // of an integer kMostCount
  bool open_low = false;                                  // low itself is excluded
  bool open_high = false;                                 // high itself is excluded
  bool fp32 = false;                                      // a double that is used as fp32
};

enum class KeyKind : u8 {
  Effect,          // stored in `slot`
  NotYet,          // only the values in `values` pass: they do not ask for a missing feature
  NotYetSection,   // an object that passes if its members `name` (words; a.b is nested) have one of `values`; a missing
                   // member passes if takes_null; without a name only {} passes
  Ignored,         // no effect, and mostly none in DeepSpeed: a warning that contains `note`
  IgnoredSection,  // an object of members that are Ignored
  Subtable,        // an object that has tables of its own
  Silent,          // bookkeeping of the program that wrote the file
  Alias,           // another spelling of the key or section `name`
  Deprecated,      // Alias with a warning
  Refused,         // an error that contains `note`
};

struct Key {
  std::string_view path;  // "zero_optimization.stage"
  KeyKind kind = KeyKind::Effect;
  Slot (*slot)(void* root) = nullptr;
  Range range = {};
  bool takes_auto = false;     // "auto" leaves the default
  bool takes_null = false;     // null leaves the default
  bool takes_empty = false;    // likewise ""
  bool harmless = false;       // NotYet, NotYetSection: other values are a warning, since results do not depend on them
  std::string_view name = {};  // Alias, Deprecated: the target path; NotYetSection: the switch
  std::string_view values = {};   // JSON array
  std::string_view members = {};  // sections: the names inside, separated by blanks
  std::string_view note = {};
  // Effect: the condition under which the key has one; null: always.
  bool (*applies)(const Config&, std::string_view path) = nullptr;

  constexpr Key when(bool (*condition)(const Config&, std::string_view path)) const noexcept {
    Key key = *this;
    key.applies = condition;
    return key;
  }
  bool has_effect(const Config& config) const {
    return kind == KeyKind::Effect && (applies == nullptr || applies(config, path));
  }
};

// The rows of ds_config.json; root is a Config. model_keys() has those of inline models.
std::span<const Key> config_keys();
// The rows of an object in optimizer.param_groups; root is the UpdateConfig of a ParamGroupConfig. All but params,
// frozen and type are also keys of optimizer.params.
std::span<const Key> param_group_keys();

// The name with which a value is written; empty if it has none.
std::string_view enum_name(std::span<const EnumName> names, u8 value);

// "integer, at least 1", "one of fp32, bf16, fp16", ...; the value in a slot as JSON.
std::string type_text(const Slot& slot, const Range& range);
Json slot_json(const Slot& slot);

// The slot of a member, reached from a root through members of members: slot_of<&Config::zero, &ZeroConfig::stage>.
template <class E>
inline constexpr std::array<EnumName, 0> kEnumNames{};

template <class Root, class T>
Root root_of(T Root::*);

template <auto first, auto... rest>
Slot slot_of(void* root) {
  auto& member = ((static_cast<decltype(root_of(first))*>(root)->*first).*....*rest);
  using T = std::remove_reference_t<decltype(member)>;
  if constexpr (std::is_enum_v<T>) {
    static_assert(sizeof(T) == 1 && !kEnumNames<T>.empty());
    return EnumSlot{reinterpret_cast<u8*>(&member), kEnumNames<T>};
  } else {
    return &member;
  }
}

}  // namespace ds
