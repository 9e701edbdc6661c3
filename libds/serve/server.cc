// SPDX-License-Identifier: Apache-2.0
#include "serve/server.h"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/as_error.h"
#include "base/limits.h"
#include "ds/log.h"
#include "ds/units.h"
#include "offload/server_link.h"
#include "probe/host.h"
#include "serve/stored.h"

namespace ds::serve {
namespace {

namespace fs = std::filesystem;
using offload::Connection;
using offload::Message;
using offload::Packer;
using offload::ServedRecord;
using offload::Unpacker;
using Json = nlohmann::ordered_json;

constexpr i64 kLargestMessage = i64{256} << 20;
constexpr size_t kAtOnce = size_t{4} << 20;  // bytes of a peer that are read before others have their turn

void make_private(const std::string& directory) {
  DS_CHECK(::mkdir(directory.c_str(), 0700) == 0 || errno == EEXIST, Errc::Io, "cannot make {}: {}", directory,
           system_reason(errno));
  offload::check_private(directory);
}

Generation::Options file_options(const offload::ServeOptions& o, Device& device) {
  std::error_code ignored;
  Generation::Options files{.path = o.path.empty() ? "" : fs::weakly_canonical(o.path, ignored).string(),
                            .name = o.name,
                            .capacity = o.capacity};
  files.io.block_bytes = o.way.block_bytes;
  files.io.depth = o.way.depth;
  files.io.threads = o.way.method == "threads" ? o.way.depth : 1;
  files.io.io_uring = o.way.method != "threads";
  files.pool = device.stream().pool;
  files.serves = true;
  files.checksums = o.checksum;
  return files;
}

}  // namespace

Server::Server(const offload::ServeOptions& options, Event event)
    : options_(options),
      event_(std::move(event)),
      place_(options.name),
      device_(make_cpu_device(probe::cpu_backend(), options.threads > 0 ? options.threads : probe::num_cores())),
      files_(file_options(options, *device_)) {
  if (!files_.path.empty()) offload::BlockFile::check(files_.path, 0);
  take_name();
  const std::string id = current_generation(place_.directory);
  try {
    remove_leftovers(place_.directory, id);  // of a server that was killed
  } catch (const Error& e) {
    log_message(LogLevel::Warning, e.what());
  }
  if (!id.empty()) {
    const std::string at = states_directory(place_.directory, id);
    DS_CHECK(at == files_.path, Errc::Config,
             "the server '{}' has its states {}; serve it there, or remove it first: ds-offload rm {}", place_.name,
             at.empty() ? "in memory (--shm)" : "in " + at, place_.name);
    current_ = std::make_unique<Generation>(place_.directory, id, files_);
    DS_CHECK(files_.capacity == 0 || current_->bytes() <= files_.capacity, Errc::Unavailable,
             "the states of the server '{}' take {}, and its --capacity is {}", place_.name,
             bytes_text(current_->bytes()), bytes_text(files_.capacity));
    const bool has_checksums = current_->header().checksums != 0;
    DS_CHECK(
        has_checksums == files_.checksums, Errc::Config,
        "the server '{}' has its states {} checksums; serve it {} --checksum, or remove it first: ds-offload rm {}",
        place_.name, has_checksums ? "with" : "without", has_checksums ? "with" : "without", place_.name);
    recover(*current_, *device_);
  }
  if (!files_.path.empty()) warn_of_others(id);
  remove_abandoned();
  listen();
  event_(current_ ? fmt::format("resumes with the states of step {}, {} {}", current_->header().record.step,
                                bytes_text(current_->bytes()), current_->where())
                  : "has no states yet");
}

Server::~Server() {
  if (spare_ >= 0) ::close(spare_);
  if (listener_ >= 0) {
    ::close(listener_);
    ::unlink(place_.socket().c_str());
  }
  if (run_ && run_->coming) run_->coming->remove();
  run_.reset();
  current_.reset();
  drop_step();
  // A server that never had states leaves no name. A link to a file that could not be removed stays.
  std::error_code unknown;
  const bool empty = !fs::exists(place_.directory + "/current", unknown) && !unknown &&
                     std::ranges::none_of(fs::directory_iterator(place_.directory, unknown), [&](const auto& entry) {
                       return is_generation_id(entry.path().filename().string()) || entry.is_symlink(unknown);
                     });
  if (empty) {
    std::error_code ignored;
    remove_abandoned();
    fs::remove_all(place_.directory, ignored);
    ::rmdir(offload::ServerPlace::root().c_str());  // if it was the last
  }
}

// The directory of --path may be shared, and the file of a server that has ended looks like one of a server that will
// come back: another user's, or one whose /dev/shm this process does not see.
void Server::warn_of_others(const std::string& id) const {
  constexpr size_t kMostShown = 3;
  std::vector<std::string> others = states_of_others(files_.path, place_.name, id);
  const size_t all = others.size();
  if (all == 0) return;
  others.resize(std::min(all, kMostShown));
  log_message(LogLevel::Warning,
              fmt::format("{} has states of other servers named '{}', which this one leaves alone: {}{}. Remove them "
                          "only if their servers are gone for good, as after a restart of their host",
                          files_.path, place_.name, fmt::join(others, ", "),
                          all > kMostShown ? fmt::format(", and {} more", all - kMostShown) : ""));
}

void Server::take_name() {
  // One that ends may remove directory and root, when it was the last.
  constexpr int kTries = 100;
  bool is_there = false;
  for (int i = 0; i < kTries && !lock_ && !is_there; ++i) {
    make_private(offload::ServerPlace::root());
    if (::mkdir(place_.directory.c_str(), 0700) != 0 && errno == ENOENT) continue;
    make_private(place_.directory);
    lock_ = DirectoryLock::take(place_.directory);
    is_there = fs::exists(place_.directory);
  }
  DS_CHECK(lock_.has_value(), Errc::Unavailable,
           "there is already a server '{}', or a tool reads the states that one has left", place_.name);
}

void Server::listen() {
  ::unlink(place_.socket().c_str());
  spare_ = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  listener_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  place_.socket().copy(address.sun_path, sizeof address.sun_path - 1);
  constexpr int kWaiting = 4096;
  DS_CHECK(listener_ >= 0 && ::bind(listener_, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
               ::listen(listener_, kWaiting) == 0,
           Errc::Io, "cannot listen at {}: {}", place_.socket(), system_reason(errno));
}

void Server::accept() {
  for (;;) {
    int fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
      // Refuses a waiting connection by closing it; the spare descriptor is given up for a moment to accept it.
      const std::string why = system_reason(errno);
      if (spare_ >= 0) ::close(std::exchange(spare_, -1));
      fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      const bool took = fd >= 0;
      if (took) ::close(fd);
      spare_ = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
      if (!took) {  // others took the descriptor meanwhile: it waits on, and is not asked for at once
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        return;
      }
      log_message(LogLevel::Warning, fmt::format("a connection is refused: {}", why));
      continue;
    }
    if (fd < 0) return;
    Peer& peer = peers_.emplace_back(fd);
    ucred who{};
    socklen_t bytes = sizeof who;
    if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &bytes) != 0 || who.uid != ::geteuid()) peer.gone = true;
  }
}

