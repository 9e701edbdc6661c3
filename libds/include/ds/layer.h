// SPDX-License-Identifier: Apache-2.0
#pragma once
// A model is a list of layers over flat buffers. A layer declares its parameters once and is then *given* memory: views
// of its parameters, their gradients and its activations. It owns none, and knows nothing of ZeRO or files; the only
// ranks it knows are those that share its matrices (tp), its tokens (sp) or its experts (ep), see shard.h.
// The residual stream x [S,C], work dtype, runs through all layers: layer l reads the output of layer l-1. S is B*T,
// or B*T/tp where ranks of tp share the rows: stream_rows() in ds/building_blocks.h.

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ds/error.h"
#include "ds/integers.h"
#include "ds/kernels/ops.h"
#include "ds/kernels/thread_pool.h"
#include "ds/mesh.h"
#include "ds/model_config.h"
#include "ds/shard.h"

namespace ds::model {

class AttentionLayout;

enum class Init : u8 { Normal, Zeros, Ones };

// A shape as matrices: two dimensions are one matrix, more are a batch of `count` matrices [rows, cols]. Fewer are a
// vector, which has none.
struct MatrixShape {
  i64 count = 0, rows = 0, cols = 0;
  static MatrixShape of(std::span<const i64> shape) noexcept {
    if (shape.size() < 2) return {};
    MatrixShape m{1, shape[shape.size() - 2], shape.back()};
    for (const i64 n : shape.first(shape.size() - 2)) m.count *= n;
    return m;
  }
};

// The form in which a rank stores a parameter between its uses: the work dtype; 16 bits, which an fp32 run converts; or
// codes of 8 or 4 bits, with a scale for each 128 elements of the rank's part (CodeFormat::exact). Layers always see
// the work dtype: a unit is decoded when it is gathered, at every ZeRO stage. Codes is for runs that do not train,
// below stage 3: layers see a view of the codes (ParamRow::codes), which products decode.
enum class Storage : u8 { Work, BF16, F16, Int8, Int4, Codes };
constexpr std::string_view storage_name(Storage s) noexcept {
  constexpr std::string_view kNames[] = {"work", "bf16", "fp16", "int8", "int4", "codes"};
  return kNames[static_cast<size_t>(s)];
}

// Elements of the largest blocks of codes that states and rows are stored in, each with one scale; no such block has
// elements of two rows.
inline constexpr i64 kRowBlock = 256;

// One parameter, with its Hugging Face name, shape and orientation.
struct ParamRow {
  std::string name;
  std::vector<i64> shape;  // of this rank's part: the whole parameter, or the slice
  Init init = Init::Normal;
  float std = 0.02f;   // of Init::Normal
  bool decay = false;  // weight decay applies: matrices and embeddings, not biases and norms
  // Else its values never change: it has weights, but neither gradient, master nor optimizer states.
  bool trained = true;
  Storage storage = Storage::Work;  // another form needs a row that is not trained
  CodedForm codes{};                // of Storage::Codes

