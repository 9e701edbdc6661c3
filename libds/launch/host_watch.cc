// SPDX-License-Identifier: Apache-2.0
#include "launch/host_watch.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/limits.h"
#include "ds/log.h"
#include "launch/host_shim.h"

namespace ds::launch {
namespace {

namespace fs = std::filesystem;

void write_file(const fs::path& path, std::string_view text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  DS_CHECK(file.good(), Errc::Io, "cannot write {}: {}", path.string(), system_reason(errno));
}

}  // namespace

HostWatch::HostWatch(Job& job, Mpirun& mpirun, Ending& ending) : job_(job), mpirun_(mpirun), ending_(ending) {}

void HostWatch::prepare(Reception& reception, const fs::path& folder) {
  home_ = {.secret = random_hex(16),
           .port = 0,
           .timeout_ms = static_cast<i64>(job_.options.host_timeout_s * 1000),
           .addresses = own_addresses()};
  home_.port = reception.open_to_hosts(home_.secret);
  heart_.start(beat_ns());
  AgentSettings settings{.orted = job_.plan.orted, .home = home_, .hosts = {}};
  std::string hostfile;
  for (std::size_t i = 0; i < job_.hosts.size(); ++i) {
    const PlannedHost& planned = job_.hosts[i].planned;
    settings.hosts.push_back(
        {.name = planned.name, .ranks = std::to_string(planned.ranks), .reached_by = planned.reached_by});
    hostfile += fmt::format("{}{} slots={}\n", kHostAlias, i, planned.ranks);
  }
  write_file(folder / "hosts", hostfile);
  write_file(folder / "agent", to_text(settings));
}

pollfd HostWatch::polled_for(const Host& host) {
  return {host.connected() ? host.channel->fd() : -1, host.connected() ? host.channel->events() : short{0}, 0};
}

void HostWatch::listen(Host& host, short revents) {
  host.channel->pump(revents);
  while (const std::optional<Frame> frame = host.channel->receive()) {
    host.heard_ns = monotonic_ns();
    if (frame->type != Message::OrtedEnded) continue;
    host.orted_ended = true;
    orted_ended(host, value_of<i32>(frame->payload));
  }
}

void HostWatch::serve(Host& host, short revents) {
  if (host.channel == nullptr && host.called_ns != 0 && monotonic_ns() - host.called_ns > limit_ns())
    ending_.give_up(exit_code(Errc::Unavailable),
                    fmt::format("{} cannot be used: nothing arrived from it within {} s after its agent was started "
                                "(--host-timeout){}",
                                host.text(), job_.options.host_timeout_s, mpirun_.quoted()));
  if (host.channel == nullptr || host.lost) return;
  listen(host, revents);
  if (is_silent(host)) listen(host, POLLIN);            // first what came while we were kept from reading
  if (host.orted_ended && !job_.any_started()) return;  // its shim follows, and mpirun
  if (host.channel->closed() && !mpirun_is_ending()) {  // without mpirun, hosts end their part
    lose(host, "its part of ds-launch has ended or the connection was reset");
  } else if (is_silent(host)) {
    lose(host, fmt::format("nothing was heard from it for {} s; check that it and its network are up",
                           job_.options.host_timeout_s));
  }
}

// An agent has ended before its host's shim came: ssh failed, or what it ran.
void HostWatch::agent_ended(const Host& host, const std::string& how) {
  if (host.channel == nullptr && ending_.phase() == Phase::Running)
    ending_.give_up(exit_code(Errc::Unavailable), fmt::format("{} cannot be used: {}", host.text(), how));
}

void HostWatch::host_up(Host& host, const HostUpPayload& up, Guest& guest) {
  guest.channel->limit(~u32{0});
  host.channel = std::move(guest.channel);
  host.clock_ahead_ns = guest.clock_ahead_ns;
  host.heard_ns = monotonic_ns();
  host.up = up;
  heart_.beat_for(*host.channel);
  check_cores(host);
}

void HostWatch::check_cores(const Host& host) {
  if (host.planned.ranks <= host.up.cores) return;
  if (job_.options.bind == LaunchBind::Core) {
    ending_.give_up(exit_code(Errc::Config),
                    fmt::format("{}: --bind core needs a core for every rank: {} ranks, {} cores; use fewer ranks "
                                "there or --bind none",
                                host.text(), host.planned.ranks, host.up.cores));
  } else {
    log_message(LogLevel::Warning,
                fmt::format("host {}: {} ranks share {} cores", host.planned.name, host.planned.ranks, host.up.cores));
  }
}

// At the end, and when we or mpirun end the job, it exits; else something is wrong with it, or mpirun, which has it
// exit before it says anything, is about to tell why.
void HostWatch::orted_ended(const Host& host, int wait_status) {
  ending_.reap();
  if (job_.all_ended() || ending_.phase() >= Phase::Killing || ending_.asked_to_stop() || !mpirun_.is_running()) return;
  const int signal = exit_signal(wait_status);
  const std::string how =
      fmt::format("{}: Open MPI's orted {}", host.text(), how_ended(exit_status(wait_status), signal));
  if (signal != 0) return ending_.give_up(exit_code(Errc::Comm), how);
  if (ending_.phase() != Phase::Running || job_.any_started()) return;
  ending_.suspect(how);
  ending_.hurry();
}

// From when others can know it: what mpirun's end closes reaches us before it can be waited for.
bool HostWatch::mpirun_is_ending() {
  ending_.reap();
  return mpirun_.is_exiting();
}

// Nothing more comes from there; its own shim ends what runs there as soon as it misses us.
void HostWatch::lose(Host& host, const std::string& how) {
  host.lost = true;
  heart_.forget(*host.channel);
  const auto ended = [](const Rank& rank) { return rank.ended; };
  const std::span<Rank> its_ranks = job_.ranks_of(host);
  const std::string why = fmt::format("{} is lost: {}", host.text(), how);
  if (std::all_of(its_ranks.begin(), its_ranks.end(), ended)) {  // no loss, unless mpirun thinks that it is
    if (mpirun_.is_running() && !job_.all_ended()) ending_.suspect(why);
    return;
  }
  if (ending_.phase() < Phase::Terminating) ending_.give_up(exit_code(Errc::Comm), why);
  for (Rank& rank : its_ranks) {
    if (rank.ended) continue;
    rank.end.lost = true;
    ending_.rank_ended(rank, exit_code(Errc::Comm), host.heard_ns, true);
    rank.channel.reset();
  }
}

void HostWatch::pause(const std::function<void()>& run) {
  heart_.between_beats([&] {
    for (const Host& host : job_.hosts)
      if (host.channel != nullptr) host.channel->send(Message::Pause);
    run();
  });
  for (Host& host : job_.hosts) host.heard_ns = monotonic_ns();
}

void HostWatch::tell_of_silent_hosts() const {
  for (const Host& host : job_.hosts)
    if (host.connected())
      log_message(LogLevel::Warning,
                  fmt::format("host {} does not answer: its ranks end when they have heard nothing for {} s",
                              host.planned.name, job_.options.host_timeout_s));
}

}  // namespace ds::launch
