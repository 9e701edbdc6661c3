// SPDX-License-Identifier: Apache-2.0
// Attention by cuDNN's backend API. The library is opened at first use and never linked, so programs that do not use it
// start without its 500 MB. Graphs consist of primitive operations instead of the composite SDPA operations, since
// those of cuDNN 9.19 have no attributes for a causal mask (added in 9.21) or a deterministic backward pass. Before
// 9.16 the backward pass is wrong if S is not a multiple of 128, unless the graph masks the rest, so older libraries
// are refused; 9.16 and later 9.x with the same soname take the same graphs.

#include <cudnn_backend.h>
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "cuda/attention_cudnn.h"
#include "cuda/context.h"

namespace ds::cuda {
namespace cudnn {
namespace {

constexpr const char* kLibrary = "libcudnn.so.9";
constexpr size_t kOldest = 91600;

struct Library {
  decltype(&cudnnGetVersion) version = nullptr;
  decltype(&cudnnGetErrorString) error_string = nullptr;
  decltype(&cudnnGetLastErrorString) last_error = nullptr;
  decltype(&cudnnCreate) create = nullptr;
  decltype(&cudnnDestroy) destroy = nullptr;
  decltype(&cudnnSetStream) set_stream = nullptr;
  decltype(&cudnnBackendCreateDescriptor) create_descriptor = nullptr;
  decltype(&cudnnBackendDestroyDescriptor) destroy_descriptor = nullptr;
  decltype(&cudnnBackendSetAttribute) set = nullptr;
  decltype(&cudnnBackendGetAttribute) get = nullptr;
  decltype(&cudnnBackendFinalize) finalize = nullptr;
  decltype(&cudnnBackendExecute) execute = nullptr;
  std::string file;
  std::string error;  // empty: it can be used

  // Opens the first of these files that can be used.
  explicit Library(std::span<const std::string> candidates) {
    std::string reasons;
    for (const std::string& candidate : candidates) {
      const int before = open_parts();
      // Stays open, since plans may outlive everything else.
      void* const so = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL);
      const char* const reason = so == nullptr ? dlerror() : nullptr;
      error = reason != nullptr ? reason : "";
      if (so != nullptr) {
        const link_map* map = nullptr;
        file = dlinfo(so, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr ? map->l_name : candidate;
        if (const size_t named = version_in_name(file); named > 0 && named < kOldest) {
          error = too_old(named);  // and has not opened its parts
        } else {
          resolve(so);
        }
        if (error.empty()) return;
        dlclose(so);
      }
      reasons += (reasons.empty() ? "" : "; ") + error;
      // When asked for its version a library opens its parts, which stay loaded; another library would then get those
      // instead of its own.
      if (open_parts() > before) {
        reasons += "; no other can be taken beside it: name the folder of a later one in LD_LIBRARY_PATH";
        break;
      }
    }
    error = reasons.empty() ? std::string("there is no ") + kLibrary : reasons;
  }

 private:
  static int open_parts() {
    int parts = 0;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* count) {
          const bool is_part = std::string_view(info->dlpi_name).find("/libcudnn_") != std::string_view::npos;
          *static_cast<int*>(count) += is_part ? 1 : 0;
          return 0;
        },
        &parts);
    return parts;
  }

  void resolve(void* so) {
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(so, name));
      if (function == nullptr && error.empty()) error = file + " has no " + name;
    };
    find(version, "cudnnGetVersion");
    find(error_string, "cudnnGetErrorString");
    find(last_error, "cudnnGetLastErrorString");
    find(create, "cudnnCreate");
    find(destroy, "cudnnDestroy");
    find(set_stream, "cudnnSetStream");
    find(create_descriptor, "cudnnBackendCreateDescriptor");
    find(destroy_descriptor, "cudnnBackendDestroyDescriptor");
    find(set, "cudnnBackendSetAttribute");
    find(get, "cudnnBackendGetAttribute");
    find(finalize, "cudnnBackendFinalize");
    find(execute, "cudnnBackendExecute");
    if (error.empty() && version() < kOldest) error = too_old(version());
  }
  std::string too_old(size_t v) const {
    return file + " is version " + std::to_string(v) + ", and attention needs at least " + std::to_string(kOldest);
  }
  // From the file name behind the distribution's link, libcudnn.so.9.14.0; 0: unknown.
  static size_t version_in_name(const std::string& file) {
    std::error_code error;
    const std::string name = std::filesystem::canonical(file, error).filename().string();
    size_t major = 0, minor = 0, patch = 0;
    return std::sscanf(name.c_str(), "libcudnn.so.%zu.%zu.%zu", &major, &minor, &patch) == 3
               ? major * 10000 + minor * 100 + patch
               : 0;
  }
};

