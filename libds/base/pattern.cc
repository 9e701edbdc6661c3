// SPDX-License-Identifier: Apache-2.0
#include "base/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include <new>
#include <string>

#include "base/check.h"

namespace ds {
namespace {

std::string reason(int code) {
  PCRE2_UCHAR message[256] = {};
  pcre2_get_error_message(code, message, sizeof message);
  return reinterpret_cast<const char*>(message);
}

PCRE2_SPTR units(std::string_view text) { return reinterpret_cast<PCRE2_SPTR>(text.data()); }

pcre2_jit_stack* stack_of_thread() {
  thread_local const std::unique_ptr<pcre2_jit_stack, decltype(&pcre2_jit_stack_free)> stack(
      pcre2_jit_stack_create(32 * 1024, 64 << 20, nullptr), &pcre2_jit_stack_free);
  return stack.get();
}

template <class T>
T* made(T* made) {
  if (made == nullptr) throw std::bad_alloc();
  return made;
}

}  // namespace

struct Pattern::Code {
  struct Free {
    void operator()(pcre2_code* p) const noexcept { pcre2_code_free(p); }
    void operator()(pcre2_compile_context* p) const noexcept { pcre2_compile_context_free(p); }
    void operator()(pcre2_match_context* p) const noexcept { pcre2_match_context_free(p); }
    void operator()(pcre2_match_data* p) const noexcept { pcre2_match_data_free(p); }
  };
  std::unique_ptr<pcre2_code, Free> code;
  std::unique_ptr<pcre2_match_context, Free> context;
};

Pattern::Pattern(std::string_view text, Kind kind) : code_(std::make_unique<Code>()) {
  const bool is_text = kind == Kind::Text;
  const std::unique_ptr<pcre2_compile_context, Code::Free> options(made(pcre2_compile_context_create(nullptr)));
  pcre2_set_newline(options.get(), PCRE2_NEWLINE_LF);
  pcre2_set_max_pattern_length(options.get(), is_text ? 4'000'000 : 20'000);
  const uint32_t flags = PCRE2_UTF | PCRE2_NEVER_BACKSLASH_C | (is_text ? PCRE2_UCP : PCRE2_CASELESS);
  int error = 0;
  size_t offset = 0;
  code_->code.reset(pcre2_compile(units(text), text.size(), flags, &error, &offset, options.get()));
  if (!code_->code) {
    if (error == PCRE2_ERROR_HEAP_FAILED) throw std::bad_alloc();
    throw Error(error == PCRE2_ERROR_UNKNOWN_UNICODE_PROPERTY ? Errc::Unavailable : Errc::Config, reason(error));
  }
  code_->context.reset(made(pcre2_match_context_create(nullptr)));
  // Steps of one match; real expressions take one or two per character.
  pcre2_set_match_limit(code_->context.get(), is_text ? 20'000'000 : 1'000'000);
  pcre2_set_heap_limit(code_->context.get(), 256 * 1024);  // KiB
  if (!is_text) return;
  // If this fails (no executable memory, for example), the interpreter finds the same matches, more slowly.
  pcre2_jit_compile(code_->code.get(), PCRE2_JIT_COMPLETE);
  pcre2_jit_stack_assign(
      code_->context.get(), [](void*) { return stack_of_thread(); }, nullptr);
}

Pattern::~Pattern() = default;
Pattern::Pattern(Pattern&&) noexcept = default;
Pattern& Pattern::operator=(Pattern&&) noexcept = default;

std::optional<std::pair<size_t, size_t>> Pattern::find(std::string_view text, size_t at) const {
  thread_local const std::unique_ptr<pcre2_match_data, Code::Free> match(made(pcre2_match_data_create(1, nullptr)));
  const int rc = pcre2_match(code_->code.get(), units(text), text.size(), at, PCRE2_NO_UTF_CHECK, match.get(),
                             code_->context.get());
  if (rc == PCRE2_ERROR_NOMATCH) return std::nullopt;
  if (rc == PCRE2_ERROR_NOMEMORY) throw std::bad_alloc();
  if (rc < 0) throw Error(Errc::Unavailable, reason(rc));
  const size_t* const found = pcre2_get_ovector_pointer(match.get());
  return std::pair{found[0], found[1]};
}

}  // namespace ds
