// SPDX-License-Identifier: Apache-2.0
#pragma once
// A block that sees some tokens of each sample, drawn at random; the others pass it by. Yao, Wu, Li, Holmes, Zhang, Li,
// He: "Random-LTD: Random and Layerwise Token Dropping Brings Efficient Training for Large-scale Transformers" (2022).

#include "model/layer.h"

namespace ds::model {

struct TokenDropping {
  i64 number = 0;          // of the layer: layers draw apart
  i64 hidden = 0;          // columns of its stream
  i64 kept = 0;            // tokens of each sample in training; of shorter samples all
  i64 most = 0;            // the most that steps of other numbers keep: memory is declared for theirs, too
  bool documents = false;  // samples are of several, which attention keeps apart
};

// In evaluations, and where a sample has no more tokens than are kept, it is `block`, which neither cuts its stream nor
// its tokens over ranks, and has no layout and no window. Kept tokens stay in order and have their positions; which
// they are depends on the micro-batch, the sample and the layer alone.
std::unique_ptr<Layer> drop_tokens(std::unique_ptr<Layer> block, const TokenDropping& dropping);

}  // namespace ds::model
