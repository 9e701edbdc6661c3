// SPDX-License-Identifier: Apache-2.0
// The CUDA backend on one GPU beside what that GPU can do, measured in the same run: memory-bound ops as a share of the
// bandwidth of a large copy, attention and matrix products as a share of the rate of a large product, whole training
// steps as tokens/s and model FLOP/s utilisation:
//   cuda_bench [--small] [--json FILE] [--seconds S] [--by-op] [--set KEY=VALUE]...
//              (ops | attention | features | gemm | step CONFIG...)...
// features: attention over layouts of blocks and packed documents, Evoformer attention, codes. --by-op: after the steps
// that count, three more in which each op is timed (bench/op_clock.h).
// A time is that of n calls, enqueued one after the other and waited for once, over n; the median of several such
// rounds, after a warm-up. Operands are random. Operands of what memory bounds rotate through more memory than the L2
// cache holds. --small: shapes for the simulator, where times mean nothing.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "bench/op_clock.h"
#include "comm/make_communicator.h"
#include "ds/config.h"
#include "ds/log.h"
#include "engine/engine.h"
#include "model/attention_pattern.h"
#include "plan/op_tally.h"
#include "plan/planned.h"
#include "plan/scratch.h"
#include "run/connect.h"
#include "run/gpu_kernels.h"

using namespace ds;

namespace {

constexpr double kDatasheetFlops = 989e12;  // an H100 SXM's bf16 products without sparsity: the usual base of MFU
constexpr DType F32 = DType::F32, BF16 = DType::BF16;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Timing {
  double seconds = 0;  // of one call
  double spread = 0;   // slowest less fastest round, over the median
};

// Device memory full of random numbers; given back at the end.
class Arena {
 public:
  explicit Arena(Device& device) : device_(device) {}

  TensorView take(DType dtype, std::initializer_list<i64> shape) {
    TensorView v = zeros(dtype, shape);
    const std::vector<u8>& tile = random_tile(dtype);
    const i64 first = std::min(v.bytes(), narrow<i64>(tile.size()));
    device_.upload(v.data, tile.data(), first);
    for (i64 done = first; done < v.bytes();) {
      const i64 n = std::min(done, v.bytes() - done);
      device_.copy(v.as<char>() + done, v.data, n);
      done += n;
    }
    return v;
  }
  TensorView zeros(DType dtype, std::initializer_list<i64> shape) {
    TensorView v = TensorView::of(nullptr, dtype, shape);
    buffers_.push_back(device_buffer(device_, ledger_, Tag::Workspace, std::max<i64>(v.bytes(), 256)));
    v.data = buffers_.back().data();
    return v;
  }
  template <class T>
  TensorView holding(DType dtype, const std::vector<T>& values) {
    const TensorView v = zeros(dtype, {narrow<i64>(values.size() * sizeof(T)) / dtype_bytes(dtype)});
    device_.upload(v.data, values.data(), v.bytes());
    return v;
  }
  // int32 in [0, limit).
  TensorView integers(i64 n, i64 limit) { return holding(DType::I32, random_integers(n, limit)); }

  static std::vector<i32> random_integers(i64 n, i64 limit) {
    std::vector<i32> values(static_cast<size_t>(n));
    const RngKey key{1, 2, 3};
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<i32>(key.bits(i) % limit);
    return values;
  }

 private:
  // Normal, of standard deviation 1.
  static const std::vector<u8>& random_tile(DType dtype) {
    constexpr i64 kElems = i64{1} << 20;
    static std::vector<u8> tiles[2];
    std::vector<u8>& tile = tiles[dtype == F32 ? 0 : 1];
    if (tile.empty()) {
      DS_ASSERT(dtype == F32 || dtype == BF16);
      std::vector<float> normal(kElems);
      model::init_values({.name = "", .shape = {kElems}, .std = 1}, 0, 1, 0, kElems, normal.data());
      tile.resize(kElems * dtype_bytes(dtype));
      if (dtype == F32) std::memcpy(tile.data(), normal.data(), tile.size());
      for (size_t i = 0; dtype == BF16 && i < normal.size(); ++i)
        reinterpret_cast<bf16*>(tile.data())[i] = to_bf16(normal[i]);
    }
    return tile;
  }

  Device& device_;
  MemoryLedger ledger_;
  std::vector<Buffer> buffers_;
};

class Bench {
 public:
  Bench(Device& device, bool small, double seconds, std::FILE* json)
      : device_(device), ops_(device.ops()), stream_(device.stream()), small_(small), seconds_(seconds), json_(json) {
    std::printf("%s, %s\n", std::string(device.name()).c_str(), std::string(ops_.name).c_str());
    if (small) std::printf("small shapes: a smoke test, no measurement\n");
    record(fmt::format(R"("section": "device", "name": "{}", "memory_bytes": {}, "small": {})", device.name(),
                       device.memory().total, small));
  }

  void ops();
  void attention();
  void features();
  void gemm();
  // clock: null, or the device wrapper that times the ops of some steps.
  void step(const std::string& path, const Config& config, testing::OpClock* clock);

 private:
  void fp8(i64 R, i64 in, i64 out);
  // call(i): the i-th call since the beginning.
  Timing time(const std::function<void(i64)>& call, i64 warm_up) {
    i64 i = 0;
    for (; i < warm_up; ++i) call(i);
    device_.synchronize();
    const auto round = [&](i64 n) {
      const double start = now();
      for (const i64 end = i + n; i < end; ++i) call(i);
      device_.synchronize();
      return (now() - start) / static_cast<double>(n);
    };
    const double round_s = small_ ? 1e-4 : 0.02;
    const i64 n = std::clamp<i64>(std::llround(round_s / std::min(round(2), round(2))), 2, 2000);
    std::vector<double> rounds(7);
    for (double& r : rounds) r = round(n);
    const auto [fast, slow] = std::minmax_element(rounds.begin(), rounds.end());
    return {median(rounds), (*slow - *fast) / median(rounds)};
  }

  void header(const char* section, const char* rate) {
    std::printf("\n%s\n%-26s %-5s %-34s %11s %9s %8s %8s\n", section, "op", "dtype", "shape", "median us", rate,
                "share", "spread");
    section_ = section;
  }
  // work: bytes, or FLOP; yardstick: of them per second.
  void report(const std::string& op, DType dtype, const std::string& shape, const Timing& t, double work,
              double yardstick, bool flops) {
    const double rate = work / t.seconds * (flops ? 1e-12 : 1e-9);
    const double share = work / t.seconds / yardstick;
    std::printf("%-26s %-5s %-34s %11.1f %9.1f %6.1f %% %6.1f %%\n", op.c_str(), std::string(dtype_name(dtype)).c_str(),
                shape.c_str(), t.seconds * 1e6, rate, share * 100, t.spread * 100);
    std::fflush(stdout);
    record(fmt::format(R"("section": "{}", "op": "{}", "dtype": "{}", "shape": "{}", "us": {:.3f}, "rate": {:.3f}, )"
                       R"("unit": "{}", "share": {:.4f}, "spread": {:.4f})",
                       section_, op, dtype_name(dtype), shape, t.seconds * 1e6, rate, flops ? "TFLOP/s" : "GB/s", share,
                       t.spread));
  }
  void record(const std::string& members) {
    if (json_ == nullptr) return;
    std::fprintf(json_, "{%s}\n", members.c_str());
    std::fflush(json_);
  }

