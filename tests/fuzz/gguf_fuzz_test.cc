// SPDX-License-Identifier: Apache-2.0
// Deterministic mutations of GGUF files: whatever the bytes, a file is refused, or every tensor that it lists can be
// read to the end; its configuration and its tokenizer are refused or made.

#include "base/gguf.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "config/gguf_model.h"
#include "data/tokenizer.h"
#include "formats/gguf_source.h"
#include "fuzz/rounds.h"
#include "gguf_file.h"
#include "temp_directory.h"

namespace ds {
namespace gguf_fuzz_test {

using testing::GgufFile;
using testing::TempDirectory;
using testing::write_file;

// A mixture with a tensor of each form: experts in one tensor, rows in another order, blocks of 32 and of 256.
GgufFile mixture(const std::string& tokenizer) {
  GgufFile file;
  file.text("general.architecture", "llama").u("general.alignment", 32);
  for (const auto& [key, value] : {std::pair{"context_length", 64u},
                                   {"embedding_length", 32u},
                                   {"block_count", 1u},
                                   {"feed_forward_length", 32u},
                                   {"attention.head_count", 4u},
                                   {"attention.head_count_kv", 2u},
                                   {"expert_count", 2u},
                                   {"expert_used_count", 1u}})
    file.u(std::string("llama.").append(key), value);
  file.text("tokenizer.ggml.model", tokenizer).text("tokenizer.ggml.pre", "qwen2").u("tokenizer.ggml.eos_token_id", 0);
  file.texts("tokenizer.ggml.tokens", {"<e>", "a", "b", "ab", "<u>"}).texts("tokenizer.ggml.merges", {"a b"});
  file.integers("tokenizer.ggml.token_type", {3, 1, 1, 1, 2}).integers("tokenizer.ggml.scores", {0, -1, -2, -3, 0});
  file.u("tokenizer.ggml.unknown_token_id", 4);
  file.tensor("token_embd.weight", {256, 3}, 14, std::string(3 * 210, 'a'));
  file.tensor("blk.0.attn_q.weight", {32, 32}, 2, std::string(32 * 18, 'b'));
  file.tensor("blk.0.attn_k.weight", {32, 16}, 1, std::string(1024, 'c'));
  file.tensor("blk.0.ffn_down_exps.weight", {32, 32, 2}, 7, std::string(64 * 24, 'd'));
  return file.floats("rope_freqs.weight", {4}, {1, 1, 1, 1});
}

std::string mutate(std::string s, std::mt19937& rng) {
  const auto below = [&](size_t n) { return static_cast<size_t>(rng() % std::max<size_t>(n, 1)); };
  const std::string numbers[] = {GgufFile::number(~u64{0}),      GgufFile::number(u64{1} << 60),
                                 GgufFile::number(u64{1} << 31), GgufFile::number(u64{0}),
                                 GgufFile::number(u32{9}),       GgufFile::number(u32{14}),
                                 GgufFile::number(u64{8}),       GgufFile::string("split.count")};
  for (size_t round = 1 + below(3); round > 0 && !s.empty(); --round) {
    // The head is where the meaning is.
    const size_t at = below(below(4) == 0 ? s.size() : std::min<size_t>(s.size(), 1600)), length = 1 + below(16);
    const std::string& number = numbers[below(std::size(numbers))];
    switch (below(7)) {
      case 0: s[at] = static_cast<char>(rng()); break;
      case 1: s[at] = static_cast<char>(s[at] ^ (1 << below(8))); break;
      case 2: s.erase(at, length); break;
      case 3: s.replace(at, number.size(), number); break;
      case 4: s.insert(below(s.size()), s.substr(at, length)); break;
      case 5: s[at] = static_cast<char>("\0\1\2\x0e\x80\xff"[below(6)]); break;
      case 6:
        if (below(8) == 0) s.resize(at);
        break;
    }
  }
  return s;
}

void read_everything(const TensorSource& source) {
  std::vector<char> out;
  for (const TensorInfo& t : source.list()) {
    ASSERT_LE(t.numel(), 1 << 20) << t.name;  // as many as blocks of 1 bit would be
    out.resize(static_cast<size_t>(t.bytes()));
    source.read(t.name, 0, t.numel(), out.data());
    source.read(t.name, t.numel() / 3, t.numel() / 2, out.data());
  }
}

// Whether `action` does not throw.
template <class Action>
int succeeds(Action action) {
  try {
    action();
    return 1;
  } catch (const Error&) {
    return 0;
  }
}

TEST(GgufFuzz, MutatedFilesAreRefusedOrSound) {
  const TempDirectory dir;
  const std::string path = dir / "m.gguf";
  std::mt19937 rng(20260130);
  int opened = 0, refused = 0, configured = 0, tokenized = 0;
  for (const char* tokenizer : {"gpt2", "llama"}) {
    const std::string good = mixture(tokenizer).bytes();
    write_file(path, good);
    read_everything(*open_gguf(path));
    EXPECT_FALSE(gguf_config(Gguf(path)).empty());
    EXPECT_EQ(open_tokenizer(path)->vocab_size(), 5);
    for (int i = 0; i < testing::rounds(800); ++i) {
      write_file(path, mutate(good, rng));
      const int ok = succeeds([&] { read_everything(*open_gguf(path)); });
      opened += ok;
      refused += 1 - ok;
      configured += succeeds([&] { gguf_config(Gguf(path)); });
      tokenized += succeeds([&] {
        std::vector<i32> ids;
        open_tokenizer(path)->encode("a ab<e>", ids);
      });
    }
  }
  for (const int count : {opened, refused, configured, tokenized}) EXPECT_GT(count, 100);
}

}  // namespace gguf_fuzz_test
}  // namespace ds
