//! One run: a seed's instances, clients and faults.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use test_support::Dice;

use super::{
    client::{Balancer, Client},
    directory_link::{DirectoryLink, LinkState},
    faults::{ClientProfile, Event, Fault, Plan},
    net::{Machine, Net, PathState},
    node::{Environment, GRACE, LEAVE_LIMIT, Node},
    time::{Host, HostId, LAG, Ms, Post, WORLD},
    watcher::{Check, Failure, Unreachable, Watcher},
};
use crate::{
    directory::{
        MemoryDirectory,
        faulty::Faulty,
        memory::faults::{Kind, Snapshot},
    },
    ids::SessionHash,
};

/// The earliest start of a fault, by which time all instances have settled.
const FAULTS_FROM: Ms = 9_000;

/// The latest start of a fault.
const FAULTS_TO: Ms = 30_000;

/// How long after the faults the sessions are probed, which is how long a lease lasts.
const PROBED_AFTER: Ms = 6_000;

/// How long a run continues after the faults. Some runs take the long time, which also covers the report of the last client that was turned
/// away.
const SETTLE_TIME: Ms = 28_000;
const LONG_SETTLE_TIME: Ms = 90_000;

/// What is drawn and what is checked.
#[derive(Debug, Clone)]
pub(super) struct Setup {
    pub(super) faults: BTreeMap<Fault, u64>,
    pub(super) checks: BTreeSet<Check>,
}

#[derive(Debug)]
pub(super) struct Outcome {
    seed: u64,
    pub(super) faults: Vec<Fault>,
    pub(super) failures: Vec<Failure>,
    history: Vec<(Ms, String)>,
    pub(super) requests: usize,
}

struct Run {
    environment: Environment,
    post: Post,
    world: Host,
    nodes: Vec<Running>,
    next_host: HostId,
    balancer: Balancer,
    clients: Vec<Client>,
    plan: Plan,
    snapshots: BTreeMap<usize, Snapshot>,
    skews: BTreeMap<Machine, i64>,
    machines: usize,
    now: Ms,
}

struct Running {
    node: Node,
    is_suspended: bool,
    /// Whether `leave` has returned.
    has_left: Arc<AtomicBool>,
    is_leaving: bool,
}

#[allow(clippy::disallowed_methods, reason = "clients are tasks")]
pub(super) fn run(seed: u64, setup: &Setup) -> Outcome {
    let mut dice = Dice::seeded(seed);
    let mut next_dice = || Dice::seeded(dice.roll());
    let (net_dice, link_dice, mut plan_dice) = (next_dice(), next_dice(), next_dice());
    let machines = 3 + (plan_dice.roll() % 3) as usize;
    let clients = 3 + (plan_dice.roll() % 4) as usize;
    let plan = Plan::draw(
        &mut plan_dice,
        &setup.faults,
        machines,
        clients,
        FAULTS_FROM,
        FAULTS_TO,
    );
    let profile = ClientProfile {
        delete: if plan_dice.one_in(2) { 30 } else { 0 },
        half_body: if plan_dice.one_in(4) { 30 } else { 0 },
        pause: 2_000,
    };
    let is_long = plan_dice.one_in(8);

    let post = Post::default();
    let world = Host::new(WORLD, 0);
    let memory = MemoryDirectory::default();
    let watcher = Watcher::new(post.clone(), setup.checks.clone(), memory.clone());
    let environment = Environment {
        net: Net::new(post.clone(), net_dice),
        directory_link: DirectoryLink::new(post.clone(), world.handle(), link_dice),
        directory: Faulty::new(memory),
        watcher: watcher.clone(),
    };
    let balancer = Balancer::default();
    let clients = (0..clients).map(|number| {
        let (post, watcher, balancer) = (post.clone(), watcher.clone(), balancer.clone());
        Client::new(number, post, watcher, balancer, profile, next_dice())
    });
    let clients: Vec<Client> = clients.collect();
    let (faults, end) = (plan.kinds.clone(), plan.end);
    let mut run = Run {
        environment,
        post,
        world,
        nodes: Vec::new(),
        next_host: 1,
        balancer,
        clients,
        plan,
        snapshots: BTreeMap::new(),
        skews: BTreeMap::new(),
        machines,
        now: 0,
    };
    for machine in 0..machines {
        run.start(machine);
    }
    for client in run.clients.clone() {
        let until = end + 2_000;
        let post = run.post.clone();
        run.world.handle().spawn(async move {
            // The directory has to settle first.
            post.pause(WORLD, 7_500).await;
            client.run(until).await;
        });
    }
    let settle_time = if is_long {
        LONG_SETTLE_TIME
    } else {
        SETTLE_TIME
    };
    run.until(end + PROBED_AFTER);
    for client in &run.clients {
        let client = client.clone();
        run.world.run(async { client.probe() });
    }
    run.until(end + settle_time);
    if watcher.failures().is_empty() {
        run.check_settled(end);
    }
    let failures = watcher.failures();
    for mut running in run.nodes.drain(..) {
        running.node.kill();
    }
    run.world.kill();
    Outcome {
        seed,
        faults,
        failures,
        history: watcher.history(),
        requests: watcher.requests(),
    }
}

