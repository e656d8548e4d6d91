use super::*;

const HTTP: [&str; 2] = ["mcp-cancel-proxy", "--upstream=http://127.0.0.1:9000/mcp"];

/// Assumes that none of the program's variables are set in the tests' environment.
fn read(args: &[&str]) -> Result<Config, ConfigError> {
    Config::read(args.iter().map(OsString::from))
}

fn with_option(option: &str) -> Result<Config, ConfigError> {
    read(&[HTTP[0], HTTP[1], option])
}

#[test]
fn options_have_their_documented_defaults() {
    let config = read(&HTTP).unwrap();
    assert_eq!(config.listen.to_string(), "127.0.0.1:8000");
    assert!(matches!(config.grace, Grace::Auto));
    assert_eq!(config.commit_after, Duration::from_secs(1));
    assert_eq!(config.buffer, 64 * 1024 * 1024);
    assert_eq!(config.keep_alive, Limit(Some(Duration::from_secs(15))));
    assert_eq!(config.stall_timeout, Limit(Some(Duration::from_secs(60))));
    assert_eq!(
        config.session_timeout,
        Limit(Some(Duration::from_secs(30 * 60)))
    );
    assert_eq!(config.lost_timeout, Limit(None));
    assert_eq!(
        (config.max_sessions, config.drain),
        (256, Duration::from_secs(8))
    );
    assert_eq!(
        (config.call_timeout, config.kill_after, config.admin),
        (None, None, None)
    );
}

#[test]
fn times_and_sizes_are_read_with_their_units() {
    for (text, expected) in [
        ("500ms", 500),
        ("20s", 20_000),
        ("1.5s", 1_500),
        ("30m", 30 * 60 * 1000),
        ("1h", 3_600_000),
    ] {
        assert_eq!(
            value::time(text).unwrap(),
            Duration::from_millis(expected),
            "{text}"
        );
    }
    for text in [
        "", "s", "20", "20 s", "-1s", "1d", "1e400s", "nans", "infs", "0s",
    ] {
        assert!(value::time(text).is_err(), "{text}");
    }
    for (text, expected) in [
        ("0", 0),
        ("7B", 7),
        ("512KiB", 512 << 10),
        ("1GiB", 1 << 30),
    ] {
        assert_eq!(value::size(text).unwrap(), expected, "{text}");
    }
    for text in ["", "MiB", "1MB", "-1", "1.5MiB", "99999999999GiB"] {
        assert!(value::size(text).is_err(), "{text}");
    }
    assert_eq!(value::limit("off").unwrap(), Limit(None));
}

#[test]
fn a_command_and_an_upstream_exclude_each_other() {
    let config = read(&[HTTP[0], "--env=A=b=c", "--", "npx", "--upstream", "x"]).unwrap();
    let Target::Command(command) = config.target() else {
        panic!("{config:?}");
    };
    assert_eq!(command, ["npx", "--upstream", "x"]);
    assert_eq!(config.env, [("A".to_owned(), "b=c".to_owned())]);
    for invalid in [
        &[HTTP[0]][..],
        &[HTTP[0], HTTP[1], "--", "npx"],
        &[HTTP[0], HTTP[1], "--cwd=/"],
        &[HTTP[0], HTTP[1], "--env=A=b"],
        &[HTTP[0], HTTP[1], "--max-sessions=256"],
        &[HTTP[0], HTTP[1], "--session-timeout=30m"],
        &[HTTP[0], HTTP[1], "--lost-timeout=2m"],
        &[HTTP[0], "--header=a: b", "--", "npx"],
        &[HTTP[0], "--commit-after=1s", "--", "npx"],
        &[HTTP[0], "--no-resumable", "--", "npx"],
        &[HTTP[0], "--public-url=https://a.example", "--", "npx"],
        &[HTTP[0], "--trust-forwarded=10.0.0.1", "--", "npx"],
        &[HTTP[0], HTTP[1], "--public-url=https://a.example/other"],
        &[HTTP[0], "--ready-upstream", "--admin=1", "--", "npx"],
        &[HTTP[0], HTTP[1], "--ready-upstream"],
        &[HTTP[0], HTTP[1], "--admin-token=0123456789abcdef"],
    ] {
        assert!(
            matches!(read(invalid), Err(ConfigError::Usage(_))),
            "{invalid:?}"
        );
    }
}

