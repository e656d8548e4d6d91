"""The stories of clients that are cut off during a call."""

from dataclasses import dataclass

# Time in seconds after the end of the grace, when a cancel has long been sent.
AFTER_GRACE = 1.5
# Maximum delay of a cancel before a cell is abandoned. The referee has its own limit.
TIMEOUT = 5.0


@dataclass(frozen=True)
class Scenario:
    key: str
    title: str
    # Duration of the tool's work.
    seconds: float
    # Whether the client resumes for its answer.
    answered: bool = True

    async def play(self, cell):
        await cell.streaming()
        if not self.answered:
            # All other cells should have begun, because starting them would distort delays of milliseconds.
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
