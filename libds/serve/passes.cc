// SPDX-License-Identifier: Apache-2.0
#include "serve/passes.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>

namespace ds::serve {

using offload::ServedPart;
using offload::ServedPiece;
using offload::ServedRun;
using offload::ServedSet;

Passes::Passes(Generation& generation, const std::vector<RankLayout>& ranks, Device& device)
    : generation_(generation), device_(device), tiles_(ranks.size()) {
  for (const RankLayout& r : ranks) {
    r.check();
    std::vector<Set>& sets = sets_.emplace_back();
    for (const ServedSet& cut : r.sets) {
      Set& set = sets.emplace_back();
      set.cut = &cut;
      set.window = offload::Segment::open(cut.window, cut.window_bytes);
      if (!cut.gradients.empty()) set.gradients = offload::Segment::open(cut.gradients, cut.gradient_bytes);
      for (size_t i = 0; i < cut.parts.size(); ++i) set.first_part.try_emplace(cut.parts[i].param, i);
    }
  }
}

Passes::Set& Passes::set_of(i64 rank, i64 set) {
  std::vector<Set>& sets = sets_.at(static_cast<size_t>(rank));
  DS_CHECK(set >= 0 && set < std::ssize(sets), Errc::Corrupt, "a rank asks for its set {} of {}", set, sets.size());
  return sets[static_cast<size_t>(set)];
}

const Passes::Tile& Passes::tile_of(i64 rank, i64 tile) const {
  const std::vector<Tile>& tiles = tiles_.at(static_cast<size_t>(rank));
  DS_CHECK(tile >= 0 && tile < std::ssize(tiles), Errc::Corrupt, "a rank asks for its tile {} of {}", tile,
           tiles.size());
  return tiles[static_cast<size_t>(tile)];
}

template <class Visit>
void Passes::for_each_part(const Set& set, i64 param, i64 begin, i64 count, Visit&& visit) const {
  const auto first = set.first_part.find(param);
  i64 covered = 0;
  for (size_t i = first == set.first_part.end() ? set.cut->parts.size() : first->second;
       i < set.cut->parts.size() && set.cut->parts[i].param == param; ++i) {
    const ServedPart& p = set.cut->parts[i];
    const i64 from = std::max(begin, p.begin), to = std::min(begin + count, p.begin + p.count);
    if (from >= to) continue;
    covered += to - from;
    visit(static_cast<i64>(i), from, to - from);
  }
  DS_CHECK(covered == count, Errc::Corrupt, "a rank asks for elements of parameter {} that it does not own", param);
}

i64 Passes::define_tile(i64 rank, i64 set, std::vector<ServedPiece> pieces) {
  const Set& s = set_of(rank, set);
  std::vector<Tile>& tiles = tiles_.at(static_cast<size_t>(rank));
  Tile tile{set, std::move(pieces), {}};
  for (size_t i = 0; i < tile.pieces.size(); ++i) {
    const ServedPiece& p = tile.pieces[i];
    for_each_part(s, p.param, p.begin, p.count, [&](i64 part, i64 begin, i64 count) {
      DS_CHECK(s.cut->parts[static_cast<size_t>(part)].is_trained(), Errc::Corrupt,
               "a pass over parameter {}, which is not trained", p.param);
      tile.items.push_back({part, static_cast<i64>(i), begin, count});
    });
  }
  std::ranges::stable_sort(tile.items, {}, [&](const Item& i) { return s.cut->parts[i.part].chunk; });
  tiles.push_back(std::move(tile));
  return std::ssize(tiles) - 1;
}

void Passes::run_items(const Set& set, const Tile& tile, std::span<const Item> items, const ServedRun& run, char* chunk,
                       Params params) {
  const i64 width = dtype_bytes(set.cut->work);
  scratch_.clear();
  for (const Item& item : items) {
    const ServedPiece& p = tile.pieces[item.piece];
    DS_CHECK(run.factors.empty() || (p.index >= 0 && p.index < std::ssize(run.factors)), Errc::Corrupt,
             "a pass without a factor for a parameter");
    scratch_.push_back({.piece = {.param = p.param, .begin = item.begin, .count = item.count},
                        .index = p.index,
                        .weight_decay = p.weight_decay,
                        .site = p.site});
  }
  const UpdateSpec spec{
      .params = run.params, .factors = run.factors.empty() ? nullptr : run.factors.data(), .decay = run.decay != 0};
  size_t next = 0;
  zero::run_pass(
      device_.ops(), device_.stream(), scratch_, spec, &run.verdict,
      [&](const zero::Piece& piece) {
        const ServedPart& p = set.cut->parts[items[next++].part];
        const i64 at = piece.begin - p.begin, n = piece.count;
        UpdateTensor t{};
        if (params == Params::Write)
          t.param = TensorView::of(set.window.data() + p.work + at * width, set.cut->work, {n});
        t.master = TensorView::of(chunk + p.offsets[State::Master] + at * 4, DType::F32, {n});
        size_t i = 0;
        for (const State s : kOptimizerStates) {
          if (p.dtypes[s] < 0) continue;
          const DType dtype = static_cast<DType>(p.dtypes[s]);
          TensorView v = TensorView::of(chunk + p.offsets[s] + at * dtype_bytes(dtype), dtype, {n});
          if (is_coded(dtype)) v.scale = reinterpret_cast<float*>(chunk + p.scales[s]) + at / kStateBlock;
          t.states[i++] = v;
        }
        t.grad = TensorView::of(set.gradient(p, at), DType::F32, {n});
        return t;
      },
      tensors_);
}

void Passes::execute(std::span<const Run> runs, Params params, std::optional<u32> skip) {
  struct Visit {
    i64 chunk;  // of all
    const Run* run;
    const Tile* tile;
    std::span<const Item> items;
  };
  std::vector<Visit> visits;
  for (const Run& r : runs) {
    const Tile& tile = tile_of(r.rank, r.run.tile);
    const Set& set = set_of(r.rank, tile.set);
    const auto chunk_of = [&](const Item& i) { return set.cut->parts[i.part].chunk; };
    for (size_t b = 0, e = 0; b < tile.items.size(); b = e) {
      while (e < tile.items.size() && chunk_of(tile.items[e]) == chunk_of(tile.items[b])) ++e;
      visits.push_back({generation_.chunk(r.rank, tile.set, chunk_of(tile.items[b])), &r, &tile,
                        std::span(tile.items).subspan(b, e - b)});
    }
  }
  // The next step begins with the chunks that this one ends with.
  std::ranges::stable_sort(
      visits, [&](const Visit& a, const Visit& b) { return backward_ ? a.chunk > b.chunk : a.chunk < b.chunk; });
  backward_ = !backward_;
  offload::ChunkMemory& memory = generation_.memory();
  for (size_t b = 0, e = 0; b < visits.size(); b = e) {
    const i64 chunk = visits[b].chunk;
    while (e < visits.size() && visits[e].chunk == chunk) ++e;
    if (skip && generation_.slots().version(chunk) == *skip) continue;
    char* const bytes = memory.take(chunk, true);
    i64 last = chunk, ahead = 0;
    for (size_t n = e; n < visits.size() && ahead < memory.most_expected(); ++n) {
      if (visits[n].chunk == last) continue;
      last = visits[n].chunk;
      memory.expect(last);
      ++ahead;
    }
    for (size_t i = b; i < e; ++i) {
      const Visit& v = visits[i];
      run_items(set_of(v.run->rank, v.tile->set), *v.tile, v.items, v.run->run, bytes, params);
    }
    memory.give_back(chunk, true);
  }
}

void Passes::move(i64 rank, const Range& range, Way way) {
  const Set& set = set_of(rank, range.set);
  DS_CHECK(range.count >= 0 && range.count <= set.cut->elems, Errc::Corrupt, "a rank asks for {} elements of {}",
           range.count, set.cut->elems);
  offload::ChunkMemory& memory = generation_.memory();
  for_each_part(set, range.param, range.begin, range.count, [&](i64 part, i64 begin, i64 count) {
    const ServedPart& p = set.cut->parts[part];
    const i64 chunk = generation_.chunk(rank, range.set, p.chunk), from = begin - p.begin, to = begin - range.begin;
    char* const bytes = memory.take(chunk, way == Way::ToChunks);
    const auto copy = [&](char* in_chunk, char* in_window, i64 n) {
      const bool out = way == Way::ToWindow;
      std::memcpy(out ? in_window : in_chunk, out ? in_chunk : in_window, static_cast<size_t>(n));
    };
    for (const State s : kStates) {
      if (!range.states[s] || p.dtypes[s] < 0) continue;
      const DType dtype = static_cast<DType>(p.dtypes[s]);
      const i64 width = dtype_bytes(dtype);
      char* const place = set.window.data() + set.cut->places[s];
      copy(bytes + p.offsets[s] + from * width, place + to * width, count * width);
      if (is_coded(dtype))
        copy(bytes + p.scales[s] + from / kStateBlock * 4, place + set.cut->elems * 4 + to / kStateBlock * 4,
             state_blocks(count) * 4);
    }
    memory.give_back(chunk, way == Way::ToChunks);
  });
}

void Passes::read(i64 rank, const Range& range) { move(rank, range, Way::ToWindow); }
void Passes::write(i64 rank, const Range& range) { move(rank, range, Way::ToChunks); }

namespace {

enum class Pending : u8 { Runs, Flips };

}  // namespace

std::string Passes::pending_text(const offload::ServedRecord& record, std::span<const Run> runs) const {
  offload::Packer out;
  const bool two = generation_.header().two_versions != 0;
  out.put(two ? Pending::Flips : Pending::Runs);
  out.put(record);
  if (two) {
    std::vector<i64> flips;
    for (const auto& [chunk, slot] : generation_.slots().ahead()) flips.insert(flips.end(), {chunk, slot});
    out.put(flips);
    return out.text();
  }
  for (const std::vector<Set>& sets : sets_) {
    for (const Set& set : sets) {
      out.put(set.window.path());
      out.put(set.gradients.path());
    }
  }
  out.put(std::ssize(runs));
  for (const Run& r : runs) {
    const Tile& tile = tile_of(r.rank, r.run.tile);
    out.put(r.rank);
    out.put(r.run);
    out.put(tile.set);
    out.put(tile.pieces);
  }
  return out.text();
}

namespace {

// Checks that chunks and slots exist, that none is named twice, and that no slot belongs to another chunk.
Slots::Flips checked_flips(const std::vector<i64>& flips, Generation& generation) {
  Slots::Flips all;
  std::set<i64> chunks, slots;
  bool good = flips.size() % 2 == 0;
  for (size_t i = 0; good && i < flips.size(); i += 2) {
    good = flips[i] >= 0 && flips[i] < generation.header().chunks && flips[i + 1] >= 0 &&
           flips[i + 1] < generation.header().slots && chunks.insert(flips[i]).second &&
           slots.insert(flips[i + 1]).second;
    all.emplace_back(flips[i], flips[i + 1]);
  }
  for (i64 c = 0; good && c < generation.header().chunks; ++c) {
    const i64 slot = generation.slots().slot(c);
    good = !slots.contains(slot) || std::ranges::find(all, std::pair(c, slot)) != all.end();
  }
  DS_CHECK(good, Errc::Corrupt, "names impossible chunks or slots");
  return all;
}

}  // namespace

void recover(Generation& generation, Device& device) {
  const std::string path = generation.file("pending");
  if (!std::filesystem::exists(path)) return;
  offload::ServedRecord record;
  parse_file(path, [&](offload::Unpacker& in) {
    const Pending kind = in.get<Pending>();
    in.get(record);
    generation.slots().begin_version(static_cast<u32>(record.step), true);
    if (kind == Pending::Flips) {
      std::vector<i64> flips;
      in.get(flips);
      return generation.slots().keep(checked_flips(flips, generation));
    }
    std::vector<RankLayout> ranks = generation.ranks();
    for (RankLayout& r : ranks) {
      for (ServedSet& set : r.sets) {
        in.get(set.window);
        in.get(set.gradients);
      }
    }
    Passes passes(generation, ranks, device);
    std::vector<Passes::Run> runs;
    const i64 n = in.get<i64>();
    for (i64 i = 0; i < n; ++i) {
      Passes::Run& run = runs.emplace_back();
      in.get(run.rank);
      in.get(run.run);
      DS_CHECK(run.rank >= 0 && run.rank < std::ssize(ranks), Errc::Corrupt, "rank {}", run.rank);
      const i64 set = in.get<i64>();
      std::vector<ServedPiece> pieces;
      in.get(pieces);
      run.run.tile = passes.define_tile(run.rank, set, std::move(pieces));
    }
    // No run reads parameters now: a run that attaches makes its own from the masters.
    passes.execute(runs, Passes::Params::LeaveOut, static_cast<u32>(record.step));
    generation.flush();
  });
  generation.header().record = record;
  std::filesystem::remove(path);
}

}  // namespace ds::serve
