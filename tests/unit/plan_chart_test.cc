// SPDX-License-Identifier: Apache-2.0
#include "chart/plan_chart.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <optional>
#include <sstream>
#include <utility>

#include "well_formed.h"

namespace ds::chart {
namespace plan_chart_test {

using ds::testing::malformed;
using pipeline::Costs;
using pipeline::ScheduleKind;
using pipeline::ScheduleOptions;
using ::testing::HasSubstr;
using ::testing::Not;

PlanChart chart(const ScheduleOptions& options, const Costs& costs = {}) {
  return {.schedule = options,
          .timeline = simulate(options, {&costs, 1}),
          .bubble_formula = bubble_formula(options, costs)};
}

PlanChart with_table(PlanChart chart, int ranks_per_stage) {
  const int p = chart.schedule.stages;
  for (int i = 0; i < p; ++i) {
    StageRow row{.heads = 12, .params = 31'234'567, .memory_bytes = i64{5} << 28};
    for (int d = 0; d < ranks_per_stage; ++d) row.ranks.push_back(d * p + i);
    for (int c = 0; c < chart.schedule.chunks; ++c) {
      const i64 block = chart.schedule.placement().block_of(i, c);
      row.layers.push_back({block == 0 ? "embed" : fmt::format("h.{}", 3 * block), fmt::format("h.{}", 3 * block + 2)});
    }
    chart.stages.push_back(std::move(row));
  }
  return chart;
}

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> result;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) result.push_back(line);
  return result;
}

size_t count(const std::string& text, std::string_view what) {
  size_t n = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
  return n;
}

TEST(PlanText, ShowsThePassesOfASmallPipeline) {
  EXPECT_EQ(plan_text(chart({ScheduleKind::OneFOneB, 3, 0, 3})),
            "1f1b: 3 stages, 3 micro-batches; bubble 40.0 % (formula 40.0 %)\n"
            "\n"
            "stage  passes over time\n"
            "    0  F0 F1 F2 .  .  .  .  B0--- .  B1--- .  B2---\n"
            "    1  .  F0 F1 .  .  B0--- F2 B1--- .  B2--- .  .\n"
            "    2  .  .  F0 B0--- F1 B1--- F2 B2--- .  .  .  .\n"
            "F forward, B backward, . idle\n");
}

TEST(PlanText, ShowsSplitBackwardPassesAndTheUnitOfTime) {
  PlanChart c = chart({ScheduleKind::ZeroBubbleH1, 2, 0, 2}, {0.25, 0.25, 0.25});
  c.time_unit = "ms";
  c.bubble_formula.reset();
  EXPECT_EQ(plan_text(c),
            "zb-h1: 2 stages, 2 micro-batches; bubble 14.3 %\n"
            "\n"
            "stage  passes over time\n"
            "    0  F0 F1 .  b0 W0 b1 W1\n"
            "    1  .  F0 b0 F1 b1 W0 W1\n"
            "F forward, b input gradient, W weight gradient, . idle; 1 column = 0.25 ms\n");
}

TEST(PlanText, ShowsTheTableOfStagesAndChunks) {
  EXPECT_EQ(plan_text(with_table(chart({ScheduleKind::Interleaved, 2, 0, 2, 2}), 4), {.width = 100}),
            "interleaved: 2 stages, 2 chunks each, 2 micro-batches; bubble 20.0 % (formula 20.0 %)\n"
            "\n"
            "stage  ranks     layers             heads  params     memory\n"
            "    0  0,2,..,6  embed..h.2 + 6..8   0-11  31.2 M  1.250 GiB\n"
            "    1  1,3,..,7  h.3..5 + 9..11      0-11  31.2 M  1.250 GiB\n"
            "\n"
            "stage  passes over time\n"
            "    0  F0a F1a F0b F1b .   .   B0b---- .   B1b---- B0a---- B1a----\n"
            "    1  .   F0a F1a F0b B0b---- F1b B1b---- B0a---- B1a---- .   .\n"
            "F forward, B backward, . idle, a-b chunk\n");
}

TEST(PlanText, SaysWhichHeadsTheSharesHave) {
  const auto heads = [](i64 of_each, i64 shares) {
    PlanChart c = chart({ScheduleKind::OneFOneB, 1, 0, 1});
    c.stages = {{.ranks = {0}, .layers = {{"a", "a"}}, .heads = of_each, .shares = shares, .params = 1}};
    const auto rows = lines(plan_text(c));
    return rows[3] + (rows[4].empty() ? "" : "; " + rows[4]);
  };
  EXPECT_THAT(heads(6, 2), HasSubstr(" 0-5,6-11 "));
  EXPECT_THAT(heads(6, 2), HasSubstr("; heads by rank mod 2, from 0 on"));
  EXPECT_THAT(heads(1, 3), HasSubstr(" 0,1,2 "));
  EXPECT_THAT(heads(2, 8), HasSubstr(" 0-1,2-3,..,14-15 "));
  EXPECT_THAT(heads(12, 1), HasSubstr(" 0-11 "));
  EXPECT_THAT(heads(12, 1), Not(HasSubstr("mod")));
}

