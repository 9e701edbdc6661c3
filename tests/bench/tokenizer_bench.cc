// SPDX-License-Identifier: Apache-2.0
// MB/s of tokenizers on one thread: tokenizer_bench TEXT TOKENIZER... Each encodes the whole text in one call, in CPU
// time, best of five; the cache of words is warm from the second on, as in a long text. tokenizer_peer.py prints the
// same for Hugging Face's tokenizers.

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <iterator>

#include "data/tokenizer.h"

int main(int argc, char** argv) {
  using namespace ds;
  if (argc < 3) {
    std::fputs("usage: tokenizer_bench TEXT TOKENIZER...\n", stderr);
    return 2;
  }
  std::ifstream file(argv[1], std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto seconds = [] {
    timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  };
  for (int i = 2; i < argc; ++i) {
    const auto tokenizer = open_tokenizer(argv[i]);
    double first = 0, best = 1e30;
    size_t tokens = 0;
    for (int turn = 0; turn < 5; ++turn) {
      std::vector<i32> ids;
      const double start = seconds();
      tokenizer->encode(text, ids);
      const double s = seconds() - start;
      if (turn == 0) first = s;
      best = std::min(best, s);
      tokens = ids.size();
    }
    const double mb = 1e-6 * static_cast<double>(text.size());
    std::printf("%8.1f MB/s, the first time %6.1f  %9zu tokens  %s\n", mb / best, mb / first, tokens,
                tokenizer->identity().c_str());
  }
}
