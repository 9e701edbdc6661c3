// SPDX-License-Identifier: Apache-2.0
#include "launch/hostfile.h"

#include <arpa/inet.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <unordered_map>

#include "base/check.h"
#include "base/file.h"
#include "base/utf8.h"

namespace ds::launch {
namespace {

constexpr std::size_t kShownMistakes = 20;
constexpr std::size_t kLongestName = 253, kLongestLabel = 63;  // RFC 1035

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_blank(char c) { return c == ' ' || c == '\t'; }
char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// Short, and with nothing in it that a terminal would obey.
std::string shown(std::string_view text) {
  std::string out;
  for (const char c : text.substr(0, 60))
    out += c >= ' ' && c <= '~' ? std::string(1, c) : fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
  return "'" + out + (text.size() > 60 ? "..." : "") + "'";
}

std::string what_no_text_has(std::string_view line) {
  while (!line.empty()) {
    const std::size_t n = utf8_length(line);
    if (n == 0) return fmt::format("byte 0x{:02x} is not UTF-8", static_cast<unsigned char>(line[0]));
    const unsigned char c = static_cast<unsigned char>(line[0]);
    if ((c < ' ' && c != '\t') || c == 0x7f) return fmt::format("control character 0x{:02x}", c);
    line.remove_prefix(n);
  }
  return "";
}

// The reason why an address is not one of a host; "": it is one, and `name` is set to its usual spelling.
std::string what_is_wrong_with_ipv4(std::string& name) {
  in_addr address{};
  if (::inet_pton(AF_INET, name.c_str(), &address) != 1) return fmt::format("{} is not an IPv4 address", shown(name));
  const u32 bits = ntohl(address.s_addr);
  if (bits >> 24 == 0 || bits >> 28 >= 14) return fmt::format("{} is not the address of a machine", shown(name));
  return "";
}

std::string what_is_wrong_with_ipv6(std::string& name) {
  in6_addr address{};
  if (::inet_pton(AF_INET6, name.c_str(), &address) != 1) return fmt::format("{} is not an IPv6 address", shown(name));
  if (IN6_IS_ADDR_UNSPECIFIED(&address) || IN6_IS_ADDR_MULTICAST(&address))
    return fmt::format("{} is not the address of a machine", shown(name));
  if (IN6_IS_ADDR_V4MAPPED(&address)) return fmt::format("{} is an IPv4 address: write it as one", shown(name));
  std::array<char, INET6_ADDRSTRLEN> text{};
  name = ::inet_ntop(AF_INET6, &address, text.data(), text.size());
  return "";
}

// "0x7f" is one, too: resolvers read it as an address.
bool is_number(std::string_view label) {
  const bool hexadecimal = label.starts_with("0x") || label.starts_with("0X");
  if (hexadecimal) label.remove_prefix(2);
  const auto digit = [&](char c) { return is_digit(c) || (hexadecimal && lower(c) >= 'a' && lower(c) <= 'f'); };
  return std::all_of(label.begin(), label.end(), digit);
}

// The same of a name.
std::string what_is_wrong_with(std::string& whole) {
  const std::string_view name = whole;
  if (name.find(':') != std::string_view::npos) return fmt::format("{}: put an IPv6 address in brackets", shown(name));
  if (name.find('@') != std::string_view::npos)
    return fmt::format("{}: set the user name in ~/.ssh/config, not here", shown(name));
  if (name.starts_with('-')) return fmt::format("{}: a host name may not begin with '-'", shown(name));
  const auto fits = [](char c) { return is_letter(c) || is_digit(c) || c == '-' || c == '_' || c == '.'; };
  if (!std::all_of(name.begin(), name.end(), fits))
    return fmt::format("{}: a host name may contain only letters, digits, '-', '_' and '.'", shown(name));
  if (name.size() > kLongestName)
    return fmt::format("{}: a host name may have at most {} characters", shown(name), kLongestName);
  for (std::string_view rest = name;;) {
    const std::size_t dot = rest.find('.');
    const std::string_view label = rest.substr(0, dot);
    if (label.empty() || label.size() > kLongestLabel || label.starts_with('-'))
      return fmt::format("{}: each part between dots must have 1 to {} characters and not begin with '-'", shown(name),
                         kLongestLabel);
    if (dot == std::string_view::npos) break;
    rest.remove_prefix(dot + 1);
  }
  // A name that ends in a number must be an address (as in URLs), since resolvers disagree about "10.1".
  return is_number(name.substr(name.rfind('.') + 1)) ? what_is_wrong_with_ipv4(whole) : "";
}

// A number of slots; else the reason in `why`.
int slots_of(std::string_view digits, std::string& why) {
  int slots = 0;
  const auto [end, error] = std::from_chars(digits.begin(), digits.end(), slots);
  const bool number = !digits.empty() && std::all_of(digits.begin(), digits.end(), is_digit);
  if (!number || error != std::errc{} || end != digits.end() || slots < 1 || slots > kMaxSlots)
    why = fmt::format("slots must be a whole number from 1 to {}, not {}", kMaxSlots, shown(digits));
  return slots;
}

// Collects hosts and mistakes; what is wrong is named by where it stands: "FILE:3", "--host, host 3".
class Hosts {
 public:
  explicit Hosts(std::string before_number) : before_number_(std::move(before_number)) {}