#[test]
fn a_token_must_be_long_and_fit_in_a_header_and_is_never_shown() {
    let read = |token: &str| {
        let token = format!("--admin-token={token}");
        read(&[HTTP[0], HTTP[1], "--admin=9090", &token])
    };
    let config = read("0123456789abcdef+/==").unwrap();
    let token = config.operators.admin_token.clone().unwrap();
    assert!(token.is("0123456789abcdef+/=="));
    assert!(!token.is("0123456789abcdef+/=") && !token.is("") && !token.is("0123456789abcdeg+/=="));
    assert!(!format!("{token:?}{config:?}").contains("0123"));
    for invalid in [
        "s3cret",
        "s3cret 0123456789abcdef",
        "s3cret=0123456789abcdef",
        "s3cretäöü0123456789",
    ] {
        let error = read(invalid).unwrap_err().to_string();
        assert!(
            error.contains("for '--admin-token <TOKEN>': a token") && !error.contains("s3cret"),
            "{error}"
        );
    }
}

#[test]
fn listening_to_other_machines_requires_a_host_name() {
    for local in ["--listen=127.0.0.2:0", "--listen=[::1]:0"] {
        assert!(with_option(local).is_ok(), "{local}");
    }
    for open in [
        "--listen=0.0.0.0:0",
        "--listen=[::]:0",
        "--listen=192.0.2.1:0",
    ] {
        assert!(with_option(open).is_err(), "{open}");
        assert!(read(&[HTTP[0], HTTP[1], open, "--allow-host=mcp.example.com"]).is_ok());
    }
}

#[test]
fn lists_may_have_several_values_and_a_grace_names_its_tool() {
    let config = with_option("--exempt=a,b").unwrap();
    assert_eq!(config.exempt, ["a", "b"]);
    let config = with_option("--tool-grace=a=b=1h,c=never").unwrap();
    let graces = config.tool_grace.iter().map(|(tool, _)| &**tool);
    assert_eq!(graces.collect::<Vec<_>>(), ["a=b", "c"]);
    let config = with_option("--header=Authorization: Bearer a: b").unwrap();
    assert_eq!(config.header[0].0, "authorization");
    assert_eq!(config.header[0].1, "Bearer a: b");
}

#[test]
fn an_upstream_may_have_a_port_or_none() {
    for upstream in [
        "http://a/mcp",
        "http://a:9000/mcp",
        "https://[::1]:9000",
        "http://[::1]/mcp",
    ] {
        let option = format!("--upstream={upstream}");
        assert!(read(&[HTTP[0], &option]).is_ok(), "{upstream}");
    }
    assert!(with_option("--allow-host=[::1]:80,[::1],a.example").is_ok());
}

#[test]
fn no_secret_is_in_the_debug_text() {
    let config = read(&[
        HTTP[0],
        "--header=Authorization: Bearer secret-1",
        "--upstream=http://127.0.0.1:9000/mcp?key=secret-2",
    ]);
    let command = read(&[HTTP[0], "--env=KEY=secret-3", "--", "server", "secret-4"]);
    for config in [config, command] {
        let text = format!("{:?}", config.unwrap());
        assert!(!text.contains("secret"), "{text}");
        assert!(text.contains("127.0.0.1:8000"), "{text}");
    }
}

#[test]
fn blanks_around_the_values_of_a_list_are_removed() {
    let config = with_option("--exempt=a, b ").unwrap();
    assert_eq!(config.exempt, ["a", "b"]);
    let config = with_option("--tool-grace=a = 1h, b=always=2h").unwrap();
    let (hour, hours) = (Duration::from_secs(3600), Duration::from_secs(7200));
    let expected = [("a", Grace::AutoAfter(hour)), ("b", Grace::After(hours))];
    let expected = expected.map(|(tool, grace)| (tool.to_owned(), grace));
    assert_eq!(config.tool_grace, expected);
    let config = with_option("--allow-host=a.example, B.example:81").unwrap();
    assert_eq!(config.allow_host, ["a.example", "b.example:81"]);
    let config = with_option("--allow-origin=https://a.example:443/, http://b.example:81").unwrap();
    let expected = ["https://a.example", "http://b.example:81"];
    assert_eq!(config.allow_origin, expected);
}

