//! Renders sections as Markdown: the whole report, and its summary in the crate's README. `machine` describes where
//! they were measured.

use super::{AtLeast, AtMost, Section, Target};

const BEGIN: &str = "<!-- measured: written by `benches/run --commit` -->";
const END: &str = "<!-- /measured -->";

/// Renders the whole report.
pub fn report(machine: &str, sections: &[Section]) -> String {
    let head = format!(
        "# What it costs and what it saves\n\nWritten by `benches/run`, which measures all of it again. Every bench has all \
         set-ups in one run.\n\nMeasured on {machine}.\n"
    );
    head + &sections.iter().map(part).collect::<String>()
}

/// Renders one section.
pub fn part(section: &Section) -> String {
    let Section {
        title,
        text,
        columns,
        ..
    } = section;
    let (command, row) = (command(section), |cells: &[String]| {
        format!("| {} |\n", cells.join(" | "))
    });
    let rule = row(&vec!["---".to_owned(); columns.len()]);
    let mut part = format!(
        "\n## {title}\n\n{command}\n\n{text}\n\n{}{rule}",
        row(columns)
    );
    part.extend(section.rows.iter().map(|cells| row(cells)));
    if !section.targets.is_empty() {
        part += "\n| | measured | target | |\n| --- | --- | --- | --- |\n";
        part += &lines(&section.targets);
    }
    part
}

/// How the README shows a figure.
#[derive(Clone, Copy)]
enum Shown {
    AsItIs,
    /// A ratio, as a percentage more or less.
    Change,
}

/// The lines of the summary: a target, its figure's format, and the rest of the line.
const HEADLINES: [(&str, Shown, &str); 4] = [
    (
        "instructions of a call in a session (100 B arguments), layer and session manager, to bare",
        Shown::Change,
        "instructions for a small call in a session",
    ),
    (
        "calls a second, session, wrapped, to bare",
        Shown::Change,
        "calls a second, in sessions, with tools that do nothing",
    ),
    (
        "wrapped, session, Fin, 1 alone: p50 (ms)",
        Shown::AsItIs,
        "ms from the client's close to the token (median, one client)",
    ),
    (
        "wrapped, session: added to a call in flight (B)",
        Shown::AsItIs,
        "B more for a call in flight",
    ),
];

/// Renders the summary for the README. A bench that has not been run gets no line.
pub fn summary(sections: &[Section]) -> String {
    let mut page =
        "With the layer and the session manager, compared with bare rmcp ([full report](benches/report/README.md)):\n".to_owned();
    for (what, shown, text) in HEADLINES {
        let mut targets = sections.iter().flat_map(|section| &section.targets);
        let target = targets.find(|target| target.what == what);
        page.extend(target.map(|target| format!("- {} {text}\n", shown.figure(target.measured))));
    }
    page
}

impl Shown {
    fn figure(self, measured: f64) -> String {
        match self {
            Self::AsItIs => figure(measured),
            Self::Change if measured < 1.0 => format!("{:.0} % fewer", (1.0 - measured) * 100.0),
            Self::Change => format!("{:.0} % more", (measured - 1.0) * 100.0),
        }
    }
}

/// Replaces the text between `readme`'s two marks with `summary`. Returns `None` if a mark is missing.
pub fn put_between_marks(readme: &str, summary: &str) -> Option<String> {
    let (before, rest) = readme.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    let summary = summary.trim();
    Some(format!("{before}{BEGIN}\n\n{summary}\n\n{END}{after}"))
}

/// Returns the command that repeats the measurement.
fn command(section: &Section) -> String {
    format!("`benches/run {}`", section.bench())
}

/// Renders one line per target.
fn lines(targets: &[Target]) -> String {
    let line = |target: &Target| {
        let verdict = if target.holds() {
            "holds"
        } else {
            "**missed**"
        };
        let bound = match target.bound {
            AtMost(most) => format!("≤ {most}"),
            AtLeast(least) => format!("≥ {least}"),
        };
        let (what, measured) = (&target.what, figure(target.measured));
        format!("| {what} | {measured} | {bound} | {verdict} |\n")
    };
    targets.iter().map(line).collect()
}

/// Formats a figure, with fewer decimals the larger it is.
fn figure(figure: f64) -> String {
    match figure.abs() {
        100.0.. => format!("{figure:.0}"),
        10.0.. => format!("{figure:.1}"),
        _ => format!("{figure:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::section, *};

    const MACHINE: &str = "2026-01-02: Some CPU";

    #[test]
    fn the_report_contains_machine_command_table_and_targets() {
        let page = report(MACHINE, &[section()]);
        for part in [
            "Measured on 2026-01-02: Some CPU.",
            "## Work without a client, and destroyed work\n\n`benches/run wasted`\n\n7 calls; 30 %",
            "| --- |\n| bare | 1 |\n",
            "| a ratio | 1.200 | ≤ 1.05 | **missed** |",
            "| a share | 99.0 | ≥ 95 | holds |",
        ] {
            assert!(page.contains(part), "{part:?} is not in:\n{page}");
        }
    }

    #[test]
    fn the_summary_replaces_only_what_is_between_the_marks() {
        let readme = format!("# Crate\n\n{BEGIN}\n\nwhat was there\n\n{END}\n\nmore\n");
        let mut section = section();
        section.targets[0].what = HEADLINES[0].0.into();
        let new = put_between_marks(&readme, &summary(&[section])).unwrap();
        assert!(new.starts_with("# Crate\n\n") && new.ends_with("\n\nmore\n"));
        assert!(new.contains("\n- 20 % more instructions for a small call in a session\n"));
        assert!(!new.contains("what was there"));
        assert_eq!(put_between_marks("# Crate\n", "summary"), None);
    }

    #[test]
    fn the_readme_shows_the_last_reports_headline_figures() {
        let readme = include_str!("../../../README.md");
        let report = include_str!("../../report/README.md");
        assert!(put_between_marks(readme, "summary").is_some());
        for (what, shown, text) in HEADLINES {
            let row = report.lines().find_map(|line| {
                let cells = line.strip_prefix(&format!("| {what} | "))?;
                cells.split(' ').next()
            });
            let figure = row.unwrap_or_else(|| panic!("the report has no {what:?}"));
            let figure = shown.figure(figure.parse().expect("a number"));
            let line = format!("\n- {figure} {text}\n");
            assert!(readme.contains(&line), "{line:?} is not in the README");
        }
    }
}
