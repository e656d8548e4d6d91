//! Judges a run: `referee LOG...`. Exit code 0 if every call ended as it should.

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
    Ok(match failures.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}
