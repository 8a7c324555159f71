// The style sheet of the report page: light, dark and print from one set of variables.
//
// Invariant: it loads nothing. Test: tests/cli/report_test.cc.
#pragma once

#include <string_view>

namespace argosy::tools {

inline constexpr std::string_view kReportStyle = R"css(
:root { color-scheme: light dark;
  --page: #ffffff; --ink: #1b1f24; --soft: #5c6570; --line: #dde1e6; --band: #f3f5f7;
  --bar: #7fa8d9; --accent: #c2410c; --heat: #1d4f91; --heat-ink: #ffffff;
  --good: #17693a; --good-back: #e3f4e9; --bad: #a11224; --bad-back: #fce8ea;
  --route: #3b7dd8; --counts: #a3abb5; --shared: #c9a400; --dispatch: #1a9a8a;
  --experts: #7a5bc7; --combine: #e07b39; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171b; --ink: #e6e9ed; --soft: #9aa4af; --line: #2e343b; --band: #1c2026;
  --bar: #4f7cb3; --accent: #fb923c; --heat: #2f6cc0; --heat-ink: #ffffff;
  --good: #7ddba0; --good-back: #14301f; --bad: #ff9aa5; --bad-back: #3b161b;
  --route: #5f9bea; --counts: #6d7681; --shared: #d9bc3f; --dispatch: #2fb5a4;
  --experts: #9d83e0; --combine: #ee955a; } }
@media print { :root {
  --page: #ffffff; --ink: #000000; --soft: #444444; --line: #cccccc; --band: #f3f5f7;
  --bar: #7fa8d9; --accent: #c2410c; --heat: #1d4f91; --heat-ink: #ffffff;
  --good: #17693a; --good-back: #e3f4e9; --bad: #a11224; --bad-back: #fce8ea;
  --route: #3b7dd8; --counts: #a3abb5; --shared: #c9a400; --dispatch: #1a9a8a;
  --experts: #7a5bc7; --combine: #e07b39; }
  section, tr, svg { break-inside: avoid; } }
* { box-sizing: border-box; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
body { margin: 0 auto; padding: 32px 24px 48px; max-width: 968px; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans",
  sans-serif; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 0 0 4px; }
section { margin-top: 36px; }
p { margin: 0 0 10px; color: var(--soft); max-width: 48em; }
code { font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; overflow-wrap: anywhere; }
.verdict { display: inline-block; margin: 12px 0 0; padding: 4px 12px; border-radius: 6px;
  font-weight: 600; background: var(--band); color: var(--soft); }
.verdict.pass { background: var(--good-back); color: var(--good); }
.verdict.fail { background: var(--bad-back); color: var(--bad); }
ul.failures { margin: 8px 0 0; padding-left: 22px; color: var(--bad); }
dl.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(132px, 1fr));
  gap: 12px 20px; margin: 20px 0 0; padding: 14px 0; border-top: 1px solid var(--line);
  border-bottom: 1px solid var(--line); }
dl.facts dt { font-size: 12px; color: var(--soft); }
dl.facts dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
dl.facts .wide { grid-column: 1 / -1; }
.scroll { overflow-x: auto; }
.beside { display: flex; flex-wrap: wrap; gap: 24px 36px; align-items: flex-start; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 0 4px 20px; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { padding-left: 0; text-align: left; }
th { font-size: 12px; font-weight: 500; color: var(--soft); vertical-align: bottom; }
tr.sum td { font-weight: 600; border-bottom: 0; }
td.text, th.text { text-align: left; }
td.pass { color: var(--good); } td.fail { color: var(--bad); font-weight: 600; }
td.share { width: 260px; }
td.share span { display: block; height: 12px; border-radius: 2px; }
.key { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 6px 0 8px; font-size: 13px; }
.key i { display: inline-block; width: 12px; height: 12px; margin-right: 6px; border-radius: 2px;
  vertical-align: -1px; }
footer { margin-top: 40px; padding-top: 12px; border-top: 1px solid var(--line);
  font-size: 13px; color: var(--soft); }
svg { display: block; max-width: 100%; height: auto; }
svg text { font-size: 11px; fill: var(--ink); font-variant-numeric: tabular-nums; }
svg .mid { text-anchor: middle; } svg .end { text-anchor: end; }
svg .small { font-size: 10px; } svg .strong { font-weight: 700; }
svg .soft { fill: var(--soft); } svg .light { fill: var(--heat-ink); }
svg text.value, svg text.accent { paint-order: stroke; stroke: var(--page); stroke-width: 3px;
  stroke-linejoin: round; }
svg text.accent { fill: var(--accent); }
svg .grid { stroke: var(--line); } svg .band { fill: var(--band); }
svg .bar { fill: var(--bar); } svg .most { fill: var(--accent); }
svg .mean { stroke: var(--accent); stroke-dasharray: 5 4; }
svg .heat { fill: var(--heat); } svg .stays { fill: var(--band); }
svg .heat, svg .stays { stroke: var(--page); stroke-width: 1; }
svg .route { fill: var(--route); } i.route, span.route { background: var(--route); }
svg .counts { fill: var(--counts); } i.counts, span.counts { background: var(--counts); }
svg .shared { fill: var(--shared); } i.shared, span.shared { background: var(--shared); }
svg .dispatch { fill: var(--dispatch); } i.dispatch, span.dispatch { background: var(--dispatch); }
svg .experts { fill: var(--experts); } i.experts, span.experts { background: var(--experts); }
svg .combine { fill: var(--combine); } i.combine, span.combine { background: var(--combine); }
)css";

}  // namespace argosy::tools
