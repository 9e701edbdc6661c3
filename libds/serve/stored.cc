// SPDX-License-Identifier: Apache-2.0
#include "serve/stored.h"

#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/limits.h"
#include "checkpoint/manifest.h"
#include "checkpoint/run_lock.h"
#include "comm/make_communicator.h"
#include "ds/offload.h"
#include "probe/host.h"
#include "serve/passes.h"
#include "serve/server.h"

namespace ds::serve {
namespace {

namespace fs = std::filesystem;
constexpr std::string_view kStep = "step-";  // and an ID: the name of an entry in a server's directory

using offload::Connection;
using offload::Message;
using offload::ServedPart;
using offload::ServedSet;
using offload::ServerPlace;

// Brings parts of a rank's pieces into memory of its own, in fp32 or as they are kept.
class PieceReader {
 public:
  // after_read: when what is brought has been read.
  PieceReader(Generation& generation, i64 rank, const std::function<void()>& after_read)
      : generation_(generation), rank_(rank), after_read_(after_read) {
    const std::vector<ServedSet>& sets = generation.ranks()[static_cast<size_t>(rank)].sets;
    for (size_t s = 0; s < sets.size(); ++s) {
      for (const ServedPart& p : sets[s].parts) parts_[p.param].push_back({&p, static_cast<i64>(s)});
    }
  }

  // A piece of these elements; `slice` outlives it.
  StatePiece describe(const PieceRange& range, DType work) {
    StatePiece piece{.param = range.param,
                     .begin = range.begin,
                     .count = range.count,
                     .data = {},
                     .slice = range.slice.whole() ? nullptr : &range.slice,
                     .kept = {},
                     .open = {}};
    const std::vector<Part>& parts = parts_[range.param];
    DS_CHECK(!parts.empty(), Errc::Corrupt, "{}: no part of parameter {}", generation_.file("layout"), range.param);
    piece.opens[State::Param] = true;
    for (const State s : kStates) {
      if (parts.front().part->dtypes[s] < 0 ||
          (s == State::Master && (work == DType::F32 || !parts.front().part->is_trained())))
        continue;
      piece.opens[s] = true;
      piece.kept[s].dtype = static_cast<DType>(parts.front().part->dtypes[s]);
    }
    piece.open = [this, range, work, opens = piece.opens, kept = piece.kept, slice = piece.slice](i64 first, i64 n,
                                                                                                  bool) {
      StatePiece here{.param = range.param,
                      .begin = range.begin + first,
                      .count = n,
                      .data = {},
                      .slice = slice,
                      .kept = kept,
                      .open = {}};
      bring(here, opens, work);
      return here;
    };
    return piece;
  }

 private:
  struct Part {
    const ServedPart* part;
    i64 set;
  };
  void bring(StatePiece& here, const StateSet& opens, DType work) {
    for (const State s : kStates) {
      if (!opens[s] && s != State::Master) continue;
      std::vector<char>& memory = memory_[s];
      memory.resize(static_cast<size_t>(here.count * 4 + state_blocks(here.count) * 4));
      if (opens[s]) here.data[s] = memory.data();
      if (is_coded(here.kept[s].dtype)) here.kept[s].scales = reinterpret_cast<float*>(memory.data() + here.count * 4);
    }
    i64 covered = 0;
    for (const Part& of : parts_[here.param]) {
      const ServedPart& p = *of.part;
      const i64 from = std::max(here.begin, p.begin), to = std::min(here.begin + here.count, p.begin + p.count);
      if (from >= to) continue;
      covered += to - from;
      const i64 chunk = generation_.chunk(rank_, of.set, p.chunk), in = from - p.begin, out = from - here.begin;
      const char* const bytes = generation_.memory().take(chunk, false);
      for (const State s : kStates) {
        if (p.dtypes[s] < 0) continue;
        const DType dtype = static_cast<DType>(p.dtypes[s]);
        const i64 width = dtype_bytes(dtype), n = to - from;
        std::memcpy(memory_[s].data() + out * width, bytes + p.offsets[s] + in * width, static_cast<size_t>(n * width));
        if (is_coded(dtype))
          std::memcpy(here.kept[s].scales + out / kStateBlock, bytes + p.scales[s] + in / kStateBlock * 4,
                      static_cast<size_t>(state_blocks(n) * 4));
      }
      generation_.memory().give_back(chunk, false);
    }
    DS_CHECK(covered == here.count, Errc::Corrupt, "{}: elements of parameter {} are missing",
             generation_.file("layout"), here.param);
    if (after_read_) after_read_();
    // The parameter is its master, rounded.
    const auto* const master = reinterpret_cast<const float*>(memory_[State::Master].data());
    char* const param = memory_[State::Param].data();
    for (i64 i = 0; i < here.count; ++i) {
      if (work == DType::F32) {
        reinterpret_cast<float*>(param)[i] = master[i];
      } else {
        reinterpret_cast<u16*>(param)[i] =
            work == DType::BF16 ? std::bit_cast<u16>(to_bf16(master[i])) : std::bit_cast<u16>(to_f16(master[i]));
      }
    }
  }

