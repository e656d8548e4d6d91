//! A handler that records which of its methods are called.
//!
//! Every request and notification in the protocol is listed, too.

#![allow(
    deprecated,
    reason = "what rmcp has deprecated but still serves must reach the handler, too"
)]

use std::{
    borrow::Cow,
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
};

use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::*,
    service::{NotificationContext, RequestContext, SubscriptionContext},
};
use serde_json::{Value, json};

/// The error code with which every method in a [`Recorder`] ends.
pub(super) const RECORDED: i32 = 4_711;

/// The methods that have been called, and those dropped before they ended. All clones share the log.
#[derive(Clone, Default)]
pub(super) struct MethodLog(Arc<Mutex<Log>>);

#[derive(Default)]
struct Log {
    called: BTreeSet<&'static str>,
    dropped: BTreeSet<&'static str>,
}

/// A handler that either answers every request with an error of its own or never answers.
#[derive(Clone, Default)]
pub(super) struct Recorder {
    log: MethodLog,
    stuck: bool,
}

/// Records that its method has been dropped.
struct Guard(MethodLog, &'static str);

// === Requests and notifications ===

/// Returns every request in the protocol, along with the name of the method that handles it.
pub(super) fn requests() -> Vec<(&'static str, Value, &'static str)> {
    let page = || modern(json!({}));
    vec![
        ("initialize", json!(initialize()), "initialize"),
        ("ping", json!({}), "ping"),
        ("logging/setLevel", json!({ "level": "info" }), "set_level"),
        ("resources/subscribe", json!({ "uri": "a:b" }), "subscribe"),
        (
            "resources/unsubscribe",
            json!({ "uri": "a:b" }),
            "unsubscribe",
        ),
        ("server/discover", page(), "discover"),
        (
            "completion/complete",
            modern(json!({
                "ref": { "type": "ref/prompt", "name": "a" },
                "argument": { "name": "b", "value": "c" },
            })),
            "complete",
        ),
        ("prompts/get", modern(json!({ "name": "a" })), "get_prompt"),
        ("prompts/list", page(), "list_prompts"),
        ("resources/list", page(), "list_resources"),
        (
            "resources/templates/list",
            page(),
            "list_resource_templates",
        ),
        (
            "resources/read",
            modern(json!({ "uri": "a:b" })),
            "read_resource",
        ),
        (
            "resources/directory/read",
            modern(json!({ "uri": "skill://a" })),
            "read_resource_directory",
        ),
        (
            "subscriptions/listen",
            modern(json!({ "notifications": {} })),
            "listen",
        ),
        ("tools/call", modern(json!({ "name": "a" })), "call_tool"),
        ("tools/list", page(), "list_tools"),
        ("tasks/get", modern(json!({ "taskId": "a" })), "get_task"),
        (
            "tasks/update",
            modern(json!({ "taskId": "a", "inputResponses": {} })),
            "update_task",
        ),
        (
            "tasks/cancel",
            modern(json!({ "taskId": "a" })),
            "cancel_task",
        ),
        ("skills/list", page(), "list_skills"),
        (
            "skills/get",
            modern(json!({ "uri": "skill://a/SKILL.md" })),
            "get_skill",
        ),
        (
            "a/method/of/its/own",
            modern(json!({})),
            "on_custom_request",
        ),
    ]
}

/// Returns every notification in the protocol.
pub(super) fn notifications() -> Vec<(&'static str, Value)> {
    vec![
        ("notifications/cancelled", json!({ "requestId": 99 })),
        (
            "notifications/progress",
            json!({ "progressToken": 99, "progress": 1 }),
        ),
        ("notifications/initialized", json!({})),
        ("notifications/roots/list_changed", json!({})),
        ("notifications/of/its/own", json!({})),
    ]
}

/// Returns a request's parameters at revision 2026-07-28.
///
/// The client has all capabilities.
pub(super) fn modern(mut params: Value) -> Value {
    let capabilities = ClientCapabilities::builder().enable_tasks().build();
    params["_meta"] = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": capabilities,
    });
    params
}

pub(super) fn initialize() -> InitializeRequestParams {
    let client = Implementation::new("client", "0");
    InitializeRequestParams::new(ClientCapabilities::default(), client)
}

pub(super) fn versions() -> [ProtocolVersion; 2] {
    [ProtocolVersion::V_2025_11_25, ProtocolVersion::V_2026_07_28]
}

// === impl MethodLog ===

impl MethodLog {
    pub(super) fn names(&self) -> BTreeSet<String> {
        self.log(|log| log.called.iter().map(|name| (*name).to_owned()).collect())
    }