// Opened by the first call, for the process.
const Library& library(std::span<const std::string> candidates) {
  static const Library x(candidates);
  return x;
}
const Library& library() {
  static const std::string name = kLibrary;
  return library({&name, 1});
}

template <class T>
constexpr cudnnBackendAttributeType_t kTypeOf = CUDNN_TYPE_BACKEND_DESCRIPTOR;
template <>
constexpr cudnnBackendAttributeType_t kTypeOf<bool> = CUDNN_TYPE_BOOLEAN;
template <>
constexpr cudnnBackendAttributeType_t kTypeOf<char> = CUDNN_TYPE_CHAR;
template <>
constexpr cudnnBackendAttributeType_t kTypeOf<i64> = CUDNN_TYPE_INT64;
template <>
constexpr cudnnBackendAttributeType_t kTypeOf<float> = CUDNN_TYPE_FLOAT;
template <>
constexpr cudnnBackendAttributeType_t kTypeOf<cudnnDataType_t> = CUDNN_TYPE_DATA_TYPE;
template <>
constexpr cudnnBackendAttributeType_t kTypeOf<cudnnPointwiseMode_t> = CUDNN_TYPE_POINTWISE_MODE;
template <>
constexpr cudnnBackendAttributeType_t kTypeOf<cudnnReduceTensorOp_t> = CUDNN_TYPE_REDUCTION_OPERATOR_TYPE;
template <>
constexpr cudnnBackendAttributeType_t kTypeOf<cudnnBackendHeurMode_t> = CUDNN_TYPE_HEUR_MODE;
template <>
constexpr cudnnBackendAttributeType_t kTypeOf<cudnnHandle_t> = CUDNN_TYPE_HANDLE;

// The first failure of a series of calls; later calls are skipped.
class Errors {
 public:
  bool ok() const noexcept { return text_.empty(); }
  const std::string& text() const noexcept { return text_; }
  void report(std::string text) {
    if (ok()) text_ = std::move(text);
  }
  bool check(cudnnStatus_t status, const char* call, const char* what) {
    if (status == CUDNN_STATUS_SUCCESS) return true;
    std::array<char, 1024> details{};
    library().last_error(details.data(), details.size());
    report(std::string(call) + ", " + what + ": " + library().error_string(status) + ": " + details.data());
    return false;
  }
  bool check_attribute(cudnnStatus_t status, const char* call, cudnnBackendAttributeName_t name, const char* what) {
    return status == CUDNN_STATUS_SUCCESS || check(status, (call + std::to_string(name)).c_str(), what);
  }

 private:
  std::string text_;
};

class Descriptor {
 public:
  Descriptor() = default;
  Descriptor(Errors& errors, cudnnBackendDescriptorType_t type, const char* what) : errors_(&errors), what_(what) {
    if (errors.ok()) errors.check(library().create_descriptor(type, &pointer_), "cudnnBackendCreateDescriptor", what);
  }
  ~Descriptor() {
    if (pointer_ != nullptr) library().destroy_descriptor(pointer_);
  }
  Descriptor(Descriptor&& other) noexcept { *this = std::move(other); }
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(pointer_, other.pointer_);
    std::swap(errors_, other.errors_);
    std::swap(what_, other.what_);
    return *this;
  }

  cudnnBackendDescriptor_t pointer() const noexcept { return pointer_; }

  template <class T>
  void set(cudnnBackendAttributeName_t name, std::span<const T> values) {
    set_raw(name, kTypeOf<T>, static_cast<i64>(values.size()), values.data());
  }
  template <class T>
  void set(cudnnBackendAttributeName_t name, const T& value) {
    set_raw(name, kTypeOf<T>, 1, &value);
  }
  void set(cudnnBackendAttributeName_t name, const Descriptor& value) {
    set_raw(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value.pointer_);
  }
  void set_pointers(cudnnBackendAttributeName_t name, std::span<void* const> values) {
    set_raw(name, CUDNN_TYPE_VOID_PTR, static_cast<i64>(values.size()), values.data());
  }
  // Returns the number of elements, and writes up to `count` of them to `values`.
  i64 get(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, i64 count, void* values) const {
    i64 available = 0;
    if (!errors_->ok()) return 0;
    const cudnnStatus_t status = library().get(pointer_, name, type, count, &available, values);
    if (!errors_->check_attribute(status, "cudnnBackendGetAttribute ", name, what_)) return 0;
    return available;
  }
  void finalize() {
    if (errors_->ok()) errors_->check(library().finalize(pointer_), "cudnnBackendFinalize", what_);
  }

 private:
  void set_raw(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, i64 count, const void* values) {
    if (!errors_->ok()) return;
    errors_->check_attribute(library().set(pointer_, name, type, count, values), "cudnnBackendSetAttribute ", name,
                             what_);
  }

  cudnnBackendDescriptor_t pointer_ = nullptr;
  Errors* errors_ = nullptr;
  const char* what_ = "";
};