  std::vector<i64> whole = {};  // the shape of the whole parameter, if this rank has a slice of it
  ParamSlice slice = {};
  // The group that reduces its gradient and over which ZeRO cuts it: 0 is dp, i is number i - 1 of Model::splits. The
  // number after those is of balancing biases (`balances`), which no group reduces or cuts.
  size_t group = 0;
  // The number of dp ranks whose samples its gradient sums over, by which the sum is divided; 0: all. Independent of
  // the group's size.
  i64 divisor = 0;
  // Copies in the tensor-parallel group have equal gradients, unless this is not 1: then gradients are partial sums
  // over this many neighbouring ranks, each of which has seen other tokens or heads.
  int also_summed = 1;
  double tokens = 1;   // the share of the tokens that use it: k/E of an expert
  bool tiles = false;  // products read it in blocks of its rows if the layout has tiles (Layer::products)
  // Only products and look-ups read this matrix [out, in], and they take views with panels (ds/kernels/tensor.h): a run
  // that does not train packs it. Rows of linear maps are so; a layer that reads them otherwise must reset this.
  // Batches of matrices are so as well; they are packed only if they are kept as codes.
  bool packs = false;
  // The same for a matrix that is published as [in, out] (GPT-2's Conv1D), which is not packed: kept as codes, it is
  // its transpose, and layers see [out, in].
  bool in_out = false;
  bool fp8 = false;  // a matrix of products in FP8, of whole blocks of 128 x 128: gathers may send its codes
  i64 room = 0;      // elements of the largest slice, so that all ranks of the group have the same layout
  // This rank is the first of its copies: it saves the parameter and counts its gradient in the norm.
  bool counted = true;
  // The number in its layer of the row that it is to lie directly after in memory, so that both are parts of one matrix
  // or vector; -1: none. That row consists of whole blocks of kRowBlock. See lies_after().
  i64 after = -1;
  // The number in its layer of the matrix of the router for which this row is a balancing bias (RouterParams); -1: it
  // is none. Such a row is fp32 in every run, whole on every rank, and not trained: the end of a step moves it by the
  // tokens that were counted (Layer::num_counts), if the matrix is trained. A layer has one at most.
  i64 balances = -1;
  // A batch of vectors, such as the biases of experts: of its dimensions none makes a matrix, and layers see a vector.
  bool vectors = false;

  DType dtype(DType work) const noexcept { return balances < 0 ? work : DType::F32; }
  i64 numel() const noexcept { return product(shape); }
  bool transposed() const noexcept { return in_out && codes; }
  // The elements of a row of the matrix of codes that it is kept as.
  i64 coded_k() const noexcept { return in_out ? shape.front() : shape.back(); }
  MatrixShape matrices() const noexcept { return vectors ? MatrixShape{} : MatrixShape::of(shape); }
  // Whether this row, one of these of its layer, lies directly after the other one, unless it is in tiles.
  bool lies_after(std::span<const ParamRow> rows) const noexcept {
    if (after < 0) return false;
    const ParamRow& other = rows[static_cast<size_t>(after)];
    return trained == other.trained && storage == other.storage && codes == other.codes && group == other.group;
  }
  // This rank's part as layers see it: a vector, a matrix, or a batch of matrices [count, rows, cols].
  TensorView view(DType work, void* data) const noexcept {
    const MatrixShape m = matrices();
    const DType dtype = this->dtype(work);
    if (m.count == 0) return TensorView::of(data, dtype, {numel()});
    TensorView v = transposed()        ? TensorView::of(data, dtype, {m.cols, m.rows})
                   : shape.size() == 2 ? TensorView::of(data, dtype, {m.rows, m.cols})
                                       : TensorView::of(data, dtype, {m.count, m.rows, m.cols});
    v.codes = codes;
    return v;
  }
  const std::vector<i64>& whole_shape() const noexcept { return slice.whole() ? shape : whole; }
  i64 whole_numel() const noexcept { return product(whole_shape()); }

  static i64 product(const std::vector<i64>& shape) noexcept {
    i64 n = 1;
    for (const i64 s : shape) n *= s;
    return n;
  }
};

// The part of its forward pass that a layer keeps for its backward pass.
enum class Keep : u8 {
  All,
  AllButAttention,  // the attention branch is recomputed (Korthikanti et al. 2022: selective)
  Input,            // everything is recomputed from the layer's input
  Nothing,          // no backward pass follows
};

// Allocates activation memory. The same calls run repeatedly: first to count (the views have no memory), then with the
// memory that the count requested, so predicted and used sizes are the same.
//   kept       lives from the forward pass of the micro-batch to its weight gradients; `away` is the same for an array
//              outside device memory, of which only offsets are known
//   working    lives from a layer's input gradients to its weight gradients; also holds recomputed activations. Layers
//              that run one after the other share it.
//   temporary  lives within one call; all layers share it
class ActivationPlanner {
 public:
  static constexpr i64 kAwayPage = 4096;  // of memory and of disks
  struct Memory {
    void *kept = nullptr, *working = nullptr, *temporary = nullptr;
    i64 away = 0;  // offset at which it begins
  };
  ActivationPlanner() = default;
  explicit ActivationPlanner(const Memory& memory) : memory_(memory) {}

