// SPDX-License-Identifier: Apache-2.0
#include "launch/host_shim.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/as_error.h"
#include "base/check.h"
#include "ds/launch.h"
#include "ds/printable.h"
#include "ds/version.h"
#include "launch/limits.h"
#include "launch/process.h"

namespace ds::launch {
namespace {

namespace fs = std::filesystem;

constexpr i64 kOrtedGrace = 2 * kSecond;  // for orted to leave after its last shim, for shims to leave after orted
constexpr std::size_t kKeptText = 4096;   // of an agent's last output

// Variables that locate Open MPI and its libraries: orted needs them before any rank gets its environment.
constexpr std::array kOrtedVariables = {"LD_LIBRARY_PATH", "OPAL_PREFIX", "OPAL_LIBDIR"};

// mpirun writes its words for a shell, by double quotes around values and nothing more: without them they are
// arguments.
std::string without_quotes(std::string word) {
  if (word.size() >= 2 && word.front() == '"' && word.back() == '"') word = word.substr(1, word.size() - 2);
  return word;
}

// All that goes through standard input.
std::string host_input(const AgentSettings& settings, const OrtedCall& call, const Environment& environment) {
  std::vector<std::string> fields = {std::string(version()), std::to_string(call.host),
                                     settings.hosts[call.host].ranks};
  for (const std::string& field : to_fields(settings.home)) fields.push_back(field);
  for (const char* name : kOrtedVariables) fields.push_back(value_or(environment, name, ""));
  fields.push_back(settings.orted);
  fields.insert(fields.end(), call.arguments.begin(), call.arguments.end());
  return pack(fields);
}

void write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n < 0 && errno != EINTR) return;  // an agent that does not read reports the reason itself
    if (n > 0) text.remove_prefix(static_cast<std::size_t>(n));
  }
}

// Reaps children; true when `pid` was among them.
bool reap(pid_t pid, int* wait_status) {
  bool ended = false;
  int status = 0;
  for (pid_t child; (child = ::waitpid(-1, &status, WNOHANG)) > 0;) {
    if (child != pid) continue;
    *wait_status = status;
    ended = true;
  }
  return ended;
}

// Runs an agent to its end, passes on what it says, and tells the launcher how it ended. The launcher judges: to mpirun
// all is well, for an ssh that loses its connection is no reason to end a host that still answers.
int run_agent(const AgentSettings& settings, const OrtedCall& call, const Environment& environment, Channel launcher,
              SignalInbox& inbox) {
  std::vector<std::string> argv = settings.hosts[call.host].reached_by;
  if (argv.empty()) argv = {own_executable().string(), "--host-shim"};
  const Program program = find_program(argv[0], value_or(environment, "PATH", std::string(kDefaultPath)));
  if (program.status != 0) {
    launcher.send(Message::AgentEnded, pack({std::to_string(call.host), program.why}));
    return 0;
  }
  launcher.send(Message::AgentStarted, pack({std::to_string(call.host)}));
  Pipe in = make_pipe(), out = make_pipe();
  int error = 0, wait_status = 0;
  const pid_t agent = spawn({.program = program.path,
                             .argv = argv,
                             .environment = environment,
                             .stdin_fd = in.read.get(),
                             .stdout_fd = out.write.get(),
                             .stderr_fd = out.write.get(),
                             .death_signal = SIGTERM},
                            &error);
  in.read.reset();
  out.write.reset();
  write_all(in.write.get(), host_input(settings, call, environment));
  in.write.reset();

  std::string said;
  for (bool ended = false, dismissed = false; !ended || out.read;) {
    std::array<pollfd, 3> polled = {{{inbox.fd(), POLLIN, 0}, {out.read.get(), POLLIN, 0}, {launcher.fd(), POLLIN, 0}}};
    ::poll(polled.data(), polled.size(), -1);
    if (polled[1].revents != 0) {
      char buffer[4096];
      const ssize_t n = ::read(out.read.get(), buffer, sizeof buffer);
      if (n > 0) {
        write_all(STDERR_FILENO, {buffer, static_cast<std::size_t>(n)});
        said.append(buffer, static_cast<std::size_t>(n));
        if (said.size() > 2 * kKeptText) said.erase(0, said.size() - kKeptText);
      } else if (n == 0 || errno != EINTR) {
        out.read.reset();
      }
    }
    launcher.pump(polled[2].revents);
    dismissed |= launcher.closed();
    while (const SignalInbox::Signal signal = inbox.next())
      if (signal.number == SIGCHLD) {
        ended |= reap(agent, &wait_status);
      } else {
        dismissed = true;
      }
    if (dismissed) {
      ::kill(agent, SIGTERM);
      for (const i64 limit = monotonic_ns() + kOrtedGrace; !ended && monotonic_ns() < limit;) {
        pollfd polled_signals{inbox.fd(), POLLIN, 0};
        ::poll(&polled_signals, 1, 100);
        ended = reap(agent, &wait_status);
      }
    }
    if (ended || dismissed) kill_descendants();  // processes that still hold the pipe
    if (dismissed) return 1;
  }
  const std::string why =
      error != 0 ? fmt::format("cannot execute '{}': {}", argv[0], std::strerror(error))
                 : fmt::format("'{}' {}{}{}", argv[0], how_ended(exit_status(wait_status), exit_signal(wait_status)),
                               said.empty() ? "" : "; it said:", quoted_lines(said));
  launcher.send(Message::AgentEnded, pack({std::to_string(call.host), why}));
  return 0;
}

