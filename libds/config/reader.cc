// SPDX-License-Identifier: Apache-2.0
#include "config/reader.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/content_kind.h"
#include "base/file.h"
#include "base/relaxed_json.h"
#include "ds/nearest.h"

namespace ds {
namespace {

constexpr i64 kMostUnknown = 30;       // keys that are told one by one
constexpr i64 kMostPassedOver = 1000;  // more keys of other programs than any has

template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};
template <class... F>
Overloaded(F...) -> Overloaded<F...>;

std::vector<std::string_view> split_words(std::string_view s) {
  std::vector<std::string_view> words;
  while (!s.empty()) {
    const size_t blank = std::min(s.find(' '), s.size());
    if (blank > 0) words.push_back(s.substr(0, blank));
    s.remove_prefix(std::min(blank + 1, s.size()));
  }
  return words;
}

// A value as it stands in a message: short, on one line.
std::string show(const Json& v) {
  if (v.is_object()) return "an object";
  std::string s = v.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (s.size() > 60) s = v.is_array() ? "an array" : s.substr(0, 57) + "...";
  return s;
}

std::string describe(double x) {
  if (x == 0x1p63) return fmt::format("{}", std::numeric_limits<i64>::max());
  return std::fabs(x) < 1e15 && x == std::floor(x) ? fmt::format("{:.0f}", x) : fmt::format("{}", x);
}

Range of_integers(Range r) {
  if (!std::isfinite(r.high)) r.high = kMostCount;
  return r;
}

std::string range_text(const Range& r) {
  if (!std::isfinite(r.high)) {
    if (!std::isfinite(r.low)) return "";
    return r.open_low ? "greater than " + describe(r.low) : "at least " + describe(r.low);
  }
  if (!r.open_low && !r.open_high) return fmt::format("{} to {}", describe(r.low), describe(r.high));
  return fmt::format("{} {} and {} {}", r.open_low ? "greater than" : "at least", describe(r.low),
                     r.open_high ? "less than" : "at most", describe(r.high));
}

bool in_range(double x, const Range& r) {
  return (r.open_low ? x > r.low : x >= r.low) && (r.open_high ? x < r.high : x <= r.high);
}

std::optional<i64> as_integer(const Json& v) {
  if (v.is_number_unsigned()) {
    const u64 x = v.get<u64>();
    return std::in_range<i64>(x) ? std::optional(static_cast<i64>(x)) : std::nullopt;
  }
  if (v.is_number_integer()) return v.get<i64>();
  if (v.is_number_float()) {  // 5e8 is how DeepSpeed's own documents write bucket sizes
    const double x = v.get<double>();
    if (x == std::floor(x) && std::fabs(x) < 0x1p63) return static_cast<i64>(x);
  }
  return std::nullopt;
}

// DeepSpeed takes the names of optimizers and types in any case.
bool same_name(std::string_view a, std::string_view b) { return a.size() == b.size() && edit_distance(a, b) == 0; }

// The sections that DeepSpeed reads with pydantic, which takes a number or a truth value in other forms too, and from
// which it drops what is "auto".
bool is_lax(std::string_view path) {
  constexpr std::string_view kSections[] = {"zero_optimization", "fp16",        "bf16",         "tensor_parallel",
                                            "tensorboard",       "csv_monitor", "comms_logger", "timers"};
  return std::ranges::find(kSections, path.substr(0, path.find('.'))) != std::end(kSections);
}

// The truth value or number as which such a section reads `v`; nothing if it is neither, or is one already.
std::optional<Json> lax_value(const Slot& slot, const Json& v) {
  if (std::holds_alternative<bool*>(slot)) {
    if (v == 0 || v == 1) return Json(v == 1);
    if (!v.is_string()) return std::nullopt;
    for (const auto& [word, value] : {std::pair{"true", true},
                                      {"yes", true},
                                      {"on", true},
                                      {"1", true},
                                      {"false", false},
                                      {"no", false},
                                      {"off", false},
                                      {"0", false}}) {
      if (same_name(word, v.get_ref<const std::string&>())) return Json(value);
    }
    return std::nullopt;
  }
  const bool number = std::holds_alternative<i64*>(slot) || std::holds_alternative<double*>(slot) ||
                      std::holds_alternative<float*>(slot);
  if (!number || !v.is_string()) return std::nullopt;
  const Json read = Json::parse(v.get_ref<const std::string&>(), nullptr, false);
  return read.is_number() ? std::optional(read) : std::nullopt;
}

// Whether such a section takes `v` for one of these values.
bool is_lax_one_of(const Json& v, const Json& values) {
  bool truth = false;
  i64 number = 0;
  for (const Json& value : values) {
    if (value.is_boolean() && lax_value(Slot(&truth), v) == value) return true;
    if (value.is_number() && lax_value(Slot(&number), v) == value) return true;
  }
  return false;
}

// Stores v; or returns what it must be.
std::optional<std::string> assign(const Slot& slot, const Range& range, const Json& v) {
  const std::string expected = type_text(slot, range);
  const auto number = [&](auto* at) -> std::optional<std::string> {
    using T = std::remove_pointer_t<decltype(at)>;
    if (!v.is_number() || !in_range(v.get<double>(), range)) return expected;
    const T x = v.get<T>();
    const bool fits = std::is_same_v<T, double> || in_range(x, range);
    const bool is_fp32 = std::is_same_v<T, float> || range.fp32;
    const float single = static_cast<float>(x);  // it may become infinite there, or 0
    if (!fits || (is_fp32 && (!std::isfinite(single) || (single == 0) != (v.get<double>() == 0))))
      return "a number that fits fp32";
    *at = x;
    return std::nullopt;
  };
  return std::visit(
      Overloaded{[&](bool* at) -> std::optional<std::string> {
                   if (!v.is_boolean()) return expected;
                   *at = v.get<bool>();
                   return std::nullopt;
                 },
                 [&](i64* at) -> std::optional<std::string> {
                   const std::optional<i64> x = as_integer(v);
                   if (!x || !in_range(static_cast<double>(*x), of_integers(range))) return expected;
                   *at = *x;
                   return std::nullopt;
                 },
                 [&](double* at) { return number(at); }, [&](float* at) { return number(at); },
                 [&](std::string* at) -> std::optional<std::string> {
                   if (v == "") return "a string that is not empty";
                   if (!v.is_string()) return expected;
                   *at = v.get<std::string>();
                   return std::nullopt;
                 },
                 [&](EnumSlot at) -> std::optional<std::string> {
                   if (!v.is_string()) return expected;
                   for (const EnumName& n : at.names) {
                     if (n.value == EnumName::kLater || !same_name(n.name, v.get_ref<const std::string&>())) continue;
                     *at.value = n.value;
                     return std::nullopt;
                   }
                   return expected;
                 },
                 [&](BetasSlot at) -> std::optional<std::string> {
                   const auto good = [&](const Json& x) { return x.is_number() && in_range(x.get<double>(), range); };
                   if (!v.is_array() || v.size() != 2 || !good(v[0]) || !good(v[1])) return expected;
                   *at.first = v[0].get<double>();
                   *at.second = v[1].get<double>();
                   return std::nullopt;
                 },
                 [&](std::vector<std::string>* at) -> std::optional<std::string> {
                   const Json list = v.is_string() ? Json::array({v}) : v;
                   if (!list.is_array()) return expected;
                   std::vector<std::string> words;
                   for (const Json& x : list) {
                     if (!x.is_string() || x.get_ref<const std::string&>().empty()) return expected;
                     words.push_back(x.get<std::string>());
                   }
                   *at = std::move(words);
                   return std::nullopt;
                 },
                 [&](std::vector<float>* at) -> std::optional<std::string> {
                   if (!v.is_array()) return expected;
                   std::vector<float> numbers;
                   for (const Json& x : v) {
                     if (!x.is_number() || !in_range(x.get<float>(), range) || !std::isfinite(x.get<float>()))
                       return expected;
                     numbers.push_back(x.get<float>());
                   }
                   *at = std::move(numbers);
                   return std::nullopt;
                 },
                 [&](std::vector<i64>* at) -> std::optional<std::string> {
                   if (!v.is_array()) return expected;
                   std::vector<i64> numbers;
                   for (const Json& x : v) {
                     const std::optional<i64> n = as_integer(x);
                     if (!n || !in_range(static_cast<double>(*n), of_integers(range))) return expected;
                     numbers.push_back(*n);
                   }
                   *at = std::move(numbers);
                   return std::nullopt;
                 },
                 [&](CountsSlot counts) -> std::optional<std::string> {
                   const Json list = v.is_array() ? v : Json::array({v});
                   if (list.empty() || assign(counts.at, range, list)) return expected;
                   return std::nullopt;
                 }},
      slot);
}

// "a.b[1].c" as names and indices; empty when it is no path.
std::vector<std::variant<std::string, size_t>> parse_path(std::string_view path) {
  std::vector<std::variant<std::string, size_t>> steps;
  while (!path.empty()) {
    if (path.front() == '[') {
      size_t index = 0;
      const auto [end, failed] = std::from_chars(path.data() + 1, path.data() + path.size(), index);
      const size_t length = static_cast<size_t>(end - path.data());
      if (steps.empty() || failed != std::errc() || length >= path.size() || path[length] != ']') return {};
      steps.emplace_back(index);
      path.remove_prefix(length + 1);
    } else {
      if (!steps.empty()) {
        if (path.front() != '.') return {};
        path.remove_prefix(1);
      }
      const size_t length = std::min(path.find_first_of(".["), path.size());
      if (length == 0) return {};
      steps.emplace_back(std::string(path.substr(0, length)));
      path.remove_prefix(length);
    }
  }
  return steps;
}

}  // namespace