cudnnDataType_t data_type(Type t) noexcept {
  switch (t) {
    case Type::F32: return CUDNN_DATA_FLOAT;
    case Type::BF16: return CUDNN_DATA_BFLOAT16;
    case Type::F16: return CUDNN_DATA_HALF;
    case Type::I32: return CUDNN_DATA_INT32;
    case Type::Bool: return CUDNN_DATA_BOOLEAN;
  }
  return CUDNN_DATA_FLOAT;
}

cudnnPointwiseMode_t pointwise_mode(GraphOp op) noexcept {
  switch (op) {
    case GraphOp::Index: return CUDNN_POINTWISE_GEN_INDEX;
    case GraphOp::Mul: return CUDNN_POINTWISE_MUL;
    case GraphOp::Add: return CUDNN_POINTWISE_ADD;
    case GraphOp::Sub: return CUDNN_POINTWISE_SUB;
    case GraphOp::Div: return CUDNN_POINTWISE_DIV;
    case GraphOp::Exp: return CUDNN_POINTWISE_EXP;
    case GraphOp::Log: return CUDNN_POINTWISE_LOG;
    case GraphOp::GreaterEqual: return CUDNN_POINTWISE_CMP_GE;
    case GraphOp::Select: return CUDNN_POINTWISE_BINARY_SELECT;
    case GraphOp::Matmul:
    case GraphOp::Transpose:
    case GraphOp::Max:
    case GraphOp::Sum: break;
  }
  return CUDNN_POINTWISE_IDENTITY;
}

// A graph's descriptors; those of the operations refer to the others.
struct GraphDescriptors {
  std::unordered_map<i64, Descriptor> tensors;
  std::vector<Descriptor> parts, operations;
  Descriptor graph;
};

class GraphBuilder {
 public:
  GraphBuilder(Errors& errors, GraphDescriptors& out) : errors_(errors), out_(out) {}

