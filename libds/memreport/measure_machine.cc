// SPDX-License-Identifier: Apache-2.0
// The rates of a machine: every op of a training step called by itself, on all ranks of a node at once, and its cost
// taken from the table that counts (plan/op_tally.h), so that a rate and a tally mean the same. Each call takes other
// memory than the ones before: in a step most of what an op reads was last touched many megabytes ago, and with
// operands that stay in the first caches products are a fifth faster than in training, and sums of columns four times.

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <exception>
#include <mutex>
#include <thread>

#include "base/clock.h"
#include "base/thread.h"
#include "memreport/machine.h"
#include "probe/host.h"

namespace ds::memreport {
namespace {

constexpr i64 kMemoryBytes = i64{192} << 20;  // much more than caches hold
constexpr double kSample = 2e-4;              // seconds; a sample is so many calls, for clocks and synchronisation

// Cuts tensors from memory one after the other. What calls only read, and must have sense, lies at its end.
class Cutter {
 public:
  explicit Cutter(std::byte* memory) : base_(memory), at_(memory) {}
  TensorView operator()(DType dtype, std::initializer_list<i64> shape) {
    const TensorView v = TensorView::of(at_, dtype, shape);
    at_ += align_up(v.bytes(), 64);
    return v;
  }
  TensorView ids() const { return TensorView::of(base_ + kIdsAt, DType::I32, {kRows}); }
  // The offsets of kGroups groups that share the rows of this size equally.
  TensorView offsets(size_t size) const {
    return TensorView::of(base_ + kOffsetsAt + narrow<i64>(size) * 256, DType::I32, {kGroups + 1});
  }
  TensorView max_abs() const { return TensorView::of(base_ + kVerdictAt + 256, DType::I64, {1}); }
  const GradVerdict* verdict() const { return reinterpret_cast<const GradVerdict*>(base_ + kVerdictAt); }
  // Before a call that may take kLargestCall bytes.
  void turn() {
    if (at_ - base_ > kIdsAt - kLargestCall) at_ = base_;
  }

  static constexpr i64 kRows = 256;
  static constexpr i64 kLargestCall = i64{100} << 20;
  static constexpr i64 kIdsAt = kMemoryBytes - (i64{1} << 20), kOffsetsAt = kIdsAt + 4096,
                       kVerdictAt = kMemoryBytes - 4096;
  static constexpr i64 kGroups = 4;  // of products of experts
  static constexpr i64 kGroupRows[] = {32, 128, 320, 1024};

