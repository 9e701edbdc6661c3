// SPDX-License-Identifier: Apache-2.0
// Merging is a copy from a source to a sink: a state, seen as whole tensors, into one of the kinds of output.

#include <fnmatch.h>

#include <chrono>
#include <cstring>
#include <filesystem>

#include "base/clock.h"
#include "base/gguf.h"
#include "base/json.h"
#include "checkpoint/deepspeed_files.h"
#include "checkpoint/extend_positions.h"
#include "checkpoint/hf_directory.h"
#include "checkpoint/match_weights.h"
#include "checkpoint/model_state.h"
#include "checkpoint/output_place.h"
#include "checkpoint/reader.h"
#include "checkpoint/shard.h"
#include "checkpoint/tensor_state.h"
#include "config/family.h"
#include "config/model_config.h"
#include "data/tokenizer.h"
#include "ds/checkpoint.h"
#include "ds/log.h"
#include "formats/safetensors.h"
#include "model/models.h"

namespace ds {
namespace {

namespace fs = std::filesystem;

constexpr i64 kChunkBytes = i64{16} << 20;
constexpr i64 kHfShardBytes = 5'000'000'000;

enum class Format : u8 { Safetensors, Hdf5, Hf, Checkpoint };
constexpr std::string_view kFormatNames[] = {"safetensors", "hdf5", "hf", "checkpoint"};

// Throws unless the output holds what `expected` shows.
void compare(const TensorSource& expected, const TensorSource& actual, const std::string& output, const Tick& tick) {
  DS_CHECK(actual.list().size() == expected.list().size(), Errc::Corrupt, "{}: {} tensors, {} were written", output,
           actual.list().size(), expected.list().size());
  std::vector<char> a, b;
  for (const TensorInfo& t : expected.list()) {
    DS_CHECK(actual.at(t.name) == t, Errc::Corrupt, "{}: '{}' has another shape or dtype than was written", output,
             t.name);
    const i64 step = kChunkBytes / dtype_bytes(t.dtype), n = t.numel();
    for (i64 first = 0; first < n; first += step) {
      tick();
      const i64 count = std::min(step, n - first);
      a.resize(count * dtype_bytes(t.dtype));
      b.resize(a.size());
      expected.read(t.name, first, count, a.data());
      actual.read(t.name, first, count, b.data());
      DS_CHECK(std::memcmp(a.data(), b.data(), a.size()) == 0, Errc::Corrupt,
               "{}: '{}' reads back differently from element {} on", output, t.name, first);
    }
  }
}

Format output_format(const std::string& output, const MergeOptions& o) {
  for (size_t f = 0; f < std::size(kFormatNames); ++f) {
    if (o.format == kFormatNames[f]) return static_cast<Format>(f);
  }
  DS_CHECK(o.format.empty(), Errc::Config, "format '{}' is not one of {}", o.format, fmt::join(kFormatNames, ", "));
  if (output == "-") return Format::Safetensors;
  const std::optional<FileFormat> by_suffix = format_of(output);
  DS_CHECK(by_suffix.has_value(), Errc::Config,
           "{}: the suffix does not choose a format; use .safetensors, .h5 or .hdf5, or name the format", output);
  return *by_suffix == FileFormat::Hdf5 ? Format::Hdf5 : Format::Safetensors;
}

bool is_directory_output(Format format, const MergeOptions& o) {
  return format == Format::Hf || format == Format::Checkpoint || o.max_shard_bytes > 0;
}

void check_options(Format format, const std::string& output, const MergeOptions& o) {
  const std::string_view name = kFormatNames[static_cast<size_t>(format)];
  const auto excludes = [&](bool given, std::string_view what) {
    DS_CHECK(!given, Errc::Config, "format {} takes no {}", name, what);
  };
  DS_CHECK(!o.dtype || *o.dtype <= DType::F16, Errc::Config, "weights can be written as fp32, bf16 or fp16, not as {}",
           dtype_name(*o.dtype));
  DS_CHECK(o.max_shard_bytes >= 0, Errc::Config, "the size of a shard cannot be {}", o.max_shard_bytes);
  if (format != Format::Hf) {
    excludes(!o.config.empty(), "config");
    excludes(!o.tokenizer.empty(), "tokenizer");
    excludes(o.positions != 0, "positions; a checkpoint with more of them is what ds-shard writes");
  } else {
    excludes(o.optimizer, "optimizer state: transformers does not read it");
    excludes(!o.only.empty(), "selection of parameters: the model would lack the others");
  }
  if (format == Format::Hdf5) excludes(o.max_shard_bytes > 0, "size of shards: it is one file");
  if (format == Format::Checkpoint) {
    excludes(o.max_shard_bytes > 0, "size of shards: it has one file per rank");
    excludes(o.dtype.has_value(), "dtype: it keeps the data from which a run resumes");
    excludes(!o.only.empty(), "selection of parameters: no run could resume from it");
  }
  if (output == "-") {
    DS_CHECK(format == Format::Safetensors && o.max_shard_bytes == 0, Errc::Config,
             "only one safetensors file can go to standard output");
    DS_CHECK(!o.verify, Errc::Config, "a model on standard output cannot be read back to verify it");
  }
}

// The place of the output after following links: a new file or an existing regular one, never a part of a run.
std::string output_target(const std::string& output) {
  const bool is_stream =
      output.starts_with("/dev/std") || output.starts_with("/dev/fd/") || output.starts_with("/proc/");
  DS_CHECK(!is_stream, Errc::Config, "{}: a stream can only go to standard output, as -", output);
  const std::string target = follow_links(output);
  std::error_code error;
  const fs::file_status status = fs::status(target, error);
  DS_CHECK(!fs::is_directory(status), Errc::Config, "{}: is a directory; the output is one file", output);
  DS_CHECK(!fs::exists(status) || fs::is_regular_file(status), Errc::Config,
           "{}: is a device, a pipe or a socket; the output is a regular file", output);
  check_place(target);
  return target;
}

// Directories that may contain the files besides weights: the source, and those of its run.
std::vector<std::string> model_places(const std::string& source, const StateSource& state) {
  std::vector<std::string> places;
  if (is_gguf(source) || (fs::is_directory(source) && !is_checkpoint(source))) places.push_back(source);
  if (is_deepspeed_tag(state.path())) {  // trainers put the model's files beside it
    const std::string beside = parent_directory(state.path());
    const auto has = [&](const char* name) { return fs::exists(fmt::format("{}/{}", beside, name)); };
    if (has("config.json") || has("tokenizer.json") || has("tokenizer_config.json")) places.push_back(beside);
  }
  if (state.meta().config_json.empty()) return places;
  const Json config = Json::parse(state.meta().config_json);
  const auto add = [&](const char* section, const char* key) {
    const auto it = config.find(section);
    if (it == config.end() || !it->is_object() || !it->contains(key) || !(*it)[key].is_string()) return;
    if (const auto& place = (*it)[key].get_ref<const std::string&>(); place != "bytes") places.push_back(place);
  };
  add("data", "tokenizer");
  add("model", "path");
  return places;
}

// Whether `path`, or the directory that it is in, holds the tokenizer of that identity.
bool holds_tokenizer(const std::string& path, const std::string& identity) {
  for (const std::string& place : {path, parent_directory(path)}) {
    try {
      if (is_same_tokenizer(open_tokenizer(place)->identity(), identity)) return true;
    } catch (const Error&) {  // no tokenizer, or none that a run could have had
    }
  }
  return false;
}

// As the user says, or where the model may be; a place that holds another tokenizer than the run's is none.
std::vector<std::string> tokenizer_places(const std::string& source, const StateSource& state, const MergeOptions& o,
                                          const std::string& output) {
  if (!o.tokenizer.empty()) return {o.tokenizer};
  std::vector<std::string> places = model_places(source, state);
  const std::string& identities = state.meta().data_json;
  const Json data = Json::parse(identities.empty() ? "{}" : identities);
  const bool is_known = data.is_object() && data.contains("tokenizer") && data["tokenizer"].is_string();
  const std::string identity = is_known ? data["tokenizer"].get<std::string>() : "";
  if (!identity.empty()) {
    std::erase_if(places, [&](const std::string& place) {
      const bool is_other = !holds_tokenizer(place, identity);
      if (is_other && identity != "bytes")
        log_message(LogLevel::Warning, fmt::format("{}: {} does not exist, or is not the tokenizer of the run; name "
                                                   "its directory to have its files copied",
                                                   output, place));
      return is_other;
    });
  }
  return places;
}

// The patterns of --only, with the owner's name in the place of a tied name: of one that the state lists, and of one
// that only the model's config.json implies, as for files of transformers. Says so.
std::vector<std::string> with_owners(const StateSource& state, std::vector<std::string> patterns,
                                     const std::string& named) {
  const auto matches = [](const std::string& pattern, const std::string& name) {
    return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
  };
  const std::vector<ParamEntry>& params = state.params();
  std::vector<model::Tie> ties;
  for (const ParamEntry& p : params)
    if (!p.tied_to.empty()) ties.push_back({p.name, p.tied_to});
  if (ties.empty()) {
    const std::string config = find_model_config(state, named);
    std::string why;
    const auto known = config.empty() ? std::nullopt : known_model(Json::parse(config), why);
    if (known) ties = model::make_model(*known, 1).ties;
  }
  for (std::string& pattern : patterns) {
    const bool has_own =
        std::ranges::any_of(params, [&](const ParamEntry& p) { return p.tied_to.empty() && matches(pattern, p.name); });
    if (has_own) continue;
    for (const model::Tie& tie : ties) {
      // Files of a bare model leave out the first part of its names.
      const auto owner = std::ranges::find_if(
          params, [&](const ParamEntry& p) { return p.name == tie.name || tie.name.ends_with("." + p.name); });
      if (!matches(pattern, tie.alias) || owner == params.end()) continue;
      log_message(LogLevel::Warning, fmt::format("--only {}: '{}' is tied to '{}', under whose name it is written",
                                                 pattern, tie.alias, owner->name));
      pattern = owner->name;
      break;
    }
  }
  return patterns;
}

// Whether transformers would find the weights that `config` asks for; where it describes no model of the zoo, it alone
// knows.
void check_fit(const TensorSource& tensors, const std::string& config) {
  std::string why;
  const std::optional<ModelConfig> known = known_model(Json::parse(config), why);
  if (!why.empty())
    log_message(
        LogLevel::Warning,
        fmt::format("{}: cannot check whether the weights fit the config.json of the output: {}", tensors.path(), why));
  if (!known) return;
  const model::Model model = model::make_model(*known, 1);
  const WeightMatch match = match_weights(model, tensors);
  DS_CHECK(match.unfit.empty(), Errc::Mismatch, "{} does not fit the config.json of the output:\n  {}", tensors.path(),
           match.misfits(false));
  if (!match.extra.empty())
    log_message(LogLevel::Warning,
                fmt::format("{} contains weights that the config.json of the output does not have:\n  {}",
                            tensors.path(), first_lines(match.extra, "\n  ")));
}

// No file of a source of several files may be replaced, since later reads would see the output.
void check_not_source(const std::string& source, std::vector<std::string> files, const std::string& target) {
  if (files.size() < 2 && !fs::is_directory(source)) return;
  std::error_code ignored;
  files.push_back(source + "/config.json");
  for (const std::string& file : files)
    DS_CHECK(!fs::equivalent(file, target, ignored), Errc::Config, "{}: is a file of the source {}", target, source);
}

// Whole tensors do not depend on the layout, the machine and the configuration of the run, so neither does their
// metadata.
CheckpointMeta without_layout(CheckpointMeta meta) {
  for (std::string* part : {&meta.layout_id, &meta.history, &meta.isa, &meta.config_json}) part->clear();
  meta.mesh.reset();
  meta.metadata.reset();  // the file has its own metadata
  meta.world_size = 1;
  meta.zero_stage = 0;
  return meta;
}

// Files of tensors in a directory, and their bytes.
void count_files(const std::string& dir, MergeResult& result) {
  result.num_files = result.bytes = 0;
  for (const auto& entry : fs::recursive_directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    if (!name.ends_with(".safetensors") && !name.starts_with("rank-")) continue;
    ++result.num_files;
    result.bytes += narrow<i64>(entry.file_size());
  }
}

// The output of a merge; a directory appears when it is committed.
struct Output {
  Output(const std::string& output, const MergeOptions& o)
      : name(output), format(output_format(output, o)), is_stream(output == "-") {
    check_options(format, output, o);
    const bool to_directory = is_directory_output(format, o);
    if (!to_directory && !is_stream) target = output_target(output);
    if (to_directory) {
      check_place(output);
      directory.emplace(output);
    }
  }
  bool is_file() const noexcept { return !is_stream && !directory; }

