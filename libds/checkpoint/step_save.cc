// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/step_save.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "base/file.h"
#include "checkpoint/together.h"

namespace ds {

StepSave::StepSave(std::string dir, CheckpointMeta meta, const std::vector<ParamEntry>& params,
                   std::span<const StatePiece> pieces, Communicator& comm, std::vector<RankLocal> rank_local)
    : dir_(std::move(dir)), pieces_(pieces.begin(), pieces.end()), rank_local_(std::move(rank_local)), comm_(comm) {
  manifest_.meta = std::move(meta);
  manifest_.meta.world_size = comm.size();
  manifest_.params = params;
}

StepSave::~StepSave() {
  // The last rank to leave removes everything. But once all have written, the step belongs to rank 0, which may be
  // renaming it.
  if (phase_ == Phase::Write || (phase_ != Phase::Ended && comm_.rank() == 0)) abandon_step(dir_, manifest_);
}

void StepSave::work() noexcept {
  error_ = attempt([&] {
    switch (phase_) {
      case Phase::Prepare: return prepare();
      case Phase::Write: return write();
      case Phase::Commit: return commit();
      case Phase::Ended: return;
    }
  });
}

bool StepSave::meet() {
  error_ = agree_on_outcome(comm_, error_);
  if (error_ && comm_.rank() == 0) abandon_step(dir_, manifest_);
  if (error_ || phase_ == Phase::Commit) {
    phase_ = Phase::Ended;
    return false;
  }
  if (phase_ == Phase::Prepare) {
    comm_.broadcast(manifest_.id.data(), narrow<i64>(manifest_.id.size()), 0, "checkpoint").wait();
    phase_ = Phase::Write;
  } else {
    phase_ = Phase::Commit;  // before we give our record, for then rank 0 may begin
    records_ = gather_text(comm_, format_file_record(mine_));
  }
  return true;
}

void StepSave::prepare() {
  manifest_.id = random_hex64();
  if (comm_.rank() == 0) prepare_step(dir_, manifest_);
}

void StepSave::write() {
  std::vector<PieceRange> ranges;
  RankContents contents;
  for (const StatePiece& p : pieces_) {
    ranges.push_back({p.param, p.begin, p.count, p.slice == nullptr ? model::ParamSlice{} : *p.slice});
    for (State s : kStates) contents.states[s] |= p.has(s);
  }
  contents.pieces = ranges;
  contents.rank_local = rank_local_;
  std::vector<float> decoded;
  std::vector<char> brought;
  // The open part: other states of the same elements are requested next.
  StatePiece here;
  std::tuple<size_t, i64, i64> open;
  contents.elements = [&](State s, size_t piece, i64 first, i64 count) -> const void* {
    DS_CHECK(!cancelled_, Errc::Interrupted, "the save of {} was abandoned", step_name(step()));
    const StatePiece& p = pieces_[piece];
    if (p.open) {
      const i64 width = dtype_bytes(manifest_.stored_dtype(s, p.param));
      brought.resize(static_cast<size_t>(count * width));
      for (i64 at = 0; at < count; at += StatePiece::kMostOpen) {
        const i64 n = std::min(StatePiece::kMostOpen, count - at);
        if (const std::tuple wanted(piece, first + at, n); open != wanted) {
          here = p.open(first + at, n, false);
          open = wanted;
        }
        char* const to = brought.data() + at * width;
        if (is_optimizer_state(s) && here.kept[s].dtype != DType::F32) {
          decode_state(reinterpret_cast<float*>(to), here.state(s), 0, n);
        } else {
          std::memcpy(to, here.data[s], static_cast<size_t>(n * width));
        }
      }
      return brought.data();
    }
    if (is_optimizer_state(s) && p.kept[s].dtype != DType::F32) {
      decoded.resize(count);
      decode_state(decoded.data(), p.state(s), first, count);
      return decoded.data();
    }
    return static_cast<const char*>(p.data[s]) + first * dtype_bytes(manifest_.stored_dtype(s, p.param));
  };
  mine_ = write_rank_file(dir_, manifest_, comm_.rank(), contents);
}

void StepSave::commit() {
  if (comm_.rank() != 0) return;
  for (const std::string& text : records_) manifest_.files.push_back(parse_file_record(text));
  commit_step(dir_, manifest_);
}

}  // namespace ds
