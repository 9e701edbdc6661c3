// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "base/check.h"
#include "data/token_file.h"

namespace ds {
namespace {

constexpr i64 kLlmcHeaderBytes = 256 * 4;
constexpr u32 kExamplesMagic = 20240522;  // of a file of questions with their answers

struct LlmcKind {
  u32 magic, version;
  DType type;
};
constexpr std::array kLlmcKinds = {LlmcKind{20240520, 1, DType::U16}, LlmcKind{20240801, 7, DType::U32}};

const LlmcKind* llmc_kind_of(const MappedFile& file) {
  if (file.bytes() < 4) return nullptr;
  for (const LlmcKind& kind : kLlmcKinds)
    if (file.at<u32>(0) == kind.magic) return &kind;
  return nullptr;
}

}  // namespace

bool is_llmc_file(const std::string& path) {
  const MappedFile file(path);
  return llmc_kind_of(file) != nullptr || (file.bytes() >= 4 && file.at<u32>(0) == kExamplesMagic);
}

std::unique_ptr<TokenFile> open_llmc_file(const std::string& path) {
  auto file = std::make_unique<TokenFile>();
  file->name = path;
  file->reading = "llm.c";
  const MappedFile& bin = file->map(path);
  const LlmcKind* kind = llmc_kind_of(bin);
  DS_CHECK(bin.bytes() < 4 || bin.at<u32>(0) != kExamplesMagic, Errc::Unavailable,
           "data file '{}' has examples of llm.c's evaluation, which are no stream of tokens", path);
  DS_CHECK(kind != nullptr, Errc::Corrupt,
           "data file '{}' does not begin with llm.c's magic number, {} for uint16 or {} for uint32", path,
           kLlmcKinds[0].magic, kLlmcKinds[1].magic);
  const auto check = [&]<class... Args>(bool good, fmt::format_string<Args...> what, Args&&... args) {
    if (!good) [[unlikely]]
      throw Error(Errc::Corrupt, fmt::format("data file '{}' begins with llm.c's magic number {}, but {} "
                                             "(data.format \"bin\" reads it as uint16 without a header)",
                                             path, kind->magic, fmt::format(what, std::forward<Args>(args)...)));
  };
  check(bin.bytes() >= kLlmcHeaderBytes, "has {} bytes, and its header alone has {}", bin.bytes(), kLlmcHeaderBytes);
  check(bin.at<u32>(4) == kind->version, "its version is {}, where it is {} in files of this kind", bin.at<u32>(4),
        kind->version);
  const i64 count = bin.at<u32>(8), bytes = kLlmcHeaderBytes + count * dtype_bytes(kind->type);
  check(bin.bytes() == bytes, "the {} tokens of its header make {} bytes, and it has {}", count, bytes, bin.bytes());
  DS_CHECK(count > 0, Errc::Config, "data file '{}' has no tokens", path);
  file->view = {bin.data() + kLlmcHeaderBytes, kind->type, count};
  return file;
}

}  // namespace ds
