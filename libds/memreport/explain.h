// SPDX-License-Identifier: Apache-2.0
#pragma once
// The formulas of the field with somebody's numbers in them: text for people, one block for each source, which says
// whose accounting it is. What libds itself would use is another question (plan/run_plan).

#include <string>

#include "memreport/formulas.h"

namespace ds::memreport {

// The subject of an explanation. A field that is 0 is not known (if its default is not 1), and lines that need it say
// so.
struct Subject {
  double params = 0;      // Ψ; 0: counted from the model's shape
  ModelShape model{};     // hidden, layers, heads or vocab 0: not known
  i64 seq = 0;            // tokens of a sequence
  i64 micro_batch = 1;    // sequences
  i64 micro_batches = 0;  // of a step of one rank
  i64 dp = 1, tp = 1, pp = 1, chunks = 1;
  double experts = 0;  // parameters of experts, which are divided over `ep` ranks
  i64 ep = 1, sparse_layers = 0, experts_per_token = 0;
  i64 v_passes = 0;                // PipelineShape::v_passes
  bool sequence_parallel = false;  // Megatron's, of the rows between the matrices
  int stage = 0;                   // of ZeRO
  EngineBytes bytes{};             // of a parameter
  CheckpointGranularity recompute = CheckpointGranularity::None;
  i64 layers_per_checkpoint = 1;

  // A rank's part of so many parameters.
  RankParams of_rank(double whole) const {
    const double parts = static_cast<double>(tp * pp);
    return {whole / parts, experts / parts, ep};
  }
  LayerShape layer() const noexcept { return {seq, micro_batch, model.hidden, model.heads}; }
  bool has_shape() const noexcept { return model.hidden > 0 && model.layers > 0 && model.heads > 0 && model.vocab > 0; }
  bool has_tokens() const noexcept { return has_shape() && seq > 0; }
};

// All blocks, with a blank line between them; lines of at most 100 columns. A line that begins with ">" is the
// subject's own case. Throws Errc::Config if there are neither parameters nor a shape to count them from.
std::string explain(const Subject& subject);

// The blocks. `params`: of the whole model.
std::string explain_zero(const Subject& subject, double params);
std::string explain_activations(const Subject& subject);
std::string explain_megatron(const Subject& subject, double params);
std::string explain_offloading(const Subject& subject, double params);
std::string explain_rules(const Subject& subject);

// A number of GB (10^9 bytes) in the digits of table 1 of the ZeRO paper, which cuts off what is behind the point of
// numbers from 100 on, and rounds others half up to three digits (two below 1): 4187.5 is "4187", 41.25 is "41.3".
std::string zero_paper_gb(double bytes);

}  // namespace ds::memreport
