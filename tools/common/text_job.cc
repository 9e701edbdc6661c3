// SPDX-License-Identifier: Apache-2.0
#include "common/text_job.h"

#include <utility>

#include "common/stopping.h"
#include "ds/error.h"

namespace ds::tools {

void TextJobOptions::add_options(CLI::App& app) {
  app.add_option("FILE", input, "JSON Lines; - reads standard input (default)")->type_name("FILE");
  app.add_option("-o,--out", out, "append the result to this file, from which --resume goes on")->type_name("FILE");
  app.add_flag("--resume", resume, "go on with the file of --out where a run was stopped");
  app.add_flag("--unordered", unordered, "write lines as they are complete, not in the order of the input");
}

TextJob::TextJob(const TextJobOptions& options, const LineFormat& format, const std::string& identity, Output& out)
    : options_(options), format_(format), out_(out), reader_(options.input) {
  if (!options.out.empty() && out.to_file())
    throw Error(Errc::Config, fmt::format("--out {} takes the result: leave out {}", options.out, out.option()));
  if (options.resume && options.out.empty()) throw Error(Errc::Config, "--resume needs --out, the file to go on with");
  if (options.out.empty()) return;
  kept_.emplace(options.out, identity + (options.unordered ? "; unordered" : ""), options.resume);
  errors_ = kept_->errors();
  if (kept_->count() > 0) report_note(fmt::format("{} lines of {} are complete", kept_->count(), options.out));
}

// False: there is no line, or none yet.
bool TextJob::read_line(bool waits) {
  // Several ranks hear from rank 0 every second, and signals are obeyed.
  constexpr int kWaitMs = 200, kTries = 5;
  std::optional<std::string> text;
  for (int i = 0; !text && i < (waits ? kTries : 1) && !reader_.at_end() && stop_signal() == 0; ++i)
    text = reader_.next(waits ? kWaitMs : 0);
  if (!text) return false;
  if (text->find_first_not_of(" \t") == std::string::npos) return true;
  const i64 number = reader_.number();
  if (kept_ && kept_->has(number, *text)) return true;
  Line& line = under_way_[number];
  line.text = std::move(*text);
  if (reader_.too_long()) {
    line.parsed.number = number;
    line.parsed.error = fmt::format("is longer than {} bytes", LineReader::kMostBytes);
  } else {
    line.parsed = format_.parse(line.text, number);
  }
  line.left = line.parsed.requests.size();
  line.results.resize(line.left);
  for (size_t i = 0; i < line.left; ++i) queued_.push_back({number, i});
  if (line.parsed.error.empty()) return true;
  ++errors_;
  report_error(fmt::format("{}:{}: {}", reader_.name(), number, line.parsed.error));
  complete(number);
  return true;
}

std::optional<TextRequest> TextJob::next(bool waits) {
  // One slow line may hold up the answers of many.
  constexpr size_t kMostHeld = size_t{64} << 20;
  while (queued_.empty()) {
    if ((!waits && held_ > kMostHeld) || !read_line(waits)) return std::nullopt;
  }
  const Place place = queued_.front();
  queued_.pop_front();
  requested_.emplace(requests_++, place);
  return under_way_.at(place.line).parsed.requests[place.index];
}

void TextJob::done(u64 number, TextResult result) {
  const Place place = requested_.at(number);
  requested_.erase(number);
  Line& line = under_way_.at(place.line);
  new_tokens_ += std::ssize(result.tokens);
  if (line.parsed.error.empty()) line.parsed.error = result.error;
  line.results[place.index] = std::move(result);
  if (--line.left == 0) {
    if (!line.parsed.error.empty()) {
      ++errors_;
      report_error(fmt::format("{}:{}: {}", reader_.name(), place.line, line.parsed.error));
    }
    complete(place.line);
  }
  if (progress_.is_due()) progress_.show(fmt::format("{} lines  {} tokens", written_, new_tokens_));
}

void TextJob::complete(i64 number) {
  const auto found = under_way_.find(number);
  Line& line = found->second;
  line.is_error = !line.parsed.error.empty();
  line.out = out_.line(format_.result(line.parsed, line.results), format_.members(line.parsed, line.text));
  line.parsed = {};
  line.results = {};
  held_ += line.out.size();
  if (options_.unordered) return write(found);
  while (!under_way_.empty() && !under_way_.begin()->second.out.empty()) write(under_way_.begin());
}

void TextJob::write(std::map<i64, Line>::iterator at) {
  const Line& line = at->second;
  if (kept_) {
    kept_->append(at->first, line.text, line.out, line.is_error);
  } else {
    out_.data(line.out);
  }
  held_ -= line.out.size();
  ++written_;
  under_way_.erase(at);
}

void TextJob::finish() {
  if (kept_) kept_->finish();
}

}  // namespace ds::tools
