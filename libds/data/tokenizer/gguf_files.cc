// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer/gguf_files.h"

#include <algorithm>
#include <bit>
#include <string_view>
#include <vector>

#include "base/gguf.h"
#include "base/json.h"

namespace ds::tokenizer {
namespace {

// Types of tokens, which are those of SentencePiece's pieces.
enum : i64 {
  kNormalToken = 1,
  kUnknownToken = 2,
  kControlToken = 3,
  kUserDefinedToken = 4,
  kUnusedToken = 5,
  kByteToken = 6
};

constexpr std::string_view kAdvice =
    "name another with data.tokenizer or --tokenizer, such as the model's Hugging Face directory";

// How texts are cut before byte-level BPE: tokenizer.ggml.pre, and what the published tokenizer.json of these models
// states.
struct PreRow {
  std::string_view name;
  std::string_view expression;  // empty: that of GPT-2
  bool composes;                // the text is normalised by NFC
  bool takes_whole_words;       // a word that is a token needs no merges
  bool adds_bos;                // where the file does not say
};
constexpr std::string_view kLlama3Words =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen2Words =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr PreRow kPreRows[] = {
    {"gpt-2", "", false, false, false},          {"llama-bpe", kLlama3Words, false, true, true},
    {"llama3", kLlama3Words, false, true, true}, {"llama-v3", kLlama3Words, false, true, true},
    {"qwen2", kQwen2Words, true, false, false},
};

std::string key_of(std::string_view name) { return fmt::format("tokenizer.ggml.{}", name); }

class GgufTokenizer {
 public:
  explicit GgufTokenizer(const std::string& path) : file_(path) {}

  std::map<std::string, std::string> make() {
    const std::string kind = file_.text(key_of("model")).value_or("none");
    if (kind == "none" || kind == "no_vocab") unsupported("contains no tokenizer");
    if (kind != "gpt2" && kind != "llama")
      unsupported(fmt::format("'tokenizer.ggml.model' is \"{}\"; only \"gpt2\" and \"llama\" are supported", kind));
    read_tokens();
    std::map<std::string, std::string> files;
    Json config = common_config();
    if (kind == "gpt2") {
      config["tokenizer_class"] = "PreTrainedTokenizerFast";
      files["tokenizer.json"] = tokenizer_json();
    } else {
      config["tokenizer_class"] = "LlamaTokenizer";
      config["add_bos_token"] = adds("bos", true);
      config["add_eos_token"] = adds("eos", false);
      config["add_prefix_space"] = file_.flag(key_of("add_space_prefix")).value_or(true);
      files["tokenizer.model"] = sentence_piece_model();
    }
    files["tokenizer_config.json"] = config.dump(2);
    if (const Json generation = generation_config(); !generation.empty())
      files["generation_config.json"] = generation.dump(2);
    return files;
  }

 private:
  [[noreturn]] void unsupported(const std::string& why) const {
    throw Error(Errc::Unavailable, fmt::format("{}: {}: {}", file_.path(), why, kAdvice));
  }
  template <class... Args>
  void check(bool ok, fmt::format_string<Args...> format, Args&&... args) const {
    if (!ok)
      throw Error(Errc::Corrupt, fmt::format("{}: {}", file_.path(), fmt::format(format, std::forward<Args>(args)...)));
  }

  void read_tokens() {
    tokens_ = file_.texts(key_of("tokens"));
    types_ = file_.integers(key_of("token_type"));
    check(!tokens_.empty(), "'tokenizer.ggml.tokens' is missing");
    if (types_.empty()) types_.assign(tokens_.size(), kNormalToken);
    check(types_.size() == tokens_.size(), "'tokenizer.ggml.token_type' has {} entries for {} tokens", types_.size(),
          tokens_.size());
  }
  i64 count() const noexcept { return std::ssize(tokens_); }
  i64 type(i64 id) const { return types_[static_cast<size_t>(id)]; }
  bool is_added(i64 id) const { return type(id) == kControlToken || type(id) == kUserDefinedToken; }
  const std::string& token(i64 id) const { return tokens_[static_cast<size_t>(id)]; }