  const std::string name;  // as given
  const Format format;
  const bool is_stream;
  std::string target;  // of a file
  std::optional<PendingDirectory> directory;
};

using Metadata = std::map<std::string, std::string>;

class Merge {
 public:
  Merge(const std::string& source, const std::string& output, const MergeOptions& o)
      : source_(source), o_(o), output_(output, o), tick_([this] { show(0); }) {
    open();
    check();
  }

  MergeResult run() {
    // A disk gives more to two readers than to one.
    const std::unique_ptr<StateSource> twin = state_->reopen();
    const std::unique_ptr<TensorSource> twin_tensors = twin ? make_state_tensors(*twin, view_) : nullptr;
    readers_ = {tensors_.get()};
    if (twin) readers_.push_back(twin_tensors.get());

    for (const TensorInfo& t : tensors_->list()) total_ += t.bytes();
    const Metadata metadata = describe();
    if (!output_.is_stream)
      check_room(output_.directory ? output_.directory->path() : parent_directory(output_.target), total_);
    write(metadata);
    count_output(metadata);
    if (output_.directory) output_.directory->commit();
    warn_of_overflow({state_.get(), twin.get()}, output_.name);
    if (o_.verify) verify_output();
    return std::move(result_);
  }

 private:
  void show(i64 done) const {
    if (o_.progress) o_.progress(done, total_);
  }

