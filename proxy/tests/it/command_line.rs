//! The program's options, which it understands or refuses with a reason.

use std::{fs, net::TcpListener, path::PathBuf};

use rustix::process::Signal;
use serde_json::json;

use crate::support::*;

const UPSTREAM: &str = "--upstream=http://127.0.0.1:1/mcp";

/// A configuration file that is removed along with the test.
struct File(PathBuf);

impl File {
    fn new(name: &str, text: &str) -> Self {
        let name = format!("mcp-cancel-proxy-{}-{name}.toml", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::write(&path, text).expect("a file");
        Self(path)
    }

    fn option(&self) -> String {
        format!("--config={}", self.0.display())
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // The test may have removed it already.
        let _ = fs::remove_file(&self.0);
    }
}

/// Returns the error that wrong arguments cause.
fn error_of(args: &[&str]) -> String {
    let (code, text) = Program::run(Program::command(args));
    assert_eq!(code, Some(2), "{text}");
    text
}

#[test]
fn without_a_server_the_error_names_the_options_for_one() {
    let text = error_of(&[]);
    assert!(text.contains("pass its URL with --upstream"), "{text}");
}

#[test]
fn a_wrong_option_is_reported_with_the_nearest_one() {
    let text = error_of(&["--upsteam=http://a/"]);
    assert!(text.contains("'--upstream'"), "{text}");
    for (wrong, hint) in [
        (
            "--grace=20",
            "auto, immediate, never, a time such as 20s, or always=20s",
        ),
        ("--grace=9000h", "more than a year"),
        ("--grace=always=9000h", "more than a year"),
        ("--grace=0s", "longer than zero"),
        ("--tool-grace=x=9000h", "more than a year"),
        ("--keep-alive=soon", "20s, 500ms, 30m or 1h"),
        ("--buffer=1MB", "64MiB"),
        ("--tool-grace=report", "TOOL=GRACE"),
        ("--listen=here", "for example, 8000 or 127.0.0.1:8000"),
        ("--host=example.com", "host names belong in --allow-host"),
        ("--session-timeout=1e19s", "more than a year"),
        ("--allow-host=*", "list each host"),
        ("--allow-host=*.example.com", "list each host"),
        ("--allow-origin=*", "list each origin"),
        ("http://127.0.0.1:9000/mcp", "a URL must follow --upstream"),
        ("npx", "a command must follow `--`"),
        ("--upstream=127.0.0.1:9000", "http://127.0.0.1:9000/mcp"),
        ("--upstream=http://me:secret@host/mcp", "--header"),
        ("--allow-origin=example.com", "https://app.example.com"),
        (
            "--upstream=http://127.0.0.1:99999/mcp",
            "not a valid server URL",
        ),
        (
            "--upstream=http://127.0.0.1:9000x/mcp",
            "not a valid server URL",
        ),
        ("--upstream=http://127.0.0.1:/mcp", "not a valid server URL"),
        (
            "--upstream=http://[::1]:99999/mcp",
            "not a valid server URL",
        ),
        ("--upstream=http://:9000/mcp", "not a valid server URL"),
        ("--allow-host=example.com:99999", "is not a valid host"),
        ("--allow-host=:80", "is not a valid host"),
        ("--allow-origin=https://a:99999", "is not a valid origin"),
        ("--commit-after=100ms", "at least 250ms"),
        ("--kill-after=5s", "requires a command"),
        ("--listen=0.0.0.0:0", "--allow-host"),
        (
            "--admin=127.0.0.1:8000",
            "--listen 127.0.0.1:8000 and --admin 127.0.0.1:8000 have the same port",
        ),
        ("--admin=0.0.0.0:8000", "choose another one for --admin"),
        ("--demo", "--demo' cannot be used with"),
        ("--session-timeout=10000000000000000000s", ""),
        ("--host=0.0.0.0", "--allow-host"),
    ] {
        let server = if wrong.starts_with("--upstream") {
            None
        } else {
            Some(UPSTREAM)
        };
        let args: Vec<&str> = server.into_iter().chain([wrong]).collect();
        let text = error_of(&args);
        assert!(text.contains(hint), "{wrong}: {text}");
    }
}

#[test]
fn no_secret_is_shown_whatever_is_wrong_with_it() {
    for (option, value) in [
        ("header", "s3cret"),
        ("header", "a\u{7f}: s3cret"),
        ("header", "x-key: s3cret\u{7f}"),
        ("header", "content-length: s3cret"),
        ("env", "s3cret"),
        ("env", "=s3cret"),
        ("upstream", "http://me:s3cret@up/mcp"),
        ("upstream", "up/mcp?key=s3cret"),
        ("upstream", "ftp://up/mcp?key=s3cret"),
        ("upstream", "http://up/mcp?key=s3cret and more"),
    ] {
        let flag = format!("--{option}={value}");
        let in_toml = value.replace('\u{7f}', "\\u007f");
        let file = File::new("secret", &format!("{option} = \"{in_toml}\"\n"));
        let variable = format!("MCP_PROXY_{}", option.to_uppercase());
        let mut command = Program::command(&[]);
        command.env(&variable, value);
        let (code, by_variable) = Program::run(command);
        assert_eq!(code, Some(2), "{by_variable}");
        assert!(by_variable.contains(&variable), "{by_variable}");
        let message = [
            error_of(&[&flag]),
            error_of(&[&format!("--{option}"), value]),
            error_of(&[&file.option()]),
            by_variable,
        ];
        for text in message {
            assert!(!text.contains("s3cret"), "{text}");
            assert!(text.contains(option) || text.contains(&variable), "{text}");
        }
    }
    // A value that a shell has split for lack of quotes, and misspelt options.
    for args in [
        &["--header", "x-key:", "s3cret"][..],
        &["--headers=x-key: s3cret"],
        &["--headers", "x-key: s3cret"],
        &["-H", "x-key: s3cret"],
        &["-Hx-key: s3cret"],
        &["http://up/mcp?key=s3cret"],
        &["--env=A=s3cret", "--upstream=http://up/?key=s3cret"],
        &["--header=x-key: s3cret", "--grace=s3", "--", "npx"],
        &[
            "--upstream=http://up/?key=s3cret",
            "--upstream=http://up/?key=s3cret",
        ],
    ] {
        let text = error_of(args);
        assert!(!text.contains("s3cret"), "{args:?}: {text}");
    }
    for text in [
        "headers = \"x-key: s3cret\"\n",
        "header = { x-key = [\"s3cret\"] }\n",
        "header = \"x-key: s3cret\n",
        "[env]\nA = { B = \"s3cret\" }\n",
    ] {
        let file = File::new("secrets", text);
        let message = error_of(&[UPSTREAM, &file.option()]);
        assert!(!message.contains("s3cret"), "{text}: {message}");
    }
    let mut help = Program::command(&["--help"]);
    help.env("MCP_PROXY_UPSTREAM", "http://up/?key=s3cret");
    let help = help.output().expect("the program starts");
    assert!(!String::from_utf8_lossy(&help.stdout).contains("s3cret"));
}

#[test]
fn a_variable_that_is_wrong_is_named_by_its_own_name() {
    for (variable, value, hint) in [
        ("MCP_PROXY_GRACE", "20", "auto, immediate, never, a time"),
        ("MCP_PROXY_NO_RESUMABLE", "perhaps", "true or false"),
        ("MCP_PROXY_LISTEN", "here", "not a valid address"),
        (
            "MCP_PROXY_CONFIG",
            "/nowhere.toml",
            "/nowhere.toml: cannot be read",
        ),
    ] {
        let mut command = Program::command(&[UPSTREAM]);
        command.env(variable, value);
        let (code, text) = Program::run(command);
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains(hint), "{text}");
        let is_named = text.contains(variable) || variable == "MCP_PROXY_CONFIG";
        assert!(is_named, "{text}");
    }
}

