// SPDX-License-Identifier: Apache-2.0
#pragma once
// One tile of a product with a matrix of codes.

#include "cpu/epilogue.h"
#include "cpu/isa/codes.h"
#include "cpu/isa/tiling.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

// Rows m and columns n, which begin with a panel, of the product of a [M,K] and b; `done` gets the sums.
void multiply_coded_tile(const TensorView& a, const CodedMatrix& b, Range m, Range n, const Epilogue& e, FinishFn done,
                         void* scratch) noexcept;
// Scratch for any tile of at most so many rows and columns.
size_t coded_tile_bytes(DType work, const CodedForm& form, i64 rows, i64 columns, i64 K) noexcept;

// The same for forms with sums of integers.
template <class T>
void multiply_integer_tile(const Source<T>& a, const CodedMatrix& b, Range m, Range n, const Epilogue& e, FinishFn done,
                           void* scratch) noexcept;
size_t integer_tile_bytes(const CodedForm& form, i64 rows, i64 K) noexcept;

}  // namespace ds::cpu::DS_ISA_NAMESPACE
