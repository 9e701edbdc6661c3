// SPDX-License-Identifier: Apache-2.0
#pragma once
// A program of compressed collectives with odd sizes and all types, over all ways to cut the ranks into nodes. Every
// rank computes what all ranks send, serially and with the reference kernels, and compares its results bitwise.
// Whatever passes it gives the same bits as everything else that does.

#include <functional>

#include "comm/nonzero_blocks.h"
#include "comm/one_bit.h"
#include "comm/quantized.h"
#include "comm/secondary_shard.h"
#include "comm_exercise.h"

namespace ds::test {

using Floats = std::vector<float>;

// The ranks, and where they compute: `over` makes a communicator over the device's memory, and is empty on the CPU.
struct Ranks {
  Communicator& host;
  Device& device;
  std::function<std::unique_ptr<Communicator>(Communicator&)> over = {};

  int rank() const { return host.rank(); }
  int size() const { return host.size(); }
};

// A communicator over the device's memory, of all ranks or of some.
class Group {
 public:
  explicit Group(const Ranks& r) : over_(r.over ? r.over(r.host) : nullptr), used_(over_ ? over_.get() : &r.host) {}
  Group(const Ranks& r, const std::vector<int>& members, std::string_view name)
      : host_(r.host.group(members, name, {.timeout_s = 60})),
        over_(r.over ? r.over(*host_) : nullptr),
        used_(over_ ? over_.get() : host_.get()) {}

  Communicator& operator*() const { return *used_; }
  Communicator* operator->() const { return used_; }

 private:
  std::unique_ptr<Communicator> host_, over_;
  Communicator* used_;
};

// Elements in device memory, written and read as floats.
class Array {
 public:
  Array(Device& device, DType dtype, i64 n)
      : device_(device),
        n_(n),
        dtype_(dtype),
        memory_(device_buffer(device, ledger_, Tag::Workspace, n * dtype_bytes(dtype))) {}

  operator TensorView() const { return TensorView::of(memory_.data(), dtype_, {n_}); }  // NOLINT: used as one
  TensorView part(i64 begin, i64 count) const { return TensorView(*this).rows(begin, count); }
  void set(std::span<const float> x) {
    std::vector<u8> bytes(static_cast<size_t>(memory_.bytes()));
    for (i64 i = 0; i < n_; ++i) store(bytes.data(), i, x[i], dtype_);
    if (n_ > 0) device_.upload(memory_.data(), bytes.data(), memory_.bytes());
  }
  Floats get() const { return floats_of(device_, *this); }

  static Floats floats_of(Device& device, const TensorView& v) {
    std::vector<u8> bytes(static_cast<size_t>(v.bytes()));
    if (!bytes.empty()) device.download(bytes.data(), v.data, v.bytes());
    Floats x(static_cast<size_t>(v.numel()));
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = v.dtype == DType::BF16  ? to_float(reinterpret_cast<const bf16*>(bytes.data())[i])
             : v.dtype == DType::F16 ? to_float(reinterpret_cast<const f16*>(bytes.data())[i])
                                     : reinterpret_cast<const float*>(bytes.data())[i];
    }
    return x;
  }

 private:
  MemoryLedger ledger_;
  Device& device_;
  i64 n_;
  DType dtype_;
  Buffer memory_;
};

inline void require_same(std::span<const float> got, std::span<const float> want, std::string_view what) {
  require(got.size() == want.size(), what);
  for (size_t i = 0; i < got.size(); ++i)
    if (!same_bits(got[i], want[i])) throw std::runtime_error(fmt::format("wrong result: {}, element {}", what, i));
}

// n numbers of a rank, as they are in `type`.
inline Floats inputs(int rank, i64 n, DType type, int salt) {
  Floats x(static_cast<size_t>(n));
  for (i64 i = 0; i < n; ++i) x[i] = as_sent(value(rank, i, salt), type);
  return x;
}

// ---- the serial oracle ----

