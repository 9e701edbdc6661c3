// SPDX-License-Identifier: Apache-2.0
#include "chart/plan_chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <string_view>
#include <utility>

#include "ds/units.h"

namespace ds::chart {
namespace {

using pipeline::Op;
using pipeline::Span;

// How a pass looks.
struct Look {
  Op op;
  char letter;
  std::string_view name, ansi;
  u32 rgb;
};
constexpr std::array<Look, 4> kLooks = {{
    {Op::Forward, 'F', "forward", "\x1b[34m", 0x8fbce6},
    {Op::Backward, 'B', "backward", "\x1b[32m", 0x8fd19e},
    {Op::BackwardInput, 'b', "input gradient", "\x1b[36m", 0x9ed9d5},
    {Op::BackwardWeight, 'W', "weight gradient", "\x1b[33m", 0xf0d27a},
}};

size_t look_of(const Span& span) {
  const auto look = std::find_if(kLooks.begin(), kLooks.end(), [&](const Look& l) { return l.op == span.instr.op; });
  DS_ASSERT(look != kLooks.end());
  return static_cast<size_t>(look - kLooks.begin());
}

std::array<bool, kLooks.size()> looks_used(const pipeline::Timeline& timeline) {
  std::array<bool, kLooks.size()> used{};
  for (const auto& spans : timeline.stages) {
    for (const Span& span : spans) used[look_of(span)] = true;
  }
  return used;
}

std::string plural(i64 n, std::string_view word, std::string_view ending = "s") {
  return fmt::format("{} {}{}", n, word, n == 1 ? "" : ending);
}

std::string headline(const PlanChart& chart) {
  const pipeline::ScheduleOptions& o = chart.schedule;
  std::string text = fmt::format("{}: {}, ", schedule_name(o.kind), plural(o.stages, "stage"));
  if (o.chunks > 1) text += fmt::format("{} each, ", plural(o.chunks, "chunk"));
  text += fmt::format("{}; bubble {:.1f} %", plural(o.micro_batches, "micro-batch", "es"),
                      100 * chart.steady_bubble.value_or(chart.timeline.bubble_fraction()));
  if (chart.bubble_formula) text += fmt::format(" (formula {:.1f} %)", 100 * *chart.bubble_formula);
  return text;
}

// 3   0-7   0,8,..,56   0-1,8-9
std::string ranks_text(const std::vector<int>& ranks) {
  const size_t n = ranks.size();
  const int step = n > 1 ? ranks[1] - ranks[0] : 1;
  bool even = n > 2 && step > 1;
  for (size_t i = 1; i < n; ++i) even = even && ranks[i] - ranks[i - 1] == step;
  if (even) return fmt::format("{},{},{}{}", ranks[0], ranks[1], n > 3 ? "..," : "", ranks.back());
  std::string text;
  for (size_t begin = 0, end = 0; begin < n; begin = end) {
    for (end = begin + 1; end < n && ranks[end] == ranks[end - 1] + 1;) ++end;
    if (begin > 0) text += ',';
    text += fmt::format("{}", ranks[begin]);
    if (end > begin + 1) text += fmt::format("-{}", ranks[end - 1]);
  }
  return text;
}

// h.0..5   embed..h.5 + 12..17: without the path that a name shares with the one before.
std::string layers_text(const std::vector<LayerRange>& chunks) {
  std::string text, previous;
  const auto add = [&](std::string_view separator, const std::string& name) {
    const auto differs = std::mismatch(name.begin(), name.end(), previous.begin(), previous.end()).first;
    const size_t dot = std::string_view(name.begin(), differs).rfind('.');
    text += fmt::format("{}{}", separator, name.substr(dot + 1));  // npos + 1 is 0
    previous = name;
  };
  for (const LayerRange& range : chunks) {
    add(text.empty() ? "" : " + ", range.first);
    if (range.last != range.first) add("..", range.last);
  }
  return text;
}

// 0-11   0-5,6-11   0,1,..,7: of share after share
std::string heads_text(const StageRow& row) {
  std::string text;
  for (i64 share = 0; share < row.shares && row.heads > 0; ++share) {
    if (row.shares > 3 && share == 2) {
      text += ",..";
      share = row.shares - 1;
    }
    const i64 first = share * row.heads, last = first + row.heads - 1;
    text += fmt::format("{}{}{}", share > 0 ? "," : "", first, last > first ? fmt::format("-{}", last) : "");
  }
  return text;
}

std::string count_text(i64 n) {
  const double x = static_cast<double>(n);
  if (x >= 1e9) return fmt::format("{:.2f} B", x / 1e9);
  if (x >= 1e6) return fmt::format("{:.1f} M", x / 1e6);
  if (x >= 1e4) return fmt::format("{:.1f} K", x / 1e3);
  return fmt::format("{}", n);
}

struct Column {
  std::string_view title;
  bool right;  // aligned
  std::vector<std::string> cells;
  size_t width() const {
    size_t most = title.size();
    for (const std::string& cell : cells) most = std::max(most, num_columns(cell));
    return most;
  }
};

constexpr size_t kRanks = 1, kLayers = 2;

// The table of stages, by columns; without rows of its own, the numbers of the stages.
std::vector<Column> table(const PlanChart& chart) {
  std::vector<Column> columns = {{"stage", true, {}}};
  for (size_t i = 0; i < std::max(chart.stages.size(), chart.timeline.stages.size()); ++i) {
    columns[0].cells.push_back(fmt::format("{}", i));
  }
  if (chart.stages.empty()) return columns;
  columns.insert(
      columns.end(),
      {{"ranks", false, {}}, {"layers", false, {}}, {"heads", true, {}}, {"params", true, {}}, {"memory", true, {}}});
  for (const StageRow& row : chart.stages) {
    const std::array<std::string, 5> cells = {ranks_text(row.ranks), layers_text(row.layers), heads_text(row),
                                              count_text(row.params), bytes_text(row.memory_bytes)};
    for (size_t c = 0; c < cells.size(); ++c) columns[c + 1].cells.push_back(cells[c]);
  }
  return columns;
}

// Makes the table at most so wide, at the cost of ranks and layers.
void fit(std::vector<Column>& columns, size_t width) {
  if (columns.size() <= kLayers) return;
  for (std::string& cell : columns[kRanks].cells) cell = clip(cell, 16);
  size_t others = 0;
  for (size_t c = 0; c < columns.size(); ++c) others += c == kLayers ? 0 : columns[c].width() + 2;
  for (std::string& cell : columns[kLayers].cells)
    cell = clip(cell, std::max<size_t>(12, width - std::min(width, others)));
}

// The length of a column: the shortest pass.
double column_time(const pipeline::Timeline& timeline) {
  double least = std::numeric_limits<double>::infinity();
  for (const auto& spans : timeline.stages) {
    for (const Span& s : spans) {
      if (s.end > s.begin) least = std::min(least, s.end - s.begin);
    }
  }
  return std::isfinite(least) ? least : 1;
}

// How columns of time become characters.
struct Grid {
  double time = 1;         // of a column
  i64 columns = 0;         // in all
  i64 head = 0, tail = 0;  // shown of them, from the front and from the back
  i64 modulus = 10;        // of the micro-batches' numbers
  i64 cell = 1, gap = 0;   // characters of a column; of them, between passes
  bool chunks = false;     // passes name them
  bool whole() const { return head == columns; }
};

Grid make_grid(const PlanChart& chart, i64 width) {
  Grid grid{.time = column_time(chart.timeline), .chunks = chart.schedule.chunks > 1};
  grid.columns = std::llround(chart.timeline.makespan / grid.time);
  i64 modulus = 10, digits = 1;
  for (; modulus < chart.schedule.micro_batches; ++digits) modulus *= 10;
  const auto fits = [&](i64 of_modulus, i64 of_digits, i64 gap) {
    grid.modulus = of_modulus;
    grid.gap = gap;
    grid.cell = 1 + of_digits + (grid.chunks ? 1 : 0) + gap;
    return grid.columns * grid.cell - gap <= width;
  };
  if (fits(modulus, digits, 1) || fits(modulus, digits, 0) || fits(10, 1, 0)) {
    grid.head = grid.columns;
  } else {
    const i64 room = (width - 3) / grid.cell;
    grid.tail = room / 2;
    grid.head = room - grid.tail;
  }
  return grid;
}

char chunk_letter(i64 chunk) { return static_cast<char>('a' + chunk % 26); }

constexpr u8 kNoLook = 255;
struct Cell {
  char letter = ' ';
  u8 look = kNoLook;
};

// Columns [begin, end) of one stage.
std::vector<Cell> draw(const std::vector<Span>& spans, const Grid& grid, i64 begin, i64 end) {
  std::vector<Cell> cells(static_cast<size_t>((end - begin) * grid.cell));
  for (i64 c = begin; c < end; ++c) cells[(c - begin) * grid.cell].letter = '.';
  for (const Span& s : spans) {
    const i64 from = std::llround(s.begin / grid.time), to = std::llround(s.end / grid.time);
    if (from >= end || to <= begin || from == to) continue;
    const size_t look = look_of(s);
    std::string text = fmt::format("{}{}", kLooks[look].letter, s.instr.micro % grid.modulus);
    if (grid.chunks) text += chunk_letter(s.instr.chunk);
    const i64 size = (to - from) * grid.cell - grid.gap, offset = from * grid.cell;
    for (i64 at = std::max(from, begin) * grid.cell; at < std::min(to, end) * grid.cell; ++at) {
      const i64 k = at - offset;
      const char letter = k < narrow<i64>(text.size()) ? text[k] : k < size ? '-' : ' ';
      cells[at - begin * grid.cell] = {letter, static_cast<u8>(look)};
    }
  }
  return cells;
}

std::string paint(const std::vector<Cell>& cells, bool colour) {
  std::string text;
  u8 look = kNoLook;
  for (const Cell& cell : cells) {
    if (colour && cell.look != look) {
      text += cell.look == kNoLook ? "\x1b[0m" : kLooks[cell.look].ansi;
      look = cell.look;
    }
    text += cell.letter;
  }
  if (look != kNoLook) text += "\x1b[0m";
  return text;
}

std::string text_legend(const PlanChart& chart, const Grid& grid) {
  std::string text;
  const auto used = looks_used(chart.timeline);
  for (size_t look = 0; look < kLooks.size(); ++look) {
    if (used[look]) text += fmt::format("{} {}, ", kLooks[look].letter, kLooks[look].name);
  }
  text += ". idle";
  if (grid.chunks) text += fmt::format(", a-{} chunk", chunk_letter(chart.schedule.chunks - 1));
  if (!chart.time_unit.empty()) text += fmt::format("; 1 column = {:.4g} {}", grid.time, chart.time_unit);
  text += '\n';
  if (grid.modulus < chart.schedule.micro_batches) text += "micro-batches by their last digit\n";
  if (!grid.whole()) {
    text += fmt::format("~ {} of {} columns left out\n", grid.columns - grid.head - grid.tail, grid.columns);
  }
  return text;
}

// Later chunks are paler.
u32 tint(u32 rgb, i64 chunk, int chunks) {
  const double share = chunks > 1 ? 0.6 * static_cast<double>(chunk) / (chunks - 1) : 0;
  u32 result = 0;
  for (const int shift : {16, 8, 0}) {
    const double channel = static_cast<double>(rgb >> shift & 0xff);
    result |= static_cast<u32>(channel + (255 - channel) * share) << shift;
  }
  return result;
}

// The passes of one stage: one path per look and chunk, whose boxes are pieces of a line as thick as they are high, and
// the numbers that fit.
std::string svg_boxes(const std::vector<Span>& spans, double scale, double box, int chunks) {
  const double font = std::min(0.62 * box, 11.0);
  std::map<std::pair<size_t, i64>, std::string> paths;
  std::string numbers, svg;
  for (const Span& s : spans) {
    const double begin = s.begin * scale, length = (s.end - s.begin) * scale;
    std::string& path = paths[{look_of(s), s.instr.chunk}];
    path += fmt::format("M{} 0h{}", hundredths(begin), hundredths(length > 4 ? length - 1 : length));
    const std::string number = fmt::format("{}", s.instr.micro);
    if (length < 0.62 * font * static_cast<double>(number.size()) + 3) continue;
    numbers += fmt::format("<text x=\"{}\">{}</text>\n", hundredths(begin + (length - 1) / 2), number);
  }
  for (const auto& [key, path] : paths) {
    svg += fmt::format("<path transform=\"translate(0 {})\" stroke=\"#{:06x}\" d=\"{}\"/>\n", box / 2,
                       tint(kLooks[key.first].rgb, key.second, chunks), path);
  }
  if (numbers.empty()) return svg;
  return svg + fmt::format("<g transform=\"translate(0 {})\" text-anchor=\"middle\" font-size=\"{}\">\n{}</g>\n",
                           hundredths(box / 2 + 0.35 * font), hundredths(font), numbers);
}

}  // namespace

std::string plan_text(const PlanChart& chart, const TextStyle& style) {
  const size_t width = static_cast<size_t>(std::max(style.width, 40));
  std::string text = headline(chart) + "\n\n";

  std::vector<Column> columns = table(chart);
  if (!chart.stages.empty()) {
    fit(columns, width);
    for (size_t row = 0; row <= chart.stages.size(); ++row) {
      std::string line;
      for (const Column& column : columns) {
        const std::string_view cell = row == 0 ? column.title : std::string_view(column.cells[row - 1]);
        if (!line.empty()) line += "  ";
        line +=
            column.right ? fmt::format("{:>{}}", cell, column.width()) : fmt::format("{:<{}}", cell, column.width());
      }
      text += line + '\n';
    }
    if (const i64 shares = chart.stages.front().shares; shares > 1)
      text += fmt::format("heads by rank mod {}, from 0 on\n", shares);
    text += '\n';
  }

  constexpr i64 kLabel = 7;  // "stage  "
  const Grid grid = make_grid(chart, narrow<i64>(width) - kLabel);
  text += "stage  passes over time\n";
  for (size_t stage = 0; stage < chart.timeline.stages.size(); ++stage) {
    const std::vector<Span>& spans = chart.timeline.stages[stage];
    std::vector<Cell> cells = draw(spans, grid, 0, grid.head);
    if (!grid.whole()) {
      for (const char c : std::string_view(" ~ ")) cells.push_back({.letter = c});
      const std::vector<Cell> tail = draw(spans, grid, grid.columns - grid.tail, grid.columns);
      cells.insert(cells.end(), tail.begin(), tail.end());
    }
    while (!cells.empty() && cells.back().letter == ' ') cells.pop_back();
    text += fmt::format("{:>5}  {}\n", stage, paint(cells, style.colour));
  }
  return text + text_legend(chart, grid);
}

std::string plan_svg(const PlanChart& chart) {
  constexpr double kMargin = 16, kFont = 12, kCharacter = 0.62 * kFont, kTitle = 34, kTop = 68;
  const double time = column_time(chart.timeline), makespan = std::max(chart.timeline.makespan, time);
  const double chart_width = std::clamp(24 * makespan / time, 240.0, 1600.0), scale = chart_width / makespan;
  std::vector<Column> columns = table(chart);
  fit(columns, 90);
  double left = kMargin;
  for (const Column& column : columns) left += kCharacter * static_cast<double>(column.width() + 2);
  const double num_rows = static_cast<double>(columns[0].cells.size());
  const double row_height = std::clamp(std::floor(640 / std::max(num_rows, 1.0)), 14.0, 28.0), box = row_height - 3;
  const double bottom = kTop + row_height * num_rows;
  const std::string title = xml(headline(chart));
  const double title_width = 1.3 * kCharacter * static_cast<double>(title.size());
  const double width = std::ceil(std::max(left + chart_width, kMargin + title_width) + kMargin), height = bottom + 64;

  std::string svg;
  const auto out = std::back_inserter(svg);
  fmt::format_to(
      out,
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" role=\"img\" "
      "font-family=\"monospace\" font-size=\"{2}\">\n<title>{3}</title>\n"
      "<defs><pattern id=\"idle\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\">"
      "<rect width=\"6\" height=\"6\" fill=\"#eeeeee\"/><path d=\"M0 6L6 0\" stroke=\"#c8c8c8\"/></pattern></defs>\n"
      "<rect width=\"{0}\" height=\"{1}\" fill=\"#ffffff\"/>\n<text x=\"{4}\" y=\"{5}\" font-size=\"{6}\">{3}</text>\n",
      width, height, kFont, title, kMargin, kTitle, 1.25 * kFont);

  double x = kMargin;
  for (const Column& column : columns) {
    const double column_width = kCharacter * static_cast<double>(column.width());
    fmt::format_to(out, "<g transform=\"translate({} {})\"{}>\n<text font-weight=\"bold\">{}</text>\n",
                   hundredths(column.right ? x + column_width : x), kTop - 8,
                   column.right ? " text-anchor=\"end\"" : "", column.title);
    for (size_t row = 0; row < column.cells.size(); ++row) {
      const double y = 8 + row_height * static_cast<double>(row) + box / 2 + 0.35 * kFont;
      fmt::format_to(out, "<text y=\"{}\">{}</text>\n", hundredths(y), xml(column.cells[row]));
    }
    svg += "</g>\n";
    x += column_width + 2 * kCharacter;
  }

  for (size_t stage = 0; stage < chart.timeline.stages.size(); ++stage) {
    fmt::format_to(out,
                   "<g transform=\"translate({} {})\" stroke-width=\"{}\">\n"
                   "<rect width=\"{}\" height=\"{}\" fill=\"url(#idle)\"/>\n{}</g>\n",
                   hundredths(left), kTop + row_height * static_cast<double>(stage), box, hundredths(chart_width), box,
                   svg_boxes(chart.timeline.stages[stage], scale, box, chart.schedule.chunks));
  }

  fmt::format_to(out, "<g transform=\"translate({} {})\">\n", kMargin, bottom + 24);
  x = 0;
  const auto legend = [&](const std::string& fill, std::string_view name) {
    fmt::format_to(out, "<rect x=\"{}\" y=\"-11\" width=\"14\" height=\"14\" fill=\"{}\"/><text x=\"{}\">{}</text>\n",
                   hundredths(x), fill, hundredths(x + 20), name);
    x += 20 + kCharacter * static_cast<double>(name.size() + 3);
  };
  const auto used = looks_used(chart.timeline);
  for (size_t look = 0; look < kLooks.size(); ++look) {
    if (used[look]) legend(fmt::format("#{:06x}", kLooks[look].rgb), kLooks[look].name);
  }
  legend("url(#idle)", "idle");
  std::string note = "number: micro-batch";
  if (!chart.stages.empty() && chart.stages.front().shares > 1)
    note += fmt::format("; heads by rank mod {}, from 0 on", chart.stages.front().shares);
  if (chart.schedule.chunks > 1) note += "; paler: later chunk";
  if (!chart.time_unit.empty()) note += fmt::format("; whole width: {:.4g} {}", makespan, chart.time_unit);
  fmt::format_to(out, "<text y=\"22\">{}</text>\n", xml(note));
  return svg + "</g>\n</svg>\n";
}

}  // namespace ds::chart
