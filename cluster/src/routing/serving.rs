//! Serves requests that the layer cannot serve right away.
//!
//! These are requests relayed by peers, requests for remote sessions, requests that restore their session or resume a stream, and requests
//! that have to wait for the inner service.

use std::{future::poll_fn, pin::pin, sync::Arc};

use axum::{body::Body, response::IntoResponse};
use http::{Method, Request, Response, StatusCode};
use tokio::{select, time::timeout};
use tower_service::Service;

use crate::{
    ids::{Incarnation, SessionHash},
    refusals::Refusal,
    relay::{replayable_request::ReplayableRequest, server, wire},
    routing::{
        fields::{Fields, SESSION_ID},
        plan::Action,
        request_context::{poll_restore, with_resume_recorded, with_resumed_call, without_session},
        resume::{self, LAST_EVENT_ID, RewriteOutcome},
        routed::{Presence, Reclaimed, Routed, TransferOutcome},
        router::Router,
        running_restore::RunningRestore,
    },
    sessions::{RESTORE_TIMEOUT, drain_gate::InFlightGuard, pending_restores::PendingRestore},
};

/// Maximum number of times to route a request whose session keeps changing owners.
const MAX_ROUTINGS: usize = 3;

/// Maximum length of a body read before a restore: one byte more than rmcp's default limit.
///
/// rmcp reads the body first and only then restores the session.
const MAX_RESTORE_BODY: usize = 4 * 1024 * 1024 + 1;

/// The inner service, as used for requests not served right away.
pub(crate) trait Inner:
    Service<Request<Body>, Response: IntoResponse, Future: Send> + Send
{
}

impl<S> Inner for S where S: Service<Request<Body>, Response: IntoResponse, Future: Send> + Send {}

/// Marks a request as routed by an instance, so that its inner layers do not route it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RoutedBy(pub(crate) Incarnation);

/// Serves a peer's request, or responds with 421 if its session is not here.
///
/// If it takes too long to decide whether the session is here, the peer's client is asked to retry.
pub(crate) async fn serve_peer<S: Inner>(
    router: &Arc<Router>,
    inner: &mut S,
    mut request: Request<Body>,
) -> Result<Response<Body>, S::Error> {
    let session = session_id(&request);
    let _completion = CompletionGuard(router, session.as_deref());
    let (action, mut presence) = router.classify_from_peer(session.as_deref());
    if let Some(id) = &session
        && presence.guard.is_some()
        && !router.wait_until_verified(id).await
    {
        return Ok(retry_later(router));
    }
    match action {
        Action::Serve => {}
        Action::Transfer if presence.restore.is_some() => {}
        Action::Transfer => {
            // Leave the session's gate first, because this request is about to wait for the session's requests in flight.
            drop(presence);
            (request, presence) = match router.transfer(request).await {
                TransferOutcome::ServedHere(request, presence) => (request, presence),
                TransferOutcome::Moved(request) => return Ok(answer_moved(router, request).await),
                TransferOutcome::Answered(mut response) => {
                    wire::mark(response.headers_mut(), router.this_instance.incarnation);
                    return Ok(response);
                }
            };
        }
        _ => return Ok(answer_moved(router, request).await),
    }
    let Presence { restore, guard } = presence;
    let outcome = match restore {
        Some(restore) => restore_and_serve(router, inner, request, restore).await?,
        None if guard.is_none() => Restored::Served(serve_absent(router, inner, request).await?),
        None => {
            let rewritten = router.rewrite_event_id(&mut request);
            let response = serve(router, inner, request, rewritten, guard).await?;
            Restored::Served(response)
        }
    };
    match outcome {
        Restored::Served(mut response) => {
            wire::mark(response.headers_mut(), router.this_instance.incarnation);
            Ok(response)
        }
        Restored::Moved(request) => Ok(answer_moved_once_flushed(router, request).await),
    }
}

fn session_id(request: &Request<Body>) -> Option<String> {
    Fields::parse(request.headers()).session.map(str::to_owned)
}

/// Responds to a peer with 421, because the request's session is not here.
///
/// If the session turns out to be here after all, the client is asked to retry instead. If this instance reclaims the session only after
/// responding, the peer's claim fails.
async fn answer_moved(router: &Router, request: Request<Body>) -> Response<Body> {
    let session = session_id(&request);
    if let Some(id) = &session {
        router.relinquish_idle(id).await;
    }
    let response = answer_moved_once_flushed(router, request).await;
    match router.classify_from_peer(session.as_deref()).0 {
        Action::Moved => response,
        _ => retry_later(router),
    }
}

