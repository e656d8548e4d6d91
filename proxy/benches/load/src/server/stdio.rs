//! The server on stdin and stdout, with one message per line.

use std::io::{self, BufRead as _, StdoutLock, Write as _};

use anyhow::Result;

use super::Answer;

/// Serves until stdin ends.
pub(crate) fn serve() -> Result<()> {
    let (mut stdin, mut stdout) = (io::stdin().lock(), io::stdout().lock());
    let mut line = Vec::new();
    while stdin.read_until(b'\n', &mut line)? > 0 {
        match Answer::to(&line) {
            Answer::None | Answer::Never => {}
            Answer::Line(line) => write_line(&mut stdout, line)?,
            Answer::Lines(lines) => {
                for line in lines {
                    write_line(&mut stdout, line)?;
                }
            }
        }
        line.clear();
    }
    Ok(())
}

/// Writes each line at once, along with its line break.
fn write_line(stdout: &mut StdoutLock<'_>, mut line: String) -> io::Result<()> {
    line.push('\n');
    stdout.write_all(line.as_bytes())
}
