//! The tools that send the client a request before they answer.

#![expect(
    deprecated,
    reason = "the suite tests sampling, which SEP-2577 deprecates"
)]

use rmcp::{
    ErrorData, RoleServer,
    handler::server::wrapper::Parameters,
    model::{
        CallToolResult, CreateMessageRequestParams, ElicitRequestParams, ElicitResult,
        ElicitationSchema, JsonObject, SamplingMessage,
    },
    object, schemars,
    service::RequestContext,
    tool, tool_router,
};
use serde::Deserialize;

use crate::{
    handler::{Conformance, internal},
    tools::text,
};

#[derive(Deserialize, schemars::JsonSchema)]
struct Sampling {
    /// The prompt to send to the LLM
    prompt: String,
}

#[derive(Deserialize, schemars::JsonSchema)]
struct Elicitation {
    /// The message to show the user
    message: String,
}

#[tool_router(router = asking_tools, vis = "pub(crate)")]
impl Conformance {
    #[tool(description = "Asks the client's LLM")]
    async fn test_sampling(
        &self,
        Parameters(Sampling { prompt }): Parameters<Sampling>,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResult, ErrorData> {
        let messages = vec![SamplingMessage::user_text(prompt)];
        let request = CreateMessageRequestParams::new(messages, 100);
        let sampled = context.peer.create_message(request).await;
        let message = sampled.map_err(internal)?.message;
        let response = message.content.first().and_then(|block| block.as_text());
        let response = response.map_or("", |block| &block.text);
        Ok(text(format!("LLM response: {response}")))
    }

    #[tool(description = "Asks the user for a name and an address")]
    async fn test_elicitation(
        &self,
        Parameters(Elicitation { message }): Parameters<Elicitation>,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResult, ErrorData> {
        let result = elicit(&context, message, user()).await?;
        Ok(text(format!("User response: {}", described(&result))))
    }

    #[tool(description = "Asks the user, with a default for each type")]
    async fn test_elicitation_sep1034_defaults(
        &self,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResult, ErrorData> {
        let result = elicit(&context, "Is this right?".into(), defaults()).await?;
        Ok(text(format!(
            "Elicitation completed: {}",
            described(&result)
        )))
    }

    #[tool(description = "Asks the user, with each kind of choice")]
    async fn test_elicitation_sep1330_enums(
        &self,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResult, ErrorData> {
        let result = elicit(&context, "Which ones?".into(), enums()).await?;
        Ok(text(format!(
            "Elicitation completed: {}",
            described(&result)
        )))
    }
}

async fn elicit(
    context: &RequestContext<RoleServer>,
    message: String,
    schema: JsonObject,
) -> Result<ElicitResult, ErrorData> {
    let requested_schema = ElicitationSchema::from_json_schema(schema).map_err(internal)?;
    let request = ElicitRequestParams::FormElicitationParams {
        meta: None,
        message,
        requested_schema,
    };
    let asked = context.peer.create_elicitation(request).await;
    asked.map_err(internal)
}

fn described(result: &ElicitResult) -> String {
    let action = format!("{:?}", result.action).to_lowercase();
    let content = result.content.clone().unwrap_or_default();
    format!("action={action}, content={content}")
}

fn user() -> JsonObject {
    object!({
        "type": "object",
        "properties": {
            "username": { "type": "string", "description": "User's response" },
            "email": { "type": "string", "description": "User's email address" },
        },
        "required": ["username", "email"],
    })
}

fn defaults() -> JsonObject {
    object!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "default": "John Doe" },
            "age": { "type": "integer", "default": 30 },
            "score": { "type": "number", "default": 95.5 },
            "status": {
                "type": "string",
                "enum": ["active", "inactive", "pending"],
                "default": "active",
            },
            "verified": { "type": "boolean", "default": true },
        },
    })
}

fn enums() -> JsonObject {
    object!({
        "type": "object",
        "properties": {
            "untitledSingle": { "type": "string", "enum": ["option1", "option2", "option3"] },
            "titledSingle": {
                "type": "string",
                "oneOf": [
                    { "const": "value1", "title": "First Option" },
                    { "const": "value2", "title": "Second Option" },
                    { "const": "value3", "title": "Third Option" },
                ],
            },
            "legacyEnum": {
                "type": "string",
                "enum": ["opt1", "opt2", "opt3"],
                "enumNames": ["Option One", "Option Two", "Option Three"],
            },
            "untitledMulti": {
                "type": "array",
                "items": { "type": "string", "enum": ["option1", "option2", "option3"] },
            },
            "titledMulti": {
                "type": "array",
                "items": {
                    "anyOf": [
                        { "const": "value1", "title": "First Choice" },
                        { "const": "value2", "title": "Second Choice" },
                        { "const": "value3", "title": "Third Choice" },
                    ],
                },
            },
        },
    })
}
