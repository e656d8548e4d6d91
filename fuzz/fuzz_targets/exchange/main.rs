//! Whole exchanges through the layer, several at once. The fuzzer decides what the inner service does, and in which
//! order polls, drops, resumes, cancels and clock steps happen. The invariants are in [`ledger`].

#![no_main]

use std::{
    panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook},
    pin::Pin,
    sync::{Arc, Once, Weak},
    task::{Context, Poll, Waker},
    time::Duration,
};

use fuzz::{choices::Choices, clock};
use http::Request;
use http_body::Body as _;
use libfuzzer_sys::fuzz_target;
use mcp_cancel_on_disconnect::{
    CancelOnDisconnect, CancelOnDisconnectLayer, CancelReason, Event, Grace,
    body::{ResponseBody, ResponseFuture},
};
use tokio::{task::yield_now, time::advance};
use tower_layer::Layer as _;
use tower_service::Service as _;

use self::{
    inner::{ExchangeSlot, Inner, SlotData},
    ledger::{AddedFrames, Holds, Ledger, Names, Side, trace},
    script::{PANIC_MESSAGE, Plan, Scripted},
};

mod inner;
mod ledger;
mod script;

const MAX_EXCHANGES: usize = 8;

const MAX_OPS: u32 = 80;

/// Longer than a call can stay detached.
const HOUR: Duration = Duration::from_secs(3_601);
const RECHECK_DELAY: Duration = Duration::from_millis(101);

struct World {
    layer: CancelOnDisconnectLayer,
    /// Two of them, because a router creates one per path or per method.
    services: [CancelOnDisconnect<Inner>; 2],
    ledger: Ledger,
    added: AddedFrames,
    open: Vec<(usize, Open)>,
    slots: Vec<Weak<SlotData>>,
}

/// Which part of an exchange the client is holding.
enum Open {
    Future(
        Pin<
            Box<
                ResponseFuture<
                    <Inner as tower_service::Service<
                        Request<mcp_cancel_on_disconnect::body::TeeBody<Scripted>>,
                    >>::Future,
                >,
            >,
        >,
    ),
    Body(Pin<Box<ResponseBody<Scripted>>>),
}

fuzz_target!(|bytes: &[u8]| {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let abort = take_hook();
        set_hook(Box::new(move |info| {
            if info.payload().downcast_ref::<&str>() != Some(&PANIC_MESSAGE) {
                abort(info);
            }
        }));
    });
    clock::run(run(Choices::new(bytes)));
});

async fn run(mut choices: Choices<'_>) {
    let mut world = World::new(&mut choices);
    let mut ops = 0;
    while choices.are_left() && ops < MAX_OPS {
        ops += 1;
        world.step(&mut choices).await;
        settle().await;
        world.ledger.check(world.added);
    }
    world.end().await;
}

/// Runs all tasks until none is ready.
async fn settle() {
    for _ in 0..4 {
        yield_now().await;
    }
}

// === impl World ===

