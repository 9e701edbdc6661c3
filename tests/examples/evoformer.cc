// SPDX-License-Identifier: Apache-2.0
// How a program calls the attention of an Evoformer: evoformer_example [THREADS]. One step of row-wise attention of an
// MSA, whose residues are masked here and there, and one around the starting node of triangles, on random data, forward
// and backward. Prints checksums, and holds the gradients to a difference of losses: exit status 1 where they are not
// near.

#include <ds/evoformer.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace {

using ds::DType;
using ds::i64;
using ds::TensorView;

// fp32 numbers and a view of them.
struct Tensor {
  std::vector<float> values;
  TensorView view;

  explicit Tensor(std::initializer_list<i64> shape) : view(TensorView::of(nullptr, DType::F32, shape)) {
    values.resize(static_cast<size_t>(view.numel()));
    view.data = values.data();
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  void randomize(std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (float& x : values) x = normal(random);
  }
  double dot(const Tensor& other) const {
    double sum = 0;
    for (size_t i = 0; i < values.size(); ++i) sum += static_cast<double>(values[i]) * other.values[i];
    return sum;
  }
  double norm() const { return std::sqrt(dot(*this)); }
  void add(const Tensor& other, float times) {
    for (size_t i = 0; i < values.size(); ++i) values[i] += times * other.values[i];
  }
};

// B of N sequences, or rows of a pair representation, of T residues; H heads of D numbers.
struct Sizes {
  const char* name;
  i64 B, N, T, H, D;
};

// True if the gradients of L = sum(o * dout) predict how L changes.
bool step(ds::EvoformerAttention& attention, const Sizes& s, std::mt19937& random) {
  const i64 M = s.B * s.N;  // b*N + n is one dim
  Tensor q({M, s.T, s.H, s.D}), k({M, s.T, s.H, s.D}), v({M, s.T, s.H, s.D}), dout({M, s.T, s.H, s.D});
  Tensor bias1({M, s.T});              // published as [B,N,1,1,T]: hides residues
  Tensor bias2({s.B, s.H, s.T, s.T});  // published as [B,1,H,T,T]: made of the pair representation
  for (Tensor* x : {&q, &k, &v, &dout, &bias2}) x->randomize(random);
  for (float& x : bias1.values) x = random() % 5 == 0 ? -1e9f : 0.0f;

  Tensor o({M, s.T, s.H, s.D}), lse({M, s.H, s.T});
  Tensor dq({M, s.T, s.H, s.D}), dk({M, s.T, s.H, s.D}), dv({M, s.T, s.H, s.D});
  Tensor dbias1({M, s.T}), dbias2({s.B, s.H, s.T, s.T});
  const ds::EvoformerParams params{.scale = 1 / std::sqrt(static_cast<float>(s.D)), .num_seq = s.N};
  const auto loss = [&] {
    attention.forward(o.view, lse.view, q.view, k.view, v.view, bias1.view, bias2.view, params);
    return o.dot(dout);
  };
  loss();
  attention.backward(dq.view, dk.view, dv.view, dbias1.view, dbias2.view, dout.view, q.view, k.view, v.view, o.view,
                     lse.view, bias1.view, bias2.view, params);
  std::printf("%-20s |o| %.6f  |dq| %.6f  |dk| %.6f  |dv| %.6f  |dbias1| %.6f  |dbias2| %.6f\n", s.name, o.norm(),
              dq.norm(), dk.norm(), dv.norm(), dbias1.norm(), dbias2.norm());

  // Both ways along a direction of all that has a gradient.
  Tensor to_q({M, s.T, s.H, s.D}), to_k({M, s.T, s.H, s.D}), to_v({M, s.T, s.H, s.D});
  Tensor to_bias1({M, s.T}), to_bias2({s.B, s.H, s.T, s.T});
  for (Tensor* x : {&to_q, &to_k, &to_v, &to_bias1, &to_bias2}) x->randomize(random);
  const auto move = [&](float times) {
    q.add(to_q, times), k.add(to_k, times), v.add(to_v, times), bias1.add(to_bias1, times), bias2.add(to_bias2, times);
  };
  const float h = 1e-3f;
  move(h);
  const double up = loss();
  move(-2 * h);
  const double slope = (up - loss()) / (2 * static_cast<double>(h));
  const double said = dq.dot(to_q) + dk.dot(to_k) + dv.dot(to_v) + dbias1.dot(to_bias1) + dbias2.dot(to_bias2);
  std::printf("%-20s slope %.3f, by the gradients %.3f\n", "", slope, said);
  return std::abs(slope - said) <= 1e-2 * (1 + std::abs(said));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    auto attention = ds::EvoformerAttention::on_cpu(argc > 1 ? std::atoi(argv[1]) : 2);
    std::mt19937 random(1);
    bool right = step(attention, {"MSA row attention", 1, 12, 40, 4, 16}, random);
    right &= step(attention, {"triangle, start node", 1, 40, 40, 4, 16}, random);
    return right ? 0 : 1;
  } catch (const ds::Error& e) {
    std::fprintf(stderr, "evoformer_example: error: %s\n", e.what());
    return ds::exit_code(e.code());
  }
}