  // Starts another layer, which keeps `keep`. It reuses the working memory of the previous layer unless both are live
  // at the same time (their gradients wait for each other, or they are recomputed together).
  void begin_layer(Keep keep, bool shares_time) noexcept {
    keep_ = keep;
    temporary_used_ = 0;
    if (!shares_time) working_used_ = pinned_;
  }
  // Keeps the working memory allocated so far for all layers.
  void pin() noexcept { pinned_ = working_used_; }

  // Written by the forward pass, read by the backward pass.
  TensorView saved(DType dtype, std::initializer_list<i64> shape) {
    return keep_ == Keep::Input || keep_ == Keep::Nothing ? working(dtype, shape) : kept(dtype, shape);
  }
  // The same for the attention branch, from the layer's input to the sum that it adds to the residual stream.
  TensorView attention(DType dtype, std::initializer_list<i64> shape) {
    return keep_ == Keep::All ? kept(dtype, shape) : working(dtype, shape);
  }
  // Written by the input gradient pass, read by the weight gradient pass. Without a backward pass it has no memory.
  TensorView gradient(DType dtype, std::initializer_list<i64> shape) {
    return keep_ == Keep::Nothing ? TensorView::of(nullptr, dtype, shape) : working(dtype, shape);
  }
  TensorView temporary(DType dtype, std::initializer_list<i64> shape) {
    const TensorView v = take(memory_.temporary, temporary_used_, dtype, shape);
    temporary_peak_ = std::max(temporary_peak_, temporary_used_);
    return v;
  }
  TensorView kept(DType dtype, std::initializer_list<i64> shape) {
    return take(memory_.kept, kept_used_, dtype, shape);
  }
  // Offset in bytes from the start of the array; whole pages.
  i64 away(i64 bytes) { return memory_.away + std::exchange(away_used_, away_used_ + align_up(bytes, kAwayPage)); }
  TensorView working(DType dtype, std::initializer_list<i64> shape) {
    const TensorView v = take(memory_.working, working_used_, dtype, shape);
    working_peak_ = std::max(working_peak_, working_used_);
    return v;
  }

