// SPDX-License-Identifier: Apache-2.0
// The launcher: one event loop over signals, shims, streams and mpirun. How a job ends:
//
//   Running --a rank fails--> Ending --2 s--> Terminating --2 s--> Killing --2 s--> given up
//                             peers may       SIGTERM              SIGKILL
//                             say their part
//
// A rank that returns 75 (checkpoint committed) is no failure, but its peers get 30 s to follow. The second stop signal
// goes to Killing at once.

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <memory>

#include "base/check.h"
#include "ds/launch.h"
#include "ds/log.h"
#include "launch/process.h"
#include "launch/streams.h"

namespace ds {
namespace launch {
namespace {

namespace fs = std::filesystem;

constexpr int kCheckpointed = 75;
constexpr std::size_t kLastLines = 20;
constexpr i64 kSecond = 1'000'000'000;
constexpr i64 kStartTimeout = 120 * kSecond;  // for all shims to come
constexpr i64 kEndGrace = 2 * kSecond;        // between the steps of the picture above
constexpr i64 kCheckpointGrace = 30 * kSecond;
constexpr i64 kMpirunGrace = kSecond / 2;  // for mpirun to leave after its last shim

enum class Phase { Running, Ending, Terminating, Killing, GivenUp };

struct Rank {
  RankEnd end;
  std::unique_ptr<Channel> channel;
  std::unique_ptr<LineStream> out, err;
  Fd log;
  i64 end_ns = 0;
  bool started = false, ended = false;
};

Fd listen_at(const std::string& path) {
  Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  DS_CHECK(path.size() < sizeof address.sun_path, Errc::Config, "TMPDIR is too long for a socket: {}", path);
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  const bool good = fd && ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
                    ::listen(fd.get(), SOMAXCONN) == 0;
  DS_CHECK(good, Errc::Io, "cannot listen at {}: {}", path, std::strerror(errno));
  return fd;
}

Fd open_log(const std::string& folder, int rank) {
  const std::string path = fmt::format("{}/rank-{:05}.log", folder, rank);
  Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  DS_CHECK(static_cast<bool>(fd), Errc::Config, "cannot write {}: {}", path, std::strerror(errno));
  return fd;
}

int exit_status(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

std::string how_ended(int status, int signal) {
  return signal != 0 ? fmt::format("was killed by signal {} ({})", signal, signal_name(signal))
                     : fmt::format("exited with status {}", status);
}

class Launcher {
 public:
  Launcher(const LaunchOptions& options, const LaunchPlan& plan, const fs::path& folder)
      : options_(options),
        plan_(plan),
        inbox_({SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT}),
        listener_(listen_at((folder / "socket").string())),
        stdout_(STDOUT_FILENO, options.ranks == 1 || ::isatty(STDOUT_FILENO) == 1),
        stderr_(STDERR_FILENO, options.ranks == 1 || ::isatty(STDERR_FILENO) == 1),
        ranks_(static_cast<std::size_t>(options.ranks)) {
    for (int r = 0; r < options.ranks; ++r) {
      Rank& rank = ranks_[static_cast<std::size_t>(r)];
      rank.end.rank = r;
      rank.end.host = host_name();
      if (!options.log_dir.empty()) rank.log = open_log(options.log_dir, r);
      const std::string tag = options.tag_output ? fmt::format("[{}] ", r) : "";
      rank.out = std::make_unique<LineStream>(r, stdout_, rank.log.get(), tag, 0);
      rank.err = std::make_unique<LineStream>(r, stderr_, rank.log.get(), tag, kLastLines);
    }
  }

  LaunchReport run(const std::vector<std::string>& mpirun_command) {
    start_mpirun(mpirun_command);
    while (phase_ != Phase::GivenUp && !all_ended()) turn();
    dismiss();
    return report();
  }

 private:
  void start_mpirun(const std::vector<std::string>& command) {
    int chatter[2];
    DS_CHECK(::pipe2(chatter, O_CLOEXEC) == 0, Errc::Io, "pipe: {}", std::strerror(errno));
    chatter_ = Fd(chatter[0]);
    const Fd write_end(chatter[1]);
    const Fd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    Environment environment = parse_environment(options_.environment);
    // What another launcher of MPI programs told us would confuse mpirun.
    std::erase_if(environment, [](const auto& variable) {
      const std::string& name = variable.first;
      return name.starts_with("PMIX_") || name.starts_with("OMPI_COMM_WORLD_") || name.starts_with("OMPI_MCA_orte_") ||
             name.starts_with("OMPI_MCA_ess");
    });
    add(environment, plan_.mpirun_environment);
    int error = 0;
    mpirun_ = spawn({.program = command.front(),
                     .argv = command,
                     .environment = environment,
                     .stdin_fd = null.get(),
                     .stdout_fd = write_end.get(),
                     .stderr_fd = write_end.get(),
                     .death_signal = SIGKILL},
                    &error);
    DS_CHECK(error == 0, Errc::Unavailable, "cannot execute {}: {}", command.front(), std::strerror(error));
    deadline_ns_ = start_ns_ + kStartTimeout;
  }

  // ---- the loop -------------------------------------------------------------------------------------------------

  void turn() {
    enum : std::size_t { kSignals, kListener, kChatter, kOut, kErr, kIn, kFirstChannel };
    const bool room = !stdout_.full() && !stderr_.full();
    polled_.assign({{inbox_.fd(), POLLIN, 0},
                    {listener_.get(), POLLIN, 0},
                    {chatter_.get(), POLLIN, 0},
                    {stdout_.pending() ? stdout_.fd() : -1, POLLOUT, 0},
                    {stderr_.pending() ? stderr_.fd() : -1, POLLOUT, 0},
                    {wants_stdin() ? STDIN_FILENO : -1, POLLIN, 0}});
    for (const std::unique_ptr<Channel>& channel : greeting_) polled_.push_back({channel->fd(), channel->events(), 0});
    for (const Rank& rank : ranks_) {
      const bool alive = rank.channel != nullptr && !rank.channel->closed();
      const short events = !alive ? short{0} : static_cast<short>(rank.channel->events() & (room ? ~0 : ~POLLIN));
      polled_.push_back({alive && events != 0 ? rank.channel->fd() : -1, events, 0});
    }
    ::poll(polled_.data(), polled_.size(), timeout_ms());

    if (polled_[kOut].revents != 0) stdout_.drain();
    if (polled_[kErr].revents != 0) stderr_.drain();
    if (polled_[kChatter].revents != 0) read_chatter();
    if (polled_[kIn].revents != 0) read_stdin();
    std::size_t next = kFirstChannel;
    for (const std::unique_ptr<Channel>& channel : greeting_) channel->pump(polled_[next++].revents);
    for (Rank& rank : ranks_)
      if (const short revents = polled_[next++].revents; revents != 0) serve(rank, revents);
    if (polled_[kListener].revents != 0) accept_shim();
    greet();
    if (polled_[kSignals].revents != 0) take_signals();
    check_streams();
    check_deadline();
  }

  int timeout_ms() const {
    if (deadline_ns_ == 0) return -1;
    return static_cast<int>(std::clamp<i64>((deadline_ns_ - monotonic_ns()) / 1'000'000 + 1, 0, 60'000));
  }

  bool all_ended() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.ended; });
  }

  // ---- shims ----------------------------------------------------------------------------------------------------

  void accept_shim() {
    if (Fd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)); fd)
      greeting_.push_back(std::make_unique<Channel>(std::move(fd)));
  }

