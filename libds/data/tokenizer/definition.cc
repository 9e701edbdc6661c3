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
#include "data/tokenizer/normalizer.h"
#include "data/tokenizer/sentence_piece.h"
#include "data/tokenizer/token_files.h"

namespace ds::tokenizer {
namespace {

constexpr const char* kConfig = "tokenizer_config.json";
constexpr const char* kAddedTokens = "added_tokens.json";

// Members of tokenizer_config.json that would change ids in a way that libds does not follow.
void refuse_settings(const Directory& d) {
  const auto refuse = [&](const char* key, const std::string& what) { d.place(kConfig, key).unsupported(what); };
  if (d.flag("fix_mistral_regex").value_or(false)) refuse("fix_mistral_regex", "true is not supported");
  if (d.flag("from_slow").value_or(false) && d.kind == Directory::Kind::TokenizerJson)
    refuse("from_slow", "true is not supported beside a tokenizer.json");
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
                .legacy = d_.flag("legacy").value_or(true),
                .lowercase = d_.flag("do_lower_case").value_or(true),
                .chinese = d_.flag("tokenize_chinese_chars").value_or(true),
                .strip_accents = d_.flag("strip_accents")};
    read_vocabulary();
    const Json own_form = form_json(), own_tokens = or_array(made_.file, "added_tokens");
    apply_class();
    add_tokens(own_tokens);
    made_.ends = end_tokens(d_);
    if (d_.flag("clean_up_tokenization_spaces").value_or(false))
      made_.when_writing.push_back(fmt::format(
          "tokenizer '{}': clean_up_tokenization_spaces is not followed: blanks before punctuation marks of "
          "completions stay",
          d_.folder));
    made_.splits_special = d_.flag("split_special_tokens").value_or(false);
    decide_ends_of_texts();
    compare_versions(own_form, own_tokens);
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
  Json form_json() const {
    Json form = Json::object();
    for (const char* key : {"normalizer", "pre_tokenizer", "decoder"}) form[key] = made_.file.value(key, Json());
    return form;
  }
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
    const std::string text = read_text_file(d_.file, kMostFileBytes);
    made_.file = parse_sorted_json(text, d_.file, {.error = Errc::Corrupt, .comments = false});
    if (!made_.file.is_object()) Place{d_.file, ""}.corrupt("must be an object");
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
    shape_ = check_class({Shape::Llama, Shape::Gemma}, Shape::Unknown);
    const SentencePieceFile file(d_.file);
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
    if (!as_is && file.normalizes())
      warn(
          fmt::format("{} has rules of its own for white space or characters, which transformers leaves out for the "
                      "class {}, and libds too",
                      d_.file, class_text()));
    if (shape_ == Shape::Llama && options_.legacy)
      warn(
          "without \"legacy\": false in tokenizer_config.json, transformers 4 puts a blank before each part of a text "
          "between special tokens, which libds follows; transformers 5 does not, or only where none is");
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
    if (shape_ == Shape::Llama || shape_ == Shape::Gemma) return check_llama_prefix();
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

  static std::string part_type_of(const Json& part) {
    const Json* const type = part.is_object() ? find_member(part, "type") : nullptr;
    return type != nullptr && type->is_string() ? type->get<std::string>() : "";
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
    d_.place(kConfig, "add_prefix_space")
        .unsupported(
            fmt::format("{} for the class {} contradicts tokenizer.json, which prepares a text in another way: "
                        "leave out this key, or tokenizer.json if there is a tokenizer.model",
                        *wanted, class_text()));
  }

