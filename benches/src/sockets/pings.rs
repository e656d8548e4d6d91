//! Whether a server answers while other things happen to it.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
    time::Duration,
};

use serde_json::json;
use tokio::time::Instant;

use crate::{
    Failure,
    setup::Mode,
    sockets::client::{Client, Way, wire},
};

const PAUSE: Duration = Duration::from_millis(10);

/// One `ping` after the other, from a thread of its own, until this is dropped.
#[derive(Debug)]
pub struct Pings {
    worst: Arc<Mutex<Duration>>,
    _stop: mpsc::Sender<()>,
}

// === impl Pings ===

impl Pings {
    pub async fn start(address: SocketAddr) -> Result<Self, Failure> {
        let client = Client::open(Way::Socket(address), Mode::Session).await?;
        let ping = json!({ "jsonrpc": "2.0", "id": "p", "method": "ping" });
        let ping = wire(client.post(&ping)?).await?;
        let mut socket = TcpStream::connect(address)?;
        socket.set_nodelay(true)?;
        let worst = Arc::new(Mutex::new(Duration::ZERO));
        let (stop, stopped) = mpsc::channel();
        let noted = worst.clone();
        thread::spawn(move || {
            while stopped.recv_timeout(PAUSE) == Err(mpsc::RecvTimeoutError::Timeout) {
                let begun = Instant::now();
                let taken = match exchange(&mut socket, &ping) {
                    Ok(()) => begun.elapsed(),
                    // A server that closes the connection is as bad as one that never answers.
                    Err(_) => Duration::MAX,
                };
                let mut worst = noted.lock().unwrap_or_else(PoisonError::into_inner);
                *worst = taken.max(*worst);
                if taken == Duration::MAX {
                    return;
                }
            }
        });
        Ok(Self { worst, _stop: stop })
    }

    /// The longest that one took, since this was asked last.
    pub fn worst(&self) -> Duration {
        std::mem::take(&mut *self.worst.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn exchange(socket: &mut TcpStream, request: &[u8]) -> std::io::Result<()> {
    socket.write_all(request)?;
    let mut seen = Vec::new();
    let mut piece = [0; 1024];
    // The last chunk.
    while !seen.ends_with(b"\r\n0\r\n\r\n") {
        match socket.read(&mut piece)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            read => seen.extend_from_slice(&piece[..read]),
        }
    }
    Ok(())
}
