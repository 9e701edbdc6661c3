// SPDX-License-Identifier: Apache-2.0
#pragma once
// A server of states: one thread that executes the requests of ranks and tools one after the other.

#include <algorithm>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>

#include "ds/offload.h"
#include "serve/passes.h"

namespace ds::serve {

class Server {
 public:
  using Event = std::function<void(const std::string&)>;
  // Takes the name, and resumes with the states that a server of that name has left. Throws Errc::Unavailable if one is
  // running.
  Server(const offload::ServeOptions& options, Event event);
  ~Server();  // the state stays
  // Runs until stop() returns true, or a tool ends it. Throws Errc::Io if a disk fails.
  void run(const std::function<bool()>& stop);

 private:
  struct Asked {
    offload::Message kind;
    std::string payload;
  };
  struct Peer {
    explicit Peer(int fd) : connection(fd) {}
    offload::Connection connection;
    std::string in{};              // received part of a message
    i64 rank = -1;                 // of the run; -1: not yet identified
    std::optional<Asked> asked{};  // a request that waits for the other ranks of the run
    bool holds = false;            // a tool is reading the files
    bool gone = false;
    std::optional<Asked> deferred{};  // until no tool holds the files
  };
  // A run that is attached or attaching.
  struct Run {
    std::string id;
    i64 ranks = 0;
    bool two_versions = false;
    std::vector<RankLayout> layouts;  // by rank, as received
    bool attached = false;
    std::unique_ptr<Generation> coming;  // made for it, not yet complete; null: it uses the current one
    std::unique_ptr<Passes> passes;
  };

  void take_name();
  void listen();
  void accept();
  void receive(Peer& peer);
  void handle(Peer& peer, Asked asked);
  void answer(Peer& peer, std::string_view payload, offload::Message kind = offload::Message::Done);
  void refuse(Peer& peer, const Error& e);
  void drop_gone();
  void end_run();
  void remove_abandoned() const;
  bool is_held() const noexcept { return std::ranges::any_of(peers_, &Peer::holds); }

  void hello(Peer& peer, std::string_view payload);
  // Called when all ranks have sent the same request.
  void together();
  void attach();
  void clear();
  void publish();
  void commit();
  void status(Peer& peer);
  Generation& generation() { return run_->coming ? *run_->coming : *current_; }
  std::string write_step(Generation& g);
  void drop_step() noexcept;
  void warn_of_others(const std::string& id) const;
  void new_generation();
  void open_passes();
  std::vector<Peer*> ranks();

  const offload::ServeOptions options_;
  const Event event_;
  const offload::ServerPlace place_;
  const std::unique_ptr<Device> device_;
  const Generation::Options files_;
  std::optional<DirectoryLock> lock_;
  int listener_ = -1;
  int spare_ = -1;  // a spare descriptor, to refuse a connection when there is no other
  std::list<Peer> peers_;
  std::unique_ptr<Generation> current_;
  std::optional<Run> run_;
  std::optional<Error> why_;  // the run has failed
  std::string step_;  // a step of the current generation, for a run of another layout: its entry in the directory
  bool stopped_ = false;
};

}  // namespace ds::serve
