"""How large the program is."""

from .install import command
from .section import MIB, Section, Target

MOST = 12


def measure(fronts, programs, work, short):
    stripped = work / "stripped"
    command("strip", "-o", stripped, programs.proxy)
    size = stripped.stat().st_size / MIB
    target = Target("the binary, release build, stripped", size, MOST, "MiB")
    return Section("Size", f"The binary of a release build, stripped, has {size:.1f} MiB.", [], [target])
