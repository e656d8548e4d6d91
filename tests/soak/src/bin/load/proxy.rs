//! A proxy for one SDK's call, which records the messages and resets connections on demand.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use soak::{
    fact::{Call, CloseKind, Fact, Stream},
    setup::Setup,
    wire::{Item, Request, Requests, Responses},
};
use socket2::SockRef;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Notify, watch},
    task::JoinSet,
};

use crate::{call::record, connection::World};

/// A proxy that runs until it is dropped.
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    link: Arc<Link>,
    _tasks: JoinSet<()>,
}

/// What all of a proxy's connections share.
struct Link {
    world: Arc<World>,
    setup: &'static Setup,
    call: Call,
    client: Arc<str>,
    server: u16,
    /// How often everything has been cut.
    cuts: watch::Sender<u32>,
    refuses: watch::Sender<bool>,
    call_passed: Notify,
}

/// The request that is passing through, along with its response.
enum Passing {
    Nothing,
    /// A request that is not recorded.
    Other,
    Stream(Stream),
    Delete(Arc<str>),
}

// === impl Proxy ===

impl Proxy {
    pub(crate) async fn start(
        world: &Arc<World>,
        setup: &'static Setup,
        call: &str,
        client: &str,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let link = Arc::new(Link {
            world: world.clone(),
            setup,
            call: call.into(),
            client: client.into(),
            server: world.port(setup, false),
            cuts: watch::channel(0).0,
            refuses: watch::channel(false).0,
            call_passed: Notify::new(),
        });
        let mut tasks = JoinSet::new();
        let address = listener.local_addr()?;
        tasks.spawn(serve(listener, link.clone()));
        Ok(Self {
            address,
            link,
            _tasks: tasks,
        })
    }

    /// Waits until the call has reached the proxy.
    pub(crate) async fn call_passed(&self) {
        self.link.call_passed.notified().await;
    }

