// SPDX-License-Identifier: Apache-2.0
#include "data/jinja/format.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

#include "base/check.h"
#include "data/jinja/interpreter.h"
#include "data/jinja/text.h"
#include "data/tokenizer/unicode.h"

namespace ds::jinja {
namespace {

constexpr i64 kMostWidth = 1'000'000;

// How one value is written: fill, alignment, sign, width, precision, type.
struct Form {
  std::string fill = " ";
  char align = '\0', sign = '-', type = '\0', grouping = '\0';
  bool alternate = false;
  i64 width = 0;
  std::optional<i64> precision = {};
};

bool is_decimal_digit(char c) { return c >= '0' && c <= '9'; }

i64 number_at(std::string_view text, size_t& at) {
  i64 value = 0;
  for (; at < text.size() && is_decimal_digit(text[at]); ++at)
    value = std::min(value * 10 + (text[at] - '0'), kMostWidth + 1);
  DS_CHECK(value <= kMostWidth, Errc::Unavailable, "a width above {} is not supported", kMostWidth);
  return value;
}

void add_padded(Builder& out, const Form& form, std::string_view prefix, std::string_view body, char align) {
  const i64 pad = std::max<i64>(form.width - count_chars(prefix) - count_chars(body), 0);
  const i64 left = align == '>' ? pad : align == '^' ? pad / 2 : 0;
  out.repeat(form.fill, left);
  out.add(prefix);
  if (align == '=') out.repeat(form.fill, pad);
  out.add(body);
  if (align != '=') out.repeat(form.fill, pad - left);
}

std::string grouped(std::string digits, char grouping, size_t every) {
  if (grouping == '\0') return digits;
  for (size_t at = digits.size(); at > every;) {
    at -= every;
    digits.insert(at, 1, grouping);
  }
  return digits;
}

std::string sign_of(bool is_negative, char sign) { return is_negative ? "-" : sign == '-' ? "" : std::string(1, sign); }

void add_integer(Builder& out, const Form& form, i64 value) {
  const u64 magnitude = value < 0 ? u64{0} - static_cast<u64>(value) : static_cast<u64>(value);
  std::string digits, prefix = sign_of(value < 0, form.sign);
  switch (form.type) {
    case 'x': digits = fmt::format("{:x}", magnitude); break;
    case 'X': digits = fmt::format("{:X}", magnitude); break;
    case 'o': digits = fmt::format("{:o}", magnitude); break;
    case 'b': digits = fmt::format("{:b}", magnitude); break;
    default: digits = fmt::format("{}", magnitude);
  }
  const bool is_based = form.type == 'x' || form.type == 'X' || form.type == 'o' || form.type == 'b';
  if (form.alternate && is_based) prefix += std::string("0") + form.type;
  add_padded(out, form, prefix, grouped(digits, form.grouping, is_based ? 4 : 3),
             form.align == '\0' ? '>' : form.align);
}

std::string real_digits(const Form& form, double x) {
  const int precision = static_cast<int>(std::min<i64>(form.precision.value_or(6), 1000));
  const bool is_upper = form.type == 'F' || form.type == 'E' || form.type == 'G';
  std::string digits;
  switch (form.type) {
    case 'f':
    case 'F': digits = fmt::format("{:.{}f}", x, precision); break;
    case '%': digits = std::isfinite(x) ? fmt::format("{:.{}f}%", x * 100, precision) : repr(x) + "%"; break;
    case 'e':
    case 'E': digits = fmt::format("{:.{}e}", x, precision); break;
    case 'g':
    case 'G': digits = fmt::format("{:.{}g}", x, precision); break;
    default:
      DS_CHECK(!form.precision, Errc::Unavailable, "a precision needs one of the types e, f, g and %");
      digits = repr(x);
  }
  if (is_upper)
    for (char& c : digits)
      if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
  return digits;
}

void add_real(Builder& out, const Form& form, double x) {
  const bool is_negative = std::signbit(x) && !std::isnan(x);
  std::string digits = real_digits(form, std::abs(x));
  const size_t whole = std::min(digits.find_first_not_of("0123456789"), digits.size());
  digits = grouped(digits.substr(0, whole), form.grouping, 3) + digits.substr(whole);
  add_padded(out, form, sign_of(is_negative, form.sign), digits, form.align == '\0' ? '>' : form.align);
}

void add_text(Builder& out, const Form& form, std::string_view text) {
  if (form.precision) text = text.substr(0, byte_of_char(text, *form.precision));
  add_padded(out, form, {}, text, form.align == '\0' ? '<' : form.align);
}

Form parse_form(std::string_view text) {
  Form form;
  size_t at = 0;
  const auto is_align = [](char c) { return c == '<' || c == '>' || c == '=' || c == '^'; };
  const size_t first = text.empty() ? 0 : tokenizer::char_bytes(text, 0);
  if (first < text.size() && is_align(text[first])) {
    form.fill = text.substr(0, first);
    form.align = text[first];
    at = first + 1;
  } else if (!text.empty() && is_align(text[0])) {
    form.align = text[at++];
  }
  const auto take_any = [&](std::string_view chars) {
    return at < text.size() && chars.find(text[at]) != chars.npos ? text[at++] : '\0';
  };
  if (const char sign = take_any("+- ")) form.sign = sign;
  form.alternate = take_any("#") != '\0';
  if (at < text.size() && text[at] == '0') {
    ++at;
    if (form.align == '\0') form.fill = "0", form.align = '=';
  }
  form.width = number_at(text, at);
  form.grouping = take_any(",_");
  if (take_any(".") != '\0') {
    DS_CHECK(at < text.size() && is_decimal_digit(text[at]), Errc::Config,
             "the format '{}' has no precision after its point", text);
    form.precision = number_at(text, at);
  }
  if (at < text.size()) form.type = text[at++];
  DS_CHECK(at == text.size(), Errc::Config, "invalid format '{}'", text);
  return form;
}

void add_formatted(Builder& out, const Value& value, std::string_view spec) {
  if (spec.empty()) return write(out, value);
  Form form = parse_form(spec);
  const auto is_type = [&](std::string_view types) { return form.type == '\0' || types.find(form.type) != types.npos; };
  const bool is_bool_as_text = value.is<bool>() && form.type == '\0';
  if (value.is_text() || is_bool_as_text) {
    DS_CHECK(is_type("s") && form.align != '=' && form.sign == '-' && form.grouping == '\0' && !form.alternate &&
                 !is_bool_as_text,
             Errc::Config, "the format '{}' does not suit a {}", spec, type_name(value));
    return add_text(out, form, value.as_text().bytes);
  }
  if (value.is_integer() && is_type("dxXob")) {
    DS_CHECK(!form.precision, Errc::Config, "the format of an integer has no precision");
    return add_integer(out, form, value.as_integer());
  }
  DS_CHECK(value.is_number() && is_type("eEfFgG%"), Errc::Config, "the format '{}' does not suit a {}", spec,
           type_name(value));
  add_real(out, form, value.as_real());
}

// "{name.attribute[index]!r:spec}"
class Braces {
 public:
  Braces(Interpreter& in, const Arguments& arguments) : in_(in), arguments_(arguments) {}