void Server::run(const std::function<bool()>& stop) {
  constexpr int kLook = 200;  // ms
  while (!stop() && !stopped_) {
    const bool held = is_held();
    for (Peer& p : peers_) {
      if (!held && p.deferred) handle(p, *std::exchange(p.deferred, std::nullopt));
    }
    std::vector<pollfd> fds{{listener_, POLLIN, 0}};
    std::vector<Peer*> of{nullptr};
    for (Peer& p : peers_) {
      // A tool that holds the files does not wait; ranks wait for it. Closed connections are still noticed.
      fds.push_back({p.connection.descriptor(), static_cast<short>(held && p.rank >= 0 ? POLLRDHUP : POLLIN), 0});
      of.push_back(&p);
    }
    if (::poll(fds.data(), fds.size(), kLook) <= 0) continue;
    // Those that have ended first: a run that starts anew may be there already.
    for (size_t i = 1; i < fds.size(); ++i) {
      if ((fds[i].revents & (POLLHUP | POLLRDHUP | POLLERR)) != 0 && (fds[i].revents & POLLIN) == 0) of[i]->gone = true;
      // One of the peers handled in this turn may hold the files now.
      if ((fds[i].revents & POLLIN) != 0 && (of[i]->rank < 0 || !is_held())) receive(*of[i]);
    }
    drop_gone();
    if ((fds[0].revents & POLLIN) != 0) accept();
  }
}

