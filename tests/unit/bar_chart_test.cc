// SPDX-License-Identifier: Apache-2.0
#include "chart/bar_chart.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <locale>
#include <map>
#include <random>
#include <set>
#include <sstream>

#include "device/memory.h"
#include "ds/units.h"
#include "well_formed.h"

namespace ds::chart {
namespace bar_chart_test {

using ds::testing::malformed;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr i64 kGiB = i64{1} << 30;

BarChart small() {
  return {
      .title = "memory per rank",
      .bars = {{.label = "rank 0",
                .predicted = {{"params", 4 * kGiB}, {"grads", 2 * kGiB}, {"optimizer", 8 * kGiB}},
                .worst = true},
               {.label = "rank 1", .predicted = {{"params", 4 * kGiB}, {"grads", 2 * kGiB}, {"optimizer", 6 * kGiB}}}}};
}

BarChart counted() {
  BarChart chart = small();
  for (Bar& bar : chart.bars) {
    bar.measured = bar.predicted;
    bar.measured[1].bytes = 3 * kGiB;
  }
  return chart;
}

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> result;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) result.push_back(line);
  return result;
}

size_t count(std::string_view text, std::string_view what) {
  size_t n = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
  return n;
}

std::string without_colour(std::string text) {
  for (size_t at; (at = text.find('\x1b')) != std::string::npos;) text.erase(at, text.find('m', at) + 1 - at);
  return text;
}

TEST(BarText, ShowsStackedBarsAndSums) {
  EXPECT_EQ(bar_text(small(), {.width = 60}),
            "memory per rank\n"
            "\n"
            "* rank 0  PPPPPPPPPPPGGGGGOOOOOOOOOOOOOOOOOOOOOO  14.000 GiB\n"
            "  rank 1  PPPPPPPPPPPGGGGGOOOOOOOOOOOOOOOOO       12.000 GiB\n"
            "\n"
            "* the worst\n"
            "\n"
            "  sum of 2        bytes    share\n"
            "P params      8.000 GiB   30.8 %\n"
            "G grads       4.000 GiB   15.4 %\n"
            "O optimizer  14.000 GiB   53.8 %\n"
            "  total      26.000 GiB  100.0 %\n");
  EXPECT_EQ(bar_text(small(), {.width = 40}),
            "memory per rank\n"
            "\n"
            "* rank 0  PPPPPGGGOOOOOOOOOO  14.000 GiB\n"
            "  rank 1  PPPPPGGGOOOOOOO     12.000 GiB\n"
            "\n"
            "* the worst\n"
            "\n"
            "  sum of 2        bytes    share\n"
            "P params      8.000 GiB   30.8 %\n"
            "G grads       4.000 GiB   15.4 %\n"
            "O optimizer  14.000 GiB   53.8 %\n"
            "  total      26.000 GiB  100.0 %\n");
}

TEST(BarText, MarksTheLimitBetweenCells) {
  BarChart chart = small();
  chart.limit = 16 * kGiB;
  chart.limit_label = "V100";
  EXPECT_EQ(bar_text(chart, {.width = 60}),
            "memory per rank\n"
            "\n"
            "* rank 0  PPPPPPPPPGGGGGOOOOOOOOOOOOOOOOOO.....|  14.000 GiB\n"
            "  rank 1  PPPPPPPPPGGGGGOOOOOOOOOOOOOO.........|  12.000 GiB\n"
            "\n"
            "| V100 16.000 GiB\n"
            ". free\n"
            "* the worst\n"
            "\n"
            "  sum of 2        bytes    share\n"
            "P params      8.000 GiB   30.8 %\n"
            "G grads       4.000 GiB   15.4 %\n"
            "O optimizer  14.000 GiB   53.8 %\n"
            "  total      26.000 GiB  100.0 %\n");
  chart.limit = 13 * kGiB;
  EXPECT_EQ(bar_text(chart, {.width = 40}),
            "memory per rank\n"
            "\n"
            "* rank 0  PPPPGGOOOOOOOO|O  14.000 GiB !\n"
            "  rank 1  PPPPGGOOOOOOO.|   12.000 GiB\n"
            "\n"
            "| V100 13.000 GiB\n"
            "! 1 of 2 is over the limit\n"
            ". free\n"
            "* the worst\n"
            "\n"
            "  sum of 2        bytes    share\n"
            "P params      8.000 GiB   30.8 %\n"
            "G grads       4.000 GiB   15.4 %\n"
            "O optimizer  14.000 GiB   53.8 %\n"
            "  total      26.000 GiB  100.0 %\n");
}