  Generation& generation_;
  const i64 rank_;
  const std::function<void()>& after_read_;
  std::map<i64, std::vector<Part>> parts_;
  PerState<std::vector<char>> memory_;
};

}  // namespace

std::string states_directory(const std::string& directory, const std::string& id) {
  const std::string link = fmt::format("{}/{}/states", directory, id);
  std::error_code error;
  const fs::path states = fs::read_symlink(link, error);
  DS_CHECK(!error, Errc::Corrupt, "{}: {}", link, error.message());
  return states.parent_path() == fs::path(directory) / id ? "" : states.parent_path().string();
}

void remove_leftovers(const std::string& directory, const std::string& current) {
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename();
    if (name.starts_with(kStep)) remove_step(entry.path());
    if (!is_generation_id(name) || name == current || !fs::is_directory(entry.symlink_status())) continue;
    Generation::remove(directory, name);
  }
}

// The link first, so that no step is on a disk that nothing names.
StepPlace make_step_place(const std::string& directory, const std::string& path, const std::string& server) {
  const std::string id = random_hex64();
  StepPlace place{.entry = fmt::format("{}/{}{}", directory, kStep, id), .path = {}};
  place.path =
      path.empty() ? place.entry : fmt::format("{}/{}", path, disk_name(server, fmt::format("{}{}", kStep, id)));
  std::error_code error;
  if (!path.empty()) fs::create_symlink(place.path, place.entry, error);
  DS_CHECK(!error, Errc::Io, "cannot make {}: {}", place.entry, error.message());
  if (::mkdir(place.path.c_str(), 0700) == 0) return place;
  const std::string why = system_reason(errno);
  fs::remove(place.entry, error);
  throw Error(Errc::Io, fmt::format("cannot make {}: {}", place.path, why));
}

void remove_step(const std::string& entry) {
  remove_from_disk(entry, fs::path(entry).filename().string().substr(kStep.size()));
  std::error_code error;
  fs::remove_all(entry, error);
  DS_CHECK(!error, Errc::Io, "cannot remove {}: {}", entry, error.message());
}

std::vector<std::string> states_of_others(const std::string& path, const std::string& server, const std::string& id) {
  std::vector<std::string> others;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(path, error)) {
    const std::optional<DiskName> name = parse_disk_name(entry.path().filename().string(), server);
    struct stat st {};
    if (!name || name->id == id || ::lstat(entry.path().c_str(), &st) != 0) continue;
    const passwd* const user = ::getpwuid(st.st_uid);
    others.push_back(fmt::format("{} (user {}{}{})", entry.path().string(),
                                 user != nullptr ? user->pw_name : std::to_string(st.st_uid),
                                 name->host.empty() ? "" : ", host ", name->host));
  }
  std::ranges::sort(others);
  return others;
}

void write_run(const Generation& g, const RunTexts& texts) {
  offload::Packer out;
  out.put(texts.meta);
  out.put(texts.params);
  out.put(texts.pieces);
  write_sealed(g.file("run"), out.text());
}

RunTexts read_run(const Generation& g) {
  RunTexts texts;
  parse_file(g.file("run"), [&](offload::Unpacker& in) {
    in.get(texts.meta);
    in.get(texts.params);
    in.get(texts.pieces);
  });
  return texts;
}

std::string write_checkpoint(Generation& g, const std::string& dir, const std::function<void()>& after_read) {
  const std::string path = g.file("run");
  const RunTexts texts = read_run(g);
  DS_CHECK(texts.pieces.size() == g.ranks().size(), Errc::Corrupt, "{} and {} belong to different numbers of ranks",
           path, g.file("layout"));
  CheckpointMeta meta = parse_meta(texts.meta, path);
  const offload::ServedRecord& r = g.header().record;
  meta.step = r.step;
  meta.optimizer_step = r.optimizer_step;
  meta.skipped_steps = r.skipped_steps;
  meta.consumed_samples = r.consumed_samples;
  meta.loss_scaler = {r.scale, r.scaler_iteration, r.last_overflow, r.hysteresis};
  meta.world_size = 1;
  meta.mesh = MeshShape{};
  meta.zero_stage = 0;
  meta.layout_id = "server";
  std::vector<std::unique_ptr<PieceReader>> readers;
  std::vector<FileRecord> records;
  for (const std::string& text : texts.pieces) records.push_back(parse_file_record(text));
  std::vector<StatePiece> pieces;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    readers.push_back(std::make_unique<PieceReader>(g, static_cast<i64>(rank), after_read));
    for (const PieceRecord& p : records[rank].pieces) pieces.push_back(readers.back()->describe(p, meta.work_dtype));
  }
  std::ranges::stable_sort(pieces, {}, &StatePiece::param);
  const std::unique_ptr<Communicator> self = make_self_communicator({});
  return save_checkpoint(dir, meta, parse_params(texts.params, path), pieces, *self);
}