  // An op that memory bounds. make(arena) takes operands and returns the call on them; as many sets of operands take
  // turns as move 512 MiB together. bytes: the data that one call must read and write once.
  using Make = std::function<std::function<void()>(Arena&)>;
  Timing rotated(i64 bytes, const Make& make) {
    Arena arena(device_);
    const i64 sets = small_ ? 2 : std::clamp<i64>((i64{512} << 20) / bytes + 1, 2, 64);
    std::vector<std::function<void()>> calls;
    for (i64 s = 0; s < sets; ++s) calls.push_back(make(arena));
    return time([&](i64 i) { calls[i % sets](); }, sets);
  }
  void memory_bound(const std::string& op, DType dtype, const std::string& shape, i64 bytes, const Make& make) {
    report(op, dtype, shape, rotated(bytes, make), static_cast<double>(bytes), copy_rate(), false);
  }

  // Bytes read plus bytes written by a large copy within the device, per second.
  double copy_rate() {
    if (copy_rate_ == 0) copy_rate_ = static_cast<double>(copy_bytes()) / copy_time().seconds;
    return copy_rate_;
  }
  i64 copy_bytes() const { return small_ ? 1 << 16 : i64{1} << 30; }
  Timing copy_time() {
    return rotated(copy_bytes(), [&](Arena& a) -> std::function<void()> {
      const i64 n = copy_bytes() / 2;
      const TensorView to = a.zeros(F32, {n / 4}), from = a.take(F32, {n / 4});
      return [=, this] { device_.copy(to.data, from.data, n); };
    });
  }

  Timing product_time(DType out, i64 M, i64 N, i64 K, bool trans_a, bool trans_b) {
    Arena arena(device_);
    const TensorView c = arena.zeros(out, {M, N}), a = arena.take(BF16, {trans_a ? K : M, trans_a ? M : K}),
                     b = arena.take(BF16, {trans_b ? N : K, trans_b ? K : N});
    const MatmulParams p{.trans_a = trans_a, .trans_b = trans_b};
    return time([&](i64) { ops_.matmul(c, a, b, {}, {}, {}, p, stream_); }, 3);
  }
  // FLOP/s of a large bf16 product.
  double product_rate() {
    if (product_rate_ == 0) {
      const i64 n = product_size();
      product_rate_ = product_flops(n, n, n) / product_time(BF16, n, n, n, false, true).seconds;
    }
    return product_rate_;
  }
  i64 product_size() const { return small_ ? 64 : 8192; }
  static double product_flops(i64 M, i64 N, i64 K) { return 2.0 * static_cast<double>(M * N) * static_cast<double>(K); }

  void time_of_ops(const std::string& name, const engine::Engine& engine, testing::OpClock& clock,
                   const std::function<double()>& train);
  void sparse_attention();
  void evoformer();
  void codes();

