"""The stories of clients that are cut off in the middle of a call."""

from dataclasses import dataclass

# After the end of the grace, when a cancel has been told long since.
AFTER_GRACE = 1.5
# What a cancel may be late before a cell is given up. The referee has its own opinion.
PATIENCE = 5.0


@dataclass(frozen=True)
class Scenario:
    key: str
    title: str
    # How long the tool works.
    seconds: float
    # Whether the client comes back for its answer.
    answered: bool = True

    async def play(self, cell):
        await cell.streaming()
        if not self.answered:
            # All others should have begun: what begins takes time of a machine on which this is about milliseconds.
            await cell.quiet()
        cell.cut()
        match self.key:
            case "resume":
                cell.back()
            case "late":
                await cell.until("finished", self.seconds + PATIENCE)
                await cell.sleep(0.5)
                cell.back()
            case "after-grace":
                await cell.sleep(cell.grace + AFTER_GRACE)
                cell.back()
            case "gone":
                await cell.until("cancelled", cell.grace + PATIENCE)
                return
        await cell.until("outcome", PATIENCE + 20.0)


GONE = Scenario("gone", "gone", 90.0, answered=False)
RESUME = Scenario("resume", "back before the end", 6.0)
LATE = Scenario("late", "back after the end", 3.0)
AFTER = Scenario("after-grace", "back after the grace", 3.0)
SCENARIOS = [GONE, RESUME, LATE, AFTER]