TEST(BarText, MarksWhatIsOverTheLimitByLessThanACell) {
  BarChart chart = small();
  chart.limit = 14 * kGiB;
  EXPECT_THAT(bar_text(chart), Not(HasSubstr("!")));
  chart.bars[0].predicted[0].bytes += 1;
  EXPECT_THAT(bar_text(chart), AllOf(HasSubstr("O|  14.000 GiB !\n"), HasSubstr("\n! 1 of 2 is over the limit\n")));
  chart.bars[0].measured = {{"params", kGiB}};
  EXPECT_THAT(bar_text(chart), AllOf(HasSubstr("O|  14.000 GiB !\n"), HasSubstr("\n! over the limit\n")))
      << "of what was predicted alone";
}

TEST(BarText, PutsWhatWasCountedBeneath) {
  EXPECT_EQ(bar_text(counted(), {.width = 60}),
            "memory per rank\n"
            "\n"
            "* rank 0   PPPPPPPPPPGGGGGOOOOOOOOOOOOOOOOOOOO    14.000 GiB\n"
            "  counted  PPPPPPPPPPGGGGGGGOOOOOOOOOOOOOOOOOOOO  15.000 GiB\n"
            "  rank 1   PPPPPPPPPPGGGGGOOOOOOOOOOOOOOO         12.000 GiB\n"
            "  counted  PPPPPPPPPPGGGGGGGOOOOOOOOOOOOOOO       13.000 GiB\n"
            "\n"
            "* the worst\n"
            "\n"
            "  sum of 2    predicted     counted  difference\n"
            "P params      8.000 GiB   8.000 GiB       exact\n"
            "G grads       4.000 GiB   6.000 GiB     +50.0 %\n"
            "O optimizer  14.000 GiB  14.000 GiB       exact\n"
            "  total      26.000 GiB  28.000 GiB      +7.7 %\n");
  EXPECT_EQ(bar_text(counted(), {.width = 40}),
            "memory per rank\n"
            "\n"
            "* rank 0   PPPPPGGOOOOOOOOO   14.000 GiB\n"
            "  counted  PPPPPGGGOOOOOOOOO  15.000 GiB\n"
            "  rank 1   PPPPPGGOOOOOOO     12.000 GiB\n"
            "  counted  PPPPPGGGOOOOOOO    13.000 GiB\n"
            "\n"
            "* the worst\n"
            "\n"
            "  sum of 2    predicted     counted\n"
            "P params      8.000 GiB   8.000 GiB\n"
            "G grads       4.000 GiB   6.000 GiB\n"
            "O optimizer  14.000 GiB  14.000 GiB\n"
            "  total      26.000 GiB  28.000 GiB\n");
  BarChart chart = counted();
  chart.bars[1].measured.clear();
  EXPECT_EQ(bar_text(chart, {.width = 60}),
            "memory per rank\n"
            "\n"
            "* rank 0   PPPPPPPPPPGGGGGOOOOOOOOOOOOOOOOOOOO    14.000 GiB\n"
            "  counted  PPPPPPPPPPGGGGGGGOOOOOOOOOOOOOOOOOOOO  15.000 GiB\n"
            "  rank 1   PPPPPPPPPPGGGGGOOOOOOOOOOOOOOO         12.000 GiB\n"
            "\n"
            "* the worst\n"
            "counted: 1 of 2\n"
            "\n"
            "  sum of 2    predicted     counted  difference\n"
            "P params      8.000 GiB   4.000 GiB           -\n"
            "G grads       4.000 GiB   3.000 GiB           -\n"
            "O optimizer  14.000 GiB   8.000 GiB           -\n"
            "  total      26.000 GiB  15.000 GiB           -\n");
}

