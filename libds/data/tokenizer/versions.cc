// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer/versions.h"

#include <algorithm>
#include <set>

#include "data/tokenizer/identity.h"
#include "data/tokenizer/normalizer.h"

namespace ds::tokenizer {
namespace {

class Comparison {
 public:
  Comparison(const Origin& o, Definition& made)
      : d_(o.directory),
        class_(o.name),
        row_(o.row),
        options_(o.options),
        files_(o.files),
        own_form_(o.own_form),
        own_tokens_(o.own_tokens),
        made_(made) {}

  // transformers 5 makes the form of most classes anew, whatever tokenizer.json says.
  void run() {
    if (class_.name.empty()) return;
    const ClassRow& five = is_json() ? row_of_five(d_, class_, is_byte_level()) : row_;
    if (five.shape == Shape::Qwen2) warn_of_qwen_flags(five);
    if (!is_json()) return;
    if (five.name != row_.name) compare_class_tokens(five);
    if (five.shape == Shape::T5) warn_of_extra_ids(five);
    if (five.shape == Shape::Unknown || five.shape == Shape::File) {
      if (row_.shape != Shape::Unknown && row_.shape != Shape::File && form_of_file(made_.file) != own_form_)
        warn(
            fmt::format("a text is prepared by tokenizer.json and the class {}, as in transformers 4; transformers 5 "
                        "goes by tokenizer.json alone for this model_type, which differs",
                        class_.name));
      return;
    }
    compare_form(five);
    if (d_.setting("added_tokens_decoder") == nullptr) return;
    for (const Json& json : own_tokens_) {
      const Json* const content = find_member(json, "content");
      if (content == nullptr || !content->is_string() || files_.find_listed(content->get<std::string>()) != nullptr)
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

 private:
  bool is_json() const { return d_.kind == Directory::Kind::TokenizerJson; }
  bool is_byte_level() const { return is_json() && part_type_of(made_.file.value("decoder", Json())) == "ByteLevel"; }
  void warn(std::string text) { made_.warnings.push_back(fmt::format("tokenizer '{}': {}", d_.folder, text)); }

  void warn_of_qwen_flags(const ClassRow& five) {
    std::set<std::string> names = files_.names();
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

  void warn_of_extra_ids(const ClassRow& five) {
    const bool has = std::ranges::any_of(made_.origins, [](const auto& origin) {
      return origin.first.starts_with("<extra_id_") && origin.second.starts_with("class ");
    });
    if (has && !files_.more().empty())
      warn(
          fmt::format("the class {} adds <extra_id_0> and those after it, as in transformers 4; transformers 5 adds "
                      "none beside other additional_special_tokens",
                      five.name));
  }

  // Tokens that one version adds by its class, where the versions take another.
  void compare_class_tokens(const ClassRow& five) {
    const auto contents_of = [](const Json& tokens) {
      std::set<std::string> contents;
      for (const Json& token : tokens) contents.insert(token.at("content").get<std::string>());
      return contents;
    };
    const std::set<std::string> own = contents_of(own_tokens_), all = contents_of(made_.file["added_tokens"]);
    std::set<std::string> of_five;
    for (const SpecialToken kind : kSpecialTokens) {
      const std::string content(five.special[static_cast<size_t>(kind)]);
      if (!content.empty() && !files_.special().contains(kind) && !files_.has_none(kind)) of_five.insert(content);
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

  void compare_form(const ClassRow& five) {
    TextFormOptions options = options_;
    const bool prefix_by_default = is_llama(five.shape) || is_unigram(five.shape);
    options.add_prefix_space = d_.flag("add_prefix_space").value_or(prefix_by_default);
    options.legacy = false;
    options.rules = rules(made_.file.value("normalizer", Json()));
    TextForm anew = form_of(five.shape, options);
    if (five.shape == Shape::Llama && d_.flag("legacy").value_or(false) && options.add_prefix_space)
      anew.pre_tokenizer["prepend_scheme"] = "always";
    if (in_full(made_.file.value("normalizer", Json())) != in_full(anew.normalizer) ||
        in_full(made_.file.value("pre_tokenizer", Json())) != in_full(anew.pre_tokenizer))
      warn(fmt::format(
          "tokenizer.json is followed, as by transformers 4; transformers 5 prepares a text as the class {} "
          "does, which differs",
          five.name));
    const Json& model = made_.file["model"];
    const std::string kind = is_unigram(five.shape) ? "Unigram" : five.shape == Shape::Bert ? "WordPiece" : "BPE";
    const bool other_unknown =
        is_unigram(five.shape) && model.is_object() &&
        (model.value("unk_id", Json()) != unk_id_of(five.shape) || model.value("byte_fallback", Json(false)) != false);
    if (const std::string own = part_type_of(model); (!own.empty() && own != kind) || other_unknown)
      warn(fmt::format("transformers 5 makes another model of that of tokenizer.json by the class {}: {}", five.name,
                       other_unknown
                           ? fmt::format("with the unk_id {} and without byte_fallback", unk_id_of(five.shape))
                           : fmt::format("'{}' instead of '{}'", kind, own)));
  }

  // The first normalizer "Precompiled".
  static Json rules(const Json& normalizer) {
    const Json* const list = normalizer.is_object() ? find_member(normalizer, "normalizers") : nullptr;
    if (list != nullptr && list->is_array()) {
      for (const Json& inner : *list)
        if (part_type_of(inner) == "Precompiled") return inner;
    }
    return part_type_of(normalizer) == "Precompiled" ? normalizer : Json();
  }

  const Directory& d_;
  const ClassName& class_;
  const ClassRow& row_;
  const TextFormOptions& options_;
  const TokenFiles& files_;
  const Json &own_form_, &own_tokens_;
  Definition& made_;
};

}  // namespace

Json form_of_file(const Json& file) {
  Json form = Json::object();
  for (const char* key : {"normalizer", "pre_tokenizer", "decoder"}) form[key] = file.value(key, Json());
  return form;
}

std::string part_type_of(const Json& part) {
  const Json* const type = part.is_object() ? find_member(part, "type") : nullptr;
  return type != nullptr && type->is_string() ? type->get<std::string>() : "";
}

const ClassRow& row_of_five(const Directory& d, const ClassName& name, bool is_byte_level) {
  const Json* const type = find_member(d.model, "model_type");
  const std::string model_type = type != nullptr && type->is_string() ? type->get<std::string>() : "";
  return shape_of(class_of_five(name.by_type ? "" : name.name, model_type, is_byte_level));
}

void warn_of_five(const Origin& origin, Definition& made) { Comparison(origin, made).run(); }

void check_normalized(const Directory& d, const Json& own_part, const Definition& made, const AddedList& list) {
  if (own_part.is_null() || own_part == made.file["normalizer"]) return;
  const auto own = make_normalizer(own_part, {d.file, "normalizer"});
  const auto by_class = make_normalizer(made.file["normalizer"], {d.file, "normalizer"});
  for (const Token& token : list.tokens()) {
    const auto match = made.matches.find(token.content);
    if (!(match == made.matches.end() ? token.is_normalized() : match->second.normalized)) continue;
    std::string before = token.content, after = token.content;
    own->apply(before);
    by_class->apply(after);
    if (before != after)
      d.place(kConfigFile, "do_lower_case")
          .unsupported(fmt::format("with strip_accents and tokenize_chinese_chars it contradicts tokenizer.json, by "
                                   "which the normalized token '{}' is '{}' instead of '{}'",
                                   token.content, before, after));
  }
}

void refuse_other_names(const Directory& d, Shape shape, const AddedList& list, const Adding& adding) {
  for (const auto& [key, value] : d.config.items()) {
    const bool ours = std::ranges::any_of(kSpecialTokens, [&](SpecialToken kind) { return special_name(kind) == key; });
    const Json* const name = value.is_object() ? find_member(value, "content") : &value;
    if (shape == Shape::CodeLlama && key == "fill_token") continue;  // no token of plain texts
    if (ours || !key.ends_with("_token") || name == nullptr || !name->is_string()) continue;
    const auto& content = name->get_ref<const std::string&>();
    const bool known = list.contains(content) || adding.find(content) != nullptr;
    if (!known)
      d.place(kConfigFile, key)
          .unsupported(
              fmt::format("'{}' is in no list of added tokens: transformers 5 would add it, and 4 would not", content));
  }
}

}  // namespace ds::tokenizer