  void add_tokens(const Json& own_tokens) {
    files_.emplace(d_, is_json() ? own_tokens : Json::array());
    const Json* const model = made_.model ? nullptr : find_member(made_.file, "model");
    const Json* const vocabulary = model != nullptr && model->is_object() ? find_member(*model, "vocab") : nullptr;
    static const Json kEmpty = Json::object();
    const Json& vocab = vocabulary != nullptr && vocabulary->is_object() ? *vocabulary : kEmpty;
    const auto in_vocabulary = [this, &vocab](const std::string& content) -> std::optional<i64> {
      if (made_.model) {
        const auto id = made_.model->vocabulary().id(content);
        return id ? std::optional<i64>(*id) : std::nullopt;
      }
      return id_of(find_member(vocab, content));
    };
    const i64 count = made_.model ? made_.model->vocabulary().num_tokens() : std::ssize(vocab);
    AddedList list(own_tokens, in_vocabulary, count, {d_.file, "added_tokens"});
    for (const Token& token : list.tokens()) made_.origins.emplace(token.content, main_file());

    const std::set<std::string> by_files = files_->names();
    std::set<std::string> names = by_files;
    for (const SpecialToken kind : kSpecialTokens)
      if (const std::string_view content = special_of_class(kind); !content.empty()) names.emplace(content);

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
    for (const std::string& content : files_->only_in_map())
      warn(
          fmt::format("'{}' is a special token by additional_special_tokens of special_tokens_map.json, as in "
                      "transformers 4; transformers 5 does not read this member",
                      content));
    refuse_other_names(list, adding);

    adding.mark_special(names);
    for (const auto& [token, source] : adding.entries())
      if (!token.content.empty() && !list.has_same(token)) made_.origins[token.content] = source;
    list.add(adding);
    for (const auto& [id, listed] : files_->listed()) {
      if (listed.token.content.empty() || listed.source == "tokenizer.json") continue;
      const i64 given = list.id(listed.token.content).value_or(id);
      const Place place = listed.source == kConfig ? d_.place(kConfig, fmt::format("added_tokens_decoder.{}", id))
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
      d_.place(kConfig, "add_prefix_space")
          .unsupported(fmt::format("is missing, and true in tokenizer.json: state it, since versions of transformers "
                                   "differ here, and in another way: {}",
                                   made_.warnings.back()));
    made_.file["added_tokens"] = list.list();
    made_.matches = list.matches();
    check_normalized(list);
    if (d_.kind == Directory::Kind::VocabTxt) {
      const auto unk = made_.special.find(SpecialToken::Unk);
      made_.file["model"]["unk_token"] = unk == made_.special.end() ? "[UNK]" : unk->second.content;
    }
    if (is_json()) {
      for (const auto& [content, id] : vocab.items())
        made_.own_ids = std::max(made_.own_ids, id_of(&id).value_or(-1) + 1);
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

  // transformers 4 finds normalized tokens as tokenizer.json normalizes them, and 5 as the class does.
  void check_normalized(const AddedList& list) const {
    if (own_normalizer_.is_null() || own_normalizer_ == made_.file["normalizer"]) return;
    const auto own = make_normalizer(own_normalizer_, {d_.file, "normalizer"});
    const auto by_class = make_normalizer(made_.file["normalizer"], {d_.file, "normalizer"});
    for (const Token& token : list.tokens()) {
      const auto match = made_.matches.find(token.content);
      if (!(match == made_.matches.end() ? token.is_normalized() : match->second.normalized)) continue;
      std::string before = token.content, after = token.content;
      own->apply(before);
      by_class->apply(after);
      if (before != after)
        d_.place(kConfig, "do_lower_case")
            .unsupported(fmt::format("with strip_accents and tokenize_chinese_chars it contradicts tokenizer.json, by "
                                     "which the normalized token '{}' is '{}' instead of '{}'",
                                     token.content, before, after));
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
    const bool has_flags =
        shape_ == Shape::Qwen2 ||
        (!is_json() && (shape_ == Shape::Gpt2 || shape_ == Shape::Roberta || shape_ == Shape::Llama));
    Token token{.content = content, .special = has_flags};
    if (has_flags) token.normalized = shape_ == Shape::Gpt2 || shape_ == Shape::Roberta;
    const Token* const listed = files_->find_listed(content);
    if (kind == SpecialToken::Mask && shape_ == Shape::Roberta) {
      token.lstrip = true;
      token.normalized = false;
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

  // transformers 5 adds tokens of other names, such as image_token; 4 does not.
  void refuse_other_names(const AddedList& list, const Adding& adding) const {
    for (const auto& [key, value] : d_.config.items()) {
      const bool ours =
          std::ranges::any_of(kSpecialTokens, [&](SpecialToken kind) { return special_name(kind) == key; });
      const Json* const name = value.is_object() ? find_member(value, "content") : &value;
      if (ours || !key.ends_with("_token") || name == nullptr || !name->is_string()) continue;
      const auto& content = name->get_ref<const std::string&>();
      const bool known = list.contains(content) || adding.find(content) != nullptr;
      if (!known)
        d_.place(kConfig, key)
            .unsupported(fmt::format("'{}' is in no list of added tokens: transformers 5 would add it, and 4 would not",
                                     content));
    }
  }

  // The tokens that the reference puts around a text.
  void decide_ends_of_texts() {
    const bool by_class = !is_json() || shape_ == Shape::Llama || shape_ == Shape::Gemma || shape_ == Shape::Unknown;
    made_.adds_bos = by_class ? d_.flag("add_bos_token") : std::nullopt;
    if (d_.kind == Directory::Kind::SentencePiece && !made_.adds_bos) made_.adds_bos = true;
    made_.adds_eos = by_class && d_.flag("add_eos_token").value_or(false);
  }

  // The row of the class by which transformers 5 reads tokenizer.json.
  const ClassRow& row_of_five() const {
    const Json* const type = find_member(d_.model, "model_type");
    const std::string model_type = type != nullptr && type->is_string() ? type->get<std::string>() : "";
    return shape_of(class_of_five(class_.by_type ? "" : class_.name, model_type, is_byte_level()));
  }

  // transformers 5 makes the form of most classes anew, whatever tokenizer.json says.
  void compare_versions(const Json& own_form, const Json& own_tokens) {
    if (class_.name.empty()) return;
    const ClassRow& five = is_json() ? row_of_five() : *row_;
    if (five.shape == Shape::Qwen2) warn_of_qwen_flags(five);
    if (!is_json()) return;
    if (five.name != row_->name) compare_class_tokens(five, own_tokens);
    if (five.shape == Shape::Unknown || five.shape == Shape::File) {
      if (shape_ != Shape::Unknown && shape_ != Shape::File && form_json() != own_form)
        warn(
            fmt::format("a text is prepared by tokenizer.json and the class {}, as in transformers 4; transformers 5 "
                        "goes by tokenizer.json alone for this model_type, which differs",
                        class_text()));
      return;
    }
    TextFormOptions options = options_;
    const std::optional<bool> prefix = d_.flag("add_prefix_space");
    options.add_prefix_space = prefix.value_or(five.shape == Shape::Llama);
    options.legacy = false;
    TextForm anew = form_of(five.shape, options);
    if (five.shape == Shape::Llama && d_.flag("legacy").value_or(false) && options.add_prefix_space)
      anew.pre_tokenizer["prepend_scheme"] = "always";
    if (made_.file.value("normalizer", Json()) != anew.normalizer ||
        without_offsets(made_.file.value("pre_tokenizer", Json())) != without_offsets(anew.pre_tokenizer))
      warn(fmt::format(
          "tokenizer.json is followed, as by transformers 4; transformers 5 prepares a text as the class {} "
          "does, which differs",
          five.name));
    if (d_.setting("added_tokens_decoder") == nullptr) return;
    for (const Json& json : own_tokens) {
      const Json* const content = find_member(json, "content");
      if (content == nullptr || !content->is_string() || files_->find_listed(content->get<std::string>()) != nullptr)
        continue;
      const bool named = std::ranges::any_of(made_.special, [&](const auto& special) {
        return special.second.content == content->get_ref<const std::string&>();
      });
      if (named) continue;
      warn(
          fmt::format("'{}' of tokenizer.json is missing in added_tokens_decoder of tokenizer_config.json, and counts, "
                      "as in transformers 4; transformers 5 leaves it out for the class {}",
                      *content, five.name));
    }
  }

  void warn_of_qwen_flags(const ClassRow& five) {
    std::set<std::string> names = files_->names();
    for (const auto& [kind, special] : made_.special) names.insert(special.content);
    for (const Json& json : made_.file["added_tokens"]) {
      const Token token = read_token(json, {d_.file, "added_tokens"});
      if (names.contains(token.content) && !token.is_plain())
        warn(
            fmt::format("'{}' has flags that transformers 5 takes from the special tokens of the class {}; libds "
                        "follows transformers 4",
                        token.content, five.name));
    }
  }

  // Tokens that one version adds by its class, where the versions take another.
  void compare_class_tokens(const ClassRow& five, const Json& own_tokens) {
    const auto contents_of = [](const Json& tokens) {
      std::set<std::string> contents;
      for (const Json& token : tokens) contents.insert(token.at("content").get<std::string>());
      return contents;
    };
    const std::set<std::string> own = contents_of(own_tokens), all = contents_of(made_.file["added_tokens"]);
    std::set<std::string> of_five;
    for (const SpecialToken kind : kSpecialTokens) {
      const std::string content(five.special[static_cast<size_t>(kind)]);
      if (!content.empty() && !files_->special().contains(kind) && !files_->has_none(kind)) of_five.insert(content);
    }
    for (const auto& [content, source] : made_.origins)
      if (source.starts_with("class ") && !own.contains(content) && !of_five.contains(content))
        warn(fmt::format("'{}' is a token by the {}, as in transformers 4; transformers 5 takes another class", content,
                         source));
    for (const std::string& content : of_five)
      if (!all.contains(content))
        warn(fmt::format("'{}' is no token, as in transformers 4; transformers 5 adds it by the class {}", content,
                         five.name));
  }

  static Json without_offsets(Json part) {
    if (part.is_object()) part.erase("trim_offsets");
    if (part_type_of(part) == "ByteLevel" && !part.contains("use_regex")) part["use_regex"] = true;
    if (part.is_object() && part.contains("pretokenizers"))
      for (Json& inner : part["pretokenizers"]) inner = without_offsets(inner);
    return part;
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
