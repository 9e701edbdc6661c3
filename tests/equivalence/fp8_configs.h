// SPDX-License-Identifier: Apache-2.0
#pragma once
// Models whose linear maps can be multiplied in FP8, and configurations that ask for it.

#include <array>

#include "equivalence/layouts.h"

namespace ds::testing {

inline ModelConfig fp8_gpt2() {
  ModelConfig c = tiny_gpt2();
  c.hidden = 256;
  c.layers = 2;
  c.heads = c.kv_heads = 4;
  c.head_dim = 64;
  c.intermediate = 512;
  return c;
}
// Grouped heads, joined products, no biases.
inline ModelConfig fp8_llama() {
  ModelConfig c = tiny_llama();
  c.family = Family::Llama;
  c.hidden = 128;
  c.heads = 4;
  c.kv_heads = 2;
  c.head_dim = 128;
  c.intermediate = 256;
  c.qk_norm = false;
  return c;
}
inline std::array<ModelConfig, 2> fp8_models() { return {fp8_gpt2(), fp8_llama()}; }

inline Config fp8_config(const ModelConfig& model, const Layout& l, Fp8Gradients gradients = Fp8Gradients::E4M3,
                         i64 micro_batches = 4) {
  Config c = config_of(model, l, micro_batches);
  c.bf16.enabled = true;
  c.communication_data_type = WireType::BF16;
  c.fp8 = {.enabled = true, .gradients = gradients};
  c.optimizer.lr = 1e-3;
  return c;
}

}  // namespace ds::testing
