// SPDX-License-Identifier: Apache-2.0
#pragma once
// Algorithms that autotuning chose for matrix products, stored in a file (cuda.autotune_file) so that later runs use
// the same ones and get the same bits. One line per product: GPU, library, product and algorithm, separated by tabs, so
// that one file serves several GPUs and versions. Lines are only appended, each by one write under a lock, so runs and
// ranks can share a file; the first line of a product counts.

#include <map>
#include <mutex>
#include <string>

#include "base/check.h"

namespace ds {

class ProductChoices {
 public:
  // Reads the file; may_be_new: if it exists. Throws Errc::Config, which names file and line, if it has another format.
  explicit ProductChoices(std::string file, bool may_be_new = true);

  // `machine`: GPU and library, each followed by a tab. Warns if there are choices, but none for it.
  void check_machine(const std::string& machine) const;

  // `product`: GPU, library and product. Empty: unknown.
  std::string find(const std::string& product) const;
  // Appends a line, unless the product has one. Warns once if the file cannot be written.
  void add(const std::string& product, const std::string& algorithm);

 private:
  const std::string file_;
  mutable std::mutex mutex_;
  std::map<std::string, std::string> choices_;
  bool warned_ = false;
};

}  // namespace ds