/// This is not an error, because other programs' variables may have the same prefix.
#[tokio::test]
async fn a_misspelt_variable_causes_a_warning_with_the_nearest_name() {
    let mut command = Program::command(&["--listen=127.0.0.1:0", UPSTREAM]);
    command.env("MCP_PROXY_GRAEC", "20s");
    command.env("MCP_PROXY_SERVICE_HOST", "10.0.0.1");
    command.env("MCP_PROXY_PORT", "tcp://10.0.0.1:8000");
    let mut program = Program::start(command);
    let line = program.line();
    assert!(line.contains("listening on"), "{line}");
    let line = program.line();
    let hint = "did you mean MCP_PROXY_GRACE?";
    assert!(
        line.contains("MCP_PROXY_GRAEC") && line.contains(hint),
        "{line}"
    );
    program.signal(Signal::TERM);
    let (_, rest) = program.ended().await;
    assert!(!rest.contains("MCP_PROXY"), "{rest}");
}

#[test]
fn a_variable_for_a_part_of_the_address_causes_a_warning() {
    for (variable, value) in [("MCP_PROXY_PORT", "9000"), ("MCP_PROXY_HOST", "0.0.0.0")] {
        let mut command = Program::command(&["--listen=127.0.0.1:0", UPSTREAM]);
        command.env(variable, value);
        let mut program = Program::start(command);
        program.addr();
        let line = program.line();
        let hint = "did you mean MCP_PROXY_LISTEN?";
        assert!(line.contains(variable) && line.contains(hint), "{line}");
    }
}

