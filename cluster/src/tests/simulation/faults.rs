//! The faults in a run, drawn from its seed, and how often each kind is drawn.

use std::collections::BTreeMap;

use test_support::Dice;

use super::{
    directory_link::LinkState,
    net::{Machine, PathState},
    time::Ms,
};
use crate::directory::memory::faults::Kind;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Fault {
    /// An instance is killed, and restarted at the same address.
    Kill,
    /// A machine loses power, and gets it back later.
    PowerLoss,
    Suspend,
    /// A second instance starts at a running one's address, and the first one then shuts down.
    SharedAddress,
    Leave,
    /// Each instance in turn is shut down and restarted.
    RollingRestart,
    Refused,
    Reset,
    Silent,
    SilentOneWay,
    SlowPath,
    Cut,
    DirectoryOutage,
    DirectoryStall,
    DirectorySlow,
    DirectoryOutageForOne,
    DirectorySlowForOne,
    DirectoryEmpty,
    DirectorySnapshot,
    DirectoryFailover,
    /// An instance is killed or shuts down. Later the directory returns with a snapshot that may predate that.
    MoveAndSnapshot,
    /// A machine is suspended, and at about that time the directory loses all data.
    SuspendAndEmpty,
    /// The directory loses all data and is slow, while one instance has thousands of sessions to write.
    ManySessionsAndEmpty,
    EvictSession,
    EvictLease,
    EvictAnswer,
    NoMemory,
    /// A machine's wall clock is set forward or back.
    Clock,
    CutClients,
    MadeUpIds,
    /// Clients are disconnected and return through another instance. In the meantime many made-up ids are requested, and the directory is
    /// slow.
    CutAndMadeUpIds,
    Burst,
    /// Many of a client's calls end while it is disconnected. Their instance is killed 3 s later.
    BurstAndKill,
    /// The directory is unreachable, and an instance is killed after the outage.
    OutageAndKill,
    /// An instance shuts down while the directory is unreachable.
    OutageAndLeave,
    /// An instance is killed, and then the first request in each session is half a body.
    KillAndHalfBodies,
}

/// Every kind with its weight.
pub(super) const FAULTS: [(Fault, u64); 36] = [
    (Fault::Kill, 8),
    (Fault::PowerLoss, 4),
    (Fault::Suspend, 12),
    (Fault::SharedAddress, 3),
    (Fault::Leave, 5),
    (Fault::RollingRestart, 2),
    (Fault::Refused, 5),
    (Fault::Reset, 4),
    (Fault::Silent, 5),
    (Fault::SilentOneWay, 4),
    (Fault::SlowPath, 5),
    (Fault::Cut, 5),
    (Fault::DirectoryOutage, 6),
    (Fault::DirectoryStall, 4),
    (Fault::DirectorySlow, 6),
    (Fault::DirectoryOutageForOne, 4),
    (Fault::DirectorySlowForOne, 4),
    (Fault::DirectoryEmpty, 3),
    (Fault::DirectorySnapshot, 3),
    (Fault::DirectoryFailover, 4),
    (Fault::MoveAndSnapshot, 3),
    (Fault::SuspendAndEmpty, 2),
    (Fault::ManySessionsAndEmpty, 1),
    (Fault::EvictSession, 2),
    (Fault::EvictLease, 2),
    (Fault::EvictAnswer, 1),
    (Fault::NoMemory, 3),
    (Fault::Clock, 3),
    (Fault::CutClients, 5),
    (Fault::MadeUpIds, 1),
    (Fault::CutAndMadeUpIds, 1),
    (Fault::Burst, 1),
    (Fault::BurstAndKill, 1),
    (Fault::OutageAndKill, 3),
    (Fault::OutageAndLeave, 3),
    (Fault::KillAndHalfBodies, 3),
];

/// How often clients do something, in thousandths, and how long they pause.
#[derive(Debug, Clone, Copy)]
pub(super) struct ClientProfile {
    pub(super) delete: u64,
    pub(super) half_body: u64,
    /// The longest pause between two of a client's calls.
    pub(super) pause: Ms,
}

