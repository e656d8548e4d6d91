//! Serves what is not served at once: what peers relay, and sessions that live elsewhere or are restored first.

use std::future::poll_fn;

use axum::{body::Body, response::IntoResponse};
use http::{Request, Response, StatusCode};
use tower_service::Service;

use crate::{
    arrivals::Expected,
    departure::Stage,
    drain_gate::InFlightGuard,
    fields::Fields,
    held::Held,
    ids::SessionHash,
    peers,
    resume::{self, Localized},
    resumed::resuming,
    routed::{HandedOver, Presence, Routed, Taken},
    router::Router,
    way::{Refusal, Step},
    wire,
};

/// How often the way of a request is looked for, if its session is another's as soon as it was found to be this instance's: 3 times.
const MAX_SEARCHES: usize = 3;

/// Maximum length of a body that is read before its request takes the turn to restore its session: one byte more than rmcp takes by
/// default (4 MiB). rmcp reads the body first, and restores then.
const MAX_BROUGHT: usize = 4 * 1024 * 1024 + 1;

/// The service inside, for what is not served at once.
pub(crate) trait Inner:
    Service<Request<Body>, Response: IntoResponse, Future: Send> + Send
{
}

impl<S> Inner for S where S: Service<Request<Body>, Response: IntoResponse, Future: Send> + Send {}

/// Serves a request that another instance relays, or says that its session is not here.
pub(crate) async fn from_peer<S: Inner>(
    router: &Router,
    inner: &mut S,
    mut request: Request<Body>,
) -> Result<Response<Body>, S::Error> {
    let session = session_of(&request);
    let _over = Over(router, session.as_deref());
    let (step, mut presence) = router.arrive_from_peer(session.as_deref());
    if let Some(id) = &session
        && presence.guard.is_some()
        && !router.is_verified(id).await
    {
        return Ok(again(router));
    }
    match step {
        Step::Serve => {}
        Step::HandOver if presence.joined.is_some() => {}
        Step::HandOver => {
            // It is not in flight while it waits for those that are.
            drop(presence);
            (request, presence) = match router.hand_over(request).await {
                HandedOver::Not(request, presence) => (request, presence),
                HandedOver::Moved(request) => return Ok(moved(router, request).await),
                HandedOver::Answered(mut response) => {
                    wire::mark(response.headers_mut(), router.me.incarnation);
                    return Ok(response);
                }
            };
        }
        _ => return Ok(moved(router, request).await),
    }
    let Presence { joined, guard } = presence;
    let brought = match joined {
        Some(expected) => bring(router, inner, request, expected).await?,
        None => {
            let localized = router.localize(&mut request);
            let served = serve(router, inner, request, localized, guard).await?;
            Brought::Served(served)
        }
    };
    match brought {
        Brought::Served(mut response) => {
            wire::mark(response.headers_mut(), router.me.incarnation);
            Ok(response)
        }
        Brought::Elsewhere(request) => Ok(elsewhere(router, request).await),
    }
}

fn session_of(request: &Request<Body>) -> Option<String> {
    Fields::of(request.headers()).session.map(str::to_owned)
}

/// Says that a session is not here, or that its client should come again, if it is by now: whoever is told the first claims it, and
/// loses if this instance has taken it since.
async fn moved(router: &Router, request: Request<Body>) -> Response<Body> {
    let session = session_of(&request);
    let moved = elsewhere(router, request).await;
    match router.arrive_from_peer(session.as_deref()).0 {
        Step::Moved => moved,
        _ => again(router),
    }
}

/// Says that a session is not here, whoever else waits for it.
async fn elsewhere(router: &Router, request: Request<Body>) -> Response<Body> {
    let (head, body) = request.into_parts();
    let moved = peers::moved(&head.headers, body, router.me.incarnation).await;
    if router.departure.settles().await {
        return moved;
    }
    again(router)
}

/// Says to a peer that its client should come again.
fn again(router: &Router) -> Response<Body> {
    let mut again = router.turn_away(Refusal::Again);
    wire::mark(again.headers_mut(), router.me.incarnation);
    again
}

/// Takes a request to its session, which is not known to live here.
pub(crate) async fn search<S: Inner>(
    router: &Router,
    inner: &mut S,
    mut request: Request<Body>,
) -> Result<Response<Body>, S::Error> {
    let session = session_of(&request);
    let _over = Over(router, session.as_deref());
    for _ in 0..MAX_SEARCHES {
        request = match router.route(request).await {
            Routed::Answered(response) => return Ok(response),
            Routed::Here(mut request, None) => {
                let localized = router.localize(&mut request);
                let served = serve(router, inner, request, localized, None).await?;
                let is_not_loaded = served.status() == StatusCode::INTERNAL_SERVER_ERROR;
                return Ok(unless_failed(
                    router,
                    session.as_deref(),
                    served,
                    is_not_loaded,
                ));
            }
            Routed::Here(request, Some(expected)) => {
                let brought = bring(router, inner, request, expected).await?;
                match brought {
                    Brought::Served(response) => return Ok(response),
                    Brought::Elsewhere(request) => request,
                }
            }
        };
    }
    Ok(router.turn_away(Refusal::Again))
}

