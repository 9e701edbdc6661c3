// SPDX-License-Identifier: Apache-2.0
// The launcher: one event loop over signals, shims, streams and mpirun. How a job ends:
//
//   Running --a rank fails--> Ending --2 s--> Terminating --2 s--> Killing --2 s--> given up
//                             peers may       SIGTERM              SIGKILL
//                             say their part
//
// A rank that returns 75 (checkpoint committed) is no failure, but its peers get 30 s to follow. The second stop signal
// goes to Killing at once. A host that is lost takes its ranks with it, and the rest ends as after a failed rank.

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>

#include "base/check.h"
#include "base/file.h"
#include "base/limits.h"
#include "base/process_stat.h"
#include "comm/ended_ranks.h"
#include "ds/launch.h"
#include "ds/log.h"
#include "ds/printable.h"
#include "launch/heart.h"
#include "launch/host_shim.h"
#include "launch/process.h"
#include "launch/streams.h"

namespace ds {
namespace launch {
namespace {

namespace fs = std::filesystem;

constexpr int kCheckpointed = 75;
constexpr std::size_t kLastLines = 20;
constexpr std::size_t kKeptText = 4096;  // of what mpirun said last
constexpr i64 kSecond = 1'000'000'000;
constexpr i64 kStartTimeout = 120 * kSecond;  // for all shims to come
constexpr i64 kEndGrace = 2 * kSecond;        // between the steps of the picture above
constexpr i64 kCheckpointGrace = 30 * kSecond;
constexpr i64 kMpirunGrace = kSecond / 2;    // for mpirun to leave after its last shim
constexpr i64 kHostsGrace = 4 * kSecond;     // the same with daemons on hosts
constexpr i64 kIntroduction = 20 * kSecond;  // for a connection from another host to prove what it is
constexpr std::size_t kStrangers = 64;       // unproven connections at once, above those of our own shims
constexpr u32 kLongestIntroduction = 1024;   // bytes

enum class Phase { Running, Ending, Terminating, Killing, GivenUp };

// Who has connected and not yet said who it is.
struct Guest {
  std::unique_ptr<Channel> channel;
  bool trusted = false;
  Nonce challenge{};
  i64 since_ns = monotonic_ns();
  i64 clock_ahead_ns = 0;  // ours beside theirs
};

// A host that was given; without hosts there is none.
struct Host {
  explicit Host(const PlannedHost& host) : planned(host) {}

  const PlannedHost& planned;
  std::unique_ptr<Channel> channel;  // to its shim
  HostUpPayload up{};
  i64 clock_ahead_ns = 0;
  i64 called_ns = 0;  // when its agent started
  i64 heard_ns = 0;
  bool orted_ended = false, lost = false;

  std::string text() const {
    const int last = planned.first_rank + planned.ranks - 1;
    return planned.ranks == 1 ? fmt::format("host {} (rank {})", planned.name, last)
                              : fmt::format("host {} (ranks {} to {})", planned.name, planned.first_rank, last);
  }
};

struct Rank {
  RankEnd end;
  Host* host = nullptr;
  std::unique_ptr<Channel> channel;
  std::unique_ptr<LineStream> out, err;
  Fd log;
  i64 end_ns = 0;
  bool started = false, ended = false;
  bool vanished = false;  // its shim closed the connection without a word
};

Fd open_log(const std::string& folder, int rank) {
  const std::string path = fmt::format("{}/rank-{:05}.log", folder, rank);
  Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  DS_CHECK(static_cast<bool>(fd), Errc::Config, "cannot write {}: {}", path, system_reason(errno));
  return fd;
}

void write_file(const fs::path& path, std::string_view text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  DS_CHECK(file.good(), Errc::Io, "cannot write {}: {}", path.string(), system_reason(errno));
}

class Launcher {
 public:
  Launcher(const LaunchOptions& options, const LaunchPlan& plan, const fs::path& folder)
      : options_(options),
        plan_(plan),
        inbox_({SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT}),
        listener_(listen_at((folder / "socket").string())),
        stdout_(STDOUT_FILENO, plan.ranks == 1 || ::isatty(STDOUT_FILENO) == 1),
        stderr_(STDERR_FILENO, plan.ranks == 1 || ::isatty(STDERR_FILENO) == 1),
        ranks_(static_cast<std::size_t>(plan.ranks)),
        ended_ranks_(value_or(parse_environment(plan.environment), "DS_JOB", ""), plan.ranks) {
    for (int r = 0; r < plan.ranks; ++r) {
      Rank& rank = ranks_[static_cast<std::size_t>(r)];
      rank.end.rank = r;
      rank.end.host = host_name();
      if (!options.log_dir.empty()) rank.log = open_log(options.log_dir, r);
      const std::string tag = options.tag_output ? fmt::format("[{}] ", r) : "";
      rank.out = std::make_unique<LineStream>(r, stdout_, rank.log.get(), tag, 0);
      rank.err = std::make_unique<LineStream>(r, stderr_, rank.log.get(), tag, kLastLines);
    }
    for (const PlannedHost& planned : plan.hosts) hosts_.push_back(Host(planned));
    for (Host& host : hosts_)
      for (Rank& rank : ranks_of(host)) {
        rank.host = &host;
        rank.end.host = host.planned.name;
      }
    if (!hosts_.empty()) prepare_hosts(folder);
  }

