// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/pickle_json.h"

#include <cmath>

namespace ds {

bool has_string_keys(const PickleValue& dict) noexcept {
  for (size_t i = 0; i < dict.items.size(); i += 2) {
    if (!dict.items[i]->is(PickleValue::Kind::String)) return false;
  }
  return true;
}

namespace {

using Kind = PickleValue::Kind;

constexpr i64 kMaxJson = i64{1} << 20;

std::optional<Json> to_json(const PickleValue& v, int depth, i64& budget) {
  budget -= 1 + static_cast<i64>(v.text.size());
  if (depth > 32 || budget < 0) return std::nullopt;
  switch (v.kind) {
    case Kind::None: return Json(nullptr);
    case Kind::Bool: return Json(v.integer != 0);
    case Kind::Int: return Json(v.integer);
    case Kind::Float: return std::isfinite(v.real) ? std::optional(Json(v.real)) : std::nullopt;
    case Kind::String: return Json(v.text);
    case Kind::List:
    case Kind::Tuple: {
      Json array = Json::array();
      for (const PickleValue* item : v.items) {
        std::optional<Json> j = to_json(*item, depth + 1, budget);
        if (!j) return std::nullopt;
        array.push_back(std::move(*j));
      }
      return array;
    }
    case Kind::Dict: {
      if (!has_string_keys(v)) return std::nullopt;
      Json object = Json::object();
      for (size_t i = 0; i < v.items.size(); i += 2) {
        std::optional<Json> j = to_json(*v.items[i + 1], depth + 1, budget);
        if (!j) return std::nullopt;
        budget -= static_cast<i64>(v.items[i]->text.size());
        if (budget < 0) return std::nullopt;
        object[v.items[i]->text] = std::move(*j);
      }
      return object;
    }
    default: return std::nullopt;
  }
}

}  // namespace

std::optional<Json> pickle_json(const PickleValue& value) {
  i64 budget = kMaxJson;
  return to_json(value, 0, budget);
}

}  // namespace ds
