//! Attributes a source line to the crate, a container's caller, or another package.

use std::path::Path;

use anyhow::Result;

/// Crates whose code runs on behalf of its caller. A location in one of them identifies no owner.
const CONTAINERS: &str = "bytes futures-channel futures-core futures-util hashbrown http http-body-util lock_api parking_lot tokio tokio-util";

/// The code that a location is attributed to.
#[derive(Debug, PartialEq)]
pub enum Owner<'a> {
    /// Code that works for its caller.
    Container,
    /// The crate, at this location.
    Layer(&'a str),
    /// Another package, such as rmcp or the bench.
    Other(&'a str),
}

/// Returns the path to the crate's sources, with a trailing slash.
pub fn root() -> Result<String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../src");
    Ok(format!("{}/", source.canonicalize()?.display()))
}

/// Returns the owner of `place`, which is either `path:line` or `in library`.
pub fn owner<'a>(place: &'a str, root: &str) -> Owner<'a> {
    if let Some(place) = place.strip_prefix(root) {
        return Owner::Layer(place);
    }
    let unknown = ["in ", "/rustc/", "/rust/", "?", "./", "../"];
    if unknown.iter().any(|start| place.starts_with(start)) {
        return Owner::Container;
    }
    // A package is a `NAME-VERSION` directory inside its registry.
    let package = place.split_once("/registry/src/");
    let package = package.and_then(|(_, path)| path.split('/').nth(1));
    let name = package.and_then(|package| package.rsplit_once('-'));
    match name {
        Some((name, _)) if CONTAINERS.split(' ').any(|container| container == name) => {
            Owner::Container
        }
        Some((name, _)) => Owner::Other(name),
        None => Owner::Other("the bench"),
    }
}
