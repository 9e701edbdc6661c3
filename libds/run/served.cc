// SPDX-License-Identifier: Apache-2.0
#include "run/served.h"

#include "checkpoint/manifest.h"

namespace ds::run {

void publish_states(engine::Engine& engine, const offload::ServedRecord& record, const CheckpointMeta& meta,
                    const std::vector<ParamEntry>& params) {
  FileRecord mine;
  for (const zero::Piece& piece : engine.saved_pieces())
    mine.pieces.push_back({{piece.param, piece.begin, piece.count, engine.row_of(piece.param).slice}, {}});
  engine.server()->publish(record, format_file_record(mine), format_meta(meta), format_params(params));
}

}  // namespace ds::run