  void build(const Graph& graph, cudnnHandle_t handle) {
    for (const GraphTensor& t : graph.tensors) add(t);
    for (const GraphNode& n : graph.nodes) add(n);
    std::vector<cudnnBackendDescriptor_t> operations;
    for (const Descriptor& d : out_.operations) operations.push_back(d.pointer());
    out_.graph = Descriptor(errors_, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, "operation graph");
    if (handle != nullptr) {
      // Deprecated in favour of a description of the device's properties; therefore given by number.
      constexpr auto kHandle = static_cast<cudnnBackendAttributeName_t>(800);
      out_.graph.set(kHandle, handle);
    }
    out_.graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, std::span<const cudnnBackendDescriptor_t>(operations));
    out_.graph.finalize();
  }

 private:
  void add(const GraphTensor& t) {
    Descriptor d(errors_, CUDNN_BACKEND_TENSOR_DESCRIPTOR, "tensor");
    d.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, t.uid);
    d.set(CUDNN_ATTR_TENSOR_DATA_TYPE, data_type(t.type));
    d.set(CUDNN_ATTR_TENSOR_DIMENSIONS, std::span<const i64>(t.dim));
    d.set(CUDNN_ATTR_TENSOR_STRIDES, std::span<const i64>(t.stride));
    d.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, i64{16});
    d.set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, t.is_inner);
    d.set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, t.is_number);
    d.finalize();
    out_.tensors.emplace(t.uid, std::move(d));
  }

  void add(const GraphNode& n) {
    const auto tensor = [&](i64 uid) -> const Descriptor& { return out_.tensors.at(uid); };
    Descriptor operation;
    switch (n.op) {
      case GraphOp::Matmul: {
        Descriptor part(errors_, CUDNN_BACKEND_MATMUL_DESCRIPTOR, "matmul");
        part.set(CUDNN_ATTR_MATMUL_COMP_TYPE, data_type(n.compute));
        operation = Descriptor(errors_, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, "matmul operation");
        operation.set(CUDNN_ATTR_OPERATION_MATMUL_DESC, keep(std::move(part)));
        operation.set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, tensor(n.x));
        operation.set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, tensor(n.b));
        operation.set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, tensor(n.y));
        break;
      }
      case GraphOp::Transpose:
        operation = Descriptor(errors_, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, "reshape operation");
        operation.set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, tensor(n.x));
        operation.set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, tensor(n.y));
        break;
      case GraphOp::Max:
      case GraphOp::Sum: {
        Descriptor part(errors_, CUDNN_BACKEND_REDUCTION_DESCRIPTOR, "reduction");
        part.set(CUDNN_ATTR_REDUCTION_COMP_TYPE, data_type(n.compute));
        part.set(CUDNN_ATTR_REDUCTION_OPERATOR,
                 n.op == GraphOp::Max ? CUDNN_REDUCE_TENSOR_MAX : CUDNN_REDUCE_TENSOR_ADD);
        operation = Descriptor(errors_, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, "reduction operation");
        operation.set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, keep(std::move(part)));
        operation.set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, tensor(n.x));
        operation.set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, tensor(n.y));
        break;
      }
      default: {
        Descriptor part(errors_, CUDNN_BACKEND_POINTWISE_DESCRIPTOR, "pointwise");
        part.set(CUDNN_ATTR_POINTWISE_MODE, pointwise_mode(n.op));
        part.set(CUDNN_ATTR_POINTWISE_MATH_PREC, data_type(n.compute));
        if (n.op == GraphOp::Index) part.set(CUDNN_ATTR_POINTWISE_AXIS, i64{n.axis});
        operation = Descriptor(errors_, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, "pointwise operation");
        operation.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, keep(std::move(part)));
        operation.set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, tensor(n.x));
        if (n.b != 0) operation.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, tensor(n.b));
        if (n.t != 0) operation.set(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, tensor(n.t));
        operation.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, tensor(n.y));
        break;
      }
    }
    operation.finalize();
    out_.operations.push_back(std::move(operation));
  }

  const Descriptor& keep(Descriptor&& part) {
    part.finalize();
    out_.parts.push_back(std::move(part));
    return out_.parts.back();
  }

  Errors& errors_;
  GraphDescriptors& out_;
};

// The target of a plan: the device of a handle, or a described one.
struct Target {
  cudnnHandle_t handle = nullptr;
  const Descriptor* properties = nullptr;
};

struct Offer {
  Candidate candidate;
  Descriptor config;
};

// The offers of one heuristics mode. A mode without offers is not an error; `reason` then states why, if known.
std::vector<Offer> offers_of(const Descriptor& graph, const Target& target, cudnnBackendHeurMode_t mode,
                             Errors& reason) {
  Descriptor heuristics(reason, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, "heuristics");
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_MODE, mode);
  if (target.properties != nullptr) heuristics.set(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, *target.properties);
  heuristics.finalize();
  i64 count = heuristics.get(CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, nullptr);
  std::vector<Offer> offers;
  std::vector<cudnnBackendDescriptor_t> pointers;
  for (i64 i = 0; i < count; ++i) {
    offers.push_back({{}, Descriptor(reason, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, "engine configuration")});
    pointers.push_back(offers.back().config.pointer());
  }
  if (count > 0) {  // fewer may be returned: those that this device can run
    count = heuristics.get(CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, count, pointers.data());
  }
  offers.resize(count);
  for (Offer& offer : offers) {
    Candidate& c = offer.candidate;
    const Descriptor engine(reason, CUDNN_BACKEND_ENGINE_DESCRIPTOR, "engine");
    cudnnBackendDescriptor_t pointer = engine.pointer();
    offer.config.get(CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &pointer);
    offer.config.get(CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &c.workspace_bytes);
    engine.get(CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &c.engine);
    std::array<cudnnBackendNumericalNote_t, CUDNN_NUMERICAL_NOTE_TYPE_COUNT> notes{};
    const i64 num_notes = engine.get(CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                                     static_cast<i64>(notes.size()), notes.data());
    const auto end = notes.begin() + std::min<i64>(num_notes, static_cast<i64>(notes.size()));
    c.deterministic = reason.ok() && std::find(notes.begin(), end, CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) == end;
  }
  if (!reason.ok()) offers.clear();
  return offers;
}

