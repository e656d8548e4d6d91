//! The server over HTTP. Like most servers, it sends events in sessions, without event ids. Head, event and end are written at once. No
//! upstream could answer faster, so the upstream never makes a proxy look slower.

use std::{
    io::Write as _,
    sync::atomic::{AtomicU64, Ordering},
};

use anyhow::{Context as _, Result, bail};
use bytes::BytesMut;
use test_support::{
    body::{BodyDecoder, Decoded},
    head,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use super::Answer;

const STREAM: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n";

/// The number of the next session.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Serves until the process is killed.
pub(crate) async fn serve() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?.port());
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        // An error on one connection does not affect the others.
        tokio::spawn(connection(stream));
    }
}

async fn connection(mut stream: TcpStream) -> Result<()> {
    let mut received = BytesMut::with_capacity(4 << 10);
    while let Some((line, body)) = request(&mut stream, &mut received).await? {
        match line.split(' ').next() {
            Some("POST") => answer(&mut stream, &body).await?,
            Some("DELETE") => respond_without_body(&mut stream, "200 OK").await?,
            _ => respond_without_body(&mut stream, "405 Method Not Allowed").await?,
        }
    }
    Ok(())
}

/// Returns the next request's line and body, or `None` if the client has closed the connection first.
async fn request(
    stream: &mut TcpStream,
    received: &mut BytesMut,
) -> Result<Option<(String, Vec<u8>)>> {
    let (line, headers) = loop {
        match head::take(received) {
            Some(head) => break head,
            None if stream.read_buf(received).await? == 0 => return Ok(None),
            None => {}
        }
    };
    let (mut decoder, mut body) = (BodyDecoder::announced(&headers), Vec::new());
    loop {
        match decoder.decode(received) {
            Decoded::Data(data) => body.extend_from_slice(&data),
            Decoded::End => return Ok(Some((line, body))),
            Decoded::More if stream.read_buf(received).await? == 0 => bail!("a request is cut"),
            Decoded::More => {}
        }
    }
}

async fn answer(stream: &mut TcpStream, body: &[u8]) -> Result<()> {
    match Answer::to(body) {
        Answer::None => respond_without_body(stream, "202 Accepted").await,
        Answer::Never => {
            stream.write_all(format!("{STREAM}\r\n").as_bytes()).await?;
            // Returns when the client closes the connection.
            stream.readable().await.context("a held call")?;
            Ok(())
        }
        Answer::Line(line) => {
            let mut response = STREAM.as_bytes().to_vec();
            if line.contains(r#""protocolVersion""#) {
                let session = NEXT.fetch_add(1, Ordering::Relaxed);
                write!(response, "mcp-session-id: session-{session}\r\n")?;
            }
            response.extend_from_slice(b"\r\n");
            chunk(&mut response, &line)?;
            response.extend_from_slice(b"0\r\n\r\n");
            Ok(stream.write_all(&response).await?)
        }
        Answer::Lines(lines) => {
            stream.write_all(format!("{STREAM}\r\n").as_bytes()).await?;
            for line in lines {
                let mut event = Vec::with_capacity(line.len() + 32);
                chunk(&mut event, &line)?;
                stream.write_all(&event).await?;
            }
            Ok(stream.write_all(b"0\r\n\r\n").await?)
        }
    }
}

async fn respond_without_body(stream: &mut TcpStream, status: &str) -> Result<()> {
    let response = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n");
    Ok(stream.write_all(response.as_bytes()).await?)
}

/// Appends an event as a chunk.
fn chunk(to: &mut Vec<u8>, line: &str) -> Result<()> {
    let around = "data: ".len() + "\n\n".len();
    Ok(write!(
        to,
        "{:x}\r\ndata: {line}\n\n\r\n",
        line.len() + around
    )?)
}
