// SPDX-License-Identifier: Apache-2.0
// The identity of a run's data in a checkpoint, and whether a run may continue with the present data.

#include <charconv>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/json.h"
#include "data/data.h"
#include "data/objective.h"
#include "data/token_file.h"
#include "data/tokenizer.h"

namespace ds {

namespace {

std::string hexadecimal(u64 hash) { return fmt::format("{:016x}", hash); }

// Whether a version wrote it that knew documents by data.document_token alone.
bool is_older(const DataIdentity& saved, const DataIdentity& now) {
  return saved.documents.empty() && !now.documents.empty();
}

// Throws unless the keys about documents are the same, as far as the two tell.
void check_same_document_keys(const DataIdentity& saved, const DataIdentity& now) {
  const auto check = [](std::string_view key, std::string_view was, std::string_view is) {
    DS_CHECK(was == is, Errc::Mismatch, "{} is {}, but the run was started with {}", key, is, was);
  };
  const auto is_packed = [](const DataIdentity& of) { return of.objective.ends_with(kPackedObjective); };
  const auto packing = [&](const DataIdentity& of) { return is_packed(of) ? "best_fit" : "none"; };
  check("data.packing", packing(saved), packing(now));
  const auto was = DocumentRule::parse(saved.documents), is = DocumentRule::parse(now.documents);
  if (was && now.documents.empty()) check("data.separate_documents", "true", "false");
  if (!was || !is) return;
  const auto token = [](const DocumentRule& of) { return of.token < 0 ? "none" : fmt::to_string(of.token); };
  const auto at = [](const DocumentRule& of) { return of.at == DocumentTokenAt::End ? "end" : "begin"; };
  const auto loss = [](const DocumentRule& of) { return of.loss_across ? "true" : "false"; };
  check("data.document_token", token(*was), token(*is));
  check("data.document_token_at", at(*was), at(*is));
  if (!is_packed(now)) check("data.loss_across_documents", loss(*was), loss(*is));
}

// Throws unless a file is read in the same way.
void check_same_reading(const FileFingerprint& saved, const FileFingerprint& now) {
  if (saved.hash == now.hash || saved.reading == now.reading) return;
  const auto adds = [](const FileFingerprint& of) { return of.reading.ends_with(kTokensAdded); };
  DS_CHECK(adds(saved) == adds(now), Errc::Mismatch,
           "data.document_token is {} to documents of data file '{}', but the run was started {}: "
           "data.add_document_token has changed, or the file",
           adds(now) ? "added" : "not added", now.name, adds(saved) ? "with it" : "without it");
  if (saved.reading.empty()) return;  // checkpoints of older builds do not state how a file is read
  const auto records = [](const FileFingerprint& of) { return of.reading.substr(0, of.reading.find(" in a ")); };
  throw Error(Errc::Mismatch,
              fmt::format("data file '{}' is read as {}, but the run was started with {}{}", now.name,
                          now.reading.empty() ? "a plain file" : now.reading, saved.reading,
                          records(saved) == records(now)
                              ? ": data.document_token, data.document_token_at, data.chat_template or the tokenizer's "
                                "end of text has changed"
                              : ""));
}

u64 parse_hexadecimal(const std::string& text) {
  u64 hash = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), hash, 16);
  DS_CHECK(error == std::errc{} && end == text.data() + text.size(), Errc::Corrupt,
           "the checkpoint's description of its data has a hash that is not hexadecimal: '{}'", text);
  return hash;
}

}  // namespace

