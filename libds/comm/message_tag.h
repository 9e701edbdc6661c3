// SPDX-License-Identifier: Apache-2.0
#pragma once
// The names under which calls of communicators are counted, shown and traced: an axis of the mesh and a collective,
// "dp.reduce_scatter". These texts are written nowhere else.

#include <algorithm>
#include <array>
#include <iterator>
#include <string>
#include <string_view>

#include "ds/axis.h"
#include "ds/kernels/dtype.h"

namespace ds {

enum class Collective : u8 {
  ReduceScatter,
  AllGather,
  AllReduce,
  AllToAll,
  AllToAllV,
  Broadcast,
  Send,
  Recv,
  SparseGather,  // comm/nonzero_blocks
  OneBit,        // comm/one_bit: an all-gather, preceded by an exchange of as many bytes
  Stats,         // small calls of any kind
  Other,         // calls under names that are not listed here, such as those of a model of the user's
};

inline constexpr std::string_view kCollectives[] = {"reduce_scatter", "all_gather", "all_reduce", "all_to_all",
                                                    "all_to_allv",    "broadcast",  "send",       "recv",
                                                    "sparse_gather",  "one_bit",    "stats",      "other"};

constexpr std::string_view collective_name(Collective c) noexcept { return kCollectives[static_cast<size_t>(c)]; }

struct MessageText {
  std::array<char, 24> data{};
  size_t size = 0;
  constexpr void add(std::string_view part) {
    std::ranges::copy(part, data.begin() + size);
    size += part.size();
  }
};
inline constexpr auto kMessageTexts = [] {
  std::array<std::array<MessageText, std::size(kCollectives)>, std::size(kAxes)> texts;
  for (size_t a = 0; a < texts.size(); ++a) {
    for (size_t c = 0; c < texts[a].size(); ++c) {
      for (const std::string_view part : {kAxes[a], std::string_view("."), kCollectives[c]}) texts[a][c].add(part);
    }
  }
  return texts;
}();

// The text of a call over any axis but Split.
constexpr std::string_view message_text(Axis axis, Collective c) noexcept {
  const MessageText& text = kMessageTexts[static_cast<size_t>(axis)][static_cast<size_t>(c)];
  return {text.data.data(), text.size};
}
inline constexpr std::string_view kStatsText = message_text(Axis::Dp, Collective::Stats);  // over dp, or the world
// The text of a call over an axis or a split of that name.
inline std::string message_text(std::string_view axis, Collective c) {
  return std::string(axis).append(".").append(collective_name(c));
}

// The tag of a text.
struct MessageTag {
  Axis axis;
  Collective collective;
};
constexpr MessageTag message_tag(std::string_view text) noexcept {
  const size_t dot = std::min(text.rfind('.'), text.size());
  MessageTag tag{Axis::Split, Collective::Other};
  for (size_t a = 0; a < std::size(kAxes); ++a) {
    if (text.substr(0, dot) == kAxes[a]) tag.axis = static_cast<Axis>(a);
  }
  for (size_t c = 0; c < std::size(kCollectives); ++c) {
    if (text.substr(std::min(dot + 1, text.size())) == kCollectives[c]) tag.collective = static_cast<Collective>(c);
  }
  return tag;
}

}  // namespace ds
