// SPDX-License-Identifier: Apache-2.0
// Data files as one stream: which format each has, concatenation, and the split into training and validation tokens.

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>

#include "base/check.h"
#include "config/data_format.h"
#include "data/chat_template.h"
#include "data/objective.h"
#include "data/token_file.h"

namespace ds {

namespace {

// One for each file.
std::vector<DataFormat> resolve_formats(std::span<const std::string> files, DataFormat format) {
  std::vector<DataFormat> formats(files.size(), format);
  if (format != DataFormat::Auto) return formats;
  std::ranges::transform(files, formats.begin(), data_format_of);
  const auto text = std::ranges::find_if(formats, is_text), tokens = std::ranges::find_if_not(formats, is_text);
  DS_CHECK(text == formats.end() || tokens == formats.end(), Errc::Config,
           "data files mix tokens and text ('{}' and '{}'), which tell nothing of each other's tokenizer: set "
           "data.format or use one kind",
           files[static_cast<size_t>(tokens - formats.begin())], files[static_cast<size_t>(text - formats.begin())]);
  for (size_t i = 0; i < files.size(); ++i)
    if (formats[i] == DataFormat::Bin && is_llmc_file(files[i])) formats[i] = DataFormat::Llmc;
  return formats;
}

// Remarks on how the documents of a file are found.
void remark_on_documents(TokenFile& file, const DocumentRule& rule) {
  if (!file.borders_of.empty()) {
    const i64 n = file.num_documents();
    std::string text =
        fmt::format("data file '{}': {} document{} by {}", file.name, n, n == 1 ? "" : "s", file.borders_of);
    if (rule.token >= 0) {
      const bool at_end = rule.at == DocumentTokenAt::End;
      i64 without = 0, other_side = 0;  // documents that lack the token, and that have it at their other side alone
      for (i64 begin = 0; begin < file.view.count;) {
        const i64 end = std::min(file.borders.after(begin), file.view.count);
        const bool first = file.token_at(begin) == rule.token, last = file.token_at(end - 1) == rule.token;
        without += (at_end ? last : first) ? 0 : 1;
        other_side += (at_end ? first && !last : last && !first) ? 1 : 0;
        begin = end;
      }
      if (without > 0)
        text += fmt::format(", of which {} {} not {} with data.document_token {}", without,
                            without == 1 ? "does" : "do", at_end ? "end" : "begin", rule.token);
      if (other_side > n / 2)
        text += fmt::format("; {} {} with it: set data.document_token_at to \"{}\"", other_side,
                            at_end ? "begin" : "end", at_end ? "begin" : "end");
    }
    file.note(std::move(text));
    return;
  }
  if (rule.token < 0 || file.has_document_tokens) return;
  const bool first = file.token_at(0) == rule.token, last = file.token_at(file.view.count - 1) == rule.token;
  const bool at_end = rule.at == DocumentTokenAt::End;
  if (at_end ? first && !last : last && !first)
    file.note(
        fmt::format("data file '{}' {} with data.document_token {} and does not {} with it: if the token {} "
                    "documents, set data.document_token_at to \"{}\"",
                    file.name, first ? "begins" : "ends", rule.token, first ? "end" : "begin",
                    first ? "begins" : "ends", first ? "begin" : "end"));
}

std::unique_ptr<TokenFile> open_file(const std::string& path, DataFormat format, TokenDtype token_dtype,
                                     const TextEncoding& encoding) {
  switch (format) {
    case DataFormat::Auto: break;
    case DataFormat::Parquet:
    case DataFormat::Arrow: return open_arrow_file(path, format, encoding);
    case DataFormat::Text: return open_text_file(path, encoding);
    case DataFormat::Bin: return open_bin_file(path, token_dtype);
    case DataFormat::Llmc: return open_llmc_file(path);
    case DataFormat::Megatron: return open_megatron_file(path, encoding.documents.matters());
    case DataFormat::Hdf5: return open_hdf5_file(path);
    case DataFormat::Jsonl: return open_jsonl_file(path, encoding);
  }
  throw Error(Errc::Internal, fmt::format("data file '{}' has no format", path));
}

void check_marks(const TokenStream& stream, const Objective& objective, const std::string& first_file) {
  DS_CHECK(!stream.has_marks() || objective.heeds_marks(), Errc::Unavailable,
           "the data (from '{}') have prompts or messages, of which completions alone are to be predicted: for that a "
           "model is to predict the next token",
           first_file);
}

void check_documents_are_known(const TokenStream& stream, const std::string& first_file) {
  DS_CHECK(stream.knows_documents(), Errc::Config,
           "{}: needs data.document_token: nothing else tells where documents begin in '{}'",
           stream.documents().packed ? "data.packing" : "data.separate_documents", first_file);
}

void check_holds_a_sample(const TokenStream& stream, i64 seq_length, const Objective& objective, const char* part,
                          const std::string& first_file, const char* advice) {
  const i64 needed = objective.extent(seq_length);
  DS_CHECK(stream.num_tokens() >= needed, Errc::Config,
           "the {} data (from '{}') has {} tokens, but one sample of seq_length {} needs {}: {}", part, first_file,
           stream.num_tokens(), seq_length, needed, advice);
}

}  // namespace

TokenStream::TokenStream(std::span<const std::string> files, const StreamOptions& options) : rule_(options.documents) {
  const std::vector<DataFormat> formats = resolve_formats(files, options.format);
  std::unique_ptr<Tokenizer> encoder;
  if (std::ranges::any_of(formats, is_text)) {
    tokenizer_ = options.tokenizer;
    if (tokenizer_ != "bytes") {
      encoder = open_tokenizer(tokenizer_);
      tokenizer_ = encoder->identity();
    }
  }
  DS_CHECK(options.token_dtype == TokenDtype::Auto || std::ranges::find(formats, DataFormat::Bin) != formats.end(),
           Errc::Config,
           "data.token_dtype: no data file is a .bin without a header, whose tokens it describes (from '{}')",
           files.front());
  const TextEncoding encoding{.tokenizer = encoder.get(),
                              .tokenizer_path = options.tokenizer,
                              .num_threads = options.num_threads,
                              .documents = options.documents,
                              .chat_template = options.chat_template,
                              .takes_any_bytes = options.format == DataFormat::Text};
  std::vector<std::string> without_borders;
  for (size_t i = 0; i < files.size(); ++i) {
    std::shared_ptr<TokenFile> file = open_file(files[i], formats[i], options.token_dtype, encoding);
    if (rule_.matters()) {
      const bool is_whole_text = formats[i] == DataFormat::Text && files.size() > 1;  // each is a document
      if (!is_whole_text && !file->knows_borders && !file->has_document_tokens &&
          (rule_.token < 0 || file->find_token(0, file->view.count, rule_.token) == Borders::kNone))
        without_borders.push_back(file->name);
      remark_on_documents(*file, rule_);
      if (rule_.adds_token && !file->has_document_tokens) file->add_document_tokens(rule_);
    }
    file->first_token = end_;
    end_ += file->view.count;
    files_.push_back(std::move(file));
  }
  knows_documents_ = without_borders.empty() || rule_.token >= 0 || files.size() > 1;
  if (!without_borders.empty() && knows_documents_) {
    const size_t more = without_borders.size() - 1;
    const std::string others = more > 0 ? fmt::format(" and {} other data file{}", more, more == 1 ? "" : "s") : "";
    const std::string lack =
        rule_.token < 0 ? fmt::format("without data.document_token nothing tells where documents begin in '{}'{}",
                                      without_borders.front(), others)
                        : fmt::format(
                              "data.document_token {} occurs nowhere in '{}'{}, and nothing else there tells where "
                              "documents begin",
                              rule_.token, without_borders.front(), others);
    remarks_.push_back({LogLevel::Warning, lack + ": each file is one document"});
  }
  if (encoder) {
    for (const std::string& text : encoder->facts().warnings) remarks_.push_back({LogLevel::Warning, text});
    for (std::string& text : encoder->warnings_of_texts()) remarks_.push_back({LogLevel::Warning, std::move(text)});
  }
  DS_CHECK(ChatTemplate(options.chat_template).is_chatml() ||
               std::ranges::any_of(files_, [](const auto& file) { return file->has_messages; }),
           Errc::Config, "data.chat_template: no data file has messages (from '{}')", files.front());
}

TokenStream TokenStream::of_file(i64 index) const {
  TokenStream one = *this;
  const TokenFile& file = *files_[static_cast<size_t>(index)];
  one.begin_ = file.first_token;
  one.end_ = file.first_token + file.view.count;
  return one;
}

void TokenStream::narrow_to(i64 begin, i64 end) noexcept {
  end_ = begin_ + end;
  begin_ += begin;
}

// The last one that begins at the position or before it; no file is empty.
const TokenFile& TokenStream::file_at(i64 position) const noexcept {
  return **(std::ranges::upper_bound(files_, position, {}, &TokenFile::first_token) - 1);
}

template <class Part>
void TokenStream::for_each_part(i64 position, i64 count, Part&& part) const {
  position += begin_;
  DS_ASSERT(position >= begin_ && position + count <= end_);
  for (i64 first = 0; first < count;) {
    const TokenFile& f = file_at(position + first);
    const i64 begin = position + first - f.first_token;
    const i64 n = std::min(count - first, f.view.count - begin);
    part(f, begin, first, n);
    first += n;
  }
}

void TokenStream::read(i64 position, std::span<i32> out, i64 vocab_size) const {
  for_each_part(position, std::ssize(out), [&](const TokenFile& file, i64 begin, i64 first, i64 n) {
    file.read(begin, out.subspan(static_cast<size_t>(first), static_cast<size_t>(n)), vocab_size);
  });
}

void TokenStream::read_targets(i64 position, std::span<i32> out, i64 vocab_size) const {
  for_each_part(position, std::ssize(out), [&](const TokenFile& file, i64 begin, i64 first, i64 n) {
    file.read_targets(begin, out.subspan(static_cast<size_t>(first), static_cast<size_t>(n)), vocab_size);
  });
}

i64 TokenStream::document_end(i64 position, i64 limit) const {
  const TokenFile& f = file_at(begin_ + position);
  const i64 first = f.first_token - begin_;  // of the file, in this view
  const i64 to = std::min({limit, num_tokens(), first + f.view.count});
  f.mapped.front()->check_size();
  return std::min(f.find_border(position - first, to - first, rule_), to - first) + first;
}

void TokenStream::find_documents(i64 position, std::span<i32> begins) const {
  const i64 n = std::ssize(begins);
  for (i64 t = 0; t < n;) {
    const i64 end = document_end(position + t, position + n) - position;
    std::fill(begins.begin() + t, begins.begin() + end, static_cast<i32>(t));
    t = end;
  }
}

void TokenStream::for_each_document(const std::function<void(i64 begin, i64 end)>& body) const {
  constexpr i64 kChunk = i64{1} << 20;  // the file is seen to be whole before each
  for_each_part(0, num_tokens(), [&](const TokenFile& f, i64 in_file, i64 in_view, i64 n) {
    const i64 shift = in_view - in_file, last = in_file + n;
    i64 begin = in_file;
    for (i64 at = in_file; at < last;) {
      const i64 to = std::min(at + kChunk, last);
      f.mapped.front()->check_size();
      for (i64 end; (end = f.find_border(at, to, rule_)) != Borders::kNone; begin = at = end)
        body(begin + shift, end + shift);
      at = to;
    }
    if (begin < last) body(begin + shift, last + shift);
  });
}

bool TokenStream::is_border(i64 position) const {
  const i64 last = files_.back()->first_token + files_.back()->view.count;
  if (position == 0 || position == last) return true;
  const TokenFile& f = file_at(position);
  const i64 at = position - f.first_token;
  f.mapped.front()->check_size();
  return at == 0 || f.find_border(at - 1, at, rule_) == at;
}

bool TokenStream::cuts(i64 begin, i64 end) const {
  return (begin == 0 && !is_border(begin_)) || (end == num_tokens() && !is_border(end_));
}

i64 TokenStream::token_at(i64 position) const noexcept {
  const TokenFile& f = file_at(begin_ + position);
  return f.token_at(begin_ + position - f.first_token);
}

i64 TokenStream::num_unmarked_borders() const {
  i64 unmarked = 0;
  for_each_part(0, num_tokens(), [&](const TokenFile& f, i64 begin, i64 first, i64 n) {
    f.mapped.front()->check_size();
    const i64 end = begin + n;
    for (i64 at = begin; (at = f.borders.after(at)) < end;)
      unmarked += rule_.marks(f.token_at(at - 1), f.token_at(at)) ? 0 : 1;
    if (first + n == num_tokens()) return;
    const TokenFile& next = file_at(f.first_token + end);
    unmarked += rule_.marks(f.token_at(end - 1), next.token_at(0)) ? 0 : 1;
  });
  return unmarked;
}

void TokenStream::will_need(i64 position, i64 count) const noexcept {
  for_each_part(position, count, [](const TokenFile& file, i64 begin, i64, i64 n) { file.will_need(begin, n); });
}

bool TokenStream::has_marks() const noexcept {
  return std::ranges::any_of(files_, [](const auto& file) { return file->view.has_marks; });
}

void TokenStream::check_width(i64 vocab_size) const {
  constexpr i64 kMostOfUint16 = i64{1} << 16;
  const auto narrow = std::ranges::find_if(files_, [](const auto& file) { return file->width_is_assumed; });
  DS_CHECK(narrow == files_.end() || vocab_size <= kMostOfUint16, Errc::Mismatch,
           "data file '{}' has no header, and uint16 cannot hold the model's vocabulary of {}: set data.token_dtype to "
           "the type of its ids (\"uint32\", or \"uint16\" if it is)",
           (*narrow)->name, vocab_size);
}

void TokenStream::check(i64 vocab_size) const {
  for (const auto& f : files_) {
    const i64 begin = std::max<i64>(begin_ - f->first_token, 0), end = std::min(end_ - f->first_token, f->view.count);
    if (begin < end) f->check(begin, end, vocab_size);
  }
}

std::vector<FileFingerprint> TokenStream::fingerprints() const {
  std::vector<FileFingerprint> result;
  for (const auto& file : files_) std::ranges::move(file->fingerprints(), std::back_inserter(result));
  return result;
}

std::vector<Remark> TokenStream::remarks() const {
  std::vector<Remark> result = remarks_;
  for (const auto& file : files_) std::ranges::copy(file->remarks, std::back_inserter(result));
  return result;
}

Dataset open_dataset(const DataConfig& config, const Objective& objective, int num_threads) {
  DS_CHECK(!config.train.empty(), Errc::Config, "data.train names no file");
  const auto open = [&](const std::vector<std::string>& files) {
    return TokenStream(files, {.format = config.format,
                               .token_dtype = config.token_dtype,
                               .tokenizer = config.tokenizer,
                               .num_threads = num_threads,
                               .documents = DocumentRule::of(config),
                               .chat_template = config.chat_template});
  };
  Dataset data{open(config.train), std::nullopt};
  check_documents_are_known(data.train, config.train.front());
  check_marks(data.train, objective, config.train.front());
  const i64 total = data.train.num_tokens();
  if (!config.validation.empty()) {
    data.validation.emplace(open(config.validation));
    // A single text may be the last document of many.
    if (data.validation->tokenizer().empty()) check_documents_are_known(*data.validation, config.validation.front());
    check_marks(*data.validation, objective, config.validation.front());
    check_holds_a_sample(*data.validation, config.seq_length, objective, "validation", config.validation.front(),
                         "give more text or a smaller data.seq_length");
  } else if (config.split > 0) {
    check_holds_a_sample(data.train, config.seq_length, objective, "whole", config.train.front(),
                         "give more text or a smaller data.seq_length");
    const i64 cut = total - static_cast<i64>(config.split * static_cast<double>(total));
    data.validation.emplace(data.train).narrow_to(cut, total);
    data.train.narrow_to(0, cut);
    check_holds_a_sample(*data.validation, config.seq_length, objective, "validation", config.train.front(),
                         "raise data.split, set it to 0 or name data.validation files");
  }
  check_holds_a_sample(data.train, config.seq_length, objective, "training", config.train.front(),
                       "give more text or a smaller data.seq_length");
  DS_CHECK(config.weights.empty() || config.weights.size() == config.train.size(), Errc::Config,
           "data.weights has {} numbers, and data.train {} files", config.weights.size(), config.train.size());
  for (i64 i = 0; i < std::ssize(config.weights); ++i)
    check_holds_a_sample(data.train.of_file(i), config.seq_length, objective, "training",
                         config.train[static_cast<size_t>(i)],
                         "with data.weights each file has one; leave this one out or choose a smaller data.seq_length");
  return data;
}

}  // namespace ds