std::string type_text(const Slot& slot, const Range& range) {
  const bool integer = std::holds_alternative<i64*>(slot) || std::holds_alternative<std::vector<i64>*>(slot) ||
                       std::holds_alternative<CountsSlot>(slot);
  const std::string bounds = range_text(integer ? of_integers(range) : range);
  const auto bounded = [&](std::string_view type) {
    return bounds.empty() ? std::string(type) : fmt::format("{}, {}", type, bounds);
  };
  return std::visit(
      Overloaded{[&](bool*) -> std::string { return "true or false"; }, [&](i64*) { return bounded("an integer"); },
                 [&](double*) { return bounded("a number"); }, [&](float*) { return bounded("a number"); },
                 [&](std::string*) -> std::string { return "a string"; },
                 [&](EnumSlot e) {
                   std::vector<std::string_view> names;
                   for (const EnumName& n : e.names)
                     if (n.value != EnumName::kLater) names.push_back(n.name);
                   return names.size() == 1 ? fmt::format("\"{}\"", names[0])
                                            : fmt::format("one of \"{}\"", fmt::join(names, "\", \""));
                 },
                 [&](BetasSlot) { return fmt::format("an array of two numbers, {}", bounds); },
                 [&](std::vector<std::string>*) -> std::string { return "a string or an array of strings"; },
                 [&](std::vector<float>*) { return fmt::format("an array of numbers, {}", bounds); },
                 [&](std::vector<i64>*) { return fmt::format("an array of integers, {}", bounds); },
                 [&](CountsSlot) { return fmt::format("an integer or an array of integers, {}", bounds); }},
      slot);
}

