// SPDX-License-Identifier: Apache-2.0
#include "formats/compressed.h"

#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "base/check.h"

namespace ds {
namespace {

constexpr size_t kPieceBytes = size_t{1} << 20;
constexpr std::string_view kCutOff = "ends inside a compressed stream";

bool is_gzip(std::string_view bytes) noexcept { return bytes.starts_with("\x1f\x8b\x08"); }

bool is_zstd(std::string_view bytes) noexcept {
  if (bytes.size() < 4) return false;
  u32 magic = 0;
  std::memcpy(&magic, bytes.data(), sizeof magic);
  return magic == ZSTD_MAGICNUMBER || (magic & ZSTD_MAGIC_SKIPPABLE_MASK) == ZSTD_MAGIC_SKIPPABLE_START;
}

bool is_padding(std::string_view bytes) noexcept {
  return std::ranges::all_of(bytes, [](char c) { return c == '\0'; });
}

[[noreturn]] void refuse_rest() {
  throw Error(Errc::Corrupt, "is damaged: other bytes follow its last compressed stream");
}

class Inflater {
 public:
  Inflater() {
    constexpr int kGzipAlone = 16 + MAX_WBITS;
    DS_CHECK(inflateInit2(&stream_, kGzipAlone) == Z_OK, Errc::OutOfMemory,
             "cannot be decompressed: zlib has no memory");
  }
  ~Inflater() { inflateEnd(&stream_); }
  Inflater(const Inflater&) = delete;
  Inflater& operator=(const Inflater&) = delete;

  void run(std::string_view in, const std::function<void(std::string_view)>& write) {
    std::vector<char> piece(kPieceBytes);
    for (;;) {
      const size_t given = std::min(in.size(), size_t{1} << 30);  // zlib counts it in 32 bits
      stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(in.data()));
      stream_.avail_in = static_cast<uInt>(given);
      stream_.next_out = reinterpret_cast<Bytef*>(piece.data());
      stream_.avail_out = static_cast<uInt>(piece.size());
      const int status = inflate(&stream_, Z_NO_FLUSH);
      DS_CHECK(status == Z_OK || status == Z_STREAM_END || status == Z_BUF_ERROR, Errc::Corrupt, "is damaged: {}",
               stream_.msg != nullptr ? stream_.msg : zError(status));
      const size_t taken = given - stream_.avail_in, made = piece.size() - stream_.avail_out;
      if (made > 0) write({piece.data(), made});
      in.remove_prefix(taken);
      if (status == Z_STREAM_END) {
        if (is_padding(in)) return;
        if (!is_gzip(in)) refuse_rest();
        inflateReset(&stream_);
      } else {
        DS_CHECK(taken + made > 0, Errc::Corrupt, "{}", kCutOff);
      }
    }
  }

 private:
  z_stream stream_{};
};

void run_zstd(std::string_view in, const std::function<void(std::string_view)>& write) {
  struct Free {
    void operator()(ZSTD_DStream* s) const noexcept { ZSTD_freeDStream(s); }
  };
  const std::unique_ptr<ZSTD_DStream, Free> stream(ZSTD_createDStream());
  DS_CHECK(stream != nullptr, Errc::OutOfMemory, "cannot be decompressed: zstd has no memory");
  constexpr int kLongestWindowLog = 31;
  ZSTD_DCtx_setParameter(stream.get(), ZSTD_d_windowLogMax, kLongestWindowLog);
  std::vector<char> piece(kPieceBytes);
  ZSTD_inBuffer input{in.data(), in.size(), 0};
  for (;;) {
    ZSTD_outBuffer output{piece.data(), piece.size(), 0};
    const size_t before = input.pos;
    const size_t left = ZSTD_decompressStream(stream.get(), &output, &input);
    DS_CHECK(!ZSTD_isError(left), Errc::Corrupt, "is damaged: {}", ZSTD_getErrorName(left));
    if (output.pos > 0) write({piece.data(), output.pos});
    if (left == 0) {
      const std::string_view rest = in.substr(input.pos);
      if (is_padding(rest)) return;
      if (!is_zstd(rest)) refuse_rest();
    } else {
      DS_CHECK(output.pos > 0 || input.pos > before, Errc::Corrupt, "{}", kCutOff);
    }
  }
}

}  // namespace

std::string_view compression_name(Compression compression) {
  switch (compression) {
    case Compression::None: return "none";
    case Compression::Gzip: return "gzip";
    case Compression::Zstd: return "zstd";
  }
  return "?";
}

Compression compression_of(std::string_view first_bytes) noexcept {
  if (is_gzip(first_bytes)) return Compression::Gzip;
  return is_zstd(first_bytes) ? Compression::Zstd : Compression::None;
}

void decompress(Compression compression, std::string_view compressed,
                const std::function<void(std::string_view)>& write) {
  DS_ASSERT(compression != Compression::None);
  if (compression == Compression::Gzip)
    Inflater().run(compressed, write);
  else
    run_zstd(compressed, write);
}

}  // namespace ds
