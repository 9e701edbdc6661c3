// SPDX-License-Identifier: Apache-2.0
#include "pipeline/layer_calls.h"

#include <gtest/gtest.h>

#include "model/models.h"

namespace ds::pipeline {
namespace layer_calls_test {

using Kind = LayerCall::Kind;
using model::Keep;

// An embedding, five blocks and a head: layers 0 to 6.
model::Model seven_layers() {
  ModelConfig c;
  c.vocab_size = 8;
  c.hidden = c.head_dim = 2;
  c.heads = c.kv_heads = 1;
  c.layers = 5;
  c.intermediate = c.max_positions = 4;
  return model::make_model(c, 4);
}

// F3 forward, b3 input gradient, B3 after computing again, W3 weight gradient.
std::string text(const std::vector<LayerCall>& calls) {
  std::string s;
  for (const LayerCall& c : calls) {
    s += s.empty() ? "" : " ";
    s += c.kind == Kind::Forward ? 'F' : c.kind == Kind::BackwardWeight ? 'W' : c.again ? 'B' : 'b';
    s += std::to_string(c.layer);
  }
  return s;
}

TEST(LayerCalls, OfALayerThatKeepsAll) {
  const model::Model m = seven_layers();
  const Chunk all = make_chunk(m, 0, 7, {});
  EXPECT_EQ(text(forward_calls(all)), "F0 F1 F2 F3 F4 F5 F6");
  EXPECT_EQ(text(backward_calls(m, all, false)), "b6 W6 b5 W5 b4 W4 b3 W3 b2 W2 b1 W1 b0 W0");
  EXPECT_EQ(text(weight_calls(m, all)), "W5 W4 W3 W2 W1 W0");
  EXPECT_EQ(text(backward_calls(m, all, true)), "b6 W6 b5 b4 b3 b2 b1 b0");  // the head's come with its loss
}

TEST(LayerCalls, GroupsAreComputedAgainFromTheirFirstInput) {
  const model::Model m = seven_layers();
  const auto backward = [&](i64 begin, i64 end, i64 interval, bool split) {
    return text(backward_calls(m, make_chunk(m, begin, end, {Keep::Input, interval}), split));
  };
  EXPECT_EQ(backward(0, 7, 1, false), "b6 W6 B5 W5 B4 W4 B3 W3 B2 W2 B1 W1 b0 W0");
  EXPECT_EQ(backward(0, 7, 2, false), "b6 W6 B5 W5 F3 B4 W4 b3 W3 F1 B2 W2 b1 W1 b0 W0");
  EXPECT_EQ(backward(0, 7, 9, false), "b6 W6 F1 F2 F3 F4 B5 W5 b4 W4 b3 W3 b2 W2 b1 W1 b0 W0");
  EXPECT_EQ(backward(2, 6, 3, false), "B5 W5 F2 F3 B4 W4 b3 W3 b2 W2");  // groups begin with the chunk
  EXPECT_EQ(backward(2, 6, 3, true), "B5 F2 F3 B4 b3 b2");
}

TEST(LayerCalls, TheAttentionAloneIsTheLayersOwnBusiness) {
  const model::Model m = seven_layers();
  const Chunk chunk = make_chunk(m, 0, 7, {Keep::AllButAttention, 1});
  EXPECT_EQ(text(backward_calls(m, chunk, false)), "b6 W6 B5 W5 B4 W4 B3 W3 B2 W2 B1 W1 b0 W0");
  EXPECT_EQ(chunk.keep_of(0), Keep::All);
  EXPECT_EQ(chunk.keep_of(1), Keep::AllButAttention);
}

// Rows of layers [begin, end).
void freeze(model::Model& m, i64 begin, i64 end) {
  for (i64 l = begin; l < end; ++l) {
    for (size_t r = 0; r < m.layers[l]->rows().size(); ++r) m.layers[l]->freeze(r);
  }
}

TEST(LayerCalls, EndWhereNoLayerBeforeIsTrained) {
  model::Model m = seven_layers();
  freeze(m, 0, 4);
  EXPECT_EQ(m.backward_end(), 0);  // the embedding looks up the matrix that the head projects with
  EXPECT_EQ(text(backward_calls(m, make_chunk(m, 0, 7, {}), false)), "b6 W6 b5 W5 b4 W4 b3 b2 b1 b0 W0");
  m.shared.front().trained = false;
  EXPECT_EQ(m.backward_end(), 4);
  const Chunk all = make_chunk(m, 0, 7, {});
  EXPECT_EQ(text(forward_calls(all)), "F0 F1 F2 F3 F4 F5 F6");
  EXPECT_EQ(text(backward_calls(m, all, false)), "b6 W6 b5 W5 b4 W4");
  EXPECT_EQ(all.keep_of(3), Keep::Nothing);
  EXPECT_EQ(all.keep_of(4), Keep::All);
  // Groups begin there.
  EXPECT_EQ(text(backward_calls(m, make_chunk(m, 0, 7, {Keep::Input, 2}), false)), "b6 W6 F4 B5 W5 b4 W4");
  // A stage before it only runs forward.
  const Chunk below = make_chunk(m, 0, 4, {Keep::Input, 2});
  EXPECT_FALSE(below.has_backward());
  EXPECT_EQ(text(forward_calls(below)), "F0 F1 F2 F3");
  EXPECT_EQ(text(backward_calls(m, below, false)), "");
  EXPECT_EQ(text(weight_calls(m, below)), "");
  // A layer without a trained row passes the gradient on.
  freeze(m, 5, 6);
  EXPECT_EQ(text(backward_calls(m, make_chunk(m, 0, 7, {}), false)), "b6 W6 b5 b4 W4");
  EXPECT_EQ(text(weight_calls(m, make_chunk(m, 0, 7, {}))), "W4");
  // The head computes the loss in any case.
  freeze(m, 0, 7);
  EXPECT_EQ(text(backward_calls(m, make_chunk(m, 0, 7, {}), false)), "b6");
}

}  // namespace layer_calls_test
}  // namespace ds::pipeline
