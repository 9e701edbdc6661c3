// SPDX-License-Identifier: Apache-2.0
// Hostfiles and lists of hosts: valid entries, and the place that is named for every mistake.
#include "launch/hostfile.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

namespace ds {
namespace hostfile_test {

using launch::parse_hostfile;
using ::testing::HasSubstr;
using ::testing::Not;

std::string text_of(const std::vector<LaunchHost>& hosts) {
  std::string text;
  for (const LaunchHost& host : hosts) text += fmt::format("{}={} ", host.name, host.slots);
  return text;
}

std::string read(std::string_view text) { return text_of(parse_hostfile(text, "F")); }
std::string list(std::string_view text) { return text_of(parse_host_list(text, "--host")); }

template <class Call>
std::string refusal(Call&& call) {
  try {
    return "accepted: " + call();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::Config);
    return e.what();
  }
}
std::string refusal_of(std::string_view text) {
  return refusal([&] { return read(text); });
}
std::string refusal_of_list(std::string_view text) {
  return refusal([&] { return list(text); });
}

TEST(Hostfile, ReadsNamesAddressesAndSlots) {
  EXPECT_EQ(read("a slots=4\nb\n"), "a=4 b=1 ");
  EXPECT_EQ(read("node-1.cluster.example slots=8"), "node-1.cluster.example=8 ");
  EXPECT_EQ(read("10.0.0.7 slots=2\n[2001:db8::7] slots=3\n[::1]\n"), "10.0.0.7=2 2001:db8::7=3 ::1=1 ");
  EXPECT_EQ(read("a_b slots=4096\n7up\n3.node\n"), "a_b=4096 7up=1 3.node=1 ");
}

TEST(Hostfile, PassesOverBlanksCommentsAndCarriageReturns) {
  EXPECT_EQ(read("# ours: \xc3\xa9\r\n\r\n \t a \t slots=2 \t# two\r\n   # none\nb#c\n\nc slots=1\r"), "a=2 b=1 c=1 ");
}

TEST(Hostfile, RefusesWhatNoNameIs) {
  EXPECT_THAT(refusal_of("a\n-oProxyCommand=touch ran\n"), HasSubstr("F:2: "));
  EXPECT_THAT(refusal_of("-oProxyCommand=x"), HasSubstr("F:1: '-oProxyCommand=x': a host name may not begin with '-'"));
  for (const char* name :
       {"w;reboot", "$(reboot)", "`x`",     "a/b", "a\\b", "'a'", "\"a\"", "a|b",  "a&b",           "*",
        "a,b",      "a=b",       "slots=4", ".",   "a.",   ".a",  "a..b",  "a.-b", "r\xc3\xa9seau", "a%eth0"})
    EXPECT_THAT(refusal_of(name), HasSubstr("F:1: ")) << name;
  EXPECT_THAT(refusal_of("me@a"), HasSubstr("'me@a': set the user name in ~/.ssh/config"));
  EXPECT_THAT(refusal_of(std::string(64, 'a')), HasSubstr("1 to 63 characters"));
  std::string longest = "a";
  while (longest.size() < 254) longest += ".a";
  EXPECT_THAT(refusal_of(longest), HasSubstr("at most 253 characters"));
  EXPECT_EQ(read(longest.substr(0, 253)), longest.substr(0, 253) + "=1 ");
}

TEST(Hostfile, RefusesWhatOnlyLooksLikeAnAddress) {
  for (const char* name :
       {"10.0.0.256", "10.1", "1", "1.2.3.4.5", "node.7", "0x7f.1", "0x7f000001", "10.0x1", "010.0.0.1", "0x", "0Xaf"})
    EXPECT_THAT(refusal_of(name), HasSubstr("is not an IPv4 address")) << name;
  EXPECT_EQ(read("0xnode\nbe.ef\n"), "0xnode=1 be.ef=1 ");
  EXPECT_THAT(refusal_of("2001:db8::7"), HasSubstr("put an IPv6 address in brackets"));
  EXPECT_THAT(refusal_of("[2001:db8::g]"), HasSubstr("'2001:db8::g' is not an IPv6 address"));
  for (const char* name : {"[]", "[a]", "[10.0.0.1]", "[::1", "::1]", "[fe80::1%eth0]"})
    EXPECT_THAT(refusal_of(name), HasSubstr("F:1: ")) << name;
}

TEST(Hostfile, RefusesAddressesThatNoMachineHas) {
  for (const char* name : {"0.0.0.0", "0.1.2.3", "224.0.0.1", "255.255.255.255", "[::]", "[ff02::1]"})
    EXPECT_THAT(refusal_of(name), HasSubstr("is not the address of a machine")) << name;
  EXPECT_THAT(refusal_of("[::ffff:127.0.0.1]"), HasSubstr("is an IPv4 address: write it as one"));
}

TEST(Hostfile, RefusesSlotsThatAreNoNumberOfRanks) {
  for (const char* slots :
       {"0", "-1", "4x", "", "+4", "4.0", "0x4", "4097", "100000000000000", "99999999999999999999", "1e1", " 4"})
    EXPECT_THAT(refusal_of(fmt::format("a slots={}", slots)), HasSubstr("F:1: ")) << slots;
  EXPECT_THAT(refusal_of("a slots=4x"), HasSubstr("slots must be a whole number from 1 to 4096, not '4x'"));
}

TEST(Hostfile, RefusesWhatFollows) {
  EXPECT_THAT(refusal_of("a 4"), HasSubstr("F:1: a line must be 'NAME' or 'NAME slots=N'; unexpected '4'"));
  EXPECT_THAT(refusal_of("a slots=4 max_slots=8"), HasSubstr("nothing may follow the slots; unexpected 'max_slots=8'"));
  EXPECT_THAT(refusal_of("a Slots=4"), HasSubstr("unexpected 'Slots=4'"));
}

TEST(Hostfile, RefusesAHostTwice) {
  EXPECT_THAT(refusal_of("a\n# b\nb\nA slots=2\n"), HasSubstr("F:4: host 'A' is already at F:1"));
  EXPECT_THAT(refusal_of("[::1]\n[0:0:0:0:0:0:0:1]\n"), HasSubstr("F:2: host '0:0:0:0:0:0:0:1' is already at F:1"));
  EXPECT_THAT(refusal_of("[2001:db8::a]\n[2001:DB8:0::A]\n"), HasSubstr("F:2: "));
  EXPECT_EQ(read("[2001:DB8:0::A]\n"), "2001:db8::a=1 ");
}

TEST(Hostfile, RefusesAFileWithoutHosts) {
  EXPECT_THAT(refusal_of(""), HasSubstr("F: contains no host"));
  EXPECT_THAT(refusal_of("\n# nothing\r\n"), HasSubstr("F: contains no host"));
}

TEST(Hostfile, RefusesAFileThatCannotBeRead) {
  const auto why = [](const std::string& file) { return refusal([&] { return text_of(read_hostfile(file)); }); };
  EXPECT_THAT(why("/proc/self/mem"), HasSubstr("the hostfile /proc/self/mem cannot be read: Input/output error"));
  EXPECT_THAT(why("/proc"), HasSubstr("the hostfile /proc cannot be read: Is a directory"));
  EXPECT_THAT(why("/nowhere"), HasSubstr("the hostfile /nowhere cannot be opened: No such file"));
  EXPECT_THAT(why("/dev/zero"), HasSubstr("the hostfile /dev/zero is larger than 16 MiB"));
}

TEST(Hostfile, RefusesBytesThatAreNoText) {
  EXPECT_THAT(refusal_of("a\nb # \xff\n"), HasSubstr("F:2: byte 0xff is not UTF-8"));
  for (const char* wrong : {"\xc3", "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe2\x82", "\x80"})
    EXPECT_THAT(refusal_of(wrong), HasSubstr("is not UTF-8")) << wrong;
  EXPECT_THAT(refusal_of("a\x1b[31m"), HasSubstr("control character 0x1b"));
  EXPECT_THAT(refusal_of(std::string_view("a\0b", 3)), HasSubstr("control character 0x00"));
  EXPECT_THAT(refusal_of("a\rb"), HasSubstr("control character 0x0d"));
  EXPECT_THAT(refusal_of("\xef\xbb\xbf"
                         "a"),
              HasSubstr("F:1: '\\xef\\xbb\\xbfa'"));
}

TEST(Hostfile, TellsAllMistakesUpToTwenty) {
  EXPECT_EQ(refusal_of("-a\nb\nc slots=0\n"),
            "F:1: '-a': a host name may not begin with '-'\n"
            "  F:3: slots must be a whole number from 1 to 4096, not '0'");
  std::string many;
  for (int i = 0; i < 30; ++i) many += "-a\n";
  EXPECT_THAT(refusal_of(many),
              ::testing::AllOf(HasSubstr("F:20: "), Not(HasSubstr("F:21: ")), HasSubstr("and 10 more mistakes")));
}

TEST(Hostfile, AMillionLinesTakeSeconds) {
  std::string text;
  for (int i = 0; i < 1'000'000; ++i) text += fmt::format("node{} slots=4\n", i);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(parse_hostfile(text, "F").size(), 1'000'000u);
  EXPECT_THAT(refusal_of(text + text), HasSubstr("and 999980 more mistakes"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST(HostList, ReadsEntries) {
  EXPECT_EQ(list("a"), "a=1 ");
  EXPECT_EQ(list("a:4,b,10.0.0.7:2,[2001:db8::7]:3,[::1]"), "a=4 b=1 10.0.0.7=2 2001:db8::7=3 ::1=1 ");
}

TEST(HostList, RefusesMistakesByTheirPlace) {
  EXPECT_THAT(refusal_of_list("a,"), HasSubstr("--host, host 2: no name"));
  EXPECT_THAT(refusal_of_list(""), HasSubstr("--host, host 1: no name"));
  EXPECT_THAT(refusal_of_list("a:0,-b,a"),
              ::testing::AllOf(HasSubstr("--host, host 1: slots"), HasSubstr("--host, host 2: '-b'")));
  EXPECT_THAT(refusal_of_list("a,a:2"), HasSubstr("--host, host 2: host 'a' is already at --host, host 1"));
  for (const char* wrong : {"a:", "a:x", ":4", "::1", "a:4:4", "[::1]4", "[::1", "a b", "a:4 "})
    EXPECT_THAT(refusal_of_list(wrong), HasSubstr("--host, host 1: ")) << wrong;
}

}  // namespace hostfile_test
}  // namespace ds
