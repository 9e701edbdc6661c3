// SPDX-License-Identifier: Apache-2.0
// shm+mpi: nodes with equal numbers of consecutive ranks. Rank j of every node belongs to lane j. The lanes communicate
// between nodes in parallel, so a slice crosses the network once for each node that needs it:
//
//   all_gather, broadcast, gather: the lanes fetch what their node lacks, then the node shares it.
//   all_to_all, scatter: the node sorts slices by lane, then the lanes exchange them.
//   all_to_allv: slices go straight to their ranks, those within the node in memory, while the others are on the
//   network. reduce_scatter: lane j folds the slices of all j-th ranks. Node 0 folds those of its ranks and sends its
//   sums to node
//     1, which continues the fold, and so on; the last node returns the sums. If that would save no bytes, slices
//     travel as in all_to_all, and their owners fold them.
//
// Large operations run in rounds: while a node works on one, the next is on the network. This communicator runs both
// parts in its own thread; overlapped work runs in the threads of the lanes. The parts share its fate: their failures
// are its own, and every wait in one of them checks all.

#include <algorithm>
#include <cstring>
#include <mutex>
#include <numeric>
#include <thread>

#include "base/as_error.h"
#include "comm/arena.h"
#include "comm/make_communicator.h"
#include "comm/slice_sizes.h"

namespace ds {
namespace {

constexpr i64 kRoundBytes = i64{4} << 20;  // moved by a lane in a round
constexpr i64 kFoldBytes = i64{8} << 20;   // slices that a rank folds in a round
constexpr i64 kLeastChain = i64{256} << 10;
constexpr i64 kChainBytes = i64{1} << 20;  // sums that travel along the chain together
// Factors of the timeout, so that the rank closest to the fault reports first: a rank that waits for one of its own
// node (SharedCommunicator), then ranks that meet before an operation, and last ranks in the middle of one, since they
// may wait for a rank that itself waits.
constexpr double kMeetingPatience = 1.2, kMiddlePatience = 1.4;
constexpr size_t kDepth = 3;  // rounds of a chain in flight: one arrives, one is folded, one leaves

class ComposedCommunicator final : public AsyncCommunicator {
 public:
  // A world. net: all its ranks; make_local creates the part for this node's ranks.
  template <class MakeLocal>
  ComposedCommunicator(std::unique_ptr<AsyncCommunicator> net, int local_rank, int local_size,
                       const CommOptions& options, MakeLocal make_local)
      : AsyncCommunicator("shm+mpi", net->rank(), net->size(), options, {}),
        nodes_(net->size() / local_size),
        node_(net->rank() / local_size),
        ranks_(local_size),
        lane_(local_rank),
        net_(std::move(net)) {
    Membership local{.world = this, .name = {}, .ranks = {}};
    for (int i = 0; i < ranks_; ++i) local.ranks.push_back(node_ * ranks_ + i);
    try {
      local_ = make_local(options, std::move(local), *net_);
      make_lanes(*net_, {}, options);
    } catch (const Error& e) {  // report the reason to ranks that wait for this one
      abort(e);
      throw;
    }
  }

  // A group of the world `ground`, with `ranks` ranks on each node.
  ComposedCommunicator(int rank, int ranks, const CommOptions& options, const Membership& membership,
                       ComposedCommunicator& ground)
      : AsyncCommunicator("shm+mpi", rank, narrow<int>(std::ssize(membership.ranks)), options, membership),
        nodes_(size() / ranks),
        node_(rank / ranks),
        ranks_(ranks),
        lane_(rank % ranks),
        ground_(&ground) {
    Membership local{.world = &ground, .name = membership.name, .ranks = {}};
    for (int i = 0; i < ranks_; ++i) local.ranks.push_back(world_rank(node_ * ranks_ + i));
    local_ = Part{*ground.local_}.make_group(lane_, std::move(local), options);
    net_ = Part{*ground.net_}.make_group(rank, membership, options);
    make_lanes(*ground.net_, membership.name, options);
  }

  ~ComposedCommunicator() override { shut_down(); }

