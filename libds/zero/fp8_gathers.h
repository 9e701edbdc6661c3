// SPDX-License-Identifier: Apache-2.0
#pragma once
// Gathers of matrices of FP8 products (stage 3): a slice travels as the E4M3 codes of its elements, a byte each, and is
// decoded to bf16 where it arrives. Scales are those of whole blocks of 128 x 128, which slices cut anywhere: all ranks
// agree on the largest element of each block when parameters are published, so that nothing but codes travels later.
// Values of codes have the same codes again (fp8_scale), so products have the operands, and the bits, that they have
// when bf16 travels.

#include <vector>

#include "device/device.h"
#include "ds/communicator.h"
#include "ds/layer.h"
#include "zero/layout.h"

namespace ds::zero {

class Fp8Gathers {
 public:
  // The segments of a layout that travel as codes. rows[u]: the rows of unit u.
  Fp8Gathers(const Layout& layout, std::span<const std::span<const model::ParamRow>> rows, int rank);
  bool any() const noexcept { return squares_ > 0; }
  // Collective.
  void allocate(Communicator& comm, MemoryLedger& ledger);

  // When the parameters of a segment have changed: this rank's largest elements, of its slice; then, for all segments
  // or those that are trained, the largest ones of all ranks.
  void measure(Device& device, const Segment& s, TensorView slice) const noexcept;
  Ticket agree(Communicator& comm, bool trained_alone, std::string_view tag) const;
  // This rank's slice into its place in `codes`, all ranks' slices of a byte for each element.
  void encode(Device& device, const Segment& s, TensorView slice, void* codes) const noexcept;
  void decode(Device& device, const Segment& s, void* codes, TensorView full) const noexcept;

 private:
  struct Matrix {
    i64 offset, numel;  // in its segment
    i64 down, across;   // squares
    i64 first;          // of its maxima
  };
  std::span<const Matrix> matrices_of(const Segment& s) const noexcept;
  TensorView maxima(const Matrix& m) const noexcept;
  // Calls use(matrix, where in the slice, where in the matrix, elements) for the parts that this rank's slice has of
  // matrices; where it has nothing of one, with no elements.
  template <class F>
  void for_parts(const Segment& s, F&& use) const noexcept;

  const Layout& layout_;
  int rank_;
  std::vector<Matrix> matrices_;
  std::vector<i64> begin_;                 // by segment, and after the last one: its first matrix
  i64 squares_ = 0, trained_squares_ = 0;  // the maxima of what is trained come first
  Buffer maxima_;                          // int64
};

}  // namespace ds::zero
