// SPDX-License-Identifier: Apache-2.0
// mpi: the ranks of MPI_COMM_WORLD. An exchange first swaps CallInfos, so that a mismatched call or an absent rank can
// be named, and then slices by Isend and Irecv; folds are local, in rank order (MPI's own reductions promise no order
// and are slower). Three MPI communicators separate kinds of messages: calls and slices, point to point, control.
// Groups use those of their world with their own message tags: creating a group needs no collective call of MPI, which
// might wait forever for a dead rank, and destroying one needs no call at all. The progress thread, the sender and
// aborting threads call MPI: THREAD_MULTIPLE. Waits poll with a back-off, since only polling can check the clock and
// control messages.

#include <dlfcn.h>
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "base/limits.h"
#include "base/thread.h"
#include "base/variables.h"
#include "comm/async_communicator.h"
#include "comm/ended_ranks.h"
#include "comm/make_communicator.h"
#include "comm/polling.h"
#include "comm/staging_size.h"

namespace ds {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr i64 kMaxMessage = i64{1} << 30;  // MPI counts in int
constexpr int kYields = 200;
constexpr auto kShortSleep = 20us;
constexpr auto kLongSleep = 500us;
constexpr auto kHealthPeriod = 250ms;
constexpr auto kUnderWay = 500ms;  // for messages in flight from a peer that has left
constexpr auto kGrace = 2s;        // for peers to arrive and leave together after a failure

enum MessageTag : int { kCall = 1, kSlice = 2, kLength = 3, kPayload = 4, kControl = 5, kAttach = 6 };
constexpr int kTagsPerGroup = 8;

struct ControlMessage {
  enum Kind : u32 { Goodbye, Failed };
  Kind kind;
  i32 group;  // the group that the sender leaves; 0: the world
  Errc code;
  i32 rank;
  std::array<char, 1000> text;
};

void check(int rc, std::string_view call) {
  if (rc == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(rc, text.data(), &length);
  throw Error(Errc::Comm, fmt::format("{}: {}", call, text.data()));
}

// An Open MPI bundled with libds (scripts/bundle) finds its files through environment variables. A file beside
// libmpi.so lists the names and the paths, relative to the parent folder. The bundle's mpirun sets them; this is for
// ranks that were started in another way.
void find_bundled_open_mpi() {
  Dl_info info{};
  if (variables::open_mpi_has_its_prefix() || dladdr(reinterpret_cast<void*>(&MPI_Init_thread), &info) == 0) return;
  std::error_code error;
  const std::filesystem::path lib = std::filesystem::weakly_canonical(info.dli_fname, error).parent_path();
  std::ifstream list(lib / "openmpi.env");
  for (std::string name, path; std::getline(list, name, '=') && std::getline(list, path);)
    ::setenv(name.c_str(), (lib.parent_path() / path).c_str(), 1);
}

// MPI in this process: the first communicator initialises it if necessary; the last one then finalises it.
class Environment {
 public:
  static void enter(double timeout_s) {
    const std::lock_guard lock(mutex());
    int finalised = 0, initialised = 0, level = 0;
    MPI_Finalized(&finalised);
    DS_CHECK(!finalised, Errc::Unavailable, "MPI has been finalised in this process and cannot start again");
    MPI_Initialized(&initialised);
    if (initialised) {
      MPI_Query_thread(&level);
    } else {
      find_bundled_open_mpi();
      // A process forked to read an untrusted file (formats/confined.h) touches none of MPI's memory.
      ::setenv("OMPI_MCA_mpi_warn_on_fork", "0", 0);
      // A process without a launcher needs neither Open MPI's daemon nor its folder in TMPDIR, both of which would
      // remain if it is killed.
      if (!variables::mpi_has_launcher()) {
        ::setenv("OMPI_MCA_ess_singleton_isolated", "1", 0);
        ::setenv("OMPI_MCA_orte_create_session_dirs", "0", 0);
      }
      // Over TCP without "put": with it, a receiver requests each large message only after everything that it is
      // sending itself, so the two directions of a link take turns.
      ::setenv("OMPI_MCA_btl_tcp_flags", "send,inplace,need-ack,need-csum,hetero-rdma", 0);
      // With less than this, MPI_Init or MPI_Comm_dup ends the process or waits forever, without a helpful message:
      // segments of 4 MiB with a page before them; three threads for each rank; address space for 75 MB with two ranks
      // on a node, 4.2 MB for each further rank, and the 128 MiB that malloc reserves for threads. All ranks of a node
      // may check for threads before any has started its own, so the first one checks for all; if each did, the square
      // of their number would start for a moment. For data, up to 7.2 MiB was measured, besides the stacks of its
      // threads.
      const bool first_here = variables::mpi_local_rank(0) == 0;
      const int ranks_here = std::clamp(variables::mpi_local_size(1), 1, 4096);
      require_limit(RLIMIT_AS, address_space_bytes() + (u64{200} << 20) + (u64{5} << 20) * static_cast<u64>(ranks_here),
                    "MPI");
      require_limit(RLIMIT_DATA, data_bytes() + (u64{8} << 20) + 3 * thread_stack_bytes(), "MPI");
      require_limit(RLIMIT_FSIZE, (4 << 20) + (4 << 10), "MPI");
      require_tasks(3 * (first_here ? ranks_here : 1), "MPI");
      level = init(timeout_s);
      ours() = true;
    }
    DS_CHECK(level >= MPI_THREAD_MULTIPLE, Errc::Unavailable, "this MPI does not support MPI_THREAD_MULTIPLE");
    ++users();
  }
  // clean: all ranks are about to leave, so MPI_Finalize, which waits for all, returns.
  static void leave(bool clean) noexcept {
    const std::lock_guard lock(mutex());
    if (!clean) ours() = false;
    if (--users() == 0 && ours()) MPI_Finalize();
  }

 private:
  // MPI_Init waits for all ranks, without a limit. Another thread therefore calls it, and is abandoned if a rank never
  // arrives.
  static int init(double timeout_s) {
    struct Done {
      std::mutex mutex;
      std::condition_variable changed;
      bool is = false;
      int rc = MPI_SUCCESS, level = 0;
    };
    const auto done = std::make_shared<Done>();
    start_thread("MPI", [done] {
      int level = 0;
      const int rc = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
      const std::lock_guard lock(done->mutex);
      done->is = true;
      done->rc = rc;
      done->level = level;
      done->changed.notify_one();
    }).detach();
    const std::string job = variables::job(), segment = job.empty() ? "" : std::string(kJobPrefix) + job;
    const int size = variables::mpi_world_size(0);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
    std::unique_lock lock(done->mutex);
    while (!done->changed.wait_for(lock, std::chrono::milliseconds(250), [&] { return done->is; })) {
      for (int r = 0; r < size && !segment.empty(); ++r) {
        if (rank_has_ended(segment, r))
          throw Error(Errc::Comm, fmt::format("rank {} ended before it reached MPI_Init", r), r);
      }
      DS_CHECK(std::chrono::steady_clock::now() < deadline, Errc::Timeout,
               "MPI did not start within {} s: some rank has not arrived", timeout_s);
    }
    check(done->rc, "MPI_Init_thread");
    return done->level;
  }

  static std::mutex& mutex() {
    static std::mutex m;
    return m;
  }
  static int& users() {
    static int n = 0;
    return n;
  }
  static bool& ours() {
    static bool b = false;
    return b;
  }
};

int rank_in_mpi() {
  int r = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &r);
  return r;
}

int ranks_of_mpi() {
  int n = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &n);
  return n;
}

