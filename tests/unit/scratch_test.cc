// SPDX-License-Identifier: Apache-2.0
// Worker scratch as predicted and as pools hold it: op by op on every backend of this machine, and of engines that
// train.

#include "plan/scratch.h"

#include <gmock/gmock.h>

#include <set>

#include "equivalence/layouts.h"
#include "parity/parity.h"
#include "probe/host.h"
#include "slow_set.h"

namespace ds::testing {
namespace scratch_test {

constexpr int kThreads[] = {1, 2, 3, 5};

// `call(ops, stream)` calls one op: for real on a new pool, and metered. Returns the meter's bytes for one thread.
template <class Call>
i64 expect_metered(const OpTable& ops, int threads, const std::string& what, Call call) {
  const OpTable* const metered = scratch_ops(ops.name);
  if (metered == nullptr) {
    ADD_FAILURE() << ops.name << ": no scratch_ops";
    return 0;
  }
  ThreadPool pool(threads);
  Stream stream{.pool = &pool};
  call(ops, stream);
  ScratchMeter meter{.threads = threads};
  Stream dry{.native = &meter};
  call(*metered, dry);
  EXPECT_EQ(pool.scratch_bytes(), threads * meter.most) << ops.name << ", " << threads << " threads, " << what;
  return meter.most;
}

void expect_product(const OpTable& ops, DType work, i64 M, i64 N, i64 K, const MatmulParams& p, bool finished) {
  const DType to = finished ? work : DType::F32;
  Tensor a(work, p.trans_a ? std::initializer_list<i64>{K, M} : std::initializer_list<i64>{M, K}),
      b(work, p.trans_b ? std::initializer_list<i64>{N, K} : std::initializer_list<i64>{K, N}), c(to, {M, N}),
      bias(work, {N});
  a.fill(1), b.fill(1), c.fill(0), bias.fill(0);
  for (const int threads : kThreads) {
    const i64 most = expect_metered(
        ops, threads,
        fmt::format("{} {}x{}x{} {}{}{}{}", dtype_name(work), M, N, K, p.trans_a, p.trans_b, p.accumulate, finished),
        [&](const OpTable& table, Stream& s) {
          table.matmul(c, a, b, finished ? bias.view() : TensorView{}, {}, {}, p, s);
        });
    // oneDNN may need none.
    if (ops.name.starts_with("cpu.avx")) {
      EXPECT_EQ(most > 0, M * N > 0);
    }
  }
}

class ScratchOps : public ::testing::TestWithParam<const OpTable*> {};

TEST_P(ScratchOps, MeterProducts) {
  const i64 shapes[][3] = {{0, 5, 3},      {1, 1, 1},      {1, 100, 900},  {2, 64, 385},    {3, 65, 7},
                           {4, 130, 2000}, {5, 1, 1},      {7, 33, 384},   {16, 16, 16},    {17, 100, 769},
                           {64, 48, 385},  {100, 1, 40},   {130, 257, 90}, {300, 1025, 33}, {1100, 70, 50},
                           {513, 600, 64}, {520, 1030, 20}};
  for (const auto& [M, N, K] : shapes) {
    for (const DType work : kWorkDTypes) {
      for (const bool trans_a : {false, true}) {
        for (const bool trans_b : {false, true}) {
          expect_product(*GetParam(), work, M, N, K, {.trans_a = trans_a, .trans_b = trans_b}, false);
        }
      }
      expect_product(*GetParam(), work, M, N, K, {.trans_a = true, .accumulate = true}, false);
      expect_product(*GetParam(), work, M, N, K, {.trans_b = true, .activation = Activation::GeluTanh}, true);
      if (HasFailure()) return;
    }
  }
}

TEST_P(ScratchOps, MeterPackedMatrices) {
  const OpTable& ops = *GetParam();
  const i64 shapes[][3] = {{1, 1, 1}, {1, 100, 900}, {7, 33, 384}, {40, 130, 1801}, {300, 1025, 33}};
  for (const auto& [M, N, K] : shapes) {
    for (const DType work : kWorkDTypes) {
      Tensor a(work, {M, K}), m(work, {N, K}), c(work, {M, N});
      a.fill(1), m.fill(1);
      TensorView b = m;
      b.panels = panels_of(ops, work);
      for (const int threads : kThreads) {
        const std::string what = fmt::format("{} {}x{}x{}", dtype_name(work), M, N, K);
        EXPECT_GT(expect_metered(ops, threads, what, [&](const OpTable& t, Stream& s) { t.pack_matrix(m, s); }), 0);
        const auto product = [&](const OpTable& t, Stream& s) { t.matmul(c, a, b, {}, {}, {}, {.trans_b = true}, s); };
        EXPECT_GT(expect_metered(ops, threads, what, product), 0);
      }
      if (HasFailure()) return;
    }
  }
}

TEST_P(ScratchOps, MeterMatricesOfCodes) {
  const OpTable& ops = *GetParam();
  const i64 shapes[][3] = {{1, 1, 16}, {1, 100, 960}, {7, 33, 384}, {40, 130, 1808}, {300, 1025, 32}, {700, 75, 64}};
  for (const auto& [M, N, K] : shapes) {
    for (const DType work : kWorkDTypes) {
      for (const CodedForm& form : {CodedForm{.kind = CodeKind::Int8, .group = static_cast<i32>(K)},
                                    CodedForm{.kind = CodeKind::Int8, .integer = true, .group = static_cast<i32>(K)},
                                    CodedForm{.kind = CodeKind::Int4, .offsets = true, .integer = true, .group = 16}}) {
        Tensor a(work, {M, K}), c(work, {M, N});
        a.fill(1);
        TensorView b = TensorView::of(nullptr, work, {N, K});
        b.codes = form;
        std::vector<u8> bytes(static_cast<size_t>(b.bytes()));
        b.data = bytes.data();
        for (const int threads : kThreads) {
          const std::string what =
              fmt::format("{} {}x{}x{} integer {} group {}", dtype_name(work), M, N, K, form.integer, form.group);
          b.panels = {};
          EXPECT_GT(expect_metered(ops, threads, what, [&](const OpTable& t, Stream& s) { t.pack_matrix(b, s); }), 0);
          b.panels = panels_of(ops, work, b.codes);
          EXPECT_GT(
              expect_metered(ops, threads, what,
                             [&](const OpTable& t, Stream& s) { t.matmul(c, a, b, {}, {}, {}, {.trans_b = true}, s); }),
              0);
          TensorView batch = b;
          batch.rank = 3, batch.shape = {1, N, K};
          EXPECT_GT(expect_metered(ops, threads, what + " grouped",
                                   [&](const OpTable& t, Stream& s) { t.grouped_matmul(c, a, batch, {}, true, s); }),
                    0);
        }
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(ScratchOps, MeterProductsInFp8) {
  const i64 shapes[][3] = {{0, 128, 128}, {1, 128, 128}, {16, 256, 400}, {40, 128, 384}, {130, 384, 1040}};
  for (const auto& [M, N, K] : shapes) {
    const Fp8Layout of_a{M, K, Fp8Blocks::Rows}, of_b{N, K, Fp8Blocks::Squares};
    Tensor a(DType::U8, {of_a.padded_rows(), of_a.padded_k()}), b(DType::U8, {of_b.padded_rows(), of_b.padded_k()}),
        a_scales(DType::F32, {of_a.scale_rows(), of_a.scale_columns()}),
        b_scales(DType::F32, {of_b.scale_rows(), of_b.scale_columns()}), c(DType::BF16, {M, N});
    for (Tensor* t : {&a, &b}) std::memset(t->view().data, 0, static_cast<size_t>(t->view().bytes()));
    a_scales.fill(1), b_scales.fill(1);
    const auto codes = [](const Tensor& t) {
      TensorView v = t;
      v.dtype = DType::F8E4M3;
      return v;
    };
    for (const int threads : kThreads) {
      const i64 most = expect_metered(
          *GetParam(), threads, fmt::format("FP8 {}x{}x{}", M, N, K), [&](const OpTable& table, Stream& s) {
            table.matmul_fp8(c, codes(a), a_scales, codes(b), b_scales, {}, {}, {of_a.blocks, of_b.blocks}, s);
          });
      EXPECT_EQ(most > 0, M > 0);
    }
  }
}

TEST_P(ScratchOps, MeterGradientsOfNorms) {
  for (const i64 R : {0, 1, 3, 63, 130, 2000}) {
    for (const i64 C : {1, 7, 48, 300, 16385}) {
      if (R * C > 1 << 20) continue;
      Tensor x(DType::F32, {R, C}), weight(DType::F32, {C}), stats(DType::F32, {R});
      Tensor dx(x), dy(x), dweight(weight), dbias(weight);
      for (Tensor* t : {&x, &weight, &stats, &dy}) t->fill(0.5f);
      for (const int threads : kThreads) {
        const std::string what = fmt::format("{}x{}", R, C);
        expect_metered(*GetParam(), threads, what, [&](const OpTable& ops, Stream& s) {
          ops.layernorm_bwd(dx, dweight, dbias, dy, {}, x, weight, stats, stats, s);
        });
        expect_metered(*GetParam(), threads, what, [&](const OpTable& ops, Stream& s) {
          ops.rmsnorm_bwd(dx, dweight, dy, {}, x, weight, stats, s);
        });
      }
    }
  }
}

TEST_P(ScratchOps, MeterGradientsOfEmbeddings) {
  for (const i64 R : {0, 1, 9, 500}) {
    for (const i64 V : {1, 13, 700}) {
      Tensor dy(DType::F32, {R, 5}), ids(DType::I32, {R}), dtable(DType::F32, {V, 5});
      dy.fill(1);
      for (i64 r = 0; r < R; ++r) ids.set(r, static_cast<float>(r * 7 % V));
      for (const int threads : kThreads) {
        expect_metered(*GetParam(), threads, fmt::format("{} of {}", R, V),
                       [&](const OpTable& ops, Stream& s) { ops.embedding_bwd(dtable, dy, ids, 0, false, s); });
      }
    }
  }
}

TEST_P(ScratchOps, MeterStatisticsOfRouters) {
  for (const i64 R : {0, 1, 33, 5000}) {
    for (const i64 E : {1, 64}) {
      Tensor chosen(DType::I32, {R, 2}), scores(DType::F32, {R, E}), stats(DType::F32, {RouterStats{E}.size()});
      chosen.fill(0), scores.fill(0.5f);
      for (const int threads : kThreads) {
        expect_metered(*GetParam(), threads, fmt::format("{} of {}", R, E), [&](const OpTable& ops, Stream& s) {
          ops.router_stats(stats, chosen, {}, scores, scores, {}, {}, {}, s);
        });
        Tensor kept(chosen);
        expect_metered(*GetParam(), threads, fmt::format("drop {} of {}", R, E), [&](const OpTable& ops, Stream& s) {
          ops.drop_choices(kept, chosen, {}, {.experts = E, .capacity = 3}, s);
        });
      }
    }
  }
}

// Whatever the groups have: the offsets are unknown when memory is planned.
TEST_P(ScratchOps, MeterProductsOfGroups) {
  for (const auto& [M, N, K] :
       {std::array<i64, 3>{0, 8, 8}, {1, 1, 1}, {40, 33, 800}, {400, 600, 17}, {700, 100, 900}, {30, 1200, 385}}) {
    for (const i64 E : {1, 3}) {
      for (const DType work : kWorkDTypes) {
        Tensor a(work, {M, K}), b(work, {E, N, K}), c(work, {M, N}), offsets(DType::I32, {2 * E + 1});
        a.fill(1), b.fill(1), c.fill(0);
        for (const i64 each : {i64{0}, M / (2 * E)}) {
          for (i64 g = 0; g <= 2 * E; ++g) offsets.view().as<i32>()[g] = static_cast<i32>(g * each);
          for (const int threads : kThreads) {
            const std::string what = fmt::format("{} {}x{}x{}, {} of {}", dtype_name(work), M, N, K, E, each);
            expect_metered(*GetParam(), threads, what,
                           [&](const OpTable& ops, Stream& s) { ops.grouped_matmul(c, a, b, offsets, true, s); });
            expect_metered(*GetParam(), threads, "gradient " + what,
                           [&](const OpTable& ops, Stream& s) { ops.grouped_matmul_grad(b, c, a, offsets, false, s); });
          }
          if (E == 1) {
            expect_metered(*GetParam(), 2, "no offsets",
                           [&](const OpTable& ops, Stream& s) { ops.grouped_matmul(c, a, b, {}, true, s); });
          }
          if (HasFailure()) return;
        }
        const TensorView across = TensorView::of(b.view().data, work, {E, K, N});
        expect_metered(*GetParam(), 2, "not transposed",
                       [&](const OpTable& ops, Stream& s) { ops.grouped_matmul(c, a, across, offsets, false, s); });
      }
    }
  }
}

TEST_P(ScratchOps, MeterAttention) {
  struct Case {
    i64 B, T, S, H, G, D;
  };
  // Few rows of many keys: keys in parts. Few heads of many rows: gradients in chunks.
  for (const Case& c : {Case{1, 1, 1, 1, 1, 1},
                        {1, 1, 2100, 2, 1, 16},
                        {2, 5, 1030, 4, 2, 24},
                        {1, 300, 300, 1, 1, 33},
                        {2, 97, 130, 6, 3, 32},
                        {3, 33, 33, 4, 4, 64},
                        {8, 65, 65, 6, 6, 12},
                        {1, 700, 700, 2, 2, 128}}) {
    for (const DType work : kWorkDTypes) {
      Tensor q(work, {c.B, c.T, c.H, c.D}), k(work, {c.B, c.S, c.G, c.D}), lse(DType::F32, {c.B, c.H, c.T});
      for (Tensor* t : {&q, &k}) t->fill(0.1f);
      Tensor v(k), o(q), dout(q), dq(q), dk(k), dv(k);
      for (const int threads : kThreads) {
        const std::string what = fmt::format("{} {}x{}x{}x{}x{}x{}", dtype_name(work), c.B, c.T, c.S, c.H, c.G, c.D);
        expect_metered(*GetParam(), threads, what,
                       [&](const OpTable& ops, Stream& s) { ops.attention_fwd(o, lse, q, k, v, {}, s); });
        expect_metered(*GetParam(), threads, what, [&](const OpTable& ops, Stream& s) {
          ops.attention_bwd(dq, dk, dv, dout, q, k, v, o, lse, {}, s);
        });
      }
    }
  }
}

// One long sequence beside short ones, whose parts are shared.
TEST_P(ScratchOps, MeterAttentionOfSequences) {
  for (const i64 count : {1, 3, 40}) {
    for (const i64 longest : {100, 3000}) {
      for (const DType work : kWorkDTypes) {
        constexpr i64 kPage = 64;
        std::vector<i32> begins = {0}, keys, tables;
        for (i64 s = 0; s < count; ++s) {
          begins.push_back(begins.back() + narrow<i32>(1 + s % 3));
          keys.push_back(narrow<i32>(s + 1 < count ? 5 + s : longest));
          tables.push_back(0);
        }
        const std::vector<i32> pages(static_cast<size_t>(longest / kPage + 1));
        Tensor q(work, {1, begins.back(), 6, 32}), k(work, {1, kPage, 2, 32}), lse(DType::F32, {1, 6, begins.back()});
        for (Tensor* t : {&q, &k}) t->fill(0.1f);
        Tensor o(q);
        TensorView all = k;
        all.shape[1] = longest;
        AttentionParams p;
        p.pages = pages.data(), p.page = kPage;
        p.sequences = {.count = count, .begins = begins.data(), .keys = keys.data(), .tables = tables.data()};
        for (const int threads : kThreads)
          expect_metered(*GetParam(), threads, fmt::format("{} {}x{}", dtype_name(work), count, longest),
                         [&](const OpTable& ops, Stream& s) { ops.attention_fwd(o, lse, q, all, all, p, s); });
      }
    }
  }
}

TEST_P(ScratchOps, MeterTheCrossEntropyOfALinearLayer) {
  for (const auto& [T, chunk] : {std::pair{1, 1}, {7, 3}, {100, 64}, {300, 300}}) {
    for (const auto& [C, V] : {std::pair{5, 3}, {40, 61}, {100, 1030}}) {
      for (const DType work : kWorkDTypes) {
        Tensor h(work, {T, C}), weight(work, {V, C}), bias(work, {V}), targets(DType::I32, {T}),
            logits(DType::F32, {chunk, V}), losses(DType::F32, {T}), dh(h), dweight(DType::F32, {V, C}),
            dbias(DType::F32, {V});
        for (Tensor* t : {&h, &weight, &bias}) t->fill(0.25f);
        targets.fill(1);
        const CrossEntropyParams p{.chunk_tokens = chunk};
        for (const int threads : kThreads) {
          for (const bool gradient : {false, true}) {
            const auto wanted = [&](Tensor& t) { return gradient ? t.view() : TensorView{}; };
            expect_metered(*GetParam(), threads, fmt::format("{} {}/{} {}x{}", dtype_name(work), T, chunk, C, V),
                           [&](const OpTable& ops, Stream& s) {
                             ops.linear_cross_entropy(losses, wanted(dh), wanted(dweight), wanted(dbias), h, weight,
                                                      bias, targets, logits, p, s);
                           });
          }
        }
      }
    }
  }
}

std::vector<const OpTable*> simd_backends() {
  std::vector<const OpTable*> tables;
  for (const char* isa : {"avx2", "avx512", "avx512_bf16", "onednn", "amx"}) {
    if (const OpTable* t = cpu_ops(isa)) tables.push_back(t);
  }
  return tables;
}

std::string name_of(const ::testing::TestParamInfo<const OpTable*>& info) {
  std::string name(info.param->name);
  std::ranges::replace(name, '.', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Backends, ScratchOps, ::testing::ValuesIn(simd_backends()), name_of);

TEST(Scratch, IsNotKnownOfOtherBackends) {
  EXPECT_EQ(scratch_ops("NVIDIA H200"), nullptr);
  EXPECT_EQ(scratch_ops("auto"), nullptr);
}

// Every rank of a run: after each step, and after an evaluation, its device holds the scratch of its plan.
void expect_engines_hold(const Config& c, int ranks, int threads, const OpTable& ops, bool any = true) {
  Hooks hooks;
  const auto check = [&](engine::Engine& engine, const char* when) {
    const auto said = plan::scratch_bytes(engine.config(), engine.model(), engine.plan(), ops, threads);
    ASSERT_TRUE(said.has_value());
    EXPECT_EQ(engine.device().scratch_bytes(), *said) << when << ", rank " << engine.mesh().rank();
    EXPECT_EQ(*said > 0, any);
  };
  hooks.after_step = [&](engine::Engine& engine, i64 step) {
    check(engine, "a step");
    if (step == 0) return;
    engine.evaluate(2, [](i64, std::span<i32> ids, std::span<i32> targets, std::span<i32>) {
      std::ranges::fill(ids, 3);
      std::ranges::fill(targets, 3);
      return true;
    });
    check(engine, "an evaluation");
  };
  train_threads(c, ranks, 2, threads, hooks, {}, ops);
}

class Scratch : public ::testing::TestWithParam<const OpTable*> {};

TEST_P(Scratch, IsWhatAnEngineHolds) {
  for (ModelConfig config : {tiny_gpt2(), tiny_llama(), tiny_bert()}) {
    for (const bool bf16 : {false, true}) {
      for (const auto granularity :
           {CheckpointGranularity::None, CheckpointGranularity::Layer, CheckpointGranularity::Selective}) {
        for (const int threads : {1, 2}) {
          Config c = tiny_config(config, 1, 2, 0);
          c.bf16.enabled = bf16;
          c.communication_data_type = bf16 ? WireType::BF16 : WireType::F32;
          c.activation_checkpointing.granularity = granularity;
          SCOPED_TRACE(fmt::format("{} {} {} {} threads", family_name(config.family), bf16 ? "bf16" : "fp32",
                                   static_cast<int>(granularity), threads));
          expect_engines_hold(c, 1, threads, *GetParam());
        }
      }
    }
  }
}

TEST_P(Scratch, IsWhatAnEngineWithProductsInFp8Holds) {
  ModelConfig model = tiny_llama();
  model.hidden = 128, model.head_dim = 64, model.intermediate = 256;
  for (const Layout& l : {Layout{}, Layout{.dp = 2, .checkpoints = Granularity::Layer, .stage = 3}}) {
    Config c = config_of(model, l, 2);
    c.bf16.enabled = c.fp8.enabled = true;
    c.communication_data_type = WireType::BF16;
    expect_engines_hold(c, l.ranks(), 2, *GetParam());
  }
}

TEST_P(Scratch, IsWhatEveryRankOfAMeshHolds) {
  using Mode = SequenceParallelMode;
  for (ModelConfig config : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama())}) {
    for (const Layout& l :
         {Layout{.dp = 2, .stage = 3}, Layout{.pp = 2, .schedule = Kind::ZeroBubbleH1}, Layout{.tp = 2, .stage = 1},
          Layout{.tp = 2, .sequence = true}, Layout{.sp = 2, .mode = Mode::Ulysses},
          Layout{.sp = 2, .mode = Mode::Ring}, Layout{.pp = 2, .schedule = Kind::Interleaved, .chunks = 2},
          Layout{.pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2},
          Layout{.pp = 2, .tp = 2, .checkpoints = Granularity::Layer, .stage = 1}}) {
      if (l.chunks > 1 && config.layers < 4) config.layers = 4;
      for (const int threads : {1, 2}) {
        Config c = config_of(config, l);
        c.bf16.enabled = threads == 2;
        SCOPED_TRACE(fmt::format("{} {} {} threads", family_name(config.family), l.name(), threads));
        expect_engines_hold(c, l.ranks(), threads, *GetParam());
      }
    }
  }
}

TEST_P(Scratch, IsWhatAnEvaluationHolds) {
  for (const ModelConfig& config : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama())}) {
    for (const Layout& l : {Layout{}, Layout{.pp = 2}, Layout{.tp = 2}, Layout{.sp = 2}}) {
      for (const int threads : {1, 2}) {
        Config c = config_of(config, l);
        c.bf16.enabled = threads == 2;
        c.use = ConfigUse::Evaluate;
        SCOPED_TRACE(fmt::format("{} {} {} threads", family_name(config.family), l.name(), threads));
        const auto body = [&](engine::Engine& engine) {
          engine.evaluate(2, [](i64, std::span<i32> ids, std::span<i32> targets, std::span<i32>) {
            std::ranges::fill(ids, 3);
            std::ranges::fill(targets, 3);
            return true;
          });
          EXPECT_EQ(engine.device().scratch_bytes(),
                    plan::scratch_bytes(engine.config(), engine.model(), engine.plan(), *GetParam(), threads));
        };
        with_engines(c, l.ranks(), body, *GetParam(), threads);
      }
    }
  }
}

// Sequences that grow, layers that drop tokens: shorter passes may take more than whole ones, and a run may never come
// to these.
TEST_P(Scratch, IsWhatPassesOfAllLengthsHold) {
  for (ModelConfig model : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama())}) {
    model.max_positions = 96;
    for (const bool bf16 : {false, true}) {
      for (const bool grows : {false, true}) {
        for (const bool drops : {false, true}) {
          Config c = config_of(model, {}, 2);
          c.data.seq_length = 96;
          c.data.split = 0;
          c.bf16.enabled = bf16;
          if (grows) {
            c.curriculum = {.enabled = true, .min_difficulty = 12, .max_difficulty = 96};
            c.curriculum.total_curriculum_step = 6;
            c.curriculum.difficulty_step = 4;
          }
          if (drops) {
            RandomLtdConfig& ltd = c.random_ltd;
            ltd.data_efficiency = ltd.data_routing = ltd.enabled = true;
            ltd.layers = {0, 1};
            ltd.min_value = 8, ltd.max_value = 90, ltd.require_steps = 6, ltd.seq_per_step = 2;
          }
          SCOPED_TRACE(
              fmt::format("{} {} grows {} drops {}", family_name(model.family), bf16 ? "bf16" : "fp32", grows, drops));
          for (const i64 steps : {1, 3, 7}) {
            c.steps = steps;
            Hooks hooks;
            hooks.length = [&](i64 step) { return plan::lengths_of_step(c, step + 1).sequence; };
            hooks.after_step = [&](engine::Engine& engine, i64 step) {
              if (step + 1 < steps) return;
              EXPECT_EQ(engine.device().scratch_bytes(),
                        plan::scratch_bytes(engine.config(), engine.model(), engine.plan(), *GetParam(), 2))
                  << steps << " steps";
              Config evaluates = c;
              evaluates.data.split = 0.1;
              engine.evaluate(1, [](i64, std::span<i32> ids, std::span<i32> targets, std::span<i32>) {
                std::ranges::fill(ids, 3);
                std::ranges::fill(targets, 3);
                return true;
              });
              EXPECT_EQ(engine.device().scratch_bytes(),
                        plan::scratch_bytes(evaluates, engine.model(), engine.plan(), *GetParam(), 2))
                  << "evaluated after " << steps;
            };
            traces_of_threads(c, 1, steps, 2, hooks, {}, *GetParam());
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Scratch, ::testing::ValuesIn(simd_backends()), name_of);

// Calls of ops that reserve scratch, by everything that this can depend on, of each thread. oneDNN's scratch for AMX is
// no simple function of shapes; but the same calls take the same.
thread_local std::set<std::string> seen_calls;

void note(const char* op, std::initializer_list<TensorView> views, std::initializer_list<i64> numbers) {
  std::string text = op;
  for (const TensorView& v : views) {
    text += v ? fmt::format(" {}", dtype_name(v.dtype)) : " -";
    for (int d = 0; v && d < v.rank; ++d) text += fmt::format(":{}/{}", v.dim(d), v.stride[d]);
  }
  for (const i64 n : numbers) text += fmt::format(" {}", n);
  seen_calls.insert(std::move(text));
}

// The ops of base(), which note their calls.
template <const OpTable& (*base)()>
OpTable noting() {
  OpTable table = base();
  table.matmul = [](TensorView c, TensorView a, TensorView b, TensorView bias, TensorView preact, TensorView residual,
                    const MatmulParams& p, Stream& s) noexcept {
    note("matmul", {c, a, b, bias, preact, residual},
         {p.trans_a, p.trans_b, p.accumulate, p.rowwise, static_cast<i64>(p.activation)});
    base().matmul(c, a, b, bias, preact, residual, p, s);
  };
  table.linear_cross_entropy = [](TensorView losses, TensorView dh, TensorView dweight, TensorView dbias, TensorView h,
                                  TensorView weight, TensorView bias, TensorView targets, TensorView logits,
                                  const CrossEntropyParams& p, Stream& s) noexcept {
    note("linear_cross_entropy", {dh, dweight, h, weight, bias}, {p.chunk_tokens});
    base().linear_cross_entropy(losses, dh, dweight, dbias, h, weight, bias, targets, logits, p, s);
  };
  table.attention_fwd = [](TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v,
                           const AttentionParams& p, Stream& s) noexcept {
    note("attention_fwd", {q, k}, {p.causal, p.window, p.blocks.block, p.documents != nullptr});
    base().attention_fwd(o, lse, q, k, v, p, s);
  };
  table.attention_bwd = [](TensorView dq, TensorView dk, TensorView dv, TensorView dout, TensorView q, TensorView k,
                           TensorView v, TensorView o, TensorView lse, const AttentionParams& p, Stream& s) noexcept {
    note("attention_bwd", {q, k}, {p.causal, p.window, p.blocks.block, p.documents != nullptr});
    base().attention_bwd(dq, dk, dv, dout, q, k, v, o, lse, p, s);
  };
  table.embedding_bwd = [](TensorView dtable, TensorView dy, TensorView ids, i64 first, bool accumulate,
                           Stream& s) noexcept {
    note("embedding_bwd", {dtable, dy}, {});
    base().embedding_bwd(dtable, dy, ids, first, accumulate, s);
  };
  table.layernorm_bwd = [](TensorView dx, TensorView dweight, TensorView dbias, TensorView dy, TensorView residual,
                           TensorView x, TensorView weight, TensorView mean, TensorView rstd, Stream& s) noexcept {
    note("layernorm_bwd", {x}, {});
    base().layernorm_bwd(dx, dweight, dbias, dy, residual, x, weight, mean, rstd, s);
  };
  table.rmsnorm_bwd = [](TensorView dx, TensorView dweight, TensorView dy, TensorView residual, TensorView x,
                         TensorView weight, TensorView rstd, Stream& s) noexcept {
    note("rmsnorm_bwd", {x}, {});
    base().rmsnorm_bwd(dx, dweight, dy, residual, x, weight, rstd, s);
  };
  return table;
}
const OpTable& real_ops() { return *cpu_ops(); }

// Every rank makes the calls that the walk of its plan makes, and no others.
void expect_walked(Config c, int ranks, i64 steps, const std::string& what) {
  SCOPED_TRACE(what);
  c.steps = steps;
  c.data.split = 0;  // nothing is evaluated before the calls are looked at
  Hooks hooks;
  hooks.length = [&](i64 step) { return plan::lengths_of_step(c, step + 1).sequence; };
  hooks.same_logits = false;
  hooks.after_step = [&](engine::Engine& engine, i64 step) {
    if (step + 1 < steps) return;
    const std::set<std::string> run = std::exchange(seen_calls, {});
    plan::walk_run(c, engine.model(), engine.plan(), noting<no_ops>(), nullptr);
    const std::set<std::string> walked = std::exchange(seen_calls, {});
    std::vector<std::string> only_run, only_walked;
    std::ranges::set_difference(run, walked, std::back_inserter(only_run));
    std::ranges::set_difference(walked, run, std::back_inserter(only_walked));
    EXPECT_THAT(only_run, ::testing::IsEmpty()) << "rank " << engine.mesh().rank();
    EXPECT_THAT(only_walked, ::testing::IsEmpty()) << "rank " << engine.mesh().rank();
    EXPECT_FALSE(run.empty());
  };
  traces_of_threads(c, ranks, steps, 1, hooks, {}, noting<real_ops>());
}

void grow(Config& c) {
  c.curriculum = {.enabled = true, .min_difficulty = 8, .max_difficulty = 20};
  c.curriculum.total_curriculum_step = 4;
  c.curriculum.difficulty_step = 4;
}
void drop(Config& c) {
  RandomLtdConfig& ltd = c.random_ltd;
  ltd.data_efficiency = ltd.data_routing = ltd.enabled = true;
  ltd.layers = {1};
  ltd.min_value = 6, ltd.max_value = 18, ltd.require_steps = 4, ltd.seq_per_step = 2;
}

TEST(Scratch, IsWalkedCallByCall) {
  for (const ModelConfig& model : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama()), tiny_bert()}) {
    for (const DType work : {DType::F32, DType::BF16}) {
      for (const i64 stage : {0, 3}) {
        for (const bool sums16 : {false, true}) {
          for (const bool documents : {false, true}) {
            if (sums16 && work == DType::F32) continue;
            Config c = config_of(model, {.stage = stage}, 3);
            c.data.seq_length = 20;
            c.bf16.enabled = work == DType::BF16;
            c.communication_data_type = wire_type_of(work);
            if (sums16) c.grad_accum_dtype = work;
            if (documents) separate_documents(c, 7);
            const std::string what = fmt::format("{} {} stage {} sums {} documents {}", family_name(model.family),
                                                 dtype_name(work), stage, sums16, documents);
            expect_walked(c, 1, 2, what);
            Config drops = c;
            drop(drops);
            expect_walked(drops, 1, 3, what + " drops");
            if (model.causal()) grow(c);
            expect_walked(c, 1, 3, what + " grows");
            if (stage == 0) continue;
            c.optimizer.type = OptimizerType::Muon;
            c.optimizer.muon_lr = c.optimizer.adam_lr = 1e-3;
            c.grad_accum_dtype = DType::F32;
            expect_walked(c, 1, 2, what + " Muon");
          }
        }
      }
    }
  }
}

TEST(Scratch, IsWalkedCallByCallOnEveryRankOfAMesh) {
  using Mode = SequenceParallelMode;
  for (ModelConfig model : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama())}) {
    for (const Layout& l :
         {Layout{.dp = 2, .stage = 3}, Layout{.pp = 2, .schedule = Kind::ZeroBubbleH1}, Layout{.tp = 2, .stage = 1},
          Layout{.tp = 2, .sequence = true}, Layout{.sp = 2, .mode = Mode::Ulysses},
          Layout{.sp = 2, .mode = Mode::Ring}, Layout{.pp = 2, .schedule = Kind::Interleaved, .chunks = 2},
          Layout{.pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2},
          Layout{.pp = 2, .tp = 2, .checkpoints = Granularity::Layer, .stage = 1},
          Layout{.dp = 2, .checkpoints = Granularity::Selective}}) {
      if (l.chunks > 1 && model.layers < 4) model.layers = 4;
      Config c = config_of(model, l, 4);
      c.data.seq_length = 20;
      c.bf16.enabled = true;
      c.communication_data_type = WireType::BF16;
      grow(c);
      if (l.sp == 1 && !l.sequence) drop(c);
      expect_walked(c, l.ranks(), 3, fmt::format("{} {}", family_name(model.family), l.name()));
    }
  }
}

// Products of many tiles, whose number follows the threads, and several chunks of tokens.
TEST_P(Scratch, IsWhatLargerModelsHold) {
  test::EveryNth tried(5, GetParam()->name.size());
  for (ModelConfig config : {tiny_gpt2(), tiny_llama()}) {
    config.hidden = 160;
    config.heads = config.kv_heads = 5;
    config.head_dim = 32;
    config.intermediate = 600;
    config.vocab_size = 2999;
    config.max_positions = 200;
    for (const bool bf16 : {false, true}) {
      for (const int threads : {1, 3, 4}) {
        if (!tried()) continue;
        Config c = tiny_config(config, 1, 1, 0);
        c.data.seq_length = 200;
        c.bf16.enabled = bf16;
        SCOPED_TRACE(fmt::format("{} {} {} threads", family_name(config.family), bf16 ? "bf16" : "fp32", threads));
        expect_engines_hold(c, 1, threads, *GetParam());
      }
    }
  }
}

TEST(Scratch, ReferenceOpsHaveNone) { expect_engines_hold(tiny_config(tiny_llama(), 1, 1, 0), 1, 2, ref_ops(), false); }

// The product that measures the rate of a device takes far more than these models do, and leaves none of it.
TEST(Scratch, IsNotThatOfTheMeasuredRate) {
  const auto device = make_cpu_device(*cpu_ops(), 2);
  EXPECT_GT(probe::matmul_rate(*device, DType::F32), 0);
  EXPECT_EQ(device->scratch_bytes(), 0);
}

}  // namespace scratch_test
}  // namespace ds::testing
