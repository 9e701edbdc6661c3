// SPDX-License-Identifier: Apache-2.0
#pragma once
// Lines of input on their way to lines of output.

#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common/kept_lines.h"
#include "common/lines.h"
#include "common/progress.h"
#include "common/text_lines.h"
#include "common/tool.h"

namespace ds::tools {

struct TextJobOptions {
  std::string input = "-", out;  // out: a file that is appended to; empty: the tool's output
  bool resume = false, unordered = false;

  void add_options(CLI::App& app);
};

// On rank 0; next() and done() are the hooks of TrainingRun::infer().
class TextJob {
 public:
  // identity: see KeptLines. The format outlives it. Throws Errc::Io, Errc::Config, Errc::Mismatch for the files.
  TextJob(const TextJobOptions& options, const LineFormat& format, const std::string& identity, Output& out);

  // A line that cannot be honoured is reported, and has its answer at once.
  std::optional<TextRequest> next(bool waits);
  void done(u64 number, TextResult result);
  bool ended() const noexcept { return queued_.empty() && reader_.at_end(); }
  void finish();  // all lines are written

  i64 errors() const noexcept { return errors_; }  // lines that could not be honoured
  i64 written() const noexcept { return written_; }

 private:
  struct Line {
    std::string text;
    TextLine parsed{};
    std::vector<TextResult> results{};
    size_t left = 0;    // results that are missing
    std::string out{};  // the answer, once it is complete
    bool is_error = false;
  };
  struct Place {
    i64 line;
    size_t index;
  };

  bool read_line(bool waits);
  void complete(i64 number);
  void write(std::map<i64, Line>::iterator at);

  const TextJobOptions& options_;
  const LineFormat& format_;
  Output& out_;
  LineReader reader_;
  std::optional<KeptLines> kept_;
  ProgressLine progress_;
  std::map<i64, Line> under_way_;  // by number
  std::deque<Place> queued_;
  std::map<u64, Place> requested_;  // by number of the request
  u64 requests_ = 0;
  size_t held_ = 0;  // bytes of answers that wait for those before them
  i64 errors_ = 0, written_ = 0, new_tokens_ = 0;
};

}  // namespace ds::tools
