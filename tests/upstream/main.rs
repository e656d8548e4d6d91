//! What the libraries underneath do wrong, shown without the layer. Each test in this file pins a row of the section
//! `Workarounds` in ARCHITECTURE.md, and fails once the library has been fixed.
//!
//! The files next to this one that have a `main` are complete programs on bare rmcp. `docs/upstream` has a report on each of
//! them that includes its text.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "the files are programs with a main function of their own"
)]
#![allow(
    clippy::restriction,
    reason = "a broken expectation ends the test; clippy only spares functions marked #[test]"
)]

mod aborted_restore;
mod cancelled_call;
mod future_size;
mod hyper_buffers;
mod hyper_unread;
mod idle_session;
mod late_answer;
#[path = "../it/handlers/abort/methods_of_rmcp.rs"]
mod methods_of_rmcp;
mod pages;
mod panicking_tool;
mod restored_session;
mod resume_context;
mod stored_events;
mod stored_resume;
mod unread_stream;

const MENDED: &str = "mended: see Workarounds in ARCHITECTURE.md";

#[tokio::test(start_paused = true)]
async fn rmcp_drops_an_answer_between_a_disconnect_and_the_resume() {
    let seen = late_answer::observe().await;
    assert_eq!(seen, r#"resumed: 200 OK, b"""#, "{MENDED}");
}

#[tokio::test]
async fn rmcp_gives_a_stored_event_to_any_session() {
    let seen = stored_events::observe().await;
    assert_eq!(seen, "the other session gets the answer: true", "{MENDED}");
}

#[tokio::test]
async fn rmcp_ends_the_resumed_stream_of_a_stored_call_in_flight_without_an_event() {
    let seen = stored_resume::observe().await;
    assert_eq!(seen, r#"resumed: 200 OK, b"""#, "{MENDED}");
}

/// A new method may have a default implementation that calls the present one. Nothing else would then reveal it. A new
/// parameter does not compile, which means the same.
#[test]
fn rmcp_has_no_method_with_the_session_of_an_event_or_the_request_of_a_resume() {
    let session = "src/transport/streamable_http_server/session.rs";
    let store = "src/transport/streamable_http_server/session/store.rs";
    let events = methods_of_rmcp::names_of(store, "pub trait EventStore");
    let sessions = methods_of_rmcp::names_of(session, "pub trait SessionManager");
    assert_eq!(
        Vec::from_iter(&events),
        ["replay_events_after", "store_event"],
        "{MENDED}"
    );
    assert_eq!(
        Vec::from_iter(&sessions),
        [
            "accept_message",
            "close_session",
            "create_session",
            "create_standalone_stream",
            "create_stream",
            "event_store",
            "has_session",
            "initialize_session",
            "restore_session",
            "resume",
        ],
        "{MENDED}"
    );
}

#[tokio::test]
async fn rmcp_resumes_without_the_extensions_of_the_request() {
    let seen = resume_context::observe().await;
    assert_eq!(
        seen, r#"call of Some("alice"), resume of an unknown user"#,
        "{MENDED}"
    );
}

#[tokio::test(start_paused = true)]
async fn rmcp_answers_404_to_a_request_whose_restore_another_client_aborts() {
    let seen = aborted_restore::observe().await;
    assert_eq!(
        seen, "the first disconnects: true, the second gets 404 Not Found, a later one 200 OK",
        "{MENDED}"
    );
}

#[tokio::test(start_paused = true)]
async fn rmcp_closes_a_restored_session_when_the_former_one_ends() {
    let seen = restored_session::observe().await;
    assert_eq!(
        seen, "restored: 200 OK, open: true, open after 6 s: false",
        "{MENDED}"
    );
}

#[tokio::test(start_paused = true)]
async fn rmcp_closes_an_idle_session_under_a_call_in_flight() {
    let seen = idle_session::observe().await;
    assert_eq!(
        seen, "the stream ends after 300 s, with the answer: false",
        "{MENDED}"
    );
}

#[tokio::test(start_paused = true)]
async fn rmcp_sends_progress_of_a_cancelled_call_on_the_standalone_stream() {
    let seen = cancelled_call::observe().await;
    assert_eq!(
        seen, "the standalone stream has progress of the cancelled call: true",
        "{MENDED}"
    );
}

#[tokio::test(start_paused = true)]
async fn rmcp_sends_no_answer_for_a_tool_that_panics() {
    let seen = panicking_tool::observe().await;
    assert_eq!(seen, "the stream ends within 60 s: false", "{MENDED}");
}

#[tokio::test(start_paused = true)]
async fn rmcp_blocks_a_session_behind_an_unread_stream() {
    let seen = unread_stream::observe().await;
    assert_eq!(
        seen, "a ping has a response: false, once the stream is dropped: true",
        "{MENDED}"
    );
}

#[test]
fn rmcp_creates_a_stream_in_a_future_of_several_messages() {
    let [message, create_stream] = future_size::sizes();
    assert!(create_stream > 4 * message, "{MENDED}");
}
