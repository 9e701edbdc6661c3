// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/reader.h"

#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <tuple>

#include "ds/limits.h"

namespace ds {
namespace {

constexpr i64 kMaxManifest = i64{1} << 30;
constexpr size_t kMaxBlocks = 64;  // of which a reader keeps a part

// XXH3-64 of a file's bytes, fed range by range.
class RangeHash {
 public:
  explicit RangeHash(const File& file) : file_(file), state_(XXH3_createState(), XXH3_freeState) {
    DS_CHECK(state_ != nullptr, Errc::OutOfMemory, "no memory for a checksum: {}", system_reason(ENOMEM));
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
      const auto& d = p.states[s];
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

std::string dataset_name(const Manifest& m, State s, const PieceRange& p) {
  return fmt::format("{}/{}@{}", state_name(s), m.params[p.param].name, first_element(m, p));
}

namespace {

// One block of a dataset, checked.
void read_block(const File& file, const Manifest& m, const PieceRecord& p, State s, i64 block, char* out,
                PageBuffer& pages) {
  const DatasetRecord& d = *p.states[s];
  const i64 at = d.offset + block * kChecksumBlock;
  const i64 bytes = block_bytes(p.count * dtype_bytes(m.stored_dtype(s, p.param)), block);
  read_bulk(file, at, out, bytes, pages);
  DS_CHECK(checksum(out, bytes) == d.checksums[block], Errc::Corrupt,
           "{}: checksum mismatch in /{} (bytes {} to {} of the file are damaged)", file.path(), dataset_name(m, s, p),
           at, at + bytes);
}

void check_structure_of(const File& file, const Manifest& m, const FileRecord& record) {
  DS_CHECK(structure_checksum(file, m, record.pieces) == record.structure, Errc::Corrupt,
           "{}: damaged, or a shard of another rank or save (its structure differs from the manifest's)", file.path());
}

}  // namespace

void verify_file(const File& file, const Manifest& m, const FileRecord& record, const Tick& tick) {
  check_structure_of(file, m, record);
  static_assert(kChecksumBlock <= PageBuffer::kBytes);
  PageBuffer block, pages;
  for (const PieceRecord& p : record.pieces) {
    for (State s : kStates) {
      const auto& d = p.states[s];
      if (!d) continue;
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
  DS_CHECK(unknown || type == std::filesystem::file_type::regular, Errc::Corrupt, "{}: is missing, or not a file",
           path);
  return parse_manifest(read_text_file(path, kMaxManifest), path);
}

}  // namespace

CheckpointReader::CheckpointReader(std::string step_dir) : CheckpointReader(step_dir, read_manifest(step_dir)) {}

CheckpointReader::CheckpointReader(std::string step_dir, Manifest manifest)
    : dir_(std::move(step_dir)), manifest_(std::move(manifest)) {
  for (State s : kStates) has_[s] = manifest_.has(s);
  files_.resize(manifest_.files.size());
  slices_.resize(manifest_.params.size());
  std::vector<StoredPiece> pieces;
  for (i64 r = 0; r < narrow<i64>(files_.size()); ++r) {
    const FileRecord& f = manifest_.files[r];
    std::error_code error;
    const auto bytes = std::filesystem::file_size(file_path(r), error);
    if (error == std::errc::no_such_file_or_directory) check_is_there();
    DS_CHECK(error != std::errc::no_such_file_or_directory, Errc::Corrupt, "{}: shard of rank {} is missing",
             file_path(r), r);
    DS_CHECK(!error, Errc::Io, "cannot read {}: {}", file_path(r), error.message());
    DS_CHECK(std::cmp_equal(bytes, f.bytes), Errc::Corrupt, "{}: {} bytes, the manifest says {}", file_path(r), bytes,
             f.bytes);
    for (const PieceRecord& p : f.pieces) {
      pieces.push_back({p.begin, p.begin + p.count, r, &p});
    }
  }
  const auto key = [](const StoredPiece& p) { return std::tie(p.record->param, p.record->slice, p.begin); };
  std::sort(pieces.begin(), pieces.end(), [&](const StoredPiece& a, const StoredPiece& b) { return key(a) < key(b); });
  for (const StoredPiece& p : pieces) {
    const auto param = static_cast<size_t>(p.record->param);
    std::vector<Slice>& slices = slices_[param];
    if (slices.empty() || *slices.back().slice != p.record->slice)
      slices.push_back({&p.record->slice, {p.record->slice, manifest_.params[param].shape}, {}});
    slices.back().pieces.push_back(p);
  }
}

// A run that saves beside us may remove the step at any time.
void CheckpointReader::check_is_there() const {
  DS_CHECK(std::filesystem::exists(fmt::format("{}/{}", dir_, kManifestName)), Errc::Io,
           "{}: has been removed while it was read", dir_);
}

const File& CheckpointReader::open(i64 rank) {
  auto& slot = files_[rank];
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

void CheckpointReader::check_structure(i64 rank) { check_structure_of(open(rank), manifest_, manifest_.files[rank]); }

bool CheckpointReader::has_rank_local(i64 rank, std::string_view name, i64 count) const noexcept {
  return std::ranges::any_of(manifest_.files[rank].rank_local,
                             [&](const RankLocalRecord& r) { return r.name == name && r.count == count; });
}

void CheckpointReader::read_rank_local(i64 rank, std::string_view name, std::span<float> out) {
  DS_ASSERT(has_rank_local(rank, name, std::ssize(out)));
  const RankLocalRecord& record = *std::ranges::find(manifest_.files[rank].rank_local, name, &RankLocalRecord::name);
  open(rank).read_at(record.offset, out.data(), record.count * 4);
}

CheckpointReader::Block& CheckpointReader::cached_block(const StoredPiece& p, State s, i64 block) {
  const auto is_it = [&](const Block& b) { return b.piece == p.record && b.state == s && b.block == block; };
  auto it = std::ranges::find_if(blocks_, is_it);
  if (it == blocks_.end()) {
    it = std::ranges::min_element(blocks_, {}, &Block::last_use);
    if (it == blocks_.end() || (it->last_use != 0 && blocks_.size() < max_blocks_))
      it = blocks_.insert(blocks_.end(), Block{});
    it->piece = nullptr;
    it->data.resize(kChecksumBlock);
    read_block(open(p.file), manifest_, *p.record, s, block, it->data.data(), pages_);
    it->piece = p.record, it->state = s, it->block = block;
  }
  it->last_use = ++num_uses_;
  return *it;
}

// Reads the wanted ones of elements [begin, end), which are in this block.
void CheckpointReader::read_block_part(const StoredPiece& p, const model::SliceMap& stored, State s, i64 block,
                                       i64 begin, i64 end, const Wanted& wanted) {
  const i64 size = dtype_bytes(manifest_.stored_dtype(s, p.record->param)), elems = kChecksumBlock / size;
  const i64 block_begin = p.begin + block * elems, block_end = std::min(block_begin + elems, p.end);
  const i64 n = block_end - block_begin;
  if (begin == block_begin && end == block_end) {
    const i64 global = stored.global_of(begin);
    const auto [first, count] = wanted.map.local_range(global, n);
    if (count == n && stored.global_of(end - 1) == global + n - 1) {  // all of it, in one run: straight to `out`
      read_block(open(p.file), manifest_, *p.record, s, block, wanted.out + (first - wanted.first) * size, pages_);
      return;
    }
  }
  Block* cached = nullptr;
  stored.for_each_run(begin, end - begin, [&](i64 local, i64 global, i64 length) {
    const auto [first, count] = wanted.map.local_range(global, length);
    wanted.map.for_each_run(first, count, [&](i64 to, i64 from, i64 run) {
      if (cached == nullptr) cached = &cached_block(p, s, block);
      std::memcpy(wanted.out + (to - wanted.first) * size,
                  cached->data.data() + (local - block_begin + from - global) * size, static_cast<size_t>(run * size));
    });
  });
  if (cached != nullptr && end == block_end) cached->last_use = 0;
}

void CheckpointReader::read_pieces(std::span<const StoredPiece> pieces, const model::SliceMap& stored, State s,
                                   const Wanted& wanted) {
  const i64 from = wanted.map.global_of(wanted.first), to = wanted.map.global_of(wanted.first + wanted.count - 1) + 1;
  const auto [first, count] = stored.local_range(from, to - from);
  auto p = std::ranges::upper_bound(pieces, first, {}, &StoredPiece::end);
  for (; p != pieces.end() && p->begin < first + count; ++p) {
    const i64 elems = kChecksumBlock / dtype_bytes(manifest_.stored_dtype(s, p->record->param));
    const i64 last = std::min(p->end, first + count);
    for (i64 at = std::max(p->begin, first); at < last;) {
      const i64 block = (at - p->begin) / elems, end = std::min(p->begin + (block + 1) * elems, last);
      read_block_part(*p, stored, s, block, at, end, wanted);
      at = end;
    }
  }
}

void CheckpointReader::read_stored(State state, i64 param, i64 first, i64 count, char* out) {
  read_stored_slice(state, param, {}, first, count, out);
}

void CheckpointReader::read_stored_slice(State state, i64 param, const model::ParamSlice& slice, i64 first, i64 count,
                                         char* out) {
  if (count == 0) return;
  const std::vector<Slice>& slices = slices_[param];
  max_blocks_ = std::clamp<size_t>(slices.size(), 1, kMaxBlocks);
  const auto same = std::ranges::find_if(slices, [&](const Slice& s) { return *s.slice == slice; });
  if (same != slices.end()) {  // as it stands: the slice alone is all there is
    const model::SliceMap map({}, std::array{same->map.numel()});
    return read_pieces(same->pieces, map, state, {map, first, count, out});
  }
  const model::SliceMap map(slice, manifest_.params[param].shape);
  for (const Slice& s : slices) read_pieces(s.pieces, s.map, state, {map, first, count, out});
}

void CheckpointReader::check() {
  for (i64 r = 0; r < narrow<i64>(files_.size()); ++r) check_structure(r);
}

std::vector<std::string> CheckpointReader::verify(const Tick& tick) {
  std::vector<std::string> bad;
  for (i64 r = 0; r < narrow<i64>(files_.size()); ++r) {
    note_damage(bad, [&] { verify_file(open(r), manifest_, manifest_.files[r], tick); });
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