  std::optional<i64> id_of(std::string_view role) const {
    const std::string key = key_of(fmt::format("{}_token_id", role));
    const auto id = file_.integer(key);
    check(!id || (*id >= 0 && *id < count()), "'{}' is {}, and there are {} tokens", key, id.value_or(0), count());
    return id;
  }
  // Whether the token stands before, or after, a text.
  bool adds(std::string_view role, bool otherwise) const {
    return file_.flag(key_of(fmt::format("add_{}_token", role))).value_or(otherwise) && id_of(role);
  }

  Json common_config() const {
    Json config = {{"clean_up_tokenization_spaces", false}};
    constexpr std::pair<const char*, std::string_view> kRoles[] = {{"bos_token", "bos"},
                                                                   {"eos_token", "eos"},
                                                                   {"unk_token", "unknown"},
                                                                   {"pad_token", "padding"},
                                                                   {"mask_token", "mask"}};
    for (const auto& [name, role] : kRoles)
      config[name] = id_of(role) ? Json(token(*id_of(role))) : Json();  // null: not that of the class either
    if (const auto chat = file_.text("tokenizer.chat_template")) config["chat_template"] = *chat;
    return config;
  }

  // All tokens that end a text: of the document, of a turn, of a message.
  Json generation_config() const {
    Json ends = Json::array();
    for (const char* role : {"eos", "eot", "eom"})
      if (const auto id = id_of(role); id && std::ranges::find(ends, Json(*id)) == ends.end()) ends.push_back(*id);
    Json generation = Json::object();
    if (const auto bos = id_of("bos")) generation["bos_token_id"] = *bos;
    if (!ends.empty()) generation["eos_token_id"] = ends.size() == 1 ? ends.front() : ends;
    return generation;
  }

  // Added tokens that follow all others stand beside the vocabulary, as in the files of the models; the reference
  // numbers them by their list, so that there may be no hole. All others are in the vocabulary, too.
  i64 first_beside_vocabulary() const {
    i64 end = count();
    while (end > 0 && type(end - 1) == kUnusedToken) --end;
    i64 first = end;
    while (first > 0 && is_added(first - 1)) --first;
    return first > 0 && type(first - 1) == kUnusedToken ? end : first;
  }