/// Responds to a peer with 421 once the answers to the session's calls have been written.
///
/// If the answers have not been written in time, the client is asked to retry instead.
async fn answer_moved_once_flushed(router: &Router, request: Request<Body>) -> Response<Body> {
    let (head, body) = request.into_parts();
    let response =
        server::moved_response(&head.headers, body, router.this_instance.incarnation).await;
    if router.shutdown.flush_answers().await {
        return response;
    }
    retry_later(router)
}

/// Returns a response that asks the peer's client to retry.
fn retry_later(router: &Router) -> Response<Body> {
    let mut retry_later = router.reject(Refusal::SessionMoved);
    wire::mark(retry_later.headers_mut(), router.this_instance.incarnation);
    retry_later
}

/// Serves a request whose session is not known to be open here.
///
/// After [`MAX_ROUTINGS`] routing attempts, the client is asked to retry.
pub(crate) async fn serve_remote<S: Inner>(
    router: &Arc<Router>,
    inner: &mut S,
    mut request: Request<Body>,
) -> Result<Response<Body>, S::Error> {
    let session = session_id(&request);
    let _completion = CompletionGuard(router, session.as_deref());
    for _ in 0..MAX_ROUTINGS {
        request = match router.route(request).await {
            Routed::Answered(response) => return Ok(response),
            Routed::Local(request, None) => return serve_absent(router, inner, request).await,
            Routed::Local(request, Some(restore)) => {
                let outcome = restore_and_serve(router, inner, request, restore).await?;
                match outcome {
                    Restored::Served(response) => return Ok(response),
                    Restored::Moved(request) => request,
                }
            }
        };
    }
    Ok(router.reject(Refusal::SessionMoved))
}

/// Serves a request whose session is neither open here nor about to be restored.
async fn serve_absent<S: Inner>(
    router: &Router,
    inner: &mut S,
    mut request: Request<Body>,
) -> Result<Response<Body>, S::Error> {
    let session = session_id(&request);
    let rewritten = router.rewrite_event_id(&mut request);
    let response = without_session(serve(router, inner, request, rewritten, None)).await?;
    let is_not_loaded = response.status() == StatusCode::INTERNAL_SERVER_ERROR;
    Ok(replace_failed_restore(router, session.as_deref(), response, is_not_loaded).await)
}

/// Serves a request here, restoring its session first unless another request already has.
///
/// Refuses the request if its body cannot be read, if the session cannot be reclaimed, or if another request has been restoring the session
/// for [`RESTORE_TIMEOUT`].
async fn restore_and_serve<S: Inner>(
    router: &Arc<Router>,
    inner: &mut S,
    request: Request<Body>,
    restore: PendingRestore,
) -> Result<Restored, S::Error> {
    let session = session_id(&request);
    let is_call = request.method() == Method::POST;
    // Read the body before taking a turn, so that other requests do not have to wait if the body stalls.
    let mut replayable = ReplayableRequest::new(request);
    let read = replayable.read_up_to(MAX_RESTORE_BODY);
    let read = if is_call {
        read.await
    } else {
        // While the body is being read, another request may restore the session, and one of the session's calls may reach the end of its
        // grace period.
        router.turned_away.record_if_slow(read).await
    };
    if let Err(refusal) = read {
        return Ok(Restored::Served(refusal.into()));
    }
    let Some(mut request) = replayable.into_request() else {
        return Ok(Restored::Served(Refusal::SessionMoved.into()));
    };
    // If the client whose request is restoring the session stops reading, nothing drives that restore any more, so limit the wait.
    let Ok(turn) = timeout(RESTORE_TIMEOUT, restore.turn()).await else {
        return Ok(Restored::Served(router.reject(Refusal::SessionMoved)));
    };
    // Give up the turn if another request has already restored the session.
    let turn = (!router.is_open_here(session.as_deref())).then_some(turn);
    if turn.is_none()
        && let Some(id) = &session
        && !router.wait_until_verified(id).await
    {
        return Ok(Restored::Served(router.reject(Refusal::SessionMoved)));
    }
    if turn.is_some()
        && let Some(id) = &session
    {
        router.wait_until_closed(id).await;
        match router.reclaim(SessionHash::of(id)).await {
            Reclaimed::Local => {}
            Reclaimed::Moved => return Ok(Restored::Moved(request)),
            Reclaimed::Refused(refusal) => return Ok(Restored::Served(router.reject(refusal))),
        }
    }
    // An instance that has stopped in the meantime must not start any more calls.
    if router.shutdown.has_stopped() {
        return Ok(Restored::Moved(request));
    }
    let rewritten = router.rewrite_event_id(&mut request);
    let (Some(turn), Some(id)) = (turn, &session) else {
        let guard = session.as_deref().and_then(|id| router.sessions.enter(id));
        let response = serve(router, inner, request, rewritten, guard).await?;
        return Ok(Restored::Served(response));
    };
    let running = RunningRestore::new(router, id.clone(), restore, turn);
    let mut serving = pin!(serve(router, inner, request, rewritten, None));
    let response = select! {
        biased;
        response = poll_fn(|cx| poll_restore(|| serving.as_mut().poll(cx))) => Some(response?),
        () = running.wait_until_restored() => None,
    };
    let response = match response {
        Some(response) => running.finish_with_response(response),
        None => {
            // An inner layer may be holding back the head, and the session's other requests must not wait for that. This request enters the
            // gate before the restore ends, so that it stays in flight.
            let guard = router.sessions.enter(id);
            drop(running);
            replace_if_relinquished(router, serving.await?, guard.as_ref())
        }
    };
    let has_failed = match response.status() {
        StatusCode::INTERNAL_SERVER_ERROR => true,
        // rmcp may have reused the result of an earlier, abandoned attempt.
        StatusCode::NOT_FOUND => session.as_deref().is_some_and(|id| {
            router
                .sessions
                .restore_attempts
                .was_abandoned(SessionHash::of(id))
        }),
        _ => false,
    };
    let response = replace_failed_restore(router, session.as_deref(), response, has_failed);
    Ok(Restored::Served(response.await))
}

