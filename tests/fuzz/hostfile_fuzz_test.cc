// SPDX-License-Identifier: Apache-2.0
// Hostfiles and lists of hosts on damaged input: refusals are explained, line by line; nothing in an accepted file
// could be an option or mean anything to a shell, and it reads the same when it is written again.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <set>
#include <string>

#include "fuzz/rounds.h"
#include "launch/hostfile.h"

namespace ds {
namespace hostfile_fuzz_test {

using Random = std::minstd_rand;
size_t below(Random& random, size_t n) { return static_cast<size_t>(random()) % std::max<size_t>(n, 1); }

constexpr std::array<std::string_view, 28> kWords = {"a",
                                                     "node-7",
                                                     "b.example",
                                                     "10.0.0.7",
                                                     "[2001:db8::7]",
                                                     "::1",
                                                     "-oProxyCommand=x",
                                                     "w;reboot",
                                                     "slots=4",
                                                     "slots=",
                                                     "0",
                                                     "4096",
                                                     "99999999999999999999",
                                                     " ",
                                                     "\t",
                                                     "\n",
                                                     "\r\n",
                                                     "#",
                                                     ",",
                                                     ":",
                                                     ":4",
                                                     "[",
                                                     "]",
                                                     "@",
                                                     "\xff",
                                                     "\xe2\x82",
                                                     "\xc3\xa9",
                                                     "="};

std::string make(Random& random) {
  std::string text;
  for (size_t words = below(random, 12); words > 0; --words) {
    text += kWords[below(random, kWords.size())];
    if (below(random, 3) == 0) text += below(random, 2) == 0 ? " slots=2\n" : "\n";
    if (below(random, 20) == 0) text += static_cast<char>(random());
  }
  return text;
}

void check(const std::vector<LaunchHost>& hosts, const std::string& text) {
  std::set<std::string> names;
  std::string again;
  for (const LaunchHost& host : hosts) {
    const auto harmless = [](unsigned char c) {
      return std::isalnum(c) != 0 || std::string_view("-_.:").find(static_cast<char>(c)) != std::string_view::npos;
    };
    EXPECT_TRUE(!host.name.empty() && host.name[0] != '-' && std::all_of(host.name.begin(), host.name.end(), harmless))
        << text;
    EXPECT_TRUE(host.slots >= 1 && host.slots <= launch::kMaxSlots) << text;
    EXPECT_TRUE(names.insert(host.name).second) << text;
    const bool address = host.name.find(':') != std::string::npos;
    again += fmt::format("{}{}{} slots={}\n", address ? "[" : "", host.name, address ? "]" : "", host.slots);
  }
  const std::vector<LaunchHost> reread = launch::parse_hostfile(again, "F");
  EXPECT_TRUE(
      std::equal(hosts.begin(), hosts.end(), reread.begin(), reread.end(),
                 [](const LaunchHost& a, const LaunchHost& b) { return a.name == b.name && a.slots == b.slots; }))
      << text;
}

// Whether it was accepted.
template <class Parse>
bool survives(Parse&& parse, const std::string& text, std::string_view place) {
  try {
    check(parse(), text);
    return true;
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::Config) << text;
    EXPECT_TRUE(std::string_view(e.what()).starts_with(place)) << e.what() << "\n" << text;
    const auto printable = [](unsigned char c) { return (c >= ' ' && c <= '~') || c == '\n'; };
    EXPECT_TRUE(std::all_of(e.what(), e.what() + std::string_view(e.what()).size(), printable)) << text;
    return false;
  }
}

TEST(HostfileFuzz, WhatIsAcceptedIsHarmlessAndWhatIsRefusedIsExplained) {
  Random random(1);
  size_t files = 0, lists = 0;
  for (int i = 0; i < testing::rounds(20000) && !HasFailure(); ++i) {
    const std::string text = make(random);
    files += survives([&] { return launch::parse_hostfile(text, "F"); }, text, "F:");
    lists += survives([&] { return parse_host_list(text, "--host"); }, text, "--host, host ");
  }
  EXPECT_GT(files, 100u);
  EXPECT_GT(lists, 100u);
}

}  // namespace hostfile_fuzz_test
}  // namespace ds
