// SPDX-License-Identifier: Apache-2.0
#include "memreport/explain.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "ds/units.h"

namespace ds::memreport {
namespace {

// "7.5e9", "124.44e6", "1536": parameters and elements.
std::string count(double x) {
  struct Scale {
    double unit;
    const char* exponent;
  };
  for (const auto& [unit, exponent] : {Scale{1e12, "e12"}, {1e9, "e9"}, {1e6, "e6"}})
    if (x >= unit) return fmt::format("{:.6g}{}", x / unit, exponent);
  return fmt::format("{:.0f}", x);
}

std::string gb(double bytes) {
  const double x = bytes / 1e9;
  return x >= 1 || x == 0 ? fmt::format("{:.3f}", x) : fmt::format("{:.3g}", x);
}

std::string binary(double bytes) {
  return bytes >= 0x1p50 ? fmt::format("{:.1f} TiB", bytes / 0x1p40) : bytes_text(std::llround(bytes));
}

std::string missing(std::string_view what) { return fmt::format("  not known without {}.\n", what); }

char mark(bool own) { return own ? '>' : ' '; }

double engine_total(const Subject& s, const RankParams& psi, int stage) {
  const bool sums_locally = stage < 2 && s.micro_batches > 1;  // reduce_order "boundary", the default there
  return model_states(psi, stage, s.dp, engine_state_bytes(stage, sums_locally, s.bytes)).total();
}

struct Cut {
  const char* name;
  bool tp, sequence_parallel;
};
struct Row {
  CheckpointGranularity recompute;
  const char* recompute_name;
  Cut cut;
  const char* formula;
};
constexpr Cut kWhole{"-", false, false}, kTp{"tp", true, false}, kTpSp{"tp+sp", true, true}, kAny{"any", true, false};
// Table 2 of Korthikanti et al., and its selective rows for t = 1.
constexpr std::array<Row, 7> kRows = {{
    {CheckpointGranularity::None, "none", kWhole, "sbh(34 + 5as/h)"},
    {CheckpointGranularity::None, "none", kTp, "sbh(10 + 24/t + 5as/(ht))"},
    {CheckpointGranularity::None, "none", kTpSp, "sbh(34/t + 5as/(ht))"},
    {CheckpointGranularity::Selective, "selective", kWhole, "34sbh"},
    {CheckpointGranularity::Selective, "selective", kTp, "sbh(10 + 24/t)"},
    {CheckpointGranularity::Selective, "selective", kTpSp, "34sbh/t"},
    {CheckpointGranularity::Layer, "full", kAny, "2sbh"},
}};

bool is_own(const Row& row, const Subject& s) {
  if (row.recompute != s.recompute) return false;
  if (row.recompute == CheckpointGranularity::Layer) return true;
  return row.cut.tp == (s.tp > 1) && row.cut.sequence_parallel == (s.tp > 1 && s.sequence_parallel);
}

// The content of the brackets, with numbers: "10 + 24/8 + 80/8".
std::string numbers(const Row& row, const Subject& s) {
  const std::string scores = fmt::format("{:.6g}", s.layer().scores());
  const bool none = row.recompute == CheckpointGranularity::None;
  if (row.recompute == CheckpointGranularity::Layer) return "2";
  if (!row.cut.tp) return none ? fmt::format("34 + {}", scores) : "34";
  const std::string rest = none ? fmt::format(" + {}/{}", scores, s.tp) : "";
  return row.cut.sequence_parallel ? fmt::format("34/{}{}", s.tp, rest) : fmt::format("10 + 24/{}{}", s.tp, rest);
}

std::string in_flight_text(const Subject& s, const PipelineShape& p) {
  const double layers = layers_in_flight(p);
  if (s.pp == 1 && s.chunks > 1)
    return fmt::format("Breadth first: all L = {} layers' activations are kept for all {} micro-batches.\n", p.layers,
                       p.micro_batches);
  if (s.pp == 1) return fmt::format("All L = {} layers' activations are kept for one micro-batch.\n", p.layers);
  if (p.v_passes > 0)
    return fmt::format("Each stage, a V: at most {} passes of L/(2p) layers = {:.6g} layers' worth.\n", p.v_passes,
                       layers);
  if (s.chunks > 1)
    return fmt::format(
        "First stage, interleaved: L(1 + (p-1)/(pv)) = {0}·(1 + {1}/({2}·{3})) = {4:.6g} layers' worth.\n", p.layers,
        p.stages - 1, p.stages, p.chunks, layers);
  if (p.micro_batches > 0 && p.micro_batches < p.stages)
    return fmt::format("First stage, 1F1B with fewer micro-batches than stages: L·{}/{} = {:.6g} layers' worth.\n",
                       p.micro_batches, p.stages, layers);
  return fmt::format("First stage, 1F1B: p = {} micro-batches of L/p layers = L = {} layers' worth.\n", p.stages,
                     p.layers);
}

// Features of this model that the GPT of the papers lacks.
std::string differences(const ModelShape& m) {
  std::string text;
  const auto add = [&](bool differs, std::string_view what) {
    if (differs) text += fmt::format("{}{}", text.empty() ? "" : ", ", what);
  };
  add(m.num_kv_heads() != m.heads, fmt::format("{} key/value heads for {} heads", m.num_kv_heads(), m.heads));
  add(m.attention > 0, "keys and values made from a latent");
  add(m.gated, "a gated MLP");
  add(m.more_params != 0, "experts in blocks, each for some tokens");
  add(m.ffn_size() != 4 * m.hidden, fmt::format("an MLP of {} instead of 4h = {}", m.ffn_size(), 4 * m.hidden));
  return text.empty() ? "" : fmt::format("This model differs, which the formulas do not know:\n  {}.\n", text);
}

}  // namespace

std::string zero_paper_gb(double bytes) {
  const double x = bytes / 1e9;
  if (x >= 100) return fmt::format("{:.0f}", std::floor(x));
  if (x < 1) return fmt::format("{:.2g}", x);
  const double scale = x >= 10 ? 10 : 100;
  return fmt::format("{:g}", std::floor(x * scale + 0.5) / scale);
}

namespace {

// Table rows of ZeRO's stages: a formula, and the same with numbers.
using FormulaRow = std::pair<std::string, std::string>;
std::array<FormulaRow, 4> zero_rows(const Subject& s, const RankParams& psi) {
  const std::string n = count(psi.all), held = count(psi.held);
  if (s.ep == 1)
    return {{{"(2 + 2 + K)Ψ", fmt::format("16 · {}", n)},
             {"(4 + K/N)Ψ", fmt::format("(4 + 12/{}) · {}", s.dp, n)},
             {"(2 + (2 + K)/N)Ψ", fmt::format("(2 + 14/{}) · {}", s.dp, n)},
             {"(2 + 2 + K)Ψ/N", fmt::format("16/{} · {}", s.dp, n)}}};
  return {{{"(2 + 2 + K)Ψ'", fmt::format("16 · {}", held)},
           {"4Ψ' + KΨ/N", fmt::format("4 · {} + 12/{} · {}", held, s.dp, n)},
           {"2Ψ' + (2 + K)Ψ/N", fmt::format("2 · {} + 14/{} · {}", held, s.dp, n)},
           {"(2 + 2 + K)Ψ/N", fmt::format("16/{} · {}", s.dp, n)}}};
}

// Experts over ranks: what a rank has of them.
std::string experts_of_rank(const Subject& s, const RankParams& psi) {
  if (s.ep == 1) return "";
  const double parts = static_cast<double>(s.tp * s.pp);
  return fmt::format(
      "Of these Ψe = {0} are experts', over E = ep = {1} ranks (DeepSpeed-MoE, arXiv 2201.05596): a rank has\n"
      "Ψ' = Ψ - Ψe(1 - 1/{1}) = {2}, and each expert is on {3} rank{4}.\n",
      count(s.experts / parts), s.ep, count(psi.held), s.dp / s.ep, s.dp == s.ep ? "" : "s");
}

std::string rows_to_experts(const Subject& s) {
  if (s.ep == 1) return "";
  std::string text =
      s.dp == s.ep ? "  Of experts nothing is sent, since each is on one rank: less by Ψe/E for each Ψ'.\n" : "";
  if (!s.has_tokens() || s.sparse_layers == 0) return text;
  const double rows = static_cast<double>(s.experts_per_token) * s.layer().sbh();
  const double elems = 4 * rows * static_cast<double>(s.sparse_layers) * (1 - 1 / static_cast<double>(s.ep));
  return text + fmt::format(
                    "  Rows to experts and back, forward and backward: 4·k·sbh·(1 - 1/E) in each of {} sparse blocks,\n"
                    "  k = {} = {} elements per micro-batch, {} GB in 16 bit, if all are chosen equally often.\n",
                    s.sparse_layers, s.experts_per_token, count(elems), gb(2 * elems));
}

}  // namespace

std::string explain_zero(const Subject& s, double params) {
  const RankParams psi = s.of_rank(params);
  const std::string n = count(psi.all);
  const char* const sent = s.ep > 1 ? "Ψ'" : "Ψ";
  std::string text =
      "ZeRO: model states of a rank (Rajbhandari et al., arXiv 1910.02054, sections 3.1, 5 and 7)\n"
      "The paper's accounting: 16-bit parameters 2Ψ, 16-bit gradients 2Ψ, Adam in fp32 KΨ with K = 12:\n"
      "master, momentum and variance. GB = 10^9 bytes.\n";
  text += s.tp * s.pp == 1 ? fmt::format("Ψ = {} parameters, N = dp = {} ranks.\n", n, s.dp)
                           : fmt::format("Ψ = {} / (tp {} · pp {}) = {} parameters of a rank, N = dp = {} ranks.\n",
                                         count(params), s.tp, s.pp, n, s.dp);
  text += experts_of_rank(s, psi);
  const std::array<FormulaRow, 4> rows = zero_rows(s, psi);
  size_t width = 28;
  for (const auto& [formula, numbers] : rows) width = std::max(width, numbers.size() - 1);  // "·" has two bytes
  text += fmt::format("  {:<5}  {:<16}  {:<{}}  {:>12}  {:>10}  {:>12}\n", "stage", "formula", "with the numbers",
                      width, "GB", "as table 1", "libds GB");
  for (int stage = 0; stage < 4; ++stage) {
    const double bytes = model_states(psi, stage, s.dp).total();
    const auto& [formula, numbers] = rows[static_cast<size_t>(stage)];
    text += fmt::format("{} {:<5}  {:<16}  {:<{}}  {:>12}  {:>10}  {:>12}\n", mark(stage == s.stage), stage, formula,
                        numbers, width, gb(bytes), zero_paper_gb(bytes), gb(engine_total(s, psi, stage)));
  }
  text += fmt::format(
      "libds counts otherwise: it sums gradients in {} ({:.0f} more bytes, cut like the optimizer, whole at\n"
      "stage 1 when a rank sums several micro-batches first), and from stage 2 on 16-bit gradients lie in\n"
      "buckets alone, which come on top. The prediction from a config counts as libds does.\n",
      s.bytes.sum < 4 ? "16 bits" : "fp32", s.bytes.sum);
  if (s.bytes.sent != 2) {
    text += "At stages 0 and 1 products add to these sums if a rank has several micro-batches, and one\n";
    text += s.bytes.sent == 0
                ? "data-parallel rank has no 16-bit gradients beside them.\n"
                : "data-parallel rank exchanges them over sequence parallelism in fp32, not in 16 bits.\n";
  }
  if (s.bytes.master == 0) text += "Parameters are their own masters here, in 16 bits.\n";
  text += fmt::format("In fp32 (4Ψ + 4Ψ + {:.3g}Ψ) a rank has {} GB at stage {}.\n", s.bytes.states,
                      gb(model_states(psi, s.stage, s.dp, {4, 4, s.bytes.states}).total()), s.stage);
  for (const int stage : {2, 3}) {
    const double elems = zero_volume_elems(psi.held, stage);
    text += fmt::format("{} Sent per step at {}: {}{} = {} elements, {} GB in 16 bit.\n",
                        mark((s.stage == 3) == (stage == 3)), stage == 3 ? "stage 3" : "stages 0, 1 and 2",
                        stage == 3 ? 3 : 2, sent, count(elems), gb(2 * elems));
  }
  return text + rows_to_experts(s) +
         "  The paper takes (N - 1)/N for 1, and one micro-batch per step. With m of them, libds sends 2Ψ at\n"
         "  stages 0 and 1, unless deterministic, (m + 1)Ψ at stage 2 and 3mΨ at stage 3, times (N - 1)/N;\n"
         "  breadth first (m + 2)Ψ at stage 3.\n";
}

std::string explain_activations(const Subject& s) {
  std::string text =
      "Activations kept for the backward pass (Korthikanti et al., arXiv 2205.05198, table 2)\n"
      "The paper's accounting: a GPT in 16 bit with an MLP of 4h, dropout masks of one byte, attention\n"
      "scores kept. libds keeps no scores at all: its attention works by tiles. GiB = 2^30 bytes.\n";
  if (!s.has_tokens()) return text + missing("layers, hidden size, heads, vocabulary and sequence length");
  const LayerShape layer = s.layer();
  const PipelineShape pipeline{s.model.layers, s.pp, s.chunks, s.micro_batches, s.v_passes};
  text += differences(s.model);
  text += fmt::format("s = {}, b = {}, h = {}, a = {}, L = {}, t = tp = {}.\n", s.seq, s.micro_batch, s.model.hidden,
                      s.model.heads, s.model.layers, s.tp);
  text += fmt::format("34·s·b·h + 5·a·s²·b = 34·{0}·{1}·{2} + 5·{3}·{0}²·{1} = {4} per layer\n", s.seq, s.micro_batch,
                      s.model.hidden, s.model.heads,
                      binary(layer_activations(layer, 1, false, CheckpointGranularity::None)));
  text += fmt::format("5as/h = 5·{}·{}/{} = {:.6g}; sbh = {}\n", s.model.heads, s.seq, s.model.hidden, layer.scores(),
                      binary(layer.sbh()));
  text += fmt::format("  {:<9}  {:<5}  {:<25}  {:<21}  {:>12}  {:>12}\n", "recompute", "cut", "formula", "sbh times",
                      "per layer", "first stage");
  for (const Row& row : kRows) {
    const i64 tp = row.cut.tp ? s.tp : 1;
    const double bytes = layer_activations(layer, tp, row.cut.sequence_parallel, row.recompute);
    const bool cut_rows =
        row.recompute == CheckpointGranularity::Layer ? s.sequence_parallel : row.cut.sequence_parallel;
    const double total =
        bytes * layers_in_flight(pipeline) + extra_activations(layer, pipeline, s.model.vocab, tp, cut_rows);
    text += fmt::format("{} {:<9}  {:<5}  {:<25}  {:<21}  {:>12}  {:>12}\n", mark(is_own(row, s)), row.recompute_name,
                        row.cut.name, row.formula, numbers(row, s), binary(bytes), binary(total));
  }
  text += in_flight_text(s, pipeline);
  text += s.pp > 1 ? "Beside them: the embedding's dropout masks, sbh for each micro-batch under way.\n"
                   : fmt::format(
                         "Beside them: the embedding's dropout mask sbh, and 4sbh(1 + V/h) of the output layer, "
                         "V = {}.\n",
                         s.model.vocab);
  return text + "With full recomputation, one layer's activations come on top while it is computed again.\n";
}

std::string explain_megatron(const Subject& s, double params) {
  const double cut = megatron_bytes_per_param(true, s.dp);
  std::string text =
      "Megatron-LM's report (megatron/training/theoretical_memory_usage.py)\n"
      "Megatron's accounting: 16-bit parameters 2, fp32 gradients 4, fp32 master and Adam 12 bytes.\n";
  text += fmt::format("Bytes per parameter: 18; with the distributed optimizer 6 + 12/N = 6 + 12/{} = {:.6g}.\n", s.dp,
                      cut);
  double loaded = params / static_cast<double>(s.tp * s.pp);
  if (s.has_shape()) {
    const ModelShape& m = s.model;
    loaded = most_loaded_params(m, s.tp, s.pp);
    text += fmt::format("Most loaded rank: the first stage, with the embedding:\n  ({}/{} + {}·{}{}) / {}\n",
                        count(static_cast<double>(block_params(m))), s.pp, m.vocab + m.positions, m.hidden,
                        m.tied || s.pp > 1 ? "" : fmt::format(" + {}·{}", m.vocab, m.hidden), s.tp);
  } else {
    text += "Of a rank, if all have the same share:\n";
  }
  const RankParams of_rank(loaded, s.experts / static_cast<double>(s.tp * s.pp), s.ep);
  text += fmt::format("  = {} parameters{}: 18 · {} = {}, distributed optimizer {}.\n", count(loaded),
                      s.ep > 1 ? fmt::format(", less 1 - 1/{} of its experts", s.ep) : "", count(of_rank.held),
                      binary(megatron_bytes(of_rank, false, s.dp)), binary(megatron_bytes(of_rank, true, s.dp)));
  if (!s.has_tokens()) return text;
  const i64 ffn = s.model.ffn_size();
  return text + fmt::format(
                    "Activations per layer with sp and selective recomputation: sbh(18 + 4·ffn/h)/t\n"
                    "  = {}·{}·{}·(18 + 4·{}/{})/{} = {}.\n",
                    s.seq, s.micro_batch, s.model.hidden, ffn, s.model.hidden, s.tp,
                    binary(megatron_layer_activations(s.layer(), ffn, s.tp)));
}

std::string explain_offloading(const Subject& s, double params) {
  const RankParams all(params, s.experts, s.ep);
  const OffloadSizes o = offload_sizes(all, s.dp);
  const std::string n = count(params);
  std::string text = fmt::format(
      "ZeRO-Offload (Ren et al., arXiv 2101.06840, sections 3 and 4.2)\n"
      "The paper's accounting: 16-bit gradients, and data parallelism alone. GB = 10^9 bytes.\n"
      "Of a rank, on the device 2{5} = 2 · {6} = {1} GB, in host memory\n"
      "14Ψ/N = 14/{2} · {0} = {3} GB, moved between them in a step 4Ψ/N = {4} GB.\n\n"
      "ZeRO-Infinity (Rajbhandari et al., arXiv 2104.07857, section 3, equations 1 to 5)\n"
      "The paper's accounting: 20 bytes per parameter, of which 4 are an fp32 gradient; all ranks together.\n",
      n, gb(o.device), s.dp, gb(o.host), gb(o.moved), s.ep > 1 ? "Ψ'" : "Ψ", count(all.held));
  if (!s.has_shape()) return text + missing("layers, hidden size, heads and vocabulary");
  const i64 L = s.model.layers, h = s.model.hidden, ci = s.layers_per_checkpoint;
  text += fmt::format("Parameters 12Lh² = 12·{}·{}² = {}; model states 240Lh² = {}.\n", L, h,
                      count(infinity_params(L, h)), binary(infinity_model_states(L, h)));
  text += fmt::format("Working memory of the largest operator (MSWM): 4h·4h = 16·{}² = {}.\n", h,
                      binary(infinity_model_working(h)));
  if (!s.has_tokens()) return text + missing("the sequence length");
  const LayerShape layer = s.layer();
  text += fmt::format("Checkpoints, one of {0} layer{1}: 2bshL/ci = 2·{2}·{3}·{4}·{5}/{0} = {6} of a rank.\n", ci,
                      ci == 1 ? "" : "s", s.micro_batch, s.seq, h, L, binary(infinity_checkpoints(layer, L, ci)));
  return text + fmt::format("Between two of them (AWM): bs·ci(16h + 2as) = {}·{}·{}·(16·{} + 2·{}·{})\n  = {}.\n",
                            s.micro_batch, s.seq, ci, h, s.model.heads, s.seq,
                            binary(infinity_activation_working(layer, ci)));
}

std::string explain_rules(const Subject& s) {
  std::string text =
      "M_model = 4nh(13 + 12h), M_activation = nblh(67 + 9ml/h)\n"
      "A rule of thumb, not of a paper: bytes of a GPT in fp32, n layers, m heads, l tokens, one rank,\n"
      "without embeddings, gradients and optimizer. M_model is exactly the weights of its layers.\n";
  if (!s.has_shape()) return text + missing("layers, hidden size, heads and vocabulary");
  const i64 n = s.model.layers, h = s.model.hidden;
  text += fmt::format("M_model = 4·{0}·{1}·(13 + 12·{1}) = {2}\n", n, h, binary(rule_model_bytes(n, h)));
  if (!s.has_tokens()) return text + missing("the sequence length");
  return text + fmt::format("M_activation = {0}·{1}·{2}·{3}·(67 + 9·{4}·{2}/{3}) = {5}\n", n, s.micro_batch, s.seq, h,
                            s.model.heads, binary(rule_activation_bytes(s.layer(), n)));
}

std::string explain(const Subject& s) {
  DS_CHECK(s.params > 0 || s.has_shape(), Errc::Config,
           "nothing to explain: neither a number of parameters nor a model's layers, hidden size, heads and vocabulary"
           " are known");
  const double params = s.params > 0 ? s.params : static_cast<double>(num_params(s.model));
  std::string text = explain_zero(s, params);
  for (const std::string& block :
       {explain_activations(s), explain_megatron(s, params), explain_offloading(s, params), explain_rules(s)})
    text += "\n" + block;
  return text;
}

}  // namespace ds::memreport