std::string_view enum_name(std::span<const EnumName> names, u8 value) {
  for (const EnumName& n : names)
    if (n.value == value) return n.name;
  return {};
}

Json slot_json(const Slot& slot) {
  return std::visit(
      Overloaded{[](EnumSlot e) -> Json { return enum_name(e.names, *e.value); },
                 [](BetasSlot b) {
                   return Json::array({*b.first, *b.second});
                 },
                 [](CountsSlot c) -> Json { return c.at->size() == 1 ? Json(c.at->front()) : Json(*c.at); },
                 [](float* x) -> Json { return shortest_decimal(*x); },
                 [](std::vector<float>* v) {
                   Json out = Json::array();
                   for (float x : *v) out.push_back(shortest_decimal(x));
                   return out;
                 },
                 [](auto* x) -> Json { return *x; }},
      slot);
}

std::variant<std::string, Diagnostic> read_config_text(const std::string& path, bool is_input) {
  constexpr i64 kMostBytes = i64{16} << 20;
  try {
    return is_input ? read_standard_input(kMostBytes) : read_named_text(path, kMostBytes);
  } catch (const Error& e) {
    return Diagnostic{.source = is_input ? "standard input" : path, .message = e.what()};
  }
}

ConfigText::ConfigText(std::string_view text, std::string name, std::vector<Diagnostic>& diagnostics) {
  origins_[""] = {name, {}};
  const auto is_another = [&](const Json& root) {
    const std::string_view kind = root.is_object() ? kind_of_json(root) : "";
    if (!kind.empty())
      diagnostics.push_back({.source = name, .message = fmt::format("is {}, not a configuration", kind)});
    return !kind.empty();
  };
  try {
    JsonDocument document = parse_relaxed_json(text, name);
    for (const auto& [path, place] : document.places) origins_[path] = {name, place};
    if (is_another(document.root)) return;
    if (document.root.is_object()) {
      root_ = std::move(document.root);
    } else {
      diagnostics.push_back(at("", Errc::Config, "must be a JSON object, { ... }"));
    }
  } catch (const JsonError& e) {
    try {  // a file of JSON in every line
      if (e.place().line > 1 && is_another(parse_json(text.substr(0, text.find('\n')), name).root)) return;
    } catch (const JsonError&) {
    }
    diagnostics.push_back({.source = name, .line = e.place().line, .column = e.place().column, .message = e.message()});
  }
}

