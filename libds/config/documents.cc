// SPDX-License-Identifier: Apache-2.0
#include "config/documents.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "config/data_format.h"

namespace ds {
namespace {

constexpr std::string_view kDocumentToken = "data.document_token", kAt = "data.document_token_at",
                           kAdd = "data.add_document_token", kSeparate = "data.separate_documents",
                           kPositions = "data.document_positions", kLoss = "data.loss_across_documents",
                           kPacking = "data.packing";

// Whether each text of such a file gets data.document_token.
bool is_of_texts(DataFormat format) {
  return format == DataFormat::Jsonl || format == DataFormat::Parquet || format == DataFormat::Arrow;
}

// The formats of all files that the configuration names.
std::vector<DataFormat> formats_of(const DataConfig& d) {
  std::vector<DataFormat> formats;
  for (const auto* files : {&d.train, &d.validation}) {
    for (const std::string& file : *files)
      formats.push_back(d.format == DataFormat::Auto ? data_format_of(file) : d.format);
  }
  return formats;
}

// The longest sequence up to which rotary embeddings do not depend on the length of a sequence; 0: they never do.
i64 longest_of_fixed_rotation(const ModelConfig& m) {
  if (m.rope.type == RopeType::Dynamic) return m.max_positions;
  if (m.rope.type != RopeType::LongRope) return 0;
  return m.rope.original_max_positions > 0 ? m.rope.original_max_positions : m.max_positions;
}

// Whoever gives a key means it to have an effect: a warning says why one has none.
void report_without_effect(const Config& c, Reader& r) {
  const DataConfig& d = c.data;
  const std::vector<DataFormat> formats = formats_of(d);
  const bool are_known = d.samples || !d.train.empty();
  const bool has_token = d.document_token >= 0, apart = d.separate_documents, packed = d.packing != DataPacking::None;
  const bool is_unused = has_token && are_known && !apart && !packed && std::ranges::none_of(formats, is_of_texts);
  constexpr std::string_view kNotSeparated = "documents are not separated (data.separate_documents)";
  constexpr std::string_view kNoToken = "there is no data.document_token";
  const std::string_view unused = d.samples ? kNotSeparated
                                            : "documents are neither separated nor packed, and the token is added to "
                                              "texts of JSONL, Parquet and Arrow only";
  // The first reason of a key counts.
  const struct {
    std::string_view key;
    bool is_without;
    std::string_view why;
  } rows[] = {
      {kDocumentToken, is_unused, unused},
      {kAt, !has_token, kNoToken},
      {kAt, is_unused, unused},
      {kAdd, has_token && are_known && !d.samples && std::ranges::all_of(formats, is_of_texts),
       "texts of JSONL, Parquet and Arrow get data.document_token without it"},
      {kPositions, !apart, kNotSeparated},
      {kLoss, packed, "documents in packed samples predict nothing of each other"},
      {kLoss, !apart, kNotSeparated},
      {kLoss, !c.model.causal(), "the model is trained on masked tokens, which are predicted within their document"},
      {kLoss, !has_token, "without data.document_token no document predicts the next one"},
      {kLoss, d.document_token_at == DocumentTokenAt::Begin, "a token that begins documents is always predicted"},
  };
  std::string_view last;
  for (const auto& row : rows) {
    if (!row.is_without || row.key == last || !r.given(row.key) || r.broken(row.key)) continue;
    r.warning(row.key, fmt::format("has no effect: {}", row.why));
    last = row.key;
  }
}

}  // namespace

void resolve_documents(Config& c, Reader& r) {
  DataConfig& d = c.data;
  if (!r.given(kSeparate)) d.separate_documents = d.document_token >= 0 || d.packing != DataPacking::None;
  if (c.model.layers > 0 && !c.model.causal() && d.packing != DataPacking::None && !r.broken(kPacking))
    r.error(kPacking, "is only for models that predict the next token", Errc::Unavailable);
  if (const i64 longest = longest_of_fixed_rotation(c.model); longest > 0 && d.seq_length > longest &&
                                                              d.separate_documents &&
                                                              d.document_positions == DocumentPositions::Restart)
    r.error(kSeparate,
            fmt::format("the rotary scaling of this model depends on the length of a sequence beyond {} tokens, and "
                        "documents in samples of {} would have that of the sample: set data.seq_length to at most {}, "
                        "{} to \"continue\", or keep documents together",
                        longest, d.seq_length, longest, kPositions),
            Errc::Unavailable);
  if (r.broken(kDocumentToken)) return;
  if (d.document_token < 0) {
    if (d.add_document_token) r.error(kAdd, fmt::format("needs {}", kDocumentToken));
    if (d.document_token_at == DocumentTokenAt::Begin) r.error(kAt, fmt::format("needs {}", kDocumentToken));
  } else if (d.add_document_token && !d.separate_documents && d.packing == DataPacking::None && !r.broken(kPacking)) {
    r.error(kAdd, fmt::format("is of documents that are separated or packed: set {}", kSeparate));
  }
  if (!r.any_broken({kSeparate, kPacking})) report_without_effect(c, r);
}

}  // namespace ds
