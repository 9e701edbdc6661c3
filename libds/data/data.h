// SPDX-License-Identifier: Apache-2.0
#pragma once
// Training data: token files as one stream, the samples in it, and an order of samples that is a pure function of
// (seed, epoch, number of samples). The order does not depend on the number of ranks, so a run resumes exactly at any
// world size.
//
//   stream    t0 t1 t2 ...                     files in the given order, one after the other
//   sample k  the tokens from k*stride on; an objective makes inputs and targets of them (objective.h)
//   order     position K (samples consumed so far) -> sample permutation(seed, K / n)[K % n]

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/documents.h"
#include "ds/config.h"
#include "ds/log.h"
#include "ds/sample_source.h"

namespace ds {

class FileSamples;
class Objective;

// A property of a data file that its user may not expect.
struct Remark {
  LogLevel level = LogLevel::Warning;
  std::string text;
};

struct FileFingerprint {
  std::string name;  // for messages only: files may move
  i64 bytes = 0;
  u64 hash = 0;              // XXH3 of the first and the last MiB, and of `reading`
  u64 ids = 0;               // XXH3 of the ids that a tokenizer made of its text; 0: no tokenizer, or not known
  std::string reading = {};  // how the file is read, if that is not obvious: "JSONL, messages in a line"
};

// Everything that the order and content of training samples depend on. Checkpoints contain it.
struct DataIdentity {
  std::vector<FileFingerprint> files;  // empty: the program brings the samples
  std::string tokenizer;               // Tokenizer::identity() of text; empty: the files hold tokens
  i64 num_samples = 0;
  i64 seq_length = 0;
  i64 seed = 0;
  std::string objective = "next token";  // SampleSource::identity()
  std::vector<float> weights = {};       // of the files; empty: the files are one stream
  std::string documents = {};            // DocumentRule::description(); empty in checkpoints of older versions
  i64 packed_tokens = 0;                 // of the training part, if samples are packed: they depend on all of them
  // Not in checkpoints. Older versions knew documents by data.document_token at their end alone: why they found other
  // ones, empty if they did not; and a difference that moves neither samples nor their order.
  std::string older_documents = {}, older_samples = {};
};
// Throws Errc::Mismatch, naming the file or the key, unless a run that started with `saved` can continue with `now`.
void check_same_data(const DataIdentity& saved, const DataIdentity& now);
// How samples of the two differ although they have the same numbers and documents; empty: they do not.
std::string difference_of_samples(const DataIdentity& saved, const DataIdentity& now);

// One JSON object, as a checkpoint's manifest holds it; parse throws Errc::Corrupt.
std::string data_identity_json(const DataIdentity&);
DataIdentity parse_data_identity(const std::string& json);

struct TokenFile;

// How data files are read: the keys `data.*` of the same names.
struct StreamOptions {
  DataFormat format = DataFormat::Auto;
  TokenDtype token_dtype = TokenDtype::Auto;
  std::string tokenizer = "bytes";  // or a path, as of open_tokenizer
  int num_threads = 1;              // for encoding text
  DocumentRule documents = {};
  ChatTemplateConfig chat_template = {};
};

// A read-only view of data files as one stream of ids; copies share the files. Files are mapped: tokens cost address
// space, not memory; for what a tokenizer reads see token_ids.h.
class TokenStream {
 public:
  // One format for all files, or Auto: each file's format follows from its name and the files next to it, and that of
  // llm.c from its first bytes (config/data_format.h). Token files of several formats may be mixed, and so may text and
  // JSONL. Each file of text is encoded separately. Each text of a JSONL file is followed (or preceded) by
  // `documents.token`, or, if that is negative, followed by the tokenizer's end of text, if it has one; messages are
  // formatted by `chat_template`. Documents that lack the token get it if `documents.adds_token`. Throws
  // Errc::Config (cannot be opened, not a file, nothing in it, text mixed with tokens, no dataset of that name),
  // Errc::Io, Errc::Corrupt (file and what is wrong), Errc::Mismatch (the content is of another kind than the format),
  // Errc::Unavailable (numbers that are not integers, and other known content that is not supported), and as
  // open_tokenizer and Tokenizer::encode do.
  TokenStream(std::span<const std::string> files, const StreamOptions& options);

  i64 num_tokens() const noexcept { return end_ - begin_; }
  i64 num_files() const noexcept { return std::ssize(files_); }
  // The view of all tokens of one file.
  TokenStream of_file(i64 index) const;
  // Shrinks the view to its tokens [begin, end).
  void narrow_to(i64 begin, i64 end) noexcept;

