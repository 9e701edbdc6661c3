// SPDX-License-Identifier: Apache-2.0
#pragma once
// A model is a list of layers over flat buffers. A layer declares its parameters once and is then *given* memory: views
// of its parameters, of their gradients and of its activations. It owns none, and knows nothing of ZeRO or files, and
// of ranks only the groups that share its matrices (tp) or its tokens (sp): shard.h.
//
// The residual stream x [R,C], R = B*T, work dtype, runs through all layers: layer l reads the output of layer l-1.

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/file.h"
#include "ds/kernels/ops.h"
#include "ds/mesh.h"
#include "model/shard.h"
#include "model/slice.h"

namespace ds::model {

class AttentionLayout;

enum class Init : u8 { Normal, Zeros, Ones };

// One parameter, under its Hugging Face name, in Hugging Face's shape and orientation.
struct ParamRow {
  std::string name;
  std::vector<i64> shape;  // of what this rank has: all of it, or the slice
  Init init = Init::Normal;
  float std = 0.02f;   // of Init::Normal
  bool decay = false;  // weight decay applies: matrices and embeddings, not biases and norms

  std::vector<i64> whole = {};  // the shape of the whole parameter, where this rank has a slice of it
  ParamSlice slice = {};
  // Where its gradients are reduced and it is cut by ZeRO: over dp, or over group - 1 of Model::splits.
  size_t group = 0;
  // How many ranks of dp have the samples that its gradient sums, by which the sum is divided; 0: all. Whatever the
  // group's size is.
  i64 divisor = 0;
  // Equal copies have equal gradients, but those whose gradients are parts, which add up over so many ranks side by
  // side of the tensor-parallel group: each has seen other tokens or other heads.
  int also_summed = 1;
  bool tiles = false;   // products take it in blocks of its rows, where the layout has such (Layer::products)
  i64 room = 0;         // elements of the largest slice, so that rows lie alike on all ranks of the group
  bool counted = true;  // this rank is the first of them: its copy is saved, and its gradient is in the norm

  i64 numel() const noexcept { return product(shape); }
  const std::vector<i64>& whole_shape() const noexcept { return slice.whole() ? shape : whole; }
  i64 whole_numel() const noexcept { return product(whole_shape()); }

  static i64 product(const std::vector<i64>& shape) noexcept {
    i64 n = 1;
    for (const i64 s : shape) n *= s;
    return n;
  }
};

// What a layer keeps of its forward pass for its backward pass.
enum class Keep : u8 {
  All,
  AllButAttention,  // the branch of the attention is computed again (Korthikanti et al. 2022: selective)
  Input,            // everything is computed again from the layer's input
};

// Hands out activation memory. The same calls run again and again: once counting (no memory behind the views), then
// with the memory that the count asked for; so the sizes that are predicted are the sizes that are used.
//   kept       lives from the forward pass of the micro-batch to its weight gradients; `away`: the same in an array
//   that
//              is not in the device's memory, of which a place is all that is known
//   working    from the input gradients of a layer to its weight gradients; and, where the layer does not keep it, what
//              is computed again before them. Layers that run one after the other share it.
//   temporary  lives within one call; all layers share it
class ActivationPlanner {
 public:
  static constexpr i64 kAwayPage = PageBuffer::kPage;
  struct Memory {
    void *kept = nullptr, *working = nullptr, *temporary = nullptr;
    i64 away = 0;  // where it begins
  };
  ActivationPlanner() = default;
  explicit ActivationPlanner(const Memory& memory) : memory_(memory) {}

  // What follows is another layer's, which keeps `keep`. Unless it shares the time of the one before (its gradients
  // wait for each other, or it is computed again with it), it takes the same working memory.
  void begin_layer(Keep keep, bool shares_time) noexcept {
    keep_ = keep;
    temporary_used_ = 0;
    if (!shares_time) working_used_ = pinned_;
  }
  // The working memory that has been handed out so far is for all layers.
  void pin() noexcept { pinned_ = working_used_; }

