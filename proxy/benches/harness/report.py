"""The report as a page."""

import datetime
import os
import platform
import re
from pathlib import Path

from .install import command

HEAD = """\
# What the proxy costs

Written by `proxy/benches/run --commit`, which measures everything again in one run. `proxy/benches/run --short` only checks that the
benches work. `load/` has the server behind all set-ups and the clients in front of them. `harness/` has the measurements.

Measured on {machine}.

## Targets

| what | measured | at most | |
| --- | --- | --- | --- |
{targets}
"""


def page(programs, sections):
    targets = "\n".join(
        line(t.what, f"{t.measured:,.{t.digits}f} {t.unit}", f"{t.most:,g} {t.unit}", "holds" if t.holds else "**missed**")
        for section in sections
        for t in section.targets
    )
    return HEAD.format(machine=machine(programs), targets=targets) + "".join(map(part, sections))


def part(section):
    text = f"\n## {section.title}\n\n{section.text}\n"
    for about, columns, rows in section.tables:
        # A subsection.
        about = about.replace("## ", "### ", 1)
        text += f"\n{about}\n" * bool(about)
        text += "\n" + "\n".join([line(*columns), line(*["---"] * len(columns)), *(line(*row) for row in rows)]) + "\n"
    return text


def line(*cells):
    return f"| {' | '.join(str(cell).strip() for cell in cells)} |"


def machine(programs):
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = int(re.search(r"^MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) / 1024**2
    facts = [
        cpu[1] if cpu else platform.machine(),
        f"{os.cpu_count()} cores",
        f"{memory:.0f} GiB",
        f"{platform.system()} {platform.release()}",
        command("rustc", "--version").strip(),
        f"load average {os.getloadavg()[0]:.1f} at the end",
    ]
    if programs.cache:
        facts += [f"node {command('node', '--version').strip()}", f"Python {platform.python_version()}"]
    return f"{datetime.date.today()}: {', '.join(facts)}"