// The end of a job as a host sees it: the launcher says so, falls silent, or orted has ended.
class HostShim {
 public:
  HostShim(Channel& channel, i64 timeout_ms, pid_t orted, SignalInbox& inbox)
      : channel_(channel), timeout_ns_(timeout_ms * 1'000'000), orted_(orted), inbox_(inbox) {}

  int run() {
    while (!over()) turn();
    kill_descendants();
    return exit_status(wait_status_);
  }

 private:
  void turn() {
    std::array<pollfd, 2> polled = {{{inbox_.fd(), POLLIN, 0}, {channel_.fd(), channel_.events(), 0}}};
    ::poll(polled.data(), polled.size(), static_cast<int>(beat_ns(timeout_ns_) / 1'000'000));
    channel_.pump(polled[1].revents);
    const i64 now = monotonic_ns();
    while (const std::optional<Frame> frame = channel_.receive()) {
      heard_ns_ = now;
      paused_ = frame->type == Message::Pause;
      if (frame->type == Message::Bye) leave_within(kOrtedGrace);
    }
    while (const SignalInbox::Signal signal = inbox_.next()) {
      if (signal.number != SIGCHLD) leave_within(0);
      if (signal.number != SIGCHLD || !reap(orted_, &wait_status_)) continue;
      orted_ = -1;
      channel_.send(Message::OrtedEnded, bytes_of(wait_status_));
      leave_within(kOrtedGrace);
    }
    if (now - beaten_ns_ < beat_ns(timeout_ns_)) return;
    channel_.send(Message::Heartbeat);
    beaten_ns_ = now;
  }

  void leave_within(i64 grace_ns) { leave_ns_ = std::min(leave_ns_, monotonic_ns() + grace_ns); }

  bool over() const {
    const i64 now = monotonic_ns();
    const bool alone = orted_ < 0 && ::waitpid(-1, nullptr, WNOHANG) < 0;  // nothing left to watch
    return channel_.closed() || alone || now > leave_ns_ || (!paused_ && now - heard_ns_ > timeout_ns_);
  }

  Channel& channel_;
  i64 timeout_ns_;
  pid_t orted_;
  SignalInbox& inbox_;
  int wait_status_ = 0;
  i64 heard_ns_ = monotonic_ns(), beaten_ns_ = 0;
  i64 leave_ns_ = std::numeric_limits<i64>::max();
  bool paused_ = false;
};

// mpirun tells orted to work in the launcher's folder; here it has one of its own.
void move_to(const std::string& folder, std::vector<std::string>& orted_arguments) {
  const auto name = std::find(orted_arguments.begin(), orted_arguments.end(), "orte_tmpdir_base");
  DS_CHECK(orted_arguments.end() - name > 1, Errc::Internal, "mpirun did not pass a working directory to orted");
  *(name + 1) = folder;
}

// The environment of a host's orted: the directory of its files, the number of ranks that share the cores, and the
// launcher's addresses for their shims.
Environment orted_environment(Environment environment, const HostHome& way, const std::string& folder, int ranks) {
  forget_other_jobs(environment);
  // A shell that finds itself started by sshd reads what is meant for people's sessions.
  std::erase_if(environment, [](const auto& variable) { return variable.first.starts_with("SSH_"); });
  add(environment,
      {"OMPI_MCA_btl_vader_backing_directory=" + folder, fmt::format("{}={}", kHomeVariable, variable_of(way))});
  if (std::cmp_greater(ranks, usable_cpus().size())) environment.insert_or_assign("OMPI_MCA_mpi_yield_when_idle", "1");
  return environment;
}

