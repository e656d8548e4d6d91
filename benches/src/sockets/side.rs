//! A server and clients that call it without pausing, on separate processors if possible.

use std::{ops::Range, thread::available_parallelism};

use anyhow::{Context, Result, bail};
use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
use strum::{Display, EnumIter, EnumString};
use tokio::runtime::{Builder, Runtime};

use crate::{
    child::{Child, run_commands},
    machine, runtime,
    setup::{Mode, Setup},
    sockets::{ledger::Ledger, load::Load, serve::serve, tools::Tools},
};

/// How clients reach the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Display, EnumIter, EnumString)]
#[strum(serialize_all = "lowercase")]
pub enum Path {
    /// The clients share the server's process and threads.
    Inside,
    Sockets,
}

/// One of the sides being compared.
pub struct Side {
    mode: Mode,
    threads: usize,
    clients: Child,
    address: String,
    server: Option<Child>,
}

/// What one run has measured.
pub struct Run {
    /// Calls per second.
    pub rate: f64,
    /// Microseconds of the server's processor time per call. `NaN` if the clients share its process.
    pub cost: f64,
}

// === impl Side ===

impl Side {
    /// Starts the side. In its other roles, the program must call [`play`].
    pub async fn start(path: Path, mode: Mode, setup: Setup, threads: usize) -> Result<Self> {
        let server = Child::start(&format!("{path} {setup} {mode} {threads}"))?;
        let (clients, mut server) = match path {
            Path::Inside => (server, None),
            Path::Sockets => (Child::start(&format!("clients {threads}"))?, Some(server)),
        };
        let address = match &mut server {
            Some(server) => server.ask("address").await?,
            None => "inside".to_owned(),
        };
        Ok(Self {
            mode,
            threads,
            clients,
            address,
            server,
        })
    }

    /// Keeps all sessions busy. A single session gets one concurrent call per thread.
    pub async fn run(&mut self, sessions: usize, millis: u64) -> Result<Run> {
        let (address, mode, callers) = (&self.address, self.mode, sessions.max(self.threads));
        let command = format!("run {address} {mode} {sessions} {callers} {millis}");
        let before = self.processor_time().await?;
        let answer = self.clients.ask(&command).await?;
        let spent = self.processor_time().await? - before;
        let (rate, calls) = answer.split_once(' ').context("no count")?;
        let (rate, cost) = (rate.parse()?, spent * 1e6 / calls.parse::<f64>()?);
        Ok(Run { rate, cost })
    }

    /// Returns the server's processor time in seconds. `NaN` if the clients share its process.
    async fn processor_time(&mut self) -> Result<f64> {
        match &mut self.server {
            Some(server) => Ok(server.ask("spent").await?.parse()?),
            None => Ok(f64::NAN),
        }
    }
}

/// Runs in a child: a server, clients, or both.
pub fn play(role: &str) -> Result<()> {
    let words = Vec::from_iter(role.split(' '));
    if let ["clients", threads] = words[..] {
        let (first, available) = (threads.parse()?, available_parallelism()?.get());
        // If there are no other processors, the clients share the server's.
        let clients = threads_in(if first < available {
            first..available
        } else {
            0..available
        })?;
        let mut load = Load::default();
        return clients.block_on(run_commands(async |words| load.act(words).await));
    }
    let [path, setup, mode, threads] = words[..] else {
        bail!("no role {role:?}");
    };
    let (setup, mode): (Setup, Mode) = (setup.parse()?, mode.parse()?);
    let server = threads_in(0..threads.parse()?)?;
    let (tools, layer) = (Tools(Ledger::new(0, 0)), CancelOnDisconnectLayer::new());
    if path.parse::<Path>()? == Path::Inside {
        let _inside = server.enter();
        let mut load = Load::inside(setup.serve(mode.config(), tools, layer));
        return server.block_on(run_commands(async |words| load.act(words).await));
    }
    let address = serve(server.handle(), 1, || tools.served(setup, mode, layer))?[0];
    let answer = async |words: &[&str]| match words {
        ["spent"] => Ok(machine::processor_time().to_string()),
        _ => Ok(address.to_string()),
    };
    runtime()?.block_on(run_commands(answer))
}

/// Creates a runtime with one thread per processor, on whichever of them exist.
fn threads_in(processors: Range<usize>) -> Result<Runtime> {
    machine::pin_to_any_of(processors.clone())?;
    let mut builder = Builder::new_multi_thread();
    let builder = builder.worker_threads(processors.len()).enable_all();
    Ok(builder.build()?)
}