void check_same_data(const DataIdentity& saved, const DataIdentity& now) {
  const auto samples = [](const DataIdentity& of) {
    return of.files.empty() ? fmt::format("the samples '{}' of the program", of.objective)
                            : fmt::format("{} data file{}", of.files.size(), of.files.size() == 1 ? "" : "s");
  };
  const bool are_of_program = now.files.empty();
  DS_CHECK(saved.files.empty() == are_of_program && (!are_of_program || saved.objective == now.objective),
           Errc::Mismatch, "the run was started with {}, and this one has {}", samples(saved), samples(now));
  DS_CHECK(saved.files.size() == now.files.size(), Errc::Mismatch,
           "data.train has {} files, but the run was started with {}", now.files.size(), saved.files.size());
  check_same_document_keys(saved, now);
  for (size_t i = 0; i < saved.files.size(); ++i) {
    const FileFingerprint &s = saved.files[i], &n = now.files[i];
    DS_CHECK(s.bytes == n.bytes, Errc::Mismatch,
             "data file '{}' has {} bytes, but the run was started with {} bytes of '{}'", n.name, n.bytes, s.bytes,
             s.name);
    check_same_reading(s, n);
    DS_CHECK(s.hash == n.hash, Errc::Mismatch,
             "data file '{}' has other content than '{}' had when the run was started, or is read in another way",
             n.name, s.name);
  }
  DS_CHECK(is_same_tokenizer(saved.tokenizer, now.tokenizer) || saved.tokenizer.empty() || now.tokenizer.empty(),
           Errc::Mismatch, "{}", difference_of_tokenizers(now.tokenizer, saved.tokenizer, "the run was started with"));
  for (size_t i = 0; i < saved.files.size(); ++i) {
    const FileFingerprint &s = saved.files[i], &n = now.files[i];
    DS_CHECK(s.ids == n.ids || s.ids == 0 || n.ids == 0, Errc::Mismatch,
             "data file '{}' becomes other tokens than when the run was started, by the same tokenizer file: another "
             "version of libds or of a library reads it{}",
             n.name,
             saved.tokenizer == now.tokenizer ? "" : fmt::format(" ({}; then {})", now.tokenizer, saved.tokenizer));
  }
  DS_CHECK(saved.weights == now.weights, Errc::Mismatch, "data.weights is [{}], but the run was started with [{}]",
           fmt::join(now.weights, ", "), fmt::join(saved.weights, ", "));
  DS_CHECK(saved.seq_length == now.seq_length, Errc::Mismatch, "data.seq_length is {}, but the run was started with {}",
           now.seq_length, saved.seq_length);
  DS_CHECK(saved.seed == now.seed, Errc::Mismatch, "data.seed is {}, but the run was started with {}", now.seed,
           saved.seed);
  DS_CHECK(saved.objective == now.objective, Errc::Mismatch,
           "the run was started with the objective '{}', and this one has '{}'", saved.objective, now.objective);
  DS_CHECK(!is_older(saved, now) || now.older_documents.empty(), Errc::Mismatch,
           "documents are found by {}, but the run was started by an older version of libds, which found {}; --weights "
           "begins a new run from the weights of the step",
           now.documents, now.older_documents);
  DS_CHECK(saved.documents.empty() || DocumentRule::parse(saved.documents), Errc::Mismatch,
           "documents are found by {}, but the run was started with {}, which this version of libds does not know",
           now.documents.empty() ? "nothing" : now.documents, saved.documents);
  DS_CHECK(saved.num_samples == now.num_samples || !are_of_program, Errc::Mismatch,
           "{} are {}, but the run was started with {}", samples(now), now.num_samples, saved.num_samples);
  DS_CHECK(
      saved.num_samples == now.num_samples, Errc::Mismatch,
      "the training part has {} samples, but the run was started with {}: data.split or data.validation has changed",
      now.num_samples, saved.num_samples);
  DS_CHECK(saved.packed_tokens == 0 || saved.packed_tokens == now.packed_tokens, Errc::Mismatch,
           "the training part has {} tokens in packed samples, but the run was started with {}: data.split or "
           "data.validation has changed",
           now.packed_tokens, saved.packed_tokens);
}

std::string difference_of_samples(const DataIdentity& saved, const DataIdentity& now) {
  if (!is_older(saved, now) || now.older_samples.empty()) return "";
  return fmt::format("the run was started by an older version of libds, in which {}; from now on it does not",
                     now.older_samples);
}

std::string data_identity_json(const DataIdentity& identity) {
  nlohmann::ordered_json files = nlohmann::ordered_json::array();
  for (const FileFingerprint& f : identity.files) {
    files.push_back({{"name", f.name}, {"bytes", f.bytes}, {"xxh3", hexadecimal(f.hash)}});
    if (!f.reading.empty()) files.back()["reading"] = f.reading;
    if (f.ids != 0) files.back()["ids_xxh3"] = hexadecimal(f.ids);
  }
  nlohmann::ordered_json json{{"files", files},
                              {"tokenizer", identity.tokenizer},
                              {"num_samples", identity.num_samples},
                              {"seq_length", identity.seq_length},
                              {"seed", identity.seed},
                              {"objective", identity.objective}};
  if (!identity.weights.empty()) json["weights"] = identity.weights;
  if (!identity.documents.empty()) json["documents"] = identity.documents;
  if (identity.packed_tokens > 0) json["packed_tokens"] = identity.packed_tokens;
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

DataIdentity parse_data_identity(const std::string& json) {
  try {
    const auto j = nlohmann::json::parse(json);
    DataIdentity identity;
    for (const auto& file : j.at("files")) {
      FileFingerprint& f = identity.files.emplace_back();
      file.at("name").get_to(f.name);
      file.at("bytes").get_to(f.bytes);
      f.hash = parse_hexadecimal(file.at("xxh3").get_ref<const std::string&>());
      f.reading = file.value("reading", "");
      if (file.contains("ids_xxh3")) f.ids = parse_hexadecimal(file.at("ids_xxh3").get_ref<const std::string&>());
    }
    identity.tokenizer = j.value("tokenizer", "bytes");  // checkpoints without it are from when text was bytes
    j.at("num_samples").get_to(identity.num_samples);
    j.at("seq_length").get_to(identity.seq_length);
    j.at("seed").get_to(identity.seed);
    if (j.contains("objective")) j.at("objective").get_to(identity.objective);  // the first version had no other
    if (j.contains("weights")) j.at("weights").get_to(identity.weights);
    identity.documents = j.value("documents", "");
    identity.packed_tokens = j.value("packed_tokens", i64{0});
    return identity;
  } catch (const nlohmann::json::exception& e) {
    throw Error(Errc::Corrupt,
                fmt::format("the checkpoint's description of its data cannot be read: {}", json_reason(e)));
  }
}

}  // namespace ds