namespace {

// The directory of a server that somebody wants to look at. While it lives, nothing changes: its server waits, and
// where there is none, none comes.
class Look {
 public:
  // problems: gets why a step that was decided cannot be done; null: that is thrown.
  explicit Look(const std::string& name, std::vector<std::string>* problems = nullptr) : place_(name) {
    std::error_code ignored;
    DS_CHECK(fs::exists(place_.directory, ignored), Errc::Unavailable,
             "there is no server '{}', and no states of an ended one", name);
    offload::check_private(ServerPlace::root());
    offload::check_private(place_.directory);
    server_ = Connection::find(place_);
    if (server_) {
      server_->limit_waiting(kPatience);
      server_->send(Message::Hold, {});
      DS_CHECK(server_->receive().kind == Message::Done, Errc::Unavailable,
               "the server '{}' does not let its states be read", name);
    } else {
      lock_ = DirectoryLock::take(place_.directory);
      DS_CHECK(lock_.has_value(), Errc::Unavailable,
               "the server '{}' is starting or ending, or another tool reads its states", name);
    }
    const std::string id = current_generation(place_.directory);
    DS_CHECK(!id.empty(), Errc::Unavailable, "the server '{}' has no states yet", name);
    generation_ = std::make_unique<Generation>(place_.directory, id, Generation::Options{});
    if (server_) return;
    const std::unique_ptr<Device> device = make_cpu_device(probe::cpu_backend(), probe::num_cores());
    try {
      recover(*generation_, *device);
    } catch (const Error& e) {
      if (problems == nullptr || e.code() != Errc::Corrupt) throw;
      problems->push_back(fmt::format("the last step was committed, but cannot be completed: {}", e.what()));
    }
  }
  Look(const Look&) = delete;
  Generation& generation() noexcept { return *generation_; }
  // Confirms that all data read so far is of one step. Throws Errc::Comm if the server has ended.
  void check() const {
    DS_CHECK(!server_ || !server_->has_ended(), Errc::Comm,
             "the server '{}' has ended meanwhile: the data that was read may be of two steps", place_.name);
  }

 private:
  static constexpr int kPatience = 600;  // seconds: it may be at a long step
  const ServerPlace place_;
  std::optional<Connection> server_;
  std::optional<DirectoryLock> lock_;
  std::unique_ptr<Generation> generation_;
};

}  // namespace

offload::ServerInfo look_at(const std::string& name) {
  constexpr int kPatience = 3;  // seconds
  offload::ServerInfo info{.name = name};
  try {
    const ServerPlace place(name);
    offload::check_private(place.directory);
    if (const std::optional<Connection> c = Connection::find(place)) {
      try {
        c->limit_waiting(kPatience);
        c->send(Message::Status, {});
        const auto j = nlohmann::json::parse(c->receive().payload);
        info.pid = j.at("pid").get<int>();
        info.ranks = j.at("ranks").get<i64>();
        info.runs = true;
      } catch (const Error& e) {  // Errc::Comm: it has ended meanwhile
        if (e.code() != Errc::Comm) throw;
      }
    }
    const std::string id = current_generation(place.directory);
    if (id.empty()) return info;
    info.path = states_directory(place.directory, id);
    const Slots slots = Slots::open(fmt::format("{}/{}/table", place.directory, id));
    info.step = slots.header().record.step;
    info.bytes = slots.header().slots * slots.header().slot_bytes;
  } catch (const Error& e) {
    info.runs = e.code() == Errc::Timeout;
    info.problem = e.what();
  }
  return info;
}

}  // namespace ds::serve

namespace ds::offload {

namespace fs = std::filesystem;

void serve(const ServeOptions& options, const std::function<void(const std::string&)>& event,
           const std::function<bool()>& stop) {
  serve::Server server(options, event);
  server.run(stop);
}

std::vector<ServerInfo> list_servers() {
  std::vector<ServerInfo> all;
  std::error_code error;
  if (!fs::exists(ServerPlace::root(), error)) return all;
  check_private(ServerPlace::root());
  std::vector<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(ServerPlace::root()))
    names.push_back(entry.path().filename());
  std::ranges::sort(names);
  for (const std::string& name : names) all.push_back(serve::look_at(name));
  return all;
}

