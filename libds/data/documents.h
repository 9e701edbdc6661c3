// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where documents begin. A border lies between two tokens: where the format of a file knows one (a line of JSONL, a
// document of an index, a row of a dataset), where a file or a part of the data ends, and where data.document_token
// marks one. A TokenStream finds them (data.h); samples carry them to the model as `begins`: for each token the place
// in its sample at which its document begins.

#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/temporary_file.h"
#include "ds/config.h"
#include "ds/document_survey.h"

namespace ds {

class MappedFile;

// How documents are found and used: the keys `data.*` about them.
struct DocumentRule {
  bool apart = false;   // tokens attend to their own document (data.separate_documents)
  bool packed = false;  // samples are made of whole documents (data.packing)
  i64 token = -1;       // data.document_token; negative: none
  DocumentTokenAt at = DocumentTokenAt::End;
  bool adds_token = false;  // to documents that lack it
  bool loss_across = true;

  static DocumentRule of(const DataConfig& config);
  bool matters() const noexcept { return apart || packed; }
  // Whether the token marks a border between these two neighbours.
  bool marks(i64 before, i64 after) const noexcept {
    return token >= 0 && (at == DocumentTokenAt::End ? before : after) == token;
  }
  // Whether the last token of a document, `before`, is trained to predict the first one of the next. A token that
  // begins documents is how the end of one is predicted.
  bool predicts(i64 before, i64 after) const noexcept {
    return marks(before, after) && (at == DocumentTokenAt::Begin || loss_across);
  }
  // For the identity of a run's data; empty: documents do not matter.
  std::string description() const;
  // A rule with this description: its token and at, and loss_across where that has an effect. Nothing if a description
  // has another form.
  static std::optional<DocumentRule> parse(std::string_view description);
};

// The borders that the format of a file knows: ascending positions of tokens, in a temporary file, since there may be
// as many as lines of text.
class Borders {
 public:
  static constexpr i64 kNone = std::numeric_limits<i64>::max();

  Borders();
  ~Borders();
  Borders(Borders&&) noexcept;
  Borders& operator=(Borders&&) noexcept;
  // A border after every `n` tokens.
  static Borders every(i64 n, i64 num_tokens);

  // Adds a border; not before the last one, and the same one counts once. Throws Errc::Io.
  void add(i64 position, const std::string& file);
  // Ends the borders of a file of so many tokens, which can then be read.
  void finish(i64 num_tokens, const std::string& file);

  i64 count() const noexcept { return count_; }
  i64 after(i64 position) const noexcept;  // the first border after `position`, or kNone

 private:
  void flush(const std::string& file);

  i64 every_ = 0, num_tokens_ = 0, count_ = 0, last_ = 0;
  std::vector<i64> waiting_;
  std::unique_ptr<TemporaryFile> file_;
  std::unique_ptr<const MappedFile> mapped_;
};

// The documents of a sample of which data.document_token alone knows: begins[t] for each token. A sample of masked
// tokens has the original ones in its targets.
void find_marked_documents(const DocumentRule& rule, bool causal, std::span<const i32> inputs,
                           std::span<const i32> targets, std::span<i32> begins) noexcept;

}  // namespace ds