  void open() {
    state_ = open_state(source_, o_.tag);
    if (output_.format == Format::Hf || output_.format == Format::Checkpoint)
      state_ = under_model_names(std::move(state_), o_.config);
    const bool is_extended = o_.positions != 0;
    if (is_extended) state_ = extend_positions(std::move(state_), o_.positions, o_.config);
    if (output_.format == Format::Hf) {
      config_ = model_config_of(*state_, is_extended ? "" : o_.config);
      check_fit(*make_state_tensors(*state_, {}), config_);
    }
    // A step holds the model's own parameters; all other outputs are for programs that read published files.
    if (output_.format != Format::Checkpoint) state_ = under_published_names(std::move(state_), o_.config);
    const bool optimizer = o_.optimizer || (output_.format == Format::Checkpoint && state_->has_optimizer_state());
    view_ = {.dtype = o_.dtype, .optimizer = optimizer, .only = with_owners(*state_, o_.only, o_.config)};
    tensors_ = make_state_tensors(*state_, view_);
  }

  void check() const {
    if (output_.format == Format::Checkpoint) check_readable(*state_);
    if (output_.is_file()) check_not_source(source_, state_->files(), output_.target);
    if (o_.verify) {
      const std::vector<std::string> bad = state_->verify(tick_);
      DS_CHECK(bad.empty(), Errc::Corrupt, "{}", first_lines(bad));
    } else {
      state_->check();
    }
  }