  // Of the forward pass: read again by the backward pass.
  TensorView saved(DType dtype, std::initializer_list<i64> shape) {
    return keep_ == Keep::Input ? working(dtype, shape) : kept(dtype, shape);
  }
  // The same for the branch of the attention, from the layer's input to what it adds to the residual stream.
  TensorView attention(DType dtype, std::initializer_list<i64> shape) {
    return keep_ == Keep::All ? kept(dtype, shape) : working(dtype, shape);
  }
  // Of the pass of input gradients: read again by that of weight gradients.
  TensorView gradient(DType dtype, std::initializer_list<i64> shape) { return working(dtype, shape); }
  TensorView temporary(DType dtype, std::initializer_list<i64> shape) {
    const TensorView v = take(memory_.temporary, temporary_used_, dtype, shape);
    temporary_peak_ = std::max(temporary_peak_, temporary_used_);
    return v;
  }
  TensorView kept(DType dtype, std::initializer_list<i64> shape) {
    return take(memory_.kept, kept_used_, dtype, shape);
  }
  // Bytes from the array's begin, whole pages.
  i64 away(i64 bytes) { return memory_.away + std::exchange(away_used_, away_used_ + align_up(bytes, kAwayPage)); }
  TensorView working(DType dtype, std::initializer_list<i64> shape) {
    const TensorView v = take(memory_.working, working_used_, dtype, shape);
    working_peak_ = std::max(working_peak_, working_used_);
    return v;
  }

  // What comes next lies behind what `other`, which began as this one was, has handed out, too.
  void cover(const ActivationPlanner& other) noexcept {
    kept_used_ = std::max(kept_used_, other.kept_used_);
    away_used_ = std::max(away_used_, other.away_used_);
    working_used_ = std::max(working_used_, other.working_used_);
    working_peak_ = std::max(working_peak_, other.working_peak_);
    temporary_peak_ = std::max(temporary_peak_, other.temporary_peak_);
  }

  i64 kept_bytes() const noexcept { return kept_used_; }
  i64 away_bytes() const noexcept { return away_used_; }
  i64 working_bytes() const noexcept { return working_peak_; }
  i64 temporary_bytes() const noexcept { return temporary_peak_; }

 private:
  static TensorView take(void* base, i64& used, DType dtype, std::initializer_list<i64> shape) {
    TensorView v = TensorView::of(nullptr, dtype, shape);
    if (base != nullptr) v.data = static_cast<char*>(base) + used;
    used += align_up(v.bytes(), 64);
    return v;
  }
  Memory memory_;
  Keep keep_ = Keep::All;
  i64 kept_used_ = 0, away_used_ = 0, working_used_ = 0, working_peak_ = 0, pinned_ = 0, temporary_used_ = 0,
      temporary_peak_ = 0;
};

// The activations of one layer for one micro-batch; what lies at which index is the layer's own business.
struct LayerActs {
  std::vector<TensorView> saved;      // of the forward pass
  std::vector<TensorView> gradients;  // of the pass of input gradients
  std::vector<TensorView> temporary;
  std::vector<TensorView> exchange;  // of attend() over several ranks
  TensorView output;                 // [R,C], placed by who runs the layers
  // Where the output is an input that is kept elsewhere until layers are computed again from it: this rank's rows of
  // it, here or, without memory, away from the device at `stash_at`; and [padded R,C] to have it back.
  TensorView stash{}, restored{};
  i64 stash_at = 0;
  TensorView input_grad;  // [R,C], likewise; none for the first layer of the model
  // What the host draws for a micro-batch before its forward pass, int32 (Layer::draw); or none.
  TensorView drawn{};
  std::vector<LayerActs> inner;  // one, of a layer around another
};

// Keys and values of the positions so far of one sequence, for generation: [1, rows, G, D] each, work dtype. Without
// pages row t is position t. Else only what is seen later is kept: page i of `page` positions, of which many may share
// rows one after the other, lies from row places[i] * page on, or nowhere (-1).
struct KvCache {
  TensorView k, v;
  i64 length = 0;  // positions so far
  i64 page = 0;
  std::span<const i32> places{};
  const i32* pages = nullptr;  // the same on the device, as AttentionParams::pages
};

enum class Mode : u8 { Train, Eval, Generate };

// cos and sin of the positions from 0 on, [positions, D/2] fp32 each, in host memory; empty for models without rotary
// positions.
struct RopeTables {
  std::vector<float> cos, sin;
};

// What all layers of one forward or backward pass see. R = B*T rows of tokens.
struct PassContext {
  const OpTable& ops;
  Stream& stream;
  Mode mode = Mode::Train;
  i64 B = 0, T = 0;                   // T: of this rank's part of the sequences
  TensorView ids{};                   // [R] int32
  TensorView positions{};             // [T] int32: rows of the rope tables; [R] when generating, and of documents
  TensorView row_positions{};         // [R] int32: the position of each row in its sequence
  TensorView token_types{};           // [R] int32: segments, for models with Model::token_types
  TensorView rope_cos{}, rope_sin{};  // of positions from 0 on, for the sequences of this pass; none for GPT-2
  TensorView targets{};               // [R] int32; not when generating
  TensorView losses{};                // [R] fp32, written by the head; not when generating
  TensorView logits{};    // Generate: [B,V] fp32 of the last position, written by the head; otherwise the head's
                          // workspace [chunk,V] fp32
  TensorView tile_sum{};  // [R, most columns] fp32: a product over tiles, where there are such
  TensorView head_weight_grad{};  // Train: [V,C] fp32, the gradient of the output projection of this micro-batch
  float loss_grad = 1;            // d(scaled total)/d(token loss)
  float label_smoothing = 0, z_loss = 0;  // as CrossEntropyParams has them; Train
  RngKey dropout_key{};                   // each use sets its own site
  AttentionBlocks blocks{};               // of Model::layout: of whole sequences, from their beginning
  TensorView documents{};                 // [2, B, sequence length] int32: AttentionParams::documents; or none
  std::span<KvCache* const> caches{};     // Generate: of the present layer, by sequence
  Groups groups{};                        // the ranks that share matrices and tokens

