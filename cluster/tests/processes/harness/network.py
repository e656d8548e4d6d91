"""A network namespace for each process, and links between all of them that can be silenced."""

import subprocess

# The namespace that the clients and the balancer share.
HUB = "hub"
ADDRESSES = {HUB: "10.77.0.9", "a": "10.77.0.1", "b": "10.77.0.2", "c": "10.77.0.3", "redis": "10.77.0.4"}
# Inside its namespace, a process waits for a line, which it is sent once its links exist.
INSIDE = ["unshare", "--net", "--", "sh", "-c", 'read -r _ && exec "$0" "$@"']


class Network:
    def __init__(self):
        self._pids = {HUB: None}

    def join(self, pids):
        """Links all processes, which are given by name."""
        self._pids.update(pids)
        names = list(self._pids)
        for name in names:
            self._in(name, "ip link set lo up")
            self._in(name, f"ip address add {ADDRESSES[name]}/32 dev lo")
        for at, name in enumerate(names):
            for other in names[at + 1:]:
                ends = (name, other), (other, name)
                self._in(HUB, f"ip link add {_end(*ends[0])} type veth peer name {_end(*ends[1])}")
                for here, there in ends:
                    if here != HUB:
                        self._in(HUB, f"ip link set {_end(here, there)} netns {self._pids[here]}")
                for here, there in ends:
                    self._in(here, f"ip link set {_end(here, there)} up")
                for here, there in ends:
                    self._in(here, f"ip route add {ADDRESSES[there]}/32 dev {_end(here, there)} src {ADDRESSES[here]}")

    def silence(self, name, other):
        """Silently drops all packets between two namespaces, by means of a queue of length zero."""
        for here, there in ((name, other), (other, name)):
            self._in(here, f"tc qdisc replace dev {_end(here, there)} root pfifo limit 0")

    def restore(self, name, other):
        for here, there in ((name, other), (other, name)):
            self._in(here, f"tc qdisc del dev {_end(here, there)} root")

    def _in(self, name, command):
        pid = self._pids[name]
        inside = ["nsenter", "--target", str(pid), "--net", "--"] if pid else []
        subprocess.run([*inside, *command.split()], check=True, capture_output=True, timeout=10)


def has_namespaces():
    """Returns whether this machine allows namespaces."""
    trial = "ip link add a-b type veth peer name b-a && ip link set a-b up && tc qdisc replace dev a-b root pfifo limit 0"
    try:
        return subprocess.run(["unshare", "--net", "--", "sh", "-c", trial], capture_output=True, timeout=10).returncode == 0
    except OSError:
        return False


def _end(name, other):
    return f"{name}-{other}"
