// SPDX-License-Identifier: Apache-2.0
// Where documents begin: in files of every format, at cuts, and in samples.
#include "data/documents.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <random>
#include <set>

#include "data/objective.h"
#include "data/packing.h"
#include "data/token_file.h"
#include "data/tokenizer.h"
#include "expect_error.h"
#include "formats/hdf5.h"
#include "temp_directory.h"
#include "test_data.h"
#include "written_tokens.h"

namespace ds {
namespace documents_test {

using ::testing::AllOf;
using testing::bin_bytes;
using ::testing::ElementsAre;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::idx_bytes;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::TempDirectory;
using testing::test_data;
using testing::write_file;

constexpr i32 kNone = kIgnoredTarget;
constexpr i64 kVocab = 65536;
using Ids = std::vector<i32>;
using Begins = std::vector<i64>;

class Documents : public ::testing::Test {
 protected:
  std::string file(const std::string& name, const std::string& content) const {
    write_file(dir_ / name, content);
    return dir_ / name;
  }
  static TokenStream open(const std::vector<std::string>& files, DocumentRule rule = {}) {
    rule.apart = true;
    return TokenStream(files, {.documents = rule});
  }
  static Begins begins_of(const TokenStream& stream) {
    Begins begins;
    i64 end_before = 0;
    stream.for_each_document([&](i64 begin, i64 end) {
      EXPECT_EQ(begin, end_before);
      EXPECT_EQ(stream.document_end(begin, stream.num_tokens()), end);
      EXPECT_EQ(stream.document_end(end - 1, stream.num_tokens()), end);
      EXPECT_EQ(stream.document_end(begin, begin + 1), begin + 1);
      begins.push_back(begin);
      end_before = end;
    });
    EXPECT_EQ(end_before, stream.num_tokens());
    return begins;
  }
  static std::string remarks_of(const TokenStream& stream) {
    std::string all;
    for (const Remark& r : stream.remarks()) all += (r.level == LogLevel::Warning ? "W " : "") + r.text + "\n";
    return all;
  }
  TempDirectory dir_;
};

TEST_F(Documents, BordersAreAscendingOnceAndInside) {
  Borders borders;
  for (const i64 at : {0, 0, 3, 3, 7, 9, 9}) borders.add(at, "x");
  borders.finish(9, "x");
  EXPECT_EQ(borders.count(), 2);
  EXPECT_EQ(borders.after(0), 3);
  EXPECT_EQ(borders.after(2), 3);
  EXPECT_EQ(borders.after(3), 7);
  EXPECT_EQ(borders.after(7), Borders::kNone);
  Borders many;  // more than are written at once
  for (i64 i = 1; i <= 8192; ++i) many.add(2 * i, "x");
  many.finish(2 * 8192, "x");
  EXPECT_EQ(many.count(), 8191);
  EXPECT_EQ(many.after(16381), 16382);
  EXPECT_EQ(many.after(16382), Borders::kNone);
  const Borders rows = Borders::every(4, 12);
  EXPECT_EQ(rows.count(), 2);
  EXPECT_EQ(rows.after(3), 4);
  EXPECT_EQ(rows.after(4), 8);
  EXPECT_EQ(rows.after(8), Borders::kNone);
}

TEST_F(Documents, TheTokenEndsOrBeginsThem) {
  const std::string both = file("a.bin", bin_bytes({0, 21, 22, 23, 0, 31, 32}));
  EXPECT_EQ(begins_of(open({both}, {.token = 0})), (Begins{0, 1, 5}));
  EXPECT_EQ(begins_of(open({both}, {.token = 0, .at = DocumentTokenAt::Begin})), (Begins{0, 4}));
  EXPECT_EQ(begins_of(open({both}, {.token = 99})), (Begins{0}));
  EXPECT_EQ(begins_of(open({both}, {.token = 70000})), (Begins{0}));  // no uint16 is that
  // The token seen from the middle of blocks and documents of every length.
  for (const i64 n : {1, 2, 63, 64, 65, 127, 128, 129, 1000}) {
    Ids ids(static_cast<size_t>(n), 5);
    ids.push_back(7);
    ids.push_back(5);
    const TokenStream stream = open({file("n.bin", bin_bytes(ids))}, {.token = 7});
    EXPECT_EQ(begins_of(stream), (Begins{0, n + 1})) << n;
    EXPECT_EQ(begins_of(open({dir_ / "n.bin"}, {.token = 7, .at = DocumentTokenAt::Begin})), (Begins{0, n})) << n;
  }
}

TEST_F(Documents, FilesEndThem) {
  const std::string a = file("a.bin", bin_bytes({11, 12, 13})), b = file("b.bin", bin_bytes({21, 0, 22}));
  EXPECT_EQ(begins_of(open({a, b}, {.token = 0})), (Begins{0, 3, 5}));
  EXPECT_EQ(begins_of(open({a, b}, {.token = 0, .at = DocumentTokenAt::Begin})), (Begins{0, 3, 4}));
  EXPECT_EQ(begins_of(open({a, b, a})), (Begins{0, 3, 6}));
  const std::string text = file("a.txt", "ab"), other = file("b.txt", "cd");
  EXPECT_EQ(begins_of(open({text, other})), (Begins{0, 2}));
  EXPECT_THAT(remarks_of(open({text, other}, {.token = 0})), IsEmpty());
}

TEST_F(Documents, ASplitCutsThem) {
  DataConfig config;
  config.train = {file("a.bin", bin_bytes({11, 12, 0, 21, 22, 23, 24, 0, 31, 32}))};
  config.seq_length = 2;
  config.split = 0.4;
  config.document_token = 0;
  config.separate_documents = true;
  const Dataset data = open_dataset(config, *next_token());
  EXPECT_EQ(begins_of(data.train), (Begins{0, 3}));
  EXPECT_EQ(data.train.num_tokens(), 6);
  EXPECT_EQ(begins_of(*data.validation), (Begins{0, 2}));
  config.split = 0.5;  // after 22
  EXPECT_EQ(begins_of(*open_dataset(config, *next_token()).validation), (Begins{0, 3}));
}

TEST_F(Documents, AnIndexKnowsThem) {
  const Ids ids = {11, 12, 21, 22, 23, 31, 41, 42};
  file("m.bin", bin_bytes(ids));
  // Two sequences in the second document, an empty document, and an empty sequence.
  file("m.idx", idx_bytes({2, 1, 2, 0, 1, 2}, {0, 1, 3, 3, 5, 6}));
  const TokenStream stream = open({dir_ / "m"});
  EXPECT_EQ(begins_of(stream), (Begins{0, 2, 5, 6}));
  EXPECT_THAT(remarks_of(stream), AllOf(HasSubstr("4 documents by its index"), ::testing::Not(HasSubstr("W "))));
  EXPECT_EQ(stream.num_unmarked_borders(), 3);
  const TokenStream with_token = open({dir_ / "m"}, {.token = 12});
  EXPECT_EQ(begins_of(with_token), (Begins{0, 2, 5, 6}));
  EXPECT_EQ(with_token.num_unmarked_borders(), 2);
  EXPECT_THAT(remarks_of(with_token),
              HasSubstr("4 documents by its index, of which 3 do not end with data.document_token 12"));
  EXPECT_EQ(begins_of(open({dir_ / "m"}, {.token = 22})), (Begins{0, 2, 4, 5, 6}));
  // Borders of several files, and of a part.
  TokenStream twice = open({dir_ / "m", dir_ / "m"});
  EXPECT_EQ(begins_of(twice), (Begins{0, 2, 5, 6, 8, 10, 13, 14}));
  twice.narrow_to(3, 11);
  EXPECT_EQ(begins_of(twice), (Begins{0, 2, 3, 5, 7}));
  EXPECT_EQ(twice.num_unmarked_borders(), 4);
  EXPECT_EQ(begins_of(open({dir_ / "m"}).of_file(0)), (Begins{0, 2, 5, 6}));
}

TEST_F(Documents, RowsOfADatasetAreSome) {
  const Ids ids = {1, 2, 3, 4, 5, 6};
  const auto write = [&](const std::vector<i64>& shape) {
    const std::vector<i64> offsets = create_hdf5(dir_ / "x.h5", {{{"tokens", DType::U16, shape}}}, {});
    std::fstream out(dir_ / "x.h5", std::ios::binary | std::ios::in | std::ios::out);
    out.seekp(offsets[0]);
    const std::string data = bin_bytes(ids);
    out.write(data.data(), std::ssize(data));
    out.close();
    return begins_of(open({dir_ / "x.h5"}));
  };
  EXPECT_EQ(write({6}), (Begins{0}));
  EXPECT_EQ(write({6, 1}), (Begins{0}));
  EXPECT_EQ(write({2, 3}), (Begins{0, 3}));
  EXPECT_EQ(write({1, 3, 2}), (Begins{0, 2, 4}));
  EXPECT_THAT(remarks_of(open({dir_ / "x.h5"})), HasSubstr("3 documents by the rows of its dataset"));
}

TEST_F(Documents, LinesOfJsonAreSome) {
  const std::string lines =
      file("a.jsonl", "{\"text\": \"abc\"}\n\n{\"text\": \"\"}\n{\"text\": \"d\"}\n{\"text\": \"ef\"}\n");
  EXPECT_EQ(begins_of(open({lines})), (Begins{0, 3, 4}));
  EXPECT_EQ(begins_of(open({lines}, {.token = 0})), (Begins{0, 4, 5, 7}));
  const TokenStream front = open({lines}, {.token = 0, .at = DocumentTokenAt::Begin});
  EXPECT_EQ(begins_of(front), (Begins{0, 4, 5, 7}));
  Ids ids(10);
  front.read(0, ids, kVocab);
  EXPECT_EQ(ids, (Ids{0, 'a', 'b', 'c', 0, 0, 'd', 0, 'e', 'f'}));
  EXPECT_THAT(front.fingerprints()[0].reading, HasSubstr("0 before each"));
  // Borders are the same for any number of threads, in stretches of any size.
  std::string many;
  Begins want;
  i64 at = 0;
  for (int i = 0; i < 3000; ++i) {
    const i64 n = (i * 37) % 11;
    many += "{\"text\": \"" + std::string(static_cast<size_t>(n), 'x') + "\"}\n";
    if (n > 0) want.push_back(at);
    at += n;
  }
  const std::vector<std::string> files = {file("many.jsonl", many)};
  for (const int threads : {1, 2, 5})
    EXPECT_EQ(begins_of(TokenStream(files, {.num_threads = threads, .documents = {.packed = true}})), want) << threads;
}

// Texts of a record that have the token at their border already, as its owner may have written them: TRL adds none to
// them either.
TEST_F(Documents, OfTextsThatHaveTheTokenGetNoSecondOne) {
  const auto read = [&](const std::vector<std::string>& lines, DocumentRule rule, std::string want, i64 had) {
    std::string text;
    for (const std::string& line : lines) text += line + "\n";
    const TokenStream stream = open({file("t.jsonl", text)}, rule);
    Ids ids(static_cast<size_t>(stream.num_tokens())), targets = ids;
    stream.read(0, ids, kVocab);
    stream.read_targets(0, targets, kVocab);
    // Ids that are no target stand in upper case, and the token as an underscore.
    std::string got;
    for (size_t i = 0; i < ids.size(); ++i) {
      const char c = static_cast<char>(ids[i]);
      got += targets[i] != kNone ? c : c == '|' ? '_' : static_cast<char>(std::toupper(c));
    }
    EXPECT_EQ(got, want) << text;
    const std::string note = fmt::format("{} of its {} records", had, lines.size());
    const ::testing::Matcher<std::string> says =
        had > 0 ? HasSubstr(note) : ::testing::Matcher<std::string>(Not(HasSubstr("already")));
    EXPECT_THAT(remarks_of(stream), says) << text;
  };
  const DocumentRule end{.token = '|'}, begin{.token = '|', .at = DocumentTokenAt::Begin};
  const auto text = [](const char* t) { return fmt::format(R"({{"text": "{}"}})", t); };
  const auto prompt = [](const char* p, const char* c, int weight = 1) {
    return fmt::format(R"({{"prompt": "{}", "completion": "{}", "weight": {}}})", p, c, weight);
  };
  read({text("a"), text("b|"), text("|"), text(""), text("c|d")}, end, "a|b|||c|d|", 2);
  read({text("a"), text("b")}, end, "a|b|", 0);
  read({text("a||")}, end, "a||", 1);  // only one is at the border
  read({text("a"), text("|b"), text("|"), text("")}, begin, "|a|b||", 2);
  read({prompt("p", "c"), prompt("q", "d|"), prompt("r|", "e")}, end, "Pc|Qd|R_e|", 1);
  read({prompt("p|", ""), prompt("q", "d")}, end, "P|Qd|", 1);  // the end of the completion is the text's
  read({prompt("p", "c"), prompt("|q", "d")}, begin, "|Pc|Qd", 1);
  read({prompt("p", "c", 0), prompt("q", "d|", 0), prompt("r", "e")}, end, "PC_QD_Re|", 1);
  // The end of a conversation is its template's.
  const ChatTemplateConfig chat{.user = "U{content}", .assistant = "A{content}|"};
  const auto message = [](const char* role) { return fmt::format(R"({{"role": "{}", "content": "c"}})", role); };
  const auto answer = fmt::format(R"({{"messages": [{}, {}]}})", message("user"), message("assistant")),
             question = fmt::format(R"({{"messages": [{}, {}]}})", message("assistant"), message("user"));
  const std::vector<std::string> files = {file("m.jsonl", answer + "\n" + question + "\n")};
  const TokenStream talk(files, {.documents = {.apart = true, .token = '|'}, .chat_template = chat});
  Ids ids(static_cast<size_t>(talk.num_tokens()));
  talk.read(0, ids, kVocab);
  EXPECT_EQ(std::string(ids.begin(), ids.end()), "UcAc|Ac|Uc|");
  EXPECT_THAT(remarks_of(talk), HasSubstr("1 of its 2 records"));
}

// Without data.document_token the tokenizer's end of text is the border of texts.
TEST_F(Documents, OfTextsThatEndWithTheTokenizersEndOfText) {
  const auto tokenizer = open_tokenizer(test_data("tokenizers/gpt2-files"));
  const std::optional<i32> eos = tokenizer->special(SpecialToken::Eos);
  ASSERT_TRUE(eos);
  const std::string name = tokenizer->decode(std::vector{*eos});
  const std::string lines = file("e.jsonl", fmt::format("{{\"text\": \"a{}\"}}\n{{\"text\": \"a\"}}\n", name));
  const TokenStream stream(std::vector{lines}, {.tokenizer = test_data("tokenizers/gpt2-files")});
  Ids ids(static_cast<size_t>(stream.num_tokens())), alone;
  stream.read(0, ids, i64{1} << 20);
  tokenizer->encode("a", alone);
  alone.push_back(*eos);
  const Ids once = alone;
  alone.insert(alone.end(), once.begin(), once.end());
  EXPECT_EQ(ids, alone);
  EXPECT_THAT(remarks_of(stream),
              HasSubstr(fmt::format("1 of its 2 records end with the tokenizer's end of text {} already", *eos)));
}

TEST_F(Documents, PromptsAndMessagesAreOnesToo) {
  const std::string prompts =
      file("p.jsonl", "{\"prompt\": \"a\", \"completion\": \"bc\"}\n{\"prompt\": \"d\", \"completion\": \"e\"}\n");
  EXPECT_EQ(begins_of(open({prompts})), (Begins{0, 3}));
  const std::string chat =
      file("c.jsonl",
           "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}]}\n"
           "{\"messages\": [{\"role\": \"assistant\", \"content\": \"b\"}]}\n");
  EXPECT_EQ(begins_of(open({chat})).size(), 2u);
}

TEST_F(Documents, WhereNothingMarksThemIsSaid) {
  const std::string plain = file("a.bin", bin_bytes({5, 6, 7, 8})), good = file("b.bin", bin_bytes({5, 0, 7, 0}));
  EXPECT_THAT(remarks_of(open({plain}, {.token = 0})), AllOf(HasSubstr("W data.document_token 0 occurs nowhere in"),
                                                             HasSubstr("a.bin'"), HasSubstr("one document")));
  EXPECT_THAT(remarks_of(open({plain, good, plain}, {.token = 0})), HasSubstr("and 1 other data file,"));
  EXPECT_THAT(remarks_of(open({good}, {.token = 0})), IsEmpty());
  EXPECT_THAT(remarks_of(TokenStream(std::vector{plain}, {.documents = {.token = 0}})), IsEmpty());  // nobody asks
  const std::string text = file("a.txt", "no end");
  EXPECT_THAT(remarks_of(open({text}, {.token = 0})), HasSubstr("occurs nowhere"));
  // The token where the other value of document_token_at would have it.
  const std::string front = file("f.bin", bin_bytes({0, 5, 6, 0, 7}));
  EXPECT_THAT(remarks_of(open({front}, {.token = 0})),
              AllOf(HasSubstr("begins with data.document_token 0 and does not end with it"),
                    HasSubstr("data.document_token_at to \"begin\"")));
  EXPECT_THAT(remarks_of(open({front}, {.token = 0, .at = DocumentTokenAt::Begin})), IsEmpty());
  EXPECT_THAT(remarks_of(open({good}, {.token = 0, .at = DocumentTokenAt::Begin})),
              HasSubstr("data.document_token_at to \"end\""));

  DataConfig config;
  config.train = {plain};
  config.seq_length = 2;
  config.split = 0;
  config.packing = DataPacking::BestFit;
  expect_error(Errc::Config, AllOf(HasSubstr("data.packing: needs data.document_token"), HasSubstr("a.bin")),
               [&] { open_dataset(config, *next_token_of_documents(-1)); });
  config.packing = DataPacking::None;
  config.separate_documents = true;
  expect_error(Errc::Config, HasSubstr("data.separate_documents: needs data.document_token"),
               [&] { open_dataset(config, *next_token()); });
  config.train = {plain, plain};
  EXPECT_NO_THROW(open_dataset(config, *next_token()));
}

TEST_F(Documents, ATokenIsAddedWhereAskedAndItIsMissing) {
  file("m.bin", bin_bytes({11, 12, 21, 0, 31, 0, 41}));
  file("m.idx", idx_bytes({2, 2, 2, 1}, {0, 1, 2, 3, 4}));
  const TokenStream end = open({dir_ / "m"}, {.token = 0, .adds_token = true});
  Ids ids(9);
  ASSERT_EQ(end.num_tokens(), 9);
  end.read(0, ids, kVocab);
  EXPECT_EQ(ids, (Ids{11, 12, 0, 21, 0, 31, 0, 41, 0}));
  EXPECT_EQ(begins_of(end), (Begins{0, 3, 5, 7}));
  EXPECT_THAT(remarks_of(end), HasSubstr("data.document_token 0 was added to 2 of its 4 documents"));
  EXPECT_NE(end.fingerprints()[0].hash, open({dir_ / "m"}, {.token = 0}).fingerprints()[0].hash);
  const TokenStream front = open({dir_ / "m"}, {.token = 0, .at = DocumentTokenAt::Begin, .adds_token = true});
  ids.resize(11);
  ASSERT_EQ(front.num_tokens(), 11);  // 0 of the data begins documents, too
  front.read(0, ids, kVocab);
  EXPECT_EQ(ids, (Ids{0, 11, 12, 0, 21, 0, 0, 31, 0, 0, 41}));
  // Text of one byte an id, a last document, and lines that have it already.
  const TokenStream text = open({file("a.txt", "ab"), file("b.txt", "c;")}, {.token = ';', .adds_token = true});
  ids.resize(5);
  text.read(0, ids, kVocab);
  EXPECT_EQ(ids, (Ids{'a', 'b', ';', 'c', ';'}));
  const TokenStream lines = open({file("a.jsonl", "{\"text\": \"ab\"}\n")}, {.token = 0, .adds_token = true});
  EXPECT_EQ(lines.num_tokens(), 3);
  EXPECT_THAT(remarks_of(open({file("c.bin", bin_bytes({5, 0, 6, 7, 0}))}, {.token = 0, .adds_token = true})),
              HasSubstr("adds nothing: all 2 documents have 0 already"));
  expect_error(Errc::Config, AllOf(HasSubstr("data.add_document_token"), HasSubstr("a.txt")),
               [&] { open({dir_ / "a.txt"}, {.token = 300, .adds_token = true}); });
  // An id outside the vocabulary is found in the copy, too.
  expect_error(Errc::Mismatch, HasSubstr("token 41 at position 7"), [&] { end.check(40); });
}

// Samples of a stream that is cut: targets across borders, and where documents begin.
struct Row {
  Ids inputs, targets, begins;
};
Row row_of(const BatchLoader& loader, i64 sample, i64 T) {
  const auto n = static_cast<size_t>(T);
  Row row{Ids(n, -5), Ids(n, -5), Ids(n, -5)};
  loader.load_sequential(sample, 0, row.inputs, row.targets, row.begins);
  return row;
}

TEST_F(Documents, InSamplesThatAreCutFromTheStream) {
  const std::string a = file("a.bin", bin_bytes({11, 12, 0, 21, 22, 23, 0, 31, 32})),
                    b = file("b.bin", bin_bytes({41, 42, 0, 51}));
  const auto loader = [&](DocumentRule rule) {
    return BatchLoader(open({a, b}, rule), {1, 1, 4}, 1, kVocab, next_token());
  };
  const BatchLoader end = loader({.token = 0});
  EXPECT_EQ(end.num_samples(), 3);
  EXPECT_EQ(row_of(end, 0, 4).targets, (Ids{12, 0, 21, 22}));
  EXPECT_EQ(row_of(end, 0, 4).begins, (Ids{0, 0, 0, 3}));
  EXPECT_EQ(row_of(end, 1, 4).begins, (Ids{0, 0, 0, 3}));         // 22 23 0 | 31
  EXPECT_EQ(row_of(end, 2, 4).targets, (Ids{kNone, 42, 0, 51}));  // no token ends 32
  EXPECT_EQ(row_of(end, 2, 4).begins, (Ids{0, 1, 1, 1}));
  const BatchLoader apart = loader({.token = 0, .loss_across = false});
  EXPECT_EQ(row_of(apart, 0, 4).targets, (Ids{12, 0, kNone, 22}));
  EXPECT_EQ(row_of(apart, 1, 4).targets, (Ids{23, 0, kNone, 32}));
  EXPECT_EQ(row_of(apart, 2, 4).targets, (Ids{kNone, 42, 0, kNone}));  // beyond the end of the sample
  const BatchLoader front = loader({.token = 0, .at = DocumentTokenAt::Begin, .loss_across = false});
  EXPECT_EQ(row_of(front, 0, 4).targets, (Ids{12, 0, 21, 22}));
  EXPECT_EQ(row_of(front, 0, 4).begins, (Ids{0, 0, 2, 2}));
  EXPECT_EQ(row_of(front, 2, 4).targets, (Ids{kNone, 42, 0, 51}));
  // Documents that nobody keeps apart.
  const BatchLoader joined(TokenStream(std::vector{a, b}, {.documents = {.token = 0}}), {1, 1, 4}, 1, kVocab,
                           next_token());
  EXPECT_EQ(row_of(joined, 2, 4).targets, (Ids{41, 42, 0, 51}));
  // A step of curriculum learning takes the first tokens of each sample.
  Ids inputs(8), targets(8), begins(8);
  const BatchLoader two(open({a, b}, {.token = 0}), {2, 1, 4}, 1, kVocab, next_token());
  two.load_step(0, 1, 0, 3, inputs, targets, begins);
  Ids whole_inputs(8), whole_targets(8), whole_begins(8);
  two.load(0, 0, 0, whole_inputs, whole_targets, whole_begins);
  for (size_t t = 0; t < 3; ++t) {
    EXPECT_EQ(begins[t], whole_begins[t]);
    EXPECT_EQ(begins[3 + t], whole_begins[4 + t]);
    EXPECT_EQ(inputs[3 + t], whole_inputs[4 + t]);
  }
}

TEST_F(Documents, InSamplesOfMaskedTokens) {
  const std::string a = file("a.bin", bin_bytes({11, 12, 9, 21, 22, 23, 9, 31, 32, 33}));
  MlmConfig mlm;
  mlm.cls_token = 1, mlm.sep_token = 2, mlm.mask_token = 3;
  const BatchLoader loader(open({a}, {.token = 9}), {1, 1, 7}, 1, kVocab, masked_tokens(mlm));
  EXPECT_EQ(row_of(loader, 0, 7).begins, (Ids{0, 0, 0, 0, 4, 4, 4}));  // [CLS] 11 12 9 | 21 22 [SEP]
  EXPECT_EQ(row_of(loader, 1, 7).begins, (Ids{0, 0, 0, 3, 3, 3, 3}));  // the data end, the document does not
  const BatchLoader four(open({a}, {.token = 9}), {1, 1, 5}, 1, kVocab, masked_tokens(mlm));
  EXPECT_EQ(row_of(four, 0, 5).begins, (Ids{0, 0, 0, 0, 4}));  // [CLS] 11 12 9 | [SEP]
  // A border that no token marks leaves [SEP] in the document before it, as the end of the data does.
  const std::string b = file("b.bin", bin_bytes({21, 22, 23})), c = file("c.bin", bin_bytes({31, 32, 33}));
  const BatchLoader files(open({b, c}, {.apart = true}), {1, 1, 5}, 1, kVocab, masked_tokens(mlm));
  EXPECT_EQ(row_of(files, 0, 5).begins, (Ids{0, 0, 0, 0, 0}));
  EXPECT_EQ(row_of(files, 1, 5).begins, (Ids{0, 0, 0, 0, 0}));
}

TEST_F(Documents, InPackedSamples) {
  const auto packed = [&](const std::string& name, DocumentRule rule, i64 T) {
    rule.packed = true;
    return BatchLoader(open({name}, rule), {1, 1, T}, 1, kVocab, next_token_of_documents(rule.token));
  };
  // llm.c's way: no token ends the last document.
  const std::string both = file("both.bin", bin_bytes({0, 21, 22, 23, 0, 31, 32, 33, 34, 35, 36}));
  const Row end = row_of(packed(both, {.token = 0}, 12), 0, 12);
  EXPECT_EQ(end.inputs, (Ids{31, 32, 33, 34, 35, 36, 21, 22, 23, 0, 0, 0}));
  EXPECT_EQ(end.targets, (Ids{32, 33, 34, 35, 36, kNone, 22, 23, 0, kNone, kNone, kNone}));
  EXPECT_EQ(end.begins, (Ids{0, 0, 0, 0, 0, 0, 6, 6, 6, 6, 10, 11}));
  const Row front = row_of(packed(both, {.token = 0, .at = DocumentTokenAt::Begin}, 12), 0, 12);
  EXPECT_EQ(front.inputs, (Ids{0, 31, 32, 33, 34, 35, 36, 0, 21, 22, 23, 0}));
  EXPECT_EQ(front.targets, (Ids{31, 32, 33, 34, 35, 36, kNone, 21, 22, 23, 0, kNone}));  // 0 ends 23's document
  EXPECT_EQ(front.begins, (Ids{0, 0, 0, 0, 0, 0, 0, 7, 7, 7, 7, 11}));
  // Without a token: filled with 0.
  file("m.bin", bin_bytes({11, 12, 13, 21, 22}));
  file("m.idx", idx_bytes({3, 2}, {0, 1, 2}));
  const BatchLoader by_index = packed(dir_ / "m", {}, 6);
  EXPECT_EQ(row_of(by_index, 0, 6).inputs, (Ids{11, 12, 13, 21, 22, 0}));
  EXPECT_EQ(row_of(by_index, 0, 6).targets, (Ids{12, 13, kNone, 22, kNone, kNone}));
  EXPECT_EQ(row_of(by_index, 0, 6).begins, (Ids{0, 0, 0, 3, 3, 5}));
  // A long document is cut; its end is predicted once.
  const std::string cut = file("cut.bin", bin_bytes({0, 1, 2, 3, 0, 5}));
  const BatchLoader pieces = packed(cut, {.token = 0, .at = DocumentTokenAt::Begin}, 3);
  EXPECT_EQ(row_of(pieces, 0, 3).targets, (Ids{1, 2, 3}));
  EXPECT_EQ(row_of(pieces, 1, 3).inputs, (Ids{0, 5, 3}));
  EXPECT_EQ(row_of(pieces, 1, 3).targets, (Ids{5, kNone, 0}));
}

TEST_F(Documents, AreCounted) {
  const std::string a = file("a.bin", bin_bytes({11, 12, 0, 21, 22, 23, 24, 25, 26, 0, 31, 0, 41}));
  const auto loader = [&](DocumentRule rule, std::shared_ptr<const Objective> objective) {
    return BatchLoader(TokenStream(std::vector{a}, {.documents = rule}), {1, 1, 4}, 1, kVocab, std::move(objective));
  };
  EXPECT_FALSE(loader({.token = 0}, next_token()).survey_documents());
  DocumentSurvey survey = loader({.apart = true, .token = 0}, next_token()).survey_documents().value();
  EXPECT_EQ(survey.documents, 4);
  EXPECT_EQ(survey.tokens, 13);
  EXPECT_EQ(survey.median, 2.5);  // of 1, 2, 3 and 7
  EXPECT_EQ(survey.longest, 7);
  EXPECT_EQ(survey.cut, 1);  // tokens 3 to 9 lie in three samples
  EXPECT_EQ(survey.samples, 3);
  EXPECT_EQ(survey.full, 1);
  survey = loader({.apart = true, .packed = true, .token = 0}, next_token_of_documents(0)).survey_documents().value();
  EXPECT_EQ(survey.documents, 4);
  EXPECT_EQ(survey.cut, 1);
  EXPECT_EQ(survey.samples, 4);  // 4, 3, 3, and 2
  EXPECT_DOUBLE_EQ(survey.full, 12.0 / 16);
  EXPECT_THAT(
      survey.text(),
      HasSubstr("4 documents of 13 tokens, the median of 2.5 and the longest of 7; 1 is cut; 4 samples, 75.0 % full"));
}

// All its targets lie in one sample, though its last token is the first one of the next sample.
TEST_F(Documents, OfOneTokenMoreThanASampleAreNotCut) {
  const std::string a = file("a.bin", bin_bytes({11, 12, 13, 14, 0}));
  for (const bool packed : {false, true}) {
    const DocumentRule rule{.apart = true, .packed = packed, .token = 0};
    const BatchLoader loader(TokenStream(std::vector{a}, {.documents = rule}), {1, 1, 4}, 1, kVocab,
                             packed ? next_token_of_documents(0) : next_token());
    EXPECT_EQ(loader.survey_documents().value().cut, 0) << packed;
  }
}

// A document that data.split divides does not lie in one sample as a whole, whatever its length.
TEST_F(Documents, ThatTheSplitCutsAreCountedAsCut) {
  const std::string a = file("a.bin", bin_bytes({11, 0, 21, 22, 23, 0, 31, 0, 41, 42, 0})),
                    b = file("b.bin", bin_bytes({51, 52}));
  const auto cut = [&](bool packed, DocumentTokenAt at, i64 begin, i64 end) {
    const DocumentRule rule{.apart = true, .packed = packed, .token = 0, .at = at};
    TokenStream stream(std::vector{a, b}, {.documents = rule});
    stream.narrow_to(begin, end);
    return BatchLoader(std::move(stream), {1, 1, packed ? 12 : 4}, 1, kVocab,
                       packed ? next_token_of_documents(0) : std::unique_ptr<const Objective>(next_token()))
        .survey_documents()
        .value()
        .cut;
  };
  constexpr DocumentTokenAt kEnd = DocumentTokenAt::End, kBegin = DocumentTokenAt::Begin;
  EXPECT_EQ(cut(true, kEnd, 0, 13), 0);
  EXPECT_EQ(cut(true, kEnd, 0, 4), 1);
  EXPECT_EQ(cut(true, kEnd, 4, 13), 1);
  EXPECT_EQ(cut(true, kEnd, 3, 5), 1);  // at both of its ends
  EXPECT_EQ(cut(true, kEnd, 3, 10), 2);
  EXPECT_EQ(cut(true, kEnd, 2, 11), 0);  // at borders of the token and of a file
  EXPECT_EQ(cut(true, kEnd, 1, 13), 1);
  EXPECT_EQ(cut(true, kBegin, 1, 10), 0);
  EXPECT_EQ(cut(true, kBegin, 2, 10), 1);
  EXPECT_EQ(cut(true, kBegin, 5, 9), 1);
  // Samples of 4: one document lies in two of them.
  EXPECT_EQ(cut(false, kEnd, 0, 13), 1);
  EXPECT_EQ(cut(false, kEnd, 0, 10), 2);
  EXPECT_EQ(cut(false, kEnd, 4, 13), 1);
}

TEST_F(Documents, OfTheBeginTokenAlonePredictTheNextWhenPacked) {
  const std::string a = file("a.bin", bin_bytes({0, 0, 0, 21, 22, 0, 0, 31}));
  const DocumentRule rule{.apart = true, .packed = true, .token = 0, .at = DocumentTokenAt::Begin};
  const BatchLoader loader(TokenStream(std::vector{a}, {.documents = rule}), {1, 1, 7}, 1, kVocab,
                           next_token_of_documents(-1));
  std::multiset<i32> targets;
  for (i64 k = 0; k < loader.num_samples(); ++k) {
    for (const i32 t : row_of(loader, k, 7).targets) {
      if (t != kNone) targets.insert(t);
    }
  }
  EXPECT_EQ(targets, (std::multiset<i32>{0, 0, 21, 22, 0, 0, 31}));
}

// Samples depend on all tokens of the part, whose number data.split changes.
TEST_F(Documents, PackedInAnotherWayAreRefusedOnAResume) {
  const std::string a = file("a.bin", bin_bytes({11, 12, 0, 21, 22, 23, 0, 31, 32, 0, 41, 42, 0}));
  const auto identity = [&](i64 tokens) {
    const DocumentRule rule{.apart = true, .packed = true, .token = 0};
    TokenStream stream(std::vector{a}, {.documents = rule});
    stream.narrow_to(0, tokens);
    return BatchLoader(std::move(stream), {1, 1, 8}, 1, kVocab, next_token_of_documents(0)).identity();
  };
  const DataIdentity all = identity(13), less = identity(12);
  ASSERT_EQ(all.num_samples, less.num_samples);
  EXPECT_NO_THROW(check_same_data(parse_data_identity(data_identity_json(all)), all));
  EXPECT_ERROR(check_same_data(parse_data_identity(data_identity_json(all)), less), Errc::Mismatch, "data.split");
}

TEST_F(Documents, OfAnIndexMayBeOneAndMayHaveTheTokenInFront) {
  const std::string one = file("one.bin", bin_bytes({21, 22, 23}));
  file("one.idx", idx_bytes({3}, {0, 1}));
  EXPECT_THAT(remarks_of(open({one}, {})), AllOf(HasSubstr("1 document by its index"), Not(HasSubstr("W "))));
  const std::string front = file("front.bin", bin_bytes({0, 21, 22, 0, 31}));
  file("front.idx", idx_bytes({3, 2}, {0, 1, 2}));
  EXPECT_THAT(remarks_of(open({front}, {.token = 0})),
              HasSubstr("2 documents by its index, of which 2 do not end with data.document_token 0; 2 begin with it: "
                        "set data.document_token_at to \"begin\""));
  EXPECT_THAT(remarks_of(open({front}, {.token = 0, .at = DocumentTokenAt::Begin})), Not(HasSubstr("set data")));
  // Counted before the token is added.
  EXPECT_THAT(remarks_of(open({front}, {.token = 0, .adds_token = true})), HasSubstr("2 documents by its index"));
}

TEST_F(Documents, OfFilesThatDoNotKnowThemAreRefusedOrWarnedOf) {
  const std::string a = file("a.bin", bin_bytes({21, 22, 23})), b = file("b.bin", bin_bytes({31, 32}));
  const DocumentRule rule{.apart = true};
  EXPECT_FALSE(TokenStream(std::vector{a}, {.documents = rule}).knows_documents());
  EXPECT_FALSE(TokenStream(std::vector{file("a.txt", "abc")}, {.documents = rule}).knows_documents());
  DataConfig config;
  config.train = {a, b};
  config.validation = {a};
  config.separate_documents = true;
  config.seq_length = 2;
  EXPECT_ERROR(open_dataset(config, *next_token()), Errc::Config,
               "needs data.document_token: nothing else tells where documents begin in '" + a);
  const auto remarks = TokenStream(std::vector{a, b}, {.documents = rule}).remarks();
  ASSERT_FALSE(remarks.empty());
  EXPECT_EQ(remarks.back().level, LogLevel::Warning);
  EXPECT_THAT(remarks.back().text, HasSubstr("without data.document_token nothing tells where documents begin in '" +
                                             a + "' and 1 other data file: each file is one document"));
}

// Checkpoints of versions that knew documents by the token at their end alone.
TEST_F(Documents, OfAnOlderRunAreTheSameOrItSaysSo) {
  const auto identity = [&](const std::vector<std::string>& files, DocumentRule rule) {
    return BatchLoader(open(files, rule), {1, 1, 4}, 1, kVocab,
                       rule.packed ? next_token_of_documents(rule.token) : next_token())
        .identity();
  };
  const auto older = [](DataIdentity now) {
    now.documents.clear();
    return parse_data_identity(data_identity_json(now));
  };
  const std::string ended = file("e.bin", bin_bytes({11, 12, 13, 0, 21, 22, 0})),
                    open_end = file("o.bin", bin_bytes({11, 12, 13, 14, 0, 21, 22}));
  const DataIdentity same = identity({ended}, {.token = 0});
  EXPECT_NO_THROW(check_same_data(older(same), same));
  EXPECT_EQ(difference_of_samples(older(same), same), "");
  EXPECT_NO_THROW(check_same_data(parse_data_identity(data_identity_json(same)), same));
  // A file that the token does not end merged with the next one.
  const DataIdentity two = identity({open_end, ended}, {.token = 0});
  expect_error(Errc::Mismatch,
               AllOf(HasSubstr("an older version of libds"), HasSubstr("which 1 of the present borders lack")),
               [&] { check_same_data(older(two), two); });
  EXPECT_NO_THROW(check_same_data(parse_data_identity(data_identity_json(two)), two));
  // The same samples; a document of one of them saw the next.
  const std::string shorter = file("s.bin", bin_bytes({11, 12, 0, 0, 21, 22}));
  const auto packs = [&](const std::string& name, i64 T) {
    return BatchLoader(open({name}, {.packed = true, .token = 0}), {1, 1, T}, 1, kVocab, next_token_of_documents(0))
        .identity();
  };
  EXPECT_EQ(packs(shorter, 8).older_samples, "");  // the last one in the sample
  const DataIdentity exposed = packs(file("x.bin", bin_bytes({11, 0, 21, 22, 23})), 8);
  EXPECT_NO_THROW(check_same_data(older(exposed), exposed));
  EXPECT_THAT(difference_of_samples(older(exposed), exposed),
              HasSubstr("1 document without the token at the end saw the next one"));
  EXPECT_EQ(difference_of_samples(exposed, exposed), "");
}

TEST_F(Documents, ARuleIsReadFromItsDescription) {
  EXPECT_EQ(DocumentRule{}.description(), "");
  for (const i64 token : {-1, 0, 77}) {
    for (const DocumentTokenAt at : {DocumentTokenAt::End, DocumentTokenAt::Begin}) {
      for (const bool loss : {false, true}) {
        const DocumentRule rule{.apart = true, .token = token, .at = at, .loss_across = loss};
        const std::optional<DocumentRule> read = DocumentRule::parse(rule.description());
        ASSERT_TRUE(read) << rule.description();
        EXPECT_EQ(read->token, token);
        EXPECT_EQ(read->at, token >= 0 ? at : DocumentTokenAt::End);
        const bool has_effect = token >= 0 && at == DocumentTokenAt::End;
        EXPECT_EQ(read->loss_across, loss || !has_effect) << rule.description();
      }
    }
  }
  for (const char* other : {"", "borders", "borders of files and token", "borders of files and token x at the end",
                            "borders of files and token 7", "borders of files and token -7 at the end",
                            "borders of files and token 99999999999999999999 at the end", "borders of files and more",
                            "borders of files, no loss across them, and more"})
    EXPECT_FALSE(DocumentRule::parse(other)) << other;
}

// A resume is refused by the key that has changed, with both values.
TEST_F(Documents, ThatAreReadDifferentlyAreRefusedByTheirKey) {
  const std::string name = file("a.bin", bin_bytes({11, 12, 8, 0, 21, 22, 8, 0, 31, 32, 33, 8, 34, 0}));
  const auto identity = [&](DocumentRule rule) {
    return BatchLoader(TokenStream(std::vector{name}, {.documents = rule}), {1, 1, 4}, 1, kVocab,
                       rule.packed ? next_token_of_documents(rule.token) : next_token())
        .identity();
  };
  const DocumentRule end{.apart = true, .token = 0}, packed{.apart = true, .packed = true, .token = 0},
      begin{.apart = true, .token = 0, .at = DocumentTokenAt::Begin};
  const auto with = [](DocumentRule rule, auto DocumentRule::*member, auto value) {
    rule.*member = value;
    return rule;
  };
  const struct {
    DocumentRule was, is;
    const char* why;
  } rows[] = {
      {end, packed, "data.packing is best_fit, but the run was started with none"},
      {packed, end, "data.packing is none, but the run was started with best_fit"},
      {end, with(end, &DocumentRule::apart, false),
       "data.separate_documents is false, but the run was started with true"},
      {end, with(end, &DocumentRule::token, 8), "data.document_token is 8, but the run was started with 0"},
      {packed, with(packed, &DocumentRule::token, 8), "data.document_token is 8, but the run was started with 0"},
      {end, begin, "data.document_token_at is begin, but the run was started with end"},
      {packed, with(packed, &DocumentRule::at, DocumentTokenAt::Begin), "data.document_token_at is begin"},
      {end, with(end, &DocumentRule::loss_across, false),
       "data.loss_across_documents is false, but the run was started with true"},
      {with(end, &DocumentRule::loss_across, false), end, "data.loss_across_documents is true"},
  };
  for (const auto& row : rows) {
    const DataIdentity saved = parse_data_identity(data_identity_json(identity(row.was)));
    expect_error(Errc::Mismatch, HasSubstr(row.why), [&] { check_same_data(saved, identity(row.is)); });
    EXPECT_NO_THROW(check_same_data(saved, identity(row.was))) << row.why;
  }
  // A key that changes nothing.
  EXPECT_NO_THROW(check_same_data(identity(with(begin, &DocumentRule::loss_across, false)), identity(begin)));
  // Tokens that are added.
  file("m.bin", bin_bytes({11, 12, 21, 22, 0, 31, 32}));
  file("m.idx", idx_bytes({2, 3, 2}, {0, 1, 2, 3}));
  const auto of_index = [&](bool adds) {
    DocumentRule rule = end;
    rule.adds_token = adds;
    return BatchLoader(open({dir_ / "m"}, rule), {1, 1, 4}, 1, kVocab, next_token()).identity();
  };
  expect_error(Errc::Mismatch, AllOf(HasSubstr("m.bin"), HasSubstr("data.add_document_token")),
               [&] { check_same_data(of_index(true), of_index(false)); });
  expect_error(Errc::Mismatch, AllOf(HasSubstr("m.bin"), HasSubstr("data.add_document_token")),
               [&] { check_same_data(of_index(false), of_index(true)); });
  EXPECT_NO_THROW(check_same_data(of_index(true), of_index(true)));
  // Texts, where documents do not matter and each has its token.
  const std::string lines = file("a.jsonl", "{\"text\": \"some text\"}\n");
  const auto of_lines = [&](i64 token) {
    return BatchLoader(TokenStream(std::vector{lines}, {.documents = {.token = token}}), {1, 1, 4}, 1, kVocab,
                       next_token())
        .identity();
  };
  expect_error(Errc::Mismatch,
               AllOf(HasSubstr("8 behind each"), HasSubstr("7 behind each"), HasSubstr("data.document_token")),
               [&] { check_same_data(of_lines(7), of_lines(8)); });
}

// Random documents in random files, with random cuts: what every question says is what was written.
TEST_F(Documents, AtRandom) {
  std::mt19937 rng(7);
  const auto below = [&](int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); };
  for (int round = 0; round < 60; ++round) {
    const DocumentTokenAt at = below(2) == 0 ? DocumentTokenAt::End : DocumentTokenAt::Begin;
    const i32 token = 7;
    std::vector<std::string> files;
    Begins want;
    i64 position = 0;
    for (int f = 0; f <= below(3); ++f) {
      Ids ids;
      std::vector<i32> lengths;
      std::vector<i64> ends = {0};
      const bool has_index = below(2) == 0;
      for (int d = 0, n = 1 + below(6); d < n; ++d) {
        Ids document;
        for (int i = 0, length = 1 + below(below(4) == 0 ? 200 : 6); i < length; ++i)
          document.push_back(10 + below(50));
        // The token is missing in some, where something else knows the border.
        const bool is_last = d + 1 == n, is_first = d == 0;
        const bool needs = !has_index && !(at == DocumentTokenAt::End ? is_last : is_first);
        if (needs || below(2) == 0)
          at == DocumentTokenAt::End ? document.push_back(token) : (void)document.insert(document.begin(), token);
        want.push_back(position + std::ssize(ids));
        ids.insert(ids.end(), document.begin(), document.end());
        lengths.push_back(static_cast<i32>(document.size()));
        ends.push_back(std::ssize(lengths));
      }
      const std::string name = fmt::format("r{}_{}", round, f);
      file(name + ".bin", bin_bytes(ids));
      if (has_index) file(name + ".idx", idx_bytes(lengths, ends));
      files.push_back(dir_ / (name + ".bin"));
      position += std::ssize(ids);
    }
    TokenStream stream = open(files, {.token = token, .at = at});
    ASSERT_EQ(begins_of(stream), want) << round;
    const i64 begin = below(static_cast<int>(position)), end = begin + 1 + below(static_cast<int>(position - begin));
    stream.narrow_to(begin, end);
    Begins inside = {0};
    for (const i64 b : want)
      if (b > begin && b < end) inside.push_back(b - begin);
    ASSERT_EQ(begins_of(stream), inside) << round;
    Ids found(static_cast<size_t>(end - begin));
    stream.find_documents(0, found);
    for (i64 t = 0; t < end - begin; ++t)
      ASSERT_EQ(found[static_cast<size_t>(t)], *(std::ranges::upper_bound(inside, t) - 1)) << round << " " << t;
  }
}

// Files are scanned in chunks of 2^20 tokens: documents across them, and borders at their ends.
TEST_F(Documents, OfAnyLengthAreWhole) {
  constexpr i64 kChunk = i64{1} << 20;
  for (const i64 at : {kChunk - 1, kChunk, kChunk + 1, 2 * kChunk}) {
    std::string ids(static_cast<size_t>(2 * kChunk + 5), 'x');
    ids[static_cast<size_t>(at)] = '\n';
    const std::string text = file("long.txt", ids);
    EXPECT_EQ(begins_of(open({text}, {.token = '\n'})), (Begins{0, at + 1})) << at;
    EXPECT_EQ(begins_of(open({text}, {.token = '\n', .at = DocumentTokenAt::Begin})), (Begins{0, at})) << at;
    TokenStream part = open({text}, {.token = '\n'});
    part.narrow_to(at - 3, at + 1);
    EXPECT_EQ(begins_of(part), (Begins{0})) << at;
  }
}

// A file that is cut off while it is in use is an error, not a signal.
TEST_F(Documents, OfAFileThatShrinksAreAnError) {
  const std::string a = file("a.bin", bin_bytes(Ids(5000, 5)));
  const TokenStream stream = open({a}, {.token = 7});
  std::filesystem::resize_file(a, 10);
  expect_error(Errc::Corrupt, HasSubstr("shrank"), [&] { (void)stream.document_end(0, 10); });
  expect_error(Errc::Corrupt, HasSubstr("shrank"), [&] { stream.for_each_document([](i64, i64) {}); });
}

// Samples of a program: its own documents, or those that the token marks.
struct OfProgram final : SampleSource {
  explicit OfProgram(Ids its_begins) : begins(std::move(its_begins)) {}
  i64 count() const override { return 1; }
  void sample(i64, RngKey, std::span<i32> inputs, std::span<i32> targets) const override {
    const Ids ids = {5, 7, 6, 7, 8};
    std::ranges::copy(ids, inputs.begin());
    std::ranges::fill(targets, kNone);
  }
  bool documents(i64, std::span<i32> out) const override {
    std::ranges::copy(begins, out.begin());
    return !begins.empty();
  }
  std::string identity() const override { return "five"; }
  Ids begins;
};

TEST_F(Documents, OfAProgram) {
  const auto begins = [](Ids own, DocumentRule rule) {
    const BatchLoader loader(std::make_shared<OfProgram>(std::move(own)), {1, 1, 5}, 1, 61, rule);
    return row_of(loader, 0, 5).begins;
  };
  EXPECT_EQ(begins({}, {.apart = true, .token = 7}), (Ids{0, 0, 2, 2, 4}));
  EXPECT_EQ(begins({}, {.apart = true, .token = 7, .at = DocumentTokenAt::Begin}), (Ids{0, 1, 1, 3, 3}));
  EXPECT_EQ(begins({0, 0, 0, 3, 3}, {.apart = true, .token = 7}), (Ids{0, 0, 0, 3, 3}));
  for (const Ids& wrong : {Ids{1, 1, 2, 3, 3}, Ids{0, 0, 1, 3, 3}, Ids{0, 1, 1, 0, 0}, Ids{0, 0, 0, 4, 4}})
    expect_error(Errc::Mismatch, HasSubstr("sample 0 of the program's 'five': the document of token"),
                 [&] { begins(wrong, {.apart = true}); });
}

}  // namespace documents_test
}  // namespace ds
