//! The reports in `docs/upstream` contain this folder's programs exactly as compiled.

use std::{fs, path::Path};

const PROGRAMS: [(&str, &str); 11] = [
    ("aborted_restore", include_str!("aborted_restore.rs")),
    ("cancelled_call", include_str!("cancelled_call.rs")),
    ("future_size", include_str!("future_size.rs")),
    ("idle_session", include_str!("idle_session.rs")),
    ("late_answer", include_str!("late_answer.rs")),
    ("panicking_tool", include_str!("panicking_tool.rs")),
    ("restored_session", include_str!("restored_session.rs")),
    ("resume_context", include_str!("resume_context.rs")),
    ("stored_events", include_str!("stored_events.rs")),
    ("stored_resume", include_str!("stored_resume.rs")),
    ("unread_stream", include_str!("unread_stream.rs")),
];

/// `UPSTREAM_REPORTS=write` writes the programs to the reports instead.
#[test]
fn each_report_contains_its_program() {
    let pages = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/upstream");
    for (name, source) in PROGRAMS {
        let page = pages.join(format!("{name}.md"));
        let text = fs::read_to_string(&page).unwrap_or_else(|error| panic!("{page:?}: {error}"));
        let (before, rest) = text.split_once("```rust\n").expect("a program");
        let (_, after) = rest.split_once("```\n").expect("its end");
        let client = include_str!("client.rs").trim_start();
        let (_, store) = include_str!("store.rs")
            .split_once("\n\n")
            .expect("a line about the file");
        let program = source.replace("include!(\"client.rs\");\n", client);
        let program = program.replace("include!(\"store.rs\");\n", store);
        let program = program.replace("\npub ", "\n");
        let expected = format!("{before}```rust\n{program}```\n{after}");
        if std::env::var_os("UPSTREAM_REPORTS").is_some() {
            fs::write(&page, expected).expect("the report is written");
        } else {
            assert!(
                text == expected,
                "{page:?} has another program: UPSTREAM_REPORTS=write cargo test --test upstream"
            );
        }
    }
}
