//! Assembles the sections of all benches: `report [--commit] BENCH…`, in argument order.
//!
//! Writes `target/report`, and with `--commit` also `benches/report` and the summary in the crate's README. A bench that
//! has not been run gets no section.

use std::{env, fs, path::Path};

use benches::{
    prelude::*,
    report::{folder, page},
};

fn main() -> Result<()> {
    let mut benches: Vec<String> = env::args().skip(1).collect();
    let commit = benches.iter().any(|argument| argument == "--commit");
    benches.retain(|argument| argument != "--commit");

    let sections = sections(&benches)?;
    // Set by `benches/run`.
    let machine = env::var("MACHINE").unwrap_or_else(|_| "an unknown machine".to_owned());
    let page = page::report(&machine, &sections);
    write(&folder(), &page)?;
    if commit {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let kept = root.join("report");
        if kept.exists() {
            fs::remove_dir_all(&kept)?;
        }
        write(&kept, &page)?;
        let readme = root.join("../README.md");
        let summary = page::summary(&sections);
        let text = page::put_between_marks(&fs::read_to_string(&readme)?, &summary);
        fs::write(readme, text.context("README.md has no marks")?)?;
    }
    println!("{}", folder().join("README.md").display());
    Ok(())
}

/// Reads whichever sections exist for these benches. A section's name starts with its bench's name.
fn sections(benches: &[String]) -> Result<Vec<Section>> {
    let mut sections = Vec::new();
    for file in fs::read_dir(folder().join("data"))? {
        let section: Section = serde_json::from_slice(&fs::read(file?.path())?)?;
        let place = benches.iter().position(|bench| bench == section.bench());
        sections.extend(place.map(|place| (place, section)));
    }
    sections.sort_by_key(|(place, section)| (*place, section.name.clone()));
    Ok(sections.into_iter().map(|(_, section)| section).collect())
}

fn write(folder: &Path, page: &str) -> Result<()> {
    fs::create_dir_all(folder)?;
    fs::write(folder.join("README.md"), page)?;
    Ok(())
}