// Members of a group exchange this before they use it.
struct GroupProposal {
  i32 id = 0;    // the smallest that this rank has not used
  u64 hash = 0;  // hash of the members
  std::array<char, 40> name{};
};

class MpiCommunicator final : public AsyncCommunicator {
 public:
  explicit MpiCommunicator(const CommOptions& options)
      : AsyncCommunicator("mpi", rank_in_mpi(), ranks_of_mpi(), options, {}),
        ground_(*this),
        id_(0),
        sources_(static_cast<size_t>(size())) {
    for (MPI_Comm* c : {&slices_, &letters_, &control_}) {
      check(MPI_Comm_dup(MPI_COMM_WORLD, c), "MPI_Comm_dup");
      check(MPI_Comm_set_errhandler(*c, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    }
    listen();
  }

  MpiCommunicator(int rank, const CommOptions& options, Membership membership, MpiCommunicator& ground, int id)
      : AsyncCommunicator("mpi", rank, static_cast<int>(membership.ranks.size()), options, membership),
        ground_(ground),
        id_(id),
        slices_(ground.slices_),
        letters_(ground.letters_),
        sources_(static_cast<size_t>(size())) {}

  ~MpiCommunicator() override {
    shut_down();
    if (&ground_ != this) {
      ground_.say_goodbye_to(*this);
      return;
    }
    const bool clean = say_goodbye();
    if (listening_ != MPI_REQUEST_NULL) {
      MPI_Cancel(&listening_);
      MPI_Wait(&listening_, MPI_STATUS_IGNORE);
    }
    if (clean) {
      for (MPI_Comm* c : {&slices_, &letters_, &control_}) MPI_Comm_free(c);
    }
    Environment::leave(clean);
  }

  i64 staging_bytes() const noexcept override {
    return AsyncCommunicator::staging_bytes() + narrow<i64>(staging_.size());
  }
  bool has_left(int peer) const override {
    const std::lock_guard lock(ground_.mutex_);
    return ground_.departed_.contains({id_, world_rank(peer)});
  }

 private:
  int tag(MessageTag kind) const noexcept { return id_ * kTagsPerGroup + kind; }

  // The requests of one lane, with the peer of each for error messages.
  struct Requests {
    std::vector<MPI_Request> requests;
    std::vector<int> peers;
    std::vector<int> indices;  // of MPI_Testsome
    Yields yields;
    MPI_Request* add(int peer) {
      peers.push_back(peer);
      return &requests.emplace_back(MPI_REQUEST_NULL);
    }
    void clear() {
      requests.clear();
      peers.clear();
    }
  };

  void exchange(const Operation& op, const Exchange& x, FunctionRef<void(const SliceRange&)> consume) override {
    agree(op);
    const i64 length = x.length();
    const i64 round = x.lands ? kMaxMessage : mpi_fold_round(size());
    const i64 stride = std::min(length, round);
    if (!x.lands && x.to(rank())) staging_.resize(std::max(staging_.size(), static_cast<size_t>(size() * stride)));

    for (i64 begin = 0; begin < length; begin += round) {
      const i64 count = std::min(round, length - begin);
      const auto place = [&](const OpSegment& s, int from, i64 offset, i64 position) -> std::byte* {
        return x.lands ? x.landing(s, from) + offset : staging_.data() + from * stride + position;
      };
      requests_.clear();
      for (int step = 1; step < size(); ++step) {
        const int from = (rank() - step + size()) % size(), to = (rank() + step) % size();
        for_each_part(x.segments, begin, count, [&](const OpSegment& s, i64 offset, i64 bytes, i64 position) {
          if (x.from(from) && x.to(rank())) {
            check(MPI_Irecv(place(s, from, offset, position), narrow<int>(bytes), MPI_BYTE, world_rank(from),
                            tag(kSlice), slices_, requests_.add(from)),
                  "MPI_Irecv");
          }
          if (x.from(rank()) && x.to(to)) {
            check(MPI_Isend(x.slice(s, to) + offset, narrow<int>(bytes), MPI_BYTE, world_rank(to), tag(kSlice), slices_,
                            requests_.add(to)),
                  "MPI_Isend");
          }
        });
      }
      finish(requests_, op);
      if (!x.to(rank())) continue;
      for_each_part(x.segments, begin, count, [&](const OpSegment& s, i64 offset, i64 bytes, i64 position) {
        for (int q = 0; q < size(); ++q) {
          sources_[q] = !x.from(q)    ? nullptr
                        : q == rank() ? x.slice(s, rank()) + offset
                                      : place(s, q, offset, position);
        }
        consume({.segment = &s, .offset = offset, .bytes = bytes, .sources = sources_});
      });
    }
  }

  // Swaps CallInfos; afterwards all ranks are known to be in this call.
  void agree(const Operation& op) {
    throw_if_reported();
    calls_now_.resize(size());
    calls_now_[rank()] = call_info(op, calls_++);
    requests_.clear();
    for (int q = 0; q < size(); ++q) {
      if (q == rank()) continue;
      check(MPI_Irecv(&calls_now_[q], sizeof(CallInfo), MPI_BYTE, world_rank(q), tag(kCall), slices_, requests_.add(q)),
            "MPI_Irecv");
      check(MPI_Isend(&calls_now_[rank()], sizeof(CallInfo), MPI_BYTE, world_rank(q), tag(kCall), slices_,
                      requests_.add(q)),
            "MPI_Isend");
    }
    finish(requests_, op);
    compare_calls(op, [this](int q) -> const CallInfo& { return calls_now_[q]; });
  }

  void all_to_allv_now(const Operation& op) override {
    agree(op);
    requests_.clear();
    for (int step = 1; step < size(); ++step) {
      const int from = (rank() - step + size()) % size(), to = (rank() + step) % size();
      const std::span<std::byte> in = op.in[from];
      const std::span<const std::byte> out = op.out[to];
      for (i64 done = 0; done < std::ssize(in); done += kMaxMessage) {
        check(MPI_Irecv(in.data() + done, narrow<int>(std::min(kMaxMessage, std::ssize(in) - done)), MPI_BYTE,
                        world_rank(from), tag(kSlice), slices_, requests_.add(from)),
              "MPI_Irecv");
      }
      for (i64 done = 0; done < std::ssize(out); done += kMaxMessage) {
        check(MPI_Isend(out.data() + done, narrow<int>(std::min(kMaxMessage, std::ssize(out) - done)), MPI_BYTE,
                        world_rank(to), tag(kSlice), slices_, requests_.add(to)),
              "MPI_Isend");
      }
    }
    copy_own(op);
    finish(requests_, op);
  }

  void transmit(const Operation& op, int to) override {
    i64 bytes = op.slice_bytes();
    letters_out_.clear();
    check(MPI_Isend(&bytes, sizeof bytes, MPI_BYTE, world_rank(to), tag(kLength), letters_, letters_out_.add(to)),
          "MPI_Isend");
    for (i64 done = 0; done < bytes; done += kMaxMessage) {
      check(MPI_Isend(op.segments[0].source + done, narrow<int>(std::min(kMaxMessage, bytes - done)), MPI_BYTE,
                      world_rank(to), tag(kPayload), letters_, letters_out_.add(to)),
            "MPI_Isend");
    }
    finish(letters_out_, op);
  }

  void receive(const Operation& op, int from) override {
    i64 sent = 0;
    const i64 expected = op.slice_bytes();
    requests_.clear();
    check(MPI_Irecv(&sent, sizeof sent, MPI_BYTE, world_rank(from), tag(kLength), letters_, requests_.add(from)),
          "MPI_Irecv");
    finish(requests_, op);
    if (sent != expected) {
      fail(Errc::Comm, world_rank(from),
           fmt::format("rank {} sends {} bytes where rank {} receives {} in \"{}\"", world_rank(from), sent,
                       own_number(), expected, op.tag));
    }
    requests_.clear();
    for (i64 done = 0; done < sent; done += kMaxMessage) {
      check(MPI_Irecv(op.segments[0].target + done, narrow<int>(std::min(kMaxMessage, sent - done)), MPI_BYTE,
                      world_rank(from), tag(kPayload), letters_, requests_.add(from)),
            "MPI_Irecv");
    }
    finish(requests_, op);
  }

  Buffer allocate_shared(MemoryLedger& ledger, Tag tag, i64 bytes) override { return Buffer(ledger, tag, bytes); }

  // Waits for all; on failure cancels what it can and abandons the rest.
  void finish(Requests& r, const Operation& op) { finish(r, op, timeout_s()); }
  void finish(Requests& r, const Operation& op, double timeout_s) {
    try {
      wait(r, op, timeout_s);
    } catch (const Error&) {
      for (MPI_Request& request : r.requests) {
        if (request != MPI_REQUEST_NULL) MPI_Cancel(&request);
      }
      // Messages that have been matched still arrive after their receiver has failed; their memory is freed only
      // afterwards.
      const auto deadline = Clock::now() + kGrace;
      for (int all = 0; !all && Clock::now() < deadline; std::this_thread::sleep_for(kShortSleep))
        MPI_Testall(static_cast<int>(r.requests.size()), r.requests.data(), &all, MPI_STATUSES_IGNORE);
      for (MPI_Request& request : r.requests) {
        if (request != MPI_REQUEST_NULL) MPI_Request_free(&request);
      }
      throw;
    }
  }

  void wait(Requests& r, const Operation& op, double timeout_s) {
    struct Told {
      ~Told() {
        if (communicator != nullptr) communicator->tell_wait(-1);
      }
      MpiCommunicator* communicator = nullptr;
    } told;
    const auto start = Clock::now();
    const auto limit = std::chrono::duration<double>(timeout_s);
    auto next_health_check = start + kHealthPeriod;
    std::optional<Clock::time_point> left;
    bool looked_again = false;
    size_t pending = r.requests.size();
    r.indices.resize(pending);
    for (int round = 0; pending > 0; ++round) {
      int completed = 0;
      check(MPI_Testsome(static_cast<int>(r.requests.size()), r.requests.data(), &completed, r.indices.data(),
                         MPI_STATUSES_IGNORE),
            "MPI_Testsome");
      pending -= static_cast<size_t>(completed);
      if (pending == 0) return;
      if (completed > 0) {
        round = 0;
        looked_again = false;
      }
      if (round < kYields && r.yields.once()) continue;
      throw_if_reported();
      const int peer = r.peers[std::find_if(r.requests.begin(), r.requests.end(),
                                            [](MPI_Request q) { return q != MPI_REQUEST_NULL; }) -
                               r.requests.begin()];
      told.communicator = this;
      tell_wait(world_rank(peer));
      const auto now = Clock::now();
      if (now >= next_health_check) {
        throw_if_peer_failed();
        next_health_check = now + kHealthPeriod;
      }
      if (has_left(peer)) {
        if (!left) left = now;
        if (now - *left > kUnderWay) {
          fail(Errc::Comm, world_rank(peer),
               fmt::format("rank {} has left while rank {} is in {} \"{}\"{}", world_rank(peer), own_number(),
                           op_name(op.kind), op.tag, of_group()));
        }
      }
      if (now - start > limit) {
        // This rank may itself have been stopped or not scheduled, so first receive what has arrived since.
        if (!std::exchange(looked_again, true)) {
          round = 0;
          continue;
        }
        fail(Errc::Timeout, world_rank(peer),
             fmt::format("rank {} did not arrive within {} s: rank {} is in {} \"{}\" (call {}){}", world_rank(peer),
                         timeout_s, own_number(), op_name(op.kind), op.tag, calls_.load(), of_group()));
      }
      std::this_thread::sleep_for(now - start < 20ms ? kShortSleep : kLongSleep);
    }
  }

  void listen() {
    check(MPI_Irecv(&heard_, sizeof heard_, MPI_BYTE, MPI_ANY_SOURCE, kControl, control_, &listening_), "MPI_Irecv");
  }

  // Receives pending control messages.
  void hear() {
    const std::lock_guard lock(mutex_);
    for (int there = 1;;) {
      MPI_Status status;
      check(MPI_Test(&listening_, &there, &status), "MPI_Test");
      if (!there) return;
      if (heard_.kind == ControlMessage::Goodbye) {
        departed_.emplace(heard_.group, heard_.rank);
      } else if (!failure_) {
        failure_ = Failure{heard_.code, heard_.text.data(), heard_.rank};
      }
      listen();
    }
  }

  // MPI ends the job when a rank dies.
  void look_at_peers() override { look_for_reports(); }

  void look_for_reports() override {
    hear();
    if (const auto failure = known_failure()) throw Error(failure->code, failure->message, failure->rank);
  }

  // Sends to all peers in `members`; returns when MPI has taken the messages over, or after a while.
  void tell(const ControlMessage& message, const MpiCommunicator& members) noexcept {
    told_ = message;
    std::vector<MPI_Request> requests(static_cast<size_t>(members.size()), MPI_REQUEST_NULL);
    for (int q = 0; q < members.size(); ++q) {
      if (q == members.rank()) continue;
      MPI_Isend(&told_, sizeof told_, MPI_BYTE, members.world_rank(q), kControl, control_, &requests[q]);
    }
    const auto deadline = Clock::now() + kGrace;
    for (int all = 0; !all && Clock::now() < deadline; std::this_thread::yield())
      MPI_Testall(members.size(), requests.data(), &all, MPI_STATUSES_IGNORE);
  }

  std::optional<Failure> known_failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

  Failure publish(Failure failure) noexcept override {
    const std::lock_guard lock(mutex_);
    if (failure_) return *failure_;
    failure_ = failure;
    ControlMessage message{
        .kind = ControlMessage::Failed, .group = 0, .code = failure.code, .rank = failure.rank, .text = {}};
    failure.message.copy(message.text.data(), message.text.size() - 1);
    tell(message, *this);
    return failure;
  }

  // Informs the peers in a communicator of this world that this rank leaves it. They may continue without it.
  void say_goodbye_to(const MpiCommunicator& members) noexcept {
    const std::lock_guard lock(mutex_);
    if (!failure_)
      tell({.kind = ControlMessage::Goodbye, .group = members.id_, .code = {}, .rank = rank(), .text = {}}, members);
  }

  // The members agree on an id that none of them has used, so any two groups with two common ranks have different
  // message tags.
  std::unique_ptr<AsyncCommunicator> make_group(int rank, Membership membership, const CommOptions& options) override {
    GroupProposal own{.id = next_id_, .hash = 14695981039346656037u};
    for (const int member : membership.ranks) own.hash = (own.hash ^ static_cast<u64>(member)) * 1099511628211u;
    membership.name.copy(own.name.data(), own.name.size() - 1);
    Operation attach{.kind = OpKind::Attach};
    attach.tag = membership.name;
    std::vector<GroupProposal> proposals(membership.ranks.size());
    Requests requests;
    for (size_t i = 0; i < proposals.size(); ++i) {
      const int q = membership.ranks[i];
      if (q == this->rank()) continue;
      check(MPI_Irecv(&proposals[i], sizeof own, MPI_BYTE, q, kAttach, slices_, requests.add(q)), "MPI_Irecv");
      check(MPI_Isend(&own, sizeof own, MPI_BYTE, q, kAttach, slices_, requests.add(q)), "MPI_Isend");
    }
    finish(requests, attach, options.timeout_s);
    int id = own.id;
    for (size_t i = 0; i < proposals.size(); ++i) {
      const int q = membership.ranks[i];
      if (q == this->rank()) continue;
      const GroupProposal& other = proposals[i];
      if (other.hash != own.hash || other.name != own.name) {
        fail(Errc::Comm, q,
             fmt::format("groups do not match: rank {} makes group \"{}\", rank {} makes group \"{}\"{}", this->rank(),
                         own.name.data(), q, other.name.data(), other.name == own.name ? " with other members" : ""));
      }
      id = std::max(id, other.id);
    }
    void* largest_tag = nullptr;
    int known = 0;
    check(MPI_Comm_get_attr(slices_, MPI_TAG_UB, static_cast<void*>(&largest_tag), &known), "MPI_Comm_get_attr");
    DS_CHECK(known && id < *static_cast<int*>(largest_tag) / kTagsPerGroup, Errc::Comm,
             "this MPI has no message tags left for group \"{}\"", membership.name);
    next_id_ = id + 1;
    return std::make_unique<MpiCommunicator>(rank, options, std::move(membership), *this, id);
  }

  // Leaves together with the peers, also after a failure, so that each can report its error before the first exit ends
  // the job. False: a rank failed or does not arrive; then MPI_Finalize, which waits for all, must not be called.
  bool say_goodbye() noexcept {
    say_goodbye_to(*this);
    MPI_Request all_here = MPI_REQUEST_NULL;
    if (MPI_Ibarrier(control_, &all_here) != MPI_SUCCESS) return false;
    const auto start = Clock::now();
    const auto limit = std::chrono::duration<double>(timeout_s());
    std::optional<Clock::time_point> failed;
    for (;;) {
      int done = 0;
      if (MPI_Test(&all_here, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return false;
      if (done) return !known_failure();
      try {
        hear();
      } catch (const Error&) {
        return false;
      }
      const auto now = Clock::now();
      if (!failed && known_failure()) failed = now;
      if (now - start > limit || (failed && now - *failed > kGrace)) return false;
      std::this_thread::sleep_for(kLongSleep);
    }
  }

  MpiCommunicator& ground_;  // the world, possibly this one
  const int id_;             // 0: the world
  int next_id_ = 1;          // of a world
  MPI_Comm slices_ = MPI_COMM_NULL, letters_ = MPI_COMM_NULL, control_ = MPI_COMM_NULL;
  Requests requests_;     // of the progress thread
  Requests letters_out_;  // of the sender
  std::atomic<u64> calls_{0};
  std::vector<CallInfo> calls_now_;
  std::vector<const std::byte*> sources_;
  std::vector<std::byte> staging_;

  mutable std::mutex mutex_;  // of control messages
  ControlMessage heard_{}, told_{};
  MPI_Request listening_ = MPI_REQUEST_NULL;
  std::optional<Failure> failure_;
  std::set<std::pair<int, int>> departed_;  // (group, rank in the world)
};

}  // namespace

std::unique_ptr<AsyncCommunicator> make_mpi_world(const CommOptions& options) {
  Environment::enter(options.timeout_s);
  try {
    return std::make_unique<MpiCommunicator>(options);
  } catch (...) {
    Environment::leave(false);
    throw;
  }
}

std::unique_ptr<Communicator> make_mpi_communicator(const CommOptions& options) { return make_mpi_world(options); }

std::string mpi_library_version() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  check(MPI_Get_library_version(text.data(), &length), "MPI_Get_library_version");
  return text.data();
}

}  // namespace ds