void ConfigText::set(const std::string& argument, std::vector<Diagnostic>& diagnostics) {
  const std::string source = fmt::format("--set {}", argument);
  const auto refuse = [&](std::string path, std::string why) {
    diagnostics.push_back({.source = source, .key = std::move(path), .message = std::move(why)});
  };
  const size_t equals = argument.find('=');
  const std::string path = argument.substr(0, std::min(equals, argument.size()));
  const auto steps = parse_path(path);
  if (equals == std::string::npos || steps.empty())
    return refuse("", "must look like key=value, section.key=value or key[0]=value");

  const std::string_view text = std::string_view(argument).substr(equals + 1);
  Json value;
  try {
    value = parse_json(text, source, {.comments = false, .places = false}).root;
  } catch (const JsonError& e) {
    if (!text.empty() && std::string_view("[{\"").find(text.front()) != std::string_view::npos)
      return refuse(path, fmt::format("the value is not JSON: column {}: {}; a text that begins so stands in quotes: "
                                      "'{}=\"...\"'",
                                      e.place().column, e.message(), path));
    if (Json::accept(text)) return refuse(path, e.message());  // a number that is too small for a double
    value = std::string(text);
  }
  try {
    (void)value.dump();
  } catch (const Json::exception&) {
    return refuse(path, "the value is not UTF-8");
  }

  Json* at = &root_;
  std::string walked;
  for (const auto& step : steps) {
    if (const auto* name = std::get_if<std::string>(&step)) {
      if (at->is_null()) *at = Json::object();
      if (!at->is_object()) return refuse(path, fmt::format("{} is {}, not an object", walked, show(*at)));
      at = &(*at)[*name];
      walked = json_member(walked, *name);
    } else {
      const size_t index = std::get<size_t>(step);
      if (at->is_null()) *at = Json::array();
      if (!at->is_array()) return refuse(path, fmt::format("{} is {}, not an array", walked, show(*at)));
      if (index > at->size()) return refuse(path, fmt::format("{} has only {} elements", walked, at->size()));
      if (index == at->size()) at->push_back(nullptr);
      at = &(*at)[index];
      walked = json_element(walked, index);
    }
    origins_.try_emplace(walked, Origin{source, {}});  // made by this argument
  }
  *at = std::move(value);
  std::erase_if(origins_, [&](const auto& o) {
    return o.first.starts_with(walked) &&
           (o.first.size() == walked.size() || o.first[walked.size()] == '.' || o.first[walked.size()] == '[');
  });
  origins_[walked] = {source, {}};
}