  // out = tokens [position, position + out.size()). Throws Errc::Mismatch for an id that is negative or >= vocab_size,
  // naming file and position, and Errc::Corrupt for a file that has shrunk since it was opened. Allocates: no.
  void read(i64 position, std::span<i32> out, i64 vocab_size) const;

  // The same, with kIgnoredTarget for tokens that are not predicted: prompts, and messages of other roles than the
  // assistant.
  void read_targets(i64 position, std::span<i32> out, i64 vocab_size) const;

  const DocumentRule& documents() const noexcept { return rule_; }
  // False if documents matter and this is one file whose documents nothing tells apart.
  bool knows_documents() const noexcept { return knows_documents_; }
  // The end of the document in which the token at `position` lies, or `limit` if that comes first. A document ends
  // where its file or this view ends, where its file knows a border, and where documents().token marks one. Throws
  // Errc::Corrupt for a file that has shrunk. Allocates: no.
  i64 document_end(i64 position, i64 limit) const;
  // begins[i] = the index in `begins` at which the document of token position + i begins; 0 for the first document, all
  // of which may not be there. Requires and throws as document_end().
  void find_documents(i64 position, std::span<i32> begins) const;
  // Calls body(begin, end) for every document, in order. Throws likewise.
  void for_each_document(const std::function<void(i64 begin, i64 end)>& body) const;
  // Whether the document [begin, end) of this view continues outside of it: data.split cuts it. Throws likewise.
  bool cuts(i64 begin, i64 end) const;
  // The id at a position, whatever the vocabulary. Does not check that the file is whole.
  i64 token_at(i64 position) const noexcept;
  // Borders between documents that documents().token does not mark.
  i64 num_unmarked_borders() const;

  // Asks the system to read the pages of tokens [position, position + count), and does not wait for them.
  void will_need(i64 position, i64 count) const noexcept;
  // Whether there may be tokens that are not predicted.
  bool has_marks() const noexcept;

  // Throws Errc::Mismatch if the width of ids was assumed, not given, and cannot hold the vocabulary.
  void check_width(i64 vocab_size) const;
  // Reads all tokens once, unless their type excludes wrong ones, and throws as read() does.
  void check(i64 vocab_size) const;

  // One of every file that was read, index files included.
  std::vector<FileFingerprint> fingerprints() const;
  // Each names its file, or the tokenizer's. Rank 0 logs them.
  std::vector<Remark> remarks() const;
  // As DataIdentity holds it.
  const std::string& tokenizer() const noexcept { return tokenizer_; }

 private:
  // Calls part(file, position in it, first of them, how many) for the files that tokens [position, position + count)
  // lie in.
  template <class Part>
  void for_each_part(i64 position, i64 count, Part&& part) const;

  const TokenFile& file_at(i64 position) const noexcept;  // in the stream of all files
  bool is_border(i64 position) const;                     // likewise

  std::vector<std::shared_ptr<const TokenFile>> files_;
  std::string tokenizer_;
  DocumentRule rule_;
  std::vector<Remark> remarks_;  // on the tokenizer, or on several files
  bool knows_documents_ = true;
  i64 begin_ = 0, end_ = 0;
};

// The training tokens and, unless split is 0, the validation tokens: files of their own, or the end of the training
// files.
struct Dataset {
  TokenStream train;
  std::optional<TokenStream> validation;
};
// Throws as TokenStream, and Errc::Config when a part is shorter than one sample, or nothing tells where documents that
// are to be separated or packed begin.
// `num_threads` threads encode text.
Dataset open_dataset(const DataConfig&, const Objective&, int num_threads = 1);

// A permutation of [0, n) without a table: a balanced Feistel network over the smallest even number of bits that covers
// n (Philox as round function), walked until the result is below n (Black, Rogaway: "Ciphers with Arbitrary Finite
// Domains", CT-RSA 2002).
class Permutation {
 public:
  Permutation(i64 n, u32 seed, u32 epoch) noexcept;
  i64 operator()(i64 index) const noexcept;

