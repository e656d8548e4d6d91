//! How many allocations a call takes in every set-up, and where the crate's own come from.

use std::{collections::BTreeMap, process::Command};

use mcp_cancel_on_disconnect_benches::{
    Failure, callgrind,
    case::{Case, Load, What, Who},
    dhat::{self, Allocated, Places},
    report::Section,
    setup::{Mode, Setup},
};

/// Whose allocations are listed by place, in the order of the columns.
const LISTED: [(Who, Mode); 4] = [
    (Who::Setup(Setup::Wrapped), Mode::Session),
    (Who::Setup(Setup::Layer), Mode::Session),
    (Who::Setup(Setup::Layer), Mode::Stateless),
    (Who::Abortable, Mode::Session),
];

fn main() -> Result<(), Failure> {
    totals()?.publish()?;
    let mut columns = vec!["place".to_owned()];
    let mut found = Vec::new();
    for (who, mode) in LISTED {
        columns.push(format!("{}, {}", who.name(), mode.name()));
        found.push(dhat::places(Case::new(
            who,
            What::Call(mode, Load::Arguments(100)),
        ))?);
    }
    places(columns, &found).publish()?;
    Ok(())
}

/// Numbers and bytes, less those of a bare call.
fn totals() -> Result<Section, Failure> {
    let mut columns = vec!["request".to_owned(), "bare".to_owned()];
    columns.extend(Who::compared().map(|who| who.name().to_owned()));
    let mut rows = Vec::new();
    for what in What::ALL {
        let bare = allocated(Case::new(Who::Setup(Setup::Bare), what))?;
        let mut row = vec![what.to_string(), shown(bare, "")];
        for who in Who::compared() {
            let all = allocated(Case::new(who, what))?;
            let added = Allocated {
                count: all.count - bare.count,
                bytes: all.bytes - bare.bytes,
            };
            row.push(shown(added, "+"));
        }
        rows.push(row);
    }
    let text = "Allocations of one request, and their bytes, counted in the allocator, with those of the client in the same \
        process. Columns but the first are what is added to bare rmcp. Fractions are what grows now and then: maps, and \
        the queue of kept answers.";
    Ok(Section {
        name: "allocations".to_owned(),
        title: "What a call allocates".to_owned(),
        command: "benches/run allocations".to_owned(),
        text: text.to_owned(),
        columns,
        rows,
        targets: Vec::new(),
        plots: Vec::new(),
    })
}

fn allocated(case: Case) -> Result<Allocated, Failure> {
    eprintln!("allocations: {case}");
    let words = case.to_string();
    let mut command = Command::new(callgrind::program("work-counted")?);
    let output = command.args(words.split(' ')).output()?;
    let printed = String::from_utf8(output.stdout)?;
    let (count, bytes) = printed.trim().split_once(' ').ok_or("not two figures")?;
    Ok(Allocated {
        count: count.parse()?,
        bytes: bytes.parse()?,
    })
}

fn shown(Allocated { count, bytes }: Allocated, sign: &str) -> String {
    format!("{sign}{count:.1}, {sign}{bytes:.0} B")
}

fn places(columns: Vec<String>, found: &[Places]) -> Section {
    let mut rows = BTreeMap::new();
    for (column, places) in found.iter().enumerate() {
        for (place, allocated) in places {
            let row = rows
                .entry(place.clone())
                .or_insert_with(|| vec![Allocated::default(); found.len()]);
            row[column] = *allocated;
        }
    }
    let mut rows: Vec<(String, Vec<Allocated>)> = rows.into_iter().collect();
    let weight = |row: &[Allocated]| row.iter().map(|allocated| allocated.count).sum::<f64>();
    rows.sort_by(|a, b| weight(&b.1).total_cmp(&weight(&a.1)));
    let cell = |allocated: Allocated| match allocated.count {
        0.0 => String::new(),
        count => format!("{count:.2}, {:.0} B", allocated.bytes),
    };
    let line = |(place, row): (String, Vec<Allocated>)| {
        let cells = row.into_iter().map(cell);
        std::iter::once(format!("`{place}`")).chain(cells).collect()
    };
    let text = "The crate's own allocations by place: how many a call, and of how many bytes. A call of 100 B, by valgrind's \
        `dhat`, as the difference of a run of 1,100 calls and one of 100. A place is the innermost frame that is not a \
        container's. `ARCHITECTURE.md` says why each is there.";
    Section {
        name: "allocations-places".to_owned(),
        title: "Where the crate allocates".to_owned(),
        command: "benches/run allocations".to_owned(),
        text: text.to_owned(),
        columns,
        rows: rows.into_iter().map(line).collect(),
        targets: Vec::new(),
        plots: Vec::new(),
    }
}
