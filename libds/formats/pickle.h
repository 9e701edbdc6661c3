// SPDX-License-Identifier: Apache-2.0
#pragma once
// Python pickles as data. The stack machine builds values and never runs anything: names to import must be in a short
// list, and a call becomes a record of the name and its arguments. Other names are refused. Format: Python's
// pickletools, protocols 2 to 5 as far as torch.save writes them.

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

// The arguments of torch._utils._rebuild_tensor_v2: a strided view of a storage. Checked: all its elements are inside
// the declared size of the storage.
struct PickleTensor {
  const PickleValue* storage = nullptr;
  std::optional<DType> dtype;  // nothing: DType does not have it; see `type`
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
    Record,   // text: "module.name" of the function; items: the arguments; state: set by BUILD, or null
  };
  Kind kind = Kind::None;
  i64 integer = 0;
  double real = 0;
  std::string text;
  std::vector<const PickleValue*> items;
  const PickleValue* state = nullptr;
  std::unique_ptr<const PickleTensor> tensor;

  bool is(Kind k) const noexcept { return kind == k; }
  // The value of a string key in a Dict, the last one if there are several; null if there is none or this is not a
  // Dict.
  const PickleValue* find(std::string_view key) const noexcept;
};

std::string_view kind_name(PickleValue::Kind) noexcept;

// One pickle, which owns all its values. They refer to one another like Python's, so a value may be shared, and a list
// may contain itself: code that traverses values must bound its work.
class Pickle {
 public:
  // `path` names the pickle in messages. Memory is at most some hundred times bytes.size(), and below a fixed bound.
  // Throws Errc::Unavailable naming a name outside the list or an unsupported opcode, Errc::Corrupt if torch.save
  // cannot have written the pickle.
  Pickle(std::string_view bytes, const std::string& path);

  const PickleValue& root() const noexcept { return *root_; }
  const std::deque<PickleValue>& values() const noexcept { return values_; }

 private:
  std::deque<PickleValue> values_;
  const PickleValue* root_ = nullptr;
};

}  // namespace ds
