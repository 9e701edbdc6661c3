// SPDX-License-Identifier: Apache-2.0
#pragma once
// Limits of one rendering: a template is a program from a file, and may ask for
// more than a machine has.

#include <string>
#include <string_view>
#include <utility>

#include "ds/kernels/dtype.h"

namespace ds::jinja {

struct Limits {
  i64 steps = 50'000'000;      // nodes evaluated, elements visited, and 64 bytes of
                               // text each
  i64 bytes = i64{256} << 20;  // of all values that exist at a time, and of the
                               // text that is written
  int depth = 600;             // of evaluations within each other, macro calls included
};

constexpr int kMostNesting = 200;  // of tags, brackets and operators in a
                                   // source, and of lists within lists
constexpr i64 kMostSourceBytes = i64{1} << 20;

class Budget {
 public:
  explicit Budget(const Limits& limits) : steps_(limits.steps), bytes_(limits.bytes) {}
  Budget(const Budget&) = delete;
  Budget& operator=(const Budget&) = delete;

  // Both throw Errc::Unavailable.
  void step(i64 count = 1) {
    if ((steps_ -= count) < 0) [[unlikely]]
      fail_steps();
  }
  void take(i64 bytes) {
    step(bytes / 64);
    if (bytes > bytes_) [[unlikely]]
      fail_bytes();
    bytes_ -= bytes;
  }
  void give(i64 bytes) noexcept { bytes_ += bytes; }

 private:
  [[noreturn]] static void fail_steps();
  [[noreturn]] static void fail_bytes();
  i64 steps_, bytes_;
};

// Text under construction.
class Builder {
 public:
  explicit Builder(Budget& budget) : budget_(budget) {}
  ~Builder() { budget_.give(taken_); }
  Builder(const Builder&) = delete;
  Builder& operator=(const Builder&) = delete;

  void add(std::string_view text) {
    const i64 bytes = static_cast<i64>(text.size());
    budget_.take(bytes);
    taken_ += bytes;
    text_ += text;
  }
  void add(char c) { add(std::string_view(&c, 1)); }
  void repeat(std::string_view text, i64 count) {
    for (i64 i = 0; i < count; ++i, budget_.step()) add(text);
  }
  const std::string& text() const noexcept { return text_; }
  std::string finish() { return std::move(text_); }
  Budget& budget() const noexcept { return budget_; }

 private:
  Budget& budget_;
  i64 taken_ = 0;
  std::string text_;
};

}  // namespace ds::jinja
