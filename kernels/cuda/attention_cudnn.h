// SPDX-License-Identifier: Apache-2.0
#pragma once
// Attention by cuDNN: which calls it serves, how a call becomes a graph of cuDNN's operations (pure functions, so that
// they are tested as data), and the engine that finds plans for such graphs and runs them.

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/context.h"

namespace ds::cuda::cudnn {

// The operands of OpTable::attention_fwd, or with `backward` of attention_bwd.
struct AttentionCall {
  bool backward = false;
  TensorView o, lse, q, k, v;
  TensorView dq, dk, dv, dout;
  AttentionParams params;
};

// All that a plan depends on. The scale is not part of it: graphs take it as an argument.
struct AttentionShape {
  struct Strides {
    i64 batch = 0, token = 0, head = 0;
    bool operator==(const Strides&) const = default;
  };
  bool backward = false, causal = false;
  DType dtype = DType::BF16;
  i64 B = 0, T = 0, S = 0, H = 0, G = 0, D = 0;
  Strides q, k, v, o;
  Strides dq, dk, dv, dout;

  bool operator==(const AttentionShape&) const = default;
};
struct AttentionShapeHash {
  size_t operator()(const AttentionShape& shape) const noexcept;
};

AttentionShape shape_of(const AttentionCall& call) noexcept;

// Why cuDNN does not serve a call on a GPU of this compute capability, so that our own kernels do; null: it does.
//   16-bit floats; D a multiple of 8, at most 128; compute capability 8 or 9: what NVIDIA's table of cuDNN's attention
//   has for Ampere and Hopper, backward included. (On later ones a deterministic backward pass needs knobs.)
//   causal: T <= S, where every row sees a key. Its mask is ours, bottom-right aligned.
//   no dropout: the random numbers are ours; no window, so no sinks; no block-sparse layout, soft cap, bias by relative
//   position or documents.
//   T > 1: decoding is for our kernels, a plan for every length of the cache would cost more than it saves.
//   tensors aligned to 16 bytes, rows and heads too; statistics contiguous.
//   backward: one group of heads at least within kMostScoreBytes.
const char* refusal(const AttentionCall& call, int compute_capability_major) noexcept;

// cuDNN's deterministic backward pass keeps a matrix of T x S 16-bit numbers for each head of a call. We make as many
// calls as it takes to stay below this.
inline constexpr i64 kMostScoreBytes = i64{512} << 20;

// One call of cuDNN out of several of the same shape: batch rows [batch, batch + B) and groups [group, group + G), with
// their query heads.
struct AttentionSlice {
  i64 batch = 0, group = 0;
};
struct AttentionSlices {
  AttentionShape shape;  // of each
  std::vector<AttentionSlice> slices;
};
AttentionSlices slices_of(const AttentionShape& shape);

enum class Type : u8 { F32, BF16, F16, I32, Bool };

// Unique ids of a graph's tensors: those that a call binds to memory or to a number, then those that stay inside.
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

// Pointwise: y = op(x, b); GreaterEqual: y = x >= b; Select: y = t ? x : b; Index: y = the place along `axis`, in the
// dims of x. Operands of size 1 are stretched. Matmul: y = x b in the last two dims; heads of b are shared if it has
// fewer. Max, Sum: over the dims in which y is smaller, where it has fewer heads over groups of neighbours. Transpose:
// y is x with the last two dims exchanged.
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
// Of one call of cuDNN.
Graph attention_graph(const AttentionShape& shape);

// Opens libcudnn.so.9, once in a process. Null: it can be used; else why not.
const char* library_error() noexcept;

// The first of these files that can be used, or for each why not.
struct LibraryChoice {
  std::string file, error;
};
LibraryChoice choose_library(std::span<const std::string> candidates);

// A way to compute a graph that cuDNN's heuristics offer, best first.
struct Candidate {
  i64 engine = -1, workspace_bytes = 0;
  bool deterministic = false;
};
struct Candidates {
  std::string error;  // empty: the library took the graph and was asked
  std::vector<Candidate> list;
};
// For the GPU that `device_properties` tells of, in JSON as cuDNN writes it. Needs no GPU, but a libcuda.so.1, be it
// the toolkit's stub.
Candidates find_candidates(const AttentionShape& shape, std::string_view device_properties);

}  // namespace ds::cuda::cudnn

namespace ds::cuda {

// Handle and plans. Where the library is missing, too old or without a deterministic plan, calls are not served, which
// is warned of once. A plan is found at the first call of its shape, by cuDNN's heuristics alone: nothing is timed, so
// two runs of a program take the same one. Only plans that give the same bits every time are taken. Gradients of
// grouped keys and values are rounded to their dtype per query head, and once more when added up.
class CudnnAttention {
 public:
  explicit CudnnAttention(Context& context);
  ~CudnnAttention();
  CudnnAttention(const CudnnAttention&) = delete;
  CudnnAttention& operator=(const CudnnAttention&) = delete;

  // False: it does not serve this call, and has done nothing. Failures of a plan are reported to the context.
  bool run(const cudnn::AttentionCall& call) noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ds::cuda