  // Fills what the result tells of the source, and returns what the output says of itself.
  Metadata describe() {
    result_.source = state_->path();
    result_.output = output_.name;
    result_.format = kFormatNames[static_cast<size_t>(output_.format)];
    result_.step = state_->meta().step;
    result_.num_tensors = narrow<i64>(tensors_->list().size());
    describe_parameters();
    // transformers asks for the format; a file that a file is made of keeps what that said of itself.
    Metadata metadata = state_->meta().metadata.value_or(Metadata{{"format", "pt"}});
    if (output_.format == Format::Hf) metadata["format"] = "pt";
    if (o_.optimizer) {
      metadata[std::string(kMetaKey)] = format_meta(without_layout(state_->meta()));
      if (const std::string optimizers = format_optimizers(state_->params()); !optimizers.empty())
        metadata[std::string(kOptimizersKey)] = optimizers;
    }
    for (const ParamEntry& p : state_->params()) {
      if (p.tied_to.empty() || tensors_->find(p.tied_to) == nullptr) continue;
      metadata[p.name] = p.tied_to;
      result_.tied.push_back(p.name);
    }
    return metadata;
  }

  void describe_parameters() {
    std::optional<DType> dtype;
    bool one_dtype = true;
    for (const ParamEntry& p : state_->params()) {
      const TensorInfo* t = p.tied_to.empty() ? tensors_->find(p.name) : nullptr;
      if (t == nullptr) continue;
      result_.num_parameters += t->numel();
      if (p.name.ends_with(kBalancingBias)) continue;
      one_dtype &= !is_float(t->dtype) || dtype.value_or(t->dtype) == t->dtype;
      if (is_float(t->dtype)) dtype = t->dtype;
    }
    if (one_dtype) result_.dtype = dtype;
  }

