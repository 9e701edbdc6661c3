// SPDX-License-Identifier: Apache-2.0
// self, threads and shm: one algorithm over an arena. In an exchange every rank states its call and the place of its
// source, meets the others, and reads their slices in place. A source that peers cannot reach (or a small one, for
// which the second meeting would cost more than the copy) goes through the staging area chunk by chunk. Its two halves
// alternate, so a chunk costs one meeting: a rank that reaches meeting n has read the data staged for meeting n - 1.
// An all_to_allv does the same with a table of the places of its slices.

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/as_error.h"
#include "base/thread.h"
#include "comm/arena.h"
#include "comm/copy_bytes.h"
#include "comm/make_communicator.h"
#include "comm/polling.h"

namespace ds {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

// Smaller sources are staged; the second limit is for ranks that share cores.
constexpr i64 kDirectBytes = 32 << 10, kCrowdedDirectBytes = 256 << 10;
constexpr auto kSleep = 20ms;          // the longest futex sleep: failures are noticed this late
constexpr auto kHealthPeriod = 250ms;  // between checks of /proc for every peer
// Factor of the timeout if the rank at fault is in another communicator, whose ranks report first.
constexpr double kPatience = 1.3;
constexpr auto kQuiescence = 2s;  // after a failure: time for peers to leave our memory

i64 now_ns() { return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count(); }

class SharedCommunicator final : public AsyncCommunicator {
 public:
  // ground: the world of a group. Null for a world, for the ranks of a node as part of one, and for a group of one,
  // none of which waits elsewhere.
  SharedCommunicator(std::string_view backend, std::unique_ptr<Arena> arena, const CommOptions& options,
                     Membership membership = {}, SharedCommunicator* ground = nullptr)
      : AsyncCommunicator(backend, arena->rank(), arena->size(), options, membership),
        arena_(std::move(arena)),
        ground_(ground != nullptr ? *ground : *this),
        key_(key_of(membership)),
        wait_(ground_.take_wait()),
        crowded_(ground_.size() > static_cast<int>(std::thread::hardware_concurrency())),
        polling_{Polling(crowded_), Polling(crowded_)},
        exposures_(static_cast<size_t>(size())),
        sends_to_(static_cast<size_t>(size())),
        sources_(static_cast<size_t>(size())),
        places_(static_cast<size_t>(size())) {}

  // Meets the peers once, so that names can be removed.
  void attach() {
    {
      const Activity activity(*this, OpKind::Attach);
      attaching_ = true;
      try {
        arena_->reserve_staging();
      } catch (const Error& e) {  // ranks that wait for this one must not wait in vain
        fail(e.code(), own_number(), fmt::format("rank {}: {}", own_number(), e.what()));
      }
      meet();
      arena_->attached();
      meet();
    }
    attaching_ = false;
    calls_ = 0;  // attaching is not a call
    slot(rank()).activity.store(0, std::memory_order_relaxed);
  }

  ~SharedCommunicator() override {
    shut_down();
    RankSlot& own = slot(rank());
    own.departed.store(1, std::memory_order_release);
    wake_all(own.arrived);
    ground_.give_wait(wait_);
  }

  i64 staging_bytes() const noexcept override {
    const i64 channels = channels_.load(std::memory_order_relaxed) * static_cast<i64>(sizeof(Channel));
    return AsyncCommunicator::staging_bytes() + (size() > 1 ? 2 * Arena::kStagingHalf : 0) + channels;
  }
  bool has_left(int peer) const override { return slot(peer).departed.load(std::memory_order_acquire) != 0; }
  void show(u64 number) noexcept override { slot(rank()).shown.store(number, std::memory_order_release); }
  u64 shown(int peer) const noexcept override { return slot(peer).shown.load(std::memory_order_acquire); }

 private:
  enum Lane : size_t { kProgress, kSender };

