// SPDX-License-Identifier: Apache-2.0
#pragma once
// Records under the names that other programs give their members (Alpaca, ShareGPT, Dolly and their kin): not read, but
// recognised, so that a message can end with the command that converts the file.

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace ds {

// The filter of jq that makes of such a record one that is read: "{text: .content}"; empty: it is not recognised.
std::string jq_filter_for(const nlohmann::json& record);

}  // namespace ds
