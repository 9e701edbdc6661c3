// SPDX-License-Identifier: Apache-2.0
#pragma once
// Errors of attention against fp64, judged by those that PyTorch makes on the same inputs.

#include <fstream>
#include <sstream>

#include "base/json.h"
#include "formats/tensor_io.h"
#include "parity/parity.h"
#include "test_data.h"

namespace ds::testing {

// A case of a generator in tests/golden: the inputs, the results in fp64, and the errors of PyTorch.
struct TorchFixture {
  TorchFixture(const std::string& folder, const std::string& case_name)
      : name(case_name), tensors(open_source(test_data(folder) + "/" + case_name + ".safetensors")) {
    std::ifstream in(test_data(folder) + "/errors.json");
    std::stringstream text;
    text << in.rdbuf();
    errors = parse_json(text.str(), "errors.json").root.at(name);
  }
  std::vector<double> read(const std::string& tensor) const {
    const TensorInfo& info = tensors->at(tensor);
    std::vector<double> values(static_cast<size_t>(info.numel()));
    const auto take = [&]<class E>(E) {
      std::vector<E> elements(values.size());
      tensors->read(tensor, 0, info.numel(), elements.data());
      for (size_t i = 0; i < values.size(); ++i) {
        if constexpr (std::is_same_v<E, bf16>) {
          values[i] = static_cast<double>(to_float(elements[i]));
        } else {
          values[i] = static_cast<double>(elements[i]);
        }
      }
    };
    info.dtype == DType::F64 ? take(double{}) : info.dtype == DType::F32 ? take(float{}) : take(bf16{});
    return values;
  }
  Tensor input(const std::string& tensor, DType dtype, std::initializer_list<i64> shape) const {
    Tensor x(dtype, shape);
    const std::vector<double> values = read(tensor);
    for (i64 i = 0; i < x.numel(); ++i) x.set(i, static_cast<float>(values[static_cast<size_t>(i)]));
    return x;
  }
  // Our error against fp64 at most twice PyTorch's, plus a floor of 1e-6 of the tensor's scale.
  void judge(const std::string& tensor, DType dtype, const Tensor& got) const {
    const std::vector<double> want = read(tensor);
    ASSERT_EQ(static_cast<i64>(want.size()), got.numel()) << tensor;
    double max_error = 0, scale = 0, sum_error = 0, sum = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      const double e = static_cast<double>(got.at(static_cast<i64>(i))) - want[i];
      ASSERT_TRUE(std::isfinite(e)) << tensor;
      max_error = std::max(max_error, std::abs(e));
      scale = std::max(scale, std::abs(want[i]));
      sum_error += e * e;
      sum += want[i] * want[i];
    }
    const Json& torch = errors.at(tensor).at(std::string(dtype_name(dtype)));
    EXPECT_LE(max_error, 2 * torch.at("max_abs").get<double>() + 1e-6 * scale)
        << name << " " << tensor << " " << dtype_name(dtype) << ": max abs";
    EXPECT_LE(std::sqrt(sum_error), (2 * torch.at("rel_l2").get<double>() + 1e-6) * std::sqrt(sum))
        << name << " " << tensor << " " << dtype_name(dtype) << ": relative L2";
  }

  std::string name;
  std::unique_ptr<TensorSource> tensors;
  Json errors;
};

}  // namespace ds::testing