  // When every shim has said who it is, they get their ranks to run: all together, so that one that fails at once does
  // not keep another from saying why.
  void greet() {
    for (std::unique_ptr<Channel>& channel : greeting_) {
      const std::optional<Frame> hello = channel->receive();
      if (!hello) continue;
      const std::vector<std::string> fields = unpack(hello->payload);
      const std::size_t r = fields.size() == 3 ? std::strtoul(fields[0].c_str(), nullptr, 10) : ranks_.size();
      DS_CHECK(hello->type == Message::Hello && r < ranks_.size() && ranks_[r].channel == nullptr, Errc::Internal,
               "a shim introduced itself as rank '{}'", fields.empty() ? "" : fields[0]);
      ranks_[r].end.host = fields[2];
      ranks_[r].channel = std::move(channel);
    }
    std::erase_if(greeting_, [](const auto& channel) { return channel == nullptr || channel->closed(); });
    const auto waits = [](const Rank& r) { return r.channel != nullptr && !r.started && !r.ended; };
    if (phase_ != Phase::Running || !std::all_of(ranks_.begin(), ranks_.end(), waits)) return;
    for (Rank& rank : ranks_) start(rank);
  }

  void start(Rank& rank) {
    Channel& channel = *rank.channel;
    channel.send(Message::Environment, pack(plan_.environment));
    channel.send(Message::Environment, pack(plan_.rank_environment[static_cast<std::size_t>(rank.end.rank)]));
    if (options_.bind == LaunchBind::Core)
      channel.send(Message::Bind, bytes_of(std::array<i32, 2>{rank.end.rank, options_.ranks}));
    std::vector<std::string> command = options_.command;
    command.insert(command.begin(), plan_.program);
    channel.send(Message::Start, pack(command));
    if (rank.end.rank != 0) channel.send(Message::Stdin);
    rank.started = true;
    const auto started = [](const Rank& r) { return r.started; };
    if (phase_ == Phase::Running && std::all_of(ranks_.begin(), ranks_.end(), started)) deadline_ns_ = 0;
  }

