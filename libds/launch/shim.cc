// SPDX-License-Identifier: Apache-2.0
// The shim of one rank: a child of mpirun that runs the rank, relays its streams and says how it ended. It stays until
// the launcher says Bye, so that mpirun sees no rank end before the launcher has judged it. Whatever happens to
// launcher or mpirun, the shim ends the rank and everything that the rank started.

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "base/as_error.h"
#include "base/check.h"
#include "ds/launch.h"
#include "ds/printable.h"
#include "launch/host_shim.h"
#include "launch/process.h"

namespace ds::launch {
namespace {

constexpr std::size_t kMaxQueued = 256 * 1024;  // output waiting for the launcher; beyond it the rank waits

class Shim {
 public:
  Shim(Channel channel, const std::string& host, Environment environment, SignalInbox& inbox, pid_t mpirun)
      : channel_(std::move(channel)), environment_(std::move(environment)), inbox_(inbox), mpirun_(mpirun) {
    const std::string rank = value_or(environment_, "OMPI_COMM_WORLD_RANK", "");
    channel_.send(Message::Hello, pack({rank, std::to_string(::getpid()), host_name(), host}));
  }

  // True: the launcher dismissed us; false: it is gone.
  bool run() {
    while (!bye_ && !channel_.closed()) {
      wait();
      while (const std::optional<Frame> frame = channel_.receive()) handle(*frame);
    }
    end_rank();
    return bye_;
  }

 private:
  void wait() {
    const bool room = channel_.queued() < kMaxQueued;
    std::array<pollfd, 5> polled = {{
        {channel_.fd(), channel_.events(), 0},
        {inbox_.fd(), POLLIN, 0},
        {room ? stdout_.get() : -1, POLLIN, 0},
        {room ? stderr_.get() : -1, POLLIN, 0},
        {stdin_pending_ ? stdin_.get() : -1, POLLOUT, 0},
    }};
    ::poll(polled.data(), polled.size(), -1);
    channel_.pump(polled[0].revents);
    if (polled[1].revents != 0) take_signals();
    if (polled[2].revents != 0) relay(stdout_, Message::Stdout);
    if (polled[3].revents != 0) relay(stderr_, Message::Stderr);
    if (polled[4].revents != 0) feed();
    report_end();
  }

  void handle(const Frame& frame) {
    switch (frame.type) {
      case Message::Variables: add(environment_, unpack(frame.payload)); break;
      case Message::Bind: {
        const auto [index, shares] = value_of<std::array<i32, 2>>(frame.payload);
        const std::vector<int> all = usable_cpus();
        const std::span<const int> mine = share_of(all, index, shares);
        cpus_.assign(mine.begin(), mine.end());
        break;
      }
      case Message::Start: try { start(unpack(frame.payload));
        } catch (const std::exception& e) {
          refuse(as_error(e));
        }
        break;
      case Message::Stdin:
        stdin_bytes_ = frame.payload;
        stdin_pending_ = !stdin_bytes_.empty() && stdin_;
        if (stdin_bytes_.empty()) stdin_.reset();
        break;
      case Message::Signal: {
        const auto [signal, stop] = value_of<SignalPayload>(frame.payload);
        stopped_ |= stop != 0 && pid_ > 0;
        signal_rank(signal);
        break;
      }
      case Message::Bye: bye_ = true; break;
      default: throw Error(Errc::Internal, "the launcher sent a message that only shims send");
    }
  }

  void start(std::vector<std::string> argv) {
    const std::string folder = argv[0], program = argv[1];
    argv.erase(argv.begin(), argv.begin() + 2);
    // Cores of this host: no other knows how many there are.
    const int local_ranks = std::max(1, std::atoi(value_or(environment_, "LOCAL_WORLD_SIZE", "1").c_str()));
    environment_.try_emplace("OMP_NUM_THREADS",
                             std::to_string(std::max<std::size_t>(1, usable_cpus().size() / local_ranks)));
    DS_CHECK(::chdir(folder.c_str()) == 0, Errc::Config, "the working directory '{}' cannot be entered on {}: {}",
             folder, host_name(), std::strerror(errno));
    Pipe in = make_pipe(), out = make_pipe(), err = make_pipe();
    int error = 0;
    pid_ = spawn({.program = program,
                  .argv = argv,
                  .environment = environment_,
                  .stdin_fd = in.read.get(),
                  .stdout_fd = out.write.get(),
                  .stderr_fd = err.write.get(),
                  .death_signal = SIGKILL,
                  .cpus = cpus_},
                 &error);
    stdin_ = std::move(in.write);
    ::fcntl(stdin_.get(), F_SETFL, O_NONBLOCK);
    stdout_ = std::move(out.read);
    stderr_ = std::move(err.read);
    channel_.send(Message::Started, bytes_of(pid_));
    if (error != 0)
      channel_.send(Message::Stderr,
                    fmt::format("ds-launch: cannot execute '{}': {}\n", program, std::strerror(error)));
  }