/// What happens at a given moment.
#[derive(Debug, Clone)]
pub(super) enum Event {
    Kill(Machine),
    PowerLoss(Machine),
    /// A new instance starts, unless the machine already has one.
    Start(Machine),
    StartBeside(Machine),
    Suspend(Machine),
    Resume(Machine),
    /// A machine's oldest instance shuts down, which the balancer detects `detected_after` later.
    Leave {
        machine: Machine,
        detected_after: Ms,
    },
    Paths {
        from: Machine,
        to: Machine,
        path: PathState,
    },
    Cut {
        first: Machine,
        other: Machine,
        after: usize,
    },
    Directory(LinkState),
    DirectoryFor(Machine, LinkState),
    Snapshot(usize),
    LoadSnapshot(usize),
    Empty,
    Evict(Kind, u64),
    NoMemory(bool),
    /// The error of a machine's wall clock.
    Clock(Machine, i64),
    CutClients(Machine),
    /// The balancer sends all requests to one machine, as long as it has an instance.
    Prefer(Option<Machine>),
    /// An instance gets this many more sessions, whose clients are all disconnected.
    Sessions(Machine, usize),
    MadeUp {
        machine: Machine,
        count: usize,
    },
    /// A client makes `calls` calls at once and is disconnected for `absence`.
    ///
    /// The owner of its session is killed after `kill`.
    Burst {
        client: usize,
        calls: usize,
        ms: Ms,
        absence: Ms,
        kill: Option<Ms>,
    },
    /// Every client sends half a body.
    HalfBodies,
    /// All faults end.
    Heal,
}

/// All events in a run.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) events: BTreeMap<(Ms, usize), Event>,
    /// When the last fault ends.
    pub(super) end: Ms,
    pub(super) kinds: Vec<Fault>,
    snapshots: usize,
}

// === impl Plan ===

impl Plan {
    /// Draws 1 to 4 faults that start between `from` and `to`.
    pub(super) fn draw(
        dice: &mut Dice,
        weights: &BTreeMap<Fault, u64>,
        machines: usize,
        clients: usize,
        from: Ms,
        to: Ms,
    ) -> Self {
        let mut plan = Self::default();
        let total: u64 = weights.values().sum();
        let count = 1 + dice.roll() % 4;
        for _ in 0..count {
            let mut pick = dice.roll() % total.max(1);
            let kind = weights.iter().find(|(_, weight)| {
                let is_picked = pick < **weight;
                pick = pick.saturating_sub(**weight);
                is_picked
            });
            let Some((kind, _)) = kind else {
                break;
            };
            let at = from + dice.roll() % (to - from);
            plan.kinds.push(*kind);
            plan.fault(*kind, dice, machines, clients, at);
        }
        plan.end = plan.end.max(to);
        plan.schedule(plan.end, Event::Heal);
        plan
    }

    fn schedule(&mut self, at: Ms, event: Event) {
        self.end = self.end.max(at);
        let number = self.events.len();
        self.events.insert((at, number), event);
    }

