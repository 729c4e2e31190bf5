"""The view of a report for a browser: one page that needs nothing else.

No script, no font and no picture is loaded, so that the page can be kept beside a build and opened
years later.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cuverify.report import Coverage, Finding, Report, Table

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --bad: #c62828; --warn: #b26a00;
  --good: #2e7d32; }
@media (prefers-color-scheme: dark) { :root { --bad: #ff7b72; --warn: #e3b341; --good: #56d364; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; }
h2 { font-size: 1.15rem; margin-top: 2rem; border-bottom: 1px solid var(--line); }
code, pre { font: .9em/1.45 ui-monospace, monospace; }
pre { background: var(--soft); padding: .6rem; overflow-x: auto; white-space: pre-wrap; margin: 0; }
.verdict { font-weight: 600; }
.error, .bad { color: var(--bad); } .warning { color: var(--warn); } .good { color: var(--good); }
article { border-left: 4px solid var(--line); margin: 1rem 0; padding: .1rem 1rem; }
article.error { border-color: var(--bad); color: inherit; }
article.warning { border-color: var(--warn); color: inherit; }
article h3 { font-size: 1rem; margin: .4rem 0; }
article p { margin: .4rem 0; }
.fix { background: var(--soft); padding: .5rem .8rem; white-space: pre-line; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .7rem; text-align: left;
  vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
details { margin: .4rem 0; } summary { cursor: pointer; }
"""


def page(report: Report, verdict: str) -> str:
    """Return a report as an HTML document.

    Parameters
    ----------
    report : Report
    verdict : str
        The outcome in one line, as the text view ends with it.
    """
    return "\n".join(_lines(report, verdict)) + "\n"


def _lines(report: Report, verdict: str) -> Iterator[str]:
    title = html.escape(report.title)
    yield "<!doctype html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{title}</title><style>{_STYLE}</style></head><body>"
    yield f"<h1>{title}</h1>"
    yield f'<p class="verdict {"good" if report.ok else "bad"}">{html.escape(verdict)}</p>'
    if report.findings:
        yield "<h2>Findings</h2>"
        for finding in report.findings:
            yield from _finding(finding)
    for table in report.tables:
        if table.rows:
            yield from _table(table)
    if report.coverage:
        yield "<h2>What was inspected</h2>"
        yield from _coverage(report.coverage)
    if report.environment:
        yield "<h2>Environment</h2>"
        yield from _pairs(report.environment)
    yield "</body></html>"


def _finding(finding: Finding) -> Iterator[str]:
    from cuverify.report import has_page

    yield f'<article class="{finding.severity}">'
    yield (
        f'<h3><span class="{finding.severity}">{finding.severity}</span> '
        f"<code>{html.escape(finding.rule)}</code></h3>"
    )
    if finding.where:
        yield f"<p><code>{html.escape(finding.where)}</code></p>"
    yield f"<p>{html.escape(finding.message)}</p>"
    if finding.fix:
        yield f'<p class="fix"><strong>Fix:</strong> {html.escape(finding.fix)}</p>'
    if finding.evidence:
        yield "<details><summary>Evidence</summary>"
        yield from _pairs(finding.evidence)
        yield "</details>"
    if has_page(finding.rule):
        yield f"<p>More: <code>cuverify explain {html.escape(finding.rule)}</code></p>"
    yield "</article>"


def _table(table: Table) -> Iterator[str]:
    yield f"<h2>{html.escape(table.title)}</h2>"
    yield '<div class="scroll"><table><thead><tr>'
    yield "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    yield "</tr></thead><tbody>"
    for row in table.rows:
        yield "<tr>" + "".join(_cell(value) for value in row) + "</tr>"
    yield "</tbody></table></div>"


def _cell(value: Any) -> str:
    from cuverify.report import plain, shown

    value = plain(value)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"<td{' class=number' if number else ''}>{html.escape(shown(value))}</td>"


def _coverage(entries: list[Coverage]) -> Iterator[str]:
    yield '<div class="scroll"><table><tbody>'
    for entry in entries:
        kind = "good" if entry.status == "inspected" else "warning"
        yield (
            f"<tr><td>{html.escape(entry.subject)}</td>"
            f'<td class="{kind}">{entry.status}</td><td>{html.escape(entry.detail)}</td></tr>'
        )
    yield "</tbody></table></div>"


def _pairs(values: Mapping[str, Any]) -> Iterator[str]:
    from cuverify.report import plain, shown

    yield '<div class="scroll"><table><tbody>'
    for key, value in plain(values, "values").items():
        text = html.escape(shown(value))
        cell = f"<pre>{text}</pre>" if "\n" in text else text
        yield f"<tr><th>{html.escape(str(key))}</th><td>{cell}</td></tr>"
    yield "</tbody></table></div>"
