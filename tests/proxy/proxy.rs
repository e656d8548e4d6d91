//! A real nginx or HAProxy on loopback for one test. Dropping it kills the process and removes its temporary directory.

use std::{
    fs,
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio, id},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

/// How often, and how many times, to check whether a proxy is listening yet.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);
const MAX_CHECKS: u32 = 2_000;

/// Which proxy it is and how it is configured, apart from the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// nginx without buffering.
    NginxUnbuffered,
    /// nginx with buffering, except for answers with `X-Accel-Buffering: no`.
    NginxBuffered,
    /// nginx with buffering for all answers.
    NginxBufferedAnyhow,
    /// nginx that lets a request continue after its client has disconnected.
    NginxIgnoringAborts,
    /// HAProxy with its defaults.
    Haproxy,
    /// HAProxy that aborts a request when its client closes the connection.
    HaproxyAbortonclose,
}

/// A running proxy, killed on drop.
pub(crate) struct Proxy {
    pub(crate) addr: SocketAddr,
    process: Child,
    folder: Folder,
}

/// A directory, removed on drop.
struct Folder(PathBuf);

// === impl Kind ===

impl Kind {
    /// Starts the proxy in front of a server, with an idle limit.
    pub(crate) fn start(self, server: SocketAddr, idle_limit: Duration) -> Proxy {
        let folder = Folder::new();
        let addr = free_address();
        let config = folder.0.join("config");
        let nginx = |buffering| nginx(&folder.0, addr, server, idle_limit, buffering);
        let haproxy = |option| haproxy(addr, server, idle_limit, option);
        let text = match self {
            Self::NginxUnbuffered => nginx("proxy_buffering off;"),
            Self::NginxBuffered => nginx("proxy_buffering on;"),
            Self::NginxBufferedAnyhow => {
                nginx("proxy_buffering on; proxy_ignore_headers X-Accel-Buffering;")
            }
            Self::NginxIgnoringAborts => {
                nginx("proxy_buffering off; proxy_ignore_client_abort on;")
            }
            Self::Haproxy => haproxy(""),
            Self::HaproxyAbortonclose => haproxy("option abortonclose"),
        };
        fs::write(&config, text).expect("write the configuration");
        let mut command = match self {
            Self::Haproxy | Self::HaproxyAbortonclose => {
                let mut command = Command::new("haproxy");
                // In the foreground, without output.
                command.args(["-db", "-q", "-f"]).arg(&config);
                command
            }
            _ => {
                let mut command = Command::new("nginx");
                command.arg("-p").arg(&folder.0).arg("-c").arg(&config);
                command
            }
        };
        let log = fs::File::create(folder.log()).expect("create a log file");
        let process = command.stdin(Stdio::null()).stderr(log).spawn();
        let process = process.expect("it is installed, see tests/proxy/run");
        let mut proxy = Proxy {
            addr,
            process,
            folder,
        };
        proxy.wait_until_it_listens();
        proxy
    }
}

fn nginx(
    folder: &Path,
    addr: SocketAddr,
    server: SocketAddr,
    idle_limit: Duration,
    buffering: &str,
) -> String {
    let folder = folder.display();
    let idle_limit = idle_limit.as_millis();
    // A single process is easy to kill. All of its files are in the temporary directory.
    format!(
        "daemon off; master_process off; pid {folder}/pid; error_log stderr;
        events {{ worker_connections 1024; }}
        http {{
            access_log off;
            client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
            fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
            upstream mcp {{ server {server}; keepalive 8; }}
            server {{
                listen {addr};
                location / {{
                    proxy_pass http://mcp;
                    proxy_http_version 1.1;
                    proxy_set_header Connection \"\";
                    proxy_set_header Host $http_host;
                    proxy_read_timeout {idle_limit}ms;
                    {buffering}
                }}
            }}
        }}\n"
    )
}

fn haproxy(addr: SocketAddr, server: SocketAddr, idle_limit: Duration, option: &str) -> String {
    let idle_limit = idle_limit.as_millis();
    format!(
        "defaults
            mode http
            {option}
            timeout connect 5s
            timeout client {idle_limit}ms
            timeout server {idle_limit}ms
        listen all
            bind {addr}
            server mcp {server}\n"
    )
}

/// Returns a port that is free right now.
fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind a free port");
    listener.local_addr().expect("a bound listener")
}

// === impl Proxy ===

impl Proxy {
    /// Panics if the proxy exits or does not listen in time.
    #[allow(
        clippy::disallowed_methods,
        reason = "another process does not signal its readiness"
    )]
    fn wait_until_it_listens(&mut self) {
        let listens = (0..MAX_CHECKS).any(|_| {
            std::thread::sleep(CHECK_INTERVAL);
            let ended = self
                .process
                .try_wait()
                .expect("check whether it has exited");
            assert!(ended.is_none(), "it exited: {}", self.log_text());
            TcpStream::connect(self.addr).is_ok()
        });
        assert!(listens, "it does not listen: {}", self.log_text());
    }

    /// What the proxy has logged.
    fn log_text(&self) -> String {
        fs::read_to_string(self.folder.log()).unwrap_or_default()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // The process may already have exited by itself.
        let _ended = self.process.kill();
        let _status = self.process.wait();
    }
}

// === impl Folder ===

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("behind-a-proxy-{}-{number}", id()));
        fs::create_dir(&path).expect("create a folder");
        Self(path)
    }

    fn log(&self) -> PathBuf {
        self.0.join("log")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _removed = fs::remove_dir_all(&self.0);
    }
}
