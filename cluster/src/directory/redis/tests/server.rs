//! A Redis of a test's own, on a free port, which keeps nothing on a disk.

use std::{env, fs, net::TcpListener, path::PathBuf, process::Stdio};

use redis::{FromRedisValue, aio::MultiplexedConnection};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
};

/// A `redis-server`, or what `REDIS_SERVER` names. It ends with this value.
pub(super) struct Server {
    port: u16,
    folder: PathBuf,
    process: Child,
}

// === impl Server ===

impl Server {
    pub(super) async fn start() -> Self {
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let folder =
            env::temp_dir().join(format!("mcp-cancel-cluster-{}-{port}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let process = start(port, &folder).await;
        Self {
            port,
            folder,
            process,
        }
    }

    pub(super) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Ends it without a warning.
    pub(super) async fn kill(&mut self) {
        self.process.kill().await.unwrap();
    }

    /// Starts it again after [`kill`](Self::kill). It knows nothing.
    pub(super) async fn start_again(&mut self) {
        self.process = start(self.port, &self.folder).await;
    }

    pub(super) fn stop(&self) {
        self.signal(Signal::STOP);
    }

    pub(super) fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let pid = self
            .process
            .id()
            .and_then(|id| Pid::from_raw(id.try_into().unwrap()));
        kill_process(pid.unwrap(), signal).unwrap();
    }

    /// What it answers to a command, on a connection of its own.
    pub(super) async fn ask<T: FromRedisValue>(&self, command: &str) -> T {
        let mut words = command.split(' ');
        let mut asked = redis::cmd(words.next().unwrap());
        for word in words {
            asked.arg(word);
        }
        asked.query_async(&mut self.connect().await).await.unwrap()
    }

    async fn connect(&self) -> MultiplexedConnection {
        let client = redis::Client::open(self.url()).unwrap();
        client.get_multiplexed_async_connection().await.unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The process is killed with its handle. It may be gone already, and so may the folder.
        let _gone = fs::remove_dir_all(&self.folder);
    }
}

async fn start(port: u16, folder: &PathBuf) -> Child {
    let program = env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned());
    let mut process = Command::new(&program)
        .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
        .args(["--port", &port.to_string(), "--dir"])
        .arg(folder)
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    loop {
        let line = lines.next_line().await.unwrap();
        let line = line.unwrap_or_else(|| panic!("{program} has ended"));
        if line.contains("Ready to accept connections") {
            break;
        }
    }
    // Else it would wait for a reader when its pipe is full.
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    process
}
