// SPDX-License-Identifier: Apache-2.0
#pragma once
// The names that a pickle may use, and what the unpickler makes of each. They are words to it: what they stand for is
// never looked up in any Python.

#include <optional>
#include <string>
#include <string_view>

#include "base/check.h"

namespace ds {

// What a call of the name makes.
enum class PickleRole : u8 {
  Inert,        // a record of the call
  OrderedDict,  // a dict
  Set,
  Size,      // a tuple
  Tensor2,   // torch._utils._rebuild_tensor_v2: the type is the storage's
  Tensor3,   // ..._v3: the type is the seventh argument
  Wrapper,   // the tensor that is its first argument
  FromType,  // a tensor, by the function that is its first argument
};

// Nothing: "module.name" is not in the list.
std::optional<PickleRole> pickle_role(std::string_view global) noexcept;

// The element type of a torch dtype or storage type, "torch.bfloat16", "torch.HalfStorage". Nothing where DType has no
// name for it.
std::optional<DType> torch_dtype(std::string_view global) noexcept;
// Bytes per element of a dtype or a typed storage; 0: neither.
i64 torch_element_bytes(std::string_view global) noexcept;
// Bytes per element of a storage type, typed or not; 0: not a storage type.
i64 torch_storage_bytes(std::string_view global) noexcept;

// Of an opcode that is not read, for messages.
std::string pickle_opcode_name(u8 opcode);

}  // namespace ds
