// SPDX-License-Identifier: Apache-2.0
#pragma once
// Python pickles as data. The stack machine of pickle builds values and never runs anything: what a pickle would import
// is looked up in a short list of names, what it would call becomes a record of the name and the arguments. Names
// outside the list are refused. Format: Python's pickletools, protocols 2 to 5 as far as torch.save writes them.

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "formats/pickle_names.h"

namespace ds {

struct PickleValue;

// What torch._utils._rebuild_tensor_v2 is called with: a strided view of a storage. Sound: no element of it lies
// outside the elements that the storage claims to have.
struct PickleTensor {
  const PickleValue* storage = nullptr;
  std::optional<DType> dtype;  // nothing: a type that DType cannot name, `type`
  std::string type;            // "torch.FloatStorage", "torch.float8_e4m3fnuz"
  i64 offset = 0;              // in elements of the storage
  std::vector<i64> shape, stride;
};

struct PickleValue {
  enum class Kind : u8 {
    None,
    Bool,     // integer: 0 or 1
    Int,      // integer
    BigInt,   // text: little-endian two's complement of more than 8 bytes
    Float,    // real
    String,   // text: UTF-8
    Bytes,    // text
    List,     // items
    Tuple,    // items; torch.Size too
    Set,      // items
    Dict,     // items: key, value, key, value, ... in order; text: "collections.OrderedDict" or empty
    Global,   // text: "module.name"
    Storage,  // text: its key; integer: its elements; state: the Global of its type
    Tensor,   // tensor
    Record,   // text: "module.name" of what would be called; items: the arguments; state: what BUILD gives it, or null
  };
  Kind kind = Kind::None;
  i64 integer = 0;
  double real = 0;
  std::string text;
  std::vector<const PickleValue*> items;
  const PickleValue* state = nullptr;
  std::unique_ptr<const PickleTensor> tensor;

  bool is(Kind k) const noexcept { return kind == k; }
  // The value of a string key in a Dict, the last one where there are several; null where there is none or this is no
  // Dict.
  const PickleValue* find(std::string_view key) const noexcept;
};

std::string_view kind_name(PickleValue::Kind) noexcept;

// One pickle. Owns all of its values; they refer to one another as Python's do, so one may be reached on many ways, and
// a list may hold itself: who walks must count.
class Pickle {
 public:
  // `path` stands for the pickle in messages. Memory stays within some hundred times bytes.size(), and below a fixed
  // bound. Throws Errc::Unavailable for a name outside the list or an opcode that is not read (each by its name),
  // Errc::Corrupt for whatever no pickle of torch.save can be.
  Pickle(std::string_view bytes, const std::string& path);

  const PickleValue& root() const noexcept { return *root_; }
  const std::deque<PickleValue>& values() const noexcept { return values_; }

 private:
  std::deque<PickleValue> values_;
  const PickleValue* root_ = nullptr;
};

}  // namespace ds
