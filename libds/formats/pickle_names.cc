// SPDX-License-Identifier: Apache-2.0
#include "formats/pickle_names.h"

namespace ds {
namespace {

struct GlobalRow {
  std::string_view name;
  PickleRole role;
};
constexpr GlobalRow kGlobals[] = {
    // tensors
    {"torch._utils._rebuild_tensor", PickleRole::Tensor2},
    {"torch._utils._rebuild_tensor_v2", PickleRole::Tensor2},
    {"torch._utils._rebuild_tensor_v3", PickleRole::Tensor3},
    {"torch._utils._rebuild_parameter", PickleRole::Wrapper},
    {"torch._utils._rebuild_parameter_with_state", PickleRole::Wrapper},
    {"torch._tensor._rebuild_from_type_v2", PickleRole::FromType},
    {"torch.Tensor", PickleRole::Inert},
    {"torch.nn.parameter.Parameter", PickleRole::Inert},
    {"torch.nn.parameter.Buffer", PickleRole::Inert},
    {"torch.Size", PickleRole::Size},
    {"torch.device", PickleRole::Inert},
    {"torch.serialization._get_layout", PickleRole::Inert},
    // containers and plain values; protocol 2 calls builtins __builtin__
    {"collections.OrderedDict", PickleRole::OrderedDict},
    {"collections.defaultdict", PickleRole::OrderedDict},
    {"builtins.set", PickleRole::Set},
    {"builtins.frozenset", PickleRole::Set},
    {"__builtin__.set", PickleRole::Set},
    {"__builtin__.frozenset", PickleRole::Set},
    {"builtins.bytearray", PickleRole::Inert},
    {"builtins.complex", PickleRole::Inert},
    {"builtins.dict", PickleRole::Inert},
    {"builtins.list", PickleRole::Inert},
    {"__builtin__.bytearray", PickleRole::Inert},
    {"__builtin__.complex", PickleRole::Inert},
    {"__builtin__.dict", PickleRole::Inert},
    {"__builtin__.list", PickleRole::Inert},
    {"_codecs.encode", PickleRole::Inert},
    {"argparse.Namespace", PickleRole::Inert},
    {"pathlib.PosixPath", PickleRole::Inert},
    // numpy's arrays, dtypes and scalars
    {"numpy.ndarray", PickleRole::Inert},
    {"numpy.dtype", PickleRole::Inert},
    {"numpy.core.multiarray._reconstruct", PickleRole::Inert},
    {"numpy.core.multiarray.scalar", PickleRole::Inert},
    {"numpy._core.multiarray._reconstruct", PickleRole::Inert},
    {"numpy._core.multiarray.scalar", PickleRole::Inert},
    // DeepSpeed's own
    {"deepspeed.runtime.fp16.loss_scaler.LossScaler", PickleRole::Inert},
    {"deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler", PickleRole::Inert},
    {"deepspeed.runtime.zero.config.ZeroStageEnum", PickleRole::Inert},
    {"deepspeed.runtime.zero.offload_config.OffloadDeviceEnum", PickleRole::Inert},
    {"deepspeed.utils.tensor_fragment.fragment_address", PickleRole::Inert},
    {"deepspeed.checkpoint.universal_checkpoint.SubparamShape", PickleRole::Inert},
};

struct TorchTypeRow {
  std::string_view dtype, storage;
  i64 bytes;
  std::optional<DType> ours;
};
constexpr TorchTypeRow kTorchTypes[] = {
    {"torch.float64", "torch.DoubleStorage", 8, DType::F64},
    {"torch.float32", "torch.FloatStorage", 4, DType::F32},
    {"torch.float16", "torch.HalfStorage", 2, DType::F16},
    {"torch.bfloat16", "torch.BFloat16Storage", 2, DType::BF16},
    {"torch.int64", "torch.LongStorage", 8, DType::I64},
    {"torch.int32", "torch.IntStorage", 4, DType::I32},
    {"torch.int16", "torch.ShortStorage", 2, DType::I16},
    {"torch.int8", "torch.CharStorage", 1, DType::I8},
    {"torch.uint8", "torch.ByteStorage", 1, DType::U8},
    {"torch.bool", "torch.BoolStorage", 1, DType::Bool},
    {"torch.complex128", "torch.ComplexDoubleStorage", 16, {}},
    {"torch.complex64", "torch.ComplexFloatStorage", 8, {}},
    {"torch.complex32", "", 4, {}},
    {"torch.uint16", "", 2, DType::U16},
    {"torch.uint32", "", 4, DType::U32},
    {"torch.uint64", "", 8, DType::U64},
    {"torch.float8_e4m3fn", "", 1, DType::F8E4M3},
    {"torch.float8_e5m2", "", 1, DType::F8E5M2},
    {"torch.float8_e4m3fnuz", "", 1, {}},
    {"torch.float8_e5m2fnuz", "", 1, {}},
    {"torch.float8_e8m0fnu", "", 1, {}},
};
constexpr std::string_view kUntyped = "torch.storage.UntypedStorage";  // bytes; the tensor names its dtype

const TorchTypeRow* find_type(std::string_view global) noexcept {
  for (const TorchTypeRow& row : kTorchTypes) {
    if (row.dtype == global || (!global.empty() && row.storage == global)) return &row;
  }
  return nullptr;
}

}  // namespace

std::optional<PickleRole> pickle_role(std::string_view global) noexcept {
  for (const GlobalRow& row : kGlobals) {
    if (row.name == global) return row.role;
  }
  if (global == kUntyped || find_type(global) != nullptr) return PickleRole::Inert;
  return std::nullopt;
}

std::optional<DType> torch_dtype(std::string_view global) noexcept {
  const TorchTypeRow* row = find_type(global);
  return row == nullptr ? std::nullopt : row->ours;
}

i64 torch_storage_bytes(std::string_view global) noexcept {
  if (global == kUntyped) return 1;
  const TorchTypeRow* row = find_type(global);
  return row == nullptr || row->storage != global ? 0 : row->bytes;
}

i64 torch_element_bytes(std::string_view global) noexcept {
  const TorchTypeRow* row = find_type(global);
  return row == nullptr ? 0 : row->bytes;
}

std::string pickle_opcode_name(u8 op) {
  static constexpr std::pair<u8, std::string_view> kNames[] = {{'I', "INT"},
                                                               {'L', "LONG"},
                                                               {'F', "FLOAT"},
                                                               {'S', "STRING"},
                                                               {'U', "SHORT_BINSTRING"},
                                                               {'T', "BINSTRING"},
                                                               {'V', "UNICODE"},
                                                               {'0', "POP"},
                                                               {'1', "POP_MARK"},
                                                               {'2', "DUP"},
                                                               {'a', "APPEND"},
                                                               {'l', "LIST"},
                                                               {'d', "DICT"},
                                                               {'i', "INST"},
                                                               {'o', "OBJ"},
                                                               {'P', "PERSID"},
                                                               {'g', "GET"},
                                                               {'p', "PUT"},
                                                               {0x82, "EXT1"},
                                                               {0x83, "EXT2"},
                                                               {0x84, "EXT4"},
                                                               {0x8b, "LONG4"},
                                                               {0x8d, "BINUNICODE8"},
                                                               {0x8e, "BINBYTES8"},
                                                               {0x91, "FROZENSET"},
                                                               {0x92, "NEWOBJ_EX"},
                                                               {0x96, "BYTEARRAY8"},
                                                               {0x97, "NEXT_BUFFER"},
                                                               {0x98, "READONLY_BUFFER"}};
  for (const auto& [code, name] : kNames) {
    if (code == op) return std::string(name);
  }
  return fmt::format("0x{:02x}", op);
}

}  // namespace ds
