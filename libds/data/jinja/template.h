// SPDX-License-Identifier: Apache-2.0
#pragma once
// Chat templates: the part of Jinja that transformers' sandbox gives them, with
// its results byte for byte.

#include <ctime>
#include <memory>
#include <string>
#include <string_view>

#include "base/json.h"
#include "data/jinja/budget.h"

namespace ds::jinja {

class Template {
 public:
  // `name` stands in errors: "name:line: ..". Throws Errc::Corrupt for mistakes
  // in the source, and Errc::Unavailable for what libds does not support, or
  // for a source of more than kMostSourceBytes.
  Template(std::string_view source, std::string name);
  ~Template();
  Template(Template&&) noexcept;
  Template& operator=(Template&&) noexcept;

  // The text, with the members of the object `variables`. Reentrant. Throws
  // Errc::Config where the template or Python raises an exception, with the
  // message of raise_exception(), and Errc::Unavailable for what exceeds the
  // limits or is not supported. `now` is the time of strftime_now(), shown as
  // local time.
  std::string render(const Json& variables, std::time_t now, const Limits& limits = {}) const;

 private:
  struct Parts;
  std::unique_ptr<const Parts> parts_;
};

}  // namespace ds::jinja
