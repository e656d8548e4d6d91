//! A scripted server on stdin and stdout, for the demo and for tests.
//!
//! It is a hidden sub-command ([`COMMAND`]), so that the demo needs no other program. Its arguments determine its overall
//! behaviour, and the tool that a call specifies determines what it does for that call. It logs what its tools do, because a
//! disconnected client cannot observe that.

use std::{
    collections::HashMap,
    ffi::OsString,
    fs::OpenOptions,
    io::{self, BufRead as _, Write as _},
    path::PathBuf,
    process::{Command, ExitCode, Stdio},
    sync::{
        Arc, Mutex,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use mcp_cancel_proxy::lock::lock;
use serde::Deserialize;
use serde_json::{Value, json, value::RawValue};
use tokio::signal::unix::{SignalKind, signal};

/// Writes a line to standard error, ignoring errors.
macro_rules! print_error {
    ($($text:tt)*) => {{
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}

/// The hidden sub-command that runs the server.
pub(super) const COMMAND: &str = "scripted-server";

/// The argument that makes a process do nothing but wait.
const HOLD: &str = "--hold";

/// How often a tool reports progress.
const STEP: Duration = Duration::from_millis(100);

/// How the server behaves, as set by its arguments.
#[derive(Debug, Default)]
struct Behaviour {
    /// `--notes FILE`: the file in which it logs what its tools do.
    tool_log: Option<PathBuf>,
    /// `--chatter`: it prints non-message lines before reading anything.
    chatters: bool,
    /// `--deaf`: it never reads.
    is_deaf: bool,
    /// `--crash`: it exits before reading anything.
    crashes: bool,
    /// `--stubborn`: it ignores SIGTERM and the end of its stdin.
    is_stubborn: bool,
}

/// The state shared by the server's threads.
struct Server {
    behaviour: Behaviour,
    stdout: Mutex<io::Stdout>,
    /// The cancellable calls, by the text of their ids.
    calls: Mutex<HashMap<String, mpsc::Sender<()>>>,
    /// The server's pending requests to the client, by the text of their ids.
    questions: Mutex<HashMap<String, mpsc::Sender<String>>>,
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    method: Option<String>,
    #[serde(borrow)]
    params: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
struct Params<'a> {
    name: Option<String>,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
    #[serde(borrow, rename = "requestId")]
    request_id: Option<&'a RawValue>,
    #[serde(rename = "protocolVersion")]
    revision: Option<String>,
    #[serde(default, rename = "_meta")]
    meta: Meta,
}

#[derive(Default, Deserialize)]
struct Meta {
    #[serde(rename = "progressToken")]
    token: Option<Value>,
}

/// The arguments for all tools. Each tool ignores the arguments it does not need.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Arguments {
    seconds: f64,
    ignores_cancel: bool,
    label: String,
    code: i32,
    lines: usize,
    length: usize,
    text: String,
}

/// One call to a tool.
struct Call {
    id: String,
    token: Option<Value>,
    arguments: Arguments,
    /// The arguments as JSON text.
    raw: String,
    cancelled: mpsc::Receiver<()>,
}

/// Runs the server until its stdin ends. Must be called in a Tokio runtime.
///
/// Returns early for an unknown argument and with `--crash`. Never returns with `--deaf`, `--stubborn` or `--hold`.
pub(super) fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let mut behaviour = Behaviour::default();
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        match argument.to_str() {
            Some("--notes") => behaviour.tool_log = arguments.next().map(PathBuf::from),
            Some("--chatter") => behaviour.chatters = true,
            Some("--deaf") => behaviour.is_deaf = true,
            Some("--crash") => behaviour.crashes = true,
            Some("--stubborn") => behaviour.is_stubborn = true,
            Some(HOLD) => wait_forever(),
            _ => {
                print_error!("{COMMAND}: unknown argument {}", argument.display());
                return ExitCode::FAILURE;
            }
        }
    }
    // Handle SIGTERM, so that it does not end the process.
    let _listening = behaviour
        .is_stubborn
        .then(|| signal(SignalKind::terminate()));
    match Server::new(behaviour).serve() {
        Ok(code) => code,
        Err(error) => {
            print_error!("{COMMAND}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn wait_forever() -> ! {
    loop {
        thread::park();
    }
}

// === impl Server ===

impl Server {
    fn new(behaviour: Behaviour) -> Arc<Self> {
        Arc::new(Self {
            behaviour,
            stdout: Mutex::new(io::stdout()),
            calls: Mutex::default(),
            questions: Mutex::default(),
        })
    }

    fn serve(self: Arc<Self>) -> io::Result<ExitCode> {
        self.log("begun", "");
        if self.behaviour.chatters {
            self.write(b"Starting the server...\n\xff\xfe not text\n{\"half\": \n\n")?;
        }
        if self.behaviour.crashes {
            print_error!("crashing as requested");
            return Ok(ExitCode::from(7));
        }
        if self.behaviour.is_deaf {
            wait_forever();
        }
        for line in io::stdin().lock().split(b'\n') {
            self.receive(&line?)?;
        }
        if self.behaviour.is_stubborn {
            wait_forever();
        }
        Ok(ExitCode::SUCCESS)
    }

    fn receive(self: &Arc<Self>, line: &[u8]) -> io::Result<()> {
        let Ok(message) = serde_json::from_slice::<Message<'_>>(line) else {
            print_error!("not a message: {}", line.escape_ascii());
            return Ok(());
        };
        let params: Params<'_> = message
            .params
            .and_then(|params| serde_json::from_str(params.get()).ok())
            .unwrap_or_default();
        let id = message.id.map(|id| id.get().to_owned());
        match (message.method.as_deref(), id) {
            (None, Some(id)) => {
                let question = lock(&self.questions).remove(&id);
                if let Some(asker) = question {
                    // Fails if the tool is no longer waiting.
                    let _ = asker.send(String::from_utf8_lossy(line).into_owned());
                }
                Ok(())
            }
            (Some("initialize"), Some(id)) => {
                let revision = params.revision.unwrap_or_else(|| "2025-11-25".into());
                let info = json!({ "name": COMMAND, "version": env!("CARGO_PKG_VERSION") });
                let result = json!({ "protocolVersion": revision, "capabilities": { "tools": {}, "logging": {} }, "serverInfo": info });
                self.answer(&id, &result.to_string())
            }
            (Some("tools/list"), Some(id)) => {
                let tools = [
                    "work", "echo", "ask", "say", "notify", "chat", "fork", "pid", "exit", "abort",
                ];
                let tools: Vec<_> = tools
                    .iter()
                    .map(|name| json!({ "name": name, "inputSchema": { "type": "object" } }))
                    .collect();
                self.answer(&id, &json!({ "tools": tools }).to_string())
            }
            (Some("tools/call"), Some(id)) => {
                self.call(id, params);
                Ok(())
            }
            (Some("notifications/cancelled"), None) => {
                let id = params.request_id.map(RawValue::get).unwrap_or_default();
                let call = lock(&self.calls).remove(id);
                if let Some(call) = call {
                    // Fails if the call has ended.
                    let _ = call.send(());
                }
                Ok(())
            }
            (Some("ping"), Some(id)) => self.answer(&id, "{}"),
            (Some(_), Some(id)) => {
                let error = json!({ "code": -32601, "message": "Method not found" });
                self.line(&format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#))
            }
            (_, None) => Ok(()),
        }
    }

    fn call(self: &Arc<Self>, id: String, params: Params<'_>) {
        let (cancel, cancelled) = mpsc::channel();
        lock(&self.calls).insert(id.clone(), cancel);
        let raw = params.arguments.map_or("{}", RawValue::get).to_owned();
        let call = Call {
            token: params.meta.token,
            arguments: serde_json::from_str(&raw).unwrap_or_default(),
            raw,
            cancelled,
            id,
        };
        let (server, name) = (self.clone(), params.name.unwrap_or_default());
        thread::spawn(move || {
            let done = server.tool(&name, &call);
            lock(&server.calls).remove(&call.id);
            if let Err(error) = done {
                print_error!("{name}: {error}");
            }
        });
    }

    fn tool(&self, name: &str, call: &Call) -> io::Result<()> {
        let arguments = &call.arguments;
        match name {
            "work" => return self.work(call),
            "echo" => return self.answer(&call.id, &call.raw),
            "ask" => return self.ask(call),
            // Prints the text as a line, or, if a length is given, a line of that length instead.
            "say" => match arguments.length {
                0 => self.line(&arguments.text)?,
                length => self.line(&"x".repeat(length))?,
            },
            "notify" => {
                for line in 0..arguments.lines {
                    let params = json!({ "level": "info", "data": line });
                    self.line(&json!({ "jsonrpc": "2.0", "method": "notifications/message", "params": params }).to_string())?;
                }
            }
            "chat" => {
                for line in 0..arguments.lines {
                    print_error!("line {line} {}", "x".repeat(arguments.length));
                }
            }
            "fork" => {
                let program = std::env::current_exe()?;
                let process = Command::new(program)
                    .args([COMMAND, HOLD])
                    .stdin(Stdio::null())
                    .spawn()?;
                return self.text(&call.id, &process.id().to_string());
            }
            "pid" => return self.text(&call.id, &std::process::id().to_string()),
            "exit" => std::process::exit(arguments.code),
            "abort" => std::process::abort(),
            _ => return self.text(&call.id, "there is no such tool"),
        }
        self.text(&call.id, "done")
    }

    /// Works for a while. If cancelled, stops without an answer, unless the call ignores cancellation.
    ///
    /// Reports progress if the call has a progress token.
    fn work(&self, call: &Call) -> io::Result<()> {
        let Arguments {
            seconds,
            ignores_cancel,
            ref label,
            ..
        } = call.arguments;
        self.log("started", label);
        let total = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let mut worked = Duration::ZERO;
        while worked < total {
            let step = STEP.min(total - worked);
            match call.cancelled.recv_timeout(step) {
                Ok(()) if !ignores_cancel => {
                    self.log("cancelled", label);
                    return Ok(());
                }
                Ok(()) => self.log("told", label),
                Err(RecvTimeoutError::Timeout) => worked += step,
                // The sender has been dropped, so no cancellation can follow.
                Err(RecvTimeoutError::Disconnected) => {
                    thread::park_timeout(step);
                    worked += step;
                }
            }
            if let Some(token) = &call.token {
                let params = json!({ "progressToken": token, "progress": worked.as_secs_f64(), "total": seconds });
                self.line(&json!({ "jsonrpc": "2.0", "method": "notifications/progress", "params": params }).to_string())?;
            }
        }
        self.log("finished", label);
        self.text(&call.id, &format!("worked for {seconds} s: {label}"))
    }

    /// Sends a request to the client, and answers the call with the client's answer.
    ///
    /// If the client does not answer within 30 s, the call's answer reports this.
    fn ask(&self, call: &Call) -> io::Result<()> {
        let (asker, answers) = mpsc::channel();
        let id = format!("{:?}", format!("asked for {}", call.id.trim_matches('"')));
        lock(&self.questions).insert(id.clone(), asker);
        let method = &call.arguments.text;
        self.line(&format!(
            r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{{}}}}"#
        ))?;
        match answers.recv_timeout(Duration::from_secs(30)) {
            Ok(answer) => self.text(&call.id, &answer),
            Err(_) => self.text(&call.id, "no client answered"),
        }
    }

    fn text(&self, id: &str, text: &str) -> io::Result<()> {
        let content = json!({ "content": [{ "type": "text", "text": text }] });
        self.answer(id, &content.to_string())
    }

    fn answer(&self, id: &str, result: &str) -> io::Result<()> {
        self.line(&format!(
            r#"{{"jsonrpc":"2.0","id":{id},"result":{result}}}"#
        ))
    }

    fn line(&self, text: &str) -> io::Result<()> {
        self.write(format!("{text}\n").as_bytes())
    }

    fn write(&self, bytes: &[u8]) -> io::Result<()> {
        let mut stdout = lock(&self.stdout);
        stdout.write_all(bytes)?;
        stdout.flush()
    }

    /// Logs a line: time in milliseconds, process id, event, and the call's label.
    ///
    /// Does nothing without `--notes`.
    fn log(&self, event: &str, label: &str) {
        let Some(path) = &self.behaviour.tool_log else {
            return;
        };
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let line = format!(
            "{} {} {event} {label}\n",
            now.as_millis(),
            std::process::id()
        );
        let file = OpenOptions::new().create(true).append(true).open(path);
        let written = file.and_then(|mut file| file.write_all(line.as_bytes()));
        if let Err(error) = written {
            print_error!("{}: {error}", path.display());
        }
    }
}
