// SPDX-License-Identifier: Apache-2.0
#include "data/token_ids.h"

#include <sys/mman.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <thread>
#include <utility>

#include "base/limits.h"
#include "base/thread.h"

namespace ds {

void TokenIds::FreeHash::operator()(XXH3_state_s* state) const noexcept { XXH3_freeState(state); }

TokenIds::TokenIds(const Tokenizer& tokenizer, int num_threads, std::string name, i64 largest_id, TokenMarks marks)
    : tokenizer_(tokenizer),
      num_threads_(num_threads),
      name_(std::move(name)),
      marks_(marks),
      file_(fmt::format("the tokens of '{}'", name_)),
      token_bytes_(marks == TokenMarks::None && std::max(tokenizer.vocab_size(), largest_id + 1) <= 65536 ? 2 : 4),
      hash_(XXH3_createState()) {
  XXH3_64bits_reset(hash_.get());
}

TokenIds::~TokenIds() {
  if (data_ != nullptr) ::munmap(const_cast<u8*>(data_), static_cast<size_t>(num_tokens_ * token_bytes_));
}

size_t TokenIds::add_stretches(std::string_view text, size_t at) {
  std::vector<std::string_view> stretches;
  while (at < text.size() && std::ssize(stretches) < num_threads_) {
    const size_t end = text.size() - at <= kStretchBytes ? text.size() : tokenizer_.cut_after(text, at + kStretchBytes);
    stretches.push_back(text.substr(at, end - at));
    at = end;
  }
  add_parts(stretches.size(), [&](size_t i, std::vector<i32>& ids) {
    ids.reserve(stretches[i].size() / 3);
    tokenizer_.encode(stretches[i], ids);
  });
  return at;
}

void TokenIds::add_parts(size_t num_parts, const std::function<void(size_t, std::vector<i32>&)>& encode) {
  struct Part {
    std::vector<i32> ids;
    std::exception_ptr error;
  };
  std::vector<Part> parts(num_parts);
  const auto run = [&](size_t i) {
    try {
      encode(i, parts[i].ids);
    } catch (...) {
      parts[i].error = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> threads;
    for (size_t i = 1; i < parts.size(); ++i)
      threads.push_back(start_thread(fmt::format("thread {} of {} to tokenize {}", i + 1, parts.size(), name_),
                                     [&run, i] { run(i); }));
    if (!parts.empty()) run(0);
  }
  for (const Part& part : parts) {
    if (part.error) std::rethrow_exception(part.error);
    write(part.ids);
  }
}

void TokenIds::write(std::span<const i32> ids) {
  std::vector<u16> narrow_ids;
  const void* data = ids.data();
  if (token_bytes_ == 2) {
    narrow_ids.assign(ids.begin(), ids.end());
    data = narrow_ids.data();
  }
  XXH3_64bits_update(hash_.get(), data, ids.size() * static_cast<size_t>(token_bytes_));
  file_.append(data, std::ssize(ids) * token_bytes_);
  num_tokens_ += std::ssize(ids);
}

u64 TokenIds::hash() const noexcept { return XXH3_64bits_digest(hash_.get()); }

void TokenIds::map() {
  if (num_tokens_ == 0) return;
  void* map =
      ::mmap(nullptr, static_cast<size_t>(num_tokens_ * token_bytes_), PROT_READ, MAP_SHARED, file_.descriptor(), 0);
  DS_CHECK(map != MAP_FAILED, Errc::Io, "cannot map the tokens of '{}': {}", name_, system_reason(errno));
  data_ = static_cast<const u8*>(map);
}

}  // namespace ds
