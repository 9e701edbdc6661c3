// SPDX-License-Identifier: Apache-2.0
#pragma once
// Replaces the global operator new by one that counts, for tests of what a step must not do; included by one file of a
// program. Out of line, or GCC sees through one half of a pair and warns.

#include <atomic>
#include <cstdlib>
#include <new>

static std::atomic<long> num_news{0};
[[gnu::noinline]] void* operator new(std::size_t n) {
  ++num_news;
  if (void* p = std::malloc(n)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }
