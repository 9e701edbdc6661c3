// SPDX-License-Identifier: Apache-2.0
#include "comm/shared_record.h"

#include <unistd.h>

#include <boost/interprocess/file_mapping.hpp>
#include <cerrno>

#include "base/check.h"
#include "base/limits.h"

namespace ds {
namespace bip = boost::interprocess;

SharedRecord::SharedRecord(const std::string& name, const void* content, i64 bytes) : file_(SharedFile::create()) {
  // Written, not mapped: a lack of memory is an error here and not a SIGBUS later.
  for (i64 done = 0; done < bytes;) {
    const char* rest = static_cast<const char*>(content) + done;
    const ssize_t n = pwrite(file_.descriptor(), rest, static_cast<size_t>(bytes - done), done);
    if (n < 0 && errno == EINTR) continue;
    DS_CHECK(n > 0, Errc::Io, "{} cannot be written: {}", shared_path(name), system_reason(n < 0 ? errno : ENOSPC));
    done += n;
  }
  map(true, bytes);
  DS_CHECK(file_.link(name), Errc::Io, "{} exists already", shared_path(name));
}

std::optional<SharedRecord> SharedRecord::open(const std::string& name, i64 bytes) {
  std::optional<SharedFile> file = SharedFile::open(name, false);
  if (!file) return std::nullopt;
  DS_CHECK(file->size() == bytes, Errc::Mismatch, "{} has {} bytes, not {}: it comes from another version of libds",
           shared_path(name), file->size(), bytes);
  SharedRecord record(std::move(*file));
  record.map(false, bytes);
  return record;
}

void SharedRecord::map(bool writable, i64 bytes) try {
  const bip::mode_t mode = writable ? bip::read_write : bip::read_only;
  region_ = bip::mapped_region(bip::file_mapping(file_.opened_as().c_str(), mode), mode, 0, static_cast<size_t>(bytes));
} catch (const bip::interprocess_exception& e) {
  throw Error(Errc::Io, fmt::format("a file of /dev/shm cannot be mapped: {}", e.what()));
}

std::string read_shared(const std::string& name, i64 bytes) try {
  const std::optional<SharedFile> file = SharedFile::open(name, false);
  if (!file) return {};
  std::string content(static_cast<size_t>(bytes), '\0');
  const ssize_t n = pread(file->descriptor(), content.data(), content.size(), 0);
  content.resize(n > 0 ? static_cast<size_t>(n) : 0);
  return content;
} catch (const Error&) {
  return {};
}

}  // namespace ds
