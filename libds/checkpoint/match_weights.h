// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which tensor of published weights is which parameter of a model.

#include <string>
#include <vector>

#include "formats/tensor_io.h"
#include "model/layer.h"

namespace ds {

struct WeightMatch {
  std::vector<const TensorInfo*> tensors;  // by parameter number; null: not there
  std::vector<std::string> anew;           // with new_head: parameters of the last layer that are not there
  std::vector<std::string> left_out;       // names of tensors of other tasks: BERT's pooler and next-sentence head
  // Names under which a tied parameter stands twice, with values that may differ.
  struct Both {
    const TensorInfo *own, *alias;
    const model::Tie* tie;
  };
  std::vector<Both> both_of_tie;
  // A line each. unfit: missing, or of another shape; extra: not a parameter; unreadable: neither fp64, fp32, bf16 nor
  // fp16.
  std::vector<std::string> unfit, extra, unreadable;
};

// Names match with or without their first part, "transformer.", "model." or "bert.", which files of the bare model
// lack; LayerNorm's parameters may be "gamma" and "beta"; known non-parameters (GPT-2's attention masks, Llama's old
// inv_freq, BERT's position_ids) are passed over. Reads no elements. The result points into `model` and `source`.
WeightMatch match_weights(const model::Model& model, const TensorSource& source, bool new_head = false);

}  // namespace ds
