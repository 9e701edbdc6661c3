// SPDX-License-Identifier: Apache-2.0
// The launcher: one event loop over signals, shims, streams and mpirun. It passes events to the parts of the launch:
// the reception accepts connections, the watch monitors hosts, and the ending decides the phases of the end.

#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>

#include "base/check.h"
#include "base/file.h"
#include "ds/launch.h"
#include "ds/log.h"
#include "ds/signals.h"
#include "launch/ending.h"
#include "launch/host_watch.h"
#include "launch/job.h"
#include "launch/mpirun.h"
#include "launch/process.h"
#include "launch/reception.h"
#include "launch/streams.h"

namespace ds {
namespace launch {
namespace {

namespace fs = std::filesystem;

constexpr i64 kMpirunGrace = kSecond / 2;  // for mpirun to leave after its last shim
constexpr i64 kHostsGrace = 4 * kSecond;   // the same with daemons on hosts

// Those that tell a job to stop.
std::vector<int> stop_signals() {
  std::vector<int> signals = ending_signals();
  std::erase_if(signals, [](int signal) { return signal == SIGUSR1 || signal == SIGUSR2; });
  return signals;
}

bool is_stop_signal(int signal) {
  const std::vector<int> signals = stop_signals();
  return std::ranges::find(signals, signal) != signals.end();
}

std::vector<int> heeded_signals() {
  std::vector<int> signals = ending_signals();
  signals.insert(signals.end(), {SIGCHLD, SIGTSTP, SIGCONT});
  return signals;
}

class Launcher {
 public:
  Launcher(const LaunchOptions& options, const LaunchPlan& plan, const fs::path& folder, SignalInbox& inbox)
      : inbox_(inbox),
        reception_((folder / "socket").string(), static_cast<std::size_t>(plan.ranks) + 2 * plan.hosts.size()),
        stdout_(STDOUT_FILENO, plan.ranks == 1 || ::isatty(STDOUT_FILENO) == 1),
        stderr_(STDERR_FILENO, plan.ranks == 1 || ::isatty(STDERR_FILENO) == 1),
        job_(options, plan, stdout_, stderr_),
        mpirun_(plan),
        ending_(job_, mpirun_),
        watch_(job_, mpirun_, ending_) {
    if (!job_.hosts.empty()) watch_.prepare(reception_, folder);
  }

  LaunchReport run(const std::vector<std::string>& mpirun_command, const std::vector<std::string>& mpirun_environment) {
    mpirun_.start(mpirun_command, job_.options.environment, mpirun_environment);
    ending_.expect_start();
    while (ending_.phase() != Phase::GivenUp && !job_.all_ended()) turn();
    dismiss();
    LaunchReport report = ending_.report(stdout_.error());
    report.culprit_wrote_last = report.culprit >= 0 && report.culprit == stderr_.last_rank();
    return report;
  }

 private:
  void turn() {
    enum : std::size_t { kSignals, kChatter, kOut, kErr, kIn, kReception };
    const bool room = !stdout_.full() && !stderr_.full();
    polled_.assign({{inbox_.fd(), POLLIN, 0},
                    {mpirun_.chatter_fd(), POLLIN, 0},
                    {stdout_.pending() ? stdout_.fd() : -1, POLLOUT, 0},
                    {stderr_.pending() ? stderr_.fd() : -1, POLLOUT, 0},
                    {wants_stdin() ? STDIN_FILENO : -1, POLLIN, 0}});
    reception_.poll_for(polled_);
    std::size_t next = polled_.size();
    for (const Host& host : job_.hosts) polled_.push_back(HostWatch::polled_for(host));
    for (const Rank& rank : job_.ranks) {
      const bool alive = rank.channel != nullptr && !rank.channel->closed();
      const short events = !alive ? short{0} : static_cast<short>(rank.channel->events() & (room ? ~0 : ~POLLIN));
      polled_.push_back({alive && events != 0 ? rank.channel->fd() : -1, events, 0});
    }
    ::poll(polled_.data(), polled_.size(), timeout_ms());

    if (polled_[kOut].revents != 0) stdout_.drain();
    if (polled_[kErr].revents != 0) stderr_.drain();
    if (polled_[kChatter].revents != 0) read_chatter();
    if (polled_[kIn].revents != 0) read_stdin();
    const std::span<const pollfd> reception = std::span(polled_).subspan(kReception);
    reception_.pump(reception);
    for (Host& host : job_.hosts) watch_.serve(host, polled_[next++].revents);
    for (Rank& rank : job_.ranks)
      if (const short revents = polled_[next++].revents; revents != 0 && rank.channel != nullptr) serve(rank, revents);
    reception_.accept(reception);
    greet();
    if (polled_[kSignals].revents != 0) take_signals();
    if (stdout_.error() != 0) ending_.stdout_failed(stdout_.error());
    ending_.check_deadline();
  }

  int timeout_ms() const {
    const bool here = job_.hosts.empty();
    const i64 longest_ms = here ? 60'000 : watch_.beat_ns() / 1'000'000;
    if (ending_.deadline_ns() == 0) return here ? -1 : static_cast<int>(longest_ms);
    return static_cast<int>(std::clamp<i64>((ending_.deadline_ns() - monotonic_ns()) / 1'000'000 + 1, 0, longest_ms));
  }