  // Continues after everything that `other`, which started like this one, has allocated, too.
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

// Activations of the low-rank branch of a linear map of R rows: ds/linear.h.
struct BranchActs {
  TensorView inner{}, inner_grad{};  // [R, rank], and its gradient, both multiplied by the scale
  TensorView product{};              // [R, rank] fp32, temporary
};

// The activations of one layer for one micro-batch; each layer defines its own indices.
struct LayerActs {
  std::vector<TensorView> saved;      // of the forward pass
  std::vector<TensorView> gradients;  // of the input gradient pass
  std::vector<TensorView> temporary;
  std::vector<TensorView> exchange;  // of attend() over several ranks
  std::vector<BranchActs> branches;  // of linear maps
  TensorView output;                 // [R,C], placed by the code that runs the layers
  // The last layer of those that run one after the other: the numbers that layers share (Layer::num_shared_stats),
  // placed likewise, after the output, with which they are one message.
  TensorView shared_stats{};
  // If the output is a kept input stored elsewhere until layers are recomputed from it: this rank's rows of it, here
  // or, without memory, away from the device at `stash_at`; and [padded R,C] to restore it.
  TensorView stash{}, restored{};
  i64 stash_at = 0;
  TensorView input_grad;  // [R,C], placed likewise; none for the model's first layer, and without a backward pass
  // Values that the host draws before the micro-batch's forward pass, int32 (Layer::draw); or none.
  TensorView drawn{};
  std::vector<LayerActs> inner;  // of a layer inside this one, or of its parts
};

// An array that a layer caches for generation: [heads, dim] for each token, work dtype.
struct CachedArray {
  i64 heads = 0, dim = 0;  // of this rank
  auto operator<=>(const CachedArray&) const = default;
};
// The cache of a layer. Attention caches two arrays, keys and values, or what they are made from.
struct CacheShape {
  i64 window = 0;                     // a token sees itself and those before it, so many together; 0: all
  std::vector<CachedArray> arrays{};  // none: later tokens need nothing of the layer
  // It makes keys and values from its arrays, for all positions of a sequence at once: rows of its products.
  bool makes = false;
  auto operator<=>(const CacheShape&) const = default;
};

// A layer's arrays for one sequence's positions so far, by CacheShape: [1, rows, heads, dim] each, which sequences
// share in blocks of `block` positions. Block i of the sequence starts at row blocks[i] * block. No later token sees a
// key of a block without a place (-1).
struct KvCache {
  std::vector<TensorView> arrays{};
  i64 length = 0;  // number of positions so far
  i64 block = 0;
  std::span<const i32> blocks{};
  // The tables of all sequences on the device, with 0 for -1: AttentionParams::pages, of `table` blocks each.
  const i32* pages = nullptr;
  i64 table = 0;
};

enum class Mode : u8 { Train, Eval, Generate };

// The use of the gradients of a pass: they are of this micro-batch alone; or they are fp32 sums over the micro-batches
// of a step, which the first one overwrites and later ones add to.
enum class GradTerm : u8 { Alone, First, Later };

// A pass for which a layer plans its activations: B sequences of T tokens. When generating, B is 1, and T the number of
// tokens of all sequences together.
struct PlannedPass {
  DType work = DType::F32;
  Mode mode = Mode::Train;
  i64 B = 0, T = 0;
  i64 context = 0;  // Generate: the most positions of a sequence
  // Generate: the rows of the largest pass among the ranks that exchange rows of experts (Axis::Ep); 0: this one's.
  i64 largest = 0;

