// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which algorithms autotuning chose for matrix products, kept in a file (cuda.autotune_file), so that later runs take
// the same ones and have the same bits. A line for each product: GPU, library, product and algorithm, separated by
// tabs. Lines are only ever added, each by one write under a lock, so runs and ranks share a file; of two for one
// product the first counts.

#include <map>
#include <mutex>
#include <string>

#include "base/check.h"

namespace ds {

class ProductChoices {
 public:
  // Reads the file if there is one. Throws Errc::Config, naming file and line, for one that is something else.
  explicit ProductChoices(std::string file);

  // `product`: GPU, library and product. Empty: nothing is known of it.
  std::string find(const std::string& product) const;
  // Adds a line, but for a product that has one. A file that cannot be written is a warning, the first time.
  void add(const std::string& product, const std::string& algorithm);

 private:
  const std::string file_;
  mutable std::mutex mutex_;
  std::map<std::string, std::string> choices_;
  bool warned_ = false;
};

}  // namespace ds
