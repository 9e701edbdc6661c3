// SPDX-License-Identifier: Apache-2.0
#pragma once
// An error of the library is one of its class and of its words.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "ds/error.h"

namespace ds::testing {

// action() throws ds::Error with this code and such a message.
inline void expect_error(Errc code, const ::testing::Matcher<const std::string&>& text,
                         const std::function<void()>& action) {
  try {
    action();
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(static_cast<int>(e.code()), static_cast<int>(code)) << e.what();
    EXPECT_THAT(std::string(e.what()), text);
  }
}

}  // namespace ds::testing
