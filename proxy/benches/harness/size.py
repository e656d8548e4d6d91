"""The size of the program."""

from .install import command
from .section import MB, Section, Target

MOST = 12


def measure(fronts, programs, work, short):
    stripped = work / "stripped"
    command("strip", "-o", stripped, programs.proxy)
    size = stripped.stat().st_size / MB
    target = Target("the binary, release build, stripped", size, MOST, "MB")
    return Section("Size", f"The binary of a release build, stripped, has {size:.1f} MB.", [], [target])
