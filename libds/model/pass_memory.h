// SPDX-License-Identifier: Apache-2.0
#pragma once
// What layers see in a pass beside parameters and activations: one list of views, by which their memory is predicted,
// taken and handed out. And the only place that makes a PassContext.

#include "device/memory.h"
#include "model/layer.h"

namespace ds::model {

// The passes for which there is memory. R = B*T.
struct PassSizes {
  i64 B = 0, T = 0;         // of a rank
  i64 sequence_length = 0;  // of all its ranks: T * sp
  i64 micro_batches = 1;    // whose tokens are there at once
  i64 rope_rows = 0;        // positions of the tables of rotations; 0: none
  i64 rope_elems = 0;       // of each table
  bool losses = true;       // else next tokens are asked for
  bool projects = false;    // the output projection is here
  bool gradients = false;   // and its gradient is wanted
  i64 logits_rows = 0;      // that are there at once
  i64 tile_cols = 0;        // columns of the widest matrix in tiles
  bool documents = false;   // sequences are of several, which attention keeps apart
  DType work = DType::F32;
};

struct PassMemory {
  PassSizes sizes;
  // Tag::Data: [micro-batches * R], [T], [R], [R], [R]; [rows, D/2] each. With documents row_positions are of all
  // micro-batches, and documents [micro-batches, 2, B, sequence length] as AttentionParams has them. The bits of a
  // layout, and the same transposed, in words of 32.
  TensorView ids{}, targets{}, positions{}, row_positions{}, token_types{}, losses{}, rope_cos{}, rope_sin{},
      layout_keys{}, layout_queries{}, documents{};
  // Tag::Logits: [rows, V of this rank, or of all ranks where next tokens are asked for].
  TensorView logits{};
  // Tag::Workspace: [V, C] fp32; [R, tile_cols] fp32; Groups::partial, gathered, sum, stats.
  TensorView head_weight_grad{}, tile_sum{}, partial{}, gathered{}, sum{}, stats{};

  // The views, without memory behind them; what a pass does not need has rank 0.
  PassMemory() = default;
  PassMemory(const Model& model, const PassSizes& sizes);

  // Calls visit(tag, view) for each, always in the same order. The layouts come first: make_context() demands that
  // their words are aligned.
  template <class F>
  void for_each(F&& visit) {
    for (TensorView* v : {&layout_keys, &layout_queries, &ids, &targets, &positions, &row_positions, &token_types,
                          &losses, &rope_cos, &rope_sin, &documents})
      visit(Tag::Data, *v);
    visit(Tag::Logits, logits);
    for (TensorView* v : {&head_weight_grad, &tile_sum, &partial, &gathered, &sum, &stats}) visit(Tag::Workspace, *v);
  }
  i64 bytes(Tag tag) const;
};

// A pass within this memory: B sequences of T tokens here; of a micro-batch that is one of sizes.micro_batches.
struct Pass {
  Mode mode = Mode::Train;
  i64 B = 0, T = 0, micro = 0;
};
// Fills the memory of a layout.
void upload_layout(const PassMemory& memory, const Model& model, Device& device);

PassContext make_context(const PassMemory& memory, const Pass& pass, const Model& model, const OpTable& ops,
                         Stream& stream, Communicator* tp, Communicator* sp);

}  // namespace ds::model
