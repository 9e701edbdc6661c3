// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reads a JSON object into a struct by a table of keys, and reports all mistakes instead of stopping at the first.

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

// The text of a file or of standard input, or a Diagnostic with the reason why it cannot be read.
std::variant<std::string, Diagnostic> read_config_text(const std::string& path, bool is_input = false);

// A parsed text in which --set arguments may replace values. Remembers where each value came from.
class ConfigText {
 public:
  // On a syntax error appends the diagnostic; root() is then an empty object.
  ConfigText(std::string_view text, std::string name, std::vector<Diagnostic>& diagnostics);
  // "a.b[0].c=v"; appends a diagnostic if the path does not exist.
  void set(const std::string& argument, std::vector<Diagnostic>& diagnostics);

  // Rewrites DeepSpeed's former notations: zero_optimization true is stage 1.
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
  // For objects that another program wrote: unknown keys that resemble no known key become warnings, except for
  // outermost keys in `errors` and nested objects. With null, false or a dropout of 0 they are warnings in any case.
  // Unknown outermost keys that are neutral are not reported. false counts as null for a key or section that takes
  // null, and null does not count as a second value of a key.
  void pass_over_unknown(std::set<std::string_view> errors,
                         std::function<bool(std::string_view name, const Json& value)> is_neutral) {
    passes_over_unknown_ = true;
    never_passed_over_ = std::move(errors);
    is_neutral_ = std::move(is_neutral);
  }

  // why(name) explains why an outermost key is unknown here although it is known elsewhere, or is empty. Where there is
  // an explanation, no name inside a section is suggested.
  void explain_unknown(std::function<std::string(std::string_view name)> why) { why_unknown_ = std::move(why); }

  // Whether the text has a valid value of the key other than "auto" and null; of a section, an object.
  bool given(std::string_view path) const { return given_.contains(path); }
  bool automatic(std::string_view path) const { return automatic_.contains(path); }  // "auto"
  bool broken(std::string_view path) const { return broken_.contains(path); }        // an error was reported
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
  // There may be any number of unknown keys: the first are reported, the others counted.
  void report_unknown(Severity severity, const std::string& typed, std::string message);
  const Key* find(std::string_view path) const;
  bool is_section(std::string_view path) const;
  // Whether `object` names an optimizer or schedule that is not supported yet, whose params are in no table.
  bool has_later_type(const Json& object, const std::string& path) const;
  void report(Severity severity, Errc code, std::string_view path, const std::string& typed, std::string message);
  // `typed` has no effect, for the reason `note`. All such keys are one line at the end.
  void no_effect(const std::string& typed, std::string_view note) { without_effect_.emplace_back(typed, note); }
  void report_without_effect();

  std::vector<std::pair<std::string, std::string_view>> without_effect_;
  std::set<std::string_view> refusals_;  // reported reasons, each of which is reported once for all its keys

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
