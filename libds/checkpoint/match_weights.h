// SPDX-License-Identifier: Apache-2.0
#pragma once
// Matches tensors of published weights with the parameters of a model.

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "ds/layer.h"
#include "formats/tensor_io.h"

namespace ds {

struct WeightMatch {
  std::vector<const TensorInfo*> tensors;  // by parameter number; null: missing
  std::vector<std::string> anew;           // with new_head: missing parameters of the last layer
  std::vector<std::string> left_out;       // names of tensors of other tasks
  // Names under which the file contains a tied parameter twice, with values that may differ.
  struct Both {
    const TensorInfo *own, *alias;
    const model::Tie* tie;
  };
  std::vector<Both> both_of_tie;
  // One line for each. unfit: missing, or of another shape; extra: not a parameter; unreadable: neither fp64, fp32,
  // bf16 nor fp16.
  std::vector<std::string> unfit, extra, unreadable;
  std::string removed;  // as in ModelNames

  // The lines of `unfit`, those of `extra`, and names of the file if parameters are missing.
  std::string misfits(bool with_extra) const;
  std::vector<std::string> examples;  // two names of the file, if possible of tensors that match no parameter
};

// Names of tensors without the parts that wrappers of a module add: torch.compile (_orig_mod), FSDP
// (_fsdp_wrapped_module, _checkpoint_wrapped_module), Lightning (_forward_module) and multimodal models
// (language_model) anywhere in a name; and a prefix common to all names, if the model's parameters are found after it.
struct ModelNames {
  std::vector<std::string> names;  // of each tensor
  std::string removed;             // in quotes, for messages; empty: no name has changed
};
// The warning about removed parts for a file.
std::string removed_text(const std::string& path, const std::string& removed);
ModelNames names_of_model(const model::Model& model, const std::vector<std::string_view>& names);

// Whether a tensor is for one of Model::other_tasks; and the warning about those that are left out.
bool is_other_task(const model::Model& model, std::string_view name);
std::string left_out_text(const model::Model& model, const std::string& path, const std::vector<std::string>& names);

// Whether a tensor is a bias of zeros of a linear layer for which the model has none: AutoGPTQ adds one to every layer,
// and it changes nothing. `read` reads its elements, and is called only if all else is so.
bool is_added_bias(const model::Model& model, std::string_view name, const std::vector<i64>& shape,
                   const std::function<void(float* out)>& read);

// Names match without the parts that wrappers have added (names_of_model), and with or without their first part,
// "transformer.", "model." or "bert.", which files of the bare model lack. LayerNorm's parameters may be "gamma" and
// "beta". Known tensors that are not parameters (GPT-2's attention masks, Llama's old inv_freq, BERT's position_ids)
// are ignored, and so is a bias of is_added_bias(), whose elements alone are read. The result points into `model` and
// `source`. Throws Errc::Unavailable if the file contains an adapter of PEFT, which would have to be merged into the
// weights.
WeightMatch match_weights(const model::Model& model, const TensorSource& source, bool new_head = false);

}  // namespace ds