  // Publishes what this rank is doing, for its peers' error messages.
  class Activity {
   public:
    Activity(SharedCommunicator& comm, OpKind kind) : comm_(comm) { store(static_cast<u64>(kind) + 1); }
    ~Activity() {
      ++comm_.calls_;
      store(0);
    }

   private:
    void store(u64 what) {
      comm_.slot(comm_.rank()).activity.store(comm_.calls_ << 8 | what, std::memory_order_relaxed);
    }
    SharedCommunicator& comm_;
  };

  RankSlot& slot(int rank) const noexcept { return arena_->slot(rank); }
  // Place in the ground of a world rank; those of a node are consecutive.
  int place(int number) const noexcept { return number - ground_.world_rank(0); }

  void exchange(const Operation& op, const Exchange& x, FunctionRef<void(const SliceRange&)> consume) override {
    const Activity activity(*this, op.kind);
    throw_if_reported();
    const i64 length = x.length();
    const i64 copies = x.sliced ? size() : 1;
    const i64 chunk = Arena::kStagingHalf / copies / 64 * 64;
    const u32 half = next_half();
    Exposure exposure = Exposure::None;
    if (length > 0 && x.from(rank())) exposure = expose_directly(x, copies, half) ? Exposure::Direct : Exposure::Staged;
    in_rounds(
        op, exposure, chunk, [&] { return length; },
        [&](i64 begin) { stage(x, begin, std::min(chunk, length - begin), chunk, next_half()); },
        [&](i64 begin, i64 count) {
          if (x.to(rank())) read(x, begin, count, chunk, half, consume);
        });
  }

  // A collective whose ranks have exposed their sources, or stage them chunk by chunk: stage(begin). After the first
  // meeting, the calls are compared, and length() is the number of bytes to read: read(begin, count).
  template <class Length, class Stage, class Read>
  void in_rounds(const Operation& op, Exposure exposure, i64 chunk, Length length_of, Stage stage, Read read) {
    const u32 half = next_half();
    if (exposure == Exposure::Staged) stage(0);
    RankSlot& own = slot(rank());
    own.call[half] = call_info(op, collectives_++);
    own.exposure[half] = exposure;
    try {
      meet();
      compare_calls(op, [&](int q) -> const CallInfo& { return slot(q).call[half]; });
      // Copied, because a peer that is done with its last round already writes what its next call exposes.
      for (int q = 0; q < size(); ++q) exposures_[q] = slot(q).exposure[half];
      const auto any = [&](Exposure e) {
        return std::find(exposures_.begin(), exposures_.end(), e) != exposures_.end();
      };
      const i64 length = length_of(), round = any(Exposure::Staged) ? chunk : length;
      for (i64 begin = 0; begin < length; begin += round) {
        const i64 count = std::min(round, length - begin);
        if (begin > 0) {
          if (exposure == Exposure::Staged) stage(begin);
          meet();
        }
        read(begin, count);
      }
      if (any(Exposure::Direct)) meet();
    } catch (const Error&) {
      if (exposure == Exposure::Direct) wait_for_readers();
      throw;
    }
  }

  u32 next_half() const noexcept { return (meetings_ + 1) % 2; }

  // Writes the places of our segments to our staging half; false if peers cannot reach them or they are small.
  bool expose_directly(const Exchange& x, i64 copies, u32 half) {
    if (x.length() * copies < (crowded_ ? kCrowdedDirectBytes : kDirectBytes)) return false;
    if (static_cast<i64>(x.segments.size() * sizeof(Arena::Address)) > Arena::kStagingHalf) return false;
    auto* table = reinterpret_cast<Arena::Address*>(arena_->staging(rank(), half));
    for (const OpSegment& s : x.segments) {
      const auto address = arena_->locate(s.source, (copies - 1) * s.source_stride() + s.slice_bytes);
      if (!address) return false;
      *table++ = *address;
    }
    return true;
  }

