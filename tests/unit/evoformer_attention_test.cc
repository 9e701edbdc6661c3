// SPDX-License-Identifier: Apache-2.0
// EvoformerAttention, the public door to the ops: its refusals, by name, and that it computes the same as they do.

#include "ds/evoformer.h"

#include <gmock/gmock.h>

#include <vector>

namespace ds {
namespace evoformer_attention_test {

using ::testing::HasSubstr;

constexpr i64 kM = 6, kN = 3, kT = 5, kH = 2, kD = 4;

struct Call {
  std::vector<float> values = std::vector<float>(4096);
  i64 used = 0;
  TensorView make(std::initializer_list<i64> shape) {
    const TensorView made = TensorView::of(values.data() + used, DType::F32, shape);
    for (i64 i = 0; i < made.numel(); ++i) made.as<float>()[i] = static_cast<float>((used + i) * 37 % 19 - 9) / 8;
    used += made.numel();
    return made;
  }
  TensorView q = make({kM, kT, kH, kD}), k = make({kM, kT, kH, kD}), v = make({kM, kT, kH, kD});
  TensorView o = make({kM, kT, kH, kD}), dout = make({kM, kT, kH, kD}), lse = make({kM, kH, kT});
  TensorView bias1 = make({kM, kT}), bias2 = make({kM / kN, kH, kT, kT});
  TensorView dq = make({kM, kT, kH, kD}), dk = make({kM, kT, kH, kD}), dv = make({kM, kT, kH, kD});
  TensorView dbias1 = make({kM, kT}), dbias2 = make({kM / kN, kH, kT, kT});
  EvoformerParams params{.scale = 0.5f, .num_seq = kN};

  void run(EvoformerAttention& attention) {
    attention.forward(o, lse, q, k, v, bias1, bias2, params);
    attention.backward(dq, dk, dv, dbias1, dbias2, dout, q, k, v, o, lse, bias1, bias2, params);
    attention.synchronize();
  }
};

TEST(EvoformerAttention, ComputesWhatTheOpsDo) {
  EvoformerAttention attention = EvoformerAttention::on_cpu(2);
  EXPECT_EQ(attention.scratch_bytes(), 0);
  Call got, want;
  got.run(attention);
  EXPECT_GT(attention.scratch_bytes(), 0);
  ThreadPool pool(1);
  Stream stream{.pool = &pool};
  const OpTable& ops = *cpu_ops();
  ops.evoformer_attention_fwd(want.o, want.lse, want.q, want.k, want.v, want.bias1, want.bias2, want.params, stream);
  ops.evoformer_attention_bwd(want.dq, want.dk, want.dv, want.dbias1, want.dbias2, want.dout, want.q, want.k, want.v,
                              want.o, want.lse, want.bias1, want.bias2, want.params, stream);
  EXPECT_EQ(got.values, want.values);
}

TEST(EvoformerAttention, WorksWithoutBiasesAndTheirGradients) {
  EvoformerAttention attention = EvoformerAttention::on_cpu(1);
  Call call;
  call.bias1 = call.bias2 = call.dbias1 = call.dbias2 = {};
  EXPECT_NO_THROW(call.run(attention));
}

TEST(EvoformerAttention, RefusesWhatDoesNotFitByName) {
  EvoformerAttention attention = EvoformerAttention::on_cpu(1);
  const auto refused = [&](auto&& change, const char* why) {
    Call call;
    change(call);
    try {
      call.run(attention);
      ADD_FAILURE() << "accepted: " << why;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::Config);
      EXPECT_THAT(e.what(), HasSubstr(why));
    }
  };
  refused([](Call& c) { c.q = {}; }, "q is not [B*N,T,H,D]");
  refused([](Call& c) { c.k = {}; }, "k is missing");
  refused([](Call& c) { c.v.shape[1] = kT - 1; }, "v is [6,4,2,4], not [6,5,2,4]");
  refused([](Call& c) { c.q.dtype = DType::I32; }, "q cannot be of type");
  refused([](Call& c) { c.k.dtype = DType::BF16; }, "k cannot be of type bf16");
  refused([](Call& c) { c.params.num_seq = 4; }, "num_seq");
  refused([](Call& c) { c.params.num_seq = 0; }, "num_seq");
  refused([](Call& c) { c.bias1.shape[0] = kN; }, "bias1 is [3,5], not [6,5]");
  refused([](Call& c) { c.bias2.dtype = DType::F16; }, "bias2 cannot be of type fp16");
  refused([](Call& c) { c.dbias2 = c.bias1; }, "dbias2 is [6,5]");
  refused([](Call& c) { c.dbias1.dtype = DType::BF16; }, "dbias1 cannot be of type");
  refused([](Call& c) { c.o.stride[3] = 2; }, "the last dim of o has gaps");
  refused([](Call& c) { c.lse.shape[1] = kH + 1; }, "lse is");
  EXPECT_THROW(EvoformerAttention::on_cpu(0), Error);
}

}  // namespace evoformer_attention_test
}  // namespace ds
