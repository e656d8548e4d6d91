//! The program in front of the scripted server, in a given phase.

use std::{
    fs,
    io::Read as _,
    net::SocketAddr,
    path::PathBuf,
    process::{Child, ChildStderr, Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::json;
use tokio::{
    net::TcpStream,
    time::{Instant, sleep, timeout},
};

use crate::{
    support::{Connection, Mcp, Program, Request, free_address, within},
    table::Phase,
};

/// How often to check for states that no event announces.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// How long a cell's tool works, in seconds.
const WORK: f64 = 1.5;

/// How long a drain may take, with a margin for loaded machines.
const DRAIN: Duration = Duration::from_secs(12);

/// How the program is started.
pub(crate) struct Setup {
    /// What a shell does before it becomes the program, such as `ulimit`.
    pub(crate) preparation: &'static str,
    /// Redirections for the program.
    pub(crate) redirections: &'static str,
    pub(crate) options: &'static [&'static str],
    /// Variables in its environment.
    pub(crate) variables: &'static [(&'static str, &'static str)],
    pub(crate) stderr: Reader,
}

/// What happens to the pipe that serves as the program's standard error.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reader {
    Reads,
    Closes,
    NeverReads,
}

/// A running program in a given phase, which is killed on drop.
pub(crate) struct Started {
    program: Child,
    pub(crate) addr: SocketAddr,
    admin: SocketAddr,
    log: Arc<Mutex<String>>,
    _unread: Option<ChildStderr>,
    tool_log: PathBuf,
    /// The descriptors that the program had open before the first client.
    descriptors: usize,
    pub(crate) client: Option<Mcp>,
    processes: Vec<Pid>,
    call: Option<Connection>,
    first_event: Option<String>,
}

// === impl Setup ===

impl Default for Setup {
    fn default() -> Self {
        Self {
            preparation: "true",
            redirections: "",
            options: &[],
            variables: &[],
            stderr: Reader::Reads,
        }
    }
}

// === impl Started ===

impl Started {
    /// Starts the program and gets it into a phase.
    pub(crate) async fn in_phase(setup: Setup, phase: Phase) -> Self {
        let mut started = Self::start(setup).await;
        if phase != Phase::BeforeInitialize {
            started.initialize().await;
        }
        if matches!(phase, Phase::Idle | Phase::BeforeInitialize) {
            return started;
        }
        let client = started.client.as_ref().expect("a session");
        let arguments = json!({ "seconds": WORK, "label": "first" });
        let mut call = client.call(7, "work", arguments).await;
        assert_eq!(call.head().await.status, 200, "the call");
        started.first_event = call.event().await.expect("an event").id;
        started.reach_log_entry("started first").await;
        match phase {
            Phase::ClientAway => call.rst(),
            Phase::AnswerWaits => {
                call.rst();
                started.reach_log_entry("finished first").await;
            }
            _ => started.call = Some(call),
        }
        if phase == Phase::Draining {
            started.signal(Signal::TERM);
            started.wait_until_draining().await;
        }
        started
    }

    async fn start(setup: Setup) -> Self {
        Self::in_front_of(setup, &[]).await
    }

    /// Starts the program in front of a command, or of the scripted server if that is empty.
    pub(crate) async fn in_front_of(setup: Setup, command_line: &[&str]) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("mcp-cancel-proxy-{}-cell-{number}", std::process::id());
        let tool_log = std::env::temp_dir().join(name);
        let [addr, admin] = [free_address(), free_address()];
        // The tests may be running with SIGHUP ignored, as under `nohup`, which a shell cannot undo for the programs that it starts.
        let mut command = Command::new("/usr/bin/env");
        // None of the program's options are set in a test's environment.
        let clean = Program::command(&[]);
        for (name, value) in clean.get_envs() {
            if value.is_none() {
                command.env_remove(name);
            }
        }
        let binary = env!("CARGO_BIN_EXE_mcp-cancel-proxy");
        let script = format!(
            "{}; exec \"$0\" \"$@\" {}",
            setup.preparation, setup.redirections
        );
        command
            .args(["--default-signal=HUP", "/bin/bash", "-c", &script, binary])
            .args([format!("--listen={addr}"), format!("--admin={admin}")])
            .args(setup.options)
            .arg("--")
            .envs(setup.variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if command_line.is_empty() {
            command
                .args([binary, "scripted-server", "--notes"])
                .arg(&tool_log);
        } else {
            command.args(command_line);
        }
        let mut program = command.spawn().expect("the program starts");
        let log = Arc::default();
        let stderr = program.stderr.take();
        let unread = match setup.stderr {
            Reader::Reads => {
                collect(stderr.expect("a pipe"), Arc::clone(&log));
                None
            }
            Reader::Closes => None,
            Reader::NeverReads => stderr,
        };
        let mut started = Self {
            program,
            addr,
            admin,
            log,
            _unread: unread,
            tool_log,
            descriptors: 0,
            client: None,
            processes: Vec::new(),
            call: None,
            first_event: None,
        };
        started.wait_until_listening().await;
        started.descriptors = started.count_descriptors();
        started
    }

