// SPDX-License-Identifier: Apache-2.0
#pragma once
// The plan of a pipeline for people: who holds which layers, and what each stage does when, as text and as a picture.
// Both are pure functions of plain data.

#include <optional>
#include <string>
#include <vector>

#include "chart/chart.h"
#include "pipeline/simulate.h"

namespace ds::chart {

struct LayerRange {
  std::string first, last;  // names
};

// The contents of one stage; the numbers are those of each of its ranks.
struct StageRow {
  std::vector<int> ranks = {};          // of the world, ascending
  std::vector<LayerRange> layers = {};  // per chunk
  i64 heads = 0;                        // of attention
  i64 shares = 1;  // ranks side by side that have `heads` of them each: rank r those of share r mod shares
  i64 params = 0, memory_bytes = 0;
};

struct PlanChart {
  pipeline::ScheduleOptions schedule;  // .stage has no meaning
  std::vector<StageRow> stages = {};   // may be empty: the timeline alone
  pipeline::Timeline timeline = {};
  std::optional<double> bubble_formula = {};  // beside the timeline's own bubble fraction
  std::optional<double> steady_bubble = {};   // instead of it, of post-validated steps one after the other
  std::string time_unit = {};                 // of the timeline, such as "ms"; empty: not told
};

// A line about the schedule, the table of stages (up to 64 columns), and one row per stage with its passes over time:
//   F3 B3    forward and backward pass of micro-batch 3, B3--- a longer one
//   b3 W3    gradient of the input, gradient of the weights
//   F3a      a, b, ...: the chunk, if there are several
//   .        idle
// A column is as long as the shortest pass. What is too wide loses first its spaces, then all digits but the last of
// each number, then the middle; the legend says so.
std::string plan_text(const PlanChart&, const TextStyle& = {});

// The same as an SVG that needs nothing else: boxes on hatched ground, numbers where they fit. At most about 2000
// pixels wide.
std::string plan_svg(const PlanChart&);

}  // namespace ds::chart