  Device& device_;
  const OpTable& ops_;
  Stream& stream_;
  bool small_;
  double seconds_;
  std::FILE* json_;
  const char* section_ = "";
  double copy_rate_ = 0, product_rate_ = 0;
};

// Shapes are those of training: 16 sequences of 1024 tokens.
void Bench::ops() {
  header("ops", "GB/s");
  const i64 B = small_ ? 2 : 16, T = small_ ? 8 : 1024, R = B * T, V = small_ ? 50 : 50257;
  const i64 N = small_ ? 1 << 12 : i64{1} << 26;
  const auto matrix = [](i64 rows, i64 columns) { return fmt::format("{}x{}", rows, columns); };
  const auto vector = [](i64 n) { return fmt::format("{}", n); };

  const Timing copy = copy_time();
  copy_rate_ = static_cast<double>(copy_bytes()) / copy.seconds;
  report("copy", F32, vector(copy_bytes() / 8), copy, static_cast<double>(copy_bytes()), copy_rate_, false);

  memory_bound("cast from fp32", BF16, vector(N), N * 6, [&](Arena& a) -> std::function<void()> {
    const TensorView y = a.zeros(BF16, {N}), x = a.take(F32, {N});
    return [=, this] { ops_.cast(y, x, stream_); };
  });
  memory_bound("cast to fp32", BF16, vector(N), N * 6, [&](Arena& a) -> std::function<void()> {
    const TensorView y = a.zeros(F32, {N}), x = a.take(BF16, {N});
    return [=, this] { ops_.cast(y, x, stream_); };
  });
  memory_bound("add", BF16, vector(N), N * 6, [&](Arena& a) -> std::function<void()> {
    const TensorView z = a.zeros(BF16, {N}), x = a.take(BF16, {N}), y = a.take(BF16, {N});
    return [=, this] { ops_.add(z, x, y, stream_); };
  });
  memory_bound("fold into fp32", BF16, vector(N), N * 10, [&](Arena& a) -> std::function<void()> {
    const TensorView sum = a.take(F32, {N}), x = a.take(BF16, {N});
    return [=, this] { ops_.fold(sum, {&x, 1}, true, stream_); };
  });
  memory_bound("dropout", BF16, vector(N), N * 4, [&](Arena& a) -> std::function<void()> {
    const TensorView y = a.zeros(BF16, {N}), x = a.take(BF16, {N});
    return [=, this] { ops_.dropout(y, x, 0.1f, {1, 2, 3}, 0, stream_); };
  });
  memory_bound("max_abs", F32, vector(N), N * 4, [&](Arena& a) -> std::function<void()> {
    const TensorView x = a.take(F32, {N}), result = a.zeros(DType::I64, {1});
    return [=, this] { ops_.max_abs(result, x, stream_); };
  });
  memory_bound("sum_squares", F32, vector(N), N * 4, [&](Arena& a) -> std::function<void()> {
    const TensorView x = a.take(F32, {N}), result = a.zeros(DType::I64, {2}), largest = a.zeros(DType::I64, {1});
    ops_.max_abs(largest, x, stream_);
    return [=, this] { ops_.sum_squares(result, x, largest, stream_); };
  });

  for (const i64 C : small_ ? std::vector<i64>{64} : std::vector<i64>{768, 1600}) {
    const i64 bytes = R * C * 2, statistics = 8 * R;
    memory_bound("layernorm fwd", BF16, matrix(R, C), 2 * bytes + statistics, [&](Arena& a) -> std::function<void()> {
      const TensorView y = a.zeros(BF16, {R, C}), x = a.take(BF16, {R, C}), w = a.take(BF16, {C}),
                       b = a.take(BF16, {C}), mean = a.zeros(F32, {R}), rstd = a.zeros(F32, {R});
      return [=, this] { ops_.layernorm_fwd(y, mean, rstd, x, w, b, 1e-5f, stream_); };
    });
    memory_bound("layernorm bwd + residual", BF16, matrix(R, C), 4 * bytes + statistics,
                 [&](Arena& a) -> std::function<void()> {
                   const TensorView dx = a.zeros(BF16, {R, C}), dw = a.zeros(BF16, {C}), db = a.zeros(BF16, {C}),
                                    dy = a.take(BF16, {R, C}), r = a.take(BF16, {R, C}), x = a.take(BF16, {R, C}),
                                    w = a.take(BF16, {C}), b = a.take(BF16, {C}), mean = a.zeros(F32, {R}),
                                    rstd = a.zeros(F32, {R});
                   ops_.layernorm_fwd(dx, mean, rstd, x, w, b, 1e-5f, stream_);
                   return [=, this] { ops_.layernorm_bwd(dx, dw, db, dy, r, x, w, mean, rstd, stream_); };
                 });
  }
  for (const i64 C : small_ ? std::vector<i64>{64} : std::vector<i64>{896, 1536}) {
    const i64 bytes = R * C * 2, statistics = 4 * R;
    memory_bound("rmsnorm fwd", BF16, matrix(R, C), 2 * bytes + statistics, [&](Arena& a) -> std::function<void()> {
      const TensorView y = a.zeros(BF16, {R, C}), x = a.take(BF16, {R, C}), w = a.take(BF16, {C}),
                       rstd = a.zeros(F32, {R});
      return [=, this] { ops_.rmsnorm_fwd(y, rstd, x, w, 1e-6f, stream_); };
    });
    memory_bound("rmsnorm bwd + residual", BF16, matrix(R, C), 4 * bytes + statistics,
                 [&](Arena& a) -> std::function<void()> {
                   const TensorView dx = a.zeros(BF16, {R, C}), dw = a.zeros(BF16, {C}), dy = a.take(BF16, {R, C}),
                                    r = a.take(BF16, {R, C}), x = a.take(BF16, {R, C}), w = a.take(BF16, {C}),
                                    rstd = a.zeros(F32, {R});
                   ops_.rmsnorm_fwd(dx, rstd, x, w, 1e-6f, stream_);
                   return [=, this] { ops_.rmsnorm_bwd(dx, dw, dy, r, x, w, rstd, stream_); };
                 });
  }
  {
    const i64 F = small_ ? 64 : 3072, bytes = R * F * 2;
    memory_bound("gelu fwd", BF16, matrix(R, F), 2 * bytes, [&](Arena& a) -> std::function<void()> {
      const TensorView y = a.zeros(BF16, {R, F}), x = a.take(BF16, {R, F});
      return [=, this] { ops_.activation_fwd(y, x, Activation::GeluTanh, stream_); };
    });
    memory_bound("gelu bwd", BF16, matrix(R, F), 3 * bytes, [&](Arena& a) -> std::function<void()> {
      const TensorView dx = a.zeros(BF16, {R, F}), dy = a.take(BF16, {R, F}), x = a.take(BF16, {R, F});
      return [=, this] { ops_.activation_bwd(dx, dy, x, Activation::GeluTanh, stream_); };
    });
    memory_bound("column sum", BF16, matrix(R, F), bytes, [&](Arena& a) -> std::function<void()> {
      const TensorView y = a.zeros(BF16, {F}), x = a.take(BF16, {R, F});
      return [=, this] { ops_.column_sum(y, x, false, stream_); };
    });
  }
  {
    const i64 F = small_ ? 64 : 4864, bytes = R * F * 2;
    memory_bound("swiglu fwd", BF16, matrix(R, F), 3 * bytes, [&](Arena& a) -> std::function<void()> {
      const TensorView y = a.zeros(BF16, {R, F}), gate = a.take(BF16, {R, F}), up = a.take(BF16, {R, F});
      return [=, this] { ops_.swiglu_fwd(y, gate, up, stream_); };
    });
    memory_bound("swiglu bwd", BF16, matrix(R, F), 5 * bytes, [&](Arena& a) -> std::function<void()> {
      const TensorView dgate = a.zeros(BF16, {R, F}), dup = a.zeros(BF16, {R, F}), dy = a.take(BF16, {R, F}),
                       gate = a.take(BF16, {R, F}), up = a.take(BF16, {R, F});
      return [=, this] { ops_.swiglu_bwd(dgate, dup, dy, gate, up, stream_); };
    });
  }
  {
    const i64 H = small_ ? 2 : 14, D = 64;
    std::vector<float> cos(static_cast<size_t>(T * D / 2)), sin(cos.size());
    for (size_t i = 0; i < cos.size(); ++i) {
      const double angle = static_cast<double>(i / 32) * std::pow(1e6, -static_cast<double>(i % 32) / 32);
      cos[i] = static_cast<float>(std::cos(angle)), sin[i] = static_cast<float>(std::sin(angle));
    }
    std::vector<i32> positions(static_cast<size_t>(T));
    std::iota(positions.begin(), positions.end(), 0);
    memory_bound("rope in place", BF16, fmt::format("{}x{}x{}x{}", B, T, H, D), 2 * R * H * D * 2,
                 [&](Arena& a) -> std::function<void()> {
                   const TensorView x = a.take(BF16, {B, T, H, D}), c = a.holding(F32, cos).reshaped({T, D / 2}),
                                    s = a.holding(F32, sin).reshaped({T, D / 2}), p = a.holding(DType::I32, positions);
                   return [=, this] { ops_.rope(x, x, c, s, p, {}, stream_); };
                 });
  }
  {
    const i64 C = small_ ? 64 : 768;
    const std::vector<i32> ids = Arena::random_integers(R, V);
    const i64 distinct = narrow<i64>(std::set<i32>(ids.begin(), ids.end()).size());
    memory_bound(
        "embedding fwd", BF16, fmt::format("{}x{} of {}", R, C, V), (R + distinct) * C * 2 + 4 * R,
        [&](Arena& a) -> std::function<void()> {
          const TensorView y = a.zeros(BF16, {R, C}), table = a.take(BF16, {V, C}), at = a.holding(DType::I32, ids);
          return [=, this] { ops_.embedding_fwd(y, table, at, 0, false, stream_); };
        });
    memory_bound(
        "embedding bwd into fp32", BF16, fmt::format("{}x{} of {}", R, C, V), R * C * 2 + distinct * C * 8 + 4 * R,
        [&](Arena& a) -> std::function<void()> {
          const TensorView dtable = a.take(F32, {V, C}), dy = a.take(BF16, {R, C}), at = a.holding(DType::I32, ids);
          return [=, this] { ops_.embedding_bwd(dtable, dy, at, 0, true, stream_); };
        });
  }
  {  // all parameters of a GPT-2 124M, tensor by tensor as the engine has them
    ModelConfig c;
    c.vocab_size = V, c.hidden = 768, c.layers = c.heads = c.kv_heads = 12, c.head_dim = 64;
    c.intermediate = 3072, c.max_positions = 1024;
    if (small_) c.hidden = c.intermediate = 64, c.layers = c.heads = c.kv_heads = 1, c.max_positions = 8;
    const model::Model m = model::make_model(c, c.max_positions);
    Arena a(device_);
    std::vector<UpdateTensor> tensors;
    for (const auto& layer : m.layers) {
      for (const model::ParamRow& row : layer->rows()) {
        const i64 n = row.numel();
        tensors.push_back({.param = a.zeros(BF16, {n}),
                           .master = a.take(F32, {n}),
                           .states = {a.zeros(F32, {n}), a.zeros(F32, {n})},
                           .grad = a.take(F32, {n}),
                           .weight_decay = 0.1f});
      }
    }
    const GradVerdict verdict;
    const TensorView on_device = a.zeros(DType::I64, {8});
    device_.upload(on_device.data, &verdict, sizeof verdict);
    const UpdateParams p{.lr = 1e-4f, .bias1 = 0.1f, .bias2 = 0.001f};
    const Timing t = time([&](i64) { ops_.update(tensors, on_device.as<GradVerdict>(), p, stream_); }, 3);
    report("adamw", F32, vector(m.num_params()), t, 30.0 * static_cast<double>(m.num_params()), copy_rate(), false);
  }
}

// Counted are the products of visible pairs of positions: 4 D forward, 10 D backward (the scores once more included).
void Bench::attention() {
  header("attention", "TFLOP/s");
  struct Shape {
    i64 B, T, H, G, D;
    bool causal;
  };
  std::vector<Shape> shapes{{16, 1024, 12, 12, 64, true}, {8, 1024, 25, 25, 64, true},   {16, 1024, 14, 2, 64, true},
                            {8, 1024, 12, 2, 128, true},  {16, 1024, 16, 16, 128, true}, {4, 4096, 32, 32, 64, true},
                            {4, 4096, 16, 16, 128, true}, {4, 4096, 32, 32, 64, false},  {4, 4096, 16, 16, 128, false}};
  if (small_) shapes = {{1, 64, 2, 1, 64, true}, {1, 64, 2, 2, 128, true}};
  for (const Shape& s : shapes) {
    Arena arena(device_);
    // q, k and v side by side, as GPT-2's projection leaves them.
    const i64 heads = s.H + 2 * s.G;
    const TensorView qkv = arena.take(BF16, {s.B, s.T, heads, s.D}), dqkv = arena.zeros(BF16, {s.B, s.T, heads, s.D});
    const TensorView o = arena.zeros(BF16, {s.B, s.T, s.H, s.D}), dout = arena.take(BF16, {s.B, s.T, s.H, s.D}),
                     lse = arena.zeros(F32, {s.B, s.H, s.T});
    const auto slice = [&](TensorView v, i64 head, i64 count) {
      v.data = v.as<char>() + head * s.D * 2;
      v.shape[2] = count;
      return v;
    };
    const TensorView q = slice(qkv, 0, s.H), k = slice(qkv, s.H, s.G), v = slice(qkv, s.H + s.G, s.G);
    const TensorView dq = slice(dqkv, 0, s.H), dk = slice(dqkv, s.H, s.G), dv = slice(dqkv, s.H + s.G, s.G);
    const AttentionParams p{.scale = 1.0f / std::sqrt(static_cast<float>(s.D)), .causal = s.causal};
    const double visible = static_cast<double>(s.T) * static_cast<double>(s.causal ? s.T + 1 : 2 * s.T) / 2;
    const double products = static_cast<double>(s.B * s.H * s.D) * visible;
    const std::string shape =
        fmt::format("B{} T{} H{}/{} D{} {}", s.B, s.T, s.H, s.G, s.D, s.causal ? "causal" : "full");
    const Timing forward = time([&](i64) { ops_.attention_fwd(o, lse, q, k, v, p, stream_); }, 3);
    report("attention fwd", BF16, shape, forward, 4 * products, product_rate(), true);
    const Timing backward = time([&](i64) { ops_.attention_bwd(dq, dk, dv, dout, q, k, v, o, lse, p, stream_); }, 3);
    report("attention bwd", BF16, shape, backward, 10 * products, product_rate(), true);
  }
}

void Bench::features() {
  header("features", "TFLOP/s");
  sparse_attention();
  evoformer();
  codes();
}

// Long sequences: dense, over a layout in which a quarter of the blocks or less is present, and of packed documents.
// Only pairs that see each other are counted, so a rate like that of the dense one shows that nothing else was
// computed.
void Bench::sparse_attention() {
  const i64 B = small_ ? 1 : 2, T = small_ ? 64 : 8192, H = small_ ? 1 : 16, D = 64, block = small_ ? 16 : 64;
  Arena arena(device_);
  const TensorView q = arena.take(BF16, {B, T, H, D}), k = arena.take(BF16, {B, T, H, D}),
                   v = arena.take(BF16, {B, T, H, D}), dout = arena.take(BF16, {B, T, H, D}),
                   o = arena.zeros(BF16, {B, T, H, D}), dq = arena.zeros(BF16, {B, T, H, D}),
                   dk = arena.zeros(BF16, {B, T, H, D}), dv = arena.zeros(BF16, {B, T, H, D}),
                   lse = arena.zeros(F32, {B, H, T});
  const auto measure = [&](const std::string& what, const AttentionParams& p, i64 pairs) {
    const double products = static_cast<double>(D * B * pairs);
    const std::string shape = fmt::format("B{} T{} H{} D{} {}", B, T, H, D, what);
    report("attention fwd", BF16, shape, time([&](i64) { ops_.attention_fwd(o, lse, q, k, v, p, stream_); }, 2),
           4 * products, product_rate(), true);
    report("attention bwd", BF16, shape,
           time([&](i64) { ops_.attention_bwd(dq, dk, dv, dout, q, k, v, o, lse, p, stream_); }, 2), 10 * products,
           product_rate(), true);
  };
  const AttentionParams dense{.scale = 0.125f, .causal = true};
  measure("causal", dense, H * plan::visible_pairs(T, T, true, 0));
  for (const auto& [name, mode] : {std::pair("fixed", SparseAttentionMode::Fixed),
                                   {"BigBird", SparseAttentionMode::BigBird},
                                   {"local", SparseAttentionMode::Local}}) {
    SparseAttentionConfig config;
    config.mode = mode;
    config.block = block;
    config.unidirectional = true;
    config.num_random_blocks = mode == SparseAttentionMode::BigBird ? 1 : 0;
    const model::AttentionLayout layout = model::make_attention_layout(config, H, T, 1);
    AttentionParams p = dense;
    p.blocks = {.block = block, .count = layout.count(), .layouts = layout.layouts(), .keys = layout.keys().data()};
    const i64 pairs = plan::visible_pairs(H, T, T, p);
    p.blocks.keys = arena.holding(DType::I64, layout.keys()).as<u64>();
    p.blocks.queries = arena.holding(DType::I64, layout.queries()).as<u64>();
    measure(fmt::format("{} of {}", name, block), p, pairs);
  }
  // Documents of 1 to 2 T / 16 tokens.
  std::vector<i32> begins, ends;
  i64 pairs = 0;
  const RngKey key{4, 5, 6};
  for (i64 b = 0, n = 0; b < B; ++b) {
    for (i64 begin = 0, end = 0; begin < T; begin = end) {
      end = std::min(T, begin + 1 + static_cast<i64>(key.bits(static_cast<u64>(n++))) % (T / 8));
      begins.insert(begins.end(), static_cast<size_t>(end - begin), static_cast<i32>(begin));
      ends.insert(ends.end(), static_cast<size_t>(end - begin), static_cast<i32>(end));
      pairs += H * plan::visible_pairs(end - begin, end - begin, true, 0);
    }
  }
  begins.insert(begins.end(), ends.begin(), ends.end());
  AttentionParams p = dense;
  p.documents = arena.holding(DType::I32, begins).as<i32>();
  p.positions = T;
  measure("documents", p, pairs / B);
}

// Row-wise attention of an MSA, and around a node of a triangle: the pair representation of so many residues.
void Bench::evoformer() {
  struct Shape {
    i64 N, T, H, D;
  };
  std::vector<Shape> shapes{{512, 256, 8, 32}, {256, 256, 4, 32}, {512, 512, 4, 32}};
  if (small_) shapes = {{2, 16, 2, 16}};
  for (const auto& [N, T, H, D] : shapes) {
    Arena arena(device_);
    const TensorView q = arena.take(BF16, {N, T, H, D}), k = arena.take(BF16, {N, T, H, D}),
                     v = arena.take(BF16, {N, T, H, D}), dout = arena.take(BF16, {N, T, H, D}),
                     o = arena.zeros(BF16, {N, T, H, D}), dq = arena.zeros(BF16, {N, T, H, D}),
                     dk = arena.zeros(BF16, {N, T, H, D}), dv = arena.zeros(BF16, {N, T, H, D}),
                     lse = arena.zeros(F32, {N, H, T}), bias1 = arena.take(BF16, {N, T}),
                     bias2 = arena.take(BF16, {1, H, T, T}), dbias2 = arena.zeros(F32, {1, H, T, T});
    const EvoformerParams p{.scale = 1.0f / std::sqrt(static_cast<float>(D)), .num_seq = N};
    const double products = static_cast<double>(N * H * T * T) * static_cast<double>(D);
    const std::string shape = fmt::format("N{} T{} H{} D{}", N, T, H, D);
    report("evoformer fwd", BF16, shape,
           time([&](i64) { ops_.evoformer_attention_fwd(o, lse, q, k, v, bias1, bias2, p, stream_); }, 2), 4 * products,
           product_rate(), true);
    report("evoformer bwd", BF16, shape,
           time(
               [&](i64) {
                 ops_.evoformer_attention_bwd(dq, dk, dv, {}, dbias2, dout, q, k, v, o, lse, bias1, bias2, p, stream_);
               },
               2),
           10 * products, product_rate(), true);
  }
}

// Compressed collectives and ZeRO++, on gradients and weights.
void Bench::codes() {
  const i64 N = small_ ? 1 << 13 : i64{1} << 26;
  const std::string vector = fmt::format("{}", N);
  for (const CodeFormat format : {CodeFormat{8, 2048}, {4, 256}}) {
    const i64 codes = format.code_bytes(N), blocks = format.num_blocks(N), coded = codes + 4 * blocks;
    const std::string bits = fmt::format("{} bits, ", format.bits);
    memory_bound("quantize", BF16, bits + vector, 2 * N + coded, [&](Arena& a) -> std::function<void()> {
      const TensorView x = a.take(BF16, {1, N}), c = a.zeros(DType::U8, {1, codes}), s = a.zeros(F32, {1, blocks});
      return [=, this] { ops_.quantize(c, s, x, {}, format, {}, stream_); };
    });
    memory_bound("quantize, errors kept", F32, bits + vector, 12 * N + coded, [&](Arena& a) -> std::function<void()> {
      const TensorView x = a.take(F32, {1, N}), c = a.zeros(DType::U8, {1, codes}), s = a.zeros(F32, {1, blocks}),
                       e = a.zeros(F32, {1, N});
      return [=, this] { ops_.quantize(c, s, x, e, format, {}, stream_); };
    });
    memory_bound("dequantize", BF16, bits + vector, 2 * N + coded, [&](Arena& a) -> std::function<void()> {
      const TensorView y = a.zeros(BF16, {1, N}), x = a.take(BF16, {1, N}), c = a.zeros(DType::U8, {1, codes}),
                       s = a.zeros(F32, {1, blocks});
      ops_.quantize(c, s, x, {}, format, {}, stream_);
      return [=, this] { ops_.dequantize(y, c, s, format, stream_); };
    });
  }
  const CodeFormat format{8, 2048};
  const i64 n = N / 4, blocks = format.num_blocks(n);  // the parts of four ranks
  memory_bound("dequantize_fold", F32, fmt::format("8 bits, 4x{}", n), 4 * (n + 4 * blocks) + 4 * n,
               [&](Arena& a) -> std::function<void()> {
                 const TensorView x = a.take(BF16, {4, n}), c = a.zeros(DType::U8, {4, n}),
                                  s = a.zeros(F32, {4, blocks}), sum = a.zeros(F32, {n});
                 ops_.quantize(c, s, x, {}, format, {}, stream_);
                 return [=, this] { ops_.dequantize_fold(sum, c, s, false, 4, format, stream_); };
               });
  memory_bound("quantize_signs", F32, vector, 8 * N + N / 8, [&](Arena& a) -> std::function<void()> {
    const TensorView y = a.take(F32, {N}), c = a.zeros(DType::U8, {N / 8}), s = a.zeros(F32, {1}),
                     largest = a.zeros(DType::I64, {1}), sum = a.zeros(DType::I64, {2});
    ops_.max_abs(largest, y, stream_);
    ops_.sum_squares(sum, y, largest, stream_);
    return [=, this] { ops_.quantize_signs(c, s, y, largest, sum, N, stream_); };
  });
}

// The three products of a linear map in FP8, beside the product in bf16, and the encoding of their operands.
void Bench::fp8(i64 R, i64 in, i64 out) {
  if (!has_fp8(device_)) return;
  using enum Fp8Blocks;
  const auto product = [&](const char* op, i64 M, i64 N, i64 K, Fp8Blocks b_blocks, DType a_format) {
    Arena arena(device_);
    const Fp8Layout of_a{M, K, Rows}, of_b{N, K, b_blocks};
    const auto encoded = [&](const Fp8Layout& l, DType format) {
      const TensorView codes = arena.zeros(format, {l.padded_rows(), l.padded_k()}),
                       scales = arena.zeros(F32, {l.scale_rows(), l.scale_columns()});
      ops_.quantize_fp8(codes, scales, arena.take(BF16, {l.rows, l.k}), l.blocks, false, stream_);
      return std::pair(codes, scales);
    };
    const auto [a, a_scales] = encoded(of_a, a_format);
    const auto [b, b_scales] = encoded(of_b, DType::F8E4M3);
    const TensorView c = arena.zeros(BF16, {M, N});
    const auto call = [&, a = a, a_scales = a_scales, b = b, b_scales = b_scales](i64) {
      ops_.matmul_fp8(c, a, a_scales, b, b_scales, {}, {}, {Rows, b_blocks}, stream_);
    };
    report(op, a_format, fmt::format("{}x{}x{}", M, N, K), time(call, 3), product_flops(M, N, K), product_rate(), true);
  };
  product("matmul fp8", R, out, in, Squares, DType::F8E4M3);
  for (const DType gradients : {DType::F8E4M3, DType::F8E5M2}) {
    product("matmul fp8 dX", R, in, out, Squares, gradients);
    product("matmul fp8 dW", out, in, R, Rows, gradients);
  }
  for (const Fp8Blocks blocks : {Rows, Squares}) {
    for (const bool transposed : {false, true}) {
      const Fp8Layout l{transposed ? in : R, transposed ? R : in, blocks};
      memory_bound(transposed ? "quantize_fp8, transposed" : "quantize_fp8", BF16,
                   fmt::format("{}x{} {}", l.rows, l.k, blocks == Rows ? "rows" : "squares"),
                   R * in * 2 + l.code_bytes() + l.scale_bytes(), [&](Arena& a) -> std::function<void()> {
                     const TensorView x = a.take(BF16, {R, in}),
                                      codes = a.zeros(DType::F8E4M3, {l.padded_rows(), l.padded_k()}),
                                      scales = a.zeros(F32, {l.scale_rows(), l.scale_columns()});
                     return [=, this] { ops_.quantize_fp8(codes, scales, x, blocks, transposed, stream_); };
                   });
    }
  }
}

// Forward, input gradient and weight gradient of each matrix of a layer, and the head.
void Bench::gemm() {
  header("gemm", "TFLOP/s");
  const i64 n = product_size();
  const Timing large = product_time(BF16, n, n, n, false, true);
  product_rate_ = product_flops(n, n, n) / large.seconds;
  report("matmul NT", BF16, fmt::format("{}x{}x{}", n, n, n), large, product_flops(n, n, n), product_rate_, true);

  const auto product = [&](i64 M, i64 N, i64 K, bool trans_a, bool trans_b) {
    const std::string op = fmt::format("matmul {}{}", trans_a ? 'T' : 'N', trans_b ? 'T' : 'N');
    report(op, BF16, fmt::format("{}x{}x{}", M, N, K), product_time(BF16, M, N, K, trans_a, trans_b),
           product_flops(M, N, K), product_rate(), true);
  };
  // out_in: the weight is stored [out,in].
  const auto linear = [&](i64 R, i64 in, i64 out, bool out_in) {
    product(R, out, in, false, out_in);
    product(R, in, out, false, !out_in);
    out_in ? product(out, in, R, true, false) : product(in, out, R, true, false);
  };
  struct Shape {
    i64 R, C, F;
    bool llama;
    i64 kv = 0;  // elements of k and of v
  };
  std::vector<Shape> shapes{{16384, 768, 3072, false},
                            {8192, 1600, 6400, false},
                            {16384, 896, 4864, true, 128},
                            {8192, 1536, 8960, true, 256}};
  if (small_) shapes = {{32, 64, 128, false}, {32, 64, 128, true, 64}};
  for (const Shape& s : shapes) {
    linear(s.R, s.C, s.llama ? s.C : 3 * s.C, s.llama);
    linear(s.R, s.C, s.llama ? s.kv : s.C, s.llama);
    linear(s.R, s.C, s.F, s.llama);
    linear(s.R, s.F, s.C, s.llama);
  }

  for (const Shape& s : shapes) {  // with what the models fuse
    if (s.llama) continue;
    Arena arena(device_);
    const TensorView x = arena.take(BF16, {s.R, s.C}), wide = arena.zeros(BF16, {s.R, s.F}),
                     preact = arena.zeros(BF16, {s.R, s.F}), w = arena.take(BF16, {s.C, s.F}),
                     bias = arena.take(BF16, {s.F}), narrow = arena.zeros(BF16, {s.R, s.C}),
                     back = arena.take(BF16, {s.F, s.C}), residual = arena.take(BF16, {s.R, s.C});
    const Timing up =
        time([&](i64) { ops_.matmul(wide, x, w, bias, preact, {}, {.activation = Activation::GeluTanh}, stream_); }, 3);
    report("matmul + bias + gelu", BF16, fmt::format("{}x{}x{}", s.R, s.F, s.C), up, product_flops(s.R, s.F, s.C),
           product_rate(), true);
    const TensorView short_bias = bias.rows(0, s.C);
    const Timing down = time([&](i64) { ops_.matmul(narrow, wide, back, short_bias, {}, residual, {}, stream_); }, 3);
    report("matmul + bias + residual", BF16, fmt::format("{}x{}x{}", s.R, s.C, s.F), down, product_flops(s.R, s.C, s.F),
           product_rate(), true);
  }

  if (small_) fp8(32, 128, 256);
  for (const i64 width : {2048, 4096}) {
    if (!small_) fp8(16384, width, 4 * width);
  }

  struct Head {
    i64 R, C, V;
  };
  std::vector<Head> heads{{16384, 768, 50257}, {8192, 1600, 50257}, {16384, 896, 151936}, {8192, 1536, 151936}};
  if (small_) heads = {{32, 64, 50}};
  for (const Head& h : heads) {
    const i64 chunk = std::min(h.R, align_up((i64{256} << 20) / h.V, 64));  // as plan/run_plan.cc
    Arena arena(device_);
    const TensorView losses = arena.zeros(F32, {h.R}), dx = arena.zeros(BF16, {h.R, h.C}),
                     dw = arena.zeros(F32, {h.V, h.C}), x = arena.take(BF16, {h.R, h.C}),
                     w = arena.take(BF16, {h.V, h.C}), targets = arena.integers(h.R, h.V),
                     logits = arena.zeros(F32, {chunk, h.V});
    const CrossEntropyParams p{.grad_scale = 1.0f / static_cast<float>(h.R), .chunk_tokens = chunk};
    const Timing t =
        time([&](i64) { ops_.linear_cross_entropy(losses, dx, dw, {}, x, w, {}, targets, logits, p, stream_); }, 3);
    report("head and loss, fwd + bwd", BF16, fmt::format("{}x{}x{}", h.R, h.V, h.C), t,
           3 * product_flops(h.R, h.V, h.C), product_rate(), true);
  }
}

// Three steps, or one small one, op by op: a table of sums, and lines of JSON for each kind of call.
void Bench::time_of_ops(const std::string& name, const engine::Engine& engine, testing::OpClock& clock,
                        const std::function<double()>& train) {
  const int num_steps = small_ ? 1 : 3;
  double steps_s = 0;
  std::map<testing::ClockedCall, testing::ClockedTime> all;
  plan::OpTally tally;
  for (int i = 0; i < num_steps; ++i) {
    clock.start();
    steps_s += train();
    for (const auto& [call, t] : clock.stop()) {
      testing::ClockedTime& sum = all[call];
      sum.calls += t.calls, sum.seconds += t.seconds, sum.flops += t.flops, sum.bytes += t.bytes;
    }
    tally = clock.tally();
  }
  constexpr const char* kQueues[] = {"compute", "comm", "copies"};
  std::map<std::pair<Queue, std::string_view>, testing::ClockedTime> by_op;
  double busy_s = 0;  // of the queue that computes
  for (const auto& [call, t] : all) {
    testing::ClockedTime& sum = by_op[{call.queue, call.op}];
    sum.calls += t.calls, sum.seconds += t.seconds, sum.flops += t.flops, sum.bytes += t.bytes;
    if (call.queue == Queue::Compute) busy_s += t.seconds;
    record(fmt::format(R"("section": "by-op", "model": "{}", "queue": "{}", "op": "{}", "dtype": "{}", )"
                       R"("shape": [{}, {}, {}], "calls": {}, "ms": {:.4f}, "tflop": {:.5f}, "gb": {:.5f})",
                       name, kQueues[static_cast<size_t>(call.queue)], call.op, dtype_name(call.dtype), call.shape[0],
                       call.shape[1], call.shape[2], t.calls / num_steps, t.seconds / num_steps * 1e3,
                       t.flops / num_steps * 1e-12, t.bytes / num_steps * 1e-9));
  }
  std::vector<std::pair<std::pair<Queue, std::string_view>, testing::ClockedTime>> sorted(by_op.begin(), by_op.end());
  std::sort(sorted.begin(), sorted.end(),
            [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
  std::printf("  op by op, %d steps of %.2f ms, %.2f ms between ops:\n", num_steps, steps_s / num_steps * 1e3,
              (steps_s - busy_s) / num_steps * 1e3);
  for (const auto& [of, t] : sorted) {
    std::printf("    %-8s %-22s %6ld calls %10.3f ms %9.1f TFLOP/s %9.1f GB/s\n",
                kQueues[static_cast<size_t>(of.first)], std::string(of.second).c_str(), t.calls / num_steps,
                t.seconds / num_steps * 1e3, t.flops / t.seconds * 1e-12, t.bytes / t.seconds * 1e-9);
  }
  std::fflush(stdout);
  // The times of a clock that misses ops would not show which op is slow.
  const plan::StepWork work = plan::tally_step(engine.model(), engine.plan());
  plan::OpTally want = work.total();
  want.add(work.reductions);
  const bool all_there = engine.model().layout != nullptr || tally == want;
  DS_CHECK(all_there || !small_, Errc::Internal, "the clock of ops has not seen what the plan says a step calls");
  record(fmt::format(R"("section": "by-op-step", "model": "{}", "step_ms": {:.3f}, "ops_ms": {:.3f}, )"
                     R"("between_ms": {:.3f}, "all_ops": {})",
                     name, steps_s / num_steps * 1e3, busy_s / num_steps * 1e3, (steps_s - busy_s) / num_steps * 1e3,
                     all_there));
}

void Bench::step(const std::string& path, const Config& config, testing::OpClock* clock) {
  const double peak = product_rate();
  device_.synchronize();
  // The workspace of products, which is part of a plan, is there already.
  const i64 free_before = device_.memory().free + device_.gpu_kernels().products_bytes;

  MemoryLedger ledger;
  Mesh mesh(make_self_communicator({}), {}, {.device = &device_},
            [](Communicator& host, const CommOptions& o) { return make_device_self_communicator(host, o); });
  {
    const plan::Planned planned(config, mesh.shape(), 0, DeviceKind::Cuda);
    run::choose_attention(config, planned.model, planned.plan, device_, mesh.world());
  }
  engine::Engine engine(config, mesh, ledger, device_);
  // Initial values of the right size, but repeated: the host would need a minute for a billion of its own.
  std::vector<float> normal(1 << 20);
  model::init_values({.name = "", .shape = {i64{1} << 20}, .std = 1}, 0, 1, 0, i64{1} << 20, normal.data());
  const std::vector<const model::ParamRow*> rows = engine.model().params();
  engine.set_weights([&](i64 param, i64 begin, i64 count, float* out) {
    const model::ParamRow& row = *rows[param];
    for (i64 i = 0; i < count; ++i) {
      out[i] = row.init == model::Init::Zeros  ? 0.0f
               : row.init == model::Init::Ones ? 1.0f
                                               : row.std * normal[static_cast<size_t>(begin + i) % normal.size()];
    }
  });

  const plan::RunPlan& plan = engine.plan();
  const i64 tokens = plan.B * plan.T * plan.micro_batches;
  const std::vector<i32> ids = Arena::random_integers(tokens, config.model.vocab_size);
  std::vector<i32> targets(ids.begin() + 1, ids.end());
  targets.push_back(ids.front());
  double first_loss = 0, last_loss = 0;
  i64 skipped = 0;
  const auto train = [&] {
    const double start = now();
    const StepRecord r = engine.train_step({ids, targets});
    last_loss = r.loss;
    skipped += r.skipped;
    return now() - start;
  };
  const double set_up_start = now();
  train();
  first_loss = last_loss;
  const double first_s = now() - set_up_start;
  for (int i = 0; i < (small_ ? 1 : 2); ++i) train();
  std::vector<double> steps;
  for (const double start = now(); steps.size() < (small_ ? 2u : 5u) || (!small_ && now() - start < seconds_);)
    steps.push_back(train());

  const double s = median(steps), rate = static_cast<double>(tokens) / s;
  const double flops = engine.model().flops_per_token(plan.T) * rate;
  const i64 used = free_before - device_.memory().free;
  const std::string name = std::filesystem::path(path).stem().string();
  const auto gib = [](i64 bytes) { return static_cast<double>(bytes) / (1 << 30); };
  std::printf("\nstep %s: %ld parameters, %ld x %ld x %ld tokens, %s\n", name.c_str(), engine.model().num_params(),
              plan.micro_batches, plan.B, plan.T, std::string(dtype_name(plan.work)).c_str());
  std::printf("  %.0f tokens/s; median %.2f ms, fastest %.2f, slowest %.2f of %zu steps; first %.1f s\n", rate, s * 1e3,
              *std::min_element(steps.begin(), steps.end()) * 1e3, *std::max_element(steps.begin(), steps.end()) * 1e3,
              steps.size(), first_s);
  std::printf("  MFU %.1f %% of %.0f TFLOP/s, %.1f %% of the %.1f of a large product; loss %.4f -> %.4f, %ld skipped\n",
              flops / kDatasheetFlops * 100, kDatasheetFlops * 1e-12, flops / peak * 100, peak * 1e-12, first_loss,
              last_loss, skipped);
  std::printf("  memory %.2f GiB less free on the device, %.2f GiB scratch of ops; by tag:", gib(used),
              gib(device_.scratch_bytes()));
  std::string tags;
  i64 total = 0;
  for (size_t i = 0; i < static_cast<size_t>(Tag::Count); ++i) {
    const Tag tag = static_cast<Tag>(i);
    const i64 bytes = ledger.peak(tag);
    if (bytes == 0) continue;
    std::printf(" %s %.2f", std::string(tag_name(tag)).c_str(), gib(bytes));
    tags += fmt::format(R"({}"{}": {})", tags.empty() ? "" : ", ", tag_name(tag), bytes);
    if (tag != Tag::Host) total += bytes;
  }
  std::printf("; sum %.2f\n", gib(total));
  std::fflush(stdout);
  if (clock != nullptr) time_of_ops(name, engine, *clock, train);
  const i64 scratch = device_.scratch_bytes(),
            predicted_scratch =
                plan::meter_run(engine.config(), engine.model(), plan, device_.gpu_kernels()).scratch_bytes();
  DS_CHECK(!small_ || scratch == predicted_scratch, Errc::Internal, "ops hold {} bytes, predicted were {}", scratch,
           predicted_scratch);
  record(fmt::format(
      R"("section": "step", "model": "{}", "parameters": {}, "micro_batches": {}, "B": {}, "T": {}, )"
      R"("dtype": "{}", "tokens_per_s": {:.1f}, "step_ms": {:.3f}, "min_ms": {:.3f}, "max_ms": {:.3f}, )"
      R"("steps": {}, "first_step_s": {:.2f}, "flops_per_token": {:.6g}, "mfu": {:.4f}, )"
      R"("mfu_of_product": {:.4f}, "product_tflops": {:.2f}, "first_loss": {:.5f}, "last_loss": {:.5f}, )"
      R"("skipped": {}, "memory_bytes": {}, "scratch_bytes": {}, "ledger_bytes": {}, "tags": {{{}}}, )"
      R"("predicted_scratch_bytes": {}, "attention": "{}")",
      name, engine.model().num_params(), plan.micro_batches, plan.B, plan.T, dtype_name(plan.work), rate, s * 1e3,
      *std::min_element(steps.begin(), steps.end()) * 1e3, *std::max_element(steps.begin(), steps.end()) * 1e3,
      steps.size(), first_s, engine.model().flops_per_token(plan.T), flops / kDatasheetFlops, flops / peak,
      peak * 1e-12, first_loss, last_loss, skipped, used, scratch, total, tags, predicted_scratch,
      run::attention_of(device_)));
  DS_CHECK(std::isfinite(last_loss) && skipped == 0, Errc::Internal, "{}: loss {} and {} skipped steps", path,
           last_loss, skipped);
}

int usage() {
  std::fprintf(stderr,
               "usage: cuda_bench [--small] [--json FILE] [--seconds S] [--by-op] [--cudnn] [--set KEY=VALUE]...\n"
               "                  (ops|attention|features|gemm|step CFG.json...)...\n");
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  bool small = false, stepping = false, by_op = false, cudnn = false;
  double seconds = 8;
  std::FILE* json = nullptr;
  std::vector<std::string> overrides, parts;  // the second: names of sections, and "=CONFIG" for a step
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--small") {
      small = true;
    } else if (arg == "--by-op") {
      by_op = true;
    } else if (arg == "--cudnn") {
      cudnn = true;
    } else if (arg == "--json" && i + 1 < argc) {
      json = std::fopen(argv[++i], "a");
      if (json == nullptr) return std::perror(argv[i]), 2;
    } else if (arg == "--seconds" && i + 1 < argc) {
      seconds = std::atof(argv[++i]);
    } else if (arg == "--set" && i + 1 < argc) {
      overrides.emplace_back(argv[++i]);
    } else if (arg == "ops" || arg == "attention" || arg == "features" || arg == "gemm") {
      parts.push_back(arg);
      stepping = false;
    } else if (arg == "step") {
      stepping = true;
    } else if (stepping && !arg.starts_with('-')) {
      parts.push_back("=" + arg);
    } else {
      return usage();
    }
  }
  if (parts.empty()) return usage();
  // A warning means that something else is measured than was asked for; gpu-check looks for warnings.
  set_log_sink([](LogLevel level, std::string_view message) {
    if (level == LogLevel::Warning)
      std::fprintf(stderr, "cuda_bench: warning: %.*s\n", static_cast<int>(message.size()), message.data());
  });
  try {
    overrides.emplace_back("device=cuda");
    for (const std::string& part : parts) {
      const bool steps = part.starts_with('=');
      const ConfigResult read = steps ? load_config(part.substr(1), overrides, 1) : ConfigResult{};
      DS_CHECK(!steps || read.ok(), Errc::Config, "{}", read.message());
      // As a run would open it, with the cuda settings of its configuration.
      const auto device = steps ? run::open_device(read.config, {}) : make_cuda_device(0, {.cudnn_attention = cudnn});
      DS_CHECK(steps || !cudnn || !device->attention_library().empty(), Errc::Unavailable, "cuDNN cannot be used: {}",
               device->prepare_attention({}));
      DS_CHECK(!by_op || !read.config.cuda.graphs, Errc::Config, "--by-op times no graphs: without cuda.graphs");
      std::optional<testing::OpClock> clock;
      if (steps && by_op) clock.emplace(*device);
      Bench bench(clock ? *clock : *device, small, seconds, json);
      if (part == "ops") bench.ops();
      if (part == "attention") bench.attention();
      if (part == "features") bench.features();
      if (part == "gemm") bench.gemm();
      if (steps) bench.step(part.substr(1), read.config, clock ? &*clock : nullptr);
    }
    // Results that could not be written do not count as measured.
    for (std::FILE* file : {stdout, json}) {
      const bool good = file == nullptr || (std::fflush(file) == 0 && std::ferror(file) == 0);
      DS_CHECK(good, Errc::Io, "{} cannot be written", file == stdout ? "standard output" : "the file of --json");
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "cuda_bench: error: %s\n", e.what());
    const auto* const known = dynamic_cast<const Error*>(&e);
    return known != nullptr && known->code() == Errc::Unavailable ? 4 : 1;
  }
  return 0;
}
