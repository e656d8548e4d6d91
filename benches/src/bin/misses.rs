//! What a call executes, touches and waits for, compared with bare rmcp and common layers.

use std::collections::BTreeSet;

use benches::{common_layers::CommonLayer, prelude::*, valgrind};

const OURS: [Candidate; 4] = [
    Candidate::Setup(Setup::Guard),
    Candidate::Setup(Setup::Layer),
    Candidate::Setup(Setup::Wrapped),
    Candidate::Abortable,
];

fn main() -> Result<()> {
    let mut cases = Vec::new();
    for mode in Mode::iter() {
        let candidates = [Candidate::BARE]
            .into_iter()
            .chain(CommonLayer::iter().map(Candidate::CommonLayer));
        let what = Workload::Call(mode, Load::Arguments(100));
        cases.extend(
            candidates
                .chain(OURS)
                .map(|candidate| Case::new(candidate, what)),
        );
    }
    if is_quick() {
        cases.retain(|case| matches!(case.candidate, Candidate::Setup(_)));
    }
    let wanted = cases
        .iter()
        .flat_map(|case| Count::iter().map(|count| (*case, count)));
    let counts = valgrind::counts(Allocator::Glibc, BTreeSet::from_iter(wanted))?;
    let section = Section {
        rows: cases.iter().map(|case| row(&counts, *case)).collect(),
        targets: cases
            .iter()
            .flat_map(|case| targets(&counts, *case))
            .collect(),
        ..Section::new("misses", json!({}))?
    };
    section.publish()
}

fn row(counts: &Counts, case: Case) -> Vec<String> {
    let cell = |count: Count| {
        let (measured, bare) = (counts[&(case, count)], counts[&(case.bare(), count)]);
        match count {
            Count::LastLevelMisses => format!("{measured:.2}"),
            _ => format!("{measured:.0} ({:.3})", measured / bare),
        }
    };
    let first = cells![case.what.request(), case.candidate];
    first.into_iter().chain(Count::iter().map(cell)).collect()
}

fn targets(counts: &Counts, case: Case) -> Vec<Target> {
    use Count::{DataMisses, InstructionMisses, LockedInstructions, Mispredictions};
    let most = match (case.candidate, case.what) {
        (Candidate::Setup(Setup::Wrapped), Workload::Call(Mode::Session, _)) => 1.08,
        (Candidate::Setup(Setup::Layer), _) => 1.12,
        _ => return Vec::new(),
    };
    let counted = [
        InstructionMisses,
        DataMisses,
        Mispredictions,
        LockedInstructions,
    ];
    let target = |count: Count| {
        let most = if count == LockedInstructions {
            1.15
        } else {
            most
        };
        let measured = count.to_bare(counts[&(case, count)], counts[&(case.bare(), count)]);
        Target::new(
            AtMost(most),
            format!("{count} of {case}, to bare"),
            measured,
        )
    };
    counted.map(target).to_vec()
}
