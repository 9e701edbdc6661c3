// SPDX-License-Identifier: Apache-2.0
// How fast texts become tokens: reading_bench [THREADS] TOKENIZER TEXT RECORDS. TEXT is a plain text and RECORDS a
// JSONL (or Parquet) file of the same texts, by tests/bench/make_records.py. Each is opened in turn, three times or for
// two minutes, in a process of its own: MB of text a second, the best one, and the most memory that was not the mapped
// files'. The text's rate is
// the tokenizer's own.

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "data/data.h"

namespace {

struct Reading {
  double seconds = 0;
  double anonymous_mb = 0;
  long long tokens = 0;
};

double anonymous_mb() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("RssAnon:")) return 1024e-6 * std::atof(line.c_str() + 8);
  return 0;
}

// In a child, whose memory is not that of the reading before.
Reading read_apart(const std::string& file, const std::string& tokenizer, int threads) {
  int ends[2];
  if (pipe(ends) != 0) std::exit(1);
  const pid_t child = fork();
  if (child == 0) {
    Reading r;
    std::atomic<bool> done = false;
    std::thread watch([&] {
      for (; !done; std::this_thread::sleep_for(std::chrono::milliseconds(5)))
        r.anonymous_mb = std::max(r.anonymous_mb, anonymous_mb());
    });
    const auto start = std::chrono::steady_clock::now();
    const ds::TokenStream stream(std::vector<std::string>{file}, {.tokenizer = tokenizer, .num_threads = threads});
    r.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    r.tokens = stream.num_tokens();
    done = true;
    watch.join();
    _exit(write(ends[1], &r, sizeof r) == sizeof r ? 0 : 1);
  }
  close(ends[1]);
  Reading r;
  const bool whole = read(ends[0], &r, sizeof r) == sizeof r;
  close(ends[0]);
  int status = 0;
  if (waitpid(child, &status, 0) != child || status != 0 || !whole) std::exit(1);
  return r;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4 && argc != 5) {
    std::fputs("usage: reading_bench [THREADS] TOKENIZER TEXT RECORDS\n", stderr);
    return 2;
  }
  const int threads = argc == 5 ? std::atoi(argv[1]) : 1;
  char** const names = argv + argc - 3;
  const double mb = 1e-6 * static_cast<double>(std::filesystem::file_size(names[1]));
  Reading best[2];
  double spent = 0;
  for (int turn = 0; turn < 3 && spent < 120; ++turn) {
    for (int i = 0; i < 2; ++i) {
      const Reading r = read_apart(names[i + 1], names[0], threads);
      spent += r.seconds;
      if (turn == 0 || r.seconds < best[i].seconds) best[i] = r;
    }
  }
  for (int i = 0; i < 2; ++i)
    std::printf("%-8s %8.1f MB/s  %8.1f MB  %12lld tokens\n", i == 0 ? "text" : "records", mb / best[i].seconds,
                best[i].anonymous_mb, best[i].tokens);
  std::printf("records read at %.2f of the tokenizer's rate, %d threads, %.0f MB of text\n",
              best[0].seconds / best[1].seconds, threads, mb);
}
