//! Network namespaces without unsafe code. `unshare` starts a child process in a new namespace; `ip` and `tc` set up
//! the interfaces.

use std::{env, ffi::OsString, process::Command};

const ROLE: &str = "DEAD_PEER_ROLE";

/// The interfaces and their addresses, the only ones in their namespaces.
pub(crate) const SERVER: Interface = Interface {
    name: "dead-server",
    address: "10.0.0.1",
};
pub(crate) const CLIENT: Interface = Interface {
    name: "dead-client",
    address: "10.0.0.2",
};

/// A namespace's loopback interface.
pub(crate) const LOOPBACK: Interface = Interface {
    name: "lo",
    address: "127.0.0.1",
};

/// A part of the test that runs in its own process.
#[derive(Clone, Copy)]
pub(crate) enum Role {
    Server,
    Client,
}

/// A way to create namespaces that works on this machine.
pub(crate) struct Unshare {
    arguments: &'static [&'static str],
}

/// A network interface: one end of the pair, or loopback.
pub(crate) struct Interface {
    pub(crate) name: &'static str,
    pub(crate) address: &'static str,
}

// === impl Role ===

impl Role {
    /// Returns `true` if this process was started for this role. Returns `false` if all ignored tests were
    /// requested.
    pub(crate) fn is_ours(self) -> bool {
        env::var_os(ROLE) == Some(OsString::from(self.name()))
    }

    /// The name of the test that runs the role.
    fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Client => "client",
        }
    }
}

// === impl Unshare ===

impl Unshare {
    /// For root.
    pub(crate) const AS_ROOT: Self = Self {
        arguments: &["--net"],
    };

    /// For ordinary users, where the kernel allows user namespaces.
    const AS_USER: Self = Self {
        arguments: &["--map-root-user", "--net"],
    };

    /// Returns the first way that works, or the last one's error if none does.
    pub(crate) fn find() -> Result<Self, String> {
        let as_root = Self::AS_ROOT.try_out();
        as_root.or_else(|_| Self::AS_USER.try_out())
    }

    /// Tries out everything the test needs.
    fn try_out(self) -> Result<Self, String> {
        const TRIAL_COMMANDS: &str = "ip link add dead-server type veth peer name dead-client && \
                             ip link set dead-client up && \
                             tc qdisc replace dev dead-client root pfifo limit 0";
        let trial = self.unshare().args(["sh", "-c", TRIAL_COMMANDS]).output();
        let output = trial.map_err(|error| format!("unshare: {error}"))?;
        if output.status.success() {
            Ok(self)
        } else {
            Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
        }
    }

    /// A command that runs this binary in a new namespace, in this role.
    pub(crate) fn command(&self, role: Role) -> Command {
        let mut command = self.unshare();
        command
            .arg(env::current_exe().unwrap())
            .args(["--exact", role.name(), "--ignored", "--nocapture"])
            .env(ROLE, role.name());
        command
    }

    fn unshare(&self) -> Command {
        let mut command = Command::new("unshare");
        command.args(self.arguments).arg("--");
        command
    }
}

// === impl Interface ===

impl Interface {
    /// Creates the pair, with this end in our namespace and the other end in a process's.
    pub(crate) fn join(&self, other: &Self, process: u32) {
        let pair = format!(
            "link add {} type veth peer name {} netns {process}",
            self.name, other.name
        );
        run("ip", &pair);
    }

    /// Assigns the interface's address and brings the interface up.
    pub(crate) fn up(&self) {
        run(
            "ip",
            &format!("address add {}/24 dev {}", self.address, self.name),
        );
        run("ip", &format!("link set {} up", self.name));
    }

    /// Drops every packet sent through this end, by limiting its queue to zero. The sender gets no error.
    pub(crate) fn silence(&self) {
        run(
            "tc",
            &format!("qdisc replace dev {} root pfifo limit 0", self.name),
        );
    }
}

fn run(program: &str, arguments: &str) {
    let output = Command::new(program).args(arguments.split(' ')).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments}: {stderr}");
}
