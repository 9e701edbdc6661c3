// SPDX-License-Identifier: Apache-2.0
#pragma once
// Strict JSON that records the places of values: RFC 8259 plus // and /* */ comments, a byte-order mark and CRLF.
// Refuses duplicate keys in an object, numbers that do not fit a double, and excessive nesting.

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "ds/error.h"
#include "ds/kernels/dtype.h"

namespace ds {

using Json = nlohmann::ordered_json;  // members keep their order

struct JsonPlace {
  i64 line = 0, column = 0;  // from 1, the column in bytes; 0: unknown
};

struct JsonDocument {
  Json root;
  // By path, "a.b[2].c": the place of a member is its key, that of an array's element its value. Empty without
  // JsonOptions::places. If there are very many values only the first have places, and values below very long keys have
  // none.
  std::map<std::string, JsonPlace, std::less<>> places;
};

struct JsonOptions {
  Errc error = Errc::Config;  // code of the Error thrown
  int max_depth = 100;
  bool comments = true;
  bool places = true;
};

class DS_API JsonError : public Error {
 public:
  JsonError(Errc code, std::string_view name, JsonPlace place, const std::string& message);
  const JsonPlace& place() const noexcept { return place_; }
  const std::string& message() const noexcept { return message_; }  // what() without name and place

 private:
  JsonPlace place_;
  std::string message_;
};

// Throws JsonError "name:line:column: message".
JsonDocument parse_json(std::string_view text, std::string_view name, const JsonOptions& options = {});
// The same without places and with sorted members, for objects in which keys are looked up.
nlohmann::json parse_sorted_json(std::string_view text, std::string_view name, const JsonOptions& options = {});

// For readers of events (nlohmann::json_sax): throws the arguments of their parse_error() as the JsonError of
// parse_json.
[[noreturn]] void refuse_json(std::string_view text, std::string_view name, Errc code, size_t position,
                              const std::string& token, const nlohmann::detail::exception& e);

// Why a value does not have the expected type, in the library's words without its error numbers.
std::string json_reason(const nlohmann::detail::exception& e);

// The path of a member: "a.b" and "c" make "a.b.c", "" and "c" make "c". A key that would make the path ambiguous is
// quoted, so "a.b" in the root is "\"a.b\"".
std::string json_member(std::string_view path, std::string_view key);
std::string json_element(std::string_view path, size_t index);
// Joins two paths.
std::string json_join(std::string_view path, std::string_view below);

// A member that must be an integer in [low, high]; the library itself would wrap larger values and truncate fractions.
// Throws Errc::Config, which names the key.
i64 json_integer(const Json& object, const char* key, i64 low, i64 high);

// The number with the fewest digits that rounds to x, to print a float without binary noise.
double shortest_decimal(float x);

}  // namespace ds
