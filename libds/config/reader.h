// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reads a JSON object into a struct by a table of keys, and reports every mistake instead of stopping at the first.

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config/keys.h"

namespace ds {

// The text of a file, or of standard input, or the Diagnostic that says why there is none.
std::variant<std::string, Diagnostic> read_config_text(const std::string& path, bool is_input = false);

// A parsed text in which --set arguments may replace values, and where each value came from.
class ConfigText {
 public:
  // On a syntax error appends the diagnostic; root() is then an empty object.
  ConfigText(std::string_view text, std::string name, std::vector<Diagnostic>& diagnostics);
  // "a.b[0].c=v"; appends a diagnostic when the path leads nowhere.
  void set(const std::string& argument, std::vector<Diagnostic>& diagnostics);

  // Rewrites forms that DeepSpeed had before: zero_optimization true is stage 1.
  void modernize(std::vector<Diagnostic>& diagnostics);

  const Json& root() const noexcept { return root_; }
  Diagnostic at(std::string_view path, Errc code, std::string message) const;

 private:
  struct Origin {
    std::string source;
    JsonPlace place;
  };
  Json root_ = Json::object();
  std::map<std::string, Origin, std::less<>> origins_;  // "" is the whole
};

class Reader {
 public:
  // Paths in diagnostics begin with `prefix`; those of the table and of the queries below do not.
  Reader(std::span<const Key> keys, void* root, const ConfigText& text, std::string prefix,
         std::vector<Diagnostic>& diagnostics)
      : keys_(keys), root_(root), text_(text), prefix_(std::move(prefix)), diagnostics_(diagnostics) {}

  void read(const Json& object);
  // Unknown keys of an object that another program wrote become warnings if they resemble no known key, except
  // outermost keys in `errors` and nested objects. With null, false or a dropout of 0 they are warnings whatever they
  // resemble. Unknown outermost keys that are neutral are not told. false is null for a key or section that takes null,
  // and null is no second value of a key.
  void pass_over_unknown(std::set<std::string_view> errors,
                         std::function<bool(std::string_view name, const Json& value)> is_neutral) {
    passes_over_unknown_ = true;
    never_passed_over_ = std::move(errors);
    is_neutral_ = std::move(is_neutral);
  }

  // `why`: why an outermost key is unknown here, although elsewhere it is not; empty: it is nowhere known. Where it
  // says something, no name inside a section is suggested.
  void explain_unknown(std::function<std::string(std::string_view name)> why) { why_unknown_ = std::move(why); }

  bool given(std::string_view path) const {
    return given_.contains(path);
  }  // and good, and neither auto nor null
     // (of a section: an object)
  bool automatic(std::string_view path) const { return automatic_.contains(path); }  // "auto"
  bool broken(std::string_view path) const { return broken_.contains(path); }        // reported
  bool any_broken(std::initializer_list<std::string_view> paths) const;

  // An error has been reported that `path` is a part of.
  void mark_broken(std::string_view path) { broken_.emplace(path); }

  // Reports; the key need not be in the text. An error marks it as broken.
  void error(std::string_view path, std::string message, Errc code = Errc::Config);
  void warning(std::string_view path, std::string message);
  void not_yet(std::string_view path, std::string_view what);

 private:
  void read_object(const Json& object, const std::string& typed, const std::string& path);
  void read_key(const Key& key, const Json& value, const std::string& typed);
  void read_section(const Key& key, const Json& value, const std::string& typed);
  void store(const Key& key, const Json& value, const std::string& typed);
  void unknown(std::string_view name, const Json& value, const std::string& parent, const std::string& parent_path);
  // Of keys that no table has there may be any number: the first are told, the others counted.
  void report_unknown(Severity severity, const std::string& typed, std::string message);
  const Key* find(std::string_view path) const;
  bool is_section(std::string_view path) const;
  // `object` names an optimizer or schedule that is not there yet: its params have names that no table knows.
  bool has_later_type(const Json& object, const std::string& path) const;
  void report(Severity severity, Errc code, std::string_view path, const std::string& typed, std::string message);
  // `typed` changes nothing here, as `note` says: one line for all such keys, at the end.
  void no_effect(const std::string& typed, std::string_view note) { without_effect_.emplace_back(typed, note); }
  void report_without_effect();

  std::vector<std::pair<std::string, std::string_view>> without_effect_;
  std::set<std::string_view> refusals_;  // that have been told, one line for all keys that they are about

  struct NotTold {
    std::string first;
    i64 keys = 0;
  };
  i64 unknown_told_ = 0;
  NotTold unknown_errors_, unknown_warnings_;
  bool passes_over_unknown_ = false;
  std::set<std::string_view> never_passed_over_;
  std::function<bool(std::string_view, const Json&)> is_neutral_;
  std::function<std::string(std::string_view)> why_unknown_;
  std::span<const Key> keys_;
  void* root_;
  const ConfigText& text_;
  std::string prefix_;
  std::vector<Diagnostic>& diagnostics_;
  std::string spelling(std::string_view path) const;
  struct Seen {
    std::string typed;  // the spelling in the text
    const Json* value;
  };
  std::map<std::string, Seen, std::less<>> seen_;
  std::set<std::string, std::less<>> given_, automatic_, broken_;
};

}  // namespace ds
