// SPDX-License-Identifier: Apache-2.0
#include "memreport/machine.h"

#include <algorithm>
#include <cmath>

#include "base/json.h"

namespace ds::memreport {

double Rate::at(double size) const noexcept {
  const auto above = std::ranges::upper_bound(points_, size, {}, &std::pair<double, double>::first);
  if (above == points_.begin()) return points_.front().second;
  if (above == points_.end()) return points_.back().second;
  const auto& [size0, rate0] = *std::prev(above);
  const auto& [size1, rate1] = *above;
  const double part = std::log(size / size0) / std::log(size1 / size0);
  return rate0 + part * (rate1 - rate0);
}

namespace {

// The rates of an op in a type; null: unknown.
const Rate* find(const OpRates& rates, std::string_view op, DType dtype) noexcept {
  const auto by_type = rates.find(op);
  if (by_type == rates.end()) return nullptr;
  const auto rate = by_type->second.find(dtype);
  return rate == by_type->second.end() || rate->second.empty() ? nullptr : &rate->second;
}

}  // namespace

double Machine::matmul_flops(DType dtype) const {
  const Rate* rate = find(flops, "matmul", dtype);
  DS_CHECK(rate != nullptr, Errc::Config, "the machine \"{}\" has no rate of products in {}", device,
           dtype_name(dtype));
  return rate->points().back().second;
}

double Machine::seconds(const plan::OpCall& call) const {
  double s = op_overhead_s;
  if (call.flops > 0) {
    const double all = static_cast<double>(call.flops);
    const bool by_head = call.op != "matmul" && call.shape[0] > 0;
    const Rate* rate = find(flops, call.op, call.dtype);
    s = std::max(s, rate != nullptr ? all / rate->at(by_head ? all / static_cast<double>(call.shape[0]) : all)
                                    : all / matmul_flops(call.dtype));
  }
  if (call.bytes > 0 && !memory.empty()) {
    const double bytes_per_call = static_cast<double>(call.bytes);
    double rate = memory.at(bytes_per_call);
    if (const Rate* own = find(bytes, call.op, call.dtype)) rate = std::min(rate, own->at(bytes_per_call));
    s = std::max(s, bytes_per_call / rate);
  }
  return s;
}

double Machine::seconds(const plan::OpTally& tally) const {
  double s = 0;
  for (const auto& [call, n] : tally.calls()) s += static_cast<double>(n) * seconds(call);
  return s;
}

Machine machine_of_peaks(DType dtype, double matmul_flops, double memory_bandwidth, int ranks_per_node) {
  Machine m;
  m.device = "peaks";
  m.ranks_per_node = m.cores = ranks_per_node;
  m.own_stream = true;
  m.flops["matmul"][dtype] = Rate(matmul_flops);
  if (memory_bandwidth > 0) m.memory = Rate(memory_bandwidth);
  return m;
}

namespace {

constexpr DType kTypes[] = {DType::F32, DType::BF16, DType::F16, DType::F8E4M3};

Json rate_json(const Rate& rate) {
  Json points = Json::array();
  for (const auto& [size, per_s] : rate.points()) points.push_back({size, per_s});
  return points;
}

Json rates_json(const OpRates& rates) {
  Json ops = Json::object();
  for (const auto& [op, by_type] : rates) {
    for (const auto& [dtype, rate] : by_type) ops[op][std::string(dtype_name(dtype))] = rate_json(rate);
  }
  return ops;
}

Rate read_rate(const Json& points) {
  std::vector<std::pair<double, double>> read;
  for (const Json& p : points) {
    read.emplace_back(p.at(0).get<double>(), p.at(1).get<double>());
    const bool ascends = read.size() == 1 || read[read.size() - 2].first < read.back().first;
    DS_CHECK(ascends && read.back().first > 0 && read.back().second > 0, Errc::Config,
             "sizes must ascend, and they and rates be above zero");
  }
  DS_CHECK(!read.empty(), Errc::Config, "a rate has no points");
  return Rate(std::move(read));
}

OpRates read_rates(const Json& ops) {
  OpRates rates;
  for (const auto& [op, by_type] : ops.items()) {
    for (const auto& [name, points] : by_type.items()) {
      const auto dtype = std::ranges::find(kTypes, name, [](DType t) { return dtype_name(t); });
      DS_CHECK(dtype != std::end(kTypes), Errc::Config, "\"{}\" is none of fp32, bf16, fp16, fp8_e4m3", name);
      rates[op][*dtype] = read_rate(points);
    }
  }
  return rates;
}

}  // namespace

std::string machine_json(const Machine& m) {
  const Json document = {{"schema", "ds-machine/1"},
                         {"device", m.device},
                         {"ranks_per_node", m.ranks_per_node},
                         {"threads", m.threads},
                         {"cores", m.cores},
                         {"own_stream", m.own_stream},
                         {"op_overhead_s", m.op_overhead_s},
                         {"flops_per_s", rates_json(m.flops)},
                         {"memory_bytes_per_s", rate_json(m.memory)},
                         {"bytes_per_s", rates_json(m.bytes)}};
  return document.dump(2) + "\n";
}

Machine read_machine(std::string_view json, std::string_view name) {
  const Json root = parse_json(json, name, {.places = false}).root;
  try {
    DS_CHECK(root.is_object() && root.value("schema", "") == "ds-machine/1", Errc::Config,
             "no document of the schema ds-machine/1");
    Machine m;
    const auto count = [&](const char* key) { return static_cast<int>(json_integer(root, key, 1, i64{1} << 24)); };
    m.device = root.at("device").get<std::string>();
    m.ranks_per_node = count("ranks_per_node");
    m.threads = count("threads");
    m.cores = count("cores");
    m.own_stream = root.at("own_stream").get<bool>();
    m.op_overhead_s = root.at("op_overhead_s").get<double>();
    DS_CHECK(m.op_overhead_s >= 0, Errc::Config, "op_overhead_s is below 0");
    m.flops = read_rates(root.at("flops_per_s"));
    m.memory = read_rate(root.at("memory_bytes_per_s"));
    m.bytes = read_rates(root.at("bytes_per_s"));
    return m;
  } catch (const Json::exception& e) {
    throw Error(Errc::Config, fmt::format("{}: {}", name, json_reason(e)));
  } catch (const Error& e) {
    throw Error(e.code(), fmt::format("{}: {}", name, e.what()));
  }
}

}  // namespace ds::memreport
