"""The programs at both ends of the calls, each of which serves many cells."""

from .process import Program

AUTO_GRACE = 20.0


class Server:
    """The server for all cells with the same tier and set-up."""

    def __init__(self, binary, tier, setup, cells, logs, environment):
        self.cells = {cell.name: cell for cell in cells}
        self.grace = AUTO_GRACE if setup["grace"] is None else setup["grace"] / 1000
        self.tier = tier
        self.name = f"{tier}, retry {setup['retry']} ms, grace {self.grace} s"
        self.port = None
        self.counts = None
        self.cancelled = 0
        flags = ["--tier", tier, "--retry-ms", setup["retry"], "--grace", setup["grace"] or "auto"]
        flags += ["--store", "yes" if setup["store"] else "no"]
        log = logs / f"server-{tier}-{setup['retry']}"
        self._program = Program([binary, *flags], log, self._on_event, **environment)

    async def start(self):
        self.port = (await self._program.start("listening"))["port"]

    def order(self, **order):
        self._program.order(**order)

    async def end(self):
        await self._program.end()

    def _on_event(self, event):
        self.cancelled += event["event"] == "cancelled"
        if event["event"] == "end":
            self.counts = event
        else:
            self.cells[event["cell"]].on_event(event)


class ClientProgram(Program):
    """A client's process, for all its cells or for just one."""

    def __init__(self, client, cells, log, environment):
        self._cells = {cell.name: cell for cell in cells}
        super().__init__(client.command, log, self._on_event, **environment)

    def _on_event(self, event):
        self._cells[event["cell"]].on_event(event)