    async fn wait_until_listening(&mut self) {
        let until = Instant::now() + Duration::from_secs(20);
        while TcpStream::connect(self.admin).await.is_err() {
            let ended = self.program.try_wait().expect("a status");
            assert_eq!(ended, None, "the program did not start: {}", self.logged());
            assert!(Instant::now() < until, "the program is not listening");
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Opens a session whose process has a child of its own.
    pub(crate) async fn initialize(&mut self) {
        let client = Mcp::stateless(self.addr, "/mcp").version("2025-11-25");
        let client = within("a session", client.connect()).await;
        for tool in ["pid", "fork"] {
            let mut call = client.call(tool, tool, json!({})).await;
            let answer = within(tool, call.answer()).await.expect("an answer");
            let text = answer["result"]["content"][0]["text"].as_str();
            let pid = text.expect("text").parse().expect("a number");
            self.processes.push(Pid::from_raw(pid).expect("a process"));
        }
        self.client = Some(client);
    }

    /// Checks that the client gets this phase's answers as if there had been no fault.
    pub(crate) async fn client_is_served(&mut self, phase: Phase) {
        match phase {
            Phase::BeforeInitialize => self.initialize().await,
            Phase::Idle => {
                let client = self.client.as_ref().expect("a session");
                let mut call = client.call(8, "pid", json!({})).await;
                let answer = within("an answer", call.answer()).await;
                assert!(answer.expect("an answer")["result"].is_object());
            }
            Phase::CallInFlight | Phase::Draining => {
                let call = self.call.as_mut().expect("a call");
                let answer = within("the answer", call.answer()).await;
                let answer = answer.expect("the answer");
                assert!(answer["result"].is_object(), "{answer}");
                self.call = None;
            }
            Phase::ClientAway | Phase::AnswerWaits => {
                let client = self.client.as_ref().expect("a session");
                let first = self.first_event.as_deref().expect("an id");
                let mut resumed = client.resume(first).await;
                let answer = within("the answer", resumed.answer()).await;
                let answer = answer.expect("the answer");
                assert!(answer["result"].is_object(), "{answer}");
            }
        }
        assert!(
            !self.has_log_entry("cancelled first"),
            "a cancel without a cause"
        );
    }

    /// Checks that a call whose client never resumes is cancelled at the server.
    pub(crate) async fn abandoned_call_is_cancelled(&mut self) {
        let client = self.client.as_ref().expect("a session");
        let arguments = json!({ "seconds": 60, "label": "abandoned" });
        let mut call = client.call(9, "work", arguments).await;
        assert_eq!(call.head().await.status, 200);
        self.reach_log_entry("started abandoned").await;
        call.rst();
        self.reach_log_entry("cancelled abandoned").await;
    }

    /// Checks that the session can be deleted without any process or descriptor being left behind.
    pub(crate) async fn session_leaves_no_state(&mut self) {
        let client = self.client.take().expect("a session");
        assert_eq!(within("DELETE", client.delete()).await, 204);
        self.until_processes_exited().await;
        self.descriptors_are_as_before().await;
    }

    /// Waits until the program has no more descriptors open than before the first client.
    pub(crate) async fn descriptors_are_as_before(&self) {
        let until = Instant::now() + Duration::from_secs(10);
        // A signal handler, such as SIGCHLD's, may keep one descriptor open.
        while self.count_descriptors() > self.descriptors + 1 {
            let now = self.count_descriptors();
            let before = self.descriptors;
            assert!(Instant::now() < until, "{now} descriptors, {before} before");
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Checks that the program exits in time without an error, and that its processes do too.
    pub(crate) async fn ends_within(&mut self, limit: Duration) {
        let status = timeout(limit, self.status()).await;
        let status =
            status.unwrap_or_else(|_| panic!("the program is still running: {}", self.logged()));
        assert!(status.success(), "{status}: {}", self.logged());
        self.until_processes_exited().await;
    }

    /// Sends SIGTERM and checks that the program exits within the time for a drain.
    pub(crate) async fn ends_by_sigterm(&mut self) {
        self.signal(Signal::TERM);
        self.ends_within(DRAIN).await;
    }

    /// Checks that the program exits within the time for a drain.
    pub(crate) async fn drains(&mut self) {
        self.ends_within(DRAIN).await;
    }

    async fn status(&mut self) -> ExitStatus {
        loop {
            if let Some(status) = self.program.try_wait().expect("a status") {
                return status;
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits until the processes no longer exist.
    ///
    /// One that has exited may still be waiting for the init process to reap it.
    pub(crate) async fn until_processes_exited(&mut self) {
        for pid in self.processes.drain(..) {
            let exists = || {
                let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid()));
                !stat.is_ok_and(|stat| stat.contains(") Z ")) && test_kill_process(pid).is_ok()
            };
            let ended = async {
                while exists() {
                    sleep(POLL_INTERVAL).await;
                }
            };
            within("the session's processes to exit", ended).await;
        }
    }

    /// Checks that no processes are left in a session's process group.
    ///
    /// One that has exited may still be waiting for the init process to reap it.
    pub(crate) fn assert_no_child(&self) {
        let log = self.logged();
        let started: Vec<&str> = log
            .lines()
            .filter(|line| line.contains("session started"))
            .collect();
        assert!(!started.is_empty(), "{log}");
        for line in started {
            let (_, group) = line.split_once("pid=").expect("a process");
            let group = group.split(' ').next().expect("a number");
            let remaining: Vec<String> = fs::read_dir("/proc")
                .expect("processes")
                .filter_map(|entry| fs::read_to_string(entry.ok()?.path().join("stat")).ok())
                .filter(|stat| {
                    let (_, rest) = stat.rsplit_once(") ").unwrap_or_default();
                    let fields: Vec<&str> = rest.split(' ').collect();
                    fields.first() != Some(&"Z") && fields.get(2) == Some(&group)
                })
                .collect();
            assert!(remaining.is_empty(), "{line}: {remaining:?}");
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("the program is running");
    }

    pub(crate) fn pid(&self) -> Pid {
        let pid = i32::try_from(self.program.id()).expect("a number");
        Pid::from_raw(pid).expect("a process")
    }

    /// Waits until `/readyz` reports that the program accepts no new clients.
    pub(crate) async fn wait_until_draining(&self) {
        let ready = Request::new("GET", "/readyz");
        let drains = async {
            while Connection::fetch(self.admin, &ready).await.status != 503 {
                sleep(POLL_INTERVAL).await;
            }
        };
        within("a drain", drains).await;
    }

    /// Returns the program's metrics.
    pub(crate) async fn metrics(&self) -> String {
        let metrics = Request::new("GET", "/metrics");
        let reply = within("metrics", Connection::fetch(self.admin, &metrics)).await;
        reply.text().to_owned()
    }

    /// Waits until the program has logged this text.
    pub(crate) async fn reach_log(&self, text: &str) {
        let reached = async {
            while !self.logged().contains(text) {
                sleep(POLL_INTERVAL).await;
            }
        };
        within(format!("a log line with {text}"), reached).await;
    }

    pub(crate) fn logged(&self) -> String {
        self.log.lock().expect("no panic").clone()
    }

    pub(crate) fn has_log_entry(&self, what: &str) -> bool {
        fs::read_to_string(&self.tool_log).is_ok_and(|tool_log| tool_log.contains(what))
    }

    /// Waits until the scripted server has logged this event.
    pub(crate) async fn reach_log_entry(&self, what: &str) {
        let reached = async {
            while !self.has_log_entry(what) {
                sleep(POLL_INTERVAL).await;
            }
        };
        within(what, reached).await;
    }

    fn count_descriptors(&self) -> usize {
        let folder = format!("/proc/{}/fd", self.program.id());
        fs::read_dir(folder).map_or(0, Iterator::count)
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // It may already have exited.
        let _ = self.program.kill();
        let _ = self.program.wait();
        let _ = fs::remove_file(&self.tool_log);
    }
}

fn collect(mut from: ChildStderr, log: Arc<Mutex<String>>) {
    thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(length @ 1..) = from.read(&mut bytes) {
            let text = String::from_utf8_lossy(&bytes[..length]);
            log.lock().expect("no panic").push_str(&text);
        }
    });
}
