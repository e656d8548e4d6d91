//! The simulated network between instances: connections, and faults on the paths between machines.

use std::{
    collections::HashMap,
    fmt, io,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll, Waker},
};

use bytes::{Buf as _, BytesMut};
use futures_util::future::BoxFuture;
use mcp_cancel_on_disconnect::socket::Peer;
use test_support::Dice;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::{Mutex as AsyncMutex, mpsc},
};

use super::time::{Action, HostId, Ms, Post, WORLD};
use crate::relay::network::{
    Accepted, Listener,
    simulated::{Dialer, Duplex},
};

/// A machine, on which several processes can run, one after the other or at the same time.
pub(super) type Machine = usize;

const MACHINES: Machine = 8;

/// How long a path has to be silent for the kernels to reset its connections.
const SILENCE_TIMEOUT: Ms = 15_000;

/// How bytes get from one machine to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PathState {
    Up,
    /// Connections are refused, but open ones continue.
    Refused,
    /// Connections are reset when bytes are sent, and cannot be opened.
    Reset,
    /// Nothing arrives.
    Silent,
    Slow(Ms),
}

/// The network. Clones share it.
#[derive(Clone)]
pub(super) struct Net {
    pub(super) post: Post,
    state: Arc<Mutex<State>>,
}

/// Since when a path has been silent, and the actions queued on it.
type Queued = (Ms, Vec<(HostId, Action)>);

struct State {
    dice: Dice,
    paths: HashMap<(Machine, Machine), PathState>,
    /// The queue of each silent path.
    queued: HashMap<(Machine, Machine), Queued>,
    listeners: HashMap<SocketAddr, Vec<ListenerEntry>>,
    /// Machines that have no power.
    without_power: Vec<Machine>,
    connections: Vec<Connection>,
}

struct ListenerEntry {
    host: HostId,
    machine: Machine,
    accepts: mpsc::UnboundedSender<(Socket, SocketAddr)>,
}

/// Both ends of an open connection.
struct Connection {
    machines: (Machine, Machine),
    pipes: [Arc<Pipe>; 2],
    /// After how many more bytes the connection is cut.
    cut_after: Arc<Mutex<Option<usize>>>,
}

/// One direction of a connection.
#[derive(Default)]
pub(super) struct Pipe(Mutex<PipeState>);

#[derive(Default)]
struct PipeState {
    buffer: BytesMut,
    has_ended: bool,
    is_reset: bool,
    /// Whether the reader has been dropped or the connection reset.
    is_closed: bool,
    reader: Option<Waker>,
    /// When the last bytes arrive.
    last: Ms,
}

/// One end of a connection.
pub(super) struct Socket {
    net: Net,
    read: Arc<Pipe>,
    write: Arc<Pipe>,
    cut_after: Arc<Mutex<Option<usize>>>,
    from: (HostId, Machine),
    to: (HostId, Machine),
}

/// Opens connections for one process.
pub(super) struct Connector {
    pub(super) net: Net,
    pub(super) host: HostId,
    pub(super) machine: Machine,
}

pub(super) struct PeerListener {
    net: Net,
    host: HostId,
    address: SocketAddr,
    accepted: AsyncMutex<mpsc::UnboundedReceiver<(Socket, SocketAddr)>>,
}

// === impl Net ===

impl Net {
    pub(super) fn new(post: Post, dice: Dice) -> Self {
        let state = State {
            dice,
            paths: HashMap::new(),
            queued: HashMap::new(),
            listeners: HashMap::new(),
            without_power: Vec::new(),
            connections: Vec::new(),
        };
        Self {
            post,
            state: Arc::new(Mutex::new(state)),
        }
    }

    pub(super) fn listen(
        &self,
        host: HostId,
        machine: Machine,
        address: SocketAddr,
    ) -> PeerListener {
        let (accepts, accepted) = mpsc::unbounded_channel();
        let entry = ListenerEntry {
            host,
            machine,
            accepts,
        };
        self.state()
            .listeners
            .entry(address)
            .or_default()
            .push(entry);
        PeerListener {
            net: self.clone(),
            host,
            address,
            accepted: AsyncMutex::new(accepted),
        }
    }

    /// Sets how bytes get from one machine to another. Delivers what is queued if the path is no longer silent.
    ///
    /// If the path stays silent for [`SILENCE_TIMEOUT`], its queue is lost and its connections are reset.
    pub(super) fn set(&self, from: Machine, to: Machine, path: PathState) {
        if path == PathState::Silent {
            let net = self.clone();
            self.post
                .after(WORLD, SILENCE_TIMEOUT, move || net.time_out(from, to));
        }
        let released = {
            let mut state = self.state();
            let now = self.post.now();
            state.paths.insert((from, to), path);
            match path {
                PathState::Silent => {
                    state
                        .queued
                        .entry((from, to))
                        .or_insert_with(|| (now, Vec::new()));
                    None
                }
                _ => state.queued.remove(&(from, to)),
            }
        };
        for (host, action) in released.map(|(_, queued)| queued).into_iter().flatten() {
            self.post.after(host, 1, action);
        }
    }