impl World {
    fn new(choices: &mut Choices<'_>) -> Self {
        let ledger = Ledger::default();
        let log = ledger.clone();
        let grace = choices.pick(&[
            Grace::Auto,
            Grace::Auto,
            Grace::Immediate,
            Grace::After(Duration::from_secs(5)),
            Grace::Never,
        ]);
        let mut layer = CancelOnDisconnectLayer::new().grace(grace);
        let added = AddedFrames {
            probes: choices.rarely(4),
            heads: choices.rarely(4),
        };
        if added.probes {
            layer = layer.keep_alive(Duration::from_secs(2));
        }
        if added.heads {
            layer = layer.commit_after(Duration::from_secs(1));
        }
        if choices.rarely(4) {
            layer = layer.call_timeout(Duration::from_secs(10));
        }
        let stalls = choices.rarely(4);
        if stalls {
            layer = layer.stall_timeout(Duration::from_secs(8));
        }
        layer = layer.observe(move |event: &Event<'_>| log.on_event(event, stalls));
        let services = [(); 2].map(|()| {
            let ledger = ledger.clone();
            layer.layer(Inner { ledger })
        });
        Self {
            layer,
            services,
            ledger,
            added,
            open: Vec::new(),
            slots: Vec::new(),
        }
    }

    async fn step(&mut self, choices: &mut Choices<'_>) {
        match choices.one_of(16) {
            0..4 => self.open(choices),
            4..9 => self.on_one(choices, |world, at| world.poll(at)),
            9 => self.on_one(choices, |world, at| {
                for _ in 0..16 {
                    world.poll(at);
                }
            }),
            10 => self.on_one(choices, |world, at| {
                let (slot, disconnected) = world.open.remove(at);
                world.ledger.set_holds(slot, Holds::Nothing);
                world.during(slot, || drop(disconnected));
            }),
            11 => advance(Duration::from_millis(u64::from(choices.byte()) * 8)).await,
            12 => advance(Duration::from_millis(u64::from(choices.byte()) * 120)).await,
            13 => self.cancel(choices),
            14 => {
                let byte = choices.byte();
                let slot = usize::from(byte) % MAX_EXCHANGES;
                match byte {
                    _ if slot >= self.slots.len() => {}
                    192.. => self.ledger.report_answer(slot),
                    _ => self.ledger.use_token(slot),
                }
            }
            _ => {
                let calls = self.layer.calls();
                let _known =
                    calls.resumed_elsewhere(choices.pick(&["s", "t"]), choices.pick(&["0/0", "x"]));
            }
        }
    }

    fn on_one(&mut self, choices: &mut Choices<'_>, act: impl FnOnce(&mut Self, usize)) {
        let byte = usize::from(choices.byte());
        if !self.open.is_empty() {
            act(self, byte % self.open.len());
        }
    }

    fn open(&mut self, choices: &mut Choices<'_>) {
        if self.slots.len() == MAX_EXCHANGES {
            return;
        }
        let Plan {
            request,
            answer,
            is_post,
        } = Plan::new(choices);
        let slot = self.ledger.add_slot(names_of(&request), is_post);
        trace(|| {
            format!(
                "{slot}: {} {} {:?}",
                request.method(),
                request.uri(),
                request.headers()
            )
        });
        let ledger = self.ledger.clone();
        let mut request = request.map(|body| body.logged(ledger, slot, Side::RequestIn));
        let slot_data = Arc::new(SlotData {
            number: slot,
            answer,
        });
        self.slots.push(Arc::downgrade(&slot_data));
        request.extensions_mut().insert(ExchangeSlot(slot_data));
        let ledger = self.ledger.clone();
        ledger.set_current(Some(slot));
        let service = &mut self.services[slot % 2];
        let future = Box::pin(service.call(request));
        ledger.set_current(None);
        ledger.set_holds(slot, Holds::Future);
        self.open.push((slot, Open::Future(future)));
    }

    /// Polls once, as a server would. Drops the exchange if it panics, fails or ends.
    fn poll(&mut self, at: usize) {
        let Some((slot, mut open)) = (at < self.open.len()).then(|| self.open.remove(at)) else {
            return;
        };
        let ledger = self.ledger.clone();
        let left = self.during(slot, || {
            let polled = catch_unwind(AssertUnwindSafe(|| open.poll(&ledger, slot)));
            match polled {
                Ok(Next::Same) => Some(open),
                Ok(Next::Body(body)) => {
                    ledger.set_holds(slot, Holds::Body);
                    Some(Open::Body(body))
                }
                Ok(Next::Over) | Err(_) => {
                    ledger.set_holds(slot, Holds::Nothing);
                    drop(open);
                    None
                }
            }
        });
        if let Some(open) = left {
            self.open.insert(at, (slot, open));
        }
    }

    fn during<T>(&self, slot: usize, act: impl FnOnce() -> T) -> T {
        trace(|| format!("{slot}:"));
        self.ledger.set_current(Some(slot));
        let result = act();
        self.ledger.set_current(None);
        result
    }

    fn cancel(&self, choices: &mut Choices<'_>) {
        let calls = self.layer.calls();
        let byte = choices.byte();
        if byte >= 224 {
            calls.cancel_session(choices.pick(&["s", "t"]), CancelReason::Requested);
            return;
        }
        let in_flight = calls.snapshot();
        if !in_flight.is_empty() {
            let call = &in_flight[usize::from(byte) % in_flight.len()];
            calls.cancel(call.info().id(), CancelReason::Requested);
        }
    }

    /// Disconnects all clients and advances the clock, after which nothing may remain.
    async fn end(mut self) {
        for (slot, open) in std::mem::take(&mut self.open) {
            self.ledger.set_holds(slot, Holds::Nothing);
            self.during(slot, || drop(open));
        }
        settle().await;
        self.ledger.check(self.added);
        let calls = self.layer.calls();
        for _ in 0..4 {
            // A deadline that is handled late is checked again a moment later.
            for time in [HOUR, RECHECK_DELAY] {
                advance(time).await;
                settle().await;
            }
        }
        self.ledger.check(self.added);
        assert_eq!(calls.len(), 0, "{:?}", calls.snapshot());
        self.ledger.check_ended();
        self.ledger.drop_tokens();
        for slot in &self.slots {
            assert!(
                slot.upgrade().is_none(),
                "something holds a reference to an exchange"
            );
        }
    }
}

/// The path and the ids in a request. An id only counts if its header occurs exactly once.
fn names_of<B>(request: &Request<B>) -> Names {
    let single = |name: &str| {
        let mut values = request.headers().get_all(name).iter();
        let value = values.next().filter(|_| values.next().is_none())?;
        value.to_str().map(str::to_owned).ok()
    };
    Names {
        path: request.uri().path().to_owned(),
        session: single("mcp-session-id"),
        last_event_id: single("last-event-id"),
    }
}

/// The state after a poll.
enum Next {
    Same,
    Body(Pin<Box<ResponseBody<Scripted>>>),
    Over,
}

impl Open {
    fn poll(&mut self, ledger: &Ledger, slot: usize) -> Next {
        let mut cx = Context::from_waker(Waker::noop());
        match self {
            Self::Future(future) => match future.as_mut().poll(&mut cx) {
                Poll::Pending => Next::Same,
                Poll::Ready(Ok(response)) => Next::Body(Box::pin(response.into_body())),
                Poll::Ready(Err(_)) => Next::Over,
            },
            Self::Body(body) => match body.as_mut().poll_frame(&mut cx) {
                Poll::Pending => Next::Same,
                Poll::Ready(Some(Ok(frame))) => {
                    if let Ok(data) = frame.into_data() {
                        ledger.record_frame(slot, Side::ResponseOut, data);
                    }
                    Next::Same
                }
                Poll::Ready(Some(Err(_)) | None) => Next::Over,
            },
        }
    }
}
