// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer/fields.h"

namespace ds::tokenizer {

Place Place::operator/(std::string_view key) const {
  return {file, path.empty() ? std::string(key) : fmt::format("{}.{}", path, key)};
}

void Place::corrupt(const std::string& what) const {
  throw Error(Errc::Corrupt,
              path.empty() ? fmt::format("{}: {}", file, what) : fmt::format("{}: {}: {}", file, path, what));
}

void Place::unsupported(const std::string& what) const {
  throw Error(Errc::Unavailable,
              path.empty() ? fmt::format("{}: {}", file, what) : fmt::format("{}: {}: {}", file, path, what));
}

Fields::Fields(const Json& object, Place place) : object_(object), place_(std::move(place)) {
  if (!object.is_object()) place_.corrupt("must be an object");
}

const Json* Fields::find(const std::string& key) {
  asked_.insert(key);
  return find_member(object_, key);
}

const Json& Fields::at(const std::string& key) {
  const Json* value = find(key);
  if (value == nullptr) (place_ / key).corrupt("is missing");
  return *value;
}

bool Fields::flag(const std::string& key, std::optional<bool> otherwise) {
  if (otherwise && find(key) == nullptr) return *otherwise;
  const Json& value = at(key);
  if (!value.is_boolean()) (place_ / key).corrupt("must be true or false");
  return value.get<bool>();
}

std::string Fields::text(const std::string& key, std::optional<std::string> otherwise) {
  if (otherwise && find(key) == nullptr) return *otherwise;
  const Json& value = at(key);
  if (!value.is_string()) (place_ / key).corrupt("must be a string");
  return value.get<std::string>();
}

std::optional<std::string> Fields::optional_text(const std::string& key) {
  if (find(key) == nullptr) return std::nullopt;
  return text(key);
}

i64 Fields::integer(const std::string& key, std::optional<i64> otherwise) {
  if (otherwise && find(key) == nullptr) return *otherwise;
  const Json& value = at(key);
  constexpr i64 kMost = std::numeric_limits<i32>::max() - 1;  // so that one more fits too
  if (!value.is_number_integer() || value < -kMost || value > kMost)
    (place_ / key).corrupt("must be an integer of 32 bits");
  return value.get<i64>();
}

void Fields::done() const {
  for (const auto& [key, value] : object_.items())
    if (!asked_.contains(key)) (place_ / key).unsupported("this field is not known");
}

const Json* find_member(const Json& object, const std::string& key) {
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

std::string part_type(const Json& part, const Place& place) {
  if (!part.is_object()) place.corrupt("must be an object");
  const auto type = part.find("type");
  if (type == part.end() || !type->is_string()) place.corrupt("has no type");
  return type->get<std::string>();
}

}  // namespace ds::tokenizer