  // Copies bytes [begin, begin + count) of our slices to our staging half: slice q at q * chunk (without our own).
  void stage(const Exchange& x, i64 begin, i64 count, i64 chunk, u32 half) {
    std::byte* staging = arena_->staging(rank(), half);
    for (int q = 0; q < (x.sliced ? size() : 1); ++q) {
      if (x.sliced && q == rank()) continue;
      for_each_part(x.segments, begin, count, [&](const OpSegment& s, i64 offset, i64 bytes, i64 position) {
        copy_bytes(staging + q * chunk + position, x.slice(s, q) + offset, bytes);
      });
    }
  }

  void read(const Exchange& x, i64 begin, i64 count, i64 chunk, u32 table_half,
            FunctionRef<void(const SliceRange&)> consume) {
    const i64 slice = x.sliced ? rank() : 0;
    const u32 half = meetings_ % 2;
    const Reading reading(*this);
    for_each_part(x.segments, begin, count, [&](const OpSegment& s, i64 offset, i64 bytes, i64 position) {
      for (int q = 0; q < size(); ++q) {
        const std::byte*& source = sources_[q];
        if (!x.from(q)) {
          source = nullptr;
        } else if (q == rank()) {
          source = x.slice(s, rank()) + offset;
        } else if (exposures_[q] == Exposure::Direct) {
          const auto* table = reinterpret_cast<const Arena::Address*>(arena_->staging(q, table_half));
          source = arena_->resolve(q, table[&s - x.segments.data()]) + slice * s.source_stride() + offset;
        } else {
          source = arena_->staging(q, half) + slice * chunk + position;
        }
      }
      consume({.segment = &s, .offset = offset, .bytes = bytes, .sources = sources_});
    });
  }

  void all_to_allv_now(const Operation& op) override {
    const Activity activity(*this, op.kind);
    throw_if_reported();
    const i64 head = align_up(size() * i64{sizeof(Arena::Address)}, 64), chunk = Arena::kStagingHalf - head;
    DS_ASSERT(chunk > 0);
    const u32 half = next_half();
    in_rounds(
        op, expose_slices(op, half), chunk, [&] { return find_slices(half); },
        [&](i64 begin) { stage_slices(op, begin, chunk, arena_->staging(rank(), next_half()) + head); },
        [&](i64 begin, i64 count) { read_slices(op, begin, count, head); });
  }

  // Calls f(rank, its slice, where that begins in the row of slices) for all other ranks, from the next one on, so that
  // ranks do not all read from the same one.
  template <class F>
  void for_each_sent(const Operation& op, F&& f) const {
    i64 at = 0;
    for (int step = 1; step < size(); ++step) {
      const int q = (rank() + step) % size();
      f(q, op.out[q], at);
      at += std::ssize(op.out[q]);
    }
  }

  // Writes to our staging half where each rank finds its slice: in our memory, or in the row of our slices that is
  // staged chunk by chunk; there the region is the length of that row.
  Exposure expose_slices(const Operation& op, u32 half) {
    i64 total = 0;
    const std::byte *begin = nullptr, *end = nullptr;
    for_each_sent(op, [&](int, std::span<const std::byte> slice, i64) {
      if (slice.empty()) return;
      begin = total == 0 ? slice.data() : std::min(begin, slice.data());
      end = total == 0 ? slice.data() + slice.size() : std::max(end, slice.data() + slice.size());
      total += std::ssize(slice);
    });
    if (total == 0) return Exposure::None;
    auto* table = reinterpret_cast<Arena::Address*>(arena_->staging(rank(), half));
    std::optional<Arena::Address> address;
    if (total >= (crowded_ ? kCrowdedDirectBytes : kDirectBytes)) address = arena_->locate(begin, end - begin);
    for_each_sent(op, [&](int q, std::span<const std::byte> slice, i64 at) {
      table[q] = {total, at};
      if (address) table[q] = {address->region, address->offset + (slice.empty() ? 0 : slice.data() - begin)};
    });
    return address ? Exposure::Direct : Exposure::Staged;
  }

