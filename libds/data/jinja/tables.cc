// SPDX-License-Identifier: Apache-2.0
#include "data/jinja/tables.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"

namespace ds::jinja {
namespace {

bool is_any_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::ranges::find(names, name) != names.end();
}

bool exists_in_jinja(bool is_filter, std::string_view name) {
  if (!is_filter) return is_any_of(name, {"escaped"});
  return is_any_of(name, {"attr", "batch", "filesizeformat", "forceescape", "groupby", "pprint", "random", "slice",
                          "striptags", "truncate", "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr"});
}

}  // namespace

Errc code_of_unknown(bool is_filter, std::string_view name) {
  return exists_in_jinja(is_filter, name) ? Errc::Unavailable : Errc::Corrupt;
}

std::string unknown_name(bool is_filter, std::string_view name) {
  const std::string_view kind = is_filter ? "filter" : "test";
  return exists_in_jinja(is_filter, name) ? fmt::format("the {} '{}' is not supported", kind, name)
                                          : fmt::format("there is no {} '{}'", kind, name);
}

bool is_missing_attribute(const Value& self, std::string_view name) {
  if (self.is_text())
    return is_any_of(name, {"casefold", "encode", "expandtabs", "isdecimal", "isidentifier", "isnumeric", "isprintable",
                            "istitle", "maketrans", "translate", "isascii", "swapcase"});
  if (self.is_number())
    return is_any_of(name, {"as_integer_ratio", "bit_count", "bit_length", "conjugate", "denominator", "from_bytes",
                            "fromhex", "hex", "imag", "is_integer", "numerator", "real", "to_bytes"});
  if (self.is_dict()) return name == "fromkeys";
  if (self.is_list())
    return is_any_of(name, {"start", "stop", "step", "isdisjoint", "mapping", "send", "throw", "close", "gi_frame",
                            "gi_code"}) &&
           self.as_list().kind != List::Kind::List && self.as_list().kind != List::Kind::Tuple;
  return self.is<std::shared_ptr<const Function>>() &&
         is_any_of(name, {"arguments", "catch_kwargs", "catch_varargs", "caller"});
}

Bound::Bound(Arguments& arguments, std::string_view callee, std::initializer_list<std::string_view> names,
             size_t required)
    : callee_(callee) {
  DS_ASSERT(names.size() <= values_.size());
  std::ranges::copy(names, names_.begin());
  DS_CHECK(arguments.positional.size() <= names.size(), Errc::Config, "{} takes at most {} arguments", callee,
           names.size());
  for (size_t i = 0; i < arguments.positional.size(); ++i) values_[i] = &arguments.positional[i];
  for (const auto& [name, value] : arguments.named) {
    const size_t at = static_cast<size_t>(std::ranges::find(names, name) - names.begin());
    DS_CHECK(at < names.size(), Errc::Config, "{} takes no argument '{}'", callee, name);
    DS_CHECK(values_[at] == nullptr, Errc::Config, "{} has two values for the argument '{}'", callee, name);
    values_[at] = &value;
  }
  for (size_t i = 0; i < required; ++i)
    DS_CHECK(values_[i] != nullptr, Errc::Config, "{} needs the argument '{}'", callee, names.begin()[i]);
}

i64 Bound::integer(size_t i, i64 otherwise) const {
  if (!has(i)) return otherwise;
  DS_CHECK(values_[i]->is_integer(), Errc::Config, "the argument '{}' of {} must be an integer, not of type {}",
           names_[i], callee_, type_name(*values_[i]));
  return values_[i]->as_integer();
}

const std::string& Bound::text(size_t i) const {
  DS_CHECK(values_[i]->is_text(), Errc::Config, "the argument '{}' of {} must be a string, not of type {}", names_[i],
           callee_, type_name(*values_[i]));
  return values_[i]->as_text().bytes;
}

}  // namespace ds::jinja
