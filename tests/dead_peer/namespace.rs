//! Network namespaces without unsafe code: a child process is started in one by `unshare`, and the interfaces
//! are set up by `ip` and `tc`.

use std::{env, ffi::OsString, process::Command};

const ROLE: &str = "DEAD_PEER_ROLE";

/// The interfaces, and the addresses they have in namespaces where there is nothing else.
pub(crate) const SERVER: Interface = Interface {
    name: "dead-server",
    address: "10.0.0.1",
};
pub(crate) const CLIENT: Interface = Interface {
    name: "dead-client",
    address: "10.0.0.2",
};

/// What a namespace talks to itself by.
pub(crate) const LOOPBACK: Interface = Interface {
    name: "lo",
    address: "127.0.0.1",
};

/// A part of the test that is a process of its own.
#[derive(Clone, Copy)]
pub(crate) enum Role {
    Server,
    Client,
}

/// A way of making namespaces that works here.
pub(crate) struct Unshare {
    arguments: &'static [&'static str],
}

/// One end of the pair.
pub(crate) struct Interface {
    pub(crate) name: &'static str,
    pub(crate) address: &'static str,
}

// === impl Role ===

impl Role {
    /// Whether this process was started to play it, not by somebody who runs all ignored tests.
    pub(crate) fn is_ours(self) -> bool {
        env::var_os(ROLE) == Some(OsString::from(self.name()))
    }

    /// The name of the test that plays it.
    fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Client => "client",
        }
    }
}

// === impl Unshare ===

impl Unshare {
    /// For a process that is root in its namespace.
    pub(crate) const AS_ROOT: Self = Self {
        arguments: &["--net"],
    };

    /// For a user whom the kernel lets be root in a namespace of their own.
    const AS_USER: Self = Self {
        arguments: &["--map-root-user", "--net"],
    };

    /// The first way that works, or what the last one said.
    pub(crate) fn find() -> Result<Self, String> {
        let as_root = Self::AS_ROOT.try_out();
        as_root.or_else(|_| Self::AS_USER.try_out())
    }

    /// Does in miniature what the test does.
    fn try_out(self) -> Result<Self, String> {
        const TRIAL: &str = "ip link add dead-server type veth peer name dead-client && \
                             ip link set dead-client up && \
                             tc qdisc replace dev dead-client root pfifo limit 0";
        let trial = self.unshare().args(["sh", "-c", TRIAL]).output();
        let output = trial.map_err(|error| format!("unshare: {error}"))?;
        if output.status.success() {
            Ok(self)
        } else {
            Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
        }
    }

    /// This binary, in a new namespace and in a role.
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
    /// Makes the pair: this end here, the other one in the namespace of a process.
    pub(crate) fn join(&self, other: &Self, process: u32) {
        let pair = format!(
            "link add {} type veth peer name {} netns {process}",
            self.name, other.name
        );
        run("ip", &pair);
    }

    /// Gives this end its address.
    pub(crate) fn up(&self) {
        run(
            "ip",
            &format!("address add {}/24 dev {}", self.address, self.name),
        );
        run("ip", &format!("link set {} up", self.name));
    }

    /// Throws away what leaves by this end, from now on and without a word to anybody: a queue without a place.
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
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments}: {said}");
}
