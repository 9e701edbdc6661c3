// SPDX-License-Identifier: Apache-2.0
// The property that documents are kept apart for: random documents in random files, cut and packed in every way, on
// ranks of every kind. The loss of each target is that of its document alone, and samples hold the documents that were
// written. DS_SLOW=1: many more of them.

#include <fstream>
#include <random>

#include "config/sparse_attention.h"
#include "data/objective.h"
#include "equivalence/layouts.h"
#include "slow_set.h"
#include "temp_directory.h"
#include "written_tokens.h"

namespace ds::testing {
namespace documents_alone_test {

using Ids = std::vector<i32>;
using Mode = SparseAttentionMode;

constexpr i32 kToken = 7;
constexpr i32 kMask = 3, kCls = 4, kSep = 5;  // no document has them
constexpr i64 kMostReplicas = 4;              // of a layout

// A random run, and the documents of its training data as they were written.
struct Case {
  Config config;
  std::vector<std::string> files;
  std::vector<Ids> documents;  // the last one may be cut by the split
  bool has_lines = false;      // the files are JSONL

  bool is_masked() const { return !config.model.causal(); }
  std::string name() const {
    const DataConfig& d = config.data;
    return fmt::format(
        "{} T {} {} token {} at {} positions {} across {} sparse {} files {} of {} split {}",
        family_name(config.model.family), d.seq_length, d.packing == DataPacking::None ? "cut" : "packed",
        d.document_token, d.document_token_at == DocumentTokenAt::End ? "end" : "begin",
        d.document_positions == DocumentPositions::Restart ? "restart" : "continue", d.loss_across_documents,
        sparse_attention_name(config.sparse_attention.mode), files.size(), has_lines ? "lines" : "ids", d.split);
  }
};

class Random {
 public:
  explicit Random(u32 seed) : engine_(seed) {}
  i64 below(i64 n) { return static_cast<i64>(engine_() % static_cast<u64>(n)); }
  bool coin() { return below(2) == 0; }

