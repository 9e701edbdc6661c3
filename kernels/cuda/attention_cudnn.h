// SPDX-License-Identifier: Apache-2.0
#pragma once
// Attention by cuDNN: the calls that it supports, the conversion of a call to a graph of cuDNN's operations (pure
// functions, so that they can be tested as data), and the engine that finds and runs plans for such graphs.

#include <array>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ds/kernels/gpu_meter.h"

namespace ds::cuda {
class Context;
}

namespace ds::cuda::cudnn {

// The operands of OpTable::attention_fwd, or with `backward` of attention_bwd.
struct AttentionCall {
  bool backward = false;
  TensorView o, lse, q, k, v;
  TensorView dq, dk, dv, dout;
  AttentionParams params;
};

inline AttentionCall forward_call(const TensorView& o, const TensorView& lse, const TensorView& q, const TensorView& k,
                                  const TensorView& v, const AttentionParams& p) noexcept {
  return {.o = o, .lse = lse, .q = q, .k = k, .v = v, .dq = {}, .dk = {}, .dv = {}, .dout = {}, .params = p};
}
inline AttentionCall backward_call(const TensorView& dq, const TensorView& dk, const TensorView& dv,
                                   const TensorView& dout, const TensorView& q, const TensorView& k,
                                   const TensorView& v, const TensorView& o, const TensorView& lse,
                                   const AttentionParams& p) noexcept {
  AttentionCall call = forward_call(o, lse, q, k, v, p);
  call.backward = true;
  call.dq = dq;
  call.dk = dk;
  call.dv = dv;
  call.dout = dout;
  return call;
}

struct AttentionShapeHash {
  size_t operator()(const AttentionShape& shape) const noexcept;
};

AttentionShape shape_of(const AttentionCall& call) noexcept;

// The GPUs for which it is used, by the major number of their compute capability: Ampere and Hopper. (On later GPUs a
// deterministic backward pass needs knobs.)
constexpr bool serves(int compute_capability) noexcept { return compute_capability == 8 || compute_capability == 9; }

// Why cuDNN does not compute a call, so that our own kernels do; null: it does.
//   16-bit floats; D a multiple of 8, at most 128: what NVIDIA's table of cuDNN's attention lists for Ampere and
//   Hopper, including backward.
//   causal: T <= S, so that every row sees a key. The mask is ours, bottom-right aligned.
//   no dropout, since the random numbers are ours; no window, and so no sinks; no block-sparse layout, soft cap, bias
//   by relative position or documents. forward: no rows that must not depend on each other. T > 1: our kernels handle
//   decoding; a plan for every length of the cache would cost more than it saves. tensors, rows and heads aligned to 16
//   bytes; contiguous statistics. backward: at least one group of heads fits kMostScoreBytes.
const char* refusal(const AttentionCall& call) noexcept;

// cuDNN's deterministic backward pass stores a matrix of T x S 16-bit numbers for each head of a call. We split a call
// to stay below this.
inline constexpr i64 kMostScoreBytes = i64{512} << 20;

// One of several cuDNN calls with the same shape: batch rows [batch, batch + B) and groups [group, group + G), with
// their query heads.
struct AttentionSlice {
  i64 batch = 0, group = 0;
};
struct AttentionSlices {
  AttentionShape shape;  // of each
  std::vector<AttentionSlice> slices;
};
AttentionSlices slices_of(const AttentionShape& shape);

// The workspace of the plan that is chosen for such a slice, and all temporary memory of a call, of which slices use
// the same. As cuDNN 9.19 reports them (tests/unit/cuda_cudnn_test.cc); another version may want more or less.
i64 workspace_bytes(const AttentionShape& slice, int compute_capability) noexcept;
i64 row_sums_bytes(const AttentionShape& slice) noexcept;  // the part before the workspace, for kRowSums
i64 scratch_bytes(const AttentionShape& call, int compute_capability) noexcept;

enum class Type : u8 { F32, BF16, F16, I32, Bool };

// Unique ids of a graph's tensors: first those that a call binds to memory or a number, then internal ones.
enum Uid : i64 {
  kQ = 1,
  kK,
  kV,
  kO,
  kLse,
  kDq,
  kDk,
  kDv,
  kDout,
  kRowSums,  // rowsum(dO * O), [B,H,T] fp32: temporary memory
  kScale,    // these are numbers
  kMinusInfinity,
  kOne,
  kNumQueries,  // T
  kNumKeys,     // S
  kInner = 100,
};

struct GraphTensor {
  i64 uid = 0;
  Type type = Type::F32;
  std::array<i64, 4> dim{1, 1, 1, 1}, stride{1, 1, 1, 1};
  bool is_inner = false;   // exists only within the graph
  bool is_number = false;  // given by value
};

// Pointwise: y = op(x, b); GreaterEqual: y = x >= b; Select: y = t ? x : b; Index: y = the index along `axis`, with the
// dims of x. Operands of size 1 are broadcast. Matmul: y = x b in the last two dims; b may have fewer heads, which are
// shared. Max, Sum: over the dims in which y is smaller; with fewer heads, over groups of neighbouring heads.
// Transpose: y is x with the last two dims exchanged.
enum class GraphOp : u8 { Matmul, Transpose, Max, Sum, Index, Mul, Add, Sub, Div, Exp, Log, GreaterEqual, Select };

struct GraphNode {
  GraphOp op = GraphOp::Matmul;
  Type compute = Type::F32;
  i64 x = 0, b = 0, t = 0, y = 0;  // uids; 0: none
  int axis = 0;
};

struct Graph {
  std::vector<GraphTensor> tensors;
  std::vector<GraphNode> nodes;
};
// The graph of one cuDNN call.
Graph attention_graph(const AttentionShape& shape);

// Opens libcudnn.so.9, once per process. Null: it can be used; else the reason why not.
const char* library_error() noexcept;

// The first of these files that can be used, or the reason against each.
struct LibraryChoice {
  std::string file, error;
};
LibraryChoice choose_library(std::span<const std::string> candidates);

// A way to compute a graph, as offered by cuDNN's heuristics, best first.
struct Candidate {
  i64 engine = -1, workspace_bytes = 0;
  bool deterministic = false;
};
struct Candidates {
  std::string error;  // empty: the library accepted the graph and the query
  std::vector<Candidate> list;
};
// For the GPU described by `device_properties`, JSON in cuDNN's format. Needs no GPU, but a libcuda.so.1, for example
// the toolkit's stub.
Candidates find_candidates(const AttentionShape& shape, std::string_view device_properties);

}  // namespace ds::cuda::cudnn

namespace ds::cuda {

// The handle and the plans. A plan is found by cuDNN's heuristics only: nothing is timed, so two runs of a program use
// the same one. Only plans that give the same bits every time are used. Gradients of grouped keys and values are
// rounded to their dtype per query head, and once more when added.
class CudnnAttention {
 public:
  explicit CudnnAttention(Context& context);
  ~CudnnAttention();
  CudnnAttention(const CudnnAttention&) = delete;
  CudnnAttention& operator=(const CudnnAttention&) = delete;

  // "cuDNN 9.19.0"; empty: it cannot be used, and error() states why.
  const std::string& name() const noexcept;
  const std::string& error() const noexcept;
  // Finds the plans of calls of these shapes, which refusal() must not refuse. Empty: there are all; else why not.
  std::string prepare(std::span<const AttentionShape> shapes);
  // False: it does not support this call (refusal), and has done nothing. A plan that does not exist, and errors of
  // one, are reported to the context: no call moves to other kernels for a reason that other ranks may not have.
  bool run(const cudnn::AttentionCall& call) noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ds::cuda