  // Sets places_ from the tables of all; returns the length of the longest staged row, at least 1.
  i64 find_slices(u32 half) {
    i64 longest = 1;
    for (int q = 0; q < size(); ++q) {
      if (q == rank() || exposures_[q] == Exposure::None) continue;
      places_[q] = reinterpret_cast<const Arena::Address*>(arena_->staging(q, half))[rank()];
      if (exposures_[q] == Exposure::Staged) longest = std::max(longest, places_[q].region);
    }
    return longest;
  }

  // Copies bytes [begin, begin + chunk) of the row of our slices.
  void stage_slices(const Operation& op, i64 begin, i64 chunk, std::byte* staging) {
    for_each_sent(op, [&](int, std::span<const std::byte> slice, i64 at) {
      const i64 from = std::max(begin, at), to = std::min(begin + chunk, at + std::ssize(slice));
      if (from < to) copy_bytes(staging + (from - begin), slice.data() + (from - at), to - from);
    });
  }

  // Reads our slices of bytes [begin, begin + count) of staged rows; in the first round, those in place, too.
  void read_slices(const Operation& op, i64 begin, i64 count, i64 head) {
    const u32 half = meetings_ % 2;
    const Reading reading(*this);
    if (begin == 0) copy_own(op);
    for (int step = 1; step < size(); ++step) {
      const int q = (rank() + step) % size();
      const std::span<std::byte> target = op.in[q];
      const Arena::Address& place = places_[q];
      if (target.empty()) continue;
      if (exposures_[q] == Exposure::Direct) {
        if (begin == 0) copy_bytes(target.data(), arena_->resolve(q, place), std::ssize(target));
        continue;
      }
      const i64 from = std::max(begin, place.offset), to = std::min(begin + count, place.offset + std::ssize(target));
      if (from < to)
        copy_bytes(target.data() + (from - place.offset), arena_->staging(q, half) + head + (from - begin), to - from);
    }
  }

  // While it lives, this rank may be reading its peers' sources. Throws if a failure has been reported.
  class Reading {
   public:
    explicit Reading(SharedCommunicator& comm) : flag_(comm.slot(comm.rank()).reading) {
      flag_.store(1, std::memory_order_seq_cst);  // before checking for a failure: see wait_for_readers
      try {
        comm.throw_if_reported();
      } catch (...) {
        flag_.store(0, std::memory_order_release);
        throw;
      }
    }
    ~Reading() { flag_.store(0, std::memory_order_release); }
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;

   private:
    std::atomic<u32>& flag_;
  };

  // A failed call returns its buffers to the caller, so peers must have stopped reading them. A reader sets `reading`
  // and then checks for a failure; here the failure is set first.
  void wait_for_readers() noexcept {
    const auto deadline = Clock::now() + kQuiescence;
    for (int q = 0; q < size(); ++q) {
      while (q != rank() && slot(q).reading.load(std::memory_order_seq_cst) != 0 && Clock::now() < deadline)
        std::this_thread::yield();
    }
  }

  // Waits for all ranks; everything that each wrote before is then visible to all.
  void meet() {
    post(slot(rank()).arrived, ++meetings_);
    for (int q = 0; q < size(); ++q) {
      if (q == rank()) continue;
      wait(slot(q).arrived, q, kProgress, [this](u32 value) { return static_cast<i32>(value - meetings_) >= 0; });
    }
  }

