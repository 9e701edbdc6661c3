// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/reader.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

namespace ds {
namespace {

constexpr i64 kMaxManifest = i64{1} << 30;

// XXH3-64 of a file's bytes, fed range by range.
class RangeHash {
 public:
  explicit RangeHash(const File& file) : file_(file), state_(XXH3_createState(), XXH3_freeState) {
    DS_CHECK(state_ != nullptr, Errc::OutOfMemory, "no memory for a checksum");
    XXH3_64bits_reset(state_.get());
  }
  void add(i64 begin, i64 end) {
    while (begin < end) {
      const i64 n = std::min<i64>(end - begin, narrow<i64>(buffer_.size()));
      file_.read_at(begin, buffer_.data(), n);
      XXH3_64bits_update(state_.get(), buffer_.data(), static_cast<size_t>(n));
      begin += n;
    }
  }
  u64 digest() const noexcept { return XXH3_64bits_digest(state_.get()); }

 private:
  const File& file_;
  std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state_;
  std::vector<char> buffer_ = std::vector<char>(1 << 16);
};

}  // namespace

u64 checksum(const void* data, i64 bytes) noexcept { return XXH3_64bits(data, static_cast<size_t>(bytes)); }

u64 file_checksum(const File& file) {
  RangeHash hash(file);
  hash.add(0, file.size());
  return hash.digest();
}

u64 structure_checksum(const File& file, const Manifest& m, std::span<const PieceRecord> pieces) {
  std::vector<std::pair<i64, i64>> data;
  for (const PieceRecord& p : pieces) {
    for (State s : kStates) {
      const auto& d = p.states[static_cast<size_t>(s)];
      if (d) data.emplace_back(d->offset, d->offset + p.count * dtype_bytes(m.stored_dtype(s, p.param)));
    }
  }
  std::sort(data.begin(), data.end());
  RangeHash hash(file);
  i64 at = 0;
  for (const auto& [begin, end] : data) {
    hash.add(at, begin);
    at = std::max(at, end);
  }
  hash.add(at, file.size());
  return hash.digest();
}

std::string dataset_name(const Manifest& m, State s, i64 param, i64 begin) {
  return fmt::format("{}/{}@{}", kStateNames[static_cast<size_t>(s)], m.params[static_cast<size_t>(param)].name, begin);
}

namespace {

// One block of a dataset, checked.
void read_block(const File& file, const Manifest& m, const PieceRecord& p, State s, i64 block, char* out,
                PageBuffer& pages) {
  const DatasetRecord& d = *p.states[static_cast<size_t>(s)];
  const i64 at = d.offset + block * kChecksumBlock;
  const i64 bytes = block_bytes(p.count * dtype_bytes(m.stored_dtype(s, p.param)), block);
  read_bulk(file, at, out, bytes, pages);
  DS_CHECK(checksum(out, bytes) == d.checksums[static_cast<size_t>(block)], Errc::Corrupt,
           "{}: checksum mismatch in /{} (bytes {} to {} of the file are damaged)", file.path(),
           dataset_name(m, s, p.param, p.begin), at, at + bytes);
}

void check_structure_of(const File& file, const Manifest& m, const FileRecord& record) {
  DS_CHECK(structure_checksum(file, m, record.pieces) == record.structure, Errc::Corrupt,
           "{}: damaged, or a shard of another rank or save (its structure differs from the manifest's)", file.path());
}

}  // namespace

void verify_file(const File& file, const Manifest& m, const FileRecord& record, const Tick& tick) {
  check_structure_of(file, m, record);
  std::vector<char> block;
  PageBuffer pages;
  for (const PieceRecord& p : record.pieces) {
    for (State s : kStates) {
      const auto& d = p.states[static_cast<size_t>(s)];
      if (!d) continue;
      block.resize(static_cast<size_t>(std::min(p.count * dtype_bytes(m.stored_dtype(s, p.param)), kChecksumBlock)));
      for (i64 b = 0; b < narrow<i64>(d->checksums.size()); ++b) {
        if (tick) tick();
        read_block(file, m, p, s, b, block.data(), pages);
      }
    }
  }
}

namespace {

Manifest read_manifest(const std::string& step_dir) {
  const std::string path = fmt::format("{}/{}", step_dir, kManifestName);
  std::error_code ignored;
  const auto type = std::filesystem::status(path, ignored).type();
  const bool unknown = type == std::filesystem::file_type::none;  // the system will say why
  DS_CHECK(unknown || type == std::filesystem::file_type::regular, Errc::Corrupt, "{}: is missing, or no file", path);
  return parse_manifest(read_text_file(path, kMaxManifest), path);
}

}  // namespace

CheckpointReader::CheckpointReader(std::string step_dir) : CheckpointReader(step_dir, read_manifest(step_dir)) {}

CheckpointReader::CheckpointReader(std::string step_dir, Manifest manifest)
    : dir_(std::move(step_dir)), manifest_(std::move(manifest)) {
  for (State s : kStates) has_[static_cast<size_t>(s)] = manifest_.has(s);
  files_.resize(manifest_.files.size());
  pieces_.resize(manifest_.params.size());
  for (i64 r = 0; r < narrow<i64>(files_.size()); ++r) {
    const FileRecord& f = manifest_.files[static_cast<size_t>(r)];
    std::error_code error;
    const auto bytes = std::filesystem::file_size(file_path(r), error);
    if (error == std::errc::no_such_file_or_directory) check_is_there();
    DS_CHECK(error != std::errc::no_such_file_or_directory, Errc::Corrupt, "{}: shard of rank {} is missing",
             file_path(r), r);
    DS_CHECK(!error, Errc::Io, "cannot read {}: {}", file_path(r), error.message());
    DS_CHECK(std::cmp_equal(bytes, f.bytes), Errc::Corrupt, "{}: {} bytes, the manifest says {}", file_path(r), bytes,
             f.bytes);
    for (const PieceRecord& p : f.pieces) {
      pieces_[static_cast<size_t>(p.param)].push_back({p.begin, p.begin + p.count, r, &p});
    }
  }
  for (auto& list : pieces_) {
    std::sort(list.begin(), list.end(), [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
  }
}

// A run that saves beside us may remove the step at any time.
void CheckpointReader::check_is_there() const {
  DS_CHECK(std::filesystem::exists(fmt::format("{}/{}", dir_, kManifestName)), Errc::Io,
           "{}: has been removed while it was read", dir_);
}

const File& CheckpointReader::open(i64 rank) {
  auto& slot = files_[static_cast<size_t>(rank)];
  if (!slot) {
    if (num_open_ == max_open_) {
      for (auto& f : files_) f.reset();
      num_open_ = 0;
    }
    slot = std::make_unique<File>(File::open_read(file_path(rank)));
    ++num_open_;
  }
  return *slot;
}

void CheckpointReader::check_structure(i64 rank) {
  check_structure_of(open(rank), manifest_, manifest_.files[static_cast<size_t>(rank)]);
}

// Bytes [begin, end) of the dataset; whole blocks go straight to `out`.
void CheckpointReader::read_dataset(const Piece& p, State s, i64 begin, i64 end, char* out) {
  const File& file = open(p.file);
  const i64 dataset_bytes = (p.end - p.begin) * dtype_bytes(manifest_.stored_dtype(s, p.record->param));
  for (i64 block = begin / kChecksumBlock; block * kChecksumBlock < end; ++block) {
    const i64 from = block * kChecksumBlock, to = from + block_bytes(dataset_bytes, block);
    if (begin <= from && to <= end) {
      read_block(file, manifest_, *p.record, s, block, out + (from - begin), pages_);
      continue;
    }
    // Ranges that follow each other meet in one block: it is read once for both.
    const BlockKey key{p.record, s, block};
    if (!(key == block_key_)) {
      block_key_ = {};
      block_.resize(static_cast<size_t>(kChecksumBlock));
      read_block(file, manifest_, *p.record, s, block, block_.data(), pages_);
      block_key_ = key;
    }
    const i64 lo = std::max(begin, from), hi = std::min(end, to);
    std::memcpy(out + (lo - begin), block_.data() + (lo - from), static_cast<size_t>(hi - lo));
  }
}

void CheckpointReader::read_stored(State state, i64 param, i64 first, i64 count, char* out) {
  const i64 size = dtype_bytes(manifest_.stored_dtype(state, param));
  const auto& list = pieces_[static_cast<size_t>(param)];
  auto p = std::upper_bound(list.begin(), list.end(), first, [](i64 x, const Piece& piece) { return x < piece.end; });
  for (const i64 last = first + count; first < last; ++p) {
    DS_ASSERT(p != list.end() && p->begin <= first);
    const i64 end = std::min(last, p->end);
    read_dataset(*p, state, (first - p->begin) * size, (end - p->begin) * size, out);
    out += (end - first) * size;
    first = end;
  }
}

void CheckpointReader::check() {
  for (i64 r = 0; r < narrow<i64>(files_.size()); ++r) check_structure(r);
}

std::vector<std::string> CheckpointReader::verify(const Tick& tick) {
  std::vector<std::string> bad;
  for (i64 r = 0; r < narrow<i64>(files_.size()); ++r) {
    note_damage(bad, [&] { verify_file(open(r), manifest_, manifest_.files[static_cast<size_t>(r)], tick); });
  }
  note_damage(bad, [&] {
    const std::string path = fmt::format("{}/{}", dir_, kViewName);
    std::error_code ignored;
    DS_CHECK(std::filesystem::status(path, ignored).type() != std::filesystem::file_type::not_found, Errc::Corrupt,
             "{}: is missing", path);
    const File view = File::open_read(path);
    DS_CHECK(view.size() == manifest_.view_bytes && file_checksum(view) == manifest_.view_checksum, Errc::Corrupt,
             "{}: damaged (the view of all shards; the shards themselves are checked apart)", view.path());
  });
  return bad;
}

}  // namespace ds
