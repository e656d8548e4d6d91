//! Sections as pages of Markdown: the whole report, and what the crate's README shows of it. `machine` says on what it
//! was measured.

use super::{AtLeast, AtMost, Plot, Section, Target};

const BEGIN: &str = "<!-- measured: written by `benches/run --commit` -->";
const END: &str = "<!-- /measured -->";

/// The whole report.
pub fn report(machine: &str, sections: &[Section]) -> String {
    let head = format!(
        "# What it costs and what it saves\n\nWritten by `benches/run`, which measures all of it again. Every bench has all \
         set-ups in one run.\n\nMeasured on {machine}.\n"
    );
    head + &sections.iter().map(part).collect::<String>()
}

/// What it says of one section.
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
        part += &lines(&section.targets, "");
    }
    part.extend(section.plots.iter().map(|plot| image(plot, "")));
    part
}

/// A section with more targets is a line in the summary.
const FEW: usize = 10;

/// What a reader of the crate wants to know: the targets, or how many hold, and the first plot of each section.
pub fn summary(machine: &str, sections: &[Section]) -> String {
    let mut page = format!(
        "Measured on {machine}. `benches/run` measures it again; [the report](benches/report/README.md) has all tables and plots.\n\n"
    );
    page += "| | measured | target | | command |\n| --- | --- | --- | --- | --- |\n";
    page.extend(sections.iter().map(|section| match section.targets.len() {
        0..=FEW => lines(&section.targets, &format!(" {} |", command(section))),
        _ => digest(section),
    }));
    let plots = sections.iter().filter_map(|section| section.plots.first());
    page.extend(plots.map(|plot| image(plot, "benches/report/")));
    page
}

/// `readme` with `summary` between its two marks. `None` if it has no marks.
pub fn put_between_marks(readme: &str, summary: &str) -> Option<String> {
    let (before, rest) = readme.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    let summary = summary.trim();
    Some(format!("{before}{BEGIN}\n\n{summary}\n\n{END}{after}"))
}

/// What measures it again.
fn command(section: &Section) -> String {
    format!("`benches/run {}`", section.bench())
}

/// One line for all targets of a section.
fn digest(section: &Section) -> String {
    let (title, command, all) = (&section.title, command(section), section.targets.len());
    let held = section
        .targets
        .iter()
        .filter(|target| target.holds())
        .count();
    let verdict = match all - held {
        0 => "all hold".to_owned(),
        missed => format!("**{missed} missed**"),
    };
    format!("| {title} | {held} of {all} targets | | {verdict} | {command} |\n")
}

/// A line for each target, and at its end what else is to be in it.
fn lines(targets: &[Target], end: &str) -> String {
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
        format!("| {what} | {measured} | {bound} | {verdict} |{end}\n")
    };
    targets.iter().map(line).collect()
}

/// With as many digits as mean something.
fn figure(figure: f64) -> String {
    match figure.abs() {
        100.0.. => format!("{figure:.0}"),
        10.0.. => format!("{figure:.1}"),
        _ => format!("{figure:.3}"),
    }
}

fn image(plot: &Plot, folder: &str) -> String {
    format!("\n![{}]({folder}{}.svg)\n", plot.title, plot.name)
}

#[cfg(test)]
mod tests {
    use super::{super::tests::section, *};

    const MACHINE: &str = "2026-01-02: Some CPU";

    #[test]
    fn the_report_has_machine_command_table_targets_and_plots() {
        let page = report(MACHINE, &[section()]);
        for part in [
            "Measured on 2026-01-02: Some CPU.",
            "## Work for nobody, and work destroyed\n\n`benches/run wasted`\n\n7 calls; 30 %",
            "| --- |\n| bare | 1 |\n",
            "| a ratio | 1.200 | ≤ 1.05 | **missed** |",
            "| a share | 99.0 | ≥ 95 | holds |",
            "![A plot](some-plot.svg)",
        ] {
            assert!(page.contains(part), "{part:?} is not in:\n{page}");
        }
    }

    #[test]
    fn the_readme_gets_the_summary_between_its_marks_and_keeps_the_rest() {
        let readme = format!("# Crate\n\n{BEGIN}\n\nwhat was there\n\n{END}\n\nmore\n");
        let new = put_between_marks(&readme, &summary(MACHINE, &[section()])).unwrap();
        assert!(new.starts_with("# Crate\n\n") && new.ends_with("\n\nmore\n"));
        assert!(new.contains("| a ratio | 1.200 | ≤ 1.05 | **missed** | `benches/run wasted` |"));
        assert!(new.contains("![A plot](benches/report/some-plot.svg)"));
        assert!(!new.contains("what was there"));
        assert_eq!(put_between_marks("# Crate\n", "summary"), None);
        assert!(put_between_marks(include_str!("../../../README.md"), "summary").is_some());
    }

    #[test]
    fn a_section_of_many_targets_is_one_line_of_the_summary() {
        let mut many = section();
        many.targets = vec![many.targets; FEW].concat();
        let summary = summary(MACHINE, &[many]);
        let line = " | 10 of 20 targets | | **10 missed** | `benches/run wasted` |";
        assert!(summary.contains(line), "{line:?} is not in:\n{summary}");
        assert!(!summary.contains("a ratio"));
    }
}
