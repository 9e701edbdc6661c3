// SPDX-License-Identifier: Apache-2.0
#pragma once
// Models that are stored as codes (golden/make_coded.py), for tests that damage them.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "expect_error.h"
#include "formats/tensor_io.h"
#include "temp_directory.h"
#include "test_data.h"

namespace ds::testing {

// A model of golden/coded, whose tensors and config.json a test changes.
class CodedModel {
 public:
  explicit CodedModel(const std::string& name) {
    const std::string from = test_data("coded/" + name);
    config = Json::parse(read_file(from + "/config.json"));
    // Without the config.json, tensors are shown as they are stored.
    std::filesystem::copy_file(from + "/model.safetensors", *directory_ / "raw.safetensors");
    const auto raw = open_source(*directory_ / "raw.safetensors");
    for (const TensorInfo& t : raw->list()) {
      Tensor& own = tensors[t.name];
      own = {t.dtype, t.shape, std::string(static_cast<size_t>(t.bytes()), '\0')};
      raw->read(t.name, 0, t.numel(), own.bytes.data());
    }
  }

  struct Tensor {
    DType dtype;
    std::vector<i64> shape;
    std::string bytes;
  };
  std::map<std::string, Tensor> tensors;
  Json config;
  Json& section() { return config["quantization_config"]; }
  Json& weights() { return section()["config_groups"]["group_0"]["weights"]; }

  template <class T>
  T* data(const std::string& name) {
    return reinterpret_cast<T*>(tensors.at(name).bytes.data());
  }
  // Another type or shape, with as many bytes as that takes.
  void become(const std::string& name, DType dtype, std::vector<i64> shape) {
    const TensorInfo info{name, dtype, std::move(shape)};
    tensors[name] = {dtype, info.shape, std::string(static_cast<size_t>(info.bytes()), '\1')};
  }

  // In one file, or in two, of which the second has the tensors that `is_second` accepts.
  std::string write(const std::function<bool(const std::string&)>& is_second = {}) const {
    static int number = 0;
    const std::string dir = *directory_ / fmt::format("{}", number++);
    std::filesystem::create_directory(dir);
    write_file(dir + "/config.json", config.dump());
    if (!is_second) {
      write_some(dir + "/model.safetensors", [](const std::string&) { return true; });
      return dir;
    }
    Json index = {{"weight_map", Json::object()}};
    for (const auto& [name, t] : tensors)
      index["weight_map"][name] = is_second(name) ? "2.safetensors" : "1.safetensors";
    write_some(dir + "/1.safetensors", [&](const std::string& name) { return !is_second(name); });
    write_some(dir + "/2.safetensors", is_second);
    write_file(dir + "/model.safetensors.index.json", index.dump());
    return dir;
  }

 private:
  void write_some(const std::string& path, const std::function<bool(const std::string&)>& has) const {
    std::vector<TensorInfo> list;
    for (const auto& [name, t] : tensors)
      if (has(name)) list.push_back({name, t.dtype, t.shape});
    const auto sink = create_sink(path, FileFormat::Safetensors, list);
    for (const size_t i : sink->order())
      sink->write(list[i].name, 0, list[i].numel(), tensors.at(list[i].name).bytes.data());
    sink->finish();
  }

  std::shared_ptr<TempDirectory> directory_ = std::make_shared<TempDirectory>();
};

inline void expect_refused(Errc code, const CodedModel& model, const ::testing::Matcher<const std::string&>& text) {
  const std::string dir = model.write();
  expect_error(code, ::testing::AllOf(::testing::HasSubstr(dir), text), [&] { open_source(dir); });
}

}  // namespace ds::testing
