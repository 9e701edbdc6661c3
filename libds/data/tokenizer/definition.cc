// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer/definition.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "data/tokenizer/classes.h"
#include "data/tokenizer/files.h"
#include "data/tokenizer/identity.h"
#include "data/tokenizer/sentence_piece.h"
#include "data/tokenizer/token_files.h"
#include "data/tokenizer/versions.h"

namespace ds::tokenizer {
namespace {

constexpr const char* kAddedTokens = "added_tokens.json";

// Members of tokenizer_config.json that would change ids in a way that libds does not follow.
void refuse_settings(const Directory& d) {
  const auto refuse = [&](const char* key, const std::string& what) { d.place(kConfigFile, key).unsupported(what); };
  if (d.flag("fix_mistral_regex").value_or(false)) refuse("fix_mistral_regex", "true is not supported");
  if (!d.flag("do_basic_tokenize").value_or(true)) refuse("do_basic_tokenize", "false is not supported");
  for (const char* key : {"never_split", "sp_model_kwargs"}) {
    const Json* const value = d.setting(key);
    if (value != nullptr && !value->empty()) refuse(key, "only null and an empty value are supported");
  }
  const Json* const prefix = d.setting("wordpieces_prefix");
  if (prefix != nullptr && *prefix != "##") refuse("wordpieces_prefix", "only \"##\" is supported");
}

class Definer {
 public:
  explicit Definer(const Directory& d) : d_(d), class_(class_name(d)), row_(&shape_of(class_.name)) {}

  Definition define() {
    refuse_settings(d_);
    made_.name = d_.file;
    options_ = {.add_prefix_space = false,
                .legacy = row_->shape == Shape::CodeLlama || d_.flag("legacy").value_or(true),
                .lowercase = d_.flag("do_lower_case").value_or(true),
                .chinese = d_.flag("tokenize_chinese_chars").value_or(true),
                .strip_accents = d_.flag("strip_accents"),
                .keep_accents = d_.flag("keep_accents").value_or(false)};
    read_vocabulary();
    const Json own_form = form_json(), own_tokens = or_array(made_.file, "added_tokens");
    apply_class();
    if (is_json() && d_.flag("from_slow").value_or(false)) check_from_slow(d_, shape_, made_.file);
    add_tokens(own_tokens);
    made_.ends = end_tokens(d_);
    if (d_.flag("clean_up_tokenization_spaces").value_or(false))
      made_.when_writing.push_back(fmt::format(
          "tokenizer '{}': clean_up_tokenization_spaces is not followed: blanks before punctuation marks of "
          "completions stay",
          d_.folder));
    made_.splits_special = d_.flag("split_special_tokens").value_or(false);
    decide_ends_of_texts();
    warn_of_infilling();
    warn_of_five({d_, class_, *row_, options_, *files_, own_form, own_tokens}, made_);
    identify(own_form, own_tokens);
    return std::move(made_);
  }

 private:
  static Json or_array(const Json& file, const char* key) {
    const auto it = file.find(key);
    return it != file.end() && it->is_array() ? *it : Json::array();
  }
  const std::string& class_text() const { return class_.name; }
  // Files without a class are read as this one reads them.
  void take_class(const char* name) {
    if (!class_.name.empty()) return;
    row_ = &shape_of(name);
    class_.name = name;
    is_assumed_ = true;
  }
  bool is_json() const { return d_.kind == Directory::Kind::TokenizerJson; }
  Json form_json() const { return form_of_file(made_.file); }
  void warn(std::string text) { made_.warnings.push_back(fmt::format("tokenizer '{}': {}", d_.folder, text)); }
  void take_form(Shape shape) {
    TextForm form = form_of(shape, options_);
    made_.file["normalizer"] = std::move(form.normalizer);
    made_.file["pre_tokenizer"] = std::move(form.pre_tokenizer);
    made_.file["decoder"] = std::move(form.decoder);
  }
  // Throws unless the class, if one is named, is of these shapes. Returns its shape, or `otherwise`.
  Shape check_class(std::initializer_list<Shape> known, Shape otherwise) const {
    if (class_.name.empty()) return otherwise;
    if (std::ranges::find(known, row_->shape) == known.end())
      throw Error(Errc::Unavailable,
                  fmt::format("{}: tokenizer_class '{}' in {} is not supported without a tokenizer.json", d_.file,
                              class_.name, class_.file));
    return row_->shape;
  }