TEST(BarText, ColoursOnlyWhereAskedTo) {
  BarChart chart = counted();
  chart.limit = 13 * kGiB;
  EXPECT_THAT(bar_text(chart), Not(HasSubstr("\x1b")));
  const std::string text = bar_text(chart, {.colour = true});
  EXPECT_THAT(text, HasSubstr("\x1b[48;5;26;38;5;231mPPP")) << "white on 0x005fd7";
  EXPECT_THAT(text, HasSubstr("\x1b[48;5;26;38;5;231mP\x1b[0m params"));
  EXPECT_EQ(without_colour(text), bar_text(chart));
}

TEST(BarText, TakesNothingAndZeroBytesAndOneTag) {
  EXPECT_EQ(bar_text({.title = "t"}), "t\n\nno bars\n");
  EXPECT_EQ(bar_text({.title = "t", .bars = {{.label = "rank 0", .predicted = {{"params", 0}}}}}, {.width = 40}),
            "t\n"
            "\n"
            "rank 0                         0.000 KiB\n"
            "\n"
            "  tag        bytes  share\n"
            "  total  0.000 KiB      -\n");
  EXPECT_EQ(bar_text({.title = "t", .bars = {{.label = "a", .predicted = {{"params", 512}}}}}, {.width = 40}),
            "t\n"
            "\n"
            "a  PPPPPPPPPPPPPPPPPPPPPPPPPP  0.500 KiB\n"
            "\n"
            "  tag         bytes    share\n"
            "P params  0.500 KiB  100.0 %\n"
            "  total   0.500 KiB  100.0 %\n");
  EXPECT_EQ(bar_text({.title = "t", .bars = {{.label = "a"}}, .limit = 0}, {.width = 40}),
            "t\n"
            "\n"
            "a  |                           0.000 KiB\n"
            "\n"
            "| limit 0.000 KiB\n"
            ". free\n"
            "\n"
            "  tag        bytes  share\n"
            "  total  0.000 KiB      -\n");
}

TEST(BarText, TellsWhichTagsAreTooSmallToSee) {
  BarChart chart = small();
  chart.bars[1].predicted.insert(chart.bars[1].predicted.begin() + 2, {"data", 4096});
  const std::string text = bar_text(chart);
  EXPECT_THAT(text, HasSubstr("less than a cell: D\n"));
  EXPECT_THAT(text, HasSubstr("D data"));
  EXPECT_THAT(text, HasSubstr("4.000 KiB   <0.1 %"));
  EXPECT_LT(text.find("D data"), text.find("O optimizer")) << "as they are stacked";
}

TEST(BarText, LabelsKeepToTheirColumnsAndObeyNoTerminal) {
  BarChart chart = small();
  chart.title = "\x1b[2J";
  chart.bars[0].label = "\u65e5\u672c 0";
  chart.bars[1].label = "a\x1b[31m";
  const auto rows = lines(bar_text(chart, {.width = 40}));
  EXPECT_EQ(rows[0], "\\x1b[2J");
  EXPECT_THAT(rows[2], ::testing::StartsWith("* \u65e5\u672c 0     P"));
  EXPECT_THAT(rows[3], ::testing::StartsWith("  a\\x1b[31m  P"));
}

