// SPDX-License-Identifier: Apache-2.0
// Texts behind prompts: between text and tokens, around infer/writer.

#include <map>

#include "data/text_stream.h"
#include "data/tokenizer.h"
#include "infer/prompts.h"
#include "infer/writer.h"
#include "run/run_state.h"

namespace ds {

EncodedPrompts encode_prompts(const Config& config, std::span<const Prompt> prompts, const SamplingOptions& o) {
  return {infer::tokens_of(config.model, *open_tokenizer(config.data.tokenizer), prompts, o.max_tokens,
                           config.sparse_attention.mode == SparseAttentionMode::None ? 0 : config.data.seq_length),
          o};
}

void TrainingRun::generate(const EncodedPrompts& prompts, const GenerateHooks& hooks) {
  State& s = *state_;
  const SamplingOptions& o = prompts.sampling;
  s.collective([&] {
    const auto tokenizer = open_tokenizer(s.request.config.data.tokenizer);
    const std::optional<i32> eos = tokenizer->special(SpecialToken::Eos);
    struct Text {
      TextStream stream;
      i64 left;
    };
    std::map<size_t, Text> under_way;
    infer::write(s.engine().stage(), prompts.ids,
                 {.max_tokens = o.max_tokens,
                  .sampling = {.temperature = o.temperature, .top_k = o.top_k, .seed = o.seed},
                  .at_once = o.at_once},
                 [&](size_t p, i32 id) {
                   auto found = under_way.find(p);
                   if (found == under_way.end())
                     found = under_way.emplace(p, Text{TextStream(*tokenizer, prompts.ids[p]), o.max_tokens}).first;
                   Text& text = found->second;
                   if (id != eos) {
                     hooks.token(p, id, text.stream.push(id));
                     if (--text.left > 0) return true;
                   }
                   hooks.ended(p, text.stream.end());
                   under_way.erase(found);
                   return false;
                 });
  });
}

}  // namespace ds