  void write(const Metadata& metadata) {
    const std::vector<TensorInfo>& list = tensors_->list();
    if (output_.format == Format::Checkpoint) {
      Manifest m;
      write_sharded(*state_, output_.directory->path(), m, shard_whole(state_->params(), {.num_ranks = 1}),
                    o_.progress);
    } else if (output_.directory) {
      const i64 shard = o_.max_shard_bytes > 0 ? o_.max_shard_bytes : kHfShardBytes;
      copy_into(*create_sharded_sink(output_.directory->path(), shard, list, metadata));
      if (output_.format == Format::Hf) add_model_files();
    } else if (output_.is_stream) {
      copy_into(*create_stream_sink(1, "standard output", list, metadata));
    } else {
      const FileFormat file = output_.format == Format::Hdf5 ? FileFormat::Hdf5 : FileFormat::Safetensors;
      copy_into(*create_sink(output_.target, file, list, metadata, tick_));
    }
  }

  void copy_into(TensorSink& sink) const {
    copy_tensors(readers_, sink, [this](i64 done) { show(done); });
    sink.finish();
  }

  // The files of a Hugging Face directory beside the weights.
  void add_model_files() {
    const std::string& dir = output_.directory->path();
    const std::vector<std::string> places = tokenizer_places(source_, *state_, o_, output_.name);
    result_.tokenizer = copy_tokenizer(places, dir);
    copy_generation_config(model_places(source_, *state_), dir);
    DS_CHECK(o_.tokenizer.empty() || !result_.tokenizer.empty(), Errc::Config, "{}: there are no files of a tokenizer",
             o_.tokenizer);
    if (result_.tokenizer.empty() && !places.empty())
      log_message(LogLevel::Warning,
                  fmt::format("{}: no files of a tokenizer in {}", output_.name, fmt::join(places, ", ")));
    write_hf_config(dir, config_, result_.dtype);
    std::string why;
    if (const auto model = known_model(Json::parse(config_), why); model && !model->source && model->experts.plain)
      log_message(
          LogLevel::Warning,
          fmt::format("{}: transformers has no GPT-2 with experts; it would load this as a dense one whose MLPs are "
                      "new in some layers",
                      output_.name));
    if (!state_->meta().attention_json.empty())
      log_message(LogLevel::Warning, fmt::format("{}: a config.json cannot describe the run's attention pattern: {}",
                                                 output_.name, state_->meta().attention_json));
  }

  void count_output(const Metadata& metadata) {
    result_.num_files = 1;
    if (output_.directory) {
      count_files(output_.directory->path(), result_);
    } else if (output_.is_stream) {
      std::vector<i64> ignored;
      result_.bytes = total_ + narrow<i64>(make_safetensors_header(tensors_->list(), metadata, &ignored).size());
    } else {
      result_.bytes = narrow<i64>(fs::file_size(output_.target));
    }
  }

  void verify_output() {
    total_ = 0;
    if (output_.format == Format::Checkpoint) {
      const std::unique_ptr<StateSource> written = open_state(output_.name);
      compare(*tensors_, *make_state_tensors(*written, {.optimizer = view_.optimizer}), output_.name, tick_);
    } else {
      compare(*tensors_, *open_source(output_.name), output_.name, tick_);
    }
    result_.verified = true;
  }

  const std::string& source_;
  const MergeOptions& o_;
  Output output_;
  const Tick tick_;
  std::unique_ptr<StateSource> state_;
  StateView view_;
  std::unique_ptr<TensorSource> tensors_;
  std::vector<const TensorSource*> readers_;
  std::string config_;  // of a Hugging Face directory
  i64 total_ = 0;       // bytes; 0 before it is known
  MergeResult result_;
};

}  // namespace

MergeResult merge_checkpoint(const std::string& source, const std::string& output, const MergeOptions& o) {
  const Clock::time_point start = Clock::now();
  MergeResult result = Merge(source, output, o).run();
  result.seconds = seconds_since(start);
  return result;
}

}  // namespace ds