    /// Resets the connections on a path that is still silent, as the kernels do.
    fn time_out(&self, from: Machine, to: Machine) {
        let now = self.post.now();
        let is_dead = {
            let mut state = self.state();
            let queued = state.queued.get_mut(&(from, to));
            queued.is_some_and(|(since, queued)| {
                let is_dead = now - *since >= SILENCE_TIMEOUT;
                if is_dead {
                    queued.clear();
                }
                is_dead
            })
        };
        if is_dead {
            self.reset(from, to);
        }
    }

    /// Resets all open connections between two machines.
    pub(super) fn reset(&self, first: Machine, other: Machine) {
        for connection in self.connections(first, other) {
            for pipe in connection {
                pipe.reset();
            }
        }
    }

    /// Cuts all open connections between two machines after `bytes` more bytes.
    pub(super) fn cut_after(&self, first: Machine, other: Machine, bytes: usize) {
        let state = self.state();
        for connection in &state.connections {
            if connection.machines == (first, other) || connection.machines == (other, first) {
                *connection.cut_after.lock().unwrap() = Some(bytes);
            }
        }
    }

    fn connections(&self, first: Machine, other: Machine) -> Vec<[Arc<Pipe>; 2]> {
        let mut state = self.state();
        state
            .connections
            .retain(|connection| Arc::strong_count(&connection.cut_after) > 1);
        let between = state.connections.iter().filter(|connection| {
            connection.machines == (first, other) || connection.machines == (other, first)
        });
        between.map(|connection| connection.pipes.clone()).collect()
    }

    /// Sets whether a machine has no power.
    ///
    /// [`SILENCE_TIMEOUT`] after it has lost power, all of the machine's connections are reset, even if it has power again.
    pub(super) fn set_power_loss(&self, machine: Machine, is_without_power: bool) {
        self.state().without_power.retain(|other| *other != machine);
        if is_without_power {
            self.state().without_power.push(machine);
            let net = self.clone();
            self.post.after(WORLD, SILENCE_TIMEOUT, move || {
                for other in 0..MACHINES {
                    net.reset(machine, other);
                }
            });
        }
    }

    /// Runs `action` at the receiver after the path's delay, in order for each `pipe`. A silent path queues it instead.
    fn send(
        &self,
        from: (HostId, Machine),
        to: (HostId, Machine),
        pipe: &Pipe,
        action: impl FnOnce() + Send + 'static,
    ) {
        let mut state = self.state();
        let now = self.post.now();
        let path = state.path(from.1, to.1);
        if path == PathState::Silent {
            let queued = state.queued.entry((from.1, to.1));
            let queued = queued.or_insert_with(|| (now, Vec::new()));
            queued.1.push((to.0, Box::new(action)));
            return;
        }
        let delay = match path {
            PathState::Slow(delay) => delay,
            _ => 1 + state.dice.roll() % 2,
        };
        drop(state);
        let at = {
            let mut pipe = pipe.state();
            pipe.last = pipe.last.max(now + delay);
            pipe.last
        };
        self.post.at(to.0, at, Box::new(action));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Opens a connection if the path allows it. Never completes on a silent path.
    async fn dial(
        self,
        host: HostId,
        machine: Machine,
        address: SocketAddr,
    ) -> io::Result<Box<dyn Duplex>> {
        let (target, path) = {
            let mut state = self.state();
            let listeners = state.listeners.get(&address).map_or(0, Vec::len);
            let pick = state.dice.roll() as usize % listeners.max(1);
            let entries = state.listeners.get(&address);
            let entry = entries.and_then(|entries| entries.get(pick));
            let target = entry.map(|entry| (entry.host, entry.machine, entry.accepts.clone()));
            // Each machine has one address.
            let target_machine = target
                .as_ref()
                .map_or_else(|| machine_of(address), |target| target.1);
            let is_without_power = state.without_power.contains(&target_machine)
                || state.without_power.contains(&machine);
            let (outward, inward) = (
                state.path(machine, target_machine),
                state.path(target_machine, machine),
            );
            let path = if is_without_power || inward == PathState::Silent {
                PathState::Silent
            } else {
                outward
            };
            (target, path)
        };
        match path {
            PathState::Silent => std::future::pending().await,
            PathState::Slow(delay) => self.post.pause(host, 2 * delay).await,
            _ => self.post.pause(host, 1).await,
        }
        match path {
            PathState::Refused => return Err(io::ErrorKind::ConnectionRefused.into()),
            PathState::Reset => return Err(io::ErrorKind::ConnectionReset.into()),
            _ => {}
        }
        let Some((peer, peer_machine, accepts)) = target else {
            return Err(io::ErrorKind::ConnectionRefused.into());
        };
        let pipes = [(); 2].map(|()| Arc::<Pipe>::default());
        let [inward_pipe, outward_pipe] = pipes.clone();
        let cut_after = Arc::<Mutex<Option<usize>>>::default();
        let near_end = Socket {
            net: self.clone(),
            read: inward_pipe.clone(),
            write: outward_pipe.clone(),
            cut_after: cut_after.clone(),
            from: (host, machine),
            to: (peer, peer_machine),
        };
        let far_end = Socket {
            net: self.clone(),
            read: outward_pipe,
            write: inward_pipe,
            cut_after: cut_after.clone(),
            from: (peer, peer_machine),
            to: (host, machine),
        };
        if accepts.is_closed() {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        self.state().connections.push(Connection {
            machines: (machine, peer_machine),
            pipes,
            cut_after,
        });
        self.post.after(peer, 1, move || {
            // Dropped if the listener has closed.
            let _ = accepts.send((far_end, address_of(machine)));
        });
        Ok(Box::new(near_end))
    }
}

/// Returns the address of a machine's peer listener.
pub(super) fn address_of(machine: Machine) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1 + machine as u8], 9000))
}

