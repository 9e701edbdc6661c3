// SPDX-License-Identifier: Apache-2.0
#pragma once
// Strict JSON with places: RFC 8259 plus // and /* */ comments, a byte-order mark and CRLF; and never two equal keys in
// an object, numbers that do not fit a double, or bottomless nesting.

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
  // By path, "a.b[2].c": a member at its key, an array's element at its value. Empty without JsonOptions::places. Of
  // very many values only the first have one, and none below a very long key.
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
// The same without places, its members sorted: for objects in which keys are looked up.
nlohmann::json parse_sorted_json(std::string_view text, std::string_view name, const JsonOptions& options = {});

// For a reader of events (nlohmann::json_sax): what its parse_error() was called with, as the JsonError of parse_json.
[[noreturn]] void refuse_json(std::string_view text, std::string_view name, Errc code, size_t position,
                              const std::string& token, const nlohmann::detail::exception& e);

// Why a value is not what was asked for: the library's words without its numbers.
std::string json_reason(const nlohmann::detail::exception& e);

// The path of a member: "a.b" and "c" make "a.b.c", "" and "c" make "c"; a key that would blur the path is quoted, so
// that "a.b" in the root is "\"a.b\"".
std::string json_member(std::string_view path, std::string_view key);
std::string json_element(std::string_view path, size_t index);
// A path below a path.
std::string json_join(std::string_view path, std::string_view below);

// A member that is an integer of [low, high]: the library would wrap what does not fit, and cut off fractions. Throws
// Errc::Config, naming the key.
i64 json_integer(const Json& object, const char* key, i64 low, i64 high);

// The number with the fewest digits that rounds to x, for writing a float without its binary tail.
double shortest_decimal(float x);

}  // namespace ds