class Oracle {
 public:
  // The values that the codes of x decode to; `error`: as many elements as x, or empty.
  Floats quantized(std::span<const float> x, std::span<float> error, CodeFormat format, ErrorFeedback feedback) {
    const i64 n = std::ssize(x);
    Floats y(x.size());
    std::vector<u8> codes(static_cast<size_t>(format.code_bytes(n)));
    Floats scales(static_cast<size_t>(format.num_blocks(n)));
    const TensorView code_view = TensorView::of(codes.data(), DType::U8, {1, std::ssize(codes)});
    const TensorView scale_view = TensorView::of(scales.data(), DType::F32, {1, std::ssize(scales)});
    const auto row = [&](const float* p) { return TensorView::of(const_cast<float*>(p), DType::F32, {1, n}); };
    ref_ops().quantize(code_view, scale_view, row(x.data()), error.empty() ? TensorView{} : row(error.data()), format,
                       feedback, stream_);
    ref_ops().dequantize(row(y.data()), code_view, scale_view, format, stream_);
    return y;
  }
  // The root mean square of x as quantize_signs takes it.
  float scale_of(Floats& x) {
    i64 largest = 0, sum[2] = {};
    const TensorView v = TensorView::of(x.data(), DType::F32, {std::ssize(x)});
    ref_ops().max_abs(TensorView::of(&largest, DType::I64, {1}), v, stream_);
    ref_ops().sum_squares(TensorView::of(sum, DType::I64, {2}), v, TensorView::of(&largest, DType::I64, {1}), stream_);
    return sign_scale(largest, {sum[0], sum[1]}, std::ssize(x));
  }

 private:
  ThreadPool pool_{1};
  Stream stream_{.pool = &pool_};
};

// All ranks of a QuantizedReduceScatter, with the errors of their hops.
class ReduceScatterOracle {
 public:
  ReduceScatterOracle(i64 nodes, i64 local, i64 n, CodeFormat format, bool feedback)
      : M_(nodes), L_(local), n_(n), format_(format) {
    if (!feedback) return;
    node_errors_.assign(static_cast<size_t>(M_ * L_), Floats(static_cast<size_t>(M_ * L_ * n)));
    across_errors_.assign(static_cast<size_t>(M_ * L_), Floats(static_cast<size_t>(M_ * n)));
  }

  // sources[r]: of rank r. The sums, slice after slice.
  Floats run(const std::vector<Floats>& sources, ErrorFeedback feedback) {
    Floats result;
    for (i64 r = 0; r < M_ * L_; ++r) {
      const i64 l = r % L_;
      Floats total;
      for (i64 m = 0; m < M_; ++m) {  // of node m, for rank r, by its rank m*L + l
        Floats sum;
        for (i64 p = m * L_; p < (m + 1) * L_; ++p) {
          const auto part = std::span(sources[p]).subspan(r * n_, size());
          add(sum, L_ > 1 ? oracle_.quantized(part, error(node_errors_, p, r), format_, feedback)
                          : Floats(part.begin(), part.end()));
        }
        if (M_ > 1) sum = oracle_.quantized(sum, error(across_errors_, m * L_ + l, r / L_), format_, feedback);
        add(total, sum);
      }
      result.insert(result.end(), total.begin(), total.end());
    }
    return result;
  }

 private:
  size_t size() const { return static_cast<size_t>(n_); }
  std::span<float> error(std::vector<Floats>& errors, i64 rank, i64 slice) {
    if (errors.empty()) return {};
    return std::span(errors[rank]).subspan(static_cast<size_t>(slice) * size(), size());
  }
  static void add(Floats& sum, const Floats& x) {
    if (sum.empty()) {
      sum = x;
    } else {
      for (size_t i = 0; i < x.size(); ++i) sum[i] += x[i];
    }
  }

  Oracle oracle_;
  i64 M_, L_, n_;
  CodeFormat format_;
  std::vector<Floats> node_errors_, across_errors_;
};

// All ranks of a OneBitAllReduce.
class OneBitOracle {
 public:
  OneBitOracle(i64 ranks, i64 n)
      : P_(ranks),
        n_(n),
        worker_(static_cast<size_t>(ranks), Floats(static_cast<size_t>(n))),
        server_(static_cast<size_t>(n)) {}

