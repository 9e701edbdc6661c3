// SPDX-License-Identifier: Apache-2.0
// The order of samples and the batches cut from it.

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "data/file_samples.h"
#include "ds/kernels/philox.h"

namespace ds {

namespace {
constexpr int kRounds = 6;
// Sites of the rounds, and of what an objective draws: apart from those of parameters and dropout.
constexpr u32 kSite = 0xDA7A0000u, kTrainingSite = kSite + 0x100, kValidationSite = kSite + 0x101;
}  // namespace

Permutation::Permutation(i64 n, u32 seed, u32 epoch) noexcept
    : n_(static_cast<u64>(n)),
      seed_(seed),
      epoch_(epoch),
      half_bits_(std::max(1, static_cast<int>(std::bit_width(static_cast<u64>(n - 1)) + 1) / 2)) {}

i64 Permutation::operator()(i64 index) const noexcept {
  const u64 mask = (u64{1} << half_bits_) - 1;
  u64 x = static_cast<u64>(index);
  do {
    u64 left = x >> half_bits_, right = x & mask;
    for (u32 round = 0; round < kRounds; ++round) {
      const u32 f = RngKey{seed_, kSite + round, epoch_}.block(right)[0];
      left = std::exchange(right, left ^ (f & mask));
    }
    x = left << half_bits_ | right;
  } while (x >= n_);
  return static_cast<i64>(x);
}

BatchLoader::BatchLoader(TokenStream stream, BatchShape shape, u32 seed, i64 vocab_size,
                         std::shared_ptr<const Objective> objective, std::vector<float> weights)
    : stream_(std::move(stream)),
      shape_(shape),
      seed_(seed),
      vocab_size_(vocab_size),
      rule_(stream_->documents()),
      weights_(std::move(weights)) {
  const auto add_stream = [&](const TokenStream& part, double weight) {
    files_.push_back(std::make_shared<FileSamples>(part, shape_.seq_length, vocab_size_, objective));
    add(files_.back(), weight);
  };
  DS_ASSERT(weights_.empty() || std::ssize(weights_) == stream_->num_files());
  if (weights_.empty()) add_stream(*stream_, 1);
  for (size_t i = 0; i < weights_.size(); ++i) add_stream(stream_->of_file(static_cast<i64>(i)), weights_[i]);
  stream_->check(vocab_size);
  compare_with_older_versions();
}

BatchLoader::BatchLoader(std::shared_ptr<const SampleSource> samples, BatchShape shape, u32 seed, i64 vocab_size,
                         const DocumentRule& documents, bool causal)
    : shape_(shape), seed_(seed), vocab_size_(vocab_size), rule_(documents), causal_(causal) {
  DS_CHECK(samples->count() > 0, Errc::Config, "the program's samples '{}' are {}", samples->identity(),
           samples->count());
  add(std::move(samples), 1);
}

void BatchLoader::add(std::shared_ptr<const SampleSource> source, double weight) {
  const i64 n = source->count();
  const i64 in_epoch = std::max<i64>(std::llround(weight * static_cast<double>(n)), 1);
  parts_.push_back({std::move(source), n, in_epoch, num_samples_});
  num_samples_ += in_epoch;
}

// Once, for it reads tokens at all borders; checkpoints ask for the identity often.
void BatchLoader::compare_with_older_versions() {
  if (!rule_.matters()) return;
  if (rule_.token < 0) {
    older_documents_ = "none without data.document_token";
  } else if (rule_.at == DocumentTokenAt::Begin) {
    older_documents_ = "those that the token ends";
  } else if (const i64 unmarked = stream_->num_unmarked_borders(); unmarked > 0) {
    older_documents_ = fmt::format("those that the token ends, which {} of the present borders lack", unmarked);
  } else if (!rule_.packed && !rule_.loss_across) {
    older_documents_ = "the same, with a loss across borders";
  }
  i64 exposed = 0;
  for (const auto& part : files_)
    exposed += part->packing() != nullptr && rule_.apart ? part->packing()->num_exposed() : 0;
  if (exposed > 0)
    older_samples_ = fmt::format("{} document{} without the token at the end saw the next one in the sample", exposed,
                                 exposed == 1 ? "" : "s");
}

DataIdentity BatchLoader::identity() const {
  return {.files = stream_ ? stream_->fingerprints() : std::vector<FileFingerprint>(),
          .tokenizer = stream_ ? stream_->tokenizer() : "",
          .num_samples = num_samples_,
          .seq_length = shape_.seq_length,
          .seed = static_cast<i64>(seed_),
          .objective = parts_.front().source->identity(),
          .weights = weights_,
          .documents = stream_ ? rule_.description() : "",
          .packed_tokens = stream_ && rule_.packed ? stream_->num_tokens() : 0,
          .older_documents = older_documents_,
          .older_samples = older_samples_};
}

std::optional<DocumentSurvey> BatchLoader::survey_documents() const {
  if (!stream_ || !rule_.matters()) return std::nullopt;
  DocumentSurvey survey;
  std::map<i64, i64> lengths;
  for (const auto& part : files_) part->survey_documents(survey, lengths);
  // The mean of the two in the middle, if there are two.
  i64 before = 0, lower = 0;
  for (const auto& [length, count] : lengths) {
    if (2 * before < survey.documents) lower = length;
    before += count;
    survey.median = (static_cast<double>(lower) + static_cast<double>(length)) / 2;
    if (2 * before > survey.documents) break;
  }
  return survey;
}

const BatchLoader::Part& BatchLoader::part_of(i64 number) const noexcept {
  return *(std::ranges::upper_bound(parts_, number, {}, &Part::first) - 1);
}

void BatchLoader::load_documents(const Part& part, i64 sample, std::span<const i32> inputs,
                                 std::span<const i32> targets, std::span<i32> begins) const {
  if (!part.source->documents(sample, begins)) return find_marked_documents(rule_, causal_, inputs, targets, begins);
  if (stream_) return;
  for (size_t t = 0; t < begins.size(); ++t) {
    const bool begins_here = begins[t] == static_cast<i32>(t);
    DS_CHECK(begins_here || (t > 0 && begins[t] == begins[t - 1]), Errc::Mismatch,
             "sample {} of the program's '{}': the document of token {} begins at {}, where {} or the beginning of the "
             "document before it is possible",
             sample, part.source->identity(), t, begins[t], t);
  }
}

void BatchLoader::load_row(const Part& part, i64 sample, i64 row, RngKey key, std::span<i32> inputs,
                           std::span<i32> targets, std::span<i32> documents) const {
  const auto at = static_cast<size_t>(row * shape_.seq_length), n = static_cast<size_t>(shape_.seq_length);
  inputs = inputs.subspan(at, n);
  targets = targets.subspan(at, n);
  part.source->sample(sample, key, inputs, targets);
  if (!documents.empty()) load_documents(part, sample, inputs, targets, documents.subspan(at, n));
  if (stream_) return;  // it checks what it reads
  const auto refuse = [&](std::string_view what, i32 id) {
    throw Error(Errc::Mismatch, fmt::format("sample {} of the program's '{}' has the {} {}, which is outside the "
                                            "model's vocabulary of {}",
                                            sample, part.source->identity(), what, id, vocab_size_));
  };
  const auto is_outside = [&](i32 id) { return id < 0 || id >= vocab_size_; };
  if (const auto bad = std::ranges::find_if(inputs, is_outside); bad != inputs.end()) refuse("input", *bad);
  const auto bad = std::ranges::find_if(targets, [&](i32 id) { return id != kIgnoredTarget && is_outside(id); });
  if (bad != targets.end()) refuse("target", *bad);
}

template <class Take>
void BatchLoader::for_each_sample(i64 consumed, i64 micro_batch, i64 rank, Take&& take) const {
  const i64 ranks = shape_.num_ranks / shape_.workers, before = rank / ranks * shape_.micro_batches * ranks;
  const i64 first = consumed + (before + micro_batch * ranks + rank % ranks) * shape_.micro;
  for (i64 row = 0; row < shape_.micro; ++row) {
    const i64 position = first + row, epoch = position / num_samples_;
    const i64 number = Permutation(num_samples_, seed_, static_cast<u32>(epoch))(position % num_samples_);
    const Part& part = part_of(number);
    if (weights_.empty()) {
      take(part, number, row, RngKey{seed_, kTrainingSite, static_cast<u32>(epoch)});
      continue;
    }
    // The samples of a file follow each other through all epochs, round by round.
    const i64 drawn = epoch * part.in_epoch + number - part.first;
    const u32 round = static_cast<u32>(drawn / part.num_samples);
    const u32 seed = seed_ + 1 + static_cast<u32>(&part - parts_.data());
    const i64 sample = Permutation(part.num_samples, seed, round)(drawn % part.num_samples);
    take(part, sample, row, RngKey{seed, kTrainingSite, round});
  }
}

void BatchLoader::load(i64 consumed, i64 micro_batch, i64 rank, std::span<i32> inputs, std::span<i32> targets,
                       std::span<i32> documents) const {
  for_each_sample(consumed, micro_batch, rank, [&](const Part& part, i64 sample, i64 row, RngKey key) {
    load_row(part, sample, row, key, inputs, targets, documents);
  });
}

void BatchLoader::load_step(i64 consumed, i64 micro_batches, i64 rank, i64 length, std::span<i32> inputs,
                            std::span<i32> targets, std::span<i32> documents) const {
  const i64 whole = shape_.seq_length, rows = shape_.micro * whole;
  DS_ASSERT(length > 0 && length <= whole);
  for (i64 m = 0; m < micro_batches; ++m) {
    const auto at = static_cast<size_t>(m * rows), n = static_cast<size_t>(rows);
    load(consumed, m, rank, inputs.subspan(at, n), targets.subspan(at, n),
         documents.empty() ? documents : documents.subspan(at, n));
  }
  for (const std::span<i32> tokens : {inputs, targets, documents}) {
    for (i64 sample = 1; !tokens.empty() && sample < micro_batches * shape_.micro && length < whole; ++sample)
      std::copy_n(tokens.begin() + sample * whole, length, tokens.begin() + sample * length);
  }
}

void BatchLoader::will_need(i64 consumed, i64 micro_batch, i64 rank) const noexcept {
  for_each_sample(consumed, micro_batch, rank,
                  [&](const Part& part, i64 sample, i64, RngKey) { part.source->will_need(sample); });
}

bool BatchLoader::has_uneven_targets() const noexcept { return !stream_ || stream_->has_marks() || rule_.matters(); }

i64 BatchLoader::num_sequential_batches() const noexcept {
  return div_ceil(num_samples_, shape_.micro * shape_.num_ranks);
}

i64 BatchLoader::load_sequential(i64 batch, i64 rank, std::span<i32> inputs, std::span<i32> targets,
                                 std::span<i32> documents) const {
  const i64 workers = shape_.workers, ranks = shape_.num_ranks / workers, worker = rank / ranks;
  // Among the samples of the worker, which are every workers-th one.
  const i64 first = (batch * ranks + rank % ranks) * shape_.micro;
  const i64 real = std::clamp<i64>(div_ceil(num_samples_ - worker, workers) - first, 0, shape_.micro);
  for (i64 row = 0; row < real; ++row) {
    const i64 number = (first + row) * workers + worker;
    const Part& part = part_of(number);
    load_row(part, (number - part.first) % part.num_samples, row, {seed_, kValidationSite, 0}, inputs, targets,
             documents);
  }
  const auto filled = static_cast<size_t>(real * shape_.seq_length);
  std::ranges::fill(inputs.subspan(filled), 0);
  std::ranges::fill(targets.subspan(filled), kIgnoredTarget);
  if (!documents.empty()) std::ranges::fill(documents.subspan(filled), 0);
  return real;
}

}  // namespace ds
