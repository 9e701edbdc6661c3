// SPDX-License-Identifier: Apache-2.0
// Token files, the order of samples, batches over any cut into ranks, resume, and bad input.
#include "data/objective.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>

#include "expect_error.h"

namespace ds {
namespace data_test {

namespace fs = std::filesystem;
using ::testing::AllOf;
using testing::expect_error;
using ::testing::HasSubstr;

class Data : public ::testing::Test {
 protected:
  Data() {
    std::string pattern = (fs::temp_directory_path() / "ds-data-XXXXXX").string();
    dir_ = mkdtemp(pattern.data());
  }
  ~Data() override { fs::remove_all(dir_); }

  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(dir_ / name, std::ios::binary) << bytes;
    return (dir_ / name).string();
  }
  std::string write_bin(const std::string& name, const std::vector<u16>& tokens) const {
    return write(name, {reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2});
  }
  // n tokens 0, 1, 2, ...: the value of every token is its position.
  std::string write_counting_bin(const std::string& name, i64 n, u16 first = 0) const {
    std::vector<u16> tokens(static_cast<size_t>(n));
    std::iota(tokens.begin(), tokens.end(), first);
    return write_bin(name, tokens);
  }

  fs::path dir_;
};

TokenStream open(const std::vector<std::string>& files, DataFormat format = DataFormat::Auto) {
  return TokenStream(files, {.format = format});
}

std::vector<i32> read(const TokenStream& stream, i64 position, i64 n, i64 vocab_size = 65536) {
  std::vector<i32> out(static_cast<size_t>(n), -1);
  stream.read(position, out, vocab_size);
  return out;
}

BatchLoader loader_of(TokenStream stream, BatchShape shape, u32 seed, i64 vocab_size) {
  return BatchLoader(std::move(stream), shape, seed, vocab_size, next_token());
}

struct Batch {
  std::vector<i32> inputs, targets;
  explicit Batch(i64 elems) : inputs(static_cast<size_t>(elems), -7), targets(static_cast<size_t>(elems), -7) {}
};

TEST_F(Data, TextTokensAreBytes) {
  const TokenStream s = open({write("a.txt", std::string("A\0\xFFz", 4))}, DataFormat::Text);
  EXPECT_EQ(s.num_tokens(), 4);
  EXPECT_EQ(read(s, 0, 4, 256), (std::vector<i32>{65, 0, 255, 122}));
}

TEST_F(Data, BinTokensAreLittleEndianUint16) {
  const TokenStream s = open({write("a.bin", std::string("\x01\x00\x34\x12\xFF\xFF", 6))});
  EXPECT_EQ(s.num_tokens(), 3);
  EXPECT_EQ(read(s, 0, 3), (std::vector<i32>{1, 0x1234, 65535}));
}

TEST_F(Data, FormatCanBeNamed) {
  EXPECT_EQ(open({write("a.bin", "abcd")}, DataFormat::Text).num_tokens(), 4);
  EXPECT_EQ(open({write("b.tokens", "abcd")}, DataFormat::Bin).num_tokens(), 2);
}

TEST_F(Data, FilesAreOneStreamInTheGivenOrder) {
  const TokenStream s = open({write("b", "bcd"), write("a", "a"), write("c", "xyz")});
  EXPECT_EQ(s.num_tokens(), 7);
  const std::string all = "bcdaxyz";
  for (i64 begin = 0; begin < 7; ++begin) {
    for (i64 n = 1; begin + n <= 7; ++n) {
      const std::vector<i32> got = read(s, begin, n);
      EXPECT_EQ(std::string(got.begin(), got.end()), all.substr(static_cast<size_t>(begin), static_cast<size_t>(n)));
    }
  }
}

TEST_F(Data, SplitTakesTheEnd) {
  DataConfig config;
  config.train = {write("a", std::string(70, 'a')), write("b", std::string(30, 'b'))};
  config.split = 0.2;
  config.seq_length = 4;
  const Dataset data = open_dataset(config, *next_token());
  EXPECT_EQ(data.train.num_tokens(), 80);
  ASSERT_TRUE(data.validation);
  EXPECT_EQ(data.validation->num_tokens(), 20);
  EXPECT_EQ(read(data.train, 69, 2), (std::vector<i32>{'a', 'b'}));
  EXPECT_EQ(read(*data.validation, 0, 20), std::vector<i32>(20, 'b'));
}

TEST_F(Data, ValidationFilesReplaceTheSplit) {
  DataConfig config;
  config.train = {write("a", std::string(50, 'a'))};
  config.validation = {write("v", "vwxyz")};
  config.seq_length = 4;
  const Dataset data = open_dataset(config, *next_token());
  EXPECT_EQ(data.train.num_tokens(), 50);
  EXPECT_EQ(data.validation->num_tokens(), 5);
  config.validation.clear();
  config.split = 0;
  EXPECT_FALSE(open_dataset(config, *next_token()).validation);
}

TEST(Permutation, IsABijectionForEverySize) {
  for (i64 n = 1; n <= 2000; ++n) {
    const Permutation p(n, 1234, 0);
    std::vector<bool> hit(static_cast<size_t>(n));
    for (i64 i = 0; i < n; ++i) {
      const i64 x = p(i);
      ASSERT_TRUE(x >= 0 && x < n && !hit[x]) << "n " << n << " index " << i << " gives " << x;
      hit[x] = true;
    }
  }
}

TEST(Permutation, WorksOnSizesBeyond32Bits) {
  const i64 n = (i64{1} << 41) + 12345;
  const Permutation p(n, 9, 3);
  std::vector<i64> images;
  for (i64 i = 0; i < 5000; ++i) images.push_back(p(n - 1 - i * 104729));
  std::ranges::sort(images);
  EXPECT_TRUE(std::ranges::adjacent_find(images) == images.end());
  EXPECT_GE(images.front(), 0);
  EXPECT_LT(images.back(), n);
}

TEST(Permutation, DependsOnSeedAndEpochAndLooksRandom) {
  constexpr i64 n = 1000;
  const auto fixed_points = [](const Permutation& a, const Permutation& b) {
    i64 same = 0;
    for (i64 i = 0; i < n; ++i) same += a(i) == b(i);
    return same;
  };
  // Two independent permutations agree in one place on average.
  EXPECT_LT(fixed_points({n, 1, 0}, {n, 2, 0}), 10);
  EXPECT_LT(fixed_points({n, 1, 0}, {n, 1, 1}), 10);
  // Neighbours land far apart: the mean distance of two random places is n/3.
  const Permutation p(n, 1, 0);
  double distance = 0;
  for (i64 i = 1; i < n; ++i) distance += std::abs(static_cast<double>(p(i) - p(i - 1)));
  EXPECT_NEAR(distance / (n - 1), n / 3.0, 40);
}

// The order is part of every checkpoint: a change of it would make resumed runs see other samples.
TEST(Permutation, OrderIsFrozen) {
  const Permutation p(1000, 1234, 2);
  std::vector<i64> head;
  for (i64 i = 0; i < 8; ++i) head.push_back(p(i));
  EXPECT_THAT(head, ::testing::ElementsAre(986, 349, 382, 122, 553, 129, 680, 207));
}

TEST_F(Data, SamplesShareOneTokenWithTheirNeighbour) {
  const BatchLoader loader =
      loader_of(open({write_counting_bin("a.bin", 31)}), {.micro = 1, .num_ranks = 1, .seq_length = 10}, 0, 65536);
  EXPECT_EQ(loader.num_samples(), 3);  // tokens 0..10, 10..20, 20..30
  Batch b(10);
  for (i64 k = 0; k < 3; ++k) {
    EXPECT_EQ(loader.load_sequential(k, 0, b.inputs, b.targets), 1);
    for (i64 t = 0; t < 10; ++t) {
      EXPECT_EQ(b.inputs[t], 10 * k + t);
      EXPECT_EQ(b.targets[t], 10 * k + t + 1);
    }
  }
  EXPECT_EQ(loader_of(open({write_counting_bin("b.bin", 30)}), {1, 1, 10}, 0, 65536).num_samples(), 2);
}

// The inputs and targets of the optimizer steps from `consumed` on, in the canonical order (micro-batch, rank).
std::vector<i32> global_batches(const std::string& file, i64 micro, i64 num_ranks, i64 accumulation, i64 consumed,
                                int steps) {
  constexpr i64 T = 3;
  const BatchLoader loader = loader_of(open({file}), {micro, num_ranks, T}, 42, 65536);
  std::vector<i32> all;
  Batch b(micro * T);
  for (int step = 0; step < steps; ++step, consumed += micro * num_ranks * accumulation) {
    for (i64 j = 0; j < accumulation; ++j) {
      for (i64 r = 0; r < num_ranks; ++r) {
        loader.load(consumed, j, r, b.inputs, b.targets);
        for (size_t row = 0; row < static_cast<size_t>(micro); ++row) {
          all.insert(all.end(), b.inputs.begin() + row * T, b.inputs.begin() + (row + 1) * T);
          all.insert(all.end(), b.targets.begin() + row * T, b.targets.begin() + (row + 1) * T);
        }
      }
    }
  }
  return all;
}

TEST_F(Data, AShorterStepTakesTheFirstTokensOfTheSameSamples) {
  constexpr i64 kMicro = 2, kBatches = 3, T = 5;
  const BatchLoader loader = loader_of(open({write_counting_bin("a.bin", 301)}),
                                       {.micro = kMicro, .num_ranks = 1, .seq_length = T}, 42, 65536);
  Batch whole(kBatches * kMicro * T), cut(kBatches * kMicro * T);
  loader.load_step(6, kBatches, 0, T, whole.inputs, whole.targets);
  Batch micro(kMicro * T);
  loader.load(6, 1, 0, micro.inputs, micro.targets);
  EXPECT_TRUE(std::equal(micro.inputs.begin(), micro.inputs.end(), whole.inputs.begin() + kMicro * T));
  for (i64 length = 1; length <= T; ++length) {
    loader.load_step(6, kBatches, 0, length, cut.inputs, cut.targets);
    for (i64 sample = 0; sample < kBatches * kMicro; ++sample) {
      for (i64 t = 0; t < length; ++t) {
        EXPECT_EQ(cut.inputs[sample * length + t], whole.inputs[sample * T + t]) << length;
        EXPECT_EQ(cut.targets[sample * length + t], whole.targets[sample * T + t]) << length;
      }
    }
  }
}

TEST_F(Data, AnyCutOfTheGlobalBatchSeesTheSameSamples) {
  const std::string file = write_counting_bin("a.bin", 301);  // 100 samples; 12 a step: epochs end inside a step
  const std::vector<i32> want = global_batches(file, 1, 1, 12, 0, 30);
  for (const auto& [micro, ranks] : {std::pair{12, 1}, {1, 12}, {2, 3}, {3, 4}, {4, 1}, {6, 2}, {1, 4}, {2, 1}}) {
    EXPECT_EQ(global_batches(file, micro, ranks, 12 / (micro * ranks), 0, 30), want) << micro << " x " << ranks;
  }
}

// A worker's samples of a step follow each other, however it shares them among its ranks and micro-batches.
TEST_F(Data, WorkersSeeTheSameSamplesWhateverTheyAreMadeOf) {
  const std::string file = write_counting_bin("a.bin", 301);
  const auto inputs_of = [&](i64 micro, i64 ranks, i64 accumulation) {
    const BatchLoader loader = loader_of(
        open({file}),
        {.micro = micro, .num_ranks = 2 * ranks, .seq_length = 3, .workers = 2, .micro_batches = accumulation}, 42,
        65536);
    std::vector<i32> all;
    Batch b(micro * 3);
    for (i64 consumed = 0; consumed < 120; consumed += 24) {
      for (i64 worker = 0; worker < 2; ++worker) {
        for (i64 j = 0; j < accumulation; ++j) {
          for (i64 r = 0; r < ranks; ++r) {
            loader.load(consumed, j, worker * ranks + r, b.inputs, b.targets);
            all.insert(all.end(), b.inputs.begin(), b.inputs.end());
          }
        }
      }
    }
    return all;
  };
  const std::vector<i32> want = inputs_of(12, 1, 1);
  EXPECT_EQ(inputs_of(1, 4, 3), want);
  EXPECT_EQ(inputs_of(2, 3, 2), want);
  EXPECT_EQ(inputs_of(1, 1, 12), want);
}

TEST_F(Data, ResumesExactlyAtAnotherWorldSize) {
  const std::string file = write_counting_bin("a.bin", 301);
  const std::vector<i32> whole = global_batches(file, 2, 2, 3, 0, 20);
  std::vector<i32> parts = global_batches(file, 2, 2, 3, 0, 7);
  const std::vector<i32> second = global_batches(file, 3, 4, 1, 7 * 12, 13);
  parts.insert(parts.end(), second.begin(), second.end());
  EXPECT_EQ(parts, whole);
}

TEST_F(Data, EveryEpochHoldsEverySampleOnceInItsOwnOrder) {
  const BatchLoader loader = loader_of(open({write_counting_bin("a.bin", 7 * 5 + 1)}), {1, 1, 5}, 3, 65536);
  std::vector<std::vector<i32>> epochs(4);
  Batch b(5);
  for (i64 k = 0; k < 28; ++k) {
    loader.load(k, 0, 0, b.inputs, b.targets);
    epochs[k / 7].push_back(b.inputs[0] / 5);
  }
  EXPECT_NE(epochs[0], epochs[1]);
  for (const std::vector<i32>& e : epochs) EXPECT_THAT(e, ::testing::UnorderedElementsAre(0, 1, 2, 3, 4, 5, 6));
}

// The first tokens of the samples at positions [begin, end), by a loader of any shape.
std::vector<i32> firsts_of(const BatchLoader& loader, BatchShape shape, i64 begin, i64 end) {
  std::vector<i32> firsts;
  Batch b(shape.micro * shape.seq_length);
  for (i64 at = begin; at < end; at += shape.micro * shape.num_ranks) {
    for (i64 rank = 0; rank < shape.num_ranks; ++rank) {
      loader.load(at, 0, rank, b.inputs, b.targets);
      for (i64 row = 0; row < shape.micro; ++row) firsts.push_back(b.inputs[row * shape.seq_length]);
    }
  }
  return firsts;
}

// Files of 12, 8 and 4 samples of 5 tokens, whose first tokens are 1000 times the file and the number of the sample.
class WeightedData : public Data {
 protected:
  WeightedData() {
    for (i64 file = 0; file < 3; ++file) {
      std::vector<u16> tokens;
      for (i64 i = 0; i < 5 * kSamples[file] + 1; ++i) tokens.push_back(static_cast<u16>(1000 * (file + 1) + i / 5));
      files_.push_back(write_bin(std::to_string(file) + ".bin", tokens));
    }
  }
  BatchLoader loader(const std::vector<float>& weights, BatchShape shape = {1, 1, 5}, u32 seed = 7) const {
    return BatchLoader(open(files_), shape, seed, 65536, next_token(), weights);
  }
  static constexpr i64 kSamples[] = {12, 8, 4};
  std::vector<std::string> files_;
};

TEST_F(WeightedData, EachFileComesAsOftenAsItsWeightSays) {
  const std::vector<float> weights = {0.25f, 1, 2.5f};
  const BatchLoader l = loader(weights);
  EXPECT_EQ(l.num_samples(), 3 + 8 + 10);
  std::map<i32, int> times, in_first;
  constexpr int kEpochs = 8;
  for (i64 epoch = 0; epoch < kEpochs; ++epoch) {
    std::map<i32, int> of_file;
    const std::vector<i32> firsts = firsts_of(l, {1, 1, 5}, 21 * epoch, 21 * (epoch + 1));
    for (const i32 first : firsts) {
      ++times[first];
      ++of_file[first / 1000];
      if (epoch == 0) ++in_first[first];
    }
    EXPECT_THAT(of_file, ::testing::ElementsAre(std::pair(1, 3), std::pair(2, 8), std::pair(3, 10)));
    EXPECT_FALSE(std::ranges::is_sorted(firsts));
  }
  // Over epochs whose draws are whole rounds every sample of a file comes equally often.
  EXPECT_EQ(times.size(), 24u);
  for (const auto& [first, n] : times) EXPECT_EQ(n, kEpochs * weights[first / 1000 - 1]) << first;
  // Within one epoch the counts differ from the weights by one at most.
  for (const auto& [first, n] : in_first)
    EXPECT_LE(std::abs(static_cast<float>(n) - weights[first / 1000 - 1]), 1) << first;
}

TEST_F(WeightedData, SamplesLieInOneFileAndResumeAtAnyShape) {
  const std::vector<float> weights = {1, 0.5f, 3};
  const std::vector<i32> whole = firsts_of(loader(weights), {1, 1, 5}, 0, 240);
  std::vector<i32> parts = firsts_of(loader(weights, {2, 3, 5}), {2, 3, 5}, 0, 60);
  const std::vector<i32> rest = firsts_of(loader(weights, {4, 1, 5}), {4, 1, 5}, 60, 240);
  parts.insert(parts.end(), rest.begin(), rest.end());
  EXPECT_EQ(parts, whole);
  EXPECT_NE(firsts_of(loader(weights, {1, 1, 5}, 8), {1, 1, 5}, 0, 240), whole);
  const BatchLoader l = loader(weights);
  Batch b(5);
  for (i64 k = 0; k < l.num_samples(); ++k) {
    l.load(k, 0, 0, b.inputs, b.targets);
    EXPECT_EQ(b.inputs.front() / 1000, b.targets.back() / 1000);
  }
  EXPECT_EQ(loader({0.001f, 0.001f, 1}).num_samples(), 1 + 1 + 4);
}

TEST_F(WeightedData, AreAPartOfTheIdentity) {
  const DataIdentity saved = loader({0.1f, 1, 2}).identity();
  check_same_data(parse_data_identity(data_identity_json(saved)), loader({0.1f, 1, 2}).identity());
  expect_error(Errc::Mismatch, HasSubstr("data.weights is [1, 1, 1], but the run was started with [0.1, 1, 2]"), [&] {
    check_same_data(saved, loader({1, 1, 1}).identity());
  });
  expect_error(Errc::Mismatch, HasSubstr("data.weights is []"), [&] { check_same_data(saved, loader({}).identity()); });
  EXPECT_EQ(data_identity_json(loader({}).identity()).find("weights"), std::string::npos);
}

TEST_F(WeightedData, EachFileNeedsASample) {
  DataConfig config;
  config.train = files_;
  config.split = 0;
  config.weights = {1, 1, 1};
  config.seq_length = 20;
  EXPECT_EQ(open_dataset(config, *next_token()).train.num_tokens(), 123);
  config.seq_length = 21;
  expect_error(Errc::Config, AllOf(HasSubstr("2.bin"), HasSubstr("needs 22"), HasSubstr("data.weights")),
               [&] { open_dataset(config, *next_token()); });
  config.weights = {1, 1};
  expect_error(Errc::Config, HasSubstr("data.weights has 2 numbers, and data.train 3 files"),
               [&] { open_dataset(config, *next_token()); });
}

TEST_F(Data, BatchLargerThanTheDataWraps) {
  const BatchLoader loader = loader_of(open({write_counting_bin("a.bin", 6)}), {8, 1, 5}, 3, 65536);
  Batch b(40);
  loader.load(0, 0, 0, b.inputs, b.targets);
  for (size_t row = 0; row < 8; ++row) EXPECT_EQ(b.inputs[row * 5], 0);
}

TEST_F(Data, SequentialBatchesCoverEverySampleOnceAndPadTheLast) {
  const std::string file = write_counting_bin("a.bin", 11 * 2 + 1);
  for (i64 ranks : {1, 2, 3, 20}) {
    const BatchLoader loader = loader_of(open({file}), {2, ranks, 2}, 3, 65536);
    std::vector<i32> seen;
    Batch b(4);
    for (i64 i = 0; i < loader.num_sequential_batches(); ++i) {
      for (i64 r = 0; r < ranks; ++r) {
        const i64 real = loader.load_sequential(i, r, b.inputs, b.targets);
        for (i64 row = 0; row < 2; ++row) {
          const auto at = static_cast<size_t>(2 * row);
          if (row < real) {
            seen.push_back(b.inputs[at] / 2);
          } else {
            EXPECT_THAT(b.targets[at], -100);
            EXPECT_EQ(b.targets[at + 1], -100);
            EXPECT_EQ(b.inputs[at], 0);
          }
        }
      }
    }
    std::vector<i32> want(11);
    std::iota(want.begin(), want.end(), 0);
    EXPECT_EQ(seen, want) << ranks << " ranks";
  }
}

// This holds for any ranks and micro-batches.
TEST_F(Data, SequentialSampleKBelongsToWorkerKModTheirNumber) {
  constexpr i64 kSamples = 23, kLength = 2;
  const std::string file = write_counting_bin("a.bin", kSamples * kLength + 1);
  for (const i64 workers : {1, 2, 4, 30}) {
    for (const i64 ranks : {1, 2, 3}) {  // of a worker
      for (const i64 micro : {1, 2, 5}) {
        const BatchLoader loader = loader_of(
            open({file}), {.micro = micro, .num_ranks = ranks * workers, .seq_length = kLength, .workers = workers}, 3,
            65536);
        std::vector<i64> worker_of(kSamples, -1);
        Batch b(static_cast<size_t>(micro * kLength));
        for (i64 i = 0; i < loader.num_sequential_batches(); ++i) {
          for (i64 r = 0; r < ranks * workers; ++r) {
            const i64 real = loader.load_sequential(i, r, b.inputs, b.targets);
            for (i64 row = 0; row < real; ++row) {
              i64& worker = worker_of[static_cast<size_t>(b.inputs[static_cast<size_t>(row * kLength)] / kLength)];
              EXPECT_EQ(worker, -1) << "seen twice";
              worker = r / ranks;
            }
          }
        }
        for (i64 k = 0; k < kSamples; ++k)
          EXPECT_EQ(worker_of[static_cast<size_t>(k)], k % workers)
              << "sample " << k << ", " << ranks << " ranks, micro " << micro;
      }
    }
  }
}

TEST_F(Data, MissingFileIsAConfigurationMistake) {
  expect_error(Errc::Config, AllOf(HasSubstr("nowhere.txt"), HasSubstr("No such file")),
               [&] { open({(dir_ / "nowhere.txt").string()}); });
  expect_error(Errc::Config, HasSubstr("not a regular file"), [&] { open({dir_.string()}); });
  expect_error(Errc::Config, HasSubstr("names no file"), [&] { open_dataset({}, *next_token()); });
}

TEST_F(Data, EmptyAndHalfFilesAreCorrupt) {
  expect_error(Errc::Config, AllOf(HasSubstr("e.txt"), HasSubstr("empty")), [&] { open({write("e.txt", "")}); });
  expect_error(Errc::Corrupt,
               AllOf(HasSubstr("odd.bin"), HasSubstr("has 3 bytes, no multiple of 2; the file is read as uint16")),
               [&] { open({write("odd.bin", "abc")}); });
}

TEST_F(Data, MixedFormatsMustBeNamed) {
  expect_error(Errc::Config, AllOf(HasSubstr("m.bin"), HasSubstr("m.txt"), HasSubstr("data.format")), [&] {
    open({write("m.bin", "ab"), write("m.txt", "ab")});
  });
}

TEST_F(Data, TooShortForOneSample) {
  DataConfig config;
  config.train = {write("a", std::string(100, 'a'))};
  config.split = 0;
  config.seq_length = 99;
  EXPECT_EQ(open_dataset(config, *next_token()).train.num_tokens(), 100);
  config.seq_length = 100;
  expect_error(Errc::Config, AllOf(HasSubstr("training data"), HasSubstr("needs 101")),
               [&] { open_dataset(config, *next_token()); });
  config.seq_length = 10;
  config.split = 0.05;
  expect_error(Errc::Config, AllOf(HasSubstr("validation data"), HasSubstr("data.split")),
               [&] { open_dataset(config, *next_token()); });
  config.seq_length = 100;  // no split helps
  expect_error(Errc::Config, AllOf(HasSubstr("the whole data"), HasSubstr("give more text")),
               [&] { open_dataset(config, *next_token()); });
}

TEST_F(Data, TokenOutsideTheVocabularyIsNamedWithItsPlace) {
  const TokenStream bin = open({write_counting_bin("a.bin", 10), write_counting_bin("b.bin", 10, 95)});
  EXPECT_EQ(read(bin, 0, 12, 97).back(), 96);
  expect_error(Errc::Mismatch,
               AllOf(HasSubstr("b.bin"), HasSubstr("token 97 at position 2 (byte 4)"), HasSubstr("vocabulary of 97")),
               [&] { read(bin, 5, 15, 97); });
  const TokenStream text = open({write("t.txt", "ab\xE9z")}, DataFormat::Text);
  expect_error(Errc::Mismatch, HasSubstr("token 233 at position 2 (byte 2)"), [&] { read(text, 0, 4, 128); });
}

// Not when it is met, perhaps after hours, and not where nobody reads it.
TEST_F(Data, ABadTokenIsFoundWhenABatchLoaderIsMade) {
  std::vector<u16> tokens(3'000'000, 7);
  tokens[2'500'001] = 4711;
  const std::string file = write_bin("long.bin", tokens);
  const BatchShape shape{.micro = 1, .num_ranks = 1, .seq_length = 16};
  expect_error(Errc::Mismatch, AllOf(HasSubstr("long.bin"), HasSubstr("token 4711 at position 2500001 (byte 5000002)")),
               [&] { loader_of(open({file}), shape, 1, 4711); });
  EXPECT_EQ(loader_of(open({file}), shape, 1, 4712).num_samples(), 187499);
  TokenStream good_part = open({file});
  good_part.narrow_to(0, 2'500'001);
  EXPECT_EQ(loader_of(std::move(good_part), shape, 1, 4711).num_samples(), 156250);
  TokenStream bad_end = open({file, write_counting_bin("next.bin", 100)});
  bad_end.narrow_to(2'500'002, 3'000'100);
  expect_error(Errc::Mismatch, HasSubstr("next.bin': token 50 at position 50"),
               [&] { loader_of(std::move(bad_end), shape, 1, 50); });
}

TEST_F(Data, WhatIsNoRegularFileIsRefusedAtOnce) {
  ASSERT_EQ(::mkfifo((dir_ / "pipe").c_str(), 0600), 0);
  expect_error(Errc::Config, AllOf(HasSubstr("pipe"), HasSubstr("not a regular file")),
               [&] { open({(dir_ / "pipe").string()}); });
  expect_error(Errc::Config, HasSubstr("not a regular file"), [&] { open({dir_.string()}); });
}

TEST_F(Data, FileCutOffWhileInUseIsAnError) {
  const std::string file = write("a.txt", std::string(10000, 'x'));
  const TokenStream s = open({file});
  fs::resize_file(file, 100);
  expect_error(Errc::Corrupt, AllOf(HasSubstr("a.txt"), HasSubstr("shrank from 10000 to 100 bytes")),
               [&] { read(s, 9000, 10); });
}

TEST_F(Data, ResumeNoticesOtherData) {
  std::string text(3 << 20, 'a');
  const std::string file = write("a.txt", text);
  const auto identity = [&](i64 seq_length = 8, u32 seed = 1, i64 num_tokens = 3 << 20) {
    TokenStream stream = open({file});
    stream.narrow_to(0, num_tokens);
    return loader_of(std::move(stream), {1, 1, seq_length}, seed, 256).identity();
  };
  const DataIdentity saved = identity();
  check_same_data(saved, identity());
  check_same_data(parse_data_identity(data_identity_json(saved)), identity());
  expect_error(Errc::Mismatch, HasSubstr("data.seq_length is 16"), [&] { check_same_data(saved, identity(16)); });
  expect_error(Errc::Mismatch, HasSubstr("data.seed is 2"), [&] { check_same_data(saved, identity(8, 2)); });
  expect_error(Errc::Mismatch, HasSubstr("data.split or data.validation has changed"),
               [&] { check_same_data(saved, identity(8, 1, 2 << 20)); });
  for (size_t place : {size_t{0}, text.size() - 1}) {
    std::string other = text;
    other[place] = 'b';
    write("a.txt", other);
    expect_error(Errc::Mismatch, AllOf(HasSubstr("a.txt"), HasSubstr("other content")),
                 [&] { check_same_data(saved, identity()); });
  }
  write("a.txt", text + "more");
  expect_error(Errc::Mismatch, AllOf(HasSubstr("3145732 bytes"), HasSubstr("3145728 bytes")),
               [&] { check_same_data(saved, identity()); });
}

TEST(DataIdentity, JsonRoundTripIsExactAndNonsenseIsRefused) {
  const DataIdentity a{
      {{"a \"b\"\n", i64{1} << 60, ~u64{0}}, {"b", 1, 15}}, "BPE", i64{1} << 55, 17, 4294967295, "masked \"tokens\""};
  const std::string json = data_identity_json(a);
  EXPECT_THAT(json, AllOf(HasSubstr("\"xxh3\":\"ffffffffffffffff\""), HasSubstr("\"xxh3\":\"000000000000000f\"")));
  const DataIdentity b = parse_data_identity(json);
  EXPECT_EQ(b.files[0].name, a.files[0].name);
  EXPECT_EQ(data_identity_json(b), json);
  check_same_data(a, b);
  // Checkpoints of the first version do not name an objective: there was one.
  const char* old = R"({"files":[],"num_samples":1,"seq_length":1,"seed":1})";
  EXPECT_EQ(parse_data_identity(old).objective, next_token()->description());
  DataIdentity other = a;
  other.objective = next_token()->description();
  expect_error(Errc::Mismatch, AllOf(HasSubstr("'masked \"tokens\"'"), HasSubstr("'next token'")),
               [&] { check_same_data(a, other); });
  for (const char* bad : {"", "{}", "[]", "null", R"({"files":[{"name":"a","bytes":1,"xxh3":"12g4"}]})",
                          R"({"files":[],"num_samples":"1","seq_length":1,"seed":1})"}) {
    expect_error(Errc::Corrupt, HasSubstr("description of its data"), [&] { parse_data_identity(bad); });
  }
}

}  // namespace data_test
}  // namespace ds
