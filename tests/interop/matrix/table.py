"""The matrix as text."""

COLUMNS = {"bare": "bare rmcp", "layer": "layer only", "wrapped": "layer, session manager"}


def table(reports):
    """Formats {(scenario, client, tier): report}, in its order."""
    rows = {}
    for (scenario, client, tier), report in reports.items():
        rows.setdefault((scenario.title, client.title), {})[tier] = text(report)
    lines = [("scenario", "client", *COLUMNS.values())]
    last = None
    for (scenario, client), cells in rows.items():
        lines.append((scenario if scenario != last else "", client, *(cells.get(tier, "") for tier in COLUMNS)))
        last = scenario
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join(" | ".join(word.ljust(width) for word, width in zip(line, widths)).rstrip() for line in lines)


def text(report):
    if report is None:
        return "broken"
    refused = f"+{report.refused}" if report.refused else ""
    polls = f" !{report.polls}" if report.polls else ""
    return f"{report.what:9} {report.after:5.1f} s {report.requests:3}{refused} req{polls}"