void ConfigText::modernize(std::vector<Diagnostic>& diagnostics) {
  constexpr std::string_view kZero = "zero_optimization";
  const auto it = root_.find(kZero);
  if (it == root_.end() || !it->is_boolean()) return;
  const int stage = it->get<bool>() ? 1 : 0;
  Diagnostic d = at(kZero, Errc::Config, fmt::format("deprecated; write {{\"stage\": {}}}", stage));
  d.severity = Severity::Warning;
  diagnostics.push_back(std::move(d));
  *it = {{"stage", stage}};
}

Diagnostic ConfigText::at(std::string_view path, Errc code, std::string message) const {
  std::string_view p = path;
  auto it = origins_.find(p);
  while (it == origins_.end()) {  // a value inside a --set object, or a missing key: the nearest that has a place
    const size_t cut = p.find_last_of(".[");
    p = cut == p.npos ? std::string_view() : p.substr(0, cut);
    it = origins_.find(p);
  }
  return {.code = code,
          .source = it->second.source,
          .line = it->second.place.line,
          .column = it->second.place.column,
          .key = std::string(path),
          .message = std::move(message)};
}

void Reader::read(const Json& object) {
  read_object(object, prefix_, "");
  report_without_effect();
  for (const auto& [severity, rest] :
       {std::pair{Severity::Error, unknown_errors_}, std::pair{Severity::Warning, unknown_warnings_}}) {
    if (rest.keys > 0)
      report(severity, Errc::Config, rest.first, rest.first,
             rest.keys == 1 ? "unknown key" : fmt::format("unknown key, and so are {} more", rest.keys - 1));
  }
}

void Reader::report_without_effect() {
  if (without_effect_.empty()) return;
  const auto& [first, note] = without_effect_.front();
  if (without_effect_.size() == 1)
    return report(Severity::Warning, Errc::Config, first, first, fmt::format("has no effect: {}", note));
  constexpr size_t kMost = 8;  // names of one line
  std::string others;
  for (size_t i = 1; i < std::min(without_effect_.size(), kMost); ++i)
    others += fmt::format("{}{}", i == 1 ? "" : ", ", without_effect_[i].first);
  if (without_effect_.size() > kMost) others += fmt::format(" and {} more", without_effect_.size() - kMost);
  report(Severity::Warning, Errc::Config, first, first,
         fmt::format("has no effect here, nor have: {}; ds-config-keys(5) says why", others));
}

bool Reader::any_broken(std::initializer_list<std::string_view> paths) const {
  return std::any_of(paths.begin(), paths.end(), [&](std::string_view p) { return broken(p); });
}

// As the text spells it, which may be another name.
std::string Reader::spelling(std::string_view path) const {
  const auto it = seen_.find(path);
  return it == seen_.end() ? json_join(prefix_, path) : it->second.typed;
}

void Reader::error(std::string_view path, std::string message, Errc code) {
  report(Severity::Error, code, path, spelling(path), std::move(message));
}

void Reader::warning(std::string_view path, std::string message) {
  report(Severity::Warning, Errc::Config, path, spelling(path), std::move(message));
}

void Reader::not_yet(std::string_view path, std::string_view what) {
  error(path, fmt::format("{} is not supported yet (libds {})", what, DS_VERSION), Errc::Unavailable);
}

void Reader::report(Severity severity, Errc code, std::string_view path, const std::string& typed,
                    std::string message) {
  Diagnostic d = text_.at(typed, code, std::move(message));
  d.severity = severity;
  if (severity == Severity::Error) {
    broken_.emplace(path);
    given_.erase(std::string(path));
  }
  diagnostics_.push_back(std::move(d));
}

const Key* Reader::find(std::string_view path) const {
  const auto it = std::find_if(keys_.begin(), keys_.end(), [&](const Key& k) { return k.path == path; });
  return it == keys_.end() ? nullptr : &*it;
}

bool Reader::is_section(std::string_view path) const {
  return std::any_of(keys_.begin(), keys_.end(), [&](const Key& k) {
    return k.path.size() > path.size() && k.path.starts_with(path) && k.path[path.size()] == '.';
  });
}