#[test]
fn variables_headers_and_graces_may_be_tables_of_a_file() {
    let path = std::env::temp_dir().join(format!("mcp-proxy-tables-{}.toml", std::process::id()));
    let file = format!("--config={}", path.display());
    let read_file = |text| {
        std::fs::write(&path, text).unwrap();
        let read_file = read(&[HTTP[0], &file]);
        std::fs::remove_file(&path).unwrap();
        read_file
    };
    let tables = "command = [\"x\"]\n[env]\nA = \"b=c\"\nN = 1\n[tool-grace]\n\"a=b\" = \"1h\"\n";
    let config = read_file(tables).unwrap();
    let expected = [("A", "b=c"), ("N", "1")];
    let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(config.env, expected);
    assert_eq!(config.tool_grace[0].0, "a=b");
    let header = "upstream = \"http://a/\"\nheader.authorization = \"Bearer a: b\"\n";
    assert_eq!(read_file(header).unwrap().header[0].1, "Bearer a: b");
    let invalid = read_file("upstream = \"http://a/\"\nexempt.a = \"b\"\n");
    let text = invalid.unwrap_err().to_string();
    assert!(text.contains("`exempt` is not a table"), "{text}");
}

#[test]
fn a_file_may_have_every_kind_of_value() {
    let path = std::env::temp_dir().join(format!("mcp-cancel-proxy-{}.toml", std::process::id()));
    let text = "command = [\"npx\", \"--yes\", \"a server\"]\nno-resumable = false\nmax-sessions = 5\n\
                exempt = [\"a\", \"b\"]\n# a comment\nenv = \"A=b\"\n";
    std::fs::write(&path, text).unwrap();
    let file = format!("--config={}", path.display());
    let config = read(&[HTTP[0], &file, "--max-sessions=6"]);
    // A server on the command line replaces the one in the file.
    let other = read(&[HTTP[0], &file, "--env=A=c", "--", "uvx"]);
    std::fs::write(&path, "upstream = \"http://a/\"\nno-resumable = true\n").unwrap();
    let upstream = read(&[HTTP[0], &file]);
    std::fs::remove_file(&path).unwrap();
    let config = config.unwrap();
    assert_eq!(config.command, ["npx", "--yes", "a server"]);
    assert!(!config.no_resumable && upstream.unwrap().no_resumable);
    assert_eq!(config.max_sessions, 6, "the flag overrides the file");
    assert_eq!(config.exempt, ["a", "b"]);
    let other = other.unwrap();
    assert_eq!(other.command, ["uvx"]);
    assert_eq!(other.env, [("A".to_owned(), "c".to_owned())]);
}

#[test]
fn every_option_is_documented_and_has_its_variable() {
    for arg in Config::command().get_arguments() {
        let Some(name) = arg
            .get_long()
            .filter(|name| !["demo", "help", "version"].contains(name) && !arg.is_hide_set())
        else {
            continue;
        };
        assert!(arg.get_help().is_some(), "{name}");
        let variable = format!("MCP_PROXY_{}", name.to_uppercase().replace('-', "_"));
        assert_eq!(arg.get_env().and_then(|env| env.to_str()), Some(&*variable));
    }
}

/// Returns each option with its help, as the rows of the table in the README.
fn rows() -> Vec<String> {
    let mut command = Config::command();
    command.build();
    let options = command.get_arguments().filter_map(|arg| {
        let name = arg
            .get_long()
            .filter(|name| !["help", "version"].contains(name) && !arg.is_hide_set())?;
        let value = match (arg.get_action().takes_values(), arg.get_value_names()) {
            (true, Some([value, ..])) => format!(" <{value}>"),
            _ => String::new(),
        };
        let default = match arg.get_default_values() {
            [value] if arg.get_action().takes_values() => format!("`{}` ", value.display()),
            _ => String::new(),
        };
        let help = arg.get_help()?.to_string();
        Some(format!("| `--{name}{value}` | {default}| {help} |"))
    });
    options.collect()
}

#[test]
fn the_readme_has_every_option_with_its_help_text() {
    let readme = include_str!("../../README.md");
    let table = rows().join("\n");
    let head = "| option | default | what |\n|---|---|---|";
    assert!(
        readme.contains(&format!("{head}\n{table}\n\n")),
        "README.md should have:\n{head}\n{table}\n"
    );
}

#[test]
fn a_number_in_a_file_has_its_toml_value() {
    let path = std::env::temp_dir().join(format!("mcp-proxy-radix-{}.toml", std::process::id()));
    for (text, expected) in [
        ("4194304", 4 << 20),
        ("4_194_304", 4 << 20),
        ("0x400000", 4 << 20),
        ("0b10000000000000000000000", 4 << 20),
    ] {
        std::fs::write(&path, format!("buffer = {text}\n")).unwrap();
        let config = read(&[HTTP[0], HTTP[1], &format!("--config={}", path.display())]);
        assert_eq!(config.unwrap().buffer, expected, "{text}");
    }
    std::fs::remove_file(&path).unwrap();
}