    pub(super) fn has_started(&self, method: &'static str) -> bool {
        self.log(|log| log.called.contains(method))
    }

    pub(super) fn was_dropped(&self, method: &'static str) -> bool {
        self.log(|log| log.dropped.contains(method))
    }

    fn record(&self, method: &'static str) {
        self.log(|log| log.called.insert(method));
    }

    fn log<T>(&self, use_it: impl FnOnce(&mut Log) -> T) -> T {
        use_it(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

// === impl Recorder ===

impl Recorder {
    /// Returns a recorder whose requests never end.
    pub(super) fn stuck() -> Self {
        Self {
            stuck: true,
            ..Self::default()
        }
    }

    pub(super) fn log(&self) -> &MethodLog {
        &self.log
    }

    async fn end<T>(&self, method: &'static str) -> Result<T, ErrorData> {
        self.log.record(method);
        if self.stuck {
            let _guard = Guard(self.log.clone(), method);
            std::future::pending::<()>().await;
        }
        Err(ErrorData::new(ErrorCode(RECORDED), method, None))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.log(|log| log.dropped.insert(self.1));
    }
}

macro_rules! requests {
    ($($method:ident($($params:ty)?) -> $result:ty;)+) => {
        $(
            async fn $method(
                &self,
                $(_: $params,)?
                _: RequestContext<RoleServer>,
            ) -> Result<$result, ErrorData> {
                self.end(stringify!($method)).await
            }
        )+
    };
}

macro_rules! notifications {
    ($($method:ident($($params:ty)?);)+) => {
        $(
            async fn $method(&self, $(_: $params,)? _: NotificationContext<RoleServer>) {
                self.log.record(stringify!($method));
            }
        )+
    };
}

impl ServerHandler for Recorder {
    requests! {
        call_tool(CallToolRequestParams) -> CallToolResponse;
        cancel_task(CancelTaskParams) -> ();
        complete(CompleteRequestParams) -> CompleteResult;
        discover() -> DiscoverResult;
        get_prompt(GetPromptRequestParams) -> GetPromptResponse;
        get_skill(GetSkillRequestParams) -> GetSkillResult;
        get_task(GetTaskParams) -> GetTaskResult;
        initialize(InitializeRequestParams) -> InitializeResult;
        list_prompts(Option<PaginatedRequestParams>) -> ListPromptsResult;
        list_resource_templates(Option<PaginatedRequestParams>) -> ListResourceTemplatesResult;
        list_resources(Option<PaginatedRequestParams>) -> ListResourcesResult;
        list_skills(Option<PaginatedRequestParams>) -> ListSkillsResult;
        list_tools(Option<PaginatedRequestParams>) -> ListToolsResult;
        on_custom_request(CustomRequest) -> CustomResult;
        ping() -> ();
        read_resource(ReadResourceRequestParams) -> ReadResourceResponse;
        read_resource_directory(ReadResourceDirectoryRequestParams) -> ReadResourceDirectoryResult;
        set_level(SetLevelRequestParams) -> ();
        subscribe(SubscribeRequestParams) -> ();
        unsubscribe(UnsubscribeRequestParams) -> ();
        update_task(UpdateTaskParams) -> ();
    }

    notifications! {
        on_cancelled(CancelledNotificationParam);
        on_custom_notification(CustomNotification);
        on_initialized();
        on_progress(ProgressNotificationParam);
        on_roots_list_changed();
    }

    async fn listen(&self, _: SubscriptionContext) -> Result<(), ErrorData> {
        self.end("listen").await
    }

    fn accepted_subscription_filter(
        &self,
        requested: &SubscriptionFilter,
    ) -> Option<SubscriptionFilter> {
        self.log.record("accepted_subscription_filter");
        Some(requested.clone())
    }

    fn get_info(&self) -> ServerConfig {
        self.log.record("get_info");
        let capabilities = ServerCapabilities::builder()
            .enable_resources()
            .enable_tasks()
            .enable_skills_with_directory_read()
            .build();
        ServerConfig::new(capabilities).with_instructions("recorded")
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        self.log.record("get_tool");
        Some(Tool::new(name.to_owned(), "recorded", JsonObject::new()))
    }

    fn negotiate_initialize(
        &self,
        _: &InitializeRequestParams,
    ) -> Result<InitializeResult, ErrorData> {
        self.log.record("negotiate_initialize");
        Err(ErrorData::new(ErrorCode(RECORDED), "recorded", None))
    }

    fn supported_protocol_versions(&self) -> Cow<'static, [ProtocolVersion]> {
        self.log.record("supported_protocol_versions");
        Cow::Owned(versions().into())
    }
}