  void read_vocabulary() {
    switch (d_.kind) {
      case Directory::Kind::TokenizerJson: return read_tokenizer_json();
      case Directory::Kind::Merges: return read_merges();
      case Directory::Kind::VocabTxt: return read_vocab_txt();
      case Directory::Kind::SentencePiece: return read_sentence_piece();
    }
  }

  void read_tokenizer_json() {
    const std::string text = d_.vocabulary();
    made_.file = parse_sorted_json(text, d_.file, {.error = Errc::Corrupt, .comments = false});
    const Place place{d_.file, ""};
    if (!made_.file.is_object()) place.corrupt("must be an object");
    if (find_member(made_.file, "model") == nullptr) (place / "model").corrupt("is missing");
    made_.own_content = content_identity("tokenizer.json", text);
  }

  void read_merges() {
    take_class("GPT2Tokenizer");
    shape_ = check_class({Shape::Gpt2, Shape::Roberta, Shape::Qwen2}, Shape::Gpt2);
    options_.add_prefix_space = d_.flag("add_prefix_space").value_or(false);
    made_.file = byte_level_model(d_.file, d_.path("merges.txt"), made_.own_content);
    take_form(shape_);
  }

  void read_vocab_txt() {
    take_class("BertTokenizer");
    shape_ = check_class({Shape::Bert}, Shape::Bert);
    made_.file = word_piece_model(d_.file, made_.own_content);
    take_form(shape_);
  }

  void read_sentence_piece() {
    shape_ = check_class({Shape::Llama, Shape::CodeLlama, Shape::Gemma}, Shape::Unknown);
    const SentencePieceFile file(d_.file, d_.vocabulary());
    const bool as_is = shape_ == Shape::Unknown;
    made_.model = file.model(as_is);
    made_.own_content = file.content_identity() + by_sentence_piece();
    const std::vector<SentencePieceFile::Piece> pieces = file.pieces();
    made_.own_ids = std::ssize(pieces);
    const bool is_null = d_.config.contains("add_prefix_space") && d_.config["add_prefix_space"].is_null();
    options_.add_prefix_space = as_is || d_.flag("add_prefix_space").value_or(!is_null);
    if (is_null && !as_is)
      warn(
          "add_prefix_space is null in tokenizer_config.json: no blank is put before a text, as in transformers 4; "
          "transformers 5 puts one");
    if (class_.by_type)
      warn(fmt::format(
          "no file names the tokenizer_class: tokenizer.model is read by the class {} of its model_type, as "
          "in transformers 4; transformers 5 reads it without a class, which may differ",
          class_text()));
    if (!as_is && file.is_unigram())
      throw Error(
          Errc::Unavailable,
          fmt::format("{}: a Unigram model for the class {}, which transformers 5 reads as BPE, is not supported",
                      d_.file, class_text()));
    made_.file = {{"version", "1.0"}};
    take_form(as_is ? Shape::Llama : shape_);
    if (as_is) made_.file["normalizer"] = made_.file["pre_tokenizer"] = nullptr;
    Json added = Json::array();
    for (size_t id = 0; id < pieces.size() && !as_is; ++id) {
      const auto& [text, is_control, is_user_defined] = pieces[id];
      if (is_control || is_user_defined)
        added.push_back(Token{.content = text, .special = is_control, .normalized = false}.json(static_cast<i64>(id)));
    }
    for (const SpecialToken kind : kSpecialTokens) {
      if (const auto id = file.special(kind)) of_vocabulary_[kind] = pieces.at(*id).text;
    }
    made_.file["added_tokens"] = std::move(added);
    const bool is_of_file = row_of_five(d_, class_, false).shape == Shape::File;  // in transformers 5
    if (!as_is && file.normalizes())
      warn(
          fmt::format("{} has rules of its own for white space or characters, which transformers{} leaves out for the "
                      "class {}, and libds too{}",
                      d_.file, is_of_file ? " 4" : "", class_text(),
                      is_of_file ? "; transformers 5 follows them for this model_type" : ""));
    const bool has_user_defined = std::ranges::any_of(pieces, &SentencePieceFile::Piece::is_user_defined);
    if (is_llama(shape_) && options_.legacy && (!is_of_file || has_user_defined))
      warn(
          fmt::format("{}transformers 4 puts a blank before each part of a text between special tokens, which libds "
                      "follows; transformers 5 does not, or only where none is",
                      shape_ == Shape::CodeLlama ? "" : "without \"legacy\": false in tokenizer_config.json, "));
  }