#[tokio::test]
async fn a_grace_that_is_too_short_for_clients_causes_a_warning() {
    for (option, is_short) in [
        ("--grace=3s", true),
        ("--grace=always=3s", true),
        ("--tool-grace=a=3s", true),
        ("--grace=4s", false),
        ("--grace=immediate", false),
    ] {
        let args = ["--listen=127.0.0.1:0", UPSTREAM, option];
        let mut program = Program::start(Program::command(&args));
        program.addr();
        program.signal(Signal::TERM);
        let (_, line) = program.ended().await;
        assert_eq!(
            line.contains("the grace period of 3s") && line.contains("is shorter than 4s"),
            is_short,
            "{option}: {line}"
        );
    }
}

#[test]
fn an_address_may_be_a_port_a_name_of_this_machine_or_two_options() {
    for pattern in [
        "--listen=P",
        "--listen=:P",
        "--listen=localhost:P",
        "--port=P",
        "--host=localhost --port=P",
    ] {
        let port = free_address().port().to_string();
        let mut command = Program::command(&[UPSTREAM]);
        command.args(pattern.replace('P', &port).split(' '));
        let line = Program::start(command).line();
        assert!(
            line.contains(&format!("http://127.0.0.1:{port}/")),
            "{pattern}: {line}"
        );
    }
    // Either flag overrides the part of the address that it sets.
    let file = File::new("port", "port = 1\nhost = \"127.0.0.2\"\n");
    for (option, ip) in [("--listen", "127.0.0.1"), ("--port", "127.0.0.2")] {
        let port = free_address().port().to_string();
        let args = [UPSTREAM, &file.option(), option, &port];
        let line = Program::start(Program::command(&args)).line();
        assert!(line.contains(&format!("http://{ip}:{port}/")), "{line}");
    }
}

#[test]
fn a_command_in_the_file_may_be_a_string() {
    let text = "command = \"sh  some-server\"\nlisten = \"127.0.0.1:0\"\n";
    let file = File::new("words", text);
    let mut program = Program::start(Program::command(&[&file.option()]));
    let line = program.line();
    assert!(line.contains("in front of `sh some-server`"), "{line}");
    let line = program.line();
    let words = "was split into [\"sh\", \"some-server\"]";
    assert!(line.contains(words), "{line}");
    let file = File::new("shell", "command = \"sh -c 'exit'\"\n");
    let message = error_of(&[&file.option()]);
    assert!(
        message.contains("`command` is not run by a shell: use a list"),
        "{message}"
    );
}

#[test]
fn an_invalid_log_filter_is_an_error() {
    for (filter, expected) in [
        ("mcp_cancel_proxy=loud", Some(2)),
        ("a=b=c", Some(2)),
        ("", None),
    ] {
        let mut command = Program::command(&["--listen=127.0.0.1:0", UPSTREAM]);
        command.env("RUST_LOG", filter);
        match expected {
            Some(_) => {
                let (code, text) = Program::run(command);
                assert_eq!(code, expected, "{text}");
                assert!(text.contains("environment variable RUST_LOG: "), "{text}");
            }
            None => drop(Program::start(command).addr()),
        }
    }
}