  i64 staging_bytes() const noexcept override {
    i64 bytes = AsyncCommunicator::staging_bytes() + local_->staging_bytes() + lanes_->staging_bytes() +
                onward_->staging_bytes() + returns_->staging_bytes() + net_->staging_bytes() +
                narrow<i64>(staging_.size() + slices_.size() + imbalances_.size() * sizeof(u64));
    for (const Round& r : rounds_)
      bytes += narrow<i64>((r.sums.size() + r.returned.size() + r.begun.size()) * sizeof(float));
    return bytes;
  }
  bool has_left(int peer) const override { return net_->has_left(peer); }

 private:
  // One round of a reduce-scatter.
  struct Round {
    std::vector<float> sums;      // [nodes][elems]: sums of the slices that this lane's ranks own
    std::vector<float> returned;  // [elems]: the sum of our own slice
    // [nodes][elems]: start values of an accumulating fold; at node 0 for all nodes, else only our own.
    std::vector<float> begun;
    Ticket came, back;
    std::vector<Ticket> begins, gone;
  };

  void make_lanes(AsyncCommunicator& net, const std::string& name, CommOptions options) {
    options.progress_thread = true;
    Membership lane{.world = ground_ != nullptr ? ground_ : this, .name = name, .ranks = {}};
    for (int m = 0; m < nodes_; ++m) lane.ranks.push_back(world_rank(m * ranks_ + lane_));
    const double timeout_s = options.timeout_s;
    options.timeout_s = kMeetingPatience * timeout_s;
    lanes_ = Part{net}.make_group(node_, lane, options);
    options.timeout_s = kMiddlePatience * timeout_s;
    onward_ = Part{net}.make_group(node_, lane, options);
    returns_ = Part{net}.make_group(node_, std::move(lane), options);
    Part{*lanes_}.tell(*local_);
    for (AsyncCommunicator* c : {onward_.get(), returns_.get()}) Part{*c}.tell(*local_, &awaits_);
  }

  int node_of(int rank) const noexcept { return rank / ranks_; }
  int lane_of(int rank) const noexcept { return rank % ranks_; }

  // Waits for a ticket of onward_ or returns_.
  void await(Ticket& ticket) {
    awaits_.store(true, std::memory_order_relaxed);
    ticket.wait();
    awaits_.store(false, std::memory_order_relaxed);
    Part{*local_}.waits_elsewhere(-1);
  }
  void await(std::vector<Ticket>& tickets) {
    for (Ticket& t : tickets) await(t);
    tickets.clear();
  }

  // Runs `body`. If it fails while other threads use our buffers, reports the error, so that they end, and waits for
  // them.
  template <class Body>
  void guarded(Body body) {
    try {
      body();
    } catch (const std::exception& e) {
      abort(as_error(e));
      for (AsyncCommunicator* c : {net_.get(), onward_.get(), returns_.get()}) c->drain();
      throw;
    }
  }

  // Every call is checked in each lane and then inside each node, so all ranks have made the same call.
  void exchange(const Operation& op, const Exchange& x, FunctionRef<void(const SliceRange&)>) override {
    const i64 length = x.length();
    DS_ASSERT(x.lands || length == 0);
    if (length == 0) {
      Part{*lanes_}.meet(op);
      Part{*local_}.meet(op);
      return;
    }
    guarded([&] {
      if (x.sliced) {
        sort_and_swap(op, x, length);
      } else {
        fetch_and_share(op, x, length);
      }
    });
  }

  // Runs a step of the lanes, in the thread of the lanes unless the whole call is a single round.
  Ticket on_lanes(const Operation& op, Operation&& step, bool alone) {
    if (!alone) return Part{*onward_}.submit(std::move(step));
    const Exchange x = exchange_of(step);
    Part{*lanes_}.move(op, x);
    return {};
  }

  static Operation step_of(const Operation& op, OpKind kind, int node) {
    Operation step{.kind = kind};
    step.tag = op.tag;
    step.peer = node;
    step.root = op.root;
    return step;
  }