  // Whether each row is to have the bits that it has alone: the next tokens of several sequences.
  bool rowwise() const noexcept { return mode == Mode::Generate && T == 1; }
};

// Matrices of which only some rows are there at a time.
class Tiles {
 public:
  virtual ~Tiles() = default;
  // Calls use(first, rows) for each block of rows of matrix `row`, in order: rows [first, first + n), which are there
  // until it returns.
  virtual void for_each(size_t row, FunctionRef<void(i64 first, TensorView rows)> use) = 0;
};

// A matrix that products read or write: as a whole, or, without data, in tiles.
struct Matrix {
  Matrix(TensorView all, Tiles* in_tiles = nullptr, size_t number = 0) : whole(all), tiles(in_tiles), row(number) {}
  bool is_whole() const noexcept { return whole.data != nullptr || tiles == nullptr; }

  TensorView whole;
  Tiles* tiles;
  size_t row;
};

// Parameters (or gradients) of one layer, in the order of its rows; `shared`: the row of Model::shared, where this
// layer uses it. `tiles`: of what has no data in `own`.
struct RowViews {
  std::span<const TensorView> own;
  TensorView shared{};
  Tiles* tiles = nullptr;

  Matrix matrix(size_t row) const noexcept { return {own[row], tiles, row}; }
};

// What a layer may draw by. With documents of each token where its own begins and ends, and its position in it.
struct DrawKey {
  RngKey rng{};
  i64 B = 0, T = 0;
  std::span<const i32> documents{}, positions{};  // [2, B, T], [B, T]; or none
};

// What of a layer asks for its matrices.
enum class Products : u8 { Forward, Recompute, RecomputeAttention, BackwardInput, BackwardWeight };

class Layer {
 public:
  virtual ~Layer() = default;

  const std::string& name() const noexcept { return name_; }
  const std::vector<ParamRow>& rows() const noexcept { return rows_; }
  // What kind of layer: "Gpt2Block"; for partitions by type.
  virtual std::string_view type() const noexcept = 0;
  // Whether it is one of the equal layers in the middle, which can be computed again.
  virtual bool is_block() const noexcept { return false; }
  // The rows that are matrices of its products, in the order in which these take them tile by tile.
  virtual std::vector<size_t> products(Products) const { return {}; }
  // Whether its weight gradients can wait for a call of their own. The head's come with its loss.
  virtual bool splits() const noexcept { return true; }

