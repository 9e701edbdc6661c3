// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reading the parts of a tokenizer file: every field is asked for by name, and what nobody asked for is refused, since
// it might change ids.

#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "base/check.h"

namespace ds::tokenizer {

using Json = nlohmann::json;  // sorted members: a vocabulary of 10^5 is looked up in time

// The place of a value, for messages: "FILE: model.merges".
struct Place {
  std::string file, path;
  Place operator/(std::string_view key) const;
  [[noreturn]] void corrupt(const std::string& what) const;      // Errc::Corrupt
  [[noreturn]] void unsupported(const std::string& what) const;  // Errc::Unavailable
};

// An object's fields. A wrong type is Errc::Corrupt.
class Fields {
 public:
  Fields(const Json& object, Place place);

  const Place& place() const noexcept { return place_; }
  // Null when missing or null.
  const Json* find(const std::string& key);
  const Json& at(const std::string& key);
  bool flag(const std::string& key, std::optional<bool> otherwise = std::nullopt);
  std::string text(const std::string& key, std::optional<std::string> otherwise = std::nullopt);
  std::optional<std::string> optional_text(const std::string& key);
  i64 integer(const std::string& key, std::optional<i64> otherwise = std::nullopt);
  // A field that cannot change ids.
  void ignore(const std::string& key) { asked_.insert(key); }
  // Throws Errc::Unavailable for a field that nobody asked for.
  void done() const;

 private:
  const Json& object_;
  Place place_;
  std::set<std::string> asked_;
};

// A member of an object; null when missing or null.
const Json* find_member(const Json& object, const std::string& key);

// The "type" of a part; the other fields stand beside it.
std::string part_type(const Json& part, const Place& place);

}  // namespace ds::tokenizer