TEST(BarCharts, HaveALetterAndAColourForEachTagOfTheLedger) {
  BarChart chart{.title = "all", .bars = {{.label = "a"}}};
  for (int t = 0; t < static_cast<int>(Tag::Count); ++t)
    chart.bars[0].predicted.push_back({std::string(tag_name(static_cast<Tag>(t))), kGiB});
  for (const char* other : {"nvme", "pinned", "prefetch"}) chart.bars[0].predicted.push_back({other, kGiB});
  const std::string text = bar_text(chart, {.width = 120, .colour = true}), svg = bar_svg(chart),
                    html = bar_html(chart);
  const auto rows = lines(text);
  std::set<char> letters;
  std::set<std::string> colours;
  for (const BarSegment& s : chart.bars[0].predicted) {
    // The legend in the terminal: "ESC[48;5;26;38;5;231mPESC[0m params".
    const auto row = std::find_if(rows.begin(), rows.end(), [&](const std::string& r) {
      return r.find("\x1b[0m " + s.tag + " ") != std::string::npos;
    });
    ASSERT_NE(row, rows.end()) << s.tag;
    int index = 0, ink = 0;
    char letter = 0;
    ASSERT_EQ(std::sscanf(row->c_str(), "\x1b[48;5;%d;38;5;%dm%c", &index, &ink, &letter), 3) << *row;
    letters.insert(letter);
    constexpr std::array<int, 6> kLevels = {0, 0x5f, 0x87, 0xaf, 0xd7, 0xff};
    const auto level = [&](int i) { return kLevels.at(static_cast<size_t>((index - 16) / i % 6)); };
    const std::string rgb = fmt::format("{:02x}{:02x}{:02x}", level(36), level(6), level(1));
    colours.insert(rgb);
    // The same in the box of the SVG, in its legend and in the heading of the page's table.
    const size_t tip = svg.find("<title>a: " + s.tag + " ");
    ASSERT_NE(tip, std::string::npos);
    EXPECT_THAT(svg.substr(tip, svg.find("</g>", tip) - tip), HasSubstr("fill=\"#" + rgb + "\""));
    EXPECT_THAT(svg, HasSubstr(fmt::format("fill=\"#{}\">{}</text>", ink == 231 ? "ffffff" : "000000", letter)));
    EXPECT_THAT(html, HasSubstr(fmt::format("background:#{};color:#{}\">{}</span>{}</th>", rgb,
                                            ink == 231 ? "ffffff" : "000000", letter, s.tag)));
  }
  EXPECT_EQ(letters.size(), chart.bars[0].predicted.size());
  EXPECT_EQ(colours.size(), chart.bars[0].predicted.size());
}

TEST(MergeEqual, MakesOneBarOfEqualNeighbours) {
  BarChart chart = small();
  chart.bars.resize(1);
  for (int rank = 1; rank < 4096; ++rank) {
    chart.bars.push_back({.label = fmt::format("rank {}", rank), .predicted = chart.bars[0].predicted});
  }
  const BarChart merged = merge_equal(chart);
  ASSERT_EQ(merged.bars.size(), 1u);
  EXPECT_EQ(merged.bars[0].label, "ranks 0-4095");
  EXPECT_EQ(merged.bars[0].count, 4096);
  EXPECT_TRUE(merged.bars[0].worst);
  EXPECT_THAT(bar_text(merged), AllOf(HasSubstr("sum of 4096"), HasSubstr("P params       16384.000 GiB   28.6 %")));
  EXPECT_EQ(lines(bar_text(merged)).size(), 11u);
}

TEST(MergeEqual, KeepsWhatDiffers) {
  const std::vector<BarSegment> a = {{"params", 1}}, b = {{"params", 2}}, c = {{"grads", 1}};
  const auto labels = [](std::vector<Bar> bars) {
    std::vector<std::string> result;
    for (const Bar& bar : merge_equal({.title = "", .bars = std::move(bars)}).bars)
      result.push_back(fmt::format("{} x{}{}", bar.label, bar.count, bar.worst ? " worst" : ""));
    return result;
  };
  using ::testing::ElementsAre;
  EXPECT_THAT(labels({}), ElementsAre());
  EXPECT_THAT(labels({{"rank 0", a}, {"rank 1", a}, {"rank 2", b}, {"rank 3", c}, {"rank 4", a}}),
              ElementsAre("ranks 0-1 x2", "rank 2 x1", "rank 3 x1", "rank 4 x1"));
  EXPECT_THAT(labels({{"rank 0", a, a}, {"rank 1", a}, {"rank 2", a, b}}),
              ElementsAre("rank 0 x1", "rank 1 x1", "rank 2 x1"));
  EXPECT_THAT(labels({{"r8", a}, {"r9", a, {}, true}, {"r10", a}}), ElementsAre("r8-10 x3 worst"));
  EXPECT_THAT(labels({{"7", a}, {"8", a}}), ElementsAre("7-8 x2"));
  EXPECT_THAT(labels({{"rank 0", a}, {"rank 2", a}}), ElementsAre("rank 0..rank 2 x2"));
  EXPECT_THAT(labels({{"stage 0", a}, {"rank 1", a}}), ElementsAre("stage 0..rank 1 x2"));
  EXPECT_THAT(labels({{"first", a}, {"last", a}}), ElementsAre("first..last x2"));
  EXPECT_THAT(labels({{"rank 99999999999999999999", a}, {"", a}}), ElementsAre("rank 99999999999999999999.. x2"));
}

