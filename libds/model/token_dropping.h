// SPDX-License-Identifier: Apache-2.0
#pragma once
// A block that processes a random subset of each sample's tokens; the others bypass it. Yao, Wu, Li, Holmes, Zhang, Li,
// He: "Random-LTD: Random and Layerwise Token Dropping Brings Efficient Training for Large-scale Transformers" (2022).

#include "ds/layer.h"

namespace ds::model {

struct TokenDropping {
  i64 number = 0;          // index of the layer: each layer draws its own subset
  i64 hidden = 0;          // columns of its stream
  i64 kept = 0;            // tokens kept per sample in training; all of a shorter sample
  i64 most = 0;            // the largest `kept` of any step, for which memory is declared
  bool documents = false;  // samples contain several documents, which attention separates
};

// In evaluations, and for samples with at most `kept` tokens, it equals `block`, which must not cut its stream or its
// tokens over ranks, and must have no layout and no window. Kept tokens stay in order and keep their positions. The
// choice depends only on the micro-batch, the sample and the layer.
std::unique_ptr<Layer> drop_tokens(std::unique_ptr<Layer> block, const TokenDropping& dropping);

}  // namespace ds::model
