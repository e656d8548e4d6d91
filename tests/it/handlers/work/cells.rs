//! Every transport mode with every kind of work.
//!
//! `--nocapture` prints how long after the disconnect each kind of work has stopped.

use std::{future::pending, sync::Arc};

use rmcp::{
    RoleClient, RoleServer, ServiceExt as _,
    model::CallToolRequestParams,
    service::{RequestContext, RunningService},
    transport::StreamableHttpClientTransport,
};
use tokio::time::Instant;

use super::modes::{Bench, TransportMode, begin, for_modes};
use crate::{
    setup::{Scripted, Server, Setup, arguments},
    support::*,
};

for_modes! {
    a_handler_that_awaits_its_token_ends,
    a_handler_that_ignores_its_token_is_dropped,
    what_a_handler_has_called_on_another_server_ends,
}

#[cfg(unix)]
mod processes {
    use super::{super::modes::for_modes, TransportMode};

    for_modes! {
        a_child_process_that_a_handler_awaits_is_killed,
    }

    async fn a_child_process_that_a_handler_awaits_is_killed(mode: TransportMode) {
        super::child::assert_killed(mode).await;
    }
}

async fn a_handler_that_awaits_its_token_ends(mode: TransportMode) {
    let bench = mode.start(Scripted::new(|context| async move {
        begin(&context).await;
        context.ct.cancelled().await;
        Ok("unread".to_owned())
    }));
    let bench = bench.await;

    let disconnected_at = disconnect(&bench).await;

    let end = bench.setup.witness.ended("a").await;
    assert!(end.is_completed());
    print_time(mode, "awaits its token", disconnected_at, end.at());
}

async fn a_handler_that_ignores_its_token_is_dropped(mode: TransportMode) {
    let bench = mode.start(Scripted::new(|context| async move {
        begin(&context).await;
        pending().await
    }));
    let bench = bench.await;

    let disconnected_at = disconnect(&bench).await;

    let end = bench.setup.witness.ended("a").await;
    assert!(end.is_dropped());
    print_time(mode, "ignores its token", disconnected_at, end.at());
}

/// The handler just awaits the answer. When it is dropped, rmcp cancels its request.
async fn what_a_handler_has_called_on_another_server_ends(mode: TransportMode) {
    let behind = Server::Wrapped.start().await;
    let client = client_of(&behind).await;
    let bench = mode.start(Scripted::labelled(move |label, context| {
        let client = client.clone();
        async move {
            begin(&context).await;
            call_behind(&client, &label, &context).await;
            Ok("unread".to_owned())
        }
    }));
    let bench = bench.await;
    let call = bench.start_call(1, "a").await;
    behind.witness.started("a").await;

    let disconnected_at = Instant::now();
    call.fin();

    let end = behind.witness.ended("a").await;
    assert!(end.is_cancelled());
    assert!(bench.setup.witness.ended("a").await.is_dropped());
    print_time(mode, "awaits another server", disconnected_at, end.at());
}

#[cfg(unix)]
mod child {
    use std::{
        io::{self, PipeWriter},
        os::fd::OwnedFd,
        process::Stdio,
        sync::Arc,
    };

    use tokio::{
        io::AsyncReadExt as _, net::unix::pipe::Receiver, process::Command, time::Instant,
    };

    use super::{TransportMode, begin, print_time};
    use crate::{setup::Scripted, support::within};

    /// The process holds the only other end of a pipe.
    ///
    /// The pipe closes when the process ends, whether or not it is reaped.
    pub(super) async fn assert_killed(mode: TransportMode) {
        let (reader, writer) = io::pipe().expect("a pipe");
        let mut reader = Receiver::from_owned_fd(OwnedFd::from(reader)).expect("a pipe");
        let writer = Arc::new(std::sync::Mutex::new(Some(writer)));
        let bench = mode.start(Scripted::new(move |context| {
            let writer = writer.lock().expect("no panics here").take();
            async move {
                begin(&context).await;
                sleep_forever(writer.expect("the handler runs once")).await;
                Ok("unread".to_owned())
            }
        }));
        let bench = bench.await;
        let call = bench.start_call(1, "a").await;
        let started = within("the process to start", reader.read_u8()).await;
        assert_eq!(started.expect("the process writes a byte"), b'.');

        let disconnected_at = Instant::now();
        call.fin();

        let mut rest = Vec::new();
        let ended = within("the process to end", reader.read_to_end(&mut rest)).await;
        assert_eq!(ended.expect("the pipe ends"), 0);
        print_time(mode, "awaits a process", disconnected_at, Instant::now());
        assert!(bench.setup.witness.ended("a").await.is_dropped());
    }

    async fn sleep_forever(output: PipeWriter) {
        let mut process = {
            let mut command = Command::new("sh");
            command.args(["-c", "printf . ; exec sleep 600"]);
            command
                .stdin(Stdio::null())
                .stdout(output)
                .kill_on_drop(true);
            // Dropped at this point, because the command holds our end of the pipe.
            command.spawn().expect("a shell")
        };
        let status = process.wait().await;
        panic!("the process ended on its own: {status:?}");
    }
}

/// Disconnects the client of call `a`, whose handler is running.
///
/// Returns the time of the disconnect.
async fn disconnect(bench: &Bench) -> Instant {
    let call = bench.start_call(1, "a").await;
    assert!(bench.setup.witness.is_running("a"));
    let disconnected_at = Instant::now();
    call.fin();
    disconnected_at
}

fn print_time(mode: TransportMode, work: &str, disconnected_at: Instant, stopped: Instant) {
    let took = stopped - disconnected_at;
    eprintln!("{mode:?}: a handler that {work} had stopped {took:.1?} after the disconnect");
}

async fn client_of(server: &Setup) -> Arc<RunningService<RoleClient, ()>> {
    let url = format!("http://{}{PATH}", server.served.addr);
    let transport = StreamableHttpClientTransport::from_uri(url);
    Arc::new(().serve(transport).await.expect("a connection"))
}

/// Calls `hold` on the other server with the same label.
async fn call_behind(
    client: &RunningService<RoleClient, ()>,
    label: &str,
    _: &RequestContext<RoleServer>,
) {
    let mut params = CallToolRequestParams::new("hold");
    params.arguments = arguments(label).as_object().cloned();
    let answer = client.peer().call_tool(params).await;
    panic!("the call was never released: {answer:?}");
}