TEST(BarCharts, RefuseBytesThatCannotBe) {
  constexpr i64 kMost = std::numeric_limits<i64>::max();
  for (const std::vector<BarSegment>& segments :
       {std::vector<BarSegment>{{"params", -1}}, {{"params", kMost}, {"grads", 1}}}) {
    const BarChart chart{.title = "t", .bars = {{.label = "a", .predicted = segments}}};
    EXPECT_THROW(bar_text(chart), Error);
    EXPECT_THROW(bar_svg(chart), Error);
    EXPECT_THROW(bar_html(chart), Error);
  }
  EXPECT_THROW(bar_text({.title = "t", .bars = {{.label = "a"}}, .limit = -1}), Error);
  EXPECT_THROW(bar_text({.title = "t", .bars = {{.label = "a", .predicted = {{"params", kMost}}, .count = 2}}}), Error);
  const std::string text = bar_text({.title = "t", .bars = {{.label = "a", .predicted = {{"params", kMost}}}}});
  EXPECT_THAT(text, HasSubstr("8589934592.000 GiB"));
}

TEST(BarSvg, IsWellFormedWhateverTheLabels) {
  BarChart chart = counted();
  chart.title = "<t & \"u\">";
  chart.bars[0].label = "Gr\u00f6\u00dfe <1> & \"x\"\n\x01\xff";
  chart.bars[1].predicted.push_back({"<tag>", 1});
  chart.limit = kGiB;
  chart.limit_label = "<limit>";
  for (const std::string& text : {bar_svg(chart), bar_html(chart)}) {
    EXPECT_EQ(malformed(text), std::nullopt);
    EXPECT_THAT(text, HasSubstr("Gr\u00f6\u00dfe &lt;1&gt; &amp; &quot;x&quot;\\n\\x01\\xff"));
    EXPECT_THAT(text, HasSubstr("&lt;t &amp; &quot;u&quot;&gt;"));
    EXPECT_THAT(text, HasSubstr("&lt;limit&gt; 1.000 GiB"));
    EXPECT_THAT(text, HasSubstr("&lt;tag&gt; 0.001 KiB"));
    EXPECT_THAT(text, HasSubstr("2 of 2 are over the limit"));
    EXPECT_THAT(text, AllOf(Not(HasSubstr("<script")), Not(HasSubstr("@import")), Not(HasSubstr("url("))));
    EXPECT_EQ(count(text, "http"), 1u) << "the name of the format alone";
  }
}

TEST(BarSvg, HasATooltipForEachSegment) {
  const std::string svg = bar_svg(counted());
  EXPECT_THAT(svg, HasSubstr("<title>rank 1, counted: grads 3.000 GiB, 23.1 % of 13.000 GiB</title>"));
  EXPECT_THAT(bar_svg(small()), HasSubstr("<title>rank 0: optimizer 8.000 GiB, 57.1 % of 14.000 GiB</title>"));
  EXPECT_EQ(count(svg, "<g><title>"), 12u);
}

TEST(BarHtml, HasATableOfAllNumbers) {
  BarChart chart = counted();
  chart.bars[0].predicted.push_back({"params", kGiB});  // twice in one bar
  const std::string html = bar_html(chart);
  EXPECT_THAT(html, ::testing::StartsWith("<!DOCTYPE html>\n"));
  EXPECT_THAT(html, HasSubstr("(prefers-color-scheme: dark)"));
  EXPECT_THAT(html, HasSubstr("<th scope=\"row\" rowspan=\"2\"><span class=\"worst\">rank 0 (worst)</span></th>"
                              "<td class=\"kind\">predicted</td><td>15.000 GiB</td><td>5.000 GiB</td>"
                              "<td>2.000 GiB</td><td>8.000 GiB</td></tr>\n"
                              "<tr><td class=\"kind\">counted</td><td>15.000 GiB</td><td>4.000 GiB</td>"
                              "<td>3.000 GiB</td><td>8.000 GiB</td></tr>\n"));
  EXPECT_THAT(html, HasSubstr("<tfoot>\n<tr><th scope=\"row\" rowspan=\"2\">sum of 2</th>"
                              "<td class=\"kind\">predicted</td><td>27.000 GiB</td><td>9.000 GiB</td>"));
}

