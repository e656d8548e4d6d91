//! A Redis for one test, on a free port. Unless an option asks for it, it writes no data to disk.

use std::{
    env, fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::Stdio,
};

use redis::{FromRedisValue, RedisResult, aio::MultiplexedConnection};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
};

/// A `redis-server`, or the program in `REDIS_SERVER`. Dropping this ends its process.
pub(super) struct Server {
    port: u16,
    folder: PathBuf,
    options: Vec<String>,
    /// What the process prints once it is ready.
    ready: &'static str,
    process: Child,
}

// === impl Server ===

impl Server {
    pub(super) async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// Starts a server with these command-line options.
    pub(super) async fn start_with(options: &[&str]) -> Self {
        let (port, folder) = free_port_and_folder();
        let mut arguments = words("--bind 127.0.0.1 --appendonly no");
        arguments.extend(words(&format!("--port {port} --dir")));
        arguments.push(folder.display().to_string());
        arguments.extend(["--save".to_owned(), String::new()]);
        arguments.extend(options.iter().map(|&option| option.to_owned()));
        Self::run(port, folder, arguments, "Ready to accept connections").await
    }

    /// Starts a server with TLS. [`certify`] creates its certificate in [`folder`](Self::folder).
    #[cfg(feature = "tls")]
    pub(super) async fn start_with_tls() -> Self {
        let (port, folder) = free_port_and_folder();
        certify(&folder).await;
        let file = |name: &str| folder.join(name).display().to_string();
        let mut arguments =
            words("--bind 127.0.0.1 --appendonly no --port 0 --tls-auth-clients no");
        arguments.extend(["--save".to_owned(), String::new()]);
        for (option, value) in [
            ("--tls-port", port.to_string()),
            ("--tls-cert-file", file("server.pem")),
            ("--tls-key-file", file("server.key")),
            ("--tls-ca-cert-file", file("ca.pem")),
            ("--dir", folder.display().to_string()),
        ] {
            arguments.extend([option.to_owned(), value]);
        }
        Self::run(port, folder, arguments, "Ready to accept connections").await
    }

    /// Starts a Sentinel that knows this server by a name and fails over after a second.
    pub(super) async fn start_sentinel(&self, name: &str) -> Self {
        let (port, folder) = free_port_and_folder();
        let config = folder.join("sentinel.conf");
        let lines = [
            format!("port {port}"),
            "bind 127.0.0.1".to_owned(),
            format!("dir {}", folder.display()),
            format!("sentinel monitor {name} 127.0.0.1 {} 1", self.port),
            format!("sentinel down-after-milliseconds {name} 1000"),
            format!("sentinel failover-timeout {name} 5000"),
        ];
        fs::write(&config, lines.join("\n")).unwrap();
        let options = vec![config.display().to_string(), "--sentinel".to_owned()];
        Self::run(port, folder, options, "+monitor").await
    }

    async fn run(port: u16, folder: PathBuf, options: Vec<String>, ready: &'static str) -> Self {
        let process = start(&options, ready).await;
        Self {
            port,
            folder,
            options,
            ready,
            process,
        }
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(super) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Kills the process without warning.
    pub(super) async fn kill(&mut self) {
        self.process.kill().await.unwrap();
    }

    /// Starts the server again after [`kill`](Self::kill), with the data it has on disk.
    pub(super) async fn start_again(&mut self) {
        self.process = start(&self.options, self.ready).await;
    }

    pub(super) fn stop(&self) {
        self.signal(Signal::STOP);
    }

    pub(super) fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let pid = self
            .process
            .id()
            .and_then(|id| Pid::from_raw(id.try_into().unwrap()));
        kill_process(pid.unwrap(), signal).unwrap();
    }

    /// Returns the reply to a command, sent on a connection of its own.
    pub(super) async fn query<T: FromRedisValue>(&self, command: &str) -> T {
        self.try_query(command).await.unwrap()
    }

    /// Returns the reply to a command, or its refusal.
    pub(super) async fn try_query<T: FromRedisValue>(&self, command: &str) -> RedisResult<T> {
        let mut words = command.split(' ');
        let mut command = redis::cmd(words.next().unwrap());
        for word in words {
            command.arg(word);
        }
        command.query_async(&mut self.connect().await?).await
    }

    /// Returns a field of the reply to `INFO`, or an empty string if there is no reply.
    pub(super) async fn info(&self, section: &str, field: &str) -> String {
        let info: String = self
            .try_query(&format!("INFO {section}"))
            .await
            .unwrap_or_default();
        let mut fields = info.lines().filter_map(|line| line.split_once(':'));
        let found = fields.find(|(name, _)| *name == field);
        found
            .map(|(_, value)| value.trim().to_owned())
            .unwrap_or_default()
    }

    async fn connect(&self) -> RedisResult<MultiplexedConnection> {
        let client = redis::Client::open(self.url())?;
        client.get_multiplexed_async_connection().await
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Dropping the handle kills the process. The folder may already have been removed.
        let _removed = fs::remove_dir_all(&self.folder);
    }
}

/// Returns a free port and a new folder.
fn free_port_and_folder() -> (u16, PathBuf) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let folder = env::temp_dir().join(format!("mcp-cancel-cluster-{}-{port}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    (port, folder)
}

fn words(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_owned).collect()
}

async fn start(options: &[String], ready: &str) -> Child {
    let program = env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned());
    let mut process = Command::new(&program)
        .args(options)
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    loop {
        let line = lines.next_line().await.unwrap();
        let line = line.unwrap_or_else(|| panic!("{program} has ended"));
        if line.contains(ready) {
            break;
        }
    }
    // Unless something reads its output, the process blocks once the pipe is full.
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    process
}

/// Creates a certificate authority, and a certificate for 127.0.0.1 that it signs.
///
/// The files are `ca.pem`, and `server.pem` with `server.key`.
#[cfg(feature = "tls")]
pub(super) async fn certify(folder: &Path) {
    fs::write(folder.join("names"), "subjectAltName=IP:127.0.0.1\n").unwrap();
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    for command in [
        &format!("req -x509 {key} -keyout ca.key -out ca.pem -days 2 -subj /CN=authority"),
        &format!("req {key} -keyout server.key -out server.csr -subj /CN=server"),
        "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names -out server.pem",
    ] {
        let output = Command::new("openssl")
            .args(words(command))
            .current_dir(folder)
            .output();
        let output = output.await.unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}
