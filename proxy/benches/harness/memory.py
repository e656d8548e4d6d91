"""The memory of a process and all its children, without the servers behind it."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# A flag of the kernel: the process was forked and has not yet started its own program.
PF_FORKNOEXEC = 0x40


@dataclass(frozen=True)
class Memory:
    """The memory of processes, in bytes. PSS counts a page that several processes share proportionally."""

    rss: int
    pss: int


def of(pid, programs):
    """Returns the memory of a process and its children, without the servers behind it."""
    rss = pss = 0
    for process in tree(pid):
        # A process may end in the meantime.
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if is_starting(process) or os.readlink(f"/proc/{process}/exe") == str(programs.load):
                continue
            memory = of_process(process)
            rss += memory.rss
            pss += memory.pss
    return Memory(rss, pss)


def of_process(pid):
    kept = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return Memory(kib(kept, "Rss") * 1024, kib(kept, "Pss") * 1024)


def is_starting(pid):
    """Returns whether the process has yet to start its own program. Until then its memory is its parent's and would
    be counted twice."""
    flags = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6])
    return bool(flags & PF_FORKNOEXEC)


def tree(pid):
    yield pid
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                yield from tree(int(child))


def kib(text, name):
    return int(re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)[1])