fn machine_of(address: SocketAddr) -> Machine {
    match address {
        SocketAddr::V4(address) => usize::from(address.ip().octets()[3]) - 1,
        SocketAddr::V6(_) => unreachable!("all addresses are IPv4"),
    }
}

impl State {
    fn path(&self, from: Machine, to: Machine) -> PathState {
        if self.without_power.contains(&from) || self.without_power.contains(&to) {
            return PathState::Silent;
        }
        self.paths
            .get(&(from, to))
            .copied()
            .unwrap_or(PathState::Up)
    }
}

// === impl Connector ===

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector").finish_non_exhaustive()
    }
}

impl Dialer for Connector {
    fn dial(&self, address: SocketAddr) -> BoxFuture<'static, io::Result<Box<dyn Duplex>>> {
        Box::pin(self.net.clone().dial(self.host, self.machine, address))
    }
}

// === impl PeerListener ===

impl Listener for PeerListener {
    type Stream = Socket;

    async fn accept(&self) -> (Socket, SocketAddr) {
        match self.accepted.lock().await.recv().await {
            Some(accepted) => accepted,
            None => std::future::pending().await,
        }
    }
}

impl Drop for PeerListener {
    fn drop(&mut self) {
        let mut state = self.net.state();
        if let Some(entries) = state.listeners.get_mut(&self.address) {
            entries.retain(|listener| listener.host != self.host);
            if entries.is_empty() {
                state.listeners.remove(&self.address);
            }
        }
    }
}

// === impl Pipe ===

impl Pipe {
    fn state(&self) -> MutexGuard<'_, PipeState> {
        self.0.lock().unwrap()
    }

    /// Changes the state and wakes the reader.
    fn change(&self, change: impl FnOnce(&mut PipeState)) {
        let reader = {
            let mut state = self.state();
            change(&mut state);
            state.reader.take()
        };
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    fn reset(&self) {
        self.change(|pipe| {
            pipe.is_reset = true;
            pipe.is_closed = true;
        });
    }
}

// === impl Socket ===

impl Accepted for Socket {
    fn peer(&self) -> Option<Peer> {
        None
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut pipe = self.read.state();
        if pipe.is_reset {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        if !pipe.buffer.is_empty() {
            let length = pipe.buffer.len().min(buf.remaining());
            buf.put_slice(&pipe.buffer[..length]);
            pipe.buffer.advance(length);
            return Poll::Ready(Ok(()));
        }
        if pipe.has_ended {
            return Poll::Ready(Ok(()));
        }
        pipe.reader = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let is_reset = {
            let pipe = self.write.state();
            if pipe.is_closed {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            self.net.state().path(self.from.1, self.to.1) == PathState::Reset
        };
        let mut length = bytes.len();
        let is_cut = {
            let mut remaining = self.cut_after.lock().unwrap();
            match *remaining {
                Some(after) if after < length => {
                    length = after;
                    true
                }
                Some(after) => {
                    *remaining = Some(after - length);
                    false
                }
                None => false,
            }
        };
        if !is_reset {
            let (pipe, bytes) = (self.write.clone(), bytes[..length].to_vec());
            let deliver = move || pipe.change(|pipe| pipe.buffer.extend_from_slice(&bytes));
            self.net.send(self.from, self.to, &self.write, deliver);
        }
        if is_reset || is_cut {
            let pipes = [self.write.clone(), self.read.clone()];
            let reset = move || pipes.iter().for_each(|pipe| pipe.reset());
            self.net.send(self.from, self.to, &self.write, reset);
        }
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let pipe = self.write.clone();
        let end = move || pipe.change(|pipe| pipe.has_ended = true);
        self.net.send(self.from, self.to, &self.write, end);
        Poll::Ready(Ok(()))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let (read, write) = (self.read.clone(), self.write.clone());
        let close = move || {
            write.change(|pipe| pipe.has_ended = true);
            read.change(|pipe| pipe.is_closed = true);
        };
        self.net.send(self.from, self.to, &self.write, close);
    }
}
