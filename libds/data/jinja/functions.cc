// SPDX-License-Identifier: Apache-2.0
// The functions that a template finds: Jinja's, and those that transformers
// adds.
#include <algorithm>

#include "base/check.h"
#include "data/jinja/interpreter.h"
#include "data/jinja/tables.h"

namespace ds::jinja {
namespace {

constexpr i64 kMostOfRange = 100'000;  // as in jinja2's sandbox

Value range(Interpreter& in, const Value&, Arguments& arguments) {
  const Bound bound(arguments, "range()", {"start", "stop", "step"}, 1);
  const bool is_one = !bound.has(1);
  const i64 start = is_one ? 0 : bound.integer(0, 0), stop = is_one ? bound.integer(0, 0) : bound.integer(1, 0);
  const i64 step = bound.integer(2, 1);
  DS_CHECK(step != 0, Errc::Config, "the step of range() must not be 0");
  std::vector<Value> items;
  for (i64 at = start; step > 0 ? at < stop : at > stop;) {
    DS_CHECK(static_cast<i64>(items.size()) < kMostOfRange, Errc::Config, "a range has at most {} elements",
             kMostOfRange);
    in.budget().step();
    items.emplace_back(at);
    if (__builtin_add_overflow(at, step, &at)) break;
  }
  return in.list(std::move(items), List::Kind::Range);
}

std::vector<std::pair<Value, Value>> members_of(Interpreter& in, Arguments& arguments, std::string_view callee) {
  DS_CHECK(arguments.positional.size() <= 1, Errc::Config, "{} takes one value, and named ones", callee);
  std::vector<std::pair<Value, Value>> members;
  if (!arguments.positional.empty()) {
    const Value& from = arguments.positional[0];
    if (from.is_dict()) {
      members = from.as_dict().members;
    } else {
      for (const Value& pair : in.elements(from)) {
        std::vector<Value> two = in.elements(pair);
        DS_CHECK(two.size() == 2, Errc::Config, "{} needs pairs of a key and a value", callee);
        members.emplace_back(std::move(two[0]), std::move(two[1]));
      }
    }
  }
  for (auto& [name, value] : arguments.named) members.emplace_back(in.text(name), std::move(value));
  return members;
}

Value make_dict(Interpreter& in, const Value&, Arguments& arguments) {
  return in.dict(members_of(in, arguments, "dict()"));
}

Value make_space(Interpreter& in, const Value&, Arguments& arguments) {
  const Value dict = in.dict(members_of(in, arguments, "namespace()"));
  std::vector<std::pair<std::string, Value>> members;
  for (const auto& [key, value] : dict.as_dict().members) {
    DS_CHECK(key.is_text() && !key.as_text().bytes.starts_with('_'), Errc::Config,
             "the members of a namespace need names, which must not begin with _");
    members.emplace_back(key.as_text().bytes, value);
  }
  return in.make_namespace(std::move(members));
}

Value raise(Interpreter& in, const Value&, Arguments& arguments) {
  const Bound bound(arguments, "raise_exception()", {"message"}, 1);
  throw Error(Errc::Config, in.string(bound[0]));
}

Value time_now(Interpreter& in, const Value&, Arguments& arguments) {
  const Bound bound(arguments, "strftime_now()", {"format"}, 1);
  const std::string& form = bound.text(0);
  DS_CHECK(form.size() <= 1000 && form.find('\0') == form.npos, Errc::Config,
           "the format of strftime_now() is too long");
  std::tm parts{};
  const std::time_t now = in.now();
  localtime_r(&now, &parts);
  std::string plain;  // without the fields that Python leaves empty: a time zone
  for (size_t i = 0; i < form.size(); ++i) {
    const bool is_field = form[i] == '%' && i + 1 < form.size();
    if (is_field && form[i + 1] == 'f') plain += "000000";
    if (is_field && form[i + 1] != 'f' && form[i + 1] != 'z' && form[i + 1] != 'Z') plain += form.substr(i, 2);
    if (is_field) {
      ++i;
    } else {
      plain += form[i];
    }
  }
  std::string out(plain.size() * 64 + 256, '\0');
  plain += ' ';  // so that an empty result differs from a failure
  const size_t bytes = std::strftime(out.data(), out.size(), plain.c_str(), &parts);
  DS_CHECK(bytes > 0, Errc::Config, "strftime_now() does not know the format '{}'", form);
  out.resize(bytes - 1);
  return in.text(std::move(out));
}

Value unsupported(Interpreter&, const Value&, Arguments&) {
  throw Error(Errc::Unavailable, "cycler, joiner, lipsum and self are not supported");
}

constexpr Entry kFunctions[] = {
    {"self", unsupported},      {"cycler", unsupported}, {"dict", make_dict},
    {"joiner", unsupported},    {"lipsum", unsupported}, {"namespace", make_space},
    {"raise_exception", raise}, {"range", range},        {"strftime_now", time_now},
};

}  // namespace

Native find_function(std::string_view name) {
  const auto found = std::ranges::find(kFunctions, name, &Entry::name);
  return found == std::end(kFunctions) ? nullptr : found->native;
}

}  // namespace ds::jinja
