// SPDX-License-Identifier: Apache-2.0
#include "data/jinja/template.h"

#include <fmt/format.h>

#include <exception>

#include "base/as_error.h"
#include "base/check.h"
#include "data/jinja/interpreter.h"
#include "data/jinja/syntax.h"
#include "data/tokenizer/unicode.h"

namespace ds::jinja {

struct Template::Parts {
  std::string name;
  NameTable names;
  Body body;
};

Template::Template(std::string_view source, std::string name) {
  DS_CHECK(static_cast<i64>(source.size()) <= kMostSourceBytes, Errc::Unavailable,
           "{}: a template of more than {} bytes is not supported", name, kMostSourceBytes);
  DS_CHECK(tokenizer::is_utf8(source), Errc::Corrupt, "{}: the template is not UTF-8", name);
  auto parts = std::make_unique<Parts>();
  parts->name = std::move(name);
  parts->body = parse(source, parts->name, parts->names);
  parts_ = std::move(parts);
}

Template::~Template() = default;
Template::Template(Template&&) noexcept = default;
Template& Template::operator=(Template&&) noexcept = default;

std::string Template::render(const Json& variables, std::time_t now, const Limits& limits) const {
  Interpreter interpreter(parts_->names, limits, now);
  try {
    return interpreter.render(parts_->body, variables);
  } catch (const std::exception& e) {
    const Error error = as_error(e);
    const std::string line = interpreter.line() > 0 ? fmt::format(":{}", interpreter.line()) : std::string();
    throw Error(error.code(), fmt::format("{}{}: {}", parts_->name, line, error.what()));
  }
}

}  // namespace ds::jinja
