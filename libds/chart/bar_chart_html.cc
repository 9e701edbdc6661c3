// SPDX-License-Identifier: Apache-2.0
// A bar chart as a page. It is well-formed XML too.

#include <fmt/format.h>

#include "chart/bar_chart.h"
#include "chart/bar_chart_parts.h"
#include "ds/units.h"

namespace ds::chart {
namespace {

constexpr std::string_view kStyle = R"(
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1a1a1a; --line: #cccccc; --over: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #1b1b1b; --ink: #e6e6e6; --line: #4a4a4a; --over: #ff8a80; }
}
body { margin: 1em; background: var(--ground); color: var(--ink); font: 14px/1.5 system-ui, sans-serif; }
svg { max-width: 100%; height: auto; }
div { overflow-x: auto; }
table { border-collapse: collapse; margin-top: 1em; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: 0.5em 0; }
th, td { padding: 0.2em 0.7em; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th[scope=row], thead th:first-child, .kind { text-align: left; }
tfoot th, tfoot td { border-top: 2px solid var(--line); font-weight: bold; }
.worst { font-weight: bold; }
.over { color: var(--over); font-weight: bold; }
.swatch { display: inline-block; width: 1.3em; margin-right: 0.4em; text-align: center; font: 12px/1.5 monospace; }
)";

std::string heading_cells(const Sums& sums) {
  std::string html = "<th scope=\"col\">bar</th>";
  if (sums.has_measured()) html += "<th scope=\"col\" class=\"kind\">kind</th>";
  html += "<th scope=\"col\">total</th>";
  for (const TagSum& t : sums.tags) {
    html +=
        fmt::format("<th scope=\"col\"><span class=\"swatch\" style=\"background:#{:06x};color:#{}\">{}</span>{}</th>",
                    t.look.rgb, is_light(t.look.rgb) ? "000000" : "ffffff", t.look.letter, xml(t.look.tag));
  }
  return html;
}

std::string number_cell(i64 bytes, bool over = false) {
  return fmt::format("<td{}>{}</td>", over ? " class=\"over\"" : "", bytes == 0 ? "-" : bytes_text(bytes));
}

// The numbers of one kind; a tag may stand in a bar more than once.
std::string number_cells(const BarChart& chart, const std::vector<BarSegment>& segments, const Sums& sums) {
  std::string html = number_cell(total(segments), is_over(chart, segments));
  for (const TagSum& t : sums.tags) {
    i64 bytes = 0;
    for (const BarSegment& s : segments) bytes += s.tag == t.look.tag ? s.bytes : 0;
    html += number_cell(bytes);
  }
  return html;
}

// A row, or one for each kind; `cells(counted)` are those after the heading and the kind.
template <class Cells>
std::string rows(const Sums& sums, std::string_view heading, bool has_measured, const Cells& cells) {
  std::string html = fmt::format("<tr><th scope=\"row\"{}>{}</th>", has_measured ? " rowspan=\"2\"" : "", heading);
  if (sums.has_measured()) html += "<td class=\"kind\">predicted</td>";
  html += cells(false) + "</tr>\n";
  if (has_measured) html += fmt::format("<tr><td class=\"kind\">counted</td>{}</tr>\n", cells(true));
  return html;
}

std::string sum_rows(const Sums& sums) {
  return rows(sums, sum_heading(sums), sums.has_measured(), [&](bool counted) {
    std::string html = number_cell(counted ? sums.measured : sums.predicted);
    for (const TagSum& t : sums.tags) html += number_cell(counted ? t.measured : t.predicted);
    return html;
  });
}

std::string table(const BarChart& chart, const Sums& sums) {
  std::string caption = "Bytes by tag";
  if (chart.limit) caption += "; " + limit_text(chart);
  if (sums.bars_over > 0) caption += ": " + over_text(sums);
  std::string html = fmt::format("<div><table>\n<caption>{}</caption>\n", xml(caption));
  html += "<thead><tr>" + heading_cells(sums) + "</tr></thead>\n<tbody>\n";
  for (const Bar& bar : chart.bars) {
    const std::string heading =
        bar.worst ? fmt::format("<span class=\"worst\">{} (worst)</span>", xml(bar.label)) : xml(bar.label);
    html += rows(sums, heading, !bar.measured.empty(),
                 [&](bool counted) { return number_cells(chart, counted ? bar.measured : bar.predicted, sums); });
  }
  html += "</tbody>\n";
  if (sums.bars > 1) html += "<tfoot>\n" + sum_rows(sums) + "</tfoot>\n";
  return html + "</table></div>\n";
}

}  // namespace

std::string bar_html(const BarChart& chart) {
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n"
      "<title>{}</title>\n<style>{}</style>\n</head>\n<body>\n{}{}</body>\n</html>\n",
      xml(chart.title), kStyle, bar_svg(chart), table(chart, sums_of(chart)));
}

}  // namespace ds::chart
