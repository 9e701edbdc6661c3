// SPDX-License-Identifier: Apache-2.0
#pragma once
// Works on whole matrices whose pieces lie on several ranks: gathers each on one rank of dp, its owner (with tp, on the
// ranks of tp at the owner's place, from their slices), changes it there, and sends the pieces back. Owners take turns
// by descending size, with as many matrices at a time as there are ranks, so that all ranks work at once and memory for
// one matrix is enough. If every rank of dp has everything (ZeRO 0), nothing is sent over dp, and each rank does the
// same work. The number of ranks changes no bit: the same op sees the same whole matrix.

#include <span>
#include <vector>

#include "device/device.h"
#include "ds/communicator.h"
#include "model/slice.h"
#include "zero/layout.h"

namespace ds::zero {

struct MatrixPlace {
  i64 param = 0;
  i64 rows = 0, cols = 0;  // of the whole
  i64 slice_elems = 0;     // elements of a slice on one rank of tp
  int owner = -1;          // rank of dp; -1: every rank has the whole slice
  struct Part {
    int rank;
    i64 begin, count;  // elements of the flattened slice
  };
  std::vector<Part> parts = {};
};

// The matrices of `params` that the ranks of dp at this stage hold, in the order in which they are gathered. units: the
// rows of this rank's model, which give slices and whole shapes.
std::vector<MatrixPlace> plan_matrices(const Layout& layout, std::span<const std::span<const model::ParamRow>> units,
                                       std::span<const i64> params);

// fp32 elements that the exchange needs: for a whole matrix, and for the slices of all ranks of tp.
struct MatrixMemory {
  i64 whole = 0, slices = 0;
};
MatrixMemory matrix_memory(std::span<const MatrixPlace> places, int tp) noexcept;

class MatrixExchange {
 public:
  // slices[i][r]: the slice of matrix i on rank r of tp; unused if tp has one rank. whole, gathered: memory of
  // matrix_memory()'s sizes. All outlive it.
  MatrixExchange(std::span<const MatrixPlace> places, const std::vector<std::vector<model::ParamSlice>>& slices,
                 Communicator& dp, Communicator& tp, float* whole, float* gathered);

  using Elements = FunctionRef<float*(i64 param, i64 begin)>;  // this rank's, of a flattened slice, from begin on
  using Copy = FunctionRef<void(void* to, const void* from, i64 bytes)>;
  using Body = FunctionRef<void(TensorView whole)>;
  // Collective over dp and tp.
  void for_each(Elements elements, Copy copy, Body body);

 private:
  void change(size_t i, Elements elements, Copy copy, Body body);

  std::span<const MatrixPlace> places_;
  std::vector<std::vector<model::SliceMap>> slices_;  // by matrix and rank of tp, if it has several
  Communicator& dp_;
  Communicator& tp_;
  float *whole_, *gathered_;
  std::vector<Ticket> sent_, returned_;
};

}  // namespace ds::zero