bool Reader::has_later_type(const Json& object, const std::string& path) const {
  const Key* key = find(json_member(path, "type"));
  const auto type = object.find("type");
  if (key == nullptr || key->kind != KeyKind::Effect || type == object.end() || !type->is_string()) return false;
  const Slot slot = key->slot(root_);
  const auto* e = std::get_if<EnumSlot>(&slot);
  return e != nullptr && std::any_of(e->names.begin(), e->names.end(), [&](const EnumName& n) {
           return n.value == EnumName::kLater && same_name(n.name, type->get_ref<const std::string&>());
         });
}

void Reader::read_object(const Json& object, const std::string& typed, const std::string& path) {
  for (const auto& [name, value] : object.items()) {
    const std::string typed_key = json_member(typed, name);
    if (name.find_first_of(".[") != std::string::npos && !(passes_over_unknown_ && path.empty())) {
      report_unknown(Severity::Error, typed_key,
                     "unknown key; sections are nested objects: no key has a dot or a bracket");
      continue;
    }
    std::string key_path = json_member(path, name);
    const Key* key = find(key_path);
    if (key && (key->kind == KeyKind::Alias || key->kind == KeyKind::Deprecated)) {
      key_path = key->name;
      if (key->kind == KeyKind::Deprecated)
        report(Severity::Warning, Errc::Config, key_path, typed_key,
               fmt::format("deprecated; write {}", json_join(prefix_, key_path)));
      key = find(key_path);
    }
    if (!key && !is_section(key_path)) {
      unknown(name, value, typed, path);
      continue;
    }
    if (const auto before = seen_.find(key_path); passes_over_unknown_ && before != seen_.end()) {
      if (value.is_null()) continue;
      if (before->second.value->is_null() && !broken(key_path)) seen_.erase(before);
    }
    const auto [first, is_new] = seen_.emplace(key_path, Seen{typed_key, &value});
    if (!is_new) {
      // Hugging Face writes both spellings of some keys
      if (*first->second.value == value) continue;
      report(Severity::Error, Errc::Config, key_path, typed_key,
             fmt::format("contradicts {}, which is the same key", first->second.typed));
    } else if (key) {
      read_key(*key, value, typed_key);
    } else if (value.is_object()) {
      given_.emplace(key_path);
      if (name != "params" || !has_later_type(object, path)) read_object(value, typed_key, key_path);
    } else if (!value.is_null() && !(value == "auto" && !path.empty() && is_lax(key_path)) &&
               !(passes_over_unknown_ && value == false)) {
      report(Severity::Error, Errc::Config, key_path, typed_key, fmt::format("must be an object, not {}", show(value)));
    }
  }
}

void Reader::read_key(const Key& key, const Json& value, const std::string& typed) {
  switch (key.kind) {
    case KeyKind::Effect: return store(key, value, typed);
    case KeyKind::NotYet: {
      const Json accepted = Json::parse(key.values);
      if (value.is_null() || std::find(accepted.begin(), accepted.end(), value) != accepted.end()) return;
      if (is_lax(key.path) && (value == "auto" || is_lax_one_of(value, accepted))) return;
      if (key.harmless) return no_effect(typed, key.note);
      std::string choices;
      for (const Json& v : accepted) choices += (choices.empty() ? "" : " or ") + v.dump();
      return report(Severity::Error, Errc::Unavailable, key.path, typed,
                    fmt::format("{} is not supported yet (libds {}); {} is accepted{}{}", show(value), DS_VERSION,
                                choices, key.note.empty() ? "" : ": ", key.note));
    }
    case KeyKind::NotYetSection:
    case KeyKind::IgnoredSection: return read_section(key, value, typed);
    case KeyKind::Ignored: return no_effect(typed, key.note);
    case KeyKind::Refused:
      if (value == "auto" && is_lax(key.path)) return;
      broken_.emplace(key.path);
      if (refusals_.insert(key.note).second)
        report(Severity::Error, Errc::Config, key.path, typed, std::string(key.note));
      return;
    case KeyKind::Subtable:
    case KeyKind::Silent:
    case KeyKind::Alias:
    case KeyKind::Deprecated: return;
  }
}