    /// Schedules the events of a fault that starts at `at`.
    fn fault(&mut self, kind: Fault, dice: &mut Dice, machines: usize, clients: usize, at: Ms) {
        let mut roll = |sides: u64| dice.roll() % sides.max(1);
        let first = roll(machines as u64) as usize;
        let other = (first + 1 + roll(machines as u64 - 1) as usize) % machines;
        let seconds = |choices: &[Ms], roll: u64| choices[roll as usize % choices.len()] * 1_000;
        match kind {
            Fault::Kill => {
                self.schedule(at, Event::Kill(first));
                self.schedule(at + 500 + roll(12_000), Event::Start(first));
            }
            Fault::PowerLoss => {
                self.schedule(at, Event::PowerLoss(first));
                self.schedule(at + 5_000 + roll(20_000), Event::Start(first));
            }
            Fault::Suspend => {
                let time = seconds(&[1, 5, 7, 10, 10, 30], roll(6));
                self.schedule(at, Event::Suspend(first));
                self.schedule(at + time, Event::Resume(first));
            }
            Fault::SharedAddress => {
                self.schedule(at, Event::StartBeside(first));
                let detected_after = roll(1_000);
                let leave = Event::Leave {
                    machine: first,
                    detected_after,
                };
                self.schedule(at + 500 + roll(8_000), leave);
            }
            Fault::Leave => self.leave(first, at, roll(2_000)),
            Fault::RollingRestart => {
                let mut at = at;
                for machine in 0..machines {
                    self.leave(machine, at, roll(500));
                    at += 3_000 + roll(4_000);
                }
            }
            Fault::Refused => self.path(
                first,
                other,
                PathState::Refused,
                true,
                at,
                1_000 + roll(15_000),
            ),
            Fault::Reset => self.path(
                first,
                other,
                PathState::Reset,
                true,
                at,
                1_000 + roll(15_000),
            ),
            Fault::Silent => self.path(
                first,
                other,
                PathState::Silent,
                true,
                at,
                500 + roll(20_000),
            ),
            Fault::SilentOneWay => self.path(
                first,
                other,
                PathState::Silent,
                false,
                at,
                500 + roll(20_000),
            ),
            Fault::SlowPath => {
                let path = PathState::Slow([50, 200, 700, 2_000][roll(4) as usize]);
                self.path(first, other, path, true, at, 2_000 + roll(20_000));
            }
            Fault::Cut => {
                for _ in 0..3 {
                    let after = roll(1_500) as usize;
                    self.schedule(
                        at + roll(6_000),
                        Event::Cut {
                            first,
                            other,
                            after,
                        },
                    );
                }
            }
            Fault::DirectoryOutage => {
                let time = seconds(&[1, 5, 5, 20, 60], roll(5));
                self.directory(LinkState::Refused, at, time);
            }
            Fault::DirectoryStall => {
                let time = seconds(&[1, 5, 5, 20], roll(4));
                self.directory(LinkState::Stalled, at, time);
            }
            Fault::DirectorySlow => {
                let link_state = LinkState::Slow([300, 450, 2_000][roll(3) as usize]);
                self.directory(link_state, at, 3_000 + roll(20_000));
            }
            Fault::DirectoryOutageForOne => {
                self.schedule(at, Event::DirectoryFor(first, LinkState::Refused));
                let time = seconds(&[1, 5, 20], roll(3));
                self.schedule(at + time, Event::DirectoryFor(first, LinkState::Up));
            }
            Fault::DirectorySlowForOne => {
                let link_state = LinkState::Slow([300, 450, 2_000][roll(3) as usize]);
                self.schedule(at, Event::DirectoryFor(first, link_state));
                self.schedule(
                    at + 3_000 + roll(20_000),
                    Event::DirectoryFor(first, LinkState::Up),
                );
            }
            Fault::DirectoryEmpty => {
                let outage = roll(3_000);
                self.directory(LinkState::Refused, at, outage);
                self.schedule(at + outage, Event::Empty);
            }
            Fault::DirectorySnapshot => self.snapshot(at, roll(at), roll(3_000)),
            Fault::DirectoryFailover => self.snapshot(at, roll(3_000), roll(2_000)),
            Fault::MoveAndSnapshot => {
                if roll(2) == 0 {
                    self.schedule(at, Event::Kill(first));
                    self.schedule(at + 1_000 + roll(3_000), Event::Start(first));
                } else {
                    self.leave(first, at, roll(500));
                }
                let outage = roll(2_000);
                self.snapshot(at + 8_000 + roll(10_000), 8_000 + roll(18_000), outage);
            }
            Fault::SuspendAndEmpty => {
                self.schedule(at, Event::Suspend(first));
                let lost_at = at + roll(1_500);
                self.schedule(lost_at, Event::Empty);
                self.schedule(at + 1_000 + roll(12_000), Event::Resume(first));
            }
            Fault::ManySessionsAndEmpty => {
                self.schedule(at, Event::Sessions(first, 5_000));
                let empty = at + 3_000;
                self.directory(LinkState::Slow(400), empty, 14_000);
                self.schedule(empty, Event::Empty);
            }
            Fault::EvictSession => {
                for _ in 0..3 {
                    self.schedule(
                        at + roll(5_000),
                        Event::Evict(Kind::Session, roll(u64::MAX)),
                    );
                }
            }
            Fault::EvictLease => self.schedule(at, Event::Evict(Kind::Lease, roll(u64::MAX))),
            Fault::EvictAnswer => self.schedule(at, Event::Evict(Kind::Answer, roll(u64::MAX))),
            Fault::NoMemory => {
                self.schedule(at, Event::NoMemory(true));
                self.schedule(at + 1_000 + roll(15_000), Event::NoMemory(false));
            }
            Fault::Clock => {
                let skew = [1_000, 60_000, 3_600_000][roll(3) as usize];
                let skew = if roll(2) == 0 { skew } else { -skew };
                self.schedule(at, Event::Clock(first, skew));
                self.schedule(at + 1_000 + roll(20_000), Event::Clock(first, 0));
            }
            Fault::CutClients => self.schedule(at, Event::CutClients(first)),
            Fault::MadeUpIds => {
                let count = 200;
                self.schedule(
                    at,
                    Event::MadeUp {
                        machine: first,
                        count,
                    },
                );
            }
            Fault::CutAndMadeUpIds => {
                // The restarted instance has no owners cached.
                self.schedule(at.saturating_sub(4_000), Event::Kill(first));
                self.schedule(at.saturating_sub(200), Event::Start(first));
                self.directory(LinkState::Slow(300), at, 9_000);
                for wave in 0..25 {
                    let at = at + wave * 300;
                    let count = 110;
                    self.schedule(
                        at,
                        Event::MadeUp {
                            machine: first,
                            count,
                        },
                    );
                }
                self.schedule(at, Event::Prefer(Some(first)));
                self.schedule(at + 9_000, Event::Prefer(None));
                for machine in (0..machines).filter(|machine| *machine != first) {
                    self.schedule(at + 300, Event::CutClients(machine));
                }
            }
            Fault::Burst | Fault::BurstAndKill => {
                let burst = Event::Burst {
                    client: roll(clients as u64) as usize,
                    calls: 90,
                    ms: 1_500,
                    absence: 4_500,
                    kill: (kind == Fault::BurstAndKill).then_some(4_500),
                };
                self.schedule(at, burst);
                // Restarts the instance, whichever it was.
                self.schedule(at + 9_000, Event::Start(0));
                for machine in 1..machines {
                    self.schedule(at + 9_000, Event::Start(machine));
                }
            }
            Fault::KillAndHalfBodies => {
                self.schedule(at, Event::Kill(first));
                self.schedule(at + 10, Event::HalfBodies);
                self.schedule(at + 2_000 + roll(8_000), Event::Start(first));
            }
            Fault::OutageAndKill => {
                let time = seconds(&[5, 20], roll(2));
                self.directory(LinkState::Refused, at, time);
                let killed_at = at + time + 3_000 + roll(4_000);
                self.schedule(killed_at, Event::Kill(first));
                self.schedule(killed_at + 2_000, Event::Start(first));
            }
            Fault::OutageAndLeave => {
                self.directory(LinkState::Refused, at, 4_000 + roll(4_000));
                self.leave(first, at + roll(2_000), roll(500));
            }
        }
    }

