// SPDX-License-Identifier: Apache-2.0
// Deterministic mutations of files of torch.save, of the archive around them and of the pickle inside: whatever the
// bytes, the file is refused, or every tensor that it lists can be read to the end without leaving it. And of a whole
// DeepSpeed checkpoint, one of whose files is mutated.

#include "formats/torch_file.h"

#include <random>

#include "checkpoint/deepspeed.h"
#include "fuzz/rounds.h"
#include "temp_directory.h"
#include "test_data.h"
#include "zip_file.h"

namespace ds {
namespace torch_fuzz_test {

using testing::read_file;
using testing::TempDirectory;
using testing::write_file;

// Pieces that pickles are made of, and pieces that break them.
const std::string kTokens[] = {"(",
                               "t",
                               ")",
                               "]",
                               "}",
                               "e",
                               "u",
                               "s",
                               "a",
                               "b",
                               "R",
                               "Q",
                               "\x81",
                               ".",
                               "N",
                               "\x88",
                               "\x85",
                               "\x86",
                               "\x87",
                               "q\1",
                               "h\1",
                               std::string("h\0", 2),
                               std::string("j\0\0\0\0", 5),
                               "\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f",
                               std::string("\x8a\x08\0\0\0\0\0\0\0\x40", 10),
                               "K\1",
                               std::string("X\1\0\0\0a", 6),
                               "cos\nsystem\n",
                               "ctorch\nSize\n",
                               "ctorch._utils\n_rebuild_tensor_v2\n",
                               "ctorch\nFloatStorage\n",
                               "ccollections\nOrderedDict\n",
                               "cargparse\nNamespace\n",
                               "\x93",
                               "\xff",
                               std::string("\0\0\0\0", 4)};

std::string mutate(std::string s, std::mt19937& rng) {
  const auto below = [&](size_t n) { return static_cast<size_t>(rng() % std::max<size_t>(n, 1)); };
  for (size_t round = 1 + below(3); round > 0 && !s.empty(); --round) {
    const size_t at = below(s.size()), length = 1 + below(16);
    switch (below(7)) {
      case 0: s[at] = static_cast<char>(rng()); break;
      case 1: s[at] = static_cast<char>(s[at] ^ (1 << below(8))); break;
      case 2: s.erase(at, length); break;
      case 3: s.insert(at, kTokens[below(std::size(kTokens))]); break;
      case 4: s.insert(below(s.size()), s.substr(at, length)); break;
      case 5: s[at] = static_cast<char>("\0\1\2\x7f\x80\xff"[below(6)]); break;
      case 6:
        if (below(8) == 0) s.resize(at);
        break;
    }
  }
  return s;
}

// Reads everything that the file claims to contain, up to a bound that no honest tensor of these files reaches.
void read_everything(const TensorSource& source) {
  constexpr i64 kEnough = 1 << 16;
  std::vector<char> out;
  for (const TensorInfo& t : source.list()) {
    const i64 n = t.numel(), step = kEnough / dtype_bytes(t.dtype);
    for (const i64 first : {i64{0}, std::max<i64>(n - step, 0)}) {
      const i64 count = std::min(n - first, step);
      out.resize(count * dtype_bytes(t.dtype));
      source.read(t.name, first, count, out.data());
    }
  }
}

bool is_refusal(const Error& e) {
  return e.code() == Errc::Corrupt || e.code() == Errc::Unavailable || e.code() == Errc::Mismatch;
}

class TorchFuzz : public ::testing::Test {
 protected:
  // Opens `bytes` and reads it; counts.
  void attempt(const std::string& bytes) {
    write_file(dir_ / "x.pt", bytes);
    try {
      read_everything(*open_torch(dir_ / "x.pt"));
      ++accepted_;
    } catch (const Error& e) {
      ++refused_;
      if (!is_refusal(e)) {
        std::filesystem::copy(dir_ / "x.pt", ::testing::TempDir() + "torch-fuzz-failure.pt",
                              std::filesystem::copy_options::overwrite_existing);
        FAIL() << e.what() << " (kept: " << ::testing::TempDir() << "torch-fuzz-failure.pt)";
      }
    }
  }
  TempDirectory dir_;
  int accepted_ = 0, refused_ = 0;
};

TEST_F(TorchFuzz, MutatedArchivesAreRefusedOrSound) {
  std::mt19937 rng(20240229);
  for (const char* name : {"views", "types", "protocol4"}) {
    const std::string good = read_file(testing::test_data(fmt::format("torch/{}.pt", name)));
    const size_t directory = good.find("PK\1\2");
    for (int i = 0; i < testing::rounds(300) && !HasFatalFailure(); ++i) {
      // The directory is where a single bit matters; the rest is mostly data.
      attempt(i % 2 == 0 ? mutate(good, rng) : good.substr(0, directory) + mutate(good.substr(directory), rng));
    }
  }
  EXPECT_GT(accepted_, 10);
  EXPECT_GT(refused_, 400);
}

struct Unpacked {
  std::string pickled;
  std::vector<std::pair<std::string, std::string>> storages;  // key, bytes
};
Unpacked unpack(const std::string& path) {
  const File file = File::open_read(path);
  Unpacked all;
  for (const ZipEntry& e : read_zip(file)) {
    std::string data(static_cast<size_t>(e.bytes), '\0');
    file.read_at(e.offset, data.data(), e.bytes);
    const size_t at = e.name.find("/data/");
    if (at != std::string::npos) all.storages.emplace_back(e.name.substr(at + 6), data);
    if (e.name.ends_with("/data.pkl")) all.pickled = data;
  }
  return all;
}

TEST_F(TorchFuzz, MutatedPicklesAreRefusedOrSound) {
  std::mt19937 rng(20240301);
  for (const char* name : {"views", "types", "training"}) {
    const auto [pickled, storages] = unpack(testing::test_data(fmt::format("torch/{}.pt", name)));
    for (int i = 0; i < testing::rounds(500) && !HasFatalFailure(); ++i)
      attempt(testing::torch_file(mutate(pickled, rng), storages));
  }
  EXPECT_GT(accepted_, 50);
  EXPECT_GT(refused_, 500);
}

// Inputs that once broke something, or that no mutation reaches.
TEST_F(TorchFuzz, OfTheCorpusOnlyTheHonestFilesAreRead) {
  for (const auto& entry : std::filesystem::directory_iterator(DS_TEST_DATA "/../fuzz/corpus/torch")) {
    const std::string name = entry.path().filename().string();
    const int before = accepted_;
    attempt(read_file(entry.path().string()));
    EXPECT_EQ(accepted_ - before, name == "strided.pt" || name == "repacked.pt" ? 1 : 0) << name;
  }
  EXPECT_EQ(accepted_, 2);
  EXPECT_GE(refused_, 6);
}

TEST_F(TorchFuzz, CheckpointsWithAMutatedFileAreRefusedOrSound) {
  std::mt19937 rng(20240302);
  for (const std::string name : {"zero2-bf16", "zero3-fp32", "zero0-fp16", "universal-zero1"}) {
    const TempDirectory copy;
    std::filesystem::copy(testing::test_data("deepspeed/" + name), copy.path(),
                          std::filesystem::copy_options::recursive);
    std::vector<std::string> paths;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(copy.path())) {
      if (entry.path().extension() == ".pt") paths.push_back(entry.path().string());
    }
    std::sort(paths.begin(), paths.end());
    for (int i = 0; i < testing::rounds(80); ++i) {
      const std::string& path = paths[rng() % paths.size()];
      const std::string good = read_file(path);
      // As malice does it: the pickle is changed and everything around it put right again.
      const auto [pickled, storages] = unpack(path);
      write_file(path, testing::torch_file(mutate(pickled, rng), storages));
      try {
        const auto source = open_deepspeed(copy.path());
        std::vector<char> out;
        for (i64 p = 0; p < static_cast<i64>(source->params().size()); ++p) {
          const ParamEntry& entry = source->params()[p];
          const i64 n = std::min<i64>(*checked_product(entry.shape), 1 << 14);
          if (!entry.tied_to.empty()) continue;
          for (const State s : kStates) {
            const DType dtype = source->stored_dtype(s, p);
            if (!source->has(s) || (s != State::Param && !is_float(source->stored_dtype(State::Param, p)))) continue;
            out.resize(n * dtype_bytes(dtype));
            source->read(s, dtype, p, 0, n, out.data());
          }
        }
        ++accepted_;
      } catch (const Error& e) {
        ++refused_;
        ASSERT_TRUE(is_refusal(e)) << path << ": " << e.what();
      }
      write_file(path, good);
    }
  }
  EXPECT_GT(accepted_, 20);
  EXPECT_GT(refused_, 100);
}

}  // namespace torch_fuzz_test
}  // namespace ds