  void serve(Rank& rank, short revents) {
    rank.channel->pump(revents);
    while (const std::optional<Frame> frame = rank.channel->receive()) switch (frame->type) {
        case Message::Started: rank.end.pid = value_of<pid_t>(frame->payload); break;
        case Message::Stdout: rank.out->take(frame->payload); break;
        case Message::Stderr: rank.err->take(frame->payload); break;
        case Message::Aborted:  // MPI_Abort, or a rank that left MPI without a word: its end is on the way to us
          aborted_ = true;
          if (phase_ == Phase::Running) enter(Phase::Ending, kEndGrace);
          break;
        case Message::StdinTaken: stdin_credit_ = true; break;
        case Message::Ended: {
          const EndedPayload end = value_of<EndedPayload>(frame->payload);
          rank.end.signal = WIFSIGNALED(end.wait_status) ? WTERMSIG(end.wait_status) : 0;
          finish(rank, exit_status(end.wait_status), end.time_ns, end.stopped != 0);
          break;
        }
        default: throw Error(Errc::Internal, "message from a shim that only the launcher sends");
      }
    if (rank.channel->closed() && !rank.ended) {  // the shim was killed, and its rank with it
      rank.end.signal = SIGKILL;
      finish(rank, 128 + SIGKILL, monotonic_ns(), phase_ >= Phase::Terminating);
    }
  }

  void finish(Rank& rank, int status, i64 time_ns, bool stopped) {
    rank.ended = true;
    rank.end_ns = time_ns;
    rank.end.status = status;
    rank.end.stopped = stopped;
    rank.end.seconds = static_cast<double>(time_ns - start_ns_) * 1e-9;
    rank.out->end();
    rank.err->end();
    rank.end.last_lines = rank.err->last_lines();
    for (const LineStream* stream : {rank.out.get(), rank.err.get()})
      if (stream->log_error() != 0)
        log_message(LogLevel::Warning, fmt::format("the log of rank {} is incomplete: {}", rank.end.rank,
                                                   std::strerror(stream->log_error())));
    if (rank.end.rank == 0) stdin_open_ = false;
    const bool failed = status != kCheckpointed;
    // A rank that returned 0 may have left MPI without a word; mpirun finds that out when the shim has left, too.
    if (status == 0) rank.channel->send(Message::Bye);
    if (status == 0 || failed_ || phase_ > Phase::Ending) return;
    enter(Phase::Ending, failed ? kEndGrace : kCheckpointGrace);
    failed_ = failed;
  }

  // ---- ending ---------------------------------------------------------------------------------------------------

  void enter(Phase phase, i64 grace_ns) {
    phase_ = phase;
    deadline_ns_ = monotonic_ns() + grace_ns;
    if (phase == Phase::Terminating) signal_ranks(SIGTERM, true);
    if (phase == Phase::Killing) {
      signal_ranks(SIGKILL, true);
      const auto started = [](const Rank& r) { return r.started; };
      if (mpirun_ > 0 && !std::all_of(ranks_.begin(), ranks_.end(), started)) ::kill(mpirun_, SIGKILL);
    }
  }

  void check_deadline() {
    if (deadline_ns_ == 0 || monotonic_ns() < deadline_ns_) return;
    switch (phase_) {
      case Phase::Running:
        why_ = "mpirun did not start all ranks within 120 s";
        enter(Phase::Killing, kEndGrace);
        break;
      case Phase::Ending: enter(Phase::Terminating, kEndGrace); break;
      case Phase::Terminating: enter(Phase::Killing, kEndGrace); break;
      default: phase_ = Phase::GivenUp;
    }
  }

  void signal_ranks(int signal, bool stop) {
    const SignalPayload payload{.signal = signal, .stop = stop ? 1 : 0};
    for (Rank& rank : ranks_)
      if (rank.channel != nullptr && !rank.ended) rank.channel->send(Message::Signal, bytes_of(payload));
  }