    fn leave(&mut self, machine: Machine, at: Ms, detected_after: Ms) {
        self.schedule(
            at,
            Event::Leave {
                machine,
                detected_after,
            },
        );
    }

    fn directory(&mut self, link_state: LinkState, at: Ms, time: Ms) {
        self.schedule(at, Event::Directory(link_state));
        self.schedule(at + time, Event::Directory(LinkState::Up));
    }

    fn path(
        &mut self,
        first: Machine,
        other: Machine,
        path: PathState,
        is_two_way: bool,
        at: Ms,
        time: Ms,
    ) {
        let pairs = [(first, other), (other, first)];
        for (from, to) in pairs.into_iter().take(1 + usize::from(is_two_way)) {
            self.schedule(at, Event::Paths { from, to, path });
            let path = PathState::Up;
            self.schedule(at + time, Event::Paths { from, to, path });
        }
    }

    /// Makes the directory unreachable for `outage`, after which it returns with the data from `age` ago.
    fn snapshot(&mut self, at: Ms, age: Ms, outage: Ms) {
        let number = self.snapshots;
        self.snapshots += 1;
        self.schedule(at.saturating_sub(age), Event::Snapshot(number));
        self.directory(LinkState::Refused, at, outage);
        self.schedule(at + outage, Event::LoadSnapshot(number));
    }
}