  // The class's own part in the form of a tokenizer.json.
  void apply_class() {
    if (!is_json()) return;
    shape_ = row_->shape;
    if (shape_ == Shape::Unknown && !class_.name.empty())
      warn(
          fmt::format("the class {} in {} is not known: tokenizer.json is read by itself, as PreTrainedTokenizerFast "
                      "does",
                      class_.name, class_.file));
    if (class_.name.empty()) return warn_without_class();
    Json& normalizer = made_.file["normalizer"];
    if (shape_ == Shape::Bert && part_type_of(normalizer) == "BertNormalizer") {
      own_normalizer_ = normalizer;
      normalizer["lowercase"] = options_.lowercase;
      normalizer["strip_accents"] = options_.strip_accents ? Json(*options_.strip_accents) : Json();
      normalizer["handle_chinese_chars"] = options_.chinese;
    }
    if (is_llama(shape_) || shape_ == Shape::Gemma) return check_llama_prefix();
    if (shape_ == Shape::T5 && d_.setting("add_prefix_space") != nullptr)
      d_.place(kConfigFile, "add_prefix_space")
          .unsupported(
              "the class T5Tokenizer of transformers 4 reads a SentencePiece file instead of tokenizer.json "
              "where this is given: leave it out");
    Json& pre_tokenizer = made_.file["pre_tokenizer"];
    const std::optional<bool> wanted = d_.flag("add_prefix_space");
    if (part_type_of(pre_tokenizer) != "ByteLevel") return;
    const bool has = pre_tokenizer.value("add_prefix_space", Json(true)) == true;
    const bool by_class = shape_ == Shape::Gpt2 || shape_ == Shape::Roberta;
    if (by_class) {
      pre_tokenizer["add_prefix_space"] = wanted.value_or(false);
    } else if (wanted && *wanted != has) {
      pre_tokenizer["add_prefix_space"] = *wanted;
      warn(
          fmt::format("add_prefix_space in tokenizer_config.json contradicts tokenizer.json: {} counts, as in "
                      "transformers 4; transformers 5 follows tokenizer.json for the class {}",
                      *wanted, class_text()));
    } else if (!wanted && has) {
      follows_five_ = true;
      warn(
          fmt::format("add_prefix_space is true in tokenizer.json and not in tokenizer_config.json: tokenizer.json "
                      "counts, as in transformers 5; transformers 4 takes false for the class {}",
                      class_text()));
    }
  }

  // Settings that a class would follow.
  void warn_without_class() {
    constexpr std::tuple<const char*, const char*, const char*> kSettings[] = {
        {"do_lower_case", "normalizer", "lowercase"},
        {"strip_accents", "normalizer", "strip_accents"},
        {"tokenize_chinese_chars", "normalizer", "handle_chinese_chars"},
        {"add_prefix_space", "pre_tokenizer", "add_prefix_space"}};
    for (const auto& [key, part, field] : kSettings) {
      const std::optional<bool> wanted = d_.flag(key);
      const Json* const of = find_member(made_.file, part);
      if (!wanted || of == nullptr || !of->is_object() || !of->contains(field) || (*of)[field] == *wanted) continue;
      warn(
          fmt::format("{} is {} in tokenizer_config.json, and not in tokenizer.json, which counts: no file names the "
                      "tokenizer_class that would follow it",
                      key, *wanted));
    }
  }

  bool is_byte_level() const { return is_json() && part_type_of(made_.file.value("decoder", Json())) == "ByteLevel"; }