  Floats run(const std::vector<Floats>& x) {
    Floats mean(static_cast<size_t>(n_));
    for (size_t r = 0; r < x.size(); ++r) {
      Floats& y = worker_[r];
      for (size_t i = 0; i < y.size(); ++i) y[i] = x[r][i] + y[i];
      const float a = oracle_.scale_of(y);
      for (size_t i = 0; i < y.size(); ++i) {
        const float sent = y[i] < 0 ? -a : a;
        y[i] -= sent;
        mean[i] = r == 0 ? sent : mean[i] + sent;
      }
    }
    const i64 chunk = (n_ + 8 * P_ - 1) / (8 * P_) * 8;
    Floats result(mean.size());
    for (i64 begin = 0; begin < n_; begin += chunk) {
      const auto first = static_cast<size_t>(begin), last = static_cast<size_t>(std::min(n_, begin + chunk));
      Floats z;
      for (size_t i = first; i < last; ++i) z.push_back(server_[i] + mean[i] / static_cast<float>(P_));
      const float c = oracle_.scale_of(z);
      for (size_t i = first; i < last; ++i) {
        result[i] = z[i - first] < 0 ? -c : c;
        server_[i] = z[i - first] - result[i];
      }
    }
    return result;
  }
  const Floats& worker_error(i64 rank) const { return worker_[rank]; }
  const Floats& server_errors() const { return server_; }  // of all chunks

 private:
  Oracle oracle_;
  i64 P_, n_;
  std::vector<Floats> worker_;
  Floats server_;
};

// ---- the program ----

// The size of one message of n elements: the formula of the documentation, written out.
inline i64 coded_bytes(i64 n, CodeFormat format) {
  return ((n * format.bits + 7) / 8 + 3) / 4 * 4 + 4 * ((n + format.block - 1) / format.block);
}
inline i64 sent(Communicator& c, const std::string& tag) { return c.counts()[tag].bytes; }

inline void exercise_quantized_all_gather(const Ranks& ranks, i64 n, DType type, CodeFormat format, bool within,
                                          int salt) {
  const Group c(ranks);
  const i64 P = ranks.size(), rank = ranks.rank();
  MemoryLedger ledger;
  QuantizedAllGather op(*c, ranks.device, ledger, Tag::Comm, n + 3, format);
  const i64 taken = ledger.num_allocations();
  const Floats own = inputs(static_cast<int>(rank), n, type, salt);
  Array full(ranks.device, type, P * n), apart(ranks.device, type, n);
  apart.set(own);
  if (within) {
    Floats all(static_cast<size_t>(P * n), 77.0f);
    std::copy(own.begin(), own.end(), all.begin() + rank * n);
    full.set(all);
  }
  c->reset_counts();
  op.start(within ? full.part(rank * n, n) : TensorView(apart), "t.qwz");
  op.finish(full);
  Floats want;
  Oracle oracle;
  for (int q = 0; q < P; ++q) {
    for (float x : oracle.quantized(inputs(q, n, type, salt), {}, format, {})) want.push_back(as_sent(x, type));
  }
  require_same(full.get(), want, "quantised all-gather");
  require_same(apart.get(), own, "the shard");
  require(sent(*c, "t.qwz") == (P - 1) * coded_bytes(n, format), "bytes of the quantised all-gather");
  require(ledger.num_allocations() == taken && ledger.current(Tag::Comm) == P * coded_bytes(n + 3, format),
          "memory of the quantised all-gather");
}

