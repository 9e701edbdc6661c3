// SPDX-License-Identifier: Apache-2.0
// Texts behind prompts: between text and tokens, around infer/writer.

#include <algorithm>
#include <filesystem>
#include <map>

#include "base/gguf.h"
#include "data/text_stream.h"
#include "data/tokenizer.h"
#include "ds/log.h"
#include "ds/tokenize.h"
#include "infer/prompts.h"
#include "infer/writer.h"
#include "run/run_state.h"

namespace ds {

namespace {

// The directory of the published model; empty: none. A GGUF file has its end tokens inside.
std::string model_folder(const Config& config) {
  const std::string& path = config.published.path;
  if (path.empty() || is_gguf(path)) return "";
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) return path;
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

}  // namespace

EncodedPrompts encode_prompts(const Config& config, std::span<const Prompt> prompts, const SamplingOptions& o) {
  return {infer::tokens_of(config.model, *open_tokenizer(config.data.tokenizer), prompts, o.max_tokens,
                           config.sparse_attention.mode == SparseAttentionMode::None ? 0 : config.data.seq_length),
          o};
}

void TrainingRun::generate(const EncodedPrompts& prompts, const GenerateHooks& hooks) {
  State& s = *state_;
  const SamplingOptions& o = prompts.sampling;
  s.collective([&] {
    const Config& config = s.request.config;
    const auto tokenizer = open_tokenizer(config.data.tokenizer);
    const std::vector<i32> ends = end_tokens(*tokenizer, model_folder(config), config.model.vocab_size);
    if (s.request.is_root()) {
      for (const auto* warnings : {&tokenizer->facts().warnings, &tokenizer->facts().when_writing})
        for (const std::string& text : *warnings) log_message(LogLevel::Warning, text);
    }
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
                   if (std::ranges::find(ends, id) == ends.end()) {
                     hooks.token(p, id, text.stream.push(id));
                     if (--text.left > 0) return true;
                   }
                   hooks.ended(p, text.stream.end());
                   under_way.erase(found);
                   return false;
                 });
  });
}

TokenizedText tokenize_text(const Config& config, std::string_view text) {
  const auto tokenizer = open_tokenizer(config.data.tokenizer);
  TokenizedText result{.tokenizer = config.data.tokenizer, .identity = tokenizer->identity()};
  std::vector<i32> ids;
  tokenizer->encode(text, ids);
  for (const i32 id : ids) result.tokens.push_back({id, tokenizer->piece(id)});
  for (const NamedToken& token : tokenizer->facts().named)
    result.named.push_back({token.role, token.content, token.id, token.source});
  try {
    result.ends = end_tokens(*tokenizer, model_folder(config), config.model.vocab_size);
  } catch (const Error& e) {
    result.bad_ends = e;
  }
  result.adds_bos = tokenizer->adds_bos();
  result.adds_eos = tokenizer->facts().adds_eos;
  result.warnings = tokenizer->facts().warnings;
  for (std::string& warning : tokenizer->warnings_of_texts()) result.warnings.push_back(std::move(warning));
  return result;
}

}  // namespace ds
