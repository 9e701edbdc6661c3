// SPDX-License-Identifier: Apache-2.0
#pragma once
// Experts in files. A model has the matrices of all experts of a block as batches, "mlp.experts.gate_up_proj" [E, 2F,
// C] and "mlp.experts.down_proj" [E, C, F], or for experts with biases "mlp.experts.c_fc.weight" [E, C, F] and so on.
// Published files have the tensors of each expert (ExpertNames), which follow one another in the batches: gate, up,
// gate, up, ... So either form is read as parts of the other, by ranges.

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "config/family.h"
#include "ds/layer.h"
#include "formats/tensor_io.h"

namespace ds {

// A tensor that consists of equally long parts of other ones.
struct Rearranged {
  struct Part {
    size_t tensor;  // its number
    i64 first;      // its first element that belongs to the part
  };
  std::string name;
  std::vector<i64> shape;
  std::vector<Part> parts;

  // Calls read(tensor, first, n, done) for the ranges that make up elements [first, first + count); `done` of them have
  // been before.
  template <class Read>
  void for_each_range(i64 first, i64 count, Read&& read) const {
    const i64 of_part = model::ParamRow::product(shape) / std::ssize(parts);
    for (i64 done = 0; done < count;) {
      const i64 at = first + done, in_part = at % of_part, n = std::min(count - done, of_part - in_part);
      const Part& part = parts[static_cast<size_t>(at / of_part)];
      read(part.tensor, part.first + in_part, n, done);
      done += n;
    }
  }
};

// The tensors of a file, in their order, with the matrices of single experts joined to batches if `model` has such, and
// routers under its name for them; batches and all other tensors stay as they are. Throws Errc::Mismatch, naming each
// expert's matrix that is missing or has another shape or type; Errc::Unavailable if one is in `foreign`.
std::vector<Rearranged> join_experts(const model::Model& model, std::span<const TensorInfo> tensors,
                                     std::span<const ForeignTensor> foreign, const std::string& path);
// The same for a source.
std::unique_ptr<TensorSource> join_experts(const model::Model& model, std::unique_ptr<TensorSource> source);

// The reverse: batches as matrices of single experts, and routers, under published names; matrices that are single ones
// already get these names, too.
std::vector<Rearranged> part_experts(const ExpertNames& names, std::span<const TensorInfo> tensors);

}  // namespace ds