  // For slices that all ranks, or a root, receive.
  void fetch_and_share(const Operation& op, const Exchange& x, i64 length) {
    const i64 round = std::min(length, std::max<i64>(kRoundBytes / nodes_ / 64 * 64, 64));
    const bool alone = round == length, gathers = x.only_to >= 0, broadcasts = x.only_from >= 0;
    const int root = gathers ? x.only_to : x.only_from;
    const bool in_lane = !broadcasts || lane_of(root) == lane_;
    const bool at_root_node = gathers && node_of(root) == node_;
    if (gathers) staging_.resize(std::max(staging_.size(), static_cast<size_t>(2 * nodes_ * round)));
    const auto room = [&](i64 begin) { return staging_.data() + begin / round % 2 * nodes_ * round; };

    const auto fetch = [&](i64 begin) -> Ticket {
      if (begin >= length || (!in_lane && !alone)) return {};
      const i64 count = std::min(round, length - begin);
      Operation step = step_of(op,
                               gathers      ? OpKind::Gather
                               : broadcasts ? OpKind::Broadcast
                                            : OpKind::AllGather,
                               root < 0 ? -1 : node_of(root));
      for_each_part(x.segments, begin, count, [&](const OpSegment& s, i64 offset, i64 bytes, i64 position) {
        if (!in_lane) return;
        if (gathers) {
          step.segments.push_back(
              {s.source + offset, at_root_node ? room(begin) + position : nullptr, bytes, 0, round - bytes});
        } else if (broadcasts) {
          step.segments.push_back({s.source + offset, s.target + offset, bytes});
        } else {
          step.segments.push_back({s.source + offset, s.target + lane_ * s.target_stride() + offset, bytes, 0,
                                   ranks_ * s.target_stride() - bytes});
        }
      });
      return on_lanes(op, std::move(step), alone);
    };
    const auto share = [&](i64 begin, i64 count) {
      segments_.clear();
      for_each_part(x.segments, begin, count, [&](const OpSegment& s, i64 offset, i64 bytes, i64 position) {
        if (broadcasts) return segments_.push_back({s.target + offset, s.target + offset, bytes});
        const i64 stride = s.target_stride();
        for (i64 m = 0; m < nodes_; ++m) {
          std::byte* const target = s.target == nullptr ? nullptr : s.target + m * ranks_ * stride + offset;
          const std::byte* const source = gathers ? room(begin) + m * round + position : target + lane_ * stride;
          if (!gathers || at_root_node) segments_.push_back({source, target, bytes, 0, stride - bytes});
        }
      });
      Part{*local_}.move(op, {.sliced = false,
                              .segments = segments_,
                              .only_from = broadcasts ? lane_of(root) : -1,
                              .only_to = gathers ? lane_of(root) : -1});
    };

    if (!alone) Part{*lanes_}.meet(op);
    Ticket next = fetch(0);
    for (i64 begin = 0; begin < length; begin += round) {
      await(next);
      next = fetch(begin + round);
      share(begin, std::min(round, length - begin));
    }
  }

  // For slices that differ from rank to rank.
  void sort_and_swap(const Operation& op, const Exchange& x, i64 length) {
    const bool scatters = x.only_from >= 0;
    const int root = x.only_from;
    const i64 copies = scatters ? nodes_ : nodes_ * ranks_;
    const i64 round = std::min(length, std::max<i64>(kRoundBytes / copies / 64 * 64, 64));
    const bool alone = round == length;
    const bool sorts = !scatters || node_of(root) == node_;
    const i64 sources = scatters ? 1 : ranks_;  // ranks whose slices a lane takes out of its node
    if (sorts) staging_.resize(std::max(staging_.size(), static_cast<size_t>(2 * copies * round)));
    std::array<Ticket, 2> swapped;

    Part{*lanes_}.meet(op);
    for (i64 begin = 0; begin < length; begin += round) {
      const i64 count = std::min(round, length - begin);
      const size_t half = static_cast<size_t>(begin / round % 2);
      // [nodes][sources][round]: for the rank of this lane in each node
      std::byte* const room = sorts ? staging_.data() + narrow<i64>(half) * copies * round : nullptr;
      await(swapped[half]);
      segments_.clear();
      Operation step = step_of(op, scatters ? OpKind::Scatter : OpKind::AllToAll, scatters ? node_of(root) : -1);
      for_each_part(x.segments, begin, count, [&](const OpSegment& s, i64 offset, i64 bytes, i64 position) {
        for (i64 m = 0; sorts && m < nodes_; ++m) {
          const std::byte* source = s.source == nullptr ? nullptr : s.source + m * ranks_ * s.source_stride() + offset;
          segments_.push_back(
              {source, room + m * sources * round + position, bytes, s.source_stride() - bytes, round - bytes});
        }
        for (i64 i = 0; i < sources; ++i) {
          step.segments.push_back({sorts ? room + i * round + position : nullptr,
                                   s.target + i * s.target_stride() + offset, bytes, sources * round - bytes,
                                   ranks_ * s.target_stride() - bytes});
        }
      });
      Part{*local_}.move(op, {.sliced = true, .segments = segments_, .only_from = scatters ? lane_of(root) : -1});
      swapped[half] = on_lanes(op, std::move(step), alone);
    }
    for (Ticket& t : swapped) await(t);
  }

