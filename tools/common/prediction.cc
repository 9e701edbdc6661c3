// SPDX-License-Identifier: Apache-2.0
#include "common/prediction.h"

#include "ds/units.h"

namespace ds::tools {
namespace {
using Json = nlohmann::ordered_json;
}  // namespace

nlohmann::ordered_json memory_json(const std::vector<TagMemory>& memory) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::object();
  for (const TagMemory& m : memory) {
    rows[m.tag] = {{"predicted_bytes", m.predicted}, {"peak_bytes", m.counted}};
    if (m.bound != Bound::Exact) rows[m.tag]["bound"] = bound_text(m.bound);
  }
  return rows;
}

namespace {

nlohmann::ordered_json tokens_json(const TokenizedText& t) {
  Json tokens = Json::array(), named = Json::array();
  for (const auto& token : t.tokens) tokens.push_back({{"id", token.id}, {"piece", token.piece}});
  for (const auto& token : t.named)
    named.push_back({{"role", token.role}, {"content", token.content}, {"id", token.id}, {"source", token.source}});
  return {{"tokenizer", t.tokenizer}, {"identity", t.identity}, {"tokens", tokens},      {"named", named},
          {"ends", t.ends},           {"adds_bos", t.adds_bos}, {"adds_eos", t.adds_eos}};
}

nlohmann::ordered_json documents_json(const DocumentSurvey& s) {
  return {{"documents", s.documents},
          {"tokens", s.tokens},
          {"median_tokens", s.median},
          {"longest_tokens", s.longest},
          {"cut", s.cut},
          {"samples", s.samples},
          {"full", s.full}};
}

void print_tokens(const TokenizedText& t, Output& out) {
  out.print("\ntokenizer {}: {}\n", t.tokenizer, t.identity);
  for (const auto& token : t.tokens) out.print("  {:>8}  {}\n", token.id, token.piece);
  if (!t.named.empty()) out.print("\n  special and added tokens\n");
  for (const auto& token : t.named)
    out.print("  {:>8}  {:<20} {:<10} {}\n", token.id, token.content, token.role, token.source);
  if (!t.ends.empty()) out.print("  a completion ends with {}\n", fmt::format("{}", fmt::join(t.ends, " or ")));
  if (t.adds_bos) out.print("  bos_token comes before a prompt\n");
  if (t.adds_eos) out.print("  transformers puts eos_token after a text; libds does not put it after a prompt\n");
}

void warn_of_too_much(const RunPrediction& p, const RankInfo& ranks) {
  if (p.needed_bytes > p.available_bytes &&
      (ranks.rank == 0 || p.device == "cuda"))  // ranks may have GPUs of their own
    report_warning(fmt::format("a run here would be refused: rank {} needs {}, but {} are available ({})", ranks.rank,
                               bytes_text(p.needed_bytes), bytes_text(p.available_bytes), p.limited_by));
}

}  // namespace

