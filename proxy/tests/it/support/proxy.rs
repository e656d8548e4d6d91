//! The proxy in this process.

use std::net::SocketAddr;

use mcp_cancel_on_disconnect::Calls;
use mcp_cancel_proxy::{Proxy, config::Config};
use tokio::{sync::oneshot, task::JoinHandle};

use super::{Connection, ReceivedRequest, Request, Upstream, within};

/// A proxy that serves on a free port.
pub(crate) struct Running {
    pub(crate) addr: SocketAddr,
    pub(crate) admin: Option<SocketAddr>,
    pub(crate) calls: Calls,
    stop: Option<oneshot::Sender<()>>,
    served: JoinHandle<()>,
}

// === impl Running ===

impl Running {
    /// Starts a server, and a proxy in front of it with these options.
    pub(crate) async fn start(options: &[&str]) -> (Upstream, Self) {
        let upstream = Upstream::start().await;
        let proxy = Self::in_front_of(&upstream, options).await;
        (upstream, proxy)
    }

    /// Starts a proxy with these options in front of a server's `/mcp`.
    pub(crate) async fn in_front_of(upstream: &Upstream, options: &[&str]) -> Self {
        Self::in_front_of_url(&format!("http://{}/mcp", upstream.addr), options).await
    }

    pub(crate) async fn in_front_of_url(upstream: &str, options: &[&str]) -> Self {
        Self::with_args(&[&["--upstream", upstream], options].concat()).await
    }

    /// Starts a proxy with these options in front of the scripted server.
    pub(crate) async fn in_front_of_command(options: &[&str]) -> Self {
        let command = [
            "--",
            env!("CARGO_BIN_EXE_mcp-cancel-proxy"),
            "scripted-server",
        ];
        Self::with_args(&[options, &command].concat()).await
    }

    async fn with_args(args: &[&str]) -> Self {
        let program_args = ["mcp-cancel-proxy", "--listen=127.0.0.1:0"];
        let args = program_args.iter().chain(args).map(|arg| arg.into());
        let config = Config::read(args).expect("valid options");
        let proxy = Proxy::bind(config).await.expect("the proxy starts");
        let (stop, stopped) = oneshot::channel();
        Self {
            addr: proxy.local_addr().expect("an address"),
            admin: proxy.admin_addr().expect("an address"),
            calls: proxy.calls(),
            stop: Some(stop),
            served: tokio::spawn(proxy.serve(async { drop(stopped.await) })),
        }
    }

    /// Starts its shutdown. A second call has no effect.
    pub(crate) fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
    }

    #[allow(dead_code, reason = "not all tests need it")]
    pub(crate) fn has_ended(&self) -> bool {
        self.served.is_finished()
    }

    /// Waits until the proxy has shut down.
    pub(crate) async fn ended(self) {
        within("the proxy to shut down", self.served)
            .await
            .expect("no panic");
    }

    /// Sends a request that the server answers with a stream.
    ///
    /// Returns both ends once the client has the response head.
    pub(crate) async fn streaming(
        &self,
        upstream: &Upstream,
        request: &Request,
    ) -> (Connection, ReceivedRequest) {
        let mut client = Connection::sending(self.addr, request).await;
        let mut received = upstream.next_request().await;
        received.stream().await;
        client.head().await;
        (client, received)
    }

    /// Waits until this many calls are in flight.
    pub(crate) async fn calls_reach(&self, count: usize) {
        let reached = async {
            while self.calls.len() != count {
                tokio::task::yield_now().await;
            }
        };
        within(format!("{count} calls in flight"), reached).await;
    }
}