  std::string tokenizer_json() const {
    const std::string pre = file_.text(key_of("pre")).value_or("");
    const auto* const row = std::ranges::find(kPreRows, pre, &PreRow::name);
    if (row == std::end(kPreRows)) {
      std::vector<std::string_view> known;
      for (const PreRow& r : kPreRows) known.push_back(r.name);
      unsupported(fmt::format("'tokenizer.ggml.pre' is {}, and how it cuts texts is not known ({} are)",
                              pre.empty() ? "missing" : fmt::format("\"{}\"", pre), fmt::join(known, ", ")));
    }
    const i64 beside = first_beside_vocabulary();
    std::string vocabulary;
    Json added = Json::array();
    for (i64 id = 0; id < count(); ++id) {
      if (is_added(id))
        added.push_back({{"id", id},
                         {"content", token(id)},
                         {"single_word", false},
                         {"lstrip", false},
                         {"rstrip", false},
                         {"normalized", false},
                         {"special", type(id) == kControlToken}});
      if (id < beside) vocabulary += fmt::format("{}{}:{}", vocabulary.empty() ? "" : ",", Json(token(id)).dump(), id);
    }
    const Json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}};
    Json cut = byte_level;
    if (row->expression.empty()) {
      cut["use_regex"] = true;
    } else {
      cut["use_regex"] = false;
      const Json split = {
          {"type", "Split"}, {"pattern", {{"Regex", row->expression}}}, {"behavior", "Isolated"}, {"invert", false}};
      cut = {{"type", "Sequence"}, {"pretokenizers", Json::array({split, cut})}};
    }
    // The vocabulary is appended as text: an ordered object looks each name up in its list.
    return fmt::format(
        R"({{"version":"1.0","added_tokens":{},"normalizer":{},"pre_tokenizer":{},"post_processor":{},"decoder":{},)"
        R"("model":{{"type":"BPE","ignore_merges":{},"vocab":{{{}}},"merges":{}}}}})",
        added.dump(), row->composes ? R"({"type":"NFC"})" : "null", cut.dump(), around_text(*row).dump(),
        R"({"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true})", row->takes_whole_words,
        vocabulary, Json(file_.texts(key_of("merges"))).dump());
  }

  // The tokens that stand around a text.
  Json around_text(const PreRow& row) const {
    Json single = Json::array(), special = Json::object();
    const auto add = [&](std::string_view role) {
      const i64 id = *id_of(role);
      single.push_back({{"SpecialToken", {{"id", token(id)}, {"type_id", 0}}}});
      special[token(id)] = {{"id", token(id)}, {"ids", {id}}, {"tokens", {token(id)}}};
    };
    if (adds("bos", row.adds_bos)) add("bos");
    single.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
    if (adds("eos", false)) add("eos");
    if (special.empty()) return nullptr;
    const Json pair = Json::array({single.front(), {{"Sequence", {{"id", "B"}, {"type_id", 1}}}}});
    return {{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", special}};
  }

  // A protocol buffer of the message ModelProto (sentencepiece_model.proto).
  class Message {
   public:
    Message& number(u64 field, u64 value) {
      varint(field << 3);
      varint(value);
      return *this;
    }
    Message& bytes(u64 field, std::string_view value) {
      varint(field << 3 | 2);
      varint(value.size());
      text_ += value;
      return *this;
    }
    Message& real(u64 field, float value) {
      varint(field << 3 | 5);
      const u32 bits = std::bit_cast<u32>(value);
      for (int shift = 0; shift < 32; shift += 8) text_ += static_cast<char>(bits >> shift & 0xff);
      return *this;
    }
    const std::string& text() const noexcept { return text_; }

   private:
    void varint(u64 value) {
      for (; value >= 0x80; value >>= 7) text_ += static_cast<char>(0x80 | (value & 0x7f));
      text_ += static_cast<char>(value);
    }
    std::string text_;
  };

  std::string sentence_piece_model() const {
    const std::vector<double> scores = file_.numbers(key_of("scores"));
    check(std::ssize(scores) == count(), "'tokenizer.ggml.scores' has {} entries for {} tokens", scores.size(),
          count());
    if (!file_.integers(key_of("precompiled_charsmap")).empty())
      unsupported("'tokenizer.ggml.precompiled_charsmap', rules for characters, is not supported");
    Message model;
    for (i64 id = 0; id < count(); ++id) {
      check(type(id) >= kNormalToken && type(id) <= kByteToken, "'tokenizer.ggml.token_type[{}]' is {}", id, type(id));
      Message piece;
      piece.bytes(1, token(id)).real(2, static_cast<float>(scores[static_cast<size_t>(id)]));
      model.bytes(1, piece.number(3, static_cast<u64>(type(id))).text());
    }
    constexpr u64 kBpe = 2;
    Message trainer;
    trainer.number(3, kBpe).number(35, std::ranges::find(types_, i64{kByteToken}) != types_.end() ? 1 : 0);
    constexpr std::pair<u64, std::string_view> kPieces[] = {{45, "unknown"}, {46, "bos"}, {47, "eos"}, {48, "padding"}};
    for (const auto& [field, role] : kPieces)
      if (const auto id = id_of(role)) trainer.bytes(field, token(*id));
    Message normalizer;  // no rules; a blank before a text, and blanks stay
    const bool removes = file_.flag(key_of("remove_extra_whitespaces")).value_or(false);
    const bool prefix = file_.flag(key_of("add_space_prefix")).value_or(true);
    normalizer.bytes(1, "identity").number(3, prefix ? 1 : 0).number(4, removes ? 1 : 0).number(5, 1);
    return model.bytes(2, trainer.text()).bytes(3, normalizer.text()).text();
  }

  const Gguf file_;
  std::vector<std::string> tokens_;
  std::vector<i64> types_;
};

}  // namespace

std::map<std::string, std::string> gguf_tokenizer_files(const std::string& path) { return GgufTokenizer(path).make(); }

}  // namespace ds::tokenizer