struct CommaPoint : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST(BarCharts, ReadTheSameUnderEveryLocale) {
  BarChart chart = counted();
  chart.limit = 12345 * kGiB;
  const std::string text = bar_text(chart), html = bar_html(chart);
  const std::locale before = std::locale::global(std::locale(std::locale(), new CommaPoint));
  const std::string text_then = bar_text(chart), html_then = bar_html(chart);
  std::locale::global(before);
  EXPECT_EQ(text_then, text);
  EXPECT_EQ(html_then, html);
}

// Charts of all kinds: few and many bars, tags that are missing here and there, bytes from none to many.
BarChart random_chart(std::mt19937_64& random) {
  const auto upto = [&](i64 n) { return static_cast<i64>(random() % static_cast<u64>(n + 1)); };
  const std::array<const char*, 7> tags = {"params", "grads", "optimizer", "activations", "comm", "nvme", "tag \u65e5"};
  const auto segments = [&] {
    std::vector<BarSegment> result;
    const i64 magnitude = upto(50);
    for (const char* tag : tags) {
      if (upto(2) > 0) result.push_back({tag, upto(2) == 0 ? 0 : upto(i64{1} << upto(magnitude))});
    }
    return result;
  };
  BarChart chart{.title = std::string(static_cast<size_t>(upto(150)), 't')};
  const i64 num_bars = upto(12);
  for (i64 i = 0; i < num_bars; ++i) {
    Bar bar{.label = fmt::format("rank {}", i), .predicted = segments()};
    if (upto(3) == 0) bar.label += std::string(static_cast<size_t>(upto(60)), 'x') + "\u65e5";
    if (upto(1) == 0) bar.measured = segments();
    bar.worst = upto(4) == 0;
    bar.count = 1 + upto(3);
    chart.bars.push_back(bar);
  }
  if (upto(1) == 0) chart.limit = upto(i64{1} << upto(50));
  if (upto(1) == 0) chart.limit_label = std::string(static_cast<size_t>(upto(90)), 'l');
  return chart;
}

i64 sum_of(const std::vector<BarSegment>& segments) {
  i64 sum = 0;
  for (const BarSegment& s : segments) sum += s.bytes;
  return sum;
}

i64 scale_of(const BarChart& chart) {
  i64 scale = chart.limit.value_or(0);
  for (const Bar& bar : chart.bars) scale = std::max({scale, sum_of(bar.predicted), sum_of(bar.measured)});
  return scale;
}

// Each row of segments as it is drawn, in order.
std::vector<std::vector<BarSegment>> rows_of(const BarChart& chart) {
  std::vector<std::vector<BarSegment>> rows;
  for (const Bar& bar : chart.bars) {
    rows.push_back(bar.predicted);
    if (!bar.measured.empty()) rows.push_back(bar.measured);
  }
  return rows;
}