  LaunchReport run(const std::vector<std::string>& mpirun_command, const std::vector<std::string>& mpirun_environment) {
    start_mpirun(mpirun_command, mpirun_environment);
    while (phase_ != Phase::GivenUp && !all_ended()) turn();
    dismiss();
    return report();
  }

 private:
  std::span<Rank> ranks_of(const Host& host) {
    return std::span(ranks_).subspan(static_cast<std::size_t>(host.planned.first_rank),
                                     static_cast<std::size_t>(host.planned.ranks));
  }

  // The way home for shims on hosts, and what mpirun and our agents read: both know hosts by place.
  void prepare_hosts(const fs::path& folder) {
    home_ = {.secret = random_hex(16),
             .port = 0,
             .timeout_ms = static_cast<i64>(options_.host_timeout_s * 1000),
             .addresses = own_addresses()};
    remote_listener_ = listen_everywhere(&home_.port);
    heart_.start(beat_ns(home_.timeout_ms * 1'000'000));
    AgentSettings settings{.orted = plan_.orted, .home = home_, .hosts = {}};
    std::string hostfile;
    for (std::size_t i = 0; i < hosts_.size(); ++i) {
      const PlannedHost& planned = hosts_[i].planned;
      settings.hosts.push_back(
          {.name = planned.name, .ranks = std::to_string(planned.ranks), .reached_by = planned.reached_by});
      hostfile += fmt::format("{}{} slots={}\n", kHostAlias, i, planned.ranks);
    }
    write_file(folder / "hosts", hostfile);
    write_file(folder / "agent", to_text(settings));
  }

  void start_mpirun(const std::vector<std::string>& command, const std::vector<std::string>& added) {
    Pipe chatter = make_pipe();
    chatter_ = std::move(chatter.read);
    const Fd write_end = std::move(chatter.write);
    const Fd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    Environment environment = parse_environment(options_.environment);
    forget_other_jobs(environment);
    add(environment, added);
    environment.try_emplace(kTracedSignals, "");
    int error = 0;
    mpirun_ = spawn({.program = plan_.mpirun_program,
                     .argv = command,
                     .environment = environment,
                     .stdin_fd = null.get(),
                     .stdout_fd = write_end.get(),
                     .stderr_fd = write_end.get(),
                     .death_signal = SIGKILL},
                    &error);
    DS_CHECK(error == 0, Errc::Unavailable, "cannot execute {}: {}", plan_.mpirun_program, system_reason(error));
    deadline_ns_ = start_ns_ + kStartTimeout;
  }

  // ---- the loop -------------------------------------------------------------------------------------------------