  i64 rows() const noexcept { return B * T; }
  // The same pass over other sequences, for a layer inside another one: of fewer tokens if some are dropped, or of as
  // many as an expert has room for, which may be more. PassContext::over() is its counterpart.
  PlannedPass over(i64 b, i64 t) const noexcept { return {work, mode, b, t, context, largest}; }
};

// A rotary embedding of the model, by which layers turn queries and keys: pair k of `dim` turns by
// position * theta^(-2k / dim), scaled.
struct Rotation {
  i64 dim = 0;
  float theta = 1e4f;
  RopeScaling scaling{};
  i64 max_positions = 0;  // of the trained model
  // True if the angles depend on the length of the sequence.
  bool by_length() const noexcept { return scaling.type == RopeType::Dynamic || scaling.type == RopeType::LongRope; }
};
// The cos and sin of a rotation for positions from 0 on: [positions, dim / 2] fp32 each, in host memory.
struct RopeTables {
  std::vector<float> cos, sin;
};
// The same where the ops run.
struct RopeViews {
  TensorView cos{}, sin{};
};

// Copies between the memory where ops run and that of the host, for layers whose messages depend on values.
class HostLink {
 public:
  virtual ~HostLink() = default;
  // After all work that was enqueued; complete when the call returns.
  virtual void download(void* to, const void* from, i64 bytes) = 0;
  // `from` may be reused when the call returns.
  virtual void upload(void* to, const void* from, i64 bytes) = 0;
  // The forward pass of a layer in training goes in so many more rounds than one; reported by step.
  virtual void add_rounds(i64 more) = 0;
};

// The inputs that all layers share in one forward or backward pass. R = B*T rows of tokens.
struct PassContext {
  const OpTable& ops;
  Stream& stream;
  Mode mode = Mode::Train;
  i64 B = 0, T = 0;            // T: this rank's part of the sequences
  TensorView ids{};            // [R] int32
  TensorView positions{};      // [T] int32: rows of the rope tables; [R] of documents
  TensorView row_positions{};  // [R] int32: each row's position in its sequence
  TensorView token_types{};    // [R] int32: segments, for models with Model::token_types
  // The tables of Model::rotations, by number, for the sequences of this pass; memory of PassMemory.
  std::span<const RopeViews> rotations{};
  TensorView targets{};   // [R] int32; not when generating
  TensorView losses{};    // [R] fp32, written by the head; not when generating
  TensorView logits{};    // Generate: [n,V] fp32, the logits of logit_rows, written by the head; otherwise the head's
                          // workspace [chunk,V] fp32 or work dtype
  TensorView tile_sum{};  // [R, most columns] fp32: for products over tiles, if any
  TensorView fp8{};       // [bytes] uint8: for the operands of one product in FP8, if any
  // Train: [V,C] fp32, the gradient of the output projection, none if the projection is not trained: memory for this
  // micro-batch, or, unless `term` is Alone, the row of the projection among the gradients of the head.
  TensorView head_weight_grad{};
  GradTerm term = GradTerm::Alone;
  i64 part = -1;        // backward_weight: the part whose gradients are made (Layer::gradient_parts); -1: all
  float loss_grad = 1;  // d(scaled total)/d(token loss)
  float label_smoothing = 0, z_loss = 0;  // see CrossEntropyParams; Train
  RngKey dropout_key{};                   // each use sets its own site
  AttentionBlocks blocks{};               // of Model::layout, for whole sequences from their start
  TensorView documents{};                 // [2, B, sequence length] int32: AttentionParams::documents; or none
  // Generate: B is 1, and the T rows are the new tokens of several sequences, one sequence after the other.
  std::span<KvCache* const> caches{};  // of the current layer, by sequence
  std::span<const i64> fresh{};        // new tokens, by sequence
  // The same on the device, and where tables of blocks are; with the new tokens among the keys. The stride is the
  // layer's (KvCache::table).
  AttentionSequences sequences{};
  TensorView logit_rows{};  // [n] int32: the rows whose logits are wanted
  bool alone = false;       // products and attention give each row the bits that it has alone
  i64 largest = 0;          // see PlannedPass::largest
  Groups groups{};          // the ranks that share matrices and tokens
  // In training, if layers of the model add losses (Layer::adds_loss): [1] fp32 each. aux_loss receives the loss of the
  // layer that runs, aux_grad is d(scaled total)/d(that loss); it differs from step to step, its place does not.
  TensorView aux_loss{}, aux_grad{};
  // In training, if layers of the model count tokens (Layer::num_counts): [the most of any layer] fp32, of which the
  // layer that runs writes its own; none in a recomputation.
  TensorView counts{};
  // In training, if the layer that runs adds up counts over a step (Layer::num_step_counts): its numbers, fp32, zeros
  // before the first micro-batch; none in a recomputation.
  TensorView step_counts{};
  // In training, if layers of the model share numbers (Layer::num_shared_stats): [Model::num_shared_stats] fp32, of
  // this micro-batch. They travel with the stream: in the forward pass they are zeros before the first layer and then
  // those that the layers before have left, in the backward pass those that the last layer has left.
  TensorView shared_stats{};
  HostLink* host = nullptr;  // null in a dry run, in which there are no values

  // The same pass over other sequences (PlannedPass::over) of at most Groups::most_rows rows. Views with an entry for
  // each token are the caller's to replace.
  PassContext over(i64 b, i64 t) const {
    PassContext ctx = *this;
    ctx.B = b;
    ctx.T = t;
    ctx.groups = groups.over(b * t);
    return ctx;
  }
  bool rowwise() const noexcept { return alone; }
  // True if gradients are added to rows, which are fp32.
  bool adds_gradients() const noexcept { return term == GradTerm::Later; }
  // True where calls are counted, and values not known: layers then take the rows that they expect. In other dry runs
  // they take all for which there is memory.
  bool predicts = false;
};

// Matrices of which only some rows are in memory at a time.
class DS_API Tiles {
 public:
  virtual ~Tiles() = default;
  // Calls use(first, rows) for each block of rows [first, first + n) of matrix `row`, in order; the rows are valid
  // until `use` returns.
  virtual void for_each(size_t row, FunctionRef<void(i64 first, TensorView rows)> use) = 0;
};

// A matrix that products read or write: whole, or, if it has no data, in tiles.
struct Matrix {
  Matrix(TensorView all, Tiles* in_tiles = nullptr, size_t number = 0) : whole(all), tiles(in_tiles), row(number) {}
  bool is_whole() const noexcept { return whole.data != nullptr || tiles == nullptr; }