// Ranks of `nodes` nodes; three calls, with error feedback if wanted.
inline void exercise_quantized_reduce_scatter(const Ranks& ranks, i64 nodes, i64 n, DType type, CodeFormat format,
                                              bool feedback, int salt) {
  const i64 P = ranks.size(), L = P / nodes, rank = ranks.rank();
  std::vector<int> local, equal;
  for (i64 l = 0; l < L; ++l) local.push_back(static_cast<int>(rank / L * L + l));
  for (i64 m = 0; m < nodes; ++m) equal.push_back(static_cast<int>(m * L + rank % L));
  const Group node(ranks, local, "node"), across(ranks, equal, "across");
  MemoryLedger ledger;
  QuantizedReduceScatter op(L > 1 ? &*node : nullptr, *across, ranks.device, ledger, Tag::Comm, n + 5, format);
  // The second of three gradients is reduced.
  LocoErrors errors(op, ledger, Tag::GradAccum, {n + 2, n, 3}, {.decay = 0.75f, .reset_period = 2});
  const i64 taken = ledger.num_allocations();
  ReduceScatterOracle oracle(nodes, L, n, format, feedback);
  Array source(ranks.device, type, P * n), target(ranks.device, DType::F32, n);
  Floats want(static_cast<size_t>(n));
  node->reset_counts();
  across->reset_counts();
  for (int step = 0; step < 4; ++step) {
    ErrorFeedback expected;
    if (feedback) expected = {.scale = step == 2 ? 0.0f : step == 1 ? 0.5f : 1.0f, .decay = 0.75f};
    std::vector<Floats> sources;
    for (int q = 0; q < P; ++q) sources.push_back(inputs(q, P * n, type, salt + step));
    const Floats sums = oracle.run(sources, expected);
    source.set(sources[rank]);
    if (step == 1) errors.rescale(0.5f);
    const bool accumulate = step > 1;
    op.start(source, "t.qgz", feedback ? &errors : nullptr, 1);
    if (P > 1) source.set(sources[(rank + 1) % P]);  // what has begun does not see it
    op.finish(target, accumulate);
    for (size_t i = 0; i < want.size(); ++i) {
      const float sum = sums[static_cast<size_t>(rank * n) + i];
      want[i] = accumulate ? want[i] + sum : sum;
    }
    require_same(target.get(), want, fmt::format("quantised reduce-scatter of {} nodes, step {}", nodes, step));
  }
  const i64 calls = n > 0 ? 4 : 0;
  require(sent(*node, "t.qgz") == calls * (L - 1) * nodes * coded_bytes(n, format), "bytes of the hop in the node");
  require(sent(*across, "t.qgz") == calls * (nodes - 1) * coded_bytes(n, format), "bytes of the hop across nodes");
  const bool node_hop = L > 1, across_hop = nodes > 1;
  require(ledger.num_allocations() == taken, "allocations of the quantised reduce-scatter");
  require(ledger.current(Tag::Comm) == 2 * (P * node_hop + nodes * across_hop) * coded_bytes(n + 5, format) +
                                           nodes * (n + 5) * 4 * (node_hop && across_hop),
          "memory of the quantised reduce-scatter");
  require(ledger.current(Tag::GradAccum) == (P * node_hop + nodes * across_hop) * (2 * n + 5) * 4,
          "memory of its errors");
}

// Ranks in groups of `size`, which keep what a gather of all gave them, quantised or not.
inline void exercise_secondary_shard(const Ranks& ranks, i64 size, i64 n, DType type, bool quantised, int salt) {
  const i64 P = ranks.size(), rank = ranks.rank();
  std::vector<int> members;
  for (i64 i = 0; i < size; ++i) members.push_back(static_cast<int>(rank / size * size + i));
  const Group world(ranks), group(ranks, members, "hpz");
  MemoryLedger ledger;
  SecondaryShard secondary(*group, ranks.device, ledger, Tag::Params, P * n, type);
  require(ledger.current(Tag::Params) == P * n / size * dtype_bytes(type), "memory of the secondary shard");
  QuantizedAllGather primary(*world, ranks.device, ledger, Tag::Comm, n);
  Array full(ranks.device, type, P * n);
  group->reset_counts();
  for (int step = 0; step < 2; ++step) {
    Floats all(static_cast<size_t>(P * n));
    const Floats own = inputs(static_cast<int>(rank), n, type, salt + step);
    std::copy(own.begin(), own.end(), all.begin() + rank * n);
    full.set(all);
    if (quantised) {
      primary.start(full.part(rank * n, n), "t.qwz");
      primary.finish(full);
    } else {
      const AllGatherSegment segment{TensorView(full).data, n * dtype_bytes(type)};
      world->all_gather({&segment, 1}, "t.gather").wait();
    }
    const Floats forward = full.get();
    require(!secondary.kept(), "a secondary shard before it was kept");
    secondary.keep(full);
    for (int backward = 0; backward < 2; ++backward) {
      full.set(Floats(all.size(), 1e9f));
      secondary.gather(full, "t.hpz").wait();
      require_same(full.get(), forward, "what the backward pass gathers");
    }
    secondary.invalidate();
    bool refused = false;
    try {
      secondary.gather(full, "t.hpz").wait();
    } catch (const Error&) {
      refused = true;
    }
    require(refused, "a secondary shard that was invalidated is not gathered");
  }
  require(sent(*group, "t.hpz") == 4 * (size - 1) * (P * n / size) * dtype_bytes(type), "bytes of the secondary shard");
}

