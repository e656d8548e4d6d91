//! The processor time that one tool call takes, as a ratio to bare rmcp.
//!
//! `time [--quick]`. Each set-up has a process of its own. Only one of them runs at a time, always on the same processor.

use benches::{
    child::{Child, run_commands},
    prelude::*,
};

/// How often both processes are started. Memory placement differs between starts but stays fixed within one.
const STARTS: usize = 3;

/// Roughly how long a run takes.
const RUN: f64 = 20e-3;

fn main() -> Result<()> {
    let role = role();
    if !role.is_empty() {
        machine::pin_to(1)?;
        return runtime()?.block_on(play(Case::named(&role)?));
    }
    machine::pin_to(0)?;
    let pairs = if is_quick() { 3 } else { 10 };
    let values = json!({ "starts": STARTS, "pairs": pairs, "load": machine::load() });
    let mut section = Section::new("time", values)?;
    for what in Workload::all() {
        let mut row = cells![what.request(), what.load(), ""];
        for candidate in Candidate::COMPARED {
            let case = Case::new(candidate, what);
            eprintln!("timing: {case}");
            let measured = runtime()?.block_on(measure(case, pairs))?;
            row[2] = format!(
                "{:.1}",
                measured
                    .iter()
                    .map(|[bare, _]| bare * 1e6)
                    .collect::<Sample>()
                    .median()
            );
            let ratios = ratios(&measured);
            row.push(ratios.spread());
            section.targets.extend(target(case, ratios.median()));
        }
        section.rows.push(row);
    }
    section.publish()
}

fn target(case: Case, measured: f64) -> Option<Target> {
    let most = match (case.candidate, case.what) {
        (Candidate::Setup(Setup::Wrapped), Workload::Call(Mode::Session, Load::Arguments(100))) => {
            1.08
        }
        (Candidate::Setup(Setup::Layer), Workload::Call(_, Load::Arguments(100))) => 1.12,
        _ => return None,
    };
    Some(Target::new(
        AtMost(most),
        format!("time of {case}, to bare"),
        measured,
    ))
}

/// Returns pairs of seconds per call, bare rmcp's first.
async fn measure(case: Case, count: usize) -> Result<Vec<[f64; 2]>> {
    let mut pairs = Vec::new();
    for _ in 0..STARTS {
        let start = |case: Case| Child::start(&case.to_string());
        let mut children = [start(case.bare())?, start(case)?];
        let mut ask = async |side: usize, times: u32| -> Result<f64> {
            Ok(children[side].ask(&times.to_string()).await?.parse()?)
        };
        let (warm, _) = case.what.repetitions();
        ask(1, warm).await?;
        let calls = RUN / ask(0, warm).await?;
        pairs.extend(alternate(count, async |side| ask(side, calls.ceil() as u32).await).await?);
    }
    Ok(pairs)
}

/// Repeats the request as often as asked to. Answers with the seconds of processor time per call.
async fn play(case: Case) -> Result<()> {
    let mut running = case.run().await?;
    run_commands(async |words| {
        let times: u32 = words.concat().parse()?;
        let start = machine::processor_time();
        running.run(times).await?;
        let spent = machine::processor_time() - start;
        Ok((spent / f64::from(times)).to_string())
    })
    .await
}
