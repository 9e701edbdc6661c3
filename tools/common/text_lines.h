// SPDX-License-Identifier: Apache-2.0
#pragma once
// Lines of JSON that ask for texts, as requests, and their results as lines of JSON. ds-infer(1) describes both.

#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ds/infer.h"

namespace ds::tools {

using LineJson = nlohmann::ordered_json;

// A request for one text, or for several of one prompt.
struct TextLine {
  i64 number = 0;
  LineJson object = LineJson::object();  // the line's members, if they can be read
  bool is_batch = false;                 // OpenAI's batch format: custom_id and body
  bool is_chat = false;                  // messages instead of a prompt
  bool scores_prompt = false;            // prompt_logprobs are asked for
  std::vector<TextRequest> requests{};
  std::string error{};  // why the line cannot be honoured; then there are no requests
};

// A format of lines of input and output.
class LineFormat {
 public:
  virtual ~LineFormat() = default;
  // Never throws for what is in a line: mistakes are TextLine::error.
  virtual TextLine parse(std::string_view text, i64 number) const = 0;
  // The members of the answer: the results of its requests, in their order, or its error.
  virtual LineJson result(const TextLine& line, const std::vector<TextResult>& results) const = 0;
  // The members of the line that stand before them, as the line has them; `text` is what was parsed.
  virtual std::string members(const TextLine& line, std::string_view text) const = 0;
};

// A token as text; also as bytes if asked for, or where it is not UTF-8 by itself.
LineJson token_json(const TextCodec& codec, i32 id, bool has_bytes);

// For readers of lines: the line cannot be honoured.
[[noreturn]] void refuse_line(const std::string& why);
// The members of an object, but for some, unchanged: "1.50" stays "1.50". `text` is that of an object.
std::string members_of(std::string_view text, std::span<const std::string_view> without);
// A line whose object `read` turns into requests, or refuses.
TextLine parse_text_line(std::string_view text, i64 number, const std::function<void(TextLine&)>& read);

// Texts to continue.
class TextLines final : public LineFormat {
 public:
  // `defaults`: of members that a line does not have. `cuts`: a prompt that is too long loses its beginning, instead of
  // being an error. `codec` outlives it.
  TextLines(const TextCodec& codec, TextRequest defaults, i64 context, bool cuts)
      : codec_(codec), defaults_(std::move(defaults)), context_(context), cuts_(cuts) {}

  TextLine parse(std::string_view text, i64 number) const override;
  LineJson result(const TextLine& line, const std::vector<TextResult>& results) const override;
  std::string members(const TextLine& line, std::string_view text) const override;

 private:
  void read(TextLine& line, const LineJson& body) const;
  LineJson choice(const TextLine& line, size_t number, const TextResult& result) const;
  LineJson logprobs(const std::vector<TokenScore>& scores, bool bytes) const;
  LineJson completion_logprobs(const std::vector<TokenScore>& scores) const;

  const TextCodec& codec_;
  TextRequest defaults_;
  i64 context_;
  bool cuts_;
};

}  // namespace ds::tools