  void write_all(Builder& out, std::string_view form) {
    for (size_t at = 0; at < form.size();) {
      const size_t brace = std::min(form.find_first_of("{}", at), form.size());
      out.add(form.substr(at, brace - at));
      at = brace;
      if (at == form.size()) return;
      if (form.substr(at + 1).starts_with(form[at])) {
        out.add(form[at]);
        at += 2;
        continue;
      }
      DS_CHECK(form[at] == '{', Errc::Config, "a format contains a single '}}'");
      const size_t end = form.find('}', at);
      DS_CHECK(end != form.npos, Errc::Config, "a format contains a single '{{'");
      const std::string_view field = form.substr(at + 1, end - at - 1);
      DS_CHECK(field.find('{') == field.npos, Errc::Unavailable, "a format within a format is not supported");
      write_field(out, field);
      at = end + 1;
    }
  }

 private:
  void write_field(Builder& out, std::string_view field) {
    const size_t colon = std::min(field.find(':'), field.size());
    const std::string_view spec = colon < field.size() ? field.substr(colon + 1) : std::string_view();
    std::string_view name = field.substr(0, colon);
    char conversion = '\0';
    if (const size_t mark = name.find('!'); mark != name.npos) {
      DS_CHECK(mark + 2 == name.size() && (name[mark + 1] == 'r' || name[mark + 1] == 's'), Errc::Config,
               "a format has the conversions !r and !s only");
      conversion = name[mark + 1];
      name = name.substr(0, mark);
    }
    Value value = find(name);
    if (conversion != '\0') {
      Builder text(in_.budget());
      if (conversion == 'r') {
        write_repr(text, value);
      } else {
        write(text, value);
      }
      value = in_.text(text.finish());
    }
    add_formatted(out, value, spec);
  }

