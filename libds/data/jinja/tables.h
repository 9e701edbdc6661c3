// SPDX-License-Identifier: Apache-2.0
#pragma once
// Filters, tests, methods and functions, by their names.

#include <array>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "data/jinja/value.h"
#include "ds/error.h"

namespace ds::jinja {

struct Entry {
  std::string_view name;
  Native native;
};

Native find_filter(std::string_view name);  // null: none
Native find_test(std::string_view name);
Native find_method(const Value& self, std::string_view name);
Native find_function(std::string_view name);
inline bool has_filter(std::string_view name) { return find_filter(name) != nullptr; }
inline bool has_test(std::string_view name) { return find_test(name) != nullptr; }

// For filters and tests that jinja2 has and libds has not, Errc::Unavailable.
Errc code_of_unknown(bool is_filter, std::string_view name);
std::string unknown_name(bool is_filter, std::string_view name);
// Whether Python has an attribute of this name that libds has not, so that its
// absence would be wrong.
bool is_missing_attribute(const Value& self, std::string_view name);

// Arguments by the names of parameters. Throws Errc::Config for too many,
// unknown and missing ones.
class Bound {
 public:
  Bound(Arguments& arguments, std::string_view callee, std::initializer_list<std::string_view> names,
        size_t required = 0);

  bool has(size_t i) const { return values_[i] != nullptr; }
  const Value& operator[](size_t i) const { return *values_[i]; }
  // The argument, or `otherwise` where it is missing. Throws for another type.
  i64 integer(size_t i, i64 otherwise) const;
  bool flag(size_t i, bool otherwise = false) const { return has(i) ? truth(*values_[i]) : otherwise; }
  const std::string& text(size_t i) const;
  bool is_none(size_t i) const { return !has(i) || values_[i]->is<None>(); }

 private:
  std::string_view callee_;
  std::array<std::string_view, 4> names_{};
  std::array<const Value*, 4> values_{};
};

}  // namespace ds::jinja