 private:
  std::byte *base_, *at_;
};

// A measured call: one op, perhaps several times, on tensors that it cuts.
struct Call {
  std::string op;
  DType dtype;
  std::function<void(const OpTable&, Cutter&, Stream&)> run;
};

constexpr i64 kRows = Cutter::kRows, kWidth = 256;  // of what passes over rows

std::vector<Call> products(DType t, bool host) {
  std::vector<Call> calls;
  std::vector<i64> sizes = {32, 128, 320};
  if (!host) sizes.insert(sizes.end(), {1024, 2048, 4096});
  for (const i64 n : sizes) {
    calls.push_back({"matmul", t, [=](const OpTable& ops, Cutter& cut, Stream& stream) {
                       // Forward and the two gradients, of a weight in either orientation.
                       for (const MatmulParams& p : {MatmulParams{}, {.trans_b = true}, {.trans_a = true}}) {
                         const TensorView c = cut(t, {n, n}), a = cut(t, {n, n}), b = cut(t, {n, n});
                         ops.matmul(c, a, b, {}, {}, {}, p, stream);
                       }
                     }});
  }
  for (const i64 T : {64, 512}) {
    for (const bool backward : {false, true}) {
      calls.push_back(
          {backward ? "attention_bwd" : "attention_fwd", t, [=](const OpTable& ops, Cutter& cut, Stream& stream) {
             const auto heads = [&] { return cut(t, {host ? 1 : 8, T, host ? 4 : 16, 64}); };
             const TensorView q = heads(), k = heads(), v = heads(), o = heads();
             const TensorView lse = cut(DType::F32, {q.dim(0), q.dim(2), T});
             if (!backward) return ops.attention_fwd(o, lse, q, k, v, {.scale = 0.125f}, stream);
             const TensorView dq = heads(), dk = heads(), dv = heads(), dout = heads();
             ops.attention_bwd(dq, dk, dv, dout, q, k, v, o, lse, {.scale = 0.125f}, stream);
           }});
    }
  }
  return calls;
}

// Products of experts, forward and the two gradients.
std::vector<Call> grouped_products(DType t, bool host) {
  constexpr i64 G = Cutter::kGroups;
  std::vector<Call> calls;
  for (size_t size = 0; size < std::size(Cutter::kGroupRows) - (host ? 1 : 0); ++size) {
    const i64 n = Cutter::kGroupRows[size];
    calls.push_back({"grouped_matmul", t, [=](const OpTable& ops, Cutter& cut, Stream& stream) {
                       for (const bool trans_b : {true, false}) {
                         const TensorView c = cut(t, {G * n, n}), a = cut(t, {G * n, n}), b = cut(t, {G, n, n});
                         ops.grouped_matmul(c, a, b, cut.offsets(size), trans_b, stream);
                       }
                     }});
    calls.push_back({"grouped_matmul_grad", t, [=](const OpTable& ops, Cutter& cut, Stream& stream) {
                       const TensorView c = cut(t, {G, n, n}), a = cut(t, {G * n, n}), b = cut(t, {G * n, n});
                       ops.grouped_matmul_grad(c, a, b, cut.offsets(size), false, stream);
                     }});
  }
  return calls;
}

// Products in FP8, forward and the two gradients: their operands differ in blocks alone.
std::vector<Call> fp8_products(bool host) {
  std::vector<Call> calls;
  std::vector<i64> sizes = {128, 384};
  if (!host) sizes.insert(sizes.end(), {1024, 2048, 4096});
  for (const i64 n : sizes) {
    calls.push_back({"matmul", DType::F8E4M3, [=](const OpTable& ops, Cutter& cut, Stream& stream) {
                       for (const Fp8Blocks blocks : {Fp8Blocks::Squares, Fp8Blocks::Squares, Fp8Blocks::Rows}) {
                         const Fp8Layout rows{n, n, Fp8Blocks::Rows}, other{n, n, blocks};
                         const auto scales = [&](const Fp8Layout& l) {
                           return cut(DType::F32, {l.scale_rows(), l.scale_columns()});
                         };
                         const TensorView c = cut(DType::BF16, {n, n}), a = cut(DType::F8E4M3, {n, n}),
                                          b = cut(DType::F8E4M3, {n, n}), a_scales = scales(rows),
                                          b_scales = scales(other);
                         ops.matmul_fp8(c, a, a_scales, b, b_scales, {}, {}, {Fp8Blocks::Rows, blocks}, stream);
                       }
                     }});
  }
  for (const bool transposed : {false, true}) {
    calls.push_back({"quantize_fp8", DType::BF16, [=](const OpTable& ops, Cutter& cut, Stream& stream) {
                       const Fp8Layout layout{kRows, kWidth, Fp8Blocks::Rows};
                       const TensorView x = cut(DType::BF16, {kRows, kWidth}),
                                        codes = cut(DType::F8E4M3, {kRows, kWidth}),
                                        scales = cut(DType::F32, {layout.scale_rows(), layout.scale_columns()});
                       ops.quantize_fp8(codes, scales, x, layout.blocks, transposed, stream);
                     }});
  }
  // The ops of a matrix that travels as codes.
  const auto part = [&](std::string op, auto run) {
    calls.push_back({std::move(op), DType::BF16, [=](const OpTable& ops, Cutter& cut, Stream& stream) {
                       const TensorView x = cut(DType::BF16, {kRows * kWidth}),
                                        codes = cut(DType::F8E4M3, {kRows * kWidth}),
                                        maxima = cut(DType::I64, {kRows / kFp8Block, kWidth / kFp8Block});
                       run(ops, x, codes, maxima, stream);
                     }});
  };
  part("max_abs_fp8", [](const OpTable& ops, const TensorView& x, const TensorView&, const TensorView& maxima,
                         Stream& stream) { ops.max_abs_fp8(maxima, x, 0, stream); });
  part("encode_fp8", [](const OpTable& ops, const TensorView& x, const TensorView& codes, const TensorView& maxima,
                        Stream& stream) { ops.encode_fp8(codes, x, maxima, 0, stream); });
  part("decode_fp8", [](const OpTable& ops, const TensorView& x, const TensorView& codes, const TensorView& maxima,
                        Stream& stream) { ops.decode_fp8(x, codes, maxima, 0, stream); });
  return calls;
}

// Ops that pass over [rows, width] of the work type and compute on the way.
std::vector<Call> passes(DType t) {
  std::vector<Call> calls;
  const auto add = [&](std::string op, auto&& run) {
    calls.push_back({std::move(op), t, [=](const OpTable& ops, Cutter& cut, Stream& stream) {
                       const auto rows = [&] { return cut(t, {kRows, kWidth}); };
                       const auto f32 = [&](i64 n) { return cut(DType::F32, {n}); };
                       run(ops, stream, rows, f32, cut);
                     }});
  };
  add("layernorm_fwd", [](const OpTable& ops, Stream& s, auto rows, auto f32, const Cutter&) {
    const TensorView y = rows(), x = rows(), w = rows().rows(0, 1).reshaped({kWidth});
    ops.layernorm_fwd(y, f32(kRows), f32(kRows), x, w, w, 1e-5f, s);
  });
  add("layernorm_bwd", [](const OpTable& ops, Stream& s, auto rows, auto f32, const Cutter&) {
    const TensorView dx = rows(), dy = rows(), onto = rows(), x = rows(), w = rows().rows(0, 1).reshaped({kWidth});
    ops.layernorm_bwd(dx, f32(kWidth), f32(kWidth), dy, onto, x, w, f32(kRows), f32(kRows), s);
  });
  add("rmsnorm_fwd", [](const OpTable& ops, Stream& s, auto rows, auto f32, const Cutter&) {
    const TensorView y = rows(), x = rows(), w = rows().rows(0, 1).reshaped({kWidth});
    ops.rmsnorm_fwd(y, f32(kRows), x, w, 1e-5f, s);
  });
  add("rmsnorm_bwd", [](const OpTable& ops, Stream& s, auto rows, auto f32, const Cutter&) {
    const TensorView dx = rows(), dy = rows(), onto = rows(), x = rows(), w = rows().rows(0, 1).reshaped({kWidth});
    ops.rmsnorm_bwd(dx, f32(kWidth), dy, onto, x, w, f32(kRows), s);
  });
  add("activation_bwd", [](const OpTable& ops, Stream& s, auto rows, auto, const Cutter&) {
    const TensorView dx = rows(), dy = rows(), x = rows();
    ops.activation_bwd(dx, dy, x, Activation::GeluTanh, s);
  });
  add("swiglu_fwd", [](const OpTable& ops, Stream& s, auto rows, auto, const Cutter&) {
    const TensorView y = rows(), gate = rows(), up = rows();
    ops.swiglu_fwd(y, gate, up, s);
  });
  add("swiglu_bwd", [](const OpTable& ops, Stream& s, auto rows, auto, const Cutter&) {
    const TensorView dgate = rows(), dup = rows(), dy = rows(), gate = rows(), up = rows();
    ops.swiglu_bwd(dgate, dup, dy, gate, up, s);
  });
  add("column_sum", [](const OpTable& ops, Stream& s, auto rows, auto f32, const Cutter&) {
    ops.column_sum(f32(kWidth), rows(), false, s);
  });
  add("dropout", [](const OpTable& ops, Stream& s, auto rows, auto, const Cutter&) {
    const TensorView y = rows(), x = rows();
    ops.dropout(y, x, 0.1f, {}, 0, s);
  });
  add("rope", [](const OpTable& ops, Stream& s, auto rows, auto f32, const Cutter& cut) {
    const TensorView y = rows().reshaped({1, kRows, 4, 64}), x = rows().reshaped({1, kRows, 4, 64});
    const TensorView table = f32(kRows * 32).reshaped({kRows, 32});
    ops.rope(y, x, table, table, cut.ids(), {}, s);
  });
  add("embedding_fwd", [](const OpTable& ops, Stream& s, auto rows, auto, const Cutter& cut) {
    const TensorView y = rows(), table = rows();
    ops.embedding_fwd(y, table, cut.ids(), 0, false, s);
  });
  add("embedding_bwd", [](const OpTable& ops, Stream& s, auto rows, auto, const Cutter& cut) {
    const TensorView dtable = rows(), dy = rows();
    ops.embedding_bwd(dtable, dy, cut.ids(), 0, false, s);
  });
  // A vocabulary cut in parts; the three together are the pass of linear_cross_entropy over the logits.
  add("vocab_max", [](const OpTable& ops, Stream& s, auto, auto f32, const Cutter&) {
    ops.vocab_max(f32(kRows), f32(kRows * kWidth).reshaped({kRows, kWidth}), s);
  });
  add("vocab_sums", [](const OpTable& ops, Stream& s, auto, auto f32, const Cutter& cut) {
    const TensorView z = f32(kRows * kWidth).reshaped({kRows, kWidth}), max = f32(kRows);
    ops.vocab_sums(f32(kRows), f32(kRows), z, max, cut.ids(), 0, {}, s);
  });
  add("vocab_grad", [](const OpTable& ops, Stream& s, auto rows, auto f32, const Cutter& cut) {
    const TensorView dz = rows(), z = f32(kRows * kWidth).reshaped({kRows, kWidth}), sum = f32(kRows);
    ops.vocab_grad(f32(kRows), dz, z, sum, f32(kRows), f32(kRows), cut.ids(), 0, {}, s);
  });
  add("cast", [](const OpTable& ops, Stream& s, auto rows, auto f32, const Cutter&) {
    ops.cast(f32(kRows * kWidth).reshaped({kRows, kWidth}), rows(), s);
  });
  add("fold", [](const OpTable& ops, Stream& s, auto rows, auto f32, const Cutter&) {
    const TensorView source = rows().reshaped({kRows * kWidth});
    ops.fold(f32(kRows * kWidth), {&source, 1}, true, s);
  });
  return calls;
}

// Ops on fp32 only.
std::vector<Call> optimizer_calls() {
  constexpr i64 n = kRows * kWidth;
  std::vector<Call> calls;
  for (const bool squares : {false, true}) {
    calls.push_back(
        {squares ? "sum_squares" : "max_abs", DType::F32, [=](const OpTable& ops, Cutter& cut, Stream& stream) {
           const TensorView x = cut(DType::F32, {n}), result = cut(DType::I64, {2});
           if (squares) return ops.sum_squares(result, x, cut.max_abs(), stream);
           ops.max_abs(result.rows(0, 1), x, stream);
         }});
  }
  calls.push_back({"adamw", DType::F32, [=](const OpTable& ops, Cutter& cut, Stream& stream) {
                     const auto f32 = [&] { return cut(DType::F32, {n}); };
                     const UpdateTensor t{.param = {}, .master = f32(), .states = {f32(), f32()}, .grad = f32()};
                     ops.update({&t, 1}, cut.verdict(), {}, stream);
                   }});
  return calls;
}

Call addition(i64 elems) {
  return {"add", DType::F32, [=](const OpTable& ops, Cutter& cut, Stream& stream) {
            const TensorView y = cut(DType::F32, {elems}), a = cut(DType::F32, {elems}), b = cut(DType::F32, {elems});
            ops.add(y, a, b, stream);
          }};
}

// The count of one call, under the name that the counting table gives it, and the number of calls.
std::pair<plan::OpCall, i64> cost_of(const Call& call) {
  plan::OpTally tally;
  Stream stream{.native = &tally};
  static std::byte nowhere;
  Cutter cut(&nowhere);
  call.run(plan::counting_ops(), cut, stream);
  for (const auto& [counted, n] : tally.calls()) {
    if (counted.op == call.op) return {counted, n};
  }
  throw Error(Errc::Internal, fmt::format("internal error: {} does not count", call.op));
}

// A rank of the node: calls are timed while the others time the same.
class Worker {
 public:
  Worker(Device& device, double seconds)
      : device_(device),
        seconds_(seconds),
        memory_(device_buffer(device, ledger_, Tag::Workspace, kMemoryBytes)),
        cut_(static_cast<std::byte*>(memory_.data())) {
    std::byte* const base = static_cast<std::byte*>(memory_.data());
    // Random signs and digits around 1 in any of the types: a GPU is faster on zeros, a CPU slower on subnormals.
    std::vector<u16> tile(1 << 16);
    for (size_t i = 0; i < tile.size(); ++i) tile[i] = static_cast<u16>(0x3F80u | (RngKey{}.bits(i) & 0x807Fu));
    const i64 step = narrow<i64>(tile.size() * sizeof(u16));
    for (i64 at = 0; at < kMemoryBytes; at += step) device.upload(base + at, tile.data(), step);
    std::vector<i32> ids(kRows);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<i32>(i);
    device.upload(base + Cutter::kIdsAt, ids.data(), std::ssize(ids) * 4);
    for (size_t size = 0; size < std::size(Cutter::kGroupRows); ++size) {
      std::vector<i32> offsets;
      for (i64 g = 0; g <= Cutter::kGroups; ++g) offsets.push_back(narrow<i32>(g * Cutter::kGroupRows[size]));
      device.upload(cut_.offsets(size).data, offsets.data(), std::ssize(offsets) * 4);
    }
    const GradVerdict verdict{};
    device.upload(base + Cutter::kVerdictAt, &verdict, sizeof verdict);
    const i64 max_abs = 0x40000000;  // 2
    device.upload(base + Cutter::kVerdictAt + 256, &max_abs, sizeof max_abs);
  }

