// SPDX-License-Identifier: Apache-2.0
#include "launch/job.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>

#include "base/appended_file.h"
#include "base/check.h"
#include "base/limits.h"
#include "ds/log.h"

namespace ds::launch {
namespace {

constexpr std::size_t kLastLines = 20;

// A pipe that somebody reads; nothing: it is something else, or nobody does.
Fd open_read_pipe(const std::string& path) {
  Fd fd(::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC));
  struct stat st {};
  if (!fd || ::fstat(fd.get(), &st) != 0 || !S_ISFIFO(st.st_mode)) return {};
  ::fcntl(fd.get(), F_SETFL, ::fcntl(fd.get(), F_GETFL) & ~O_NONBLOCK);
  return fd;
}

Fd open_log(const std::string& folder, int rank) {
  const std::string path = fmt::format("{}/rank-{:05}.log", folder, rank);
  if (Fd pipe = open_read_pipe(path)) return pipe;
  try {
    return Fd(open_to_append(path, 0666));
  } catch (const Error& e) {
    throw Error(Errc::Config, fmt::format("--log-dir: {}", e.what()));
  }
}

}  // namespace

std::string Host::text() const {
  const int last = planned.first_rank + planned.ranks - 1;
  return planned.ranks == 1 ? fmt::format("host {} (rank {})", planned.name, last)
                            : fmt::format("host {} (ranks {} to {})", planned.name, planned.first_rank, last);
}

Job::Job(const LaunchOptions& options_, const LaunchPlan& plan_, Sink& out, Sink& err)
    : options(options_), plan(plan_), ranks(static_cast<std::size_t>(plan.ranks)) {
  for (int r = 0; r < plan.ranks; ++r) {
    Rank& rank = ranks[static_cast<std::size_t>(r)];
    rank.end.rank = r;
    rank.end.host = host_name();
    if (!options.log_dir.empty()) rank.log = open_log(options.log_dir, r);
    const std::string tag = options.tag_output ? fmt::format("[{}] ", r) : "";
    rank.out = std::make_unique<LineStream>(r, out, rank.log.get(), tag, 0);
    rank.err = std::make_unique<LineStream>(r, err, rank.log.get(), tag, kLastLines);
  }
  for (const PlannedHost& planned : plan.hosts) hosts.push_back(Host(planned));
  for (Host& host : hosts)
    for (Rank& rank : ranks_of(host)) {
      rank.host = &host;
      rank.end.host = host.planned.name;
    }
}

std::span<Rank> Job::ranks_of(const Host& host) {
  return std::span(ranks).subspan(static_cast<std::size_t>(host.planned.first_rank),
                                  static_cast<std::size_t>(host.planned.ranks));
}

bool Job::all_ended() const {
  return std::all_of(ranks.begin(), ranks.end(), [](const Rank& r) { return r.ended; });
}

bool Job::any_started() const {
  return std::any_of(ranks.begin(), ranks.end(), [](const Rank& r) { return r.started; });
}

bool Job::all_started() const {
  return std::all_of(ranks.begin(), ranks.end(), [](const Rank& r) { return r.started; });
}

void Job::start(Rank& rank) {
  Channel& channel = *rank.channel;
  const int first = rank.host != nullptr ? rank.host->planned.first_rank : 0;
  const int neighbours = rank.host != nullptr ? rank.host->planned.ranks : plan.ranks;
  if (rank.host != nullptr) {
    channel.send(Message::Variables, pack(portable_environment(options.environment)));
    channel.send(Message::Variables, pack({fmt::format("MASTER_PORT={}", hosts[0].up.port)}));
  }
  channel.send(Message::Variables, pack(plan.environment));
  channel.send(Message::Variables, pack(plan.rank_environment[static_cast<std::size_t>(rank.end.rank)]));
  if (options.bind == LaunchBind::Core)
    channel.send(Message::Bind, bytes_of(std::array<i32, 2>{rank.end.rank - first, neighbours}));
  std::vector<std::string> command = {plan.folder, plan.program};
  command.insert(command.end(), options.command.begin(), options.command.end());
  channel.send(Message::Start, pack(command));
  if (rank.end.rank != 0) channel.send(Message::Stdin);
  rank.started = true;
}

void Job::signal(int signal, bool stop) {
  const SignalPayload payload{.signal = signal, .stop = stop ? 1 : 0};
  for (Rank& rank : ranks)
    if (rank.channel != nullptr && !rank.ended) rank.channel->send(Message::Signal, bytes_of(payload));
}

void Job::dismiss() {
  for (Rank& rank : ranks)
    if (rank.channel != nullptr) rank.channel->send(Message::Bye);
  for (Host& host : hosts)
    if (host.channel != nullptr) host.channel->send(Message::Bye);
}

void Job::finish(Rank& rank, int status, i64 time_ns, bool stopped) {
  rank.ended = true;
  rank.end_ns = time_ns;
  rank.end.status = status;
  rank.end.stopped = stopped;
  rank.end.seconds = static_cast<double>(time_ns - start_ns) * 1e-9;
  rank.out->end();
  rank.err->end();
  rank.end.last_lines = rank.err->last_lines();
  for (const LineStream* stream : {rank.out.get(), rank.err.get()})
    if (stream->log_error() != 0)
      log_message(LogLevel::Warning, fmt::format("the log of rank {} is incomplete: {}", rank.end.rank,
                                                 system_reason(stream->log_error())));
  // A rank that returned 0 may have left MPI without a word; mpirun finds that out when the shim has left, too.
  if (status == 0) rank.channel->send(Message::Bye);
}

}  // namespace ds::launch
