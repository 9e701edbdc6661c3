// SPDX-License-Identifier: Apache-2.0
#include "ds/units.h"

#include <gtest/gtest.h>

namespace ds {
namespace units_test {

TEST(Units, BytesAreInTheLargestUnitThatTheyFill) {
  EXPECT_EQ(bytes_text(0), "0.000 KiB");
  EXPECT_EQ(bytes_text(512), "0.500 KiB");
  EXPECT_EQ(bytes_text((1 << 20) - 1), "1023.999 KiB");
  EXPECT_EQ(bytes_text(1 << 20), "1.000 MiB");
  EXPECT_EQ(bytes_text(i64{5} << 28), "1.250 GiB");
  EXPECT_EQ(bytes_text(i64{3} << 40), "3072.000 GiB");
}

}  // namespace units_test
}  // namespace ds
