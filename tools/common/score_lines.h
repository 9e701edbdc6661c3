// SPDX-License-Identifier: Apache-2.0
#pragma once
// Lines of JSON whose texts are scored: continuations of a context, or a whole text in windows. ds-infer(1) describes
// both.

#include <string>
#include <string_view>
#include <vector>

#include "common/text_lines.h"

namespace ds::tools {

class ScoreLines final : public LineFormat {
 public:
  // `cuts`: a context that is too long loses its beginning, instead of being an error.
  ScoreLines(const TextCodec& codec, i64 context, bool cuts) : codec_(codec), context_(context), cuts_(cuts) {}

  TextLine parse(std::string_view text, i64 number) const override;
  LineJson result(const TextLine& line, const std::vector<TextResult>& results) const override;
  std::string members(const TextLine& line, std::string_view text) const override;

 private:
  void read(TextLine& line) const;
  TextRequest continuation(std::string context, std::string text) const;
  std::vector<TextRequest> windows(const std::string& text) const;
  i32 prefix() const;

  const TextCodec& codec_;
  i64 context_;
  bool cuts_;
};

}  // namespace ds::tools
