// SPDX-License-Identifier: Apache-2.0
#pragma once
// The parts of a save: whoever saves (all ranks together, a thread in the background, one process for ranks that are
// yet to come) prepares the directory once, writes every rank's file, and commits once.
//
// Why a crash at any point is harmless: everything is written and synced under a temporary name that no reader looks
// at; one rename makes the step exist; one rename makes it the latest; only then older steps go.

#include <functional>
#include <span>
#include <string>

#include "base/file.h"
#include "checkpoint/manifest.h"

namespace ds {

// What goes into one rank's file.
struct RankContents {
  std::span<const PieceRange> pieces;
  StateSet states;  // those other than Param exist for float types alone, and where ParamEntry::may_have them
  // Stored elements [first, first + count) of a state of pieces[piece], counted from the piece's begin; they stay until
  // the next call.
  std::function<const void*(State, size_t piece, i64 first, i64 count)> elements;
  std::span<const RankLocal> rank_local = {};
  Tick tick = {};  // while the file is laid out and read back
};

// DIR/.tmp-step-00000100-<id of the save>: where the step is written until it is committed. A rank that outlives its
// run has no place in the next run's save.
std::string unfinished_step(const std::string& dir, const Manifest& m);
// Removes what interrupted saves, and removals of old steps, left in `dir`. One rank's work. Throws Errc::Io.
void clear_unfinished(const std::string& dir);
// Makes `dir`, clears from it what interrupted saves left, and makes the unfinished step. Throws Errc::Io.
void prepare_step(const std::string& dir, const Manifest& m);
// Removes what stands at unfinished_step(), if anything does.
void abandon_step(const std::string& dir, const Manifest& m) noexcept;

// Writes rank `rank`'s file into the unfinished step: structure by HDF5, bulk past it, synced and read back.
// m: meta, params and id. No two pieces have the same element. Throws Errc::Io, Errc::Internal (pieces that cannot be).
FileRecord write_rank_file(const std::string& dir, const Manifest& m, i64 rank, const RankContents& contents);

// What that takes beside the rank's state for its time: of `bytes` in `datasets` datasets, the largest of so many
// bytes.
i64 rank_file_memory(i64 bytes, i64 datasets, i64 largest) noexcept;
// The same of commit_step: of a model of so many parameters, in so many datasets of all ranks.
i64 commit_memory(i64 params, i64 datasets) noexcept;

// All rank files are there and m.files describes them: writes model.h5 and the manifest, reads back, renames the step
// into place (one of the same number changes places with it) and moves `latest`. Returns the step directory. The tick
// comes while model.h5 is made.
std::string commit_step(const std::string& dir, Manifest& m, const Tick& tick = {});

}  // namespace ds