#[test]
fn a_log_filter_for_another_target_keeps_the_lines_of_the_program() {
    // `verbose` is not a level, so it counts as a target's name.
    for filter in ["hyper=debug", "verbose", "mcp_server=off"] {
        let mut command = Program::command(&["--listen=127.0.0.1:0", UPSTREAM]);
        command.env("RUST_LOG", filter);
        Program::start(command).addr();
    }
}

#[tokio::test]
async fn a_named_tool_that_the_server_does_not_list_causes_one_warning() {
    let list = r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#;
    let page = |tools: &str, more: &str| {
        format!(r#"{{"jsonrpc":"2.0","id":1,"result":{{"tools":[{tools}]{more}}}}}"#)
    };
    let first = page(r#"{"name":"there"},{"name":"a"}"#, r#","nextCursor":"2""#);
    let last = page(r#"{"name":"b","description":"missing"}"#, "");
    for is_stream in [false, true] {
        let upstream = Upstream::start().await;
        let url = format!("http://{}/mcp", upstream.addr);
        let mut command = Program::command(&["--listen=127.0.0.1:0", "--upstream", &url]);
        command.args(["--exempt=there,missing", "--tool-grace=b=1h,gone=1h"]);
        let mut program = Program::start(command);
        let addr = program.addr();
        for (message, answer) in [
            (call("1").as_str(), &last),
            (list, &first),
            (list, &last),
            (list, &last),
        ] {
            let mut client = Connection::open(addr).await;
            let request = post(message).header("mcp-session-id", "s");
            client.send(&request).await;
            let mut received = upstream.next_request().await;
            if is_stream {
                received.stream().await;
                received
                    .chunk(&format!("event: message\ndata: {answer}\n\n"))
                    .await;
                received.end().await;
            } else {
                received
                    .answer("200 OK\r\ncontent-type: application/json", answer)
                    .await;
            }
            assert!(client.reply().await.text().contains(answer.as_str()));
        }
        program.signal(Signal::TERM);
        let (_, rest) = program.ended().await;
        let warnings: Vec<&str> = rest
            .lines()
            .filter(|line| line.contains("does not list"))
            .collect();
        assert_eq!(warnings.len(), 2, "{rest}");
        assert!(
            warnings[0].contains("\"gone\"") && warnings[1].contains("\"missing\""),
            "{rest}"
        );
    }
}

#[test]
fn a_port_in_use_is_named_with_its_option() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = taken.local_addr().expect("an address");
    for option in ["--listen", "--admin"] {
        let mut args = vec![UPSTREAM.to_owned(), format!("{option}={addr}")];
        if option == "--admin" {
            args.push("--listen=127.0.0.1:0".to_owned());
        }
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let (code, text) = Program::run(Program::command(&args));
        assert_eq!(code, Some(1), "{text}");
        let expected = format!(
            "another program is already listening on {addr}: choose a free port with {option}"
        );
        assert!(text.contains(&expected), "{text}");
    }
}

#[test]
fn a_typo_in_the_file_is_named_with_its_line_and_the_nearest_name() {
    for (text, line, hint) in [
        (
            "# ours\n\ngraec = \"20s\"\n",
            3,
            "unknown option `graec`, did you mean `grace`?",
        ),
        ("keep_alive = \"15s\"\n", 1, "did you mean `keep-alive`?"),
        (
            "grace = \"20s\"\nlisten = \"here\"\n",
            2,
            "invalid value 'here' for '--listen",
        ),
        ("no-resumabel = false\n", 1, "did you mean `no-resumable`?"),
        (
            "no-such-option-at-all = []\n",
            1,
            "unknown option `no-such-option-at-all`",
        ),
        (
            "keep-alive = false\n",
            1,
            "(to turn a time off, write \"off\")",
        ),
        ("call-timeout = true\n", 1, "`call-timeout` takes a value"),
        ("exempt = [\"a\", false]\n", 1, "`exempt` takes a value"),
        ("command = [false]\n", 1, "`command` takes a value"),
        ("\nbuffer = \"1023KiB\"\n", 2, "at least 1MiB"),
        ("commit-after = \"1ms\"\n", 1, "at least 250ms"),
        ("max-sessions = 0\n", 1, "at least 1"),
        ("drain = [[1]]\n", 1, "`drain` must be a string"),
        ("drain = \"8s\"\ndrain = \"9s\"\n", 2, "duplicate key"),
        ("\n\nlisten = 127.0.0.1\n", 3, ""),
        (
            "config = \"other.toml\"\n",
            1,
            "only allowed on the command line",
        ),
    ] {
        let file = File::new("typo", text);
        let message = error_of(&[UPSTREAM, &file.option()]);
        let place = format!("{}:{line}: ", file.0.display());
        assert!(
            message.contains(&place) && message.contains(hint),
            "{text}: {message}"
        );
    }
    let message = error_of(&[UPSTREAM, "--config=/nowhere/at/all.toml"]);
    assert!(
        message.contains("/nowhere/at/all.toml: cannot be read"),
        "{message}"
    );
}

#[test]
fn a_flag_overrides_the_environment_which_overrides_the_file() {
    let file = File::new(
        "order",
        "upstream = \"http://file:1/mcp\"\nlisten = \"127.0.0.1:0\"\ngrace = \"never\"\nexempt = [\"a\", \"b\"]\n",
    );
    let config = file.option();
    for (flag, variable, expected) in [
        (None, None, "http://file:1/mcp"),
        (
            None,
            Some("http://environment:1/mcp"),
            "http://environment:1/mcp",
        ),
        (
            Some("--upstream=http://flag:1/mcp"),
            Some("http://environment:1/mcp"),
            "http://flag:1/mcp",
        ),
    ] {
        let mut command = Program::command(&[&config]);
        command.args(flag);
        if let Some(variable) = variable {
            command.env("MCP_PROXY_UPSTREAM", variable);
        }
        let line = Program::start(command).line();
        assert!(
            line.contains(&format!("in front of {expected}, which")),
            "{line}"
        );
        assert!(line.contains("a disconnect never cancels a call"), "{line}");
    }
}

#[test]
fn the_first_line_has_the_address_the_server_and_what_a_disconnect_does() {
    for (grace, meaning) in [
        ("auto", "at once, or after 20s if its client can resume it"),
        ("immediate", "a disconnect cancels its call at once"),
        ("5s", "at once, or after 5s if its client can resume it"),
        (
            "always=5s",
            "a disconnect cancels its call after 5s unless its client resumes it, or at once without a session",
        ),
    ] {
        let mut command = Program::command(&["--listen=127.0.0.1:0", UPSTREAM]);
        command.env("MCP_PROXY_GRACE", grace);
        let line = Program::start(command).line();
        assert!(line.contains("listening on http://127.0.0.1:"), "{line}");
        assert!(
            line.contains(
                "/mcp (--listen) in front of http://127.0.0.1:1/mcp, which is not accepting connections yet (Connection refused"
            ),
            "{line}"
        );
        assert!(line.contains(meaning), "{line}");
        assert!(
            line.contains("; events are kept for clients that resume (--buffer)"),
            "{line}"
        );
    }
    let options = [
        "--exempt=b,a",
        "--tool-grace=c=never",
        "--listen=127.0.0.1:0",
    ];
    let mut command = Program::command(&options);
    command.arg(UPSTREAM);
    let line = Program::start(command).line();
    assert!(
        line.contains(", except for a, b, c (--exempt, --tool-grace); "),
        "{line}"
    );
    let bare = Program::command(&["--listen=127.0.0.1:0", UPSTREAM, "--no-resumable"]);
    let line = Program::start(bare).line();
    assert!(
        line.contains("; events are not kept (--no-resumable)"),
        "{line}"
    );
    let command = Program::command(&["--listen=127.0.0.1:0", "--", "sh", "-c", "exit"]);
    let line = Program::start(command).line();
    assert!(
        line.contains("/mcp (--listen) in front of `sh -c exit`, one process per session; "),
        "{line}"
    );
}

#[test]
fn a_command_with_line_breaks_is_on_the_first_line() {
    let args = [
        "--listen=127.0.0.1:0",
        "--",
        "sh",
        "-c",
        "exit\n2026 forged",
    ];
    let line = Program::start(Program::command(&args)).line();
    assert!(line.contains("`sh -c exit\u{fffd}2026 forged`"), "{line}");
    assert!(line.contains("a disconnect"), "{line}");
}

#[test]
fn a_missing_command_or_directory_is_named() {
    for (args, hint) in [
        (
            &["--", "no-such-command"][..],
            "command not found in PATH: `no-such-command`",
        ),
        (
            &["--cwd=/no/such/place", "--", "sh"],
            "directory not found: /no/such/place",
        ),
    ] {
        let mut command = Program::command(&["--listen=127.0.0.1:0"]);
        command.args(args);
        let (code, text) = Program::run(command);
        assert_eq!(code, Some(1), "{text}");
        assert!(text.contains(hint), "{text}");
    }
}

#[test]
fn the_json_format_writes_each_line_as_json() {
    let args = ["--listen=127.0.0.1:0", UPSTREAM, "--log-format=json"];
    let line = Program::start(Program::command(&args)).line();
    let line: serde_json::Value = serde_json::from_str(&line).expect("JSON");
    assert_eq!(line["level"], "INFO");
    assert!(
        line["message"]
            .as_str()
            .expect("text")
            .starts_with("listening on ")
    );
}

/// Returns the value of a field in a line.
fn value<'a>(line: &'a str, field: &str) -> &'a str {
    let (_, rest) = line
        .split_once(field)
        .unwrap_or_else(|| panic!("{field} {line}"));
    rest.split([' ', '\n'])
        .next()
        .expect("a value")
        .trim_matches('"')
}