void print_prediction(const Config& config, const RankInfo& ranks, Output& out,
                      const std::optional<SessionSizes>& session, const TokenizedText* tokenized,
                      const RunDocuments& documents) {
  const RunPrediction p = predict_run(config, ranks, session);
  warn_of_too_much(p, ranks);
  if (out.json()) {
    Json tags = Json::object();
    Json bounds = Json::object();
    for (const auto& m : p.memory) {
      tags[m.tag] = m.predicted;
      if (m.bound != Bound::Exact) bounds[m.tag] = bound_text(m.bound);
    }
    Json files = Json::object();
    for (const auto& m : p.files) files[m.tag] = m.predicted;
    Json stages = Json::array();
    for (const StagePlan& s : p.stages) {
      stages.push_back({{"ranks", s.ranks},
                        {"layers", s.layers},
                        {"heads", s.heads},
                        {"num_params", s.num_params},
                        {"memory_bytes", s.memory_bytes}});
    }
    Json document = {{"config", Json::parse(resolved_json(config))},
                     {"num_params", p.num_params},
                     {"flops_per_token", p.flops_per_token},
                     {"stages", stages},
                     {"bubble_fraction", p.bubble_fraction},
                     {"memory_bytes", tags},
                     {"file_bytes", files},
                     {"total_bytes", p.total_bytes},
                     {"process_bytes", p.process_bytes},
                     {"momentary_bytes", p.momentary_bytes},
                     {"device", p.device},
                     {"needed_bytes", p.needed_bytes},
                     {"available_bytes", p.available_bytes},
                     {"comm_bytes_per_step", p.comm_bytes}};
    if (!bounds.empty()) document["memory_bounds"] = bounds;
    if (!p.mean_comm_bytes.empty()) document["mean_comm_bytes_per_step"] = p.mean_comm_bytes;
    if (!p.most_comm_bytes.empty()) document["most_comm_bytes_per_step"] = p.most_comm_bytes;
    if (documents.training) document["documents"]["training"] = documents_json(*documents.training);
    if (documents.validation) document["documents"]["validation"] = documents_json(*documents.validation);
    if (tokenized != nullptr) document["tokenized"] = tokens_json(*tokenized);
    out.document(document);
    return;
  }
  const bool cut = config.ranks_per_replica() > 1;
  out.write(resolved_json(config));
  out.print("\n\n{} parameters, {:.3g} FLOPs per token, {} rank{} on {}\n\nmemory {}\n", p.num_params,
            p.flops_per_token, ranks.world_size, ranks.world_size == 1 ? "" : "s", p.device,
            cut ? fmt::format("of rank {}", ranks.rank) : "per rank");
  for (const auto& m : p.memory) {
    if (m.tag != "host" || p.host_bytes == 0)
      out.print("  {:<12} {:>14}{}{}\n", m.tag, bytes_text(m.predicted), m.bound == Bound::Exact ? "" : " ",
                bound_text(m.bound));
  }
  out.print("  {:<12} {:>14}\n", "total", bytes_text(p.total_bytes));
  if (p.process_bytes > 0)
    out.print("  {:<12} {:>14} in addition, and at most {} more for a moment\n", "process", bytes_text(p.process_bytes),
              bytes_text(p.momentary_bytes));
  out.print("  {:<12} {:>14}{}; {} are available ({})\n", "at most", bytes_text(p.needed_bytes),
            p.sharers > 1 ? fmt::format(" of {} ranks", p.sharers) : "", bytes_text(p.available_bytes), p.limited_by);
  if (p.host_bytes > 0) out.print("  {:<12} {:>14} of the node's memory\n", "host", bytes_text(p.host_bytes));
  for (const auto& m : p.files)
    out.print("  {:<12} {:>14} {}\n", m.tag, bytes_text(m.predicted), place_of_offloaded(config, m.tag));
  const bool differ = !p.mean_comm_bytes.empty();
  const auto print = [&](const std::map<std::string, i64>& sent) {
    for (const auto& [name, bytes] : sent) {
      const auto most = p.most_comm_bytes.find(name);
      const bool exact = most == p.most_comm_bytes.end();
      if (bytes > 0 || !exact)
        out.print("  {:<20} {:>14}{}\n", name, bytes_text(bytes),
                  exact ? "" : fmt::format(", at most {} in a step", bytes_text(most->second)));
    }
  };
  out.print("\nsent per rank {}\n", differ ? "in the last step" : "and step");
  std::map<std::string, i64> last = p.comm_bytes;
  for (const auto& [name, bytes] : p.most_comm_bytes) last.try_emplace(name, 0);
  print(last);
  if (config.sparse_gradients) out.print("  messages of sparse gradients depend on the tokens\n");
  if (differ)
    out.print("\nsent per rank on average over all steps{}\n", p.most_comm_bytes.empty() ? "" : ", if none is skipped");
  print(p.mean_comm_bytes);
  if (cut) out.data("\n" + plan_text(config, ranks.world_size, out.columns(), out.colour()));
  if (config.sparse_attention.mode != SparseAttentionMode::None) out.data("\n" + pattern_text(config, out.columns()));
  if (tokenized != nullptr) print_tokens(*tokenized, out);
}

void print_session(const Config& config, const RankInfo& ranks, Output& out, const SessionSizes& sizes,
                   const std::optional<DraftModel>& draft) {
  const RunPrediction p = predict_run(config, ranks, sizes, draft);
  warn_of_too_much(p, ranks);
  i64 file_bytes = 0;
  for (const TagMemory& m : p.files) file_bytes += m.predicted;
  if (out.json()) {
    nlohmann::ordered_json document = {{"num_params", p.num_params},
                                       {"batch", sizes.at_once},
                                       {"context", sizes.context},
                                       {"chunk", sizes.chunk},
                                       {"cache", sizes.cached}};
    if (draft) document.update({{"draft_tokens", sizes.draft_tokens}, {"draft_bytes", p.draft_bytes}});
    document.update({{"memory", memory_json(p.memory)},
                     {"total_bytes", p.total_bytes},
                     {"process_bytes", p.process_bytes},
                     {"available_bytes", p.available_bytes},
                     {"matrices", p.matrices},
                     {"streamed_bytes_per_pass", p.streamed_bytes},
                     {"file_bytes", file_bytes}});
    out.document(document);
    return;
  }
  out.print("{} parameters; batch {}, context {}, chunk {}, cache {} tokens{}\n", p.num_params, sizes.at_once,
            sizes.context, sizes.chunk, sizes.cached,
            draft ? fmt::format("; draft {}, {} tokens at a time", draft->name, sizes.draft_tokens) : "");
  std::string matrices;
  for (const auto& [form, number] : p.matrices)
    matrices += fmt::format("{} {} in {}", matrices.empty() ? "" : ";", number, form);
  if (!matrices.empty()) out.print("matrices:{}\n", matrices);
  out.print("\nmemory of rank 0\n");
  for (const TagMemory& m : p.memory)
    out.print("  {:<14} {:>15}{}{}\n", m.tag, bytes_text(m.predicted), m.bound == Bound::Exact ? "" : " ",
              bound_text(m.bound));
  out.print("  {:<14} {:>15}; {} are available ({})\n", "together", bytes_text(p.total_bytes),
            bytes_text(p.available_bytes), p.limited_by);
  if (draft) out.print("  {:<14} {:>15} of these\n", "draft", bytes_text(p.draft_bytes));
  if (p.streamed_bytes > 0)
    out.print("\nweights are streamed: {} in a pass, {}\n", bytes_text(p.streamed_bytes),
              file_bytes > 0 ? fmt::format("from a file of {}", bytes_text(file_bytes)) : "from host memory");
}

}  // namespace ds::tools