    /// Resets all connections.
    pub(crate) fn cut(&self) {
        self.link.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Resets all connections, including any later ones.
    pub(crate) fn refuse(&self) {
        self.link.refuses.send_replace(true);
        self.cut();
    }

    /// Resets the remaining connections and waits until that has been recorded.
    pub(crate) async fn end(self) {
        self.refuse();
        tokio::time::sleep(Duration::from_millis(20)).await;
        self.link.cuts.closed().await;
    }
}

/// Accepts connections until asked to refuse them, then waits for the existing ones.
async fn serve(listener: TcpListener, link: Arc<Link>) {
    let mut connections = JoinSet::new();
    let mut refuses = link.refuses.subscribe();
    let accept = async {
        loop {
            let Ok((client, _)) = listener.accept().await else {
                return;
            };
            if *link.refuses.borrow() {
                reset(&client);
                continue;
            }
            connections.spawn(pass(client, link.clone()));
        }
    };
    tokio::select! {
        () = accept => {}
        _ = refuses.wait_for(|refuses| *refuses) => {}
    }
    // From now on connections are refused. The existing ones end on their own.
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Makes dropping a stream reset its connection.
fn reset(stream: &TcpStream) {
    let _result = SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

/// Relays a connection, and records how it ended.
async fn pass(client: TcpStream, link: Arc<Link>) {
    let mut cuts = link.cuts.subscribe();
    let Ok(server) = TcpStream::connect(("127.0.0.1", link.server)).await else {
        return;
    };
    let _result = (client.set_nodelay(true), server.set_nodelay(true));
    let mut passing = Passing::Nothing;
    let how = tokio::select! {
        how = pump(&client, &server, &link, &mut passing) => how,
        _ = cuts.changed() => Some(CloseKind::Proxy),
    };
    let stream = match passing {
        Passing::Stream(stream) => Some(stream),
        _ => None,
    };
    let log = &link.world.log;
    match (how, stream) {
        (Some(how), Some(stream)) => log.write(Fact::Closing { stream, how }),
        (None, Some(stream)) => log.write(Fact::StreamEnded {
            stream,
            clean: false,
        }),
        (_, None) => {}
    }
    if how == Some(CloseKind::Proxy) {
        reset(&client);
        reset(&server);
    }
    drop((client, server));
    if let (Some(_), Some(stream)) = (how, stream) {
        log.write(Fact::Closed { stream });
    }
}

/// Copies until one side closes. Returns how the client closed, or `None` if the server did.
async fn pump(
    client: &TcpStream,
    server: &TcpStream,
    link: &Link,
    passing: &mut Passing,
) -> Option<CloseKind> {
    let (mut requests, mut responses) = (Requests::default(), Responses::default());
    let (mut from_client, mut from_server) = (vec![0; 16 * 1024], vec![0; 64 * 1024]);
    loop {
        tokio::select! {
            read = read(client, &mut from_client) => match read {
                Ok(length) if length > 0 => {
                    for request in requests.feed(&from_client[..length]) {
                        *passing = link.record_request(&request);
                    }
                    write(server, &from_client[..length]).await.ok()?;
                }
                Ok(_) => return Some(CloseKind::Fin),
                Err(_) => return Some(CloseKind::Reset),
            },
            read = read(server, &mut from_server) => match read {
                Ok(length) if length > 0 => {
                    for item in responses.feed(&from_server[..length]) {
                        link.record_response(passing, &item);
                    }
                    if write(client, &from_server[..length]).await.is_err() {
                        return Some(CloseKind::Reset);
                    }
                }
                Ok(_) | Err(_) => return None,
            },
        }
    }
}

/// Reads from a borrowed stream, so that it can also be written to. Cancel safe.
async fn read(stream: &TcpStream, bytes: &mut [u8]) -> io::Result<usize> {
    loop {
        stream.readable().await?;
        match stream.try_read(bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            read => return read,
        }
    }
}

async fn write(stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.writable().await?;
        match stream.try_write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

// === impl Link ===

impl Link {
    /// Records a request. Returns what is passing through now.
    fn record_request(&self, request: &Request) -> Passing {
        let log = &self.world.log;
        let stream = self.world.next_stream();
        let session: Option<Arc<str>> = request.session.as_deref().map(Into::into);
        let message = request.message.as_ref();
        match (
            request.method.as_str(),
            message.and_then(|message| message["method"].as_str()),
        ) {
            ("POST", Some("tools/call")) => {
                log.write(Fact::Calling {
                    call: self.call.clone(),
                    client: self.client.clone(),
                    route: self.setup.route.into(),
                    session,
                    id: message.map_or_else(String::new, |message| message["id"].to_string()),
                    stream,
                });
                log.write(Fact::Sent { stream });
                self.call_passed.notify_one();
                Passing::Stream(stream)
            }
            ("POST", Some("notifications/cancelled")) => {
                log.write(Fact::Cancelling {
                    call: self.call.clone(),
                });
                Passing::Other
            }
            ("GET", _) => {
                let last_event_id = request.last_event_id.clone();
                log.write(match last_event_id.filter(|id| id.contains('/')) {
                    Some(last_event_id) => Fact::Resuming {
                        call: self.call.clone(),
                        session,
                        last_event_id,
                        stream,
                    },
                    None => Fact::Listening { session, stream },
                });
                Passing::Stream(stream)
            }
            ("DELETE", _) => match session {
                Some(session) => {
                    log.write(Fact::Deleting {
                        session: session.clone(),
                    });
                    Passing::Delete(session)
                }
                None => Passing::Other,
            },
            _ => Passing::Other,
        }
    }

    /// Records an item of the response to the request that is passing through.
    fn record_response(&self, passing: &mut Passing, item: &Item) {
        let log = &self.world.log;
        match (&*passing, item) {
            (Passing::Stream(stream), Item::End) => {
                let stream = *stream;
                log.write(Fact::StreamEnded {
                    stream,
                    clean: true,
                });
                *passing = Passing::Nothing;
            }
            (Passing::Stream(stream), item) => drop(record(log, *stream, item)),
            (Passing::Delete(session), Item::Head { status, .. }) => {
                let (session, status) = (session.clone(), *status);
                log.write(Fact::Deleted { session, status });
                *passing = Passing::Nothing;
            }
            _ => {}
        }
    }
}