// === impl Run ===

impl Run {
    /// Runs until `end`, or until a check fails.
    fn until(&mut self, end: Ms) {
        while self.now < end && self.environment.watcher.failures().is_empty() {
            self.step(end);
        }
    }

    /// Advances to whatever is next, and polls the runtimes concerned.
    ///
    /// That is a planned event, a post, [`LAG`] or `end`.
    fn step(&mut self, end: Ms) {
        let planned = self.plan.events.keys().next().map(|key| key.0);
        let next = [
            Some(end),
            Some(self.now + LAG),
            self.post.next_due(),
            planned,
        ];
        let next = next.into_iter().flatten().min().unwrap_or(end);
        self.now = next.max(self.now + 1);
        self.post.set_now(self.now);
        while let Some(entry) = self.plan.events.first_entry()
            && entry.key().0 <= self.now
        {
            let event = entry.remove();
            self.apply(event);
        }
        let mut woken = BTreeSet::new();
        while let Some((host, action)) = self.post.take_due() {
            if woken.insert(host) {
                self.run_host(host, self.now - 1);
            }
            action();
        }
        let now = self.now;
        if woken.contains(&WORLD) || now - self.world.at() >= LAG {
            self.world.run_to(now);
        }
        for running in &mut self.nodes {
            let host = &mut running.node.host;
            if !running.is_suspended && (woken.contains(&host.id) || now - host.at() >= LAG) {
                host.run_to(now);
            }
        }
        for panic in super::take_panics() {
            self.environment.watcher.fail(Check::Panic, panic);
        }
        let nodes = self.nodes.iter();
        let left = nodes.filter(|node| node.is_leaving && node.has_left.load(Ordering::Acquire));
        let left: Vec<HostId> = left.map(|running| running.node.host.id).collect();
        for host in left {
            self.environment.watcher.on_left(host);
            let machine = self.exit(host);
            self.schedule(1_000, Event::Start(machine));
        }
    }

    /// Runs a process to `now`, unless it is suspended or has exited.
    fn run_host(&mut self, host: HostId, now: Ms) {
        if host == WORLD {
            self.world.run_to(now);
        }
        let nodes = self.nodes.iter_mut();
        let mut nodes =
            nodes.filter(|running| running.node.host.id == host && !running.is_suspended);
        if let Some(running) = nodes.next() {
            running.node.host.run_to(now);
        }
    }

    /// Adds an event `delay` from now.
    fn schedule(&mut self, delay: Ms, event: Event) {
        let number = self.plan.events.len() + 1_000 + self.now as usize;
        self.plan.events.insert((self.now + delay, number), event);
    }

    fn start(&mut self, machine: Machine) {
        let id = self.next_host;
        self.next_host += 1;
        self.environment.net.set_power_loss(machine, false);
        for other in 0..self.machines {
            self.environment.watcher.path_changed(machine, other, false);
        }
        let mut node = Node::start(&self.environment, id, machine, self.now);
        node.host
            .set_skew(self.skews.get(&machine).copied().unwrap_or(0));
        self.balancer.add(node.ingress.clone());
        self.nodes.push(Running {
            node,
            is_suspended: false,
            has_left: Arc::default(),
            is_leaving: false,
        });
    }

    /// Ends a process and returns its machine.
    fn exit(&mut self, host: HostId) -> Machine {
        self.balancer.remove(host);
        let mut nodes = self.nodes.iter();
        let index = nodes.position(|running| running.node.host.id == host);
        let mut running = self.nodes.remove(index.unwrap());
        self.environment.watcher.died(host);
        running.node.kill();
        running.node.machine
    }

