// SPDX-License-Identifier: Apache-2.0
#include "model/models.h"

namespace ds::model {

Model make_model(const ModelConfig& config, i64 seq_length) {
  DS_CHECK(seq_length <= config.max_positions || config.any_length(), Errc::Config,
           "data.seq_length {} exceeds the model's {} positions", seq_length, config.max_positions);
  Model m = config.family == Family::Gpt2 ? make_gpt2(config) : make_llama(config);
  m.vocab = config.vocab_size;
  m.hidden = config.hidden;
  m.max_positions = config.max_positions;
  m.num_heads = config.heads;
  m.num_kv_heads = config.kv_heads;
  m.head_dim = config.head_dim;
  return m;
}

}  // namespace ds::model