  // The sizes are compared first, over all ranks, so that all see a mismatch; each part compares its own again.
  void all_to_allv_now(const Operation& op) override {
    const Operation call = step_of(op, op.kind, -1);
    imbalances_.resize(static_cast<size_t>(size()));
    imbalances_[rank()] = size_imbalance(op, rank());
    const OpSegment own{reinterpret_cast<const std::byte*>(&imbalances_[rank()]),
                        reinterpret_cast<std::byte*>(imbalances_.data()), sizeof(u64)};
    move_now(call, {.sliced = false, .segments = {&own, 1}});
    if (std::accumulate(imbalances_.begin(), imbalances_.end(), u64{0}) != 0) report_sizes(op);
    Operation near = step_of(op, op.kind, -1), far = step_of(op, op.kind, -1);
    const int first = node_ * ranks_;
    near.out.assign(op.out.begin() + first, op.out.begin() + first + ranks_);
    near.in.assign(op.in.begin() + first, op.in.begin() + first + ranks_);
    far.out = op.out;
    far.in = op.in;
    std::fill_n(far.out.begin() + first, ranks_, std::span<const std::byte>());
    std::fill_n(far.in.begin() + first, ranks_, std::span<std::byte>());
    guarded([&] {
      Ticket crossing = Part{*net_}.submit(std::move(far));
      Part{*local_}.all_to_allv(near);
      crossing.wait();
    });
  }

  void reduce_scatter_now(const Operation& op, std::span<const OpSegment> segments, bool accumulate) override {
    const i64 wire = dtype_bytes(op.dtype);
    if (!chains(op, segments)) {
      return fold_here(op, segments, [&](const OpSegment& s, i64 offset, i64 bytes) {
        fold(reinterpret_cast<float*>(s.target) + offset / wire, sources_, bytes / wire, op.dtype, accumulate);
      });
    }
    chain(op, segments, accumulate, [&](const OpSegment& s, i64 first, std::span<const float> sums) {
      std::memcpy(reinterpret_cast<float*>(s.target) + first, sums.data(), sums.size_bytes());
    });
  }

  void reduce_scatter_rounded(const Operation& op, const OpSegment& whole) override {
    if (!chains(op, {&whole, 1})) {
      return fold_here(op, {&whole, 1}, [&](const OpSegment& s, i64 offset, i64 bytes) {
        fold_rounded(s.target + offset, sources_, bytes / dtype_bytes(op.dtype), op.dtype);
      });
    }
    chain(op, {&whole, 1}, false, [&](const OpSegment& s, i64 first, std::span<const float> sums) {
      round_to(s.target + first * dtype_bytes(op.dtype), op.dtype, sums);
    });
  }

  // With a chain, a link carries every sum once, in fp32. Without, it carries the slices of all ranks of a node, and
  // saves the latency of one hop per node.
  bool chains(const Operation& op, std::span<const OpSegment> segments) const noexcept {
    const i64 wire = dtype_bytes(op.dtype), length = Exchange{.sliced = true, .segments = segments}.length();
    return size() * length >= kLeastChain && 4 * nodes_ < i64{ranks_} * (nodes_ - 1) * wire;
  }

  // In rounds, each rank receives all slices whose sum it owns and folds sources_ by fold_part(segment, offset, bytes).
  void fold_here(const Operation& op, std::span<const OpSegment> segments,
                 FunctionRef<void(const OpSegment&, i64, i64)> fold_part) {
    const i64 P = size(), length = Exchange{.sliced = true, .segments = segments}.length();
    const i64 round = std::min(length, std::max<i64>(kFoldBytes / P / 64 * 64, 64));
    sources_.resize(P);
    slices_.resize(std::max(slices_.size(), static_cast<size_t>(P * round)));
    i64 begin = 0;
    do {
      const i64 count = std::min(round, length - begin);
      parts_.clear();
      for_each_part(segments, begin, count, [&](const OpSegment& s, i64 offset, i64 bytes, i64 position) {
        parts_.push_back({s.source + offset, slices_.data() + P * position, bytes, s.source_stride() - bytes, 0});
      });
      move_now(op, {.sliced = true, .segments = parts_});
      for_each_part(segments, begin, count, [&](const OpSegment& s, i64 offset, i64 bytes, i64 position) {
        for (i64 q = 0; q < P; ++q) sources_[q] = slices_.data() + P * position + q * bytes;
        fold_part(s, offset, bytes);
      });
      begin += round;
    } while (begin < length);
  }

