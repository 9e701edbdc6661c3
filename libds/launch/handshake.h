// SPDX-License-Identifier: Apache-2.0
#pragma once
// The way home from other hosts: a TCP connection on which launcher and shim prove to each other that they belong to
// the same job, before either believes a word of the other:
//
//   launcher --Challenge: nonce a-------------------------------> shim
//            <-Answer: nonce b, MAC(secret, "shim", a, b), clock--
//            --Proof: MAC(secret, "launcher", a, b)------------->
//
// The secret is random, of one job, and never on this wire or a command line. What follows is neither encrypted nor
// signed, like MPI's own messages.

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "launch/channel.h"

namespace ds::launch {

// SipHash-2-4 (Aumasson, Bernstein 2012), a keyed hash made to authenticate short messages: libsodium's.
u64 siphash(std::string_view key16, std::string_view message);

// Where the launcher listens, and what to say there.
struct Home {
  std::string secret;  // 32 hexadecimal digits
  int port = 0;
  i64 timeout_ms = 0;  // silence after which launcher and shim of a host take each other for lost
  std::vector<std::string> addresses;
};
constexpr i64 beat_ns(i64 timeout_ns) { return std::min<i64>(1'000'000'000, timeout_ns / 5); }  // between heartbeats
std::vector<std::string> to_fields(const Home& home);
Home home_of(std::span<const std::string>& fields);  // takes them from the front; throws Errc::Internal

// What the shim of a host leaves in the environment of the shims of its ranks.
struct HostHome {
  int host = 0;
  Home home;
};
inline constexpr std::string_view kHomeVariable = "DS_LAUNCH_HOME";
std::string variable_of(const HostHome& way);
HostHome host_home_of(std::string_view variable);

using Nonce = std::array<u64, 2>;
Nonce random_nonce();

struct AnswerPayload {
  Nonce nonce;
  u64 proof;
  i64 time_ns;  // CLOCK_MONOTONIC of the shim's host
};

enum class Side : u8 { Shim = 1, Launcher = 2 };
u64 proof_of(const std::string& secret, Side side, const Nonce& challenge, const Nonce& answer);

// Listens on a free port of every address of this machine, IPv6 and IPv4.
Fd listen_everywhere(int* port);
// Of interfaces that are up: those that other machines may know us by, the loopback's behind.
std::vector<std::string> own_addresses();
void tune_socket(int fd);  // small messages at once; a peer that is silently gone is found

// Forgets addresses that are this machine's own, unless all are: on another host who listens there is somebody else.
void leave_out(const std::vector<std::string>& own, Home& home);

// Goes through home's addresses until the launcher has proved itself at one; moves that to the front. Throws Errc::Comm
// with what was tried.
Channel call_home(Home& home);

}  // namespace ds::launch