  Value find(std::string_view name) {
    size_t at = std::min(name.find_first_of(".["), name.size());
    Value value = first(name.substr(0, at));
    while (at < name.size()) {
      const bool is_attribute = name[at] == '.';
      const size_t end = is_attribute ? std::min(name.find_first_of(".[", at + 1), name.size()) : name.find(']', at);
      DS_CHECK(end != name.npos && end > at + 1, Errc::Config, "invalid field '{}' of a format", name);
      const std::string key(name.substr(at + 1, end - at - 1));
      const bool is_index = std::ranges::all_of(key, is_decimal_digit);
      value = is_attribute ? in_.attribute(value, key)
                           : in_.item(value, is_index ? Value(*parse_integer(key, 10)) : in_.text(key));
      at = is_attribute ? end : end + 1;
    }
    return value;
  }

  Value first(std::string_view name) {
    const bool is_number = std::ranges::all_of(name, is_decimal_digit);
    if (!is_number) {
      const auto found =
          std::ranges::find(arguments_.named, name, [](const auto& item) -> std::string_view { return item.first; });
      DS_CHECK(found != arguments_.named.end(), Errc::Config, "a format names '{}', which is not given", name);
      return found->second;
    }
    DS_CHECK(counts_.value_or(name.empty()) == name.empty(), Errc::Config,
             "a format mixes fields with and without numbers");
    counts_ = name.empty();
    size_t at = 0;
    const i64 index = name.empty() ? next_++ : number_at(name, at);
    DS_CHECK(static_cast<size_t>(index) < arguments_.positional.size(), Errc::Config,
             "a format has more fields than values");
    return arguments_.positional[static_cast<size_t>(index)];
  }

  Interpreter& in_;
  const Arguments& arguments_;
  i64 next_ = 0;
  std::optional<bool> counts_;
};

// "%(name)-5.2f"
class Percent {
 public:
  Percent(Interpreter& in, const Value& values) : in_(in), values_(values) {}

  void write_all(Builder& out, std::string_view form) {
    for (size_t at = 0; at < form.size();) {
      const size_t percent = std::min(form.find('%', at), form.size());
      out.add(form.substr(at, percent - at));
      at = percent;
      if (at < form.size()) write_one(out, form, ++at);
    }
    const bool is_tuple = values_.is_list() && values_.as_list().kind == List::Kind::Tuple;
    const bool may_be_left = values_.is_dict() || values_.is<Undefined>() || (values_.is_list() && !is_tuple);
    const size_t given = is_tuple ? values_.as_list().items.size() : 1;
    DS_CHECK(may_be_left || next_ >= given || is_named_, Errc::Config, "not all values were used by the format");
  }

 private:
  Value next() {
    const bool is_tuple = values_.is_list() && values_.as_list().kind == List::Kind::Tuple;
    const size_t given = is_tuple ? values_.as_list().items.size() : 1;
    DS_CHECK(next_ < given, Errc::Config, "a format has more fields than values");
    return is_tuple ? values_.as_list().items[next_++] : (++next_, values_);
  }