  void turn() {
    enum : std::size_t { kSignals, kListener, kRemoteListener, kChatter, kOut, kErr, kIn, kFirstChannel };
    const bool room = !stdout_.full() && !stderr_.full();
    polled_.assign({{inbox_.fd(), POLLIN, 0},
                    {listener_.get(), POLLIN, 0},
                    {remote_listener_.get(), POLLIN, 0},
                    {chatter_.get(), POLLIN, 0},
                    {stdout_.pending() ? stdout_.fd() : -1, POLLOUT, 0},
                    {stderr_.pending() ? stderr_.fd() : -1, POLLOUT, 0},
                    {wants_stdin() ? STDIN_FILENO : -1, POLLIN, 0}});
    for (const Guest& guest : guests_) polled_.push_back({guest.channel->fd(), guest.channel->events(), 0});
    for (const Host& host : hosts_) polled_.push_back(polled_for(host));
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
    for (const Guest& guest : guests_) guest.channel->pump(polled_[next++].revents);
    for (Host& host : hosts_) serve(host, polled_[next++].revents);
    for (Rank& rank : ranks_)
      if (const short revents = polled_[next++].revents; revents != 0 && rank.channel != nullptr) serve(rank, revents);
    if (polled_[kListener].revents != 0) accept_guests(listener_, true);
    if (polled_[kRemoteListener].revents != 0) accept_guests(remote_listener_, false);
    greet();
    if (polled_[kSignals].revents != 0) take_signals();
    check_streams();
    check_deadline();
  }

  int timeout_ms() const {
    const i64 beat_ms = hosts_.empty() ? 60'000 : beat_ns(home_.timeout_ms * 1'000'000) / 1'000'000;
    if (deadline_ns_ == 0) return hosts_.empty() ? -1 : static_cast<int>(beat_ms);
    return static_cast<int>(std::clamp<i64>((deadline_ns_ - monotonic_ns()) / 1'000'000 + 1, 0, beat_ms));
  }

  bool all_ended() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.ended; });
  }