void Reader::read_section(const Key& key, const Json& value, const std::string& typed) {
  if (value == "auto" && is_lax(key.path)) return;
  if (value.is_null() || (value == Json::object() && (key.takes_null || key.kind == KeyKind::IgnoredSection))) return;
  if (!value.is_object())
    return report(Severity::Error, Errc::Config, key.path, typed,
                  fmt::format("must be an object, not {}", show(value)));
  const std::vector<std::string_view> members = split_words(key.members);
  for (const auto& [name, inner] : value.items()) {
    if (std::find(members.begin(), members.end(), name) != members.end()) continue;
    const std::string inner_typed = json_member(typed, name);
    const std::string_view meant = unknown_told_ < kMostUnknown ? nearest(name, members) : "";
    report_unknown(Severity::Error, inner_typed,
                   meant.empty() ? "unknown key; ds-config-keys(5) lists all"
                                 : fmt::format("unknown key; did you mean {}?", json_member(typed, meant)));
  }
  if (key.kind == KeyKind::IgnoredSection) {
    return no_effect(typed, key.note);
  }
  if (key.name.empty())
    return report(Severity::Error, Errc::Unavailable, key.path, typed,
                  fmt::format("{} is not supported yet (libds {})", typed, DS_VERSION));
  const Json off = Json::parse(key.values);
  for (const std::string_view name : split_words(key.name)) {
    std::string pointer = fmt::format("/{}", name);
    std::replace(pointer.begin(), pointer.end(), '.', '/');
    const Json at = value.value(Json::json_pointer(pointer), Json());
    if (at.is_null() ? key.takes_null : std::find(off.begin(), off.end(), at) != off.end()) continue;
    if (key.harmless) {
      no_effect(json_join(typed, name), key.note);
      continue;
    }
    report(Severity::Error, Errc::Unavailable, key.path, json_join(typed, name),
           fmt::format("{} is not supported yet (libds {}); {} turns it off", typed, DS_VERSION, off[0].dump()));
  }
}

void Reader::store(const Key& key, const Json& value, const std::string& typed) {
  const auto fail = [&](std::string message, Errc code = Errc::Config) {
    report(Severity::Error, code, key.path, typed, std::move(message));
  };
  if ((value.is_null() && key.takes_null) || (value == "" && key.takes_empty)) return;
  if (passes_over_unknown_ && value == false && key.takes_null && !std::holds_alternative<bool*>(key.slot(root_)))
    return;
  if ((key.takes_auto || is_lax(key.path)) && value == "auto") {
    automatic_.emplace(key.path);
    return;
  }
  const Slot slot = key.slot(root_);
  if (const std::optional<Json> read = is_lax(key.path) ? lax_value(slot, value) : std::nullopt) {
    if (!assign(slot, key.range, *read)) {
      report(Severity::Warning, Errc::Config, key.path, typed,
             fmt::format("{} is read as {}", show(value), read->dump()));
      given_.emplace(key.path);
      return;
    }
  }
  if (const auto* e = std::get_if<EnumSlot>(&slot); e && value.is_string()) {
    const std::string& typed_name = value.get_ref<const std::string&>();
    std::vector<std::string_view> names;
    for (const EnumName& n : e->names) {
      if (n.value == EnumName::kLater && same_name(n.name, typed_name))
        return fail(fmt::format("{} is not supported yet (libds {}); must be {}", show(value), DS_VERSION,
                                type_text(slot, key.range)),
                    Errc::Unavailable);
      if (n.value != EnumName::kLater) names.push_back(n.name);  // no suggestion that would be refused
    }
    if (const std::string_view meant = nearest(typed_name, names); !meant.empty() && !same_name(meant, typed_name))
      return fail(
          fmt::format("must be {}, not {}; did you mean \"{}\"?", type_text(slot, key.range), show(value), meant));
  }
  if (const std::optional<std::string> expected = assign(slot, key.range, value)) {
    std::string hint;
    if (value == "auto") {
      hint = "; \"auto\" has no meaning here";
    } else if (value.is_string()) {
      const std::string& s = value.get_ref<const std::string&>();
      const bool bare = !s.empty() && Json::accept(s) && !assign(slot, key.range, Json::parse(s));
      if (bare) hint = fmt::format("; write {} without quotes", s);
    }
    return fail(fmt::format("must be {}, not {}{}", *expected, show(value), hint));
  }
  given_.emplace(key.path);
}

