// SPDX-License-Identifier: Apache-2.0
// The way home from other hosts: the keyed hash, and that only who knows the secret gets anywhere.
#include "launch/handshake.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <thread>

#include "ds/error.h"

namespace ds::launch {
namespace handshake_test {

using ::testing::HasSubstr;

std::string ascending(int n) {
  std::string bytes;
  for (int i = 0; i < n; ++i) bytes += static_cast<char>(i);
  return bytes;
}

TEST(SipHash, GivesTheVectorsOfItsAuthors) {
  const std::string key = ascending(16);
  EXPECT_EQ(siphash(key, ascending(0)), 0x726fdb47dd0e0e31u);
  EXPECT_EQ(siphash(key, ascending(1)), 0x74f839c593dc67fdu);
  EXPECT_EQ(siphash(key, ascending(7)), 0xab0200f58b01d137u);
  EXPECT_EQ(siphash(key, ascending(8)), 0x93f5f5799a932462u);
  EXPECT_EQ(siphash(key, ascending(15)), 0xa129ca6149be45e5u);
}

TEST(Handshake, ProofsDifferBySideSecretAndNonces) {
  const std::string secret = "00112233445566778899aabbccddeeff";
  const Nonce a = random_nonce(), b = random_nonce();
  const u64 proof = proof_of(secret, Side::Shim, a, b);
  EXPECT_NE(proof, proof_of(secret, Side::Launcher, a, b));
  EXPECT_NE(proof, proof_of(secret, Side::Shim, b, a));
  EXPECT_NE(proof, proof_of("10112233445566778899aabbccddeeff", Side::Shim, a, b));
}

TEST(Handshake, FieldsOfTheWayHomeSurviveTheVariable) {
  const HostHome way{.host = 3,
                     .home = {.secret = "aa", .port = 7, .timeout_ms = 2500, .addresses = {"10.0.0.1", "::1"}}};
  const HostHome again = host_home_of(variable_of(way));
  EXPECT_EQ(again.host, 3);
  EXPECT_EQ(to_fields(again.home), to_fields(way.home));
  EXPECT_THROW(host_home_of("3 aa 7 2500 2 10.0.0.1"), Error);
  EXPECT_THROW(host_home_of(""), Error);
}

// Answers one connection like a launcher that knows `secret`, or with `instead`.
void answer_one(int listener, const std::string& secret, std::string_view instead = {}) {
  pollfd waiting{listener, POLLIN, 0};
  ::poll(&waiting, 1, 5000);
  Channel channel(Fd(::accept(listener, nullptr, nullptr)));
  const Nonce nonce = random_nonce();
  if (!instead.empty()) {
    ::send(channel.fd(), instead.data(), instead.size(), MSG_NOSIGNAL);
  } else {
    channel.send(Message::Challenge, bytes_of(nonce));
  }
  while (!channel.closed()) {
    pollfd polled{channel.fd(), channel.events(), 0};
    if (::poll(&polled, 1, 5000) <= 0) return;
    channel.pump(polled.revents);
    while (const std::optional<Frame> frame = channel.receive())
      channel.send(Message::Proof,
                   bytes_of(proof_of(secret, Side::Launcher, nonce, value_of<AnswerPayload>(frame->payload).nonce)));
  }
}

TEST(Handshake, FindsTheLauncherAmongAddresses) {
  const std::string secret = "00112233445566778899aabbccddeeff";
  int port = 0;
  const Fd listener = listen_everywhere(&port);
  Home home{.secret = secret, .port = port, .timeout_ms = 1000, .addresses = {"not-an-address", "127.0.0.1"}};
  std::jthread launcher([&] { answer_one(listener.get(), secret); });
  const Channel channel = call_home(home);
  EXPECT_EQ(home.addresses[0], "127.0.0.1");
}

TEST(Handshake, LeavesOutAddressesThatAreAnotherMachineElsewhere) {
  Home home{.secret = "", .port = 7, .timeout_ms = 1000, .addresses = {"10.0.0.1", "172.17.0.1", "127.0.0.1", "::1"}};
  leave_out({"10.0.0.2", "172.17.0.1", "127.0.0.1", "::1"}, home);
  EXPECT_EQ(home.addresses, std::vector<std::string>{"10.0.0.1"});
  leave_out({"10.0.0.1", "127.0.0.1"}, home);  // the launcher's own machine
  EXPECT_EQ(home.addresses, std::vector<std::string>{"10.0.0.1"});
}

TEST(Handshake, CallsAgainWhereALauncherIsBusy) {
  const std::string secret = "00112233445566778899aabbccddeeff";
  int port = 0;
  const Fd listener = listen_everywhere(&port);
  Home home{.secret = secret, .port = port, .timeout_ms = 1000, .addresses = {"127.0.0.1"}};
  std::jthread launcher([&] {
    pollfd waiting{listener.get(), POLLIN, 0};
    ::poll(&waiting, 1, 5000);
    const Fd first(::accept(listener.get(), nullptr, nullptr));
    answer_one(listener.get(), secret);
  });
  const Channel channel = call_home(home);
  EXPECT_FALSE(channel.closed());
}

TEST(Handshake, BelievesNobodyWithoutTheSecret) {
  int port = 0;
  const Fd listener = listen_everywhere(&port);
  Home home{.secret = "00112233445566778899aabbccddeeff", .port = port, .timeout_ms = 1000, .addresses = {"127.0.0.1"}};
  const auto why = [&](const std::string& secret, std::string_view instead) -> std::string {
    std::jthread launcher([&] { answer_one(listener.get(), secret, instead); });
    try {
      call_home(home);
      return "believed";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::Comm);
      return e.what();
    }
  };
  EXPECT_THAT(why("00112233445566778899aabbccddeefe", ""), HasSubstr("does not know the job's secret"));
  EXPECT_THAT(why("", "HTTP/1.0 400 Bad Request\r\n\r\n"), HasSubstr("no launcher answers there"));
}

TEST(Handshake, AFrameBeyondTheLimitClosesTheChannel) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  Channel sender{Fd(ends[0])}, receiver{Fd(ends[1])};
  receiver.limit(100);
  sender.send(Message::Hello, std::string(100, 'x'));
  sender.send(Message::Hello, std::string(101, 'x'));
  receiver.pump(POLLIN);
  EXPECT_TRUE(receiver.receive().has_value());
  EXPECT_FALSE(receiver.receive().has_value());
  EXPECT_TRUE(receiver.closed());
}

}  // namespace handshake_test
}  // namespace ds::launch
