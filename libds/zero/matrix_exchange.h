// SPDX-License-Identifier: Apache-2.0
#pragma once
// Works on whole matrices whose pieces lie on several ranks of a reduction group, dp or a split of it: gathers each on
// one rank of the group, its owner (with tp, on the ranks of tp at the owner's place, from their slices), changes it
// there, and sends the pieces back. Each matrix of a batch is one for itself. Owners take turns by descending size,
// with as many matrices at a time as there are ranks, so that all ranks work at once and memory for one matrix is
// enough. If every rank of the group has everything (ZeRO 0), nothing is sent over it, and each rank does the same
// work. The number of ranks changes no bit: the same op sees the same whole matrix.

#include <span>
#include <string>
#include <vector>

#include "device/device.h"
#include "ds/communicator.h"
#include "model/slice.h"
#include "zero/layout.h"

namespace ds::zero {

struct MatrixPlace {
  i64 param = 0;
  i64 rows = 0, cols = 0;  // of the whole
  // Elements [begin, begin + slice_elems) of the flattened row are this rank's slice of the matrix.
  i64 begin = 0, slice_elems = 0;
  bool sliced = false;  // ranks of tp have different parts of it
  int batch_dims = 0;   // dims of the parameter before those of the matrix
  int owner = -1;       // rank of the group; -1: every rank has the whole slice
  struct Part {
    int rank;
    i64 begin, count;  // elements of the flattened row
  };
  std::vector<Part> parts = {};
};

// Whether a row has only parts of its matrices, not a batch of some of them.
bool cuts_matrices(const model::ParamRow& row) noexcept;

// The matrices of `params` that the ranks of the layout hold at this stage, in the order in which they are gathered.
// units: the rows of this rank's model, which give slices and whole shapes.
std::vector<MatrixPlace> plan_matrices(const Layout& layout, std::span<const std::span<const model::ParamRow>> units,
                                       std::span<const i64> params);

// fp32 elements that the exchange needs: for a whole matrix, and for the slices of all ranks of tp.
struct MatrixMemory {
  i64 whole = 0, slices = 0;
};
MatrixMemory matrix_memory(std::span<const MatrixPlace> places, int tp) noexcept;

class MatrixExchange {
 public:
  // group: the communicator of the layout, and its name in counts of messages. slices[i][r]: the slice that rank r of
  // tp has of the row of matrix i; read if that is sliced. whole, gathered: memory of matrix_memory()'s sizes. All
  // outlive it. Throws Errc::Config if the slices of all ranks are not the whole matrix.
  MatrixExchange(std::span<const MatrixPlace> places, const std::vector<std::vector<model::ParamSlice>>& slices,
                 Communicator& group, std::string_view name, Communicator& tp, float* whole, float* gathered);

  using Elements = FunctionRef<float*(i64 param, i64 begin)>;  // this rank's, of a flattened row, from begin on
  using Copy = FunctionRef<void(void* to, const void* from, i64 bytes)>;
  using Body = FunctionRef<void(TensorView whole)>;
  // Collective over the group and tp.
  void for_each(Elements elements, Copy copy, Body body);

 private:
  void change(size_t i, Elements elements, Copy copy, Body body);

  std::span<const MatrixPlace> places_;
  std::vector<std::vector<model::SliceMap>> slices_;  // by matrix and rank of tp, if sliced
  Communicator& group_;
  Communicator& tp_;
  const std::string send_tag_, recv_tag_;
  float *whole_, *gathered_;
  std::vector<Ticket> sent_, returned_;
};

}  // namespace ds::zero