#[tokio::test]
async fn one_session_has_one_name_in_all_lines_and_among_the_calls() {
    let server = [
        "--",
        env!("CARGO_BIN_EXE_mcp-cancel-proxy"),
        "scripted-server",
    ];
    let options = ["--listen=127.0.0.1:0", "--admin=127.0.0.1:0"];
    let args = [&options[..], &server].concat();
    let mut program = Program::start(Program::command(&args));
    let addr = program.addr();
    let admin_line = program.line();
    let (_, admin) = admin_line.split_once("http://").expect("an address");
    let admin = admin
        .trim_end()
        .trim_end_matches('/')
        .parse()
        .expect("an address");
    let client = Mcp::stateless(addr, "/mcp")
        .version("2025-11-25")
        .connect()
        .await;
    let mut call = client.call(7, "work", json!({ "seconds": 1 })).await;
    call.head().await;
    call.event().await.expect("an event");
    let calls = Connection::fetch(admin, &Request::new("GET", "/calls.json")).await;
    let row = calls.json()["calls"][0].take();
    call.rst();
    let mut chat = client.call(8, "chat", json!({ "lines": 1 })).await;
    chat.answer().await.expect("an answer");
    let read = move || {
        let mut lines = Vec::new();
        while !lines
            .last()
            .is_some_and(|line: &String| line.contains("answer is kept"))
        {
            lines.push(program.line());
        }
        lines
    };
    let lines = tokio::task::spawn_blocking(read).await.expect("no panic");
    let session = row["mcp.session.id"].as_str().expect("a hash");
    for text in [
        "session started",
        "client disconnected",
        "mcp_server: line 0",
        "answer is kept",
    ] {
        let line = lines.iter().find(|line| line.contains(text)).expect(text);
        assert_eq!(value(line, "mcp.session.id="), session, "{lines:?}");
        assert!(
            !line.contains("omitted=") && !line.contains("truncated="),
            "{line}"
        );
    }
    let last = lines.last().expect("a line");
    assert_eq!(value(last, "jsonrpc.request.id="), "7");
    assert_eq!(
        value(last, "gen_ai.tool.name="),
        row["gen_ai.tool.name"].as_str().expect("a name")
    );
    assert_eq!(value(last, "kept_for="), "60s");
    assert_ne!(value(last, "away="), "");
}