  // transformers 4 converts tokenizer.model again where the key is given.
  void check_llama_prefix() {
    const std::optional<bool> wanted = d_.flag("add_prefix_space");
    if (!wanted || shape_ != Shape::Llama || is_byte_level()) return;
    options_.add_prefix_space = *wanted;
    const TextForm converted = form_of(shape_, options_);
    const Json form = form_json();
    if (form["normalizer"] == converted.normalizer && form["pre_tokenizer"] == converted.pre_tokenizer) return;
    d_.place(kConfigFile, "add_prefix_space")
        .unsupported(
            fmt::format("{} for the class {} contradicts tokenizer.json, which prepares a text in another way: "
                        "leave out this key, or tokenizer.json if there is a tokenizer.model",
                        *wanted, class_text()));
  }

  void add_tokens(const Json& own_tokens) {
    files_.emplace(d_, is_json() ? own_tokens : Json::array());
    const OwnVocabulary own(made_.model.get(), made_.file);
    AddedList list(own_tokens, own, {d_.file, "added_tokens"});
    for (const Token& token : list.tokens()) made_.origins.emplace(token.content, main_file());

    const std::set<std::string> by_files = files_->names();
    std::set<std::string> names = by_files;
    for (const SpecialToken kind : kSpecialTokens)
      if (const std::string_view content = special_of_class(kind); !content.empty()) names.emplace(content);
    const std::vector<Special> more = tokens_of_class(d_, *row_, files_->more());
    for (const Special& special : more) names.insert(special.token.content);

    // The tokens of added_tokens_decoder and the like, by their ids.
    Adding adding;
    for (const auto& [id, listed] : files_->listed())
      if (!list.has_same(listed.token)) adding.push(listed.token, listed.source);
    // Special tokens with flags replace what is known, unless they have a role and are listed; those without are added
    // where unknown.
    std::map<std::string, const Special*> seen;
    const auto consider = [&](const Special& special, bool has_role) {
      Token token = special.token;
      bool has_flags = special.has_flags;
      const std::string& source = special.source;
      if (const auto [first, is_new] = seen.emplace(token.content, &special); !is_new) {
        const Special* const before = first->second;
        const Token* const added = adding.find(token.content);
        const bool differ = !has_flags                               ? added != nullptr && added->has_strips()
                            : before != nullptr && before->has_flags ? !token.same_as(before->token)
                                                                     : !token.is_plain();
        if (differ && files_->find_listed(token.content) == nullptr)
          warn(
              fmt::format("'{}' is named twice, with different flags: the first ones count, as in transformers 4; in "
                          "transformers 5 the last ones do",
                          token.content));
        return;
      }
      const Token* const listed = files_->find_listed(token.content);
      if (listed != nullptr && (has_role || !has_flags)) {
        token = *listed, has_flags = true;
      } else if (made_.model && list.contains(token.content) && token.has_strips()) {
        warn(
            fmt::format("'{}' of tokenizer.model has flags in {}, which count as in transformers 4; transformers 5 "
                        "leaves them out",
                        token.content, source));
      }
      add_special(list, adding, std::move(token), has_flags, source);
    };
    constexpr SpecialToken kOrder[] = {SpecialToken::Bos, SpecialToken::Eos, SpecialToken::Unk, SpecialToken::Sep,
                                       SpecialToken::Pad, SpecialToken::Cls, SpecialToken::Mask};
    for (const SpecialToken kind : kOrder) {
      const auto it = files_->special().find(kind);
      if (it != files_->special().end()) {
        consider(it->second, true);
        made_.special[kind] = {it->second.token.content, it->second.source};
        continue;
      }
      const std::string by_class(row_->special[static_cast<size_t>(kind)]);
      if (by_class.empty()) continue;
      const std::string source = fmt::format("class {}", class_text());
      // A name of the class alone is no special token where the files have no such token.
      const bool has = list.id(by_class) || files_->find_listed(by_class) != nullptr || by_files.contains(by_class);
      if (files_->has_none(kind)) {
        if (has) without_role_[kind] = by_class;
        continue;
      }
      if (has) made_.special[kind] = {by_class, source};
      consider_class(kind, by_class, source, seen, list, adding);
    }
    for (const Special& special : files_->more()) consider(special, false);
    for (const Special& special : more) consider(special, false);
    for (const std::string& content : files_->only_in_map())
      warn(
          fmt::format("'{}' is a special token by additional_special_tokens of special_tokens_map.json, as in "
                      "transformers 4; transformers 5 does not read this member",
                      content));
    refuse_other_names(d_, shape_, list, adding);

    adding.mark_special(names);
    for (const auto& [token, source] : adding.entries())
      if (!token.content.empty() && !list.has_same(token)) made_.origins[token.content] = source;
    list.add(adding);
    for (const auto& [id, listed] : files_->listed()) {
      if (listed.token.content.empty() || listed.source == "tokenizer.json") continue;
      const i64 given = list.id(listed.token.content).value_or(id);
      const Place place = listed.source == kConfigFile
                              ? d_.place(kConfigFile, fmt::format("added_tokens_decoder.{}", id))
                              : d_.place(kAddedTokens, listed.token.content);
      if (given != id)
        place.unsupported(
            fmt::format("'{}' has the id {}, where the reference, which numbers new tokens from the end "
                        "of the vocabulary, gives it {}",
                        listed.token.content, id, given));
    }
    for (const auto& [kind, content] : of_vocabulary_)
      if (!files_->has_none(kind)) made_.special.emplace(kind, SpecialName{content, main_file()});
    if (follows_five_ && made_.warnings.size() > 1)
      d_.place(kConfigFile, "add_prefix_space")
          .unsupported(fmt::format("is missing, and true in tokenizer.json: state it, since versions of transformers "
                                   "differ here, and in another way: {}",
                                   made_.warnings.back()));
    made_.file["added_tokens"] = list.list();
    made_.matches = list.matches();
    check_normalized(d_, own_normalizer_, made_, list);
    if (d_.kind == Directory::Kind::VocabTxt) {
      const auto unk = made_.special.find(SpecialToken::Unk);
      made_.file["model"]["unk_token"] = unk == made_.special.end() ? "[UNK]" : unk->second.content;
    }
    if (is_json()) {
      made_.own_ids = own.num_ids();
      for (const Json& token : own_tokens)
        made_.own_ids = std::max(made_.own_ids, id_of(find_member(token, "id")).value_or(-1) + 1);
    }
    if (made_.file.value("normalizer", Json()).is_null()) return;
    for (const auto& [content, match] : made_.matches) {
      warn(fmt::format(
          "'{}' has two sets of flags: it is found {} normalizing, as by transformers 4; transformers 5 goes "
          "by the last",
          content,
          !match.normalized ? "before"
          : match.raw       ? "before and after"
                            : "after"));
    }
  }

