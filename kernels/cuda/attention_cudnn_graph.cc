// SPDX-License-Identifier: Apache-2.0
// Attention as graphs of cuDNN's operations. cuDNN recognises a graph by its form, so the form is that of NVIDIA's own
// front end for attention (cudnn-frontend 1.23, node/scaled_dot_product_flash_attention.h, softmax.h and
// diagonal_band_mask.h): scores = scale * Q K^T, masked by comparing generated indices, then
//   forward   the softmax in single operations, with lse = max + log(sum exp(score - max)): natural logarithm, like
//   ours; backward  P = exp(score - lse), dV = P^T dO, dS = scale * P * (dO V^T - rowsum(dO * O)), dK = dS^T Q, dQ = dS
//   K.
// dQ is the product itself, not a copied fp32 sum: this is how the front end requests the deterministic algorithm.
// cuDNN 9.19 marks neither form as nondeterministic; they differ in the workspace for the scores.

#include "cuda/attention_cudnn.h"

namespace ds::cuda::cudnn {
namespace {

Type type_of(DType t) noexcept { return t == DType::BF16 ? Type::BF16 : Type::F16; }

class Maker {
 public:
  explicit Maker(const AttentionShape& s) : s_(s), work_(type_of(s.dtype)) {}

  Graph make() && {
    number(kScale, Type::F32);
    if (s_.causal) number(kMinusInfinity, Type::F32);
    if (s_.causal && s_.T != s_.S) {
      number(kNumKeys, Type::I32);
      number(kNumQueries, Type::I32);
    }
    rows(kQ, s_.q);
    columns(kK, s_.k);
    rows(kO, s_.o);
    add({.uid = kLse, .dim = row_dim_, .stride = row_stride_});
    s_.backward ? backward() : forward();
    return std::move(graph_);
  }

 private:
  using Dims = std::array<i64, 4>;

  void add(const GraphTensor& t) { graph_.tensors.push_back(t); }
  i64 inner(const Dims& dim, const Dims& stride, Type type = Type::F32) {
    const i64 uid = next_++;
    add({.uid = uid, .type = type, .dim = dim, .stride = stride, .is_inner = true});
    return uid;
  }
  i64 score(Type type = Type::F32) { return inner(score_dim_, score_stride_, type); }
  i64 row() { return inner(row_dim_, row_stride_); }
  void number(i64 uid, Type type) { add({.uid = uid, .type = type, .is_number = true}); }

  // [B,T,H,D] as [B,H,T,D]; keys and values as [B,G,S,D], or transposed as [B,G,D,S].
  void rows(i64 uid, const AttentionShape::Strides& s) {
    add({.uid = uid, .type = work_, .dim = {s_.B, s_.H, s_.T, s_.D}, .stride = {s.batch, s.head, s.token, 1}});
  }
  void keys(i64 uid, const AttentionShape::Strides& s) {
    add({.uid = uid, .type = work_, .dim = {s_.B, s_.G, s_.S, s_.D}, .stride = {s.batch, s.head, s.token, 1}});
  }
  void columns(i64 uid, const AttentionShape::Strides& s) {
    add({.uid = uid, .type = work_, .dim = {s_.B, s_.G, s_.D, s_.S}, .stride = {s.batch, s.head, 1, s.token}});
  }

  i64 node(GraphOp op, i64 x, i64 b, i64 y) {
    graph_.nodes.push_back({.op = op, .x = x, .b = b, .y = y});
    return y;
  }
  i64 index(i64 x, int axis) {
    const i64 y = score(Type::I32);
    graph_.nodes.push_back({.op = GraphOp::Index, .x = x, .y = y, .axis = axis});
    return y;
  }
  i64 shifted(GraphOp op, i64 x, i64 b) {
    const i64 y = score(Type::I32);
    graph_.nodes.push_back({.op = op, .compute = Type::I32, .x = x, .b = b, .y = y});
    return y;
  }

  i64 scaled_scores() { return node(GraphOp::Mul, node(GraphOp::Matmul, kQ, kK, score()), kScale, score()); }