#[tokio::test]
async fn each_disconnect_and_each_cancel_is_logged_and_text_of_clients_stays_on_its_line() {
    let upstream = Upstream::start().await;
    let url = format!("http://{}/mcp", upstream.addr);
    let args = ["--listen=127.0.0.1:0", "--upstream", &url, "--grace=100ms"];
    let mut program = Program::start(Program::command(&args));
    let addr = program.addr();
    assert!(program.line().contains("is shorter than 4s"));
    let call =
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a\nb\u001b[31m"}}"#;
    let mut client = Connection::open(addr).await;
    client
        .send(&post(call).header("mcp-session-id", "the-secret"))
        .await;
    let mut received = upstream.next_request().await;
    received.stream().await;
    received.chunk("data: {\"method\":\"a\"}\n\n").await;
    client.head().await;
    client.event().await.expect("an event");
    client.fin();
    let (program, lines) = tokio::task::spawn_blocking(move || {
        let lines = [program.line(), program.line()];
        (program, lines)
    })
    .await
    .expect("no panic");
    assert!(
        lines[0].contains("client disconnected, call is waiting for it to resume"),
        "{lines:?}"
    );
    assert!(
        lines[0].contains("gen_ai.tool.name=") && lines[0].contains("grace=100ms"),
        "{lines:?}"
    );
    assert!(lines[1].contains("call cancelled"), "{lines:?}");
    for field in ["call=", "jsonrpc.request.id=", "mcp.session.id="] {
        assert_eq!(
            value(&lines[0], field),
            value(&lines[1], field),
            "{lines:?}"
        );
    }
    for line in &lines {
        assert!(
            !line.contains("the-secret") && !line.contains('\u{1b}'),
            "{line:?}"
        );
    }
    drop(program);
}

#[tokio::test]
async fn a_call_that_no_disconnect_cancels_because_of_its_id_is_logged_once() {
    let upstream = Upstream::start().await;
    let url = format!("http://{}/mcp", upstream.addr);
    let args = ["--listen=127.0.0.1:0", "--upstream", &url];
    let mut program = Program::start(Program::command(&args));
    let addr = program.addr();
    for id in ["18446744073709551615", "0.5"] {
        let mut client = Connection::sending(addr, &session_call(id)).await;
        upstream.next_request().await.answer("200 OK", "{}").await;
        client.reply().await;
    }
    // Logged once, because a client might send many of these.
    program.signal(rustix::process::Signal::TERM);
    let (_, log) = program.ended().await;
    let lines = log.lines().filter(|line| line.contains("64-bit integer"));
    assert_eq!(lines.count(), 1, "{log}");
}

#[tokio::test]
async fn a_call_that_is_ambiguous_is_logged_once() {
    let upstream = Upstream::start().await;
    let url = format!("http://{}/mcp", upstream.addr);
    let args = ["--listen=127.0.0.1:0", "--upstream", &url];
    let mut program = Program::start(Program::command(&args));
    let addr = program.addr();
    let escaped = call("1").replace("params", "\\u0070arams");
    let old = call("1").replace(r#""jsonrpc":"2.0","#, "");
    for body in [&escaped, &old, &escaped, &old, &call("1")] {
        let mut client = Connection::sending(addr, &post(body).header("mcp-session-id", "s")).await;
        upstream.next_request().await.answer("200 OK", "{}").await;
        client.reply().await;
    }
    program.signal(Signal::TERM);
    let (_, log) = program.ended().await;
    for what in [
        "has an escaped member name",
        "is not a JSON-RPC 2.0 message",
    ] {
        let lines = log.lines().filter(|line| line.contains(what));
        assert_eq!(lines.count(), 1, "{log}");
    }
    assert_eq!(
        log.matches("does not cancel such requests").count(),
        2,
        "{log}"
    );
}

#[test]
fn help_names_every_option_and_shows_no_secret() {
    let mut command = Program::command(&["--help"]);
    command.env("MCP_PROXY_HEADER", "authorization: secret");
    let output = command.output().expect("the program starts");
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).expect("text");
    for option in [
        "--upstream",
        "--grace",
        "--buffer",
        "--kill-after",
        "--config",
        "MCP_PROXY_DRAIN",
    ] {
        assert!(text.contains(option), "{option}");
    }
    assert!(!text.contains("secret"));
}
