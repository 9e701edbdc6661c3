// SPDX-License-Identifier: Apache-2.0
// Damaged and forged HDF5 files, and forged answers of the process that parses them. Whatever the bytes, the result is
// a table whose every element can be read, or a ds::Error with the reason; never a crash or a hang of this process.

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <random>

#include "formats/confined.h"
#include "formats/hdf5.h"
#include "formats/hdf5_answer.h"
#include "formats/hdf5_parse.h"
#include "fuzz/rounds.h"
#include "temp_directory.h"

namespace ds {
namespace hdf5_fuzz_test {

using testing::read_file;
using testing::write_file;

// A checksum of a good file: over bytes [begin, end), stored at `end`.
struct Sealed {
  size_t begin, end;
};
struct Seed {
  std::string name, bytes;
  std::vector<Sealed> blocks;
};

size_t below(std::mt19937& rng, size_t n) { return static_cast<size_t>(rng()) % std::max<size_t>(n, 1); }

// The checksum of HDF5's metadata (Bob Jenkins, "lookup3", hashlittle with initial value 0), so that forged blocks of
// the newer formats pass it and reach the code after it.
u32 lookup3(const unsigned char* k, size_t length) {
  const auto rotate = [](u32 x, int n) { return (x << n) | (x >> (32 - n)); };
  u32 a = 0xdeadbeef + static_cast<u32>(length), b = a, c = a;
  const auto word = [](const unsigned char* p, size_t n) {
    u32 w = 0;
    std::memcpy(&w, p, std::min<size_t>(n, 4));
    return w;
  };
  while (length > 12) {
    a += word(k, 4), b += word(k + 4, 4), c += word(k + 8, 4);
    a -= c, a ^= rotate(c, 4), c += b;
    b -= a, b ^= rotate(a, 6), a += c;
    c -= b, c ^= rotate(b, 8), b += a;
    a -= c, a ^= rotate(c, 16), c += b;
    b -= a, b ^= rotate(a, 19), a += c;
    c -= b, c ^= rotate(b, 4), b += a;
    k += 12, length -= 12;
  }
  if (length == 0) return c;
  a += word(k, length);
  if (length > 4) b += word(k + 4, length - 4);
  if (length > 8) c += word(k + 8, length - 8);
  c ^= b, c -= rotate(b, 14);
  a ^= c, a -= rotate(c, 11);
  b ^= a, b -= rotate(a, 25);
  c ^= b, c -= rotate(b, 16);
  a ^= c, a -= rotate(c, 4);
  b ^= a, b -= rotate(a, 14);
  c ^= b, c -= rotate(b, 24);
  return c;
}

std::vector<Sealed> sealed_blocks(const std::string& s) {
  std::vector<Sealed> found;
  const auto* bytes = reinterpret_cast<const unsigned char*>(s.data());
  for (const char* mark : {"\x89HDF", "OHDR", "OCHK", "FRHP", "FHDB", "FHIB", "BTHD", "BTLF", "BTIN", "FSHD", "FSSE"}) {
    for (size_t at = s.find(mark); at != std::string::npos; at = s.find(mark, at + 1)) {
      for (size_t end = at + 8; end + 4 <= std::min(s.size(), at + 4096); ++end) {
        u32 stored = 0;
        std::memcpy(&stored, bytes + end, 4);
        if (stored != lookup3(bytes + at, end - at)) continue;
        found.push_back({at, end});
        break;
      }
    }
  }
  return found;
}

// Small files of h5py in the earliest and the latest format, and of ours (tests/fuzz/corpus/hdf5/make.py).
const std::vector<Seed>& seeds() {
  static const std::vector<Seed> all = [] {
    std::vector<Seed> found;
    for (const auto& entry : std::filesystem::directory_iterator(DS_TEST_DATA "/../fuzz/corpus/hdf5")) {
      if (entry.path().extension() == ".h5") {
        std::string bytes = read_file(entry.path());
        std::vector<Sealed> blocks = sealed_blocks(bytes);
        found.push_back({entry.path().filename(), std::move(bytes), std::move(blocks)});
      }
    }
    std::sort(found.begin(), found.end(), [](const Seed& a, const Seed& b) { return a.name < b.name; });
    return found;
  }();
  return all;
}

std::string mutate(const Seed& seed, std::mt19937& rng) {
  const std::vector<Sealed>& blocks = seed.blocks;
  std::string s = seed.bytes;
  const auto place = [&] {  // in the structure rather than in the data, where one is known
    if (blocks.empty() || below(rng, 4) == 0) return below(rng, s.size());
    const Sealed& b = blocks[below(rng, blocks.size())];
    return b.begin + below(rng, b.end - b.begin);
  };
  const auto put = [&](size_t at, u64 value, size_t n) {
    if (at + n <= s.size()) std::memcpy(s.data() + at, &value, n);
  };
  for (size_t edits = 1 + below(rng, 3); edits > 0; --edits) {
    const size_t at = place();
    switch (below(rng, 7)) {
      case 0: s[at] = static_cast<char>(s[at] ^ (1 << below(rng, 8))); break;
      case 1: s[at] = static_cast<char>(rng()); break;
      case 2: {
        constexpr u64 kValues[] = {0,      1,          2,          0x7f,         0x80,         0xff,
                                   0xffff, 0x7fffffff, 0xffffffff, u64{1} << 40, ~u64{0} >> 1, ~u64{0}};
        put(at, kValues[below(rng, std::size(kValues))], size_t{1} << below(rng, 4));
        break;
      }
      case 3: put(at, below(rng, s.size()), 8); break;  // an address
      case 4: {                                         // one block instead of another
        const size_t from = place(), n = std::min({1 + below(rng, 64), s.size() - at, s.size() - from});
        std::memmove(s.data() + at, s.data() + from, n);
        break;
      }
      case 5: {  // messages: type, size, flags
        constexpr unsigned char kTypes[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 15, 16, 17, 18, 21, 22, 23};
        s[at] = static_cast<char>(kTypes[below(rng, std::size(kTypes))]);
        break;
      }
      default: s[at] = static_cast<char>(s[at] + (below(rng, 2) == 0 ? 1 : -1));
    }
  }
  if (below(rng, 8) != 0) {
    for (const Sealed& b : blocks)
      put(b.end, lookup3(reinterpret_cast<const unsigned char*>(s.data()) + b.begin, b.end - b.begin), 4);
  }
  if (below(rng, 16) == 0) s.resize(below(rng, s.size()));
  return s;
}

struct Outcome {
  int accepted = 0, refused = 0, killed = 0;
};

bool kind_of_refusal(const Error& e) { return e.code() == Errc::Corrupt || e.code() == Errc::Unavailable; }

// Through the real entry, and every element of what is accepted is read.
void open_and_read(const std::string& path, Outcome& outcome) {
  try {
    const auto source = open_source(path);
    for (const TensorInfo& t : source->list()) {
      ASSERT_LE(t.bytes(), 1 << 20) << t.name;  // the files are small, and so is all that they hold
      std::vector<char> data(static_cast<size_t>(t.bytes()));
      source->read(t.name, 0, t.numel(), data.data());
    }
    ++outcome.accepted;
  } catch (const Error& e) {
    ASSERT_TRUE(kind_of_refusal(e)) << e.what();
    ++outcome.refused;
    outcome.killed += std::string_view(e.what()).find("it is not read") != std::string_view::npos ? 1 : 0;
  }
}

TEST(Hdf5Fuzz, TheCorpusIsReadAsItsNamesSay) {
  ASSERT_GE(seeds().size(), 8u);
  for (const Seed& s : seeds()) {
    const std::string path = std::string(DS_TEST_DATA "/../fuzz/corpus/hdf5/") + s.name;
    if (s.name.starts_with("refused-")) {
      EXPECT_THROW(open_source(path), Error) << s.name;
    } else {
      EXPECT_GE(open_source(path)->list().size(), 3u) << s.name;
    }
  }
}

TEST(Hdf5Fuzz, TruncatedFilesAreRefusedOrSound) {
  const testing::TempDirectory dir;
  Outcome outcome;
  for (const Seed& s : seeds()) {
    for (size_t cut = 0; cut < s.bytes.size(); cut += 512) {
      write_file(dir / "x.h5", s.bytes.substr(0, cut));
      open_and_read(dir / "x.h5", outcome);
    }
  }
  EXPECT_EQ(outcome.accepted, 0);
  EXPECT_GT(outcome.refused, 30);
}

TEST(Hdf5Fuzz, MutatedFilesAreRefusedOrSound) {
  const testing::TempDirectory dir;
  std::mt19937 rng(20240229);
  Outcome outcome;
  for (int i = 0; i < testing::rounds(400) && !HasFatalFailure(); ++i) {
    write_file(dir / "x.h5", mutate(seeds()[below(rng, seeds().size())], rng));
    open_and_read(dir / "x.h5", outcome);
  }
  std::printf("%d read, %d refused, for %d of these the parser had to be stopped or stopped itself\n", outcome.accepted,
              outcome.refused, outcome.killed);
  EXPECT_GT(outcome.accepted, 20);
  EXPECT_GT(outcome.refused, 100);
}

// Many files in one child: no time goes into making processes. If the child dies, the same files are read again one by
// one. Limits are the only end of a parser that hangs, so they are short; a slow one on a busy machine counts as hung.
std::string parse_mutants(u32 seed, int first, int last) {
  std::mt19937 rng(seed);
  std::string answers;
  for (int i = 0; i < last; ++i) {
    const std::string mutant = mutate(seeds()[below(rng, seeds().size())], rng);
    if (i < first) continue;
    const std::lock_guard lock(hdf5::library());
    try {
      const hdf5::Bytes bytes{"mutant", static_cast<i64>(mutant.size()), [&](i64 offset, void* out, i64 n) {
                                std::memcpy(out, mutant.data() + offset, static_cast<size_t>(n));
                              }};
      hdf5::decode(hdf5::encode(hdf5::parse(bytes)), bytes.size, "mutant");
      answers += 'a';
    } catch (const Error& e) {
      answers += kind_of_refusal(e) ? 'r' : '?';
    }
  }
  return answers;
}

TEST(Hdf5Fuzz, TheParserOnMutants) {
  constexpr int kBatch = 50;
  ASSERT_FALSE(seeds().empty());  // and read: the children cannot
  Outcome outcome;
  for (int batch = 0; batch < testing::rounds(10); ++batch) {
    const u32 seed = 7000 + static_cast<u32>(batch);
    const auto run = [&](int first, int last) {
      const ConfinedLimits limits{.seconds = last - first > 1 ? 10 : 2};
      try {
        return ConfinedChild("mutant", "the parser", -1, limits, [&] { return parse_mutants(seed, first, last); })
            .answer();
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), Errc::Corrupt) << e.what();
        return std::string();
      }
    };
    std::string answers = run(0, kBatch);
    for (int i = 0; answers.empty() && i < kBatch; ++i) {
      const std::string one = run(i, i + 1);
      outcome.killed += one.empty() ? 1 : 0;
      outcome.accepted += one == "a" ? 1 : 0;
      outcome.refused += one == "r" ? 1 : 0;
    }
    ASSERT_EQ(answers.find('?'), std::string::npos);
    outcome.accepted += static_cast<int>(std::count(answers.begin(), answers.end(), 'a'));
    outcome.refused += static_cast<int>(std::count(answers.begin(), answers.end(), 'r'));
  }
  std::printf("%d read, %d refused, %d crashes or hangs of the parser\n", outcome.accepted, outcome.refused,
              outcome.killed);
  EXPECT_GT(outcome.accepted, 50);
  EXPECT_GT(outcome.refused, 200);
}

