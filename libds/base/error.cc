// SPDX-License-Identifier: Apache-2.0
#include "ds/error.h"

namespace ds {

Error::Error(Errc code, const std::string& message, int rank, std::source_location where)
    : std::runtime_error(message), code_(code), rank_(rank), where_(where) {}

}  // namespace ds