void remove_server(const std::string& name) {
  const ServerPlace place(name);
  std::error_code error;
  DS_CHECK(fs::exists(place.directory, error), Errc::Unavailable,
           "there is no server '{}', and no states of an ended one", name);
  check_private(ServerPlace::root());
  check_private(place.directory);
  constexpr int kPatience = 10;  // seconds
  if (const std::optional<Connection> c = Connection::find(place)) {
    try {
      c->limit_waiting(kPatience);
      c->send(Message::Stop, {});
      const Connection::Received r = c->receive();
      if (r.kind == Message::Failed) {
        Unpacker in(r.payload);
        const Errc code = in.get<Errc>();
        throw Error(code, fmt::format("the server '{}': {}", name, in.get<std::string>()));
      }
    } catch (const Error& e) {  // Errc::Comm: it has ended meanwhile
      if (e.code() != Errc::Comm) throw;
    }
  }
  // A lock that is a link, a directory or a pipe was never a server's. What a link leads to stays.
  const std::string lock_name = place.directory + "/lock";
  if (const fs::file_status lock = fs::symlink_status(lock_name, error);
      fs::exists(lock) && !fs::is_regular_file(lock)) {
    fs::remove(lock_name, error);
    DS_CHECK(!error, Errc::Io, "{} is not a server's lock, and cannot be removed: {}; remove it, then try again",
             lock_name, error.message());
  }
  std::optional<serve::DirectoryLock> lock;
  for (int tries = 0; tries < kPatience * 100 && fs::exists(place.directory, error); ++tries) {
    if ((lock = serve::DirectoryLock::take(place.directory))) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (!lock) {
    DS_CHECK(!fs::exists(place.directory, error), Errc::Unavailable,
             "the server '{}' does not end, or a tool reads its states", name);
    return;
  }
  serve::remove_leftovers(place.directory, "");
  fs::remove_all(place.directory, error);
  DS_CHECK(!error, Errc::Io, "cannot remove {}: {}", place.directory, error.message());
  ::rmdir(ServerPlace::root().c_str());  // if it was the last
}

std::string dump_server(const std::string& name, const std::string& dir) {
  serve::Look look(name);
  std::error_code error;
  const bool is_new = fs::create_directories(dir, error);
  DS_CHECK(fs::is_directory(dir, error), Errc::Config, "{}: is not a directory, and cannot be created", dir);
  try {
    const RunLock lock(dir);  // a run that is at work there has unfinished steps, which are not leftovers
    return serve::write_checkpoint(look.generation(), dir, [&] { look.check(); });
  } catch (...) {
    if (is_new) ::rmdir(dir.c_str());
    throw;
  }
}

std::vector<std::string> verify_server(const std::string& name) {
  std::vector<std::string> problems;
  serve::Look look(name, &problems);
  serve::Generation& g = look.generation();
  (void)serve::read_run(g);
  for (size_t r = 0; r < g.ranks().size(); ++r) {
    const serve::RankLayout& rank = g.ranks()[r];
    for (size_t s = 0; s < rank.sets.size(); ++s) {
      i64 damaged = -1;  // parts of a chunk follow each other
      for (const ServedPart& p : rank.sets[s].parts) {
        const i64 chunk = g.chunk(static_cast<i64>(r), static_cast<i64>(s), p.chunk);
        if (chunk == damaged) continue;
        const char* bytes = nullptr;
        try {
          bytes = g.memory().take(chunk, false);
        } catch (const Error& e) {
          if (e.code() != Errc::Corrupt) throw;
          problems.push_back(fmt::format("rank {}: {}", r, e.what()));
          damaged = chunk;
          continue;
        }
        for (const State state : kStates) {
          if (p.dtypes[state] < 0) continue;
          const auto dtype = static_cast<DType>(p.dtypes[state]);
          i64 bad = 0;
          const auto* const scales = reinterpret_cast<const float*>(bytes + p.scales[state]);
          const auto* const values = reinterpret_cast<const float*>(bytes + p.offsets[state]);
          if (is_coded(dtype)) {
            for (i64 i = 0; i < state_blocks(p.count); ++i) bad += std::isfinite(scales[i]) ? 0 : 1;
          } else if (dtype == DType::F32) {
            for (i64 i = 0; i < p.count; ++i) bad += std::isfinite(values[i]) ? 0 : 1;
          }
          if (bad > 0)
            problems.push_back(fmt::format("rank {}: {} values of {} of parameter {} are not finite", r, bad,
                                           state_name(state), p.param));
        }
        g.memory().give_back(chunk, false);
      }
    }
  }
  look.check();
  return problems;
}

}  // namespace ds::offload
