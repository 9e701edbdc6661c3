// SPDX-License-Identifier: Apache-2.0
#include "run/draft.h"

#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "checkpoint/together.h"
#include "comm/make_communicator.h"
#include "config/sparse_attention.h"
#include "data/tokenizer.h"
#include "mesh/from_config.h"

namespace ds::run {

void check_draft(const Config& config, const DraftModel& draft) {
  const SparseAttentionMode mode = config.sparse_attention.mode;
  DS_CHECK(
      mode == SparseAttentionMode::None || mode == SparseAttentionMode::Dense, Errc::Unavailable,
      "a draft: with sparse_attention \"{}\" the bits of a token depend on the other tokens of its pass, so results "
      "would not be those without a draft; leave it out",
      sparse_attention_name(mode));
  const std::string &ours = config.data.tokenizer, &theirs = draft.config.data.tokenizer;
  const std::string own = open_tokenizer(ours)->identity(), other = open_tokenizer(theirs)->identity();
  DS_CHECK(is_same_tokenizer(own, other), Errc::Config,
           "the draft {} has the tokenizer {} and the model {}, so it cannot propose tokens: of the draft, {}",
           draft.name, theirs, ours, difference_of_tokenizers(other, own, "the model has"));
}

DraftModel beside(const Config& config, DraftModel draft) {
  draft.config.device = config.device;
  draft.config.threads = config.threads;
  draft.config.data.train.clear();
  draft.config.use = ConfigUse::Generate;
  return draft;
}

Draft::Draft(const DraftModel& model, const RankInfo& ranks, std::shared_ptr<const plan::Planned> planned,
             MemoryLedger& ledger, Device& device)
    : request_{
          model.config, {.rank = ranks.rank}, {.resume = model.resume, .weights = model.weights, .read_only = true}} {
  const CommOptions options{.timeout_s = model.config.communication.timeout_s, .device = &device};
  const Config& config = request_.config;
  Mesh::OverDevice over_device;
  if (!device.is_host())
    over_device = [](Communicator& host, const CommOptions& o) { return make_device_self_communicator(host, o); };
  mesh_ = std::make_unique<Mesh>(make_self_communicator(options), mesh_shape(config, 1), options, over_device,
                                 mesh_splits(config, planned->model.splits));
  Start start{.step_dir = request_.find_step()};
  if (start.step_dir.empty()) start.weights = request_.find_weights();
  trained_.engine = std::make_unique<engine::Engine>(config, *mesh_, ledger, device,
                                                     engine::EngineParts{.planned = std::move(planned)});
  trained_.table = engine::make_param_table(config, trained_.engine->model(), trained_.engine->plan());
  start.load(request_, {}, trained_);
}

void check_same_kernels(Device& device, Communicator& world) {
  const std::vector<std::string> names = gather_text(world, std::string(device.ops().name));
  for (size_t r = 1; r < names.size(); ++r)
    DS_CHECK(names[r] == names[0], Errc::Config,
             "rank {} computes with {} and rank 0 with {}: all ranks must compute a draft alike", r, names[r],
             names[0]);
}

}  // namespace ds::run