int serve_host(std::span<const std::string> fields, Environment environment, SignalInbox& inbox) {
  DS_CHECK(fields.size() > 3, Errc::Internal,
           "nothing arrived on standard input: the agent must pass its own to the command that it runs");
  DS_CHECK(fields[0] == version(), Errc::Config, "this is version {}, but the job was started by version {}", version(),
           fields[0]);
  HostHome way{.host = std::atoi(fields[1].c_str()), .home = {}};
  const int ranks = std::atoi(fields[2].c_str());
  fields = fields.subspan(3);
  way.home = home_of(fields);
  DS_CHECK(fields.size() > kOrtedVariables.size(), Errc::Internal,
           "the launcher's message for its shims is incomplete");
  for (std::size_t i = 0; i < kOrtedVariables.size(); ++i)
    if (!fields[i].empty()) environment.insert_or_assign(kOrtedVariables[i], fields[i]);
  fields = fields.subspan(kOrtedVariables.size());
  const std::string& orted = fields[0];
  std::vector<std::string> argv(fields.begin(), fields.end());
  DS_CHECK(::access(orted.c_str(), X_OK) == 0, Errc::Unavailable,
           "'{}' does not exist: Open MPI must be at the same path as on the host of ds-launch", orted);

  check_limits(ranks);
  leave_out(own_addresses(), way.home);
  Channel channel = call_home(way.home);  // closes after the folder is gone
  way.home.addresses.resize(1);
  const PrivateFolder folder(private_folder_base(value_or(environment, "TMPDIR", "/tmp"), open_mpi_bytes(ranks)));
  move_to(folder.path().string(), argv);
  const HostUpPayload up{
      .host = way.host, .cores = static_cast<i32>(usable_cpus().size()), .port = static_cast<i32>(free_port())};
  channel.send(Message::HostUp, bytes_of(up));
  const Fd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  int error = 0;
  const pid_t pid = spawn({.program = orted,
                           .argv = argv,
                           .environment = orted_environment(std::move(environment), way, folder.path().string(), ranks),
                           .stdin_fd = null.get(),
                           .stdout_fd = STDERR_FILENO,
                           .stderr_fd = STDERR_FILENO,
                           .death_signal = SIGKILL},
                          &error);
  DS_CHECK(error == 0, Errc::Unavailable, "cannot execute '{}': {}", orted, std::strerror(error));
  return HostShim(channel, way.home.timeout_ms, pid, inbox).run();
}

// A shim's last resort: what goes to standard error reaches the launcher through the agent.
template <class Run>
int run_reporting(Run&& run) {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  std::signal(SIGPIPE, SIG_IGN);
  try {
    return run();
  } catch (const std::exception& e) {
    const Error error = as_error(e);
    write_all(STDERR_FILENO,
              fmt::format("ds-launch on {}: {}\n", host_name(), printable(error.what(), Breaks::Indented)));
    return exit_code(error.code());
  }
}

}  // namespace

std::vector<std::string> addresses_of(const std::string& host) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  std::vector<std::string> addresses;
  if (::getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return addresses;
  for (const addrinfo* i = found; i != nullptr; i = i->ai_next) {
    std::array<char, NI_MAXHOST> text{};
    ::getnameinfo(i->ai_addr, i->ai_addrlen, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
    addresses.emplace_back(text.data());
  }
  ::freeaddrinfo(found);
  return addresses;
}

bool loops_back(const std::string& address) { return address.starts_with("127.") || address == "::1"; }

bool is_this_machine(const std::string& host, const std::vector<std::string>& own) {
  const std::vector<std::string> addresses = addresses_of(host);
  return host == host_name() || std::any_of(addresses.begin(), addresses.end(), [&](const std::string& address) {
           return loops_back(address) || std::find(own.begin(), own.end(), address) != own.end();
         });
}

std::vector<std::string> agent_command(const std::string& agent, const std::string& host, const std::string& command,
                                       double timeout_s) {
  if (!agent.empty()) return {agent, host, command};
  // No password can be asked for: nobody would see whose it is. A connection of our own, which nobody shares and which
  // forwards nothing: it ends with the job.
  std::vector<std::string> words = {"ssh", "-x", "-T"};
  for (const std::string& setting :
       {std::string("BatchMode=yes"), fmt::format("ConnectTimeout={:.0f}", std::ceil(timeout_s)),
        std::string("ControlMaster=no"), std::string("ControlPath=none"), std::string("ClearAllForwardings=yes")})
    words.insert(words.end(), {"-o", setting});
  words.insert(words.end(), {"--", host, command});
  return words;
}

OrtedCall orted_call_of(std::span<const std::string> words) {
  const auto names_host = [](const std::string& word) { return word.starts_with(kHostAlias); };
  const auto is_orted = [](const std::string& word) {
    return word == "orted" || word.ends_with("/orted") || word.ends_with(" orted");
  };
  const auto name = std::find_if(words.begin(), words.end(), names_host);
  const auto orted = std::find_if(name, words.end(), is_orted);
  DS_CHECK(orted != words.end(), Errc::Internal, "mpirun named no host or no orted: {}", fmt::join(words, " "));
  OrtedCall call{.host = std::strtoul(name->c_str() + kHostAlias.size(), nullptr, 10),
                 .arguments = {orted + 1, words.end()}};
  if (!call.arguments.empty() && call.arguments.back() == ")") call.arguments.pop_back();
  std::transform(call.arguments.begin(), call.arguments.end(), call.arguments.begin(), without_quotes);
  return call;
}

std::string to_text(const AgentSettings& settings) {
  std::vector<std::string> fields = {settings.orted};
  for (const std::string& field : to_fields(settings.home)) fields.push_back(field);
  for (const AgentSettings::Host& host : settings.hosts) {
    fields.insert(fields.end(), {host.name, host.ranks, std::to_string(host.reached_by.size())});
    fields.insert(fields.end(), host.reached_by.begin(), host.reached_by.end());
  }
  return pack(fields);
}

AgentSettings agent_settings_of(const std::string& text) {
  const std::vector<std::string> all = unpack(text);
  DS_CHECK(!all.empty(), Errc::Internal, "the launcher's folder has no settings for agents");
  std::span<const std::string> fields = std::span(all).subspan(1);
  AgentSettings settings{.orted = all[0], .home = home_of(fields), .hosts = {}};
  while (fields.size() >= 3) {
    const std::size_t words = std::min<std::size_t>(std::strtoul(fields[2].c_str(), nullptr, 10), fields.size() - 3);
    const std::span<const std::string> reached_by = fields.subspan(3, words);
    settings.hosts.push_back(
        {.name = fields[0], .ranks = fields[1], .reached_by = {reached_by.begin(), reached_by.end()}});
    fields = fields.subspan(3 + words);
  }
  return settings;
}

}  // namespace ds::launch