inline void exercise_one_bit(const Ranks& ranks, i64 n, int salt) {
  const Group c(ranks);
  const i64 P = ranks.size(), rank = ranks.rank();
  MemoryLedger ledger;
  OneBitAllReduce op(*c, ranks.device, ledger, Tag::Optimizer, n);
  const i64 taken = ledger.num_allocations(), chunk = (n + 8 * P - 1) / (8 * P) * 8;
  require(op.slice_elems() == chunk, "the size of a slice");
  OneBitOracle oracle(P, n);
  Array x(ranks.device, DType::F32, n);
  c->reset_counts();
  const int kSteps = 4;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<Floats> all;
    for (int q = 0; q < P; ++q) all.push_back(inputs(q, n, DType::F32, salt + step));
    x.set(all[rank]);
    op.run(x, "t.one_bit");
    require_same(x.get(), oracle.run(all), fmt::format("1-bit all-reduce, step {}", step));
    require_same(Array::floats_of(ranks.device, op.worker_error()), oracle.worker_error(rank), "the worker's error");
    const auto first = static_cast<size_t>(std::min(n, rank * chunk)),
               last = static_cast<size_t>(std::min(n, (rank + 1) * chunk));
    require_same(Array::floats_of(ranks.device, op.server_error()),
                 std::span(oracle.server_errors()).subspan(first, last - first), "the server's error");
  }
  require(sent(*c, "t.one_bit") == kSteps * 2 * (P - 1) * ((chunk / 8 + 3) / 4 * 4 + 4),
          "bytes of the 1-bit all-reduce");
  const i64 own_chunk = op.server_error().numel(), message = (chunk / 8 + 3) / 4 * 4 + 4;
  require(
      ledger.num_allocations() == taken && ledger.current(Tag::Optimizer) == 4 * (n + own_chunk) + 24 + 2 * P * message,
      "memory of the 1-bit all-reduce");
}