  // Waits until ready(event's value): polls, then sleeps, with checks of failures, the peers' health and the clock.
  template <class Ready>
  void wait(Event& event, int peer, Lane lane, Ready ready) {
    const auto value = [&] { return event.value.load(std::memory_order_acquire); };
    if (polling_[lane].until([&] { return ready(value()); })) return;
    const bool tells = lane == kProgress;
    if (tells) {
      waits_here_.store(true, std::memory_order_relaxed);
      publish_wait(world_rank(peer));
    }
    const auto start = Clock::now();
    const auto limit = std::chrono::duration<double>(timeout_s());
    auto next_health_check = start + kHealthPeriod;
    for (u32 seen = value(); !ready(seen); seen = value()) {
      throw_if_reported();
      const bool departed = slot(peer).departed.load(std::memory_order_acquire) != 0;
      if (departed && !ready(value()))
        fail(Errc::Comm, world_rank(peer),
             fmt::format("rank {} has left while rank {} {}", world_rank(peer), own_number(), doing(rank())));
      const auto now = Clock::now();
      if (tells) publish_wait(world_rank(peer));
      if (now >= next_health_check) {
        throw_if_peer_failed();
        next_health_check = now + kHealthPeriod;
      }
      if (now - start > limit) report_absence(peer, std::chrono::duration<double>(now - start).count());
      sleep_on(event, seen,
               std::chrono::duration_cast<std::chrono::nanoseconds>(
                   std::min<std::chrono::duration<double>>(kSleep, limit / 4)));
    }
    if (tells) {
      publish_wait(-1);
      waits_here_.store(false, std::memory_order_relaxed);
    }
  }

  // For the messages of peers; number: a world rank, or -1.
  void publish_wait(int number) noexcept {
    tell_wait(number);
    if (!wait_) return;
    Wait& told = ground_.slot(place(own_number())).waits[*wait_];
    told.key.store(key_, std::memory_order_relaxed);
    told.inside_call.store(attaching_ || !progress_thread(), std::memory_order_relaxed);
    told.confirmed_ns.store(now_ns(), std::memory_order_relaxed);
    told.peer.store(number + 1, std::memory_order_release);
  }
  void waits_elsewhere(int number) noexcept override {
    if (!waits_here_.load(std::memory_order_relaxed)) publish_wait(number);
  }

  void check_health() {
    for (int q = 0; q < size(); ++q) {
      if (q == rank() || slot(q).departed.load(std::memory_order_acquire) != 0) continue;
      // It may have said goodbye just before it ended.
      if (arena_->is_dead(q) && slot(q).departed.load(std::memory_order_acquire) == 0)
        fail(Errc::Comm, world_rank(q), fmt::format("rank {} died: {}", world_rank(q), arena_->health(q).words));
    }
  }

  bool is_here(int number) const noexcept { return place(number) >= 0 && place(number) < ground_.size(); }

  // The peer that we wait for may itself wait for another, here or in another communicator: the last of the chain is at
  // fault. If that one is in another communicator, the ranks there know more and get time to report first.
  void report_absence(int peer, double waited_s) {
    std::string chain;
    int culprit = world_rank(peer);
    for (int hop = 0; hop < ground_.size() && is_here(culprit); ++hop) {
      const int next = waits_for(culprit);
      if (next < 0 || next == own_number()) break;
      chain += fmt::format(", rank {} waits for rank {}", culprit, next);
      culprit = next;
    }
    std::string words;
    for (int q = 0; q < size(); ++q) {
      if (world_rank(q) == culprit) words = fmt::format(", rank {} {}", culprit, doing(q));
    }
    if (!is_here(culprit) && waited_s < kPatience * timeout_s()) return;
    const Arena::Health health = is_here(culprit) ? ground_.arena_->health(place(culprit)) : Arena::Health{};
    fail(Errc::Timeout, culprit,
         fmt::format("rank {} did not arrive within {} s: rank {} {}{}{}{}{}", culprit, timeout_s(), own_number(),
                     doing(rank()), chain, words, health.words.empty() ? "" : "; ", health.words));
  }

