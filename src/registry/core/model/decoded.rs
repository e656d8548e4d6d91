//! Decodes a fuzzer's bytes into operations. Each byte is a choice, and once the bytes have run out, all choices are zero.

use super::*;

/// The bytes that are left.
struct Choices<'a>(&'a [u8]);

/// Maximum number of operations. They are limited because the comparison after each one grows with their number.
const MAX_OPS: usize = 200;

/// Runs the operations encoded by the bytes. Panics if the session state and its model differ.
pub(crate) fn check_against_model(bytes: &[u8]) {
    let mut choices = Choices(bytes);
    let first = choices.byte();
    let capacity = if first.is_multiple_of(3) {
        TIGHT
    } else {
        ROOMY
    };
    let mut ops = Vec::new();
    // At most one flood, because the model searches lists, so a flood takes up most of the time.
    let mut floods_left = u32::from(first >= 250);
    while !choices.0.is_empty() && ops.len() < MAX_OPS {
        ops.push(choices.op(&mut floods_left));
    }
    agrees_with_model(capacity, &ops);
}

// === impl Choices ===

impl Choices<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    fn one_of(&mut self, count: u8) -> u8 {
        self.byte() % count
    }

    fn coin(&mut self) -> bool {
        self.one_of(2) == 1
    }

    fn maybe<T>(&mut self, choose: impl FnOnce(&mut Self) -> T) -> Option<T> {
        self.coin().then(|| choose(self))
    }

    /// Returns a number of at most 16 bits that is below `end`.
    fn below(&mut self, end: u64) -> u64 {
        u64::from(u16::from_le_bytes([self.byte(), self.byte()])) % end
    }

    /// Returns a time below `end`, in steps that cover the whole range.
    fn ms(&mut self, end: u64) -> u64 {
        self.below(1 << 16) * (end >> 16).max(1) % end
    }

    fn index(&mut self, range: Range<usize>) -> usize {
        range.start + usize::from(self.byte()) % range.len()
    }

    fn call_key(&mut self) -> (usize, usize) {
        (self.index(SCOPES), self.index(REQUESTS))
    }

    fn pick(&mut self) -> Pick {
        match self.byte() {
            byte @ 0..224 => Pick::InFlight(byte.into()),
            byte => Pick::Any(usize::from(byte) - 224),
        }
    }

    fn generations(&mut self) -> Generations {
        match self.byte() {
            0..192 => Generations::Newest,
            byte => Generations::Any(byte.into()),
        }
    }

    fn stream(&mut self) -> Stream {
        match self.one_of(8) {
            number @ 0..3 => Stream::Numbered(number.into()),
            number => Stream::Opaque(u32::from(number) - 3),
        }
    }

    fn event_ids(&mut self, floods_left: &mut u32) -> EventIds {
        match self.byte() {
            0..128 => EventIds::Own,
            128..216 => EventIds::Shared(self.stream()),
            216..240 => {
                let stream = self.one_of(3).into();
                EventIds::Events(stream, self.one_of(6).into(), 1 + u32::from(self.one_of(3)))
            }
            240..252 => EventIds::Many(990 + self.below(310) as u32, 1 + self.below(8) as u32),
            252.. if *floods_left > 0 => {
                *floods_left -= 1;
                let first = 1_000 + self.below(10) as u32;
                EventIds::Many(first, 250 + self.below(16) as u32)
            }
            252.. => EventIds::Own,
        }
    }

    fn waiting(&mut self) -> Waiting {
        match self.one_of(8) {
            0 => Waiting::GraceUntil {
                after_ms: 0,
                retry_ms: self.ms(5_000),
            },
            1 => Waiting::UntilComplete,
            2 => Waiting::ForgetAt {
                after_ms: 1 + self.ms(3_600_000),
            },
            _ => Waiting::GraceUntil {
                after_ms: 1 + self.ms(30_000),
                retry_ms: self.ms(10_000),
            },
        }
    }

    fn retaining(&mut self) -> Retaining {
        Retaining {
            answered: self.coin(),
            units: usize::from(self.one_of(4)),
            for_s: 1 + self.below(120),
        }
    }

    fn decision(&mut self) -> Decision {
        if self.coin() {
            Decision::Cancel
        } else {
            Decision::Postpone {
                wait_ms: 1 + self.ms(30_000),
            }
        }
    }

    fn advance(&mut self) -> Advance {
        match self.one_of(8) {
            0 => Advance::Ms(self.ms(4_000_000)),
            1..3 => Advance::Ms(self.ms(6_000)),
            3..5 => Advance::Deadline { and_ms: 0 },
            5 => Advance::Deadline {
                and_ms: {
                    let choice = self.below(6);
                    LATE_MS[choice as usize / 2] + choice % 2
                },
            },
            _ => Advance::Deadline {
                and_ms: self.ms(12_000),
            },
        }
    }

    fn op(&mut self, floods_left: &mut u32) -> Op {
        match self.one_of(24) {
            0..4 => Op::Start {
                key: self.call_key(),
                accepted: self.one_of(4) > 0,
                deadline_ms: self.maybe(|choices| choices.ms(60_000)),
            },
            4 => Op::Accept(self.pick()),
            5 => Op::Rekey(self.pick(), self.call_key()),
            6..9 => Op::RecordEventId(self.pick(), self.event_ids(floods_left)),
            9..12 => Op::Detach {
                call: self.pick(),
                generation: self.generations(),
                wait: self.waiting(),
                resumed_without_events: self.one_of(8) == 0,
                end: self.one_of(4) > 0,
            },
            12 => Op::Attach(self.pick()),
            13 => Op::Poll {
                call: self.pick(),
                times: 1 + self.below(25) as u32,
                every_ms: 1 + self.ms(4_000),
                stalled: self.maybe(|choices| (choices.below(26) as u32, choices.ms(4_000))),
            },
            14 => Op::BeginResume(self.pick()),
            15 => match self.one_of(4) {
                0 => Op::RenewGrace(self.pick()),
                _ => Op::EndResume(self.pick()),
            },
            16 => match self.one_of(7) {
                4 | 5 => Op::RequestConfirmation(self.pick()),
                6 => Op::Confirm(self.byte().into(), self.decision()),
                0 => Op::FinishDue(self.pick(), self.retaining()),
                1 => Op::FinishDetached(self.pick(), self.retaining()),
                2 => Op::AddBackgroundReader(self.pick()),
                _ => Op::SetMaybeResumed(self.pick()),
            },
            17 => Op::RemoveBackgroundReader(self.pick()),
            18..20 => Op::Finish(self.pick(), self.maybe(Self::retaining)),
            20 => Op::BeginClose {
                scope: self.index(SCOPES),
                end: self.maybe(Self::retaining),
            },
            21 => Op::Advance(self.advance()),
            _ => Op::Expire {
                end: self.one_of(4) > 0,
            },
        }
    }
}