TEST(PlanText, NamesRanksAndCounts) {
  PlanChart c = chart({ScheduleKind::OneFOneB, 5, 0, 1});
  c.stages = {
      {.ranks = {0, 1, 2, 3}, .layers = {{"a", "a"}}, .params = 999},
      {.ranks = {7}, .layers = {{"m.a", "m.a"}}, .params = 12'345},
      {.ranks = {0, 1, 4, 5}, .layers = {}, .params = 1'234'567'890},
      {.ranks = {1, 3, 5}, .layers = {{"b", "c"}}},
      {.ranks = {}, .layers = {{"a.very.long.name.that.nobody.needs.0", "another.one.of.the.kind.that.is.long"}}}};
  const auto rows = lines(plan_text(c));
  ASSERT_GT(rows.size(), 7u);
  EXPECT_THAT(rows[3], HasSubstr(" 0-3 "));
  EXPECT_THAT(rows[3], HasSubstr(" a "));
  EXPECT_THAT(rows[3], HasSubstr(" 999 "));
  EXPECT_THAT(rows[4], HasSubstr(" 7 "));
  EXPECT_THAT(rows[4], HasSubstr(" m.a "));
  EXPECT_THAT(rows[4], HasSubstr(" 12.3 K "));
  EXPECT_THAT(rows[5], HasSubstr(" 0-1,4-5 "));
  EXPECT_THAT(rows[5], HasSubstr(" 1.23 B "));
  EXPECT_THAT(rows[6], HasSubstr(" 1,3,5 "));
  EXPECT_THAT(rows[7], HasSubstr("a.very.long"));
  EXPECT_THAT(rows[7], HasSubstr("~~"));
  for (const std::string& row : rows) EXPECT_LE(row.size(), 80u);
}

TEST(PlanText, WhatIsTooWideLosesSpacesThenDigitsThenItsMiddle) {
  const auto first_row = [](i64 micro_batches, int width) {
    const std::string text = plan_text(chart({ScheduleKind::OneFOneB, 2, 0, micro_batches}), {.width = width});
    return lines(text)[3] + (text.find("last digit") == std::string::npos ? "" : " (last digits)");
  };
  EXPECT_EQ(first_row(3, 46), "    0  F0 F1 .  .  B0--- F2 B1--- .  B2---");
  EXPECT_EQ(first_row(3, 40), "    0  F0F1. . B0--F2B1--. B2--");
  const std::string all_digits = first_row(11, 200);
  EXPECT_THAT(all_digits, HasSubstr("    0  F0- F1- .   .   B0----- F2-"));
  EXPECT_THAT(all_digits, HasSubstr("F10 B9----- .   B10----"));
  EXPECT_THAT(first_row(11, 130), HasSubstr("    0  F0-F1-.  .  B0----F2-"));
  EXPECT_EQ(first_row(11, 80),
            "    0  F0F1. . B0--F2B1--F3B2--F4B3--F5B4--F6B5--F7B6--F8B7--F9B8--F0B9--. B0-- (last digits)");
  EXPECT_EQ(first_row(30, 40), "    0  F0F1. . B0--F2B1 ~ --F9B8--. B9-- (last digits)");
}

TEST(PlanText, ColoursOnlyWhereAskedTo) {
  const PlanChart c = chart({ScheduleKind::OneFOneB, 2, 0, 2});
  EXPECT_THAT(plan_text(c), Not(HasSubstr("\x1b")));
  std::string text = plan_text(c, {.colour = true});
  EXPECT_THAT(text, HasSubstr("\x1b[34mF0 "));
  EXPECT_THAT(text, HasSubstr("\x1b[32mB0"));
  for (const std::string_view escape : {"\x1b[34m", "\x1b[32m", "\x1b[0m"}) {
    for (size_t at; (at = text.find(escape)) != std::string::npos;) text.erase(at, escape.size());
  }
  EXPECT_EQ(text, plan_text(c));
}

TEST(PlanText, TakesCostsOfAnySize) {
  const std::vector<Costs> costs = {{1e-9, 2, 0, 0.5}, {1.3, 0.7, 1e3}, {0, 0.1, 0.1}};
  const ScheduleOptions options{ScheduleKind::ZeroBubbleH1, 3, 0, 12};
  PlanChart c = chart(options);
  c.timeline = simulate(make_schedules(options), costs);
  const std::string text = plan_text(c);
  EXPECT_EQ(lines(text).size(), 9u);
  for (const std::string& line : lines(text)) EXPECT_LE(line.size(), 80u);
}

// Every pass has its box where there is room, and every line keeps to its width where there is none.
TEST(PlanText, HoldsForAllSchedules) {
  for (const ScheduleKind kind : {ScheduleKind::Naive, ScheduleKind::GPipe, ScheduleKind::OneFOneB,
                                  ScheduleKind::Interleaved, ScheduleKind::ZeroBubbleH1, ScheduleKind::BreadthFirst}) {
    const bool chunked = kind == ScheduleKind::Interleaved || kind == ScheduleKind::BreadthFirst;
    for (int p = 1; p <= 8; ++p) {
      for (i64 m = 1; m <= 32; ++m) {
        const ScheduleOptions options{kind, p, 0, m, chunked ? 2 : 1};
        if (!why_not(options).empty()) continue;
        const PlanChart c = with_table(chart(options), 2);
        const auto wide = lines(plan_text(c, {.width = 100'000}));
        for (size_t i = 0; i < static_cast<size_t>(p); ++i) {
          const std::string& row = wide[wide.size() - 1 - static_cast<size_t>(p) + i];
          ASSERT_EQ(count(row, "F"), static_cast<size_t>(m * options.chunks));
          const bool split = kind == ScheduleKind::ZeroBubbleH1;
          ASSERT_EQ(split ? count(row, "b") : count(row, "B"), static_cast<size_t>(m * options.chunks));
          ASSERT_EQ(count(row, "W"), split ? static_cast<size_t>(m) : 0);
          // One column is one forward pass, so the idle time is the number of points.
          ASSERT_EQ(static_cast<double>(count(row, ".")), c.timeline.idle(i));
        }
        const auto narrow_lines = lines(plan_text(c, {.width = 80}));
        for (size_t i = 1; i < narrow_lines.size(); ++i) ASSERT_LE(narrow_lines[i].size(), 80u) << narrow_lines[i];
      }
    }
  }
}

TEST(PlanSvg, IsWellFormedWhateverTheNames) {
  PlanChart c = with_table(chart({ScheduleKind::Interleaved, 4, 0, 8, 2}), 3);
  c.stages[1].layers = {{"<a & \"b\">", "x\n\x01y"}};
  c.time_unit = "<ms>";
  const std::string svg = plan_svg(c);
  EXPECT_EQ(malformed(svg), std::nullopt);
  EXPECT_THAT(svg, HasSubstr("&lt;a &amp; &quot;b&quot;&gt;..x\\n\\x01y"));
  EXPECT_THAT(svg, HasSubstr("bubble 15.8 % (formula 15.8 %)</text>"));
  EXPECT_THAT(svg, Not(HasSubstr("<script")));
  EXPECT_EQ(count(svg, "http"), 1u) << "the name of the format alone";
}

TEST(PlanSvg, HasABoxAndANumberForEachPass) {
  const PlanChart c = chart({ScheduleKind::ZeroBubbleH1, 4, 0, 6});
  const std::string svg = plan_svg(c);
  size_t passes = 0;
  for (const auto& spans : c.timeline.stages) passes += spans.size();
  EXPECT_EQ(count(svg, " 0h"), passes);
  EXPECT_EQ(count(svg, "<text x=\""), passes + 4 + 1) << "and the legend, and the title";
  EXPECT_THAT(svg, HasSubstr("input gradient"));
  EXPECT_THAT(svg, HasSubstr(">idle<"));
}

TEST(PlanSvg, StaysSaneWhereThereIsMuch) {
  struct Case {
    ScheduleOptions options;
    size_t most_bytes;
  };
  for (const Case& test :
       {Case{{ScheduleKind::OneFOneB, 8, 0, 32}, 50'000}, Case{{ScheduleKind::OneFOneB, 64, 0, 512}, 1'200'000},
        Case{{ScheduleKind::ZeroBubbleH1, 64, 0, 512}, 1'500'000},
        Case{{ScheduleKind::Interleaved, 64, 0, 512, 4}, 4'500'000}}) {
    const std::string svg = plan_svg(with_table(chart(test.options), 8));
    EXPECT_EQ(malformed(svg), std::nullopt);
    EXPECT_LT(svg.size(), test.most_bytes);
    int width = 0, height = 0;
    ASSERT_EQ(std::sscanf(svg.c_str() + svg.find(" width="), " width=\"%d\" height=\"%d\"", &width, &height), 2);
    EXPECT_LT(width, 2400);
    EXPECT_LT(height, 1100);
  }
}

TEST(PlanChart, ATimelineWithoutPassesIsEmpty) {
  PlanChart c{.schedule = {}};
  c.timeline.stages.resize(1);
  EXPECT_THAT(plan_text(c), HasSubstr("bubble 0.0 %"));
  EXPECT_EQ(malformed(plan_svg(c)), std::nullopt);
}

}  // namespace plan_chart_test
}  // namespace ds::chart