  TensorView whole;
  Tiles* tiles;
  size_t row;
};

// Parameters (or gradients) of one layer, in the order of its rows; `shared`: the row of Model::shared, if this layer
// uses it. `tiles` provides the rows without data in `own`. A gradient that has neither data nor tiles is not wanted.
struct RowViews {
  std::span<const TensorView> own;
  TensorView shared{};
  Tiles* tiles = nullptr;

  Matrix matrix(size_t row) const noexcept { return {own[row], tiles, row}; }
};

// Inputs of Layer::draw. With documents: for each token the beginning and end of its document, and its position in it.
struct DrawKey {
  RngKey rng{};
  i64 B = 0, T = 0;
  std::span<const i32> documents{}, positions{};  // [2, B, T], [B, T]; or none
};

// The passes of a layer that need its matrices.
enum class Products : u8 { Forward, Recompute, RecomputeAttention, BackwardInput, BackwardWeight };

class Linear;
struct LowRank;

// A product in FP8: of a linear map, or of joined ones. The sizes of this rank's part.
struct Fp8Map {
  i64 in = 0, out = 0;
  // Memory for the operands of any of its products over R rows.
  i64 bytes(i64 R) const noexcept;
};

class DS_API Layer {
 public:
  virtual ~Layer() = default;
  Layer(const Layer&) = delete;  // groups of its linear maps refer to its rows
  Layer& operator=(const Layer&) = delete;

  const std::string& name() const noexcept { return name_; }
  const std::vector<ParamRow>& rows() const noexcept { return rows_; }
  // From then on the row is not trained.
  virtual void freeze(size_t row) { rows_[row].trained = false; }
  // Freezes the row, and has it stored in this form; with codes for Storage::Codes.
  virtual void store(size_t row, Storage form, const CodedForm& codes = {}) {
    freeze(row);
    rows_[row].storage = form;
    rows_[row].codes = codes;
  }
  // Name of the kind of layer, such as "Gpt2Block", for partitions by type.
  virtual std::string_view type() const noexcept = 0;
  // True for the equal layers in the middle, which can be recomputed.
  virtual bool is_block() const noexcept { return false; }
  // The rows that are matrices of its products, in the order in which the products read them tile by tile.
  virtual std::vector<size_t> products(Products) const { return {}; }
  // True if its weight gradients can be computed in a later call. The head's come with its loss.
  virtual bool splits() const noexcept { return true; }

  // Attaches a low-rank branch (ds/linear.h) to each linear map of the layer for which `choose` returns one. Its
  // rows come after all others. Call this at most once, before the layer is used. Returns the number of branches.
  virtual size_t attach(FunctionRef<LowRank(const Linear&)> choose);
  // From then on the products of its linear maps are in FP8 (ds/linear.h); those of branches are not. Call this before
  // another layer contains it. Appends their sizes to `maps`, and what does not fit to `problems`.
  void multiply_in_fp8(DType gradients, std::vector<Fp8Map>& maps, std::vector<std::string>& problems);
  // The arrays that it caches for generation; their KvCache is in PassContext::caches.
  virtual CacheShape cache() const { return {}; }

