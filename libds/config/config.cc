// SPDX-License-Identifier: Apache-2.0
// From text to Config: the table reads each key by itself, then the functions below check what keys say about each
// other and fill in the defaults that depend on other keys.
#include "ds/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <optional>

#include "base/check.h"
#include "base/gguf.h"
#include "config/automatic.h"
#include "config/curriculum.h"
#include "config/data_format.h"
#include "config/diloco.h"
#include "config/documents.h"
#include "config/keys.h"
#include "config/model_config.h"
#include "config/named_files.h"
#include "config/offload.h"
#include "config/optimizer.h"
#include "config/parallel.h"
#include "config/post_validate.h"
#include "config/precision.h"
#include "config/random_ltd.h"
#include "config/reader.h"
#include "config/scheduler.h"
#include "config/sparse_attention.h"

namespace ds {
namespace {

bool has_error(std::span<const Diagnostic> diagnostics) {
  return std::any_of(diagnostics.begin(), diagnostics.end(),
                     [](const Diagnostic& d) { return d.severity == Severity::Error; });
}

constexpr std::string_view kTrain = "train_batch_size";
constexpr std::string_view kMicro = "train_micro_batch_size_per_gpu";
constexpr std::string_view kAccumulation = "gradient_accumulation_steps";

// The multiples of `step` around x that are positive.
std::string around(i64 x, i64 step) {
  const i64 below = x / step * step;
  return below > 0 ? fmt::format("{} or {}", below, below + step) : fmt::format("{}", step);
}

// DeepSpeed's table: train = micro * accumulation * world, the data-parallel ranks (perhaps all); from any two the
// third, from one the rest.
void resolve_batch(BatchConfig& b, i64 world, bool all, Reader& r) {
  const std::string ranks = fmt::format("{} {}rank{}", world, all ? "" : "data-parallel ", world == 1 ? "" : "s");
  if (r.any_broken({kTrain, kMicro, kAccumulation})) return;
  const auto check_accumulation = [&] {
    if (b.accumulation > kMostAccumulation)
      r.error(kAccumulation,
              fmt::format("{} is beyond {}; a larger {} needs fewer", b.accumulation, kMostAccumulation, kMicro));
  };
  // Nothing, and an error, where the step would have more samples than are computed with.
  const auto samples = [&]() -> std::optional<i64> {
    const std::optional<i64> n = checked_mul({b.micro, b.accumulation, world});
    if (n && *n <= kMostBatch) return n;
    r.error(r.given(kMicro) ? kMicro : kAccumulation,
            fmt::format("{} {} x {} {} x {} is beyond {} samples of a step", kMicro, b.micro, kAccumulation,
                        b.accumulation, ranks, kMostBatch));
    return std::nullopt;
  };
  const bool train = r.given(kTrain), accumulation = r.given(kAccumulation);
  bool micro = r.given(kMicro);
  if (!train && !micro && (r.automatic(kMicro) || r.automatic(kTrain))) {
    b.micro = 1;
    micro = true;
  }
  if (!train && !micro)
    return r.error(kTrain, fmt::format("is missing: give {} or {}{}", kTrain, kMicro,
                                       accumulation ? fmt::format(" (not {} alone)", kAccumulation) : ""));
  if (train && micro && accumulation) {
    if (const std::optional<i64> n = samples(); n && b.train != *n)
      r.error(kTrain, fmt::format("{} is not {} {} x {} {} x {} = {}", b.train, kMicro, b.micro, kAccumulation,
                                  b.accumulation, ranks, *n));
    return;
  }
  if (!train) {
    if (!accumulation) b.accumulation = 1;
    b.train = samples().value_or(0);
    return;
  }
  // The given factor divides with the ranks; the other is derived.
  if (!micro && !accumulation) b.accumulation = 1;
  const i64 divisor = (micro ? b.micro : b.accumulation) * world;
  if (b.train % divisor != 0)
    return r.error(kTrain, fmt::format("{} cannot be shared: {} {} x {} = {} does not divide it; {} would do", b.train,
                                       micro ? kMicro : kAccumulation, micro ? b.micro : b.accumulation, ranks, divisor,
                                       around(b.train, divisor)));
  (micro ? b.accumulation : b.micro) = b.train / divisor;
  check_accumulation();
}

// Every size by itself is within bounds by now. Their products must stay far from overflow too, so that what is
// predicted is true: upper bounds of the bytes of one rank, whatever is sharded, of what passes through it in a step,
// and of what one op computes are compared with what no node has, and none does.
void check_size(const Config& c, Reader& r) {
  if (c.model.layers == 0 || r.any_broken({kTrain, kMicro, kAccumulation, "data.seq_length"})) return;
  const ModelConfig& m = c.model;
  const auto number = [](i64 x) { return static_cast<double>(x); };
  const ExpertsConfig& x = m.experts;
  const LatentConfig& latent = m.latent;
  const double hidden = number(std::max({m.hidden, latent.rank + latent.rope_dim, latent.query_rank})),
               heads = number(m.heads * (m.head_dim + latent.value_dim)), experts = number(x.count);
  // A block's inner sizes: of its matrices, and those that one token passes through.
  const double inner = std::max(number(m.intermediate), experts * number(x.intermediate)) + number(x.shared),
               wide = std::max(number(m.intermediate), number(x.per_token) * number(x.intermediate)) + number(x.shared);
  const double params = 2 * number(m.vocab_size + m.max_positions) * hidden +
                        number(m.layers) * hidden * (4 * heads + 3 * inner + experts + 16);
  const double rows = number(c.batch.micro) * number(c.data.seq_length), passes = number(c.batch.accumulation);
  const double widest = std::max({number(m.vocab_size), 2 * wide, heads});
  const double flops = rows * std::max(2 * hidden * widest, 10 * heads * number(c.data.seq_length));  // of one op
  const double of_a_pass =
      32 * params + 8 * rows * number(m.layers) * (32 * hidden + 16 * heads + 16 * wide + 8 * experts);
  const double bytes = of_a_pass + 8 * rows * passes;
  const auto beyond = [&](std::string_view key, std::string_view what, double is, std::string_view unit, double most) {
    r.error(key,
            fmt::format("this model ({:.2g} parameters) with {:.2g} tokens per micro-batch {} up to {:.2g} {}, beyond "
                        "the {:.0f} that are computed with",
                        params, rows, what, is, unit, most));
  };
  constexpr double kTiB = 0x1p40, kExaFlop = 1e18;
  const std::string_view of_micro = r.given(kMicro) ? kMicro : kTrain;
  if (constexpr double kMost = 0x1p50; bytes > kMost)
    return beyond(of_micro, "needs", bytes / kTiB, "TiB", kMost / kTiB);
  if (constexpr double kMost = 9e18; flops > kMost)
    return beyond(of_micro, "takes for one operation", flops / kExaFlop, "EFLOP", kMost / kExaFlop);
  if (constexpr double kMost = 0x1p60; of_a_pass * passes > kMost)
    beyond(r.given(kAccumulation) ? kAccumulation : kTrain,
           fmt::format("moves in {} micro-batches", c.batch.accumulation), of_a_pass * passes / kTiB, "TiB",
           kMost / kTiB);
}

// Routers count choices in fp32, which has every integer up to this one.
void check_choices(const Config& c, Reader& r) {
  constexpr i64 kMost = i64{1} << 24;
  const i64 k = c.model.experts.per_token, tokens = c.batch.micro * c.data.seq_length;
  if (!trains(c.use) || c.model.experts.count == 0 || r.any_broken({kTrain, kMicro, kAccumulation, "data.seq_length"}))
    return;
  if (tokens * k <= kMost) return;
  const i64 sequences = kMost / (c.data.seq_length * k);
  r.error(r.given(kMicro) ? kMicro : kTrain,
          fmt::format("a micro-batch of {} tokens, of which each chooses {} experts, has {} choices, and routers count "
                      "up to {} exactly; {} would do",
                      tokens, k, tokens * k, kMost,
                      sequences > 0 ? fmt::format("{} sequences", sequences)
                                    : fmt::format("a sequence of {} tokens", kMost / k)));
}

void resolve_zero(Config& c, Reader& r) {
  c.zero.loco.enabled = trains(c.use) && r.given("zero_optimization.zeropp_loco_param");
  if (!r.given("zero_optimization.overlap_comm")) c.zero.overlap_comm = c.zero.stage == 3;
  const bool every_micro = c.zero.stage >= 2 || c.deterministic;
  if (every_micro && r.given("reduce_order") && c.reduce_order == ReduceOrder::Boundary)
    r.error("reduce_order", c.zero.stage >= 2
                                ? fmt::format("\"boundary\" keeps whole gradients, which ZeRO stage {} does not; its "
                                              "order is \"micro\"",
                                              c.zero.stage)
                                : std::string("\"deterministic\" sums in the order \"micro\""));
  if (every_micro) c.reduce_order = ReduceOrder::Micro;
  if (c.gradient_reduce == GradientReduce::Sum && c.loss.norm == LossNorm::Token)
    r.error("gradient_allreduce_op",
            "\"sum\" adds the means of ranks, and loss_norm \"token\" has one mean of all tokens");
  constexpr std::string_view kTile = "zero_optimization.stage3_tile_size";
  if (c.zero.tile_size > 0 && c.zero.stage != 3 && !r.any_broken({kTile, "zero_optimization.stage"}))
    r.error(kTile, fmt::format("ZeRO stage {} keeps whole parameters; stage 3 gathers them, which tiles are for",
                               c.zero.stage));
}

// Checks the keys of codes, and of ZeRO++, which changes how stage 3 gathers. replicas: of data parallelism.
void check_zeropp(const Config& c, i64 replicas, Reader& r) {
  constexpr std::string_view kStage = "zero_optimization.stage", kNear = "zero_optimization.zero_hpz_partition_size",
                             kCodes = "zero_optimization.zero_quantized_weights",
                             kGradients = "zero_optimization.zero_quantized_gradients",
                             kWire = "communication_data_type";
  constexpr std::string_view kLoco = "zero_optimization.zeropp_loco_param",
                             kFrozen = "zero_optimization.zero_quantized_nontrainable_weights";
  const int bits = c.gradient_code_bits();
  if (c.zero.loco.enabled && bits == 0 && !r.any_broken({kGradients, kWire}))
    r.error(kLoco, fmt::format("compensates for quantisation errors, so it needs {} true, or {} \"int8\" or \"int4\"",
                               kGradients, kWire));
  if (c.zero.quantized_gradients && c.communication_data_type == WireType::Int8)
    r.error(kWire, fmt::format("\"int8\" contradicts {}, whose codes have 4 bits", kGradients));
  if (c.zero.quantized_gradients && c.grad_accum_dtype != DType::F32)
    r.error(kGradients, "sums what codes say in fp32: data_types.grad_accum_dtype cannot be in 16 bits",
            Errc::Unavailable);
  if (c.zero.stage != 3 && !r.broken(kStage)) {
    const std::string why =
        fmt::format("ZeRO stage {} keeps whole parameters, and gathers none; stage 3 does", c.zero.stage);
    if (c.zero.hpz_partition_size > 1) r.error(kNear, why);
    if (c.zero.quantized_weights) r.error(kCodes, why);
    if (c.zero.quantized_nontrainable_weights) r.error(kFrozen, why);
    if (c.zero.quantized_gradients)
      r.error(kGradients,
              fmt::format("is of stage 3, and this is ZeRO stage {}; {} \"int4\" is of all", c.zero.stage, kWire));
    return;
  }
  if (bits > 0 && c.zero.hpz_partition_size > 1 && c.sequence_parallel.size > 1)
    r.error(kNear, "is not supported with sequence_parallel_size where gradients travel as codes", Errc::Unavailable);
  if (c.zero.hpz_partition_size > 1 && replicas > 0 && replicas % c.zero.hpz_partition_size != 0 && !r.broken(kNear))
    r.error(kNear, fmt::format("{} does not divide the {} data-parallel ranks", c.zero.hpz_partition_size, replicas));
}

// A program's model: sizes of 0 are resolved, and it is checked as far as its layers are not needed.
void take_model(Config& c, const ModelConfig& given, Reader& r) {
  ModelConfig& m = c.model = given;
  DS_CHECK(m.source != nullptr, Errc::Config, "ProgramParts::model has no source");
  if (m.heads == 0) m.heads = 1;
  if (m.kv_heads == 0) m.kv_heads = m.heads;
  if (m.head_dim == 0) m.head_dim = m.hidden / m.heads;
  if (m.intermediate == 0) m.intermediate = m.hidden;
  if (const std::string why = program_model_problem(m); !why.empty()) r.error("model", why);
}

void read_model_section(Config& c, const ConfigText& text, const ProgramParts& parts, Reader& r,
                        std::vector<Diagnostic>& diagnostics) {
  const auto it = text.root().find("model");
  if (parts.model) {
    if (it != text.root().end()) r.error("model", "the program brings the model: leave out this section");
    return take_model(c, *parts.model, r);
  }
  if (it == text.root().end()) return;
  if (!it->is_object()) return r.error("model", "must be an object: {\"path\": ...} or {\"type\": ...}");
  const auto path = it->find("path");
  if (path == it->end()) {
    c.model = read_model(*it, ModelSource::Inline, text, "model", diagnostics);
    return;
  }
  if (!path->is_string() || path->get_ref<const std::string&>().empty())
    return r.error("model.path",
                   "must be the name of a directory with a config.json, of such a file, or of a GGUF file");
  if (const auto head = it->find("new_head"); head != it->end()) {
    if (!head->is_boolean()) return r.error("model.new_head", "must be true or false");
    c.published.new_head = head->get<bool>();
  }
  for (const auto& [key, value] : it->items())
    if (key != "path" && key != "new_head")
      r.error(json_member("model", key), "stands beside model.path; a model is read from there or described here");
  c.published.path = path->get<std::string>();
  if (const std::string why = why_not_input({"model.path", c.published.path, true}); !why.empty())
    return r.error("model.path", fmt::format("{} {}", c.published.path, why));
  const size_t before = diagnostics.size();
  c.model = read_model_file(c.published.path, diagnostics);
  for (Diagnostic& d : std::span(diagnostics).subspan(before))
    if (d.line == 0 && d.key.empty()) d = text.at("model.path", d.code, to_string(d));  // no such file
}

// A model with errors counts as no model, so that nothing that follows from its sizes is reported.
void resolve_model(Config& c, const ConfigText& text, const ProgramParts& parts, Reader& r,
                   std::vector<Diagnostic>& diagnostics) {
  const size_t before = diagnostics.size();
  read_model_section(c, text, parts, r, diagnostics);
  c.model.joined_products = c.joined_products;
  if (!has_error(std::span(diagnostics).subspan(before))) return;
  c.model.layers = 0;
  r.mark_broken("model");
}

bool trains_on_text(const DataConfig& d) {
  if (d.format != DataFormat::Auto) return is_text(d.format);
  return std::any_of(d.train.begin(), d.train.end(), [](const std::string& f) { return is_text(data_format_of(f)); });
}

// In the form of a role what is said stands once.
void check_chat_template(const ChatTemplateConfig& t, Reader& r) {
  if (t == ChatTemplateConfig{}) return;
  const struct {
    std::string_view key;
    const std::string& text;
    bool has_content;
  } rows[] = {{"data.chat_template.begin", t.begin, false},
              {"data.chat_template.system", t.system, true},
              {"data.chat_template.user", t.user, true},
              {"data.chat_template.assistant", t.assistant, true},
              {"data.chat_template.tool", t.tool, true}};
  for (const auto& row : rows) {
    if (row.text.empty() || r.broken(row.key)) continue;
    const size_t first = row.text.find(kChatContent);
    if (!row.has_content && first != row.text.npos) {
      r.error(row.key, fmt::format("contains {}, but it precedes the first message", kChatContent));
    } else if (row.has_content && (first == row.text.npos || row.text.find(kChatContent, first + 1) != row.text.npos)) {
      r.error(row.key, fmt::format("must contain {} exactly once, where the content belongs", kChatContent));
    }
  }
  if (t.assistant.empty() && !r.broken("data.chat_template.assistant"))
    r.error("data.chat_template.assistant", "is missing: the model is trained on messages of the assistant");
}

// Checks the keys that only models that are not causal have, and need.
void check_objective(const Config& c, Reader& r) {
  const DataConfig& d = c.data;
  const struct {
    std::string_view key;
    i64 id;
  } tokens[] = {{"data.mlm.mask_token", d.mlm.mask_token},
                {"data.mlm.cls_token", d.mlm.cls_token},
                {"data.mlm.sep_token", d.mlm.sep_token}};
  const std::string type = type_name(c.model);
  if (c.model.causal()) {
    bool given = r.given("data.mlm.probability");
    for (const auto& t : tokens) given |= r.given(t.key);
    if (given) r.error("data.mlm", fmt::format("masks tokens, and a model of type \"{}\" predicts the next one", type));
    return;
  }
  if (d.seq_length < 3 && !r.broken("data.seq_length"))
    r.error("data.seq_length", "must be at least 3: [CLS], a token and [SEP]");
  for (const auto& t : tokens) {
    if (r.broken(t.key)) continue;
    if (!r.given(t.key) && !d.train.empty() && d.tokenizer == "bytes")
      r.error(t.key,
              fmt::format("is missing: a model of type \"{}\" is trained by masking, and the tokenizer \"bytes\" "
                          "has no such token",
                          type));
    if (t.id >= c.model.vocab_size)
      r.error(t.key, fmt::format("{} is outside the model's vocabulary of {}", t.id, c.model.vocab_size));
  }
  if (r.given(tokens[0].key) && (tokens[0].id == tokens[1].id || tokens[0].id == tokens[2].id))
    r.error(tokens[0].key, fmt::format("{} is also the token that begins or ends a sample", tokens[0].id));
}

// The keys of data files have no effect beside samples that the program brings.
void take_samples(DataConfig& d, const ProgramParts& parts, Reader& r) {
  DS_CHECK(parts.samples || !parts.validation_samples, Errc::Config,
           "ProgramParts::validation_samples needs ProgramParts::samples");
  d.samples = parts.samples;
  d.validation_samples = parts.validation_samples;
  if (!d.samples) return;
  const struct {
    std::string_view key;
    bool is_set;
  } keys[] = {{"data.train", !d.train.empty()},
              {"data.validation", !d.validation.empty()},
              {"data.weights", !d.weights.empty()},
              {"data.split", r.given("data.split") && d.split > 0},
              {"data.format", d.format != DataFormat::Auto},
              {"data.token_dtype", d.token_dtype != TokenDtype::Auto},
              {"data.packing", d.packing != DataPacking::None},
              {"data.add_document_token", d.add_document_token},
              {"data.loss_across_documents", r.given("data.loss_across_documents")},
              {"data.chat_template", d.chat_template != ChatTemplateConfig{}},
              {"data.mlm.probability", r.given("data.mlm.probability")},
              {"data.mlm.mask_token", r.given("data.mlm.mask_token")},
              {"data.mlm.cls_token", r.given("data.mlm.cls_token")},
              {"data.mlm.sep_token", r.given("data.mlm.sep_token")}};
  for (const auto& k : keys) {
    if (k.is_set) r.error(k.key, "describes data files, and the program brings the samples: leave out this key");
  }
  if (!d.validation_samples) d.split = 0;
}

// A published model reads text with the tokenizer that lies beside it.
void resolve_tokenizer(Config& c, Reader& r) {
  DataConfig& d = c.data;
  if (d.tokenizer.empty()) return r.error("data.tokenizer", "must be \"auto\", \"bytes\" or a path");
  if (r.given("data.tokenizer") || c.published.path.empty()) return;
  namespace fs = std::filesystem;
  std::error_code ignored;
  const fs::path path = c.published.path;
  if (is_gguf(path.string())) {  // which contains its tokenizer, or is a model without one
    d.tokenizer = path.string();
    return;
  }
  const fs::path directory = fs::is_directory(path, ignored) ? path : path.has_parent_path() ? path.parent_path() : ".";
  const auto has = [&](const char* name) { return fs::exists(directory / name, ignored); };
  if (has("tokenizer.json") || (has("vocab.json") && has("merges.txt")) || has("vocab.txt") || has("tokenizer.model"))
    d.tokenizer = directory.string();
  else if (trains_on_text(d) && !d.train.empty())
    r.warning("data.tokenizer", fmt::format("{} has no tokenizer: text is read as bytes", directory.string()));
}

void resolve_data(Config& c, const ProgramParts& parts, Reader& r) {
  DataConfig& d = c.data;
  const bool has_model = c.model.layers > 0;
  take_samples(d, parts, r);
  resolve_tokenizer(c, r);
  if (r.given("data.train") && d.train.empty()) r.error("data.train", "names no file");
  if (!d.validation.empty() && r.given("data.split"))
    r.warning("data.split", "has no effect: validation files are given");
  if (!d.weights.empty()) {
    if (!d.train.empty() && d.weights.size() != d.train.size() && !r.broken("data.train"))
      r.error("data.weights", fmt::format("has {} numbers, and data.train {} files", d.weights.size(), d.train.size()));
    if (d.validation.empty() && d.split > 0 && !r.broken("data.split") && !r.broken("data.validation"))
      r.error("data.weights", "weighs whole files: give data.validation, or set data.split to 0");
  }
  check_chat_template(d.chat_template, r);
  if (!r.given("data.seq_length")) d.seq_length = has_model ? std::min<i64>(1024, c.model.max_positions) : 1024;
  resolve_documents(c, r);
  if (c.eval.every > 0 && d.validation.empty() && d.split == 0 && !d.validation_samples)
    r.error("eval.every", "there is nothing to evaluate on: data.split is 0 and data.validation is empty");
  if (!r.given("data.seed")) d.seed = c.seed;
  if (has_model && !d.samples) check_objective(c, r);
  if (has_model && d.document_token >= c.model.vocab_size && !r.broken("data.document_token"))
    r.error("data.document_token",
            fmt::format("{} is outside the model's vocabulary of {}", d.document_token, c.model.vocab_size));
  if (!has_model || r.broken("data.seq_length")) return;
  if (d.seq_length > c.model.max_positions && !c.model.any_length())
    r.error("data.seq_length",
            fmt::format("{} is beyond the model's {} positions", d.seq_length, c.model.max_positions));
  if (d.tokenizer == "bytes" && c.model.vocab_size < 256 && !d.train.empty() && trains_on_text(d))
    r.error("model", fmt::format("the vocabulary of {} does not cover the 256 bytes of the text", c.model.vocab_size));
}

void check_invariant_forward(const Config& c, Reader& r) {
  const char* const key = "cuda.invariant_forward";
  if (c.device == DeviceKind::Cpu) r.error(key, "is for GPUs; passes on device \"cpu\" are always so");
  if (c.cuda.attention == CudaAttention::Cudnn)
    r.error(key, "takes the attention of libds, and cuda.attention asks for cuDNN");
  if (c.fp8.enabled) r.error(key, "products of FP8 are those of cuBLASLt, whose sums depend on the number of rows");
  if (c.sequence_parallel.size > 1 && c.sequence_parallel.mode == SequenceParallelMode::Ring)
    r.error(key, "attention in a ring merges the keys of a rank at a time; generation does not");
}

void check_run(const Config& c, i64 world, const ConfigText& text, Reader& r) {
  if (c.cuda.graphs && c.device == DeviceKind::Cpu)
    r.error("cuda.graphs", "there are no CUDA graphs on device \"cpu\"");
  if (c.cuda.autotune && c.device == DeviceKind::Cpu)
    r.error("cuda.autotune", "there is nothing to tune on device \"cpu\"");
  if (c.cuda.autotune && c.deterministic && c.cuda.autotune_file.empty())
    r.error(
        "cuda.autotune",
        "timing chooses the order of sums, and \"deterministic\" forbids that; cuda.autotune_file has choices of an "
        "earlier run");
  if (!c.cuda.autotune_file.empty() && c.device == DeviceKind::Cpu)
    r.error("cuda.autotune_file", "holds choices for GPUs, and device is \"cpu\"");
  if (c.cuda.attention == CudaAttention::Cudnn && c.device == DeviceKind::Cpu)
    r.error("cuda.attention", "there is no cuDNN on device \"cpu\"");
  if (c.cuda.attention == CudaAttention::Cudnn && c.work_dtype() == DType::F32)
    r.error("cuda.attention", "cuDNN computes attention in 16 bits alone: enable bf16 or fp16");
  if (c.cuda.invariant_forward) check_invariant_forward(c, r);
  if (c.cuda.graphs && c.zero.tile_size > 0)
    r.error("cuda.graphs",
            "with zero_optimization.stage3_tile_size a layer's products wait for their tiles, which no graph can",
            Errc::Unavailable);
  if (c.cuda.graphs && (c.model.embd_dropout > 0 || c.model.resid_dropout > 0 || c.model.attn_dropout > 0))
    r.error("cuda.graphs",
            "dropout draws other numbers in every step, which a graph cannot: set the model's dropout to 0");
  if (c.cuda.graphs && c.model.experts.random())
    r.error("cuda.graphs",
            "routers with noise draw other numbers in every step, which a graph cannot: use graphs without the model's "
            "moe.use_rts, moe.noisy_gate_policy, moe.top2_2nd_expert_sampling and router_jitter_noise");
  if (c.communication.backend == CommBackend::Nccl && c.device == DeviceKind::Cpu)
    r.error("communication.backend", "\"nccl\" talks between GPUs, and device is \"cpu\"");
  if (c.communication.backend == CommBackend::Self && world > 1)
    r.error("communication.backend", fmt::format("\"self\" is for 1 rank; there are {}", world));
  if (c.use == ConfigUse::Generate && !c.model.causal())
    r.error("model",
            fmt::format("a model of type \"{}\" sees the whole text and fills in masks: it cannot continue a prompt",
                        type_name(c.model)),
            Errc::Unavailable);
  if (c.use == ConfigUse::Inspect) return;
  const auto demand = [&](std::string_view key, bool there, std::string_view what) {
    if (!there && !r.broken(key)) r.error(key, fmt::format("is missing: {}", what));
  };
  if (c.use == ConfigUse::Train) demand("steps", r.given("steps"), "how many optimizer steps to train");
  if (c.use != ConfigUse::Generate)
    demand("data.train", r.given("data.train") || c.data.samples, "the file or files to train on");
  demand("model", text.root().contains("model") || c.model.source, "{\"path\": ...}, or {\"type\": ...} with sizes");
}

// The job's name is a directory below output_path, and leads nowhere else.
void check_job_name(const std::string& name, std::string_view key, Reader& r) {
  const std::filesystem::path path(name);
  const bool leads_out = path.is_absolute() || std::ranges::find(path, "..") != path.end();
  if (leads_out && !r.broken(key))
    r.error(key,
            fmt::format("\"{}\" leads out of output_path: give a name without \"..\", and the directory there", name));
}

// In DeepSpeed the section alone turns on what logs communication; we let it say that it is off.
void resolve_monitors(Config& c, const ConfigText& text, Reader& r) {
  if (const auto section = text.root().find("comms_logger");
      section != text.root().end() && section->is_object() && !r.given("comms_logger.enabled"))
    c.monitors.comms_logger.enabled = true;
  if (c.monitors.tensorboard.enabled) check_job_name(c.monitors.tensorboard.job_name, "tensorboard.job_name", r);
  if (c.monitors.csv_monitor.enabled) check_job_name(c.monitors.csv_monitor.job_name, "csv_monitor.job_name", r);
  if (c.monitors.comms_logger.enabled && !c.monitors.comms_logger.prof_all &&
      c.monitors.comms_logger.prof_ops.empty() && !r.any_broken({"comms_logger.prof_all", "comms_logger.prof_ops"}))
    r.error("comms_logger.prof_ops", "names no operation, and comms_logger.prof_all is false");
  if (c.monitors.flops_profiler.enabled && c.steps > 0 && c.monitors.flops_profiler.profile_step > c.steps &&
      !r.any_broken({"steps", "flops_profiler.profile_step"}))
    r.warning("flops_profiler.profile_step", fmt::format("the run has {} steps: step {} is not reported", c.steps,
                                                         c.monitors.flops_profiler.profile_step));
}

// A directory, a pipe or a device where a file must be is a mistake that can be seen without opening it.
void check_named_files(const Config& c, Reader& r) {
  const bool reads_data = c.use == ConfigUse::Train || c.use == ConfigUse::Evaluate;
  for (const NamedFile& file : named_inputs(c)) {
    if (!reads_data && (file.key.starts_with("data.train") || file.key.starts_with("data.validation"))) continue;
    const std::string why = why_not_input(file);
    if (!why.empty() && !r.broken(file.key.substr(0, file.key.find('['))))
      r.error(file.key, fmt::format("{} {}", file.path, why));
  }
}

// The functions below are called in this order. Each needs the text as read and what the ones before it have resolved;
// the comment of a call names its needs among the calls before it in the same function.

// How the ranks share the model and the samples of a step. Returns the data-parallel ranks.
i64 resolve_ranks(Config& c, i64 world, Reader& r) {
  const i64 replicas = resolve_parallel(c, world, r);
  resolve_diloco(c, replicas, world, r);  // replicas
  if (c.use == ConfigUse::Generate) {
    const i64 passes = c.pipeline.schedule == PipelineSchedule::Interleaved ? c.pipeline.stages : 1;
    c.batch = {.train = replicas * passes, .micro = 1, .accumulation = passes};
  } else {
    resolve_batch(c.batch, replicas, replicas == world, r);  // replicas
  }
  return replicas;
}

// Resolves the sections that decide how parameters are updated, and where states are kept.
void resolve_updates(Config& c, const ConfigText& text, Reader& r, std::vector<Diagnostic>& diagnostics) {
  resolve_optimizer(c.optimizer, text, r, diagnostics);
  resolve_scheduler(c, r);  // optimizer
  resolve_precision(c, r);  // optimizer, of which it sets state_dtype
  resolve_zero(c, r);
  resolve_offload(c, r);  // optimizer; reduce_order of resolve_zero
}

// The model, and what it is trained on.
void resolve_samples(Config& c, const ConfigText& text, const ProgramParts& parts, Reader& r,
                     std::vector<Diagnostic>& diagnostics) {
  resolve_model(c, text, parts, r, diagnostics);
  resolve_data(c, parts, r);             // model
  resolve_sparse_attention(c, text, r);  // model, data.seq_length
  resolve_random_ltd(c, r);              // model, data.seq_length, sparse_attention
}

// All is resolved: these checks change nothing, so their order is that of messages alone.
void check_together(const Config& c, i64 replicas, i64 world, const ConfigText& text, Reader& r) {
  check_precision(c, r);
  check_signs(c, r);
  if (trains(c.use)) check_zeropp(c, replicas / c.optimizer.diloco.workers, r);
  check_size(c, r);
  check_choices(c, r);
  check_parallel(c, replicas / c.optimizer.diloco.workers, r);
  check_curriculum(c, r);
  check_diloco(c, r);
  check_router_bias(c, r);
  check_post_validate(c, r);
  check_run(c, world, text, r);
  check_named_files(c, r);
}

}  // namespace

std::string to_string(const Diagnostic& d) {
  std::string out = d.source;
  if (d.line > 0) out += fmt::format(":{}:{}", d.line, d.column);
  if (!d.key.empty()) out += fmt::format(": {}", d.key);
  return out + ": " + d.message;
}

bool ConfigResult::ok() const noexcept { return !has_error(diagnostics); }

Errc ConfigResult::code() const noexcept {
  const auto other = std::find_if(diagnostics.begin(), diagnostics.end(), [](const Diagnostic& d) {
    return d.severity == Severity::Error && d.code != Errc::Unavailable;
  });
  return other == diagnostics.end() ? Errc::Unavailable : other->code;
}

std::string ConfigResult::message() const {
  std::string out;
  for (const Diagnostic& d : diagnostics)
    if (d.severity == Severity::Error) out += (out.empty() ? "" : "\n  ") + to_string(d);
  return out;
}

ConfigResult parse_config(std::string_view content, const std::string& name, std::span<const std::string> overrides,
                          int world_size, ConfigUse use, const ProgramParts& parts) {
  DS_ASSERT(world_size >= 1);
  ConfigResult result;
  std::vector<Diagnostic>& diagnostics = result.diagnostics;
  Config& c = result.config;

  ConfigText text(content, name, diagnostics);
  if (has_error(diagnostics)) return result;  // what would follow from an empty object is noise
  for (const std::string& o : overrides) text.set(o, diagnostics);
  text.modernize(diagnostics);

  c.use = use;
  Reader r(config_keys(), &c, text, "", diagnostics);
  r.read(text.root());
  const i64 replicas = resolve_ranks(c, world_size, r);
  resolve_updates(c, text, r, diagnostics);
  resolve_samples(c, text, parts, r, diagnostics);
  resolve_monitors(c, text, r);
  check_together(c, replicas, world_size, text, r);
  if (!has_error(diagnostics)) tell_automatic(c, text, r);
  return result;
}

ConfigResult load_config(const std::string& path, std::span<const std::string> overrides, int world_size, ConfigUse use,
                         const ProgramParts& parts) {
  const bool dash = path == "-";
  std::error_code ignored;
  if ((dash || std::filesystem::is_fifo(path, ignored)) && world_size > 1) {
    Diagnostic d{.source = dash ? "standard input" : path,
                 .message = fmt::format("only one of {} ranks can read it; name a file", world_size)};
    return {.config = {}, .diagnostics = {std::move(d)}};
  }
  const std::variant<std::string, Diagnostic> content = read_config_text(path, dash);
  if (const auto* failed = std::get_if<Diagnostic>(&content)) return {.config = {}, .diagnostics = {*failed}};
  return parse_config(std::get<std::string>(content), dash ? "standard input" : path, overrides, world_size, use,
                      parts);
}

std::string resolved_json(const Config& config) {
  Config c = config;  // slots are writable
  Json out = Json::object();
  for (const Key& key : config_keys()) {
    if (!key.has_effect(c)) continue;
    const Slot slot = key.slot(&c);
    if (const auto* list = std::get_if<std::vector<std::string>*>(&slot); list && (*list)->empty()) continue;
    if (const auto* list = std::get_if<std::vector<i64>*>(&slot); list && (*list)->empty()) continue;
    if (const auto* list = std::get_if<std::vector<float>*>(&slot); list && (*list)->empty()) continue;
    // A number that was neither given nor derived has no value to write.
    if (const auto* n = std::get_if<i64*>(&slot); n && static_cast<double>(**n) < key.range.low) continue;
    if (const auto* s = std::get_if<std::string*>(&slot); s && (*s)->empty()) continue;
    Json* at = &out;
    std::string_view rest = key.path;
    for (size_t dot; (dot = rest.find('.')) != rest.npos; rest.remove_prefix(dot + 1))
      at = &(*at)[std::string(rest.substr(0, dot))];
    (*at)[std::string(rest)] = slot_json(slot);
  }
  if (!c.optimizer.groups.empty()) out["optimizer"]["param_groups"] = param_groups_json(c.optimizer);
  if (!c.published.path.empty()) {
    out["model"] = {{"path", c.published.path}};
    if (c.published.new_head) out["model"]["new_head"] = true;
  } else if (c.model.layers > 0 && !c.model.source) {
    Json model = {{"type", family_name(c.model.family)}};
    model.update(model_json(c.model));
    model.erase("model_type");
    out["model"] = std::move(model);
  }
  return out.dump(2) + "\n";
}

}  // namespace ds