TEST(BarText, HoldsForRandomCharts) {
  std::mt19937_64 random(1);
  const std::map<std::string, char> letters = {
      {"params", 'P'}, {"grads", 'G'}, {"optimizer", 'O'}, {"activations", 'A'}, {"comm", 'C'}};
  for (int round = 0; round < 1500; ++round) {
    const BarChart chart = random_chart(random);
    const int width = 40 + static_cast<int>(random() % 100);
    const std::string text = bar_text(chart, {.width = width});
    ASSERT_EQ(without_colour(bar_text(chart, {.width = width, .colour = true})), text);
    ASSERT_EQ(text.find("nan"), std::string::npos);
    const auto all = lines(text);
    for (const std::string& line : all) ASSERT_LE(num_columns(line), static_cast<size_t>(width)) << line;
    if (chart.bars.empty()) continue;
    const auto rows = rows_of(chart);
    const double scale = static_cast<double>(std::max<i64>(scale_of(chart), 1));
    // Find the columns in which the cells begin and end.
    size_t total_width = 0;
    bool any_over = false;
    for (const auto& row : rows) {
      total_width = std::max(total_width, bytes_text(sum_of(row)).size());
      any_over = any_over || (chart.limit && sum_of(row) > *chart.limit);
    }
    size_t label = 0;
    bool worst = false, any_counted = false;
    for (const Bar& bar : chart.bars) {
      label = std::max(label, num_columns(bar.label));
      worst = worst || bar.worst;
      any_counted = any_counted || !bar.measured.empty();
    }
    label = std::min(any_counted ? std::max<size_t>(label, 7) : label, static_cast<size_t>(width) / 4);
    for (size_t r = 0; r < rows.size(); ++r) {
      std::string line = all[2 + r];
      const bool is_over = chart.limit && sum_of(rows[r]) > *chart.limit;
      ASSERT_EQ(line.ends_with(" !"), is_over);
      if (is_over) line.resize(line.size() - 2);
      ASSERT_EQ(num_columns(line), static_cast<size_t>(width) - (any_over ? 2 : 0));
      ASSERT_TRUE(line.ends_with("  " + fmt::format("{:>{}}", bytes_text(sum_of(rows[r])), total_width))) << line;
      line.resize(line.size() - total_width - 2);
      const size_t cells = static_cast<size_t>(width) - total_width - 4 - label - (worst ? 2 : 0) - (any_over ? 2 : 0);
      const std::string drawn = line.substr(line.size() - cells);
      ASSERT_EQ(count(drawn, "|"), chart.limit ? 1u : 0u) << line;
      const double n = static_cast<double>(cells - (chart.limit ? 1 : 0));
      if (chart.limit) {
        ASSERT_NEAR(static_cast<double>(drawn.find('|')), static_cast<double>(*chart.limit) / scale * n, 0.501) << line;
      }
      double used = 0;
      for (const char c : drawn) used += c != '|' && c != '.' && c != ' ' ? 1 : 0;
      ASSERT_NEAR(used, static_cast<double>(sum_of(rows[r])) / scale * n, 0.501) << line;
      for (const BarSegment& s : rows[r]) {
        const auto letter = letters.find(s.tag);
        if (letter == letters.end()) continue;
        const double have = static_cast<double>(count(drawn, std::string(1, letter->second)));
        ASSERT_LT(std::abs(have - static_cast<double>(s.bytes) / scale * n), 1.001) << line << " " << s.tag;
        if (s.bytes > 0) {
          ASSERT_THAT(text, HasSubstr(fmt::format("\n{} {}", letter->second, s.tag.substr(0, 2))));
        }
      }
    }
  }
}

TEST(BarSvg, HoldsForRandomCharts) {
  constexpr double kWidth = 800;  // of the bars
  std::mt19937_64 random(2);
  for (int round = 0; round < 400; ++round) {
    const BarChart chart = random_chart(random);
    const std::string svg = bar_svg(chart);
    ASSERT_EQ(malformed(svg), std::nullopt);
    ASSERT_EQ(malformed(bar_html(chart)), std::nullopt);
    for (const std::string_view bad : {"nan", "inf", " x=\"-", "width=\"-"})
      ASSERT_EQ(svg.find(bad), std::string::npos) << bad;
    int width = 0, height = 0;
    ASSERT_EQ(std::sscanf(svg.c_str() + svg.find(" width="), " width=\"%d\" height=\"%d\"", &width, &height), 2);
    ASSERT_LE(width, 1500);
    ASSERT_LE(height, 1200);
    const double scale = static_cast<double>(std::max<i64>(scale_of(chart), 1));
    size_t at = 0;
    for (const auto& row : rows_of(chart)) {
      at = svg.find("class=\"ds-gap\"", at);
      ASSERT_NE(at, std::string::npos);
      const size_t end = svg.find("\n</g>\n", at);
      double sum = 0;
      for (size_t rect = svg.find("<rect x=", at); rect < end; rect = svg.find("<rect x=", rect + 1)) {
        double x = 0, w = 0;
        ASSERT_EQ(std::sscanf(svg.c_str() + rect, "<rect x=\"%lf\" width=\"%lf\"", &x, &w), 2);
        ASSERT_NEAR(x, sum, 1e-6) << "no gap and no overlap";
        ASSERT_GT(w, 0);
        sum += w;
      }
      ASSERT_NEAR(sum, kWidth * static_cast<double>(sum_of(row)) / scale, 0.00501);
      at = end;
    }
  }
}

}  // namespace bar_chart_test
}  // namespace ds::chart
