//! The resources.

use rmcp::model::{Resource, ResourceContents, ResourceTemplate};
use serde_json::json;

use crate::sample::PNG;

const TEXT: &str = "test://static-text";
const BINARY: &str = "test://static-binary";
const WATCHED: &str = "test://watched-resource";
const TEMPLATE: [&str; 2] = ["test://template/", "/data"];

pub(crate) fn list() -> Vec<Resource> {
    vec![
        Resource::new(TEXT, "Static text")
            .with_description("Text that never changes")
            .with_mime_type("text/plain"),
        Resource::new(BINARY, "Static image")
            .with_description("An image that never changes")
            .with_mime_type("image/png"),
        Resource::new(WATCHED, "Watched resource")
            .with_description("One to subscribe to; it never changes either")
            .with_mime_type("text/plain"),
    ]
}

pub(crate) fn templates() -> Vec<ResourceTemplate> {
    let [before, after] = TEMPLATE;
    vec![
        ResourceTemplate::new(format!("{before}{{id}}{after}"), "Template")
            .with_description("Data of any id")
            .with_mime_type("application/json"),
    ]
}

pub(crate) fn read(uri: &str) -> Option<ResourceContents> {
    let contents = match uri {
        TEXT => {
            let text = "This is the content of the static text resource.";
            ResourceContents::text(text, uri).with_mime_type("text/plain")
        }
        BINARY => ResourceContents::blob(PNG, uri).with_mime_type("image/png"),
        WATCHED => {
            ResourceContents::text("Watched resource content", uri).with_mime_type("text/plain")
        }
        _ => {
            let [before, after] = TEMPLATE;
            let id = uri.strip_prefix(before)?.strip_suffix(after)?;
            let data = format!("Data for ID: {id}");
            let text = json!({ "id": id, "templateTest": true, "data": data }).to_string();
            ResourceContents::text(text, uri).with_mime_type("application/json")
        }
    };
    Some(contents)
}
