//! Options of the program, understood or refused with a reason.

use std::{fs, net::TcpListener, path::PathBuf};

use crate::support::*;

const UPSTREAM: &str = "--upstream=http://127.0.0.1:1/mcp";

/// A configuration file that is gone with the test.
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
        // It may have gone.
        let _removed = fs::remove_file(&self.0);
    }
}

/// What it says to arguments that are wrong.
fn complaint(args: &[&str]) -> String {
    let (code, text) = Program::run(Program::command(args));
    assert_eq!(code, Some(2), "{text}");
    text
}

#[test]
fn without_a_server_it_says_how_to_name_one() {
    let text = complaint(&[]);
    assert!(text.contains("--upstream with the URL"), "{text}");
}

#[test]
fn a_wrong_option_is_named_with_the_nearest() {
    let text = complaint(&["--upsteam=http://a/"]);
    assert!(text.contains("'--upstream'"), "{text}");
    for (wrong, hint) in [
        ("--grace=20", "auto, immediate, never, or a time"),
        ("--keep-alive=soon", "20s, 500ms, 30m or 1h"),
        ("--buffer=1MB", "64MiB"),
        ("--tool-grace=report", "TOOL=GRACE"),
        ("--listen=8000", "--listen"),
        ("--upstream=127.0.0.1:9000", "http://127.0.0.1:9000/mcp"),
        ("--upstream=http://me:secret@host/mcp", "--header"),
        ("--allow-origin=example.com", "https://app.example.com"),
        ("--commit-after=100ms", "250ms at least"),
        ("--kill-after=5s", "for a command"),
        ("--listen=0.0.0.0:0", "--allow-host"),
    ] {
        let server = if wrong.starts_with("--upstream") {
            None
        } else {
            Some(UPSTREAM)
        };
        let args: Vec<&str> = server.into_iter().chain([wrong]).collect();
        let text = complaint(&args);
        assert!(text.contains(hint), "{wrong}: {text}");
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
        let expected =
            format!("another program listens on {addr}: choose a free port with {option}");
        assert!(text.contains(&expected), "{text}");
    }
}

#[test]
fn a_typo_in_the_file_is_named_with_its_line_and_the_nearest_name() {
    for (text, line, hint) in [
        (
            "# ours\n\ngraec = \"20s\"\n",
            3,
            "there is no `graec`, did you mean `grace`?",
        ),
        ("keep_alive = \"15s\"\n", 1, "did you mean `keep-alive`?"),
        (
            "grace = \"20s\"\nlisten = \"here\"\n",
            2,
            "invalid value 'here' for '--listen",
        ),
        ("drain = [[1]]\n", 1, "`drain` must be a text"),
        ("drain = \"8s\"\ndrain = \"9s\"\n", 2, "duplicate key"),
        ("\n\nlisten = 127.0.0.1\n", 3, ""),
        ("config = \"other.toml\"\n", 1, "for the command line alone"),
    ] {
        let file = File::new("typo", text);
        let said = complaint(&[UPSTREAM, &file.option()]);
        let place = format!("{}:{line}: ", file.0.display());
        assert!(
            said.contains(&place) && said.contains(hint),
            "{text}: {said}"
        );
    }
    let said = complaint(&[UPSTREAM, "--config=/nowhere/at/all.toml"]);
    assert!(
        said.contains("/nowhere/at/all.toml: cannot be read"),
        "{said}"
    );
}

#[test]
fn a_flag_comes_before_the_environment_and_that_before_the_file() {
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
        assert!(line.contains(&format!("in front of {expected};")), "{line}");
        assert!(line.contains("a hang-up cancels nothing"), "{line}");
    }
}

#[test]
fn the_first_line_says_where_it_listens_what_it_fronts_and_what_a_hang_up_means() {
    for (grace, meaning) in [
        ("auto", "at once, or after 20s if its client may come back"),
        ("immediate", "a hang-up cancels its call at once"),
        ("5s", "a hang-up cancels its call after 5s"),
    ] {
        let mut command = Program::command(&["--listen=127.0.0.1:0", UPSTREAM]);
        command.env("MCP_PROXY_GRACE", grace);
        let line = Program::start(command).line();
        assert!(line.contains("listening on http://127.0.0.1:"), "{line}");
        assert!(
            line.contains("/mcp in front of http://127.0.0.1:1/mcp; "),
            "{line}"
        );
        assert!(line.contains(meaning), "{line}");
        assert!(
            line.contains("; what its client misses is kept here"),
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
    assert!(line.contains(", but as configured for a, b, c; "), "{line}");
    let bare = Program::command(&["--listen=127.0.0.1:0", UPSTREAM, "--no-resumable"]);
    let line = Program::start(bare).line();
    assert!(
        line.contains("; what its client misses is not kept here"),
        "{line}"
    );
    let command = Program::command(&["--listen=127.0.0.1:0", "--", "sh", "-c", "exit"]);
    let line = Program::start(command).line();
    assert!(
        line.contains("/mcp in front of `sh -c exit`, a process for each session; "),
        "{line}"
    );
}

#[test]
fn a_command_that_is_not_there_is_named() {
    for (args, hint) in [
        (
            &["--", "no-such-command"][..],
            "no command `no-such-command` in PATH",
        ),
        (
            &["--cwd=/no/such/place", "--", "sh"],
            "no directory /no/such/place",
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
fn lines_for_machines_are_json() {
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

#[tokio::test]
async fn each_call_that_is_abandoned_or_cancelled_is_logged_and_what_clients_say_stays_on_its_line()
{
    let upstream = Upstream::start().await;
    let url = format!("http://{}/mcp", upstream.addr);
    let args = ["--listen=127.0.0.1:0", "--upstream", &url, "--grace=100ms"];
    let mut program = Program::start(Program::command(&args));
    let addr = program.addr();
    let call =
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a\nb\u001b[31m"}}"#;
    let mut client = Connection::open(addr).await;
    client
        .send(&post(call).header("mcp-session-id", "the-secret"))
        .await;
    let mut asked = upstream.asked().await;
    asked.stream().await;
    asked.chunk("data: {\"method\":\"a\"}\n\n").await;
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
        lines[0].contains("client gone, its call waits for it"),
        "{lines:?}"
    );
    assert!(
        lines[0].contains("tool=") && lines[0].contains("grace=100ms"),
        "{lines:?}"
    );
    assert!(lines[1].contains("call cancelled"), "{lines:?}");
    for line in &lines {
        assert!(
            !line.contains("the-secret") && !line.contains('\u{1b}'),
            "{line:?}"
        );
    }
    drop(program);
}

#[test]
fn help_names_every_option_and_shows_no_secret() {
    let mut command = Program::command(&["--help"]);
    command.env("MCP_PROXY_HEADER", "authorization: secret");
    let output = command.output().expect("it starts");
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
