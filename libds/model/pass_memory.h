// SPDX-License-Identifier: Apache-2.0
#pragma once
// The views that layers use in a pass besides parameters and activations. Their memory is predicted, allocated and
// handed out by this one list. Also the only place that creates a PassContext.

#include "device/device.h"
#include "ds/layer.h"

namespace ds::model {

// The sizes of the passes that need memory. R = B*T.
struct PassSizes {
  i64 B = 0, T = 0;         // of a rank
  i64 sequence_length = 0;  // over all ranks of sp: T * sp
  i64 micro_batches = 1;    // whose tokens are in memory at once
  i64 rope_rows = 0;        // positions of the tables of rotations
  bool losses = true;       // computes losses; else the next tokens
  bool projects = false;    // this rank has the output projection
  bool gradients = false;   // and computes its gradient, if it is trained
  bool fused = false;       // to which sums of micro-batches have memory elsewhere
  i64 logits_rows = 0;      // rows of logits in memory at once
  i64 context = 0;          // without losses: the most positions of a sequence
  DType logits = DType::F32;
  i64 tile_cols = 0;       // columns of the widest tiled matrix
  i64 product_rows = 0;    // rows of the largest product: at least R (Layer::product_rows)
  bool documents = false;  // sequences contain several documents, which attention separates
  DType work = DType::F32;
};

struct PassMemory {
  PassSizes sizes;
  // Tag::Data: [micro-batches * R], [T], [R], [R], [R]; [rope_rows, dim / 2] for each of Model::rotations. With
  // documents, row_positions is for all micro-batches, and documents is [micro-batches, 2, B, sequence length], in the
  // format of AttentionParams. The bits of a layout and their transpose are in 32-bit words.
  TensorView ids{}, targets{}, positions{}, row_positions{}, token_types{}, losses{}, logit_rows{}, layout_keys{},
      layout_queries{}, documents{};
  std::vector<RopeViews> rotations{};
  TensorView aux_loss{}, aux_grad{};   // Tag::Data, [1] fp32 each: PassContext
  TensorView counts{}, step_counts{};  // Tag::Data, likewise; [Model::num_step_counts] fp32
  // Tag::Logits: [rows, V of this rank, or of all ranks if next tokens are computed], fp32 or work dtype.
  TensorView logits{};
  // Tag::Workspace: [V, C] fp32; [product rows, tile_cols] fp32; Model::fp8_bytes; Groups::partial, gathered, sum,
  // stats. If next tokens are computed, logit_rows, targets and losses have an entry for each row of logits, as stats.
  TensorView head_weight_grad{}, tile_sum{}, fp8{}, partial{}, gathered{}, sum{}, stats{};

  // The views without memory; those that a pass does not need have rank 0.
  PassMemory() = default;
  PassMemory(const Model& model, const PassSizes& sizes);

  // Calls visit(tag, view) for each view, always in the same order. The layouts come first, since make_context()
  // requires aligned words.
  template <class F>
  void for_each(F&& visit) {
    for (TensorView* v : {&layout_keys, &layout_queries, &ids, &targets, &positions, &row_positions, &token_types,
                          &losses, &logit_rows})
      visit(Tag::Data, *v);
    for (RopeViews& rotation : rotations) {
      visit(Tag::Data, rotation.cos);
      visit(Tag::Data, rotation.sin);
    }
    for (TensorView* v : {&documents, &aux_loss, &aux_grad, &counts, &step_counts}) visit(Tag::Data, *v);
    visit(Tag::Logits, logits);
    for (TensorView* v : {&head_weight_grad, &tile_sum, &fp8, &partial, &gathered, &sum, &stats})
      visit(Tag::Workspace, *v);
  }
  i64 bytes(Tag tag) const;
};

// A pass that uses this memory: B sequences of T tokens, of micro-batch `micro` out of sizes.micro_batches.
struct Pass {
  Mode mode = Mode::Train;
  i64 B = 0, T = 0, micro = 0;
  i64 logit_rows = 0;  // Generate: whose logits are wanted; B is 1
};
// Writes a layout to its views.
void upload_layout(const PassMemory& memory, const Model& model, Device& device);
// Writes the tables for sequences of `length` tokens to rows [first_row, first_row + length) of their views.
void upload_rotations(const PassMemory& memory, const Model& model, i64 first_row, i64 length, Device& device);

PassContext make_context(const PassMemory& memory, const Pass& pass, const Model& model, const OpTable& ops,
                         Stream& stream, const AxisComms& comms);
// The context of a layer's forward pass in training, or of its recomputation, which counts nothing.
PassContext forward_context(PassContext ctx, const Model& model, i64 layer, bool again);

}  // namespace ds::model
