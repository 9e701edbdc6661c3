// SPDX-License-Identifier: Apache-2.0
#include "data/documents.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "base/check.h"
#include "data/token_file.h"

namespace ds {
namespace {

constexpr std::string_view kBorders = "borders of files", kByToken = " and token ", kAtEnd = " at the end",
                           kAtBeginning = " at the beginning", kNoLoss = ", no loss across them";

}  // namespace

DocumentRule DocumentRule::of(const DataConfig& config) {
  return {.apart = config.separate_documents,
          .packed = config.packing != DataPacking::None,
          .token = config.document_token,
          .at = config.document_token_at,
          .adds_token = config.add_document_token,
          .loss_across = config.loss_across_documents};
}

std::string DocumentRule::description() const {
  if (!matters()) return "";
  std::string text(kBorders);
  if (token >= 0) text += fmt::format("{}{}{}", kByToken, token, at == DocumentTokenAt::End ? kAtEnd : kAtBeginning);
  if (apart && !packed && !loss_across) text += kNoLoss;
  return text;
}

std::optional<DocumentRule> DocumentRule::parse(std::string_view text) {
  const auto take = [&](std::string_view words) {
    const bool found = text.starts_with(words);
    if (found) text.remove_prefix(words.size());
    return found;
  };
  DocumentRule rule;
  if (!take(kBorders)) return std::nullopt;
  if (take(kByToken)) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rule.token);
    if (error != std::errc{} || rule.token < 0) return std::nullopt;
    text.remove_prefix(static_cast<size_t>(end - text.data()));
    if (take(kAtBeginning))
      rule.at = DocumentTokenAt::Begin;
    else if (!take(kAtEnd))
      return std::nullopt;
  }
  const bool is_without_loss = take(kNoLoss);
  rule.loss_across = !is_without_loss || rule.token < 0 || rule.at == DocumentTokenAt::Begin;
  return text.empty() ? std::optional(rule) : std::nullopt;
}

Borders::Borders() = default;
Borders::~Borders() = default;
Borders::Borders(Borders&&) noexcept = default;
Borders& Borders::operator=(Borders&&) noexcept = default;

Borders Borders::every(i64 n, i64 num_tokens) {
  Borders borders;
  borders.every_ = n;
  borders.num_tokens_ = num_tokens;
  borders.count_ = (num_tokens - 1) / n;
  return borders;
}

void Borders::add(i64 position, const std::string& file) {
  constexpr size_t kAtOnce = 8192;
  DS_ASSERT(position >= last_);
  if (position == last_) return;  // an empty document, or the beginning of the file
  last_ = position;
  if (waiting_.size() == kAtOnce) flush(file);
  waiting_.push_back(position);
}

void Borders::flush(const std::string& file) {
  if (!file_) file_ = std::make_unique<TemporaryFile>(fmt::format("the documents of '{}'", file));
  file_->append(waiting_.data(), std::ssize(waiting_) * i64{sizeof(i64)});
  count_ += std::ssize(waiting_);
  waiting_.clear();
}

void Borders::finish(i64 num_tokens, const std::string& file) {
  while (!waiting_.empty() && waiting_.back() >= num_tokens) waiting_.pop_back();  // the end of the file
  if (!waiting_.empty()) flush(file);
  waiting_.shrink_to_fit();
  if (count_ > 0) mapped_ = std::make_unique<MappedFile>(*file_, file);
}

i64 Borders::after(i64 position) const noexcept {
  if (every_ > 0) {
    const i64 next = (position / every_ + 1) * every_;
    return next < num_tokens_ ? next : kNone;
  }
  if (count_ == 0) return kNone;
  const i64* const first = reinterpret_cast<const i64*>(mapped_->data());
  const i64* const found = std::upper_bound(first, first + count_, position);
  return found < first + count_ ? *found : kNone;
}

void find_marked_documents(const DocumentRule& rule, bool causal, std::span<const i32> inputs,
                           std::span<const i32> targets, std::span<i32> begins) noexcept {
  const auto token = [&](size_t at) { return !causal && targets[at] != kIgnoredTarget ? targets[at] : inputs[at]; };
  i32 begin = 0;
  for (size_t t = 0; t < begins.size(); ++t) {
    if (t > 0 && rule.marks(token(t - 1), token(t))) begin = static_cast<i32>(t);
    begins[t] = begin;
  }
}

std::string DocumentSurvey::text() const {
  return fmt::format(
      "{} document{} of {} tokens, the median of {} and the longest of {}; {} {} cut; {} sample{}, {:.1f} % full",
      documents, documents == 1 ? "" : "s", tokens, median, longest, cut, cut == 1 ? "is" : "are", samples,
      samples == 1 ? "" : "s", 100 * full);
}

}  // namespace ds
