// SPDX-License-Identifier: Apache-2.0
// Merging a checkpoint to one file: the right bytes under the right names, in bounded memory, or nothing at all.

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "checkpoint_state.h"
#include "ds/checkpoint.h"

namespace ds {
namespace merge_test {

namespace fs = std::filesystem;
using namespace testing;

// Every element of `tensor`, which holds `state` of the parameter, through fp32.
void expect_values(const TensorSource& source, const std::string& tensor, i64 param, float (*value)(i64, i64)) {
  const TensorInfo& info = source.at(tensor);
  std::vector<char> raw(static_cast<size_t>(info.bytes()));
  std::vector<float> got(static_cast<size_t>(info.numel()));
  source.read(tensor, 0, info.numel(), raw.data());
  convert_elements(DType::F32, got.data(), info.dtype, raw.data(), info.numel());
  for (i64 i = 0; i < info.numel(); ++i) ASSERT_EQ(got[i], value(param, i)) << tensor << " " << i;
}

struct Case {
  const char* suffix;
  DType saved;
  std::optional<DType> wanted;
};
class Merge : public ::testing::TestWithParam<Case> {};

TEST_P(Merge, HoldsEveryParameterExactly) {
  const auto [suffix, saved, wanted] = GetParam();
  const TempDirectory dir;
  const std::string step = save_sample(dir.path(), 3, saved, 3, 1), out = dir / ("model" + std::string(suffix));
  const MergeResult r = merge_checkpoint(step, out, {.dtype = wanted, .verify = true});
  const DType dtype = wanted.value_or(saved);
  EXPECT_EQ(r.dtype, dtype);
  EXPECT_EQ(r.step, 3);
  EXPECT_EQ(r.num_tensors, 5);
  EXPECT_EQ(r.num_parameters, 13 * 6 + 5 + 42 + 1 + 29);
  EXPECT_EQ(r.bytes, static_cast<i64>(fs::file_size(out)));
  EXPECT_TRUE(r.verified);
  EXPECT_EQ(r.tied, std::vector<std::string>{"lm_head.weight"});

  const auto source = open_source(out);
  ASSERT_EQ(source->list().size(), 5u);
  EXPECT_EQ(source->find("lm_head.weight"), nullptr);
  const std::vector<ParamEntry> model = small_model();
  for (size_t p = 0; p < model.size(); ++p) {
    if (!model[p].tied_to.empty()) continue;
    EXPECT_EQ(source->at(model[p].name), (TensorInfo{model[p].name, dtype, model[p].shape}));
    expect_values(*source, model[p].name, static_cast<i64>(p), dtype == DType::F32 ? master_value : param_value);
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, Merge,
                         ::testing::Values(Case{".safetensors", DType::F32, {}}, Case{".safetensors", DType::BF16, {}},
                                           Case{".safetensors", DType::F16, {}},
                                           Case{".safetensors", DType::BF16, DType::F32},
                                           Case{".safetensors", DType::F32, DType::BF16},
                                           Case{".safetensors", DType::BF16, DType::F16}, Case{".h5", DType::BF16, {}},
                                           Case{".hdf5", DType::F16, DType::F32}),
                         [](const auto& p) {
                           return fmt::format("{}{}As{}", p.param.suffix + 1, dtype_name(p.param.saved),
                                              p.param.wanted ? dtype_name(*p.param.wanted) : "Trained");
                         });

TEST(MergeCheckpoint, OptimizerStateComesUnderItsOwnNames) {
  const TempDirectory dir;
  const std::string step = save_sample(dir.path(), 3, DType::BF16, 2, 1);
  for (const std::string name : {"all.safetensors", "all.h5"}) {
    merge_checkpoint(step, dir / name, {.optimizer = true});
    const auto source = open_source(dir / name);
    EXPECT_EQ(source->list().size(), 20u);
    EXPECT_EQ(source->at("optimizer.exp_avg.wte.weight"),
              (TensorInfo{"optimizer.exp_avg.wte.weight", DType::F32, {13, 6}}));
    expect_values(*source, "optimizer.master.h.0.mlp.weight", 2, master_value);
    expect_values(*source, "optimizer.exp_avg.ln_f.weight", 5, exp_avg_value);
    expect_values(*source, "optimizer.exp_avg_sq.wte.weight", 0, exp_avg_sq_value);
    expect_values(*source, "wte.weight", 0, param_value);
  }
}

TEST(MergeCheckpoint, SameBytesWhateverTheWorldSizeWas) {
  const TempDirectory dir;
  std::string first;
  for (int size : {1, 2, 5}) {
    const std::string step = save_sample(dir / std::to_string(size), 3, DType::BF16, size, size);
    merge_checkpoint(step, dir / "m.safetensors", {.optimizer = true});
    const std::string bytes = read_file(dir / "m.safetensors");
    if (first.empty()) first = bytes;
    EXPECT_EQ(bytes, first);
  }
}

TEST(MergeCheckpoint, MetadataNamesTheTiesAndTheFramework) {
  const TempDirectory dir;
  merge_checkpoint(save_sample(dir.path(), 3, DType::BF16, 2), dir / "m.safetensors", {});
  const auto source = open_source(dir / "m.safetensors");
  EXPECT_EQ(source->metadata(),
            (std::map<std::string, std::string>{{"format", "pt"}, {"lm_head.weight", "wte.weight"}}));
}

TEST(MergeCheckpoint, TheFormatOptionWinsOverTheSuffix) {
  const TempDirectory dir;
  const std::string step = save_sample(dir.path(), 3, DType::BF16, 2);
  EXPECT_EQ(merge_checkpoint(step, dir / "weights", {.format = "hdf5"}).format, "hdf5");
  EXPECT_EQ(read_file(dir / "weights").substr(1, 3), "HDF");
}

TEST(MergeCheckpoint, OutputsThatMakeNoSense) {
  const TempDirectory dir;
  const std::string step = save_sample(dir.path(), 3, DType::BF16, 2);
  EXPECT_ERROR(merge_checkpoint(step, dir / "m.bin", {}), Errc::Config, "the suffix does not choose a format");
  EXPECT_ERROR(merge_checkpoint(step, dir / "m.bin", {.format = "gguf"}), Errc::Config, "'gguf' is not one of");
  EXPECT_ERROR(merge_checkpoint(step, step + "/m.h5", {}), Errc::Config, "inside a checkpoint step");
  EXPECT_ERROR(merge_checkpoint(step, dir.path(), {.format = "hdf5"}), Errc::Config, "is a directory");
  EXPECT_ERROR(merge_checkpoint(step, dir / "no/m.h5", {}), Errc::Config, "there is no directory");
  EXPECT_ERROR(merge_checkpoint(step, "-", {.format = "hdf5"}), Errc::Config, "only one safetensors file");
  EXPECT_ERROR(merge_checkpoint(step, "-", {.verify = true}), Errc::Config, "cannot be read back");
  EXPECT_ERROR(merge_checkpoint(step, "/dev/fd/1", {.format = "safetensors"}), Errc::Config, "as -");
  EXPECT_ERROR(merge_checkpoint(step, dir.path(), {.format = "hf"}), Errc::Config, "is not empty");
  EXPECT_ERROR(merge_checkpoint(step, dir / "m", {.format = "hf", .optimizer = true}), Errc::Config, "optimizer state");
  EXPECT_ERROR(merge_checkpoint(step, dir / "m.h5", {.max_shard_bytes = 5}), Errc::Config, "it is one file");
  EXPECT_ERROR(merge_checkpoint(step, dir / "m.h5", {.config = "c"}), Errc::Config, "takes no config");
  EXPECT_ERROR(merge_checkpoint(step, dir / "m.h5", {.only = {"nothing*"}}), Errc::Mismatch, "matches 'nothing*'");
  EXPECT_ERROR(merge_checkpoint(step, dir / "m.h5", {.tag = "step-00000009"}), Errc::Io, "no step-00000009");
  EXPECT_ERROR(merge_checkpoint(step, dir / "latest", {.format = "hdf5"}), Errc::Config,
               "a name that runs use themselves");
  EXPECT_ERROR(merge_checkpoint(step, dir / "m.h5", {.dtype = DType::I32}), Errc::Config, "not as int32");
}

TEST(MergeCheckpoint, DamageIsRefusedAndNothingIsWritten) {
  const TempDirectory dir;
  const std::string step = save_sample(dir.path(), 3, DType::BF16, 2, 1);
  write_file(dir / "m.safetensors", "an older file");
  for (const std::string name : {"rank-00000.h5", "rank-00001.h5"}) {
    const std::string path = step + "/" + name, good = read_file(path);
    std::string bad = good;
    bad[bad.size() - 2] ^= 1;
    write_file(path, bad);
    // The last bytes are optimizer state: without --optimizer only --verify reads them.
    for (const bool optimizer : {true, false}) {
      EXPECT_ERROR(merge_checkpoint(step, dir / "m.safetensors", {.optimizer = optimizer, .verify = !optimizer}),
                   Errc::Corrupt, name);
    }
    write_file(path, good);
  }
  EXPECT_EQ(read_file(dir / "m.safetensors"), "an older file");
  EXPECT_EQ(std::distance(fs::directory_iterator(dir.path()), {}), 3);  // latest, step, older file
}

TEST(MergeCheckpoint, AFullDiskLeavesNothing) {
  const TempDirectory dir;
  const std::string step = save_sample(dir.path(), 3, DType::BF16, 2, 1);
  for (const std::string name : {"m.safetensors", "m.h5"}) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      std::signal(SIGXFSZ, SIG_IGN);
      const rlimit limit{600, 600};
      ::setrlimit(RLIMIT_FSIZE, &limit);
      EXPECT_ERROR(merge_checkpoint(step, dir / name, {}), Errc::Io, "File too large");
      ::_exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    int status = 0;
    ::waitpid(pid, &status, 0);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(dir.path()), {}), 2);
}

// A checkpoint many times larger than what the merge may use.
// As a tool does that is sent a signal.
TEST(MergeCheckpoint, CanBeStoppedWhileItVerifies) {
  const TempDirectory dir;
  const std::string step = save_sample(dir.path(), 3, DType::BF16, 2);
  for (const int stop_at : {0, 3}) {
    int ticks = 0;
    const auto stop = [&](i64, i64 total) {
      if (total == 0 && ticks++ == stop_at) throw Error(Errc::Interrupted, "stopped");
    };
    EXPECT_ERROR(merge_checkpoint(step, dir / "m.safetensors", {.verify = true, .progress = stop}), Errc::Interrupted,
                 "stopped");
    EXPECT_FALSE(std::filesystem::exists(dir / "m.safetensors"));
  }
}

// Peak resident size, in MiB, of a merge in a process of its own: it starts anew at the fork where the kernel can clear
// it. A merge that fails has none to show.
long peak_of_merge(const std::string& step, const std::string& out) {
  int ends[2];
  if (::pipe(ends) != 0) return -1;
  const pid_t pid = ::fork();
  if (pid == 0) {
    std::ofstream("/proc/self/clear_refs") << "5";
    merge_checkpoint(step, out, {.dtype = DType::BF16});
    std::ifstream status("/proc/self/status");
    long kib = 0;
    for (std::string word; status >> word;) {
      if (word == "VmHWM:") status >> kib;
    }
    ::_exit(kib > 0 && ::write(ends[1], &kib, sizeof kib) == sizeof kib ? 0 : 1);
  }
  ::close(ends[1]);
  long kib = 0;
  EXPECT_EQ(::read(ends[0], &kib, sizeof kib), static_cast<ssize_t>(sizeof kib));
  ::close(ends[0]);
  int status = 0;
  ::waitpid(pid, &status, 0);
  EXPECT_EQ(status, 0);
  std::fprintf(stderr, "peak resident size of the merge: %ld MiB\n", kib / 1024);
  return kib / 1024;
}

TEST(MergeCheckpoint, MemoryIsBounded) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers have memory beside the program's";
#endif
  const TempDirectory dir;
  const std::vector<ParamEntry> params = {{"a", {4096, 8192}, ""}, {"b", {4096, 4096}, ""}};  // 192 MiB in fp32
  constexpr int kSlices = 8;  // of the columns of each, in the second step
  for (const i64 step : {1, 2}) {
    run_threads(1, {}, [&](Communicator& comm) {
      const std::vector<float> zeros(4096 * 8192, 0.5f);
      auto* data = const_cast<float*>(zeros.data());
      const i64 n = step == 1 ? 1 : kSlices;
      std::vector<model::ParamSlice> slices;
      for (const ParamEntry& p : params)
        for (i64 i = 0; i < n; ++i) slices.push_back({1, {{p.shape[1] / n * i, p.shape[1] / n * (i + 1)}}});
      std::vector<StatePiece> pieces;
      for (size_t i = 0; i < slices.size(); ++i) {
        const i64 param = narrow<i64>(i) / n, count = *checked_product(params[param].shape) / n;
        pieces.push_back({param, 0, count, {{data}}, step == 1 ? nullptr : &slices[i]});
      }
      save_checkpoint(dir.path(), sample_meta(step, DType::F32), params, pieces, comm);
    });
    EXPECT_LT(peak_of_merge(dir.path() + "/" + step_name(step), dir / "m.safetensors"),
              step == 1 ? 128 : 128 + 8 * kSlices);
  }
}

}  // namespace merge_test
}  // namespace ds