  // Calls deliver(segment, first element, sums) for our own slice.
  void chain(const Operation& op, std::span<const OpSegment> segments, bool accumulate,
             FunctionRef<void(const OpSegment&, i64, std::span<const float>)> deliver) {
    const bool first = node_ == 0, last = node_ == nodes_ - 1;
    const i64 wire = dtype_bytes(op.dtype);
    i64 length = 0;  // elements
    for (const OpSegment& s : segments) length += s.slice_bytes / wire;
    const i64 round = std::max<i64>(kChainBytes / 4 / nodes_ / 64 * 64, 64), num_rounds = div_ceil(length, round);
    const auto elems = [&](i64 r) { return std::min(round, length - r * round); };
    const auto bytes = [&](i64 r) { return elems(r) * 4; };
    const auto for_each = [&](i64 r, auto f) {  // f(segment, first element, elements, position)
      for_each_part(
          segments, r * round * wire, elems(r) * wire,
          [&](const OpSegment& s, i64 offset, i64 n, i64 position) { f(s, offset / wire, n / wire, position / wire); });
    };
    const auto at = [&](i64 r) -> Round& { return rounds_[static_cast<size_t>(r) % kDepth]; };
    const auto part = [](std::vector<float>& v, i64 index, i64 stride) { return v.data() + index * stride; };

    // Start values of the fold, for an accumulating call.
    const auto begin_fold = [&](i64 r) {
      if (!accumulate || r >= num_rounds) return;
      Round& x = at(r);
      await(x.begins);
      x.begun.resize(std::max(x.begun.size(), static_cast<size_t>((first ? nodes_ : 1) * round)));
      for_each(r, [&](const OpSegment& s, i64 from, i64 n, i64 position) {
        std::memcpy(x.begun.data() + position, reinterpret_cast<const float*>(s.target) + from,
                    static_cast<size_t>(n) * 4);
      });
      if (first) {
        for (int m = 1; m < nodes_; ++m)
          x.begins.push_back(onward_->recv(part(x.begun, m, elems(r)), bytes(r), m, op.tag));
      } else {
        x.begins.push_back(onward_->send(x.begun.data(), bytes(r), 0, op.tag));
      }
    };
    const auto receive_sums = [&](i64 r) {
      if (r >= num_rounds) return;
      Round& x = at(r);
      await(x.gone);
      x.sums.resize(std::max(x.sums.size(), static_cast<size_t>(nodes_ * round)));
      if (!first) x.came = onward_->recv(x.sums.data(), nodes_ * bytes(r), node_ - 1, op.tag);
    };
    const auto finish = [&](i64 r) {
      if (r < 0) return;
      Round& x = at(r);
      await(x.back);
      const float* own = last ? part(x.sums, node_, elems(r)) : x.returned.data();
      for_each(r, [&](const OpSegment& s, i64 from, i64 n, i64 position) {
        deliver(s, from, {own + position, static_cast<size_t>(n)});
      });
    };

    guarded([&] {
      Part{*lanes_}.meet(op);
      if (length == 0) return Part{*local_}.meet(op);
      for (i64 r = 0; r < 2; ++r) begin_fold(r);
      receive_sums(0);
      for (i64 r = 0; r < num_rounds; ++r) {
        Round& x = at(r);
        if (r >= 2) finish(r - 2);
        receive_sums(r + 1);
        if (!last) {
          x.returned.resize(std::max(x.returned.size(), static_cast<size_t>(round)));
          x.back = returns_->recv(x.returned.data(), bytes(r), nodes_ - 1, op.tag);
        }
        await(x.came);
        if (first && accumulate) {
          await(x.begins);
          std::memcpy(x.sums.data(), x.begun.data(), static_cast<size_t>(nodes_ * bytes(r)));
        }
        segments_.clear();
        for (i64 m = 0; m < nodes_; ++m) {
          for_each(r, [&](const OpSegment& s, i64 from, i64 n, i64 position) {
            segments_.push_back({s.source + m * ranks_ * s.source_stride() + from * wire,
                                 reinterpret_cast<std::byte*>(part(x.sums, m, elems(r)) + position), n * wire,
                                 s.source_stride() - n * wire});
          });
        }
        Part{*local_}.reduce_scatter(op, segments_, accumulate || !first);
        begin_fold(r + 2);
        if (!last) {
          x.gone.push_back(onward_->send(x.sums.data(), nodes_ * bytes(r), node_ + 1, op.tag));
        } else {
          for (int m = 0; m < nodes_ - 1; ++m)
            x.gone.push_back(returns_->send(part(x.sums, m, elems(r)), bytes(r), m, op.tag));
        }
      }
      for (i64 r = std::max<i64>(num_rounds - 2, 0); r < num_rounds; ++r) finish(r);
      for (Round& x : rounds_) {
        await(x.begins);
        await(x.gone);
        x.came = x.back = {};
      }
    });
  }

