// SPDX-License-Identifier: Apache-2.0
// Temporary memory of CUDA's ops as predicted and as a context on the simulator holds it, op by op. equivalence/
// device_training_test does the same with engines that train.

#include <array>
#include <functional>

#include "cuda/context.h"
#include "cuda/matmul.h"
#include "cuda/ops.h"
#include "ds/kernels/gpu_meter.h"
#include "parity/parity.h"

namespace ds::testing {
namespace cuda_scratch_test {

// `call(ops, stream)` calls one op: on a new context, and metered. Returns the metered bytes.
template <class Call>
i64 expect_metered(const std::string& what, Call call) {
  cuda::Context context;
  Stream stream{.native = &context};
  call(cuda::ops(), stream);
  EXPECT_EQ(context.error(), nullptr) << what;
  GpuMeter meter;
  meter.kernels.compute_capability = 9;
  Stream dry{.native = &meter};
  call(gpu_scratch_ops(), dry);
  EXPECT_EQ(static_cast<i64>(context.scratch_bytes()), meter.scratch_bytes()) << what;
  return meter.most;
}

TEST(CudaScratch, OfProducts) {
  i64 most = 0;
  const i64 shapes[][3] = {{1, 1, 1},      {3, 65, 7},    {64, 48, 33}, {40, 1030, 5},
                           {1027, 16, 20}, {9, 12, 1029}, {5, 7, 0}};
  for (const auto& [M, N, K] : shapes) {
    for (const DType work : kWorkDTypes) {
      for (int kind = 0; kind < 8; ++kind) {
        const bool trans_a = kind % 2 != 0, trans_b = kind / 2 % 2 != 0, to_fp32 = kind / 4 != 0;
        Tensor a(work, trans_a ? std::initializer_list<i64>{K, M} : std::initializer_list<i64>{M, K}),
            b(work, trans_b ? std::initializer_list<i64>{N, K} : std::initializer_list<i64>{K, N}),
            c(to_fp32 ? DType::F32 : work, {M, N}), bias(work, {N});
        for (Tensor* t : {&a, &b, &c, &bias}) t->fill(0.5f);
        Tensor preact(c), residual(c);
        for (const Activation f : {Activation::None, Activation::GeluTanh, Activation::GeluErf}) {
          for (int parts = 0; parts < 8; ++parts) {
            const std::string what = std::string(dtype_name(work)) + " " + std::to_string(M) + "x" + std::to_string(N) +
                                     "x" + std::to_string(K) + " kind " + std::to_string(kind) + " activation " +
                                     std::to_string(static_cast<int>(f)) + " parts " + std::to_string(parts);
            const bool plain = f == Activation::None && parts == 0;
            most = std::max(most, expect_metered(what, [&](const OpTable& ops, Stream& s) {
                              ops.matmul(c, a, b, (parts & 1) != 0 ? bias.view() : TensorView{},
                                         (parts & 2) != 0 ? preact.view() : TensorView{},
                                         (parts & 4) != 0 ? residual.view() : TensorView{},
                                         {.trans_a = trans_a,
                                          .trans_b = trans_b,
                                          .accumulate = plain && kind == 5,
                                          .activation = f,
                                          .rowwise = plain && kind == 2},
                                         s);
                            }));
            if (HasFailure()) return;
          }
        }
      }
    }
  }
  EXPECT_GT(most, 0);
}

// Parts of K apart, and codes of the other operand.
TEST(CudaScratch, OfProductsRowByRowAndOfCodes) {
  for (const i64 M : {1, 5, 64, 65, 130}) {
    for (const auto& [N, K] : {std::pair<i64, i64>{40, 256}, {130, 1280}, {7, 2048}}) {
      Tensor a(DType::BF16, {M, K}), b(DType::BF16, {N, K}), c(DType::BF16, {M, N});
      for (Tensor* t : {&a, &b, &c}) t->fill(0.5f);
      std::vector<u8> bytes(static_cast<size_t>(N * K * 2));
      for (const CodedForm& form : {CodedForm{}, CodedForm{.kind = CodeKind::Int4, .group = 32},
                                    CodedForm{.kind = CodeKind::Int8, .integer = true, .group = static_cast<i32>(K)}}) {
        TensorView right = b;
        right.codes = form;
        if (form) right.data = bytes.data();
        const i64 most = expect_metered("row by row", [&](const OpTable& ops, Stream& s) {
          ops.matmul(c, a, right, {}, {}, {}, {.trans_b = true, .rowwise = true}, s);
        });
        EXPECT_EQ(most, form.integer ? M * (K + 4) : K > 512 && M <= 64 ? (K + 511) / 512 * M * N * 4 : 0);
      }
    }
  }
}

TEST(CudaScratch, OfProductsInFp8) {
  for (const auto& [M, N, K] : {std::array<i64, 3>{16, 128, 128}, {13, 128, 256}, {128, 24, 300}}) {
    const Fp8Layout of_a{M, K, Fp8Blocks::Rows}, of_b{N, K, Fp8Blocks::Squares};
    Tensor x(DType::BF16, {M, K}), w(DType::BF16, {N, K}), c(DType::BF16, {M, N}), bias(DType::BF16, {N}),
        a(DType::U8, {of_a.padded_rows(), of_a.padded_k()}), b(DType::U8, {of_b.padded_rows(), of_b.padded_k()}),
        a_scales(DType::F32, {of_a.scale_rows(), of_a.scale_columns()}),
        b_scales(DType::F32, {of_b.scale_rows(), of_b.scale_columns()});
    for (Tensor* t : {&x, &w, &c, &bias}) t->fill(0.5f);
    const auto codes = [](const Tensor& t) {
      TensorView v = t;
      v.dtype = DType::F8E4M3;
      return v;
    };
    const i64 bytes = expect_metered("FP8", [&](const OpTable& ops, Stream& s) {
      ops.quantize_fp8(codes(a), a_scales, x, of_a.blocks, false, s);
      ops.quantize_fp8(codes(b), b_scales, w, of_b.blocks, false, s);
      ops.matmul_fp8(c, codes(a), a_scales, codes(b), b_scales, bias, {}, {of_a.blocks, of_b.blocks}, s);
    });
    EXPECT_EQ(bytes > 0, M % 16 != 0 || N % 16 != 0);
  }
}

TEST(CudaScratch, OfSumsThatGoByRows) {
  constexpr i64 M = 8500, N = 1000, K = 2;
  Tensor a(DType::BF16, {M, K}), b(DType::BF16, {K, N}), c(DType::BF16, {M, N});
  for (Tensor* t : {&a, &b, &c}) t->fill(0.5f);
  const i64 bytes = expect_metered("by rows", [&](const OpTable& ops, Stream& s) {
    ops.matmul(c, a, b, {}, {}, {}, {.activation = Activation::Silu}, s);
  });
  EXPECT_LT(bytes, M * N * 4);
}

TEST(CudaScratch, OfColumnSumsAndReductions) {
  for (const i64 R : {0, 1, 33, 2000}) {
    for (const i64 N : {1, 257, 3000}) {
      Tensor x(DType::BF16, {R, N}), out(DType::F32, {N});
      x.fill(1), out.fill(0);
      expect_metered("column_sum", [&](const OpTable& ops, Stream& s) { ops.column_sum(out, x, false, s); });
    }
  }
  for (const DType t : kWorkDTypes) {
    for (const i64 n : {1, 9, 100000, 1 << 21}) {
      Tensor x(t, {n}), result(DType::F32, {8});
      x.fill(1);
      i64 largest = 0, sum[2] = {};
      const TensorView max_abs = TensorView::of(&largest, DType::I64, {1});
      expect_metered("max_abs", [&](const OpTable& ops, Stream& s) { ops.max_abs(max_abs, x, s); });
      expect_metered("sum_squares", [&](const OpTable& ops, Stream& s) {
        ops.sum_squares(TensorView::of(sum, DType::I64, {2}), x, max_abs, s);
      });
      if (t != DType::F32) continue;
      double total = 0;
      expect_metered(
          "sum", [&](const OpTable& ops, Stream& s) { ops.sum(TensorView::of(&total, DType::F64, {1}), x, 1.0, s); });
    }
  }
}

// A target that is among the sources of a later launch.
TEST(CudaScratch, OfFoldsOfMoreSourcesThanALaunchHas) {
  for (const size_t count : {2, 128, 129, 200}) {
    Tensor x(DType::F32, {100});
    x.fill(1);
    std::vector<Tensor> others(count, x);
    std::vector<TensorView> sources(others.begin(), others.end());
    sources.back() = x;
    const i64 bytes = expect_metered("fold", [&](const OpTable& ops, Stream& s) { ops.fold(x, sources, false, s); });
    EXPECT_EQ(bytes, count > 128 ? 400 : 0) << count;
  }
}

TEST(CudaScratch, OfGradientsOfNormsAndEmbeddings) {
  for (const DType t : {DType::F32, DType::BF16}) {
    for (const i64 R : {1, 3, 130, 2000}) {
      for (const i64 C : {1, 48, 300, 1600, 9000}) {
        if (R * C > 1 << 20) continue;
        Tensor x(t, {R, C}), weight(t, {C}), stats(DType::F32, {R});
        for (Tensor* y : {&x, &weight, &stats}) y->fill(0.5f);
        Tensor dx(x), dy(x), dweight(weight), dbias(weight);
        const std::string what = std::to_string(R) + "x" + std::to_string(C);
        expect_metered("layernorm " + what, [&](const OpTable& ops, Stream& s) {
          ops.layernorm_bwd(dx, dweight, dbias, dy, {}, x, weight, stats, stats, s);
        });
        expect_metered("rmsnorm " + what, [&](const OpTable& ops, Stream& s) {
          ops.rmsnorm_bwd(dx, dweight, dy, {}, x, weight, stats, s);
        });
      }
    }
  }
  for (const i64 R : {0, 1, 500, 3000}) {
    for (const i64 V : {1, 255, 256, 70000}) {
      Tensor dy(DType::F32, {R, 5}), ids(DType::I32, {R}), dtable(DType::F32, {V, 5});
      dy.fill(1);
      for (i64 r = 0; r < R; ++r) ids.set(r, static_cast<float>(r * 7 % V));
      expect_metered("embedding " + std::to_string(R) + " of " + std::to_string(V),
                     [&](const OpTable& ops, Stream& s) { ops.embedding_bwd(dtable, dy, ids, 0, false, s); });
    }
  }
}

TEST(CudaScratch, OfRoutersAndChoices) {
  for (const i64 R : {0, 1, 31, 9000}) {
    for (const i64 E : {1, 6}) {
      Tensor chosen(DType::I32, {R, 2}), scores(DType::F32, {R, E}), stats(DType::F32, {RouterStats{E}.size()}),
          offsets(DType::I32, {E + 1}), tokens(DType::I32, {2 * R}), places(chosen), choices(tokens);
      chosen.fill(0), scores.fill(0.5f);
      const std::string what = std::to_string(R) + " of " + std::to_string(E);
      expect_metered("router_stats " + what, [&](const OpTable& ops, Stream& s) {
        ops.router_stats(stats, chosen, {}, scores, scores, {}, {}, {}, s);
      });
      expect_metered("sort_choices " + what, [&](const OpTable& ops, Stream& s) {
        ops.sort_choices(offsets, places, tokens, choices, chosen, 0, s);
      });
    }
  }
}

// One part needs none; several are in one block, or in several, whose sums are merged.
TEST(CudaScratch, OfAttentionByRow) {
  struct Case {
    i64 H, G, S, parts;
  };
  for (const DType t : kWorkDTypes) {
    for (const auto& [H, G, S, parts] : {Case{4, 2, 1000, 0}, {4, 2, 1100, 2}, {256, 256, 1100, 1}}) {
      for (const i64 Dv : {32, 17}) {
        Tensor q(t, {1, 3, H, 32}), k(t, {1, S, G, 32}), v(t, {1, S, G, Dv}), o(t, {1, 3, H, Dv}),
            lse(DType::F32, {1, H, 3});
        for (Tensor* x : {&q, &k, &v}) x->fill(0.1f);
        AttentionParams p;
        p.rowwise = true;
        EXPECT_EQ(
            expect_metered("by row", [&](const OpTable& ops, Stream& s) { ops.attention_fwd(o, lse, q, k, v, p, s); }),
            parts * 3 * H * (Dv + Dv % 2 + 2) * 4)
            << H << " " << S << " " << Dv;
      }
    }
  }
}

TEST(CudaScratch, OfAttention) {
  for (const DType t : kWorkDTypes) {
    for (const i64 T : {1, 33, 130}) {
      Tensor q(t, {2, T, 4, 32}), k(t, {2, T, 2, 32}), lse(DType::F32, {2, 4, T});
      for (Tensor* y : {&q, &k, &lse}) y->fill(0.1f);
      Tensor v(k), o(q), dout(q), dq(q), dk(k), dv(k);
      expect_metered("forward", [&](const OpTable& ops, Stream& s) { ops.attention_fwd(o, lse, q, k, v, {}, s); });
      EXPECT_GT(
          expect_metered("backward", [&](const OpTable& ops,
                                         Stream& s) { ops.attention_bwd(dq, dk, dv, dout, q, k, v, o, lse, {}, s); }),
          0);
    }
  }
}

TEST(CudaScratch, OfEvoformerAttention) {
  constexpr i64 N = 3, T = 17, H = 2, D = 8;
  Tensor q(DType::BF16, {N, T, H, D}), lse(DType::F32, {N, H, T}), bias1(DType::BF16, {N, T}),
      bias2(DType::F32, {1, H, T, T});
  for (Tensor* t : {&q, &lse, &bias1, &bias2}) t->fill(0.1f);
  Tensor k(q), v(q), o(q), dout(q), dq(q), dk(q), dv(q), dbias2(bias2), dbias1(DType::F32, {N, T});
  const EvoformerParams p{.num_seq = N};
  expect_metered("forward", [&](const OpTable& ops, Stream& s) {
    ops.evoformer_attention_fwd(o, lse, q, k, v, bias1, bias2, p, s);
  });
  for (const bool trained : {false, true}) {
    expect_metered("backward", [&](const OpTable& ops, Stream& s) {
      ops.evoformer_attention_bwd(dq, dk, dv, trained ? dbias1.view() : TensorView{}, dbias2, dout, q, k, v, o, lse,
                                  bias1, bias2, p, s);
    });
  }
}

TEST(CudaScratch, OfTheCrossEntropyOfALinearLayer) {
  for (const auto& [T, chunk] : {std::pair{1, 1}, {7, 3}, {100, 64}}) {
    for (const auto& [C, V] : {std::pair{5, 3}, {40, 61}, {100, 1030}}) {
      for (const DType work : kWorkDTypes) {
        Tensor h(work, {T, C}), weight(work, {V, C}), bias(work, {V}), targets(DType::I32, {T}),
            logits(DType::F32, {chunk, V}), narrow(work, {chunk, V}), losses(DType::F32, {T}), dh(h),
            dweight(DType::F32, {V, C}), dbias(DType::F32, {V});
        for (Tensor* t : {&h, &weight, &bias}) t->fill(0.25f);
        targets.fill(1);
        const CrossEntropyParams p{.chunk_tokens = chunk};
        for (const bool gradient : {false, true}) {
          const auto wanted = [&](Tensor& t) { return gradient ? t.view() : TensorView{}; };
          for (Tensor* z : {&logits, &narrow}) {
            expect_metered(std::string(dtype_name(work)) + " " + std::to_string(T) + " of " + std::to_string(V),
                           [&](const OpTable& ops, Stream& s) {
                             ops.linear_cross_entropy(losses, wanted(dh), wanted(dweight), wanted(dbias), h, weight,
                                                      bias, targets, *z, p, s);
                           });
          }
        }
      }
    }
  }
}

}  // namespace cuda_scratch_test
}  // namespace ds::testing
