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
  std::string removed;  // as in ModelNames

  // The lines of `unfit`, and with them those of `extra`, and names of the file where parameters are missing.
  std::string misfits(bool with_extra) const;
  std::vector<std::string> examples;  // two names of the file, of tensors that no parameter has taken if there are such
};

// Names of tensors without what wrappers of a module put into all of them: torch.compile (_orig_mod), FSDP
// (_fsdp_wrapped_module, _checkpoint_wrapped_module), Lightning (_forward_module) and multimodal models
// (language_model) anywhere in a name; and in front of all names whatever they share, if the model's parameters are
// found behind it.
struct ModelNames {
  std::vector<std::string> names;  // of each tensor
  std::string removed;             // in quotes, for messages; empty: every name is as it was
};
// The line that says so of a file.
std::string removed_text(const std::string& path, const std::string& removed);
ModelNames names_of_model(const model::Model& model, const std::vector<std::string_view>& names);

// Names match without what wrappers have put into them (names_of_model), and with or without their first part,
// "transformer.", "model." or "bert.", which files of the bare model lack; LayerNorm's parameters may be "gamma" and
// "beta"; known non-parameters (GPT-2's attention masks, Llama's old inv_freq, BERT's position_ids) are passed over.
// Reads no elements. The result points into `model` and `source`. Throws Errc::Unavailable where the file holds an
// adapter of PEFT, which would have to be added to the weights.
WeightMatch match_weights(const model::Model& model, const TensorSource& source, bool new_head = false);

}  // namespace ds
