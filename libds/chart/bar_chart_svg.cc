// SPDX-License-Identifier: Apache-2.0
// A bar chart as SVG. Colours stand in attributes, for readers that know no CSS; where the system is dark, rules for
// the classes override them.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "chart/bar_chart.h"
#include "chart/bar_chart_parts.h"
#include "ds/printable.h"
#include "ds/units.h"

namespace ds::chart {
namespace {

constexpr double kMargin = 16, kFont = 12, kCharacter = 0.62 * kFont, kTitle = 34, kTop = 72, kBars = 800, kBetween = 5;

constexpr std::string_view kStyle =
    "<style>@media (prefers-color-scheme:dark){"
    ".ds-ground{fill:#1b1b1b}.ds-gap{stroke:#1b1b1b}.ds-ink{fill:#e6e6e6}.ds-dim{fill:#a0a0a0}.ds-free{fill:#2d2d2d}"
    ".ds-grid{stroke:#4a4a4a}.ds-limit{stroke:#ff8a80}.ds-over{fill:#ff8a80}}</style>\n";
constexpr std::string_view kInk = "class=\"ds-ink\" fill=\"#1a1a1a\"", kDim = "class=\"ds-dim\" fill=\"#606060\"",
                           kOver = "class=\"ds-over\" fill=\"#b3261e\"";

struct Row {
  const Bar* bar;
  bool counted;
  double y;
  const std::vector<BarSegment>& segments() const { return counted ? bar->measured : bar->predicted; }
};

struct Frame {
  std::vector<Row> rows = {};
  double box = 0;                          // height of a row's bar
  double left = 0;                         // of the bars
  double bottom = 0;                       // of the last row
  double total = 0, notes = 0, width = 0;  // right end of the totals, left end of the words beside them, all
};

double width_of(size_t characters) { return kCharacter * static_cast<double>(characters); }

std::string notes_of(const BarChart& chart, const Row& row) {
  std::string text = row.bar->worst && !row.counted ? "worst" : "";
  if (is_over(chart, row.segments())) text += text.empty() ? "over" : ", over";
  return text;
}

std::string label_of(const Bar& bar) { return clip(printable(bar.label), 40); }

Frame make_frame(const BarChart& chart, const Sums& sums) {
  Frame frame;
  size_t num_rows = 0, label = 0, totals = 0, notes = 0;
  for (const Bar& bar : chart.bars) {
    num_rows += bar.measured.empty() ? 1 : 2;
    label = std::max(label, num_columns(label_of(bar)));
  }
  const double row_height = std::clamp(std::floor(640 / std::max(static_cast<double>(num_rows), 1.0)), 14.0, 28.0);
  frame.box = row_height - 3;
  double y = kTop;
  for (const Bar& bar : chart.bars) {
    for (const bool counted : {false, true}) {
      if (counted && bar.measured.empty()) continue;
      frame.rows.push_back({&bar, counted, y});
      y += row_height;
      totals = std::max(totals, bytes_text(total(frame.rows.back().segments())).size());
      notes = std::max(notes, notes_of(chart, frame.rows.back()).size());
    }
    if (sums.has_measured()) y += kBetween;
  }
  frame.bottom = y;
  frame.left = kMargin + width_of(label + 2 + (sums.has_measured() ? 11 : 0));
  frame.total = frame.left + kBars + width_of(totals + 1);
  frame.notes = frame.total + width_of(1);
  frame.width = std::ceil(frame.notes + width_of(notes) + kMargin);
  return frame;
}

double scaled(const Sums& sums, i64 bytes) {
  return sums.scale == 0 ? 0 : hundredths(kBars * (static_cast<double>(bytes) / static_cast<double>(sums.scale)));
}

// Lines at round numbers of the largest fitting unit, five of them or so, and their numbers beneath the bars.
std::string axis_svg(const Sums& sums, const Frame& frame) {
  if (sums.scale == 0) return "";
  const std::string unit = bytes_text(sums.scale).substr(bytes_text(sums.scale).size() - 3);
  const double unit_bytes = unit == "GiB" ? 0x1p30 : unit == "MiB" ? 0x1p20 : 0x1p10;
  const double most = static_cast<double>(sums.scale) / unit_bytes;
  const double power = std::pow(10, std::floor(std::log10(most / 5))), steps = most / 5 / power;
  const double step = power * (steps <= 1 ? 1 : steps <= 2 ? 2 : steps <= 5 ? 5 : 10);
  std::string svg;
  for (int i = 0; i * step <= most; ++i) {
    const double x = hundredths(frame.left + kBars * (i * step / most));
    svg += fmt::format(
        "<path class=\"ds-grid\" stroke=\"#dddddd\" d=\"M{0} {1}V{2}\"/>\n"
        "<text {3} x=\"{0}\" y=\"{4}\" text-anchor=\"middle\" font-size=\"11\">{5:.6g} {6}</text>\n",
        x, kTop - 4, frame.bottom + 4, kDim, frame.bottom + 18, i * step, unit);
  }
  return svg;
}

// The name of the tag where it fits, else its letter, else nothing.
std::string name_in(const Look& look, double x, double width, double box) {
  const double font = std::min(0.62 * box, 11.0);
  const std::string name = printable(look.tag);
  const bool whole = width >= 0.62 * font * static_cast<double>(num_columns(name)) + 8;
  if (!whole && width < 0.62 * font + 3) return "";
  return fmt::format(
      "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\" font-size=\"{}\" fill=\"#{}\" stroke=\"none\">{}</text>",
      hundredths(x + width / 2), hundredths(box / 2 + 0.35 * font), hundredths(font),
      is_light(look.rgb) ? "000000" : "ffffff", whole ? xml(name) : std::string(1, look.letter));
}

// A box ends where the next one begins, so that errors of rounding do not add up.
std::string boxes_svg(const Row& row, const Sums& sums, const Frame& frame) {
  std::string svg;
  const i64 all = total(row.segments());
  i64 bytes = 0;
  for (const BarSegment& s : row.segments()) {
    const double x = scaled(sums, bytes), width = hundredths(scaled(sums, bytes += s.bytes) - x);
    if (width <= 0) continue;
    const Look& look = look_of(sums, s.tag);
    const std::string tip = fmt::format("{}{}: {} {}, {} of {}", row.bar->label,
                                        row.counted           ? ", counted"
                                        : sums.has_measured() ? ", predicted"
                                                              : "",
                                        s.tag, bytes_text(s.bytes), share_text(s.bytes, all), bytes_text(all));
    svg += fmt::format("<g><title>{}</title><rect x=\"{}\" width=\"{}\" height=\"{}\" fill=\"#{:06x}\"{}/>{}</g>\n",
                       xml(tip), x, width, frame.box, look.rgb, width < 4 ? " stroke=\"none\"" : "",
                       name_in(look, x, width, frame.box));
  }
  return svg;
}

std::string row_svg(const BarChart& chart, const Row& row, const Sums& sums, const Frame& frame) {
  const double text_y = hundredths(row.y + frame.box / 2 + 0.35 * kFont);
  std::string svg;
  if (!row.counted)
    svg += fmt::format("<text {} x=\"{}\" y=\"{}\"{}>{}</text>\n", kInk, kMargin, text_y,
                       row.bar->worst ? " font-weight=\"bold\"" : "", xml(label_of(*row.bar)));
  if (sums.has_measured())
    svg += fmt::format("<text {} x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\n", kDim,
                       hundredths(frame.left - width_of(1)), text_y, row.counted ? "counted" : "predicted");
  svg += fmt::format("<g transform=\"translate({} {})\" class=\"ds-gap\" stroke=\"#ffffff\">\n", hundredths(frame.left),
                     row.y);
  if (chart.limit)
    svg += fmt::format("<path class=\"ds-free\" fill=\"#eeeeee\" stroke=\"none\" d=\"M0 0h{}v{}H0z\"/>\n",
                       scaled(sums, *chart.limit), frame.box);
  const bool over = is_over(chart, row.segments());
  svg += boxes_svg(row, sums, frame) + "</g>\n";
  svg += fmt::format("<text {} x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\n", over ? kOver : kInk,
                     hundredths(frame.total), text_y, bytes_text(total(row.segments())));
  if (const std::string notes = notes_of(chart, row); !notes.empty())
    svg += fmt::format("<text {} x=\"{}\" y=\"{}\" font-weight=\"bold\">{}</text>\n", over ? kOver : kInk,
                       hundredths(frame.notes), text_y, notes);
  return svg;
}

std::string limit_svg(const BarChart& chart, const Sums& sums, const Frame& frame) {
  if (!chart.limit) return "";
  const std::string over = over_text(sums), text = limit_text(chart) + (over.empty() ? "" : "; " + over);
  const double at = scaled(sums, *chart.limit), x = hundredths(frame.left + at);
  return fmt::format(
      "<path class=\"ds-limit\" stroke=\"#b3261e\" stroke-width=\"2\" stroke-dasharray=\"5 3\" d=\"M{0} {1}V{2}\"/>\n"
      "<text {3} x=\"{0}\" y=\"{4}\" text-anchor=\"{5}\">{6}</text>\n",
      x, kTop - 8, frame.bottom + 4, kOver, kTop - 14, at > kBars / 2 ? "end" : "start", xml(clip(text, 56)));
}

// Cells of one size, side by side as far as there is room. Sets `height`.
std::string legend_svg(const Sums& sums, const Frame& frame, double& height) {
  constexpr double kSwatch = 16, kLine = 22;
  std::vector<std::string> texts;
  size_t longest = 0;
  for (const TagSum& t : sums.tags) {
    std::string text = clip(printable(t.look.tag), 24) + " ";
    if (!sums.has_measured()) {
      text += fmt::format("{}, {}", bytes_text(t.predicted), share_text(t.predicted, sums.predicted));
    } else {
      text += fmt::format("{}, counted {}", bytes_text(t.predicted), bytes_text(t.measured));
      if (sums.measured_bars == sums.bars) text += ", " + difference_text(t.measured, t.predicted);
    }
    longest = std::max(longest, num_columns(text));
    texts.push_back(std::move(text));
  }
  const double cell = kSwatch + 6 + width_of(longest + 3);
  const size_t columns = static_cast<size_t>(std::max(1.0, std::floor((frame.width - 2 * kMargin) / cell)));
  std::string svg;
  double y = frame.bottom + 48;
  if (sums.bars > 1 && !texts.empty()) {
    svg += fmt::format("<text {} x=\"{}\" y=\"{}\">{}:</text>\n", kDim, kMargin, y, sum_heading(sums));
    y += kLine;
  }
  for (size_t i = 0; i < texts.size(); ++i) {
    const Look& look = sums.tags[i].look;
    svg += fmt::format(
        "<g transform=\"translate({} {})\"><rect y=\"-12\" width=\"{}\" height=\"{}\" fill=\"#{:06x}\"/>"
        "<text x=\"{}\" text-anchor=\"middle\" font-size=\"11\" fill=\"#{}\">{}</text>"
        "<text {} x=\"{}\">{}</text></g>\n",
        hundredths(kMargin + cell * static_cast<double>(i % columns)), y + kLine * static_cast<double>(i / columns),
        kSwatch, kSwatch, look.rgb, kSwatch / 2, is_light(look.rgb) ? "000000" : "ffffff", look.letter, kInk,
        kSwatch + 6, xml(texts[i]));
  }
  height = y + kLine * std::ceil(static_cast<double>(texts.size()) / static_cast<double>(columns));
  return svg;
}

}  // namespace

std::string bar_svg(const BarChart& chart) {
  const Sums sums = sums_of(chart);
  const Frame frame = make_frame(chart, sums);
  const std::string title =
      clip(printable(chart.title), static_cast<size_t>((frame.width - 2 * kMargin) / (1.25 * kCharacter)));
  std::string body = axis_svg(sums, frame);
  for (const Row& row : frame.rows) body += row_svg(chart, row, sums, frame);
  if (chart.bars.empty()) body += fmt::format("<text {} x=\"{}\" y=\"{}\">no bars</text>\n", kDim, kMargin, kTop);
  body += limit_svg(chart, sums, frame);
  double height = 0;
  body += legend_svg(sums, frame, height);
  return fmt::format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" "
             "role=\"img\" font-family=\"monospace\" font-size=\"{2}\">\n<title>{3}</title>\n{4}"
             "<rect class=\"ds-ground\" width=\"{0}\" height=\"{1}\" fill=\"#ffffff\"/>\n"
             "<text {5} x=\"{6}\" y=\"{7}\" font-size=\"{8}\">{9}</text>\n",
             frame.width, height, kFont, xml(chart.title), kStyle, kInk, kMargin, kTitle, 1.25 * kFont, xml(title)) +
         body + "</svg>\n";
}

}  // namespace ds::chart
