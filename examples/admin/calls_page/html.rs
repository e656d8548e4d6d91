//! Renders the page. Any text from clients is written through [`Text`].

use std::{
    fmt::{self, Write as _},
    time::Duration,
};

use super::row::{Row, State};

/// Text escaped for use in HTML, between tags and in quoted attributes.
struct Text<'a>(&'a str);

/// A duration in milliseconds, displayed in a readable unit.
struct Time(u64);

pub(super) fn page(rows: &[Row], mark: &str, missed: Option<u64>) -> String {
    let mut page = String::with_capacity(2048 + 512 * rows.len());
    // Writing to a string cannot fail.
    let _ = write_page(&mut page, rows, mark, missed);
    page
}

fn write_page(page: &mut String, rows: &[Row], mark: &str, missed: Option<u64>) -> fmt::Result {
    let count = rows.len();
    let detached = rows.iter().filter(|row| row.state == State::Detached);
    let detached = detached.count();
    let attached = count - detached;
    write!(
        page,
        r#"<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{count} in flight</title>
<link rel="stylesheet" href="calls.css">
<script src="calls.js" defer></script>
<noscript><meta http-equiv="refresh" content="2"></noscript>
</head>
<body>
"#
    )?;
    if let Some(call) = missed {
        writeln!(
            page,
            "<p class=\"notice\" role=\"status\">Call {call} was not cancelled: it has ended, or only its client \
             may end it.</p>"
        )?;
    }
    write!(
        page,
        r#"<main>
<header>
<h1>Calls in flight</h1>
<ul class="counts">
<li><b>{count}</b> in all</li>
<li class="attached"><b>{attached}</b> attached</li>
<li class="detached"><b>{detached}</b> detached</li>
</ul>
</header>
"#
    )?;
    if rows.is_empty() {
        page.push_str("<p class=\"empty\">No call is in flight.</p>\n");
    } else {
        write_table(page, rows, mark)?;
    }
    page.push_str(
        "</main>\n<footer><span class=\"live\">Refreshed every 2 s</span> <a href=\"calls.json\">JSON</a></footer>\n\
         </body>\n</html>\n",
    );
    Ok(())
}

fn write_table(page: &mut String, rows: &[Row], mark: &str) -> fmt::Result {
    writeln!(
        page,
        "<form method=\"post\" action=\"calls?page={}\">",
        Text(mark)
    )?;
    page.push_str(
        r#"<table>
<thead><tr><th scope="col" class="number">Call</th><th scope="col">What</th><th scope="col">State</th>
<th scope="col" class="number">Age</th><th scope="col" class="number">Time left</th>
<th scope="col">Session</th><th scope="col">Request id</th><th><span class="unseen">Cancel</span></th></tr></thead>
<tbody>
"#,
    );
    for row in rows {
        write_row(page, row)?;
    }
    page.push_str("</tbody>\n</table>\n</form>\n");
    Ok(())
}

fn write_row(page: &mut String, row: &Row) -> fmt::Result {
    let id = Text(&row.id);
    write!(
        page,
        "<tr><td class=\"number\">{id}</td><td class=\"what\">"
    )?;
    let method = Text(&row.method);
    match &row.tool {
        Some(tool) => write!(
            page,
            "<bdi class=\"tool\">{}</bdi> <bdi class=\"method\">{method}</bdi>",
            Text(tool)
        )?,
        None => write!(page, "<bdi class=\"tool\">{method}</bdi>")?,
    }
    page.push_str("</td><td>");
    match row.state {
        State::Attached => page.push_str("<span class=\"state attached\">attached</span>"),
        State::Detached => write_detached(page, row)?,
    }
    write!(page, "</td><td class=\"number\">{}</td>", Time(row.age_ms))?;
    match row.time_left_ms {
        Some(left) => write!(page, "<td class=\"number\">{}</td>", Time(left))?,
        None => page.push_str("<td class=\"number none\">no limit</td>"),
    }
    match &row.session {
        Some(session) => write!(page, "<td><code>{}</code></td>", Text(session))?,
        None => page.push_str("<td class=\"none\">none</td>"),
    }
    writeln!(
        page,
        "<td><bdi class=\"request\">{}</bdi></td><td class=\"action\"><button name=\"call\" value=\"{id}\" \
         id=\"cancel-{id}\" aria-label=\"Cancel call {id}\">Cancel</button></td></tr>",
        Text(&row.request.to_string()),
    )
}

fn write_detached(page: &mut String, row: &Row) -> fmt::Result {
    let elapsed = Time(row.detached_ms.unwrap_or_default());
    write!(
        page,
        "<span class=\"state detached\">detached</span> <small>client disconnected {elapsed} ago, "
    )?;
    match row.grace_left_ms {
        Some(left) => write!(page, "cancelled in {}</small>", Time(left)),
        None => page.write_str("runs on</small>"),
    }
}

// === impl Text ===

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for char in self.0.chars() {
            match char {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                control if control.is_control() => f.write_char('\u{fffd}')?,
                other => f.write_char(other)?,
            }
        }
        Ok(())
    }
}

// === impl Time ===

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = Duration::from_millis(self.0);
        let seconds = time.as_secs();
        match seconds {
            0..10 => write!(f, "{:.1} s", time.as_secs_f64()),
            10..60 => write!(f, "{seconds} s"),
            60..3600 => write!(f, "{} min {:02} s", seconds / 60, seconds % 60),
            _ => write!(f, "{} h {:02} min", seconds / 3600, seconds / 60 % 60),
        }
    }
}