  // The number of tokens, of T in a sample, that it processes in training; the others bypass it.
  virtual i64 tokens(i64 T) const noexcept { return T; }
  // The most rows that its products read in a pass over R rows of the stream: more than R if it has room for tokens of
  // other ranks. The memory that layers share in a pass is for the largest number of all layers.
  virtual i64 product_rows(i64 R) const noexcept { return R; }
  // True if it adds a loss of its own to the one that training minimises, such as one that balances experts. In
  // training its forward pass writes ctx.aux_loss for the micro-batch: ranks of sp write the terms of their tokens,
  // which are added up, and ranks of tp must write equal values. Its backward passes add the gradient times
  // ctx.aux_grad. The mean over all micro-batches is part of what is minimised, whatever weights the tokens have in the
  // loss of the head. It is reported beside that loss (StepRecord::aux_loss). Evaluations leave it out, so their losses
  // compare with those of models without it; ctx.aux_loss is then empty.
  virtual bool adds_loss() const noexcept { return false; }
  // The number of values that its forward pass in training counts, in ctx.counts, for the micro-batch, or 0: the tokens
  // of each expert, then RouterStats::kReport numbers of its router. Ranks of tp and sp write equal values, those of
  // all tokens. The sums over a step are reported (StepRecord::experts).
  virtual i64 num_counts() const noexcept { return 0; }
  // The number of values that its forward pass in training adds up over the micro-batches of a step, in
  // ctx.step_counts; 0: none.
  virtual i64 num_step_counts() const noexcept { return 0; }
  // The fp32 numbers that its forward pass in training shares with those of later layers, in ctx.shared_stats, and its
  // backward pass reads; 0: none.
  virtual i64 num_shared_stats() const noexcept { return 0; }
  // True for a block that reads PassContext::ids or targets in training, which only embedding and head have otherwise.
  virtual bool reads_tokens() const noexcept { return false; }
  // True if its backward passes obey PassContext::term, as the functions of ds/building_blocks.h and ds/linear.h do. If
  // all layers of a model do, products of gradients can add to the sums of micro-batches themselves
  // (gradient_accumulation_fusion).
  virtual bool adds_gradients() const noexcept { return false; }
  // Into how many parts the gradients of rows in groups other than dp can be divided, one for each rank whose tokens
  // they come from. If every micro-batch is reduced for itself, backward_weight is called for each part, in order; the
  // first call also makes all other gradients. Sums then have the order that they have where all ranks have these rows.
  virtual i64 gradient_parts() const noexcept { return 1; }
  // Fills acts.drawn for a micro-batch with the sizes for which the activations were planned.
  virtual void draw(const DrawKey&, std::span<i32>) const {}

  // Declares the activations of a pass, without output and input_grad. A layer may be planned for several passes.
  virtual LayerActs plan(ActivationPlanner& planner, const PlannedPass& pass) const = 0;
  // acts.output = layer(x). The first layer does not use x (it reads ids). The head has no output: it computes losses
  // when evaluating, logits when generating, and when training only values that its loss needs more than once.
  virtual void forward(const PassContext&, RowViews params, TensorView x, const LayerActs& acts) const = 0;
  // acts.input_grad = the gradient of x, given that of the output, dy (no aliasing). The head computes the losses here.
  virtual void backward_input(const PassContext&, RowViews params, TensorView x, TensorView dy,
                              const LayerActs& acts) const = 0;
  // Overwrites every gradient row that is wanted, rounded once to the row's dtype, or adds to it (ctx.term). Call after
  // backward_input, with the same views.
  virtual void backward_weight(const PassContext&, RowViews grads, TensorView x, TensorView dy,
                               const LayerActs& acts) const = 0;
  // Recomputes the activations that a layer with `keep` less than All does not have; call before backward_input.
  virtual void recompute(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& acts, Keep keep) const;
  // Last layer only, for tests: out [R,V] fp32 = the logits of the micro-batch that forward() processed last.
  virtual void logits(const PassContext&, RowViews params, const LayerActs& acts, TensorView out) const;

