// SPDX-License-Identifier: Apache-2.0
#pragma once
// Inference: texts that are continued or scored, many at a time (ds-infer(1)).

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ds/config.h"
#include "ds/error.h"
#include "ds/integers.h"
#include "ds/session_sizes.h"

namespace ds {

// A model for inference: the text of its configuration and a name of that text for messages, and the options of the run
// that reads its weights (RunOptions).
struct InferenceModel {
  std::string config, name;
  std::string resume{}, weights{};
  // Names the model by its configuration and its files' names and sizes: equal where results may be taken for those of
  // the same model.
  std::string identity{};
};
// From a model directory of Hugging Face, a run or step directory of ds-train, a GGUF file, or a file of weights beside
// a config.json. Throws Errc::Config, Errc::Corrupt, Errc::Io.
DS_API InferenceModel find_model(const std::string& path);

// Finds the matrices that the files of a model store as codes (Config::weights), unless the run trains or asks for
// another form. `weights`: InferenceModel::weights. Throws the errors of the files.
DS_API void find_codes(Config& config, const std::string& weights);

// A small model that proposes tokens, of which the model verifies several in one pass (RunOptions::draft,
// SessionSizes::draft_tokens). No result depends on it, only speed. It has the tokenizer of the model, and is whole on
// each rank. For CPUs.
struct DraftModel {
  std::string name;                 // for messages
  Config config;                    // of one rank; its device and threads are those of the run
  std::string resume{}, weights{};  // as InferenceModel has them
};

// The kernels of this CPU, such as "cpu.avx512" (ds(7), DS_ISA): others may compute other bits.
DS_API std::string kernels_of_cpu();

// 16 hexadecimal digits: XXH3-64.
DS_API std::string text_digest(std::string_view text);

struct TextRequest {
  // The prompt, at least one; with max_tokens at most SessionSizes::context. Without new tokens one more, which is only
  // scored.
  std::vector<i32> tokens;
  i64 max_tokens = 16;  // new ones; 0: the prompt is only scored
  i64 min_tokens = 0;   // no end before
  // As infer::Sampling: penalties, temperature (0: the most likely token), top_k (0: all), top_p, min_p, in this order.
  double repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  double temperature = 1;
  i64 top_k = 0;
  double top_p = 1, min_p = 0;
  u32 seed = 0;
  u32 index = 0;                    // of several texts of a prompt with one seed
  std::vector<std::string> stop{};  // the text ends before the first of these
  std::vector<i32> stop_tokens{};   // the text ends before any of these
  bool ignore_end = false;          // the end tokens of the model are tokens like others
  i64 logprobs = -1;                // most likely tokens that are reported at each place; -1: no logarithms at all
  i64 scored_from = -1;             // the first token of the prompt that is scored, at least 1; -1: none
};

// A token, and its natural logarithm of probability given all tokens before it, before temperature and penalties: bit
// for bit minus the loss that training computes. `top`: the most likely tokens at its place, in order.
struct TokenScore {
  i32 id = 0;
  float logprob = 0;
  bool most_likely = false;
  std::vector<std::pair<i32, float>> top{};
};

struct TextResult {
  enum class End : u8 { Stop, Length };
  std::string text{};         // bytes, without a stop string
  std::vector<i32> tokens{};  // new ones, without an end token; with all of a stop string
  End end = End::Length;
  std::vector<TokenScore> scores{}, prompt_scores{};  // of new tokens and of scored ones, if they are asked for
  std::string error{};                                // why the text could not be finished; empty: it was
};

struct InferHooks {
  // Rank 0: the next request; none if none has come, after a while if it `waits`.
  std::function<std::optional<TextRequest>(bool waits)> next;
  std::function<bool()> ended;  // rank 0: `next` will have no more
  // Rank 0: request number `number`, counted from 0 in the order of `next`, has ended.
  std::function<void(u64 number, TextResult)> done;
  std::function<int()> stop_signal = {};  // rank 0, optional, before each pass: not 0: stop because of this signal
};

struct InferCounts {
  i64 texts = 0, passes = 0, tokens = 0;  // tokens: that layers have processed
  i64 reused = 0;                         // tokens whose keys and values another text had computed
  i64 put_off = 0;                        // texts that were computed again, since the caches were full
  // Tokens that a draft proposed, but for those after the end of their text; and those of them that stood.
  i64 proposed = 0, accepted = 0;
  i64 new_tokens = 0;
  double seconds = 0;  // in passes and between them, without the memory that is taken first
  int stop_signal = 0;
};

// The tokens of texts for a model, and back.
class DS_API TextCodec {
 public:
  // Opens the tokenizer of a configuration. Throws the errors of its files.
  explicit TextCodec(const Config& config);
  ~TextCodec();
  std::vector<i32> encode(std::string_view text, bool adds_bos = true) const;
  // A conversation by the tokenizer's chat template, as transformers' apply_chat_template encodes it. `conversation`:
  // an object with messages, and optionally tools, documents, chat_template_kwargs, add_generation_prompt (default
  // true) and continue_final_message. Throws Errc::Unavailable without a template, and Errc::Config for what it
  // refuses.
  std::vector<i32> encode_chat(std::string_view conversation) const;
  std::string decode(const std::vector<i32>& tokens) const;
  // The bytes of a token within a text, where it may be part of a character.
  std::string token_text(i32 id) const;
  bool ends(i32 id) const;                  // an end token of the model
  std::optional<i32> begin_or_end() const;  // the token that begins texts, or else the one that ends them
  // A request without a prompt: as the generation_config.json of a published model asks for, or plain sampling.
  const TextRequest& defaults() const noexcept;
  i64 model_vocab() const noexcept;  // ids of the model
  const std::vector<std::string>& warnings() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ds
