// SPDX-License-Identifier: Apache-2.0
#pragma once
// The connection from other hosts to the launcher: TCP, on which launcher and shim first prove to each other that they
// belong to the same job:
//
//   launcher --Challenge: nonce a-------------------------------> shim
//            <-Answer: nonce b, MAC(secret, "shim", a, b), clock--
//            --Proof: MAC(secret, "launcher", a, b)------------->
//
// The secret is random, belongs to one job, and is never sent over this connection or put on a command line. Later
// messages are neither encrypted nor signed, like MPI's own.

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "launch/channel.h"

namespace ds::launch {

// SipHash-2-4 (Aumasson, Bernstein 2012), a keyed hash that authenticates short messages; libsodium's implementation.
u64 siphash(std::string_view key16, std::string_view message);

// The launcher's addresses and port, and the secret of the job.
struct Home {
  std::string secret;  // 32 hexadecimal digits
  int port = 0;
  i64 timeout_ms = 0;  // after so much silence, launcher and shim of a host consider each other lost
  std::vector<std::string> addresses;
};
constexpr i64 beat_ns(i64 timeout_ns) { return std::min<i64>(1'000'000'000, timeout_ns / 5); }  // between heartbeats
std::vector<std::string> to_fields(const Home& home);
Home home_of(std::span<const std::string>& fields);  // takes them from the front; throws Errc::Internal

// Passed by the shim of a host to the shims of its ranks, in the environment.
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
// The addresses of interfaces that are up: first those that other machines may use, then those of the loopback.
std::vector<std::string> own_addresses();
void tune_socket(int fd);  // sends small messages at once, and detects a peer that vanished

// Removes addresses that this machine has too, unless all are: at such an address another process listens here.
void leave_out(const std::vector<std::string>& own, Home& home);

// Tries home's addresses until the launcher has proved itself at one, and moves that one to the front. Throws
// Errc::Comm naming the addresses tried.
Channel call_home(Home& home);

}  // namespace ds::launch