void Reader::report_unknown(Severity severity, const std::string& typed, std::string message) {
  if (++unknown_told_ <= kMostUnknown) return report(severity, Errc::Config, typed, typed, std::move(message));
  NotTold& rest = severity == Severity::Error ? unknown_errors_ : unknown_warnings_;
  if (rest.keys++ == 0) rest.first = typed;
}

// Looks among the names of the same section first; a name that is spelled exactly so elsewhere wins over a likeness, at
// the top even over one of a single letter.
void Reader::unknown(std::string_view name, const Json& value, const std::string& parent,
                     const std::string& parent_path) {
  if (passes_over_unknown_ && parent_path.empty() && is_neutral_(name, value)) return;
  std::string best;
  bool best_is_beside = false;  // in the same section
  i64 best_score = std::numeric_limits<i64>::max();
  const auto consider = [&](std::string_view candidate, std::string path, i64 penalty, bool is_beside) {
    if (!resembles(name, candidate)) return;
    // A name with a word left out at an end is the likeliest of all.
    const bool whole_words =
        candidate.ends_with(fmt::format("_{}", name)) || candidate.starts_with(fmt::format("{}_", name));
    const i64 distance = edit_distance(name, candidate);
    const i64 score = 2 * (whole_words ? std::min<i64>(distance, 2) : distance) + penalty;
    if (score >= best_score) return;
    best_score = score;
    best = std::move(path);
    best_is_beside = is_beside;
  };
  const bool passed_over =
      passes_over_unknown_ && (parent_path.empty() ? !never_passed_over_.contains(name) : !value.is_object());
  // Whether another program's key resembles one of ours decides what it is.
  const bool weighed = unknown_told_ < kMostUnknown || (passed_over && unknown_warnings_.keys < kMostPassedOver);
  for (const Key& k : keys_) {
    if (!weighed) break;
    if (k.kind == KeyKind::Deprecated || k.kind == KeyKind::Refused || k.kind == KeyKind::Silent) continue;
    const size_t dot = k.path.rfind('.');
    const std::string_view section = dot == k.path.npos ? std::string_view() : k.path.substr(0, dot);
    const std::string_view leaf = k.path.substr(dot == k.path.npos ? 0 : dot + 1);
    consider(leaf, json_join(section == parent_path ? parent : prefix_, section == parent_path ? leaf : k.path),
             section == parent_path ? 0
             : parent_path.empty()  ? 1
                                    : 3,
             section == parent_path);
    if (section.starts_with(parent_path)) {  // a section inside this one
      std::string_view rest = section.substr(parent_path.size());
      if (!parent_path.empty() && rest.starts_with('.')) rest.remove_prefix(1);
      rest = rest.substr(0, rest.find('.'));
      if (!rest.empty()) consider(rest, json_member(parent, rest), 0, true);
    }
  }
  const std::string typed = json_member(parent, name);
  if (parent.empty() && name.starts_with('_'))
    return report_unknown(Severity::Warning, typed, "a remark, passed over: its name begins with '_'");
  const bool is_off = value.is_null() || value == false || (value == 0 && name.find("dropout") != name.npos);
  if (((best.empty() && weighed) || is_off) && passed_over)
    return report_unknown(Severity::Warning, typed, "unknown key, passed over: no model of this type has it");
  const bool is_told = unknown_told_ < kMostUnknown;
  const std::string why = is_told && why_unknown_ && parent_path.empty() ? why_unknown_(name) : "";
  if (!why.empty() && !best_is_beside) best.clear();
  const std::string hint = !best.empty() ? fmt::format("; did you mean {}?", best)
                           : why.empty() ? "; ds-config-keys(5) lists all"
                                         : "";
  report_unknown(Severity::Error, typed, fmt::format("unknown key{}{}{}", why.empty() ? "" : ": ", why, hint));
}

}  // namespace ds