/// Returns [`Router::restore_failure`] instead if rmcp could not restore the session.
///
/// This happens, for example, if the directory does not answer.
async fn replace_failed_restore(
    router: &Router,
    session: Option<&str>,
    response: Response<Body>,
    has_failed: bool,
) -> Response<Body> {
    match session {
        Some(id) if has_failed && !router.is_open_here(session) => router.restore_failure(id).await,
        _ => response,
    }
}

/// The result of a request that had to restore its session.
enum Restored {
    Served(Response<Body>),
    /// The session now belongs to another instance, or this instance has stopped.
    Moved(Request<Body>),
}

/// Calls [`Router::on_request_done`] when dropped, even if the client has disconnected.
struct CompletionGuard<'a>(&'a Router, Option<&'a str>);

impl Drop for CompletionGuard<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.1 {
            self.0.on_request_done(id);
        }
    }
}

/// Serves a request here, or answers it directly if it resumes a call lost with its instance.
///
/// The `guard`, if any, keeps the request in flight in its session until the response head is ready.
pub(crate) async fn serve<S: Inner>(
    router: &Router,
    inner: &mut S,
    mut request: Request<Body>,
    rewritten: RewriteOutcome,
    guard: Option<InFlightGuard>,
) -> Result<Response<Body>, S::Error> {
    let is_resume = request.method() == Method::GET
        && request.headers().contains_key(&SESSION_ID)
        && request.headers().contains_key(&LAST_EVENT_ID);
    request
        .extensions_mut()
        .insert(RoutedBy(router.this_instance.incarnation));
    let response = async {
        poll_fn(|cx| inner.poll_ready(cx)).await?;
        inner.call(request).await
    };
    let response = async {
        if is_resume {
            // The call's grace period may run out before this request reaches the call.
            router.turned_away.record_if_slow(response).await
        } else {
            response.await
        }
    };
    let response = match rewritten {
        RewriteOutcome::Unchanged => response.await?.into_response(),
        RewriteOutcome::Local(generation, call) => {
            let response = with_resumed_call(generation, call, response).await?;
            let response = response.into_response();
            // An inner layer may have responded while the call is still running here, and the call's grace period may run out before the
            // client reconnects.
            if is_temporary(response.status()) {
                router.turned_away.record();
            }
            response
        }
        RewriteOutcome::LostCall(lost) => {
            let (response, is_resumed) = with_resume_recorded(response).await;
            let response = response?.into_response();
            if is_resumed && resume::is_accepted(&response) {
                router.answer(&lost, response).await
            } else {
                response
            }
        }
    };
    Ok(replace_if_relinquished(router, response, guard.as_ref()))
}

/// Returns `true` if a client may repeat the request later.
///
/// See RFC 9110, sections 15.5.9 and 15.6, and RFC 6585, section 4.
fn is_temporary(status: StatusCode) -> bool {
    status.is_server_error()
        || matches!(
            status,
            StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS
        )
}

/// Returns the response, or 503 with `Retry-After` if its session has been relinquished.
///
/// In that case, rmcp responds with 500 to a call it could not start, and with 404 to a request waiting for the same restore.
pub(crate) fn replace_if_relinquished(
    router: &Router,
    response: Response<Body>,
    guard: Option<&InFlightGuard>,
) -> Response<Body> {
    let has_failed = matches!(
        response.status(),
        StatusCode::INTERNAL_SERVER_ERROR | StatusCode::NOT_FOUND
    );
    if has_failed && guard.is_some_and(InFlightGuard::is_closed) {
        return router.reject(Refusal::SessionMoved);
    }
    response
}