  static void add_special(const AddedList& list, Adding& adding, Token token, bool has_flags,
                          const std::string& source) {
    if (!has_flags && (list.contains(token.content) || adding.find(token.content) != nullptr)) return;
    if (!adding.has_same(token)) adding.push(std::move(token), source);
  }

  // A special token that only the class names. Most classes of transformers 4 that read no tokenizer.json have flags of
  // their own for it, and Qwen2's always.
  void consider_class(SpecialToken kind, const std::string& content, const std::string& source,
                      std::map<std::string, const Special*>& seen, const AddedList& list, Adding& adding) {
    if (!seen.emplace(content, nullptr).second) return;
    if (is_assumed_ && !list.id(content) && files_->find_listed(content) == nullptr) return;
    const bool has_flags = shape_ == Shape::Qwen2 ||
                           (!is_json() && (shape_ == Shape::Gpt2 || shape_ == Shape::Roberta || is_llama(shape_)));
    Token token{.content = content, .special = has_flags};
    if (has_flags) token.normalized = shape_ == Shape::Gpt2 || shape_ == Shape::Roberta;
    const Token* const listed = files_->find_listed(content);
    if (kind == SpecialToken::Mask &&
        (shape_ == Shape::Roberta || shape_ == Shape::XlmRoberta || shape_ == Shape::Albert)) {
      token.lstrip = true;
      token.normalized = shape_ == Shape::XlmRoberta;
      if (listed == nullptr || !listed->lstrip)
        warn(fmt::format("'{}' takes the white space before it, as in transformers 4; transformers 5 leaves it",
                         content));
      return add_special(list, adding, std::move(token), true, source);
    }
    if (has_flags && shape_ != Shape::Qwen2 && listed != nullptr && listed->has_strips())
      warn(
          fmt::format("'{}' has flags in added_tokens_decoder that only transformers 5 follows for the class {}: libds "
                      "leaves them out, as transformers 4 does; name the token in tokenizer_config.json to keep them",
                      content, class_text()));
    add_special(list, adding, std::move(token), has_flags, source);
  }

