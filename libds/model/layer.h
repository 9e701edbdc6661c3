// SPDX-License-Identifier: Apache-2.0
#pragma once
// A model is a list of layers over flat buffers. A layer declares its parameters once and is then *given* memory: views
// of its parameters, of their gradients and of its activations. It owns none, and knows nothing of ranks, ZeRO or
// files.
//
// The residual stream x [R,C], R = B*T, work dtype, runs through all layers: layer l reads the output of layer l-1.

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "ds/kernels/ops.h"

namespace ds::model {

enum class Init : u8 { Normal, Zeros, Ones };

// One parameter, under its Hugging Face name, in Hugging Face's shape and orientation.
struct ParamRow {
  std::string name;
  std::vector<i64> shape;
  Init init = Init::Normal;
  float std = 0.02f;   // of Init::Normal
  bool decay = false;  // weight decay applies: matrices and embeddings, not biases and norms

  i64 numel() const noexcept {
    i64 n = 1;
    for (i64 s : shape) n *= s;
    return n;
  }
};

// Hands out activation memory. The same calls run twice: once counting (no memory behind the views), once with the
// memory that the count asked for; so the sizes that are predicted are the sizes that are used.
//   saved      lives from forward to backward of the micro-batch
//   temporary  lives within one forward or backward call of one layer; layers share it
class ActivationPlanner {
 public:
  ActivationPlanner() = default;
  ActivationPlanner(void* saved, void* temporary) : saved_(saved), temporary_(temporary) {}

  void begin_layer() noexcept { temporary_used_ = 0; }
  TensorView saved(DType dtype, std::initializer_list<i64> shape) { return take(saved_, saved_used_, dtype, shape); }
  TensorView temporary(DType dtype, std::initializer_list<i64> shape) {
    const TensorView v = take(temporary_, temporary_used_, dtype, shape);
    temporary_peak_ = std::max(temporary_peak_, temporary_used_);
    return v;
  }
  i64 saved_bytes() const noexcept { return saved_used_; }
  i64 temporary_bytes() const noexcept { return temporary_peak_; }

 private:
  static TensorView take(void* base, i64& used, DType dtype, std::initializer_list<i64> shape) {
    TensorView v = TensorView::of(nullptr, dtype, shape);
    if (base != nullptr) v.data = static_cast<char*>(base) + used;
    used += align_up(v.bytes(), 64);
    return v;
  }
  void* saved_ = nullptr;
  void* temporary_ = nullptr;
  i64 saved_used_ = 0, temporary_used_ = 0, temporary_peak_ = 0;
};

// The activations of one layer for one micro-batch; what lies at which index is the layer's own business.
struct LayerActs {
  std::vector<TensorView> saved, temporary;
  TensorView output;  // [R,C]
};

// Keys and values of the positions so far, for generation: [B, capacity, G, D] each, work dtype.
struct KvCache {
  TensorView k, v;
  i64 length = 0;  // positions that are in it
};

enum class Mode : u8 { Train, Eval, Generate };

// cos and sin of the positions from 0 on, [positions, D/2] fp32 each, in host memory; empty for models without rotary
// positions.
struct RopeTables {
  std::vector<float> cos, sin;
};

// What all layers of one forward or backward pass see.
struct PassContext {
  const OpTable& ops;
  Stream& stream;
  Mode mode = Mode::Train;
  i64 B = 0, T = 0;
  TensorView ids{};                   // [R] int32
  TensorView positions{};             // [T] int32
  TensorView row_positions{};         // [R] int32: positions repeated B times
  TensorView token_types{};           // [R] int32: segments, for models with Model::token_types
  TensorView rope_cos{}, rope_sin{};  // of positions from 0 on, for the sequences of this pass; none for GPT-2
  TensorView targets{};               // [R] int32; not when generating
  TensorView losses{};                // [R] fp32, written by the head; not when generating
  TensorView logits{};  // Generate: [B,V] fp32 of the last position, written by the head; otherwise the head's
                        // workspace [chunk,V] fp32
  TensorView head_weight_grad{};  // Train: [V,C] fp32, the gradient of the output projection of this micro-batch
  float loss_grad = 1;            // d(scaled total)/d(token loss)
  RngKey dropout_key{};           // each use sets its own site
  KvCache* cache = nullptr;       // Generate: of the present layer
};

// Parameters (or gradients) of one layer, in the order of its rows; `tied`: the row of another unit that this layer
// also uses (the output projection of a model with tied embeddings).
struct RowViews {
  std::span<const TensorView> own;
  TensorView tied{};
};

class Layer {
 public:
  virtual ~Layer() = default;

  const std::string& name() const noexcept { return name_; }
  const std::vector<ParamRow>& rows() const noexcept { return rows_; }

  // Declares the activations for micro-batches of B x T tokens.
  virtual LayerActs plan(ActivationPlanner& planner, DType work, i64 B, i64 T, Mode mode) const = 0;
  // acts.output = layer(x). x is unused by the first layer (it reads ids).
  virtual void forward(const PassContext&, RowViews params, TensorView x, const LayerActs& acts) const = 0;
  // Overwrites dx [R,C] (may be the same memory as dy) and every gradient row, rounded once to the row's dtype.
  virtual void backward(const PassContext&, RowViews params, RowViews grads, TensorView x, TensorView dy, TensorView dx,
                        const LayerActs& acts) const = 0;
  // Of the last layer alone, for tests: out [R,V] fp32 = the logits of the micro-batch that forward() saw last.
  virtual void logits(const PassContext&, RowViews params, const LayerActs& acts, TensorView out) const;

 protected:
  explicit Layer(std::string name) : name_(std::move(name)) {}
  std::string name_;
  std::vector<ParamRow> rows_;
};

// A second name that files may have for a parameter.
struct Tie {
  std::string alias, name;
};

// A model: layers in order; layer 0 embeds, the last one is the head (norm, projection, loss).
struct Model {
  std::vector<std::unique_ptr<Layer>> layers;
  bool tied = false;      // the head projects with row 0 of layer 0
  std::vector<Tie> ties;  // checkpoints name them, files of weights may repeat their values
  i64 vocab = 0, hidden = 0, max_positions = 0;
  bool causal = true;   // each position predicts the next token; else it sees the whole sequence and fills in masks
  i64 token_types = 0;  // 0: the model has none
  i64 num_heads = 0, num_kv_heads = 0, head_dim = 0;

  i64 num_params() const noexcept;
  // Parameters that take part in matrix products (the head's projection included, embedding look-ups not).
  i64 num_matmul_params() const noexcept;
  // Forward + backward: 6 N_matmul + 12 L (H D) T, full attention (PaLM's convention).
  double flops_per_token(i64 T) const noexcept;
};

}  // namespace ds::model