  double seconds_of(const Call& call) {
    const auto run = [&](i64 n) {
      for (i64 i = 0; i < n; ++i) {
        cut_.turn();
        call.run(device_.ops(), cut_, device_.stream());
      }
      device_.synchronize();
    };
    run(1);  // grows scratch
    auto start = Clock::now();
    run(1);
    const i64 calls = std::max<i64>(1, static_cast<i64>(kSample / std::max(seconds_since(start), 1e-8)));
    std::vector<double> samples;
    for (const auto begin = Clock::now(); samples.size() < 5 || seconds_since(begin) < seconds_;) {
      start = Clock::now();
      run(calls);
      samples.push_back(seconds_since(start) / static_cast<double>(calls));
    }
    const auto quartile = samples.begin() + std::ssize(samples) / 4;
    std::nth_element(samples.begin(), quartile, samples.end());
    return *quartile;
  }

 private:
  Device& device_;
  double seconds_;
  MemoryLedger ledger_;
  Buffer memory_;
  Cutter cut_;
};

std::vector<Call> all_calls(const MeasureOptions& options, bool host, bool fp8) {
  std::vector<Call> calls;
  for (const DType t : options.dtypes) {
    for (const auto& some : {products(t, host), grouped_products(t, host), passes(t)})
      calls.insert(calls.end(), some.begin(), some.end());
  }
  if (fp8) {
    const auto some = fp8_products(host);
    calls.insert(calls.end(), some.begin(), some.end());
  }
  const auto fp32 = optimizer_calls();
  calls.insert(calls.end(), fp32.begin(), fp32.end());
  for (const i64 elems : {64, 1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22}) calls.push_back(addition(elems));
  return calls;
}

}  // namespace

Machine measure_machine(const MeasureOptions& options, const MakeDevice& make) {
  DS_CHECK(options.ranks >= 1 && options.threads >= 1 && options.rounds >= 1 && !options.dtypes.empty(), Errc::Config,
           "ranks, threads and rounds of a measurement begin at 1");
  std::vector<std::unique_ptr<Device>> devices;
  for (int r = 0; r < options.ranks; ++r)
    devices.push_back(make ? make(r) : make_cpu_device(probe::cpu_backend(), options.threads));
  const bool host = devices[0]->is_host();
  const bool in_bf16 = std::ranges::find(options.dtypes, DType::BF16) != options.dtypes.end();
  const std::vector<Call> calls = all_calls(options, host, in_bf16 && has_fp8(*devices[0]));
  std::vector<double> sums(calls.size() * static_cast<size_t>(options.rounds));  // over ranks
  std::barrier<> together(options.ranks);
  std::mutex mutex;
  std::exception_ptr error;
  std::atomic<bool> stopped = false;  // not all ranks are there
  std::vector<std::jthread> ranks;
  const auto failed = [&] {
    const std::lock_guard lock(mutex);
    if (!error) error = std::current_exception();
    together.arrive_and_drop();
  };
  const auto measure = [&](int r) {
    try {
      together.arrive_and_wait();
      if (stopped) return;
      Worker worker(*devices[r], options.seconds_per_op);
      for (size_t at = 0; at < sums.size(); ++at) {
        together.arrive_and_wait();
        const double s = worker.seconds_of(calls[at % calls.size()]);
        const std::lock_guard lock(mutex);
        sums[at] += s;
      }
    } catch (...) {
      failed();
    }
  };
  try {
    while (std::ssize(ranks) < options.ranks) {
      const int r = narrow<int>(std::ssize(ranks));
      ranks.push_back(
          start_thread(fmt::format("rank {} of {} to measure with", r, options.ranks), [&, r] { measure(r); }));
    }
  } catch (...) {
    stopped = true;
    for (i64 missing = options.ranks - std::ssize(ranks); missing > 0; --missing) failed();
  }
  ranks.clear();
  if (error) std::rethrow_exception(error);

  Machine m;
  m.device = devices[0]->name();
  m.ranks_per_node = options.ranks;
  m.threads = options.threads;
  m.cores = options.cores > 0 ? options.cores : probe::num_cores();
  m.own_stream = !host;
  std::map<std::pair<std::string, DType>, std::vector<std::pair<double, double>>> points;
  std::vector<std::pair<double, double>> memory;
  std::map<DType, double> logits_s;
  for (size_t c = 0; c < calls.size(); ++c) {
    const auto [cost, times] = cost_of(calls[c]);
    std::vector<double> rounds;
    for (size_t at = c; at < sums.size(); at += calls.size()) rounds.push_back(sums[at]);
    const auto middle = rounds.begin() + std::ssize(rounds) / 2;
    std::ranges::nth_element(rounds, middle);
    const double s = *middle / options.ranks / static_cast<double>(times), flops = static_cast<double>(cost.flops),
                 bytes = static_cast<double>(cost.bytes);
    if (calls[c].op == "add") {
      memory.emplace_back(bytes, bytes / s);
      if (m.op_overhead_s == 0) m.op_overhead_s = s;  // the first one, of nearly nothing
    } else if (cost.flops > 0) {
      const double size = calls[c].op == "matmul" ? flops : flops / static_cast<double>(cost.shape[0]);
      points[{calls[c].op, cost.dtype}].emplace_back(size, flops / s);
    } else {
      m.bytes[calls[c].op][cost.dtype] = Rate(bytes / s);
      if (calls[c].op.starts_with("vocab_")) logits_s[calls[c].dtype] += s;
    }
  }
  for (const auto& [dtype, s] : logits_s)
    m.bytes["linear_cross_entropy"][dtype] =
        Rate(static_cast<double>(kRows * (kWidth * (4 + dtype_bytes(dtype)) + 8)) / s);
  m.memory = Rate(std::move(memory));
  for (auto& [key, rates] : points) m.flops[key.first][key.second] = Rate(std::move(rates));
  return m;
}

}  // namespace ds::memreport
