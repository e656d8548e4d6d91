//! A raw client, which opens one session after another, each with a few concurrent calls.

use std::{sync::Arc, time::Duration};

use fastrand::Rng;
use soak::setup::Setup;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};

use crate::{
    connection::World,
    dice::{millis, weighted},
    session::Session,
    story::Story,
};

/// The routes and their weights.
const ROUTES: &[(u32, &str)] = &[
    (30, "wrapped"),
    (20, "layer"),
    (12, "abort"),
    (12, "patient"),
    (10, "drained"),
    (8, "replays"),
    (8, "follows"),
    (8, "paths"),
    (6, "methods"),
    (10, "stateless"),
    (6, "json"),
];

/// Opens sessions and plays stories in them until `end`.
pub(crate) async fn run(world: Arc<World>, name: String, mut dice: Rng, end: Instant) {
    // This makes the clients start at different times.
    sleep_until((Instant::now() + millis(&mut dice, 0..2_000)).min(end)).await;
    let routes = world.only.among(ROUTES, |route| route);
    let mut turn = 0;
    while Instant::now() < end {
        turn += 1;
        let route = weighted(&mut dice, &routes);
        let setup = Setup::of(route).expect("a route of the server");
        let client = format!("{name}s{turn}");
        let watched = dice.bool();
        match Session::open(&world, setup, &client, watched).await {
            Some(session) => play(Arc::new(session), &client, &mut dice, end).await,
            // The drained server is down at times.
            None => sleep(Duration::from_millis(300)).await,
        }
    }
}

/// Makes some calls, one or several at a time, and ends the session in some random way.
async fn play(session: Arc<Session>, client: &str, dice: &mut Rng, end: Instant) {
    let mut listener = JoinSet::new();
    if session.id.is_some() && dice.u8(..5) == 0 {
        listener.spawn(session.clone().listen());
    }
    let delete_in_flight = dice.u8(..6) == 0;
    let rounds = dice.usize(1..4);
    for round in 0..rounds {
        let mut calls = JoinSet::new();
        for number in 0..weighted(dice, &[(5, 1), (3, 2), (2, 3)]) {
            let story = Story::any(dice, session.setup, &session.world.only);
            let name = format!("{client}.{round}.{number}.{story:?}");
            let (session, dice) = (session.clone(), dice.fork());
            calls.spawn(async move { story.play(&session, name, dice).await });
        }
        if delete_in_flight && round + 1 == rounds {
            sleep(millis(dice, 50..3_000)).await;
            session.delete().await;
        }
        while calls.join_next().await.is_some() {}
        if Instant::now() >= end {
            break;
        }
    }
    if !delete_in_flight && dice.bool() {
        session.delete().await;
    }
    // Dropping the set ends the standalone stream.
}