  // ---- shims ----------------------------------------------------------------------------------------------------

  // When every shim has identified itself, all get their ranks to run together, so a rank that fails at once does not
  // keep another from reporting.
  void greet() {
    reception_.hear([&](Guest& guest, const Frame& frame) { introduce(guest, frame); });
    const auto waits = [](const Rank& r) { return r.channel != nullptr && !r.started && !r.ended; };
    const auto up = [](const Host& h) { return h.channel != nullptr; };
    if (ending_.phase() != Phase::Running || !std::all_of(job_.ranks.begin(), job_.ranks.end(), waits) ||
        !std::all_of(job_.hosts.begin(), job_.hosts.end(), up))
      return;
    for (Rank& rank : job_.ranks) job_.start(rank);
    ending_.started();
    reception_.close_to_hosts();  // nobody else is expected
  }

  void introduce(Guest& guest, const Frame& frame) {
    std::vector<Host>& hosts = job_.hosts;
    const std::vector<std::string> fields = unpack(frame.payload);
    const auto place = [&](std::size_t i) {
      return i < fields.size() ? std::strtoul(fields[i].c_str(), nullptr, 10) : ~0ul;
    };
    if (frame.type == Message::HostUp) {
      const HostUpPayload up = value_of<HostUpPayload>(frame.payload);
      const std::size_t h = static_cast<std::size_t>(up.host);
      DS_CHECK(h < hosts.size() && hosts[h].channel == nullptr, Errc::Internal, "a shim introduced itself as host {}",
               h);
      watch_.host_up(hosts[h], up, guest);
    } else if (frame.type == Message::AgentStarted) {
      if (const std::size_t h = place(0); h < hosts.size()) watch_.agent_started(hosts[h]);
    } else if (frame.type == Message::AgentEnded) {
      if (const std::size_t h = place(0); h < hosts.size() && fields.size() == 2)
        watch_.agent_ended(hosts[h], fields[1]);
    } else {
      const std::size_t r = place(0);
      DS_CHECK(frame.type == Message::Hello && fields.size() == 4 && r < job_.ranks.size() &&
                   job_.ranks[r].channel == nullptr,
               Errc::Internal, "a shim introduced itself as rank '{}'", fields.empty() ? "" : fields[0]);
      Rank& rank = job_.ranks[r];
      DS_CHECK(rank.host == nullptr || (place(3) < hosts.size() && rank.host == &hosts[place(3)]), Errc::Internal,
               "mpirun placed rank {} on host {}", r, fields[3]);
      if (rank.host == nullptr) rank.end.host = fields[2];
      guest.channel->limit(~u32{0});
      rank.channel = std::move(guest.channel);
      serve(rank, 0);  // what came together with its name
    }
  }

  void serve(Rank& rank, short revents) {
    rank.channel->pump(revents);
    while (const std::optional<Frame> frame = rank.channel->receive()) switch (frame->type) {
        case Message::Started: rank.end.pid = value_of<pid_t>(frame->payload); break;
        case Message::Stdout: rank.out->take(frame->payload); break;
        case Message::Stderr: rank.err->take(frame->payload); break;
        case Message::Aborted:  // MPI_Abort, or a rank that left MPI without a word: its end is on the way to us
          ending_.aborted();
          break;
        case Message::StdinTaken: stdin_credit_ = true; break;
        case Message::Ended: {
          const EndedPayload end = value_of<EndedPayload>(frame->payload);
          rank.end.signal = exit_signal(end.wait_status);
          const i64 ahead_ns = rank.host != nullptr ? rank.host->clock_ahead_ns : 0;
          ending_.rank_ended(rank, exit_status(end.wait_status), end.time_ns + ahead_ns, end.stopped != 0);
          break;
        }
        default: throw Error(Errc::Internal, "a shim sent a message that only the launcher sends");
      }
    if (rank.channel->closed() && !rank.ended) {  // the shim was killed, and its rank with it
      rank.vanished = true;
      rank.end.signal = SIGKILL;
      ending_.rank_ended(rank, 128 + SIGKILL, monotonic_ns(),
                         ending_.phase() >= Phase::Terminating || ending_.gave_up());
    }
  }

  // ---- signals and streams --------------------------------------------------------------------------------------

  void take_signals() {
    // They come in the order of their numbers. A job that is told to stop is not suspended first.
    std::vector<int> signals;
    while (const int signal = inbox_.next().number) signals.push_back(signal);
    if (std::ranges::any_of(signals, is_stop_signal)) std::erase(signals, SIGTSTP);
    for (const int signal : signals) switch (signal) {
        case SIGCHLD: ending_.reap(); break;
        case SIGCONT: break;  // poll again: stdin may be ours now
        case SIGTSTP: {
          job_.signal(SIGSTOP, false);
          const i64 since_ns = monotonic_ns();
          watch_.pause([] { stop_until_told(stop_signals()); });
          ending_.was_suspended(monotonic_ns() - since_ns);
          job_.signal(SIGCONT, false);
          break;
        }
        case SIGUSR1:
        case SIGUSR2: ending_.pass(signal); break;
        default: ending_.stop(signal);
      }
  }