  // The rank that a world rank waits for instead of arriving here; -1: none. It must have confirmed this recently: it
  // would not if it were stopped, or if what it waited for had arrived.
  int waits_for(int number) const {
    const auto lately = now_ns() - static_cast<i64>(timeout_s() / 2 * 1e9);
    for (const Wait& w : ground_.slot(place(number)).waits) {
      const int peer = w.peer.load(std::memory_order_acquire) - 1;
      const bool blocks = w.inside_call.load(std::memory_order_relaxed) != 0 || w.key == key_;
      if (peer >= 0 && blocks && w.confirmed_ns.load(std::memory_order_relaxed) > lately) return peer;
    }
    return -1;
  }

  std::string doing(int rank) const {
    const u64 activity = slot(rank).activity.load(std::memory_order_relaxed);
    const u64 calls = activity >> 8, kind = activity & 0xff;
    if (kind == 0) return fmt::format("is outside any call after {} calls{}", calls, of_group());
    return fmt::format("is in {} (call {}){}", op_name(static_cast<OpKind>(kind - 1)), calls + 1, of_group());
  }

  // Written by this rank; memory of its own, like staging.
  Channel& channel_to(int to) {
    Channel& channel = arena_->channel(rank(), to);
    if (!std::exchange(sends_to_[to], u8{1})) channels_.fetch_add(1, std::memory_order_relaxed);
    return channel;
  }

  void transmit(const Operation& op, int to) override {
    Channel& channel = channel_to(to);
    i64 bytes = op.slice_bytes();
    put(channel, to, {reinterpret_cast<const std::byte*>(&bytes), sizeof bytes});
    put(channel, to, {op.segments[0].source, static_cast<size_t>(bytes)});
  }

  bool transmit_at_once(const Operation& op, int to) override {
    Channel& channel = channel_to(to);
    const u32 used =
        channel.head.value.load(std::memory_order_relaxed) - channel.tail.value.load(std::memory_order_acquire);
    const i64 lines = 1 + div_ceil(op.slice_bytes(), i64{Channel::kLineBytes});
    if (lines > i64{Channel::kLines} - used) return false;
    transmit(op, to);
    return true;
  }

  void receive(const Operation& op, int from) override {
    const Activity activity(*this, op.kind);
    Channel& channel = arena_->channel(from, rank());
    i64 sent = 0;
    const i64 expected = op.slice_bytes();
    get(channel, from, {reinterpret_cast<std::byte*>(&sent), sizeof sent});
    if (sent != expected) {
      fail(Errc::Comm, world_rank(from),
           fmt::format("rank {} sends {} bytes where rank {} receives {} in \"{}\"", world_rank(from), sent,
                       own_number(), expected, op.tag));
    }
    get(channel, from, {op.segments[0].target, static_cast<size_t>(sent)});
  }

  // Messages start on a line. `step` copies between the ring and the message: (ring, offset in the message, bytes).
  template <class Step>
  static void move_lines(Channel& channel, u32 position, u32 lines, size_t done, size_t bytes, Step step) {
    while (lines > 0) {
      const u32 first = position % Channel::kLines, run = std::min(lines, Channel::kLines - first);
      step(channel.ring.data() + first * Channel::kLineBytes, done,
           std::min<size_t>(run * Channel::kLineBytes, bytes - done));
      done += run * Channel::kLineBytes;
      position += run;
      lines -= run;
    }
  }

  void put(Channel& channel, int to, std::span<const std::byte> message) {
    for (size_t done = 0; done < message.size();) {
      const u32 head = channel.head.value.load(std::memory_order_relaxed);
      wait(channel.tail, to, kSender, [&](u32 tail) { return head - tail < Channel::kLines; });
      const u32 space = Channel::kLines - (head - channel.tail.value.load(std::memory_order_acquire));
      const auto lines = static_cast<u32>(
          std::min<size_t>(space, (message.size() - done + Channel::kLineBytes - 1) / Channel::kLineBytes));
      move_lines(channel, head, lines, done, message.size(), [&](std::byte* ring, size_t offset, size_t bytes) {
        copy_bytes(ring, message.data() + offset, narrow<i64>(bytes));
      });
      done += size_t{lines} * Channel::kLineBytes;
      post(channel.head, head + lines);
    }
  }

