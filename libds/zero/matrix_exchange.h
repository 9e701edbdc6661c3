// SPDX-License-Identifier: Apache-2.0
#pragma once
// Whole matrices of which ranks have pieces: each is brought together on one rank of dp, its owner (over tp: on the
// ranks of tp that stand at the owner's place, from their slices), changed there, and its pieces go back to where they
// were. Owners take turns by descending size, as many matrices at a time as there are ranks, so that all work at once
// and one matrix's memory is enough. Where every rank of dp has all (ZeRO 0) nothing travels over it, and each does it
// for itself. Which ranks there are changes no bit: the same op sees the same whole matrix.

#include <span>
#include <vector>

#include "comm/communicator.h"
#include "model/slice.h"
#include "zero/layout.h"

namespace ds::zero {

struct MatrixPlace {
  i64 param = 0;
  i64 rows = 0, cols = 0;  // of the whole
  i64 slice_elems = 0;     // of a rank of tp
  int owner = -1;          // in dp; -1: every rank has all
  struct Part {
    int rank;
    i64 begin, count;  // elements of the flattened slice
  };
  std::vector<Part> parts = {};
};

// The matrices of `params` that the ranks of dp have here, in the order in which they are brought together. `units`: of
// this rank's model, whose rows give slices and whole shapes.
std::vector<MatrixPlace> plan_matrices(const Layout& layout, std::span<const std::span<const model::ParamRow>> units,
                                       std::span<const i64> params);

// What the exchange takes of fp32: a whole matrix, and the slices of all ranks of tp.
struct MatrixMemory {
  i64 whole = 0, slices = 0;
};
MatrixMemory matrix_memory(std::span<const MatrixPlace> places, int tp) noexcept;

class MatrixExchange {
 public:
  // slices[i][r]: the slice of matrix i that rank r of tp has; of no use where tp has one rank. Memory as matrix_memory
  // says; all for the object's life.
  MatrixExchange(std::span<const MatrixPlace> places, const std::vector<std::vector<model::ParamSlice>>& slices,
                 Communicator& dp, Communicator& tp, float* whole, float* gathered);

  using Elements = FunctionRef<float*(i64 param, i64 begin)>;  // this rank's, of the flattened slice of a parameter
  using Copy = FunctionRef<void(void* to, const void* from, i64 bytes)>;
  using Body = FunctionRef<void(TensorView whole)>;
  // Collective over dp and tp.
  void for_each(Elements elements, Copy copy, Body body);

 private:
  void change(size_t i, Elements elements, Copy copy, Body body);

  std::span<const MatrixPlace> places_;
  std::vector<std::vector<model::SliceMap>> slices_;  // by matrix and rank of tp, where it has several
  Communicator& dp_;
  Communicator& tp_;
  float *whole_, *gathered_;
  std::vector<Ticket> sent_, returned_;
};

}  // namespace ds::zero
