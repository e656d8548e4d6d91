"""The stories of clients that are cut off mid-call."""

from dataclasses import dataclass

# How many seconds after the end of the grace, when a cancel has long been sent.
AFTER_GRACE = 1.5
# How late a cancel may be before the cell is abandoned. The referee has its own limit.
TIMEOUT = 5.0


@dataclass(frozen=True)
class Scenario:
    key: str
    title: str
    # How long the tool works.
    seconds: float
    # Whether the client resumes to get its answer.
    answered: bool = True

    async def play(self, cell):
        await cell.streaming()
        if not self.answered:
            # All other cells should have begun by now, because starting them would distort delays of a few
            # milliseconds.
            await cell.quiet()
        cell.cut()
        match self.key:
            case "resume":
                cell.back()
            case "late":
                await cell.until("finished", self.seconds + TIMEOUT)
                await cell.sleep(0.5)
                cell.back()
            case "after-grace":
                await cell.sleep(cell.grace + AFTER_GRACE)
                cell.back()
            case "gone":
                await cell.until("cancelled", cell.grace + TIMEOUT)
                return
        await cell.until("outcome", TIMEOUT + 20.0)


NEVER_RESUMES = Scenario("gone", "gone", 90.0, answered=False)
RESUME = Scenario("resume", "back before the end", 6.0)
LATE = Scenario("late", "back after the end", 3.0)
AFTER = Scenario("after-grace", "back after the grace", 3.0)
SCENARIOS = [NEVER_RESUMES, RESUME, LATE, AFTER]