  void take_signals() {
    while (const int signal = inbox_.next().number) switch (signal) {
        case SIGCHLD: reap(); break;
        case SIGCONT: break;  // poll again: stdin may be ours now
        case SIGTSTP:
          signal_ranks(SIGSTOP, false);
          ::raise(SIGSTOP);
          signal_ranks(SIGCONT, false);
          break;
        case SIGUSR1:
        case SIGUSR2: signal_ranks(signal, false); break;
        default: stop(signal);
      }
  }

  void stop(int signal) {
    const bool again = std::exchange(stop_signal_, signal) != 0;
    const auto waiting = [](const Rank& r) { return !r.started; };
    if (again || std::any_of(ranks_.begin(), ranks_.end(), waiting)) return enter(Phase::Killing, kEndGrace);
    if (signal == SIGINT) log_message(LogLevel::Warning, "interrupted: told the ranks; once more ends them by force");
    signal_ranks(signal, false);
  }

  void reap() {
    int status = 0;
    for (pid_t pid; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;) {
      if (pid != mpirun_) continue;
      mpirun_ = -1;
      mpirun_end_ = status;
      if (all_ended()) continue;
      for (Rank& rank : ranks_)
        if (rank.channel == nullptr) rank.ended = true;  // will never come
      if (phase_ != Phase::Killing) enter(Phase::Killing, kEndGrace);
    }
  }

  // All have ended: shims leave, mpirun after them; what is left then has lost its right to live.
  void dismiss() {
    for (Rank& rank : ranks_)
      if (rank.channel != nullptr) rank.channel->send(Message::Bye);
    if (phase_ == Phase::GivenUp && mpirun_ > 0) ::kill(mpirun_, SIGKILL);
    deadline_ns_ = monotonic_ns() + kMpirunGrace;
    while ((mpirun_ > 0 && monotonic_ns() < deadline_ns_) || stdout_.pending() || stderr_.pending()) {
      pollfd polled[] = {{inbox_.fd(), POLLIN, 0},
                         {chatter_.get(), POLLIN, 0},
                         {stdout_.pending() ? stdout_.fd() : -1, POLLOUT, 0},
                         {stderr_.pending() ? stderr_.fd() : -1, POLLOUT, 0}};
      ::poll(polled, std::size(polled), mpirun_ > 0 ? timeout_ms() : -1);
      if (polled[1].revents != 0) read_chatter();
      stdout_.drain();
      stderr_.drain();
      while (const int signal = inbox_.next().number) {
        if (signal == SIGCHLD) reap();
        if ((signal == SIGINT || signal == SIGTERM) && mpirun_ <= 0) return;  // nobody reads our output
      }
    }
    kill_descendants();
    while (chatter_ && read_chatter()) {
    }
  }

  // ---- streams --------------------------------------------------------------------------------------------------

  // Not from a terminal that is not ours: reading would stop us.
  bool wants_stdin() const {
    if (!stdin_open_ || !stdin_credit_ || !ranks_[0].started || ranks_[0].ended) return false;
    return ::isatty(STDIN_FILENO) != 1 || ::tcgetpgrp(STDIN_FILENO) == ::getpgrp();
  }

  void read_stdin() {
    char buffer[16 * 1024];
    const ssize_t n = ::read(STDIN_FILENO, buffer, sizeof buffer);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) return;
    stdin_open_ = n > 0;
    stdin_credit_ = false;
    ranks_[0].channel->send(Message::Stdin, {buffer, n > 0 ? static_cast<std::size_t>(n) : 0});
  }

  // What mpirun itself says; of interest only if it fails or somebody wants to know.
  bool read_chatter() {
    char buffer[4096];
    const ssize_t n = ::read(chatter_.get(), buffer, sizeof buffer);
    if (n > 0) {
      said_.append(buffer, static_cast<std::size_t>(n));
      log_message(LogLevel::Verbose, std::string_view(buffer, static_cast<std::size_t>(n)));
    } else if (n == 0 || errno != EINTR) {
      chatter_.reset();
    }
    return n > 0;
  }

  // A reader of our stdout that went away, or a full disk, ends the job as it would end a single program.
  void check_streams() {
    if (stdout_.error() == 0 || phase_ >= Phase::Terminating) return;
    if (stdout_.error() != EPIPE) why_ = fmt::format("cannot write to stdout: {}", std::strerror(stdout_.error()));
    enter(Phase::Terminating, kEndGrace);
  }