  // Not from a terminal that is not ours: reading would stop us.
  bool wants_stdin() const {
    const Rank& reader = job_.ranks[0];
    if (!stdin_open_ || !stdin_credit_ || !reader.started || reader.ended) return false;
    return ::isatty(STDIN_FILENO) != 1 || ::tcgetpgrp(STDIN_FILENO) == ::getpgrp();
  }

  void read_stdin() {
    char buffer[16 * 1024];
    const ssize_t n = ::read(STDIN_FILENO, buffer, sizeof buffer);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) return;
    stdin_open_ = n > 0;
    stdin_credit_ = false;
    job_.ranks[0].channel->send(Message::Stdin, {buffer, n > 0 ? static_cast<std::size_t>(n) : 0});
  }

  void read_chatter() {
    if (mpirun_.read_chatter()) ending_.heed_chatter();
  }

  // ---- the end --------------------------------------------------------------------------------------------------

  // All have ended: shims leave, mpirun after them; what is left then has lost its right to live.
  void dismiss() {
    job_.dismiss();
    if (ending_.phase() == Phase::GivenUp || ending_.gave_up()) mpirun_.kill();
    ending_.allow(job_.hosts.empty() ? kMpirunGrace : kHostsGrace);
    if (!see_off()) return;
    watch_.tell_of_silent_hosts();
    kill_descendants();
    while (mpirun_.read_chatter()) {
    }
  }

  // Waits until mpirun and the hosts have left or may wait no longer, and until all output is written. False: it cannot
  // be, and we were told to stop.
  bool see_off() {
    const auto here = [](const Host& host) { return host.connected() && !host.lost; };
    for (;;) {
      const bool waits = mpirun_.is_running() || std::any_of(job_.hosts.begin(), job_.hosts.end(), here);
      const bool in_time = waits && monotonic_ns() < ending_.deadline_ns();
      if (!in_time && !stdout_.pending() && !stderr_.pending()) return true;
      enum : std::size_t { kSignals, kChatter, kOut, kErr, kFirstHost };
      polled_.assign({{inbox_.fd(), POLLIN, 0},
                      {mpirun_.chatter_fd(), POLLIN, 0},
                      {stdout_.pending() ? stdout_.fd() : -1, POLLOUT, 0},
                      {stderr_.pending() ? stderr_.fd() : -1, POLLOUT, 0}});
      for (const Host& host : job_.hosts) polled_.push_back(HostWatch::polled_for(host));
      ::poll(polled_.data(), polled_.size(), in_time ? timeout_ms() : -1);
      if (polled_[kChatter].revents != 0) read_chatter();
      stdout_.drain();
      stderr_.drain();
      for (std::size_t i = 0; i < job_.hosts.size(); ++i)
        if (job_.hosts[i].channel != nullptr) watch_.listen(job_.hosts[i], polled_[kFirstHost + i].revents);
      while (const int signal = inbox_.next().number) {
        if (signal == SIGCHLD) ending_.reap();
        if (is_stop_signal(signal) && !waits) return false;  // nobody reads our output
      }
    }
  }

  SignalInbox& inbox_;
  Reception reception_;
  Sink stdout_, stderr_;
  Job job_;
  Mpirun mpirun_;
  Ending ending_;
  HostWatch watch_;
  std::vector<pollfd> polled_;
  bool stdin_open_ = true, stdin_credit_ = true;
};

}  // namespace
}  // namespace launch

LaunchReport run_launch(const LaunchOptions& options, const LaunchPlan& plan) {
  using namespace launch;
  DS_CHECK(plan.refused == 0, Errc::Config, "{}", plan.why);
  SignalInbox inbox(heeded_signals());  // first: one that comes while the job starts waits for it
  if (!options.log_dir.empty()) {
    std::error_code error;
    if (fs::status(options.log_dir, error).type() != fs::file_type::none)  // a link that leads to itself is one
      fs::create_directories(follow_links(options.log_dir), error);
    DS_CHECK(!error, Errc::Config, "--log-dir: cannot create {}: {}", options.log_dir, error.message());
  }
  if (const std::size_t cpus = usable_cpus().size(); plan.hosts.empty() && std::cmp_greater(plan.ranks, cpus))
    log_message(LogLevel::Warning, fmt::format("{} ranks share {} cores", plan.ranks, cpus));
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);

  const fs::path planned = fs::path(plan.mpirun.back()).parent_path();
  const PrivateFolder folder(planned.parent_path());
  const auto in_folder = [&](std::vector<std::string> words) {
    for (std::string& word : words)
      if (const std::size_t at = word.find(planned.string()); at != std::string::npos)
        word.replace(at, planned.string().size(), folder.path().string());
    return words;
  };
  return Launcher(options, plan, folder.path(), inbox).run(in_folder(plan.mpirun), in_folder(plan.mpirun_environment));
}

}  // namespace ds