// A parser that a file has taken over may answer anything.
TEST(Hdf5Fuzz, ForgedAnswersAreRefusedOrSound) {
  constexpr i64 kFile = 1000;
  TensorTable good;
  good.tensors = {
      {"a.w", DType::F32, {2, 3}}, {"b", DType::BF16, {5}}, {"e", DType::U8, {0, 9}}, {"c", DType::F64, {}}};
  good.offsets = {64, 88, 0, -1};
  good.foreign = {{"t", "string of 3 bytes"}};
  good.metadata = {{"format", "pt"}, {"ds", "{\"step\": 3}"}};
  good.inlined = "12345678";
  const std::string answer = hdf5::encode(good);
  const TensorTable same = hdf5::decode(answer, kFile, "good");
  ASSERT_EQ(same.tensors, good.tensors);
  ASSERT_EQ(same.offsets, good.offsets);
  ASSERT_EQ(same.metadata, good.metadata);
  ASSERT_EQ(same.inlined, good.inlined);

  std::mt19937 rng(20240229);
  Outcome outcome;
  for (int i = 0; i < testing::rounds(40000); ++i) {
    std::string s = answer;
    for (size_t edits = 1 + below(rng, 3); edits > 0 && !s.empty(); --edits) {
      const size_t at = below(rng, s.size()), n = std::min<size_t>(8, s.size() - at);
      constexpr i64 kValues[] = {0,
                                 1,
                                 2,
                                 4,
                                 63,
                                 64,
                                 88,
                                 100,
                                 1000,
                                 -1,
                                 -2,
                                 i64{1} << 31,
                                 i64{1} << 61,
                                 std::numeric_limits<i64>::max(),
                                 std::numeric_limits<i64>::min()};
      switch (below(rng, 6)) {
        case 0: s[at] = static_cast<char>(rng()); break;
        case 1: std::memcpy(s.data() + at, &kValues[below(rng, std::size(kValues))], n); break;
        case 2: s.erase(at, 1 + below(rng, 16)); break;
        case 3: s.insert(at, s.substr(below(rng, s.size()), 1 + below(rng, 60))); break;
        case 4: s[at] = static_cast<char>(s[at] + 1); break;
        default: s.resize(at);
      }
    }
    try {
      const TensorTable t = hdf5::decode(s, kFile, "forged");
      ++outcome.accepted;
      for (size_t k = 0; k < t.tensors.size(); ++k) {
        const i64 bytes = t.tensors[k].bytes(), offset = t.offsets[k];
        const i64 all = offset >= 0 ? kFile : static_cast<i64>(t.inlined.size());
        ASSERT_TRUE(bytes == 0 || (offset >= 0 ? offset : -1 - offset) <= all - bytes);
      }
    } catch (const Error& e) {
      ++outcome.refused;
      ASSERT_EQ(e.code(), Errc::Corrupt) << e.what();
    }
  }
  EXPECT_GT(outcome.accepted, 100);
  EXPECT_GT(outcome.refused, 10000);
}

}  // namespace hdf5_fuzz_test
}  // namespace ds