    /// Returns a machine's oldest process, or `None` if it has none.
    fn host_on(&self, machine: Machine) -> Option<HostId> {
        let mut nodes = self.nodes.iter();
        let running = nodes.find(|running| running.node.machine == machine)?;
        Some(running.node.host.id)
    }

    fn running(&mut self, host: HostId) -> Option<&mut Running> {
        self.nodes
            .iter_mut()
            .find(|running| running.node.host.id == host)
    }

    /// Makes an event happen, if there is a process for it to happen to.
    fn apply(&mut self, event: Event) {
        let watcher = self.environment.watcher.clone();
        let is_recorded = !matches!(event, Event::Heal);
        if is_recorded {
            watcher.note(format!("--- {event:?}"));
        }
        match event {
            Event::Kill(machine) => {
                if let Some(host) = self.host_on(machine) {
                    self.exit(host);
                }
            }
            Event::PowerLoss(machine) => {
                self.environment.net.set_power_loss(machine, true);
                for other in 0..self.machines {
                    watcher.path_changed(machine, other, true);
                }
                while let Some(host) = self.host_on(machine) {
                    self.exit(host);
                }
            }
            Event::Start(machine) => {
                if self.host_on(machine).is_none() {
                    self.start(machine);
                }
            }
            Event::StartBeside(machine) => self.start(machine),
            Event::Suspend(machine) => {
                if let Some(host) = self.host_on(machine)
                    && let Some(running) = self.running(host)
                    && !running.is_suspended
                {
                    running.is_suspended = true;
                    watcher.suspended(host, true);
                }
            }
            Event::Resume(machine) => self.resume(machine),
            Event::Leave {
                machine,
                detected_after,
            } => self.leave(machine, detected_after),
            Event::Paths { from, to, path } => {
                watcher.path_changed(from, to, path != PathState::Up);
                self.environment.net.set(from, to, path);
            }
            Event::Cut {
                first,
                other,
                after,
            } => {
                watcher.path_changed(first, other, true);
                watcher.path_changed(first, other, false);
                if after < 200 {
                    self.environment.net.reset(first, other);
                } else {
                    self.environment.net.cut_after(first, other, after);
                }
            }
            Event::Directory(link_state) => {
                watcher.cut(None, Unreachable::Path, is_cut(link_state));
                self.environment.directory_link.set_all(link_state);
            }
            Event::DirectoryFor(machine, link_state) => {
                watcher.cut(Some(machine), Unreachable::Path, is_cut(link_state));
                self.environment.directory_link.set(machine, link_state);
            }
            Event::Snapshot(number) => {
                let snapshot = self.environment.directory.memory.take_snapshot();
                self.snapshots.insert(number, snapshot);
            }
            Event::LoadSnapshot(number) => {
                if let Some(snapshot) = self.snapshots.get(&number) {
                    let directory = &self.environment.directory.memory;
                    let load = || directory.load_snapshot(snapshot);
                    watcher.directory_loses("everything since a snapshot", load);
                }
            }
            Event::Empty => {
                let directory = &self.environment.directory.memory;
                watcher.directory_loses("all data", || directory.restart());
            }
            Event::Evict(kind, pick) => {
                if let Some(evicted) = self.environment.directory.memory.evict_any(kind, pick) {
                    match kind {
                        Kind::Session => watcher.note(format!("evicted: {evicted}")),
                        Kind::Lease => watcher.directory_lost(&evicted),
                        Kind::Answer => watcher.evicted_answer(&evicted),
                    }
                }
            }
            Event::NoMemory(has_no_memory) => {
                watcher.cut(None, Unreachable::Memory, has_no_memory);
                self.environment.directory_link.set_no_memory(has_no_memory);
            }
            Event::CutClients(machine) => {
                if let Some(host) = self.host_on(machine)
                    && let Some(running) = self.running(host)
                {
                    running.node.ingress.cut();
                }
            }
            Event::Clock(machine, skew) => {
                self.skews.insert(machine, skew);
                for running in &mut self.nodes {
                    if running.node.machine == machine {
                        running.node.host.set_skew(skew);
                    }
                }
            }
            Event::Prefer(machine) => {
                let host = machine.and_then(|machine| self.host_on(machine));
                self.balancer.prefer(host);
            }
            Event::Sessions(machine, count) => {
                if let Some(host) = self.host_on(machine)
                    && let Some(running) = self.running(host)
                {
                    running.node.add_sessions(count);
                }
            }
            Event::MadeUp { machine, count } => {
                if let Some(host) = self.host_on(machine)
                    && let Some(running) = self.running(host)
                {
                    let ingress = running.node.ingress.clone();
                    let client = self.clients[0].clone();
                    self.world
                        .run(async { client.request_unknown_sessions(&ingress, count) });
                }
            }
            Event::Burst {
                client,
                calls,
                ms,
                absence,
                kill,
            } => {
                let client = self.clients[client].clone();
                let session = self.world.run(async { client.burst(calls, ms, absence) });
                let owner = session.and_then(|session| watcher.owner(&session));
                if let Some((after, owner)) = kill.zip(owner)
                    && let Some(running) = self.running(owner)
                {
                    let machine = running.node.machine;
                    self.schedule(after, Event::Kill(machine));
                }
            }
            Event::HalfBodies => {
                for client in &self.clients {
                    self.world.run(async { client.send_half_a_body() });
                }
            }
            Event::Heal => self.heal(),
        }
    }