  // The part that carries messages to and from a rank, and the rank's number there.
  std::pair<Part, int> route(int peer) const {
    if (node_of(peer) == node_) return {Part{*local_}, lane_of(peer)};
    return {Part{*net_}, peer};
  }
  void transmit(const Operation& op, int to) override {
    auto [part, peer] = route(to);
    part.transmit(op, peer);
  }
  bool transmit_at_once(const Operation& op, int to) override {
    auto [part, peer] = route(to);
    return part.transmit_at_once(op, peer);
  }
  void receive(const Operation& op, int from) override {
    auto [part, peer] = route(from);
    part.receive(op, peer);
  }

  Buffer allocate_shared(MemoryLedger& ledger, Tag tag, i64 bytes) override {
    return Part{*local_}.allocate_shared(ledger, tag, bytes);
  }

  // On a world.
  Failure publish(Failure failure) noexcept override {
    if (local_ != nullptr) failure = Part{*local_}.publish(failure);
    return Part{*net_}.publish(failure);
  }
  void look_for_reports() override {
    if (local_ != nullptr) Part{*local_}.look_for_reports();
    on_net([this] { Part{*net_}.look_for_reports(); });
  }
  void look_at_peers() override {
    if (local_ != nullptr) Part{*local_}.look_at_peers();
    on_net([this] { Part{*net_}.look_at_peers(); });
  }
  // Reports a network failure in the node before anyone acts on it, since ranks that read a neighbour's memory check
  // there.
  template <class Look>
  void on_net(Look look) {
    try {
      look();
    } catch (const Error& e) {
      if (local_ != nullptr) Part{*local_}.publish({e.code(), e.what(), e.rank()});
      throw;
    }
  }

  std::unique_ptr<AsyncCommunicator> make_group(int rank, Membership membership, const CommOptions& options) override {
    const std::vector<int>& members = membership.ranks;
    const auto node_of_member = [&](int i) { return node_of(members[i]); };
    const int size = narrow<int>(std::ssize(members));
    int ranks = 1;
    while (ranks < size && node_of_member(ranks) == node_of_member(0)) ++ranks;
    if (ranks == size) {
      Part local{*local_};
      return local.make_group(rank, std::move(membership), options);
    }
    // Equal numbers of neighbours on every node, nodes in ascending order.
    bool composed = ranks > 1 && size % ranks == 0;
    for (int i = 1; composed && i < size; ++i)
      composed =
          i % ranks == 0 ? node_of_member(i) > node_of_member(i - 1) : node_of_member(i) == node_of_member(i - 1);
    if (composed) return std::make_unique<ComposedCommunicator>(rank, ranks, options, membership, *this);
    return Part{*net_}.make_group(rank, std::move(membership), options);
  }

  const int nodes_, node_;                        // number of nodes, and this one's number
  const int ranks_, lane_;                        // ranks per node, and this one's number
  ComposedCommunicator* const ground_ = nullptr;  // the world, for a group