 private:
  u64 n_;
  u32 seed_, epoch_;
  int half_bits_;
};

// How samples are shared: by the data-parallel ranks of all workers, in micro-batches. The samples of a worker in a
// step are consecutive, however many ranks it has.
struct BatchShape {
  i64 micro = 1;
  i64 num_ranks = 1;
  i64 seq_length = 0;
  i64 workers = 1;
  i64 micro_batches = 1;  // of a rank in a step; used if there are several workers
};

// Makes batches of samples. It has no state: that of a run is the number of samples consumed, which grows by micro *
// num_ranks * accumulation with every step, including skipped ones.
class BatchLoader {
 public:
  // Requires: at least one sample in `stream`. Checks every token of it, so that a bad one is found before training.
  // With `weights`, one for each file of the stream, a sample lies in one file, and file i with n samples gives
  // round(weights[i] * n), at least one, of every epoch: the next of a sequence that is a permutation of its n samples,
  // then another of them, and so on. Requires: at least one sample in each.
  BatchLoader(TokenStream stream, BatchShape shape, u32 seed, i64 vocab_size, std::shared_ptr<const Objective>,
              std::vector<float> weights = {});
  // Loads samples that the program brings, and checks each when it is loaded. `documents` finds the documents of
  // samples that do not know theirs, in which `causal` is that of the model. Throws Errc::Config if there are no
  // samples.
  BatchLoader(std::shared_ptr<const SampleSource> samples, BatchShape shape, u32 seed, i64 vocab_size,
              const DocumentRule& documents = {}, bool causal = true);

  i64 num_samples() const noexcept { return num_samples_; }  // of an epoch
  const BatchShape& shape() const noexcept { return shape_; }
  // Whether samples may have different numbers of targets: because of prompts or packed documents, or since the program
  // brings them.
  bool has_uneven_targets() const noexcept;
  DataIdentity identity() const;

  // Micro-batch `micro_batch` of `rank` in the step that starts at `consumed`: the samples at positions
  //   consumed + micro_batch * (micro * num_ranks) + rank * micro + [0, micro)
  // of the shuffled order, which continues into the next epoch. inputs and targets are [micro, seq_length], row-major.
  // `documents`, if not empty, is likewise: for each token the place in its sample at which its document begins.
  // The objective draws differently in every epoch. Throws as TokenStream::read, Errc::Mismatch for a sample of the
  // program with ids outside the vocabulary or impossible documents, and what the program's code throws. Allocates: no.
  // Deterministic: yes.
  void load(i64 consumed, i64 micro_batch, i64 rank, std::span<i32> inputs, std::span<i32> targets,
            std::span<i32> documents = {}) const;

  // Every micro-batch of `rank` in that step, and of each sample the first `length` tokens. inputs, targets and
  // documents have room for whole samples; their first part is [micro_batches, micro, length] afterwards. Throws as
  // load(). Allocates: no.
  void load_step(i64 consumed, i64 micro_batches, i64 rank, i64 length, std::span<i32> inputs, std::span<i32> targets,
                 std::span<i32> documents = {}) const;

  // Call this before load() with the same numbers: requests the pages of its tokens (TokenStream::will_need).
  void will_need(i64 consumed, i64 micro_batch, i64 rank) const noexcept;

  // Micro-batches per rank that cover every sample once.
  i64 num_sequential_batches() const noexcept;
  // Micro-batch `batch` of `rank` in the order of the files, for evaluation, with the same draws every time. Sample k
  // belongs to worker k mod workers, whose ranks alternate by micro-batches. Rows after the last sample are filled with
  // id 0 and kIgnoredTarget, which no loss counts. Returns the number of real rows.
  i64 load_sequential(i64 batch, i64 rank, std::span<i32> inputs, std::span<i32> targets,
                      std::span<i32> documents = {}) const;

  // Reads all tokens; nothing for samples of the program, and where documents do not matter.
  std::optional<DocumentSurvey> survey_documents() const;

 private:
  // The stream, with weights each of its files, or the samples of the program.
  struct Part {
    std::shared_ptr<const SampleSource> source;
    i64 num_samples;
    i64 in_epoch;  // its samples in an epoch, which are numbered from `first` on
    i64 first;
  };
  void add(std::shared_ptr<const SampleSource> source, double weight);
  void compare_with_older_versions();
  void load_documents(const Part& part, i64 sample, std::span<const i32> inputs, std::span<const i32> targets,
                      std::span<i32> begins) const;
  const Part& part_of(i64 number) const noexcept;
  // Calls take(part, sample of it, row, key) for the samples of a micro-batch.
  template <class Take>
  void for_each_sample(i64 consumed, i64 micro_batch, i64 rank, Take&& take) const;
  void load_row(const Part& part, i64 sample, i64 row, RngKey key, std::span<i32> inputs, std::span<i32> targets,
                std::span<i32> documents) const;

  std::optional<TokenStream> stream_;  // none: the program brings the samples
  BatchShape shape_;
  u32 seed_;
  i64 vocab_size_;
  DocumentRule rule_;
  bool causal_ = true;
  std::vector<float> weights_;
  std::vector<Part> parts_;
  std::vector<std::shared_ptr<const FileSamples>> files_;  // of the parts, if they are of the stream
  std::string older_documents_, older_samples_;            // as DataIdentity has them
  i64 num_samples_ = 0;
};

}  // namespace ds
