//! The tools that need no response from the client. The others are in [`ask`](crate::ask).

#![expect(
    deprecated,
    reason = "the suite tests logging, which SEP-2577 deprecates"
)]

use std::{sync::Arc, time::Duration};

use rmcp::{
    ErrorData, RoleServer,
    model::{
        CallToolResult, ContentBlock, JsonObject, LoggingLevel, LoggingMessageNotificationParam,
        ProgressNotificationParam, ResourceContents,
    },
    object,
    service::RequestContext,
    tool, tool_router,
};
use tokio::time::sleep;

use crate::{
    handler::{Conformance, internal},
    sample::{PNG, WAV},
    sessions::OwnStream,
};

/// How long a tool pauses between two messages.
const PAUSE: Duration = Duration::from_millis(50);

/// The reconnect delay that `test_reconnection` sends. The suite ignores it and resumes immediately.
const RETRY: Duration = Duration::from_millis(500);

/// How long `test_reconnection` works on after its stream has ended. This is longer than the suite takes to resume,
/// because rmcp loses an answer if no client is connected.
const WORK: Duration = Duration::from_secs(3);

#[tool_router(router = tools, vis = "pub(crate)")]
impl Conformance {
    #[tool(description = "Returns text")]
    async fn test_simple_text(&self) -> CallToolResult {
        text("This is a simple text response for testing.")
    }

    #[tool(description = "Returns an image")]
    async fn test_image_content(&self) -> CallToolResult {
        CallToolResult::success(vec![ContentBlock::image(PNG, "image/png")])
    }

    #[tool(description = "Returns audio")]
    async fn test_audio_content(&self) -> CallToolResult {
        CallToolResult::success(vec![ContentBlock::audio(WAV, "audio/wav")])
    }

    #[tool(description = "Returns an embedded resource")]
    async fn test_embedded_resource(&self) -> CallToolResult {
        let uri = "test://embedded-resource";
        let resource = ResourceContents::text("This is an embedded resource content.", uri)
            .with_mime_type("text/plain");
        CallToolResult::success(vec![ContentBlock::resource(resource)])
    }

    #[tool(description = "Returns text, an image and a resource")]
    async fn test_multiple_content_types(&self) -> CallToolResult {
        let uri = "test://mixed-content-resource";
        let resource = ResourceContents::text(r#"{"test":"data","value":123}"#, uri)
            .with_mime_type("application/json");
        CallToolResult::success(vec![
            ContentBlock::text("Multiple content types test:"),
            ContentBlock::image(PNG, "image/png"),
            ContentBlock::resource(resource),
        ])
    }

    #[tool(description = "Always fails")]
    async fn test_error_handling(&self) -> CallToolResult {
        let message = "This tool intentionally returns an error for testing";
        CallToolResult::error(vec![ContentBlock::text(message)])
    }

    #[tool(description = "Sends three log messages")]
    async fn test_tool_with_logging(
        &self,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResult, ErrorData> {
        self.log(&context, "Tool execution started").await?;
        sleep(PAUSE).await;
        self.log(&context, "Tool processing data").await?;
        sleep(PAUSE).await;
        self.log(&context, "Tool execution completed").await?;
        Ok(text("Tool with logging executed successfully"))
    }

    #[tool(description = "Reports its progress three times")]
    async fn test_tool_with_progress(
        &self,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResult, ErrorData> {
        let token = context.meta.get_progress_token();
        for progress in [0.0, 50.0, 100.0] {
            if progress > 0.0 {
                sleep(PAUSE).await;
            }
            if let Some(token) = &token {
                let report = ProgressNotificationParam::new(token.clone(), progress);
                let sent = context.peer.notify_progress(report.with_total(100.0)).await;
                sent.map_err(internal)?;
            }
        }
        Ok(text("Tool with progress executed successfully"))
    }

    #[tool(description = "Ends its stream, keeps running, and answers the client that resumed")]
    async fn test_reconnection(
        &self,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResult, ErrorData> {
        let stream = context.extensions.get::<OwnStream>();
        let stream = stream.ok_or_else(|| internal("a call without a stream"))?;
        stream.end(RETRY).await.map_err(internal)?;
        if context.ct.run_until_cancelled(sleep(WORK)).await.is_none() {
            return Err(internal("cancelled"));
        }
        Ok(text("Reconnection test completed successfully"))
    }

    #[tool(
        description = "Tool with JSON Schema 2020-12 features",
        input_schema = json_schema_2020_12()
    )]
    async fn json_schema_2020_12_tool(&self) -> CallToolResult {
        text("JSON Schema 2020-12 tool called")
    }

    async fn log(
        &self,
        context: &RequestContext<RoleServer>,
        message: &str,
    ) -> Result<(), ErrorData> {
        if !self.logs(LoggingLevel::Info) {
            return Ok(());
        }
        let message = LoggingMessageNotificationParam::new(LoggingLevel::Info, message.into());
        let sent = context.peer.notify_logging_message(message).await;
        sent.map_err(internal)
    }
}

pub(crate) fn text(text: impl Into<String>) -> CallToolResult {
    CallToolResult::success(vec![ContentBlock::text(text)])
}

fn json_schema_2020_12() -> Arc<JsonObject> {
    Arc::new(object!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": {
            "address": {
                "type": "object",
                "properties": {
                    "street": { "type": "string" },
                    "city": { "type": "string" },
                },
            },
        },
        "properties": {
            "name": { "type": "string" },
            "address": { "$ref": "#/$defs/address" },
        },
        "additionalProperties": false,
    }))
}