  // Before the parts, which may use them until they end.
  std::vector<OpSegment> segments_;        // of the local part in a round
  std::vector<std::byte> staging_;         // two halves
  std::vector<OpSegment> parts_;           // data that fold_here() moves,
  std::vector<std::byte> slices_;          // its destination,
  std::vector<const std::byte*> sources_;  // and the sources of the fold
  std::array<Round, kDepth> rounds_;
  std::vector<u64> imbalances_;      // of the sizes of an all_to_allv, of all ranks
  std::atomic<bool> awaits_{false};  // this thread waits for a ticket of onward_ or returns_

  std::unique_ptr<AsyncCommunicator> net_;    // all ranks
  std::unique_ptr<AsyncCommunicator> local_;  // this node's ranks
  // This lane's communicators: for calls in this thread, for overlapped work, and for sums returning along a chain.
  std::unique_ptr<AsyncCommunicator> lanes_, onward_, returns_;
};

}  // namespace

std::unique_ptr<Communicator> make_composed_communicator(std::string_view job, int local_rank, int local_size,
                                                         i64 shared_bytes, const CommOptions& options, bool or_mpi) {
  DS_ASSERT(local_size >= 1 && local_rank >= 0 && local_rank < local_size);
  std::unique_ptr<AsyncCommunicator> net = make_mpi_world(options);
  struct Place {
    i64 local_rank, local_size, needed, free;
  };
  std::vector<Place> places(static_cast<size_t>(net->size()));
  places[net->rank()] = {local_rank, local_size, std::max(shared_bytes, shm_needed_bytes(local_size, {})),
                         shm_free_bytes_here()};
  const AllGatherSegment all{places.data(), sizeof(Place)};
  net->all_gather({&all, 1}, "nodes").wait();
  try {
    for (int r = 0; r < net->size(); ++r) {
      const Place& its = places[r];
      const bool even = its.local_size == local_size && net->size() % local_size == 0;
      if (or_mpi && (!even || local_size == 1 || its.local_rank != r % local_size || its.needed > its.free)) return net;
      DS_CHECK(even, Errc::Config,
               "\"shm+mpi\" needs equal numbers of ranks on every node: of {} ranks, rank {} is one of {}, rank {} one "
               "of {}; "
               "take \"mpi\"",
               net->size(), net->rank(), local_size, r, its.local_size);
      DS_CHECK(its.local_rank == r % local_size, Errc::Config,
               "\"shm+mpi\" needs consecutive ranks on each node: rank {} is number {} of the {} of its node", r,
               its.local_rank, local_size);
      DS_CHECK(its.needed <= its.free, Errc::OutOfMemory,
               "\"shm+mpi\": the node of rank {} needs about {} bytes of shared memory, but its /dev/shm has {} bytes "
               "free;  "
               "enlarge it, or use \"mpi\"",
               r, its.needed, its.free);
    }
  } catch (const Error& e) {
    net->abort(e);
    throw;
  }
  const int node = net->rank() / local_size;
  return std::make_unique<ComposedCommunicator>(
      std::move(net), local_rank, local_size, options,
      [&](const CommOptions& o, Membership part, AsyncCommunicator& network) {
        const auto look = [&network] { network.look_for_failures(); };
        auto arena = make_shm_arena(fmt::format("{}-node{}", job, node), local_rank, local_size, node * local_size,
                                    options.timeout_s, look);
        return make_shared_communicator("shm", std::move(arena), o, std::move(part));
      });
}

void run_composed_threads(int nodes, int local_size, const CommOptions& options,
                          const std::function<void(Communicator&)>& body) {
  std::mutex mutex;
  std::vector<std::unique_ptr<Arena>> net = make_thread_arenas(nodes * local_size), local;
  for (int m = 0; m < nodes; ++m) std::ranges::move(make_thread_arenas(local_size), std::back_inserter(local));
  run_threads(nodes * local_size, options, [&](Communicator& threads) {
    const auto r = static_cast<size_t>(threads.rank());
    auto world = std::make_unique<ComposedCommunicator>(
        make_shared_communicator("threads", std::move(net[r]), options), threads.rank() % local_size, local_size,
        options, [&](const CommOptions& o, Membership part, AsyncCommunicator&) {
          return make_shared_communicator("threads", std::move(local[r]), o, std::move(part));
        });
    try {
      body(*world);
    } catch (const Error& e) {
      world->abort(e);
      throw;
    }
  });
}

}  // namespace ds