  void write_one(Builder& out, std::string_view form, size_t& at) {
    std::optional<Value> named;
    if (at < form.size() && form[at] == '(') {
      const size_t end = form.find(')', at);
      DS_CHECK(end != form.npos && values_.is_dict(), Errc::Config, "a format with names needs a mapping");
      const Value* const member = values_.as_dict().find(form.substr(at + 1, end - at - 1));
      DS_CHECK(member != nullptr, Errc::Config, "a format names '{}', which is not given",
               form.substr(at + 1, end - at - 1));
      named = *member;
      is_named_ = true;
      at = end + 1;
    }
    Form one;
    bool is_left = false, is_zero = false;
    for (; at < form.size() && std::string_view("-+ 0#").find(form[at]) != std::string_view::npos; ++at) {
      is_left |= form[at] == '-';
      is_zero |= form[at] == '0';
      one.alternate |= form[at] == '#';
      if (form[at] == '+' || (form[at] == ' ' && one.sign != '+')) one.sign = form[at];
    }
    DS_CHECK(at >= form.size() || form[at] != '*', Errc::Unavailable,
             "a width from the values of a format is not supported");
    one.width = number_at(form, at);
    if (at < form.size() && form[at] == '.') one.precision = number_at(form, ++at);
    DS_CHECK(at < form.size(), Errc::Config, "a format ends within a field");
    const char type = form[at++];
    if (type == '%') return out.add('%');
    const Value value = named ? *named : next();
    one.align = is_left ? '<' : is_zero ? '=' : '>';
    if (is_zero && !is_left) one.fill = "0";
    write_value(out, one, type, value);
  }

  void write_value(Builder& out, Form& form, char type, const Value& value) {
    if (type == 's' || type == 'r') {
      Builder text(in_.budget());
      if (type == 's') {
        write(text, value);
      } else {
        write_repr(text, value);
      }
      form.fill = " ";
      if (form.align == '=') form.align = '>';
      return add_text(out, form, text.text());
    }
    DS_CHECK(value.is_number(), Errc::Config, "the format %{} needs a number, not a value of type {}", type,
             type_name(value));
    form.type = type == 'i' || type == 'u' ? 'd' : type;
    if (std::string_view("eEfFgG").find(type) != std::string_view::npos) return add_real(out, form, value.as_real());
    DS_CHECK(form.type == 'd' || form.type == 'x' || form.type == 'X' || form.type == 'o', Errc::Config,
             "invalid format %{}", type);
    DS_CHECK(!form.precision, Errc::Unavailable, "a precision of integers is not supported");
    DS_CHECK(form.type == 'd' || value.is_integer(), Errc::Config, "the format %{} needs an integer", type);
    DS_CHECK(std::abs(value.as_real()) < 9e18, Errc::Unavailable, "an integer of more than 64 bits is not supported");
    add_integer(out, form, value.is_integer() ? value.as_integer() : static_cast<i64>(value.as_real()));
  }

  Interpreter& in_;
  const Value& values_;
  size_t next_ = 0;
  bool is_named_ = false;
};

}  // namespace

std::string format_percent(Interpreter& in, const Text& form, const Value& values) {
  DS_CHECK(!form.is_safe, Errc::Unavailable, "% of a text that is marked safe is not supported");
  Builder out(in.budget());
  Percent(in, values).write_all(out, form.bytes);
  return out.finish();
}

std::string format_braces(Interpreter& in, std::string_view form, const Arguments& arguments) {
  Builder out(in.budget());
  Braces(in, arguments).write_all(out, form);
  return out.finish();
}

std::string escape_html(Budget& budget, std::string_view text) {
  Builder out(budget);
  for (const char c : text) switch (c) {
      case '&': out.add("&amp;"); break;
      case '<': out.add("&lt;"); break;
      case '>': out.add("&gt;"); break;
      case '\'': out.add("&#39;"); break;
      case '"': out.add("&#34;"); break;
      default: out.add(c);
    }
  return out.finish();
}

}  // namespace ds::jinja