    fn resume(&mut self, machine: Machine) {
        let now = self.now;
        for running in &mut self.nodes {
            if running.node.machine == machine && running.is_suspended {
                running.is_suspended = false;
                self.environment
                    .watcher
                    .suspended(running.node.host.id, false);
                running.node.host.jump_to(now - 1);
            }
        }
    }

    #[allow(
        clippy::disallowed_methods,
        reason = "an instance shuts down while it serves"
    )]
    fn leave(&mut self, machine: Machine, detected_after: Ms) {
        let watcher = self.environment.watcher.clone();
        let (post, balancer) = (self.post.clone(), self.balancer.clone());
        let Some(host) = self.host_on(machine) else {
            return;
        };
        let Some(running) = self.running(host).filter(|running| !running.is_leaving) else {
            return;
        };
        let Some(cluster) = running.node.cluster.clone() else {
            return;
        };
        running.is_leaving = true;
        let has_left = running.has_left.clone();
        watcher.leaving(host);
        running.node.host.handle().spawn(async move {
            cluster.leave(Duration::from_millis(LEAVE_LIMIT)).await;
            has_left.store(true, Ordering::Release);
        });
        post.after(WORLD, detected_after, move || balancer.remove(host));
    }

    /// Ends all faults.
    fn heal(&mut self) {
        self.environment.watcher.note("--- the faults are over");
        self.environment.directory_link.set_all(LinkState::Up);
        self.environment.directory_link.set_no_memory(false);
        for machine in 0..self.machines {
            self.environment.directory_link.set(machine, LinkState::Up);
            self.resume(machine);
            for other in 0..self.machines {
                self.environment.net.set(machine, other, PathState::Up);
            }
            if self.host_on(machine).is_none() {
                self.start(machine);
            }
        }
    }

    fn check_settled(&mut self, faults_over: Ms) {
        let watcher = &self.environment.watcher;
        let limit = GRACE + 10_000;
        watcher.check_settled(faults_over, limit);
        let memory = &self.environment.directory.memory;
        let world = self.world.handle();
        let _world = world.enter();
        let living: Vec<_> = self
            .nodes
            .iter()
            .map(|running| running.node.incarnation)
            .collect();
        for lease in memory.living() {
            if !living.contains(&lease) {
                watcher.fail(
                    Check::Directory,
                    format!("{lease} has exited, but still has a lease"),
                );
            }
        }
        for session in watcher.deleted_sessions() {
            if memory.has_owner(SessionHash::of(&session)) {
                let message =
                    format!("{session} has been deleted, but still has an owner in the directory");
                watcher.fail(Check::Directory, message);
            }
        }
    }
}

fn is_cut(link_state: LinkState) -> bool {
    match link_state {
        LinkState::Refused | LinkState::Stalled => true,
        LinkState::Slow(time) => time >= 500,
        LinkState::Up => false,
    }
}

// === impl Outcome ===

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, line) in &self.history {
            writeln!(f, "{at:>7} {line}")?;
        }
        writeln!(f, "seed {}: {:?}", self.seed, self.faults)?;
        for failure in &self.failures {
            writeln!(
                f,
                "{:>7} {:?}: {}",
                failure.at, failure.check, failure.message
            )?;
        }
        Ok(())
    }
}