// Lives as long as the engine. An execution plan refers to its configuration and graph.
struct Plan {
  Errors errors;
  AttentionSlices slices;
  GraphDescriptors graph;
  Descriptor config, plan;
  i64 workspace_bytes = 0;
};

// Creates a plan from the first deterministic offer that allows it.
void find_plan(Plan& out, cudnnHandle_t handle) {
  const Target target = {.handle = handle};
  GraphBuilder(out.errors, out.graph).build(attention_graph(out.slices.shape), handle);
  if (!out.errors.ok()) return;
  Errors reason;
  int offered = 0, passed_over = 0;
  for (const cudnnBackendHeurMode_t mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
    Errors refusal;
    for (Offer& offer : offers_of(out.graph.graph, target, mode, refusal)) {
      ++offered;
      if (!offer.candidate.deterministic) {
        ++passed_over;
        continue;
      }
      Errors errors;  // a refusal is not an error: there may be other engines
      Descriptor plan(errors, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, "execution plan");
      plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, offer.config);
      plan.finalize();
      plan.get(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &out.workspace_bytes);
      if (errors.ok()) {
        out.config = std::move(offer.config);
        out.plan = std::move(plan);
        return;
      }
      reason.report(errors.text());
    }
    reason.report(refusal.text());
  }
  out.errors.report("no deterministic plan for this attention: " + std::to_string(offered) + " engines offered, " +
                    std::to_string(passed_over) + " of them not deterministic; " + reason.text());
}

}  // namespace

LibraryChoice choose_library(std::span<const std::string> candidates) {
  const Library x(candidates);
  return {.file = x.error.empty() ? x.file : "", .error = x.error};
}

const char* library_error() noexcept { return library().error.empty() ? nullptr : library().error.c_str(); }

Candidates find_candidates(const AttentionShape& shape, std::string_view device_properties) {
  Candidates out;
  if (library_error() != nullptr) {
    out.error = library_error();
    return out;
  }
  Errors errors;
  Descriptor properties(errors, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, "device properties");
  properties.set(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION,
                 std::span<const char>(device_properties.data(), device_properties.size()));
  properties.finalize();
  GraphDescriptors graph;
  GraphBuilder(errors, graph).build(attention_graph(shape), nullptr);
  for (const cudnnBackendHeurMode_t mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
    if (!errors.ok()) break;
    Errors reason;
    for (const Offer& offer : offers_of(graph.graph, {.properties = &properties}, mode, reason)) {
      out.list.push_back(offer.candidate);
    }
  }
  out.error = errors.text();
  return out;
}

}  // namespace cudnn

using namespace cudnn;  // NOLINT: the rest of this file is about nothing else

struct CudnnAttention::Impl {
  Context& context;
  cudnnHandle_t handle = nullptr;
  std::string name, error;  // of the library
  std::string failure;      // of a call; the context refers to it
  std::unordered_map<AttentionShape, Plan, AttentionShapeHash> plans;

  explicit Impl(Context& c) noexcept : context(c) {
    if (!library(c.options().cudnn).error.empty()) {
      error = library().error;
      return;
    }
    int device = 0, capability = 0;
    context.check(cudaGetDevice(&device), "cudaGetDevice");
    context.check(cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, device),
                  "cudaDeviceGetAttribute");
    if (!serves(capability)) {
      error = "compute capability " + std::to_string(capability) + " is not among those that it is used for, 8 and 9";
      return;
    }
    Errors errors;
    if (!errors.check(library().create(&handle), "cudnnCreate", "handle")) {
      handle = nullptr;
    } else {
      errors.check(library().set_stream(handle, context.stream()), "cudnnSetStream", "handle");
    }
    if (errors.ok()) {
      const size_t v = library().version();
      name = "cuDNN " + std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." + std::to_string(v % 100);
      if (c.options().note) c.options().note("attention by " + library().file);
      return;
    }
    error = errors.text();
    if (handle != nullptr) library().destroy(handle);
    handle = nullptr;
  }
  ~Impl() {
    plans.clear();
    if (handle != nullptr) library().destroy(handle);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void report(const Errors& errors) noexcept {
    if (errors.ok() || !failure.empty()) return;
    failure = errors.text();
    context.fail(failure.c_str(), "attention by cuDNN");
  }

  Plan& plan_for(const AttentionShape& shape) noexcept {
    const auto [at, is_new] = plans.try_emplace(shape);
    Plan& plan = at->second;
    if (is_new) {
      plan.slices = slices_of(shape);
      find_plan(plan, handle);
    }
    return plan;
  }
};

