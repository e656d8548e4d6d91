//! Judges a run: `referee LOG...`. Exits with 0 if every call ended as expected.

use std::{error::Error, process::ExitCode};

use soak::{fact, referee::judge};

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let paths: Vec<_> = std::env::args().skip(1).collect();
    let report = judge(&fact::read(&paths)?);
    println!("{report}");
    let failures = report.failures();
    for failure in &failures {
        println!("FAILED: {failure}");
    }
    Ok(if failures.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