  void get(Channel& channel, int from, std::span<std::byte> message) {
    for (size_t done = 0; done < message.size();) {
      const u32 tail = channel.tail.value.load(std::memory_order_relaxed);
      wait(channel.head, from, kProgress, [&](u32 head) { return head != tail; });
      const u32 there = channel.head.value.load(std::memory_order_acquire) - tail;
      const auto lines = static_cast<u32>(
          std::min<size_t>(there, (message.size() - done + Channel::kLineBytes - 1) / Channel::kLineBytes));
      move_lines(channel, tail, lines, done, message.size(), [&](const std::byte* ring, size_t offset, size_t bytes) {
        copy_bytes(message.data() + offset, ring, narrow<i64>(bytes));
      });
      done += size_t{lines} * Channel::kLineBytes;
      post(channel.tail, tail + lines);
    }
  }

  Buffer allocate_shared(MemoryLedger& ledger, Tag tag, i64 bytes) override {
    return arena_->allocate(ledger, tag, bytes, [this] { meet(); });
  }

  void look_at_peers() override {
    look_for_reports();
    check_health();
  }

  void look_for_reports() override {
    if (arena_->control().failure_state.load(std::memory_order_seq_cst) == 0) return;
    const Failure f = read_failure();
    throw Error(f.code, f.message, f.rank);
  }

  Failure publish(Failure failure) noexcept override {
    Control& c = arena_->control();
    u32 none = 0;
    if (!c.failure_state.compare_exchange_strong(none, 1, std::memory_order_seq_cst)) return read_failure();
    c.failure_code = failure.code;
    c.failure_rank = failure.rank;
    failure.message.copy(c.failure_message.data(), c.failure_message.size() - 1);
    c.failure_state.store(2, std::memory_order_seq_cst);
    for (int q = 0; q < size(); ++q) wake_all(slot(q).arrived);
    return failure;
  }

  Failure read_failure() const {
    const Control& c = arena_->control();
    const auto deadline = Clock::now() + kQuiescence;
    while (c.failure_state.load(std::memory_order_acquire) != 2) {
      // The rank that writes it may be killed while doing so.
      if (Clock::now() > deadline) return {Errc::Comm, "a rank died while it reported a failure", -1};
      std::this_thread::yield();
    }
    return {c.failure_code, c.failure_message.data(), c.failure_rank};
  }

  std::unique_ptr<AsyncCommunicator> make_group(int rank, Membership membership, const CommOptions& options) override {
    const auto look = [this] { throw_if_peer_failed(); };
    std::vector<int> members(membership.ranks);
    for (int& member : members) member = place(member);
    auto arena = arena_->group(rank, members, membership.ranks.front(), membership.name, options.timeout_s, look);
    auto communicator =
        std::make_unique<SharedCommunicator>(backend(), std::move(arena), options, std::move(membership), this);
    communicator->attach();
    return communicator;
  }

  static u32 key_of(const Membership& membership) {
    u64 hash = 14695981039346656037u;
    for (const char c : membership.name) hash = (hash ^ static_cast<u8>(c)) * 1099511628211u;
    for (const int member : membership.ranks) hash = (hash ^ static_cast<u64>(member)) * 1099511628211u;
    return static_cast<u32>(hash >> 32);
  }

  // An index of RankSlot::waits; empty if there are more communicators than slots.
  std::optional<size_t> take_wait() {
    const std::lock_guard lock(waits_mutex_);
    const auto free = std::find(waits_taken_.begin(), waits_taken_.end(), false);
    if (free == waits_taken_.end()) return std::nullopt;
    *free = true;
    return static_cast<size_t>(free - waits_taken_.begin());
  }
  void give_wait(std::optional<size_t> index) noexcept {
    if (!index) return;
    slot(rank()).waits[*index].peer.store(0, std::memory_order_relaxed);
    const std::lock_guard lock(waits_mutex_);
    waits_taken_[*index] = false;
  }