CudnnAttention::CudnnAttention(Context& context) : impl_(std::make_unique<Impl>(context)) {}
CudnnAttention::~CudnnAttention() = default;

const std::string& CudnnAttention::name() const noexcept { return impl_->name; }
const std::string& CudnnAttention::error() const noexcept { return impl_->error; }

std::string CudnnAttention::prepare(std::span<const AttentionShape> shapes) {
  if (impl_->handle == nullptr) return impl_->error;
  for (const AttentionShape& shape : shapes) {
    if (const Plan& plan = impl_->plan_for(shape); !plan.errors.ok()) return plan.errors.text();
  }
  return {};
}

bool CudnnAttention::run(const AttentionCall& call) noexcept {
  Impl& x = *impl_;
  if (x.handle == nullptr || refusal(call) != nullptr) return false;
  Plan& plan = x.plan_for(shape_of(call));
  if (!plan.errors.ok()) {
    x.report(plan.errors);
    return true;
  }
  const AttentionShape& s = plan.slices.shape;

  const i64 sums_bytes = row_sums_bytes(s);
  const i64 scratch_bytes = sums_bytes + plan.workspace_bytes;
  char* const scratch = static_cast<char*>(x.context.scratch(static_cast<size_t>(scratch_bytes)));
  if (scratch == nullptr && scratch_bytes > 0) return true;  // reported by scratch

  float scale = call.params.scale, minus_infinity = -std::numeric_limits<float>::infinity(), one = 1;
  i32 num_queries = static_cast<i32>(s.T), num_keys = static_cast<i32>(s.S);
  Errors errors;
  for (const AttentionSlice& slice : plan.slices.slices) {
    const i64 R = s.H / s.G;
    std::vector<i64> uids;
    std::vector<void*> pointers;
    const auto bind = [&](i64 uid, void* p) {
      uids.push_back(uid);
      pointers.push_back(p);
    };
    const auto bind_view = [&](i64 uid, const TensorView& v, i64 head) {
      const i64 at = slice.batch * v.stride[0] + head * v.stride[2];
      bind(uid, v.as<char>() + at * dtype_bytes(v.dtype));
    };
    const i64 group = slice.group, head = group * R;
    bind_view(kQ, call.q, head);
    bind_view(kK, call.k, group);
    bind_view(kV, call.v, group);
    bind_view(kO, call.o, head);
    bind(kLse, call.lse.as<float>() + (slice.batch * call.q.dim(2) + head) * s.T);
    bind(kScale, &scale);
    if (s.causal) bind(kMinusInfinity, &minus_infinity);
    if (s.causal && s.T != s.S) {
      bind(kNumQueries, &num_queries);
      bind(kNumKeys, &num_keys);
    }
    if (call.backward) {
      bind_view(kDq, call.dq, head);
      bind_view(kDk, call.dk, group);
      bind_view(kDv, call.dv, group);
      bind_view(kDout, call.dout, head);
      bind(kRowSums, scratch);
      bind(kOne, &one);
    }
    Descriptor pack(errors, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, "variant pack");
    pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, std::span<const i64>(uids));
    pack.set_pointers(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, pointers);
    void* const workspace = scratch + sums_bytes;
    pack.set_pointers(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, {&workspace, 1});
    pack.finalize();
    if (errors.ok()) {
      errors.check(library().execute(x.handle, plan.plan.pointer(), pack.pointer()), "cudnnBackendExecute",
                   call.backward ? "attention_bwd" : "attention_fwd");
    }
  }
  x.report(errors);
  return true;
}

}  // namespace ds::cuda