  // The rank cannot start: it ends as one that said why.
  void refuse(const Error& why) {
    channel_.send(Message::Stderr, fmt::format("ds-launch: error: {}\n", why.what()));
    end_ = {.time_ns = monotonic_ns(), .wait_status = W_EXITCODE(exit_code(why.code()), 0), .stopped = 0};
    ended_ = true;
    report_end();
  }

  void relay(Fd& stream, Message type) {
    char buffer[64 * 1024];
    const ssize_t n = ::read(stream.get(), buffer, sizeof buffer);
    if (n > 0) channel_.send(type, {buffer, static_cast<std::size_t>(n)});
    if (n == 0 || (n < 0 && errno != EINTR)) stream.reset();
  }

  // A rank that closed its stdin gets no more input: the shim requests none, and the writer to the launcher waits.
  void feed() {
    const ssize_t n = ::write(stdin_.get(), stdin_bytes_.data(), stdin_bytes_.size());
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n < 0) stdin_.reset();
    if (n > 0) stdin_bytes_.erase(0, static_cast<std::size_t>(n));
    stdin_pending_ = stdin_ && !stdin_bytes_.empty();
    if (stdin_ && !stdin_pending_) channel_.send(Message::StdinTaken);
  }

  void take_signals() {
    while (const SignalInbox::Signal signal = inbox_.next()) {
      if (signal.number == SIGCHLD) {
        reap();
      } else if (signal.number == SIGCONT) {
        if (signal.sender == mpirun_) channel_.send(Message::Aborted);  // how mpirun begins to end a job
      } else if (signal.number == SIGTERM && ::getppid() == mpirun_) {
        channel_.send(Message::Aborted);
      } else if (signal.number == SIGTERM) {  // mpirun has died
        stopped_ |= pid_ > 0;
        signal_rank(SIGKILL);
      } else {
        signal_rank(signal.number);
      }
    }
  }

  void signal_rank(int signal) {
    if (pid_ > 0) ::kill(-pid_, signal);
  }

  void reap() {
    int status = 0;
    for (pid_t pid; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;) {
      if (pid != pid_) continue;
      end_ = {.time_ns = monotonic_ns(), .wait_status = status, .stopped = stopped_ ? 1 : 0};
      pid_ = -1;
      ended_ = true;
    }
    if (ended_) kill_descendants();  // so that the streams end, too
  }

  void report_end() {
    if (!ended_ || stdout_ || stderr_ || reported_) return;
    channel_.send(Message::Ended, bytes_of(end_));
    reported_ = true;
  }

  void end_rank() {
    signal_rank(SIGKILL);
    kill_descendants();
  }

  Channel channel_;
  Environment environment_;
  SignalInbox& inbox_;
  pid_t mpirun_;
  pid_t pid_ = -1;
  Fd stdin_, stdout_, stderr_;
  std::string stdin_bytes_;
  std::vector<int> cpus_;
  EndedPayload end_{};
  bool stdin_pending_ = false, stopped_ = false, ended_ = false, reported_ = false, bye_ = false;
};

}  // namespace

int run_rank_shim(const std::string& socket, const std::vector<std::string>& environment) {
  const pid_t parent = ::getppid();  // mpirun, or what mpirun has on this host
  SignalInbox inbox({SIGCHLD, SIGCONT, SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2});
  std::signal(SIGPIPE, SIG_IGN);  // a rank that closed its stdin is no reason to die
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  Environment own = parse_environment(environment);
  const std::string home = value_or(own, std::string(kHomeVariable), "");
  own.erase(std::string(kHomeVariable));
  if (const auto traced = own.find(kTracedSignals); traced != own.end() && traced->second.empty()) own.erase(traced);
  try {
    if (!home.empty()) {
      HostHome way = host_home_of(home);
      return Shim(call_home(way.home), std::to_string(way.host), own, inbox, parent).run() ? 0 : 1;
    }
    Fd connection = connect_to(socket);
    if (connection && Shim(Channel(std::move(connection)), "0", own, inbox, parent).run()) return 0;
  } catch (const std::exception& e) {
    fmt::print(stderr, "{}\n", printable(e.what(), Breaks::Indented));
    return 1;
  }
  remove_job_files(std::filesystem::path(socket).parent_path());  // the launcher was killed
  return 1;
}

}  // namespace ds::launch
