// SPDX-License-Identifier: Apache-2.0
// Texts behind prompts: between text and tokens, around infer/writer.

#include <fmt/format.h>

#include "data/text_stream.h"
#include "data/tokenizer.h"
#include "engine/run_state.h"
#include "infer/prompts.h"
#include "infer/writer.h"

namespace ds {

EncodedPrompts encode_prompts(const Config& config, std::span<const Prompt> prompts, const SamplingOptions& o) {
  return {infer::tokens_of(config.model, *open_tokenizer(config.data.tokenizer), prompts, o.max_tokens), o};
}

void TrainingRun::generate(const EncodedPrompts& prompts, const GenerateHooks& hooks) {
  State& s = *state_;
  const SamplingOptions& o = prompts.sampling;
  s.collective([&] {
    const auto tokenizer = open_tokenizer(s.config.data.tokenizer);
    const std::optional<i32> eos = tokenizer->special(SpecialToken::Eos);
    std::vector<TextStream> texts;
    for (const std::vector<i32>& prompt : prompts.ids) texts.emplace_back(*tokenizer, prompt);
    std::vector<i64> left(prompts.ids.size(), o.max_tokens);
    infer::write(s.engine->stage(), prompts.ids,
                 {.max_tokens = o.max_tokens,
                  .sampling = {.temperature = o.temperature, .top_k = o.top_k, .seed = o.seed},
                  .at_once = o.at_once},
                 [&](size_t p, i32 id) {
                   if (id != eos) {
                     std::string text = texts[p].push(id);
                     if (--left[p] == 0) text += texts[p].end();
                     hooks.token(p, id, text);
                   }
                   const bool goes_on = id != eos && left[p] > 0;
                   if (!goes_on && hooks.ended) hooks.ended(p);
                   return goes_on;
                 });
  });
}

}  // namespace ds