// Vectors of which one block in `one_in` is not zero, other ones on each rank: the bits of dense sums, and as many
// bytes as there are blocks; none where the dense collective sends less.
inline void exercise_nonzero_blocks(const Ranks& ranks, i64 blocks, int one_in, i64 room, DType type, int salt) {
  constexpr i64 kBlock = NonzeroBlocks::kBlock;
  const Group c(ranks);
  const i64 P = ranks.size(), rank = ranks.rank(), n = blocks * kBlock;
  MemoryLedger ledger;
  NonzeroBlocks op(*c, ranks.device, ledger, Tag::Buckets, n, 4, room);
  const i64 taken = ledger.num_allocations();
  const auto is_set = [&](i64 q, i64 b) { return (b * 7 + q * 3 + salt) % one_in == 0; };
  const auto vector_of = [&](i64 q) {
    Floats x = inputs(static_cast<int>(q), P * n, type, salt);
    for (i64 b = 0; b < P * blocks; ++b) {
      if (!is_set(q, b)) std::fill_n(x.begin() + b * kBlock, kBlock, 0.0f);
    }
    return x;
  };
  Array source(ranks.device, type, P * n), target(ranks.device, DType::F32, n);
  source.set(vector_of(rank));
  Floats want(static_cast<size_t>(n));
  for (const bool accumulate : {false, true}) {
    c->reset_counts();
    i64 most = 0;  // of a rank
    for (i64 q = 0; q < P; ++q) {
      i64 of_rank = 0;
      for (i64 b = 0; b < P * blocks; ++b) of_rank += is_set(q, b);
      most = std::max(most, of_rank);
      const Floats x = vector_of(q);
      for (i64 i = 0; i < n; ++i) want[i] = q > 0 || accumulate ? want[i] + x[rank * n + i] : x[rank * n + i];
    }
    const bool saves = op.saves(source, P * blocks, "t.sparse");
    const i64 told = sent(*c, "t.sparse"), bytes = most * (4 + kBlock * dtype_bytes(type));
    require(P > 1 || !saves, "one rank sends nothing");
    require(saves || P == 1 || bytes * one_in >= n * dtype_bytes(type), "what is little is sent as such");
    if (!saves) return;
    op.reduce_scatter(source, target, accumulate, "t.sparse");
    const Floats got = target.get();
    for (i64 i = 0; i < n; ++i)
      require(same_bits(got[i], want[i]) || (got[i] == 0 && want[i] == 0), fmt::format("sparse sums, element {}", i));
    // Exchanges have room for the rank that holds most in each of them.
    const i64 now = sent(*c, "t.sparse") - told;
    require(now >= (P - 1) * bytes && (room < P * blocks || now == (P - 1) * bytes), "bytes of sparse sums");
  }
  Floats full(static_cast<size_t>(P * n)), all(full.size());
  for (i64 q = 0; q < P; ++q) {
    const Floats x = vector_of(q);
    std::copy_n(x.begin() + q * n, n, all.begin() + q * n);
  }
  std::copy_n(all.begin() + rank * n, n, full.begin() + rank * n);
  std::replace(full.begin(), full.begin() + rank * n, 0.0f, 5.0f);
  source.set(full);
  if (op.all_gather(source, blocks, "t.sparse")) require_same(source.get(), all, "sparse all-gather");
  require(ledger.num_allocations() == taken, "allocations of sparse collectives");
}

inline void exercise_compressed(const Ranks& ranks, i64 big = 3001) {
  int salt = 1000;
  const i64 P = ranks.size();
  bool other = false;
  for (const DType type : {DType::F32, DType::BF16, DType::F16}) {
    for (const CodeFormat format : {CodeFormat{8, 256}, CodeFormat{4, 8}}) {
      for (const i64 n : {i64{1}, i64{8}, i64{333}, big}) {
        exercise_quantized_all_gather(ranks, n, type, format, other = !other, ++salt);
      }
    }
    for (i64 nodes = 1; nodes <= P; ++nodes) {
      if (P % nodes != 0) continue;
      for (const i64 n : {i64{0}, i64{1}, i64{77}, big / P}) {
        exercise_quantized_reduce_scatter(ranks, nodes, n, type, {4, 64}, other = !other, salt += 10);
      }
      exercise_quantized_reduce_scatter(ranks, nodes, 43, type, {8, 16}, true, salt += 10);
      exercise_secondary_shard(ranks, nodes, 37, type, other = !other, salt += 10);
    }
  }
  for (const auto& [type, room] :
       {std::pair(DType::F32, i64{1}), std::pair(DType::BF16, 6 * P), std::pair(DType::F16, i64{1000})}) {
    exercise_nonzero_blocks(ranks, 40, 16, room, type, ++salt);
    exercise_nonzero_blocks(ranks, 9, 2, room, type, ++salt);
  }
  for (const i64 n : {i64{0}, i64{1}, i64{7}, i64{8}, i64{9}, 8 * P + 1, i64{1000}, big}) {
    exercise_one_bit(ranks, n, salt += 10);
  }
}

// On the CPU.
inline void exercise_compressed(Communicator& c, i64 big = 3001) {
  const auto device = make_cpu_device(*cpu_ops(), 1);
  exercise_compressed(Ranks{c, *device}, big);
}

}  // namespace ds::test
