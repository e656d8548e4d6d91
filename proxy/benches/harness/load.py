"""The clients, run by the program in load/."""

import json
import select
import subprocess
from contextlib import contextmanager


def calls(programs, target, clients, seconds):
    """Returns the calls per second, and the quantiles of the duration of a call in µs."""
    words = [programs.load, "calls", target, clients, seconds]
    done = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


class Clients:
    """Clients that run until they are killed."""

    def __init__(self, words):
        self._words = [str(word) for word in words]
        self._process = subprocess.Popen(self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def there(self):
        """Returns the report of the clients if it is available, without waiting for it."""
        return self.wait() if select.select([self._process.stdout], [], [], 0)[0] else None

    def wait(self):
        """Waits for the report of the clients."""
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self._words)} failed")
        return json.loads(line)

    def go_on(self):
        """Starts the next step of the clients, and waits for their report."""
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return self.wait()

    @property
    def pid(self):
        return self._process.pid

    def end(self):
        self._process.kill()
        self._process.communicate()


@contextmanager
def begun(programs, *words):
    """Starts clients that connect while the block runs, and stay until its end."""
    clients = Clients([programs.load, *words])
    try:
        yield clients
    finally:
        clients.end()


@contextmanager
def staying(programs, *words):
    """Starts clients that are connected when the block begins, and stay until its end. Yields their report."""
    with begun(programs, *words) as clients:
        yield clients.wait()