/// Serves a request whose session comes here with it, unless another one has brought it.
async fn bring<S: Inner>(
    router: &Router,
    inner: &mut S,
    request: Request<Body>,
    expected: Expected,
) -> Result<Brought, S::Error> {
    let session = session_of(&request);
    // Before the turn is taken: no other request waits for a body that stalls.
    let mut held = Held::new(request);
    if let Err(refusal) = held.read_up_to(MAX_BROUGHT).await {
        return Ok(Brought::Served(refusal.into()));
    }
    let Some(mut request) = held.into_request() else {
        return Ok(Brought::Served(Refusal::Again.into()));
    };
    let turn = expected.turn().await;
    let turn = (!router.lives_here(session.as_deref())).then_some(turn);
    if turn.is_none()
        && let Some(id) = &session
        && !router.is_verified(id).await
    {
        return Ok(Brought::Served(router.turn_away(Refusal::Again)));
    }
    if turn.is_some()
        && let Some(id) = &session
    {
        router.until_closed(id).await;
        match router.take(SessionHash::of(id)).await {
            Taken::Here => {}
            Taken::Elsewhere => return Ok(Brought::Elsewhere(request)),
            Taken::Refused(refusal) => return Ok(Brought::Served(router.turn_away(refusal))),
        }
    }
    // Nothing begins on an instance that has gone meanwhile.
    if router.departure.stage() >= Stage::Gone {
        return Ok(Brought::Elsewhere(request));
    }
    let localized = router.localize(&mut request);
    let bringing = turn.as_ref().map(|_| expected.begin());
    let served = serve(router, inner, request, localized, None).await?;
    if let Some(bringing) = bringing {
        bringing.ends();
    }
    let has_failed = match served.status() {
        StatusCode::INTERNAL_SERVER_ERROR => true,
        // rmcp goes by the one before, whose client has hung up.
        StatusCode::NOT_FOUND => expected.broke_off(),
        _ => false,
    };
    let has_failed = turn.is_some() && has_failed;
    if turn.is_some()
        && let Some(id) = &session
    {
        if served.status().is_success() {
            router.sessions.clear_restore_attempts(id);
        } else if has_failed {
            router.sessions.on_restore_failed(id);
        }
    }
    let response = unless_failed(router, session.as_deref(), served, has_failed);
    Ok(Brought::Served(response))
}

/// A response, or that its client is to come again if rmcp failed to bring its session to life, say, because the directory did not
/// answer.
fn unless_failed(
    router: &Router,
    session: Option<&str>,
    served: Response<Body>,
    has_failed: bool,
) -> Response<Body> {
    match session {
        Some(id) if has_failed && !router.lives_here(session) => router.not_restored(id),
        _ => served,
    }
}

/// What became of a request that was to bring its session.
enum Brought {
    Served(Response<Body>),
    /// The session is another instance's by now, or soon: this one is gone.
    Elsewhere(Request<Body>),
}

/// When this is dropped, a session has come, or does not, also if the client hung up before: whoever waits for it hears of that.
struct Over<'a>(&'a Router, Option<&'a str>);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.1 {
            self.0.is_over(id);
        }
    }
}

/// Serves a request here, and answers for a call that is not any more. It is in flight in its session until it has a head.
pub(crate) async fn serve<S: Inner>(
    router: &Router,
    inner: &mut S,
    request: Request<Body>,
    localized: Localized,
    guard: Option<InFlightGuard>,
) -> Result<Response<Body>, S::Error> {
    poll_fn(|cx| inner.poll_ready(cx)).await?;
    let served = inner.call(request);
    match localized {
        Localized::Nothing => {
            let response = served.await?.into_response();
            Ok(unless_relinquished(router, response, guard.as_ref()))
        }
        Localized::Here(call) => Ok(resuming(call, served).await?.into_response()),
        Localized::Lost(lost) => {
            let response = served.await?.into_response();
            if resume::is_accepted(&response) {
                Ok(router.answer(&lost, response).await)
            } else {
                Ok(response)
            }
        }
    }
}

/// A response, or 503 with `Retry-After` if rmcp failed to begin a call because its session was relinquished meanwhile.
pub(crate) fn unless_relinquished(
    router: &Router,
    response: Response<Body>,
    guard: Option<&InFlightGuard>,
) -> Response<Body> {
    let has_failed = response.status() == StatusCode::INTERNAL_SERVER_ERROR;
    if has_failed && guard.is_some_and(InFlightGuard::is_closed) {
        return router.turn_away(Refusal::Again);
    }
    response
}
