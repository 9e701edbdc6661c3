// SPDX-License-Identifier: Apache-2.0
#include "run/run_data.h"

#include <fmt/format.h>
#include <set>

#include <algorithm>
#include <filesystem>
#include <iterator>

#include "checkpoint/together.h"
#include "config/named_files.h"
#include "data/objective.h"
#include "data/tokenizer.h"
#include "ds/log.h"
#include "run/connect.h"
#include "run/run_record.h"

namespace ds::run {
namespace {

// The mean over micro-batches of their own means is that of one batch only where all have as many targets.
void warn_of_uneven_targets(const Config& config, const BatchLoader& train) {
  const BatchShape& shape = train.shape();
  const i64 replicas = shape.num_ranks / shape.workers, passes = config.batch.accumulation * replicas;
  if (config.loss.norm != LossNorm::Micro || passes == 1 || !train.has_uneven_targets()) return;
  constexpr i64 kMost = 32;  // micro-batches that are looked at, of as many steps as it takes
  const i64 rows = shape.micro * shape.seq_length;
  std::vector<i32> inputs(static_cast<size_t>(rows)), targets(static_cast<size_t>(rows));
  i64 least = rows, most = 0;
  for (i64 k = 0; k < kMost; ++k) {
    const i64 step = k / passes, pass = k % passes;
    train.load(step * passes * shape.micro * shape.workers, pass / replicas, pass % replicas, inputs, targets);
    const i64 count = rows - std::ranges::count(targets, kIgnoredTarget);
    least = std::min(least, count);
    most = std::max(most, count);
  }
  if (least == most) return;
  log_message(
      LogLevel::Warning,
      fmt::format("loss_norm \"micro\": the micro-batches of a step have different numbers of targets ({} to {} in the "
                  "first ones) but the same weight, so the loss is not that of the same samples in one batch; "
                  "loss_norm \"token\"{} gives each target the same weight",
                  least, most,
                  config.gradient_reduce == GradientReduce::Sum ? ", with gradient_allreduce_op \"mean\"," : ""));
}

// Only the first sample is asked, as all are alike in most programs.
void warn_of_unknown_documents(const DataConfig& data) {
  if (!data.separate_documents || data.document_token >= 0) return;
  std::vector<i32> begins(static_cast<size_t>(data.seq_length));
  if (data.samples->count() > 0 && !data.samples->documents(0, begins))
    log_message(LogLevel::Warning,
                fmt::format("data.separate_documents: has no effect: the program's samples '{}' do not "
                            "state their documents, and there is no data.document_token",
                            data.samples->identity()));
}

// Names all files of data that do not exist, each with its key.
void check_files_exist(const Config& config) {
  std::string missing;
  bool relative = false;
  for (const NamedFile& file : named_inputs(config)) {
    if (!file.key.starts_with("data.") || file.key == "data.tokenizer") continue;
    std::error_code error;
    if (std::filesystem::status(file.path, error).type() != std::filesystem::file_type::not_found) continue;
    missing += fmt::format("{}{}: no file '{}'", missing.empty() ? "" : "; ", file.key, file.path);
    relative |= std::filesystem::path(file.path).is_relative();
  }
  if (missing.empty()) return;
  std::error_code error;
  const std::string here = relative ? std::filesystem::current_path(error).string() : "";
  throw Error(Errc::Config,
              missing + (here.empty() ? "" : fmt::format(" (names are relative to the working directory, {})", here)));
}

}  // namespace

RunData open_data(const Request& request, i64 num_ranks) {
  const Config& config = request.config;
  RunData opened;
  const BatchShape shape{.micro = config.batch.micro,
                         .num_ranks = num_ranks,
                         .seq_length = config.data.seq_length,
                         .workers = config.optimizer.diloco.workers,
                         .micro_batches = config.batch.accumulation};
  const u32 seed = static_cast<u32>(config.data.seed);
  if (config.data.samples && config.use != ConfigUse::Generate) {
    const auto loader_of = [&](const std::shared_ptr<const SampleSource>& samples) {
      return std::make_unique<BatchLoader>(samples, shape, seed, config.model.vocab_size, DocumentRule::of(config.data),
                                           config.model.causal());
    };
    opened.train = loader_of(config.data.samples);
    if (config.data.validation_samples) opened.validation = loader_of(config.data.validation_samples);
    if (request.is_root()) warn_of_unknown_documents(config.data);
    if (request.is_root() && !request.options.read_only) warn_of_uneven_targets(config, *opened.train);
    return opened;
  }
  if (config.data.train.empty()) return opened;  // generation needs none
  check_files_exist(config);
  // Files of tokens need it first when the run writes text: the mistake is told now.
  std::error_code ignored;
  DS_CHECK(config.data.tokenizer == "bytes" || std::filesystem::exists(config.data.tokenizer, ignored), Errc::Config,
           "data.tokenizer '{}': no such file or directory", config.data.tokenizer);
  // Masking alone asks for the tokenizer's special tokens.
  const auto tokenizer = config.model.causal() ? nullptr : open_tokenizer(config.data.tokenizer);
  const std::shared_ptr<const Objective> objective = make_objective(config.model, config.data, tokenizer.get());
  Dataset data = open_dataset(config.data, *objective, thread_count(config, request.ranks));
  data.train.check_width(config.model.vocab_size);
  if (data.validation) data.validation->check_width(config.model.vocab_size);
  if (request.is_root()) {
    std::vector<Remark> remarks = data.train.remarks();
    if (!config.data.validation.empty()) std::ranges::move(data.validation->remarks(), std::back_inserter(remarks));
    std::set<std::string_view> said;  // both parts have the tokenizer's
    for (const Remark& remark : remarks)
      if (said.insert(remark.text).second) log_message(remark.level, remark.text);
  }
  opened.train = std::make_unique<BatchLoader>(std::move(data.train), shape, seed, config.model.vocab_size, objective,
                                               config.data.weights);
  if (data.validation) {
    opened.validation =
        std::make_unique<BatchLoader>(std::move(*data.validation), shape, seed, config.model.vocab_size, objective);
  }
  if (request.is_root() && !request.options.read_only) warn_of_uneven_targets(config, *opened.train);
  return opened;
}

RunDocuments survey_documents(const RunData& data) {
  const auto survey = [](const std::unique_ptr<BatchLoader>& loader, std::string_view part) {
    std::optional<DocumentSurvey> documents;
    if (loader) documents = loader->survey_documents();
    if (documents) log_message(LogLevel::Info, fmt::format("{} data: {}", part, documents->text()));
    return documents;
  };
  return {.training = survey(data.train, "training"), .validation = survey(data.validation, "validation")};
}

// Stages and parts of a sequence read the same samples, each for itself.
void check_same_files(const RunData& data, Communicator& world) {
  std::string mine;
  if (data.train) {
    DataIdentity identity = data.train->identity();
    for (FileFingerprint& file : identity.files) file.name.clear();  // files may be found elsewhere
    mine = data_identity_json(identity);
  }
  const std::vector<std::string> all = gather_text(world, mine);
  for (size_t r = 1; r < all.size(); ++r)
    DS_CHECK(all[r] == all[0], Errc::Config,
             "data.train: rank {} reads other data than rank 0, or with another tokenizer: all ranks of a run {}", r,
             data.train && data.train->identity().files.empty() ? "have the same samples" : "read the same files");
}

std::string RunData::identity_json() const { return compact_json(data_identity_json(train->identity())); }

}  // namespace ds::run
