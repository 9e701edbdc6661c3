// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "config/families/keys.h"

namespace ds {
namespace family {
namespace {

// clang-format off
constexpr Key kBertKeys[] = {
    effect("vocab_size", slot_of<&H::m, &M::vocab_size>, kSize),
    effect("hidden_size", slot_of<&H::m, &M::hidden>, kSize),
    effect("num_hidden_layers", slot_of<&H::m, &M::layers>, {1, 1e5}),
    effect("num_attention_heads", slot_of<&H::m, &M::heads>, kSize),
    effect("intermediate_size", slot_of<&H::m, &M::intermediate>, kSize),
    effect("hidden_act", activation_slot<kPlainActivations>),
    effect("hidden_dropout_prob", slot_of<&H::m, &M::resid_dropout>, kDropout, kNull),
    effect("attention_probs_dropout_prob", slot_of<&H::m, &M::attn_dropout>, kDropout, kNull),
    effect("max_position_embeddings", slot_of<&H::m, &M::max_positions>, kSize),
    effect("type_vocab_size", slot_of<&H::m, &M::token_types>, kSize),
    effect("initializer_range", slot_of<&H::m, &M::initializer_range>),
    effect("layer_norm_eps", slot_of<&H::m, &M::norm_eps>, kAboveZero),
    effect("pad_token_id", slot_of<&H::m, &M::pad_token_id>, {0, 1 << 24}, kNull),
    fixed("position_embedding_type", R"(["absolute"])"),
    fixed("tie_word_embeddings", "[true]"),
    fixed("is_decoder", "[false]"),
    fixed("add_cross_attention", "[false]"),
    fixed("is_causal", "[false]"), fixed("use_bidirectional_attention", "[true]"),
    // Keys of heads that are not built: Hugging Face's classifiers, and the pooler of Google's own files.
    silent("classifier_dropout"), silent("directionality"), silent("pooler_fc_size"), silent("pooler_num_attention_heads"),
    silent("pooler_num_fc_layers"), silent("pooler_size_per_head"), silent("pooler_type"),
};
// clang-format on

constexpr std::string_view kBertRequired[] = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                                              "intermediate_size"};
constexpr KeyValue kBertConstant[] = {{"position_embedding_type", R"("absolute")"}};
constexpr std::string_view kBertBuffers[] = {"embeddings.position_ids"};
constexpr std::string_view kBertLengths[] = {"max_position_embeddings"};

void set_bert_defaults(HfConfig& h, ModelSource source) {
  ModelConfig& m = h.m;
  m.vocab_size = 30522;
  m.hidden = 768;
  m.layers = m.heads = 12;
  m.intermediate = 3072;
  m.max_positions = 512;
  m.token_types = 2;
  m.norm_eps = 1e-12f;
  m.activation = Activation::GeluErf;
  m.resid_dropout = m.attn_dropout = source == ModelSource::File ? 0.1f : 0.0f;
}

void resolve_bert(HfConfig& h, const Json& object, ModelSource, Reader& r) {
  h.m.embd_dropout = h.m.resid_dropout;
  if (is_null(object, "pad_token_id")) h.m.pad_token_id = -1;
  if (h.m.pad_token_id >= h.m.vocab_size && !r.broken("vocab_size"))
    r.error("pad_token_id", fmt::format("{} is outside the vocabulary of {}", h.m.pad_token_id, h.m.vocab_size));
}

}  // namespace
}  // namespace family

extern constinit const FamilySpec kBertFamily = {
    .family = Family::Bert,
    .name = "bert",
    .architecture = "BertForMaskedLM",
    .block = "BertBlock",
    .causal = false,
    .keys = family::kBertKeys,
    .hidden = "hidden_size",
    .layers = "num_hidden_layers",
    .heads = "num_attention_heads",
    .required = family::kBertRequired,
    .constant = family::kBertConstant,
    .set_defaults = family::set_bert_defaults,
    .resolve = family::resolve_bert,
    .prefix = "bert.",
    .buffers = family::kBertBuffers,
    .positions = {"bert.embeddings.position_embeddings.weight", family::kBertLengths, "embeddings.position_ids"},
};

}  // namespace ds
