"""A section of the report, and its targets for the program."""

import statistics
from dataclasses import dataclass, field

MB = 1e6
MIB = 1024 * 1024


@dataclass(frozen=True)
class Target:
    what: str
    measured: float
    most: float
    unit: str
    digits: int = 1

    @property
    def holds(self):
        return self.measured <= self.most

    @property
    def text(self):
        return f"{self.measured:,.{self.digits}f} {self.unit}, and may be {self.most:,g} {self.unit}"


@dataclass
class Section:
    title: str
    text: str
    # Each is a list of columns and a list of rows.
    tables: list
    targets: list = field(default_factory=list)


def spread(values, digits=0):
    """Returns the median, and the quartiles in brackets."""
    middle = statistics.median(values)
    least, _, most = statistics.quantiles(values, n=4) if len(values) > 1 else [middle] * 3
    return f"{middle:,.{digits}f} ({least:,.{digits}f}–{most:,.{digits}f})"