  void add(std::string_view name, std::optional<std::string_view> slots, i64 number) {
    const bool bracketed = name.size() >= 2 && name.front() == '[' && name.back() == ']';
    if (bracketed) name = name.substr(1, name.size() - 2);
    LaunchHost host{.name = std::string(name), .slots = 1};
    std::string why = bracketed ? what_is_wrong_with_ipv6(host.name) : what_is_wrong_with(host.name);
    if (why.empty() && slots) host.slots = slots_of(*slots, why);
    if (!why.empty()) return mistake(number, why);
    std::string key = host.name;
    std::transform(key.begin(), key.end(), key.begin(), lower);
    const auto [first, fresh] = numbers_.try_emplace(std::move(key), number);
    if (!fresh) return mistake(number, fmt::format("host {} is already at {}", shown(name), where(first->second)));
    hosts_.push_back(std::move(host));
  }

  void mistake(i64 number, const std::string& why) {
    if (++num_mistakes_ > kShownMistakes) return;
    if (!mistakes_.empty()) mistakes_ += "\n  ";
    mistakes_ += where(number) + ": " + why;
  }

  // The hosts, or an error with all mistakes.
  std::vector<LaunchHost> take() {
    if (num_mistakes_ > kShownMistakes)
      mistakes_ += fmt::format("\n  and {} more mistakes", num_mistakes_ - kShownMistakes);
    DS_CHECK(num_mistakes_ == 0, Errc::Config, "{}", mistakes_);
    return std::move(hosts_);
  }

 private:
  std::string where(i64 number) const { return before_number_ + std::to_string(number); }

  std::string before_number_;
  std::vector<LaunchHost> hosts_;
  std::unordered_map<std::string, i64> numbers_;
  std::string mistakes_;
  std::size_t num_mistakes_ = 0;
};

std::string_view next_word(std::string_view& line) {
  const auto begin = std::find_if_not(line.begin(), line.end(), is_blank);
  const auto end = std::find_if(begin, line.end(), is_blank);
  const std::string_view word(begin, end);
  line.remove_prefix(static_cast<std::size_t>(end - line.begin()));
  return word;
}

void parse_line(std::string_view line, i64 number, Hosts& hosts) {
  constexpr std::string_view kSlots = "slots=";
  if (const std::string why = what_no_text_has(line); !why.empty()) return hosts.mistake(number, why);
  line = line.substr(0, line.find('#'));
  const std::string_view name = next_word(line), slots = next_word(line), rest = next_word(line);
  if (name.empty()) return;
  if (slots.empty()) return hosts.add(name, std::nullopt, number);
  if (!slots.starts_with(kSlots))
    return hosts.mistake(number, fmt::format("a line must be 'NAME' or 'NAME slots=N'; unexpected {}", shown(slots)));
  if (!rest.empty())
    return hosts.mistake(number, fmt::format("nothing may follow the slots; unexpected {}", shown(rest)));
  hosts.add(name, slots.substr(kSlots.size()), number);
}

void parse_entry(std::string_view entry, i64 number, Hosts& hosts) {
  if (const std::string why = what_no_text_has(entry); !why.empty()) return hosts.mistake(number, why);
  if (entry.empty()) return hosts.mistake(number, "no name");
  const bool bracketed = entry.starts_with('[');
  const std::size_t colon = bracketed ? entry.find(':', entry.find(']')) : entry.find(':');
  const bool bare_address = !bracketed && colon != entry.rfind(':');  // IPv6; add() says what is wrong with it
  if (colon == std::string_view::npos || bare_address) return hosts.add(entry, std::nullopt, number);
  hosts.add(entry.substr(0, colon), entry.substr(colon + 1), number);
}

}  // namespace

std::vector<LaunchHost> parse_hostfile(std::string_view text, const std::string& file) {
  Hosts hosts(file + ":");
  for (i64 number = 1; !text.empty(); ++number) {
    const std::size_t newline = text.find('\n');
    std::string_view line = text.substr(0, newline);
    text.remove_prefix(newline == std::string_view::npos ? text.size() : newline + 1);
    if (line.ends_with('\r')) line.remove_suffix(1);
    parse_line(line, number, hosts);
  }
  std::vector<LaunchHost> read = hosts.take();
  DS_CHECK(!read.empty(), Errc::Config, "{}: contains no host", file);
  return read;
}

}  // namespace ds::launch

namespace ds {

using namespace launch;

std::vector<LaunchHost> read_hostfile(const std::string& file) {
  constexpr i64 kMostBytes = i64{16} << 20;
  std::string text;
  try {
    text = read_named_text(file, kMostBytes);
  } catch (const Error& e) {
    throw Error(e.code(), fmt::format("the hostfile {} {}", file, e.what()));
  }
  return parse_hostfile(text, file);
}

std::vector<LaunchHost> parse_host_list(std::string_view text, const std::string& option) {
  Hosts hosts(option + ", host ");
  for (i64 number = 1;; ++number) {
    const std::size_t comma = text.find(',');
    parse_entry(text.substr(0, comma), number, hosts);
    if (comma == std::string_view::npos) return hosts.take();
    text.remove_prefix(comma + 1);
  }
}

}  // namespace ds
