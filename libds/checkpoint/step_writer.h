// SPDX-License-Identifier: Apache-2.0
#pragma once
// The parts of a save. Every save (by all ranks, by a background thread, or by one process for the ranks of a later
// run) prepares the directory once, writes every rank's file, and commits once.
//
// A crash at any point is harmless: everything is written and synced under a temporary name that readers ignore; one
// rename makes the step exist; one rename makes it the latest; only then are older steps removed.

#include <functional>
#include <span>
#include <string>

#include "base/file.h"
#include "checkpoint/manifest.h"

namespace ds {

// The contents of one rank's file.
struct RankContents {
  std::span<const PieceRange> pieces;
  StateSet states;  // states other than Param exist only for float types and with ParamEntry::may_have()
  // Stored elements [first, first + count) of a state of pieces[piece], counted from the start of the piece; valid
  // until the next call.
  std::function<const void*(State, size_t piece, i64 first, i64 count)> elements;
  std::span<const RankLocal> rank_local = {};
  Tick tick = {};  // called while the file is laid out and read back
};

// DIR/.tmp-step-00000100-<id of the save>: the place of the step until it is committed. The id keeps a rank that
// outlives its run out of the next run's save.
std::string unfinished_step(const std::string& dir, const Manifest& m);
// Removes files that interrupted saves and removals of old steps have left in `dir`. To be called on one rank. Throws
// Errc::Io.
void clear_unfinished(const std::string& dir);
// Makes `dir`, removes leftovers of interrupted saves from it, and makes the unfinished step. Throws Errc::Io.
void prepare_step(const std::string& dir, const Manifest& m);
// Removes unfinished_step(), if it exists.
void abandon_step(const std::string& dir, const Manifest& m) noexcept;

// Writes rank `rank`'s file into the unfinished step: structure by HDF5, bulk past it, synced and read back. m: meta,
// params and id. No two pieces may contain the same element. Throws Errc::Io, Errc::Internal (impossible pieces).
FileRecord write_rank_file(const std::string& dir, const Manifest& m, i64 rank, const RankContents& contents);

// The additional memory of writing a rank file of `bytes` in `datasets` datasets, the largest of so many bytes.
i64 rank_file_memory(i64 bytes, i64 datasets, i64 largest) noexcept;
// The same for commit_step, with so many parameters and datasets of all ranks.
i64 commit_memory(i64 params, i64 datasets) noexcept;

// Requires all rank files, described by m.files. Writes model.h5 and the manifest, reads them back, renames the step
// into place (exchanging it with one of the same number) and moves `latest`. Returns the step directory. The tick is
// called while model.h5 is made.
std::string commit_step(const std::string& dir, Manifest& m, const Tick& tick = {});

}  // namespace ds
