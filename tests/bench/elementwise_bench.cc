// SPDX-License-Identifier: Apache-2.0
// The memory-bound ops against memcpy and a triad of the same run, for one and two threads. "GB/s" counts the bytes
// that the op must read and write once; lines that a store fetches first are not counted, for the yardsticks neither.

#include <benchmark/benchmark.h>

#include <array>
#include <cstring>
#include <vector>

#include "ds/kernels/ops.h"
#include "ds/kernels/state_codes.h"

namespace ds {
namespace {

constexpr i64 kElements = i64{1} << 23;  // 32 MiB of fp32 per tensor
constexpr i64 kColumns = 1024, kRows = kElements / kColumns;

// Tensors of one benchmark; small values, never subnormal.
class Arena {
 public:
  TensorView take(DType t, std::initializer_list<i64> shape) {
    TensorView v = TensorView::of(nullptr, t, shape);
    blocks_.emplace_back(static_cast<size_t>(v.bytes() / 2) + 32, u16{0x3C01});  // finite in every format
    v.data = blocks_.back().data();
    return v;
  }

 private:
  std::vector<std::vector<u16>> blocks_;
};

template <class Run>
void measure(benchmark::State& state, i64 bytes, Run run) {
  ThreadPool pool(static_cast<int>(state.range(0)));
  Stream stream{.pool = &pool};
  run(stream);
  for (auto _ : state) {
    run(stream);
    benchmark::ClobberMemory();
  }
  state.counters["GB/s"] =
      benchmark::Counter(static_cast<double>(bytes) * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
}

const OpTable& ops() { return *cpu_ops(); }

// The overhead of a parallel_for: two empty tiles.
void dispatch(benchmark::State& state) {
  ThreadPool pool(static_cast<int>(state.range(0)));
  for (auto _ : state) pool.parallel_for(2, [](i64 t, int) { benchmark::DoNotOptimize(t); });
}

void memcpy_tiles(benchmark::State& state) {
  Arena a;
  const TensorView x = a.take(DType::F32, {kElements}), y = a.take(DType::F32, {kElements});
  constexpr i64 kTile = 1 << 16;
  measure(state, 2 * x.bytes(), [&](Stream& s) {
    s.pool->parallel_for(x.bytes() / kTile,
                         [&](i64 t, int) { std::memcpy(y.as<char>() + t * kTile, x.as<char>() + t * kTile, kTile); });
  });
}

void triad(benchmark::State& state) {
  Arena a;
  const TensorView x = a.take(DType::F32, {kElements}), y = a.take(DType::F32, {kElements}),
                   z = a.take(DType::F32, {kElements});
  constexpr i64 kTile = 1 << 14;
  measure(state, 3 * x.bytes(), [&](Stream& s) {
    s.pool->parallel_for(kElements / kTile, [&](i64 t, int) {
      const float *xp = x.as<float>() + t * kTile, *yp = y.as<float>() + t * kTile;
      float* zp = z.as<float>() + t * kTile;
      for (i64 i = 0; i < kTile; ++i) zp[i] = xp[i] + 3.0f * yp[i];
    });
  });
}

void adamw(benchmark::State& state) {
  Arena a;
  const auto f32 = [&] { return a.take(DType::F32, {kElements}); };
  const TensorView param = a.take(DType::BF16, {kElements}), master = f32(), m = f32(), v = f32(), grad = f32();
  measure(state, 7 * master.bytes() + param.bytes(),
          [&, tensor = UpdateTensor{param, master, {m, v}, grad, 0.01f}, verdict = GradVerdict{}](Stream& s) {
            ops().update({&tensor, 1}, &verdict, {.lr = 1e-4f}, s);
          });
}

// The types of the states, beside fp32. "M/s" are elements; compare these.
template <DType First, DType Second>
void adamw_states(benchmark::State& state) {
  Arena a;
  const auto f32 = [&] { return a.take(DType::F32, {kElements}); };
  const TensorView param = a.take(DType::BF16, {kElements}), master = f32(), grad = f32();
  TensorView m = a.take(First, {kElements}), v = a.take(Second, {kElements});
  if (is_coded(First)) {
    m.scale = a.take(DType::F32, {state_blocks(kElements)}).as<float>();
    v.scale = a.take(DType::F32, {state_blocks(kElements)}).as<float>();
  }
  std::vector<float> values(static_cast<size_t>(kElements));
  for (i64 i = 0; i < kElements; ++i) {
    const u32 random = RngKey{1, 2, 3}.bits(static_cast<u64>(i % 65536));
    values[i] = RngKey::uniform(random) * 1e-3f;
    grad.as<float>()[i] = (RngKey::uniform(random) - 0.5f) * 1e-3f;
  }
  encode_state(m, values.data(), 0, kElements);
  encode_state(v, values.data(), 0, kElements);
  measure(state, 3 * master.bytes() + param.bytes() + 2 * m.bytes() + 2 * v.bytes(),
          [&, tensor = UpdateTensor{param, master, {m, v}, grad, 0.01f}, verdict = GradVerdict{}](Stream& s) {
            ops().update({&tensor, 1}, &verdict, {.lr = 1e-4f}, s);
          });
  state.counters["M/s"] =
      benchmark::Counter(static_cast<double>(kElements) * 1e-6, benchmark::Counter::kIsIterationInvariantRate);
}

template <DType From, DType To>
void cast(benchmark::State& state) {
  Arena a;
  const TensorView x = a.take(From, {kElements}), y = a.take(To, {kElements});
  measure(state, x.bytes() + y.bytes(), [&](Stream& s) { ops().cast(y, x, s); });
}

template <DType From>
void fold_four(benchmark::State& state) {
  Arena a;
  const std::array<TensorView, 4> sources{a.take(From, {kElements}), a.take(From, {kElements}),
                                          a.take(From, {kElements}), a.take(From, {kElements})};
  const TensorView dst = a.take(DType::F32, {kElements});
  measure(state, 4 * sources[0].bytes() + dst.bytes(), [&](Stream& s) { ops().fold(dst, sources, false, s); });
}

// Codes and scales of one row of kElements.
struct Coded {
  Coded(Arena& a, CodeFormat f, i64 rows = 1)
      : format(f),
        codes(a.take(DType::U8, {rows, f.code_bytes(kElements)})),
        scales(a.take(DType::F32, {rows, f.num_blocks(kElements)})) {}
  i64 bytes() const { return codes.bytes() + scales.bytes(); }

  CodeFormat format;
  TensorView codes, scales;
};

template <DType From, int kBits>
void quantize(benchmark::State& state) {
  Arena a;
  const TensorView x = a.take(From, {1, kElements});
  const Coded coded(a, {.bits = kBits});
  measure(state, x.bytes() + coded.bytes(),
          [&](Stream& s) { ops().quantize(coded.codes, coded.scales, x, {}, coded.format, {}, s); });
}

template <DType To, int kBits>
void dequantize(benchmark::State& state) {
  Arena a;
  const TensorView y = a.take(To, {1, kElements});
  const Coded coded(a, {.bits = kBits});
  measure(state, y.bytes() + coded.bytes(),
          [&](Stream& s) { ops().dequantize(y, coded.codes, coded.scales, coded.format, s); });
}

template <int kBits>
void dequantize_fold_four(benchmark::State& state) {
  Arena a;
  const TensorView dst = a.take(DType::F32, {kElements});
  const Coded coded(a, {.bits = kBits}, 4);
  measure(state, dst.bytes() + coded.bytes(),
          [&](Stream& s) { ops().dequantize_fold(dst, coded.codes, coded.scales, false, 1, coded.format, s); });
}

void quantize_signs(benchmark::State& state) {
  Arena a;
  const TensorView y = a.take(DType::F32, {kElements}), codes = a.take(DType::U8, {kElements / 8});
  i64 bits = std::bit_cast<u32>(8.0f), sum[2] = {};
  float scale = 0;
  measure(state, 2 * y.bytes() + codes.bytes(), [&](Stream& s) {
    ops().quantize_signs(codes, TensorView::of(&scale, DType::F32, {1}), y, TensorView::of(&bits, DType::I64, {1}),
                         TensorView::of(sum, DType::I64, {2}), kElements, s);
  });
}

void sum_squares(benchmark::State& state) {
  Arena a;
  const TensorView x = a.take(DType::F32, {kElements});
  i64 bits = std::bit_cast<u32>(8.0f), sum[2] = {};
  measure(state, x.bytes(), [&](Stream& s) {
    ops().sum_squares(TensorView::of(sum, DType::I64, {2}), x, TensorView::of(&bits, DType::I64, {1}), s);
  });
}

void max_abs(benchmark::State& state) {
  Arena a;
  const TensorView x = a.take(DType::F32, {kElements});
  i64 bits = 0;
  measure(state, x.bytes(), [&](Stream& s) { ops().max_abs(TensorView::of(&bits, DType::I64, {1}), x, s); });
}

template <DType T, Activation f>
void activation_fwd(benchmark::State& state) {
  Arena a;
  const TensorView x = a.take(T, {kElements}), y = a.take(T, {kElements});
  measure(state, 2 * x.bytes(), [&](Stream& s) { ops().activation_fwd(y, x, f, s); });
}

template <DType T, Activation f>
void activation_bwd(benchmark::State& state) {
  Arena a;
  const TensorView x = a.take(T, {kElements}), dy = a.take(T, {kElements}), dx = a.take(T, {kElements});
  measure(state, 3 * x.bytes(), [&](Stream& s) { ops().activation_bwd(dx, dy, x, f, s); });
}

template <DType T>
void layernorm_fwd(benchmark::State& state) {
  Arena a;
  const TensorView x = a.take(T, {kRows, kColumns}), y = a.take(T, {kRows, kColumns}), w = a.take(T, {kColumns}),
                   b = a.take(T, {kColumns}), mean = a.take(DType::F32, {kRows}), rstd = a.take(DType::F32, {kRows});
  measure(state, 2 * x.bytes(), [&](Stream& s) { ops().layernorm_fwd(y, mean, rstd, x, w, b, 1e-5f, s); });
}

template <DType T>
void layernorm_bwd(benchmark::State& state) {
  Arena a;
  const TensorView x = a.take(T, {kRows, kColumns}), dy = a.take(T, {kRows, kColumns}),
                   dx = a.take(T, {kRows, kColumns}), w = a.take(T, {kColumns}), dw = a.take(T, {kColumns}),
                   db = a.take(T, {kColumns}), mean = a.take(DType::F32, {kRows}), rstd = a.take(DType::F32, {kRows});
  measure(state, 3 * x.bytes(), [&](Stream& s) { ops().layernorm_bwd(dx, dw, db, dy, {}, x, w, mean, rstd, s); });
}

// 8192 rows of gradient into GPT-2's table.
void embedding_bwd(benchmark::State& state) {
  Arena a;
  constexpr i64 V = 50257, C = 256, R = 8192;
  const TensorView dtable = a.take(DType::F32, {V, C}), dy = a.take(DType::BF16, {R, C}), ids = a.take(DType::I32, {R});
  for (i64 r = 0; r < R; ++r) ids.as<i32>()[r] = static_cast<i32>(r * r % 997 * 50);
  measure(state, dtable.bytes() + dy.bytes(), [&](Stream& s) { ops().embedding_bwd(dtable, dy, ids, 0, false, s); });
}

constexpr DType F32 = DType::F32, BF16 = DType::BF16;
#define DS_BENCH_THREADS(...) BENCHMARK(__VA_ARGS__)->ArgName("threads")->Arg(1)->Arg(2)->UseRealTime()

DS_BENCH_THREADS(dispatch);
DS_BENCH_THREADS(memcpy_tiles);
DS_BENCH_THREADS(triad);
DS_BENCH_THREADS(adamw);
DS_BENCH_THREADS(adamw_states<F32, F32>);
DS_BENCH_THREADS(adamw_states<DType::I8, DType::U8>);
DS_BENCH_THREADS(adamw_states<BF16, BF16>);
DS_BENCH_THREADS(cast<F32, BF16>);
DS_BENCH_THREADS(cast<BF16, F32>);
DS_BENCH_THREADS(fold_four<F32>);
DS_BENCH_THREADS(fold_four<BF16>);
DS_BENCH_THREADS(quantize<F32, 8>);
DS_BENCH_THREADS(quantize<BF16, 8>);
DS_BENCH_THREADS(quantize<BF16, 4>);
DS_BENCH_THREADS(quantize_signs);
DS_BENCH_THREADS(dequantize<F32, 8>);
DS_BENCH_THREADS(dequantize<BF16, 8>);
DS_BENCH_THREADS(dequantize<BF16, 4>);
DS_BENCH_THREADS(dequantize<F32, 1>);
DS_BENCH_THREADS(dequantize_fold_four<8>);
DS_BENCH_THREADS(dequantize_fold_four<4>);
DS_BENCH_THREADS(dequantize_fold_four<1>);
DS_BENCH_THREADS(sum_squares);
DS_BENCH_THREADS(max_abs);
DS_BENCH_THREADS(activation_fwd<F32, Activation::GeluTanh>);
DS_BENCH_THREADS(activation_fwd<BF16, Activation::GeluTanh>);
DS_BENCH_THREADS(activation_bwd<BF16, Activation::GeluTanh>);
DS_BENCH_THREADS(activation_fwd<BF16, Activation::GeluErf>);
DS_BENCH_THREADS(layernorm_fwd<F32>);
DS_BENCH_THREADS(layernorm_fwd<BF16>);
DS_BENCH_THREADS(layernorm_bwd<F32>);
DS_BENCH_THREADS(layernorm_bwd<BF16>);
DS_BENCH_THREADS(embedding_bwd);

}  // namespace
}  // namespace ds

BENCHMARK_MAIN();
