// SPDX-License-Identifier: Apache-2.0
// The index of Megatron-LM: 9 bytes of magic, version (u64), code of the type of tokens (u8), number of sequences n and
// of entries of the document index d (u64), then n lengths in tokens (i32), n places in the .bin in bytes (i64), and d
// numbers of sequences (i64): 0, and where each document ends. Nothing in it is aligned.

#include <array>
#include <cstring>

#include "base/check.h"
#include "config/data_format.h"
#include "data/token_file.h"

namespace ds {
namespace {

class MegatronIndex {
 public:
  MegatronIndex(const MappedFile& idx, const MappedFile& bin) : idx_(idx), bin_(bin) {}

  // The tokens of the .bin, once the index and its size agree in everything.
  TokenView view() const {
    read_magic();
    check(idx_.bytes() >= kHeaderBytes, "has {} bytes, and its header alone has {}", idx_.bytes(), kHeaderBytes);
    check(idx_.at<u64>(9) == 1, "its version is {}; 1 is read", idx_.at<u64>(9));
    const DType type = read_type();
    const u64 sequences = idx_.at<u64>(18), documents = idx_.at<u64>(26);
    i64 left = idx_.bytes() - kHeaderBytes;
    check(sequences <= static_cast<u64>(left / kSequenceBytes), "{} sequences do not fit into its {} bytes", sequences,
          idx_.bytes());
    const i64 n = static_cast<i64>(sequences);
    left -= n * kSequenceBytes;
    check(documents <= static_cast<u64>(left / kDocumentBytes),
          "{} sequences and {} ends of documents do not fit into "
          "its {} bytes",
          sequences, documents, idx_.bytes());
    left -= static_cast<i64>(documents) * kDocumentBytes;
    DS_CHECK(left == 0 || left != n, Errc::Unavailable,
             "index '{}' says for each sequence which of several kinds it is, as for images beside text; tokens of one "
             "kind are read",
             idx_.path());
    check(left == 0, "{} bytes are left behind its {} sequences and {} ends of documents", left, sequences, documents);
    check_sequences(n, dtype_bytes(type));
    check_documents(n, static_cast<i64>(documents));
    return {bin_.data(), type, bin_.bytes() / dtype_bytes(type)};
  }

  // The documents of the index that view() has checked.
  Borders borders(i64 token_bytes) const {
    Borders borders;
    const i64 n = static_cast<i64>(idx_.at<u64>(18)), documents = static_cast<i64>(idx_.at<u64>(26));
    const i64 places = kHeaderBytes + 4 * n, ends = kHeaderBytes + kSequenceBytes * n;
    for (i64 i = 0; i < documents; ++i) {
      const i64 sequence = idx_.at<i64>(ends + 8 * i);
      if (sequence < n) borders.add(idx_.at<i64>(places + 8 * sequence) / token_bytes, bin_.path());
    }
    borders.finish(bin_.bytes() / token_bytes, bin_.path());
    return borders;
  }

 private:
  struct TypeRow {
    u8 code;
    DType type;
  };
  static constexpr std::array kTypes = {TypeRow{1, DType::U8},  TypeRow{2, DType::I8},  TypeRow{3, DType::I16},
                                        TypeRow{4, DType::I32}, TypeRow{5, DType::I64}, TypeRow{6, DType::F64},
                                        TypeRow{7, DType::F32}, TypeRow{8, DType::U16}};
  static constexpr std::string_view kMagic{"MMIDIDX\0\0", 9}, kOlderMagic{"TNTIDX\0\0", 8};
  static constexpr i64 kHeaderBytes = 34, kSequenceBytes = 4 + 8, kDocumentBytes = 8;

  template <class... Args>
  void check(bool good, fmt::format_string<Args...> what, Args&&... args) const {
    if (!good) [[unlikely]]
      throw Error(Errc::Corrupt,
                  fmt::format("index '{}': {}", idx_.path(), fmt::format(what, std::forward<Args>(args)...)));
  }

  void read_magic() const {
    DS_CHECK(!idx_.text().starts_with(kOlderMagic), Errc::Unavailable,
             "index '{}' is of Megatron-LM's older kind (\"cached\" or \"lazy\"); that of \"mmap\" is read",
             idx_.path());
    check(idx_.text().starts_with(kMagic),
          "does not begin as an index of Megatron-LM does; without it, data.format "
          "\"bin\" reads '{}' as uint16",
          bin_.path());
  }

  DType read_type() const {
    const u8 code = idx_.at<u8>(17);
    for (const TypeRow& row : kTypes) {
      if (row.code != code) continue;
      DS_CHECK(!is_float(row.type), Errc::Unavailable, "index '{}': the numbers of '{}' are {}; tokens are integers",
               idx_.path(), bin_.path(), dtype_name(row.type));
      return row.type;
    }
    check(false, "no type of tokens has the code {}", code);
    return {};
  }

  // Each sequence begins where the one before ends, and the last ends with the .bin.
  void check_sequences(i64 n, i64 token_bytes) const {
    const i64 lengths = kHeaderBytes, places = lengths + 4 * n;
    i64 end = 0;
    for (i64 i = 0; i < n; ++i) {
      const i64 length = idx_.at<i32>(lengths + 4 * i), place = idx_.at<i64>(places + 8 * i);
      check(length >= 0, "sequence {} has {} tokens", i, length);
      check(place == end, "sequence {} begins at byte {} of the .bin, and the one before ends at {}", i, place, end);
      end += length * token_bytes;  // no overflow: below the size of a file, by the check below, and 2^34
      check(end <= bin_.bytes(), "sequence {} ends at byte {} of the .bin, which has {}", i, end, bin_.bytes());
    }
    check(end == bin_.bytes(), "its sequences are {} bytes, and '{}' has {}", end, bin_.path(), bin_.bytes());
  }

  void check_documents(i64 n, i64 documents) const {
    const i64 ends = kHeaderBytes + kSequenceBytes * n;
    i64 end = 0;
    for (i64 i = 0; i < documents; ++i) {
      const i64 next = idx_.at<i64>(ends + 8 * i);
      check(next >= end && next <= n && (i > 0 || next == 0),
            "entry {} of the document index is {}, behind {} of {} "
            "sequences",
            i, next, end, n);
      end = next;
    }
    check(documents > 0 && end == n, "its documents end with sequence {} of {}", end, n);
  }

  const MappedFile &idx_, &bin_;
};

}  // namespace

std::unique_ptr<TokenFile> open_megatron_file(const std::string& name, bool finds_borders) {
  const MegatronNames names = megatron_names(name);
  auto file = std::make_unique<TokenFile>();
  file->name = names.bin;
  const MappedFile &bin = file->map(names.bin), &idx = file->map(names.idx);
  const MegatronIndex index(idx, bin);
  file->view = index.view();
  if (finds_borders) file->borders = index.borders(dtype_bytes(file->view.type));
  file->borders_of = "its index";
  file->knows_borders = true;
  return file;
}

}  // namespace ds