 private:
  std::mt19937 engine_;
};

// A line of JSONL whose text has these bytes.
std::string line_of(const Ids& ids) {
  std::string line = "{\"text\": \"";
  for (const i32 id : ids) line += fmt::format("\\u{:04x}", id);
  return line + "\"}\n";
}

void write_files(Case& c, const TempDirectory& dir, Random& random) {
  const DataConfig& d = c.config.data;
  const bool at_end = d.document_token_at == DocumentTokenAt::End;
  i64 tokens = 0;
  for (i64 f = 0, n = d.document_token < 0 ? 2 + random.below(2) : 1 + random.below(3); f < n; ++f) {
    const bool has_index = !c.has_lines && (d.document_token < 0 || random.coin());
    Ids all;
    std::string lines;
    std::vector<i32> lengths;
    std::vector<i64> ends = {0};
    // The last file makes both parts of a split long enough.
    for (i64 k = 0, count = 2 + random.below(8); k < count || (f + 1 == n && tokens < 5 * d.seq_length); ++k) {
      Ids document;
      // Short ones of masked tokens, so that some end where a sample does, before [SEP].
      const i64 usual = d.seq_length / (c.is_masked() ? 4 : 2);
      const i64 length = 1 + random.below(random.below(3) == 0 ? 3 * d.seq_length : usual);
      for (i64 t = 0; t < length; ++t) document.push_back(static_cast<i32>(8 + random.below(50)));
      const bool may_lack = has_index || (!c.has_lines && (at_end ? k + 1 == count && f + 1 < n : k == 0));
      const Ids text = document;
      if (d.document_token >= 0 && (!may_lack || random.coin()))
        document.insert(at_end ? document.end() : document.begin(), kToken);
      if (c.has_lines) lines += line_of(random.coin() ? text : document);  // a line gets the token, unless it has it
      all.insert(all.end(), document.begin(), document.end());
      // A document may be several sequences of an index.
      const auto size = static_cast<i32>(document.size()), first = size > 1 && random.coin() ? size / 2 : 0;
      if (first > 0) lengths.push_back(first);
      lengths.push_back(size - first);
      tokens += size;
      ends.push_back(std::ssize(lengths));
      c.documents.push_back(std::move(document));
    }
    const std::string path = dir / fmt::format("{}", f);
    if (c.has_lines) {
      write_file(path + ".jsonl", lines);
      c.files.push_back(path + ".jsonl");
      continue;
    }
    write_file(path + ".bin", bin_bytes(all));
    if (has_index) write_file(path + ".idx", idx_bytes(lengths, ends));
    c.files.push_back(path + ".bin");
  }
  if (d.split == 0) return;
  i64 total = 0;
  for (const Ids& document : c.documents) total += std::ssize(document);
  i64 left = total - static_cast<i64>(d.split * static_cast<double>(total));
  size_t whole = 0;
  while (whole < c.documents.size() && std::ssize(c.documents[whole]) <= left) left -= std::ssize(c.documents[whole++]);
  if (left > 0) c.documents[whole++].resize(static_cast<size_t>(left));
  c.documents.resize(whole);
}

Case random_case(u32 seed, const TempDirectory& dir) {
  Random random(seed);
  Case c;
  const i64 family = random.below(5);
  ModelConfig model = of_four_heads(family == 0 ? tiny_bert() : family < 3 ? tiny_gpt2() : tiny_llama());
  model.max_positions = 64;
  Config& config = c.config;
  config = config_of(model, {}, 1);
  config.loss.norm = LossNorm::Token;
  constexpr Mode kModes[] = {Mode::None, Mode::None, Mode::Fixed, Mode::BigBird, Mode::Local};
  config.sparse_attention.mode = kModes[random.below(5)];
  config.sparse_attention.unidirectional = model.causal();
  config.sparse_attention.num_local_blocks = 2;
  config.sparse_attention.num_sliding_window_blocks = 1;
  if (config.sparse_attention.mode == Mode::BigBird) config.sparse_attention.num_random_blocks = 1;
  DataConfig& d = config.data;
  d.seq_length = config.sparse_attention.mode != Mode::None ? 64 : random.coin() ? 16 : 32;
  d.separate_documents = true;
  d.packing = model.causal() && random.coin() ? DataPacking::BestFit : DataPacking::None;
  d.mlm = {.mask_token = kMask, .cls_token = kCls, .sep_token = kSep};
  c.has_lines = random.below(3) == 0;
  d.document_token = random.below(3) == 0 ? -1 : kToken;
  if (d.document_token >= 0 && random.coin()) d.document_token_at = DocumentTokenAt::Begin;
  if (random.below(3) == 0) d.document_positions = DocumentPositions::Continue;
  d.loss_across_documents = random.coin();
  d.split = random.coin() ? 0.3 : 0;
  write_files(c, dir, random);
  d.train = c.files;
  return c;
}

std::shared_ptr<const Objective> objective_of(const Config& c) {
  if (!c.model.causal()) return masked_tokens(c.data.mlm);
  return c.data.packing == DataPacking::None ? next_token() : next_token_of_documents(c.data.document_token);
}
BatchLoader loader_of(const Case& c, i64 ranks, i64 workers = 1, i64 micro_batches = 1) {
  Dataset data = open_dataset(c.config.data, *objective_of(c.config));
  return {std::move(data.train),
          {c.config.batch.micro, ranks, c.config.data.seq_length, workers, micro_batches},
          5,
          c.config.model.vocab_size,
          objective_of(c.config)};
}

// Inputs, targets and documents of a sample, and the loss of its documents alone.
struct Row {
  Ids inputs, targets, begins;
  double loss = 0;  // the sum over targets
  bool is_of(const Ids& its_inputs, const Ids& its_targets) const {
    return inputs == its_inputs && targets == its_targets;
  }
  i64 num_targets(size_t begin, size_t end) const {
    return static_cast<i64>(end - begin) - std::count(targets.begin() + static_cast<i64>(begin),
                                                      targets.begin() + static_cast<i64>(end), kIgnoredTarget);
  }
  // The end of the document that begins there.
  size_t document_end(size_t begin) const {
    size_t end = begin + 1;
    while (end < begins.size() && begins[end] != static_cast<i32>(end)) ++end;
    return end;
  }
};

// The samples of an evaluation, and behind them those of the first step that are others: of masked tokens, which each
// epoch draws anew.
std::vector<Row> rows_of(const Case& c, size_t* evaluated) {
  const BatchLoader loader = loader_of(c, 1);
  const i64 T = c.config.data.seq_length, B = c.config.batch.micro;
  std::vector<Row> rows;
  Ids inputs(static_cast<size_t>(B * T)), targets(inputs.size()), begins(inputs.size());
  const auto add = [&](i64 b, bool unless_there) {
    const auto part = [&](const Ids& all) { return Ids(all.begin() + b * T, all.begin() + (b + 1) * T); };
    Row row{part(inputs), part(targets), part(begins)};
    const auto same = [&](const Row& known) { return known.is_of(row.inputs, row.targets); };
    if (!unless_there || std::ranges::none_of(rows, same)) rows.push_back(std::move(row));
  };
  for (i64 batch = 0; batch < loader.num_sequential_batches(); ++batch) {
    const i64 real = loader.load_sequential(batch, 0, inputs, targets, begins);
    for (i64 b = 0; b < real; ++b) add(b, false);
  }
  *evaluated = rows.size();
  for (i64 batch = 0; batch < 2 * kMostReplicas; ++batch) {
    loader.load(0, batch, 0, inputs, targets, begins);
    for (i64 b = 0; b < B; ++b) add(b, true);
  }
  return rows;
}

// A piece of a document in a sample: its tokens, and their targets.
using Piece = std::pair<Ids, Ids>;

std::vector<Piece> pieces_of(const Row& row) {
  std::vector<Piece> pieces;
  for (size_t t = 0; t < row.inputs.size(); ++t) {
    if (row.begins[t] == static_cast<i32>(t)) pieces.emplace_back();
    pieces.back().first.push_back(row.inputs[t]);
    pieces.back().second.push_back(row.targets[t]);
  }
  return pieces;
}

// The pieces that samples of these documents have, by the definitions of data.packing and data.loss_across_documents.
std::vector<Piece> expected_pieces(const Case& c) {
  const DataConfig& d = c.config.data;
  const i64 T = d.seq_length;
  std::vector<Piece> pieces;
  i64 at = 0, total = 0;
  for (const Ids& document : c.documents) total += std::ssize(document);
  const i64 samples = (total - 1) / T;
  for (size_t k = 0; k < c.documents.size(); ++k) {
    const Ids& document = c.documents[k];
    const i64 n = std::ssize(document);
    const i32 next = k + 1 < c.documents.size() ? c.documents[k + 1].front() : kIgnoredTarget;
    const bool begins = d.document_token >= 0 && d.document_token_at == DocumentTokenAt::Begin && next == kToken;
    const bool ends = d.document_token >= 0 && d.document_token_at == DocumentTokenAt::End && document.back() == kToken;
    const bool packed = d.packing != DataPacking::None;
    const bool predicts = begins || (ends && !packed && d.loss_across_documents);
    for (i64 first = 0; first < n;) {
      const i64 place = packed ? first : at + first;
      const i64 count = std::min(n - first, T - place % T);
      Piece piece;
      for (i64 t = first; t < first + count; ++t) {
        piece.first.push_back(document[static_cast<size_t>(t)]);
        piece.second.push_back(t + 1 < n ? document[static_cast<size_t>(t + 1)] : predicts ? next : kIgnoredTarget);
      }
      const bool is_used = packed ? count > 1 || piece.second.back() != kIgnoredTarget : place / T < samples;
      if (is_used) pieces.push_back(std::move(piece));
      first += count;
    }
    at += n;
  }
  return pieces;
}

std::vector<Layout> layouts_of(const Case& c) {
  std::vector<Layout> layouts = {{},
                                 {.dp = 2, .stage = 3},
                                 {.pp = 2, .stage = 1},
                                 {.dp = 2, .pp = 2, .schedule = Kind::ZeroBubbleH1},
                                 {.pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2},
                                 {.tp = 2, .sequence = true},
                                 {.sp = 2},
                                 {.dp = 2, .sp = 2, .stage = 2},
                                 {.checkpoints = Granularity::Layer, .stage = 1}};
  if (c.config.sparse_attention.mode == Mode::None) layouts.push_back({.sp = 4, .mode = SequenceParallelMode::Ring});
  return layouts;
}

// The documents in samples of masked tokens: [CLS], the text, and [SEP], which is a document where a token ends the
// last one before it.
std::vector<Piece> expected_masked_pieces(const Case& c) {
  const DataConfig& d = c.config.data;
  Ids all;
  std::vector<bool> begins;
  for (const Ids& document : c.documents) {
    all.insert(all.end(), document.begin(), document.end());
    begins.insert(begins.end(), document.size(), false);
    begins[begins.size() - document.size()] = true;
  }
  const bool has_token_at_end = d.document_token >= 0 && d.document_token_at == DocumentTokenAt::End;
  std::vector<Piece> pieces;
  const i64 n = d.seq_length - 2;
  for (i64 at = 0; at + n <= std::ssize(all); at += n) {
    pieces.push_back({{kCls}, {}});
    for (i64 t = at; t <= at + n; ++t) {
      const bool is_text = t < at + n;
      if (is_text ? t > at && begins[static_cast<size_t>(t)]
                  : has_token_at_end && all[static_cast<size_t>(t - 1)] == kToken)
        pieces.emplace_back();
      pieces.back().first.push_back(is_text ? all[static_cast<size_t>(t)] : kSep);
    }
  }
  return pieces;
}

// Weights that make positions and neighbours matter.
void init(engine::Engine& engine) {
  engine.set_weights([](i64 param, i64 begin, i64 count, float* out) {
    const RngKey key{31, static_cast<u32>(param), 0};
    for (i64 i = 0; i < count; ++i)
      out[i] = 0.6f * (static_cast<float>(key.bits(static_cast<u64>(begin + i)) % 65536) / 65536.0f - 0.5f);
  });
}

// Whether the loss of a document depends on its place in the sample.
bool place_counts(const Config& c) {
  return c.data.document_positions == DocumentPositions::Continue || c.sparse_attention.mode != Mode::None;
}

// Computes the loss of each document alone: as a sample of its own, for which no mask or position is needed. Where its
// place counts, it stands there among tokens of another kind.
void find_losses(const Case& c, std::vector<Row>& rows) {
  Config alone = c.config;
  alone.data.separate_documents = place_counts(alone);
  struct Place {
    Row* row;
    size_t begin, end;
  };
  std::map<size_t, std::vector<Place>> by_length;  // of samples
  for (Row& row : rows) {
    for (size_t begin = 0, end; begin < row.inputs.size(); begin = end) {
      end = row.document_end(begin);
      if (row.num_targets(begin, end) == 0) continue;
      by_length[place_counts(alone) ? row.inputs.size() : end - begin].push_back({&row, begin, end});
    }
  }
  for (const auto& [length, places] : by_length) {
    alone.data.seq_length = static_cast<i64>(length);
    with_engines(alone, 1, [&](engine::Engine& engine) {
      init(engine);
      for (const auto& [row, begin, end] : places) {
        const size_t n = end - begin, first = n < length ? begin : 0;
        const double mean = *engine.evaluate(1, [&](i64, std::span<i32> ids, std::span<i32> to, std::span<i32> begins) {
          std::ranges::fill(ids, 1);
          std::ranges::fill(to, kIgnoredTarget);
          std::copy_n(row->inputs.begin() + static_cast<i64>(begin), n, ids.begin() + static_cast<i64>(first));
          std::copy_n(row->targets.begin() + static_cast<i64>(begin), n, to.begin() + static_cast<i64>(first));
          for (size_t i = 0; i < begins.size(); ++i) begins[i] = static_cast<i32>(i % length);
          if (!begins.empty()) std::fill_n(begins.begin() + static_cast<i64>(first), n, static_cast<i32>(first));
          return true;
        });
        row->loss += mean * static_cast<double>(row->num_targets(begin, end));
      }
    });
  }
}

// A layout, and the number of DiLoCo's workers that have it.
void check_layout(const Case& c, const Layout& l, int workers, const std::vector<Row>& rows, double mean) {
  SCOPED_TRACE(fmt::format("{} workers {}", l.name(), workers));
  Config config = config_of(c.config.model, l, 2 * l.dp);
  config.loss = c.config.loss;
  config.data = c.config.data;
  config.sparse_attention = c.config.sparse_attention;
  if (workers > 1) {
    config.optimizer.diloco = {.enabled = true, .workers = workers, .sync_every = 2};
    config.batch.train *= workers;
  }
  const i64 m = config.batch.accumulation, B = config.batch.micro, T = config.data.seq_length;
  with_engines(config, l.ranks() * workers, [&](engine::Engine& engine) {
    init(engine);
    const BatchLoader loader = loader_of(c, l.dp * workers, workers, m);
    const i64 rank = engine.mesh().data_rank();
    const double all = *engine.evaluate(loader.num_sequential_batches(),
                                        [&](i64 batch, std::span<i32> ids, std::span<i32> to, std::span<i32> begins) {
                                          loader.load_sequential(batch, rank, ids, to, begins);
                                          return true;
                                        });
    EXPECT_NEAR(all, mean, 1e-5 * all);
    // A step of training, on some of the samples: the mean over those of a worker.
    Ids ids(static_cast<size_t>(m * B * T)), to(ids.size()), begins(ids.size());
    double loss = 0;
    i64 targets = 0;
    for (i64 which = rank / l.dp * l.dp, end = which + l.dp; which < end; ++which) {
      loader.load_step(0, m, which, T, ids, to, begins);
      for (i64 b = 0; b < m * B; ++b) {
        const Ids inputs(ids.begin() + b * T, ids.begin() + (b + 1) * T);
        const Ids its_targets(to.begin() + b * T, to.begin() + (b + 1) * T);
        const auto row = std::ranges::find_if(rows, [&](const Row& known) { return known.is_of(inputs, its_targets); });
        ASSERT_NE(row, rows.end());
        loss += row->loss;
        targets += row->num_targets(0, row->targets.size());
      }
    }
    loader.load_step(0, m, rank, T, ids, to, begins);
    const double trained = engine.train_step({ids, to, begins}).loss;
    EXPECT_NEAR(trained, loss / static_cast<double>(std::max<i64>(targets, 1)), 1e-5 * trained);
  });
}

void check_case(u32 seed) {
  const TempDirectory dir;
  const Case c = random_case(seed, dir);
  SCOPED_TRACE(fmt::format("seed {}: {}", seed, c.name()));
  size_t evaluated = 0;
  std::vector<Row> rows = rows_of(c, &evaluated);

  // Samples hold the pieces of the documents that were written, and filling.
  std::vector<Piece> got;
  for (size_t r = 0; r < evaluated; ++r) {
    for (Piece& piece : pieces_of(rows[r])) {
      const bool is_filling = c.config.data.packing != DataPacking::None && piece.first.size() == 1 &&
                              piece.second[0] == kIgnoredTarget &&
                              piece.first[0] == std::max<i64>(c.config.data.document_token, 0);
      if (is_filling) continue;
      if (c.is_masked()) {  // the targets are the tokens that were there
        for (size_t t = 0; t < piece.first.size(); ++t)
          if (piece.second[t] != kIgnoredTarget) piece.first[t] = piece.second[t];
        piece.second.clear();
      }
      got.push_back(std::move(piece));
    }
  }
  std::vector<Piece> want = c.is_masked() ? expected_masked_pieces(c) : expected_pieces(c);
  std::ranges::sort(got);
  std::ranges::sort(want);
  ASSERT_EQ(got, want);

  find_losses(c, rows);
  double sum = 0;
  i64 targets = 0;
  for (size_t r = 0; r < evaluated; ++r) {
    sum += rows[r].loss;
    targets += rows[r].num_targets(0, rows[r].targets.size());
  }
  ASSERT_GT(targets, 0);
  const double mean = sum / static_cast<double>(targets);
  for (const Layout& l : layouts_of(c)) check_layout(c, l, 1, rows, mean);
  for (const Layout& l : {Layout{}, Layout{.dp = 2, .stage = 2}, Layout{.pp = 2}}) check_layout(c, l, 2, rows, mean);
}

TEST(DocumentsAlone, EachTargetHasTheLossOfItsDocumentAlone) {
  const u32 rounds = test::in_slow_set() ? 400 : 25;
  for (u32 seed = 1; seed <= rounds; ++seed) {
    check_case(seed);
    if (HasFatalFailure()) return;
  }
}

// Dropped tokens, and steps of the first tokens of samples: whatever else a sample holds, the loss of a document's
// targets stays.
TEST(DocumentsAlone, OthersChangeNothingWhereTokensAreDroppedOrCut) {
  constexpr i64 T = 32, kBegin = 9, kEnd = 21;
  for (const bool drops : {false, true}) {
    for (const DocumentPositions positions : {DocumentPositions::Restart, DocumentPositions::Continue}) {
      for (const i64 length : {T, i64{24}}) {
        for (const Layout& l : {Layout{}, Layout{.dp = 2, .stage = 3}, Layout{.pp = 2}}) {
          ModelConfig model = of_four_heads(tiny_llama());
          model.max_positions = T;
          Config c = config_of(model, l, 2 * l.dp);
          c.data.seq_length = T;
          c.data.document_positions = positions;
          c.loss.norm = LossNorm::Token;
          c.data.separate_documents = true;
          if (length < T) {
            c.curriculum = {.enabled = true, .min_difficulty = 8, .max_difficulty = T};
            c.curriculum.total_curriculum_step = 4;
            c.curriculum.difficulty_step = 8;
          }
          if (drops) {
            RandomLtdConfig& ltd = c.random_ltd;
            ltd.data_efficiency = ltd.data_routing = ltd.enabled = true;
            ltd.layers = {0};
            ltd.min_value = 12, ltd.max_value = T, ltd.require_steps = 5, ltd.seq_per_step = 4;
          }
          const i64 rows = c.batch.micro * c.batch.accumulation;
          std::map<i32, double> losses;
          for (const i32 others : {1, 40}) {
            std::mutex mutex;
            with_engines(c, l.ranks(), [&](engine::Engine& engine) {
              init(engine);
              engine.train_at(length);
              Ids ids(static_cast<size_t>(rows * length)), targets(ids.size(), kIgnoredTarget), begins(ids.size());
              for (i64 i = 0; i < rows * length; ++i) {
                const i64 t = i % length, at = t < kBegin ? 0 : t < kEnd ? kBegin : kEnd;
                const bool inside = at == kBegin;
                ids[static_cast<size_t>(i)] =
                    inside ? static_cast<i32>(20 + 3 * (i % 11)) : others + static_cast<i32>(i % 7);
                begins[static_cast<size_t>(i)] = static_cast<i32>(at);
                if (inside) targets[static_cast<size_t>(i)] = static_cast<i32>(3 + i % 13);
              }
              const double loss = engine.train_step({ids, targets, begins}).loss;
              const std::lock_guard lock(mutex);
              losses[others] = loss;
            });
          }
          EXPECT_EQ(losses[1], losses[40]) << l.name() << " drops " << drops << " length " << length;
        }
      }
    }
  }
}

}  // namespace documents_alone_test
}  // namespace ds::testing
