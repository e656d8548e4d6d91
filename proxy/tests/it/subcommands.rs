//! Subcommands: a running proxy's health, the manual page, completions, and the version.

use std::{
    io::{Read as _, Write as _},
    net::TcpListener,
    process::{Command, Output, Stdio},
};

use crate::support::*;

const OPTIONS: &[&str] = &["upstream", "listen", "grace", "kill-after", "drain", "demo"];

fn output(mut command: Command) -> (Option<i32>, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().expect("the program starts");
    let text = [stdout, stderr].concat();
    (status.code(), String::from_utf8(text).expect("text"))
}

fn run(args: &[&str]) -> (Option<i32>, String) {
    output(Program::command(args))
}

/// Starts a program in front of a command, and returns the address of its port for operators.
fn start(options: &[&str]) -> (Program, String) {
    let args = [&["--listen=127.0.0.1:0"], options, &["--", "true"]].concat();
    let mut program = Program::start(Program::command(&args));
    loop {
        let line = program.line();
        assert!(!line.is_empty(), "the program has exited");
        if let Some((_, rest)) = line.split_once("calls on http://") {
            let (admin, _) = rest.split_once('/').expect("a path");
            return (program, admin.to_owned());
        }
    }
}

#[test]
fn health_is_0_while_the_proxy_runs_and_1_once_it_does_not() {
    let (program, admin) = start(&["--admin=127.0.0.1:0"]);
    let (code, text) = run(&["health", "--admin", &admin]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("200 OK"), "{text}");

    let mut by_variable = Program::command(&["health"]);
    by_variable.env("MCP_PROXY_ADMIN", &admin);
    let (code, text) = output(by_variable);
    assert_eq!(code, Some(0), "{text}");

    let path = std::env::temp_dir().join(format!("mcp-proxy-health-{}.toml", std::process::id()));
    std::fs::write(&path, format!("admin = \"{admin}\"\nlisten = \"8000\"\n")).expect("a file");
    let (code, text) = run(&["health", "--config", path.to_str().expect("text")]);
    std::fs::remove_file(&path).expect("the file exists");
    assert_eq!(code, Some(0), "{text}");

    // A listener on all addresses can be reached on loopback.
    let port = admin.rsplit_once(':').expect("a port").1;
    let (code, text) = run(&["health", &format!("--admin=0.0.0.0:{port}")]);
    assert_eq!(code, Some(0), "{text}");

    drop(program);
    let (code, text) = run(&["health", "--admin", &admin]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains(&admin), "{text}");
    assert!(text.contains("refused"), "the cause is missing: {text}");
}

#[test]
fn health_is_1_for_a_server_that_never_answers_or_answers_with_an_error() {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = silent.local_addr().expect("an address").to_string();
    let (code, text) = run(&["health", "--admin", &addr]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("no response within 3s"), "{text}");

    let served = std::thread::spawn(move || {
        // The first connection is the client's above.
        for stream in silent.incoming().take(2) {
            let mut stream = stream.expect("a connection");
            // An unread request would reset the connection. The first client has already disconnected.
            let _read = stream.read(&mut [0; 4096]);
            let answer = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n";
            let _ = stream.write_all(answer);
        }
    });
    let (code, text) = run(&["health", "--admin", &addr]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("503"), "{text}");
    served.join().expect("no panic");
}

#[test]
fn health_without_an_address_names_the_options_for_one() {
    let (code, text) = run(&["health"]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("MCP_PROXY_ADMIN"), "{text}");
    let (code, text) = run(&["health", "--upstream=http://127.0.0.1:1/"]);
    assert_eq!(code, Some(2), "{text}");
}

#[test]
fn the_manual_page_has_every_option_and_sub_command() {
    let mut command = Program::command(&["man"]);
    // A variable's value must not appear on the page.
    command.env("MCP_PROXY_HEADER", "x-key: s3cret");
    let (code, page) = output(command);
    assert_eq!(code, Some(0), "{page}");
    assert!(page.contains(".TH mcp-cancel-proxy 1"), "{page}");
    for option in OPTIONS {
        let escaped = option.replace('-', "\\-");
        assert!(
            page.contains(&format!("\\-\\-{escaped}")),
            "{option}: {page}"
        );
    }
    for text in [
        "MCP_PROXY_UPSTREAM",
        "health",
        "completions",
        "cancels orphaned calls",
    ] {
        assert!(page.contains(text), "{text}: {page}");
    }
    assert!(!page.contains("s3cret"), "{page}");
}

#[test]
fn completions_know_every_option_and_the_shell_accepts_them() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let (code, script) = run(&["completions", shell]);
        assert_eq!(code, Some(0), "{shell}: {script}");
        for option in OPTIONS {
            assert!(script.contains(option), "{shell}, {option}: {script}");
        }
    }
    let (_, script) = run(&["completions", "bash"]);
    let mut bash = Command::new("bash");
    let complete = r#"
        source /dev/stdin
        [[ $(complete -p mcp-cancel-proxy) =~ -F\ ([^ ]+) ]]
        COMP_WORDS=(mcp-cancel-proxy --kill) COMP_CWORD=1
        "${BASH_REMATCH[1]}" mcp-cancel-proxy --kill mcp-cancel-proxy
        echo "${COMPREPLY[@]}""#;
    let child = bash.args(["-c", complete]).stdin(Stdio::piped());
    let mut child = child.stdout(Stdio::piped()).spawn().expect("bash");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(script.as_bytes()).expect("bash is reading");
    drop(stdin);
    let output = child.wait_with_output().expect("bash exits");
    assert_eq!(
        String::from_utf8_lossy(&output.stdout).trim(),
        "--kill-after"
    );
}

#[test]
fn the_help_lists_the_sub_commands() {
    let (code, help) = run(&["--help"]);
    assert_eq!(code, Some(0), "{help}");
    for text in ["health", "man", "completions", "-- <COMMAND>...", "--demo"] {
        assert!(help.contains(text), "{text}: {help}");
    }
    let (code, help) = run(&["health", "--help"]);
    assert_eq!(code, Some(0), "{help}");
    assert!(help.contains("--admin <ADDRESS>"), "{help}");
}

#[test]
fn a_server_may_have_the_name_of_a_sub_command() {
    let folder = std::env::temp_dir().join(format!("mcp-proxy-names-{}", std::process::id()));
    std::fs::create_dir(&folder).expect("a folder");
    for name in ["health", "man", "completions"] {
        std::os::unix::fs::symlink("/bin/true", folder.join(name)).expect("a link");
        let mut command = Program::command(&["--listen=127.0.0.1:0", "--", name]);
        command.env("PATH", &folder);
        let line = Program::start(command).line();
        assert!(line.contains(&format!("in front of `{name}`")), "{line}");
    }
    std::fs::remove_dir_all(&folder).expect("the folder exists");
    // Only the first argument can be a subcommand.
    let (code, text) = run(&["--upstream=http://127.0.0.1:1/", "health"]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("a command must follow `--`"), "{text}");
}

#[test]
fn the_version_has_the_platform_and_the_features() {
    let (code, text) = run(&["--version"]);
    assert_eq!(code, Some(0), "{text}");
    let start = format!("mcp-cancel-proxy {} (", env!("CARGO_PKG_VERSION"));
    assert!(text.starts_with(&start), "{text}");
    for part in [
        std::env::consts::ARCH,
        std::env::consts::OS,
        "features: program",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(text.lines().count(), 1, "{text}");
}