  bool any_started() const {
    return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.started; });
  }
  bool all_started() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.started; });
  }

  // ---- shims ----------------------------------------------------------------------------------------------------

  // A socket in our folder is proof enough; who comes over TCP has to know the job's secret.
  void accept_guests(const Fd& listener, bool trusted) {
    for (Fd fd; (fd = Fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)));) {
      Guest guest{.channel = std::make_unique<Channel>(std::move(fd)), .trusted = trusted};
      if (!trusted) {
        make_room();
        tune_socket(guest.channel->fd());
        guest.channel->limit(kLongestIntroduction);
        guest.challenge = random_nonce();
        guest.channel->send(Message::Challenge, bytes_of(guest.challenge));
      }
      guests_.push_back(std::move(guest));
    }
  }

  // Of too many connections that prove nothing the oldest makes room: nobody keeps our own shims out.
  void make_room() {
    const auto stranger = [](const Guest& guest) { return !guest.trusted; };
    if (std::cmp_less(std::count_if(guests_.begin(), guests_.end(), stranger),
                      ranks_.size() + 2 * hosts_.size() + kStrangers))
      return;
    guests_.erase(std::find_if(guests_.begin(), guests_.end(), stranger));
  }

  // When every shim has said who it is, they get their ranks to run: all together, so that one that fails at once does
  // not keep another from saying why.
  void greet() {
    for (Guest& guest : guests_) {
      while (guest.channel != nullptr) {
        const std::optional<Frame> frame = guest.channel->receive();
        if (!frame) break;
        if (guest.trusted) {
          introduce(guest, *frame);
        } else if (!prove(guest, *frame)) {
          log_message(LogLevel::Verbose, "a connection was refused: it did not know the job's secret");
          guest.channel.reset();
        }
      }
    }
    const i64 now = monotonic_ns();
    std::erase_if(guests_, [&](const Guest& guest) {
      return guest.channel == nullptr || guest.channel->closed() ||
             (!guest.trusted && now - guest.since_ns > kIntroduction);
    });
    const auto waits = [](const Rank& r) { return r.channel != nullptr && !r.started && !r.ended; };
    const auto up = [](const Host& h) { return h.channel != nullptr; };
    if (phase_ != Phase::Running || !std::all_of(ranks_.begin(), ranks_.end(), waits) ||
        !std::all_of(hosts_.begin(), hosts_.end(), up))
      return;
    for (Rank& rank : ranks_) start(rank);
    deadline_ns_ = 0;
    remote_listener_.reset();  // nobody else is expected
  }

  bool prove(Guest& guest, const Frame& frame) {
    const AnswerPayload answer = value_of<AnswerPayload>(frame.payload);
    if (frame.type != Message::Answer || frame.payload.size() != sizeof answer ||
        answer.proof != proof_of(home_.secret, Side::Shim, guest.challenge, answer.nonce))
      return false;
    guest.trusted = true;
    guest.clock_ahead_ns = (guest.since_ns + monotonic_ns()) / 2 - answer.time_ns;
    guest.channel->send(Message::Proof,
                        bytes_of(proof_of(home_.secret, Side::Launcher, guest.challenge, answer.nonce)));
    return true;
  }

  // Takes the channel for whom it belongs to.
  void introduce(Guest& guest, const Frame& frame) {
    const std::vector<std::string> fields = unpack(frame.payload);
    const auto place = [&](std::size_t i) {
      return i < fields.size() ? std::strtoul(fields[i].c_str(), nullptr, 10) : ~0ul;
    };
    if (frame.type == Message::HostUp) {
      const HostUpPayload up = value_of<HostUpPayload>(frame.payload);
      const std::size_t h = static_cast<std::size_t>(up.host);
      DS_CHECK(h < hosts_.size() && hosts_[h].channel == nullptr, Errc::Internal, "a shim introduced itself as host {}",
               h);
      guest.channel->limit(~u32{0});
      hosts_[h].channel = std::move(guest.channel);
      hosts_[h].clock_ahead_ns = guest.clock_ahead_ns;
      hosts_[h].heard_ns = monotonic_ns();
      hosts_[h].up = up;
      heart_.beat_for(*hosts_[h].channel);
      check_cores(hosts_[h]);
    } else if (frame.type == Message::AgentStarted) {
      if (const std::size_t h = place(0); h < hosts_.size()) hosts_[h].called_ns = monotonic_ns();
    } else if (frame.type == Message::AgentEnded) {
      if (const std::size_t h = place(0); h < hosts_.size() && fields.size() == 2) agent_ended(hosts_[h], fields[1]);
    } else {
      const std::size_t r = place(0);
      DS_CHECK(frame.type == Message::Hello && fields.size() == 4 && r < ranks_.size() && ranks_[r].channel == nullptr,
               Errc::Internal, "a shim introduced itself as rank '{}'", fields.empty() ? "" : fields[0]);
      Rank& rank = ranks_[r];
      DS_CHECK(rank.host == nullptr || (place(3) < hosts_.size() && rank.host == &hosts_[place(3)]), Errc::Internal,
               "mpirun placed rank {} on host {}", r, fields[3]);
      if (rank.host == nullptr) rank.end.host = fields[2];
      guest.channel->limit(~u32{0});
      rank.channel = std::move(guest.channel);
      serve(rank, 0);  // what came together with its name
    }
  }

  void start(Rank& rank) {
    Channel& channel = *rank.channel;
    const int first = rank.host != nullptr ? rank.host->planned.first_rank : 0;
    const int neighbours = rank.host != nullptr ? rank.host->planned.ranks : plan_.ranks;
    if (rank.host != nullptr) {
      channel.send(Message::Environment, pack(portable_environment(options_.environment)));
      channel.send(Message::Environment, pack({fmt::format("MASTER_PORT={}", hosts_[0].up.port)}));
    }
    channel.send(Message::Environment, pack(plan_.environment));
    channel.send(Message::Environment, pack(plan_.rank_environment[static_cast<std::size_t>(rank.end.rank)]));
    if (options_.bind == LaunchBind::Core)
      channel.send(Message::Bind, bytes_of(std::array<i32, 2>{rank.end.rank - first, neighbours}));
    std::vector<std::string> command = {plan_.folder, plan_.program};
    command.insert(command.end(), options_.command.begin(), options_.command.end());
    channel.send(Message::Start, pack(command));
    if (rank.end.rank != 0) channel.send(Message::Stdin);
    rank.started = true;
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
          rank.end.signal = exit_signal(end.wait_status);
          const i64 ahead_ns = rank.host != nullptr ? rank.host->clock_ahead_ns : 0;
          finish(rank, exit_status(end.wait_status), end.time_ns + ahead_ns, end.stopped != 0);
          break;
        }
        default: throw Error(Errc::Internal, "message from a shim that only the launcher sends");
      }
    if (rank.channel->closed() && !rank.ended) {  // the shim was killed, and its rank with it
      rank.vanished = true;
      rank.end.signal = SIGKILL;
      finish(rank, 128 + SIGKILL, monotonic_ns(), phase_ >= Phase::Terminating || verdict_.status != 0);
    }
  }

  // ---- hosts ----------------------------------------------------------------------------------------------------

  static pollfd polled_for(const Host& host) {
    const bool there = host.channel != nullptr && !host.channel->closed();
    return {there ? host.channel->fd() : -1, there ? host.channel->events() : short{0}, 0};
  }

  void listen_to(Host& host, short revents) {
    host.channel->pump(revents);
    while (const std::optional<Frame> frame = host.channel->receive()) {
      host.heard_ns = monotonic_ns();
      if (frame->type != Message::OrtedEnded) continue;
      host.orted_ended = true;
      orted_ended(host, value_of<i32>(frame->payload));
    }
  }

  void serve(Host& host, short revents) {
    const i64 limit_ns = home_.timeout_ms * 1'000'000;
    if (host.channel == nullptr && host.called_ns != 0 && monotonic_ns() - host.called_ns > limit_ns)
      give_up(exit_code(Errc::Unavailable),
              fmt::format("{} cannot be used: nothing came from it within {} s of starting "
                          "its agent (--host-timeout){}",
                          host.text(), options_.host_timeout_s, quoted()));
    if (host.channel == nullptr || host.lost) return;
    listen_to(host, revents);
    // First what came while we were kept from reading.
    if (monotonic_ns() - host.heard_ns > limit_ns) listen_to(host, POLLIN);
    if (host.orted_ended && !any_started()) return;       // its shim follows, and mpirun
    if (host.channel->closed() && !mpirun_is_ending()) {  // without mpirun, hosts end their part
      lose(host, "its part of ds-launch has ended or the connection was reset");
    } else if (monotonic_ns() - host.heard_ns > limit_ns) {
      lose(host,
           fmt::format("nothing was heard from it for {} s; is it up, and its network?", options_.host_timeout_s));
    }
  }

  // At the end, and when we or mpirun end the job, it exits; else something is wrong with it, or mpirun, which has it
  // exit before it says anything, is about to tell why.
  void orted_ended(const Host& host, int wait_status) {
    reap();
    if (all_ended() || phase_ >= Phase::Killing || stop_signal_ != 0 || mpirun_ <= 0) return;
    const std::string how = fmt::format("{}: Open MPI's orted {}", host.text(),
                                        how_ended(exit_status(wait_status), exit_signal(wait_status)));
    if (exit_signal(wait_status) != 0) return give_up(exit_code(Errc::Comm), how);
    if (phase_ != Phase::Running || any_started()) return;
    if (suspect_.empty()) suspect_ = how;
    deadline_ns_ = std::min(deadline_ns_, monotonic_ns() + kEndGrace);
  }

  // Nothing more comes from there; its own shim ends what runs there as soon as it misses us.
  void lose(Host& host, const std::string& how) {
    host.lost = true;
    heart_.forget(*host.channel);
    const auto ended = [](const Rank& rank) { return rank.ended; };
    const std::span<Rank> its_ranks = ranks_of(host);
    const std::string why = fmt::format("{} is lost: {}", host.text(), how);
    if (std::all_of(its_ranks.begin(), its_ranks.end(), ended)) {  // no loss, unless mpirun thinks that it is
      if (suspect_.empty() && mpirun_ > 0 && !all_ended()) suspect_ = why;
      return;
    }
    if (phase_ < Phase::Terminating) give_up(exit_code(Errc::Comm), why);
    for (Rank& rank : its_ranks) {
      if (rank.ended) continue;
      rank.end.lost = true;
      finish(rank, exit_code(Errc::Comm), host.heard_ns, true);
      rank.channel.reset();
    }
  }

  // An agent has ended before its host's shim came: ssh failed, or what it ran.
  void agent_ended(const Host& host, const std::string& how) {
    if (host.channel == nullptr && phase_ == Phase::Running)
      give_up(exit_code(Errc::Unavailable), fmt::format("{} cannot be used: {}", host.text(), how));
  }

  void check_cores(const Host& host) {
    if (host.planned.ranks <= host.up.cores) return;
    if (options_.bind == LaunchBind::Core) {
      give_up(exit_code(Errc::Config),
              fmt::format("{}: --bind core needs a core for every rank: {} ranks, {} cores; use "
                          "fewer ranks there or --bind none",
                          host.text(), host.planned.ranks, host.up.cores));
    } else {
      log_message(LogLevel::Warning, fmt::format("host {}: {} ranks share {} cores", host.planned.name,
                                                 host.planned.ranks, host.up.cores));
    }
  }

  // The job cannot go on, by no rank's fault.
  void give_up(int status, const std::string& why) {
    const auto failed = [](const Rank& r) {
      return r.ended && !r.vanished && !r.end.stopped && r.end.status != 0 && r.end.status != kCheckpointed;
    };
    if (verdict_.status != 0 || std::any_of(ranks_.begin(), ranks_.end(), failed)) return;
    verdict_ = {.status = status, .why = why};
    if (phase_ <= Phase::Ending) enter(any_started() ? Phase::Ending : Phase::Killing, kEndGrace);
  }

  // ---- ending ---------------------------------------------------------------------------------------------------

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
                                                   system_reason(stream->log_error())));
    if (rank.end.rank == 0) stdin_open_ = false;
    const bool failed = status != kCheckpointed;
    // A rank that returned 0 may have left MPI without a word; mpirun finds that out when the shim has left, too.
    if (status == 0) rank.channel->send(Message::Bye);
    // On several hosts who waits does so until its time limit.
    if (hosts_.empty() && !all_ended()) ended_ranks_.add(rank.end.rank, status == 0);
    if (status == 0 || failed_ || verdict_.status != 0 || phase_ > Phase::Ending) return;
    enter(Phase::Ending, failed ? kEndGrace : kCheckpointGrace);
    failed_ = failed;
  }

  void enter(Phase phase, i64 grace_ns) {
    phase_ = phase;
    deadline_ns_ = monotonic_ns() + grace_ns;
    if (phase == Phase::Terminating) signal_ranks(SIGTERM, true);
    if (phase == Phase::Killing) {
      signal_ranks(SIGKILL, true);
      if (!all_started()) kill_mpirun();
    }
  }

  void kill_mpirun() {
    if (mpirun_ <= 0) return;
    killed_mpirun_ = true;
    ::kill(mpirun_, SIGKILL);
  }

  void check_deadline() {
    if (deadline_ns_ == 0 || monotonic_ns() < deadline_ns_) return;
    switch (phase_) {
      case Phase::Running:
        why_ = suspect_;
        if (why_.empty()) why_ = late();
        enter(Phase::Killing, kEndGrace);
        break;
      case Phase::Ending: enter(Phase::Terminating, kEndGrace); break;
      case Phase::Terminating: enter(Phase::Killing, kEndGrace); break;
      default: phase_ = Phase::GivenUp;
    }
  }

  std::string late() const {
    std::string why = "mpirun did not start all ranks within 120 s";
    for (const char* joint = "; nothing came from "; const Host& host : hosts_) {
      if (host.channel != nullptr) continue;
      why += joint + host.text();
      joint = ", ";
    }
    return why;
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
          heart_.between_beats([&] {
            for (const Host& host : hosts_)
              if (host.channel != nullptr) host.channel->send(Message::Pause);
            ::raise(SIGSTOP);
          });
          for (Host& host : hosts_) host.heard_ns = monotonic_ns();
          signal_ranks(SIGCONT, false);
          break;
        case SIGUSR1:
        case SIGUSR2: signal_ranks(signal, false); break;
        default: stop(signal);
      }
  }

  void stop(int signal) {
    const bool again = std::exchange(stop_signal_, signal) != 0;
    if (again || !all_started()) return enter(Phase::Killing, kEndGrace);
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

  // From when others can know it: what mpirun's end closes reaches us before it can be waited for.
  bool mpirun_is_ending() {
    reap();
    return mpirun_ > 0 && process_stat(mpirun_).exiting;
  }

  // All have ended: shims leave, mpirun after them; what is left then has lost its right to live.
  void dismiss() {
    for (Rank& rank : ranks_)
      if (rank.channel != nullptr) rank.channel->send(Message::Bye);
    for (Host& host : hosts_)
      if (host.channel != nullptr) host.channel->send(Message::Bye);
    const bool hopeless = phase_ == Phase::GivenUp || verdict_.status != 0;
    if (hopeless) kill_mpirun();
    deadline_ns_ = monotonic_ns() + (hosts_.empty() ? kMpirunGrace : kHostsGrace);
    const auto here = [](const Host& host) { return host.channel != nullptr && !host.channel->closed() && !host.lost; };
    for (;;) {
      const bool waits = mpirun_ > 0 || std::any_of(hosts_.begin(), hosts_.end(), here);
      const bool in_time = waits && monotonic_ns() < deadline_ns_;
      if (!in_time && !stdout_.pending() && !stderr_.pending()) break;
      polled_.assign({{inbox_.fd(), POLLIN, 0},
                      {chatter_.get(), POLLIN, 0},
                      {stdout_.pending() ? stdout_.fd() : -1, POLLOUT, 0},
                      {stderr_.pending() ? stderr_.fd() : -1, POLLOUT, 0}});
      for (const Host& host : hosts_) polled_.push_back(polled_for(host));
      ::poll(polled_.data(), polled_.size(), in_time ? timeout_ms() : -1);
      if (polled_[1].revents != 0) read_chatter();
      stdout_.drain();
      stderr_.drain();
      for (std::size_t i = 0; i < hosts_.size(); ++i)
        if (hosts_[i].channel != nullptr) listen_to(hosts_[i], polled_[4 + i].revents);
      while (const int signal = inbox_.next().number) {
        if (signal == SIGCHLD) reap();
        if ((signal == SIGINT || signal == SIGTERM) && !waits) return;  // nobody reads our output
      }
    }
    for (const Host& host : hosts_)
      if (host.channel != nullptr && !host.channel->closed())
        log_message(LogLevel::Warning,
                    fmt::format("host {} does not answer: what runs there ends when it has heard nothing for {} s",
                                host.planned.name, options_.host_timeout_s));
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

  // With hosts by the names that we were given.
  std::string quoted() const {
    std::string text = said_;
    for (std::size_t i = hosts_.size(); i-- > 0;) {  // 12 before 1
      const std::string alias = fmt::format("{}{}", kHostAlias, i);
      for (std::size_t at = 0; (at = text.find(alias, at)) != std::string::npos; at += hosts_[i].planned.name.size())
        text.replace(at, alias.size(), hosts_[i].planned.name);
    }
    return text.empty() ? "" : "; it said:" + quoted_lines(text);
  }

  // What mpirun itself says; of interest only if it fails or somebody wants to know.
  bool read_chatter() {
    char buffer[4096];
    const ssize_t n = ::read(chatter_.get(), buffer, sizeof buffer);
    if (n > 0) {
      const std::string_view text(buffer, static_cast<std::size_t>(n));
      said_.append(text);
      log_message(LogLevel::Verbose, "mpirun said:" + quoted_lines(text));
      // A shim has ended before it came to us. Those that come after mpirun's SIGCONT learn of it by its SIGTERM only.
      if (phase_ == Phase::Running && !any_started() && said_.find("the job has been aborted") != std::string::npos) {
        why_ = "mpirun gave up before any rank had started";
        enter(Phase::Killing, kEndGrace);
      }
      if (said_.size() > 2 * kKeptText) said_.erase(0, said_.size() - kKeptText);
    } else if (n == 0 || errno != EINTR) {
      chatter_.reset();
    }
    return n > 0;
  }

  // A reader of our stdout that went away, or a full disk, ends the job as it would end a single program.
  void check_streams() {
    if (stdout_.error() == 0 || phase_ >= Phase::Terminating) return;
    if (stdout_.error() != EPIPE) why_ = fmt::format("cannot write to stdout: {}", system_reason(stdout_.error()));
    enter(Phase::Terminating, kEndGrace);
  }

  // ---- the verdict ----------------------------------------------------------------------------------------------

  LaunchReport report() {
    LaunchReport report{.status = 0, .why = why_, .culprit = -1, .ranks = {}};
    const int mpirun_status = exit_status(mpirun_end_);
    const int mpirun_signal = exit_signal(mpirun_end_);
    const bool mpirun_died = mpirun_signal != 0 && !killed_mpirun_;  // then hosts may end shims before we know
    const Rank* first = nullptr;
    bool checkpointed = false, stopped = false;
    for (const Rank& rank : ranks_) {
      report.ranks.push_back(rank.end);
      const RankEnd& end = rank.end;
      checkpointed |= end.status == kCheckpointed;
      const bool as_told = end.stopped || (rank.vanished && (mpirun_died || !rank.started)) ||
                           (stop_signal_ != 0 && end.status == 128 + stop_signal_);
      stopped |= as_told && end.status != 0 && end.status != kCheckpointed;
      if (as_told || end.status == 0 || end.status == kCheckpointed) continue;
      if (first == nullptr || rank.end_ns < first->end_ns) first = &rank;
    }
    const bool never_started = !all_started(), none_started = !any_started();
    if (stdout_.error() == EPIPE) {
      report.status = 128 + SIGPIPE;
    } else if (verdict_.status != 0) {
      report.status = verdict_.status;
      report.why = verdict_.why;
    } else if (first != nullptr) {
      report.status = first->end.status;
      report.culprit = first->end.rank;
      report.why = fmt::format("rank {} ({}, pid {}) {}", first->end.rank, first->end.host, first->end.pid,
                               how_ended(first->end.status, first->end.signal));
    } else if (stop_signal_ != 0 && (stopped || never_started)) {
      report.status = 128 + stop_signal_;
    } else if (!why_.empty()) {
      report.status = 1;
      if (never_started) report.why += quoted();
    } else if (stopped || never_started) {
      report.status = !suspect_.empty() ? exit_code(Errc::Comm) : mpirun_status != 0 ? mpirun_status : 1;
      report.why = aborted_ && mpirun_signal == 0
                       ? "mpirun ended the job; " +
                             (suspect_.empty() ? "a rank may have returned without MPI_Finalize" : suspect_)
                       : fmt::format("mpirun {}{}{}{}", how_ended(mpirun_status, mpirun_signal),
                                     none_started    ? " before any rank had started"
                                     : never_started ? " before all ranks had started"
                                                     : "",
                                     suspect_.empty() ? "" : "; ", suspect_);
      report.why += quoted();
    } else if (checkpointed) {
      report.status = kCheckpointed;
    }
    return report;
  }

  const LaunchOptions& options_;
  const LaunchPlan& plan_;
  SignalInbox inbox_;
  Fd listener_, remote_listener_, chatter_;
  Sink stdout_, stderr_;
  std::vector<Host> hosts_;
  std::vector<Rank> ranks_;
  EndedRanks ended_ranks_;
  std::vector<Guest> guests_;
  Home home_;
  std::vector<pollfd> polled_;
  std::string said_, why_;
  std::string suspect_;  // what is to blame if mpirun ends the job or does not begin it
  Phase phase_ = Phase::Running;
  const i64 start_ns_ = monotonic_ns();
  i64 deadline_ns_ = 0;  // of the phase; 0: none
  pid_t mpirun_ = -1;
  int mpirun_end_ = 0;  // as of waitpid
  struct {
    int status = 0;
    std::string why;
  } verdict_;  // of give_up()
  int stop_signal_ = 0;
  bool stdin_open_ = true, stdin_credit_ = true;
  bool failed_ = false;   // some rank; not counting 75
  bool aborted_ = false;  // by mpirun
  bool killed_mpirun_ = false;
  Heart heart_;  // stops before the channels that it beats for are gone
};

}  // namespace
}  // namespace launch

LaunchReport run_launch(const LaunchOptions& options, const LaunchPlan& plan) {
  using namespace launch;
  DS_CHECK(plan.refused == 0, Errc::Config, "{}", plan.why);
  if (!options.log_dir.empty()) {
    std::error_code error;
    fs::create_directories(follow_links(options.log_dir), error);
    DS_CHECK(!error, Errc::Config, "cannot create {}: {}", options.log_dir, error.message());
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
  return Launcher(options, plan, folder.path()).run(in_folder(plan.mpirun), in_folder(plan.mpirun_environment));
}

}  // namespace ds
