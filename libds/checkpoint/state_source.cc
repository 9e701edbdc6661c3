// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/state_source.h"

#include <algorithm>

#include "formats/tensor_io.h"

namespace ds {
namespace {

constexpr i64 kConvertElems = i64{1} << 20;

}  // namespace

void StateSource::read(State state, DType dtype, i64 param, i64 first, i64 count, void* out) {
  if (state == State::Param && dtype != stored_dtype(state, param) && has(State::Master)) {
    state = State::Master;
  } else if (state == State::Master && !has(State::Master)) {
    state = State::Param;
  }
  const DType stored = stored_dtype(state, param);
  auto* target = static_cast<char*>(out);
  if (stored == dtype) return read_stored(state, param, first, count, target);
  std::vector<char> buffer;
  for (i64 done = 0; done < count; done += kConvertElems) {
    const i64 n = std::min(kConvertElems, count - done);
    buffer.resize(static_cast<size_t>(n * dtype_bytes(stored)));
    read_stored(state, param, first + done, n, buffer.data());
    convert_elements(dtype, target + done * dtype_bytes(dtype), stored, buffer.data(), n);
  }
}

}  // namespace ds
