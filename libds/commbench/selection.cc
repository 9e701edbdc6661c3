// SPDX-License-Identifier: Apache-2.0
#include "commbench/selection.h"

#include <algorithm>
#include <array>

#include "base/check.h"
#include "commbench/endpoint.h"
#include "commbench/sizes.h"
#include "ds/nearest.h"

namespace ds::commbench {
namespace {

using Types = std::pair<std::string_view, DType>;
constexpr std::array kTypes = {Types{"float", DType::F32},     Types{"double", DType::F64}, Types{"half", DType::F16},
                               Types{"bfloat16", DType::BF16}, Types{"int8", DType::I8},    Types{"uint8", DType::U8},
                               Types{"int32", DType::I32},     Types{"uint32", DType::U32}, Types{"int64", DType::I64},
                               Types{"uint64", DType::U64}};
using Reductions = std::pair<std::string_view, ReduceOp>;
constexpr std::array kReductions = {Reductions{"sum", ReduceOp::Sum}, Reductions{"max", ReduceOp::Max},
                                    Reductions{"min", ReduceOp::Min}};

template <class T>
std::vector<std::string> names_of(const T& table) {
  std::vector<std::string> names;
  for (const auto& row : table) names.emplace_back(row.first);
  return names;
}

[[noreturn]] void refuse(std::string_view what, std::string_view name, const std::vector<std::string>& offered) {
  const std::string_view near = nearest(name, std::vector<std::string_view>(offered.begin(), offered.end()));
  throw Error(Errc::Config, fmt::format("there is no {} '{}'; there are {}{}", what, name, fmt::join(offered, ", "),
                                        near.empty() ? "" : fmt::format("; did you mean '{}'?", near)));
}

template <class T>
auto value_of(std::string_view what, std::string_view name, const T& table) {
  const auto row = std::ranges::find(table, name, [](const auto& r) { return r.first; });
  if (row == table.end()) refuse(what, name, names_of(table));
  return row->second;
}

// Why these ranks cannot run it as asked; empty: they can.
std::string obstacle(const Operation& o, const Selection& selection, const Options& options, int ranks) {
  if (ranks < o.fewest_ranks) return fmt::format("{} needs {} ranks", o.name, o.fewest_ranks);
  if (!o.offers(selection.dtype, selection.redop)) {
    std::vector<std::string> offered;
    for (const auto& [redop_name, redop] : kReductions) {
      std::vector<std::string_view> types;
      for (const auto& [name, dtype] : kTypes)
        if (o.offers(dtype, redop)) types.push_back(name);
      if (!types.empty()) offered.push_back(fmt::format("{} of {}", redop_name, fmt::join(types, ", ")));
    }
    return fmt::format("{} does not offer {} of {}; it offers {}", o.name, selection.reduction, selection.type,
                       fmt::join(offered, "; "));
  }
  const bool folds = selection.dtype == DType::F32;
  const bool combines =
      folds || selection.dtype == DType::F64 || selection.dtype == DType::I32 || selection.dtype == DType::I64;
  if (std::ranges::find(options.backends, "openmpi") != options.backends.end() && o.reduces &&
      !(o.has_slices ? folds : combines))
    return fmt::format("Open MPI does not {} {}", o.has_slices ? "reduce-scatter" : "reduce", selection.type);
  if (options.backends.size() == 2 && o.measures_overlap)
    return fmt::format("{} cannot be compared: a line has no room for its columns", o.name);
  if (options.only_in_place && !o.has_form(true, selection.dtype))
    return fmt::format("{} does not work in place{}", o.name,
                       o.has_form(true, DType::F32) ? " in " + selection.type : "");
  if (o.has_data && selection.counts(o, options, ranks).empty())
    return fmt::format("{}: {} bytes leave no {} for each of {} ranks", o.name, options.max_bytes,
                       o.has_slices ? "16 bytes" : "element", ranks);
  return "";
}

}  // namespace

std::vector<std::string> operations() {
  std::vector<std::string> names = {"all"};
  for (const Operation& o : operation_table()) names.emplace_back(o.name);
  return names;
}

std::vector<std::string> types() { return names_of(kTypes); }

std::vector<i64> Selection::counts(const Operation& o, const Options& options, int ranks) const {
  if (!o.has_data) return {0};
  std::vector<i64> counts;
  for (const i64 bytes : list_sizes(options)) {
    const i64 count = o.count(bytes, dtype, ranks);
    if (count > 0 && (counts.empty() || count != counts.back())) counts.push_back(count);
  }
  return counts;
}

Selection select_operations(const Options& o, int ranks) {
  Selection selection{.operations = {},
                      .left_out = {},
                      .dtype = value_of("type", o.dtype, kTypes),
                      .redop = value_of("reduction", o.redop, kReductions),
                      .type = o.dtype,
                      .reduction = o.redop};
  DS_CHECK(o.min_bytes >= 1 && o.min_bytes <= o.max_bytes, Errc::Config, "there are no sizes from {} to {} bytes",
           o.min_bytes, o.max_bytes);
  DS_CHECK(o.step_bytes > 0 || o.factor >= 2 || o.min_bytes == o.max_bytes, Errc::Config,
           "sizes that grow by a factor of {} do not grow: give a larger one, or --step", o.factor);
  DS_CHECK(o.iterations >= 1 && o.warmup >= 0, Errc::Config, "{} iterations after {} to warm up", o.iterations,
           o.warmup);
  DS_CHECK(o.backends.size() < 2 || !o.stats, Errc::Config,
           "--stats has no room in a comparison: measure the backends one after the other");
  DS_CHECK(o.root >= 0 && o.root < ranks, Errc::Config, "root {} is not one of {} ranks", o.root, ranks);
  DS_CHECK(o.fault_rank < ranks, Errc::Config, "rank {} for a fault is not one of {} ranks", o.fault_rank, ranks);
  DS_CHECK(o.fault_rank < 0 || o.check, Errc::Config, "a fault is found only if elements are checked");
  DS_CHECK(!o.ops.empty() || o.matrix || o.links, Errc::Config,
           "nothing to measure: name an operation, or ask for the matrix of pairs");
  DS_CHECK((!o.matrix && !o.links) || ranks >= 2, Errc::Config, "pairs need 2 ranks or more");
  DS_CHECK(slice_count(o.bucket_bytes, dtype_bytes(selection.dtype), ranks) > 0, Errc::Config,
           "buckets of {} bytes leave no 16 bytes for each of {} ranks", o.bucket_bytes, ranks);
  for (const std::string& name : o.ops) {
    const bool all = name == "all";
    bool known = all;
    for (const Operation& operation : operation_table()) {
      if (!all && operation.name != name) continue;
      known = true;
      const std::string why = obstacle(operation, selection, o, ranks);
      DS_CHECK(why.empty() || all, Errc::Config, "{}", why);
      why.empty() ? selection.operations.push_back(&operation) : selection.left_out.push_back(why);
    }
    const bool reduces =
        std::ranges::find(kReductions, name, [](const auto& r) { return r.first; }) != kReductions.end();
    DS_CHECK(known || !reduces, Errc::Config, "'{}' is a reduction, not an operation: give it to --redop", name);
    if (!known) refuse("operation", name, operations());
  }
  DS_CHECK(o.fault_rank < 0 || std::ranges::any_of(selection.operations, &Operation::has_data), Errc::Config,
           "a fault needs an operation that moves elements");
  return selection;
}

std::vector<MessageLink> message_links(const Selection& selection, const Options& options, int ranks) {
  std::vector<MessageLink> links;
  const auto add = [&](const MessageLink& link) {
    if (std::ranges::find(links, link) == links.end()) links.push_back(link);
  };
  for (const Operation* operation : selection.operations) std::ranges::for_each(message_links(*operation, ranks), add);
  for (int step = 1; (options.matrix || options.links) && step < ranks; ++step) {
    for (int from = 0; from < ranks; ++from) add({from, (from + step) % ranks});
  }
  return links;
}

void validate(const Options& o, const RankInfo& ranks) {
  select_operations(o, ranks.world_size);
  DS_CHECK(o.backends.size() == 1 || o.backends.size() == 2, Errc::Config,
           "give one backend to measure, or two to compare");
  std::vector<std::string> resolved;
  for (const std::string& b : o.backends) {
    resolved.push_back(resolve_backend(b, ranks));
    check_backend(resolved.back(), ranks);
    DS_CHECK(o.memory == Memory::Shared || !is_over_device(resolved.back()), Errc::Config,
             "--memory ordinary is not available for backend {}, which uses GPU memory", resolved.back());
  }
  DS_CHECK(resolved.size() == 1 || resolved[0] != resolved[1], Errc::Config, "backend {} is compared with itself",
           resolved[0]);
  for (const std::string& b : resolved) check_gpus(b, ranks);
}

}  // namespace ds::commbench