  // ---- the verdict ----------------------------------------------------------------------------------------------

  LaunchReport report() {
    LaunchReport report{.status = 0, .why = why_, .culprit = -1, .ranks = {}};
    const Rank* first = nullptr;
    bool checkpointed = false, stopped = false;
    for (const Rank& rank : ranks_) {
      report.ranks.push_back(rank.end);
      const RankEnd& end = rank.end;
      checkpointed |= end.status == kCheckpointed;
      const bool as_told = end.stopped || (stop_signal_ != 0 && end.status == 128 + stop_signal_);
      stopped |= as_told && end.status != 0 && end.status != kCheckpointed;
      if (as_told || end.status == 0 || end.status == kCheckpointed) continue;
      if (first == nullptr || rank.end_ns < first->end_ns) first = &rank;
    }
    const int mpirun_status = exit_status(mpirun_end_);
    const int mpirun_signal = WIFSIGNALED(mpirun_end_) ? WTERMSIG(mpirun_end_) : 0;
    const auto waiting = [](const Rank& r) { return !r.started; };
    const bool never_started = std::any_of(ranks_.begin(), ranks_.end(), waiting);
    const bool none_started = std::all_of(ranks_.begin(), ranks_.end(), waiting);
    const std::string quoted = said_.empty() ? "" : "; it said:\n" + said_;
    if (stdout_.error() == EPIPE) {
      report.status = 128 + SIGPIPE;
    } else if (first != nullptr) {
      report.status = first->end.status;
      report.culprit = first->end.rank;
      report.why = fmt::format("rank {} ({}, pid {}) {}", first->end.rank, first->end.host, first->end.pid,
                               how_ended(first->end.status, first->end.signal));
    } else if (stop_signal_ != 0 && (stopped || never_started)) {
      report.status = 128 + stop_signal_;
    } else if (!why_.empty()) {
      report.status = 1;
      if (never_started) report.why += quoted;
    } else if (stopped || never_started) {
      report.status = mpirun_status != 0 ? mpirun_status : 1;
      report.why = aborted_ && mpirun_signal == 0
                       ? "mpirun ended the job; a rank may have returned without MPI_Finalize"
                       : fmt::format("mpirun {}{}", how_ended(mpirun_status, mpirun_signal),
                                     none_started    ? " before any rank had started"
                                     : never_started ? " before all ranks had started"
                                                     : "");
      report.why += quoted;
    } else if (checkpointed) {
      report.status = kCheckpointed;
    }
    return report;
  }

  const LaunchOptions& options_;
  const LaunchPlan& plan_;
  SignalInbox inbox_;
  Fd listener_, chatter_;
  Sink stdout_, stderr_;
  std::vector<Rank> ranks_;
  std::vector<std::unique_ptr<Channel>> greeting_;  // shims that have not said who they are
  std::vector<pollfd> polled_;
  std::string said_, why_;
  Phase phase_ = Phase::Running;
  const i64 start_ns_ = monotonic_ns();
  i64 deadline_ns_ = 0;  // of the phase; 0: none
  pid_t mpirun_ = -1;
  int mpirun_end_ = 0;  // as of waitpid
  int stop_signal_ = 0;
  bool stdin_open_ = true, stdin_credit_ = true;
  bool failed_ = false;   // some rank; not counting 75
  bool aborted_ = false;  // by mpirun
};

}  // namespace
}  // namespace launch

LaunchReport run_launch(const LaunchOptions& options, const LaunchPlan& plan) {
  using namespace launch;
  DS_CHECK(plan.refused == 0, Errc::Config, "{}", plan.why);
  if (!options.log_dir.empty()) {
    std::error_code error;
    fs::create_directories(options.log_dir, error);
    DS_CHECK(!error, Errc::Config, "cannot create {}: {}", options.log_dir, error.message());
  }
  if (const std::size_t cpus = usable_cpus().size(); static_cast<std::size_t>(options.ranks) > cpus)
    log_message(LogLevel::Warning, fmt::format("{} ranks share {} cores", options.ranks, cpus));
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);

  const fs::path planned = fs::path(plan.mpirun.back()).parent_path();
  const PrivateFolder folder(planned.parent_path());
  std::vector<std::string> mpirun = plan.mpirun;
  for (std::string& word : mpirun)
    if (word.starts_with(planned.string())) word.replace(0, planned.string().size(), folder.path().string());
  return Launcher(options, plan, folder.path()).run(mpirun);
}

}  // namespace ds
