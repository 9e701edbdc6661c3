// SPDX-License-Identifier: Apache-2.0
// Nothing here recurses: values are made by a loop over opcodes and owned by one arena, so that neither deep nesting
// nor values that hold one another cost more than their opcodes.

#include "formats/pickle.h"

#include <algorithm>
#include <cstring>
#include <map>

namespace ds {
namespace {

using Value = PickleValue;
using Kind = PickleValue::Kind;

constexpr size_t kMaxPickle = size_t{64} << 20;  // of a model with some hundred thousand tensors
constexpr size_t kMaxValues = size_t{2} << 20;
constexpr size_t kMaxStorageKey = 64;            // bytes
constexpr size_t kTensorItems = 32;              // what the memory of one costs, in items
constexpr size_t kMaxCopied = size_t{16} << 20;  // items of one value that a call makes the items of another
constexpr size_t kMaxMarks = 1000;
constexpr size_t kMaxDims = 64;

bool is_utf8(std::string_view s) noexcept {
  for (size_t i = 0; i < s.size();) {
    const u8 lead = static_cast<u8>(s[i++]);
    if (lead < 0x80) continue;
    const int more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
    if (lead < 0xc2 || lead > 0xf4 || s.size() - i < static_cast<size_t>(more)) return false;
    u32 code = lead & (0x3f >> more);
    for (int k = 0; k < more; ++k, ++i) {
      if ((static_cast<u8>(s[i]) & 0xc0) != 0x80) return false;
      code = code << 6 | (static_cast<u8>(s[i]) & 0x3f);
    }
    const bool overlong = code < (more == 3 ? 0x10000u : more == 2 ? 0x800u : 0x80u);
    if (overlong || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return false;
  }
  return true;
}

class Unpickler {
 public:
  Unpickler(std::string_view bytes, const std::string& path, std::deque<Value>& values)
      : bytes_(bytes), path_(path), values_(values) {}

  const Value* run() {
    check(bytes_.size() <= kMaxPickle, "a pickle of {} bytes, at most {} are read", bytes_.size(), kMaxPickle);
    check(!bytes_.empty(), "an empty pickle");
    if (static_cast<u8>(bytes_[0]) != 0x80) unavailable("protocol 0 or 1, or no pickle");
    at_ = 1;
    const u8 protocol = get<u8>();
    if (protocol < 2 || protocol > 5) unavailable("protocol {}", protocol);
    none_ = &make(Kind::None);
    true_ = &make(Kind::Bool);
    true_->integer = 1;
    false_ = &make(Kind::Bool);
    for (;;) {
      op_at_ = at_;
      const u8 op = get<u8>();
      if (op == '.') break;
      execute(op);
    }
    check(marks_.empty() && stack_.size() == 1, "STOP with {} values on the stack", stack_.size());
    check(at_ == bytes_.size(), "{} bytes after the end of the pickle", bytes_.size() - at_);
    return stack_.front();
  }

 private:
  template <class... Args>
  [[noreturn]] void unavailable(fmt::format_string<Args...> format, Args&&... args) const {
    throw Error(Errc::Unavailable, fmt::format("{}: at byte {}: {}: not read", path_, op_at_,
                                               fmt::format(format, std::forward<Args>(args)...)));
  }
  template <class... Args>
  void check(bool ok, fmt::format_string<Args...> format, Args&&... args) const {
    if (!ok) [[unlikely]]
      throw Error(Errc::Corrupt,
                  fmt::format("{}: at byte {}: {}", path_, op_at_, fmt::format(format, std::forward<Args>(args)...)));
  }

  // --- bytes
  std::string_view take(size_t n) {
    check(n <= bytes_.size() - at_, "{} bytes are wanted, {} are left", n, bytes_.size() - at_);
    const std::string_view s = bytes_.substr(at_, n);
    at_ += n;
    return s;
  }
  template <class T>
  T get() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view line() {
    const size_t end = bytes_.find('\n', at_);
    check(end != std::string_view::npos && end - at_ <= 1000, "a name without end");
    const std::string_view s = bytes_.substr(at_, end - at_);
    at_ = end + 1;
    return s;
  }

  // --- values and the stack
  Value& make(Kind kind) {
    check(values_.size() < kMaxValues, "more than {} values", kMaxValues);
    Value& v = values_.emplace_back();
    v.kind = kind;
    return v;
  }
  void push(Value& v) { stack_.push_back(&v); }
  Value& top() {
    check(stack_.size() > (marks_.empty() ? 0 : marks_.back()), "a value is taken from an empty stack");
    return *stack_.back();
  }
  Value& pop() {
    Value& v = top();
    stack_.pop_back();
    return v;
  }
  void push_int(i64 x) {
    Value& v = make(Kind::Int);
    v.integer = x;
    push(v);
  }
  void push_text(Kind kind, std::string_view text) {
    check(kind != Kind::String || is_utf8(text), "a string that is not UTF-8");
    Value& v = make(kind);
    v.text = text;
    push(v);
  }
  // A tuple of the values above position `from`.
  void push_tuple(size_t from) {
    Value& v = make(Kind::Tuple);
    v.items.assign(stack_.begin() + static_cast<std::ptrdiff_t>(from), stack_.end());
    stack_.resize(from);
    push(v);
  }
  void push_small_tuple(size_t n) {
    const size_t floor = marks_.empty() ? 0 : marks_.back();
    check(stack_.size() - floor >= n, "a tuple of {} from a stack of {}", n, stack_.size() - floor);
    push_tuple(stack_.size() - n);
  }
  size_t pop_mark() {
    check(!marks_.empty(), "there is no MARK");
    const size_t mark = marks_.back();
    marks_.pop_back();
    return mark;
  }
  void put(u32 index) { memo_[index] = &top(); }
  void get_memo(u32 index) {
    const auto it = memo_.find(index);
    check(it != memo_.end(), "memo {} was never set", index);
    push(*it->second);
  }

  // Moves the values above the last mark into the container below it.
  void append_marked(Kind kind, size_t stride) {
    const size_t mark = pop_mark();
    const size_t count = stack_.size() - mark;
    check(mark > (marks_.empty() ? 0 : marks_.back()), "a value is taken from an empty stack");
    append_to(*stack_[mark - 1], kind, stride, mark, count);
  }
  void append_last(Kind kind, size_t stride) {
    const size_t floor = marks_.empty() ? 0 : marks_.back();
    check(stack_.size() - floor > stride, "a value is taken from an empty stack");
    const size_t from = stack_.size() - stride;
    append_to(*stack_[from - 1], kind, stride, from, stride);
  }
  void append_to(Value& target, Kind kind, size_t stride, size_t from, size_t count) {
    check(target.is(kind), "items for a {}, which is not a {}", kind_name(target.kind), kind_name(kind));
    check(count % stride == 0, "a key without a value");
    target.items.insert(target.items.end(), stack_.begin() + static_cast<std::ptrdiff_t>(from), stack_.end());
    stack_.resize(from);
  }

  // --- names, calls, states
  void push_global(std::string_view module, std::string_view name) {
    std::string full = fmt::format("{}.{}", module, name);
    if (!pickle_role(full)) {
      for (char& c : full) {
        if (static_cast<u8>(c) < 0x20 || static_cast<u8>(c) >= 0x7f) c = '?';
      }
      unavailable(
          "it refers to '{}', which is none of the names that a file of tensors needs (no code of a file is run)",
          full.substr(0, 200));
    }
    Value& v = make(Kind::Global);
    v.text = std::move(full);
    push(v);
  }

  // `what` is called with `args`: a value where the name is one of torch's containers or tensors, or else a record.
  Value& call(const Value& what, const Value& args) {
    check(what.is(Kind::Global), "a {} is called", kind_name(what.kind));
    check(args.is(Kind::Tuple), "{} is called with a {} for arguments", what.text, kind_name(args.kind));
    const auto& a = args.items;
    switch (*pickle_role(what.text)) {
      case PickleRole::OrderedDict: {
        Value& v = make(Kind::Dict);
        v.text = what.text;
        if (what.text == "collections.OrderedDict" && !a.empty()) {
          check(a.size() == 1 && a[0]->is(Kind::List), "an OrderedDict of something other than a list of pairs");
          charge(2 * a[0]->items.size());
          for (const Value* pair : a[0]->items) {
            const bool is_pair = (pair->is(Kind::Tuple) || pair->is(Kind::List)) && pair->items.size() == 2;
            check(is_pair, "an OrderedDict of something other than a list of pairs");
            v.items.insert(v.items.end(), pair->items.begin(), pair->items.end());
          }
        }
        return v;
      }
      case PickleRole::Set: {
        Value& v = make(Kind::Set);
        check(a.empty() || (a.size() == 1 && a[0]->is(Kind::List)), "a set of something other than a list");
        if (!a.empty()) copy_items(v, *a[0]);
        return v;
      }
      case PickleRole::Size: {
        check(a.size() == 1 && a[0]->is(Kind::Tuple), "a torch.Size of something other than a tuple");
        Value& v = make(Kind::Tuple);
        copy_items(v, *a[0]);
        return v;
      }
      case PickleRole::Tensor2: return tensor(args, false);
      case PickleRole::Tensor3: return tensor(args, true);
      case PickleRole::Wrapper:
        check(!a.empty() && a[0]->is(Kind::Tensor), "a parameter of something other than a tensor");
        return copy_of(*a[0]);
      case PickleRole::FromType:
        check(a.size() == 4 && a[0]->is(Kind::Global) && a[2]->is(Kind::Tuple), "a tensor of unknown arguments");
        check(*pickle_role(a[0]->text) == PickleRole::Tensor2 || *pickle_role(a[0]->text) == PickleRole::Tensor3,
              "a tensor that '{}' is to make", a[0]->text);
        return tensor(*a[2], *pickle_role(a[0]->text) == PickleRole::Tensor3);
      case PickleRole::Inert: break;
    }
    Value& v = make(Kind::Record);
    v.text = what.text;
    copy_items(v, args);
    return v;
  }

  // Elsewhere an item costs its opcode; here one opcode may copy what many have made.
  void charge(size_t items) {
    copied_ += items;
    check(copied_ <= kMaxCopied, "calls with more than {} items", kMaxCopied);
  }
  void copy_items(Value& to, const Value& from) {
    charge(from.items.size());
    to.items = from.items;
  }

  Value& copy_of(const Value& tensor) { return make_tensor(*tensor.tensor); }

  std::vector<i64> ints(const Value& v, std::string_view what) const {
    check(v.is(Kind::Tuple) || v.is(Kind::List), "a tensor whose {} is a {}", what, kind_name(v.kind));
    check(v.items.size() <= kMaxDims, "a tensor of {} dims", v.items.size());
    std::vector<i64> out;
    for (const Value* item : v.items) {
      check(item->is(Kind::Int) && item->integer >= 0, "a tensor whose {} is not a list of sizes", what);
      out.push_back(item->integer);
    }
    return out;
  }

  // Bits of a view whose elements are not what stands in the storage: 'conj' and 'neg'.
  void refuse_lazy_views(const Value& metadata) const {
    if (metadata.is(Kind::None)) return;
    check(metadata.is(Kind::Dict), "a tensor whose metadata is a {}", kind_name(metadata.kind));
    for (size_t i = 0; i + 1 < metadata.items.size(); i += 2) {
      const Value &key = *metadata.items[i], &value = *metadata.items[i + 1];
      const bool is_off = value.is(Kind::None) || (value.is(Kind::Bool) && value.integer == 0);
      if (!is_off)
        unavailable("a lazy view of a tensor ('{}'; call resolve_conj() and resolve_neg() before saving)",
                    key.text.substr(0, 64));
    }
  }

  // (storage, offset, shape, stride, requires_grad, hooks, metadata), the last three not always; with_dtype, the dtype
  // comes before the metadata.
  Value& tensor(const Value& args, bool with_dtype) {
    const auto& a = args.items;
    const size_t metadata = with_dtype ? 7 : 6;
    check(a.size() >= (with_dtype ? 7u : 4u) && a.size() <= metadata + 1 && a[0]->is(Kind::Storage) &&
              a[1]->is(Kind::Int),
          "a tensor of unknown arguments");
    if (a.size() > metadata) refuse_lazy_views(*a[metadata]);
    PickleTensor t;
    t.storage = a[0];
    t.type = a[0]->state->text;
    if (with_dtype) {
      check(a[6]->is(Kind::Global) && torch_element_bytes(a[6]->text) > 0, "a tensor of an unknown dtype");
      t.type = a[6]->text;
    }
    const i64 bytes = torch_element_bytes(t.type), storage_bytes = torch_storage_bytes(a[0]->state->text);
    check(bytes > 0 && a[0]->integer <= std::numeric_limits<i64>::max() / storage_bytes, "a tensor of {}", t.type);
    t.dtype = torch_dtype(t.type);
    t.offset = a[1]->integer;
    t.shape = ints(*a[2], "shape");
    t.stride = ints(*a[3], "stride");
    check(t.shape.size() == t.stride.size(), "a tensor of {} dims with {} strides", t.shape.size(), t.stride.size());
    const i64 elems = a[0]->integer * storage_bytes / bytes;
    check(t.offset >= 0 && t.offset <= elems, "a tensor at element {} of a storage of {}", t.offset, elems);
    i64 last = t.offset;
    bool empty = false, fits = true;
    for (size_t d = 0; d < t.shape.size(); ++d) {
      empty |= t.shape[d] == 0;
      i64 span;
      fits = fits && !__builtin_mul_overflow(std::max<i64>(t.shape[d] - 1, 0), t.stride[d], &span) &&
             !__builtin_add_overflow(last, span, &last);
    }
    check(empty || (fits && last < elems), "a tensor that exceeds its storage of {} elements", elems);
    i64 numel = 1;
    for (i64 d : t.shape) check(empty || !__builtin_mul_overflow(numel, d, &numel), "a tensor whose size overflows");
    i64 size;
    check(empty || !__builtin_mul_overflow(numel, bytes, &size), "a tensor whose size overflows");
    return make_tensor(std::move(t));
  }
  Value& make_tensor(PickleTensor t) {
    charge(kTensorItems + 2 * t.shape.size());
    Value& v = make(Kind::Tensor);
    v.tensor = std::make_unique<const PickleTensor>(std::move(t));
    return v;
  }

  // ('storage', type, key, location, elements)
  Value& storage(const Value& id) {
    const auto& a = id.items;
    const bool known = id.is(Kind::Tuple) && a.size() == 5 && a[0]->is(Kind::String) && a[0]->text == "storage" &&
                       a[1]->is(Kind::Global) && torch_storage_bytes(a[1]->text) > 0 && a[2]->is(Kind::String) &&
                       a[3]->is(Kind::String) && a[4]->is(Kind::Int) && a[4]->integer >= 0;
    check(known, "a persistent id that is not a storage of torch");
    // Each use of the id copies it: torch numbers its storages.
    check(a[2]->text.size() <= kMaxStorageKey, "a storage with a key of {} bytes", a[2]->text.size());
    Value& v = make(Kind::Storage);
    v.text = a[2]->text;
    v.integer = a[4]->integer;
    v.state = a[1];
    return v;
  }

  void build() {
    const Value& state = pop();
    Value& target = top();
    // The attributes of a state dict ("_metadata") and of a tensor say nothing about tensors.
    if ((target.is(Kind::Dict) && !target.text.empty()) || target.is(Kind::Tensor)) return;
    check(target.is(Kind::Record), "BUILD of a {}", kind_name(target.kind));
    check(target.state == nullptr, "BUILD of '{}' for the second time", target.text);
    target.state = &state;
  }

  void long1() {
    const std::string_view raw = take(get<u8>());
    if (raw.size() > 8) return push_text(Kind::BigInt, raw);
    i64 x = !raw.empty() && static_cast<u8>(raw.back()) >= 0x80 ? -1 : 0;  // the sign
    std::memcpy(&x, raw.data(), raw.size());
    push_int(x);
  }

  void binfloat() {
    u64 bits = 0;
    for (char c : take(8)) bits = bits << 8 | static_cast<u8>(c);
    Value& v = make(Kind::Float);
    v.real = std::bit_cast<double>(bits);
    push(v);
  }

  void execute(u8 op) {
    switch (op) {
      case 0x95: check(get<u64>() <= bytes_.size() - at_, "a FRAME after the end"); return;
      case '(':
        check(marks_.size() < kMaxMarks, "nested deeper than {}", kMaxMarks);
        marks_.push_back(stack_.size());
        return;
      case 'N': return push(*none_);
      case 0x88: return push(*true_);
      case 0x89: return push(*false_);
      case 'J': return push_int(get<i32>());
      case 'K': return push_int(get<u8>());
      case 'M': return push_int(get<u16>());
      case 0x8a: return long1();
      case 'G': return binfloat();
      case 'X': return push_text(Kind::String, take(get<u32>()));
      case 0x8c: return push_text(Kind::String, take(get<u8>()));
      case 'U': return push_text(Kind::Bytes, take(get<u8>()));
      case 'C': return push_text(Kind::Bytes, take(get<u8>()));
      case 'B': return push_text(Kind::Bytes, take(get<u32>()));
      case ')': return push(make(Kind::Tuple));
      case ']': return push(make(Kind::List));
      case '}': return push(make(Kind::Dict));
      case 0x8f: return push(make(Kind::Set));
      case 0x85: return push_small_tuple(1);
      case 0x86: return push_small_tuple(2);
      case 0x87: return push_small_tuple(3);
      case 't': return push_tuple(pop_mark());
      case 'a': return append_last(Kind::List, 1);
      case 'e': return append_marked(Kind::List, 1);
      case 's': return append_last(Kind::Dict, 2);
      case 'u': return append_marked(Kind::Dict, 2);
      case 0x90: return append_marked(Kind::Set, 1);
      case 'q': return put(get<u8>());
      case 'r': return put(get<u32>());
      case 0x94: return put(narrow<u32>(memo_.size()));
      case 'h': return get_memo(get<u8>());
      case 'j': return get_memo(get<u32>());
      case 'c': {
        const std::string_view module = line();
        return push_global(module, line());
      }
      case 0x93: {
        const Value &name = pop(), &module = pop();
        check(module.is(Kind::String) && name.is(Kind::String), "STACK_GLOBAL of something other than two strings");
        return push_global(module.text, name.text);
      }
      case 'R':
      case 0x81: {
        const Value &args = pop(), &what = pop();
        return push(call(what, args));
      }
      case 'b': return build();
      case 'Q': return push(storage(pop()));
      case 0x80: check(false, "PROTO in the middle"); return;
      default: unavailable("opcode {}", pickle_opcode_name(op));
    }
  }

  const std::string_view bytes_;
  const std::string& path_;
  std::deque<Value>& values_;
  size_t at_ = 0, op_at_ = 0, copied_ = 0;
  std::vector<Value*> stack_;
  std::vector<size_t> marks_;
  std::map<u32, Value*> memo_;  // no hash to collide in
  Value *none_ = nullptr, *true_ = nullptr, *false_ = nullptr;
};

}  // namespace

const PickleValue* PickleValue::find(std::string_view key) const noexcept {
  if (kind != Kind::Dict) return nullptr;
  for (size_t i = items.size(); i >= 2; i -= 2) {
    if (items[i - 2]->is(Kind::String) && items[i - 2]->text == key) return items[i - 1];
  }
  return nullptr;
}

std::string_view kind_name(Kind kind) noexcept {
  switch (kind) {
    case Kind::None: return "None";
    case Kind::Bool: return "bool";
    case Kind::Int:
    case Kind::BigInt: return "int";
    case Kind::Float: return "float";
    case Kind::String: return "str";
    case Kind::Bytes: return "bytes";
    case Kind::List: return "list";
    case Kind::Tuple: return "tuple";
    case Kind::Set: return "set";
    case Kind::Dict: return "dict";
    case Kind::Global: return "name";
    case Kind::Storage: return "storage";
    case Kind::Tensor: return "tensor";
    case Kind::Record: return "object";
  }
  return "?";
}

Pickle::Pickle(std::string_view bytes, const std::string& path) { root_ = Unpickler(bytes, path, values_).run(); }

}  // namespace ds