  // Key j is visible to query i iff i + S - T >= j.
  i64 masked(i64 x) {
    if (!s_.causal) return x;
    i64 last = index(x, 2);
    const i64 key = index(x, 3);
    if (s_.T != s_.S) {
      last = shifted(GraphOp::Add, last, kNumKeys);
      last = shifted(GraphOp::Sub, last, kNumQueries);
    }
    const i64 seen = score(Type::Bool), y = score();
    graph_.nodes.push_back({.op = GraphOp::GreaterEqual, .compute = Type::Bool, .x = last, .b = key, .y = seen});
    graph_.nodes.push_back({.op = GraphOp::Select, .x = x, .b = kMinusInfinity, .t = seen, .y = y});
    return y;
  }

  void forward() {
    keys(kV, s_.v);
    const i64 x = masked(scaled_scores());
    const i64 top = node(GraphOp::Max, x, 0, row());
    const i64 weight = node(GraphOp::Exp, node(GraphOp::Sub, x, top, score()), 0, score());
    const i64 sum = node(GraphOp::Sum, weight, 0, row());
    node(GraphOp::Add, top, node(GraphOp::Log, sum, 0, row()), kLse);
    node(GraphOp::Matmul, node(GraphOp::Div, weight, sum, score(work_)), kV, kO);
  }

  void backward() {
    columns(kV, s_.v);
    rows(kDout, s_.dout);
    rows(kDq, s_.dq);
    keys(kDk, s_.dk);
    keys(kDv, s_.dv);
    number(kOne, Type::F32);
    add({.uid = kRowSums, .dim = row_dim_, .stride = row_stride_});

    const i64 T = s_.T, H = s_.H, D = s_.D;
    const i64 products = inner({s_.B, H, T, D}, {H * T * D, T * D, D, 1});
    const i64 row_sums = node(GraphOp::Sum, node(GraphOp::Mul, kDout, kO, products), 0, row());
    node(GraphOp::Mul, row_sums, kOne, kRowSums);

    const i64 x = masked(node(GraphOp::Sub, scaled_scores(), kLse, score()));
    const i64 prob = node(GraphOp::Exp, x, 0, score());
    to_keys(prob, kDout, kDv);

    const i64 dp = node(GraphOp::Sub, node(GraphOp::Matmul, kDout, kV, score()), kRowSums, score());
    const i64 ds = node(GraphOp::Mul, node(GraphOp::Mul, dp, prob, score()), kScale, score());
    to_keys(ds, kQ, kDk);

    const auto& k = s_.k;
    const i64 k_rows = inner({s_.B, s_.G, s_.S, D}, {k.batch, k.head, k.token, 1}, work_);
    node(GraphOp::Matmul, ds, node(GraphOp::Transpose, kK, 0, k_rows), kDq);
  }

  // y = x^T b, summed over the heads of a group.
  void to_keys(i64 x, i64 b, i64 y) {
    const i64 B = s_.B, T = s_.T, S = s_.S, H = s_.H, D = s_.D;
    const i64 transposed = inner({B, H, S, T}, {H * T * S, T * S, 1, S}, work_);
    node(GraphOp::Transpose, x, 0, transposed);
    if (s_.H == s_.G) {
      node(GraphOp::Matmul, transposed, b, y);
      return;
    }
    const i64 all_heads = inner({B, H, S, D}, {H * S * D, S * D, D, 1}, work_);
    node(GraphOp::Sum, node(GraphOp::Matmul, transposed, b, all_heads), 0, y);
  }

  const AttentionShape s_;
  const Type work_;
  const Dims score_dim_ = {s_.B, s_.H, s_.T, s_.S}, score_stride_ = {s_.H * s_.T * s_.S, s_.T*s_.S, s_.S, 1};
  const Dims row_dim_ = {s_.B, s_.H, s_.T, 1}, row_stride_ = {s_.H * s_.T, s_.T, 1, 1};
  Graph graph_;
  i64 next_ = kInner;
};

}  // namespace

Graph attention_graph(const AttentionShape& shape) { return Maker(shape).make(); }

}  // namespace ds::cuda::cudnn
