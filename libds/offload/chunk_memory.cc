// SPDX-License-Identifier: Apache-2.0
#include "offload/chunk_memory.h"

#include <algorithm>
#include <cstring>

namespace ds::offload {
namespace {

i64 num_windows(const ChunkLayout& layout, const FileChunks::Options& options) noexcept {
  return std::min(options.windows, std::ssize(layout.chunks()) - options.resident);
}

}  // namespace

HostChunks::HostChunks(const ChunkLayout& layout, i64 on_device, Device& device, const HostPlace& host,
                       MemoryLedger& ledger, Tag tag, bool undoes)
    : layout_(layout),
      on_device_(on_device),
      device_(device),
      host_(host.device()),
      first_(device_buffer(device, ledger, Tag::Optimizer, layout.begin_of(on_device))),
      memory_(host.take(ledger, tag, layout.bytes() - layout.begin_of(on_device))) {
  if (!undoes) return;
  kept_first_ = device_buffer(device, ledger, Tag::Optimizer, first_.bytes());
  kept_memory_ = host.take(ledger, tag, memory_.bytes());
}

void HostChunks::keep() {
  device_.copy(kept_first_.data(), first_.data(), first_.bytes());
  host_.copy(kept_memory_.data(), memory_.data(), memory_.bytes());
}

void HostChunks::undo() {
  device_.copy(first_.data(), kept_first_.data(), first_.bytes());
  host_.copy(memory_.data(), kept_memory_.data(), memory_.bytes());
}

i64 FileChunks::resident_bytes(const ChunkLayout& layout, const Options& options) noexcept {
  return layout.begin_of(options.resident);
}

i64 FileChunks::window_bytes(const ChunkLayout& layout, const Options& options) noexcept {
  const i64 windows = num_windows(layout, options);
  return windows == 0 ? 0 : layout.largest_bytes() * windows + ChunkLayout::kPage;
}

FileChunks::FileChunks(const ChunkLayout& layout, const HostPlace& host, MemoryLedger& ledger, const Options& options)
    : layout_(layout),
      options_(options),
      resident_bytes_(resident_bytes(layout, options)),
      resident_(host.take(ledger, options.tag == Tag::Offload ? Tag::Optimizer : options.tag, resident_bytes_)),
      memory_(host.take(ledger, options.tag, window_bytes(layout, options))),
      windows_(static_cast<size_t>(num_windows(layout, options))),
      written_(layout.chunks().size(), false),
      checksums_(options.checksums && !options.dir.empty() ? layout.chunks().size() : 0) {
  DS_ASSERT(options.windows > 0 && options.resident <= std::ssize(layout.chunks()));
  base_ = reinterpret_cast<char*>(align_up(reinterpret_cast<i64>(memory_.data()), ChunkLayout::kPage));
  const i64 bytes = file_bytes(layout, options);
  if (options.dir.empty()) {
    file_ = std::make_unique<BlockFile>();
  } else if (bytes > 0) {
    const std::span windows(base_, static_cast<size_t>(layout.largest_bytes() * std::ssize(windows_)));
    file_ = options.file == nullptr ? std::make_unique<BlockFile>(options.dir, bytes, windows, options.io)
                                    : std::make_unique<BlockFile>(BlockFile::Named{*options.file, options.file_is_new},
                                                                  options.file_bytes, windows, options.io);
  }
}

FileChunks::~FileChunks() = default;

char* FileChunks::memory(const Window& w) const noexcept {
  return base_ + (&w - windows_.data()) * layout_.largest_bytes();
}

FileChunks::Window* FileChunks::holding(i64 chunk) noexcept {
  const auto it = std::ranges::find(windows_, chunk, &Window::chunk);
  return it == windows_.end() ? nullptr : &*it;
}

void FileChunks::settle(Window& w) {
  if (!w.under_way) return;
  const BlockFile::Ticket ticket = *std::exchange(w.under_way, std::nullopt);
  const bool came = std::exchange(w.coming, false);
  file_->wait(ticket);
  if (!came) {
    if (options_.places != nullptr) options_.places->written(w.chunk);
    return;
  }
  const i64 chunk = w.chunk, bytes = layout_.chunks()[chunk].bytes;
  if (options_.places != nullptr) {
    w.chunk = -1;  // of a damaged one, nothing is here
    if (options_.places->has_checksums()) options_.places->check(chunk, memory(w), bytes, *options_.file);
    w.chunk = chunk;
    return;
  }
  if (checksums_.empty() || checksum(memory(w), bytes) == checksums_[chunk]) return;
  file_->fail(std::make_exception_ptr(
      Error(Errc::Corrupt, fmt::format("{}: offloaded states were not read back as they were written", options_.dir))));
  file_->throw_if_failed();
}

// The window that was used longest ago, of those that are at rest; else of those whose chunks go.
FileChunks::Window* FileChunks::room(bool wait) {
  Window* best = nullptr;
  for (Window& w : windows_) {
    if (w.taken || w.coming || w.changed) continue;
    if (w.under_way && file_->done(*w.under_way)) settle(w);
    if (w.under_way && !wait) continue;
    const auto rank = [](const Window& x) { return std::pair(x.under_way.has_value(), x.used); };
    if (best == nullptr || rank(w) < rank(*best)) best = &w;
  }
  if (best == nullptr && wait) {  // all others are being read ahead for other users
    for (Window& w : windows_) {
      if (!w.taken && !w.changed && (best == nullptr || w.used < best->used)) best = &w;
    }
  }
  if (best != nullptr) settle(*best);
  return best;
}

void FileChunks::bring(Window& w, i64 chunk) {
  w.chunk = chunk;
  w.used = ++uses_;
  const Chunk& c = layout_.chunks()[chunk];
  if (!is_written(chunk)) {
    if (file_->is_there()) std::memset(memory(w), 0, static_cast<size_t>(c.bytes));
    return;
  }
  w.under_way = file_->read(memory(w), place(chunk), c.bytes);
  w.coming = true;
}

void FileChunks::write_changed(i64 but) {
  for (Window& w : windows_) {
    if (!w.changed || w.taken || w.chunk == but) continue;
    const Chunk& c = layout_.chunks()[w.chunk];
    if (!checksums_.empty()) checksums_[w.chunk] = checksum(memory(w), c.bytes);
    const i64 at = options_.places != nullptr ? options_.places->next_place(w.chunk) : place(w.chunk);
    if (options_.places != nullptr && options_.places->has_checksums())
      options_.places->set_next_checksum(w.chunk, checksum(memory(w), c.bytes));
    w.under_way = file_->write(memory(w), at, c.bytes);
    w.changed = false;
    written_[w.chunk] = true;
    if (!options_.write_behind) settle(w);
  }
}

char* FileChunks::take(i64 chunk, bool) {
  if (layout_.chunks()[chunk].bytes == 0) return nullptr;
  if (chunk < options_.resident) return resident_.as<char>().data() + layout_.chunks()[chunk].at;
  file_->throw_if_failed();
  write_changed(chunk);
  Window* w = holding(chunk);
  if (w == nullptr) {
    w = room(true);
    DS_ASSERT(w != nullptr);
    bring(*w, chunk);
  }
  DS_ASSERT(!w->taken);
  settle(*w);
  w->taken = true;
  w->used = ++uses_;
  return memory(*w);
}

void FileChunks::give_back(i64 chunk, bool changed) {
  if (chunk < options_.resident || layout_.chunks()[chunk].bytes == 0) return;
  Window* const w = holding(chunk);
  DS_ASSERT(w != nullptr && w->taken);
  w->taken = false;
  w->changed |= changed;
}

void FileChunks::flush() {
  file_->throw_if_failed();
  write_changed(-1);
  for (Window& w : windows_) settle(w);
}

void FileChunks::expect(i64 chunk) {
  if (!options_.read_ahead || chunk < options_.resident || layout_.chunks()[chunk].bytes == 0) return;
  file_->throw_if_failed();
  write_changed(chunk);
  if (Window* const there = holding(chunk)) {
    there->used = ++uses_;  // not to make room for others
    return;
  }
  if (Window* const w = room(false)) bring(*w, chunk);
}

}  // namespace ds::offload