  // Of T tokens of a sample, those that it computes in training; the others pass it by.
  virtual i64 tokens(i64 T) const noexcept { return T; }
  // Fills acts.drawn for a micro-batch of the same sizes that they were planned for.
  virtual void draw(const DrawKey&, std::span<i32>) const {}

  // Declares the activations for micro-batches of B x T tokens, but for output and input_grad.
  virtual LayerActs plan(ActivationPlanner& planner, DType work, i64 B, i64 T, Mode mode) const = 0;
  // acts.output = layer(x). x is unused by the first layer (it reads ids). The head has no output: when evaluating or
  // generating it computes losses or logits, when training nothing that its loss needs more than once.
  virtual void forward(const PassContext&, RowViews params, TensorView x, const LayerActs& acts) const = 0;
  // acts.input_grad = the gradient of x, given that of the output (no alias). The head computes the losses here.
  virtual void backward_input(const PassContext&, RowViews params, TensorView x, TensorView dy,
                              const LayerActs& acts) const = 0;
  // Overwrites every gradient row, rounded once to the row's dtype. After backward_input, with the same views.
  virtual void backward_weight(const PassContext&, RowViews grads, TensorView x, TensorView dy,
                               const LayerActs& acts) const = 0;
  // Computes again what a layer that keeps less than all does not have; before backward_input.
  virtual void recompute(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& acts, Keep keep) const;
  // Of the last layer alone, for tests: out [R,V] fp32 = the logits of the micro-batch that forward() saw last.
  virtual void logits(const PassContext&, RowViews params, const LayerActs& acts, TensorView out) const;

 protected:
  explicit Layer(std::string name) : name_(std::move(name)) {}
  // When all rows are there.
  void allow_tiles() {
    for (const size_t row : products(Products::Forward)) rows_[row].tiles = true;
  }
  std::string name_;
  std::vector<ParamRow> rows_;
};

// A second name that files may have for a parameter.
struct Tie {
  std::string alias, name;
};

// A model: layers in order; layer 0 embeds, the last one is the head (norm, projection, loss). Parameters are numbered
// in the order shared, then layer by layer.
struct Model {
  std::vector<std::unique_ptr<Layer>> layers;
  std::vector<ParamRow>
      shared;             // tied embeddings: the matrix that layer 0 looks up and the head projects with; or none
  std::vector<Tie> ties;  // checkpoints name them, files of weights may repeat their values
  Shard shard;
  std::vector<DpSplit> splits;  // groups other than dp that its rows are reduced over
  i64 vocab = 0, hidden = 0;
  bool causal = true;   // each position predicts the next token; else it sees the whole sequence and fills in masks
  i64 token_types = 0;  // 0: the model has none
  i64 num_heads = 0, num_kv_heads = 0, head_dim = 0;
  std::shared_ptr<const AttentionLayout> layout;  // of the attention of all layers; null: every block is met

  bool tied() const noexcept { return !shared.empty(); }
  i64 vocab_share() const noexcept;  // rows of the output projection on this rank
  i64 largest_vocab_share() const noexcept;
  // All parameters by number.
  std::vector<const ParamRow*> params() const {
    std::vector<const ParamRow*> rows;
    for (const ParamRow& row : shared) rows.push_back(&row);
    for (const auto& layer : layers) {
      for (const ParamRow& row : layer->rows()) rows.push_back(&row);
    }
    return rows;
  }
  i64 num_params() const noexcept;  // elements, of the whole model
  // Parameters that take part in matrix products (the head's projection included, embedding look-ups not).
  i64 num_matmul_params() const noexcept;
  // Forward + backward: 6 N_matmul + 12 L (H D) T, full attention (PaLM's convention); with a layout the share of the
  // blocks that it has.
  double flops_per_token(i64 T) const noexcept;
};

}  // namespace ds::model