  // The class's name for a special token that the files leave to it; empty: none.
  std::string_view special_of_class(SpecialToken kind) const {
    return files_->has_none(kind) ? "" : row_->special[static_cast<size_t>(kind)];
  }

  std::string main_file() const { return d_.kind == Directory::Kind::Merges ? "vocab.json" : file_name(); }
  std::string file_name() const { return d_.file.substr(d_.file.find_last_of('/') + 1); }

  // In a text with this token the reference wants the part between its halves to be filled in.
  void warn_of_infilling() {
    const auto it = d_.config.find("fill_token");
    if (shape_ != Shape::CodeLlama || (it != d_.config.end() && it->is_null())) return;
    warn(fmt::format("{} in a text stays text: prompts to fill in are not made, as transformers does",
                     it == d_.config.end() ? "'<FILL_ME>'" : it->dump()));
  }

  // The tokens that the reference puts around a text.
  void decide_ends_of_texts() {
    const bool by_class = !is_json() || is_llama(shape_) || shape_ == Shape::Gemma || shape_ == Shape::Unknown;
    made_.adds_bos = by_class ? d_.flag("add_bos_token") : std::nullopt;
    if (d_.kind == Directory::Kind::SentencePiece && !made_.adds_bos) made_.adds_bos = true;
    made_.adds_eos = by_class && d_.flag("add_eos_token").value_or(false);
  }

  // Everything that the other files change, but for the ends of completions, on which no ids depend. Parts
  // that they leave as they are stay out: a file that is saved again by another program is no other tokenizer.
  void identify(const Json& own_form, const Json& own_tokens) {
    Json changes = Json::object();
    const bool by_class = !is_json();
    if (by_class || form_json() != own_form) changes["form"] = form_json();
    if (by_class || made_.file["added_tokens"] != own_tokens) changes["added_tokens"] = made_.file["added_tokens"];
    for (const auto& [kind, special] : made_.special) changes[std::string(special_name(kind))] = special.content;
    // Only the end of a text changes where null takes the role from a token that the files have.
    for (const auto& [kind, content] : without_role_)
      if (kind != SpecialToken::Eos) changes.emplace(special_name(kind), content);
    if (made_.splits_special) changes["split_special_tokens"] = true;
    if (made_.adds_bos) changes["add_bos_token"] = *made_.adds_bos;
    if (!made_.model) {
      const Json* const model = find_member(made_.file, "model");
      if (by_class && model != nullptr) changes["unk_token"] = model->value("unk_token", Json());
    }
    made_.others = other_files_identity(changes);
  }

  const Directory& d_;
  ClassName class_;
  const ClassRow* row_;
  bool is_assumed_ = false;    // no file names the class
  bool follows_five_ = false;  // where versions differ; otherwise transformers 4 is followed
  Shape shape_ = Shape::Unknown;
  TextFormOptions options_;
  Json own_normalizer_ = nullptr;  // of tokenizer.json, where the class changes it
  std::optional<TokenFiles> files_;
  std::map<SpecialToken, std::string> of_vocabulary_;  // the special tokens that a SentencePiece model names itself
  std::map<SpecialToken, std::string> without_role_;   // tokens of the class that the files have, but not in this role
  Definition made_;
};

}  // namespace

Definition define(const Directory& directory) { return Definer(directory).define(); }

}  // namespace ds::tokenizer