 protected:
  explicit Layer(std::string name) : name_(std::move(name)) {}
  // The linear maps of the layer.
  virtual std::vector<Linear*> linears() { return {}; }
  size_t add(ParamRow row) {
    rows_.push_back(std::move(row));
    return rows_.size() - 1;
  }
  // Call this when all rows have been declared.
  void allow_tiles() {
    for (const size_t row : products(Products::Forward)) rows_[row].tiles = true;
  }
  std::string name_;
  std::vector<ParamRow> rows_;
};

// A second name that files may use for a parameter.
struct Tie {
  std::string alias, name;
};

// A model: layers in order; layer 0 embeds, the last one is the head (norm, projection, loss). Parameters are numbered
// in order: shared, then layer by layer.
struct DS_API Model {
  std::vector<std::unique_ptr<Layer>> layers;
  // Tied embeddings: the matrix that layer 0 looks up and the head projects with; or none.
  std::vector<ParamRow> shared;
  std::vector<Tie> ties;  // checkpoints state them; weight files may repeat their values
  // Beginnings of the names of parameters that weight files have for other tasks; they are left out, with a warning.
  std::vector<std::string> other_tasks{};
  Shard shard;
  std::vector<DpSplit> splits;  // groups other than dp that reduce some of its rows
  i64 vocab = 0, hidden = 0;
  // Each position predicts the next token; else the model sees the whole sequence and fills in masks.
  bool causal = true;
  i64 token_types = 0;                             // 0: the model has none
  i64 num_heads = 0, head_dim = 0, value_dim = 0;  // of queries and keys, of values
  std::vector<Rotation> rotations{};               // those that its layers use
  std::shared_ptr<const AttentionLayout> layout;   // for the attention of all layers; null: all blocks
  std::vector<Fp8Map> fp8{};                       // the products in FP8 of all layers; none: there are none

  bool tied() const noexcept { return !shared.empty(); }
  bool uses_shared(i64 layer) const noexcept { return tied() && (layer == 0 || layer + 1 == std::ssize(layers)); }
  // Whether the layer has weight gradients: of rows of its own, or of `shared`.
  bool trains(i64 layer) const noexcept;
  // The layer at which a backward pass ends: no layer before it is trained. At the latest the head, whose backward pass
  // computes the loss.
  i64 backward_end() const noexcept;
  // Whether the matrix of the output projection is trained: `shared`, or a matrix of the head.
  bool trains_projection() const noexcept;
  // The row of the head that is the output projection, its last matrix; -1: it is `shared`.
  i64 projection_row() const noexcept;
  // Whether all layers can add to sums of gradients (Layer::adds_gradients).
  bool adds_gradients() const noexcept;
  i64 vocab_share() const noexcept;  // rows of the output projection on this rank
  i64 largest_vocab_share() const noexcept;
  i64 product_rows(i64 R) const noexcept;       // the largest of its layers
  i64 fp8_bytes(i64 R) const noexcept;          // of PassContext::fp8, for products of up to R rows
  i64 gradient_parts() const noexcept;          // the most of its layers
  i64 num_counts() const noexcept;              // the sum over layers
  i64 counts_before(i64 layer) const noexcept;  // the sum over the layers before this one
  i64 num_step_counts() const noexcept;         // the sum over layers
  i64 step_counts_before(i64 layer) const noexcept;
  i64 num_shared_stats() const noexcept;            // the most of its layers
  i64 num_aux_losses() const noexcept;              // layers that add a loss
  i64 aux_losses_before(i64 layer) const noexcept;  // of these, the layers before this one
  // All parameters, by number.
  std::vector<const ParamRow*> params() const {
    std::vector<const ParamRow*> rows;
    for (const ParamRow& row : shared) rows.push_back(&row);
    for (const auto& layer : layers) {
      for (const ParamRow& row : layer->rows()) rows.push_back(&row);
    }
    return rows;
  }
  i64 num_params() const noexcept;         // elements of the whole model
  i64 num_active_params() const noexcept;  // those that a token uses
  // Parameters used in matrix products (including the head's projection, but not embedding look-ups).
  i64 num_matmul_params() const noexcept;
  // Forward + backward: 6 N_matmul + 6 L H (D + Dv) T, with full attention (PaLM's convention); with a layout, the
  // share of its blocks. Matrices that are not trained, and layers without a backward pass, count with the products
  // that they have.
  double flops_per_token(i64 T) const noexcept;
};

}  // namespace ds::model
