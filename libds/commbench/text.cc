// SPDX-License-Identifier: Apache-2.0
// The table for people, in nccl-tests' columns, so that what reads theirs reads ours.

#include <fmt/format.h>

#include <algorithm>

#include "ds/commbench.h"
#include "ds/units.h"
#include "ds/version.h"

namespace ds::commbench {
namespace {

// As many decimals as fit the width, at most two; else with an exponent.
std::string number(double x, size_t width) {
  for (const int digits : {2, 1, 0}) {
    std::string text = fmt::format("{:.{}f}", x, digits);
    if (text.size() <= width) return text;
  }
  return fmt::format("{:.{}e}", x, width >= 7 ? 1 : 0);
}

std::string rate(const Row& r, double x) { return r.size > 0 ? number(x, 6) : "-"; }

std::string micro(double seconds) { return number(seconds * 1e6, 7); }

std::string wrong(const Timing& t) { return t.num_wrong ? fmt::format("{}", *t.num_wrong) : "N/A"; }

// A form's columns, of the same width whether it was measured or not.
std::string form_text(const Options& o, const Row& r, const std::optional<Timing>& t) {
  std::string text = t ? fmt::format("  {:>7}  {:>6}  {:>6}  {:>6}", micro(t->seconds), rate(r, t->alg_bw),
                                     rate(r, t->bus_bw), wrong(*t))
                       : fmt::format("  {:>7}  {:>6}  {:>6}  {:>6}", "-", "-", "-", "-");
  if (!o.blocking && !o.stats) return text;
  const auto one = [&](double Statistics::*member) { return t ? micro((*t->stats).*member) : std::string("-"); };
  return text + fmt::format("  {:>7}  {:>7}  {:>7}  {:>7}", one(&Statistics::min), one(&Statistics::avg),
                            one(&Statistics::max), one(&Statistics::p99));
}

std::string form_titles(const Options& o, bool units) {
  std::string text = units ? fmt::format("  {:>7}  {:>6}  {:>6}  {:>6}", "(us)", "(GB/s)", "(GB/s)", "")
                           : fmt::format("  {:>7}  {:>6}  {:>6}  {:>6}", "time", "algbw", "busbw", "#wrong");
  if (!o.blocking && !o.stats) return text;
  return text + (units ? fmt::format("  {:>7}  {:>7}  {:>7}  {:>7}", "(us)", "(us)", "(us)", "(us)")
                       : fmt::format("  {:>7}  {:>7}  {:>7}  {:>7}", "min", "avg", "max", "p99"));
}

std::string row_titles(bool units) {
  return units ? fmt::format("# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}", "(B)", "(elements)", "", "", "")
               : fmt::format("# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}", "size", "count", "type", "redop", "root");
}

std::string row_start(const Row& r) {
  return fmt::format("{:>12}  {:>12}  {:>8}  {:>6}  {:>6}", r.size, r.count, r.type, r.redop, r.root);
}

// The lines above the rows of an operation.
std::string titles(const Options& o, const Result& result, const Row& r) {
  std::string text = fmt::format("#\n# {}\n", r.op);
  if (result.backends.size() == 2) {
    text += fmt::format("{}  {:>5}", row_titles(false), "form");
    for (const std::string& b : result.backends)
      text += fmt::format("  {:>10}  {:>6}  {:>6}", b.substr(0, 10), "busbw", "#wrong");
    return text + fmt::format("  {:>6}\n{}  {:>5}", "ratio", row_titles(true), "") +
           fmt::format("  {:>10}  {:>6}  {:>6}  {:>10}  {:>6}  {:>6}\n", "(us)", "(GB/s)", "", "(us)", "(GB/s)", "");
  }
  if (r.overlap) {
    return text +
           fmt::format("{}  {:>7}  {:>7}  {:>7}  {:>7}  {:>6}  {:>6}\n", row_titles(false), "comm", "compute", "both",
                       "overlap", "busbw", "#wrong") +
           fmt::format("{}  {:>7}  {:>7}  {:>7}  {:>7}  {:>6}  {:>6}\n", row_titles(true), "(us)", "(us)", "(us)",
                       "(%)", "(GB/s)", "");
  }
  const size_t width = form_titles(o, true).size();
  return text +
         fmt::format("# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}{:^{}}{:^{}}\n", "", "", "", "", "", "out-of-place", width,
                     "in-place", width) +
         row_titles(false) + form_titles(o, false) + form_titles(o, false) + "\n" + row_titles(true) +
         form_titles(o, true) + form_titles(o, true) + "\n";
}

// Both backends' forms, one line each.
std::string compared(const Row& a, const Row& b) {
  std::string text;
  const auto line = [&](std::string_view form, const std::optional<Timing>& x, const std::optional<Timing>& y) {
    if (!x || !y) return;
    text += fmt::format("{}  {:>5}", row_start(a), form);
    for (const Timing& t : {*x, *y})
      text += fmt::format("  {:>10}  {:>6}  {:>6}", micro(t.seconds), rate(a, t.bus_bw), wrong(t));
    text += fmt::format("  {:>6}\n", number(x->seconds / y->seconds, 6));
  };
  line("out", a.out_of_place, b.out_of_place);
  line("in", a.in_place, b.in_place);
  return text;
}

std::string matrix_text(const Result& result, std::string_view backend, std::string_view title,
                        const std::function<double(const Pair&, bool back)>& value) {
  const size_t P = result.ranks.size();
  std::vector<std::string> cells(P * P, "-");
  for (const Pair& p : result.pairs) {
    if (p.backend != backend) continue;
    cells[static_cast<size_t>(p.from) * P + static_cast<size_t>(p.to)] = number(value(p, false), 8);
    cells[static_cast<size_t>(p.to) * P + static_cast<size_t>(p.from)] = number(value(p, true), 8);
  }
  std::string text = fmt::format("#\n# {}\n# {:>10}", title, "from \\ to");
  for (size_t q = 0; q < P; ++q) text += fmt::format("  {:>8}", q);
  text += "\n";
  for (size_t r = 0; r < P; ++r) {
    text += fmt::format("{:>12}", r);
    for (size_t q = 0; q < P; ++q) text += fmt::format("  {:>8}", cells[r * P + q]);
    text += "\n";
  }
  return text;
}

std::string step_text(const Options& o) {
  return o.step_bytes > 0 ? fmt::format("{}(bytes)", o.step_bytes) : fmt::format("{}(factor)", o.factor);
}

}  // namespace

std::string text_header(const Options& o, const Result& result) {
  constexpr std::string_view kAverages[] = {"rank 0", "mean", "min", "max"};
  std::string text = fmt::format("# ds-commbench {}\n", version());
  if (!result.mpi_version.empty())
    text += fmt::format("# {}\n", result.mpi_version.substr(0, result.mpi_version.find('\n')));
  if (!result.nccl_version.empty()) text += fmt::format("# NCCL {}\n", result.nccl_version);
  text += fmt::format(
      "# backend {}, memory {}, minBytes {} maxBytes {} step: {} warmup iters: {} iters: {} validation: {}\n",
      fmt::join(result.backends, " beside "), o.memory == Memory::Shared ? "shared" : "ordinary", o.min_bytes,
      o.max_bytes, step_text(o), o.warmup, o.iterations, o.check ? 1 : 0);
  text += fmt::format(
      "# times: {} of the ranks; {}\n", kAverages[static_cast<size_t>(o.average)],
      o.blocking ? "each iteration from a barrier to its end" : "iterations in a row, divided by their number");
  text += fmt::format("#\n# {} rank{}\n", result.ranks.size(), result.ranks.size() == 1 ? "" : "s");
  for (size_t r = 0; r < result.ranks.size(); ++r) {
    const RankPlace& p = result.ranks[r];
    text += fmt::format("#  Rank {:>2} Pid {:>6} on {:>10} device {} ({}, {} core{}{})\n", r, p.pid, p.host, p.device,
                        p.cpu, p.cores, p.cores == 1 ? "" : "s",
                        p.numa_node < 0 ? "" : fmt::format(", NUMA node {}", p.numa_node));
  }
  for (const std::string& why : result.left_out) text += fmt::format("# left out: {}\n", why);
  return text;
}

std::string text_row(const Options& o, const Result& result, const Row& row) {
  const size_t stride = result.backends.size();
  const size_t index = static_cast<size_t>(&row - result.rows.data());
  if (index % stride + 1 < stride) return "";  // the last backend of a size has the line
  const bool first = index < stride || result.rows[index - stride].op != row.op;
  std::string text = first ? titles(o, result, row) : "";
  if (stride == 2) return text + compared(result.rows[index - 1], row);
  text += row_start(row);
  if (row.overlap) {
    const Timing& t = *row.in_place;
    text += fmt::format("  {:>7}  {:>7}  {:>7}  {:>7}  {:>6}  {:>6}", micro(row.overlap->comm_s),
                        micro(row.overlap->compute_s), micro(row.overlap->both_s), number(row.overlap->percent, 7),
                        number(t.bus_bw, 6), wrong(t));
  } else {
    text += form_text(o, row, row.out_of_place) + form_text(o, row, row.in_place);
  }
  return text + "\n";
}

std::string text_footer(const Options& o, const Result& result) {
  std::string text;
  for (const std::string& b : result.backends) {
    if (!o.matrix) break;
    text += matrix_text(result, b, b + ": latency of 8 bytes, one way (us)",
                        [](const Pair& p, bool) { return p.latency_s * 1e6; });
    const std::string size = bytes_text(result.pairs.front().bytes);
    text += matrix_text(result, b, fmt::format("{}: bandwidth of {}, one way (GB/s)", b, size),
                        [](const Pair& p, bool back) { return (back ? p.back_bandwidth : p.bandwidth) / 1e9; });
    text += matrix_text(result, b, fmt::format("{}: bandwidth of {}, both ways at once, summed (GB/s)", b, size),
                        [](const Pair& p, bool) { return p.both_bandwidth / 1e9; });
  }
  text += "#\n";
  for (const Link& l : result.links)
    text += fmt::format("# link {} {}: latency {:.3g} us, bandwidth {:.3g} GB/s ({} pair{})\n", l.backend, l.link,
                        l.latency_s * 1e6, l.bandwidth / 1e9, l.pairs, l.pairs == 1 ? "" : "s");
  for (const AlphaBeta& m : result.models)
    text += fmt::format("# model {} {} {}: alpha {:.3g} us, bandwidth {} GB/s (error {:.0f} %)\n", m.backend, m.op,
                        m.form, m.alpha_s * 1e6,
                        m.beta_s_per_byte > 0 ? fmt::format("{:.3g}", 1e-9 / m.beta_s_per_byte) : "unbounded",
                        100 * m.error);
  if (result.rows.empty()) return text;
  text += fmt::format("# {:<20} : {} {}\n", "Out of bounds values", result.num_wrong,
                      !o.check                ? "UNCHECKED"
                      : result.num_wrong == 0 ? "OK"
                                              : "FAILED");
  return text + fmt::format("# {:<20} : {:g}\n#\n", "Avg bus bandwidth", result.average_bus_bw);
}

}  // namespace ds::commbench
