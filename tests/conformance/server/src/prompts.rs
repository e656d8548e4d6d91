//! The prompts.

use rmcp::{
    handler::server::wrapper::Parameters,
    model::{ContentBlock, PromptMessage, ResourceContents, Role},
    prompt, prompt_router, schemars,
};
use serde::Deserialize;

use crate::{handler::Conformance, sample::PNG};

#[derive(Deserialize, schemars::JsonSchema)]
struct Two {
    /// First test argument
    arg1: String,
    /// Second test argument
    arg2: String,
}

#[derive(Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
struct Embed {
    /// URI of the resource to embed
    resource_uri: String,
}

#[prompt_router(router = "prompts", vis = "pub(crate)")]
impl Conformance {
    #[prompt(description = "A prompt without arguments")]
    async fn test_simple_prompt(&self) -> Vec<PromptMessage> {
        vec![user("This is a simple prompt for testing.")]
    }

    #[prompt(description = "A prompt with two arguments")]
    async fn test_prompt_with_arguments(
        &self,
        Parameters(Two { arg1, arg2 }): Parameters<Two>,
    ) -> Vec<PromptMessage> {
        let text = format!("Prompt with arguments: arg1='{arg1}', arg2='{arg2}'");
        vec![user(text)]
    }

    #[prompt(description = "A prompt with an embedded resource")]
    async fn test_prompt_with_embedded_resource(
        &self,
        Parameters(Embed { resource_uri }): Parameters<Embed>,
    ) -> Vec<PromptMessage> {
        let text = "Embedded resource content for testing.";
        let resource = ResourceContents::text(text, resource_uri).with_mime_type("text/plain");
        vec![
            PromptMessage::new(Role::User, ContentBlock::resource(resource)),
            user("Please process the embedded resource above."),
        ]
    }

    #[prompt(description = "A prompt with an image")]
    async fn test_prompt_with_image(&self) -> Vec<PromptMessage> {
        vec![
            PromptMessage::new(Role::User, ContentBlock::image(PNG, "image/png")),
            user("Please analyze the image above."),
        ]
    }
}

fn user(text: impl Into<String>) -> PromptMessage {
    PromptMessage::new_text(Role::User, text)
}
