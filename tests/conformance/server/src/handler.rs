//! The handler: its capabilities, and the requests that are neither tools nor prompts.

#![expect(
    deprecated,
    reason = "the suite tests logging and subscriptions, which SEP-2577 deprecates"
)]

use std::{
    fmt::Display,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
};

use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    handler::server::router::{prompt::PromptRouter, tool::ToolRouter},
    model::{
        CompleteRequestParams, CompleteResult, CompletionInfo, ListResourceTemplatesResult,
        ListResourcesResult, LoggingLevel, PaginatedRequestParams, ReadResourceRequestParams,
        ReadResourceResponse, ReadResourceResult, ServerCapabilities, ServerConfig,
        SetLevelRequestParams, SubscribeRequestParams, UnsubscribeRequestParams,
    },
    prompt_handler,
    service::RequestContext,
    tool_handler,
};

use crate::resources;

/// Each session has its own.
#[derive(Clone)]
pub(crate) struct Conformance {
    tool_router: ToolRouter<Self>,
    prompt_router: PromptRouter<Self>,
    /// The lowest [`LoggingLevel`] that is sent.
    level: Arc<AtomicU8>,
}

pub(crate) fn internal(error: impl Display) -> ErrorData {
    ErrorData::internal_error(error.to_string(), None)
}

// === impl Conformance ===

impl Conformance {
    pub(crate) fn new() -> Self {
        Self {
            tool_router: Self::tools() + Self::asking_tools(),
            prompt_router: Self::prompts(),
            level: Arc::new(AtomicU8::new(LoggingLevel::Info as u8)),
        }
    }

    /// Returns `true` if messages of this level are sent.
    pub(crate) fn logs(&self, level: LoggingLevel) -> bool {
        level as u8 >= self.level.load(Ordering::Relaxed)
    }
}

#[tool_handler(router = self.tool_router)]
#[prompt_handler(router = self.prompt_router)]
impl ServerHandler for Conformance {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder()
            .enable_tools()
            .enable_prompts()
            .enable_resources()
            .enable_resources_subscribe()
            .enable_completions()
            .enable_logging()
            .build();
        ServerConfig::new(capabilities)
    }

    async fn set_level(
        &self,
        request: SetLevelRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.level.store(request.level as u8, Ordering::Relaxed);
        Ok(())
    }

    async fn complete(
        &self,
        request: CompleteRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<CompleteResult, ErrorData> {
        let values = ["paris", "park", "party", "test"];
        let typed = &request.argument.value;
        let fitting = values.into_iter().filter(|value| value.starts_with(typed));
        let fitting = fitting.map(str::to_owned).collect();
        let completion = CompletionInfo::with_all_values(fitting).map_err(internal)?;
        Ok(CompleteResult::new(completion))
    }

    async fn list_resources(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        Ok(ListResourcesResult::with_all_items(resources::list()))
    }

    async fn list_resource_templates(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        let templates = resources::templates();
        Ok(ListResourceTemplatesResult::with_all_items(templates))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let contents = resources::read(&request.uri);
        let contents = contents.ok_or_else(|| ErrorData::resource_not_found(request.uri, None))?;
        Ok(ReadResourceResult::new(vec![contents]).into())
    }

    /// Resources never change, so subscriptions are not stored.
    async fn subscribe(
        &self,
        _: SubscribeRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        Ok(())
    }

    async fn unsubscribe(
        &self,
        _: UnsubscribeRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        Ok(())
    }
}
