//! A tool that runs a shell command. When its client disconnects, all of the command's processes are killed, even
//! though the tool never checks a token.
//!
//! ```sh
//! cargo run --example child_process
//! ```
//!
//! This kind of tool needs a [`ProcessGroup`], whose destructor kills the entire process tree, and `AbortOnCancel`,
//! which causes the destructor to run.

#[cfg(unix)]
#[path = "shared/raw.rs"]
mod raw;
#[cfg(unix)]
#[path = "shared/serve.rs"]
mod serve;

#[cfg(not(unix))]
fn main() {
    println!("process groups exist only on Unix");
}

#[cfg(unix)]
fn main() -> std::process::ExitCode {
    unix::main()
}

#[cfg(unix)]
mod unix {
    use std::{
        error::Error,
        io::{self, PipeReader, PipeWriter},
        os::fd::OwnedFd,
        process::{ExitCode, ExitStatus, Stdio},
        sync::Arc,
        time::Duration,
    };

    use axum::Router;
    use mcp_cancel_on_disconnect::{
        AbortOnCancel, CancelOnDisconnectLayer, CancellableSessionManager,
    };
    use rmcp::{
        ErrorData, ServerHandler,
        handler::server::{router::tool::ToolRouter, wrapper::Parameters},
        schemars, tool, tool_handler, tool_router,
        transport::streamable_http_server::StreamableHttpService,
    };
    use rustix::process::{Pid, Signal, kill_process_group};
    use serde_json::json;
    use tokio::{
        io::AsyncReadExt as _,
        net::unix::pipe::Receiver,
        process::{Child, Command},
        task::JoinSet,
        time::{Instant, timeout},
    };

    use super::{raw, serve};

    type Failure = Box<dyn Error>;

    /// Timeout for this example, which takes far less. The command would take far longer.
    const LIMIT: Duration = Duration::from_secs(10);

    /// Starts a process tree with two sleeping processes, one of them in a shell of its own.
    const COMMAND: &str = "echo started; sleep 600 & sh -c 'sleep 600; echo never' & wait";

    /// A process and all of its descendants, which are killed on drop.
    struct ProcessGroup {
        leader: Child,
        id: Option<Pid>,
    }

    /// Runs commands. Their output is a pipe that stays open until all of their processes have exited.
    #[derive(Clone)]
    struct Shell {
        output: Arc<PipeWriter>,
        tool_router: ToolRouter<Self>,
    }

    #[derive(serde::Deserialize, schemars::JsonSchema)]
    struct Run {
        command: String,
    }

    #[tokio::main]
    pub(super) async fn main() -> ExitCode {
        match run().await {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                println!("{error}");
                ExitCode::FAILURE
            }
        }
    }

    async fn run() -> Result<(), Failure> {
        let (reader, writer) = io::pipe()?;
        let mut output = receiver(reader)?;
        let mut servers = JoinSet::new();
        let addr = {
            let handler = AbortOnCancel::new(Shell::new(writer)).after(Duration::from_millis(200));
            let sessions = Arc::new(CancellableSessionManager::default());
            let mcp = StreamableHttpService::new(
                move || Ok(handler.clone()),
                sessions,
                Default::default(),
            );
            let app = Router::new()
                .nest_service("/mcp", mcp)
                .layer(CancelOnDisconnectLayer::new());
            serve::serve(app, &mut servers).await?
        };

        let client = raw::call(addr, "run", json!({ "command": COMMAND })).await?;
        let mut started = [0; 8];
        timeout(LIMIT, output.read_exact(&mut started)).await??;
        println!("the command is running; the client hangs up");
        let hung_up = Instant::now();
        client.hang_up();

        // The server has one end of the pipe open, too, so it has to stop first.
        servers.shutdown().await;
        let mut rest = String::new();
        let ended = timeout(LIMIT, output.read_to_string(&mut rest)).await;
        ended.map_err(|_| "A process still has the pipe open!")??;
        if rest.is_empty() {
            println!(
                "all of its processes had exited after {:.1?}",
                hung_up.elapsed()
            );
            Ok(())
        } else {
            Err(format!("the command kept running: {rest:?}").into())
        }
    }

    fn receiver(reader: PipeReader) -> io::Result<Receiver> {
        Receiver::from_owned_fd(OwnedFd::from(reader))
    }

    // === impl ProcessGroup ===

    impl ProcessGroup {
        /// Runs a shell command in a new process group.
        fn spawn(command: &str, output: Stdio) -> io::Result<Self> {
            let leader = Command::new("sh")
                .args(["-c", command])
                .stdin(Stdio::null())
                .stdout(output)
                .process_group(0)
                .spawn()?;
            // A process group has its leader's id.
            let id = leader
                .id()
                .and_then(|id| Pid::from_raw(id.try_into().ok()?));
            Ok(Self { leader, id })
        }

        async fn wait(&mut self) -> io::Result<ExitStatus> {
            let status = self.leader.wait().await?;
            // The id may now belong to another process.
            self.id = None;
            Ok(status)
        }
    }

    impl Drop for ProcessGroup {
        fn drop(&mut self) {
            if let Some(id) = self.id.take() {
                // Fails if the group has just exited. tokio reaps the leader.
                let _ = kill_process_group(id, Signal::KILL);
            }
        }
    }

    // === impl Shell ===

    #[tool_router]
    impl Shell {
        fn new(output: PipeWriter) -> Self {
            Self {
                output: Arc::new(output),
                tool_router: Self::tool_router(),
            }
        }

        #[tool(description = "Runs a shell command")]
        async fn run(
            &self,
            Parameters(Run { command }): Parameters<Run>,
        ) -> Result<String, ErrorData> {
            let status = async {
                let output = self.output.try_clone()?;
                ProcessGroup::spawn(&command, output.into())?.wait().await
            };
            match status.await {
                Ok(status) => Ok(status.to_string()),
                Err(error) => Err(ErrorData::internal_error(error.to_string(), None)),
            }
        }
    }

    #[tool_handler(router = self.tool_router)]
    impl ServerHandler for Shell {}
}
