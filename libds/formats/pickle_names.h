// SPDX-License-Identifier: Apache-2.0
#pragma once
// The names that a pickle may use, and the kind of value that each makes. They are only words: no Python object is ever
// looked up.

#include <optional>
#include <string>
#include <string_view>

#include "base/check.h"

namespace ds {

// The result of calling a name.
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

// Nothing if "module.name" is not in the list.
std::optional<PickleRole> pickle_role(std::string_view global) noexcept;

// The element type of a torch dtype or storage type, "torch.bfloat16", "torch.HalfStorage". Nothing if DType does not
// have it.
std::optional<DType> torch_dtype(std::string_view global) noexcept;
// Bytes per element of a dtype or a typed storage; 0: neither.
i64 torch_element_bytes(std::string_view global) noexcept;
// Bytes per element of a storage type, typed or not; 0: not a storage type.
i64 torch_storage_bytes(std::string_view global) noexcept;

// The name of an unsupported opcode, for messages.
std::string pickle_opcode_name(u8 opcode);

}  // namespace ds
