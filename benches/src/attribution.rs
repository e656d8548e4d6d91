//! The owner of a line of code: the crate, the caller of a container, or somebody else.

use std::path::Path;

use anyhow::Result;

/// Crates that work for whoever calls them: a place in one of these says nothing.
const CONTAINERS: &str = "bytes futures-channel futures-core futures-util hashbrown http http-body-util lock_api parking_lot tokio tokio-util";

#[derive(Debug, PartialEq)]
pub enum Owner<'a> {
    /// Works for its caller.
    Container,
    /// The crate, at this place.
    Layer(&'a str),
    /// This one: rmcp, the bench, ...
    Other(&'a str),
}

/// Where the crate's sources are, with a slash at the end.
pub fn root() -> Result<String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../src");
    Ok(format!("{}/", source.canonicalize()?.display()))
}

/// A place is `path:line`, or `in library`.
pub fn owner<'a>(place: &'a str, root: &str) -> Owner<'a> {
    if let Some(place) = place.strip_prefix(root) {
        return Owner::Layer(place);
    }
    let unknown = ["in ", "/rustc/", "/rust/", "?", "./", "../"];
    if unknown.iter().any(|start| place.starts_with(start)) {
        return Owner::Container;
    }
    // A package is `NAME-VERSION`, in a folder of its registry.
    let package = place.split_once("/registry/src/");
    let package = package.and_then(|(_, path)| path.split('/').nth(1));
    let name = package.and_then(|package| package.rsplit_once('-'));
    match name {
        Some((name, _)) if CONTAINERS.split(' ').any(|one| one == name) => Owner::Container,
        Some((name, _)) => Owner::Other(name),
        None => Owner::Other("the bench"),
    }
}
