// SPDX-License-Identifier: Apache-2.0
#include "run/request.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <system_error>

#include "base/file.h"
#include "checkpoint/deepspeed.h"
#include "checkpoint/manifest.h"
#include "checkpoint/reader.h"
#include "checkpoint/run_names.h"
#include "config/named_files.h"
#include "config/trainer_output.h"
#include "ds/limits.h"
#include "ds/log.h"
#include "run/weights.h"

namespace ds::run {

monitor::Places Request::places() const {
  monitor::Places p;
  p.run_directory = options.out_dir;
  p.resumed = options.resume == "latest" ? options.out_dir : options.resume;
  for (const std::string* input : {&options.config, &options.weights}) {
    if (!input->empty()) p.inputs.push_back(*input);
  }
  return p;
}

std::string Request::find_step() const {
  if (options.resume.empty()) return "";
  std::error_code failed;
  if (options.resume != "latest") {
    std::error_code error;
    const std::filesystem::file_type type = std::filesystem::status(options.resume, error).type();
    DS_CHECK(type == std::filesystem::file_type::directory, Errc::Config, "--resume {}: {}", options.resume,
             type == std::filesystem::file_type::not_found ? "no such directory"
             : type == std::filesystem::file_type::none
                 ? error.message()
                 : "not a directory; a checkpoint is one, and --weights takes files");
    DS_CHECK(!is_deepspeed(options.resume), Errc::Unavailable,
             "--resume {}: a DeepSpeed checkpoint; make one of ours of it with ds-shard, or give it to --weights",
             options.resume);
    if (!is_checkpoint(options.resume)) {
      const std::string saves = trainer_checkpoints(options.resume);
      DS_CHECK(saves.empty(), Errc::Config,
               "--resume {}: Hugging Face's Trainer has saved {} in it, which hold weights but no state that a run "
               "resumes from: start from the weights of one with --weights",
               options.resume, saves);
      const std::vector<std::string> files = published_weights_in(options.resume);
      DS_CHECK(files.empty(), Errc::Config,
               "--resume {0}: holds {1}, weights but no state that a run resumes from: start from them with --weights "
               "{0}",
               options.resume, fmt::join(files, " and "));
      DS_CHECK(!std::filesystem::is_directory(options.resume), Errc::Config,
               "--resume {}: there is no checkpoint in this directory", options.resume);
    }
    return find_checkpoint(options.resume);
  }
  DS_CHECK(!options.out_dir.empty(), Errc::Config,
           "--resume latest resumes the run in the directory of --out: give one");
  // A directory that cannot be listed may contain a checkpoint.
  std::filesystem::directory_iterator entry(options.out_dir, failed), end;
  for (; !failed && entry != end; entry.increment(failed)) {
    const std::string name = entry->path().filename();
    if (name == kLatestName || name.starts_with(kStepPrefix)) return find_checkpoint(options.out_dir);
  }
  const bool none = failed == std::errc::no_such_file_or_directory || failed == std::errc::not_a_directory;
  DS_CHECK(!failed || none, Errc::Io, "cannot list {}: {}", options.out_dir, system_reason(failed.value()));
  DS_CHECK(!options.read_only, Errc::Config, "{} has no checkpoint", options.out_dir);
  // A first start of a command line that always says --resume latest: said, not silent.
  // A server may have a state, and says so.
  if (is_root() && config.zero.offload_optimizer.device != OffloadDevice::Server)
    log_message(LogLevel::Warning, fmt::format("{} has no checkpoint yet: starting from step 0", options.out_dir));
  return "";
}

std::string Request::find_weights() const {
  DS_CHECK(!config.published.new_head || !options.read_only, Errc::Config,
           "model.new_head: a head of random values has nothing to evaluate");
  if (!options.weights.empty()) {
    const std::string why = why_not_input({"--weights", options.weights, true});
    DS_CHECK(why.empty(), Errc::Config, "--weights: {} {}", options.weights, why);
    const bool is_model = !std::filesystem::is_directory(options.weights) || is_checkpoint(options.weights) ||
                          !published_weights_in(options.weights).empty();
    DS_CHECK(is_model, Errc::Config, "--weights {}: there is no {} in this directory, and no checkpoint{}",
             options.weights, fmt::join(kPublishedWeights, ", no "), trainer_hint(options.weights));
  }
  const std::string path = options.weights.empty() ? published_weights(config.published.path) : options.weights;
  if (!path.empty()) {
    if (is_root() && !is_checkpoint(path)) warn_of_several_weights(path);
    return path;
  }
  DS_CHECK(
      !options.read_only, Errc::Config,
      "there are no weights to evaluate or to write text with: give --resume DIR or --weights FILE, or a model.path "
      "with model.safetensors");
  if (is_root() && std::filesystem::is_directory(config.published.path))
    log_message(LogLevel::Warning,
                fmt::format("model.path {} has no weights: the model starts from random ones", config.published.path));
  return "";
}

}  // namespace ds::run