  const std::unique_ptr<Arena> arena_;
  std::mutex waits_mutex_;  // of a world
  std::array<bool, RankSlot::kWaits> waits_taken_{};
  SharedCommunicator& ground_;
  const u32 key_;
  const std::optional<size_t> wait_;
  const bool crowded_;
  std::array<Polling, 2> polling_;  // by lane
  std::atomic<bool> waits_here_{false};
  bool attaching_ = false;
  u32 meetings_ = 0;                 // of this rank; wraps
  u64 calls_ = 0;                    // for messages
  u64 collectives_ = 0;              // made alike by all ranks, unlike receives
  std::vector<Exposure> exposures_;  // of all ranks, in the current exchange
  std::vector<u8> sends_to_;         // ranks with a channel from here
  std::atomic<i64> channels_{0};     // their number
  std::vector<const std::byte*> sources_;
  std::vector<Arena::Address> places_;  // of slices for this rank, in the current all_to_allv
};

}  // namespace

std::unique_ptr<AsyncCommunicator> make_group_of_one(Membership membership, const CommOptions& options) {
  return std::make_unique<SharedCommunicator>("self", std::move(make_thread_arenas(1).front()), options,
                                              std::move(membership));
}

std::unique_ptr<Communicator> make_self_communicator(const CommOptions& options) {
  return std::make_unique<SharedCommunicator>("self", std::move(make_thread_arenas(1).front()), options);
}

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int size, const CommOptions& options) {
  DS_ASSERT(size >= 1);
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (auto& arena : make_thread_arenas(size))
    communicators.push_back(std::make_unique<SharedCommunicator>("threads", std::move(arena), options));
  return communicators;
}

void run_threads(int size, const CommOptions& options, const std::function<void(Communicator&)>& body) {
  auto communicators = make_thread_communicators(size, options);
  std::mutex mutex;
  std::exception_ptr first_error;
  bool is_own = false;
  std::vector<std::jthread> threads;
  for (auto& communicator : communicators) {
    // Without a thread, unwinding destroys the communicator, which ends the peers.
    const std::string name = fmt::format("rank {} of {}", communicator->rank(), size);
    threads.push_back(start_thread(name, [&, c = std::move(communicator)]() mutable {
      // A rank records its error before it informs its peers, so their errors come later. But objects owned by the body
      // may have informed them during unwinding, so a rank's own error precedes one that names another rank.
      const auto record = [&](const Error& why) {
        {
          const std::lock_guard lock(mutex);
          const bool own = why.rank() < 0 || why.rank() == c->rank();
          if (!first_error || (own && !is_own)) first_error = std::current_exception();
          is_own = is_own || own;
        }
        c->abort(why);
      };
      try {
        body(*c);
      } catch (const std::exception& e) {
        record(as_error(e));
      }
      c.reset();
    }));
  }
  threads.clear();
  if (first_error) std::rethrow_exception(first_error);
}

std::unique_ptr<AsyncCommunicator> make_shared_communicator(std::string_view backend, std::unique_ptr<Arena> arena,
                                                            const CommOptions& options, Membership part) {
  auto communicator = std::make_unique<SharedCommunicator>(backend, std::move(arena), options, std::move(part));
  communicator->attach();
  return communicator;
}

std::unique_ptr<Communicator> make_shm_communicator(std::string_view job, int rank, int size,
                                                    const CommOptions& options) {
  DS_ASSERT(size >= 1 && rank >= 0 && rank < size);
  const auto nothing = [] {};
  return make_shared_communicator("shm", make_shm_arena(job, rank, size, 0, options.timeout_s, nothing), options);
}

}  // namespace ds