namespace ds {

using namespace launch;

namespace {

int run_agent_shim(std::span<const std::string> words, const std::vector<std::string>& environment) {
  return run_reporting([&] {
    SignalInbox inbox({SIGCHLD, SIGTERM, SIGINT, SIGHUP});
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    Environment own = parse_environment(environment);
    forget_other_jobs(own);
    const fs::path folder = value_or(own, std::string(kFolderVariable), "");
    own.erase(std::string(kFolderVariable));
    std::ifstream file(folder / "agent", std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    const AgentSettings settings = agent_settings_of(text.str());
    const OrtedCall call = orted_call_of(words);
    DS_CHECK(call.host < settings.hosts.size(), Errc::Internal, "mpirun asks for host {}", call.host);
    Fd socket = connect_to((folder / "socket").string());
    if (!socket) {
      remove_job_files(folder);  // the launcher was killed
      return 1;
    }
    const Peer launcher(socket);
    const int status = run_agent(settings, call, own, Channel(std::move(socket)), inbox);
    if (launcher.is_ending() || !connect_to((folder / "socket").string())) remove_job_files(folder);
    return status;
  });
}

int run_host_shim(const std::vector<std::string>& environment) {
  return run_reporting([&] {
    SignalInbox inbox({SIGCHLD, SIGTERM, SIGINT, SIGHUP});
    std::string text;
    char buffer[4096];
    for (ssize_t n; (n = ::read(STDIN_FILENO, buffer, sizeof buffer)) != 0;) {
      if (n < 0 && errno != EINTR) break;
      if (n > 0) text.append(buffer, static_cast<std::size_t>(n));
    }
    return serve_host(unpack(text), parse_environment(environment), inbox);
  });
}

}  // namespace

// A word as a shell has to read it.
static std::string shell_word(const std::string& word) {
  const auto plain = [](unsigned char c) {
    return std::isalnum(c) != 0 || std::string_view("_-./=:,+@%^").find(static_cast<char>(c)) != std::string_view::npos;
  };
  if (!word.empty() && std::all_of(word.begin(), word.end(), plain)) return word;
  std::string quoted = "'";
  for (const char c : word) c == '\'' ? quoted += "'\\''" : quoted += c;
  return quoted + "'";
}

std::string command_line(const std::vector<std::string>& words) {
  std::string line;
  for (const std::string& word : words) line += (line.empty() ? "" : " ") + shell_word(word);
  return line;
}

std::optional<int> run_as_shim(const std::vector<std::string>& arguments, const std::vector<std::string>& environment) {
  const std::string mode = arguments.empty() ? "" : arguments[0];
  if (mode == "--rank-shim" && arguments.size() == 2) return run_rank_shim(arguments[1], environment);
  if (mode == "--host-shim" && arguments.size() == 1) return run_host_shim(environment);
  if (mode == "--agent-shim") return run_agent_shim(std::span(arguments).subspan(1), environment);
  return std::nullopt;
}

}  // namespace ds