void Server::receive(Peer& peer) {
  for (const size_t before = peer.in.size(); peer.in.size() < before + kAtOnce;) {
    char buffer[1 << 16];
    const ssize_t n = ::recv(peer.connection.descriptor(), buffer, sizeof buffer, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (n <= 0) {
      peer.gone = true;
      break;
    }
    peer.in.append(buffer, static_cast<size_t>(n));
  }
  while (!peer.gone && !peer.deferred && peer.in.size() >= sizeof(Connection::Header)) {
    Connection::Header header{};
    std::memcpy(&header, peer.in.data(), sizeof header);
    if (header.bytes > kLargestMessage) peer.gone = true;
    if (peer.gone || peer.in.size() < sizeof header + header.bytes) return;
    Asked asked{header.kind, peer.in.substr(sizeof header, header.bytes)};
    peer.in.erase(0, sizeof header + header.bytes);
    handle(peer, std::move(asked));
  }
}

// An answer is small, and a peer expects at most one; if the peer does not read it, the server does not wait.
void Server::answer(Peer& peer, std::string_view payload, Message kind) {
  if (peer.gone) return;
  try {
    peer.connection.send(kind, payload);
  } catch (const Error&) {
    peer.gone = true;
  }
}

void Server::refuse(Peer& peer, const Error& e) {
  Packer out;
  out.put(e.code());
  out.put(std::string_view(e.what()));
  answer(peer, out.text(), Message::Failed);
}

std::vector<Server::Peer*> Server::ranks() {
  std::vector<Peer*> all;
  for (Peer& p : peers_) {
    if (p.rank >= 0) all.push_back(&p);
  }
  std::ranges::sort(all, {}, &Peer::rank);
  return all;
}

void Server::handle(Peer& peer, Asked asked) {
  try {
    switch (asked.kind) {
      case Message::Hello:
        if (!is_held()) return hello(peer, asked.payload);
        peer.deferred = std::move(asked);
        return;
      case Message::Status: return status(peer);
      case Message::Hold:
        if (current_) current_->flush();
        peer.holds = true;
        return answer(peer, {});
      case Message::Stop:
        DS_CHECK(!run_, Errc::Unavailable, "a run is attached");
        stopped_ = true;
        return answer(peer, {});
      default: break;
    }
    DS_CHECK(run_ && run_->attached && peer.rank >= 0 && !peer.asked, Errc::Corrupt, "an unexpected message");
    Unpacker in(asked.payload);
    switch (asked.kind) {
      case Message::Read:
      case Message::Write: {
        const auto range = [&] {
          Passes::Range r{};
          in.get(r.set), in.get(r.param), in.get(r.begin), in.get(r.count), in.get(r.states);
          return r;
        }();
        if (asked.kind == Message::Read) {
          run_->passes->read(peer.rank, range);
        } else {
          run_->passes->write(peer.rank, range);
        }
        return answer(peer, {});
      }
      case Message::Tile: {
        const i64 set = in.get<i64>();
        std::vector<offload::ServedPiece> pieces;
        in.get(pieces);
        run_->passes->define_tile(peer.rank, set, std::move(pieces));
        return answer(peer, {});
      }
      case Message::Run: {
        DS_CHECK(generation().header().two_versions != 0, Errc::Corrupt, "a pass before its step is decided");
        Passes::Run r{peer.rank, {}};
        in.get(r.run);
        generation().slots().begin_version(static_cast<u32>(generation().header().record.step + 1), false);
        run_->passes->execute({&r, 1}, Passes::Params::Write);
        return answer(peer, {});
      }
      case Message::Clear:
      case Message::Publish:
      case Message::Commit: peer.asked = std::move(asked); return together();
      default: throw Error(Errc::Corrupt, "a message of an unknown kind");
    }
  } catch (const Error& e) {
    refuse(peer, e);
    if (peer.rank < 0) return;
    peer.gone = true;  // and so the run ends
    why_ = Error(e.code(), fmt::format("rank {}: {}", peer.rank, e.what()));
  }
}

void Server::together() {
  const std::vector<Peer*> all = ranks();
  if (std::ssize(all) < run_->ranks || !std::ranges::all_of(all, [](const Peer* p) { return p->asked.has_value(); }))
    return;
  const Message kind = all.front()->asked->kind;
  DS_CHECK(std::ranges::all_of(all, [&](const Peer* p) { return p->asked->kind == kind; }), Errc::Corrupt,
           "ranks ask for different things");
  switch (kind) {
    case Message::Hello: return attach();
    case Message::Clear: clear(); break;
    case Message::Publish: publish(); break;
    default: commit(); break;
  }
  for (Peer* p : all) {
    p->asked.reset();
    answer(*p, {});
  }
}

void Server::hello(Peer& peer, std::string_view payload) {
  Unpacker in(payload);
  const u32 version = in.get<u32>();
  DS_CHECK(version == offload::kServedVersion, Errc::Unavailable, "it uses protocol version {}, and the run version {}",
           offload::kServedVersion, version);
  std::string run;
  in.get(run);
  const i64 rank = in.get<i64>(), ranks = in.get<i64>();
  DS_CHECK(peer.rank < 0 && rank >= 0 && rank < ranks && ranks <= 99999, Errc::Corrupt, "rank {} of {}", rank, ranks);
  DS_CHECK(!run_ || (run_->id == run && run_->ranks == ranks && !run_->attached && run_->layouts[rank].sets.empty()),
           Errc::Unavailable, "another run is attached");
  RankLayout layout;
  in.get(layout.identity);
  const bool two = in.get<bool>();
  in.get(layout.sets);
  DS_CHECK(!layout.sets.empty(), Errc::Corrupt, "a rank without states");
  for (const offload::ServedSet& set : layout.sets) {
    for (const std::string& path : {set.window, set.gradients}) {
      DS_CHECK(path.empty() || (fs::path(path).parent_path() == place_.directory &&
                                fs::path(path).filename().string().starts_with("mail.")),
               Errc::Corrupt, "memory of a rank outside the server's directory");
    }
  }
  if (!run_)
    run_.emplace(Run{.id = run, .ranks = ranks, .two_versions = two, .layouts = {}, .coming = {}, .passes = {}});
  run_->layouts.resize(static_cast<size_t>(ranks));
  run_->layouts[static_cast<size_t>(rank)] = std::move(layout);
  peer.rank = rank;
  peer.asked = Asked{Message::Hello, {}};
  together();
}

// Beside the current one, which stays until this is whole.
void Server::new_generation() {
  run_->passes.reset();
  if (run_->coming) run_->coming->remove();
  run_->coming.reset();
  const i64 taken = current_ ? current_->bytes() : 0;
  std::vector<RankLayout> bare = run_->layouts;
  run_->coming = std::make_unique<Generation>(place_.directory, std::move(bare), run_->two_versions, taken, files_);
  open_passes();
}

void Server::open_passes() {
  run_->passes = std::make_unique<Passes>(generation(), run_->layouts, *device_);
  generation().slots().begin_version(0, true);  // until it is published, or the run resumes
}

void Server::attach() {
  offload::ServerLink::Found found;
  if (current_) {
    found.has = offload::ServerLink::Has::Same;
    const std::vector<RankLayout>& there = current_->ranks();
    if (there.size() != run_->layouts.size() || (current_->header().two_versions != 0) != run_->two_versions)
      found.has = offload::ServerLink::Has::Other;
    for (size_t r = 0; r < there.size() && found.has == offload::ServerLink::Has::Same; ++r) {
      if (there[r].text() != run_->layouts[r].text()) found.has = offload::ServerLink::Has::Other;
    }
    found.record = current_->header().record;
    found.meta = read_run(*current_).meta;
  }
  if (found.has == offload::ServerLink::Has::Other) found.step_dir = write_step(*current_);
  if (found.has == offload::ServerLink::Has::Same) {
    open_passes();
  } else {
    new_generation();
  }
  run_->attached = true;
  Packer out;
  out.put(found.has);
  out.put(found.record);
  out.put(found.meta);
  out.put(found.step_dir);
  for (Peer* p : ranks()) {
    p->asked.reset();
    answer(*p, out.text(), Message::Attached);
  }
  event_(fmt::format("a run of {} rank{} is attached, {} {}{}", run_->ranks, run_->ranks == 1 ? "" : "s",
                     bytes_text(generation().bytes()), generation().where(),
                     found.has == offload::ServerLink::Has::Nothing ? ""
                     : found.has == offload::ServerLink::Has::Same
                         ? fmt::format(", resuming from step {}", found.record.step)
                         : fmt::format(", at another layout, resuming from step {}", found.record.step)));
}

void Server::clear() { new_generation(); }

std::string Server::write_step(Generation& g) {
  g.flush();
  try {
    const StepPlace place = make_step_place(place_.directory, files_.path, place_.name);
    step_ = place.entry;
    return write_checkpoint(g, place.path, {});
  } catch (const Error& e) {
    drop_step();
    if (e.code() != Errc::Io) throw;
    throw Error(
        Errc::Unavailable,
        fmt::format("the run is of another layout, and there is no place for a step of what there is: {}", e.what()));
  }
}

void Server::drop_step() noexcept try {
  if (!step_.empty()) remove_step(std::exchange(step_, {}));
} catch (const std::exception& e) {
  log_message(LogLevel::Warning, e.what());
}

void Server::publish() {
  Generation& g = generation();
  g.flush();
  RunTexts texts;
  ServedRecord record;
  for (Peer* p : ranks()) {
    Unpacker in(p->asked->payload);
    ServedRecord mine;
    std::string pieces, meta, params;
    in.get(mine), in.get(pieces), in.get(meta), in.get(params);
    texts.pieces.push_back(std::move(pieces));
    if (p->rank > 0) continue;
    record = mine;
    texts.meta = std::move(meta);
    texts.params = std::move(params);
  }
  write_run(g, texts);
  g.header().record = record;
  g.header().published = 1;
  if (run_->coming) {
    write_sealed(place_.directory + "/current", g.id());
    if (current_) current_->remove();
    current_ = std::move(run_->coming);
  }
  drop_step();
}

void Server::commit() {
  DS_CHECK(!run_->coming, Errc::Corrupt, "a step of incomplete states");
  Generation& g = *current_;
  std::vector<Passes::Run> runs;
  ServedRecord record;
  for (Peer* p : ranks()) {
    Unpacker in(p->asked->payload);
    const ServedRecord mine = in.get<ServedRecord>();
    if (p->rank == 0) record = mine;
    const i64 n = in.get<i64>();
    for (i64 i = 0; i < n; ++i) {
      Passes::Run& r = runs.emplace_back();
      r.rank = p->rank;
      in.get(r.run);
      DS_CHECK(r.run.factors.empty(), Errc::Corrupt, "a pass with factors waits for its step");  // it cannot be checked
    }
  }
  const bool two = g.header().two_versions != 0;
  if (two) g.flush();
  const std::string pending = g.file("pending");
  write_sealed(pending, run_->passes->pending_text(record, runs));  // from here on the step is committed, whatever dies
  g.slots().begin_version(static_cast<u32>(record.step), true);
  if (two) {
    g.slots().keep(g.slots().ahead());
  } else {
    run_->passes->execute(runs, Passes::Params::Write);
    g.flush();
  }
  g.header().record = record;
  fs::remove(pending);
}

void Server::status(Peer& peer) {
  answer(peer, Json{{"pid", ::getpid()}, {"ranks", run_ && run_->attached ? run_->ranks : 0}}.dump());
}

void Server::drop_gone() {
  bool any = false, of_run = false;
  for (const Peer& p : peers_) {
    any |= p.gone;
    of_run |= p.gone && p.rank >= 0;
  }
  std::erase_if(peers_, [](const Peer& p) { return p.gone; });
  if (of_run) {
    end_run();
  } else if (any) {
    remove_abandoned();  // of a rank that never identified itself
  }
}

// When a rank has ended, the run has: what it has not committed is forgotten.
void Server::end_run() {
  const bool trained = run_->attached && current_ && !run_->coming;
  for (Peer& p : peers_) {
    if (p.rank < 0) continue;
    refuse(p, why_.value_or(Error(Errc::Comm, "another rank of the run has ended")));
    p.gone = true;
  }
  std::erase_if(peers_, [](const Peer& p) { return p.gone; });
  why_.reset();
  run_->passes.reset();
  if (run_->coming) run_->coming->remove();
  run_.reset();
  drop_step();
  if (current_) {  // its windows may have what is forgotten
    const std::string id = current_->id();
    current_.reset();
    current_ = std::make_unique<Generation>(place_.directory, id, files_);
    recover(*current_, *device_);  // a step that was decided, and failed: what fails again ends the server
  }
  remove_abandoned();
  event_(trained ? fmt::format("the run has ended at step {}", current_->header().record.step) : "the run has ended");
}

// Memory of ranks that have ended. What a step still needs has been used before.
void Server::remove_abandoned() const {
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(place_.directory, ignored)) {
    if (entry.path().filename().string().starts_with("mail.")) offload::Segment::remove_abandoned(entry.path());
  }
}

}  // namespace ds::serve
