// SPDX-License-Identifier: Apache-2.0
#include "data/objective.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace ds {
namespace {

class NextToken : public Objective {
 public:
  i64 stride(i64 seq_length) const noexcept override { return seq_length; }
  i64 extent(i64 seq_length) const noexcept override { return seq_length + 1; }

  void make_sample(const TokenStream& stream, i64 sample, RngKey, i64 vocab_size, std::span<i32> inputs,
                   std::span<i32> targets) const override {
    const i64 T = std::ssize(inputs), begin = sample * T;
    stream.read(begin, inputs, vocab_size);
    stream.read_targets(begin + 1, targets, vocab_size);
    const DocumentRule& rule = stream.documents();
    if (!rule.apart) return;
    const i64 end = begin + T;
    for (i64 at = begin; (at = stream.document_end(at, end + 1)) <= end;) {
      const auto last = static_cast<size_t>(at - 1 - begin);
      if (!rule.predicts(inputs[last], stream.token_at(at))) targets[last] = kIgnoredTarget;
    }
  }
  bool heeds_marks() const noexcept override { return true; }

  const std::string& description() const noexcept override { return description_; }

 private:
  std::string description_ = "next token";
};

class NextTokenOfDocuments final : public NextToken {
 public:
  explicit NextTokenOfDocuments(i64 document_token)
      : description_(document_token < 0
                         ? fmt::format("next token, documents {}", kPackedObjective)
                         : fmt::format("next token, documents that end with {} {}", document_token, kPackedObjective)) {
  }
  i64 extent(i64) const noexcept override { return 2; }  // the shortest document
  bool packs_documents() const noexcept override { return true; }
  const std::string& description() const noexcept override { return description_; }

 private:
  std::string description_;
};

class MaskedTokens final : public Objective {
 public:
  explicit MaskedTokens(const MlmConfig& mlm)
      : probability_(mlm.probability),
        mask_(narrow<i32>(mlm.mask_token)),
        cls_(narrow<i32>(mlm.cls_token)),
        sep_(narrow<i32>(mlm.sep_token)),
        description_(
            fmt::format("masked tokens, probability {}, mask {}, cls {}, sep {}", probability_, mask_, cls_, sep_)) {}

  i64 stride(i64 seq_length) const noexcept override { return seq_length - 2; }
  i64 extent(i64 seq_length) const noexcept override { return seq_length - 2; }

  void make_sample(const TokenStream& stream, i64 sample, RngKey key, i64 vocab_size, std::span<i32> inputs,
                   std::span<i32> targets) const override {
    const i64 T = std::ssize(inputs);
    inputs.front() = cls_;
    inputs.back() = sep_;
    const std::span<i32> text = inputs.subspan(1, inputs.size() - 2);
    stream.read(sample * std::ssize(text), text, vocab_size);

    const auto special = [&](i32 id) { return id == mask_ || id == cls_ || id == sep_; };
    i64 left = std::ssize(text) - std::count_if(text.begin(), text.end(), special);  // positions still to be decided
    i64 wanted = std::min(left, std::max<i64>(std::llround(probability_ * static_cast<double>(left)), 1));
    std::fill(targets.begin(), targets.end(), kIgnoredTarget);
    for (i64 t = 1; t + 1 < T; ++t) {
      i32& id = inputs[t];
      if (special(id)) continue;
      const PhiloxBlock random = key.block(static_cast<u64>(sample * T + t));
      // Every choice of `wanted` positions is as likely as any other: Knuth, "The Art of Computer Programming", vol. 2,
      // 3.4.2, algorithm S.
      if (random[0] % static_cast<u64>(left--) >= static_cast<u64>(wanted)) continue;
      --wanted;
      targets[t] = id;
      const u32 fate = random[1] % 10;
      if (fate < 8) id = mask_;
      if (fate == 8) id = static_cast<i32>(random[2] % static_cast<u64>(vocab_size));
    }
  }

  void find_documents(const TokenStream& stream, i64 sample, std::span<i32> begins) const override {
    const std::span<i32> text = begins.subspan(1, begins.size() - 2);
    const i64 first = sample * std::ssize(text), last = first + std::ssize(text) - 1;
    stream.find_documents(first, text);
    begins.front() = 0;
    for (i32& begin : text) begin += begin > 0 ? 1 : 0;
    // [SEP] belongs to the document before it, unless a token has ended that.
    const bool has_ended = stream.documents().marks(stream.token_at(last), -1);
    begins.back() = has_ended ? static_cast<i32>(begins.size() - 1) : text.back();
  }

  const std::string& description() const noexcept override { return description_; }

 private:
  double probability_;
  i32 mask_, cls_, sep_;
  std::string description_;
};

}  // namespace

std::unique_ptr<Objective> next_token() { return std::make_unique<NextToken>(); }
std::unique_ptr<Objective> next_token_of_documents(i64 document_token) {
  return std::make_unique<NextTokenOfDocuments>(document_token);
}
std::unique_ptr<Objective> masked_tokens(const MlmConfig& mlm) { return std::make_unique<MaskedTokens>(mlm); }

std::unique_ptr<Objective> make_objective(const ModelConfig& model, const DataConfig& data,
                                          const Tokenizer* tokenizer) {
  if (model.causal())
    return data.packing == DataPacking::None ? next_token() : next_token_of_documents(data.document_token);
  MlmConfig mlm = data.mlm;
  const auto resolve = [&](i64& id, SpecialToken token, std::string_view name) {
    if (id < 0 && tokenizer != nullptr) id = tokenizer->special(token).value_or(-1);
    DS_CHECK(id >= 0, Errc::Config, "data.mlm.{}_token is missing, and the tokenizer '{}' has none", name,
             data.tokenizer);
    DS_CHECK(id < model.vocab_size, Errc::Config, "data.mlm.{}_token: {} is outside the model's vocabulary of {}", name,
             id, model.vocab_size);
  };
  resolve(mlm.mask_token, SpecialToken::Mask, "mask");
  resolve(mlm.cls_token, SpecialToken::Cls, "cls");
  resolve(mlm.sep_token, SpecialToken::Sep, "sep");
  DS_CHECK(mlm.mask_token != mlm.cls_token && mlm.mask_token != mlm.sep_token, Errc::Config,
           "data.mlm.mask_token: {} is also the token that begins or ends a sample", mlm.mask_token);
  return masked_tokens(mlm);
}

}  // namespace ds
